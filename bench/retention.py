"""Retention: the reads of a plan, and the time and disk space of automatic pruning."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import holdfast
from holdfast.storage.tables import Index

from .lab import Lab, Row
from .messages import Message, Writer
from .stores import check_state, disk_usage, opened
from .timing import Ratio, duration, interleave, number

KEEP, WINDOW = 100, 50


def plan(lab: Lab) -> list[Row]:
    rule = holdfast.Retention(keep_last=KEEP, keep_every=10)
    with opened(lab.long.path) as store:
        session = store.session("long")
        size = len(session)
        with _counted(store) as reads:
            found = session.prune(rule, dry_run=True)
            assert len(found.verdicts) == size
        taken = interleave(
            lab.pick(10, 2),
            plan=lambda _: lambda: session.prune(rule, dry_run=True),
            history=lambda _: lambda: list(session.history()),
        )
    data = sum(reads[kind] for kind in ("items", "blobs"))
    ratio = Ratio.of(taken["plan"], taken["history"])
    return [
        lab.row(
            f"Plan of `prune()` for {size:,} checkpoints",
            "no row of items or blobs read",
            f"{data} read; {ratio} the time of `history()` "
            f"({duration(taken['plan'])} / {duration(taken['history'])})",
            passed=data == 0 and reads["checkpoints"] > 0,
        )
    ]


class _Counting:
    """A view that counts the look-ups in each table."""

    def __init__(self, view: Any, calls: Counter[str]) -> None:
        self._view, self._calls = view, calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)

    def get(self, index: Index, *key: Any) -> Any:
        self._calls[index.table] += 1
        return self._view.get(index, *key)

    def scan(self, index: Index, *bounds: Any, **options: Any) -> Any:
        self._calls[index.table] += 1
        return self._view.scan(index, *bounds, **options)


@contextmanager
def _counted(store: holdfast.Store) -> Iterator[Counter[str]]:
    calls: Counter[str] = Counter()
    backend: Any = store._repository.backend
    plain: Callable[[], AbstractContextManager[Any]] = backend.view

    @contextmanager
    def view() -> Iterator[_Counting]:
        with plain() as inner:
            yield _Counting(inner, calls)

    backend.view = view
    try:
        yield calls
    finally:
        del backend.view


class Kept:
    """A store of growing windows of messages, closed and measured after every `every` saves."""

    def __init__(self, path: Path, retention: holdfast.Retention | None, every: int) -> None:
        self._path, self._retention, self._every = path, retention, every
        self._messages: list[Message] = []
        self._fresh = Writer(41).conversation(10_000_000)
        self.sizes: dict[int, int] = {}
        self._open()

    def _open(self) -> None:
        self._store = holdfast.open(self._path, retention=self._retention)
        self._session = self._store.session("agent")

    def save(self, i: int) -> Callable[[], object]:
        if i and i % self._every == 0:
            self._weigh(i)
        self._messages = [*self._messages[1 - WINDOW :], next(self._fresh)]
        state = {"messages": self._messages, "step": i}
        return lambda: self._session.save(state)

    def _weigh(self, saves: int) -> None:
        self._store.close()
        self.sizes[saves] = disk_usage(self._path)
        self._open()

    def finish(self, saves: int) -> int:
        """Close and check the store, and return its number of checkpoints."""
        count = len(self._session)
        self._weigh(saves)
        self._store.close()
        state = {"messages": self._messages, "step": saves - 1}
        check_state(self._path, "agent", state)
        return count


def automatic(lab: Lab) -> list[Row]:
    saves = lab.pick(10_000, 2_000)
    every = saves // 103  # not a fraction or multiple of 256, the saves between two gcs
    kept = Kept(lab.path("kept"), holdfast.Retention(keep_last=KEEP), every)
    plain = Kept(lab.path("kept-all"), None, every)
    taken = interleave(saves, kept=kept.save, plain=plain.save)
    count = kept.finish(saves)
    plain.finish(saves)
    ratio = Ratio.of(taken["kept"], taken["plain"])
    mean = statistics.fmean(taken["kept"]) / statistics.fmean(taken["plain"])
    weights = list(kept.sizes.values())
    # The size goes up and down with each gc, so a single value, such as the highest, is chance.
    half = len(weights) // 2
    before, after = statistics.fmean(weights[:half]), statistics.fmean(weights[half:])
    measure = f"`save` of {WINDOW} messages with `Retention(keep_last={KEEP})`, {saves:,} times"
    return [
        lab.row(
            f"{measure}: p50",
            "≤ 1.5 × without retention",
            f"{ratio} ({duration(taken['kept'])} / {duration(taken['plain'])}); "
            f"mean {number(mean)} ×, longest {duration([max(taken['kept'])])} / "
            f"{duration([max(taken['plain'])])}",
            passed=ratio.middle <= 1.5,
        ),
        lab.row(
            f"{measure}: disk",
            "flat: on average in the second half ≤ 1.2 × that in the first",
            f"{number(after / before)} × ({before / 1e6:.2f} MB, {after / 1e6:.2f} MB; "
            f"{min(weights) / 1e6:.2f} to {max(weights) / 1e6:.2f} MB; {count} checkpoints there; "
            f"without retention {plain.sizes[saves] / 1e6:.1f} MB)",
            passed=after <= 1.2 * before,
        ),
    ]
