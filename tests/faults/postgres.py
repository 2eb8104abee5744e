"""Writers on PostgreSQL while connections, backends or the server die under them.

Whatever happens, a writer that commits is told what became of it, and the store holds exactly what
was acknowledged: nothing is lost, nothing is there that nobody was told of. Reading may fail, if a
connection breaks in the middle of it.
"""

from __future__ import annotations

import mmap
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import takewhile

import psycopg

import holdfast
from holdfast.errors import HoldfastError
from tests.support.postgres import Server

from . import processes, workload
from .checking import findings
from .ledger import Ledger, complete_lines
from .writer import Writer

TIMEOUT = 12.0  # of which a third is for one answer
WEIGHTS: workload.Weights = {
    "append": 50, "save": 15, "patch": 10, "rewind": 6, "fork": 5, "prune": 3, "regret": 3,
    "drop": 2, "gc": 1, "reopen": 1,
}  # fmt: skip


@dataclass
class Report:
    acknowledged: int = 0
    faults: int = 0
    unread: int = 0
    swallowed: int = 0  # answers
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        head = f"{self.faults} faults, {self.acknowledged} acknowledged, {self.unread} unread"
        return "\n".join([f"{head}, {len(self.failures)} failures", *self.failures[:10]])


class PatientWriter(Writer):
    timeout = TIMEOUT

    def open(self) -> None:
        if self.store is None:
            self.store = holdfast.open(self.url, durability=self.durability, timeout=self.timeout)
            for line in self.lines.values():
                line.handle = None


def campaign(
    url: str,
    steps: int,
    *,
    through: str | None = None,
    writers: int = 3,
    seed: int = 0,
    durability: str = "full",
    sabotage: Callable[[], None] | None = None,
    meanwhile: AbstractContextManager[None] | None = None,
    seconds: float | None = None,
    timeout: float = TIMEOUT,
    enough: Callable[[], bool] = lambda: True,
) -> Report:
    """Let writers work `through` a proxy, say, and then look at what there is at `url`.

    They take so many steps, and more until they see that it is `enough`. Who has not done so
    within `seconds` hangs.
    """
    patience = max(120.0, 2.0 * steps) if seconds is None else seconds
    holdfast.open(url, create=True).close()

    def start(number: int) -> processes.Child:
        def run(out: int) -> None:
            if sabotage is not None:
                sabotage()
            writer = PatientWriter(through or url, out, seed=seed + number, durability=durability)
            writer.n, writer.timeout = number << 20, timeout
            work = workload.endless(seed + number, [f"session {seed + number}"], WEIGHTS)
            lasting = takewhile(lambda each: each[0] < steps or not enough(), enumerate(work))
            writer.run(step for _, step in lasting)

        return processes.fork(run)

    children = [start(number) for number in range(writers)]
    ledger, report = Ledger(), Report()
    with meanwhile or nullcontext():
        statuses = [child.finish(patience) for child in children]
    for child, status in zip(children, statuses, strict=True):
        if status:
            report.failures.append(f"  a writer ended with {status}")
        for line in complete_lines(bytes(child.said)):
            ledger.add(line)
    report.acknowledged = ledger.acknowledged
    report.unread = sum("Unavailable: the store " in error for error in ledger.errors)
    found = [error for error in ledger.errors if "Unavailable: the store " not in error]
    found += [*findings(url, ledger), *_strays(url, ledger)]
    report.failures += [f"  {each}" for each in found]
    return report


def _strays(url: str, ledger: Ledger) -> Iterator[str]:
    """What is in the store although nobody was told that it is."""
    told = ledger.saved.keys() | ledger.doomed.keys() | ledger.gone.keys()
    with holdfast.open(url) as store:
        for name in ledger.heads:
            session = store.session(name)
            known = [c.id for c in session.tree()] if session.exists() else []
            after = {"after the fault"}  # what the check of the next save has added
            for id in known:
                try:
                    state = session.load(id)
                except HoldfastError as e:
                    yield f"unreadable: {id} of {name!r}: {e}"
                    continue
                if id not in told and not after & state.keys():
                    yield f"never acknowledged: {id} of {name!r}"


@contextmanager
def often(act: Callable[[], None], *, least: float, most: float, times: int) -> Iterator[None]:
    """Do something at random moments for as long as this lasts, but only so many times.

    On a machine that is busy, those who are disturbed would never be done otherwise.
    """
    stopped = threading.Event()
    rng = random.Random(0)

    def run() -> None:
        for _ in range(times):
            if stopped.wait(rng.uniform(least, most)):
                return
            act()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


class Terminator:
    """pg_terminate_backend on one of the writers' connections."""

    def __init__(self, url: str) -> None:
        self._link = psycopg.connect(url, autocommit=True)
        self.count = 0

    def __call__(self) -> None:
        ended = self._link.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name = 'holdfast' ORDER BY random() LIMIT 1"
        ).fetchall()
        self.count += len(ended)

    def close(self) -> None:
        self._link.close()


class Crash:
    """kill -9 for the whole server, and a new start."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._shared = memoryview(mmap.mmap(-1, 8)).cast("q")

    @property
    def count(self) -> int:
        """How often so far, as processes see it that were forked before."""
        return self._shared[0]

    def __call__(self) -> None:
        self._server.kill()
        time.sleep(0.05)
        self._server.start()
        self._shared[0] += 1
