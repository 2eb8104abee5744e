"""Parts of a state, read without the rest of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast import lineage
from holdfast.blame import at
from holdfast.codec import ropes, streams, values
from holdfast.codec.load import load_node
from holdfast.codec.nodes import DICT, LIST, Leaf, Node, Rope, Struct, parse
from holdfast.codec.records import encode_name
from holdfast.errors import CheckpointNotFound, NotFound
from holdfast.lineage import Place
from holdfast.source import StoredSource

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from holdfast.backends.base import Backend, Reader
    from holdfast.checkpoint import Checkpoint
    from holdfast.codec.nodes import Extent
    from holdfast.codec.streams import Source


class Part(NamedTuple):
    """A value in a state: what it is, and some of what is in it."""

    kind: str
    """The name of its type."""
    size: int
    """Bytes, encoded."""
    length: int | None
    """How many entries or characters it has; None for what has none."""
    value: Any
    """Of what is no list and no dict."""
    start: int
    items: list[tuple[Any, Part]]
    """Some entries of a list or dict, from `start` on, by position or key; each without its own."""


def read(
    backend: Backend, of: Checkpoint, path: tuple[str | int, ...], start: int, limit: int
) -> Part:
    """What is at a path of a checkpoint's state, with `limit` of its entries."""
    with backend.reader() as reader:
        source = StoredSource(backend, reader)
        node = _node(reader, source, of, path)
        return _part(node, source, start, limit)


def whole(backend: Backend, of: Checkpoint, path: tuple[str | int, ...]) -> Any:
    """The value at a path."""
    with backend.reader() as reader:
        source = StoredSource(backend, reader)
        return _value(_node(reader, source, of, path), source)


def items(
    backend: Backend, of: Checkpoint, path: tuple[str | int, ...], start: int | None, limit: int
) -> tuple[int, int, list[Any]]:
    """Of a list: how long it is, and `limit` items from `start` on, or the last ones."""
    with backend.reader() as reader:
        source = StoredSource(backend, reader)
        node = _node(reader, source, of, path)
        found = _list(node, source)
        if found is None:
            raise NotFound(f"there is no list at {'.'.join(map(str, path))!r}")
        length = found.count if isinstance(found, Rope) else len(found)
        first = max(length - limit, 0) if start is None else min(max(start, 0), length)
        picked = _between(found, first, min(first + limit, length), source)
        return length, first, [_value(node, source) for node in picked]


def root(reader: Reader, of: Checkpoint) -> Node:
    """The whole state of a checkpoint, not read yet."""
    found = reader.session(encode_name(of.session))
    if found is None:
        raise CheckpointNotFound(f"there is no checkpoint {of.id}")
    return lineage.read_row(reader, Place(found[0], of.seq)).node()


def _node(reader: Reader, source: Source, of: Checkpoint, path: tuple[str | int, ...]) -> Node:
    node = at(root(reader, of), path, source)
    if node is None:
        raise NotFound(f"the state has nothing at {'.'.join(map(str, path))!r}")
    return node


def _value(node: Node, source: Source) -> Any:
    return load_node(node, source)


def _list(node: Node, source: Source) -> Rope | list[Node] | None:
    if isinstance(node, Rope):
        return node if node.kind == LIST else None
    if isinstance(node, Struct):
        return list(node.children) if node.kind != DICT else None
    value = _value(node, source)
    return [Leaf(values.encode(v)) for v in value] if type(value) is list else None


def _between(found: Rope | list[Node], start: int, stop: int, source: Source) -> list[Node]:
    if not isinstance(found, Rope):
        return found[start:stop]
    if start >= stop:
        return []
    return list(rope_items(streams.cut(found.extents, start, stop), source))


def rope_items(extents: Sequence[Extent], source: Source) -> Iterator[Node]:
    """What lies in some extents, item by item."""
    for piece in streams.pieces(source, extents):
        begin = 0
        for end in piece.ends:
            data = piece.data[begin : end - piece.base]
            yield parse(data) if piece.refs else Leaf(data)
            begin = end - piece.base


def _part(node: Node, source: Source, start: int, limit: int) -> Part:
    found = _list(node, source)
    if found is not None:
        length = found.count if isinstance(found, Rope) else len(found)
        picked = _between(found, min(start, length), min(start + limit, length), source)
        inner = [(start + n, _part(each, source, 0, 0)) for n, each in enumerate(picked)]
        return Part("list", node.size, length, None, start, inner)
    struct = ropes.entries(node, source) if isinstance(node, Rope) and node.kind == DICT else node
    if isinstance(struct, Struct):
        pairs = list(zip(struct.keys, struct.children, strict=True))[start : start + limit]
        entries = [(values.decode(k), _part(child, source, 0, 0)) for k, child in pairs]
        return Part("dict", node.size, len(struct.children), None, start, entries)
    value = _value(node, source)
    if isinstance(value, dict):
        pairs = list(value.items())[start : start + limit]
        entries = [(k, _part(Leaf(values.encode(v)), source, 0, 0)) for k, v in pairs]
        return Part("dict", node.size, len(value), None, start, entries)
    sized = isinstance(value, str | bytes | tuple | set | frozenset)
    return Part(type(value).__name__, node.size, len(value) if sized else None, value, start, [])
