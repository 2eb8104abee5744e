"""Load states of a session: whole, in part, or many of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast import ids
from holdfast.errors import NotFound
from holdfast.format import item_streams, records, ropes, state_paths, values
from holdfast.format import load as loading
from holdfast.format.load import load_node
from holdfast.format.nodes import DICT, LIST, Leaf, Node, Rope, Struct, parse
from holdfast.format.patch import check_path
from holdfast.history import lineage
from holdfast.history.revisions import Resolver
from holdfast.storage.reader import open_reader
from holdfast.storage.repository import StoredData
from holdfast.storage.rows import Address

if TYPE_CHECKING:
    from holdfast.format.item_streams import Source
    from holdfast.history.checkpoint import Checkpoint
    from holdfast.storage.contract import Backend
    from holdfast.storage.reader import Reader


def load(reader: Reader, place: Address, source: Source) -> Any:
    """Return the state of a checkpoint. Raises Corrupt if it is damaged."""
    row = lineage.read_row(reader, place)
    return loading.load(row.root, row.record.size, source)


# -- parts ---------------------------------------------------------------------------------------


class Part(NamedTuple):
    """A value inside a state, with some of its entries."""

    kind: str
    """The name of its type."""
    size: int
    """Size of the encoded value, in bytes."""
    length: int | None
    """The number of entries, characters or bytes; None for values without a length."""
    value: Any
    """The value itself; None for lists and dicts."""
    start: int
    """The position of the first of `items`."""
    items: list[tuple[Any, Part]]
    """Entries of a list or dict from `start` on, by position or key, without their own entries."""


class Items(NamedTuple):
    """Some items of a list in a state."""

    length: int
    """The length of the whole list."""
    start: int
    """The position of the first of `values`."""
    values: list[Any]
    """The items, from `start` on."""


def part(root: Node, path: state_paths.Path, source: Source, start: int, limit: int) -> Part:
    """Return the part at a path of a state; see Session.part."""
    return _part(_node(root, path, source), source, start, limit)


def value(root: Node, path: state_paths.Path, source: Source) -> Any:
    """Return the whole value at a path. Raises NotFound if the state has no such path."""
    return load_node(_node(root, path, source), source)


def items(
    root: Node, path: state_paths.Path, source: Source, start: int | None, limit: int
) -> Items:
    """Return some items of the list at a path; see Session.items."""
    found = _list(_node(root, path, source), source)
    if found is None:
        raise NotFound(f"there is no list at {_text(path)!r}")
    length = found.count if isinstance(found, Rope) else len(found)
    first = max(length - limit, 0) if start is None else min(max(start, 0), length)
    picked = _between(found, first, min(first + limit, length), source)
    return Items(length, first, [load_node(node, source) for node in picked])


def _node(root: Node, path: state_paths.Path, source: Source) -> Node:
    check_path(root, path, source)
    node = at(root, state_paths.parse(path), source) if path else root
    if node is None:
        raise NotFound(f"the state has nothing at {_text(path)!r}")
    return node


def _text(path: state_paths.Path) -> str:
    return path if isinstance(path, str) else ".".join(map(str, path))


def _list(node: Node, source: Source) -> Rope | list[Node] | None:
    if isinstance(node, Rope):
        return node if node.kind == LIST else None
    if isinstance(node, Struct):
        return list(node.children) if node.kind != DICT else None
    loaded = load_node(node, source)
    return [Leaf(values.encode(v)) for v in loaded] if type(loaded) is list else None


def _between(found: Rope | list[Node], start: int, stop: int, source: Source) -> list[Node]:
    if not isinstance(found, Rope):
        return found[start:stop]
    if start >= stop:
        return []
    return list(ropes.item_nodes(item_streams.cut(found.extents, start, stop), source))


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
    loaded = load_node(node, source)
    if isinstance(loaded, dict):
        pairs = list(loaded.items())[start : start + limit]
        entries = [(k, _part(Leaf(values.encode(v)), source, 0, 0)) for k, v in pairs]
        return Part("dict", node.size, len(loaded), None, start, entries)
    sized = isinstance(loaded, str | bytes | tuple | set | frozenset)
    return Part(type(loaded).__name__, node.size, len(loaded) if sized else None, loaded, start, [])


def at(node: Node | None, steps: tuple[Any, ...], source: Source) -> Node | None:
    """Return the node at a path, or None. Reads only the data on the way to it."""
    for n, step in enumerate(steps):
        if node is None:
            return None
        if isinstance(node, Rope) and node.kind == LIST and isinstance(step, int):
            if not -node.count <= step < node.count:
                return None
            index = step % node.count
            cut = item_streams.cut(node.extents, index, index + 1)
            node = next(ropes.item_nodes(cut, source))
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


# -- many states ---------------------------------------------------------------------------------


class Series:
    """Loads states one after the other. A list item that several states share is read once.

    Each state equals the result of `Session.load`: it is read in a separate view, and every byte is
    checked. But states share the objects of equal list items, at any depth. So they must not be
    changed; code that passes states on has to copy them. Not safe for threads.

    `limit` bounds the stored size, in bytes, of the items that are kept for the next loads.
    """

    def __init__(self, backend: Backend, session: str, limit: int = 64 << 20) -> None:
        self._backend, self._name = backend, session
        self._known = loading.Known(limit)

    def load(self, checkpoint: Checkpoint) -> Any:
        """Return the state of a checkpoint. Do not change it: other states share its objects."""
        with open_reader(self._backend) as reader:
            row = self._row(reader, checkpoint)
            source = StoredData(self._backend, reader)
            return loading.load(row.root, row.record.size, source, self._known)

    def _row(self, reader: Reader, checkpoint: Checkpoint) -> records.Row:
        number = lineage.find_session(reader, self._name)
        place = Address(number, checkpoint.seq)
        found = reader.checkpoint(*place)
        if (
            found is None
            or found.id != ids.from_text(checkpoint.id)
            or lineage.is_checkpoint_deleted(reader, place)
        ):  # in the session that this one was forked from, or deleted: then find() raises
            place = Resolver(reader, number, self._name).find(checkpoint.id)
            return lineage.read_row(reader, place)
        return records.unseal_checkpoint(place.session, *found)
