"""Threads that holdfast has forked are threads."""

from __future__ import annotations

import asyncio
import operator
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import pytest
from langgraph.channels.delta import DeltaChannel
from langgraph.graph import START, StateGraph
from langgraph.types import Command, interrupt

from holdfast.adapters.langgraph import HoldfastSaver
from holdfast.adapters.langgraph.names import ThreadAddress
from holdfast.errors import CheckpointNotFound, InvalidRequest, KeyTaken
from tests.adapters import graphs
from tests.adapters.test_langgraph import asking, config, ids, latest, put

if TYPE_CHECKING:
    from tests.support.stores import Home

FORK = config("fork")
DURABILITY = ["sync", "async", "exit"]


def chain(saver: HoldfastSaver, count: int, thread: str = "t", **meta: Any) -> None:
    for n in range(1, count + 1):
        at = config(thread, id=f"{n - 1:08}" if n > 1 else None)
        put(saver, at, {"n": n, "list": [*range(n)]}, n, **meta)


def logging(saver: Any, count: int = 6) -> Any:
    """A graph with a channel that is made of its writes."""

    class Log(TypedDict):
        log: Annotated[list[str], DeltaChannel(graphs._all, list, snapshot_frequency=50)]
        plain: Annotated[list[str], operator.add]

    builder: Any = StateGraph(Log)
    names = [f"n{n}" for n in range(count)]
    for name in names:
        builder.add_node(
            name, lambda s: {"log": [str(len(s["log"]))], "plain": [str(len(s["log"]))]}
        )
    for a, b in zip([START, *names], names, strict=False):
        builder.add_edge(a, b)
    return builder.compile(checkpointer=saver)


def everything(saver: HoldfastSaver, thread: str) -> list[Any]:
    return [*saver.list({"configurable": {"thread_id": thread}})]


def untouched(home: Home, name: str = "t") -> Any:
    session = home.store.session(name)
    return [c.id for c in session.tree()], session.head, len(session.operations())


def test_a_fork_is_a_thread(home: Home) -> None:
    saver = HoldfastSaver(home.store)
    chain(saver, 4)
    before = untouched(home)
    home.store.session("t").fork("fork", at="key:00000003")
    found = latest(saver, FORK)
    assert found.checkpoint["channel_values"] == {"n": 3, "list": [0, 1, 2]}
    assert found.config == config("fork", id="00000003")
    assert found.parent_config == config("fork", id="00000002")
    assert found.metadata["step"] == 3
    assert ids(saver, FORK) == ["00000003", "00000002", "00000001"]
    assert ids(saver, FORK, limit=1, before=config("fork", id="00000003")) == ["00000002"]
    assert ids(saver, FORK, filter={"step": 1}) == ["00000001"]
    assert {t.config["configurable"]["thread_id"] for t in everything(saver, "fork")} == {"fork"}
    older = latest(saver, config("fork", id="00000002"))
    assert older.checkpoint["channel_values"]["n"] == 2
    assert saver.get_tuple(config("fork", id="00000004")) is None
    assert ids(saver, config("fork", id="00000004")) == []
    put(saver, config("fork", id="00000003"), {"n": 9}, 9)
    assert latest(saver, FORK).checkpoint["channel_values"] == {"n": 9}
    assert ids(saver, FORK) == ["00000009", "00000003", "00000002", "00000001"]
    assert untouched(home) == before
    assert len([*saver.list(None)]) == 8
    listed = ids(saver, FORK)
    assert ids(HoldfastSaver(home.reopened()), FORK) == listed
    assert home.store.verify().ok


def test_a_fork_costs_what_is_new(sqlite: Home) -> None:
    saver = HoldfastSaver(sqlite.store)
    put(saver, config(), {"messages": ["x" * 1000 + str(n) for n in range(500)]}, 1)
    fork = sqlite.store.session("t").fork("fork")
    put(saver, config("fork", id="00000001"), {"messages": [*latest(saver).checkpoint[
        "channel_values"]["messages"], "new"]}, 2)  # fmt: skip
    assert sum(c.added for c in fork.tree()) < 5_000


def test_forks_of_forks(home: Home) -> None:
    saver = HoldfastSaver(home.store)
    chain(saver, 3)
    home.store.session("t").fork("a", at="key:00000002").fork("b")
    put(saver, config("a", id="00000002"), {"n": 5}, 5)
    assert ids(saver, config("b")) == ["00000002", "00000001"]
    home.store.session("a").fork("c")
    assert ids(saver, config("c")) == ["00000005", "00000002", "00000001"]
    put(saver, config("c", id="00000005"), {"n": 6}, 6)
    put(saver, config("b", id="00000002"), {"n": 7}, 7)
    assert [ids(saver, config(thread))[0] for thread in "tabc"] == [
        "00000003", "00000005", "00000007", "00000006",
    ]  # fmt: skip
    saver.delete_thread("t")
    home.store.gc()
    assert [ids(saver, config(thread)) for thread in "abc"] == [
        ["00000005", "00000002"], ["00000007", "00000002"], ["00000006", "00000005", "00000002"],
    ]  # fmt: skip


@pytest.mark.parametrize("durability", DURABILITY)
def test_a_fork_at_a_question_answers_it(home: Home, durability: Any) -> None:
    ran: list[str] = []
    graph = asking(HoldfastSaver(home.store), ran)
    graph.invoke({"steps": []}, graphs.CONFIG, durability=durability)
    asked = graph.get_state(graphs.CONFIG)
    session = home.store.session("t")
    session.fork("early")
    graph.invoke(Command(resume="yes"), graphs.CONFIG, durability=durability)
    end = graph.get_state(graphs.CONFIG)
    session.fork("late", at=f"key:{asked.config['configurable']['checkpoint_id']}")
    before = untouched(home), [*graph.checkpointer.list(graphs.CONFIG)]
    for thread in ("early", "late"):
        where = config(thread)
        again = graph.get_state(where)
        assert (again.values, again.next) == (asked.values, asked.next)
        assert again.interrupts == asked.interrupts
        assert again.config["configurable"]["thread_id"] == thread
        ran.clear()
        done = graph.invoke(Command(resume="no"), where, durability=durability)
        assert done["steps"] == ["one", "no", "beside", "end 2"]
        assert ran == ["ask", "end"]
        assert graph.get_state(where).values == done
        if durability != "exit":
            assert len([*graph.get_state_history(where)]) == 5
    assert graph.get_state(graphs.CONFIG) == end
    assert (untouched(home), [*graph.checkpointer.list(graphs.CONFIG)]) == before
    fork = home.store.session("early")
    fork.rewind(f"key:{asked.config['configurable']['checkpoint_id']}")
    assert graph.get_state(config("early")).interrupts == asked.interrupts
    fork.rewind(next(fork.tree()))
    assert graph.get_state(config("early")).interrupts == asked.interrupts
    done = graph.invoke(Command(resume="maybe"), config("early"), durability=durability)
    assert done["steps"][1] == "maybe"
    assert home.store.verify().ok


def asks_twice(home: Home) -> Any:
    """A thread whose only step waits for the first of two answers."""
    builder = StateGraph(graphs.Plan)
    builder.add_node("ask", lambda _: {"steps": [interrupt("first?"), interrupt("second?")]})
    builder.add_edge(START, "ask")
    graph: Any = builder.compile(checkpointer=HoldfastSaver(home.store))
    graph.invoke({"steps": []}, graphs.CONFIG)
    return graph


def test_a_fork_waits_for_the_last_answer(home: Home) -> None:
    graph = asks_twice(home)
    graph.invoke(Command(resume="a"), graphs.CONFIG)
    home.store.session("t").fork("fork")
    graph.invoke(Command(resume="b"), graphs.CONFIG)
    assert [i.value for i in graph.get_state(FORK).interrupts] == ["second?"]
    assert graph.invoke(Command(resume="c"), FORK)["steps"] == ["a", "c"]


def test_what_its_origin_is_answered_later_is_not_the_forks(home: Home) -> None:
    graph = asks_twice(home)
    home.store.session("t").fork("fork")
    graph.invoke(Command(resume="a"), graphs.CONFIG)
    home.store.session("fork").fork("other")
    for thread in ("fork", "other"):
        assert [i.value for i in graph.get_state(config(thread)).interrupts] == ["first?"]
        graph.invoke(Command(resume="b"), config(thread))
        assert graph.invoke(Command(resume="c"), config(thread))["steps"] == ["b", "c"]
    assert graph.invoke(Command(resume="d"), graphs.CONFIG)["steps"] == ["a", "d"]


def test_an_answer_that_is_being_worked_on_is_not_the_forks(home: Home) -> None:
    fails: list[bool] = []

    def node(_: Any) -> Any:
        said = interrupt("really?")
        if fails:
            raise OSError("crash")
        return {"steps": [said]}

    builder: Any = StateGraph(graphs.Plan)
    builder.add_node("ask", node)
    builder.add_edge(START, "ask")
    graph: Any = builder.compile(checkpointer=HoldfastSaver(home.store))
    graph.invoke({"steps": []}, graphs.CONFIG)
    fails.append(True)
    with pytest.raises(OSError, match="crash"):
        graph.invoke(Command(resume="yes"), graphs.CONFIG)
    fails.clear()
    home.store.session("t").fork("fork")
    assert [i.value for i in graph.get_state(FORK).interrupts] == ["really?"]
    assert graph.invoke(Command(resume="no"), FORK)["steps"] == ["no"]
    assert graph.invoke(None, graphs.CONFIG)["steps"] == ["yes"]


@pytest.mark.parametrize("durability", DURABILITY)
def test_delta_channels_of_a_fork(home: Home, durability: Any) -> None:
    saver = HoldfastSaver(home.store)
    graph = logging(saver)
    done = graph.invoke({"log": []}, graphs.CONFIG, durability="sync")
    home.store.session("t").fork("fork", at="@~3")
    state = graph.get_state(FORK)
    assert state.values == {"log": ["0", "1", "2"], "plain": ["0", "1", "2"]}
    assert graph.invoke(None, FORK, durability=durability) == done
    graph.invoke({"log": ["more"]}, FORK, durability=durability)
    for state in graph.get_state_history(FORK):
        told = [w for w in state.values["log"] if w != "more"]
        assert told == state.values.get("plain", [])
    saver.prune(["fork"])
    assert graph.get_state(FORK).values["log"][:7] == ["0", "1", "2", "3", "4", "5", "more"]
    saver.copy_thread("fork", "copy")
    saver.delete_thread("t")
    assert graph.get_state(config("copy")).values["log"][:7][-1] == "more"


def test_delta_channels_whose_writes_went_with_the_origin_are_told_of(home: Home) -> None:
    saver = HoldfastSaver(home.store)
    graph = logging(saver)
    graph.invoke({"log": []}, graphs.CONFIG)
    session = home.store.session("t")
    session.fork("fork", at="@~3")
    saver.delete_thread("t")
    with pytest.raises(CheckpointNotFound, match="made of was deleted"):
        graph.get_state(FORK)
    session.undo()
    assert graph.get_state(FORK).values["log"] == ["0", "1", "2"]


@pytest.mark.parametrize("gc", [False, True])
def test_a_fork_outlives_its_origin(home: Home, gc: bool) -> None:
    saver = HoldfastSaver(home.store)
    graph = asking(saver, [])
    graph.invoke({"steps": []}, graphs.CONFIG)
    asked = graph.get_state(graphs.CONFIG)
    home.store.session("t").fork("fork").fork("other")
    saver.delete_thread("t")
    if gc:
        home.store.gc()
    for thread in ("fork", "other"):
        again = graph.get_state(config(thread))
        assert (again.values, again.next, again.interrupts, again.metadata) == (
            asked.values, asked.next, asked.interrupts, asked.metadata,
        )  # fmt: skip
        assert len([*graph.get_state_history(config(thread))]) == 1
        assert graph.invoke(Command(resume="no"), config(thread))["steps"][1] == "no"
    graph.invoke({"steps": ["anew"]}, graphs.CONFIG)
    assert graph.get_state(FORK).values["steps"][1] == "no"
    assert home.store.verify().ok


def test_a_fork_that_lost_its_origin_says_so(home: Home) -> None:
    saver = HoldfastSaver(home.store)
    chain(saver, 3)
    session = home.store.session("t")
    session.fork("fork", at="key:00000002")
    put(saver, config("other"), {}, 1)
    session.delete()
    for ask in (
        lambda: saver.get_tuple(FORK),
        lambda: [*saver.list(FORK)],
        lambda: put(saver, config("fork", id="00000002"), {"n": 9}, 9),
        lambda: saver.copy_thread("fork", "copy"),
    ):
        with pytest.raises(CheckpointNotFound, match="begins with was deleted"):
            ask()
    assert [t.config["configurable"]["thread_id"] for t in saver.list(None)] == ["other"]
    session.undo()
    assert ids(saver, FORK) == ["00000002", "00000001"]
    session.delete("key:00000002")
    with pytest.raises(CheckpointNotFound):
        saver.get_tuple(FORK)
    saver.delete_thread("fork")
    assert saver.get_tuple(FORK) is None


def test_a_fork_is_deleted_alone(home: Home) -> None:
    saver = HoldfastSaver(home.store)
    chain(saver, 3)
    before = untouched(home)
    for more in (False, True):
        home.store.session("t").fork("fork", at="key:00000002")
        if more:
            put(saver, config("fork", id="00000002"), {"n": 9}, 9)
        saver.delete_thread("fork")
        assert saver.get_tuple(FORK) is None
        assert everything(saver, "fork") == []
    put(saver, FORK, {"n": 1}, 1)
    assert ids(saver, FORK) == ["00000001"]
    assert untouched(home) == before


def test_pruning_a_fork_and_its_origin(home: Home) -> None:
    saver = HoldfastSaver(home.store)
    chain(saver, 4)
    home.store.session("t").fork("fork", at="key:00000002")
    saver.prune(["fork"])
    assert ids(saver, FORK) == ["00000002", "00000001"]
    for n in (6, 7):
        put(saver, config("fork", id="00000002" if n == 6 else "00000006"), {"n": n}, n)
    saver.prune(["fork"])
    assert ids(saver, FORK) == ["00000007", "00000002", "00000001"]
    with pytest.raises(KeyTaken, match="not yet freed"):
        put(saver, config("fork", id="00000002"), {"n": 8}, 8)
    home.store.session("t").fork("second", at="key:00000003")
    saver.prune(["t"])
    assert ids(saver) == ["00000004"]
    assert ids(saver, FORK) == ["00000007"]
    assert ids(saver, config("second")) == ["00000003"]
    saver.prune(["second"], strategy="delete")
    assert ids(saver, config("second")) == []


def test_runs_are_deleted_from_forks_too(home: Home) -> None:
    saver = HoldfastSaver(home.store)
    put(saver, config(), {"n": 1}, 1, run_id="r1")
    put(saver, config(id="00000001"), {"n": 2}, 2, run_id="r2")
    session = home.store.session("t")
    for name in ("fork", "goes"):
        session.fork(name)
    put(saver, config("fork", id="00000002"), {"n": 3}, 3, run_id="r3")
    saver.delete_for_runs(["r2"])
    assert ids(saver) == ["00000001"]
    assert ids(saver, FORK) == ["00000003", "00000001"]
    assert saver.get_tuple(config("goes")) is None
    saver.delete_for_runs(["r1"])
    assert ids(saver, FORK) == ["00000003"]


def test_a_copy_of_a_fork_stands_alone(home: Home) -> None:
    saver = HoldfastSaver(home.store)
    graph = asking(saver, [])
    graph.invoke({"steps": []}, graphs.CONFIG)
    home.store.session("t").fork("fork")
    graph.invoke(Command(resume="yes"), graphs.CONFIG)
    saver.copy_thread("fork", "copy")
    asked = graph.get_state(FORK)
    for thread in ("t", "fork"):
        saver.delete_thread(thread)
    home.store.gc()
    again = graph.get_state(config("copy"))
    assert (again.values, again.interrupts) == (asked.values, asked.interrupts)
    assert len([*graph.get_state_history(config("copy"))]) == 3
    assert graph.invoke(Command(resume="no"), config("copy"))["steps"][1] == "no"


def test_another_way_from_a_checkpoint_that_a_fork_has_inherited(home: Home) -> None:
    saver = HoldfastSaver(home.store)
    graph = logging(saver)
    graph.invoke({"log": []}, graphs.CONFIG)
    session = home.store.session("t")
    before = untouched(home)
    session.fork("fork", at="@~2")
    past = [*graph.get_state_history(FORK)][2]
    assert past.values["plain"] == ["0", "1"]
    saver.put_writes(past.config, [("plain", ["x"])], "task")
    assert len(graph.get_state(FORK).values["plain"]) == 4
    done = graph.invoke(None, past.config)
    assert done["plain"] == [str(n) for n in range(6)]
    assert graph.get_state(FORK).values == done
    assert untouched(home) == before
    key = past.config["configurable"]["checkpoint_id"]
    fork = home.store.session("fork")
    fork.rewind(f"key:{key}")
    assert graph.get_state(FORK).values["plain"] == ["0", "1"]
    with pytest.raises(InvalidRequest, match="lies in session 't'"):
        fork.rewind(next(c for c in fork.history() if c.session == "t"))


def test_writes_of_a_fork_survive_gc(home: Home) -> None:
    saver = HoldfastSaver(home.store)
    chain(saver, 2)
    saver.put_writes(config(id="00000002"), [("__interrupt__", "why?")], "task")
    home.store.session("t").fork("fork")
    for n in range(80):
        saver.put_writes(config("fork", id="00000002"), [("n", n)], f"task {n:02}")
    home.store.gc()
    again = HoldfastSaver(home.reopened())
    assert len(latest(again, FORK).pending_writes or ()) == 81
    assert latest(again).pending_writes == [("task", "__interrupt__", "why?")]


def test_a_fork_of_nothing_yet(home: Home) -> None:
    saver = HoldfastSaver(home.store)
    saver.put_writes(config(id="00000001"), [("n", 1)], "task")
    home.store.session("t").fork("fork")
    assert saver.get_tuple(FORK) is None
    put(saver, FORK, {"n": 1}, 1)
    assert ids(saver, FORK) == ["00000001"]


def test_a_fork_of_somebody_elses_session_is_no_thread(home: Home) -> None:
    saver = HoldfastSaver(home.store)
    session = home.store.session("else")
    session.save({"n": 1})
    session.fork("fork")
    for ask in (
        lambda: saver.get_tuple(FORK),
        lambda: put(saver, FORK, {"n": 1}, 1),
        lambda: [*saver.list(FORK)],
        lambda: saver.delete_thread("fork"),
    ):
        with pytest.raises(InvalidRequest, match="not a thread"):
            ask()
    assert [*saver.list(None)] == []


def test_two_that_go_on_with_a_fork_are_siblings(home: Home) -> None:
    savers = [HoldfastSaver(home.store) for _ in range(2)]
    chain(savers[0], 2)
    home.store.session("t").fork("fork")
    for n, saver in enumerate(savers):
        put(saver, config("fork", id="00000002"), {"n": n}, 5 + n)
    assert ids(savers[0], FORK) == ["00000006", "00000005", "00000002", "00000001"]


def test_two_that_take_over_what_a_fork_begins_with_lose_no_writes(home: Home) -> None:
    savers = [HoldfastSaver(home.store) for _ in range(2)]
    chain(savers[0], 2)
    savers[0].put_writes(config(id="00000002"), [("__interrupt__", "why?")], "task 1")
    home.store.session("t").fork("fork")
    late = savers[1]._threads.namespace(ThreadAddress("fork"))
    found = late.find("00000002")
    assert found is not None
    savers[0].put_writes(config("fork", id="00000002"), [("n", 1)], "task 2")
    late._copy(found)
    assert latest(savers[1], FORK).pending_writes == [
        ("task 1", "__interrupt__", "why?"), ("task 2", "n", 1),
    ]  # fmt: skip


def test_a_fork_goes_on_with_asyncio(home: Home) -> None:
    async def run() -> None:
        graph = asking(HoldfastSaver(home.store), [])
        await graph.ainvoke({"steps": []}, graphs.CONFIG)
        home.store.session("t").fork("fork")
        done = await graph.ainvoke(Command(resume="no"), FORK)
        assert done["steps"][1] == "no"
        assert (await graph.aget_state(graphs.CONFIG)).interrupts

    asyncio.run(run())
