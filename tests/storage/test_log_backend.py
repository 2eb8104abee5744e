"""The backend of docs/writing_a_backend.md passes the tests that every backend has to pass."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.log_backend import Changes, LogBackend

import holdfast
from holdfast.storage import fs
from holdfast.storage.contract import Backend, StaleHead
from holdfast.testing import BackendContract, StoreContract


class TestLogBackend(BackendContract):
    def make_backend(self, folder: Path) -> Backend:
        return LogBackend(folder / "log")

    def backup_path(self, folder: Path) -> Path:
        return folder / "log"


class TestLogStore(StoreContract):
    def open_store(self, folder: Path) -> holdfast.Store:
        return holdfast.Store(LogBackend(folder / "log"))


def test_a_line_that_was_not_finished_was_not_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with holdfast.Store(LogBackend(path)) as store:
        store.session("s").save({"n": 1})
        before = path.read_bytes()
        store.session("s").save({"n": 2})
    data = path.read_bytes()
    for size in range(len(before), len(data), 97):
        path.write_bytes(data[:size])
        with holdfast.Store(LogBackend(path)) as store:
            assert store.session("s").load() == {"n": 1}
            store.session("s").save({"n": 3})
        with holdfast.Store(LogBackend(path)) as store:
            assert store.session("s").load() == {"n": 3}


def test_a_damaged_line_is_never_read(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with holdfast.Store(LogBackend(path)) as store:
        store.session("s").save({"n": 1})
    data = path.read_bytes()
    for at in range(0, len(data), 211):
        path.write_bytes(data[:at] + bytes((data[at] ^ 1,)) + data[at + 1 :])
        with pytest.raises(holdfast.Corrupt):
            LogBackend(path)
    path.write_bytes(data)
    LogBackend(path).close()


def test_after_a_failure_of_the_disk_nothing_more_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    store = holdfast.Store(LogBackend(path))
    session = store.session("s")
    session.save({"n": 1})
    before = path.read_bytes()

    def fail(_: int) -> None:
        raise OSError(5, "injected")

    monkeypatch.setattr(fs, "sync_handle", fail)
    with pytest.raises(holdfast.Unavailable, match="injected"):
        session.save({"n": 2})
    monkeypatch.undo()
    with pytest.raises(holdfast.Unavailable, match="a write has failed"):
        session.save({"n": 3})
    assert path.read_bytes() == before
    store.close()
    with holdfast.Store(LogBackend(path)) as store:
        assert store.session("s").load() == {"n": 1}


def test_a_store_on_it_has_a_kind_and_no_address(tmp_path: Path) -> None:
    with holdfast.Store(LogBackend(tmp_path / "log")) as store:
        assert (store.kind, store.address) == ("log", None)


def test_one_backend_at_a_time_has_the_log(tmp_path: Path) -> None:
    backend = LogBackend(tmp_path / "log")
    with pytest.raises(holdfast.Unavailable):
        LogBackend(tmp_path / "log")
    backend.close()
    LogBackend(tmp_path / "log").close()


def test_mutant_that_does_not_write_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit is in the file when it returns."""

    def late(self: LogBackend, changes: Changes) -> None:
        self._now = self._now.after(changes)

    monkeypatch.setattr(LogBackend, "_write", late)
    for test in (
        TestLogBackend().test_every_row_survives_reopening,
        TestLogBackend().test_a_commit_is_in_the_files_when_it_returns,
    ):
        folder = tmp_path / test.__name__
        folder.mkdir()
        with pytest.raises((AssertionError, StaleHead)):
            test(folder)
