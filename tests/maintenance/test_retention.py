"""Retention takes what its rules say and nothing that is protected, and can be taken back."""

from __future__ import annotations

import datetime as dt
import itertools
import logging
import math
import random
import time
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

import holdfast
from holdfast import Retention, clock
from holdfast.errors import InvalidRequest
from holdfast.format import load as loading
from holdfast.maintenance import autoprune
from holdfast.maintenance.retention import seconds
from holdfast.storage import repository
from holdfast.storage.repository import Repository
from tests.faults.clock import wall_clock
from tests.mutants import maintenance
from tests.support.sessions import KEEP_LAST, found_seqs, save_random, seqs
from tests.support.stores import Home, prune_unlogged

HOUR, DAY = 3_600, 86_400
START = dt.datetime(2030, 3, 4, 12, tzinfo=dt.UTC)  # a Monday


class Clock:
    """The wall clock and the machine's uptime, each set as a test likes."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = START
        self.up = 1_000
        self.boot = "this boot"
        patch.setattr(time, "time_ns", lambda: int(self.now.timestamp() * 1_000_000) * 1_000)
        patch.setattr(clock, "uptime", lambda: (self.boot, self.up))

    def wait(self, seconds: float) -> None:
        """Time passes; a jump of the clock alone is no such thing."""
        self.now += dt.timedelta(seconds=seconds)
        self.up += int(seconds)


@pytest.fixture
def time_(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def tree_seqs(session: holdfast.Session) -> list[int]:
    return [c.seq for c in session.tree()]


def why(session: holdfast.Session, **rule: Any) -> dict[int, str]:
    """What a rule would take, with the reasons; that a dry run changes nothing, on the way."""
    before = _rows(session._repository)
    plan = session.prune(Retention(**rule), dry_run=True)
    assert _rows(session._repository) == before
    assert [v.checkpoint.seq for v in plan.verdicts] == tree_seqs(session)
    assert {*plan.kept} | {*plan.removed} == {*plan.verdicts}
    return {v.checkpoint.seq: v.reason for v in plan.removed}


def _rows(repository: Repository) -> Any:
    with repository.reader() as reader:
        heads = [reader.head(n) for n in range(20)]
        return reader.sizes(), heads, reader.all_tombstones(-1, 999)


# -- the rules -------------------------------------------------------------------------------------


def test_keep_last(home: Home) -> None:
    session = home.filled(6)
    assert why(session, keep_last=2) == dict.fromkeys([1, 2, 3, 4], "not kept by keep_last=2")
    assert why(session, keep_last=6) == why(session, keep_last=99) == {}
    plan = session.prune(Retention(keep_last=3))
    reasons = [v.reason for v in plan.kept]
    assert reasons == ["one of the last 3", "one of the last 3", "the head"]
    assert tree_seqs(session) == [4, 5, 6]
    assert "3 of 6 go" in str(plan)
    assert "drop  step 1" in str(plan)
    assert session.prune(Retention(keep_last=3)).removed == ()
    assert [o.kind for o in session.operations()] == ["prune"]  # what did nothing is no operation


def test_keep_every_so_many_steps(home: Home) -> None:
    session = home.filled(10)
    rule = Retention(keep_every=4, keep_last=2)
    plan = session.prune(rule)
    assert tree_seqs(session) == [4, 8, 9, 10]
    assert [v.reason for v in plan.kept[:2]] == ["every 4 steps"] * 2


@pytest.mark.parametrize(
    ("period", "step", "kept"),
    [
        # Twelve checkpoints, the first on a Monday at noon; the last of each period stays.
        ("hour", 20 * 60, [3, 6, 9, 12]),
        ("day", 6 * HOUR, [2, 6, 10, 12]),
        ("week", 2 * DAY, [4, 7, 11, 12]),
        ("month", 7 * DAY, [4, 9, 12]),
    ],
)
def test_keep_every_period(
    home: Home, time_: Clock, period: str, step: int, kept: list[int]
) -> None:
    session = home.session()
    for i in range(12):
        session.save({"i": i})
        time_.wait(step)
    plan = session.prune(Retention(keep_every=period), dry_run=True)
    assert [v.checkpoint.seq for v in plan.kept] == kept
    assert plan.kept[0].reason == f"the newest of its {period}"
    newest = {}
    for c in session.tree():
        t = c.created_at
        key = {
            "hour": t.strftime("%F %H"),
            "day": t.strftime("%F"),
            "week": t.strftime("%G %V"),
            "month": t.strftime("%Y %m"),
        }[period]
        newest[key] = c.seq
    assert kept == sorted(newest.values())


def test_max_age(home: Home, time_: Clock) -> None:
    session = home.session()
    for i in range(6):
        session.save({"i": i})
        time_.wait(DAY)
    assert why(session, max_age="3d") == dict.fromkeys([1, 2, 3], "older than 3d")
    assert why(session, max_age=dt.timedelta(hours=25)) == dict.fromkeys(
        [1, 2, 3, 4, 5], "older than 1 day, 1:00:00"
    )
    assert list(why(session, max_age="72.5h")) == [1, 2, 3]
    # With both it must pass both.
    assert why(session, max_age="3d", keep_last=2) == dict.fromkeys(
        [1, 2, 3, 4], "not kept by keep_last=2, max_age=3d"
    )
    assert list(why(session, max_age="2d", keep_last=4)) == [1, 2, 3, 4]
    plan = session.prune(Retention(max_age="3d", keep_last=5))
    assert [(v.checkpoint.seq, v.by_age) for v in plan.removed] == [
        (1, False),
        (2, True),
        (3, True),
    ]


def test_the_head_stays_however_old(home: Home, time_: Clock) -> None:
    session = home.filled(3)
    time_.wait(1000 * DAY)
    assert list(why(session, max_age="1s")) == [1, 2]


def test_max_bytes(home: Home) -> None:
    session = home.session()
    rng = random.Random(1)
    for i in range(8):
        session.save({"i": i, "text": rng.randbytes(2_000)}, tags=["t"] if i == 1 else [])
    added = {c.seq: c.added for c in session.tree()}
    limit = sum(added.values()) - added[1] - 1
    # The oldest that is not protected goes, until the rest fits.
    assert why(session, max_bytes=sum(added.values())) == {}
    assert why(session, max_bytes=limit + 1) == {1: f"over max_bytes={limit + 1}"}
    assert list(why(session, max_bytes=limit)) == [1, 3]
    assert list(why(session, max_bytes=limit, keep_tagged=False)) == [1, 2]
    assert list(why(session, max_bytes=1)) == [1, 3, 4, 5, 6, 7]
    session.prune(Retention(max_bytes=limit))
    assert sum(c.added for c in session.tree()) <= limit


def test_store_bytes(home: Home, time_: Clock) -> None:
    """The oldest of all sessions go first."""
    sessions = [home.session("a"), home.session("b"), home.session("c")]
    for i in range(12):
        sessions[i % 3].save({"i": i, "raw": random.Random(i).randbytes(1_000)})
        time_.wait(60)
    everything = sum(c.added for s in sessions for c in s.tree())
    one = next(iter(sessions[0].tree())).added
    before = _rows(home.store._repository)
    limit = everything - 4 * one
    plans = home.store.prune(Retention(store_bytes=limit), dry_run=True)
    assert _rows(home.store._repository) == before
    home.store.prune(Retention(store_bytes=limit))
    assert [p.session for p in plans] == ["a", "b", "c"]
    assert [v.reason for p in plans for v in p.removed] == [f"over store_bytes={limit}"] * 4
    assert [tree_seqs(s) for s in sessions] == [[3, 4], [2, 3, 4], [2, 3, 4]]
    for s in sessions:
        s.undo()
    assert [tree_seqs(s) for s in sessions] == [[1, 2, 3, 4]] * 3


def test_prune_of_one_agent(home: Home) -> None:
    for name, agent in (("a", "planner"), ("b", "writer"), ("c", "planner"), ("d", None)):
        session = home.store.session(name, agent=agent)
        for n in range(4):
            session.save({"n": n})
    keep = Retention(keep_last=1)
    plans = home.store.prune(keep, agent="planner", dry_run=True)
    assert [(plan.session, plan.deleted) for plan in plans] == [("a", 3), ("c", 3)]
    assert home.store.prune(keep, agent="nobody") == []
    done = home.store.prune(keep, agent="planner")
    assert sum(plan.deleted for plan in done) == 6
    assert [info.checkpoints for info in home.store.sessions()] == [1, 4, 1, 4]


def test_prune_of_one_agent_leaves_damaged_sessions(home: Home) -> None:
    home.filled(4)
    home.spoil_session()
    assert home.reopened().prune(Retention(keep_last=1), agent="planner") == []


def test_session_ttl(home: Home, time_: Clock) -> None:
    old = home.filled(3, "old")
    time_.wait(2 * DAY)
    home.filled(3, "new")
    time_.wait(DAY)
    rule = Retention(session_ttl="2d")
    plans = home.store.prune(rule, dry_run=True)
    assert [p.whole for p in plans] == [None, "nothing was saved for 2d"]
    assert "all of it goes" in str(plans[1])
    assert old.exists()
    home.store.prune(rule)
    assert [i.name for i in home.store.sessions()] == ["new"]
    assert home.store.gc().sessions == 0  # chosen by a clock, so not freed yet
    old.undo()
    assert tree_seqs(old) == [1, 2, 3]
    old.prune(rule)
    time_.wait(DAY + 1)
    assert home.store.gc().sessions == 1
    assert [i.name for i in home.store.sessions()] == ["new"]
    assert home.store.verify(read_data=True).ok


def test_a_session_that_is_run_is_left_for_the_next_time(home: Home, time_: Clock) -> None:
    for name in ("before", "run", "then"):
        home.filled(2, name)
    rule = Retention(session_ttl="2d")
    with home.session("run").run():
        time_.wait(3 * DAY)
        assert [plan.session for plan in home.store.prune(rule)] == ["before", "then"]
        assert [i.name for i in home.store.sessions()] == ["run"]
    time_.wait(3 * DAY)
    home.store.prune(rule)
    assert not list(home.store.sessions())


@pytest.mark.parametrize("keep", [True, False])
def test_marks_protect(home: Home, keep: bool) -> None:
    session = home.filled(5)
    session.tag("@~3", "t", "u")
    session.label("@~2", "l")
    assert 2 not in why(session, keep_last=1, keep_labelled=keep)
    assert 3 not in why(session, keep_last=1, keep_tagged=keep)
    assert (2 in why(session, keep_last=1, keep_tagged=keep)) is not keep
    assert (3 in why(session, keep_last=1, keep_labelled=keep)) is not keep
    plan = session.prune(Retention(keep_last=1), dry_run=True)
    assert [v.reason for v in plan.kept] == ["tagged t, u", "labelled 'l'", "the head"]
    assert all(v.protected for v in plan.kept)


def test_a_fork_point_stays(home: Home) -> None:
    session = home.filled(5)
    session.fork("f", "@~3")
    plan = session.prune(Retention(keep_last=1))
    assert [(v.checkpoint.seq, v.reason) for v in plan.kept] == [
        (2, "a session was forked from it"),
        (5, "the head"),
    ]


def test_the_head_may_be_old(home: Home) -> None:
    """After a rewind the newest are not those of the head."""
    session = home.filled(6)
    session.rewind("@~4")
    session.prune(Retention(keep_last=2))
    assert tree_seqs(session) == [2, 5, 6]
    assert session.load()["i"] == 1
    assert session.get().pruned == 1


@pytest.mark.parametrize(
    "rule",
    [
        {},
        {"keep_tagged": False},
        {"keep_last": 0},
        {"keep_last": -1},
        {"keep_last": True},
        {"keep_last": 2.0},
        {"keep_last": "3"},
        {"keep_every": 0},
        {"keep_every": "year"},
        {"keep_every": "Hour"},
        {"keep_every": 1.5},
        {"keep_every": True},
        {"max_age": 30},
        {"max_age": "30"},
        {"max_age": "d"},
        {"max_age": "-3d"},
        {"max_age": "0d"},
        {"max_age": "3 years"},
        {"max_age": "30d\n"},
        {"max_age": dt.timedelta()},
        {"max_age": dt.timedelta(days=-1)},
        {"session_ttl": 5},
        {"session_ttl": ""},
        {"max_bytes": 0},
        {"max_bytes": 1e6},
        {"store_bytes": -1},
        {"store_bytes": "1MB"},
    ],
)
def test_rules_that_make_no_sense(rule: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        Retention(**rule)


@pytest.mark.parametrize("rule", [None, 5, {"keep_last": 3}, "30d"])
def test_what_is_no_rule(home: Home, rule: Any) -> None:
    session = home.store.session("a")
    with pytest.raises(holdfast.InvalidRequest, match="not a rule"):
        home.store.prune(rule)
    session.save({"n": 1})
    with pytest.raises(holdfast.InvalidRequest, match="not a rule"):
        session.prune(rule)


def test_lengths_of_time() -> None:
    given = ["90s", "15m", "12h", "30d", "4w", "1.5h", "2 d", "30 days", "1 day", "12 Hours",
             "15 min", "90 seconds", "2 weeks"]  # fmt: skip
    assert [seconds(g, "x") for g in given] == [
        90, 900, 12 * HOUR, 30 * DAY, 28 * DAY, 5_400, 2 * DAY, 30 * DAY, DAY, 12 * HOUR,
        900, 90, 14 * DAY,
    ]  # fmt: skip
    for wrong in ("3 years", "30", "30 d ", "x days", 30):
        with pytest.raises(InvalidRequest, match="max_age is not a length of time") as refused:
            Retention(max_age=wrong)  # type: ignore[arg-type]
        assert "30 days" in str(refused.value.hint)
    assert seconds(dt.timedelta(hours=1, microseconds=1), "x") == 3600.000001


# -- what must hold --------------------------------------------------------------------------------

RULES = st.builds(
    lambda keep_last, keep_every, max_age, max_bytes, tagged, labelled: Retention(
        keep_last=keep_last,
        keep_every=keep_every,
        max_age=max_age,
        max_bytes=max_bytes if (keep_last or keep_every or max_age) else 700,
        keep_tagged=tagged,
        keep_labelled=labelled,
    ),
    st.none() | st.integers(1, 8),
    st.none() | st.integers(1, 5) | st.sampled_from(["hour", "day"]),
    st.none() | st.sampled_from(["1h", "5h", "2d"]),
    st.none() | st.integers(1, 3_000),
    st.booleans(),
    st.booleans(),
)


@settings(max_examples=40)
@given(rule=RULES, seed=st.integers(0, 2**32), freeing=st.booleans())
def test_protected_ones_stay(rule: Retention, seed: int, freeing: bool) -> None:
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch, holdfast.open("memory:") as store:
        time_ = Clock(patch)
        session = store.session("s")
        forked = set()
        for i in range(rng.randrange(2, 25)):
            marks: Any = rng.choice([{}, {}, {"tags": ["t"]}, {"label": f"l{i}"}])
            session.save({"i": i, "log": ["x" * rng.randrange(300)]}, **marks)
            time_.wait(rng.choice([1, HOUR, 7 * HOUR]))
            if rng.random() < 0.1:
                at = rng.choice(list(session.tree()))
                forked.add(at.id)
                session.fork(f"f{i}", at)
            if rng.random() < 0.1:
                session.rewind(rng.choice(list(session.tree())))
        before = {c.id: c for c in session.tree()}
        states = {id: session.load(id) for id in before}
        head = session.get()
        plan = session.prune(rule)
        left = {c.id for c in session.tree()}
        gone = before.keys() - left
        assert gone == {v.checkpoint.id for v in plan.removed}
        assert gone == _model(rule, [*before.values()], head.id, forked, time_.now)
        assert head.id in left
        assert forked <= left
        assert session.get() == head
        if freeing:
            freed = store.gc()
            assert freed.checkpoints + freed.held == len(gone)
        elif gone:
            session.undo()
            left = {c.id for c in session.tree()}
            assert left == before.keys()
        for id in left:
            assert session.load(id) == states[id]
        assert {c.id for c in session.tree()} == left
        _connected(store)
        assert store.verify(read_data=True).ok


def _model(
    rule: Retention,
    tree: list[holdfast.Checkpoint],
    head: str,
    forked: set[str],
    now: dt.datetime,
) -> set[str]:
    """The ids that a rule takes, in the plainest way."""

    def protected(c: holdfast.Checkpoint) -> bool:
        marked = (rule.keep_tagged and c.tags) or (rule.keep_labelled and c.label)
        return c.id == head or c.id in forked or bool(marked)

    chosen = {c.id for c in tree}
    if rule.keep_last or rule.keep_every:
        chosen = {c.id for c in tree[-rule.keep_last :]} if rule.keep_last else set()
        if isinstance(rule.keep_every, int):
            chosen |= {c.id for c in tree if c.step % rule.keep_every == 0}
        elif rule.keep_every:
            form = {"hour": "%F %H", "day": "%F"}[rule.keep_every]
            chosen |= {c.id for c in {c.created_at.strftime(form): c for c in tree}.values()}
    if rule.max_age:
        oldest = now - dt.timedelta(seconds=seconds(rule.max_age, ""))
        chosen = {c.id for c in tree if c.id in chosen and c.created_at >= oldest}
    left = [c for c in tree if protected(c) or c.id in chosen]
    if rule.max_bytes:
        for c in list(left):
            if sum(k.added for k in left) > rule.max_bytes and not protected(c):
                left.remove(c)
    return {c.id for c in tree} - {c.id for c in left}


def _connected(store: holdfast.Store) -> None:
    """Every line leads to a root, with what is missing counted."""
    for info in store.sessions():
        session = store.session(info.name)
        line = list(session.history())
        for child, above in itertools.pairwise(line):
            assert child.ancestor == above.id
            assert child.pruned == child.step - above.step - 1
        assert line[-1].ancestor is None
        assert line[-1].pruned == line[-1].step - 1
        everything = {c.id: c for c in session.tree()}
        for c in everything.values():
            one = session.get(c)
            assert one.ancestor is None or store.get(one.ancestor)
            assert one.pruned == c.step - 1 - (store.get(one.ancestor).step if one.ancestor else 0)


def test_planning_loads_no_state(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    session = home.filled(30)
    home.filled(5, "other")

    def never(*args: Any, **more: Any) -> Any:
        raise AssertionError("a state was loaded")

    monkeypatch.setattr(loading, "load", never)
    monkeypatch.setattr(repository.StoredData, "__init__", never)
    rules = [
        Retention(keep_last=3, keep_every="day"),
        Retention(max_age="1s", max_bytes=99, session_ttl="9w"),
    ]
    for rule in rules:
        assert session.prune(rule, dry_run=True).verdicts
        assert home.store.prune(rule, dry_run=True)
    assert len(session.prune(rules[0]).removed) == 27
    with pytest.raises(AssertionError):
        session.load()


@pytest.mark.parametrize("gap", [1, 5, 40])
def test_trees_stay_connected(home: Home, gap: int) -> None:
    """Over pruning and gc, again and again, in the middle of forks of forks."""
    rng = random.Random(gap)
    sessions = [home.session("s")]
    for i in range(120):
        session = rng.choice(sessions)
        session.save({"i": i, "log": list(range(i))})
        if i % 30 == 20:
            at = rng.choice(list(session.history()))
            sessions.append(session.fork(f"f{i}", at))
        if i % 25 == 24:
            session.rewind(rng.choice(list(session.tree())))
        if i % 20 == 19:
            for s in sessions:
                if s.exists():
                    s.prune(Retention(keep_last=3, keep_every=gap))
            _connected(home.store)
            home.store.gc()
            _connected(home.store)
    for s in sessions:  # now without the protection of fork points
        for c in list(s.tree()):
            if c.id != s.get().id and rng.random() < 0.7:
                s.delete(c)
    _connected(home.store)
    assert home.store.gc().checkpoints > 0
    _connected(home.store)
    assert home.store.verify(read_data=True).ok


def test_the_first_of_a_fork_knows_what_is_missing(home: Home) -> None:
    """Its parent's seq is that of another session, and may be its own."""
    session = home.filled(3)
    first = session.get("@~2")
    fork = session.fork("f", first)
    session.delete(first)
    [listed] = fork.tree()
    assert (listed.ancestor, listed.pruned) == (None, 1)


# -- a clock that is wrong -------------------------------------------------------------------------


def test_a_jump_of_the_clock_frees_nothing(home: Home, time_: Clock) -> None:
    session = home.filled(10)
    states = {c.id: session.load(c) for c in session.tree()}
    time_.now += dt.timedelta(days=3_650)
    session.prune(Retention(max_age="30d"))
    assert tree_seqs(session) == [10]
    freed = home.store.gc()
    assert (freed.checkpoints, freed.held) == (0, 9)
    time_.up += DAY - 1
    assert home.store.gc().held == 9
    session.undo()
    assert {c.id: session.load(c) for c in session.tree()} == states
    assert home.store.verify(read_data=True).ok


def test_a_day_later_it_is_freed(home: Home, time_: Clock) -> None:
    session = home.filled(10)
    time_.now += dt.timedelta(days=3_650)
    session.prune(Retention(max_age="30d"))
    time_.now += dt.timedelta(days=3_650)  # only time that passes counts
    assert home.store.gc().held == 9
    time_.up += DAY
    freed = home.store.gc()
    assert (freed.checkpoints, freed.held) == (9, 0)
    with pytest.raises(InvalidRequest):
        session.undo()
    assert session.load()["i"] == 9
    assert home.store.verify(read_data=True).ok


def test_after_a_reboot_the_wall_clock_counts(home: Home, time_: Clock) -> None:
    session = home.filled(3)
    time_.wait(90 * DAY)
    session.prune(Retention(max_age="30d"))
    time_.boot, time_.up = "the next boot", 5
    assert home.store.gc().held == 2
    time_.wait(DAY)
    assert home.store.gc().checkpoints == 2


def test_what_goes_by_number_is_freed_at_once(home: Home, time_: Clock) -> None:
    session = home.filled(10)
    time_.wait(90 * DAY)
    session.prune(Retention(keep_last=5, max_age="30d"))
    assert home.store.gc()[::3] == (5, 4)


def test_pruned_by_age_again_after_undo(home: Home, time_: Clock) -> None:
    """Undo and redo begin the day anew."""
    session = home.filled(5)
    time_.wait(90 * DAY)
    session.prune(Retention(max_age="30d"))
    time_.wait(DAY - 10)
    session.undo()
    session.redo()
    time_.wait(20)
    assert home.store.gc().held == 4
    time_.wait(DAY)
    assert home.store.gc().checkpoints == 4


# -- by itself -------------------------------------------------------------------------------------


def kept_small(home: Home, saves: int, rule: Retention) -> tuple[int, int, int]:
    """The most checkpoints and bytes that there ever were, and the bytes at the end."""
    store = home.store
    store.retention = rule
    session = store.session("s")
    counts, sizes = [], []
    for i in range(saves):
        session.save({"i": i, "raw": random.Random(i).randbytes(1_500)})
        assert store._pruner is not None
        store._pruner.close()  # how soon that thread gets its turn is not the question here
        if i % 20 == 19:
            counts.append(len(session))
            sizes.append(home.size())
    return max(counts), max(sizes), sizes[-1]


def test_automatic_retention_bounds_the_store(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoprune, "_ENOUGH", 64)
    most, largest, _ = kept_small(home, 400, Retention(keep_last=20))
    assert most < 20 + 16
    session = home.session()
    assert session.load()["i"] == 399
    assert largest < 350_000  # without retention, 400 are more than 500 000
    home.store.gc()
    assert home.store.verify(read_data=True).ok
    assert home.store.stats().deleted == 0
    # The log of the clean-ups is bounded, too.
    assert len(session.operations()) < 3


def test_without_retention_it_grows(home: Home) -> None:
    """What the bounds of the test before are worth."""
    home.filled(1, "other")
    session = home.session()
    for i in range(400):
        session.save({"i": i, "raw": random.Random(i).randbytes(1_500)})
    assert len(session) == 400
    assert home.size() > 500_000


def test_retention_is_given_at_open(tmp_path: Path) -> None:
    rule = Retention(keep_last=5)
    for url in ("memory:", tmp_path / "s.db"):
        with holdfast.open(url, retention=rule, durability="normal") as store:
            session = store.session("s")
            for i in range(40):
                session.append("log", i)
                assert session.load()["log"][-1] == i
            assert len(session) < 5 + 16
            assert prune_unlogged(session, rule).removed
            assert len(session) == 5


@pytest.mark.parametrize("keep", [1, 5, 200])
def test_automatic_retention_is_a_maximum(home: Home, keep: int) -> None:
    """After every save, by handles that live long or for one save, and in a new session."""
    home.store.retention = Retention(keep_last=keep)
    session, other, slack = home.session(), home.session(), max(16, keep // 8)
    for i in range(keep + 4 * slack):
        lasting = session if i % 16 in (0, 15) else other
        (home.session() if i % 3 else lasting).save({"i": i})
        session.refresh()
        other.refresh()
        assert min(i + 1, keep) <= len(session) <= keep + slack
    session.delete()
    for i in range(keep + 3 * slack):
        session.save({"i": i})
        assert len(session) <= keep + slack
    home.store.retention = Retention(keep_last=1)
    for i in range(16):
        session.save({"i": i})
    assert len(session) <= 1 + 16


def test_exact_retention_keeps_no_more(home: Home) -> None:
    home.store.retention = Retention(keep_last=3, exact=True)
    session = home.session()
    for i in range(20):
        session.save({"i": i}, label="kept" if i == 4 else None)
        assert len(session) == min(i + 1, 3) + (i > 6)
        assert session.load() == {"i": i}
    home.store.retention = Retention(keep_last=1, exact=True)
    assert len(session) == 4
    session.append("log", 1)
    assert [c.label for c in session.tree()] == ["kept", None]
    [plan] = home.store.prune(Retention(keep_last=9, keep_labelled=False, exact=True))
    assert not plan.removed


def test_several_sessions_are_cleaned(home: Home) -> None:
    home.store.retention = Retention(keep_last=4)
    sessions = [home.session(f"s{n}") for n in range(3)]
    for i in range(32):
        for session in sessions:
            session.patch(set={"i": i})
    assert [len(s) for s in sessions] == [4, 4, 4]


def test_space_is_freed_while_a_session_is_run(home: Home, time_: Clock) -> None:
    home.filled(2, "run")
    with home.session("run").run():
        time_.wait(3 * DAY)
        home.filled(2, "new").delete("@~1")
        home.store.retention = Retention(session_ttl="2d")
        tidier = home.store._pruner
        assert tidier is not None
        tidier._start()
        tidier.close()
        assert home.store.stats().deleted == 0


@pytest.mark.parametrize("what", ["prune", "collect"])
def test_a_failed_clean_up_fails_no_save(
    home: Home, what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    called = []

    def fail(*args: Any, **more: Any) -> Any:
        called.append(1)
        raise RuntimeError("injected")

    monkeypatch.setattr(autoprune, "_ENOUGH", 1)
    if what == "prune":
        monkeypatch.setattr(autoprune.AutoPruner, "prune", fail)
    else:
        monkeypatch.setattr(autoprune, "collect", fail)
    home.store.retention = Retention(keep_last=2)
    session = home.session()
    with caplog.at_level(logging.ERROR, logger="holdfast"):
        for i in range(40):
            saved = session.save({"i": i})
            assert saved.seq == i + 1
            assert session.get() == saved
            assert home.store._pruner is not None
            home.store._pruner.close()
    assert len(called) == 2
    told = {
        "prune": "pruning after a save of session 's' failed",
        "collect": "freeing what was deleted failed",
    }
    assert [r.message for r in caplog.records] == [told[what]] * 2
    assert "injected" in caplog.text
    monkeypatch.undo()
    home.store.gc()
    assert home.store.verify(read_data=True).ok


# -- the tests see what they should: each of these changes to the engine makes one fail ------------


def test_mutant_that_frees_at_once(
    memory: Home, time_: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    maintenance.expired_sessions_are_freed_at_once(monkeypatch)
    with pytest.raises(AssertionError):
        test_a_jump_of_the_clock_frees_nothing(memory, time_)


def test_mutant_that_trusts_the_wall_clock(
    memory: Home, time_: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    maintenance.expiry_trusts_the_wall_clock(monkeypatch)
    with pytest.raises(AssertionError):
        test_a_day_later_it_is_freed(memory, time_)


def test_mutant_without_fork_points(memory: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    maintenance.fork_points_are_not_kept(monkeypatch)
    with pytest.raises(AssertionError):
        test_a_fork_point_stays(memory)


def test_mutant_without_gaps(memory: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    maintenance.no_grafts(monkeypatch)
    with pytest.raises(AssertionError):
        test_trees_stay_connected(memory, 5)


def test_mutant_whose_save_fails(
    memory: Home, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    maintenance.pruning_fails_the_save(monkeypatch)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError):
        test_a_failed_clean_up_fails_no_save(memory, "prune", patch, caplog)


def test_mutant_that_never_collects(memory: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    maintenance.automatic_retention_frees_nothing(monkeypatch)
    with pytest.raises(AssertionError), pytest.MonkeyPatch.context() as patch:
        test_automatic_retention_bounds_the_store(memory, patch)


@pytest.mark.parametrize("rule", ["keep_last", "keep_every", "max_bytes", "store_bytes"])
def test_prune_keeps_the_newest_within_one_tick_of_the_clock(home: Home, rule: str) -> None:
    """Ten saves within one tick of a clock that only knows seconds."""
    with wall_clock(math.floor):
        session = save_random(home.session(), 10)
        assert found_seqs(home) == found_seqs(home, limit=10) == list(range(10, 0, -1))
        three = sum(c.added for c in session.tree() if c.seq > 7)
        value: Any = {"keep_last": 3, "keep_every": "hour"}.get(rule, three)
        home.store.prune(Retention(**{rule: value}))
    assert seqs(session.tree()) == ([10] if rule == "keep_every" else [8, 9, 10])
    assert home.reopened().session("s").load()["i"] == 9


def test_store_bytes_removes_in_the_order_of_saves(home: Home) -> None:
    """Within a session the oldest are those saved first, whatever the clock said."""
    session = save_random(home.session(), 5)
    session.rewind("@~4")
    with wall_clock(lambda now: now - DAY):
        save_random(session, 3)
    total = sum(c.added for c in session.tree())
    [plan] = home.store.prune(Retention(store_bytes=total - 1_500), dry_run=True)
    assert [v.checkpoint.seq for v in plan.removed] == [1, 2]


ONE_RULE_EACH: dict[str, Any] = {
    "keep_last": 3, "keep_every": 7, "max_age": "10h", "max_bytes": 5_000, "session_ttl": "20h",
    "store_bytes": 9_000,
}  # fmt: skip


@pytest.mark.parametrize("name", ONE_RULE_EACH)
@pytest.mark.parametrize("by_itself", [False, True], ids=["asked", "by itself"])
def test_every_rule_removes_what_it_says(home: Home, name: str, by_itself: bool) -> None:
    rule = Retention(**{name: ONE_RULE_EACH[name]})
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock(patch)
        patch.setattr(autoprune, "_SLACK", 2)
        patch.setattr(autoprune, "_EXPIRY", 0)
        save_random(home.session("idle"), 4)
        if by_itself and name == "store_bytes":
            with pytest.raises(InvalidRequest):
                holdfast.open("memory:", retention=rule)
            return
        if by_itself:
            home.store.retention = rule
        for i in range(32):
            clock.wait(3_600)
            save_random(home.session(), 1)
            assert home.session().step == i + 1
            if home.store._pruner is not None:
                home.store._pruner.close()  # one under way is not started a second time
        if not by_itself:
            assert len(home.session()) == 32
            home.store.prune(rule)
        home.store.retention = None  # waits for what is under way
    kept = [c.seq for c in home.session().tree()]
    if name == "session_ttl":
        assert [i.name for i in home.store.sessions()] == ["s"]
        return
    everything = {
        "keep_last": [30, 31, 32],
        "keep_every": [7, 14, 21, 28, 32],
        "max_age": list(range(22, 33)),
        "max_bytes": [29, 30, 31, 32],
        "store_bytes": list(range(26, 33)),  # and the head of the idle one
    }
    assert kept == everything[name]


@pytest.mark.parametrize("mark", ["tagged", "labelled"])
def test_marks_protect_unless_the_rule_says_otherwise(home: Home, mark: str) -> None:
    fields: Any = {"tags": ["t"]} if mark == "tagged" else {"label": "l"}
    session = home.filled(4, **fields)
    assert session.prune(KEEP_LAST).removed == ()
    options: dict[str, Any] = {f"keep_{mark}": False}
    rule = Retention(keep_last=1, **options)
    assert [v.checkpoint.seq for v in session.prune(rule).removed] == [1, 2, 3]


def test_keep_every_counts_steps(home: Home) -> None:
    for every in (0, -1, True, 1.0, "never"):
        with pytest.raises(InvalidRequest):
            Retention(keep_every=every)  # type: ignore[arg-type]
    session = home.filled(10)
    session.prune(Retention(keep_every=3))
    assert [c.step for c in session.tree()] == [3, 6, 9, 10]


@pytest.mark.parametrize("by", ["session", "store", "itself"])
def test_retention_keeps_marks_forks_and_connections(home: Home, by: str) -> None:
    session = home.filled(16)
    marked = [session.label("@~13", "l"), session.tag("@~11", "t"), session.get("@~9")]
    session.fork("f", marked[2])
    rule = Retention(keep_last=2)
    if by == "session":
        session.prune(rule)
    elif by == "store":
        home.store.prune(rule)
    else:
        home.store.retention = rule
        for i in range(16):
            session.save({"i": i})
    for _ in range(2):
        left = list(home.session().tree())
        assert seqs(left) == [3, 5, 7, left[-1].seq - 1, left[-1].seq]
        assert {c.id for c in marked} <= {c.id for c in left}
        assert [c.pruned for c in left] == [2, 1, 1, left[-1].seq - 9, 0]
        assert home.session().load("label:l")["i"] == 2
        assert seqs(home.session().history()) == seqs(left)[::-1]
        _connected(home.store)
        home.store.gc()
        home.reopened()
    assert home.store.verify(read_data=True).ok


def test_the_reason_names_keep_last_1(home: Home) -> None:
    """1 == True, so Retention.__str__ leaves out keep_last=1."""
    plan = home.filled(2).prune(Retention(keep_last=1), dry_run=True)
    assert plan.verdicts[0].reason == "not kept by keep_last=1"


def test_store_bytes_of_one_session_is_refused(home: Home) -> None:
    """Neither does session.prune(): it should apply or be refused, not be silently ignored."""
    session = home.session()
    for i in range(10):
        session.save({"raw": random.Random(i).randbytes(1_000)})
    with pytest.raises(InvalidRequest):
        session.prune(Retention(store_bytes=2_000), dry_run=True)


def test_undo_and_redo_keep_the_hold_of_an_expired_session(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The redo's own details have no "hold", and gc looks at the newest operation."""
    session = home.filled(2)
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now + 3_650 * DAY * 10**9)
    session.prune(Retention(session_ttl="30d"))
    assert home.store.gc().sessions == 0
    session.undo()
    session.redo()
    assert home.store.gc().sessions == 0
    session.undo()
    assert session.load()["i"] == 1


def test_gc_counts_checkpoints_on_hold(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    session = home.filled(2)
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now + 3_650 * DAY * 10**9)
    session.prune(Retention(session_ttl="30d"))
    assert home.store.gc().held == 2
