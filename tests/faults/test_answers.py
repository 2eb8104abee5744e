"""People who answer at once, and workers that are killed between an answer and its effect."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import AlreadyDecided, Conflict, InDoubt, NotFound, Pending
from holdfast.aio.store import AsyncStore
from holdfast.aio.workers import Workers
from tests.mutants import runs

from . import agents, processes
from .agents import SECONDS, Place, Signals, Trail, World, trail_of, watch

ITEMS = {"approval": "pen", "approval#2": "yacht"}
"""The key of each question, and the item it is about."""
ANN, BOB = ("Ann", True), ("Bob", False)
"""Each gives the same answer to every question."""
People = tuple[tuple[str, bool], ...]
TRIES = 40
"""A mutant may be lucky."""


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with agents.place(getattr(request, "param", "sqlite"), tmp_path) as place:
        place.ask(lambda store: None)
        yield place


# -- an agent that buys what is approved -----------------------------------------------------------


def buy(world: World, item: str) -> str:
    world.trail.pass_("effect?")
    world.affect(item)
    world.trail.pass_("effect!")
    return item


class Shop:
    """One session: a worker asks and buys, and people answer and resolve."""

    def __init__(self, place: Place, name: str) -> None:
        self.place, self.name = place, name

    def start(
        self,
        *people: tuple[str, bool],
        at: Signals | None = None,
        works: bool = True,
        together: tuple[int, int] | None = None,
    ) -> processes.Child:
        """A process in which people decide, and a worker works, until the run is complete.

        Those who begin `together` wait until nobody holds the second end of that pipe any more.
        """

        def live(out: int) -> None:
            trail = Trail(out, at)
            with self.place.open() as store:
                watch(store, trail)
                if together is not None:
                    os.close(together[1])
                    os.read(together[0], 1)
                for _ in range(10):
                    if self.is_completed(store):
                        told(trail, "at last", "state", store.session(self.name).load())
                        told(trail, "at last", "effects", self.place.world(self.name).effects())
                        break
                    self.decide(store, trail, people)
                    if works:
                        self.work(store, trail)

        return processes.fork(live)

    def is_completed(self, store: holdfast.Store) -> bool:
        head = store.session(self.name).head
        return head is not None and head.status == "completed"

    def work(self, store: holdfast.Store, trail: Trail) -> None:
        try:
            self.run(store, self.place.world(self.name, trail), trail)
        except InDoubt as error:
            trail.say(f"in doubt: {error.key}")

    def run(self, store: holdfast.Store, world: World, trail: Trail) -> None:
        with store.session(self.name).run(state={}) as run:
            for key, item in ITEMS.items():
                approved = run.wait_for("approval", prompt=f"Buy the {item}?")
                told(trail, "read", key, approved)
                call = {"id": item, "name": "buy", "input": {"item": item}}
                run.state[item] = run.tool(call, partial(buy, world)) if approved else None

    def call(
        self, store: holdfast.Store, method: str, key: str | Pending, *args: Any, **how: Any
    ) -> None:
        getattr(store.session(self.name), method)(key, *args, **how)

    def decide(self, store: holdfast.Store, trail: Trail, people: People) -> None:
        """Everybody answers every question, and resolves what is in doubt."""
        session = store.session(self.name)
        pending = session.pending() if session.exists() else []
        for who, answer in people:
            for key in ITEMS:
                self._tell(store, trail, key, "answer", key, answer)
            for each in pending:
                if each.state == "in doubt":
                    how = self._verdict(who, each)
                    question = f"{each.key} since {each.since}"
                    self._tell(store, trail, question, "resolve", each, **how)

    def _verdict(self, who: str, call: Pending) -> dict[str, Any]:
        """Ann and Bob look for the effect, and resolve the call in different ways."""
        if self.place.world(self.name).effects(call.idempotency_key):
            return {"result": f"{who} has seen it"}
        return {"action": "rerun"} if who == "Ann" else {"action": "skip"}

    def _tell(
        self, store: holdfast.Store, trail: Trail, question: str, *args: Any, **how: Any
    ) -> None:
        outcome = {"rerun": "rerun", "skip": "skipped"}.get(how.get("action", ""))
        answer = outcome or [*args[2:], *how.values()][0]
        trail.say(json.dumps(["tries", question, answer]))
        try:
            self.call(store, *args, **how)
        except AlreadyDecided as e:
            told(trail, "refused", question, e.outcome if e.result is None else e.result)
        except (NotFound, Conflict):
            trail.say("not decided")  # it was not asked yet, or a worker is at it
        else:
            told(trail, "accepted", question, answer)

    def shortcomings(self, *lives: processes.Child) -> list[str]:
        """The differences between answers, state and effects."""
        said: defaultdict[str, list[Any]] = defaultdict(list)
        for what, question, answer in (each for life in lives for each in told_by(trail_of(life))):
            said[question].append((what, answer))
        if "effects" not in said:
            return [f"not completed: {trail_of(lives[-1])[-1:]}"]
        state, effects = (said.pop(what)[-1][1] for what in ("state", "effects"))
        found = []
        for question, all_told in said.items():
            all_said = [(what, answer) for what, answer in all_told if what != "perhaps"]
            accepted = [answer for what, answer in all_said if what == "accepted"]
            if len(accepted) > 1:
                found.append(f"{question}: accepted are {accepted}")
            if any(answer != all_said[0][1] for _, answer in all_said):
                found.append(f"{question}: {all_said} differ")
        for key, item in ITEMS.items():
            times, answers = effects.count(item), [a for what, a in said[key] if what != "read"]
            if times != (state.get(item) is not None):
                found.append(f"{item}: {state.get(item)!r} in the state, and {times} effects")
            if times and True not in answers:
                found.append(f"{item}: bought, but not approved")
        return found


class AsyncShop(Shop):
    """The same with the API for asyncio."""

    def run(self, store: holdfast.Store, world: World, trail: Trail) -> None:
        async def work() -> None:
            session = await AsyncStore(store, Workers(4)).session(self.name)
            async with session.run(state={}) as run:
                for key, item in ITEMS.items():
                    approved = await run.wait_for("approval", prompt=f"Buy the {item}?")
                    told(trail, "read", key, approved)
                    call = {"id": item, "name": "buy", "input": {"item": item}}
                    bought = await run.tool(call, partial(buy, world)) if approved else None
                    run.state[item] = bought

        asyncio.run(work())

    def call(
        self, store: holdfast.Store, method: str, key: str | Pending, *args: Any, **how: Any
    ) -> None:
        async def call() -> None:
            session = await AsyncStore(store, Workers(4)).session(self.name)
            await getattr(session, method)(key, *args, **how)

        asyncio.run(call())


def told(trail: Trail, what: str, question: str, answer: Any) -> None:
    trail.pass_(json.dumps([what, question, answer]))


def told_by(trail: list[str]) -> Iterator[tuple[str, str, Any]]:
    """Yield the reports of a process, and the answer that a kill kept it from reporting.

    That answer is "accepted" if the write returned, "perhaps" if the kill came during the write.
    """
    tried: tuple[str, Any] | None = None
    for line in trail:
        if line.startswith("["):
            what, question, answer = json.loads(line)
            tried = (question, answer) if what == "tries" else None
            if tried is None:
                yield what, question, answer
    last = next((line for line in reversed(trail) if line != "inside"), "")
    if tried is not None and last.startswith("offer!"):
        yield "accepted", *tried
    elif tried is not None and last.startswith("offer?"):
        yield "perhaps", *tried


# -- kill -9 ---------------------------------------------------------------------------------------

KINDS = [
    pytest.param(place, kind, id=f"{place}-{kind.__name__}")
    for place in ("sqlite", "files", "postgres")
    for kind in (Shop, AsyncShop)
]


def every_boundary(
    place: Place, kind: type[Shop] = Shop, *, until: str = "never found"
) -> list[str]:
    """Kill a shop at its first event, its second, … and let another process finish.

    Ann answers in the first one, Bob says the opposite in the second. Returns what is wrong.
    """
    found: list[str] = []
    for at in count(1):
        shop = kind(place, f"killed at {at}")
        first = shop.start(ANN, at={at: signal.SIGKILL})
        status = first.finish(SECONDS)
        if status == 0 or any(until in wrong for wrong in found):
            break
        assert status == -signal.SIGKILL, trail_of(first)[-1:]
        second = shop.start(BOB)
        second.finish(SECONDS)
        where = f"killed at {at}, {trail_of(first)[-1]!r}"
        found += [f"{where}: {what}" for what in shop.shortcomings(first, second)]
    print(at, "kills")
    assert found or at > 30
    return found


@pytest.mark.parametrize(("place", "kind"), KINDS, indirect=["place"])
def test_killed_between_an_answer_and_its_effect(place: Place, kind: type[Shop]) -> None:
    """State, effects and accepted answers agree, wherever the process is killed."""
    assert every_boundary(place, kind) + place.damage() == []


@pytest.mark.parametrize(("place", "kind"), KINDS, indirect=["place"])
def test_killed_before_an_accepted_answer_is_reported(place: Place, kind: type[Shop]) -> None:
    """The worker reads an answer that no process has reported."""
    shop = kind(place, "untold")
    first = shop.start(ANN, at={"offer! 0 wait:approval#2": signal.SIGKILL})
    assert first.finish(SECONDS) == -signal.SIGKILL
    second = shop.start()
    second.finish(SECONDS)
    assert place.world("untold").effects() == ["pen", "yacht"]
    assert shop.shortcomings(first, second) == []
    assert shop.shortcomings(second) == [f"{i}: bought, but not approved" for i in ITEMS.values()]


@pytest.mark.parametrize(("place", "kind"), KINDS, indirect=["place"])
def test_killed_while_everybody_answers(rounds, place: Place, kind: type[Shop]) -> None:
    """Two people in processes of their own and one worker, all of which may be killed."""
    for n in range(rounds(3, torture=200)):
        assert race(kind(place, f"race {n}"), random.Random(n), kills=True) == []
    assert place.damage() == []


def race(shop: Shop, rng: random.Random, *, kills: bool) -> list[str]:
    lives: list[processes.Child] = []
    for n in range(10):
        at = [{rng.randrange(1, 40): signal.SIGKILL} if kills and n < 5 else {} for _ in range(3)]
        ends = os.pipe()
        start = partial(shop.start, together=ends)
        people = [start(ANN, at=at[0], works=False), start(BOB, at=at[1], works=False)]
        worker = start(at=at[2])
        for end in ends:
            os.close(end)
        for each in (*people, worker):
            each.finish(SECONDS)
        lives += [*people, worker]
        if '["at last", "effects"' in str(trail_of(worker)[-1:]):
            break
    return shop.shortcomings(*lives)


@pytest.mark.parametrize(("place", "kind"), KINDS, indirect=["place"])
def test_a_decision_that_comes_late(place: Place, kind: type[Shop]) -> None:
    assert decided_late(kind(place, "late")) == []


def decided_late(shop: Shop) -> list[str]:
    """Bob sees a doubt and is stopped. Ann has the call made again, and it is in doubt again."""
    first = shop.start(ANN, at={"started! 0 yacht": signal.SIGKILL})
    first.finish(SECONDS)
    bob = shop.start(BOB, at={len(ITEMS): signal.SIGSTOP}, works=False)
    os.waitpid(bob.pid, os.WUNTRACED)
    ann = shop.start(ANN, works=False)
    ann.finish(SECONDS)
    worker = shop.start(at={"effect!": signal.SIGKILL})
    worker.finish(SECONDS)
    os.kill(bob.pid, signal.SIGCONT)
    bob.finish(SECONDS)
    last = shop.start(BOB)
    last.finish(SECONDS)
    return shop.shortcomings(first, ann, worker, bob, last)


# -- mutants ---------------------------------------------------------------------------------------

MUTANTS = [
    (runs.last_answer_stands, "accepted are"),
    (runs.last_answer_stands, "in the state, and"),
    (runs.answers_all_of_a_name, "bought, but not approved"),
]


@pytest.mark.parametrize(("mutant", "wrong"), MUTANTS)
def test_mutant_of_answering(
    place: Place, monkeypatch: pytest.MonkeyPatch, mutant: Any, wrong: str
) -> None:
    mutant(monkeypatch)
    found = every_boundary(place, until=wrong)
    assert any(wrong in each for each in found)


def test_mutant_of_racing_answers(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.answers_blindly(monkeypatch)
    for n in range(TRIES):
        found = race(Shop(place, f"race {n}"), random.Random(n), kills=False)
        print(found)
        if any("accepted are" in each for each in found):
            return
    pytest.fail("not caught")


def test_mutant_of_late_decisions(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.decides_by_key(monkeypatch)
    assert any("accepted are ['rerun'" in each for each in decided_late(Shop(place, "late")))
