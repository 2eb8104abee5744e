"""What `repair()` says is true: checked against what loads, on pages that have gone wrong."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import apsw
import pytest

import holdfast
from holdfast.maintenance import repair as repairing
from tests.faults.bitrot import PAGE, owners
from tests.support.sessions import seqs
from tests.support.stores import TEXT, Home
from tests.support.terminal import Terminal

NAMES = ("a", "b", "c")
UNSEEN = {"sqlite_schema"}


@pytest.fixture(name="path", scope="module")
def _path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store in which every table has a row, and some a deleted one."""
    path = tmp_path_factory.mktemp("repair") / "agent.db"
    some = random.Random(3)
    with holdfast.open(path) as store:
        for name in NAMES:
            session = store.session(name)
            for n in range(3):
                messages = [{"text": some.randbytes(200).hex()} for _ in range(10 + n)]
                state = {"n": n, "messages": messages, "file": some.randbytes(5_000)}
                session.save(state, label=f"label {n}", tags=["t"], key=f"key {n}")
            session.rewind("@~1")
            session.undo()
        _save_and_delete(store.session("a"))
        store.gc()
        _save_and_delete(store.session("b"))
        with store.session("c").run() as run:
            run.step("model", lambda: 1)
            run.wait_for("approval")
        store.session("d").save({"n": 0})
        store.session("d").delete()
    return path


def _save_and_delete(session: holdfast.Session) -> None:
    deleted = session.save({"n": 10})
    session.save({"n": 11})
    session.delete(deleted.id)


def loaded(store: holdfast.Store, known: dict[str, list[str]]) -> set[str]:
    """The ids of checkpoints whose states load."""
    out = set()
    for name, ids in known.items():
        for id in ids:
            try:
                store.session(name).load(id)
            except holdfast.HoldfastError:
                continue
            out.add(id)
    return out


def answers(store: holdfast.Store) -> dict[str, Any]:
    """What users see of the store."""
    out: dict[str, Any] = {"sessions": [info.name for info in store.sessions()]}
    for name in NAMES:
        session = store.session(name)
        out[name] = (
            [(c.id, c.label, c.tags) for c in session.tree()],
            [c.id for c in session.history()],
            [p.key for p in session.pending()],
            [op.kind for op in session.operations() if op.kind != "repair"],
        )
    return out


def lost(result: holdfast.RepairResult, seqs: dict[tuple[str, str], str]) -> set[str]:
    """The ids of the checkpoints that are said to be lost."""
    return {
        seqs.get((done.session, id), id)
        for done in result.sessions
        for id in done.lost
        if done.session in NAMES or not id.isdecimal()
    }


def wrong_pages(data: bytes) -> list[tuple[str, bytes]]:
    """The file with one page zeroed, filled with ones, or overwritten by a page of another table.

    Of each table one page is enough.
    """
    pages = {table: page for page, table in owners(data).items() if table not in UNSEEN}
    other = data[(pages["items"] - 1) * PAGE : pages["items"] * PAGE]
    out = []
    for table, page in pages.items():
        begin = (page - 1) * PAGE
        for way, instead in (("zeros", bytes(PAGE)), ("ones", b"\xff" * PAGE), ("other", other)):
            if (table, way) != ("items", "other"):
                out.append((f"{table} {way}", data[:begin] + instead + data[begin + PAGE :]))
    return out


def check(path: Path, folder: Path, wanted: str = "") -> None:
    data = path.read_bytes()
    with holdfast.open(path, read_only=True) as store:
        before = answers(store)
        known = {name: [c.id for c in store.session(name).tree()] for name in NAMES}
        seqs = {(name, str(c.seq)): c.id for name in NAMES for c in store.session(name).tree()}
    everything = {id for ids in known.values() for id in ids}
    hurt = folder / "hurt.db"
    for way, damaged in wrong_pages(data):
        if wanted not in way:
            continue
        hurt.write_bytes(damaged)
        with holdfast.open(hurt) as store:
            result = store.repair()
            there = loaded(store, known)
            assert lost(result, seqs) & everything == everything - there, way
            assert result.remaining == store.verify(read_data=True), way
            if result.ok and not any(done.forgotten for done in result.sessions):
                assert answers(store) == before, way
            store.repair()
        for left in folder.glob("hurt.db*"):
            left.unlink()


def test_what_is_said_to_be_lost_is_what_does_not_load(path: Path, tmp_path: Path) -> None:
    check(path, tmp_path)


def test_mutant_that_does_not_look_after_the_repair(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It believes that a session which it could not repair has lost nothing."""
    sound = holdfast.VerifyResult((), 0, 0, 0)
    monkeypatch.setattr(repairing, "audit", lambda *_, **__: (sound, {}))
    with pytest.raises(AssertionError):
        check(path, tmp_path, "sessions")


@pytest.mark.parametrize("junk", [b"x" * 100, bytes(3 * PAGE)])
def test_junk_behind_the_last_page_is_no_damage(path: Path, tmp_path: Path, junk: bytes) -> None:
    hurt = tmp_path / "hurt.db"
    hurt.write_bytes(path.read_bytes() + junk)
    for _ in range(2):
        with holdfast.open(hurt) as store:
            result = store.repair()
            assert (result.ok, result.sessions) == (True, ())
            store.session("new").save({"n": 1})
            assert store.verify(read_data=True).ok
            store.session("new").delete()


def test_command_ends_with_an_error_while_damage_stays(path: Path, terminal: Terminal) -> None:
    ways = dict(wrong_pages(path.read_bytes()))
    terminal.path.write_bytes(ways["operations zeros"])
    ended = terminal.type("repair")
    assert ended.code == holdfast.Corrupt.exit_code
    assert ended.out.startswith("Still damaged")
    assert "repaired" not in ended.err
    ended = terminal.type("repair --json")
    assert (ended.code, ended.one["ok"]) == (holdfast.Corrupt.exit_code, False)
    assert ended.one["remaining"]["problems"]


INDEXES = [
    "sqlite_autoindex_sessions_1",
    "sqlite_autoindex_checkpoints_1",
    "sqlite_autoindex_blobs_1",
    "marks_by_value",
    "forks",
    "gaps_by_ancestor",
]


def zero_index(home: Home, name: str) -> None:
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
def test_a_damaged_index_is_rebuilt(sqlite: Home, name: str) -> None:
    zero_index(sqlite, name)
    assert not sqlite.store.verify().ok
    sqlite.store.repair()
    assert sqlite.store.verify().ok
    session = sqlite.reopened().session("s")
    assert session.save({"i": 6, "big": TEXT * 99}, label="l").step == 7
    assert session.load("l")["i"] == 6
    assert seqs(session.history("@~1")) == [6, 5, 4, 2, 1]


def test_temporary_files_are_readable_by_their_owner_only(
    sqlite: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of repairs, backups and new stores, and what SQLite puts beside them."""
    zero_index(sqlite, "sqlite_autoindex_checkpoints_1")
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
