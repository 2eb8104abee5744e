"""Durable steps: a call that is noted before and after, against two commits and against DBOS."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import holdfast

from .lab import Lab, Row
from .latency import WARM_UP
from .raw import RawStore
from .timing import Ratio, duration, interleave


def _answer(question: str) -> dict[str, Any]:
    return {"role": "assistant", "content": f"About {question}: " + "so it goes. " * 40}


class Dbos:
    """The closest system: a workflow on SQLite whose steps are timed from within."""

    def __init__(self, path: Path) -> None:
        os.environ["DBOS__VMID"] = "bench"
        from dbos import DBOS

        self._dbos = DBOS
        DBOS(config={
            "name": "bench", "system_database_url": f"sqlite:///{path}", "log_level": "ERROR",
            "run_admin_server": False,
        })  # fmt: skip

        @DBOS.step()
        def answer(question: str) -> dict[str, Any]:
            return _answer(question)

        self.answer = answer
        DBOS.launch()

    def workflow(self, body: Callable[[], object]) -> None:
        """Run within a workflow, where calls of steps are recorded."""

        @self._dbos.workflow()
        def flow() -> None:
            body()

        flow()

    def close(self) -> None:
        self._dbos.destroy()


def steps(lab: Lab) -> list[Row]:
    rounds = lab.pick(400, 20)
    questions = (f"question {n}" for n in itertools.count())
    raw = RawStore(lab.path("raw-steps"))
    dbos = Dbos(lab.path("dbos"))
    body = b"x" * 500
    taken: dict[str, list[float]] = {}
    with holdfast.open(lab.path("steps")) as store, store.session("agent").run() as run:

        def ours(_: int) -> Callable[[], object]:
            question = next(questions)
            return lambda: run.step("answer", _answer, question)

        def twice(_: int) -> Callable[[], object]:
            def work() -> None:
                raw.commit(body)
                raw.commit(body)

            return work

        def theirs(_: int) -> Callable[[], object]:
            question = next(questions)
            return lambda: dbos.answer(question)

        def measure() -> None:
            for _ in range(lab.pick(WARM_UP, 5)):
                for arm in (ours, twice, theirs):
                    arm(0)()
            taken.update(interleave(rounds, ours=ours, raw=twice, dbos=theirs))

        dbos.workflow(measure)
    raw.close()
    dbos.close()
    against_raw = Ratio.of(taken["ours"], taken["raw"])
    against_dbos = Ratio.of(taken["dbos"], taken["ours"])
    return [
        lab.row(
            "A durable step, p50, against two raw commits, FULL",
            "≤ 1.5 ×",
            f"{against_raw} ({duration(taken['ours'])} / {duration(taken['raw'])})",
            passed=against_raw.middle <= 1.5,
        ),
        lab.row(
            "A durable step, p50, against one of DBOS 3.3.0 on SQLite",
            "≥ 4 × faster",
            f"{against_dbos} faster ({duration(taken['ours'])}; DBOS {duration(taken['dbos'])})",
            passed=against_dbos.middle >= 4,
        ),
    ]
