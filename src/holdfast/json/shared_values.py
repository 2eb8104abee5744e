"""Many states as JSON. A part that several states share occurs once."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from holdfast.errors import UNREADABLE, Corrupt
from holdfast.format import item_streams, msgpack, portable, values
from holdfast.format.load import load_node
from holdfast.format.msgpack import FOLLOWING
from holdfast.format.nodes import DICT, LIST, RAW, Blob, Leaf, Node, Rope, Struct, parse
from holdfast.history import lineage
from holdfast.storage.rows import Address
from holdfast.store import repository_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from holdfast.format.item_streams import Source
    from holdfast.format.nodes import Extent
    from holdfast.history.checkpoint import Checkpoint
    from holdfast.store import Store

_LONG = 200
_NAMES = {LIST: "$items", DICT: "$entries"}


class Pool:
    """Packs states into JSON that refers to shared parts.

    A packed state may contain `{"$at": n}`, the value at n of `pool`. It may contain `{"$items":
    [[stream, first, count], …]}`, a list made of items of streams, and `{"$entries": …}`, a dict
    whose items are pairs. An item, or the value in a pair, is `{"$packed": …}` if it refers to
    other parts. No rendering of a value looks like one of these.
    """

    def __init__(self, store: Store) -> None:
        self._repository = repository_of(store)
        self._values: list[Any] = []
        self._places: dict[str | bytes, int] = {}
        """Positions of long texts, and of blobs by their hashes."""
        self._known: dict[int, dict[int, _Items]] = {LIST: {}, DICT: {}}
        """Items by kind and stream."""

    def shape(self) -> dict[str, Any]:
        """Return all shared parts: `pool`, and the items of each stream as [first, items] pairs."""
        out: dict[str, Any] = {"pool": self._values}
        for kind, name in _NAMES.items():
            out[name] = {
                str(stream): [[run.first, run.items] for run in known.runs]
                for stream, known in self._known[kind].items()
            }
        return out

    def pack(self, checkpoint: Checkpoint) -> Any:
        """Return the state of a checkpoint. Raises Corrupt if a part of it is damaged."""
        with self._repository.reader() as reader:
            number = lineage.find_session(reader, checkpoint.session)
            root = lineage.read_row(reader, Address(number, checkpoint.seq)).node()
            with FOLLOWING:
                return self._pack(root, self._repository.data(reader))

    def _pack(self, node: Node, source: Source) -> Any:
        if isinstance(node, Rope) and node.kind != RAW:
            size = len(node.header())
            for stream, first, count in node.extents:
                known = self._known[node.kind].setdefault(stream, _Items())
                while (gap := known.gap(first, first + count)) is not None:
                    self._read(known, node.kind, stream, gap, source)
                size += known.size(first, first + count)
            if size != node.size:
                raise Corrupt("a rope's items do not add up to its size")
            return {_NAMES[node.kind]: [list(extent) for extent in node.extents]}
        if isinstance(node, Rope | Blob):
            at = self._places.get(node.hash)
            if at is None:
                at = self._put(node.hash, self._share(_render(load_node(node, source))))
            return {"$at": at}
        if isinstance(node, Struct) and node.kind != DICT:
            return [self._pack(child, source) for child in node.children]
        if isinstance(node, Struct):
            keys = [values.decode(key) for key in node.keys]
            if all(type(key) is str for key in keys):
                children = [self._pack(child, source) for child in node.children]
                return {_escape(key): child for key, child in zip(keys, children, strict=True)}
        return self._share(_render(load_node(node, source)))

    def _share(self, rendered: Any) -> Any:
        """Replace long texts by references, because states may have them in common."""
        if type(rendered) is str and len(rendered) > _LONG:
            at = self._places.get(rendered)
            return {"$at": self._put(rendered, rendered) if at is None else at}
        if type(rendered) is dict:
            return {key: self._share(value) for key, value in rendered.items()}
        if type(rendered) is list:
            return [self._share(value) for value in rendered]
        return rendered

    def _put(self, key: str | bytes, value: Any) -> int:
        self._places[key] = at = len(self._values)
        self._values.append(value)
        return at

    def _read(
        self, known: _Items, kind: int, stream: int, gap: tuple[int, int], source: Source
    ) -> None:
        """Read the items of a gap, up to the first damaged one."""
        first, stop = gap
        entries: list[tuple[bytes, Node]] = []
        try:
            entries.extend(_entries(kind, (stream, first, stop - first), source))
        except UNREADABLE as e:  # keep those before it
            known.mark_damaged(first + len(entries), e.message)
        # Add all before any is rendered, because one may refer to others of the same stream.
        known.add(first, [len(key) + node.size for key, node in entries])
        for at, (key, node) in enumerate(entries, first):
            try:
                value = self._item(node, source)
            except UNREADABLE as e:
                known.mark_damaged(at, e.message)
            except RecursionError:
                known.mark_damaged(at, "stored references are nested too deeply")
            else:
                known.put(at, [_escape(values.decode(key)), value] if kind == DICT else value)

    def _item(self, node: Node, source: Source) -> Any:
        if isinstance(node, Leaf):
            return _render(load_node(node, source))
        return {"$packed": self._pack(node, source)}


def _render(value: Any) -> Any:
    return portable.to_json(values.encode_exact(value))


def _escape(key: str) -> str:
    """Return a key as `portable` renders it: a leading dollar sign is doubled."""
    return f"${key}" if key.startswith("$") else key


def _entries(kind: int, extent: Extent, source: Source) -> Iterator[tuple[bytes, Node]]:
    """Yield the encoded key and the node of each item. The keys of a list are empty."""
    for piece in item_streams.pieces(source, [extent]):
        for item in piece.items():
            cut = msgpack.string_length(item, 0) if kind == DICT else 0
            yield item[:cut], parse(item[cut:]) if piece.refs else Leaf(item[cut:])


class _Run:
    """Consecutive items of a stream. An item is None until put() sets it."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.items: list[Any] = []
        self.ends = [0]
        """The size of all items before each one, and at last of all items."""

    @property
    def stop(self) -> int:
        return self.first + len(self.items)

    def add(self, items: list[Any], sizes: Iterable[int]) -> None:
        self.items += items
        for size in sizes:
            self.ends.append(self.ends[-1] + size)


class _Items:
    """The items of one stream that were read, in as few runs as possible."""

    def __init__(self) -> None:
        self.runs: list[_Run] = []
        self._damaged: list[tuple[int, str]] = []

    def _at(self, n: int) -> int:
        """Return the index of the run with an item, or else of the last run before it."""
        return bisect_right(self.runs, n, key=lambda run: run.first) - 1

    def gap(self, first: int, stop: int) -> tuple[int, int] | None:
        """Return the first range of these items that was not read, or None.

        Raises Corrupt if one of the items is damaged.
        """
        at = bisect_left(self._damaged, (first,))
        if at < len(self._damaged) and self._damaged[at][0] < stop:
            raise Corrupt(self._damaged[at][1])
        at = self._at(first)
        if at >= 0:
            first = max(first, self.runs[at].stop)
        if first >= stop:
            return None
        following = self.runs[at + 1 : at + 2]
        return first, min([stop, *[run.first for run in following]])

    def add(self, first: int, sizes: list[int]) -> None:
        """Add items of these sizes in a gap, and join the runs that meet there."""
        if not sizes:
            return
        at = self._at(first)
        if at < 0 or self.runs[at].stop < first:
            at += 1
            self.runs.insert(at, _Run(first))
        run = self.runs[at]
        run.add([None] * len(sizes), sizes)
        if at + 1 < len(self.runs) and self.runs[at + 1].first == run.stop:
            other = self.runs.pop(at + 1)
            run.add(other.items, [b - a for a, b in pairwise(other.ends)])

    def put(self, n: int, item: Any) -> None:
        run = self.runs[self._at(n)]
        run.items[n - run.first] = item

    def mark_damaged(self, n: int, problem: str) -> None:
        insort(self._damaged, (n, problem))

    def size(self, first: int, stop: int) -> int:
        run = self.runs[self._at(first)]
        return run.ends[stop - run.first] - run.ends[first - run.first]
