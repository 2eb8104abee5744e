"""Ctrl-C at any line of a backend: what was acknowledged is there, and nothing hangs."""

from __future__ import annotations

import itertools
import linecache
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import holdfast
from holdfast import storage
from holdfast.storage import fs, group_commit, memory
from holdfast.storage.files import session_folders, store_folder
from holdfast.storage.files.log import SessionLog
from holdfast.storage.memory_tables import OrderedRows
from holdfast.storage.postgres.backend import PostgresBackend
from holdfast.storage.sqlite import wal, writer
from holdfast.storage.sqlite.backend import SqliteBackend
from tests.storage.test_group_commit import until
from tests.support.stores import TEXT, Home

FOLDER = str(Path(storage.__file__).parent)


def is_at(frame: FrameType, words: tuple[str, ...]) -> bool:
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return line.lstrip().startswith(words)


WITH = ("with ",)
"""Where a block of `with` begins or ends Python looks for no signals."""


def interrupted(
    n: int, do: Callable[[], Any], where: str = FOLDER, quiet: tuple[str, ...] = WITH
) -> bool:
    """Whether a call was interrupted at the n-th line that it ran in a backend."""
    lines = itertools.count(1)

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(where):
            return None
        if event == "line" and not is_at(frame, quiet) and next(lines) == n:
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        do()
    except KeyboardInterrupt:
        return True
    except holdfast.HoldfastError:
        return False
    finally:
        sys.settrace(None)
    return False


def refused(home: Home) -> Callable[[], Any]:
    """A save whose key is taken: the transaction has begun by then, and is rolled back."""
    session = home.session("keys")
    if not session.exists():
        session.save({"n": 1}, key="k")
    return lambda: session.save({"n": 2}, key="k")


def moved(home: Home) -> Callable[[], Any]:
    late = home.session("moving")
    home.session("moving").save({"n": 1})
    return lambda: late.save({"n": 2})


def saved(home: Home) -> Callable[[], Any]:
    session = home.session("saves")
    return lambda: session.save({"log": [f"{n} {TEXT}" for n in range(9)]}, label="l")


def appended(home: Home) -> Callable[[], Any]:
    session = home.session("appends")
    session.save({"log": [f"{n} {TEXT}" for n in range(9)]})
    session.append("log", "hot")
    return lambda: session.append("log", "hotter")


def loaded(home: Home) -> Callable[[], Any]:
    return home.session().load


WHAT = [refused, moved, saved, appended, loaded]


@pytest.fixture(params=["sqlite", "memory"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Home]:
    home = Home(request.param, tmp_path)
    yield home
    home.give_back()


def ends(do: Callable[[], Any]) -> bool:
    thread = threading.Thread(target=do, daemon=True)
    thread.start()
    thread.join(20)
    return not thread.is_alive()


def acknowledged(home: Home, what: Callable[[Home], Callable[[], Any]]) -> None:
    """Interrupt it everywhere; what others save afterwards must be there for everybody."""
    other, elsewhere = home.session(), home.another()
    other.save({"log": [TEXT] * 9})
    for n in itertools.count(1):
        struck = interrupted(n, what(home))
        for _ in range(2):
            given = other.append("log", f"{n} {TEXT}")
            assert elsewhere.session("s").head == given
        if not struck:
            break
    assert n > 5
    assert home.store.verify(read_data=True).ok
    assert ends(home.close)


@pytest.mark.parametrize("what", WHAT, ids=lambda what: what.__name__)
def test_what_is_acknowledged_after_an_interrupt(
    home: Home, what: Callable[[Home], Callable[[], Any]]
) -> None:
    acknowledged(home, what)


def test_what_gc_leaves_after_an_interrupt(rounds: Any) -> None:
    """All that lives, whole; and nothing is there in part, so the next one frees the rest."""
    log = [f"{n} {TEXT}" for n in range(90)]  # so many that they lie in one row,
    kept = {"log": [*log[:5], *log[20:25]]}  # of which two are left
    for n in itertools.count(1, rounds(3, torture=1)):
        store = holdfast.open("memory:")
        session, gone = store.session("s"), store.session("gone")
        old = session.save({"log": log, "big": TEXT * 99}, tags=["t"], key="k")
        session.save(kept)
        session.delete(old.id)
        gone.save({})
        gone.delete()
        struck = interrupted(n, store.gc, memory.__file__)
        assert session.load() == kept
        assert store.verify(read_data=True).ok
        store.gc()
        assert session.load() == kept
        told = store.stats()
        assert (told.sessions, told.checkpoints, told.deleted) == (1, 1, 0)
        assert not list(store.checkpoints(tag="t"))
        if not struck:
            break
    assert n > 50


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # a connection that is left to the collector
@pytest.mark.parametrize("what", [saved, appended, loaded], ids=lambda what: what.__name__)
def test_no_connection_is_lost_for_good(
    tmp_path: Path, what: Callable[[Home], Callable[[], Any]]
) -> None:
    """At a sample of lines; the pool is of one, without which nobody could go on."""
    home = Home("postgres", tmp_path, pool_size=1, timeout=3.0)
    backend = home.store._repository.backend
    assert isinstance(backend, PostgresBackend)
    other, elsewhere = home.session(), home.another()
    other.save({"log": [TEXT] * 9})
    with ThreadPoolExecutor(1) as thread:

        def is_whole() -> bool:
            thread.submit(home.session().load).result()
            pool = backend._connections.pool
            return not pool._loans and len(pool._idle) == 1

        for n in itertools.count(1, 5):
            # At a `try` no signal is looked for either, and a `with` around it would not notice.
            struck = interrupted(n, what(home), quiet=(*WITH, "try:"))
            given = other.append("log", f"{n} {TEXT}")
            assert elsewhere.session("s").head == given
            until(is_whole)
            if not struck:
                break
    assert n > 20
    assert home.store.verify(read_data=True).ok
    home.give_back()


def test_threads_that_write_the_log_back_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that were just being started when the interrupt struck."""
    monkeypatch.setattr(wal, "_PAGES", 1)  # the first commit asks for it
    before = {*threading.enumerate()}
    for n in itertools.count(1):
        home = Home("sqlite", tmp_path / str(n))
        first = home.session("first")
        struck = interrupted(n, lambda: first.save({}), wal.__file__)  # noqa: B023
        home.session("second").save({})
        time.sleep(0.1)  # until they have nothing to do
        assert ends(home.close)
        for thread in {*threading.enumerate()} - before:
            thread.join(20)
            assert not thread.is_alive()
        if not struck:
            break
    assert n > 10


def test_what_was_interrupted_while_it_waited_never_lands(tmp_path: Path) -> None:
    """The caller was told that it failed, and has looked: so it stays as it is."""
    home = Home("sqlite", tmp_path)
    home.session().save({"log": []})
    for n in itertools.count(1):
        store = home.another()  # one that does not know that it is alone waits in a queue
        session = store.session("s")
        struck = interrupted(n, lambda: session.append("log", n), group_commit.__file__)  # noqa: B023
        told = store.session("s").load()
        store.session("other").save({"n": n})
        assert store.session("s").load() == told
        if not struck:
            break
    assert n > 10
    home.give_back()


def came(ours: Any, theirs: Any) -> Callable[[], Any]:
    theirs.session("new").save({"n": 1})
    return lambda: ours.session("new").load()


def went(ours: Any, theirs: Any) -> Callable[[], Any]:
    theirs.session("gone").save({"n": 1})
    assert ours.session("gone").exists()
    theirs.session("gone").delete()
    theirs.gc()
    return lambda: ours.session("gone").exists()


def made(ours: Any, theirs: Any) -> Callable[[], Any]:
    return lambda: ours.session("made").save({"n": 1})


@pytest.mark.parametrize("what", [came, went, made], ids=lambda what: what.__name__)
def test_what_is_known_of_folders_is_whole(
    tmp_path: Path, what: Callable[..., Any], rounds: Any
) -> None:
    """A session that is there is found, and no second one of its name is made."""
    for n in itertools.count(1, rounds(3, torture=1)):
        home = Home("files", tmp_path / str(n))
        ours, theirs = home.store, home.another()
        ours.session("old").save({"n": 0})
        struck = interrupted(n, what(ours, theirs), session_folders.__file__)
        for name in ("old", "new", "made"):
            there = theirs.session(name).exists()
            assert ours.session(name).exists() == there
            assert ours.session(name).save({"n": 2}).step == 1 + there
        ours.session("gone").save({"n": 2})
        ours.gc()
        assert home.reopened().verify().ok
        assert [info.name for info in home.store.sessions()] == ["gone", "made", "new", "old"]
        home.give_back()
        if not struck:
            break
    assert n > 10


def test_mutant_that_goes_on_in_a_transaction_left_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def careless(self: Any, change: Any) -> None:
        try:
            writer.write(self._writer or self._writing(), self._cursor, change)
        except BaseException:
            self._undo()
            raise

    monkeypatch.setattr(SqliteBackend, "_write_one", careless)
    with pytest.raises((AssertionError, holdfast.HoldfastError)):
        acknowledged(Home("sqlite", tmp_path), refused)


def test_mutant_that_frees_half(monkeypatch: pytest.MonkeyPatch, rounds: Any) -> None:
    monkeypatch.setattr(memory, "_repeatable", lambda do, *given: do(*given))
    with pytest.raises((AssertionError, KeyError, holdfast.HoldfastError)):
        test_what_gc_leaves_after_an_interrupt(rounds)


def test_an_interrupt_leaves_no_lock(sqlite: Home) -> None:
    class Interrupt(BaseException):
        pass

    def interrupt(*_: Any) -> None:
        raise Interrupt

    session = sqlite.session()
    rng, interrupts = random.Random(1), 0
    patience, _ = signal.getitimer(signal.ITIMER_REAL)  # of the test runner
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        while interrupts < 150:
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(5e-5, 1e-3))
                while True:
                    session.save({"n": interrupts})
            except Interrupt:
                interrupts += 1
                session.refresh()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, patience)
    sqlite.session("another").save({})
    assert sqlite.store.verify(read_data=True).ok


def interrupt_next_call(patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """Let the next call of a function be interrupted."""
    real = getattr(owner, name)

    def interrupt(*args: Any, **more: Any) -> Any:
        patch.setattr(owner, name, real)
        raise KeyboardInterrupt

    patch.setattr(owner, name, interrupt)


MOMENTS = [
    ("memory", OrderedRows, "replace", None), ("files", SessionLog, "_write", None),
    ("files", SessionLog, "_write", "label"), ("files", OrderedRows, "put", "label"),
    ("files", store_folder.StoreFolder, "tell", None), ("files", fs.Batch, "put", None),
    ("files", fs, "write_all", None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "owner", "name", "label"), MOMENTS, ids=lambda part: getattr(part, "__name__", part)
)
def test_an_interrupted_save_happened_or_not(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    owner: Any,
    name: str,
    label: str | None,
) -> None:
    home = Home(kind, tmp_path)
    session, log = home.session(), [f"{n} {TEXT}" for n in range(9)]
    session.save({"log": log})
    interrupt_next_call(monkeypatch, owner, name)
    with pytest.raises(KeyboardInterrupt):
        session.append("log", TEXT, label=label)
    monkeypatch.undo()
    for store in (home.store, home.another()):
        assert store.session("s").load()["log"] in (log, [*log, TEXT])
    session.refresh()
    for n in range(3):
        session.append("log", n)
    for reopen in (lambda: home.store, home.reopened):
        found = reopen().session("s").load()["log"]
        assert (found[:9], found[-3:]) == (log, [0, 1, 2])
        assert home.store.verify().ok
    home.give_back()
