"""The data that checkpoints refer to, on its way to another store.

Streams get numbers of the other store; what was copied once is not copied again.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import ormsgpack
from ormsgpack import Ext

from holdfast.codec import streams, values, wire
from holdfast.codec.nodes import BLOB_TAG, DICT, RAW, ROPE_TAG, parse_blob, parse_rope
from holdfast.errors import Conflict
from holdfast.live import Spans
from holdfast.source import StoredSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from holdfast.backends.base import Backend, Reader
    from holdfast.codec.nodes import Extent, Rope
    from holdfast.codec.records import Row
    from holdfast.codec.streams import RowWrite

    Part = tuple[list[RowWrite], list[tuple[bytes, bytes, bool]]]

CHUNK_BYTES, _CHUNK_ROWS = 8 << 20, 2_000


class Cargo:
    """What is known of the data in both stores."""

    def __init__(
        self, source: Backend, reader: Reader, target: Backend, new_stream: Callable[[], int]
    ) -> None:
        self._reader, self._target, self._new_stream = reader, target, new_stream
        self._data = StoredSource(source, reader)
        self._streams: dict[int, int] = {}
        self._spans: dict[int, Spans] = {}
        """By stream: what of it the other store has."""
        self._fresh: set[int] = set()
        self.blobs: set[bytes] = set()

    def stream(self, stream: int) -> int:
        if stream not in self._streams:
            self._streams[stream] = self._new_stream()
            self._fresh.add(stream)
        return self._streams[stream]

    def is_fresh(self, stream: int) -> bool:
        """Whether no checkpoint in the other store refers to a stream yet."""
        return stream in self._fresh

    def landed(self, stream: int, spans: Spans) -> None:
        """Some of it is in the other store now, with checkpoints that refer to it."""
        self._fresh.discard(stream)
        for span in spans.all():
            self.spans(stream).add(*span)

    def there(self, stream: int, low: int, high: int) -> dict[int, bytes]:
        """By number: items that the other store has, though what it shares with us needs them not.

        Rows hold many items, and go only as a whole.
        """
        found: dict[int, bytes] = {}
        if self.is_fresh(stream):
            return found
        with StoredSource(self._target) as source:
            for first, row in source.rows(self.stream(stream), low, high):
                for n, (start, end) in enumerate(pairwise([0, *row.ends]), first):
                    found[n] = row.data[start:end]
        return found

    def same_stream(self, stream: int, other: int) -> None:
        self._streams[stream] = other

    def spans(self, stream: int) -> Spans:
        return self._spans.setdefault(stream, Spans())

    def remapped(self, stored: bytes) -> bytes:
        """A stored encoding with the other store's numbers in its references."""

        def follow(tag: int, data: bytes) -> Ext:
            if tag != ROPE_TAG:
                return Ext(tag, data)
            rope = ormsgpack.unpackb(data)
            tails, extents = rope[6], rope[7]
            for i in range(0, len(tails), 6):
                tails[i : i + 2] = [self.stream(tails[i]), self.stream(tails[i + 1])]
            for i in range(0, len(extents), 3):
                extents[i] = self.stream(extents[i])
            return Ext(tag, ormsgpack.packb(rope))

        return ormsgpack.packb(values.decode(stored, follow), None, values.PACK)

    def items(self, stream: int, low: int, high: int) -> tuple[list[bytes], bool]:
        """Items, and whether any may hold references."""
        return _items(self._data, [(stream, low, high - low)])

    def blob_row(self, digest: bytes, size: int) -> bytes:
        self._data.blob(digest, size)  # which checks it
        return self._reader.blob(digest) or b""


def _items(source: StoredSource, extents: Sequence[Extent]) -> tuple[list[bytes], bool]:
    refs = False
    out: list[bytes] = []
    for piece in streams.pieces(source, extents):
        refs = refs or piece.refs
        starts = pairwise([piece.base, *piece.ends])
        out += [piece.data[a - piece.base : b - piece.base] for a, b in starts]
    return out, refs


class Load:
    """The data that some new checkpoints of a session refer to."""

    def __init__(self, cargo: Cargo) -> None:
        self._cargo = cargo
        self._ranges: dict[int, tuple[int, Spans]] = {}
        """By stream: the kind of its items, and which are needed."""
        self._cuts: dict[int, set[int]] = {}
        """Where a row must begin: a checkpoint's streams go on from there."""
        self._blobs: dict[bytes, int] = {}
        self._line: int | None = None
        self.size = 0
        """Bytes of it, about."""

    def root(self, row: Row, *, goes_on: bool) -> None:
        """All that a checkpoint refers to; and, if it is to be gone on from, what its line needs.

        Of any but the newest that may have been freed: then it raises Corrupt.
        """
        self._line = row.line if goes_on else None
        values.decode(row.root, self._follow)

    def _follow(self, tag: int, data: bytes) -> None:
        if tag == BLOB_TAG:
            blob = parse_blob(data)
            if blob.hash not in self._cargo.blobs:
                self.size += blob.size if blob.hash not in self._blobs else 0
                self._blobs[blob.hash] = blob.size
        elif tag == ROPE_TAG:
            rope = parse_rope(data)
            for tail in rope.tails:
                if tail.line == self._line:
                    if tail.small < tail.end:
                        self._cargo.items(tail.stream, tail.small, tail.end)  # or it is not there
                    self._cuts.setdefault(tail.stream, set()).update((tail.small, tail.loose))
                    self._need(rope, tail.stream, tail.small, tail.end)
            for stream, first, count in rope.extents:
                self._need(rope, stream, first, first + count)

    def _need(self, rope: Rope, stream: int, low: int, high: int) -> None:
        if low >= high:
            return
        kind, spans = self._ranges.setdefault(stream, (rope.kind, Spans()))
        lacking = self._cargo.spans(stream).missing(low, high)
        for start, stop in [new for part in lacking for new in spans.add(*part)]:
            items, refs = self._cargo.items(stream, start, stop)
            self.size += sum(map(len, items))
            for item in items if refs and kind != RAW else ():
                cut = wire.string_length(item, 0) if kind == DICT else 0
                values.decode(item[cut:], self._follow)

    def done(self) -> None:
        """It is in the other store now."""
        self._cargo.blobs.update(self._blobs)
        for stream, (_, spans) in self._ranges.items():
            self._cargo.landed(stream, spans)

    def parts(self) -> Iterator[Part]:
        """Rows and blobs, in bounded parts; but all that goes on in a stream which has an end there
        in the last one: should that never come, nothing must lie behind that end.
        """
        held: list[RowWrite] = []
        blobs: list[tuple[bytes, bytes, bool]] = []
        size = 0
        for row in self._rows(fresh=True):
            held.append(row)
            size += len(row.body)
            if size > CHUNK_BYTES or len(held) >= _CHUNK_ROWS:
                yield held, blobs
                held, blobs, size = [], [], 0
        for digest, length in self._blobs.items():
            body = self._cargo.blob_row(digest, length)
            blobs.append((digest, body, False))
            size += len(body)
            if size > CHUNK_BYTES:
                yield held, blobs
                held, blobs, size = [], [], 0
        yield [*held, *self._rows(fresh=False)], blobs

    def _rows(self, *, fresh: bool) -> Iterator[RowWrite]:
        for stream, (kind, spans) in sorted(self._ranges.items()):
            new = self._cargo.stream(stream)
            if self._cargo.is_fresh(stream) is not fresh:
                continue
            cuts = self._cuts.get(stream, set())
            for low, high in spans.all():
                known = self._cargo.there(stream, low, high)
                edges = sorted({low, high} | {cut for cut in cuts if low < cut < high})
                for start, stop in pairwise(edges):
                    for at in range(start, stop, streams.PACK_ITEMS):
                        end = min(at + streams.PACK_ITEMS, stop)
                        yield from self._packed(kind, (stream, at, end), new, known)

    def _packed(
        self, kind: int, part: tuple[int, int, int], new: int, known: dict[int, bytes]
    ) -> Iterator[RowWrite]:
        stream, low, high = part
        items, refs = self._cargo.items(stream, low, high)
        if refs and kind != RAW:
            for n, item in enumerate(items):
                cut = wire.string_length(item, 0) if kind == DICT else 0
                items[n] = item[:cut] + self._cargo.remapped(item[cut:])
        if any(known.get(n, item) != item for n, item in enumerate(items, low)):
            raise Conflict("the other store has something else where an item belongs")
        for start, stop in Spans.of(n for n in range(low, high) if n not in known).all():
            yield from streams.packs(new, start, [], items[start - low : stop - low], refs=refs)


class Pairing:
    """Which streams of two stores are the same, from checkpoints that both have."""

    def __init__(self, cargo: Cargo, theirs: StoredSource) -> None:
        self._cargo, self._theirs = cargo, theirs

    def roots(self, ours: Row, theirs: Row) -> None:
        self._cargo.same_stream(ours.line, theirs.line)
        self._pair(ours.root, theirs.root)

    def _pair(self, ours: bytes, theirs: bytes) -> None:
        for (tag, mine), (_, other) in zip(_references(ours), _references(theirs), strict=True):
            if tag == ROPE_TAG:
                self._ropes(parse_rope(mine), parse_rope(other))
            elif tag == BLOB_TAG:
                self._cargo.blobs.add(parse_blob(mine).hash)

    def _ropes(self, ours: Rope, theirs: Rope) -> None:
        for mine, other in zip(ours.tails, theirs.tails, strict=True):
            self._cargo.same_stream(mine.line, other.line)
            self._cargo.same_stream(mine.stream, other.stream)
        for (stream, first, count), (same, _, _) in zip(ours.extents, theirs.extents, strict=True):
            self._cargo.same_stream(stream, same)
            new = self._cargo.spans(stream).add(first, first + count)
            for low, high in new if ours.kind != RAW else ():
                self._items(ours.kind, (stream, low, high - low), (same, low, high - low))

    def _items(self, kind: int, ours: Extent, theirs: Extent) -> None:
        """Items may hold references in turn."""
        mine, refs = self._cargo.items(ours[0], ours[1], ours[1] + ours[2])
        if refs:
            for a, b in zip(mine, _items(self._theirs, [theirs])[0], strict=True):
                cut = wire.string_length(a, 0) if kind == DICT else 0
                self._pair(a[cut:], b[cut:])


def _references(stored: bytes) -> list[tuple[int, bytes]]:
    found: list[tuple[int, bytes]] = []
    values.decode(stored, lambda tag, data: found.append((tag, data)))
    return found
