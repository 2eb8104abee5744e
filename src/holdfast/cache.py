"""Images of recent checkpoints, bounded in bytes and shared by all sessions of a store."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from holdfast.codec.nodes import Blob, Rope, Struct

if TYPE_CHECKING:
    from holdfast.codec.nodes import Node

_OVERHEAD = 400


def cost(node: Node) -> int:
    """Roughly how much memory an image holds."""
    if isinstance(node, Struct):
        return _OVERHEAD + sum([cost(c) for c in node.children])
    if isinstance(node, Rope):
        if node.entries is not None:
            return _OVERHEAD + cost(node.entries)
        if node.image is not None:
            # Bytes, and for each item an entry in a list (and a hash where it was needed).
            return _OVERHEAD + node.size + 40 * node.count
        return _OVERHEAD
    if isinstance(node, Blob):
        return _OVERHEAD + (len(node.flat) if node.flat else 0)
    return _OVERHEAD + len(node.flat)


class Images:
    """Keyed by record hash, so that nobody else's checkpoint can be mistaken for ours."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._held: OrderedDict[bytes, tuple[Node, int]] = OrderedDict()
        self._bytes = 0

    def reset_lock(self) -> None:
        """In a forked child: whoever held the lock is not here. What was half done is dropped."""
        self._lock = threading.Lock()
        self._held.clear()
        self._bytes = 0

    def get(self, key: bytes) -> Node | None:
        with self._lock:
            found = self._held.get(key)
            if found is None:
                return None
            self._held.move_to_end(key)
            return found[0]

    def put(self, key: bytes, node: Node, instead_of: bytes | None = None) -> None:
        """Keep an image; the parent's goes, as the head moves on."""
        size = cost(node)
        with self._lock:
            for gone in (instead_of, key):
                if gone is not None:
                    self._drop(gone)
            if size <= self._limit:
                self._held[key] = (node, size)
                self._bytes += size
            while self._bytes > self._limit:
                self._drop(next(iter(self._held)))

    def drop(self, key: bytes) -> None:
        with self._lock:
            self._drop(key)

    def _drop(self, key: bytes) -> None:
        found = self._held.pop(key, None)
        if found is not None:
            self._bytes -= found[1]

    @property
    def bytes(self) -> int:
        return self._bytes
