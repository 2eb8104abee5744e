"""What the saver promises beyond LangGraph's suite."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import operator
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import ormsgpack
import psycopg
import pytest
from langchain_core.agents import AgentAction, AgentActionMessageLog, AgentFinish
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.channels.delta import DeltaChannel
from langgraph.checkpoint.base import BaseCheckpointSaver, CheckpointTuple, empty_checkpoint
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import START, StateGraph
from langgraph.types import Command, Send, interrupt
from psycopg import sql
from psycopg.rows import dict_row

from holdfast.adapters.langgraph import (
    HoldfastSaver,
    StrictSerializer,
    adopt,
)
from holdfast.adapters.langgraph import (
    saver as langgraph_saver,
)
from holdfast.adapters.langgraph.namespace import Namespace
from holdfast.errors import Corrupt, InvalidRequest, KeyTaken, NotSerializable, UnsupportedFormat
from holdfast.format import rows
from holdfast.history import lineage
from tests.adapters import graphs
from tests.mutants import langgraph as mutants
from tests.support import postgres

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.stores import Home


def config(thread: Any = "t", ns: str = "", id: str | None = None) -> Any:
    asked = {"thread_id": thread, "checkpoint_ns": ns} | ({"checkpoint_id": id} if id else {})
    return {"configurable": asked}


def put(saver: HoldfastSaver, where: Any, channels: dict[str, Any], n: int = 0, **meta: Any) -> Any:
    checkpoint = {**empty_checkpoint(), "id": f"{n:08}", "channel_values": channels}
    return saver.put(where, checkpoint, {"source": "loop", "step": n, **meta}, {})  # type: ignore[arg-type,typeddict-item]


def latest(saver: HoldfastSaver, where: Any = None) -> CheckpointTuple:
    found = saver.get_tuple(where or config())
    assert found is not None
    return found


def ids(saver: HoldfastSaver, where: Any = None, **options: Any) -> list[str]:
    return [t.checkpoint["id"] for t in saver.list(where or config(), **options)]


@pytest.fixture
def saver(memory: Home) -> HoldfastSaver:
    return HoldfastSaver(memory.store)


# -- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [{}, {"configurable": {}}, config(None), config("")])
def test_a_config_without_a_thread(saver: HoldfastSaver, wrong: Any) -> None:
    for call in (
        lambda: saver.get_tuple(wrong),
        lambda: put(saver, wrong, {}),
        lambda: list(saver.list(wrong)),
        lambda: saver.put_writes(wrong | {"configurable": {"checkpoint_id": "1"}}, [], "task"),
    ):
        with pytest.raises(InvalidRequest, match="thread"):
            call()
    assert not list(saver.store.sessions())


@pytest.mark.parametrize("wrong", [None, 7, object()])
def test_something_that_is_no_store(wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match="a store or a URL"):
        HoldfastSaver(wrong)


def test_a_database_of_somebody_else(tmp_path: Path) -> None:
    with SqliteSaver.from_conn_string(str(tmp_path / "theirs.db")) as theirs:
        theirs.setup()
    before = (tmp_path / "theirs.db").read_bytes()
    with pytest.raises(UnsupportedFormat, match="no holdfast store"):
        HoldfastSaver(tmp_path / "theirs.db")
    assert (tmp_path / "theirs.db").read_bytes() == before


def test_a_session_of_somebody_else(saver: HoldfastSaver) -> None:
    theirs = saver.store.session("t")
    theirs.save({"not": "ours"})
    for call in (
        lambda: saver.get_tuple(config()),
        lambda: list(saver.list(config())),
        lambda: put(saver, config(), {}),
        lambda: saver.prune(["t"]),
        lambda: saver.delete_thread("t"),
    ):
        with pytest.raises(InvalidRequest, match="not a thread of LangGraph"):
            call()
    assert theirs.load() == {"not": "ours"}
    assert len(theirs) == 1


def test_what_cannot_be_stored_leaves_nothing(saver: HoldfastSaver) -> None:
    put(saver, config(), {"messages": ["first"]}, 1)
    with pytest.raises(NotSerializable, match=r"messages\[1\]"):
        put(saver, config(), {"messages": ["first", threading.Lock()]}, 2)
    with pytest.raises(NotSerializable, match="result"):
        saver.put_writes(config(id="00000001"), [("result", threading.Lock())], "task")
    with pytest.raises(NotSerializable, match=r"metadata\.why"):
        put(saver, config(), {}, 3, why=threading.Lock())
    assert ids(saver) == ["00000001"]
    assert latest(saver).pending_writes == []


def test_writes_for_no_checkpoint(saver: HoldfastSaver) -> None:
    with pytest.raises(InvalidRequest, match="no checkpoint"):
        saver.put_writes(config(), [("a", 1)], "task")


def test_unknown_strategy(saver: HoldfastSaver) -> None:
    with pytest.raises(InvalidRequest, match="strategy"):
        saver.prune(["t"], strategy="keep_some")


def test_another_checkpoint_of_the_same_id(saver: HoldfastSaver) -> None:
    put(saver, config(), {"a": 1}, 1)
    stored = latest(saver).checkpoint
    meta: Any = {"source": "loop", "step": 1}
    saver.put(config(), stored, meta, {})  # put again: nothing happens
    with pytest.raises(KeyTaken):
        saver.put(config(), {**stored, "channel_values": {"a": 2}}, meta, {})
    assert latest(saver).checkpoint == stored
    assert ids(saver) == ["00000001"]


# -- threads and ids -----------------------------------------------------------------------------


def test_no_two_threads_share_a_session(home: Home) -> None:
    saver = HoldfastSaver(home.store)
    places = [("a", ""), ("a", "b"), ("a|b", ""), ("a%7Cb", ""), ("a", "b|c:1"), ("a|b", "c:1")]
    for n, (thread, ns) in enumerate(places):
        put(saver, config(thread, ns), {"n": n}, n)
    for n, (thread, ns) in enumerate(places):
        found = latest(saver, config(thread, ns))
        assert found.checkpoint["channel_values"] == {"n": n}
        assert found.config["configurable"]["thread_id"] == thread
        assert found.config["configurable"]["checkpoint_ns"] == ns
    assert len([*saver.list(None)]) == len(places)
    assert len([*saver.list({"configurable": {"thread_id": "a"}})]) == 3
    saver.delete_thread("a")
    assert len([*saver.list(None)]) == 3


def test_a_thread_may_be_a_number(saver: HoldfastSaver) -> None:
    done = put(saver, config(7), {"a": 1})
    assert done["configurable"]["thread_id"] == 7
    assert latest(saver, config(7)).checkpoint["channel_values"] == {"a": 1}


def test_the_highest_id_is_the_latest_whatever_comes_late(home: Home) -> None:
    saver = HoldfastSaver(home.store)
    for n in (1, 5, 3, 9, 2, 8, 4):
        put(saver, config(), {"n": n}, n)
    assert latest(saver).checkpoint["channel_values"] == {"n": 9}
    ordered = [f"{n:08}" for n in (9, 8, 5, 4, 3, 2, 1)]
    assert ids(saver) == ordered
    assert ids(saver, limit=3) == ordered[:3]
    assert ids(saver, before=config(id="00000005")) == ordered[3:]


def test_a_list_reads_no_more_than_it_must(sqlite: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = HoldfastSaver(sqlite.store)
    for n in range(600):
        put(saver, config(), {"n": n}, n)
    read: list[int] = []
    dress = lineage.to_checkpoint
    monkeypatch.setattr(lineage, "to_checkpoint", lambda *a: read.append(1) or dress(*a))  # type: ignore[func-returns-value]
    assert ids(saver, limit=2) == ["00000599", "00000598"]
    assert len(read) < 600


def talk(saver: HoldfastSaver, count: int) -> None:
    """A thread that grows by a message in each step."""
    said: list[Any] = []
    for n in range(count):
        said.append(AIMessage(f"{n} " + 200 * "x", id=str(n)))
        where = config(id=f"{n - 1:08}" if n else None)
        put(saver, where, {"messages": said[:], "plan": {"steps": [n]}}, n)


def test_a_history_reads_each_message_once(sqlite: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = HoldfastSaver(sqlite.store)
    talk(saver, 100)
    seen: list[int] = []
    unseal = rows.unseal_items
    monkeypatch.setattr(rows, "unseal_items", lambda *a: seen.append(1) or unseal(*a))  # type: ignore[func-returns-value]
    history = [*saver.list(config())]
    assert [len(t.checkpoint["channel_values"]["messages"]) for t in history] == [
        *range(100, 0, -1)
    ]
    assert 0 < len(seen) <= 100


def test_a_history_of_a_list_that_is_edited(saver: HoldfastSaver) -> None:
    rng = random.Random(4)
    said = [HumanMessage(f"{n} " + 100 * "x", id=str(n)) for n in range(30)]
    for n in range(40):
        if n % 3 == 0:
            said[rng.randrange(len(said))] = HumanMessage(f"edit {n} " + 100 * "y", id=f"e{n}")
        elif n % 3 == 1:
            del said[rng.randrange(len(said))]
        put(saver, config(id=f"{n - 1:08}" if n else None), {"messages": said[:]}, n)
    history = [*saver.list(config())]
    assert len(history) == 40
    assert history == [latest(saver, t.config) for t in history]


def test_states_of_a_history_share_no_lists_and_no_other_values(saver: HoldfastSaver) -> None:
    talk(saver, 20)
    expected = [latest(saver, config(id=id)).checkpoint for id in ids(saver)]
    history = saver.list(config())
    for n, (found, wanted) in enumerate(zip(history, expected, strict=True)):
        assert found.checkpoint == wanted, n
        state = found.checkpoint["channel_values"]
        state["messages"].clear()
        state["plan"]["steps"].append("changed")
        found.checkpoint["channel_versions"]["messages"] = "changed"


def test_a_damaged_message_is_missed_by_those_that_hold_it(home: Home) -> None:
    saver = HoldfastSaver(home.store)
    talk(saver, 25)
    expected = {id: latest(saver, config(id=id)) for id in ids(saver)}
    newest = max(expected)
    home.spoil_newest_item()
    with pytest.raises(Corrupt, match="item"):
        [*saver.list(config())]
    assert {t.checkpoint["id"]: t for t in saver.list(config(), before=config(id=newest))} == {
        id: found for id, found in expected.items() if id != newest
    }
    with pytest.raises(Corrupt, match="item"):
        latest(saver)


def test_a_damaged_record_is_told_as_such(home: Home) -> None:
    saver = HoldfastSaver(home.store)
    talk(saver, 3)
    newest = home.store.session("t").get()
    home.spoil_checkpoint(newest.seq, name="t")
    with pytest.raises(Corrupt, match="damaged"):
        [*HoldfastSaver(home.another()).list(config())]


def test_two_that_continue_the_same_checkpoint_are_siblings(home: Home) -> None:
    first = HoldfastSaver(home.store)
    second = HoldfastSaver(home.another())
    put(first, config(), {"n": 1}, 1)
    for saver, n in ((first, 2), (second, 3), (first, 4)):
        put(saver, config(id="00000001"), {"n": n}, n)
    parents = {
        t.checkpoint["id"]: (t.parent_config or config())["configurable"].get("checkpoint_id")
        for t in second.list(config())
    }
    root = "00000001"
    assert parents == {"00000004": root, "00000003": root, "00000002": root, root: None}
    tree = {c.key: c.parent for c in home.store.session("t").tree()}
    by_key = {c.key: c.id for c in home.store.session("t").tree()}
    assert {tree[key] for key in tree if key != root} == {by_key[root]}


def test_many_threads_at_once(sqlite: Home) -> None:
    saver, errors = HoldfastSaver(sqlite.store), list[BaseException]()

    def work(worker: int) -> None:
        try:
            for n in range(20):
                at = put(saver, config(f"t{worker % 3}"), {"n": n}, 100 * n + worker)
                saver.put_writes(at, [("a", n), ("b", worker)], f"task {worker}")
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    found = [*saver.list(None)]
    assert len(found) == 180
    assert all(len(t.pending_writes or ()) == 2 for t in found)


def test_a_session_that_was_rewound_goes_on_from_there(home: Home) -> None:
    saver = HoldfastSaver(home.store)
    for n in range(1, 5):
        put(saver, config(), {"n": n}, n)
    session = home.store.session("t")
    session.rewind("key:00000002")
    assert latest(saver).checkpoint["channel_values"] == {"n": 2}
    assert len(ids(saver)) == 4
    put(saver, config(id="00000002"), {"n": 7}, 7)
    assert latest(saver).checkpoint["channel_values"] == {"n": 7}
    assert ids(saver)[0] == "00000007"
    assert session.diff("key:00000002", "key:00000007")


def asking(saver: Any, ran: list[str]) -> Any:
    """A graph that asks a person in its second step, beside another task."""

    def step(name: str, say: Any) -> Any:
        def node(_: graphs.Plan) -> Any:
            ran.append(name)
            return {"steps": [say()]}

        return node

    builder = StateGraph(graphs.Plan)
    builder.add_node("one", step("one", lambda: "one"))
    builder.add_node("ask", step("ask", lambda: interrupt("go on?")))
    builder.add_node("beside", step("beside", lambda: "beside"))
    builder.add_node("end", step("end", lambda: f"end {len(ran)}"))
    builder.add_edge(START, "one")
    builder.add_edge("one", "ask")
    builder.add_edge("one", "beside")
    builder.add_edge(["ask", "beside"], "end")
    return builder.compile(checkpointer=saver)


@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
def test_a_thread_that_was_rewound_to_a_question_can_be_answered_anew(
    home: Home, durability: Any
) -> None:
    ran: list[str] = []
    graph = asking(HoldfastSaver(home.store), ran)
    graph.invoke({"steps": []}, graphs.CONFIG, durability=durability)
    asked = graph.get_state(graphs.CONFIG)
    graph.invoke(Command(resume="yes"), graphs.CONFIG, durability=durability)
    key = asked.config["configurable"]["checkpoint_id"]
    for n, answer in enumerate(["no", "maybe"]):
        home.store.session("t").rewind(f"key:{key}")
        again = graph.get_state(graphs.CONFIG)
        assert (again.values, again.next) == (asked.values, asked.next)
        assert again.interrupts == asked.interrupts
        ran.clear()
        done = graph.invoke(Command(resume=answer), graphs.CONFIG, durability=durability)
        assert done["steps"] == ["one", answer, "beside", "end 2"]
        assert ran == ["ask", "end"]
        assert graph.get_state(graphs.CONFIG).values == done
        count = 2 + n + 1 if durability == "exit" else 5 + 2 * (n + 1)
        assert len([*graph.get_state_history(graphs.CONFIG)]) == count
    home.store.session("t").rewind(f"key:{key}")
    graph.checkpointer.prune(["t"])
    again = graph.get_state(graphs.CONFIG)
    assert (again.values, again.next, again.interrupts) == (
        asked.values, asked.next, asked.interrupts,
    )  # fmt: skip


@pytest.mark.parametrize("durability", ["sync", "async"])
def test_a_step_that_was_rewound_is_done_again(home: Home, durability: Any) -> None:
    ran: list[str] = []

    class Log(TypedDict):
        log: Annotated[list[str], DeltaChannel(graphs._all, list, snapshot_frequency=50)]
        plain: Annotated[list[str], operator.add]

    def node(_: Any) -> Any:
        ran.append("ran")
        return {"log": [f"run {len(ran)}"], "plain": [f"run {len(ran)}"]}

    builder: Any = StateGraph(Log)
    for name in ("a", "b", "c"):
        builder.add_node(name, node)
    builder.add_edge(START, "a")
    builder.add_edge("a", "b")
    builder.add_edge("b", "c")
    saver = HoldfastSaver(home.store)
    graph: Any = builder.compile(checkpointer=saver)
    first = graph.invoke({"log": []}, graphs.CONFIG, durability=durability)
    for back in range(2):
        home.store.session("t").rewind("@~2")
        state = graph.get_state(graphs.CONFIG)
        assert (state.values, state.next) == ({"log": ["run 1"], "plain": ["run 1"]}, ("b",))
        done = graph.invoke(None, graphs.CONFIG, durability=durability)
        expected = ["run 1", f"run {2 * back + 4}", f"run {2 * back + 5}"]
        assert done == {"log": expected, "plain": expected}
    saver.copy_thread("t", "copy")
    for thread in ("t", "copy"):
        ends = [s for s in graph.get_state_history(config(thread)) if not s.next]
        assert [s.values for s in ends][0::2] == [done, first]
        for end in ends:
            assert end.values["log"] == end.values["plain"]


def test_a_copy_of_a_rewound_thread_goes_on_from_there(home: Home) -> None:
    saver = HoldfastSaver(home.store)
    for n in range(1, 5):
        put(saver, config(id=f"{n - 1:08}" if n > 1 else None), {"n": n}, n)
    home.store.session("t").rewind("key:00000002")
    for _ in range(2):
        saver.copy_thread("t", "copy")
        assert latest(saver, config("copy")).checkpoint["channel_values"] == {"n": 2}
        assert ids(saver, config("copy")) == ids(saver)
    put(saver, config("copy", id="00000002"), {"n": 7}, 7)
    saver.copy_thread("t", "copy")
    assert latest(saver, config("copy")).checkpoint["channel_values"] == {"n": 7}


# -- writes --------------------------------------------------------------------------------------


def test_writes_that_come_before_their_checkpoint(home: Home) -> None:
    saver = HoldfastSaver(home.store)
    saver.put_writes(config(id="00000001"), [("early", 1)], "task")
    assert saver.get_tuple(config()) is None
    assert ids(saver) == []
    put(saver, config(), {"n": 1}, 1)
    saver.put_writes(config(id="00000002"), [("early", 2)], "task")
    saver.put_writes(config(id="00000001"), [("late", 3)], "other")
    put(saver, config(id="00000001"), {"n": 2}, 2)
    for each in (saver, HoldfastSaver(home.another())):
        assert latest(each).pending_writes == [("task", "early", 2)]
        first = latest(each, config(id="00000001")).pending_writes
        assert first == [("other", "late", 3), ("task", "early", 1)]


def test_writes_go_with_their_checkpoints(home: Home) -> None:
    saver = HoldfastSaver(home.store)
    for n in range(1, 40):
        at = put(saver, config(), {"n": n}, n)
        saver.put_writes(at, [("secret", f"of {n}")], "task")
    saver.prune(["t"])
    home.store.gc()
    assert ids(saver) == ["00000039"]
    assert latest(saver).pending_writes == [("task", "secret", "of 39")]
    with home.store._repository.reader() as reader:
        number = reader.session(b"t")[0]  # type: ignore[index]
        left = reader.journal(number, 0, 1000)
    assert len(left) == 1
    at = put(saver, config(id="00000039"), {"n": 40}, 40)
    saver.put_writes(at, [("secret", "of 40")], "task")
    saver.prune(["t"])
    home.store.gc()
    assert latest(HoldfastSaver(home.another())).pending_writes == [("task", "secret", "of 40")]
    assert home.store.verify().ok


def test_deleted_threads_begin_anew_and_come_back(home: Home) -> None:
    saver = HoldfastSaver(home.store)
    at = put(saver, config(), {"n": 1}, 1)
    saver.put_writes(at, [("a", 1)], "task")
    saver.delete_thread("t")
    assert saver.get_tuple(config()) is None
    put(saver, config(), {"n": 2}, 1)
    assert latest(saver).checkpoint["channel_values"] == {"n": 2}
    assert latest(saver).pending_writes == []


def test_a_delta_channel_survives_pruning(home: Home) -> None:
    saver = HoldfastSaver(home.store)
    graph = graphs.delta(saver, "sync")
    before = graph.get_state(graphs.CONFIG).values
    count = len(ids(saver, graphs.CONFIG))
    saver.prune(["t"])
    assert len(ids(saver, graphs.CONFIG)) < count
    assert graph.get_state(graphs.CONFIG).values == before
    home.store.gc()
    assert graph.get_state(graphs.CONFIG).values == before


def channels(saver: HoldfastSaver, where: Any = None) -> dict[str, Any]:
    return latest(saver, where).checkpoint["channel_values"]


def test_what_a_saver_remembers_is_not_older_than_its_session(home: Home) -> None:
    """After deletions, its own and others', a state is what was put, not that plus a delta."""
    saver, other = HoldfastSaver(home.store), HoldfastSaver(home.another())
    put(saver, config(), {"log": ["a"]}, 1, run_id="one")
    put(saver, config(id="00000001"), {"log": ["a", "b"]}, 2, run_id="two")
    saver.delete_for_runs(["two"])
    put(saver, config(id="00000002"), {"log": ["a", "b", "c"]}, 3)
    assert channels(saver) == {"log": ["a", "b", "c"]}
    put(other, config(id="00000003"), {"log": ["x", "y"]}, 4)
    saver.prune(["t"])
    put(saver, config(id="00000003"), {"log": ["a", "b", "c", "d"]}, 5)
    assert channels(saver) == channels(other) == {"log": ["a", "b", "c", "d"]}
    other.delete_thread("t")
    home.store.gc()
    saver.put_writes(config(id="00000005"), [("early", 1)], "task")
    put(saver, config(id="00000005"), {"log": ["a", "b", "c", "d", "e"]}, 6)
    assert channels(saver) == channels(other) == {"log": ["a", "b", "c", "d", "e"]}


def test_writes_after_somebody_else_has_deleted_the_thread(home: Home) -> None:
    saver, other = HoldfastSaver(home.store), HoldfastSaver(home.another())
    for n in range(1, 4):
        saver.put_writes(put(saver, config(), {"n": n}, n), [("a", n)], "task")
    other.delete_thread("t")
    put(saver, config(id="00000003"), {"n": 4}, 4)
    at = put(saver, config(id="00000004"), {"n": 5}, 5)
    saver.put_writes(at, [("a", 5)], "task")
    for each in (saver, other):
        assert latest(each).pending_writes == [("task", "a", 5)]


def test_pruning_beside_a_put(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    saver, other = HoldfastSaver(home.store), HoldfastSaver(home.another())
    for n in (1, 2):
        put(saver, config(), {"n": n}, n, run_id="old")
    own, late = Namespace.own, [3, 4]

    def beside(self: Namespace, **options: Any) -> Any:
        found = [*own(self, **options)]
        if late:
            n = late.pop(0)
            monkeypatch.undo()
            put(other, config(), {"n": n}, n, run_id="new")
            monkeypatch.setattr(Namespace, "own", beside)
        return iter(found)

    monkeypatch.setattr(Namespace, "own", beside)
    saver.delete_for_runs(["old"])
    monkeypatch.undo()
    assert channels(saver) == {"n": 4}
    assert ids(saver) == ["00000004", "00000003"]


def test_pruning_a_thread_that_is_only_beginning(home: Home) -> None:
    saver = HoldfastSaver(home.store)
    saver.put_writes(config(id="00000001"), [("early", 1)], "task")
    saver.prune(["t"])
    put(saver, config(), {"n": 1}, 1)
    assert latest(saver).pending_writes == [("task", "early", 1)]


def test_gc_leaves_writes_whose_checkpoint_is_still_to_come(home: Home) -> None:
    saver = HoldfastSaver(home.store)
    put(saver, config(), {"n": 1}, 1)
    saver.put_writes(config(id="00000003"), [("early", 1)], "task")
    saver.put_writes(put(saver, config(), {"n": 2}, 2), [("a", 2)], "task")
    saver.prune(["t"])
    home.store.gc()
    put(saver, config(id="00000002"), {"n": 3}, 3)
    assert latest(saver).pending_writes == [("task", "early", 1)]


def test_early_writes_are_found_whatever_else_goes_on(saver: HoldfastSaver) -> None:
    put(saver, config(), {"n": 1}, 1)
    saver.put_writes(config(id="00000002"), [("early", 1)], "task")
    for n in range(300):
        saver.get_tuple(config(f"other {n}"))
    put(saver, config(id="00000001"), {"n": 2}, 2)
    assert latest(saver).pending_writes == [("task", "early", 1)]


# -- values --------------------------------------------------------------------------------------


class Colour(HumanMessage):
    """A type that LangGraph does not know."""


@dataclasses.dataclass
class Point:
    x: int
    y: int


def test_types_that_are_not_allowed_are_refused_before_they_are_stored(home: Home) -> None:
    saver = HoldfastSaver(home.store)
    values: dict[str, Any] = {"points": [Point(1, 2)], "deep": {"in": [Point(3, 4)]}}
    at = put(saver, config(), {"n": 1}, 1)
    for name, value in values.items():
        with pytest.raises(NotSerializable, match=rf"^{name}.*test_langgraph\.Point") as raised:
            put(saver, config(), {name: value}, 2)
        assert "allow=" in str(raised.value.hint)
        with pytest.raises(NotSerializable, match=r"test_langgraph\.Point"):
            saver.put_writes(at, [(name, value)], "task")
    assert latest(saver).checkpoint["channel_values"] == {"n": 1}
    assert latest(saver).pending_writes == []
    trusting = HoldfastSaver(home.store, allow=[Point])
    put(trusting, config(id="00000001"), values, 2)
    assert latest(trusting).checkpoint["channel_values"] == values
    with pytest.raises(UnsupportedFormat, match=r"test_langgraph\.Point") as refused:
        saver.get_tuple(config())
    assert "allow=" in str(refused.value.hint)
    with pytest.raises(UnsupportedFormat):
        list(saver.list(config()))
    raw = HoldfastSaver(home.store, unknown="raw")
    assert latest(raw).checkpoint["channel_values"]["points"] == [{"x": 1, "y": 2}]
    put(raw, config(id="00000002"), values, 3)
    assert latest(trusting).checkpoint["channel_values"] == values


def test_an_object_that_cannot_be_made_again_is_refused_before_it_is_stored(
    saver: HoldfastSaver,
) -> None:
    @dataclasses.dataclass
    class Sum:
        a: int
        total: int = dataclasses.field(init=False, default=0)

    trusting = HoldfastSaver(saver.store, allow=[Sum])
    with pytest.raises(NotSerializable, match="Sum cannot be made again"):
        put(trusting, config(), {"sum": Sum(1)})
    assert trusting.get_tuple(config()) is None


def test_what_an_agent_did_is_stored(saver: HoldfastSaver) -> None:
    action = AgentAction("search", {"for": "rain"}, "log")
    message = AgentActionMessageLog(
        tool="t", tool_input="i", log="", message_log=[AIMessage("a", id="1")]
    )
    steps = [(action, "rain"), (message, "none")]
    put(saver, config(), {"steps": steps, "end": AgentFinish({"output": "wet"}, "log")})
    found = latest(saver).checkpoint["channel_values"]
    assert [type(found["steps"][0][0]), found["steps"][0][0]] == [AgentAction, action]
    assert type(found["steps"][1][0]) is AgentActionMessageLog
    assert found["end"] == AgentFinish({"output": "wet"}, "log")


def test_nothing_is_imported_or_called_for_what_is_stored(saver: HoldfastSaver) -> None:
    """A payload that names a function is not made by LangGraph; whoever put it there, it rests."""
    evil = {"$ext": 0, "of": ["os", "system", "exit 1"]}
    state = {"x": evil, "$checkpoint": {"v": 1}}
    own = {"parent": None, "latest": "1", "highest": "1"}
    meta = {"$langgraph": own, "$notes": 1}
    saver.store.session("t", agent="langgraph").save(state, key="1", meta=meta)
    with pytest.raises(UnsupportedFormat, match=r"os\.system"):
        saver.get_tuple(config())


def packed(code: int, made_of: Any) -> tuple[str, bytes]:
    data = made_of if type(made_of) is bytes else ormsgpack.packb(made_of)
    return "msgpack", ormsgpack.packb({"in": [ormsgpack.Ext(code, data)]})


HOSTILE: list[tuple[str, bytes]] = [
    packed(42, b"a kind that nobody knows"),
    packed(0, ("os",)), packed(0, 5), packed(0, b""), packed(2, {"a": 1}), packed(5, b"\xc1"),
    packed(6, b"\xc1"), packed(6, ("|O", (1,), "C", b"\0" * 8)),
    packed(1, ("re", "compile", ("(", 0))),
    packed(3, ("pathlib", "Path", "x", "cwd")),
    ("msgpack", b"\xc1"), ("msgpack", b""),
    ("json", b'{"lc": 2, "type": "constructor", "id": ["os", "system"], "args": ["exit 1"]}'),
    ("json", b'{"lc": 1, "type": "secret", "id": ["HOME"]}'),
    ("pickle", b"cos\nsystem\n(S'exit 1'\ntR."),
    ("another", b""),
]  # fmt: skip


@pytest.mark.parametrize("data", HOSTILE, ids=repr)
def test_what_cannot_be_made_again_is_not_silently_something_else(data: tuple[str, bytes]) -> None:
    with pytest.raises(UnsupportedFormat):
        StrictSerializer().loads_typed(data)


@pytest.mark.parametrize("data", HOSTILE[:10], ids=repr)
def test_what_cannot_be_made_again_is_raw_if_asked_for(data: tuple[str, bytes]) -> None:
    assert [*StrictSerializer(unknown="raw").loads_typed(data)] == ["in"]


def test_an_object_whose_class_has_changed_is_not_silently_a_dict(
    saver: HoldfastSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    trusting = HoldfastSaver(saver.store, allow=[Point])
    put(trusting, config(), {"p": Point(1, 2)})
    monkeypatch.setattr(Point, "__init__", lambda self: None)
    with pytest.raises(UnsupportedFormat, match="cannot be made again"):
        trusting.get_tuple(config())
    monkeypatch.undo()
    assert latest(trusting).checkpoint["channel_values"] == {"p": Point(1, 2)}


TRICKY = [
    None, True, 0, -1, 2**63, 1.5, float("inf"), "", "ü\n", b"bytes", bytearray(b"x"), [], {},
    (1, 2), {"$ext": 5, "of": [1]}, {"$ext": 5, "of": b"x"}, {"$serde": "msgpack", "data": b"x"},
    [{"$serde": "null", "data": b""}], {1: "int key", None: 2}, {"a": {"b": [{"c": (1,)}]}},
    {1, 2}, HumanMessage("hi", id="1"), [HumanMessage("hi"), AIMessage("", tool_calls=[])],
    {"deep": [HumanMessage("hi", additional_kwargs={"$ext": 1, "of": 2})]}, [[1], [[2]]], b"",
    {"$ext": "x", "of": 1}, {"$ext": 1000, "of": b""}, {(1, 2): 3}, (HumanMessage("hi"),),
    ({"$serde": "msgpack", "data": b"\x01"},), ({"$serde": "x"},), [2**63 - 1, -(2**63)],
]  # fmt: skip


@pytest.mark.parametrize("value", TRICKY, ids=repr)
def test_values_come_back_as_the_serializer_makes_them(saver: HoldfastSaver, value: Any) -> None:
    plain = JsonPlusSerializer(allowed_msgpack_modules=None)
    expected = plain.loads_typed(plain.dumps_typed(value))
    at = put(saver, config(), {"value": value, "list": [value, value]}, why=value)
    saver.put_writes(at, [("value", value)], "task")
    found = latest(saver)
    assert found.checkpoint["channel_values"] == {"value": expected, "list": [expected, expected]}
    assert type(found.checkpoint["channel_values"]["value"]) is type(expected)
    assert found.pending_writes == [("task", "value", expected)]
    assert found.metadata["why"] == expected  # type: ignore[typeddict-item]


class Toy:
    """Encrypts as badly as one can."""

    def encrypt(self, plaintext: bytes) -> tuple[str, bytes]:
        return "toy", bytes(b ^ 90 for b in plaintext)

    def decrypt(self, ciphername: str, ciphertext: bytes) -> bytes:
        assert ciphername == "toy"
        return bytes(b ^ 90 for b in ciphertext)


def test_what_is_encrypted_is_nowhere_to_be_seen(sqlite: Home) -> None:
    saver = HoldfastSaver(sqlite.store, serde=EncryptedSerializer(Toy(), JsonPlusSerializer()))
    shown: dict[str, Any] = {"text": "SECRET", "list": ["SECRET", HumanMessage("SECRET")]}
    at = put(saver, config(), shown)
    saver.put_writes(at, [("text", "SECRET")], "task")
    assert channels(saver) == shown
    assert latest(saver).pending_writes == [("task", "text", "SECRET")]
    assert "SECRET" not in repr(sqlite.store.session("t").load())
    sqlite.store.close()
    assert b"SECRET" not in sqlite.path.read_bytes()


def test_plain_values_are_not_taken_for_decrypted_ones(saver: HoldfastSaver) -> None:
    put(saver, config(), {"text": "planted"})
    closed = HoldfastSaver(saver.store, serde=EncryptedSerializer(Toy(), JsonPlusSerializer()))
    with pytest.raises(UnsupportedFormat, match="not written by this serializer"):
        closed.get_tuple(config())


def test_no_two_places_of_a_state_are_one_object(saver: HoldfastSaver) -> None:
    put(saver, config(), {"a": [{"done": False}, {"done": False}], "b": [{"done": False}]})
    for found in (latest(saver), next(saver.list(config()))):
        values_ = found.checkpoint["channel_values"]
        values_["a"][0]["done"] = True
        assert (values_["a"][1], values_["b"][0]) == ({"done": False}, {"done": False})


@pytest.mark.parametrize(
    "value",
    [
        Send("node", {"point": Point(1, 2)}),
        [deque([Point(1, 2)])],
    ],
    ids=["send", "deque"],
)
def test_what_is_not_allowed_is_not_hidden_in_what_is(saver: HoldfastSaver, value: Any) -> None:
    with pytest.raises(NotSerializable, match=r"test_langgraph\.Point"):
        put(saver, config(), {"value": value})
    trusting = HoldfastSaver(saver.store, allow=[Point])
    put(trusting, config(), {"value": value})
    with pytest.raises(UnsupportedFormat, match=r"test_langgraph\.Point"):
        saver.get_tuple(config())
    assert "Point(x=1, y=2)" in repr(channels(trusting)["value"])


def test_a_change_while_it_is_serialized_is_stored_with_the_next_step(saver: HoldfastSaver) -> None:
    class Slow(JsonPlusSerializer):
        def dumps_typed(self, obj: Any) -> tuple[str, bytes]:
            dumped = super().dumps_typed(obj)
            if isinstance(obj, HumanMessage):
                obj.content = "after"
            return dumped

    saver = HoldfastSaver(saver.store, serde=Slow())
    message = HumanMessage("before")
    put(saver, config(), {"messages": [message]}, 1)
    put(saver, config(id="00000001"), {"messages": [message]}, 2)
    assert [m.content for m in channels(saver)["messages"]] == ["after"]


def test_a_message_can_be_read_by_people(saver: HoldfastSaver) -> None:
    put(saver, config(), {"messages": [HumanMessage("Where is my luggage?")]})
    session = saver.store.session("t")
    [hit] = saver.store.search("luggage")
    assert hit.checkpoint
    assert hit.checkpoint.key == "00000000"
    assert session.load()["messages"][0]["of"][2]["content"] == "Where is my luggage?"


def changes(message: AIMessage) -> list[Any]:
    """Ways to change a message in place."""
    return [
        lambda: setattr(message, "content", "another"),
        lambda: message.additional_kwargs.update(extra=1),
        lambda: message.additional_kwargs["list"].append(3),
        lambda: message.additional_kwargs["list"].__setitem__(0, True),  # equal to 1
        lambda: message.tool_calls[0]["args"].update(city="Rome"),
        lambda: message.additional_kwargs["deep"].update({"k": (1, [2])}),
        lambda: message.__pydantic_extra__.update(new=1) if message.__pydantic_extra__ is not None
        else setattr(message, "name", "n"),
    ]  # fmt: skip


@pytest.mark.parametrize("which", range(7))
def test_a_message_that_was_changed_in_place_is_stored_changed(
    saver: HoldfastSaver, which: int
) -> None:
    call: Any = {"name": "weather", "args": {"city": "Oslo"}, "id": "1", "type": "tool_call"}
    message = AIMessage(
        "first", tool_calls=[call], additional_kwargs={"list": [1, 2], "deep": {"k": (1, [1])}}
    )
    put(saver, config(), {"messages": [message]}, 1)
    changes(message)[which]()
    put(saver, config(id="00000001"), {"messages": [message]}, 2)
    plain = JsonPlusSerializer()
    expected = plain.loads_typed(plain.dumps_typed(message))
    found = latest(saver).checkpoint["channel_values"]["messages"]
    assert found == [expected]
    assert repr(found) == repr([expected])  # 1 == True
    before = latest(saver, config(id="00000001")).checkpoint["channel_values"]["messages"]
    assert repr(before) != repr(found)


def test_mutant_that_trusts_the_message_itself(
    saver: HoldfastSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutants.trusts_the_message(monkeypatch)
    with pytest.raises(AssertionError):
        test_a_message_that_was_changed_in_place_is_stored_changed(saver, 0)


def test_mutant_that_trusts_what_is_in_a_message(
    saver: HoldfastSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutants.trusts_the_parts_of_a_message(monkeypatch)
    with pytest.raises(AssertionError):
        test_a_message_that_was_changed_in_place_is_stored_changed(saver, 1)


def test_messages_are_serialized_once(saver: HoldfastSaver) -> None:
    class Counting(JsonPlusSerializer):
        count = 0

        def dumps_typed(self, obj: Any) -> tuple[str, bytes]:
            Counting.count += isinstance(obj, HumanMessage)
            return super().dumps_typed(obj)

    saver = HoldfastSaver(saver.store, serde=Counting())
    messages: list[Any] = []
    for n in range(1, 50):
        messages = [*messages, HumanMessage(f"message {n}")]
        put(saver, config(id=f"{n - 1:08}" if n > 1 else None), {"messages": messages}, n)
    assert Counting.count == 49


def test_a_copy_of_the_saver_with_an_allowlist_shares_the_store(saver: HoldfastSaver) -> None:
    clone: Any = saver.with_allowlist([(Point.__module__, "Point")])
    put(clone, config(), {"p": Point(1, 2)})
    for each in (clone, saver):
        assert latest(each).checkpoint["channel_values"] == {"p": Point(1, 2)}
    assert clone.store is saver.store
    assert copy.copy(saver).store is saver.store


# -- threads of other savers ---------------------------------------------------------------------


@contextmanager
def others(kind: str, folder: Path) -> Iterator[BaseCheckpointSaver]:
    if kind == "memory":
        yield InMemorySaver()
    elif kind == "sqlite":
        with SqliteSaver.from_conn_string(str(folder / "theirs.db")) as theirs:
            yield theirs
    else:
        name = sql.Identifier(f"theirs {os.getpid()}")
        with psycopg.connect(
            postgres.server_url(), autocommit=True, row_factory=dict_row
        ) as link:  # fmt: skip
            link.execute(sql.SQL("CREATE SCHEMA {}").format(name))
            link.execute(sql.SQL("SET search_path TO {}").format(name))
            saver = PostgresSaver(link)
            saver.setup()
            yield saver
            link.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(name))


def shown(saver: BaseCheckpointSaver) -> list[Any]:
    """All that a saver lists, in an order of its own."""
    found = [
        (
            t.config["configurable"], t.checkpoint, t.metadata,
            (t.parent_config or config())["configurable"].get("checkpoint_id"), t.pending_writes,
        )
        for t in saver.list(None)
    ]  # fmt: skip
    return sorted(found, key=lambda row: sorted(map(str, row[0].values())))


@pytest.mark.parametrize("kind", ["memory", "sqlite", "postgres"])
def test_threads_of_another_saver_are_adopted(sqlite: Home, tmp_path: Path, kind: str) -> None:
    with others(kind, tmp_path) as theirs:
        for n, run in enumerate([graphs.tools, graphs.subgraph, graphs.forked, graphs.delta]):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(graphs, "CONFIG", {"configurable": {"thread_id": f"t{n}"}})
                run(theirs, "sync")
        saver = HoldfastSaver(sqlite.store)
        count = len([*theirs.list(None)])
        assert adopt(theirs, saver) == count > 30
        assert shown(saver) == shown(theirs)
        assert adopt(theirs, saver) == 0
        assert len([*saver.list(None)]) == count


@pytest.mark.parametrize("kind", ["memory", "sqlite", "postgres"])
def test_threads_that_went_on_are_adopted_again(sqlite: Home, tmp_path: Path, kind: str) -> None:
    with others(kind, tmp_path) as theirs:
        asked = asking(theirs, [])
        asked.invoke({"steps": []}, graphs.CONFIG, durability="sync")
        saver = HoldfastSaver(sqlite.store)
        assert adopt(theirs, saver) == 3
        assert shown(saver) == shown(theirs)
        asked.invoke(Command(resume="yes"), graphs.CONFIG, durability="sync")
        assert adopt(theirs, saver) == 2
        assert shown(saver) == shown(theirs)
        assert adopt(theirs, saver) == 0


def test_adopting_again_leaves_what_went_on_here(sqlite: Home) -> None:
    theirs, saver = InMemorySaver(), HoldfastSaver(sqlite.store)
    asking(theirs, []).invoke({"steps": []}, graphs.CONFIG)
    adopt(theirs, saver)
    asking(saver, []).invoke(Command(resume="here"), graphs.CONFIG)
    before = shown(saver)
    assert adopt(theirs, saver) == 0
    assert shown(saver) == before
    asking(theirs, []).invoke(Command(resume="there"), graphs.CONFIG)
    assert adopt(theirs, saver) == 2
    assert [row for row in shown(saver) if row in before] == before


def test_mutant_that_forgets_writes(sqlite: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = InMemorySaver()
    graphs.waiting(theirs, "sync")
    mutants.adopts_no_writes(monkeypatch)
    saver = HoldfastSaver(sqlite.store)
    adopt(theirs, saver)
    assert shown(saver) != shown(theirs)


# -- crashes -------------------------------------------------------------------------------------

KILLED = """
import asyncio, os, signal, sys
from langgraph.graph import START, END, StateGraph
from holdfast.adapters.langgraph import HoldfastSaver, adopt
from tests.adapters.graphs import Talk, CONFIG

def step(state):
    n = len(state["messages"])
    if n == 300:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"messages": [("ai", f"message {n}")]}

builder = StateGraph(Talk)
builder.add_node("step", step)
builder.add_edge(START, "step")
builder.add_conditional_edges("step", lambda s: "step")
graph = builder.compile(checkpointer=HoldfastSaver(sys.argv[1]))
asked = {"messages": [("human", "begin")]}, CONFIG | {"recursion_limit": 1000}
if sys.argv[3] == "loop":
    asyncio.run(graph.ainvoke(*asked, durability=sys.argv[2]))
graph.invoke(*asked, durability=sys.argv[2])
"""


@pytest.fixture
def disk() -> Iterator[Path]:
    """A folder on a disk that makes a graph wait. Most other tests work in memory."""
    with tempfile.TemporaryDirectory(prefix="holdfast-", dir="/var/tmp") as folder:
        yield Path(folder)


@pytest.mark.parametrize(
    ("durability", "how", "lost"),
    [
        ("sync", "plain", 0), ("async", "plain", langgraph_saver.AHEAD),
        ("sync", "loop", 0), ("async", "loop", 100),  # some 10; without waiting, nearly all
    ],
)  # fmt: skip
def test_killed_in_step_300(disk: Path, durability: str, how: str, lost: int) -> None:
    path = disk / "agents.db"
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(path), durability, how],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    with HoldfastSaver(path) as saver:
        found = saver.get_tuple(graphs.CONFIG)
        assert saver.store.verify().ok
    assert found is not None
    messages = found.checkpoint["channel_values"]["messages"]
    assert len(messages) >= 300 - lost
    texts = ["begin", *(f"message {n}" for n in range(1, 300))]
    assert [m.content for m in messages] == texts[: len(messages)]


@pytest.mark.parametrize("ahead", [langgraph_saver.AHEAD, 10**9])
def test_a_graph_does_not_run_far_ahead_of_a_slow_disk(
    sqlite: Home, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(langgraph_saver, "AHEAD", ahead)
    saved, furthest, save = [0], [0], Namespace.save

    def slow(self: Namespace, *args: Any, **more: Any) -> None:
        time.sleep(0.01)
        save(self, *args, **more)
        saved[0] += 1

    def step(state: graphs.Talk) -> Any:
        count = len(state["messages"])
        furthest[0] = max(furthest[0], count - saved[0])
        return {"messages": [("ai", str(count))]}

    monkeypatch.setattr(Namespace, "save", slow)
    builder = StateGraph(graphs.Talk)
    builder.add_node("step", step)
    builder.add_edge(START, "step")
    builder.add_conditional_edges(
        "step", lambda s: "step" if len(s["messages"]) < 100 else "__end__"
    )
    graph = builder.compile(checkpointer=HoldfastSaver(sqlite.store))
    asked = {"messages": [("human", "begin")]}
    graph.invoke(asked, graphs.CONFIG | {"recursion_limit": 1000}, durability="async")  # type: ignore[call-overload]
    # The first one may take some time to be on its way.
    assert (furthest[0] < 50) is (ahead == 8)


def test_a_loop_waits_for_the_checkpoint_that_a_thread_saves() -> None:
    pace, began, end = langgraph_saver.Pace(), threading.Event(), threading.Event()
    versions = [f"{n}.1" for n in range(langgraph_saver.AHEAD + 2)]

    def save() -> None:
        with pace.saving({"channel": versions[1]}):
            began.set()
            end.wait(60)

    async def run() -> bool:
        pace.begin_step(None, versions[0])
        pace.begin_step(versions[0], versions[1])
        thread = threading.Thread(target=save)
        thread.start()
        began.wait(60)
        for current, following in pairwise(versions[1:]):
            if following == versions[-1]:
                threading.Timer(0.05, end.set).start()
            pace.begin_step(current, following)
        waited = end.is_set()
        thread.join()
        pace.begin_step(versions[-1], f"{len(versions)}.1")  # nothing is being saved: nobody waits
        return waited

    assert asyncio.run(run())


def test_nobody_waits_for_what_comes_at_the_end() -> None:
    pace, version = langgraph_saver.Pace(), "0.1"
    for n in range(1, 200):
        pace.begin_step(version, f"{n}.1")
        version = f"{n}.1"
    with pace.saving({"channel": version}):
        pass
    for n in range(200, 400):  # the next run: nothing is on its way
        pace.begin_step(version, f"{n}.1")
        version = f"{n}.1"
