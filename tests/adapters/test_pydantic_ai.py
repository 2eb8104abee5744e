"""pydantic-ai on holdfast: conversations are those of its own store, and a crash loses nothing."""

import asyncio
import itertools
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

import pytest
from pydantic_ai import Agent, ModelRetry, ToolReturn, models
from pydantic_ai.capabilities import AbstractCapability, CapabilityOrdering, ProcessHistory
from pydantic_ai.conversation import Conversation
from pydantic_ai.conversation_store import (
    ConversationConflict,
    ConversationRecord,
    InMemoryConversationStore,
)
from pydantic_ai.exceptions import UserError
from pydantic_ai.messages import (
    BinaryContent,
    BinaryImage,
    FilePart,
    ModelRequest,
    ModelResponse,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models.function import FunctionModel
from pydantic_ai.models.test import TestModel
from pydantic_ai.tools import DeferredToolRequests

import holdfast
from holdfast.adapters.pydantic_ai import HoldfastCheckpoints, HoldfastConversationStore
from tests.adapters.loops import asynchronous, noise

models.ALLOW_MODEL_REQUESTS = False


def over(store):
    return HoldfastConversationStore(store)


@pytest.fixture
def conversations(home):
    return over(home.store)


def turn(text):
    return [ModelRequest(parts=[UserPromptPart(text)]), ModelResponse(parts=[TextPart(f"{text}!")])]


def prompts(conversation):
    return [m.parts[0].content for m in conversation.messages]


async def say(store, id, *texts, scope=None):
    conversation = await store.load(id) or Conversation(conversation_id=id)
    for text in texts:
        conversation.messages += turn(text)
    await store.save(conversation, scope=scope)
    return conversation


# -- the store --------------------------------------------------------------------------------


async def story(store):
    """What happens to some conversations, told so that two stores can be compared."""
    told: list[Any] = []

    async def tell(*ids):
        for id in ids:
            found = await store.load(id)
            told.append((id, found and prompts(found), found and found.usage.input_tokens))
        records = await store.list_conversations()
        told.append([(r.conversation_id, r.scope, r.forked_from, len(r.branches)) for r in records])

    await say(store, "a", "one", scope="u1")
    a = await say(store, "a", "two", "three")
    a.usage.input_tokens = 70
    await store.save(a)
    await tell("a", "b")
    old = a.revision
    a = await store.branch("a", at=2, expected_revision=old)
    a.messages += turn("deux")
    await store.save(a)
    await tell("a")
    left = (await store.read_record("a")).branches
    back = await store.branch("a", from_entry=left[0], expected_revision=a.revision)
    told.append(prompts(back))
    fork = await store.fork("a", at=4, new_conversation_id="f", scope="u2")
    fork.messages += turn("other")
    await store.save(fork)
    await tell("a", "f")
    with pytest.raises(ConversationConflict):
        await store.fork("a", new_conversation_id="f")
    with pytest.raises(ConversationConflict):
        await store.branch("a", at=0, expected_revision=old)
    with pytest.raises(UserError):
        await store.branch("a", from_entry="nothing", expected_revision=back.revision)
    rewritten = Conversation(
        messages=[*turn("one")[:1], *turn("again")], conversation_id="f", revision=fork.revision
    )
    await store.save(rewritten)
    await tell("f")
    told.append(prompts(await store.load("f", limit=2)))
    told.append([await store.load("f", scope="u1"), await store.load("f", scope="u2") is None])
    told.append(len(await store.list_conversations(scope="u1")))
    told.append([r.conversation_id for r in await store.list_conversations(limit=1)])
    entries = await store.load_entries("f")
    told.append([e.parent_id == before.id for before, e in itertools.pairwise(entries)])
    await store.delete("a", scope="u2")
    await tell("a")
    await store.delete("a")
    await tell("a", "f")
    await say(store, "a", "anew")
    await tell("a")
    return told


@asynchronous
async def test_it_is_a_store_like_its_own(home, conversations):
    expected = await story(InMemoryConversationStore())
    assert await story(conversations) == expected
    again = over(home.reopened())
    assert prompts(await again.load("a")) == ["anew", "anew!"]
    assert home.store.verify(read_data=True).ok


@asynchronous
async def test_messages_come_back_as_they_were(conversations):
    tool = ToolReturnPart(
        "photo",
        {"raw": b"\x00\xff", "none": None, "t": (1, 2)},
        tool_call_id="c",
        metadata={"k": 1},
    )
    picture = BinaryImage(b"\x89PNG\xff", media_type="image/png")
    messages: list[Any] = [
        ModelRequest(parts=[UserPromptPart(["look", picture])]),
        ModelResponse(parts=[ToolCallPart("photo", '{"x": 1}', tool_call_id="c")]),
        ModelRequest(parts=[tool]),
        ModelResponse(parts=[TextPart("lone \ud800, NUL \0")]),
    ]
    stored = await conversations.save(Conversation(messages=messages, conversation_id="m"))
    assert (await conversations.load("m")).messages == messages
    first = conversations.host.store.session("m").load()["messages"][0]
    assert list(first) == ["id", "parent_id", "kind", "message"]
    assert first["message"]["parts"][0]["timestamp"].endswith("+00:00")
    assert await conversations.read_entry(stored[2].id) == stored[2]
    fresh = over(conversations.host.store)
    assert await fresh.read_entry(stored[2].id) == stored[2]
    with pytest.raises(LookupError):
        await fresh.read_entry("nobody's")


@asynchronous
async def test_a_save_costs_what_is_new(home, conversations):
    for i in range(40):
        await say(conversations, "long", noise(i))
    session = home.store.session("long")
    sizes = [checkpoint.added for checkpoint in session.history()]
    assert len(session.load()["messages"]) == 80
    assert sum(sizes) < 4 * session.head.size


@asynchronous
async def test_a_fork_shares_its_history(home, conversations):
    for i in range(20):
        await say(conversations, "origin", noise(i))
    fork = await conversations.fork("origin", at=30, new_conversation_id="fork")
    head = home.store.session("fork").head
    assert head.size > 20_000
    assert head.added < 4_000
    assert head.parent_session == "origin"
    await conversations.delete("origin")
    home.store.gc()
    assert prompts(await conversations.load("fork")) == prompts(fork)
    assert home.store.verify(read_data=True).ok


@asynchronous
async def test_a_conversation_forked_or_rewound_by_holdfast(home, conversations):
    await say(conversations, "a", "one")
    await say(conversations, "a", "two")
    home.store.session("a").fork("b")
    forked = await conversations.load("b")
    assert prompts(forked) == ["one", "one!", "two", "two!"]
    assert (await conversations.read_record("b")).forked_from == "a"
    await say(conversations, "b", "three")
    assert len((await conversations.load("b")).messages) == 6
    home.store.session("a").rewind("@~1")
    assert prompts(await conversations.load("a")) == ["one", "one!"]
    home.store.session("a").undo()
    assert len((await conversations.load("a")).messages) == 4
    await conversations.delete("a")
    home.store.session("a").undo()
    assert len((await conversations.load("a")).messages) == 4
    for _ in range(2):
        home.store.session("a").undo()
    assert await conversations.load("a") is None
    await conversations.save(Conversation(conversation_id="a"))
    await say(conversations, "a", "anew")
    assert prompts(await conversations.load("a")) == ["anew", "anew!"]


@asynchronous
async def test_one_of_two_writers_gets_a_conflict(home, conversations):
    await say(conversations, "c", "one")
    other = over(home.another())
    mine, theirs = await conversations.load("c"), await other.load("c")
    mine.messages += turn("mine")
    theirs.messages += turn("theirs")
    await conversations.save(mine)
    before = len(home.store.session("c"))
    with pytest.raises(ConversationConflict):
        await other.save(theirs)
    with pytest.raises(ConversationConflict):
        await other.delete_record("c", expected_revision=theirs.revision)
    with pytest.raises(ConversationConflict):
        await other.save(Conversation(messages=turn("new"), conversation_id="c"))
    assert len(home.store.session("c")) == before
    assert prompts(await other.load("c")) == ["one", "one!", "mine", "mine!"]


@asynchronous
async def test_no_message_is_lost_in_a_race(home, conversations):
    other = over(home.another())

    async def add(store, text):
        while True:
            try:
                return await say(store, "race", text)
            except ConversationConflict:
                await asyncio.sleep(0)

    names = [f"m{i}" for i in range(8)]
    await asyncio.gather(*[add(other if i % 2 else conversations, n) for i, n in enumerate(names)])
    told = prompts(await conversations.load("race"))
    assert sorted(told[::2]) == names
    assert [f"{t}!" for t in told[::2]] == told[1::2]


@asynchronous
async def test_a_delete_spares_what_was_saved_meanwhile(memory, monkeypatch):
    conversations = over(memory.store)
    await say(conversations, "c", "one")
    revision = (await conversations.read_record("c")).revision
    read_meta = conversations.read_meta
    raced: set[str] = set()

    def read_then_lose(session, head=None):
        meta = read_meta(session, head)
        if not raced:
            raced.add(session.name)
            record = ConversationRecord(conversation_id="c", head_id=None)
            conversations._write(record, [], revision)
        return meta

    monkeypatch.setattr(conversations, "read_meta", read_then_lose)
    with pytest.raises(ConversationConflict):
        await conversations.delete_record("c", expected_revision=revision)
    assert raced
    assert memory.store.session("c").exists()


@asynchronous
async def test_bad_requests_are_refused_before_anything_is_written(home, conversations):
    home.session("mine").save({"messages": ["not a conversation"]})
    for call in (
        conversations.load("mine"),
        say(conversations, "mine", "one"),
        conversations.load(""),
        conversations.delete("mine"),
    ):
        with pytest.raises(holdfast.InvalidRequest):
            await call
    part = ToolReturnPart("t", object(), tool_call_id="c")
    bad = Conversation(messages=[ModelRequest(parts=[part])], conversation_id="bad")
    with pytest.raises(holdfast.NotSerializable, match="content"):
        await conversations.save(bad)
    assert bad.revision is None
    lost = ConversationRecord(conversation_id="bad", head_id="nowhere", forked_from="nobody")
    with pytest.raises(ConversationConflict):
        await conversations.write_record(lost, expected_revision=None)
    assert not home.store.session("bad").exists()
    assert [r.conversation_id for r in await conversations.list_conversations()] == []
    with pytest.raises(holdfast.InvalidRequest, match="a store or a URL"):
        over(42)


@asynchronous
async def test_a_cancelled_save_is_finished_and_blocks_nobody(memory, monkeypatch):
    conversations = over(memory.store)
    commit, begun, go = memory.store._repository.backend.commit, asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def slow(change):
        loop.call_soon_threadsafe(begun.set)
        assert go.wait(60)
        return commit(change)

    monkeypatch.setattr(memory.store._repository.backend, "commit", slow)
    conversation = Conversation(messages=turn("one"), conversation_id="c")
    saving = asyncio.create_task(conversations.save(conversation))
    await begun.wait()  # so the loop goes on while a commit waits
    saving.cancel()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await saving
    assert prompts(await conversations.load("c")) == ["one", "one!"]


@asynchronous
async def test_who_opens_a_store_closes_it(tmp_path):
    async with HoldfastConversationStore(tmp_path / "own.db") as conversations:
        await say(conversations, "c", "one")
    with pytest.raises(holdfast.InvalidRequest):
        await conversations.load("c")
    with pytest.raises(holdfast.InvalidRequest):
        conversations.host.store.session("c")
    with holdfast.open(tmp_path / "own.db") as store:
        async with HoldfastConversationStore(store) as conversations:
            assert await conversations.load("c")
        assert store.session("c").exists()
        checkpoints = HoldfastCheckpoints(store)
        checkpoints.close()
        assert store.session("c").exists()
    checkpoints = HoldfastCheckpoints(str(tmp_path / "own.db"))
    await checkpoints.aclose()
    with pytest.raises(holdfast.InvalidRequest):
        checkpoints.conversations.host.store.session("c")


# -- runs -------------------------------------------------------------------------------------


def planner(checkpoints, done, *, fail=None, second=None):
    """An agent that calls two tools at once, and says what they returned."""

    def model(messages, info):
        if fail and fail(messages):
            raise RuntimeError("the model is away")
        last = messages[-1].parts
        if not isinstance(last[0], ToolReturnPart):
            calls = [ToolCallPart(name, {}, tool_call_id=name[0]) for name in ("one", "two")]
            return ModelResponse(parts=calls)
        return ModelResponse(parts=[TextPart(" ".join(str(p.content) for p in last))])

    agent = Agent(FunctionModel(model), capabilities=[checkpoints], name="planner")

    @agent.tool_plain(sequential=True)
    def one() -> str:
        done.append("one")
        return "1"

    @agent.tool_plain(sequential=True)
    def two() -> str:
        done.append("two")
        return second() if second else "2"

    return agent


class Effects(list[str]):
    """What tools have done."""


def broken() -> NoReturn:
    raise RuntimeError("broken")


@asynchronous
async def test_a_run_is_kept_as_it_goes_on(home, conversations):
    done = Effects()
    agent = planner(HoldfastCheckpoints(conversations), done)
    result = await agent.run("go", conversation=Conversation(conversation_id="r"))
    assert (result.output, done) == ("1 2", ["one", "two"])
    found = await conversations.load("r")
    assert found.messages == result.all_messages()
    assert found.usage == result.usage
    assert await conversations.interrupted() == []
    session = home.store.session("r")
    triggers = ["model_request", "model_response", "tool_call", "tool_call"]
    triggers += ["model_request", "model_response", "turn"]
    history = list(session.history())[::-1]
    assert [c.trigger for c in history] == triggers
    assert [len(c.pending) for c in history] == [0, 2, 1, 0, 0, 0, 0]
    assert session.agent == "planner"
    assert session.head.status == "completed"
    assert sum(c.usage.tokens for c in history) == result.usage.total_tokens > 0
    [spent] = session.usage().spent.by_model().values()
    assert (spent.input, spent.output) == (result.usage.input_tokens, result.usage.output_tokens)
    assert spent.model == result.response.model_name
    assert list(session.load()) == ["messages"]
    await conversations.save(result)  # as one does without checkpoints: nothing is stored again
    again = await agent.run("more", conversation=await conversations.load("r"))
    assert len((await conversations.load("r")).messages) == len(again.all_messages()) == 8


@asynchronous
async def test_a_failed_run_goes_on_where_it_was(home, conversations):
    done = Effects()
    checkpoints = HoldfastCheckpoints(conversations)
    await planner(checkpoints, []).run("before", conversation=Conversation(conversation_id="r"))
    with pytest.raises(RuntimeError, match="broken"):
        await planner(checkpoints, done, second=broken).run(
            "go", conversation=await conversations.load("r")
        )
    assert await conversations.interrupted() == ["r"]
    head = home.store.session("r").head
    assert (head.status, head.reason) == ("failed", "RuntimeError: broken")
    assert [call.name for call in head.pending] == ["two"]
    found = await conversations.load("r")
    assert len(found.messages) == 6
    with pytest.raises(UserError, match="no new prompt"):
        await planner(checkpoints, done).run("other", conversation=await conversations.load("r"))
    result = await planner(checkpoints, done).run(conversation=found)
    assert (result.output, done) == ("1 2", ["one", "two", "two"])
    assert (await conversations.load("r")).messages == result.all_messages()
    assert len(result.all_messages()) == 8
    assert (await conversations.load("r")).usage.requests == 4
    assert await conversations.interrupted() == []
    assert home.store.verify(read_data=True).ok


@asynchronous
async def test_a_run_that_waits_for_approval(memory):
    conversations, done = over(memory.store), Effects()

    def model(messages, info):
        if isinstance(messages[-1].parts[0], ToolReturnPart):
            return ModelResponse(parts=[TextPart("done")])
        calls = [ToolCallPart(n, {}, tool_call_id=n) for n in ("remove", "tell")]
        return ModelResponse(parts=calls)

    def build(*, crash):
        checkpoints = [HoldfastCheckpoints(conversations)]
        agent: Any = Agent(
            FunctionModel(model), capabilities=checkpoints, output_type=[str, DeferredToolRequests]
        )

        @agent.tool_plain(requires_approval=True, sequential=True)
        def remove() -> str:
            done.append("remove")
            return "removed"

        @agent.tool_plain(requires_approval=True, sequential=True)
        def tell() -> str:
            done.append("tell")
            return broken() if crash else "told"

        return agent

    await build(crash=True).run("go", conversation=Conversation(conversation_id="r"))
    head = memory.store.session("r").head
    assert (head.status, [c.name for c in head.pending]) == ("halted", ["remove", "tell"])
    found = await conversations.load("r")
    approved = found.deferred_tool_requests.build_results(approve_all=True)
    with pytest.raises(RuntimeError, match="broken"):
        await build(crash=True).run(conversation=found, deferred_tool_results=approved)
    found = await conversations.load("r")
    assert found.deferred_tool_requests is not None
    result = await build(crash=False).run(conversation=found, deferred_tool_results=approved)
    assert done == ["remove", "tell", "tell"]
    assert [p.content for p in result.all_messages()[2].parts] == ["removed", "told"]
    assert (await conversations.load("r")).messages == result.all_messages()
    assert (await conversations.load("r")).deferred_tool_requests is None


@asynchronous
async def test_a_history_that_is_rewritten_during_the_run(memory):
    """By a capability that compacts it: what a model is sent then is what a run goes on with."""
    conversations, done = over(memory.store), Effects()

    def compact(messages):
        return messages[-1:] if len(messages) > 4 else messages

    def agent(**options):
        found = planner(HoldfastCheckpoints(conversations), done, **options)
        return found, [ProcessHistory(compact)]

    first, extra = agent()
    await first.run("one", conversation=Conversation(conversation_id="r"))
    failing, extra = agent(second=broken)
    with pytest.raises(RuntimeError, match="broken"):
        await failing.run("two", conversation=await conversations.load("r"), capabilities=extra)
    found = await conversations.load("r")
    assert prompts_only(found.messages) == ["two"]
    result = await first.run(conversation=found)
    assert done == ["one", "two", "one", "two", "two"]
    stored = await conversations.load("r")
    assert stored.messages == result.all_messages()
    (left,) = (await conversations.read_record("r")).branches
    entries = await conversations.read_history(left)
    assert prompts_only([entry.message for entry in entries]) == ["one"]


def prompts_only(messages):
    parts = [part for message in messages for part in message.parts]
    return [part.content for part in parts if isinstance(part, UserPromptPart)]


@asynchronous
async def test_runs_that_are_streamed_or_driven_by_hand(memory):
    conversations = over(memory.store)
    agent: Any = Agent(TestModel(), capabilities=[HoldfastCheckpoints(conversations)])

    @agent.tool_plain
    def one() -> str:
        return "1"

    async with agent.run_stream("go", conversation_id="stream") as stream:
        await stream.get_output()
    async with agent.iter("go", conversation_id="iter") as run:
        async for _ in run:
            pass
    async with agent.iter("go", conversation_id="left") as run:
        async for node in run:
            if agent.is_call_tools_node(node):
                break
    for id in ("stream", "iter"):
        assert len((await conversations.load(id)).messages) == 4
    assert await conversations.interrupted() == ["left"]
    result = await agent.run(conversation=await conversations.load("left"))
    assert len(result.all_messages()) == 4


@asynchronous
async def test_a_cancelled_run_goes_on(memory):
    conversations, begun = over(memory.store), asyncio.Event()
    agent: Any = Agent(TestModel(), capabilities=[HoldfastCheckpoints(conversations)])

    @agent.tool_plain
    async def one() -> str:
        if not begun.is_set():
            begun.set()
            await asyncio.Event().wait()
        return "1"

    running = asyncio.create_task(agent.run("go", conversation_id="r"))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    result = await agent.run(conversation=await conversations.load("r"))
    assert len(result.all_messages()) == 4


@asynchronous
async def test_a_conversation_goes_on_without_being_loaded(memory):
    conversations = over(memory.store)
    picture = BinaryContent(b"\x89PNG\xff", media_type="image/png")  # comes back as BinaryImage

    def model(messages, info):
        return ModelResponse(parts=[TextPart("see"), FilePart(picture)])

    agent = Agent(FunctionModel(model), capabilities=[HoldfastCheckpoints(conversations)])
    result = await agent.run([picture], conversation=Conversation(conversation_id="r"))
    for _ in range(2):
        result = await agent.run([picture], conversation=result.conversation)
    assert len((await conversations.load("r")).messages) == 6


@asynchronous
async def test_what_tools_have_returned_is_used_after_a_failed_request(conversations):
    done = Effects()
    checkpoints = HoldfastCheckpoints(conversations)
    fresh = Conversation(conversation_id="r")
    with pytest.raises(RuntimeError, match="away"):
        await planner(checkpoints, done, fail=lambda messages: len(messages) == 3).run(
            "go", conversation=fresh
        )
    found = await conversations.load("r")
    assert len(found.messages) == 3
    result = await planner(checkpoints, done).run(conversation=found)
    assert (result.output, done) == ("1 2", ["one", "two"])
    assert len((await conversations.load("r")).messages) == 4


@asynchronous
async def test_results_come_back_as_they_were(memory):
    conversations = over(memory.store)
    done = Effects()
    crash = [True]

    def model(messages, info):
        if isinstance(messages[-1].parts[0], ToolReturnPart):
            return ModelResponse(parts=[TextPart("done")])
        calls = [ToolCallPart(n, {}, tool_call_id=n) for n in ("rich", "retry", "crash")]
        return ModelResponse(parts=calls)

    agent: Any = Agent(FunctionModel(model), capabilities=[HoldfastCheckpoints(conversations)])

    @agent.tool_plain(sequential=True)
    def rich() -> ToolReturn:
        done.append("rich")
        return ToolReturn({"raw": b"\xff"}, content=["see", "this"], metadata={"cost": 3})

    @agent.tool_plain(sequential=True)
    def retry() -> str:
        done.append("retry")
        raise ModelRetry("not like this")

    @agent.tool_plain(name="crash", sequential=True)
    def crashing() -> str:
        if crash.pop():
            crash.append(False)
            raise RuntimeError("broken")
        crash.append(False)
        return "fine"

    with pytest.raises(RuntimeError):
        await agent.run("go", conversation=Conversation(conversation_id="r"))
    result = await agent.run(conversation=await conversations.load("r"))
    assert done == ["rich", "retry"]
    returns = result.all_messages()[2].parts
    assert (returns[0].content, returns[0].metadata) == ({"raw": b"\xff"}, {"cost": 3})
    assert (returns[1].content, returns[1].outcome) == ("not like this", "retried")
    assert returns[2].content == "fine"
    assert returns[3].content == ["see", "this"]


@asynchronous
async def test_of_two_that_resume_a_run_one_is_stopped(home, conversations):
    checkpoints = HoldfastCheckpoints(conversations)
    with pytest.raises(RuntimeError):
        await planner(checkpoints, [], second=broken).run(
            "go", conversation=Conversation(conversation_id="r")
        )
    other = HoldfastCheckpoints(HoldfastConversationStore(home.another()))
    found, done = await conversations.load("r"), Effects()
    late = Effects()
    result = await planner(other, done).run(conversation=await conversations.load("r"))
    assert (result.output, done) == ("1 2", ["two"])
    with pytest.raises(ConversationConflict):
        await planner(checkpoints, late).run(conversation=found)
    assert late == []
    assert (await conversations.load("r")).messages == result.all_messages()


@asynchronous
async def test_an_unfinished_run_is_not_passed_over(conversations):
    checkpoints, done = HoldfastCheckpoints(conversations), Effects()
    await planner(checkpoints, []).run("one", conversation_id="r")
    found = await conversations.load("r")
    with pytest.raises(RuntimeError, match="broken"):
        await planner(checkpoints, [], second=broken).run("two", conversation=found)
    with pytest.raises(ConversationConflict):
        await planner(checkpoints, done).run("three", conversation=found)
    assert done == []
    unfinished = await conversations.load("r")
    assert prompts_only(unfinished.messages) == ["one", "two"]
    left = await conversations.branch("r", at=4, expected_revision=unfinished.revision)
    await planner(checkpoints, done).run("three", conversation=left)
    assert prompts_only((await conversations.load("r")).messages) == ["one", "three"]


@asynchronous
async def test_who_resumes_a_run_takes_it_over(home, conversations):
    done, others = Effects(), over(home.another())

    def build(store, name):
        begun, go = asyncio.Event(), asyncio.Event()
        agent = planner(HoldfastCheckpoints(store), [])

        @agent.tool_plain(name="wait", sequential=True)
        async def wait() -> str:
            done.append(name)
            begun.set()
            await go.wait()
            return str(name)

        return agent, begun, go

    def model(messages, info):
        if isinstance(messages[-1].parts[0], ToolReturnPart):
            return ModelResponse(parts=[TextPart("done")])
        calls = [ToolCallPart("wait", {}, tool_call_id=n) for n in ("first", "second")]
        return ModelResponse(parts=calls)

    old, old_begun, old_go = build(conversations, "old")
    new, new_begun, new_go = build(others, "new")
    with old.override(model=FunctionModel(model)), new.override(model=FunctionModel(model)):
        running = asyncio.create_task(old.run("go", conversation_id="r"))
        await old_begun.wait()
        resumed = asyncio.create_task(new.run(conversation=await others.load("r")))
        await new_begun.wait()
        old_go.set()
        with pytest.raises(ConversationConflict):
            await running
        new_go.set()
        result = await resumed
    assert done == ["old", "new", "new"]
    assert (await conversations.load("r")).messages == result.all_messages()


@asynchronous
async def test_a_capability_may_have_a_tool_run_again(memory):
    conversations, done = over(memory.store), Effects()

    class Twice(AbstractCapability[Any]):
        def get_ordering(self):
            return CapabilityOrdering(position="outermost")

        async def wrap_tool_execute(self, ctx, *, call, tool_def, args, handler):
            await handler(args)
            return await handler(args)

    capabilities = [Twice(), HoldfastCheckpoints(conversations)]
    agent: Any = Agent(TestModel(), capabilities=capabilities)

    @agent.tool_plain
    def one() -> int:
        done.append("one")
        return len(done)

    result = await agent.run("go", conversation_id="r")
    assert result.all_messages()[2].parts[0].content == len(done) == 2


@asynchronous
async def test_ids_of_calls_may_come_again(memory):
    conversations, done = over(memory.store), Effects()

    def model(messages, info):
        if len(messages) > 5:
            return ModelResponse(parts=[TextPart("done")])
        return ModelResponse(parts=[ToolCallPart("count", {}, tool_call_id="same")])

    agent: Any = Agent(FunctionModel(model), capabilities=[HoldfastCheckpoints(conversations)])

    @agent.tool_plain
    def count() -> int:
        done.append("count")
        return broken() if len(done) == 2 else len(done)

    with pytest.raises(RuntimeError, match="broken"):
        await agent.run("go", conversation_id="r")
    assert [call.id for call in memory.store.session("r").head.pending] == ["same"]
    result = await agent.run(conversation=await conversations.load("r"))
    returns = [m.parts[0].content for m in result.all_messages()[2::2]]
    assert returns == [1, 3, 4]


@asynchronous
async def test_a_run_that_was_overtaken_stops_before_its_next_tool(memory):
    conversations = over(memory.store)
    checkpoints, done = HoldfastCheckpoints(conversations), Effects()

    def model(messages, info):
        calls = [ToolCallPart(n, {}, tool_call_id=n) for n in ("one", "two")]
        return ModelResponse(parts=calls)

    agent = Agent(FunctionModel(model), capabilities=[checkpoints])

    @agent.tool_plain(sequential=True)
    async def one() -> str:
        done.append("one")
        await say(conversations, "r", "meanwhile")
        return "1"

    @agent.tool_plain(sequential=True)
    async def two() -> str:
        done.append("two")
        return "2"

    with pytest.raises(ConversationConflict):
        await agent.run("go", conversation=Conversation(conversation_id="r"))
    assert done == ["one"]
    messages = (await conversations.load("r")).messages
    assert messages[-1].parts[0].content == "meanwhile!"


@asynchronous
async def test_a_history_that_was_left_out_is_noticed(memory):
    conversations = over(memory.store)
    agent = planner(HoldfastCheckpoints(conversations, scope=lambda ctx: "u1"), [])
    await agent.run("go", conversation_id="r")
    assert [r.scope for r in await conversations.list_conversations()] == ["u1"]
    assert await conversations.load("r", scope="u2") is None
    with pytest.raises(holdfast.InvalidRequest, match="history"):
        await agent.run("more", conversation_id="r")
    checkpoints: Any = HoldfastCheckpoints(conversations)
    with pytest.raises(holdfast.InvalidRequest, match="no run"):
        await checkpoints.before_run(None)


@asynchronous
async def test_a_result_that_cannot_be_kept_ends_the_run(memory):
    conversations = over(memory.store)
    agent = planner(HoldfastCheckpoints(conversations), [], second=object)
    with pytest.raises(holdfast.NotSerializable, match="content"):
        await agent.run("go", conversation=Conversation(conversation_id="r"))
    assert [c.name for c in memory.store.session("r").head.pending] == ["two"]


SCRIPT = """
import asyncio, os, sys
from pathlib import Path
from typing import Any, NoReturn
from pydantic_ai.conversation import Conversation
from holdfast.adapters.pydantic_ai import HoldfastCheckpoints
from tests.adapters.test_pydantic_ai import planner

url, log, mode = sys.argv[1:]

class Done:
    def append(self, name):
        with open(log, "a") as file:
            file.write(name + " ")
        if mode == "crash" and name == "two":
            os._exit(9)

async def main():
    checkpoints = HoldfastCheckpoints(url)
    conversations = checkpoints.conversations
    agent = planner(checkpoints, Done())
    if mode == "crash":
        await agent.run("go", conversation=Conversation(conversation_id="trip"))
    else:
        (id,) = await conversations.interrupted()
        result = await agent.run(conversation=await conversations.load(id))
        print(result.output, len(result.all_messages()))
    await checkpoints.aclose()

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["sqlite", "files"])
def test_after_a_crash_only_the_pending_tool_runs(kind, tmp_path):
    url = str(tmp_path / "store.db") if kind == "sqlite" else f"files:{tmp_path / 'store'}"
    log = tmp_path / "done"

    def process(mode):
        return subprocess.run(
            [sys.executable, "-c", SCRIPT, url, str(log), mode],
            cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False,
        )  # fmt: skip

    assert process("crash").returncode == 9
    with holdfast.open(url, create=False) as store:
        session: Any = store.session("trip")
        state = session.load()
        assert [m["kind"] for m in state["run"]["messages"]] == ["request", "response"]
        assert list(state["run"]["results"]) == ["o"]
        assert [call.name for call in session.head.pending] == ["two"]
    resumed = process("resume")
    assert resumed.stdout == "1 2 4\n", resumed.stderr
    assert log.read_text() == "one two two "
