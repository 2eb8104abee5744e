"""The hot path: one small item more at the end of a list right below the root.

The same layout as `patch.append` makes, byte for byte, computed without building nodes: what does
not change from one append to the next is kept ready. It ends where the general path has more to do
(every few items, when loose rows are packed); that one then begins a new growth.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING

import ormsgpack

from holdfast.codec.nodes import (
    CHAIN,
    DICT,
    INLINE,
    LIST,
    ROOT_KEYS,
    ROPE_TAG,
    Rope,
    Struct,
    dict_preimage,
    parse_rope,
    reference,
    splits_list,
)
from holdfast.codec.rows import ITEMS, PLAIN, seal
from holdfast.codec.streams import LOOSE_BYTES, LOOSE_ITEMS, MAX_ITEMS, STREAM_BITS, RowWrite
from holdfast.codec.values import map_header

if TYPE_CHECKING:
    from holdfast.codec.nodes import Node


class Growth:
    """A list that may grow by a few more items. Discard it when a commit fails."""

    __slots__ = (
        "_after", "_at", "_before", "_hash_after", "_hash_before", "_held", "_items", "_last",
        "_line", "_loose", "_rest", "_rope", "_small", "_spans", "_stream", "base", "count", "end",
        "hash", "key", "payload", "size",
    )  # fmt: skip

    def __init__(self, base: bytes, root: Struct, at: int, rope: Rope) -> None:
        self.base = base
        """The record whose image this one grows from."""
        self.key, self._at = root.keys[at], at
        keys, children = root.keys, root.children
        parts = [map_header(len(keys))]
        for key, child in zip(keys, children, strict=True):
            parts += (key, child.stored)
        self._before = b"".join(parts[: 2 * at + 2])
        self._after = b"".join(parts[2 * at + 3 :])
        self._hash_before, self._hash_after = dict_preimage(keys, children, at)
        self._rest = root.size - rope.size
        self._rope = rope
        self.count, self.size, self.hash = rope.count, rope.size, rope.hash
        tail = rope.tails[0]
        self._line, self._stream, self.end, self._small, self._loose, self._held = tail
        *before, self._last = rope.extents
        self._spans = [n for extent in before for n in extent]
        self._items: list[tuple[bytes, None]] = []
        self.payload = b""

    @classmethod
    def begin(cls, base: bytes, root: Node, key: bytes, line: int) -> Growth | None:
        """A growth for the list under `key`, or None if it is not laid out for it."""
        if type(root) is not Struct or root.kind != DICT or key not in root.keys:
            return None
        at = root.keys.index(key)
        rope = root.children[at]
        if type(rope) is not Rope or rope.kind != LIST or len(root.keys) > ROOT_KEYS:
            return None
        if not rope.tails or rope.tails[0].line != line or rope.count >= (1 << 16) - LOOSE_ITEMS:
            return None
        stream, first, count = rope.extents[-1]
        if stream != rope.tails[0].stream or first + count != rope.tails[0].end:
            return None
        if len(root.stored) > INLINE - 64 or rope.count < 16 or len(rope.stored) > 200:
            return None
        return cls(base, root, at, rope)

    def append(self, flat: bytes) -> tuple[bytes, bytes, int, RowWrite] | None:
        """Root, state hash, size and row with the item added; None if this is not the place.

        The item must be a leaf at this size: no list, and below LOOSE_BYTES.
        """
        size = len(flat)
        end = self.end + 1
        if end - self._loose >= LOOSE_ITEMS or size >= LOOSE_BYTES or end >= MAX_ITEMS:
            return None
        count, total = self.count + 1, self.size + size
        if not splits_list(total, count):
            return None
        digest = sha256(CHAIN + self.hash + sha256(flat).digest()).digest()
        held = self._held + size
        stream, first, length = self._last
        rope = self._rope
        tails = [self._line, self._stream, end, self._small, self._loose, held]
        for other in rope.tails[1:]:
            tails += other
        spans = [*self._spans, stream, first, length + 1]
        self.payload = ormsgpack.packb([LIST, count, total, digest, b"", rope.debt, tails, spans])
        root = self._before + reference(ROPE_TAG, self.payload) + self._after
        state_hash = sha256(self._hash_before + digest + self._hash_after).digest()
        pos = self.end
        row = seal(ITEMS, self._stream << STREAM_BITS | pos, flat, 0, PLAIN)
        self.end, self.count, self.size, self.hash, self._held = end, count, total, digest, held
        self._last = (stream, first, length + 1)
        self._items.append((flat, None))
        return root, state_hash, self._rest + total, RowWrite(self._stream, pos, 0, row)

    def node(self, base: Struct) -> Struct:
        """The root as a node, with the image of `base` carried on."""
        rope = parse_rope(self.payload)
        old = base.children[self._at]
        if isinstance(old, Rope) and old.chunks is not None:
            rope.chunks, rope.more = old.chunks, (old.more, list(self._items))
        return base.with_child(self._at, rope)
