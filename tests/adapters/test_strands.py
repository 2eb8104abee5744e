"""Strands agents on holdfast: bytes come back as they were, and a crash loses nothing."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from strands import Agent, tool
from strands.hooks import AfterToolCallEvent
from strands.models import Model
from strands.session import SnapshotSessionManager
from strands.storage import InMemoryStorage, Storage
from strands.storage.storage import _NamespacedStorage
from strands.tools.executors import ConcurrentToolExecutor, SequentialToolExecutor
from strands.types.exceptions import EventLoopException, StorageError

import holdfast
from holdfast.adapters import strands as adapter
from holdfast.adapters.strands import HoldfastSessionManager, HoldfastStorage
from tests.adapters.loops import asynchronous, noise

LATEST = "session/{}/scopes/agent/default/snapshots/snapshot_latest.json"


def over(store):
    return HoldfastStorage(store)


@pytest.fixture
def storage(home):
    return over(home.store)


# -- the storage ------------------------------------------------------------------------------

DOCUMENTS: dict[str, Any] = {
    "of strands": json.dumps(
        {"data": {"messages": [{"role": "user"}]}, "ü": "ß"}, ensure_ascii=False
    ),
    "compact": '{"b":[1,2.5,null,true],"a":{"":"é"}}',
    "ascii": json.dumps({"é": "\ud800", "big": 2**80, "nan": float("nan")}),
    "indented": json.dumps({"a": [1]}, indent=2),
    "float": "[1e5, 0.1, -0.0]",
    "twice": '{"a": 1, "a": 2}',
    "deep": "[" * 900 + "]" * 900,
    "deeper": "[" * 200_000 + "]" * 200_000,
    "list": "[1, 2]",
    "number": "7",
    "null": "null",
    "text": "# Notes\nnothing else\0",
    "empty": "",
    "bytes": b"\xff\x00\x89PNG",
    "lookalike": '{"bytes": "x", "text": "y"}',
}


@asynchronous
async def test_what_is_read_is_what_was_written(home, storage):
    documents = {k: v if isinstance(v, bytes) else v.encode() for k, v in DOCUMENTS.items()}
    for _ in range(2):
        for key, data in documents.items():
            await storage.write(key, data)
        assert {key: await storage.read(key) for key in documents} == documents
    again = HoldfastStorage(home.reopened())
    assert {key: await again.read(key) for key in documents} == documents
    assert await again.list("") == sorted(documents)
    assert home.store.session("compact").load() == {"b": [1, 2.5, None, True], "a": {"": "é"}}
    assert home.store.session("ascii").load()["é"] == "\ud800"
    assert home.store.session("text").load() == {"text": "# Notes\nnothing else\0"}


async def story(storage):
    """What happens to some keys, told so that two storages can be compared."""
    told: list[Any] = []
    for key in ("a/b", "a/b/c", "a/bc", "b", "a", "ä/x"):
        await storage.write(key, key.encode())
    await storage.write("b", b"again")
    prefixes = ("", "a", "a/", "a/b", "a/b/", "ä", "x")
    told += [await storage.list(prefix) for prefix in prefixes]
    await storage.delete("a/b")
    await storage.delete("a/b")
    told += [await storage.read("a/b"), await storage.read("never"), await storage.read("b")]
    told.append(await storage.list("a/b"))
    await storage.write("a/b", b"new")
    told.append(await storage.read("a/b"))
    told.append([found.key for found in await storage.search("again")])
    return told


@asynchronous
async def test_it_is_a_storage_like_its_own(storage):
    assert isinstance(storage, Storage)
    assert await story(storage) == await story(InMemoryStorage())


@asynchronous
async def test_a_write_costs_what_changed(home, storage):
    messages = []
    for i in range(80):
        messages.append({"role": "user", "content": [{"text": noise(i)}]})
        document = {"created_at": str(i), "data": {"messages": messages, "state": {}}}
        await storage.write("long", json.dumps(document, ensure_ascii=False).encode())
    sizes = [checkpoint.added for checkpoint in home.store.session("long").history()]
    assert sum(sizes) < 4 * home.store.session("long").head.size


@asynchronous
async def test_the_last_writer_wins_and_no_write_is_lost(home, storage):
    other = HoldfastStorage(home.another())
    texts = [f'{{"n": {i}}}'.encode() for i in range(12)]
    await asyncio.gather(
        *[(other if i % 2 else storage).write("race", text) for i, text in enumerate(texts)]
    )
    session = home.store.session("race")
    assert sorted(session.load(c)["n"] for c in session.history()) == list(range(12))
    assert await other.read("race") == await storage.read("race")


@asynchronous
async def test_a_write_that_is_overtaken_tries_again(home, monkeypatch):
    storage, other, asked = over(home.store), over(home.another()), []
    fields = adapter._fields

    def slow(*args):
        asked.append(args)
        if len(asked) == 1:
            other._write("k", b'{"n": 1}')
        return fields(*args)

    monkeypatch.setattr(adapter, "_fields", slow)
    await storage.write("k", b'{"n": 2}')
    session = home.store.session("k")
    assert [session.load(c)["n"] for c in session.history()] == [2, 1]
    asked.clear()
    await storage.write("immutable_history/k", b"{}")
    assert await storage.read("immutable_history/k") == b"{}"


@asynchronous
async def test_rewound_and_forked_by_holdfast(home, storage):
    await storage.write("k", b'{"n": 1}')
    await storage.write("k", b"text")
    home.store.session("k").rewind("@~1")
    assert await storage.read("k") == b'{"n": 1}'
    home.store.session("k").undo()
    home.store.session("k").fork("copy")
    assert await storage.read("copy") == b"text"
    assert await storage.list("") == ["copy", "k"]
    await storage.write("copy", b"own")
    await storage.delete("k")
    assert await storage.read("copy") == b"own"
    home.store.session("k").undo()
    assert await storage.read("k") == b"text"


@asynchronous
async def test_bad_requests_are_refused_before_anything_is_written(home, storage):
    home.session("mine").save({"messages": []})
    for call in (
        storage.write("mine", b"{}"),
        storage.read("mine"),
        storage.delete("mine"),
        storage.write("", b"{}"),
        storage.write("k", "text"),
    ):
        with pytest.raises(StorageError) as refused:
            await call
        assert isinstance(refused.value.__cause__, holdfast.InvalidRequest)
    assert await storage.list("") == await storage.list("mine") == []
    assert len(home.store.session("mine")) == 1
    with pytest.raises(holdfast.InvalidRequest, match="a store or a URL"):
        over(42)


@asynchronous
@pytest.mark.parametrize("error", [holdfast.Unavailable("full"), OSError("full")], ids=repr)
async def test_failures_are_storage_errors(memory, error, monkeypatch):
    storage = HoldfastStorage(memory.store)

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(storage, "session", fail)
    monkeypatch.setattr(memory.store, "sessions", fail)
    for call in (
        storage.write("k", b"{}"), storage.read("k"), storage.delete("k"), storage.list("")
    ):  # fmt: skip
        with pytest.raises(StorageError, match="full") as raised:
            await call
        assert raised.value.__cause__ is error


def test_only_a_store_in_memory_is_ephemeral(home):
    storage = HoldfastStorage(home.store)
    for each in (storage, _NamespacedStorage(storage, "view")):
        marked = getattr(each, "_ephemeral", None) is InMemoryStorage._ephemeral
        assert marked is (home.kind == "memory")


@asynchronous
async def test_a_cancelled_write_is_finished_and_blocks_nobody(memory, monkeypatch):
    storage = HoldfastStorage(memory.store)
    commit, begun, go = memory.store._repository.backend.commit, asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def slow(change):
        loop.call_soon_threadsafe(begun.set)
        assert go.wait(60)
        return commit(change)

    monkeypatch.setattr(memory.store._repository.backend, "commit", slow)
    writing = asyncio.create_task(storage.write("k", b"{}"))
    await begun.wait()  # so the loop goes on while a commit waits
    writing.cancel()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert await storage.read("k") == b"{}"


@asynchronous
async def test_who_opens_a_store_closes_it(tmp_path):
    path = tmp_path / "own.db"
    async with HoldfastStorage(path) as storage:
        await storage.write("k", b"{}")
    with pytest.raises(StorageError, match="closed"):
        await storage.read("k")
    with pytest.raises(holdfast.InvalidRequest):
        storage.host.store.session("k")
    async with HoldfastSessionManager("s", str(path)) as manager:
        assert await manager.storage.read("k") == b"{}"
    with pytest.raises(holdfast.InvalidRequest):
        manager.storage.host.store.session("k")
    with holdfast.open(path) as store:
        async with HoldfastStorage(store) as storage, HoldfastSessionManager("s", store):
            with HoldfastSessionManager("s", storage):
                pass
            assert await storage.read("k") == b"{}"
        assert store.session("k").exists()


# -- agents -----------------------------------------------------------------------------------


class Scripted(Model):
    """Says its n-th turn where there are n already: text, or names of tools to call."""

    def __init__(self, *turns):
        self.turns = turns

    def update_config(self, **config):
        """It has none."""

    def get_config(self):
        return {}

    async def structured_output(self, output_model, prompt, system_prompt=None, **kwargs):
        raise AssertionError
        yield

    async def stream(self, messages, tool_specs=None, system_prompt=None, **kwargs):
        turn = self.turns[sum(m["role"] == "assistant" for m in messages)]
        yield {"messageStart": {"role": "assistant"}}
        for name in turn if isinstance(turn, list) else []:
            use = {"toolUseId": name[0], "name": name}
            yield {"contentBlockStart": {"start": {"toolUse": use}}}
            yield {"contentBlockDelta": {"delta": {"toolUse": {"input": "{}"}}}}
            yield {"contentBlockStop": {}}
        if isinstance(turn, str):
            yield {"contentBlockStart": {"start": {}}}
            yield {"contentBlockDelta": {"delta": {"text": turn}}}
            yield {"contentBlockStop": {}}
        yield {"messageStop": {"stopReason": "end_turn" if isinstance(turn, str) else "tool_use"}}
        usage = {"inputTokens": 10, "outputTokens": 5, "totalTokens": 15}
        yield {"metadata": {"usage": usage, "metrics": {"latencyMs": 1}}}


class Dead(BaseException):
    """What ends a process, for a test that goes on."""


def planner(manager, done, *, second=None, executor=None, turns=(["one", "two"], "fine")):
    @tool
    def one() -> str:
        """The first."""
        done.append("one")
        return "1"

    @tool
    def two() -> dict:
        """The second."""
        done.append("two")
        content = second() if second else [{"text": "2"}]
        return {"status": "success", "content": content}

    return Agent(
        model=Scripted(*turns),
        tools=[one, two],
        session_manager=manager,
        callback_handler=None,
        tool_executor=executor or SequentialToolExecutor(),
    )


def dead():
    raise Dead


def results(agent):
    blocks = [b["toolResult"] for m in agent.messages for b in m["content"] if "toolResult" in b]
    return [(b["toolUseId"], b["content"]) for b in blocks]


def test_a_run_is_kept_as_it_goes_on(home):
    done: list[str] = []
    agent = planner(HoldfastSessionManager("s", home.store), done)
    agent("go")
    session = home.store.session(LATEST.format("s"))
    state = session.load()
    assert state["data"]["messages"] == agent.messages
    assert len(agent.messages) == 4
    history = list(session.history())[::-1]
    assert [len(session.load(c)["data"]["messages"]) for c in history] == [1, 2, 3, 4, 4]
    assert [len(c.pending) for c in history] == [0, 2, 0, 0, 0]
    assert [c.usage.tokens for c in history] == [0, 15, 0, 15, 0]
    assert (history[1].usage.input, history[1].usage.output) == (10, 5)
    assert (session.agent, session.head.status) == ("default", "completed")
    again = planner(HoldfastSessionManager("s", home.reopened()), done)
    assert again.messages == agent.messages


@pytest.mark.parametrize("executor", [SequentialToolExecutor, ConcurrentToolExecutor])
def test_a_tool_that_returned_is_not_run_again(home, executor):
    done: list[str] = []
    first = planner(HoldfastSessionManager("s", home.store), done, second=dead)
    with pytest.raises(Dead):
        first("go")
    manager = HoldfastSessionManager("s", home.reopened())
    agent = planner(manager, done, executor=executor())
    assert [list(block) for block in agent.messages[-1]["content"]] == [["toolUse"], ["toolUse"]]
    agent()
    assert done == ["one", "two", "two"]
    assert sorted(results(agent)) == [("o", [{"text": "1"}]), ("t", [{"text": "2"}])]
    assert home.store.verify(read_data=True).ok


def test_only_the_results_of_the_open_message_count(memory):
    """Ids of calls may come again in every turn."""
    turns, late = (["one"], ["one", "two"], "fine"), (["one"], ["two", "one"], "fine")
    done: list[str] = []
    manager = HoldfastSessionManager("s", memory.store)
    with pytest.raises(Dead):
        planner(manager, done, second=dead, turns=turns)("go")
    assert done == ["one", "one", "two"]
    agent = planner(HoldfastSessionManager("s", memory.store), done, turns=turns)
    agent()
    assert done == ["one", "one", "two", "two"]
    assert len(results(agent)) == 3
    with pytest.raises(Dead):
        planner(HoldfastSessionManager("t", memory.store), done, second=dead, turns=late)("go")
    done.clear()
    planner(HoldfastSessionManager("t", memory.store), done, turns=late)()
    assert done == ["two", "one"]
    agent.tool.one()  # called by the program: nothing that a model asked for
    assert len(memory.store.session("session/s/scopes/agent/default/tool_results.json")) == 3


def test_the_same_call_of_an_earlier_message_does_not_count(memory):
    done: list[str] = []

    def later():
        return dead() if len(done) == 2 else [{"text": str(len(done))}]

    turns = (["two"], ["two"], "fine")
    with pytest.raises(Dead):
        planner(HoldfastSessionManager("s", memory.store), done, second=later, turns=turns)("go")
    agent = planner(HoldfastSessionManager("s", memory.store), done, second=later, turns=turns)
    agent()
    assert results(agent) == [("t", [{"text": "1"}]), ("t", [{"text": "3"}])]


def test_a_hook_may_have_a_tool_run_again(memory):
    done: list[str] = []

    def once(event):
        event.retry = event.tool_use["name"] == "one" and done.count("one") == 1

    first = planner(HoldfastSessionManager("s", memory.store), done, second=dead)
    with pytest.raises(Dead):
        first("go")
    agent = planner(HoldfastSessionManager("s", memory.store), done)
    agent.add_hook(once, AfterToolCallEvent)
    agent()
    assert done == ["one", "two", "one", "two"]
    done.clear()
    again = planner(HoldfastSessionManager("t", memory.store), done)
    again.add_hook(once, AfterToolCallEvent)
    again("go")
    assert done == ["one", "one", "two"]


def test_bytes_in_results_come_back(memory):
    image = [{"image": {"format": "png", "source": {"bytes": b"\x89PNG\xff"}}}]
    turns = (["two", "one"], "fine")
    done: list[str] = []
    manager = HoldfastSessionManager("s", memory.store)
    agent = planner(manager, done, second=lambda: image, turns=turns)

    @tool(name="one")
    def crash() -> str:
        """The first."""
        raise Dead

    agent.tool_registry.register_tool(crash)
    with pytest.raises(Dead):
        agent("go")
    agent = planner(HoldfastSessionManager("s", memory.store), done, turns=turns)
    agent()
    assert done == ["two", "one"]
    assert results(agent)[0] == ("t", image)


def test_a_result_that_cannot_be_kept_ends_the_run(memory, monkeypatch):
    manager = HoldfastSessionManager("s", memory.store)
    done: list[str] = []
    agent = planner(manager, done)

    def full(*args):
        raise holdfast.Unavailable("the disk is full")

    monkeypatch.setattr("holdfast.adapters.strands._ToolResults.record", full)
    with pytest.raises(EventLoopException, match="full") as caught:
        agent("go")
    assert isinstance(caught.value.original_exception, StorageError)
    assert isinstance(caught.value.original_exception.__cause__, holdfast.Unavailable)
    assert done == ["one", "two"]
    assert results(agent)[0] == ("o", [{"text": "1"}])  # not an error of the tool


def test_immutable_snapshots_share_their_data(home):
    storage = HoldfastStorage(home.store)
    manager = SnapshotSessionManager(
        "s", storage=storage, save_latest_on="message", snapshot_trigger=lambda **_: True
    )
    agent = Agent(
        model=Scripted(*[noise(-i) for i in range(30)]),
        session_manager=manager,
        callback_handler=None,
    )
    for i in range(20):
        agent(noise(i))
    ids = asyncio.run(manager.list_snapshot_ids(agent))
    assert len(ids) == 20
    infos = [i for i in home.store.sessions() if "immutable_history" in i.name]
    assert infos[-1].head.size > 30_000
    assert max(info.head.added for info in infos[10:]) < 8_000
    later = list(agent.messages)
    assert asyncio.run(manager.restore_snapshot(agent, snapshot_id=ids[4]))
    assert agent.messages == later[:10]
    home.store.session(LATEST.format("s")).delete()
    home.store.gc()
    assert asyncio.run(manager.restore_snapshot(agent, snapshot_id=ids[-1]))
    assert agent.messages == later
    assert home.store.verify(read_data=True).ok


@asynchronous
async def test_a_deleted_session_is_gone(memory):
    manager = HoldfastSessionManager("s", memory.store)
    await planner(manager, []).invoke_async("go")
    assert len(await manager.storage.list("session/s/")) == 2
    await manager.delete_session()
    assert await manager.storage.list("") == []
    assert planner(HoldfastSessionManager("s", memory.store), []).messages == []


SCRIPT = """
import os, sys
from holdfast.adapters.strands import HoldfastSessionManager
from tests.adapters.test_strands import planner, results

url, log, mode = sys.argv[1:]

class Done:
    def append(self, name):
        with open(log, "a") as file:
            file.write(name + " ")
        if mode == "crash" and name == "two":
            os._exit(9)

with HoldfastSessionManager("trip", url) as manager:
    agent = planner(manager, Done())
    print(agent("go") if mode == "crash" else agent(), end="")
    print(results(agent))
"""


@pytest.mark.parametrize("kind", ["sqlite", "files"])
def test_after_a_crash_only_the_pending_tool_runs(kind, tmp_path):
    url = str(tmp_path / "store.db") if kind == "sqlite" else f"files:{tmp_path / 'store'}"
    log = tmp_path / "done"

    def process(mode):
        return subprocess.run(
            [sys.executable, "-c", SCRIPT, url, str(log), mode],
            cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        )  # fmt: skip

    assert process("crash").returncode == 9
    with holdfast.open(url, create=False) as store:
        session: Any = store.session(LATEST.format("trip"))
        assert len(session.load()["data"]["messages"]) == 2
        assert [call.name for call in session.head.pending] == ["one", "two"]
        state = store.session("session/trip/scopes/agent/default/tool_results.json").load()
        assert [each["call"]["name"] for each in state["results"].values()] == ["one"]
    resumed = process("resume")
    assert resumed.stdout == "fine\n[('o', [{'text': '1'}]), ('t', [{'text': '2'}])]\n", (
        resumed.stderr
    )
    assert log.read_text() == "one two two "
