"""Estimate the memory that decoded data will take, before it is decoded, and refuse too much.

An empty list is one byte in MessagePack and 64 bytes in memory, and a thousand of them compress to
one byte. So the length of stored data says little about the memory that it takes to load it.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from contextvars import ContextVar
from random import Random
from typing import TYPE_CHECKING

from holdfast.errors import InvalidRequest, TooBig

if TYPE_CHECKING:
    from collections.abc import Iterator

_chance = Random()  # our own: callers may seed the global one
_limit: ContextVar[int] = ContextVar("memory_limit", default=256 << 20)

# Bytes of memory of each kind of object in CPython, with one reference to it, but without its data.
_REFERENCE, _NUMBER, _TEXT, _LIST, _DICT, _ENTRY, _SET = 8, 40, 65, 64, 184, 32, 48
MOST = 128
"""One byte of stored data takes at most this many bytes of memory."""
_UNSEEN = 4096
"""Shorter data is not counted."""

# In MessagePack: headers of one byte that are followed by the next header.
_SHORT = re.compile(rb"[\x00-\x9f\xc0\xc2\xc3\xe0-\xff]+")
_IS_HIGH = bytes(0x80) + b"\1" * 0x80
_CONTAINERS = bytes(range(0x90, 0xA0)), bytes(range(0x80, 0x90))
_BYTES, _MAP = (0xC4, 0xC5, 0xC6), 0xDE
_SIZES = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
"""For bytes, tagged values and texts: how many bytes the length field takes."""
_FIXED = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_COUNTS = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
_TAGGED = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
_HOLDING = {1: 0, 2: _SET, 3: _SET, 6: _SET}
"""Tags of tuples, sets and dicts, which hold encoded values: memory per byte of content."""
_INNER = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_STRING = re.compile(_INNER, re.DOTALL)
_PIECE = re.compile(rb'[^"]*+(?:' + _INNER + rb'[^"]*+)*+', re.DOTALL)
_WINDOW, _CACHED, _SAMPLE = 1 << 20, 1 << 14, 64


@contextmanager
def memory_limit(limit: int) -> Iterator[None]:
    """Set the memory that a loaded state, or a line of an import, may take. The default is 256 MB.

    Loads and imports inside the `with` block raise TooBig before they decode more. The size is an
    estimate. It leaves out the bytes of texts, and the working memory of holdfast itself.
    """
    if type(limit) is not int or limit < 1:
        raise InvalidRequest(
            f"a limit of memory is a number of bytes, not {limit!r}", hint="such as 1 << 30"
        )
    token = _limit.set(limit)
    try:
        yield
    finally:
        _limit.reset(token)


def refuse(size: int) -> None:
    """Raise TooBig if `size` bytes of memory are more than the limit."""
    if size > _limit.get():
        raise TooBig(_limit.get())


class Meter:
    """Counts the memory of all encodings that are decoded for one value.

    A quick upper bound is used until half of the limit is reached. The bound can be many times too
    high, so after that each encoding is counted in full.
    """

    def __init__(self) -> None:
        self._limit = self._left = _limit.get()
        self._bounded = self._limit // 2

    @classmethod
    def of(cls, size: int) -> Meter | None:
        """Return a meter for a value of `size` bytes; None if it cannot reach the limit."""
        return cls() if MOST * size > _limit.get() else None

    def take(self, data: bytes) -> None:
        """Add an encoding. Raises TooBig if the sum is more than the limit."""
        size = _bound(data)
        if size <= self._bounded:
            self._bounded -= size
        else:
            size = _count(data, self._left)
        self._left -= size
        if self._left < 0:
            raise TooBig(self._limit)


def check(data: bytes) -> None:
    """Raise TooBig if MessagePack data would take too much memory once decoded."""
    if len(data) > _UNSEEN and MOST * len(data) > _limit.get():
        Meter().take(data)


def check_json(text: bytes) -> None:
    """Raise TooBig if JSON would take too much memory once decoded."""
    limit = _limit.get()
    if len(text) <= _UNSEEN or MOST * len(text) <= limit:
        return
    total = 0 if text.isascii() and b"\\u" not in text else 3 * len(text)
    at = 0
    while at < len(text) and total <= limit:
        # Cut between strings, because a bracket inside a string is no list.
        found = _PIECE.match(text, at, at + _WINDOW)
        end = max(found.end() if found else at, at + 1)
        if end == at + 1 and (string := _STRING.match(text, at)):
            end = string.end()  # longer than a window
        bare = _STRING.sub(b'""', text[at:end])
        total += _TEXT * bare.count(b'""') + _LIST * (bare.count(b"[") + bare.count(b"{"))
        total += (_DICT + _ENTRY) * bare.count(b":") + _NUMBER * bare.count(b",")
        at = end
    if total > limit:
        raise TooBig(limit)


def _bound(data: bytes) -> int:
    """Return an upper bound of the memory that a value takes besides its data.

    It counts every byte as a header. For long data it samples random places, so that data cannot
    be built to evade it.
    """
    places = range(0, len(data), _CACHED)
    some = (
        places if len(places) <= _SAMPLE else _chance.sample(places, max(_SAMPLE, len(places) // 8))
    )
    high = sum([data[at : at + _CACHED].translate(_IS_HIGH).count(1) for at in some])
    high = high * len(places) // max(len(some), 1)
    return _REFERENCE * len(data) + (_DICT + 2 * _ENTRY) * high


def _count(data: bytes, most: int) -> int:
    """Estimate the memory that a value takes besides its data, header by header.

    It stops as soon as the sum is more than `most`. For damaged data the result is arbitrary, but
    such data does not decode anyway.
    """
    total = at = 0
    end = len(data)
    while at < end and total <= most:
        run = _SHORT.match(data, at)
        if run is not None:
            headers = run[0]
            lists, maps = (len(headers) - len(headers.translate(None, of)) for of in _CONTAINERS)
            entries = sum([n * headers.count(bytes((0x80 | n,))) for n in range(1, 16)])
            total += _REFERENCE * len(headers) + _LIST * (lists + maps)
            total += _DICT * min(maps, entries) + _ENTRY * entries
            at = run.end()
            continue
        kind = data[at]
        at += 1
        if kind in _FIXED:
            total += _NUMBER
            at += _FIXED[kind]
        elif kind in _COUNTS:
            count = int.from_bytes(data[at : at + _COUNTS[kind]], "big")
            total += _DICT + _ENTRY * min(count, end) if kind >= _MAP else _LIST
            at += _COUNTS[kind]
        else:
            at, more = _long(data, kind, at)
            total += more
    return total


def _long(data: bytes, kind: int, at: int) -> tuple[int, int]:
    """Return the position after a text, bytes or tagged value, and its memory besides its data."""
    size = kind & 0x1F
    if kind in _SIZES:
        size = int.from_bytes(data[at : at + _SIZES[kind]], "big")
        at += _SIZES[kind]
    if kind in _TAGGED or 0xC7 <= kind <= 0xC9:
        size = _TAGGED.get(kind, size)
        tag = data[at] if at < len(data) else 0
        if tag in _HOLDING:  # its content is counted next
            return at + 1, _LIST + _HOLDING[tag] * min(size, len(data))
        return at + 1 + size, _TEXT
    wide = kind not in _BYTES and not data[at : at + size].isascii()
    return at + size, _TEXT + 3 * size * wide
