"""What five earlier systems got wrong (SEEDS.md), row by row, in living with history.

That is undo, deletion, retention, gc, repair, searches, backups, group commit, asyncio, watching
and telemetry; test_seed_regressions.py has the rows of the engine, and says what is held elsewhere.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import fnmatch
import logging
import math
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import apsw
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import TracerProvider

import holdfast
from holdfast import (
    Retention,
    collect,
    finding,
    freeing,
    lineage,
    live,
    operations,
    repair,
    telemetry,
    tidying,
    watching,
)
from holdfast import retention as retaining
from holdfast import store as storing
from holdfast.backends import disk, sqlite_file, sqlite_indexes
from holdfast.backends.files import FilesBackend
from holdfast.backends.group import Member
from holdfast.backends.memory import MemoryBackend
from holdfast.backends.sqlite import SqliteBackend
from holdfast.codec import records
from holdfast.errors import (
    CheckpointNotFound,
    Corrupt,
    HeadMoved,
    HoldfastError,
    InvalidRequest,
    KeyTaken,
    NotFound,
    SessionExists,
    SessionNotFound,
    Unavailable,
)
from holdfast.live import Live
from holdfast.watching import Watcher
from holdfast.workers import Workers
from tests import filestore
from tests import test_finding as values
from tests import test_seed_regressions as seeds
from tests.faults.clock import wall_clock
from tests.home import TEXT, Home, fail, strangers
from tests.test_retention import Clock, _connected
from tests.test_seed_regressions import DAY, SPOILS, seqs
from tests.test_undo import look
from tests.test_upkeep import spoil_blob

LAST = Retention(keep_last=1)
NEIGHBOURS = ("a", "t", "z")


def raw(session: holdfast.Session, count: int, size: int = 1_000) -> holdfast.Session:
    """Checkpoints that share nothing."""
    for i in range(count):
        session.save({"i": i, "raw": random.Random(f"{session.name} {i}").randbytes(size)})
    return session


def found(home: Home, **query: Any) -> list[int]:
    return seqs(home.store.find(**query))


@contextmanager
def logged() -> Iterator[list[str]]:
    """What is logged, warnings and worse."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("holdfast").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("holdfast").removeHandler(handler)


def together(*calls: Callable[[], Any]) -> None:
    """All at once, in threads; the first error is raised."""
    barrier = threading.Barrier(len(calls))
    errors: list[BaseException] = []

    def run(call: Callable[[], Any]) -> None:
        barrier.wait()
        try:
            call()
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


# -- ids are only ever names ---------------------------------------------------------------------


def test_row01_deleting_ids_that_are_paths(home: Home) -> None:
    victim = home.folder.parent / "victim.json"
    victim.write_text("mine")
    for name in ("../victim.json", str(victim), "a/../../victim.json", "."):
        session = home.store.session(name, agent=name)
        for i in range(4):
            session.save({"i": i}, label=name, tags=[name], key=f"{name}{i}")
        session.fork(f"{name}/../f").delete()
        session.delete(f"key:{name}1")
        session.prune(Retention(keep_last=1, keep_tagged=False, keep_labelled=False))
        session.delete()
        home.store.gc()
    assert victim.read_text() == "mine"
    assert strangers(home) == [victim]
    assert home.store.stats().sessions == 0


PATTERNS = ("*", "?", "a*", "a?b", "%", "a%", "_bc", "[a]_b", "b")


def test_row02_patterns_delete_nothing(home: Home) -> None:
    names = ("a_b", "abc")
    for name in names:
        home.filled(3, name, label=name, tags=[name], trigger=name)
    before = [look(home.store, name) for name in names]
    for pattern in PATTERNS:
        stranger = home.session(pattern)
        for call in (
            stranger.delete,
            stranger.undo,
            stranger.redo,
            lambda s=stranger: s.prune(LAST),
        ):
            with pytest.raises(SessionNotFound):
                call()
        for name in names:
            with pytest.raises(NotFound):
                home.session(name).delete(pattern)
    assert home.store.gc() == (0, 0, 0, 0)
    assert [look(home.store, name) for name in names] == before


def test_row02_patterns_find_nothing(home: Home) -> None:
    watchers = [Watcher(home.store.backend, pattern) for pattern in PATTERNS]
    for name in ("a_b", "abc"):
        session = home.store.session(name, agent=name)
        session.save({"said": name}, label=name, tags=[name], trigger=name, meta={name: name})
    for pattern in PATTERNS:
        for field in ("label", "tag", "trigger", "agent"):
            assert found(home, **{field: pattern}) == []
        assert found(home, meta={pattern: pattern}) == []
        assert list(home.store.sessions(agent=pattern)) == []
        if pattern != "b":
            assert found(home, text=pattern) == []
    assert [watcher.poll() for watcher in watchers] == [[]] * len(PATTERNS)


def test_row03_prefix_cleanup(home: Home) -> None:
    home.filled(3, "sess1")
    home.filled(3, "sess1_2")
    other = look(home.store, "sess1_2")
    watcher = Watcher(home.store.backend, "sess1_2")
    for name in ("sess", "sess1_"):
        with pytest.raises(SessionNotFound):
            home.session(name).delete()
    session = home.session("sess1")
    session.prune(LAST)
    session.delete()
    assert home.store.gc().sessions == 1
    assert [i.name for i in home.store.sessions()] == ["sess1_2"]
    assert look(home.store, "sess1_2") == other
    assert watcher.poll() == []
    home.session("sess1_2").delete()
    for name in ("sess1", "sess1_"):
        with pytest.raises(SessionNotFound):
            home.session(name).undo()
    home.session("sess1_2").undo()
    assert look(home.store, "sess1_2") == other


def test_row03_prefix_search(home: Home) -> None:
    for name in ("plan", "planner"):
        session = home.store.session(name, agent=name)
        session.save({}, label=name, tags=[name], trigger=name, key=name, meta={"by": name})
        session.save({})
    for field in ("agent", "label", "tag", "trigger"):
        assert {c.session for c in home.store.find(**{field: "plan"})} == {"plan"}  # type: ignore[arg-type]
        assert found(home, **{field: "pla"}) == []
    assert [c.session for c in home.store.find(meta={"by": "plan"})] == ["plan"]
    assert [i.name for i in home.store.sessions(agent="plan")] == ["plan"]
    for revision in ("key:plan", "label:plan", "plan"):
        with pytest.raises(CheckpointNotFound):
            home.session("planner").delete(revision)


def test_row04_latest_in_an_id_everywhere(home: Home) -> None:
    names = ["latest", "latest.json", "s", "s_latest"]
    watcher = Watcher(home.store.backend)
    for name in names:
        raw(home.store.session(name, agent="latest"), 3)
        home.session(name).save({"i": 3}, label="latest", tags=["latest"])
    assert sorted({e.session for e in watcher.poll()}) == names
    for query in ({}, {"agent": "latest"}, {"label": "latest"}, {"tag": "latest"}):
        assert sorted({c.session for c in home.store.find(**query)}) == names  # type: ignore[arg-type]
    assert [p.session for p in home.store.prune(LAST)] == names
    assert sorted(s.name for s in home.store.stats().largest) == names
    for name in names:
        home.session(name).delete()
        home.session(name).undo()
    home.store.gc()
    assert [(i.name, i.checkpoints) for i in home.store.sessions()] == [(n, 1) for n in names]


def test_row05_delete_takes_one_of_two(home: Home) -> None:
    session = home.session()
    state = {"log": [TEXT] * 20, "big": TEXT * 99}
    first, second = session.save(state), session.save(state)
    session.save({})
    session.delete(first)
    home.store.gc()
    for _ in range(2):
        with pytest.raises(CheckpointNotFound):
            session.load(first.id)
        assert session.load(second.id) == state
        assert seqs(session.tree()) == [2, 3]
        session = home.reopened().session("s")
    assert home.store.verify(read_data=True).ok


def test_row05_no_copy_of_a_deleted_one_loads(home: Home) -> None:
    session = home.session()
    first = session.save({"life": 1}, key="external", label="l", tags=["t"])
    session.save({"life": "head"})
    session.delete("key:external")
    for _ in range(2):
        for revision in ("key:external", "label:l", "tag:t", "l", first.id, first.id[:20]):
            with pytest.raises(CheckpointNotFound):
                session.load(revision)
        with pytest.raises(CheckpointNotFound):
            home.store.get(first.id)
        assert found(home) == [2]
        home.store.gc()
    session.save({"life": 2}, key="external")
    assert home.reopened().session("s").load("key:external") == {"life": 2}
    home.session().delete()
    session = home.session()
    session.save({"life": 3})
    assert seqs(session.tree()) == [1]
    session.delete()
    assert not home.reopened().session("s").exists()


# -- order ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["keep_last", "keep_every", "max_bytes", "store_bytes"])
def test_row06_prune_keeps_the_newest(home: Home, rule: str) -> None:
    """Ten saves within one tick of a clock that only knows seconds."""
    with wall_clock(math.floor):
        session = raw(home.session(), 10)
        assert found(home) == found(home, limit=10) == list(range(10, 0, -1))
        three = sum(c.added for c in session.tree() if c.seq > 7)
        value: Any = {"keep_last": 3, "keep_every": "hour"}.get(rule, three)
        home.store.prune(Retention(**{rule: value}))
    assert seqs(session.tree()) == ([10] if rule == "keep_every" else [8, 9, 10])
    assert home.reopened().session("s").load()["i"] == 9


def test_row07_clock_set_back_in_lists_and_rules(home: Home) -> None:
    session = home.session()
    for i, offset in enumerate((0.0, -400 * DAY, 0.0, -4000 * DAY, -DAY, -2 * DAY)):
        with wall_clock(offset.__add__):
            session.save({"i": i}, tags=["t"])
            session.label("@", f"l{i}")
    assert found(home) == found(home, tag="t") == [6, 5, 4, 3, 2, 1]
    assert [op.details["label"] for op in session.ops()] == [f"l{i}" for i in range(6)]
    for i in range(5, 3, -1):
        assert session.undo().details["what"] == "label"
        session.undo()
        assert session.load()["i"] == i - 1
    rule = Retention(keep_last=4, keep_tagged=False, keep_labelled=False)
    assert [v.checkpoint.seq for v in session.prune(rule).removed] == [1, 2]


def test_row07_undo_takes_the_newest_deletion(home: Home) -> None:
    """Also if the clock was set back since the one before."""
    for life, offset in enumerate((0.0, -DAY)):
        with wall_clock(offset.__add__):
            session = home.session()
            session.save({"life": life})
            session.delete()
    home.session().undo()
    assert home.session().load() == {"life": 1}


def test_row07_undo_takes_the_newest_deletion_of_any_process(sqlite: Home) -> None:
    """Also if that one took its numbers for new sessions before the other."""
    sqlite.session("any").save({})
    for life, store in enumerate((sqlite.another(), sqlite.store)):
        session = store.session("s")
        session.save({"life": life})
        session.delete()
    sqlite.session().undo()
    assert sqlite.session().load() == {"life": 1}


def test_row07_bytes_of_a_store_go_by_seq(home: Home) -> None:
    """Within a session the oldest are those saved first, whatever the clock said."""
    session = raw(home.session(), 5)
    session.rewind("@~4")
    with wall_clock((-DAY).__add__):
        raw(session, 3)
    total = sum(c.added for c in session.tree())
    [plan] = home.store.prune(Retention(store_bytes=total - 1_500), dry_run=True)
    assert [v.checkpoint.seq for v in plan.removed] == [1, 2]


def test_row13_a_late_redo_does_not_move_the_head(home: Home) -> None:
    session, other = home.filled(3), home.another().session("s")
    undone = session.get()
    session.undo()
    other.refresh()
    newest = other.save({"i": "newest"})
    with pytest.raises(InvalidRequest, match="nothing to redo"):
        session.redo()
    assert home.reopened().session("s").head == newest
    assert home.session().load(undone)["i"] == 2  # what was undone is not overwritten
    assert [c.step for c in home.session().tree()] == [1, 2, 3, 3]


def test_row13_a_late_save_after_an_operation(home: Home) -> None:
    for operation in ("undo", "delete"):
        session, late = home.filled(3, operation), home.another().session(operation)
        getattr(session, operation)()
        with pytest.raises(HeadMoved):
            late.save({"i": "late"})
    assert home.session("undo").load()["i"] == 1
    assert not home.session("delete").exists()


def test_row19_created_at_lives_on(home: Home) -> None:
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
    for listed in (store.find(), store.find(tag="t"), map(store.get, times)):
        with suppress(CheckpointNotFound):
            assert all(c.created_at == times[c.id] for c in listed)
    for n, c in enumerate(left):  # exact to the microsecond
        if n and left[n - 1].created_at < c.created_at:
            assert seqs(store.find(since=c.created_at))[::-1] == seqs(left[n:])
            assert seqs(store.find(until=c.created_at))[::-1] == seqs(left[:n])
    moments = [before, *(op.created_at for op in home.session().ops()), dt.datetime.now(dt.UTC)]
    assert moments == sorted(moments)
    assert any(time.microsecond for time in times.values())


def test_row23_steps_after_undo_gc_and_restart(home: Home) -> None:
    """Every time a step is lost by undo, and all but two checkpoints by retention."""
    taken: list[tuple[int, int]] = []
    for i in range(4):
        session = home.reopened().session("s")
        taken += [(c.step, c.seq) for c in (session.save({"i": i}), session.save({"undone": i}))]
        session.undo()
        session.prune(Retention(keep_last=2))
        home.store.gc()
    assert taken == [(1, 1), (2, 2), (2, 3), (3, 4), (3, 5), (4, 6), (4, 7), (5, 8)]
    numbers = [op.number for op in home.reopened().session("s").ops()]
    assert numbers == list(range(1, len(numbers) + 1))


def test_row23_retention_counts_across_restarts(sqlite: Home) -> None:
    """Processes that live for one save each: what is kept is bounded all the same."""
    sqlite.close()
    for i in range(60):
        with holdfast.open(
            sqlite.path, retention=Retention(keep_last=5), durability="normal"
        ) as store:
            store.session("s").save({"i": i})
    with holdfast.open(sqlite.path) as store:
        assert len(store.session("s")) < 5 + 20


# -- damage --------------------------------------------------------------------------------------


def test_row08_backups_share_no_name(sqlite: Home, tmp_path: Path) -> None:
    session = sqlite.session()
    for i in range(3):
        session.append("log", i)
        sqlite.store.backup(tmp_path / f"{i}.db")
    bytes_ = [(tmp_path / f"{i}.db").read_bytes() for i in range(3)]
    for i in range(3):
        with pytest.raises(InvalidRequest):
            sqlite.store.backup(tmp_path / f"{i}.db")
        assert (tmp_path / f"{i}.db").read_bytes() == bytes_[i]
        with holdfast.open(tmp_path / f"{i}.db", durability="normal") as copy:
            assert copy.session("s").load() == {"log": list(range(i + 1))}
            assert copy.session("s").save({}).step == i + 2


def test_row08_a_backup_is_read_back(sqlite: Home, tmp_path: Path) -> None:
    """One that a disk has spoiled is no backup, and nobody is told that it is."""
    sqlite.filled(30)
    real = sqlite_file.backup

    def spoiled(open_: Any, path: Path) -> None:
        real(open_, path)
        content = bytearray(path.read_bytes())
        content[len(content) // 2 :: 97] = bytes(len(content[len(content) // 2 :: 97]))
        path.write_bytes(content)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite_file, "backup", spoiled)
        with pytest.raises(Corrupt):
            sqlite.store.backup(tmp_path / "copy.db")
    assert strangers(sqlite) == []


@pytest.mark.parametrize("what", ["torn", "empty", "missing", "data"])
def test_row08_repair_falls_back(home: Home, what: str) -> None:
    session = home.session()
    for i in range(4):
        session.save({"i": i, "raw": random.Random(i).randbytes(6_000)})
    if what == "data":
        spoil_blob(home, 3)
    else:
        home.spoil_checkpoint(4, {"torn": b"torn", "empty": b"", "missing": None}[what])
    [done] = home.reopened().repair()
    assert done.moved == (4, 3)
    assert len(done.lost) == 1
    session = home.reopened().session("s")
    assert session.load()["i"] == 2
    assert session.save({"i": "goes on"}).step == 4


@pytest.mark.parametrize("body", [b"torn", None], ids=["torn", "missing"])
def test_row08_a_repaired_store_has_backups(
    sqlite: Home, tmp_path: Path, body: bytes | None
) -> None:
    """Damage that is told of and given up does not stand in the way of backups for ever."""
    session = sqlite.filled(5)
    lost = session.get("@~2").id
    sqlite.spoil_checkpoint(3, body)
    sqlite.store.repair()
    with suppress(CheckpointNotFound):
        session.delete(lost)
    sqlite.store.gc()
    assert sqlite.store.backup(tmp_path / "copy.db").ok


def test_row08_what_is_missing_is_told_of_once(home: Home) -> None:
    """Then it counts as freed, and its children say so."""
    session = home.filled(6)
    session.fork("f", "@~3")
    home.spoil_checkpoint(3, None)
    assert [done.lost for done in home.reopened().repair()] == [("3",)]
    assert home.store.repair() == []
    assert home.store.verify(read_data=True).ok
    session = home.session()
    for listed in (session.history(), list(session.tree())[::-1]):
        assert [(c.seq, c.pruned) for c in listed] == [(6, 0), (5, 0), (4, 1), (2, 0), (1, 0)]
    assert seqs(home.session("f").history()) == [1, 2, 1]
    session.save({"i": 6})
    session.undo()
    assert home.store.gc().checkpoints == 0


@pytest.mark.parametrize("what", ["torn", "mark"])
def test_row10_searches_tell_of_damaged_ones(home: Home, what: str) -> None:
    """Listed, or told of in the log; never just left out."""
    home.filled(4, tags=["t"], trigger="g")
    SPOILS["record" if what == "torn" else "mark"](home)
    gone = 2 if what == "torn" else 3
    queries: list[dict[str, Any]] = [{}, {"tag": "t"}, {"trigger": "g"}, {"text": "quick"}]
    for query in queries:
        with logged() as lines:
            listed = found(home, **query)
        assert set(listed) >= {1, 2, 3, 4} - {gone}
        assert gone in listed or any(f"checkpoint {gone}" in line for line in lines), query


@pytest.mark.parametrize("query", [{"status": "failed"}, {"tag": "t"}, {"agent": "x"}], ids=str)
def test_row10_filtered_lists_tell_of_damaged_sessions(home: Home, query: dict[str, Any]) -> None:
    for name in ("head", "row", "sound"):
        home.store.session(name, agent="x").save({}, status="failed", tags=["t"])
    home.spoil_checkpoint(1, name="head")
    home.spoil_session("row")
    with logged() as lines:
        listed = {info.name for info in home.store.sessions(**query)}
    assert "sound" in listed
    for name in ("head", "row"):
        assert name in listed or any(name in line for line in lines), name


def test_row10_damaged_ones_are_counted_and_kept(home: Home) -> None:
    session = home.filled(5)
    home.spoil_checkpoint(2)
    assert home.store.stats().checkpoints == 5
    plan = session.prune(LAST)
    assert {v.checkpoint.seq: v.reason.split(":")[0] for v in plan.kept} == {
        2: "damaged",
        5: "the head",
    }
    assert [c.seq for c in session.tree() if c.damaged] == [2]


def damaged_among_neighbours(home: Home, what: str) -> None:
    for name in NEIGHBOURS:
        home.filled(3, name)
    session = home.filled(3, "s", label="label")
    home.session("a").tag("@", "x")
    session.tag("@", "x")
    SPOILS[what](home)


def sound_neighbours(home: Home, count: int = 3) -> None:
    for name in NEIGHBOURS:
        session = home.session(name)
        assert [session.load(c)["i"] for c in session.tree()] == list(range(3))[-count:]
        assert session.verify().ok


@pytest.mark.parametrize("what", SPOILS)
def test_row11_searches_beside_damage(home: Home, what: str) -> None:
    damaged_among_neighbours(home, what)
    home.reopened()
    for query in ({}, {"text": "quick"}):
        listed = [(c.session, c.seq) for c in home.store.find(**query)]  # type: ignore[arg-type]
        assert {(n, q) for n in NEIGHBOURS for q in (1, 2, 3)} <= set(listed)
    assert ("a", 3) in [(c.session, c.seq) for c in home.store.find(tag="x")]
    assert {s.name for s in home.store.stats().largest} >= set(NEIGHBOURS)


@pytest.mark.parametrize("what", SPOILS)
def test_row11_prune_beside_damage(home: Home, what: str) -> None:
    damaged_among_neighbours(home, what)
    with suppress(Corrupt):  # told in the end, but the others are done
        home.reopened().prune(Retention(keep_last=1, keep_tagged=False))
    sound_neighbours(home, 1)
    for name in NEIGHBOURS:
        assert home.session(name).undo().details["what"] == "prune"


@pytest.mark.parametrize("what", SPOILS)
def test_row11_gc_and_repair_beside_damage(home: Home, what: str) -> None:
    damaged_among_neighbours(home, what)
    home.session("a").delete("@~1")
    home.session("a").undo()
    with suppress(Corrupt):
        home.reopened().gc()
    sound_neighbours(home)
    assert {done.session for done in home.store.repair()}.isdisjoint(NEIGHBOURS)
    sound_neighbours(home)
    assert home.session("a").undo().details["what"] == "tag"


@pytest.mark.parametrize("what", ["operation", "name", "record", "head"])
def test_row11_watching_beside_damage(home: Home, what: str) -> None:
    """What landed elsewhere is told, and told once."""
    sessions = [home.filled(2, name) for name in ("a", "s", "z")]
    watcher = Watcher(home.store.backend)
    if what == "name":
        home.spoil_name()
    saved = [session.save({"i": "new"}) for session in sessions]
    if what == "operation":
        sessions[1].tag("@", "x")
        spoil_operation(home, 1)
    elif what != "name":
        SPOILS[what](home)
    told: list[Any] = []
    for _ in range(2):
        with suppress(Corrupt):
            told += watcher.poll()
    assert [e for e in told if e.session in ("a", "z")] == [saved[0], saved[2]]


def spoil_operation(home: Home, number: int) -> None:
    at = home._number("s")
    if isinstance(home.store.backend, MemoryBackend):
        home.store.backend._operations[at][number] = b"torn"
    elif isinstance(home.store.backend, FilesBackend):
        filestore.edit_log(home.store.backend, at, lambda e: filestore.spoil_operation(e, number))
    else:
        home._sql("UPDATE operations SET body = ? WHERE pos = ?", b"torn", at << 32 | number)


def test_row11_a_torn_operation_hides_no_other(home: Home) -> None:
    session = home.filled(3)
    for tag in "abcd":
        session.tag("@", tag)
    spoil_operation(home, 2)
    session = home.reopened().session("s")
    assert not home.store.verify().ok
    assert session.undo().details["undid"] == ["operation", 4]
    assert {op.number for op in session.ops()} >= {1, 3, 4, 5}
    session.save({"i": 3})
    session.undo()
    assert session.load()["i"] == 2


def test_row11_undo_after_a_torn_operation(home: Home) -> None:
    """Nobody knows what it did; repair() lets undo() begin anew."""
    session = home.filled(3)
    session.tag("@", "a")
    spoil_operation(home, 1)
    session = home.reopened().session("s")
    session.save({"i": 3})
    [damaged] = session.ops()
    assert (damaged.kind, damaged.details["damage"][:11]) == ("damaged", "operation 1")
    assert damaged.summary
    assert damaged.way_back
    for call in (session.undo, session.redo):
        with pytest.raises(Corrupt, match="operation 1"):
            call()
    [done] = home.store.repair()
    assert (done.moved, done.rebuilt, done.lost) == (None, ("undo",), ())
    assert home.store.repair() == []
    session.refresh()
    session.save({"i": 4})
    session.undo()
    assert session.load()["i"] == 3
    assert session.undo().details["what"] == "repair"
    assert session.load()["i"] == 3
    with pytest.raises(Corrupt, match="operation 1"):
        session.undo()


@pytest.mark.parametrize("body", [b"", b"torn", None], ids=["empty", "torn", "missing"])
def test_row12_an_empty_pointer_is_repaired(home: Home, body: bytes | None) -> None:
    home.filled(3)
    home.spoil_head(body)
    [done] = home.reopened().repair()
    assert (done.moved, done.lost) == ((0, 3), ())
    session = home.reopened().session("s")
    assert session.load()["i"] == 2
    assert session.save({"i": 3}).step == 4
    session.undo()
    assert session.load()["i"] == 2
    assert home.store.verify().ok


def test_row12_a_backup_is_synced_before_it_has_its_name(sqlite: Home, tmp_path: Path) -> None:
    done: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        sync, link = disk.sync, os.link

        def note_sync(path: Path) -> None:
            sync(path)
            done.append("folder" if path == tmp_path else "file")

        def note_link(old: Any, new: Any) -> None:
            link(old, new)
            done.append("name")

        patch.setattr(disk, "sync", note_sync)
        patch.setattr(os, "link", note_link)
        sqlite.filled(2)
        sqlite.store.backup(tmp_path / "copy.db")
    assert done == ["file", "name", "folder"]


def test_row14_all_agree_on_what_is_there(home: Home) -> None:
    session = home.filled(3, tags=["t"])
    ids = [c.id for c in session.tree()]

    def agree(*, there: bool) -> None:
        session = home.reopened().session("s")
        head = session.head
        lists = (session.tree(), session.history(), home.store.find(), home.store.find(tag="t"))
        assert [len(list(listed)) for listed in lists] == [3 * there] * 4
        assert (session.exists(), len(session), head is not None) == (there, 3 * there, there)
        assert [i.name for i in home.store.sessions()] == ["s"] * there
        assert home.store.stats()[:2] == (int(there), 3 * there)
        for id in ids:
            for get in (session.load, home.store.get):
                try:
                    get(id)
                    assert there
                except NotFound:
                    assert not there

    agree(there=True)
    for operation, there in (("delete", False), ("undo", True), ("redo", False)):
        getattr(home.session(), operation)()
        agree(there=there)
    home.store.gc()
    agree(there=False)


def test_row14_what_is_freed_is_not_damaged(home: Home) -> None:
    """And what is damaged is not taken for freed."""
    session = home.filled(6)
    session.delete("@~3")
    home.store.gc()
    session = home.reopened().session("s")
    assert [(c.seq, c.pruned, c.damaged) for c in session.history("@~2")] == [
        (4, 1, None),
        (2, 0, None),
        (1, 0, None),
    ]
    assert home.store.verify().ok
    home.spoil_checkpoint(4, None)
    assert [c.seq for c in home.reopened().session("s").tree() if c.damaged] == [4]
    assert not home.store.verify().ok


INDEXES = [
    "sqlite_autoindex_sessions_1",
    "sqlite_autoindex_checkpoints_1",
    "sqlite_autoindex_blobs_1",
    "marks_by_value",
    "forks",
    "gaps_by_ancestor",
]


def tear_index(home: Home, name: str) -> None:
    session = home.filled(6, label="l")
    session.fork("f", "@~1")
    session.delete("@~3")
    home.store.gc()
    home.close()
    connection = apsw.Connection(str(home.path))
    page: Any = connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = ?", (name,)).get
    size = connection.pragma("page_size")
    connection.close()
    with open(home.path, "r+b") as file:
        file.seek((page - 1) * size)
        file.write(bytes(size))
    home.store = home._open()


@pytest.mark.parametrize("name", INDEXES)
def test_row15_a_torn_index_is_rebuilt(sqlite: Home, name: str) -> None:
    tear_index(sqlite, name)
    assert not sqlite.store.verify().ok
    sqlite.store.repair()
    assert sqlite.store.verify().ok
    session = sqlite.reopened().session("s")
    assert session.save({"i": 6, "big": TEXT * 99}, label="l").step == 7
    assert session.load("l")["i"] == 6
    assert seqs(session.history("@~1")) == [6, 5, 4, 2, 1]


def test_drafts_are_for_their_owner_alone(
    sqlite: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of repairs, backups and new stores, and what SQLite puts beside them."""
    tear_index(sqlite, "sqlite_autoindex_checkpoints_1")
    modes: list[int] = []
    real = Path.unlink

    def unlink(path: Path, **more: Any) -> None:
        if path.exists():
            modes.append(path.stat().st_mode & 0o777)
        real(path, **more)

    monkeypatch.setattr(Path, "unlink", unlink)
    before = os.umask(0)
    try:
        sqlite.store.repair()
        assert modes
        sqlite.store.backup(tmp_path / "copy.db")
        holdfast.open(tmp_path / "new.db").close()
    finally:
        os.umask(before)
    assert len(modes) >= 3
    assert {*modes} == {0o600}


def test_row17_a_backup_touches_no_other_file(sqlite: Home, tmp_path: Path) -> None:
    """Whether it is made or refused: what lies beside it is somebody's."""
    sqlite.filled(2)
    for suffix in ("-wal", "-shm"):
        (tmp_path / f"copy.db{suffix}").write_bytes(b"mine")
    with suppress(InvalidRequest):
        sqlite.store.backup(tmp_path / "copy.db")
    for suffix in ("-wal", "-shm"):
        assert (tmp_path / f"copy.db{suffix}").read_bytes() == b"mine"


# -- failures are told ---------------------------------------------------------------------------

ACTS: dict[str, tuple[str, Callable[[Home], Any]]] = {
    # by what is done: the part of the store that fails (of one in memory, all does)
    "undo": ("heads", lambda home: home.session().undo()),
    "undo, logged": ("operations", lambda home: home.session().undo()),
    "redo": ("operations", lambda home: home.session("redone").redo()),
    "tag": ("marks", lambda home: home.session().tag("@", "new")),
    "tag, found": ("facets", lambda home: home.session().tag("@", "new")),
    "label": ("marks", lambda home: home.session().label("@", "new")),
    "delete": ("tombs", lambda home: home.session().delete("@~1")),
    "delete session": ("sessions", lambda home: home.session().delete()),
    "prune": ("tombs", lambda home: home.session().prune(LAST)),
    "prune store": ("tombs", lambda home: home.store.prune(LAST)),
    "fork": ("sessions", lambda home: home.session().fork("f")),
    "fork, named": ("names", lambda home: home.session().fork("f")),
}


@pytest.mark.parametrize("kind", ACTS)
def test_row09_no_operation_is_acknowledged_in_part(home: Home, kind: str) -> None:
    table, act = ACTS[kind]
    home.filled(4)
    home.filled(2, "redone").undo()
    names = ("s", "redone", "f")
    before = [look(home.store, name) for name in names]
    ops = home.session().ops()
    with home.failing(table), pytest.raises(HoldfastError):
        act(home)
    for store in (home.store, home.another()):
        assert [look(store, name) for name in names] == before
        assert store.session("s").ops() == ops
        assert [c.seq for c in store.find(tag="new")] == []
    act(home)
    assert [look(home.reopened(), name) for name in names] != before
    assert home.store.verify().ok


@pytest.mark.parametrize("part", ["sweep", "trim", "compact"])
def test_row09_a_failed_gc_is_an_error(home: Home, part: str) -> None:
    session = raw(home.session(), 6, 6_000)
    session.prune(Retention(keep_last=3))
    before = look(home.store, "s")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(home.store.backend, part, fail)
        with pytest.raises(Unavailable):
            home.store.gc()
    assert look(home.reopened(), "s") == before
    home.store.gc()
    assert home.store.stats().deleted == 0
    assert home.store.verify(read_data=True).ok
    assert home.store.gc() == (0, 0, 0, 0)


@pytest.mark.parametrize("why", ["taken", "failing"])
def test_row09_one_of_a_group_fails_alone(sqlite: Home, why: str) -> None:
    """Saves of many threads share a commit; each is told what became of its own."""
    sessions = [sqlite.session(f"s{n}") for n in range(6)]
    for n, session in enumerate(sessions):
        session.save({"begun": n}, key="k")
    backend = sqlite.store.backend
    assert isinstance(backend, SqliteBackend)
    outcomes: dict[int, Any] = {}

    def save(n: int) -> None:
        try:
            wrong: Any = {} if n != 3 else {"key": "k"} if why == "taken" else {"label": "l"}
            outcomes[n] = sessions[n].save({"by": n}, **wrong).id
        except HoldfastError as e:
            outcomes[n] = type(e)

    threads = [threading.Thread(target=save, args=(n,)) for n in range(6)]
    with sqlite.failing("marks") if why == "failing" else nullcontext():
        backend._group.lock.acquire()
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 30
        while len(backend._group._waiting) < 6 and time.monotonic() < deadline:
            time.sleep(0.001)
        backend._group.lock.release()
        backend._group.wake()
        for thread in threads:
            thread.join()
    failed = outcomes.pop(3)
    assert isinstance(failed, type), "it was acknowledged"
    assert why == "failing" or failed is KeyTaken
    store = sqlite.reopened()
    for n, id in outcomes.items():
        assert store.session(f"s{n}").get().id == id
        assert store.session(f"s{n}").load() == {"by": n}
    assert len(store.session("s3")) == 1
    assert store.verify().ok


def test_row31_an_error_while_reading_changes_nothing(home: Home) -> None:
    session = home.filled(4)
    session.undo()
    before = look(home.store, "s")
    calls: list[Callable[[], Any]] = [
        session.undo,
        session.redo,
        session.delete,
        lambda: session.delete("@~1"),
        lambda: session.prune(LAST),
        lambda: session.fork("f"),
        lambda: home.store.prune(LAST),
        lambda: list(home.store.find()),
        home.store.gc,
        home.store.stats,
    ]
    for call in calls:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(home.store.backend, "reader", fail)
            with pytest.raises(Unavailable):
                call()
        assert look(home.store, "s") == before
    assert not home.session("f").exists()


def test_row31_gc_of_a_damaged_one_makes_no_root(home: Home) -> None:
    """Its child knows who came before it, and so does gc."""
    session = home.filled(6)
    lost = session.get("@~3").id
    home.spoil_checkpoint(3)
    session = home.reopened().session("s")
    session.delete(lost)
    before = [(c.seq, c.pruned) for c in session.history()]
    assert before == [(6, 0), (5, 0), (4, 1), (2, 0), (1, 0)]
    assert home.store.gc().checkpoints == 1
    assert [(c.seq, c.pruned) for c in home.reopened().session("s").history()] == before


@pytest.mark.parametrize("part", ["clean_up", "collect", "damage"])
def test_row32_a_failed_clean_up_fails_no_save(home: Home, part: str) -> None:
    home.filled(3, "other")
    with pytest.MonkeyPatch.context() as patch, logged() as lines:
        patch.setattr(tidying, "_ENOUGH", 1)
        if part == "clean_up":
            patch.setattr(holdfast.Session, "clean_up", fail)
        elif part == "collect":
            patch.setattr(tidying, "collect", fail)
        else:
            home.spoil_checkpoint(2, name="other")
        home.store.retention = Retention(keep_last=2)
        session = home.session()
        saves: list[Callable[[int], Any]] = [
            lambda i: session.save({"i": i, "log": []}),
            lambda i: session.patch(set={"i": i}),
            lambda i: session.append("log", i),
        ]
        for i in range(48):
            saved = saves[i % 3](i)
            assert home.another().session("s").head == saved
            assert saved.step == i + 1
            if home.store.tidier is not None:
                home.store.tidier.wait()
    what = f"cleaning up after a save of session {'s'!r}" if part == "clean_up" else "freeing what"
    assert [line.startswith(what) for line in lines] == [True] * 3


def test_row32_an_awaited_save_with_a_failed_clean_up() -> None:
    async def work() -> None:
        async with holdfast.aopen("memory:", retention=Retention(keep_last=2)) as store:
            session = await store.session("s")
            for i in range(20):
                assert (await session.save({"i": i})).step == i + 1
            assert await session.load() == {"i": 19}

    with pytest.MonkeyPatch.context() as patch, logged() as lines:
        patch.setattr(holdfast.Session, "clean_up", fail)
        asyncio.run(work())
    assert len(lines) == 1


@pytest.mark.parametrize("kind", ["undo", "redo"])
def test_row32_what_is_done_does_not_fail(home: Home, kind: str) -> None:
    """An undo that is reported as failed would be tried again, and take back one more."""
    session = home.filled(4)
    if kind == "redo":
        session.undo()
    backend, done = home.store.backend, list[int]()
    commit, reader = backend.commit, backend.reader

    def committed(change: Any) -> None:
        commit(change)
        done.append(1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "commit", committed)
        patch.setattr(backend, "reader", lambda: fail() if done else reader())
        with suppress(Unavailable):
            assert getattr(session, kind)().kind == kind
            done.clear()
        assert not done, "it was done, and reported as failed"
    assert session.load()["i"] == {"undo": 2, "redo": 3}[kind]


def test_row33_deleting_what_is_missing(home: Home) -> None:
    none = home.session("none")
    for call in (none.delete, none.undo, none.redo, lambda: none.prune(LAST)):
        with pytest.raises(SessionNotFound):
            call()
    session = home.filled(3)
    gone = session.get("@~1")
    session.delete(gone)
    for revision in (gone, gone.id, "label:no", "key:no", "@~9", "step:2", "0" * 24):
        with pytest.raises(CheckpointNotFound):
            session.delete(revision)
    home.store.gc()
    with pytest.raises(CheckpointNotFound):
        session.delete(gone)
    session.delete()
    for _ in range(2):
        with pytest.raises(SessionNotFound):
            session.delete()
        home.store.gc()
    assert home.store.gc() == (0, 0, 0, 0)


def test_row33_emptied_sessions_are_not_listed(home: Home) -> None:
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock(patch)
        for name in ("deleted", "old", "pruned"):
            home.filled(3, name)
        home.session("deleted").delete()
        clock.wait(40 * DAY)
        home.session("old").prune(Retention(session_ttl="30d"))
        home.store.prune(Retention(session_ttl="30d"))
        for _ in range(2):
            assert list(home.reopened().sessions()) == list(home.store.find()) == []
            assert (home.store.stats().sessions, home.store.stats().largest) == (0, ())
            home.store.gc()
            clock.wait(2 * DAY)


def test_row33_a_session_whose_last_checkpoint_is_freed(home: Home) -> None:
    session = home.session()
    first = session.save({"i": 1})
    session.undo()
    session.delete(first)
    home.store.gc()
    assert list(home.reopened().sessions()) == []
    assert not home.session().exists()


def test_row33_a_repeated_label_is_found_newest_first(home: Home) -> None:
    session = home.session()
    for i in range(4):
        session.save({"i": i}, label="plan")
    session.save({"i": "head"})
    assert found(home, label="plan") == [4, 3, 2, 1]
    for left in (3, 2, 1):
        session.delete("label:plan")
        assert session.get("plan").seq == left
        home.store.gc()
        session = home.reopened().session("s")
        assert found(home, label="plan") == list(range(left, 0, -1))


# -- many writers --------------------------------------------------------------------------------

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


def test_row16_a_cleaner_in_another_process_erases_nothing(sqlite: Home) -> None:
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
    assert len(found(sqlite, tag="t")) == len(states)
    assert sqlite.session("cleaner").load()["i"] == 11
    assert sqlite.store.verify(read_data=True).ok


def test_row24_concurrent_saves_beside_a_cleaner(home: Home) -> None:
    home.store.retention = Retention(keep_last=5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tidying, "_SLACK", 3)
        patch.setattr(tidying, "_ENOUGH", 8)
        won = seeds.race(home, writers=8, saves=6)
    home.store.gc()
    session = home.reopened().session("s")
    assert len(won) == len(set(won)) == 48
    assert session.step == 48
    assert len(session) < 48
    assert {c.id for c in session.tree()} <= set(won)
    assert list(session.history()) == list(session.tree())[::-1]
    _connected(home.store)
    assert home.store.verify(read_data=True).ok


def test_row24_two_cleaners_at_once(home: Home) -> None:
    """What one has chosen to delete, another has deleted and freed meanwhile."""
    session, other = raw(home.session(), 10), home.another().session("s")
    backend, rule, raced = home.store.backend, Retention(keep_last=3), list[int]()
    commit = backend.commit

    def race(change: Any) -> None:
        if not raced:
            raced.append(1)
            other.clean_up(rule)
            assert home.another().gc().checkpoints == 7
        commit(change)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "commit", race)
        session.clean_up(rule)
    session = home.reopened().session("s")
    assert seqs(session.tree()) == [8, 9, 10]
    assert len(session) == 3
    assert home.store.stats()[:3] == (1, 3, 0)
    assert home.store.gc() == (0, 0, 0, 0)
    assert home.store.verify().ok


def test_row24_concurrent_undos_take_back_one_each(home: Home) -> None:
    home.filled(12)
    handles = [store.session("s") for store in [home.store, home.another()] * 4]
    together(*[handle.undo for handle in handles])
    session = home.reopened().session("s")
    assert session.load()["i"] == 3
    undone = sorted(op.details["undid"][1] for op in session.ops())
    assert undone == list(range(5, 13))


def test_row24_concurrent_marks_are_all_kept(home: Home) -> None:
    home.filled(1)
    handles = [store.session("s") for store in [home.store, home.another()] * 4]
    together(*[lambda n=n, h=h: h.tag("@", f"t{n}") for n, h in enumerate(handles)])
    session = home.reopened().session("s")
    assert session.get().tags == tuple(f"t{n}" for n in range(8))
    assert [op.number for op in session.ops()] == list(range(1, 9))
    for n in range(8):
        assert found(home, tag=f"t{n}") == [1]


def test_row24_concurrent_awaited_saves_are_one_line(home: Home) -> None:
    async def work() -> list[str]:
        async with holdfast.aopen(home.url, durability="normal", **home.options) as store:
            if not home.durable:
                store.sync.backend = home.store.backend

            async def save(n: int) -> str:
                session = await store.session("s")
                while True:
                    await asyncio.sleep(0)
                    with suppress(HeadMoved):
                        return (await session.save({"by": n})).id
                    await session.refresh()

            return await asyncio.gather(*map(save, range(8)))

    won = asyncio.run(work())
    if not home.durable:
        home.store.backend._closed = False  # type: ignore[attr-defined]
    session = home.reopened().session("s")
    assert {c.id for c in session.history()} == set(won)
    assert [c.step for c in session.history()] == list(range(8, 0, -1))
    assert sorted(session.load(id)["by"] for id in won) == list(range(8))


def test_row21_another_agent_loses_nothing(home: Home) -> None:
    one, two = home.store.session("one", agent="planner"), home.store.session("two", agent="coder")
    for session in (one, two):
        for i in range(4):
            session.save({"of": session.name}, key=f"id-{i}", label="l", tags=["t"])
    home.store.session("one", agent="coder").save({"of": "one, by another"})
    before = look(home.store, "two")
    assert [(c.session, c.seq) for c in home.store.find(agent="coder", tag="t")] == [
        ("two", n) for n in (4, 3, 2, 1)
    ]
    one.refresh()
    one.delete("key:id-1")
    one.prune(Retention(keep_last=1, keep_tagged=False, keep_labelled=False))
    home.store.gc()
    assert look(home.store, "two") == before
    assert two.load("key:id-1") == {"of": "two"}
    assert min((c.session, c.seq) for c in home.store.find(agent="coder")) == ("one", 5)
    one.delete()
    home.store.gc()
    assert look(home.reopened(), "two") == before
    assert list(home.store.find(agent="planner")) == []


# -- trees ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["session", "store", "itself"])
def test_row25_retention_keeps_what_is_marked_and_connected(home: Home, by: str) -> None:
    session = home.filled(16)
    marked = [session.label("@~13", "l"), session.tag("@~11", "t"), session.get("@~9")]
    session.fork("f", marked[2])
    rule = Retention(keep_last=2)
    if by == "session":
        session.prune(rule)
    elif by == "store":
        home.store.prune(rule)
    else:
        home.store.retention = rule
        for i in range(16):
            session.save({"i": i})
    for _ in range(2):
        left = list(home.session().tree())
        assert seqs(left) == [3, 5, 7, left[-1].seq - 1, left[-1].seq]
        assert {c.id for c in marked} <= {c.id for c in left}
        assert [c.pruned for c in left] == [2, 1, 1, left[-1].seq - 9, 0]
        assert home.session().load("label:l")["i"] == 2
        assert seqs(home.session().history()) == seqs(left)[::-1]
        _connected(home.store)
        home.store.gc()
        home.reopened()
    assert home.store.verify(read_data=True).ok


def test_row26_gc_keeps_the_future(home: Home) -> None:
    session = home.filled(6)
    future = list(session.history())
    session.rewind("@~4")
    home.store.gc()
    home.store.prune(Retention(keep_last=6))
    session.undo()
    assert home.reopened().session("s").head == future[0]
    session = home.session()
    for _ in range(4):
        session.undo()
    home.store.gc()
    for checkpoint in future:
        assert home.session().load(checkpoint)["i"] == checkpoint.seq - 1
    for _ in range(4):
        home.session().redo()
    assert home.session().head == future[0]


def test_row26_gc_that_stops_half_way(home: Home) -> None:
    """What goes, goes in steps that each leave a sound store; the next run goes on."""
    session = raw(home.session(), 12)
    session.fork("f", "@~6")
    session.prune(Retention(keep_last=2))
    before, fork = look(home.store, "s"), look(home.store, "f")
    backend = home.store.backend
    sweep, swept = backend.sweep, list[int]()

    def stop(what: Any) -> list[bool]:
        if len(swept) == 2:
            raise Unavailable("injected")
        swept.append(1)
        return sweep(what)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(freeing, "BATCH", 2)
        patch.setattr(backend, "sweep", stop)
        with pytest.raises(Unavailable):
            home.store.gc()
    assert home.store.stats().deleted == 5
    assert (look(home.reopened(), "s"), look(home.store, "f")) == (before, fork)
    _connected(home.store)
    assert home.store.verify(read_data=True).ok
    with pytest.raises(InvalidRequest, match="freed"):
        home.session().undo()
    assert home.store.gc().checkpoints == 5
    _connected(home.store)


def test_row27_a_fork_outlives_its_origin(home: Home) -> None:
    origin = home.filled(4)
    fork = origin.fork("f", "@~1")
    fork.append("log", "mine")
    point = origin.get("@~1").id
    for _ in range(2):
        origin.delete()
        home.store.gc()
        fork = home.reopened().session("f")
        assert fork.load()["log"][-1] == "mine"
        assert [(c.session, c.step, c.pruned) for c in fork.history()] == [("f", 5, 0), ("f", 4, 3)]
        first = next(iter(fork.tree()))
        assert (first.parent, first.parent_session, first.ancestor) == (point, "s", None)
        origin = home.filled(3)  # another of that name is not taken for it
        assert seqs(fork.history()) == [2, 1]
        assert home.store.verify(read_data=True).ok


def test_row27_a_fork_onto_the_name_of_a_deleted_one(home: Home) -> None:
    """Neither of the two lives is appended to the other."""
    home.filled(3)
    home.session().delete()
    fork = home.filled(2, "other").fork("s")
    assert len(fork) == 1
    with pytest.raises(SessionExists):
        home.session("other").fork("s")
    assert fork.load()["i"] == 1
    home.session().undo()  # of the fork
    assert not home.session().exists()
    assert [i.name for i in home.store.sessions()] == ["other"]


# -- nothing is dropped on the way ---------------------------------------------------------------


def test_row28_every_field_lives_on(home: Home) -> None:
    """Through asyncio and telemetry, undo and redo, gc, a search and a restart."""
    telemetry.instrument(home.store, TracerProvider(), MeterProvider())
    store = holdfast.AsyncStore(home.store, Workers(1))
    home.store.session("s").save({"log": []})

    async def work() -> list[holdfast.Checkpoint]:
        session = await store.session("s")
        return [
            await session.save({"log": [1]}, **seeds.FIELDS, key="k0"),
            await session.append("log", 2, **seeds.FIELDS, key="k1"),
            await session.patch(set={"x": 1}, **seeds.FIELDS, key="k2"),
        ]

    saved = asyncio.run(work())
    session = home.session()
    for _ in range(2):
        session.undo()
    session.redo()
    session.redo()
    session.prune(Retention(keep_last=2))
    home.store.gc()
    store_ = home.reopened()
    queries: list[dict[str, Any]] = [
        {"label": "plan ready"}, {"tag": "a"}, {"tag": "b"}, {"trigger": "manual"},
        {"status": "failed"}, {"meta": {"user": "u1"}},
    ]  # fmt: skip
    for query in queries:
        assert list(store_.find(**query)) == saved[::-1]
        assert [i.head for i in store_.sessions(**query)] == saved[2:]
        for n, c in enumerate(reversed(list(store_.find(**query)))):
            assert {name: getattr(c, name) for name in seeds.PLAIN_FIELDS} == seeds.PLAIN_FIELDS
            assert (c.tags, c.key) == (("a", "b"), f"k{n}")


def test_row18_undo_of_one_mark_keeps_the_others(home: Home) -> None:
    session = home.session()
    saved = session.save({"i": 1}, **seeds.FIELDS)
    session.tag(saved, "c")
    session.label(saved, "renamed")
    session.tag(saved, "d", "a")
    session.undo()
    assert session.get().tags == ("a", "b", "c")  # "a" was there before
    session.undo()
    assert (session.get().label, session.get().tags) == ("plan ready", ("a", "b", "c"))
    session.undo()
    kept = home.reopened().session("s").get()
    assert {name: getattr(kept, name) for name in seeds.PLAIN_FIELDS} == seeds.PLAIN_FIELDS
    assert kept.tags == ("a", "b")
    assert (found(home, label="renamed"), found(home, tag="c")) == ([], [])
    assert found(home, label="plan ready") == found(home, tag="a") == [1]


def test_row18_gc_leaves_data_compressed(home: Home) -> None:
    session = home.session()
    log = [{"n": n, "text": f"{n} {TEXT}"} for n in range(300)]
    session.save({"log": log})
    session.save({"log": log[200:]})
    session.delete("@~1")
    assert home.store.gc().rows > 0
    assert session.load() == {"log": log[200:]}
    stats = home.store.stats()
    # Files are for people to read: nothing is compressed there, and what is dead is gone.
    most = session.get().size * (1.3 if home.kind == "files" else 0.2)
    assert stats.bytes["items"] + stats.bytes["blobs"] < most


def test_row29_nan_lives_on(home: Home) -> None:
    session = home.session()
    state = {"loss": math.nan, "log": [math.inf, math.nan, "needle"], "text": TEXT * 99}
    for _ in range(6):
        session.save(state)
    session.undo()
    session.redo()
    session.prune(Retention(keep_last=3))
    home.store.gc()
    home.spoil_head()
    assert home.store.repair()[0].lost == ()
    home.reopened()
    assert found(home, text="needle") == [6, 5, 4]
    for checkpoint in home.session().tree():
        loaded = home.session().load(checkpoint)
        assert math.isnan(loaded["loss"])
        assert math.isnan(loaded["log"][1])


RULES: dict[str, Any] = {
    "keep_last": 3, "keep_every": 7, "max_age": "10h", "max_bytes": 5_000, "session_ttl": "20h",
    "store_bytes": 9_000,
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("by_itself", [False, True], ids=["asked", "by itself"])
def test_row30_every_rule_is_read(home: Home, name: str, by_itself: bool) -> None:
    rule = Retention(**{name: RULES[name]})
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock(patch)
        patch.setattr(tidying, "_SLACK", 2)
        patch.setattr(tidying, "_EXPIRY", 0)
        raw(home.session("idle"), 4)
        if by_itself and name == "store_bytes":
            with pytest.raises(InvalidRequest):
                holdfast.open("memory:", retention=rule)
            return
        if by_itself:
            home.store.retention = rule
        for i in range(32):
            clock.wait(3_600)
            raw(home.session(), 1)
            assert home.session().step == i + 1
            if home.store.tidier is not None:
                home.store.tidier.wait()  # one under way is not started a second time
        if not by_itself:
            assert len(home.session()) == 32
            home.store.prune(rule)
        home.store.retention = None  # waits for what is under way
    kept = [c.seq for c in home.session().tree()]
    if name == "session_ttl":
        assert [i.name for i in home.store.sessions()] == ["s"]
        return
    everything = {
        "keep_last": [30, 31, 32],
        "keep_every": [7, 14, 21, 28, 32],
        "max_age": list(range(22, 33)),
        "max_bytes": [29, 30, 31, 32],
        "store_bytes": list(range(26, 33)),  # and the head of the idle one
    }
    assert kept == everything[name]


@pytest.mark.parametrize("mark", ["tagged", "labelled"])
def test_row30_marks_protect_only_if_told(home: Home, mark: str) -> None:
    fields: Any = {"tags": ["t"]} if mark == "tagged" else {"label": "l"}
    session = home.filled(4, **fields)
    assert session.prune(LAST).removed == ()
    options: dict[str, Any] = {f"keep_{mark}": False}
    rule = Retention(keep_last=1, **options)
    assert [v.checkpoint.seq for v in session.prune(rule).removed] == [1, 2, 3]


def test_row22_keep_every(home: Home) -> None:
    for every in (0, -1, True, 1.0, "never"):
        with pytest.raises(InvalidRequest):
            Retention(keep_every=every)  # type: ignore[arg-type]
    session = home.filled(10)
    session.prune(Retention(keep_every=3))
    assert [c.step for c in session.tree()] == [3, 6, 9, 10]


def test_row34_operations_cost_little(home: Home) -> None:
    """Neither what is undone and redone, nor what is forked, tagged or pruned, is written again."""
    session = home.session()
    rng = random.Random(1)
    for n in range(20):
        session.patch(append={"log": [rng.randbytes(100).hex() for _ in range(50)]}, set={"n": n})

    def size() -> int:
        return sum(home.store.stats().bytes.values())

    state, before = session.get().size, size()
    for n in range(30):
        session.undo()
        session.redo()
        session.rewind("@~1")
        session.undo()
        session.tag("@", f"t{n}")
        session.fork(f"f{n}", "@~1")
        session.delete("@~1")
        session.undo()
    assert size() - before < 30 * state / 20
    session.prune(Retention(keep_last=10))
    assert size() - before < 30 * state / 20


# -- one meaning everywhere ----------------------------------------------------------------------


def transcript(home: Home) -> list[Any]:
    """A life with history, in words that do not depend on ids or times."""
    said: list[Any] = []
    session = home.store.session("s", agent="x")
    watcher = Watcher(home.store.backend)

    def attempt(call: Callable[[], Any]) -> None:
        try:
            done = call()
            if isinstance(done, holdfast.Operation):
                done = (done.kind, done.number, done.details)
            elif isinstance(done, holdfast.Plan):
                done = [v[1:] for v in done.verdicts]
            said.append(done)
        except HoldfastError as e:
            said.append(type(e).__name__)

    def tell() -> None:
        for name in ("s", "f", "g"):
            session = home.session(name)
            said.extend(
                [(c.session, c.seq, c.step, c.pruned, c.tags) for c in listed]
                for listed in (session.tree(), session.history())
            )
            said.append((session.exists(), session.step, len(session)))
        queries: list[dict[str, Any]] = [
            {}, {"agent": "x"}, {"tag": "t"}, {"label": "l3"}, {"status": "failed"},
            {"text": "quick"}, {"tag": "t", "limit": 2}, {"trigger": "g"},
        ]  # fmt: skip
        for query in queries:
            said.append([(c.session, c.seq) for c in home.store.find(**query)])
            query.pop("limit", None)
            if "text" not in query:
                said.append([i.name for i in home.store.sessions(**query)])
        stats = home.store.stats()
        rows = stats.rows | {"items": stats.rows["items"] > 0}  # plain files pack none together
        said.append((stats[:3], stats.states, [s[:2] for s in stats.largest], rows))
        said.append([(type(e).__name__, e.session) for e in watcher.poll()])

    for i in range(8):
        session.save(
            {"i": i, "log": [TEXT] * i}, label=f"l{i}", tags=["t"] * (i % 2), trigger="g",
            status="failed" if i % 3 else "completed",
        )  # fmt: skip
    acts: list[Callable[[], Any]] = [
        session.undo, session.undo, session.redo, lambda: session.delete("@~2"),
        lambda: session.delete("@"), lambda: session.delete("l4"), session.undo,
        lambda: len(session.fork("f", "@~3")), lambda: session.prune(LAST, dry_run=True),
        lambda: session.prune(Retention(keep_last=2, keep_labelled=False)), home.store.gc,
        session.undo, lambda: session.rewind("@~1").seq, session.redo, session.undo,
        lambda: home.session("f").undo(), lambda: home.session("f").redo(),
        lambda: len(home.session("f").fork("g")), lambda: home.session("f").delete(),
        home.store.gc, lambda: home.session("f").undo(), home.store.repair,
        lambda: session.save({"i": "end"}).step, session.delete, session.undo, session.redo,
        lambda: home.store.gc()[:2],
    ]  # fmt: skip
    for act in acts:
        attempt(act)
        tell()
    return said


def test_row20_one_meaning_of_history(tmp_path: Path) -> None:
    told = {}
    for kind in ("memory", "sqlite", "files", "postgres"):
        home = Home(kind, tmp_path / kind)
        told[kind] = transcript(home)
        home.give_back()
    assert told["memory"] == told["sqlite"] == told["files"] == told["postgres"]
    assert len(told["memory"]) > 500


# -- tests that can fail -------------------------------------------------------------------------
# Each protection switched off, and the test that must notice.

Patch = pytest.MonkeyPatch


def paths_are_followed(patch: Patch) -> None:
    real = MemoryBackend._sweep

    def sweep(self: Any, what: Any) -> None:
        real(self, what)
        named = Path(os.fsdecode((what.remove or b"")[9:]))
        if named.is_absolute():
            named.unlink(missing_ok=True)

    patch.setattr(MemoryBackend, "_sweep", sweep)


def search_by(match: Callable[[str, str], bool]) -> Callable[[Patch], None]:
    """Searches whose index and filters take more than what is equal."""

    def mutant(patch: Patch) -> None:
        def facets(self: Any, kind: int, value: bytes, low: bytes, high: bytes, n: int) -> Any:
            held = [v for (k, name), v in self._facets.items() if k == kind]
            return sorted({id for ids in held for id in ids if low <= id < high}, reverse=True)[:n]

        def matches(self: Any, c: Any) -> bool:
            pairs = [(getattr(self, n), getattr(c, n)) for n in ("agent", "trigger", "label")]
            pairs += [(self.tag, tag) for tag in c.tags or [None]]
            return all(a is None or (b is not None and match(b, a)) for a, b in pairs)

        patch.setattr(MemoryBackend, "find_facets", facets)
        patch.setattr(finding.Query, "matches", matches)

    mutant.__name__ = match.__name__
    return mutant


def everything_is_refuse(patch: Patch) -> None:
    patch.setattr(Live, "mark", lambda *args: None)


def deleted_ones_load(patch: Patch) -> None:
    patch.setattr("holdfast.revisions.is_buried", lambda *args: False)


def deleted_sessions_are_listed(patch: Patch) -> None:
    patch.setattr(records, "former_name", lambda *args: None)


def newest_is_oldest(patch: Patch) -> None:
    real = retaining._all
    patch.setattr(retaining, "_all", lambda *args: reversed(list(real(*args))))


def redo_is_never_over(patch: Patch) -> None:
    def redoable(self: Any, ref: Any) -> int | None:
        rows = self._reader.operations(self._number, 1, 1 << 31)
        return rows[-1][0] if rows else None

    patch.setattr(operations.Log, "redoable", redoable)


def no_repair(patch: Patch) -> None:
    patch.setattr(storing, "repair", lambda backend: [])


def no_gaps(patch: Patch) -> None:
    patch.setattr(freeing.Tree, "_new_gap", lambda *args: None)


def gc_errors_are_swallowed(patch: Patch) -> None:
    def swallow(backend: Any, progress: Any = None) -> Any:
        with suppress(Unavailable):
            return collect.collect(backend, progress)

    patch.setattr(storing, "collect", swallow)


def members_are_told_nothing(patch: Patch) -> None:
    patch.setattr(Member, "finish", lambda self, error=None: setattr(self, "done", True))


def clean_up_is_part_of_the_save(patch: Patch) -> None:
    def tidy(self: Any, session: Any, seq: int) -> None:
        session.clean_up(self.rule)
        self._collect()

    patch.setattr(tidying.Tidier, "after_save", tidy)


def missing_is_fine(patch: Patch) -> None:
    real = holdfast.Session.delete

    def delete(self: Any, revision: Any = None) -> Any:
        with suppress(NotFound):
            return real(self, revision)

    patch.setattr(holdfast.Session, "delete", delete)


def oldest_first(patch: Patch) -> None:
    real = MemoryBackend.find_facets
    patch.setattr(MemoryBackend, "find_facets", lambda *args: real(*args)[::-1])


def no_filters(patch: Patch) -> None:
    patch.setattr(finding.Query, "matches", lambda self, c: True)


def marks_protect_nothing(patch: Patch) -> None:
    real = retaining._verdict

    def verdict(c: Any, head: Any, forks: Any, chosen: Any, rule: Any, now: Any) -> Any:
        bare = holdfast.Checkpoint(c.session, c._record, None, ())
        return real(bare, head, forks, chosen, rule, now)._replace(checkpoint=c)

    patch.setattr(retaining, "_verdict", verdict)


def marks_always_protect(patch: Patch) -> None:
    real = retaining._verdict

    def verdict(c: Any, *args: Any) -> Any:
        found = real(c, *args)
        return found._replace(keep=True) if c.tags or c.label else found

    patch.setattr(retaining, "_verdict", verdict)


def rules_are_not_read(patch: Patch) -> None:
    def plan(reader: Any, session: int, name: str, head: Any, rule: Any) -> Any:
        return real(reader, session, name, head, Retention(keep_last=1 << 20))

    real = retaining.plan
    patch.setattr(retaining, "plan", plan)
    patch.setattr(storing, "within_store", lambda plans, limit: plans)


def origin_by_name(patch: Patch) -> None:
    def origin(reader: Any, place: Any, record: Any) -> Any:
        named = reader.session(record.extra["origin"].encode())
        return lineage.Place(named[0], record.parent_seq) if named else None

    patch.setattr(lineage, "origin", origin)


def fork_copies(patch: Patch) -> None:
    def fork(self: Any, name: str, at: Any = None) -> Any:
        other = self.store.session(name)
        other.save(self.load(at))
        return other

    patch.setattr(holdfast.Session, "fork", fork)


def one_mark_takes_all(patch: Patch) -> None:
    real = MemoryBackend._apply_notes

    def apply(self: Any, notes: Any, session: int, checkpoint: Any) -> None:
        for seq, _, _ in notes.unmarks:
            for mark in [m for m in self._marks[session] if m[0] == seq]:
                del self._marks[session][mark]
        real(self, notes, session, checkpoint)

    patch.setattr(MemoryBackend, "_apply_notes", apply)


def every_step(patch: Patch) -> None:
    patch.setattr(retaining, "_every", lambda found, every: {c.seq: "all" for c in found})


def backups_share_a_name(patch: Patch) -> None:
    real = sqlite_file.backup

    def backup(open_: Any, path: Path) -> None:
        path.unlink(missing_ok=True)
        real(open_, path)

    patch.setattr(sqlite_file, "backup", backup)


def backups_are_not_read(patch: Patch) -> None:
    report = holdfast.Report((), 0, 0, 0)
    patch.setattr(holdfast.Store, "verify", lambda *args, **more: report)


def backups_are_not_synced(patch: Patch) -> None:
    def backup(open_: Any, path: Path) -> None:
        source = open_()
        source.execute("VACUUM INTO ?", (str(path),))
        source.close()
        copy = apsw.Connection(str(path))
        copy.pragma("journal_mode", "wal")
        copy.close()

    patch.setattr(sqlite_file, "backup", backup)


def deletions_by_the_clock(patch: Patch) -> None:
    patch.setattr(operations, "_deletes", lambda *args: False)


def deletions_by_number(patch: Patch) -> None:
    patch.setattr(operations, "_deletion", lambda reader, number: (number, 0))


def store_bytes_by_the_clock(patch: Patch) -> None:
    def by_time(verdicts: Any) -> Any:
        return [(v.checkpoint._record.created_us, v) for v in verdicts]

    patch.setattr(retaining, "_in_order", by_time)


def nothing_is_given_up(patch: Patch) -> None:
    patch.setattr(repair, "_give_up", lambda *args: None)


def damaged_marks_do_not_match(patch: Patch) -> None:
    patch.setattr(finding.Query, "may_match", lambda self, c: False)


def damaged_sessions_do_not_match(patch: Patch) -> None:
    real = storing._may_match
    patch.setattr(storing, "_may_match", lambda info, *more: not info.damaged and real(info, *more))


def prune_stops_at_damage(patch: Patch) -> None:
    patch.setattr(storing, "_leaving_alone", nullcontext)


def flags_are_not_checked(patch: Patch) -> None:
    patch.setattr(live, "_flags", lambda begin: begin[8])


def operations_must_be_sound(patch: Patch) -> None:
    def read(session: int, name: str, number: int, body: bytes) -> Any:
        kind, created, last, details = records.unseal_operation(session, number, body)
        return last, holdfast.Operation(name, number, kind, created, details)

    patch.setattr(lineage, "read_operation", read)


def names_must_be_sound(patch: Patch) -> None:
    patch.setattr(records, "shown_name", records.decode_name)


def undo_stays_stuck(patch: Patch) -> None:
    patch.setattr(repair, "_is_stuck", lambda *args: False)


def torn_indexes_stay(patch: Patch) -> None:
    patch.setattr(sqlite_indexes, "is_sound", lambda *args: True)


def old_trees_stay(patch: Patch) -> None:
    patch.setattr(sqlite_indexes, "_give_back", lambda *args: None)


def backups_look_at_their_own_name_only(patch: Patch) -> None:
    patch.setattr(os.path, "lexists", lambda path: False)


MUTANTS: list[tuple[Any, ...]] = [
    (paths_are_followed, test_row01_deleting_ids_that_are_paths),
    (seeds.ids_by_part, test_row02_patterns_delete_nothing),
    (search_by(fnmatch.fnmatch), test_row02_patterns_find_nothing),
    (seeds.ids_by_prefix, test_row03_prefix_cleanup),
    (search_by(str.startswith), test_row03_prefix_search),
    (seeds.lists_without_latest, test_row04_latest_in_an_id_everywhere),
    (everything_is_refuse, test_row05_delete_takes_one_of_two),
    (deleted_ones_load, test_row05_no_copy_of_a_deleted_one_loads),
    (newest_is_oldest, test_row06_prune_keeps_the_newest, "keep_last"),
    (newest_is_oldest, test_row06_prune_keeps_the_newest, "keep_every"),
    (newest_is_oldest, test_row06_prune_keeps_the_newest, "max_bytes"),
    (seeds.ids_by_the_clock, test_row07_clock_set_back_in_lists_and_rules),
    (deletions_by_the_clock, test_row07_undo_takes_the_newest_deletion),
    (deletions_by_number, test_row07_undo_takes_the_newest_deletion_of_any_process),
    (store_bytes_by_the_clock, test_row07_bytes_of_a_store_go_by_seq),
    (backups_share_a_name, test_row08_backups_share_no_name),
    (backups_are_not_read, test_row08_a_backup_is_read_back),
    (no_repair, test_row08_repair_falls_back, "torn"),
    (seeds.damage_stops(freeing), test_row08_a_repaired_store_has_backups, b"torn"),
    (nothing_is_given_up, test_row08_a_repaired_store_has_backups, None),
    (nothing_is_given_up, test_row08_what_is_missing_is_told_of_once),
    *[(seeds.errors_are_swallowed, test_row09_no_operation_is_acknowledged_in_part, k)
      for k in ACTS],
    (gc_errors_are_swallowed, test_row09_a_failed_gc_is_an_error, "sweep"),
    (members_are_told_nothing, test_row09_one_of_a_group_fails_alone, "taken"),
    (members_are_told_nothing, test_row09_one_of_a_group_fails_alone, "failing"),
    (seeds.damage_stops(finding), test_row10_searches_tell_of_damaged_ones, "torn"),
    (damaged_marks_do_not_match, test_row10_searches_tell_of_damaged_ones, "mark"),
    *[(damaged_sessions_do_not_match, test_row10_filtered_lists_tell_of_damaged_sessions, q)
      for q in ({"status": "failed"}, {"tag": "t"}, {"agent": "x"})],
    (seeds.damaged_ones_vanish, test_row10_damaged_ones_are_counted_and_kept),
    (seeds.damage_stops(finding), test_row11_searches_beside_damage, "record"),
    *[(prune_stops_at_damage, test_row11_prune_beside_damage, what)
      for what in ("head", "missing head", "name")],
    (seeds.damage_stops(repair), test_row11_gc_and_repair_beside_damage, "record"),
    (flags_are_not_checked, test_row11_gc_and_repair_beside_damage, "item"),
    (seeds.damage_stops(watching), test_row11_watching_beside_damage, "head"),
    (operations_must_be_sound, test_row11_watching_beside_damage, "operation"),
    (names_must_be_sound, test_row11_watching_beside_damage, "name"),
    (operations_must_be_sound, test_row11_a_torn_operation_hides_no_other),
    (undo_stays_stuck, test_row11_undo_after_a_torn_operation),
    (no_repair, test_row12_an_empty_pointer_is_repaired, b""),
    (backups_are_not_synced, test_row12_a_backup_is_synced_before_it_has_its_name),
    (redo_is_never_over, test_row13_a_late_redo_does_not_move_the_head),
    (seeds.no_compare_and_swap, test_row13_a_late_save_after_an_operation),
    (deleted_sessions_are_listed, test_row14_all_agree_on_what_is_there),
    (no_gaps, test_row14_what_is_freed_is_not_damaged),
    (torn_indexes_stay, test_row15_a_torn_index_is_rebuilt, "forks"),
    (old_trees_stay, test_row15_a_torn_index_is_rebuilt, "sqlite_autoindex_checkpoints_1"),
    (backups_look_at_their_own_name_only, test_row17_a_backup_touches_no_other_file),
    (one_mark_takes_all, test_row18_undo_of_one_mark_keeps_the_others),
    (seeds.no_compression, test_row18_gc_leaves_data_compressed),
    (seeds.time_in_seconds, test_row19_created_at_lives_on),
    (oldest_first, test_row20_one_meaning_of_history),
    (no_filters, test_row21_another_agent_loses_nothing),
    (every_step, test_row22_keep_every),
    (seeds.steps_in_memory, test_row23_steps_after_undo_gc_and_restart),
    (seeds.no_compare_and_swap, test_row24_concurrent_saves_beside_a_cleaner),
    (seeds.no_compare_and_swap, test_row24_concurrent_undos_take_back_one_each),
    (seeds.no_compare_and_swap, test_row24_concurrent_marks_are_all_kept),
    (seeds.no_compare_and_swap, test_row24_concurrent_awaited_saves_are_one_line),
    (marks_protect_nothing, test_row25_retention_keeps_what_is_marked_and_connected, "itself"),
    (no_gaps, test_row25_retention_keeps_what_is_marked_and_connected, "session"),
    (seeds.rewind_destroys, test_row26_gc_keeps_the_future),
    (no_gaps, test_row26_gc_that_stops_half_way),
    (origin_by_name, test_row27_a_fork_outlives_its_origin),
    (fork_copies, test_row27_a_fork_onto_the_name_of_a_deleted_one),
    (seeds.fields_are_dropped, test_row28_every_field_lives_on),
    (seeds.nan_does_not_load, test_row29_nan_lives_on),
    *[(rules_are_not_read, test_row30_every_rule_is_read, r, b) for r in RULES for b in (0, 1)
      if (r, b) != ("store_bytes", 1)],
    (marks_always_protect, test_row30_marks_protect_only_if_told, "tagged"),
    (marks_always_protect, test_row30_marks_protect_only_if_told, "labelled"),
    (gc_errors_are_swallowed, test_row31_an_error_while_reading_changes_nothing),
    (clean_up_is_part_of_the_save, test_row32_a_failed_clean_up_fails_no_save, "clean_up"),
    (clean_up_is_part_of_the_save, test_row32_a_failed_clean_up_fails_no_save, "collect"),
    (clean_up_is_part_of_the_save, test_row32_a_failed_clean_up_fails_no_save, "damage"),
    (clean_up_is_part_of_the_save, test_row32_an_awaited_save_with_a_failed_clean_up),
    (missing_is_fine, test_row33_deleting_what_is_missing),
    (deleted_sessions_are_listed, test_row33_emptied_sessions_are_not_listed),
    (oldest_first, test_row33_a_repeated_label_is_found_newest_first),
    (fork_copies, test_row34_operations_cost_little),
    *[(search_by(str.startswith), values.test_hostile_values, field)
      for field in ("tag", "label", "trigger")],
    (seeds.names_are_normalized, values.test_hostile_values_can_be_taken_away),
]  # fmt: skip


@pytest.mark.parametrize(
    "case", MUTANTS, ids=lambda c: "-".join([c[0].__name__, c[1].__name__[5:10], *map(str, c[2:])])
)
def test_row36_every_test_of_history_can_fail(case: Any, tmp_path: Path) -> None:
    mutant, test, *arguments = case
    seeds.carry_out(test, tmp_path / "sound", arguments)
    with pytest.MonkeyPatch.context() as patch:
        mutant(patch)
        with pytest.raises((Exception, pytest.fail.Exception)):
            seeds.carry_out(test, tmp_path / "mutant", arguments)
