"""The rows in the pages of a SQLite file, whatever its trees say of them.

A page whose header is damaged is closed to SQLite, and so is all that a damaged page leads to,
although the rows are there. Here every page is taken for a leaf of some table. What comes of that
may be nonsense, or a row that was removed or replaced: only its seal, and its index, tell.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import apsw

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_HEADER, _POINTER, _LINK = 8, 2, 4  # in bytes: of a leaf; to a cell; to another page
_OTHERS = (0, 2, 10)
"""How the rest of big rows begins, and indexes: as no leaf of a table does by one damaged bit."""
_SIZES = (0, 1, 2, 3, 4, 6, 8, 8, 0, 0)  # of columns by their type
_ZERO, _ONE, _BYTES = 8, 9, 12  # such types; the last and all behind it are text or bytes


class Sighting(NamedTuple):
    key: int
    columns: list[bytes | int | None]
    """The key's own place is among them, empty."""


def sightings(connection: apsw.Connection) -> Iterator[Sighting]:
    """All that looks like a row, in the file itself: what is still in the log is not seen."""
    size: int = connection.pragma("page_size")
    count: int = connection.pragma("page_count")

    def page(number: int) -> bytes:
        if not 0 < number <= count:
            raise IndexError(number)
        return connection.read("main", 0, (number - 1) * size, size)[1]

    for number in range(2, count + 1):  # the first is the schema's
        data = page(number)
        if data[0] not in _OTHERS:
            yield from _rows(data, page)


def _rows(data: bytes, page: Callable[[int], bytes]) -> Iterator[Sighting]:
    """How many there are is not asked: that may be the damage."""
    at, end = _HEADER, len(data)
    while at + _POINTER <= end:
        cell = int.from_bytes(data[at : at + _POINTER], "big")
        at += _POINTER
        if at <= cell < len(data):
            with suppress(IndexError):
                yield _row(data, cell, page)
                end = min(end, cell)  # rows lie behind all that points to them


def _row(data: bytes, at: int, page: Callable[[int], bytes]) -> Sighting:
    """The row of a cell; IndexError if there can be none."""
    length, at = _number(data, at)
    key, at = _number(data, at)
    payload = _payload(data, at, length, page)
    end, at = _number(payload, 0)
    types = []
    while at < end:
        kind, at = _number(payload, at)
        types.append(kind)
    columns: list[bytes | int | None] = []
    for kind in types:
        size = _size(kind)
        value = payload[at : at + size]
        columns.append(value if kind >= _BYTES else _integer(kind, value))
        at += size
    if at != len(payload):
        raise IndexError(at)
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


def _payload(data: bytes, at: int, length: int, page: Callable[[int], bytes]) -> bytes:
    """All bytes of a row, most of which may be on pages of their own."""
    most = len(data) - 35
    local = length
    if length > most:
        least = (len(data) - 12) * 32 // 255 - 23
        local = least + (length - least) % (len(data) - _LINK)
        local = local if local <= most else least
    if not 0 <= local <= len(data) - at:
        raise IndexError(at)
    parts = [data[at : at + local]]
    left, link = length - local, data[at + local : at + local + _LINK]
    seen = set()
    while left > 0 and link not in seen:
        seen.add(link)
        more = page(int.from_bytes(link, "big"))
        link, part = more[:_LINK], more[_LINK : _LINK + left]
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _size(kind: int) -> int:
    return (kind - _BYTES) // 2 if kind >= _BYTES else _SIZES[kind]


def _integer(kind: int, value: bytes) -> int | None:
    return int.from_bytes(value, "big", signed=True) if value else {_ZERO: 0, _ONE: 1}.get(kind)
