"""Clocks that stand still or go back: the order of checkpoints does not depend on them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import holdfast

SAVES = 5


def save_some(url: str, label: str) -> list[str]:
    """Save a few times to the session, as one process with one clock would; the ids in order."""
    with holdfast.open(url) as store:
        session = store.session("main")
        state = session.load() if session.head else {"log": []}
        ids = []
        for number in range(SAVES):
            state["log"].append(f"{label}/{number}")
            ids.append(session.save(state).id)
        return ids


def save_under(faketime: str, url: str, label: str) -> list[str]:
    """The same in a process that sees the clock that `faketime` makes for it."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "DONT_FAKE_MONOTONIC": "1",  # setting a clock does not change how time passes
    }
    command = ["faketime", "-f", faketime, sys.executable, "-m", f"{__package__}.clock", url, label]
    done = subprocess.run(command, check=True, env=environment, capture_output=True, timeout=60)
    ids: list[str] = json.loads(done.stdout)
    return ids


def findings(url: str, ids: list[str], labels: list[str]) -> list[str]:
    """Whether the history, the head and the order of ids are those of the saves."""
    found = []
    with holdfast.open(url) as store:
        session = store.session("main")
        path = list(session.history())[::-1]
        if [checkpoint.id for checkpoint in path] != ids:
            found.append("the history is not in the order of the saves")
        if ids != sorted(ids):
            found.append("the ids do not sort in the order of the saves")
        if [checkpoint.seq for checkpoint in path] != sorted(c.seq for c in path):
            found.append("seq does not follow the order of the saves")
        if session.head is None or session.head.id != ids[-1]:
            found.append("the head is not the latest save")
        log = [f"{label}/{number}" for label in labels for number in range(SAVES)]
        if session.load()["log"] != log:
            found.append("the latest state is not that of the latest save")
        if not store.verify(read_data=True).ok:
            found.append("verify reports damage")
    return found


@contextmanager
def wall_clock(now: Callable[[float], float]) -> Iterator[None]:
    """Let `time.time` and `time.time_ns` answer `now(the true time)` in this process."""
    names = ("time", "time_ns")
    real: dict[str, Any] = {name: getattr(time, name) for name in names}
    time.time = lambda: now(real["time"]())
    time.time_ns = lambda: int(now(real["time"]()) * 1e9)
    try:
        yield
    finally:
        for name in names:
            setattr(time, name, real[name])


if __name__ == "__main__":
    print(json.dumps(save_some(*sys.argv[1:])))
