"""PostgreSQL as others have set it up: databases of any encoding, and roles with few rights."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import psycopg
import pytest
from psycopg import sql

import holdfast
from holdfast.errors import InvalidRequest, Unavailable
from holdfast.format.records import COPIED, seal_counter
from holdfast.storage import changes
from holdfast.storage.changes import Trim
from holdfast.storage.contract import MissingReference
from holdfast.storage.postgres import writer
from holdfast.storage.postgres.backend import PostgresBackend
from holdfast.storage.postgres.connection import Target, Unconfirmed
from holdfast.storage.postgres.schema import TABLES
from tests.storage.test_group_commit import until
from tests.support import postgres

PAGE = (Path(__file__).parents[3] / "docs" / "scaling.md").read_text("utf-8")
WAITS = "SELECT 1 FROM pg_stat_activity WHERE wait_event = 'advisory'"
CANCEL = "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
NAME = "a\0b\ud800 ü 漢"


def made(encoding: str) -> Iterator[str]:
    """The address of a new database."""
    name = f"{encoding.lower()}_{os.urandom(4).hex()}"
    with postgres.admin() as link:
        link.execute(
            sql.SQL("CREATE DATABASE {} ENCODING {} TEMPLATE template0 LOCALE 'C'").format(
                sql.Identifier(name), sql.Literal(encoding)
            )
        )
        try:
            yield urlsplit(postgres.server_url())._replace(path=f"/{name}").geturl()
        finally:
            drop = sql.SQL("DROP DATABASE {} WITH (FORCE)")
            link.execute(drop.format(sql.Identifier(name)))


@pytest.fixture
def schema() -> Iterator[str]:
    with postgres.schema() as name:
        yield name


@pytest.fixture(params=["SQL_ASCII", "LATIN1"])
def database(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from made(request.param)


@pytest.mark.parametrize("schema", ["holdfast", "Ünï \"q'uote"])
def test_a_database_of_another_encoding(database: str, schema: str) -> None:
    """What it calls its names must be what we called them, on every connection."""
    with holdfast.open(database, schema=schema, create=True) as store:
        session = store.session(NAME)
        session.save({"log": ["é漢\0\ud800" * 200] * 20}, label="l漢", tags=["t\0"], key="k漢")
        store.gc()
        store.repair()
    with holdfast.open(f"{database}?client_encoding=LATIN1", schema=schema) as store:
        store.session(NAME).append("log", "more")
    reopened: list[dict[str, Any]] = [{}, {"create": True}, {"read_only": True}]
    for options in reopened:
        with holdfast.open(f"{database}?schema={quote(schema)}", **options) as store:
            assert len(store.session(NAME).load()["log"]) == 21
            assert store.session(NAME).get("key:k漢").seq == 1
            assert store.verify(read_data=True).ok


def test_a_schema_that_the_database_cannot_name() -> None:
    for database in made("LATIN1"):
        for create in (True, False):
            with pytest.raises(InvalidRequest, match="漢"):
                holdfast.open(database, schema="漢", create=create)


def test_names_beside_ours_may_be_of_any_encoding() -> None:
    for database in made("SQL_ASCII"):
        with postgres.admin(database) as link:
            link.execute("CREATE SCHEMA holdfast")
            link.execute(b'CREATE TABLE holdfast."\xff\xfe" ()')
        holdfast.open(database, create=True).close()
        holdfast.open(database).close()


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_what_was_copied_while_gc_waited_is_seen(schema: str, level: str) -> None:
    """Whatever isolation is the default: gc would free what the copy has brought."""
    options = quote(f"-c default_transaction_isolation={level}".replace(" r", "\\ r"))
    url = f"{postgres.server_url()}?options={options}"
    with (
        holdfast.open(url, schema=schema, create=True) as store,
        ThreadPoolExecutor() as threads,
        postgres.admin(url) as link,
    ):
        assert link.execute("SHOW transaction_isolation").fetchall() == [(level,)]
        backend = store._repository.backend
        assert isinstance(backend, PostgresBackend)
        with backend._target.connect() as copier, copier.transaction():
            writer.exclude_gc(copier)
            freeing = threads.submit(changes.trim, backend, Trim([], [], copied=0))
            until(lambda: link.execute(WAITS).fetchall() != [])
            body = seal_counter(COPIED, 1)
            copier.execute("INSERT INTO counters VALUES (%s, %s)", (COPIED, body))
        with pytest.raises(MissingReference):
            freeing.result()


# -- roles -----------------------------------------------------------------------------------------


@pytest.fixture
def grants(schema: str) -> Iterator[Callable[..., str]]:
    """Runs statements of the page, for another schema and another role; the role's address."""
    url = f"{postgres.server_url()}?schema={quote(schema)}"
    holdfast.open(url, create=True).close()
    role = f"role {os.urandom(4).hex()}"
    with postgres.admin() as link:

        def run(*statements: str) -> str:
            for each in statements:
                text = each.replace(" agent", f' "{role}"').replace(
                    "SCHEMA holdfast", f'SCHEMA "{schema}"'
                )
                link.execute(text.replace("holdfast.", f'"{schema}".').encode())
            return url.replace("postgres@", f"{quote(role)}@")

        try:
            yield run
        finally:
            link.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(sql.Identifier(role)))


def documented() -> list[str]:
    [block] = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)
    return [each for each in block.split(";\n") if each]


def work(store: holdfast.Store) -> None:
    """All that agents do."""
    session = store.session("s", agent="a")
    session.save({"log": ["x" * 600] * 3, "big": "y" * 9000}, label="l", tags=["t"], key="k")
    for n in range(40):
        session.append("log", f"{n} " + "x" * 200)
    session.save({"log": [], "big": "y" * 9000}, trigger="t", status="halted")
    session.patch(set={"n": 1})
    session.label("@~1", "other")
    session.tag("@~2", "more")
    session.rewind("@~3")
    session.undo()
    session.redo()
    fork = session.fork("f", "@~5")
    fork.save({"n": 2})
    session.delete("@~2")
    session.undo()
    session.delete("@~2")
    with store.session("r").run(state={"n": 0}) as run:
        run.step("one", int)
        run.tool({"id": "c", "name": "n", "input": {}}, lambda: 1)
        run.checkpoint()
    store.session("r").prune(holdfast.Retention(keep_last=1))
    store.session("gone").save({"big": "z" * 9000}, label="l", tags=["t"], key="k", trigger="t")
    store.session("gone").delete()
    store.gc()
    store.repair()


def look(store: holdfast.Store) -> None:
    """All that needs to write nothing."""
    assert {info.name for info in store.sessions()} >= {"s", "f", "r"}
    for name in ("s", "f", "r"):
        session = store.session(name)
        session.load()
        assert [*session.history()]
        assert [*session.tree()]
        session.operations()
    store.session("s").get("label:l")
    store.session("s").diff("@~1", "@")
    assert [*store.session("r").tool_calls()]
    assert not [*store.session("r").pending()]
    assert [*store.checkpoints(tag="t")]
    assert store.stats()
    assert store.verify(read_data=True).ok


def moves(store: holdfast.Store, tmp_path: Path) -> None:
    """What is taken out of a store."""
    with holdfast.open("memory:") as other:
        assert store.copy(other).sessions == 3
        look(other)
    store.export(tmp_path / "all.jsonl")


def wakes(store: holdfast.Store, write: holdfast.Store) -> None:
    """Long before it would look without a notification."""
    postgres.listens(store)
    events = iter(store.watch(interval=600.0))
    seen: list[Any] = []
    watching = threading.Thread(target=lambda: seen.append(next(events)), daemon=True)
    watching.start()
    write.session("s").append("log", "news")
    watching.join(60)
    assert len(seen) == 1


def mends(store: holdfast.Store, schema: str) -> None:
    """What only repair() writes."""
    with postgres.admin(search=schema) as link:
        link.execute("DELETE FROM keys; DELETE FROM facets; UPDATE marks SET hash = hash || '?'")
        link.execute(
            "UPDATE checkpoints SET body = 'torn' WHERE pos = (SELECT max(pos) FROM checkpoints "
            "WHERE pos >> 32 = (SELECT num FROM sessions WHERE name = 's'))"
        )
    done = store.repair().sessions
    assert {what for each in done for what in each.rebuilt} >= {"keys", "searches"}
    assert any(each.moved for each in done)
    assert store.session("s").get("key:k").seq == 1


def test_a_role_with_the_rights_that_are_documented_does_all_that_agents_do(
    schema: str, grants: Callable[..., str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = grants(*documented())
    with holdfast.open(url) as store:
        work(store)
        assert "REINDEX TABLE heads" in caplog.text
        look(store)
        moves(store, tmp_path)
        wakes(store, store)
        with holdfast.open("memory:") as other:
            other.session("brought").save({"big": "w" * 9000, "log": ["x" * 600] * 9})
            with other.session("brought").run() as run:
                run.step("one", int)
            other.copy(store)
        store.import_exported(tmp_path / "all.jsonl")
        assert store.verify(read_data=True).ok
        mends(store, schema)
    with postgres.admin(url.partition("?")[0]) as link:
        for change in ("UPDATE {} SET version = 9", "DELETE FROM {}", "INSERT INTO {} VALUES (9)"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                table = sql.Identifier(schema, "format")
                link.execute(sql.SQL(change).format(table))


def test_a_role_that_may_maintain_tables_leaves_nothing_out(
    grants: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    [maintain] = re.findall(r"`(GRANT MAINTAIN [^`]*)`", PAGE)
    with holdfast.open(grants(*documented(), maintain.replace("\n", " "))) as store:
        work(store)
        look(store)
    assert "left out" not in caplog.text


def test_a_role_that_only_looks(schema: str, grants: Callable[..., str], tmp_path: Path) -> None:
    """Who needs USAGE on the schema and SELECT on its tables."""
    url = grants(
        "CREATE ROLE agent LOGIN",
        "GRANT USAGE ON SCHEMA holdfast TO agent",
        "GRANT SELECT ON ALL TABLES IN SCHEMA holdfast TO agent",
    )
    with holdfast.open(postgres.server_url(), schema=schema) as owner:
        work(owner)
        with holdfast.open(url, read_only=True) as store:
            look(store)
            moves(store, tmp_path)
            wakes(store, owner)
            with pytest.raises(Unavailable, match="read-only"):
                store.session("s").save({})
        with holdfast.open(url) as store, pytest.raises(Unavailable, match="permi"):
            store.session("s").save({})


def test_the_page_counts_the_tables() -> None:
    assert f"a schema with {len(TABLES)} tables" in PAGE


# -- standbys --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[postgres.Server, postgres.Server]]:
    """A server with a store in it, and a standby that has it, too."""
    primary = postgres.Server(*postgres.QUICK)
    try:
        holdfast.open(primary.url, create=True).close()
        standby = postgres.Server(*postgres.QUICK, primary=primary)
        try:
            yield primary, standby
        finally:
            standby.stop()
    finally:
        primary.stop()


@contextmanager
def behind(standby: postgres.Server) -> Iterator[None]:
    """It hears of what is new, and does not show it."""
    with postgres.admin(standby.url) as link:
        link.execute("SELECT pg_wal_replay_pause()")
        try:
            state = "SELECT pg_get_wal_replay_pause_state()"
            until(lambda: link.execute(state).fetchall() == [("paused",)])
            yield
        finally:
            link.execute("SELECT pg_wal_replay_resume()")


def test_a_canceled_wait_for_a_standby_is_a_doubt(
    pair: tuple[postgres.Server, postgres.Server],
) -> None:
    """The server says that the transaction is committed, and warns that it is not everywhere."""
    primary, _ = pair
    with postgres.admin(primary.url) as admin:
        admin.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
        admin.execute("SELECT pg_reload_conf()")
        target = Target.parse(primary.url, None, timeout=30.0, read_only=False, durability="full")
        link = target.connect()
        told: list[BaseException] = []

        def commit() -> None:
            try:
                link.execute("CREATE TABLE public.waited (n int)")
            except psycopg.Error as e:
                told.append(e)

        thread = threading.Thread(target=commit)
        try:
            shown = "SHOW synchronous_standby_names"
            until(lambda: admin.execute(shown).fetchall() == [("nobody",)])
            thread.start()
            until(lambda: admin.execute(CANCEL).fetchall() == [(True,)])
            thread.join(20)
        finally:
            admin.execute("ALTER SYSTEM RESET synchronous_standby_names")
            admin.execute("SELECT pg_reload_conf()")
            thread.join(20)
            link.close()
        assert [type(e) for e in told] == [Unconfirmed]
        admin.execute("DROP TABLE public.waited")


def test_heads_are_read_at_the_primary(pair: tuple[postgres.Server, postgres.Server]) -> None:
    """Though the address names the standby first, and it takes connections."""
    primary, standby = pair
    at = [urlsplit(server.url).netloc.rpartition("@")[2] for server in (standby, primary)]
    both = f"postgresql://postgres@{','.join(at)}/postgres"
    with holdfast.open(primary.url) as store:
        name = f"s {len(list(store.sessions()))}"
    with behind(standby):
        with holdfast.open(both) as store, holdfast.open(both) as other:
            store.session(name).save({"log": ["first"]})
            session = other.session(name)
            assert session.load() == {"log": ["first"]}
            session.append("log", "second")
            assert store.session(name).load() == {"log": ["first", "second"]}
        with holdfast.open(standby.url, read_only=True) as store:
            assert not store.session(name).exists()
    with holdfast.open(standby.url, read_only=True) as store:
        until(lambda: len(store.session(name)) == 2)
        assert store.session(name).load() == {"log": ["first", "second"]}
    with pytest.raises(Unavailable, match="read-only"):
        holdfast.open(standby.url, timeout=1.0)


def test_heads_of_any_server(
    pair: tuple[postgres.Server, postgres.Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail."""
    parse = Target.parse

    def anywhere(*args: Any, **options: Any) -> Target:
        target = parse(*args, **options)
        target.parameters["target_session_attrs"] = "any"
        return target

    monkeypatch.setattr(Target, "parse", anywhere)
    with pytest.raises(Unavailable, match="read-only"):
        test_heads_are_read_at_the_primary(pair)
