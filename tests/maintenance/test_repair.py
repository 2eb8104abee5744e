"""Backups, numbers, and repair: they tell the truth, and leave a store that works."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import apsw
import pytest

import holdfast
from holdfast import Retention, ids
from holdfast.errors import (
    CheckpointNotFound,
    Corrupt,
    HoldfastError,
    InvalidRequest,
    KeyTaken,
    Unavailable,
)
from holdfast.maintenance import repair
from holdfast.storage import fs
from holdfast.storage.files.backend import FilesBackend
from holdfast.storage.memory import MemoryBackend
from holdfast.storage.sqlite import salvage, schema
from tests.mutants import maintenance
from tests.support import file_damage as filestore
from tests.support import memory_rows
from tests.support.sessions import seqs
from tests.support.stores import Home, strangers


def dump(path: Path) -> dict[str, list[Any]]:
    """All rows of a store, but for the counters, of which every process takes its share."""
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    try:
        names = [
            name
            for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")
            if not name.startswith("sqlite") and name != "counters"
        ]
        return {n: connection.execute(f"SELECT * FROM {n} ORDER BY 1, 2").fetchall() for n in names}
    finally:
        connection.close()


# -- backup ----------------------------------------------------------------------------------------


def test_a_backup_is_the_store(sqlite: Home, tmp_path: Path) -> None:
    session = sqlite.filled(5, label="l", tags=["t"], trigger="g", key=None)
    session.delete("@~1")
    session.fork("f").save({"own": 1})
    session.undo()
    report = sqlite.store.backup(tmp_path / "copy.db")
    assert report.ok
    assert (report.sessions, report.checkpoints) == (2, 7)
    assert dump(tmp_path / "copy.db") == dump(sqlite.path)
    assert (tmp_path / "copy.db").stat().st_mode & 0o777 == 0o600
    with holdfast.open(tmp_path / "copy.db", durability="normal") as copy:
        assert copy.session("s").load() == session.load()
        assert copy.session("s").save({"goes": "on"}).step == 6
        copy.session("f").undo()
    assert session.step == 5


def test_a_backup_while_others_save(sqlite: Home, tmp_path: Path) -> None:
    """It holds a moment that the store was in: of two sessions in turn, none is ahead by two."""
    made: dict[str, list[str]] = {"a": [], "b": []}
    stop = threading.Event()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            other = sqlite.another()
            sessions = [other.session("a"), other.session("b")]
            for i in range(100_000):
                if stop.is_set():
                    return
                for session in sessions:
                    log: Any = {"log": [f"{i} of {session.name}"]}
                    made[session.name].append(session.patch(append=log, set={"n": i}).id)
        except BaseException as e:
            errors.append(e)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for n in range(4):
            while len(made["b"]) < 10 * (n + 1) and not errors:
                stop.wait(0.001)
            report = sqlite.store.backup(tmp_path / f"copy{n}.db")
            assert report.ok
    finally:
        stop.set()
        thread.join()
    assert errors == []
    lengths = []
    for n in range(4):
        with holdfast.open(tmp_path / f"copy{n}.db", durability="normal") as copy:
            assert copy.verify(read_data=True).ok
            counts = []
            for name in ("a", "b"):
                session = copy.session(name)
                line = [c.id for c in session.history()][::-1]
                assert line == made[name][: len(line)]
                state = session.load()
                assert state["n"] == len(line) - 1
                assert state["log"] == [f"{i} of {name}" for i in range(len(line))]
                counts.append(len(line))
            assert counts[0] - counts[1] in (0, 1)
            lengths.append(counts[1])
            copy.session("a").append("log", "more")
    assert lengths == sorted(lengths)
    assert lengths[0] >= 10
    assert lengths[-1] > lengths[0]


def _no_copy(home: Home) -> None:
    assert strangers(home) == []


def test_backups_that_are_refused(home: Home, tmp_path: Path) -> None:
    home.filled(2)
    if home.kind in ("memory", "postgres"):
        with pytest.raises(InvalidRequest):
            home.store.backup(tmp_path / "copy.db")
        _no_copy(home)
        return
    with pytest.raises(Unavailable):
        home.store.backup(tmp_path / "no folder" / "copy.db")
    for taken in (home.path, home.folder):
        with pytest.raises(InvalidRequest):
            home.store.backup(taken)
    _no_copy(home)
    (tmp_path / "mine").write_bytes(b"do not touch")
    with pytest.raises(InvalidRequest):
        home.store.backup(tmp_path / "mine")
    assert (tmp_path / "mine").read_bytes() == b"do not touch"
    assert strangers(home) == [tmp_path / "mine"]
    assert home.store.verify(read_data=True).ok


@pytest.mark.parametrize("kind", ["sqlite", "files"])
def test_a_backup_may_have_a_relative_path(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(kind, tmp_path)
    home.filled(2)
    monkeypatch.chdir(tmp_path)
    home.store.backup("copy")
    with holdfast.open("files:copy" if kind == "files" else "copy", create=False) as copy:
        assert copy.verify(read_data=True).ok
        assert [s.name for s in copy.sessions()] == [s.name for s in home.store.sessions()]
    home.close()


def test_a_link_is_taken(sqlite: Home, tmp_path: Path) -> None:
    sqlite.filled(1)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(HoldfastError):
        sqlite.store.backup(tmp_path / "link")
    assert strangers(sqlite) == [tmp_path / "link"]


@pytest.fixture(params=["sqlite", "files"])
def rotated(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Home]:
    home = Home(request.param, tmp_path)
    home.filled(1)
    yield home
    home.close()


def copies_of(home: Home, target: Path) -> dict[str, int]:
    """The number of checkpoints in each copy."""
    kind = "files:" if home.kind == "files" else ""
    found = {}
    for path in sorted(target.parent.iterdir()):
        with holdfast.open(f"{kind}{path}", read_only=True) as copy:
            found[path.name] = len(copy.session("s"))
    return found


def test_backups_rotate(rotated: Home, tmp_path: Path) -> None:
    """The newest has the name itself; a gap is filled; none goes before the new one is sound."""
    target = tmp_path / "copies" / "copy"
    target.parent.mkdir()
    session = rotated.session()
    for n in range(1, 5):
        assert rotated.store.backup(target, keep=3).ok
        assert copies_of(rotated, target) == {
            name: n - i for i, name in enumerate(["copy", "copy.1", "copy.2"]) if n > i
        }
        session.save({"n": n})
    (target.parent / "copy.1").rename(tmp_path / "aside")
    rotated.store.backup(target, keep=3)
    assert copies_of(rotated, target) == {"copy": 5, "copy.1": 4, "copy.2": 2}
    rotated.store.backup(target, keep=1)
    assert copies_of(rotated, target) == {"copy": 5, "copy.1": 4, "copy.2": 2}
    with pytest.raises(InvalidRequest, match="exists already"):
        rotated.store.backup(target)


def test_a_backup_in_a_folder_has_the_name_of_the_store(rotated: Home, tmp_path: Path) -> None:
    folder = tmp_path / "copies"
    folder.mkdir()
    name = rotated.path.name
    for n in range(1, 4):
        assert rotated.store.backup(folder, keep=2).ok
        rotated.session().save({"n": n})
    assert copies_of(rotated, folder / name) == {name: 3, f"{name}.1": 2}
    with pytest.raises(InvalidRequest):
        rotated.store.backup(folder)
    with pytest.raises(InvalidRequest):
        rotated.store.backup(rotated.path.parent, keep=2)
    if rotated.kind == "files":
        inside = rotated.path / "sessions"
        before = listing(inside)
        with pytest.raises(HoldfastError):
            rotated.store.backup(inside)
        assert listing(inside) == before


def test_backups_that_rotate_replace_nothing_else(
    rotated: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "copies" / "copy"
    target.parent.mkdir()
    for keep in (0, -1, True, "3", 1.5):
        with pytest.raises(InvalidRequest, match="keep"):
            rotated.store.backup(target, keep=keep)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="no backup"):
        rotated.store.backup(rotated.path, keep=3)
    rotated.store.backup(target, keep=3)
    strange = target.with_name("copy.1")
    strange.write_text("mine")
    with pytest.raises(HoldfastError):
        rotated.store.backup(target, keep=3)
    assert strange.read_text() == "mine"
    strange.unlink()
    strange.symlink_to(target)
    with pytest.raises(InvalidRequest, match="no backup"):
        rotated.store.backup(target, keep=3)
    strange.unlink()
    before = listing(target.parent)
    with monkeypatch.context() as patch:
        patch.setattr(
            type(rotated.store._repository.backend), "backup", Mock(side_effect=Unavailable("full"))
        )
        with pytest.raises(Unavailable, match="full"):
            rotated.store.backup(target, keep=1)
    assert listing(target.parent) == before
    if rotated.kind == "sqlite":
        with (
            holdfast.open(target),
            pytest.raises(InvalidRequest, match="in use"),
        ):
            rotated.store.backup(target, keep=3)
    assert listing(target.parent) == before


def listing(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize("where", ["sync", "check_schema"])
def test_a_backup_that_fails_leaves_nothing(
    sqlite: Home, tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sqlite.filled(3)
    module: Any = fs if where == "sync" else schema
    real = getattr(module, where)

    def fail(*args: Any, **more: Any) -> Any:
        if sqlite.path not in args and sqlite.folder not in args:
            raise OSError("injected")
        return real(*args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(module, where, fail)
        with pytest.raises(Unavailable):
            sqlite.store.backup(tmp_path / "copy.db")
        _no_copy(sqlite)
    assert sqlite.store.backup(tmp_path / "copy.db").ok


def test_a_damaged_store_has_backups(sqlite: Home, tmp_path: Path) -> None:
    """They are as sound as the store itself, and say what is damaged."""
    sqlite.filled(3)
    sqlite.spoil_checkpoint(2)
    report = sqlite.store.backup(tmp_path / "copy.db")
    assert report.problems == sqlite.store.verify().problems != ()
    assert dump(tmp_path / "copy.db") == dump(sqlite.path)
    with holdfast.open(tmp_path / "copy.db", durability="normal") as copy:
        assert copy.session("s").load()["i"] == 2


def spoil_backups(patch: pytest.MonkeyPatch) -> None:
    real = schema.backup

    def spoiled(open_: Any, path: Path) -> None:
        real(open_, path)
        connection = apsw.Connection(str(path))
        connection.execute("UPDATE heads SET body = x'00'")
        connection.close()

    patch.setattr(schema, "backup", spoiled)


def test_a_backup_with_damage_of_its_own(
    sqlite: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That the store is damaged is no excuse."""
    sqlite.filled(3)
    sqlite.spoil_checkpoint(2)
    spoil_backups(monkeypatch)
    with pytest.raises(Corrupt, match="does not verify"):
        sqlite.store.backup(tmp_path / "copy.db")
    assert strangers(sqlite) == []


def test_a_store_that_is_read_only_has_backups(sqlite: Home, tmp_path: Path) -> None:
    sqlite.filled(3)
    with holdfast.open(sqlite.path, read_only=True) as store:
        assert store.backup(tmp_path / "copy.db").checkpoints == 3


# -- stats -----------------------------------------------------------------------------------------


def test_stats(home: Home) -> None:
    empty = home.store.stats()
    assert (empty.sessions, empty.checkpoints, empty.deleted, empty.states) == (0, 0, 0, 0)
    assert empty.largest == ()
    assert empty.sharing == 1.0
    small, large = home.filled(2, "small"), home.session("large")
    for i in range(5):
        large.save({"i": i, "raw": random.Random(i).randbytes(5_000)}, tags=["t", "u"])
    fork = large.fork("fork")
    stats = home.store.stats()
    assert (stats.sessions, stats.checkpoints, stats.deleted) == (3, 8, 0)
    sizes = [c.size for s in (small, large, fork) for c in s.tree()]
    assert stats.states == sum(sizes)
    assert stats.rows["checkpoints"] == 8
    assert stats.rows["sessions"] == 3
    assert stats.rows["marks"] == 10
    assert stats.rows["blobs"] == 5
    assert stats.bytes["blobs"] > 25_000
    assert [(s.name, s.checkpoints) for s in stats.largest] == [
        ("large", 5), ("small", 2), ("fork", 1),
    ]  # fmt: skip
    assert [s.added for s in stats.largest] == [
        sum(c.added for c in s.tree()) for s in (large, small, fork)
    ]
    assert [s.name for s in home.store.stats(largest=1).largest] == ["large"]
    assert home.store.stats(largest=0) == stats._replace(largest=())
    stored = sum(stats.bytes[kind] for kind in ("items", "blobs", "checkpoints"))
    assert stats.sharing == pytest.approx(sum(sizes) / stored)


def test_stats_of_what_is_deleted(home: Home) -> None:
    session = home.filled(6)
    session.prune(Retention(keep_last=2))
    stats = home.store.stats()
    assert (stats.checkpoints, stats.deleted, stats.rows["tombs"]) == (2, 4, 4)
    session.undo()
    assert home.store.stats()[1:3] == (6, 0)
    session.redo()
    home.store.gc()
    stats = home.store.stats()
    assert (stats.checkpoints, stats.deleted, stats.rows["checkpoints"]) == (2, 0, 2)
    session.delete()
    assert home.store.stats().sessions == 0
    home.store.gc()
    stats = home.store.stats()
    assert set(stats.rows.values()) == set(stats.bytes.values()) == {0}


def test_sharing_shows(home: Home) -> None:
    """Fifty states that grew from each other take little more than the last."""
    home.filled(50)
    assert home.store.stats().sharing > 8


# -- repair ----------------------------------------------------------------------------------------


def loadable(session: holdfast.Session) -> dict[str, bool]:
    out = {}
    for checkpoint in session.tree():
        try:
            session.load(checkpoint.id)
            out[checkpoint.id] = True
        except (Corrupt, CheckpointNotFound):
            out[checkpoint.id] = False
    return out


def numbered(home: Home, count: int = 5, name: str = "s") -> holdfast.Session:
    """Each state on its own, so that damage to one leaves the others."""
    session = home.session(name)
    for i in range(count):
        session.save(
            {"i": i, "raw": random.Random(f"{name} {i}").randbytes(6_000)}, key=f"k{i}", tags=["t"]
        )
    return session


def spoil_blob(home: Home, n: int) -> None:
    backend = home.store._repository.backend
    if isinstance(backend, MemoryBackend):
        blobs = sorted(memory_rows.rows(backend, "blobs").values(), key=lambda blob: blob[2])
        digest, _, *rest = blobs[n]
        memory_rows.put(backend, "blobs", (digest,), (digest, b"torn", *rest))
    elif isinstance(backend, FilesBackend):
        filestore.spoil_blob(backend, n)
    else:
        where = "num = ? + (SELECT min(num) FROM blobs)"
        home._sql(f"UPDATE blobs SET body = ? WHERE {where}", b"torn", n)


Damage = Callable[[Home], None]


def record(seq: int) -> Damage:
    return lambda home: home.spoil_checkpoint(seq)


def data(seq: int) -> Damage:
    return lambda home: spoil_blob(home, seq - 1)


def head_row(body: bytes | None) -> Damage:
    return lambda home: home.spoil_head(body)


DAMAGE: dict[str, tuple[list[Damage], int, list[int]]] = {
    # what is damaged, the i of the new head, and the seqs that are lost
    "head checkpoint": ([record(5)], 3, [5]),
    "two checkpoints": ([record(5), record(4)], 2, [4, 5]),
    "every other": ([record(5), record(3)], 3, [3, 5]),
    "data of the head": ([data(5)], 3, [5]),
    "data of another": ([data(2)], 4, [2]),
    "record and data": ([record(5), data(4)], 2, [4, 5]),
    "head row": ([head_row(b"torn")], 4, []),
    "no head row": ([head_row(None)], 4, []),
    "head row and data": ([head_row(b"torn"), data(5)], 3, [5]),
    "no head row, no head": ([head_row(None), record(5)], 3, [5]),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_the_newest_that_loads_becomes_the_head(home: Home, kind: str) -> None:
    damage, head, lost = DAMAGE[kind]
    session = numbered(home)
    numbered(home, 2, "sound")
    all_ids = [c.id for c in session.tree()]
    for one in damage:
        one(home)
    assert not home.store.verify(read_data=True).ok
    [done] = home.store.repair().sessions
    assert done.session == "s"
    assert list(done.lost) == [all_ids[seq - 1] for seq in lost]
    session = home.reopened().session("s")
    assert session.load()["i"] == head
    loads = loadable(session)
    assert [seq for seq, good in enumerate(loads.values(), 1) if not good] == lost
    row_gone = "head row" in kind
    moved = None if kind == "data of another" else (0 if row_gone else 5, head + 1)
    assert done.moved == moved
    assert len(session) == 5
    if not lost:
        assert home.store.verify(read_data=True).ok
    if moved:
        assert [o.kind for o in session.operations()] == ["repair"]
        assert session.undo().details["what"] == "repair"
        with pytest.raises((Corrupt, CheckpointNotFound)):
            session.load()  # what it was before
        session.redo()
    assert session.load()["i"] == head
    saved = session.save({"i": "on"})
    # With the row it is lost whether there was one more: its number is left out.
    assert (saved.parent, saved.seq) == (all_ids[head], 6 + row_gone)
    again = home.store.repair().sessions
    assert [r.moved for r in again] == [None] * bool(lost)
    assert home.session("sound").load()["i"] == 1


def test_a_head_row_keeps_the_log(home: Home) -> None:
    """What was done before the damage can still be undone."""
    session = numbered(home)
    session.tag("@~1", "x")
    session.rewind("@~2")
    home.spoil_head(None)
    home.store.repair()
    session = home.reopened().session("s")
    assert [o.kind for o in session.operations()] == ["tag", "rewind", "repair"]
    assert session.load()["i"] == 4  # where the head had been is lost; the newest is the best guess
    session.save({"i": 5})
    session.tag("@", "more")
    session.undo()
    session.undo()
    assert session.load()["i"] == 4
    assert home.store.verify(read_data=True).ok


def test_items_of_the_head(home: Home) -> None:
    session = home.session()
    for i in range(80):
        session.append("log", f"{i} " + "text " * 60)
    home.spoil_newest_item()
    loads = loadable(session)
    assert not loads[session.get().id]
    good = [id for id, fine in loads.items() if fine]
    assert good
    [done] = home.store.repair().sessions
    assert [*done.lost] == [id for id, fine in loads.items() if not fine]
    session = home.reopened().session("s")
    assert session.get().id == good[-1]
    assert len(session.load()["log"]) == len(good)
    session.append("log", "more")
    assert session.load()["log"][-1] == "more"


def test_a_branch_keeps_its_head(home: Home) -> None:
    """The nearest ancestor that loads, not the newest of another branch."""
    session = numbered(home, 6)
    session.rewind("@~4")
    session.save({"i": "branch"})
    home.spoil_checkpoint(7)
    [done] = home.store.repair().sessions
    assert done.moved == (7, 2)
    assert home.session().load()["i"] == 1


def test_deleted_ones_do_not_become_heads(home: Home) -> None:
    session = numbered(home)
    session.delete("@~1")
    home.spoil_checkpoint(5)
    [done] = home.store.repair().sessions
    assert done.moved == (5, 3)


def test_nothing_is_left_to_load(home: Home) -> None:
    numbered(home, 2)
    for seq in (1, 2):
        home.spoil_checkpoint(seq)
    [done] = home.store.repair().sessions
    assert done.moved is None
    assert len(done.lost) == 2
    assert len(home.store.repair().sessions) == 1


def check_head_of_another_type(sqlite: Home, type: str) -> None:
    for name in ("a", "b"):
        numbered(sqlite, 3, name)
    sqlite.spoil_head(name="b")
    sqlite._sql(f"UPDATE heads SET body = CAST(body AS {type}) WHERE session = 1")
    sqlite.store.repair()
    for name in ("a", "b"):
        assert sqlite.reopened().session(name).load()["i"] == 2
        sqlite.session(name).save({"i": 3})
    assert sqlite.store.verify(read_data=True).ok


@pytest.mark.parametrize("type", ["TEXT", "INTEGER"])
def test_a_head_of_another_type(sqlite: Home, type: str) -> None:
    """It can be neither read nor swapped, and stopped the repair of all that come after it."""
    check_head_of_another_type(sqlite, type)


@pytest.mark.parametrize("type", ["TEXT", "INTEGER"])
def test_a_head_of_another_type_has_to_be_made_anew(
    sqlite: Home, monkeypatch: pytest.MonkeyPatch, type: str
) -> None:
    monkeypatch.setattr(salvage, "is_damaged", lambda _: False)
    with pytest.raises((AssertionError, Corrupt)):
        check_head_of_another_type(sqlite, type)


@pytest.mark.parametrize("mutant", [False, True])
def test_repair_although_sessions_cannot_be_listed(
    home: Home, monkeypatch: pytest.MonkeyPatch, mutant: bool
) -> None:
    """They are found by their checkpoints."""
    names = ("a", "b", "c")
    for name in names:
        numbered(home, 3, name)
        home.spoil_head(name=name)
    with home.store._repository.reader() as reader:
        kind = type(reader)

    def refuse(*_: Any) -> Any:
        raise Corrupt("injected")

    monkeypatch.setattr(kind, "sessions", refuse)
    if mutant:
        monkeypatch.setattr(repair, "strays", lambda *_: iter(()))
    done = {each.session: each.moved for each in home.store.repair().sessions}
    monkeypatch.undo()
    assert done == ({} if mutant else dict.fromkeys(names, (0, 3)))
    loads = [name for name in names if not mutant and home.session(name).load()["i"] == 2]
    assert len(loads) == (0 if mutant else 3)


def test_a_session_that_cannot_be_repaired_holds_up_no_other(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbered(home, 3, "a")
    numbered(home, 3, "b")
    home.spoil_checkpoint(3, name="b")
    entries = repair._entries

    def refuse(reader: Any, number: int) -> Any:
        if number == min(n for n, _, _ in reader.sessions(None, 9)):
            raise Corrupt("injected")
        return entries(reader, number)

    monkeypatch.setattr(repair, "_entries", refuse)
    [done] = home.store.repair().sessions  # all of the other one loads
    assert (done.session, done.moved) == ("b", (3, 2))
    assert home.session("b").load()["i"] == 1


def test_a_sound_store_stays_as_it_is(sqlite: Home) -> None:
    session = numbered(sqlite)
    session.label("@~1", "l")
    session.delete("@~2")
    session.fork("f", "@~1").undo()
    session.fork("g", "@~1").save({"x": 1})
    empty = sqlite.session("undone")
    empty.save(1)
    empty.undo()
    before = dump(sqlite.path)
    assert sqlite.store.repair().sessions == ()
    assert dump(sqlite.path) == before
    sqlite.store.gc()
    before = dump(sqlite.path)
    assert sqlite.store.repair().sessions == ()
    assert dump(sqlite.path) == before


def forget(home: Home, table: str) -> None:
    backend = home.store._repository.backend
    if isinstance(backend, MemoryBackend):
        for key in memory_rows.rows(backend, table):
            memory_rows.put(backend, table, key, None)
    elif isinstance(backend, FilesBackend):
        filestore.forget(backend, table)
    else:
        home._sql(f"DELETE FROM {table}")


def test_searches_work_again(home: Home) -> None:
    session = home.store.session("s", agent="x")
    for i in range(4):
        session.save({"i": i}, tags=["t"], label=f"l{i}", trigger="g", status="failed")
    session.tag("@~1", "late")
    session.label("@~2", "other")
    queries: list[dict[str, Any]] = [
        {"tag": "t"},
        {"tag": "late"},
        {"label": "l0"},
        {"label": "other"},
        {"label": "l1"},
        {"trigger": "g"},
        {"status": "failed"},
        {"agent": "x"},
    ]
    before = [[c.id for c in home.store.checkpoints(**q)] for q in queries]
    assert [len(found) for found in before] == [4, 1, 1, 1, 0, 4, 4, 4]
    forget(home, "facets")
    assert [[*home.store.checkpoints(**q)] for q in queries] == [[]] * len(queries)
    assert not home.store.verify().ok
    [done] = home.store.repair().sessions
    assert (done.session, done.rebuilt, done.moved, done.lost) == ("s", ("searches",), None, ())
    assert [[c.id for c in home.store.checkpoints(**q)] for q in queries] == before
    assert home.store.verify(read_data=True).ok
    assert home.store.repair().sessions == ()
    session.undo()
    assert [c.seq for c in home.store.checkpoints(label="l1")] == [2]


def test_one_entry_that_is_missing(sqlite: Home) -> None:
    numbered(sqlite)
    sqlite._sql("DELETE FROM facets WHERE id = (SELECT max(id) FROM facets)")
    assert len(list(sqlite.store.checkpoints(tag="t"))) == 4
    assert sqlite.store.repair().sessions[0].rebuilt == ("searches",)
    assert len(list(sqlite.store.checkpoints(tag="t"))) == 5


def test_keys_work_again(home: Home) -> None:
    session = numbered(home)
    forget(home, "keys")
    with pytest.raises(CheckpointNotFound):
        session.load("key:k2")
    assert not home.store.verify().ok
    [done] = home.store.repair().sessions
    assert done.rebuilt == ("keys",)
    session = home.reopened().session("s")
    for i in range(5):
        assert session.load(f"key:k{i}")["i"] == i
    with pytest.raises(KeyTaken):
        session.save({}, key="k2")
    assert home.store.verify(read_data=True).ok


def test_a_key_that_names_the_wrong_one(sqlite: Home) -> None:
    session = numbered(sqlite)
    sqlite._sql("UPDATE keys SET seq = 1 WHERE key = ?", b"k2")
    with pytest.raises(Corrupt):
        session.load("key:k2")
    assert sqlite.store.repair().sessions[0].rebuilt == ("keys",)
    assert session.load("key:k2")["i"] == 2


def test_names_work_again(sqlite: Home) -> None:
    numbered(sqlite)
    numbered(sqlite, 2, "other")
    forget(sqlite, "names")
    with pytest.raises(Corrupt):
        sqlite.session().load()
    sqlite.store.repair()
    assert sqlite.session().load()["i"] == 4
    assert sqlite.session("other").load()["i"] == 1
    assert sqlite.store.verify(read_data=True).ok


def flipped(value: bytes, at: int = 0) -> bytes:
    return value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :]


NAMES = "sqlite_autoindex_sessions_1"


@pytest.mark.parametrize("tree", ["sessions", NAMES])
def test_a_damaged_name_is_put_right(sqlite: Home, tree: str) -> None:
    """It stands in the table and in its index, and the seal of the row tells which is damaged."""
    numbered(sqlite, 3, "origin")
    numbered(sqlite, 2, "other")
    sqlite.overwrite(tree, b"origin", b"nrigin")
    with pytest.raises(Corrupt):
        sqlite.session("origin").load()
    sqlite.store.repair()
    assert sqlite.session("origin").load()["i"] == 2
    assert not sqlite.session("nrigin").exists()
    assert sqlite.store.verify(read_data=True).ok
    assert sqlite.store.repair().sessions == ()


def test_a_name_that_has_become_another_ones(sqlite: Home) -> None:
    """One bit is between them."""
    numbered(sqlite, 3, "agent-0")
    numbered(sqlite, 2, "agent-1")
    sqlite.overwrite("sessions", b"agent-0", b"agent-1")
    sqlite.store.repair()
    assert sqlite.session("agent-0").load()["i"] == 2
    assert sqlite.session("agent-1").load()["i"] == 1
    assert sqlite.store.verify(read_data=True).ok


@pytest.mark.parametrize("home", ["sqlite", "postgres"], indirect=True)
def test_a_name_that_is_lost_is_not_free(home: Home) -> None:
    """Nobody knows how it read; whoever asks for it must not get a new session."""
    ids = [c.id for c in numbered(home, 3).tree()]
    numbered(home, 2, "other")
    home.spoil_name()
    for _ in range(2):
        [done] = home.store.repair().sessions
        assert [*done.lost] == ids
        for use in (lambda s: s.load(), lambda s: s.save({"begun": "anew"}), lambda s: s.exists()):
            with pytest.raises(Corrupt):
                use(home.session("s"))
    assert home.session("other").load()["i"] == 1
    assert not home.store.verify().ok


def test_a_session_whose_row_is_gone_keeps_its_name(sqlite: Home) -> None:
    numbered(sqlite, 2, "other")
    ids = [c.id for c in numbered(sqlite).tree()]
    sqlite._sql("DELETE FROM sessions WHERE name = ?", b"s")
    [done] = sqlite.store.repair().sessions
    assert [*done.lost] == ids
    with pytest.raises(Corrupt):
        sqlite.session("s").save({"begun": "anew"})
    assert not sqlite.store.verify().ok
    assert sqlite.session("other").load()["i"] == 1


def test_a_name_of_another_type(sqlite: Home) -> None:
    numbered(sqlite)
    sqlite._sql("UPDATE sessions SET name = 'text' WHERE name = ?", b"s")
    sqlite.store.repair()
    with pytest.raises(Corrupt):
        sqlite.session("s").save({"begun": "anew"})


@pytest.mark.parametrize("at", [0, 7, 8, 20, 31])
def test_a_damaged_digest_loses_no_blob(sqlite: Home, at: int) -> None:
    numbered(sqlite)
    digest = dump(sqlite.path)["blobs"][2][1]
    sqlite.overwrite("blobs", digest, flipped(digest, at))
    before = loadable(sqlite.session())
    assert all(before.values())
    assert sqlite.store.repair().sessions == ()
    assert loadable(sqlite.session()) == before
    assert sqlite.store.verify(read_data=True).ok


def test_a_damaged_id_is_put_right(sqlite: Home) -> None:
    numbered(sqlite)
    id, body = dump(sqlite.path)["checkpoints"][2][1:]
    sqlite.overwrite("checkpoints", id + body, flipped(id, 9) + body)
    assert sqlite.store.repair().sessions == ()
    assert sqlite.session().load(ids.to_text(id))["i"] == 2
    assert sqlite.store.verify(read_data=True).ok


def test_a_damaged_origin_is_put_right(sqlite: Home) -> None:
    numbered(sqlite).fork("fork")
    sqlite._sql("UPDATE sessions SET origin = origin + 1 WHERE origin IS NOT NULL")
    assert not sqlite.store.verify().ok
    sqlite.store.repair()
    assert sqlite.store.verify().ok


def test_repair_beside_a_saver(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that comes between is not lost."""
    session = numbered(home)
    forget(home, "facets")
    backend = home.store._repository.backend
    commit, raced = backend.commit, list[int]()

    def race(change: Any) -> None:
        if not raced:
            raced.append(1)
            session.save({"i": "raced"}, tags=["t"])
        commit(change)

    monkeypatch.setattr(backend, "commit", race)
    [done] = home.store.repair().sessions
    assert done.rebuilt == ("searches",)
    assert home.session().load() == {"i": "raced"}
    assert len(list(home.store.checkpoints(tag="t"))) == 6
    assert home.store.verify(read_data=True).ok


# -- the tests see what they should: each of these changes to the engine makes one fail ------------


def test_mutant_that_looks_at_records_alone(memory: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    maintenance.data_is_not_checked(monkeypatch)
    with pytest.raises((AssertionError, ValueError)):
        test_the_newest_that_loads_becomes_the_head(memory, "data of the head")


def test_mutant_that_raises_the_dead(memory: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    maintenance.repair_raises_the_dead(monkeypatch)
    with pytest.raises((AssertionError, holdfast.Corrupt)):
        test_deleted_ones_do_not_become_heads(memory)


def test_mutant_that_does_not_check(
    sqlite: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maintenance.backups_are_not_verified(monkeypatch)
    with pytest.raises(pytest.fail.Exception):
        test_a_backup_with_damage_of_its_own(sqlite, tmp_path, monkeypatch)


def test_mutant_that_leaves_its_draft(
    sqlite: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maintenance.drafts_of_backups_stay(monkeypatch)
    with pytest.raises(AssertionError):
        test_a_backup_that_fails_leaves_nothing(sqlite, tmp_path, "sync", monkeypatch)


@pytest.mark.parametrize("what", ["torn", "empty", "missing", "data"])
def test_repair_moves_the_head_to_the_newest_sound_checkpoint(home: Home, what: str) -> None:
    session = home.session()
    for i in range(4):
        session.save({"i": i, "raw": random.Random(i).randbytes(6_000)})
    if what == "data":
        spoil_blob(home, 3)
    else:
        home.spoil_checkpoint(4, {"torn": b"torn", "empty": b"", "missing": None}[what])
    [done] = home.reopened().repair().sessions
    assert done.moved == (4, 3)
    assert len(done.lost) == 1
    session = home.reopened().session("s")
    assert session.load()["i"] == 2
    assert session.save({"i": "goes on"}).step == 4


def test_a_missing_checkpoint_is_reported_once_and_then_counts_as_freed(home: Home) -> None:
    """Then it counts as freed, and its children say so."""
    session = home.filled(6)
    session.fork("f", "@~3")
    home.spoil_checkpoint(3, None)
    assert [done.lost for done in home.reopened().repair().sessions] == [("3",)]
    assert home.store.repair().sessions == ()
    assert home.store.verify(read_data=True).ok
    session = home.session()
    for listed in (session.history(), list(session.tree())[::-1]):
        assert [(c.seq, c.pruned) for c in listed] == [(6, 0), (5, 0), (4, 1), (2, 0), (1, 0)]
    assert seqs(home.session("f").history()) == [1, 2, 1]
    session.save({"i": 6})
    session.undo()
    assert home.store.gc().checkpoints == 0


@pytest.mark.parametrize("body", [b"", b"torn", None], ids=["empty", "torn", "missing"])
def test_a_damaged_head_row_is_repaired(home: Home, body: bytes | None) -> None:
    home.filled(3)
    home.spoil_head(body)
    [done] = home.reopened().repair().sessions
    assert (done.moved, done.lost) == ((0, 3), ())
    session = home.reopened().session("s")
    assert session.load()["i"] == 2
    assert session.save({"i": 3}).step == 4
    session.undo()
    assert session.load()["i"] == 2
    assert home.store.verify().ok
