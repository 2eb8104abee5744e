"""Names of sessions, labels, tags and keys are plain strings: never paths, patterns or prefixes."""

from __future__ import annotations

import unicodedata

import pytest

import holdfast
from holdfast import Retention
from holdfast.errors import CheckpointNotFound, NotFound, SessionNotFound
from holdfast.history.watch import Watcher
from tests.history.test_undo import look
from tests.support.sessions import KEEP_LAST, found_seqs, save_random, seqs
from tests.support.stores import TEXT, Home, strangers

NFC, NFD = (unicodedata.normalize(form, "Zoë") for form in ("NFC", "NFD"))
HOSTILE = [
    "../x", "../../x", "/etc/passwd", "C:\\x", "..", ".", "~", "a/b", "a\\b", "*", "?", "[",
    "[a-z]", "%", "_", "a", "a_b", "b", "ab", "A", "latest", "s_latest", "s", "s1", "s1_2", "\0",
    "a\0b", "a\0", " ", " s", "s ", "\n", "\t", "😀", NFC, NFD, "\ud800", "\udfff\ud800", "@",
    "@~1", "label:x", "tag:x", "key:x", "step:1", "null", "None", "0", "1", "-1", "1e5", '"', "`x`",
    "'; DROP TABLE heads; --", "$(touch x)", "{}", "${HOME}", "con", "nul.txt", "store.db",
    "store.db-wal", "x" * 10_000, "x" * 9_999, "é" * 5_000, "\u202e", "\ufeff", "\x7f", "ﬁ", "fi",
    "ß", "ss",
]  # fmt: skip


def test_any_string_can_name_a_session(home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for n, name in enumerate(HOSTILE):
        home.session(name).save({"name": name, "log": [TEXT] * 9}, label=f"first of {n}")
        home.session(name).append("log", n)
    store = home.reopened()
    assert sorted(info.name for info in store.sessions()) == sorted(HOSTILE)
    for n, name in enumerate(HOSTILE):
        session = store.session(name)
        assert session.exists()
        assert len(session) == 2
        assert session.load() == {"name": name, "log": [*[TEXT] * 9, n]}
        assert session.load(f"first of {n}")["name"] == name
        assert [c.session for c in session.history()] == [name, name]
        assert session.verify().ok
        with pytest.raises(NotFound):
            session.get(f"first of {n + 1}")
    for name in ("x", "S", "LATEST", "../", "**", "  ", "a_", "x" * 9_998, "\ud801", "\0\0"):
        assert not store.session(name).exists()
    assert store.verify().ok
    assert strangers(home) == []


def test_any_string_can_name_a_fork(home):
    home.filled(2, "origin")
    for name in HOSTILE:
        fork = home.session("origin").fork(name)
        fork.save({"mine": name})
        fork.rewind("@~1")
        assert [c.session for c in fork.history()] == [name, "origin", "origin"]
        assert fork.head.parent_session == "origin"
    assert len(home.session("origin")) == 2
    assert home.reopened().verify().ok


def test_any_string_can_be_a_label_tag_or_key(home):
    session = home.session()
    for n, text in enumerate(HOSTILE):
        session.save({"n": n}, label=text, tags=[text, "all"], key=text, trigger=text, hint=text)
    session = home.reopened().session("s")
    for n, text in enumerate(HOSTILE):
        for kind in ("label", "tag", "key"):
            checkpoint = session.get(f"{kind}:{text}")
            assert session.load(checkpoint) == {"n": n}
        assert checkpoint.label == text
        assert set(checkpoint.tags) == {text, "all"}
        assert (checkpoint.key, checkpoint.trigger, checkpoint.hint) == (text, text, text)
    assert session.verify().ok


@pytest.mark.parametrize("name", ["", None, 5, b"s", ["s"]])
def test_other_types_and_the_empty_string_are_not_names(home, name):
    with pytest.raises(holdfast.InvalidRequest):
        home.session(name)


def test_names_are_not_paths(home, tmp_path):
    for name in ("../x", "../../x", str(tmp_path / "escaped"), "a/../../b"):
        home.session(name).save({"from": name})
        assert home.reopened().session(name).load() == {"from": name}
    assert strangers(home) == []


def test_names_are_not_patterns(home):
    home.filled(1, "a_b")
    home.filled(1, "abc")
    for pattern in ("b", "*", "?", "a*", "a?b", "%", "a%", "_bc", "[a]_b"):
        assert not home.session(pattern).exists()
        with pytest.raises(SessionNotFound):
            home.session(pattern).load()
    for revision in ("*", "?", "%", "[0-9]*"):
        with pytest.raises(NotFound):
            home.session("abc").load(revision)


def test_names_with_brackets_are_found(home):
    for name in ("[", "]", "[a", "[!a]", "{a,b}"):
        home.session(name).save({"name": name})
        assert home.reopened().session(name).load() == {"name": name}
        assert name in [info.name for info in home.store.sessions()]


def test_names_are_not_prefixes(home):
    home.filled(2, "sess1")
    home.filled(3, "sess1_2")
    assert [(i.name, i.checkpoints) for i in home.store.sessions()] == [
        ("sess1", 2),
        ("sess1_2", 3),
    ]
    assert {c.session for c in home.session("sess1").tree()} == {"sess1"}
    assert len(list(home.session("sess1").history())) == 2
    assert not home.session("sess").exists()


def test_names_that_contain_latest_are_listed(home):
    names = ["latest", "s_latest", "latest.json", "s"]
    for name in names:
        home.filled(2, name)
    store = home.reopened()
    assert sorted(info.name for info in store.sessions()) == sorted(names)
    for name in names:
        assert seqs(store.session(name).tree()) == [1, 2]


def test_deleting_a_session_named_like_a_path_deletes_no_file(home: Home) -> None:
    victim = home.folder.parent / "victim.json"
    victim.write_text("mine")
    for name in ("../victim.json", str(victim), "a/../../victim.json", "."):
        session = home.store.session(name, agent=name)
        for i in range(4):
            session.save({"i": i}, label=name, tags=[name], key=f"{name}{i}")
        session.fork(f"{name}/../f").delete()
        session.delete(f"key:{name}1")
        session.prune(Retention(keep_last=1, keep_tagged=False, keep_labelled=False))
        session.delete()
        home.store.gc()
    assert victim.read_text() == "mine"
    assert strangers(home) == [victim]
    assert home.store.stats().sessions == 0


PATTERNS = ("*", "?", "a*", "a?b", "%", "a%", "_bc", "[a]_b", "b")


def test_patterns_delete_nothing(home: Home) -> None:
    names = ("a_b", "abc")
    for name in names:
        home.filled(3, name, label=name, tags=[name], trigger=name)
    before = [look(home.store, name) for name in names]
    for pattern in PATTERNS:
        stranger = home.session(pattern)
        for call in (
            stranger.delete,
            stranger.undo,
            stranger.redo,
            lambda s=stranger: s.prune(KEEP_LAST),
        ):
            with pytest.raises(SessionNotFound):
                call()
        for name in names:
            with pytest.raises(NotFound):
                home.session(name).delete(pattern)
    assert not any(home.store.gc())
    assert [look(home.store, name) for name in names] == before


def test_patterns_find_nothing(home: Home) -> None:
    watchers = [Watcher(home.store._repository.backend, pattern) for pattern in PATTERNS]
    for name in ("a_b", "abc"):
        session = home.store.session(name, agent=name)
        session.save({"said": name}, label=name, tags=[name], trigger=name, meta={name: name})
    for pattern in PATTERNS:
        for field in ("label", "tag", "trigger", "agent"):
            assert found_seqs(home, **{field: pattern}) == []
        assert found_seqs(home, meta={pattern: pattern}) == []
        assert list(home.store.sessions(agent=pattern)) == []
        if pattern != "b":
            assert list(home.store.search(pattern)) == []
    assert [watcher.poll() for watcher in watchers] == [[]] * len(PATTERNS)


def test_cleaning_up_a_session_leaves_one_with_a_longer_name(home: Home) -> None:
    home.filled(3, "sess1")
    home.filled(3, "sess1_2")
    other = look(home.store, "sess1_2")
    watcher = Watcher(home.store._repository.backend, "sess1_2")
    for name in ("sess", "sess1_"):
        with pytest.raises(SessionNotFound):
            home.session(name).delete()
    session = home.session("sess1")
    session.prune(KEEP_LAST)
    session.delete()
    assert home.store.gc().sessions == 1
    assert [i.name for i in home.store.sessions()] == ["sess1_2"]
    assert look(home.store, "sess1_2") == other
    assert watcher.poll() == []
    home.session("sess1_2").delete()
    for name in ("sess1", "sess1_"):
        with pytest.raises(SessionNotFound):
            home.session(name).undo()
    home.session("sess1_2").undo()
    assert look(home.store, "sess1_2") == other


def test_searches_match_whole_names(home: Home) -> None:
    for name in ("plan", "planner"):
        session = home.store.session(name, agent=name)
        session.save({}, label=name, tags=[name], trigger=name, key=name, meta={"by": name})
        session.save({})
    for field in ("agent", "label", "tag", "trigger"):
        assert {c.session for c in home.store.checkpoints(**{field: "plan"})} == {"plan"}  # type: ignore[arg-type]
        assert found_seqs(home, **{field: "pla"}) == []
    assert [c.session for c in home.store.checkpoints(meta={"by": "plan"})] == ["plan"]
    assert [i.name for i in home.store.sessions(agent="plan")] == ["plan"]
    for revision in ("key:plan", "label:plan", "plan"):
        with pytest.raises(CheckpointNotFound):
            home.session("planner").delete(revision)


def test_names_that_contain_latest_in_every_operation(home: Home) -> None:
    names = ["latest", "latest.json", "s", "s_latest"]
    watcher = Watcher(home.store._repository.backend)
    for name in names:
        save_random(home.store.session(name, agent="latest"), 3)
        home.session(name).save({"i": 3}, label="latest", tags=["latest"])
    assert sorted({e.session for e in watcher.poll()}) == names
    for query in ({}, {"agent": "latest"}, {"label": "latest"}, {"tag": "latest"}):
        assert sorted({c.session for c in home.store.checkpoints(**query)}) == names  # type: ignore[arg-type]
    assert [p.session for p in home.store.prune(KEEP_LAST)] == names
    assert sorted(s.name for s in home.store.stats().largest) == names
    for name in names:
        home.session(name).delete()
        home.session(name).undo()
    home.store.gc()
    assert [(i.name, i.checkpoints) for i in home.store.sessions()] == [(n, 1) for n in names]


def test_sessions_of_two_agents_share_no_keys_and_labels(home):
    one = home.store.session("one", agent="planner")
    two = home.store.session("two", agent="coder")
    first = one.save({"of": "one"}, key="id-1", label="l")
    two.save({"of": "two"}, key="id-1", label="l")
    assert one.load("key:id-1") == one.load("l") == {"of": "one"}
    assert two.load("key:id-1") == two.load("l") == {"of": "two"}
    home.store.session("one", agent="coder").save({"of": "one, by another"})
    with pytest.raises(NotFound):
        two.load(first.id)
    session = home.reopened().session("one")
    assert session.get(first.id).agent == "planner"
    assert session.head.agent == "coder"
    assert [i.name for i in home.store.sessions(agent="planner")] == ["one"]


def test_cleaning_up_the_session_of_one_agent_leaves_that_of_another(home: Home) -> None:
    one, two = home.store.session("one", agent="planner"), home.store.session("two", agent="coder")
    for session in (one, two):
        for i in range(4):
            session.save({"of": session.name}, key=f"id-{i}", label="l", tags=["t"])
    home.store.session("one", agent="coder").save({"of": "one, by another"})
    before = look(home.store, "two")
    assert [(c.session, c.seq) for c in home.store.checkpoints(agent="coder", tag="t")] == [
        ("two", n) for n in (4, 3, 2, 1)
    ]
    one.refresh()
    one.delete("key:id-1")
    one.prune(Retention(keep_last=1, keep_tagged=False, keep_labelled=False))
    home.store.gc()
    assert look(home.store, "two") == before
    assert two.load("key:id-1") == {"of": "two"}
    assert min((c.session, c.seq) for c in home.store.checkpoints(agent="coder")) == ("one", 5)
    one.delete()
    home.store.gc()
    assert look(home.reopened(), "two") == before
    assert list(home.store.checkpoints(agent="planner")) == []
