"""Tables of a SQLite file made anew where rows are not what, or not where, they should be.

Rows of a damaged tree may be missed although they are there, and whatever is written beside them
can hide or overwrite others. So nothing is mended in place: what can be read goes to a new tree. A
row's seal tells its key; and of a damaged row its index may be the last to know how it is found.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

import apsw

from holdfast.backends.sqlite_file import SCHEMA
from holdfast.codec import records, rows
from holdfast.errors import UNREADABLE, Corrupt, UnsupportedFormat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TWIN = "made_anew"
_BEFORE = f"SELECT pos, body FROM {TWIN} WHERE pos < ? ORDER BY pos DESC LIMIT 1"  # noqa: S608
_TAKE_OVER = """UPDATE sqlite_schema SET rootpage =
(SELECT rootpage FROM sqlite_schema WHERE name = ?) WHERE name = ?;
DELETE FROM sqlite_schema WHERE name = ?"""
_DISAGREE = """SELECT said.{key}, said.{column} FROM {table} said INDEXED BY {index}
LEFT JOIN {table} own NOT INDEXED ON own.{key} = said.{key}
WHERE typeof(said.{column}) = 'blob' AND own.{column} IS NOT said.{column}"""


@contextmanager
def mending(connection: apsw.Connection) -> Iterator[apsw.Connection]:
    """A transaction, and another connection to read the same by; undone if that is too damaged.

    For who has met damage within a transaction cannot go on in it.
    """
    connection.execute("BEGIN IMMEDIATE")
    source = apsw.Connection(connection.filename, flags=apsw.SQLITE_OPEN_READONLY)
    try:
        yield source
        connection.execute("COMMIT")
    except BaseException as e:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        if not isinstance(e, apsw.CorruptError | UnicodeDecodeError):  # of those, verify() tells
            raise
    finally:
        source.close()


def take_over(connection: apsw.Connection, name: str) -> None:
    """Let the twin take the place of a tree.

    That is not dropped: it might claim pages that belong to others as well.
    """
    connection.execute("PRAGMA writable_schema = ON")
    try:
        connection.execute(_TAKE_OVER, (TWIN, name, TWIN))
    finally:
        connection.execute("PRAGMA writable_schema = RESET")


def is_sound(source: apsw.Connection, table: str | None = None) -> bool:
    """Whether the trees of a table and of its indexes are, or all, whatever is in them."""
    check = "PRAGMA quick_check" if table is None else f"PRAGMA quick_check({table})"
    try:
        told = [str(line) for (line,) in source.execute(check)]
    except apsw.CorruptError:
        return False
    return all(line == "ok" or line.startswith("NULL value") for line in told)


def as_bytes(column: str) -> str:
    """A column whose type may be damaged; often its bytes are all there."""
    return f"iif(typeof({column}) IN ('blob', 'text'), CAST({column} AS BLOB), x'')"


class _Row(NamedTuple):
    key: int
    found_by: bytes
    body: bytes
    more: int | None


class _Table(NamedTuple):
    """The columns of a table, and what its rows are sealed for."""

    name: str
    kind: int
    key: str = "pos"
    found_by: str | None = None
    more: str | None = None
    address: Callable[[int, bytes], int] = lambda key, _: key
    check: Callable[[_Row], object] = lambda _: None
    """Raises if a row is damaged."""
    repeated: Callable[[_Row], int | None] = lambda row: row.more
    """What the column `more` should be; or raises."""

    def has(self, row: _Row) -> bool:
        """Whether a row is where it belongs."""
        return rows.is_sealed(self.kind, self.address(row.key, row.found_by), row.body)

    def homes(self, row: _Row) -> list[_Row]:
        """Where else it may belong, if one bit of its key is damaged."""
        ways = [row._replace(key=row.key ^ 1 << bit) for bit in range(63)]
        return [way for way in ways if self.has(way)]

    def mended(self, row: _Row, said: dict[int, bytes]) -> _Row:
        """As it should be, as far as its index and its body say that."""
        if row.key in said:
            try:
                self.check(row)
            except UNREADABLE:
                row = row._replace(found_by=said[row.key])
        with suppress(*UNREADABLE):
            row = row._replace(more=self.repeated(row))
        return row


def _place(pos: int) -> tuple[int, int]:
    return pos >> records.SEQ_BITS, pos & records.MAX_SEQ


def _check_blob(row: _Row) -> None:
    _, flat = rows.unseal(rows.BLOB, rows.blob_address(row.found_by), row.body, "a blob")
    if sha256(flat).digest() != row.found_by:
        raise Corrupt("a blob does not match its digest")


def _ancestor(row: _Row) -> int | None:
    session, seq = _place(row.key)
    return records.unseal_gap(session, seq, row.body).ancestor if seq else row.more


_TABLES = (
    _Table("heads", rows.HEAD, "session"),
    _Table("items", rows.ITEMS),
    _Table("operations", rows.OPERATION),
    _Table("tombs", rows.TOMB),
    _Table("gaps", rows.GAP, more="ancestor", repeated=_ancestor),
    _Table("journal", rows.JOURNAL),
    _Table(
        *("sessions", rows.SESSION, "num", "name", "origin", records.session_address),
        check=lambda row: records.unseal_session(*row[:3]),
        repeated=lambda row: records.unseal_session(*row[:3]).origin,
    ),
    _Table(
        *("checkpoints", rows.CHECKPOINT, "pos", "id", None),
        address=lambda pos, name: records.checkpoint_address(*_place(pos), name),
        check=lambda row: records.unseal_checkpoint(*_place(row.key), *row[1:3]),
    ),
    _Table(
        *("blobs", rows.BLOB, "num", "digest", "uses"),
        address=lambda _, digest: rows.blob_address(digest),  # its number can be any
        check=_check_blob,
    ),
)
_UNSEALED = {
    "keys": "session, key, seq",
    "marks": "pos, kind, value, body",
    "facets": "kind, value, id",
}


def put_in_order(connection: apsw.Connection) -> None:
    """Every table that needs it and can be read but for one row."""
    for table in _TABLES:
        with mending(connection) as source:
            said = dict(_disagreements(source, table))
            if not is_sound(source, table.name) or _has_odd_rows(source, table, said):
                _make_anew(connection, source, table, said)
    for name, columns in _UNSEALED.items():
        with mending(connection) as source:
            if not is_sound(source, name):
                _copy(connection, source, name, columns)


# -- reading -------------------------------------------------------------------------------------


def _disagreements(source: apsw.Connection, table: _Table) -> Iterator[Any]:
    """Keys, and what rows are found by: where the index says something else than the row."""
    if table.found_by is not None:
        index = f"sqlite_autoindex_{table.name}_1"
        sql = _DISAGREE.format(index=index, table=table.name, key=table.key, column=table.found_by)
        with suppress(apsw.CorruptError):
            yield from source.execute(sql)


def _has_odd_rows(source: apsw.Connection, table: _Table, said: dict[int, bytes]) -> bool:
    odd = [f"typeof({column}) <> 'blob'" for column in (table.found_by, "body") if column]
    sql = f"SELECT 1 FROM {table.name} NOT INDEXED WHERE {' OR '.join(odd)} LIMIT 1"  # noqa: S608
    if source.execute(sql).get:
        return True
    for row in source.execute(_select(table)):
        mended = table.mended(_Row(*row), said)
        if mended != row or (not table.has(mended) and table.homes(mended)):
            return True
    return False


def _select(table: _Table) -> str:
    found_by = as_bytes(table.found_by) if table.found_by else "x''"
    instead = "0" if table.more == "uses" else "NULL"
    more = f"iif(typeof({table.more}) = 'integer', {table.more}, {instead})"
    columns = f"{table.key}, {found_by}, {as_bytes('body')}, {more if table.more else 'NULL'}"
    return f"SELECT {columns} FROM {table.name} NOT INDEXED"  # noqa: S608


def _readable(source: apsw.Connection, select: str, back: str, count: int) -> Iterator[Any]:
    """All rows with their places; from both ends, if there is one that cannot be read."""
    read = 0
    for order in ("", f" ORDER BY {back}"):
        with suppress(apsw.CorruptError):
            for n, row in enumerate(source.execute(select + order)):
                yield (count - 1 - n if order else n), row
                read += 1
        if read >= count:
            return
    if read < count - 1:
        raise apsw.CorruptError("there may be sound rows between those that cannot be read")


# -- writing -------------------------------------------------------------------------------------


def begin_twin(connection: apsw.Connection, name: str) -> None:
    """Without what makes an index: it would have a tree of its own."""
    made = SCHEMA[name].replace(f"TABLE {name} ", f"TABLE {TWIN} ").replace(" UNIQUE", "")
    connection.execute(made)


def _make_anew(
    connection: apsw.Connection, source: apsw.Connection, table: _Table, said: dict[int, bytes]
) -> None:
    """First the rows that are in their place, then those that have lost it.

    A row that fits nowhere stays if its key is in order, and else goes: it cannot be read, and
    might hide one that can.
    """
    begin_twin(connection, table.name)
    sql = f"SELECT {table.key} FROM {table.name} NOT INDEXED"  # noqa: S608
    keys: list[Any] = [key for (key,) in source.execute(sql)]
    around = [-1, *keys, 1 << 63]
    astray, damaged = [], []
    done: set[bytes] = set()
    for n, found in _readable(source, _select(table), f"{table.key} DESC", len(keys)):
        row = table.mended(_Row(*found), said)
        if table.has(row):
            if table.found_by and row.found_by in done:
                continue  # a tree may lead to a page twice
            if _put(connection, table, row):
                done.add(row.found_by)
                continue
        if homes := table.homes(row):
            astray.append(homes)
        elif around[n] < row.key < around[n + 2]:
            damaged.append(row)
    for homes in astray:
        free = (row for row in homes if table.name != "items" or _is_free(connection, row))
        any(_put(connection, table, row) for row in free)
    for row in damaged:
        _put(connection, table, row)
    take_over(connection, table.name)


def _put(connection: apsw.Connection, table: _Table, row: _Row) -> bool:
    """False if another row has its key."""
    given = zip((table.key, table.found_by, "body", table.more), row, strict=True)
    ours = {column: value for column, value in given if column is not None}
    values = ", ".join("?" * len(ours))
    sql = f"INSERT OR IGNORE INTO {TWIN} ({', '.join(ours)}) VALUES ({values})"  # noqa: S608
    connection.execute(sql, tuple(ours.values()))
    return connection.changes() == 1


def _is_free(connection: apsw.Connection, row: _Row) -> bool:
    """Whether no row has these items: a pack may have taken the place of one that was astray."""
    near: list[Any] = connection.execute(_BEFORE, (row.key + _count(row.key, row.body),)).fetchall()
    return all(at + _count(at, body) <= row.key for at, body in near)


def _count(pos: int, body: bytes) -> int:
    """How many items a row has."""
    try:
        return len(rows.unseal_items(pos, body, "").ends)
    except (Corrupt, UnsupportedFormat):
        return 1


def _copy(connection: apsw.Connection, source: apsw.Connection, name: str, columns: str) -> None:
    """Rows without a seal of their own place, as they are."""
    begin_twin(connection, name)
    count: Any = source.execute(f"SELECT count(*) FROM {name} NOT INDEXED").get  # noqa: S608
    back = columns.replace(",", " DESC,") + " DESC"
    sql = f"INSERT OR IGNORE INTO {TWIN} VALUES ({', '.join('?' * len(columns.split(',')))})"  # noqa: S608
    for _, row in _readable(source, f"SELECT {columns} FROM {name} NOT INDEXED", back, count):  # noqa: S608
        connection.execute(sql, row)
    take_over(connection, name)
