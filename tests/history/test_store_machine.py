"""A state machine in which every backend must equal a plain model, whatever the order of things.

The model keeps deep copies in a dict, and of each session what undo takes back. The stores under
test are driven through two handles, are reopened at any time, and sometimes another process does
the writing. (What undo does to whole sessions and to marks has a machine of its own.)
"""

from __future__ import annotations

import contextlib
import copy
import json
import multiprocessing
import random
import shutil
import tempfile
import urllib.parse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, assume, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import holdfast
from holdfast.errors import HoldfastError
from holdfast.format import msgpack, values
from tests.format.test_layout import message, mutate, thing
from tests.mutants import Mutant, history
from tests.support import postgres

SEEDS = st.integers(0, 2**32)


class Done(NamedTuple):
    """An operation: the head before and after it, and what it deleted."""

    before: int | None
    after: int | None
    deleted: int | None = None


@dataclass
class ModelSession:
    """What a session must look like: every checkpoint's state, its parent, and the head."""

    checkpoints: list[tuple[Any, int | None]] = field(default_factory=list)
    head: int | None = None
    deleted: set[int] = field(default_factory=set)
    freed: set[int] = field(default_factory=set)
    done: list[Done] = field(default_factory=list)
    undone: list[Done | None] = field(default_factory=list)
    """None for what takes the whole session away."""
    forked: bool = False

    @property
    def state(self) -> Any:
        return None if self.head is None else self.checkpoints[self.head][0]

    def add(self, state: Any, parent: int | None) -> None:
        self.checkpoints.append((copy.deepcopy(state), parent))
        self.move(len(self.checkpoints) - 1)

    def move(self, head: int | None, deleted: int | None = None) -> None:
        self.undone.clear()
        self.do(Done(self.head, head, deleted))

    def do(self, what: Done) -> None:
        self.done.append(what)
        self.head = what.after
        if what.deleted is not None:
            self.deleted.add(what.deleted)

    def living_ancestor(self, n: int) -> int | None:
        """The nearest ancestor in this session that is not deleted."""
        at = self.checkpoints[n][1]
        while at is not None and at in self.deleted:
            at = self.checkpoints[at][1]
        return at

    @property
    def living(self) -> list[int]:
        return [n for n in range(len(self.checkpoints)) if n not in self.deleted]


def can_append(state: Any) -> bool:
    """Whether the state is a dict of string keys whose "messages" are a list, if there are any."""
    plain = type(state) is dict and msgpack.is_map(values.encode(state))
    return plain and type(state.get("messages", [])) is list


def save_elsewhere(url: str, name: str, text: str) -> None:
    with holdfast.open(url) as store:
        session = store.session(name)
        session.append("messages", json.loads(text))


class StoreMachine(RuleBasedStateMachine):
    """Subclasses say how to open the store."""

    examples: ClassVar[int] = 25
    processes: ClassVar[bool] = False
    cache_bytes: ClassVar[int] = 64 << 20
    store: holdfast.Store

    def url(self) -> str:
        return str(self.folder / "store.db")

    def open(self) -> holdfast.Store:
        raise NotImplementedError

    def reopen(self) -> None:
        self.store.close()
        self.store = self.open()
        self.handles.clear()

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-machine-"))
        self.store = self.open()
        self.handles: dict[tuple[str, int], holdfast.Session] = {}
        self.model: dict[str, ModelSession] = {}
        self.ids: dict[str, list[str]] = {}
        self.forks = 0

    def teardown(self) -> None:
        if hasattr(self, "store"):
            try:
                self.check_all()
                assert self.store.verify(read_data=True).ok
                self.store.close()
            finally:
                shutil.rmtree(self.folder)

    def handle(self, name: str, which: int) -> holdfast.Session:
        if (name, which) not in self.handles:
            self.handles[name, which] = self.store.session(name)
        return self.handles[name, which]

    def current(self, name: str, which: int) -> holdfast.Session:
        """A handle that knows the present head."""
        session = self.handle(name, which)
        session.refresh()
        return session

    def record(self, name: str, checkpoint: holdfast.Checkpoint, state: Any, parent: Any) -> None:
        model = self.model.setdefault(name, ModelSession())
        model.add(state, parent)
        self.ids.setdefault(name, []).append(checkpoint.id)
        assert checkpoint.seq == len(model.checkpoints)
        assert checkpoint.size == len(values.encode(state))

    def draw_living(self, data: st.DataObject) -> tuple[str, int]:
        """A session, and a checkpoint of it that is not deleted."""
        name = data.draw(st.sampled_from(sorted(self.model)))
        living = self.model[name].living
        assume(living)
        return name, data.draw(st.sampled_from(living))

    @rule(name=st.sampled_from(["a", "b", "a_b"]), which=st.integers(0, 1), seed=SEEDS)
    def save(self, name: str, which: int, seed: int) -> None:
        rng = random.Random(seed)
        model = self.model.get(name) or ModelSession()
        state = copy.deepcopy(model.state)
        if type(state) not in (dict, list) or rng.random() < 0.05:
            state = {"messages": [message(rng, i) for i in range(rng.choice([0, 2, 70]))]}
        for _ in range(rng.choice([0, 1, 1, 4])):
            mutate(rng, state)
        parent = model.head
        checkpoint = self.current(name, which).save(state)
        self.record(name, checkpoint, state, parent)

    @rule(name=st.sampled_from(["a", "b"]), which=st.integers(0, 1), seed=SEEDS)
    def append(self, name: str, which: int, seed: int) -> None:
        rng = random.Random(seed)
        model = self.model.get(name) or ModelSession()
        state = copy.deepcopy(model.state) if model.head is not None else {}
        if not can_append(state):
            return
        items = [message(rng, i) for i in range(rng.choice([1, 1, 1, 5]))]
        parent = model.head
        checkpoint = self.current(name, which).append("messages", *items)
        state.setdefault("messages", []).extend(items)
        self.record(name, checkpoint, state, parent)

    @rule(name=st.sampled_from(["a", "b"]), which=st.integers(0, 1), seed=SEEDS)
    def patch(self, name: str, which: int, seed: int) -> None:
        rng = random.Random(seed)
        model = self.model.get(name) or ModelSession()
        state = copy.deepcopy(model.state) if model.head is not None else {}
        if not can_append(state):
            return
        changes: dict[Any, Any] = {
            f"p{rng.randrange(6)}": thing(rng, 2) for _ in range(rng.randrange(3))
        }
        drop = [k for k in state if k not in changes and k.startswith("p")][:1]
        parent = model.head
        checkpoint = self.current(name, which).patch(set=changes, drop=drop)
        state.update(changes)
        for key in drop:
            del state[key]
        self.record(name, checkpoint, state, parent)

    @rule(name=st.sampled_from(["a", "b"]), seed=SEEDS, count=st.integers(2, 20))
    def go_on_with_one_handle(self, name: str, seed: int, count: int) -> None:
        """Without looking at the store between: what is kept in memory must stay right."""
        rng = random.Random(seed)
        session = self.current(name, 0)
        for i in range(count):
            model = self.model.get(name) or ModelSession()
            state = copy.deepcopy(model.state) if model.head is not None else {}
            if not can_append(state):
                return
            parent = model.head
            roll = rng.random()
            if roll < 0.6:
                item = message(rng, i) if rng.random() < 0.9 else thing(rng, 2)
                state.setdefault("messages", []).append(item)
                checkpoint = session.append("messages", item)
            elif roll < 0.7:
                state["step"] = i
                checkpoint = session.patch(set={"step": i})
            else:
                if roll < 0.85:  # grown, and maybe changed elsewhere as well
                    state.setdefault("messages", []).append(message(rng, i))
                if roll > 0.78:
                    mutate(rng, state)
                checkpoint = session.save(state)
            self.record(name, checkpoint, state, parent)
            if rng.random() < 0.2:
                assert values.encode(session.load()) == values.encode(state)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), which=st.integers(0, 1))
    def rewind(self, data: st.DataObject, which: int) -> None:
        name, target = self.draw_living(data)
        self.current(name, which).rewind(self.ids[name][target])
        self.model[name].move(target)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), which=st.integers(0, 1))
    def delete(self, data: st.DataObject, which: int) -> None:
        name, target = self.draw_living(data)
        model, session = self.model[name], self.handle(name, which)
        head = model.head
        if target == head:
            head = model.living_ancestor(target)
            if head is None:
                with pytest.raises(holdfast.InvalidRequest):
                    session.delete(self.ids[name][target])
                return
        session.delete(self.ids[name][target])
        model.move(head, target)
        with pytest.raises(holdfast.CheckpointNotFound):
            session.load(self.ids[name][target])

    @precondition(lambda self: self.model)
    @rule(data=st.data(), which=st.integers(0, 1))
    def delete_a_session_and_bring_it_back(self, data: st.DataObject, which: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        session = self.handle(name, which)
        session.delete()
        assert not session.exists()
        session.undo()
        self.model[name].undone = [None]

    @precondition(lambda self: self.model)
    @rule(data=st.data(), which=st.integers(0, 1), times=st.integers(1, 3))
    def undo(self, data: st.DataObject, which: int, times: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        model, session = self.model[name], self.handle(name, which)
        for _ in range(times):
            top = model.done[-1] if model.done else None
            if top is None and model.forked:
                return  # would take the fork itself away
            if top is None or top.deleted in model.freed:
                with pytest.raises(holdfast.InvalidRequest):
                    session.undo()
                return
            session.undo()
            model.undone.append(model.done.pop())
            model.head = top.before
            model.deleted -= {top.deleted}

    @precondition(lambda self: self.model)
    @rule(data=st.data(), which=st.integers(0, 1), times=st.integers(1, 3))
    def redo(self, data: st.DataObject, which: int, times: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        model, session = self.model[name], self.handle(name, which)
        for _ in range(times):
            if not model.undone:
                with pytest.raises(holdfast.InvalidRequest):
                    session.redo()
                return
            again = model.undone[-1]
            if again is None:
                return
            session.redo()
            model.undone.pop()
            model.do(again)

    @rule()
    def gc(self) -> None:
        """Frees what is deleted, and changes nothing else."""
        self.store.gc()
        for name, model in [*self.model.items()]:
            model.freed |= model.deleted
            if model.head is None and not model.living:  # its name goes with its last one
                del self.model[name], self.ids[name]

    @precondition(lambda self: self.model and self.forks < 8)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        name, at = self.draw_living(data)
        model = self.model[name]
        self.forks += 1
        new = f"fork{self.forks}"
        fork = self.handle(name, 0).fork(new, at=self.ids[name][at])
        assert fork.head is not None
        assert fork.head.parent == self.ids[name][at]
        self.record(new, fork.head, model.checkpoints[at][0], None)
        self.model[new].done.clear()
        self.model[new].forked = True
        with pytest.raises(holdfast.SessionExists):
            self.handle(name, 1).fork(new, at=self.ids[name][at])

    @precondition(lambda self: self.model)
    @rule(data=st.data(), seed=SEEDS)
    def save_on_a_stale_head(self, data: st.DataObject, seed: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        stale, fresh = self.current(name, 0), self.current(name, 1)
        parent = self.model[name].head
        state = thing(random.Random(seed))
        self.record(name, fresh.save(state), state, parent)
        with pytest.raises(holdfast.HeadMoved):
            stale.save({"lost": "update"})

    @precondition(lambda self: self.model)
    @rule(data=st.data(), which=st.integers(0, 1))
    def annotate(self, data: st.DataObject, which: int) -> None:
        name, at = self.draw_living(data)
        model, session = self.model[name], self.handle(name, which)
        assert "seen" in session.tag(self.ids[name][at], "seen").tags
        model.move(model.head)
        assert session.label(self.ids[name][at], f"l{at}").label == f"l{at}"
        model.move(model.head)

    @rule()
    def close_and_open(self) -> None:
        self.reopen()

    @precondition(lambda self: self.processes and "a" in self.model)
    @rule(seed=SEEDS)
    def another_process_appends(self, seed: int) -> None:
        model = self.model["a"]
        state = copy.deepcopy(model.state)
        if not can_append(state):
            return
        item = message(random.Random(seed), 1)
        context = multiprocessing.get_context("fork")
        child = context.Process(target=save_elsewhere, args=(self.url(), "a", json.dumps(item)))
        child.start()
        child.join()
        assert child.exitcode == 0
        parent = model.head
        state.setdefault("messages", []).append(item)
        head = self.current("a", 0).head
        assert head is not None
        self.record("a", head, state, parent)

    @invariant()
    def heads_agree(self) -> None:
        if getattr(self, "model", None):
            name = random.Random(len(self.ids)).choice(sorted(self.model))
            if self.model[name].head is None:
                with pytest.raises(holdfast.CheckpointNotFound):
                    self.handle(name, 0).load()
                return
            loaded = self.handle(name, 0).load()
            assert values.encode(loaded) == values.encode(self.model[name].state)

    def check_all(self) -> None:
        """Every checkpoint that was not deleted still loads, with its own parent and hash."""
        twin = holdfast.open("memory:")
        for name, model in self.model.items():
            session = self.handle(name, 0)
            assert len(session) == len(model.living)
            listed = dict(zip(model.living, session.tree(), strict=True))
            assert [c.id for c in listed.values()] == [self.ids[name][n] for n in model.living]
            for n, at in listed.items():
                state, parent = model.checkpoints[n]
                assert values.encode(session.load(at)) == values.encode(state)
                if parent is not None:
                    assert at.parent == self.ids[name][parent]
                fresh = twin.session(f"{name} {n}").save(state)
                assert fresh.state_hash == at.state_hash


class MemoryMachine(StoreMachine):
    def open(self) -> holdfast.Store:
        return holdfast.open("memory:")

    def reopen(self) -> None:
        self.handles.clear()  # nothing to reopen: only the handles are new


class SqliteMachine(StoreMachine):
    processes = True

    def open(self) -> holdfast.Store:
        return holdfast.open(
            self.folder / "store.db", durability="normal", cache_bytes=self.cache_bytes
        )


class ColdSqliteMachine(SqliteMachine):
    """Without room for images: every save reads back what it compares with."""

    cache_bytes = 0
    examples = 15


class FilesMachine(StoreMachine):
    processes = True
    examples = 12

    def url(self) -> str:
        return f"files:{self.folder / 'store'}"

    def open(self) -> holdfast.Store:
        return holdfast.open(self.url(), durability="normal", cache_bytes=self.cache_bytes)


class PostgresMachine(StoreMachine):
    processes = True
    examples = 12

    @initialize()
    def begin(self) -> None:
        self.rented = contextlib.ExitStack()
        self.schema = self.rented.enter_context(postgres.schema())
        super().begin()

    def teardown(self) -> None:
        super().teardown()
        self.rented.close()

    def url(self) -> str:
        return f"{postgres.server_url()}?schema={urllib.parse.quote(self.schema)}"

    def open(self) -> holdfast.Store:
        return holdfast.open(self.url(), create=True, durability="normal")


@pytest.mark.parametrize(
    "machine", [MemoryMachine, SqliteMachine, ColdSqliteMachine, FilesMachine, PostgresMachine]
)
def test_store_equals_model(machine: type[StoreMachine], rounds: Any) -> None:
    examples = rounds(machine.examples, torture=2_000)
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples, stateful_step_count=25)
    )


MUTANTS = [
    history.undo_loses_the_head, history.tombstones_stay, history.deleted_checkpoints_are_seen,
    history.one_stream_for_all, history.images_of_other_sessions,
    history.only_new_items_are_looked_at, history.the_last_commit_wins,
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    quick = settings(
        max_examples=400, stateful_step_count=25, phases=[Phase.generate], derandomize=True
    )
    with pytest.raises((AssertionError, HoldfastError, pytest.fail.Exception)):
        run_state_machine_as_test(MemoryMachine, settings=quick)
