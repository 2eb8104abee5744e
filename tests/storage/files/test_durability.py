"""Stores of files: what lasts where others did without the disk, or did not come to their end."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import clock
from holdfast.errors import Corrupt, Unavailable
from holdfast.maintenance.reachability import Reachable
from holdfast.storage import changes, fs
from holdfast.storage.contract import Batch
from holdfast.storage.files import writer
from holdfast.storage.files.reader import FilesView
from holdfast.storage.files.store_folder import StoreFolder
from tests.support.stores import TEXT


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
    sync = fs.sync

    def noting(place: Path | str) -> None:
        synced.append(str(place))
        sync(place)

    monkeypatch.setattr(fs, "sync", noting)
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
    monkeypatch.setattr(fs, "sync", lambda place: synced.append(str(place)))
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


@pytest.fixture
def unsynced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Files of sessions that get the place of others before what is in them is on the disk."""
    found, synced = list[str](), set[int]()
    fsync, replace = os.fsync, os.replace

    def syncing(handle: int) -> None:
        synced.add(os.fstat(handle).st_ino)
        fsync(handle)

    def replacing(draft: Path | str, path: Path | str) -> None:
        hint = Path(path).parent.name == "locks" or Path(path).name == "lease"
        if not hint and os.path.exists(path) and os.stat(draft).st_ino not in synced:
            found.append(Path(path).name)
        replace(draft, path)

    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(os, "replace", replacing)
    return found


def replaced_in(path: Path, before: dict[str, int]) -> set[str]:
    return {name for name, inode in inodes(path).items() if before.get(name, inode) != inode}


def inodes(path: Path) -> dict[str, int]:
    files = (path / "sessions").rglob("*.json*")
    return {str(file.relative_to(path / "sessions")): file.stat().st_ino for file in files}


def test_gc_that_does_without_the_disk_puts_nothing_at_risk(
    path: Path, unsynced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What others have synced stays so, and nothing goes before it lasts that it is freed."""
    with soft_at(path) as store:
        for n in range(10):
            with store.session("s").run() as run:
                run.step("step", int)
            store.session("s").save({"log": [f"{i} {TEXT}" for i in range(15 * n, 15 * n + 20)]})
        session = store.session("s")
        session.fork("fork")
        session.prune(holdfast.Retention(keep_last=2))
    before, unlink = inodes(path), os.unlink
    lasting: dict[int, int] = {}
    fsync, early = os.fsync, list[str]()

    def syncing(handle: int) -> None:
        fsync(handle)
        status = os.fstat(handle)
        lasting[status.st_ino] = status.st_size

    def unlinking(file: Path | str, **given: int) -> None:
        for log in (path / "sessions").glob("*/log.jsonl"):
            status = log.stat()
            if "checkpoints" in str(file) and lasting.get(status.st_ino, 0) < status.st_size:
                early.append(f"{file} before {log}")
        unlink(file, **given)

    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(os, "unlink", unlinking)
    with soft_at(path) as soft:
        soft.session("s").append("log", TEXT)
        soft.session("s").delete("@~1")
        assert soft.gc().checkpoints
    [items] = [name for name in before if "streams" in name]
    assert replaced_in(path, before) == {"s/log.jsonl", "s/journal.jsonl", items}
    assert (unsynced, early) == ([], [])


def test_who_does_without_the_disk_replaces_nothing_that_lasts(
    path: Path, unsynced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = holdfast.open("memory:")
    session = source.session("s")
    session.save({"log": [f"{n} {TEXT}" for n in range(200)]})
    soft = soft_at(path)
    source.copy(soft)
    session.save({"log": session.load()["log"][-60:]})
    session.delete("@~1")
    source.copy(soft)
    soft.gc()
    before, write = inodes(path), fs.write_all

    def failing(handle: int, data: bytes, at: int) -> None:
        write(handle, data, at)
        if b'"rename"' in data:
            raise OSError(errno.EIO, "injected")

    session.undo()
    source.copy(soft)  # items among those that are there
    with monkeypatch.context() as patch, pytest.raises(Unavailable):
        patch.setattr(fs, "write_all", failing)
        soft.session("s").delete()  # announced, and its line taken back
    assert soft.session("s").load() == session.load()
    [items] = [name for name in before if "streams" in name]
    assert replaced_in(path, before) == {"s/log.jsonl", "s/session.json", items}
    assert unsynced == []


# -- what a save has left that did not come to its end ---------------------------------------------


@contextmanager
def cut_short() -> Iterator[list[Batch]]:
    """Saves do not write their line in the log. The list has what they would have committed."""
    cut: list[Batch] = []
    real = writer.commit

    def commit(home: StoreFolder, batch: Batch) -> None:
        cut.append(batch)
        real(home, batch)

    def killed(*_: Any) -> None:
        raise InterruptedError

    with pytest.MonkeyPatch.context() as patch, suppress(Unavailable):
        patch.setattr(writer, "commit", commit)
        patch.setattr(StoreFolder, "log", killed)
        yield cut


def items_in(path: Path, name: str = "s") -> dict[str, int]:
    files = (path / "sessions" / name / "streams").iterdir()
    return {file.name: len(file.read_bytes().splitlines()) for file in files}


@pytest.mark.parametrize("torn", [False, True])
def test_what_a_killed_save_has_left_of_streams_is_freed(path: Path, torn: bool) -> None:
    store = soft_at(path)
    session = store.session("s")
    session.save({"log": [f"{n} {TEXT}" for n in range(20)]})
    known = items_in(path)
    with cut_short():
        soft_at(path).session("s").patch(append={"log": [TEXT] * 3})
    with cut_short():
        soft_at(path).session("s").patch(set={"other": [f"{n} {TEXT}" for n in range(30)]})
    assert sorted(items_in(path).values()) == [23, 30]
    if torn:
        for file in (path / "sessions/s/streams").iterdir():
            file.write_bytes(file.read_bytes()[:-40])
    store = soft_at(path)
    store.gc()
    assert items_in(path) == known
    assert not any(store.gc())
    assert store.verify(read_data=True).ok
    store.session("s").append("log", TEXT)
    assert len(store.session("s").load()["log"]) == 21


@pytest.mark.parametrize(
    ("name", "moment"),
    [("s", "_snapshot"), ("s", "mark_all"), ("s", "trim"), ("s", "compact"),
     ("new", "_snapshot"), ("new", "mark_all"), ("new", "compact")],
)  # fmt: skip
def test_what_a_save_has_left_may_count_by_the_time_it_would_go(
    path: Path, name: str, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever was not killed tries again, and may write the same to the same places."""
    store = soft_at(path)
    store.session("s").save({"log": [f"{n} {TEXT}" for n in range(20)]})
    state = {"other": [f"{n} {TEXT}" for n in range(30)]}
    with cut_short() as cut:
        store.session(name).save(state)
    owners = {"_snapshot": FilesView, "mark_all": Reachable, "trim": changes}
    where: Any = owners.get(moment, store._repository.backend)
    real = getattr(where, moment)

    def late(*given: Any, **options: Any) -> Any:
        seen = real(*given) if moment == "_snapshot" else None
        if cut:
            store._repository.backend.commit(cut.pop())
            store.session("another").save(state)
            store.session(name).fork("fork")
        return seen or real(*given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(where, moment, late)
        store.gc()
    assert not cut
    for each in (store, soft_at(path)):
        assert each.session("another").load() == each.session("fork").load() == state
        assert each.session(name).load() == state
        assert each.verify(read_data=True).ok


def test_what_a_log_has_lost_is_kept_for_forks(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the disk, a fork may outlive the line of the checkpoint that it was forked from."""
    with soft_at(path) as store:
        session = store.session("s")
        session.save({"log": [f"{n} {TEXT}" for n in range(20)]})
        session.append("log", TEXT)
        state = session.fork("fork").load()
    log = path / "sessions/s/log.jsonl"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:-1]))
    monkeypatch.setattr(clock, "boot_id", lambda: "another")
    with soft_at(path) as store:
        assert len(store.session("s").load()["log"]) == 20
        with cut_short():
            store.session("s").patch(set={"other": [f"{n} {TEXT}" for n in range(30)]})
        assert store.gc().rows == 30
        assert store.session("fork").load() == state
