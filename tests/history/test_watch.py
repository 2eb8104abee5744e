"""What lands is told, once, in order, across handles, threads and processes."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import pytest

import holdfast
from holdfast.history.watch import Watcher
from tests.support.stores import Home

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def store(home: Home) -> holdfast.Store:
    return home.store


def kinds(events: list[holdfast.Checkpoint | holdfast.Operation]) -> list[str]:
    return [e.operation if isinstance(e, holdfast.Checkpoint) else e.kind for e in events]


def test_everything_is_told_once_and_in_order(store: holdfast.Store) -> None:
    session = store.session("s")
    session.save({"n": 0})
    watcher = Watcher(store._repository.backend, "s")
    assert watcher.poll() == []
    saved = [session.save({"n": 1}), session.append("log", 1)]
    session.tag(None, "t")
    saved.append(session.save({"n": 2}))
    session.undo()
    events = watcher.poll()
    assert kinds(events) == ["save", "append", "tag", "save", "undo"]
    assert [e for e in events if isinstance(e, holdfast.Checkpoint)] == saved
    assert watcher.poll() == []
    store.session("other").save({})
    assert watcher.poll() == []
    session.delete()
    session.undo()
    assert kinds(watcher.poll()) == ["delete", "undo"]


def test_a_whole_store(store: holdfast.Store) -> None:
    watcher = Watcher(store._repository.backend)
    for n in range(3):
        store.session(f"s{n}").save({"n": n})
    store.session("s1").fork("f").save({})
    events = watcher.poll()
    assert kinds(events) == ["fork", "save", "save", "save", "save"]
    assert [e.session for e in events] == ["f", "f", "s0", "s1", "s2"]


def test_a_session_that_is_not_there_yet(store: holdfast.Store) -> None:
    watcher = Watcher(store._repository.backend, "new")
    first = store.session("new").save({})
    assert watcher.poll() == [first]


def test_following_ends(store: holdfast.Store) -> None:
    session = store.session("s")
    assert list(session.watch(interval=0.001, patience=0.005)) == []
    seen: list[holdfast.Checkpoint | holdfast.Operation] = []
    ready = threading.Event()

    def follow() -> None:
        events = store.watch(interval=0.001)
        ready.set()
        seen.extend(events)

    thread = threading.Thread(target=follow)
    thread.start()
    ready.wait()
    saved = [session.save({"n": n}) for n in range(20)]
    while len(seen) < 20:
        thread.join(0.001)
    store.close()
    thread.join()
    assert seen == saved


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_another_process(tmp_path: Path) -> None:
    with holdfast.open(tmp_path / "store.db") as store:
        watcher = Watcher(store._repository.backend)
        child = os.fork()
        if not child:
            with holdfast.open(tmp_path / "store.db") as mine:
                for n in range(5):
                    mine.session("s").save({"n": n})
            os._exit(0)
        os.waitpid(child, 0)
        assert [store.session("s").load(e.id) for e in watcher.poll()] == [  # type: ignore[union-attr]
            {"n": n} for n in range(5)
        ]


def test_nothing_new_reads_nothing(store: holdfast.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.session("s").save({})
    watcher = Watcher(store._repository.backend)
    monkeypatch.setattr(type(store._repository.backend), "view", lambda _: pytest.fail("it looked"))
    for _ in range(10):
        assert watcher.poll() == []
