"""Approvals: a call waits for a person, and what was denied is not called."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import holdfast
from holdfast import InvalidRequest, StepChanged, ToolCall
from holdfast.aio.store import AsyncStore
from holdfast.aio.workers import Workers
from tests.support.stores import Home

PAY = {"id": "c1", "type": "function", "function": {"name": "pay", "arguments": '{"euro": 9}'}}
DENIED = "[holdfast] denied by a person"


def asks(session: holdfast.Session, **options: Any) -> list[Any]:
    """Run an agent with one call. Return the approval, and what the tool returned."""
    out: list[Any] = []
    state = {"messages": [{"role": "user", "content": "Pay."}]}
    with session.run(state=state) as run:
        for _ in run.turns(limit=1):
            messages = run.state["messages"]
            messages.append({"role": "assistant", "tool_calls": [PAY]})
            out.append(run.approve(PAY, **options))
            out.append(run.tool(PAY, lambda euro: f"paid {euro}"))
            messages.append({"role": "user", "content": "And now?"})
    return out


def test_an_approved_call_is_made(home: Home) -> None:
    assert asks(home.session(), prompt="Really?") == []
    [asked] = home.store.pending()
    assert (asked.key, asked.state) == ("c1@1", "waiting")
    assert asked.arguments == {"tool": "pay", "arguments": {"euro": 9}, "prompt": "Really?"}
    assert asks(home.session(), prompt="Really?") == []
    home.another().session("s").answer("c1", value=True)
    assert asks(home.session(), prompt="Really?") == [True, "paid 9"]
    assert len(home.session().load()["messages"]) == 3


@pytest.mark.parametrize("answer", [False, "too much", "", None, 1, "true", {"approved": True}])
def test_anything_but_true_denies(home: Home, answer: Any) -> None:
    asks(home.session())
    home.session().answer("c1", answer)
    text = f"{DENIED}: {answer}" if answer and type(answer) is str else DENIED
    assert asks(home.session()) == [False, text]
    assert home.session().load()["messages"][2:] == [
        {"role": "tool", "tool_call_id": "c1", "content": text},
        {"role": "user", "content": "And now?"},
    ]
    [made] = home.session().tool_calls()
    assert (made.name, made.result, made.success) == ("pay", text, True)


def test_a_denial_is_recorded_once(home: Home) -> None:
    """A turn that starts again denies again, and adds no other result."""

    def agent(ends: str) -> None:
        with home.session().run(state={"messages": []}) as run:
            for _ in run.turns(limit=1):
                call = {"type": "tool_use", "id": "t1", "name": "pay", "input": {}}
                run.state["messages"].append({"role": "assistant", "content": [call]})
                assert run.approve(call) is False
                assert run.approve(ToolCall("t1", "pay", {})) is False
                if ends:
                    run.halt(ends)
                assert run.removed == ()

    agent("it is not answered yet")
    home.session().answer("t1", value=False)
    agent("once")
    agent("")
    [made] = home.session().tool_calls()
    assert made.result == DENIED
    [_, result] = home.session().load()["messages"]
    assert [block["tool_use_id"] for block in result["content"]] == ["t1"]
    assert home.session().pending() == []


def test_other_arguments_were_not_approved(memory: Home) -> None:
    asks(memory.session())
    memory.session().answer("c1", value=True)
    with pytest.raises(StepChanged), memory.session().run() as run:
        for _ in run.turns():
            run.approve(ToolCall("c1", "pay", {"euro": 90}))
    with pytest.raises(StepChanged):
        asks(memory.session(), prompt="another")


def test_pairs_are_counted(home: Home) -> None:
    """Two equal calls are two questions, because they have no ids."""

    def agent() -> list[bool]:
        out: list[bool] = []
        with home.session().run() as run:
            for _ in range(2):
                out.append(run.approve(("pay", {"euro": 9})))  # noqa: PERF401 - it may halt
        return out

    assert agent() == []
    home.session().answer("pay", value=True)
    assert agent() == [True]
    [asked] = home.session().pending()
    assert asked.key == "pay#2"
    home.session().answer("pay#2", "no")
    assert agent() == [True, False]
    assert home.session().tool_calls() == []


@pytest.mark.parametrize("call", ["pay", (), ("pay",), ("", {}), (1, {}), {"name": "pay"}, None])
def test_what_is_no_call_is_not_asked_about(memory: Home, call: Any) -> None:
    with memory.session().run() as run, pytest.raises(InvalidRequest):
        run.approve(call)
    assert memory.session().calls() == []


def test_approvals_in_asyncio(home: Home) -> None:
    async def agent(session: holdfast.AsyncSession) -> list[Any]:
        out: list[Any] = []
        async with session.run() as run:
            for call in (PAY, {**PAY, "id": "c2"}):
                out += [await run.approve(call), await run.tool(call, lambda euro: euro)]
        return out

    async def both() -> None:
        session = await AsyncStore(home.store, Workers(2)).session("s")
        assert await agent(session) == []
        await session.answer("c1", value=True)
        assert await agent(session) == [True, 9]
        await session.answer("c2", value=False)
        assert await agent(session) == [True, 9, False, DENIED]

    asyncio.run(both())
