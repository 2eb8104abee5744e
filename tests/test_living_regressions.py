"""Defects of undo, retention, gc, searches and repair that were found once."""

from __future__ import annotations

import datetime as dt
import os
import random
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import apsw
import pytest

import holdfast
from holdfast import Retention, freeing
from holdfast.backends import disk
from holdfast.backends.base import Sweep
from holdfast.codec import records
from holdfast.errors import HoldfastError, InvalidRequest, Unavailable
from holdfast.operations import Operator
from tests.faults.clock import wall_clock
from tests.home import Home, strangers
from tests.test_upkeep import spoil_backups

DAY = 86_400


def test_prune_of_the_store_races_with_a_rewind(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Store.prune() plans first and carries out later without looking again: it buries the head."""
    session = home.filled(5)
    first = next(iter(session.tree()))
    carry_out = Operator.carry_out

    def race(self: Operator, plan: Any, rule: Any) -> None:
        session.rewind(first)
        carry_out(self, plan, rule)

    monkeypatch.setattr(Operator, "carry_out", race)
    home.store.prune(Retention(keep_last=2))
    home.store.gc()
    assert session.load()["i"] == 0
    assert home.store.verify(read_data=True).ok


@pytest.mark.parametrize("mark", ["tag", "label", "fork"])
def test_prune_of_the_store_races_with_marks(
    home: Home, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = home.filled(5)
    first = next(iter(session.tree()))
    carry_out = Operator.carry_out

    def race(self: Operator, plan: Any, rule: Any) -> None:
        if mark == "fork" and not home.session("f").exists():
            session.fork("f", first)
        elif mark != "fork":
            getattr(session, mark)(first, "x")
        carry_out(self, plan, rule)

    monkeypatch.setattr(Operator, "carry_out", race)
    home.store.prune(Retention(keep_last=2))
    assert first.id in [c.id for c in session.tree()]


def test_repair_of_an_empty_head_row(home: Home) -> None:
    """Hangs on SQLite: an empty row is taken for a missing one, INSERT OR IGNORE does nothing."""
    home.filled(2)
    home.spoil_head(b"")
    assert home.store.repair()
    assert home.session().load()["i"] == 1


def test_pages_of_an_agent_go_on_when_the_last_is_freed(home: Home) -> None:
    session = home.store.session("s", agent="x")
    for i in range(6):
        session.save({"i": i})
    page = list(home.store.find(agent="x", limit=3))
    session.rewind("@~5")
    session.delete(page[-1])
    home.store.gc()
    with pytest.raises(holdfast.CheckpointNotFound):  # said, not begun anew
        list(home.store.find(agent="x", limit=3, before=page[-1].id))


def test_a_damaged_item_hides_what_is_sound(sqlite: Home) -> None:
    """_Text marks a whole extent as looked at before it has been."""
    session = sqlite.session()
    items = [f"{i} {random.Random(i).randbytes(300).hex()}" for i in range(120)]
    items[110] += " needle"
    session.save({"log": items[:40]})
    session.save({"log": items[:80]})
    whole = session.save({"log": items})
    end = session.save({"log": items[90:]})
    session.rewind(whole)
    session.append("log", "more")
    sqlite._sql("UPDATE items SET body = ? WHERE pos = (SELECT min(pos) FROM items)", b"torn")
    assert session.load(end)["log"][20].endswith("needle")
    assert [c.seq for c in sqlite.store.find(text="needle")] == [4]


def test_stats_with_a_deleted_session(home: Home) -> None:
    """Tombs of deleted sessions are taken from the count of the others."""
    home.filled(5)
    other = home.filled(3, "other")
    other.delete("@~1")
    other.delete()
    stats = home.store.stats()
    assert (stats.sessions, stats.checkpoints, stats.deleted) == (1, 5, 3)


def test_undo_and_redo_keep_the_hold_of_a_session(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The redo's own details have no "hold", and gc looks at the newest operation."""
    session = home.filled(2)
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now + 3_650 * DAY * 10**9)
    session.prune(Retention(session_ttl="30d"))
    assert home.store.gc().sessions == 0
    session.undo()
    session.redo()
    assert home.store.gc().sessions == 0
    session.undo()
    assert session.load()["i"] == 1


def test_held_sessions_are_counted(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    session = home.filled(2)
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now + 3_650 * DAY * 10**9)
    session.prune(Retention(session_ttl="30d"))
    assert home.store.gc().held == 2


def test_automatic_retention_refuses_what_it_does_not_do() -> None:
    with pytest.raises(InvalidRequest):
        holdfast.open("memory:", retention=Retention(store_bytes=2_000))


def test_store_bytes_of_one_session(home: Home) -> None:
    """Neither does session.prune(): it should apply or be refused, not be silently ignored."""
    session = home.session()
    for i in range(10):
        session.save({"raw": random.Random(i).randbytes(1_000)})
    with pytest.raises(InvalidRequest):
        session.prune(Retention(store_bytes=2_000), dry_run=True)


def test_undo_takes_the_newest_deletion(sqlite: Home) -> None:
    """Numbers come in blocks per process: the highest is not the newest."""
    other = sqlite.another()
    sqlite.session("first").save(1)  # takes a block
    other.session("second").save(1)  # takes the next
    older = other.session("x")
    older.save({"older": 1})
    older.delete()
    newer = sqlite.session("x")
    newer.save({"newer": 1})
    newer.delete()
    newer.undo()
    assert newer.load() == {"newer": 1}


def test_a_missing_record_is_named_as_lost(home: Home) -> None:
    home.filled(4)
    home.spoil_checkpoint(4, None)
    [done] = home.store.repair()
    assert done.moved == (4, 3)
    assert len(done.lost) == 1


def test_a_far_future(home: Home) -> None:
    """Memory: OverflowError. SQLite: "the store is damaged"."""
    home.filled(1)
    assert list(home.store.find(since=dt.datetime.max.replace(tzinfo=dt.UTC))) == []


@pytest.mark.parametrize("query", [{"after": 5}, {"after": b"x"}, {"agent": 5}, {"agent": ""}])
def test_sessions_of_the_wrong_type(home: Home, query: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        list(home.store.sessions(**query))


def test_the_reason_for_one(home: Home) -> None:
    """1 == True, so Retention.__str__ leaves out keep_last=1."""
    plan = home.filled(2).prune(Retention(keep_last=1), dry_run=True)
    assert plan.verdicts[0].reason == "not kept by keep_last=1"


def test_a_backup_that_does_not_verify_leaves_nothing(
    sqlite: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy's -wal and -shm stay."""
    sqlite.filled(3)
    spoil_backups(monkeypatch)
    with pytest.raises(HoldfastError):
        sqlite.store.backup(tmp_path / "copy.db")
    assert strangers(sqlite) == []


def test_a_good_backup_is_one_file(sqlite: Home, tmp_path: Path) -> None:
    sqlite.filled(3)
    sqlite.store.backup(tmp_path / "copy.db")
    assert strangers(sqlite) == [tmp_path / "copy.db"]


def test_a_folder_that_cannot_be_synced(
    sqlite: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unavailable is raised, but the copy is there."""
    sqlite.filled(3)
    sync = disk.sync

    def fail(path: Path) -> None:
        if path == tmp_path:
            raise OSError("injected")
        sync(path)

    monkeypatch.setattr(disk, "sync", fail)
    with pytest.raises(Unavailable):
        sqlite.store.backup(tmp_path / "copy.db")
    assert strangers(sqlite) == []


def test_meta_of_nested_types(home: Home) -> None:
    """Types count at the top ({"n": 1} is not {"n": True}), but not below."""
    home.session().save(1, meta={"n": [1]})
    assert list(home.store.find(meta={"n": [True]})) == []


# -- clean-ups, gc and others at once --------------------------------------------------------------


@pytest.mark.parametrize("what", ["rewind", "tag", "label", "undo", "fork"])
def test_what_was_planned_before_a_clean_up(
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
    backend, raced = home.store.backend, list[int]()
    commit = backend.commit

    def race(change: Any) -> None:
        if not raced:
            raced.append(1)
            other.clean_up(Retention(keep_last=1))
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


def test_a_head_without_record_is_told_of(home: Home) -> None:
    home.filled(3)
    number = home._number("s")
    with home.store.backend.reader() as reader:
        row = reader.head(number)
        sweep = Sweep(number, row or b"", [], [], [], [(3, reader.checkpoint(number, 3)[0])])  # type: ignore[index]
        sweep.gaps = [(number, 0, None, records.seal_freed(number, [(3, 4)]))]
    assert home.store.backend.sweep([sweep]) == [True]
    assert not home.store.verify().ok


@pytest.mark.parametrize("then", ["fork", "close"])
def test_fork_and_close_wait_for_readers_that_write(sqlite: Home, then: str) -> None:
    backend = sqlite.store.backend
    inside, go, failed = threading.Event(), threading.Event(), list[BaseException]()

    def read_and_write() -> None:
        try:
            with backend.reader():
                inside.set()
                go.wait(20)
                time.sleep(0.05)  # by now the other one waits
                backend.reserve("stream", 1)
        except InvalidRequest as e:
            failed.append(e)

    thread = threading.Thread(target=read_and_write, daemon=True)
    thread.start()
    assert inside.wait(20)
    go.set()
    if then == "close":
        sqlite.store.close()
    elif (child := os.fork()) == 0:
        os._exit(0)
    else:
        os.waitpid(child, 0)
    thread.join(20)
    assert not thread.is_alive()
    assert not failed or then == "close"


def test_an_interrupt_leaves_no_lock_behind(sqlite: Home) -> None:
    class Interrupt(BaseException):
        pass

    def interrupt(*_: Any) -> None:
        raise Interrupt

    session = sqlite.session()
    rng, interrupts = random.Random(1), 0
    patience, _ = signal.getitimer(signal.ITIMER_REAL)  # of the test runner
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        while interrupts < 150:
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(5e-5, 1e-3))
                while True:
                    session.save({"n": interrupts})
            except Interrupt:
                interrupts += 1
                session.refresh()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, patience)
    sqlite.session("another").save({})
    assert sqlite.store.verify(read_data=True).ok


def test_gc_waits_for_no_reader(sqlite: Home) -> None:
    """The log cannot be cut while somebody reads; so that is left to a later time."""
    session = sqlite.filled(30)
    session.prune(Retention(keep_last=1))
    with holdfast.open(sqlite.path, timeout=60) as other, sqlite.store.backend.reader() as reader:
        reader.session(b"s")
        thread = threading.Thread(target=other.gc, daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive()
    assert len(session) == 1


def test_progress_may_use_the_store(home: Home) -> None:
    home.filled(9).prune(Retention(keep_last=1))
    log = home.session("log")

    def progress(phase: str, done: int, total: int) -> None:
        log.append("told", [phase, done, total])

    home.store.gc(progress)
    assert {told[0] for told in log.load()["told"]} >= {"checkpoints", "reading"}


def test_big_checkpoints_are_freed_too(sqlite: Home) -> None:
    sqlite.store.retention = Retention(keep_last=2)
    session = sqlite.session()
    for i in range(600):
        session.save({"raw": random.Random(i).randbytes(30_000)})
    assert sqlite.store.tidier is not None
    sqlite.store.tidier.wait()
    with sqlite.store.backend.reader() as reader:
        assert reader.count_checkpoints() < 400


@pytest.mark.parametrize("what", ["head", "tomb"])
def test_gc_beside_a_damaged_session(sqlite: Home, what: str) -> None:
    sqlite.filled(6).prune(Retention(keep_last=2))
    sqlite.filled(6, "other").prune(Retention(keep_last=2))
    if what == "head":
        sqlite.spoil_head(b"torn")
    else:
        sqlite._sql("UPDATE tombs SET body = ? WHERE pos = (SELECT min(pos) FROM tombs)", b"torn")
    assert sqlite.store.gc().checkpoints == (4 if what == "head" else 7)
    sqlite.store.repair()
    sqlite.store.gc()
    assert len(sqlite.session("other")) == 2
    assert sqlite.session().load()["i"] == 5


def test_expiry_that_comes_too_late_leaves_no_operation(home: Home) -> None:
    session, other = home.filled(2), home.another().session("s")
    carry_out = Operator.carry_out

    def race(self: Operator, plan: Any, rule: Any) -> None:
        if not other.ops() and len(other) == 2:
            other.save({"i": "new"})
        carry_out(self, plan, rule)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Operator, "carry_out", race)
        with wall_clock(lambda true: true + 100 * DAY):
            home.store.prune(Retention(session_ttl="30d"))
    assert session.ops() == []
    assert home.reopened().session("s").load() == {"i": "new"}


def test_one_session_in_motion_holds_up_no_other(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "ab":
        home.filled(9, name).prune(Retention(keep_last=1))
    monkeypatch.setattr(freeing, "BATCH", 2)
    backend, busy = home.store.backend, home.another().session("a")
    sweep, raced = backend.sweep, list[int]()

    def race(sweeps: Any) -> Any:
        if not raced:
            raced.append(1)
            busy.append("log", "x")
        return sweep(sweeps)

    monkeypatch.setattr(backend, "sweep", race)
    assert home.store.gc().checkpoints == 16


def test_a_handle_of_a_session_that_gc_removed(home: Home) -> None:
    session = home.session()
    first = session.save({"i": 1})
    session.undo()
    session.delete(first)
    home.store.gc()
    assert session.save({"i": 2}).step == 1
    assert home.reopened().session("s").load() == {"i": 2}


def test_a_damaged_table_of_names_is_told_of(sqlite: Home) -> None:
    sqlite.filled(2)
    sqlite._sql("UPDATE names SET hash = hash + 1")
    with pytest.raises(holdfast.Corrupt):
        sqlite.session()
    assert not sqlite.store.verify().ok
    sqlite.store.repair()
    assert sqlite.store.verify().ok
    assert sqlite.session().load()["i"] == 1


def test_an_id_whose_type_is_damaged(sqlite: Home) -> None:
    """As when a page is cut off: SQLite then hands out NULL where there can be none."""
    sqlite.filled(3, tags=["t"])
    schema = "UPDATE sqlite_schema SET sql = replace(sql, ?, ?) WHERE name = 'checkpoints'"
    for change in (("id BLOB NOT NULL", "id BLOB"), ("id BLOB", "id BLOB NOT NULL")):
        connection = apsw.Connection(str(sqlite.path))
        connection.pragma("writable_schema", True)
        connection.execute(schema, change)
        connection.close()
        if change[1] == "id BLOB":
            sqlite._sql("UPDATE checkpoints SET id = NULL WHERE pos & 3 = 2")
    session = sqlite.reopened().session("s")
    report = sqlite.store.verify(read_data=True)
    assert any("checkpoint 2" in str(problem) for problem in report.problems)
    assert [c.seq for c in session.tree() if c.damaged is None] == [1, 3]
    assert session.load()["i"] == 2


def test_the_name_of_a_table_is_damaged_in_type(sqlite: Home) -> None:
    sqlite.filled(1)
    sqlite.close()
    connection = apsw.Connection(str(sqlite.path))
    connection.pragma("writable_schema", True)
    connection.execute("UPDATE sqlite_schema SET name = CAST(name AS BLOB) WHERE name = 'forks'")
    connection.close()
    with pytest.raises(holdfast.Corrupt, match="forks"):
        sqlite.reopened()
