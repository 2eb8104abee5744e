"""Copies: the same hashes and states in another store, all that is shared still shared."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.errors import InvalidRequest, SessionNotFound
from holdfast.storage.reader import Reader
from holdfast.storage.rows import TombstoneRow
from holdfast.transfer import items
from tests.support import postgres
from tests.support.seeds import seeds
from tests.support.stores import TEXT, Home

KINDS = ["memory", "sqlite", "files", "postgres"]
USUAL = [
    ("memory", "sqlite"), ("sqlite", "files"), ("files", "postgres"), ("postgres", "memory"),
    ("sqlite", "sqlite"),
]  # fmt: skip
"""Each kind once as the source and once as the target. `make torture` copies from each to each."""
PAIRS = [
    pytest.param(pair, id="-".join(pair), marks=[] if pair in USUAL else pytest.mark.torture)
    for pair in itertools.product(KINDS, KINDS)
]


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Home, Home]]:
    source, target = request.param
    homes = Home(source, tmp_path), Home(target, tmp_path / "other")
    yield homes
    for home in homes:
        home.give_back()


@pytest.fixture
def home(pair: tuple[Home, Home]) -> Home:
    """The store to copy from."""
    return pair[0]


@pytest.fixture
def other(pair: tuple[Home, Home]) -> Home:
    """The store to copy to."""
    return pair[1]


def spellings(home: Home) -> list[Any]:
    """Addresses of the same store."""
    if home.kind == "postgres":
        url = postgres.server_url()
        return [url, url.replace("127.0.0.1", "localhost"), url + "?application_name=other"]
    prefix = "files:" if home.kind == "files" else ""
    link = home.folder / "link"
    link.symlink_to(home.path)
    (home.folder / "sub").mkdir()
    roundabout = home.folder / "sub" / ".." / home.path.name
    return [home.url, f"{prefix}{link}", f"{prefix}{roundabout}", f"{prefix}{home.path}"]


def life(
    rng: random.Random, store: holdfast.Store, steps: int, start: int = 0, *, harsh: bool = True
) -> None:
    """Sessions with everything: big and nested values, forks, marks, deletions, keys, gc."""
    names = [info.name for info in store.sessions()]
    for n in range(start, start + steps):
        if not names:
            names.append(f"s{n}")
        session = store.session(rng.choice(names), agent=rng.choice([None, "planner"]))
        roll = rng.random()
        with suppress(holdfast.InvalidRequest, holdfast.NotFound, holdfast.Conflict):
            if roll < 0.35 or not session.exists():
                nested = [{"n": n, "deep": [f"{i} {TEXT}" for i in range(rng.randrange(9))]}]
                state = session.load() if session.exists() else {"log": [], "files": {}}
                state["log"] += [f"{n} {TEXT}", *nested * rng.randrange(2)]
                state["files"][f"f{rng.randrange(60)}"] = f"{n} {TEXT * rng.randrange(30)}"
                session.save(state, key=f"k{n}", label=rng.choice([None, "l"]), trigger="t")
            elif roll < 0.6:
                session.append("log", {"n": n, "text": TEXT}, tags=["a"] * rng.randrange(2))
            elif roll < 0.7:
                session.fork(f"f{n}", rng.choice([c.id for c in session.history()]))
                names.append(f"f{n}")
            elif roll < 0.78:
                session.rewind(rng.choice([c.id for c in session.tree()]))
            elif roll < 0.84:
                session.delete(rng.choice([c.id for c in session.tree()]))
            elif roll < 0.88:
                session.tag(rng.choice([c.id for c in session.tree()]), f"t{n}")
            elif roll < 0.92:
                session.undo()
            elif roll < 0.95 and harsh:
                session.delete()
                names.remove(session.name)
            elif roll < 0.97 and harsh:
                store.gc()


def facts(store: holdfast.Store, names: list[str] | None = None) -> dict[str, Any]:
    """All that can be seen of some sessions of a store, and the hashes."""
    out: dict[str, Any] = {}
    for info in store.sessions():
        if names is not None and info.name not in names:
            continue
        session = store.session(info.name)
        tree = [
            (c.id, c.seq, c.hash, c.state_hash, c.label, c.tags, c.meta) for c in session.tree()
        ]
        states = {c.id: session.load(c) for c in session.tree()}
        history = [(c.id, c.step, c.pruned) for c in session.history()] if info.head else []
        ops = [(op.number, op.kind, op.summary, op.way_back) for op in session.operations()]
        out[info.name] = (info.agent, info.head and info.head.id, tree, states, history, ops)
    queries: list[dict[str, Any]] = [
        {"tag": "a"}, {"label": "l"}, {"trigger": "t"}, {"agent": "planner"},
    ]  # fmt: skip
    out["found"] = [
        sorted(c.id for c in store.checkpoints(**query) if c.session in out) for query in queries
    ]
    return out


@pytest.mark.parametrize("seed", seeds(1, torture=8))
def test_a_copy_is_the_same(home: Home, other: Home, seed: int) -> None:
    rng = random.Random(seed)
    for part in range(3):  # what is new comes along the next time
        life(rng, home.store, 25, part * 100, harsh=not part)
        result = home.store.copy(other.store)
        assert result.skipped == ()
        names = [info.name for info in home.store.sessions()]
        assert facts(other.store, names) == facts(home.store, names)
        report = other.store.verify(read_data=True)
        assert report.ok, str(report)
        again = home.store.copy(other.store)
        assert (again.sessions, again.checkpoints) == (0, 0)
    home.store.gc()
    life(rng, other.reopened(), 20, 1_000)  # and life goes on in the copy
    other.store.gc()
    report = other.store.verify(read_data=True)
    assert report.ok, str(report)


@pytest.mark.parametrize("seed", range(3))
def test_there_and_back_again(tmp_path: Path, sqlite: Home, seed: int) -> None:
    """Through every kind of store, with nothing lost on the way."""
    life(random.Random(100 + seed), sqlite.store, 60)
    before = facts(sqlite.store)
    homes = [Home(kind, tmp_path / kind) for kind in ("postgres", "files", "memory", "sqlite")]
    source = sqlite.store
    for home in homes:
        assert source.copy(home.store).skipped == ()
        source = home.store
    assert facts(source) == before
    assert source.verify(read_data=True).ok
    for home in homes:
        home.give_back()


def test_what_is_shared_stays_shared(home: Home, other: Home) -> None:
    session = home.session()
    session.save({"log": [f"{n} {TEXT}" for n in range(100)], "big": "x" * 50_000})
    for n in range(20):
        session.fork(f"fork {n}").append("log", str(n))
    home.session("apart").save({"mine": "x" * 50_000})
    home.store.copy(other.store)
    ours, theirs = home.store.stats(), other.store.stats()
    assert theirs.checkpoints == ours.checkpoints == 42
    most = 2.2 if "files" in (home.kind, other.kind) else 1.2  # which are not compressed
    assert theirs.bytes["items"] < 40 * most * len(TEXT) * 3
    assert theirs.rows["blobs"] == ours.rows["blobs"] == 1


def test_forks_bring_what_they_were_forked_from(home: Home, other: Home) -> None:
    first = home.filled(3, "first")
    second = first.fork("second", "@~1")
    second.append("log", "x")
    second.fork("third").append("log", "y")
    home.filled(2, "another")
    home.store.copy(other.store, sessions=["third"])
    assert [info.name for info in other.store.sessions()] == ["first", "second", "third"]
    third = other.session("third")
    assert [c.id for c in third.history()] == [c.id for c in home.session("third").history()]
    assert third.load() == home.session("third").load()


def test_progress_is_told(home: Home, other: Home) -> None:
    for name in "abc":
        home.filled(1, name)
    told: list[tuple[int, int]] = []
    home.store.copy(other.store, progress=lambda done, total: told.append((done, total)))
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]


def copied_in_part(home: Home, other: Home, after: int) -> None:
    """A copy that is interrupted after so many commits."""
    backend, commits = other.store._repository.backend, list[int]()
    commit = backend.commit

    def stop(change: Any) -> None:
        if len(commits) == after:
            raise KeyboardInterrupt
        commits.append(1)
        commit(change)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(backend, "commit", stop)
        home.store.copy(other.store)


@pytest.mark.parametrize("after", seeds(2, torture=6))
def test_an_interrupted_copy_goes_on(
    home: Home, other: Home, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(items, "_CHUNK_ROWS", 3)
    life(random.Random(7), home.store, 40)
    copied_in_part(home, other, after)
    assert other.store.verify(read_data=True).ok
    home.store.copy(other.reopened())
    assert facts(other.store) == facts(home.store)
    assert other.store.verify(read_data=True).ok


def test_another_history_is_left_alone(home: Home, other: Home) -> None:
    home.filled(3)
    home.filled(2, "fine")
    home.store.copy(other.store)
    other.session().append("log", "of its own")
    home.session().append("log", "here")
    home.session().fork("fork")
    mine = other.session().load()
    result = home.store.copy(other.store)
    assert [name for name, _ in result.skipped] == ["s", "fork"]
    assert other.session().load() == mine
    assert other.session("fine").load() == home.session("fine").load()


def test_a_damaged_session_is_left_alone(home: Home, other: Home) -> None:
    home.filled(3)
    home.filled(3, "fine")
    home.spoil_checkpoint(2)
    [(name, why)] = home.store.copy(other.store).skipped
    assert (name, "checkpoint 2" in why) == ("s", True)
    assert [info.name for info in other.store.sessions()] == ["fine"]


def test_requests_that_make_no_sense(home: Home, other: Home) -> None:
    home.filled(1)
    with pytest.raises(InvalidRequest):
        home.store.copy(home.store)
    with pytest.raises(InvalidRequest):
        home.store.copy(other.store, sessions="s")
    with pytest.raises(SessionNotFound):
        home.store.copy(other.store, sessions=["no such"])
    assert list(other.store.sessions()) == []


@pytest.mark.parametrize("seed", seeds(1, torture=3))
def test_what_was_freed_here_stays_there(home: Home, other: Home, seed: int, rounds: Any) -> None:
    """A copy adds, and takes nothing away."""
    rng = random.Random(50 + seed)
    for part in range(rounds(3, torture=4)):
        life(rng, home.store, 25, part * 100)
        before = facts(other.store)
        result = home.store.copy(other.store)
        assert result.skipped == ()
        ours, theirs = facts(home.store), facts(other.store)
        for name in ours.keys() - {"found"}:
            _, head, tree, states, history, _ = theirs[name]
            assert head == ours[name][1]
            assert {*map(repr, ours[name][2])} <= {*map(repr, tree)}
            assert ours[name][3].items() <= states.items()
            assert [row for row in ours[name][4] if row[2] == 0 and row not in history] == []
        assert before.keys() <= theirs.keys()
        report = other.store.verify(read_data=True)
        assert report.ok, str(report)
    other.store.gc()
    assert other.store.verify(read_data=True).ok


class Seq(int):
    """One that tells how often it is looked for."""

    hashed = 0

    def __hash__(self) -> int:
        Seq.hashed += 1
        return int(self)


def test_each_deletion_is_looked_at_once(memory: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    session = memory.session()
    for n in range(200):
        session.save({"n": n})
    session.prune(holdfast.Retention(keep_last=1))
    tombstones = Reader.tombstones
    with holdfast.open("memory:") as copy:
        memory.store.copy(copy)
        monkeypatch.setattr(
            Reader,
            "tombstones",
            lambda *args: [TombstoneRow(Seq(seq), row) for seq, row in tombstones(*args)],
        )
        Seq.hashed = 0
        assert memory.store.copy(copy) == (0, 0, 200, ())
        assert 199 <= Seq.hashed < 199 * 10


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_is_not_copied_to_itself(kind: str, tmp_path: Path) -> None:
    """By another path, a link or another name of the server it was copied, and said so."""
    home = Home(kind, tmp_path)
    try:
        home.filled(2)
        before = home.store.stats()
        with pytest.raises(InvalidRequest, match="itself"):
            home.store.copy(home.store)
        for url in spellings(home) if home.durable else ():
            with (
                holdfast.open(url, **home.options) as same,
                pytest.raises(InvalidRequest, match="itself"),
            ):
                home.store.copy(same)
        assert home.store.stats() == before
        if home.kind == "files":
            with pytest.raises(InvalidRequest, match="itself"):
                home.store.import_exported(home.path)
    finally:
        home.give_back()


def test_schemas_of_a_server_are_stores_of_their_own(tmp_path: Path) -> None:
    homes = [Home("postgres", tmp_path / name) for name in "ab"]
    try:
        homes[0].filled(2)
        assert homes[0].store.copy(homes[1].store).checkpoints == 2
    finally:
        for home in homes:
            home.give_back()


def test_a_store_whose_file_was_removed_can_still_be_copied(tmp_path: Path) -> None:
    home, other = Home("sqlite", tmp_path / "a"), Home("sqlite", tmp_path / "b")
    try:
        home.filled(2)
        home.path.unlink()
        assert home.store.copy(other.store).checkpoints == 2
    finally:
        home.give_back()
        other.give_back()
