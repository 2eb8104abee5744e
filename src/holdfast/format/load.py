"""Load a value from stored bytes and the blobs and streams that they refer to.

Each size is checked on the way, so that damaged references cannot take more memory than declared.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.errors import Corrupt
from holdfast.format import item_streams, msgpack, values
from holdfast.format.memory_limit import Meter
from holdfast.format.nodes import BLOB_TAG, DICT, LIST, RAW, ROPE_TAG, Leaf, parse_blob, parse_rope

if TYPE_CHECKING:
    from holdfast.format.item_streams import Source
    from holdfast.format.nodes import Node, Rope
    from holdfast.format.rows import ItemRow

_SLACK = 1 << 16


def load(stored: bytes, size: int, source: Source, known: Known | None = None) -> Any:
    """Return the value of a stored encoding. `size` is the length of its canonical encoding.

    With `known`, items of lists that were decoded before are taken from there, and the others are
    added to it. Raises Corrupt if the bytes are damaged, and TooBig if they take too much memory.
    """
    return _Loader(source, size, known).value(stored)


def load_node(node: Node, source: Source) -> Any:
    """Return the value of a node. A leaf has no references, so none is followed there."""
    if isinstance(node, Leaf):
        return values.decode_stored(node.flat)
    return load(node.stored, node.size, source)


class Run(NamedTuple):
    """Consecutive items of a stream, decoded. These lists are never changed."""

    first: int
    values: list[Any]
    sizes: list[int]
    """The number of stored bytes of each item."""
    spent: list[int]
    """The number of bytes that the references of each item expand to."""

    @property
    def stop(self) -> int:
        return self.first + len(self.values)

    def then(self, other: Run) -> Run:
        """Return this run followed by `other`, which must begin where this one ends."""
        if not (self.values and other.values):
            return self if self.values else other
        return Run(
            self.first,
            self.values + other.values,
            self.sizes + other.sizes,
            self.spent + other.spent,
        )


class Known:
    """A cache of decoded list items, for loading several checkpoints one after the other.

    This is safe, because the item at an address of a stream never changes, and it was checked when
    it was read. `limit` bounds the stored bytes of the cached items. The least recently used
    streams are dropped first.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._runs: OrderedDict[int, Run] = OrderedDict()
        self._bytes = 0

    def get(self, stream: int, start: int, stop: int) -> Run:
        """Return the known items if they overlap or touch [start, stop), otherwise an empty run."""
        run = self._runs.get(stream)
        if run is None or start > run.stop or stop < run.first:
            return Run(start, [], [], [])
        self._runs.move_to_end(stream)
        return run

    def put(self, stream: int, run: Run) -> None:
        """Keep a run, in place of the one that was known of the stream."""
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
    """Loads one value. The parts of a value must fit into the size that it declares."""

    def __init__(self, source: Source, budget: int, known: Known | None) -> None:
        self._source, self._budget, self._known = source, budget, known
        self._meter = Meter.of(budget)

    def value(self, stored: bytes) -> Any:
        return values.decode(stored, self._hook, self._meter)

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
            return values.decode(self._source.blob(ref.hash, ref.size), None, self._meter)
        return values.decode_tag(tag, data)

    def _rope(self, rope: Rope) -> Any:
        pieces: list[ItemRow] = []
        held, flagged = 0, 0
        for piece in item_streams.pieces(self._source, rope.extents):
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
        # A row without the flag must not hold references. They are not followed, because gc does
        # not know them.
        return values.decode(stored, self._hook if refs else None, self._meter)

    def _mixed(self, kind: int, pieces: list[ItemRow]) -> Any:
        """Return a list or dict if only some of its rows hold references, with two decodes."""
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

    def _some(self, kind: int, pieces: list[ItemRow]) -> list[Any]:
        """Return the items (of a dict: pairs) of rows that all hold references, or all do not."""
        count = sum([len(piece.ends) for piece in pieces])
        header = msgpack.map_header(count) if kind == DICT else msgpack.array_header(count)
        stored = b"".join([header, *[piece.data for piece in pieces]])
        found = values.decode(stored, self._hook if pieces[0].refs else None, self._meter)
        return [*found.items()] if kind == DICT else found

    def _list(self, rope: Rope, known: Known) -> list[Any]:
        """Return the same list as `_rope`, but read only the items that are not known."""
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
        """Return items [start, stop) of a stream. Raises Corrupt if they exceed `room` bytes.

        Their references must fit into the budget, but it is the caller who spends it.
        """
        run = Run(start, [], [], [])
        if start >= stop:
            return run
        budget = self._budget
        for piece in item_streams.pieces(self._source, [(stream, start, stop - start)]):
            room -= len(piece.data)
            if room < 0:
                raise Corrupt("a rope's items are more than its size")
            hook = self._hook if piece.refs else None
            for item in piece.items():
                left = self._budget
                run.values.append(values.decode(item, hook, self._meter))
                run.sizes.append(len(item))
                run.spent.append(left - self._budget)
        self._budget = budget
        return run

    def _spend(self, count: int) -> None:
        """Take bytes from the budget. Raises Corrupt if too few are left."""
        self._budget -= count
        if self._budget < 0:
            raise Corrupt("stored references expand to more than the state's size")
