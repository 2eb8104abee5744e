"""LangGraph changes values that it has handed to a saver. The saver stores them unchanged."""

from __future__ import annotations

import asyncio
import operator
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import pytest
from langgraph.channels import NamedBarrierValue, Topic
from langgraph.channels.named_barrier_value import NamedBarrierValueAfterFinish
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.graph import START, StateGraph
from langgraph.types import Command, interrupt

from holdfast.adapters.langgraph import HoldfastSaver

if TYPE_CHECKING:
    from tests.support.stores import Home


class Log(TypedDict):
    log: Annotated[list[str], operator.add]
    topic: Annotated[list[str], Topic(str, accumulate=True)]


def says(name: str) -> Any:
    return lambda _: {"log": [name], "topic": name}


def waits(_: Any) -> Any:
    return {"log": [interrupt("go on?")]}


def fan_in(saver: HoldfastSaver) -> Any:
    """Two nodes lead to a third. Beside them, a node asks a question."""
    builder: Any = StateGraph(Log)
    for name in ("one", "two", "join"):
        builder.add_node(name, says(name))
    builder.add_node("ask", waits)
    for name in ("one", "two", "ask"):
        builder.add_edge(START, name)
    builder.add_edge(["one", "two"], "join")
    return builder.compile(checkpointer=saver)


def fan_in_later(saver: HoldfastSaver, defer: bool) -> Any:
    """The second of the two that lead to a third runs a step later, beside the question."""
    builder: Any = StateGraph(Log)
    for name in ("one", "before", "two"):
        builder.add_node(name, says(name))
    builder.add_node("join", says("join"), defer=defer)
    builder.add_node("ask", waits)
    builder.add_edge(START, "one")
    builder.add_edge(START, "before")
    builder.add_edge("before", "two")
    builder.add_edge("before", "ask")
    builder.add_edge(["one", "two"], "join")
    return builder.compile(checkpointer=saver)


def run(graph: Any, turns: int, thread: str, durability: str, aio: bool) -> Any:
    """Run some turns, each with a question and its answer. Returns the last state."""
    config: Any = {"configurable": {"thread_id": thread}}
    inputs: list[Any] = [{"log": []}, Command(resume="yes")] * turns

    async def ainvoke() -> Any:
        return [await graph.ainvoke(i, config, durability=durability) for i in inputs]

    if aio:
        return asyncio.run(ainvoke())[-1]
    return [graph.invoke(i, config, durability=durability) for i in inputs][-1]


@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
@pytest.mark.parametrize("aio", [False, True], ids=["threads", "asyncio"])
def test_a_fan_in_is_joined_after_an_answer(
    home: Home, durability: str, aio: bool, rounds: Any
) -> None:
    saver = HoldfastSaver(home.store)
    for n in range(rounds(5, torture=300)):
        said = run(fan_in(saver), 2, f"t{n}", durability, aio)
        assert sorted(said["log"]) == sorted(["one", "two", "join", "yes"] * 2)


@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
@pytest.mark.parametrize("aio", [False, True], ids=["threads", "asyncio"])
@pytest.mark.parametrize("defer", [False, True], ids=["at once", "deferred"])
def test_a_fan_in_that_has_begun_is_joined_after_an_answer(
    home: Home, durability: str, aio: bool, defer: bool, rounds: Any
) -> None:
    saver = HoldfastSaver(home.store)
    for n in range(rounds(2, torture=300)):
        said = run(fan_in_later(saver, defer), 1, f"t{n}", durability, aio)
        assert sorted(said["log"]) == sorted(["one", "before", "two", "join", "yes"])
        assert sorted(said["topic"]) == sorted(["one", "before", "two", "join"])


@pytest.mark.parametrize(
    "channel",
    [
        NamedBarrierValue(str, {"one", "two"}),
        NamedBarrierValueAfterFinish(str, {"one", "two"}),
        Topic(str, accumulate=True),
    ],
    ids=lambda channel: type(channel).__name__,
)
def test_a_channel_hands_out_a_copy(channel: Any) -> None:
    channel.update(["one"])
    before = channel.checkpoint()
    content = str(before)
    channel.update(["two"])
    assert str(before) == content
    assert str(channel.checkpoint()) != content
    assert channel.from_checkpoint(before).checkpoint() == before


def given(id: str, values: Any, versions: Any) -> Any:
    return {
        **empty_checkpoint(), "id": id, "channel_values": values, "channel_versions": versions,
    }  # fmt: skip


def at(id: str | None = None) -> Any:
    return {"configurable": {"thread_id": "t", "checkpoint_ns": "", "checkpoint_id": id}}


def values(saver: HoldfastSaver, id: str) -> Any:
    found = saver.get_tuple(at(id))
    assert found is not None
    return found.checkpoint["channel_values"]


@pytest.mark.parametrize("again", [False, True], ids=["same process", "another process"])
def test_a_channel_that_is_not_new_is_the_parents(home: Home, again: bool) -> None:
    saver = HoldfastSaver(home.store)
    live, other = {"one"}, [1]
    first: Any = {"join": "1", "other": "1"}
    saver.put(at(), given("1", {"join": live, "other": other}, first), {}, first)
    live.add("two")
    other.append(2)
    if again:
        saver = HoldfastSaver(home.reopened())
    second = {"join": "1", "other": "2", "unknown": "1"}
    saver.put(
        at("1"),
        given("2", {"join": live, "other": other, "unknown": {3}}, second),
        {},
        {"other": "2"},
    )
    assert values(saver, "1") == {"join": {"one"}, "other": [1]}
    assert values(saver, "2") == {"join": {"one"}, "other": [1, 2], "unknown": {3}}


def test_a_parent_that_was_read_is_taken_from_as_well(home: Home) -> None:
    versions: Any = {"join": "1"}
    HoldfastSaver(home.store).put(at(), given("1", {"join": {"one"}}, versions), {}, versions)
    saver = HoldfastSaver(home.reopened())
    live = values(saver, "1")["join"]
    live.add("two")
    saver.put(at("1"), given("2", {"join": live}, versions), {}, {})
    assert values(saver, "2") == {"join": {"one"}}


def test_a_value_of_another_version_is_not_the_parents(home: Home) -> None:
    """A copy of a checkpoint has the parent of the original, and calls nothing new."""
    saver = HoldfastSaver(home.store)
    saver.put(at(), given("1", {"join": {"one"}}, {"join": "1"}), {}, {"join": "1"})
    saver.put(at("1"), given("2", {"join": {"two"}}, {"join": "2"}), {}, {})
    assert values(saver, "2") == {"join": {"two"}}


def test_a_value_is_encoded_before_the_loop_goes_on(home: Home) -> None:
    saver = HoldfastSaver(home.store)

    async def go() -> None:
        live = {"one"}
        versions: Any = {"join": "1"}
        put = saver.aput(at(), given("1", {"join": live}, versions), {}, versions)
        written: list[Any] = [("join", live)]
        wrote = saver.aput_writes(at("1"), written, "task")
        saving = asyncio.gather(put, wrote)
        await asyncio.sleep(0)  # both have begun
        live.add("two")
        written.append(("join", "more"))
        await saving

    asyncio.run(go())
    found = saver.get_tuple(at("1"))
    assert found is not None
    assert found.checkpoint["channel_values"] == {"join": {"one"}}
    assert found.pending_writes == [("task", "join", {"one"})]
