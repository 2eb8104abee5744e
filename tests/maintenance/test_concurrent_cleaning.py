"""Prune, automatic retention and gc beside processes and threads that change the same sessions."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

import pytest

from holdfast import Retention
from holdfast.errors import HoldfastError
from holdfast.history.oplog import Operator
from holdfast.maintenance import autoprune, gc, retention
from holdfast.storage import changes
from tests.faults.clock import wall_clock
from tests.maintenance.test_retention import _connected
from tests.support.sessions import DAY, found_seqs, save_concurrently, save_random, seqs
from tests.support.stores import Home, prune_unlogged

CLEANER = """
import sys, holdfast
with holdfast.open(sys.argv[1], durability="normal") as store:
    mine = store.session("cleaner")
    for i in range(12):
        mine.save({"i": i, "log": ["shared text " * 30] * i})
        mine.save({"undone": i})
        mine.undo()
        mine.prune(holdfast.Retention(keep_last=2))
        store.prune(holdfast.Retention(keep_last=1000))
        store.gc()
    store.repair()
"""


def test_cleaning_in_another_process_loses_nothing(sqlite: Home) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    child = subprocess.Popen([sys.executable, "-c", CLEANER, str(sqlite.path)], env=environment)
    session, states = sqlite.session(), dict[str, Any]()
    while len(states) < 150 and (child.poll() is None or len(states) < 30):
        state = {"i": len(states), "log": ["shared text " * 30] * (len(states) % 20)}
        states[session.save(state).id] = state
        session.tag("@", "t")
        time.sleep(0.002)
    assert child.wait(60) == 0
    session = sqlite.reopened().session("s")
    assert [c.id for c in session.history()][::-1] == list(states)
    for id, state in states.items():
        assert session.load(id) == state
    assert len(found_seqs(sqlite, tag="t")) == len(states)
    assert sqlite.session("cleaner").load()["i"] == 11
    assert sqlite.store.verify(read_data=True).ok


def test_concurrent_saves_beside_automatic_retention(home: Home) -> None:
    home.store.retention = Retention(keep_last=5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autoprune, "_SLACK", 3)
        patch.setattr(autoprune, "_ENOUGH", 8)
        won = save_concurrently(home, writers=8, saves=6)
    home.store.gc()
    session = home.reopened().session("s")
    assert len(won) == len(set(won)) == 48
    assert session.step == 48
    assert len(session) < 48
    assert {c.id for c in session.tree()} <= set(won)
    assert list(session.history()) == list(session.tree())[::-1]
    _connected(home.store)
    assert home.store.verify(read_data=True).ok


def test_two_prunes_at_once(home: Home) -> None:
    """What one has chosen to delete, another has deleted and freed meanwhile."""
    session, other = save_random(home.session(), 10), home.another().session("s")
    backend, rule, raced = home.store._repository.backend, Retention(keep_last=3), list[int]()
    commit = backend.commit

    def race(change: Any) -> None:
        if not raced:
            raced.append(1)
            prune_unlogged(other, rule)
            assert home.another().gc().checkpoints == 7
        commit(change)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "commit", race)
        prune_unlogged(session, rule)
    session = home.reopened().session("s")
    assert seqs(session.tree()) == [8, 9, 10]
    assert len(session) == 3
    assert home.store.stats()[:3] == (1, 3, 0)
    assert not any(home.store.gc())
    assert home.store.verify().ok


def test_a_prune_beside_a_rewind_keeps_the_head(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Store.prune() plans first and carries out later without looking again: it buries the head."""
    session = home.filled(5)
    first = next(iter(session.tree()))
    carry_out = retention.carry_out

    def race(operator: Operator, plan: Any, *rule: Any) -> None:
        session.rewind(first)
        carry_out(operator, plan, *rule)

    monkeypatch.setattr(retention, "carry_out", race)
    home.store.prune(Retention(keep_last=2))
    home.store.gc()
    assert session.load()["i"] == 0
    assert home.store.verify(read_data=True).ok


@pytest.mark.parametrize("mark", ["tag", "label", "fork"])
def test_a_prune_beside_a_tag_label_or_fork_keeps_its_checkpoint(
    home: Home, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = home.filled(5)
    first = next(iter(session.tree()))
    carry_out = retention.carry_out

    def race(operator: Operator, plan: Any, *rule: Any) -> None:
        if mark == "fork" and not home.session("f").exists():
            session.fork("f", first)
        elif mark != "fork":
            getattr(session, mark)(first, "x")
        carry_out(operator, plan, *rule)

    monkeypatch.setattr(retention, "carry_out", race)
    home.store.prune(Retention(keep_last=2))
    assert first.id in [c.id for c in session.tree()]


@pytest.mark.parametrize("what", ["rewind", "tag", "label", "undo", "fork"])
def test_operations_planned_before_an_automatic_prune(
    home: Home, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An automatic prune leaves the head's row alone, so that alone does not tell of it."""
    session, other = home.filled(6), home.another().session("s")
    if what == "undo":
        session.rewind(session.get("@~5"))
        session.append("log", "x")
        session.rewind(session.get("@~1"))
        target = "@"
    else:
        target = session.get("@~4").id
    calls: dict[str, Any] = {
        "rewind": lambda: session.rewind(target), "tag": lambda: session.tag(target, "t"),
        "label": lambda: session.label(target, "l"), "undo": session.undo,
        "fork": lambda: session.fork("f", target),
    }  # fmt: skip
    backend, raced = home.store._repository.backend, list[int]()
    commit = backend.commit

    def race(change: Any) -> None:
        if not raced:
            raced.append(1)
            prune_unlogged(other, Retention(keep_last=1))
        commit(change)

    with monkeypatch.context() as patch:
        patch.setattr(backend, "commit", race)
        with suppress(HoldfastError):
            calls[what]()
    home.store.gc()
    session = home.reopened().session("s")
    assert session.load()
    assert session.get().damaged is None
    assert home.store.verify(read_data=True).ok


def test_a_session_that_is_saved_while_it_expires_stays(home: Home) -> None:
    session, other = home.filled(2), home.another().session("s")
    carry_out = retention.carry_out

    def race(operator: Operator, plan: Any, *rule: Any) -> None:
        if not other.operations() and len(other) == 2:
            other.save({"i": "new"})
        carry_out(operator, plan, *rule)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retention, "carry_out", race)
        with wall_clock(lambda true: true + 100 * DAY):
            home.store.prune(Retention(session_ttl="30d"))
    assert session.operations() == []
    assert home.reopened().session("s").load() == {"i": "new"}


def test_gc_of_a_busy_session_does_not_hold_up_others(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "ab":
        home.filled(9, name).prune(Retention(keep_last=1))
    monkeypatch.setattr(gc, "BATCH", 2)
    busy = home.another().session("a")
    sweep, raced = changes.sweep, list[int]()

    def race(backend: Any, sweeps: Any) -> Any:
        if not raced:
            raced.append(1)
            busy.append("log", "x")
        return sweep(backend, sweeps)

    monkeypatch.setattr(changes, "sweep", race)
    assert home.store.gc().checkpoints == 16


def test_a_handle_outlives_gc_of_its_session(home: Home) -> None:
    session = home.session()
    first = session.save({"i": 1})
    session.undo()
    session.delete(first)
    home.store.gc()
    assert session.save({"i": 2}).step == 1
    assert home.reopened().session("s").load() == {"i": 2}
