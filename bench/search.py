"""Lists of checkpoints by filters, and searches for text, among many checkpoints."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from .lab import Lab, Row
from .messages import Writer
from .stores import disk_usage, opened
from .timing import Ratio, duration, interleave, seconds

MB = 1e6
RARE = 10
# Each filter finds the same ten checkpoints.
FILTERS: dict[str, dict[str, Any]] = {
    "tag": {"tag": "rare"},
    "tag and meta": {"tag": "rare", "meta": {"rare": True}},
    "label": {"label": "rare"},
    "trigger": {"trigger": "rare"},
    "status": {"status": "failed"},
    "agent": {"agent": "rare"},
}


def checkpoints(lab: Lab) -> list[Row]:
    many, few = lab.pick(100_000, 5_000), 1_000
    paths = {count: lab.path(f"find-{count}") for count in (many, few)}
    for count, path in paths.items():
        _build(path, count)
    scanned, indexed = (float(_child("measure", paths[many], many, how)) for how in ("meta", "tag"))
    with opened(paths[many]) as large, opened(paths[few]) as small:
        found: dict[str, tuple[Ratio, list[float], list[float]]] = {}
        for name, filters in FILTERS.items():

            def search(store: Any, filters: dict[str, Any] = filters) -> Callable[[], object]:
                assert sum(1 for _ in store.find(**filters)) == RARE
                return lambda: list(store.find(**filters))

            taken = interleave(
                lab.pick(50, 5), large=lambda _: search(large), small=lambda _: search(small)
            )
            ratio = Ratio.of(taken["large"], taken["small"])
            found[name] = ratio, taken["large"], taken["small"]
    worst = max(ratio.middle for ratio, _, _ in found.values())
    return [
        lab.row(
            f"`checkpoints()` lists {RARE} checkpoints among {many:,}",
            f"≤ 3 × the time among {few:,}",
            "; ".join(
                f"by {name} {ratio} ({duration(large)} / {duration(small)})"
                for name, (ratio, large, small) in found.items()
            ),
            passed=worst <= 3,
        ),
        lab.row(
            f"`checkpoints()` that goes through {many:,} checkpoints",
            "resident memory grows ≤ 20 MB",
            f"{scanned:.1f} MB by meta alone, {indexed:.1f} MB by meta and a tag that all have",
            passed=max(scanned, indexed) <= 20,
        ),
    ]


_FOUND = 20
"""Hits of a page, as the command line and the viewer ask for them."""


def text(lab: Lab) -> list[Row]:
    """Measure searches for a rare, a frequent and an absent word, and saves beside the index."""
    count = lab.pick(100_000, 2_000)
    path, plain = lab.path("text"), lab.path("text-plain")
    _talk(path, count)
    shutil.copyfile(path, plain)
    before = disk_usage(path)
    with opened(path, "normal") as store:
        built = seconds(store.index)
    size = disk_usage(path) - before
    words = {"rare": "zweihundert", "frequent": "message", "absent": "dreihundert"}
    with opened(path) as store:

        def search(word: str) -> Callable[[], object]:
            return lambda: list(store.search(word, limit=_FOUND))

        counts = {name: len(list(store.search(word, limit=_FOUND))) for name, word in words.items()}
        assert counts == {"rare": RARE, "frequent": _FOUND, "absent": 0}
        taken = interleave(
            lab.pick(50, 5), **{name: lambda _, w=word: search(w) for name, word in words.items()}
        )
        scan = seconds(lambda: list(store.search("xx", limit=_FOUND)))  # two characters
    worst = max(statistics.median(series) for series in taken.values())
    with opened(path) as indexed, opened(plain) as bare:
        fresh = [Writer(seed).conversation(1_000_000) for seed in (31, 31)]
        sessions = [indexed.session("saves"), bare.session("saves")]

        def append(which: int) -> Callable[[int], Callable[[], object]]:
            def arm(_: int) -> Callable[[], object]:
                message = next(fresh[which])
                return lambda: sessions[which].append("messages", message)

            return arm

        saves = interleave(lab.pick(400, 40), indexed=append(0), bare=append(1))
    ratio = Ratio.of(saves["indexed"], saves["bare"])
    return [
        lab.row(
            f"`search()` of a word in {count:,} checkpoints with an index, p50 of {_FOUND} hits",
            "≤ 50 ms",
            "; ".join(f"{name} {duration(series)}" for name, series in taken.items())
            + f"; two characters, which the index cannot find: {duration([scan])}; "
            f"built in {duration([built])}, {size / MB:.0f} MB beside {before / MB:.0f} MB",
            passed=worst <= 0.05,
        ),
        lab.row(
            "`append` p50 beside an index, against a store without one",
            "≤ 1.1 ×",
            f"{ratio} ({duration(saves['indexed'])} / {duration(saves['bare'])})",
            passed=ratio.middle <= 1.1,
        ),
    ]


def _talk(path: Path, count: int) -> None:
    """Build sessions of 200 messages. Every second one has the frequent word, ten the rare one."""
    with opened(path, "normal") as store:
        fresh = Writer(7).conversation(count)
        for n, message in enumerate(fresh):
            said = {**message, "note": "message" if n % 2 else "note"}
            if n % (count // RARE) == 0:
                said["note"] += " zweihundert"
            if n % 200 == 0:
                session = store.session(f"session-{n}")
            session.append("messages", said)


def _build(path: Path, count: int) -> None:
    """Build sessions of 500 tagged checkpoints.

    Ten checkpoints that match every filter are spread over the store. They are in a separate
    session, because they need a different agent.
    """
    with opened(path, "normal") as store:
        rare = store.session("rare", agent="rare")
        done = 0
        while done < count - RARE:
            session = store.session(f"session-{done}", agent="common")
            for i in range(done, min(done + 500, count - RARE)):
                session.append("turns", i, tags=["turn"], meta={"odd": i % 2}, trigger="user")
                done += 1
                if done % (count // RARE - 1) == 0 and len(rare) < RARE:
                    _append_rare(rare, i)
        while len(rare) < RARE:
            _append_rare(rare, done)


def _append_rare(session: Any, i: int) -> None:
    session.append(
        "turns", i, tags=["rare", "turn"], label="rare", meta={"odd": i % 2, "rare": True},
        trigger="rare", status="failed",
    )  # fmt: skip


def _child(*arguments: object) -> str:
    """Measure the memory in a separate process, which holds nothing else."""
    command = [sys.executable, "-m", __name__, *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def _measure(path: Path, count: int, how: str) -> None:
    tag = "turn" if how == "tag" else None
    process = psutil.Process()
    with opened(path) as store:
        next(store.checkpoints(tag=tag, meta={"odd": 1}))  # the first page is not growth
        start = peak = process.memory_info().rss
        for n, _ in enumerate(store.checkpoints(tag=tag, meta={"odd": 1})):
            if n % 1_000 == 0:
                peak = max(peak, process.memory_info().rss)
        peak = max(peak, process.memory_info().rss)
        assert abs(n - count // 2) <= 2 * RARE
    print((peak - start) / MB)


if __name__ == "__main__":
    _measure(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
