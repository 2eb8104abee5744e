"""Runs whose disk fails: power losses at any moment, and the n-th system call in turn."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from . import failing_io, powerloss, promises
from .checking import scratch
from .disk import Event, Said
from .failing_io import Fault
from .ledger import complete_lines
from .powerloss import Recording
from .processes import Child
from .promises import Promises
from .runner import SCRIPTS, Runner
from .workload import Backend, url_of

SCRIPT = "short"


def record(
    backend: Backend,
    script: str = SCRIPT,
    *,
    mutant: str = "",
    killed: int = 0,
    inject: str = "",
    durability: str = "full",
) -> Recording:
    """Runs on a new store; `killed`: by one process until that sync, and then by another."""
    return powerloss.record(
        script,
        backend=backend,
        durability=durability,
        inject=inject,
        program=("runner", str(killed), mutant),
    )


def losses(recording: Recording, script: str = SCRIPT, **options: Any) -> powerloss.Report:
    """Power losses; after each, all that was promised has to be there, and the runs have to end."""
    check = partial(promises.findings, script=SCRIPTS[script](), booted=True)
    return powerloss.campaign(recording, ledger=Promises(), check=check, newest=True, **options)


def is_word_of(by: str, event: Event) -> bool:
    """Whether one of the runners promises something here."""
    return (
        isinstance(event, Said)
        and powerloss.is_moment(event)
        and f'"by": "{by}"'.encode() in event.line
    )


# -- failing calls ---------------------------------------------------------------------------------


@functools.cache
def warm_up(backend: Backend) -> None:
    """Import whatever is imported when it is first needed."""
    with scratch() as folder:
        Runner(url_of(folder, backend), lambda _: None).run(SCRIPTS[SCRIPT]())


def failures(
    fault: Fault,
    backend: Backend,
    script: str = SCRIPT,
    *,
    places: Iterable[int],
    mutant: Callable[[], None] | None = None,
) -> failing_io.Report:
    """Let the n-th call fail, for one place after the other, until runs are through before that."""
    warm_up(backend)
    report = failing_io.Report()

    def make(url: str, out: int) -> Any:
        if mutant is not None:
            mutant()
        # By a call that is never made to fail: `write` may be.
        return Runner(url, lambda line: os.writev(out, [line]))

    for n in places:
        with scratch() as folder:
            child, injected = failing_io.run(fault.at(n), folder, SCRIPTS[script](), make, backend)
            report.runs += 1
            if not injected:
                return report
            report.injected += injected
            said = Promises.of(complete_lines(bytes(child.said)))
            found = verdict(child, said, url_of(folder, backend), fault, script)
            report.errors += bool(said.errors)
            if found:
                told = said.errors[:1] or ["no error"]
                report.failures.append(f"  {fault.at(n)} ({told[0]}): {'; '.join(found[:3])}")
    return report


def verdict(child: Child, said: Promises, url: str, fault: Fault, script: str) -> list[str]:
    parts = SCRIPTS[script]()
    found = [] if child.status == 0 else [f"the runner ended with {child.status}"]
    if not fault.forever and said.ended != {(part.session, part.n) for part in parts}:
        found.append("the runs did not go on after the failure")
    return found + promises.findings(url, said, script=parts)
