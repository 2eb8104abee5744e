"""PostgreSQL: what several threads save together has an outcome for each of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from urllib.parse import quote, urlsplit

import psycopg
import pytest

import holdfast
from holdfast.errors import Corrupt, HeadMoved
from holdfast.format.item_streams import RowWrite
from holdfast.storage.changes import Change
from holdfast.storage.contract import StaleHead
from holdfast.storage.group_commit import Member
from holdfast.storage.postgres import backend as postgres_backend
from holdfast.storage.postgres import writer
from holdfast.storage.postgres.backend import PostgresBackend
from holdfast.storage.postgres.connection import Link
from holdfast.storage.reader import open_reader
from holdfast.storage.rows import CheckpointRef, CheckpointRow, NameRow
from tests.faults.postgres_proxy import Proxy
from tests.storage.test_group_commit import held_up, until
from tests.support import postgres

COUNT = 5
BEFORE: list[Any] = [{"n": n, "text": "x" * 500} for n in range(2)]


SHOW = "SHOW synchronous_standby_names"


class Interrupt(BaseException):
    """As KeyboardInterrupt, which only the main thread gets."""


@pytest.fixture
def schema() -> Iterator[str]:
    with postgres.schema() as name:
        yield name


@pytest.fixture
def url(schema: str) -> str:
    return f"{postgres.server_url()}?schema={quote(schema)}"


@pytest.fixture
def store(url: str) -> Iterator[holdfast.Store]:
    with holdfast.open(url, create=True, durability="normal") as store:
        yield store


@pytest.fixture(autouse=True)
def one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that those who act at once are in it."""
    monkeypatch.setattr(postgres_backend, "_GROUPS", 1)


@pytest.fixture
def sessions(store: holdfast.Store) -> list[holdfast.Session]:
    """With handles whose next append is one of those that are made together."""
    made = [store.session(f"s{n}") for n in range(COUNT)]
    for session in made:
        session.save({"log": BEFORE[:1]})
        session.append("log", BEFORE[1])
    return made


def backend_of(store: holdfast.Store) -> PostgresBackend:
    assert isinstance(store._repository.backend, PostgresBackend)
    return store._repository.backend


class Watched:
    """Counts groups, and who went on alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.groups: list[int] = []
        self.alone: list[int] = []
        write, alone = writer.write_many, PostgresBackend._write_alone

        def group(link: Link, changes: Any) -> set[int]:
            self.groups.append(len(changes))
            return write(link, changes)

        def single(backend: PostgresBackend, batch: Any, *more: Any) -> None:
            self.alone.append(writer.session_of(batch))
            alone(backend, batch, *more)

        monkeypatch.setattr(writer, "write_many", group)
        monkeypatch.setattr(PostgresBackend, "_write_alone", single)


@pytest.fixture
def watched(sessions: list[holdfast.Session], monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


@contextmanager
def together(
    store: holdfast.Store, acts: list[Callable[[], Any]]
) -> Iterator[dict[int, BaseException]]:
    """Let threads act at once, in one group, the first of them writing; and wait for them."""
    group = backend_of(store)._groups[0]
    errors: dict[int, BaseException] = {}

    def run(n: int) -> None:
        try:
            acts[n]()
        except BaseException as e:
            errors[n] = e

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(len(acts))]
    with held_up(group):
        for n, thread in enumerate(threads, start=1):
            thread.start()
            until(lambda n=n: len(group._waiting) == n)  # type: ignore[misc]
    yield errors
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def appends(sessions: list[holdfast.Session]) -> list[Callable[[], Any]]:
    return [partial(s.append, "log", {"n": 2}) for s in sessions]


def check(store: holdfast.Store, logs: dict[str, list[Any]]) -> None:
    """Each session has what it should, once; and all handles go on."""
    for name, log in logs.items():
        session = store.session(name)
        assert session.load() == {"log": [*BEFORE, *log]}
        assert len(session) == 2 + len(log)
        session.append("log", "more")
    assert store.verify(read_data=True).ok


def test_one_statement_for_all(
    store: holdfast.Store, sessions: list[holdfast.Session], watched: Watched
) -> None:
    with together(store, appends(sessions)) as errors:
        pass
    assert not errors
    assert (watched.groups, watched.alone) == ([COUNT], [])
    check(store, {s.name: [{"n": 2}] for s in sessions})


def test_a_conflict_is_of_one_alone(
    store: holdfast.Store, sessions: list[holdfast.Session], watched: Watched, url: str
) -> None:
    with holdfast.open(url) as other:
        other.session("s2").append("log", "theirs")
    with together(store, appends(sessions)) as errors:
        pass
    assert {n: type(e) for n, e in errors.items()} == {2: HeadMoved}
    assert watched.groups == [COUNT]
    assert watched.alone == [sessions[2]._writer.number]
    logs: dict[str, list[Any]] = {s.name: [{"n": 2}] for s in sessions}
    check(store, logs | {"s2": ["theirs"]})


def test_two_of_one_session(
    store: holdfast.Store, sessions: list[holdfast.Session], watched: Watched
) -> None:
    twin = store.session("s0")
    twin._writer.growth = sessions[0]._writer.growth  # what it would know after an append
    with together(store, appends([*sessions, twin])) as errors:
        pass
    assert {n: type(e) for n, e in errors.items()} == {COUNT: HeadMoved}
    assert watched.groups == [COUNT]
    check(store, {s.name: [{"n": 2}] for s in sessions})


def test_a_head_that_is_held_makes_nobody_else_wait(
    store: holdfast.Store, sessions: list[holdfast.Session], watched: Watched, schema: str
) -> None:
    held = sessions[3]._writer.number
    with together(store, appends(sessions)) as errors:
        pass
    with postgres.admin(search=schema) as link:
        with link.transaction():
            link.execute("SELECT 1 FROM heads WHERE session = %s FOR UPDATE", (held,))
            with together(store, appends(sessions)) as errors:
                until(lambda: watched.alone == [held])
                until(lambda: [len(s) for s in sessions] == [4, 4, 4, 3, 4])
                link.execute("SELECT pg_sleep(0.3)")
                assert watched.alone == [held]
                link.execute("COMMIT")
        assert not errors
    assert watched.groups == [COUNT, COUNT]
    check(store, {s.name: [{"n": 2}] * 2 for s in sessions})


def test_alone_one_does_not_hold_up_the_group_for_long(
    store: holdfast.Store, sessions: list[holdfast.Session], watched: Watched, schema: str
) -> None:
    held, group = sessions[0]._writer.number, backend_of(store)._groups[0]
    with postgres.admin(search=schema) as link:
        with link.transaction():
            link.execute("SELECT 1 FROM heads WHERE session = %s FOR UPDATE", (held,))
            with together(store, appends(sessions[:1])) as errors:
                until(lambda: group.lock.locked() and not group._waiting)
                started = time.monotonic()
                sessions[1].append("log", {"n": 2})
                assert time.monotonic() - started < 3  # a lock is waited for for 7.5 seconds
                until(lambda: watched.alone == [held])
                link.execute("COMMIT")
        assert not errors
    check(store, {s.name: [{"n": 2}] for s in sessions[:2]})


def test_a_row_in_the_way_is_the_trouble_of_one(store: holdfast.Store, watched: Watched) -> None:
    backend = store._repository.backend
    first = backend.reserve("session", COUNT)
    stream = backend.reserve("stream", COUNT)
    for n in range(COUNT):
        backend.commit(
            Change(
                first + n,
                b"",
                b"h1",
                NameRow(b"%d" % n, b"r"),
                CheckpointRow(1, bytes([n] * 15), b"c"),
            ).batch()
        )
    backend.commit(
        Change(first, b"h1", b"h1", rows=[RowWrite(stream + 1, 0, 0, b"in the way")]).batch()
    )
    changes = [
        Change(first + n, b"h1", b"h2", None, CheckpointRow(2, bytes([n + COUNT] * 15), b"c"),
               [RowWrite(stream + n, 0, 0, b"row")], parent=CheckpointRef(1, bytes([n] * 15)))
        for n in range(COUNT)
    ]  # fmt: skip
    watched.alone.clear()
    with together(store, [partial(backend.commit, change.batch()) for change in changes]) as errors:
        pass
    assert {n: type(e) for n, e in errors.items()} == {1: Corrupt}
    assert sorted(watched.alone) == [*range(first, first + COUNT)]
    with open_reader(backend) as reader:
        heads = [reader.head(first + n) for n in range(COUNT)]
    assert heads == [b"h2", b"h1", b"h2", b"h2", b"h2"]


# -- unknown outcomes ------------------------------------------------------------------------------


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("error", [psycopg.OperationalError("cut"), Interrupt()])
def test_the_connection_breaks_or_the_writer_is_interrupted(
    store: holdfast.Store,
    sessions: list[holdfast.Session],
    monkeypatch: pytest.MonkeyPatch,
    made: bool,
    error: BaseException,
) -> None:
    """Before the statement or after it: the others find out what became of their own."""
    real, cut = writer.write_many, list[bool]()

    def write(link: Link, changes: Any) -> set[int]:
        if made:
            real(link, changes)
        if isinstance(error, psycopg.Error):
            link.close()
        cut.append(True)
        raise error

    monkeypatch.setattr(writer, "write_many", write)
    with together(store, appends(sessions)) as errors:
        pass
    assert cut == [True]
    logs: dict[str, list[Any]] = {s.name: [{"n": 2}] for s in sessions}
    if isinstance(error, Interrupt):
        assert errors == {0: error}
        logs["s0"] = [{"n": 2}] if made else []
    else:
        assert not errors
    check(store, logs)


def test_ours_was_made_and_another_followed(
    store: holdfast.Store,
    sessions: list[holdfast.Session],
    monkeypatch: pytest.MonkeyPatch,
    url: str,
) -> None:
    real = writer.write_many

    def write(link: Link, changes: Any) -> set[int]:
        real(link, changes)
        with holdfast.open(url) as other:
            other.session("s1").append("log", "theirs")
        raise psycopg.OperationalError("the connection was cut")

    monkeypatch.setattr(writer, "write_many", write)
    with together(store, appends(sessions)) as errors:
        pass
    assert not errors
    logs: dict[str, list[Any]] = {s.name: [{"n": 2}] for s in sessions}
    check(store, logs | {"s1": [{"n": 2}, "theirs"]})


def test_what_only_the_server_has_is_no_success() -> None:
    """It is told to wait for a standby, which is not there, and is ended or canceled as it does."""
    server = postgres.Server(*postgres.QUICK)
    try:
        with holdfast.open(server.url, create=True, timeout=2.0) as store:
            session = store.session("s")
            session.save({"log": BEFORE})
            with postgres.admin(server.url) as link:
                link.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
                link.execute("SELECT pg_reload_conf()")
                until(lambda: link.execute(SHOW).fetchall() == [("nobody",)])
                time.sleep(0.3)  # the other connections hear of it, too
            for n, how in enumerate(("pg_terminate_backend", "pg_cancel_backend"), start=2):
                waiting = done_while_they_wait(server.url, how)
                with pytest.raises(holdfast.Unavailable) as caught, waiting:
                    session.append("log", {"n": n})
                assert "may have been made" in str(caught.value.hint)
                session = store.session("s")
                assert session.load()["log"][-1] == {"n": n}
    finally:
        server.stop()


@contextmanager
def done_while_they_wait(url: str, how: str) -> Iterator[None]:
    """To what waits for a standby, again and again."""
    stopped = threading.Event()

    def run() -> None:
        with postgres.admin(url) as link:
            while not stopped.wait(0.05):
                link.execute(
                    f"SELECT {how}(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'".encode()
                )

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


@pytest.mark.parametrize("groups", [1, 3])
def test_many_threads_on_a_lossy_line(
    store: holdfast.Store, url: str, monkeypatch: pytest.MonkeyPatch, groups: int
) -> None:
    """Rows that replace others among them, and questions that arrive when nobody expects them."""
    monkeypatch.setattr(postgres_backend, "_GROUPS", groups)
    port = urlsplit(url).port
    assert port is not None
    count, each = 8, 60
    told: set[tuple[int, int]] = set()
    unsure: set[tuple[int, int]] = set()
    with Proxy(port, every=25) as proxy:
        lossy = url.replace(f":{port}/", f":{proxy.port}/")
        with holdfast.open(lossy, timeout=6.0, durability="normal") as other:
            sizes: list[int] = []
            for group in backend_of(other)._groups:

                def counted(members: list[Member], write: Any = group._write) -> None:
                    sizes.append(len(members))
                    write(members)

                group._write = counted

            def work(n: int) -> None:
                session = other.session(f"s{n}")
                for k in range(each):
                    item = {"n": n, "k": k, "text": "x" * (k % 5 * 200)}
                    try:
                        session.append("log", item)
                        told.add((n, k))
                    except (holdfast.Unavailable, holdfast.HeadMoved):
                        unsure.add((n, k))
                        session = reopened(other, session.name)

            threads = [threading.Thread(target=work, args=(n,)) for n in range(count)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert sum(count for fate, count in proxy.fates.items() if fate) > 5
    assert max(sizes) > 1
    made = []
    for n in range(count):
        session = store.session(f"s{n}")
        log = session.load()["log"]
        assert len(session) == len(log)
        made += [(item["n"], item["k"]) for item in log]
    assert len(made) == len(set(made))
    assert told <= set(made) <= told | unsure
    assert len(told) > count * each / 2
    assert store.verify(read_data=True).ok


def reopened(store: holdfast.Store, name: str) -> holdfast.Session:
    """A handle that expects what is there now; on a lossy line that may take several tries."""
    end = time.monotonic() + 20
    while True:
        try:
            return store.session(name)
        except holdfast.Unavailable:
            assert time.monotonic() < end


def test_closed_while_one_waits_to_write(sessions: list[holdfast.Session], url: str) -> None:
    other = holdfast.open(url, durability="normal")
    session = other.session("s0")
    session.append("log", BEFORE[1])
    connections = backend_of(other)._connections
    failed: list[BaseException] = []

    def append() -> None:
        try:
            session.append("log", BEFORE[1])
        except holdfast.InvalidRequest as e:
            failed.append(e)

    with connections.saver.lend(time.monotonic() + 5):
        threads = [threading.Thread(target=append)]
        threads[0].start()
        until(backend_of(other)._groups[0].lock.locked)
        threads.append(threading.Thread(target=other.close))
        threads[1].start()
        until(lambda: connections._closed)
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert len(failed) == 1
    assert not connections.saver._idle
    assert not connections.side._idle


def test_a_parent_that_was_forgotten_is_nobodys_base(store: holdfast.Store) -> None:
    """As after a crash of the server: another has the number of the one that is built on."""
    backend = store._repository.backend
    session, stream = backend.reserve("session", 1), backend.reserve("stream", 2)
    backend.commit(
        Change(
            session, b"", b"h1", NameRow(b"s", b"r"), CheckpointRow(1, b"other" * 3, b"c")
        ).batch()
    )
    rows = [RowWrite(stream, 0, 0, b"row")]
    for known in ([*rows], [*rows, RowWrite(stream + 1, 0, 0, b"row")]):
        change = Change(session, b"h1", b"h2", None, CheckpointRow(2, bytes(15), b"c"), known)
        change.parent = CheckpointRef(1, b"mine!" * 3)
        with pytest.raises(StaleHead):
            backend.commit(change.batch())
    change.parent = CheckpointRef(1, b"other" * 3)
    backend.commit(change.batch())
    with open_reader(backend) as reader:
        assert reader.head(session) == b"h2"
