"""Runs: what was done is not done again, what is in doubt is said, and only one worker writes."""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from operator import methodcaller
from pathlib import Path
from types import NoneType
from typing import Any

import pytest

import holdfast
from holdfast import (
    AfterLLMResponse,
    AfterToolCall,
    AlreadyDecided,
    Conflict,
    Done,
    EveryN,
    EverySeconds,
    Fenced,
    InDoubt,
    InvalidRequest,
    Never,
    NotFound,
    NotSerializable,
    Retention,
    Retries,
    SessionBusy,
    StepChanged,
    StepFailed,
    Usage,
)
from holdfast.aio.store import AsyncStore
from holdfast.aio.workers import Workers
from holdfast.history import leases
from holdfast.history.journal import Journal, stream_chunks
from holdfast.runs import heartbeat
from holdfast.runs import run_core as run_module
from holdfast.runs import run_core as runs_run
from holdfast.runs.run_core import Halt, RunCore
from tests.mutants import runs
from tests.support.stores import Home


class Crash(BaseException):
    """Ends a run as a kill would: nothing is written any more, and nothing is given back."""


def crashed(run: holdfast.Run) -> None:
    """What is left of a run whose process is gone."""
    assert run._core._opened is not None
    run._core._over = True
    run._core._opened.stop_heartbeat()


class Worker:
    """An agent whose calls are counted, and that ends where it is told to."""

    def __init__(self, session: holdfast.Session, **options: Any) -> None:
        self.session, self.options = session, options
        self.made: list[Any] = []
        self.run: holdfast.Run | None = None

    def __call__(self, body: Callable[[Worker, holdfast.Run], None]) -> Worker:
        run = self.session.run(**self.options)
        self.run = run
        try:
            with run:
                try:
                    body(self, run)
                except Crash:
                    crashed(run)
                    raise
        except Crash:
            pass
        return self

    def effect(self, value: Any, crash: bool = False) -> Any:
        self.made.append(value)
        if crash:
            raise Crash
        return value


def speak(run: holdfast.Run, *chunks: Any) -> None:
    with run.stream("talk") as out:
        for chunk in chunks:
            out.write(chunk)


def call(id: str, **arguments: Any) -> dict[str, Any]:
    return {"id": id, "name": "act", "input": arguments}


# -- turns and steps -------------------------------------------------------------------------------


def test_a_run_from_begin_to_end(home: Home) -> None:
    session = home.session()
    with session.run(state={"n": 0, "log": []}) as run:
        assert not run.resumed
        for turn in run.turns():
            run.state["n"] += run.step("add", lambda a, b: a + b, turn, 1)
            run.state["log"].append(turn)
            if turn == 3:
                break
    assert session.load() == {"n": 9, "log": [1, 2, 3]}
    assert session.head is not None
    assert (session.head.status, session.head.trigger) == ("completed", "run")
    assert [c.run.turn if c.run else None for c in session.tree()] == [None, 1, 2, 3]
    assert session.pending() == []
    assert home.store.abandoned() == []
    assert home.store.verify(read_data=True).ok


def test_recorded_steps_come_back(home: Home) -> None:
    def body(worker: Worker, run: holdfast.Run) -> None:
        for turn in run.turns(limit=3):
            run.state["seen"].append(run.step("look", worker.effect, [turn, "a"]))
            if len(worker.made) == 3 and not run.resumed:
                raise Crash
            run.state["seen"].append(run.step("look", worker.effect, [turn, "b"]))

    first = Worker(home.session(), state={"seen": []})(body)
    assert first.made == [[1, "a"], [1, "b"], [2, "a"]]
    [lost] = home.store.abandoned()
    assert (lost.session, lost.attempt, lost.state) == ("s", 1, "died")
    second = Worker(home.session())(body)
    assert second.made == [[2, "b"], [3, "a"], [3, "b"]]
    assert home.session().load()["seen"] == [[t, x] for t in (1, 2, 3) for x in "ab"]


def test_steps_outside_the_loop_are_made_once_in_the_run(home: Home) -> None:
    """What they changed is there already; it is not changed a second time."""

    def body(worker: Worker, run: holdfast.Run) -> None:
        log = run.state["log"]
        log.append(run.step("plan", worker.effect, "plan"))
        for turn in run.turns(limit=3):
            log.append(run.step("work", worker.effect, turn))
            if turn == 2 and not run.resumed:
                raise Crash
        log.append(run.step("sum up", worker.effect, "sum"))

    first = Worker(home.session(), state={"log": []})(body)
    assert first.made == ["plan", 1, 2]
    second = Worker(home.session())(body)
    assert second.made == [3, "sum"]
    assert home.session().load() == {"log": ["plan", 1, 2, 3, "sum"]}


def test_what_comes_after_a_loop_that_was_left(home: Home) -> None:
    def body(worker: Worker, run: holdfast.Run) -> None:
        for turn in run.turns():
            run.state["log"].append(run.step("work", worker.effect, turn))
            if turn == 2:
                break
        run.state["log"].append(run.step("sum up", worker.effect, "sum"))
        if not run.resumed:
            raise Crash

    Worker(home.session(), state={"log": []})(body)
    second = Worker(home.session())(body)
    assert second.made == []
    assert home.session().load() == {"log": [1, 2, "sum"]}


def test_a_completed_run_is_followed_by_a_new_one(home: Home) -> None:
    def body(worker: Worker, run: holdfast.Run) -> None:
        run.step("once", worker.effect, 1)

    assert Worker(home.session())(body).made == [1]
    again = Worker(home.session())(body)
    assert again.made == [1]
    assert again.run is not None
    assert not again.run.resumed


def test_a_turn_begins_again_from_its_base(home: Home) -> None:
    """Checkpoints within it are there to look at, and stay on a branch of their own."""

    def body(worker: Worker, run: holdfast.Run) -> None:
        for turn in run.turns(limit=2):
            run.state["n"] += 1
            run.add_usage(tokens=10)
            run.checkpoint("half-way", label=f"half {turn}")
            run.state["n"] += 1
            if turn == 2 and not run.resumed:
                raise Crash

    session = home.session()
    Worker(session, state={"n": 0})(body)
    assert session.load() == {"n": 3}
    second = Worker(home.session())(body)
    assert second.run is not None
    assert home.session().load() == {"n": 4}
    assert sum(c.usage.tokens for c in home.session().history()) == 20
    assert home.session().usage().path == Usage(tokens=20)
    assert home.session().usage().spent == Usage(
        tokens=20
    )  # though the turn was gone through twice
    assert len([c for c in home.session().tree() if c.label == "half 2"]) == 2


def test_a_result_cannot_be_stored(home: Home) -> None:
    session = home.session()
    with pytest.raises(NotSerializable, match=r"result\.deep\[1\]"), session.run() as run:
        run.step("bad", lambda: {"deep": [1, object()]})
    [left] = session.pending()
    assert (left.key, left.state) == ("bad#1", "in doubt")
    with pytest.raises(NotSerializable), session.run() as run:
        run.step("bad", lambda a: a, object())  # before it is called


class Colour(Enum):
    RED = "red"


@dataclass
class Reply:
    text: str
    colour: Colour


def test_a_result_is_the_same_after_a_crash(home: Home) -> None:
    """Code that got an object, and gets plain data after a crash, would only fail then."""

    def body(worker: Worker, run: holdfast.Run) -> None:
        made = lambda: Reply("hello", Colour.RED)  # noqa: E731
        plain = run.step("plain", made)
        assert plain == {"text": "hello", "colour": "red"}
        assert type(plain["colour"]) is str
        assert run.step("typed", made, as_=Reply) == Reply("hello", Colour.RED)
        tool = run.tool(call("c1", x=1), lambda x: Reply("x", Colour.RED), as_=Reply)
        assert tool == Reply("x", Colour.RED)
        changed = run.step("changed", lambda: [1])
        assert changed == [1]
        changed.append(2)  # what the caller does to it is his
        assert run.step("changed", lambda: [1], key="changed#1") == [1]
        if not run.resumed:
            raise Crash

    Worker(home.session())(body)
    Worker(home.session())(body)


def test_functions_may_have_arguments_that_are_named_as_options(home: Home) -> None:
    with home.session().run() as run:

        @run.durable
        def find(q: str, key: str = "default", retries: int = 0) -> list[Any]:
            return [q, key, retries]

        assert find("q", key="mine", retries=3) == ["q", "mine", 3]
        assert find("q") == ["q", "default", 0]


@pytest.mark.parametrize("ends", ["well", "error"])
def test_a_state_that_cannot_be_stored_ends_a_run_as_failed(home: Home, ends: str) -> None:
    session = home.session()
    with pytest.raises((NotSerializable, ZeroDivisionError)), session.run(state={"n": 0}) as run:
        for turn in run.turns(limit=2):
            run.state["n"] += 1
            if turn == 2:
                run.state["bad"] = print
                break
        assert ends == "well" or 1 / 0
    now = home.session()
    assert (now.head.status, now.load()) == ("failed", {"n": 1})  # type: ignore[union-attr]
    reason = "NotSerializable: state.bad" if ends == "well" else "ZeroDivisionError"
    assert now.head.reason.startswith(reason)  # type: ignore[union-attr]
    assert [each.session for each in home.store.abandoned(halted=True)] == [now.name]
    with home.session().run(resume=True) as run:
        assert [*run.turns(limit=2)] == [2]
    assert home.session().head.status == "completed"  # type: ignore[union-attr]


def test_resume_all_refuses_what_has_to_be_awaited(home: Home) -> None:
    async def go_on(run: Any) -> None:
        raise AssertionError

    with pytest.raises(Crash), home.session().run():
        raise Crash
    before = home.session().head
    with pytest.raises(InvalidRequest, match="await"):
        home.store.resume_all(go_on)
    assert home.session().head == before


def test_steps_take_and_give_any_state(home: Home) -> None:
    values = [None, 2**70, (1, {2}), b"x", {"a": float("inf")}, frozenset({1})]

    def body(worker: Worker, run: holdfast.Run) -> None:
        got = [run.step("echo", worker.effect, value) for value in values]
        assert got == values
        assert [*map(type, got)] == [*map(type, values)]
        if not run.resumed:
            raise Crash

    Worker(home.session())(body)
    assert Worker(home.session())(body).made == []


# -- doubt -----------------------------------------------------------------------------------------


DOUBTED = call("c1", value=1, crash=True)


def in_doubt(home: Home, **options: Any) -> None:
    """A tool that was begun, and whose worker is gone."""

    def body(worker: Worker, run: holdfast.Run) -> None:
        run.tool(DOUBTED, worker.effect)

    Worker(home.session(), **options)(body)


def test_a_tool_in_doubt_is_asked_about(home: Home) -> None:
    in_doubt(home)
    session = home.session()
    [left] = session.pending()
    assert (left.key, left.name, left.state) == ("c1", "act", "in doubt")
    assert left.arguments == {"value": 1, "crash": True}
    assert home.store.pending() == [left]
    with pytest.raises(InDoubt) as raised, session.run() as run:
        run.tool(call("c1", value=1, crash=True), lambda **_: pytest.fail("was called"))
    assert raised.value.key == "c1"
    assert raised.value.idempotency_key == left.idempotency_key
    assert session.head is not None
    assert session.head.status == "halted"
    assert session.pending() == [left]


@pytest.mark.parametrize(
    ("how", "made", "result"),
    [({"result": 7}, [], 7), ({"action": "rerun"}, [1], 1), ({"action": "skip"}, [], None)],
)
def test_doubt_is_resolved_by_somebody(
    home: Home, how: dict[str, Any], made: list[int], result: Any
) -> None:
    in_doubt(home)
    home.another().session("s").resolve("c1", **how)
    assert home.session().pending() == []
    worker = Worker(home.session())
    with home.session().run() as run:
        assert run.resumed
        got = run.tool(call("c1", value=1, crash=True), lambda value, crash: worker.effect(value))
    assert (worker.made, got) == (made, result)


@pytest.mark.parametrize(("on_doubt", "made", "result"), [("rerun", [1], 1), ("skip", [], None)])
def test_doubt_is_resolved_by_the_code(
    home: Home, on_doubt: Any, made: list[int], result: Any
) -> None:
    in_doubt(home)
    worker = Worker(home.session())
    with home.session().run() as run:
        got = run.tool(
            call("c1", value=1, crash=True),
            lambda value, crash: worker.effect(value),
            on_doubt=on_doubt,
        )
    assert (worker.made, got) == (made, result)


@pytest.mark.parametrize("happened", [True, False])
def test_doubt_is_resolved_by_looking(home: Home, happened: bool) -> None:
    in_doubt(home)
    [left] = home.session().pending()
    asked: list[str] = []

    def verify(key: str) -> Done | None:
        asked.append(key)
        return Done(42) if happened else None

    worker = Worker(home.session())
    with home.session().run() as run:
        got = run.tool(
            call("c1", value=1, crash=True),
            lambda value, crash: worker.effect(value),
            verify=verify,
        )
    assert asked == [left.idempotency_key]
    assert (worker.made, got) == (([], 42) if happened else ([1], 1))


def test_idempotency_keys(home: Home) -> None:
    """The same for every attempt and worker; another one for another call, run or fork."""
    seen: list[str | None] = []

    def note(**_: Any) -> int:
        seen.append(holdfast.current_key())
        return len(seen)

    def body(worker: Worker, run: holdfast.Run) -> None:
        run.tool(call("c1"), note, on_doubt="rerun")
        run.tool(call("c2"), note, on_doubt="rerun")
        if len(seen) == 2:
            run.tool(call("c3"), lambda: worker.effect(note(), crash=True))
        run.tool(call("c3"), note, on_doubt="rerun")

    Worker(home.session())(body)
    fork = home.session().fork("other")
    Worker(home.session())(body)
    assert len(seen) == 4
    assert seen[2] == seen[3]
    with fork.run() as run:
        assert not run.resumed
        run.tool(call("c1"), note)
    assert len({*seen}) == 4
    assert holdfast.current_key() is None


def test_what_cannot_be_called_is_not_in_doubt(home: Home) -> None:
    nothing: Any = None
    wrong_name: Any = 5
    for wrong in (
        lambda run: run.tool(call("c1"), nothing),
        lambda run: run.step("model", nothing),
        lambda run: run.step("model", lambda: 1, key=wrong_name),
        lambda run: run.step("model", lambda: 1, key=""),
        lambda run: run.wait_for(wrong_name),
    ):
        with pytest.raises(InvalidRequest), home.session().run() as run:
            wrong(run)
    assert home.session().pending() == []
    assert home.session().calls() == []
    with home.session().run() as run:
        odd = holdfast.ToolCall("c1", "act", {1: 2})
        assert run.tool(odd, lambda arguments: arguments) == {1: 2}
    with pytest.raises(InvalidRequest):
        home.session().run(name=wrong_name)


def test_what_cannot_be_stored_is_named_by_what_it_was_given_as(home: Home) -> None:
    odd = {"deep": [1, object()]}
    session = home.session()
    with pytest.raises(NotSerializable, match=r"^prompt\.deep\[1\]"), session.run() as run:
        run.wait_for("go", prompt=odd)
    with pytest.raises(NotSerializable, match=r"^chunk\.deep\[1\]"), session.run() as run:
        run.step("talk", lambda: speak(run, odd))
    with session.run() as run:
        run.wait_for("go")
    with pytest.raises(NotSerializable, match=r"^answer\.deep\[1\]"):
        session.answer("go", odd)
    assert [p.state for p in session.pending()] == ["waiting"]
    in_doubt(home)
    with pytest.raises(NotSerializable, match=r"^result\.deep\[1\]"):
        session.resolve("c1", odd)
    assert [p.state for p in session.pending()] == ["waiting", "in doubt"]


def test_a_run_tells_what_is_pending(home: Home) -> None:
    """It knows what it calls itself, and what another has left."""
    in_doubt(home)
    with home.session().run() as run:
        assert [(p.key, p.state) for p in run.pending] == [("c1", "in doubt")]
        seen = home.another().session("s").pending()
        assert [(p.key, p.state) for p in seen] == [("c1", "in doubt")]
        told = run.step("look", lambda: [(p.key, p.state) for p in run.pending])
        assert told == [("c1", "in doubt"), ("look#1", "running")]
        with pytest.raises(BaseException, match="waiting"):
            run.wait_for("go")
        assert [(p.key, p.state) for p in run.pending] == [("c1", "in doubt"), ("go", "waiting")]
        home.another().session("s").answer("go", True)
        assert [p.key for p in run.pending] == ["c1"]


def test_the_run_of_a_name(home: Home) -> None:
    with home.session().run(name="hourly") as run:
        run.halt("later")
    with (
        pytest.raises(NotFound, match="'nightly'") as raised,
        home.session().run(name="nightly", resume=True),
    ):
        pass
    assert raised.value.hint == "there is 'hourly'"
    with home.session().run(name="hourly", resume=True) as run:
        assert run.resumed


def test_unknown_keys_and_answers(home: Home) -> None:
    in_doubt(home)
    session = home.session()
    with pytest.raises(NotFound, match="c1"):
        session.resolve("c2", action="skip")
    with pytest.raises(NotFound):
        session.answer("approval", True)
    mistakes: list[Any] = [{}, {"action": "nothing"}, {"result": 1, "action": "skip"}]
    for wrong in mistakes:
        with pytest.raises(InvalidRequest):
            session.resolve("c1", **wrong)
    with pytest.raises(NotFound):
        home.session("nobody").pending()
    assert len(session.pending()) == 1


# -- changed code ----------------------------------------------------------------------------------


def test_code_that_has_changed(home: Home) -> None:
    def before(worker: Worker, run: holdfast.Run) -> None:
        run.step("kept", worker.effect, 1)
        run.step("removed", worker.effect, 2)
        run.step("changed", worker.effect, 3)
        raise Crash

    def after(worker: Worker, run: holdfast.Run) -> None:
        assert run.step("added", worker.effect, 0) == 0
        assert run.step("kept", worker.effect, 1) == 1
        with pytest.raises(StepChanged):
            run.step("changed", worker.effect, 33, key="changed#1")
        assert run.step("changed", worker.effect, 33, key="changed#1", on_change="reuse") == 3
        assert run.step("changed", worker.effect, 33, key="changed#1", on_change="rerun") == 33

    Worker(home.session())(before)
    second = Worker(home.session())(after)
    assert second.made == [0, 33]
    assert second.run is not None
    assert second.run.removed == ("removed#1",)


@pytest.mark.parametrize("turn", [1, 2])
def test_what_was_removed_before_the_loop_is_told(home: Home, turn: int) -> None:
    def body(worker: Worker, run: holdfast.Run) -> None:
        run.step("same", worker.effect, "before")
        if not run.resumed:
            run.step("plan", worker.effect, "plan")
        for _ in run.turns(limit=2):
            if not run.resumed:
                run.step("same", worker.effect, run.turn)
                if run.turn == turn:
                    raise Crash

    Worker(home.session())(body)
    second = Worker(home.session())(body)
    assert second.run is not None
    assert second.run.removed == ("plan#1", "same#1")


def test_a_loop_that_is_not_entered_any_more(home: Home) -> None:
    def before(worker: Worker, run: holdfast.Run) -> None:
        for turn in run.turns():
            run.state["turn"] = turn
            if turn == 3:
                raise Crash

    Worker(home.session())(before)
    with pytest.raises(StepChanged, match="turn 3"), home.session().run():
        pass
    assert home.session().load() == {"turn": 2}


# -- failures --------------------------------------------------------------------------------------


def unreadable() -> Exception:
    try:
        Path("no such folder", "file").unlink()
    except OSError as e:
        return e  # its file is named by a Path, which a journal cannot hold
    raise AssertionError


class Odd(ValueError):
    """No builtin exception, though a subclass of one."""


BUILTINS = [
    ValueError("no such flight"), ZeroDivisionError(), KeyError("x"), KeyError(1, (2, [3])),
    TimeoutError(), OSError("odd"), PermissionError(13, "no", "a file", None, "another"),
    ConnectionResetError(104, "gone"), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "wrong"),
    StopIteration(5), ImportError("no module"), AssertionError(), RecursionError("too deep"),
    unreadable(),
]  # fmt: skip


def failing(error: BaseException) -> Any:
    raise error


def raised_again(home: Home, error: Exception, **options: Any) -> tuple[Exception, Exception]:
    """What the code catches, the first time and after a crash."""
    caught: list[Exception] = []

    def body(worker: Worker, run: holdfast.Run) -> None:
        try:
            run.step("bad", lambda: failing(error), **options)
        except Exception as e:
            caught.append(e)
        if not run.resumed:
            raise Crash

    Worker(home.session())(body)
    Worker(home.session())(body)
    first, second = caught
    assert first is error
    assert [c.success for c in home.session().calls()] == [False]
    return first, second


@pytest.mark.parametrize("home", ["memory", "sqlite"], indirect=True)
@pytest.mark.parametrize("error", BUILTINS, ids=repr)
def test_a_builtin_exception_comes_back_as_itself(home: Home, error: Exception) -> None:
    first, second = raised_again(home, error)
    assert type(second) is type(first)
    assert (str(second), getattr(second, "errno", 0)) == (str(first), getattr(first, "errno", 0))
    assert isinstance(second.__cause__, StepFailed)
    assert second.__cause__.message == str(first)


@pytest.mark.parametrize("error", [Odd("odd"), holdfast.NotFound("none"), UnicodeError], ids=repr)
def test_another_exception_comes_back_as_step_failed(home: Home, error: Any) -> None:
    if isinstance(error, type):  # a class of somebody else that has the name of a builtin one
        error = type(error.__name__, (Exception,), {})("none")
    first, second = raised_again(home, error)
    assert type(second) is StepFailed
    assert (second.message, second.__cause__) == (first.args[0], None)


class NoSeats(Exception):
    """An error whose `__init__` takes other arguments than the exception has."""

    def __init__(self, flight: str, *, left: Any) -> None:
        super().__init__(f"no seats on {flight}")
        self.flight, self.left = flight, left


class NoSeatsAtAll(NoSeats):
    pass


@pytest.mark.parametrize("home", ["memory", "sqlite"], indirect=True)
@pytest.mark.parametrize("errors", [NoSeats, (KeyError, NoSeats), Exception])
@pytest.mark.parametrize("kind", [NoSeats, NoSeatsAtAll])
def test_an_exception_of_a_named_class_comes_back_as_itself(
    home: Home, kind: type[NoSeats], errors: Any
) -> None:
    mine = object()
    _, second = raised_again(home, kind("LX1", left=[0, 1]), errors=errors)
    assert type(second) is kind
    assert (second.args, second.flight, second.left) == (("no seats on LX1",), "LX1", [0, 1])
    assert isinstance(second.__cause__, StepFailed)
    assert second.__cause__.message == str(second) == "no seats on LX1"
    third = kind("LX1", left=mine)
    runs_run.mark_failure(third, b"", 1)  # as the step within another one does
    held = runs_run.error_to_facts(third, errors)
    assert held["attributes"] == {"flight": "LX1", "left": str(mine)}


@pytest.mark.parametrize("home", ["memory"], indirect=True)
def test_a_class_that_is_not_named_any_more(home: Home) -> None:
    """Not even a class that has the name of a builtin one becomes that one."""
    for name in ("NoSeats", "UnicodeError"):
        kind: Any = type(name, (Exception,), {})
        facts = runs_run.error_to_facts(kind("none"), kind)
        assert type(runs_run.error_from_facts(facts, kind)) is kind
        for errors in ((), (KeyError,)):
            assert type(runs_run.error_from_facts(facts, errors)) is StepFailed
    group = ExceptionGroup("all", [NoSeats("LX1", left=0), Odd("odd")])
    again = raised_again(home, group, errors=NoSeats)[1]
    assert isinstance(again, ExceptionGroup)
    assert [type(each).__name__ for each in again.exceptions] == ["NoSeats", "StepFailed"]


@pytest.mark.parametrize(
    "errors", [3, "NoSeats", (KeyError, "x"), BaseException, NoSeats("", left=0)]
)
def test_bad_classes_of_errors(memory: Home, errors: Any) -> None:
    with memory.session().run() as run, pytest.raises(InvalidRequest):
        run.step("bad", lambda: 1, errors=errors)
    assert memory.session().calls() == []


@pytest.mark.parametrize("home", ["memory"], indirect=True)
def test_an_exception_that_cannot_be_made_again(home: Home) -> None:
    error = UnicodeDecodeError("utf-8", b"", 0, 1, "wrong")
    error.args = ("odd",)
    assert type(raised_again(home, error)[1]) is StepFailed
    newer = {"type": "NewerError", "error": "odd", "args": ["odd"]}
    assert type(runs_run.error_from_facts(newer)) is StepFailed


@pytest.mark.parametrize("home", ["memory"], indirect=True)
def test_a_group_of_exceptions_comes_back(home: Home) -> None:
    inner = ExceptionGroup("inner", [KeyError("x"), Odd("odd")])
    _, second = raised_again(home, ExceptionGroup("outer", [inner, OSError(2, "no")]))
    assert isinstance(second, ExceptionGroup)
    again, missing = second.exceptions
    assert isinstance(again, ExceptionGroup)
    assert (second.message, again.message, missing.args) == ("outer", "inner", (2, "no"))
    assert [type(each) for each in again.exceptions] == [KeyError, StepFailed]


def test_an_exception_comes_back_in_asyncio(home: Home) -> None:
    async def body(session: holdfast.AsyncSession) -> None:
        async with session.run() as run:
            with pytest.raises(ValueError, match="no such flight"):
                await run.step("bad", lambda: failing(ValueError("no such flight")))
            with pytest.raises(NoSeats) as caught:
                await run.step("worse", lambda: failing(NoSeats("LX1", left=0)), errors=NoSeats)
            assert caught.value.flight == "LX1"
            assert isinstance(caught.value.__cause__, StepFailed if run.resumed else NoneType)
            await run.wait_for("approval")

    async def both() -> None:
        session = await AsyncStore(home.store, Workers(2)).session("s")
        await body(session)
        await body(session)
        assert [call.success for call in await session.calls()] == [False, False, None]

    asyncio.run(both())


def test_a_builtin_exception_that_ends_the_run_after_all(home: Home) -> None:
    """It is tried again, also if it was caught at first and came back as itself."""

    def body(worker: Worker, run: holdfast.Run) -> None:
        with suppress(*() if run.resumed else (ZeroDivisionError,)):
            run.step("bad", lambda: worker.effect(1) / 0)
        raise Crash

    assert Worker(home.session())(body).made == [1]
    for expected in ([], [1]):
        worker = Worker(home.session())
        with pytest.raises(ZeroDivisionError):
            worker(body)
        assert worker.made == expected


def test_a_failure_that_ends_the_run_is_tried_again(home: Home) -> None:
    session, tries = home.session(), []

    def flaky() -> str:
        tries.append(1)
        if tries.count(1) == 1:
            raise OSError("no connection")
        return "fine"

    with pytest.raises(OSError, match="no connection"), session.run() as run:
        run.step("before", lambda: tries.append(0))
        run.step("call", flaky)
    assert session.head is not None
    assert (session.head.status, session.head.reason) == ("failed", "OSError: no connection")
    assert home.store.abandoned() == []
    assert [a.state for a in home.store.abandoned(halted=True)] == ["failed"]
    with session.run() as run:
        assert run.resumed
        run.step("before", lambda: tries.append(0))
        assert run.step("call", flaky) == "fine"
    assert tries == [0, 1, 1]


def test_a_failure_that_was_dealt_with_is_not_tried_again(home: Home) -> None:
    """Whatever ends the run later: errors come and go at the same address."""

    def body(worker: Worker, run: holdfast.Run) -> None:
        for n in range(20):
            with suppress(ValueError):
                run.step("bad", lambda n: int(f"{worker.effect(n)}!"), n)
        raise ValueError("something else")

    made = []
    for _ in range(3):
        worker = Worker(home.session())
        with pytest.raises(ValueError, match="something else"):
            worker(body)
        made.append(len(worker.made))
    assert made == [20, 0, 0]


def test_failures_that_end_the_run_together_are_tried_again(home: Home) -> None:
    tries: list[int] = []

    def flaky(n: int) -> int:
        tries.append(n)
        if tries.count(n) == 1:
            raise OSError(f"{n} has no connection")
        return n

    def body(run: holdfast.Run) -> None:
        errors = []
        for n in (1, 2):
            try:
                run.step("call", flaky, n)
            except OSError as e:
                errors.append(e)
        if errors:
            raise ExceptionGroup("both", errors) from None

    with pytest.raises(ExceptionGroup), home.session().run() as run:
        body(run)
    with home.session().run() as run:
        body(run)
    assert tries == [1, 2, 1, 2]


def test_a_recorded_failure_that_ends_the_run_is_tried_again(home: Home) -> None:
    """The code expects the error itself; without another try it would never come further."""

    def body(worker: Worker, run: holdfast.Run) -> None:
        with suppress(Odd):
            run.step("bad", lambda: failing(Odd(worker.effect(1))))
        if not run.resumed:
            raise Crash

    assert Worker(home.session())(body).made == [1]
    second = Worker(home.session())
    with pytest.raises(StepFailed):
        second(body)
    assert second.made == []
    assert Worker(home.session())(body).made == [1]
    head = home.session().head
    assert head is not None
    assert head.status == "completed"


@pytest.mark.parametrize("home", ["memory"], indirect=True)
def test_an_error_that_is_its_own_cause(home: Home) -> None:
    error = KeyError("odd")
    with pytest.raises(KeyError), home.session().run() as run:
        run.step("fine", lambda: 1)
        raise error from error


def test_retries(home: Home) -> None:
    tries = []

    def flaky() -> int:
        tries.append(holdfast.current_key())
        if len(tries) < 3:
            raise OSError("no connection")
        return 7

    def broken() -> float:
        tries.append("x")
        return 1 / 0

    with home.session().run() as run:
        assert run.step("call", flaky, retries=Retries(5, on=OSError, wait=0.001)) == 7
        with pytest.raises(ZeroDivisionError):
            run.step("other", broken, retries=Retries(3, on=OSError))
    assert len({*tries[:3]}) == 1
    assert tries[3:] == ["x"]


def test_halting(home: Home) -> None:
    session = home.session()
    with session.run() as run:
        run.state["n"] = run.step("one", lambda: 1)
        run.halt("enough for today")
    assert session.head is not None
    assert (session.head.status, session.head.reason) == ("halted", "enough for today")
    with session.run() as run:
        assert run.resumed
        run.state["n"] = run.step("one", lambda: pytest.fail("was called"))
    assert session.load() == {"n": 1}


def test_ctrl_c_halts(home: Home) -> None:
    session = home.session()
    with pytest.raises(KeyboardInterrupt), session.run() as run:
        run.state["n"] = 1
        raise KeyboardInterrupt
    assert session.head is not None
    assert (session.head.status, session.head.reason) == ("halted", "KeyboardInterrupt")


def test_sigterm_halts_where_it_is_asked_for(home: Home) -> None:
    session = home.session()
    with session.run(sigterm=True) as run:
        run.state["n"] = 1
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("went on")
    assert session.head is not None
    assert (session.head.status, session.head.reason) == ("halted", "SIGTERM")
    assert [run.state for run in home.store.abandoned(halted=True)] == ["stopped"]
    assert home.store.resume_all(lambda run: None) == [session.name]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    told = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(1))
    try:
        with session.run(sigterm=True):
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert told == [1]


# -- who may write ---------------------------------------------------------------------------------


def test_one_worker_at_a_time(home: Home) -> None:
    session = home.session()
    other = home.another()
    with session.run(state={"n": 0}) as run:
        with pytest.raises(SessionBusy, match=str(os.getpid())), other.session("s").run():
            pass
        for write in (
            lambda s: s.save({}),
            lambda s: s.append("log", 1),
            lambda s: s.patch(set={"n": 5}),
            lambda s: s.rewind("@"),
            lambda s: s.undo(),
            lambda s: s.delete(),
        ):
            with pytest.raises(SessionBusy):
                write(other.session("s"))
        other.session("s").tag("@", "seen")
        other.session("s").label("@", "begin")
        other.session("s").fork("t").save({"n": 9})
        run.state["n"] = run.step("go on", lambda: 1)
        run.checkpoint()
        run.state["n"] = 2
    assert session.load() == {"n": 2}
    other.session("s").save({"n": 3})
    with other.session("s").run() as run:
        assert not run.resumed


def test_a_fenced_worker_writes_nothing(home: Home) -> None:
    session = home.session()
    late = session.run(state={"n": 0})
    with pytest.raises(Fenced), late:
        late.state["n"] = 1
        late.checkpoint()
        with home.another().session("s").run(takeover=True) as run:
            assert run.resumed
            assert run.state == {"n": 0}
            for write in (
                late.checkpoint,
                lambda: late.step("zombie", lambda: 1),
                lambda: late.tool(call("zombie"), lambda: 1),
                lambda: late.wait_for("zombie"),
            ):
                with pytest.raises(Fenced):
                    write()
            run.state["n"] = run.step("living", lambda: 5)
        late.step("zombie", lambda: 1)
    assert session.load() == {"n": 5}
    assert [c.name for c in session.tool_calls()] == []
    assert session.pending() == []


def test_a_heartbeat_notices_that_the_lease_is_gone(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "INTERVAL", 0.02)
    noticed = threading.Event()
    late = home.session().run()
    with pytest.raises(Fenced), late:

        def lose() -> None:
            late._core._lose()
            noticed.set()

        opened = late._core._opened
        assert opened is not None
        backend = opened.target.repository.backend
        heartbeat.heartbeat_of(backend).begin(opened.token, backend, opened.session, lose)
        with home.another().session("s").run(takeover=True):
            pass
        assert noticed.wait(30)
        late.step("zombie", lambda: pytest.fail("was called"))


def test_a_heartbeat_ends_with_its_store(
    home: Home, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(heartbeat, "INTERVAL", 0.02)
    home.session().run().__enter__()
    backend = home.store._repository.backend
    thread = heartbeat.heartbeat_of(backend)._thread
    assert thread is not None
    home.store.close()
    thread.join(30)
    assert not thread.is_alive()
    assert not [r for r in caplog.records if r.name == "holdfast"]


def test_leases_end_by_themselves(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a worker on another machine nobody knows more than that it is silent."""
    real = leases.Owner.this()
    monkeypatch.setattr(leases.Owner, "this", lambda: real._replace(host="far", boot="another"))
    run = home.session().run(state={"n": 1})
    run.__enter__()
    crashed(run)
    monkeypatch.undo()
    with pytest.raises(SessionBusy, match="far"), home.session().run():
        pass
    assert home.store.abandoned() == []
    monkeypatch.setattr(leases, "TTL", 0.0)
    assert len(home.store.abandoned()) == 1
    with home.session().run() as run:
        assert run.resumed


def test_a_dead_worker_of_this_machine_is_not_waited_for(home: Home) -> None:
    gone = leases.Owner.this()._replace(started="1")
    assert gone.is_gone(b"any")
    assert not gone._replace(space="pid:[1]").is_gone(b"any")  # another container's numbers
    assert not gone._replace(boot="another").is_gone(b"any")
    here = leases.Owner.this()
    token = leases.new_token()
    assert not here.is_gone(token)
    leases.forget(token)
    assert here.is_gone(token)


def test_what_moves_the_head_closes_a_run_that_is_not_active(home: Home) -> None:
    in_doubt(home, state={"n": 1})
    session = home.session()
    session.save({"n": 2})
    assert home.store.abandoned(halted=True) == []
    with session.run() as run:
        assert not run.resumed
        run.halt("later")
    session.refresh()
    session.rewind("@~1")
    with session.run() as run:
        assert not run.resumed
    [left] = session.pending()  # what was in doubt stays listed
    assert left.key == "c1"
    with home.session("u").run(state={"n": 1}) as run:
        run.state["n"] = 2
        run.checkpoint()
        run.halt("later")
    other = home.session("u")
    other.rewind("@~1")
    with other.run() as run:
        assert not run.resumed


def test_resume_all(home: Home) -> None:
    for n in range(5):

        def body(worker: Worker, run: holdfast.Run) -> None:
            run.step("one", worker.effect, 1)
            raise Crash

        Worker(home.session(f"s{n}"))(body)
    home.session("done").run().__enter__().__exit__(None, None, None)
    seen = []

    def go_on(run: holdfast.Run) -> None:
        seen.append(run.session.name)
        if run.session.name == "s2":
            raise OSError("again")
        run.state["n"] = run.step("one", lambda _: pytest.fail("was called"), 1)

    assert home.store.resume_all(go_on) == [f"s{n}" for n in range(5)] == sorted(seen)
    assert home.store.abandoned() == []
    assert home.session("s1").load() == {"n": 1}
    assert [h.session for h in home.store.abandoned(halted=True)] == ["s2"]
    with pytest.raises(InvalidRequest), home.session("s1").run(resume=True):
        pass
    with pytest.raises(InvalidRequest), home.session("new").run(resume=True):
        pass


# -- waiting for people ----------------------------------------------------------------------------


def test_waiting_for_an_answer(home: Home) -> None:
    def body(worker: Worker, run: holdfast.Run) -> None:
        price = run.step("price", worker.effect, 100)
        if run.wait_for("approval", prompt=f"{price} is fine?"):
            run.state["bought"] = run.step("buy", worker.effect, price)

    session = home.session()
    assert Worker(session)(body).made == [100]
    assert session.head is not None
    assert (session.head.status, session.head.reason) == ("halted", "waiting for 'approval'")
    [asked] = home.another().pending()
    assert (asked.state, asked.key, asked.arguments) == ("waiting", "approval", "100 is fine?")
    assert Worker(home.session())(body).made == []  # nobody has answered yet
    assert len(home.session().pending()) == 1
    with pytest.raises(NotFound, match="approval"):
        home.another().session("s").answer("aproval", True)
    home.another().session("s").answer("approval", True)
    assert home.session().pending() == []
    assert Worker(home.session())(body).made == [100]
    assert home.session().load() == {"bought": 100}


def test_an_answer_is_for_the_newest_that_waits_for_it(home: Home) -> None:
    """An older run that was given up has left its question open."""
    for _ in range(2):
        with home.session().run(resume=False) as run:
            run.wait_for("approval")
    older, newer = home.session().pending()
    assert (older.key, newer.key) == (older.idempotency_key, "approval")
    home.session().answer("approval", True)
    assert home.session().pending() == [older]
    with home.session().run() as run:
        assert run.wait_for("approval") is True
    with pytest.raises(AlreadyDecided):
        home.session().answer("approval", False)
    home.session().answer(older.key, False)
    assert home.session().pending() == []


def test_an_answer_while_the_run_is_active(home: Home) -> None:
    with home.session().run() as run:
        with pytest.raises(BaseException, match="waiting"):
            run.wait_for("go")
        home.another().session("s").answer("go", [1])
        assert run.wait_for("go") == [1]
        assert run.step("next", lambda: 1) == 1


def shop(worker: Worker, run: holdfast.Run) -> None:
    for what in ("pen", "yacht"):
        if run.wait_for("approval", prompt=f"Buy the {what}?"):
            run.step("buy", worker.effect, what)


def test_an_answer_is_for_one_question(home: Home) -> None:
    """Whoever approves the pen has not approved the yacht."""
    session = home.session()
    assert Worker(session)(shop).made == []
    session.answer("approval", True)
    assert Worker(home.session())(shop).made == ["pen"]
    [asked] = home.another().pending()
    assert (asked.key, asked.name, asked.arguments) == ("approval#2", "approval", "Buy the yacht?")
    with pytest.raises(AlreadyDecided, match="'approval' is answered already: True stands") as told:
        session.answer("approval", False)
    assert (told.value.key, told.value.outcome, told.value.result) == ("approval", "done", True)
    assert Worker(home.session())(shop).made == []
    session.answer(asked.key, False)
    assert Worker(home.session())(shop).made == []
    assert [call.result for call in session.calls() if call.kind == "wait"] == [True, False]
    head = home.session().head
    assert head is not None
    assert head.status == "completed"


def test_questions_of_turns_have_keys_of_their_own(home: Home) -> None:
    """A late answer for one turn is not taken for the question of the next."""

    def body(worker: Worker, run: holdfast.Run) -> None:
        for turn in run.turns(limit=2):
            run.state[f"turn {turn}"] = run.wait_for("approval")

    session, keys = home.session(), []
    for answer in (True, False):
        Worker(home.session())(body)
        [asked] = session.pending()
        keys.append(asked.key)
        session.answer("approval", answer)  # the only question of this name
        with pytest.raises(AlreadyDecided):
            session.answer("approval", not answer)
    assert keys == ["approval@1", "approval@2"]
    Worker(home.session())(body)
    assert session.load() == {"turn 1": True, "turn 2": False}
    with pytest.raises(AlreadyDecided) as told:
        session.answer("approval@1", False)
    assert told.value.result is True


def test_a_name_that_several_open_questions_have(home: Home) -> None:
    session = home.session()
    with session.run() as run:
        for _ in run.turns():
            for what in ("pen", "yacht"):  # as two threads or tasks do
                with pytest.raises(BaseException, match="waiting"):
                    run.wait_for("approval", what)
            assert [(p.key, p.arguments) for p in run.pending] == [
                ("approval@1", "pen"),
                ("approval@1#2", "yacht"),
            ]
            run.halt("both were asked")
    with pytest.raises(InvalidRequest, match="'approval' names 2") as raised:
        session.answer("approval", True)
    assert raised.value.hint == "say which: approval@1, approval@1#2"
    session.answer("approval@1#2", "second")
    session.answer("approval", "first")
    with home.session().run() as run:
        for _ in run.turns():
            assert [run.wait_for("approval", what) for what in ("pen", "yacht")] == [
                "first",
                "second",
            ]
            break


def test_a_question_with_another_prompt(home: Home) -> None:
    """An answer is for the prompt that somebody has read."""
    session = home.session()
    with session.run() as run:
        run.wait_for("approval", {"sum": 5})
    for _ in range(2):
        with (
            pytest.raises(StepChanged, match="'approval' was") as told,
            home.session().run() as run,
        ):
            run.wait_for("approval", {"sum": 500})
        assert "under another name" in str(told.value.hint)
        with suppress(AlreadyDecided):
            session.answer("approval", True)
    with home.session().run() as run:
        assert run.wait_for("approval", {"sum": 5}) is True


def test_what_was_answered_may_be_changed_in_place(home: Home) -> None:
    session = home.session()
    with session.run() as run:
        run.wait_for("who", "now")
    session.answer("who", ["Ann"])
    with home.session().run() as run:
        run.wait_for("who", "now").append("Bob")
        assert run._core._journal.calls.all[run.id, 0, "wait:who"].result == ["Ann"]


# -- races of answers ------------------------------------------------------------------------------


Say = Callable[[Any], Any]
"""Calls a method of a session, which may be an AsyncSession."""


def in_threads(home: Home, people: list[Say]) -> list[Any]:
    def tell(say: Say) -> Any:
        with suppress_decided() as told:
            told.append(say(home.another().session("s")))
        return told[0]

    with ThreadPoolExecutor(len(people)) as pool:
        return [*pool.map(tell, people)]


def in_tasks(home: Home, people: list[Say]) -> list[Any]:
    async def tell(say: Say) -> Any:
        workers = Workers(1)
        session = await AsyncStore(home.another(), workers).session("s")
        with suppress_decided() as told:
            told.append(await say(session))
        await workers.close(lambda: None)
        return told[0]

    async def tell_all() -> list[Any]:
        return await asyncio.gather(*map(tell, people))

    return asyncio.run(tell_all())


@contextmanager
def suppress_decided() -> Iterator[list[Any]]:
    told: list[Any] = []
    try:
        yield told
    except AlreadyDecided as e:
        told.append(e)


def told_at_once(home: Home, tell: Callable[[Home, list[Say]], list[Any]], *people: Say) -> Any:
    """What each of several people is told. All of them read before any of them writes."""
    ready, late = threading.Barrier(len(people)), threading.local()
    offer = Journal.offer

    def offer_together(self: Journal, *args: Any) -> None:
        if not hasattr(late, "met"):
            late.met = True
            ready.wait(60)
        offer(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "offer", offer_together)
        return tell(home, [*people])


in_both = pytest.mark.parametrize("tell", [in_threads, in_tasks])


@in_both
def test_racing_answers(home: Home, tell: Any) -> None:
    """Exactly one is accepted, and the others are told which."""
    with home.session().run() as run:
        run.wait_for("who")
    found = told_at_once(home, tell, *[methodcaller("answer", "who", n) for n in range(4)])
    assert found.count(None) == 1
    stands = found.index(None)
    assert [e.result for e in found if e is not None] == [stands] * 3
    with home.session().run() as run:
        assert run.wait_for("who") == stands


@in_both
def test_racing_resolutions(home: Home, tell: Any) -> None:
    in_doubt(home)
    verdicts: list[Any] = [{"result": 1}, {"result": 2}, {"action": "skip"}, {"action": "rerun"}]
    people = [methodcaller("resolve", "c1", **verdict) for verdict in verdicts]
    found = told_at_once(home, tell, *people)
    assert found.count(None) == 1
    stands = found.index(None)
    outcome = ["done", "done", "skipped", "rerun"][stands]
    assert {e.outcome for e in found if e is not None} == {outcome}
    made: list[int] = []
    with home.session().run() as run:
        result = run.tool(DOUBTED, lambda **_: made.append(1))
    assert (result, made) == [(1, []), (2, []), (None, []), (None, [1])][stands]


@in_both
def test_racing_approvals(home: Home, tell: Any) -> None:
    """The run buys if "yes" was accepted and only then, whoever answers after a crash."""

    def buy(worker: Worker, run: holdfast.Run, crash: bool = False) -> None:
        approved = run.wait_for("approval", "Buy the yacht?")
        if approved:
            run.step("buy", worker.effect, "yacht")
        if crash:
            raise Crash
        run.state["bought"] = approved

    Worker(home.session())(buy)
    people: list[Say] = [methodcaller("answer", "approval", yes) for yes in (False, True)]
    found = told_at_once(home, tell, *people)
    assert found.count(None) == 1
    approved = found.index(None)
    first = Worker(home.session())(partial(buy, crash=True))
    for other in in_threads(home, people):
        assert other.result == approved
    second = Worker(home.session())(buy)
    assert first.made + second.made == ["yacht"] * approved
    assert home.session().load() == {"bought": approved}


def test_an_answer_is_for_the_question_that_was_open(home: Home) -> None:
    """While it is on its way, another answers, and the run asks the next one of the name."""

    def body(worker: Worker, run: holdfast.Run) -> None:
        for turn in run.turns(limit=2):
            run.state[f"turn {turn}"] = run.wait_for("approval")

    Worker(home.session())(body)
    offer = Journal.offer

    def overtaken(self: Journal, *args: Any) -> None:
        with pytest.MonkeyPatch.context() as original:
            original.setattr(Journal, "offer", offer)
            if not overtakers:
                overtakers.append(1)
                home.another().session("s").answer("approval", "first")
                Worker(home.session())(body)
            offer(self, *args)

    overtakers: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "offer", overtaken)
        with pytest.raises(AlreadyDecided) as told:
            home.another().session("s").answer("approval", "second")
    assert (told.value.key, told.value.result) == ("approval@1", "first")
    assert [p.key for p in home.session().pending()] == ["approval@2"]


def test_a_resolution_that_a_worker_overtakes(home: Home) -> None:
    """A worker that takes the session meanwhile has read the journal, and calls it again."""
    in_doubt(home)
    workers: list[holdfast.Run] = []
    offer = Journal.offer

    def overtaken(self: Journal, *args: Any) -> None:
        if not workers:
            workers.append(home.session().run())
            workers[0].__enter__()
        offer(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "offer", overtaken)
        with pytest.raises(SessionBusy):
            home.another().session("s").resolve("c1", action="skip")
    made: list[int] = []
    workers[0].tool(DOUBTED, lambda **_: made.append(1), on_doubt="rerun")
    workers[0].__exit__(None, None, None)
    assert made == [1]


@pytest.mark.parametrize("how", [{"action": "rerun"}, {"action": "skip"}, {"result": "not paid"}])
@pytest.mark.parametrize("doubted", [True, False])
def test_a_resolution_is_for_the_attempt_that_was_listed(
    home: Home, how: dict[str, Any], doubted: bool
) -> None:
    """Two people look at one doubt. One has the call made again, and the other comes too late."""
    in_doubt(home)
    [left] = home.session().pending()
    home.another().session("s").resolve(left, action="rerun")
    if doubted:
        in_doubt(home)
    else:
        Worker(home.session())(lambda _, run: print(run.tool(DOUBTED, lambda **_: "paid")))
    before = home.session().calls()
    with pytest.raises(AlreadyDecided) as told:
        home.another().session("s").resolve(left, **how)
    assert (told.value.key, told.value.outcome) == ("c1", "rerun")
    assert home.session().calls() == before


def test_a_resolution_of_an_attempt_that_was_begun_again(home: Home) -> None:
    in_doubt(home)
    [left] = home.session().pending()
    Worker(home.session())(lambda worker, run: run.tool(DOUBTED, worker.effect, on_doubt="rerun"))
    with pytest.raises(Conflict, match="'c1' was begun again"):
        home.session().resolve(left, action="skip")
    [again] = home.session().pending()
    home.session().resolve(again, action="skip")
    assert home.session().pending() == []


def test_an_answer_is_for_the_question_that_was_listed(home: Home) -> None:
    """A newer run has a question of the same key."""
    with home.session().run() as run:
        run.wait_for("approval")
    [old] = home.session().pending()
    with home.session().run(resume=False) as run:
        run.wait_for("approval")
    home.session().answer(old, "old")
    [new] = home.session().pending()
    assert new.run != old.run
    with pytest.raises(AlreadyDecided):
        home.session().answer(old, "other")
    with pytest.raises(NotFound):
        home.session().resolve(new, action="skip")


def test_an_answer_for_a_session_that_goes_away(home: Home) -> None:
    with home.session().run() as run:
        run.wait_for("who")
    offer = Journal.offer

    def deleted(self: Journal, *args: Any) -> None:
        patch.setattr(Journal, "offer", offer)
        home.session().delete()
        home.store.gc()
        offer(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "offer", deleted)
        with pytest.raises(NotFound):
            home.another().session("s").answer("who", 1)


RACES = [test_racing_answers, test_racing_resolutions, test_racing_approvals]


@pytest.mark.parametrize("home", ["memory", "sqlite"], indirect=True)
@in_both
@pytest.mark.parametrize("race", RACES)
def test_mutant_that_answers_blindly(
    monkeypatch: pytest.MonkeyPatch, home: Home, race: Callable[[Home, Any], None], tell: Any
) -> None:
    runs.answers_blindly(monkeypatch)
    with pytest.raises(AssertionError):
        race(home, tell)


@pytest.mark.parametrize("home", ["memory", "sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (runs.answers_blindly, test_an_answer_is_for_the_question_that_was_open),
        (runs.answers_all_of_a_name, test_an_answer_is_for_one_question),
    ],
)
def test_mutant_that_answers_another_question(
    monkeypatch: pytest.MonkeyPatch, home: Home, mutant: Any, test: Callable[[Home], None]
) -> None:
    mutant(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test(home)


# -- how a run was left ----------------------------------------------------------------------------


def leave_all(store: holdfast.Store) -> dict[str, tuple[str, str | None]]:
    """One session for each way to leave a run: its state and its reason."""

    def run(worker: Worker, run: holdfast.Run) -> None:
        how = run.session.name
        if how == "died":
            raise Crash
        if how == "failed":
            with suppress(Halt):
                run.wait_for("approval")  # it asks as well, but it does not wait
            run.step("look", lambda: failing(ValueError("no such flight")))
        if how == "in doubt":
            with pytest.raises(asyncio.CancelledError):
                run.tool(call("c1"), lambda: failing(asyncio.CancelledError()))
        if how == "over budget":
            run.add_usage(cost=0.5)
            run.step("look", lambda: 1)
        run.wait_for("approval") if how == "waiting" else run.halt("enough for today")

    left: dict[str, tuple[str, str | None]] = {
        "died": ("died", None),
        "failed": ("failed", "ValueError: no such flight"),
        "halted": ("halted", "enough for today"),
        "in doubt": ("in doubt", "enough for today"),
        "waiting": ("waiting", "waiting for 'approval'"),
        "over budget": ("over budget", "over budget: $0.5 of $0.25 spent"),
    }
    for name in left:
        with suppress(ValueError):
            Worker(store.session(name), budget=holdfast.Budget(cost=0.25))(run)
    return left


def test_six_ways_to_leave_a_run(home: Home) -> None:
    left = leave_all(home.store)
    found = home.another().abandoned(halted=True)
    assert {each.session: (each.state, each.reason) for each in found} == left
    assert [each.session for each in home.store.abandoned()] == ["died"]

    async def ask() -> list[holdfast.Abandoned]:
        return await AsyncStore(home.store, Workers(1)).abandoned(halted=True)

    assert asyncio.run(ask()) == found


def test_a_run_whose_question_is_answered_waits_no_more(home: Home) -> None:
    leave_all(home.store)
    home.session("waiting").answer("approval", True)
    home.session("in doubt").resolve("c1", action="skip")
    found = {each.session: each.state for each in home.store.abandoned(halted=True)}
    assert (found["waiting"], found["in doubt"]) == ("ready", "halted")


def test_runs_that_are_ready(home: Home) -> None:
    """Those that halted at what is decided now. One that was answered and went on is not."""

    def agent(run: holdfast.Run) -> None:
        if run.session.name in ("asks", "asks twice"):
            run.wait_for("approval")
        if run.session.name in ("asks twice", "halts"):
            run.wait_for("approval")
        if run.session.name == "halts":
            run.halt("enough for today")
        run.tool(call("c1"), lambda: "done")

    def in_the_middle() -> None:
        raise Crash

    def ready(*names: str) -> None:
        assert [each.session for each in home.another().ready()] == [*names]

    for name in ("asks", "asks twice", "halts"):
        with home.session(name).run() as run:
            agent(run)
    ready()
    Worker(home.session("doubts"))(lambda _, run: run.tool(call("c1"), in_the_middle))
    with pytest.raises(InDoubt), home.session("doubts").run() as run:
        agent(run)
    ready()
    for name in ("asks", "asks twice", "halts"):
        home.session(name).answer("approval", value=True)
    ready("asks", "asks twice", "halts")
    home.session("doubts").resolve("c1", action="rerun")
    ready("asks", "asks twice", "halts", "doubts")
    assert home.store.resume_all(agent) == ["asks", "asks twice", "halts", "doubts"]
    ready()
    states = {each.session: each.state for each in home.store.abandoned(halted=True)}
    assert states == {"asks twice": "waiting", "halts": "halted"}
    home.session("asks twice").answer("approval#2", value=True)
    assert home.store.resume_all(agent, concurrency=1) == ["asks twice"]

    async def resume() -> list[str]:
        async def agent(run: holdfast.AsyncRun) -> None:
            assert await run.wait_for("approval")

        store = AsyncStore(home.store, Workers(2))
        session = await store.session("async")
        async with session.run() as run:
            await agent(run)
        await session.answer("approval", value=True)
        assert [each.session for each in await store.ready()] == ["async"]
        return await store.resume_all(agent)

    assert asyncio.run(resume()) == ["async"]


def test_a_call_that_has_ended_its_run_keeps_its_error(home: Home) -> None:
    leave_all(home.store)
    [_, made] = home.session("failed").calls()
    assert (made.name, made.success, made.error) == ("look", False, "ValueError: no such flight")
    assert made.duration is not None


# -- what can be looked at -------------------------------------------------------------------------


def test_tool_calls_are_told(home: Home) -> None:
    with home.session().run() as run:
        run.tool(call("c1", x=1), lambda x: x + 1)
        with pytest.raises(ZeroDivisionError):
            run.tool(
                {"id": "c2", "function": {"name": "bad", "arguments": '{"x": 0}'}}, lambda x: 1 / x
            )
        run.tool({"call_id": "c3", "name": "odd", "input": "{not json"}, lambda text: text)
        run.step("model", lambda: 1)
    kinds = [(c.kind, c.name) for c in home.session().calls()]
    assert kinds == [("tool", "act"), ("tool", "bad"), ("tool", "odd"), ("step", "model")]
    first, second, third = home.session().tool_calls()
    assert (first.id, first.name, first.arguments, first.result) == ("c1", "act", {"x": 1}, 2)
    assert first.success
    assert first.duration is not None
    assert 0 <= first.duration < 60
    assert (second.success, second.error) == (False, "ZeroDivisionError: division by zero")
    assert (third.arguments, third.result) == ("{not json", "{not json")
    with pytest.raises(InvalidRequest), home.session("t").run() as run:
        run.tool({"name": "no id"}, lambda: 1)


@pytest.mark.parametrize("arguments", ['{"city": "Lis', "{bad}", "[" * 100_000])
def test_arguments_that_are_no_json_call_nothing(home: Home, arguments: str) -> None:
    """Half an answer of a model must not book anything."""
    made: list[Any] = []
    wanted = {"id": "c1", "function": {"name": "book", "arguments": arguments}}
    with pytest.raises(InvalidRequest, match=r"c1.*no JSON"), home.session().run() as run:
        run.tool(wanted, made.append)
    assert not made
    assert not home.session().pending()
    with home.session().run() as run:
        run.tool({"id": "c2", "function": {"name": "book", "arguments": " "}}, lambda: made)


def test_usage_of_sessions_forks_and_children(home: Home) -> None:
    parent = home.session("parent")
    with parent.run() as run:
        for turn in run.turns(limit=2):
            run.add_usage(tokens=turn, cost=0.5)
    with home.store.session("child", parent=parent).run() as run:
        run.add_usage(Usage(tokens=10, cost=1.0))
    with home.store.session("grandchild", parent="child").run() as run:
        run.add_usage(tokens=100)
    fork = parent.fork("fork")
    with fork.run() as run:
        run.add_usage(tokens=1_000)
    with home.session("parent").run() as run:
        again = run.id
        run.add_usage(tokens=7)
    totals = home.session("parent").usage()
    with home.session("both").run() as run:
        run.add_usage(tokens=5)
        run.checkpoint(usage=Usage(tokens=3, cost=1.0))
    assert home.session("both").usage().spent == Usage(tokens=8, cost=1.0)
    assert totals.runs.pop(again) == Usage(tokens=7)
    assert [*totals.runs.values()] == [Usage(tokens=3, cost=1.0)]
    assert totals.path == totals.spent == Usage(tokens=10, cost=1.0)
    assert totals.children == Usage(tokens=110, cost=1.0)
    assert totals.total == Usage(tokens=120, cost=2.0)
    assert home.session("fork").usage()[:3] == (
        Usage(tokens=1_000),
        Usage(tokens=3, cost=1.0),
        Usage(tokens=1_000),
    )
    assert home.session("grandchild").head is not None
    assert home.session("child").usage().total == Usage(tokens=110, cost=1.0)
    assert home.store.verify(read_data=True).ok


def triggers(session: holdfast.Session) -> list[str | None]:
    return [c.trigger for c in session.tree()]


def spends(run: holdfast.Run, tokens: int, result: Any = "reply") -> Any:
    """A function of a step that spends tokens."""

    def model() -> Any:
        run.add_usage(tokens=tokens)
        return result

    return model


@pytest.mark.parametrize("within", [True, False])
@pytest.mark.parametrize("policy", [None, AfterLLMResponse()])
def test_ten_polls_count_nothing_again(home: Home, within: bool, policy: Any) -> None:
    """A worker that looks for an answer again and again leaves the session as it was."""

    def poll() -> str:
        with home.session().run(policy=policy) as run:
            run.state["reply"] = run.step("model", spends(run, 100 if within else 0))
            if not within:
                run.add_usage(tokens=100)
            run.wait_for("approval")
        return run.id if run._core._opened is None else run._core._opened.lease.run

    [id] = {poll() for _ in range(11)}
    session = home.session()
    assert triggers(session) == ["run", *(["llm"] if policy else []), "run"]
    assert session.usage().spent == session.usage().path == Usage(tokens=100)
    assert session.usage().runs == {id: Usage(tokens=100)}
    assert [(a.session, a.state, a.attempt) for a in home.store.abandoned(halted=True)] == [
        ("s", "waiting", 11)
    ]
    session.answer("approval", True)
    poll()
    done = home.session()
    assert done.head is not None
    assert done.head.status == "completed"
    assert done.usage().spent == done.usage().path == Usage(tokens=100)
    assert home.store.verify(read_data=True).ok


def test_a_poll_that_brings_something_new_is_a_checkpoint(home: Home) -> None:
    brought = iter([0, 0, 1, 1, 2])

    def poll(**options: Any) -> int:
        with home.session().run(**options) as run:
            run.state["n"] = next(brought)
            if run.state["n"] == 2:
                run.step("more", lambda: 1)
            run.wait_for("approval")
        return len(home.session())

    assert [poll() for _ in range(5)] == [2, 2, 3, 3, 4]
    brought = iter([2, 2, 2])
    assert poll() == 4
    home.session().answer("approval", True)
    with home.session().run() as run:
        run.state["n"] = 2
        run.step("more", lambda: 1)
        run.wait_for("approval")
        run.wait_for("approval")  # another question
    assert len(home.session()) == 5


def test_a_poll_gives_the_session_back_whatever_was_tagged_meanwhile(home: Home) -> None:
    def poll(tag: str, *, taken: bool = False) -> None:
        with home.session().run() as run:
            home.session().tag(next(iter(home.session().tree())), tag)
            if taken:
                home.session().run(takeover=True).__enter__()
            run.wait_for("approval")

    poll("one")
    poll("two")
    assert len(home.session()) == 2
    assert [a.state for a in home.store.abandoned(halted=True)] == ["waiting"]
    with pytest.raises(Fenced):
        poll("three", taken=True)
    with pytest.raises(SessionBusy):
        home.session().save({})


def test_a_call_that_is_made_again_counts_again(home: Home) -> None:
    def work(worker: Worker, run: holdfast.Run) -> None:
        def model() -> str:
            run.add_usage(tokens=10)
            if len(worker.made) < 2:
                worker.effect("tried")
                raise ValueError("overloaded")
            return "reply"

        run.state["reply"] = run.step("model", model)

    made: list[Any] = []
    for n in range(3):
        worker = Worker(home.session())
        worker.made = made
        with suppress(ValueError):
            worker(work)
        assert home.session().usage().spent == Usage(tokens=10 * (n + 1))
        assert home.session().usage().path == Usage(tokens=10)
    assert home.session().load() == {"reply": "reply"}


def test_usage_of_a_call_that_ended_is_known_before_any_checkpoint(home: Home) -> None:
    def work(_: Worker, run: holdfast.Run) -> None:
        run.state["reply"] = run.step("model", spends(run, 100))
        if not run.resumed:
            raise Crash

    Worker(home.session())(work)
    assert len(home.session()) == 1
    assert home.session().usage()[:3] == (Usage(), Usage(), Usage(tokens=100))
    Worker(home.session())(work)
    assert home.session().usage()[:3] == (Usage(tokens=100), Usage(), Usage(tokens=100))


def test_usage_of_a_call_that_was_interrupted(home: Home) -> None:
    """It has no end, but the run has: the last checkpoint knows what it has cost."""

    def interrupted() -> None:
        run.add_usage(tokens=7)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), home.session().run() as run:
        run.tool(call("c"), interrupted)
    assert home.session().usage().spent == Usage(tokens=7)
    home.session().resolve("c", 1)
    with home.session().run() as run:
        assert run.tool(call("c"), interrupted) == 1
    assert home.session().usage()[:3] == (Usage(tokens=7), Usage(), Usage(tokens=7))


def test_usage_before_a_loop_is_not_counted_by_every_worker(home: Home) -> None:
    def work(_: Worker, run: holdfast.Run) -> None:
        run.add_usage(tokens=1)
        run.step("setup", spends(run, 10))
        run.checkpoint(usage=Usage(tokens=100))
        for turn in run.turns(limit=3):
            run.step("model", spends(run, 1_000))
            if turn == 2 and attempt < 3:
                raise Crash

    for attempt in range(4):  # noqa: B007 - work() looks at it
        Worker(home.session())(work)
    totals = home.session().usage()
    assert totals.path == totals.spent == Usage(tokens=3_111)


def test_usage_in_the_call_of_another_run(home: Home) -> None:
    """A step may run a session of its own: each knows what it has spent."""

    def research() -> None:
        outer.add_usage(tokens=1)
        with home.session("inner").run() as inner:
            inner.add_usage(tokens=10)
            inner.step("model", spends(inner, 100))
            outer.add_usage(tokens=1_000)
        outer.add_usage(tokens=10_000)

    with home.session().run() as outer:
        outer.step("research", research)
    assert home.session("inner").usage().spent == Usage(tokens=110)
    assert home.session().usage().spent == Usage(tokens=11_001)


def test_usage_that_comes_after_a_call_is_not_lost(home: Home) -> None:
    """Of a thread that goes on when the function has returned."""
    late: list[contextvars.Context] = []
    with home.session().run() as run:
        run.step("model", lambda: late.append(contextvars.copy_context()))
        late[0].run(run.add_usage, tokens=3)
    assert home.session().usage().spent == Usage(tokens=3)


# -- policies --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "triggers"),
    [
        (None, ["run", "turn", "turn", "turn", "run"]),
        (AfterToolCall(), ["run", *["tool_call", "turn"] * 3, "run"]),
        (AfterLLMResponse(), ["run", *["llm", "turn"] * 3, "run"]),
        (EveryN(2), ["run", "turn", "run"]),
        (EverySeconds(3_600), ["run", "run"]),
        (Never(), ["run", "run"]),
        (Never() | AfterToolCall() | EveryN(3), ["run", *["tool_call", "turn"] * 3, "run"]),
    ],
)
def test_policies(tmp_path: Path, policy: Any, triggers: list[str]) -> None:
    with holdfast.open("memory:") as store:
        session = store.session("s")
        with session.run(policy=policy) as run:
            for turn in run.turns(limit=3):
                run.step("model", lambda: 1)
                run.tool(call(f"c{turn}"), lambda: 1)
        assert [c.trigger for c in session.tree()] == triggers


def test_a_policy_of_ones_own_gets_moments() -> None:
    class Own(holdfast.Policy):
        def __init__(self) -> None:
            self.asked: list[holdfast.Moment] = []

        def wants(self, moment: holdfast.Moment) -> bool:
            self.asked.append(moment)
            return False

    policy = Own()
    with holdfast.open("memory:") as store, store.session("s").run(policy=policy) as run:
        for turn in run.turns(limit=2):
            run.step("model", lambda: 1)
            run.tool(call(f"c{turn}"), lambda: 1)
    assert [(moment.turn, moment.event) for moment in policy.asked] == [
        (turn, event) for turn in (1, 2) for event in ("llm", "tool", "turn")
    ]
    assert all(moment.seconds >= 0 for moment in policy.asked)


def test_a_checkpoint_after_a_call_holds_what_came_of_it(home: Home) -> None:
    """The caller puts a result into the state when it has it; so it is taken at the next step."""
    session = home.session()
    with session.run(policy=AfterLLMResponse() | AfterToolCall()) as run:
        for _ in run.turns(limit=1):
            run.state["reply"] = run.step("model", spends(run, 5))
            run.add_usage(tokens=2)
            run.state["result"] = run.tool(call("c"), spends(run, 10, "found"))
    assert triggers(session) == ["run", "llm", "tool_call", "turn", "run"]
    _, llm, tool, turn, _ = session.tree()
    assert session.load(llm) == {"reply": "reply"}
    assert session.load(tool) == {"reply": "reply", "result": "found"}
    assert [c.usage.tokens for c in (llm, tool, turn)] == [7, 10, 0]
    fork = session.fork("other", at=llm.id)
    assert fork.load() == {"reply": "reply"}
    assert fork.usage().inherited == Usage(tokens=7)


@pytest.mark.parametrize("boundary", ["step", "tool", "wait", "checkpoint", "halt", "turn", "end"])
def test_a_checkpoint_is_due_until_the_next_boundary(home: Home, boundary: str) -> None:
    session = home.session()
    with session.run(policy=AfterLLMResponse()) as run:
        for _ in run.turns(limit=1):
            run.state["reply"] = run.step("model", lambda: "reply")
            assert triggers(session) == ["run"]
            if boundary == "step":
                run.step("other", lambda: triggers(session)[1:], key="k")
            elif boundary == "tool":
                run.tool(call("c"), lambda: triggers(session)[1:])
            elif boundary == "wait":
                run.wait_for("approval")
            elif boundary == "checkpoint":
                run.checkpoint("mine")
            elif boundary == "halt":
                run.halt("enough")
            elif boundary == "end":
                break
    kept = [(c.trigger, session.load(c)) for c in session.tree()]
    reply = {"reply": "reply"}
    assert kept[:2] == [("run", {}), ("llm", reply)]
    after = {
        "step": ["llm", "turn", "run"], "tool": ["turn", "run"], "wait": ["run"],
        "checkpoint": ["mine", "turn", "run"], "halt": ["run"], "turn": ["turn", "run"],
        "end": ["run"],
    }  # fmt: skip
    assert kept[2:] == [(trigger, reply) for trigger in after[boundary]]
    seen = [c.result for c in session.calls() if c.id in ("k", "c")]
    assert seen == ([["llm"]] if boundary in ("step", "tool") else [])


def test_a_checkpoint_that_is_due_is_taken_once_by_all_workers(home: Home) -> None:
    def work(_: Worker, run: holdfast.Run) -> None:
        run.state["reply"] = run.step("model", spends(run, 5))
        if attempt in (0, 1):
            raise Crash  # before the next step
        run.state["more"] = run.step("more", lambda: 1)
        if attempt < 4:
            raise Crash

    taken = []
    for attempt in range(5):  # noqa: B007 - work() looks at it
        Worker(home.session(), policy=AfterLLMResponse())(work)
        taken.append([(c.trigger, home.session().load(c)) for c in home.session().tree()][1:])
    one, both = ("llm", {"reply": "reply"}), ("llm", {"reply": "reply", "more": 1})
    assert taken[:4] == [[], [], [one], [one]]
    assert taken[4] == [one, both, ("run", both[1])]
    assert home.session().usage().spent == home.session().usage().path == Usage(tokens=5)


def test_a_checkpoint_that_is_due_waits_for_calls_under_way(home: Home) -> None:
    """Nobody knows how far the others have changed the state."""
    session = home.session()
    one, other = threading.Event(), threading.Event()

    def slow() -> str:
        one.set()
        assert other.wait(30)
        return "slow"

    with session.run(policy=AfterToolCall()) as run, ThreadPoolExecutor(1) as pool:
        future = pool.submit(run.tool, call("slow"), slow)
        assert one.wait(30)
        run.state["quick"] = run.tool(call("quick"), spends(run, 5, "quick"))
        run.step("model", lambda: 1)
        inside = run.checkpoint("mine")
        assert triggers(session) == ["run", "mine"]
        assert [p.id for p in inside.pending] == ["slow"]
        assert inside.usage == Usage()  # what is due has it
        other.set()
        run.state["slow"] = future.result()
        run.step("model", lambda: 1)
    assert triggers(session) == ["run", "mine", "tool_call", "run"]
    due = [*session.tree()][2]
    assert session.load(due) == {"quick": "quick", "slow": "slow"}
    assert due.usage == session.usage().spent == Usage(tokens=5)


def test_a_checkpoint_that_is_due_of_a_state_that_cannot_be_stored(home: Home) -> None:
    session = home.session()
    with session.run(policy=AfterLLMResponse()) as run:
        run.state["reply"] = run.step("model", lambda: "reply")
        run.state["bad"] = object()
        with pytest.raises(NotSerializable):
            run.step("next", lambda: 1)
        del run.state["bad"]
        run.step("next", lambda: 1)
    assert triggers(session) == ["run", "llm", "llm", "run"]
    other = home.session("other")
    with pytest.raises(NotSerializable), other.run(policy=AfterLLMResponse()) as run:
        run.step("model", spends(run, 5))
        run.state["bad"] = object()
    assert triggers(other) == ["run", "run"]
    assert other.usage().spent == Usage(tokens=5)


@pytest.mark.parametrize("home", ["sqlite", "files", "postgres"], indirect=True)
def test_async_runs_count_and_checkpoint_as_others_do(home: Home) -> None:
    async def agent() -> None:
        async with holdfast.aopen(home.url, durability="normal", **home.options) as store:
            session = await store.session("s")
            async with session.run(policy=AfterLLMResponse()) as run:

                async def model(n: int) -> str:
                    await asyncio.sleep(0)
                    run.add_usage(tokens=n)
                    return "reply"

                parts = [run.step("model", model, n, key=f"part {n}") for n in (1, 10, 100)]
                run.state["replies"] = await asyncio.gather(*parts)
                await run.wait_for("approval")

    for _ in range(4):
        asyncio.run(agent())
    session = home.session()
    assert triggers(session) == ["run", "llm", "run"]
    llm = [*session.tree()][1]
    assert session.load(llm) == {"replies": ["reply"] * 3}
    assert llm.usage == session.usage().spent == session.usage().path == Usage(tokens=111)


def test_sparse_checkpoints_lose_nothing(home: Home) -> None:
    def body(worker: Worker, run: holdfast.Run) -> None:
        for turn in run.turns(limit=6):
            run.state["log"].append(run.step("work", worker.effect, turn))
            if turn == 5 and not run.resumed:
                raise Crash

    first = Worker(home.session(), state={"log": []}, policy=EveryN(3))(body)
    assert first.made == [1, 2, 3, 4, 5]
    assert home.session().load() == {"log": [1, 2, 3]}
    assert Worker(home.session(), policy=EveryN(3))(body).made == [6]
    assert home.session().load() == {"log": [1, 2, 3, 4, 5, 6]}


def test_bad_policies() -> None:
    for bad in (0, -1, 1.5, True):
        with pytest.raises(InvalidRequest):
            EveryN(bad)  # type: ignore[arg-type]
    for wrong in (0, -1, float("inf"), float("nan"), "1"):
        with pytest.raises(InvalidRequest):
            EverySeconds(wrong)  # type: ignore[arg-type]
    with holdfast.open("memory:") as store, pytest.raises(InvalidRequest):
        store.session("s").run(policy="always")  # type: ignore[arg-type]


# -- beside other things ---------------------------------------------------------------------------


def test_parallel_steps(home: Home) -> None:
    def body(worker: Worker, run: holdfast.Run) -> None:
        with ThreadPoolExecutor(8) as pool:
            part = lambda n: run.step("part", worker.effect, n, key=f"part {n}")  # noqa: E731
            run.state["parts"] = [*pool.map(part, range(24))]
        if not run.resumed:
            raise Crash

    assert sorted(Worker(home.session())(body).made) == [*range(24)]
    assert Worker(home.session())(body).made == []
    assert home.session().load() == {"parts": [*range(24)]}


def test_concurrent_steps_of_one_key_are_refused(home: Home) -> None:
    with home.session().run() as run:

        def outer() -> None:
            with pytest.raises(InvalidRequest, match="key="):
                run.step("inner", lambda: 1, key="same")

        run.step("outer", outer, key="same")


def test_retention_keeps_what_a_run_goes_on_from(home: Home) -> None:
    home.store.retention = Retention(keep_last=1)

    def body(worker: Worker, run: holdfast.Run) -> None:
        for turn in run.turns(limit=20):
            for n in range(5):
                run.state["n"] = run.step("work", worker.effect, [turn, n])
                run.checkpoint()
                home.store.gc()
            if turn == 15 and not run.resumed:
                raise Crash

    Worker(home.session(), state={"n": None})(body)
    session = home.session()
    with pytest.raises(InvalidRequest, match="run"):
        assert session.head is not None
        assert session.head.run is not None
        base = session.head.run.base
        session.delete(next(c for c in session.tree() if c.seq == base))
    with pytest.raises(InvalidRequest):
        session.delete(session.head)
    second = Worker(home.session())(body)
    assert second.made == [[turn, n] for turn in range(16, 21) for n in range(5)]
    assert home.store.verify(read_data=True).ok


def test_gc_frees_the_journal_of_what_it_frees(home: Home) -> None:
    session = home.session()
    for _ in range(3):
        with session.run() as run:
            for turn in run.turns(limit=10):
                run.state["turn"] = run.step("work", lambda n: "x" * n, 500 + turn)
    before = home.store.stats().rows["journal"]
    session.refresh()
    session.prune(Retention(keep_last=3))
    home.store.gc()
    assert before == 60
    assert 0 < home.store.stats().rows["journal"] <= 8
    assert home.store.verify(read_data=True).ok
    with session.run() as run:
        run.step("next", lambda: 1)


def test_no_number_of_a_journal_is_given_again(home: Home) -> None:
    """Not even when nothing that was noted is needed any more: copies go by them."""
    session = home.session()
    numbers = list[int]()
    for n in range(3):
        with session.run() as run:
            run.step("work", lambda: "x")
        with home.store._repository.reader() as reader:
            numbers.append(reader.last_entry(home._number("s")))
        session.refresh()
        session.save({"n": n})
        session.prune(Retention(keep_last=1))
        home.reopened().gc()
        session = home.session()
        assert (home.store.stats().rows["journal"], session.calls()) == (1, [])
    assert numbers == [2, 4, 6]


def test_gc_leaves_the_end_of_something_that_was_freed(home: Home) -> None:
    """It is of a call that somebody had given up, and whose worker was only slow."""

    def body(worker: Worker, run: holdfast.Run) -> None:
        run.tool(call("c1", value=1, crash=True), worker.effect)

    Worker(home.session(), state={"n": 0})(body)
    session = home.session()
    session.resolve("c1", action="skip")
    with session.run(resume=False):
        Journal(home.store._repository.backend, home._number("s"), None).append(
            stream_chunks(1, ["late"], closed=True)
        )
    session.refresh()
    session.save({"n": 1})
    session.prune(Retention(keep_last=1))
    home.store.gc()
    assert (home.store.stats().rows["journal"], session.calls()) == (1, [])
    with session.run() as run:
        run.step("next", lambda: 1)
    assert home.store.verify().ok


@pytest.mark.parametrize(
    ("policy", "mid_turn", "kept"),
    [(None, False, 4), (None, True, 4), (EveryN(4), True, 6), (EveryN(99), True, 20)],
)
def test_gc_trims_the_journal_of_an_open_run(
    home: Home, policy: Any, mid_turn: bool, kept: int
) -> None:
    """What it would ask for again when it is resumed stays, and only that."""
    made: list[str] = []
    rule = Retention(keep_last=1)

    def agent(session: holdfast.Session, last: int, fails: bool) -> None:
        with session.run(policy=policy) as run:
            for turn in run.turns(limit=last):
                run.tool({"id": f"c{turn}", "name": "act", "input": {}}, lambda: made.append("x"))
                run.state["turn"] = turn
                if fails and turn == 10:
                    if mid_turn:
                        run.checkpoint()
                    other = home.another().session("s")
                    other.prune(rule)
                    home.store.gc()
                    assert home.store.stats().rows["journal"] == kept
                    raise RuntimeError("stopped")

    with pytest.raises(RuntimeError):
        agent(home.session(), 12, fails=True)
    home.session().prune(rule)
    home.store.gc()
    assert len(made) == 10
    agent(home.reopened().session("s"), 12, fails=False)
    assert len(made) == 12  # none was called twice
    assert home.session().load()["turn"] == 12
    assert home.store.pending() == []
    assert home.store.verify().ok


def test_gc_keeps_what_an_open_run_called_outside_of_turns(home: Home) -> None:
    made: list[int] = []

    def plan() -> str:
        made.append(0)
        return "plan"

    def agent(session: holdfast.Session, last: int) -> None:
        with session.run() as run:
            run.state["plan"] = run.step("plan", plan)
            for turn in run.turns(limit=last):
                run.step("act", made.append, turn)
                if turn == 5 and last == 9:
                    raise RuntimeError("stopped")

    with pytest.raises(RuntimeError):
        agent(home.session(), 9)
    home.session().prune(Retention(keep_last=1))
    home.store.gc()
    agent(home.reopened().session("s"), 6)
    assert made == [0, 1, 2, 3, 4, 5, 6]
    assert home.session().load()["plan"] == "plan"


def test_copies_take_the_journal_along(home: Home, tmp_path: Path) -> None:
    in_doubt(home, state={"n": 1})
    with holdfast.open(tmp_path / "copy.db") as other:
        home.store.copy(other)
        assert [p.key for p in other.session("s").pending()] == ["c1"]
        assert [c.id for c in other.session("s").tool_calls()] == ["c1"]
        assert other.verify(read_data=True).ok
        with other.session("s").run() as run:  # nobody runs it there
            assert not run.resumed


@pytest.mark.parametrize("home", ["sqlite"], indirect=True)
def test_a_damaged_entry_is_an_error(home: Home) -> None:
    in_doubt(home)
    home._sql("UPDATE journal SET body = CAST(x'00' || substr(body, 2) AS BLOB)")
    with pytest.raises(holdfast.Corrupt, match="entry 1"):
        home.session().pending()
    with pytest.raises(holdfast.Corrupt, match="entry 1"), home.session().run():
        pass
    assert not home.store.verify(read_data=True).ok


@pytest.mark.parametrize("home", ["sqlite"], indirect=True)
def test_a_damaged_journal_hides_no_other(home: Home, caplog: pytest.LogCaptureFixture) -> None:
    in_doubt(home)
    home._sql("UPDATE journal SET body = CAST(x'00' || substr(body, 2) AS BLOB)")
    for name in ("before", "t"):

        def body(worker: Worker, run: holdfast.Run) -> None:
            run.step("look", worker.effect, 1, True)

        Worker(home.session(name))(body)
    assert [p.session for p in home.store.pending()] == ["before", "t"]
    assert "'s'" in caplog.text
    assert home.store.resume_all(lambda run: None) == ["before", "t"]
    assert [a.session for a in home.store.abandoned()] == ["s"]


@pytest.mark.parametrize("home", ["sqlite", "postgres"], indirect=True)
def test_a_lost_lease_is_an_error(home: Home) -> None:
    """A new run would do again what was done."""
    in_doubt(home, state={"n": 1})
    home._sql("DELETE FROM leases")
    with pytest.raises(holdfast.Corrupt, match="lease"), home.session().run():
        pass
    with home.session().run(resume=False) as run:
        assert not run.resumed
    assert [p.key for p in home.session().pending()] == ["c1"]


def test_decorated_functions(home: Home) -> None:
    made = []
    with home.session().run() as run:

        @run.durable
        def double(n: int) -> int:
            made.append(n)
            return 2 * n

        @run.durable(name="other", key="fixed")
        def triple(n: int) -> int:
            made.append(n)
            return 3 * n

        assert [double(1), double(2), triple(1)] == [2, 4, 3]
        assert triple(1) == 3
        run.halt("later")
    assert made == [1, 2, 1]


def test_a_run_is_entered_once_and_used_while_it_is_active(home: Home) -> None:
    run = home.session().run()
    with pytest.raises(InvalidRequest):
        run.step("early", lambda: 1)
    with run:
        with pytest.raises(InvalidRequest):
            run.__enter__()
        assert run.step("now", lambda: 1) == 1
        wrong: Any = "maybe"
        with pytest.raises(InvalidRequest):
            run.step("now", lambda: 1, on_doubt=wrong)
        with pytest.raises(InvalidRequest):
            run.step("now", lambda: 1, on_change=wrong)
        with pytest.raises(InvalidRequest):
            run.step("", lambda: 1)
    with pytest.raises(InvalidRequest):
        run.step("late", lambda: 1)


# -- asyncio ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("home", ["sqlite", "files", "postgres"], indirect=True)
def test_async_runs(home: Home) -> None:
    made: list[Any] = []

    async def model(n: int) -> int:
        await asyncio.sleep(0)
        made.append((n, holdfast.current_key()))
        return n

    async def agent(crash: bool) -> None:
        async with holdfast.aopen(home.url, durability="normal", **home.options) as store:
            session = await store.session("s")
            async with session.run(state={"log": []}) as run:
                async for turn in run.turns(limit=3):
                    parts = await asyncio.gather(
                        *[run.step("part", model, 10 * turn + n, key=f"p{n}") for n in range(4)]
                    )
                    run.state["log"] += parts
                    run.state["log"].append(await run.tool(call(f"c{turn}", n=turn), lambda n: -n))
                    if crash and turn == 2:
                        run._core._over = True
                        run._core._opened.stop_heartbeat()  # type: ignore[union-attr]
                        raise Crash

    with pytest.raises(Crash):
        asyncio.run(agent(crash=True))
    assert len(made) == 8
    asyncio.run(agent(crash=False))
    assert len(made) == 12
    assert all(key for _, key in made)
    wanted = [x for t in (1, 2, 3) for x in [*range(10 * t, 10 * t + 4), -t]]
    assert home.session().load() == {"log": wanted}
    assert [c.result for c in home.session().tool_calls()] == [-1, -2, -3]


@pytest.mark.parametrize("home", ["sqlite", "files", "postgres"], indirect=True)
def test_a_cancelled_async_run_is_resumed(home: Home) -> None:
    made: list[str] = []
    begun = asyncio.Event()

    async def slow() -> str:
        made.append("slow")
        begun.set()
        await asyncio.sleep(600)
        return "never"

    async def quick() -> str:
        made.append("quick")
        return "fine"

    async def agent(function: Any) -> None:
        async with holdfast.aopen(home.url, durability="normal", **home.options) as store:
            session = await store.session("s")
            async with session.run() as run:
                run.state["a"] = await run.step("first", quick)
                run.state["b"] = await run.step("second", function, verify=lambda _: None)

    async def cancelled() -> None:
        task = asyncio.create_task(agent(slow))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    head = home.session().head
    assert head is not None
    assert (head.status, head.reason) == ("halted", "CancelledError")
    assert [p.key for p in home.session().pending()] == ["second#1"]
    asyncio.run(agent(quick))
    assert made == ["quick", "slow", "quick"]
    assert home.session().load() == {"a": "fine", "b": "fine"}


def test_a_first_state_is_never_ignored(home: Home) -> None:
    session = home.session()
    start = {"messages": [{"role": "user", "content": "One"}], "budget": 900}
    with session.run(state=start) as run:
        run.state["messages"].append({"role": "assistant", "content": "Two"})
    before = [c.id for c in session.tree()]
    for state in (start, {"messages": [{"role": "user", "content": "Three"}]}, {}):
        with (
            pytest.raises(InvalidRequest, match="has a state already") as e,
            session.run(state=state),
        ):
            pass
        assert "append" in str(e.value.hint)
    with pytest.raises(NotSerializable), session.run(state={"messages": [object()]}):
        pass
    assert [c.id for c in session.tree()] == before
    assert home.store.abandoned(halted=True) == []
    with session.run(state=session.load()) as run:  # nothing of it is ignored
        assert len(run.state["messages"]) == 2


@pytest.mark.parametrize("ends", ["crashes", "halts", "fails"])
def test_a_program_that_is_started_again_gives_the_same_first_state(home: Home, ends: str) -> None:
    start = {"n": 0, "log": []}

    def program(*, ends: str | None = None, **options: Any) -> holdfast.Run:
        run = home.session().run(**{"state": start} | options)
        with suppress(OSError), run:
            for turn in run.turns(limit=4):
                run.state["n"] += run.step("one", int, 1)
                if turn == 2 and ends == "crashes":
                    crashed(run)
                    break
                if turn == 2 and ends == "halts":
                    run.halt("later")
                if turn == 2 and ends == "fails":
                    raise OSError
        return run

    program(ends=ends)
    with pytest.raises(InvalidRequest, match="has a state already"):
        program(state={"n": 7})
    assert program(state=dict(reversed(start.items())), ends=ends).resumed
    assert program().resumed
    assert home.session().load()["n"] == 4


def test_a_first_state_that_was_pruned_does_not_stop_a_resume(home: Home) -> None:
    start = {"n": 0}
    for resumed in (False, True):
        with home.session().run(state=start) as run:
            assert run.resumed == resumed
            for turn in run.turns(limit=4):
                run.state["n"] += 1
                if turn == 3 and not resumed:
                    run.halt("later")
        if not resumed:
            home.session().prune(Retention(keep_last=2))
            home.store.gc()
    assert home.session().load() == {"n": 4}


def died(home: Home, *names: str) -> None:
    """Leave runs that nobody is at work on."""
    for name in names:
        run = home.session(name).run()
        run.__enter__()
        crashed(run)


def test_resume_all_resumes_at_once(home: Home) -> None:
    names = [f"s{n}" for n in range(6)]
    died(home, *names)
    meeting = threading.Barrier(6, timeout=10)

    def go_on(run: holdfast.Run) -> None:
        meeting.wait()
        run.state["met"] = True

    assert home.store.resume_all(go_on) == names
    assert [home.session(name).load() for name in names] == [{"met": True}] * 6


def test_resume_all_resumes_no_more_than_told_at_once(home: Home) -> None:
    names = [f"s{n}" for n in range(7)]
    died(home, *names)
    working, most, threads = set[str](), [0], set[int]()

    def go_on(run: holdfast.Run) -> None:
        working.add(run.session.name)
        most[0] = max(most[0], len(working))
        run.step("one", threads.add, threading.get_ident())
        working.remove(run.session.name)
        if run.session.name == "s3":
            raise OSError("fails, and the others go on")

    assert home.store.resume_all(go_on, concurrency=2) == names
    assert most[0] <= 2
    died(home, "a", "b")
    threads.clear()
    assert home.store.resume_all(go_on, concurrency=1) == ["a", "b"]
    assert threads == {threading.get_ident()}


def test_what_resume_all_runs_sees_the_context_of_the_caller(home: Home) -> None:
    died(home, "a", "b")
    told = contextvars.ContextVar("told", default="nothing")
    told.set("something")
    seen = []
    home.store.resume_all(lambda run: seen.append(told.get()))
    assert seen == ["something"] * 2


@pytest.mark.parametrize("concurrency", [0, -1, 1.5, True, None, "2"])
def test_a_bad_concurrency(home: Home, concurrency: Any) -> None:
    died(home, "a")
    with pytest.raises(InvalidRequest, match="concurrency"):
        home.store.resume_all(lambda run: None, concurrency=concurrency)

    async def agent() -> None:
        async with holdfast.aopen("memory:") as store:
            with pytest.raises(InvalidRequest, match="concurrency"):
                await store.resume_all(lambda run: asyncio.sleep(0), concurrency=concurrency)

    asyncio.run(agent())
    assert [a.session for a in home.store.abandoned()] == ["a"]


def test_sigterm_halts_one_run_and_not_several(home: Home) -> None:
    died(home, "a")
    with pytest.raises(InvalidRequest, match="SIGTERM"):
        home.store.resume_all(lambda run: None, sigterm=True)
    assert home.store.resume_all(lambda run: None, sigterm=True, concurrency=1) == ["a"]


@pytest.mark.parametrize("home", ["sqlite"], indirect=True)
def test_async_runs_are_resumed_at_once(home: Home) -> None:
    names = [f"s{n}" for n in range(6)]
    died(home, *names)
    most, working = [0], set[str]()

    async def meet(run: holdfast.AsyncRun) -> None:
        if run.session.name == "s2":
            raise OSError("fails, and the others go on")
        await meeting.wait()
        run.state["met"] = True

    async def count(run: holdfast.AsyncRun) -> None:
        working.add(run.session.name)
        most[0] = max(most[0], len(working))
        await run.step("one", asyncio.sleep, 0)
        working.remove(run.session.name)

    async def agent() -> None:
        async with holdfast.aopen(home.url, durability="normal") as store:
            async with asyncio.timeout(20):
                assert await store.resume_all(meet) == names
            died(home, "a", "b", "c")
            assert await store.resume_all(count, concurrency=2) == ["a", "b", "c"]
            assert most[0] <= 2

    meeting = asyncio.Barrier(5)
    asyncio.run(agent())
    assert home.session("s5").load() == {"met": True}
    assert [h.session for h in home.store.abandoned(halted=True)] == ["s2"]


@pytest.mark.parametrize("home", ["sqlite"], indirect=True)
def test_async_runs_that_were_abandoned(home: Home) -> None:
    for name in ("a", "b"):

        def body(worker: Worker, run: holdfast.Run) -> None:
            run.step("one", worker.effect, 1)
            raise Crash

        Worker(home.session(name))(body)

    async def go_on(run: holdfast.AsyncRun) -> None:
        if run.session.name == "a":
            raise OSError("again")
        run.state["n"] = await run.step("one", lambda _: pytest.fail("was called"), 1)

    async def agent() -> None:
        async with holdfast.aopen(home.url, durability="normal") as store:
            assert await store.resume_all(go_on) == ["a", "b"]
            assert await store.abandoned() == []

    asyncio.run(agent())
    assert home.session("b").load() == {"n": 1}
    assert [h.session for h in home.store.abandoned(halted=True)] == ["a"]


@pytest.mark.parametrize("home", ["sqlite"], indirect=True)
def test_sigterm_halts_an_async_run(home: Home) -> None:
    async def agent() -> str:
        async with holdfast.aopen(home.url, durability="normal") as store:
            session = await store.session("s")
            async with session.run(sigterm=True) as run:
                run.state["n"] = 1
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(600)
            return "went on after the run"

    assert asyncio.run(agent()) == "went on after the run"
    head = home.session().head
    assert head is not None
    assert (head.status, head.reason) == ("halted", "SIGTERM")
    assert home.session().load() == {"n": 1}
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


class Slow:
    """A moment at which a task is cancelled: while a worker writes."""

    def __init__(self, patch: pytest.MonkeyPatch, of: Any, name: str) -> None:
        self.begun, self._go_on, real = threading.Event(), threading.Event(), getattr(of, name)

        def slow(*args: Any, **options: Any) -> Any:
            done = real(*args, **options)
            self.begun.set()
            self._go_on.wait(30)
            return done

        patch.setattr(of, name, slow)

    async def cancel(self, task: asyncio.Task[Any]) -> None:
        await asyncio.to_thread(self.begun.wait, 30)
        task.cancel()
        await asyncio.sleep(0)
        self._go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("home", ["sqlite"], indirect=True)
def test_an_async_run_that_is_cancelled_while_it_begins(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would leave what was never entered: the session would stay busy."""
    moment = Slow(monkeypatch, run_module, "open_run")

    async def agent(store: holdfast.AsyncStore) -> None:
        async with (await store.session("s")).run():
            pytest.fail("was entered")

    async def cancelled() -> None:
        async with holdfast.aopen(home.url, durability="normal") as store:
            await moment.cancel(asyncio.create_task(agent(store)))

    asyncio.run(cancelled())
    assert [a.state for a in home.store.abandoned(halted=True)] == ["halted"]
    with home.session().run() as run:
        assert run.resumed


@pytest.mark.parametrize("home", ["sqlite"], indirect=True)
def test_an_async_call_that_is_cancelled_before_it_is_made(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    moment = Slow(monkeypatch, RunCore, "prepare")

    def effect(n: int) -> None:
        made.append(n)

    async def agent() -> None:
        async with (
            holdfast.aopen(home.url, durability="normal") as store,
            (await store.session("s")).run() as run,
        ):
            await moment.cancel(asyncio.create_task(run.tool(call("c1", n=1), effect)))
            assert made == []
            assert await run.pending() == []
            await run.tool(call("c1", n=1), effect)

    asyncio.run(agent())
    assert made == [1]
    assert home.session().pending() == []


def test_usage_of_a_run_is_checked_when_it_is_added(memory: Home) -> None:
    with memory.session().run() as run:
        for wrong in (-1, "7", 1.5):
            with pytest.raises(holdfast.InvalidRequest, match="tokens"):
                run.add_usage(tokens=wrong)  # type: ignore[arg-type]
        run.add_usage(tokens=7)
    assert memory.session().usage().path == Usage(tokens=7)
