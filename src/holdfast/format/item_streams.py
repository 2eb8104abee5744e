"""Streams: append-only sequences of items, and the rows that a commit writes to them.

The logical address of an item (stream, number) never changes. Items are first written as loose
rows. A later append replaces these, in the same transaction, by a pack: one compressed row for many
items.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from holdfast.errors import Corrupt
from holdfast.format.nodes import Extent, Tail
from holdfast.format.rows import DENSE, FAST, PLAIN, ItemRow, seal_items

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# With fewer loose rows, items are packed more often. Each pack frees pages and takes new ones, so
# more than half of all commits would write twice as many pages as the others.
LOOSE_ITEMS, LOOSE_BYTES = 10, 4 << 10
PACK_ITEMS, PACK_BYTES = 64, 64 << 10
STREAM_BITS = 24
MAX_ITEMS = 1 << STREAM_BITS
ERASED = b"\xc0", b"\xa0\xc0"
"""The bytes that gc puts in place of an item that no checkpoint needs: None in a list, and None
under an empty key in a dict. A None that was saved has the same bytes."""


class Source(Protocol):
    """Reads stored items and blobs. It checks their digests and raises Corrupt."""

    def rows(self, stream: int, start: int, stop: int) -> Iterator[tuple[int, ItemRow]]:
        """Yield the rows that hold items [start, stop), each with the number of its first item."""
        ...

    def blob(self, digest: bytes, size: int) -> bytes: ...


def pieces(source: Source, extents: Sequence[Extent]) -> Iterator[ItemRow]:
    """Yield the items of some extents, in order, as rows cut to the extents.

    Raises Corrupt if items are missing.
    """
    for stream, start, count in extents:
        at, stop = start, start + count
        for first, row in source.rows(stream, start, stop):
            size = len(row.ends)
            if first > at or first + size <= at:
                break
            low, high = at - first, min(stop - first, size)
            if low == 0 and high == size:
                yield row
            else:
                base = row.ends[low - 1] if low else 0
                ends = [end - base for end in row.ends[low:high]]
                yield ItemRow(ends, row.data[base : row.ends[high - 1]], row.refs)
            at = first + high
        if at != stop:
            raise Corrupt(f"items {at} to {stop - 1} of stream {stream} are missing")


def read(source: Source, extents: Sequence[Extent]) -> tuple[list[bytes], bool]:
    """Return the items of some extents, and whether any may hold references."""
    items: list[bytes] = []
    refs = False
    for piece in pieces(source, extents):
        refs = refs or piece.refs
        items += piece.items()
    return items, refs


class RowWrite(NamedTuple):
    """A row to insert. It replaces the rows of items [first, first + replaces) of the stream."""

    stream: int
    first: int
    replaces: int
    body: bytes


class Appender:
    """Collects the new items of one stream in one commit."""

    __slots__ = ("_items", "_refs", "_tail", "end", "line", "recent", "stream")

    def __init__(self, line: int, stream: int, tail: Tail | None) -> None:
        self.line, self.stream = line, stream
        self._tail = tail or Tail(line, stream, 0, 0, 0, 0)
        self.end = self._tail.end
        self._items: list[bytes] = []
        self._refs = False
        self.recent: Callable[[], list[bytes]] = list
        """Returns the last items before the new ones that are in memory, to avoid reading them."""

    def append(self, items: Sequence[bytes], *, refs: bool) -> Extent:
        """Add items, and return their extent."""
        first = self.end
        self._items += items
        self._refs = self._refs or refs
        self.end += len(items)
        return (self.stream, first, len(items))

    def finish(self, source: Source) -> tuple[Tail, list[RowWrite]]:
        """Return the new tail of the stream, and the rows to write.

        New items become a loose row. Every few loose rows become a small pack, and several small
        packs a full one. Each pack is made by the commit that adds its last item.
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
        """Return items of earlier commits that are packed now, and whether some hold references."""
        if start == stop:
            return [], self._refs
        recent = self.recent() if stop - start < LOOSE_ITEMS else []
        if stop - start <= len(recent):
            return recent[len(recent) - (stop - start) :], self._refs
        items, refs = read(source, [(self.stream, start, stop - start)])
        return items, refs or self._refs


def packs(
    stream: int, first: int, old: list[bytes], new: list[bytes], *, refs: bool
) -> Iterator[RowWrite]:
    """Yield full packs of at most 128 KB each, unless a single item is bigger."""
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
    """Return the row of some items, sealed."""
    return RowWrite(
        stream, first, replaced, seal_items(stream << STREAM_BITS | first, items, refs, level)
    )


def cut(extents: Sequence[Extent], start: int, stop: int) -> list[Extent]:
    """Return the extents of items [start, stop) of a rope."""
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
    """Return all extents in order, with adjacent ones merged."""
    out: list[Extent] = []
    for run in runs:
        for stream, first, count in run:
            if out and out[-1][0] == stream and out[-1][1] + out[-1][2] == first:
                out[-1] = (stream, out[-1][1], out[-1][2] + count)
            else:
                out.append((stream, first, count))
    return tuple(out)


class Writes:
    """The rows of streams and the blobs that one commit adds. Laying out a state fills it."""

    def __init__(self, source: Source, line: int, new_stream: Callable[[], int]) -> None:
        self.source, self.line = source, line
        self._new_stream = new_stream
        self._open: set[int] = set()
        self.rows: list[RowWrite] = []
        self.blobs: dict[bytes, bytes] = {}

    def appender(self, tail: Tail | None, count: int) -> Appender:
        """Return an appender: for the stream of `tail`, or for a new stream.

        The stream of `tail` is used if this line owns it and `count` more items fit.
        """
        if (
            tail is None
            or tail.line != self.line
            or tail.stream in self._open
            or tail.end + count >= MAX_ITEMS
        ):
            appender = Appender(self.line, self._new_stream(), None)
        else:
            appender = Appender(self.line, tail.stream, tail)
        self._open.add(appender.stream)
        return appender

    def finish(self, appender: Appender) -> Tail:
        """Add the rows of an appender, and return the new tail of its stream."""
        tail, rows = appender.finish(self.source)
        self.rows += rows
        return tail
