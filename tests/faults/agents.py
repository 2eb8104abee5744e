"""A scripted agent with effects outside its store, in processes that are killed or stopped.

Each process says what it is about to do and what it has done, one line each, so that somebody else
can tell what the store must know after its end.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import holdfast
from holdfast import AfterToolCall, Done, Fenced, InDoubt
from holdfast.history.journal import Journal
from holdfast.runs.run_core import Halt
from holdfast.storage import fs
from holdfast.storage.contract import Batch, Put
from holdfast.storage.files.backend import FilesBackend
from holdfast.storage.postgres.backend import PostgresBackend
from holdfast.storage.postgres.connection import Link
from holdfast.storage.sqlite.backend import SqliteBackend
from tests.support import postgres

from . import processes
from .ledger import complete_lines

SECONDS = 120.0
Signals = Mapping[Any, int]
"""What a process sends itself at an event, which is given by its number or line."""


# -- what happens where ----------------------------------------------------------------------------


class Trail:
    """Tells whoever listens what happens; dies or stops at chosen events.

    Events are `what?` before something is written, `what!` after that, and `inside` in between.
    """

    def __init__(self, out: int | None = None, at: Signals | None = None) -> None:
        self._out, self._at = out, at or {}
        self._passed, self._writing = 0, False

    def say(self, line: str) -> None:
        if self._out is not None:
            os.write(self._out, line.encode() + b"\n")

    def pass_(self, line: str) -> None:
        self.say(line)
        self._passed += 1
        for event in {self._passed, line} & self._at.keys():
            # To this very thread, which would otherwise go on until another has got the signal.
            signal.pthread_kill(threading.get_ident(), self._at[event])

    def inside(self) -> None:
        if self._writing:
            self.pass_("inside")

    @contextmanager
    def writing(self, what: str, key: str) -> Iterator[None]:
        self.pass_(f"{what}? {key}")
        self._writing = True
        try:
            yield
        finally:
            self._writing = False
        self.pass_(f"{what}! {key}")


def watch(store: holdfast.Store, trail: Trail) -> None:
    """Let the trail tell of everything that this process writes to the store."""
    append, offer, catch_up = Journal.append, Journal.offer, Journal.catch_up
    commit = store._repository.backend.commit
    keys: dict[int, str] = {}
    commits = count(1)

    def learn(journal: Journal) -> None:
        keys.update({c.number: f"{c.turn} {c.key}" for c in journal.calls.all.values()})

    def read(self: Journal, *args: Any) -> None:
        catch_up(self, *args)
        learn(self)

    def noted(self: Journal, facts: dict[str, Any], *entry: bytes) -> None:
        key = keys[facts["of"]] if "of" in facts else f"{facts['turn']} {facts['key']}"
        with trail.writing(facts["what"], key):
            append(self, facts, *entry)
        learn(self)

    def offered(self: Journal, facts: dict[str, Any], token: bytes | None) -> None:
        with trail.writing("offer", keys[facts["of"]]):
            offer(self, facts, token)

    def committed(batch: Batch) -> None:
        if all(write[0] == "journal" for write in batch.writes):
            commit(batch)  # `noted` and `offered` tell of these
            return
        tokens = [w.row[1] for w in batch.writes if isinstance(w, Put) and w.table == "leases"]
        what = "save" if not tokens else "take" if tokens[0] else "give"
        with trail.writing(what, str(next(commits))):
            commit(batch)

    Journal.append, Journal.offer = noted, offered  # type: ignore[method-assign, assignment]
    Journal.catch_up = read  # type: ignore[method-assign, assignment]
    store._repository.backend.commit = committed  # type: ignore[method-assign]
    _watch_pieces(store, trail)


def _watch_pieces(store: holdfast.Store, trail: Trail) -> None:
    """The middle of one write: a transaction, half a line, or a server that goes on without us."""
    if isinstance(store._repository.backend, SqliteBackend):

        def committing() -> bool:
            trail.inside()
            return False

        store._repository.backend._writing().set_commit_hook(committing)
    elif isinstance(store._repository.backend, FilesBackend):
        write_all = fs.write_all

        def halves(handle: int, data: bytes, at: int) -> None:
            half = len(data) // 2
            write_all(handle, data[:half], at)
            trail.inside()
            write_all(handle, data[half:], at + half)

        fs.write_all = halves
    else:
        assert isinstance(store._repository.backend, PostgresBackend)
        answer = Link._answer

        def asked(self: Link) -> Any:
            trail.inside()
            return answer(self)

        Link._answer = asked  # type: ignore[method-assign]


def doubtful(trail: list[str], *, exact: bool) -> tuple[set[str], set[str]]:
    """The calls that must be in doubt after a kill, and all that may be.

    `exact`: the kill came right where the trail ends, not somewhere before the next event.
    """
    certain: set[str] = set()
    open_: str | None = None
    for line in trail:
        what, _, key = line.partition(" ")
        if what in ("started?", "done?"):
            open_ = key
        elif what == "started!":
            certain.add(key)
        elif what in ("done!", "got"):
            certain.discard(key)
        if what.endswith("!"):
            open_ = None
    if open_ is None or (exact and trail[-1] != "inside"):
        return certain, certain
    return certain - {open_}, certain | {open_}


# -- the agent -------------------------------------------------------------------------------------


class World:
    """Effects: lines in a file, which no end of a process takes back."""

    def __init__(self, path: Path, trail: Trail) -> None:
        self._path, self.trail = path, trail

    def affect(self, what: str) -> None:
        handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(handle, f"{holdfast.current_key()} {what}\n".encode())
        finally:
            os.close(handle)
        self.trail.say(f"effect {what}")

    def effects(self, key: str = "") -> list[str]:
        """All of them, or those of one idempotency key."""
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        return [line.partition(" ")[2] for line in lines if line.startswith(key)]

    def model(self, messages: list[dict[str, Any]], turn: int) -> dict[str, Any]:
        self.affect(f"model {turn}")
        calls = [{"id": id, "name": "pay", "input": {"what": id}} for id in _tools(turn)]
        said = f"turn {turn} after {len(messages)} messages"
        return {"role": "assistant", "content": said, "tool_calls": calls}

    def pay(self, what: str) -> dict[str, Any]:
        self.affect(what)
        return _receipt(what)

    def looked(self, call: dict[str, Any]) -> Callable[[str], Done | None]:
        """Whether a call has had its effect."""
        return lambda key: Done(_receipt(call["id"])) if self.effects(key) else None

    def got(self, turn: int, key: str) -> None:
        """What was returned is known, and so it must be to whoever comes later."""
        self.trail.say(f"got {turn} {key}")


def _tools(turn: int) -> list[str]:
    return [f"call {turn}.{n}" for n in range(1 + turn % 2)]


def _is_tool(key: str) -> bool:
    return "call " in key


def _receipt(what: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": what, "content": f"paid for {what}"}


def begin() -> dict[str, Any]:
    return {"messages": [], "turns": 0}


def act(run: holdfast.Run, world: World, turns: int, *, look: bool) -> None:
    """All turns. Of a tool in doubt the world is asked, if it is looked at; otherwise nobody."""
    messages = run.state["messages"]
    for turn in run.turns(limit=turns):
        reply = run.step("model", world.model, messages, turn)
        world.got(turn, "model#1")
        messages.append(reply)
        for call in reply["tool_calls"]:
            looked = world.looked(call) if look else None
            messages.append(run.tool(call, world.pay, verify=looked))
            world.got(turn, call["id"])
        run.state["turns"] = turn


@dataclass(frozen=True)
class Place:
    """Where a store is, and the world around it; each process opens it by itself."""

    url: str
    options: dict[str, Any]
    folder: Path

    def open(self) -> holdfast.Store:
        return holdfast.open(self.url, durability="normal", **self.options)

    def world(self, session: str, trail: Trail | None = None) -> World:
        return World(self.folder / f"{session}.effects", trail or Trail())

    def ask(self, question: Callable[[holdfast.Store], Any]) -> Any:
        """What a process of its own says of the store: plain data. AssertionError if it fails."""

        def work(out: int) -> None:
            with self.open() as store:
                os.write(out, json.dumps({"answer": question(store)}).encode() + b"\n")

        child = processes.fork(work)
        status = child.finish(SECONDS)
        said = json.loads(complete_lines(bytes(child.said) or b"{}\n")[-1])
        assert status == 0, said.get("what", f"a process ended with {status}")
        return said["answer"]

    def damage(self) -> list[str]:
        ok = self.ask(lambda store: store.verify(read_data=True).ok)
        return [] if ok else ["verify reports damage"]


@contextmanager
def place(kind: str, folder: Path) -> Iterator[Place]:
    if kind == "postgres":
        with postgres.schema() as schema:
            yield Place(postgres.server_url(), {"create": True, "schema": schema}, folder)
    else:
        yield Place(f"{'files:' if kind == 'files' else ''}{folder}/store", {}, folder)


@dataclass(frozen=True)
class Agent:
    """One agent on one session: what every process that takes it up does."""

    place: Place
    session: str
    turns: int

    def start(self, at: Signals | None = None, **options: Any) -> processes.Child:
        """A process that does all of it, unless it dies or stops at an event of its trail."""

        def work(out: int) -> None:
            trail = Trail(out, at)
            with self.place.open() as store:
                for key in self.in_doubt(store):
                    trail.say(f"found {key}")
                trail.say("looked")
                if not self.is_completed(store):
                    self._work(store, trail, options)

        return processes.fork(work)

    def _work(self, store: holdfast.Store, trail: Trail, options: dict[str, Any]) -> None:
        watch(store, trail)
        world = self.place.world(self.session, trail)
        try:
            with store.session(self.session).run(state=begin(), **options) as run:
                try:
                    act(run, world, self.turns, look=True)
                except Fenced:
                    _insist(run, trail)
                    raise
        except Fenced:
            trail.say("fenced")

    def is_completed(self, store: holdfast.Store) -> bool:
        """A process may have died after its last word; another run would be a new one."""
        head = store.session(self.session).head
        return head is not None and head.status == "completed"

    def in_doubt(self, store: holdfast.Store) -> list[str]:
        session = store.session(self.session)
        if not session.exists():
            return []
        return [f"{each.turn} {each.key}" for each in session.pending() if each.state == "in doubt"]

    def resume(self, store: holdfast.Store, *, look: bool) -> str | None:
        """Go on in this process; the key of the tool that somebody is asked about, if any."""
        if self.is_completed(store):
            return None
        try:
            with store.session(self.session).run(state=begin()) as run:
                act(run, self.place.world(self.session), self.turns, look=look)
        except InDoubt as error:
            return error.key
        return None

    def outcome(self, store: holdfast.Store) -> dict[str, Any]:
        session = store.session(self.session)
        assert session.head is not None
        return {
            "status": session.head.status,
            "state": session.load(),
            "in doubt": self.in_doubt(store),
            "calls": [[call.id, call.success] for call in session.tool_calls()],
            "effects": sorted(e for e in self.place.world(self.session).effects() if _is_tool(e)),
        }

    def differences(self, outcome: dict[str, Any]) -> list[str]:
        """From that of an agent that nothing has interrupted."""
        world = World(self.place.folder / "uninterrupted.effects", Trail())
        with holdfast.open("memory:") as store, store.session("s").run(state=begin()) as run:
            act(run, world, self.turns, look=True)
        tools = [id for turn in range(1, self.turns + 1) for id in _tools(turn)]
        expected = {
            "status": "completed", "state": run.state, "in doubt": [],
            "calls": [[id, True] for id in tools], "effects": sorted(tools),
        }  # fmt: skip
        return [
            f"{what}: {str(outcome[what])[:200]}, not {str(expected[what])[:200]}"
            for what in expected
            if outcome[what] != expected[what]
        ]

    def shortcomings(self) -> list[str]:
        """How this agent has ended otherwise than one that nothing has interrupted."""
        return self.differences(self.place.ask(self.outcome))


def late_writes(run: holdfast.Run | holdfast.AsyncRun, trail: Trail) -> dict[str, Any]:
    """What a worker may still try that has lost its session."""
    return {
        "checkpoint": run.checkpoint,
        "step": lambda: run.step("late", trail.say, "called"),
        "wait": lambda: run.wait_for("late"),
    }


def _insist(run: holdfast.Run, trail: Trail) -> None:
    """Write whatever else there is, after the session was lost."""
    for what, write in late_writes(run, trail).items():
        try:
            write()
        except Fenced:
            continue
        except Halt:
            pass
        trail.say(f"wrote {what}")


def trail_of(child: processes.Child) -> list[str]:
    return [line.decode() for line in complete_lines(bytes(child.said))]


# -- every boundary --------------------------------------------------------------------------------


@dataclass
class Report:
    kills: int = 0
    places: set[str] = field(default_factory=set)
    doubts: int = 0
    asked: int = 0
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        head = f"{self.kills} kills, {self.doubts} left something in doubt, {self.asked} asked"
        return "\n".join([f"{head}, {len(self.failures)} failures", *self.failures[:10]])


def every_boundary(
    place: Place, kind: type[Agent] = Agent, *, until: str = "never found"
) -> Report:
    """Kill an agent at its first event, at its second, … and let another process go on.

    Ends after the last event, or with a failure that is looked for.
    """
    report = Report()
    for at in count(1):
        agent = kind(place, f"killed at {at}", turns=2)
        child = agent.start({at: signal.SIGKILL}, policy=AfterToolCall())
        status, trail = child.finish(SECONDS), trail_of(child)
        if status == 0 or any(until in failure for failure in report.failures):
            break
        assert status == -signal.SIGKILL, trail[-1:]
        report.kills += 1
        report.places.add(trail[-1].partition(" ")[0])
        found = _aftermath(agent, trail, report)
        report.failures += [f"{at}, killed at {trail[-1]!r}: {what}" for what in found]
    left = place.ask(lambda store: [each.session for each in store.abandoned()])
    report.failures += [f"abandoned: {name}" for name in left]
    report.failures += place.damage()
    return report


def _aftermath(agent: Agent, trail: list[str], report: Report) -> list[str]:
    """What is wrong after a kill, when another process goes on, and looks only if it has to."""
    world = agent.place.world(agent.session)

    def go_on(store: holdfast.Store) -> list[Any]:
        in_doubt, before = agent.in_doubt(store), world.effects()
        asked, touched = agent.resume(store, look=False), list[str]()
        if asked is not None:
            touched = world.effects()[len(before) :]
            agent.resume(store, look=True)
        return [in_doubt, asked, touched, agent.outcome(store)]

    try:
        in_doubt, asked, touched, outcome = agent.place.ask(go_on)
    except AssertionError as error:
        return [f"resuming fails: {error}"]
    report.doubts += bool(in_doubt)
    report.asked += asked is not None
    must, may = doubtful(trail, exact=True)
    found = compare({*in_doubt}, must, may)
    tools = [key.partition(" ")[2] for key in in_doubt if _is_tool(key)]
    if tools != ([] if asked is None else [asked]):
        found.append(f"in doubt is {tools}, asked was for {asked!r}")
    if any(map(_is_tool, touched)):
        found.append(f"{touched} before anybody was asked")
    for model, times in Counter(e for e in world.effects() if not _is_tool(e)).items():
        if times > 1 and f"{model.partition(' ')[2]} model#1" not in may:
            found.append(f"{model!r} was called {times} times, and was not in doubt")
    return found + agent.differences(outcome)


def compare(found: set[str], must: set[str], may: set[str]) -> list[str]:
    missed = [f"not reported as in doubt: {key}" for key in sorted(must - found)]
    return missed + [f"reported as in doubt: {key}" for key in sorted(found - may)]
