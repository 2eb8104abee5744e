"""``python -m bench``: run the measures, print the table, write the page and the chart."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from . import (
    commands,
    concurrency,
    disk,
    files,
    gc,
    graphs,
    latency,
    memory,
    plot,
    postgres,
    processes,
    reads,
    report,
    retention,
    runs,
    search,
    steps,
    transfer,
    viewer,
)
from .lab import Lab, Row

MEASURES: dict[str, Callable[[Lab], list[Row]]] = {
    "disk-saves": disk.full_saves,
    "disk-appends": disk.appends,
    "runs": runs.every_message,
    "append-length": latency.append_by_length,
    "append-tiny": latency.append_tiny,
    "append-raw": latency.append_against_raw,
    "steps": steps.steps,
    "save-large": latency.save_large,
    "save-small": latency.save_small,
    "load": reads.load,
    "fork": reads.fork,
    "disk-forks": disk.forks,
    "diff": reads.diff,
    "disk-window": disk.sliding_window,
    "disk-edit": disk.append_and_edit,
    "disk-replace": disk.random_replace,
    "disk-files": disk.files_in_dict,
    "history": reads.history,
    "summaries": reads.summaries,
    "memory": memory.many_sessions,
    "threads": concurrency.threads,
    "loop": concurrency.loop,
    "processes": processes.own_sessions,
    "gc": gc.collect,
    "erasure": gc.erasure,
    "plan": retention.plan,
    "retention": retention.automatic,
    "checkpoints": search.checkpoints,
    "search-index": search.text,
    "files-append": files.append,
    "files-saves": files.full_saves,
    "copy": transfer.copy,
    "start": commands.start,
    "graph": graphs.run,
    "graph-history": graphs.history,
    "viewer": viewer.first_view,
    "export": viewer.export,
    **postgres.MEASURES,
}


def main() -> int:
    options = _options()
    chosen = [name for name in MEASURES if not options.only or name in options.only]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        lab = Lab(Path(folder), quick=options.quick, full_peer=options.full_peer, data=options.data)
        for name in chosen:
            start = time.perf_counter()
            rows += MEASURES[name](lab)
            print(f"{name}: {time.perf_counter() - start:.1f} s", file=sys.stderr)
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            picture = options.out / "benchmarks.png"
            plot.draw(lab.growth, picture)
            page = options.out / "benchmarks.md"
            report.write_page(rows, page, picture, real_runs=options.data is not None)
    print(report.table(rows))
    missed = [row for row in rows if row.passed is False]
    if missed:
        print(f"{len(missed)} of {len(rows)} limits missed", file=sys.stderr)
    elif options.quick:
        print("quick sizes: the limits were not checked", file=sys.stderr)
    return 1 if missed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, no limits: under a minute"
    )
    parser.add_argument(
        "--only", action="append", choices=MEASURES, metavar="NAME", help=", ".join(MEASURES)
    )
    parser.add_argument("--data", type=Path, help="real runs: message lists as JSON or .json.gz")
    parser.add_argument(
        "--full-peer", action="store_true", help="let the peer save all 2,000 states (2.4 GB)"
    )
    parser.add_argument("--out", type=Path, help="folder for the page and the chart")
    options = parser.parse_args()
    if options.out is None and not (options.quick or options.only):
        options.out = Path(__file__).parents[1] / "docs"
    return options


if __name__ == "__main__":
    sys.exit(main())
