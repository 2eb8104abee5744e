"""Streams: append-only runs of items, and the rows a commit writes to them.

Logical addresses (stream, item) never move. Physically, items are first written as loose rows and
later replaced, in the same transaction as an append, by packs: one compressed row for many items.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from holdfast.codec.nodes import Extent, Tail
from holdfast.codec.rows import ItemRow, seal_items
from holdfast.errors import Corrupt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

PACK_ITEMS, PACK_BYTES = 64, 64 << 10
STREAM_BITS = 24
MAX_ITEMS = 1 << STREAM_BITS


class Source(Protocol):
    """Where stored items and blobs are read from; digests have been checked."""

    def rows(self, stream: int, start: int, stop: int) -> Iterator[tuple[int, ItemRow]]:
        """The rows that hold items [start, stop), each with the number of its first item."""
        ...

    def blob(self, digest: bytes, size: int) -> bytes: ...


class Piece(NamedTuple):
    data: bytes
    ends: list[int]
    base: int
    """What to subtract from `ends`."""
    refs: bool


def pieces(source: Source, extents: Sequence[Extent]) -> Iterator[Piece]:
    """The items of a rope, in order, as stored: whole rows where possible."""
    for stream, start, count in extents:
        at, stop = start, start + count
        for first, row in source.rows(stream, start, stop):
            size = len(row.ends)
            if first > at or first + size <= at:
                break
            low, high = at - first, min(stop - first, size)
            if low == 0 and high == size:
                yield Piece(row.data, row.ends, 0, row.refs)
            else:
                base = row.ends[low - 1] if low else 0
                yield Piece(row.data[base : row.ends[high - 1]], row.ends[low:high], base, row.refs)
            at = first + high
        if at != stop:
            raise Corrupt(f"items {at} to {stop - 1} of stream {stream} are missing")


class RowWrite(NamedTuple):
    """One row to insert; rows [first, first + replaces) of the stream go when it is written."""

    stream: int
    first: int
    replaces: int
    body: bytes


class Appender:
    """New items for one stream in one commit."""

    def __init__(self, line: int, stream: int, tail: Tail | None) -> None:
        self.line, self.stream = line, stream
        self.loose, self.loose_bytes = (tail.loose, tail.loose_bytes) if tail else (0, 0)
        self.start = self.end = tail.end if tail else 0
        self._items: list[bytes] = []
        self._refs = False

    def append(self, items: Sequence[bytes], *, refs: bool) -> Extent:
        first = self.end
        self._items += items
        self._refs = self._refs or refs
        self.end += len(items)
        self.loose_bytes += sum(map(len, items))
        return (self.stream, first, len(items))

    def finish(self, source: Source) -> tuple[Tail, list[RowWrite]]:
        """The rows to write, and where the stream ends then."""
        items, first, refs = self._items, self.start, self._refs
        replaced = 0
        writes: list[RowWrite] = []
        if self.end - self.loose >= PACK_ITEMS or self.loose_bytes >= PACK_BYTES:
            if self.loose < self.start:
                old: list[bytes] = []
                for piece in pieces(source, [(self.stream, self.loose, self.start - self.loose)]):
                    refs = refs or piece.refs
                    begin = 0
                    for end in piece.ends:
                        old.append(piece.data[begin : end - piece.base])
                        begin = end - piece.base
                replaced = len(old)
                items = old + items
                first = self.loose
            run: list[bytes] = []
            size = 0
            for item in items:
                if run and size + len(item) > 2 * PACK_BYTES:
                    writes.append(_row(self.stream, first, replaced, run, refs=refs))
                    first, replaced, run, size = first + len(run), 0, [], 0
                run.append(item)
                size += len(item)
            items = run
            self.loose, self.loose_bytes = self.end, 0
        writes.append(_row(self.stream, first, replaced, items, refs=refs))
        return Tail(self.line, self.stream, self.end, self.loose, self.loose_bytes), writes


def _row(stream: int, first: int, replaced: int, items: list[bytes], *, refs: bool) -> RowWrite:
    address = stream << STREAM_BITS | first
    lengths = [len(i) for i in items]
    body = seal_items(address, lengths, b"".join(items), refs=refs, squeeze=len(items) > 1)
    return RowWrite(stream, first, replaced, body)


def cut(extents: Sequence[Extent], start: int, stop: int) -> list[Extent]:
    """The extents of items [start, stop) of a rope."""
    out: list[Extent] = []
    at = 0
    for stream, first, count in extents:
        low, high = max(start - at, 0), min(stop - at, count)
        if low < high:
            out.append((stream, first + low, high - low))
        at += count
        if at >= stop:
            break
    return out


def join(*runs: Sequence[Extent]) -> tuple[Extent, ...]:
    """Extents one after the other, neighbours merged."""
    out: list[Extent] = []
    for run in runs:
        for stream, first, count in run:
            if out and out[-1][0] == stream and out[-1][1] + out[-1][2] == first:
                out[-1] = (stream, out[-1][1], out[-1][2] + count)
            else:
                out.append((stream, first, count))
    return tuple(out)


class Writes:
    """Everything one commit adds: rows of streams and blobs. Filled while laying out a state."""

    def __init__(self, source: Source, line: int, new_stream: Callable[[], int]) -> None:
        self.source, self.line = source, line
        self._new_stream = new_stream
        self._open: set[int] = set()
        self.rows: list[RowWrite] = []
        self.blobs: dict[bytes, bytes] = {}

    def appender(self, tail: Tail | None) -> Appender:
        """Go on with the stream of `tail` if this line of descent owns it, else start one."""
        if (
            tail is None
            or tail.line != self.line
            or tail.stream in self._open
            or tail.end + 1 >= MAX_ITEMS
        ):
            appender = Appender(self.line, self._new_stream(), None)
        else:
            appender = Appender(self.line, tail.stream, tail)
        self._open.add(appender.stream)
        return appender

    def finish(self, appender: Appender) -> Tail:
        tail, rows = appender.finish(self.source)
        self.rows += rows
        return tail
