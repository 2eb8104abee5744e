"""Tables of a SQLite file made anew where rows are not what, or not where, they should be.

Rows of a damaged tree may be missed although they are there, and whatever is written beside them
can hide or overwrite others. So nothing is mended in place: what can be read goes to a new tree, by
way of the old one or, where that leads nowhere, from the pages themselves. A row's seal tells its
key; and of a damaged row its index may be the last to know how it is found.
"""

from __future__ import annotations

from contextlib import suppress
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

import apsw

from holdfast.backends.sqlite_pages import Sighting, sightings
from holdfast.backends.sqlite_trees import (
    TWIN,
    as_bytes,
    begin_twin,
    faults,
    is_sound,
    mending,
    take_over,
)
from holdfast.codec import records, rows
from holdfast.errors import UNREADABLE, Corrupt, UnsupportedFormat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_TAKEN = f"SELECT 1 FROM {TWIN} WHERE num = ?"  # noqa: S608
_BEFORE = f"SELECT pos, body FROM {TWIN} WHERE pos < ? ORDER BY pos DESC LIMIT 1"  # noqa: S608
_DISAGREE = """SELECT said.{key}, said.{column} FROM {table} said INDEXED BY {index}
LEFT JOIN {table} own NOT INDEXED ON own.{key} = said.{key}
WHERE typeof(said.{column}) = 'blob' AND own.{column} IS NOT said.{column}"""


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

    def sighted(self, seen: Sighting) -> _Row | None:
        """What was seen in a page, if it is a row of this table."""
        key, (_, *columns) = seen.key, seen.columns or [None]
        found_by = columns.pop(0) if self.found_by and columns else b""
        more = columns.pop(0) if self.more and columns else None
        if len(columns) != 1 or type(found_by) is not bytes or type(columns[0]) is not bytes:
            return None
        row = _Row(key, found_by, columns[0], more if type(more) is int else self.instead)
        return row if self.has(row) else None

    @property
    def instead(self) -> int | None:
        """Of a damaged value in the column `more`."""
        return 0 if self.more == "uses" else None

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
    "keys": ("session, key, seq", True),  # records repeat what it says
    "facets": ("kind, value, id", True),
    "marks": ("pos, kind, value, body", False),
}


def put_in_order(connection: apsw.Connection) -> None:
    """Every table that needs it, and whose rows are there or can be done without."""
    for table in _TABLES:
        with mending(connection) as source:
            said = dict(_disagreements(source, table))
            if not is_sound(source, table.name) or _has_odd_rows(source, table, said):
                _make_anew(connection, source, table, said)
    for name, (columns, spares) in _UNSEALED.items():
        with mending(connection) as source:
            if not is_sound(source, name):
                _copy(connection, source, name, columns, spares=spares)


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
    instead = "NULL" if table.instead is None else table.instead
    more = f"iif(typeof({table.more}) = 'integer', {table.more}, {instead})"
    columns = f"{table.key}, {found_by}, {as_bytes('body')}, {more if table.more else 'NULL'}"
    return f"SELECT {columns} FROM {table.name} NOT INDEXED"  # noqa: S608


def _keys(source: apsw.Connection, table: _Table, *, spares: bool) -> list[Any]:
    """In the order of the tree; from both ends, if not all of it can be read."""
    ends: list[list[Any]] = []
    for order in ("", f" ORDER BY {table.key} DESC"):
        found: list[Any] = []
        ends.append(found)
        sql = f"SELECT {table.key} FROM {table.name} NOT INDEXED{order}"  # noqa: S608
        try:
            for (key,) in source.execute(sql):
                found.append(key)
        except apsw.CorruptError:
            if not spares:
                raise
        else:
            return found[::-1] if order else found
    return ends[0] + ends[1][::-1]


def _readable(
    source: apsw.Connection, select: str, back: str, count: int, *, spares: bool = False
) -> Iterator[Any]:
    """All rows with their places; from both ends, if there is one that cannot be read."""
    read = 0
    for order in ("", f" ORDER BY {back}"):
        with suppress(apsw.CorruptError):
            for n, row in enumerate(source.execute(select + order)):
                yield (count - 1 - n if order else n), row
                read += 1
        if read >= count:
            return
    if read < count - 1 and not spares:
        raise apsw.CorruptError("there may be sound rows between those that cannot be read")


class _Judge:
    """Tells rows from what was removed and can still be seen in a damaged tree, or in pages.

    Items and blobs that were removed are only garbage: what is at their address never changes. Of
    checkpoints and sessions the index tells.
    """

    def __init__(self, source: apsw.Connection, table: _Table, *, sound: bool) -> None:
        self._source, self._table, self._sound = source, table, sound
        self.salvages = not sound and table.name in {"items", "blobs"}
        """Whether rows may be taken from pages."""
        self._listed: set[int] | None = None
        self._believed = False
        if table.name in {"checkpoints", "sessions"} and not sound:
            self._listed = self._keys_of_index()
            self.salvages = self._listed is not None
            self._believed = self._listed is not None and self._only_rows_are_damaged()
        self._named = f"""SELECT 1 FROM {table.name} INDEXED BY sqlite_autoindex_{table.name}_1
        WHERE {table.found_by} = ? AND {table.key} = ?"""  # noqa: S608

    @property
    def spares(self) -> bool:
        """Whether the table can be made anew without rows that cannot be read."""
        return self.salvages or self._table.name in {"heads", "tombs"}

    def _keys_of_index(self) -> set[int] | None:
        """None if it cannot be read."""
        index = f"sqlite_autoindex_{self._table.name}_1"
        sql = f"SELECT {self._table.key} FROM {self._table.name} INDEXED BY {index}"  # noqa: S608
        try:
            found: Iterator[Any] = self._source.execute(sql)
            return {key for (key,) in found}
        except apsw.CorruptError:
            return None

    def _only_rows_are_damaged(self) -> bool:
        found = faults(self._source, self._table.name)
        if found is None:
            return True  # the index can be read
        sql = "SELECT rootpage FROM sqlite_schema WHERE tbl_name = ? ORDER BY type = 'index'"
        rows, *indexes = [f"Tree {n} " for (n,) in self._source.execute(sql, (self._table.name,))]
        told = "\n".join(found)
        return rows in told and not any(index in told for index in indexes)

    def is_there(self, row: _Row) -> bool:
        """Whether a sealed row of the tree was not removed, as far as anything tells."""
        if self._table.name == "tombs" and not self._sound:
            return False  # what is deleted once more by mistake would be freed
        return not self._believed or self._is_named(row)

    def is_left(self, row: _Row) -> bool:
        """Whether one that is only seen in a page was not."""
        return self._listed is None or self._is_named(row)

    def may_be_one(self, row: _Row) -> bool:
        """Whether there was a row where one is that has no seal."""
        return not self._believed or row.key in (self._listed or ())

    def _is_named(self, row: _Row) -> bool:
        return self._source.execute(self._named, (row.found_by, row.key)).get is not None


# -- writing -------------------------------------------------------------------------------------


def _make_anew(
    connection: apsw.Connection, source: apsw.Connection, table: _Table, said: dict[int, bytes]
) -> None:
    """First the rows that are in their place, then those that have lost it.

    A row that fits nowhere stays if its key is in order, and else goes: it cannot be read, and
    might hide one that can. It may not be a row at all, if pages are not what they were.
    """
    begin_twin(connection, table.name)
    sound = is_sound(source, table.name)
    judge = _Judge(source, table, sound=sound)
    put: Callable[[apsw.Connection, _Table, _Row], bool] = _put
    if table.name == "items" and not sound:
        put = _set_aside
        connection.execute("CREATE TEMP TABLE aside (many INTEGER, pos INTEGER, body BLOB)")
    keys = _keys(source, table, spares=judge.spares)
    around = [-1, *keys, 1 << 63]
    astray, damaged = [], []
    done: set[bytes] = set()
    select, back = _select(table), f"{table.key} DESC"
    for n, found in _readable(source, select, back, len(keys), spares=judge.spares):
        row = table.mended(_Row(*found), said)
        if table.has(row):
            if (table.found_by and row.found_by in done) or not judge.is_there(row):
                continue  # a tree may lead to a page twice
            if put(connection, table, row):
                done.add(row.found_by)
                continue
        if homes := table.homes(row):
            astray.append(homes)
        elif around[n] < row.key < around[n + 2]:
            damaged.append(row)
    if judge.salvages:
        for row in filter(None, map(table.sighted, sightings(source))):
            known = table.found_by and row.found_by in done
            if not known and judge.is_left(row) and put(connection, table, table.mended(row, said)):
                done.add(row.found_by)
    if put is _set_aside:
        _put_largest_first(connection, table)
    for homes in astray:
        free = (row for row in homes if judge.is_there(row) and _is_free(connection, table, row))
        any(_put(connection, table, row) for row in free)
    for row in damaged:
        if judge.may_be_one(row) and _is_free(connection, table, row):
            _put(connection, table, row)
    take_over(connection, table.name)


def _set_aside(connection: apsw.Connection, _: _Table, row: _Row) -> bool:
    """Rows of items, until all of them are known."""
    count = _count(row.key, row.body)
    connection.execute("INSERT INTO aside VALUES (?, ?, ?)", (count, row.key, row.body))
    return True


def _put_largest_first(connection: apsw.Connection, table: _Table) -> None:
    """What a pack has replaced may still be seen beside it; what gc has freed, gc frees again."""
    found = connection.execute("SELECT pos, x'', body, NULL FROM aside ORDER BY many DESC")
    for row in map(_Row._make, found):
        if _is_free(connection, table, row):
            _put(connection, table, row)
    connection.execute("DROP TABLE aside")


def _put(connection: apsw.Connection, table: _Table, row: _Row) -> bool:
    """False if another row has its key; but a blob takes any that is free."""
    if table.name == "blobs" and connection.execute(_TAKEN, (row.key,)).get:
        row = row._replace(key=None)  # type: ignore[arg-type]
    given = zip((table.key, table.found_by, "body", table.more), row, strict=True)
    ours = {column: value for column, value in given if column is not None}
    values = ", ".join("?" * len(ours))
    sql = f"INSERT OR IGNORE INTO {TWIN} ({', '.join(ours)}) VALUES ({values})"  # noqa: S608
    connection.execute(sql, tuple(ours.values()))
    return connection.changes() == 1


def _is_free(connection: apsw.Connection, table: _Table, row: _Row) -> bool:
    """Whether no row has these items: a pack may have taken the place of one that was astray."""
    if table.name != "items":
        return True
    near: list[Any] = connection.execute(_BEFORE, (row.key + _count(row.key, row.body),)).fetchall()
    return all(at + _count(at, body) <= row.key for at, body in near)


def _count(pos: int, body: bytes) -> int:
    """How many items a row has."""
    try:
        return len(rows.unseal_items(pos, body, "").ends)
    except (Corrupt, UnsupportedFormat):
        return 1


def _copy(
    connection: apsw.Connection, source: apsw.Connection, name: str, columns: str, *, spares: bool
) -> None:
    """Rows without a seal of their own place, as they are."""
    begin_twin(connection, name)
    back = columns.replace(",", " DESC,") + " DESC"
    select = f"SELECT {columns} FROM {name} NOT INDEXED"  # noqa: S608
    count: Any = 1 << 63  # so that both ends are read
    if not spares:
        count = source.execute(f"SELECT count(*) FROM {name} NOT INDEXED").get  # noqa: S608
    sql = f"INSERT OR IGNORE INTO {TWIN} VALUES ({', '.join('?' * len(columns.split(',')))})"  # noqa: S608
    for _, row in _readable(source, select, back, count, spares=spares):
        connection.execute(sql, row)
    take_over(connection, name)
