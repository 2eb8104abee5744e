"""Say in one line what a checkpoint changed, such as "assistant: Done" or "plan.budget 900 → 850".

Nothing is stored for it. The state is compared with that of the nearest ancestor. At most 16 KB of
values are decoded for one line, however long the conversation is, from rows of at most 128 KB that
neighbours share.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.errors import UNREADABLE
from holdfast.format import item_streams, msgpack, ropes, values
from holdfast.format.msgpack import FOLLOWING
from holdfast.format.nodes import DICT, LIST, RAW, Blob, Leaf, Node, Rope, Struct, parse
from holdfast.format.records import StoredRoot
from holdfast.format.state_paths import dotted
from holdfast.history import lineage
from holdfast.history.checkpoint import record_of
from holdfast.history.diff import common, mirrored
from holdfast.history.message_parts import MessagePart, message_parts, one_line, short
from holdfast.storage.rows import Address

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from holdfast.format.item_streams import Source
    from holdfast.format.nodes import Extent
    from holdfast.history.checkpoint import Checkpoint
    from holdfast.storage.reader import Reader
    from holdfast.storage.repository import Repository

WIDTH = 160
"""Characters of a summary, at most."""
_BUDGET = 16 << 10
_ITEMS = 3
"""How many of several new items are read: the last ones."""
_CHANGES, _LOOKED_AT = 3, 64
"""How many changes a summary lists, and how many are looked at."""
_EMPTY = Struct(DICT, (), ())


class Unread(NamedTuple):
    """Stands for a value that is too big to be read for a summary."""

    size: int

    def __repr__(self) -> str:
        return f"({self.size / 1024:,.0f} KB)" if self.size < 1 << 20 else f"({self.size >> 20} MB)"


class _Change(NamedTuple):
    """A difference at a path. `before` and `after` are lists of values that were removed and added.

    For a list, these are only the last few of `removed` and `added` many.
    """

    path: tuple[Any, ...]
    before: list[Any]
    after: list[Any]
    removed: int = 0
    added: int = 0
    is_list: bool = False


def with_summaries(
    repository: Repository, found: Iterator[Checkpoint], page: int = 10
) -> Iterator[Checkpoint]:
    """Yield checkpoints with their summaries. They are read `page` at a time."""
    while several := [*islice(found, page)]:
        with repository.reader() as reader:
            several = [*Summaries(reader, repository.data(reader)).add(several)]
        yield from several


class Summaries:
    """Makes the summaries of a page of checkpoints. The root of each state is read once."""

    def __init__(self, reader: Reader, source: Source) -> None:
        self._reader, self._source = reader, source
        self._roots: dict[Address, Node] = {}

    def add(self, page: Iterable[Checkpoint]) -> Iterator[Checkpoint]:
        """Yield checkpoints with their summaries."""
        for _, group in groupby(page, lambda c: c.session):
            same = list(group)
            found = self._reader.find_ids(id := record_of(same[0]).id, id, 1)
            session = found[0].session if found else 0
            places = [Address(session, c.seq) for c in same]
            for place, c in zip(places, same, strict=True):
                root = record_of(c).state_hash
                if isinstance(root, StoredRoot) and not c.damaged:
                    self._roots[place] = root.node()
            for place, c in zip(places, same, strict=True):
                yield c.with_summary(self._summary(place, c))

    def _summary(self, place: Address, checkpoint: Checkpoint) -> str:
        if checkpoint.damaged:
            return f"damaged: {one_line(checkpoint.damaged, WIDTH)}"
        try:
            with FOLLOWING:
                before, after = self._before(place, checkpoint), self._root(place)
                line = _line(_Comparison(self._source).changes(before, after, ()))
        except UNREADABLE as e:
            return f"damaged: {one_line(e.message, WIDTH)}"
        return line or _cut(_without_changes(checkpoint), 0)

    def _root(self, place: Address) -> Node:
        if place not in self._roots:
            self._roots[place] = lineage.read_row(self._reader, place).node()
        return self._roots[place]

    def _before(self, place: Address, checkpoint: Checkpoint) -> Node:
        """Return the state of the nearest ancestor that can be read; an empty one if none can."""
        parent = record_of(checkpoint).own_parent
        if parent is not None and not checkpoint.pruned:
            with suppress(*UNREADABLE):
                return self._root(Address(place.session, parent))
        for at, record in lineage.ancestors(self._reader, place):
            if at != place and record.damaged is None:
                return self._root(at)
        return _EMPTY


def _without_changes(checkpoint: Checkpoint) -> str:
    """Return the summary of a checkpoint with the state of its parent."""
    if checkpoint.operation == "fork":
        return f"forked from {one_line(str(checkpoint.parent_session), 80)}"
    if checkpoint.status != "in_progress":
        reason = f": {one_line(checkpoint.reason, WIDTH)}" if checkpoint.reason else ""
        return f"{checkpoint.status}{reason}"
    return "no change"


# -- what to say -----------------------------------------------------------------------------------


def _line(changes: Iterator[_Change]) -> str:
    """Return the line for some changes: that of a message if there is one."""
    found: list[_Change] = []
    for change in changes:
        if line := _conversation(change):
            return line
        if not _is_time(change.path):
            found.append(change)
        if len(found) > _LOOKED_AT:
            break
    found = [c for c in found if not _is_internal(c.path)] or found
    lines = [_plain(change) for change in found[:_CHANGES]]
    return _cut(", ".join(lines), len(found) - len(lines))


def _cut(line: str, more: int) -> str:
    """Return a line that is not too long, with the number of things that it leaves out."""
    count = f" (+{more})" if more else ""
    room = WIDTH - len(count)
    return (line if len(line) <= room else line[: room - 1] + "…") + count


def _is_time(path: tuple[Any, ...]) -> bool:
    """Return whether a path holds a time that changes with each save."""
    return bool(path) and path[-1] in ("created_at", "updated_at", "timestamp")


def _is_internal(path: tuple[Any, ...]) -> bool:
    """Return whether a framework keeps its own data at a path, such as LangGraph's channels."""
    return bool(path) and str(path[0]).startswith(("$", "__", "branch:to:"))


def _conversation(change: _Change) -> str:
    """Return the line for a change of messages; "" if these values are no messages."""
    if change.is_list and change.removed > change.added and any(map(message_parts, change.before)):
        into = f" to {change.added}" if change.added else ""
        return f"compacted {change.removed} messages{into}"
    said = [part for value in change.after for part in message_parts(value)]
    if not said:
        return ""
    line = _say(said, max(change.added - len(change.after), 0))
    return line if change.is_list or not change.before else _cut(f"edited {line}", 0)


def _say(parts: list[MessagePart], more: int) -> str:
    """Return the last call, with its result if that is there, or the last text, of some parts."""
    last = parts[-1]
    spoken = [part for part in parts if part.kind == "text"]
    called = [part for part in parts if part.kind in ("call", "result")]
    if called and last.kind != "text":
        shown = called[-2:] if called[-1].kind == "result" and len(called) > 1 else called
        line = "  ".join(map(str, shown[:_ITEMS]))
        hidden = len(called) - len(shown[:_ITEMS])
    else:
        line, hidden = str((spoken or parts)[-1]), len(spoken) - 1
    return _cut(line, more + max(hidden, 0))


def _plain(change: _Change) -> str:
    where = one_line(dotted(change.path).removeprefix("state."), 60)
    if change.is_list:
        if change.removed and change.added:
            return f"{where}: {change.removed} replaced by {change.added}"
        if change.removed:
            return f"{where}: {change.removed} removed"
        more = f" (+{change.added - 1})" if change.added > 1 else ""
        return f"{where} + {short(change.after[-1])}{more}"
    if not change.after:
        return f"{where} removed"
    if not change.before:
        return f"{where} = {short(change.after[0])}"
    return f"{where} {short(change.before[0], 40)} → {short(change.after[0])}"


# -- a comparison that reads little ----------------------------------------------------------------


class _Comparison:
    """Compares two states, and decodes at most 16 KB of them."""

    def __init__(self, source: Source) -> None:
        self._source, self._left = source, _BUDGET

    def changes(self, a: Node, b: Node, path: tuple[Any, ...]) -> Iterator[_Change]:
        if a.hash == b.hash:
            return
        left, right = self._parts(a), self._parts(b)
        if isinstance(left, dict) and isinstance(right, dict):
            yield from self._dicts(left, right, path)
        elif isinstance(left, list) and isinstance(right, list):
            yield from self._lists(left, right, path)
        elif isinstance(a, Rope) and isinstance(b, Rope) and a.kind == b.kind != RAW:
            yield from self._ropes(a, b, path)
        elif isinstance(b, Rope) and b.kind == LIST and isinstance(left, list):
            yield self._grown(left, b, path)
        elif isinstance(a, Rope) and a.kind == LIST and isinstance(right, list):
            before, after = self._last(a.extents), [*map(self.value, right[-_ITEMS:])]
            yield _Change(path, before, after, a.count, len(right), is_list=True)
        else:
            yield _Change(path, [self.value(a)], [self.value(b)])

    def _grown(self, old: list[Node], new: Rope, path: tuple[Any, ...]) -> _Change:
        """Compare an inline list with a list in a stream, as it becomes when it grows."""
        start = item_streams.cut(new.extents, 0, len(old))
        same = [node.hash for node in ropes.item_nodes(start, self._source)]
        if same == [node.hash for node in old]:
            rest = item_streams.cut(new.extents, len(old), new.count)
            return _Change(path, [], self._last(rest), 0, new.count - len(old), is_list=True)
        before = [*map(self.value, old[-_ITEMS:])]
        return _Change(path, before, self._last(new.extents), len(old), new.count, is_list=True)

    def _parts(self, node: Node) -> dict[bytes, Node] | list[Node] | None:
        """Return the values of a dict by encoded key, or the items of a list, if they are inline.

        Returns None for other values, and for those in streams.
        """
        if isinstance(node, Rope) or (isinstance(node, Blob) and node.size > self._left):
            return None
        found = ropes.as_struct(node, self._source)
        if found is None:
            return None
        if found.kind == DICT:
            return dict(zip(found.keys, found.children, strict=True))
        return list(found.children)

    def _dicts(
        self, a: dict[bytes, Node], b: dict[bytes, Node], path: tuple[Any, ...]
    ) -> Iterator[_Change]:
        for key, node in b.items():
            where = (*path, values.decode(key))
            if key in a:
                yield from self.changes(a[key], node, where)
            else:
                yield from self._added(node, where)
        for key, node in a.items():
            if key not in b:
                yield _Change((*path, values.decode(key)), [self.value(node)], [])

    def _added(self, node: Node, path: tuple[Any, ...]) -> Iterator[_Change]:
        """Yield a new value; of one that contains messages, only these."""
        items = self._parts(node)
        if isinstance(node, Rope) and node.kind == LIST:
            yield _Change(path, [], self._last(node.extents), 0, node.count, is_list=True)
        elif isinstance(items, list) and items:
            yield from self._lists([], items, path)
        else:
            inner = [*self._dicts({}, items, path)] if isinstance(items, dict) else []
            messages = [change for change in inner if any(map(message_parts, change.after))]
            yield from messages or [_Change(path, [], [self.value(node)])]

    def _lists(self, a: list[Node], b: list[Node], path: tuple[Any, ...]) -> Iterator[_Change]:
        start = 0
        while start < min(len(a), len(b)) and a[start].hash == b[start].hash:
            start += 1
        end = 0
        while end < min(len(a), len(b)) - start and a[-1 - end].hash == b[-1 - end].hash:
            end += 1
        removed, added = a[start : len(a) - end], b[start : len(b) - end]
        if len(removed) == len(added) == 1:
            yield from self._item(removed[0], added[0], (*path, start))
        elif removed or added:
            before, after = ([*map(self.value, nodes[-_ITEMS:])] for nodes in (removed, added))
            yield _Change(path, before, after, len(removed), len(added), is_list=True)

    def _item(self, a: Node, b: Node, path: tuple[Any, ...]) -> Iterator[_Change]:
        """Yield the changes of one item. A message is shown as a whole."""
        after = self.value(b)
        if message_parts(after):
            yield _Change(path, [self.value(a)], [after])
        else:
            yield from self.changes(a, b, path)

    def _ropes(self, a: Rope, b: Rope, path: tuple[Any, ...]) -> Iterator[_Change]:
        """Compare two lists or dicts in streams by the addresses of their items."""
        start = common(a.extents, b.extents)
        left = item_streams.cut(a.extents, start, a.count)
        right = item_streams.cut(b.extents, start, b.count)
        end = common(mirrored(left), mirrored(right))
        if end:
            left = item_streams.cut(a.extents, start, a.count - end)
            right = item_streams.cut(b.extents, start, b.count - end)
        removed, added = a.count - start - end, b.count - start - end
        if a.kind == DICT:
            yield from self._dicts(self._entries(left), self._entries(right), path)
        elif removed == added == 1:
            (before,), (after,) = self._nodes(left), self._nodes(right)
            yield from self._item(before, after, (*path, start))
        elif removed or added:
            before_, after_ = self._last(left), self._last(right)
            yield _Change(path, before_, after_, removed, added, is_list=True)

    def _entries(self, extents: Sequence[Extent]) -> dict[bytes, Node]:
        """Return the last few entries of a dict in a stream."""
        found: dict[bytes, Node] = {}
        for item, refs in self._raw(extents):
            cut = msgpack.string_length(item, 0)
            found[item[:cut]] = parse(item[cut:]) if refs else Leaf(item[cut:])
        return found

    def _nodes(self, extents: Sequence[Extent]) -> list[Node]:
        return [parse(item) if refs else Leaf(item) for item, refs in self._raw(extents)]

    def _last(self, extents: Sequence[Extent]) -> list[Any]:
        return [self.value(node) for node in self._nodes(extents)]

    def _raw(self, extents: Sequence[Extent]) -> list[tuple[bytes, bool]]:
        """Return the bytes of the last few items, and whether they may hold references."""
        if not extents:
            return []
        count = sum([n for _, _, n in extents])
        last = item_streams.cut(extents, max(count - _ITEMS, 0), count)
        pieces = item_streams.pieces(self._source, last)
        return [(item, piece.refs) for piece in pieces for item in piece.items()]

    def value(self, node: Node) -> Any:
        """Return a value. Parts of it that are too big are replaced by Unread or cut."""
        if isinstance(node, Rope) and node.kind == RAW:
            return self._start(node)
        if isinstance(node, Rope) or (isinstance(node, Blob) and node.size > self._left):
            return Unread(node.size)
        if isinstance(node, Struct):
            inner = [self.value(child) for child in node.children]
            if node.kind != DICT:
                return inner
            return dict(zip(map(values.decode, node.keys), inner, strict=True))
        self._left -= node.size
        return values.decode_stored(ropes.flatten(node, self._source))

    def _start(self, rope: Rope) -> Any:
        """Return the start of a big text that is stored in fragments."""
        first = item_streams.cut(rope.extents, 0, 1)
        data = b"".join([piece.data for piece in item_streams.pieces(self._source, first)])
        header = rope.header()
        if not header or not msgpack.is_text(header) or len(data) > self._left:
            return Unread(rope.size)
        self._left -= len(data)
        return data.decode("utf-8", "ignore") + "…"
