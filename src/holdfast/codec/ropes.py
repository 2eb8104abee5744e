"""Ropes: lists, dicts and big bytes whose items live in streams.

A rope is a short list of extents over streams. Changing it keeps the extents of what stayed, found
at both ends and, between them, by content; new items are appended to one of two streams: one for
growth at the end, one for edits elsewhere, so that each pattern stays contiguous.
"""

from __future__ import annotations

from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from holdfast.codec import chunks as images
from holdfast.codec import streams, values, wire
from holdfast.codec.depth import FOLLOWING
from holdfast.codec.nodes import (
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
    parse,
)
from holdfast.codec.weaving import Weaver, reuse
from holdfast.errors import Corrupt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast.codec.streams import Source, Writes

FRAGMENT = 2048


# -- reading -------------------------------------------------------------------------------------


def image_of(rope: Rope, source: Source) -> Image:
    """The image of a list or of raw bytes, read back if it is not in memory."""
    image = rope.image
    if image is None:
        items: list[images.Item] = []
        for piece in streams.pieces(source, rope.extents):
            start = 0
            for end in piece.ends:
                stored = piece.data[start : end - piece.base]
                start = end - piece.base
                if piece.refs and rope.kind == LIST:
                    node = parse(stored)
                    items.append(
                        (stored, None) if isinstance(node, Leaf) else (flatten(node, source), node)
                    )
                else:
                    items.append((stored, None))
        image = Image(tuple(images.group(items)))
        _check_size(rope, sum([len(c.data) for c in image.chunks]))
        rope.image = image
    return take_in(rope, image)


def take_in(rope: Rope, image: Image) -> Image:
    """The image of a list, with the items that were appended among the chunks."""
    if image.more is None:
        return image
    runs = []
    known, _, more = image
    while more is not None:
        runs.append(more[1])
        more = more[0]
    items = [item for run in reversed(runs) for item in run]
    everything = images.Match(len(known), len(known), [], [], 0, 0, 0, 0)
    image = Image(images.rebuild(known, everything, items)[1])
    _check_size(rope, sum([len(c.data) for c in image.chunks]))
    rope.image = image
    return image


def entries(rope: Rope, source: Source) -> Struct:
    """The entries of a dict, as nodes."""
    found = rope.entries
    if found is None:
        keys: list[bytes] = []
        children: list[Node] = []
        for piece in streams.pieces(source, rope.extents):
            start = 0
            for end in piece.ends:
                entry = piece.data[start : end - piece.base]
                start = end - piece.base
                cut = wire.string_length(entry, 0)
                keys.append(entry[:cut])
                value = entry[cut:]
                children.append(parse(value) if piece.refs else Leaf(value))
        found = Struct(DICT, tuple(keys), tuple(children))
        _check_size(rope, found.size - len(rope.header()))
        rope.entries = found
    return found


def _check_size(rope: Rope, body: int) -> None:
    if len(rope.header()) + body != rope.size:
        raise Corrupt("a rope's items do not add up to its size")


def flatten(node: Node, source: Source) -> bytes:
    """The canonical encoding of a node."""
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
        return wire.array_header(len(parts)) + b"".join(parts)
    pairs = [b for pair in zip(node.keys, parts, strict=True) for b in pair]
    return wire.map_header(len(parts)) + b"".join(pairs)


# -- writing -------------------------------------------------------------------------------------


def _stored(item: images.Item) -> bytes:
    return item[0] if item[1] is None else item[1].stored


def new_list(items: list[images.Item], size: int, out: Writes) -> Rope:
    """A rope for a list that has none."""
    weaver = Weaver(None, out)
    extents = weaver.weave(0, 0, [(None, _stored(i), i[1] is not None) for i in items])
    image = Image(tuple(images.group(items)))
    digest = chain(None, [h for c in image.chunks for h in c.hashes()])
    return Rope(LIST, len(items), size, digest, extents, weaver.tails(), image=image)


def nodes_between(known: tuple[images.Chunk, ...], m: images.Match, count: int) -> dict[int, Node]:
    """The nodes of the old items that differ, by their place among them."""
    nodes: dict[int, Node] = {}
    at = m.before - len(m.head_items)
    for chunk in known[m.head : m.tail]:
        for i, node in chunk.nodes.items():
            if m.before <= at + i < count - m.after:
                nodes[at + i - m.before] = node
        at += chunk.count
    return nodes


def _between(known: tuple[images.Chunk, ...], m: images.Match) -> list[images.Item]:
    items: list[images.Item] = []
    for i, chunk in enumerate(known[m.head : m.tail]):
        low = len(m.head_items) if i == 0 else 0
        high = chunk.count - (len(m.tail_items) if i == m.tail - m.head - 1 else 0)
        items += chunk.items(low, high)
    return items


def _item_sizes(image: tuple[images.Chunk, ...]) -> list[int]:
    return [b - a for c in image for a, b in zip([0, *c.ends], c.ends, strict=False)]


def _item_range(image: tuple[images.Chunk, ...], start: int, stop: int) -> tuple[list[bytes], bool]:
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
    m: images.Match,
    fresh: list[tuple[Any, bytes]],
    size: int,
    out: Writes,
    node_of: Callable[[Any, bytes, int], Node | None],
) -> Rope:
    """The rope of a list that keeps `m` of `old` and has `fresh` (value, bytes) between.

    `was` is the image of `old` that `m` is about.
    """
    between = _between(was.chunks, m)
    same = reuse([f for f, _ in between], [f for _, f in fresh])
    items: list[images.Item] = []
    woven: list[tuple[int | None, bytes, bool]] = []
    for i, ((value, flat), at) in enumerate(zip(fresh, same, strict=True)):
        if at is None:
            item = (flat, node_of(value, flat, i))
            woven.append((None, _stored(item), item[1] is not None))
        else:
            item = between[at]
            woven.append((m.before + at, b"", False))
        items.append(item)
    weaver = Weaver(old, out)
    extents = weaver.weave(m.before, m.after, woven)
    kept, image = images.rebuild(was.chunks, m, items)
    chains = _chains(was.chains[:kept] if was.chains else (), image)
    digest = chains[-1] if chains else chain(None, ())
    extents, debt = weaver.tidy(
        extents, old.debt, lambda: _item_sizes(image), lambda a, b: _item_range(image, a, b)
    )
    count = m.before + len(items) + m.after
    rope = Rope(
        LIST, count, size, digest, extents, weaver.tails(), debt=debt, image=Image(image, chains)
    )
    _check_size(rope, sum([len(c.data) for c in image]))
    return rope


def _chains(known: tuple[bytes, ...], image: tuple[images.Chunk, ...]) -> tuple[bytes, ...]:
    """The hash of the list up to the end of each chunk, of which the first are known."""
    out = list(known)
    for chunk in image[len(out) :]:
        out.append(chain(out[-1] if out else None, chunk.hashes()))
    return tuple(out)


def _recent(rope: Rope, image: Image | None, tail: tuple[int, int]) -> list[bytes]:
    """Leaves at the end of a rope that are in memory and lie one after the other in its stream.

    `tail` is that stream, and where it ended before the new items.
    """
    stream, first, count = rope.extents[-1]
    if image is None or (stream, first + count) != tail:
        return []
    items: list[images.Item] = []
    known, _, more = image
    while more is not None and len(items) < streams.LOOSE_ITEMS:
        items = more[1] + items
        more = more[0]
    for chunk in reversed(known if more is None else ()):
        if len(items) >= streams.LOOSE_ITEMS:
            break
        items = chunk.items(max(chunk.count - streams.LOOSE_ITEMS, 0), chunk.count) + items
    leaves: list[bytes] = []
    for flat, node in reversed(items[-count:]):
        if node is not None:
            break
        leaves.append(flat)
    return leaves[::-1]


def grow_list(
    old: Rope, items: list[images.Item], out: Writes, expected: int | None = None
) -> Rope:
    """The rope with items added at its end; nothing of it needs to be in memory.

    `expected` is the size that the list must have then, where its encoding is known.
    """
    image = old.image
    appender = out.appender(old.tails[0] if old.tails else None)
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
    """Big bytes in fragments; None if too little of `old` is left to be worth it."""
    start = wire.header_length(flat)
    known = image_of(old, out.source).chunks if old else ()
    m = images.match(known, flat, start, suffix=True)
    parts = list(_fragments(flat, m.start, m.stop))
    between = _between(known, m)
    same = reuse([f for f, _ in between], parts)
    if old is not None:
        written = sum([len(p) for p, at in zip(parts, same, strict=True) if at is None])
        if 2 * written > len(flat):
            return None
    weaver = Weaver(old, out)
    extents = weaver.weave(
        m.before,
        m.after,
        [(None, p, False) if at is None else (m.before + at, b"", False)
         for p, at in zip(parts, same, strict=True)],
    )  # fmt: skip
    _, image = images.rebuild(known, m, [(p, None) for p in parts])
    extents, debt = weaver.tidy(
        extents,
        old.debt if old else 0,
        lambda: _item_sizes(image),
        lambda a, b: _item_range(image, a, b),
    )
    count = m.before + len(parts) + m.after
    rope = Rope(
        RAW, count, len(flat), digest, extents, weaver.tails(),
        debt=debt, head=flat[:start], image=Image(image),
    )  # fmt: skip
    _check_size(rope, sum([len(c.data) for c in image]))
    return rope


def _fragments(flat: bytes, start: int, stop: int) -> Iterator[bytes]:
    """Of text, each ends with a whole character: so it can be shown on its own."""
    while start < stop:
        end = min(start + FRAGMENT, stop)
        if end < stop:
            end -= next((n for n in range(4) if not 0x80 <= flat[end - n] < 0xC0), 0)
        yield flat[start:end]
        start = end


def spill(node: Struct, old: Node | None, out: Writes) -> Rope:
    """A dict too big to lie inline: its entries in a stream."""
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
    weaver = Weaver(rope, out)
    extents = weaver.weave(
        before,
        after,
        [(None, s, True) if at is None else (before + at, b"", False)
         for s, at in zip(fresh, same, strict=True)],
    )  # fmt: skip
    extents, debt = weaver.tidy(
        extents,
        rope.debt if rope else 0,
        lambda: [len(n) for n in new],
        lambda a, b: (new[a:b], True),
    )
    return Rope(
        DICT, len(new), node.size, node.hash, extents, weaver.tails(), debt=debt, entries=node
    )
