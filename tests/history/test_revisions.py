"""Revisions: labels, keys, prefixes of ids and steps back name one checkpoint or are an error."""

from __future__ import annotations

import pytest

import holdfast
from holdfast import ids
from holdfast.errors import AmbiguousRevision, CheckpointNotFound, SessionNotFound
from holdfast.history import revisions
from tests.mutants import history
from tests.support.stores import Home


def test_what_is_missing_is_an_error(home):
    session = home.session("none")
    assert session.head is None
    assert list(session.history()) == list(session.tree()) == []
    for call in (session.load, lambda: session.rewind("@"), lambda: session.fork("x")):
        with pytest.raises(SessionNotFound):
            call()
    assert not session.exists()
    assert list(home.store.sessions()) == []
    session = home.filled(2)
    for revision in ("label:no", "tag:no", "key:no", "step:9", "@~2", "no", "0" * 24):
        with pytest.raises(CheckpointNotFound):
            session.load(revision)
    with pytest.raises(CheckpointNotFound):
        home.store.get("zzzz")
    with pytest.raises(AmbiguousRevision):
        session.get(session.head.id[0])


def test_a_repeated_label_means_the_newest(home):
    session = home.session()
    for i in range(4):
        session.save({"i": i}, label="plan", tags=["t"])
    session.save({"i": "none"})
    session = home.reopened().session("s")
    for revision in ("plan", "label:plan", "tag:t"):
        assert session.load(revision) == {"i": 3}
    session.rewind("@~3")
    assert session.load("plan") == {"i": 1}


def test_a_label_of_another_branch_is_told_by_its_id(home: Home) -> None:
    session = home.filled(2)
    left = session.save({"i": "left"}, label="draft", tags=["t"])
    session.rewind("@~1")
    fork = session.fork("fork")
    for handle, revision in ((session, "draft"), (session, "tag:t"), (fork, "label:draft")):
        with pytest.raises(CheckpointNotFound) as caught:
            handle.load(revision)
        assert left.id in str(caught.value.hint)
    assert session.load(left.id) == {"i": "left"}


def save_ids_with_one_prefix(home: Home, patch: pytest.MonkeyPatch) -> tuple[str, holdfast.Session]:
    """A prefix that far more ids share than are asked for at a time, and who made the last one."""
    made = (ids.from_text(f"06a2yjva0wchkawcxr3f2d{n:02d}") for n in range(100))
    patch.setattr(revisions, "PAGE", 3)
    patch.setattr(ids, "new_id", lambda *_: next(made))
    one, two = home.session("one"), home.session("two")
    one.save({"n": 0})
    for n in range(12):
        home.session("crowd").save({"n": n})
    one.save({"n": 1})
    two.save({"n": 2})
    return "06a2yjva0w", two


def test_a_prefix_means_the_same_however_many_ids_share_it(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, two = save_ids_with_one_prefix(home, monkeypatch)
    assert two.load(prefix) == {"n": 2}
    with pytest.raises(holdfast.AmbiguousRevision):
        home.session("one").load(prefix)
    with pytest.raises(holdfast.AmbiguousRevision):
        home.store.get(prefix)
    with pytest.raises(holdfast.CheckpointNotFound):
        two.load("06a2yjva0wchkawcxr3f2dzz")


def test_mutant_that_asks_for_one_page(memory: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    history.prefixes_read_one_page(monkeypatch)
    with pytest.raises(holdfast.NotFound), pytest.MonkeyPatch.context() as patch:
        test_a_prefix_means_the_same_however_many_ids_share_it(memory, patch)


def test_a_prefix_prefers_checkpoints_that_are_not_deleted(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one session or of all: the store's own search took the deleted ones for candidates."""
    prefix, two = save_ids_with_one_prefix(home, monkeypatch)
    for name in ("one", "crowd"):
        home.session(name).delete()
    assert home.store.get(prefix).id == two.get(prefix).id == two.get("@").id


@pytest.mark.parametrize("digits", ["9" * 19, "9" * 5000], ids=len)
def test_numbers_with_too_many_digits_are_refused(memory: Home, digits: str) -> None:
    session = memory.filled(2)
    for revision in (f"@~{digits}", f"step:{digits}"):
        with pytest.raises((holdfast.InvalidRequest, holdfast.CheckpointNotFound)):
            session.load(revision)
    with pytest.raises(holdfast.NotFound):
        session.blame(f"log.{digits}")
