"""Reachability: find the data that checkpoints refer to, and the data that is garbage.

Deleted checkpoints count until gc frees them, because their deletion can be undone. A checkpoint
that cannot be read might refer to anything, so then no data counts as garbage.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING

from holdfast.errors import UNREADABLE, Corrupt
from holdfast.format import item_streams, records
from holdfast.format.item_streams import MAX_ITEMS, STREAM_BITS
from holdfast.format.msgpack import FOLLOWING
from holdfast.format.nodes import DICT, RAW, Blob, Node, Rope, Struct, item_value, parse
from holdfast.format.rows import DENSE, REFS, seal_items, unseal_items
from holdfast.history import lineage
from holdfast.history.lineage import all_rows, sessions_of_ids
from holdfast.intervals import IntervalSet
from holdfast.storage.repository import StoredData
from holdfast.storage.rows import PAGE, BlobTrim, ItemsKey, ItemsPut, ItemsTrim

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast.format.nodes import Extent, Tail
    from holdfast.format.rows import ItemRow
    from holdfast.storage.contract import Backend
    from holdfast.storage.reader import Reader
    from holdfast.storage.rows import ItemsBegin


_ALL = 1 << 62


def _flags(begin: bytes) -> int:
    """Return the flags of a sealed row, given its first bytes. Raises Corrupt if too few."""
    if type(begin) is not bytes or len(begin) < 9:
        raise Corrupt("a row of items is too short")
    return begin[8]


def _is_there(reader: Reader, session: int) -> bool:
    """Return whether an unlisted session has a session row or a sound checkpoint.

    A damaged row does not count, because it may name the wrong session. It is then missing in the
    session that it belongs to.
    """
    with suppress(*UNREADABLE):
        if reader.session_by_number(session) is None:
            return any(lineage.sound_rows(reader, session))
    return True


def _unknown(what: str, hint: str | None = None) -> Corrupt:
    return Corrupt(
        f"what is needed is not certain, so no data is freed: {what}",
        hint=hint
        or "verify() names what is damaged; repair() or delete() it first; "
        "if that does not help, copy() to a new store brings along what is sound",
    )


def _item_rows(reader: Reader) -> list[ItemsBegin]:
    """Return all rows of items in order. Raises Corrupt if they cannot be read or are not in order.

    They are read at once, not in pages. A page starts after the last key of the page before; if
    that key or an index is damaged, pages skip rows that still load, and their references.
    """
    try:
        rows = reader.item_rows(-1, _ALL)
    except UNREADABLE as e:
        raise _unknown(e.message, e.hint) from e
    if any(a.position >= b.position for a, b in pairwise(rows)):
        raise _unknown("rows of items are out of order")
    return rows


class Reachable:
    """The items and blobs that the checkpoints of a store refer to, at the time of one snapshot.

    With `erase`, every row that has a dead item is rewritten without it.
    """

    def __init__(self, reader: Reader, backend: Backend, *, erase: bool = False) -> None:
        self._reader, self._erase = reader, erase
        self._source = StoredData(backend, reader)
        self._spans: dict[int, IntervalSet] = {}
        self._followed: dict[tuple[int, int], IntervalSet] = {}
        """By line and stream of the current session: the items that were searched for tails."""
        self._tails: dict[int, tuple[Tail, bytes]] = {}
        """By stream: its tail, and the item that replaces a dead item in the tail."""
        self._blobs: set[bytes] = set()
        self._rows = _item_rows(reader)
        self._positions = [row.position for row in self._rows]

    @property
    def rows(self) -> int:
        """Return the number of rows of items."""
        return len(self._positions)

    def mark_all(self, tell: Callable[[str, int, int], None]) -> None:
        """Mark the data of all checkpoints, also of sessions that are not listed.

        Raises Corrupt if a checkpoint cannot be read or is missing.
        """
        # The ids are read first: in a store of files, sessions may be added while we read.
        known = {*sessions_of_ids(self._reader)}
        sessions = {row.number for row in lineage.all_sessions(self._reader)}
        for n, session in enumerate(sorted(sessions)):
            tell("reading", n, len(sessions))
            self._mark_session(session)
        for session in sorted(known - sessions):
            # It cannot be opened or deleted, so its checkpoints always count.
            if _is_there(self._reader, session):
                self._mark_session(session)

    def _mark_session(self, session: int) -> None:
        self._followed.clear()
        newest: int | None = None
        with suppress(*UNREADABLE):
            newest = lineage.read_head(self._reader, session)[1].last
        there = IntervalSet()
        for stored in all_rows(self._reader, session):
            seq = stored.seq
            there.add(seq, seq + 1)
            try:
                row = records.unseal_checkpoint(session, *stored)
                is_newest = newest is None or seq == newest
                self.mark(row.node(), row.line if is_newest else None)
            except UNREADABLE as e:
                raise _unknown(f"what checkpoint {seq} of a session needs: {e.message}") from e
        try:
            there.update(lineage.freed(self._reader, session))
        except UNREADABLE as e:
            raise _unknown(e.message) from e
        for low, _ in there.missing(1, (newest or 0) + 1):
            raise _unknown(f"the record of checkpoint {low} of session {session} is missing")

    def mark(self, node: Node, line: int | None = None) -> None:
        """Mark everything that a node refers to.

        `line` is given for the newest checkpoint, whose tails the next save continues; they are
        remembered. It is given for every checkpoint if the newest one is unknown.
        """
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
                    self._tails[tail.stream] = tail, item_streams.ERASED[node.kind == DICT]

    def _mark_items(self, extent: Extent, kind: int, line: int | None = None) -> None:
        stream, first, count = extent
        if not count:
            return
        spans = self._spans.setdefault(stream, IntervalSet())
        new = spans.add(first, first + count)
        if line is not None:  # nested values may have tails as well
            new = self._followed.setdefault((line, stream), IntervalSet()).add(first, first + count)
        if kind == RAW:
            return
        for low, high in new:
            if not self._has_references(stream, low, high):
                continue
            for piece in item_streams.pieces(self._source, [(stream, low, high - low)]):
                for item in piece.items() if piece.refs else ():
                    self.mark(parse(item_value(kind, item)), line)

    def _has_references(self, stream: int, low: int, high: int) -> bool:
        base = stream << STREAM_BITS
        first = max(bisect_right(self._positions, base + low) - 1, 0)
        last = bisect_left(self._positions, base + high)
        return any(_flags(row.begin) & REFS for row in self._rows[first:last])

    def dead_items(self) -> Iterator[ItemsTrim]:
        """Yield rows to delete in one write, and the rows that replace them."""
        begin = 0
        while begin < len(self._positions):
            stream = self._positions[begin] >> STREAM_BITS
            end = bisect_left(self._positions, (stream + 1) << STREAM_BITS)
            yield from self._dead_in(stream, range(begin, end))
            begin = end

    def _dead_in(self, stream: int, rows: range) -> Iterator[ItemsTrim]:
        """Yield the rows of a stream to delete, and the rows that replace them.

        Rows before the tail are cut down to their live items. Rows of the tail keep all items,
        because the next save packs them; dead ones are replaced by empty ones. If a row is deleted,
        the small packs of the tail are merged, because they might stay small for long.
        """
        spans = self._spans.get(stream)
        tail, empty = self._tails.get(stream, (None, b""))
        dead = False
        kept: list[int] = []
        in_tail: list[int] = []
        for n in rows:
            first = self._positions[n] & (MAX_ITEMS - 1)
            stop = self._positions[n + 1] & (MAX_ITEMS - 1) if n + 1 in rows else MAX_ITEMS
            living = spans.within(first, stop) if spans else []
            if living == [(first, stop)]:
                kept.append(n)
                continue
            if tail is not None and tail.small <= first < tail.end:
                kept.append(n)
                in_tail.append(n)
                continue
            rest = self._cut_down(stream, first, living) if living else []
            if rest is None:
                kept.append(n)
            else:
                dead = True
                yield ItemsTrim([self._row(n)], rest)
        packed = [*self._packed(tail, empty, kept)] if dead and tail is not None else []
        yield from packed
        gone = {row for group in packed for row in group.remove}
        for n in in_tail:
            if self._row(n) not in gone and (body := self._blanked(n, empty)) is not None:
                yield ItemsTrim([self._row(n)], [ItemsPut(self._positions[n], body)])

    def _is_dead(self, stream: int, n: int) -> bool:
        spans = self._spans.get(stream)
        return spans is None or n not in spans

    def _blanked(self, n: int, empty: bytes) -> bytes | None:
        """Return a row with its dead items replaced; None if it has none, or is damaged."""
        address = self._positions[n]
        stream, first = address >> STREAM_BITS, address & (MAX_ITEMS - 1)
        row = self._unsealed(stream, first)
        if row is None:
            return None
        items = row.items()
        new = [empty if self._is_dead(stream, at) else i for at, i in enumerate(items, first)]
        return None if new == items else seal_items(address, new, row.refs, DENSE)

    def _unsealed(self, stream: int, first: int) -> ItemRow | None:
        """Return the row that begins with item `first`; None if it is damaged."""
        body = dict(self._reader.items(stream, first, first + 1)).get(first, b"")
        with suppress(*UNREADABLE):
            return unseal_items(stream << STREAM_BITS | first, body, f"item {first}")
        return None

    def _row(self, n: int) -> ItemsKey:
        row = self._rows[n]
        return ItemsKey(row.position, row.begin)

    def _packed(self, tail: Tail, empty: bytes, rows: list[int]) -> Iterator[ItemsTrim]:
        """Yield the small packs of a tail, and the full packs that replace them.

        Loose rows are left to the next save. Yields nothing if a row is damaged.
        """
        base = tail.stream << STREAM_BITS
        together = [n for n in rows if base + tail.small <= self._positions[n] < base + tail.loose]
        if len(together) < 2:
            return
        first = self._positions[together[0]] - base
        extent = tail.stream, first, tail.loose - first
        try:
            items, refs = item_streams.read(self._source, [extent])
        except UNREADABLE:
            return  # damaged rows stay as they are
        items = [empty if self._is_dead(tail.stream, n) else i for n, i in enumerate(items, first)]
        packs = item_streams.packs(tail.stream, first, items, [], refs=refs)
        new = [ItemsPut(base + row.first, row.body) for row in packs]
        yield ItemsTrim([self._row(n) for n in together], new)

    def _cut_down(
        self, stream: int, first: int, living: list[tuple[int, int]]
    ) -> list[ItemsPut] | None:
        """Return rows that hold the live items of a row; None if the row is to stay as it is.

        A row stays if it is damaged, has no dead item, or (without `erase`) if dead items take less
        than a quarter of its bytes.
        """
        row = self._unsealed(stream, first)
        if row is None:
            return None
        stop = first + len(row.ends)
        starts = [0, *row.ends]
        living = [(low, min(high, stop)) for low, high in living if low < stop]
        alive = sum([starts[high - first] - starts[low - first] for low, high in living])
        dead = len(row.data) - alive
        if not dead or (4 * dead < len(row.data) and not self._erase):
            return None
        out = []
        for low, high in living:
            items = [row.data[starts[i] : starts[i + 1]] for i in range(low - first, high - first)]
            address = stream << STREAM_BITS | low
            out.append(ItemsPut(address, seal_items(address, items, row.refs, DENSE)))
        return out

    def dead_blobs(self) -> Iterator[BlobTrim]:
        """Yield the blobs that no checkpoint refers to."""
        after = 0
        while page := self._reader.blob_rows(after, PAGE):
            for blob in page:
                if blob.digest not in self._blobs:
                    yield BlobTrim(blob.digest, blob.uses)
            after = page[-1].number
