"""Connections to PostgreSQL: what is set on each, how long one waits, and errors in our words."""

from __future__ import annotations

import os
import re
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

from holdfast.backends import postgres_wire as wire
from holdfast.errors import Corrupt, HoldfastError, InvalidRequest, Unavailable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from psycopg import abc
    from psycopg.abc import PQGen
    from psycopg.pq.abc import PGresult

_T = TypeVar("_T")

_DAMAGE = {"42P01", "42703", "42804", "42P10", "XX001", "XX002"}
"""A table, column or index that the schema has is missing, or what is in it cannot be read."""
_CANCELED = "57014"
_AGAIN = {"40001", "40P01", "55P03", _CANCELED}
"""Given up for the sake of others, or after a timeout: nothing was written."""
_NOT_NOW = {"53300", "57P03"}
"""Too many connections; starting up or shutting down."""
_CUT = {"57P01", "57P02", "57P04", "57P05", "25P03", "25P04"}

# Who waits for a lock has to see what was done under it: with any other isolation he would not.
_SETTINGS = """SELECT set_config('search_path', quote_ident(%s), false),
set_config('default_transaction_isolation', 'read committed', false),
set_config('statement_timeout', %s, false), set_config('lock_timeout', %s, false),
set_config('jit', 'off', false), set_config('synchronous_commit', CASE WHEN %s THEN 'off'
WHEN current_setting('synchronous_commit') = 'off' THEN 'on'
ELSE current_setting('synchronous_commit') END, false)"""
_STANDBY = "SyncRepWaitForLSN"
"""Where the server's warning comes from if somebody cancels its wait for a standby."""
_PREPARED_FROM, _PREPARED_MOST = 3, 200
"""From its third use on a statement is prepared, if not too many are."""


class Unconfirmed(psycopg.OperationalError):
    """Somebody has canceled the server's wait for a standby: it tells of success all the same."""


class Link(psycopg.Connection[Any]):
    """A connection whose answers are not waited for for ever.

    One that has not come in time ends the connection: what the server made of the question is then
    as unknown as after a cut.
    """

    patience: float | None = None
    """Seconds for one answer."""
    deadline: float | None = None
    """By when it must be there in any case, in the time of time.monotonic()."""
    owner = 0
    """The process that made it, and that alone may use it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._uses: dict[str, int] = {}
        self._names: dict[str, bytes] = {}
        self._named = 0
        self._transformer: abc.Transformer | None = None
        self._warnings: list[str] = []
        self.add_notice_handler(partial(_note, self._warnings))

    def ask(self, query: str, values: Sequence[Any] = ()) -> PGresult:
        """The answer to one statement, to which numbers, bytes and lists of either are bound.

        As `execute`, without what a cursor costs: that is more than all else that a save does here.
        """
        connection, name = self.pgconn, self._names.get(query)
        if name is None:
            name = self._prepare(query, values)
        formats = [Format.BINARY] * len(values)
        if name:
            connection.send_query_prepared(name, wire.encoded(values), formats, Format.BINARY)
        else:
            connection.send_query_params(
                wire.numbered(query), wire.encoded(values), wire.types_of(values), formats,
                Format.BINARY,
            )  # fmt: skip
        return self._answer()

    def _prepare(self, query: str, values: Sequence[Any]) -> bytes:
        """The name of a statement; empty if it is not used often, or there are too many."""
        uses = self._uses[query] = self._uses.get(query, 0) + 1
        if uses < _PREPARED_FROM or self._named >= _PREPARED_MOST:
            return b""
        self._named += 1  # before it is sent: of one that was interrupted the server may know
        name = b"holdfast_%d" % self._named
        self.pgconn.send_prepare(name, wire.numbered(query), wire.types_of(values))
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
        """All rows of an answer, as tuples."""
        result = self.ask(query, values)
        if self._transformer is None:
            self._transformer = Transformer(self)
        self._transformer.set_pgresult(result)
        return self._transformer.load_rows(0, result.ntuples, tuple)

    def take_your_time(self) -> None:
        """For what takes as long as there is much of it."""
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
        except pg._WaitTimeout:
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
    """Whether a schema may be called so."""
    try:
        return isinstance(schema, str) and 0 < len(schema.encode()) < 64 and "\0" not in schema
    except UnicodeEncodeError:
        return False


def _is_torn(base: str, port: str) -> bool:
    """Whether a password that was not encoded ended too early: its rest is taken for a place."""
    server, _, name = base.partition("://")[2].partition("/")
    return server.count("@") > 1 or "@" in name or not re.fullmatch("[0-9,]*", port)


class Target(NamedTuple):
    """Which store on which server, and how to talk to it."""

    parameters: dict[str, Any]
    schema: str
    shown: str
    """Without any secret."""
    timeout: float
    read_only: bool
    durability: str
    lock_timeout: float
    """Seconds for a lock that somebody else holds."""

    @classmethod
    def parse(
        cls, url: str, schema: str | None, *, timeout: float, read_only: bool, durability: str
    ) -> Target:
        """The schema may stand in the address, too: postgresql://…?schema=name."""
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
                "not a PostgreSQL address: its parts cannot be told from each other",
                hint="percent-encode the password: %40 for @, %2F for /, %3A for :, %3F for ?",
            )
        wait = str(max(2, min(10, int(timeout / 3))))  # libpq knows nothing shorter
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
        """Everything set explicitly."""
        link.owner = os.getpid()
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
        """PostgreSQL's errors as ours."""
        try:
            yield
        except psycopg.Error as e:
            raise self.error(e) from e

    def error(self, e: psycopg.Error) -> HoldfastError:
        code, what = e.sqlstate or "", self.plain(e)
        if code in _DAMAGE:
            return Corrupt(f"the store {self.shown} is damaged: {what}")
        if code == _CANCELED:
            return Unavailable(
                f"the store {self.shown} took too long: {what}",
                hint="open it with a longer timeout=…, or see in pg_stat_activity what it does",
            )
        if code in _AGAIN:
            return Unavailable(
                f"the store {self.shown} is locked by others: {what}",
                hint="a transaction may hang; pg_stat_activity shows it",
            )
        if code == "53100":
            return Unavailable(
                f"no room on {self.shown}: {what}",
                hint="nothing was lost; free some space and save again",
            )
        if code == "42501":
            return Unavailable(
                f"not permitted on {self.shown}: {what}", hint="grant the role what it needs"
            )
        return Unavailable(f"the store {self.shown} failed: {what}")

    def plain(self, e: psycopg.Error) -> str:
        """What an error says, on one line, without secrets."""
        text = " ".join(str(e.diag.message_primary or e).split())
        for name in ("password", "sslpassword"):
            secret = self.parameters.get(name)
            if secret:
                text = text.replace(str(secret), "***")
        return text


def is_cut(e: psycopg.Error) -> bool:
    """Whether a connection broke, so that nobody knows what became of the last statement."""
    code = e.sqlstate
    if code is None:
        return isinstance(e, psycopg.OperationalError | psycopg.InterfaceError)
    return code in _CUT or code.startswith("08")


def is_worth_another_try(e: psycopg.Error) -> bool:
    """Whether a statement certainly did nothing, and may fare better in a moment."""
    return e.sqlstate in _AGAIN or e.sqlstate in _NOT_NOW
