"""The rows in the pages of a SQLite file, whatever its trees say of them.

A page whose header is damaged is closed to SQLite, and so is all that a damaged page leads to,
although the rows are there. Here every page is taken for a leaf of some table. What comes of that
may be nonsense, or a row that was removed or replaced: only its seal, and its index, tell.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import apsw

from holdfast.backends.sqlite_file import drafted

if TYPE_CHECKING:
    from collections.abc import Iterator

_HEADER, _POINTER, _LINK = 8, 2, 4  # in bytes: of a leaf; to a cell; to another page
_OTHERS = (0, 2, 10)
"""How the rest of big rows begins, and indexes: as no leaf of a table does by one damaged bit."""
_COLUMNS = 4
_PATIENCE = 8  # how often each page may be read, on average
_SIZES = (0, 1, 2, 3, 4, 6, 8, 8, 0, 0)  # of columns by their type
_ZERO, _ONE, _BYTES = 8, 9, 12  # such types; the last and all behind it are text or bytes


class Sighting(NamedTuple):
    key: int
    columns: list[bytes | int | None]
    """The key's own place is among them, empty."""


def sightings(source: apsw.Connection) -> Iterator[Sighting]:
    """All that looks like a row, in any page as `source` sees it: also those still in the log."""
    size: int = source.pragma("page_size")
    with drafted(Path(source.filename)) as draft:
        _copy_pages(source, draft)
        with draft.open("rb") as file:
            yield from _all_rows(file, size, draft.stat().st_size // size)


def _copy_pages(source: apsw.Connection, draft: Path) -> None:
    """As they are, whatever is in them."""
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
        """So many bytes, from one page to the next.

        Rows that are there and some that are gone may lead to the same pages, but not all over.
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
    """How many there are is not asked: that may be the damage."""
    at, end = _HEADER, len(data)
    seen = set()
    while at + _POINTER <= end:
        cell = int.from_bytes(data[at : at + _POINTER], "big")
        at += _POINTER
        if at <= cell < len(data) and cell not in seen:
            seen.add(cell)
            with suppress(IndexError):
                yield _row(data, cell, pages)
                end = min(end, cell)  # rows lie behind all that points to them


def _row(data: bytes, at: int, pages: _Pages) -> Sighting:
    """The row of a cell; IndexError if there can be none."""
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
    """A number in the way of SQLite, and where it ends."""
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
    """How many bytes of a row are in its own page; the rest is on others."""
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
