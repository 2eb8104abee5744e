"""Damage is reported, and everything beside it can be used."""

from __future__ import annotations

import itertools
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.errors import Corrupt
from holdfast.format import records, values
from holdfast.history.watch import Watcher
from holdfast.model import Usage
from holdfast.storage.reader import open_reader
from tests.support import memory_rows
from tests.support.damage import DAMAGES, NEIGHBOURS, damage_one_of_four_sessions, spoil_operation
from tests.support.sessions import KEEP_LAST, found_seqs, logged_warnings, seqs
from tests.support.stores import Home


@pytest.mark.parametrize("body", [b"torn", b"", None], ids=["torn", "empty", "missing"])
def test_the_parent_of_a_damaged_checkpoint_loads(home, body):
    home.filled(4)
    home.spoil_checkpoint(4, body)
    session = home.reopened().session("s")
    with pytest.raises(Corrupt):
        session.load()
    with pytest.raises(Corrupt):
        session.save({"i": "never on something unread"})
    assert session.load("@~1")["i"] == 2
    assert [c.seq for c in session.history() if not c.damaged] == [3, 2, 1]
    session.rewind("@~1")
    assert session.save({"i": "goes on"}).step == 4
    assert home.reopened().session("s").load() == {"i": "goes on"}


def test_the_parent_of_a_checkpoint_with_damaged_data_loads(home):
    home.filled(4)
    home.spoil_newest_item()
    session = home.reopened().session("s")
    with pytest.raises(Corrupt, match="item"):
        session.load()
    assert session.load("@~3")["i"] == 0
    report = session.verify()
    assert 0 < report.loadable < report.checkpoints == 4


@pytest.mark.parametrize("body", [b"torn", None], ids=["torn", "missing"])
def test_damaged_checkpoints_stay_listed(home, body):
    home.filled(5, tags=["kept"])
    home.spoil_checkpoint(2, body)
    session = home.reopened().session("s")
    assert seqs(session.tree()) == [1, 2, 3, 4, 5]
    assert seqs(session.history()) == [5, 4, 3, 2, 1]
    assert [c.seq for c in session.tree() if c.damaged] == [2]
    assert [c.seq for c in session.history() if c.damaged] == [2]
    assert len(session) == 5
    problems = session.verify().problems
    assert any("2" in problem.what and not problem.loads for problem in problems)


def test_a_damaged_mark_hides_nothing(home):
    home.filled(4, label="label", tags=["tag"])
    home.spoil_marks(2)
    session = home.reopened().session("s")
    assert seqs(session.tree()) == [1, 2, 3, 4]
    assert seqs(session.history()) == [4, 3, 2, 1]
    assert session.load("@~2")["i"] == 1
    assert [c.label for c in session.history() if c.seq != 2] == ["label"] * 3
    assert session.get("tag:tag").seq == 4
    assert not session.verify().ok


@pytest.mark.parametrize("behind", [4, 20, 84])
def test_history_continues_past_a_damaged_record_on_another_page(home, behind):
    """Its child, on the page before, knows what comes next."""
    count = behind + 3
    for n in range(count):
        home.session("s").save({"i": n}, usage=Usage(tokens=1))
    home.spoil_checkpoint(count - behind)
    session = home.reopened().session("s")
    assert seqs(session.history()) == [*range(count, 0, -1)]
    assert session.usage().path.tokens == count - 1


def test_usage_of_a_session_with_a_damaged_head(home):
    for n in range(3):
        home.session("s").save({"i": n}, usage=Usage(tokens=1))
    home.spoil_checkpoint(3)
    assert home.reopened().session("s").usage().path.tokens == 2


@pytest.mark.parametrize("what", DAMAGES)
def test_other_sessions_are_unaffected_by_damage(home, what):
    for name in ("a", "t", "z"):
        home.filled(3, name)
    home.filled(3, "s", label="label")
    DAMAGES[what](home)
    store = home.reopened()
    listed = [info.name for info in store.sessions()]
    assert len(listed) == 4
    assert {"a", "t", "z"} < set(listed)
    for name in ("a", "t", "z"):
        session = store.session(name)
        assert session.load()["i"] == 2
        assert session.save({"i": 3}).step == 4
        assert session.verify().ok
    report = store.verify()
    assert not report.ok
    assert report.loadable >= 12


@pytest.mark.parametrize("what", [k for k in DAMAGES if k not in ("name", "record")])
def test_the_rest_of_a_damaged_session_loads(home, what):
    ids = [c.id for c in home.filled(3, label="label").tree()]
    DAMAGES[what](home)
    session = home.reopened().session("s")
    assert session.exists()
    assert seqs(session.tree()) == [1, 2, 3]
    assert session.load(ids[0])["i"] == 0
    assert session.load(ids[0][:20])["i"] == 0


@pytest.mark.parametrize("body", [b"", b"torn", None], ids=["empty", "torn", "missing"])
def test_checkpoints_load_without_their_head_row(home, body):
    """What the head said is gone, what the checkpoints hold is not, and nobody claims otherwise."""
    saved = list(home.filled(3).tree())
    home.spoil_head(body)
    session = home.reopened().session("s")
    with pytest.raises(Corrupt):
        session.load()
    with pytest.raises(Corrupt):
        session.save({"i": "never as a new beginning"})
    for n, checkpoint in enumerate(saved):
        assert session.load(checkpoint.id)["i"] == n
    assert list(session.tree()) == saved
    assert home.store.get(saved[0].id) == saved[0]
    assert not home.store.verify().ok


def test_a_missing_head_checkpoint_is_damage(home):
    """Damage reads as damage, never as "nothing there"."""
    home.filled(2)
    home.spoil_checkpoint(2, None)
    (info,) = home.reopened().sessions()
    assert info.damaged
    session = home.session()
    assert session.exists()
    assert len(session) == 2
    with pytest.raises(Corrupt):
        session.load()
    with pytest.raises(Corrupt):
        session.head  # noqa: B018
    assert session.load("@~1")["i"] == 0


@pytest.mark.parametrize("what", ["torn", "mark"])
def test_searches_list_or_log_damaged_checkpoints(home: Home, what: str) -> None:
    """Listed, or told of in the log; never just left out."""
    home.filled(4, tags=["t"], trigger="g")
    DAMAGES["record" if what == "torn" else "mark"](home)
    gone = 2 if what == "torn" else 3
    queries: list[dict[str, Any] | str] = [{}, {"tag": "t"}, {"trigger": "g"}, "quick"]
    for query in queries:
        with logged_warnings() as lines:
            if isinstance(query, str):
                hits = home.store.search(query)
                listed = [hit.checkpoint.seq for hit in hits if hit.checkpoint]
            else:
                listed = found_seqs(home, **query)
        assert set(listed) >= {1, 2, 3, 4} - {gone}
        assert gone in listed or any(f"checkpoint {gone}" in line for line in lines), query


@pytest.mark.parametrize("query", [{"status": "failed"}, {"tag": "t"}, {"agent": "x"}], ids=str)
def test_filtered_lists_include_or_log_damaged_sessions(home: Home, query: dict[str, Any]) -> None:
    for name in ("head", "row", "sound"):
        home.store.session(name, agent="x").save({}, status="failed", tags=["t"])
    home.spoil_checkpoint(1, name="head")
    home.spoil_session("row")
    with logged_warnings() as lines:
        listed = {info.name for info in home.store.sessions(**query)}
    assert "sound" in listed
    for name in ("head", "row"):
        assert name in listed or any(name in line for line in lines), name


def test_damaged_checkpoints_are_counted_and_kept(home: Home) -> None:
    session = home.filled(5)
    home.spoil_checkpoint(2)
    assert home.store.stats().checkpoints == 5
    plan = session.prune(KEEP_LAST)
    assert {v.checkpoint.seq: v.reason.split(":")[0] for v in plan.kept} == {
        2: "damaged",
        5: "the head",
    }
    assert [c.seq for c in session.tree() if c.damaged] == [2]


@pytest.mark.parametrize("what", DAMAGES)
def test_searches_find_the_neighbours_of_damage(home: Home, what: str) -> None:
    damage_one_of_four_sessions(home, what)
    home.reopened()
    listed = {(c.session, c.seq) for c in home.store.checkpoints()}
    found = {(h.session, h.checkpoint.seq) for h in home.store.search("quick") if h.checkpoint}
    assert {(n, q) for n in NEIGHBOURS for q in (1, 2, 3)} <= listed & found
    assert ("a", 3) in [(c.session, c.seq) for c in home.store.checkpoints(tag="x")]
    assert {s.name for s in home.store.stats().largest} >= set(NEIGHBOURS)


@pytest.mark.parametrize("what", ["operation", "name", "record", "head"])
def test_watching_reports_the_neighbours_of_damage(home: Home, what: str) -> None:
    """What landed elsewhere is told, and told once."""
    sessions = [home.filled(2, name) for name in ("a", "s", "z")]
    watcher = Watcher(home.store._repository.backend)
    if what == "name":
        home.spoil_name()
    saved = [session.save({"i": "new"}) for session in sessions]
    if what == "operation":
        sessions[1].tag("@", "x")
        spoil_operation(home, 1)
    elif what != "name":
        DAMAGES[what](home)
    told: list[Any] = []
    for _ in range(2):
        with suppress(Corrupt):
            told += watcher.poll()
    assert [e for e in told if e.session in ("a", "z")] == [saved[0], saved[2]]


def test_a_torn_operation_hides_no_other(home: Home) -> None:
    session = home.filled(3)
    for tag in "abcd":
        session.tag("@", tag)
    spoil_operation(home, 2)
    session = home.reopened().session("s")
    assert not home.store.verify().ok
    assert session.undo().details["undid"] == ["operation", 4]
    assert {op.number for op in session.operations()} >= {1, 3, 4, 5}
    session.save({"i": 3})
    session.undo()
    assert session.load()["i"] == 2


def test_undo_after_repair_of_a_torn_operation(home: Home) -> None:
    """Nobody knows what it did; repair() lets undo() begin anew."""
    session = home.filled(3)
    session.tag("@", "a")
    spoil_operation(home, 1)
    session = home.reopened().session("s")
    session.save({"i": 3})
    [damaged] = session.operations()
    assert (damaged.kind, damaged.details["damage"][:11]) == ("damaged", "operation 1")
    assert damaged.summary
    assert damaged.way_back
    for call in (session.undo, session.redo):
        with pytest.raises(Corrupt, match="operation 1"):
            call()
    [done] = home.store.repair().sessions
    assert (done.moved, done.rebuilt, done.lost) == (None, ("undo",), ())
    assert home.store.repair().sessions == ()
    session.refresh()
    session.save({"i": 4})
    session.undo()
    assert session.load()["i"] == 3
    assert session.undo().details["what"] == "repair"
    assert session.load()["i"] == 3
    with pytest.raises(Corrupt, match="operation 1"):
        session.undo()


def test_a_history_that_runs_in_a_circle_ends() -> None:
    """Records made by someone who can seal: each names the other as its parent."""
    with holdfast.open("memory:") as store:
        session = store.session("s")
        for n in range(3):
            session.save({"n": n})
        backend = store._repository.backend
        with open_reader(backend) as reader:
            _, second, third = [
                records.unseal_checkpoint(1, *row) for row in reader.checkpoints(1, 1, 9, 9)
            ]
        fields = values.decode(second.meta)
        fields[3:5] = [3, third.record.id]
        r = second.record
        body = records.seal_checkpoint(
            1, 2, r.id, values.encode(fields), r.hash, second.line, r.size, r.added, second.root, 3
        )
        memory_rows.damage(backend, "checkpoints", body, records.position(1, 2))
        history = list(itertools.islice(session.history(), 100))
        assert [c.seq for c in history[:2]] == [3, 2]
        assert len(history) <= 4
        assert history[-1].damaged
        assert not store.verify().ok


def test_a_session_with_a_damaged_name_is_not_a_new_one(tmp_path: Path) -> None:
    """Wherever a bit of its name is flipped, in the table or in the index."""
    path = tmp_path / "store.db"
    name = "a name that is found nowhere else"
    with holdfast.open(path) as store:
        store.session(name).save({"n": 1})
    sound = path.read_bytes()
    places = [m.start() for m in re.finditer(name.encode(), sound)]
    assert len(places) >= 2, "in the table and in its index"
    for place in places:
        damaged = bytearray(sound)
        damaged[place + 5] ^= 4
        path.write_bytes(damaged)
        with holdfast.open(path) as store:
            try:
                loaded = store.session(name).load()
            except holdfast.Corrupt:
                continue
            assert loaded == {"n": 1}
