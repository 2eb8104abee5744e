"""Autosave: policies decide about the states of loops that are no runs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import holdfast
from holdfast import AfterLLMResponse, AfterToolCall, EveryN, EverySeconds, InvalidRequest, Never
from holdfast.aio.store import AsyncStore
from holdfast.aio.workers import Workers
from holdfast.runs.checkpoint_policy import TRIGGERS, Event
from tests.support.stores import Home


def saved(session: holdfast.Session) -> list[tuple[str | None, Any]]:
    return [(c.trigger, session.load(c)) for c in session.tree()]


EVENTS: tuple[Event, ...] = ("llm", "tool", "turn", "llm", "turn")


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (None, [("turn", 3), ("turn", 5)]),
        (AfterToolCall(), [("tool_call", 2), ("turn", 3), ("turn", 5)]),
        (AfterLLMResponse(), [("llm", 1), ("turn", 3), ("llm", 4), ("turn", 5)]),
        (EveryN(2), [("turn", 5)]),
        (EveryN(3), [("autosave", 5)]),
        (EverySeconds(1e-9), [(TRIGGERS[e], n + 1) for n, e in enumerate(EVENTS)]),
        (EverySeconds(1000), [("autosave", 5)]),
        (Never(), [("autosave", 5)]),
    ],
)  # fmt: skip
def test_policies_without_runs(home: Home, policy: Any, expected: list[tuple[str, int]]) -> None:
    state = {"n": 0}
    with home.session().autosave(policy) as saver:
        for event in EVENTS:
            state["n"] += 1
            saver.offer(state, event)
        assert saver.turn == 3
    assert saved(home.session()) == [(trigger, {"n": n}) for trigger, n in expected]


def test_a_policy_of_ones_own_sees_the_moments(home: Home) -> None:
    seen: list[tuple[str, int]] = []

    class Mine(holdfast.Policy):
        def wants(self, moment: holdfast.Moment) -> bool:
            seen.append((moment.event, moment.turn))
            assert 0 <= moment.seconds < 100
            return moment.event == "tool"

    with home.session().autosave(Mine()) as saver:
        offered = [saver.offer(n, event, label=f"{n}") for n, event in enumerate(EVENTS)]
    assert seen == [("llm", 1), ("tool", 1), ("turn", 1), ("llm", 2), ("turn", 2)]
    assert [c and (c.trigger, c.label) for c in offered] == [None, ("tool_call", "1"), *[None] * 3]
    assert saved(home.session()) == [("tool_call", 1), ("autosave", 4)]


@pytest.mark.parametrize("error", [ValueError("odd"), KeyboardInterrupt()])
def test_an_error_ends_a_loop(home: Home, error: BaseException) -> None:
    state = {"n": 1}
    with pytest.raises(type(error)), home.session().autosave(Never()) as saver:
        saver.offer(state)
        state["n"] = 2
        raise error
    head = home.session().get()
    status = ("failed", "ValueError: odd") if type(error) is ValueError else None
    assert (head.status, head.reason) == (status or ("halted", "KeyboardInterrupt"))
    assert home.session().load() == {"n": 2}


def test_a_save_that_fails_is_made_up_for(home: Home) -> None:
    session = home.session()
    with session.autosave() as saver:
        home.another().session("s").save("of another")
        with pytest.raises(holdfast.HeadMoved):
            saver.offer("mine")
        session.refresh()
    assert saved(session) == [(None, "of another"), ("autosave", "mine")]


def test_what_was_not_offered_is_not_saved(memory: Home) -> None:
    with memory.session().autosave(Never()):
        pass
    assert not memory.session().exists()


def test_bad_offers(memory: Home) -> None:
    with pytest.raises(InvalidRequest):
        memory.session().autosave(lambda _: True)  # type: ignore[arg-type]
    with memory.session().autosave() as saver, pytest.raises(InvalidRequest):
        saver.offer(1, "step")  # type: ignore[arg-type]
    assert not memory.session().exists()


def test_autosave_in_asyncio(home: Home) -> None:
    async def loop() -> None:
        session = await AsyncStore(home.store, Workers(2)).session("s")
        async with session.autosave(AfterToolCall()) as saver:
            for n, event in enumerate(EVENTS):
                await saver.offer(n, event)
            await saver.offer("last", "llm")

    asyncio.run(loop())
    assert saved(home.session()) == [
        ("tool_call", 1), ("turn", 2), ("turn", 4), ("autosave", "last"),
    ]  # fmt: skip
