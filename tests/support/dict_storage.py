"""The smallest possible storage for layouts: dicts in memory, rows sealed as in a real store."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from holdfast.format import rows
from holdfast.format.delta import lay_out
from holdfast.format.item_streams import STREAM_BITS, Writes
from holdfast.format.load import load
from holdfast.format.nodes import Node, parse

if TYPE_CHECKING:
    from collections.abc import Iterator


class PlainStore:
    def __init__(self) -> None:
        self.items: dict[int, dict[int, bytes]] = {}
        self.blobs: dict[bytes, bytes] = {}
        self.written = 0
        self._streams = itertools.count(1)

    def rows(self, stream: int, start: int, stop: int) -> Iterator[tuple[int, rows.ItemRow]]:
        held = self.items.get(stream, {})
        first = max((p for p in held if p <= start), default=start)
        for p in sorted(held):
            if first <= p < stop:
                yield p, rows.unseal_items(stream << STREAM_BITS | p, held[p], "row")

    def blob(self, digest: bytes, size: int) -> bytes:
        return self.blobs[digest]

    def writes(self, line: int) -> Writes:
        return Writes(self, line, lambda: next(self._streams))

    def apply(self, out: Writes) -> None:
        for stream, first, replaced, body in out.rows:
            held = self.items.setdefault(stream, {})
            for p in [p for p in held if first <= p < first + replaced]:
                del held[p]
            assert first not in held, "a row would overwrite another"
            assert not held or max(held) < first or replaced, "not appended at the end"
            held[first] = body
            self.written += len(body)
        for digest, flat in out.blobs.items():
            if digest not in self.blobs:
                self.blobs[digest] = flat
                self.written += len(flat)

    def save(self, value: Any, old: Node | None, line: int) -> Node:
        out = self.writes(line)
        node = lay_out(value, old, out)
        self.apply(out)
        self.written += len(node.stored)
        return node

    def load(self, node: Node) -> Any:
        return load(node.stored, node.size, self)

    @staticmethod
    def cold(node: Node) -> Node:
        return parse(node.stored, root=True)
