"""Connections to PostgreSQL: binary values, timeouts and errors."""

from __future__ import annotations

import functools
import os
import re
import struct
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import quote, unquote

import psycopg
from psycopg import conninfo, generators
from psycopg import errors as pg
from psycopg.adapt import Transformer
from psycopg.pq import ExecStatus, Format, TransactionStatus

from holdfast.errors import Corrupt, HoldfastError, InvalidRequest, Unavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

    Value = int | bytes | str | None | Sequence[int | None] | Sequence[bytes | None]
    from collections.abc import Iterator, Sequence

    from psycopg import abc
    from psycopg.abc import PQGen
    from psycopg.pq.abc import PGresult


_BYTEA, _INT8, _TEXT = 17, 20, 25
_ARRAYS = {_BYTEA: 1001, _INT8: 1016}
_ABSENT = struct.pack("!i", -1)
_LENGTH = struct.Struct("!i")
_EIGHT = _LENGTH.pack(8)


@functools.lru_cache(512)
def numbered(query: str) -> bytes:
    """Return a statement with $1, $2 and so on in place of each %s."""
    first, *others = query.split("%s")
    parts = [f"${n}{part}" for n, part in enumerate(others, start=1)]
    return "".join([first, *parts]).encode()


def types_of(values: Sequence[Value]) -> list[int]:
    return [_type_of(value) for value in values]


def _type_of(value: Value) -> int:
    """Return the type of a value. Numbers are bigint; NULL is bound as bigint, too."""
    if isinstance(value, bytes):
        return _BYTEA
    if isinstance(value, str):
        return _TEXT
    if value is None or isinstance(value, int):
        return _INT8
    return _ARRAYS[_element(value)]


def _element(values: Sequence[Any]) -> int:
    known = [value for value in values[:1] if value is not None] or values
    return _BYTEA if any(isinstance(value, bytes) for value in known) else _INT8


def encoded(values: Sequence[Value]) -> list[bytes | None]:
    out: list[bytes | None] = []
    for value in values:
        if type(value) is bytes or value is None:
            out.append(value)
        elif isinstance(value, int):
            out.append(value.to_bytes(8, "big", signed=True))
        elif isinstance(value, str):
            out.append(value.encode())
        else:
            out.append(_array(value))
    return out


def _array(values: Sequence[Any]) -> bytes:
    kind = _element(values)
    parts = [struct.pack("!5i", 1, None in values, kind, len(values), 1)]
    for value in values:
        if value is None:
            parts.append(_ABSENT)
        elif kind == _INT8:
            parts += (_EIGHT, value.to_bytes(8, "big", signed=True))
        else:
            parts += (_LENGTH.pack(len(value)), value)
    return b"".join(parts)


_T = TypeVar("_T")

_DAMAGE = {"42P01", "42703", "42804", "42P10", "XX001", "XX002"}
"""SQLSTATEs: a table, column or index of the schema is missing, or its content is damaged."""
_CANCELED = "57014"
_AGAIN = {"40001", "40P01", "55P03", _CANCELED}
"""SQLSTATEs: the statement was cancelled, by a deadlock or a timeout; nothing was written."""
_LOCKED = "the store {} is locked by others", "a transaction may hang; pg_stat_activity shows it"
_TROUBLE = dict.fromkeys(_AGAIN, _LOCKED) | {
    _CANCELED: (
        "the store {} took too long",
        "open it with a longer timeout=…, or see in pg_stat_activity what it does",
    ),
    "53100": ("no room on {}", "nothing was lost; free some space and save again"),
    "42501": ("not permitted on {}", "grant the role what it needs"),
}
"""Messages and hints for some SQLSTATEs."""
_NOT_NOW = {"53300", "57P03"}
"""SQLSTATEs: too many connections, or the server is starting up or shutting down."""
_CUT = {"57P01", "57P02", "57P04", "57P05", "25P03", "25P04"}

# READ COMMITTED: after waiting for a row lock we must see the new version of the row.
_SETTINGS = """SELECT set_config('search_path', quote_ident(%s), false),
set_config('default_transaction_isolation', 'read committed', false),
set_config('statement_timeout', %s, false), set_config('lock_timeout', %s, false),
set_config('jit', 'off', false), set_config('synchronous_commit', CASE WHEN %s THEN 'off'
WHEN current_setting('synchronous_commit') = 'off' THEN 'on'
ELSE current_setting('synchronous_commit') END, false)"""
_STANDBY = "SyncRepWaitForLSN"
"""The function in which the server warns that its wait for a standby was cancelled."""
_PREPARED_FROM, _PREPARED_MOST = 3, 200
"""A statement is prepared at its third use, if not too many are."""


class Unconfirmed(psycopg.OperationalError):
    """The server's wait for a standby was cancelled, although it reports success."""


class Link(psycopg.Connection[Any]):
    """A connection with a time limit for each answer.

    A late answer ends the connection. The outcome of the statement is then unknown, as after a
    broken connection.
    """

    patience: float | None = None
    """The most seconds for one answer."""
    deadline: float | None = None
    """The latest time for an answer, by time.monotonic()."""
    target: Target
    """The server and the schema of the connection."""
    owner = 0
    """The process that opened the connection. No other process may use it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._uses: dict[str, int] = {}
        self._names: dict[str, bytes] = {}
        self._named = 0
        self._transformer: abc.Transformer | None = None
        self._warnings: list[str] = []
        self.add_notice_handler(partial(_note, self._warnings))

    def ask(self, query: str, values: Sequence[Any] = ()) -> PGresult:
        """Run a statement with numbers, bytes and lists of these, and return the answer.

        Like `execute`, without the cost of a cursor, which exceeds all other costs of a save here.
        """
        connection, name = self.pgconn, self._names.get(query)
        if name is None:
            name = self._prepare(query, values)
        formats = [Format.BINARY] * len(values)
        if name:
            connection.send_query_prepared(name, encoded(values), formats, Format.BINARY)
        else:
            connection.send_query_params(
                numbered(query), encoded(values), types_of(values), formats,
                Format.BINARY,
            )  # fmt: skip
        return self._answer()

    def _prepare(self, query: str, values: Sequence[Any]) -> bytes:
        """Return the name of a prepared statement; empty if it is not prepared."""
        uses = self._uses[query] = self._uses.get(query, 0) + 1
        if uses < _PREPARED_FROM or self._named >= _PREPARED_MOST:
            return b""
        self._named += 1  # first: the server may know an interrupted one
        name = b"holdfast_%d" % self._named
        self.pgconn.send_prepare(name, numbered(query), types_of(values))
        self._answer()
        self._names[query] = name
        return name

    def _answer(self) -> PGresult:
        results: list[PGresult] = self.wait(generators.execute(self.pgconn))
        result = results[-1]
        if result.status == ExecStatus.FATAL_ERROR:
            raise pg.error_from_result(result, self.info.encoding)
        return result

    def rows(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        """Return all rows of an answer, as tuples."""
        result = self.ask(query, values)
        if self._transformer is None:
            self._transformer = Transformer(self)
        self._transformer.set_pgresult(result)
        return self._transformer.load_rows(0, result.ntuples, tuple)

    def take_your_time(self) -> None:
        """Lift the time limits for work whose duration depends on the size of the store."""
        self.execute("SET statement_timeout = 0")
        self.patience = None

    def wait(self, gen: PQGen[_T], interval: float = 0.1, timeout: float | None = None) -> _T:
        if timeout is not None:  # the caller's own, who knows what to make of it
            return super().wait(gen, interval, timeout)
        timeout = self.patience
        if self.deadline is not None:
            left = max(0.0, self.deadline - time.monotonic())
            timeout = left if timeout is None else min(left, timeout)
        try:
            answer = super().wait(gen, interval, timeout)
        except pg._WaitTimeout:  # noqa: SLF001
            self.pgconn.finish()
            raise psycopg.OperationalError("the server does not answer") from None
        if self._warnings:
            warning = self._warnings.pop()
            self._warnings.clear()
            if self.pgconn.transaction_status == TransactionStatus.IDLE:
                raise Unconfirmed(warning)
        return answer


def _note(warnings: list[str], notice: pg.Diagnostic) -> None:
    if notice.source_function == _STANDBY:  # of the others, none is about what was committed
        warnings.append(notice.message_primary or "")


def _is_name(schema: Any) -> bool:
    """Return whether a schema can have this name."""
    try:
        return isinstance(schema, str) and 0 < len(schema.encode()) < 64 and "\0" not in schema
    except UnicodeEncodeError:
        return False


def _is_torn(base: str, port: str) -> bool:
    """Return whether an unencoded password was cut, so that its rest was read as the host."""
    server, _, name = base.partition("://")[2].partition("/")
    return server.count("@") > 1 or "@" in name or not re.fullmatch("[0-9,]*", port)


class Target(NamedTuple):
    """The address of a store on a server, and the settings of its connections."""

    parameters: dict[str, Any]
    schema: str
    shown: str
    """The address without secrets."""
    timeout: float
    read_only: bool
    durability: str
    lock_timeout: float
    """The most seconds to wait for a lock."""

    @classmethod
    def parse(
        cls, url: str, schema: str | None, *, timeout: float, read_only: bool, durability: str
    ) -> Target:
        """Parse an address. It may name the schema: postgresql://…?schema=name."""
        base, mark, query = url.partition("?")
        asked = query.split("&") if query else []
        named = [pair for pair in asked if pair.startswith("schema=")]
        url = base + mark + "&".join([pair for pair in asked if pair not in named])
        if schema is None:
            schema = unquote(named[-1].removeprefix("schema=")) if named else "holdfast"
        if not _is_name(schema):
            raise InvalidRequest(f"not the name of a schema: {schema!r}")
        try:
            given = dict(conninfo.conninfo_to_dict(url))
        except psycopg.Error:
            raise InvalidRequest(
                "not a PostgreSQL address", hint="postgresql://user:password@host:5432/database"
            ) from None
        if _is_torn(base, str(given.get("port") or "")):
            raise InvalidRequest(
                "not a PostgreSQL address: its parts cannot be distinguished",
                hint="percent-encode the password: %40 for @, %2F for /, %3A for :, %3F for ?",
            )
        wait = str(max(2, min(10, int(timeout / 3))))  # the shortest that libpq allows
        defaults: dict[str, Any] = {
            "application_name": "holdfast",
            "connect_timeout": wait,
            "keepalives_idle": "10",
            "keepalives_interval": "5",
            "keepalives_count": "3",
            "tcp_user_timeout": str(int(timeout * 1000)),
            "target_session_attrs": "any" if read_only else "read-write",
        }
        # A database of encoding SQL_ASCII converts nothing: names would come as bytes.
        fixed = {"client_encoding": "UTF8"}
        user, host = given.get("user"), given.get("host") or "localhost"
        port, name = given.get("port"), given.get("dbname") or user or ""
        shown = "postgresql://" + (f"{quote(str(user))}@" if user else "") + str(host)
        shown += (f":{port}" if port else "") + f"/{quote(str(name))} (schema {schema})"
        lock = max(timeout / 4, 1e-3)  # so that our own patience does not end before
        parameters = defaults | given | fixed
        return cls(parameters, schema, shown, timeout, read_only, durability, lock)

    def __repr__(self) -> str:
        return f"<{self.shown}>"

    @property
    def kwargs(self) -> dict[str, Any]:
        return self.parameters | {"autocommit": True, "prepare_threshold": None}

    def configure(self, link: Link) -> None:
        """Set all options of a connection explicitly."""
        link.target, link.owner = self, os.getpid()
        link.patience = self.timeout + 1.0  # the server says itself that it takes too long
        normal = self.durability == "normal"
        limit, lock = f"{self.timeout * 1000:.0f}", f"{max(self.lock_timeout * 1000, 1):.0f}"
        link.deadline = time.monotonic() + max(self.timeout / 3, 1.0)  # time for another try
        try:
            link.execute(_SETTINGS, (self.schema, limit, lock, normal))
        except pg.UntranslatableCharacter as e:
            raise InvalidRequest(
                f"the database has no way to write the name of the schema {self.schema!r}"
            ) from e
        if self.read_only:
            link.execute("SET default_transaction_read_only = on")
        link.deadline = None

    def connect(self) -> Link:
        link = Link.connect(**self.kwargs)
        try:
            self.configure(link)
        except BaseException:
            link.close()
            raise
        return link

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Translate PostgreSQL's errors into ours."""
        try:
            yield
        except psycopg.Error as e:
            raise self.error(e) from e

    def error(self, e: psycopg.Error) -> HoldfastError:
        code, what = e.sqlstate or "", self.plain(e)
        if code in _DAMAGE:
            return Corrupt(f"the store {self.shown} is damaged: {what}")
        text, hint = _TROUBLE.get(code, ("the store {} failed", None))
        return Unavailable(f"{text.format(self.shown)}: {what}", hint=hint)

    def plain(self, e: psycopg.Error) -> str:
        """Return the message of an error, on one line, without secrets."""
        text = " ".join(str(e.diag.message_primary or e).split())
        for name in ("password", "sslpassword"):
            secret = self.parameters.get(name)
            if secret:
                text = text.replace(str(secret), "***")
        return text


def is_cut(e: psycopg.Error) -> bool:
    """Return whether a connection broke, so that the outcome of the last statement is unknown."""
    code = e.sqlstate
    if code is None:
        return isinstance(e, psycopg.OperationalError | psycopg.InterfaceError)
    return code in _CUT or code.startswith("08")


def is_worth_another_try(e: psycopg.Error) -> bool:
    """Return whether a statement certainly did nothing and may succeed if it is repeated."""
    return e.sqlstate in _AGAIN or e.sqlstate in _NOT_NOW
