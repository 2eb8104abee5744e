"""gc beside processes that save, fork, rewind and delete; and ways to break it."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress, islice
from typing import Any

import holdfast
from holdfast.backends import sqlite_writer
from holdfast.backends.base import Sweep, Trim
from holdfast.backends.files import FilesBackend
from holdfast.backends.sqlite import SqliteBackend

from . import processes, workload
from .checking import findings, scratch
from .ledger import Ledger, complete_lines
from .workload import Backend, url_of
from .writer import Writer, main

BESIDE = {**workload.TIDYING, "gc": 0}


@dataclass
class Report:
    acknowledged: int = 0
    collected: int = 0  # runs of gc
    freed: int = 0
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        head = f"{self.acknowledged} acknowledged beside {self.collected} runs of gc"
        return "\n".join([f"{head}, {self.freed} rows freed", *self.failures[:10]])


class Leisurely(Writer):
    def hesitate(self) -> None:
        time.sleep(self.rng.choice([0, 0, 0, 0.01]))


def race(
    steps: int,
    *,
    seed: int = 0,
    workers: int = 4,
    sabotage: Callable[[], None] | None = None,
    backend: Backend = "sqlite",
) -> Report:
    """Writers with sessions and big values in common with nobody and everybody, beside one gc."""
    with scratch() as folder:
        url = url_of(folder, backend)

        def write(worker: int, out: int) -> None:
            writer = Leisurely(url, out)
            writer.rng.seed(f"{seed}/{worker}")
            writer.n = worker << 20
            name = f"session-{worker}"
            for step in islice(workload.endless(seed + worker, [name], BESIDE), steps):
                writer.attempt(step)
                writer.hesitate()
            writer.close()

        def sweep(out: int) -> None:
            if sabotage is not None:
                sabotage()
            takes_its_time(pauses=random.Random(seed))
            while True:
                with holdfast.open(url) as store:
                    os.write(out, b"%d\n" % sum(store.gc()[:3]))

        children = [processes.fork(partial(write, worker)) for worker in range(workers)]
        sweeper = processes.fork(sweep)
        report, ledger = Report(), Ledger()
        for child in children:
            status = child.finish(60.0 + steps / 4)
            if status:
                report.failures.append(f"  a writer ended with {status}")
            for line in complete_lines(bytes(child.said)):
                ledger.add(line)
        sweeper.kill()
        sweeper.finish()
        rows = complete_lines(bytes(sweeper.said))
        report.failures += [f"  gc: {row!r}" for row in rows if not row.isdigit()]
        report.freed = sum([int(row) for row in rows if row.isdigit()])
        report.collected = len(rows)
        report.acknowledged = ledger.acknowledged
        report.failures += [f"  {found}" for found in ledger.errors + findings(url, ledger)]
    return report


def takes_its_time(pauses: random.Random) -> None:
    """Others act between gc's looking and its freeing."""

    def slowed(act: Any, longest: float) -> Any:
        def slowly(*arguments: Any) -> Any:
            time.sleep(pauses.choice([0, longest / 5, longest]))
            return act(*arguments)

        return slowly

    for kind in (SqliteBackend, FilesBackend):
        for name, longest in (("sweep", 0.01), ("trim", 0.04)):
            setattr(kind, name, slowed(getattr(kind, name), longest))


# -- mutants ---------------------------------------------------------------------------------------


def takes_shared_blobs() -> None:
    """A blob goes even if a save has come to share it since it was found to be refuse."""
    real = sqlite_writer.trim

    def blindly(connection: Any, cursor: Any, trim: Trim) -> int:
        found = dict(cursor.execute("SELECT digest, uses FROM blobs").fetchall())
        blobs = [(digest, found[digest]) for digest, _ in trim.blobs if digest in found]
        return real(connection, cursor, replace(trim, blobs=blobs))

    sqlite_writer.trim = blindly


def frees_without_looking() -> None:
    """Checkpoints go even if the session has moved since they were found to be deleted."""
    Sweep.is_current = lambda self, reader: reader.head(self.session) is not None  # type: ignore[method-assign]


def sweeps_in_two_halves() -> None:
    """What is freed, and what its children learn of it, in two transactions."""
    real = SqliteBackend.sweep

    def by_halves(self: SqliteBackend, sweeps: Sequence[Sweep]) -> list[bool]:
        done = real(self, [replace(sweep, gaps=[]) for sweep in sweeps])
        time.sleep(0.01)  # lest the test needs luck
        with self._transaction() as connection:
            connection.execute("BEGIN")
            for sweep in compress(sweeps, done):
                rest = replace(sweep, checkpoints=[], keys=[], facets=[], remove=None)
                sqlite_writer.sweep(self._cursor, rest)
            connection.execute("COMMIT")
        return done

    SqliteBackend.sweep = by_halves  # type: ignore[method-assign]


if __name__ == "__main__":  # the writer of the power-loss harness, with this mutant
    sweeps_in_two_halves()
    main(*sys.argv[1:])
