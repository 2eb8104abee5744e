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


class DataCheck:
    """Recomputes hashes from stored data; what checkpoints share is read once."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._chains: dict[tuple[bytes | None, int, int], list[bytes]] = {}
        """By what was before, stream and first item: the chain after each item from there on."""
        self._done: set[bytes] = set()

    def check(self, node: Node) -> None:
        """Raise Corrupt unless everything below `node` is there and has the hashes it claims."""
        if isinstance(node, Struct):
            for child in node.children:
                self.check(child)
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
            self.check(entries)
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
            known = self._chains.setdefault((last, stream, first), [])
            last = known[-1] if known else last
            todo = [(stream, first + len(known), count - len(known))] if count > len(known) else []
            for piece in streams.pieces(self._source, todo):
                begin = 0
                for end in piece.ends:
                    stored = piece.data[begin : end - piece.base]
                    begin = end - piece.base
                    node = parse(stored) if piece.refs else Leaf(stored)
                    self.check(node)
                    last = chain(last, [node.hash])
                    known.append(last)
            last = known[count - 1]
        return last or chain(None, ())
