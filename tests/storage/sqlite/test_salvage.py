"""Salvage puts a new file in the place of a damaged one: as a whole, or not at all."""

from __future__ import annotations

import itertools
import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import apsw
import pytest

import holdfast
from holdfast.storage.sqlite import salvage
from tests.faults.bitrot import Blank, first_pages
from tests.mutants import Mutant, storage

Known = dict[str, Any]


def fill(path: Path) -> Known:
    with holdfast.open(path, durability="normal") as store:
        session = store.session("s")
        states = [{"n": n, "text": f"{n} " * 900} for n in range(12)]
        return {session.save(state, tags=["t"]).id: state for state in states}


def damage(path: Path, name: str = "marks_by_value") -> None:
    data = path.read_bytes()
    path.write_bytes(Blank(first_pages(data)[name]).apply(data))


@pytest.fixture(name="known")
def _known(tmp_path: Path) -> Known:
    known = fill(tmp_path / "agent.db")
    damage(tmp_path / "agent.db")
    return known


def check_all(path: Path, known: Known) -> None:
    with holdfast.open(path) as store:
        assert store.verify(read_data=True).ok
        for id, state in known.items():
            assert store.session("s").load(id) == state


def test_a_sound_store_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    fill(path)
    before = path.read_bytes()
    with holdfast.open(path) as store:
        version = store._repository.backend.version()
        assert store.repair().ok
        assert store._repository.backend.version() == version
    assert path.read_bytes() == before


def test_a_second_repair_writes_nothing(tmp_path: Path, known: Known) -> None:
    path = tmp_path / "agent.db"
    with holdfast.open(path) as store:
        backend = store._repository.backend
        assert [backend.salvage(), backend.salvage()] == [True, False]
    check_all(path, known)


def test_handles_that_are_open_see_the_new_file(tmp_path: Path, known: Known) -> None:
    path = tmp_path / "agent.db"
    with holdfast.open(path) as other, holdfast.open(path) as store:
        newest = [*known][-1]
        assert other.session("s").load(newest) == known[newest]
        with other._repository.reader() as reader:
            found = reader.checkpoint(1, 3)
            store.repair()
            assert reader.checkpoint(1, 3) == found
        other.session("s").save({"n": "new"})
        assert store.session("s").load() == {"n": "new"}
        assert other.verify(read_data=True).ok
    check_all(path, known)


def meddle(monkeypatch: pytest.MonkeyPatch, path: Path, times: int) -> list[int]:
    """Let another handle save, as another process may, while the new file is made."""
    saved: list[int] = []
    real = salvage._rescue

    def rescue(old: Path, new: Path) -> None:
        real(old, new)
        if len(saved) < times:
            with holdfast.open(path) as other:
                other.session("s").save({"meanwhile": len(saved)})
            saved.append(1)

    monkeypatch.setattr(salvage, "_rescue", rescue)
    return saved


def check_meddled(path: Path, known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = meddle(monkeypatch, path, 2)
    with holdfast.open(path) as store:
        store.repair()
        states = [store.session("s").load(revision) for revision in ("@~1", "@")]
        assert states == [{"meanwhile": 0}, {"meanwhile": 1}]
    assert len(saved) == 2
    check_all(path, known)


def test_what_others_write_meanwhile_stays(
    tmp_path: Path, known: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_meddled(tmp_path / "agent.db", known, monkeypatch)


def test_mutant_that_forgets_what_others_write(
    tmp_path: Path, known: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.salvage_forgets_what_others_write(monkeypatch)
    with pytest.raises(AssertionError):
        check_meddled(tmp_path / "agent.db", known, monkeypatch)


def test_a_store_that_others_write_to_all_the_time(
    tmp_path: Path, known: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "agent.db"
    with holdfast.open(path) as store, monkeypatch.context() as patch:
        meddle(patch, path, 99)
        with pytest.raises(holdfast.Unavailable, match="other processes write"):
            store.repair()
        assert not store.verify().ok
    with holdfast.open(path) as store:
        store.repair()
    check_all(path, known)


def check_incomplete(path: Path, known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new file that lacks a sound row is not used."""
    real = salvage._Rescue._put

    def put(rescue: Any, row: Any) -> bool:
        return rescue._table.name != "items" or real(rescue, row)

    monkeypatch.setattr(salvage._Rescue, "_put", put)
    with holdfast.open(path) as store:
        assert store._repository.backend.salvage() is False
        for id, state in known.items():
            assert store.session("s").load(id) == state


@pytest.mark.parametrize("mutant", [None, storage.salvage_does_not_check_the_new_file])
def test_a_new_file_that_lacks_a_row_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutant: Mutant | None
) -> None:
    path = tmp_path / "agent.db"
    with holdfast.open(path) as store:
        states = [{"log": [f"{n} {m} " * 60 for m in range(20)]} for n in range(5)]
        known = {store.session("s").save(state).id: state for state in states}
    damage(path)
    if mutant is None:
        check_incomplete(path, known, monkeypatch)
        return
    mutant(monkeypatch)
    with pytest.raises((AssertionError, holdfast.Corrupt)):
        check_incomplete(path, known, monkeypatch)


class Deadly(apsw.VFS):
    """A file system on which the process dies before a write or a sync of the store's files."""

    def __init__(self, left: int) -> None:
        super().__init__("deadly", "")
        self.left = left

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:  # noqa: N802 - apsw's name
        path = "" if name is None else str(name.filename() if hasattr(name, "filename") else name)
        ours = Path(path).name in {"agent.db", "agent.db-wal"}
        deadly = self

        class File(apsw.VFSFile):
            def xWrite(self, data: Any, offset: int) -> None:  # noqa: N802
                deadly.count(ours)
                super().xWrite(data, offset)

            def xSync(self, flags: int) -> None:  # noqa: N802
                deadly.count(ours)
                super().xSync(flags)

        return File("", name, flags)

    def count(self, ours: bool) -> None:
        self.left -= ours
        if self.left == 0:
            os._exit(9)


def die(path: Path, left: int) -> bool:
    """Repair in a child that dies before a write. Return whether it got that far."""
    child = os.fork()
    if child == 0:
        vfs = Deadly(left)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(apsw, "Connection", partial(apsw.Connection, vfs="deadly"))
            with holdfast.open(path) as store:
                store.repair()
        vfs.unregister()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0


def loaded(path: Path, known: Known) -> int:
    """Return how many checkpoints load."""
    count = 0
    with holdfast.open(path) as store:
        for id, state in known.items():
            with suppress(holdfast.Corrupt):
                count += store.session("s").load(id) == state
    return count


def test_a_crash_leaves_the_old_store_or_the_new_one(tmp_path: Path, known: Known) -> None:
    path = tmp_path / "agent.db"
    damage(path, "sqlite_autoindex_checkpoints_1")
    data, died = path.read_bytes(), 0
    counts = set()
    for left in itertools.count(1, 7):
        path.write_bytes(data)
        if not die(path, left):
            break
        died += 1
        counts.add(loaded(path, known))
        with holdfast.open(path) as store:
            assert store.repair().ok
        check_all(path, known)
        for draft in tmp_path.glob(".agent.db.*"):
            draft.unlink()
    assert died > 5
    assert counts == {0, len(known)}
