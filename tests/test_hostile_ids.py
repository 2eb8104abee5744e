"""A session's name is any string, and only ever a name: never a path, a pattern or a prefix."""

import unicodedata

import pytest

import holdfast
from holdfast.errors import NotFound

from .home import TEXT, strangers

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


def test_hostile_session_ids(home, tmp_path, monkeypatch):
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


def test_hostile_session_ids_to_fork_and_rewind(home):
    home.filled(2, "origin")
    for name in HOSTILE:
        fork = home.session("origin").fork(name)
        fork.save({"mine": name})
        fork.rewind("@~1")
        assert [c.session for c in fork.history()] == [name, "origin", "origin"]
        assert fork.head.parent_session == "origin"
    assert len(home.session("origin")) == 2
    assert home.reopened().verify().ok


def test_hostile_labels_tags_and_keys(home):
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
def test_what_is_no_name_is_refused(home, name):
    with pytest.raises(holdfast.InvalidRequest):
        home.session(name)
