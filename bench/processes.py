"""Latency of durable appends by eight processes on one store, each with a separate session."""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import holdfast

from .lab import Lab, Row
from .messages import Writer
from .timing import duration

PROCESSES = 8


def _work(url: str, n: int, appends: int, begin: Any, out: Any) -> None:
    messages = list(Writer(n).conversation(appends))
    taken = []
    with holdfast.open(url) as store:
        session = store.session(f"session-{n}")
        session.save({"messages": []})
        begin.wait()
        for message in messages:
            start = time.perf_counter()
            session.append("messages", message)
            taken.append(time.perf_counter() - start)
    out.put(taken)


def own_sessions(lab: Lab) -> list[Row]:
    appends = lab.pick(500, 20)
    context = multiprocessing.get_context("spawn")
    rows = []
    for kind in ("SQLite", "files"):
        path = lab.path(f"processes-{kind}")
        url = str(path) if kind == "SQLite" else f"files:{path.parent / 'store'}"
        holdfast.open(url).close()
        begin, out = context.Barrier(PROCESSES), context.Queue()
        workers = [
            context.Process(target=_work, args=(url, n, appends, begin, out))
            for n in range(PROCESSES)
        ]
        for worker in workers:
            worker.start()
        taken = sorted(t for _ in workers for t in out.get(timeout=600))
        for worker in workers:
            worker.join()
        assert len(taken) == PROCESSES * appends
        p99, p999 = (duration([taken[len(taken) * rank // 1000]]) for rank in (990, 999))
        rows.append(
            lab.row(
                f"{PROCESSES} processes, a session each, on one store ({kind}): an `append`",
                "–",
                f"p50 {duration(taken)}, p99 {p99}, p99.9 {p999}; none was refused",
                passed=None,
            )
        )
    return rows
