"""Many processes at once: on one session exactly one wins each step, on others none waits long."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import holdfast

from . import processes
from .checking import named, scratch
from .ledger import complete_lines
from .workload import Backend, url_of

SECONDS = 120.0


@dataclass
class Report:
    saved: int = 0
    conflicts: int = 0
    seconds: list[float] = field(default_factory=list)  # what each acknowledged save took
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        head = f"{self.saved} saves, {self.conflicts} conflicts, {len(self.failures)} failures"
        times = ", ".join(f"p{rank} {self.percentile(rank) * 1e3:.2f} ms" for rank in (50, 99, 100))
        return "\n".join([f"{head}; a save: {times}", *self.failures[:10]])

    def percentile(self, rank: int) -> float:
        ordered = sorted(self.seconds) or [0.0]
        return ordered[min(len(ordered) - 1, len(ordered) * rank // 100)]


Racer = Callable[[Any, int, int, Callable[[dict[str, Any]], None]], None]


def fair(store: Any, worker: int, saves: int, tell: Callable[[dict[str, Any]], None]) -> None:
    """Add one's own entries to a shared list, and start over from the new head on a conflict."""
    session = store.session("shared")
    for number in range(saves):
        entry = f"{worker}/{number}"
        while True:
            state = session.load()
            started = time.perf_counter()
            try:
                if number % 2:
                    saved = session.append("log", entry)
                else:
                    saved = session.save({**state, "log": [*state["log"], entry]})
            except holdfast.HeadMoved:
                tell({"conflict": entry})
                continue
            tell({"saved": entry, "id": saved.id, "took": time.perf_counter() - started})
            break


def stubborn(store: Any, worker: int, saves: int, tell: Callable[[dict[str, Any]], None]) -> None:
    """A mutant: on a conflict it takes the new head for its parent, but saves its old state."""
    session = store.session("shared")
    for number in range(saves):
        entry = f"{worker}/{number}"
        state = session.load()
        state["log"].append(entry)
        while True:
            try:
                saved = session.save(state)
            except holdfast.HeadMoved:
                session.refresh()
                continue
            tell({"saved": entry, "id": saved.id, "took": 0.0})
            break


def alone(store: Any, worker: int, saves: int, tell: Callable[[dict[str, Any]], None]) -> None:
    """Append to a session that nobody else writes to."""
    session = store.session(f"session-{worker}")
    session.save({"log": []})
    for number in range(saves):
        started = time.perf_counter()
        saved = session.append("log", f"{worker}/{number}")
        tell({"saved": number, "id": saved.id, "took": time.perf_counter() - started})


def race(
    racer: Racer,
    *,
    workers: int = 8,
    saves: int = 25,
    folder: Path | None = None,
    backend: Backend = "sqlite",
    sabotage: Callable[[], None] | None = None,
) -> Report:
    """Let `workers` processes run at once on one store; `sabotage` breaks the library in them."""
    with scratch() as memory:
        url = url_of(folder or memory, backend)
        with holdfast.open(url) as store:
            store.session("shared").save({"log": []})
        go, gate = os.pipe()

        def run(worker: int, out: int) -> None:
            os.close(gate)
            if sabotage is not None:
                sabotage()
            with holdfast.open(url) as store:
                os.read(go, 1)  # returns for all of them when the gate is closed
                racer(store, worker, saves, lambda line: _tell(out, line))

        children = [processes.fork(partial(run, worker)) for worker in range(workers)]
        os.close(go)
        os.close(gate)
        report = Report()
        told: list[list[dict[str, Any]]] = []
        for child in children:
            status = child.finish(SECONDS + 2 * saves)
            lines = [json.loads(line) for line in complete_lines(bytes(child.said))]
            report.failures += [f"  {line['what']}" for line in lines if "what" in line]
            if status:
                report.failures.append(f"  a worker ended with {status}")
            told.append([line for line in lines if "saved" in line])
            report.conflicts += sum("conflict" in line for line in lines)
        report.seconds = [line["took"] for lines in told for line in lines]
        report.saved = len(report.seconds)
        with holdfast.open(url) as store:
            try:
                judge = _judge_each if racer is alone else _judge_shared
                report.failures += [f"  {found}" for found in judge(store, told)]
                if not store.verify(read_data=True).ok:
                    report.failures.append("  verify reports damage")
            except holdfast.HoldfastError as error:
                report.failures.append(f"  {named(error)}")
    return report


def _judge_shared(store: Any, told: list[list[dict[str, Any]]]) -> list[str]:
    """Each acknowledged save stands in the history once, and adds exactly its own entry."""
    session = store.session("shared")
    path = list(session.history())[::-1]
    owners = {line["id"]: line["saved"] for lines in told for line in lines}
    seen = Counter(checkpoint.id for checkpoint in path[1:])
    found = [f"lost: {entry} ({id_})" for id_, entry in owners.items() if not seen[id_]]
    found += [f"in the history but not acknowledged: {id_}" for id_ in seen if id_ not in owners]
    found += [f"in the history {count} times: {id_}" for id_, count in seen.items() if count > 1]
    log: list[str] = []
    for before, checkpoint in pairwise(path):
        if checkpoint.parent != before.id:
            found.append(f"the parent of {checkpoint.id} is not the head before it")
        if not (checkpoint.seq > before.seq and checkpoint.step == before.step + 1):
            found.append(f"{checkpoint.id} is out of order")
        log = [*log, owners.get(checkpoint.id, "?")]
        if session.load(checkpoint.id)["log"] != log:
            found.append(f"lost update: {checkpoint.id} does not add its entry to its parent's")
            log = session.load(checkpoint.id)["log"]
    return found


def _judge_each(store: Any, told: list[list[dict[str, Any]]]) -> list[str]:
    found = []
    for worker, lines in enumerate(told):
        session = store.session(f"session-{worker}")
        path = [checkpoint.id for checkpoint in session.history()][::-1][1:]
        if path != [line["id"] for line in lines]:
            found.append(f"session {worker}: the history is not what was acknowledged")
        if session.load()["log"] != [f"{worker}/{number}" for number in range(len(lines))]:
            found.append(f"session {worker}: the state is not what was acknowledged")
    return found


def _tell(out: int, line: dict[str, Any]) -> None:
    os.write(out, json.dumps(line).encode() + b"\n")
