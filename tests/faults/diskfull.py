"""No room left: a clear error, nothing lost, and saving goes on once there is room."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import holdfast
from holdfast.storage import fs

from . import processes, workload
from .checking import findings, named, scratch
from .failing_io import Swallowing
from .ledger import Ledger, complete_lines, wrong_line
from .workload import Backend, Step, url_of
from .writer import Writer

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_REC, MS_PRIVATE = 0x4000, 1 << 18
INSISTENCE = 6  # how often the writer is refused before room is made


class Filling(Writer):
    """Writes until there is no room, insists a little, gets room, goes on, and checks everything.

    Only `Unavailable` will do as an answer: the caller has to learn that the fault is not its own.
    """

    def __init__(self, url: str, out: int) -> None:
        super().__init__(url, out)
        self.lines_said: list[bytes] = []
        self.refused = 0

    def say(self, line: bytes) -> None:
        super().say(line)
        self.lines_said.append(line)

    def failed(self, step: Step, error: holdfast.HoldfastError) -> None:
        super().failed(step, error)
        self.refused += 1
        if not isinstance(error, holdfast.Unavailable):
            self.say(wrong_line(self.n, f"no room was reported as {named(error)}"))

    def fill(self, make_room: Callable[[], None]) -> None:
        steps = [Step("append", count=4), Step("save", "side", count=30), Step("patch")] * 200
        for step in steps:
            if not self.attempt(step) and self.refused >= INSISTENCE:
                break
        else:
            self.say(wrong_line(self.n, "there was always room"))
        make_room()
        for step in workload.short():
            if step.kind != "fork" and not self.attempt(step):
                self.say(wrong_line(self.n, f"{step.kind} fails although there is room again"))
        self.close()
        for found in findings(self.url, Ledger.of(self.lines_said)):
            self.say(wrong_line(self.n, found))


class FillingBlindly(Filling, Swallowing):
    """A mutant: takes a refused write for a success."""


@dataclass
class Report:
    runs: int = 0
    refused: int = 0
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        head = f"{self.runs} runs, {self.refused} operations refused, {len(self.failures)} failures"
        return "\n".join([head, *self.failures[:10]])

    def judge(self, child: processes.Child, circumstance: str) -> None:
        status = child.finish()
        ledger = Ledger.of(complete_lines(bytes(child.said)))
        found = [] if status == 0 else [f"the writer ended with {status}"]
        found += dict.fromkeys(ledger.wrong)
        self.runs += 1
        self.refused += len(ledger.errors)
        if found:
            self.failures.append(f"  {circumstance}: {'; '.join(found[:3])}")


def limited(
    sizes: Iterable[int], make: type[Filling] = Filling, backend: Backend = "sqlite"
) -> Report:
    """Files may not grow beyond each of `sizes` (RLIMIT_FSIZE), until that is lifted."""
    report = Report()
    for size in sizes:
        with scratch() as folder:

            def run(out: int, size: int = size, url: str = url_of(folder, backend)) -> None:
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
                lifted = (hard, hard)
                make(url, out).fill(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, lifted))

            report.judge(processes.fork(run), f"files of at most {size} bytes")
    return report


def mounted(
    sizes: Iterable[int], make: type[Filling] = Filling, backend: Backend = "sqlite"
) -> Report:
    """The file system itself is full, for each of `sizes`, until its ballast goes overboard."""
    report = Report()
    for size in sizes:
        with scratch() as folder:

            def run(out: int, size: int = size, folder: Path = folder) -> None:
                mount_private(folder, size)
                ballast = folder / "ballast"
                ballast.write_bytes(bytes(size // 2))
                make(url_of(folder, backend), out).fill(ballast.unlink)

            report.judge(processes.fork(run), f"a file system of {size} bytes")
    return report


def mount_private(folder: Path, size: int) -> None:
    """Mount a file system in memory that only this process sees and that ends with it."""
    user, group = os.getuid(), os.getgid()
    if user:
        _call("unshare", CLONE_NEWUSER | CLONE_NEWNS)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    else:
        _call("unshare", CLONE_NEWNS)
    _call("mount", b"none", b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None)
    options = f"size={size}".encode()
    _call("mount", b"tmpfs", os.fsencode(folder), b"tmpfs", ctypes.c_ulong(0), options)


def why_not_mounted() -> str:
    """Why `mount_private` does not work here; empty if it does."""
    with scratch() as folder:
        child = processes.fork(lambda out: mount_private(folder, 1 << 20))
        return "" if child.finish() == 0 else child.said.decode().strip().rsplit("\\n", 2)[-2]


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


class Freeing:
    """A child that fills a small file system, and then makes room on it by what a store offers."""

    def __init__(self, folder: Path, size: int, backend: Backend) -> None:
        mount_private(folder, size)
        self.folder = folder
        self.store = holdfast.open(url_of(folder, backend), create=True)
        self.names: list[str] = []

    def save(self) -> None:
        session = self.store.session(f"s{len(self.names)}")
        self.names.append(session.name)
        for _ in range(30):
            session.append("log", os.urandom(300).hex())

    def save_all(self) -> None:
        refused = 0
        while refused < INSISTENCE:
            try:
                self.save()
            except holdfast.Unavailable:
                refused += 1

    def fill(self, left: int) -> None:
        """As other programs do, but for some bytes."""
        with (self.folder / "ballast").open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))
        os.truncate(self.folder / "ballast", (self.folder / "ballast").stat().st_size - left)

    def free(self) -> int:
        return fs.free_space(self.folder)

    def make_room(self) -> Iterator[str]:
        """Delete, prune and gc; what is wrong then."""
        before = self.free()
        for name in self.names[:3]:
            self.store.session(name).delete()
        self.store.prune(holdfast.Retention(keep_last=1))
        self.store.gc()
        if self.free() - before < 100_000:
            yield f"{before} bytes were free, and now {self.free()}"
        self.store.session("new").save({"n": 1})
        kept = [info.name for info in self.store.sessions() if info.head is not None]
        if len(kept) < len(self.names) - 3 - INSISTENCE or not self.store.verify().ok:
            yield "something is lost"
        self.store.close()


def freed(size: int, backend: Backend, act: Callable[[Freeing], Iterable[str]]) -> list[str]:
    """What is wrong, once a child has done something in a file system of this size."""
    with scratch() as folder:

        def run(out: int) -> None:
            for found in act(Freeing(folder, size, backend)):
                os.write(out, wrong_line(0, found))

        child = processes.fork(run)
        child.finish()
        return Ledger.of(complete_lines(bytes(child.said))).wrong
