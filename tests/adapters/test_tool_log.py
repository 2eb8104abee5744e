"""The log of tool calls: what it says after a crash, whenever that comes."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.adapters.tool_log import ToolLog

if TYPE_CHECKING:
    from collections.abc import Callable

    import holdfast
    from tests.support.stores import Home

IDS = ("1", "2")
MOMENTS = 7
"""Moments at which a worker can crash: before each of five writes and two effects."""
NEVER = 99


def called(name: str, **more: Any) -> dict[str, Any]:
    return {"call": {"name": name}, **more}


def done(output: str) -> dict[str, Any]:
    return called("look", stage="done", output=output)


class Crash(BaseException):
    """The end of a process."""


class Worker:
    """Makes the calls of a model's answer. It stores the log after each change."""

    def __init__(self, session: holdfast.Session, effects: Counter[str], crash_at: int) -> None:
        self.session, self.effects, self.left = session, effects, crash_at
        self.log = ToolLog(session.load()["tools"] if session.exists() else {})
        self.doubts = [id for id in IDS if self.log.has_begun(id) and self.log.is_open(id)]

    def work(self, *, rerun: bool) -> dict[str, str]:
        """Return the outcomes of the calls. A call in doubt is made again only with `rerun`."""
        if not self.log.entries:
            self.log.ask({id: called(f"tool {id}") for id in IDS})
            self.store()
        return {id: self.outcome(id, rerun=rerun) for id in IDS}

    def outcome(self, id: str, *, rerun: bool) -> str:
        known = self.log.replay(id, {"name": f"tool {id}"})
        if known is not None:
            return str(known["output"])
        if self.log.has_begun(id) and not rerun:
            return "in doubt"
        self.log.start(id)
        self.store()
        self.pass_moment()
        self.effects[id] += 1
        self.log.end(id, f"done by {id}")
        self.store()
        return f"done by {id}"

    def store(self) -> None:
        self.pass_moment()
        self.session.save({"tools": self.log.entries})

    def pass_moment(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Crash


def crash_everywhere(home: Home) -> None:
    """Crash at each moment, again at each moment after the restart, and then finish."""
    moments = range(MOMENTS + 1)
    for n, (first, second, rerun) in enumerate(product(moments, moments, (False, True))):
        effects, doubts = Counter[str](), Counter[str]()
        outcomes: dict[str, str] = {}
        for crash_at in (first, second, NEVER):
            worker = Worker(home.store.session(f"s{n}"), effects, crash_at)
            doubts.update(worker.doubts)
            try:
                outcomes = worker.work(rerun=rerun)
            except Crash:
                continue
        for id in IDS:
            if rerun:
                assert outcomes[id] == f"done by {id}"
                assert 1 <= effects[id] <= 1 + doubts[id], "made again, but it was not in doubt"
            else:
                assert outcomes[id] == ("in doubt" if doubts[id] else f"done by {id}")
                assert effects[id] <= 1, "made again, but nobody said so"
        before = effects.copy()
        assert Worker(worker.session, effects, NEVER).work(rerun=rerun) == outcomes
        assert effects == before, "made again after the end"


def test_a_crash_at_any_moment_leaves_the_truth(memory: Home):
    crash_everywhere(memory)


def forget_results(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ToolLog, "end", lambda *_: None)


def forget_starts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ToolLog, "start", lambda *_: None)


def ignore_doubts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ToolLog, "has_begun", lambda *_: False)


def replay_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ToolLog, "replay", lambda *_: None)


@pytest.mark.parametrize("mutant", [forget_results, forget_starts, ignore_doubts, replay_nothing])
def test_a_broken_log_is_noticed(
    memory: Home, monkeypatch: pytest.MonkeyPatch, mutant: Callable[[pytest.MonkeyPatch], None]
):
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        crash_everywhere(memory)


def test_the_next_answer_removes_calls_that_never_began():
    log = ToolLog()
    log.ask({"1": called("a"), "2": called("b"), "3": called("c")})
    log.start("2")
    log.start("3")
    log.end("3", "c")
    log.ask({"4": called("d")})
    assert {id: entry["stage"] for id, entry in log.entries.items()} == {
        "2": "started",
        "3": "done",
        "4": "asked",
    }
    assert [id for id in "1234" if log.has_begun(id)] == ["2", "3"]
    assert [id for id in "1234" if log.is_open(id)] == ["1", "2", "4"]


def test_calls_that_nobody_announced_are_recorded():
    log = ToolLog()
    log.start("1", called("a"))
    log.end("2", "b", call={"name": "b"})
    log.forget(["1", "3"])
    assert log.entries == {"2": called("b", stage="done", output="b")}


def test_a_result_is_replayed_once_and_for_the_same_call():
    log = ToolLog({"1": done("a"), "2": done("b"), "3": called("look", stage="started")})
    call = {"name": "look"}
    assert log.replay("1", {"name": "other"}) is None
    assert log.replay("1", call) == done("a")
    assert log.replay("1", call) is None
    log.end("2", "b again")
    assert log.replay("2", call) is None, "it is of this process, which runs the tool again"
    assert log.replay("3", call) is log.replay("4", call) is None


def test_a_log_does_not_change_the_state_that_it_was_read_from():
    stored = {"1": called("look", stage="asked")}
    log = ToolLog(stored)
    log.start("1")
    log.forget(["1"])
    assert stored == {"1": called("look", stage="asked")}
