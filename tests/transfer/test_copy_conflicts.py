"""Copies into stores that have a life of their own: gc, other sessions, changes, interruptions."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import Retention
from holdfast.format import nodes
from holdfast.format.records import COPIED
from holdfast.storage import changes
from holdfast.storage.contract import Batch
from holdfast.storage.tally import Turnover
from holdfast.transfer import copy as transfer_copy
from holdfast.transfer import items as transfer_data
from tests.support.seeds import seeds
from tests.support.stores import TEXT, Home
from tests.transfer.test_copy import copied_in_part, facts, life


def small_parts(monkeypatch: pytest.MonkeyPatch, size: int = 2_000) -> None:
    monkeypatch.setattr(transfer_data, "CHUNK_BYTES", size)
    monkeypatch.setattr(transfer_copy, "CHUNK_BYTES", size)


def whole(home: Home) -> None:
    report = home.store.verify(read_data=True)
    assert report.ok, str(report)


# -- gc ----------------------------------------------------------------------------------------


def test_what_lies_within_a_pack_does_not_hide_the_rest_of_it(here: Home, there: Home) -> None:
    log = [f"{n} {TEXT}" for n in range(20)]
    session = here.session()
    session.save({"log": log})
    log[14] = f"edited {TEXT}"
    session.save({"log": log})
    here.store.copy(there.store)
    session.append("log", f"20 {TEXT}")
    session.delete("@~2")
    here.store.gc()
    here.store.copy(there.store)
    whole(there)
    assert there.session().load() == session.load()
    assert len([*there.session().tree()]) == 3
    there.session().append("log", f"21 {TEXT}")
    whole(there)


def nested_elsewhere(here: Home, there: Home, *, freed_there: bool) -> holdfast.Session:
    """The other store has an item with a list of its own; what has brought it is freed here."""
    session = here.session()
    session.save({"log": [f"{n} {TEXT}" for n in range(6)]})
    tool = {"role": "tool", "rows": [f"row {n} {TEXT}" for n in range(40)]}
    brought = session.append("log", tool)
    here.store.copy(there.store)
    last = session.append("log", "next")
    session.delete(brought.id)
    if freed_there:  # but not the item, which lies in a row with others
        session.rewind("step:1")
        session.delete(last.id)
        here.store.copy(there.store)
        there.store.gc()
        session.undo()
        session.undo()
    here.store.gc()
    return session


@pytest.mark.parametrize("freed_there", [False, True])
def test_a_list_within_an_item_that_is_there(here: Home, there: Home, freed_there: bool) -> None:
    session = nested_elsewhere(here, there, freed_there=freed_there)
    assert here.store.copy(there.store).skipped == ()
    whole(there)
    assert here.store.copy(there.store).sessions == 0
    there.store.gc()
    whole(there)
    ours, theirs = facts(here.store)["s"], facts(there.store)["s"]
    assert all(checkpoint in theirs[2] for checkpoint in ours[2])
    assert ours[3].items() <= theirs[3].items()
    session.append("log", {"more": [f"{n} {TEXT}" for n in range(40)]})
    assert here.store.copy(there.store).skipped == ()
    copy = there.session()
    assert copy.load() == session.load()
    for n in range(20):  # it goes on where the copy goes on
        copy.append("log", f"there {n}")
    whole(there)


def test_another_list_within_an_item_is_told(
    here: Home, there: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    nested_elsewhere(here, there, freed_there=False)
    items = transfer_data.StreamMap.there

    def others(*args: Any) -> dict[int, bytes]:
        found = items(*args)
        for n, item in found.items():
            for _, data in transfer_data._references(item):
                found[n] = item.replace(nodes.parse_rope(data).hash, bytes(32))
        return found

    monkeypatch.setattr(transfer_data.StreamMap, "there", others)
    refused(here, there, "another item in the same place")


@pytest.mark.parametrize("seed", seeds(1, torture=4))
def test_gc_between_copies(here: Home, there: Home, seed: int, rounds: Any) -> None:
    rng = random.Random(seed)
    for part in range(rounds(2, torture=4)):
        life(rng, here.store, 20, part * 100, harsh=False)
        if rng.random() < 0.3:
            here.store.gc()
        # A fork that was undone, and a session of its name that is another.
        other = {name for name, _ in here.store.copy(there.store).skipped}
        assert len(other) < 2
        whole(there)
        states = facts(here.store)
        for name in states.keys() - {"found", *other}:
            assert states[name][3].items() <= facts(there.store)[name][3].items()
        there.store.gc()
        whole(there)


def busy(monkeypatch: pytest.MonkeyPatch, home: Home, do: Callable[[], Any], most: int) -> None:
    """Something happens in a store before each of the next commits of a copy."""
    backend = home.store._repository.backend
    commit, done = backend.commit, list[int]()

    def interfere(batch: Batch) -> None:
        copies = any(write[0] == "counters" and write[1][0] == COPIED for write in batch.writes)
        if copies and len(done) < most:
            done.append(1)
            do()
        commit(batch)

    monkeypatch.setattr(backend, "commit", interfere)


def copied_beside_gc(here: Home, there: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    small_parts(monkeypatch)
    session = here.session()
    session.save({"log": [f"{n} {TEXT}" for n in range(200)], "big": TEXT * 40})
    for n in range(5):
        session.append("log", f"more {n} {TEXT}" * 9)
    session.fork("fork").append("log", "its own")
    here.store.copy(there.store, sessions=["s"])
    # What a copy finds there, and gc takes away: a checkpoint that is deleted here and there.
    session.save({"log": [], "big": ""})
    session.delete("@~1")
    here.store.copy(there.store, sessions=["s"])
    session.undo()
    session.append("log", f"last {TEXT}")
    busy(monkeypatch, there, there.another().gc, most=4)
    here.store.copy(there.store)
    monkeypatch.undo()
    there.store.gc()
    whole(there)
    for name in ("s", "fork"):
        assert there.session(name).load() == here.session(name).load()


def test_gc_beside_a_copy(here: Home, there: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    copied_beside_gc(here, there, monkeypatch)


def test_mutant_that_does_not_notice_gc(
    here: Home, there: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Turnover, "new", staticmethod(lambda: 1))
    there.session("x").save({"n": 1})
    there.session("x").delete()
    there.store.gc()  # the only number there ever is
    with pytest.raises((AssertionError, holdfast.Corrupt)):
        copied_beside_gc(here, there, monkeypatch)


def test_a_copy_beside_gc(here: Home, there: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """What gc takes for garbage, and a copy comes to need before it is removed."""
    session = here.session()
    session.save({"log": [f"{n} {TEXT}" for n in range(30)], "big": TEXT * 40})
    session.append("log", "more")
    here.store.copy(there.store)
    kept = there.session()
    kept.delete("@~1")
    there.store.gc()  # its items are still those of the head
    trim, copied = changes.trim, list[Any]()

    def late(backend: Any, what: Any) -> int:
        if not copied:
            here.session("again").save({"log": [f"{n} {TEXT}" for n in range(30)]})
            copied.append(here.store.copy(there.store, sessions=["again"]))
        return trim(backend, what)

    monkeypatch.setattr(changes, "trim", late)
    there.session().delete()
    there.store.gc()
    assert copied
    whole(there)
    assert there.session("again").load() == here.session("again").load()


def test_gc_without_end_is_told(here: Home, there: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    here.filled(3)

    def free() -> None:
        extra = there.another().session("x")
        extra.save({"n": 1})
        extra.save({"n": 2})
        extra.delete("@~1")
        there.another().gc()

    busy(monkeypatch, there, free, most=1_000)
    with pytest.raises(holdfast.Unavailable, match="gc"):
        here.store.copy(there.store)
    monkeypatch.undo()
    here.store.copy(there.store)
    assert there.session().load() == here.session().load()


# -- others' sessions --------------------------------------------------------------------------


def refused(here: Home, there: Home, why: str) -> None:
    """The copy leaves the session alone, and says why."""
    before = facts(there.store)
    [(name, reason)] = here.store.copy(there.store).skipped
    assert (name, why in reason) == ("s", True), reason
    assert facts(there.store) == before
    whole(there)


def test_another_session_of_the_same_name(here: Home, there: Home) -> None:
    """It has what was freed here, as far as numbers go."""
    for n in range(5):
        here.session().save({"n": n})
    here.session().prune(Retention(keep_last=1))
    here.store.gc()
    there.session().save({"mine": 1}, label="x")
    refused(here, there, "another session")


def test_a_copy_that_went_its_own_way(here: Home, there: Home) -> None:
    """What it has saved has the number of something that was freed here since."""
    session = here.filled(3)
    here.store.copy(there.store)
    there.session().append("log", "there")
    session.append("log", "here")
    session.append("log", "and more")
    session.delete("@~1")
    here.store.gc()
    refused(here, there, "another checkpoint 4")


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.tag("@", "mine"),
        lambda s: s.label("@~1", "mine"),
        lambda s: s.rewind("@~1"),
        lambda s: s.delete("@~1"),
        lambda s: s.undo(),
    ],
    ids=["tag", "label", "rewind", "delete", "undo"],
)
def test_what_was_done_there_is_not_taken_back(here: Home, there: Home, change: Any) -> None:
    session = here.filled(4)
    here.store.copy(there.store)
    change(there.session())
    refused(here, there, "changed in the other store")
    session.tag("@", "ours")
    refused(here, there, "changed in the other store")


def test_a_session_that_was_deleted_there(here: Home, there: Home, tmp_path: Path) -> None:
    session = here.filled(3)
    here.store.export(tmp_path / "all.jsonl")
    here.store.copy(there.store)
    there.session().delete()
    for done in (here.store.copy(there.store), there.store.import_exported(tmp_path / "all.jsonl")):
        [(name, why)] = done.skipped
        assert (name, "deleted" in why, "undo" in why) == ("s", True, False), why
        assert not there.session().exists()
        whole(there)
    there.session().undo()
    refused(here, there, "changed in the other store")
    there.session().delete()
    there.store.gc()
    assert there.store.import_exported(tmp_path / "all.jsonl").skipped == ()
    assert there.session().load() == session.load()
    whole(there)


# -- parts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [1, 2, 3, 5, 8])
def test_a_copy_in_parts_is_a_session_at_any_time(
    here: Home, there: Home, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted, it is what it was here some time ago, and can be gone on with."""
    small_parts(monkeypatch)
    session = here.filled(3)
    here.store.copy(there.store)
    for n in range(60):
        session.append("log", f"{n} {TEXT}")
    copied_in_part(here, there, after)
    there.reopened()
    whole(there)
    assert there.session().load() == session.load("step:3")
    partly = [*there.session().tree()]
    assert 3 < len(partly) < 63
    there.store.gc()
    newest = there.session().fork("goes on", at=partly[-1].id)
    for n in range(20):
        newest.append("log", f"by itself {n} {TEXT}")
    whole(there)
    assert here.store.copy(there.store).skipped == ()
    assert there.session().load() == session.load()
    whole(there)
    there.session().append("log", "and on")
    whole(there)


@pytest.mark.parametrize("after", [1, 2])
@pytest.mark.parametrize("freed_there", [False, True])
def test_parts_are_whole_whatever_was_freed(
    here: Home, there: Home, after: int, freed_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Freed there, and back; or freed here, between those that come along."""
    small_parts(monkeypatch, 1_000)
    session = here.store.session("s", agent="planner")
    for n in range(20):
        log = [f"{n} {i} {TEXT}" for i in range(4)]
        session.save({"log": log}, trigger="t", key=f"k{n}")
    if freed_there:
        session.prune(Retention(keep_last=3))
        here.store.copy(there.store)
        there.store.gc()
        session.undo()
    else:
        here.store.copy(there.store)
        for n in range(20, 40):
            session.save({"log": [f"{n} {i} {TEXT}" for i in range(4)]}, trigger="t", key=f"k{n}")
        for checkpoint in [*session.tree()][20:36:2]:
            session.delete(checkpoint.id)
        here.store.gc()
    copied_in_part(here, there, after)
    there.reopened()
    whole(there)
    for checkpoint in there.session().tree():
        assert there.session().get(f"key:{checkpoint.key}").id == checkpoint.id
    assert here.store.copy(there.store).skipped == ()
    whole(there)
    assert facts(there.store) == facts(here.store)


def test_a_list_within_an_item_cannot_be_gone_on_with(
    here: Home, there: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then a part ends with a later checkpoint, and has all of this one, too."""
    small_parts(monkeypatch)
    session = here.session()
    session.save({"log": [f"{n} {TEXT}" for n in range(8)]})
    session.append("log", {"rows": [f"row {n} {TEXT}" for n in range(40)]})
    session.save({"log": []})
    check = transfer_data.StreamMap.check_tail

    def freed(self: Any, kind: int, tail: nodes.Tail) -> None:
        if tail.end == 40:
            raise holdfast.Corrupt("as if gc had freed what only the newest needs")
        check(self, kind, tail)

    monkeypatch.setattr(transfer_data.StreamMap, "check_tail", freed)
    assert here.store.copy(there.store).skipped == ()
    whole(there)
    assert facts(there.store) == facts(here.store)


@pytest.mark.parametrize("after", [1, 2, 3])
def test_what_has_come_is_found(
    here: Home, there: Home, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_parts(monkeypatch, 1_000)
    session = here.store.session("s", agent="planner")
    for n in range(20):
        session.save({"log": [f"{n} {i} {TEXT}" for i in range(4)]}, trigger="t", key=f"k{n}")
    copied_in_part(here, there, after)
    whole(there)
    came = {checkpoint.id for checkpoint in there.session().tree()}
    assert {checkpoint.id for checkpoint in there.store.checkpoints(trigger="t")} == came
    assert {checkpoint.id for checkpoint in there.store.checkpoints(agent="planner")} == came
