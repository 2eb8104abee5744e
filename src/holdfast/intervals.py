"""Sets of whole numbers, stored as intervals [low, high)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable


Run = tuple[int, int]


class IntervalSet:
    """A set of numbers, as disjoint intervals [low, high) in ascending order."""

    def __init__(self, spans: Iterable[tuple[int, int]] = ()) -> None:
        self._lows: list[int] = []
        self._highs: list[int] = []
        for low, high in sorted(spans):
            if self._highs and low <= self._highs[-1]:
                self._highs[-1] = max(self._highs[-1], high)
            elif low < high:
                self._lows.append(low)
                self._highs.append(high)

    @classmethod
    def of(cls, numbers: Iterable[int]) -> IntervalSet:
        runs: list[Run] = []
        for n in sorted(numbers):
            if runs and n <= runs[-1][1]:
                runs[-1] = runs[-1][0], n + 1
            else:
                runs.append((n, n + 1))
        return cls(runs)

    def __contains__(self, n: int) -> bool:
        return bool(self.within(n, n + 1))

    def add(self, low: int, high: int) -> list[tuple[int, int]]:
        """Add an interval. Return the parts of it that were not in the set before."""
        if self._lows and self._lows[-1] <= low <= self._highs[-1]:  # most continue the last one
            end = self._highs[-1]
            self._highs[-1] = max(end, high)
            return [(end, high)] if end < high else []
        first = bisect_left(self._highs, low)
        last = bisect_right(self._lows, high)
        new: list[tuple[int, int]] = []
        at = low
        for a, b in zip(self._lows[first:last], self._highs[first:last], strict=True):
            if at < a:
                new.append((at, min(a, high)))
            at = max(at, b)
        if at < high:
            new.append((at, high))
        if first < last:
            low, high = min(low, self._lows[first]), max(high, self._highs[last - 1])
        self._lows[first:last] = [low]
        self._highs[first:last] = [high]
        return new

    def update(self, other: IntervalSet) -> None:
        """Add all intervals of another set."""
        for span in other.all():
            self.add(*span)

    def all(self) -> list[tuple[int, int]]:
        """Return all intervals, in ascending order."""
        return list(zip(self._lows, self._highs, strict=True))

    def missing(self, low: int, high: int) -> list[tuple[int, int]]:
        """Return the parts of an interval that are not in the set."""
        out = []
        for a, b in [*self.within(low, high), (high, high)]:
            if low < a:
                out.append((low, a))
            low = b
        return out

    def without(self, numbers: Iterable[int]) -> list[tuple[int, int]]:
        """Return the intervals of the set without `numbers`. The set itself does not change."""
        gone = IntervalSet.of(numbers)
        return [part for span in self.all() for part in gone.missing(*span)]

    def within(self, low: int, high: int) -> list[tuple[int, int]]:
        """Return the parts of an interval that are in the set."""
        first, last = bisect_right(self._highs, low), bisect_left(self._lows, high)
        pairs = zip(self._lows[first:last], self._highs[first:last], strict=True)
        return [(max(a, low), min(b, high)) for a, b in pairs]


def whole(shown: Any) -> int:
    """Return `shown` if it is an int of at least 0. Raises ValueError for anything else."""
    if type(shown) is not int or shown < 0:
        raise ValueError(shown)
    return shown


def outside(runs: list[Run], others: list[Run]) -> list[Run]:
    """Return the parts of `runs` that are not in `others`, as intervals [low, high).

    It never expands an interval into its numbers, because one can be of any length.
    """
    taken = IntervalSet(others)
    return [part for run in runs for part in taken.missing(*run)]


def joined(runs: list[list[int]]) -> list[list[int]]:
    """Return the same numbers in ascending intervals, with neighbours and overlaps merged."""
    return [[low, high] for low, high in IntervalSet((low, high) for low, high in runs).all()]
