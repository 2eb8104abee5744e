"""Find rows in the pages of a SQLite file, without the trees that lead to them.

SQLite cannot read a page with a damaged header, nor the pages that it leads to, although the rows
are still there. So every page is read as if it were a leaf of some table. The result may be
nonsense, or rows that were removed or replaced.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import apsw

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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


def sightings(path: Path, page_size: int) -> Iterator[Sighting]:
    """Yield everything that looks like a row, in any page of a file."""
    with path.open("rb") as file:
        yield from _all_rows(file, page_size, path.stat().st_size // page_size)


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
