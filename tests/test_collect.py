"""gc frees what nothing refers to, and nothing else."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.live import Spans
from tests.test_layout import message, text

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[holdfast.Store]:
    url = "memory:" if request.param == "memory" else tmp_path / "store.db"
    with holdfast.open(url, durability="normal") as store:
        yield store


def some_state(rng: random.Random, i: int) -> dict[str, Any]:
    """A state with a bit of everything that is stored in its own way."""
    return {
        "i": i,
        "log": [message(rng, n) for n in range(rng.randrange(12))],
        "files": {f"f{n}": text(rng, rng.choice([20, 700])) for n in range(rng.randrange(30))},
        "big": text(rng, rng.choice([10, 5_000, 30_000])),
        "nested": {"deep": [{"log": [message(rng, n) for n in range(12)]} for _ in range(3)]},
        "raw": rng.randbytes(rng.choice([3, 9_000])),
        "same": "s" * 6_000,
    }


def edit(rng: random.Random, state: dict[str, Any], i: int) -> dict[str, Any]:
    state = {**state, "i": i}
    log = list(state["log"])
    roll = rng.randrange(9)
    if roll < 3:
        log += [message(rng, i), message(rng, i)]
    elif roll == 3 and log:
        log[rng.randrange(len(log))] = message(rng, i)
    elif roll == 4:
        del log[: len(log) // 2]
    elif roll == 5:
        state["files"] = {**state["files"], f"f{i % 40}": text(rng, 700)}
    elif roll == 6:
        state["big"] = state["big"] + text(rng, 3_000)
    elif roll == 7:
        deep = [dict(d) for d in state["nested"]["deep"]]
        deep[i % 3]["log"] = [*deep[i % 3]["log"], message(rng, i)]
        state["nested"] = {"deep": deep}
    else:
        state["big"] = text(rng, 8_000)
        state["raw"] = rng.randbytes(9_000)
    return state | {"log": log}


@pytest.mark.parametrize("seed", range(12))
def test_what_is_left_loads_as_before(store: holdfast.Store, seed: int) -> None:
    rng = random.Random(seed)
    sessions = [store.session("a"), store.session("b", agent="x")]
    expected: dict[str, Any] = {}
    states: dict[str, Any] = {}
    for i in range(60):
        session = rng.choice(sessions)
        before = states.get(session.name) or some_state(rng, i)
        state = edit(rng, before, i)
        extra = {"tags": ["t"]} if i % 7 == 0 else {"trigger": "x", "key": f"k{i}"}
        saved = session.save(state, **extra)
        expected[saved.id] = states[session.name] = state
        if i % 11 == 10:
            session.rewind(rng.choice(list(session.tree())))
            states[session.name] = session.load()
        if i in (20, 40):
            fork = session.fork(f"fork {i}", rng.choice(list(session.history())))
            sessions.append(fork)
            states[fork.name] = fork.load()
            assert fork.head is not None
            expected[fork.head.id] = fork.load()
        if i % 9 == 8:
            _delete_some(rng, session, expected)
        if i % 13 == 12:
            store.gc()
            _check(store, sessions, expected)
    store.gc()
    _check(store, sessions, expected)
    assert store.gc() == (0, 0, 0, 0)
    for session in sessions[1:]:
        session.delete()
        for checkpoint in [c for c in expected if c not in _ids(store)]:
            del expected[checkpoint]
    store.gc()
    _check(store, sessions[:1], expected)
    assert [s.name for s in store.sessions()] == ["a"]


def _ids(store: holdfast.Store) -> set[str]:
    return {c.id for info in store.sessions() for c in store.session(info.name).tree()}


def _delete_some(rng: random.Random, session: holdfast.Session, expected: dict[str, Any]) -> None:
    for checkpoint in list(session.tree()):
        if checkpoint != session.head and rng.random() < 0.5:
            session.delete(checkpoint)
            del expected[checkpoint.id]


def _check(
    store: holdfast.Store, sessions: list[holdfast.Session], expected: dict[str, Any]
) -> None:
    report = store.verify(read_data=True)
    assert report.ok, str(report)
    assert _ids(store) == set(expected)
    for session in sessions:
        for checkpoint in session.tree():
            assert session.load(checkpoint.id) == expected[checkpoint.id]
        line = list(session.history())
        for child, parent in itertools.pairwise(line):
            assert child.ancestor == parent.id
            assert child.pruned == child.step - parent.step - 1
        assert line[-1].ancestor is None


def test_nothing_is_left_of_what_was_deleted(store: holdfast.Store) -> None:
    rng = random.Random(3)
    keep = store.session("keep")
    keep.save({"k": 1})
    empty = _rows(store)
    session = store.session("s", agent="a")
    for i in range(30):
        session.save(some_state(rng, i), label=f"l{i}", tags=["t"], key=f"k{i}", trigger="x")
    session.fork("f").save(some_state(rng, 99))
    store.session("f").delete()
    session.delete()
    assert _rows(store) != empty
    store.gc()
    assert _rows(store) == empty


def _rows(store: holdfast.Store) -> dict[str, Any]:
    with store.backend.reader() as reader:
        counts = {kind: count for kind, (count, _) in reader.sizes().items()}
        for kind, value in ((0, b"l3"), (1, b"t"), (2, b"x"), (4, b"a")):
            counts[f"facets {kind}"] = len(reader.find_facets(kind, value, b"", b"\xff" * 15, 99))
        counts["keys"] = sum(reader.find_key(n, b"k3") is not None for n in range(50))
        return counts


def test_spans() -> None:
    rng = random.Random(1)
    for _ in range(300):
        spans, model = Spans(), set[int]()
        for _ in range(20):
            low = rng.randrange(60)
            high = low + rng.randrange(1, 12)
            new = {n for a, b in spans.add(low, high) for n in range(a, b)}
            assert new == set(range(low, high)) - model
            model |= set(range(low, high))
            a = rng.randrange(60)
            b = a + rng.randrange(1, 20)
            assert {n for x, y in spans.within(a, b) for n in range(x, y)} == model & set(
                range(a, b)
            )
