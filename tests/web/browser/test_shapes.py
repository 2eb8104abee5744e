"""Conversations as the adapters store them can be read: roles, text, calls with their results."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from playwright.sync_api import expect
from pydantic_ai.conversation import Conversation
from pydantic_ai.messages import (
    BinaryContent,
    ModelRequest,
    ModelResponse,
    SystemPromptPart,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)

import holdfast
from holdfast.adapters.claude_agent_sdk import HoldfastSessionStore
from holdfast.adapters.langgraph import HoldfastSaver
from holdfast.adapters.pydantic_ai import HoldfastConversationStore
from holdfast.adapters.strands import HoldfastSessionManager
from tests.adapters import graphs
from tests.adapters.test_strands import LATEST, planner
from tests.support.stores import Home
from tests.web.browser.chromium import Viewer
from tests.web.browser.conftest import Look

pytestmark = pytest.mark.tools("chromium")

PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR42mNgAAAAAgAB5Sfe/AAAAABJRU5ErkJggg=="
)


def done(work: Coroutine[Any, Any, Any]) -> None:
    """In a thread: this one has the browser's loop."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, work).result()


def looked(look: Look, store: holdfast.Store, name: str, roles: list[str]) -> Viewer:
    viewer = look(store, f"s={name}&t=messages")
    expect(viewer.panel.locator(".message > header .role")).to_have_text(roles)
    return viewer


def test_langgraph(memory: Home, look: Look) -> None:
    graphs.tools(HoldfastSaver(memory.store), "sync")
    turn = ["user", "assistant", "assistant"]  # results lie with their calls
    viewer = looked(look, memory.store, "t", turn * 2)
    panel = viewer.panel
    expect(panel.locator(".message.user").first).to_contain_text("And now? 0")
    expect(panel.locator(".call")).to_have_count(4)
    expect(panel.locator(".call.open")).to_have_count(0)
    expect(panel.locator(".call", has_text="Oslo").first).to_contain_text("Oslo: rain")
    changed = viewer.tab("Changes").locator(".changes .message")
    expect(changed).to_contain_text("It is like this: Rome")


def test_strands(memory: Home, look: Look) -> None:
    manager = HoldfastSessionManager("s", memory.store)
    agent = planner(manager, [], second=lambda: [{"text": "2"}, {"json": {"deep": 7}}])
    agent("go")
    name = LATEST.format("s")
    viewer = looked(look, memory.store, name, ["user", "assistant", "assistant"])
    panel = viewer.panel
    expect(panel.locator(".message.user")).to_contain_text("go")
    expect(panel.locator(".call")).to_have_count(2)
    expect(panel.locator(".call", has_text="two").locator(".result")).to_contain_text("deep")
    expect(panel.locator(".message").last).to_contain_text("fine")
    asked = next(c for c in memory.store.session(name).history() if c.pending)
    viewer.open(f"s={name}&c={asked.id}&t=messages")
    expect(panel.locator(".call.open")).to_have_count(2)


def test_pydantic_ai(memory: Home, look: Look) -> None:
    talk = Conversation(conversation_id="talk")
    prompt = UserPromptPart(["Look at *this*", BinaryContent(PIXEL, media_type="image/png")])
    calls = [
        ToolCallPart("weather", {"city": city}, tool_call_id=city) for city in ("Oslo", "Bonn")
    ]
    talk.messages += [
        ModelRequest(parts=[SystemPromptPart("Be brief."), prompt]),
        ModelResponse(parts=[ThinkingPart("Hm."), TextPart("I ask."), *calls]),
        ModelRequest(parts=[ToolReturnPart("weather", "Oslo: rain", tool_call_id="Oslo")]),
    ]
    done(HoldfastConversationStore(memory.store).save(talk))
    viewer = looked(look, memory.store, "talk", ["user", "assistant"])
    panel = viewer.panel
    expect(panel.locator(".message.user")).to_contain_text("Look at this")
    expect(panel.locator(".message.user summary")).to_have_text("System")
    shown = panel.locator(".message.user img")
    assert shown.evaluate("image => image.decode().then(() => image.naturalWidth)") == 1
    expect(panel.locator(".thinking summary").last).to_have_text("Thinking")
    expect(panel.locator(".call").first).to_contain_text("Oslo: rain")
    expect(panel.locator(".call.open")).to_contain_text("Bonn")
    expect(panel.locator(".call.open")).to_contain_text("no result yet")


def test_claude_agent_sdk(memory: Home, look: Look) -> None:
    use: dict[str, Any] = {"type": "tool_use", "id": "t1", "name": "Read", "input": {"path": "a"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "all of a"}
    entries: list[Any] = [
        {"type": "user", "uuid": "1", "message": {"role": "user", "content": "Read a."}},
        {"type": "assistant", "uuid": "2", "message": {"role": "assistant", "content": [use]}},
        {"type": "user", "uuid": "3", "message": {"role": "user", "content": [result]}},
    ]
    key: Any = {"project_key": "proj", "session_id": "sess"}
    done(HoldfastSessionStore(memory.store).append(key, entries))
    viewer = looked(look, memory.store, "proj/sess", ["user", "assistant"])
    expect(viewer.panel.locator(".call")).to_contain_text("all of a")


def test_a_call_that_langchain_tells_twice_is_shown_once(memory: Home, look: Look) -> None:
    use = {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "it"}}
    call = {"type": "tool_call", "id": "t1", "name": "look", "args": {"at": "it"}}
    message = {
        "type": "ai",
        "content": [{"type": "text", "text": "So."}, use],
        "tool_calls": [call],
    }
    memory.session("s").save({"messages": [message]})
    viewer = looked(look, memory.store, "s", ["assistant"])
    expect(viewer.panel.locator(".call.open")).to_have_count(1)
