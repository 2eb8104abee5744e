"""The log is written back off the path of a save, and whatever happens there, no save fails."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import apsw
import pytest

import holdfast
from holdfast.storage.sqlite import wal
from holdfast.storage.sqlite.backend import SqliteBackend
from holdfast.storage.sqlite.wal import Checkpointer

if TYPE_CHECKING:
    from collections.abc import Iterator


def fill(session: holdfast.Session, count: int = 60) -> None:
    for n in range(count):
        session.append("log", f"{n} " + "x" * 3_000)


def test_a_thread_writes_it_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wal, "_PAGES", 20)
    where: set[str] = set()
    real = Checkpointer._run

    def run(self: Checkpointer) -> None:
        where.add(threading.current_thread().name)
        real(self)

    monkeypatch.setattr(Checkpointer, "_run", run)
    path = tmp_path / "store.db"
    with holdfast.open(path) as store:
        empty = path.stat().st_size
        fill(store.session("s"))
        while path.stat().st_size == empty:
            time.sleep(0.001)
        fill(store.session("s"))
        assert len(store.session("s").load()["log"]) == 120
    assert where == {"holdfast checkpointer"}
    assert not [t for t in threading.enumerate() if t.name == "holdfast checkpointer"]


@pytest.mark.parametrize("how", ["no thread", "no connection", "busy"])
def test_its_failure_fails_no_save(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise {"no thread": RuntimeError, "no connection": OSError, "busy": apsw.BusyError}[how](
            how
        )

    with holdfast.open(tmp_path / "store.db") as store:
        monkeypatch.setattr(wal, "_PAGES", 5)
        if how == "no thread":
            monkeypatch.setattr(threading.Thread, "start", fail)
        elif how == "no connection":
            monkeypatch.setattr(store._repository.backend._checkpointer, "_connect", fail)  # type: ignore[attr-defined]
        else:
            monkeypatch.setattr(wal, "_TOO_MANY", 5)
            monkeypatch.setattr(Checkpointer, "_ask", fail)
        session = store.session("s")
        fill(session, 20)
        assert len(session.load()["log"]) == 20
        monkeypatch.undo()


def test_the_writer_does_it_if_the_thread_does_not_keep_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wal, "_PAGES", 5)
    monkeypatch.setattr(wal, "_TOO_MANY", 10)
    path = tmp_path / "store.db"
    with holdfast.open(path) as store:
        before = path.stat().st_size
        fill(store.session("s"))
        assert path.stat().st_size > before
        assert store.verify().ok


def rounds(path: Path) -> bytes:
    """How often the log was begun anew."""
    return Path(f"{path}-wal").read_bytes()[12:16]


@pytest.mark.parametrize("mutant", [False, True])
def test_the_log_begins_anew_although_savers_go_on(
    tmp_path: Path, mutant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save between the two passes does not keep the log from being all written back."""
    path = tmp_path / "store.db"
    with holdfast.open(path) as store:
        session, backend = store.session("s"), store._repository.backend
        assert isinstance(backend, SqliteBackend)
        fill(session)

        @contextmanager
        def after_a_save() -> Iterator[None]:
            session.append("log", "while the log was written back")
            if mutant:
                raise apsw.BusyError  # and there is no second pass
            with backend._alone():
                yield

        connection = backend._connect()
        monkeypatch.setattr(backend._checkpointer, "_alone", after_a_save)
        with suppress(apsw.BusyError):
            backend._checkpointer._write_back(connection)
        connection.close()
        before = rounds(path)
        session.append("log", "the next one")
        assert (rounds(path) == before) is mutant
