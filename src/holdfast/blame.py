"""In which checkpoint did a value last change?"""

from __future__ import annotations

import re
from ast import literal_eval
from typing import TYPE_CHECKING, Any

from holdfast import lineage
from holdfast.codec import ropes, streams, values
from holdfast.codec.nodes import DICT, LIST, Leaf, Node, Rope, Struct, parse
from holdfast.errors import InvalidRequest, NotFound

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.backends.base import Reader
    from holdfast.codec.streams import Source
    from holdfast.lineage import Place

Path = str | tuple[Any, ...]
_INDEX = re.compile(r"\[(\d+)\]")
# A key in brackets, as differences are written: text, bytes, a number or one of three names.
_KEY = re.compile(
    r"""\[(b?'(?:[^'\\]|\\.)*'|b?"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?(?:e[-+]\d+)?|None|True|False)\]"""
    r"""(?=[.\[]|\Z)""",
    re.DOTALL,
)


def parse_path(path: Path) -> tuple[Any, ...]:
    """Such as "plan.steps.3", "plan.steps[3]", "plan['a.b']" or ("plan", "steps", 3).

    What differences are written as is read. A tuple reaches every key, also a date.
    """
    if isinstance(path, tuple) and path:
        return path
    if not isinstance(path, str) or not path:
        raise InvalidRequest(f"not a path: {path!r}", hint='such as "plan.budget"')
    return tuple(_steps(path))


def _steps(path: str) -> Iterator[Any]:
    start = 0
    for found in _KEY.finditer(path):
        if found[1].isdecimal():  # the same with a dot before it
            continue
        try:
            key = literal_eval(found[1])
        except (ValueError, SyntaxError):
            continue  # it is part of a name, as any other character
        if found.start() > start:
            yield from _dotted(path[start : found.start()])
        yield key
        start = found.end() + path.startswith(".", found.end())
    if start < len(path) or path.endswith("."):
        yield from _dotted(path[start:])


def _dotted(path: str) -> Iterator[str | int]:
    for step in _INDEX.sub(r".\1", path).removeprefix(".").split("."):
        yield int(step) if step.isdecimal() and len(step) < 20 else step


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
                raise NotFound(
                    f"the state has nothing at {'.'.join(map(str, steps))!r}",
                    hint="a path begins at the top of the state, such as plan.steps[3]",
                )
            wanted = digest
        elif digest != wanted:
            break
        found = place
    if found is None:
        raise NotFound("no checkpoint that can be read")
    return found


def at(node: Node | None, steps: tuple[Any, ...], source: Source) -> Node | None:
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
                node = struct.children[step] if inside else None
        else:
            flat = ropes.flatten(node, source)
            return _inside(values.decode(flat), steps[n:])
    return node


def _item(rope: Rope, index: int, source: Source) -> Node:
    piece = next(iter(streams.pieces(source, streams.cut(rope.extents, index, index + 1))))
    return parse(piece.data) if piece.refs else Leaf(piece.data)


def _inside(value: Any, steps: tuple[Any, ...]) -> Node | None:
    for step in steps:
        try:
            if isinstance(value, dict) and step not in value:
                value = value[str(step)]
            else:
                value = value[step]
        except (LookupError, TypeError):
            return None
    return parse(values.encode(value))
