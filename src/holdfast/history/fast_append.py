"""The fast path of `save` and `append`: add a few small items to a list right below the root.

This is the most frequent change that agents make. The fast path writes the same bytes as the
general path, but builds no nodes. It is one long function, because code that runs once between two
waits for the disk finds cold caches, and then each function call costs more than the work inside.
It leaves the write to the general path when a full pack has to be written.
"""

from __future__ import annotations

import time
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Protocol

from ormsgpack import packb
from xxhash import xxh3_64_digest

from holdfast import ids
from holdfast.format import msgpack, records, ropes, values
from holdfast.format.item_streams import (
    LOOSE_BYTES,
    LOOSE_ITEMS,
    MAX_ITEMS,
    PACK_BYTES,
    PACK_ITEMS,
    STREAM_BITS,
    RowWrite,
    item_row,
)
from holdfast.format.nodes import (
    CHAIN,
    DICT,
    INLINE,
    LEAF_MAX,
    LIST,
    ROOT_KEYS,
    ROPE_TAG,
    Image,
    Leaf,
    Rope,
    Struct,
    Tail,
    dict_preimage,
    splits_list,
)
from holdfast.format.records import SEQ_BITS, Head
from holdfast.format.rows import FAST, HEAD, ITEMS, PLAIN
from holdfast.history.checkpoint import Checkpoint
from holdfast.model import Record
from holdfast.storage.changes import row_taken
from holdfast.storage.contract import Batch, DeleteRange, Insert, Put, StaleHead, Swap
from holdfast.storage.rows import Address

if TYPE_CHECKING:
    from holdfast.format.list_encodings import ImageCache
    from holdfast.format.nodes import Item, Node
    from holdfast.history.lineage import Parent
    from holdfast.storage.repository import Repository

_MASK = 0xFFFF_FFFF_FFFF_FFFF
_MAX_REFERENCE = 200
_ITEM = {str, dict}
_ROPE = [b"\xc7" + bytes((size, ROPE_TAG)) for size in range(256)]
"""The first bytes of an encoded rope, by the size of its payload."""
_new: Any = tuple.__new__  # makes a named tuple without the cost of its constructor


class Growth:
    """A list that the fast path can extend, with the values that each append reuses."""

    __slots__ = (
        "after", "at", "base", "before", "count", "debt", "end", "extents", "flat_tails", "flats",
        "hash", "hash_after", "hash_before", "held", "items", "last", "loose", "names", "paths",
        "rest", "seed", "size", "spans", "tail", "tails",
    )  # fmt: skip

    def __init__(self, base: bytes, root: Struct, at: int, rope: Rope) -> None:
        self.base = base
        """Hash of the record whose cached image is extended. `items` were appended after it."""
        self.items: list[Item] = []
        keys, children = root.keys, root.children
        self.at = at
        self.names: list[str] = [values.decode(key) for key in keys]
        self.flats = [c.flat if isinstance(c, Leaf) else None for c in children]
        name = self.names[at]
        is_path = name and "." not in name and "[" not in name
        self.paths: tuple[Any, ...] = (name, (name,)) if is_path else ((name,),)
        """The paths by which append() can name the list."""
        parts = [msgpack.map_header(len(keys))]
        for key, child in zip(keys, children, strict=True):
            parts += (key, child.stored)
        self.before, self.after = b"".join(parts[: 2 * at + 2]), b"".join(parts[2 * at + 3 :])
        self.hash_before, self.hash_after = dict_preimage(keys, children, at)
        self.rest = root.size - rope.size
        self.count, self.size, self.hash, self.debt = rope.count, rope.size, rope.hash, rope.debt
        self.tail, *self.tails = rope.tails
        self.seed = ITEMS + (self.tail.stream << STREAM_BITS)
        self.flat_tails = [n for tail in self.tails for n in tail]
        self.end, self.loose, self.held = self.tail.end, self.tail.loose, self.tail.held
        *self.extents, self.last = rope.extents
        self.spans = [n for extent in self.extents for n in extent]

    @classmethod
    def begin(cls, base: bytes, old: Node | None, root: Node, line: int) -> Growth | None:
        """Return a Growth for the list that was just extended.

        Returns None if no list was, or if the fast path cannot extend that one.
        """
        if type(root) is not Struct or root.kind != DICT or len(root.keys) > ROOT_KEYS:
            return None
        for at, rope in enumerate(root.children):
            if type(rope) is Rope and rope.kind == LIST and _grew(old, root.keys[at], rope):
                break
        else:
            return None
        tail = rope.tails[0]
        stream, first, count = rope.extents[-1]
        if (
            tail.line != line
            or (stream, first + count) != (tail.stream, tail.end)
            or tail.end + 2 * PACK_ITEMS >= MAX_ITEMS
            or rope.size > values.MAX_VALUE - 2 * PACK_BYTES
            or len(rope.stored) > _MAX_REFERENCE
            or len(root.stored) > INLINE - _MAX_REFERENCE
        ):
            return None
        return cls(base, root, at, rope)

    def added(self, state: Any, image: Node | None) -> list[bytes] | None:
        """Return the encoded items that `state` adds to the end of the list.

        Returns None if the state differs anywhere else, or if it is uncertain whether it does.
        """
        if (
            type(state) is not dict
            or not isinstance(image, Struct)
            or {*map(type, state)} != {str}
            or [*state] != self.names
        ):
            return None
        grown: Any = None
        for at, child in enumerate(state.values()):
            if at == self.at:
                grown = child
            elif values.encode_exact(child, 1) != self.flats[at]:
                return None
        rope = image.children[self.at]
        if (
            type(grown) is not list
            or not self.count < len(grown) <= self.count + LOOSE_ITEMS
            or type(rope) is not Rope
            or (held := rope.image) is None
        ):
            return None
        new = grown[self.count :]
        if not {*map(type, new)} <= _ITEM:
            return None
        known = ropes.take_in(rope, held).chunks
        flat = values.encode(grown)
        pos = len(msgpack.array_header(len(grown)))
        for chunk in known:
            if not flat.startswith(chunk.data, pos):
                return None
            pos += len(chunk.data)
        for item, _ in self.items:
            if not flat.startswith(item, pos):
                return None
            pos += len(item)
        fresh = [values.encode_exact(item, 2) for item in new]
        if flat[pos:] != b"".join(fresh) or values.fragments_alive():
            return None
        if any(c.lookalikes() for c in known):
            return None
        return None if any(values.has_lookalikes(i, 1) for i, _ in self.items) else fresh

    def rebase(self, images: ImageCache, record: bytes) -> None:
        """Make `record` the base. Its image is that of the old base, if cached, plus the items."""
        base = images.get(self.base)
        if isinstance(base, Struct):
            images.put(record, self.node(base), self.base)
        self.base, self.items = record, []

    def node(self, base: Struct) -> Struct:
        """Return the root as a node, with the image of `base` extended by the new items."""
        line, stream, _, small, _, _ = self.tail
        tail = Tail(line, stream, self.end, small, self.loose, self.held)
        old = base.children[self.at]
        image = old.image if isinstance(old, Rope) else None
        if image is not None:
            image = Image(image.chunks, None, (image.more, self.items))
        rope = Rope(
            LIST, self.count, self.size, self.hash, (*self.extents, self.last), (tail, *self.tails),
            debt=self.debt, image=image,
        )  # fmt: skip
        return base.with_child(self.at, rope)


def _grew(old: Node | None, key: bytes, rope: Rope) -> bool:
    """Return whether a list is new or grew only at its end, as far as its image shows."""
    if not rope.tails:
        return False
    before = old.child(key) if isinstance(old, Struct) and old.kind == DICT else None
    if not isinstance(before, Rope):
        return True
    image = rope.image
    return before.count < rope.count and (image is None or image.more is not None)


class Appender(Protocol):
    """The part of a Writer that an append reads and updates."""

    @property
    def repository(self) -> Repository: ...

    @property
    def hash_prefix(self) -> bytes: ...

    name: str
    lease: bytes | None
    parent: Parent | None
    head: Head
    head_row: bytes


def grow(
    writer: Appender,
    growth: Growth,
    parent: Parent,
    flats: list[bytes],
    how: str,
    extra: dict[str, Any],
) -> Checkpoint | None:
    """Commit a checkpoint that adds the items `flats` to the list.

    Returns None, and writes nothing, if the general path is needed. Raises StaleHead if the head
    moved. After any exception the caller must discard the growth.
    """
    pos, chain, size, new = growth.end, growth.hash, 0, len(flats)
    for flat in flats:
        chain = sha256(CHAIN + chain + sha256(flat).digest()).digest()
        size += len(flat)
    longest = size if new == 1 else max(map(len, flats))
    line, stream, _, small, _, _ = growth.tail
    end, count, total = pos + new, growth.count + new, growth.size + size
    held, loose = growth.held + size, growth.loose
    if growth.count < 16 <= count or growth.count < 1 << 16 <= count:
        total += 2  # the list's header becomes longer
    if longest > LEAF_MAX or not splits_list(total, count):
        return None
    if end - loose >= LOOSE_ITEMS or size >= LOOSE_BYTES:
        before = pos - loose
        if end - small >= PACK_ITEMS or held >= PACK_BYTES or len(growth.items) < before:
            return None
        run = [flat for flat, _ in growth.items[len(growth.items) - before :]]
        write = item_row(stream, loose, before, run + flats, refs=False, level=FAST)
        row, loose = write[3], end
    elif new == 1:
        row = b"\x00" + flats[0]
        row = xxh3_64_digest(row, (growth.seed + pos) & _MASK) + row
        write = _new(RowWrite, (stream, pos, 0, row))
    else:
        write = item_row(stream, pos, 0, flats, refs=False, level=PLAIN)
        row = write[3]
    _, first, length = growth.last
    length += new
    payload = packb(
        [LIST, count, total, chain, b"", growth.debt,
         [line, stream, end, small, loose, held, *growth.flat_tails],
         [*growth.spans, stream, first, length]]
    )  # fmt: skip
    root = b"".join([growth.before, _ROPE[len(payload)], payload, growth.after])
    state_hash = sha256(growth.hash_before + chain + growth.hash_after).digest()

    (number, parent_seq), parent_id, parent_hash, step, before_us, _, _, skip = parent
    head = writer.head
    seq, step = head.last + 1, step + 1
    now = time.time_ns()
    created = max(now // 1000, before_us)
    id = ids.new_id(parent_id, now)
    state_size, added = growth.rest + total, len(root) + len(row)
    meta = records.metadata(step, created, how, parent_seq, parent_id, extra)
    digest = sha256(
        b"".join([
            writer.hash_prefix, seq.to_bytes(4, "big"), id, len(meta).to_bytes(4, "big"), meta,
            state_hash, parent_hash,
        ])
    ).digest()  # fmt: skip
    body = records.seal_checkpoint(
        number, seq, id, meta, digest, line, state_size, added, root, skip
    )
    new_head = _new(Head, (seq, seq, head.operations, parent_seq, writer.lease))
    sealed = b"\x00" + packb([seq, seq, head.operations, parent_seq, writer.lease])
    head_row = xxh3_64_digest(sealed, (HEAD + number) & _MASK) + sealed
    base = number << SEQ_BITS
    swap = (number, writer.head_row, head_row, StaleHead, (base | parent_seq, parent_id))
    writes = [
        _new(Insert, ("items", (stream << STREAM_BITS | write[1], row), row_taken)),
        _new(Insert, ("checkpoints", (base | seq, id, body), row_taken)),
    ]
    if write[2]:  # it takes the place of the rows that hold the items before
        pos = stream << STREAM_BITS | write[1]
        writes.insert(0, DeleteRange("items", pos, pos + write[2]))
    if extra and ("trigger" in extra or "status" in extra):
        writes += [Put("facets", term) for term in records.index_terms(id, extra)]
    writer.repository.backend.commit(Batch(_new(Swap, swap), writes=writes))
    growth.end, growth.count, growth.size, growth.hash = end, count, total, chain
    growth.held, growth.loose, growth.last = held, loose, (stream, first, length)
    for flat in flats:
        growth.items.append((flat, None))
    place = _new(Address, (number, seq))
    writer.parent = _new(type(parent), (place, id, digest, step, created, line, root, parent_seq))
    writer.head, writer.head_row = new_head, head_row  # after the parent: see Writer
    if loose == end:
        growth.rebase(writer.repository.images, digest)
    if extra:
        extra = records.read_extra(meta)
    fields = (
        seq, id, step, created, how, parent_id, parent_seq, extra, digest, lambda: state_hash,
        state_size, added, skip, None,
    )  # fmt: skip
    return Checkpoint(writer.name, _new(Record, fields), None, ())
