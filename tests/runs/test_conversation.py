"""Conversation: a loop written by hand, made durable."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import holdfast
from holdfast import HeadMoved, InvalidRequest, NotSerializable
from holdfast.runs.conversation import estimate
from holdfast.runs.messages import MARK
from tests.support.stores import Home


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def call(*ids: str) -> dict[str, Any]:
    made = [{"id": id, "function": {"name": "act", "arguments": "{}"}} for id in ids]
    return {"role": "assistant", "content": None, "tool_calls": made}


def result(id: str, text: str = "done") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": text}


def test_a_conversation_is_kept(home: Home) -> None:
    talk = home.session().conversation(system="Be brief.")
    assert (len(talk), talk.messages, talk.system) == (0, [], "Be brief.")
    assert talk  # also an empty one
    talk.append(user("Hello"))
    talk.append(call("c1"), result("c1"), label="looked")
    again = home.reopened().session("s").conversation()
    assert again.system == "Be brief."
    assert again.messages == [user("Hello"), call("c1"), result("c1")]
    assert home.session().load() == {"system": "Be brief.", "messages": again.messages}
    assert home.session().get("looked").operation == "append"


def test_an_append_is_one_checkpoint(memory: Home) -> None:
    session = memory.session()
    talk = session.conversation()
    assert not session.exists()  # nothing is written before there is something to keep
    first = talk.append(user("Hello"), tags=["t"])
    second = talk.append(call("a", "b"), result("a"), result("b"))
    assert [*session.tree()] == [first, second]
    assert second.parent == first.id
    assert first.tags == ("t",)


def test_a_system_prompt_is_written_when_it_changes(memory: Home) -> None:
    memory.session().conversation(system="One").append(user("Hello"))
    memory.session().conversation(system="One")
    assert len(memory.session()) == 2
    talk = memory.session().conversation(system="Two")
    assert len(memory.session()) == 3
    assert (talk.system, talk.messages) == ("Two", [user("Hello")])
    assert memory.session().conversation().system == "Two"
    assert memory.session().load("@~1")["system"] == "One"


def test_the_key_of_messages_may_have_a_dot(memory: Home) -> None:
    talk = memory.session().conversation(key="a.b")
    talk.append(call("c1"))
    assert [c.id for c in talk.repair()] == ["c1"]
    assert memory.session().load() == {"a.b": talk.messages}


def test_the_rest_of_the_state_stays(memory: Home) -> None:
    session = memory.session()
    session.save({"budget": 900, "talk": [user("Hello")], "messages": [1]})
    talk = session.conversation(key="talk")
    talk.append(assistant("Hi"))
    assert session.load() == {
        "budget": 900, "talk": [user("Hello"), assistant("Hi")], "messages": [1],
    }  # fmt: skip


# -- windows ---------------------------------------------------------------------------------------


def test_a_window_within_a_budget(memory: Home) -> None:
    def count(message: dict[str, Any]) -> float:
        return len(message["content"] or "")

    talk = memory.session().conversation(system="12345", budget=20, count=count)
    for n in range(10):
        talk.append(user(f"ask {n}"), assistant(f"say {n}"))
    system = {"role": "system", "content": "12345"}
    assert talk.window() == [system, user("ask 9"), assistant("say 9")]  # 10 of the 15 beside it
    assert talk.window(25) == [system, *talk.messages[-4:]]
    assert talk.window(1) == [system, talk.messages[-1]]  # the newest, even so
    assert talk.window(5 + 100) == [system, *talk.messages]
    assert len(talk) == len(talk.messages) == 20  # the window is a list of its own
    assert memory.session().conversation().window() == [system, *talk.messages]  # no budget: all


def test_a_window_without_a_system_prompt(memory: Home) -> None:
    talk = memory.session().conversation(budget=100)
    assert talk.window() == []
    talk.append(user("Hello"))
    assert talk.window() == [user("Hello")] == memory.session().conversation().window()


def test_a_window_has_the_system_prompt_of_its_checkpoint(memory: Home) -> None:
    talk = memory.session().conversation(system="One")
    talk.append(user("Hello"))
    memory.session().conversation(system="Two")
    assert talk.window()[0]["content"] == "One"
    talk.session.refresh()
    assert talk.window() == [{"role": "system", "content": "Two"}, user("Hello")]


def test_a_window_splits_no_call_from_its_result(memory: Home) -> None:
    talk = memory.session().conversation(count=lambda _: 1)
    talk.append({"role": "developer", "content": "Rules"}, user("Go"))
    for n in range(5):
        talk.append(call(f"a{n}", f"b{n}"), result(f"a{n}"), result(f"b{n}"))
    everything = talk.messages
    for budget in range(1, len(everything) + 1):
        window = talk.window(budget)
        assert window[0] == everything[0]
        calls = {c["id"] for m in window for c in m.get("tool_calls", ())}
        assert {m["tool_call_id"] for m in window if m["role"] == "tool"} == calls
        assert window[-3:] == everything[-3:]
        assert len(window) <= max(budget, 4)
        assert (everything[1] in window) == (budget >= 5)  # what it is all about
    assert talk.window(len(everything)) == everything


def test_the_usual_count() -> None:
    assert estimate(user("x" * 400)) == pytest.approx(100, rel=0.15)
    odd: Any = {"role": "user", "content": b"raw", ("a", 1): {2}}
    assert estimate(odd) > 0


# -- going on after an interruption ----------------------------------------------------------------


def test_repair(home: Home) -> None:
    talk = home.session().conversation()
    talk.append(user("Go"))
    assert talk.repair() == []
    talk.append(call("a", "b"), result("a"))
    before = len(home.session())
    again = home.another().session("s").conversation()
    assert [c.id for c in again.dangling()] == ["b"]
    assert [c.id for c in again.repair()] == ["b"]
    whole = [user("Go"), call("a", "b"), result("a"), result("b", MARK)]
    assert again.messages == whole
    assert again.repair() == again.dangling() == []
    session = home.session()
    assert session.load()["messages"] == whole
    assert len(session) == before + 1
    assert session.head is not None
    assert session.head.trigger == "repair"
    again.append(assistant("Done"))
    assert home.session().load()["messages"] == [*whole, assistant("Done")]


def test_repair_without_anything_to_repair(memory: Home) -> None:
    assert memory.session().conversation().repair() == []
    assert not memory.session().exists()


def test_what_dangles_can_simply_be_done(memory: Home) -> None:
    talk = memory.session().conversation()
    talk.append(user("Go"), call("a", "b"))
    talk.append(*[result(c.id, f"{c.name} {c.arguments}") for c in talk.dangling()])
    assert talk.messages[2:] == [result("a", "act {}"), result("b", "act {}")]
    assert talk.dangling() == []


def test_what_is_changed_outside_is_not_what_is_kept(memory: Home) -> None:
    talk = memory.session().conversation()
    message = user("Hello")
    talk.append(message, call("a"))
    message["content"] = "Goodbye"
    assert talk.messages[0] == user("Hello")
    talk.messages.clear()
    assert len(talk) == 2
    talk.messages[0]["content"] = "Goodbye"
    talk.repair()
    assert memory.session().load()["messages"][0] == talk.messages[0] == user("Hello")


# -- with others -----------------------------------------------------------------------------------


def test_it_follows_the_handle_of_its_session(memory: Home) -> None:
    session = memory.session()
    talk = session.conversation(system="One")
    talk.append(user("1"), label="one")
    talk.append(user("2"))
    session.rewind("one")
    assert talk.messages == [user("1")]
    talk.append(user("3"))
    assert session.load()["messages"] == talk.messages == [user("1"), user("3")]
    session.undo()
    assert talk.messages == [user("1")]
    session.patch(set={"system": "Two"})
    assert talk.system == "Two"
    session.save([1])
    for use in (len, lambda t: t.messages, lambda t: t.window(), lambda t: t.append(user("4"))):
        with pytest.raises(InvalidRequest, match="no list 'messages'"):
            use(talk)
    assert session.load() == [1]


def test_two_that_write(home: Home) -> None:
    """The one that has not seen the other's message is told; then it has."""
    session = home.session()
    one = session.conversation()
    one.append(user("1"))
    other = home.another().session("s").conversation()
    other.append(user("2"))
    with pytest.raises(HeadMoved):
        one.append(user("3"))
    assert one.messages == [user("1")]
    session.refresh()
    assert one.messages == [user("1"), user("2")]
    one.append(user("3"))
    expected = [user("1"), user("2"), user("3")]
    assert home.session().load()["messages"] == one.messages == expected


def test_threads(memory: Home) -> None:
    talk = memory.session().conversation()
    go = threading.Barrier(4)

    def work(name: str) -> None:
        go.wait()
        for n in range(25):
            talk.append(user(f"{name}{n}"))

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(talk) == 100
    assert memory.session().load()["messages"] == talk.messages


# -- input -----------------------------------------------------------------------------------------


class Block(BaseModel):
    type: str
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    citations: list[str] | None = None


class Answer(BaseModel):
    role: str = "assistant"
    content: list[Block]
    refusal: str | None = None


def test_what_an_sdk_returns_can_be_appended(memory: Home) -> None:
    block = Block(type="tool_use", id="c1", name="act", input={"a": None})
    talk = memory.session().conversation()
    talk.append(user("Go"), {"role": "assistant", "content": [block]})
    plain = {"type": "tool_use", "id": "c1", "name": "act", "input": {"a": None}}
    assert talk.messages[1] == {"role": "assistant", "content": [plain]}
    assert [c.arguments for c in talk.dangling()] == [{"a": None}]
    talk.append(Answer(content=[block]))
    assert talk.messages[2] == talk.messages[1]
    assert memory.session().load()["messages"] == talk.messages


def deep() -> dict[str, Any]:
    message: dict[str, Any] = {}
    message["content"] = [message]
    return message


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ([], InvalidRequest),
        (["Hello"], InvalidRequest),
        ([user("a"), None], InvalidRequest),
        ([[user("a")]], InvalidRequest),
        ([Answer], InvalidRequest),
        ([{"role": "user", "content": object()}], NotSerializable),
        ([deep()], NotSerializable),
    ],
)
def test_bad_messages(memory: Home, bad: list[Any], error: type[Exception]) -> None:
    talk = memory.session().conversation()
    talk.append(user("Hello"))
    with pytest.raises(error):
        talk.append(*bad)
    assert talk.messages == [user("Hello")]
    assert len(memory.session()) == 1
    talk.append(user("Again"))
    assert memory.session().load()["messages"] == [user("Hello"), user("Again")]


@pytest.mark.parametrize(
    "options",
    [
        {"budget": 0}, {"budget": -1}, {"budget": "10"}, {"budget": float("nan")},
        {"budget": True}, {"key": ""}, {"key": "system"}, {"key": 5}, {"system": 5},
    ],
)  # fmt: skip
def test_bad_options(memory: Home, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        memory.session().conversation(**options)
    assert not memory.session().exists()


def test_bad_windows(memory: Home) -> None:
    talk = memory.session().conversation()
    for bad in (0, -5, float("nan"), "10"):
        with pytest.raises(InvalidRequest, match="budget"):
            talk.window(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("state", [5, [user("a")], {"messages": "text"}, {"messages": (1,)}])
def test_states_without_a_conversation(memory: Home, state: Any) -> None:
    session = memory.session()
    session.save(state)
    with pytest.raises(InvalidRequest, match="no list 'messages'"):
        session.conversation()
    assert session.load() == state


def test_it_can_be_named(memory: Home) -> None:
    assert isinstance(memory.session().conversation(), holdfast.Conversation)


def test_a_conversation_in_a_loop(tmp_path: Path) -> None:
    async def talk() -> None:
        async with holdfast.aopen(tmp_path / "s.db") as store:
            session = await store.session("s")
            conversation = await session.conversation(system="Be brief.")
            call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            await conversation.append({"role": "user", "content": "Hi"})
            await conversation.append({"role": "assistant", "tool_calls": [call]})
            await session.load(close_calls=True)
            assert [c.id for c in session.closed_calls] == ["c1"]
            assert [c.id for c in await conversation.repair()] == ["c1"]
            assert len(await conversation.messages()) == 3
            system = {"role": "system", "content": "Be brief."}
            assert await conversation.window(10_000) == [system, *await conversation.messages()]
            assert await session.count() == 4

    asyncio.run(talk())
