"""Usage is stored with all that is known, and summed up by session, agent, model and day."""

from __future__ import annotations

import asyncio
import datetime as dt
from typing import Any

import pytest

import holdfast
from holdfast import InvalidRequest, SessionNotFound, Usage
from holdfast.format.records import check_extra, read_usage, usage_fields
from holdfast.history.token_usage import most
from tests.support.stores import Home

LARGE = Usage(1000, 200, 300, 50, 0.01, "large")
SMALL = Usage(10, 5, cost=0.001, model="small")
EVERY = [
    Usage(), Usage(tokens=7), Usage(tokens=7, cost=0.5), Usage(7), Usage(0, 7), LARGE, SMALL,
    Usage(3, 2, tokens=9), LARGE + SMALL, LARGE + Usage(tokens=3), SMALL + Usage(cost=0.5),
]  # fmt: skip


@pytest.mark.parametrize("usage", EVERY, ids=str)
def test_a_stored_usage_comes_back(memory: Home, usage: Usage) -> None:
    saved = memory.session().save({}, usage=usage)
    assert saved.usage == memory.session().get(saved.id).usage == usage
    assert holdfast.Checkpoint.from_bytes(saved.to_bytes()).usage == usage
    assert memory.store.verify().ok


def test_what_a_usage_takes() -> None:
    """Stores without models look as before; a model's usage takes a few dozen bytes more."""
    assert usage_fields(Usage(tokens=7, cost=0.5)) == [7, 0.5]
    assert usage_fields(Usage(7)) == [7, 0.0, None, 7]
    assert usage_fields(LARGE) == [1200, 0.01, "large", 1000, 200, 300, 50]
    assert read_usage([7, 0.5]) == Usage(tokens=7, cost=0.5)


NO_USAGE: list[Any] = [
    [7], ["7", 0.5], [7, "0.5"], [7, 0.5, 3], [7, 0.5, ""], [7, 0.5, "m", "7"], [7, 0.5, "m", 7.5],
    [7, 0.5, [7]], [7, 0.5, [["7", 0.5]]], [7, 0.5, [[7, 0.5, [[7, 0.5]]]]],
]  # fmt: skip


@pytest.mark.parametrize("fields", NO_USAGE, ids=str)
def test_bytes_that_are_no_usage(fields: list[Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        check_extra({"usage": fields})
    with pytest.raises(holdfast.Corrupt):
        read_usage(fields)


@pytest.mark.parametrize("fields", [[7, 0.5, [[7, 0.5]], 7], [7, 0.5, "m", 1, 1, 1, 1, 1]], ids=str)
def test_a_record_with_more_fields_than_a_usage_has(fields: list[Any]) -> None:
    with pytest.raises(ValueError, match="usage"):
        check_extra({"usage": fields})


def test_a_dict_is_as_good_as_a_usage(memory: Home) -> None:
    session = memory.session()
    session.save({"log": []}, usage={"input": 10, "output": 5, "cost": 0.001, "model": "small"})
    session.append("log", 1, usage={"input_tokens": 9, "cache_read_input_tokens": 3})
    session.patch(set={"n": 1}, usage={"prompt_token_count": 4})
    with session.run() as run:
        run.add_usage({"prompt_tokens": 10, "completion_tokens": 5}, cost=0.001, model="small")
        run.add_usage(input=1000, output=200, cached=300, reasoning=50, cost=0.01, model="large")
        run.checkpoint(usage={"tokens": 7})
    models = session.usage().spent.by_model()
    assert models["small"] == SMALL + SMALL
    assert models["large"] == LARGE
    assert models[None] == Usage(16, cached=3, tokens=23)
    assert session.usage().path == session.usage().spent


def test_calls_keep_their_models(memory: Home) -> None:
    """Also if a call asks several, and if the worker is gone before the next checkpoint."""

    def model(run: holdfast.Run, *used: Usage) -> None:
        for each in used:
            run.add_usage(each)

    session = memory.session()
    with session.run() as run:
        run.step("both", lambda: model(run, LARGE, SMALL))
        run.step("small", lambda: model(run, SMALL))
        assert session.usage().spent.by_model() == {"large": LARGE, "small": SMALL + SMALL}
    assert session.usage().spent.by_model() == {"large": LARGE, "small": SMALL + SMALL}
    assert session.usage().path == LARGE + SMALL + SMALL
    assert memory.store.verify().ok


def test_of_two_attempts_the_larger_counts() -> None:
    assert most(Usage(tokens=9, cost=0.1), Usage(tokens=5, cost=0.5)) == Usage(tokens=9, cost=0.5)
    dear = Usage(10, cost=1, model="dear")
    assert most(dear, LARGE) == most(LARGE, dear) == dear
    assert most(LARGE + SMALL, SMALL) == LARGE + SMALL


@pytest.fixture
def paid(memory: Home, monkeypatch: pytest.MonkeyPatch) -> holdfast.Store:
    """Three sessions on two days, one of them with a branch that was left."""
    days = [dt.datetime(2026, 1, n, 12, tzinfo=dt.UTC) for n in (1, 2)]
    now = [days[0]]
    monkeypatch.setattr("time.time_ns", lambda: int(now[0].timestamp() * 1e9))
    trip = memory.store.session("trip", agent="planner")
    trip.save({"n": 1}, usage=LARGE)
    trip.save({"n": 2}, usage=SMALL)
    now[0] = days[1]
    trip.rewind("@~1")
    trip.save({"n": 3}, usage=SMALL)
    fork = trip.fork("fork")
    with fork.run() as run:
        run.step("model", run.add_usage, SMALL)
    memory.store.session("other").save({}, usage=Usage(tokens=7))
    memory.store.session("free").save({})
    return memory.store


THREE = SMALL + SMALL + SMALL
SUMS: list[tuple[dict[str, Any], dict[str | None, Usage]]] = [
    ({}, {"fork": SMALL, "other": Usage(tokens=7), "trip": LARGE + SMALL + SMALL}),
    ({"by": "agent"}, {None: Usage(tokens=7), "planner": LARGE + THREE}),
    ({"by": "model"}, {None: Usage(tokens=7), "large": LARGE, "small": THREE}),
    (
        {"by": "day"},
        {"2026-01-01": LARGE + SMALL, "2026-01-02": SMALL + SMALL + Usage(tokens=7)},
    ),
    ({"by": "model", "session": "trip"}, {"large": LARGE, "small": SMALL + SMALL}),
    ({"session": "free"}, {}),
    ({"session": "trip", "agent": "nobody"}, {}),
    ({"agent": "planner"}, {"fork": SMALL, "trip": LARGE + SMALL + SMALL}),
    ({"since": dt.datetime(2026, 1, 2, tzinfo=dt.UTC), "agent": "planner"},
     {"fork": SMALL, "trip": SMALL}),
    ({"until": dt.datetime(2026, 1, 2, tzinfo=dt.UTC)}, {"trip": LARGE + SMALL}),
    ({"status": "completed"}, {"fork": SMALL}),
]  # fmt: skip


@pytest.mark.parametrize(("query", "sums"), SUMS, ids=str)
def test_sums_of_a_store(
    paid: holdfast.Store, query: dict[str, Any], sums: dict[str | None, Usage]
) -> None:
    found = paid.usage(**query)
    assert found == sums
    assert [*found] == [*sums]


def test_what_cannot_be_summed(paid: holdfast.Store) -> None:
    wrong: list[dict[str, Any]] = [
        {"by": "week"}, {"since": "2026-01-01"}, {"agent": 7}, {"colour": "red"},
    ]  # fmt: skip
    for query in wrong:
        with pytest.raises(InvalidRequest):
            paid.usage(**query)
    with pytest.raises(SessionNotFound):
        paid.usage(session="nobody")


def test_sums_for_asyncio() -> None:
    async def work() -> dict[str | None, Usage]:
        async with holdfast.aopen("memory:") as store:
            await (await store.session("s")).save({}, usage=LARGE)
            return await store.usage("model")

    assert asyncio.run(work()) == {"large": LARGE}
