"""The text that a checkpoint brought: the strings of its state that its ancestor's state has not.

A string that only moved is not new. Of a string that changed at its place, the range that differs
is new. Parts with equal hashes or addresses are equal, so only parts that differ are read.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.format import item_streams, msgpack, ropes, values
from holdfast.format.msgpack import FOLLOWING
from holdfast.format.nodes import DICT, RAW, Leaf, Node, Rope, Struct, parse
from holdfast.intervals import IntervalSet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from holdfast.format.item_streams import Source
    from holdfast.format.nodes import Extent

Path = tuple[Any, ...]


class Text(NamedTuple):
    """A string in a state: a value, or the last key of its path."""

    path: Path
    is_key: bool
    text: str


class NewText(NamedTuple):
    """A string that is new, or that is new in [low, high)."""

    path: Path
    text: str
    low: int
    high: int
    before: str = ""
    """The string that was at this place."""


class _Part(NamedTuple):
    """A part of a state that the other state has not at its place."""

    path: Path
    node: Node
    with_key: bool
    """Whether the last key of the path belongs to it."""


_BASE64 = re.compile(
    r"data:[^\s,]{0,200};base64,[A-Za-z0-9+/_=%\s-]*"
    r"|(?:[A-Za-z0-9+/_-]{60,}\r?\n){2,}[A-Za-z0-9+/_-]*={0,2}"
    r"|[A-Za-z0-9+/_-]{160,}={0,2}"
)


def binary_ranges(text: str) -> list[tuple[int, int]]:
    """Return the ranges of a text that are bytes in base64: long runs of its alphabet."""
    if len(text) < 20:
        return []
    return [found.span() for found in _BASE64.finditer(text)]


def new_texts(
    new: Node, old: Node | None, source: Source, wanted: Callable[[str], bool] = bool
) -> Iterator[NewText]:
    """Yield the strings of a state that are new against the older one, in their order.

    Of several equal strings, the last ones are new. `wanted` is called with each string that may be
    new; strings for which it returns False are left out. Damaged references in a circle end the
    walk: nothing is read twice.
    """
    walk = _Walk(source)
    found = (each for part in walk.differences(new, old, ()) for each in walk.texts(part))
    texts = (each for each in found if wanted(each.text))
    if old is None:
        for path, _, text in texts:
            yield NewText(path, text, 0, len(text))
        return
    listed = list(texts)
    if not listed:
        return
    gone = [each for each in walk.gone_texts() if wanted(each.text)]
    same = {*listed} & {*gone}
    listed = [each for each in listed if each not in same]
    gone = [each for each in gone if each not in same]
    new_count = Counter(each.text for each in listed)
    left: dict[tuple[Path, bool], str] = {}
    moved: Counter[str] = Counter()
    for path, is_key, text in gone:
        if moved[text] < new_count[text]:
            moved[text] += 1
        else:
            left[path, is_key] = text
    for path, is_key, text in listed:
        if moved[text]:
            moved[text] -= 1
        else:
            before = left.get((path, is_key), "")
            yield NewText(path, text, *_changed(before, text), before)


def _changed(old: str, new: str) -> tuple[int, int]:
    """Return the range of `new` between what both begin with and what both end with."""
    most = min(len(old), len(new))
    low = _equal(most, lambda i, j: old[i:j] == new[i:j])
    back = _equal(
        most - low,
        lambda i, j: old[len(old) - j : len(old) - i] == new[len(new) - j : len(new) - i],
    )
    return low, len(new) - back


def _equal(most: int, same: Callable[[int, int], bool]) -> int:
    """Return the highest n <= most for which same(0, n) is true, by bisection."""
    low = 0
    while low < most:
        middle = (low + most + 1) // 2
        if same(low, middle):
            low = middle
        else:
            most = middle - 1
    return low


def _in_value(value: Any, path: Path) -> Iterator[Text]:
    """Yield the strings in a value."""
    if isinstance(value, str):
        yield Text(path, is_key=False, text=value)
    elif isinstance(value, dict):
        for key, each in value.items():
            if isinstance(key, str):
                yield Text((*path, key), is_key=True, text=key)
            yield from _in_value(each, (*path, key))
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _in_value(each, (*path, index))
    elif isinstance(value, set | frozenset):
        for each in sorted(value, key=repr):
            yield from _in_value(each, path)


def _children(node: Struct) -> dict[Any, Node]:
    if node.kind == DICT:
        return dict(zip(map(values.decode, node.keys), node.children, strict=True))
    return dict(enumerate(node.children))


def _outside(extents: Iterable[Extent], others: Iterable[Extent]) -> list[_Range]:
    """Return the parts of the extents that are not in the others."""
    known: dict[int, IntervalSet] = {}
    for stream, first, count in others:
        known.setdefault(stream, IntervalSet()).add(first, first + count)
    out, at = [], 0
    for stream, first, count in extents:
        for low, high in known.get(stream, IntervalSet()).missing(first, first + count):
            out.append(_Range(at + low - first, stream, low, high))
        at += count
    return out


class _Range(NamedTuple):
    """Items [low, high) of a stream. The first one is item `at` of its list."""

    at: int
    stream: int
    low: int
    high: int


class _Side:
    """One of the two states: what was read of it."""

    def __init__(self) -> None:
        self._items: dict[int, IntervalSet] = {}
        self._whole: set[bytes] = set()

    def unread(self, stream: int, low: int, high: int) -> list[tuple[int, int]]:
        """Return the items that were not asked for before."""
        return self._items.setdefault(stream, IntervalSet()).add(low, high)

    def is_unread(self, digest: bytes) -> bool:
        """Return whether a blob was not asked for before."""
        if digest in self._whole:
            return False
        self._whole.add(digest)
        return True


_PAIRED = 1_000
"""The most items of an older state that are read to compare big new items with them."""


class _Walk:
    """Finds what differs between two states, and the strings in it."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._new, self._old = _Side(), _Side()
        self._gone: list[Iterable[_Part]] = []

    def differences(self, new: Node, old: Node | None, path: Path) -> Iterator[_Part]:
        """Yield the parts of `new` that differ from `old`. Those of `old` are kept for later."""
        if old is None:
            yield _Part(path, new, with_key=False)
        elif new.hash == old.hash:
            return
        elif isinstance(new, Struct) and isinstance(old, Struct) and new.kind == old.kind:
            with FOLLOWING:
                yield from self._in_structs(_children(new), _children(old), path)
        elif isinstance(new, Rope) and isinstance(old, Rope) and new.kind == old.kind != RAW:
            with FOLLOWING:
                yield from self._in_ropes(new, old, path)
        else:
            self._gone.append([_Part(path, old, with_key=False)])
            yield _Part(path, new, with_key=False)

    def _in_structs(
        self, new: dict[Any, Node], old: dict[Any, Node], path: Path
    ) -> Iterator[_Part]:
        for key, child in new.items():
            if key in old:
                yield from self.differences(child, old[key], (*path, key))
            else:
                yield _Part((*path, key), child, with_key=True)
        gone = [(key, child) for key, child in old.items() if key not in new]
        self._gone.append([_Part((*path, key), child, with_key=True) for key, child in gone])

    def _in_ropes(self, new: Rope, old: Rope, path: Path) -> Iterator[_Part]:
        ranges = _outside(old.extents, new.extents)
        before: Iterable[_Part] = self._items(old, path, ranges, self._old)
        by_path: dict[Path, _Part] | None = None
        for part in self._items(new, path, _outside(new.extents, old.extents), self._new):
            if by_path is None and not isinstance(part.node, Leaf):
                few = sum(each.high - each.low for each in ranges) <= _PAIRED
                by_path = {each.path: each for each in before} if few else {}
                before = by_path.values() if few else before
            other = None if isinstance(part.node, Leaf) else (by_path or {}).pop(part.path, None)
            if other is None:
                yield part
            else:
                yield from self.differences(part.node, other.node, part.path)
        self._gone.append(before)

    def _items(self, rope: Rope, path: Path, ranges: list[_Range], side: _Side) -> Iterator[_Part]:
        """Yield items of a list or dict in streams."""
        with_key = rope.kind == DICT
        for first, stream, start, stop in ranges:
            for low, high in side.unread(stream, start, stop):
                index = first + low - start
                for piece in item_streams.pieces(self._source, [(stream, low, high - low)]):
                    for item in piece.items():
                        key: Any = index
                        body = item
                        if with_key:
                            cut = msgpack.string_length(item, 0)
                            key, body = values.decode(item[:cut]), item[cut:]
                        node = parse(body) if piece.refs else Leaf(body)
                        yield _Part((*path, key), node, with_key)
                        index += 1

    def texts(self, part: _Part) -> Iterator[Text]:
        """Yield the strings in a part of the new state."""
        return self._texts(part, self._new)

    def gone_texts(self) -> Iterator[Text]:
        """Yield the strings in the parts of the old state that differ."""
        for parts in self._gone:
            for part in parts:
                yield from self._texts(part, self._old)

    def _texts(self, part: _Part, side: _Side) -> Iterator[Text]:
        path, node, with_key = part
        if with_key and type(path[-1]) is str:
            yield Text(path, is_key=True, text=path[-1])
        if isinstance(node, Struct):
            with_key = node.kind == DICT
            with FOLLOWING:
                for key, child in _children(node).items():
                    yield from self._texts(_Part((*path, key), child, with_key), side)
        elif isinstance(node, Rope) and node.kind != RAW:
            with FOLLOWING:
                for each in self._items(node, path, _outside(node.extents, ()), side):
                    yield from self._texts(each, side)
        elif isinstance(node, Leaf) or side.is_unread(node.hash):
            flat = ropes.flatten(node, self._source)
            yield from _in_value(values.decode_stored(flat), path)
