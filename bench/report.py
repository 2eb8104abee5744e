"""The table of results, and the page that contains it."""

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

`make bench` writes this page. The last column says whether a measure is within its limit: ✓ yes,
✗ no, – not judged.

**How it is measured.** Both sides of a comparison are measured in one run, in turn within the
same loop, with WAL and `synchronous=FULL` on both sides unless a line says otherwise. A ratio is
the median over blocks of rounds, followed by the range over the blocks in brackets. The times
next to it are medians too. A size is that of all files of a closed store; 1 KB is 1,000 bytes.
JSON sizes are those of compact JSON. After a size is measured, the store is loaded and compared
with the saved states.

**Why some limits are missed:** see [what an append costs](decisions.md#what-an-append-costs) and
[how many saves a server takes](scaling.md#throughput). Rows near their limits vary with the disk.
In about twenty runs on machines of this kind, an append took 1.46 to 1.6 times as long as a raw
commit with FULL, and 3.7 to 4.0 times with NORMAL. An append to files took 1.24 to 1.5 times as
long as its bare system calls, and a step 1.31 to 1.43 times as long as two raw commits.

**Terms.** *The peer* is LangGraph's `SqliteSaver`, called through `put`, `get_tuple` and `list`.
It gets message objects, as in LangGraph's own runtime. Where a line says *with plain dicts*, it
gets dicts instead, which are much cheaper for it. *A raw commit* is one transaction that inserts
one row through apsw. Messages are made from the source text of the standard library: questions,
tool calls, tool results and answers of about 1.2 KB. No paragraph occurs twice. {runs}

{table}

![Disk and time by number of messages]({plot})

{conditions}
"""


def table(rows: Iterable[Row]) -> str:
    lines = ["| Measure | Limit | Measured | |", "|---|---|---|---|"]
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
