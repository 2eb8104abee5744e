"""All states of a session, each item of a list once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast import shapes
from holdfast.codec import ropes, values
from holdfast.codec.load import load_node
from holdfast.codec.nodes import DICT, LIST, Node, Rope, Struct
from holdfast.parts import rope_items

if TYPE_CHECKING:
    from holdfast.codec.streams import Source

_LONG = 200


class Pool:
    """Values that states refer to.

    In a packed state `{"$items": [[a, b], …]}` is a list of what lies from a to b in the pool, and
    `{"$at": n}` is what lies at n. No rendering of a value looks like that.
    """

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._texts: dict[str, int] = {}
        self._runs: dict[int, list[tuple[int, int, int]]] = {}
        """By stream: from where to where items are known, and where in the pool they begin."""

    def pack(self, node: Node, source: Source) -> Any:
        """A state, or a part of one."""
        if isinstance(node, Rope) and node.kind == LIST:
            ranges: list[list[int]] = []
            for stream, start, count in node.extents:
                for low, high in self._items(stream, start, start + count, source):
                    if ranges and ranges[-1][1] == low:
                        ranges[-1][1] = high
                    else:
                        ranges.append([low, high])
            return {"$items": ranges}
        if isinstance(node, Rope) and node.kind == DICT:
            node = ropes.entries(node, source)
        if isinstance(node, Struct) and node.kind != DICT:
            return [self.pack(child, source) for child in node.children]
        if isinstance(node, Struct):
            keys = [values.decode(key) for key in node.keys]
            if all(type(key) is str for key in keys):
                children = [self.pack(child, source) for child in node.children]
                # As portable renders it: keys that begin with a dollar sign get one more.
                return {
                    f"${key}" if key.startswith("$") else key: child
                    for key, child in zip(keys, children, strict=True)
                }
        return self._shared(shapes.value(load_node(node, source)))

    def _shared(self, shown: Any) -> Any:
        """Long texts, which states have in common, once."""
        if type(shown) is str and len(shown) > _LONG:
            at = self._texts.setdefault(shown, len(self.values))
            if at == len(self.values):
                self.values.append(shown)
            return {"$at": at}
        if type(shown) is dict:
            return {key: self._shared(value) for key, value in shown.items()}
        if type(shown) is list:
            return [self._shared(value) for value in shown]
        return shown

    def _items(self, stream: int, start: int, stop: int, source: Source) -> list[tuple[int, int]]:
        """Where items of a stream lie in the pool; those that do not yet are put there."""
        runs = self._runs.setdefault(stream, [])
        found = []
        at = start
        while at < stop:
            run = next((r for r in runs if r[0] <= at < r[1]), None)
            if run is None:
                end = min([r[0] for r in runs if r[0] > at] + [stop])
                begin = len(self.values)
                nodes = rope_items([(stream, at, end - at)], source)
                self.values += [shapes.value(load_node(node, source)) for node in nodes]
                run = (at, end, begin)
                runs.append(run)
            end = min(run[1], stop)
            found.append((run[2] + at - run[0], run[2] + end - run[0]))
            at = end
        return found
