"""verify tells what loads: no more, and no less."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

import holdfast
from holdfast import datacheck, verify
from holdfast.backends.base import Reader
from holdfast.codec.nodes import chain
from holdfast.errors import Corrupt, HoldfastError
from tests.home import TEXT, Home


def filled(home: Home) -> list[holdfast.Checkpoint]:
    """Checkpoints of three sessions, one of them a fork."""
    session = home.filled(3, "origin", label="l", tags=["t"])
    session.save({"big": TEXT * 60, "log": [TEXT] * 30}, key="k")
    session.rewind("@~1")
    fork = session.fork("fork")
    fork.append("log", "more")
    home.filled(2, "other")
    return [c for name in ("origin", "fork", "other") for c in home.session(name).tree()]


def loads(store: holdfast.Store, checkpoint: holdfast.Checkpoint) -> bool:
    try:
        store.session(checkpoint.session).load(checkpoint.id)
    except HoldfastError:
        return False
    return True


def check(home: Home, checkpoints: list[holdfast.Checkpoint]) -> holdfast.Report:
    """The report on a damaged store, compared with what loads."""
    store = home.reopened()
    sound = {c.id for c in checkpoints if loads(store, c)}
    report = store.verify(read_data=True)
    assert not report.ok
    assert report.loadable == len(sound)
    assert report.checkpoints == len(checkpoints)
    assert all(p.loads == (p.checkpoint in sound) for p in report.problems if p.checkpoint)
    return report


DAMAGE: dict[str, tuple[Callable[[Home], None], int]] = {
    # what is damaged, and how many of the eight checkpoints still load
    "a record": (lambda home: home.spoil_checkpoint(2, name="origin"), 7),
    "no record": (lambda home: home.spoil_checkpoint(2, None, name="origin"), 7),
    "the head's record": (lambda home: home.spoil_checkpoint(3, name="origin"), 7),
    "a fork's first record": (lambda home: home.spoil_checkpoint(1, name="fork"), 7),
    "a head's row": (lambda home: home.spoil_head(name="origin"), 8),
    "a session's row": (lambda home: home.spoil_session("origin"), 8),
    "marks": (lambda home: home.spoil_marks(2, "origin"), 8),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_it_tells_what_loads(home: Home, kind: str) -> None:
    checkpoints = filled(home)
    damage, sound = DAMAGE[kind]
    damage(home)
    assert check(home, checkpoints).loadable == sound


def names(tree: str) -> Callable[[Home], None]:
    return lambda home: home.overwrite(tree, b"origin", b"nrigin")


def statement(sql: str) -> Callable[[Home], None]:
    return lambda home: home._sql(sql)


IN_TABLES: dict[str, tuple[Callable[[Home], None], int]] = {
    "a name": (names("sessions"), 4),
    "an index of names": (names("sqlite_autoindex_sessions_1"), 4),
    "a session's row": (statement("DELETE FROM sessions WHERE num = 1"), 4),
    "names": (statement("DELETE FROM names WHERE num = 1"), 4),
    "keys": (statement("DELETE FROM keys"), 8),
    "searches": (statement("DELETE FROM facets"), 8),
}


@pytest.mark.parametrize("kind", IN_TABLES)
def test_it_tells_what_loads_from_a_file(sqlite: Home, kind: str) -> None:
    checkpoints = filled(sqlite)
    damage, sound = IN_TABLES[kind]
    damage(sqlite)
    assert check(sqlite, checkpoints).loadable == sound


def test_a_damaged_mark_names_its_checkpoint(home: Home) -> None:
    checkpoints = filled(home)
    home.spoil_marks(2, "origin")
    report = home.reopened().verify()
    assert {p.checkpoint for p in report.problems} == {checkpoints[1].id}
    assert all("(its state still loads)" in str(p) for p in report.problems)


def test_a_session_that_cannot_be_listed_hides_no_other(sqlite: Home) -> None:
    """The index of names leads to a number that no row has, and so ends the list of sessions."""
    checkpoints = filled(sqlite)
    row = bytes([5, 0, 12 + 2 * len("origin"), 0])  # how the row begins, behind its number
    sqlite.overwrite("sessions", b"\1" + row, b"\x41" + row)
    with pytest.raises(Corrupt):
        list(sqlite.store.sessions())
    report = check(sqlite, checkpoints)
    assert (report.sessions, report.loadable) == (3, 4)


# -- what is damaged does not hide what is not -----------------------------------------------------


def test_a_damaged_name_does_not_break_forks(sqlite: Home) -> None:
    origin = [c.id for c in sqlite.filled(4, "origin", label="l").history()]
    sqlite.session("origin").fork("fork").append("log", "more")
    sqlite.overwrite("sessions", b"origin", b"nrigin")
    fork = sqlite.session("fork")
    history = list(fork.history())
    assert [c.id for c in history[2:]] == origin
    assert [bool(c.damaged) for c in history] == [False, False, True, True, True, True]
    assert fork.load("@~5")["i"] == 0
    assert fork.blame("i").id == origin[0]


def test_a_line_goes_on_behind_a_forks_first_record(home: Home) -> None:
    origin = [c.id for c in home.filled(4, "origin", label="l").history()]
    home.session("origin").fork("fork").append("log", "more")
    home.spoil_checkpoint(1, name="fork")
    fork = home.reopened().session("fork")
    assert [c.id for c in fork.history()][2:] == origin
    assert fork.load("@~2")["i"] == 3
    assert fork.load("label:l")["i"] == 3
    assert fork.load("step:1")["i"] == 0
    home.spoil_session("fork")
    fork = home.reopened().session("fork")
    for revision in ("@~2", "step:1"):
        with pytest.raises(Corrupt):
            fork.load(revision)


@pytest.mark.parametrize("spoil", ["spoil_head", "spoil_session"])
def test_sessions_tell_what_is_known(home: Home, spoil: str) -> None:
    home.filled(4)
    getattr(home, spoil)()
    [info] = home.reopened().sessions()
    assert info.damaged
    assert info.checkpoints == 4
    assert (info.head is None) == (spoil == "spoil_head")


def test_one_checkpoint(home: Home) -> None:
    session = home.filled(4, label="l")
    report = session.verify("@~1")
    assert (report.ok, report.sessions, report.checkpoints, report.loadable) == (True, 1, 1, 1)
    home.spoil_checkpoint(2)
    home.spoil_marks(3)
    session = home.reopened().session("s")
    assert [session.verify(f"@~{n}").ok for n in range(4)] == [True, False, False, True]
    assert [session.verify(f"@~{n}").loadable for n in range(4)] == [1, 1, 0, 1]
    told = session.verify("@~1").problems
    assert {p.checkpoint for p in told} == {c.id for c in session.tree() if c.seq == 3}
    with pytest.raises(holdfast.CheckpointNotFound):
        session.verify("@~9")


def test_one_checkpoint_with_its_data(home: Home) -> None:
    session = home.session()
    session.save({"log": [f"{n} {TEXT}" for n in range(9)]})
    session.save({"n": 1})
    home.spoil_newest_item()
    session = home.reopened().session("s")
    assert session.verify("@~1", read_data=False).ok
    assert not session.verify("@~1").loadable
    assert session.verify("@").ok


def test_sessions_that_are_forked_meanwhile(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come from checkpoints that nobody saw who looked before."""
    other, structure = home.another(), verify._structure
    home.filled(3)

    def late(reader: Reader) -> Iterable[str]:
        yield from structure(reader)
        assert len(reader.sessions(None, 9)) == 1
        session = other.session("s")
        session.append("log", TEXT)
        session.fork("fork").fork("another").append("log", TEXT)

    monkeypatch.setattr(verify, "_structure", late)
    report = home.store.verify(read_data=True)
    assert report.ok, str(report)
    monkeypatch.undo()
    assert home.store.verify(read_data=True).sessions == 3


def test_memory_does_not_grow_with_the_edits_of_a_list(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each edit gives all that come behind it other hashes, which are not kept for ever."""
    session, count = home.session(), 60
    log = [f"{n} " + "text " * 60 for n in range(count)]
    for n in range(20):
        log[3] = f"edit {n} " + "text " * 60
        session.save({"log": log})
    held: list[int] = []
    check = datacheck.DataCheck.check

    def measured(self: datacheck.DataCheck, node: Any) -> None:
        check(self, node)
        held.append(sum(map(len, self._chains.values())))

    monkeypatch.setattr(datacheck, "_KEPT", 3 * count, raising=False)
    monkeypatch.setattr(datacheck.DataCheck, "check", measured)
    assert home.store.verify(read_data=True).ok
    assert len(held) >= 20
    assert max(held) <= 4 * count


def hashed_of_what_grows(home: Home, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many items verify hashes of a list that grew to 80, if it keeps as little as it can."""
    session = home.session()
    for n in range(80):
        session.append("log", f"{n} " + "text " * 60)
    hashed: list[int] = []

    def counting(last: Any, hashes: Any) -> bytes:
        hashed.append(len(hashes))
        return chain(last, hashes)

    monkeypatch.setattr(datacheck, "_KEPT", 1)
    monkeypatch.setattr(datacheck, "chain", counting)
    assert home.store.verify(read_data=True).ok
    return sum(hashed)


def test_what_grows_is_hashed_once(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """However little is kept: what the last state needed is."""
    assert hashed_of_what_grows(home, monkeypatch) <= 80


def test_what_grows_is_hashed_often_if_nothing_is_kept(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datacheck.DataCheck, "_forget", lambda self: self._chains.clear())
    assert hashed_of_what_grows(home, monkeypatch) > 800
