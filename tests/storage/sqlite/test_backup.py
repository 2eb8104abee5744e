"""Backups of SQLite stores: complete, checked, synced, and never over another file."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.errors import CheckpointNotFound, Corrupt, InvalidRequest, Unavailable
from holdfast.storage import fs
from holdfast.storage.sqlite import schema
from tests.support.stores import Home, strangers


def test_a_backup_never_replaces_a_file(sqlite: Home, tmp_path: Path) -> None:
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


def test_a_spoiled_backup_is_refused(sqlite: Home, tmp_path: Path) -> None:
    """One that a disk has spoiled is no backup, and nobody is told that it is."""
    sqlite.filled(30)
    real = schema.backup

    def spoiled(open_: Any, path: Path) -> None:
        real(open_, path)
        content = bytearray(path.read_bytes())
        content[len(content) // 2 :: 97] = bytes(len(content[len(content) // 2 :: 97]))
        path.write_bytes(content)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schema, "backup", spoiled)
        with pytest.raises(Corrupt):
            sqlite.store.backup(tmp_path / "copy.db")
    assert strangers(sqlite) == []


@pytest.mark.parametrize("body", [b"torn", None], ids=["torn", "missing"])
def test_a_repaired_store_can_be_backed_up(
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


def test_a_backup_is_synced_before_it_gets_its_name(sqlite: Home, tmp_path: Path) -> None:
    done: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        sync, link = fs.sync, os.link

        def note_sync(path: Path) -> None:
            sync(path)
            done.append("folder" if path == tmp_path else "file")

        def note_link(old: Any, new: Any) -> None:
            link(old, new)
            done.append("name")

        patch.setattr(fs, "sync", note_sync)
        patch.setattr(os, "link", note_link)
        sqlite.filled(2)
        sqlite.store.backup(tmp_path / "copy.db")
    assert done == ["file", "name", "folder"]


def test_a_backup_touches_no_other_file(sqlite: Home, tmp_path: Path) -> None:
    """Whether it is made or refused: what lies beside it is somebody's."""
    sqlite.filled(2)
    for suffix in ("-wal", "-shm"):
        (tmp_path / f"copy.db{suffix}").write_bytes(b"mine")
    with suppress(InvalidRequest):
        sqlite.store.backup(tmp_path / "copy.db")
    for suffix in ("-wal", "-shm"):
        assert (tmp_path / f"copy.db{suffix}").read_bytes() == b"mine"


def test_a_backup_is_one_file(sqlite: Home, tmp_path: Path) -> None:
    sqlite.filled(3)
    sqlite.store.backup(tmp_path / "copy.db")
    assert strangers(sqlite) == [tmp_path / "copy.db"]


def test_a_backup_into_a_folder_that_cannot_be_synced_leaves_nothing(
    sqlite: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unavailable is raised, but the copy is there."""
    sqlite.filled(3)
    sync = fs.sync

    def fail(path: Path) -> None:
        if path == tmp_path:
            raise OSError("injected")
        sync(path)

    monkeypatch.setattr(fs, "sync", fail)
    with pytest.raises(Unavailable):
        sqlite.store.backup(tmp_path / "copy.db")
    assert strangers(sqlite) == []
