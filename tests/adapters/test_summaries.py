"""Checkpoints that adapters and importers save say what happened, and have a transcript."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.importers import import_
from tests.adapters import test_openai_agents as openai_agents
from tests.adapters import test_pydantic_ai as pydantic_ai
from tests.adapters import test_strands as strands
from tests.adapters.graphs import tools
from tests.importers import test_checkpoints as foreign

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def store() -> Iterator[holdfast.Store]:
    with holdfast.open("memory:") as store:
        yield store


def lines(session: holdfast.Session) -> list[str]:
    return [str(c.summary) for c in session.history(summary=True)][::-1]


def said(session: holdfast.Session) -> list[str]:
    return [*map(str, session.transcript())]


def test_langgraph(store: holdfast.Store) -> None:
    from holdfast.adapters.langgraph import HoldfastSaver

    tools(HoldfastSaver(store), "sync")
    [info] = [info for info in store.sessions() if info.checkpoints > 3]
    session = store.session(info.name)
    told = lines(session)
    asked = "→ weather(city='Oslo')  → weather(city='Rome')"
    found = "← Oslo: rain  ← Rome: rain"
    answer = "assistant: It is like this: Rome: rain"
    assert [line for line in told if line[0] in "u→←a"][:5] == [
        "user: And now? 0",  # the input of the graph, and then the channel of messages
        "user: And now? 0", asked, found, answer,
    ]  # fmt: skip
    assert said(session)[:5] == [
        "user: And now? 0", "→ weather(city='Oslo')", "← Oslo: rain", "→ weather(city='Rome')",
        "← Rome: rain",
    ]  # fmt: skip


def test_openai_agents(store: holdfast.Store) -> None:
    from holdfast.adapters.openai_agents import HoldfastSession

    asyncio.run(openai_agents.play(openai_agents.tools, HoldfastSession("s", store), "plain"))
    session = store.session("s")
    told = lines(session)
    assert told[0] == "user: plan it"
    assert told[-1] == "assistant: done"
    assert any(line.startswith(("→ ", "← ")) for line in told)
    assert said(session)[0] == "user: plan it"
    kinds = [part.kind for part in session.transcript()]
    calls = [n for n, kind in enumerate(kinds) if kind == "call"]
    assert calls
    assert all(kinds[n + 1] == "result" for n in calls)


def test_pydantic_ai(store: holdfast.Store) -> None:
    from pydantic_ai.conversation import Conversation

    from holdfast.adapters.pydantic_ai import HoldfastCheckpoints, HoldfastConversationStore

    agent = pydantic_ai.planner(HoldfastCheckpoints(HoldfastConversationStore(store)), [])
    asyncio.run(agent.run("go", conversation=Conversation(conversation_id="r")))
    told = lines(store.session("r"))
    assert told[:3] == ["user: go", "→ one()  → two()", "← 1"]
    assert told[-1].startswith("assistant: 1 2")
    assert said(store.session("r")) == [
        "user: go", "→ one()", "← 1", "→ two()", "← 2", "assistant: 1 2",
    ]  # fmt: skip


def test_strands(store: holdfast.Store) -> None:
    from holdfast.adapters.strands import HoldfastSessionManager

    strands.planner(HoldfastSessionManager("s", store), [])("go")
    session = store.session(strands.LATEST.format("s"))
    assert lines(session) == [
        "user: go", "→ one()  → two()", "← 1  ← 2", "assistant: fine", "completed",
    ]  # fmt: skip
    assert said(session) == ["user: go", "→ one()", "← 1", "→ two()", "← 2", "assistant: fine"]


def test_claude_agent_sdk(store: holdfast.Store) -> None:
    from holdfast.adapters.claude_agent_sdk import HoldfastSessionStore
    from tests.adapters.test_claude_agent_sdk import KEY

    entries: list[Any] = [
        {"type": "user", "uuid": "1", "message": {"role": "user", "content": "Hi"}},
        {
            "type": "assistant",
            "uuid": "2",
            "message": {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "t", "name": "Read", "input": {"p": "a"}}],
            },
        },
    ]
    adapter = HoldfastSessionStore(store)
    for entry in entries:
        asyncio.run(adapter.append(KEY, [entry]))
    [info] = store.sessions()
    assert lines(store.session(info.name)) == ["user: Hi", "→ Read(p='a')"]
    assert said(store.session(info.name)) == ["user: Hi", "→ Read(p='a')"]


@pytest.mark.parametrize("format", ["s0", "s1", "s3"])
def test_checkpoints_of_other_stores(store: holdfast.Store, tmp_path: Path, format: str) -> None:
    make = {"s0": foreign.s0_data, "s1": foreign.s1_data, "s3": foreign.s3_data}[format]
    for n in range(3):
        data = make(n)
        path = {"s0": f"x/checkpoints/cp_{n}.json", "s3": f"agent/{n}.json"}
        place = tmp_path / path.get(format, f"{data.get('session_id')}_{n}.json")
        foreign.write(place, foreign.with_checksum(data) if format == "s0" else data)
    assert import_(store, tmp_path, format).checkpoints == 3  # type: ignore[arg-type]
    [info] = store.sessions()
    session = store.session(info.name)
    newest = session.transcript()[-1]
    assert lines(session)[-1] == str(newest)
    assert len(session.transcript()) == 3


@pytest.mark.parametrize("format", ["openai-chat", "claude-code"])
def test_transcripts(store: holdfast.Store, tmp_path: Path, format: str) -> None:
    if format == "openai-chat":
        data = {
            "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
        }
        (tmp_path / "chat.json").write_text(json.dumps(data))
    else:
        common = {"sessionId": "s", "isSidechain": False, "timestamp": "2025-03-01T10:00:00Z"}
        first = {"type": "user", "uuid": "1", "parentUuid": None}
        text = {"type": "text", "text": "Ho"}
        second = {"type": "assistant", "uuid": "2", "parentUuid": "1"}
        told = [
            common | first | {"message": {"role": "user", "content": "Hi"}},
            common | second | {"message": {"role": "assistant", "content": [text]}},
        ]
        (tmp_path / "s.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))
    import_(store, tmp_path, format)  # type: ignore[arg-type]
    [info] = store.sessions()
    assert lines(store.session(info.name))[-1] == "assistant: Ho (+1)"
    assert said(store.session(info.name)) == ["user: Hi", "assistant: Ho"]
