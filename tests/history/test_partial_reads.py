"""Parts of a state are read without the rest, and comparisons name their ancestor."""

from __future__ import annotations

import time

import pytest

import holdfast
from holdfast import json
from holdfast.errors import (
    CheckpointNotFound,
    Corrupt,
    InvalidRequest,
    NotFound,
    SessionNotFound,
    TooBig,
)
from tests.support.stores import Home

STATE = {"plan": {"budget": 900, "items": [{"n": n} for n in range(500)]}, "done": None}


def test_a_value_at_a_path(home: Home) -> None:
    session = home.session()
    session.save(STATE)
    session.patch(set={"plan.budget": 850})
    assert session.load(path="plan.budget") == 850
    assert session.load("@~1", path="plan.budget") == 900
    assert session.load(path="plan.items[499]") == {"n": 499}
    assert session.load(path="done") is None
    with pytest.raises(NotFound):
        session.load(path="plan.owner")
    with pytest.raises(InvalidRequest):
        session.load(path="plan", close_calls=True)


def test_an_outline_of_a_part(home: Home) -> None:
    session = home.session()
    session.save(STATE)
    whole = session.part()
    assert (whole.kind, whole.length, [key for key, _ in whole.items]) == (
        "dict",
        2,
        ["plan", "done"],
    )
    part = session.part("plan.items", start=498)
    assert (part.kind, part.length, part.start) == ("list", 500, 498)
    assert [key for key, _ in part.items] == [498, 499]
    assert session.part("plan.budget").value == 900
    with pytest.raises(NotFound):
        session.part("plan.nothing")


def test_some_items_of_a_list(home: Home) -> None:
    session = home.session()
    session.save(STATE)
    assert session.items("plan.items", limit=2) == (500, 498, [{"n": 498}, {"n": 499}])
    assert session.items("plan.items", start=1, limit=1) == (500, 1, [{"n": 1}])
    assert session.items("plan.items", start=900, limit=1) == (500, 500, [])
    for path in ("plan", "plan.budget", "plan.nothing"):
        with pytest.raises(NotFound):
            session.items(path)


def test_a_part_reads_only_its_rows(home: Home) -> None:
    """Damage elsewhere in the state does not matter."""
    session = home.session()
    session.save({"small": 1, "texts": ["x" * 5_000 + str(n) for n in range(40)]})
    home.spoil_newest_item()
    with pytest.raises(Corrupt):
        home.another().session("s").load()
    assert home.another().session("s").load(path="small") == 1


def test_changes_are_against_the_nearest_ancestor(home: Home) -> None:
    session = home.session()
    first = session.save({"a": 1})
    session.save({"a": 2})
    third = session.save({"a": 2, "b": 3})
    assert session.changes(first) == (None, (holdfast.Change("added", ("a",), None, 1),))
    assert session.changes().diff == session.diff("@~1")
    session.delete("@~1")
    found = session.changes(third)
    assert found.ancestor is not None
    assert (found.ancestor.id, [str(c.path) for c in found.diff]) == (
        first.id,
        ["('a',)", "('b',)"],
    )


def test_checkpoints_of_two_sessions_are_compared(home: Home) -> None:
    session = home.session()
    base = session.save({"a": 1})
    fork = session.fork("other")
    one, two = session.save({"a": 2}), fork.save({"a": 3})
    found = home.store.compare(one.id, two)
    assert found.ancestor is not None
    assert found.ancestor.id == base.id
    assert (found.to_a.steps, found.to_b.steps) == (1, 2)
    assert [(c.before, c.after) for c in found.changes] == [(2, 3)]


def test_what_undo_would_do(home: Home) -> None:
    session = home.session()
    first, second = session.save({"n": 1}), session.save({"n": 2})
    step = session.next_undo()
    assert (step.kind, step.moves_head, step.deleted) == ("save", True, 0)
    assert step.head_before is not None
    assert step.head_after is not None
    assert (step.head_before.id, step.head_after.id) == (second.id, first.id)
    session.undo(expect=step.ref)
    assert session.next_redo().checkpoint == second
    session.delete()
    assert session.next_undo().deleted == 2
    assert [info.name for info in home.store.deleted()] == ["s"]
    session.undo()
    assert list(home.store.deleted()) == []


def test_a_session_says_what_it_is(home: Home) -> None:
    session = home.session()
    with pytest.raises(SessionNotFound):
        session.info()
    session.save({"n": 1})
    session.save({"n": 2})
    session.undo()
    fork = session.fork("f")
    info = session.info()
    assert (info.name, info.checkpoints, info.newest, info.operations) == ("s", 2, 2, 1)
    assert (info.forked, fork.info().forked) == (False, True)
    assert (info.head_seq, fork.info().head_seq) == (1, 1)
    assert session.forks() == {1: ["f"]}
    assert [c.seq for c in fork.tree()] == [1]


def test_recent_sessions(home: Home) -> None:
    assert home.store.recent() == []
    for name in ("a", "b", "c"):
        for n in range(2):
            home.session(name).save({"n": n})
            time.sleep(0.002)  # ids of one millisecond have no order
    assert [info.name for info in home.store.recent()] == ["c", "b", "a"]
    assert [info.name for info in home.store.recent(3)] == ["c", "b"]
    home.session("c").delete()
    assert [info.name for info in home.store.recent()] == ["b", "a"]


def test_who_runs_a_session(home: Home) -> None:
    session = home.session()
    session.save({})
    assert (session.owner(), session.abandoned(), home.store.running()) == (None, None, [])
    with session.run() as run:
        owner = home.another().session("s").owner()
        assert owner is not None
        assert home.store.running() == ["s"]
        run.halt("later")
    left = session.abandoned()
    assert left is not None
    assert (left.state, session.owner(), home.store.running()) == ("halted", None, [])


def test_ids_are_told_apart(home: Home) -> None:
    session = home.session()
    checkpoints = [session.save({"n": n}) for n in range(20)]
    length = home.store.id_length(checkpoints)
    for checkpoint in checkpoints:
        assert home.store.get(checkpoint.id[:length]).id == checkpoint.id


def test_values_from_json() -> None:
    for value in (None, 1.5, "x", {"$a": (1, b"2")}, [{3}]):
        assert json.to_value(json.value(value)) == value
        assert json.parse(json.dumps(json.value(value))) == value
    for text in ("{", '{"$bytes": 1}'):
        with pytest.raises(InvalidRequest):
            json.parse(text)


@pytest.mark.parametrize("body", [b"torn", None], ids=["torn", "missing"])
def test_neighbours_know_a_damaged_checkpoint(home: Home, body: bytes | None) -> None:
    session = home.session()
    saved = [session.save({"n": n}, label=f"save {n}", tags=["t"]) for n in range(4)]
    home.spoil_checkpoint(3, body)
    store = home.another()
    [lost] = [c for c in store.session("s").tree() if c.damaged]
    assert lost.seq == 3
    found = store.neighbours(lost)
    assert found == store.neighbours(("s", 3))
    assert (found.session, found.seq, found.id, found.step) == ("s", 3, saved[2].id, 3)
    assert (found.label, found.tags, found.child) == ("save 2", ("t",), saved[3].id)
    assert [c.id for c in found.ancestors] == [saved[1].id, saved[0].id]
    assert store.neighbours(("s", 3), limit=1).ancestors == [saved[1]]
    if body is not None:
        assert found == store.neighbours(saved[2].id)


def test_the_head_row_knows_the_parent_of_a_damaged_head(home: Home) -> None:
    session = home.session()
    first, head = session.save({"n": 0}), session.save({"n": 1})
    home.spoil_checkpoint(2)
    found = home.another().neighbours(("s", 2))
    assert (found.id, found.child, found.ancestors) == (head.id, None, [first])


def test_neighbours_of_a_fork_reach_into_its_origin(home: Home) -> None:
    session = home.session()
    origin = session.save({"n": 0})
    fork = session.fork("f")
    fork.save({"n": 1})
    home.spoil_checkpoint(1, name="f")
    found = home.another().neighbours(("f", 1))
    assert [(c.id, c.session) for c in found.ancestors] == [(origin.id, "s")]


def test_neighbours_of_checkpoints_that_are_not_there(home: Home) -> None:
    session = home.session()
    first = session.save({"n": 0})
    session.save({"n": 1})
    for missing in (first.id[:-1], "0" * 24, ("s", 0), ("s", 3)):
        with pytest.raises(CheckpointNotFound):
            home.store.neighbours(missing)
    with pytest.raises(SessionNotFound):
        home.store.neighbours(("t", 1))
    session.delete(first)
    assert home.store.neighbours(first.id).id is None


def test_a_tree_ends_at_the_newest_checkpoint(home: Home) -> None:
    session = home.session()
    session.save({"n": 0})
    assert [c.damaged for c in session.tree(newest_first=True, before=9)] == [None]
    assert [c.damaged for c in session.tree(before=9)] == [None]


def test_json_is_measured_before_it_is_parsed() -> None:
    text = json.dumps([[]] * 9000).encode()
    json.check_memory(text)
    with holdfast.memory_limit(300_000), pytest.raises(TooBig):
        json.check_memory(text)
