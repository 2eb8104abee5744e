"""Sessions of the OpenAI Agents SDK: as its own ones, and what survives besides."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
from agents import (
    Agent,
    ModelRetrySettings,
    ModelSettings,
    RunHooks,
    Runner,
    Session,
    SessionSettings,
    SQLiteSession,
    Usage,
    UserError,
    function_tool,
    set_tracing_disabled,
)
from agents.testing import ModelStep, ScriptedModel, assistant_message, function_call
from openai.types.responses import ResponseReasoningItem
from openai.types.responses.response_output_item import LocalShellCall, LocalShellCallAction

import holdfast
from holdfast.adapters.openai_agents import HoldfastSession, newest
from holdfast.errors import (
    InDoubt,
    InvalidRequest,
    NotSerializable,
    SessionExists,
    SessionNotFound,
    Unavailable,
)
from tests.adapters.loops import asynchronous
from tests.support.stores import Home

if TYPE_CHECKING:
    from collections.abc import Callable

set_tracing_disabled(True)


def said(text: Any, role: str = "user") -> Any:
    return {"role": role, "content": text}


def called(id: str, name: str = "book", **more: Any) -> Any:
    return {"type": "function_call", "call_id": id, "name": name, "arguments": "{}", **more}


def returned(id: str, output: str = "ok") -> Any:
    return {"type": "function_call_output", "call_id": id, "output": output}


def reasoning(id: str) -> Any:
    return {"type": "reasoning", "id": id, "summary": []}


def call(id: str, name: str = "look", **arguments: Any) -> Any:
    return function_call(name, arguments, call_id=id)


@function_tool
def look(place: str = "here") -> str:
    """Look at a place."""
    return f"{place} is fine"


@function_tool
async def book(place: str = "here") -> dict[str, Any]:
    """Book a place."""
    return {"booked": place}


@function_tool
def fail() -> str:
    """Fail."""
    raise RuntimeError("no luck")


# -- as the SDK's own session ----------------------------------------------------------------------


def told(*steps: Any, **more: Any) -> Agent[Any]:
    model = ScriptedModel(
        steps, default_usage=Usage(requests=1, input_tokens=6, output_tokens=4, total_tokens=10)
    )
    return Agent(name="planner", model=model, tools=[look, book, fail], **more)


def tools() -> tuple[Agent[Any], list[Any]]:
    steps = [
        [call("1", place="A"), call("2", "book", place="B")],
        [call("3", place="C")],
        [assistant_message("done")],
    ]
    return told(*steps), ["plan it"]


def talk() -> tuple[Agent[Any], list[Any]]:
    steps = [[assistant_message("yes")], [call("1")], [assistant_message("no")], []]
    return told(*steps[:3], [assistant_message("ü 🦀")]), [
        "one",
        "two",
        [said("three"), said("3½")],
    ]


def failing() -> tuple[Agent[Any], list[Any]]:
    return told([call("1", "fail"), call("2")], [assistant_message("pity")]), ["try"]


def handoffs() -> tuple[Agent[Any], list[Any]]:
    second = told([call("2")], [assistant_message("from the other")])
    second.name = "other"
    steps = [[assistant_message("wait"), call("1", "transfer_to_other")]]
    return told(*steps, handoffs=[second]), ["hand it over"]


def thinking() -> tuple[Agent[Any], list[Any]]:
    thought = ResponseReasoningItem(id="rs_1", summary=[], type="reasoning")
    return told([thought, call("1")], [assistant_message("thought")]), ["think"]


def retries() -> tuple[Agent[Any], list[Any]]:
    again = ModelRetrySettings(
        max_retries=2, backoff={"initial_delay": 0, "jitter": False}, policy=lambda _: True
    )
    steps = [
        [call("1")],
        ModelStep.raise_error(ConnectionError("cut")),
        ModelStep.raise_error(ConnectionError("cut")),
        [assistant_message("at last")],
    ]
    return told(*steps, model_settings=ModelSettings(retry=again)), ["insist"]


SCRIPTS = [tools, talk, failing, handoffs, thinking, retries]


async def play(script: Any, session: Any, how: str) -> list[Any]:
    agent, inputs = script()
    for each in inputs:
        if how == "streamed":
            result = Runner.run_streamed(agent, each, session=session)
            async for _ in result.stream_events():
                pass
        elif how == "hooks":
            await session.run(agent, each)
        else:
            await Runner.run(agent, each, session=session)
    agent.model.assert_complete()
    items: list[Any] = await session.get_items()
    return items


async def compare(home: Home, script: Any, how: str) -> None:
    own = SQLiteSession("s")
    expected = await play(script, own, "streamed" if how == "streamed" else "plain")
    own.close()
    session = HoldfastSession("s", home.store)
    assert isinstance(session, Session)
    assert await play(script, session, how) == expected
    assert len(expected) > 1
    assert await session.pending() == []
    assert await HoldfastSession("s", home.another()).get_items() == expected


@pytest.mark.parametrize("how", ["plain", "hooks", "streamed"])
@pytest.mark.parametrize("script", SCRIPTS)
@asynchronous
async def test_the_items_are_those_of_the_sdks_own_session(memory: Home, script, how):
    await compare(memory, script, how)


@pytest.mark.parametrize("home", ["sqlite", "files", "postgres"], indirect=True)
@asynchronous
async def test_so_they_are_wherever_they_are_kept(home: Home):
    for script in SCRIPTS:
        await compare(home, script, "hooks")
        home.store.session("s").delete()


ODD: list[Any] = [
    said("plain"),
    {"role": "user", "content": [{"type": "input_text", "text": "é\x00\ud800"}], "n": 2**80},
    {"b": 1, "a": {"x": [None, True, 1.5, -0.0, [], {}, ""]}, "type": "odd"},
    {"type": "message", "id": "", "provider_data": {"k" * 300: "v" * 9000}},
]


@asynchronous
async def test_items_come_back_as_they_were(home: Home):
    session = HoldfastSession("s", home.store)
    assert await session.get_items() == []
    assert await session.pop_item() is None
    await session.add_items([])
    await session.add_items(ODD[:1])
    await session.add_items(ODD[1:])
    later = HoldfastSession("s", home.another())
    assert json.dumps(await later.get_items()) == json.dumps(ODD)  # the order of keys, too
    for item in reversed(ODD):
        assert await later.pop_item() == item
    assert await session.pop_item() is None
    assert await session.get_items() == []


@asynchronous
async def test_what_is_got_is_the_callers_own(memory: Home):
    session = HoldfastSession("s", memory.store)
    item = said(["x"])
    await session.add_items([item])
    item["content"].append("y")
    got: Any = await session.get_items()
    got[0]["content"].append("z")
    assert await session.get_items() == [said(["x"])]


# -- limits ----------------------------------------------------------------------------------------

TALK: list[Any] = [
    said("one"),
    reasoning("r1"),
    called("a"),
    called("b"),
    returned("a"),
    returned("b"),
    said("yes", "assistant"),
    said("two"),
]


@pytest.mark.parametrize(
    ("limit", "start"),
    [(0, 8), (1, 7), (2, 6), (3, 1), (4, 1), (5, 1), (6, 1), (7, 1), (8, 0), (99, 0), (-1, 0)],
)
@asynchronous
async def test_a_limit_never_takes_a_result_from_its_call(memory: Home, limit, start):
    session = HoldfastSession("s", memory.store)
    await session.add_items(TALK)
    assert await session.get_items(limit) == TALK[start:]
    short = HoldfastSession("s", memory.store, session_settings=SessionSettings(limit=limit))
    assert await short.get_items() == TALK[start:]
    assert await short.get_items(8) == TALK


def test_what_needs_no_more_is_cut_where_it_is_told():
    assert newest([*TALK, called("a"), returned("a")], 2) == [called("a"), returned("a")]
    assert newest([returned("lost"), said("x")], 2) == [returned("lost"), said("x")]
    chain = [called("1"), called("2"), returned("1"), called("3"), returned("2"), returned("3")]
    assert newest(chain, 2) == chain  # 3 needs what stands between 2 and its result, and so on


@pytest.mark.parametrize("seed", range(20))
def test_any_limit_leaves_a_conversation_that_stands_alone(seed):
    rng = random.Random(seed)
    items: list[Any] = []
    waiting: list[str] = []
    for n in range(40):
        roll = rng.randrange(4)
        if roll == 0:
            items.append(said(str(n)))
        elif roll == 1:
            items += [reasoning(f"r{n}"), called(f"c{n}")]
            waiting.append(f"c{n}")
        elif waiting:
            items.append(returned(waiting.pop(rng.randrange(len(waiting)))))
    for limit in range(len(items) + 1):
        got = newest(items, limit)
        assert got == items[len(items) - len(got) :]
        assert len(got) >= limit
        calls = {i["call_id"] for i in got if i.get("type") == "function_call"}
        assert calls >= {i["call_id"] for i in got if i.get("type") == "function_call_output"}
        assert not got or got[0].get("type") != "function_call", "its reasoning is cut off"
        assert newest(items, len(got)) == got, "the SDK compares what it read before and after"


@asynchronous
async def test_a_run_with_a_limit_has_whole_pairs(memory: Home):
    session = HoldfastSession("s", memory.store, session_settings=SessionSettings(limit=3))
    await session.add_items(TALK[:6])
    agent = told([assistant_message("go on")])
    await Runner.run(agent, "and now?", session=session)
    sent = agent.model.last_call.input  # type: ignore[union-attr]
    assert [i["call_id"] for i in sent if "call_id" in i] == ["a", "b", "a", "b"]


@asynchronous
async def test_settings_may_be_a_dict_as_in_the_sdk(memory: Home):
    session = HoldfastSession("s", memory.store, session_settings={"limit": 2})
    assert session.session_settings == SessionSettings(limit=2)
    await session.add_items([said("one"), said("two"), said("three")])
    assert await session.get_items() == [said("two"), said("three")]
    agent = told([assistant_message("go on")])
    await Runner.run(agent, "and now?", session=session)
    assert len(agent.model.last_call.input) == 3  # type: ignore[union-attr]
    assert (await session.fork("other")).session_settings == SessionSettings(limit=2)


@pytest.mark.parametrize("settings", [{"limt": 2}, 2])
def test_settings_that_the_sdk_does_not_know_are_refused_before_a_store_is_made(tmp_path, settings):
    with pytest.raises(TypeError, match="session"):
        HoldfastSession("s", tmp_path / "a.db", session_settings=settings)
    assert [*tmp_path.iterdir()] == []


# -- the call that was cut off ---------------------------------------------------------------------

CRASH = """
import asyncio, os, sys, holdfast
from agents import Agent, Runner, SQLiteSession, function_tool, set_tracing_disabled
from agents.testing import ScriptedModel, function_call
from holdfast.adapters.openai_agents import HoldfastSession

set_tracing_disabled(True)
how, kind, url, schema = sys.argv[1:]
first_is_done = asyncio.Event()

@function_tool
def look(place: str) -> str:
    "Look."
    first_is_done.set()
    return place + " is fine"

@function_tool
async def book(place: str) -> str:
    "Book."
    if how == "parallel":
        await first_is_done.wait()
        while watched and "done" not in [c.stage for c in await session.pending()]:
            await asyncio.sleep(0)
    os._exit(9)

calls = [function_call("look", {"place": "A"}, call_id="1"),
         function_call("book", {"place": "B"}, call_id="2")]
steps = [calls] if how == "parallel" else [[c] for c in calls]
agent = Agent(name="planner", model=ScriptedModel(steps), tools=[look, book])
watched = kind == "holdfast"
if watched:
    options = {"schema": schema} if schema else {}
    session = HoldfastSession("s", holdfast.open(url, **options))
else:
    session = SQLiteSession("s", url)

async def work():
    hooks = session.hooks() if watched else None
    await Runner.run(agent, "plan it", session=session, hooks=hooks)

asyncio.run(work())
"""


def crash(how: str, kind: str, url: Any, schema: str = "") -> None:
    words = [sys.executable, "-c", CRASH, how, kind, str(url), schema]
    done = subprocess.run(words, check=False, timeout=120)
    assert done.returncode == 9


@pytest.fixture
def left(how: str, tmp_path):
    """What the SDK's own session has after the same crash."""
    path = tmp_path / "own.db"
    crash(how, "sqlite", path)
    own = SQLiteSession("s", path)
    found = asyncio.run(own.get_items())
    own.close()
    return found


@pytest.mark.parametrize(
    ("home", "how"),
    [
        ("sqlite", "parallel"), ("postgres", "in turn"),
        *[pytest.param(*more, marks=pytest.mark.torture)
          for more in [("sqlite", "in turn"), ("files", "parallel")]],
    ],
    indirect=["home"],
)  # fmt: skip
@asynchronous
async def test_a_crash_in_the_second_tool_leaves_the_call(home: Home, how, left):
    home.close()
    crash(how, "holdfast", home.url, home.schema if home.kind == "postgres" else "")
    session = HoldfastSession("s", home.reopened())
    assert await session.get_items() == left
    found = {c.name: (c.id, c.arguments, c.stage, c.output) for c in await session.pending()}
    second = {"book": ("2", {"place": "B"}, "started", None)}
    first = {"look": ("1", {"place": "A"}, "done", "A is fine")} if how == "parallel" else {}
    assert found == first | second
    head = (await session.history())[0]
    assert [c.name for c in head.pending] == ["book"]

    agent = told([assistant_message("what was that?")])
    await session.run(agent, "go on")
    sent: Any = agent.model.last_call.input  # type: ignore[union-attr]
    outputs = {i["call_id"] for i in sent if i.get("type") == "function_call_output"}
    assert {i["call_id"] for i in sent if i.get("type") == "function_call"} == outputs
    assert (await session.get_items())[: len(left)] == left
    assert "2" in {c.id for c in await session.pending()}, "it is in doubt whatever runs next"


@asynchronous
async def test_pending_calls_can_be_told_to_the_model(home: Home):
    session = HoldfastSession("s", home.store)
    hooks: Any = session.hooks()
    await session.add_items([said("go")])
    thought = ResponseReasoningItem(id="rs_1", summary=[], type="reasoning")
    asked = [thought, *[call(id, "book", n=id) for id in "1234"]]
    await _answer(hooks, *asked)
    for id in "123":
        await _start(hooks, id)
    await _end(hooks, "1", "booked")
    await _end(hooks, "3", {"a": 1})
    with pytest.raises(InvalidRequest, match="'9'"):
        await session.settle({"9": "x"})
    later = HoldfastSession("s", home.another())
    assert [c.stage for c in await later.pending()] == ["done", "started", "done", "asked"]
    assert {c.agent for c in await later.pending()} == {"planner"}
    settled = await later.settle({"2": "never happened"})
    assert [c.id for c in settled] == ["1", "2", "3", "4"]
    assert await later.pending() == []
    items: Any = await later.get_items()
    kinds = [i.get("type") for i in items]
    assert kinds == [None, "reasoning", *["function_call"] * 4, *["function_call_output"] * 4]
    told = [i["output"] for i in items[6:]]
    assert told[:3] == ["booked", "never happened", "{'a': 1}"]
    assert told[3].startswith("Not carried out")
    assert await later.settle() == []


@asynchronous
async def test_what_is_in_doubt_is_said_to_be(memory: Home):
    session = HoldfastSession("s", memory.store)
    hooks: Any = session.hooks()
    await _answer(hooks, call("1"))
    await _start(hooks, "1")
    await session.settle()
    items: Any = await session.get_items()
    assert "may have had its effect" in items[1]["output"]


@asynchronous
async def test_a_call_of_a_shell_is_listed_but_not_told(memory: Home):
    """Nobody says which call it is that begins, and its result is no text."""
    session = HoldfastSession("s", memory.store)
    hooks: Any = session.hooks()
    action = LocalShellCallAction(type="exec", command=["ls"], env={})
    shell = LocalShellCall(
        id="x", type="local_shell_call", call_id="2", action=action, status="completed"
    )
    await _answer(hooks, call("1"), shell)
    await hooks.on_tool_start(None, Agent(name="planner"), None)
    await hooks.on_tool_end(None, Agent(name="planner"), None, "out")
    found = {c.id: (c.name, c.stage) for c in await session.pending()}
    assert found == {"1": ("look", "asked"), "2": ("local_shell", "started")}
    await session.settle()
    assert [i.get("call_id") for i in await session.get_items()] == ["1", "1"]


@asynchronous
async def test_pending_calls_can_be_dismissed(memory: Home):
    session = HoldfastSession("s", memory.store)
    await _answer(session.hooks(), call("1"))
    await session.dismiss()
    assert await session.pending() == []
    assert await session.get_items() == []
    await session.undo()
    assert [c.id for c in await session.pending()] == ["1"]


@asynchronous
async def test_what_was_only_asked_for_goes_with_the_next_answer(memory: Home):
    session = HoldfastSession("s", memory.store)
    hooks: Any = session.hooks()
    await _answer(hooks, call("1"), call("2"))
    await _start(hooks, "2")
    await _answer(hooks, call("3"))
    assert [(c.id, c.stage) for c in await session.pending()] == [("2", "started"), ("3", "asked")]


@asynchronous
async def test_no_tool_begins_that_is_not_written_down(sqlite: Home):
    begun = []

    @function_tool
    def act() -> str:
        """Act."""
        begun.append(1)
        return "done"

    session = HoldfastSession("s", sqlite.store)

    class Breaking(RunHooks[Any]):
        async def on_llm_end(self, *told: Any) -> None:
            broken.__enter__()

    broken = sqlite.failing()
    agent = Agent(name="a", model=ScriptedModel([[call("1", "act")]]), tools=[act])
    with pytest.raises(UserError) as caught:
        await session.run(agent, "go", hooks=Breaking())
    broken.__exit__(None, None, None)
    assert isinstance(caught.value.__cause__, Unavailable)
    assert begun == []
    assert [(c.id, c.stage) for c in await session.pending()] == [("1", "asked")]


@asynchronous
async def test_other_hooks_are_told_too(memory: Home):
    class Listener(RunHooks[Any]):
        def __init__(self) -> None:
            self.heard: list[str] = []

        async def on_llm_start(self, context, agent, system_prompt, input_items) -> None:
            self.heard.append("llm_start")

        async def on_llm_end(self, context, agent, response) -> None:
            self.heard.append("llm_end")

        async def on_agent_start(self, context, agent) -> None:
            self.heard.append("agent_start")

        async def on_agent_end(self, context, agent, output) -> None:
            self.heard.append("agent_end")

        async def on_handoff(self, context, from_agent, to_agent) -> None:
            self.heard.append(f"handoff from {from_agent.name} to {to_agent.name}")

        async def on_tool_start(self, context, agent, tool) -> None:
            self.heard.append(f"tool_start {tool.name}")

        async def on_tool_end(self, context, agent, tool, result) -> None:
            self.heard.append(f"tool_end {result}")

    alone, behind = Listener(), Listener()
    agent, (text,) = handoffs()
    await Runner.run(agent, text, hooks=alone)
    agent, (text,) = handoffs()
    await HoldfastSession("s", memory.store).run(agent, text, hooks=behind)
    assert behind.heard == alone.heard
    assert len(set(alone.heard)) == 7


async def _answer(hooks: Any, *output: Any) -> None:
    from agents import ModelResponse

    response = ModelResponse(output=[*output], usage=Usage(total_tokens=7), response_id=None)
    await hooks.on_llm_end(None, Agent(name="planner"), response)


def _context(id: str) -> Any:
    from agents.tool_context import ToolContext

    asked: Any = call(id, "book", n=id)
    return ToolContext(
        None, tool_name="book", tool_call_id=id, tool_arguments=asked.arguments, tool_call=asked
    )


async def _start(hooks: Any, id: str) -> None:
    await hooks.on_tool_start(_context(id), Agent(name="planner"), book)


async def _end(hooks: Any, id: str, result: Any) -> None:
    await hooks.on_tool_end(_context(id), Agent(name="planner"), book, result)


# -- approval --------------------------------------------------------------------------------------


def careful(*steps: Any) -> tuple[Agent[Any], list[str]]:
    paid: list[str] = []

    @function_tool(needs_approval=True)
    def pay(sum: str) -> str:
        """Pay."""
        paid.append(sum)
        return f"paid {sum}"

    return Agent(name="payer", model=ScriptedModel(steps), tools=[pay, look]), paid


@pytest.mark.parametrize("approve", [True, False])
@asynchronous
async def test_a_run_that_waits_for_approval_is_resumed_elsewhere(home: Home, approve):
    agent, paid = careful([call("1", "pay", sum="5"), call("2")])
    session = HoldfastSession("s", home.store)
    assert await session.load_state(agent) is None
    result = await session.run(agent, "pay")
    assert len(result.interruptions) == 1
    saved = await session.save_state(result.to_state())
    assert (saved.status, saved.trigger, [c.name for c in saved.pending]) == (
        "halted", "approval", ["pay"],
    )  # fmt: skip

    agent, paid = careful([assistant_message("so it is")])
    later = HoldfastSession("s", home.another())
    state = await later.load_state(agent)
    assert state is not None
    (item,) = state.get_interruptions()
    (state.approve if approve else state.reject)(item)
    result = await later.run(agent, state)
    assert (result.final_output, paid) == ("so it is", ["5"] if approve else [])
    assert await later.load_state(agent) is None, "or the tool would be called again"
    assert await session.load_state(agent) is None
    assert await session.pending() == []
    items: Any = await session.get_items()
    assert sorted(i["call_id"] for i in items if i.get("type") == "function_call_output") == [
        "1", "2",
    ]  # fmt: skip


@asynchronous
async def test_a_saved_run_is_replaced_by_the_next_and_kept_by_other_turns(memory: Home):
    agent, _ = careful(
        [call("1", "pay", sum="5"), call("2", "pay", sum="6")], [assistant_message("hm")]
    )
    session = HoldfastSession("s", memory.store)
    first = (await session.run(agent, "pay")).to_state()
    await session.save_state(first)
    await session.save_state(first)
    first.approve(first.get_interruptions()[0])
    await session.save_state(first)
    await session.run(agent, "meanwhile")  # asks for no tool
    state = await session.load_state(agent)
    assert state is not None
    result = await session.run(agent, state)
    assert [i.call_id for i in result.interruptions] == ["2"]
    assert await session.load_state(agent) is None
    await session.save_state(result.to_state())
    await session.clear_session()
    assert await session.load_state(agent) is None
    await session.undo()
    assert await session.load_state(agent) is not None


@asynchronous
async def test_an_agent_that_is_a_tool_waits_for_approval(memory: Home):
    """What comes to the conversation is the result of another call than the one approved."""
    inner, paid = careful([call("i", "pay", sum="5")], [assistant_message("paid")])
    outer = told([call("o", "ask", input="pay")], [assistant_message("all done")])
    outer.tools = [inner.as_tool(tool_name="ask", tool_description="Ask.")]
    session = HoldfastSession("s", memory.store)
    result = await session.run(outer, "go")
    assert [i.call_id for i in result.interruptions] == ["i"]
    await session.save_state(result.to_state())
    state = await session.load_state(outer)
    assert state is not None
    state.approve(state.get_interruptions()[0])
    result = await session.run(outer, state)
    assert (result.final_output, paid) == ("all done", ["5"])
    assert await session.load_state(outer) is None


@pytest.mark.parametrize("stage", ["started", "done"])
@asynchronous
async def test_a_run_is_not_resumed_twice_by_accident(memory: Home, stage):
    """After a crash in the tool that was approved."""
    agent, _ = careful([call("1", "pay", sum="5")], [assistant_message("good")])
    session = HoldfastSession("s", memory.store)
    await session.save_state((await session.run(agent, "pay")).to_state())
    hooks: Any = session.hooks()
    await _start(hooks, "1")
    if stage == "done":
        await _end(hooks, "1", "paid")
    with pytest.raises(InDoubt) as caught:
        await session.load_state(agent)
    assert caught.value.key == "1"
    await session.dismiss()
    assert await session.load_state(agent) is not None
    await session.undo()
    await session.settle({"1": "paid by hand"})
    assert await session.load_state(agent) is None
    await session.run(agent, "well?")
    items: Any = await session.get_items()
    assert [i["output"] for i in items if "output" in i] == ["paid by hand"]
    assert sum(i.get("type") == "function_call" for i in items) == 1


@asynchronous
async def test_both_answers_can_be_tried(memory: Home):
    agent, paid = careful([call("1", "pay", sum="5")], [assistant_message("A")])
    session = HoldfastSession("s", memory.store)
    await session.save_state((await session.run(agent, "pay")).to_state())
    other = await session.fork("t")
    for each, decide in ((session, "approve"), (other, "reject")):
        state = await each.load_state(agent)
        assert state is not None
        getattr(state, decide)(state.get_interruptions()[0])
        agent.model.enqueue([assistant_message(decide)])  # type: ignore[union-attr]
        await each.run(agent, state)
    assert paid == ["5"]


# -- branches --------------------------------------------------------------------------------------


@asynchronous
async def test_forks_and_rewinds_last(home: Home):
    session = HoldfastSession("s", home.store)
    for text in "abc":
        await session.add_items([said(text)])
    one = (await session.history())[1]
    fork = await session.fork("t", at=one.id)
    await fork.add_items([said("d")])
    assert (await session.rewind("@~2")).step == 1
    await session.add_items([said("e")])
    assert await HoldfastSession("t", home.another()).get_items() == [said(x) for x in "abd"]
    later = HoldfastSession("s", home.another())
    assert await later.get_items() == [said(x) for x in "ae"]
    assert [c.step for c in await later.history()] == [2, 1]
    for _ in range(2):
        await later.undo()
    assert await session.get_items() == [said(x) for x in "abc"]
    await session.redo()
    assert await later.get_items() == [said("a")]
    with pytest.raises(SessionExists):
        await session.fork("t")
    with pytest.raises(SessionNotFound):
        await HoldfastSession("none", home.store).fork("u")


@asynchronous
async def test_a_rewind_takes_pending_calls_along(memory: Home):
    session = HoldfastSession("s", memory.store)
    await session.add_items([said("a")])
    await _answer(session.hooks(), call("1"))
    await session.rewind("@~1")
    await session.add_items([called("1"), returned("1")])
    assert await session.get_items() == [said("a"), called("1"), returned("1")]


@asynchronous
async def test_a_cleared_session_is_not_lost(home: Home):
    session = HoldfastSession("s", home.store)
    await session.clear_session()
    assert not home.store.session("s").exists()
    await session.add_items([said("a"), said("b")])
    await session.clear_session()
    assert await session.get_items() == []
    await session.clear_session()
    await session.add_items([said("c")])
    assert await HoldfastSession("s", home.another()).get_items() == [said("c")]
    assert [c.trigger for c in await session.history()] == ["user", "clear", "user"]
    await session.rewind("@~2")
    assert await session.get_items() == [said("a"), said("b")]


# -- others at work --------------------------------------------------------------------------------


@asynchronous
async def test_handles_take_turns(home: Home):
    here, there = (HoldfastSession("s", s) for s in (home.store, home.another()))
    await here.add_items([said("a")])
    await there.add_items([said("b")])
    await here.add_items([said("c")])
    assert await there.pop_item() == said("c")
    await here.add_items([said("d")])
    await _answer(there.hooks(), call("1"))
    await here.add_items([called("1"), returned("1")])
    assert await there.pending() == []
    assert len(await there.get_items()) == 5
    home.another().session("s").delete()
    await here.add_items([said("e")])
    assert await there.get_items() == [said("e")]


def test_threads_race(home: Home):
    """Nothing is lost; what was added together stays together."""
    count, rounds = 4, 6
    popped: list[Any] = []

    def work(who: int, store: holdfast.Store) -> None:
        async def adding() -> None:
            session = HoldfastSession("s", store)
            for i in range(rounds):
                await session.add_items([said(f"{who} {i} a"), said(f"{who} {i} b")])
            if who == 0:
                popped.append(await session.pop_item())

        asyncio.run(adding())

    threads = [
        threading.Thread(target=work, args=(n, home.another() if n % 2 else home.store))
        for n in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    items: Any = asyncio.run(HoldfastSession("s", home.store).get_items())
    texts = [i["content"] for i in items]
    gone = popped[0]["content"]
    assert sorted([*texts, gone]) == sorted(
        f"{w} {i} {x}" for w in range(count) for i in range(rounds) for x in "ab"
    )
    firsts = [t for t in texts if t.endswith("a") and t[:-1] + "b" != gone]
    assert all(texts[texts.index(t) + 1] == t[:-1] + "b" for t in firsts)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("home", ["memory", "sqlite"], indirect=True)
@asynchronous
async def test_two_handles_are_one_list(home: Home, seed):
    rng = random.Random(seed)
    stores = [home.store, home.another()]
    handles = [HoldfastSession("s", store) for store in stores]
    model: list[Any] = []
    for n in range(80):
        handle = rng.choice(handles)
        roll = rng.randrange(12)
        if roll < 6:
            new = [said(f"{n} {i}") for i in range(rng.randrange(4))]
            await handle.add_items(new)
            model = model + new
        elif roll < 9:
            assert await handle.pop_item() == (model[-1] if model else None)
            model = model[:-1]
        elif roll == 9:
            await handle.clear_session()
            model = []
        elif roll == 10 and model:
            handles = [await handle.fork(f"s{n}"), HoldfastSession(f"s{n}", rng.choice(stores))]
        limit = rng.choice([None, 1, 3])
        assert await rng.choice(handles).get_items(limit) == model[-(limit or 999) :]


MUTATIONS: dict[str, tuple[Callable[[HoldfastSession], Any], list[Any]]] = {
    "add": (lambda s: s.add_items([said("b")]), [said("a"), said("b")]),
    "pop": (lambda s: s.pop_item(), []),
    "clear": (lambda s: s.clear_session(), []),
}


@pytest.mark.parametrize("name", MUTATIONS)
@asynchronous
async def test_what_is_cancelled_comes_to_its_end(sqlite: Home, name):
    """Also if no worker has begun it."""
    mutate, expected = MUTATIONS[name]
    session = HoldfastSession("s", sqlite.store)
    await session.add_items([said("a")])
    let_go = threading.Event()
    busy = [asyncio.ensure_future(session.host.call(let_go.wait)) for _ in range(16)]
    await asyncio.sleep(0)
    task = asyncio.ensure_future(mutate(session))
    try:
        for _ in range(3):
            await asyncio.sleep(0)
            task.cancel()
        assert not task.done()
    finally:
        let_go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.gather(*busy)
    assert await session.get_items() == expected
    await session.add_items([said("c")])
    assert (await session.get_items())[-1] == said("c")


@asynchronous
async def test_the_loop_goes_on_while_the_disk_is_waited_for(sqlite: Home, monkeypatch):
    entered, let_go = threading.Event(), threading.Event()
    append = holdfast.Session.append

    def slow(self: Any, *args: Any, **fields: Any) -> Any:
        entered.set()
        assert let_go.wait(60)
        return append(self, *args, **fields)

    monkeypatch.setattr(holdfast.Session, "append", slow)
    session = HoldfastSession("s", sqlite.store)
    task = asyncio.ensure_future(session.add_items([said("a")]))
    while not entered.is_set():  # noqa: ASYNC110 - a thread has no asyncio.Event
        await asyncio.sleep(0)
    let_go.set()  # by the loop, which therefore is not blocked
    await task


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Sessions that are loaded from now on."""
    loads: list[str] = []
    load = holdfast.Session.load

    def noting(self: holdfast.Session, *args: Any) -> Any:
        loads.append(self.name)
        return load(self, *args)

    monkeypatch.setattr(holdfast.Session, "load", noting)
    return loads


@asynchronous
async def test_adding_reads_and_writes_what_is_new(sqlite: Home, monkeypatch):
    loads = counted(monkeypatch)
    session = HoldfastSession("s", sqlite.store)
    hooks: Any = session.hooks()
    for n in range(150):
        await session.add_items([said("x" * 500)])
        await _answer(hooks, call(f"c{n}"))
        await _start(hooks, f"c{n}")
        await _end(hooks, f"c{n}", "ok")
        await session.add_items([called(f"c{n}"), returned(f"c{n}")])
    assert loads == []
    added = sorted(c.added for c in await session.history())
    assert added[-1] < 40_000  # a pack of 64 items at the most
    assert added[len(added) // 2] < 2_500


# -- what holdfast shows ---------------------------------------------------------------------------


@asynchronous
async def test_checkpoints_tell_what_they_are(memory: Home):
    session = HoldfastSession("s", memory.store)
    agent = told([call("1")], [assistant_message("done")])
    await session.get_items()
    await session.run(agent, "go")
    history = (await session.history())[::-1]
    assert [(c.trigger, c.usage.tokens, len(c.pending)) for c in history] == [
        ("user", 0, 0),
        ("assistant", 10, 1),
        ("tool_start", 0, 1),
        ("tool_end", 0, 0),
        ("tool_call", 0, 0),
        ("assistant", 10, 0),
    ]
    assert (history[1].usage.input, history[1].usage.output) == (6, 4)
    assert {c.agent for c in history} == {"planner"}
    assert [*memory.store.session("s").load()] == ["items"]
    named = HoldfastSession("t", memory.store, agent="mine")
    await named.run(told([assistant_message("yes")]), "go")
    assert {info.name: info.agent for info in memory.store.sessions()} == {
        "s": "planner",
        "t": "mine",
    }


def test_the_command_line_shows_it(terminal):
    async def work() -> None:
        async with HoldfastSession("trip", "store.db") as session:
            await session.add_items([said("Lisbon?")])
            await _answer(session.hooks(), call("1", "book", place="B"))

    asyncio.run(work())
    assert "book" in terminal.good("log trip").out
    assert "Lisbon?" in terminal.good("state -s trip").out


# -- refusals, and whose store it is ---------------------------------------------------------------


@pytest.mark.parametrize("id", ["", None, 3])
def test_bad_ids_are_refused(memory: Home, id):
    with pytest.raises(InvalidRequest, match="session_id"):
        HoldfastSession(id, memory.store)


@pytest.mark.parametrize(
    ("items", "error"),
    [
        ([said("a"), said(object())], NotSerializable),
        ([said("a"), "text"], InvalidRequest),
        (said("a"), InvalidRequest),
    ],
)
@asynchronous
async def test_bad_items_are_refused_before_anything_is_written(memory: Home, items, error):
    session = HoldfastSession("s", memory.store)
    with pytest.raises(error):
        await session.add_items(items)
    assert not memory.store.session("s").exists()
    await session.add_items([said("b")])
    assert await session.get_items() == [said("b")]


@pytest.mark.parametrize("state", [{"messages": []}, [1], {"items": {}}, {"items": [], "x": 1}])
@asynchronous
async def test_a_session_of_somebody_else_is_left_alone(memory: Home, state):
    memory.store.session("s").save(state)
    session = HoldfastSession("s", memory.store)
    for attempt in (
        session.get_items(), session.add_items([said("a")]), session.pop_item(),
        session.clear_session(), session.fork("t"), session.undo(),
    ):  # fmt: skip
        with pytest.raises(InvalidRequest, match="no conversation") as caught:
            await attempt
        assert caught.value.hint
    assert memory.store.session("s").load() == state


def test_closed_without_a_loop(tmp_path):
    with HoldfastSession("s", tmp_path / "own.db") as session:
        asyncio.run(session.run(told([assistant_message("yes")]), "go"))
    with pytest.raises(InvalidRequest):
        session.store.session("s")
    with holdfast.open(tmp_path / "own.db") as store:
        assert len(store.session("s").load()["items"]) == 2


@asynchronous
async def test_whose_store_it_is(sqlite: Home, tmp_path):
    async with HoldfastSession("s", sqlite.store) as session:
        await session.add_items([said("a")])
        async with await session.fork("t") as fork:
            assert await fork.get_items() == [said("a")]
        await fork.add_items([said("b")])  # it is open as long as what it was forked from
    with pytest.raises(InvalidRequest):
        await fork.get_items()
    assert sqlite.store.session("t").exists()
    own = HoldfastSession("s", tmp_path / "own.db")
    await own.add_items([said("a")])
    await own.aclose()
    await own.aclose()
    with pytest.raises(InvalidRequest):
        own.store.session("s")
    with pytest.raises(InvalidRequest, match="a store or a URL"):
        HoldfastSession("s", 3)  # type: ignore[arg-type]
