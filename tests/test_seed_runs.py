"""Defects of the systems that holdfast covers, which concern runs: one named test for each."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import holdfast
from holdfast import AfterToolCall, EveryN, EverySeconds, InvalidRequest

from .faults import processes
from .home import Home


def turns_with_checkpoints(home: Home, policy: holdfast.Policy, limit: int) -> list[int]:
    session = home.session(str(policy))
    with session.run(policy=policy) as run:
        for turn in run.turns(limit=limit):
            run.step("model", lambda: 1)
            run.tool({"id": f"call {turn}", "name": "act", "input": {}}, lambda: 1)
    return [c.run.turn for c in session.tree() if c.run and c.trigger == "turn"]


def test_row22_every_n_counts_turns_and_nothing_else(home: Home) -> None:
    assert turns_with_checkpoints(home, EveryN(3), 10) == [3, 6, 9]
    assert turns_with_checkpoints(home, EveryN(1), 3) == [1, 2, 3]


def test_row22_not_at_the_beginning(home: Home) -> None:
    """Code before the loop is turn 0, which no policy by number wants."""
    session = home.session()
    with session.run(policy=EveryN(1)) as run:
        run.step("plan", lambda: 1)
        for _ in run.turns(limit=1):
            run.step("model", lambda: 1)
    assert [c.run.turn for c in session.tree() if c.run and c.trigger == "turn"] == [1]


@pytest.mark.parametrize("n", [0, -1, 0.5, "1", None, True])
def test_row22_n_below_one_is_refused(n: Any) -> None:
    with pytest.raises(InvalidRequest):
        EveryN(n)


def test_row30_every_policy_is_asked(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interval that nobody reads would leave no checkpoint, or one at every event."""
    now = [100.0]
    monkeypatch.setattr("holdfast.runs.run.time", SimpleNamespace(monotonic=lambda: now[0]))
    session = home.session()
    with session.run(policy=EverySeconds(10)) as run:
        for turn in run.turns(limit=9):
            now[0] += 4
            run.step("model", lambda: 1)
            assert run.turn == turn
    taken = [c.run.turn for c in session.tree() if c.run and c.trigger == "llm"]
    assert taken == [3, 6, 9]


def _agent(url: Any, effects: Path, kill_at: int, *, kill: bool) -> None:
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
def test_row35_no_tool_runs_twice_after_a_kill(tmp_path: Path, kind: str, kill_at: int) -> None:
    url = tmp_path / "s.db" if kind == "sqlite" else f"files:{tmp_path}/s"
    effects = tmp_path / "effects"
    killed = processes.fork(lambda _: _agent(url, effects, kill_at, kill=True))
    assert killed.finish(60) == -signal.SIGKILL
    with holdfast.open(url) as store:
        assert [(p.key, p.state) for p in store.pending()] == [(f"call {kill_at}", "in doubt")]
        assert [a.session for a in store.abandoned()] == ["s"]
    resumed = processes.fork(lambda _: _agent(url, effects, kill_at, kill=False))
    assert resumed.finish(60) == 0
    assert effects.read_text().split() == [str(n) for n in range(2, 8)]
    with holdfast.open(url) as store:
        assert store.session("s").load() == {"done": [*range(2, 8)]}
        assert store.pending() == []
