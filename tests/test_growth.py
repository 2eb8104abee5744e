"""The hot path of `append` and `save` writes what the general path writes, byte for byte."""

from __future__ import annotations

import random
from typing import Any

import pytest

import holdfast
import holdfast.writing
from holdfast import growth
from holdfast.backends.memory import MemoryBackend
from holdfast.codec import records
from tests.test_layout import message, text


def roots(store: holdfast.Store) -> list[tuple[int, int, bytes]]:
    """What each checkpoint says about its layout."""
    out = []
    with store.backend.reader() as reader:
        for number, _, _ in reader.sessions(None, 10):
            for seq, id, body in reader.checkpoints(number, 1, records.MAX_SEQ, 10_000):
                row = records.unseal_checkpoint(number, seq, id, body)
                out.append((row.line, row.record.size, row.root))
    return out


def drive(seed: int) -> tuple[holdfast.Store, int]:
    """The same work for the same seed: mostly appends, on two sessions and a fork."""
    rng = random.Random(seed)
    backend = MemoryBackend()
    store = holdfast.Store(backend, cache_bytes=rng.choice([0, 64 << 20]))
    sessions = [store.session("a", agent=rng.choice([None, "x"])), store.session("b")]
    sessions[0].save({"first": text(rng, 300), "log": [message(rng, i) for i in range(30)], "z": 1})
    sessions[1].save({"log": [message(rng, i) for i in range(rng.choice([1, 15, 40]))]})
    total = 2
    states: dict[str, Any] = {}
    for i in range(160):
        session = rng.choice(sessions)
        roll = rng.random()
        item: Any = message(rng, i)
        if roll < 0.45 or roll >= 0.86:
            states.pop(session.name, None)
        if roll < 0.1:
            item = rng.choice([text(rng, 200), 5, [1] * 400, {"t": (1, 2)}, text(rng, 6000), None])
        if roll < 0.45:
            session.append("log", item)
        elif roll < 0.86:
            grown = states.setdefault(session.name, None) or session.load()
            grown["log"] += [item, *[message(rng, i) for _ in range(rng.choice([0, 0, 1, 2, 5]))]]
            session.save(grown)
            states[session.name] = grown
            total += 1
            continue
        elif roll < 0.9:
            session.append("log", item, text(rng, 50))
        elif roll < 0.93:
            session.patch(set={"z": i})
        elif roll < 0.96:
            state = session.load()
            state["log"][rng.randrange(len(state["log"]))] = item
            session.save(state)
        elif roll < 0.98 and min(session.step, len(session)) > 3 and session.name != "c":
            session.rewind(f"@~{rng.randrange(1, 3)}")
            continue
        elif len(sessions) < 3:
            sessions.append(session.fork("c"))
        else:
            continue
        total += 1
    assert store.verify(read_data=True).ok
    return store, total


@pytest.mark.parametrize("seed", range(12))
def test_both_ways_write_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    grown = 0
    hot = growth.grow

    def counting(*args: Any) -> Any:
        nonlocal grown
        checkpoint = hot(*args)
        grown += checkpoint is not None
        return checkpoint

    monkeypatch.setattr(holdfast.writing, "grow", counting)
    quick, total = drive(seed)
    assert grown > total // 4, "the hot path was hardly taken"
    monkeypatch.setattr(holdfast.writing, "grow", lambda *_: None)
    slow, _ = drive(seed)
    assert roots(quick) == roots(slow)
    assert isinstance(quick.backend, MemoryBackend)
    assert isinstance(slow.backend, MemoryBackend)
    assert quick.backend._streams == slow.backend._streams
    assert quick.backend._blobs == slow.backend._blobs
