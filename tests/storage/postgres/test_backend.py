"""What is PostgreSQL's own: opening, connections, statements, names of any length, waking."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any
from urllib.parse import quote

import psycopg
import pytest
from psycopg import sql

import holdfast
from holdfast.errors import (
    Corrupt,
    InvalidRequest,
    KeyTaken,
    StoreNotFound,
    Unavailable,
    UnsupportedFormat,
)
from holdfast.format import records
from holdfast.format.item_streams import RowWrite
from holdfast.format.records import IndexTerm
from holdfast.history.watch import Watcher
from holdfast.storage.changes import Change, Notes
from holdfast.storage.contract import Batch, MissingReference, StaleHead
from holdfast.storage.postgres import connection, notify, writer
from holdfast.storage.postgres import schema as postgres_schema
from holdfast.storage.postgres.backend import PostgresBackend
from holdfast.storage.postgres.connection import Link, Target, Unconfirmed, is_cut
from holdfast.storage.postgres.pool import Pool
from holdfast.storage.postgres.reader import PostgresView
from holdfast.storage.reader import Reader, open_reader
from holdfast.storage.rows import (
    Address,
    BlobWrite,
    CheckpointRow,
    KeyRow,
    MarkRow,
    NameRow,
    TombstoneRow,
)
from tests.support import postgres


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


def backend_of(store: holdfast.Store) -> PostgresBackend:
    assert isinstance(store._repository.backend, PostgresBackend)
    return store._repository.backend


def terminate(schema: str) -> int:
    """End every connection to a store, as a restart of the server or a proxy would."""
    with postgres.admin() as link:
        done = link.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name = 'holdfast'"
        ).fetchall()
        return len(done)


# -- opening ---------------------------------------------------------------------------------------


def test_a_missing_store_is_made_only_when_asked(schema: str) -> None:
    fresh = f"{schema} fresh"
    for create in (None, False):
        with pytest.raises(StoreNotFound, match="create=True"):
            holdfast.open(postgres.server_url(), schema=fresh, create=create)
    with pytest.raises(StoreNotFound):
        holdfast.open(postgres.server_url(), schema=fresh, create=True, read_only=True)
    try:
        holdfast.open(postgres.server_url(), schema=fresh, create=True).close()
        with holdfast.open(postgres.server_url(), schema=fresh) as store:
            store.session("s").save({})
        with holdfast.open(postgres.server_url(), schema=fresh, create=True) as store:
            assert store.session("s").step == 1
    finally:
        with postgres.admin() as link:
            link.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(fresh)))


@pytest.mark.parametrize("name", ["a \"b\" 'c'", "Üñí", "a;b--", "%s %(x)s", "x" * 63])
def test_a_schema_of_any_name(name: str) -> None:
    try:
        with holdfast.open(postgres.server_url(), schema=name, create=True) as store:
            store.session("s").save({"log": ["x" * 2000]})
            store.gc()
            store.repair()
        with holdfast.open(f"{postgres.server_url()}?schema={quote(name)}") as store:
            assert store.session("s").load() == {"log": ["x" * 2000]}
    finally:
        with postgres.admin() as link:
            link.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(name)))


@pytest.mark.parametrize("options", [
    {"schema": ""}, {"schema": "x" * 64}, {"schema": "a\0b"}, {"schema": 7}, {"schema": "pg_own"},
    {"schema": "a\ud800"}, {"pool_size": 0}, {"pool_size": "8"},
])  # fmt: skip
def test_options_that_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        holdfast.open(postgres.server_url(), create=True, **options)


@pytest.mark.parametrize("timeout", [float("inf"), float("nan"), -1, 1e12, "5", None])
def test_waits_that_are_refused(timeout: Any, tmp_path: Any) -> None:
    for url in (postgres.server_url(), f"files:{tmp_path}/s", tmp_path / "store.db", "memory:"):
        with pytest.raises(InvalidRequest, match="timeout"):
            holdfast.open(url, create=True, timeout=timeout)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("option", [{"schema": "s"}, {"pool_size": 3}])
def test_options_are_for_postgresql_alone(option: dict[str, Any], tmp_path: Any) -> None:
    for url in ("memory:", tmp_path / "store.db"):
        with pytest.raises(InvalidRequest, match="PostgreSQL"):
            holdfast.open(url, **option)


def test_read_only(store: holdfast.Store, url: str) -> None:
    store.session("s").save({"n": 1})
    with holdfast.open(url, read_only=True) as other:
        assert other.session("s").load() == {"n": 1}
        for act in (lambda: other.session("s").save({}), other.gc):
            with pytest.raises(Unavailable, match="read-only"):
                act()
        link = backend_of(other)._target.connect()
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
            link.execute("DELETE FROM heads")
        link.close()


def test_a_store_that_lost_a_table_is_damaged(store: holdfast.Store, schema: str, url: str) -> None:
    session = store.session("s")
    session.save({})
    with postgres.admin(search=schema) as link:
        link.execute("DROP TABLE marks")
    for create in (None, True):
        with pytest.raises(Corrupt, match="marks"):
            holdfast.open(url, create=create)
    assert session.head is not None
    assert "marks" in str(session.head.damaged)
    with pytest.raises(Corrupt, match="marks"):  # and not that the transaction has ended
        session.tag("@", "x")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ("UPDATE format SET version = 3", UnsupportedFormat),
        ("UPDATE format SET version = 0", Corrupt),
        ("DELETE FROM format", Corrupt),
        ("DROP TABLE format", Corrupt),
        ("DROP INDEX forks", Corrupt),
    ],
)
def test_another_format(
    store: holdfast.Store, schema: str, url: str, change: str, error: type[Exception]
) -> None:
    with postgres.admin(search=schema) as link:
        link.execute(change.encode())
        with pytest.raises(error):
            holdfast.open(url, create=True)
        link.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(schema)))


def test_a_store_of_version_1_is_read_as_it_is_and_upgraded_by_a_writer(
    store: holdfast.Store, schema: str, url: str
) -> None:
    session = store.session("s")
    session.save({"n": 1}, label="l", tags=["t"])
    session.save({"n": 2})
    session.tag("@", "u")
    session.delete("l")
    store.session("other").save({})
    with store.session("run").run() as run:
        run.step("model", lambda: 1)
        run.wait_for("approval")
    store.close()
    tables = (
        "SELECT * FROM tallies WHERE (marks, operations, tombs) <> (0, 0, 0) OR lease IS NOT NULL"
    )
    with postgres.admin(search=schema) as link:
        before = [sorted(link.execute(q).fetchall()) for q in (tables, "SELECT * FROM spans")]
        link.execute("DROP TABLE tallies; DROP TABLE spans; UPDATE format SET version = 1")
    with holdfast.open(url, read_only=True) as reading:
        assert reading.verify(read_data=True).ok
        assert [p.key for p in reading.pending()] == ["approval"]
        assert [a.session for a in reading.abandoned(halted=True)] == ["run"]
    with holdfast.open(url) as writing:
        assert writing.verify(read_data=True).ok
        with postgres.admin(search=schema) as link:
            after = [sorted(link.execute(q).fetchall()) for q in (tables, "SELECT * FROM spans")]
        assert after == before
        assert all(before)
        writing.session("run").answer("approval", True)
        with writing.session("run").run() as run:
            assert run.wait_for("approval") is True
        assert writing.verify(read_data=True).ok


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "holdfast.storage.postgres.backend")
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(InvalidRequest, match=r"holdfast\[postgres\]"):
        holdfast.open("postgresql://localhost/x")


@pytest.mark.parametrize("shared", [False, True])
def test_a_pooler_by_transaction_is_refused(
    url: str, store: holdfast.Store, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """Behind a pooler, a connection's process is not the one that was told when it was made."""
    processes = iter([-1, -1] if shared else [-1, -2])
    monkeypatch.setattr(postgres_schema, "_process", lambda link: next(processes))
    if shared:
        with pytest.raises(InvalidRequest, match="pooler") as caught:
            holdfast.open(url)
        assert "pool_mode" in str(caught.value.hint)
    else:
        holdfast.open(url).close()
    assert next(processes, None) is None


# -- errors ----------------------------------------------------------------------------------------


def errors_of(act: Callable[[], Any]) -> str:
    """What a user gets to see of an error, causes included."""
    with pytest.raises(holdfast.HoldfastError) as caught:
        act()
    told = []
    error: BaseException | None = caught.value
    while error is not None:
        told.append(f"{error!r} {error}")
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\n".join(told)


def test_no_password_is_told(store: holdfast.Store, url: str) -> None:
    secret = "hunter2 %40"
    known = url.replace("postgres@", f"postgres:{quote(secret)}@")
    with holdfast.open(known) as other:
        target = backend_of(other)._target
        for told in (repr(other), repr(target), str(target), other._repository.backend.path):  # type: ignore[attr-defined]
            assert "hunter2" not in told
    wrong = (
        known.replace(known.split("@")[1].split("/")[0], "127.0.0.1:1"),
        known.replace("/postgres?", "/nowhere?"),
        known + "&sslmode=wrong",
        known + "&nonsense=1",
        known.replace("hunter2", "hunter2%zz"),
    )
    for each in wrong:
        assert "hunter2" not in errors_of(partial(holdfast.open, each, timeout=2))


@pytest.mark.parametrize("password", [
    "hunter/2", "hunter@2", "1/hunter", "a:hunter/2", "1:/hunter@2", "1,2/hunter",
])  # fmt: skip
def test_a_password_that_is_not_encoded_is_not_told(password: str) -> None:
    """What it is cut into looks like a host, a port or a database."""
    url = f"postgresql://agent:{password}@127.0.0.1:1/agents"
    told = errors_of(partial(holdfast.open, url, timeout=1))
    assert "hunter" not in told
    assert "InvalidRequest" in told


@pytest.mark.parametrize("url", [
    "postgresql://me%40realm:a%40b%2Fc%3A@h/d%40e%2Ff", "postgresql://a:1,b:2/d",
    "postgresql:///d?host=@abstract&port=5", "postgresql://me:a:b@h,i/d?user=x@y",
    "postgresql://%2Frun%2Fpg/d", "postgres://[::1]:5/d",
])  # fmt: skip
def test_addresses_that_are_encoded(url: str) -> None:
    Target.parse(url, None, timeout=1, read_only=False, durability="full")


def test_secrets_are_masked_whatever_the_server_says() -> None:
    url = "postgresql://me:hunter2@localhost/db?sslpassword=hunter3"
    target = Target.parse(url, None, timeout=1, read_only=False, durability="full")
    error = target.error(psycopg.OperationalError("me:hunter2 cannot\n come in by hunter3"))
    assert error.message.endswith("failed: me:*** cannot come in by ***")


def test_nobody_there(url: str) -> None:
    started = time.monotonic()
    with pytest.raises(Unavailable, match="refused"):
        holdfast.open("postgresql://127.0.0.1:1/postgres", timeout=5)
    assert time.monotonic() - started < 4


def test_a_held_lock_ends_in_an_error(schema: str, url: str, store: holdfast.Store) -> None:
    store.session("s").save({})
    with holdfast.open(url, timeout=2.0) as other, postgres.admin(search=schema) as link:
        session = other.session("s")
        with link.transaction():
            link.execute("LOCK TABLE heads IN ACCESS EXCLUSIVE MODE")
            with pytest.raises(Unavailable, match="locked"):
                session.save({"n": 1})
        assert session.save({"n": 1}).step == 2


def test_a_statement_that_takes_too_long_is_ended(url: str, store: holdfast.Store) -> None:
    """By the server, so that it does not go on for nobody; and the store can be used."""
    with holdfast.open(url, timeout=0.5) as other:
        with (
            pytest.raises(Unavailable, match="statement timeout"),
            other._repository.reader() as reader,
        ):
            assert isinstance(reader.view, PostgresView)
            reader.view._all("SELECT pg_sleep(1.2)::text")
        assert not other.session("s").exists()


def test_without_a_timeout_of_statements(
    url: str, store: holdfast.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail."""
    setting = "set_config('statement_timeout', %s, false)"
    assert setting in connection._SETTINGS
    without = connection._SETTINGS.replace(setting, "%s")
    monkeypatch.setattr(connection, "_SETTINGS", without)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_a_statement_that_takes_too_long_is_ended(url, store)


def test_a_statement_that_takes_too_long_is_told_from_a_lock(store: holdfast.Store) -> None:
    target = backend_of(store)._target
    with target.connect() as link, pytest.raises(Unavailable, match="took too long") as caught:
        link.execute("SET statement_timeout = 1")
        with target.translated():
            link.execute("SELECT pg_sleep(9)")
    assert "timeout=" in str(caught.value.hint)


def test_more_than_a_message_holds_is_refused_before_it_is_sent(
    store: holdfast.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_LARGEST", 100_000)
    session = store.session("s")
    session.save({"n": 0})
    with monkeypatch.context() as patch:
        patch.setattr(writer, "write", cut)
        with pytest.raises(InvalidRequest, match="too many for one save") as caught:
            session.save({"noise": [os.urandom(60_000) for _ in range(2)]})
    assert "in parts" in str(caught.value.hint)
    session.save({"noise": [os.urandom(60_000)]})
    assert session.step == 2
    assert store.verify().ok


# -- connections -----------------------------------------------------------------------------------


def test_dropped_connections_are_replaced(store: holdfast.Store, schema: str) -> None:
    session = store.session("s")
    session.save({"n": 0})
    version = store._repository.backend.version()
    ended = 0
    for n in range(1, 6):
        ended += terminate(schema)
        assert session.load() == {"n": n - 1}
        ended += terminate(schema)
        session.save({"n": n})
        ended += terminate(schema)
        assert store._repository.backend.version() != version
        ended += terminate(schema)
        store._repository.new_session()
        store._repository._numbers.clear()
    assert ended > 5
    assert len(session) == 6


def test_a_reader_that_broke_before_it_answered(store: holdfast.Store, schema: str) -> None:
    store.session("s").save({})
    with store._repository.reader() as reader:
        terminate(schema)
        assert reader.session(b"s") is not None
    with pytest.raises(Unavailable), store._repository.reader() as reader:
        assert reader.session(b"s") is not None
        terminate(schema)
        reader.session(b"s")


def test_no_more_connections_than_asked_for(url: str, store: holdfast.Store, schema: str) -> None:
    with holdfast.open(url, pool_size=2) as small:
        sessions = [small.session(f"s{n}") for n in range(12)]
        threads = [
            threading.Thread(target=lambda s=s: [s.append("log", n) for n in range(5)])
            for s in sessions
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [len(s.load()["log"]) for s in sessions] == [5] * 12
        pool = backend_of(small)._connections.pool
        assert len(pool._idle) == 2


def test_a_thread_that_reads_may_write(url: str, store: holdfast.Store) -> None:
    """All connections of the pool are taken, each by a thread that wants another one."""
    with holdfast.open(url, pool_size=3, timeout=10) as small:
        ready, done = threading.Barrier(3), []

        def work(n: int) -> None:
            with small._repository.reader() as reader:
                reader.session(b"x")
                ready.wait()
                small.session(f"s{n}").save({"big": ["x" * 3000] * 3})
                with small._repository.reader() as inner:
                    done.append(inner.session(b"s%d" % n) is not None)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert done == [True] * 3
        assert not backend_of(small)._connections.pool._loans


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_after_a_fork_both_go_on(store: holdfast.Store) -> None:
    session = store.session("parent")
    session.save({"n": 0})
    store._repository.backend.wait(0.01)
    with ExitStack() as open_:
        reader = open_.enter_context(store._repository.reader())
        reader.session(b"parent")
        child = os.fork()
        if not child:
            status = 1
            try:
                open_.close()  # of the parent's connections nothing may be touched
                mine = store.session("child")
                for n in range(20):
                    mine.append("log", n)
                store.session("parent").load()
                store.close()
                status = 0
            finally:
                os._exit(status)
        for n in range(1, 20):
            session.save({"n": n})
            reader.session(b"parent")
        assert os.waitpid(child, 0)[1] == 0
    assert session.load() == {"n": 19}
    assert store.session("child").load() == {"log": [*range(20)]}
    assert store.verify().ok


def test_a_connection_that_was_interrupted_as_it_prepared(
    store: holdfast.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server knows of the statement by its name, and we do not."""
    link = backend_of(store)._target.connect()
    with monkeypatch.context() as patch:

        def answered(self: Link) -> None:
            real(self)
            raise KeyboardInterrupt

        for _ in range(2):
            link.rows("SELECT 1")
        real = Link._answer
        patch.setattr(Link, "_answer", answered)
        with pytest.raises(KeyboardInterrupt):
            link.rows("SELECT 1")
    for query in ("SELECT 1", "SELECT 2"):
        for _ in range(4):
            assert link.rows(query) == [(int(query[-1]),)]
    assert link.rows("SELECT count(*) FROM pg_prepared_statements") == [(3,)]
    link.close()


# -- statements ------------------------------------------------------------------------------------


def test_a_save_is_one_statement(store: holdfast.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """One round trip, which is the commit as well."""
    session = store.session("s", agent="a")
    session.save({"log": ["x" * 600] * 3, "big": "y" * 9000})
    asked: list[str] = []

    def noted(real: Callable[..., Any]) -> Callable[..., Any]:
        def ask(self: Link, query: Any, *args: Any, **more: Any) -> Any:
            if "NOTIFY" not in query:
                asked.append(query)
            return real(self, query, *args, **more)

        return ask

    for way in ("execute", "ask"):
        monkeypatch.setattr(Link, way, noted(getattr(Link, way)))
    for n in range(70):
        session.append("log", {"n": n, "text": "z" * 500})
    session.save(
        {"log": ["x" * 600], "big": "y" * 9001}, label="l", tags=["t", "u"], key="k", trigger="x"
    )
    writes = [q for q in asked if not q.startswith(("BEGIN", "COMMIT", "SELECT"))]
    assert len(writes) == 71
    assert all(query.startswith("WITH moved AS (UPDATE heads") for query in writes)


def test_statements_are_few(store: holdfast.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server plans each text once for each connection."""
    texts: set[str] = set()
    real = writer.execute

    def execute(link: Link, batch: Batch) -> None:
        texts.add(writer.Statement(batch).text)
        real(link, batch)

    monkeypatch.setattr(writer, "execute", execute)
    session = store.session("s")
    for n in range(300):
        session.append("log", {"n": n, "text": "z" * (n % 7 * 100)})
    assert len(texts) <= 6


def test_rows_of_one_change_follow_each_other(store: holdfast.Store) -> None:
    """As if each had been written before the next."""
    backend = store._repository.backend
    number, stream = backend.reserve("session", 1), backend.reserve("stream", 1)
    rows = [
        RowWrite(stream, 0, 0, b"0"), RowWrite(stream, 1, 0, b"1"), RowWrite(stream, 2, 0, b"2"),
        RowWrite(stream, 0, 2, b"pack"), RowWrite(stream, 1, 0, b"again"),
    ]  # fmt: skip
    backend.commit(Change(number, b"", b"h1", NameRow(b"n", b"row"), rows=rows).batch())
    with open_reader(backend) as reader:
        assert reader.items(stream, 0, 9) == [(0, b"pack"), (1, b"again"), (2, b"2")]
    id = bytes(15)
    term, mark = IndexTerm(1, b"v", id), MarkRow(1, 0, b"v", b"first")
    notes = Notes(
        marks=[mark, mark._replace(body=b"second")], removed_marks=[mark.key],
        terms=[term, term], removed_terms=[term],
        tombstones=[TombstoneRow(1, b"t"), TombstoneRow(2, b"t")], undeleted=[1],
        keys=[KeyRow(b"k", 1), KeyRow(b"k", 2)],
    )  # fmt: skip
    blobs = [BlobWrite(b"d" * 32, b"one", False)] * 2
    backend.commit(Change(number, b"h1", b"h2", blobs=blobs, notes=notes).batch())
    with open_reader(backend) as reader:
        assert reader.marks(number, 0, 9) == [(1, 0, b"v", b"second")]
        assert reader.find_terms(1, b"v", b"", b"\xff" * 16, 9) == [id]
        assert reader.tombstones(number, 0, 9) == [(2, b"t")]
        assert reader.find_key(number, b"k") == 2


def test_a_row_that_exists_is_damage_not_a_conflict(store: holdfast.Store) -> None:
    backend = store._repository.backend
    number, stream = backend.reserve("session", 1), backend.reserve("stream", 1)
    backend.commit(
        Change(
            number, b"", b"h1", NameRow(b"n", b"r"), rows=[RowWrite(stream, 0, 0, b"mine")]
        ).batch()
    )
    with pytest.raises(Corrupt, match="exists already"):
        backend.commit(
            Change(number, b"h1", b"h2", rows=[RowWrite(stream, 0, 0, b"other")]).batch()
        )
    with open_reader(backend) as reader:
        assert reader.head(number) == b"h1"
        assert reader.items(stream, 0, 1) == [(0, b"mine")]


def test_who_forks_waits_for_who_deletes(store: holdfast.Store, schema: str) -> None:
    """What a change needs may be freed between its looking and its writing."""
    backend = store._repository.backend
    number = backend.reserve("session", 1)
    backend.commit(
        Change(number, b"", b"h1", NameRow(b"n", b"r"), CheckpointRow(1, bytes(15), b"c")).batch()
    )
    fork = Change(backend.reserve("session", 1), b"", b"f", NameRow(b"fork", b"r"))
    fork.notes = Notes(origin=Address(number, 1), needs=[Address(number, 1)])
    outcome: list[str] = []

    def work() -> None:
        try:
            backend.commit(fork.batch())
        except MissingReference:
            outcome.append("gone")

    with postgres.admin(search=schema) as link:
        with link.transaction():
            link.execute("SELECT 1 FROM heads WHERE session = %s FOR UPDATE", (number,))
            thread = threading.Thread(target=work)
            thread.start()
            time.sleep(0.1)
            link.execute("DELETE FROM checkpoints WHERE pos = %s", (number << 32 | 1,))
        thread.join()
    assert outcome == ["gone"]
    with open_reader(backend) as reader:
        assert reader.session(b"fork") is None


LOOKUPS: list[Callable[[Reader], Any]] = [
    lambda r: r.session(b"s"),
    lambda r: r.session_by_number(1),
    lambda r: r.sessions(b"s", 3),
    lambda r: r.head(1),
    lambda r: r.checkpoint(1, 1),
    lambda r: r.checkpoints(1, 1, 9, 9),
    lambda r: r.find_ids(b"a", b"b", 9),
    lambda r: r.newest_ids(b"a", b"b", 9),
    lambda r: r.find_key(1, b"k"),
    lambda r: r.items(1, 3, 9),
    lambda r: r.blob(b"d"),
    lambda r: r.marks(1, 1, 9),
    lambda r: r.find_marks(1, 1, b"v"),
    lambda r: r.operations(1, 1, 9),
    lambda r: r.tombstones(1, 1, 9),
    lambda r: r.all_tombstones(-1, 9),
    lambda r: r.grafts(1, 1, 9),
    lambda r: r.grafts_below(1),
    lambda r: r.forks(1, 1, 9),
    lambda r: r.find_terms(1, b"v", b"a", b"b", 9),
    lambda r: r.item_rows(-1, 9),
    lambda r: r.blob_rows(0, 9),
]


def test_every_look_up_has_an_index(store: holdfast.Store) -> None:
    target = backend_of(store)._target
    link = target.connect()
    link.execute("SET enable_seqscan = off")

    class Explaining(PostgresView):
        def _all(self, query: str, *bindings: Any) -> list[Any]:
            plan = link.execute(f"EXPLAIN {query}", bindings).fetchall()
            text = "\n".join(line for (line,) in plan)
            assert "Seq Scan" not in text, text
            assert "Index" in text, text
            return []

    reader = Reader(Explaining(link, target))
    for look_up in LOOKUPS:
        look_up(reader)
    link.close()


# -- names and values ------------------------------------------------------------------------------

LONG = "x" * 200
NAMES = [
    "", "a", "A", "a\0b", "\0", "\ud800", "é", "e\u0301", "'; DROP TABLE heads; --", "%s", "\\x00",
    LONG, LONG + "a", LONG + "b", LONG + "\0", LONG + "x" * 5_000, LONG + "x" * 5_000 + "y",
    "\U0001f9d1", "../../etc",
]  # fmt: skip


def test_names_of_any_kind(store: holdfast.Store) -> None:
    for n, name in enumerate(n for n in NAMES if n):
        store.session(name, agent=name).save(
            {"n": n}, label=name, tags=[name, "all"], key=name, trigger=name
        )
    expected = sorted((n for n in NAMES if n), key=lambda n: n.encode("utf-8", "surrogatepass"))
    assert [info.name for info in store.sessions()] == expected
    for at, name in enumerate(expected):
        assert [i.name for i in store.sessions(after=name)] == expected[at + 1 :]
        session = store.session(name)
        state = session.load()
        for revision in (f"label:{name}", f"tag:{name}", f"key:{name}"):
            assert session.load(revision) == state
        for field in ("label", "tag", "trigger", "agent"):
            assert [c.session for c in store.checkpoints(**{field: name})] == [name]  # type: ignore[arg-type]
        with pytest.raises(KeyTaken):
            session.save({}, key=name)
    with store._repository.reader() as reader:
        names = [name.encode("utf-8", "surrogatepass") for name in expected]
        got, after = [], None
        while page := reader.sessions(after, 2):
            got += [name for _, name, _ in page]
            after = page[-1][1]
        assert got == names
    assert store.verify().ok


def test_a_name_that_is_damaged_makes_no_session_look_new(
    store: holdfast.Store, schema: str
) -> None:
    store.session("s").save({})
    with postgres.admin(search=schema) as link:
        link.execute("UPDATE sessions SET name = 'other'")
    with pytest.raises(Corrupt, match="name"):
        store.session("s")
    assert not store.verify().ok


def test_a_session_that_cannot_be_found_is_reported(store: holdfast.Store, schema: str) -> None:
    store.session("s").save({"n": 1}, tags=["t"])
    with postgres.admin(search=schema) as link:
        for table in ("sessions", "marks"):
            link.execute(sql.SQL("UPDATE {} SET hash = sha256(hash)").format(sql.Identifier(table)))
    assert len([p for p in map(str, store.verify().problems) if "cannot be found" in p]) == 2
    store.repair()
    assert store.verify().ok
    assert store.session("s").load("tag:t") == {"n": 1}


@pytest.mark.parametrize("name", ["s", LONG + "x" * 5_000])
def test_a_hash_that_is_damaged_makes_no_session_look_new(
    store: holdfast.Store, schema: str, name: str
) -> None:
    """The server may have no checksums. A new session of the same name would hide the old one."""
    for n in range(3):
        store.session(f"{name}{n}").save({"n": n})
    session = store.session(name)
    session.save({"n": "old"})
    with postgres.admin(search=schema) as link:
        flip = "UPDATE sessions SET hash = set_bit(hash, 7, 1 - get_bit(hash, 7)) WHERE name = %s"
        assert link.execute(flip, (name.encode(),)).rowcount == 1
    for attempt in (session.exists, lambda: store.session(name).save({"n": "new"}), session.load):
        with pytest.raises(Corrupt, match="name"):
            attempt()
    assert not store.verify().ok
    assert store.repair().ok
    assert store.session(name).load() == {"n": "old"}
    assert len(list(store.sessions())) == 4


def test_repair_keeps_both_sessions_of_one_name(store: holdfast.Store, schema: str) -> None:
    """An older version hid a session with a damaged hash, and created a second one."""
    store.session("old").save({"n": "old"})
    store.session("s").save({"n": "new"})
    with postgres.admin(search=schema) as link:
        [(number, body)] = link.execute(
            "SELECT num, body FROM sessions WHERE name = 'old'"
        ).fetchall()
        row = records.seal_session(number, b"s", records.unseal_session(number, b"old", body))
        link.execute("UPDATE sessions SET name = 's', body = %s WHERE name = 'old'", (row,))
    with pytest.raises(Corrupt, match="name"):
        store.session("s").load()
    assert all(problem.loads for problem in store.repair().remaining.problems)
    assert store.session("s").load() == {"n": "new"}
    assert store.session(f"s (session {number})").load() == {"n": "old"}


def test_a_megabyte_or_ten(store: holdfast.Store) -> None:
    session = store.session("s")
    noise = os.urandom(10_000_000)
    session.save({"noise": noise, "log": [os.urandom(700_000) for _ in range(3)]})
    assert session.load()["noise"] == noise
    assert store.verify().ok


# -- watching --------------------------------------------------------------------------------------


@pytest.mark.parametrize("settled", [False, True], ids=["at once", "while it waits"])
def test_a_commit_wakes_a_watcher(store: holdfast.Store, url: str, settled: bool) -> None:
    """Long before it would look without a notification, at whatever moment the commit comes."""
    postgres.listens(store)
    with holdfast.open(url) as other:
        events = store.watch(interval=600.0)
        seen: list[Any] = []
        thread = threading.Thread(target=lambda: seen.extend(events), daemon=True)
        thread.start()
        time.sleep(0.5 if settled else 0)
        other.session("s").save({"n": 1})
        deadline = time.monotonic() + 60
        while not seen and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(seen) == 1
        store.close()
        thread.join(60)
        assert not thread.is_alive()


def test_a_commit_soon_after_nobody_listened(store: holdfast.Store, url: str) -> None:
    """The notifier checks for listeners once a second at most, and forgets no commit."""
    with holdfast.open(url) as other:
        checked = threading.Event()
        notifier = backend_of(other)._notifier
        real = notifier._notify

        def check() -> bool:
            try:
                return real()
            finally:
                checked.set()

        notifier._notify = check  # type: ignore[method-assign]
        other.session("s").save({"n": 1})
        assert checked.wait(60)
        postgres.listens(store)
        heard = backend_of(store)._listener._heard
        other.session("s").save({"n": 2})
        deadline = time.monotonic() + 60
        while backend_of(store)._listener._heard == heard and time.monotonic() < deadline:
            time.sleep(0.01)
        assert backend_of(store)._listener._heard > heard


def test_a_thread_that_waits_for_the_first_time_looks_first(store: holdfast.Store) -> None:
    """News may have come between its last look and its first wait."""
    postgres.listens(store)
    waiting = threading.Thread(target=store._repository.backend.wait, args=(600.0,), daemon=True)
    waiting.start()
    waiting.join(60)
    assert not waiting.is_alive()


def test_many_commits_are_few_notifications(
    store: holdfast.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = backend_of(store)
    heard: list[float] = []
    listener = backend._listener
    postgres.listens(store)
    monkeypatch.setattr(listener, "_ring", lambda: heard.append(time.monotonic()))
    session = store.session("s")
    started = time.monotonic()
    for n in range(100):
        session.append("log", n)
    took = time.monotonic() - started
    deadline = time.monotonic() + 5
    while not heard and time.monotonic() < deadline:
        time.sleep(0.01)
    assert 1 <= len(heard) <= 3 + took / notify._PAUSE
    time.sleep(2 * notify._TICK)  # the last of them
    heard.clear()
    time.sleep(3 * notify._TICK)
    assert heard == []  # nothing was committed since


def test_who_may_not_listen_does_not_ask_all_the_time(
    url: str, store: holdfast.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a standby: it takes connections, and lets nobody listen. Watching works without."""
    asked: list[float] = []

    def refused(self: notify.Listener, link: Link) -> None:
        asked.append(time.monotonic())
        raise psycopg.errors.ReadOnlySqlTransaction("cannot execute LISTEN during recovery")

    monkeypatch.setattr(notify.Listener, "_listen", refused)
    with holdfast.open(url, read_only=True) as other:
        seen: list[Any] = []
        thread = threading.Thread(target=lambda: seen.extend(other.watch(patience=3.0)))
        thread.start()
        time.sleep(0.5)
        store.session("s").save({"n": 1})
        thread.join(20)
        assert len(seen) == 1
        assert 1 <= len(asked) <= 5
        started = time.monotonic()
    assert time.monotonic() - started < 1.0  # closing waits for no pause


def test_commits_elsewhere_wake_nobody(store: holdfast.Store) -> None:
    """Other work on the server is no news of this store."""
    store.session("s").save({})
    watcher = Watcher(store._repository.backend)
    before = store._repository.backend.version()
    with postgres.admin() as link:
        link.execute("CREATE TABLE IF NOT EXISTS public.elsewhere (n int)")
        link.execute("INSERT INTO public.elsewhere VALUES (1)")
    assert store._repository.backend.version() == before
    assert watcher.poll() == []
    store.session("s").append("log", 1)
    assert store._repository.backend.version() != before


# -- unknown outcomes ------------------------------------------------------------------------------


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """The connection breaks after the next commit was made, before that is told."""

    def arm(times: int = 1) -> list[int]:
        real, left = writer.write, [times]

        def write(link: Link, change: Batch) -> None:
            real(link, change)
            if left[0]:
                left[0] -= 1
                link.close()
                raise psycopg.OperationalError("the connection was cut")

        monkeypatch.setattr(writer, "write", write)
        return left

    return arm


ACTS: dict[str, Callable[[holdfast.Session], Any]] = {
    "save": lambda s: s.save({"n": 1}),
    "append": lambda s: s.append("log", 1),
    "first save": lambda s: holdfast.Session(s._repository, "new").save({"n": 1}),
    "with a key": lambda s: s.save({"n": 1}, key="k", label="l", tags=["t"]),
    "fork": lambda s: s.fork("f"),
    "rewind": lambda s: s.rewind("@~1"),
    "undo": lambda s: s.undo(),
    "tag": lambda s: s.tag("@", "x"),
    "delete": lambda s: s.delete("@~1"),
    "delete session": lambda s: s.delete(),
}


def changes(store: holdfast.Store) -> int:
    """All checkpoints and operations of a store."""
    with store._repository.reader() as reader:
        return reader.count_checkpoints() + reader.sizes()["operations"][0]


@pytest.mark.parametrize("kind", ACTS)
def test_a_commit_that_was_made_is_a_success(
    store: holdfast.Store, forgetful: Callable[..., list[int]], kind: str
) -> None:
    session = store.session("s")
    session.save({"log": []})
    session.append("log", 0)
    before = changes(store)
    left = forgetful()
    ACTS[kind](session)
    assert left == [0]
    assert changes(store) == before + 1
    assert store.verify().ok


WARN = "DO $$ BEGIN RAISE WARNING 'not everywhere'; END $$"


@pytest.fixture
def raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings that are raised are taken for the one that comes from a wait for a standby."""
    monkeypatch.setattr(connection, "_STANDBY", "exec_stmt_raise")


@pytest.mark.usefixtures("raised")
def test_a_warning_at_the_end_of_a_transaction_is_a_doubt(store: holdfast.Store) -> None:
    """As a cut: so a server tells that somebody has canceled its wait for a standby."""
    with backend_of(store)._target.connect() as link:
        for ask in (link.ask, link.execute):
            with pytest.raises(Unconfirmed, match="not everywhere") as caught:
                ask(WARN)
            assert is_cut(caught.value)
        with link.transaction():
            link.execute(WARN)


def test_other_warnings_are_no_doubt(store: holdfast.Store) -> None:
    """Near its last numbers of transactions a server warns at each; all are as durable as ever."""
    with backend_of(store)._target.connect() as link:
        for ask in (link.ask, link.execute):
            ask(WARN)


@pytest.mark.usefixtures("raised")
@pytest.mark.parametrize("kind", ["append", "with a key", "fork", "rewind"])
def test_a_commit_with_a_warning_is_looked_for(
    store: holdfast.Store, schema: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    session = store.session("s")
    session.save({"log": []})
    session.append("log", 0)
    before, looked = changes(store), list[Batch]()
    real = writer.landed

    def landed(link: Link, change: Batch) -> bool | None:
        looked.append(change)
        return real(link, change)

    monkeypatch.setattr(writer, "landed", landed)
    with postgres.admin(search=schema) as link:
        link.execute(
            "CREATE FUNCTION warn() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE WARNING 'not everywhere'; RETURN NULL; END $$; "
            "CREATE CONSTRAINT TRIGGER warning AFTER INSERT OR UPDATE ON heads "
            "DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION warn()"
        )
        try:
            ACTS[kind](session)
        finally:
            link.execute("DROP FUNCTION warn CASCADE")
    assert len(looked) == 1
    assert changes(store) == before + 1
    assert store.verify().ok


def test_a_commit_whose_head_moved_on_since(
    store: holdfast.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours was made, and then another's on top of it."""
    session = store.session("s")
    session.save({"n": 0})
    real, left = writer.write, [1]

    def write(link: Link, change: Batch) -> None:
        real(link, change)
        if left[0]:
            left[0] -= 1
            store.session("s").save({"n": 2})
            raise psycopg.OperationalError("the connection was cut")

    monkeypatch.setattr(writer, "write", write)
    ours = session.save({"n": 1})
    assert [c.seq for c in session.history()] == [3, 2, 1]
    assert session.load(ours.id) == {"n": 1}
    assert session.load() == {"n": 2}


def test_a_head_alone_that_moved_on_cannot_be_told(
    store: holdfast.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = store._repository.backend
    number = backend.reserve("session", 1)
    backend.commit(Change(number, b"", b"h1", NameRow(b"n", b"r")).batch())
    real, left = writer.write, [1]

    def write(link: Link, change: Batch) -> None:
        real(link, change)
        if left[0]:
            left[0] -= 1
            backend.commit(Change(number, b"h2", b"h3").batch())
            raise psycopg.OperationalError("the connection was cut")

    monkeypatch.setattr(writer, "write", write)
    with pytest.raises(Unavailable, match="outcome of a commit"):
        backend.commit(Change(number, b"h1", b"h2").batch())
    with pytest.raises(StaleHead):
        backend.commit(Change(number, b"h1", b"h2").batch())


def test_an_outcome_that_stays_unknown_says_so(
    url: str, store: holdfast.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.session("s").save({})
    with holdfast.open(url, timeout=2.0) as other:
        session = other.session("s")
        monkeypatch.setattr(writer, "write", cut)
        started = time.monotonic()
        with pytest.raises(Unavailable, match="may have been made"):
            session.save({"n": 1})
        assert time.monotonic() - started < 15


@pytest.mark.parametrize("kind", ["append", "with a key"])
def test_what_was_never_sent_is_in_no_doubt(
    url: str, store: holdfast.Store, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """All connections are in use, and no other can be made."""
    with holdfast.open(url, timeout=0.5, pool_size=1) as other:
        session = other.session("s")
        session.save({"log": []})
        session.append("log", 0)
        connections = backend_of(other)._connections
        connections.saver.clear()
        inside, done = threading.Event(), threading.Event()

        def hold() -> None:
            with other._repository.reader():
                inside.set()
                done.wait()

        holding = threading.Thread(target=hold)
        holding.start()
        inside.wait()
        with monkeypatch.context() as patch:
            patch.setattr(Pool, "_connect", cut)
            with pytest.raises(Unavailable, match="couldn't get a connection") as caught:
                ACTS[kind](session)
        assert "may have been made" not in str(caught.value.hint)
        done.set()
        holding.join()
        ACTS[kind](session)
        assert session.step == 3


def cut(*args: Any) -> None:
    raise psycopg.OperationalError("the connection was cut")


def test_who_sends_much_waits_for_what_the_server_says(
    url: str, store: holdfast.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says after `timeout` that it takes too long: but it begins to count when all is there."""
    real, patience = writer.write, list[float | None]()

    def write(link: Link, change: Batch) -> None:
        patience.append(link.patience)
        real(link, change)

    monkeypatch.setattr(writer, "write", write)
    with holdfast.open(url, timeout=5.0) as other:
        other.session("s").save({"noise": os.urandom(3_000_000)})
        assert patience[0] is not None
        assert 9.0 <= patience[0] < 9.5
        with backend_of(other)._connections.pool.lend(time.monotonic() + 5) as link:
            assert link.patience == 6.0


def test_a_server_that_does_not_answer(url: str, store: holdfast.Store) -> None:
    """The client ends the connection by itself, though nothing tells it to."""
    target = Target.parse(url, None, timeout=2.0, read_only=False, durability="full")
    link = target.connect()
    link.execute("SET statement_timeout = 0")
    link.deadline = time.monotonic() + 0.3
    started = time.monotonic()
    with pytest.raises(psycopg.OperationalError, match="does not answer"):
        link.execute("SELECT pg_sleep(20)")
    assert time.monotonic() - started < 5
    assert link.closed
