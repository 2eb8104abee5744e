"""Many states in a row: each what a load of its own gives, and each item read once."""

from __future__ import annotations

import itertools
import random
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.errors import CheckpointNotFound, Corrupt, SessionNotFound
from holdfast.format import load as loading
from holdfast.format import msgpack, nodes, values
from holdfast.format.rows import ItemRow
from holdfast.history.load import Series
from tests.format.test_layout import message
from tests.maintenance.test_gc import edit, some_state
from tests.mutants import history
from tests.support import memory_rows
from tests.support.equality import same

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.stores import Home


def series(session: holdfast.Session, **options: Any) -> Series:
    return Series(session._repository.backend, session.name, **options)


def edited(store: holdfast.Store, seed: int, count: int = 40) -> holdfast.Session:
    """A session whose states grow, shrink and are edited, with branches."""
    rng = random.Random(seed)
    session = store.session("s")
    state = some_state(rng, 0)
    for i in range(count):
        if i and rng.random() < 0.1:
            back = rng.choice([*session.tree()])
            session.rewind(back)
            state = session.load()
        state = edit(rng, state, i)
        session.save(state)
    return session


# -- the same states -----------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["newest first", "oldest first", "any"])
@pytest.mark.parametrize("limit", [0, 3_000, 1 << 20])
def test_states_are_what_a_load_gives(home: Home, order: str, limit: int) -> None:
    session = edited(home.store, seed=limit, count=25)
    found = [*session.tree(newest_first=order == "newest first")]
    if order == "any":
        random.Random(7).shuffle(found)
    states = series(session, limit=limit)
    loaded = [states.load(checkpoint) for checkpoint in found]
    assert all(same(a, session.load(c)) for a, c in zip(loaded, found, strict=True))
    assert states._known.bytes <= limit


def test_a_sliding_window(memory: Home) -> None:
    rng = random.Random(1)
    session, log = memory.session(), [message(rng, n) for n in range(60)]
    for n in range(40):
        session.save({"log": log[n : n + 20]})
    for newest_first in (True, False):
        states = series(session)
        for checkpoint in session.tree(newest_first=newest_first):
            assert states.load(checkpoint) == session.load(checkpoint)


def test_a_checkpoint_of_the_session_that_it_was_forked_from(home: Home) -> None:
    session = home.filled()
    fork = session.fork("f", at="@~1")
    fork.append("log", "more")
    states = series(fork)
    for checkpoint in fork.history():
        assert states.load(checkpoint) == fork.load(checkpoint)
    with pytest.raises(CheckpointNotFound, match="belongs to another session"):
        states.load(session.get())


def test_what_was_deleted_is_not_found(home: Home) -> None:
    session = home.filled()
    states, gone, kept = series(session), session.get("@~1"), session.get()
    states.load(gone)
    session.delete(gone)
    with pytest.raises(CheckpointNotFound):
        states.load(gone)
    home.store.gc()
    with pytest.raises(CheckpointNotFound):
        states.load(gone)
    assert states.load(kept) == session.load(kept)
    session.delete()
    with pytest.raises(SessionNotFound):
        states.load(kept)


def test_states_do_not_share_their_lists(memory: Home) -> None:
    session = memory.filled()
    states = series(session)
    new, old = states.load(session.get()), states.load(session.get("@~1"))
    new["log"].clear()
    old["log"].append("changed")
    for back in ("@", "@~1"):
        assert states.load(session.get(back)) == session.load(back)


# -- what it costs -------------------------------------------------------------------------------


def times_read(session: holdfast.Session, states: Series, *, newest_first: bool) -> int:
    """How many items are decoded for all states."""
    decoded = []
    with pytest.MonkeyPatch.context() as patch:
        read = loading._Loader._read

        def counted(*args: Any) -> loading.Run:
            decoded.append(read(*args))
            return decoded[-1]

        patch.setattr(loading._Loader, "_read", counted)
        for checkpoint in session.tree(newest_first=newest_first):
            states.load(checkpoint)
    return sum(len(run.values) for run in decoded)


@pytest.mark.parametrize("newest_first", [True, False])
def test_each_item_is_read_once(sqlite: Home, newest_first: bool) -> None:
    rng = random.Random(2)
    session = sqlite.session()
    for n in range(100):
        session.append("log", message(rng, n), {"big": "x" * 5_000, "n": n})
    held = len(session.load()["log"])
    assert times_read(session, series(session), newest_first=newest_first) <= held
    assert times_read(session, series(session, limit=0), newest_first=newest_first) > 10 * held


def test_the_streams_used_last_are_kept() -> None:
    known = loading.Known(limit=25)
    for stream in (1, 2):
        known.put(stream, loading.Run(0, ["item"], [10], [0]))
    known.get(1, 0, 1)
    known.put(3, loading.Run(0, ["item"], [10], [0]))
    assert [known.get(n, 0, 1).values for n in (1, 2, 3)] == [["item"], [], ["item"]]
    assert known.bytes == 20
    known.put(1, loading.Run(0, ["item"] * 3, [10] * 3, [0] * 3))
    assert known.bytes == 0


# -- damage --------------------------------------------------------------------------------------


def flipped(body: bytes, bit: int) -> bytes:
    at = bit % (8 * len(body))
    changed = bytearray(body)
    changed[at >> 3] ^= 1 << (at & 7)
    return bytes(changed)


def outcome(load: Callable[[Any], Any], checkpoint: holdfast.Checkpoint) -> Any:
    try:
        return load(checkpoint)
    except Corrupt as e:
        return e.message


@pytest.mark.parametrize("order", ["newest first", "oldest first", "any"])
def test_one_flipped_bit_fails_the_states_that_hold_it(memory: Home, order: str) -> None:
    rng = random.Random(order)
    session = edited(memory.store, seed=11)
    found = [*session.tree(newest_first=order == "newest first")]
    if order == "any":
        rng.shuffle(found)
    sound = [session.load(c) for c in found]
    backend = session._repository.backend
    failed = set()
    for key, (pos, body) in memory_rows.rows(backend, "items").items():
        memory_rows.damage(backend, "items", flipped(body, rng.getrandbits(30)), pos)
        states = series(session)
        got = [outcome(states.load, c) for c in found]
        alone = [outcome(session.load, c) for c in found]
        assert all(map(same, got, alone))
        hurt = [type(state) is str for state in got]
        assert all(h or same(g, s) for h, g, s in zip(hurt, got, sound, strict=True))
        failed.add(sum(hurt))
        memory_rows.put(backend, "items", key, (pos, body))
        assert all(same(states.load(c), s) for c, s in zip(found, sound, strict=True))
    assert len(failed) > 3
    assert any(0 < count < len(found) for count in failed)


def test_the_newest_item_is_damaged(home: Home) -> None:
    session = home.session()
    for n in range(25):
        session.append("log", {"n": n, "text": "x" * 100})
    before = session.load("@~1")
    home.spoil_newest_item()
    states = series(session)
    head, *others = session.history()
    with pytest.raises(Corrupt, match="item"):
        states.load(head)
    assert states.load(others[0]) == before
    assert [len(states.load(c)["log"]) for c in others] == [*range(24, 0, -1)]
    with pytest.raises(Corrupt, match="item"):
        states.load(head)


def test_a_damaged_record(home: Home) -> None:
    session = home.filled()
    states = series(session)
    head, below, *_ = session.history()
    states.load(head)
    home.spoil_checkpoint(below.seq)
    with pytest.raises(Corrupt, match=f"checkpoint {below.seq}"):
        states.load(below)
    assert states.load(head) == session.load(head)


def test_mutant_that_keeps_items_beside_their_place(
    memory: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    history.items_are_kept_beside_their_place(monkeypatch)
    with pytest.raises((AssertionError, Corrupt)):
        test_a_sliding_window(memory)


# -- bytes made to harm --------------------------------------------------------------------------


class Shelf:
    """Items and blobs whose digests are right, whatever they hold."""

    def __init__(
        self, items: list[tuple[bytes, bool]], cuts: list[int], blobs: list[bytes]
    ) -> None:
        bounds = sorted({0, len(items), *[cut % len(items) for cut in cuts]})
        self._rows: list[tuple[int, ItemRow]] = []
        for low, high in itertools.pairwise(bounds):
            data, ends = b"", []
            for item, _ in items[low:high]:
                data += item
                ends.append(len(data))
            refs = any(refers for _, refers in items[low:high])
            self._rows.append((low, ItemRow(ends, data, refs)))
        self._blobs = {sha256(blob).digest(): blob for blob in blobs}

    def rows(self, stream: int, start: int, stop: int) -> Iterator[tuple[int, ItemRow]]:
        for first, row in self._rows if stream == 1 else ():
            if first < stop and first + len(row.ends) > start:
                yield first, row

    def blob(self, digest: bytes, size: int) -> bytes:
        if len(self._blobs[digest]) != size:
            raise Corrupt("a blob of another size")
        return self._blobs[digest]


@st.composite
def shelves(draw: st.DrawFn) -> tuple[Shelf, list[tuple[bytes, int, bool]]]:
    """A shelf, and roots over it: their bytes, their size, and whether that is right."""
    sizes = draw(st.lists(st.one_of(st.integers(1, 60), st.just(5_000)), min_size=1, max_size=12))
    items: list[tuple[bytes, bool]] = []
    real, blobs = [], []
    for n, size in enumerate(sizes):
        flat = values.encode([n, "x" * size])
        real.append(len(flat))
        if size < 5_000:
            items.append((flat, False))
        else:
            blobs.append(flat)
            items.append((nodes.Blob(sha256(flat).digest(), len(flat)).stored, True))
    shelf = Shelf(items, draw(st.lists(st.integers(0, 99), max_size=4)), blobs)
    roots = []
    for _ in range(draw(st.integers(1, 6))):
        spans = []
        for _ in range(draw(st.integers(1, 3))):
            low = draw(st.integers(0, len(items) - 1))
            spans.append((1, low, draw(st.integers(1, len(items) - low))))
        count = sum(n for _, _, n in spans)
        size = len(msgpack.array_header(count))
        size += sum(real[i] for _, low, n in spans for i in range(low, low + n))
        off = draw(st.sampled_from([0, 0, 0, -1, 1, -40, 5_000, -5_000]))
        beyond = draw(st.sampled_from([0, 0, 0, 0, 3]))
        spans[-1] = (1, spans[-1][1], spans[-1][2] + beyond)
        claimed = max(size + off, 0)
        rope = nodes.Rope(nodes.LIST, count + beyond, claimed, bytes(32), tuple(spans), ())
        inside = draw(st.sampled_from([0, 0, 0, -1]))
        roots.append((rope.stored, claimed + inside, not (off or beyond or inside)))
    return shelf, roots


def loaded(stored: bytes, size: int, shelf: Shelf, known: loading.Known | None) -> Any:
    try:
        return loading.load(stored, size, shelf, known)
    except Corrupt:
        return Corrupt


@given(shelves(), st.sampled_from([0, 100, 1 << 20]))
def test_lies_about_sizes_are_noticed_as_by_a_load(
    made: tuple[Shelf, list[tuple[bytes, int, bool]]], limit: int
) -> None:
    shelf, roots = made
    known = loading.Known(limit)
    for stored, size, right in roots:
        alone = loaded(stored, size, shelf, None)
        got = loaded(stored, size, shelf, known)
        if right:
            assert got == alone is not Corrupt
        else:  # of items that it knows, it knows better whether they add up
            assert got is Corrupt or got == alone
        assert known.bytes <= limit


def test_known_items_count_as_what_they_expand_to() -> None:
    flat = values.encode("x" * 5_000)
    blob = nodes.Blob(sha256(flat).digest(), len(flat))
    shelf = Shelf([(blob.stored, True)], [], [flat])
    known = loading.Known(1 << 20)
    for size, right in ((len(flat) + 1, True), (len(flat) - 1, False), (len(flat) + 1, True)):
        rope = nodes.Rope(nodes.LIST, 1, size, bytes(32), ((1, 0, 1),), ())
        assert (loaded(rope.stored, size, shelf, known) is not Corrupt) == right
        assert (loaded(rope.stored, size, shelf, None) is not Corrupt) == right


def test_mutant_that_does_not_count_what_known_items_expand_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    history.known_items_expand_for_free(monkeypatch)
    with pytest.raises(AssertionError):
        test_known_items_count_as_what_they_expand_to()


def test_no_more_is_read_or_put_together_than_a_list_can_hold() -> None:
    item = values.encode("x" * 60_000)
    read = []

    class Watched(Shelf):
        def rows(self, stream: int, start: int, stop: int) -> Iterator[tuple[int, ItemRow]]:
            for first, row in super().rows(stream, start, stop):
                read.append(first)
                yield first, row

    shelf = Watched([(item, False)] * 100, [*range(100)], [])
    known = loading.Known(1 << 20)
    once = nodes.Rope(nodes.LIST, 100, 100, bytes(32), ((1, 0, 100),), ())
    with pytest.raises(Corrupt, match="more than its size"):
        loading.load(once.stored, 100, shelf, known)
    assert len(read) < 5
    assert known.bytes == 0
    again = nodes.Rope(nodes.LIST, 100, 100, bytes(32), ((1, 0, 1),) * 100, ())
    with pytest.raises(Corrupt, match="more than its size"):
        loading.load(again.stored, 100, shelf, known)
    assert len(read) < 7


def test_an_item_that_holds_its_own_list() -> None:
    spans = ((1, 0, 1),)
    rope = nodes.Rope(nodes.LIST, 1, 50, bytes(32), spans, ())
    shelf = Shelf([(rope.stored, True)], [], [])
    for known in (None, loading.Known(1 << 20)):
        assert loaded(rope.stored, 50, shelf, known) is Corrupt


def test_an_item_that_holds_what_comes_before_it() -> None:
    flat = values.encode(["x" * 40])
    inner = nodes.Rope(nodes.LIST, 2, 2 * len(flat) + 1, bytes(32), ((1, 0, 2),), ())
    shelf = Shelf([(flat, False), (flat, False), (inner.stored, True), (flat, False)], [], [])
    outer = nodes.Rope(nodes.LIST, 3, 4 * len(flat) + 2, bytes(32), ((1, 1, 3),), ())
    known, item = loading.Known(1 << 20), ["x" * 40]
    for _ in range(2):
        got = loading.load(outer.stored, outer.size, shelf, known)
        assert got == [item, [item, item], item]
        assert loading.load(inner.stored, inner.size, shelf, known) == [item, item]
