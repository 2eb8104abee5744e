"""Lists of checkpoints have exactly what matches, whatever the values, and read little for it."""

from __future__ import annotations

import datetime as dt
import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

import holdfast
from holdfast.errors import HoldfastError, InvalidRequest
from holdfast.format import records
from holdfast.history import filters
from holdfast.storage.sqlite.reader import SqliteView
from tests.mutants import history
from tests.support.sessions import found_seqs
from tests.support.stores import Home

START = dt.datetime(2030, 3, 4, 12, tzinfo=dt.UTC)
STATUSES = ["in_progress", "completed", "failed", "halted"]


class Ticking:
    """A clock that goes on with every look, by a second unless told otherwise."""

    def __init__(self, patch: pytest.MonkeyPatch, ns: int = 10**9) -> None:
        self.now = int(START.timestamp()) * 10**9
        self.ns = ns
        patch.setattr(time, "time_ns", self.tick)

    def tick(self) -> int:
        self.now += self.ns
        return self.now


def ids(found: Any) -> list[str]:
    return [c.id for c in found]


def everything(store: holdfast.Store) -> list[holdfast.Checkpoint]:
    """All checkpoints, the newest first, without a search."""
    found = [c for info in store.sessions() for c in store.session(info.name).tree()]
    return sorted(found, key=lambda c: c.id, reverse=True)


def fits(store: holdfast.Store, c: holdfast.Checkpoint, query: dict[str, Any]) -> bool:
    """Whether a checkpoint matches, in the plainest way."""
    for name, wanted in query.items():
        if name == "tag":
            good = wanted in c.tags
        elif name == "meta":
            good = all(k in c.meta and repr(c.meta[k]) == repr(v) for k, v in wanted.items())
        elif name == "since":
            good = c.created_at >= wanted
        elif name == "until":
            good = c.created_at < wanted
        else:
            good = getattr(c, name) == wanted
        if not good:
            return False
    return True


def crowd(store: holdfast.Store, count: int, seed: int = 1) -> None:
    """Sessions of several agents with all kinds of marks."""
    rng = random.Random(seed)
    sessions = [store.session(f"s{n}", agent=["x", "y", None][n % 3]) for n in range(5)]
    for i in range(count):
        session = rng.choice(sessions)
        fields: dict[str, Any] = {}
        if rng.random() < 0.5:
            fields["tags"] = rng.sample(["t", "u", "v"], rng.randrange(1, 3))
        if rng.random() < 0.4:
            fields["label"] = rng.choice(["l", "m", "t"])
        if rng.random() < 0.6:
            fields["trigger"] = rng.choice(["tool", "manual", "t"])
        if rng.random() < 0.6:
            fields["status"] = rng.choice(STATUSES)
        if rng.random() < 0.5:
            fields["meta"] = {"user": rng.choice(["u1", "u2"]), "n": rng.choice([1, True, 1.0])}
        words = [rng.choice(["alpha", "beta", "gamma"]) for _ in range(rng.randrange(3))]
        session.save({"i": i, "words": words}, **fields)
        if rng.random() < 0.05:
            session.rewind(rng.choice(list(session.tree())))


QUERIES: list[dict[str, Any]] = [
    {},
    {"agent": "x"},
    {"agent": "nobody"},
    {"status": "in_progress"},
    {"status": "failed"},
    {"trigger": "tool"},
    {"tag": "t"},
    {"tag": "none"},
    {"label": "l"},
    {"label": "t"},
    {"meta": {"user": "u1"}},
    {"meta": {"n": 1}},
    {"meta": {"n": True}},
    {"meta": {"user": "u2", "n": 1.0}},
    {"meta": {"missing": None}},
    {"meta": {}},
    {"since": START + dt.timedelta(seconds=70)},
    {"until": START + dt.timedelta(seconds=70)},
    {"since": START + dt.timedelta(seconds=50), "until": START + dt.timedelta(seconds=110)},
    {"since": dt.datetime(1, 1, 1, tzinfo=dt.UTC)},
    {"until": dt.datetime(9999, 1, 1, tzinfo=dt.UTC)},
    {"agent": "y", "tag": "t"},
    {"agent": "x", "status": "completed"},
    {"tag": "u", "label": "l", "trigger": "tool", "status": "failed"},
    {"tag": "t", "since": START + dt.timedelta(seconds=90), "meta": {"user": "u1"}},
    {"agent": "x", "status": "in_progress"},
    {"agent": "x", "since": START + dt.timedelta(seconds=50)},
]


def test_each_filter(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    Ticking(monkeypatch)
    store = home.store
    crowd(store, 80)
    all_ = everything(store)
    for query in QUERIES:
        wanted = [c.id for c in all_ if fits(store, c, query)]
        found = ids(store.checkpoints(**query))
        assert sorted(found) == sorted(wanted), query
        if set(query) & {"tag", "label", "trigger"} or "agent" not in query:
            assert found == wanted, query
        infos = list(store.sessions(**query))
        heads = {k: v for k, v in query.items() if k != "agent"}
        assert [i.name for i in infos] == [
            i.name
            for i in store.sessions()
            if query.get("agent") in (None, i.agent)
            and i.head is not None
            and fits(store, i.head, heads)
        ]


def test_each_filter_within_a_session(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    Ticking(monkeypatch)
    monkeypatch.setattr(filters, "PAGE", 2)
    store = home.store
    crowd(store, 80)
    session = store.session("s1")
    session.delete("@~1")
    session.fork("fork").save({"words": ["alpha"]}, tags=["t"], label="l")
    all_ = [*session.tree(newest_first=True)]
    assert len(all_) > 10
    for query in QUERIES:
        if "agent" in query:
            continue
        wanted = [c.id for c in all_ if fits(store, c, query)]
        assert ids(session.checkpoints(**query)) == wanted, query
        assert ids(session.checkpoints(**query, limit=2)) == wanted[:2]
        if len(wanted) > 3:
            assert ids(session.checkpoints(**query, before=wanted[2])) == wanted[3:], query


def test_what_a_session_does_not_have(home: Home) -> None:
    home.filled(3, label="kept")
    other = home.store.session("other").save({}, tags=["t"], label="kept")
    assert [*home.session().checkpoints(tag="t")] == []
    assert [c.seq for c in home.session().checkpoints(label="kept")] == [3, 2, 1]
    assert [*home.store.session("none").checkpoints(label="kept")] == []
    with pytest.raises(InvalidRequest, match="another session"):
        list(home.session().checkpoints(before=other))
    for bad in ({"tag": ""}, {"limit": -1}, {"status": "done"}, {"before": "x"}):
        with pytest.raises(InvalidRequest):
            list(home.session().checkpoints(**bad))
    session = home.session()
    found = session.checkpoints()
    next(found)
    session.delete()
    home.session().save({})
    assert [c.seq for c in found if c.seq > 3] == []


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32), picks=st.lists(st.sampled_from(QUERIES), max_size=4))
def test_filters_together(seed: int, picks: list[dict[str, Any]]) -> None:
    query: dict[str, Any] = {}
    for pick in picks:
        query |= pick
    with pytest.MonkeyPatch.context() as patch, holdfast.open("memory:") as store:
        Ticking(patch)
        crowd(store, 40, seed)
        for n in range(len(query) + 1):
            for part in itertools.islice(itertools.combinations(query.items(), n), 4):
                wanted = [c.id for c in everything(store) if fits(store, c, dict(part))]
                assert sorted(ids(store.checkpoints(**dict(part)))) == sorted(wanted)


def test_the_newest_come_first(home: Home) -> None:
    crowd(home.store, 60)
    for query in ({}, {"tag": "t"}, {"status": "in_progress"}):
        found = ids(home.store.checkpoints(**query))  # type: ignore[arg-type]
        assert found == sorted(found, reverse=True)
        assert len(found) > 5


def test_an_agent_alone_is_listed_by_session(home: Home) -> None:
    """The newest session first, and in each the newest checkpoint."""
    sessions = [home.store.session(f"s{n}", agent="x" if n % 2 else "y") for n in range(4)]
    for i in range(12):
        sessions[i % 4].save({"i": i})
    found = [(c.session, c.seq) for c in home.store.checkpoints(agent="x")]
    assert found == [("s3", 3), ("s3", 2), ("s3", 1), ("s1", 3), ("s1", 2), ("s1", 1)]
    fork = sessions[1].fork("fork", "@~1")
    assert next(home.store.checkpoints(agent="x")) == fork.get()


@pytest.mark.parametrize("agents", [1, 3])
def test_a_session_of_many_pages(home: Home, agents: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filters, "PAGE", 2)
    store = home.store
    for n in range(40):
        store.session(f"s{n % 3}", agent=f"a{n % agents}").save({"n": n})
    for query in ({"agent": "a0"}, {}):
        wanted = {c.id for c in everything(store) if fits(store, c, query)}
        found = ids(store.checkpoints(**query))  # type: ignore[arg-type]
        assert len(found) == len(wanted)
        assert set(found) == wanted


# -- pages -----------------------------------------------------------------------------------------

PAGED: list[dict[str, Any]] = [
    {},
    {"agent": "x"},
    {"agent": "x"},
    {"tag": "t"},
    {"label": "l"},
    {"trigger": "tool", "agent": "x"},
    {"status": "in_progress"},
    {"status": "failed"},
    {"meta": {"user": "u1"}},
]


def paged(store: holdfast.Store, size: int, between: Callable[[], Any], **query: Any) -> list[str]:
    out: list[str] = []
    before: str | holdfast.Checkpoint | None = None
    while True:
        page = list(store.checkpoints(**query, before=before, limit=size))
        assert len(page) <= size
        out += ids(page)
        if len(page) < size:
            return out
        before = page[-1].id if len(out) % 2 else page[-1]
        between()


@pytest.mark.parametrize("query", PAGED, ids=str)
def test_pages_make_the_whole(home: Home, query: dict[str, Any]) -> None:
    crowd(home.store, 45)
    whole = ids(home.store.checkpoints(**query))
    assert len(whole) > 3
    for size in (1, 2, 7, 500):
        assert paged(home.store, size, lambda: None, **query) == whole
    assert ids(home.store.checkpoints(**query, limit=0)) == []
    for n in (1, 3):
        assert ids(home.store.checkpoints(**query, limit=n)) == whole[:n]


@pytest.mark.parametrize("query", PAGED, ids=str)
def test_pages_while_others_write(
    home: Home, query: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing twice, and nothing left out of what was there when it began."""
    monkeypatch.setattr(filters, "PAGE", 5)
    crowd(home.store, 40)
    old = set(ids(home.store.checkpoints(**query)))
    other = home.another()
    seeds = itertools.count(2)
    found = paged(home.store, 3, lambda: crowd(other, 2, next(seeds)), **query)
    assert len(found) == len(set(found))
    assert old <= set(found)
    # And within one search that goes on for long.
    old = set(ids(home.store.checkpoints(**query)))
    found = []
    for n, checkpoint in enumerate(home.store.checkpoints(**query)):
        found.append(checkpoint.id)
        if n % 4 == 0 and n < 40:
            crowd(other, 2, next(seeds))
    assert len(found) == len(set(found))
    assert old <= set(found)
    wanted = [c.id for c in everything(home.store) if fits(home.store, c, query)]
    assert set(found) <= set(wanted)


def test_sessions_in_pages(home: Home) -> None:
    names = sorted(["a", "b", "ä", "aa", "z'", "%", "_", "日本", "\ud800"], key=records.encode_name)
    for name in names:
        home.session(name).save({"n": name}, tags=["t"])
    assert [i.name for i in home.store.sessions()] == names
    for n, name in enumerate(names):
        assert [i.name for i in home.store.sessions(after=name, tag="t")] == names[n + 1 :]


# -- what is gone ----------------------------------------------------------------------------------


def test_deleted_ones_are_not_found(home: Home) -> None:
    store = home.store
    session = store.session("s", agent="x")
    for i in range(6):
        session.save(
            {"i": i},
            label="l",
            tags=["t"],
            trigger="g",
            status="failed",
            meta={"a": 1},
        )
    queries: list[dict[str, Any]] = [
        {},
        {"agent": "x"},
        {"label": "l"},
        {"tag": "t"},
        {"trigger": "g"},
        {"status": "failed"},
        {"meta": {"a": 1}},
    ]
    whole = ids(store.checkpoints())
    gone = [c.id for c in session.tree() if c.seq in (2, 4)]

    def check(wanted: list[str]) -> None:
        for query in queries:
            assert ids(store.checkpoints(**query)) == wanted, query

    check(whole)
    for id in gone:
        session.delete(id)
    check([id for id in whole if id not in gone])
    session.undo()
    session.undo()
    check(whole)
    session.delete()
    check([])
    session.undo()
    check(whole)
    for id in gone:
        session.delete(id)
    store.gc()
    check([id for id in whole if id not in gone])
    session.delete()
    store.gc()
    check([])
    with store._repository.reader() as reader:  # nor is anything left in the indexes
        for kind, value in enumerate([b"l", b"t", b"g", b"failed", b"x"]):
            assert reader.find_terms(kind, value, b"", b"\xff" * 16, 9) == []


def test_marks_that_come_and_go(home: Home) -> None:
    session = home.filled(3)
    session.label("@~1", "old")
    session.label("@~1", "new")
    session.tag("@~2", "t")
    find = home.store.checkpoints
    assert [c.seq for c in find(label="new")] == [2]
    assert ids(find(label="old")) == []
    assert [c.seq for c in find(tag="t")] == [1]
    session.undo()
    assert ids(find(tag="t")) == []
    session.undo()
    assert ids(find(label="new")) == []
    assert [c.seq for c in find(label="old")] == [2]
    session.redo()
    session.redo()
    assert [c.seq for c in find(label="new")] == [2]
    assert [c.seq for c in find(tag="t")] == [1]
    assert home.store.verify(read_data=True).ok


# -- hostile values --------------------------------------------------------------------------------

HOSTILE = [
    "'",
    '"',
    "''",
    "\0",
    "a\0b",
    "a",
    "%",
    "_",
    "%%",
    "a%",
    "*",
    "?",
    "[a]",
    "\\",
    "'; DROP TABLE facets;--",
    '"; DELETE FROM checkpoints; --',
    "' OR '1'='1",
    "x' UNION SELECT body FROM heads --",
    "/* */",
    ";--",
    "?1",
    ":name",
    "$x",
    "{}",
    "{0.__class__}",
    "%s",
    "${HOME}",
    "\n",
    "\r\n",
    "\u202e",
    "é",
    "e\u0301",
    "🙂",
    "👩‍👩‍👧",
    "\ud800",
    "\udfff x",
    "\U0010ffff",
    "NULL",
    "None",
    "0",
    " ",
    "  ",
    "A",
    "ﬀ",
    "x" * 10_000,
    "x" * 9_999,
    "'" * 10_000,
    "agent",
    "SELECT",
    "__class__",
    "../../x",
]


@pytest.mark.parametrize("field", ["tag", "label", "trigger", "agent", "value", "key"])
def test_hostile_values(home: Home, field: str) -> None:
    """Each is found by its very self, and by nothing else; nothing else is touched."""
    store = home.store
    made: dict[str, str] = {}
    for n, value in enumerate(HOSTILE):
        session = store.session(f"s{n}", agent=value if field == "agent" else None)
        state: Any = {"n": n}
        fields: Any = {
            "tag": {"tags": [value]},
            "label": {"label": value},
            "trigger": {"trigger": value},
            "value": {"meta": {"k": value}},
            "key": {"meta": {value: 1}},
        }.get(field, {})
        made[value] = session.save(state, **fields).id
    tables = _counts(store)
    for value, id in made.items():
        query: dict[str, Any] = {field: value}
        if field == "value":
            query = {"meta": {"k": value}}
        elif field == "key":
            query = {"meta": {value: 1}}
        assert ids(store.checkpoints(**query)) == [id], repr(value)[:80]
        if field != "agent":
            assert [i.head.id for i in store.sessions(**query) if i.head] == [id]
        if field == "agent":
            assert [i.head.id for i in store.sessions(agent=value) if i.head] == [id]
            assert ids(store.checkpoints(agent=value, status="in_progress")) == [id]
    absent = ["b", "'';", "x" * 10_001, "\udbff", "DROP", "\1"]
    for value in absent:
        if field not in ("value", "key"):
            assert ids(store.checkpoints(**{field: value})) == []  # type: ignore[arg-type]
    assert _counts(store) == tables
    assert store.verify(read_data=True).ok


def _counts(store: holdfast.Store) -> Any:
    with store._repository.reader() as reader:
        return reader.sizes()


def test_hostile_values_can_be_taken_away(home: Home) -> None:
    session = home.session()
    for value in HOSTILE:
        session.save({"v": 1}, label=value, tags=[value], trigger=value, key=value)
    for value in HOSTILE:
        assert session.get(f"key:{value}").label == value
    assert home.store.verify(read_data=True).ok
    session.delete()
    home.store.gc()
    for value in HOSTILE:
        for name in ("label", "tag", "trigger"):
            assert ids(home.store.checkpoints(**{name: value})) == []  # type: ignore[arg-type]


NOW = dt.datetime(2030, 1, 1, tzinfo=dt.UTC)


@pytest.mark.parametrize(
    "query",
    [
        {name: value}
        for name in ("agent", "trigger", "tag", "label")
        for value in ("", 5, b"t", ["t"], True)
    ]
    + [
        {"status": "done"},
        {"status": ""},
        {"status": 1},
        {"status": ["failed"]},
        {"meta": "x"},
        {"meta": [("a", 1)]},
        {"meta": {1: 2}},
        {"since": NOW.replace(tzinfo=None)},
        {"until": NOW.replace(tzinfo=None)},
        {"since": "2030-01-01"},
        {"until": 5},
        {"since": NOW.date()},
        {"limit": -1},
        {"limit": 2.0},
        {"limit": "5"},
        {"limit": True},
        {"before": ""},
        {"before": "x"},
        {"before": 5},
        {"before": b"x" * 15},
        {"before": "u" * 24},
        {"before": "0" * 25},
    ],
    ids=str,
)
def test_what_makes_no_sense(home: Home, query: dict[str, Any]) -> None:
    home.filled(2)
    with pytest.raises(InvalidRequest):
        list(home.store.checkpoints(**query))
    name = next(iter(query))
    if name in ("trigger", "tag", "label", "status", "meta", "since", "until"):
        with pytest.raises(InvalidRequest):
            list(home.store.sessions(**query))


# -- indexes ---------------------------------------------------------------------------------------


@pytest.fixture
def unsealed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every checkpoint whose record is read."""
    read: list[int] = []
    unseal = records.unseal_checkpoint

    def count(session: int, seq: int, id: bytes, body: bytes) -> Any:
        read.append(seq)
        return unseal(session, seq, id, body)

    monkeypatch.setattr(records, "unseal_checkpoint", count)
    return read


RARE: list[dict[str, Any]] = [
    {"tag": "rare"},
    {"label": "rare"},
    {"trigger": "rare"},
    {"status": "halted"},
    {"agent": "rare"},
    {"agent": "rare", "tag": "rare"},
    {"label": "rare", "meta": {"k": "v"}},
    {"tag": "t", "status": "halted"},
]


def _needles(store: holdfast.Store) -> None:
    """Three checkpoints with rare marks among many with common ones."""
    common = store.session("common", agent="common")
    for i in range(150):
        common.save({"i": i}, tags=["t"], label="l", trigger="g", status="failed")
    rare = store.session("rare", agent="rare")
    for i in range(3):
        rare.save(
            {"i": i},
            tags=["rare", "t"],
            label="rare",
            trigger="rare",
            status="halted",
            meta={"k": "v"},
        )


@pytest.mark.parametrize("query", RARE, ids=str)
def test_an_index_is_used(home: Home, query: dict[str, Any], unsealed: list[int]) -> None:
    _needles(home.store)
    unsealed.clear()
    assert [(c.session, c.seq) for c in home.store.checkpoints(**query)] == [
        ("rare", 3),
        ("rare", 2),
        ("rare", 1),
    ]
    assert len(unsealed) <= 3 * 2
    unsealed.clear()
    assert len(list(home.store.checkpoints(limit=2))) == 2
    assert len(unsealed) <= 2 * filters.PAGE


def test_sqlite_searches_and_never_scans(sqlite: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    _needles(sqlite.store)
    asked: set[str] = set()
    ask = SqliteView._all

    def note(self: Any, sql: str, *bindings: Any) -> Any:
        asked.add(sql)
        return ask(self, sql, *bindings)

    monkeypatch.setattr(SqliteView, "_all", note)
    queries: list[dict[str, Any]] = [*RARE, {}, {"since": NOW}, {"meta": {"k": 1}}]
    middle = next(sqlite.store.checkpoints()).id
    for query in queries:
        list(sqlite.store.checkpoints(**query))
        list(sqlite.store.checkpoints(**query, before=middle, limit=3))
    assert any("facets" in sql for sql in asked)
    with sqlite.store._repository.reader() as reader:
        assert isinstance(reader.view, SqliteView)
        for sql in asked:
            count = sql.count("?") if "?1" not in sql else 3
            explain = f"EXPLAIN QUERY PLAN {sql}"
            plan = [row[3] for row in reader.view._connection.execute(explain, [b""] * count)]
            steps = [step for step in plan if step.startswith(("SEARCH", "SCAN", "USE"))]
            assert any(step.startswith("SEARCH") for step in steps), (sql, plan)
            assert not [s for s in steps if not s.startswith("SEARCH")], (sql, plan)


# -- the tests see what they should: each of these changes to the engine makes one fail ------------


def test_mutant_without_an_index(
    memory: Home, monkeypatch: pytest.MonkeyPatch, unsealed: list[int]
) -> None:
    history.searches_use_no_index(monkeypatch)
    with pytest.raises(AssertionError):
        test_an_index_is_used(memory, {"tag": "rare"}, unsealed)


def test_mutant_that_takes_any_index(
    memory: Home, monkeypatch: pytest.MonkeyPatch, unsealed: list[int]
) -> None:
    history.searches_use_any_index(monkeypatch)
    with pytest.raises(AssertionError):
        test_an_index_is_used(memory, {"tag": "t", "status": "halted"}, unsealed)


def test_mutant_that_lists_deleted_ones(memory: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    history.deleted_checkpoints_are_listed(monkeypatch)
    with pytest.raises((AssertionError, HoldfastError)):
        test_deleted_ones_are_not_found(memory)


def test_mutant_that_trusts_the_index(memory: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    history.searches_trust_the_index(monkeypatch)
    with pytest.raises(AssertionError), pytest.MonkeyPatch.context() as patch:
        test_each_filter(memory, patch)


def test_mutant_with_loose_types(memory: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    history.searches_ignore_types(monkeypatch)
    with pytest.raises(AssertionError), pytest.MonkeyPatch.context() as patch:
        test_each_filter(memory, patch)


def test_mutant_that_forgets_the_cursor(memory: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    history.searches_forget_the_cursor(monkeypatch)
    with pytest.raises((AssertionError, TimeoutError)):
        crowd(memory.store, 9)
        rounds = iter(range(20))

        def stop() -> None:
            if next(rounds, None) is None:
                raise TimeoutError

        paged(memory.store, 2, stop)


def test_sessions_of_one_millisecond_are_found_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    Ticking(monkeypatch, ns=2_000)
    with holdfast.open("memory:") as store:
        for n in range(40):
            store.session(f"s{n}").save({}, tags=["t"])
        found = list(store.checkpoints(tag="t"))
    assert len({c.created_at.microsecond // 1000 for c in found}) < 5
    assert [c.session for c in found] == [f"s{n}" for n in reversed(range(40))]


def test_a_search_since_the_end_of_time(home: Home) -> None:
    """Memory: OverflowError. SQLite: "the store is damaged"."""
    home.filled(1)
    assert list(home.store.checkpoints(since=dt.datetime.max.replace(tzinfo=dt.UTC))) == []


def test_nested_meta_is_compared_with_its_types(home: Home) -> None:
    """Types count at the top ({"n": 1} is not {"n": True}), but not below."""
    home.session().save(1, meta={"n": [1]})
    assert list(home.store.checkpoints(meta={"n": [True]})) == []


def test_a_page_after_a_freed_checkpoint_is_an_error(home: Home) -> None:
    session = home.store.session("s", agent="x")
    for i in range(6):
        session.save({"i": i})
    page = list(home.store.checkpoints(agent="x", limit=3))
    session.rewind("@~5")
    session.delete(page[-1])
    home.store.gc()
    with pytest.raises(holdfast.CheckpointNotFound):  # said, not begun anew
        list(home.store.checkpoints(agent="x", limit=3, before=page[-1].id))


@pytest.mark.parametrize("query", [{"after": 5}, {"after": b"x"}, {"agent": 5}, {"agent": ""}])
def test_session_filters_of_the_wrong_type_are_refused(home: Home, query: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        list(home.store.sessions(**query))


def test_a_repeated_label_is_found_newest_first(home: Home) -> None:
    session = home.session()
    for i in range(4):
        session.save({"i": i}, label="plan")
    session.save({"i": "head"})
    assert found_seqs(home, label="plan") == [4, 3, 2, 1]
    for left in (3, 2, 1):
        session.delete("label:plan")
        assert session.get("plan").seq == left
        home.store.gc()
        session = home.reopened().session("s")
        assert found_seqs(home, label="plan") == list(range(left, 0, -1))
