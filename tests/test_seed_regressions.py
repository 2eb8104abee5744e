"""What five earlier systems got wrong (SEEDS.md), row by row: none of it may happen here.

Tests are called test_rowNN_…, here and in test_seed_living.py, which has the rows in living with
history, and test_seed_runs.py, which has those of runs. Of these rows all or a part is there alone:

| Row | What                                            | Where                                  |
|-----|-------------------------------------------------|----------------------------------------|
| 12  | writes in place without fsync                   | tests/faults (power loss, kill, I/O)   |
| 17  | a stored path is trusted                        | test_seed_living.py; test_importers.py |
| 22  | EveryN fires for every event, at 0, with n = 0  | test_seed_runs.py; test_seed_living.py |
| 25  | retention takes labelled ones, leaves no parent | test_seed_living.py                    |
| 30  | ttl, compress and intervals are never read      | test_seed_living.py; test_seed_runs.py |
| 32  | a failed clean-up fails a save                  | test_seed_living.py                    |
| 35  | no test kills the process and resumes           | test_seed_runs.py; tests/faults        |
"""

import dataclasses
import datetime as dt
import fnmatch
import inspect
import itertools
import math
import os
import re
import subprocess
import sys
import threading
import time
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import apsw
import pytest

import holdfast
from holdfast import datacheck, fields, ids, lineage, revisions, verify, writing
from holdfast import store as storing
from holdfast.backends import files_catalog, sqlite_file
from holdfast.backends.base import Change
from holdfast.backends.files_reader import FilesReader
from holdfast.backends.memory import MemoryBackend
from holdfast.codec import load as loading
from holdfast.codec import records, rows
from holdfast.codec.layout import lay_out
from holdfast.errors import (
    AmbiguousRevision,
    CheckpointNotFound,
    Corrupt,
    HeadMoved,
    HoldfastError,
    KeyTaken,
    NotFound,
    SessionExists,
    SessionNotFound,
    Unavailable,
    UnsupportedFormat,
)
from holdfast.model import ToolCall, Usage

from . import test_hostile_ids as hostile
from .faults.clock import wall_clock
from .home import TEXT, Home, fail, strangers

DAY = 86400.0


def seqs(checkpoints: Any) -> list[int]:
    return [checkpoint.seq for checkpoint in checkpoints]


# -- ids are only ever names (more in test_hostile_ids.py) ---------------------------------------


def test_row01_ids_are_no_paths(home, tmp_path):
    for name in ("../x", "../../x", str(tmp_path / "escaped"), "a/../../b"):
        home.session(name).save({"from": name})
        assert home.reopened().session(name).load() == {"from": name}
    assert strangers(home) == []


def test_row02_ids_are_no_globs(home):
    home.filled(1, "a_b")
    home.filled(1, "abc")
    for pattern in ("b", "*", "?", "a*", "a?b", "%", "a%", "_bc", "[a]_b"):
        assert not home.session(pattern).exists()
        with pytest.raises(SessionNotFound):
            home.session(pattern).load()
    for revision in ("*", "?", "%", "[0-9]*"):
        with pytest.raises(NotFound):
            home.session("abc").load(revision)


def test_row02_brackets_can_be_found_again(home):
    for name in ("[", "]", "[a", "[!a]", "{a,b}"):
        home.session(name).save({"name": name})
        assert home.reopened().session(name).load() == {"name": name}
        assert name in [info.name for info in home.store.sessions()]


def test_row03_prefix_list(home):
    home.filled(2, "sess1")
    home.filled(3, "sess1_2")
    assert [(i.name, i.checkpoints) for i in home.store.sessions()] == [
        ("sess1", 2),
        ("sess1_2", 3),
    ]
    assert {c.session for c in home.session("sess1").tree()} == {"sess1"}
    assert len(list(home.session("sess1").history())) == 2
    assert not home.session("sess").exists()


def test_row04_latest_in_an_id(home):
    names = ["latest", "s_latest", "latest.json", "s"]
    for name in names:
        home.filled(2, name)
    store = home.reopened()
    assert sorted(info.name for info in store.sessions()) == sorted(names)
    for name in names:
        assert seqs(store.session(name).tree()) == [1, 2]


def test_row05_the_same_state_twice(home):
    session = home.session()
    first, second = session.save({"i": 1}), session.save({"i": 1})
    assert first.id != second.id
    assert session.head == second
    assert second.parent == first.id
    assert seqs(session.tree()) == [1, 2]


def test_row05_the_same_id_twice(home):
    session = home.session()
    session.save({"i": 1}, key="external")
    with pytest.raises(KeyTaken):
        session.save({"i": 2}, key="external")
    assert len(session) == 1
    assert home.reopened().session("s").load("key:external") == {"i": 1}
    session = home.session()
    session.save({"i": 3}, key="other")
    assert session.load("key:external") == {"i": 1}
    assert session.load("key:other") == session.load() == {"i": 3}


# -- order ---------------------------------------------------------------------------------------


def test_row06_fast_saves(home):
    """Ten saves within one tick of a clock that only knows seconds."""
    with wall_clock(math.floor):
        session = home.filled(10)
    for found in (session, home.another().session("s")):
        assert found.load()["i"] == 9
        assert seqs(found.history()) == list(range(10, 0, -1))
        assert [found.load(f"@~{n}")["i"] for n in range(10)] == list(range(9, -1, -1))


def test_row07_clock_set_back(home):
    saved = [home.session().save({"i": 0})]
    for i, offset in enumerate((-400 * DAY, 0.0, -4000 * DAY, -DAY), start=1):
        with wall_clock(offset.__add__):
            saved.append(home.reopened().session("s").save({"i": i}))
    session = home.session()
    assert session.load() == {"i": 4}
    assert list(session.history()) == saved[::-1]
    assert [c.id for c in saved] == sorted(c.id for c in saved)
    assert [c.created_at for c in saved] == sorted(c.created_at for c in saved)
    assert seqs(saved) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("home", ["sqlite", "files"], indirect=True)
def test_row07_file_times(home):
    """They say nothing. (Memory has no files, and those of a server are its own.)"""
    saved = list(home.filled(3).tree())
    home.close()
    paths = sorted(home.folder.rglob("*"))
    for age, path in enumerate(paths):  # the first record becomes the newest file
        os.utime(path, (1e9 - age, 1e9 - age))
    assert len(paths) == 1 if home.kind == "sqlite" else len(paths) > 10
    session = home.reopened().session("s")
    assert session.load()["i"] == 2
    assert list(session.history()) == saved[::-1]
    assert list(session.tree()) == saved
    assert session.save({"i": 3}).parent == saved[2].id
    assert home.store.verify().ok


def test_row13_a_late_save_does_not_move_the_head_back(home):
    home.filled(2)
    late, early = home.session(), home.another().session("s")
    newest = early.save({"i": "newest"})
    with pytest.raises(HeadMoved) as caught:
        late.save({"i": "late"})
    assert caught.value.actual == newest.id
    assert caught.value.expected == newest.parent
    assert home.reopened().session("s").load() == {"i": "newest"}


def test_row13_the_same_step_does_not_overwrite(home):
    session = home.filled(3)
    old = session.head
    sibling = session.save({"i": "again"}, parent="@~1")
    assert sibling.step == old.step
    assert sibling.seq == 4
    session = home.reopened().session("s")
    assert session.load() == {"i": "again"}
    assert session.load(old)["i"] == 2
    assert [c.step for c in session.tree()] == [1, 2, 3, 3]


def test_row19_created_at(home):
    before = dt.datetime.now(dt.UTC)
    saved = home.session().save({"i": 1})
    after = dt.datetime.now(dt.UTC)
    assert before <= saved.created_at <= after
    session = home.reopened().session("s")
    for found in (session.head, session.get(saved.id), *session.history(), *session.tree()):
        assert found.created_at == saved.created_at
        assert found.created_at.tzinfo is dt.UTC
    with wall_clock(lambda now: 1_700_000_000.123457):
        assert home.session("exact").save(1).created_at.microsecond == 123457
    assert home.session("exact").head.created_at.microsecond == 123457


def test_row23_steps_after_a_restart(home):
    steps = []
    for i in range(4):
        session = home.reopened().session("s")
        steps += [session.save({"i": i}).step, session.append("log", i).step]
        assert session.step == steps[-1]
    assert steps == [1, 2, 3, 4, 5, 6, 7, 8]


# -- damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [b"torn", b"", None], ids=["torn", "empty", "missing"])
def test_row08_the_one_before_a_damaged_one(home, body):
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


def test_row08_the_one_before_damaged_data(home):
    home.filled(4)
    home.spoil_newest_item()
    session = home.reopened().session("s")
    with pytest.raises(Corrupt, match="item"):
        session.load()
    assert session.load("@~3")["i"] == 0
    report = session.verify()
    assert 0 < report.loadable < report.checkpoints == 4


@pytest.mark.parametrize("body", [b"torn", None], ids=["torn", "missing"])
def test_row10_damaged_checkpoints_stay_listed(home, body):
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


def test_row10_a_damaged_mark_hides_nothing(home):
    home.filled(4, label="label", tags=["tag"])
    home.spoil_marks(2)
    session = home.reopened().session("s")
    assert seqs(session.tree()) == [1, 2, 3, 4]
    assert seqs(session.history()) == [4, 3, 2, 1]
    assert session.load("@~2")["i"] == 1
    assert [c.label for c in session.history() if c.seq != 2] == ["label"] * 3
    assert session.get("tag:tag").seq == 4
    assert not session.verify().ok


SPOILS: dict[str, Callable[[Home], None]] = {
    "record": lambda home: home.spoil_checkpoint(2),
    "newest record": lambda home: home.spoil_checkpoint(3),
    "missing record": lambda home: home.spoil_checkpoint(3, None),
    "head": lambda home: home.spoil_head(),
    "missing head": lambda home: home.spoil_head(None),
    "session": lambda home: home.spoil_session(),
    "name": lambda home: home.spoil_name(),
    "mark": lambda home: home.spoil_marks(3),
    "item": lambda home: home.spoil_newest_item(),
}


@pytest.mark.parametrize("what", SPOILS)
def test_row11_neighbours_are_unaffected(home, what):
    for name in ("a", "t", "z"):
        home.filled(3, name)
    home.filled(3, "s", label="label")
    SPOILS[what](home)
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


@pytest.mark.parametrize("what", [k for k in SPOILS if k not in ("name", "record")])
def test_row11_the_rest_of_a_damaged_session_loads(home, what):
    ids = [c.id for c in home.filled(3, label="label").tree()]
    SPOILS[what](home)
    session = home.reopened().session("s")
    assert session.exists()
    assert seqs(session.tree()) == [1, 2, 3]
    assert session.load(ids[0])["i"] == 0
    assert session.load(ids[0][:20])["i"] == 0


def test_row11_foreign_files(home, tmp_path):
    home.filled(1)
    for content in (b"", b"not a database", b"SQLite format 3\0" + bytes(5000)):
        foreign = tmp_path / "foreign.db"
        foreign.write_bytes(content)
        with pytest.raises((Corrupt, UnsupportedFormat), match=r"not a .*store|damaged"):
            holdfast.open(foreign)
        assert foreign.read_bytes() == content
    for name in (".store.db.0a1b.new", "store.json", "s_latest.json", "index.json"):
        (home.folder / name).write_text("{")
    assert home.reopened().session("s").load()["i"] == 0


@pytest.mark.parametrize("body", [b"", b"torn", None], ids=["empty", "torn", "missing"])
def test_row12_an_empty_pointer(home, body):
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


def test_row14_a_dangling_pointer(home):
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


def test_row15_a_torn_index(tmp_path):
    """The index of ids is in ruins: what does not need it works, and verify tells."""
    home = Home("sqlite", tmp_path)
    home.filled(3)
    home.close()
    connection = apsw.Connection(str(home.path))
    page, size = (
        connection.execute(sql).get
        for sql in (
            "SELECT rootpage FROM sqlite_schema WHERE name = 'sqlite_autoindex_checkpoints_1'",
            "PRAGMA page_size",
        )
    )
    connection.close()
    with open(home.path, "r+b") as file:
        file.seek((page - 1) * size)
        file.write(bytes(size))
    with holdfast.open(home.path) as store:
        assert [info.name for info in store.sessions()] == ["s"]
        session = store.session("s")
        assert session.load()["i"] == 2
        assert seqs(session.history()) == [3, 2, 1]
        assert not store.verify().ok
        with pytest.raises(Corrupt):
            session.save({"i": 3})
        assert session.load()["i"] == 2


# -- failures are told ---------------------------------------------------------------------------


TABLES = ("heads", "checkpoints", "items", "blobs", "marks", "keys")
# What can fail by itself: marks and keys are in the line of the log, and memory has no parts.
PARTS = {"sqlite": TABLES, "postgres": TABLES, "files": TABLES[:4], "memory": TABLES[:1]}


@pytest.mark.parametrize(
    ("home", "table"), [(k, t) for k in PARTS for t in PARTS[k]], indirect=["home"]
)
def test_row09_no_save_is_acknowledged_in_part(home, table):
    session = home.filled(2)
    state = {"i": 2, "log": [TEXT] * 9, "big": TEXT * 99}
    fields: dict[str, Any] = {"label": "l", "key": "k"}
    with home.failing(table), pytest.raises(HoldfastError):
        session.save(state, **fields)
    for again in (session, home.another().session("s")):
        assert again.load()["i"] == 1
        assert len(again) == 2
        assert again.verify().ok
        with pytest.raises(NotFound):
            again.get("label:l")
    assert session.save(state, **fields).step == 3
    assert home.reopened().session("s").load("key:k") == state


def test_row09_a_failed_rewind_is_an_error(home):
    session = home.filled(2)
    with home.failing(), pytest.raises(HoldfastError):
        session.rewind("@~1")
    assert session.load()["i"] == 1
    assert session.ops() == []


def test_row31_an_error_while_finding_the_parent(home, monkeypatch):
    home.filled(2)
    stale = home.session()
    home.another().session("s").save({"i": 2})
    with monkeypatch.context() as patch:
        patch.setattr(home.store.backend, "reader", fail)
        with pytest.raises(Unavailable):
            home.session()
        with pytest.raises(Unavailable):
            stale.save({"i": "a root?"})
    with pytest.raises(HeadMoved):
        stale.save({"i": "a root?"})
    session = home.session()
    assert [c.parent is None for c in session.tree()] == [True, False, False]
    assert session.save({"i": 3}).parent == next(session.history("@~1")).id


def test_row33_what_is_missing_is_an_error(home):
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


def test_row33_a_repeated_label_means_the_newest(home):
    session = home.session()
    for i in range(4):
        session.save({"i": i}, label="plan", tags=["t"])
    session.save({"i": "none"})
    session = home.reopened().session("s")
    for revision in ("plan", "label:plan", "tag:t"):
        assert session.load(revision) == {"i": 3}
    session.rewind("@~3")
    assert session.load("plan") == {"i": 1}


# -- many writers --------------------------------------------------------------------------------


def race(home: Home, writers: int, saves: int) -> list[str]:
    """Threads with a handle each, all on one session and let go at once; the ids acknowledged."""
    stores = [home.store, home.another()]
    barrier = threading.Barrier(writers)
    won: list[str] = []

    def write(n: int) -> None:
        session = stores[n % 2].session("s")
        barrier.wait()
        done = 0
        while done < saves:
            try:
                won.append(session.save({"by": n, "i": done, "log": [TEXT] * 5}).id)
                done += 1
            except HeadMoved:
                session.refresh()

    threads = [threading.Thread(target=write, args=(n,)) for n in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return won


def test_row24_concurrent_saves_are_one_line(home):
    won = race(home, writers=8, saves=6)
    session = home.reopened().session("s")
    history = list(session.history())
    assert len(won) == 48
    assert {c.id for c in history} == set(won)
    assert [c.step for c in history] == list(range(48, 0, -1))
    assert [c.parent for c in history[:-1]] == [c.id for c in history[1:]]
    assert [c.id for c in session.tree() if c.parent is None] == [history[-1].id]
    for n in range(8):
        mine = [s["i"] for s in map(session.load, history[::-1]) if s["by"] == n]
        assert mine == list(range(6))
    assert session.verify().ok


def test_row24_a_first_save_wins_once(home):
    handles = [home.session() for _ in range(4)] + [home.another().session("s") for _ in range(4)]
    assert [handle.save({"i": n}).step for n, handle in enumerate(handles[:1])] == [1]
    for handle in handles[1:]:
        with pytest.raises(HeadMoved):
            handle.save({"i": "another root"})
    assert len(home.session()) == 1
    assert len(list(home.store.sessions())) == 1


WRITER = """
import sys, holdfast
with holdfast.open(sys.argv[1], durability="normal") as store:
    mine, shared = store.session(sys.argv[2]), store.session("shared")
    for i in range(int(sys.argv[3])):
        mine.append("log", i)
        while True:
            try:
                shared.append("log", [sys.argv[2], i])
                break
            except holdfast.HeadMoved:
                shared.refresh()
"""


def test_row16_two_processes_erase_nothing(tmp_path):
    home = Home("sqlite", tmp_path)
    home.session("before").save({"log": ["kept"]})
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(home.path), name, "30"], env=environment
        )
        for name in ("p", "q")
    ]
    kept = home.session("r")
    for i in range(30):
        kept.append("log", i)
    assert [child.wait(60) for child in children] == [0, 0]
    store = home.reopened()
    for name in ("p", "q", "r"):
        assert store.session(name).load() == {"log": list(range(30))}
    log = store.session("shared").load()["log"]
    assert [i for name, i in log if name == "p"] == list(range(30))
    assert [i for name, i in log if name == "q"] == list(range(30))
    assert len(store.session("shared")) == 60
    assert store.session("before").load() == {"log": ["kept"]}
    assert store.verify().ok
    home.close()


def test_row21_another_agent_takes_nothing(home):
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


# -- trees ---------------------------------------------------------------------------------------


def test_row26_rewind_keeps_the_future(home):
    session = home.filled(5)
    future = list(session.history())
    before = len(session)
    target = session.rewind("@~3")
    assert target == future[3]
    session = home.reopened().session("s")
    assert session.head == target
    assert len(session) == before
    assert seqs(session.tree()) == [1, 2, 3, 4, 5]
    for checkpoint in future:
        assert session.load(checkpoint)["i"] == checkpoint.seq - 1
    assert [op.kind for op in session.ops()] == ["rewind"]
    branch = session.save({"i": "branch"})
    assert branch.parent == target.id
    assert seqs(session.history()) == [6, 2, 1]
    session.rewind(future[0])
    assert home.reopened().session("s").load()["i"] == 4
    assert home.store.verify().ok


def test_row27_a_fork_knows_its_origin(home):
    origin = home.filled(3)
    fork = origin.fork("fork", at="@~1")
    assert fork.head.parent == origin.get("@~1").id
    assert fork.head.parent_session == "s"
    fork.append("log", "mine")
    fork = home.reopened().session("fork")
    assert [c.session for c in fork.history()] == ["fork", "fork", "s", "s"]
    assert fork.load()["log"][-1] == "mine"
    assert fork.load("@~2")["i"] == 1
    assert [c.step for c in fork.history()] == [4, 3, 2, 1]
    assert len(home.session()) == 3
    assert home.session().load()["i"] == 2


def test_row27_a_fork_onto_another_is_refused(home):
    origin, taken = home.filled(3), home.filled(2, "taken")
    for _ in range(2):
        with pytest.raises(SessionExists):
            origin.fork("taken")
    with pytest.raises(SessionExists):
        origin.fork("s")
    assert len(taken) == 2
    assert taken.load()["i"] == 1
    origin.fork("new")
    with pytest.raises(SessionExists):
        home.another().session("s").fork("new")
    assert len(home.session("new")) == 1


def test_row27_one_of_two_forks_at_once(home):
    home.filled(2)
    barrier = threading.Barrier(4)
    outcomes: list[str] = []

    def fork(store: holdfast.Store) -> None:
        session = store.session("s")
        barrier.wait()
        try:
            session.fork("wanted")
            outcomes.append("made")
        except SessionExists:
            outcomes.append("refused")

    stores = [home.store, home.another()] * 2
    threads = [threading.Thread(target=fork, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["made", "refused", "refused", "refused"]
    assert len(home.session("wanted")) == 1


# -- nothing is dropped on the way ---------------------------------------------------------------

FIELDS: dict[str, Any] = {
    "label": "plan ready", "tags": ("b", "a"), "trigger": "manual", "status": "failed",
    "reason": "no answer", "usage": Usage(1200, 0.01), "hint": "ask again", "meta": {"user": "u1"},
    "pending": (ToolCall("c1", "search", {"q": [1]}, {"m": 1}),),
}  # fmt: skip


PLAIN_FIELDS = {name: value for name, value in FIELDS.items() if name != "tags"}


def test_row28_every_field_is_kept(home):
    session = home.session()
    writes: list[Callable[..., Any]] = [
        lambda **f: session.save({"log": [1]}, **f),
        lambda **f: session.append("log", 2, **f),
        lambda **f: session.patch(set={"x": 1}, **f),
        lambda **f: session.save({"x": 2}, parent="@~1", **f),
    ]
    saved = [write(**FIELDS, key=f"key {n}") for n, write in enumerate(writes)]
    session = home.reopened().session("s")
    for n, checkpoint in enumerate(saved):
        for found in (checkpoint, session.get(checkpoint.id), home.store.get(checkpoint.id)):
            assert {name: getattr(found, name) for name in PLAIN_FIELDS} == PLAIN_FIELDS
            assert sorted(found.tags) == ["a", "b"]
            assert found.tags == checkpoint.tags  # in one order, whoever tells it
            assert found.key == f"key {n}"


def test_row18_setting_one_thing_keeps_the_others(home):
    session = home.session()
    saved = session.save({"i": 1}, **FIELDS)
    session.tag(saved, "c")
    session.label(saved, "renamed")
    session.tag(saved, "d")
    found = home.reopened().session("s").head
    kept = {name: getattr(found, name) for name in FIELDS}
    assert kept | {"tags": set(kept["tags"])} == FIELDS | {"label": "renamed", "tags": set("abcd")}
    assert found.hash == saved.hash
    assert home.store.verify().ok


def test_row18_compression_compresses(home):
    session = home.session()
    saved = session.save({"text": TEXT * 500, "log": [{"n": n, "text": TEXT} for n in range(300)]})
    assert saved.size > 250_000
    assert saved.added < saved.size / 10
    home.reopened()
    if home.kind == "files":  # for people to read: as long as it is, and there once
        assert saved.size < home.size() < 1.2 * saved.size
    else:
        assert home.size() < saved.size / 2


def test_row29_nan(home):
    state = {
        "loss": math.nan,
        "worst": math.inf,
        "best": -math.inf,
        "zero": -0.0,
        "log": [math.nan],
    }
    home.session().save(state)
    home.session().append("log", math.nan)
    found = home.reopened().session("s").load()
    assert math.isnan(found["loss"])
    assert all(math.isnan(x) for x in found["log"])
    assert (found["worst"], found["best"]) == (math.inf, -math.inf)
    assert math.copysign(1, found["zero"]) == -1
    assert home.session().save(state | {"log": [math.nan] * 2}).added < 500


def test_row34_a_step_costs_what_changed(home):
    """Full-state saves of a conversation: the second half costs what the first did."""
    session = home.session()
    costs = []
    log: list[dict[str, Any]] = []
    for n in range(160):
        log.append({"role": "user", "n": n, "content": f"{n * 7919} {TEXT[n % 40 :]}"})
        costs.append(session.save({"log": log, "n": n}).added)
    raw = session.head.size
    assert sum(costs) < 2 * raw
    assert sum(costs[80:]) < 1.3 * sum(costs[:80])
    if home.durable:
        home.reopened()
        # Plain files hold a readable record of each step. In full they would be 80 times raw.
        assert home.size() < (4 if home.kind == "files" else 3) * raw
    assert home.session().load()["log"] == log


# -- one meaning everywhere ----------------------------------------------------------------------


def transcript(home: Home) -> list[Any]:
    """A day in the life of a store, in words that do not depend on ids or times."""
    session = home.filled(3, label="l", tags=["t"])
    said: list[Any] = []
    names: dict[str | None, Any] = {None: None}

    def tell(name: str) -> None:
        session = home.session(name)
        for c in session.tree():
            names.setdefault(c.id, (c.session, c.seq))
        said.append([
            (c.seq, c.step, c.operation, names[c.parent], c.label, c.tags, c.size, c.added,
             c.state_hash) for c in (*session.tree(), *session.history())
        ])  # fmt: skip
        said.append((session.step, len(session), session.exists(), session.load()))

    def attempt(call: Callable[[], Any]) -> None:
        try:
            said.append(call())
        except HoldfastError as e:
            said.append(type(e).__name__)

    tell("s")
    stale = home.session()
    session.append("log", *range(100))
    attempt(lambda: stale.save({}).seq)
    attempt(lambda: session.save({"k": 1}, key="k").seq)
    attempt(lambda: session.save({"k": 2}, key="k").seq)
    session.rewind("l")
    attempt(lambda: session.save({"k": 3}, parent="@~1", label="l").seq)
    tell("s")
    fork = session.fork("f")
    attempt(lambda: len(session.fork("f")))
    fork.patch(set={"a": {"b": TEXT}}, append={"log": [1]})
    tell("f")
    for revision in ("@", "@~1", "l", "tag:t", "key:k", "step:2", "@~99", "", "label:no", "zz"):
        attempt(partial(session.load, revision))
    said.extend((i.name, i.checkpoints, i.agent) for i in home.reopened().sessions())
    tell("s")
    tell("f")
    return said


def test_row20_one_meaning_of_everything(tmp_path):
    told = {}
    for kind in ("memory", "sqlite", "files", "postgres"):
        home = Home(kind, tmp_path / kind)
        told[kind] = transcript(home)
        home.give_back()
    assert told["memory"] == told["sqlite"] == told["files"] == told["postgres"]
    assert len(told["memory"]) > 25


# -- tests that can fail -------------------------------------------------------------------------
# Each protection switched off, and the test that must notice.

Mutant = Callable[[pytest.MonkeyPatch], None]


def no_compare_and_swap(patch: pytest.MonkeyPatch) -> None:
    def blindly(self: MemoryBackend, change: Change) -> None:
        self._apply(dataclasses.replace(change, notes=None), change.session)

    patch.setattr(MemoryBackend, "commit", blindly)


def ids_by_prefix(patch: pytest.MonkeyPatch) -> None:
    def session(self: Any, name: bytes) -> Any:
        return next((v for k, v in sorted(self._sessions.items()) if k.startswith(name)), None)

    patch.setattr(MemoryBackend, "session", session)


def ids_by_part(patch: pytest.MonkeyPatch) -> None:
    def session(self: Any, name: bytes) -> Any:
        return next((v for k, v in sorted(self._sessions.items()) if name in k), None)

    patch.setattr(MemoryBackend, "session", session)


def lists_without_latest(patch: pytest.MonkeyPatch) -> None:
    real = MemoryBackend.sessions

    def sessions(self: Any, after: bytes | None, limit: int) -> Any:
        return [row for row in real(self, after, limit) if b"latest" not in row[1]]

    patch.setattr(MemoryBackend, "sessions", sessions)


class Free(dict):
    def __contains__(self, key: object) -> bool:
        return False


def keys_can_be_taken(patch: pytest.MonkeyPatch, kind: type[dict] = Free) -> None:
    real = MemoryBackend.__init__

    def init(self: Any) -> None:
        real(self)
        self._keys = kind()

    patch.setattr(MemoryBackend, "__init__", init)


def ids_by_the_clock(patch: pytest.MonkeyPatch) -> None:
    real = ids.new_id
    patch.setattr(ids, "new_id", lambda parent=None: real())


def order_by_id(patch: pytest.MonkeyPatch) -> None:
    def newest(reader: Any, place: Any, _: Any) -> Any:
        found = {s: c for s, (c, _) in reader._checkpoints[place.session].items()}
        older = [(c, s) for s, c in found.items() if c < found[place.seq]]  # so every line ends
        return lineage.Place(place.session, max(older)[1]) if older else None

    ids_by_the_clock(patch)
    patch.setattr(lineage, "parent_of", newest)


def damaged_ones_vanish(patch: pytest.MonkeyPatch) -> None:
    real = lineage.listing

    def listing(*args: Any) -> Any:
        page, after = real(*args)
        return [c for c in page if not c.damaged], after

    patch.setattr(lineage, "listing", listing)


def errors_are_swallowed(patch: pytest.MonkeyPatch) -> None:
    real = MemoryBackend.commit

    def commit(self: Any, change: Any) -> None:
        with suppress(Unavailable):
            real(self, change)

    patch.setattr(MemoryBackend, "commit", commit)


def steps_in_memory(patch: pytest.MonkeyPatch) -> None:
    real = writing.Tip.read
    patch.setattr(writing.Tip, "read", lambda *args: real(*args)._replace(step=0))


def time_in_seconds(patch: pytest.MonkeyPatch) -> None:
    real = time.time_ns
    patch.setattr(writing.time, "time_ns", lambda: real() // 10**9 * 10**9)  # type: ignore[attr-defined]


def rewind_destroys(patch: pytest.MonkeyPatch) -> None:
    real = holdfast.Session.rewind

    def rewind(self: Any, revision: Any) -> Any:
        target = real(self, revision)
        held = self.store.backend._checkpoints[self._writer.number]
        for seq in [seq for seq in held if seq > target.seq]:
            del held[seq]
        return target

    patch.setattr(holdfast.Session, "rewind", rewind)


def fork_without_origin(patch: pytest.MonkeyPatch) -> None:
    real = writing.Writer.fork
    patch.setattr(writing.Writer, "fork", lambda self, tip, extra: real(self, tip, {}))


def fields_are_dropped(patch: pytest.MonkeyPatch) -> None:
    real = fields.check

    def check(given: Any) -> Any:
        label, _, extra = real(given)
        extra.pop("meta", None)
        return label, (), extra

    patch.setattr(fields, "check", check)


def oldest_label(patch: pytest.MonkeyPatch) -> None:
    real = revisions.Resolver._line
    patch.setattr(revisions.Resolver, "_line", lambda self: reversed(list(real(self))))


def everything_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("holdfast.session.lay_out", lambda state, old, out: lay_out(state, None, out))


def no_compression(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rows, "_COMPRESS_FROM", 1 << 40)


def names_are_paths(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(files_catalog, "escape", os.fsdecode)


def names_are_normalized(patch: pytest.MonkeyPatch) -> None:
    real = records.encode_name
    patch.setattr(records, "encode_name", lambda name: real(unicodedata.normalize("NFKC", name)))


def ids_by_glob(patch: pytest.MonkeyPatch) -> None:
    def session(self: Any, name: bytes) -> Any:
        held = sorted(self._sessions.items())
        return next((v for k, v in held if fnmatch.fnmatchcase(k.decode(), name.decode())), None)

    patch.setattr(MemoryBackend, "session", session)


def the_same_is_not_saved(patch: pytest.MonkeyPatch) -> None:
    real = holdfast.Session.save

    def save(self: Any, state: Any, **more: Any) -> Any:
        return self.head if self.exists() and self.load() == state else real(self, state, **more)

    patch.setattr(holdfast.Session, "save", save)


def newest_file_is_the_head(patch: pytest.MonkeyPatch) -> None:
    real = FilesReader.head

    def head(self: Any, session: int) -> Any:
        files = (self.ledger(session).folder / "checkpoints").iterdir()
        newest = max(files, key=lambda path: path.stat().st_mtime_ns)
        found = records.unseal_head(session, real(self, session) or b"")
        return found._replace(seq=int(newest.stem), parent=None).seal(session)

    patch.setattr(FilesReader, "head", head)


def damage_stops(module: Any) -> Mutant:
    def mutant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(module, "UNREADABLE", ())

    mutant.__name__ = f"damage_stops_{module.__name__.split('.')[-1]}"
    return mutant


def problems_are_not_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(verify._Audit, "_note", lambda *args, **more: None)


def data_is_not_checked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(datacheck.DataCheck, "check", lambda *args: None)


def anything_is_a_store(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sqlite_file, "check_schema", lambda *args: sqlite_file.FORMAT)


def lost_heads_are_beginnings(patch: pytest.MonkeyPatch) -> None:
    real = lineage.read_head

    def read_head(reader: Any, session: int) -> Any:
        with suppress(Corrupt):
            return real(reader, session)
        return reader.head(session) or b"", records.Head(0, 0, 0, None)

    patch.setattr(lineage, "read_head", read_head)


def steps_are_places(patch: pytest.MonkeyPatch) -> None:
    real = writing.Writer._seal

    def seal(self: Any, tip: Any, *more: Any) -> Any:
        self.head = self.head._replace(last=0 if tip is None else tip.place.seq)
        return real(self, tip, *more)

    patch.setattr(writing.Writer, "_seal", seal)


def damage_is_nothing_there(patch: pytest.MonkeyPatch) -> None:
    real = lineage.read_row

    def read_row(reader: Any, place: Any) -> Any:
        if reader.checkpoint(*place) is None:
            raise CheckpointNotFound("none")
        return real(reader, place)

    for module in (lineage, revisions):
        patch.setattr(module, "read_row", read_row)


def indexes_must_be_sound(patch: pytest.MonkeyPatch) -> None:
    real = sqlite_file.check_schema

    def check(connection: Any, path: Any) -> int:
        if connection.pragma("integrity_check") != "ok":
            raise Corrupt(f"{path} does not open")
        return real(connection, path)

    patch.setattr(sqlite_file, "check_schema", check)


def processes_know_only_of_themselves(patch: pytest.MonkeyPatch) -> None:
    blind = """
import holdfast
known = {}
def append(self, path, item):
    state = known.setdefault(self.name, {path: []})
    state[path].append(item)
    self.refresh()
    return self.save(state)
holdfast.Session.append = append
"""
    patch.setattr(sys.modules[__name__], "WRITER", blind + WRITER)


def one_mark_wipes_the_others(patch: pytest.MonkeyPatch) -> None:
    real = MemoryBackend._apply_notes

    def apply(self: Any, notes: Any, session: int, checkpoint: Any) -> None:
        marked = {mark[0] for mark in notes.marks}
        held = self._marks.get(session, {})
        self._marks[session] = {m: row for m, row in held.items() if m[0] not in marked}
        real(self, notes, session, checkpoint)

    patch.setattr(MemoryBackend, "_apply_notes", apply)


def keys_of_all_sessions(patch: pytest.MonkeyPatch) -> None:
    class Shared(dict):
        def __contains__(self, key: Any) -> bool:
            return key[1] in [taken for _, taken in self]

    keys_can_be_taken(patch, Shared)


def forks_are_never_refused(patch: pytest.MonkeyPatch) -> None:
    real = holdfast.Session.fork

    def fork(self: Any, name: str, at: Any = None) -> Any:
        with suppress(SessionExists):
            return real(self, name, at)
        return self.store.session(name)

    patch.setattr(holdfast.Session, "fork", fork)


def nan_does_not_load(patch: pytest.MonkeyPatch) -> None:
    real = loading.load

    def load(*args: Any) -> Any:
        state = real(*args)
        if state.get("loss") != state.get("loss"):
            raise Corrupt("not a number")
        return state

    patch.setattr(loading, "load", load)


def unknown_parents_are_none(patch: pytest.MonkeyPatch) -> None:
    real = holdfast.Session.refresh

    def refresh(self: Any) -> None:
        with suppress(Unavailable):
            real(self)

    patch.setattr(holdfast.Session, "refresh", refresh)


def missing_is_none(patch: pytest.MonkeyPatch) -> None:
    real = holdfast.Session.load

    def load(self: Any, *args: Any, **more: Any) -> Any:
        with suppress(NotFound):
            return real(self, *args, **more)

    patch.setattr(holdfast.Session, "load", load)


ON_FILES = (names_are_paths, newest_file_is_the_head)  # all others are tried in memory
MUTANTS: list[tuple[Any, ...]] = [
    (names_are_paths, test_row01_ids_are_no_paths),
    (names_are_normalized, hostile.test_hostile_session_ids),
    (names_are_normalized, hostile.test_hostile_session_ids_to_fork_and_rewind),
    (names_are_normalized, hostile.test_hostile_labels_tags_and_keys),
    (ids_by_part, test_row02_ids_are_no_globs),
    (ids_by_glob, test_row02_brackets_can_be_found_again),
    (ids_by_prefix, test_row03_prefix_list),
    (lists_without_latest, test_row04_latest_in_an_id),
    (the_same_is_not_saved, test_row05_the_same_state_twice),
    (keys_can_be_taken, test_row05_the_same_id_twice),
    (order_by_id, test_row06_fast_saves),
    (ids_by_the_clock, test_row07_clock_set_back),
    (newest_file_is_the_head, test_row07_file_times),
    *[(damage_stops(lineage), test_row08_the_one_before_a_damaged_one, b) for b in (b"", None)],
    (data_is_not_checked, test_row08_the_one_before_damaged_data),
    (errors_are_swallowed, test_row09_no_save_is_acknowledged_in_part, "heads"),
    (errors_are_swallowed, test_row09_a_failed_rewind_is_an_error),
    (damaged_ones_vanish, test_row10_damaged_checkpoints_stay_listed, b"torn"),
    (damage_stops(lineage), test_row10_a_damaged_mark_hides_nothing),
    *[(damage_stops(storing), test_row11_neighbours_are_unaffected, what)
      for what in SPOILS if what not in ("record", "mark", "item")],
    (problems_are_not_told, test_row11_neighbours_are_unaffected, "record"),
    (problems_are_not_told, test_row11_neighbours_are_unaffected, "mark"),
    (data_is_not_checked, test_row11_neighbours_are_unaffected, "item"),
    *[(damage_stops(lineage), test_row11_the_rest_of_a_damaged_session_loads, what)
      for what in SPOILS if what not in ("name", "record", "item")],
    (anything_is_a_store, test_row11_foreign_files),
    *[(lost_heads_are_beginnings, test_row12_an_empty_pointer, b) for b in (b"", b"torn", None)],
    (no_compare_and_swap, test_row13_a_late_save_does_not_move_the_head_back),
    (steps_are_places, test_row13_the_same_step_does_not_overwrite),
    (damage_is_nothing_there, test_row14_a_dangling_pointer),
    (indexes_must_be_sound, test_row15_a_torn_index),
    (processes_know_only_of_themselves, test_row16_two_processes_erase_nothing),
    (one_mark_wipes_the_others, test_row18_setting_one_thing_keeps_the_others),
    (no_compression, test_row18_compression_compresses),
    (time_in_seconds, test_row19_created_at),
    (keys_can_be_taken, test_row20_one_meaning_of_everything),
    (keys_of_all_sessions, test_row21_another_agent_takes_nothing),
    (steps_in_memory, test_row23_steps_after_a_restart),
    (no_compare_and_swap, test_row24_a_first_save_wins_once),
    (no_compare_and_swap, test_row24_concurrent_saves_are_one_line),
    (rewind_destroys, test_row26_rewind_keeps_the_future),
    (fork_without_origin, test_row27_a_fork_knows_its_origin),
    (forks_are_never_refused, test_row27_a_fork_onto_another_is_refused),
    (forks_are_never_refused, test_row27_one_of_two_forks_at_once),
    (fields_are_dropped, test_row28_every_field_is_kept),
    (nan_does_not_load, test_row29_nan),
    (unknown_parents_are_none, test_row31_an_error_while_finding_the_parent),
    (missing_is_none, test_row33_what_is_missing_is_an_error),
    (oldest_label, test_row33_a_repeated_label_means_the_newest),
    (everything_again, test_row34_a_step_costs_what_changed),
]  # fmt: skip


def carry_out(test: Any, folder: Path, arguments: list[Any], kind: str = "memory") -> None:
    """A test with the fixtures that it wants."""
    folder.mkdir()
    given: dict[str, Any] = {}
    wanted = list(inspect.signature(test).parameters)
    for name in {"home", "sqlite"} & {*wanted}:
        given[name] = Home(kind if name == "home" else name, folder)
    if "tmp_path" in wanted:
        given["tmp_path"] = folder
    rest = [name for name in wanted if name not in (*given, "monkeypatch")]
    with pytest.MonkeyPatch.context() as patch:
        if "monkeypatch" in wanted:
            given["monkeypatch"] = patch
        try:
            test(**given, **dict(zip(rest, arguments, strict=True)))
        finally:
            for home in given.values():
                if isinstance(home, Home):
                    home.give_back()


@pytest.mark.parametrize(
    "case", MUTANTS, ids=lambda c: "-".join([c[0].__name__, c[1].__name__[5:10], *map(str, c[2:])])
)
def test_row36_every_test_can_fail(case, tmp_path):
    mutant, test, *arguments = case
    kind = "files" if mutant in ON_FILES else "memory"
    carry_out(test, tmp_path / "sound", arguments, kind)
    with pytest.MonkeyPatch.context() as patch:
        mutant(patch)
        with pytest.raises((AssertionError, HoldfastError, pytest.fail.Exception)):
            carry_out(test, tmp_path / "mutant", arguments, kind)


def test_row36_every_row_has_a_test():
    here = Path(__file__).parent
    found = [
        row
        for name in ("test_seed_regressions.py", "test_seed_living.py", "test_seed_runs.py")
        for row in re.findall(
            r"^def test_row(\d\d)_", (here / name).read_text("utf-8"), re.MULTILINE
        )
    ]
    assert sorted(set(map(int, found))) == list(range(1, 37))


def test_row36_no_test_is_without_a_mutant():
    tried = {test.__name__ for _, test, *_ in MUTANTS}
    named = {name for name in globals() if name.startswith("test_row")}
    assert {name for name in named - tried if not name.startswith("test_row36")} == set()


def test_row36_concurrent_saves_do_meet(home):
    """The race is one: handles run into each other's saves."""
    real, moved = holdfast.Session.refresh, itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(holdfast.Session, "refresh", lambda self: (next(moved), real(self))[1])
        race(home, writers=8, saves=6)
    assert next(moved) > 8  # one for each new handle, and one for each lost race
