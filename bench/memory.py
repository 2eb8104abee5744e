"""Resident memory of a process that saves to many large sessions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

from .lab import Lab, Row
from .stores import opened

MB = 1e6


def many_sessions(lab: Lab) -> list[Row]:
    """Measure in a separate process, which did not build the store and holds no messages."""
    count = lab.pick(1_000, 50)
    path = lab.path("memory")
    _child("build", path, count)
    end, peak = (float(value) for value in _child("measure", path, count).split())
    return [
        lab.row(
            f"Opening a store with {count:,} sessions of 1 MB and saving to each",
            "resident memory grows ≤ 150 MB",
            f"{peak:.0f} MB at its highest, {end:.0f} MB at the end",
            passed=peak <= 150,
        )
    ]


def _child(task: str, path: Path, count: int) -> str:
    command = [sys.executable, "-m", __name__, task, str(path), str(count)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def _build(path: Path, count: int) -> None:
    from .messages import Writer

    writer = Writer(12)
    with opened(path, "normal") as store:
        for i in range(count):
            messages = list(writer.conversation(850))
            store.session(f"session-{i}").save({"messages": messages})


def _measure(path: Path, count: int) -> None:
    process = psutil.Process()
    start = process.memory_info().rss
    peak = 0
    with opened(path) as store:
        sessions = [store.session(f"session-{i}") for i in range(count)]
        for i, session in enumerate(sessions):
            state = session.load()
            state["messages"].append({"role": "user", "content": f"Now do part {i}."})
            session.save(state)
            peak = max(peak, process.memory_info().rss)
        del state
        print((process.memory_info().rss - start) / MB, (peak - start) / MB)


if __name__ == "__main__":
    {"build": _build, "measure": _measure}[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))
