"""Bounded, read-only access to the files of another system.

Names of files come from listing the folder, never from the content of a file. Symbolic links are
not followed. Data that is damaged or too big raises `Unsound`, and the import continues without it.
"""

from __future__ import annotations

import datetime as dt
import json
import math
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeVar

import apsw

from holdfast.errors import InvalidRequest, NotFound, TooBig, Unavailable
from holdfast.json import check_memory

T = TypeVar("T")

MAX_BYTES = 128 << 20
"""The most bytes that one file, line or row may have."""
MAX_NESTING = 48
"""How deep a line of a transcript may be nested. The state adds a few levels to it."""

_OPEN = os.O_RDONLY
for _flag in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"):
    _OPEN |= getattr(os, _flag, 0)

_TIME = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2})[Tt ]([0-9]{2}:[0-9]{2}):([0-9]{2})(?:\.([0-9]+))?"
    r"([Zz]|[+-][0-9]{2}:[0-9]{2})?"
)
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


class Unsound(Exception):
    """A file, line or row cannot be imported. The message says why."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


@dataclass(slots=True)
class Findings:
    """The places in the source that were not imported or not followed, with the reasons."""

    skipped: list[tuple[str, str]] = field(default_factory=list)

    def skip(self, where: str, why: object) -> None:
        self.skipped.append((where, str(why)))


# -- files ---------------------------------------------------------------------------------------


class Files:
    """The regular files below a folder, or a single file, by names relative to the folder."""

    def __init__(self, path: str | os.PathLike[str], *, single: bool = True) -> None:
        """List them. With `single=False`, raises InvalidRequest if the path is not a folder."""
        self.findings = Findings()
        self.names: list[str] = []
        self.links: list[str] = []
        self.root = os.path.realpath(existing(path))
        self._single = not os.path.isdir(self.root)
        if self._single:
            if not single:
                raise InvalidRequest(f"{printable(os.fspath(path))} is not a folder")
            self.root, name = os.path.split(self.root)
            self.names.append(name)
            return
        folders = [""]
        while folders:
            folders += self._list(folders.pop())
        self.names.sort()
        self.links.sort()

    def _list(self, folder: str) -> list[str]:
        below = []
        try:
            with os.scandir(os.path.join(self.root, folder)) as entries:
                for entry in entries:
                    name = os.path.join(folder, entry.name)
                    if entry.is_symlink():
                        self.links.append(name)
                    elif entry.is_dir(follow_symlinks=False):
                        below.append(name)
                    elif entry.is_file(follow_symlinks=False):
                        self.names.append(name)
                    else:
                        self.skip(name, "not a regular file")
        except OSError as e:
            if not folder:
                raise Unavailable(f"{printable(self.root)} cannot be read: {e.strerror}") from e
            self.skip(folder, f"the folder cannot be read: {e.strerror}")
        return below

    def skip(self, name: str, why: object) -> None:
        """Report a file that is not imported."""
        self.findings.skip(printable(name), why)

    def skip_line(self, name: str, number: int, why: object) -> None:
        self.findings.skip(line_name(name, number), why)

    def select(self, *suffixes: str, kind: str) -> list[str]:
        """Return the names with one of the suffixes. Report all other files, and all links.

        A file that was given by its own path may have any name.
        """
        self.report_links()
        selected = []
        for name in self.names:
            if self._single or name.endswith(suffixes):
                selected.append(name)
            else:
                self.skip(name, f"not a {kind}")
        return selected

    def report_links(self) -> None:
        for link in self.links:
            outside = self.target(link) is None
            what = "a symbolic link that leads out of the folder" if outside else "a symbolic link"
            self.skip(link, f"{what}: not followed")

    def target(self, link: str) -> str | None:
        """Return the target of a link, relative to the root; None if it is outside the root."""
        return self.inside(os.path.realpath(os.path.join(self.root, link)))

    def inside(self, path: str) -> str | None:
        """Return a path relative to the root, without reading the disk; None if it is outside."""
        if "\0" in path:
            return None
        where = os.path.normpath(os.path.join(self.root, path))
        base = os.path.join(self.root, "")
        return where[len(base) :] if where.startswith(base) else None

    @contextmanager
    def _opened(self, name: str) -> Iterator[BinaryIO]:
        """Open a regular file. Raises Unsound if it is none, or cannot be read."""
        try:
            handle = os.open(os.path.join(self.root, name), _OPEN)
            with os.fdopen(handle, "rb") as file:
                if not stat.S_ISREG(os.fstat(handle).st_mode):
                    raise Unsound("not a regular file")
                yield file
        except OSError as e:
            raise Unsound(f"it cannot be read: {e.strerror}") from e

    def read(self, name: str) -> bytes:
        """Return the bytes of a file. Raises Unsound if they are more than MAX_BYTES."""
        with self._opened(name) as file:
            return _bounded(file.read(MAX_BYTES + 1))

    def document(self, name: str) -> Any:
        """Return the JSON in a file. Raises Unsound."""
        return decode(self.read(name), nesting=MAX_NESTING)

    def lines(self, name: str, limit: int | None = None) -> Iterator[tuple[int, bytes, Any]]:
        """Yield the number, bytes and JSON of each sound line. Report the other lines.

        The last line may be incomplete, because its writer has not finished it.
        """
        try:
            with self._opened(name) as file:
                number = 0
                while (limit is None or number < limit) and (raw := _line(file)):
                    number += 1
                    text = raw.strip()
                    if not text:
                        continue
                    try:
                        data = decode(_bounded(raw), nesting=MAX_NESTING)
                    except Unsound as e:
                        complete = raw.endswith(b"\n") or len(raw) > MAX_BYTES
                        why = e if complete else f"the last line is incomplete: {e}"
                        self.skip_line(name, number, why)
                    else:
                        yield number, text, data
        except Unsound as e:
            self.skip(name, e)


def line_name(name: str, number: int) -> str:
    """Return how findings call a line of a file."""
    return f"{printable(name)}: line {number}"


def _line(file: BinaryIO) -> bytes:
    """Return the next line; only the beginning of a line that is too long."""
    line = part = file.readline(MAX_BYTES + 1)
    while len(line) > MAX_BYTES and part and not part.endswith(b"\n"):
        part = file.readline(1 << 20)
    return line


def _bounded(raw: bytes) -> bytes:
    if len(raw) > MAX_BYTES:
        raise Unsound(f"it has more than {MAX_BYTES} bytes")
    return raw


def printable(name: str) -> str:
    """Return the name of a file as text that can be printed, whatever bytes it has."""
    return name.encode("utf-8", "backslashreplace").decode().replace(os.sep, "/")


def existing(path: str | os.PathLike[str]) -> str:
    """Return the path as text. Raises NotFound if nothing is there."""
    text = os.fspath(path)
    if not isinstance(text, str) or not text or "\0" in text:
        raise InvalidRequest(f"not a path: {path!r}")
    if not os.path.exists(text):
        raise NotFound(f"there is nothing at {printable(text)}", hint="check the path")
    return text


# -- JSON ----------------------------------------------------------------------------------------


class Document:
    """A JSON object whose fields are taken out one by one, with their types checked."""

    def __init__(self, data: Any, what: str = "") -> None:
        if type(data) is not dict:
            raise Unsound(f"{what or 'it'} is {_kind(data)}, not an object")
        self._left, self._what = dict(data), f"{what}." if what else ""

    def take(self, name: str) -> Any:
        if name not in self._left:
            raise Unsound(f"{self._what}{name} is missing")
        return self._left.pop(name)

    def _typed(self, name: str, what: str, *types: type[T]) -> T:
        value = self.take(name)
        if type(value) not in types:
            raise Unsound(f"{self._what}{name} is {_kind(value)}, not {what}")
        checked: T = value
        return checked

    def has(self, name: str) -> bool:
        """Return whether the field is there and not null. A null is taken out."""
        if self._left.get(name, self) is None:
            del self._left[name]
        return name in self._left

    def text(self, name: str) -> str:
        return self._typed(name, "a text", str)

    def name(self, name: str) -> str:
        """Take a text that is not empty."""
        value = self.text(name)
        if not value:
            raise Unsound(f"{self._what}{name} is empty")
        return value

    def integer(self, name: str) -> int:
        """Take a whole number, 0 or more."""
        value = self._typed(name, "a whole number", int)
        if value < 0:
            raise Unsound(f"{self._what}{name} is {value}")
        return value

    def number(self, name: str) -> float:
        value: float = self._typed(name, "a number", int, float)
        try:
            float(value)
        except OverflowError:
            raise Unsound(f"{self._what}{name} is too big") from None
        return value

    def boolean(self, name: str) -> bool:
        return self._typed(name, "true or false", bool)

    def items(self, name: str, *types: type) -> list[Any]:
        """Take a list; with `types`, a list of nothing else."""
        value = self._typed(name, "a list", list)
        for n, item in enumerate(value):
            if types and type(item) not in types:
                raise Unsound(f"{self._what}{name}[{n}] is {_kind(item)}")
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        return self._typed(name, "an object", dict)

    def rest(self) -> dict[str, Any]:
        """Return the fields that were not taken."""
        return self._left


def decode(
    raw: bytes,
    what: str = "it",
    *,
    nesting: int | None = None,
    parse_float: Callable[[str], Any] | None = None,
) -> Any:
    """Parse JSON. Raises Unsound if it is damaged, or takes more memory than memory_limit().

    Python's parser silently accepts a key twice, NaN, and numbers beyond a float. These are refused
    too. With `nesting`, so is JSON with more levels.
    """
    try:
        check_memory(raw)
        data = json.loads(
            raw.decode(),
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
            parse_float=parse_float or _finite,
        )
    except RecursionError:
        raise Unsound(f"{what} is nested too deeply") from None
    except TooBig as e:
        raise Unsound(f"{what} takes more than {e.limit:,} bytes of memory") from None
    except ValueError as e:
        raise Unsound(f"{what} is not JSON: {e}") from e
    if nesting is not None and raw.count(b"[") + raw.count(b"{") > nesting:
        _check_nesting(data, what, nesting)
    return data


def _check_nesting(data: Any, what: str, limit: int) -> None:
    level = [data]
    for _ in range(limit):
        level = [
            child
            for value in level
            for child in (value.values() if type(value) is dict else value)
            if type(child) in (dict, list)
        ]
        if not level:
            return
    raise Unsound(f"{what} is nested too deeply")


def digest(data: Any) -> str:
    """Return the SHA-256 of JSON, whatever its white space and order of keys."""
    try:
        text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    except RecursionError:
        raise Unsound("it is nested too deeply") from None
    return sha256(text.encode()).hexdigest()


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        raise ValueError("an object has a key twice")
    return unique


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:20]} is too big")
    return value


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
    return "null" if value is None else kinds.get(type(value), "a number")


def instant(value: Any, name: str = "created_at") -> int:
    """Return the nanoseconds since 1970 of a text in RFC 3339, or of a number of seconds."""
    if type(value) is int:
        return value * 1_000_000_000
    match = _TIME.fullmatch(value) if type(value) is str else None
    if match is None:
        raise Unsound(f"{name} is no time: {str(value)[:40]!r}")
    day, minute, second, fraction, zone = match.groups()
    zone = "+00:00" if zone in (None, "Z", "z") else zone
    try:
        past = dt.datetime.fromisoformat(f"{day}T{minute}{zone}") - _EPOCH
    except (ValueError, OverflowError) as e:
        raise Unsound(f"{name} is no time: {e}") from e
    seconds = past.days * 86_400 + past.seconds + int(second)
    return seconds * 1_000_000_000 + int((fraction or "").ljust(9, "0")[:9])


# -- SQLite --------------------------------------------------------------------------------------

_MAGIC = b"SQLite format 3\0"
_COMPANIONS = ("-wal", "-journal")
_READ_ONLY = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
_ROWID = ("rowid", "_rowid_", "oid")
"""Names for the number of a row. A column may have one of them, which hides it."""


def is_database(path: str) -> bool:
    """Return whether a file begins like an SQLite database."""
    if not os.path.isfile(path):
        return False
    try:
        with open(path, "rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError as e:
        raise Unavailable(f"{printable(path)} cannot be read: {e.strerror}") from e


class Table:
    """The readable rows of one table of a database that may be damaged."""

    def __init__(self, connection: apsw.Connection, name: str, columns: tuple[str, ...]) -> None:
        """Raises apsw.Error if nothing can be read. The names become SQL as they are.

        `missing` is the first thing that the table lacks, or None.
        """
        self._connection, self._name = connection, name
        connection.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 1)
        connection.config(apsw.SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0)
        connection.execute("PRAGMA cell_size_check = 1")
        self._encoding: str = connection.pragma("encoding")
        kind = connection.execute("SELECT type FROM sqlite_schema WHERE name = ?", (name,)).get
        there = {row[1] for row in connection.execute(f"PRAGMA table_info({name})")}
        self.missing = "table" if kind != "table" else min({*columns} - there, default=None)
        taken = {row[1].lower() for row in connection.execute(f"PRAGMA table_xinfo({name})")}
        free = [alias for alias in _ROWID if alias not in taken]
        if not free:
            self.missing = self.missing or "the number of a row"
        self._rowid = free[0] if free else ""
        sizes = " + ".join([f"coalesce(octet_length({column}), 0)" for column in columns])
        parts = ", ".join([f"typeof({c}), {_as_bytes(c)}" for c in columns])
        # Read by row number. An index may be damaged although the table is not.
        tail = f"FROM {name} WHERE {self._rowid} = ?"
        self._size = f"SELECT {sizes} {tail}"
        self._row = f"SELECT {parts} {tail}"

    def rowids(self, where: str, findings: Findings) -> list[int]:
        """Return the numbers of all rows. Rows before and after damage are found, and it is listed.

        The table is read from both ends up to the damage.
        """
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
        """Return the columns of a row as int, float, str, bytes or None. Raises Unsound."""
        try:
            size = self._connection.execute(self._size, (rowid,)).get
            if size is None:
                raise Unsound("the row is gone")
            if size > MAX_BYTES:
                raise Unsound(f"it has more than {MAX_BYTES} bytes")
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
    """Return SQL that reads texts as bytes, so that a damaged text does not pass as another one."""
    return f"CASE typeof({column}) WHEN 'text' THEN CAST({column} AS BLOB) ELSE {column} END"


class Database:
    """The files of an SQLite database, which must not change while it is read."""

    def __init__(self, path: str) -> None:
        self._path = os.path.realpath(path)
        self._before = _fingerprint(self._path)

    def check_unchanged(self) -> None:
        """Raise Unavailable if the files changed since the object was made."""
        if _fingerprint(self._path) != self._before:
            raise Unavailable(
                f"{printable(self._path)} was written to while it was read",
                hint="stop the program that writes to it, or import a copy",
            )

    @contextmanager
    def opened(self, findings: Findings) -> Iterator[apsw.Connection]:
        """Return a connection for reading. Raises apsw.Error if the file is no database.

        A database with a log is read from a copy, because SQLite would write to the log.
        """
        for suffix in _COMPANIONS:
            if os.path.islink(self._path + suffix):
                name = printable(os.path.basename(self._path)) + suffix
                findings.skip(name, "a symbolic link: not followed")
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
            for suffix, mark in zip(("", *_COMPANIONS), self._before, strict=True):
                if mark is not None:
                    shutil.copyfile(self._path + suffix, copy + suffix, follow_symlinks=False)
        except OSError as e:
            raise Unavailable(f"{printable(self._path)} cannot be copied: {e}") from e
        return copy


def _fingerprint(path: str) -> list[tuple[int, int] | None]:
    """Return size and time of each file of a database; None if it is not a regular file."""
    marks: list[tuple[int, int] | None] = []
    for suffix in ("", *_COMPANIONS):
        try:
            found = os.lstat(path + suffix)
        except FileNotFoundError:
            marks.append(None)
        except OSError as e:
            raise Unavailable(f"{printable(path)}{suffix} cannot be read: {e.strerror}") from e
        else:
            regular = stat.S_ISREG(found.st_mode)
            marks.append((found.st_size, found.st_mtime_ns) if regular else None)
    return marks
