"""Deletion: a deleted checkpoint or session is gone for every reader."""

from __future__ import annotations

import pytest

from holdfast import Retention
from holdfast.errors import CheckpointNotFound, InvalidRequest, NotFound, SessionNotFound
from tests.maintenance.test_retention import Clock
from tests.support.sessions import DAY, KEEP_LAST, found_seqs, seqs
from tests.support.stores import TEXT, Home


def test_delete_takes_one_of_two_equal_checkpoints(home: Home) -> None:
    session = home.session()
    state = {"log": [TEXT] * 20, "big": TEXT * 99}
    first, second = session.save(state), session.save(state)
    session.save({})
    session.delete(first)
    home.store.gc()
    for _ in range(2):
        with pytest.raises(CheckpointNotFound):
            session.load(first.id)
        assert session.load(second.id) == state
        assert seqs(session.tree()) == [2, 3]
        session = home.reopened().session("s")
    assert home.store.verify(read_data=True).ok


def test_a_deleted_checkpoint_loads_by_no_name(home: Home) -> None:
    session = home.session()
    first = session.save({"life": 1}, key="external", label="l", tags=["t"])
    session.save({"life": "head"})
    session.delete("key:external")
    for _ in range(2):
        for revision in ("key:external", "label:l", "tag:t", "l", first.id, first.id[:20]):
            with pytest.raises(CheckpointNotFound):
                session.load(revision)
        with pytest.raises(CheckpointNotFound):
            home.store.get(first.id)
        assert found_seqs(home) == [2]
        home.store.gc()
    session.save({"life": 2}, key="external")
    assert home.reopened().session("s").load("key:external") == {"life": 2}
    home.session().delete()
    session = home.session()
    session.save({"life": 3})
    assert seqs(session.tree()) == [1]
    session.delete()
    assert not home.reopened().session("s").exists()


def test_deleting_the_head_moves_it_to_the_nearest_ancestor(home: Home) -> None:
    session = home.filled(5)
    session.delete("@~1")
    head = session.get()
    deleted = session.delete(head)
    assert (deleted.deleted, deleted.details["from"], deleted.details["to"]) == (1, 5, 3)
    session.append("log", "the handle expects the new head")
    session.undo()
    session = home.reopened().session("s")
    session.save({"on": "top"})
    assert seqs(session.history()) == [7, 3, 2, 1]
    session.undo()
    session.undo()
    assert session.get() == head
    home.store.gc()
    assert home.store.verify(read_data=True).ok


def test_the_head_without_an_ancestor_is_not_deleted(home: Home) -> None:
    session = home.filled(2)
    fork = session.fork("fork")
    fork.save({"more": 1})
    fork.rewind("@~1")
    with pytest.raises(InvalidRequest):  # its ancestors are in another session
        fork.delete("@")
    session.rewind("step:1")
    with pytest.raises(InvalidRequest):
        session.delete("@")
    assert seqs(session.tree()) == [1, 2]


def test_deleting_what_is_missing_is_an_error(home: Home) -> None:
    none = home.session("none")
    for call in (none.delete, none.undo, none.redo, lambda: none.prune(KEEP_LAST)):
        with pytest.raises(SessionNotFound):
            call()
    session = home.filled(3)
    gone = session.get("@~1")
    session.delete(gone)
    for revision in (gone, gone.id, "label:no", "key:no", "@~9", "step:2", "0" * 24):
        with pytest.raises(CheckpointNotFound):
            session.delete(revision)
    home.store.gc()
    with pytest.raises(CheckpointNotFound):
        session.delete(gone)
    session.delete()
    for _ in range(2):
        with pytest.raises(SessionNotFound):
            session.delete()
        home.store.gc()
    assert not any(home.store.gc())


def test_emptied_sessions_are_not_listed(home: Home) -> None:
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock(patch)
        for name in ("deleted", "old", "pruned"):
            home.filled(3, name)
        home.session("deleted").delete()
        clock.wait(40 * DAY)
        home.session("old").prune(Retention(session_ttl="30d"))
        home.store.prune(Retention(session_ttl="30d"))
        for _ in range(2):
            assert list(home.reopened().sessions()) == list(home.store.checkpoints()) == []
            assert (home.store.stats().sessions, home.store.stats().largest) == (0, ())
            home.store.gc()
            clock.wait(2 * DAY)


def test_a_session_ends_when_its_last_checkpoint_is_freed(home: Home) -> None:
    session = home.session()
    first = session.save({"i": 1})
    session.undo()
    session.delete(first)
    home.store.gc()
    assert list(home.reopened().sessions()) == []
    assert not home.session().exists()


def test_all_readers_agree_on_what_exists(home: Home) -> None:
    session = home.filled(3, tags=["t"])
    ids = [c.id for c in session.tree()]

    def agree(*, there: bool) -> None:
        session = home.reopened().session("s")
        head = session.head
        lists = (
            session.tree(),
            session.history(),
            home.store.checkpoints(),
            home.store.checkpoints(tag="t"),
        )
        assert [len(list(listed)) for listed in lists] == [3 * there] * 4
        assert (session.exists(), len(session), head is not None) == (there, 3 * there, there)
        assert [i.name for i in home.store.sessions()] == ["s"] * there
        assert home.store.stats()[:2] == (int(there), 3 * there)
        for id in ids:
            for get in (session.load, home.store.get):
                try:
                    get(id)
                    assert there
                except NotFound:
                    assert not there

    agree(there=True)
    for operation, there in (("delete", False), ("undo", True), ("redo", False)):
        getattr(home.session(), operation)()
        agree(there=there)
    home.store.gc()
    agree(there=False)
