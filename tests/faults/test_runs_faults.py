"""Runs whose workers are killed, stopped and raced, on every store that outlives a process."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import AfterLLMResponse, AfterToolCall, EveryN, Policy, SessionBusy
from tests.mutants import runs

from . import agents, processes
from .agents import SECONDS, Agent, Place, Report, trail_of
from .async_agents import AsyncAgent

KILLS = int(os.environ.get("HOLDFAST_KILLS", "400"))
TRIES = 40  # a mutant may be lucky, most of all on a busy machine
POLICIES: list[Policy | None] = [None, AfterToolCall(), AfterLLMResponse(), EveryN(3)]


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """A store of a kind: SQLite, unless a test asks for others."""
    with agents.place(getattr(request, "param", "sqlite"), tmp_path) as place:
        place.ask(lambda store: None)
        yield place


everywhere = pytest.mark.parametrize("place", ["sqlite", "files", "postgres"], indirect=True)


# -- kill -9 ---------------------------------------------------------------------------------------


BOUNDARIES = [("sqlite", Agent), ("files", Agent), ("postgres", Agent), ("sqlite", AsyncAgent)]


@pytest.mark.parametrize(("place", "kind"), BOUNDARIES, indirect=["place"])
def test_killed_at_every_boundary(place: Place, kind: type[Agent]) -> None:
    """Before, within and after each write: of a run's begin and end, its calls and checkpoints."""
    report = agents.every_boundary(place, kind)
    print(report)
    writes = ("save", "take", "started", "done", "give")
    assert report.places == {f"{write}{end}" for write in writes for end in "?!"} | {"inside"}
    assert report.doubts > report.asked > 5
    assert not report.failures, str(report)


KINDS = [
    ("sqlite", Agent, 60, KILLS),
    ("files", Agent, 15, KILLS // 4),
    ("postgres", Agent, 15, KILLS // 4),
    ("sqlite", AsyncAgent, 15, KILLS // 4),
]


@pytest.mark.parametrize(("place", "kind", "usual", "torture"), KINDS, indirect=["place"])
def test_killed_at_any_moment(
    rounds, place: Place, kind: type[Agent], usual: int, torture: int
) -> None:
    """Over and over, until the agent is done; and then the next one, as long as there are kills."""
    kills, report = rounds(usual, torture=torture), Report()
    while report.kills < kills and not report.failures:
        kill_until_done(kind(place, f"agent {report.kills}", turns=50), kills, report)
    print(report)
    assert report.kills == kills
    assert not report.failures + place.damage(), str(report)


def kill_until_done(agent: Agent, kills: int, report: Report) -> None:
    rng, known, status = random.Random(report.kills), Knowledge(), -1
    while status != 0 and not report.failures:
        child = agent.start(policy=rng.choice(POLICIES))
        if report.kills < kills:
            child.listen(SECONDS, until=rng.randrange(1_200))
            child.listen(rng.uniform(0, 0.003))
            child.kill()
        status, trail = child.finish(SECONDS), trail_of(child)
        report.kills += status == -signal.SIGKILL
        found = known.compare(trail, report)
        if status not in (0, -signal.SIGKILL):
            found.append(f"ended with {status}: {trail[-1:]}")
        if status == 0:
            found += agent.shortcomings()
        report.failures += [f"kill {report.kills}: {what}" for what in found]


class Knowledge:
    """What must be in doubt, and what may be, while one process after the other is killed."""

    def __init__(self) -> None:
        self._trail: list[str] = []
        self._unsure: set[str] = set()

    def compare(self, trail: list[str], report: Report) -> list[str]:
        """What a process has found wrongly; then its own trail is the one to go by."""
        if "looked" not in trail:
            return []
        at = trail.index("looked")
        in_doubt = {line.partition(" ")[2] for line in trail[:at]}
        report.doubts += bool(in_doubt)
        must, may = agents.doubtful(self._trail, exact=False)
        wrong = agents.compare(in_doubt, must - self._unsure, may | self._unsure)
        # A server may come to what it was sent last after the next process has looked.
        after = trail[at + 1 :]
        self._unsure = (may - must) - {line.partition(" ")[2] for line in after}
        self._trail = [f"started! {key}" for key in in_doubt] + after
        return wrong


@everywhere
def test_a_dead_worker_that_nobody_has_waited_for(place: Place) -> None:
    """It still has a number, but does nothing any more."""
    agent = Agent(place, "dead", 2)
    child = agent.start({"done? 1 call 1.0": signal.SIGKILL})
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    other = agent.start()
    assert other.finish(SECONDS) == 0, other.said
    assert "found 1 call 1.0" in trail_of(other)
    assert agent.shortcomings() == []
    assert child.finish() == -signal.SIGKILL


# -- workers that are late -------------------------------------------------------------------------

WRITES = ["started? 2 call 2.0", "done? 2 call 2.0", "save? 5", "save? 6"]
"""What a worker does next when it is stopped. (An effect of its own, nobody could refuse.)"""


@everywhere
@pytest.mark.parametrize("finished", [True, False], ids=["finished", "at work"])
@pytest.mark.parametrize("at", WRITES)
def test_a_worker_that_comes_back_after_a_takeover(place: Place, at: str, finished: bool) -> None:
    assert takeover(place, at, finished=finished) == []


@pytest.mark.parametrize("at", WRITES)
def test_an_event_loop_that_comes_back_after_a_takeover(place: Place, at: str) -> None:
    assert takeover(place, at, finished=False, kind=AsyncAgent) == []


@everywhere
def test_a_worker_that_acts_while_it_is_taken_over(place: Place) -> None:
    """What it has begun before the session was another's is in that one's journal."""
    agent = Agent(place, "taken over", 3)
    late = agent.start({"started? 2 call 2.0": signal.SIGSTOP, "done? 2 call 2.0": signal.SIGKILL})
    wait_until_stopped(late)
    other = agent.start({"take? 1": signal.SIGSTOP}, takeover=True)
    wait_until_stopped(other)
    os.kill(late.pid, signal.SIGCONT)
    assert late.finish(SECONDS) == -signal.SIGKILL
    os.kill(other.pid, signal.SIGCONT)
    assert other.finish(SECONDS) == 0, other.said
    assert agent.shortcomings() == []


def takeover(place: Place, at: str, *, finished: bool, kind: type[Agent] = Agent) -> list[str]:
    """Stop a worker at an event, let another take over, and let the first one go on.

    By then the other has finished, or is stopped in the middle of a later turn.
    """
    agent, found = kind(place, "taken over", 3), []
    later = {} if finished else {"started? 3 model#1": signal.SIGSTOP}
    with ExitStack() as stack:
        late = stack.enter_context(ended(agent.start({at: signal.SIGSTOP}, policy=AfterToolCall())))
        wait_until_stopped(late)
        if f"process {late.pid} " not in place.ask(partial(refusal, agent)):
            found.append("another could just run it")
        other = agent.start(later, policy=AfterToolCall(), takeover=True)
        stack.enter_context(ended(other))
        if finished:
            other.finish(SECONDS)
        else:
            wait_until_stopped(other)
        before = place.ask(partial(all_of, agent))
        os.kill(late.pid, signal.SIGCONT)
        if late.finish(SECONDS) != 0 or trail_of(late)[-1] != "fenced":
            found.append(f"not refused: {trail_of(late)[-1:]}")
        after = place.ask(partial(all_of, agent))
        if not finished:
            os.kill(other.pid, signal.SIGCONT)
        if other.finish(SECONDS) != 0:
            found.append(f"the other ended: {trail_of(other)[-1:]}")
    found += [line for line in trail_of(late) if line.startswith(("wrote", "called"))]
    found += [f"visible: {what}" for what in before if before[what] != after[what]]
    return found + agent.shortcomings() + place.damage()


@contextmanager
def ended(child: processes.Child) -> Iterator[processes.Child]:
    """Whatever happens, it is not left stopped."""
    try:
        yield child
    finally:
        if child.status is None:
            child.kill()
            child.finish()


def wait_until_stopped(child: processes.Child) -> None:
    status = os.waitpid(child.pid, os.WUNTRACED)[1]
    assert os.WIFSTOPPED(status), f"{status}: {child.said!r}"


def refusal(agent: Agent, store: holdfast.Store) -> str:
    """What somebody is told who does not take over."""
    try:
        store.session(agent.session).run().__enter__()
    except SessionBusy as error:
        return error.message
    return ""


def all_of(agent: Agent, store: holdfast.Store) -> dict[str, Any]:
    session = store.session(agent.session)
    with store._repository.reader() as reader:
        journal = reader.journal(session._number(reader), 1, 10_000)
    return {
        "journal": [[n, row.hex()] for n, row in journal],
        "checkpoints": [checkpoint.id for checkpoint in session.tree()],
        "head": session.head.id if session.head else None,
        "state": session.load(),
        "operations": len([*session.operations()]),
    }


# -- many at once ----------------------------------------------------------------------------------


@everywhere
def test_two_workers_resume_each_session_once(place: Place) -> None:
    assert race(place, "race") == []


def race(place: Place, prefix: str) -> list[str]:
    """Let two processes resume what a dead one has left; both begin with the same list."""
    names = [f"{prefix} {n}" for n in range(100)]
    left = processes.fork(lambda _: leave(place, names))
    assert left.finish(SECONDS) == -signal.SIGKILL, left.said
    meeting = [os.pipe(), os.pipe()]
    workers = [
        processes.fork(partial(resume_all, place, prefix, meeting[n][0], meeting[1 - n][1]))
        for n in range(2)
    ]
    for end in (*meeting[0], *meeting[1]):
        os.close(end)
    found, resumed = [], Counter[str]()
    for worker in workers:
        if worker.finish(SECONDS):
            found.append(f"a worker ended with {worker.status}: {trail_of(worker)[-1:]}")
        resumed.update(trail_of(worker))
    for what, times in {
        "resumed": resumed,
        "effects": Counter(place.world(prefix).effects()),
    }.items():
        wrong = {name: times[name] for name in {*names, *times} if (name in names) != times[name]}
        found += [f"{what}: {wrong}"] if wrong else []

    def undone(store: holdfast.Store) -> list[str]:
        unlike = [name for name in names if store.session(name).load() != {"n": [1, 2]}]
        return unlike + [each.session for each in store.abandoned()]

    return found + [f"not done: {name}" for name in place.ask(undone)] + place.damage()


def leave(place: Place, names: list[str]) -> None:
    """Sessions whose runs have one step behind them, and nobody to go on with them."""
    with place.open() as store:
        for name in names:
            store.session(name).run(state={"n": []}).__enter__().step("first", int, 1)
        os.kill(os.getpid(), signal.SIGKILL)


def resume_all(place: Place, prefix: str, ours: int, theirs: int, out: int) -> None:
    world = place.world(prefix)

    def go_on(run: holdfast.Run) -> None:
        world.affect(run.session.name)
        run.state["n"] = [run.step("first", int, 1), run.step("second", int, 2)]

    with place.open() as store:
        abandoned = store.abandoned

        def together(**options: Any) -> list[Any]:
            listed = abandoned(**options)
            os.write(theirs, b".")
            os.read(ours, 1)
            return listed

        store.abandoned = together  # type: ignore[method-assign]
        for name in store.resume_all(go_on):
            os.write(out, f"{name}\n".encode())


# -- mutants ---------------------------------------------------------------------------------------


MUTANTS = [
    (runs.notes_beginnings_late, "not reported as in doubt", Agent),
    (runs.notes_no_ends, "reported as in doubt", Agent),
    (runs.notes_ends_later, "reported as in doubt", Agent),
    (runs.calls_what_is_in_doubt, "effects", Agent),
    (runs.goes_on_from_the_head, "resuming fails: unexpected: StepChanged", Agent),
    (runs.notes_beginnings_late, "not reported as in doubt", AsyncAgent),
    (runs.calls_what_is_in_doubt, "effects", AsyncAgent),
    (runs.awaits_no_ends, "reported as in doubt", AsyncAgent),
]


@pytest.mark.parametrize(("mutant", "found", "kind"), MUTANTS)
def test_mutant_of_resuming(
    place: Place, monkeypatch: pytest.MonkeyPatch, mutant: Any, found: str, kind: type[Agent]
) -> None:
    mutant(monkeypatch)
    report = agents.every_boundary(place, kind, until=f": {found}")
    print(report)
    assert any(f": {found}" in failure for failure in report.failures)


UNFENCED = [
    (runs.compares_no_tokens, "done? 2 call 2.0", {"visible: journal"}),
    (runs.ignores_a_takeover, "save? 5", {"visible: checkpoints", "visible: state"}),
]


@everywhere
@pytest.mark.parametrize(("mutant", "at", "visible"), UNFENCED)
def test_mutant_that_does_not_fence(
    place: Place, monkeypatch: pytest.MonkeyPatch, mutant: Any, at: str, visible: set[str]
) -> None:
    mutant(monkeypatch)
    found = takeover(place, at, finished=False)
    print(found)
    assert visible <= {*found}


@pytest.mark.parametrize(("mutant", "at", "visible"), UNFENCED)
def test_mutant_that_does_not_fence_event_loops(
    place: Place, monkeypatch: pytest.MonkeyPatch, mutant: Any, at: str, visible: set[str]
) -> None:
    mutant(monkeypatch)
    found = takeover(place, at, finished=False, kind=AsyncAgent)
    print(found)
    assert visible <= {*found}


def test_mutant_whose_leases_hold_nobody_off(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.leases_hold_nobody_off(monkeypatch)
    for number in range(TRIES):
        found = race(place, f"race {number}:")
        print(found)
        if any(what.startswith("effects: {") for what in found):
            return
    pytest.fail("not caught")
