"""Threads, processes and tasks that change one session at once lose nothing of each other."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
from contextlib import suppress

import pytest

import holdfast
from holdfast.errors import HeadMoved, InvalidRequest
from tests.support.sessions import found_seqs, run_together, save_concurrently
from tests.support.stores import Home


def test_a_late_save_does_not_move_the_head_back(home):
    home.filled(2)
    late, early = home.session(), home.another().session("s")
    newest = early.save({"i": "newest"})
    with pytest.raises(HeadMoved) as caught:
        late.save({"i": "late"})
    assert caught.value.actual == newest.id
    assert caught.value.expected == newest.parent
    assert home.reopened().session("s").load() == {"i": "newest"}


def test_concurrent_saves_form_one_line(home):
    won = save_concurrently(home, writers=8, saves=6)
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


def test_concurrent_saves_really_conflict(home):
    """The race is one: handles run into each other's saves."""
    real, moved = holdfast.Session.refresh, itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(holdfast.Session, "refresh", lambda self: (next(moved), real(self))[1])
        save_concurrently(home, writers=8, saves=6)
    assert next(moved) > 8  # one for each new handle, and one for each lost race


def test_one_first_save_wins(home):
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


def test_two_processes_lose_nothing_of_each_other(tmp_path):
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


def test_concurrent_undos_take_back_one_each(home: Home) -> None:
    home.filled(12)
    handles = [store.session("s") for store in [home.store, home.another()] * 4]
    run_together(*[handle.undo for handle in handles])
    session = home.reopened().session("s")
    assert session.load()["i"] == 3
    undone = sorted(op.details["undid"][1] for op in session.operations())
    assert undone == list(range(5, 13))


def test_concurrent_tags_are_all_kept(home: Home) -> None:
    home.filled(1)
    handles = [store.session("s") for store in [home.store, home.another()] * 4]
    run_together(*[lambda n=n, h=h: h.tag("@", f"t{n}") for n, h in enumerate(handles)])
    session = home.reopened().session("s")
    assert session.get().tags == tuple(f"t{n}" for n in range(8))
    assert [op.number for op in session.operations()] == list(range(1, 9))
    for n in range(8):
        assert found_seqs(home, tag=f"t{n}") == [1]


def test_concurrent_awaited_saves_form_one_line(home: Home) -> None:
    async def work() -> list[str]:
        async with holdfast.aopen(home.url, durability="normal", **home.options) as store:
            if not home.durable:
                store.sync._repository.backend = home.store._repository.backend

            async def save(n: int) -> str:
                session = await store.session("s")
                while True:
                    await asyncio.sleep(0)
                    with suppress(HeadMoved):
                        return (await session.save({"by": n})).id
                    await session.refresh()

            return await asyncio.gather(*map(save, range(8)))

    won = asyncio.run(work())
    if not home.durable:
        home.store._repository.backend._closed = False  # type: ignore[attr-defined]
    session = home.reopened().session("s")
    assert {c.id for c in session.history()} == set(won)
    assert [c.step for c in session.history()] == list(range(8, 0, -1))
    assert sorted(session.load(id)["by"] for id in won) == list(range(8))


def test_a_late_redo_does_not_move_the_head(home: Home) -> None:
    session, other = home.filled(3), home.another().session("s")
    undone = session.get()
    session.undo()
    other.refresh()
    newest = other.save({"i": "newest"})
    with pytest.raises(InvalidRequest, match="nothing to redo"):
        session.redo()
    assert home.reopened().session("s").head == newest
    assert home.session().load(undone)["i"] == 2  # what was undone is not overwritten
    assert [c.step for c in home.session().tree()] == [1, 2, 3, 3]


def test_a_late_save_after_an_operation_is_refused(home: Home) -> None:
    for operation in ("undo", "delete"):
        session, late = home.filled(3, operation), home.another().session(operation)
        getattr(session, operation)()
        with pytest.raises(HeadMoved):
            late.save({"i": "late"})
    assert home.session("undo").load()["i"] == 1
    assert not home.session("delete").exists()
