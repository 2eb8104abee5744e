"""A foreign SQLite database, read without leaving a trace beside it.

A file without a log or journal is opened as immutable: no locks, no new files. One that has them is
copied with them, and SQLite puts the copy in order.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import apsw

from holdfast.errors import Unavailable
from holdfast.importers import foreign
from holdfast.importers.foreign import Findings, Unsound, shown

if TYPE_CHECKING:
    from collections.abc import Iterator

_MAGIC = b"SQLite format 3\0"
_BESIDE = ("-wal", "-journal")
_READ_ONLY = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI


_ROWID = ("rowid", "_rowid_", "oid")
"""What the number of a row may be called, unless a column is called so."""


def is_database(path: str) -> bool:
    """Whether a file begins like one."""
    if not os.path.isfile(path):
        return False
    try:
        with open(path, "rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError as e:
        raise Unavailable(f"{shown(path)} cannot be read: {e.strerror}") from e


class Table:
    """The rows of one table, as far as they can be read."""

    def __init__(self, connection: apsw.Connection, name: str, columns: tuple[str, ...]) -> None:
        """Raises apsw.Error if nothing can be read. The names are written into SQL as they are."""
        self._connection, self._name = connection, name
        connection.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 1)
        connection.config(apsw.SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0)
        connection.execute("PRAGMA cell_size_check = 1")
        self._encoding: str = connection.pragma("encoding")
        found = connection.execute("SELECT type FROM sqlite_schema WHERE name = ?", (name,)).get
        there = {row[1] for row in connection.execute(f"PRAGMA table_info({name})")}
        self.missing = "table" if found != "table" else min({*columns} - there, default=None)
        taken = {row[1].lower() for row in connection.execute(f"PRAGMA table_xinfo({name})")}
        free = [alias for alias in _ROWID if alias not in taken]
        if not free:
            self.missing = self.missing or "the number of a row"
        self._rowid = free[0] if free else ""
        sizes = " + ".join([f"coalesce(octet_length({column}), 0)" for column in columns])
        parts = ", ".join([f"typeof({c}), {_as_bytes(c)}" for c in columns])
        # By row and not by an index, which may be damaged on its own.
        tail = f"FROM {name} WHERE {self._rowid} = ?"
        self._size = f"SELECT {sizes} {tail}"
        self._row = f"SELECT {parts} {tail}"

    def rowids(self, where: str, findings: Findings) -> list[int]:
        """From both ends to what is damaged between them, which is reported."""
        first, why = self._scan("ASC")
        if why is None:
            return first
        last, _ = self._scan("DESC")
        known = {*first}
        last = [row for row in reversed(last) if row not in known]
        findings.skip(where, f"damaged, with an unknown number of rows between others: {why}")
        return first + last

    def _scan(self, direction: str) -> tuple[list[int], str | None]:
        rows: list[int] = []
        try:
            tail = f"FROM {self._name} ORDER BY {self._rowid} {direction}"
            sql = f"SELECT {self._rowid} {tail}"
            for (row,) in self._connection.execute(sql):
                if rows and (row > rows[-1]) != (direction == "ASC"):
                    return rows, "rows are out of order"
                rows.append(row)
        except apsw.Error as e:
            return rows, str(e)
        return rows, None

    def row(self, rowid: int) -> list[Any]:
        """The columns, each of its own type: int, float, str, bytes or None. Raises Unsound."""
        try:
            size = self._connection.execute(self._size, (rowid,)).get
            if size is None:
                raise Unsound("the row is gone")
            if size > foreign.MAX_BYTES:
                raise Unsound(f"it has more than {foreign.MAX_BYTES} bytes")
            ((*cells,),) = self._connection.execute(self._row, (rowid,))
            return [
                value.decode(self._encoding) if kind == "text" else value
                for kind, value in zip(cells[::2], cells[1::2], strict=True)
            ]
        except apsw.Error as e:
            raise Unsound(f"the database is damaged here: {e}") from e
        except UnicodeDecodeError as e:
            raise Unsound(f"a text is damaged: {e}") from e


def _as_bytes(column: str) -> str:
    """Texts come as bytes: a damaged one must not look like anything else."""
    return f"CASE typeof({column}) WHEN 'text' THEN CAST({column} AS BLOB) ELSE {column} END"


class Source:
    """The files of a database, as they were when they were first looked at."""

    def __init__(self, path: str) -> None:
        self._path = os.path.realpath(path)
        self._before = _fingerprint(self._path)

    def check(self) -> None:
        """Raise Unavailable if they were written to since."""
        if _fingerprint(self._path) != self._before:
            raise Unavailable(
                f"{shown(self._path)} was written to while it was read",
                hint="stop what writes to it, or import a copy",
            )

    @contextmanager
    def opened(self, findings: Findings) -> Iterator[apsw.Connection]:
        """A connection to read with. Raises apsw.Error if that is no database."""
        for suffix in _BESIDE:
            if os.path.islink(self._path + suffix):
                name = shown(os.path.basename(self._path)) + suffix
                findings.skip(name, "a symbolic link: it is not followed")
        with tempfile.TemporaryDirectory(prefix="holdfast-") as scratch:
            if any(mark is not None and mark[0] for mark in self._before[1:]):
                connection = apsw.Connection(self._copy(scratch))
            else:
                uri = f"{Path(self._path).as_uri()}?mode=ro&immutable=1"
                connection = apsw.Connection(uri, flags=_READ_ONLY)
            try:
                yield connection
            finally:
                connection.close()

    def _copy(self, scratch: str) -> str:
        copy = os.path.join(scratch, "copy")
        try:
            for suffix, mark in zip(("", *_BESIDE), self._before, strict=True):
                if mark is not None:
                    shutil.copyfile(self._path + suffix, copy + suffix, follow_symlinks=False)
        except OSError as e:
            raise Unavailable(f"{shown(self._path)} cannot be copied: {e}") from e
        return copy


def _fingerprint(path: str) -> list[tuple[int, int] | None]:
    """Size and time of the files of a database; None for what is not a regular file."""
    marks: list[tuple[int, int] | None] = []
    for suffix in ("", *_BESIDE):
        try:
            found = os.lstat(path + suffix)
        except FileNotFoundError:
            marks.append(None)
        except OSError as e:
            raise Unavailable(f"{shown(path)}{suffix} cannot be read: {e.strerror}") from e
        else:
            regular = stat.S_ISREG(found.st_mode)
            marks.append((found.st_size, found.st_mtime_ns) if regular else None)
    return marks
