"""Find the checkpoint in which a value last changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.errors import NotFound
from holdfast.format import item_streams, ropes, state_paths, values
from holdfast.format.nodes import DICT, LIST, Leaf, Node, Rope, Struct, parse
from holdfast.history import lineage

if TYPE_CHECKING:
    from holdfast.format.item_streams import Source
    from holdfast.storage.reader import Reader
    from holdfast.storage.rows import Address


def blame(reader: Reader, source: Source, start: Address, path: state_paths.Path) -> Address:
    """Return the checkpoint that last changed the value at `path`: `start` or an ancestor of it.

    All checkpoints from there to `start` have an equal value. Damaged ones are skipped. Raises
    NotFound if the state has no such path.
    """
    steps = state_paths.parse(path)
    wanted: bytes | None = None
    shown: Node | None = None
    found: Address | None = None
    for place, record in lineage.ancestors(reader, start):
        if record.damaged:
            continue
        node = at(lineage.read_row(reader, place).node(), steps, source)
        digest = node.hash if node is not None else None
        if found is None:
            if digest is None:
                raise NotFound(
                    f"the state has nothing at {'.'.join(map(str, steps))!r}",
                    hint="a path begins at the top of the state, such as plan.steps[3]; "
                    + state_paths.DOTS,
                )
            shown = node
        elif digest != wanted and not _same(node, shown, source):
            break
        wanted, found = digest, place
    if found is None:
        raise NotFound("no checkpoint that can be read")
    return found


def _same(a: Node | None, b: Node | None, source: Source) -> bool:
    """Return whether two nodes with different hashes have equal values.

    This happens if format version 1 computed one of the hashes.
    """
    if a is None or b is None or a.size != b.size:
        return False
    return ropes.flatten(a, source) == ropes.flatten(b, source)


def at(node: Node | None, steps: tuple[Any, ...], source: Source) -> Node | None:
    """Return the node at a path, or None. Reads only the data on the way to it."""
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
            return _inside(values.decode_stored(flat), steps[n:])
    return node


def _item(rope: Rope, index: int, source: Source) -> Node:
    piece = next(
        iter(item_streams.pieces(source, item_streams.cut(rope.extents, index, index + 1)))
    )
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
