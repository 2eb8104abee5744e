"""What the checkpoints of a store refer to, and what of its data is refuse.

Every checkpoint that is there counts, deleted ones too: their deletion can be undone until they are
freed. What cannot be read might refer to anything, so then nothing is refuse.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from contextlib import suppress
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

from holdfast import ids, lineage
from holdfast.codec import records, streams, wire
from holdfast.codec.depth import FOLLOWING
from holdfast.codec.nodes import DICT, RAW, Blob, Node, Rope, Struct, parse
from holdfast.codec.rows import DENSE, REFS, seal_items, unseal_items
from holdfast.codec.streams import MAX_ITEMS, STREAM_BITS
from holdfast.errors import UNREADABLE, Corrupt
from holdfast.source import StoredSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from holdfast.backends.base import Backend, Reader
    from holdfast.codec.nodes import Extent, Tail

    Rows = list[tuple[int, bytes]]

_PAGE = 1_000
_ALL = 1 << 62
_LOOKED_UP = 1 << 17
"""So many that are not listed are looked for: how many there should be may be made up."""


def all_rows(
    reader: Reader, session: int, tell: Callable[[Corrupt], object] = lambda _: None
) -> Iterator[tuple[int, bytes, bytes]]:
    """seq, id and row of all checkpoints of a session.

    One damaged key can end a listing, be it by an error, of which `tell` is told. What it leaves
    out is looked up, as a load does.
    """
    low = 1
    full = True
    gone = cache(lambda: _freed(reader, session))  # read once, and only if there is a hole
    try:
        while full:
            rows = reader.checkpoints(session, low, records.MAX_SEQ, _PAGE)
            for row in rows:
                if row[0] > low:
                    yield from _unlisted(reader, session, gone().missing(low, row[0]))
                yield row
                low = row[0] + 1
            full = len(rows) == _PAGE
    except Corrupt as e:
        tell(e)
    with suppress(*UNREADABLE):
        last = lineage.read_head(reader, session)[1].last
        if last >= low:
            yield from _unlisted(reader, session, gone().missing(low, last + 1))


def _freed(reader: Reader, session: int) -> Spans:
    """The checkpoints that gc has freed, as far as that can be read."""
    gone = Spans()
    with suppress(*UNREADABLE):
        for span in lineage.freed(reader, session):
            gone.add(*span)
    return gone


def _unlisted(
    reader: Reader, session: int, holes: list[tuple[int, int]]
) -> Iterator[tuple[int, bytes, bytes]]:
    """Of the checkpoints in the holes of a listing, those that are there."""
    for start, stop in holes:
        for seq in range(start, min(stop, start + _LOOKED_UP)):
            with suppress(*UNREADABLE):
                if (found := reader.checkpoint(session, seq)) is not None:
                    yield seq, *found


def strays(reader: Reader, listed: set[int]) -> list[int]:
    """Sessions that have checkpoints but are not listed, as far as the index of ids tells."""
    found: set[int] = set()
    with suppress(*UNREADABLE):
        for session in _sessions_of_ids(reader):
            found.add(session)
    return sorted(found - listed)


def _sessions_of_ids(reader: Reader) -> Iterator[int]:
    high = b"\xff" * (ids.BYTES + 1)
    while page := reader.newest_ids(b"", high, _PAGE):
        yield from {session for session, _, _ in page}
        high = page[-1][2]


class Spans:
    """A set of numbers, as disjoint spans [low, high)."""

    def __init__(self) -> None:
        self._lows: list[int] = []
        self._highs: list[int] = []

    @classmethod
    def of(cls, numbers: Iterable[int]) -> Spans:
        spans = cls()
        for n in sorted(numbers):
            if spans._highs and spans._highs[-1] == n:
                spans._highs[-1] = n + 1
            elif not spans._highs or spans._highs[-1] < n:
                spans._lows.append(n)
                spans._highs.append(n + 1)
        return spans

    def add(self, low: int, high: int) -> list[tuple[int, int]]:
        """Add a span; what of it was not in the set."""
        first = bisect_left(self._highs, low)
        last = bisect_right(self._lows, high)
        new: list[tuple[int, int]] = []
        at = low
        for a, b in zip(self._lows[first:last], self._highs[first:last], strict=True):
            if at < a:
                new.append((at, min(a, high)))
            at = max(at, b)
        if at < high:
            new.append((at, high))
        if first < last:
            low, high = min(low, self._lows[first]), max(high, self._highs[last - 1])
        self._lows[first:last] = [low]
        self._highs[first:last] = [high]
        return new

    def all(self) -> list[tuple[int, int]]:
        return list(zip(self._lows, self._highs, strict=True))

    def missing(self, low: int, high: int) -> list[tuple[int, int]]:
        """The parts of a span that are not in the set."""
        out = []
        for a, b in [*self.within(low, high), (high, high)]:
            if low < a:
                out.append((low, a))
            low = b
        return out

    def without(self, numbers: Iterable[int]) -> list[tuple[int, int]]:
        """What is left when some go."""
        gone = Spans.of(numbers)
        return [part for low, high in self.all() for part in gone.missing(low, high)]

    def within(self, low: int, high: int) -> list[tuple[int, int]]:
        first, last = bisect_right(self._highs, low), bisect_left(self._lows, high)
        pairs = zip(self._lows[first:last], self._highs[first:last], strict=True)
        return [(max(a, low), min(b, high)) for a, b in pairs]


def _flags(begin: bytes) -> int:
    """The flags of a sealed row, from its first bytes."""
    if type(begin) is not bytes or len(begin) < 9:
        raise Corrupt("a row of items is too short")
    return begin[8]


def _is_there(reader: Reader, session: int) -> bool:
    """Whether there is a session that is not listed.

    Rows that are damaged in what session they name make none: they are missing in another.
    """
    with suppress(*UNREADABLE):
        if reader.session_by_number(session) is None:
            return _has_sound_row(reader, session)
    return True


def _has_sound_row(reader: Reader, session: int) -> bool:
    for seq, id, body in all_rows(reader, session):
        with suppress(*UNREADABLE):
            records.unseal_checkpoint(session, seq, id, body)
            return True
    return False


def _unknown(what: str) -> Corrupt:
    return Corrupt(
        f"what is needed is not certain, so no data is freed: {what}",
        hint="verify() names what is damaged; repair() or delete() it first; "
        "if that does not help, copy() to a new store brings along what is sound",
    )


def _item_rows(reader: Reader) -> list[tuple[int, int, bytes]]:
    """All rows of items, in order.

    In one go: pages go on behind the last key of the one before, and if that is damaged, or what
    leads to it, they leave out rows that still load. Who did not see them would not know that they
    have references.
    """
    try:
        rows = reader.item_rows(-1, _ALL)
    except UNREADABLE as e:
        raise _unknown(e.message) from e
    if any(a[0] >= b[0] for a, b in pairwise(rows)):
        raise _unknown("rows of items are out of order")
    return rows


class Live:
    """What the checkpoints of a store refer to, as of one moment."""

    def __init__(self, reader: Reader, backend: Backend) -> None:
        self._reader = reader
        self._source = StoredSource(backend, reader)
        self._spans: dict[int, Spans] = {}
        self._followed: dict[tuple[int, int], Spans] = {}
        """By line and stream, of the session that is being read: where tails were looked for."""
        self._tails: dict[int, Tail] = {}
        """By stream: where it goes on."""
        self._blobs: set[bytes] = set()
        self._rows = _item_rows(reader)
        self._positions = [pos for pos, _, _ in self._rows]

    @property
    def rows(self) -> int:
        """How many rows of items there are."""
        return len(self._positions)

    def mark_all(self, tell: Callable[[str, int, int], None]) -> None:
        """Corrupt if some checkpoint cannot be read, be its session listed or not."""
        known = {*_sessions_of_ids(self._reader)}  # first: in files, more may come
        after: bytes | None = None
        sessions: set[int] = set()
        while page := self._reader.sessions(after, _PAGE):
            sessions.update([session for session, _, _ in page])
            after = page[-1][1]
        for n, session in enumerate(sorted(sessions)):
            tell("reading", n, len(sessions))
            self._mark_session(session)
        for session in sorted(known - sessions):
            # Nobody can open or delete it, so its checkpoints count for as long as they are there.
            if _is_there(self._reader, session):
                self._mark_session(session)

    def _mark_session(self, session: int) -> None:
        self._followed.clear()
        newest: int | None = None
        with suppress(*UNREADABLE):
            newest = lineage.read_head(self._reader, session)[1].last
        there = Spans()
        for seq, id, body in all_rows(self._reader, session):
            there.add(seq, seq + 1)
            try:
                row = records.unseal_checkpoint(session, seq, id, body)
                goes_on = newest is None or seq == newest
                self.mark(row.node(), row.line if goes_on else None)
            except UNREADABLE as e:
                raise _unknown(f"what checkpoint {seq} of a session needs: {e.message}") from e
        try:
            for span in lineage.freed(self._reader, session):
                there.add(*span)
        except UNREADABLE as e:
            raise _unknown(e.message) from e
        for low, _ in there.missing(1, (newest or 0) + 1):
            raise _unknown(f"the record of checkpoint {low} of session {session} is missing")

    def mark(self, node: Node, line: int | None = None) -> None:
        """All that a node refers to; of the newest checkpoint also what its line goes on from."""
        if isinstance(node, Struct):
            for child in node.children:
                self.mark(child, line)
        elif isinstance(node, Blob):
            self._blobs.add(node.hash)
        elif isinstance(node, Rope):
            with FOLLOWING:
                for extent in node.extents:
                    self._mark_items(extent, node.kind, line)
            for tail in node.tails:
                if tail.line == line:
                    self._tails[tail.stream] = tail
                    self._mark_items((tail.stream, tail.small, tail.end - tail.small), node.kind)

    def _mark_items(self, extent: Extent, kind: int, line: int | None = None) -> None:
        stream, first, count = extent
        if not count:
            return
        spans = self._spans.setdefault(stream, Spans())
        new = spans.add(first, first + count)
        if line is not None:  # what lies inside may have tails of its own
            new = self._followed.setdefault((line, stream), Spans()).add(first, first + count)
        if kind == RAW:
            return
        for low, high in new:
            if not self._has_references(stream, low, high):
                continue
            for piece in streams.pieces(self._source, [(stream, low, high - low)]):
                begin = 0
                for end in piece.ends:
                    item = piece.data[begin : end - piece.base]
                    begin = end - piece.base
                    if piece.refs:
                        cut = wire.string_length(item, 0) if kind == DICT else 0
                        self.mark(parse(item[cut:]), line)

    def _has_references(self, stream: int, low: int, high: int) -> bool:
        base = stream << STREAM_BITS
        first = max(bisect_right(self._positions, base + low) - 1, 0)
        last = bisect_left(self._positions, base + high)
        return any(_flags(begin) & REFS for _, _, begin in self._rows[first:last])

    def dead_items(self) -> Iterator[tuple[Rows, Rows]]:
        """Rows that go together, and what comes in their place."""
        begin = 0
        while begin < len(self._positions):
            stream = self._positions[begin] >> STREAM_BITS
            end = bisect_left(self._positions, (stream + 1) << STREAM_BITS)
            yield from self._dead_in(stream, range(begin, end))
            begin = end

    def _dead_in(self, stream: int, rows: range) -> Iterator[tuple[Rows, Rows]]:
        """Rows without any living item, and rows to be cut down to what lives.

        Where something goes, the small packs behind it will not soon be made a full one, so that
        is done here.
        """
        spans = self._spans.get(stream)
        dead = False
        small: list[int] = []
        for n in rows:
            first = self._positions[n] & (MAX_ITEMS - 1)
            stop = self._positions[n + 1] & (MAX_ITEMS - 1) if n + 1 in rows else MAX_ITEMS
            living = spans.within(first, stop) if spans else []
            if living == [(first, stop)]:
                small.append(n)
                continue
            rest = self._cut_down(stream, first, living) if living else []
            if rest is None:
                small.append(n)
            else:
                dead = True
                yield [self._row(n)], rest
        tail = self._tails.get(stream)
        if dead and tail is not None:
            yield from self._packed(tail, small)

    def _row(self, n: int) -> tuple[int, bytes]:
        pos, _, begin = self._rows[n]
        return pos, begin

    def _packed(self, tail: Tail, rows: list[int]) -> Iterator[tuple[Rows, Rows]]:
        """The small packs of a tail as a full one. Loose rows are left to whoever goes on there."""
        base = tail.stream << STREAM_BITS
        together = [n for n in rows if base + tail.small <= self._positions[n] < base + tail.loose]
        if len(together) < 2:
            return
        first = self._positions[together[0]] - base
        items: list[bytes] = []
        refs = False
        try:
            for piece in streams.pieces(self._source, [(tail.stream, first, tail.loose - first)]):
                refs = refs or piece.refs
                starts = [piece.base, *piece.ends]
                items += [piece.data[a - piece.base : b - piece.base] for a, b in pairwise(starts)]
        except UNREADABLE:
            return  # they stay as they are
        packs = streams.packs(tail.stream, first, items, [], refs=refs)
        yield [self._row(n) for n in together], [(base + row.first, row.body) for row in packs]

    def _cut_down(
        self, stream: int, first: int, living: list[tuple[int, int]]
    ) -> list[tuple[int, bytes]] | None:
        """Rows for the living items of one row; None if too little of it is dead, or not sound."""
        body = dict(self._reader.items(stream, first, first + 1)).get(first, b"")
        try:
            row = unseal_items(stream << STREAM_BITS | first, body, f"item {first}")
        except UNREADABLE:
            return None
        stop = first + len(row.ends)
        starts = [0, *row.ends]
        living = [(low, min(high, stop)) for low, high in living if low < stop]
        alive = sum([starts[high - first] - starts[low - first] for low, high in living])
        if 4 * (len(row.data) - alive) < len(row.data):
            return None
        out = []
        for low, high in living:
            items = [row.data[starts[i] : starts[i + 1]] for i in range(low - first, high - first)]
            address = stream << STREAM_BITS | low
            out.append((address, seal_items(address, items, row.refs, DENSE)))
        return out

    def dead_blobs(self) -> Iterator[tuple[bytes, int]]:
        after = 0
        while page := self._reader.blob_rows(after, _PAGE):
            for _, digest, _, uses in page:
                if digest not in self._blobs:
                    yield digest, uses
            after = page[-1][0]
