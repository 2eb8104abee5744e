"""kill -9 at random moments: what was acknowledged is there, and the next writer goes on."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from holdfast.storage.changes import JournalAppend
from holdfast.storage.contract import Batch, DeleteRange, Insert
from holdfast.storage.sqlite import writer as sqlite_writer

from . import ledger as books
from . import processes, workload
from .checking import findings, scratch
from .failing_io import Make
from .ledger import Ledger, complete_lines
from .workload import Backend, State, Weights, url_of
from .writer import Writer

ROUNDS = 40  # on one store, then a new one: checks get slower as it grows
SESSIONS = ("main", "side", "third", "fourth")


@dataclass
class Report:
    kills: int = 0
    acknowledged: int = 0
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        head = (
            f"{self.kills} kills, {self.acknowledged} acknowledged, {len(self.failures)} failures"
        )
        return "\n".join([head, *self.failures[:10]])


class AcknowledgesFirst(Writer):
    """A mutant: reports the acknowledgement before it saves."""

    def begin(self, name: str, state: State, *more: Any, **options: Any) -> None:
        super().begin(name, state, *more, **options)
        self.say(books.ack_line(self.n, None))


class ItemsLater(Writer):
    """A mutant of the engine: a head and its checkpoint in one transaction, items in the next."""

    def open(self) -> None:
        sqlite_writer.write = _in_two_halves
        super().open()


_write = sqlite_writer.write


def _in_two_halves(connection: Any, cursor: Any, batch: Any) -> None:
    items = [] if isinstance(batch, JournalAppend) else [*filter(_is_items, batch.writes)]
    if not items:
        _write(connection, cursor, batch)
        return
    others = [write for write in batch.writes if not _is_items(write)]
    _write(connection, cursor, replace(batch, writes=others))
    time.sleep(0.005)  # lest the test needs luck
    _write(connection, cursor, Batch(writes=items))


def _is_items(write: Any) -> bool:
    return isinstance(write, Insert | DeleteRange) and write.table == "items"


def campaign(
    kills: int,
    *,
    seed: int = 0,
    writers: int = 1,
    make: Make = Writer,
    weights: Weights = workload.USUAL,
    backend: Backend = "sqlite",
    until: str = "",
) -> Report:
    """Kill writers `kills` times; several at once each have their own session.

    Or `until` a failure says that: a mutant need be caught only once.
    """
    rng = random.Random(seed)
    report = Report()
    while report.kills < kills:
        if until and any(until in found for found in report.failures):
            break
        with scratch() as folder:
            left = min(kills - report.kills, ROUNDS)
            url = url_of(folder, backend)
            start = partial(_start, url, make, weights)
            _one_store(url, left, writers, start, rng, report)
    return report


def _one_store(
    url: str,
    kills: int,
    writers: int,
    start: Callable[[Sequence[str], int, int], processes.Child],
    rng: random.Random,
    report: Report,
) -> None:
    ledger, last = Ledger(), report.kills + kills
    while report.kills < last:
        children = [
            start(
                SESSIONS[number : max(writers, 2) : writers],
                rng.getrandbits(32),
                report.kills + number,
            )
            for number in range(writers)
        ]
        for child in children:
            if rng.random() < 0.8:
                # Until it has told of so much. The others are killed while they begin.
                child.listen(10.0, lines=rng.choice([1, 5, 9]))
            child.listen(rng.choice([rng.uniform(0, 0.01), rng.uniform(0, 0.06)]))
            child.kill()
            report.kills += 1
            status = child.finish()
            if status != -9:
                report.failures.append(f"  a writer ended with {status}")
        before = ledger.acknowledged
        for child in children:
            for line in complete_lines(bytes(child.said)):
                ledger.add(line)
        report.acknowledged += ledger.acknowledged - before
        at_the_end = report.kills >= last
        found = ledger.errors + findings(
            url, ledger, loads=None if at_the_end else 8, deep=at_the_end
        )
        if found:
            report.failures.append(f"  kill {report.kills}: {'; '.join(found[:3])}")
            return


def _start(
    url: str, make: Make, weights: Weights, sessions: Sequence[str], seed: int, number: int
) -> processes.Child:
    def run(out: int) -> None:
        writer = make(url, out)
        writer.rng.seed(seed)
        writer.n = number << 20  # numbers go on where no earlier writer of the ledger has been
        writer.adopt([name for session in sessions for name in workload.family(session)])
        writer.run(workload.endless(seed, sessions, weights))

    return processes.fork(run)
