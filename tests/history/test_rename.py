"""A session gets another name: it stays the same session, for every handle, fork and child."""

from __future__ import annotations

import pytest

import holdfast
from holdfast import Usage
from holdfast.errors import HeadMoved, InvalidRequest, SessionBusy, SessionExists, SessionNotFound
from tests.support.sessions import seqs
from tests.support.stores import Home


def test_a_session_with_a_new_name_is_the_same(home: Home) -> None:
    session = home.filled(3, tags=["t"])
    before = [(c.id, c.hash) for c in session.history()]
    done = session.rename("new \ud800")
    assert (done.kind, session.name) == ("rename", "new \ud800")
    session.append("log", "more")
    for _ in range(2):
        session = home.session("new \ud800")
        assert [(c.id, c.hash) for c in session.history()][1:] == before
        assert session.load()["log"][-1] == "more"
        assert {c.session for c in home.store.checkpoints(tag="t")} == {"new \ud800"}
        assert [info.name for info in home.store.sessions()] == ["new \ud800"]
        assert not home.session("s").exists()
        assert home.store.verify(read_data=True).ok
        home.reopened()
    session = home.session("new \ud800")
    session.append("log", "after a restart")
    session.save({"i": "whole"})
    assert home.store.verify(read_data=True).ok


def test_the_old_name_is_free(home: Home) -> None:
    session = home.filled(2)
    session.rename("first")
    second = home.filled(3)
    assert (len(session), len(second)) == (2, 3)
    with pytest.raises(SessionExists):
        session.rename("s")
    second.rename("second")
    session.rename("s")
    home.reopened()
    assert {info.name: info.checkpoints for info in home.store.sessions()} == {"s": 2, "second": 3}
    home.session("s").save({"n": 1})
    home.session("second").save({"n": 2})
    assert home.store.verify(read_data=True).ok
    home.session("s").delete()
    home.store.gc()
    assert home.session("second").load() == {"n": 2}
    assert home.store.verify(read_data=True).ok


def test_names_that_are_refused(home: Home) -> None:
    session = home.filled(1)
    home.filled(1, "taken")
    for name in ("taken", "s"):
        with pytest.raises(SessionExists):
            session.rename(name)
    for wrong in ("", None, b"b"):
        with pytest.raises(InvalidRequest):
            session.rename(wrong)  # type: ignore[arg-type]
    with pytest.raises(SessionNotFound):
        home.session("none").rename("x")
    assert [info.name for info in home.store.sessions()] == ["s", "taken"]
    assert session.name == "s"


def test_undo_gives_the_old_name_back(home: Home) -> None:
    session = home.filled(2)
    session.rename("new")
    assert home.another().session("new").undo().details["what"] == "rename"
    assert (session.load()["i"], session.name) == (1, "s")
    assert session.redo().details["what"] == "rename"
    assert (session.name, home.session("new").load()["i"]) == ("new", 1)
    session.save({"i": 2})
    session.undo()
    other = home.filled(1)
    with pytest.raises(SessionExists):
        session.undo()
    other.rename("other")
    session.undo()
    home.reopened()
    assert [info.name for info in home.store.sessions()] == ["other", "s"]
    home.session("s").save({"i": 3})
    assert home.store.verify(read_data=True).ok


def test_a_deleted_session_comes_back_under_its_last_name(home: Home) -> None:
    session = home.filled(2)
    session.rename("new")
    late = home.session("new")
    session.delete()
    assert (late.exists(), late.head, late.name) == (False, None, "new")
    assert [info.name for info in home.store.deleted()] == ["new"]
    revived = home.reopened().session("new")
    revived.undo()
    revived.save({"i": 2})  # through the handle that has never read the session's row
    assert home.store.verify(read_data=True).ok
    home.session("new").delete()
    home.store.gc()
    assert [*home.store.sessions()] == []
    home.filled(2)
    home.filled(2, "new")
    assert home.store.verify(read_data=True).ok


def test_other_handles_follow(home: Home) -> None:
    session = home.filled(2)
    handles = [home.another().session("s") for _ in range(9)]
    session.rename("new")
    appends, loads, lists, trees, undoes, tags, heads, finds, refreshes = handles
    assert loads.load()["i"] == 1
    assert seqs(lists.history()) == [2, 1]
    assert seqs(trees.tree()) == [1, 2]
    assert tags.tag("@", "t").session == "new"
    assert heads.head is not None
    assert len(heads) == 2
    assert seqs(finds.checkpoints(tag="t")) == [2]
    assert refreshes.refresh() == session.get()
    assert undoes.next_undo().kind == "tag"
    appends.append("log", "more")
    assert {handle.name for handle in handles} == {"new"}
    with pytest.raises(HeadMoved):
        refreshes.append("log", "late")
    assert not home.session("s").exists()
    assert home.store.verify(read_data=True).ok


def test_forks_and_children_belong_to_it_still(home: Home) -> None:
    session = home.filled(2)
    fork = session.fork("fork")
    child = home.store.session("child", parent=session)
    child.save({}, usage=Usage(100, 10))
    session.rename("new")
    assert session.forks() == {2: ["fork"]}
    for checkpoint in (fork.get(), *fork.history(), *fork.tree()):
        assert checkpoint.parent_session in ("new", None)
    assert fork.load() == session.load()
    home.store.session("child-2", parent=session).save({}, usage=Usage(1, 1))
    child.save({"more": 1}, usage=Usage(2, 2))
    assert session.usage().children == Usage(103, 13)
    home.filled(1)  # another session has the old name now
    assert session.usage().children == Usage(1, 1)
    fork.rename("fork-2")
    assert session.forks() == {2: ["fork-2"]}
    assert home.store.verify(read_data=True).ok


def test_an_interrupted_run_is_resumed_under_the_new_name(home: Home) -> None:
    class Crash(BaseException):
        pass

    made = []

    def body(run: holdfast.Run) -> None:
        for _ in run.turns(limit=2):
            run.state["n"] = run.step("one", lambda: made.append(1))
            if not run.resumed:
                raise Crash

    session = home.session()
    with pytest.raises(Crash), session.run(state={}) as run:
        with pytest.raises(SessionBusy):
            home.session().rename("new")
        body(run)
    session.rename("new")
    with home.session("new").run(resume=True) as run:
        body(run)
    assert len(made) == 2
    assert home.store.verify(read_data=True).ok


def test_a_new_name_is_copied(here: Home, there: Home) -> None:
    session = here.filled(3)
    session.fork("fork")
    here.store.copy(there.store)
    session.rename("new")
    session.save({"i": 3})
    assert here.store.copy(there.store).skipped == ()
    assert [info.name for info in there.store.sessions()] == ["fork", "new"]
    copy = there.session("new")
    assert [c.hash for c in copy.history()] == [c.hash for c in session.history()]
    assert there.store.verify(read_data=True).ok
    copy.rename("theirs")
    assert [name for name, _ in here.store.copy(there.store).skipped] == ["new", "fork"]
    assert [info.name for info in there.store.sessions()] == ["fork", "theirs"]
    copy.undo()
    there.session("fork").delete()
    there.store.gc()
    assert there.store.verify(read_data=True).ok


def test_a_renamed_session_is_exported(here: Home, there: Home) -> None:
    session = here.filled(2)
    session.rename("new")
    for name in ("out.jsonl", "folder"):
        here.store.export(here.folder / name)
    there.store.import_exported(here.folder / "out.jsonl")
    assert there.session("new").load() == session.load()
    there.session("new").save({})
    assert there.store.verify(read_data=True).ok
    with holdfast.open(f"files:{here.folder / 'folder'}") as folder:
        assert folder.session("new").load() == session.load()
        assert folder.verify(read_data=True).ok


def test_repair_keeps_the_names(home: Home) -> None:
    home.filled(3).rename("new")
    home.spoil_checkpoint(3, name="new")
    home.reopened().repair()
    session = home.session("new")
    assert session.load()["i"] == 1
    session.save({"i": 9})
    loadable = home.store.verify(read_data=True)
    assert (loadable.checkpoints, loadable.loadable) == (4, 3)
    assert len(loadable.problems) == 1  # the spoiled record, and no hash
