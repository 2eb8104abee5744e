"""What is in doubt once lines of a log are lost, or folders were brought: none of it is freed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.errors import Corrupt
from holdfast.history import lineage
from tests.transfer.test_copy_damage import flipped

TEXT = "a message that is long enough to be one " * 5


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


def opened(path: Path, **more: Any) -> holdfast.Store:
    return holdfast.open(f"files:{path}", **more)


def lose(path: Path, folder: str, what: str) -> None:
    """Flip a bit of the last line of a log that says something."""
    log = path / "sessions" / folder / "log.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    at = max(n for n, line in enumerate(lines) if f'"{what}"'.encode() in line)
    lines[at] = flipped(lines[at], len(lines[at]) // 2)
    log.write_bytes(b"".join(lines))


def saved(store: holdfast.Store, name: str, who: str, times: int = 3) -> None:
    for n in range(times):
        store.session(name).save({"who": who, "n": n, "log": [f"{who} {n} {TEXT}"] * 20})


def loaded(session: holdfast.Session) -> dict[str, Any]:
    return {c.id: session.load(c) for c in session.tree()}


# -- deletions that were undone ------------------------------------------------------------------


@pytest.mark.parametrize("repaired", [False, True])
@pytest.mark.parametrize("later", [0, 2])
def test_a_session_that_came_back_by_a_lost_line(path, later, repaired):
    with opened(path) as store:
        saved(store, "s", "old")
        store.session("s").delete()
        store.session("s").undo()
        saved(store, "s", "new", later)
        known = [c.id for c in store.session("s").tree()]
    lose(path, "s", "rename")
    with opened(path) as store:
        assert not store.verify().ok
        if repaired:
            assert [done.session for done in store.repair().sessions] == ["s"]
        elif later:
            assert [info.name for info in store.sessions()] == ["s"]
            assert store.session("s").load()["who"] == "new"
        assert store.gc().checkpoints == 0
        if repaired:
            assert store.verify(read_data=True).ok
    with opened(path) as store:
        if repaired:
            assert [c.id for c in store.session("s").tree()] == known
            store.session("s").append("log", TEXT)
            store.session("s").delete()
            assert store.gc().sessions == 1
            assert not store.session("s").exists()


@pytest.mark.parametrize("repaired", [False, True])
def test_a_checkpoint_that_came_back_by_a_lost_line(path, repaired):
    with opened(path) as store:
        saved(store, "s", "us", 4)
        store.session("s").delete("step:2")
        store.session("s").undo()
        store.session("s").delete("step:3")
    lose(path, "s", "untombs")
    for again in range(2):
        with opened(path) as store:
            assert [c.seq for c in store.session("s").tree()] == [1, 2, 4]
            if repaired and not again:
                store.repair()
                assert store.verify(read_data=True).ok
                assert store.gc().checkpoints == 1  # the one that was deleted later
                assert store.session("s").load("step:2")["n"] == 1


def test_a_deletion_whose_loss_was_accepted_can_be_made_again(path):
    with opened(path) as store:
        saved(store, "s", "us", 4)
        store.session("s").delete("step:2")
        store.session("s").label("step:1", "first")
    lose(path, "s", "marks")
    with opened(path) as store:
        store.repair()
        assert [c.seq for c in store.session("s").tree()] == [1, 2, 3, 4]
        store.session("s").delete("step:2")
    with opened(path) as store:
        assert [c.seq for c in store.session("s").tree()] == [1, 3, 4]
        assert store.gc().checkpoints == 1


def test_a_name_that_somebody_else_has_is_not_taken_back(path):
    """The line by which a deleted session gave up its name is lost; another has it now."""
    with opened(path) as store:
        saved(store, "s", "old", 4)
        store.session("s").delete()
        saved(store, "s", "new", 2)
    lose(path, "s", "rename")
    for when in ("before", "after"):
        with opened(path) as store:
            assert store.session("s").load()["who"] == "new"
            assert [(info.name, info.checkpoints) for info in store.sessions()] == [("s", 2)]
            assert store.verify().ok == (when == "after")
            if when == "before":
                assert [done.rebuilt for done in store.repair().sessions] == [("log",)]
    with opened(path) as store:
        saved(store, "s", "newer", 1)
        assert store.verify(read_data=True).ok
        assert store.gc()[:2] == (4, 1)
        assert store.session("s").load()["who"] == "newer"


def test_a_journal_whose_beginning_was_freed_by_a_lost_line(path):
    with opened(path) as store:
        for n in range(10):
            with store.session("s").run() as run:
                run.step("step", int)
            store.session("s").save({"n": n})
        session = store.session("s")
        session.prune(holdfast.Retention(keep_last=2))
        assert store.gc().checkpoints
        session.save({"n": 10})
        calls = session.calls()
    lose(path, "s", "journal")
    with opened(path) as store:
        store.repair()
        assert store.session("s").calls() == calls != []
        assert store.verify(read_data=True).ok
        with holdfast.open("memory:") as other:
            assert store.copy(other).skipped == ()


def test_how_far_streams_go_is_known_again(path):
    """Else a copy that brings older items would cut off what a lost line told of."""
    with opened(path) as store:
        saved(store, "s", "us", 1)
        for _ in range(3):
            store.session("s").append("log", TEXT)
        ends = ledger_of(store, "s").ends
    lose(path, "s", "streams")
    with opened(path) as store:
        assert ledger_of(store, "s").ends != ends
        store.repair()
        assert ledger_of(store, "s").ends == ends
    with opened(path) as store:
        assert ledger_of(store, "s").ends == ends


def ledger_of(store: holdfast.Store, name: str) -> Any:
    reader: Any
    with store._repository.reader() as reader:
        return reader.view.ledger(lineage.find_session(reader, name))


# -- a log that is gone --------------------------------------------------------------------------


@pytest.mark.parametrize("empty", [False, True])
def test_a_log_that_is_lost_with_its_hint(path, empty):
    with opened(path) as store:
        saved(store, "s", "us")
        states = loaded(store.session("s"))
    folder = path / "sessions/s"
    (folder / "head").unlink()
    if empty:
        (folder / "log.jsonl").write_bytes(b"")
    else:
        (folder / "log.jsonl").unlink()
    with opened(path) as store:
        assert not store.verify().ok
        with pytest.raises(Corrupt):
            store.session("s").load()
        store.gc()
        assert [done.session for done in store.repair().sessions] == ["s"]
        assert loaded(store.session("s")) == states


@pytest.mark.parametrize("durability", ["full", "normal"])
def test_what_a_copy_left_without_a_line_is_no_session(path, durability, monkeypatch):
    with opened(path, durability=durability) as store, holdfast.open("memory:") as source:
        saved(source, "s", "us")
        with monkeypatch.context() as patch:
            patch.setattr("holdfast.storage.files.store_folder.StoreFolder.log", fails)
            with pytest.raises(OSError, match="no line"):
                source.copy(store)
    with opened(path) as store, holdfast.open("memory:") as source:
        assert store.verify().ok
        assert not store.session("s").exists()
        saved(source, "s", "us")
        source.copy(store)
        assert store.session("s").load()["n"] == 2


def fails(*_: Any) -> None:
    raise OSError("no line")


# -- folders that were brought -------------------------------------------------------------------


def test_two_sessions_of_one_name_are_not_told_apart(path, tmp_path):
    with opened(path) as store, opened(tmp_path / "other") as other:
        saved(store, "s", "ours")
        saved(other, "first", "theirs")
        saved(other, "s", "theirs")
    shutil.copytree(tmp_path / "other/sessions/s", path / "sessions/0-brought")
    with opened(path) as store:
        for use in (lambda s: s.load(), lambda s: s.save({}), lambda s: s.exists()):
            with pytest.raises(Corrupt, match=r"0-brought and in|and in .*0-brought"):
                use(store.session("s"))
        assert "0-brought" in str(store.verify())
    shutil.rmtree(path / "sessions/0-brought")
    with opened(path) as store:
        assert store.session("s").load()["who"] == "ours"


def test_two_folders_of_one_number_and_neither_in_its_place(path):
    with opened(path) as store:
        saved(store, "s", "us")
    shutil.move(path / "sessions/s", path / "sessions/moved")
    with opened(path) as store:
        assert store.session("s").load()["n"] == 2
    shutil.copytree(path / "sessions/moved", path / "sessions/a-copy")
    with opened(path) as store, pytest.raises(Corrupt, match=r"a-copy and in .*moved"):
        store.session("s").load()
    shutil.copytree(path / "sessions/moved", path / "sessions/s")
    with opened(path) as store:  # the others are copies
        assert store.session("s").load()["n"] == 2


@pytest.mark.parametrize("odd", ["a link to itself", "a folder as session.json", "as log.jsonl"])
def test_one_odd_entry_hides_no_session(path, odd):
    with opened(path) as store:
        saved(store, "s", "us")
    other = path / "sessions/other"
    if "link" in odd:
        other.symlink_to(other)
    else:
        (other / odd.split()[-1]).mkdir(parents=True)
    (path / "sessions/s/streams/500.jsonl").mkdir()
    with opened(path) as store:
        assert store.session("s").load()["n"] == 2
        assert [info.name for info in store.sessions()] == ["s"]
        saved(store, "new", "us")
        if "link" in odd:
            with pytest.raises(Corrupt, match="sessions/other is a link"):
                store.gc()
            other.unlink()
        store.gc()
        assert store.verify(read_data=True).ok


def test_a_fork_whose_identity_was_lost_still_has_its_origin(path):
    """The identity is written anew from the log, and is what is left if the log is damaged too."""
    with opened(path) as store:
        saved(store, "s", "us")
        fork = store.session("s").fork("fork")
        fork.save({"n": 3})
        known = loaded(fork)
    (path / "sessions" / "fork" / "session.json").unlink()
    with opened(path) as store:
        store.session("fork").delete()
        store.session("fork").undo()
        assert store.verify().ok
    lose(path, "fork", "origin")
    with opened(path) as store:
        assert loaded(store.session("fork")) == known
        assert store.session("s").forks() == {3: ["fork"]}
