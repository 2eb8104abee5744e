"""The table, and the page around it."""

from __future__ import annotations

import os
import platform
import sqlite3
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

import apsw

from .lab import Row

_MARKS = {True: "✓", False: "✗", None: "–"}

_PAGE = """\
# Benchmarks

Made by `make bench`. What is compared is measured in one run, in turn within the same loop, with
WAL and `synchronous=FULL` on both sides unless a line says otherwise. Ratios are medians over
blocks of rounds, the range over the blocks in brackets; the times beside them are medians. Sizes
are those of all files of a closed store, 1 KB being 1,000 bytes. JSON sizes are compact JSON.
The stores whose size is measured are loaded back and compared with what was saved.

[What an append is made of](architecture.md#how-a-save-works) and [how many saves a server
takes](scaling.md) say why some bars are missed. Rows near their bars move with the disk: over some
twenty runs on machines of this kind, an append took 1.46 to 1.6 times a raw commit with FULL and
3.7 to 4.0 times with NORMAL, one to files 1.24 to 1.5 times the bare sequence, and a step 1.31 to
1.43 times two raw commits.

*The peer* is LangGraph's `SqliteSaver`, driven through `put`, `get_tuple` and `list`. It is given
message objects, as LangGraph's own runtime does; what it takes with plain dicts, which are much
cheaper for it, stands beside. *A raw commit* is one transaction that
inserts one row through apsw. Messages are made from standard-library source text: questions, tool
calls, tool results and answers of about 1.2 KB, no paragraph twice. {runs}

{table}

![Disk and time by number of messages]({plot})

{conditions}
"""


def table(rows: Iterable[Row]) -> str:
    lines = ["| Measure | Bar | Measured | |", "|---|---|---|---|"]
    lines += [f"| {r.measure} | {r.bar} | {r.measured} | {_MARKS[r.passed]} |" for r in rows]
    return "\n".join(lines)


def write_page(rows: Sequence[Row], path: Path, plot: Path, *, real_runs: bool) -> None:
    runs = (
        "The real runs are those of a τ-bench airline agent (gpt-4o)."
        if real_runs
        else "The runs are generated in the shape of a customer-service agent's; "
        "`--data FILE` measures real ones."
    )
    text = _PAGE.format(runs=runs, table=table(rows), plot=plot.name, conditions=_conditions())
    path.write_text(text, encoding="utf-8")


def _conditions() -> str:
    return (
        f"Python {platform.python_version()} on {platform.system()}, {os.cpu_count()} cores; "
        f"SQLite {apsw.sqlite_lib_version()} (holdfast and raw commits), "
        f"{sqlite3.sqlite_version} (the peer); "
        f"langgraph-checkpoint-sqlite {version('langgraph-checkpoint-sqlite')}."
    )
