"""Edit a laid out state: append, set and drop without encoding the rest of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.errors import InvalidRequest
from holdfast.format import delta, msgpack, ropes, values
from holdfast.format.nodes import DICT, LIST, Leaf, Node, Rope, Struct, splits_list

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.format.item_streams import Source, Writes

    Path = tuple[str | int, ...]
    Edit = Callable[[Node | None, int], Node | None]

EMPTY = Struct(DICT, (), ())
_DOTS = "a dot in a path leads into a dict; a key with a dot in it is written ['a.b']"


def check_path(root: Node | None, path: Any, source: Source) -> None:
    """Raise InvalidRequest if a text with dots names two places, such as ["a.b"] and ["a"]["b"]."""
    rest = path if isinstance(path, str) and "[" not in path else ""
    node = root
    while "." in rest and node is not None:
        struct = ropes.as_struct(node, source)
        if struct is None or struct.kind != DICT:
            return
        literal, (first, _, rest) = struct.child(values.encode_key(rest)), rest.partition(".")
        node = struct.child(values.encode_key(first))
        if literal is not None and node is not None:
            raise InvalidRequest(
                f"{path!r} is ambiguous: the state has a key with this dot, and a dict {first!r}",
                hint="a tuple of keys is exact, such as ('a.b',) or ('a', 'b')",
            )


def append(root: Node | None, path: Path, items: Sequence[Any], out: Writes) -> Node:
    """Add items to the list at `path`, or create it. Raises InvalidRequest if it is no list."""

    def edit(old: Node | None, depth: int) -> Node:
        if isinstance(old, Rope) and old.kind == LIST:
            flats = [delta.item(v, None, out, depth) for v in items]
            grown = old.size + sum([len(f) for f, _ in flats])
            if splits_list(grown, old.count + len(flats)):
                return ropes.grow_list(old, flats, out)
        if old is None:
            return delta.lay_out(list(items), None, out, depth=depth)
        node = delta.extend_list(old, list(items), out, depth)
        if node is None:
            raise InvalidRequest(
                f"{_name(path)} is no list",
                hint="append() adds to lists; use patch(set=…) to replace a value",
            )
        return node

    return _edit(root, path, path, 0, edit, out)


def assign(root: Node | None, path: Path, value: Any, out: Writes) -> Node:
    """Set the value at `path`. A new key is added at the end of its dict."""
    return _edit(
        root, path, path, 0, lambda old, depth: delta.lay_out(value, old, out, depth=depth), out
    )


def drop(root: Node | None, path: Path, out: Writes) -> Node:
    """Remove the key at `path`. Raises InvalidRequest if there is none."""

    def edit(old: Node | None, _: int) -> None:
        if old is None:
            raise InvalidRequest(f"nothing to drop at {_name(path)}", hint=_DOTS)

    return _edit(root, path, path, 0, edit, out)


def _name(path: Path) -> str:
    return "state" + "".join([f"[{p!r}]" for p in path])


def _edit(node: Node | None, rest: Path, path: Path, depth: int, edit: Edit, out: Writes) -> Node:
    """Return the dict `node` with the value at `rest` edited; `path` is for error messages."""
    struct = EMPTY if node is None else ropes.as_struct(node, out.source)
    key = values.encode_key(str(rest[0]))  # a dict that is a Struct has only text keys
    if struct is None or struct.kind != DICT or not msgpack.is_text(key):
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
    return delta.finish_dict(Struct(DICT, keys, children), node, out, depth)


def _edit_child(
    old: Node | None, rest: Path, path: Path, depth: int, edit: Edit, out: Writes
) -> Node | None:
    """Return the edited child; None if it is to be removed."""
    if depth >= values.MAX_DEPTH:
        raise InvalidRequest(f"{_name(path)} lies too deep")
    if len(rest) == 1:
        return edit(old, depth + 1)
    if old is None:
        at = _name(path[: len(path) - len(rest) + 1])
        raise InvalidRequest(f"{at} does not exist", hint=_DOTS)
    return _edit(old, rest[1:], path, depth + 1, edit, out)


def _edit_whole(
    node: Node | None, rest: Path, path: Path, depth: int, edit: Edit, out: Writes
) -> Node:
    """Edit a dict with other keys than plain strings. It is stored, and so edited, whole."""
    value = {} if node is None else values.decode(ropes.flatten(node, out.source))
    if type(value) is not dict:
        at = path[: len(path) - len(rest)]
        raise InvalidRequest(
            f"{_name(at)} is no dict, so it has no {rest[0]!r}",
            hint="append() and patch() reach into dicts; set a list or another value as a whole",
        )
    key = rest[0] if rest[0] in value else str(rest[0])
    old = Leaf(values.encode(value[key])) if key in value else None
    new = _edit_child(old, rest, path, depth, edit, out)
    if new is None:
        del value[key]
    else:
        value[key] = values.decode(ropes.flatten(new, out.source))
    return delta.lay_out(value, node, out, depth=depth)
