"""Many sessions at once, with durable appends: in threads, and on one event loop."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import holdfast

from .lab import Lab, Row
from .latency import WARM_UP
from .messages import Message, Writer
from .stores import check_state
from .timing import Ratio, duration, interleave

THREADS, ON_LOOP = 32, 200
BEAT = 0.001

Work = Callable[[], object]


class Threads:
    """A store with a session for each of so many threads."""

    def __init__(self, path: Path, threads: int, *, off: bool = False) -> None:
        self._path = path
        self._store = holdfast.open(path)
        if off:  # as if the disk took no time
            self._store.backend._writer.execute("PRAGMA synchronous=OFF")
        self._sessions = [self._store.session(f"thread-{i}") for i in range(threads)]
        self._given: list[list[Message]] = [[] for _ in self._sessions]
        self._pool = ThreadPoolExecutor(threads)

    def appends(self, messages: list[Message]) -> Work:
        """Append these, the same number in each thread."""
        shares = _deal(messages, self._given)
        return lambda: list(self._pool.map(_append, self._sessions, shares))

    def close(self) -> None:
        self._pool.shutdown()
        self._store.close()
        check_state(self._path, "thread-0", {"messages": self._given[0]})


def _append(session: holdfast.Session, messages: list[Message]) -> None:
    for message in messages:
        session.append("messages", message)


class Loop:
    """A store with so many sessions on one event loop, and how long that stood still."""

    def __init__(self, path: Path, sessions: int, **options: int) -> None:
        self._path, self._options = path, options
        self._runner = asyncio.Runner()
        self._store = self._runner.run(self._open())
        self._sessions = self._runner.run(self._handles(sessions))
        self._given: list[list[Message]] = [[] for _ in self._sessions]
        self.stalls: list[float] = []

    async def _open(self) -> holdfast.AsyncStore:
        return await holdfast.aopen(self._path, **self._options)

    async def _handles(self, count: int) -> list[holdfast.AsyncSession]:
        return [await self._store.session(f"task-{i}") for i in range(count)]

    def appends(self, messages: list[Message]) -> Work:
        """Append these, the same number in each session, all at once."""
        shares = _deal(messages, self._given)
        return lambda: self._runner.run(self._work(shares))

    async def _work(self, shares: list[list[Message]]) -> None:
        late: list[float] = []
        heart = asyncio.ensure_future(_beat(late))
        await asyncio.gather(*map(self._append, self._sessions, shares))
        heart.cancel()
        self.stalls.append(max(late, default=0.0))

    @staticmethod
    async def _append(session: holdfast.AsyncSession, messages: list[Message]) -> None:
        for message in messages:
            await session.append("messages", message)

    def close(self) -> None:
        self._runner.run(self._store.close())
        self._runner.close()
        check_state(self._path, "task-0", {"messages": self._given[0]})


async def _beat(late: list[float]) -> None:
    """How much later than planned the loop comes back to this."""
    while True:
        start = time.perf_counter()
        await asyncio.sleep(BEAT)
        late.append(time.perf_counter() - start - BEAT)


def _deal(messages: list[Message], given: list[list[Message]]) -> list[list[Message]]:
    shares = [messages[i :: len(given)] for i in range(len(given))]
    for all_of_one, share in zip(given, shares, strict=True):
        all_of_one += share
    return shares


@contextmanager
def _compared(**sides: Threads | Loop) -> Iterator[dict[str, Threads | Loop]]:
    try:
        yield sides
    finally:
        for side in sides.values():
            side.close()


def _rates(lab: Lab, counts: dict[str, int], sides: dict[str, Threads | Loop]) -> dict[str, list]:
    """Appends per second of each side in each round."""
    fresh = Writer(30).conversation(10_000_000)

    def some(count: int) -> list[Message]:
        return [next(fresh) for _ in range(count)]

    for name, side in sides.items():
        for _ in range(lab.pick(-(-WARM_UP // counts[name]), 1)):
            side.appends(some(counts[name]))()
    for side in sides.values():
        if isinstance(side, Loop):
            side.stalls.clear()
    arms = {
        name: lambda _, name=name, side=side: side.appends(some(counts[name]))
        for name, side in sides.items()
    }
    taken = interleave(lab.pick(7, 2), **arms)
    return {name: [counts[name] / t for t in series] for name, series in taken.items()}


def _rate(series: list[float]) -> str:
    return f"{statistics.median(series):,.0f}/s"


def threads(lab: Lab) -> list[Row]:
    each = lab.pick(40, 8)
    counts = {"one": 8 * each, "many": THREADS * each, "off": THREADS * each}
    with _compared(
        one=Threads(lab.path("threads-one"), 1),
        many=Threads(lab.path("threads-many"), THREADS),
        off=Threads(lab.path("threads-off"), THREADS, off=True),
    ) as sides:
        rates = _rates(lab, counts, sides)
    gain, share = (Ratio.of(rates["many"], rates[side]) for side in ("one", "off"))
    return [
        lab.row(
            f"{THREADS} threads, a session each, durable `append`s",
            "≥ 3 × one thread, or ≥ 70 % of synchronous=OFF",
            f"{gain} one thread, {share} OFF ({_rate(rates['many'])}; "
            f"one thread {_rate(rates['one'])}; OFF {_rate(rates['off'])})",
            passed=gain.middle >= 3 or share.middle >= 0.7,
        )
    ]


def loop(lab: Lab) -> list[Row]:
    each = lab.pick(8, 2)
    counts = {"threads": THREADS * each * 6, "loop": ON_LOOP * each, "default": ON_LOOP * each}
    loops = {
        "loop": Loop(lab.path("loop-async"), ON_LOOP, workers=THREADS),
        "default": Loop(lab.path("loop-default"), ON_LOOP),
    }
    with _compared(threads=Threads(lab.path("loop-threads"), THREADS), **loops) as sides:
        rates = _rates(lab, counts, sides)
    share, default = (Ratio.of(rates[side], rates["threads"]) for side in loops)
    stalls = [
        max(of_round) for of_round in zip(*(side.stalls for side in loops.values()), strict=True)
    ]
    return [
        lab.row(
            f"{ON_LOOP} sessions on one event loop, {THREADS} workers, durable `append`s",
            f"≥ 80 % of what {THREADS} threads do",
            f"{share} ({_rate(rates['loop'])}; threads {_rate(rates['threads'])}); "
            f"with the default number of workers {default}",
            passed=share.middle >= 0.8,
        ),
        lab.row(
            "Longest time that such a loop stood still",
            "≤ 20 ms",
            f"{duration([max(stalls)])} (in the median round {duration(stalls)})",
            passed=max(stalls) <= 0.02,
        ),
    ]
