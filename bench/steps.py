"""Durable steps: a call that is recorded before and after, against two commits and DBOS."""

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
from .timing import Arm, Ratio, duration, interleave


def _answer(question: str) -> dict[str, Any]:
    return {"role": "assistant", "content": f"About {question}: " + "so it goes. " * 40}


class Dbos:
    """DBOS, the closest system: a workflow on SQLite whose steps are timed from within."""

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
        """Run in a workflow, which records the calls of steps."""

        @self._dbos.workflow()
        def flow() -> None:
            body()

        flow()

    def close(self) -> None:
        self._dbos.destroy()


def steps(lab: Lab) -> list[Row]:
    """Measure against raw commits first: later, the threads of DBOS would slow them down."""
    questions = (f"question {n}" for n in itertools.count())
    raw = RawStore(lab.path("raw-steps"))
    body = b"x" * 500
    by_dbos: dict[str, list[float]] = {}
    with holdfast.open(lab.path("steps")) as store, store.session("agent").run() as run:

        def ours(_: int) -> Callable[[], object]:
            question = next(questions)
            return lambda: run.step("answer", _answer, question)

        def twice(_: int) -> Callable[[], object]:
            def work() -> None:
                raw.commit(body)
                raw.commit(body)

            return work

        by_raw = _measured(lab, ours=ours, raw=twice)
        dbos = Dbos(lab.path("dbos"))

        def theirs(_: int) -> Callable[[], object]:
            question = next(questions)
            return lambda: dbos.answer(question)

        dbos.workflow(lambda: by_dbos.update(_measured(lab, ours=ours, dbos=theirs)))
    raw.close()
    dbos.close()
    against_raw = Ratio.of(by_raw["ours"], by_raw["raw"])
    against_dbos = Ratio.of(by_dbos["dbos"], by_dbos["ours"])
    return [
        lab.row(
            "A durable step, p50, against two raw commits, FULL",
            "≤ 1.5 ×",
            f"{against_raw} ({duration(by_raw['ours'])} / {duration(by_raw['raw'])})",
            passed=against_raw.middle <= 1.5,
        ),
        lab.row(
            "A durable step, p50, against one of DBOS 3.3.0 on SQLite",
            "≥ 4 × faster",
            f"{against_dbos} faster ({duration(by_dbos['ours'])}; "
            f"DBOS {duration(by_dbos['dbos'])})",
            passed=against_dbos.middle >= 4,
        ),
    ]


def _measured(lab: Lab, **arms: Arm) -> dict[str, list[float]]:
    for _ in range(lab.pick(WARM_UP, 5)):
        for arm in arms.values():
            arm(0)()
    return interleave(lab.pick(400, 20), **arms)
