"""From stored bytes to a value, following references, within bounds."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.codec import streams, values, wire
from holdfast.codec.nodes import BLOB_TAG, DICT, LIST, RAW, ROPE_TAG, Leaf, parse_blob, parse_rope
from holdfast.errors import Corrupt

if TYPE_CHECKING:
    from holdfast.codec.nodes import Node, Rope
    from holdfast.codec.streams import Piece, Source

_SLACK = 1 << 16


def load(stored: bytes, size: int, source: Source, known: Known | None = None) -> Any:
    """The value of a stored encoding whose canonical one has `size` bytes.

    With `known`, lists are made of the items that are known there, and what else they hold is
    known from then on.
    """
    return _Loader(source, size, known).value(stored)


def load_node(node: Node, source: Source) -> Any:
    """The value of a node. In a leaf are no references, whatever looks like one."""
    if isinstance(node, Leaf):
        return values.decode(node.flat)
    return load(node.stored, node.size, source)


class Run(NamedTuple):
    """Items of a stream, one after the other, as they were decoded. Nobody changes these lists."""

    first: int
    values: list[Any]
    sizes: list[int]
    """In how many bytes each is stored,"""
    spent: list[int]
    """and what its references expand to."""

    @property
    def stop(self) -> int:
        return self.first + len(self.values)

    def then(self, other: Run) -> Run:
        """Both as one; where `other` begins, this one ends."""
        if not (self.values and other.values):
            return self if self.values else other
        return Run(
            self.first,
            self.values + other.values,
            self.sizes + other.sizes,
            self.spent + other.spent,
        )


class Known:
    """Items of lists that were decoded before, for the loads that follow.

    All that stands at an address of a stream was sound when it was read, and never becomes
    something else. `limit` bounds the bytes in which the items are stored; streams that were not
    used for longest go first.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._runs: OrderedDict[int, Run] = OrderedDict()
        self._bytes = 0

    def get(self, stream: int, start: int, stop: int) -> Run:
        """Known items that overlap with [start, stop) or lie next to it; an empty run if none."""
        run = self._runs.get(stream)
        if run is None or start > run.stop or stop < run.first:
            return Run(start, [], [], [])
        self._runs.move_to_end(stream)
        return run

    def put(self, stream: int, run: Run) -> None:
        """Instead of what was known of the stream."""
        self._drop(stream)
        self._runs[stream] = run
        self._bytes += sum(run.sizes)
        while self._bytes > self._limit:
            self._drop(next(iter(self._runs)))

    def _drop(self, stream: int) -> None:
        run = self._runs.pop(stream, None)
        if run is not None:
            self._bytes -= sum(run.sizes)

    @property
    def bytes(self) -> int:
        return self._bytes


class _Loader:
    """Follows references. What lies inside a value must fit into the size that it declares."""

    def __init__(self, source: Source, budget: int, known: Known | None) -> None:
        self._source, self._budget, self._known = source, budget, known

    def value(self, stored: bytes) -> Any:
        return values.decode(stored, self._hook)

    def _hook(self, tag: int, data: bytes) -> Any:
        if tag == ROPE_TAG:
            rope = parse_rope(data)
            self._spend(rope.size)
            outside, self._budget = self._budget, rope.size
            if self._known is not None and rope.kind == LIST:
                value = self._list(rope, self._known)
            else:
                value = self._rope(rope)
            self._budget = outside
            return value
        if tag == BLOB_TAG:
            ref = parse_blob(data)
            self._spend(ref.size)
            return values.decode(self._source.blob(ref.hash, ref.size))
        return values.decode_tag(tag, data)

    def _rope(self, rope: Rope) -> Any:
        pieces: list[Piece] = []
        held, flagged = 0, 0
        for piece in streams.pieces(self._source, rope.extents):
            held += len(piece.data)
            if held > 2 * rope.size + _SLACK:
                raise Corrupt("a rope's items are more than its size")
            pieces.append(piece)
            flagged += piece.refs
        refs = flagged and rope.kind != RAW
        if refs and flagged < len(pieces):
            return self._mixed(rope.kind, pieces)
        stored = b"".join([rope.header(), *[piece.data for piece in pieces]])
        if len(stored) != rope.size and not refs:
            raise Corrupt("a rope's items do not add up to its size")
        # Nobody has looked after references where none should be: they may lead anywhere.
        return values.decode(stored, self._hook if refs else None)

    def _mixed(self, kind: int, pieces: list[Piece]) -> Any:
        """A list or dict of which only some rows hold references: both sorts, each decoded once."""
        of = {
            refs: self._some(kind, [p for p in pieces if p.refs is refs]) for refs in (True, False)
        }
        taken = {True: 0, False: 0}
        found: Any = []
        for piece in pieces:
            start = taken[piece.refs]
            taken[piece.refs] = stop = start + len(piece.ends)
            found += of[piece.refs][start:stop]
        return dict(found) if kind == DICT else found

    def _some(self, kind: int, pieces: list[Piece]) -> list[Any]:
        """Items, or entries as pairs, of rows that all hold references, or all do not."""
        count = sum([len(piece.ends) for piece in pieces])
        header = wire.map_header(count) if kind == DICT else wire.array_header(count)
        stored = b"".join([header, *[piece.data for piece in pieces]])
        found = values.decode(stored, self._hook if pieces[0].refs else None)
        return [*found.items()] if kind == DICT else found

    def _list(self, rope: Rope, known: Known) -> list[Any]:
        """What `_rope` gives for a list, with only those items read that are not known."""
        out: list[Any] = []
        room = 2 * rope.size + _SLACK
        held, refs = len(rope.header()), False
        for stream, start, count in rope.extents:
            stop = start + count
            run = known.get(stream, start, stop)
            if start < run.first or stop > run.stop:
                before = self._read(stream, start, run.first, room - held)
                after = self._read(stream, run.stop, stop, room - held)
                run = before.then(run).then(after)
                known.put(stream, run)
            low, high = start - run.first, stop - run.first
            out += run.values[low:high]
            held += sum(run.sizes[low:high])
            if held > room:
                raise Corrupt("a rope's items are more than its size")
            spent = sum(run.spent[low:high])
            self._spend(spent)
            refs = refs or spent > 0
        if held != rope.size and not refs:
            raise Corrupt("a rope's items do not add up to its size")
        return out

    def _read(self, stream: int, start: int, stop: int, room: int) -> Run:
        """Items [start, stop) of a stream, of no more bytes than there is room for.

        What they expand to is bounded by the budget, and left for the caller to spend.
        """
        run = Run(start, [], [], [])
        if start >= stop:
            return run
        budget = self._budget
        for piece in streams.pieces(self._source, [(stream, start, stop - start)]):
            room -= len(piece.data)
            if room < 0:
                raise Corrupt("a rope's items are more than its size")
            begin = 0
            hook = self._hook if piece.refs else None
            for end in piece.ends:
                left = self._budget
                item = piece.data[begin : end - piece.base]
                run.values.append(values.decode(item, hook))
                run.sizes.append(len(item))
                run.spent.append(left - self._budget)
                begin = end - piece.base
        self._budget = budget
        return run

    def _spend(self, count: int) -> None:
        self._budget -= count
        if self._budget < 0:
            raise Corrupt("stored references expand to more than the state's size")
