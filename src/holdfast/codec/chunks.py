"""The image of a list or of big bytes: what it was at the last save, to compare the next one with.

An image is a tuple of chunks of about 64 KB of canonical bytes. Comparing is memcmp on whole chunks
against one fresh encoding; only where they differ does anything look at single items. Chunks are
immutable and shared between the images of successive checkpoints.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple

from holdfast.codec import values

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from holdfast.codec.nodes import Node

CHUNK = 64 << 10


class Chunk:
    """Consecutive items: their bytes, where each ends, and nodes for those that are no leaves."""

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
        """Whether equal bytes leave the types of some item open."""
        if self._lookalikes is None:
            self._lookalikes = values.has_lookalikes(self.data, self.count)
        return self._lookalikes

    def hashes(self) -> list[bytes]:
        """The hash of each item's value."""
        if self._hashes is None:
            self._hashes = self.hashes_of(self.items(0, self.count))
        return self._hashes

    @staticmethod
    def hashes_of(items: Iterable[Item]) -> list[bytes]:
        return [sha256(flat).digest() if node is None else node.hash for flat, node in items]

    def joined(self, other: Chunk) -> Chunk:
        """Both, one after the other. What is known about this one is not worked out again."""
        start, count = len(self.data), self.count
        nodes = self.nodes | {count + i: node for i, node in other.nodes.items()}
        chunk = Chunk(self.data + other.data, self.ends + [start + e for e in other.ends], nodes)
        if self._hashes is not None:
            chunk._hashes = self._hashes + other.hashes()
        if self._lookalikes is not None:
            chunk._lookalikes = self._lookalikes or other.lookalikes()
        return chunk


if TYPE_CHECKING:
    Item = tuple[bytes, Node | None]


def group(items: Iterable[Item]) -> list[Chunk]:
    """Items in chunks of about `CHUNK` bytes."""
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
    """What an image and a new encoding have in common at both ends.

    Chunks [0, head) and [tail, …) are equal as they are; in the chunks between, the first
    `head_items` and the last `tail_items` items are equal too. `start` and `stop` bound the bytes
    that differ in the new encoding; `before` and `after` count all common items.
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
    """Compare the image with `new[start:]`.

    A common beginning that ends between two items of the image also ends between two items of the
    new encoding, since encodings delimit themselves. A common end does not: the caller must check
    that the items between add up, and ask again with `suffix=False` if they do not.
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
    """The image of the new encoding, and how many of its first chunks are the old ones."""
    kept = list(chunks[: m.head])
    fresh = group([*m.head_items, *middle, *m.tail_items])
    if len(fresh) == 1:
        # Growth at the end leaves chunks that halve in size: few of them, and little is copied.
        while kept and len(kept[-1].data) < min(2 * len(fresh[0].data), CHUNK // 2):
            fresh[0] = kept.pop().joined(fresh[0])
    return len(kept), (*kept, *fresh, *chunks[m.tail :])
