"""Copies of forks: what they come from, and what they share with it, freed here or there."""

from __future__ import annotations

import random
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytest

import holdfast
from holdfast.format import records
from tests.support import memory_rows
from tests.support.stores import TEXT, Home
from tests.transfer.test_copy import copied_in_part, facts, life
from tests.transfer.test_copy_conflicts import small_parts

LOG = [f"{n} {TEXT}" for n in range(40)]


def appended(session: holdfast.Session, low: int, high: int) -> holdfast.Session:
    for item in LOG[low:high]:
        session.append("log", item)
    return session


def whole(home: Home) -> None:
    report = home.store.verify(read_data=True)
    assert report.ok, str(report)


def same(here: Home, there: Home, *names: str) -> None:
    """The copy has all that is here; and nothing more is left to do."""
    assert here.store.copy(there.store).skipped == ()
    for _ in range(2):
        compare(here, there, names)
        there.reopened()
    again = here.store.copy(there.store)
    assert (again.sessions, again.checkpoints, again.skipped) == (0, 0, ())


def compare(here: Home, there: Home, names: Iterable[str]) -> None:
    ours, theirs = facts(here.store), facts(there.store)
    for name in names:
        _, head, tree, states, history, ops = theirs[name]
        assert (head, ops) == (ours[name][1], ours[name][5])
        assert {*map(repr, ours[name][2])} <= {*map(repr, tree)}
        assert ours[name][3].items() <= states.items()
        assert {row[0] for row in ours[name][4]} <= {row[0] for row in history}
    whole(there)


def names(home: Home) -> list[str]:
    return [info.name for info in home.store.sessions()]


# -- what a session comes from -----------------------------------------------------------------


def fork_of_a_freed_one(here: Home) -> None:
    fork = appended(here.session(), 0, 3).fork("between")
    fork.append("log", "of a session that goes")
    fork.fork("a fork").append("log", "its own")
    fork.delete()
    here.store.gc()


def test_a_fork_of_a_freed_fork(here: Home, there: Home, tmp_path: Path) -> None:
    fork_of_a_freed_one(here)
    here.store.copy(there.store, sessions=["a fork"])
    assert names(there) == ["a fork", "s"]
    same(here, there, "s", "a fork")
    here.store.export(tmp_path / "all.jsonl")
    with holdfast.open("memory:") as other:
        assert other.import_exported(tmp_path / "all.jsonl").skipped == ()
        assert facts(other) == facts(here.store)


def test_a_fork_of_a_freed_fork_of_a_damaged_session(here: Home, there: Home) -> None:
    fork_of_a_freed_one(here)
    here.spoil_checkpoint(1)
    assert [name for name, _ in here.store.copy(there.store).skipped] == ["s", "a fork"]
    assert names(there) == []


def test_an_origin_that_is_lost(here: Home, there: Home, tmp_path: Path) -> None:
    """Not freed, which would have left a note in the fork, but missing."""
    appended(here.session(), 0, 3).fork("fork").append("log", "its own")
    here.store.export(tmp_path / "all.jsonl")
    lines = (tmp_path / "all.jsonl").read_bytes().splitlines(keepends=True)
    lost = (b'{"in":"sessions/s/session.json"', b'{"in":"sessions/s/log.jsonl"')
    kept = [line for line in lines if not line.startswith(lost)]
    (tmp_path / "some.jsonl").write_bytes(b"".join(kept))
    assert {name for name, _ in there.store.import_exported(tmp_path / "some.jsonl").skipped} == {
        "s", "fork",
    }  # fmt: skip
    assert names(there) == []
    same(here, there, "s", "fork")


def test_an_origin_that_was_freed_here_lives_on_there(here: Home, there: Home) -> None:
    session = appended(here.session(), 0, 4)
    fork = session.fork("fork")
    here.store.copy(there.store)
    session.delete()
    here.store.gc()
    fork.append("log", "its own")
    same(here, there, "fork")
    kept = there.session()
    kept.append("log", "more")
    kept.prune(holdfast.Retention(keep_last=1))
    there.store.gc()
    whole(there)
    assert not any(c.damaged for c in there.session("fork").history())


def test_an_origin_whose_deletion_is_undone(here: Home, there: Home) -> None:
    """Here: there it was never deleted but by the copy."""
    session = appended(here.session(), 0, 3)
    fork = appended(session.fork("fork"), 3, 4)
    session.delete()
    here.store.copy(there.store)
    assert names(there) == ["fork"]
    session.undo()
    appended(fork, 4, 5)
    same(here, there, "s", "fork")
    assert names(there) == ["fork", "s"]
    session.delete()
    appended(fork, 5, 6)
    same(here, there, "fork")
    assert names(there) == ["fork", "s"]


def test_an_origin_whose_name_another_has_by_now(here: Home, there: Home) -> None:
    session = appended(here.session(), 0, 3)
    session.fork("fork")
    session.delete()
    here.store.copy(there.store)
    session.undo()
    appended(there.session(), 5, 6)
    skipped = dict(here.store.copy(there.store).skipped)
    assert ([*skipped], "another checkpoint 1" in skipped["s"]) == (["s", "fork"], True)
    assert there.session().load()["log"] == LOG[5:6]
    whole(there)


def test_sessions_that_are_forks_of_each_other(here: Home, there: Home) -> None:
    """Nobody's, but a file to be imported may say so."""
    here.session().save({"n": 1})
    here.session().fork("fork")
    with here.store._repository.reader() as reader:
        row, fork = reader.session(b"s"), reader.session(b"fork")
    assert row is not None
    assert fork is not None
    info = records.unseal_session(*row)._replace(origin=records.position(fork.number, 1))
    body = records.seal_session(row.number, b"s", info)
    memory_rows.damage(here.store._repository.backend, "sessions", body, row.number)
    here.store.copy(there.store)
    assert there.session("fork").load() == {"n": 1}


def test_another_session_of_a_name_that_was_freed(here: Home, there: Home) -> None:
    """Why it is left alone: not because somebody changed it there."""
    appended(here.session(), 0, 2).tag("@", "old")
    here.store.copy(there.store)
    here.session().delete()
    here.store.gc()
    appended(here.session(), 5, 7).tag("@", "new")
    [(name, why)] = here.store.copy(there.store).skipped
    assert (name, "another checkpoint 1" in why) == ("s", True), why


# -- data that is shared -----------------------------------------------------------------------


def test_a_fork_has_more_than_what_is_left_of_its_origin(here: Home, there: Home) -> None:
    session = appended(here.session(), 0, 20)
    session.fork("fork")
    session.rewind("step:10")
    for checkpoint in [*session.tree()][10:]:
        session.delete(checkpoint.id)
    here.store.gc()
    same(here, there, "s", "fork")
    appended(there.session(), 30, 35)
    appended(there.session("fork"), 30, 35)
    whole(there)
    assert there.session("fork").load()["log"] == [*LOG[:20], *LOG[30:35]]


def test_nothing_is_written_where_another_session_goes_on(here: Home, there: Home) -> None:
    session = appended(here.session(), 0, 10)
    session.fork("early")
    here.store.copy(there.store)
    appended(session, 10, 20).fork("late")
    session.delete()
    here.store.gc()
    same(here, there, "early", "late")
    appended(there.session(), 30, 35)
    whole(there)
    assert there.session().load()["log"] == [*LOG[:10], *LOG[30:35]]
    assert there.session("late").load()["log"] == LOG[:20]


def test_an_origin_comes_back(here: Home, there: Home) -> None:
    """Its items are there twice then: those that its forks have kept, and its own."""
    session = appended(here.session(), 0, 10)
    session.fork("early")
    here.store.copy(there.store)
    appended(session, 10, 20).fork("late")
    there.session().delete()
    there.store.gc()
    same(here, there, "s", "early", "late")
    appended(there.session(), 30, 35)
    whole(there)


def test_what_was_cut_out_of_a_freed_origins_items_comes_back(here: Home, there: Home) -> None:
    session = appended(here.session(), 0, 10)
    fork = session.fork("fork")
    here.store.copy(there.store)
    for home in (here, there):
        home.session().delete()
        home.store.gc()
    first = fork.head
    assert first is not None
    fork.save({"log": LOG[5:10]})
    fork.delete(first.id)
    here.store.copy(there.store)
    there.store.gc()
    fork.undo()
    same(here, there, "fork")
    assert there.session("fork").load(first.id)["log"] == LOG[:10]


def test_forks_of_a_freed_origin_share_what_they_did(here: Home, there: Home) -> None:
    session = here.session()
    for n in range(40):
        session.append("log", LOG[n])
        if n % 4 == 3:
            session.fork(f"fork {n}")
    session.delete()
    here.store.gc()
    same(here, there, *names(here))
    most = 40 * len(LOG[-1]) * (1.5 if there.kind == "files" else 1)  # which is not compressed
    assert there.store.stats().bytes["items"] < most


def test_what_a_fork_shares_is_not_brought_again(here: Home, there: Home) -> None:
    """The one that it shares it with was copied before, and has a name that comes later."""
    session = here.session()
    session.save({"log": LOG})
    for name in ("a", "z"):
        session.fork(name).append("log", name)
    session.delete()
    here.store.gc()
    here.store.copy(there.store, sessions=["z"])
    before = there.store.stats().bytes["items"]
    same(here, there, "a", "z")
    assert there.store.stats().bytes["items"] < 1.2 * before


# -- all of it ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
def test_both_have_a_life_of_their_own(
    here: Home, there: Home, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deleted, freed and forked, here and there; copies end early, and go on."""
    rng = random.Random(seed)
    small_parts(monkeypatch, 4_000)
    for part in range(5):
        life(rng, here.store, 25, part * 100)
        if rng.random() < 0.5:
            with suppress(pytest.fail.Exception):  # which had fewer commits to make
                copied_in_part(here, there, rng.randrange(1, 9))
            whole(there)
        done = here.store.copy(there.store)
        left = {name for name, _ in done.skipped}
        compare(here, there, {*names(here)} - left)
        again = here.store.copy(there.store)
        assert (again.sessions, again.checkpoints, again.skipped) == (0, 0, done.skipped)
        for name in names(there):
            roll = rng.random()
            if roll < 0.2:
                there.session(name).delete()
            elif roll < 0.3 and there.session(name).head:
                appended(there.session(name).fork(f"of {name} in {part}"), 0, 3)
        there.store.gc()
        whole(there)
    for name in names(there):
        if there.session(name).head:
            appended(there.session(name), 0, 3)
    whole(there)
