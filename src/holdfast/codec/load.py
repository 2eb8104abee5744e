"""From stored bytes to a value, following references, within bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.codec import streams, values
from holdfast.codec.nodes import BLOB_TAG, RAW, ROPE_TAG, Rope, parse_blob, parse_rope
from holdfast.errors import Corrupt

if TYPE_CHECKING:
    from holdfast.codec.streams import Source

_SLACK = 1 << 16


def load(stored: bytes, size: int, source: Source) -> Any:
    """The value of a stored encoding whose canonical one has `size` bytes."""
    return _Loader(source, size).value(stored)


class _Loader:
    """Follows references. What lies inside a value must fit into the size that it declares."""

    def __init__(self, source: Source, budget: int) -> None:
        self._source, self._budget = source, budget

    def value(self, stored: bytes) -> Any:
        return values.decode(stored, self._hook)

    def _hook(self, tag: int, data: bytes) -> Any:
        if tag == ROPE_TAG:
            rope = parse_rope(data)
            self._spend(rope.size)
            outside, self._budget = self._budget, rope.size
            value = self._rope(rope)
            self._budget = outside
            return value
        if tag == BLOB_TAG:
            ref = parse_blob(data)
            self._spend(ref.size)
            return values.decode(self._source.blob(ref.hash, ref.size))
        return values.decode_tag(tag, data)

    def _rope(self, rope: Rope) -> Any:
        parts = [rope.header()]
        refs = False
        held = 0
        for piece in streams.pieces(self._source, rope.extents):
            held += len(piece.data)
            if held > 2 * rope.size + _SLACK:
                raise Corrupt("a rope's items are more than its size")
            parts.append(piece.data)
            refs = refs or piece.refs
        stored = b"".join(parts)
        if len(stored) != rope.size and (rope.kind == RAW or not refs):
            raise Corrupt("a rope's items do not add up to its size")
        return values.decode(stored, self._hook)

    def _spend(self, count: int) -> None:
        self._budget -= count
        if self._budget < 0:
            raise Corrupt("stored references expand to more than the state's size")
