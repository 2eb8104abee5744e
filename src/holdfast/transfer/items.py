"""Copies the data that checkpoints refer to: items of streams, and blobs.

Streams get new numbers in the target. Data that the target has already is not copied again.
"""

from __future__ import annotations

from collections import defaultdict
from copy import deepcopy
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

import ormsgpack
from ormsgpack import Ext

from holdfast.errors import Conflict, Corrupt
from holdfast.format import item_streams, msgpack, values
from holdfast.format.nodes import BLOB_TAG, DICT, RAW, ROPE_TAG, item_value, parse_blob, parse_rope
from holdfast.intervals import IntervalSet
from holdfast.storage.repository import StoredData
from holdfast.storage.rows import BlobWrite

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from holdfast.format.item_streams import RowWrite
    from holdfast.format.nodes import Extent, Rope, Tail
    from holdfast.format.records import Row
    from holdfast.storage.contract import Backend
    from holdfast.storage.reader import Reader
    from holdfast.storage.repository import Repository

    Part = tuple[list[RowWrite], list[BlobWrite]]

CHUNK_BYTES, _CHUNK_ROWS = 8 << 20, 2_000
T = TypeVar("T")


class StreamMap:
    """Maps streams and lines of the source to the target, and knows which data the target has.

    Items keep their numbers. The items of one source stream may be in several streams of the
    target, because a session appends only to its own streams. Appending to a stream of another
    session would collide with that session's next save.
    """

    def __init__(self, source: Backend, reader: Reader, target: Repository) -> None:
        self._reader, self._target = reader, target
        self._data = StoredData(source, reader)
        self._lines: dict[int, int] = {}
        self._where: defaultdict[int, defaultdict[int, IntervalSet]]
        self._where = defaultdict(lambda: defaultdict(IntervalSet))
        """The items that the target has, by source stream and target stream."""
        self.blobs: set[bytes] = set()
        self.begin()

    def begin(self) -> None:
        """Start the next session: it has no streams in the target yet."""
        self._own: dict[int, int] = {}
        self._fresh: set[int] = set()

    def line(self, line: int) -> int:
        """Return the target's number for a line; reserve one if there is none."""
        if line not in self._lines:
            self._lines[line] = self._target.new_stream()
        return self._lines[line]

    def same_line(self, line: int, other: int) -> None:
        """Note that `line` of the source is `other` in the target."""
        self._lines[line] = other

    def own(self, stream: int) -> int:
        """Return the target stream that receives the items of a stream that the target lacks."""
        if stream not in self._own:
            self._own[stream] = self._target.new_stream()
            self._fresh.add(stream)
        return self._own[stream]

    def set_own(self, stream: int, other: int) -> None:
        """Note that the session appends to `stream` in the source and to `other` in the target."""
        self._own[stream] = other

    def give_up(self, stream: int) -> None:
        """Use a new target stream for the items of a stream that the target lacks."""
        del self._own[stream]

    def is_fresh(self, stream: int) -> bool:
        """Return whether the target stream is new: no checkpoint in the target refers to it yet."""
        return stream in self._fresh

    def committed(self, stream: int, spans: IntervalSet) -> None:
        """Note that items of a stream were committed, with checkpoints that refer to them."""
        self._fresh.discard(stream)
        for span in spans.all():
            self.spans(stream, self.own(stream)).add(*span)

    def there(self, stream: int, low: int, high: int) -> dict[int, bytes]:
        """Return the items in [low, high) that the session's target stream has, by number.

        A row may hold items that no shared checkpoint needs, because gc may keep a whole row for
        some of its items.
        """
        found: dict[int, bytes] = {}
        if self.is_fresh(stream):
            return found
        with self._target.data() as source:
            for first, row in source.rows(self.own(stream), low, high):
                found.update(enumerate(row.items(), first))
        return found

    def spans(self, stream: int, other: int) -> IntervalSet:
        """Return the items of a source stream that a target stream has."""
        return self._where[stream][other]

    def lacking(self, stream: int, low: int, high: int) -> list[tuple[int, int]]:
        """Return the parts of [low, high) that are in no stream of the target."""
        parts = [(low, high)]
        for spans in self._where[stream].values():
            parts = [part for span in parts for part in spans.missing(*span)]
        return parts

    def pieces(self, extent: Extent, coming: IntervalSet) -> list[Extent]:
        """Return the extents of the target that hold the items of an extent of the source.

        The items in `coming` are taken to be in the session's own stream. Raises Corrupt if an item
        is neither in the target nor coming.
        """
        stream, first, count = extent
        places = [(self.own(stream), coming), *self._where[stream].items()]
        if len(places) > 1:
            places.sort(key=lambda place: -_covered(place[1], first, first + count))
        parts, found = [(first, first + count)], list[tuple[int, int, int]]()
        for other, spans in places:
            found += [(a, b, other) for span in parts for a, b in spans.within(*span)]
            parts = [part for span in parts for part in spans.missing(*span)]
            if not parts:
                break
        else:
            raise Corrupt(
                f"items of stream {stream} are neither in the other store nor part of the copy"
            )
        out: list[Extent] = []
        for low, high, other in sorted(found):
            if out and out[-1][0] == other:
                low -= out.pop()[2]
            out.append((other, low, high - low))
        return out

    def items(self, stream: int, low: int, high: int) -> tuple[list[bytes], bool]:
        """Return the items [low, high) of a source stream, and whether any may hold references."""
        return item_streams.read(self._data, [(stream, low, high - low)])

    def check_tail(self, kind: int, tail: Tail) -> None:
        """Raise Corrupt if an item that the next append packs is missing or not valid.

        A pack is marked as holding references if any of its items does. So items in rows without
        that mark are checked to hold none: as part of a marked pack they would be followed.
        """
        extent = tail.stream, tail.small, tail.end - tail.small
        for piece in item_streams.pieces(self._data, [extent]):
            if kind != RAW and not piece.refs:
                count = len(piece.ends)
                header = msgpack.map_header(count) if kind == DICT else msgpack.array_header(count)
                values.decode_stored(header + piece.data)

    def damaged_blobs(self, blobs: dict[bytes, int]) -> set[bytes]:
        """Return the blobs that the target has in a damaged form."""
        if not blobs:
            return set()
        with self._target.data() as theirs:
            return {d for d, size in blobs.items() if theirs.blob_state(d, size) == "damaged"}

    def blob_row(self, digest: bytes, size: int) -> bytes:
        """Return the row of a blob in the source. Raises Corrupt if it is damaged or missing."""
        self._data.blob(digest, size)  # raises Corrupt if the blob is damaged
        return self._reader.blob(digest) or b""


def _covered(spans: IntervalSet, low: int, high: int) -> int:
    return sum([b - a for a, b in spans.within(low, high)])


class DataBatch:
    """The data that a few new checkpoints of a session need in the target."""

    def __init__(self, stream_map: StreamMap) -> None:
        self._map = stream_map
        self._ranges: dict[int, tuple[int, IntervalSet]] = {}
        """By stream: the kind of its items, and the items to copy."""
        self._values: defaultdict[int, IntervalSet] = defaultdict(IntervalSet)
        """By stream: items that are part of a state. Others are copied only for the next append."""
        self._cuts: dict[int, set[int]] = {}
        """By stream: items at which a row must begin, because a tail refers to that item."""
        self._blobs: dict[bytes, int] = {}
        self._line: int | None = None
        self._tails: list[tuple[Rope, Tail]] = []
        """Tails of the checkpoint that the session will continue from."""
        self._unusable: set[int] = set()
        """Streams that the session cannot append to in the target; it takes new ones."""
        self.size = 0
        """Approximate number of bytes to copy."""

    def add(self, row: Row, *, with_tails: bool) -> None:
        """Add all data that a checkpoint refers to.

        With `with_tails`, also add the items that a save after this checkpoint needs. gc may have
        freed these items for any checkpoint but the newest. Then it raises Corrupt and adds
        nothing: data that was added once is not followed again, so nothing may stay half added.
        """
        self._line, self._tails = row.line if with_tails else None, []
        before = (
            deepcopy((self._ranges, self._cuts, self._blobs, self.size)) if with_tails else None
        )
        try:
            values.decode_stored(row.root, self._follow)
        except Corrupt:
            if before is not None:
                self._ranges, self._cuts, self._blobs, self.size = before
            raise

    def _follow(self, tag: int, data: bytes) -> None:
        """Add the data of one reference, and of all references in its items."""
        if tag == BLOB_TAG:
            blob = parse_blob(data)
            if blob.hash not in self._map.blobs:
                self.size += blob.size if blob.hash not in self._blobs else 0
                self._blobs[blob.hash] = blob.size
        elif tag == ROPE_TAG:
            rope = parse_rope(data)
            for tail in rope.tails:
                if tail.line == self._line:
                    if tail.small < tail.end:
                        self._map.check_tail(rope.kind, tail)
                    self._cuts.setdefault(tail.stream, set()).update((tail.small, tail.loose))
                    self._tails.append((rope, tail))
                    self._need_tail(rope, tail)
            for stream, first, count in rope.extents:
                self._values[stream].add(first, first + count)
                self._need(rope, stream, self._map.lacking(stream, first, first + count))

    def _need_tail(self, rope: Rope, tail: Tail) -> None:
        own = self._map.spans(tail.stream, self._map.own(tail.stream))
        self._need(rope, tail.stream, own.missing(tail.small, tail.end))

    def _need(self, rope: Rope, stream: int, lacking: list[tuple[int, int]]) -> None:
        kind, spans = self._ranges.setdefault(stream, (rope.kind, IntervalSet()))
        for start, stop in [new for part in lacking for new in spans.add(*part)]:
            items, refs = self._map.items(stream, start, stop)
            if refs and kind == RAW:
                raise Corrupt(f"fragments in stream {stream} are said to hold references")
            self.size += sum(map(len, items))
            for item in items if refs else ():
                values.decode_stored(item_value(kind, item), self._follow)

    def remapped(self, stored: bytes) -> bytes:
        """Return a stored value with its references changed to the numbers of the target."""

        def follow(tag: int, data: bytes) -> Ext:
            if tag != ROPE_TAG:
                return Ext(tag, data)
            rope = ormsgpack.unpackb(data)
            tails, extents = rope[6], rope[7]
            for i in range(0, len(tails), 6):
                tails[i : i + 2] = [self._map.line(tails[i]), self._map.own(tails[i + 1])]
            rope[7] = []
            for extent in zip(extents[::3], extents[1::3], extents[2::3], strict=True):
                coming = self._ranges[extent[0]][1]
                for piece in self._map.pieces(extent, coming):
                    rope[7] += piece
            return Ext(tag, ormsgpack.packb(rope))

        return _rewritten(stored, follow)

    def done(self) -> None:
        """Note that the target has committed this data."""
        self._map.blobs.update(self._blobs)
        for stream, (_, spans) in self._ranges.items():
            self._map.committed(stream, spans)

    def parts(self) -> Iterator[Part]:
        """Yield rows and blobs in parts of about 8 MB or 2,000 rows.

        The last part has all rows that extend streams which the target uses already. It is
        committed together with the checkpoints. If the copy stops before that, those streams must
        not have items after the end that the target's checkpoints know.
        """
        extensions = self._extensions()
        held: list[RowWrite] = []
        blobs: list[BlobWrite] = []
        size = 0
        for row in self._rows(fresh=True):
            held.append(row)
            size += len(row.body)
            if size > CHUNK_BYTES or len(held) >= _CHUNK_ROWS:
                yield held, blobs
                held, blobs, size = [], [], 0
        damaged = self._map.damaged_blobs(self._blobs)
        for digest, length in self._blobs.items():
            body = self._map.blob_row(digest, length)
            blobs.append(BlobWrite(digest, body, digest in damaged))
            size += len(body)
            if size > CHUNK_BYTES:
                yield held, blobs
                held, blobs, size = [], [], 0
        yield [*held, *extensions], blobs

    def _extensions(self) -> list[RowWrite]:
        """Return the rows that extend streams which the target uses already.

        The target may have the same item in such a stream, but with references to other places,
        whose data may be freed there. Then the session takes a new stream instead.
        """
        while True:
            self._unusable.clear()
            rows = [*self._rows(fresh=False)]
            if not self._unusable:
                return rows
            for stream in self._unusable:
                self._map.give_up(stream)
            for rope, tail in [each for each in self._tails if each[1].stream in self._unusable]:
                self._need_tail(rope, tail)

    def _rows(self, *, fresh: bool) -> Iterator[RowWrite]:
        """Yield the rows of new target streams, or (if not `fresh`) of those already in use."""
        for stream, (kind, spans) in sorted(self._ranges.items()):
            new = self._map.own(stream)
            if self._map.is_fresh(stream) is not fresh:
                continue
            cuts = self._cuts.get(stream, set())
            for low, high in spans.all():
                known = self._map.there(stream, low, high)
                edges = sorted({low, high} | {cut for cut in cuts if low < cut < high})
                for start, stop in pairwise(edges):
                    for at in range(start, stop, item_streams.PACK_ITEMS):
                        end = min(at + item_streams.PACK_ITEMS, stop)
                        yield from self._packed(kind, (stream, at, end), new, known)

    def _packed(
        self, kind: int, part: tuple[int, int, int], new: int, known: dict[int, bytes]
    ) -> Iterator[RowWrite]:
        """Yield packs of the items that the target stream lacks.

        Raises Conflict if the target has another value in the place of an item. If only the
        references of an item differ, add the stream to `_unusable`.
        """
        stream, low, high = part
        items, refs = self._map.items(stream, low, high)
        if refs:
            items = [_item(kind, item, self.remapped) for item in items]
        erased, needed = item_streams.ERASED[kind == DICT], self._values[stream]
        for n, item in enumerate(items, low):
            other = known.get(n, item)
            if other == item or (item == erased and n not in needed):
                continue
            if not (refs and _same(kind, item, other)):
                raise Conflict("the other store has another item in the same place")
            self._unusable.add(stream)
        for start, stop in IntervalSet.of(n for n in range(low, high) if n not in known).all():
            yield from item_streams.packs(
                new, start, [], items[start - low : stop - low], refs=refs
            )


def _same(kind: int, item: bytes, other: bytes) -> bool:
    """Return whether two items are equal, apart from the places that they refer to."""
    return _item(kind, item, _content) == _item(kind, other, _content)


def _item(kind: int, item: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """Return an item with `change` applied to its value. Items of dicts start with their key."""
    value = item_value(kind, item)
    return item[: len(item) - len(value)] + change(value)


def _rewritten(stored: bytes, follow: Callable[[int, bytes], Ext]) -> bytes:
    return ormsgpack.packb(values.decode_stored(stored, follow), None, values.PACK)


def _content(stored: bytes) -> bytes:
    """Return a stored value without the places of its references. Their hashes stay."""

    def follow(tag: int, data: bytes) -> Ext:
        return Ext(tag, ormsgpack.packb(ormsgpack.unpackb(data)[:6]) if tag == ROPE_TAG else data)

    return _rewritten(stored, follow)


class StreamMatcher:
    """Finds the streams that correspond in two stores, from checkpoints that both have.

    Raises Conflict if a checkpoint has different contents in the two stores.
    """

    def __init__(self, stream_map: StreamMap, theirs: StoredData) -> None:
        self._map, self._theirs = stream_map, theirs

    def roots(self, ours: Row, theirs: Row) -> None:
        """Match the lines, streams and blobs of a checkpoint in both stores."""
        self._map.same_line(ours.line, theirs.line)
        self._line = ours.line
        self._pair(ours.root, theirs.root)

    def _pair(self, ours: bytes, theirs: bytes) -> None:
        for (tag, mine), (same, other) in _paired(_references(ours), _references(theirs)):
            if tag == same == ROPE_TAG:
                self._ropes(parse_rope(mine), parse_rope(other))
            elif tag != same or mine != other:
                raise _unlike()
            elif tag == BLOB_TAG:
                self._map.blobs.add(parse_blob(mine).hash)

    def _ropes(self, ours: Rope, theirs: Rope) -> None:
        for mine, other in _paired(ours.tails, theirs.tails):
            if mine.line == self._line:
                self._map.set_own(mine.stream, other.stream)
        for stream, same, first, count in _aligned(ours.extents, theirs.extents):
            new = self._map.spans(stream, same).add(first, first + count)
            for low, high in new if ours.kind != RAW else ():
                self._items(ours.kind, (stream, low, high - low), (same, low, high - low))

    def _items(self, kind: int, ours: Extent, theirs: Extent) -> None:
        """Match the references inside of items."""
        mine, refs = self._map.items(ours[0], ours[1], ours[1] + ours[2])
        if refs:
            for a, b in _paired(mine, item_streams.read(self._theirs, [theirs])[0]):
                self._pair(item_value(kind, a), item_value(kind, b))


def _paired(ours: Sequence[T], theirs: Sequence[T]) -> Iterator[tuple[T, T]]:
    """Return pairs. Raises Conflict if the lengths differ, as they may in a forged file."""
    if len(ours) != len(theirs):
        raise _unlike()
    return zip(ours, theirs, strict=True)


def _unlike() -> Conflict:
    return Conflict("the other store has another state under the same hash")


def _aligned(
    ours: Sequence[Extent], theirs: Sequence[Extent]
) -> Iterator[tuple[int, int, int, int]]:
    """Yield spans of equal items: our stream, their stream, first item, number of items."""
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
    values.decode_stored(stored, lambda tag, data: found.append((tag, data)))
    return found
