"""Power loss by enumeration: every moment of a real run, every legal subset of unsynced changes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from . import tracing
from .checking import findings, scratch
from .disk import (
    ROOT,
    WHOLE,
    Change,
    Choice,
    Directories,
    Disk,
    Event,
    Resize,
    Said,
    State,
    Sync,
    Write,
)
from .journal import FLEETING, Journal
from .ledger import Ledger
from .workload import Backend, url_of

EXHAUSTIVE = 6  # up to so many pending changes, every subset comes before most that is torn
FEW = 4  # with fewer states than that at a moment, the kinds of choices take turns
STALE = 40  # so many known states in a row, and a moment is exhausted
LOADS = 12  # acknowledged checkpoints that are loaded and compared in each state
_usual = partial(findings, loads=LOADS)


@dataclass(frozen=True)
class Recording:
    """What a writer did to the disk, and what it said in between."""

    events: tuple[Event, ...]
    files: dict[str, bytes]  # what the run really left behind
    backend: Backend = "sqlite"

    def without_directory_syncs(self) -> Recording:
        return self._without(lambda sync: sync.inode <= ROOT)

    def without_file_syncs(self) -> Recording:
        return self._without(lambda sync: sync.inode > ROOT)

    def _without(self, lost: Callable[[Sync], bool]) -> Recording:
        kept = [e for e in self.events if not (isinstance(e, Sync) and lost(e))]
        return replace(self, events=tuple(kept))


@dataclass
class Report:
    points: int = 0
    states: int = 0
    failures: int = 0
    lost: int = 0  # failures in which something acknowledged is lost or another
    spent: int = 0  # points at which there was nothing new any more
    mixed: int = 0  # states with some changes, and without others
    torn: int = 0  # those with a part of a write
    examples: list[str] = field(default_factory=list)

    def is_of(self, states: int) -> bool:
        """Whether about so many were tried, or all that there are."""
        return self.states >= states * 3 // 4 or self.spent == self.points > 0

    def is_varied(self) -> bool:
        """Whether many of the states are neither all nor nothing, and some torn in addition."""
        return self.mixed + self.torn >= self.states // 3 and self.torn >= self.states // 20

    def __str__(self) -> str:
        kinds = f"{self.mixed} mixed, {self.torn} torn"
        tried = f"{self.points} points ({self.spent} spent), {self.states} states ({kinds})"
        lines = [f"{tried}, {self.failures} failures, {self.lost} with losses"]
        return "\n".join([*lines, *self.examples])


def record(
    script: str,
    *,
    backend: Backend = "sqlite",
    durability: str = "full",
    inject: str = "",
    program: Sequence[str] = ("writer",),
) -> Recording:
    """Trace a writer that runs `script` on a new store; `inject` is a fault in strace's words."""
    with scratch() as folder:
        store, said, traced = folder / "store", folder / "ledger", folder / "trace"
        store.mkdir()
        arguments = [str(store), str(said), script, backend, durability]
        module, *options = program
        tracing.record([f"{__package__}.{module}", *options, *arguments], traced, inject=inject)
        events = Journal(str(store), str(said)).follow(tracing.read(traced))
        files = {
            str(path.relative_to(store)): path.read_bytes()
            for path in store.rglob("*")
            if path.is_file() and not FLEETING.search(str(path))
        }
        return Recording(tuple(events), files, backend)


def campaign(
    recording: Recording,
    *,
    states: int,
    directories: Directories = "strict",
    part: tuple[int, int] = (0, 1),
    seed: int = 0,
    ledger: Any = None,
    check: Callable[..., list[str]] = _usual,
    moments: Callable[[Event], bool] | None = None,
    newest: bool = False,
    until: Literal["", "failures", "lost"] = "",
) -> Report:
    """Check about `states` disks after a power loss; part (i, n) takes every n-th moment from i.

    `moments` are those after events for which it is true; otherwise all that can tell anything.
    `check` tells what is wrong with a store, given what its writer has said to `ledger`. `newest`
    begins each moment with what may have become of the newest change: hints are never synced, and
    would be most of what a small sample loses and tears. `until` the report has one of these: a
    mutant need be caught only once.
    """
    rng = random.Random(f"{seed}/{part}")
    chosen = moments or is_moment
    places = [place for place, event in enumerate(recording.events) if chosen(event)]
    places = places[part[0] :: part[1]]
    if states < len(places):
        places = sorted(rng.sample(places, states))
    left = dict(zip(places, range(len(places), 0, -1), strict=True))
    ledger = Ledger() if ledger is None else ledger
    disk, report = Disk(directories), Report(points=len(places))
    seen: set[tuple[bytes, int]] = set()
    for place, event in enumerate(recording.events):
        disk.apply(event)
        if isinstance(event, Said):
            ledger.add(event.line)
        if place not in left:
            continue
        share = max(1, (states - report.states) // left[place])  # what others left over included
        before = report.states
        turn = len(places) - left[place]
        for choice, state in _states(disk, ledger, share, seen, rng, turn=turn, newest=newest):
            report.states += 1
            kind = _kind(choice)
            report.mixed += kind == "mixed"
            report.torn += kind == "torn"
            with scratch() as folder:
                state.put(folder)
                url = url_of(folder, recording.backend)
                found = check(url, ledger, seed=report.states)
            if found:
                report.failures += 1
                report.lost += any(each.startswith(("lost:", "wrong state:")) for each in found)
                if len(report.examples) < 10:
                    report.examples.append(_describe(place, disk.pending, choice, ledger, found))
            if until and getattr(report, until):
                return report
        report.spent += report.states - before < share
    return report


def is_moment(event: Event) -> bool:
    """Whether a power loss right after `event` can leave something that no earlier one could."""
    return not isinstance(event, Sync) and not (
        isinstance(event, Said) and b'"ack"' not in event.line
    )


def _states(
    disk: Disk,
    ledger: Any,
    wanted: int,
    seen: set[tuple[bytes, int]],
    rng: random.Random,
    *,
    turn: int,
    newest: bool,
) -> Iterator[tuple[Choice, State]]:
    """Up to `wanted` disks that were not seen with these promises before."""
    stale = 0
    turns = None if wanted >= FEW else turn
    for choice in _choices(disk.pending, rng, turn=turns, newest=newest):
        state = disk.state(choice)
        key = (state.key(), ledger.acknowledged)
        stale = stale + 1 if key in seen else 0
        if key not in seen:
            seen.add(key)
            wanted -= 1
            yield choice, state
        if not wanted or stale > STALE:
            return


def _choices(
    pending: list[Change], rng: random.Random, *, turn: int | None, newest: bool
) -> Iterator[Choice]:
    """Which pending changes have reached the disk: telling subsets first, then random ones.

    With a `turn` only few are going to be taken, and another kind of them comes first each time.
    """
    count = len(pending)
    if newest and count:
        telling = list(_around(pending, count - 1, rng))
        rng.shuffle(telling)
        yield from telling
    torn = _some(pending, rng, torn=True)  # which is not possible at many moments
    kinds = [[0] * count, _some(pending, rng), [WHOLE] * count, torn]
    if turn is not None:
        yield from (kinds[turn % 4], torn, *kinds)
        while True:
            yield _some(pending, rng, torn=rng.random() < 0.5)
    yield from ([0] * count, [WHOLE] * count, torn, _some(pending, rng, torn=True))
    if count <= EXHAUSTIVE:
        for bits in rng.sample(range(1 << count), 1 << count):
            yield [-(bits >> place & 1) for place in range(count)]
    for last in rng.sample(range(count), count):
        telling = list(_around(pending, last, rng))
        rng.shuffle(telling)
        yield from telling
    while True:
        often, parts = rng.choice([0.1, 0.5, 0.9]), rng.choice([0.0, 0.2, 0.6])
        yield [
            (_torn(change, rng) if rng.random() < parts else WHOLE) if rng.random() < often else 0
            for change in pending
        ]


def _some(pending: list[Change], rng: random.Random, *, torn: bool = False) -> Choice:
    """Neither none nor all, where that is possible: around one change, more often a late one."""
    wide = [place for place, change in enumerate(pending) if _sectors(change) > 1]
    places = wide if torn and wide else range(len(pending))
    if not places:
        return []
    last = max(rng.choice(places), rng.choice(places))
    telling = list(_around(pending, last, rng))
    chosen = rng.choice(telling[4:] if torn and wide else telling[:4])
    if rng.random() < 0.3:
        return [m if at == last else rng.choice([0, WHOLE]) for at, m in enumerate(chosen)]
    return chosen


def _around(pending: list[Change], last: int, rng: random.Random) -> Iterator[Choice]:
    """For one change: it alone, all but it, all up to it, all from it on, and all up to it torn."""
    count = len(pending)
    yield [WHOLE if place == last else 0 for place in range(count)]
    yield [0 if place == last else WHOLE for place in range(count)]
    yield [WHOLE if place <= last else 0 for place in range(count)]
    yield [WHOLE if place >= last else 0 for place in range(count)]
    mask = _torn(pending[last], rng)
    yield [WHOLE if place < last else mask if place == last else 0 for place in range(count)]
    yield [mask if place == last else WHOLE for place in range(count)]


def _torn(change: Change, rng: random.Random) -> int:
    """A mask of sectors: a beginning, an end, or any of them."""
    count = _sectors(change)
    if count == 1:
        return rng.choice([0, WHOLE])
    whole, cut = (1 << count) - 1, rng.randrange(1, count)
    return rng.choice([(1 << cut) - 1, whole ^ ((1 << cut) - 1), rng.randrange(1, whole)])


def _sectors(change: Change) -> int:
    return change.sectors if isinstance(change, Write) else 1


def _kind(choice: Choice) -> Literal["", "mixed", "torn"]:
    if any(mask not in (0, WHOLE) for mask in choice):
        return "torn"
    return "mixed" if len(set(choice)) > 1 else ""


def _describe(
    place: int, pending: list[Change], choice: Choice, ledger: Any, found: list[str]
) -> str:
    parts = []
    for change, mask in zip(pending, choice, strict=True):
        kept = "+" if mask == WHOLE else "-" if not mask else f"{mask:#x}"
        if isinstance(change, Write):
            parts.append(f"{kept}write({change.inode}, {change.offset}, {len(change.data)})")
        elif isinstance(change, Resize):
            parts.append(f"{kept}size({change.inode}, {change.size})")
        else:
            parts.append(f"{kept}names{change.names}")
    shown = " ".join(parts[-12:])
    return f"  event {place}, {ledger.acknowledged} acknowledged, [{shown}]: {'; '.join(found[:3])}"


def replayed(recording: Recording) -> dict[str, bytes]:
    """The files after the run as the model sees them, if every change has reached the disk."""
    disk = Disk()
    for event in recording.events:
        disk.apply(event)
    files = disk.state([WHOLE] * len(disk.pending)).files
    return {path: data for path, data in files.items() if data is not None}
