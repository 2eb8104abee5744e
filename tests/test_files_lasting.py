"""Stores of files: what lasts where others did without the disk, or did not come to their end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import holdfast
from holdfast import clock
from holdfast.backends import disk
from holdfast.errors import Corrupt
from tests.home import TEXT


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


def soft_at(path: Path) -> holdfast.Store:
    return holdfast.open(f"files:{path}", durability="normal")


def test_a_gc_that_did_not_come_to_its_end_leaves_no_plan_behind(path: Path) -> None:
    """What it took for garbage may be needed by the time the next one comes."""
    source, store = holdfast.open("memory:"), soft_at(path)
    session = source.session("s")
    session.save({"log": [f"{n} {TEXT}" for n in range(200)]})
    session.fork("fork").append("log", "its own")
    store.session("x").save({"log": [f"{n} {TEXT}" for n in range(300)]})
    store.session("x").save({"n": 1})
    source.copy(store, sessions=["s"])
    session.save({"log": session.load()["log"][-60:]})
    session.delete("@~1")
    source.copy(store, sessions=["s"])

    def interrupt(phase: str, done: int, _: int) -> None:
        if phase == "data" and done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.gc(interrupt)
    session.undo()
    session.undo()
    assert not source.copy(store).skipped
    store.session("x").delete("@~1")
    assert store.gc().rows
    with soft_at(path) as again:
        assert again.verify(read_data=True).ok
        assert again.session("fork").load() == source.session("fork").load()


@pytest.mark.parametrize("which", ["log.jsonl", "streams/2.jsonl"])
def test_a_file_that_another_has_put_there_gets_its_name_synced(
    path: Path, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever that was may have been killed before; then a power loss would bring the old one."""
    store = holdfast.open(f"files:{path}")
    session = store.session("s")
    session.save({"log": [f"{n} {TEXT}" for n in range(9)]})
    session.append("log", TEXT)
    file = path / "sessions" / "s" / which
    synced: list[str] = []
    sync = disk.sync

    def noting(place: Path | str) -> None:
        synced.append(str(place))
        sync(place)

    monkeypatch.setattr(disk, "sync", noting)
    session.append("log", TEXT)
    assert str(file.parent) not in synced
    (path / "draft").write_bytes(file.read_bytes())
    os.replace(path / "draft", file)
    session.append("log", TEXT)
    assert str(file.parent) in synced


def test_who_syncs_also_syncs_what_others_did_not(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    soft, full = soft_at(path), holdfast.open(f"files:{path}")
    mark, sync, told = path / "sessions" / "s" / "soft", os.sync, list[bool]()

    def telling() -> None:
        told.append(mark.exists())
        sync()

    monkeypatch.setattr(os, "sync", telling)
    blob = "b" * 20_000
    for n, durable in enumerate([False, True, True, False, False, True]):
        store = full if durable else soft
        store.session("s").save({"log": [TEXT] * (n + 9), "blob": blob})
        assert mark.exists() is not durable
    assert told == [True, True]
    soft.session("s").append("log", TEXT)
    full.session("s").fork("fork")
    assert told == [True, True, True]
    assert not (path / "sessions" / "fork" / "soft").exists()
    soft.session("other").save({"blob": blob[1:]})
    synced = list[str]()
    monkeypatch.setattr(disk, "sync", lambda place: synced.append(str(place)))
    full.session("another").save({"blob": blob[1:]})
    assert any(place.endswith(".json") and "blobs" in place for place in synced)


def test_what_was_not_synced_is_not_missed_after_a_power_loss(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hint of how long the log was may have come further than the log."""
    with soft_at(path) as store:
        for n in range(3):
            store.session("s").save({"n": n})
    log = path / "sessions" / "s" / "log.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:-1]))
    with soft_at(path) as store, pytest.raises(Corrupt):
        store.session("s").load()
    monkeypatch.setattr(clock, "boot_id", lambda: "another")
    with soft_at(path) as store:
        assert store.session("s").load() == {"n": 1}
        assert store.session("s").save({"n": 2}).step == 3
    with holdfast.open(f"files:{path}") as store:
        store.session("s").save({"n": 3})
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:-1]))
    with soft_at(path) as store, pytest.raises(Corrupt):
        store.session("s").load()
