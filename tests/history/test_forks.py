"""Forks know their origin, outlive it, and never replace a session."""

from __future__ import annotations

import threading

import pytest

import holdfast
from holdfast.errors import SessionExists
from tests.support.sessions import seqs
from tests.support.stores import Home


def test_a_fork_knows_its_origin(home):
    origin = home.filled(3)
    fork = origin.fork("fork", at="@~1")
    assert fork.head.parent == origin.get("@~1").id
    assert fork.head.parent_session == "s"
    fork.append("log", "mine")
    fork = home.reopened().session("fork")
    assert [c.session for c in fork.history()] == ["fork", "fork", "s", "s"]
    assert fork.load()["log"][-1] == "mine"
    assert fork.load("@~2")["i"] == 1
    assert [c.step for c in fork.history()] == [4, 3, 2, 1]
    assert len(home.session()) == 3
    assert home.session().load()["i"] == 2


def test_a_fork_onto_an_existing_session_is_refused(home):
    origin, taken = home.filled(3), home.filled(2, "taken")
    for _ in range(2):
        with pytest.raises(SessionExists):
            origin.fork("taken")
    with pytest.raises(SessionExists):
        origin.fork("s")
    assert len(taken) == 2
    assert taken.load()["i"] == 1
    origin.fork("new")
    with pytest.raises(SessionExists):
        home.another().session("s").fork("new")
    assert len(home.session("new")) == 1


def test_one_of_several_forks_at_once_wins(home):
    home.filled(2)
    barrier = threading.Barrier(4)
    outcomes: list[str] = []

    def fork(store: holdfast.Store) -> None:
        session = store.session("s")
        barrier.wait()
        try:
            session.fork("wanted")
            outcomes.append("made")
        except SessionExists:
            outcomes.append("refused")

    stores = [home.store, home.another()] * 2
    threads = [threading.Thread(target=fork, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["made", "refused", "refused", "refused"]
    assert len(home.session("wanted")) == 1


def test_a_fork_outlives_its_origin(home: Home) -> None:
    origin = home.filled(4)
    fork = origin.fork("f", "@~1")
    fork.append("log", "mine")
    point = origin.get("@~1").id
    for _ in range(2):
        origin.delete()
        home.store.gc()
        fork = home.reopened().session("f")
        assert fork.load()["log"][-1] == "mine"
        assert [(c.session, c.step, c.pruned) for c in fork.history()] == [("f", 5, 0), ("f", 4, 3)]
        first = next(iter(fork.tree()))
        assert (first.parent, first.parent_session, first.ancestor) == (point, "s", None)
        origin = home.filled(3)  # another of that name is not taken for it
        assert seqs(fork.history()) == [2, 1]
        assert home.store.verify(read_data=True).ok


def test_a_fork_takes_the_name_of_a_deleted_session(home: Home) -> None:
    """Neither of the two lives is appended to the other."""
    home.filled(3)
    home.session().delete()
    fork = home.filled(2, "other").fork("s")
    assert len(fork) == 1
    with pytest.raises(SessionExists):
        home.session("other").fork("s")
    assert fork.load()["i"] == 1
    home.session().undo()  # of the fork
    assert not home.session().exists()
    assert [i.name for i in home.store.sessions()] == ["other"]
