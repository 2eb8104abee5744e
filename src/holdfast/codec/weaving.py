"""Extents of a changed rope: those of what stayed, and new ones for what is new.

New items go to one of two streams of the rope: one for growth at the end, one for edits elsewhere,
so that each pattern stays contiguous. A rope that got fragmented all the same is rewritten where
that is cheapest, once its extents have cost as much as its data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.codec import streams
from holdfast.errors import NotSerializable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.codec.nodes import Extent, Rope, Tail
    from holdfast.codec.streams import Writes

MAX_EXTENTS = 64
_EXTENT_BYTES = 6
_REUSE_FROM = 64
_PACKED = 0.4  # what an item's byte costs once packed, roughly


def reuse(old: Sequence[bytes], fresh: Sequence[bytes]) -> list[int | None]:
    """For each fresh item, which old one it equals. Each old one is used once at most.

    (Twice would let two ropes believe that they own the end of one stream.)
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


class Weaver:
    """Builds the extents of a changed rope."""

    def __init__(self, old: Rope | None, out: Writes) -> None:
        self.old, self.out = old, out
        self._tails: list[Tail | None] = [*old.tails, None, None][:2] if old else [None, None]
        self._appenders: list[streams.Appender | None] = [None, None]

    def write(self, items: Sequence[bytes], *, refs: bool, growth: bool) -> Extent:
        slot = 0 if growth else 1
        appender = self._appenders[slot]
        if appender is None:
            appender = self._appenders[slot] = self.out.appender(self._tails[slot])
        if appender.end + len(items) > streams.MAX_ITEMS:
            raise NotSerializable(f"{len(items)} new items in one container are too many")
        return appender.append(items, refs=refs)

    def weave(
        self, before: int, after: int, fresh: Sequence[tuple[int | None, bytes, bool]]
    ) -> tuple[Extent, ...]:
        """`fresh`: per item the old index it stands at, or None and its stored bytes."""
        extents = self.old.extents if self.old else ()
        count = self.old.count if self.old else 0
        runs: list[Sequence[Extent]] = [streams.cut(extents, 0, before)]
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
                runs.append(streams.cut(extents, at, at + j - i))
            i = j
        runs.append(streams.cut(extents, count - after, count))
        return streams.join(*runs)

    def tails(self) -> tuple[Tail, ...]:
        for slot, appender in enumerate(self._appenders):
            if appender is not None:
                self._tails[slot] = self.out.finish(appender)
        growth, edits = self._tails
        if growth is None and edits is not None:
            return (edits._replace(line=-1), edits)  # a place holder: no stream for growth yet
        return tuple([t for t in (growth, edits) if t is not None])

    def tidy(
        self,
        extents: tuple[Extent, ...],
        debt: int,
        sizes: Callable[[], list[int]],
        stored: Callable[[int, int], tuple[list[bytes], bool]],
    ) -> tuple[tuple[Extent, ...], int]:
        """Rewrite a fragmented stretch once its extents have cost as much as its data.

        Either the whole rope or what follows its largest extent, whichever costs less for each
        extent that goes.
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
        return streams.join(extents[:first], [moved]), 0
