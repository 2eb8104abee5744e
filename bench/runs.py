"""Whole agent runs, real ones if given, with a checkpoint at every message."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from .lab import Lab, Row
from .messages import Message, Writer, json_size, read_runs
from .peer import Peer, as_objects
from .stores import check_state, disk_usage, opened
from .timing import Ratio, seconds

SIDES = ("ours", "peer", "dicts")


def every_message(lab: Lab) -> list[Row]:
    count = lab.pick(200, 20)
    if lab.data is not None:
        runs, kind = read_runs(lab.data)[:count], "real"
    else:
        runs, kind = Writer(11).runs(count), "generated"
    taken: dict[str, list[float]] = {side: [] for side in SIDES}
    rounds = lab.pick(3, 1)
    for i in range(rounds):
        paths = {side: lab.path(f"runs-{side}-{i}") for side in SIDES}
        for side, total in _save_all(runs, paths).items():
            taken[side].append(total)
    size = {side: disk_usage(path) for side, path in paths.items()}
    time, dict_time = (Ratio.of(taken["ours"], taken[side], rounds) for side in SIDES[1:])
    messages = sum(len(run) for run in runs)
    return [
        lab.row(
            f"{len(runs)} {kind} runs ({messages:,} messages, {json_size(runs) / 1e6:.1f} MB "
            "of JSON), a checkpoint at every message: disk",
            "≤ 1/30 of the peer's file",
            f"1/{size['peer'] / size['ours']:.1f} "
            f"({size['ours'] / 1e6:.2f} MB; peer {size['peer'] / 1e6:.1f} MB); "
            f"peer with plain dicts 1/{size['dicts'] / size['ours']:.1f}",
            passed=size["ours"] * 30 <= size["peer"],
        ),
        lab.row(
            f"The same {len(runs)} {kind} runs: total time",
            "≤ the peer's",
            f"{time} ({min(taken['ours']):.1f} s; peer {min(taken['peer']):.1f} s); "
            f"peer with plain dicts {dict_time}",
            passed=time.middle <= 1,
        ),
    ]


def _save_all(runs: list[list[Message]], paths: dict[str, Path]) -> dict[str, float]:
    """Return the total seconds of each side. Both save every state, in turn."""
    taken = dict.fromkeys(SIDES, 0.0)
    peer, dict_peer = Peer(paths["peer"]), Peer(paths["dicts"])
    with opened(paths["ours"]) as store:
        for i, run in enumerate(runs):
            name = f"run-{i}"
            session = store.session(name)
            objects = as_objects(run)
            for length in range(1, len(run) + 1):
                state = {"messages": run[:length]}
                operations: dict[str, Callable[[], object]] = {
                    "ours": functools.partial(session.save, state),
                    "peer": peer.put(name, objects[:length]),
                    "dicts": dict_peer.put(name, state["messages"]),
                }
                first = length % len(SIDES)
                for side in SIDES[first:] + SIDES[:first]:
                    taken[side] += seconds(operations[side])
    peer.close()
    dict_peer.close()
    check_state(paths["ours"], f"run-{len(runs) - 1}", {"messages": runs[-1]})
    return taken
