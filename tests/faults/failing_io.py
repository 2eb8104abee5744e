"""The n-th system call on a file of the store fails: an error or a true acknowledgement."""

from __future__ import annotations

import errno
import functools
import mmap
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from . import processes, workload
from .checking import findings, scratch
from .ledger import Ledger, complete_lines
from .workload import Backend, State, Step, url_of
from .writer import Line, Writer

# What makes a call where all is Python: strace, which costs as much as the run, need not be asked.
INSIDE = {"pwrite64": ["pwrite"], "fsync": ["fsync"], "rename": ["rename", "replace"]}


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
    first: int = 1,
    stride: int = 1,
    backend: Backend = "sqlite",
    until: Sequence[str] = (),
) -> Report:
    """Let every n-th call fail in turn, until a run is through before it comes to that.

    Or `until` a failure says one of these: a mutant need be caught only once.
    """
    report = Report()
    inside = backend == "files" and fault.call in INSIDE
    for n in range(first, limit, stride):
        with scratch() as folder:
            steps = workload.SCRIPTS[script]()
            if inside:
                child, injected = run_inside(fault, n, folder, steps, make, backend)
            else:
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
                if any(what in report.failures[-1] for what in until):
                    return report
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
    child, trace = traced(inject, folder, steps, make, backend)
    return child, trace.count(b"(INJECTED)")


def traced(
    inject: str,
    folder: Path,
    steps: list[Any],
    make: Callable[[str, int], Any],
    backend: Backend,
) -> tuple[processes.Child, bytes]:
    """The same with all that strace has noted of such calls."""
    warm_up(backend)
    go, gate = os.pipe()

    def write(out: int) -> None:
        os.close(gate)
        processes.allow_tracing()
        os.read(go, 1)
        make(url_of(folder, backend), out).run(steps)

    child = processes.fork(write)
    os.close(go)
    notes = folder.with_suffix(".trace")
    command = ["strace", "-f", "-p", str(child.pid), "-o", str(notes)]
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
        return child, notes.read_bytes()
    finally:
        os.close(gate)
        child.finish()
        notes.unlink(missing_ok=True)


# -- without strace --------------------------------------------------------------------------------


class Calls:
    """Counts the calls of one kind in this process and those forked from here, and lets some fail.

    Only those made by functions of `os`: a test sees to it that no others are made.
    """

    def __init__(self) -> None:
        self._shared = memoryview(mmap.mmap(-1, 16)).cast("q")

    @property
    def made(self) -> int:
        return self._shared[0]

    @property
    def failed(self) -> int:
        return self._shared[1]

    def count(self, fault: Fault, n: int = 0) -> None:
        """From here on, and for good; the n-th call fails."""
        code = getattr(errno, fault.error)
        for name in INSIDE[fault.call]:
            setattr(os, name, self._counting(getattr(os, name), code, fault.forever, n))

    def _counting(self, call: Any, code: int, forever: bool, n: int) -> Any:
        def counted(*arguments: Any, **more: Any) -> Any:
            self._shared[0] += 1
            if self.made == n or (forever and self.made > n > 0):
                self._shared[1] += 1
                raise OSError(code, os.strerror(code))
            return call(*arguments, **more)

        return counted


def run_inside(
    fault: Fault, n: int, folder: Path, steps: list[Any], make: Make, backend: Backend
) -> tuple[processes.Child, int]:
    """What `run` does, for a backend whose calls are all made by Python."""
    warm_up(backend)
    calls = Calls()

    def write(out: int) -> None:
        calls.count(fault, n)
        make(url_of(folder, backend), out).run(steps)

    child = processes.fork(write)
    child.finish()
    return child, calls.failed


def counted(call: str, script: str, backend: Backend) -> tuple[int, int]:
    """How many calls of a kind one run makes: as counted inside, and by strace."""
    calls = Calls()

    def make(url: str, out: int) -> Writer:
        calls.count(Fault(call, "EIO"))
        return Writer(url, out)

    with scratch() as folder:
        never = f"{call}:error=EIO:when=65535"
        _, trace = traced(never, folder, workload.SCRIPTS[script](), make, backend)
    return calls.made, trace.count(f" {call}(".encode())
