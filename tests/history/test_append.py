"""The hot path of `append` and `save` writes what the general path writes, byte for byte."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

import ormsgpack
import pytest

import holdfast
import holdfast.history.writer
from holdfast.format import list_encodings, records, values
from holdfast.history import fast_append
from holdfast.storage.memory import MemoryBackend
from tests.format.test_layout import message, text
from tests.support import memory_rows

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def roots(store: holdfast.Store) -> list[tuple[int, int, bytes]]:
    """What each checkpoint says about its layout."""
    out = []
    with store._repository.reader() as reader:
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
    first = text(rng, rng.choice([300, 3700, 3850, 3950]))  # the last nearly fill a root
    sessions[0].save({"first": first, "log": [message(rng, i) for i in range(30)], "z": 1})
    tiny = seed % 4 == 1
    log = [message(rng, i) for i in range(rng.choice([1, 15, 40]))]
    sessions[1].save({"log": ["y" * 40] * 30 if tiny else log})
    edits = 0.25 if seed % 4 == 2 else 0.03  # many of them cut a list into many pieces
    total = 2
    states: dict[str, Any] = {}
    for i in range(160):
        session = rng.choice(sessions)
        roll = rng.random()
        item: Any = message(rng, i)
        if roll < 0.45 or roll >= 0.86:
            states.pop(session.name, None)
        if roll < 0.1:
            item = rng.choice(
                [
                    text(rng, 200),
                    5,
                    [1] * 400,
                    {"t": (1, 2)},
                    text(rng, 6000),
                    None,
                    ["w" * 60] * 40,
                ]
            )
        if tiny and session is sessions[1] and roll > 0.1:
            item = "y" * rng.randrange(20)
        if edits > 0.1 and roll > 0.7:
            roll = 0.95
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
        elif roll < 0.93 + edits:
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


def _cut_up() -> Iterator[Any]:
    """A list that is edited in more and more places, and grows in between."""
    log = [f"{n} " + "y" * 400 for n in range(100)]
    for n in range(2, 96, 3):
        log[n] = f"{n} edited " + "z" * 300
        yield {"log": list(log)}
        for m in range(3):
            log.append(f"{n} {m} " + "y" * 200)
            yield {"log": list(log)}


EDGES: dict[str, list[Any]] = {
    "a list in many pieces": list(_cut_up()),
    "items so small that the list is hashed whole": (
        [{"log": ["y" * 40] * 30 + ["z"] * n} for n in range(20)]
    ),
    "an item that is a long list": (
        [{"log": ["y" * 400] * 9 + [["w" * 60] * 40] * n} for n in range(4)]
    ),
    **{
        f"a root nearly full, by {size}": (
            [{"a": "x" * size, "log": ["y" * 40] * n} for n in range(120, 135)]
        )
        for size in (3800, *range(4010, 4030))
    },
}


@pytest.mark.parametrize("edge", EDGES)
def test_both_ways_write_the_same_at_the_edges(edge: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    for hot in (fast_append.grow, lambda *_: None):
        monkeypatch.setattr(holdfast.history.writer, "grow", hot)
        store = holdfast.Store(MemoryBackend())
        for state in EDGES[edge]:
            store.session("s").save(state)
        session = store.session("t")
        for state in EDGES[edge]:
            session.save(state)
        assert store.verify(read_data=True).ok
        backend = store._repository.backend
        written.append((roots(store), memory_rows.rows(backend, "items"), bodies(backend)))
    assert written[0] == written[1]


@pytest.mark.parametrize("seed", range(12))
def test_both_ways_write_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    grown = 0
    hot = fast_append.grow

    def counting(*args: Any) -> Any:
        nonlocal grown
        checkpoint = hot(*args)
        grown += checkpoint is not None
        return checkpoint

    monkeypatch.setattr(holdfast.history.writer, "grow", counting)
    quick, total = drive(seed)
    assert grown > total // 8, "the hot path was hardly taken"
    monkeypatch.setattr(holdfast.history.writer, "grow", lambda *_: None)
    slow, _ = drive(seed)
    assert roots(quick) == roots(slow)
    for stored in (lambda backend: memory_rows.rows(backend, "items"), bodies):
        assert stored(quick._repository.backend) == stored(slow._repository.backend)


def bodies(backend: Any) -> dict[Any, bytes]:
    """Return the bodies of the blobs."""
    return {key: body for key, (_, body, *_) in memory_rows.rows(backend, "blobs").items()}


class Text(str):
    __slots__ = ()


def _swap(state: Any, at: int, change: Any) -> Any:
    log = state["log"]
    return state | {"log": [*log[:at], change(log[at]), *log[at + 1 :]]}


def edited(item: dict[str, Any]) -> dict[str, Any]:
    """Another item of the same length."""
    return item | {"data": item["data"][::-1]}


def alike(item: dict[str, Any]) -> dict[str, Any]:
    """The same bytes, of another type."""
    kind = bytearray if type(item["data"]) is bytes else Text
    return item | {"data": kind(item["data"])}


def fragment(item: dict[str, Any]) -> ormsgpack.Fragment:
    return ormsgpack.Fragment(values.encode(item))


NEAR = {
    "nothing else": lambda s: s,
    "an old item edited": lambda s: _swap(s, 3, edited),
    "a new item edited": lambda s: _swap(s, 12, edited),
    "an old item's type": lambda s: _swap(s, 3, alike),
    "a new item's type": lambda s: _swap(s, 12, alike),
    "an old item as a fragment": lambda s: _swap(s, 3, fragment),
    "a new item as a fragment": lambda s: _swap(s, 12, fragment),
    "an old item dropped": lambda s: s | {"log": s["log"][:3] + s["log"][4:]},
    "another field": lambda s: s | {"z": 2},
    "another field's type": lambda s: s | {"raw": bytearray(s["raw"])},
    "another field's text": lambda s: s | {"first": Text(s["first"])},
    "a field more": lambda s: s | {"more": 1},
    "a field less": lambda s: {k: v for k, v in s.items() if k != "z"},
    "the order of fields": lambda s: {k: s[k] for k in ("first", "log", "raw", "z", "y")},
    "a field's name": lambda s: {Text(k): v for k, v in s.items()},
    "a dict for the list": lambda s: s | {"log": {"a": 1}},
    "a tuple for the list": lambda s: s | {"log": tuple(s["log"])},
    "no dict": lambda s: list(s.values()),
}


@pytest.mark.parametrize("with_bytes", ["no", "old", "new"])
@pytest.mark.parametrize("what", NEAR)
def test_a_save_that_grew_and_changed(what: str, with_bytes: str) -> None:
    """What is no mere growth is laid out, or refused, as it would be without the hot path."""
    rng = random.Random(5)
    log: list[Any] = []
    for i in range(14):
        data: Any = text(rng, 200)
        if with_bytes == ("old" if i < 10 else "new"):
            data = data.encode()
        log.append({"id": i, "data": data})
    fields = {"first": text(rng, 300), "log": None, "raw": b"raw" * 9, "y": 1, "z": 1}
    states = [fields | {"log": log[:n]} for n in range(10, 15)]
    outcomes = []
    for cache_bytes in (64 << 20, 0):
        store = holdfast.Store(MemoryBackend(), cache_bytes=cache_bytes)
        session = store.session("s")
        for state in states[:-1]:
            session.save(state)
        if cache_bytes:
            assert session._writer.growth is not None
            assert session._writer.growth.items or with_bytes != "no"
        try:
            saved = session.save(NEAR[what](states[-1]))
            loaded = session.load()
            outcomes.append((saved.state_hash, loaded, [*loaded]))
        except holdfast.NotSerializable as e:
            outcomes.append((str(e), session.load(), []))
            assert session.load() == states[-2]
        assert store.verify(read_data=True).ok
    assert outcomes[0] == outcomes[1]


def test_the_hot_path_is_taken_by_a_plain_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the second save already, with fields and with several items; not with a label or a key."""
    took: list[str] = []
    hot = fast_append.grow

    def counting(*args: Any) -> Any:
        checkpoint = hot(*args)
        took.append(args[4] if checkpoint else "refused")
        return checkpoint

    monkeypatch.setattr(holdfast.history.writer, "grow", counting)
    rng = random.Random(6)
    with holdfast.open("memory:") as store:
        session = store.session("s")
        log = [message(rng, i) for i in range(12)]
        session.save({"log": log})
        assert took == []
        session.save({"log": [*log, message(rng, 12)]})
        log = session.load()["log"]
        session.save({"log": [*log, message(rng, 13)]})
        log = session.load()["log"]
        assert took == ["save"], "a load starts afresh"
        session.save({"log": log})
        for n in range(14, 18):
            log.append(message(rng, n))
            session.save({"log": log}, trigger="loop", meta={"n": n})
            assert session.get().meta == {"n": n}
            log += [message(rng, n), message(rng, n)]
            session.save({"log": log})
        assert took.count("save") >= 7
        before = len(took)
        for extra in ({"label": "x"}, {"tags": ["x"]}, {"key": "k"}):
            log.append(message(rng, 99))
            session.save({"log": log}, **extra)
        assert len(took) == before
        assert session.get("label:x").step + 1 == session.get("tag:x").step
        assert session.get("key:k") == session.head
        session.append("log", message(rng, 100))
        before = len(took)
        for extra in ({"label": "y"}, {"tags": ["y"]}, {"key": "l"}):
            session.append("log", message(rng, 101), **extra)
        assert len(took) == before
        assert session.get("label:y").step + 1 == session.get("tag:y").step
        assert session.get("key:l") == session.head
        assert session.load()["log"][: len(log)] == log
        assert store.verify(read_data=True).ok


def test_the_clock_set_back_between_two_appends(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(7)
    with holdfast.open("memory:") as store:
        session = store.session("s")
        session.save({"log": [message(rng, i) for i in range(30)]})
        now = time.time_ns()
        saved = []
        for n in range(8):
            monkeypatch.setattr(time, "time_ns", lambda n=n: now - n * 10**12)
            assert session._writer.growth is not None
            saved.append(session.append("log", message(rng, n)))
        assert saved == sorted(saved, key=lambda c: c.id)
        assert [c.created_at for c in saved] == [saved[0].created_at] * 8
        assert list(session.history())[:8] == saved[::-1]


class Restless:
    """A model that is never the same twice."""

    def __init__(self) -> None:
        self.dumps = 0

    def model_dump(self, **_: Any) -> dict[str, int]:
        self.dumps += 1
        return {"n": self.dumps}

    @classmethod
    def model_validate(cls, _: Any) -> Restless:
        return cls()


def test_an_item_that_changes_while_it_is_saved() -> None:
    rng = random.Random(8)
    with holdfast.open("memory:") as store:
        session = store.session("s")
        log = [message(rng, i) for i in range(30)]
        session.save({"log": log})
        with pytest.raises(holdfast.InvalidRequest, match="changed while it was being saved"):
            session.save({"log": [*log, {"m": Restless()}]})
        assert session.load() == {"log": log}
        assert store.verify(read_data=True).ok


@pytest.mark.parametrize("kind", ["memory:", "sqlite"])
@pytest.mark.parametrize("how", ["append", "save"])
@pytest.mark.parametrize("meanwhile", ["append", "rewind", "tag"])
def test_the_head_moved(kind: str, how: str, meanwhile: str, tmp_path: Path) -> None:
    """The hot path, too, writes only onto the head it expects, and nothing of what is refused."""
    rng = random.Random(9)
    with holdfast.open(tmp_path / "store.db" if kind == "sqlite" else kind) as store:
        session = store.session("s")
        log = [message(rng, i) for i in range(20)]
        session.save({"log": log})
        log.append(message(rng, 20))
        session.append("log", log[-1])
        other = store.session("s")
        if meanwhile == "append":
            other.append("log", "other")
        elif meanwhile == "rewind":
            other.rewind("@~1")
        else:
            other.tag(None, "seen")
        before = other.load()
        new = message(rng, 21)

        def write() -> holdfast.Checkpoint:
            if how == "append":
                return session.append("log", new)
            return session.save({"log": [*log, new]})

        assert session._writer.growth is not None
        if meanwhile == "tag":
            assert write().step == 3
            assert session.load() == {"log": [*log, new]}
        else:
            with pytest.raises(holdfast.HeadMoved):
                write()
            assert store.session("s").load() == before
            assert len(session) == (3 if meanwhile == "append" else 2)
        assert store.verify(read_data=True).ok


def test_joined_chunks_know_what_either_holds() -> None:
    """Also what was worked out before: the types that bytes leave open, and hashes."""
    plain, tagged = (
        list_encodings.group([(values.encode({"data": data}), None)])[0]
        for data in ("text", b"bytes")
    )
    assert (plain.lookalikes(), tagged.lookalikes()) == (False, True)
    for a, b in ((plain, tagged), (tagged, plain)):
        assert a.joined(b).lookalikes()
        assert a.joined(b).hashes() == a.hashes() + b.hashes()
    assert not plain.joined(plain).lookalikes()
