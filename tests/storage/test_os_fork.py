"""A store goes on in both processes after os.fork(), whatever other threads were doing."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
import traceback
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.errors import InvalidRequest
from holdfast.storage.reader import open_reader
from holdfast.storage.sqlite import backend as sqlite_backend
from tests.storage.test_interrupts import interrupted
from tests.support.stores import Home

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def in_child(work: Callable[[], object]) -> int:
    """The exit status of a forked child that does `work` within ten seconds."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    for _ in range(1000):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return -1


def save(store: holdfast.Store, name: str) -> None:
    store.session(name).save({"name": name})


def test_both_go_on(tmp_path: Path) -> None:
    with holdfast.open(tmp_path / "store.db") as store:
        mine, theirs = store.session("parent"), store.session("child")
        mine.append("log", 1)
        theirs.append("log", 1)

        def work() -> None:
            for n in range(40):
                theirs.append("log", {"n": n, "text": "x" * 300})
                store.session(f"new {n}").save({"n": n})

        assert in_child(work) == 0
        for n in range(40):
            mine.append("log", {"n": n, "text": "y" * 300})
            store.session(f"newer {n}").save({"n": n})
        theirs.refresh()
        assert len(theirs.load()["log"]) == 41
        assert len(mine.load()["log"]) == 41
        assert store.verify().ok


def test_what_the_child_saves_outlives_the_parents_close(tmp_path: Path) -> None:
    """The last to close removes the log: else a child without a real lock would write to it."""
    path = tmp_path / "store.db"
    store = holdfast.open(path)
    session = store.session("s")
    session.append("log", 0)
    ready, go = os.pipe()

    def work() -> None:
        os.close(go)
        os.read(ready, 1)  # until the parent has closed the store
        for n in range(1, 6):
            session.append("log", n)

    def close() -> None:
        store.close()
        os.close(go)

    waiting = threading.Timer(0.2, close)
    waiting.start()
    assert in_child(work) == 0
    waiting.join()
    os.close(ready)
    with holdfast.open(path) as again:
        assert again.session("s").load() == {"log": [0, 1, 2, 3, 4, 5]}


def test_one_handle_in_both_is_a_conflict(tmp_path: Path) -> None:
    with holdfast.open(tmp_path / "store.db") as store:
        session = store.session("s")
        session.append("log", 1)
        assert in_child(lambda: session.append("log", "child")) == 0
        with pytest.raises(holdfast.HeadMoved):
            session.append("log", "parent")
        assert session.load() == {"log": [1, "child"]}


@pytest.mark.parametrize("url", ["memory:", "store.db"])
def test_locks_of_other_threads_do_not_hold_the_child(tmp_path: Path, url: str) -> None:
    with holdfast.open(url if url == "memory:" else tmp_path / url) as store:
        session = store.session("s")
        session.save({"n": 0})
        held, done = threading.Event(), threading.Event()

        def hold() -> None:
            locks: list[Any] = [
                session._lock,
                store._repository._lock,
                store._repository.images._lock,
            ]
            for lock in locks:
                lock.acquire()
            held.set()
            done.wait()
            for lock in locks:
                lock.release()

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        try:
            status = in_child(lambda: session.save({"n": 1}))
        finally:
            done.set()
            thread.join()
        assert status == 0


def test_forking_while_threads_write(tmp_path: Path) -> None:
    with holdfast.open(tmp_path / "store.db", durability="normal") as store:
        stop = threading.Event()
        counts: dict[str, int] = {}

        def write(thread: str) -> None:
            for n in itertools.count():
                if stop.is_set():
                    break
                if n % 50 == 0:  # loading one long log would take most of the time
                    name = f"{thread} {n // 50}"
                    session = store.session(name)
                session.append("log", {"n": n, "text": "z" * 200})
                counts[name] = counts.get(name, 0) + 1
                session.load()

        threads = [threading.Thread(target=write, args=(f"t{n}",)) for n in range(3)]
        for thread in threads:
            thread.start()
        try:
            for n in range(15):
                assert in_child(partial(save, store, f"c{n}")) == 0
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        for name, count in counts.items():
            assert len(store.session(name).load()["log"]) == count
        assert {f"c{n}" for n in range(15)} <= {i.name for i in store.sessions()}
        assert store.verify().ok


def ends(work: Callable[[], object]) -> bool:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(20)
    return not thread.is_alive()


CALLERS: dict[str, Callable[[holdfast.Store, Path, Any], object]] = {
    "gc": lambda store, path, tell: store.gc(tell),
    "copy": lambda store, path, tell: store.copy(holdfast.open("memory:"), progress=tell),
    "export": lambda store, path, tell: store.export(path / "copy.jsonl", progress=tell),
}


@pytest.mark.parametrize("do", ["fork", "close"])
@pytest.mark.parametrize("what", CALLERS)
def test_who_reads_does_not_wait_for_himself(tmp_path: Path, what: str, do: str) -> None:
    """Whoever is called back while the store is read: that ends, and both processes go on."""
    store = holdfast.open(tmp_path / "store.db")
    save(store, "s")
    told: list[str] = []

    def back(*_: Any) -> None:
        if do == "close":
            store.close()
        else:
            assert in_child(partial(save, store, "child")) == 0

    def work() -> None:
        with pytest.raises(holdfast.InvalidRequest) as raised:
            CALLERS[what](store, tmp_path, back)
        told.append(raised.value.message)

    assert ends(work)
    assert told[0].startswith(("the process was forked, or", "the store is closed"))
    store.close()
    with holdfast.open(tmp_path / "store.db") as again:
        save(again, "s")
        assert len([*again.sessions()]) == (2 if do == "fork" else 1)
        assert again.verify().ok


def test_threads_that_fork_at_once(tmp_path: Path) -> None:
    """Each lets go of what it has locked, and of nothing else."""
    stores = [holdfast.open(tmp_path / f"{n}.db", durability="normal") for n in range(4)]

    def fork() -> None:
        for _ in range(50):
            pid = os.fork()
            if not pid:
                os._exit(0)
            os.waitpid(pid, 0)

    threads = [threading.Thread(target=fork, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    for store in stores:
        assert ends(partial(save, store, "s"))
        store.close()


def test_an_interrupt_while_it_forks(tmp_path: Path) -> None:
    """Python drops it; but no lock stays behind, and no connection crosses to the child."""
    told = list[Any]()
    before, sys.unraisablehook = sys.unraisablehook, told.append
    try:
        for n in itertools.count(1):
            store = holdfast.open(tmp_path / f"{n}.db", durability="normal")
            save(store, "s")
            backend: Any = store._repository.backend
            pids = list[int]()
            struck = interrupted(n, lambda: pids.append(os.fork()), sqlite_backend.__file__)  # noqa: B023
            if not pids[0]:
                os._exit(backend._writer is not None)
            assert os.waitstatus_to_exitcode(os.waitpid(pids[0], 0)[1]) == 0
            assert ends(partial(save, store, "s"))
            assert ends(store.gc)
            assert ends(store.close)
            if not struck and not told:
                break
            told.clear()
        assert n > 20
    finally:
        sys.unraisablehook = before


@pytest.mark.parametrize("then", ["fork", "close"])
def test_fork_and_close_wait_for_readers_that_write(sqlite: Home, then: str) -> None:
    backend = sqlite.store._repository.backend
    inside, go, failed = threading.Event(), threading.Event(), list[BaseException]()

    def read_and_write() -> None:
        try:
            with open_reader(backend):
                inside.set()
                go.wait(20)
                time.sleep(0.05)  # by now the other one waits
                backend.reserve("stream", 1)
        except InvalidRequest as e:
            failed.append(e)

    thread = threading.Thread(target=read_and_write, daemon=True)
    thread.start()
    assert inside.wait(20)
    go.set()
    if then == "close":
        sqlite.store.close()
    elif (child := os.fork()) == 0:
        os._exit(0)
    else:
        os.waitpid(child, 0)
    thread.join(20)
    assert not thread.is_alive()
    assert not failed or then == "close"
