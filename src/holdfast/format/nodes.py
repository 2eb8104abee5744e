"""The nodes of a state: small values are stored inline, big ones by reference.

A state is a tree of nodes. Its *stored* encoding is the canonical one, but every big part is
replaced by a reference: to a content-addressed *blob*, or to a *rope*, a list of extents in
append-only streams. The hash of a node depends on its value alone, never on the layout.

    Leaf    the canonical bytes, inline
    Blob    a big value that is hashed whole (text, bytes, a list of numbers …)
    Struct  a list or dict whose children are nodes, inline
    Rope    a list, dict or big value whose items are in streams
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple, Union

import ormsgpack

from holdfast.errors import Corrupt, NotSerializable
from holdfast.format import memory_limit, msgpack, values
from holdfast.format.msgpack import blames_caller

if TYPE_CHECKING:
    from collections.abc import Iterable

    Item = tuple[bytes, "Node | None"]
    """The bytes of an item, and its node if it is no leaf."""
    More = tuple[Any, list[Item]] | None

LIST, DICT, RAW = 0, 1, 2
BLOB_TAG, ROPE_TAG = 32, 33

# Part of the format, because they decide how a value is hashed: never change them.
LIST_FLAT, LIST_ITEM = 1024, 32
LIST_DENSE, LIST_MOST = 16 << 10, 1 << 22
DICT_FLAT, DICT_ITEM = 4096, 64
ROOT_KEYS = 64
# These affect the layout only, and may change.
LEAF_MAX = 4096
INLINE_LIST, INLINE = 1024, 4096

# No encoding begins with 0xc1, so these are never the bytes of a value.
_CHAIN_START = sha256(b"\xc1list").digest()
CHAIN, _DICT = b"\xc1item", b"\xc1dict"

Extent = tuple[int, int, int]
"""Stream, first item and number of items."""


class Tail(NamedTuple):
    """The end of a stream that a rope may append to, and its items that are not in full packs.

    `line` is the number of the line that owns the stream and alone may append to it. A line is a
    series of checkpoints of which each was saved as a child of the newest one of the session.
    """

    line: int
    stream: int
    end: int
    small: int
    """The first item that is in no full pack: from here on items are in small packs."""
    loose: int
    """The first item that is in no pack: from here on items are in loose rows."""
    held: int
    """The bytes of all items that are in no full pack yet."""


def splits_list(size: int, count: int) -> bool:
    """Return whether a list is hashed item by item, not whole.

    This is so above 1 KB. If items have less than 32 bytes on average, it is so above 16 KB, for
    lists of up to 4 million items.
    """
    if size >= LIST_ITEM * count:
        return size > LIST_FLAT
    return size > LIST_DENSE and count <= LIST_MOST


def splits_dict(size: int, count: int, *, root: bool = False) -> bool:
    """Return whether a dict is hashed child by child, not whole."""
    if root and count <= ROOT_KEYS:
        return True
    return size > DICT_FLAT and size >= DICT_ITEM * count


def chain(start: bytes | None, hashes: Any) -> bytes:
    """Return the hash of a list. `start` is the hash of the items before `hashes`, None if none."""
    h = start or _CHAIN_START
    for item in hashes:
        h = sha256(CHAIN + h + item).digest()
    return h


class Leaf:
    """A value stored inline, as its canonical bytes `flat`."""

    __slots__ = ("_hash", "flat")

    def __init__(self, flat: bytes) -> None:
        self.flat = flat
        self._hash: bytes | None = None

    @property
    def size(self) -> int:
        return len(self.flat)

    @property
    def stored(self) -> bytes:
        return self.flat

    @property
    def hash(self) -> bytes:
        if self._hash is None:
            self._hash = sha256(self.flat).digest()
        return self._hash


def reference(tag: int, payload: bytes) -> bytes:
    """Return the encoding of a reference: a MessagePack extension value."""
    n = len(payload)
    if n < 1 << 8:
        return b"\xc7" + bytes((n, tag)) + payload
    size = b"\xc8" + n.to_bytes(2, "big") if n < 1 << 16 else b"\xc9" + n.to_bytes(4, "big")
    return size + bytes((tag,)) + payload


class Blob:
    """A big value that is stored under its hash.

    `flat`, its canonical bytes, are kept while the node is in memory. The next save compares them.
    """

    __slots__ = ("flat", "hash", "size", "stored")

    def __init__(self, digest: bytes, size: int, flat: bytes | None = None) -> None:
        self.hash, self.size, self.flat = digest, size, flat
        self.stored = reference(BLOB_TAG, ormsgpack.packb([digest, size]))


class Struct:
    """A list or dict stored inline. `keys` are the encoded keys of a dict; empty for a list."""

    __slots__ = ("_hash", "children", "keys", "kind", "size", "stored")
    size: int
    stored: bytes

    def __init__(
        self,
        kind: int,
        keys: tuple[bytes, ...],
        children: tuple[Node, ...],
        size: int | None = None,
    ) -> None:
        self.kind, self.keys, self.children = kind, keys, children
        count = len(children)
        if kind == DICT:
            parts = [msgpack.map_header(count)]
            for key, child in zip(keys, children, strict=True):
                parts += (key, child.stored)
        else:
            parts = [msgpack.array_header(count), *[c.stored for c in children]]
        self.stored = b"".join(parts)
        if size is None:
            size = len(parts[0]) + sum([c.size for c in children]) + sum([len(k) for k in keys])
        self.size = size
        self._hash: bytes | None = None

    @property
    def hash(self) -> bytes:
        if self._hash is None:
            if self.kind == DICT:
                self._hash = dict_hash(self.keys, self.children)
            else:
                self._hash = chain(None, [c.hash for c in self.children])
        return self._hash

    def child(self, key: bytes) -> Node | None:
        return self.children[self.keys.index(key)] if key in self.keys else None

    def with_child(self, at: int, node: Node) -> Struct:
        """Return a copy with another child at an existing index."""
        children = list(self.children)
        size = self.size - children[at].size + node.size
        children[at] = node
        return Struct(self.kind, self.keys, tuple(children), size)


def dict_hash(keys: tuple[bytes, ...], children: tuple[Node, ...]) -> bytes:
    parts = [_DICT]
    for key, child in zip(keys, children, strict=True):
        parts += (key, child.hash)
    return sha256(b"".join(parts)).digest()


def dict_preimage(
    keys: tuple[bytes, ...], children: tuple[Node, ...], at: int
) -> tuple[bytes, bytes]:
    """Return the bytes that are hashed for a dict, before and after the hash of one child."""
    parts = [_DICT]
    for key, child in zip(keys, children, strict=True):
        parts += (key, child.hash)
    return b"".join(parts[: 2 * at + 2]), b"".join(parts[2 * at + 3 :])


class Chunk:
    """Consecutive items: their bytes, the end of each, and nodes for those that are no leaves."""

    __slots__ = ("_hashes", "_lookalikes", "count", "data", "ends", "nodes")

    def __init__(self, data: bytes, ends: list[int], nodes: dict[int, Node]) -> None:
        self.data, self.ends, self.nodes, self.count = data, ends, nodes, len(ends)
        self._hashes: list[bytes] | None = None
        self._lookalikes: bool | None = None

    def item(self, i: int) -> bytes:
        return self.data[self.ends[i - 1] if i else 0 : self.ends[i]]

    def items(self, start: int, stop: int) -> list[Item]:
        return [(self.item(i), self.nodes.get(i)) for i in range(start, stop)]

    def lookalikes(self) -> bool:
        """Return whether some item could be of another type and still have the same bytes."""
        if self._lookalikes is None:
            self._lookalikes = values.has_lookalikes(self.data, self.count)
        return self._lookalikes

    def hashes(self) -> list[bytes]:
        """Return the hash of each item's value."""
        if self._hashes is None:
            self._hashes = self.hashes_of(self.items(0, self.count))
        return self._hashes

    @staticmethod
    def hashes_of(items: Iterable[Item]) -> list[bytes]:
        return [sha256(flat).digest() if node is None else node.hash for flat, node in items]

    def joined(self, other: Chunk) -> Chunk:
        """Return this chunk followed by `other`, with the hashes of this one reused if known."""
        start, count = len(self.data), self.count
        nodes = self.nodes | {count + i: node for i, node in other.nodes.items()}
        chunk = Chunk(self.data + other.data, self.ends + [start + e for e in other.ends], nodes)
        if self._hashes is not None:
            chunk._hashes = self._hashes + other.hashes()
        if self._lookalikes is not None:
            chunk._lookalikes = self._lookalikes or other.lookalikes()
        return chunk


class Image(NamedTuple):
    """The content of a list, or of raw bytes, in memory.

    Threads share ropes, because a fork has those of its origin. So an image is immutable, and is
    read and replaced as one object.
    """

    chunks: tuple[Chunk, ...]
    chains: tuple[bytes, ...] | None = None
    """The hash of the list up to the end of each chunk; None if not computed."""
    more: More = None
    """Items after the chunks, as a linked list of appends, so that an append copies no image."""


class Rope:
    """A reference to items in streams, and the items themselves if they are in memory.

    `image` (lists and raw bytes) or `entries` (dicts) is the whole content, immutable; None if it
    is not read yet. `debt` is the bytes that its extents have cost since it was last compacted.
    """

    __slots__ = (
        "count", "debt", "entries", "extents", "hash", "head", "image", "kind", "size", "stored",
        "tails",
    )  # fmt: skip

    def __init__(
        self,
        kind: int,
        count: int,
        size: int,
        digest: bytes,
        extents: tuple[Extent, ...],
        tails: tuple[Tail, ...],
        *,
        debt: int = 0,
        head: bytes = b"",
        image: Image | None = None,
        entries: Struct | None = None,
    ) -> None:
        self.kind, self.count, self.size, self.hash = kind, count, size, digest
        self.extents, self.tails, self.debt, self.head = extents, tails, debt, head
        self.image, self.entries = image, entries
        flat_tails = [*tails[0]] if len(tails) == 1 else [n for tail in tails for n in tail]
        spans = [*extents[0]] if len(extents) == 1 else [n for extent in extents for n in extent]
        payload = ormsgpack.packb([kind, count, size, digest, head, debt, flat_tails, spans])
        self.stored = reference(ROPE_TAG, payload)

    def header(self) -> bytes:
        """Return the bytes before the items in the canonical encoding."""
        if self.kind == LIST:
            return msgpack.array_header(self.count)
        return msgpack.map_header(self.count) if self.kind == DICT else self.head


Node = Union[Leaf, Blob, Struct, Rope]  # noqa: UP007 - a runtime alias over forward classes


def parse_blob(payload: bytes) -> Blob:
    """Return the blob of a stored reference. Raises Corrupt if it is damaged."""
    try:
        digest, size = ormsgpack.unpackb(payload)
        if type(digest) is not bytes or len(digest) != 32 or type(size) is not int:
            raise ValueError("of wrong types")
        if not 0 <= size <= values.MAX_VALUE:
            raise ValueError("out of range")
        return Blob(digest, size)
    except (ValueError, TypeError) as e:
        raise Corrupt("a stored reference to a blob is damaged") from e


def parse_rope(payload: bytes) -> Rope:
    """Return the rope of a stored reference. Raises Corrupt if damaged, TooBig if too long."""
    memory_limit.refuse(memory_limit.MOST * len(payload))
    try:
        kind, count, size, digest, head, debt, tails, extents = ormsgpack.unpackb(payload)
        numbers = [kind, count, size, debt, *tails, *extents]
        if {*map(type, numbers)} != {int} or type(digest) is not bytes or type(head) is not bytes:
            raise ValueError("of wrong types")
        spans = tuple(zip(extents[::3], extents[1::3], extents[2::3], strict=True))
        if (
            kind not in (LIST, DICT, RAW)
            or len(digest) != 32
            or not 0 <= size <= values.MAX_VALUE
            or not 0 < count < 1 << 32
            or sum([n for _, _, n in spans]) != count
            or any(s < 0 or a < 0 or n <= 0 for s, a, n in spans)
        ):
            raise ValueError("out of range")
        ends = tuple(Tail(*tails[i : i + 6]) for i in range(0, len(tails), 6))
        return Rope(kind, count, size, digest, spans, ends, debt=debt, head=head)
    except (ValueError, TypeError) as e:
        raise Corrupt("a stored reference to a rope is damaged") from e


def _follow(tag: int, data: bytes) -> Any:
    if tag == ROPE_TAG:
        return parse_rope(data)
    return parse_blob(data) if tag == BLOB_TAG else values.keep_tags(tag, data)


def parse(stored: bytes, *, root: bool = False) -> Node:
    """Return the node of a stored encoding, without following its references."""
    value = values.decode_stored(stored, _follow)
    try:
        node = _build(value, root=root)
    except (RecursionError, NotSerializable) as e:
        if blames_caller(e):
            raise
        raise Corrupt("a stored layout is nested too deeply") from e
    return Leaf(stored) if node is None else node


def node_of(flat: bytes) -> Node:
    """Return the node of a canonical encoding. A short one is a leaf, and is not decoded."""
    return parse(flat) if len(flat) > LIST_FLAT else Leaf(flat)


def item_value(kind: int, item: bytes) -> bytes:
    """Return the value of a stored item: an item of a dict begins with its key."""
    return item[msgpack.string_length(item, 0) :] if kind == DICT else item


def _refers(value: Any) -> bool:
    """Return whether a value holds a reference."""
    kind = type(value)
    if kind is dict:
        return any(_refers(v) for v in value.values())
    if kind is list:
        return any(_refers(v) for v in value)
    return kind is Rope or kind is Blob


def _build(value: Any, *, root: bool = False) -> Node | None:
    """Return the node of a decoded value; None if it is a leaf (no references, hashed whole)."""
    kind = type(value)
    if kind is Rope or kind is Blob:
        return value  # type: ignore[no-any-return]
    if kind is not dict and kind is not list:
        return None
    if not _refers(value):
        flat = values.encode(value)
        if kind is list and not splits_list(len(flat), len(value)):
            return None
        if kind is dict and not (
            msgpack.is_map(flat) and splits_dict(len(flat), len(value), root=root)
        ):
            return None
    items = value.values() if kind is dict else value
    children = tuple([_build(v) or Leaf(values.encode(v)) for v in items])
    keys = tuple([values.encode(k) for k in value]) if kind is dict else ()
    return Struct(DICT if kind is dict else LIST, keys, children)
