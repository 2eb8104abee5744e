"""Timing of several operations in turn, and ratios between them."""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# An arm prepares round i untimed and returns the operation to be timed.
Arm = Callable[[int], Callable[[], object]]


def interleave(rounds: int, **arms: Arm) -> dict[str, list[float]]:
    """Return the seconds of each arm, by round.

    All arms run in every round, in rotating order, so that a slow moment affects all of them.
    """
    names = list(arms)
    taken: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.freeze()  # the cyclic gc does not scan the data of the benchmark itself
    try:
        for i in range(rounds):
            turn = i % len(names)
            for name in names[turn:] + names[:turn]:
                taken[name].append(seconds(arms[name](i)))
    finally:
        gc.unfreeze()
    _warn_if_scattered(taken)
    return taken


def _warn_if_scattered(taken: dict[str, list[float]]) -> None:
    """Warn if times vary widely: on a busy disk, the ratios mean little."""
    for name, series in taken.items():
        if len(series) < 4:
            continue
        low, _, high = statistics.quantiles(series, n=4)
        if high > 2 * low:
            spread = f"{duration([low])} to {duration([high])}"
            print(f"  busy machine? the middle half of {name!r} took {spread}", file=sys.stderr)


def seconds(operation: Callable[[], object]) -> float:
    start = time.perf_counter()
    result = operation()
    taken = time.perf_counter() - start
    del result  # the result is freed after the timing
    return taken


def added(*series: Sequence[float]) -> list[float]:
    """Return the sum of several arms, round by round."""
    return [sum(values) for values in zip(*series, strict=True)]


@dataclass(frozen=True)
class Ratio:
    """The time of one arm divided by that of another: median and range over blocks of rounds."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, series: Sequence[float], base: Sequence[float], blocks: int = 5) -> Ratio:
        size = max(1, len(series) // blocks)
        ratios = sorted(
            statistics.median(series[i : i + size]) / statistics.median(base[i : i + size])
            for i in range(0, size * (len(series) // size), size)
        )
        return cls(statistics.median(ratios), ratios[0], ratios[-1])

    def __str__(self) -> str:
        return f"{number(self.middle)} × ({number(self.low)}–{number(self.high)})"


def number(value: float) -> str:
    """Format a number with about three significant digits: 0.044, 1.23, 12.3, 1234."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def duration(series: Sequence[float]) -> str:
    """Format the median, in a suitable unit."""
    middle = statistics.median(series)
    if middle >= 1:
        return f"{middle:.1f} s"
    return f"{number(middle * 1e3)} ms" if middle >= 1e-3 else f"{middle * 1e6:.0f} µs"
