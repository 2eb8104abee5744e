"""What changed between two states, reading only what differs.

Equal hashes mean equal values, and equal addresses equal items, so two ropes are compared by their
extents: the diff of two neighbours costs the same however long the conversation is.
"""

from __future__ import annotations

from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from holdfast.codec import ropes, streams, values
from holdfast.codec.depth import FOLLOWING
from holdfast.codec.load import load_node
from holdfast.codec.nodes import DICT, LIST, Leaf, Node, Rope, Struct, parse

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from holdfast.codec.nodes import Extent
    from holdfast.codec.streams import Source

Step = str | int | Any


class Change(NamedTuple):
    """One difference, and where it is.

    In lists, numbers are those of the newer state, or of the older one for what was removed. A dict
    whose keys come in another order has "changed" from a list of keys to another: those that both
    have. (Two lists as values never show as that: they are compared item by item.)
    """

    kind: Literal["added", "removed", "changed"]
    path: tuple[Step, ...]
    before: Any
    after: Any

    def __str__(self) -> str:
        sign = {"added": "+", "removed": "-", "changed": "~"}[self.kind]
        where = dotted(self.path)
        if self.kind == "added":
            return f"{sign} {where}: {summary(self.after)}"
        if self.kind == "removed":
            return f"{sign} {where}: {summary(self.before)}"
        return f"{sign} {where}: {summary(self.before)} → {summary(self.after)}"


class Diff(tuple[Change, ...]):
    """The changes in order. Prints as lines; empty if, and only if, the states are equal."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(map(str, self)) if self else "no difference"


def dotted(path: tuple[Step, ...]) -> str:
    out = "state"
    for step in path:
        out += f".{step}" if isinstance(step, str) and step.isidentifier() else f"[{step!r}]"
    return out


def summary(value: Any, width: int = 72) -> str:
    """A value in a few words; a message by its role and text."""
    if isinstance(value, dict) and "role" in value:
        content = value.get("content")
        text = content if isinstance(content, str) else repr(content)
        calls = value.get("tool_calls")
        called = f" (+{len(calls)} tool calls)" if isinstance(calls, list) and calls else ""
        line = f"{value['role']}: {text}{called}"
    else:
        line = repr(value)
    line = " ".join(line.split())
    return line if len(line) <= width else line[: width - 1] + "…"


def diff(a: Node, b: Node, source: Source) -> Diff:
    with FOLLOWING:
        found = Diff(_nodes(a, b, (), source))
    if not found and a.hash != b.hash:
        # What differs is not seen in values, such as a time zone that this machine does not know.
        return Diff([Change("changed", (), _value(a, source), _value(b, source))])
    return found


def _value(node: Node, source: Source) -> Any:
    return load_node(node, source)


def _nodes(a: Node, b: Node, path: tuple[Step, ...], source: Source) -> Iterator[Change]:
    if a.hash == b.hash:
        return
    if isinstance(a, Rope) and isinstance(b, Rope) and a.kind == b.kind == LIST:
        yield from _ropes(a, b, path, source)
        return
    left, right = _entries(a, source), _entries(b, source)
    if left is not None and right is not None:
        yield from _dicts(left, right, path, source)
        return
    before, after = _value(a, source), _value(b, source)
    yield from _values(before, after, path)


def _entries(node: Node, source: Source) -> dict[bytes, Node] | None:
    """A dict's children by encoded key; None for anything else."""
    if isinstance(node, Rope) and node.kind == DICT:
        node = ropes.entries(node, source)
    if isinstance(node, Struct) and node.kind == DICT:
        return dict(zip(node.keys, node.children, strict=True))
    if isinstance(node, Leaf):
        value = values.decode(node.flat, values.keep_tags)
        if type(value) is dict:
            return {values.encode(k): Leaf(values.encode(v)) for k, v in value.items()}
    return None


def _dicts(
    a: dict[bytes, Node], b: dict[bytes, Node], path: tuple[Step, ...], source: Source
) -> Iterator[Change]:
    for key, node in a.items():
        if key not in b:
            yield Change("removed", (*path, values.decode(key)), _value(node, source), None)
    for key, node in b.items():
        where = (*path, values.decode(key))
        if key not in a:
            yield Change("added", where, None, _value(node, source))
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
    """Skip what lies at equal addresses at both ends; read and compare what is between."""
    before = _common(a.extents, b.extents)
    left = streams.cut(a.extents, before, a.count)
    right = streams.cut(b.extents, before, b.count)
    after = _common(_mirrored(left), _mirrored(right))
    left = streams.cut(a.extents, before, a.count - after)
    right = streams.cut(b.extents, before, b.count - after)
    yield from _sequences(_items(left, source), _items(right, source), path, before, source)


def _common(a: Sequence[Extent], b: Sequence[Extent]) -> int:
    """How many items at the beginning lie at the same addresses."""
    count = 0
    for (s1, f1, n1), (s2, f2, n2) in zip(a, b, strict=False):
        if (s1, f1) != (s2, f2):
            break
        count += min(n1, n2)
        if n1 != n2:
            break
    return count


def _mirrored(extents: Sequence[Extent]) -> list[Extent]:
    return [(s, -(f + n), n) for s, f, n in reversed(extents)]


def _items(extents: Sequence[Extent], source: Source) -> list[Node]:
    out: list[Node] = []
    for piece in streams.pieces(source, extents):
        start = 0
        for end in piece.ends:
            stored = piece.data[start : end - piece.base]
            out.append(parse(stored) if piece.refs else Leaf(stored))
            start = end - piece.base
    return out


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
            yield Change("removed", (*path, offset + i), _value(a[i], source), None)
        for i in range(b1 + both, b2):
            yield Change("added", (*path, offset + i), None, _value(b[i], source))


def _values(a: Any, b: Any, path: tuple[Step, ...]) -> Iterator[Change]:
    """Two values in memory that are known to differ, or may."""
    if values.encode(a) == values.encode(b):
        return
    if type(a) is dict and type(b) is dict:
        # By encoding: 1, 1.0 and True are one key to a dict, and three to a state.
        old, new = ({values.encode(k): (k, v) for k, v in x.items()} for x in (a, b))
        for key, (name, item) in old.items():
            if key not in new:
                yield Change("removed", (*path, name), item, None)
        for key, (name, item) in new.items():
            if key not in old:
                yield Change("added", (*path, name), None, item)
            else:
                yield from _values(old[key][1], item, (*path, name))
        yield from _order(old, new, path)
    elif type(a) is list and type(b) is list:
        left, right = ([values.encode(v) for v in x] for x in (a, b))
        for kind, a1, a2, b1, b2 in SequenceMatcher(
            None, left, right, autojunk=False
        ).get_opcodes():
            both = min(a2 - a1, b2 - b1) if kind != "equal" else 0
            for i in range(both):
                yield from _values(a[a1 + i], b[b1 + i], (*path, b1 + i))
            if kind != "equal":
                for i in range(a1 + both, a2):
                    yield Change("removed", (*path, i), a[i], None)
                for i in range(b1 + both, b2):
                    yield Change("added", (*path, i), None, b[i])
    else:
        yield Change("changed", path, a, b)
