"""The hot path: one small item more at the end of a list right below the root.

Most agents do this at most steps. It writes what `patch.append` and `Writer.checkpoint` would
write, byte for byte, without building nodes, and in one straight line: what runs once between two
waits for the disk runs with cold caches, where every function entered costs more than its work.
It ends where the general path has more to do (every few items, when loose rows are packed).
"""

from __future__ import annotations

import time
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from ormsgpack import packb
from xxhash import xxh3_64_digest

from holdfast import ids
from holdfast.backends.base import Change
from holdfast.codec import records, values, wire
from holdfast.codec.nodes import (
    CHAIN,
    DICT,
    INLINE,
    LIST,
    LIST_ITEM,
    ROOT_KEYS,
    ROPE_TAG,
    Rope,
    Struct,
    dict_preimage,
    parse_rope,
)
from holdfast.codec.records import Head
from holdfast.codec.rows import HEAD, ITEMS
from holdfast.codec.streams import LOOSE_BYTES, LOOSE_ITEMS, MAX_ITEMS, STREAM_BITS, RowWrite
from holdfast.lineage import Place
from holdfast.model import Checkpoint, Record

if TYPE_CHECKING:
    from holdfast.codec.nodes import Node
    from holdfast.writing import Tip, Writer

_MASK = 0xFFFF_FFFF_FFFF_FFFF
_MAX_REFERENCE = 200
_MAX = values.MAX_VALUE - LOOSE_BYTES
_APPEND = records.OPERATIONS.index("append")
_new: Any = tuple.__new__  # a named tuple without the call of its constructor


class Growth:
    """A list that may grow by a few more items: what stays the same from one to the next."""

    __slots__ = (
        "after", "at", "base", "before", "count", "end", "hash", "hash_after", "hash_before",
        "held", "items", "key", "last", "payload", "rest", "rope", "size", "spans", "tail", "tails",
    )  # fmt: skip

    def __init__(self, base: bytes, root: Struct, at: int, rope: Rope) -> None:
        self.base = base
        """The record whose image this one grows from."""
        self.key, self.at, self.rope = root.keys[at], at, rope
        keys, children = root.keys, root.children
        parts = [wire.map_header(len(keys))]
        for key, child in zip(keys, children, strict=True):
            parts += (key, child.stored)
        self.before, self.after = b"".join(parts[: 2 * at + 2]), b"".join(parts[2 * at + 3 :])
        self.hash_before, self.hash_after = dict_preimage(keys, children, at)
        self.rest = root.size - rope.size
        self.count, self.size, self.hash = rope.count, rope.size, rope.hash
        self.tail = rope.tails[0]
        self.tails = [n for tail in rope.tails[1:] for n in tail]
        self.end, self.held = self.tail.end, self.tail.held
        *spans, self.last = rope.extents
        self.spans = [n for extent in spans for n in extent]
        self.items: list[tuple[bytes, None]] = []
        self.payload = b""

    @classmethod
    def begin(cls, base: bytes, root: Node, key: bytes, line: int) -> Growth | None:
        """A growth for the list under `key`, or None if it is not laid out for it."""
        if type(root) is not Struct or root.kind != DICT or key not in root.keys:
            return None
        at = root.keys.index(key)
        rope = root.children[at]
        if type(rope) is not Rope or rope.kind != LIST or not rope.tails:
            return None
        tail = rope.tails[0]
        stream, first, count = rope.extents[-1]
        if (
            tail.line != line
            or (stream, first + count) != (tail.stream, tail.end)
            or tail.end + LOOSE_ITEMS >= MAX_ITEMS
            or not 16 <= rope.count < (1 << 16) - LOOSE_ITEMS  # the header keeps its length
            or len(root.keys) > ROOT_KEYS
            or len(rope.stored) > _MAX_REFERENCE
            or len(root.stored) > INLINE - _MAX_REFERENCE
        ):
            return None
        return cls(base, root, at, rope)

    def node(self, base: Struct) -> Struct:
        """The root as a node, with the image of `base` carried on."""
        rope = parse_rope(self.payload)
        old = base.children[self.at]
        if isinstance(old, Rope) and old.chunks is not None:
            rope.chunks, rope.more = old.chunks, (old.more, list(self.items))
        return base.with_child(self.at, rope)


def grow(
    writer: Writer, growth: Growth, tip: Tip, item: Any, extra: dict[str, Any]
) -> Checkpoint | None:
    """Commit a checkpoint with one item more; None, and nothing done, where it does not fit.

    After an exception the growth must be discarded.
    """
    flat = values.encode_exact(item, 2)
    size, pos = len(flat), growth.end
    line, stream, _, small, loose, _ = growth.tail
    end, count, total = pos + 1, growth.count + 1, growth.size + size
    if end - loose >= LOOSE_ITEMS or size >= LOOSE_BYTES or not LIST_ITEM * count <= total <= _MAX:
        return None
    chain = sha256(CHAIN + growth.hash + sha256(flat).digest()).digest()
    held = growth.held + size
    _, first, length = growth.last
    payload = packb(
        [LIST, count, total, chain, b"", growth.rope.debt,
         [line, stream, end, small, loose, held, *growth.tails],
         [*growth.spans, stream, first, length + 1]]
    )  # fmt: skip
    root = b"".join(
        [growth.before, b"\xc7", bytes((len(payload), ROPE_TAG)), payload, growth.after]
    )
    state_hash = sha256(growth.hash_before + chain + growth.hash_after).digest()
    row = b"\x00" + flat
    row = xxh3_64_digest(row, (ITEMS + (stream << STREAM_BITS | pos)) & _MASK) + row

    (number, parent_seq), parent, parent_hash, step, before, _, _, skip = tip
    head = writer.head
    seq, step = head.last + 1, step + 1
    now = time.time_ns()
    created = max(now // 1000, before)
    id = ids.new_id(parent, now)
    state_size, added = growth.rest + total, len(root) + len(row)
    meta = (
        records.metadata(step, created, "append", parent_seq, parent, extra)
        if extra
        else packb([step, created, _APPEND, parent_seq, parent])
    )
    digest = sha256(
        b"".join([
            writer.hash_prefix, seq.to_bytes(4, "big"), id, len(meta).to_bytes(4, "big"), meta,
            state_hash, parent_hash,
        ])
    ).digest()  # fmt: skip
    body = records.seal_checkpoint(
        number, seq, id, meta, digest, line, state_size, added, root, skip
    )
    new_head = _new(Head, (seq, seq, head.operations, parent_seq))
    sealed = b"\x00" + packb([*new_head])
    head_row = xxh3_64_digest(sealed, (HEAD + number) & _MASK) + sealed
    rows = (_new(RowWrite, (stream, pos, 0, row)),)
    writer.store.backend.commit(
        Change(number, writer.head_row, head_row, None, (seq, id, body), rows, plain=True)
    )
    growth.end, growth.count, growth.size, growth.hash, growth.held = end, count, total, chain, held
    growth.last, growth.payload = (stream, first, length + 1), payload
    growth.items.append((flat, None))
    writer.head, writer.head_row = new_head, head_row
    place = _new(Place, (number, seq))
    writer.tip = _new(type(tip), (place, id, digest, step, created, line, root, parent_seq))
    if extra:
        extra = records.read_extra(meta)
    fields = (
        seq, id, step, created, "append", parent, parent_seq, extra, digest, lambda: state_hash,
        state_size, added, skip, None,
    )  # fmt: skip
    return Checkpoint(writer.name, _new(Record, fields), None, ())
