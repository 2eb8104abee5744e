"""Deltas on a layout: append, set and drop without encoding the rest of the state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.codec import layout, ropes, values, wire
from holdfast.codec.nodes import (
    DICT,
    INLINE,
    LIST,
    ROOT_KEYS,
    Leaf,
    Node,
    Rope,
    Struct,
    parse,
    splits_list,
)
from holdfast.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.codec.streams import Writes

    Path = tuple[str, ...]
    Edit = Callable[[Node | None, int], Node | None]

EMPTY = Struct(DICT, (), ())


def append(root: Node | None, path: Path, items: Sequence[Any], out: Writes) -> Node:
    """Add items to the list at `path`, which is made if missing."""
    if len(path) == 1 and type(root) is Struct and root.kind == DICT:
        node = _append_here(root, values.encode_key(path[0]), items, out)
        if node is not None:
            return node

    def edit(old: Node | None, depth: int) -> Node:
        if isinstance(old, Rope) and old.kind == LIST:
            flats = [layout.item(v, None, out, depth) for v in items]
            grown = old.size + sum([len(f) for f, _ in flats])
            if splits_list(grown, old.count + len(flats)):
                return ropes.grow_list(old, flats, out)
        if old is None:
            return layout.lay_out(list(items), None, out, depth=depth)
        node = layout.extend_list(old, list(items), out, depth)
        if node is None:
            raise InvalidRequest(
                f"{_name(path)} is no list",
                hint="append() adds to lists; use patch(set=…) to replace a value",
            )
        return node

    return _edit(root, path, path, 0, edit, out)


def _append_here(root: Struct, key: bytes, items: Sequence[Any], out: Writes) -> Node | None:
    """The common case, a rope right below an inline root; None if it is anything else."""
    if key not in root.keys:
        return None
    at = root.keys.index(key)
    old = root.children[at]
    if type(old) is not Rope or old.kind != LIST:
        return None
    flats = [layout.item(v, None, out, 1) for v in items]
    grown = old.size + sum([len(f) for f, _ in flats])
    if not splits_list(grown, old.count + len(flats)):
        return None
    node = root.with_child(at, ropes.grow_list(old, flats, out))
    if len(node.stored) > INLINE or len(root.keys) > ROOT_KEYS:
        return layout.settle(node, root, out, 0)
    return node


def assign(root: Node | None, path: Path, value: Any, out: Writes) -> Node:
    """Set the value at `path`; a new key goes to the end of its dict."""
    return _edit(
        root, path, path, 0, lambda old, depth: layout.lay_out(value, old, out, depth=depth), out
    )


def drop(root: Node | None, path: Path, out: Writes) -> Node:
    def edit(old: Node | None, _: int) -> None:
        if old is None:
            raise InvalidRequest(f"nothing to drop at {_name(path)}")

    return _edit(root, path, path, 0, edit, out)


def _name(path: Path) -> str:
    return "state" + "".join([f"[{p!r}]" for p in path])


def _edit(node: Node | None, rest: Path, path: Path, depth: int, edit: Edit, out: Writes) -> Node:
    struct = EMPTY if node is None else as_struct(node, out)
    key = values.encode_key(rest[0])
    if struct is None or not wire.is_text(key):
        return _edit_whole(node, rest, path, depth, edit, out)
    keys, children = struct.keys, struct.children
    at = keys.index(key) if key in keys else len(keys)
    old = children[at] if at < len(keys) else None
    new = _edit_child(old, rest, path, depth, edit, out)
    if new is None:
        keys, children = keys[:at] + keys[at + 1 :], children[:at] + children[at + 1 :]
    else:
        keys = (*keys, key) if old is None else keys
        children = (*children[:at], new, *children[at + 1 :])
    return layout.settle(Struct(DICT, keys, children), node, out, depth)


def _edit_child(
    old: Node | None, rest: Path, path: Path, depth: int, edit: Edit, out: Writes
) -> Node | None:
    if depth >= values.MAX_DEPTH:
        raise InvalidRequest(f"{_name(path)} lies too deep")
    if len(rest) == 1:
        return edit(old, depth + 1)
    if old is None:
        raise InvalidRequest(f"{_name(path[: len(path) - len(rest) + 1])} does not exist")
    return _edit(old, rest[1:], path, depth + 1, edit, out)


def _edit_whole(
    node: Node | None, rest: Path, path: Path, depth: int, edit: Edit, out: Writes
) -> Node:
    """A dict that has other keys than plain strings is stored, and so edited, whole."""
    value = {} if node is None else values.decode(ropes.flatten(node, out.source))
    if type(value) is not dict:
        at = path[: len(path) - len(rest)]
        raise InvalidRequest(f"{_name(at)} is no dict, so it has no {rest[0]!r}")
    old = Leaf(values.encode(value[rest[0]])) if rest[0] in value else None
    new = _edit_child(old, rest, path, depth, edit, out)
    if new is None:
        del value[rest[0]]
    else:
        value[rest[0]] = values.decode(ropes.flatten(new, out.source))
    return layout.lay_out(value, node, out, depth=depth)


def as_struct(node: Node, out: Writes) -> Struct | None:
    """A dict's entries as nodes, however it is laid out; None for anything else."""
    if isinstance(node, Struct):
        return node if node.kind == DICT else None
    if isinstance(node, Rope) and node.kind == DICT:
        return ropes.entries(node, out.source)
    flat = ropes.flatten(node, out.source)
    if not wire.is_map(flat):
        return None
    value: dict[str, Any] = values.decode(flat, values.keep_tags)
    return Struct(
        DICT,
        tuple([values.encode(k) for k in value]),
        tuple([_leaf(values.encode(v)) for v in value.values()]),
    )


def _leaf(flat: bytes) -> Node:
    return parse(flat) if len(flat) > 1024 else Leaf(flat)
