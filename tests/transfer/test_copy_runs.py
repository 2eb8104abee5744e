"""Copies of sessions that are run, here or in the other store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import Retention
from holdfast.history import leases
from tests.runs.test_runs import Worker, call
from tests.support import memory_rows
from tests.support.stores import Home
from tests.transfer.test_copy import facts
from tests.transfer.test_copy_conflicts import busy, refused, whole


def calls(home: Home) -> list[tuple[str, Any, bool | None]]:
    return [(c.name, c.result, c.success) for c in home.session().calls()]


def in_doubt(home: Home, key: str, *before: str) -> None:
    """A run whose worker is killed in a call, after others that have returned."""

    def body(worker: Worker, run: holdfast.Run) -> None:
        for step in before:
            run.step(step, worker.effect, f"result of {step}")
        run.tool(call(key, value=1, crash=True), worker.effect)

    Worker(home.session())(body)


def turn(home: Home, *steps: str) -> None:
    with home.session().run() as run:
        for _ in run.turns(limit=1):
            for step in steps:
                run.step(step, "result of {}".format, step)


def trim(home: Home) -> None:
    """No checkpoint of a turn stays, and so nothing of the journal but its end."""
    session = home.session()
    session.save({"n": "later"})
    session.prune(Retention(keep_last=1, keep_tagged=True))
    home.store.gc()


# -- journals ----------------------------------------------------------------------------------


def test_two_journals_are_not_joined(here: Home, there: Home) -> None:
    here.session().save({"n": 0}, tags=["keep"])
    here.store.copy(there.store)
    in_doubt(there, "pay")
    in_doubt(here, "mail", "look")
    refused(here, there, "was run in the other store")
    assert calls(there) == [("act", None, None)]
    assert [p.key for p in there.session().pending()] == ["pay"]


@pytest.mark.parametrize("here_too", [False, True])
def test_an_answer_that_was_given_there_stays(here: Home, there: Home, here_too: bool) -> None:
    """Nobody has run it there, and no operation tells of it."""
    here.session().save({"n": 0}, tags=["keep"])
    in_doubt(here, "pay")
    here.store.copy(there.store)
    there.session().resolve("pay", "paid")
    if here_too:
        here.session().resolve("pay", action="skip")
        turn(here, "more")
    refused(here, there, "was run in the other store")
    assert calls(there) == [("act", "paid", True)]


def test_an_answer_stays_where_entries_before_it_are_lost(here: Home, memory: Home) -> None:
    """What is behind them is still compared with what has the same number here."""
    here.session().save({"n": 0}, tags=["keep"])
    in_doubt(here, "pay", "A", "B", "C")
    here.store.copy(memory.store)
    memory.session().resolve("pay", "paid")
    here.session().resolve("pay", action="skip")
    turn(here, "more")
    held = memory.store._repository.backend
    for n in range(2, 5):
        memory_rows.damage(held, "journal", None, memory._number("s") << 32 | n)
    before = memory_rows.rows(held, "journal")
    [(name, why)] = here.store.copy(memory.store).skipped
    assert (name, "was run in the other store" in why) == ("s", True), why
    assert memory_rows.rows(held, "journal") == before


def test_an_answer_that_is_given_during_a_copy_stays(
    here: Home, there: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.session().save({"n": 0}, tags=["keep"])
    in_doubt(here, "pay")
    here.store.copy(there.store)
    here.session().resolve("pay", action="skip")
    answer = there.another().session("s").resolve
    busy(monkeypatch, there, lambda: answer("pay", result="paid"), most=1)
    [(name, why)] = here.store.copy(there.store).skipped
    assert (name, "writes to the session" in why) == ("s", True), why
    assert calls(there) == [("act", "paid", True)]
    whole(there)


def test_a_journal_of_which_all_was_freed_here_goes_on(here: Home, there: Home) -> None:
    here.session().save({"n": 0}, tags=["keep"])
    turn(here, "A", "B")
    here.store.copy(there.store)
    trim(here)
    assert calls(here) == []
    turn(here, "X", "Y", "Z")
    assert here.store.copy(there.store).skipped == ()
    assert [name for name, _, _ in calls(there)] == ["A", "B", "X", "Y", "Z"]
    whole(there)


def test_a_journal_of_which_all_was_freed_there_goes_on(here: Home, there: Home) -> None:
    session = here.session()
    session.save({"n": 0})
    turn(here, "A", "B")
    session.refresh()
    session.save({"n": 1})
    session.prune(Retention(keep_last=1))
    here.store.copy(there.store)
    there.store.gc()
    assert (calls(there), len(calls(here))) == ([], 2)
    turn(here, "C")
    assert here.store.copy(there.store).skipped == ()
    assert calls(there) == [("C", "result of C", True)]
    whole(there)


# -- leases ------------------------------------------------------------------------------------


@pytest.mark.parametrize("new", [False, True])
def test_who_runs_a_session_there_goes_on(here: Home, there: Home, new: bool) -> None:
    session = here.session()
    session.save({"n": 0})
    here.store.copy(there.store)
    if new:
        session.save({"n": 100})
    with there.session().run() as run:
        refused(here, there, "is run in the other store")
        run.step("charge", lambda: 1)
        refused(here, there, "is run in the other store")
        run.state["n"] = 1
    assert there.session().load() == {"n": 1}


def test_a_run_that_was_interrupted_there_can_go_on(here: Home, there: Home) -> None:
    """Even where the numbers of what it has noted are of something that was freed here."""
    here.session().save({"n": 0}, tags=["keep"])
    here.store.copy(there.store)
    in_doubt(there, "pay")
    turn(here, "A", "B", "C")
    trim(here)
    refused(here, there, "was run in the other store")
    [left] = there.session().pending()
    assert (left.key, left.state) == ("pay", "in doubt")


def test_a_worker_there_that_only_seems_to_be_gone(
    here: Home, there: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written where nothing is new."""
    here.session().save({"n": 0})
    here.store.copy(there.store)
    with there.session().run() as run:
        monkeypatch.setattr(leases, "TTL", 0.0)
        done = here.store.copy(there.store)
        assert (done.sessions, done.skipped) == (0, ())
        monkeypatch.undo()
        run.state["n"] = 1
    assert there.session().load() == {"n": 1}


def test_a_run_that_was_interrupted_here_is_gone_on_with_elsewhere(here: Home, there: Home) -> None:
    """And what came of it comes back: here is nothing that the other store does not know."""
    here.session().save({"n": 0})
    in_doubt(here, "pay", "look")
    here.store.copy(there.store)
    there.session().resolve("pay", "paid")
    turn(there, "more")
    assert there.store.copy(here.store).skipped == ()
    assert calls(here) == calls(there) != []
    assert (facts(here.store), here.session().pending()) == (facts(there.store), [])
    whole(here)


def test_a_lease_that_came_with_a_backup_is_nobodys(tmp_path: Path) -> None:
    with holdfast.open(tmp_path / "here.db") as here:
        session = here.session("s")
        with session.run(state={"n": 0}) as run:
            here.backup(tmp_path / "there.db")
            run.state["n"] = 1
        with holdfast.open(tmp_path / "there.db") as there:
            assert here.copy(there).skipped == ()
            assert facts(there) == facts(here)
            assert there.verify(read_data=True).ok


def some_turns(run: holdfast.Run, count: int) -> None:
    for _ in run.turns(limit=count):
        run.step("step", lambda: 1)
        run.state["n"] += 1


@pytest.mark.parametrize("kind", ["", "files:"])
def test_a_backup_of_a_run_that_has_ended_since_is_copied_to(tmp_path: Path, kind: str) -> None:
    """Also once nothing is left here of what was noted in that run."""
    with holdfast.open(f"{kind}{tmp_path / 'here'}", durability="normal") as here:
        session = here.session("s")
        session.save({"n": 0}, tags=["keep"])
        with session.run() as run:
            some_turns(run, 2)
            here.backup(tmp_path / "there")
            run.state["n"] += 100
        with holdfast.open(f"{kind}{tmp_path / 'there'}", durability="normal") as there:
            assert here.copy(there).skipped == ()
            assert here.copy(there).sessions == 0
            for _ in range(2):
                with session.run() as run:
                    some_turns(run, 2)
            session.refresh()
            session.prune(Retention(keep_last=1, keep_tagged=True))
            here.gc()
            assert here.copy(there).skipped == ()
            assert there.session("s").load() == session.load() == {"n": 106}
            assert there.verify(read_data=True).ok


@pytest.mark.parametrize("kind", ["", "files:"])
def test_who_runs_a_session_is_not_thrown_out_by_its_backup(tmp_path: Path, kind: str) -> None:
    """Both stores have the same lease, but only one of them a worker."""
    with holdfast.open(f"{kind}{tmp_path / 'here'}", durability="normal") as here:
        session = here.session("s")
        session.save({"n": 0})
        with session.run() as run:
            some_turns(run, 1)
            here.backup(tmp_path / "there")
            with holdfast.open(f"{kind}{tmp_path / 'there'}", durability="normal") as there:
                there.session("s").tag("@", "mine")
                [(name, why)] = there.copy(here).skipped
                assert (name, "is run in the other store" in why) == ("s", True), why
            run.step("more", lambda: 2)
            run.state["n"] = 7
        assert session.load() == {"n": 7}


def test_a_run_can_be_taken_up_from_a_backup_that_was_copied_to(tmp_path: Path) -> None:
    """Until it has ended: no step of it is done again."""
    with holdfast.open(tmp_path / "here.db", durability="normal") as here:
        session = here.session("s")
        session.save({"n": 0})
        with session.run() as run:
            for _ in run.turns(limit=1):
                here.backup(tmp_path / "there.db")
                run.step("pay", lambda: "paid")
                with here._repository.reader() as reader:
                    [lease] = reader.leases(0, 2)
                assert here._repository.backend.renew(lease.session, lease.token)  # a sign of life
                with holdfast.open(tmp_path / "there.db", durability="normal") as there:
                    assert here.copy(there).skipped == ()
                    with there.session("s").run(takeover=True, resume=True) as again:
                        for _ in again.turns(limit=1):
                            assert again.step("pay", lambda: "paid twice") == "paid"
