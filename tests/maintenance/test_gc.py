"""gc frees what nothing refers to, and nothing else."""

from __future__ import annotations

import itertools
import random
import threading
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast import Retention
from holdfast.errors import Corrupt, InvalidRequest, Unavailable
from holdfast.format import records
from holdfast.format.item_streams import LOOSE_ITEMS, PACK_ITEMS, STREAM_BITS
from holdfast.format.rows import unseal_items
from holdfast.intervals import IntervalSet
from holdfast.maintenance import gc
from holdfast.maintenance.reachability import Reachable
from holdfast.storage import changes
from tests.format.test_layout import message, text
from tests.history.test_undo import look
from tests.maintenance.test_retention import _connected
from tests.support.damage import DAMAGES, NEIGHBOURS, check_neighbours, damage_one_of_four_sessions
from tests.support.seeds import seeds
from tests.support.sessions import save_random
from tests.support.stores import TEXT, Home, fail

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def store(home: Home) -> holdfast.Store:
    return home.store


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


@pytest.mark.parametrize("seed", seeds(2, torture=12))
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
    assert not any(store.gc())
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
    with store._repository.reader() as reader:
        counts = {kind: count for kind, (count, _) in reader.sizes().items()}
        for kind, value in ((0, b"l3"), (1, b"t"), (2, b"x"), (4, b"a")):
            counts[f"facets {kind}"] = len(reader.find_terms(kind, value, b"", b"\xff" * 15, 99))
        counts["keys"] = sum(reader.find_key(n, b"k3") is not None for n in range(50))
        return counts


@pytest.mark.parametrize("what", ["gc", "stats", "verify", "repair"])
def test_what_was_freed_is_read_as_often_for_many_holes_as_for_few(
    home: Home, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who read it anew at each hole in a listing would take hours for a long session."""
    counts = [_looks(home, what, holes, monkeypatch) for holes in (3, 30)]
    assert counts[0] == counts[1]


def _looks(
    home: Home, what: str, holes: int, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[str, int]]:
    """How often something is read of what was freed, by a session with so many holes."""
    session = home.session(f"s{holes}")
    for n in range(2 * holes + 1):
        session.append("log", n)
    session.prune(holdfast.Retention(keep_last=1, keep_every=2))
    assert home.store.gc().checkpoints == holes
    looks = {"unseal_freed": 0, "grafts_below": 0}
    with home.store._repository.reader() as reader, monkeypatch.context() as patch:
        for owner in (records, type(reader)):
            for name in looks.keys() & vars(owner).keys():
                patch.setattr(owner, name, _counted(getattr(owner, name), looks, name))
        getattr(home.store, what)()
    session.delete()
    home.store.gc()
    return sorted(looks.items())


def _counted(real: Any, looks: dict[str, int], name: str) -> Any:
    def counting(*args: Any) -> Any:
        looks[name] += 1
        return real(*args)

    return counting


def test_spans() -> None:
    rng = random.Random(1)
    for _ in range(300):
        spans, model = IntervalSet(), set[int]()
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


@pytest.mark.parametrize(
    ("window", "end", "again"),
    [(20, 65, True), (20, 99, False), (20, 133, True), (100, 125, False), (100, 177, True)],
)
def test_a_stream_goes_on_after_its_small_packs_were_packed(
    store: holdfast.Store, window: int, end: int, again: bool
) -> None:
    rng = random.Random(end)
    log = [message(rng, n) for n in range(260)]
    session = store.session("s")
    for n in range(1, end):
        session.save({"log": log[max(0, n - window) : n]})
    session.prune(holdfast.Retention(keep_last=3))
    before = _items(store)
    freed = store.gc().rows
    if end > PACK_ITEMS + LOOSE_ITEMS:  # until then, all that its first full pack takes is needed
        assert freed
        assert _items(store) < before or before <= LOOSE_ITEMS + 1  # a pack, and what stays loose
    if again:
        session = store.session("s")
    for n in range(end, 260):
        session.save({"log": log[max(0, n - window) : n]})
        if n < end + LOOSE_ITEMS or not n % 5:
            assert session.load() == {"log": log[max(0, n - window) : n]}
            _nothing_is_stored_twice(store)
    report = store.verify(read_data=True)
    assert report.ok, str(report)
    for checkpoint in session.tree():
        assert session.load(checkpoint)["log"][-1] == log[checkpoint.step - 1]


def _nothing_is_stored_twice(store: holdfast.Store) -> None:
    with store._repository.reader() as reader:
        rows = [pos for pos, _, _ in reader.item_rows(-1, 1_000)]
        for pos, after in itertools.pairwise(rows):
            stream, first = pos >> STREAM_BITS, pos & (1 << STREAM_BITS) - 1
            [(_, body)] = reader.items(stream, first, first + 1)
            assert pos + len(unseal_items(pos, body, "").ends) <= after


def _items(store: holdfast.Store) -> int:
    with store._repository.reader() as reader:
        return reader.sizes()["items"][0]


# -- beside damage ---------------------------------------------------------------------------------


@contextmanager
def without_row(home: Home, name: str) -> Iterator[None]:
    """As if the row of a session were lost: it is neither listed nor found."""
    number = home._number(name)
    with home.store._repository.reader() as reader, pytest.MonkeyPatch.context() as patch:
        kind = type(reader)
        sessions, by_number = kind.sessions, kind.session_by_number

        def listed(self: Any, *args: Any) -> Any:
            return [row for row in sessions(self, *args) if row[0] != number]

        def found(self: Any, session: int) -> Any:
            return None if session == number else by_number(self, session)

        patch.setattr(kind, "sessions", listed)
        patch.setattr(kind, "session_by_number", found)
        yield


def _lost_and_other(home: Home) -> dict[str, Any]:
    """States of a session, and beside it some that gc has to free."""
    rng = random.Random(4)
    lost, other = home.session("lost"), home.session("other")
    for n in range(3):
        other.save(some_state(rng, n))
    other.delete("@~1")
    return {lost.save(state).id: state for state in [some_state(rng, n) for n in range(6)]}


def test_gc_goes_on_beside_a_session_whose_row_is_lost(home: Home) -> None:
    """Nobody can delete it, so gc would refuse for ever."""
    states = _lost_and_other(home)
    with without_row(home, "lost"):
        freed = home.store.gc()
        assert (freed.checkpoints, freed.rows > 0) == (1, True)
    lost = home.reopened().session("lost")
    assert {id: lost.load(id) for id in states} == states
    assert home.store.verify(read_data=True).ok


def test_gc_frees_no_data_if_a_record_of_such_a_session_is_lost(home: Home) -> None:
    states = _lost_and_other(home)
    home.spoil_checkpoint(3, name="lost")
    with without_row(home, "lost"), pytest.raises(Corrupt, match="no data is freed") as refused:
        home.store.gc()
    assert "copy()" in str(refused.value.hint)
    lost = home.reopened().session("lost")
    assert all(lost.load(id) == state for n, (id, state) in enumerate(states.items()) if n != 2)


# -- somebody else meanwhile -----------------------------------------------------------------------


def _family(rng: random.Random, home: Home, steps: int) -> None:
    """Forks of forks, with holes everywhere, and sessions deleted as a whole."""
    names = ["s"]
    home.session().save({"log": []})
    for n in range(steps):
        session = home.session(rng.choice(names))
        roll = rng.random()
        with suppress(holdfast.InvalidRequest, holdfast.NotFound, holdfast.SessionExists):
            if roll < 0.45:
                session.append("log", n, key=f"k{rng.random()}", trigger="x")
            elif roll < 0.7:
                session.delete(rng.choice([c.id for c in session.tree()] or ["@~1"]))
            elif roll < 0.85:
                session.fork(f"f{n}", rng.choice([c.id for c in session.history()] or ["@"]))
                names.append(f"f{n}")
            elif roll < 0.92:
                session.rewind(rng.choice([c.id for c in session.tree()] or ["@"]))
            elif roll < 0.96:
                session.delete()
            else:
                session.undo()


def _states(home: Home) -> dict[str, Any]:
    handles = [home.session(info.name) for info in home.store.sessions()]
    return {c.id: handle.load(c) for handle in handles for c in handle.tree()}


def _lines(home: Home) -> dict[str, Any]:
    """What each session's history looks like, however much of it was freed."""
    handles = [home.session(info.name) for info in home.store.sessions()]
    return {h.name: [(c.id, c.step, c.pruned) for c in h.history()] for h in handles}


@contextmanager
def before(home: Home, what: str, act: Callable[[], object]) -> Iterator[None]:
    """Somebody acts before each write of this store's gc."""
    real, ours = getattr(changes, what), home.store._repository.backend

    def racing(backend: Any, arguments: Any) -> Any:
        if backend is ours:
            act()
        return real(backend, arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(changes, what, racing)
        yield


@pytest.mark.parametrize("what", ["sweep", "trim"])
@pytest.mark.parametrize("seed", seeds(2, torture=20))
def test_two_gcs_at_once(home: Home, what: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second frees everything between the first's looking and its writing."""
    rng = random.Random(seed)
    other = home.another()
    for _ in range(3):
        _family(rng, home, 40)
        states, lines = _states(home), _lines(home)
        monkeypatch.setattr(gc, "BATCH", rng.choice([1, 3, 2_000]))
        with before(home, what, other.gc) if home.durable else nullcontext():
            home.store.gc()
        report = home.store.verify(read_data=True)
        assert report.ok, str(report)
        assert (_states(home), _lines(home)) == (states, lines)


@pytest.mark.parametrize("what", ["sweep", "trim"])
@pytest.mark.parametrize("seed", seeds(2, torture=10))
def test_people_work_while_gc_runs(home: Home, what: str, seed: int) -> None:
    """They fork, delete, take that back and save between gc's looking and its writing."""
    rng = random.Random(seed)
    told: list[Any] = []

    def work() -> None:
        if rng.random() < 0.7:
            _family(rng, home, 3)
        told.append((_states(home), _lines(home)))

    for _ in range(3):
        _family(rng, home, 30)
        work()
        with before(home, what, work):
            home.store.gc()
        report = home.store.verify(read_data=True)
        assert report.ok, str(report)
        assert (_states(home), _lines(home)) == told[-1]


def test_gc_is_stopped_in_a_deleted_session(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the head is freed the deletion cannot be undone, so that nothing comes back in part."""
    session = home.filled(9)
    session.delete()
    swept: list[int] = []

    def stop() -> None:
        if len(swept) == 2:
            raise Unavailable("injected")
        swept.append(1)

    monkeypatch.setattr(gc, "BATCH", 2)
    with before(home, "sweep", stop), pytest.raises(Unavailable):
        home.store.gc()
    with pytest.raises(holdfast.InvalidRequest, match="freed"):
        home.reopened().session("s").undo()
    assert list(home.store.sessions()) == []
    assert home.store.verify(read_data=True).ok
    assert home.store.gc()[:2] == (5, 1)
    assert not any(home.store.gc())


def test_a_blob_comes_back_while_gc_runs(home: Home) -> None:
    """Another gc has removed it, and somebody has saved the same content anew."""
    big = text(random.Random(1), 30_000)
    session = home.session()
    session.save({"big": big}, label="a")
    session.save({"n": 1})
    session.delete("a")
    other, raced = home.another(), list[int]()

    def race() -> None:
        if not raced:
            raced.append(1)
            other.gc()
            other.session("t").save({"big": big})

    with before(home, "trim", race):
        home.store.gc()
    assert home.store.verify(read_data=True).ok
    assert home.reopened().session("t").load() == {"big": big}


def test_searches_find_sessions_whose_first_checkpoints_are_freed(home: Home) -> None:
    """What they go by was said once, when the first of them was saved."""
    home.session("boss").save({})
    home.session("kid").save({})
    kid = home.store.session("kid", agent="planner", parent="boss")
    for count in (30, 20):  # gc writes the log of a store of files anew, and what it wrote there
        for n in range(count):
            kid.save({"n": n}, usage=holdfast.Usage(tokens=1))
        kid.prune(holdfast.Retention(keep_last=3))
        home.store.gc()
        store = home.another()
        assert len(list(store.checkpoints(agent="planner"))) == 3
        assert store.session("boss").usage().children.tokens == 3


def test_sessions_that_are_begun_while_gc_looks(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gc frees what it saw before it looked who needs what, and nothing that came later."""
    other, mark_all = home.another(), Reachable.mark_all
    home.filled(5)
    home.session("s").delete("@~1")
    states: dict[str, Any] = {}

    def late(self: Reachable, tell: Any) -> None:
        mark_all(self, tell)
        other.session("new").save({"log": [f"{n} {TEXT}" for n in range(30)]})
        other.session("s").fork("fork").append("log", TEXT)
        states.update({name: other.session(name).load() for name in ("new", "fork", "s")})

    with monkeypatch.context() as patch:
        patch.setattr(Reachable, "mark_all", late)
        home.store.gc()
    store = home.reopened()
    assert {name: store.session(name).load() for name in states} == states
    assert store.verify(read_data=True).ok


@pytest.mark.parametrize("what", DAMAGES)
def test_prune_beside_a_damaged_session(home: Home, what: str) -> None:
    damage_one_of_four_sessions(home, what)
    with suppress(Corrupt):  # told in the end, but the others are done
        home.reopened().prune(Retention(keep_last=1, keep_tagged=False))
    check_neighbours(home, 1)
    for name in NEIGHBOURS:
        assert home.session(name).undo().details["what"] == "prune"


@pytest.mark.parametrize("what", DAMAGES)
def test_gc_and_repair_beside_a_damaged_session(home: Home, what: str) -> None:
    damage_one_of_four_sessions(home, what)
    home.session("a").delete("@~1")
    home.session("a").undo()
    with suppress(Corrupt):
        home.reopened().gc()
    check_neighbours(home)
    assert {done.session for done in home.store.repair().sessions}.isdisjoint(NEIGHBOURS)
    check_neighbours(home)
    assert home.session("a").undo().details["what"] == "tag"


def test_gc_keeps_what_was_rewound(home: Home) -> None:
    session = home.filled(6)
    future = list(session.history())
    session.rewind("@~4")
    home.store.gc()
    home.store.prune(Retention(keep_last=6))
    session.undo()
    assert home.reopened().session("s").head == future[0]
    session = home.session()
    for _ in range(4):
        session.undo()
    home.store.gc()
    for checkpoint in future:
        assert home.session().load(checkpoint)["i"] == checkpoint.seq - 1
    for _ in range(4):
        home.session().redo()
    assert home.session().head == future[0]


def test_gc_that_fails_half_way_leaves_a_sound_store(home: Home) -> None:
    """What goes, goes in steps that each leave a sound store; the next run goes on."""
    session = save_random(home.session(), 12)
    session.fork("f", "@~6")
    session.prune(Retention(keep_last=2))
    before, fork = look(home.store, "s"), look(home.store, "f")
    sweep, swept = changes.sweep, list[int]()

    def stop(*what: Any) -> list[bool]:
        if len(swept) == 2:
            raise Unavailable("injected")
        swept.append(1)
        return sweep(*what)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "BATCH", 2)
        patch.setattr(changes, "sweep", stop)
        with pytest.raises(Unavailable):
            home.store.gc()
    assert home.store.stats().deleted == 5
    assert (look(home.reopened(), "s"), look(home.store, "f")) == (before, fork)
    _connected(home.store)
    assert home.store.verify(read_data=True).ok
    with pytest.raises(InvalidRequest, match="freed"):
        home.session().undo()
    assert home.store.gc().checkpoints == 5
    _connected(home.store)


def test_gc_of_a_damaged_checkpoint_makes_no_root(home: Home) -> None:
    """Its child knows who came before it, and so does gc."""
    session = home.filled(6)
    lost = session.get("@~3").id
    home.spoil_checkpoint(3)
    session = home.reopened().session("s")
    session.delete(lost)
    before = [(c.seq, c.pruned) for c in session.history()]
    assert before == [(6, 0), (5, 0), (4, 1), (2, 0), (1, 0)]
    assert home.store.gc().checkpoints == 1
    assert [(c.seq, c.pruned) for c in home.reopened().session("s").history()] == before


def test_freed_and_damaged_checkpoints_are_told_apart(home: Home) -> None:
    """And what is damaged is not taken for freed."""
    session = home.filled(6)
    session.delete("@~3")
    home.store.gc()
    session = home.reopened().session("s")
    assert [(c.seq, c.pruned, c.damaged) for c in session.history("@~2")] == [
        (4, 1, None),
        (2, 0, None),
        (1, 0, None),
    ]
    assert home.store.verify().ok
    home.spoil_checkpoint(4, None)
    assert [c.seq for c in home.reopened().session("s").tree() if c.damaged] == [4]
    assert not home.store.verify().ok


@pytest.mark.parametrize("part", ["sweep", "trim", "compact"])
def test_a_failed_gc_is_an_error(home: Home, part: str) -> None:
    session = save_random(home.session(), 6, 6_000)
    session.prune(Retention(keep_last=3))
    before = look(home.store, "s")
    with pytest.MonkeyPatch.context() as patch:
        owner = home.store._repository.backend if part == "compact" else changes
        patch.setattr(owner, part, fail)
        with pytest.raises(Unavailable):
            home.store.gc()
    assert look(home.reopened(), "s") == before
    home.store.gc()
    assert home.store.stats().deleted == 0
    assert home.store.verify(read_data=True).ok
    assert not any(home.store.gc())


@pytest.mark.parametrize("what", ["head", "tomb"])
def test_gc_beside_a_damaged_head_or_tombstone(sqlite: Home, what: str) -> None:
    sqlite.filled(6).prune(Retention(keep_last=2))
    sqlite.filled(6, "other").prune(Retention(keep_last=2))
    if what == "head":
        sqlite.spoil_head(b"torn")
    else:
        sqlite._sql("UPDATE tombs SET body = ? WHERE pos = (SELECT min(pos) FROM tombs)", b"torn")
    assert sqlite.store.gc().checkpoints == (4 if what == "head" else 7)
    sqlite.store.repair()
    sqlite.store.gc()
    assert len(sqlite.session("other")) == 2
    assert sqlite.session().load()["i"] == 5


def test_gc_does_not_wait_for_readers(sqlite: Home) -> None:
    """The log cannot be cut while somebody reads; so that is left to a later time."""
    session = sqlite.filled(30)
    session.prune(Retention(keep_last=1))
    with (
        holdfast.open(sqlite.path, timeout=60) as other,
        sqlite.store._repository.reader() as reader,
    ):
        reader.session(b"s")
        thread = threading.Thread(target=other.gc, daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive()
    assert len(session) == 1


def test_the_progress_callback_may_use_the_store(home: Home) -> None:
    home.filled(9).prune(Retention(keep_last=1))
    log = home.session("log")

    def progress(phase: str, done: int, total: int) -> None:
        log.append("told", [phase, done, total])

    home.store.gc(progress)
    assert {told[0] for told in log.load()["told"]} >= {"checkpoints", "reading"}


def test_stats_beside_a_deleted_session(home: Home) -> None:
    """Tombs of deleted sessions are taken from the count of the others."""
    home.filled(5)
    other = home.filled(3, "other")
    other.delete("@~1")
    other.delete()
    stats = home.store.stats()
    assert (stats.sessions, stats.checkpoints, stats.deleted) == (1, 5, 3)
