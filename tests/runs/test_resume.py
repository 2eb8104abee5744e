"""A killed run is resumed by another process."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import AfterToolCall
from tests.faults import processes


def run_six_tool_calls(url: Any, effects: Path, kill_at: int, *, kill: bool) -> None:
    """Six tool calls; each leaves a line outside the store. Killed right after one of them."""

    def act(n: int) -> int:
        with open(effects, "a") as file:
            file.write(f"{n}\n")
        if kill and n == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return n

    def look(_: str) -> holdfast.Done | None:
        return holdfast.Done(kill_at) if f"{kill_at}\n" in effects.read_text() else None

    with (
        holdfast.open(url) as store,
        store.session("s").run(policy=AfterToolCall(), state={"done": []}) as run,
    ):
        for turn in run.turns(limit=3):
            for n in (2 * turn, 2 * turn + 1):
                call = {"id": f"call {n}", "name": "act", "input": {"n": n}}
                run.state["done"].append(run.tool(call, act, verify=look))


@pytest.mark.parametrize("kill_at", [2, 5, 7])
@pytest.mark.parametrize("kind", ["sqlite", "files"])
def test_no_tool_runs_twice_after_a_kill(tmp_path: Path, kind: str, kill_at: int) -> None:
    url = tmp_path / "s.db" if kind == "sqlite" else f"files:{tmp_path}/s"
    effects = tmp_path / "effects"
    killed = processes.fork(lambda _: run_six_tool_calls(url, effects, kill_at, kill=True))
    assert killed.finish(60) == -signal.SIGKILL
    with holdfast.open(url) as store:
        assert [(p.key, p.state) for p in store.pending()] == [(f"call {kill_at}", "in doubt")]
        assert [a.session for a in store.abandoned()] == ["s"]
    resumed = processes.fork(lambda _: run_six_tool_calls(url, effects, kill_at, kill=False))
    assert resumed.finish(60) == 0
    assert effects.read_text().split() == [str(n) for n in range(2, 8)]
    with holdfast.open(url) as store:
        assert store.session("s").load() == {"done": [*range(2, 8)]}
        assert store.pending() == []
