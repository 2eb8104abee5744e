"""A writer that is killed, and another that goes on: what the first left unsynced counts, too.

Run as a program, for the power-loss harness:
`python -m …relay N MUTANT FOLDER LEDGER SCRIPT BACKEND DURABILITY`.
The first writer ends instead of its N-th sync; the second one finds what it has left, and builds on
it. What that promises must survive a power loss, whoever has written it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from tests.mutants import named

from . import ledger, workload
from .writer import Line, Writer


class Heir(Writer):
    """Goes on where another was stopped, and takes nothing that it finds for a promise."""

    def line(self, name: str) -> Line:
        line = super().line(name)
        head = line.handle.head
        if not line.path and head is not None:
            line.path = [(head.id, line.handle.load())]
            self.doubtful.setdefault(name, set()).add(ledger.digest(line.state))
        return line

    def begin(self, name: str, *about: Any, **options: Any) -> None:
        self.line(name)
        super().begin(name, *about, **options)


def ends_at(n: int) -> None:
    """End the process where it would sync for the n-th time."""
    sync, left = os.fsync, [n]

    def counted(handle: Any) -> None:
        left[0] -= 1
        if not left[0]:
            os._exit(0)
        sync(handle)

    os.fsync = counted  # type: ignore[assignment]


def main(
    n: str, mutant: str, folder: str, said: str, script: str, backend: Any, durability: str
) -> None:
    if mutant:
        named(mutant)()
    out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    url = workload.url_of(Path(folder), backend)
    for number, kind in enumerate((Writer, Heir)):
        pid = os.fork()
        if pid:
            os.waitpid(pid, 0)
            continue
        if kind is Writer:
            ends_at(int(n))
        writer = kind(url, out, seed=number, durability=durability)
        writer.n = number << 20
        writer.run(workload.SCRIPTS[script]())
        os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
