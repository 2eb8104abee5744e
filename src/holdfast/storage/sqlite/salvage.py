"""Salvage the rows of a damaged SQLite file, and rebuild its tables and indexes.

SQLite cannot read a page with a damaged header, nor the pages that it leads to, although the rows
are still there. So every page is read as if it were a leaf of some table. The result may be
nonsense, or rows that were removed or replaced. The seal of a row, and its index, show which ones
are valid.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import apsw

from holdfast.errors import UNREADABLE, Corrupt, Unavailable, UnsupportedFormat
from holdfast.format import records as format_records
from holdfast.format import rows as format_rows
from holdfast.storage.sqlite.reader import name_hash
from holdfast.storage.sqlite.schema import SCHEMA, drafted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


_HEADER, _POINTER, _LINK = 8, 2, 4  # in bytes: of a leaf; to a cell; to another page
_OTHERS = (0, 2, 10)
"""The first bytes of overflow and index pages: a leaf of a table with one damaged bit differs."""
_COLUMNS = 4
_PATIENCE = 8  # how often each page may be read, on average
_SIZES = (0, 1, 2, 3, 4, 6, 8, 8, 0, 0)  # of columns by their type
_ZERO, _ONE, _BYTES = 8, 9, 12  # such types; from _BYTES on they are text or bytes


class Sighting(NamedTuple):
    key: int
    columns: list[bytes | int | None]
    """The columns; that of the key is empty."""


def sightings(source: apsw.Connection) -> Iterator[Sighting]:
    """Yield everything that looks like a row, in any page that `source` sees, also in the log."""
    size: int = source.pragma("page_size")
    with drafted(Path(source.filename)) as draft:
        _copy_pages(source, draft)
        with draft.open("rb") as file:
            yield from _all_rows(file, size, draft.stat().st_size // size)


def _copy_pages(source: apsw.Connection, draft: Path) -> None:
    """Copy all pages unchanged."""
    copy = apsw.Connection(str(draft))
    try:
        copy.execute("PRAGMA synchronous = OFF")
        with copy.backup("main", source, "main") as pages:
            pages.step()
    finally:
        copy.close()


def _all_rows(file: BinaryIO, size: int, count: int) -> Iterator[Sighting]:
    pages = _Pages(file, size, count)
    for number in range(2, count + 1):  # the first is the schema's
        data = pages.get(number)
        if data[0] not in _OTHERS:
            yield from _rows(data, pages)


class _Pages:
    def __init__(self, file: BinaryIO, size: int, count: int) -> None:
        self._file, self._size, self._count = file, size, count
        self._patience = _PATIENCE * count

    def get(self, number: int) -> bytes:
        if not 0 < number <= self._count:
            raise IndexError(number)
        self._file.seek((number - 1) * self._size)
        return self._file.read(self._size)

    def chain(self, link: bytes, length: int) -> Iterator[bytes]:
        """Return the bytes of a chain of overflow pages.

        An existing row and some removed ones may lead to the same pages, but not endlessly.
        """
        if length > self._count * self._size:
            raise IndexError(length)
        while length > 0:
            self._patience -= 1
            if self._patience < 0:
                raise apsw.CorruptError("rows lead to the same pages again and again")
            data = self.get(int.from_bytes(link, "big"))
            link, part = data[:_LINK], data[_LINK : _LINK + length]
            yield part
            length -= len(part)


def _rows(data: bytes, pages: _Pages) -> Iterator[Sighting]:
    """Yield the rows of a page. The number in its header is ignored, because it may be damaged."""
    at, end = _HEADER, len(data)
    seen = set()
    while at + _POINTER <= end:
        cell = int.from_bytes(data[at : at + _POINTER], "big")
        at += _POINTER
        if at <= cell < len(data) and cell not in seen:
            seen.add(cell)
            with suppress(IndexError):
                yield _row(data, cell, pages)
                end = min(end, cell)  # rows come after all pointers


def _row(data: bytes, at: int, pages: _Pages) -> Sighting:
    """Return the row of a cell. Raise IndexError if there can be none."""
    length, at = _number(data, at)
    key, at = _number(data, at)
    here, rest = data[at : at + _local(length, len(data))], at + _local(length, len(data))
    head, at = _number(here, 0)
    types = []
    while at < head:
        kind, at = _number(here, at)
        types.append(kind)
    sizes = [*map(_size, types)]
    if head != at or head + sum(sizes) != length or len(types) > _COLUMNS:
        raise IndexError(at)
    payload = here + b"".join(pages.chain(data[rest : rest + _LINK], length - len(here)))
    columns: list[bytes | int | None] = []
    for kind, size in zip(types, sizes, strict=True):
        value = payload[at : at + size]
        columns.append(value if kind >= _BYTES else _integer(kind, value))
        at += size
    return Sighting(key, columns)


def _number(data: bytes, at: int) -> tuple[int, int]:
    """Return a number in SQLite's variable-length form, and the offset of its end."""
    n = 0
    for _ in range(8):
        byte = data[at]
        at += 1
        n = n << 7 | byte & 127
        if byte < 128:
            return n, at
    n = n << 8 | data[at]
    return n - (1 << 64) if n >> 63 else n, at + 1


def _local(length: int, size: int) -> int:
    """Return how many bytes of a row are in its page; the rest is in overflow pages."""
    most = size - 35
    if length <= most:
        return length
    least = (size - 12) * 32 // 255 - 23
    local = least + (length - least) % (size - _LINK)
    return local if local <= most else least


def _size(kind: int) -> int:
    return (kind - _BYTES) // 2 if kind >= _BYTES else _SIZES[kind]


def _integer(kind: int, value: bytes) -> int | None:
    return int.from_bytes(value, "big", signed=True) if value else {_ZERO: 0, _ONE: 1}.get(kind)


TWIN = "made_anew"
_TAKE_OVER = """UPDATE sqlite_schema SET rootpage =
(SELECT rootpage FROM sqlite_schema WHERE name = ?) WHERE name = ?;
DELETE FROM sqlite_schema WHERE name = ?"""


@contextmanager
def mending(connection: apsw.Connection) -> Iterator[apsw.Connection]:
    """Open a transaction, and a second connection that reads the same data.

    A connection that meets damage within a transaction cannot continue it. If the damage is too
    severe, the transaction is undone.
    """
    connection.execute("BEGIN IMMEDIATE")
    source = apsw.Connection(connection.filename, flags=apsw.SQLITE_OPEN_READONLY)
    try:
        yield source
        connection.execute("COMMIT")
    except BaseException as e:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        if not isinstance(e, apsw.CorruptError | UnicodeDecodeError):  # verify() reports these
            raise
    finally:
        source.close()


def take_over(connection: apsw.Connection, name: str) -> None:
    """Replace a tree by its twin.

    The old tree is not dropped, because it might claim pages that belong to others.
    """
    connection.execute("PRAGMA writable_schema = ON")
    try:
        connection.execute(_TAKE_OVER, (TWIN, name, TWIN))
    finally:
        connection.execute("PRAGMA writable_schema = RESET")


def is_sound(source: apsw.Connection, table: str | None = None) -> bool:
    """Return whether the trees of a table and its indexes are sound, or all trees."""
    return faults(source, table) == []


def faults(source: apsw.Connection, table: str | None = None) -> list[str] | None:
    """Return the problems that SQLite finds; None if it gives up."""
    check = "PRAGMA quick_check" if table is None else f"PRAGMA quick_check({table})"
    try:
        told = [str(line) for (line,) in source.execute(check)]
    except apsw.CorruptError:
        return None
    return [line for line in told if line != "ok" and not line.startswith("NULL value")]


def as_bytes(column: str) -> str:
    """Return a column as bytes. If its type is damaged, often all of its bytes still exist."""
    return f"iif(typeof({column}) IN ('blob', 'text'), CAST({column} AS BLOB), x'')"


def begin_twin(connection: apsw.Connection, name: str) -> None:
    """Create a twin of a table, without constraints that would create an index."""
    made = SCHEMA[name].replace(f"TABLE {name} ", f"TABLE {TWIN} ").replace(" UNIQUE", "")
    connection.execute(made)


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
    """A table: its columns, and the address that its rows are sealed for."""

    name: str
    kind: int
    key: str = "pos"
    found_by: str | None = None
    more: str | None = None
    address: Callable[[int, bytes], int] = lambda key, _: key
    check: Callable[[_Row], object] = lambda _: None
    """Raises if a row is damaged."""
    repeated: Callable[[_Row], int | None] = lambda row: row.more
    """Return the expected value of the column `more`; raise if the row is damaged."""

    def has(self, row: _Row) -> bool:
        """Return whether a row is at its own position."""
        return format_rows.is_sealed(self.kind, self.address(row.key, row.found_by), row.body)

    def sighted(self, seen: Sighting) -> _Row | None:
        """Return a sighting as a row of this table, if it is one."""
        key, (_, *columns) = seen.key, seen.columns or [None]
        found_by = columns.pop(0) if self.found_by and columns else b""
        more = columns.pop(0) if self.more and columns else None
        if len(columns) != 1 or type(found_by) is not bytes or type(columns[0]) is not bytes:
            return None
        row = _Row(key, found_by, columns[0], more if type(more) is int else self.instead)
        return row if self.has(row) else None

    @property
    def instead(self) -> int | None:
        """Return the value to use in place of a damaged one in the column `more`."""
        return 0 if self.more == "uses" else None

    def homes(self, row: _Row) -> list[_Row]:
        """Return the row at each key that differs in one bit and fits the row's seal."""
        ways = [row._replace(key=row.key ^ 1 << bit) for bit in range(63)]
        return [way for way in ways if self.has(way)]

    def mended(self, row: _Row, said: dict[int, bytes]) -> _Row:
        """Return the row as its index and its body say it should be."""
        if row.key in said:
            try:
                self.check(row)
            except UNREADABLE:
                row = row._replace(found_by=said[row.key])
        with suppress(*UNREADABLE):
            row = row._replace(more=self.repeated(row))
        return row


def _place(pos: int) -> tuple[int, int]:
    return pos >> format_records.SEQ_BITS, pos & format_records.MAX_SEQ


def _check_blob(row: _Row) -> None:
    _, flat = format_rows.unseal(
        format_rows.BLOB, format_rows.blob_address(row.found_by), row.body, "a blob"
    )
    if sha256(flat).digest() != row.found_by:
        raise Corrupt("a blob does not match its digest")


def _ancestor(row: _Row) -> int | None:
    session, seq = _place(row.key)
    return format_records.unseal_graft(session, seq, row.body).ancestor if seq else row.more


_TABLES = (
    _Table("heads", format_rows.HEAD, "session"),
    _Table("items", format_rows.ITEMS),
    _Table("operations", format_rows.OPERATION),
    _Table("tombs", format_rows.TOMBSTONE),
    _Table("gaps", format_rows.GRAFT, more="ancestor", repeated=_ancestor),
    _Table("journal", format_rows.JOURNAL),
    _Table(
        *("sessions", format_rows.SESSION, "num", "name", "origin", format_records.session_address),
        check=lambda row: format_records.unseal_session(*row[:3]),
        repeated=lambda row: format_records.unseal_session(*row[:3]).origin,
    ),
    _Table(
        *("checkpoints", format_rows.CHECKPOINT, "pos", "id", None),
        address=lambda pos, name: format_records.checkpoint_address(*_place(pos), name),
        check=lambda row: format_records.unseal_checkpoint(*_place(row.key), *row[1:3]),
    ),
    _Table(
        *("blobs", format_rows.BLOB, "num", "digest", "uses"),
        address=lambda _, digest: format_rows.blob_address(digest),  # its number can be any
        check=_check_blob,
    ),
)
_UNSEALED = {
    "keys": ("session, key, seq", True),  # records have the same contents
    "facets": ("kind, value, id", True),
    "marks": ("pos, kind, value, body", False),
    "tallies": ("session, marks, operations, tombs, lease", True),  # can be computed from rows
    "spans": ("session, first, next", True),
    "counters": ("space, body", True),
}


def put_in_order(connection: apsw.Connection) -> None:
    """Rebuild each damaged table whose rows are found or can be computed again."""
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
    """Yield the keys for which the index and the row differ."""
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
    """Yield keys in the order of the tree; from both ends if a part cannot be read."""
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
    """Yield all rows with their positions; from both ends if one cannot be read."""
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
    """Distinguishes rows from removed rows that are still visible in a damaged tree or in pages.

    A removed item or blob is harmless garbage, because an address never gets other content. For
    checkpoints and sessions, the index decides.
    """

    def __init__(self, source: apsw.Connection, table: _Table, *, sound: bool) -> None:
        self._source, self._table, self._sound = source, table, sound
        self.salvages = not sound and table.name in {"items", "blobs"}
        """Whether rows may be taken from pages as well."""
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
        """Return whether the table can be rebuilt without its unreadable rows."""
        return self.salvages or self._table.name in {"heads", "tombs"}

    def _keys_of_index(self) -> set[int] | None:
        """Return the keys in the index; None if it cannot be read."""
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
        """Return whether a sealed row of the tree was not removed, as far as can be known."""
        if self._table.name == "tombs" and not self._sound:
            return False  # a wrong deletion would be freed by gc
        return not self._believed or self._is_named(row)

    def is_left(self, row: _Row) -> bool:
        """Return whether a row that is only visible in a page was not removed."""
        return self._listed is None or self._is_named(row)

    def may_be_one(self, row: _Row) -> bool:
        """Return whether the position of an unsealed row may really have a row."""
        return not self._believed or row.key in (self._listed or ())

    def _is_named(self, row: _Row) -> bool:
        return self._source.execute(self._named, (row.found_by, row.key)).get is not None


# -- writing -------------------------------------------------------------------------------------


def _make_anew(
    connection: apsw.Connection, source: apsw.Connection, table: _Table, said: dict[int, bytes]
) -> None:
    """Rebuild a table: first from the rows that are in their place, then from the displaced ones.

    A row that fits nowhere stays if its key is in order. Otherwise it is dropped: it cannot be
    read, and might hide a row that can be. It may not be a row at all.
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
    """Collect rows of items until all of them are known."""
    count = _count(row.key, row.body)
    connection.execute("INSERT INTO aside VALUES (?, ?, ?)", (count, row.key, row.body))
    return True


def _put_largest_first(connection: apsw.Connection, table: _Table) -> None:
    """Write the longest rows first.

    Rows that a pack has replaced may still be visible next to it. Rows that gc has freed are freed
    again by the next gc.
    """
    found = connection.execute("SELECT pos, x'', body, NULL FROM aside ORDER BY many DESC")
    for row in map(_Row._make, found):
        if _is_free(connection, table, row):
            _put(connection, table, row)
    connection.execute("DROP TABLE aside")


def _put(connection: apsw.Connection, table: _Table, row: _Row) -> bool:
    """Write a row. Return False if another row has its key. A blob takes any free key."""
    if table.name == "blobs" and connection.execute(_TAKEN, (row.key,)).get:
        row = row._replace(key=None)  # type: ignore[arg-type]
    given = zip((table.key, table.found_by, "body", table.more), row, strict=True)
    ours = {column: value for column, value in given if column is not None}
    values = ", ".join("?" * len(ours))
    sql = f"INSERT OR IGNORE INTO {TWIN} ({', '.join(ours)}) VALUES ({values})"  # noqa: S608
    connection.execute(sql, tuple(ours.values()))
    return connection.changes() == 1


def _is_free(connection: apsw.Connection, table: _Table, row: _Row) -> bool:
    """Return whether no row has these items yet; a pack may have replaced a displaced row."""
    if table.name != "items":
        return True
    near: list[Any] = connection.execute(_BEFORE, (row.key + _count(row.key, row.body),)).fetchall()
    return all(at + _count(at, body) <= row.key for at, body in near)


def _count(pos: int, body: bytes) -> int:
    """Return the number of items in a row."""
    try:
        return len(format_rows.unseal_items(pos, body, "").ends)
    except (Corrupt, UnsupportedFormat):
        return 1


def _copy(
    connection: apsw.Connection, source: apsw.Connection, name: str, columns: str, *, spares: bool
) -> None:
    """Copy rows whose seal does not cover their position, unchanged."""
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


def reindex(connection: apsw.Connection) -> None:
    """Rebuild SQLite's indexes, and the tables that only repeat the contents of sealed rows."""
    try:
        _reindex(connection)
    except OSError as e:
        if isinstance(e, Unavailable):
            raise
        raise Unavailable(f"cannot write beside the store {connection.filename}: {e}") from e


def _reindex(connection: apsw.Connection) -> None:
    _check_length(connection)
    put_in_order(connection)
    indexes = "SELECT name, tbl_name FROM sqlite_schema WHERE type = 'index'"
    for name, table in connection.execute(indexes).fetchall():
        # Two rows may claim the same name. The old index may still distinguish them.
        with suppress(apsw.ConstraintError), mending(connection) as source:
            if is_sound(source, str(table)):
                connection.execute(f"REINDEX {name}")
            else:
                connection.execute(_twin(connection, str(name), str(table)))
                take_over(connection, str(name))
    _note_names(connection)
    _give_back(connection)


def _check_length(connection: apsw.Connection) -> None:
    """Raise Corrupt if the file may have pages of the store after the last page that it counts.

    SQLite would write over them. Bytes that belong to no tree may stay.
    """
    path, size = Path(connection.filename), connection.pragma("page_size")
    if path.stat().st_size <= connection.pragma("page_count") * size:
        return
    log, written_back = connection.wal_checkpoint()  # truncates the freed pages
    if written_back < log:
        raise Unavailable(
            f"a reader uses an older state of the store {path}", hint="try again later"
        )
    there, counted = path.stat().st_size // size, connection.pragma("page_count")
    if there > counted and not is_sound(connection):
        raise Corrupt(
            f"the store {path} has {there} pages, and counts {counted} of them",
            hint="put a backup back, or copy() to a new store what loads",
        )


def _twin(connection: apsw.Connection, name: str, table: str) -> str:
    """Return the statement that creates an index like this one."""
    if name in SCHEMA:
        return SCHEMA[name].replace(f"INDEX {name} ", f"INDEX {TWIN} ")
    columns = [column for _, _, column in connection.execute(f"PRAGMA index_info({name})")]
    return f"CREATE UNIQUE INDEX {TWIN} ON {table} ({', '.join(map(str, columns))})"


def _give_back(connection: apsw.Connection) -> None:
    """Free the pages of replaced trees, also of a run that was interrupted.

    VACUUM can make damage worse, so it is tried on a copy.
    """
    path = Path(connection.filename)
    try:
        if connection.execute("PRAGMA quick_check(1)").get == "ok":
            return
        with drafted(path) as draft:
            connection.execute("VACUUM INTO ?", (str(draft),))
            copy = apsw.Connection(str(draft), flags=apsw.SQLITE_OPEN_READONLY)
            sound = is_sound(copy)
            copy.close()
        if sound:
            connection.execute("VACUUM")
    except (apsw.CorruptError, apsw.ConstraintError):
        pass  # there is more damage; verify() reports it


def _note_names(connection: apsw.Connection) -> None:
    """Rebuild the second index of session names.

    Entries of sessions that are damaged or lost are kept. Otherwise their names would look free,
    and a save under such a name would start a new session.
    """
    with mending(connection) as source:
        sound = {name_hash(name): number for number, name in _sessions(source)}
        known: dict[Any, Any] = {}
        with suppress(apsw.CorruptError):
            known.update(source.execute("SELECT hash, num FROM names"))
        certain = set(sound.values())
        kept = {hash: n for hash, n in known.items() if type(n) is int and n not in certain}
        if kept | sound != known or not is_sound(source, "names"):
            begin_twin(connection, "names")
            given = (kept | sound).items()
            connection.executemany(f"INSERT INTO {TWIN} VALUES (?, ?)", given)  # noqa: S608
            take_over(connection, "names")


def _sessions(source: apsw.Connection) -> Iterator[tuple[int, bytes]]:
    """Yield number and name of all sound sessions."""
    sql = f"SELECT num, {as_bytes('name')}, {as_bytes('body')} FROM sessions NOT INDEXED"  # noqa: S608
    found: Iterator[Any] = source.execute(sql)
    for number, name, body in found:
        with suppress(*UNREADABLE):
            format_records.unseal_session(number, name, body)
            yield number, name
