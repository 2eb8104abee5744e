"""Scripted runs: a writer that says what its calls begin, what they return, and what is durable.

Run as a program it is what the power-loss harness traces:
`python -m …runner N MUTANT FOLDER LEDGER SCRIPT [backend] [durability]`.
With N it ends instead of its N-th sync, and another process goes on; MUTANT is a way to be broken.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Literal

import holdfast
from holdfast import AfterToolCall, HoldfastError, InDoubt, Policy, StepFailed
from tests.mutants import named

from . import workload
from .ledger import digest, error_line, wrong_line
from .relay import ends_at

Where = tuple[str, int, int, str]
"""Session, number of the run in it, turn (0 is outside the loop), and key."""
Kind = Literal["step", "tool", "fails", "streams", "together", "wait", "checkpoint"]
PATIENCE = 12
"""Errors after which a runner gives up."""


# -- scripts ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Act:
    """Something that is done in a turn; `size` × 150 bytes are its arguments and its result."""

    kind: Kind
    size: int = 1


@dataclass(frozen=True)
class Part:
    """The n-th run of a session: what comes before its turns, and what is done in each."""

    session: str
    n: int
    before: tuple[Act, ...] = ()
    turns: tuple[tuple[Act, ...], ...] = ()
    policy: Policy | None = None

    def acts(self, turn: int) -> Iterator[tuple[Where, Act]]:
        """With the keys that no other call of the session has."""
        for place, act in enumerate(self.turns[turn - 1] if turn else self.before):
            key = f"{self.n}.{turn}.{place}"
            parts = "abc" if act.kind == "together" else [""]
            for each in parts:
                yield (self.session, self.n, turn, f"{key}{each}"), act

    def results(self) -> list[Where]:
        """All calls whose results make up the state, in order."""
        acts = [each for turn in range(len(self.turns) + 1) for each in self.acts(turn)]
        return [_noted(where, act) for where, act in acts if act.kind != "checkpoint"]


def _noted(where: Where, act: Act) -> Where:
    """As the journal has it."""
    return (*where[:3], f"wait:{where[3]}") if act.kind == "wait" else where


def short() -> list[Part]:
    """Every kind of call, results that are longer than a sector, and sessions with several runs."""
    step, tool, big, save = Act("step"), Act("tool"), Act("tool", 12), Act("checkpoint")
    return [
        Part("a", 1, (step,), ((tool, save, step), (Act("step", 8), big))),
        Part("b", 1, (), ((tool, Act("wait"), step), (Act("together", 3),))),
        Part("a", 2, (tool,), ((Act("fails"), Act("streams", 4), tool),), AfterToolCall()),
        Part("c", 1, (step, save, big)),
    ]


def long() -> list[Part]:
    """Enough of all this for logs that are emptied on the way."""
    rng, parts = random.Random(0), []
    for number in range(30):
        turns = tuple([(*_some(rng, 5), Act("tool")) for _ in range(rng.randrange(4))])
        policy = rng.choice([None, AfterToolCall()])
        parts.append(Part("abc"[number % 3], number // 3 + 1, _some(rng, 3), turns, policy))
    return parts


def _some(rng: random.Random, most: int) -> tuple[Act, ...]:
    kinds: list[Kind] = ["step", "tool", "fails", "streams", "together", "checkpoint"]
    acts = [Act(rng.choice(kinds), rng.choice([1, 1, 4, 30])) for _ in range(rng.randrange(most))]
    return tuple(acts)


SCRIPTS: dict[str, Callable[[], list[Part]]] = {"short": short, "long": long}


# -- the writer ------------------------------------------------------------------------------------


@dataclass
class Runner:
    """Goes through a script from wherever the store is in it, and tells `hear` what happens.

    What is told as `ack` is promised: that a function was entered is, because that it begins is
    durable by then. After an error the run is taken up again, as it would be after a crash. `by`
    makes the results of one runner different from those of any other.
    """

    url: str
    hear: Callable[[bytes], Any]
    by: str = "first"
    durability: Any = "full"
    patience: int = PATIENCE
    store: Any = None
    made: Iterator[int] = field(default_factory=count)
    lock: threading.Lock = field(default_factory=threading.Lock)
    pool: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 3))

    def run(self, script: list[Part]) -> None:
        with self.pool:
            for part in script:
                self.complete(part)
            self.close()

    def complete(self, part: Part) -> None:
        while self.patience > 0:
            try:
                self.open()
                if self.go_on(part):
                    return
            except HoldfastError as error:
                self.fail("run", error)

    def fail(self, what: str, error: HoldfastError) -> None:
        self.hear(error_line(0, f"{what}: {type(error).__name__}: {error.message}"))
        self.patience -= 1

    def open(self) -> None:
        if self.store is None:
            self.store = holdfast.open(self.url, durability=self.durability)

    def close(self) -> None:
        store, self.store = self.store, None
        try:
            if store is not None:
                store.close()
        except HoldfastError as error:
            self.fail("close", error)

    def say(self, kind: str, what: str, where: tuple[Any, ...], **more: Any) -> None:
        names = ("session", "n", "turn", "key")
        about = dict(zip(names, where, strict=False))
        line = {"is": kind, "what": what, "by": self.by} | about | more
        with self.lock:
            self.hear(json.dumps(line).encode() + b"\n")

    def go_on(self, part: Part) -> bool:
        """Run a part, or resume it; whether it is over."""
        session, about = self.store.session(part.session), (part.session, part.n)
        if session.head is not None and part.n in session.load()["runs"]:
            return True
        try:
            self.say("try", "begin", about)
            first: Any = {"runs": [], "results": []} if session.head is None else None
            with session.run(state=first, policy=part.policy) as run:
                self.say("ack", "run", about, id=run.id)
                self.act(run, part)
            if part.n in run.state["runs"]:
                self.say("ack", "end", about)
                return True
        except InDoubt as error:
            self.decide(session, part, error)
            return False
        waiting = [each for each in session.pending() if each.state == "waiting"]
        if not waiting:
            self.fail("pending", holdfast.NotFound("a run has halted, and waits for nothing"))
        for each in waiting:
            self.answer(session, part, each)
        return False

    def act(self, run: holdfast.Run, part: Part) -> None:
        if run.state["runs"] != list(range(1, part.n)):
            self.hear(wrong_line(0, f"run {part.n} began with {run.state['runs']}"))
        self.turn(run, part, 0)
        for turn in run.turns(limit=len(part.turns)) if part.turns else ():
            self.turn(run, part, turn)
        run.state["runs"].append(part.n)

    def turn(self, run: holdfast.Run, part: Part, turn: int) -> None:
        together: list[Where] = []
        for where, act in part.acts(turn):
            if act.kind == "checkpoint":
                checkpoint, state = run.checkpoint(), digest(run.state)
                self.say("ack", "checkpoint", where[:2], id=checkpoint.id, digest=state)
            elif act.kind != "together":
                run.state["results"].append(self.call(run, act, where))
            else:
                together.append(where)
                if len(together) == 3:
                    calls = [self.pool.submit(self.call, run, act, each) for each in together]
                    wait(calls)  # for all of them, whatever became of one
                    run.state["results"] += [call.result() for call in calls]
                    together.clear()

    def call(self, run: holdfast.Run, act: Act, where: Where) -> Any:
        noted, key = _noted(where, act), where[3]
        self.say("try", "call", noted)
        result = run.wait_for(key) if act.kind == "wait" else self.make(run, act, where)
        self.say("ack", "result", noted, result=result)
        return result

    def make(self, run: holdfast.Run, act: Act, where: Where) -> Any:
        key = where[3]
        arguments: dict[str, Any] = {
            "what": key,
            "text": workload.text(random.Random(key), 20 * act.size),
        }

        def function(**_: Any) -> dict[str, Any]:
            return self.enter(run, act, where)

        try:
            if act.kind == "tool":
                return run.tool({"id": key, "name": "act", "input": arguments}, function)
            return run.step("act", function, key=key, **arguments)
        except (StepFailed, Refused) as error:
            return {"failed": error.message if isinstance(error, StepFailed) else str(error)}

    def enter(self, run: holdfast.Run, act: Act, where: Where) -> dict[str, Any]:
        """The function of a call."""
        self.say("ack", "entered", where, tool=act.kind == "tool")
        by = f"{self.by} {next(self.made)}"
        if act.kind == "fails":
            raise Refused(by)
        if act.kind == "streams":
            with run.stream("chunks") as out:
                for n in range(3):
                    out.write([n, by])
                    out.flush()
                    self.say("ack", "chunk", where, chunk=[n, by])
        return {"by": by, "text": workload.text(random.Random(by), 20 * act.size)}

    def decide(self, session: holdfast.Session, part: Part, doubt: InDoubt) -> None:
        """A tool that is in doubt is made again."""
        [where] = [where for where in part.results() if where[3] == doubt.key]
        self.say("try", "again", where)
        session.resolve(where[3], action="rerun")

    def answer(self, session: holdfast.Session, part: Part, waiting: Any) -> None:
        [where] = [where for where in part.results() if where[3] == f"wait:{waiting.name}"]
        value = f"answered by {self.by} {next(self.made)}"
        session.answer(waiting.key, value)
        self.say("ack", "answer", where, result=value)


class Refused(Exception):
    """How a call fails that is to fail."""


# -- the program -----------------------------------------------------------------------------------


def main(
    n: str,
    mutant: str,
    folder: str,
    ledger: str,
    script: str,
    backend: Any = "sqlite",
    durability: str = "full",
) -> None:
    if mutant:
        named(mutant)()
    out = os.open(ledger, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    url = workload.url_of(Path(folder), backend)
    if int(n):
        first = os.fork()
        if not first:
            ends_at(int(n))
            Runner(url, partial(os.write, out)).run(SCRIPTS[script]())
            os._exit(0)
        os.waitpid(first, 0)
    runner = Runner(url, partial(os.write, out), "second" if int(n) else "first", durability)
    runner.run(SCRIPTS[script]())


if __name__ == "__main__":
    main(*sys.argv[1:])
