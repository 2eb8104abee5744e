"""A search finds the checkpoints in which a text came, with and without an index."""

from __future__ import annotations

import base64
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

import holdfast
from holdfast import SearchHit
from holdfast.errors import InvalidRequest
from holdfast.history import search, search_index
from holdfast.storage import search_index as stored_index
from holdfast.storage.url import open_search_index
from tests.format.test_layout import text as random_text
from tests.mutants import history
from tests.support.stores import Home

Place = tuple[str, int]


@pytest.fixture(params=["sqlite", "files", "postgres"])
def on_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Home]:
    """A store that can have an index."""
    home = Home(request.param, tmp_path)
    yield home
    home.give_back()


def build(store: holdfast.Store) -> None:
    """Make an index where there can be one. Stores in memory are scanned."""
    if store.kind != "memory":
        store.index()


def places(hits: Iterator[SearchHit]) -> list[Place]:
    """The checkpoints of hits, in order."""
    return [(hit.session, hit.checkpoint.seq) for hit in hits if hit.checkpoint is not None]


# -- what is a hit ---------------------------------------------------------------------------------


def test_text_in_every_place(home: Home) -> None:
    rng = random.Random(4)
    big = random_text(rng, 9_000)
    log = [f"m {i} {'needle' if i == 77 else ''}" for i in range(200)]
    names = {f"f{i} {'needle' if i == 50 else ''}": big[:99] for i in range(99)}
    files = {f"f{i}": "needle" if i == 50 else big[:99] for i in range(99)}
    deep = {"a": {"b": {"c": [[f"{i}{'needle' * (i == 33)}"] for i in range(60)]}}}
    inside = [{"log": [big[:300]] * 30}, {"log": [big[:500], big + "needle"]}]
    states: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "plain": ("a needle here", ()),
        "root list": (["x", "needle"], (1,)),
        "value": ({"a": "needle"}, ("a",)),
        "key": ({"a needle": 1}, ("a needle",)),
        "nested": ({"a": [{"b": ({"c": ["needle"]}, 1)}]}, ("a", 0, "b", 0, "c", 0)),
        "nested key": ({"a": [{"b": {"the needle": []}}]}, ("a", 0, "b", "the needle")),
        "set": ({"a": {"needle", "x"}}, ("a",)),
        "blob": ({"a": big + "needle" + big}, ("a",)),
        "blob in a list": ({"log": ["x", {"content": big + " needle"}]}, ("log", 1, "content")),
        "long list": ({"log": log}, ("log", 77)),
        "many keys": ({"files": names}, ("files", "f50 needle")),
        "many values": ({"files": files}, ("files", "f50")),
        "deep lists": (deep, ("a", "b", "c", 33, 0)),
        "big in deep": ({"a": inside}, ("a", 1, "log", 1)),
        "case": ({"a": "A NEEDLE"}, ("a",)),
    }
    wrong: dict[str, Any] = {
        "bytes": {"a": b"needle"},
        "split": {"a": ["nee", "dle"]},
        "split keys": {"nee": "dle"},
        "big bytes": {"a": b"needle" * 2_000},
        "nothing": {"a": big},
    }
    for name, (state, _) in states.items():
        home.session(name).save(state)
    for name, state in wrong.items():
        home.session(name).save(state)
    if home.durable:
        home.reopened()
    build(home.store)
    found = {hit.session: hit for hit in home.store.search("needle")}
    assert found.keys() == states.keys()
    for name, hit in found.items():
        assert hit.path == states[name][1], name
        assert hit.snippet[hit.start : hit.end].lower() == "needle"
    assert places(home.store.search("needle", case_sensitive=True)).count(("case", 1)) == 0
    assert places(home.store.search("A NEEDLE", case_sensitive=True)) == [("case", 1)]
    assert places(home.store.search(big + "needle" + big)) == [("blob", 1)]


def test_a_hit_is_where_the_text_came(home: Home) -> None:
    session = home.session()
    session.save({"messages": [{"content": "Book a hotel"}], "plan": {"budget": "900 for a hotel"}})
    session.append("messages", {"content": "which city?"})
    session.append("messages", {"content": "a hotel in Lisbon"})
    session.patch(set={"plan.budget": "850 for a hotel"})  # it had the text already
    session.patch(drop=["plan"])
    session.patch(set={"plan": {"budget": "hotel"}})
    state = session.load()
    session.save(state | {"messages": state["messages"][1:]})  # all places move
    session.save(state | {"messages": [*state["messages"][1:], *state["messages"][:1]]})
    build(home.store)
    assert [
        (hit.checkpoint and hit.checkpoint.seq, hit.where) for hit in session.search("HOTEL")
    ] == [
        (8, "state.messages[2].content"),
        (6, "state.plan.budget"),
        (3, "state.messages[2].content"),
        (1, "state.messages[0].content"),
    ]
    assert [hit.snippet for hit in session.search("850")] == ["850 for a hotel"]
    assert places(session.search("city")) == [("s", 2)]
    assert places(session.search("hotel", before=next(session.search("hotel")))) == [
        ("s", 6), ("s", 3), ("s", 1),
    ]  # fmt: skip


def test_text_in_long_strings_that_are_edited(home: Home) -> None:
    rng = random.Random(5)
    session = home.session()
    body = random_text(rng, 40_000)
    wanted: list[Place] = []
    for i in range(12):
        at = rng.randrange(len(body))
        word = " needle " if i in (5, 8) else " " + random_text(rng, 10)
        body = body[:at] + word + body[at:]
        if i == 10:
            body = body.replace("needle", "need le")
        if i in (5, 8):
            wanted.append(("s", i + 1))
        session.save({"doc": body, "log": [f"step {i}"]})
    build(home.store)
    assert places(home.store.search("needle")) == wanted[::-1]
    assert places(home.store.search("need le")) == [("s", 11)]
    for at in range(0, 40_000, 3_777):  # across the borders of what is stored
        assert places(home.store.search(body[at : at + 200]))


def test_forks_and_deletions(home: Home) -> None:
    session = home.session()
    first = session.save({"log": ["alpha"]})
    second = session.append("log", "beta")
    session.append("log", "gamma")
    fork = session.fork("fork")
    fork.append("log", "beta again")
    build(home.store)
    for _ in range(2):
        assert places(home.store.search("alpha")) == [("s", 1)]
        assert places(home.store.search("beta")) == [("fork", 2), ("s", 2)]
        assert places(fork.search("alpha")) == [("fork", 1)]
        assert places(home.store.search("gamma", session="fork")) == [("fork", 1)]
        session.delete(second.id)  # its text came with the next one now
        assert places(home.store.search("beta")) == [("fork", 2), ("s", 3)]
        session.undo()
        fork.rewind("@~1")
        assert places(home.store.search("beta")) == [("fork", 2), ("s", 2)]
        fork.undo()
        build(home.store)
    session.delete()
    assert places(home.store.search("beta")) == [("fork", 2), ("fork", 1)]
    home.store.gc()
    assert places(home.store.search("beta")) == [("fork", 2), ("fork", 1)]
    assert places(home.store.search("alpha")) == [("fork", 1)]
    assert first.id not in [hit.checkpoint and hit.checkpoint.id for hit in fork.search("alpha")]


def test_base64_never_matches(home: Home) -> None:
    data = base64.b64encode(random.Random(1).randbytes(600) + b"needle" * 20).decode()
    word = data[-60:-50]
    wrapped = base64.encodebytes(base64.b64decode(data)).decode()
    texts = [data, f"data:image/png;base64,{data}", f'{{"image": "{data}"}}', wrapped]
    texts.append("data:text/plain;base64,bmVlZGxl")
    for n, text in enumerate(texts):
        home.session(f"s{n}").save({"image": text})
    home.session("plain").save(
        {"text": f"the word {word} and {data}", "more": "image/png bmVlZGxl"}
    )
    build(home.store)
    assert places(home.store.search(word)) == [("plain", 1)]
    assert places(home.store.search("bmVlZGxl")) == [("plain", 1)]
    assert len(places(home.store.search("image"))) == 6


FOLDED = [
    ("straße", "STRASSE", "straße"), ("İstanbul", "i̇stanbul", "İstanbul"), ("ﬁne", "FINE", "ﬁne"),
    ("ΣΊΣΥΦΟΣ", "σίσυφος", "ΣΊΣΥΦΟΣ"), ("K elvin", "k elvin", "K elvin"),
    ("a \ud800 b", "\ud800", "\ud800"), ("nul \0 nul", "l \0 N", "l \0 n"),
    ('say "no"', '"NO"', '"no"'),
    ("日本語のテキスト", "本語の", "本語の"), ("💥💥💥", "💥💥💥", "💥💥💥"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "word", "match"), FOLDED)
def test_case_of_all_alphabets(home: Home, text: str, word: str, match: str) -> None:
    home.session("s").save({"x": ["ß" * 9 + text]})
    home.session("other").save({"x": ["K elvi", "\ud801 z"]})
    build(home.store)
    [hit] = home.store.search(word)
    assert hit.session == "s"
    shown = hit.snippet[hit.start : hit.end]
    assert shown == "".join(c if c.isprintable() else " " for c in match)


def test_snippets(home: Home) -> None:
    long = "x" * 500 + "\x1b[31mneedle\u202e\n" + "y" * 500
    session = home.session()
    session.save({"long": long})
    session.save({"long": "", "wide": "needle " * 200})
    [wide] = session.search("needle " * 150)
    assert wide.snippet[wide.start : wide.end] in "needle " * 200
    assert len(wide.snippet) <= 330
    *_, hit = session.search("needle")
    assert hit.snippet == "…" + "x" * 35 + " [31mneedle  " + "y" * 112 + "…"
    assert (hit.start, hit.end) == (41, 47)


# -- names, filters, pages -------------------------------------------------------------------------


def test_sessions_are_found_by_name(home: Home) -> None:
    for n in range(12):
        home.session(f"Trip {n:02}").save({"text": "by trip"} if n == 3 else {})
    home.store.session("my trip", agent="a").save({}, tags=["t"])
    home.session("trip away").save({})
    home.session("trip away").delete()
    build(home.store)
    found = list(home.store.search("TRIP"))
    assert [hit.session for hit in found] == [*(f"Trip {n:02}" for n in range(10)), "Trip 03"]
    assert [hit.checkpoint is None for hit in found] == [True] * 10 + [False]
    assert found[0].snippet[found[0].start : found[0].end] == "Trip"
    assert (found[0].path, found[0].where) == ((), "")
    assert [hit.session for hit in home.store.search("trip", tag="t")] == ["my trip"]
    assert [hit.session for hit in home.store.search("trip", agent="a")] == ["my trip"]
    assert [hit.session for hit in home.store.search("trip", limit=0)] == [
        f"Trip {n:02}" for n in range(10)
    ]
    assert [hit.session for hit in home.session("Trip 03").search("trip")] == ["Trip 03"]
    assert list(home.store.search("trip", before=found[-1])) == []


def test_filters_apply_to_hits(home: Home) -> None:
    sessions = [home.store.session(f"s{n}", agent=["x", "y"][n % 2]) for n in range(4)]
    rng = random.Random(8)
    for n in range(120):
        fields: dict[str, Any] = {"tags": ["t"] if rng.random() < 0.5 else []}
        fields |= {"status": rng.choice(["completed", "in_progress"]), "meta": {"n": n % 3}}
        rng.choice(sessions).append("log", f"word {n}", **fields)
    build(home.store)
    everything = {hit.checkpoint.id for hit in home.store.search("word") if hit.checkpoint}
    assert len(everything) == 120
    for query in (
        {"agent": "x"}, {"tag": "t"}, {"status": "completed"}, {"meta": {"n": 1}},
        {"session": "s1"},
        {"session": "s1", "tag": "t"}, {"agent": "y", "tag": "t", "meta": {"n": 2}},
    ):  # fmt: skip
        listed = sorted((c.id for c in home.store.checkpoints(**query)), reverse=True)
        found = [h.checkpoint.id for h in home.store.search("word", **query) if h.checkpoint]
        assert found == listed, query
        assert found


@pytest.mark.parametrize("size", [1, 7])
def test_pages(home: Home, size: int) -> None:
    for n in range(60):
        home.session(f"s{n % 3}").append("log", f"{'odd' if n % 2 else 'even'} word {n}")
    build(home.store)
    home.session("s0").append("log", "odd and new")
    for within in (None, "s0"):
        whole = list(home.store.search("odd", session=within))
        assert len(whole) == (31 if within is None else 11)
        paged: list[SearchHit] = []
        while page := list(
            home.store.search(
                "odd", session=within, limit=size, before=paged[-1] if paged else None
            )
        ):
            assert len(page) <= size
            paged += page
        assert paged == whole


def test_bad_searches(home: Home) -> None:
    home.filled(1)
    for bad in (
        {"text": ""}, {"text": b"x"}, {"text": "x", "limit": -1}, {"text": "x", "tag": ""},
        {"text": "x", "color": "red"}, {"text": "x", "before": "no id"},
    ):  # fmt: skip
        with pytest.raises(InvalidRequest):
            list(home.store.search(**bad))


# -- cost and damage -------------------------------------------------------------------------------


def test_each_item_is_read_about_once(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many states hold it."""
    session = home.session()
    big = "blob " * 2_000
    for i in range(150):
        item = f"message {i} " + random_text(random.Random(i), 300)
        session.patch(append={"log": [item]}, set={"big": big})
    checked: list[str] = []
    is_in = search.Word.is_in

    def count(self: Any, text: str) -> bool:
        checked.append(text)
        return is_in(self, text)

    monkeypatch.setattr(search.Word, "is_in", count)
    assert len(list(session.search("message 3 "))) == 1
    items = [text for text in checked if text.startswith("message")]
    assert len({*items}) == 150
    assert len(items) <= 160  # the first states are so small that they hold their items
    assert checked.count(big) == 1


def test_a_damaged_state_hides_no_other(home: Home, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a", "b"):
        for n in range(3):
            home.session(name).append("log", f"quick {n}")
    build(home.store)
    home.spoil_checkpoint(2, name="b")
    found = places(home.store.search("quick"))
    assert sorted(found) == [("a", 1), ("a", 2), ("a", 3), ("b", 1), ("b", 3)]
    assert "left out checkpoint 2" in caplog.text


def test_a_search_ends_early(home: Home) -> None:
    for n in range(40):
        home.session().append("log", [f"line {n} {m}" for m in range(20)])
    build(home.store)
    asked = iter(range(10))
    stopped: Callable[[], bool] = lambda: next(asked, None) is None  # noqa: E731
    assert len(list(home.store.search("line", stopped=stopped))) < 10
    assert next(asked, None) is None


# -- scan, index and a plain model agree -----------------------------------------------------------


WORDS = ["alpha", "Beta", "gamma delta", "straße", "ÉTÉ", "yes", "no"]
SOUGHT = [
    "alpha", "a b", "STRASSE", "été", "yes", "delta", "lph", "es", "gamma delta", "none",
    "key a", "Beta",
]  # fmt: skip


def strings(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], bool, str]]:
    if isinstance(value, str):
        yield path, False, value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield (*path, key), True, key
            yield from strings(each, (*path, key))
    elif isinstance(value, list):
        for n, each in enumerate(value):
            yield from strings(each, (*path, n))


def came(new: Any, old: Any, word: str) -> bool:
    """Whether a text came with a state, in the plainest way, for states without long strings."""
    word = word.casefold()
    left, right = Counter(strings(new)), Counter(strings(old))
    left, right = left - right, right - left
    moved = Counter(each[2] for each in right.elements())
    places = {(path, is_key): text for path, is_key, text in right}
    for path, is_key, text in left:
        if moved[text]:
            moved[text] -= 1
        elif text.casefold().count(word) > places.get((path, is_key), "").casefold().count(word):
            return True
    return False


def live(store: holdfast.Store, rng: random.Random, steps: int) -> None:
    """Sessions that grow, change, fork, and lose checkpoints. No string is twice in a state."""
    names = ["s0", "s1"]
    store.session("s0").save({"log": [], "doc": ""})
    for n in range(steps):
        session = store.session(rng.choice(names))
        text = f"{n} {' '.join(rng.choices(WORDS, k=rng.randrange(1, 4)))}"
        roll = rng.random()
        if roll < 0.5 or not session.exists():
            session.append("log", rng.choice([text, {"content": text}, text + " filler" * 300]))
        elif roll < 0.6:
            session.patch(set={rng.choice(["doc", "key a", "plan"]): text})
        elif roll < 0.7:
            state = session.load()
            session.save(state | {"log": state["log"][rng.randrange(3) :]})
        elif roll < 0.75:
            names.append(f"fork {rng.randrange(1 << 40)}")
            session.fork(names[-1])
        elif roll < 0.85:
            there = [c for c in session.tree() if c != session.head]
            if there:
                session.delete(rng.choice(there))
        elif roll < 0.9:
            session.undo()
        elif roll < 0.93:
            session.rewind(rng.choice(list(session.tree())))
        elif roll < 0.95 and len(names) > 2:
            session.delete()
        elif roll < 0.97:
            store.gc()
        else:
            list(store.search(rng.choice(SOUGHT)))


def expected(store: holdfast.Store, word: str) -> list[str]:
    found = []
    for info in store.sessions():
        session = store.session(info.name)
        for c in session.tree():
            old = None if c.ancestor is None else store.get(c.ancestor)
            before = {} if old is None else store.session(old.session).load(old.id)
            if came(session.load(c.id), before, word):
                found.append(c.id)
    return sorted(found, reverse=True)


def found(store: holdfast.Store, word: str) -> list[str]:
    return [hit.checkpoint.id for hit in store.search(word) if hit.checkpoint is not None]


@pytest.mark.parametrize("seed", range(3))
def test_the_scan_finds_what_a_model_finds(memory: Home, seed: int) -> None:
    live(memory.store, random.Random(seed), 100)
    for word in SOUGHT:
        assert found(memory.store, word) == expected(memory.store, word), word


@pytest.mark.parametrize(
    ("kind", "seed"), [("sqlite", 0), ("sqlite", 1), ("sqlite", 2), ("files", 3), ("postgres", 4)]
)
def test_the_index_finds_what_a_scan_finds(
    kind: str,
    seed: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rounds: Callable[..., int],
) -> None:
    rng, home = random.Random(seed), Home(kind, tmp_path)
    monkeypatch.setattr(search_index, "_FEW", rng.choice([1, 5, 32]))
    monkeypatch.setattr(search_index, "_BATCH", rng.choice([2, 200]))
    try:
        live(home.store, rng, rounds(30, torture=100))
        for _ in range(rounds(3, torture=30)):
            home.store.index()
            live(home.store, rng, 15)
            agree(home, rng, monkeypatch)
    finally:
        home.give_back()


def agree(home: Home, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches with the index find what searches without it find, in the same order."""
    names = [info.name for info in home.store.sessions()]
    names = rng.sample(names, min(len(names), 2))
    for reading in (home.to_read(), home.store):  # the second one brings it up to date
        for word in rng.sample(SOUGHT, 6):
            with_index = list(reading.search(word))
            within = [list(reading.search(word, session=name, limit=3)) for name in names]
            with monkeypatch.context() as patch:
                patch.setattr(search, "open_candidates", lambda *_: None)
                assert with_index == list(reading.search(word)), word
                for name, hits in zip(names, within, strict=True):
                    assert hits == list(reading.search(word, session=name, limit=3)), (word, name)


ALPHABET = st.sampled_from('aAßsSİiıIﬁK k"*\0\n\ud800Σςσ\x1e\x1f')
TEXTS = st.text(ALPHABET, max_size=12)


@settings(max_examples=150, deadline=None)
@given(old=TEXTS, new=TEXTS, word=st.text(ALPHABET, min_size=3, max_size=5))
def test_any_text_is_found_by_the_index_too(
    tmp_path_factory: pytest.TempPathFactory, old: str, new: str, word: str
) -> None:
    with holdfast.open(tmp_path_factory.mktemp("store") / "s.db", durability="normal") as store:
        session = store.session("x")
        session.save({"text": old})
        session.save({"text": new})
        scanned = list(store.search(word))
        store.index()
        assert list(store.search(word)) == scanned


# -- the index -------------------------------------------------------------------------------------


def test_an_index_is_used_and_kept(on_disk: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    session = on_disk.session()
    for n in range(50):
        session.append("log", f"message {n}")
    result = on_disk.store.index()
    assert result == holdfast.IndexResult(50, 50, 0)
    assert on_disk.store.index() == holdfast.IndexResult(50, 0, 0)
    read: list[Any] = []
    find = search._TextScan._find

    def count(self: Any, reader: Any, place: Any, row: Any) -> Any:
        read.append(place)
        return find(self, reader, place, row)

    monkeypatch.setattr(search._TextScan, "_find", count)
    assert places(on_disk.store.search("message 7")) == [("s", 8)]
    assert len(read) == 1
    for n in range(search_index._FEW):
        session.append("log", f"later {n}")
    read.clear()
    assert places(on_disk.store.search("later 30")) == [("s", 81)]
    assert len(read) == 1  # the search has brought it up to date
    session.append("log", "last")
    read.clear()
    assert places(on_disk.to_read().search("last")) == [("s", 83)]
    assert len(read) == 1  # this one is not in it
    assert on_disk.store.drop_index()
    assert not on_disk.store.drop_index()
    assert places(on_disk.store.search("message 7")) == [("s", 8)]


def test_what_changes_nothing_costs_no_index(on_disk: Home) -> None:
    """Searches make none, and stores that are read do not write it."""
    on_disk.filled(2)
    list(on_disk.store.search("fox"))
    assert open_search_index(on_disk.store._repository.backend) is None
    for attempt in (on_disk.to_read().index, on_disk.to_read().drop_index):
        with pytest.raises(holdfast.Unavailable):
            attempt()


def test_a_store_in_memory_has_no_index(memory: Home) -> None:
    with pytest.raises(InvalidRequest):
        memory.store.index()
    assert not memory.store.drop_index()


def index_path(home: Home) -> Path:
    return Path(f"{home.path}-search")


@pytest.mark.parametrize(
    "damage",
    [b"", b"no database at all" * 500, "middle", "other version"],
    ids=["empty", "no database", "middle", "other version"],
)
def test_a_damaged_index_is_made_again(
    sqlite: Home, damage: bytes | str, caplog: pytest.LogCaptureFixture
) -> None:
    for n in range(300):
        sqlite.session().append("log", f"message {n}")
    sqlite.store.index()
    path = index_path(sqlite)
    data = bytearray(path.read_bytes())
    if damage == "middle":
        data[4096:] = random.Random(1).randbytes(len(data) - 4096)
    elif damage == "other version":
        data[60:64] = (99).to_bytes(4, "big")
    path.write_bytes(data if isinstance(damage, str) else damage)
    assert places(sqlite.store.search("message 77")) == [("s", 78)]
    assert "index" in caplog.text
    caplog.clear()
    assert sqlite.store.index().added == 300
    caplog.clear()
    assert places(sqlite.store.search("message 77")) == [("s", 78)]
    assert not caplog.text


def test_the_index_of_another_store_is_noticed(tmp_path: Path) -> None:
    """Head rows are equal in both stores, session by session."""
    homes = [Home("sqlite", tmp_path / name) for name in ("a", "b")]
    for home in homes:
        for n in range(5):
            home.session().append("log", f"{home.folder.parent.name} message {n}")
        home.store.index()
        home.close()
    index_path(homes[0]).replace(index_path(homes[1]))
    with holdfast.open(homes[1].path) as store:
        assert len(places(store.search("b message"))) == 5
        assert places(store.search("a message")) == []
        assert store.index() == holdfast.IndexResult(5, 5, 0)
        assert len(places(store.search("b message"))) == 5


def test_an_older_copy_of_the_store_is_noticed(sqlite: Home) -> None:
    for n in range(5):
        sqlite.session().append("log", f"message {n}")
    sqlite.store.backup(sqlite.folder / "copy")
    sqlite.session().append("log", "lost")
    sqlite.store.index()
    sqlite.close()
    (sqlite.folder / "copy").replace(sqlite.path)
    sqlite.reopened()
    sqlite.session().append("log", "instead")
    assert places(sqlite.store.search("lost")) == []
    assert places(sqlite.store.search("instead")) == [("s", 6)]
    assert sqlite.store.index().added == 1
    assert places(sqlite.store.search("instead")) == [("s", 6)]


def test_a_wrong_index_adds_no_hit(sqlite: Home) -> None:
    """Its text is not that of the checkpoints."""
    session = sqlite.session()
    for n in range(40):
        session.append("log", f"message {n}")
    sqlite.store.index()
    index = open_search_index(sqlite.store._repository.backend)
    assert index is not None
    mark = index.marks()[1]
    wrong = [
        stored_index.Document(seq, id, ancestor, "lie")
        for seq, (id, ancestor) in index.known(1).items()
    ]
    assert index.write(stored_index.Change(1, mark, mark, wrong))
    assert not index.write(stored_index.Change(1, None, mark, wrong))
    index.close()
    assert places(sqlite.store.search("lie")) == []


def test_two_ids_may_share_a_row_of_the_index(sqlite: Home) -> None:
    sqlite.filled(1)
    sqlite.store.index()
    index = open_search_index(sqlite.store._repository.backend)
    assert index is not None
    ids = [b"\x01" * 14 + bytes([n]) for n in range(3)]
    documents = [
        stored_index.Document(n, id, stored_index.NONE, f"text {n}") for n, id in enumerate(ids)
    ]
    assert index.write(stored_index.Change(7, None, None, documents))
    high = b"\xff" * 16
    assert [row.id for row in index.find("text", high, 9)[0]] == ids[::-1]
    assert [row.id for row in index.find("text", ids[1], 9)[0]] == ids[:1]
    assert index.write(stored_index.Change(7, None, None, [], [1]))
    assert [row.seq for row in index.find("text", high, 9)[0]] == [2, 0]
    assert [row.seq for row in index.find("text 0", high, 9)[0]] == [0]
    assert index.write(stored_index.Change(7, None, None, [], [0, 2]))
    assert index.find("text", high, 9)[0] == []
    index.close()


# -- the tests see what they should ----------------------------------------------------------------


def test_mutant_that_trusts_old_marks(sqlite: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    history.indexes_ignore_deletions(monkeypatch)
    with pytest.raises(AssertionError):
        test_forks_and_deletions(sqlite)


def test_mutant_that_trusts_any_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history.indexes_are_of_any_store(monkeypatch)
    with pytest.raises(AssertionError):
        test_the_index_of_another_store_is_noticed(tmp_path)


def test_mutant_that_reads_all_items(memory: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    history.searches_read_all_items(monkeypatch)
    with pytest.raises(AssertionError), pytest.MonkeyPatch.context() as patch:
        test_each_item_is_read_about_once(memory, patch)


def test_mutant_that_compares_no_ancestor(memory: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    history.every_state_is_new(monkeypatch)
    with pytest.raises(AssertionError):
        test_a_hit_is_where_the_text_came(memory)
