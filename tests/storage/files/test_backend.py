"""Stores of plain files: their names, their locks, and what becomes of them behind our back."""

import errno
import json
import os
import random
import re
import shutil
import threading
import unicodedata
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import holdfast
from holdfast import intervals
from holdfast.errors import Corrupt, HeadMoved, Unavailable
from holdfast.history import leases, lineage, sessions
from holdfast.storage import fs
from holdfast.storage.files import (
    journal as files_journal,
)
from holdfast.storage.files import (
    log as files_log,
)
from holdfast.storage.files import (
    row_json,
    store_folder,
)
from holdfast.storage.files import (
    session_folders as files_catalog,
)
from holdfast.storage.files.backend import FilesBackend
from holdfast.storage.rows import Address
from tests.faults import processes
from tests.faults.bitrot import flip
from tests.history.test_names import HOSTILE
from tests.mutants import files
from tests.support import file_damage as filestore
from tests.support.stores import store_of

ITEM = "an item that is long enough for its list to become a stream " * 2
NFC, NFD = (unicodedata.normalize(form, "Café") for form in ("NFC", "NFD"))
NAMES = [
    *HOSTILE, "/abs", "CON", "Con.txt", "aux", "COM1", "a%2Fb", "a%2fb", ".new-0123", "log.jsonl",
    "x~3", "x", "lock", "streams", ".git", "dots...", "spaces   ", ". .", "%2E", "%", "-rf",
    NFC, NFD, "CAFÉ", "İ", "i̇", "ı", "K", "k", "ſ", "a" * 100, "a" * 101, "😀" * 30,
]  # fmt: skip


@pytest.fixture
def path(tmp_path):
    return tmp_path / "around" / "store"


@pytest.fixture
def opened(path):
    """Opens the store, as often as needed."""
    path.parent.mkdir()
    stores = []

    def again(**options):
        stores.append(holdfast.open(f"files:{path}", **{"durability": "normal", **options}))
        return stores[-1]

    yield again
    for store in stores:
        store.close()


def filled(store, name="s", appends=3):
    """A session with a stream; the ids of its checkpoints with what they hold."""
    session = store.session(name)
    state = {"log": [f"{n} {ITEM}" for n in range(20)]}
    known = {session.save(state).id: 20}
    for n in range(appends):
        known[session.append("log", f"{20 + n} {ITEM}").id] = 21 + n
    return known


def loads(store, known, name="s"):
    session = store.session(name)
    for id, count in known.items():
        assert session.load(id) == {"log": [f"{n} {ITEM}" for n in range(count)]}


def backend(store) -> FilesBackend:
    found = store._repository.backend
    assert isinstance(found, FilesBackend)
    return found


# -- names -----------------------------------------------------------------------------------------


def check_folders(folders: list[str]) -> None:
    """None that any file system takes for another, for a device or for a path."""
    # Unicode's canonical caseless match, which no known file system goes beyond.
    seen = {
        unicodedata.normalize("NFD", unicodedata.normalize("NFD", f).casefold()) for f in folders
    }
    assert len(seen) == len(folders), "two may be one"
    for folder in folders:
        assert len(os.fsencode(folder)) <= 255
        assert not re.match(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?$", folder, re.IGNORECASE)
        assert not re.search(r'^[. -]|[. ]$|[\x00-\x1f\x7f/\\:*?"<>|]', folder)


def test_hostile_names(path, opened, monkeypatch):
    path.parent.mkdir(exist_ok=True)
    store = opened()
    monkeypatch.chdir(path.parent)
    names = list(dict.fromkeys(NAMES))
    for n, name in enumerate(names):
        filled(store, name, appends=1)
        store.session(name).patch(set={"n": n})
    store = opened()
    assert sorted(info.name for info in store.sessions()) == sorted(names)
    for n, name in enumerate(names):
        assert store.session(name).load()["n"] == n
    forks = {f"fork of {n}": name for n, name in enumerate(names) if n % 5 == 0}
    for fork, name in forks.items():
        assert store.session(name).fork(fork).load()["n"] == names.index(name)
    assert store.verify(read_data=True).ok
    folders = os.listdir(path / "sessions")
    assert len(folders) == len(names) + len(forks)
    check_folders(folders)
    for name in names:
        store.session(name).delete()
    store.gc()
    store = opened()
    assert sorted(info.name for info in store.sessions()) == sorted(forks)
    assert store.verify(read_data=True).ok
    assert os.listdir(path.parent) == ["store"]
    assert os.listdir(path.parent.parent) == ["around"]


@pytest.mark.parametrize("names", [("K", "k"), ("각", "\u1100\u1161\u11a8"), ("ß", "SS")])
def test_names_that_are_not_folded(path, opened, monkeypatch, names):
    """test_hostile_names notices them."""
    for name in names:
        opened().session(name).save({})
    check_folders(os.listdir(path / "sessions"))
    monkeypatch.setattr(files_catalog, "fold", str)
    for name in names:
        opened().session(f"{name} again").save({})
    with pytest.raises(AssertionError, match="two may be one"):
        check_folders(os.listdir(path / "sessions"))


@pytest.mark.parametrize("name", ["x" * 300, "../../x", "é" * 99])
def test_a_folder_tells_its_session_though_its_name_cannot(opened, name):
    filled(opened(), name)
    folder = filestore.folder(backend(opened()), 1)
    found = files_catalog._identify(folder)
    assert found is not None
    assert found.names == (name.encode(),)


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_nobody_else_may_look(path, umask):
    path.parent.mkdir()

    def run(out):
        os.umask(umask)
        with holdfast.open(f"files:{path}") as store:
            filled(store)
            store.session("s").save({"big": "x" * 9000}, label="l")
            store.session("t").save({})
            filled(store, "u")
            store.session("u").fork("v")
            for gone in ("t", "u"):
                store.session(gone).delete()
            store.gc()
            store.backup(path.parent / "copy")

    assert processes.fork(run).finish() == 0
    for root in (path, path.parent / "copy"):
        for each in [root, *root.rglob("*")]:
            mode = each.stat().st_mode & 0o7777
            assert mode == (0o700 if each.is_dir() else 0o600), each


# -- strangers -------------------------------------------------------------------------------------


def test_what_is_not_ours_is_left_alone(path, opened):
    store = opened()
    known = filled(store)
    filled(store, "gone")
    strangers = [
        path / "sessions" / "README", path / "sessions" / ".git" / "HEAD",
        path / "sessions" / "notes" / "mine.txt", path / "blobs" / ".DS_Store",
        path / "blobs" / "zz" / f"{'y' * 64}.json", path / "blobs" / "aa" / "mine.json",
    ]  # fmt: skip
    for each in strangers:
        each.parent.mkdir(exist_ok=True)
        each.write_text("somebody's")
    store = opened()
    store.session("gone").delete()
    store.gc()
    loads(store, known)
    store.session("README").save({})
    store.session("notes").save({})
    assert store.verify(read_data=True).ok
    assert [each.read_text() for each in strangers] == ["somebody's"] * len(strangers)


def test_a_copy_of_a_session_is_not_taken_for_it(path, opened):
    store = opened()
    known = filled(store)
    shutil.copytree(path / "sessions" / "s", path / "sessions" / "a copy")
    store = opened()
    known[store.session("s").append("log", f"23 {ITEM}").id] = 24
    loads(opened(), known)
    problems = store.verify().problems
    assert any("a copy" in problem.what for problem in problems)
    filled(store, "gone")
    store.session("gone").delete()
    with pytest.raises(Corrupt, match="a copy"):  # it may need anything
        store.gc()
    shutil.rmtree(path / "sessions" / "a copy")
    store.gc()
    assert store.verify(read_data=True).ok


@pytest.fixture
def brought(path, opened):
    """A session of another store, which has a stream of the same number as one of ours."""
    with holdfast.open(f"files:{path.parent}/other", durability="normal") as other:
        other.session("first").save({})
        theirs = {"log": [f"theirs {n} {ITEM}" for n in range(20)]}
        other.session("theirs").save(theirs)
    ours = {"more": [f"x{n} {ITEM}" for n in range(20)], "log": [f"{n} {ITEM}" for n in range(20)]}
    opened().session("s").save(ours)
    there = path.parent / "other" / "sessions" / "theirs"
    streams = path / "sessions" / "s" / "streams"
    assert {file.name for file in (there / "streams").iterdir()} & {*os.listdir(streams)}

    def bring():
        shutil.copytree(there, path / "sessions" / "theirs")

    return bring, ours, theirs


@pytest.mark.parametrize("opened_before", [False, True])
def test_a_session_of_another_store_is_never_taken_for_ours(path, opened, brought, opened_before):
    bring, ours, theirs = brought
    store = opened()
    if opened_before:
        assert store.session("s").load() == ours
    bring()
    if not opened_before:
        store = opened()
    for name in ("theirs", "s"):
        with pytest.raises(Corrupt, match=r"sessions/s/streams/.* and in .*sessions/theirs/"):
            store.session(name).load()
    assert any("and in" in problem.what for problem in store.verify().problems)
    for act in (store.gc, store.repair):
        with pytest.raises(Corrupt, match="and in"):
            act()
    store.session("s").append("log", "ours")
    store.session("theirs").append("log", "theirs")
    store.backup(path.parent / "copy")
    for root in (path, path.parent / "copy"):
        moved = root.parent / f"away {root.name}"
        (root / "sessions" / "theirs").rename(moved)
        with holdfast.open(f"files:{root}") as alone:
            assert alone.session("s").load() == {**ours, "log": [*ours["log"], "ours"]}
            assert alone.verify(read_data=True).ok
        [items] = (moved / "streams").iterdir()
        assert len(filestore.lines(items)) == len(theirs["log"]) + 1


@pytest.mark.parametrize("opened_before", [False, True])
@pytest.mark.parametrize("name", ["a brought one", "theirs"])
def test_two_sessions_of_one_number_are_not_told_apart(path, opened, name, opened_before):
    """Whichever is found first: neither is begun anew, nor taken for a copy of the other."""
    with holdfast.open(f"files:{path.parent}/other", durability="normal") as other:
        other.session(name).save({"n": 3})
    store = opened()
    for n in range(2):
        store.session("ours").save({"n": n})
    store.session("ours").fork("child")
    known = filled(store, "fine")
    store.session("gone").save({})
    store.session("gone").delete()
    if not opened_before:
        store = opened()
    shutil.copytree(path.parent / "other" / "sessions" / name, path / "sessions" / name)
    for each in ("ours", name):
        for act in (
            lambda session: session.load(),
            lambda session: session.save({}),
            lambda session: session.exists(),
            lambda session: store_of(session).session("fine").fork(session.name),
        ):
            with pytest.raises(Corrupt, match=f"sessions/{min(name, 'ours')} and in sessions/"):
                act(store.session(each))
    with pytest.raises(Corrupt, match="and in"):
        store.session("child").load("@~1")  # ours, by its number
    assert [p.what for p in store.verify().problems if "and in" in p.what]
    for refused in (store.gc, store.repair, lambda: store.backup(path.parent / "copy")):
        with pytest.raises(Corrupt, match="and in"):
            refused()
    loads(store, known, "fine")
    store.session("new").save({})
    (path / "sessions" / name).rename(path.parent / "away")
    for again in (store, opened()):
        assert again.session("ours").load() == {"n": 1}
        assert not again.session(name).exists()
        assert again.verify(read_data=True).ok
    store.gc()


@pytest.mark.parametrize("place", [
    "version", "locks/turns", "locks/names", "locks/counters", "locks/blobs", "sessions/s/head",
    "sessions/s/journal", "sessions/s/journal.jsonl", "sessions/s/lease", "sessions/s/lease.new",
    "sessions/s/lock", "sessions/s/log.jsonl", "sessions/s/streams/2.jsonl",
    "sessions/s/checkpoints/000007.json", "counters.json",
])  # fmt: skip
@pytest.mark.parametrize("there", [True, False])
def test_nothing_is_written_to_where_a_link_leads(path, opened, caplog, place, there):
    """It may be anybody's file."""

    def work(step):
        with opened().session("s").run() as run:
            run.step(step, int)

    filled(opened())
    work("one")
    link, victim = path / place, path.parent / "mine"
    kept = link.read_bytes() if link.exists() else b"mine"
    if there:
        victim.write_bytes(kept)
        victim.chmod(0o644)
    link.unlink(missing_ok=True)
    link.symlink_to(victim)
    failed = []
    for act in (
        lambda: work("first"),
        lambda: opened().session("s").append("log", ITEM),
        lambda: opened().session("s").save({"big": ["x" * 9000]}),
        lambda: opened().session("new").save({}),
        lambda: work("two"),
        lambda: opened().gc(),
    ):
        try:
            act()
        except holdfast.HoldfastError as e:
            failed.append(e)
    if there:
        assert (victim.read_bytes(), victim.stat().st_mode & 0o777) == (kept, 0o644)
    else:
        assert not victim.exists()
    assert failed or "not written" in caplog.text or not link.is_symlink() or "lease" in place


def test_names_that_only_look_like_numbers(path, opened):
    known = filled(opened())
    folder = path / "sessions" / "s"
    (folder / "streams" / "²2.jsonl").write_text("")
    (folder / "checkpoints" / "²2.json").write_text("{}")
    log = folder / "log.jsonl"
    log.write_bytes(log.read_bytes().replace(b'{"n":2,', b'{"m":2,'))  # so that all are looked at
    store = opened()
    store.verify(read_data=True)
    store.repair()
    store.gc()
    loads(store, known)


def tree(folder):
    """All that is below a folder, and what is in it."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


LINKED = [
    "sessions", "blobs", "locks", "blobs/*", "blobs/*/*.json", "counters.json", "version",
    "sessions/s", "sessions/s/checkpoints", "sessions/s/streams", "sessions/s/log.jsonl",
    "sessions/s/checkpoints/000001.json", "sessions/s/streams/*.jsonl", "sessions/s/session.json",
    "sessions/s/head", "sessions/s/journal", "sessions/s/journal.jsonl", "sessions/s/lease",
    "sessions/s/lock", "sessions/~streams-*", "sessions/~streams-*/streams", "locks/turns",
    "locks/turn",
    "locks/names", "locks/counters", "locks/blobs", "locks/freed",
]  # fmt: skip


def use(store):
    """Read and write all that is in a store with links."""
    session = store.session("s")
    with session.run() as run:
        run.step("two", int)
    session.load()
    for checkpoint in session.tree():
        session.load(checkpoint.id)
    session.append("log", ITEM)
    session.save({"big": "x" * 9000, "log": [ITEM] * 40})
    store.session("fork").load()
    store.session("new").save({"big": "y" * 9000})
    store.session("later").save({"big": "z" * 9000})
    store.session("later").delete()


@pytest.mark.parametrize("place", LINKED)
def test_links_are_refused_and_never_followed(path, opened, place):
    """Whether the store was open when the link was made, or is opened later."""
    before = opened()
    filled(before, "gone")
    before.session("gone").fork(name="fork")
    filled(before)
    before.session("s").save({"big": "x" * 9000, "log": [ITEM] * 40})
    with before.session("s").run() as run:
        run.step("one", int)
    before.session("gone").delete()
    before.gc()
    before.session("s").delete("@~2")
    link = next(path.glob(place))
    elsewhere = path.parent / "elsewhere"
    mine = elsewhere / "mine"
    elsewhere.mkdir()
    link.rename(mine)
    link.symlink_to(mine)
    if mine.is_dir():
        (mine / ".new-mine").write_text("mine")
        (mine / "000099.json").write_text("mine")
        (mine / "notes").mkdir()
    kept = tree(elsewhere)
    message = re.escape(f"{link} is a link")

    def refused(act, store=opened):
        with pytest.raises(Corrupt, match=message):
            act(store())
        assert tree(elsewhere) == kept

    for store in (lambda: before, opened):
        refused(lambda store: store.gc(), store)
        refused(lambda store: store.repair(), store)
        refused(lambda store: store.backup(path.parent / "backup"), store)
    assert not (path.parent / "backup").exists()
    if place not in ("sessions", "blobs", "locks", "locks/turn"):
        assert not opened().verify().ok
    with holdfast.open("memory:") as other:
        refused(lambda _: other.import_exported(path))
        assert not [*other.sessions()]
    if place not in ("version", "sessions/s/head", "sessions/s/journal", "locks/freed"):
        refused(use)
    with suppress(Corrupt):  # hints, and what is not read again, are not looked at
        use(before)
    assert tree(elsewhere) == kept
    assert link.is_symlink()


def test_mutant_that_follows_links(path, opened, monkeypatch):
    files.refuses_no_links(monkeypatch)
    filled(opened())
    link, elsewhere = path / "sessions/s/checkpoints", path.parent / "elsewhere"
    link.rename(elsewhere)
    link.symlink_to(elsewhere)
    (elsewhere / ".new-mine").write_text("mine")
    opened().gc()
    assert not (elsewhere / ".new-mine").exists()


def test_links_in_a_new_store_are_refused(path):
    for name in ("locks", "sessions", "blobs", "holdfast.json"):
        elsewhere = path.parent / "elsewhere"
        elsewhere.mkdir(parents=True)
        path.mkdir()
        (path / name).symlink_to(elsewhere)
        with pytest.raises(Corrupt, match=f"{name} is a link"):
            holdfast.open(f"files:{path}", create=True)
        assert tree(elsewhere) == {}
        assert os.listdir(path) == [name]
        shutil.rmtree(path.parent)


def test_a_store_may_be_reached_by_a_link(path, opened):
    known = filled(opened())
    link = path.parent / "link"
    link.symlink_to(path)
    with holdfast.open(f"files:{link}") as store:
        loads(store, known)
        store.session("s").append("log", ITEM)
        store.gc()
        assert store.verify(read_data=True).ok


@pytest.mark.parametrize("locks", [True, False])
def test_what_can_only_be_read(path, opened, monkeypatch, locks):
    """As on a disk that is mounted so. Locks may be missing: copies may lack what is empty."""
    known = filled(opened())
    if not locks:
        shutil.rmtree(path / "locks")
    real = os.open

    def sealed(file, flags, *args, **options):
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and str(file).startswith(f"{path}/"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), file)
        return real(file, flags, *args, **options)

    monkeypatch.setattr(os, "open", sealed)
    store = opened(read_only=True)
    loads(store, known)
    assert [info.name for info in store.sessions()] == ["s"]
    assert store.verify(read_data=True).ok
    assert store.stats()
    store.backup(path.parent / "copy")
    with holdfast.open("memory:") as other:
        assert other.import_exported(path).sessions == 1
    with pytest.raises(Unavailable):
        opened().session("s").save({})


def test_folders_that_are_empty_need_not_be_copied(path, opened):
    store = opened()
    store.session("s").save({"a": 1})
    store.close()
    for folder in ("locks", "blobs", "sessions/s/streams"):
        shutil.rmtree(path / folder)
    store = opened()
    filled(store)
    store.session("s").save({"big": "x" * 9000})
    assert store.verify(read_data=True).ok


# -- many at once ----------------------------------------------------------------------------------


def test_a_thread_that_reads_what_another_is_writing(opened, monkeypatch):
    """A commit that is read before it is synced must not count twice."""
    store = opened(durability="full")
    session = store.session("s")
    session.save({"log": []})
    sync = fs.sync_handle
    seen = []

    def look(handle):
        reader = threading.Thread(target=lambda: seen.append(store.session("s").load()))
        reader.start()
        reader.join()
        sync(handle)

    with monkeypatch.context() as patch:
        patch.setattr(fs, "sync_handle", look)
        session.append("log", 1)
    session.append("log", 2)
    assert {"log": [1]} in seen
    log = filestore.lines(filestore.folder(backend(store), 1) / "log.jsonl")
    assert [line["n"] for line in log] == [1, 2, 3]
    assert opened().verify(read_data=True).ok


def test_a_reader_sees_one_moment_of_a_session(opened, monkeypatch):
    """Also if it begins to read while the commit that it does not see is being written."""
    store = opened(durability="full")
    session = store.session("s")
    session.save({"log": []})
    write = fs.write_all
    views = []

    def look(handle, data, at):
        if data.startswith(b'{"n":2,'):  # the line of the log
            reader = store._repository.reader()
            view = reader.__enter__()
            views.append((reader, view, view.head(1)))
        write(handle, data, at)

    with monkeypatch.context() as patch:
        patch.setattr(fs, "write_all", look)
        session.save({"log": []})
    [(reader, view, head)] = views
    assert view.head(1) == head
    reader.__exit__(None, None, None)
    with store._repository.reader() as now:
        assert now.head(1) != head


def test_who_writes_knows_what_a_reader_would_find(opened):
    """A line that was just written is not read again: what is known of it must be the same."""
    store = opened()
    session = store.session("s")

    def compare():
        known = backend(store)._home.catalog.ledger(1)
        read = files_log.SessionLog(filestore.folder(backend(store), 1), 1)
        read.read()
        assert known is not None
        for name, table in read.tables.items():
            ours = known.tables[name]
            assert (ours.keys, ours.rows) == (table.keys, table.rows), name
        apart = {"_streams", "pins", "tables"}
        assert vars(known).keys() == vars(read).keys() >= apart
        for name in vars(read).keys() - apart:
            assert getattr(known, name) == getattr(read, name), name

    session.save({"log": [f"{n} {ITEM}" for n in range(20)], "more": [ITEM] * 20})
    compare()
    for step in (
        lambda: session.append("log", ITEM),
        lambda: session.append("more", ITEM, ITEM),
        lambda: session.patch(append={"log": [ITEM], "more": [ITEM]}, set={"new": 1}),
        lambda: session.append("log", ITEM, label="one", tags=["a"], key="k", trigger="t"),
        lambda: session.tag(None, "b"),
        lambda: session.rewind("@~2"),
        lambda: session.save({"log": []}),
        session.undo,
        lambda: session.append("log", ITEM),
        lambda: session.delete("@~1"),
        store.gc,
        lambda: session.append("log", ITEM),
    ):
        step()
        compare()


def test_a_session_begun_anew_under_the_same_name(opened):
    ours, theirs = opened(), opened()
    known = filled(ours)
    old = ours.session("s")
    old.load()
    theirs.session("s").delete()
    theirs.gc()
    for n in range(30):  # a log longer than the old one, maybe in its very place on the disk
        theirs.session("s").save({"new": n})
    with pytest.raises(HeadMoved):
        old.save({"late": True})
    with pytest.raises(holdfast.NotFound):
        ours.session("s").load(next(iter(known)))
    assert ours.session("s").load() == {"new": 29}
    assert len(ours.session("s")) == 30
    assert ours.verify(read_data=True).ok


@pytest.mark.parametrize("text", ["x", "much longer than the other"])
def test_a_log_that_was_written_anew_is_read_anew(path, opened, text):
    """Even if it lies in the same place on the disk, and is as long or longer."""
    ours, theirs = opened(), opened()
    filled(ours)
    log = path / "sessions" / "s" / "log.jsonl"
    before = log.read_bytes()
    theirs.session("s").save({"taken": "back"}, label="x")
    taken = ours.session("s")
    assert taken.load() == {"taken": "back"}
    log.write_bytes(before)
    (path / "sessions" / "s" / "head").unlink()
    opened().session("s").save({"something": "else"}, label=text)
    with pytest.raises((HeadMoved, Corrupt)):
        taken.save({"built": "on what is not there"})
    assert ours.session("s").load() == {"something": "else"}
    assert len(ours.session("s")) == 5
    assert ours.verify(read_data=True).ok


@pytest.mark.parametrize("looked", ["fork", "s"])
def test_gc_between_looks_at_a_fork_and_at_its_origin(path, opened, looked):
    """What is seen of the one is older than what is seen of the other: no checkpoint is missing."""
    store, other = opened(), opened()
    session = store.session("s")
    for n in range(4):
        session.save({"n": n})
    fork = session.fork("fork", at="@~1")
    fork.append("log", 1)
    session.delete("@~1")
    with store._repository.reader() as reader:
        numbers = {name: lineage.find_session(reader, name) for name in ("s", "fork")}
    at = Address(numbers["fork"], 1)
    with store._repository.reader() as reader:
        reader.head(numbers[looked])
        assert other.gc().checkpoints == 1
        assert [record.damaged for _, record in lineage.ancestors(reader, at)] == [None] * 3
        if looked == "fork":
            assert reader.grafts(at.session, 1, 1) == reader.grafts(at.session, 0, 9) != []
            assert at in reader.grafts_below(numbers["s"])


def test_forks_of_what_gc_has_removed(path, opened):
    store = opened()
    known = filled(store, "origin")
    fork = store.session("origin").fork("fork")
    grandchild = fork.fork("grandchild")
    store.session("origin").delete()
    fork.delete()
    store.gc()
    store.gc()
    store = opened()
    assert [info.name for info in store.sessions()] == ["grandchild"]
    assert store.session("grandchild").load()["log"][-1] == f"{max(known.values()) - 1} {ITEM}"
    assert store.verify(read_data=True).ok
    filled(store, "origin")
    loads(store, filled(store, "fork"), "fork")
    assert store.verify(read_data=True).ok
    grandchild = store.session("grandchild")
    grandchild.delete()
    store.gc()
    store.gc()
    assert len(os.listdir(path / "sessions")) == 2


def test_names_that_a_killed_process_has_made_become_durable(path, opened, monkeypatch):
    """Whoever builds on them syncs the folders that they are in, once."""
    killed = opened()  # with durability="normal", so nothing of it is synced
    filled(killed)
    killed.session("s").patch(set={"big": "x" * 9000})
    store = opened(durability="full")
    synced: list[Path] = []
    monkeypatch.setattr(fs, "sync", lambda path: synced.append(Path(path)))
    session = store.session("s")
    session.append("log", f"23 {ITEM}")
    session.save({**session.load(), "again": ["x" * 9000]})  # shares the blob
    folder = path / "sessions" / "s"
    assert {folder, folder / "streams", path / "blobs"} <= set(synced)
    blob = next((path / "blobs").rglob("*.json"))
    assert blob.parent in synced
    synced.clear()
    session.append("log", "more")
    assert not {folder, folder / "streams", path / "blobs"} & set(synced)


def test_what_a_failed_attempt_has_left_is_replaced_and_not_overwritten(path, opened):
    """A checkpoint whose line was taken back may be open in somebody's hands."""
    session = opened().session("s")
    session.save({"log": ["one"]})
    left = path / "sessions" / "s" / "checkpoints" / "000002.json"
    left.write_text("of an attempt that failed, and longer than what comes in its place" * 99)
    with left.open() as reading:
        session.save({"log": ["two"]})
        assert "attempt" in reading.read()
    assert opened().session("s").load() == {"log": ["two"]}
    assert sorted(file.name for file in left.parent.iterdir()) == ["000001.json", "000002.json"]


def test_hints_that_cannot_be_written_fail_no_save(path, opened):
    store = opened()
    known = filled(store)
    for hint in (path / "version", path / "sessions" / "s" / "head"):
        hint.unlink()
        hint.mkdir()
    known[store.session("s").append("log", f"23 {ITEM}").id] = 24
    loads(opened(), known)


# -- damage ----------------------------------------------------------------------------------------


def test_a_lost_log_is_damage_and_not_a_missing_session(path, opened):
    store = opened()
    known = filled(store)
    folder = path / "sessions" / "s"
    (folder / "log.jsonl").unlink()
    store = opened()
    with pytest.raises(Corrupt):
        store.session("s").load()
    with pytest.raises(Corrupt):
        store.session("s").save({})
    assert any("log.jsonl" in problem.what for problem in store.verify().problems)
    filled(store, "gone")
    store.session("gone").delete()
    store.gc()
    store.repair()
    known[store.session("s").append("log", f"23 {ITEM}").id] = 24
    loads(opened(), known)


def test_gc_keeps_what_it_does_not_know(path, opened):
    store = opened()
    filled(store)
    filled(store, "gone")
    folder = path / "sessions" / "s"
    kept = {each: each.read_bytes() for each in folder.rglob("*.json*")}
    for name in ("log.jsonl", "session.json"):
        (folder / name).unlink()
        del kept[folder / name]
    store = opened()
    assert any("the folder s " in problem.what for problem in store.verify().problems)
    store.session("gone").delete()
    with pytest.raises(Corrupt, match="the folder s "):
        store.gc()
    backend(store).compact()
    assert {each: each.read_bytes() for each in folder.rglob("*.json*")} == kept


@pytest.mark.parametrize("line", range(-5, 0))
def test_a_damaged_line_of_the_log_costs_no_items(path, opened, line):
    """Though it tells how far they go."""
    store = opened()
    known = filled(store)
    store.session("s").tag(next(iter(known)), "t")
    log = path / "sessions" / "s" / "log.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    lines[line] = lines[line].replace(b'"n"', b'"m"')
    log.write_bytes(b"".join(lines))
    store = opened()
    store.repair()
    loads(store, known)
    session = store.session("s")
    session.append("log", f"{len(session.load()['log'])} {ITEM}")
    session.save({"log": [*session.load()["log"], "x"]})
    loads(opened(), known)


@pytest.mark.parametrize("shown", ["null", "7", '"x"', json.dumps(["0"] * 24), '{"a":1}', "["])
def test_a_record_that_lies_about_its_id_harms_no_others(path, opened, shown):
    """It is asked when its line in the log is damaged."""
    store = opened()
    known = filled(store)
    folder = path / "sessions" / "s"
    log = folder / "log.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(b'"n"', b'"m"')
    log.write_bytes(b"".join(lines))
    record = folder / "checkpoints" / "000002.json"
    record.write_bytes(re.sub(rb'"id": "\w+"', b'"id": ' + shown.encode(), record.read_bytes()))
    del known[[*known][1]]
    loads(opened(), known)
    assert not opened().verify().ok


@pytest.mark.parametrize("number", [b"1", b"900", b"5"])
def test_a_damaged_number_of_an_item_hides_no_others(path, opened, number):
    store = opened()
    known = filled(store)
    [stream] = (path / "sessions" / "s" / "streams").iterdir()
    sound = stream.read_bytes()
    damaged = sound.replace(b'{"n":3,', b'{"n":' + number + b",")
    stream.write_bytes(damaged)
    store = opened()
    with pytest.raises(Corrupt):
        store.session("s").load()
    with store._repository.reader() as reader:
        found = [n for n, _ in reader.items(int(stream.stem), 0, 23)]
    assert [n for n in found if n != 3] == [n for n in range(23) if n != 3]
    session = store.session("s")
    known[session.append("log", f"23 {ITEM}").id] = 24
    stream.write_bytes(stream.read_bytes().replace(b'{"n":' + number + b",", b'{"n":3,', 1))
    if number == b"900":  # nothing that was damaged was lost on top of it
        loads(opened(), known)


HUGE = 10**15
RESTS: list[dict[str, Any]] = [
    {"n": HUGE}, {"n": 10**17}, {"n": 10**18}, {"n": 5, "dropped": [[1, HUGE]]},
    {"n": 5, "dropped": [[0, 1], [HUGE, 2 * HUGE], [3, HUGE]]}, {"n": 5, "dropped": [[-HUGE, 9]]},
    {"n": 5, "dropped": [[1, 1e300]]}, {"n": 5, "dropped": 7}, {"n": 5, "checkpoint": ["../x", ""]},
    {"n": 5, "streams": [["x", 1]]}, {"n": 5, "streams": [[1, None]]}, {"n": 5, "journal": HUGE},
]  # fmt: skip


@pytest.mark.parametrize("rest", RESTS, ids=str)
def test_made_up_numbers_of_a_log_cost_no_memory(path, opened, rest):
    known = filled(opened())
    log = path / "sessions" / "s" / "log.jsonl"
    with log.open("ab") as file:
        file.write(row_json.seal_line(rest["n"], rest))
    (path / "sessions" / "s" / "head").write_bytes(files_log.hint(HUGE))
    store = opened()
    store.verify()
    store.repair()
    loads(store, known)
    known[store.session("s").append("log", f"23 {ITEM}").id] = 24
    loads(opened(), known)
    store.gc()
    loads(opened(), known)


def test_after_the_last_number_no_line_is_acknowledged(path, opened):
    known = filled(opened())
    with (path / "sessions" / "s" / "log.jsonl").open("ab") as file:
        file.write(row_json.seal_line(10**18 - 1, {"n": 10**18 - 1}))
    with pytest.raises(Corrupt, match="no line can come"):
        opened().session("s").append("log", ITEM)
    loads(opened(), known)


@pytest.mark.parametrize("rest", [
    {"n": HUGE, "entries": []}, {"n": HUGE, "entries": [[]]}, {"n": 9}, {"n": 9, "entries": 7},
], ids=str)  # fmt: skip
def test_made_up_numbers_of_a_journal_cost_no_memory(path, opened, rest):
    store = opened()
    with store.session("s").run() as run:
        run.step("one", int)
    folder = path / "sessions" / "s"
    with (folder / "journal.jsonl").open("ab") as file:
        file.write(row_json.seal_line(rest["n"], rest))
    (folder / "journal").write_bytes(files_log.hint(HUGE))
    store = opened()
    assert not store.verify().ok
    assert store.stats()
    with pytest.raises(Corrupt):
        list(store.session("s").pending())


def test_runs_of_numbers():
    draw = random.Random(7)
    for _ in range(300):
        runs, others = [
            [(low := draw.randrange(20), low + draw.randrange(6)) for _ in range(draw.randrange(5))]
            for _ in range(2)
        ]
        left = [n for low, end in intervals.outside(runs, others) for n in range(low, end)]
        gone = {n for low, end in others for n in range(low, end)}
        assert left == [n for low, end in runs for n in range(low, end) if n not in gone]


def test_a_damaged_hint_harms_nothing(path, opened):
    store = opened()
    known = filled(store)
    head = path / "sessions" / "s" / "head"
    sound = head.read_bytes()
    for place in range(len(sound)):
        for bit in range(8):
            head.write_bytes(flip(sound, place, bit))
            loads(opened(), {max(known): known[max(known)]})
    for text in (b"", b"99", b"nonsense", b"\0" * 26, b"9" * 26):
        head.write_bytes(text)
        store = opened()
        loads(store, known)
        assert store.verify(read_data=True).ok


def test_line_ends_that_a_tool_has_converted(path, opened):
    """As git does where core.autocrlf is set."""
    store = opened()
    known = filled(store)
    session = store.session("s")
    for n in range(9):
        session.tag(session.save({"big": ["x" * 9000], "n": n}).id, f"t{n}")
    with session.run() as run:
        run.step("one", int)
    store.close()
    for file in path.rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))
    store = opened()
    assert [info.name for info in store.sessions()] == ["s"]
    assert store.verify(read_data=True).ok
    loads(store, known)
    session = store.session("s")
    assert session.get("tag:t8").seq == 13
    for n in range(8):
        session.delete(f"tag:t{n}")
    session.rewind(max(known))
    known[session.append("log", f"23 {ITEM}").id] = 24
    with session.run() as run:
        run.step("two", int)
    store.gc()
    store = opened()
    loads(store, known)
    assert store.verify(read_data=True).ok
    assert len(list(store.session("s").pending())) == 0
    store.session("new").save({})


def test_a_session_that_cannot_be_told_is_not_begun_anew(path, opened):
    filled(opened())
    folder = path / "sessions" / "s"
    for name in ("log.jsonl", "session.json"):
        (folder / name).rename(path.parent / name)
    for act in (
        lambda store: store.session("s").save({}),
        lambda store: store.session("s").load(),
        lambda store: store.session("s").exists(),
        lambda store: store.session("other").fork("s"),
    ):
        store = opened()
        store.session("other").save({})
        with pytest.raises(Corrupt, match="sessions/s has checkpoints"):
            act(store)
    (path.parent / "log.jsonl").rename(folder / "log.jsonl")
    assert len(opened().session("s").load()["log"]) == 23


def test_a_damaged_identity_is_told_and_asked_of_the_log(path, opened):
    store = opened()
    known = filled(store)
    file = path / "sessions" / "s" / "session.json"
    sound = file.read_bytes()
    for place in range(0, len(sound), 3):
        file.write_bytes(flip(sound, place, place % 8))
        store = opened()
        loads(store, {max(known): known[max(known)]})
        assert [p.what for p in store.verify().problems] == ["s/session.json is damaged or missing"]
        store.close()


def test_a_deleted_session_does_not_come_back_with_a_damaged_line(path, opened):
    store = opened()
    filled(store)
    store.session("s").delete()
    log = path / "sessions" / "s" / "log.jsonl"
    log.write_bytes(log.read_bytes().replace(b'"create"', b'"crEate"', 1))
    assert not opened().session("s").exists()


def test_a_store_without_its_marker_is_not_made_anew(path, opened):
    filled(opened())
    (path / "holdfast.json").unlink()
    (path / "version").unlink()
    for options in ({}, {"create": False}, {"read_only": True}):
        with pytest.raises(Corrupt, match=r"holdfast\.json"):
            opened(**options)


@pytest.mark.parametrize("text", [None, b"", b"{}", b"[]", b'{"session":[],"stream":[]}'])
def test_counters_that_are_lost_are_counted_anew(path, opened, text):
    store = opened()
    known = filled(store)
    counters = path / "counters.json"
    counters.unlink()
    if text is not None:
        counters.write_bytes(text)
    store = opened()
    loads(store, known)
    assert any("counters.json" in problem.what for problem in store.verify().problems)
    with pytest.raises(Corrupt, match=r"counters\.json"):
        store.session("new").save({})
    store.repair()
    loads(store, filled(store, "new"), "new")
    loads(store, known)
    assert store.verify(read_data=True).ok


def test_older_counters_give_no_number_again(path, opened):
    """A backup was put back over newer sessions, as by cp, rsync or a checkout in git."""
    opened().session("old").save({"n": 1})
    older = (path / "counters.json").read_bytes()
    saved = {name: {"log": [f"{name} {n} {ITEM}" for n in range(20)]} for name in ("ann", "old")}
    opened().session("ann").save(saved["ann"])
    made_up = path / "sessions" / "ann" / "streams" / f"{'9' * 12}.jsonl"
    made_up.write_text("")  # nobody has counted so far, nor can anybody go on from there
    (path / "counters.json").write_bytes(older)
    store = opened()
    assert store.session("ann").load() == saved["ann"]
    store.session("old").save(saved["old"])
    store.session("bob").save({"n": 2})
    for again in (store, opened()):
        assert {name: again.session(name).load() for name in saved} == saved
        assert again.session("bob").load() == {"n": 2}
        assert again.verify(read_data=True).ok


def test_a_number_that_is_taken_is_not_written_to(path, opened):
    """Who had reserved it when the counters were put back."""
    store = opened()
    known = filled(store, "ann")
    loads(store, known, "ann")
    [stream] = (path / "sessions" / "ann" / "streams").iterdir()
    with store._repository.reader() as reader:
        number = reader.session(b"ann")[0]
    store._repository._numbers["session"] = (number, 1)
    with pytest.raises(Corrupt, match=r"taken by .*ann"):
        store.session("bob").save({})
    store.session("bob").save({"n": 1})
    store._repository._numbers["stream"] = (int(stream.stem), 1)
    with pytest.raises(Corrupt, match=r"taken by .*ann"):
        store.session("bob").save({"n": 1, "log": [f"{n} {ITEM}" for n in range(20)]})
    loads(store, filled(store, "carl"), "carl")
    for again in (store, opened()):
        loads(again, known, "ann")
        assert again.session("bob").load() == {"n": 1}
        assert again.verify(read_data=True).ok


def test_numbers_are_durable_when_they_are_given(opened, monkeypatch):
    """Even where a commit is not: the same number must not be given again after a power loss."""
    synced = []
    sync = fs.sync_handle

    def counted(handle):
        synced.append(handle)
        sync(handle)

    monkeypatch.setattr(fs, "sync_handle", counted)
    store = opened(durability="normal")
    synced.clear()
    store._repository.backend.reserve("stream", 1)
    assert len(synced) == 2


# -- many sessions ---------------------------------------------------------------------------------


def test_a_new_session_reads_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with holdfast.open(f"files:{tmp_path}/s", create=True, durability="normal") as store:
        assert isinstance(store._repository.backend, FilesBackend)
        catalog = store._repository.backend._home.catalog
        read, scanned = Mock(wraps=files_catalog._identify), Mock(wraps=catalog._scan)
        monkeypatch.setattr(files_catalog, "_identify", read)
        monkeypatch.setattr(catalog, "_scan", scanned)
        for i in range(40):
            store.session(f"s{i}").append("m", i)
        assert read.call_count == 40
        assert scanned.call_count < 6
        store.session("s3").delete()
        store.gc()
        assert scanned.call_count < 20


def test_others_see_a_session_made_within_one_tick(tmp_path: Path) -> None:
    """The time of a folder does not tell it: that of many file systems goes in steps of 4 ms."""
    url = f"files:{tmp_path}/s"
    folder = tmp_path / "s" / "sessions"
    with holdfast.open(url, create=True) as one, holdfast.open(url) as other:
        other.session("mine").append("m", 0)
        before = folder.stat().st_mtime_ns
        one.session("new").append("m", 1)
        os.utime(folder, ns=(before, before))
        assert other.session("new").load() == {"m": [1]}
        before = folder.stat().st_mtime_ns
        one.session("new").delete()
        one.gc()
        one.session("new").append("m", 2)
        os.utime(folder, ns=(before, before))
        assert other.session("new").load() == {"m": [2]}


def test_a_new_lease_is_never_taken_for_an_old_one(opened, monkeypatch):
    """Between its line in the log and the note of its time nobody may find it."""
    store, other = opened(), opened()
    filled(store)
    log = store_folder.StoreFolder.log
    ages = []

    def watched(self, ledger, line):
        log(self, ledger, line)
        if "lease" in line.entry:
            with other._repository.reader() as reader:
                ages.append(reader.lease(ledger.number).age)

    monkeypatch.setattr(store_folder.StoreFolder, "log", watched)
    with store.session("s").run():
        pass
    assert len(ages) == 2
    assert max(ages) < 60


# -- beside others ---------------------------------------------------------------------------------


def test_a_backup_beside_a_run_misses_no_entry(path, opened, monkeypatch):
    """What the hint tells of has to be in the journal that is copied."""
    store, known = opened(), files_journal.last_known
    with opened().session("s").run() as run:
        run.step("first", int)

        def late(ledger):
            run.step("second", int)
            return known(ledger)

        with monkeypatch.context() as patch:
            patch.setattr(files_journal, "last_known", late)
            assert store.backup(path.parent / "backup").ok
    with holdfast.open(f"files:{path.parent / 'backup'}") as copy:
        assert [call.name for call in copy.session("s").calls()] == ["first", "second"]


def test_drafts_of_blobs_that_a_crash_has_left_go_at_once(path, opened):
    """No save writes a blob while gc looks: both take a lock."""
    store = opened()
    store.session("s").save({"big": ["x" * 9000]})
    blob = next((path / "blobs").rglob("*.json"))
    drafts = [blob.with_name(f"{fs.TEMPORARY}{n}") for n in range(2)]
    for draft in drafts:
        draft.write_bytes(b"")
    store.gc()
    assert not any(draft.exists() for draft in drafts)
    assert store.session("s").load() == {"big": ["x" * 9000]}


def test_a_lock_is_given_up_though_a_child_has_a_copy(tmp_path, monkeypatch):
    """As one has that was forked before its file was known."""
    held, lock = fs._held, tmp_path / "lock"
    ours, theirs = os.pipe()
    children: list[int] = []

    class Forking:
        def add(self, file):
            if not children:
                children.append(os.fork())
                if not children[0]:
                    os.close(theirs)
                    os.read(ours, 1)
                    os._exit(0)
            held.add(file)

        def __iter__(self):
            return iter(held)

        def clear(self):
            held.clear()

    monkeypatch.setattr(fs, "_held", Forking())
    with fs.locked(lock, 0):
        pass
    try:
        with fs.locked(lock, 0):
            pass
    finally:
        os.close(theirs)
        os.waitpid(children[0], 0)
        os.close(ours)


def test_a_child_does_not_give_up_what_its_parent_has_locked(tmp_path):
    lock, child = tmp_path / "lock", 0
    try:
        with fs.locked(lock, 0):
            child = os.fork()
            if child:
                assert os.waitpid(child, 0)[1] == 0
                with pytest.raises(Unavailable), fs.locked(lock, 0):
                    pass
    except BaseException:
        if not child:
            os._exit(1)
        raise
    if not child:
        os._exit(0)


# -- big files -------------------------------------------------------------------------------------


def test_files_that_are_longer_than_one_read(path, opened, monkeypatch):
    """A system gives 2 GiB at most."""
    read = os.pread
    monkeypatch.setattr(os, "pread", lambda handle, size, at: read(handle, min(size, 500), at))
    known = filled(opened(), appends=9)
    with opened().session("s").run() as run:
        for n in range(9):
            run.step(f"step {n}", int)
    for suffix in ("log.jsonl", "journal.jsonl", "streams/2.jsonl"):
        assert (path / "sessions" / "s" / suffix).stat().st_size > 1000
    write = fs.write_all

    def failing(handle, data, at):
        write(handle, data, at)
        raise OSError(errno.EIO, "injected")

    with monkeypatch.context() as patch, pytest.raises(Unavailable):
        patch.setattr(fs, "write_all", failing)
        opened().session("s").label("@", "label")
    with opened().session("s").run() as run:
        run.step("another", int)
    store = opened()
    loads(store, known)
    assert len(store.session("s").calls()) == 10
    assert store.verify(read_data=True).ok
    assert store.backup(path.parent / "backup").ok


# -- reading in pages --------------------------------------------------------------------------


def counted(monkeypatch, module, name: str) -> list[Any]:
    """One entry for each call of a function."""
    calls: list[Any] = []
    real = getattr(module, name)

    def counting(*given: Any) -> Any:
        calls.append(given)
        return real(*given)

    monkeypatch.setattr(module, name, counting)
    return calls


def test_sessions_are_listed_with_one_look_at_each(opened, monkeypatch):
    monkeypatch.setattr(sessions, "_PAGE", 10)
    store = opened(durability="normal")
    for n in range(120):
        store.session(f"s{n * 37 % 120:03}").save(n)
    store.session("s007").delete()
    looks = counted(monkeypatch, files_catalog, "status")
    assert [info.name for info in store.sessions()] == [f"s{n:03}" for n in range(120) if n != 7]
    assert len(looks) <= 3 * 120
    store.session("s007").undo()
    assert [info.name for info in store.sessions(after="s005")][:3] == ["s006", "s007", "s008"]
    other = opened(durability="normal")
    other.session("s0075").save(1)
    assert [info.name for info in store.sessions(after="s005")][:3] == ["s006", "s007", "s0075"]


def test_a_journal_is_read_once_for_all_pages(opened, monkeypatch):
    monkeypatch.setattr(lineage, "PAGE", 20)
    store = opened(durability="normal")
    session = store.session("s")
    with session.run() as run:
        for n in range(100):
            run.step("work", lambda n=n: n)
    parsed = counted(monkeypatch, files_journal, "_entry")
    for read in (session.calls, session.pending, store.verify):
        parsed.clear()
        read()
        assert len(parsed) <= 202
    assert [call.result for call in session.calls()] == [*range(100)]


def test_leases_are_listed_with_one_look_at_each(opened, monkeypatch):
    monkeypatch.setattr(leases, "PAGE", 5)
    store = opened(durability="normal")
    for n in range(60):
        with store.session(f"s{n}").run() as run:
            run.checkpoint()
    looks = counted(monkeypatch, files_journal, "lease_of")
    store.pending()
    assert len(looks) <= 2 * 60
    with store._repository.reader() as reader:
        found = [lease.session for lease in reader.leases(0, 99)]
        assert found == sorted(found)
        assert len(found) == 60
        assert [lease.session for lease in reader.leases(found[-2], 9)] == found[-1:]


@pytest.mark.parametrize("name", ["log.jsonl", "journal.jsonl"])
def test_a_line_with_a_number_of_too_many_digits(tmp_path: Path, name: str) -> None:
    with holdfast.open(f"files:{tmp_path}/store") as store, store.session("s").run() as run:
        run.step("a", lambda: 1)
    [path] = tmp_path.glob(f"store/sessions/*/{name}")
    path.write_bytes(path.read_bytes() + b'{"n":' + b"9" * 5000 + b",\n")
    with holdfast.open(f"files:{tmp_path}/store") as store:
        assert store.session("s").head is not None
        assert [call.name for call in store.session("s").calls()] == ["a"]
