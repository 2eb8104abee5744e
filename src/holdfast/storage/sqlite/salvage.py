"""Salvage the rows of a damaged SQLite file into a new one, which then takes the place of the old.

The new file has the rows that SQLite can read, and those that can be seen in the pages of the old
file. The seal of a row, and its index, show which ones are valid. The old file changes in one
commit, which writes all pages of the new one over it. So a crash leaves the old store or the new
one, and other connections see it like any other commit.
"""

from __future__ import annotations

from contextlib import closing, contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import apsw

from holdfast.errors import UNREADABLE, Corrupt, Unavailable, UnsupportedFormat
from holdfast.format import records as format_records
from holdfast.format import rows as format_rows
from holdfast.log import logger
from holdfast.storage.sqlite.pages import sightings
from holdfast.storage.sqlite.reader import name_hash
from holdfast.storage.sqlite.schema import drafted, write_schema
from holdfast.storage.tables import TABLES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast.storage.sqlite.pages import Sighting

_TRIES = 5
_NO_FAULT = "NULL value"
"""Begins what SQLite says of a column that must not be empty. Nothing is wrong with the trees."""


def salvage(connect: Callable[[], apsw.Connection]) -> bool:
    """Rewrite a store whose structures are damaged. Return whether it was rewritten.

    Without such damage, or if it cannot be repaired without guessing, nothing is written. No other
    thread of this process may write. If another process writes in between, the work starts again.
    """
    for _ in range(_TRIES):
        with closing(connect()) as live:  # a new one, which keeps no damaged page
            path, version = Path(live.filename), live.pragma("data_version")
            if not is_damaged(live):
                return False
            _check_length(live)
            try:
                with drafted(path) as old, drafted(path) as new:
                    _copy_pages(live, old)
                    _rescue(old, new)
                    if _put_in_place(new, connect, live, version):
                        return True
            except (apsw.CorruptError, UnicodeDecodeError) as e:  # verify() reports the damage
                logger.warning("the store %s is not rewritten: %s", path, e)
                return False
            except OSError as e:
                if isinstance(e, Unavailable):
                    raise
                raise Unavailable(f"cannot write beside the store {path}: {e}") from e
    raise Unavailable(
        f"other processes write to the store {path} all the time", hint="stop them and try again"
    )


# -- what is damaged -----------------------------------------------------------------------------


def is_damaged(source: apsw.Connection) -> bool:
    """Return whether a tree is damaged, or a row is not where it, or its index, says it is."""
    source.execute("BEGIN")  # others may write at the same time
    try:
        if _faults(source, "PRAGMA integrity_check") != "":
            return True
        names: dict[Any, Any] = dict(source.execute("SELECT hash, num FROM names"))
        return names != _names(source, names) or any(_is_odd(source, t) for t in _TABLES)
    except (apsw.CorruptError, UnicodeDecodeError):
        return True
    finally:
        if source.in_transaction:
            source.execute("ROLLBACK")


def is_sound(source: apsw.Connection) -> bool:
    """Return whether all trees are sound."""
    return _faults(source, "PRAGMA quick_check") == ""


def _faults(source: apsw.Connection, check: str) -> str | None:
    """Return what SQLite finds wrong with trees; None if it gives up."""
    try:
        told = [str(line) for (line,) in source.execute(check)]
    except apsw.CorruptError:
        return None
    return "\n".join(line for line in told if line != "ok" and not line.startswith(_NO_FAULT))


def _is_odd(source: apsw.Connection, table: _Table) -> bool:
    """Return whether a row has a column of a wrong type, or belongs somewhere else."""
    odd = [f"typeof({column}) <> 'blob'" for column in (table.found_by, "body") if column]
    sql = f"SELECT 1 FROM {table.name} NOT INDEXED WHERE {' OR '.join(odd)} LIMIT 1"  # noqa: S608
    if source.execute(sql).get:
        return True
    rows = (_Row(*row) for row in source.execute(table.select))
    return any(table.mended(row, {}) != row or table.is_astray(row) for row in rows)


def _check_length(connection: apsw.Connection) -> None:
    """Raise Corrupt if the file may have pages of the store after the last page that it counts."""
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


# -- files ---------------------------------------------------------------------------------------


def _copy_pages(source: apsw.Connection, draft: Path) -> None:
    """Copy all pages unchanged, as they are at one moment, also those in the log."""
    with closing(apsw.Connection(str(draft))) as copy:
        copy.execute("PRAGMA synchronous = OFF")
        with copy.backup("main", source, "main") as pages:
            pages.step()


def _rescue(old: Path, new: Path) -> None:
    """Fill a new file with the rows of a damaged one. Raise CorruptError if some may be lost."""
    write_schema(new, durability="normal")
    with _opened(old) as source, _opened(new) as target:
        target.execute("BEGIN; DELETE FROM counters")
        rescues = [_Rescue(source, target, table) for table in _TABLES]
        for rescue in rescues:
            rescue.fill()
        for name, spares in _UNSEALED.items():
            _copy(source, target, name, spares=spares)
        known: dict[Any, Any] = {}
        with suppress(apsw.CorruptError):
            known.update(source.execute("SELECT hash, num FROM names"))
        names = _names(target, known).items()
        target.executemany("INSERT INTO names VALUES (?, ?)", names)
        target.execute("COMMIT")
        for rescue in rescues:
            rescue.check()
        if is_damaged(target):
            raise apsw.CorruptError("the new file is not sound")


@contextmanager
def _opened(draft: Path) -> Iterator[apsw.Connection]:
    with closing(apsw.Connection(str(draft))) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        yield connection


def _put_in_place(
    new: Path, connect: Callable[[], apsw.Connection], live: apsw.Connection, version: int
) -> bool:
    """Write all pages of a new file over the old one, in one durable commit.

    Return False, and write nothing, if the old one has changed since it was read.
    """
    with _opened(new) as source, closing(connect()) as target:
        target.execute("PRAGMA synchronous = FULL")
        with target.backup("main", source, "main") as pages:
            pages.step(1)  # from here on, no other connection can write
            is_current: bool = live.pragma("data_version") == version
            if is_current:
                pages.step()
    return is_current


# -- tables --------------------------------------------------------------------------------------


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

    @property
    def instead(self) -> int | None:
        """Return the value to use in place of a damaged one in the column `more`."""
        return 0 if self.more == "uses" else None

    @property
    def select(self) -> str:
        """Return the statement that reads all rows."""
        found_by = _as_bytes(self.found_by) if self.found_by else "x''"
        instead = "NULL" if self.instead is None else self.instead
        more = f"iif(typeof({self.more}) = 'integer', {self.more}, {instead})"
        columns = f"{self.key}, {found_by}, {_as_bytes('body')}, {more if self.more else 'NULL'}"
        return f"SELECT {columns} FROM {self.name} NOT INDEXED"  # noqa: S608

    @property
    def listing(self) -> str | None:
        """Return the statement that reads the index by which rows are found."""
        if self.found_by is None:
            return None
        index = f"sqlite_autoindex_{self.name}_1"
        return f"SELECT {self.key}, {self.found_by} FROM {self.name} INDEXED BY {index}"  # noqa: S608

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

    def homes(self, row: _Row) -> list[_Row]:
        """Return the row at each key that differs in one bit and fits the row's seal."""
        ways = [row._replace(key=row.key ^ 1 << bit) for bit in range(63)]
        return [way for way in ways if self.has(way)]

    def is_astray(self, row: _Row) -> bool:
        """Return whether a row belongs at another key."""
        return not self.has(row) and bool(self.homes(row))

    def mended(self, row: _Row, index: dict[int, bytes]) -> _Row:
        """Return the row as its index and its body say it should be."""
        listed = index.get(row.key)
        if type(listed) is bytes and listed != row.found_by:
            try:
                self.check(row)
            except UNREADABLE:
                row = row._replace(found_by=listed)
        with suppress(*UNREADABLE):
            row = row._replace(more=self.repeated(row))
        return row


def _as_bytes(column: str) -> str:
    """Return a column as bytes. If its type is damaged, often all of its bytes still exist."""
    return f"iif(typeof({column}) IN ('blob', 'text'), CAST({column} AS BLOB), x'')"


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
    "keys": True,  # records have the same contents
    "facets": True,
    "marks": False,
    "leases": False,
    "tallies": True,  # can be computed from rows
    "spans": True,
    "counters": True,
}
"""Tables whose rows are copied unchanged, and whether those that cannot be read may be left out."""


def _readable(
    source: apsw.Connection, table: str, select: str, back: str, *, spares: bool
) -> Iterator[Any]:
    """Yield all rows of a table; from both ends if one cannot be read.

    Raise CorruptError if sound rows may be missing, unless the table can be without them.
    """
    count: Any = 1 << 63
    if not spares:
        count = source.execute(f"SELECT count(*) FROM {table} NOT INDEXED").get  # noqa: S608
    read = 0
    for order in ("", f" ORDER BY {back}"):
        with suppress(apsw.CorruptError):
            for row in source.execute(select + order):
                yield row
                read += 1
            if spares:
                return
        if read >= count:
            return
    if read < count - 1 and not spares:
        raise apsw.CorruptError("there may be sound rows between those that cannot be read")


def _copy(source: apsw.Connection, target: apsw.Connection, name: str, *, spares: bool) -> None:
    """Copy rows whose seal does not cover their position, unchanged."""
    back = ", ".join(f"{column} DESC" for column in TABLES[name].columns)
    select = f"SELECT * FROM {name} NOT INDEXED"  # noqa: S608
    for row in _readable(source, name, select, back, spares=spares):
        marks = ", ".join("?" * len(row))
        target.execute(f"INSERT OR IGNORE INTO {name} VALUES ({marks})", row)  # noqa: S608


def _names(sessions: apsw.Connection, known: dict[Any, Any]) -> dict[Any, Any]:
    """Return the second index of session names.

    Entries of sessions that are damaged or lost are kept. Otherwise their names would look free,
    and a save under such a name would start a new session.
    """
    sound = {}
    sql = f"SELECT num, {_as_bytes('name')}, {_as_bytes('body')} FROM sessions NOT INDEXED"  # noqa: S608
    found: Iterator[Any] = sessions.execute(sql)
    for number, name, body in found:
        with suppress(*UNREADABLE):
            format_records.unseal_session(number, name, body)
            sound[name_hash(name)] = number
    certain = {*sound.values()}
    return {h: n for h, n in known.items() if type(n) is int and n not in certain} | sound


# -- the rows of one table -----------------------------------------------------------------------


class _Rescue:
    """Takes the rows of a table to a new file, and leaves those that were removed.

    A damaged tree, or its pages, may still show rows that were removed. A removed item or blob is
    harmless garbage, because an address never gets other content. For checkpoints and sessions, the
    index decides.
    """

    def __init__(self, source: apsw.Connection, target: apsw.Connection, table: _Table) -> None:
        self._source, self._target, self._table = source, target, table
        told = _faults(source, f"PRAGMA quick_check({table.name})")
        self._sound = told == ""
        self._index: dict[int, bytes] | None = None
        if table.listing is not None:
            with suppress(apsw.CorruptError):
                self._index = dict(source.execute(table.listing))
        judged = table.name in {"checkpoints", "sessions"} and not self._sound
        self._listed = self._index if judged else None
        """The index, if it decides which rows there are."""
        self._salvages = self._listed is not None or (
            not self._sound and table.name in {"items", "blobs"}
        )
        """Whether rows may be taken from pages as well."""
        self._believed = self._listed is not None and self._only_rows_are_damaged(told)
        self._spares = self._salvages or table.name in {"heads", "tombs"}
        """Whether the table can be rebuilt without its unreadable rows."""
        self._columns = table.key, table.found_by, "body", table.more
        columns = [column for column in self._columns if column]
        into, marks = f"{table.name} ({', '.join(columns)})", ", ".join("?" * len(columns))
        self._insert = f"INSERT OR IGNORE INTO {into} VALUES ({marks})"  # noqa: S608

    def _only_rows_are_damaged(self, told: str | None) -> bool:
        if told is None:
            return True  # the index can be read
        sql = "SELECT rootpage FROM sqlite_schema WHERE tbl_name = ? ORDER BY type = 'index'"
        trees = self._source.execute(sql, (self._table.name,))
        rows, *indexes = [f"Tree {n} " in told for (n,) in trees]
        return rows and not any(indexes)

    def _is_there(self, row: _Row) -> bool:
        """Return whether a sealed row of the tree was not removed, as far as can be known."""
        if self._table.name == "tombs" and not self._sound:
            return False  # a wrong deletion would be freed by gc
        return not self._believed or self._is_left(row)

    def _is_left(self, row: _Row) -> bool:
        """Return whether a row that is only visible in a page was not removed."""
        return self._listed is None or self._listed.get(row.key) == row.found_by

    def _may_be_one(self, row: _Row) -> bool:
        """Return whether the position of an unsealed row may really have a row."""
        return not self._believed or row.key in (self._listed or {})

    def _rows(self) -> Iterator[_Row]:
        """Yield the rows that SQLite can read."""
        table, index = self._table, self._index or {}
        self._source.release_memory()  # SQLite accepts a damaged page that it has kept
        back = f"{table.key} DESC"
        for row in _readable(self._source, table.name, table.select, back, spares=self._spares):
            yield table.mended(_Row(*row), index)

    def fill(self) -> None:
        """Take the rows that are in their place first, and then the displaced ones.

        A row that fits nowhere stays if its key is in order. Otherwise it is dropped: it cannot be
        read, and might hide a row that can be. It may not be a row at all.
        """
        table, astray, damaged = self._table, [], []
        packs = table.name == "items" and not self._sound
        put = self._set_aside if packs else self._put
        near = [-1]
        for row in self._rows():
            near.append(row.key)  # for the row before, this is the next key
            near = near[-2:]
            if table.has(row):
                if self._is_there(row):
                    put(row)
            elif homes := table.homes(row):
                astray.append(homes)
            elif row.found_by or row.body:
                damaged.append((row, near))
        if self._salvages:
            old = Path(self._source.filename)
            for seen in sightings(old, self._source.pragma("page_size")):
                found = table.sighted(seen)
                if found is not None and self._is_left(found):
                    put(table.mended(found, self._index or {}))
        if packs:
            self._put_largest_first()
        for homes in astray:
            free = (row for row in homes if self._is_there(row) and self._is_free(row))
            any(self._put(table.mended(row, self._index or {})) for row in free)
        for row, near in damaged:
            if self._may_be_one(row) and _ascend(near) and self._is_free(row):
                self._put(row)

    def check(self) -> None:
        """Raise CorruptError if a sound row that SQLite can read is missing in the new file."""
        table, by = self._table, self._table.found_by or self._table.key
        sql = f"SELECT 1 FROM {table.name} WHERE {by} = ?"  # noqa: S608
        for row in self._rows():
            if table.has(row) and self._is_there(row):
                key = row.found_by if table.found_by else row.key
                if self._target.execute(sql, (key,)).get is None and self._is_free(row):
                    raise apsw.CorruptError(f"a row of {table.name} is missing in the new file")

    def _put(self, row: _Row) -> bool:
        """Write a row. Return False if another one has its key. A blob takes any free key."""
        if self._table.name == "blobs":
            taken = self._target.execute("SELECT 1 FROM blobs WHERE num = ?", (row.key,)).get
            row = row._replace(key=None) if taken else row  # type: ignore[arg-type]
        given = zip(self._columns, row, strict=True)
        self._target.execute(self._insert, [value for column, value in given if column])
        return self._target.changes() == 1

    def _set_aside(self, row: _Row) -> bool:
        """Collect rows of items until all of them are known."""
        aside = "CREATE TEMP TABLE IF NOT EXISTS aside (many INTEGER, pos INTEGER, body BLOB)"
        self._target.execute(aside)
        values = _count(row.key, row.body), row.key, row.body
        self._target.execute("INSERT INTO aside VALUES (?, ?, ?)", values)
        return True

    def _put_largest_first(self) -> None:
        """Write the longest rows first.

        Rows that a pack has replaced may still be visible next to it. Rows that gc has freed are
        freed again by the next gc.
        """
        sql = "SELECT pos, x'', body, NULL FROM aside ORDER BY many DESC"
        for row in map(_Row._make, self._target.execute(sql)):
            if self._is_free(row):
                self._put(row)

    def _is_free(self, row: _Row) -> bool:
        """Return whether no row has these items yet; a pack may have replaced a displaced row."""
        if self._table.name != "items":
            return True
        before = "SELECT pos, body FROM items WHERE pos < ? ORDER BY pos DESC LIMIT 1"
        end = row.key + _count(row.key, row.body)
        near: list[Any] = self._target.execute(before, (end,)).fetchall()
        return all(at + _count(at, body) <= row.key for at, body in near)


def _ascend(keys: list[int]) -> bool:
    """Return whether the keys of neighbours are in order, in the direction they were read in."""
    ordered = sorted({*keys})
    return keys in (ordered, ordered[::-1])


def _count(pos: int, body: bytes) -> int:
    """Return the number of items in a row."""
    try:
        return len(format_rows.unseal_items(pos, body, "").ends)
    except (Corrupt, UnsupportedFormat):
        return 1
