"""In which checkpoint did a value last change?"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from holdfast import lineage
from holdfast.codec import ropes, streams, values
from holdfast.codec.nodes import DICT, LIST, Leaf, Node, Rope, Struct, parse
from holdfast.errors import InvalidRequest, NotFound

if TYPE_CHECKING:
    from holdfast.backends.base import Reader
    from holdfast.codec.streams import Source
    from holdfast.lineage import Place

Path = str | tuple[str | int, ...]
_INDEX = re.compile(r"\[(\d+)\]")


def parse_path(path: Path) -> tuple[str | int, ...]:
    """Such as "plan.steps.3", "plan.steps[3]" or ("plan", "steps", 3).

    A tuple reaches keys that hold dots or brackets.
    """
    if isinstance(path, tuple) and path:
        return path
    if not isinstance(path, str) or not path:
        raise InvalidRequest(f"not a path: {path!r}", hint='such as "plan.budget"')
    dotted = _INDEX.sub(r".\1", path).removeprefix(".")  # as differences are written
    return tuple(int(p) if p.isdecimal() and len(p) < 20 else p for p in dotted.split("."))


def blame(reader: Reader, source: Source, start: Place, path: Path) -> Place:
    """The newest ancestor of `start` since which the value at `path` is what it is there."""
    steps = parse_path(path)
    wanted: bytes | None = None
    found: Place | None = None
    for place, record in lineage.ancestors(reader, start):
        if record.damaged:
            continue
        node = at(lineage.read_row(reader, place).node(), steps, source)
        digest = node.hash if node is not None else None
        if found is None:
            if digest is None:
                raise NotFound(f"the state has nothing at {'.'.join(map(str, steps))!r}")
            wanted = digest
        elif digest != wanted:
            break
        found = place
    if found is None:
        raise NotFound("no checkpoint that can be read")
    return found


def at(node: Node | None, steps: tuple[str | int, ...], source: Source) -> Node | None:
    """The node at a path, reading as little as possible."""
    for n, step in enumerate(steps):
        if node is None:
            return None
        if isinstance(node, Rope) and node.kind == LIST and isinstance(step, int):
            if not -node.count <= step < node.count:
                return None
            node = _item(node, step % node.count, source)
        elif isinstance(node, Struct) or (isinstance(node, Rope) and node.kind == DICT):
            struct = ropes.entries(node, source) if isinstance(node, Rope) else node
            if struct.kind == DICT:
                node = struct.child(values.encode(step)) or struct.child(values.encode(str(step)))
            else:
                inside = isinstance(step, int) and -len(struct.children) <= step < len(
                    struct.children
                )
                node = struct.children[step] if inside else None  # type: ignore[index]
        else:
            flat = ropes.flatten(node, source)
            return _inside(values.decode(flat), steps[n:])
    return node


def _item(rope: Rope, index: int, source: Source) -> Node:
    piece = next(iter(streams.pieces(source, streams.cut(rope.extents, index, index + 1))))
    return parse(piece.data) if piece.refs else Leaf(piece.data)


def _inside(value: Any, steps: tuple[str | int, ...]) -> Node | None:
    for step in steps:
        try:
            if isinstance(value, dict) and step not in value:
                value = value[str(step)]
            else:
                value = value[step]
        except (LookupError, TypeError):
            return None
    return parse(values.encode(value))
