"""What gc gives back of the disk after most checkpoints were deleted, and how long it takes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import holdfast

from .lab import Lab, Row
from .messages import Writer
from .stores import disk_usage, open_store, opened
from .timing import Ratio, duration, interleave, number

# Of each session, the states that live, the oldest first.
States = dict[str, list[Any]]


@dataclass(frozen=True)
class Shape:
    """A store of 10,000 checkpoints, of whose states only the last `window` messages are part.

    `kept` is how many checkpoints of each session stay; with None, one session of ten stays whole.
    """

    name: str
    sessions: int
    steps: int
    window: int
    kept: int | None

    def build(self, path: Path) -> None:
        writer = Writer(40)
        with opened(path, "normal") as store:
            for i in range(self.sessions):
                session = store.session(f"session-{i}")
                messages = list(writer.conversation(self.steps))
                for end in range(1, self.steps + 1):
                    window = messages[max(0, end - self.window) : end]
                    session.save({"messages": window, "step": end})

    def delete(self, store: holdfast.Store) -> None:
        if self.kept is not None:
            store.prune(holdfast.Retention(keep_last=self.kept))
            return
        for i in range(self.sessions):
            if i % 10:
                store.session(f"session-{i}").delete()


SHAPES = (
    Shape("old checkpoints of 10 sessions", 10, 1_000, 50, 100),
    Shape("old checkpoints of 100 sessions", 100, 100, 20, 10),
    Shape("whole sessions, 450 of 500", 500, 20, 20, None),
)
QUICK = (Shape("old checkpoints of 5 sessions", 5, 100, 20, 10),)


@dataclass(frozen=True)
class Outcome:
    """Sizes in bytes, times by round."""

    name: str
    kept: int
    before: int
    after: int
    fresh: int
    backup: int
    taken: dict[str, list[float]]

    @property
    def size(self) -> float:
        return self.after / min(self.fresh, self.backup)

    @property
    def time(self) -> Ratio:
        return Ratio.of(self.taken["gc"], self.taken["load"])


def gc(lab: Lab) -> list[Row]:
    shapes = lab.pick(SHAPES, QUICK)
    outcomes = [_measure(lab, n, shape) for n, shape in enumerate(shapes)]
    made = shapes[0].sessions * shapes[0].steps
    measure = f"gc after {made * 9 // 10:,} of {made:,} checkpoints were deleted"
    sizes = (
        f"{o.name}: {number(o.size)} × ({_mb(o.after)}, before {_mb(o.before)}; "
        f"new {_mb(o.fresh)}, backup {_mb(o.backup)})"
        for o in outcomes
    )
    times = (
        f"{o.name}: {o.time} ({duration(o.taken['gc'])} / {duration(o.taken['load'])})"
        for o in outcomes
    )
    return [
        lab.row(
            f"{measure}: disk",
            "≤ 1.3 × a new store of what lives, or its `backup()` if that is smaller",
            "; ".join(sizes),
            passed=all(o.size <= 1.3 for o in outcomes),
        ),
        lab.row(
            f"{measure}: time",
            f"≤ 2 × loading each of the {outcomes[0].kept:,} that live",
            "; ".join(times),
            passed=all(o.time.middle <= 2 for o in outcomes),
        ),
    ]


def _measure(lab: Lab, n: int, shape: Shape) -> Outcome:
    path, fresh, backup = (lab.path(f"gc-{n}-{kind}") for kind in ("full", "fresh", "backup"))
    shape.build(path)
    before = disk_usage(path)
    with opened(path) as store:
        shape.delete(store)
        living = _living(store)
    copies = [_copy(path, lab.path(f"gc-{n}-{i}")) for i in range(lab.pick(5, 1))]
    taken = _take_turns(copies, living)
    after = disk_usage(copies[0])
    with opened(copies[0]) as store:
        if not store.backup(backup).ok or _living(store) != living:
            raise AssertionError("gc has changed what lives")
    _save_anew(fresh, living)
    kept = sum(map(len, living.values()))
    return Outcome(shape.name, kept, before, after, disk_usage(fresh), disk_usage(backup), taken)


def _living(store: holdfast.Store) -> States:
    sessions = [store.session(info.name) for info in store.sessions()]
    return {session.name: [session.load(c) for c in session.tree()] for session in sessions}


def _copy(path: Path, to: Path) -> Path:
    shutil.copy(path, to)  # closed, so there is no log beside it
    return to


def _take_turns(copies: list[Path], names: Iterable[str]) -> dict[str, list[float]]:
    """Seconds of gc, each time in another copy, and of loading all that lives in it."""
    stores = [open_store(path) for path in copies]

    def load(i: int) -> Callable[[], object]:
        sessions = [stores[i].session(name) for name in names]
        living = [(session, c.id) for session in sessions for c in session.tree()]
        return lambda: [session.load(id) for session, id in living]

    try:
        return interleave(len(copies), gc=lambda i: stores[i].gc, load=load)
    finally:
        for store in stores:
            store.close()


def _save_anew(path: Path, living: States) -> None:
    with opened(path) as store:
        for name, states in living.items():
            session = store.session(name)
            for state in states:
                session.save(state)


def _mb(size: float) -> str:
    return f"{number(size / 1e6)} MB"
