"""Undo brings back exactly what was there before an operation, redo what was there after it.

The machine takes down all that can be seen of a session before and after each operation. What an
undo leaves behind is the checkpoint of an undone save: it stays in the tree, as after a rewind.
"""

from __future__ import annotations

import datetime as dt
import math
import random
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

import holdfast
from holdfast import Retention
from holdfast.errors import (
    CheckpointNotFound,
    HeadMoved,
    HoldfastError,
    InvalidRequest,
    SessionExists,
    SessionNotFound,
    Unavailable,
)
from holdfast.format import values
from holdfast.history import oplog
from holdfast.storage.contract import Batch, Delete
from holdfast.storage.memory import MemoryBackend
from tests.faults.clock import wall_clock
from tests.format.test_layout import message
from tests.support.sessions import DAY, FIELDS, KEEP_LAST, PLAIN_FIELDS, found_seqs, seqs
from tests.support.stores import TEXT, Home, fail, prune_unlogged

SEEDS = st.integers(0, 2**32)
NAMES = st.sampled_from(["a", "b"])
WHICH = st.integers(0, 1)


class Seen(NamedTuple):
    """All that can be seen of a session."""

    exists: bool
    head: str | None = None
    state: bytes | None = None
    history: tuple[str, ...] = ()
    marks: dict[str, tuple[str | None, tuple[str, ...]]] = {}  # noqa: RUF012 - never changed
    """Label and tags of every checkpoint of the tree."""


def look(store: holdfast.Store, name: str) -> Seen:
    session = store.session(name)
    infos = [info for info in store.sessions() if info.name == name]
    if not infos:
        assert not session.exists()
        assert list(session.history()) == list(session.tree()) == []
        return Seen(exists=False)
    marks = {c.id: (c.label, c.tags) for c in session.tree()}
    assert len(session) == len(marks) == infos[0].checkpoints
    if infos[0].head is None:
        with pytest.raises(CheckpointNotFound):
            session.load()
        return Seen(True, None, None, (), marks)
    own = [c.id for c in session.history() if c.session == name]
    state = values.encode(session.load())
    return Seen(True, infos[0].head.id, state, tuple(own), marks)


@dataclass
class Done:
    kind: str
    before: Seen
    after: Seen
    created: int
    """How many checkpoints there had been before."""
    deleted: set[str] = field(default_factory=set)


@dataclass
class Life:
    """A session from its first checkpoint until it is freed; its name may have others."""

    created: list[str] = field(default_factory=list)
    freed: set[str] = field(default_factory=set)
    done: list[Done] = field(default_factory=list)
    undone: list[Done] = field(default_factory=list)


class UndoMachine(RuleBasedStateMachine):
    store: holdfast.Store

    def open(self) -> holdfast.Store:
        return holdfast.open("memory:")

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-undo-"))
        self.store = self.open()
        self.lives: dict[str, list[Life]] = {"a": [], "b": []}
        self.handles: dict[tuple[str, int], holdfast.Session] = {}
        self.forks = self.keys = 0

    def teardown(self) -> None:
        if hasattr(self, "store"):
            try:
                report = self.store.verify(read_data=True)
                assert report.ok, str(report)
                self.store.close()
            finally:
                shutil.rmtree(self.folder)

    def handle(self, name: str, which: int) -> holdfast.Session:
        if (name, which) not in self.handles:
            self.handles[name, which] = self.store.session(name)
        return self.handles[name, which]

    def current(self, name: str, which: int) -> holdfast.Session:
        session = self.handle(name, which)
        session.refresh()
        return session

    def perform(self, kind: str, name: str, act: Callable[[], Any]) -> Any:
        """Do something, and note what it changed."""
        before = look(self.store, name)
        result = act()
        after = look(self.store, name)
        if not before.exists:
            self.lives[name].append(Life())
        life = self.lives[name][-1]
        done = Done(kind, before, after, len(life.created))
        new = [id for id in after.marks if id not in before.marks]
        life.created += new
        if after.exists:
            done.deleted = before.marks.keys() - after.marks.keys()
        life.done.append(done)
        life.undone.clear()
        return result

    def write(self, name: str, which: int, kind: str, how: Callable[..., Any]) -> None:
        session = self.current(name, which)
        self.perform(kind, name, lambda: how(session))

    # -- rules ---------------------------------------------------------------------------------

    @rule(name=NAMES, which=WHICH, seed=SEEDS)
    def save(self, name: str, which: int, seed: int) -> None:
        rng = random.Random(seed)
        state = {"n": seed, "log": [message(rng, i) for i in range(rng.choice([0, 1, 12]))]}
        if rng.random() < 0.3:
            state["big"] = "x" * 5_000
        self.keys += 1
        marks: Any = rng.choice(
            [{}, {"label": f"l{seed % 3}"}, {"tags": ["t"], "key": f"{self.keys}"}]
        )
        self.write(name, which, "save", lambda s: s.save(state, **marks))

    @rule(name=NAMES, which=WHICH, seed=SEEDS)
    def append(self, name: str, which: int, seed: int) -> None:
        item = message(random.Random(seed), 1)
        self.write(name, which, "append", lambda s: s.append("log", item))

    @rule(name=NAMES, which=WHICH, seed=SEEDS)
    def patch(self, name: str, which: int, seed: int) -> None:
        self.write(name, which, "patch", lambda s: s.patch(set={"n": seed}))

    def some(self, name: str, seed: int) -> holdfast.Checkpoint | None:
        tree = list(self.store.session(name).tree())
        return random.Random(seed).choice(tree) if tree else None

    @rule(name=NAMES, which=WHICH, seed=SEEDS)
    def rewind(self, name: str, which: int, seed: int) -> None:
        if (at := self.some(name, seed)) is not None:
            self.perform("rewind", name, lambda: self.handle(name, which).rewind(at))

    @rule(name=NAMES, which=WHICH, seed=SEEDS)
    def tag(self, name: str, which: int, seed: int) -> None:
        if (at := self.some(name, seed)) is not None:
            tags = random.Random(seed).choice([["t"], ["t", "u"], ["v"]])
            self.perform("tag", name, lambda: self.handle(name, which).tag(at, *tags))

    @rule(name=NAMES, which=WHICH, seed=SEEDS)
    def untag(self, name: str, which: int, seed: int) -> None:
        at, handle = self.some(name, seed), self.handle(name, which)
        if at is None:
            return
        if at.tags:
            self.perform("tag", name, lambda: handle.untag(at, at.tags[0]))
        else:
            with pytest.raises(InvalidRequest):
                handle.untag(at, "t")

    @rule(name=NAMES, which=WHICH, seed=SEEDS)
    def unlabel(self, name: str, which: int, seed: int) -> None:
        at, handle = self.some(name, seed), self.handle(name, which)
        if at is None:
            return
        if at.label is not None:
            self.perform("label", name, lambda: handle.unlabel(at))
        else:
            with pytest.raises(InvalidRequest):
                handle.unlabel(at)

    @rule(name=NAMES, which=WHICH, seed=SEEDS)
    def label(self, name: str, which: int, seed: int) -> None:
        if (at := self.some(name, seed)) is not None:
            self.perform("label", name, lambda: self.handle(name, which).label(at, f"l{seed % 3}"))

    @rule(name=NAMES, which=WHICH, seed=SEEDS)
    def delete(self, name: str, which: int, seed: int) -> None:
        at = self.some(name, seed)
        if at is None:
            return
        now = look(self.store, name)
        handle = self.handle(name, which)
        if now.head != at.id:
            self.perform("delete", name, lambda: handle.delete(at))
        elif len(now.history) < 2:
            with pytest.raises(InvalidRequest):
                handle.delete(at)
        else:
            self.perform("delete", name, lambda: handle.delete(at))
            assert look(self.store, name).history == now.history[1:]

    @rule(name=NAMES, which=WHICH)
    def delete_session(self, name: str, which: int) -> None:
        if look(self.store, name).exists:
            self.perform("delete", name, lambda: self.handle(name, which).delete())
        else:
            with pytest.raises(SessionNotFound):
                self.handle(name, which).delete()

    @rule(name=NAMES, which=WHICH, keep=st.integers(1, 5), all_=st.booleans())
    def prune(self, name: str, which: int, keep: int, all_: bool) -> None:
        before = look(self.store, name)
        if not before.exists:
            return
        rule = Retention(keep_last=keep, keep_tagged=all_, keep_labelled=all_)
        plan = self.handle(name, which).prune(rule, dry_run=True)
        assert look(self.store, name) == before
        if plan.removed:
            again = self.perform("prune", name, lambda: self.handle(name, which).prune(rule))
            assert [v[1:] for v in again.verdicts] == [v[1:] for v in plan.verdicts]
        else:
            self.handle(name, which).prune(rule)  # is no operation

    @rule(name=NAMES, seed=SEEDS)
    def fork(self, name: str, seed: int) -> None:
        at = self.some(name, seed)
        if at is None or self.forks > 3:
            return
        new = f"f{self.forks}"
        self.forks += 1
        self.lives[new] = []
        self.perform("fork", new, lambda: self.store.session(name).fork(new, at))
        rng = random.Random(seed)
        if rng.random() < 0.5:
            self.write(new, 0, "save", lambda s: s.save({"log": [seed]}))
        for _ in range(rng.randrange(4)):
            self.undo(new, rng.randrange(2))
        for _ in range(rng.randrange(3)):
            self.redo(new, rng.randrange(2))

    def again(self, seen: Seen, created: int, life: Life, name: str, now: Seen) -> None:
        """Whether all is as it was; checkpoints that were made since stay."""
        assert now[:4] == seen[:4]
        if seen.exists:
            since = set(life.created[created:])
            assert now.marks.keys() == seen.marks.keys() | since
            assert {id: now.marks[id] for id in seen.marks} == seen.marks

    @rule(name=NAMES, which=WHICH)
    def undo(self, name: str, which: int) -> None:
        handle, before = self.handle(name, which), look(self.store, name)
        if not self.lives[name]:
            with pytest.raises(SessionNotFound):
                handle.undo()
            return
        life = self.lives[name][-1]
        top = life.done[-1] if life.done else None
        own = top is not None and top.kind == "fork" and len(life.created) > 1
        if top is None or own or top.deleted & life.freed:
            with pytest.raises(InvalidRequest):
                handle.undo()
            assert look(self.store, name) == before
            return
        done = handle.undo()
        assert (done.kind, done.details["what"]) == ("undo", top.kind)
        now = look(self.store, name)
        if top.kind in ("save", "append", "patch") and not top.before.exists:
            assert (now.exists, now.head) == (True, None)  # the name stays, with nothing to load
            assert now.marks.keys() == before.marks.keys()
        else:
            self.again(top.before, top.created, life, name, now)
        life.undone.append(life.done.pop())

    @rule(name=NAMES, which=WHICH)
    def redo(self, name: str, which: int) -> None:
        handle, before = self.handle(name, which), look(self.store, name)
        if not self.lives[name]:
            with pytest.raises(SessionNotFound):
                handle.redo()
            return
        life = self.lives[name][-1]
        if not life.undone:
            with pytest.raises(InvalidRequest):
                handle.redo()
            assert look(self.store, name) == before
            return
        redone = life.undone.pop()
        done = handle.redo()
        assert (done.kind, done.details["what"]) == ("redo", redone.kind)
        new = len(redone.after.marks.keys() - redone.before.marks.keys())
        now = look(self.store, name)
        self.again(redone.after, redone.created + new, life, name, now)
        life.done.append(redone)

    @rule(name=NAMES, which=WHICH, times=st.integers(2, 6))
    def there_and_back(self, name: str, which: int, times: int) -> None:
        for _ in range(times):
            self.undo(name, which)
        for _ in range(times):
            self.redo(name, which)

    @rule()
    def gc(self) -> None:
        before = {name: look(self.store, name) for name in self.lives}
        self.store.gc()
        for name, seen in before.items():
            now = look(self.store, name)
            empty = seen.head is None and not seen.marks  # then its name goes with its last one
            assert now == seen or (empty and not now.exists)
            if not now.exists:
                self.lives[name].clear()
                continue
            del self.lives[name][:-1]
            life = self.lives[name][-1]
            life.freed |= set(life.created) - seen.marks.keys()

    @rule()
    def reopen(self) -> None:
        self.handles.clear()

    @invariant()
    def states_load(self) -> None:
        if hasattr(self, "store"):
            for name in self.lives:
                session = self.store.session(name)
                for checkpoint in session.tree():
                    assert checkpoint.damaged is None
                    session.load(checkpoint)


class SqliteUndoMachine(UndoMachine):
    def open(self) -> holdfast.Store:
        return holdfast.open(self.folder / "store.db", durability="normal")

    @rule()
    def reopen(self) -> None:
        self.handles.clear()
        self.store.close()
        self.store = self.open()


@pytest.mark.parametrize("machine", [UndoMachine, SqliteUndoMachine])
def test_undo_equals_model(machine: type[UndoMachine], rounds: Any) -> None:
    count = rounds(35, torture=2_000)
    run_state_machine_as_test(
        machine, settings=settings(max_examples=count, stateful_step_count=30)
    )


# -- one by one ----------------------------------------------------------------------------------


OPERATIONS: dict[str, Callable[[holdfast.Session], Any]] = {
    "save": lambda s: s.save({"new": 1}, label="n", tags=["t"]),
    "append": lambda s: s.append("log", "one more"),
    "patch": lambda s: s.patch(set={"i": 99}, drop=["log"]),
    "rewind": lambda s: s.rewind("@~3"),
    "tag": lambda s: s.tag("@~1", "t", "u"),
    "label": lambda s: s.label("@~1", "new"),
    "untag": lambda s: s.untag("@~1", "t", "w"),
    "unlabel": lambda s: s.unlabel("@~1"),
    "delete the head": lambda s: s.delete("@"),
    "delete": lambda s: s.delete("@~2"),
    "prune": lambda s: s.prune(Retention(keep_last=2)),
}


@pytest.mark.parametrize("kind", OPERATIONS)
def test_each_kind_comes_back(home: Home, kind: str) -> None:
    session = home.filled(5, tags=["t"])
    session.label("@~1", "old")
    for c in session.tree():
        if c.seq < 5:
            session.tag(c, "w")
    rule = OPERATIONS[kind]
    kind = {"untag": "tag", "unlabel": "label", "delete the head": "delete"}.get(kind, kind)
    if kind == "prune":
        rule = lambda s: s.prune(Retention(keep_last=2, keep_tagged=False))  # noqa: E731
    before = look(home.store, "s")
    rule(session)
    after = look(home.store, "s")
    assert after != before
    for _ in range(2):
        done = session.undo()
        assert (done.kind, done.details["what"]) == ("undo", kind)
        now = look(home.reopened(), "s")
        assert now[:4] == before[:4]
        assert {id: m for id, m in now.marks.items() if id in before.marks} == before.marks
        session = home.session()
        assert session.redo().details["what"] == kind
        assert look(home.reopened(), "s") == after
        session = home.session()
    assert [o.kind for o in session.operations()][-4:] == ["undo", "redo"] * 2
    assert home.store.verify(read_data=True).ok


def test_a_deleted_session_comes_back(home: Home) -> None:
    session = home.filled(3, label="l")
    before = look(home.store, "s")
    session.delete()
    assert [i.name for i in home.store.sessions()] == []
    with pytest.raises(SessionNotFound):
        session.load()
    home.reopened().session("s").undo()
    assert look(home.store, "s") == before
    home.session().redo()
    assert not home.session().exists()
    home.session().undo()
    home.session().save({"on": "top"})
    assert home.session().step == 4


def test_a_deletion_tells_how_many_went(home: Home) -> None:
    session = home.filled(5)
    assert session.delete("@~1").deleted == 1
    assert session.prune(Retention(keep_last=3)).removed
    assert [o.deleted for o in session.operations()] == [1, 1]
    deletion = session.delete()
    assert deletion.deleted == 3
    assert session.undo().deleted == 0
    assert home.reopened().session("s").delete().deleted == 3
    for gone in ("s", "none"):
        with pytest.raises(SessionNotFound):
            home.store.session(gone).delete()


def test_a_session_that_expires_tells_how_many_went(home: Home) -> None:
    home.filled(5)
    [plan] = home.store.prune(Retention(session_ttl="0.000001s"))
    assert plan.whole
    assert len(plan.removed) == 5
    assert "(5)" in str(plan)


def test_a_session_of_which_the_head_is_lost_is_still_deleted(home: Home) -> None:
    home.filled(3)
    home.spoil_checkpoint(3)
    assert home.reopened().session("s").delete().deleted == 3
    assert not home.session().exists()


def test_a_name_that_is_taken_again(home: Home) -> None:
    """The deleted one comes back when its name is free, and no other time."""
    session = home.filled(2)
    session.delete()
    session.save({"second": "life"})
    assert len(session) == 1
    session.undo()
    with pytest.raises(InvalidRequest, match="nothing to undo"):
        session.undo()
    session.redo()
    assert session.load() == {"second": "life"}
    assert home.store.verify(read_data=True).ok


def test_a_fork_comes_back(home: Home) -> None:
    session = home.filled(3)
    fork = session.fork("f", "@~1")
    before = look(home.store, "f")
    fork.undo()
    assert not fork.exists()
    assert session.load()["i"] == 2
    fork.redo()
    assert look(home.store, "f") == before
    fork.undo()
    home.session().fork("f", "@~2")  # the name is free
    with pytest.raises(SessionExists):
        session.fork("f")


def test_a_fork_with_saves_of_its_own_stays(home: Home) -> None:
    fork = home.filled(3).fork("f")
    fork.save({"own": 1})
    fork.undo()
    with pytest.raises(InvalidRequest, match="checkpoints of its own"):
        fork.undo()
    assert fork.load()["i"] == 2
    fork.redo()
    assert fork.load() == {"own": 1}


def test_nothing_to_undo(home: Home) -> None:
    with pytest.raises(SessionNotFound):
        home.session("none").undo()
    session = home.filled(1)
    with pytest.raises(InvalidRequest, match="nothing to redo"):
        session.redo()
    session.undo()
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="nothing to undo"):
            session.undo()
    session.redo()
    with pytest.raises(InvalidRequest, match="nothing to redo"):
        session.redo()


@pytest.mark.parametrize("kind", OPERATIONS)
def test_something_new_ends_redo(home: Home, kind: str) -> None:
    session = home.filled(4)
    session.save({"i": 4, "log": []}, label="l", tags=["t", "w"])
    session.save({"i": 5, "log": []})
    session.save({"i": 6, "log": []})
    session.undo()
    OPERATIONS[kind](session)
    now = look(home.store, "s")
    with pytest.raises(InvalidRequest, match="nothing to redo"):
        session.redo()
    assert look(home.store, "s") == now


def test_redo_goes_as_far_as_undo_went(home: Home) -> None:
    session = home.filled(6)
    for n in range(4, -1, -1):
        session.undo()
        assert session.load()["i"] == n
    for n in range(1, 4):
        session.redo()
        assert session.load()["i"] == n
    session.undo()
    session.save({"i": "other"})
    session.undo()
    assert session.load()["i"] == 2
    session.undo()
    assert session.load()["i"] == 1
    session.redo()
    session.redo()
    assert session.load()["i"] == "other"


def test_before_the_first_save(home: Home) -> None:
    """Then the session has no head, as if nothing had been saved yet, and goes on from there."""
    session = home.session()
    first = session.save({"i": 1})
    session.undo()
    assert session.exists()
    assert [(i.head, i.checkpoints) for i in home.store.sessions()] == [(None, 1)]
    with pytest.raises(CheckpointNotFound):
        session.load()
    assert home.store.verify(read_data=True).ok
    session = home.reopened().session("s")
    second = session.save({"i": 2})
    assert (second.parent, second.step, second.seq) == (None, 1, 2)
    assert [c.id for c in session.history()] == [second.id]
    assert [c.id for c in session.tree()] == [first.id, second.id]
    session.rewind(first)
    session.append("log", "x")
    assert session.load() == {"i": 1, "log": ["x"]}
    assert home.store.verify(read_data=True).ok


@pytest.mark.parametrize("how", ["save", "append", "patch"])
def test_a_first_save_beside_one_that_was_taken_back(home: Home, how: str) -> None:
    """Neither handle has a head: there is none that could have moved."""
    mine, other = home.session(), home.another().session("s")
    other.save({"i": 1})
    other.undo()
    if how == "save":
        made = mine.save({"log": ["x"]})
    else:
        made = mine.append("log", "x") if how == "append" else mine.patch(set={"log": ["x"]})
    assert (made.parent, made.step, made.seq) == (None, 1, 2)
    assert mine.load() == home.another().session("s").load() == {"log": ["x"]}
    with pytest.raises(HeadMoved):
        other.save({"i": 2})
    assert home.store.verify(read_data=True).ok


def test_another_handle_learns_of_it(home: Home) -> None:
    session = home.filled(3)
    other = home.another().session("s")
    session.undo()
    with pytest.raises(HeadMoved):
        other.save({"on": "what is no head any more"})
    assert other.load()["i"] == 1
    other.save({"i": "other"})
    with pytest.raises(HeadMoved):
        session.save({"stale": 1})
    session.undo()  # of the other's save: there is one log
    assert session.load()["i"] == 1
    session.save({"i": "mine"})
    with pytest.raises(HeadMoved):
        other.append("log", "stale")
    other.undo()
    assert other.save({"i": "again"}).step == 3
    assert home.store.verify(read_data=True).ok


def test_a_handle_whose_session_was_deleted(home: Home) -> None:
    session = home.filled(2)
    other = home.another().session("s")
    other.delete()
    with pytest.raises(HeadMoved):
        session.save({"i": 1})
    assert not session.exists()
    other.undo()
    assert session.save({"i": 2}).step == 3


def test_marks_do_not_move_a_head(home: Home) -> None:
    """Undoing a tag lets another handle save as before."""
    session = home.filled(2)
    other = home.another().session("s")
    session.tag("@", "x")
    session.undo()
    assert other.save({"i": 9}).step == 3


def test_what_is_freed_does_not_come_back(home: Home) -> None:
    session = home.filled(6)
    session.delete("@~2")
    session.save({"i": 6})
    assert home.store.gc().checkpoints == 1
    session.undo()
    before = look(home.store, "s")
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="freed"):
            session.undo()
        assert look(home.store, "s") == before
    session.delete()
    session.undo()
    assert look(home.store, "s") == before
    session.delete()
    home.store.gc()
    with pytest.raises(SessionNotFound):
        session.undo()
    assert home.store.verify(read_data=True).ok


def test_gc_takes_nothing_that_undo_needs(home: Home) -> None:
    session = home.filled(5)
    before = look(home.store, "s")
    session.undo()
    session.undo()
    assert home.store.gc().checkpoints == 0
    session.redo()
    session.redo()
    assert look(home.store, "s") == before
    session.delete("@~1")
    session.undo()
    assert home.store.gc().checkpoints == 0
    assert look(home.store, "s") == before


def test_an_automatic_prune_is_invisible(home: Home) -> None:
    session = home.filled(6)
    session.tag("@", "x")
    session.undo()
    removed = prune_unlogged(session, Retention(keep_last=4)).removed
    assert [v.checkpoint.seq for v in removed] == [1, 2]
    session.redo()
    assert session.get().tags == ("x",)
    session.undo()
    session.undo()
    assert session.load()["i"] == 4
    assert [c.seq for c in session.tree()] == [3, 4, 5, 6]
    session.undo()
    session.undo()
    assert session.load()["i"] == 2
    with pytest.raises(InvalidRequest, match="deleted"):
        session.undo()  # what the clean-up took does not come back
    assert [c.seq for c in session.tree()] == [3, 4, 5, 6]


def test_a_deletion_is_done_again_after_an_automatic_prune(home: Home) -> None:
    """What both of them delete is deleted already."""
    session = home.filled(6)
    session.prune(Retention(keep_last=4))
    session.undo()
    prune_unlogged(session, Retention(keep_last=5))
    session.redo()
    assert [c.seq for c in session.tree()] == [3, 4, 5, 6]
    assert home.store.gc().checkpoints == 2
    assert home.store.verify(read_data=True).ok


def test_undo_when_the_log_was_thinned(home: Home) -> None:
    """A clean-up is not in the log; what else was done keeps its place."""
    home.store.retention = Retention(keep_last=20)
    session = home.session()
    for i in range(30):
        session.save({"i": i})
    session.rewind("@~5")
    session.save({"i": "x"})
    session.save({"i": "y"})  # the 32nd: a clean-up
    home.store.gc()
    session.undo()
    session.undo()
    assert session.load() == {"i": 24}


def test_a_session_without_head(home: Home) -> None:
    session = home.filled(1)
    session.undo()
    assert session.head is None
    assert session.step == 0
    assert list(session.history()) == []


def test_undo_of_a_race(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was planned on a session that has changed meanwhile is planned anew."""
    session = home.filled(3)
    other = home.another().session("s")
    commit, raced = home.store._repository.backend.commit, list[int]()

    def race(change: Any) -> None:
        if not raced:
            raced.append(1)
            other.save({"i": "raced"})
        commit(change)

    monkeypatch.setattr(home.store._repository.backend, "commit", race)
    session.undo()
    assert session.load()["i"] == 2  # the other's save was the newest
    assert len(session) == 4


# -- the tests see what they should: each of these changes to the engine makes one fail ------------


def test_a_lost_head_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oplog.OperationLog, "head_after", lambda self, ref: ref[1] if ref else 0)
    with pytest.raises(BaseException):  # noqa: B017 - however it shows
        _small_run()


def test_a_forgotten_tombstone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = MemoryBackend.commit

    def forgetful(self: MemoryBackend, batch: Batch) -> None:
        kept = [w for w in batch.writes if not (isinstance(w, Delete) and w.table == "tombs")]
        commit(self, replace(batch, writes=kept))

    monkeypatch.setattr(MemoryBackend, "commit", forgetful)
    with pytest.raises((AssertionError, CheckpointNotFound)):
        _small_run()


def test_a_redo_that_is_not_dropped_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def redoable(self: Any, ref: Any) -> int | None:
        ops = self._reader.operations(self._number, 1, 1 << 31)
        return ops[-1][0] if ops else None

    monkeypatch.setattr(oplog.OperationLog, "redoable", redoable)
    with pytest.raises(BaseException):  # noqa: B017
        _small_run()


def _small_run() -> None:
    """A walk through the machine without Hypothesis."""
    rng = random.Random(1)
    for _ in range(10):
        machine = UndoMachine()
        machine.begin()
        for _ in range(60):
            roll, seed = rng.randrange(12), rng.randrange(1 << 30)
            which = rng.randrange(2)
            if roll < 3:
                machine.save("a", which, seed)
            elif roll < 8:
                rule = [machine.rewind, machine.delete, machine.tag, machine.label, machine.append]
                rule[roll - 3]("a", which, seed)
            elif roll < 11:
                machine.undo("a", which)
            else:
                machine.redo("a", which)
        machine.teardown()


def test_the_walk_itself_is_sound() -> None:
    _small_run()


def test_operations_say_what_they_did_and_what_takes_them_back(home: Home) -> None:
    session = home.filled(6)
    session.rewind("@~2")
    session.tag("@", "a", "b")
    session.label("@", "plan")
    session.label("@", "new plan")
    session.untag("@", "a")
    session.unlabel("@")
    session.delete(list(session.tree())[4])
    session.prune(Retention(keep_last=1, keep_tagged=False, keep_labelled=False))
    session.undo()
    session.redo()
    home.spoil_checkpoint(4)
    home.store.repair()
    session = home.reopened().session("s")
    assert [(o.kind, o.summary, o.way_back) for o in session.operations()] == [
        ("rewind", "the head moved from checkpoint 6 to 4", "undo() moves the head back to 6"),
        ("tag", "checkpoint 4 tagged 'a', 'b'", "undo() removes the tags"),
        ("label", "checkpoint 4 labelled 'plan'", "undo() removes the label"),
        ("label", "checkpoint 4 labelled 'new plan'", "undo() puts the label 'plan' back"),
        ("tag", "checkpoint 4 no longer tagged 'a'", "undo() puts the tags back"),
        (
            "label",
            "checkpoint 4 no longer labelled 'new plan'",
            "undo() puts the label 'new plan' back",
        ),
        ("delete", "checkpoint 5 deleted", "undo(), until gc() has freed it"),
        ("prune", "3 checkpoints deleted", "undo(), until gc() has freed it"),
        ("undo", "the prune undone", "redo()"),
        ("redo", "the prune redone", "undo()"),
        (
            "repair",
            "the head moved from checkpoint 4, which is damaged, to 6",
            "undo() moves the head back to 4",
        ),
    ]
    assert session.delete().summary == "the session deleted, with 2 checkpoints"


# -- only if nothing has changed ------------------------------------------------------------------


def test_undo_takes_back_what_is_expected_or_nothing(home: Home) -> None:
    session = home.filled(3)
    head = session.get()
    tagged = session.tag("@", "x")
    operation = session.operations()[-1]
    before = look(home.store, "s")
    with pytest.raises(holdfast.Conflict):
        session.undo(expect=head)
    assert look(home.store, "s") == before
    session.undo(expect=operation)
    assert session.get().tags == ()
    with pytest.raises(holdfast.Conflict):
        session.redo(expect=head)
    session.redo(expect=operation)
    assert session.get().tags == tagged.tags
    session.undo()
    session.undo(expect=head)
    assert session.load()["i"] == 1


def test_delete_happens_at_the_expected_head_or_not_at_all(home: Home) -> None:
    session = home.filled(3)
    head = session.get()
    home.another().session("s").save({"i": "new"})
    before = look(home.store, "s")
    for revision in (None, "@~2"):
        with pytest.raises(holdfast.HeadMoved) as refusal:
            session.delete(revision, expect=head)
        assert refusal.value.expected == head.id
    assert look(home.store, "s") == before
    now = session.get()
    session.delete("@~2", expect=now)
    session.delete(expect=now.id)
    assert not session.exists()


# -- forks with another state ---------------------------------------------------------------------


def test_a_fork_begins_with_another_state(home: Home) -> None:
    session = home.session()
    log = [f"{n} {TEXT}" for n in range(50)]
    session.save({"log": log, "plan": "hotel"})
    whole = session.get().size
    fork = session.fork("f", state={"log": log, "plan": "hostel"}, tags=["cheap"], key="k")
    assert fork.load() == {"log": log, "plan": "hostel"}
    head = fork.get()
    assert (head.operation, head.parent_session, head.step) == ("fork", "s", 2)
    assert (head.tags, head.key) == (("cheap",), "k")
    assert head.added < whole // 10, "what both have is written once"
    assert session.load()["plan"] == "hotel"
    fork.append("log", "more")
    assert fork.load()["log"] == [*log, "more"]
    with pytest.raises(holdfast.SessionExists):
        session.fork("f", state={})
    with pytest.raises(holdfast.NotSerializable) as refusal:
        session.fork("g", state={"plan": object()})
    assert refusal.value.path == "state.plan"
    assert not home.session("g").exists()
    assert home.store.verify(read_data=True).ok


def test_undo_of_a_tag_keeps_the_other_tags(home: Home) -> None:
    session = home.session()
    saved = session.save({"i": 1}, **FIELDS)
    session.tag(saved, "c")
    session.label(saved, "renamed")
    session.tag(saved, "d", "a")
    session.undo()
    assert session.get().tags == ("a", "b", "c")  # "a" was there before
    session.undo()
    assert (session.get().label, session.get().tags) == ("plan ready", ("a", "b", "c"))
    session.undo()
    kept = home.reopened().session("s").get()
    assert {name: getattr(kept, name) for name in PLAIN_FIELDS} == PLAIN_FIELDS
    assert kept.tags == ("a", "b")
    assert (found_seqs(home, label="renamed"), found_seqs(home, tag="c")) == ([], [])
    assert found_seqs(home, label="plan ready") == found_seqs(home, tag="a") == [1]


def test_rewind_keeps_later_checkpoints(home):
    session = home.filled(5)
    future = list(session.history())
    before = len(session)
    target = session.rewind("@~3")
    assert target == future[3]
    session = home.reopened().session("s")
    assert session.head == target
    assert len(session) == before
    assert seqs(session.tree()) == [1, 2, 3, 4, 5]
    for checkpoint in future:
        assert session.load(checkpoint)["i"] == checkpoint.seq - 1
    assert [op.kind for op in session.operations()] == ["rewind"]
    branch = session.save({"i": "branch"})
    assert branch.parent == target.id
    assert seqs(session.history()) == [6, 2, 1]
    session.rewind(future[0])
    assert home.reopened().session("s").load()["i"] == 4
    assert home.store.verify().ok


def test_lists_and_undo_when_the_clock_is_set_back(home: Home) -> None:
    session = home.session()
    for i, offset in enumerate((0.0, -400 * DAY, 0.0, -4000 * DAY, -DAY, -2 * DAY)):
        with wall_clock(offset.__add__):
            session.save({"i": i}, tags=["t"])
            session.label("@", f"l{i}")
    assert found_seqs(home) == found_seqs(home, tag="t") == [6, 5, 4, 3, 2, 1]
    assert [op.details["label"] for op in session.operations()] == [f"l{i}" for i in range(6)]
    for i in range(5, 3, -1):
        assert session.undo().details["what"] == "label"
        session.undo()
        assert session.load()["i"] == i - 1
    rule = Retention(keep_last=4, keep_tagged=False, keep_labelled=False)
    assert [v.checkpoint.seq for v in session.prune(rule).removed] == [1, 2]


def test_undo_takes_back_the_newest_deletion_of_a_name(home: Home) -> None:
    """Also if the clock was set back since the one before."""
    for life, offset in enumerate((0.0, -DAY)):
        with wall_clock(offset.__add__):
            session = home.session()
            session.save({"life": life})
            session.delete()
    home.session().undo()
    assert home.session().load() == {"life": 1}


def test_undo_takes_back_the_newest_deletion_of_any_process(sqlite: Home) -> None:
    """Also if that one took its numbers for new sessions before the other."""
    sqlite.session("any").save({})
    for life, store in enumerate((sqlite.another(), sqlite.store)):
        session = store.session("s")
        session.save({"life": life})
        session.delete()
    sqlite.session().undo()
    assert sqlite.session().load() == {"life": 1}


def test_created_at_survives_undo_prune_and_gc(home: Home) -> None:
    before = dt.datetime.now(dt.UTC)
    session = home.filled(6, tags=["t"])
    times = {c.id: c.created_at for c in session.tree()}
    session.undo()
    session.redo()
    session.delete("@~4")
    session.undo()
    session.tag("@", "u")
    session.prune(Retention(keep_last=4, keep_tagged=False))
    home.store.gc()
    store = home.reopened()
    left = list(home.session().tree())
    assert {c.id: c.created_at for c in left}.items() < times.items()
    for listed in (store.checkpoints(), store.checkpoints(tag="t"), map(store.get, times)):
        with suppress(CheckpointNotFound):
            assert all(c.created_at == times[c.id] for c in listed)
    for n, c in enumerate(left):  # exact to the microsecond
        if n and left[n - 1].created_at < c.created_at:
            assert seqs(store.checkpoints(since=c.created_at))[::-1] == seqs(left[n:])
            assert seqs(store.checkpoints(until=c.created_at))[::-1] == seqs(left[:n])
    moments = [
        before,
        *(op.created_at for op in home.session().operations()),
        dt.datetime.now(dt.UTC),
    ]
    assert moments == sorted(moments)
    assert any(time.microsecond for time in times.values())


def test_steps_after_undo_gc_and_a_restart(home: Home) -> None:
    """Every time a step is lost by undo, and all but two checkpoints by retention."""
    taken: list[tuple[int, int]] = []
    for i in range(4):
        session = home.reopened().session("s")
        taken += [(c.step, c.seq) for c in (session.save({"i": i}), session.save({"undone": i}))]
        session.undo()
        session.prune(Retention(keep_last=2))
        home.store.gc()
    assert taken == [(1, 1), (2, 2), (2, 3), (3, 4), (3, 5), (4, 6), (4, 7), (5, 8)]
    numbers = [op.number for op in home.reopened().session("s").operations()]
    assert numbers == list(range(1, len(numbers) + 1))


def test_an_error_while_reading_changes_nothing(home: Home) -> None:
    session = home.filled(4)
    session.undo()
    before = look(home.store, "s")
    calls: list[Callable[[], Any]] = [
        session.undo,
        session.redo,
        session.delete,
        lambda: session.delete("@~1"),
        lambda: session.prune(KEEP_LAST),
        lambda: session.fork("f"),
        lambda: home.store.prune(KEEP_LAST),
        lambda: list(home.store.checkpoints()),
        home.store.gc,
        home.store.stats,
    ]
    for call in calls:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(home.store._repository.backend, "view", fail)
            with pytest.raises(Unavailable):
                call()
        assert look(home.store, "s") == before
    assert not home.session("f").exists()


FAILING_PARTS: dict[str, tuple[str, Callable[[Home], Any]]] = {
    # by what is done: the part of the store that fails (of one in memory, all does)
    "undo": ("heads", lambda home: home.session().undo()),
    "undo, logged": ("operations", lambda home: home.session().undo()),
    "redo": ("operations", lambda home: home.session("redone").redo()),
    "tag": ("marks", lambda home: home.session().tag("@", "new")),
    "tag, found": ("facets", lambda home: home.session().tag("@", "new")),
    "label": ("marks", lambda home: home.session().label("@", "new")),
    "delete": ("tombs", lambda home: home.session().delete("@~1")),
    "delete session": ("sessions", lambda home: home.session().delete()),
    "prune": ("tombs", lambda home: home.session().prune(KEEP_LAST)),
    "prune store": ("tombs", lambda home: home.store.prune(KEEP_LAST)),
    "fork": ("sessions", lambda home: home.session().fork("f")),
    "fork, named": ("names", lambda home: home.session().fork("f")),
}


@pytest.mark.parametrize("kind", FAILING_PARTS)
def test_a_failed_operation_leaves_nothing(home: Home, kind: str) -> None:
    table, act = FAILING_PARTS[kind]
    home.filled(4)
    home.filled(2, "redone").undo()
    names = ("s", "redone", "f")
    before = [look(home.store, name) for name in names]
    ops = home.session().operations()
    with home.failing(table), pytest.raises(HoldfastError):
        act(home)
    for store in (home.store, home.another()):
        assert [look(store, name) for name in names] == before
        assert store.session("s").operations() == ops
        assert [c.seq for c in store.checkpoints(tag="new")] == []
    act(home)
    assert [look(home.reopened(), name) for name in names] != before
    assert home.store.verify().ok


def test_a_failed_rewind_is_an_error(home):
    session = home.filled(2)
    with home.failing(), pytest.raises(HoldfastError):
        session.rewind("@~1")
    assert session.load()["i"] == 1
    assert session.operations() == []


@pytest.mark.parametrize("kind", ["undo", "redo"])
def test_an_undo_that_was_committed_is_not_reported_as_failed(home: Home, kind: str) -> None:
    """An undo that is reported as failed would be tried again, and take back one more."""
    session = home.filled(4)
    if kind == "redo":
        session.undo()
    backend, done = home.store._repository.backend, list[int]()
    commit, view = backend.commit, backend.view

    def committed(change: Any) -> None:
        commit(change)
        done.append(1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "commit", committed)
        patch.setattr(backend, "view", lambda: fail() if done else view())
        with suppress(Unavailable):
            assert getattr(session, kind)().kind == kind
            done.clear()
        assert not done, "it was done, and reported as failed"
    assert session.load()["i"] == {"undo": 2, "redo": 3}[kind]


def test_nan_survives_undo_prune_gc_and_repair(home: Home) -> None:
    session = home.session()
    state = {"loss": math.nan, "log": [math.inf, math.nan, "needle"], "text": TEXT * 99}
    for _ in range(6):
        session.save(state)
    session.undo()
    session.redo()
    session.prune(Retention(keep_last=3))
    home.store.gc()
    home.spoil_head()
    assert home.store.repair().sessions[0].lost == ()
    home.reopened()
    assert found_seqs(home) == [6, 5, 4]
    assert [hit.path for hit in home.store.search("needle")] == [("log", 2)]  # it came once
    for checkpoint in home.session().tree():
        loaded = home.session().load(checkpoint)
        assert math.isnan(loaded["loss"])
        assert math.isnan(loaded["log"][1])
