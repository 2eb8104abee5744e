"""Whether stored data is what a state's hashes say."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING

from holdfast.codec import ropes, streams
from holdfast.codec.depth import FOLLOWING
from holdfast.codec.nodes import DICT, LIST, Blob, Leaf, Node, Rope, Struct, chain, dict_hash, parse
from holdfast.errors import Corrupt

if TYPE_CHECKING:
    from holdfast.codec.nodes import Extent
    from holdfast.codec.streams import Source


_KEPT = 1 << 17
"""Hashes of chains that are kept, besides those of the last state: some 10 MB."""


class DataCheck:
    """Recomputes hashes from stored data; what checkpoints share is read once."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._chains: dict[tuple[bytes | None, int, int], list[bytes]] = {}
        """By what was before, stream and first item: the chain after each item from there on.

        Those that were needed last come last. An edit changes the chain of all items behind it, so
        of many states not all can be kept."""
        self._needed: set[tuple[bytes | None, int, int]] = set()
        """By the state that is being checked."""
        self._held = 0
        """Hashes in all chains."""
        self._done: set[bytes] = set()

    def check(self, node: Node) -> None:
        """Raise Corrupt unless everything below `node` is there and has the hashes it claims."""
        self._needed.clear()
        try:
            self._check(node)
        finally:
            self._forget()

    def _forget(self) -> None:
        """The chains that were not needed for longest."""
        while self._held > _KEPT and (oldest := next(iter(self._chains))) not in self._needed:
            self._held -= len(self._chains.pop(oldest))

    def _check(self, node: Node) -> None:
        if isinstance(node, Struct):
            for child in node.children:
                self._check(child)
        elif isinstance(node, Blob):
            if node.hash not in self._done:
                flat = self._source.blob(node.hash, node.size)
                if sha256(flat).digest() != node.hash:
                    raise Corrupt(f"blob {node.hash.hex()[:12]} does not match its hash")
                self._done.add(node.hash)
        elif isinstance(node, Rope):
            with FOLLOWING:
                self._rope(node)

    def _rope(self, rope: Rope) -> None:
        if rope.kind == LIST:
            found = self._chain(rope.extents)
        elif rope.kind == DICT:
            entries = ropes.entries(rope, self._source)
            self._check(entries)
            found = dict_hash(entries.keys, entries.children)
        else:
            found = sha256(ropes.flatten(rope, self._source)).digest()
            rope.image = None
        if found != rope.hash:
            raise Corrupt("a rope's items do not match its hash")

    def _chain(self, extents: tuple[Extent, ...]) -> bytes:
        """The chain over all items. What it is from some item on depends on what it was before."""
        last: bytes | None = None
        for stream, first, count in extents:
            key = (last, stream, first)
            known = self._chains[key] = self._chains.pop(key, [])
            self._needed.add(key)
            if count > len(known):
                self._lengthen(known, last, (stream, first, count))
            last = known[count - 1]
        return last or chain(None, ())

    def _lengthen(self, known: list[bytes], last: bytes | None, extent: Extent) -> None:
        """Let a chain go on to the end of an extent."""
        stream, first, count = extent
        before = len(known)
        last = known[-1] if known else last
        todo = (stream, first + before, count - before)
        try:
            for piece in streams.pieces(self._source, [todo]):
                begin = 0
                for end in piece.ends:
                    stored = piece.data[begin : end - piece.base]
                    begin = end - piece.base
                    node = parse(stored) if piece.refs else Leaf(stored)
                    self._check(node)
                    last = chain(last, [node.hash])
                    known.append(last)
        finally:
            self._held += len(known) - before
