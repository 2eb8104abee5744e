"""A run whose budget is spent is halted before its next step, and can be resumed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import holdfast
from holdfast import AfterLLMResponse, Budget, BudgetSpent, InvalidRequest, Usage
from holdfast.aio import Workers
from tests.runs.test_runs import Crash, crashed
from tests.support.stores import Home

STEP = Usage(60, 40, cost=0.1, model="m")


class Agent:
    """It makes a step and a tool call in each turn. Each step spends the same."""

    def __init__(self, outside: bool = False, crash_at: int | None = None) -> None:
        self.outside, self.crash_at = outside, crash_at
        self.made: list[str] = []

    def _model(self, run: holdfast.Run, turn: int) -> int:
        self.made.append(f"model {turn}")
        if not self.outside:
            run.add_usage(STEP)
        return turn

    def __call__(self, run: holdfast.Run) -> None:
        for turn in run.turns(limit=5):
            run.step("model", partial(self._model, run, turn))
            if self.outside:
                run.add_usage(STEP)
            if turn == self.crash_at and not run.resumed:
                raise Crash
            call = {"id": f"c{turn}", "name": "act", "input": {}}
            run.tool(call, lambda turn=turn: self.made.append(f"tool {turn}"))


def attempt(session: holdfast.Session, agent: Agent, **options: Any) -> holdfast.Run:
    run = session.run(**options)
    try:
        with run:
            try:
                agent(run)
            except Crash:
                crashed(run)
                raise
    except Crash:
        pass
    return run


def made(turns: int, *, last: bool = True) -> list[str]:
    """The calls of so many turns; without `last`, the last tool call is missing."""
    out = [f"{kind} {turn}" for turn in range(1, turns + 1) for kind in ("model", "tool")]
    return out if last else out[:-1]


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize(
    ("budget", "spent", "calls"),
    [
        (Budget(cost=0.3), BudgetSpent("cost", 0.3, 0.3), made(3, last=False)),
        (Budget(cost=0.25), BudgetSpent("cost", 0.25, 0.3), made(3, last=False)),
        (Budget(tokens=200), BudgetSpent("tokens", 200, 200), made(2, last=False)),
        (Budget(turns=2), BudgetSpent("turns", 2, 2), made(2)),
        (Budget(cost=0), BudgetSpent("cost", 0, 0.0), []),
        (Budget(cost=9, tokens=300, turns=4), BudgetSpent("tokens", 300, 300), made(3, last=False)),
    ],
)
def test_a_spent_budget_halts_the_run(
    home: Home, outside: bool, budget: Budget, spent: BudgetSpent, calls: list[str]
) -> None:
    session, agent = home.session(), Agent(outside)
    run = attempt(session, agent, budget=budget)
    assert run.over_budget == spent
    assert agent.made == calls
    head = home.reopened().session("s").head
    assert head is not None
    assert (head.status, head.trigger, head.reason) == ("halted", "budget", spent.summary)
    [left] = home.store.abandoned(halted=True)
    assert (left.state, left.over_budget, left.reason) == ("over budget", spent, spent.summary)
    assert (home.store.abandoned(), home.session().pending()) == ([], [])
    assert home.store.verify().ok


@pytest.mark.parametrize("larger", [None, Budget(cost=0.51, tokens=501, turns=5)])
def test_a_larger_budget_resumes_it(memory: Home, larger: Budget | None) -> None:
    session, agent = memory.session(), Agent()
    attempt(session, agent, budget=Budget(cost=0.2))
    assert agent.made == made(2, last=False)
    checkpoints = len(session)
    for _ in range(3):  # with the same budget, it stops at the same place, without a trace
        assert attempt(session, agent, budget=Budget(cost=0.2)).over_budget
        assert len(session) == checkpoints
    assert attempt(session, agent, budget=larger).over_budget is None
    assert agent.made == made(5)
    assert session.head is not None
    assert session.head.status == "completed"
    assert session.usage().spent == session.usage().path == Usage(300, 200, cost=0.5, model="m")


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("policy", [None, AfterLLMResponse(), holdfast.Never()])
@pytest.mark.parametrize("crash_at", [1, 2])
def test_a_budget_counts_attempts_before_a_crash_once(
    memory: Home, outside: bool, policy: Any, crash_at: int
) -> None:
    session, agent = memory.session(), Agent(outside, crash_at)
    budget = Budget(cost=0.4)
    attempt(session, agent, budget=budget, policy=policy)
    run = attempt(session, agent, budget=budget, policy=policy)
    assert run.over_budget == BudgetSpent("cost", 0.4, 0.4)
    steps = [each for each in agent.made if each.startswith("model")]
    assert steps == ["model 1", "model 2", "model 3", "model 4"]
    assert session.usage().spent.cost == 0.4


def test_calls_that_were_made_again_count_each_time(memory: Home) -> None:
    def failing() -> None:
        run.add_usage(STEP)
        raise ValueError

    for _ in range(2):
        with pytest.raises(ValueError), memory.session().run(budget=Budget(cost=0.2)) as run:
            run.step("model", failing)
    with memory.session().run(budget=Budget(cost=0.2)) as run:
        run.step("model", failing)
    assert run.over_budget == BudgetSpent("cost", 0.2, 0.2)


def test_a_turn_that_only_repeats_calls_is_completed(memory: Home) -> None:
    """A worker that dies after the last call leaves a run that costs nothing more."""
    agent = Agent(crash_at=1)
    session = memory.session()

    def one_turn(run: holdfast.Run) -> None:
        for turn in run.turns(limit=1):
            run.state["reply"] = run.step("model", partial(agent._model, run, turn))
            if not run.resumed:
                raise Crash

    attempt(session, one_turn, budget=Budget(cost=0.1))  # type: ignore[arg-type]
    run = attempt(session, one_turn, budget=Budget(cost=0.1))  # type: ignore[arg-type]
    assert run.over_budget is None
    assert session.load() == {"reply": 1}


def test_a_limit_of_turns_that_the_loop_has_as_well(memory: Home) -> None:
    with memory.session().run(budget=Budget(turns=2)) as run:
        for _ in run.turns(limit=2):
            pass
    assert run.over_budget is None
    assert memory.session().head.status == "completed"  # type: ignore[union-attr]


def test_steps_of_a_call_in_progress_are_made(memory: Home) -> None:
    def outer() -> str:
        run.add_usage(STEP)
        return str(run.step("inner", lambda: "done"))

    with memory.session().run(budget=Budget(cost=0.1)) as run:
        run.state["result"] = run.step("outer", outer)
        run.step("next", lambda: 1)
    assert run.over_budget
    assert memory.session().load() == {"result": "done"}
    assert [call.name for call in memory.session().calls()] == ["outer", "inner"]


def test_usage_of_calls_in_progress_counts(memory: Home) -> None:
    """A call of another run, inside of a step of this one, is no reason to go on."""

    def inner_run() -> None:
        outer.add_usage(STEP)
        with memory.session("inner").run(budget=Budget(cost=0.05)) as inner:
            inner.add_usage(STEP)
            inner.step("never", lambda: 1)
        assert inner.over_budget

    with memory.session().run(budget=Budget(cost=0.2)) as outer:
        outer.step("inner", inner_run)
        outer.step("more", lambda: 1)
    assert outer.over_budget is None
    assert memory.session("inner").calls() == []


def test_a_budget_for_asyncio(memory: Home) -> None:
    async def agent(budget: Budget | None) -> BudgetSpent | None:
        store = holdfast.AsyncStore(memory.store, Workers(2))
        session = await store.session("s")
        async with session.run(budget=budget) as run:

            async def model() -> None:
                run.add_usage(STEP)

            async for _ in run.turns(limit=4):
                await run.step("model", model)
        return run.over_budget

    assert asyncio.run(agent(Budget(turns=1))) == BudgetSpent("turns", 1, 1)
    assert asyncio.run(agent(Budget(cost=0.3))) == BudgetSpent("cost", 0.3, 0.3)
    assert memory.session().abandoned().state == "over budget"  # type: ignore[union-attr]
    assert asyncio.run(agent(None)) is None
    assert memory.session().usage().spent.cost == 0.4


WRONG: list[Callable[[Home], Any]] = [
    lambda _: Budget(),
    lambda _: Budget(cost=-1),
    lambda _: Budget(cost=float("nan")),
    lambda _: Budget(cost="1"),  # type: ignore[arg-type]
    lambda _: Budget(tokens=1.5),  # type: ignore[arg-type]
    lambda _: Budget(turns=-1),
    lambda _: Budget(turns=True),
    lambda home: home.session().run(budget=5),  # type: ignore[arg-type]
    lambda home: home.session().run(budget={"cost": 1}),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_budget(memory: Home, wrong: Callable[[Home], Any]) -> None:
    with pytest.raises(InvalidRequest):
        wrong(memory)
    assert not memory.session().exists()
