"""Compare two states, and find the common ancestor of two checkpoints.

Equal hashes mean equal values, and equal addresses mean equal items. So two ropes are compared by
their extents, and only items that differ are read: the diff of two neighbouring checkpoints costs
the same however long the conversation is.
"""

from __future__ import annotations

from difflib import SequenceMatcher
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from holdfast.format import item_streams, msgpack, records, ropes, values
from holdfast.format.load import load_node
from holdfast.format.msgpack import FOLLOWING
from holdfast.format.nodes import LIST, RAW, Blob, Leaf, Node, Rope, node_of
from holdfast.format.state_paths import dotted
from holdfast.history import lineage
from holdfast.history.message_parts import message_parts, one_line, short
from holdfast.model import Usage
from holdfast.storage.rows import Address

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from holdfast.format.item_streams import Source
    from holdfast.format.nodes import Extent
    from holdfast.history.checkpoint import Checkpoint
    from holdfast.model import Record
    from holdfast.storage.reader import Reader
    from holdfast.storage.repository import Repository


Step = str | int | Any
_WIDTH = 72
"""Characters of a value in a line about a change."""


class Change(NamedTuple):
    """One difference between two states, and its path.

    Positions in lists are those of the newer state; for a removed item, of the older one. If a dict
    has its keys in a new order, `kind` is "changed", and `before` and `after` are lists of the keys
    that both have. (Two lists as values never look like that: they are compared item by item.)
    """

    kind: Literal["added", "removed", "changed"]
    """Whether the value was added, removed or changed."""
    path: tuple[Step, ...]
    """The keys and positions that lead to the value."""
    before: Any
    """The older value; None if it was added."""
    after: Any
    """The newer value; None if it was removed."""

    def __str__(self) -> str:
        sign = {"added": "+", "removed": "-", "changed": "~"}[self.kind]
        where = dotted(self.path)
        if self.kind == "added":
            return f"{sign} {where}: {_shown(self.after)}"
        if self.kind == "removed":
            return f"{sign} {where}: {_shown(self.before)}"
        return f"{sign} {where}: {_shown(self.before)} → {_shown(self.after)}"


class Diff(tuple[Change, ...]):
    """The changes in order. Empty if, and only if, the states are equal. Prints as lines."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(map(str, self)) if self else "no difference"


def _shown(value: Any) -> str:
    """Return a value as one short line; a message as its text and its calls."""
    parts = message_parts(value)
    return one_line("  ".join(map(str, parts)), _WIDTH) if parts else short(value, _WIDTH)


def diff(a: Node, b: Node, source: Source) -> Diff:
    with FOLLOWING:
        found = Diff(_nodes(a, b, (), source))
    if not found and a.hash != b.hash and ropes.flatten(a, source) != ropes.flatten(b, source):
        # The stored bytes differ, but the loaded values look equal, such as two time zones that
        # this machine does not know. Different hashes alone do not prove a difference, because
        # format version 1 may have computed one of them.
        return Diff([Change("changed", (), load_node(a, source), load_node(b, source))])
    return found


def _nodes(a: Node, b: Node, path: tuple[Step, ...], source: Source) -> Iterator[Change]:
    if a.hash == b.hash:
        return
    if isinstance(a, Rope) and isinstance(b, Rope) and a.kind == b.kind == LIST:
        yield from _ropes(a, b, path, source)
        return
    a, b = _read(a, source), _read(b, source)
    left, right = _parts(a, source), _parts(b, source)
    if isinstance(left, dict) and isinstance(right, dict):
        yield from _dicts(left, right, path, source)
    elif isinstance(left, list) and isinstance(right, list):
        yield from _sequences(left, right, path, 0, source)
    else:
        before, after = load_node(a, source), load_node(b, source)
        if values.encode(before) != values.encode(after):
            yield Change("changed", path, before, after)


def _read(node: Node, source: Source) -> Node:
    """Return a value that is stored whole as a leaf, so that it is read only once."""
    is_whole = isinstance(node, Blob) or (isinstance(node, Rope) and node.kind == RAW)
    return Leaf(ropes.flatten(node, source)) if is_whole else node


def _parts(node: Node, source: Source) -> dict[bytes, Node] | list[Node] | None:
    """Return a dict's values by encoded key, or a list's items; None for any other value."""
    if isinstance(node, Rope) and node.kind == LIST:
        return _items(node.extents, source)
    struct = ropes.as_struct(node, source)
    if struct is not None and struct.kind == LIST:
        return list(struct.children)
    if struct is not None:
        return dict(zip(struct.keys, struct.children, strict=True))
    flat = ropes.flatten(node, source)
    start = msgpack.header_length(flat)
    if not msgpack.is_tagged(flat) or flat[start - 1] != values.DICT:
        return None
    pairs = [values.encode(v) for v in values.decode_stored(flat[start:], values.keep_tags)]
    return dict(zip(pairs[::2], map(node_of, pairs[1::2]), strict=True))


def _dicts(
    a: dict[bytes, Node], b: dict[bytes, Node], path: tuple[Step, ...], source: Source
) -> Iterator[Change]:
    for key, node in a.items():
        if key not in b:
            yield Change("removed", (*path, values.decode(key)), load_node(node, source), None)
    for key, node in b.items():
        where = (*path, values.decode(key))
        if key not in a:
            yield Change("added", where, None, load_node(node, source))
        else:
            yield from _nodes(a[key], node, where, source)
    yield from _order(a, b, path)


def _order(
    a: Mapping[bytes, Any], b: Mapping[bytes, Any], path: tuple[Step, ...]
) -> Iterator[Change]:
    left, right = [key for key in a if key in b], [key for key in b if key in a]
    if left != right:
        keys = [[values.decode(key) for key in each] for each in (left, right)]
        yield Change("changed", path, *keys)


def _ropes(a: Rope, b: Rope, path: tuple[Step, ...], source: Source) -> Iterator[Change]:
    """Skip the items at both ends that have equal addresses; read and compare the rest."""
    before = common(a.extents, b.extents)
    left = item_streams.cut(a.extents, before, a.count)
    right = item_streams.cut(b.extents, before, b.count)
    after = common(mirrored(left), mirrored(right))
    left = item_streams.cut(a.extents, before, a.count - after)
    right = item_streams.cut(b.extents, before, b.count - after)
    yield from _sequences(_items(left, source), _items(right, source), path, before, source)


def common(a: Sequence[Extent], b: Sequence[Extent]) -> int:
    """Return how many items at the beginning have the same addresses."""
    count = 0
    for (s1, f1, n1), (s2, f2, n2) in zip(a, b, strict=False):
        if (s1, f1) != (s2, f2):
            break
        count += min(n1, n2)
        if n1 != n2:
            break
    return count


def mirrored(extents: Sequence[Extent]) -> list[Extent]:
    """Return the extents in reverse order, so that common() compares their ends."""
    return [(s, -(f + n), n) for s, f, n in reversed(extents)]


def _items(extents: Sequence[Extent], source: Source) -> list[Node]:
    return list(ropes.item_nodes(extents, source))


def _sequences(
    a: list[Node], b: list[Node], path: tuple[Step, ...], offset: int, source: Source
) -> Iterator[Change]:
    matcher = SequenceMatcher(None, [n.hash for n in a], [n.hash for n in b], autojunk=False)
    for kind, a1, a2, b1, b2 in matcher.get_opcodes():
        if kind == "equal":
            continue
        both = min(a2 - a1, b2 - b1)
        for i in range(both):
            yield from _nodes(a[a1 + i], b[b1 + i], (*path, offset + b1 + i), source)
        for i in range(a1 + both, a2):
            yield Change("removed", (*path, offset + i), load_node(a[i], source), None)
        for i in range(b1 + both, b2):
            yield Change("added", (*path, offset + i), None, load_node(b[i], source))


class Way(NamedTuple):
    """Steps and usage from the common ancestor to one of the two checkpoints."""

    steps: int
    usage: Usage


class Comparison(NamedTuple):
    """The changes between two checkpoints, and how each came from their common ancestor."""

    ancestor: Checkpoint | None
    """The newest common ancestor; None if there is none, or if damage hides it."""
    to_a: Way
    """The steps and the usage from the ancestor to the first checkpoint."""
    to_b: Way
    """The steps and the usage from the ancestor to the second checkpoint."""
    changes: Diff
    """The changes from the first checkpoint to the second."""


def compare(repository: Repository, a: Checkpoint, b: Checkpoint) -> Comparison:
    """Return the changes from `a` to `b`, and their common ancestor; see Store.compare."""
    with repository.reader() as reader:
        left, right = _place(reader, a), _place(reader, b)
        before, after = (lineage.read_row(reader, place).node() for place in (left, right))
        found = diff(before, after, repository.data(reader))
        meeting, to_a, to_b = _meet(reader, left, right)
        ancestor = None
        if meeting is not None:
            record = lineage.read_row(reader, meeting).record
            ancestor = lineage.to_checkpoint(reader, meeting, record)
    return Comparison(ancestor, to_a, to_b, found)


class Changes(NamedTuple):
    """The difference between a checkpoint and the nearest ancestor that can be read."""

    ancestor: Checkpoint | None
    """That ancestor. None for a first checkpoint, whose whole state counts as added."""
    diff: Diff
    """The changes since that ancestor."""


def changes(reader: Reader, place: Address, source: Source) -> Changes:
    """Return what a checkpoint changed. Raises Corrupt if it cannot be read."""
    node = lineage.read_row(reader, place).node()
    for at, record in islice(lineage.ancestors(reader, place), 1, None):
        if record.damaged is None:
            older = lineage.read_row(reader, at).node()
            ancestor = lineage.to_checkpoint(reader, at, record)
            return Changes(ancestor, diff(older, node, source))
    state = load_node(node, source)
    entries = state.items() if isinstance(state, dict) else ()
    added = [Change("added", (key,), None, value) for key, value in entries]
    return Changes(None, Diff(added or [Change("added", (), None, state)]))


def _place(reader: Reader, of: Checkpoint) -> Address:
    return Address(lineage.find_session(reader, of.session), of.seq)


def _meet(reader: Reader, a: Address, b: Address) -> tuple[Address | None, Way, Way]:
    """Find the common ancestor: climb from the side with more steps until both sides meet."""
    ways = [_Climb(reader, a), _Climb(reader, b)]
    while True:
        left, right = ways
        if left.at is None or right.at is None:
            for each in ways:  # count the remaining steps of the other side
                while each.at is not None:
                    each.climb()
            return None, left.way, right.way
        if left.at[0] == right.at[0]:
            return left.at[0], left.way, right.way
        ways[left.at[1].step < right.at[1].step].climb()


class _Climb:
    def __init__(self, reader: Reader, start: Address) -> None:
        self._ancestors: Iterator[tuple[Address, Record]] = lineage.ancestors(reader, start)
        self.way = Way(0, Usage())
        self.at: tuple[Address, Record] | None = next(self._ancestors, None)

    def climb(self) -> None:
        if self.at is not None:
            steps, usage = self.way
            more = records.read_usage(self.at[1].extra.get("usage", ()))
            self.way = Way(steps + 1, usage + more)
        self.at = next(self._ancestors, None)
