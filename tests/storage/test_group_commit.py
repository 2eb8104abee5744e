"""Group commit: whoever is interrupted, the others' saves are what they are told."""

from __future__ import annotations

import random
import threading
import time
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.errors import HoldfastError, KeyTaken
from holdfast.storage.group_commit import Group, Member
from holdfast.storage.sqlite import writer
from holdfast.storage.sqlite.backend import SqliteBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.stores import Home

COUNT = 5


class Interrupt(BaseException):
    """As KeyboardInterrupt, which only the main thread gets."""


def together(home: Home, errors: dict[str, BaseException], *, waits: bool = True) -> None:
    """Let COUNT threads save at once, in one group; or all but the first, which is interrupted."""
    backend = home.store._repository.backend
    assert isinstance(backend, SqliteBackend)
    sessions = [home.filled(1, f"s{n}") for n in range(COUNT)]
    group = backend._group

    def save(session: holdfast.Session) -> None:
        try:
            session.save({"saved": session.name})
        except BaseException as e:
            errors[session.name] = e

    threads = [threading.Thread(target=save, args=(s,)) for s in sessions]
    with held_up(group):
        threads[0].start()
        until(lambda: len(group._waiting) == 1 if waits else bool(errors))
        for thread in threads[1:]:
            thread.start()
        until(lambda: len(group._waiting) == COUNT - (not waits))
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


@contextmanager
def held_up(group: Group[Any]) -> Iterator[None]:
    """As if somebody wrote."""
    group._leader[None] = group
    try:
        yield
    finally:
        group._step_back(group)


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


def check(home: Home, errors: dict[str, BaseException], *, unknown: int) -> None:
    """All but the interrupted one were acknowledged, and are there; and saving goes on."""
    assert [type(e) for e in errors.values()] == [Interrupt] * unknown
    store = home.reopened()
    for n in range(COUNT):
        session = store.session(f"s{n}")
        assert len(session) <= 2
        if session.name not in errors:
            assert session.load() == {"saved": session.name}
        session.save({"next": n})
    assert store.verify(read_data=True).ok


@pytest.mark.parametrize("when", ["before", "within", "after"])
def test_the_writer_of_a_group_is_interrupted(
    sqlite: Home, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_many = writer.write_many
    interrupted: list[str] = []
    left_open: list[bool] = []

    def write(connection: Any, cursor: Any, changes: Any, outcomes: Any) -> None:
        if interrupted:
            left_open.append(connection.in_transaction)
            return write_many(connection, cursor, changes, outcomes)
        interrupted.append(when)
        if when == "within":
            cursor.execute("BEGIN IMMEDIATE; DELETE FROM heads")
        if when == "after":
            write_many(connection, cursor, changes, outcomes)
        raise Interrupt

    monkeypatch.setattr(writer, "write_many", write)
    errors: dict[str, BaseException] = {}
    together(sqlite, errors)
    assert interrupted
    assert not any(left_open)
    check(sqlite, errors, unknown=1)


def test_a_failed_commit_is_never_taken_for_a_success(
    sqlite: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error leaves no transaction behind either, and all outcomes are known by then."""
    write_many = writer.write_many

    def write(connection: Any, cursor: Any, changes: Any, outcomes: Any) -> None:
        with suppress(Interrupt):
            write_many(connection, Stopped(cursor), changes, outcomes)  # type: ignore[arg-type]
        cursor.execute("ROLLBACK")
        raise OSError("the disk is gone")

    monkeypatch.setattr(writer, "write_many", write)
    errors: dict[str, BaseException] = {}
    together(sqlite, errors)
    check(sqlite, errors, unknown=0)


class Stopped:
    """A cursor that does not commit."""

    def __init__(self, cursor: Any) -> None:
        self._cursor = cursor

    def execute(self, sql: str, *bindings: Any) -> Any:
        if sql == "COMMIT":
            raise Interrupt
        return self._cursor.execute(sql, *bindings)


@pytest.mark.parametrize("woken", [False, True])
def test_one_that_waits_is_interrupted(
    sqlite: Home, woken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it was its turn to write: then it is the next one's."""
    backend = sqlite.store._repository.backend
    assert isinstance(backend, SqliteBackend)
    group, begin, first = backend._group, Member.__init__, list[Member]()

    class Interrupting:
        def __init__(self) -> None:
            self.called = threading.Event()

        def acquire(self, timeout: float) -> bool:
            if woken:
                assert self.called.wait(20)
            raise Interrupt

        def release(self) -> None:
            self.called.set()

    def interrupted(self: Member, change: Any) -> None:
        begin(self, change)
        if not first and group._leader:
            first.append(self)
            self.wake = Interrupting()  # type: ignore[assignment]

    monkeypatch.setattr(Member, "__init__", interrupted)
    errors: dict[str, BaseException] = {}
    together(sqlite, errors, waits=woken)
    check(sqlite, errors, unknown=1)


def test_many_groups_with_many_interruptions() -> None:
    """Nobody waits for ever, and what was acknowledged was written once."""
    written: list[Any] = []
    rng = random.Random(1)

    def write(members: list[Member]) -> None:
        time.sleep(rng.choice([0, 0.0005]))
        if rng.random() < 0.1:
            raise Interrupt
        for member in members:
            written.append(member.change)
            member.finish()
        if rng.random() < 0.1:
            raise Interrupt

    group = Group(write)
    told: list[Any] = []

    def save(worker: int) -> None:
        for n in range(200):
            with suppress(Interrupt):
                group.join((worker, n))
                told.append((worker, n))

    threads = [threading.Thread(target=save, args=(n,), daemon=True) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert len(written) == len(set(written))
    assert set(told) <= set(written)


@pytest.mark.parametrize("overtaking", [False, True])
def test_those_who_wait_are_written_together(
    sqlite: Home, overtaking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is waited for once for many: far fewer times than there are saves."""
    backend, saves, commits = sqlite.store._repository.backend, 10, list[int]()
    assert isinstance(backend, SqliteBackend)
    write_many, write_one = backend._write_many, backend._write_one

    def write(members: list[Member]) -> None:
        commits.append(len(members))
        time.sleep(0.003)
        write_many(members)

    def write_alone(change: Any) -> None:
        commits.append(1)
        time.sleep(0.003)
        write_one(change)

    def commit(change: Any) -> None:
        if backend._group._leader:
            join(change)
        else:
            with backend._group.lock:  # the mutant: whoever waits for the lock writes alone
                write_alone(change)

    join = backend._group.join
    sessions = [sqlite.filled(1, f"s{n}") for n in range(16)]
    monkeypatch.setattr(backend._group, "_write", write)
    monkeypatch.setattr(backend._group, "_write_one", write_alone)
    if overtaking:
        monkeypatch.setattr(backend._group, "join", commit)

    def work(session: holdfast.Session) -> None:
        for n in range(saves):
            session.save({"n": n})

    threads = [threading.Thread(target=work, args=(s,)) for s in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert sum(commits) == 16 * saves
    assert (len(commits) <= 4 * saves) is not overtaking


@pytest.mark.parametrize("why", ["taken", "failing"])
def test_one_of_a_group_fails_alone(sqlite: Home, why: str) -> None:
    """Saves of many threads share a commit; each is told what became of its own."""
    sessions = [sqlite.session(f"s{n}") for n in range(6)]
    for n, session in enumerate(sessions):
        session.save({"begun": n}, key="k")
    backend = sqlite.store._repository.backend
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
