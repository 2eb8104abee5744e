"""Streams: append-only runs of items, and the rows a commit writes to them.

Logical addresses (stream, item) never move. Physically, items are first written as loose rows and
later replaced, in the same transaction as an append, by packs: one compressed row for many items.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from holdfast.codec.nodes import Extent, Tail
from holdfast.codec.rows import DENSE, FAST, PLAIN, ItemRow, seal_items
from holdfast.errors import Corrupt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# Fewer loose rows would be packed more often, and every pack frees pages and takes new ones: more
# than half of all commits would write twice as many pages as the others.
LOOSE_ITEMS, LOOSE_BYTES = 10, 4 << 10
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

    __slots__ = ("_items", "_refs", "_tail", "end", "line", "recent", "stream")

    def __init__(self, line: int, stream: int, tail: Tail | None) -> None:
        self.line, self.stream = line, stream
        self._tail = tail or Tail(line, stream, 0, 0, 0, 0)
        self.end = self._tail.end
        self._items: list[bytes] = []
        self._refs = False
        self.recent: Callable[[], list[bytes]] = list
        """The last items before the new ones, as far as they are at hand: they need no reading."""

    def append(self, items: Sequence[bytes], *, refs: bool) -> Extent:
        first = self.end
        self._items += items
        self._refs = self._refs or refs
        self.end += len(items)
        return (self.stream, first, len(items))

    def finish(self, source: Source) -> tuple[Tail, list[RowWrite]]:
        """The rows to write, and where the stream ends then.

        New items are a loose row; every few loose rows become a small pack, and these a full one.
        Each is made in the commit that brings the last item to it.
        """
        line, stream, start, small, loose, held = self._tail
        end = self.end
        items = self._items
        size = sum([len(i) for i in items])
        held += size
        if end - loose < LOOSE_ITEMS and size < LOOSE_BYTES:
            row = item_row(stream, start, 0, items, refs=self._refs, level=PLAIN)
            return Tail(line, stream, end, small, loose, held), [row]
        if end - small < PACK_ITEMS and held < PACK_BYTES:
            old, refs = self._read(source, loose, start)
            row = item_row(stream, loose, len(old), old + items, refs=refs, level=FAST)
            return Tail(line, stream, end, small, end, held), [row]
        old, refs = self._read(source, small, start)
        rows = list(packs(stream, small, old, items, refs=refs))
        return Tail(line, stream, end, end, end, 0), rows

    def _read(self, source: Source, start: int, stop: int) -> tuple[list[bytes], bool]:
        """Items that were written before and are packed now."""
        items: list[bytes] = []
        refs = self._refs
        if start == stop:
            return items, refs
        recent = self.recent() if stop - start < LOOSE_ITEMS else []
        if stop - start <= len(recent):
            items = recent[len(recent) - (stop - start) :]
        else:
            for piece in pieces(source, [(self.stream, start, stop - start)]):
                refs = refs or piece.refs
                begin = 0
                for end in piece.ends:
                    items.append(piece.data[begin : end - piece.base])
                    begin = end - piece.base
        return items, refs


def packs(
    stream: int, first: int, old: list[bytes], new: list[bytes], *, refs: bool
) -> Iterator[RowWrite]:
    """Full packs, none of them much bigger than it needs to be."""
    replaced = len(old)
    run: list[bytes] = []
    size = 0
    for item in old + new:
        if run and size + len(item) > 2 * PACK_BYTES:
            yield item_row(stream, first, replaced, run, refs=refs, level=DENSE)
            first, replaced, run, size = first + len(run), 0, [], 0
        run.append(item)
        size += len(item)
    yield item_row(stream, first, replaced, run, refs=refs, level=DENSE)


def item_row(
    stream: int, first: int, replaced: int, items: list[bytes], *, refs: bool, level: int
) -> RowWrite:
    return RowWrite(
        stream, first, replaced, seal_items(stream << STREAM_BITS | first, items, refs, level)
    )


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
