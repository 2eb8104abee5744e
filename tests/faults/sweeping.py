"""gc beside processes that save, fork, rewind and delete."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import holdfast
from holdfast.storage import changes

from . import processes, workload
from .checking import findings, scratch
from .ledger import Ledger, complete_lines
from .workload import Backend, url_of
from .writer import Writer

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

    for name, longest in (("sweep", 0.03), ("trim", 0.04)):
        setattr(changes, name, slowed(getattr(changes, name), longest))
