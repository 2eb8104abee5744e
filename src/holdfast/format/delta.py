"""Lay out a state: turn a value into nodes, and write only the parts that changed.

Changes are found by comparing bytes with the last checkpoint, never by object identity. So a value
that was mutated in place is always noticed. Each big list is encoded once, in C, and compared with
its image.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any

from holdfast.errors import InvalidRequest
from holdfast.format import list_encodings, msgpack, ropes, values
from holdfast.format.nodes import (
    DICT,
    INLINE,
    INLINE_LIST,
    LEAF_MAX,
    LIST,
    LIST_FLAT,
    RAW,
    Blob,
    Leaf,
    Node,
    Rope,
    Struct,
    node_of,
    splits_dict,
    splits_list,
)

if TYPE_CHECKING:
    from holdfast.format.item_streams import Writes
    from holdfast.format.list_encodings import Match
    from holdfast.format.nodes import Chunk, Item


def lay_out(
    value: Any, old: Node | None, out: Writes, *, depth: int = 0, nested: bool = False
) -> Node:
    """Return the node of `value`. It shares unchanged parts with `old`; new parts go to `out`.

    `nested` means that the value is part of an item of a list: lists in there stay inline up to
    4 KB, others up to 1 KB. Raises NotSerializable for a value that cannot be stored exactly.
    """
    if depth > values.MAX_DEPTH:
        raise values.too_deep()
    value = _plain(value)
    kind = type(value)
    if kind is dict:
        if isinstance(old, Struct) or (isinstance(old, Rope) and old.kind == DICT):
            node = _dict(value, old, out, depth, nested=nested)
            if node is not None:
                return node
        flat = values.encode(value)
        if splits_dict(len(flat), len(value), root=depth == 0) and msgpack.is_map(flat):
            node = _dict(value, old, out, depth, nested=nested)
            if node is not None:
                return node
    elif kind is list:
        flat = values.encode(value)
        if splits_list(len(flat), len(value)):
            if isinstance(old, Rope) and old.kind == LIST:
                return _list_rope(value, flat, old, out, depth)
            return _list(value, flat, old, out, depth, nested=nested)
    return _whole(values.encode_exact(value, depth), old, out)


def _plain(value: Any) -> Any:
    """Return the plain data of a model or enum; any other value as it is."""
    while (lowered := values.plain(value)) is not value:
        value = lowered
    return value


def _whole(flat: bytes, old: Node | None, out: Writes) -> Node:
    """Return the node of a value that is hashed whole.

    A small value is a leaf. A big one is a blob, or a rope of fragments if the value before was
    similar, so that an edit writes only some fragments.
    """
    if len(flat) <= LEAF_MAX:
        return Leaf(flat)
    if isinstance(old, Blob) and old.flat == flat:
        return old
    digest = sha256(flat).digest()
    if old is not None and old.hash == digest and isinstance(old, Blob | Rope):
        return old
    if isinstance(old, Blob) and old.size > LEAF_MAX:
        before = old.flat or out.source.blob(old.hash, old.size)
        if _alike(before, flat) and (node := ropes.raw(flat, digest, None, out)) is not None:
            return node
    elif (
        isinstance(old, Rope)
        and old.kind == RAW
        and (node := ropes.raw(flat, digest, old, out)) is not None
    ):
        return node
    out.blobs[digest] = flat
    return Blob(digest, len(flat), flat)


def _alike(before: bytes, after: bytes) -> bool:
    """Return whether the beginning and the end of `before` make up at least half of `after`."""
    if before[0] != after[0]:
        return False
    skip = msgpack.header_length(after)
    same = 0
    while same < len(after) and after.startswith(
        before[skip + same : skip + same + 512], skip + same
    ):
        same += 512
    end = 0
    while end < len(after) - same and after.endswith(
        before[len(before) - end - 512 : len(before) - end], 0, len(after) - end
    ):
        end += 512
    return 2 * (same + end) >= len(after)


def _dict(
    value: dict[Any, Any], old: Node | None, out: Writes, depth: int, *, nested: bool
) -> Node | None:
    """Return the node of a dict, child by child; None if it must be hashed whole."""
    known = ropes.entries(old, out.source) if isinstance(old, Rope) and old.kind == DICT else old
    before: dict[bytes, Node] = {}
    if isinstance(known, Struct) and known.kind == DICT:
        before = dict(zip(known.keys, known.children, strict=True))
    keys: list[bytes] = []
    children: list[Node] = []
    for key, child in value.items():
        name = values.encode_key(key) if type(key) is str else values.encode_exact(key, depth)
        if not msgpack.is_text(name):
            return None
        keys.append(name)
        children.append(lay_out(child, before.get(name), out, depth=depth + 1, nested=nested))
    node = Struct(DICT, tuple(keys), tuple(children))
    if len(set(keys)) != len(keys) or not splits_dict(node.size, len(keys), root=depth == 0):
        return None
    return ropes.spill(node, old, out) if len(node.stored) > INLINE else node


def finish_dict(node: Struct, old: Node | None, out: Writes, depth: int) -> Node:
    """Return the final node of a dict with edited children: inline, a rope, or hashed whole."""
    if splits_dict(node.size, len(node.keys), root=depth == 0):
        return ropes.spill(node, old, out) if len(node.stored) > INLINE else node
    return _whole(ropes.flatten(node, out.source), old, out)


def _list(
    value: list[Any], flat: bytes, old: Node | None, out: Writes, depth: int, *, nested: bool
) -> Node:
    """Return the node of a list that has no rope yet."""
    before = old.children if isinstance(old, Struct) and old.kind == LIST else ()
    items = []
    for i, child in enumerate(value):
        items.append(item(child, before[i] if i < len(before) else None, out, depth))
    _check_same(flat, msgpack.array_header(len(items)), items)
    return _inline_or_rope(items, len(flat), out, nested=nested)


def extend_list(old: Node, new: list[Any], out: Writes, depth: int) -> Node | None:
    """Return the node of a list without a rope, with items added; None if `old` is no list."""
    flat = ropes.flatten(old, out.source)
    if not msgpack.is_array(flat):
        return None
    was_flat, items = flat, [item(v, None, out, depth) for v in new]
    count = msgpack.array_count(flat) + len(items)
    body = b"".join([flat[msgpack.header_length(flat) :], *[f for f, _ in items]])
    flat = msgpack.array_header(count) + body
    if not splits_list(len(flat), count):
        return _whole(flat, old, out)
    kept: list[Item] = []
    for v in values.decode(was_flat, values.keep_tags):
        was = values.encode(v)
        node = node_of(was)
        kept.append((was, None if isinstance(node, Leaf) else node))
    return _inline_or_rope(kept + items, len(flat), out, nested=False)


def _inline_or_rope(items: list[Item], size: int, out: Writes, *, nested: bool) -> Node:
    limit = INLINE if nested else INLINE_LIST
    if sum([len(f) if n is None else len(n.stored) for f, n in items]) > limit:
        return ropes.new_list(items, size, out)
    return Struct(LIST, (), tuple([Leaf(f) if n is None else n for f, n in items]))


def item(value: Any, old: Node | None, out: Writes, depth: int) -> Item:
    """Return the bytes of a list's item, and its node unless it is a leaf."""
    flat = values.encode_exact(value, depth + 1)
    return flat, _inner(value, flat, old, out, depth)


def _check_same(flat: bytes, head: bytes, items: list[Item]) -> None:
    """Raise InvalidRequest if the items are not those of `flat`: another thread mutated them."""
    if flat != head + b"".join([f for f, _ in items]):
        raise InvalidRequest(
            "the state changed while it was being saved",
            hint="do not mutate a state in one thread while another saves it",
        )


def _list_rope(value: list[Any], flat: bytes, old: Rope, out: Writes, depth: int) -> Node:
    """Compare a list with the image of its rope, and write the items that are new."""
    image = ropes.image_of(old, out.source)
    known = image.chunks
    start = len(msgpack.array_header(len(value)))
    for suffix in (True, False):
        m = list_encodings.match(known, flat, start, suffix=suffix)
        if m.before + m.after > len(value):
            continue  # the common end begins inside an item
        if m.start == m.stop and m.before + m.after == len(value) == old.count:
            _check_types(value, known, m, depth)
            return old
        fresh = value[m.before : len(value) - m.after]
        # Encode before laying out: if the common end is wrong, nothing may be left in `out`.
        encoded = [values.encode_exact(v, depth + 1) for v in fresh]
        if flat[m.start : m.stop] != b"".join(encoded):
            continue
        _check_types(value, known, m, depth)
        if m.before == old.count:
            pairs = zip(fresh, encoded, strict=True)
            grown = [(f, _inner(v, f, None, out, depth)) for v, f in pairs]
            return ropes.grow_list(old, grown, out, len(flat))
        between = ropes.nodes_between(known, m, old.count)
        paired = between if len(fresh) == old.count - m.before - m.after else {}

        def node_of(v: Any, f: bytes, i: int, olds: dict[int, Node] = paired) -> Node | None:
            return _inner(v, f, olds.get(i), out, depth)

        changed = list(zip(fresh, encoded, strict=True))
        return ropes.splice_list(old, image, m, changed, len(flat), out, node_of)
    raise InvalidRequest(
        "the state changed while it was being saved",
        hint="do not mutate a state in one thread while another saves it",
    )


def _check_types(value: list[Any], known: tuple[Chunk, ...], m: Match, depth: int) -> None:
    """Raise NotSerializable if an item has the same bytes as before, but a type that is refused.

    A bytearray, for example, encodes to the same bytes as bytes. This concerns only bytes and
    tagged values, and few chunks hold any. So only those chunks are checked.
    """
    alive = values.fragments_alive()
    if not alive and not any(c.lookalikes() for c in known):
        return
    at = 0
    shift = len(value) - sum([c.count for c in known])
    for n, chunk in enumerate(known):
        if alive or chunk.lookalikes():
            if n < m.head:
                same = value[at : at + chunk.count]
            elif n >= m.tail:
                same = value[at + shift : at + shift + chunk.count]
            else:
                head = len(m.head_items) if n == m.head else 0
                tail = len(m.tail_items) if n == m.tail - 1 else 0
                end = at + shift + chunk.count
                same = value[at : at + head] + value[end - tail : end]
            for child in same:
                values.encode_exact(child, depth + 1)
        at += chunk.count


def _inner(value: Any, flat: bytes, old: Node | None, out: Writes, depth: int) -> Node | None:
    """Return the node of a list's item; None if it is a leaf."""
    if len(flat) <= LIST_FLAT or (len(flat) <= LEAF_MAX and not msgpack.is_array(flat)):
        return None
    node = lay_out(value, old, out, depth=depth + 1, nested=True)
    return None if isinstance(node, Leaf) else node
