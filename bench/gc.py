"""Disk space and time of gc after most checkpoints were deleted."""

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

# the remaining states of each session, oldest first
States = dict[str, list[Any]]


@dataclass(frozen=True)
class Shape:
    """A store of 10,000 checkpoints. Each state holds the last `window` messages of its session.

    `delete` keeps the newest `kept` checkpoints of each session, or with None every tenth session.
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
    """The sizes of the files in bytes, and the times by round."""

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


def collect(lab: Lab) -> list[Row]:
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
            "≤ 1.3 × a new store of the remaining states, or its `backup()` if that is smaller",
            "; ".join(sizes),
            passed=all(o.size <= 1.3 for o in outcomes),
        ),
        lab.row(
            f"{measure}: time",
            f"≤ 2 × loading each of the {outcomes[0].kept:,} that remain",
            "; ".join(times),
            passed=all(o.time.middle <= 2 for o in outcomes),
        ),
    ]


def erasure(lab: Lab) -> list[Row]:
    """Measure what it costs to overwrite deleted text in the file."""
    appends, frees = _erasing_appends(lab), _erasing_gc(lab)
    return [
        lab.row(
            f"{what} that overwrites deleted text in the file, against one that does not",
            f"≤ {bar} ×",
            f"{ratio} ({duration(taken['clean'])} / {duration(taken['careless'])})",
            passed=ratio.middle <= bar,
        )
        for what, bar, taken in (("`append` p50", 1.05, appends), ("`gc`", 1.3, frees))
        for ratio in [Ratio.of(taken["clean"], taken["careless"])]
    ]


def _careless(store: holdfast.Store) -> holdfast.Store:
    """Make the store leave deleted text in its file."""
    backend: Any = store._repository.backend
    checkpointer, connect = backend._checkpointer, backend._connect

    def careless() -> Any:
        connection = connect()
        connection.execute("PRAGMA secure_delete = 0")
        return connection

    backend._connect = checkpointer._connect = careless
    backend._writer.execute("PRAGMA secure_delete = 0")
    checkpointer.scrub = lambda: checkpointer._patiently(checkpointer._empty, 1) is not None
    return store


def _erasing_appends(lab: Lab) -> dict[str, list[float]]:
    rounds = lab.pick(4_000, 100)
    messages = list(Writer(41).conversation(rounds))
    with (
        opened(lab.path("erasing"), "normal") as clean,
        opened(lab.path("leaving"), "normal") as careless,
    ):
        sessions = {"clean": clean.session("s"), "careless": _careless(careless).session("s")}
        for session in sessions.values():
            session.save({"messages": []})
        arms = {
            name: lambda i, to=session: lambda: to.append("messages", messages[i])
            for name, session in sessions.items()
        }
        return interleave(rounds, **arms)


def _erasing_gc(lab: Lab) -> dict[str, list[float]]:
    shape, rounds = lab.pick(SHAPES, QUICK)[-1], lab.pick(9, 2)
    path = lab.path("erasing-gc")
    shape.build(path)
    with opened(path) as store:
        shape.delete(store)
    clean, careless = (
        [open_store(_copy(path, lab.path(f"gc-{kind}-{i}"))) for i in range(rounds)]
        for kind in ("clean", "careless")
    )
    try:
        return interleave(
            rounds, clean=lambda i: clean[i].gc, careless=lambda i: _careless(careless[i]).gc
        )
    finally:
        for store in [*clean, *careless]:
            store.close()


def _measure(lab: Lab, n: int, shape: Shape) -> Outcome:
    path, fresh, backup = (lab.path(f"gc-{n}-{kind}") for kind in ("full", "fresh", "backup"))
    shape.build(path)
    before = disk_usage(path)
    with opened(path) as store:
        shape.delete(store)
        remaining = _remaining(store)
    copies = [_copy(path, lab.path(f"gc-{n}-{i}")) for i in range(lab.pick(5, 1))]
    taken = _time(copies, remaining)
    after = disk_usage(copies[0])
    with opened(copies[0]) as store:
        if not store.backup(backup).ok or _remaining(store) != remaining:
            raise AssertionError("gc has changed a remaining state")
    _save_again(fresh, remaining)
    kept = sum(map(len, remaining.values()))
    return Outcome(shape.name, kept, before, after, disk_usage(fresh), disk_usage(backup), taken)


def _remaining(store: holdfast.Store) -> States:
    sessions = [store.session(info.name) for info in store.sessions()]
    return {session.name: [session.load(c) for c in session.tree()] for session in sessions}


def _copy(path: Path, to: Path) -> Path:
    shutil.copy(path, to)  # the store is closed, so it has no -wal file
    return to


def _time(copies: list[Path], names: Iterable[str]) -> dict[str, list[float]]:
    """Time gc, each time in another copy, and loading every remaining state of the copy."""
    stores = [open_store(path) for path in copies]

    def load(i: int) -> Callable[[], object]:
        sessions = [stores[i].session(name) for name in names]
        remaining = [(session, c.id) for session in sessions for c in session.tree()]
        return lambda: [session.load(id) for session, id in remaining]

    try:
        return interleave(len(copies), gc=lambda i: stores[i].gc, load=load)
    finally:
        for store in stores:
            store.close()


def _save_again(path: Path, remaining: States) -> None:
    with opened(path) as store:
        for name, states in remaining.items():
            session = store.session(name)
            for state in states:
                session.save(state)


def _mb(size: float) -> str:
    return f"{number(size / 1e6)} MB"
