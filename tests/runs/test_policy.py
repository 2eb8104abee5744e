"""Policies decide after which turns and calls a run saves a checkpoint."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import holdfast
from holdfast import EveryN, EverySeconds, InvalidRequest
from tests.support.stores import Home


def turns_with_checkpoints(home: Home, policy: holdfast.Policy, limit: int) -> list[int]:
    session = home.session(str(policy))
    with session.run(policy=policy) as run:
        for turn in run.turns(limit=limit):
            run.step("model", lambda: 1)
            run.tool({"id": f"call {turn}", "name": "act", "input": {}}, lambda: 1)
    return [c.run.turn for c in session.tree() if c.run and c.trigger == "turn"]


def test_every_n_counts_turns_only(home: Home) -> None:
    assert turns_with_checkpoints(home, EveryN(3), 10) == [3, 6, 9]
    assert turns_with_checkpoints(home, EveryN(1), 3) == [1, 2, 3]


def test_every_n_ignores_what_precedes_the_first_turn(home: Home) -> None:
    """Code before the loop is turn 0, which no policy by number wants."""
    session = home.session()
    with session.run(policy=EveryN(1)) as run:
        run.step("plan", lambda: 1)
        for _ in run.turns(limit=1):
            run.step("model", lambda: 1)
    assert [c.run.turn for c in session.tree() if c.run and c.trigger == "turn"] == [1]


@pytest.mark.parametrize("n", [0, -1, 0.5, "1", None, True])
def test_every_n_refuses_n_below_one(n: Any) -> None:
    with pytest.raises(InvalidRequest):
        EveryN(n)


def test_every_seconds_follows_its_interval(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interval that nobody reads would leave no checkpoint, or one at every event."""
    now = [100.0]
    monkeypatch.setattr("holdfast.runs.run_core.time", SimpleNamespace(monotonic=lambda: now[0]))
    session = home.session()
    with session.run(policy=EverySeconds(10)) as run:
        for turn in run.turns(limit=9):
            now[0] += 4
            run.step("model", lambda: 1)
            assert run.turn == turn
    taken = [c.run.turn for c in session.tree() if c.run and c.trigger == "llm"]
    assert taken == [3, 6, 9]
