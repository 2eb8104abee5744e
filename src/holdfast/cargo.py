"""The data that checkpoints refer to, on its way to another store.

Streams get numbers of the other store; what was copied once is not copied again.
"""

from __future__ import annotations

from copy import deepcopy
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

import ormsgpack
from ormsgpack import Ext

from holdfast.codec import streams, values, wire
from holdfast.codec.nodes import BLOB_TAG, DICT, RAW, ROPE_TAG, parse_blob, parse_rope
from holdfast.errors import Conflict, Corrupt
from holdfast.live import Spans
from holdfast.source import StoredSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from holdfast.backends.base import Backend, Reader
    from holdfast.codec.nodes import Extent, Rope, Tail
    from holdfast.codec.records import Row
    from holdfast.codec.streams import RowWrite

    Part = tuple[list[RowWrite], list[tuple[bytes, bytes, bool]]]

CHUNK_BYTES, _CHUNK_ROWS = 8 << 20, 2_000
T = TypeVar("T")


class Cargo:
    """What is known of the data in both stores.

    Items keep their numbers, but those of one stream may lie in several there: a session adds only
    to streams of its own. In another's it would write where that one goes on by itself.
    """

    def __init__(
        self, source: Backend, reader: Reader, target: Backend, new_stream: Callable[[], int]
    ) -> None:
        self._reader, self._target, self._new_stream = reader, target, new_stream
        self._data = StoredSource(source, reader)
        self._lines: dict[int, int] = {}
        self._where: dict[int, dict[int, Spans]] = {}
        """By stream, and by stream of the other store: which items of the one are in the other."""
        self.blobs: set[bytes] = set()
        self.begin()

    def begin(self) -> None:
        """The next session."""
        self._own: dict[int, int] = {}
        self._fresh: set[int] = set()

    def line(self, line: int) -> int:
        if line not in self._lines:
            self._lines[line] = self._new_stream()
        return self._lines[line]

    def same_line(self, line: int, other: int) -> None:
        self._lines[line] = other

    def own(self, stream: int) -> int:
        """Where the session puts what the other store lacks of a stream."""
        if stream not in self._own:
            self._own[stream] = self._new_stream()
            self._fresh.add(stream)
        return self._own[stream]

    def goes_on(self, stream: int, other: int) -> None:
        """The session itself writes this stream, here and there."""
        self._own[stream] = other

    def give_up(self, stream: int) -> None:
        """The session goes on elsewhere with what the other store lacks of a stream."""
        del self._own[stream]

    def is_fresh(self, stream: int) -> bool:
        """Whether no checkpoint in the other store refers to the session's own one yet."""
        return stream in self._fresh

    def landed(self, stream: int, spans: Spans) -> None:
        """Some of it is in the other store now, with checkpoints that refer to it."""
        self._fresh.discard(stream)
        for span in spans.all():
            self.spans(stream, self.own(stream)).add(*span)

    def there(self, stream: int, low: int, high: int) -> dict[int, bytes]:
        """By number: items that the other store has, though what it shares with us needs them not.

        Rows hold many items, and go only as a whole.
        """
        found: dict[int, bytes] = {}
        if self.is_fresh(stream):
            return found
        with StoredSource(self._target) as source:
            for first, row in source.rows(self.own(stream), low, high):
                for n, (start, end) in enumerate(pairwise([0, *row.ends]), first):
                    found[n] = row.data[start:end]
        return found

    def spans(self, stream: int, other: int) -> Spans:
        """Which items of a stream are in one of the other store."""
        return self._where.setdefault(stream, {}).setdefault(other, Spans())

    def lacking(self, stream: int, low: int, high: int) -> list[tuple[int, int]]:
        """What of a span is nowhere in the other store."""
        parts = [(low, high)]
        for spans in self._where.get(stream, {}).values():
            parts = [part for span in parts for part in spans.missing(*span)]
        return parts

    def pieces(self, extent: Extent, coming: Spans) -> list[Extent]:
        """Where items lie in the other store, once those that are `coming` are in our own there."""
        stream, first, count = extent
        places = [(self.own(stream), coming), *self._where.get(stream, {}).items()]
        parts, found = [(first, first + count)], list[tuple[int, int, int]]()
        for other, spans in sorted(places, key=lambda place: -_covered(place[1], *parts[0])):
            found += [(a, b, other) for span in parts for a, b in spans.within(*span)]
            parts = [part for span in parts for part in spans.missing(*span)]
            if not parts:
                break
        else:
            raise Corrupt(f"items of stream {stream} are on no way to the other store")
        out: list[Extent] = []
        for low, high, other in sorted(found):
            if out and out[-1][0] == other:
                low -= out.pop()[2]
            out.append((other, low, high - low))
        return out

    def items(self, stream: int, low: int, high: int) -> tuple[list[bytes], bool]:
        """Items, and whether any may hold references."""
        return _items(self._data, [(stream, low, high - low)])

    def check_tail(self, kind: int, tail: Tail) -> None:
        """Corrupt if items are missing that a list goes on from, or hold what they should not.

        Whoever packs them says of all that they hold references if any of them does.
        """
        extent = tail.stream, tail.small, tail.end - tail.small
        for piece in streams.pieces(self._data, [extent]):
            if kind != RAW and not piece.refs:
                count = len(piece.ends)
                header = wire.map_header(count) if kind == DICT else wire.array_header(count)
                values.decode(header + piece.data)

    def damaged_blobs(self, blobs: dict[bytes, int]) -> set[bytes]:
        """Those that the other store has, but damaged."""
        if not blobs:
            return set()
        with StoredSource(self._target) as theirs:
            return {d for d, size in blobs.items() if theirs.blob_state(d, size) == "damaged"}

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


def _covered(spans: Spans, low: int, high: int) -> int:
    return sum([b - a for a, b in spans.within(low, high)])


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
        self._tails: list[tuple[Rope, Tail]] = []
        """Where the checkpoint that is to be gone on from goes on."""
        self._astray: set[int] = set()
        """Streams that cannot be gone on with in the other store."""
        self.size = 0
        """Bytes of it, about."""

    def root(self, row: Row, *, goes_on: bool) -> None:
        """All that a checkpoint refers to; and, if it is to be gone on from, what its line needs.

        Of any but the newest that may have been freed: then it raises Corrupt, and has noted
        nothing. What is noted as needed is not followed again.
        """
        self._line, self._tails = row.line if goes_on else None, []
        before = deepcopy((self._ranges, self._cuts, self._blobs, self.size)) if goes_on else None
        try:
            values.decode(row.root, self._follow)
        except Corrupt:
            if before is not None:
                self._ranges, self._cuts, self._blobs, self.size = before
            raise

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
                        self._cargo.check_tail(rope.kind, tail)
                    self._cuts.setdefault(tail.stream, set()).update((tail.small, tail.loose))
                    self._tails.append((rope, tail))
                    self._need_tail(rope, tail)
            for stream, first, count in rope.extents:
                self._need(rope, stream, self._cargo.lacking(stream, first, first + count))

    def _need_tail(self, rope: Rope, tail: Tail) -> None:
        own = self._cargo.spans(tail.stream, self._cargo.own(tail.stream))
        self._need(rope, tail.stream, own.missing(tail.small, tail.end))

    def _need(self, rope: Rope, stream: int, lacking: list[tuple[int, int]]) -> None:
        kind, spans = self._ranges.setdefault(stream, (rope.kind, Spans()))
        for start, stop in [new for part in lacking for new in spans.add(*part)]:
            items, refs = self._cargo.items(stream, start, stop)
            if refs and kind == RAW:
                raise Corrupt(f"fragments in stream {stream} are said to hold references")
            self.size += sum(map(len, items))
            for item in items if refs else ():
                cut = wire.string_length(item, 0) if kind == DICT else 0
                values.decode(item[cut:], self._follow)

    def remapped(self, stored: bytes) -> bytes:
        """A stored encoding with the other store's numbers in its references."""

        def follow(tag: int, data: bytes) -> Ext:
            if tag != ROPE_TAG:
                return Ext(tag, data)
            rope = ormsgpack.unpackb(data)
            tails, extents = rope[6], rope[7]
            for i in range(0, len(tails), 6):
                tails[i : i + 2] = [self._cargo.line(tails[i]), self._cargo.own(tails[i + 1])]
            rope[7] = []
            for extent in zip(extents[::3], extents[1::3], extents[2::3], strict=True):
                coming = self._ranges[extent[0]][1]
                for piece in self._cargo.pieces(extent, coming):
                    rope[7] += piece
            return Ext(tag, ormsgpack.packb(rope))

        return _rewritten(stored, follow)

    def done(self) -> None:
        """It is in the other store now."""
        self._cargo.blobs.update(self._blobs)
        for stream, (_, spans) in self._ranges.items():
            self._cargo.landed(stream, spans)

    def parts(self) -> Iterator[Part]:
        """Rows and blobs, in bounded parts; but all that goes on in a stream which has an end there
        in the last one: should that never come, nothing must lie behind that end.
        """
        going_on = self._going_on()
        held: list[RowWrite] = []
        blobs: list[tuple[bytes, bytes, bool]] = []
        size = 0
        for row in self._rows(fresh=True):
            held.append(row)
            size += len(row.body)
            if size > CHUNK_BYTES or len(held) >= _CHUNK_ROWS:
                yield held, blobs
                held, blobs, size = [], [], 0
        damaged = self._cargo.damaged_blobs(self._blobs)
        for digest, length in self._blobs.items():
            body = self._cargo.blob_row(digest, length)
            blobs.append((digest, body, digest in damaged))
            size += len(body)
            if size > CHUNK_BYTES:
                yield held, blobs
                held, blobs, size = [], [], 0
        yield [*held, *going_on], blobs

    def _going_on(self) -> list[RowWrite]:
        """Rows for streams that have an end there. Where one has an item already that refers to
        other places, the session takes a new one: what lies in those places may be freed there.
        """
        while True:
            self._astray.clear()
            rows = [*self._rows(fresh=False)]
            if not self._astray:
                return rows
            for stream in self._astray:
                self._cargo.give_up(stream)
            for rope, tail in [each for each in self._tails if each[1].stream in self._astray]:
                self._need_tail(rope, tail)

    def _rows(self, *, fresh: bool) -> Iterator[RowWrite]:
        for stream, (kind, spans) in sorted(self._ranges.items()):
            new = self._cargo.own(stream)
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
        if refs:
            items = [_item(kind, item, self.remapped) for item in items]
        for n, item in enumerate(items, low):
            if known.get(n, item) != item:
                if not refs or _item(kind, item, _content) != _item(kind, known[n], _content):
                    raise Conflict("the other store has something else where an item belongs")
                self._astray.add(stream)
        for start, stop in Spans.of(n for n in range(low, high) if n not in known).all():
            yield from streams.packs(new, start, [], items[start - low : stop - low], refs=refs)


def _item(kind: int, item: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """An item with its value changed; those of dicts have their keys before it."""
    cut = wire.string_length(item, 0) if kind == DICT else 0
    return item[:cut] + change(item[cut:])


def _rewritten(stored: bytes, follow: Callable[[int, bytes], Ext]) -> bytes:
    return ormsgpack.packb(values.decode(stored, follow), None, values.PACK)


def _content(stored: bytes) -> bytes:
    """A stored encoding without the places that its references name; hashes stay."""

    def follow(tag: int, data: bytes) -> Ext:
        return Ext(tag, ormsgpack.packb(ormsgpack.unpackb(data)[:6]) if tag == ROPE_TAG else data)

    return _rewritten(stored, follow)


class Pairing:
    """Which streams of two stores are the same, from checkpoints that both have."""

    def __init__(self, cargo: Cargo, theirs: StoredSource) -> None:
        self._cargo, self._theirs = cargo, theirs

    def roots(self, ours: Row, theirs: Row) -> None:
        self._cargo.same_line(ours.line, theirs.line)
        self._line = ours.line
        self._pair(ours.root, theirs.root)

    def _pair(self, ours: bytes, theirs: bytes) -> None:
        for (tag, mine), (same, other) in _paired(_references(ours), _references(theirs)):
            if tag == same == ROPE_TAG:
                self._ropes(parse_rope(mine), parse_rope(other))
            elif tag != same or mine != other:
                raise _unlike()
            elif tag == BLOB_TAG:
                self._cargo.blobs.add(parse_blob(mine).hash)

    def _ropes(self, ours: Rope, theirs: Rope) -> None:
        for mine, other in _paired(ours.tails, theirs.tails):
            if mine.line == self._line:
                self._cargo.goes_on(mine.stream, other.stream)
        for stream, same, first, count in _aligned(ours.extents, theirs.extents):
            new = self._cargo.spans(stream, same).add(first, first + count)
            for low, high in new if ours.kind != RAW else ():
                self._items(ours.kind, (stream, low, high - low), (same, low, high - low))

    def _items(self, kind: int, ours: Extent, theirs: Extent) -> None:
        """Items may hold references in turn."""
        mine, refs = self._cargo.items(ours[0], ours[1], ours[1] + ours[2])
        if refs:
            for a, b in _paired(mine, _items(self._theirs, [theirs])[0]):
                cut = wire.string_length(a, 0) if kind == DICT else 0
                self._pair(a[cut:], b[cut:])


def _paired(ours: Sequence[T], theirs: Sequence[T]) -> Iterator[tuple[T, T]]:
    """What a checkpoint has in both stores. A file that was made up may say anything."""
    if len(ours) != len(theirs):
        raise _unlike()
    return zip(ours, theirs, strict=True)


def _unlike() -> Conflict:
    return Conflict("the other store has another state under the same hash")


def _aligned(
    ours: Sequence[Extent], theirs: Sequence[Extent]
) -> Iterator[tuple[int, int, int, int]]:
    """Streams of both that hold the same items, the first one's number, and how many."""
    rest = list(theirs[::-1])
    for stream, first, count in ours:
        while count and rest:
            same, at, length = rest.pop()
            both = min(count, length)
            if first == at:
                yield stream, same, first, both
            if both < length:
                rest.append((same, at + both, length - both))
            first, count = first + both, count - both


def _references(stored: bytes) -> list[tuple[int, bytes]]:
    found: list[tuple[int, bytes]] = []
    values.decode(stored, lambda tag, data: found.append((tag, data)))
    return found
