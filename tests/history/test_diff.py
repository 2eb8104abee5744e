"""Differences against a plain model: applied to the older state, they give the newer one."""

from __future__ import annotations

import copy
import datetime as dt
import itertools
import random
import zoneinfo
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.format import values
from tests.format.test_layout import containers, message, mutate, text
from tests.mutants import Mutant, history
from tests.support.equality import fresh, opened
from tests.support.seeds import seeds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from holdfast import Change, Diff


PAD = "p" * 1300
ODD: list[Any] = [1, True, 1.0, 0, False, -0.0, 2, "2", b"2", None, Decimal(1), Decimal("1.0")]
"""Keys of which some are equal to a dict, and all differ."""


# -- the model -------------------------------------------------------------------------------------


def applied(old: Any, changes: Sequence[Change], new: Any, depth: int = 0) -> Any:
    """What `old` becomes. Of `new` only the places of added keys are taken: a diff has none."""
    here = [c for c in changes if len(c.path) == depth]
    order = [c for c in here if type(c.before) is type(c.after) is list]
    if here and not order:
        assert len(changes) == 1
        assert same(old, here[0].before)
        return here[0].after
    if not changes:
        return old
    assert type(old) is type(new) in (dict, list)
    inner = [c for c in changes if len(c.path) > depth]
    assert len(inner) + len(order) == len(changes)
    assert len(order) <= 1
    if type(old) is list:
        return _list(old, inner, new, depth)
    return _dict(old, inner, order, new, depth)


def _list(old: list[Any], changes: list[Change], new: list[Any], depth: int) -> list[Any]:
    removed: dict[Any, Any] = {c.path[-1]: c.before for c in changes if is_at(c, "removed", depth)}
    assert all(same(old[at], item) for at, item in removed.items())
    result = [item for at, item in enumerate(old) if at not in removed]
    added: dict[Any, Any] = {c.path[-1]: c.after for c in changes if is_at(c, "added", depth)}
    for at in sorted(added):
        assert at <= len(result)
        result.insert(at, added[at])
    for at, of in _by_step([c for c in changes if not _moves(c, depth)], depth):
        assert type(at) is int
        assert at not in added
        result[at] = applied(result[at], of, new[at], depth + 1)
    return result


def _dict(
    old: dict[Any, Any],
    changes: list[Change],
    order: list[Change],
    new: dict[Any, Any],
    depth: int,
) -> dict[Any, Any]:
    held, wanted = by_code(old), by_code(new)
    for change in changes:
        code = values.encode(change.path[depth])
        if is_at(change, "removed", depth):
            assert same(held.pop(code)[1], change.before)
    for key, of in _by_step([c for c in changes if not _moves(c, depth)], depth):
        code = values.encode(key)
        held[code] = key, applied(held[code][1], of, wanted[code][1], depth + 1)
    for change in order:
        assert [*held] == [values.encode(key) for key in change.before]
        held = {code: held[code] for code in map(values.encode, change.after)}
    added = {
        values.encode(c.path[-1]): (c.path[-1], c.after)
        for c in changes
        if is_at(c, "added", depth)
    }
    assert not held.keys() & added.keys()
    stayed = iter(held.values())
    return dict(added[code] if code in added else next(stayed) for code in wanted)


def is_at(change: Change, kind: str, depth: int) -> bool:
    return change.kind == kind and len(change.path) == depth + 1


def _moves(change: Change, depth: int) -> bool:
    return is_at(change, "removed", depth) or is_at(change, "added", depth)


def _by_step(changes: list[Change], depth: int) -> Iterator[tuple[Any, list[Change]]]:
    """By the encoding of their next step: to Python True is the first item."""
    groups: dict[bytes, list[Change]] = {}
    for change in changes:
        groups.setdefault(values.encode(change.path[depth]), []).append(change)
    for of in groups.values():
        yield of[0].path[depth], of


def by_code(of: dict[Any, Any]) -> dict[bytes, tuple[Any, Any]]:
    return {values.encode(key): (key, item) for key, item in of.items()}


def same(a: Any, b: Any) -> bool:
    return values.encode(a) == values.encode(b)


def check(session: holdfast.Session, older: Any, newer: Any) -> Diff:
    """`older` and `newer` are checkpoints of the session."""
    old, new = session.load(older), session.load(newer)
    found = session.diff(older, newer)
    assert (not found) == (older.state_hash == newer.state_hash) == same(old, new)
    assert same(applied(old, found, new), new), str(found)
    return found


# -- pairs of states -------------------------------------------------------------------------------


def odd(rng: random.Random) -> dict[Any, Any]:
    found = {key: rng.choice([0, False, "x"]) for key in rng.sample(ODD, rng.randrange(5))}
    return found | ({"pad": text(rng, 9000)} if rng.random() < 0.2 else {})


def change(rng: random.Random, state: Any) -> None:
    roll = rng.random()
    if roll < 0.2:
        target = rng.choice(containers(state))
        if type(target) is list:
            target.insert(rng.randrange(len(target) + 1), odd(rng))
        else:
            target["odd"] = odd(rng)
    elif roll < 0.3:  # what a wide dict becomes a rope by, and ends it being one
        state["wide"] = {f"w{i}": text(rng, 80) for i in range(rng.choice([3, 90, 90]))}
    else:
        mutate(rng, state)


def begun(rng: random.Random) -> dict[str, Any]:
    state: dict[str, Any] = {
        "messages": [message(rng, i) for i in range(rng.choice([0, 3, 40]))],
        "odd": odd(rng),
    }
    if rng.random() < 0.3:
        state |= {f"k{i}": i for i in range(70)}
    return state


def walk(session: holdfast.Session, seed: int) -> None:
    """Neighbours, and any two that were saved, back and forth."""
    rng = random.Random(seed)
    state = begun(rng)
    made = [session.save(state)]
    for _ in range(12):
        for _ in range(rng.choice([0, 1, 1, 1, 3])):
            change(rng, state)
        if rng.random() < 0.1:
            state = copy.deepcopy(session.load(rng.choice(made)))
        made.append(session.save(state))
        check(session, made[-2], made[-1])
    for _ in range(8):
        check(session, *rng.choices(made, k=2))


def edited(session: holdfast.Session) -> None:
    """A list whose ends stay, and of whose middle each second item lies elsewhere."""
    log = [{"n": n, "text": PAD} for n in range(60)]
    first = session.save({"log": log})
    for n in range(10, 50, 4):
        log[n] = {"n": -n, "text": PAD}
        session.save({"log": log})
    del log[20:40]
    last = session.save({"log": log})
    assert len(check(session, first, last)) > 20
    check(session, last, first)


@pytest.mark.parametrize("kind", ["memory", "sqlite", "files", "postgres"])
@pytest.mark.parametrize("seed", seeds(2, torture=4))
def test_a_diff_applied_gives_the_newer_state(
    kind: str, seed: int, tmp_path: Path, rounds: Any
) -> None:
    # All that differs from one kind of store to another is how parts of values are read.
    usual = 8 if kind in ("memory", "sqlite") else 3
    with opened(kind, tmp_path) as store:
        edited(fresh(store))
        for n in range(rounds(usual, torture=500)):
            walk(fresh(store), seed + 4 * n)


MUTANTS = [
    history.diffs_read_the_first_extent, history.diffs_read_one_extent_of_the_older,
    history.diffs_cut_one_end_wrongly, history.diffs_ignore_the_order_of_keys,
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_of_the_diff(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with holdfast.open("memory:") as store, pytest.raises((AssertionError, IndexError)):
        edited(fresh(store))
        for seed in range(40):
            walk(fresh(store), seed)


# -- what was missed -------------------------------------------------------------------------------


@pytest.mark.parametrize("pad", ["", PAD], ids=["small", "big"])
def test_another_order_of_keys_is_a_change(pad: str) -> None:
    old = {"a": 1, "b": 2, "pad": [pad, pad], "in": {"x": pad, "y": pad, "z": pad, "w": pad}}
    inner = {"w": pad, "x": pad, "y": pad, "z": pad}
    new = {"b": 2, "a": 1, "pad": [pad, pad], "in": inner}
    with holdfast.open("memory:") as store:
        session = store.session("s")
        found = check(session, session.save(old), session.save(new))
        assert [(c.kind, c.path) for c in found] == [("changed", ("in",)), ("changed", ())]
        assert found[0][2:] == (["x", "y", "z", "w"], ["w", "x", "y", "z"])
        assert str(found[1]) == ("~ state: ['a', 'b', 'pad', 'in'] → ['b', 'a', 'pad', 'in']")
        # Where a new key was put is no change of order.
        found = check(session, session.head, session.save({"new": 0, **new}))
        assert [str(c) for c in found] == ["+ state.new: 0"]


@pytest.mark.parametrize(("old", "new"), [*itertools.permutations([1, True, 1.0], 2)])
def test_keys_that_are_equal_and_yet_differ(old: Any, new: Any) -> None:
    with holdfast.open("memory:") as store:
        session = store.session("s")
        for wrap in (lambda x: x, lambda x: {"in": [x]}, lambda x: {"in": x, "pad": [PAD]}):
            made = [session.save(wrap({key: "x"})) for key in (old, new)]
            found = check(session, *made)
            assert [c.kind for c in found] == ["removed", "added"]
            assert [repr(c.path[-1]) for c in found] == [repr(old), repr(new)]


def test_what_this_machine_cannot_tell_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A zone that it does not know loads as its offset: the states differ all the same."""
    berlin = dt.datetime(2024, 7, 1, 12, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin"))
    plain = berlin.replace(tzinfo=dt.timezone(dt.timedelta(hours=2)))
    with holdfast.open("memory:", cache_bytes=0) as store:
        session = store.session("s")
        made = [session.save({"t": each}) for each in (berlin, plain)]
        assert [c.path for c in session.diff(*made)] == [("t",)]
        monkeypatch.setattr(values, "_known_zones", frozenset)
        assert [c.path for c in session.diff(*made)] == [()]
