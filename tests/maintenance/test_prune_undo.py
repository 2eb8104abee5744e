"""A prune of the whole store is undone at once, whatever its sessions have done since."""

from __future__ import annotations

import pytest

from holdfast import Retention
from holdfast.errors import InvalidRequest
from tests.support.sessions import KEEP_LAST
from tests.support.stores import Home

IDLE = Retention(session_ttl="0.000001s")


def trees(home: Home) -> dict[str, list[int]]:
    return {i.name: [c.seq for c in home.session(i.name).tree()] for i in home.store.sessions()}


def pruned(home: Home) -> dict[str, list[int]]:
    """Fill some sessions, and prune the store. Return the trees of before."""
    for n, name in enumerate(("a", "b", "c"), 3):
        home.filled(n, name)
    before = trees(home)
    home.store.prune(KEEP_LAST)
    assert trees(home) != before
    return before


def test_all_sessions_get_their_checkpoints_back(home: Home) -> None:
    before = pruned(home)
    done = home.store.undo_prune()
    assert [(o.session, o.kind) for o in done.operations] == [(n, "undo") for n in before]
    assert (done.skipped, trees(home)) == ((), before)
    home.session("b").redo()
    assert trees(home)["b"] != before["b"]
    assert [o.session for o in home.store.undo_prune().operations] == ["b"]
    assert trees(home) == before
    with pytest.raises(InvalidRequest):
        home.store.undo_prune()
    assert home.store.verify(read_data=True).ok


def test_only_the_newest_prune_of_the_store(home: Home) -> None:
    before = pruned(home)
    between = trees(home)
    for name in ("a", "c"):
        home.session(name).save({"later": name})
    home.session("b").label("@", "not by a prune of the store")
    home.store.prune(KEEP_LAST)
    assert [o.session for o in home.store.undo_prune().operations] == ["a", "c"]
    later = {name: [len(before[name]) + 1] for name in ("a", "c")}
    assert trees(home) == {name: kept + later.get(name, []) for name, kept in between.items()}
    assert [o.session for o in home.store.undo_prune().operations] == ["a", "b", "c"]
    assert {n: found[: len(before[n])] for n, found in trees(home).items()} == before


def test_later_work_stays(home: Home) -> None:
    """It is not undone, undo() goes on with it, and redo() does not prune again."""
    before = pruned(home)
    session = home.session("b")
    kept = session.save({"later": True})
    home.store.undo_prune()
    assert trees(home)["b"] == [*before["b"], kept.seq]
    assert session.head == kept
    assert "redo" not in session.operations()[-1].way_back
    with pytest.raises(InvalidRequest):
        session.redo()
    session.undo()
    assert session.get().seq == before["b"][-1]
    session.redo()
    assert session.get().id == kept.id
    for _ in range(3):
        session.undo()
    assert trees(home)["b"] == [*before["b"], kept.seq]
    assert home.store.verify(read_data=True).ok


def test_deleted_sessions_come_back(home: Home) -> None:
    """But not over a new one of the same name, and never another one of that name."""
    for name in ("a", "b", "c"):
        home.filled(2, name)
    before = trees(home)
    home.store.prune(IDLE)
    home.filled(1, "b")
    home.filled(1, "c")
    home.session("c").delete()
    done = home.store.undo_prune()
    assert [o.session for o in done.operations] == ["a"]
    assert [name for name, _ in done.skipped] == ["b", "c"]
    assert trees(home) == {"a": before["a"], "b": [1]}
    home.session("b").delete()
    home.session("c").undo()
    assert home.session("c").info().checkpoints == 1


def test_what_gc_has_freed_is_skipped(home: Home) -> None:
    before = pruned(home)
    home.session("c").undo()
    home.store.gc()
    done = home.store.undo_prune()
    assert done.operations == ()
    assert [name for name, _ in done.skipped] == ["a", "b"]
    assert trees(home)["c"] == before["c"]
