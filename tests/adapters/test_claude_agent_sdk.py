"""Transcripts of the Claude Agent SDK: its own suite, and what that does not ask for."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import threading
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from claude_agent_sdk import (
    fork_session_via_store,
    get_session_messages_from_store,
    list_sessions_from_store,
    project_key_for_directory,
)
from claude_agent_sdk.testing import run_session_store_conformance

import holdfast
from holdfast import Usage
from holdfast.adapters import claude_agent_sdk as adapter
from holdfast.adapters.claude_agent_sdk import HoldfastSessionStore
from holdfast.errors import InvalidRequest, NotSerializable
from tests.support.stores import Home

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KEY: Any = {"project_key": "proj", "session_id": "sess"}
SUB: Any = {**KEY, "subpath": "subagents/agent-1"}
ID = "0b0d3a4e-4d0c-4d0e-9a53-1d2c6f7a8b90"


def entry(n: int, **more: Any) -> Any:
    return {"type": "user", "uuid": f"u{n}", "n": n, **more}


def numbers(entries: Any) -> list[int]:
    return [e["n"] for e in entries]


@contextmanager
def stores(kind: str, folder: Path) -> Iterator[Callable[[], HoldfastSessionStore]]:
    """Makes adapters, each with an empty store."""
    homes: list[Home] = []

    def make() -> HoldfastSessionStore:
        homes.append(Home(kind, folder / str(len(homes))))
        return HoldfastSessionStore(homes[-1].store)

    yield make
    for home in homes:
        home.give_back()


@pytest.fixture(params=["asyncio", "trio"])
def loop(request) -> Any:
    """The name of an event loop."""
    return pytest.importorskip(request.param).__name__


@pytest.mark.parametrize("kind", ["memory", "sqlite", "files", "postgres"])
def test_the_sdks_own_suite(kind, loop, tmp_path):
    asked: list[str] = []
    with stores(kind, tmp_path) as make:

        def counting() -> HoldfastSessionStore:
            asked.append(kind)
            return make()

        anyio.run(run_session_store_conformance, counting, backend=loop)
    assert len(asked) == 15  # one for each of its 14 contracts, and one to see what there is


def test_what_is_cancelled_comes_to_its_end_on_any_loop(loop, tmp_path):
    async def work() -> None:
        async with HoldfastSessionStore(tmp_path / "a.db") as store:
            with anyio.move_on_after(0.0001):
                for n in range(100):
                    await store.append(KEY, [entry(n)])
            done = numbers(await store.load(KEY) or [])
            assert done == [*range(len(done))]
            with anyio.CancelScope() as scope:
                scope.cancel()
                await store.append(KEY, [entry(len(done))])
            kept = numbers(await store.load(KEY) or [])
            assert kept in (done, [*done, len(done)])
        with pytest.raises(InvalidRequest, match="closed"):
            await store.load(KEY)

    anyio.run(work, backend=loop)


def test_tasks_append_at_once_on_any_loop(home: Home, loop):
    store = HoldfastSessionStore(home.store)

    def key(n: int) -> Any:
        return {**KEY, "session_id": f"s{n % 3}"}

    async def append(n: int) -> None:
        await store.append(key(n), [entry(n)])

    async def work() -> None:
        async with anyio.create_task_group() as tasks:
            for n in range(30):
                tasks.start_soon(append, n)
        for k in range(3):
            kept = await store.load(key(k))
            assert sorted(numbers(kept)) == [*range(k, 30, 3)]

    anyio.run(work, backend=loop)


def test_the_session_that_was_written_last_is_the_most_recent(home: Home):
    store = HoldfastSessionStore(home.store)

    async def work() -> None:
        names = [f"s{n}" for n in range(40)]
        random.Random(1).shuffle(names)
        for name in names:
            key: Any = {**KEY, "session_id": name}
            await store.append(key, [entry(1)])
        for listed in (
            await store.list_sessions("proj"),
            await store.list_session_summaries("proj"),
        ):
            times = {each["session_id"]: each["mtime"] for each in listed}
            assert sorted(times, key=lambda name: times[name]) == names
            assert len({*times.values()}) == len(names)

    asyncio.run(work())


def test_sessions_of_the_same_millisecond_are_told_apart():
    class Info:
        def __init__(self, microsecond: int | None) -> None:
            at = datetime(2026, 1, 1, microsecond=microsecond or 0, tzinfo=UTC)
            self.head = None if microsecond is None else SimpleNamespace(created_at=at)

    found: list[Any] = [
        ("c", Info(1_900)),
        ("a", Info(1_100)),
        ("b", Info(1_101)),
        ("lost", Info(None)),
    ]
    found += [("d", Info(2_000)), ("e", Info(9_000))]
    times = adapter._mtimes(found)
    first = times["a"]
    assert times == {
        "a": first, "b": first + 1, "c": first + 2, "d": first + 3, "e": first + 8, "lost": 0,
    }  # fmt: skip


def test_a_repeated_entry_is_left_out(home: Home):
    async def work() -> None:
        store = HoldfastSessionStore(home.store)
        await store.append(KEY, [entry(1), entry(2), entry(1)])
        await store.append(KEY, [entry(2), entry(3)])
        await store.append(KEY, [entry(3)])
        later = HoldfastSessionStore(home.another())
        await later.append(KEY, [entry(3), entry(4)])
        assert numbers(await store.load(KEY)) == [1, 2, 3, 4]

    asyncio.run(work())
    assert len(home.store.session("proj/sess")) == 3  # a batch of repeats writes nothing


def test_entries_without_an_id_are_all_kept(memory: Home):
    async def work() -> Any:
        store = HoldfastSessionStore(memory.store)
        for _ in range(3):
            await store.append(KEY, [{"type": "mode"}, {"type": "mode"}])
        return await store.load(KEY)

    assert asyncio.run(work()) == [{"type": "mode"}] * 6


def test_processes_append_in_turn(home: Home):
    """Each knows nothing of what the other has appended since."""

    async def work() -> None:
        here = HoldfastSessionStore(home.store)
        there = HoldfastSessionStore(home.another())
        await here.append(KEY, [entry(1)])
        await there.append(KEY, [entry(2)])
        await here.append(KEY, [entry(1), entry(2), entry(3)])
        await there.append(KEY, [entry(3), entry(4)])
        assert numbers(await here.load(KEY)) == [1, 2, 3, 4]

    asyncio.run(work())


def test_what_others_deleted_may_be_appended_again(home: Home):
    async def work() -> None:
        here = HoldfastSessionStore(home.store)
        there = HoldfastSessionStore(home.another())
        await here.append(KEY, [entry(1), entry(2)])
        await there.delete(KEY)
        await here.append(KEY, [entry(1), entry(2)])  # all repeats, as far as it remembers
        assert numbers(await there.load(KEY)) == [1, 2]
        await there.append(KEY, [entry(3)])
        home.another().session("proj/sess").rewind("@~1")
        await there.append(KEY, [entry(3)])
        assert numbers(await here.load(KEY)) == [1, 2, 3]

    asyncio.run(work())


def test_threads_race(home: Home):
    """All entries are there, each once, those of a batch together and in order."""
    count, batches = 4, 6
    shared = [entry(n) for n in range(3)]

    def work(who: int, store: holdfast.Store) -> None:
        async def appending() -> None:
            sessions = HoldfastSessionStore(store)
            for b in range(batches):
                own = [entry(1000 * (who + 1) + 10 * b + i) for i in range(2)]
                await sessions.append(KEY, [*shared, *own])

        asyncio.run(appending())

    threads = [
        threading.Thread(target=work, args=(i, home.another() if i % 2 else home.store))
        for i in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = numbers(asyncio.run(HoldfastSessionStore(home.store).load(KEY)))
    assert found[:3] == [0, 1, 2]
    assert len(found) == len(set(found)) == 3 + 2 * count * batches
    assert all(found[i] + 1 == found[i + 1] for i in range(3, len(found), 2))
    for who in range(count):
        own = [n for n in found if n // 1000 == who + 1]
        assert own == sorted(own)


def test_appends_of_one_task_each_land_in_order(sqlite: Home):
    async def work() -> list[int]:
        store = HoldfastSessionStore(sqlite.store)
        await asyncio.gather(*[store.append(KEY, [entry(n)]) for n in range(20)])
        return numbers(await store.load(KEY))

    assert asyncio.run(work()) == list(range(20))


def test_an_append_reads_and_writes_what_is_new(sqlite: Home, monkeypatch):
    loads: list[str] = []
    load = holdfast.Session.load

    def noting(self: holdfast.Session, *args: Any) -> Any:
        loads.append(self.name)
        return load(self, *args)

    monkeypatch.setattr(holdfast.Session, "load", noting)

    async def work() -> None:
        store = HoldfastSessionStore(sqlite.store)
        for n in range(300):
            await store.append(KEY, [entry(n, text="x" * 500)])

    asyncio.run(work())
    assert loads == []
    added = [c.added for c in sqlite.store.session("proj/sess").history()]
    assert max(added) < 40_000  # a pack of 64 entries at the most
    assert sorted(added)[len(added) // 2] < 2_000


def test_old_transcripts_are_forgotten(memory: Home, monkeypatch):
    """Of those that nobody appends to, only so many are remembered; nothing else changes."""
    monkeypatch.setattr(adapter, "_REMEMBERED", 2)

    async def work() -> None:
        store = HoldfastSessionStore(memory.store)
        keys: list[Any] = [{"project_key": "p", "session_id": f"s{n}"} for n in range(60)]
        for _ in range(2):
            for key in keys:
                await store.append(key, [entry(1)])
        assert (
            len(store._transcripts) <= 2 + 1 + 16
        )  # a worker may not have let go of its last one yet
        assert [numbers(await store.load(key)) for key in keys] == [[1]] * 60

    asyncio.run(work())


def test_a_transcript_at_work_is_not_forgotten(memory: Home, monkeypatch):
    """Or the order of what is appended would be lost."""
    monkeypatch.setattr(adapter, "_REMEMBERED", 1)
    let_go = threading.Event()
    append = holdfast.Session.append

    def slow(self: Any, path: str, *entries: Any, **fields: Any) -> Any:
        if entries[0]["n"] == 1:
            assert let_go.wait(60)
        return append(self, path, *entries, **fields)

    monkeypatch.setattr(holdfast.Session, "append", slow)

    async def work() -> list[int]:
        store = HoldfastSessionStore(memory.store)
        first = asyncio.ensure_future(store.append(KEY, [entry(1)]))
        for n in range(2, 30):
            await store.append({"project_key": "p", "session_id": f"s{n}"}, [entry(n)])
        second = asyncio.ensure_future(store.append(KEY, [entry(2)]))
        for n in range(30, 40):
            await store.append({"project_key": "p", "session_id": f"s{n}"}, [entry(n)])
        let_go.set()
        await asyncio.gather(first, second)
        return numbers(await store.load(KEY))

    assert asyncio.run(work()) == [1, 2]


@pytest.mark.parametrize("method", ["append", "delete"])
def test_what_is_cancelled_comes_to_its_end(sqlite: Home, method):
    """Also if no worker has begun it."""

    async def work() -> Any:
        store = HoldfastSessionStore(sqlite.store)
        await store.append(KEY, [entry(1)])
        let_go = threading.Event()
        busy = [asyncio.ensure_future(store.host.call(let_go.wait)) for _ in range(16)]
        await asyncio.sleep(0)
        call = store.append(KEY, [entry(2)]) if method == "append" else store.delete(KEY)
        task = asyncio.ensure_future(call)
        try:
            for _ in range(3):
                await asyncio.sleep(0)
                task.cancel()
            assert not task.done()
        finally:
            let_go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.gather(*busy)
        return await store.load(KEY)

    assert asyncio.run(work()) == ([entry(1), entry(2)] if method == "append" else None)


def test_the_sdks_timeout_does_not_cut_an_append_short(sqlite: Home):
    async def work() -> Any:
        store = HoldfastSessionStore(sqlite.store)
        with pytest.raises(TimeoutError), anyio.fail_after(0):
            await store.append(KEY, [entry(1)])
        return await store.load(KEY)

    assert asyncio.run(work()) == [entry(1)]


def test_the_loop_goes_on_while_the_disk_is_waited_for(sqlite: Home, monkeypatch):
    entered, let_go = threading.Event(), threading.Event()
    append = holdfast.Session.append

    def slow(self: Any, *args: Any, **fields: Any) -> Any:
        entered.set()
        assert let_go.wait(60)
        return append(self, *args, **fields)

    monkeypatch.setattr(holdfast.Session, "append", slow)

    async def work() -> None:
        store = HoldfastSessionStore(sqlite.store)
        task = asyncio.ensure_future(store.append(KEY, [entry(1)]))
        while not entered.is_set():  # noqa: ASYNC110 - a thread has no asyncio.Event
            await asyncio.sleep(0)
        let_go.set()  # by the loop, which therefore is not blocked
        await task

    asyncio.run(work())


# -- names, listing, deleting ----------------------------------------------------------------------


def test_keys_are_never_mistaken_for_each_other(home: Home):
    keys: list[Any] = [
        {"project_key": "a", "session_id": "b/c"},
        {"project_key": "a/b", "session_id": "c"},
        {"project_key": "a", "session_id": "b", "subpath": "c"},
        {"project_key": "a", "session_id": "b%2Fc"},
        {"project_key": "a%2Fb", "session_id": "c"},
        {"project_key": "a", "session_id": "b"},
        {"project_key": "a", "session_id": "bb"},
        {"project_key": "aa", "session_id": "b"},
        {"project_key": "ä/ 🦀", "session_id": "x" * 3000},
    ]

    async def work() -> None:
        store = HoldfastSessionStore(home.store)
        for n, key in enumerate(keys):
            await store.append(key, [entry(n)])
        for n, key in enumerate(keys):
            assert await store.load(key) == [entry(n)]
        for project in {k["project_key"] for k in keys}:
            mains = {
                k["session_id"] for k in keys if k["project_key"] == project and "subpath" not in k
            }
            assert {s["session_id"] for s in await store.list_sessions(project)} == mains
            listed = await store.list_session_summaries(project)
            assert {s["session_id"] for s in listed} == mains
        assert await store.list_subkeys(keys[5]) == ["c"]
        await store.delete(keys[5])
        assert [await store.load(k) is None for k in keys] == [n in (2, 5) for n in range(9)]

    asyncio.run(work())


def test_a_deletion_can_be_undone(home: Home):
    async def work() -> None:
        store = HoldfastSessionStore(home.store)
        await store.append(KEY, [entry(1)])
        await store.append(SUB, [entry(2)])
        await store.delete(KEY)
        for name in ("proj/sess", "proj/sess/subagents/agent-1"):
            home.store.session(name).undo()
        assert await store.load(KEY) == [entry(1)]
        assert await store.load(SUB) == [entry(2)]
        assert await store.list_subkeys(KEY) == ["subagents/agent-1"]

    asyncio.run(work())


def test_summaries_follow_the_head(sqlite: Home):
    """Also that of a fork, which has none of its own yet, and after a rewind."""

    async def titles(store: HoldfastSessionStore) -> dict[str, Any]:
        listed = await store.list_session_summaries("proj")
        times = {s["session_id"]: s["mtime"] for s in await store.list_sessions("proj")}
        assert times == {s["session_id"]: s["mtime"] for s in listed}
        return {s["session_id"]: s["data"].get("custom_title") for s in listed}

    async def work() -> None:
        store = HoldfastSessionStore(sqlite.store)
        await store.append(KEY, [entry(1, customTitle="one")])
        await store.append(KEY, [entry(2, customTitle="two")])
        main = sqlite.store.session("proj/sess")
        main.fork("proj/fork", at="@~1")
        assert await titles(store) == {"sess": "two", "fork": "one"}
        await store.append({"project_key": "proj", "session_id": "fork"}, [entry(3)])
        main.rewind("@~1")
        assert await titles(store) == {"sess": "one", "fork": "one"}

    asyncio.run(work())


def test_the_sdk_lists_reads_and_forks(sqlite: Home):
    folder = str(sqlite.folder)
    key: Any = {"project_key": project_key_for_directory(folder), "session_id": ID}
    head = {"timestamp": "2026-01-01T00:00:00.000Z", "sessionId": ID, "cwd": folder}
    question = {"role": "user", "content": "Lisbon?"}
    answer = {"role": "assistant", "id": "m1", "content": [{"type": "text", "text": "Yes"}]}
    talk: Any = [
        {**head, "type": "user", "uuid": "u1", "parentUuid": None, "message": question},
        {**head, "type": "assistant", "uuid": "u2", "parentUuid": "u1", "message": answer},
    ]

    async def work() -> None:
        store = HoldfastSessionStore(sqlite.store)
        await store.append(key, talk)
        (info,) = await list_sessions_from_store(store, directory=folder)
        assert (info.session_id, info.first_prompt) == (ID, "Lisbon?")
        said = await get_session_messages_from_store(store, ID, directory=folder)
        assert [m.uuid for m in said] == ["u1", "u2"]
        forked = await fork_session_via_store(store, ID, directory=folder)
        ids = {i.session_id for i in await list_sessions_from_store(store, directory=folder)}
        assert ids == {ID, forked.session_id}

    asyncio.run(work())


# -- what holdfast shows ---------------------------------------------------------------------------


def test_checkpoints_tell_what_was_appended(memory: Home):
    def said(id: str, uuid: str, out: int) -> Any:
        usage = {"input_tokens": 10, "output_tokens": out, "cache_read_input_tokens": 5}
        message = {"id": id, "model": "claude-x", "usage": usage}
        return {"type": "assistant", "uuid": uuid, "message": message}

    async def work() -> None:
        store = HoldfastSessionStore(memory.store)
        await store.append(KEY, [entry(1)])
        await store.append(KEY, [said("m1", "a", 1), said("m1", "b", 7)])
        await store.append(KEY, [said("m1", "c", 9), said("m2", "d", 2)])
        later = HoldfastSessionStore(memory.store)
        await later.append(KEY, [said("m2", "e", 3)])
        await later.append(SUB, [entry(2)])

    asyncio.run(work())
    session = memory.store.session("proj/sess")
    history = [*session.history()][::-1]
    assert [c.trigger for c in history] == ["user", "assistant", "assistant", "assistant"]
    assert [c.usage.tokens for c in history] == [0, 22, 2 + 17, 1]
    assert session.usage().spent == Usage(30, 12, cached=10, model="claude-x")
    assert {c.agent for c in history} == {"claude"}
    assert session.load()["entries"][0] == entry(1)
    sub = memory.store.session("proj/sess/subagents/agent-1").get()
    assert sub.child_of == "proj/sess"
    assert "summary" not in sub.meta


def test_the_command_line_shows_it(terminal):
    async def work() -> None:
        async with HoldfastSessionStore("store.db") as store:
            await store.append(KEY, [entry(1, message={"role": "user", "content": "Lisbon?"})])

    asyncio.run(work())
    assert "user" in terminal.good("log proj/sess").out
    assert "Lisbon?" in terminal.good("state -s proj/sess").out


# -- refusals, and whose store it is ---------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    [
        {"project_key": "", "session_id": "s"},
        {"project_key": "p"},
        {"project_key": "p", "session_id": 3},
        {"project_key": "p", "session_id": "s", "subpath": ""},
        "p/s",
    ],
)
def test_bad_keys_are_refused(memory: Home, key):
    async def work() -> None:
        store = HoldfastSessionStore(memory.store)
        for call in (store.append(key, [entry(1)]), store.load(key), store.delete(key)):
            with pytest.raises(InvalidRequest):
                await call

    asyncio.run(work())
    assert list(memory.store.sessions()) == []


@pytest.mark.parametrize(
    ("entries", "error"),
    [
        ([entry(1), {"type": "x", "bad": object()}], NotSerializable),
        ([entry(1), "text"], InvalidRequest),
        ("text", InvalidRequest),
    ],
)
def test_bad_entries_are_refused_before_anything_is_written(memory: Home, entries, error):
    async def work() -> None:
        store = HoldfastSessionStore(memory.store)
        with pytest.raises(error):
            await store.append(KEY, entries)
        assert await store.load(KEY) is None
        await store.append(KEY, [entry(1)])  # and the refused one was not noted as there
        assert await store.load(KEY) == [entry(1)]

    asyncio.run(work())


@pytest.mark.parametrize("state", [{"messages": []}, [1], {"entries": {}}, {"entries": [], "x": 1}])
def test_a_session_of_somebody_else_is_left_alone(memory: Home, state):
    memory.store.session("proj/sess").save(state)

    async def work() -> None:
        store = HoldfastSessionStore(memory.store)
        with pytest.raises(InvalidRequest, match="no transcript") as caught:
            await store.append(KEY, [entry(1)])
        assert caught.value.hint
        with pytest.raises(InvalidRequest, match="no transcript"):
            await store.load(KEY)

    asyncio.run(work())
    assert memory.store.session("proj/sess").load() == state


def test_a_store_that_was_given_stays_open(sqlite: Home):
    async def work() -> None:
        async with HoldfastSessionStore(sqlite.store) as store:
            await store.append(KEY, [entry(1)])
        with pytest.raises(InvalidRequest):
            await store.load(KEY)

    asyncio.run(work())
    assert sqlite.store.session("proj/sess").exists()
    with pytest.raises(InvalidRequest, match="a store or a URL"):
        HoldfastSessionStore(3)  # type: ignore[arg-type]


def test_a_store_that_it_opened_is_closed(tmp_path):
    with HoldfastSessionStore(tmp_path / "a.db") as store:
        asyncio.run(store.append(KEY, [entry(1)]))
    store.close()
    with pytest.raises(InvalidRequest):
        store.store.session("x")


@pytest.mark.parametrize("home", ["sqlite", "files", "postgres"], indirect=True)
def test_what_was_appended_survives_a_crash(home: Home):
    home.close()
    code = """
import asyncio, os, sys, holdfast
from holdfast.adapters.claude_agent_sdk import HoldfastSessionStore
async def work():
    options = {"schema": sys.argv[2]} if sys.argv[2] else {}
    store = HoldfastSessionStore(holdfast.open(sys.argv[1], **options))
    key = {"project_key": "proj", "session_id": "sess"}
    await store.append(key, [{"type": "user", "uuid": "u1", "n": 1}])
    await store.append(key, [{"type": "user", "uuid": "u2", "n": 2}])
    os._exit(9)
asyncio.run(work())
"""
    schema = home.schema if home.kind == "postgres" else ""
    done = subprocess.run([sys.executable, "-c", code, str(home.url), schema], check=False)
    assert done.returncode == 9

    async def work() -> Any:
        store = HoldfastSessionStore(home.reopened())
        await store.append(KEY, [entry(2), entry(3)])  # sent again by a mirror that had no answer
        return await store.load(KEY)

    assert numbers(asyncio.run(work())) == [1, 2, 3]
