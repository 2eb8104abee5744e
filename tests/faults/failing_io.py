"""The n-th system call on a file of the store fails: an error or a true acknowledgement."""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from . import processes, workload
from .checking import findings, scratch
from .ledger import Ledger, complete_lines
from .workload import Backend, State, Step, url_of
from .writer import Line, Writer


@dataclass(frozen=True)
class Fault:
    """From the n-th time on, or only that once, `call` fails with `error`."""

    call: str
    error: str
    forever: bool = False

    def at(self, n: int) -> str:
        return f"{self.call}:error={self.error}:when={n}{'+' if self.forever else ''}"


@dataclass
class Report:
    runs: int = 0
    injected: int = 0
    errors: int = 0  # runs in which the writer was told
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        head = f"{self.runs} runs, {self.injected} failed calls, {self.errors} runs with errors"
        return "\n".join([f"{head}, {len(self.failures)} failures", *self.failures[:10]])


Make = Callable[[str, int], Writer]


@functools.cache
def warm_up(backend: Backend) -> None:
    """Import whatever is imported when it is first needed."""
    with scratch() as folder, open(os.devnull, "wb") as nobody:
        Writer(url_of(folder, backend), nobody.fileno()).run(workload.tidy())


class Swallowing(Writer):
    """A mutant: takes any failed write for a success."""

    def write(self, step: Step, line: Line, after: State, arguments: dict[str, Any]) -> Any:
        try:
            return super().write(step, line, after, arguments)
        except Exception:
            return SimpleNamespace(id=line.path[-1][0] if line.path else "none")


def campaign(
    fault: Fault,
    *,
    script: str = "short",
    make: Make = Writer,
    limit: int = 10_000,
    stride: int = 1,
    backend: Backend = "sqlite",
) -> Report:
    """Let every n-th call fail in turn, until a run is through before it comes to that."""
    report = Report()
    for n in range(1, limit, stride):
        with scratch() as folder:
            steps = workload.SCRIPTS[script]()
            child, injected = run(fault.at(n), folder, steps, make, backend)
            report.runs += 1
            if not injected:
                return report
            report.injected += injected
            found = verdict(child, url_of(folder, backend), fault)
            ledger = Ledger.of(complete_lines(bytes(child.said)))
            report.errors += bool(ledger.errors)
            if found:
                told = ledger.errors[:1] or ["no error"]
                report.failures.append(f"  {fault.at(n)} ({told[0]}): {'; '.join(found[:3])}")
    raise AssertionError(f"still failing at {limit}")


def verdict(child: processes.Child, url: str, fault: Fault) -> list[str]:
    lines = complete_lines(bytes(child.said))
    ledger = Ledger.of(lines)
    found = [] if child.status == 0 else [f"the writer ended with {child.status}"]
    steps = [line for line in lines if b"close: " not in line]
    failed = [b'"error"' in line for line in steps]
    if not fault.forever and failed[-1] and True in failed[:-1]:
        found.append("saving did not go on after the failure")
    return found + findings(url, ledger)


def run(
    inject: str,
    folder: Path,
    steps: list[Any],
    make: Callable[[str, int], Any] = Writer,
    backend: Backend = "sqlite",
) -> tuple[processes.Child, int]:
    """Run a writer of a kind under strace; also tells how many calls were made to fail."""
    warm_up(backend)
    go, gate = os.pipe()

    def write(out: int) -> None:
        os.close(gate)
        processes.allow_tracing()
        os.read(go, 1)
        make(url_of(folder, backend), out).run(steps)

    child = processes.fork(write)
    os.close(go)
    traced = folder.with_suffix(".trace")
    command = ["strace", "-f", "-p", str(child.pid), "-o", str(traced)]
    command += ["-e", f"trace={inject.partition(':')[0]}", "-e", f"inject={inject}"]
    if inject.startswith("openat") and backend == "sqlite":
        # The others touch nothing but the store; nor does this one, where all is Python.
        for name in ("", "agent.db", "agent.db-wal", "agent.db-shm", "agent.db-journal"):
            command += ["-P", str(folder / name)]
    try:
        with subprocess.Popen(command, stderr=subprocess.PIPE) as strace:
            assert strace.stderr is not None
            attached = strace.stderr.readline()
            if b"attached" not in attached:
                child.kill()
                raise RuntimeError(f"strace: {attached.decode(errors='replace')}")
            os.write(gate, b"!")
            child.finish()
            strace.stderr.read()
        return child, traced.read_bytes().count(b"(INJECTED)")
    finally:
        os.close(gate)
        child.finish()
        traced.unlink(missing_ok=True)
