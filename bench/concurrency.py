"""Durable appends to many sessions at once, in threads and on one event loop."""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import holdfast

from .lab import Lab, Row
from .latency import WARM_UP
from .messages import Message, Writer
from .stores import check_state, open_store
from .timing import Arm, Ratio, duration, interleave

THREADS, ON_LOOP = 32, 200
BEAT, STALL = 0.001, 0.02

Work = Callable[[], object]
Shares = list[list[Message]]


class Pulse:
    """Measures how long an event loop is blocked while it does some work.

    A task wakes up every `BEAT` seconds. `worst` holds its longest delay in each round. `busy` is
    the longest time that the loop's own thread computed between two beats. If `worst` is much
    longer, the machine was busy, or another thread held the interpreter's lock.
    """

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.worst: list[float] = []
        self.busy = 0.0

    async def during(self, work: Awaitable[object]) -> None:
        late: list[float] = []
        beats = asyncio.ensure_future(self._beat(late))
        await work
        await asyncio.sleep(2 * BEAT)  # so that a late beat still counts
        beats.cancel()
        self.worst.append(max(late))

    async def _beat(self, late: list[float]) -> None:
        while True:
            start, computed = time.perf_counter(), time.thread_time()
            await asyncio.sleep(BEAT)
            late.append(time.perf_counter() - start - BEAT)
            self.busy = max(self.busy, time.thread_time() - computed)

    def __str__(self) -> str:
        return f"{duration([max(self.worst)])} (in the median round {duration(self.worst)})"


class Side(Protocol):
    pulse: Pulse

    def appends(self, messages: list[Message]) -> Work:
        """Return a call that appends the messages, the same number to each session."""
        ...

    def watched(self, messages: list[Message]) -> Work:
        """Return the same call, measured by `pulse` at the same time."""
        ...

    def close(self) -> None: ...


class Threads:
    """A pool of threads that append to the sessions of one store.

    `watched` serves as a control, because the event loop takes no part in the appends.
    """

    def __init__(self, path: Path, sessions: int, *, off: bool = False) -> None:
        self._path = path
        self._store = open_store(path)
        if off:  # imitates a disk that takes no time
            self._store._repository.backend._writer.execute("PRAGMA synchronous=OFF")  # type: ignore[attr-defined]
        self._sessions = [self._store.session(f"session-{i}") for i in range(sessions)]
        self._first: list[Message] = []
        self._pool = ThreadPoolExecutor(min(sessions, THREADS))
        self.pulse = Pulse()

    def appends(self, messages: list[Message]) -> Work:
        shares = _deal(messages, len(self._sessions))
        self._first += shares[0]
        return lambda: list(self._pool.map(_append, self._sessions, shares))

    def watched(self, messages: list[Message]) -> Work:
        work = self.appends(messages)
        return lambda: self.pulse.runner.run(self._watch(work))

    async def _watch(self, work: Work) -> None:
        await self.pulse.during(asyncio.to_thread(work))

    def close(self) -> None:
        self.pulse.runner.close()
        self._pool.shutdown()
        self._store.close()
        check_state(self._path, "session-0", {"messages": self._first})


def _append(session: holdfast.Session, messages: list[Message]) -> None:
    for message in messages:
        session.append("messages", message)


class Loop:
    """Tasks on one event loop that append to the sessions of one store."""

    def __init__(self, path: Path, sessions: int) -> None:
        self._path = path
        self.pulse = Pulse()
        self._run = self.pulse.runner.run
        self._store = self._run(self._open())
        self._sessions = self._run(self._handles(sessions))
        self._first: list[Message] = []

    async def _open(self) -> holdfast.AsyncStore:
        return await holdfast.aopen(self._path)

    async def _handles(self, count: int) -> list[holdfast.AsyncSession]:
        return [await self._store.session(f"session-{i}") for i in range(count)]

    def appends(self, messages: list[Message]) -> Work:
        shares = _deal(messages, len(self._sessions))
        self._first += shares[0]
        return lambda: self._run(self._work(shares))

    def watched(self, messages: list[Message]) -> Work:
        shares = _deal(messages, len(self._sessions))
        self._first += shares[0]
        return lambda: self._run(self.pulse.during(self._work(shares)))

    async def _work(self, shares: Shares) -> None:
        await asyncio.gather(*map(self._append, self._sessions, shares))

    @staticmethod
    async def _append(session: holdfast.AsyncSession, messages: list[Message]) -> None:
        for message in messages:
            await session.append("messages", message)

    def close(self) -> None:
        self._run(self._store.close())
        self.pulse.runner.close()
        check_state(self._path, "session-0", {"messages": self._first})


def _deal(messages: list[Message], sessions: int) -> Shares:
    gc.freeze()  # keep the cyclic gc from scanning the messages while the loop is measured
    return [messages[i::sessions] for i in range(sessions)]


class Contest:
    """Runs several sides in turn. `counts` says how many messages each of them appends."""

    def __init__(self, lab: Lab, counts: dict[str, int], sides: Mapping[str, Side]) -> None:
        self._counts, self._sides = counts, sides
        self._rounds = lab.pick(15, 2)
        self._fresh = Writer(30).conversation(10_000_000)
        for name, side in sides.items():
            for _ in range(lab.pick(-(-WARM_UP // counts[name]), 1)):
                side.appends(self._some(name))()

    def _some(self, name: str) -> list[Message]:
        return [next(self._fresh) for _ in range(self._counts[name])]

    def _arm(self, name: str, work: Callable[[list[Message]], Work]) -> Arm:
        return lambda _: work(self._some(name))

    def rates(self) -> dict[str, list[float]]:
        """Return the appends per second of each side, by round."""
        arms = {name: self._arm(name, side.appends) for name, side in self._sides.items()}
        taken = interleave(self._rounds, **arms)
        return {name: [self._counts[name] / t for t in series] for name, series in taken.items()}

    def watch(self, rest: float) -> Pulse:
        """Repeat the rounds and measure the loops. Return the pulse of an idle loop."""
        idle = Pulse()
        arms = {name: self._arm(name, side.watched) for name, side in self._sides.items()}
        arms["idle"] = lambda _: lambda: idle.runner.run(idle.during(asyncio.sleep(rest)))
        interleave(self._rounds, **arms)
        idle.runner.close()
        return idle


@contextmanager
def _contest(lab: Lab, counts: dict[str, int], sides: Mapping[str, Side]) -> Iterator[Contest]:
    try:
        yield Contest(lab, counts, sides)
    finally:
        for side in sides.values():
            side.close()


def _rate(series: list[float]) -> str:
    return f"{statistics.median(series):,.0f}/s"


def _share(ratio: Ratio) -> str:
    return f"{ratio.middle:.0%} ({ratio.low:.0%}–{ratio.high:.0%})"


def threads(lab: Lab) -> list[Row]:
    each = lab.pick(40, 8)
    counts = {"one": 8 * each, "many": THREADS * each, "off": THREADS * each}
    sides = {
        "one": Threads(lab.path("threads-one"), 1),
        "many": Threads(lab.path("threads-many"), THREADS),
        "off": Threads(lab.path("threads-off"), THREADS, off=True),
    }
    with _contest(lab, counts, sides) as contest:
        rates = contest.rates()
    gain, share = (Ratio.of(rates["many"], rates[side]) for side in ("one", "off"))
    return [
        lab.row(
            f"{THREADS} threads, a session each, durable `append`s",
            "≥ 3 × the rate of one thread, or ≥ 70 % of their rate with `synchronous=OFF`",
            f"{gain} one thread; {_share(share)} of OFF ({_rate(rates['many'])}; "
            f"one thread {_rate(rates['one'])}; OFF {_rate(rates['off'])})",
            passed=gain.middle >= 3 or share.middle >= 0.7,
        )
    ]


def loop(lab: Lab) -> list[Row]:
    ours = Loop(lab.path("loop"), ON_LOOP)
    control = Threads(lab.path("loop-threads"), ON_LOOP)
    sides: dict[str, Side] = {"ours": ours, "threads": control}
    with _contest(lab, dict.fromkeys(sides, ON_LOOP * lab.pick(8, 2)), sides) as contest:
        rates = contest.rates()
        idle = contest.watch(lab.pick(0.4, 0.1))
    share = Ratio.of(rates["ours"], rates["threads"])
    # If an unrelated loop was blocked as long, the cause is the machine, not holdfast.
    quiet = max(*control.pulse.worst, *idle.worst) <= STALL
    still = max(ours.pulse.worst) > STALL
    return [
        lab.row(
            f"{ON_LOOP} sessions on one event loop, durable `append`s",
            f"≥ 80 % of the rate of {THREADS} threads with as many sessions",
            f"{_share(share)} ({_rate(rates['ours'])}; threads {_rate(rates['threads'])})",
            passed=share.middle >= 0.8,
        ),
        lab.row(
            "Longest time that this event loop was blocked",
            "≤ 20 ms; not judged if a loop without holdfast was blocked as long",
            f"{ours.pulse}, with at most {duration([ours.pulse.busy])} of computing at a time; "
            f"a loop next to the threads {control.pulse}; an idle loop {idle}",
            passed=None if still and not quiet else not still,
        ),
    ]
