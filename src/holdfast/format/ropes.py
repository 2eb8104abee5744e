"""Ropes: read them, and build the rope of a changed list, dict or big value.

A changed rope keeps the extents of its unchanged items, and gets new extents for new items. A rope
has two streams: one for growth at the end, one for edits elsewhere, so that each stays contiguous.
A rope that is fragmented anyway is rewritten where that is cheapest, once its extents have cost as
much as its data.
"""

from __future__ import annotations

from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from holdfast.errors import Corrupt, NotSerializable
from holdfast.format import item_streams, list_encodings, msgpack, values
from holdfast.format.list_encodings import Match
from holdfast.format.msgpack import FOLLOWING
from holdfast.format.nodes import (
    CHAIN,
    DICT,
    LIST,
    RAW,
    Blob,
    Image,
    Leaf,
    Node,
    Rope,
    Struct,
    chain,
    node_of,
    parse,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from holdfast.format.item_streams import Source, Writes
    from holdfast.format.nodes import Chunk, Extent, Item, Tail


MAX_EXTENTS = 64
_EXTENT_BYTES = 6
_REUSE_FROM = 64
_PACKED = 0.4  # about how many bytes one byte of an item takes in a pack


def reuse(old: Sequence[bytes], fresh: Sequence[bytes]) -> list[int | None]:
    """Return for each fresh item the index of an equal old item, or None.

    Each old item is used at most once. Otherwise two ropes could both own the end of one stream.
    """
    if not old:
        return [None] * len(fresh)
    places: dict[bytes, list[int]] = {}
    for i in range(len(old) - 1, -1, -1):
        if len(old[i]) >= _REUSE_FROM:
            places.setdefault(old[i], []).append(i)
    found: list[int | None] = []
    for item in fresh:
        at = places.get(item)
        found.append(at.pop() if at else None)
    return found


class RopeBuilder:
    """Builds the extents and the tails of a changed rope."""

    def __init__(self, old: Rope | None, out: Writes) -> None:
        self.old, self.out = old, out
        self._tails: list[Tail | None] = [*old.tails, None, None][:2] if old else [None, None]
        self._appenders: list[item_streams.Appender | None] = [None, None]

    def write(self, items: Sequence[bytes], *, refs: bool, growth: bool) -> Extent:
        """Append items to the stream for growth or for edits, and return their extent."""
        slot = 0 if growth else 1
        appender = self._appenders[slot]
        if appender is None:
            appender = self._appenders[slot] = self.out.appender(self._tails[slot], len(items))
        if appender.end + len(items) > item_streams.MAX_ITEMS:
            raise NotSerializable(f"{len(items)} new items in one container are too many")
        return appender.append(items, refs=refs)

    def splice(
        self,
        before: int,
        after: int,
        fresh: Sequence[tuple[int | None, bytes, bool]],
        sizes: Callable[[], list[int]],
        stored: Callable[[int, int], tuple[list[bytes], bool]],
    ) -> tuple[tuple[Extent, ...], tuple[Tail, ...], int]:
        """Write the new items of a changed rope. Return its extents, its tails and its debt.

        `sizes` returns the sizes of all its items. `stored` returns some of them as stored, and
        whether these hold references. Both are called only if the rope is fragmented.
        """
        extents = self.extents(before, after, fresh)
        debt = self.old.debt if self.old else 0
        extents, debt = self.compact(extents, debt, sizes, stored)
        return extents, self.tails(), debt

    def extents(
        self, before: int, after: int, fresh: Sequence[tuple[int | None, bytes, bool]]
    ) -> tuple[Extent, ...]:
        """Return the extents of the changed rope, and write its new items.

        The first `before` and the last `after` items stay. `fresh` are the items between: each has
        an index in the old rope, or None; its stored bytes; and whether these hold references.
        """
        extents = self.old.extents if self.old else ()
        count = self.old.count if self.old else 0
        runs: list[Sequence[Extent]] = [item_streams.cut(extents, 0, before)]
        i = 0
        while i < len(fresh):
            at = fresh[i][0]
            j = i + 1
            if at is None:
                while j < len(fresh) and fresh[j][0] is None:
                    j += 1
                growth = after == 0 and j == len(fresh)
                refs = any(r for _, _, r in fresh[i:j])
                runs.append([self.write([s for _, s, _ in fresh[i:j]], refs=refs, growth=growth)])
            else:
                while j < len(fresh) and fresh[j][0] == at + j - i:
                    j += 1
                runs.append(item_streams.cut(extents, at, at + j - i))
            i = j
        runs.append(item_streams.cut(extents, count - after, count))
        return item_streams.join(*runs)

    def tails(self) -> tuple[Tail, ...]:
        """Finish the streams, and return the tails of the rope: for growth, then for edits."""
        for slot, appender in enumerate(self._appenders):
            if appender is not None:
                self._tails[slot] = self.out.finish(appender)
        growth, edits = self._tails
        if growth is None and edits is not None:
            return (edits._replace(line=-1), edits)  # a placeholder: no stream for growth yet
        return tuple([t for t in (growth, edits) if t is not None])

    def compact(
        self,
        extents: tuple[Extent, ...],
        debt: int,
        sizes: Callable[[], list[int]],
        stored: Callable[[int, int], tuple[list[bytes], bool]],
    ) -> tuple[tuple[Extent, ...], int]:
        """Rewrite fragmented items once the extents have cost as much as the data.

        It rewrites the whole rope, or only the part after its largest extent, whichever costs less
        per extent that is removed. Returns the extents, and their cost since the last rewrite.
        """
        debt += _EXTENT_BYTES * len(extents)
        if len(extents) <= MAX_EXTENTS:
            return extents, debt if len(extents) > 1 else 0
        lengths = sizes()
        total, best, at, start = 0, 0, 0, 0
        starts: list[tuple[int, int]] = []
        for _, _, n in extents:
            starts.append((at, total))
            size = sum(lengths[at : at + n])
            if size > best:
                best, start = size, len(starts)
            at, total = at + n, total + size
        first = 0
        cost = total
        if start < len(extents) - MAX_EXTENTS // 2:
            tail_cost = total - starts[start][1]
            if tail_cost * len(extents) < total * (len(extents) - start):
                first, cost = start, tail_cost
        if debt < cost * _PACKED:
            return extents, debt
        items, refs = stored(starts[first][0], at)
        moved = self.write(items, refs=refs, growth=True)
        return item_streams.join(extents[:first], [moved]), 0


FRAGMENT = 2048


# -- reading -------------------------------------------------------------------------------------


def image_of(rope: Rope, source: Source) -> Image:
    """Return the image of a list or of raw bytes. Reads it if it is not in memory."""
    image = rope.image
    if image is None:
        items: list[Item] = []
        for piece in item_streams.pieces(source, rope.extents):
            for stored in piece.items():
                if piece.refs and rope.kind == LIST:
                    node = parse(stored)
                    items.append(
                        (stored, None) if isinstance(node, Leaf) else (flatten(node, source), node)
                    )
                else:
                    items.append((stored, None))
        image = Image(tuple(list_encodings.group(items)))
        _check_size(rope, sum([len(c.data) for c in image.chunks]))
        rope.image = image
    return take_in(rope, image)


def take_in(rope: Rope, image: Image) -> Image:
    """Return the image of a list, with the appended items moved into its chunks."""
    if image.more is None:
        return image
    runs = []
    known, _, more = image
    while more is not None:
        runs.append(more[1])
        more = more[0]
    items = [item for run in reversed(runs) for item in run]
    everything = Match(len(known), len(known), [], [], 0, 0, 0, 0)
    image = Image(list_encodings.rebuild(known, everything, items)[1])
    _check_size(rope, sum([len(c.data) for c in image.chunks]))
    rope.image = image
    return image


def item_nodes(extents: Sequence[Extent], source: Source) -> Iterator[Node]:
    """Yield the items in some extents of a list as nodes."""
    for piece in item_streams.pieces(source, extents):
        for item in piece.items():
            yield parse(item) if piece.refs else Leaf(item)


def entries(rope: Rope, source: Source) -> Struct:
    """Return the entries of a dict as nodes. Reads them if they are not in memory."""
    found = rope.entries
    if found is None:
        keys: list[bytes] = []
        children: list[Node] = []
        for piece in item_streams.pieces(source, rope.extents):
            for entry in piece.items():
                cut = msgpack.string_length(entry, 0)
                keys.append(entry[:cut])
                value = entry[cut:]
                children.append(parse(value) if piece.refs else Leaf(value))
        found = Struct(DICT, tuple(keys), tuple(children))
        _check_size(rope, found.size - len(rope.header()))
        rope.entries = found
    return found


def as_struct(node: Node, source: Source) -> Struct | None:
    """Return a dict or an inline list as a Struct, whatever its layout.

    Returns None for a list in streams, a dict with other keys than text, and any other value.
    """
    if isinstance(node, Struct):
        return node
    if isinstance(node, Rope) and node.kind != RAW:
        return entries(node, source) if node.kind == DICT else None
    flat = flatten(node, source)
    if not (msgpack.is_map(flat) or msgpack.is_array(flat)):
        return None
    value = values.decode_stored(flat, values.keep_tags)
    if type(value) is dict:
        keys = tuple([values.encode(key) for key in value])
        return Struct(DICT, keys, tuple([node_of(values.encode(v)) for v in value.values()]))
    return Struct(LIST, (), tuple([node_of(values.encode(v)) for v in value]))


def _check_size(rope: Rope, body: int) -> None:
    """Raise Corrupt if the items do not have the size that the rope declares."""
    if len(rope.header()) + body != rope.size:
        raise Corrupt("a rope's items do not add up to its size")


def flatten(node: Node, source: Source) -> bytes:
    """Return the canonical encoding of a node, with all references read."""
    if isinstance(node, Leaf):
        return node.flat
    if isinstance(node, Blob):
        return node.flat or source.blob(node.hash, node.size)
    if isinstance(node, Rope):
        with FOLLOWING:
            if node.kind == DICT:
                return flatten(entries(node, source), source)
            return node.header() + b"".join([c.data for c in image_of(node, source).chunks])
    parts = [flatten(c, source) for c in node.children]
    if node.kind == LIST:
        return msgpack.array_header(len(parts)) + b"".join(parts)
    pairs = [b for pair in zip(node.keys, parts, strict=True) for b in pair]
    return msgpack.map_header(len(parts)) + b"".join(pairs)


# -- writing -------------------------------------------------------------------------------------


def _stored(item: Item) -> bytes:
    return item[0] if item[1] is None else item[1].stored


def new_list(items: list[Item], size: int, out: Writes) -> Rope:
    """Return a new rope for a list that has none."""
    builder = RopeBuilder(None, out)
    extents = builder.extents(0, 0, [(None, _stored(i), i[1] is not None) for i in items])
    image = Image(tuple(list_encodings.group(items)))
    digest = chain(None, [h for c in image.chunks for h in c.hashes()])
    return Rope(LIST, len(items), size, digest, extents, builder.tails(), image=image)


def nodes_between(known: tuple[Chunk, ...], m: Match, count: int) -> dict[int, Node]:
    """Return the nodes of the old items that differ, by their index among these."""
    nodes: dict[int, Node] = {}
    at = m.before - len(m.head_items)
    for chunk in known[m.head : m.tail]:
        for i, node in chunk.nodes.items():
            if m.before <= at + i < count - m.after:
                nodes[at + i - m.before] = node
        at += chunk.count
    return nodes


def _between(known: tuple[Chunk, ...], m: Match) -> list[Item]:
    """Return the old items that differ."""
    items: list[Item] = []
    for i, chunk in enumerate(known[m.head : m.tail]):
        low = len(m.head_items) if i == 0 else 0
        high = chunk.count - (len(m.tail_items) if i == m.tail - m.head - 1 else 0)
        items += chunk.items(low, high)
    return items


def _item_sizes(image: tuple[Chunk, ...]) -> list[int]:
    return [b - a for c in image for a, b in zip([0, *c.ends], c.ends, strict=False)]


def _item_range(image: tuple[Chunk, ...], start: int, stop: int) -> tuple[list[bytes], bool]:
    """Return items [start, stop) of an image as stored, and whether some hold references."""
    items: list[bytes] = []
    refs = False
    at = 0
    for chunk in image:
        low, high = max(start - at, 0), min(stop - at, chunk.count)
        if low < high:
            items += [_stored(i) for i in chunk.items(low, high)]
            refs = refs or bool(chunk.nodes)
        at += chunk.count
    return items, refs


def splice_list(
    old: Rope,
    was: Image,
    m: Match,
    fresh: list[tuple[Any, bytes]],
    size: int,
    out: Writes,
    node_of: Callable[[Any, bytes, int], Node | None],
) -> Rope:
    """Return the rope of a list that keeps the common ends `m` of `old`, with `fresh` between.

    `fresh` are pairs of a value and its bytes. `was` is the image of `old` that `m` refers to.
    """
    between = _between(was.chunks, m)
    same = reuse([f for f, _ in between], [f for _, f in fresh])
    items: list[Item] = []
    changed: list[tuple[int | None, bytes, bool]] = []
    for i, ((value, flat), at) in enumerate(zip(fresh, same, strict=True)):
        if at is None:
            item = (flat, node_of(value, flat, i))
            changed.append((None, _stored(item), item[1] is not None))
        else:
            item = between[at]
            changed.append((m.before + at, b"", False))
        items.append(item)
    kept, image = list_encodings.rebuild(was.chunks, m, items)
    chains = _chains(was.chains[:kept] if was.chains else (), image)
    digest = chains[-1] if chains else chain(None, ())
    extents, tails, debt = RopeBuilder(old, out).splice(
        m.before, m.after, changed, partial(_item_sizes, image), partial(_item_range, image)
    )
    count = m.before + len(items) + m.after
    rope = Rope(LIST, count, size, digest, extents, tails, debt=debt, image=Image(image, chains))
    _check_size(rope, sum([len(c.data) for c in image]))
    return rope


def _chains(known: tuple[bytes, ...], image: tuple[Chunk, ...]) -> tuple[bytes, ...]:
    """Return the hash of the list up to the end of each chunk. The first ones are `known`."""
    out = list(known)
    for chunk in image[len(out) :]:
        out.append(chain(out[-1] if out else None, chunk.hashes()))
    return tuple(out)


def _recent(rope: Rope, image: Image | None, tail: tuple[int, int]) -> list[bytes]:
    """Return the last items of a rope, as far as they are leaves in memory.

    They are consecutive in the stream. `tail` is that stream, and its end before the new items.
    """
    stream, first, count = rope.extents[-1]
    if image is None or (stream, first + count) != tail:
        return []
    items: list[Item] = []
    known, _, more = image
    while more is not None and len(items) < item_streams.LOOSE_ITEMS:
        items = more[1] + items
        more = more[0]
    for chunk in reversed(known if more is None else ()):
        if len(items) >= item_streams.LOOSE_ITEMS:
            break
        items = chunk.items(max(chunk.count - item_streams.LOOSE_ITEMS, 0), chunk.count) + items
    leaves: list[bytes] = []
    for flat, node in reversed(items[-count:]):
        if node is not None:
            break
        leaves.append(flat)
    return leaves[::-1]


def grow_list(old: Rope, items: list[Item], out: Writes, expected: int | None = None) -> Rope:
    """Return the rope with items added at its end. The old items need not be in memory.

    `expected` is the size of the whole encoded list, if known. Raises Corrupt if the size differs.
    """
    image = old.image
    appender = out.appender(old.tails[0] if old.tails else None, len(items))
    appender.recent = partial(_recent, old, image, (appender.stream, appender.end))
    stored, refs, size, digest = [], False, old.size, old.hash
    for flat, node in items:
        size += len(flat)
        if node is None:
            stored.append(flat)
            digest = sha256(CHAIN + digest + sha256(flat).digest()).digest()
        else:
            refs = True
            stored.append(node.stored)
            digest = sha256(CHAIN + digest + node.hash).digest()
    extent = appender.append(stored, refs=refs)
    if size > values.MAX_VALUE:
        raise values.too_big(size)
    count = old.count + len(items)
    if count >= 16 > old.count or count >= 1 << 16 > old.count:
        size += 2
    if expected not in (None, size):
        raise Corrupt("a list's image is not what was saved before")
    tails = (out.finish(appender), *old.tails[1:])
    *before, last = old.extents
    if last[0] == extent[0] and last[1] + last[2] == extent[1]:
        before.append((last[0], last[1], last[2] + extent[2]))
    else:
        before += (last, extent)
    if image is not None:
        image = Image(image.chunks, None, (image.more, items))
    return Rope(
        LIST, count, size, digest, tuple(before), tails, debt=old.debt, image=image
    )  # fmt: skip


def raw(flat: bytes, digest: bytes, old: Rope | None, out: Writes) -> Rope | None:
    """Return a rope of fragments for big bytes; None if more than half would be written again."""
    start = msgpack.header_length(flat)
    known = image_of(old, out.source).chunks if old else ()
    m = list_encodings.match(known, flat, start, suffix=True)
    parts = list(_fragments(flat, m.start, m.stop))
    between = _between(known, m)
    same = reuse([f for f, _ in between], parts)
    if old is not None:
        written = sum([len(p) for p, at in zip(parts, same, strict=True) if at is None])
        if 2 * written > len(flat):
            return None
    _, image = list_encodings.rebuild(known, m, [(p, None) for p in parts])
    extents, tails, debt = RopeBuilder(old, out).splice(
        m.before,
        m.after,
        _changed(m.before, parts, same, refs=False),
        partial(_item_sizes, image),
        partial(_item_range, image),
    )
    count = m.before + len(parts) + m.after
    rope = Rope(
        RAW, count, len(flat), digest, extents, tails,
        debt=debt, head=flat[:start], image=Image(image),
    )  # fmt: skip
    _check_size(rope, sum([len(c.data) for c in image]))
    return rope


def _changed(
    before: int, fresh: Sequence[bytes], same: Sequence[int | None], *, refs: bool
) -> list[tuple[int | None, bytes, bool]]:
    """Return new items as `splice` takes them. `same` has the old items that equal them, if any."""
    return [
        (None, item, refs) if at is None else (before + at, b"", False)
        for item, at in zip(fresh, same, strict=True)
    ]


def _fragments(flat: bytes, start: int, stop: int) -> Iterator[bytes]:
    """Yield fragments. Those of text end with a whole character, so each can be shown alone."""
    while start < stop:
        end = min(start + FRAGMENT, stop)
        if end < stop:
            end -= next((n for n in range(4) if not 0x80 <= flat[end - n] < 0xC0), 0)
        yield flat[start:end]
        start = end


def spill(node: Struct, old: Node | None, out: Writes) -> Rope:
    """Return the rope of a dict that is too big to be stored inline."""
    if node.size > values.MAX_VALUE:
        raise values.too_big(node.size)
    rope = old if isinstance(old, Rope) and old.kind == DICT else None
    known = entries(rope, out.source) if rope else None
    new = [k + c.stored for k, c in zip(node.keys, node.children, strict=True)]
    was = [k + c.stored for k, c in zip(known.keys, known.children, strict=True)] if known else []
    before = 0
    while before < min(len(new), len(was)) and new[before] == was[before]:
        before += 1
    if rope is not None and before == len(new) == len(was):
        rope.entries = node
        return rope
    after = 0
    while after < min(len(new), len(was)) - before and new[-1 - after] == was[-1 - after]:
        after += 1
    fresh = new[before : len(new) - after]
    same = reuse(was[before : len(was) - after], fresh)
    extents, tails, debt = RopeBuilder(rope, out).splice(
        before,
        after,
        _changed(before, fresh, same, refs=True),
        lambda: [len(n) for n in new],
        lambda a, b: (new[a:b], True),
    )
    return Rope(DICT, len(new), node.size, node.hash, extents, tails, debt=debt, entries=node)
