"""Runs of numbers, from one on and before another: as a log says them, so of any length."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

Run = tuple[int, int]


def whole(shown: Any) -> int:
    """A number that somebody may have made up."""
    if type(shown) is not int or shown < 0:
        raise ValueError(shown)
    return shown


def outside(runs: list[Run], others: list[Run]) -> list[Run]:
    """What of some numbers is not among others. Whole runs, for they may be of any length."""
    taken = joined([list(each) for each in others])
    ends = [end for _, end in taken]
    out = []
    for low, high in runs:
        for n in range(bisect_right(ends, low), len(taken)):
            begin, end = taken[n]
            if begin >= high:
                break
            if begin > low:
                out.append((low, begin))
            low = end
        if low < high:
            out.append((low, high))
    return out


def joined(runs: list[list[int]]) -> list[list[int]]:
    out: list[list[int]] = []
    for low, high in sorted(runs):
        if out and low <= out[-1][1]:
            out[-1][1] = max(out[-1][1], high)
        else:
            out.append([low, high])
    return out
