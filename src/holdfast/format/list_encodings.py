"""Images: the canonical bytes of a list or of big bytes at the last save, kept in memory.

The next save compares its encoding with the image to find the changes. An image is a tuple of
chunks of about 64 KB each. Whole chunks are compared first (a memcmp), and single items only in the
chunks that differ. Chunks are immutable, and the images of successive checkpoints share them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from holdfast.format.nodes import Blob, Chunk, Rope, Struct

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from holdfast.format.nodes import Item, Node


CHUNK = 64 << 10


def group(items: Iterable[Item]) -> list[Chunk]:
    """Return the items in chunks of about `CHUNK` bytes."""
    chunks: list[Chunk] = []
    data: list[bytes] = []
    ends: list[int] = []
    nodes: dict[int, Node] = {}
    end = 0
    for flat, node in items:
        if node is not None:
            nodes[len(ends)] = node
        end += len(flat)
        data.append(flat)
        ends.append(end)
        if end >= CHUNK:
            chunks.append(Chunk(b"".join(data), ends, nodes))
            data, ends, nodes, end = [], [], {}, 0
    if ends:
        chunks.append(Chunk(b"".join(data), ends, nodes))
    return chunks


class Match(NamedTuple):
    """The common beginning and the common end of an image and a new encoding.

    Chunks [0, head) and [tail, …) are equal as a whole. In the chunks between, the first
    `head_items` and the last `tail_items` are equal too. Bytes [start, stop) of the new encoding
    differ. `before` and `after` count all items of the common beginning and the common end.
    """

    head: int
    tail: int
    head_items: list[Item]
    tail_items: list[Item]
    start: int
    stop: int
    before: int
    after: int


def match(chunks: tuple[Chunk, ...], new: bytes, start: int, *, suffix: bool) -> Match:
    """Compare the image with `new[start:]`. Without `suffix`, look for no common end.

    A common beginning that ends between two items of the image also ends between two items of the
    new encoding, because encodings delimit themselves. A common end can begin inside an item. So
    the caller must check that the items between add up, and otherwise call again with
    `suffix=False`.
    """
    pos, head, before = start, 0, 0
    for chunk in chunks:
        if not new.startswith(chunk.data, pos):
            break
        pos += len(chunk.data)
        head += 1
        before += chunk.count
    stop, tail, after = len(new), len(chunks), 0
    head_items: list[Item] = []
    tail_items: list[Item] = []
    if head < tail:
        chunk = chunks[head]
        n = 0
        base = pos
        while n < chunk.count and new.startswith(chunk.item(n), pos):
            pos = base + chunk.ends[n]
            n += 1
        head_items = chunk.items(0, n)
        before += n
    if suffix:
        while tail > head + 1 or (tail > head and not head_items):
            data = chunks[tail - 1].data
            if stop - pos < len(data) or not new.endswith(data, pos, stop):
                break
            tail -= 1
            stop -= len(data)
            after += chunks[tail].count
        if tail > head:
            chunk = chunks[tail - 1]
            floor = len(head_items) if tail - 1 == head else 0
            n = chunk.count
            while n > floor:
                flat = chunk.item(n - 1)
                if stop - pos < len(flat) or not new.endswith(flat, pos, stop):
                    break
                n -= 1
                stop -= len(flat)
            tail_items = chunk.items(n, chunk.count)
            after += len(tail_items)
    return Match(head, tail, head_items, tail_items, pos, stop, before, after)


def rebuild(
    chunks: tuple[Chunk, ...], m: Match, middle: Sequence[Item]
) -> tuple[int, tuple[Chunk, ...]]:
    """Return how many of the first old chunks are kept, and the image of the new encoding."""
    kept = list(chunks[: m.head])
    fresh = group([*m.head_items, *middle, *m.tail_items])
    if len(fresh) == 1:
        # Merge small chunks at the end: each one left has half of CHUNK, or twice the size of
        # the next one. So a list that grows has few chunks, and each append copies little.
        while kept and len(kept[-1].data) < min(2 * len(fresh[0].data), CHUNK // 2):
            fresh[0] = kept.pop().joined(fresh[0])
    return len(kept), (*kept, *fresh, *chunks[m.tail :])


_OVERHEAD = 400


def cost(node: Node) -> int:
    """Estimate the memory that a node and its images hold, in bytes."""
    if isinstance(node, Struct):
        return _OVERHEAD + sum([cost(c) for c in node.children])
    if isinstance(node, Rope):
        if node.entries is not None:
            return _OVERHEAD + cost(node.entries)
        if node.image is not None:
            # The bytes, and per item an entry in a list (and a hash, where one was computed).
            return _OVERHEAD + node.size + 40 * node.count
        return _OVERHEAD
    if isinstance(node, Blob):
        return _OVERHEAD + (len(node.flat) if node.flat else 0)
    return _OVERHEAD + len(node.flat)


class ImageCache:
    """Nodes of recent checkpoints with their images, in at most `limit` bytes.

    The key is the hash of the checkpoint's record, so that two checkpoints are never confused.
    The least recently used nodes are dropped first.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._held: OrderedDict[bytes, tuple[Node, int]] = OrderedDict()
        self._bytes = 0

    def reset_lock(self) -> None:
        """Make a new lock and empty the cache, in a forked child.

        A thread of the parent process may have held the lock, in the middle of a change.
        """
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
        """Keep a node. Drop `instead_of`, the parent, which the next save no longer needs."""
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
