"""A checkpoint costs what changed: in bytes written, for each way in which states change."""

from __future__ import annotations

import itertools
import random
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import Any

import pytest

import holdfast
from holdfast import Retention
from holdfast.format import item_streams, list_encodings, memory_limit, nodes, records, values
from holdfast.history.load import Series
from tests.format import format_reader
from tests.mutants import storage
from tests.support.stores import TEXT, Home

RNG = random.Random(7)
WORDS = [f"{RNG.getrandbits(40):x}" for _ in range(4000)]


def text(size: int) -> str:
    return " ".join(RNG.choices(WORDS, k=size // 10))[:size]


def messages(count: int, size: int = 1200) -> list[Any]:
    return [{"role": "user", "n": n, "content": text(size)} for n in range(count)]


def compacted() -> Iterator[Any]:
    """The first 800 messages become a summary."""
    log = messages(1000)
    yield log
    log = [text(2000), *log[800:]]
    yield log
    for _ in range(4):
        yield (log := [*log, text(1200)])


def cut() -> Iterator[Any]:
    log = messages(300)
    yield log
    yield log[:200]
    yield log[:50] + log[90:200]


def reordered() -> Iterator[Any]:
    log = messages(300)
    yield log
    for _ in range(5):
        yield (log := RNG.sample(log, len(log)))


def edited(count: int = 500, size: int = 1200, steps: int = 20) -> Iterator[Any]:
    log = messages(count, size)
    yield log
    for _ in range(steps):
        log = [*log]
        log[RNG.randrange(count)] = text(size)
        yield log


def scattered() -> Iterator[Any]:
    """Edits all over a list of short items, which fall into ever more pieces."""
    return edited(600, 100, 900)


def grown() -> Iterator[Any]:
    """One long text, which has grown before."""
    whole = text(60_000)
    yield whole
    yield (whole := whole + text(400))
    for _ in range(20):
        yield (whole := whole + text(400))


def nested() -> Iterator[Any]:
    log, files = messages(200), {f"f{n}": text(5000) for n in range(40)}
    yield {"channel": {"values": log}, "files": files}
    for n in range(20):
        log, files = [*log, *messages(1)], files | {f"f{n}": text(1000)}
        yield {"channel": {"values": log}, "files": files}


# Each with the most that a step may write, as a part of the first state.
WAYS: list[tuple[Callable[[], Iterator[Any]], float]] = [
    (compacted, 0.005), (cut, 0.005), (reordered, 0.01), (edited, 0.02), (nested, 0.04),
]  # fmt: skip


def costs(home: Home, way: Callable[[], Iterator[Any]]) -> list[float]:
    """What each step but the first wrote, as a part of the first state."""
    session = home.session()
    saved = []
    for value in way():
        saved.append(session.save({"value": value}))
        last = value
    home.reopened()
    assert home.session().load() == {"value": last}
    return [c.added / saved[0].size for c in saved[1:]]


@pytest.mark.parametrize(("way", "most"), WAYS, ids=lambda x: getattr(x, "__name__", ""))
def test_a_step_writes_what_changed(home: Home, way: Any, most: float) -> None:
    assert max(costs(home, way)) <= most


def test_mutant_that_matches_nothing_by_content(
    sqlite: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.nothing_is_matched_by_content(monkeypatch)
    assert max(costs(sqlite, reordered)) > 0.1


def test_a_text_that_grows(home: Home) -> None:
    first, *rest = costs(home, grown)  # the first time, it is taken apart
    assert first < 0.6
    assert sorted(rest)[len(rest) // 2] < 0.01
    assert mean(rest) < 0.05  # now and then, pieces are packed together


def mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def test_pieces_are_put_together_again(sqlite: Home) -> None:
    """It pays: on average steps write little, rewriting included."""
    assert mean(costs(sqlite, scattered)) < 0.017


def test_mutant_that_leaves_all_pieces(sqlite: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.fragments_stay(monkeypatch)
    assert mean(costs(sqlite, scattered)) > 0.022


# -- memory ----------------------------------------------------------------------------------------

LIMIT = 1 << 20


def kept(store: holdfast.Store) -> int:
    """Bytes that stay in memory after saves to many sessions."""
    states = [{"log": messages(150)} for _ in range(30)]
    sessions = [store.session(f"s{n}") for n in range(30)]
    tracemalloc.start()
    try:
        for session, state in zip(sessions, states, strict=True):
            session.save(state)
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_images_stay_within_their_bound(sqlite: Home) -> None:
    with holdfast.open(sqlite.path, durability="normal", cache_bytes=LIMIT) as store:
        assert kept(store) < 2 * LIMIT
        assert 0 < store._repository.images.bytes <= LIMIT


def test_mutant_without_a_bound(sqlite: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    init = list_encodings.ImageCache.__init__
    monkeypatch.setattr(list_encodings.ImageCache, "__init__", lambda self, _: init(self, 1 << 40))
    with holdfast.open(sqlite.path, durability="normal", cache_bytes=LIMIT) as store:
        assert kept(store) > 3 * LIMIT


# -- lists of tiny items ---------------------------------------------------------------------------

TINY = "item {:014d}"


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of bytes that holdfast hashes, one entry for each hash."""
    sizes: list[int] = []

    def counting(data: bytes = b"") -> Any:
        sizes.append(len(data))
        return sha256(data)

    for name, module in [*sys.modules.items()]:
        if name.startswith("holdfast.") and getattr(module, "sha256", None) is sha256:
            monkeypatch.setattr(module, "sha256", counting)
    return sizes


def tiny(count: int) -> list[str]:
    return [TINY.format(n) for n in range(count)]


def test_an_append_to_a_list_of_tiny_items_hashes_the_item(home: Home, hashed: list[int]) -> None:
    """The list's length does not matter, whether its image is in memory or not."""
    most = {}
    for count in (1000, 20_000):
        home.session(f"of {count}").save({"log": tiny(count)})
        session = home.reopened().session(f"of {count}")
        spent = []
        for n in range(count, count + 12):
            hashed.clear()
            session.append("log", TINY.format(n))
            spent.append(sum(hashed))
        most[count] = max(spent)
        assert session.load() == {"log": tiny(count + 12)}
    assert home.store.verify(read_data=True).ok
    assert most[20_000] < 1.1 * most[1000] < 2000


def test_verify_of_a_growing_list_of_tiny_items_is_linear(sqlite: Home, hashed: list[int]) -> None:
    spent = {}
    for count in (1500, 6000):
        session = sqlite.session(f"of {count}")
        session.save({"log": tiny(900)})
        for n in range(900, count, 10):
            session.append("log", *[TINY.format(m) for m in range(n, n + 10)])
        hashed.clear()
        assert sqlite.store.verify(read_data=True, sessions=[session.name]).ok
        spent[count] = sum(hashed)
    assert spent[6000] < 6 * spent[1500]


def test_items_of_any_size_around_the_bound_grow_cheaply(home: Home, hashed: list[int]) -> None:
    """An average of 32 bytes, now a little more and now less."""
    items = [text(RNG.randrange(10, 50)) for _ in range(2000)]
    session = home.session()
    session.save({"log": items})
    most = 0
    for _ in range(300):
        items.append(text(RNG.randrange(10, 50)))
        hashed.clear()
        session.append("log", items[-1])
        most = max(most, sum(hashed))
    assert session.load() == {"log": items}
    assert home.session("t").save({"log": items}).state_hash == session.get().state_hash
    assert most < 2000


def test_a_list_of_tiny_items_that_version_1_wrote(
    sqlite: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was hashed whole. It verifies, it has no difference to what it is now, and it grows."""
    with monkeypatch.context() as before:
        before.setattr(nodes, "LIST_DENSE", 1 << 40)
        old = sqlite.session("t").save({"log": tiny(1000), "z": 1})
        sqlite.session("s").save({"log": tiny(1000), "z": 1})
        sqlite.session("s").append("log", TINY.format(1000))  # now in fragments
    store = sqlite.reopened()
    session = store.session("t")
    patched = session.patch(set={"z": 2})
    assert patched.state_hash != store.session("u").save(session.load()).state_hash
    back = session.save({"log": tiny(1000), "z": 1})
    assert back.state_hash != old.state_hash
    assert not session.diff(old.id, back.id)
    assert session.blame("log").id == old.id
    assert session.blame("z").id == back.id
    grown = store.session("s").append("log", TINY.format(1001))
    assert store.session("v").save({"log": tiny(1002), "z": 1}).state_hash == grown.state_hash
    assert store.verify(read_data=True).ok
    with holdfast.open("memory:") as other:
        store.copy(other)
        assert other.verify(read_data=True).ok
        assert other.session("t").get(old.id).state_hash == old.state_hash
    sqlite.close()
    reader = format_reader.Store(sqlite.path)
    for number in reader.sessions().values():
        for checkpoint in reader.tree(number):
            _, digest = reader.state(checkpoint)
            assert reader.record_hash(checkpoint, digest) == checkpoint.hash
    reader.close()


def test_a_batch_that_does_not_fit_its_stream_begins_another(
    sqlite: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(item_streams, "MAX_ITEMS", 300)
    session = sqlite.session()
    log, more = messages(250, 100), messages(100, 100)
    session.save({"log": log})
    session.append("log", *more)
    assert session.load() == {"log": log + more}
    tip = session._writer.parent
    root: Any = nodes.parse(tip.root if tip else b"")
    assert [n for _, _, n in root.children[0].extents] == [250, 100]


# -- reading ancestors -----------------------------------------------------------------------------


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The records of checkpoints that are decoded, by their numbers."""
    seqs: list[int] = []
    unseal = records.unseal_checkpoint

    def counting(session: int, seq: int, id: bytes, body: bytes) -> records.Row:
        seqs.append(seq)
        return unseal(session, seq, id, body)

    monkeypatch.setattr(records, "unseal_checkpoint", counting)
    return seqs


def counted(home: Home, count: int) -> holdfast.Session:
    for n in range(count):
        home.session().save({"i": n})
    return home.session()


def test_the_newest_of_a_long_history_are_read_alone(home: Home, decoded: list[int]) -> None:
    session = counted(home, 60)
    decoded.clear()
    assert [c.seq for c in itertools.islice(session.history(), 3)] == [60, 59, 58]
    assert len(decoded) < 10
    decoded.clear()
    assert session.blame("i").seq == 60
    assert len(decoded) < 10
    assert [c.seq for c in session.history()] == [*range(60, 0, -1)]


def test_changes_read_two_checkpoints(home: Home, decoded: list[int]) -> None:
    pytest.importorskip("starlette")
    from holdfast.web import api, params

    id = counted(home, 60).get().id
    decoded.clear()
    found = api.changes(home.store, params.Params({"id": id}))
    assert [each["path"] for each in found["changes"]] == [["i"]]
    assert {*decoded} == {59, 60}
    assert len(decoded) < 10


# -- memory that reading takes ---------------------------------------------------------------------

DENSE: dict[str, Any] = {
    "empty lists": [[]] * 6000,
    "empty dicts": [{}] * 6000,
    "nested lists": [[[[[]]]]] * 3000,
    "dicts": [{"": {}}] * 3000,
    "a dict": {f"{n}": n for n in range(5000)},
    "short texts": ["ab"] * 6000,
    "floats": [0.5] * 6000,
    "numbers": [1] * 20_000,
    "tuples": [()] * 6000,
    "a set": {*range(5000)},
    "wide text": "x" * 60_000 + "\U0001f600",
    "several lists": {f"{n}": [[]] * 1000 for n in range(10)},
}
ROOM = 150_000


@pytest.mark.parametrize("what", DENSE)
def test_a_state_that_takes_too_much_memory_is_not_loaded(home: Home, what: str) -> None:
    """Neither by itself nor as a part of others; whoever allows more gets it."""
    state = {"x": DENSE[what], "y": 1}
    session = home.session()
    session.save({"y": 1})
    session.save(state)
    session = home.reopened().session(session.name)
    reads: list[Callable[[], Any]] = [
        session.load,
        lambda: Series(home.store._repository.backend, session.name).load(session.get()),
        lambda: session.diff("@~1"),
    ]
    for read in reads:
        with holdfast.memory_limit(ROOM), pytest.raises(holdfast.TooBig) as refusal:
            read()
        assert "memory_limit" in (refusal.value.hint or "")
        read()
    with holdfast.memory_limit(ROOM):
        assert session.load("@~1") == {"y": 1}
        assert session.patch(set={"y": 2}).step == 3
    assert session.load() == state | {"y": 2}


def test_text_takes_no_more_memory_than_it_has(home: Home) -> None:
    state = {
        "messages": messages(100, 4000),
        "doc": text(900_000),
        "bytes": bytes(range(256)) * 999,
    }
    session = home.session()
    session.save(state)
    with holdfast.memory_limit(ROOM):
        assert home.reopened().session(session.name).load() == state


def test_what_data_takes_is_known_before_it_is_decoded() -> None:
    """To a factor of a few: a bound in memory need not be exact."""
    rng = random.Random(3)

    def some(depth: int) -> Any:
        kinds: list[Callable[[], Any]] = [
            lambda: rng.choice([None, 1, 7.5, 1 << 40, "a", text(rng.randrange(200)), b"ab"]),
            lambda: [some(depth - 1) for _ in range(rng.randrange(6))],
            lambda: {f"{n}": some(depth - 1) for n in range(rng.randrange(6))},
            lambda: tuple([some(depth - 1) for _ in range(rng.randrange(3))]),
        ]
        return rng.choice(kinds if depth else kinds[:1])()

    for _ in range(200):
        data = values.encode([some(6) for _ in range(20)])
        held = taken(values.decode(data))
        assert 0.3 * held < memory_limit._count(data, 1 << 40) + len(data) < 3 * held + 1000


def taken(value: Any) -> int:
    inner: list[Any] = []
    if isinstance(value, dict):
        inner = [*value, *value.values()]
    elif isinstance(value, list | tuple):
        inner = [*value]
    return sys.getsizeof(value) + sum(map(taken, inner))


@pytest.mark.parametrize("limit", [0, -1, 1.5, "1 GB", None, True])
def test_a_limit_of_memory_is_a_number_of_bytes(limit: Any) -> None:
    with (
        pytest.raises(holdfast.InvalidRequest, match="number of bytes"),
        holdfast.memory_limit(limit),
    ):
        pass


def test_full_saves_of_a_growing_list_cost_what_changed(home):
    """Full-state saves of a conversation: the second half costs what the first did."""
    session = home.session()
    costs = []
    log: list[dict[str, Any]] = []
    for n in range(160):
        log.append({"role": "user", "n": n, "content": f"{n * 7919} {TEXT[n % 40 :]}"})
        costs.append(session.save({"log": log, "n": n}).added)
    raw = session.head.size
    assert sum(costs) < 2 * raw
    assert sum(costs[80:]) < 1.3 * sum(costs[:80])
    if home.durable:
        home.reopened()
        # Plain files hold a readable record of each step. In full they would be 80 times raw.
        assert home.size() < (4 if home.kind == "files" else 3) * raw
    assert home.session().load()["log"] == log


def test_text_is_compressed(home):
    session = home.session()
    saved = session.save({"text": TEXT * 500, "log": [{"n": n, "text": TEXT} for n in range(300)]})
    assert saved.size > 250_000
    assert saved.added < saved.size / 10
    home.reopened()
    if home.kind == "files":  # for people to read: as long as it is, and there once
        assert saved.size < home.size() < 1.2 * saved.size
    else:
        assert home.size() < saved.size / 2


def test_operations_copy_no_data(home: Home) -> None:
    """Neither what is undone and redone, nor what is forked, tagged or pruned, is written again."""
    session = home.session()
    rng = random.Random(1)
    for n in range(20):
        session.patch(append={"log": [rng.randbytes(100).hex() for _ in range(50)]}, set={"n": n})

    def size() -> int:
        return sum(home.store.stats().bytes.values())

    state, before = session.get().size, size()
    for n in range(30):
        session.undo()
        session.redo()
        session.rewind("@~1")
        session.undo()
        session.tag("@", f"t{n}")
        session.fork(f"f{n}", "@~1")
        session.delete("@~1")
        session.undo()
    assert size() - before < 30 * state / 20
    session.prune(Retention(keep_last=10))
    assert size() - before < 30 * state / 20


def test_gc_leaves_data_compressed(home: Home) -> None:
    session = home.session()
    log = [{"n": n, "text": f"{n} {TEXT}"} for n in range(300)]
    session.save({"log": log})
    session.save({"log": log[200:]})
    session.delete("@~1")
    assert home.store.gc().rows > 0
    assert session.load() == {"log": log[200:]}
    stats = home.store.stats()
    # Files are for people to read: nothing is compressed there, and what is dead is gone.
    most = session.get().size * (1.3 if home.kind == "files" else 0.2)
    assert stats.bytes["items"] + stats.bytes["blobs"] < most
