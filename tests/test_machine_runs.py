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
    AfterToolCall,
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
    leases,
)
from holdfast.runs import journal
from holdfast.runs.run import RunCore
from holdfast.runs.signals import Halt
from tests.careless_runs import (
    calls_what_is_in_doubt,
    compares_no_tokens,
    goes_on_from_the_head,
)

POLICIES: list[Policy] = [EveryN(1), EveryN(2), AfterToolCall(), Never()]


class Crash(BaseException):
    """The process is gone, in the middle of a call."""


# -- the model -------------------------------------------------------------------------------------


@dataclass
class Call:
    """What is known of a call, as the journal must know it."""

    kind: str
    name: str
    arguments: Any
    outcome: str = "started"
    result: Any = None
    run: holdfast.Run | None = None
    """Whose it is, while that is at work."""


Where = tuple[int, int, str]
"""The number of a run, the turn, and the key."""


@dataclass
class Book:
    """What is known of a session."""

    states: list[Any] = field(default_factory=list)
    parents: list[int | None] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    head: int | None = None
    calls: dict[Where, Call] = field(default_factory=dict)
    run: Past | None = None
    """The run that the next one goes on with."""


@dataclass
class Past:
    """Where a run goes on that nobody is at work on."""

    number: int
    began: int
    base: int
    turn: int
    """The one that starts from the base; 0 before the loop."""
    died: bool = True


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
    turns: Iterator[int] | None = None
    tokens: int = 0
    ordinals: dict[tuple[int, str], int] = field(default_factory=dict)
    visited: set[str] = field(default_factory=set)
    removed: list[str] = field(default_factory=list)
    failed: tuple[BaseException, Call] | None = None

    @property
    def at(self) -> int:
        """The turn that calls belong to."""
        return self.turn if self.turns is not None else 0


def crashed(run: holdfast.Run) -> None:
    """What is left of a run whose process is gone."""
    assert run._opened is not None
    run._over = True
    run._opened.let_go()


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

    def saved(self, name: str, state: Any, parent: int | None, tokens: int = 0) -> int:
        """A checkpoint more, at which the head is."""
        book = self.books.setdefault(name, Book())
        book.states.append(copy.deepcopy(state))
        book.parents.append(parent)
        book.tokens.append(tokens)
        book.head = len(book.states) - 1
        head = self.stores[0].session(name).head
        assert head is not None
        assert head.seq == len(book.states), "a checkpoint that nobody has asked for"
        assert parent is None or head.parent == book.ids[parent]
        book.ids.append(head.id)
        return book.head

    def saved_by(self, name: str, *, base: bool = False) -> None:
        """The same by a run; `base` if that goes on from there."""
        work, book = self.working[name], self.books[name]
        parent = book.head if work.parent is None else work.parent
        at = self.saved(name, work.state, parent, work.tokens)
        work.parent, work.tokens = None, 0
        if base:
            work.past.base, work.past.turn = at, work.turn + 1

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
        at = data.draw(st.integers(0, len(book.ids) - 1))
        self.stores[which].session(name).rewind(book.ids[at])
        book.head, book.run = at, None

    @precondition(lambda self: self.books and len(self.books) < 5)
    @rule(data=st.data(), which=st.integers(0, 1))
    def fork(self, data: st.DataObject, which: int) -> None:
        """No matter whether it is being run; nothing of a run goes along."""
        name = data.draw(st.sampled_from(sorted(self.books)))
        book, new = self.books[name], f"fork{len(self.books)}"
        at = data.draw(st.integers(0, len(book.ids) - 1))
        fork = self.stores[which].session(name).fork(new, at=book.ids[at])
        assert fork.head is not None
        assert fork.head.parent == book.ids[at]
        self.saved(new, book.states[at], None)

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
        run = (
            self.stores[which]
            .session(name)
            .run(policy=policy, state={"n": 0, "log": []}, resume=resume, takeover=takeover)
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
            self.saved(name, {"n": 0, "log": []}, None)
            book = self.books[name]
        assert book.head is not None
        assert run.resumed == (past is not None)
        if past is None:
            past = Past(next(self.numbers), book.head, book.head, 0)
        book.run = past
        past.died = True
        parent = None if past.base == book.head else past.base
        state = copy.deepcopy(book.states[past.began])
        self.working[name] = Work(run, past, policy, past.turn, state, parent)

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
    @rule(data=st.data(), how=st.sampled_from(["end", "halt", "fail", "fail"]))
    def leave(self, data: st.DataObject, how: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.working)))
        work = self.working[name]
        if how == "end" and work.turn and work.turns is None:
            with pytest.raises(StepChanged):
                work.run.__exit__(None, None, None)
            del self.working[name]
            return
        error: BaseException | None = None
        if how == "halt":
            error = Halt("enough")
        elif how == "fail":
            error = RuntimeError("unrelated")
            if work.failed is not None and data.draw(st.booleans()):
                error, call = work.failed
                call.outcome = "rerun"
        swallowed = work.run.__exit__(type(error) if error else None, error, None)
        assert swallowed == (how == "halt")
        if how == "end":
            self.look_for_removed(work, name, work.turn)
        self.saved_by(name)
        head = self.stores[1].session(name).head
        assert head is not None
        assert head.status == {"end": "completed", "halt": "halted", "fail": "failed"}[how]
        work.past.died = False
        if how == "end":
            self.books[name].run = None
        del self.working[name]

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
        self.saved_by(name)

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
        self.saved_by(name)
        crashed(self.working.pop(name).run)
        self.start(name, n % 2, policy, resume=None)
        self.go_on(name)

    def go_on(self, name: str) -> None:
        work, book = self.working[name], self.books[name]
        if work.turns is None:
            self.look_for_removed(work, name, 0)
            if work.turn:
                work.state = copy.deepcopy(book.states[work.past.base])
            work.turn = work.turn or 1
            work.turns = work.run.turns()
        else:
            self.look_for_removed(work, name, work.turn)
        before = len(book.states)
        assert next(work.turns) == work.run.turn
        policy = work.policy
        ended = work.run.turn != work.turn
        wanted = isinstance(policy, AfterToolCall) or (
            isinstance(policy, EveryN) and work.turn % policy.n == 0
        )
        if ended and wanted:
            self.saved_by(name, base=True)
        assert len(book.states) == before + (ended and wanted)
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
    )
    def call(
        self,
        data: st.DataObject,
        *,
        tool: bool,
        name: str,
        given: str | None,
        argument: int,
        on_doubt: Any,
        on_change: Any,
        ends: str,
    ) -> None:
        session, work, book = self.any_work(data)
        if given is None and not tool:
            ordinal = work.ordinals[work.at, name] = work.ordinals.get((work.at, name), 0) + 1
        key = f"call {name}" if tool else given or f"{name}#{ordinal}"
        where = (work.past.number, work.at, key)
        arguments = {"x": argument} if tool else [[argument], {}]
        expected = self.expect(book, where, arguments, on_doubt, on_change)
        work.visited.add(key)
        if expected == "call":
            fresh = Call("tool" if tool else "step", name, arguments, run=work.run)
            book.calls[where] = fresh  # an older one keeps its place, as in the journal
        made: list[str | None] = []
        result = {"of": key, "made": next(self.numbers)}

        def function(x: int) -> Any:
            made.append(holdfast.current_key())
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
            if tool:
                asked = {"id": key, "name": name, "input": {"x": argument}}
                return work.run.tool(asked, function, **options)
            return work.run.step(name, function, argument, key=given, **options)

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
            fresh.outcome, fresh.result = "done", result
            if fresh.kind == "tool" and isinstance(work.policy, AfterToolCall):
                self.saved_by(name)
        elif ends == "error":
            with pytest.raises(ValueError, match="of") as raised:
                make()
            fresh.outcome = "failed"
            work.failed = (raised.value, fresh)
        elif ends == "unstorable":
            with pytest.raises(NotSerializable, match=r"result\.no"):
                make()
        elif ends == "interrupted":
            with pytest.raises(KeyboardInterrupt):
                make()
        else:
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
            with pytest.raises(StepFailed) as failed:
                make()
            work.failed = (failed.value, known)
        else:
            assert make() == known.result

    @precondition(lambda self: self.working)
    @rule(data=st.data(), name=st.sampled_from(["p", "q"]))
    def wait(self, data: st.DataObject, name: str) -> None:
        _, work, book = self.any_work(data)
        where = (work.past.number, work.at, f"wait:{name}")
        known = book.calls.setdefault(where, Call("wait", name, "now?"))
        if known.outcome == "done":
            assert work.run.wait_for(name, "now?") == known.result
        else:
            with pytest.raises(Halt):
                work.run.wait_for(name, "now?")

    # -- what others decide --------------------------------------------------------------------

    def newest(self, book: Book, wanted: str, *, waits: bool) -> tuple[Where, Call] | None:
        for where, call in reversed(book.calls.items()):
            key = call.name if waits else where[2]
            if call.outcome == "started" and (call.kind == "wait") == waits and key == wanted:
                return where, call
        return None

    @precondition(lambda self: self.books)
    @rule(
        data=st.data(),
        which=st.integers(0, 1),
        key=st.sampled_from(["a#1", "b#1", "k", "call a", "call b"]),
        how=st.sampled_from(["result", "rerun", "skip"]),
    )
    def resolve(self, data: st.DataObject, which: int, key: str, how: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.books)))
        found = self.newest(self.books[name], key, waits=False)
        session = self.stores[which].session(name)
        said: dict[str, Any] = {"result": {"result": "said"}}.get(how, {how: True})
        if found is None:
            with pytest.raises(NotFound):
                session.resolve(key, **said)
            return
        where, call = found
        work = self.working.get(name)
        if work is not None and work.past.number == where[0]:
            with pytest.raises(SessionBusy):
                session.resolve(key, **said)
            return
        session.resolve(key, **said)
        call.outcome = {"result": "done", "rerun": "rerun", "skip": "skipped"}[how]
        call.result = "said" if how == "result" else None

    @precondition(lambda self: self.books)
    @rule(data=st.data(), which=st.integers(0, 1), wanted=st.sampled_from(["p", "q"]))
    def answer(self, data: st.DataObject, which: int, wanted: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.books)))
        found = self.newest(self.books[name], wanted, waits=True)
        session = self.stores[which].session(name)
        if found is None:
            with pytest.raises(NotFound):
                session.answer(wanted, "yes")
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
            for (_, turn, key), call in book.calls.items():
                if call.outcome != "started":
                    continue
                running = work is not None and work.run is call.run
                state = "waiting" if call.kind == "wait" else "running" if running else "in doubt"
                shown = call.name if call.kind == "wait" else key
                expected.append((name, shown, state, turn, call.name))
        if hasattr(self, "stores"):
            found = self.stores[1].pending()
            told = [(p.session, p.key, p.state, p.turn, p.name) for p in found]
            assert sorted(told) == sorted(expected)

    @invariant()
    def what_can_be_resumed_is_listed(self) -> None:
        left = {}
        for name, book in getattr(self, "books", {}).items():
            if book.run is not None and name not in self.working:
                left[name] = not book.run.died
        if hasattr(self, "stores"):
            found = {a.session: a.halted for a in self.stores[1].abandoned(halted=True)}
            assert found == left

    @invariant()
    def runs_are_where_they_should_be(self) -> None:
        for name, work in getattr(self, "working", {}).items():
            assert work.run.state == work.state
            assert work.run.turn == work.turn
            assert list(work.run.removed) == work.removed
            open_ = [
                (turn, call.name if call.kind == "wait" else key)
                for (run, turn, key), call in self.books[name].calls.items()
                if run == work.past.number and call.outcome == "started"
            ]
            told = [(p.turn, p.key) for p in work.run.pending]
            assert told == [each for each in open_ if each[0] in (0, *range(work.turn, 99))]

    def check_all(self) -> None:
        """Every state, every call and what they have cost, as another handle sees them."""
        for name, book in self.books.items():
            session = self.stores[1].session(name)
            listed = list(session.tree())
            assert [c.id for c in listed] == book.ids
            assert session.head is not None
            assert session.head.id == book.ids[book.head or 0]
            for n, checkpoint in enumerate(listed):
                assert session.load(checkpoint) == book.states[n]
                assert checkpoint.usage == Usage(book.tokens[n])
            assert session.usage().spent == Usage(sum(book.tokens))
            told = [(c.turn, c.id, c.kind, c.name, c.success, c.result) for c in session.calls()]
            success = {"done": True, "failed": False, "skipped": False}
            assert told == [
                (turn, key, c.kind, c.name, success.get(c.outcome), c.result)
                for (_, turn, key), c in book.calls.items()
            ]


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


MACHINES = [(MemoryRuns, 40, 1_000), (SqliteRuns, 40, 1_000), (FilesRuns, 15, 300)]


@pytest.mark.parametrize(("machine", "usual", "torture"), MACHINES)
def test_runs_equal_the_model(
    machine: type[RunMachine], usual: int, torture: int, rounds: Any
) -> None:
    examples = rounds(usual, torture=torture)
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples, stateful_step_count=40)
    )


# -- mutants ---------------------------------------------------------------------------------------


def leaves_a_run_open(patch: pytest.MonkeyPatch) -> None:
    """What moves the head says nothing to the run that was there."""
    patch.setattr(leases, "closed", lambda *_: None)


def keys_calls_by_their_place(patch: pytest.MonkeyPatch) -> None:
    """Idempotency keys are the same in all runs."""
    key = journal.idempotency_key
    patch.setattr(journal, "idempotency_key", lambda _, turn, of: key("", turn, of))


def goes_on_at_the_head(patch: pytest.MonkeyPatch) -> None:
    """What a turn had saved before it was interrupted is not left on a branch."""
    opened = RunCore.open

    def open_(self: RunCore) -> None:
        opened(self)
        self._parent = None

    patch.setattr(RunCore, "open", open_)


@pytest.mark.parametrize(
    "mutant",
    [
        goes_on_from_the_head,
        calls_what_is_in_doubt,
        leaves_a_run_open,
        keys_calls_by_their_place,
        goes_on_at_the_head,
        compares_no_tokens,
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
