"""A state machine of runs: every backend must equal a plain model, whatever is interrupted where.

The model knows what was called, what came of it and from where a run goes on; it keeps its states
as deep copies. Workers are given up as a kill would leave them, and are taken over by others.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import holdfast
from holdfast import (
    AfterLLMResponse,
    AfterToolCall,
    AlreadyDecided,
    Done,
    EveryN,
    Fenced,
    HoldfastError,
    InDoubt,
    InvalidRequest,
    Never,
    NotFound,
    NotSerializable,
    Policy,
    SessionBusy,
    StepChanged,
    StepFailed,
    Usage,
)
from holdfast.runs.run_core import Halt
from tests.mutants import runs

POLICIES: list[Policy] = [
    EveryN(1), EveryN(2), AfterToolCall(), AfterToolCall() | AfterLLMResponse(), Never(),
]  # fmt: skip


def wants(policy: Policy, kind: str) -> bool:
    """Whether a checkpoint is due after a call."""
    return policy is POLICIES[3] or (kind == "tool" and policy is POLICIES[2])


class Crash(BaseException):
    """The process is gone, in the middle of a call."""


# -- the model -------------------------------------------------------------------------------------


@dataclass
class Call:
    """What is known of a call, as the journal must know it."""

    kind: str
    name: str
    arguments: Any
    begun: int
    """Later than what has a lower number."""
    at: tuple[str, int] = ("", 0)
    """The session, and the number of the run."""
    tokens: int = 0
    spent: bool = False
    """Whether the journal or a checkpoint knows its tokens."""
    named: bool = False
    """Whether a checkpoint has it in its usage."""
    outcome: str = "started"
    raised: bool = False
    result: Any = None
    run: holdfast.Run | None = None
    """Whose it is, while that is at work."""


Where = tuple[int, int, str]
"""The number of a run, the turn, and the key."""


def shown(where: Where, call: Call) -> str:
    """The key that pending() shows: a question's has the turn, and its number from 2 on."""
    _, turn, key = where
    if call.kind != "wait":
        return key
    return call.name + (f"@{turn}" if turn else "") + key.removeprefix(f"wait:{call.name}")


@dataclass
class Kept:
    """What is known of a checkpoint."""

    state: Any
    parent: int | None
    id: str
    outside: int = 0
    """Tokens that were spent outside of calls."""
    calls: list[Call] = field(default_factory=list)
    """Those whose tokens it has."""
    halt: tuple[Any, ...] | None = None
    """The run, the turn, the base and the reason, if that was halted."""

    @property
    def tokens(self) -> int:
        return self.outside + sum(call.tokens for call in self.calls)


@dataclass
class Book:
    """What is known of a session."""

    kept: list[Kept] = field(default_factory=list)
    origin: tuple[str, int] | None = None
    """The session and the checkpoint that it was forked from."""
    outside: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict)
    """By run and base, and then by attempt: tokens that were spent outside of calls."""
    head: int | None = None
    calls: dict[Where, Call] = field(default_factory=dict)
    run: Past | None = None
    """The run that the next one goes on with."""

    def path(self, at: int | None) -> Iterator[Kept]:
        while at is not None:
            yield self.kept[at]
            at = self.kept[at].parent


@dataclass
class Past:
    """Where a run goes on that nobody is at work on."""

    number: int
    began: int
    base: int
    turn: int
    """The one that starts from the base; 0 before the loop."""
    died: bool = True
    failed: bool = False


@dataclass
class Work:
    """A run that somebody is at work on."""

    run: holdfast.Run
    past: Past
    policy: Policy
    turn: int
    state: Any
    parent: int | None
    """The checkpoint to go on from, if that is not the head."""
    attempt: int
    turns: Iterator[int] | None = None
    tokens: int = 0
    """Spent outside of calls since the last checkpoint."""
    unnamed: list[Call] = field(default_factory=list)
    """Calls that are over, which the next checkpoint has in its usage."""
    counted: list[Call] = field(default_factory=list)
    owed: str | None = None
    """The trigger of the checkpoint that is due."""
    halt: Halt | None = None
    """Why the run cannot go on."""
    ordinals: dict[tuple[int, str], int] = field(default_factory=dict)
    asked: dict[tuple[int, str], str] = field(default_factory=dict)
    """The keys of questions that have no answer, as far as this worker knows."""
    visited: set[str] = field(default_factory=set)
    removed: list[str] = field(default_factory=list)
    failed: tuple[BaseException, Call] | None = None

    @property
    def at(self) -> int:
        """The turn that calls belong to."""
        return self.turn if self.turns is not None else 0

    @property
    def repeats(self) -> bool:
        """Whether it goes through the code before the loop again, though it has turns already."""
        return self.turn > 0 and self.turns is None


def crashed(run: holdfast.Run) -> None:
    """What is left of a run whose process is gone."""
    assert run._core._opened is not None
    run._core._over = True
    run._core._opened.stop_heartbeat()


class RunMachine(RuleBasedStateMachine):
    """Subclasses say how to open the store."""

    two: ClassVar[bool] = True
    """Whether it can be opened twice, as by two processes."""

    def open(self) -> holdfast.Store:
        raise NotImplementedError

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-machine-"))
        self.numbers = count(1)
        self.books: dict[str, Book] = {}
        self.working: dict[str, Work] = {}
        self.fenced: list[holdfast.Run] = []
        self.made: list[Call] = []
        self.keys: dict[tuple[str, Where], str] = {}
        self.stores: list[holdfast.Store] = []
        self.reopened()

    def reopened(self) -> None:
        while self.fenced:
            crashed(self.fenced.pop())
        for store in self.stores[:1] if not self.two else self.stores:
            store.close()
        first = self.open()
        self.stores = [first, self.open() if self.two else first]

    def teardown(self) -> None:
        if hasattr(self, "stores"):
            self.check_all()
            for run in [*self.fenced, *[work.run for work in self.working.values()]]:
                crashed(run)
            for store in {id(store): store for store in self.stores}.values():
                assert store.verify(read_data=True).ok
                store.close()
            shutil.rmtree(self.folder)

    # -- what happens to a session -------------------------------------------------------------

    def saved(self, name: str, state: Any, parent: int | None, trigger: str | None = None) -> Kept:
        """A checkpoint more, at which the head is if no other was taken with it."""
        book = self.books.setdefault(name, Book())
        found = [*self.stores[0].session(name).tree()][len(book.kept)]
        assert found.trigger == trigger
        assert parent is None or found.parent == book.kept[parent].id
        book.kept.append(Kept(copy.deepcopy(state), parent, found.id))
        book.head = len(book.kept) - 1
        return book.kept[-1]

    def saved_by(self, name: str, trigger: str, *, base: bool = False) -> Kept:
        """The same by a run; `base` if that goes on from there."""
        work, book = self.working[name], self.books[name]
        parent = book.head if work.parent is None else work.parent
        kept = self.saved(name, work.state, parent, trigger)
        kept.outside = 0 if work.repeats else work.tokens
        kept.calls = work.unnamed
        for call in kept.calls:
            call.named = call.spent = True
        attempts = book.outside.setdefault((work.past.number, work.past.base), {})
        attempts[work.attempt] = attempts.get(work.attempt, 0) + kept.outside
        work.parent, work.tokens, work.unnamed = None, 0, []
        assert book.head is not None
        if base:
            work.past.base, work.past.turn = book.head, work.turn + 1
        return kept

    def ended(self, work: Work, call: Call, *, owes: bool) -> None:
        """A call is over, or was before and is asked for."""
        if not any(call is each for each in work.counted):
            work.counted.append(call)
            work.unnamed.append(call)
            if owes and wants(work.policy, call.kind):
                work.owed = "tool_call" if call.kind == "tool" else "llm"

    def take_owed(self, name: str) -> None:
        """The checkpoint that is due was taken before anything else, as things were then."""
        work = self.working[name]
        if work.owed is not None:
            self.saved_by(name, work.owed)
            work.owed = None

    def idle(self) -> list[str]:
        return sorted(self.books.keys() - self.working.keys())

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), which=st.integers(0, 1), n=st.integers(0, 9))
    def save_without_a_run(self, data: st.DataObject, which: int, n: int) -> None:
        name = data.draw(st.sampled_from(self.idle()))
        book = self.books[name]
        self.stores[which].session(name).save({"n": n, "log": []})
        self.saved(name, {"n": n, "log": []}, book.head)
        book.run = None

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), which=st.integers(0, 1))
    def rewind(self, data: st.DataObject, which: int) -> None:
        name = data.draw(st.sampled_from(self.idle()))
        book = self.books[name]
        at = data.draw(st.integers(0, len(book.kept) - 1))
        self.stores[which].session(name).rewind(book.kept[at].id)
        book.head, book.run = at, None

    @precondition(lambda self: self.books and len(self.books) < 5)
    @rule(data=st.data(), which=st.integers(0, 1))
    def fork(self, data: st.DataObject, which: int) -> None:
        """No matter whether it is being run; nothing of a run goes along."""
        name = data.draw(st.sampled_from(sorted(self.books)))
        book, new = self.books[name], f"fork{len(self.books)}"
        at = data.draw(st.integers(0, len(book.kept) - 1))
        fork = self.stores[which].session(name).fork(new, at=book.kept[at].id)
        assert fork.head is not None
        assert fork.head.parent == book.kept[at].id
        self.saved(new, book.kept[at].state, None)
        self.books[new].origin = name, at

    @precondition(lambda self: not self.working)
    @rule()
    def close_and_open(self) -> None:
        self.reopened()

    # -- runs begin and end --------------------------------------------------------------------

    @rule(
        name=st.sampled_from(["s", "t"]),
        which=st.integers(0, 1),
        policy=st.sampled_from(POLICIES),
        resume=st.sampled_from([None, None, None, True, False]),
    )
    def run(self, name: str, which: int, policy: Policy, resume: bool | None) -> None:
        self.start(name, which, policy, resume=resume)

    @precondition(lambda self: any(name.startswith("fork") for name in self.books))
    @rule(data=st.data(), which=st.integers(0, 1))
    def run_a_fork(self, data: st.DataObject, which: int) -> None:
        forks = sorted(name for name in self.books if name.startswith("fork"))
        self.start(data.draw(st.sampled_from(forks)), which, POLICIES[0], resume=None)

    def start(
        self, name: str, which: int, policy: Policy, *, resume: bool | None, takeover: bool = False
    ) -> None:
        first = None if name in self.books else {"n": 0, "log": []}
        run = (
            self.stores[which]
            .session(name)
            .run(policy=policy, state=first, resume=resume, takeover=takeover)
        )
        if name in self.working and not takeover:
            with pytest.raises(SessionBusy):
                run.__enter__()
            return
        past = None if resume is False or name not in self.books else self.books[name].run
        if past is None and resume:
            with pytest.raises(InvalidRequest):
                run.__enter__()
            return
        run.__enter__()
        book = self.books.get(name)
        if book is None:
            self.saved(name, {"n": 0, "log": []}, None, "run")
            book = self.books[name]
        assert book.head is not None
        assert run.resumed == (past is not None)
        if past is None:
            past = Past(next(self.numbers), book.head, book.head, 0)
        book.run = past
        past.died = True
        parent = None if past.base == book.head else past.base
        state = copy.deepcopy(book.kept[past.began].state)
        self.working[name] = Work(
            run, past, policy, past.turn, state, parent, attempt=next(self.numbers)
        )

    @precondition(lambda self: self.working)
    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.working)))
        crashed(self.working.pop(name).run)

    @precondition(lambda self: self.working)
    @rule(data=st.data(), which=st.integers(0, 1), policy=st.sampled_from(POLICIES))
    def take_over(self, data: st.DataObject, which: int, policy: Policy) -> None:
        name = data.draw(st.sampled_from(sorted(self.working)))
        late = self.working[name].run
        self.start(name, which, policy, resume=None, takeover=True)
        assert late._core._opened is not None
        late._core._opened.stop_heartbeat()  # so that no heartbeat tells it before it writes
        self.fenced.append(late)

    @precondition(lambda self: self.fenced)
    @rule(how=st.sampled_from(["step", "checkpoint", "wait", "leave"]))
    def write_what_is_late(self, how: str) -> None:
        late = self.fenced.pop()
        # One that leaves without having entered its loop is told that before it tries to write.
        with pytest.raises((Fenced, StepChanged) if how == "leave" else Fenced):
            if how == "step":
                late.step("late", lambda: 1)
            elif how == "checkpoint":
                late.checkpoint()
            elif how == "wait":
                late.wait_for("late")
            else:
                late.__exit__(None, None, None)
        crashed(late)

    @precondition(lambda self: self.working)
    @rule(data=st.data(), how=st.sampled_from(["end", "halt", "halt", "fail", "fail"]))
    def leave(self, data: st.DataObject, how: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.working)))
        self.left(data, name, how)

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), which=st.integers(0, 1), changes=st.booleans(), calls=st.booleans())
    def poll(self, data: st.DataObject, which: int, *, changes: bool, calls: bool) -> None:
        """What workers do again and again: resume a run that waits, and halt there once more."""
        name = data.draw(st.sampled_from(self.idle()))
        for _ in range(3):
            self.start(name, which, POLICIES[3], resume=None)
            work = self.working[name]
            if work.turn:
                self.go_on(name)
            if calls:
                self.call_one(name, tool=True, name="a", tokens=3)
            if changes:
                self.change(name, 1, 2)
            self.wait_on(name, "p")
            self.left(data, name, "halt")

    def left(self, data: st.DataObject, name: str, how: str) -> None:
        work = self.working[name]
        if how == "end" and work.turn and work.turns is None:
            with pytest.raises(StepChanged):
                work.run.__exit__(None, None, None)
            del self.working[name]
            return
        error: BaseException | None = None
        if how == "halt":
            error = work.halt or Halt("enough")
        elif how == "fail":
            error = RuntimeError("unrelated")
            if work.failed is not None and data.draw(st.booleans()):
                error, call = work.failed
                call.outcome = "rerun"
        swallowed = work.run.__exit__(type(error) if error else None, error, None)
        assert swallowed == (how == "halt")
        if how == "end":
            self.look_for_removed(work, name, work.turn)
        self.take_owed(name)
        halt = None
        if isinstance(error, Halt):
            halt = (work.past.number, work.turn, work.past.base, error.reason, error.hint)
        if halt is None or not self.halts_again(work, self.books[name], halt):
            self.saved_by(name, "run").halt = halt
        head = self.stores[1].session(name).head
        assert head is not None
        assert head.id == self.books[name].kept[-1].id
        assert head.status == {"end": "completed", "halt": "halted", "fail": "failed"}[how]
        work.past.died, work.past.failed = False, how == "fail"
        if how == "end":
            self.books[name].run = None
        del self.working[name]

    def halts_again(self, work: Work, book: Book, halt: tuple[Any, ...]) -> bool:
        """Whether an earlier attempt has left all this at the head already."""
        if work.parent is None or book.head is None or book.kept[book.head].halt != halt:
            return False
        branch = [each for each in book.path(book.head) if each is not book.kept[work.past.base]]
        branch = branch[: len(branch) - len([*book.path(work.past.base)]) + 1]
        tokens = 0 if work.repeats else work.tokens
        return (
            book.kept[book.head].state == work.state
            and sum(each.outside for each in branch) == tokens
            and sorted(call.begun for each in branch for call in each.calls)
            == sorted(call.begun for call in work.unnamed)
        )

    # -- within a run --------------------------------------------------------------------------

    def any_work(self, data: st.DataObject) -> tuple[str, Work, Book]:
        name = data.draw(st.sampled_from(sorted(self.working)))
        return name, self.working[name], self.books[name]

    @precondition(lambda self: self.working)
    @rule(data=st.data(), n=st.integers(0, 9), tokens=st.integers(0, 5))
    def change_the_state(self, data: st.DataObject, n: int, tokens: int) -> None:
        name, _, _ = self.any_work(data)
        self.change(name, n, tokens)

    def change(self, name: str, n: int, tokens: int) -> None:
        work = self.working[name]
        for state in (work.run.state, work.state):
            state["n"] += 1
            state["log"].append(n)
        work.run.add_usage(tokens=tokens)
        work.tokens += tokens

    @precondition(lambda self: self.working)
    @rule(data=st.data())
    def checkpoint(self, data: st.DataObject) -> None:
        name, work, _ = self.any_work(data)
        work.run.checkpoint("looked")
        self.take_owed(name)
        self.saved_by(name, "looked")

    @precondition(lambda self: self.working)
    @rule(data=st.data())
    def next_turn(self, data: st.DataObject) -> None:
        name, _, _ = self.any_work(data)
        self.go_on(name)

    @precondition(lambda self: self.working)
    @rule(data=st.data(), n=st.integers(0, 9), policy=st.sampled_from(POLICIES))
    def begin_a_turn_twice(self, data: st.DataObject, n: int, policy: Policy) -> None:
        """What seldom comes about by chance: a turn that has saved something, and starts again."""
        name, work, _ = self.any_work(data)
        self.go_on(name)
        self.change(name, n, 1)
        work.run.checkpoint("looked")
        self.saved_by(name, "looked")
        crashed(self.working.pop(name).run)
        self.start(name, n % 2, policy, resume=None)
        self.go_on(name)

    def go_on(self, name: str) -> None:
        work, book = self.working[name], self.books[name]
        turns = work.turns or work.run.turns()
        assert next(turns) == work.run.turn
        self.take_owed(name)
        self.look_for_removed(work, name, work.at)
        if work.turns is None:
            if work.turn:
                work.state, work.tokens = copy.deepcopy(book.kept[work.past.base].state), 0
            work.turn, work.turns = work.turn or 1, turns
        before = len(book.kept)
        policy = work.policy
        ended = work.run.turn != work.turn
        wanted = wants(policy, "tool") or (isinstance(policy, EveryN) and work.turn % policy.n == 0)
        if ended and wanted:
            self.saved_by(name, "turn", base=True)
        assert len(book.kept) == before + (ended and wanted)
        work.turn += ended
        assert work.run.turn == work.turn

    def look_for_removed(self, work: Work, name: str, turn: int) -> None:
        """What was recorded of a turn that ends, and was not asked for again."""
        if work.run.resumed:
            work.removed += [
                key
                for (run, at, key), call in self.books[name].calls.items()
                if (run, at) == (work.past.number, turn)
                and key not in work.visited
                and call.kind != "wait"
            ]
        work.visited.clear()

    @precondition(lambda self: self.working)
    @rule(
        data=st.data(),
        tool=st.booleans(),
        name=st.sampled_from(["a", "b"]),
        given=st.sampled_from([None, None, "k"]),
        argument=st.integers(0, 1),
        on_doubt=st.sampled_from(["rerun", "skip", "ask", "done", "not done"]),
        on_change=st.sampled_from(["raise", "raise", "reuse", "rerun"]),
        ends=st.sampled_from(["well"] * 5 + ["error", "crash", "interrupted", "unstorable"]),
        tokens=st.integers(0, 3),
    )
    def call(self, data: st.DataObject, **options: Any) -> None:
        self.call_one(self.any_work(data)[0], **options)

    def call_one(
        self,
        session: str,
        *,
        tool: bool,
        name: str,
        given: str | None = None,
        argument: int = 0,
        on_doubt: Any = "rerun",
        on_change: Any = "reuse",
        ends: str = "well",
        tokens: int,
    ) -> None:
        work, book = self.working[session], self.books[session]
        if given is None and not tool:
            ordinal = work.ordinals[work.at, name] = work.ordinals.get((work.at, name), 0) + 1
        key = f"call {name}" if tool else given or f"{name}#{ordinal}"
        where = (work.past.number, work.at, key)
        arguments = {"x": argument} if tool else [[argument], {}]
        expected = self.expect(book, where, arguments, on_doubt, on_change)
        work.visited.add(key)
        if expected == "call":
            kind = "tool" if tool else "step"
            fresh = Call(kind, name, arguments, next(self.numbers), run=work.run, tokens=tokens)
            fresh.at = session, work.past.number
            self.made.append(fresh)
            book.calls[where] = fresh  # an older one keeps its place, as in the journal
        made: list[str | None] = []
        result = {"of": key, "made": next(self.numbers)}

        def function(x: int) -> Any:
            made.append(holdfast.current_key())
            work.run.add_usage(tokens=tokens)
            if ends == "error":
                raise ValueError(f"{key} of {x}")
            if ends == "crash":
                raise Crash
            if ends == "interrupted":
                raise KeyboardInterrupt
            return result if ends == "well" else {"no": object()}

        verify = None
        if on_doubt in ("done", "not done"):
            found = Done("looked up") if on_doubt == "done" else None
            verify, on_doubt = (lambda _: found), "ask"

        def make() -> Any:
            options: dict[str, Any] = {
                "on_doubt": on_doubt, "on_change": on_change, "verify": verify,
            }  # fmt: skip
            try:
                if tool:
                    asked = {"id": key, "name": name, "input": {"x": argument}}
                    return work.run.tool(asked, function, **options)
                return work.run.step(name, function, argument, key=given, **options)
            finally:
                self.take_owed(session)

        if expected == "call":
            self.call_made(session, work, fresh, make, ends, result)
        else:
            self.call_known(work, book, where, make, expected)
        assert len(made) == (expected == "call"), f"{key} was called {len(made)} times"
        for idempotency_key in made:
            assert idempotency_key is not None
            assert self.keys.setdefault((session, where), idempotency_key) == idempotency_key
            assert len({*self.keys.values()}) == len(self.keys)

    def expect(
        self, book: Book, where: Where, arguments: Any, on_doubt: str, on_change: str
    ) -> str:
        """What must come of a call that is asked for; its book is told what that decides."""
        known = book.calls.get(where)
        if known is None or known.outcome == "rerun":
            return "call"
        changed = known.arguments != arguments
        if changed and on_change == "raise":
            return "changed"
        if known.outcome == "started":
            if on_doubt == "skip":
                known.outcome = "skipped"
            elif on_doubt == "done":
                known.outcome, known.result = "done", "looked up"
            else:
                return "doubt" if on_doubt == "ask" else "call"
        elif changed and on_change == "rerun":
            return "call"
        return "recorded"

    def call_made(
        self,
        name: str,
        work: Work,
        fresh: Call,
        make: Callable[[], Any],
        ends: str,
        result: Any,
    ) -> None:
        if ends == "well":
            assert make() == result
            fresh.outcome, fresh.result, fresh.spent = "done", result, True
            self.ended(work, fresh, owes=True)
        elif ends == "error":
            with pytest.raises(ValueError, match="of") as raised:
                make()
            fresh.outcome, fresh.raised, fresh.spent = "failed", True, True
            work.failed = (raised.value, fresh)
            self.ended(work, fresh, owes=False)
        elif ends == "unstorable":
            with pytest.raises(NotSerializable, match=r"result\.no"):
                make()
        elif ends == "interrupted":
            with pytest.raises(KeyboardInterrupt):
                make()
        if ends in ("interrupted", "unstorable") and fresh.tokens:
            self.ended(work, fresh, owes=False)
        if ends == "crash":
            with pytest.raises(Crash):
                make()
            crashed(self.working.pop(name).run)

    def call_known(
        self, work: Work, book: Book, where: Where, make: Callable[[], Any], expected: str
    ) -> None:
        known = book.calls[where]
        if expected == "changed":
            with pytest.raises(StepChanged):
                make()
        elif expected == "doubt":
            with pytest.raises(InDoubt) as doubt:
                make()
            assert doubt.value.key == where[2]
        elif known.outcome == "failed":
            with pytest.raises(ValueError, match="of") as failed:
                make()
            assert isinstance(failed.value.__cause__, StepFailed)
            work.failed = (failed.value, known)
        else:
            assert make() == known.result
        if expected == "recorded":
            self.call_recorded(work, known)

    def call_recorded(self, work: Work, known: Call) -> None:
        counted = any(known is each for each in work.counted)
        if known.outcome == "done" and counted:
            known.spent = True  # looked up after this worker was interrupted in it
        if not known.spent and not counted:
            known.tokens = 0  # those that nobody has written down
        if not work.repeats:
            self.ended(work, known, owes=known.outcome == "done" and not known.named)

    @precondition(lambda self: self.working)
    @rule(data=st.data(), name=st.sampled_from(["p", "q"]))
    def wait(self, data: st.DataObject, name: str) -> None:
        self.wait_on(self.any_work(data)[0], name)

    def wait_on(self, session: str, name: str) -> None:
        work, book = self.working[session], self.books[session]
        at = work.at, f"wait:{name}"
        if at not in work.asked:
            n = work.ordinals[at] = work.ordinals.get(at, 0) + 1
            work.asked[at] = f"wait:{name}" if n == 1 else f"wait:{name}#{n}"
        where = (work.past.number, work.at, work.asked[at])
        known = book.calls.setdefault(where, Call("wait", name, "now?", next(self.numbers)))
        if known.outcome == "done":
            assert work.run.wait_for(name, "now?") == known.result
            del work.asked[at]
        else:
            with pytest.raises(Halt) as halted:
                work.run.wait_for(name, "now?")
            work.halt = halted.value
        self.take_owed(session)

    # -- what others decide --------------------------------------------------------------------

    def find(
        self, book: Book, wanted: str, *, waits: bool
    ) -> tuple[Where, Call] | type[HoldfastError]:
        """The newest of a key, if it is open or of the newest run; else the open one of a name."""
        calls = [(w, c) for w, c in book.calls.items() if (c.kind == "wait") == waits]
        calls.sort(key=lambda each: each[1].begun)
        recent = [each for each in calls if each[0][0] == calls[-1][0][0]]
        open_ = [each for each in calls if each[1].outcome == "started"]
        keyed = [each for each in calls if shown(*each) == wanted][-1:]
        named = [each for each in open_ if each[1].name == wanted]
        named = [each for each in named if each[0][0] == named[-1][0][0]]
        if keyed and (keyed[0] in open_ or keyed[0] in recent):
            return keyed[0]
        if len(named) > 1:
            return InvalidRequest
        named = named or [each for each in recent if each[1].name == wanted]
        return named[-1] if named else NotFound

    @precondition(lambda self: self.books)
    @rule(
        data=st.data(),
        which=st.integers(0, 1),
        key=st.sampled_from(["a#1", "b#1", "k", "call a", "call b"]),
        how=st.sampled_from(["result", "rerun", "skip"]),
    )
    def resolve(self, data: st.DataObject, which: int, key: str, how: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.books)))
        found = self.find(self.books[name], key, waits=False)
        session = self.stores[which].session(name)
        said: dict[str, Any] = {"result": {"result": "said"}}.get(how, {"action": how})
        if isinstance(found, type):
            with pytest.raises(found):
                session.resolve(key, **said)
            return
        where, call = found
        if call.outcome != "started":
            with pytest.raises(AlreadyDecided) as decided:
                session.resolve(key, **said)
            assert (decided.value.outcome, decided.value.result) == (call.outcome, call.result)
            return
        work = self.working.get(name)
        if work is not None and work.past.number == where[0]:
            with pytest.raises(SessionBusy):
                session.resolve(key, **said)
            return
        session.resolve(key, **said)
        call.outcome = {"result": "done", "rerun": "rerun", "skip": "skipped"}[how]
        call.result = "said" if how == "result" else None

    @precondition(lambda self: self.books)
    @rule(data=st.data(), which=st.integers(0, 1), wanted=st.sampled_from([*"pq", "p@1", "p#2"]))
    def answer(self, data: st.DataObject, which: int, wanted: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.books)))
        found = self.find(self.books[name], wanted, waits=True)
        session = self.stores[which].session(name)
        if isinstance(found, type):
            with pytest.raises(found):
                session.answer(wanted, "yes")
            return
        if found[1].outcome != "started":
            with pytest.raises(AlreadyDecided) as decided:
                session.answer(wanted, "no")
            assert decided.value.result == found[1].result
            return
        value = f"yes {next(self.numbers)}"
        session.answer(wanted, value)
        found[1].outcome, found[1].result = "done", value

    # -- what must hold ------------------------------------------------------------------------

    @invariant()
    def what_is_open_is_listed(self) -> None:
        expected = []
        for name, book in getattr(self, "books", {}).items():
            work = self.working.get(name)
            newest = sorted(book.calls.items(), key=lambda each: each[1].begun)
            keys = {shown(*each): each[0] for each in newest}
            for where, call in book.calls.items():
                if call.outcome != "started":
                    continue
                running = work is not None and work.run is call.run
                state = "waiting" if call.kind == "wait" else "running" if running else "in doubt"
                key = shown(where, call) if keys[shown(where, call)] == where else None
                expected.append((name, key or "by its idempotency key", state, where[1], call.name))
        if hasattr(self, "stores"):
            told = [
                (p.session, "by its idempotency key" if p.key == p.idempotency_key else p.key,
                 p.state, p.turn, p.name)
                for p in self.stores[1].pending()
            ]  # fmt: skip
            assert sorted(told) == sorted(expected)

    @invariant()
    def what_can_be_resumed_is_listed(self) -> None:
        left = {}
        for name, book in getattr(self, "books", {}).items():
            if book.run is not None and name not in self.working:
                left[name] = self.left_as(book, book.run)
        if hasattr(self, "stores"):
            found = {a.session: a.state for a in self.stores[1].abandoned(halted=True)}
            ready = {name for name, state in found.items() if state == "ready"}
            assert found | dict.fromkeys(ready, "halted") == left

    def left_as(self, book: Book, run: Past) -> str:
        if run.died or run.failed:
            return "died" if run.died else "failed"
        kinds = {
            call.kind
            for (number, *_), call in book.calls.items()
            if number == run.number and call.outcome == "started"
        }
        return "in doubt" if kinds - {"wait"} else "waiting" if kinds else "halted"

    @invariant()
    def runs_are_where_they_should_be(self) -> None:
        for name, work in getattr(self, "working", {}).items():
            assert work.run.state == work.state
            assert work.run.turn == work.turn
            assert list(work.run.removed) == work.removed
            open_ = [
                (where[1], call.name)
                for where, call in self.books[name].calls.items()
                if where[0] == work.past.number and call.outcome == "started"
            ]
            told = [(p.turn, p.name) for p in work.run.pending]
            assert told == [each for each in open_ if each[0] in (0, *range(work.turn, 99))]

    @invariant()
    def no_checkpoint_that_nobody_has_asked_for(self) -> None:
        for name, book in getattr(self, "books", {}).items():
            assert len(self.stores[1].session(name)) == len(book.kept)

    def check_all(self) -> None:
        """Every state, every call and what they have cost, as another handle sees them."""
        for name, book in self.books.items():
            session = self.stores[1].session(name)
            listed = list(session.tree())
            assert [c.id for c in listed] == [kept.id for kept in book.kept]
            assert session.head is not None
            assert session.head.id == book.kept[book.head or 0].id
            for checkpoint, kept in zip(listed, book.kept, strict=True):
                assert session.load(checkpoint) == kept.state
                assert checkpoint.usage == Usage(tokens=kept.tokens)
            self.check_usage(name, book, session.usage())
            told = [(c.turn, c.id, c.kind, c.name, c.success, c.result) for c in session.calls()]
            success = {"done": True, "skipped": False}
            assert told == [
                (
                    turn,
                    key,
                    c.kind,
                    c.name,
                    success.get(c.outcome, False if c.raised else None),
                    c.result,
                )
                for (_, turn, key), c in book.calls.items()
            ]

    def check_usage(self, name: str, book: Book, told: holdfast.Totals) -> None:
        """Nothing is counted twice, and nothing is left out."""
        calls = [call for call in self.made if call.at[0] == name and call.spent]
        runs = {call.at[1]: 0 for call in calls} | {run: 0 for run, _ in book.outside}
        for run in runs:
            runs[run] = sum(call.tokens for call in calls if call.at[1] == run)
        for (run, _), attempts in book.outside.items():
            runs[run] += max(attempts.values())
        assert told.spent == Usage(tokens=sum(runs.values()))
        by_run = sorted(used.tokens for used in told.runs.values() if used != Usage())
        assert by_run == sorted(filter(None, runs.values()))
        assert told.path == Usage(tokens=sum(kept.tokens for kept in book.path(book.head)))
        inherited, origin = 0, book.origin
        while origin is not None:
            above = self.books[origin[0]]
            inherited += sum(kept.tokens for kept in above.path(origin[1]))
            origin = above.origin
        assert told.inherited == Usage(tokens=inherited)


class MemoryRuns(RunMachine):
    two = False

    def open(self) -> holdfast.Store:
        return self.stores[0] if self.stores else holdfast.open("memory:")

    def reopened(self) -> None:
        store = self.open()
        self.stores = [store, store]


class SqliteRuns(RunMachine):
    def open(self) -> holdfast.Store:
        return holdfast.open(self.folder / "store.db", durability="normal")


class FilesRuns(RunMachine):
    def open(self) -> holdfast.Store:
        return holdfast.open(f"files:{self.folder / 'store'}", durability="normal")


MACHINES = [(MemoryRuns, 40, 1_000), (SqliteRuns, 20, 1_000), (FilesRuns, 10, 300)]


@pytest.mark.parametrize(("machine", "usual", "torture"), MACHINES)
def test_runs_equal_the_model(
    machine: type[RunMachine], usual: int, torture: int, rounds: Any
) -> None:
    examples = rounds(usual, torture=torture)
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples, stateful_step_count=40)
    )


# -- mutants ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mutant",
    [
        runs.goes_on_from_the_head,
        runs.calls_what_is_in_doubt,
        runs.leaves_a_run_open,
        runs.keys_calls_by_their_place,
        runs.goes_on_at_the_head,
        runs.compares_no_tokens,
        runs.counts_every_attempt,
        runs.counts_checkpoints_alone,
        runs.takes_at_once_what_is_due,
        runs.looks_at_no_earlier_attempt,
    ],
)
def test_mutant_of_runs(monkeypatch: pytest.MonkeyPatch, mutant: Any) -> None:
    mutant(monkeypatch)
    found = settings(
        max_examples=400,
        stateful_step_count=40,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    with pytest.raises((AssertionError, HoldfastError, pytest.fail.Exception)) as caught:
        run_state_machine_as_test(MemoryRuns, settings=found)
    print(repr(caught.value))
