"""verify tells what loads: no more, and no less."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest

import holdfast
from holdfast.errors import Corrupt, HoldfastError
from holdfast.format import records
from holdfast.format.nodes import chain
from holdfast.format.records import COPIED, FREED, SPACES, seal_counter, unseal_counter
from holdfast.maintenance import repair, verify
from holdfast.storage import changes
from holdfast.storage.changes import Sweep
from holdfast.storage.files.backend import FilesBackend
from holdfast.storage.reader import Reader
from holdfast.storage.rows import GraftWrite
from tests.support import postgres
from tests.support.stores import TEXT, Home


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


def check(home: Home, checkpoints: list[holdfast.Checkpoint]) -> holdfast.VerifyResult:
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
    named = [p for p in report.problems if "do not add up" not in p.what]
    assert {p.checkpoint for p in named} == {checkpoints[1].id}
    assert all("(its state still loads)" in str(p) for p in named)


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


@pytest.mark.parametrize("body", [b"torn", None], ids=["damaged", "missing"])
def test_one_checkpoint_is_sound_although_its_parent_is_damaged(
    home: Home, body: bytes | None
) -> None:
    home.filled(3).fork("fork")
    home.spoil_checkpoint(2, body)
    home.spoil_checkpoint(3, body)
    session = home.reopened().session("s")
    fork = home.session("fork")
    assert fork.verify("@") == holdfast.VerifyResult((), 1, 1, 1)
    home.store.session("fork").append("log", "more")
    assert fork.verify("@").ok
    assert not home.store.verify().ok
    assert not session.verify("@~1").ok
    whole = home.store.verify(sessions=["fork"])
    assert [p.what for p in whole.problems if "its parent cannot be read" in p.what]


def test_one_checkpoint_of_a_session_whose_row_is_damaged(home: Home) -> None:
    """Damage of the session is no damage of a checkpoint that loads."""
    home.filled(3)
    home.spoil_session()
    session = home.reopened().session("s")
    assert not session.verify().ok
    assert session.load("@~1")["i"] == 1
    assert session.verify("@~1").ok


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
    check = verify.DataCheck.check

    def measured(self: verify.DataCheck, node: Any) -> None:
        check(self, node)
        held.append(sum(map(len, self._chains.values())))

    monkeypatch.setattr(verify, "_KEPT", 3 * count, raising=False)
    monkeypatch.setattr(verify.DataCheck, "check", measured)
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

    monkeypatch.setattr(verify, "_KEPT", 1)
    monkeypatch.setattr(verify, "chain", counting)
    assert home.store.verify(read_data=True).ok
    return sum(hashed)


def test_what_grows_is_hashed_once(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """However little is kept: what the last state needed is."""
    assert hashed_of_what_grows(home, monkeypatch) <= 80


def test_what_grows_is_hashed_often_if_nothing_is_kept(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify.DataCheck, "_forget", lambda self: self._chains.clear())
    assert hashed_of_what_grows(home, monkeypatch) > 800


# -- counters --------------------------------------------------------------------------------------


@pytest.fixture(name="tables", params=["sqlite", "postgres"])
def _tables(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Home]:
    """A store whose rows can be changed by SQL."""
    home = Home(request.param, tmp_path)
    yield home
    home.give_back()


def counter(home: Home, space: str) -> bytes:
    select = "SELECT body FROM counters WHERE space = "
    if home.kind == "postgres":
        with postgres.admin(search=home.schema) as link:
            [(body,)] = link.execute(select.encode() + b"%s", (space,)).fetchall()
    else:
        connection = apsw.Connection(str(home.path))
        [(body,)] = connection.execute(select + "?", (space,)).fetchall()
        connection.close()
    return bytes(body)


def spoiled(space: str, body: bytes) -> Iterator[bytes]:
    """One flipped bit of digest, flags and number; and a counter that is set back."""
    for n in (0, 8, len(body) - 1):
        yield body[:n] + bytes([body[n] ^ 1 << n % 8]) + body[n + 1 :]
    if space in SPACES:
        yield seal_counter(space, 1)


@pytest.mark.parametrize("space", [*SPACES, FREED, COPIED])
def test_a_damaged_counter_is_told_of_and_made_anew(tables: Home, space: str) -> None:
    filled(tables)
    tables.session("other").delete()
    tables.store.gc()
    with holdfast.open("memory:") as source:
        source.session("copied").save({"n": 1})
        source.copy(tables.store)
    assert tables.store.verify().ok
    states = {
        (c.session, c.id): tables.session(c.session).load(c.id) for c in tables.store.checkpoints()
    }
    for n, body in enumerate(spoiled(space, counter(tables, space))):
        tables._sql("UPDATE counters SET body = ? WHERE space = ?", body, space)
        with tables._open_as(**tables.options) as store:
            [problem] = store.verify(read_data=True).problems
            assert f"the counter of {space}s" in str(problem)
            assert problem == store.verify().problems[0]
            done = store.repair()
            assert (done.ok, done.sessions, done.rebuilt) == (True, (), ("counters",))
            assert store.repair().rebuilt == ()
            store.session(f"new {n}").append("log", TEXT * 9)
            store.session("origin").fork(f"fork {n}").append("log", TEXT * 9)
            store.session("origin").append("log", TEXT * 9)
            store.session(f"new {n}").delete()
            store.gc()
            assert store.verify(read_data=True).ok
            for (session, id), state in states.items():
                assert store.session(session).load(id) == state


@pytest.mark.parametrize("space", SPACES)
def test_a_counter_that_is_missing_is_made_anew(tables: Home, space: str) -> None:
    filled(tables)
    tables._sql("DELETE FROM counters WHERE space = ?", space)
    with tables._open_as(**tables.options) as store:
        assert f"the counter of {space}s is missing" in str(store.verify())
        assert store.repair().rebuilt == ("counters",)
        store.session("new").append("log", TEXT * 9)
        assert store.verify(read_data=True).ok


def test_a_new_counter_is_above_every_number_that_something_names(tables: Home) -> None:
    """Lines of checkpoints that gc has freed, streams inside of items, and orders of deletions."""
    session = tables.session("s")
    state: dict[str, Any] = {
        "log": [{"inner": [TEXT] * 40, "n": n} for n in range(4)],
        "outer": [TEXT] * 40,
    }
    session.save(state)
    for n in range(3):
        session.append("outer", f"{TEXT} {n}")
        session.rewind("@~1")
        state["log"][1]["inner"].append(f"{TEXT} {n}")
        session.save(state)
    for _ in range(3):
        tables.session("gone").save({"n": 1})
        tables.session("gone").delete()
    with tables.store._repository.reader() as reader:
        used = repair._used(reader)
    assert used["stream"] == tables.store._repository.new_stream() - 1
    assert used["session"] == unseal_counter("session", counter(tables, "session")) - 1


# -- rows that somebody has removed ----------------------------------------------------------------

# How a table is told to lose rows, and whether repair makes the store sound again.
REMOVED = {
    "a label": ("DELETE FROM marks WHERE kind = 0", True),
    "a tag": ("DELETE FROM marks WHERE kind = 1", True),
    "the first operation": ("DELETE FROM operations WHERE pos = {low} + 1", True),
    "the newest operation": ("DELETE FROM operations WHERE pos = {low} + 3", True),
    "a deletion": ("DELETE FROM tombs", True),
    "a lease": ("DELETE FROM leases", False),
    "the first entry of the journal": ("DELETE FROM journal WHERE pos = {low} + 1", True),
    "an entry of the journal": ("DELETE FROM journal WHERE pos = {low} + 3", True),
    "the newest entry of the journal": ("DELETE FROM journal WHERE pos = {low} + 5", True),
    "the journal": ("DELETE FROM journal", True),
    "the list of freed checkpoints": ("DELETE FROM gaps WHERE pos = {low}", True),
    "what was above a checkpoint": ("DELETE FROM gaps WHERE pos > {low}", False),
    "tallies": ("DELETE FROM tallies", True),
    "spans": ("DELETE FROM spans", True),
}


def with_every_kind_of_row(home: Home) -> holdfast.Session:
    session = home.filled(5, "s", label="l", tags=["t"])
    session.delete("@~3")
    home.store.gc()
    session.delete("@~2")
    session.tag("@", "another")
    with pytest.raises(KeyboardInterrupt), session.run() as run:
        run.step("model", lambda: 1)
        run.step("another", lambda: 2)
        run.tool({"id": "1", "name": "pay", "input": {}}, _interrupted)
    return session


def _interrupted() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("what", REMOVED)
def test_rows_that_somebody_has_removed_are_missed(tables: Home, what: str) -> None:
    session = with_every_kind_of_row(tables)
    assert tables.store.verify(read_data=True).ok
    sql, is_repaired = REMOVED[what]
    tables._sql(sql.format(low=tables._number("s") << 32))
    store = tables.reopened()
    session = store.session("s")
    assert not store.verify().ok
    if "journal" in what or what == "spans":
        for use in (session.pending, session.run().__enter__):
            with pytest.raises(Corrupt, match="is missing"):
                use()
    if what in ("a lease", "tallies"):
        with pytest.raises(Corrupt, match="is missing, or is an old one"):
            session.run().__enter__()
    result = store.repair()
    assert result.ok is is_repaired
    if is_repaired:
        [done] = result.sessions
        assert done.forgotten or done.lost
        assert store.repair().sessions == ()
        session.undo()
        session.redo()
        assert store.gc() is not None
        assert store.verify(read_data=True).ok


@pytest.mark.parametrize("home", ["files"], indirect=True)
def test_lines_that_somebody_has_removed_are_missed(home: Home) -> None:
    with_every_kind_of_row(home)
    assert home.store.verify(read_data=True).ok
    backend = home.store._repository.backend
    assert isinstance(backend, FilesBackend)
    logs = [path for n in ("log", "journal") for path in backend.path.rglob(f"{n}.jsonl")]
    assert len(logs) == 2
    for path in logs:
        lines = path.read_bytes().splitlines(keepends=True)
        for n in range(len(lines)):
            path.write_bytes(b"".join(lines[:n] + lines[n + 1 :]))
            assert not home.reopened().verify().ok, (path.name, n)
        path.write_bytes(b"".join(lines))
    assert home.reopened().verify().ok


def test_a_run_whose_journal_has_lost_entries_is_not_resumed(tables: Home) -> None:
    session = with_every_kind_of_row(tables)
    tables._sql("DELETE FROM journal WHERE pos = ?", tables._number("s") << 32 | 5)
    store = tables.reopened()
    assert "entries of the journal, 1 in all" in str(store.repair().sessions)
    session = store.session("s")
    assert session.pending() == []
    with pytest.raises(Corrupt, match="entry 5 of the journal is lost") as told:
        session.run().__enter__()
    assert "run(resume=False)" in str(told.value)
    with session.run(resume=False) as run:
        assert run.step("model", lambda: 3) == 3
    with session.run() as run:  # the newest run is whole
        assert run.step("model", lambda: 4) == 4
    assert store.verify(read_data=True).ok


def test_a_run_ends_when_its_journal_has_lost_its_count(tables: Home) -> None:
    with pytest.raises(Corrupt, match="some are missing"), tables.session("s").run() as run:
        run.step("model", lambda: 1)
        tables._sql("DELETE FROM spans")
        run.step("model", lambda: 1)


def test_a_lost_lease_can_be_given_up(tables: Home) -> None:
    with_every_kind_of_row(tables)
    tables._sql("DELETE FROM leases")
    store = tables.reopened()
    assert [(p.key, p.state) for p in store.pending()] == [("1", "in doubt")]
    with store.session("s").run(resume=False) as run:
        run.step("model", lambda: 3)
    assert store.verify(read_data=True).ok


def test_a_freed_head_is_reported(home: Home) -> None:
    home.filled(3)
    number = home._number("s")
    with home.store._repository.reader() as reader:
        row = reader.head(number)
        sweep = Sweep(number, row or b"", [], [], [], [3])
        sweep.grafts = [GraftWrite(number, 0, None, records.seal_freed(number, [(3, 4)]))]
    assert changes.sweep(home.store._repository.backend, [sweep]) == [True]
    assert not home.store.verify().ok
