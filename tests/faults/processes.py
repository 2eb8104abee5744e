"""Child processes that report through a pipe and may be killed, stopped or traced at any moment."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import select
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import holdfast
from holdfast.storage import memory
from holdfast.storage.files import backend
from holdfast.storage.sqlite import backend as sqlite_backend

from .ledger import wrong_line

# A child should be killed while it works, not while it imports what its parent has not used yet.
PRELOADED = [
    backend,
    memory,
    sqlite_backend,
    *[getattr(holdfast, name) for name in holdfast.__all__],
]

MADV_COLLAPSE = 25
HUGE = 2 << 20  # bytes of a huge page
PR_SET_PTRACER = (
    0x59616D61  # lets a process that is no ancestor trace this one, where that is restricted
)
ANYONE = ctypes.c_ulong(-1)


@dataclass
class Child:
    """A forked process. What it wrote so far is in `said`; `status` is set once it has ended."""

    pid: int
    pipe: int
    said: bytearray = field(default_factory=bytearray)
    status: int | None = None

    def listen(self, seconds: float, *, until: int | None = None, lines: int | None = None) -> bool:
        """Take in what the child says for so long, or until it has said so many bytes or lines.

        False once the child has closed its end.
        """
        end = time.monotonic() + seconds
        while (until is None or len(self.said) < until) and (
            lines is None or self.said.count(b"\n") < lines
        ):
            ready, _, _ = select.select([self.pipe], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                return True
            data = os.read(self.pipe, 1 << 16)
            if not data:
                return False
            self.said += data
        return True

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def finish(self, seconds: float = 60.0) -> int:
        """Wait for the end, kill the child if it takes too long; the exit status, or -signal."""
        if self.status is None:
            if self.listen(seconds):
                self.kill()
                while self.listen(1.0):
                    pass
            os.close(self.pipe)
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.status


def fork(run: Callable[[int], None]) -> Child:
    """Start `run` in a forked process; it gets a descriptor to report to.

    An exception that leaves `run` is reported as a wrong thing, as nothing but the library's own
    errors may reach a caller, and those are expected to be handled by `run`.
    """
    join_pages()
    pipe, out = os.pipe()
    pid = os.fork()
    if pid:
        os.close(out)
        return Child(pid, pipe)
    status = 1
    gc.freeze()  # to look through all that the tests hold would copy it
    try:
        os.close(pipe)
        run(out)
        status = 0
    except BaseException as error:
        where = " < ".join(
            f"{os.path.basename(f.filename)}:{f.lineno}"
            for f in traceback.extract_tb(error.__traceback__)[::-1]
        )
        os.write(out, wrong_line(0, f"unexpected: {error!r} at {where}"))
    finally:
        os._exit(status)


@functools.cache
def join_pages() -> None:
    """Join the pages of this process into huge ones, where the system can: once is enough.

    A fork copies an entry for each page. With all tests in memory, that took longer than most
    children live.
    """
    with suppress(OSError, AttributeError):
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, access, _, _, file, *name = line.split(maxsplit=5)
            start, end = (int(address, 16) for address in span.split("-"))
            of_python = access == "rw-p" and file == "0" and name in ([], ["[heap]"])
            if of_python and end - start >= HUGE:
                advise(start, end - start, MADV_COLLAPSE)


def allow_tracing() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PTRACER, ANYONE, 0, 0, 0)
