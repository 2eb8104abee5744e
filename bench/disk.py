"""Disk space of checkpoints: the size of all files of a closed store."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from .growth import Growth
from .lab import Lab, Row
from .messages import Writer, json_size
from .stores import check_state, disk_usage, opened
from .timing import number

KB = 1000


def full_saves(lab: Lab) -> list[Row]:
    growth = lab.growth
    size, ratio = _at_end(growth.disk, growth)
    peer_size, peer_ratio = _at_end(growth.peer_disk, growth)
    return [
        lab.row(
            f"Disk after {growth.steps:,} full-state saves, one ~1.2 KB message new in each",
            "≤ 0.7 × the JSON of the final state",
            f"{number(ratio)} × ({_mb(size)}); "
            f"peer after {growth.peer_steps:,}: {number(peer_ratio)} × ({_mb(peer_size)})",
            passed=ratio <= 0.7,
        )
    ]


def _at_end(sizes: dict[int, int], growth: Growth) -> tuple[int, float]:
    """Return the last size, and its ratio to the JSON size of the state at that step."""
    step = max(sizes)
    return sizes[step], sizes[step] / growth.json[step]


def appends(lab: Lab) -> list[Row]:
    ratio = lab.long.disk_bytes / lab.long.json_bytes
    return [
        lab.row(
            f"Disk after {lab.long.steps:,} appends",
            "≤ 0.65 × the JSON of the final state",
            f"{number(ratio)} × ({_mb(lab.long.disk_bytes)})",
            passed=ratio <= 0.65,
        )
    ]


def forks(lab: Lab) -> list[Row]:
    count, steps = lab.pick(100, 10), 20
    base = list(Writer(3).conversation(lab.pick(1_000, 200)))
    path = lab.path("forks")
    with opened(path) as store:
        store.session("base").save({"messages": base})
    shared = disk_usage(path)
    writer = Writer(4)
    new_bytes = 0
    with opened(path) as store:
        origin = store.session("base")
        for i in range(count):
            fork = origin.fork(f"fork-{i}")
            messages = list(base)
            for message in writer.conversation(steps):
                messages.append(message)
                new_bytes += json_size(message)
                fork.save({"messages": messages})
    check_state(path, f"fork-{count - 1}", {"messages": messages})
    ratio = (disk_usage(path) - shared) / new_bytes
    return [
        lab.row(
            f"{count} forks of a {len(base):,}-message state, {steps} own steps each",
            f"≤ 0.8 × the JSON of the {count * steps:,} new messages, plus the one shared state",
            f"{number(ratio)} × ({_mb(disk_usage(path))}, of which shared {_mb(shared)})",
            passed=ratio <= 0.8,
        )
    ]


def sliding_window(lab: Lab) -> list[Row]:
    messages = list(Writer(5).conversation(200, size=KB))
    fresh = Writer(6).conversation(1_000_000, size=KB)

    def step() -> None:
        del messages[0]
        messages.append(next(fresh))

    return _per_step(lab, "Sliding window of 200 messages", 0.8, {"messages": messages}, step)


def append_and_edit(lab: Lab) -> list[Row]:
    messages = list(Writer(7).conversation(50, size=KB))
    writer = Writer(8)
    fresh = writer.conversation(1_000_000, size=KB)

    def step() -> None:
        messages.append(next(fresh))
        messages[-4]["content"] += f"\n[noted: {writer.prose(60, exact=True)}]"

    name = "Append and edit of the 4th-last message"
    return _per_step(lab, name, 1.5, {"messages": messages}, step)


def random_replace(lab: Lab) -> list[Row]:
    writer = Writer(9)
    items = [writer.record(200) for _ in range(2_000)]
    choice = random.Random(9)

    def step() -> None:
        items[choice.randrange(len(items))] = writer.record(200)

    return _per_step(lab, "Random replacement in 2,000 items of 200 B", 3, {"items": items}, step)


def files_in_dict(lab: Lab) -> list[Row]:
    writer = Writer(10)
    files = {f"src/part_{i % 14}/module_{i}.py": writer.code(5_000, exact=True) for i in range(200)}
    names = list(files)
    choice = random.Random(10)

    def step() -> None:
        files[choice.choice(names)] = writer.code(5_000, exact=True)

    return _per_step(lab, "200 files of 5 KB in a dict, one rewritten", 6, {"files": files}, step)


def _per_step(
    lab: Lab, name: str, bar: float, state: dict[str, Any], step: Callable[[], None]
) -> list[Row]:
    """Save ``state`` in full after each ``step`` that changes it in place."""
    steps = lab.pick(1_000, 100)
    path = lab.path(name.split(maxsplit=1)[0].lower())
    with opened(path) as store:
        store.session("steps").save(state)
    start = disk_usage(path)
    with opened(path) as store:
        session = store.session("steps")
        for _ in range(steps):
            step()
            session.save(state)
    check_state(path, "steps", state)
    grown = (disk_usage(path) - start) / steps / KB
    measured = f"{number(grown)} KB over {steps:,} steps"
    return [lab.row(f"{name}, disk per step", f"≤ {bar} KB", measured, passed=grown <= bar)]


def _mb(size: float) -> str:
    return f"{number(size / 1e6)} MB"
