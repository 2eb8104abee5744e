"""A session adopts a fork: its line is the fork's then, and one undo takes that back."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast
from holdfast import Usage
from holdfast.errors import (
    CheckpointNotFound,
    HeadMoved,
    InvalidRequest,
    KeyTaken,
    SessionBusy,
    SessionNotFound,
)
from holdfast.history.writer import Writer
from tests.support.sessions import FIELDS, PLAIN_FIELDS, seqs
from tests.support.stores import TEXT, Home


def forked(home: Home) -> tuple[holdfast.Session, holdfast.Session]:
    """A session that went on after a fork, and the fork."""
    session = home.filled(3)
    fork = session.fork("fork")
    session.append("log", "of the origin")
    for n in range(3):
        fork.append("log", f"{n} {TEXT}", usage=Usage(100, 10, cost=0.5))
    fork.save({"i": "done", "log": [TEXT] * 30}, **FIELDS, key="k")
    return session, fork


def facts(checkpoint: holdfast.Checkpoint) -> dict[str, object]:
    names = [*PLAIN_FIELDS, "tags", "key", "step", "created_at", "size", "state_hash"]
    return {name: getattr(checkpoint, name) for name in names}


def test_the_line_of_the_fork_becomes_the_line_of_the_session(home: Home) -> None:
    session, fork = forked(home)
    before = {c.id for c in session.tree()}
    items = home.store.stats().rows["items"]
    head = session.adopt(fork)
    assert (session.load(), head) == (fork.load(), session.get())
    for own, theirs in zip(session.history(), fork.history(), strict=True):
        assert facts(own) == facts(theirs)
        assert session.load(own) == fork.load(theirs)
        assert own.session == "s"
        assert own.adopted == (None if own.id in before else theirs.id)
    assert session.usage().path == fork.usage().path + fork.usage().inherited
    assert home.store.stats().rows["items"] == items
    assert [c.operation for c in session.history()][:5] == ["save", *["append"] * 3, "save"]
    assert seqs(session.tree()) == [*range(1, 10)]
    assert [*session.checkpoints(tag="a")] == [head]
    assert [c.session for c in home.store.checkpoints(label=FIELDS["label"])] == ["s", "fork"]
    assert session.get("key:k") == head
    home.reopened()
    assert home.store.verify(read_data=True).ok


def test_both_go_on_after_an_adoption(home: Home) -> None:
    """Each with items of its own: what one appends must not be where the other appends."""
    session, fork = forked(home)
    session.adopt("fork")
    log = fork.load()["log"]
    session = home.session()
    fork.append("log", "of the fork")
    session.append("log", "of the session")
    session = home.reopened().session("s")
    assert session.load()["log"] == [*log, "of the session"]
    assert home.session("fork").load()["log"] == [*log, "of the fork"]
    home.session("fork").delete()
    home.store.gc()
    assert session.load()["log"] == [*log, "of the session"]
    assert home.store.verify(read_data=True).ok


def test_one_undo_takes_an_adoption_back(home: Home) -> None:
    session, fork = forked(home)
    session.tag("@", "kept")
    before = session.get()
    adopted, state = session.adopt(fork), fork.load()
    session.save({"later": 1})
    for _ in range(2):
        assert session.undo().details["what"] == "save"
        assert session.get() == adopted
        session.undo()
        assert session.get() == before
        session = home.reopened().session("s")
        session.redo()
        assert session.get() == adopted
        assert session.load() == state
        session.redo()
        assert session.load() == {"later": 1}
    session.undo()
    session.undo()
    assert session.undo().details["what"] == "tag"  # and not a save of an adopted checkpoint
    assert session.undo().details["what"] == "append"
    assert session.get().seq == 3
    assert home.store.verify(read_data=True).ok


def test_an_adoption_of_a_fork_of_a_fork(home: Home) -> None:
    session, fork = forked(home)
    second = fork.fork("second", at="@~2")
    second.append("log", "second")
    session.rewind("step:1")
    session.adopt(second)
    assert [facts(c) for c in session.history()] == [facts(c) for c in second.history()]
    assert session.load() == second.load()
    assert home.store.verify(read_data=True).ok


def test_what_is_pruned_is_not_adopted(home: Home) -> None:
    session, fork = forked(home)
    fork.delete("@~2")
    session.delete("step:3")  # the fork point
    home.store.gc()
    session.adopt(fork)
    assert [c.step for c in session.history()] == [6, 5, 4, 3, 2, 1]
    assert session.load() == fork.load()
    assert home.store.verify(read_data=True).ok


def test_usage_of_an_adopted_line_counts_once(home: Home) -> None:
    session, fork = forked(home)
    total = sum(home.store.usage().values(), Usage())
    assert total.tokens > 0
    session.adopt(fork)
    assert sum(home.store.usage().values(), Usage()) == total
    assert home.store.usage(session="s") == {"s": total}
    assert session.usage().spent == total
    fork.delete()
    assert home.store.usage() == {"s": total}
    home.store.gc()
    assert home.store.usage() == {"s": total}


def test_the_usage_of_a_run_is_adopted(home: Home) -> None:
    session = home.filled(1)
    with session.run() as run:
        run.step("own", lambda: run.add_usage(tokens=7, cost=0.5))
    fork = session.fork("fork")
    with fork.run() as run:
        run.step("paid", lambda: run.add_usage(tokens=100, cost=1.0))
        run.add_usage(tokens=10, cost=0.1)
    session.adopt(fork)
    assert session.get().run is None
    assert session.usage().spent == session.usage().path == Usage(tokens=117, cost=1.6)
    with session.run() as run:
        run.state["more"] = 1
    assert session.load()["more"] == 1
    assert home.store.verify(read_data=True).ok


def test_what_cannot_be_adopted(home: Home) -> None:
    session, fork = forked(home)
    other = home.filled(1, "other")
    for wrong in ("other", "s", "", None):
        with pytest.raises(InvalidRequest):
            session.adopt(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest):
        fork.adopt(session)  # the origin is no fork of its fork
    with pytest.raises(SessionNotFound):
        session.adopt("nowhere")
    with pytest.raises(SessionNotFound):
        home.session("nowhere").adopt(fork)
    other.undo()
    with pytest.raises(CheckpointNotFound):
        session.adopt(other)
    assert len(session) == 4
    session.save({}, key="k")
    with pytest.raises(KeyTaken):
        session.adopt(fork)
    assert len(session) == 5
    with home.store.session("s").run(), pytest.raises(SessionBusy):
        session.adopt(session.fork("late"))


def test_a_fork_that_gc_frees_meanwhile_is_not_adopted(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, fork = forked(home)
    commit = Writer.operation

    def late(*given: Any, **notes: Any) -> bytes:
        monkeypatch.setattr(Writer, "operation", commit)
        fork.delete()
        home.store.gc()
        return commit(*given, **notes)

    monkeypatch.setattr(Writer, "operation", late)
    with pytest.raises(SessionNotFound):
        session.adopt("fork")
    assert len(session) == 4
    assert home.store.verify(read_data=True).ok


def test_a_late_handle_is_told_that_the_head_has_moved(home: Home) -> None:
    session, fork = forked(home)
    late = home.another().session("s")
    session.adopt(fork)
    with pytest.raises(HeadMoved):
        late.append("log", "lost")


def test_an_adoption_is_copied(here: Home, there: Home) -> None:
    session, fork = forked(here)
    here.store.copy(there.store)
    session.adopt(fork)
    assert here.store.copy(there.store).checkpoints == 5
    copy = there.session()
    assert [c.hash for c in copy.history()] == [c.hash for c in session.history()]
    assert copy.load() == session.load()
    assert copy.undo().details["what"] == "rewind"
    assert copy.load()["log"][-1] == "of the origin"
    assert there.store.verify(read_data=True).ok
