"""Saves: their order, steps and times, and what is left after a failed one."""

from __future__ import annotations

import datetime as dt
import math
import os
import sys
from typing import Any

import pytest

import holdfast
from holdfast import ids
from holdfast.errors import HeadMoved, HoldfastError, KeyTaken, NotFound, Unavailable
from holdfast.history import fast_append
from holdfast.history import writer as history_writer
from tests.faults.clock import wall_clock
from tests.support.sessions import DAY, seqs
from tests.support.stores import TEXT, Home, fail


def test_saving_an_equal_state_makes_another_checkpoint(home):
    session = home.session()
    first, second = session.save({"i": 1}), session.save({"i": 1})
    assert first.id != second.id
    assert session.head == second
    assert second.parent == first.id
    assert seqs(session.tree()) == [1, 2]


def test_a_key_is_used_once_in_a_session(home):
    session = home.session()
    session.save({"i": 1}, key="external")
    with pytest.raises(KeyTaken):
        session.save({"i": 2}, key="external")
    assert len(session) == 1
    assert home.reopened().session("s").load("key:external") == {"i": 1}
    session = home.session()
    session.save({"i": 3}, key="other")
    assert session.load("key:external") == {"i": 1}
    assert session.load("key:other") == session.load() == {"i": 3}


def test_saves_within_one_tick_of_the_clock_keep_their_order(home):
    """Ten saves within one tick of a clock that only knows seconds."""
    with wall_clock(math.floor):
        session = home.filled(10)
    for found in (session, home.another().session("s")):
        assert found.load()["i"] == 9
        assert seqs(found.history()) == list(range(10, 0, -1))
        assert [found.load(f"@~{n}")["i"] for n in range(10)] == list(range(9, -1, -1))


def test_saves_keep_their_order_when_the_clock_is_set_back(home):
    saved = [home.session().save({"i": 0})]
    for i, offset in enumerate((-400 * DAY, 0.0, -4000 * DAY, -DAY), start=1):
        with wall_clock(offset.__add__):
            saved.append(home.reopened().session("s").save({"i": i}))
    session = home.session()
    assert session.load() == {"i": 4}
    assert list(session.history()) == saved[::-1]
    assert [c.id for c in saved] == sorted(c.id for c in saved)
    assert [c.created_at for c in saved] == sorted(c.created_at for c in saved)
    assert seqs(saved) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("home", ["sqlite", "files"], indirect=True)
def test_file_times_do_not_decide_the_order(home):
    """They say nothing. (Memory has no files, and those of a server are its own.)"""
    saved = list(home.filled(3).tree())
    home.close()
    paths = sorted(home.folder.rglob("*"))
    for age, path in enumerate(paths):  # the first record becomes the newest file
        os.utime(path, (1e9 - age, 1e9 - age))
    assert len(paths) == 1 if home.kind == "sqlite" else len(paths) > 10
    session = home.reopened().session("s")
    assert session.load()["i"] == 2
    assert list(session.history()) == saved[::-1]
    assert list(session.tree()) == saved
    assert session.save({"i": 3}).parent == saved[2].id
    assert home.store.verify().ok


def test_another_save_on_the_same_parent_is_a_branch(home):
    session = home.filled(3)
    old = session.head
    sibling = session.save({"i": "again"}, parent="@~1")
    assert sibling.step == old.step
    assert sibling.seq == 4
    session = home.reopened().session("s")
    assert session.load() == {"i": "again"}
    assert session.load(old)["i"] == 2
    assert [c.step for c in session.tree()] == [1, 2, 3, 3]


def test_created_at_is_exact(home):
    before = dt.datetime.now(dt.UTC)
    saved = home.session().save({"i": 1})
    after = dt.datetime.now(dt.UTC)
    assert before <= saved.created_at <= after
    session = home.reopened().session("s")
    for found in (session.head, session.get(saved.id), *session.history(), *session.tree()):
        assert found.created_at == saved.created_at
        assert found.created_at.tzinfo is dt.UTC
    with wall_clock(lambda now: 1_700_000_000.123457):
        assert home.session("exact").save(1).created_at.microsecond == 123457
    assert home.session("exact").head.created_at.microsecond == 123457


def test_steps_are_counted_across_restarts(home):
    steps = []
    for i in range(4):
        session = home.reopened().session("s")
        steps += [session.save({"i": i}).step, session.append("log", i).step]
        assert session.step == steps[-1]
    assert steps == [1, 2, 3, 4, 5, 6, 7, 8]


TABLES = ("heads", "checkpoints", "items", "blobs", "marks", "keys")


# What can fail by itself: marks and keys are in the line of the log, and memory has no parts.
PARTS = {"sqlite": TABLES, "postgres": TABLES, "files": TABLES[:4], "memory": TABLES[:1]}


@pytest.mark.parametrize(
    ("home", "table"), [(k, t) for k in PARTS for t in PARTS[k]], indirect=["home"]
)
def test_a_failed_save_leaves_nothing(home, table):
    session = home.filled(2)
    state = {"i": 2, "log": [TEXT] * 9, "big": TEXT * 99}
    fields: dict[str, Any] = {"label": "l", "key": "k"}
    with home.failing(table), pytest.raises(HoldfastError):
        session.save(state, **fields)
    for again in (session, home.another().session("s")):
        assert again.load()["i"] == 1
        assert len(again) == 2
        assert again.verify().ok
        with pytest.raises(NotFound):
            again.get("label:l")
    assert session.save(state, **fields).step == 3
    assert home.reopened().session("s").load("key:k") == state


def test_an_error_while_reading_the_parent_makes_no_root(home, monkeypatch):
    home.filled(2)
    stale = home.session()
    home.another().session("s").save({"i": 2})
    with monkeypatch.context() as patch:
        patch.setattr(home.store._repository.backend, "view", fail)
        with pytest.raises(Unavailable):
            home.session()
        with pytest.raises(Unavailable):
            stale.save({"i": "a root?"})
    with pytest.raises(HeadMoved):
        stale.save({"i": "a root?"})
    session = home.session()
    assert [c.parent is None for c in session.tree()] == [True, False, False]
    assert session.save({"i": 3}).parent == next(session.history("@~1")).id


def test_nan_and_infinity_are_kept(home):
    state = {
        "loss": math.nan,
        "worst": math.inf,
        "best": -math.inf,
        "zero": -0.0,
        "log": [math.nan],
    }
    home.session().save(state)
    home.session().append("log", math.nan)
    found = home.reopened().session("s").load()
    assert math.isnan(found["loss"])
    assert all(math.isnan(x) for x in found["log"])
    assert (found["worst"], found["best"]) == (math.inf, -math.inf)
    assert math.copysign(1, found["zero"]) == -1
    assert home.session().save(state | {"log": [math.nan] * 2}).added < 500


def test_a_head_that_was_replaced_is_noticed(home: Home) -> None:
    """As after a crash that lost ours, with `durability="normal"`: to try again would not end."""
    session = home.session()
    session.save({"n": 1})
    writer = session._writer
    assert writer.parent is not None
    writer.parent = writer.parent._replace(id=ids.new_id(writer.parent.id))
    home.store.session("s").tag("@", "t")  # the head's row is another
    with pytest.raises(holdfast.HeadMoved):
        session.save({"n": 2})
    session.refresh()
    session.save({"n": 3})
    assert [home.store.session("s").load(c)["n"] for c in session.history()] == [3, 1]


@pytest.mark.parametrize("hot", [False, True])
def test_a_handle_is_consistent_at_every_line_of_a_save(sqlite: Home, *, hot: bool) -> None:
    """A process that is forked off while a thread saves has a handle between two assignments."""
    session = sqlite.session()
    session.save({"log": [TEXT] * 9})
    session.append("log", TEXT)
    code = (fast_append.grow if hot else history_writer.Writer._commit_state).__code__
    writer = session._writer
    seen = []

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code is not code:
            return None
        if event == "line":
            seen.append((writer.head.last, writer.parent and writer.parent.place.seq))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        session.append("log", TEXT, label=None if hot else "x")
    finally:
        sys.settrace(before)
    assert {head - (parent or 0) for head, parent in seen} == {
        0,
        -1,
    }  # never a parent that is behind
