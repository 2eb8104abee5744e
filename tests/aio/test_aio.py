"""The async facade: the same API, a free loop, and cancellation that leaves nothing half done."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import functools
import inspect
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress
from typing import Any

import pytest

import holdfast
from holdfast.aio import store as aio_store
from holdfast.aio import workers
from holdfast.aio.run import AsyncRun
from holdfast.aio.store import AsyncSession, AsyncStore
from holdfast.session import Session
from holdfast.store import Store

OWN = {
    "Store.retention": "given to aopen()",
    "Store.watcher": "watch() is a loop over it",
    "Session.notes": "for adapters, which call it in a worker",
    "Session.series": "for adapters, which call it in a worker",
}
"""Methods without a counterpart, and why."""


def asynchronous(test):
    """Run a test on a loop of its own; it must not leave threads behind."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        before = {*threading.enumerate()}  # some of earlier tests may be on their way out
        asyncio.run(test(*args, **kwargs))
        new = {*threading.enumerate()} - before
        assert [t.name for t in new if t.name.startswith("holdfast")] == []

    return run


@pytest.fixture(params=["memory", "sqlite"])
def url(request, tmp_path):
    return "memory:" if request.param == "memory" else tmp_path / "store.db"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store.db"


async def listed(items):
    return [item async for item in items]


async def until(condition):
    while not condition():  # noqa: ASYNC110 - a thread has no asyncio.Event
        await asyncio.sleep(0.001)


class Gate:
    """Holds back commits until it is opened."""

    def __init__(self) -> None:
        self.waiting = 0
        self._open = threading.Event()
        self.open = self._open.set

    def pass_through(self):
        self.waiting += 1
        assert self._open.wait(60), "nobody opened the gate"


@contextmanager
def before_commits(store: AsyncStore, action):
    backend = store.sync._repository.backend
    commit = backend.commit

    def slow(change):
        action()
        commit(change)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "commit", slow)
        yield


@contextmanager
def gated(store: AsyncStore):
    gate = Gate()
    with before_commits(store, gate.pass_through):
        try:
            yield gate
        finally:
            gate.open()


# -- the same API --------------------------------------------------------------------------------


def public(kind):
    for name, member in vars(kind).items():
        if not name.startswith("_") and f"{kind.__name__}.{name}" not in OWN:
            yield name, member


@pytest.mark.parametrize(("kind", "mirror"), [(Store, AsyncStore), (Session, AsyncSession)])
def test_every_method_has_its_counterpart(kind, mirror):
    for name, member in public(kind):
        other = getattr(mirror, name, None)
        assert other is not None, f"{mirror.__name__}.{name} is missing"
        assert other.__doc__ or not member.__doc__
        if name in ("run", "conversation", "autosave", "resume_all"):
            continue  # which have a run or a conversation of their own
        if isinstance(other, property):
            continue  # it does not block
        function: Any = member.fget if isinstance(member, property) else member
        returned = inspect.signature(function).return_annotation
        if returned.startswith("Iterator[") and name != "watch":
            assert not inspect.iscoroutinefunction(other)
        else:
            assert inspect.iscoroutinefunction(other), name
        ours, theirs = (inspect.signature(f).parameters for f in (other, function))
        assert list(ours.values()) == list(theirs.values()), name


def test_what_a_run_does_has_its_counterpart():
    inner = {
        "open", "close", "enter_loop", "end_turn", "take_checkpoint",
        "prepare", "recorded", "succeed", "fail", "withdraw", "stream", "wait",
    }  # fmt: skip
    names = {name for kind in holdfast.Run.__mro__[:-1] for name in vars(kind) if name[0] != "_"}
    assert [name for name in sorted(names - inner) if not hasattr(AsyncRun, name)] == []


def test_own_methods_exist():
    for name in OWN:
        kind, method = name.split(".")
        assert hasattr({"Store": Store, "Session": Session}[kind], method)


def test_aopen_has_the_options_of_open():
    ours = dict(inspect.signature(holdfast.aopen).parameters)
    assert ours.pop("workers").default == 32
    assert ours == dict(inspect.signature(holdfast.open).parameters)


def test_sync_users_do_not_import_asyncio():
    code = "import holdfast, sys; holdfast.Store, holdfast.Run; sys.exit('asyncio' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    with pytest.raises(AttributeError, match="aopne"):
        holdfast.aopne  # type: ignore[attr-defined]  # noqa: B018


@dataclasses.dataclass
class Plan:
    goal: str


@asynchronous
async def test_a_session_from_first_to_last(url):
    async with holdfast.aopen(url) as store:
        s = await store.session("s", agent="a")
        assert (s.name, s.agent) == ("s", "a")
        assert repr(s) == "<AsyncSession 's'>"
        assert repr(store).startswith("<AsyncStore ")
        assert s  # as a Session is, with or without checkpoints
        assert await s.head() is None
        assert (await s.step(), await s.count(), await s.exists()) == (0, 0, False)
        assert await listed(s.history()) == []

        first = await s.save({"log": [1]}, label="begin", tags=["t"])
        second = await s.append("log", 2, trigger="tool")
        third = await s.patch(set={"plan": {"goal": "x"}}, append={"log": [3]}, status="completed")
        state = {"log": [1, 2, 3], "plan": {"goal": "x"}}
        assert await s.load() == state
        assert await s.load(second) == {"log": [1, 2]}
        await s.patch(drop=["log"])
        await s.undo()
        await s.redo()
        await s.undo()
        assert await s.load() == state
        assert (await s.step(), await s.count()) == (3, 4)
        assert await s.head() == await s.get() == await s.refresh() == third
        assert [c.id for c in await listed(s.history())] == [third.id, second.id, first.id]
        assert len(await listed(s.tree())) == 4
        assert [c.id for c in await listed(s.checkpoints(status="completed"))] == [third.id]
        assert await s.diff(first)
        assert (await s.blame("plan.goal")).id == third.id
        await s.patch(set={"plan.goal": "y"})
        await s.append("plan.steps", 1)
        assert (await s.load())["plan"] == {"goal": "y", "steps": [1]}
        await s.undo()
        await s.undo()
        assert (await s.verify()).ok

        other = await s.fork("other", at=second)
        assert isinstance(other, AsyncSession)
        assert await other.load() == {"log": [1, 2]}
        assert await (await other.fork("model")).save(Plan("y"))
        assert await (await store.session("model")).load(as_=Plan) == Plan("y")

        assert (await s.rewind(first)).id == first.id
        assert "u" in (await s.tag(None, "u")).tags
        assert (await s.label(first, "again")).label == "again"
        assert [o.kind for o in await s.operations()][-3:] == ["rewind", "tag", "label"]
        await s.delete(second)
        await s.undo()
        rule = holdfast.Retention(keep_last=1)
        assert (await s.prune(rule)).removed
        assert (await s.prune(rule, dry_run=True)).removed == ()


@asynchronous
async def test_a_store_from_first_to_last(path, tmp_path):
    async with holdfast.aopen(path) as store:
        for name in "abc":
            s = await store.session(name, agent=name * 2)
            await s.save({"text": f"looking for {name}"}, tags=[name])
            await s.append("log", name)
        head = await s.head()
        assert head is not None
        assert await store.get(head.id) == head
        assert [i.name for i in await listed(store.sessions())] == ["a", "b", "c"]
        assert [i.name for i in await listed(store.sessions(after="a", agent="bb"))] == ["b"]
        assert [c.session for c in await listed(store.checkpoints(tag="b"))] == ["b"]
        assert len(await listed(store.search("looking for c", limit=1))) == 1
        assert (await store.verify(sessions=["a"])).ok
        assert (await store.stats(largest=1)).sessions == 3
        assert (await store.repair()).sessions == ()
        assert len(await store.prune(holdfast.Retention(keep_last=1), dry_run=True)) == 3
        await s.delete()
        phases = []
        await store.gc(lambda phase, *_: phases.append(phase))
        assert "reading" in phases
        assert (await store.backup(tmp_path / "copy.db")).ok
        assert (await store.backup(tmp_path / "copy.db", keep=2)).ok
    with holdfast.open(tmp_path / "copy.db") as copy:
        assert [i.name for i in copy.sessions()] == ["a", "b"]


@asynchronous
async def test_errors_keep_their_type(url):
    async with holdfast.aopen(url) as store:
        one, two = await store.session("s"), await store.session("s")
        await one.save({})
        with pytest.raises(holdfast.HeadMoved) as caught:
            await two.save({})
        assert caught.value.session == "s"
        with pytest.raises(holdfast.NotSerializable):
            await one.save({"x": object()})
        with pytest.raises(holdfast.InvalidRequest):
            await store.session("")
        with pytest.raises(holdfast.InvalidRequest):
            store.checkpoints(limit=-1)  # at once, as in the sync API
        with pytest.raises(holdfast.CheckpointNotFound):
            await listed(one.history("0" * 26))
        with pytest.raises(holdfast.SessionNotFound):
            await (await store.session("none")).load()


@asynchronous
async def test_opening(path):
    with pytest.raises(holdfast.StoreNotFound):
        await holdfast.aopen(path, create=False)
    with pytest.raises(holdfast.StoreNotFound):
        async with holdfast.aopen(path, create=False):
            pytest.fail("there is no store")
    for wrong in (0, -1, True, "4"):
        with pytest.raises(holdfast.InvalidRequest, match="workers"):
            holdfast.aopen(path, workers=wrong)  # type: ignore[arg-type]
    assert not path.exists()
    store = await holdfast.aopen(path)
    async with store as same:
        assert same is store
        await (await store.session("s")).save({})
    with pytest.raises(holdfast.InvalidRequest, match="closed"):
        await store.session("s")


@asynchronous
async def test_iterators_fetch_pages_in_workers(url):
    async with holdfast.aopen(url) as store:
        s = await store.session("s")
        for i in range(150):
            await s.append("log", i)
        threads = []
        backend = store.sync._repository.backend
        view = backend.view

        def watched():
            threads.append(threading.current_thread())
            return view()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backend, "view", watched)
            steps = [c.step for c in await listed(s.history())]
            assert steps == list(range(150, 0, -1))
            assert len(await listed(store.checkpoints())) == 150
            assert len(await listed(s.tree())) == 150
            assert len(await listed(store.sessions())) == 1
            assert threads
            assert threading.current_thread() not in threads
        async for c in s.tree():  # saving goes on in the middle of a listing
            await s.append("log", c.step)
            if c.step == 70:
                break
        assert await s.count() == 220


@asynchronous
async def test_watching(url):
    async with holdfast.aopen(url, workers=1) as store:
        s = await store.session("s")
        told: dict[str, list] = {"own": [], "all": []}

        async def listen(who, events):
            async for event in events:
                told[who].append(event.id)

        tasks = [
            asyncio.ensure_future(listen("own", await s.watch(interval=0.001))),
            asyncio.ensure_future(listen("all", await store.watch(interval=0.001))),
        ]
        saved = [(await s.save({"i": 1})).id, (await s.append("log", 1)).id]
        other = (await (await store.session("other")).save({})).id  # a watcher takes no worker
        assert await listed(await s.watch(interval=0.001, patience=0.005)) == []
        await until(lambda: len(told["all"]) == 3 and len(told["own"]) == 2)
        await store.close()
        await asyncio.gather(*tasks)  # they end with the store
        assert told["own"] == saved
        assert sorted(told["all"]) == sorted([*saved, other])


@asynchronous
async def test_handles_of_another_type_are_used_as_such():
    class Counting(Session):
        saves = 0

        def save(self, *args, **kwargs):
            type(self).saves += 1
            return super().save(*args, **kwargs)

    async with holdfast.aopen("memory:") as store:
        s = AsyncSession(Counting(store.sync._repository, "s"), store._workers)
        await s.save({})
        assert Counting.saves == 1


@asynchronous
async def test_context_variables_reach_the_worker():
    trace: contextvars.ContextVar[str] = contextvars.ContextVar("trace", default="none")
    async with holdfast.aopen("memory:") as store:
        seen: dict[str, str] = {}

        async def job(name):
            trace.set(name)
            s = await store.session(name)
            await s.save({})
            await s.exists()

        def note():
            seen[trace.get()] = threading.current_thread().name

        with before_commits(store, note):
            await asyncio.gather(*(job(name) for name in ("x", "y")))
        assert set(seen) == {"x", "y"}
        assert all(name.startswith("holdfast") for name in seen.values())


# -- many at once --------------------------------------------------------------------------------


@asynchronous
async def test_fifty_sessions_on_one_loop(url):
    async with holdfast.aopen(url, durability="normal") as store:

        async def work(n):
            s = await store.session(f"s{n}")
            for i in range(10):
                await s.append("log", [n, i])
            return await s.load()

        states = await asyncio.gather(*(work(n) for n in range(50)))
        assert states == [{"log": [[n, i] for i in range(10)]} for n in range(50)]
        assert (await store.verify()).ok


def test_two_loops_share_a_store(url):
    store = asyncio.run(opened(url))
    results: dict[int, list] = {}

    async def work(n):
        shared = await store.session("shared")
        mine = [await store.session(f"{n}-{k}") for k in range(5)]

        async def save(s):
            for i in range(20):
                await s.append("log", i)
            return await s.load()

        results[n] = await asyncio.gather(*map(save, mine))
        for i in range(20):
            while True:
                try:
                    await shared.append("log", [n, i])
                    break
                except holdfast.HeadMoved:
                    await shared.refresh()

    threads = [threading.Thread(target=asyncio.run, args=(work(n),)) for n in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()

    async def finish():
        log = (await (await store.session("shared")).load())["log"]
        assert [[e for e in log if e[0] == n] for n in range(2)] == [
            [[n, i] for i in range(20)] for n in range(2)
        ]
        await store.close()

    asyncio.run(finish())
    assert results == {n: [{"log": list(range(20))}] * 5 for n in range(2)}


async def opened(url):
    return await holdfast.aopen(url, durability="normal")


def test_two_loops_share_a_handle():
    async def prepare():
        store = await opened("memory:")
        return store, await store.session("s")

    store, s = asyncio.run(prepare())

    async def work():
        await asyncio.gather(*(s.append("log", i) for i in range(50)))

    threads = [threading.Thread(target=asyncio.run, args=(work(),)) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()

    async def finish():
        assert Counter((await s.load())["log"]) == dict.fromkeys(range(50), 2)
        await store.close()

    asyncio.run(finish())


@asynchronous
async def test_calls_of_a_handle_keep_their_order_and_take_one_worker():
    async with holdfast.aopen("memory:", workers=2) as store:
        s, other = await store.session("s"), await store.session("other")
        with gated(store) as gate:
            saves = [asyncio.ensure_future(s.append("log", i)) for i in range(40)]
            await until(lambda: gate.waiting)
            assert await other.count() == 0  # there is a worker left
            gate.open()
            await asyncio.gather(*saves)
        assert await s.load() == {"log": list(range(40))}


@asynchronous
async def test_the_loop_runs_on_while_a_save_is_slow(path):
    """The commit waits for the loop: if that were blocked, both would stand still."""
    async with holdfast.aopen(path) as store:
        s = await store.session("s")
        with gated(store) as gate:
            save = asyncio.ensure_future(s.save({}))
            await until(lambda: gate.waiting)
            for _ in range(10):
                await asyncio.sleep(0)
            assert not save.done()
            gate.open()
            await save


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_after_fork(path):
    code = f"""
import asyncio, os, holdfast

async def prepare():
    store = await holdfast.aopen({str(path)!r})
    s = await store.session("s")
    await asyncio.gather(*(s.append("log", 0) for _ in range(5)))
    return store, s

async def save(store, s, who):
    other = await store.session(who)
    await other.save({{"who": who}})
    await s.count()
    if who == "child":
        await s.append("log", 1)
    await store.close()

store, s = asyncio.run(prepare())
child = os.fork()
asyncio.run(save(store, s, "parent" if child else "child"))
if child:
    assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)
    with holdfast.open(path) as store:
        assert [i.name for i in store.sessions()] == ["child", "parent", "s"]
        assert store.session("s").load() == {"log": [0] * 5 + [1]}


# -- cancellation --------------------------------------------------------------------------------


async def campaign(rounds: int, seed: int) -> tuple[list[str], Counter[str]]:
    """Cancel saves at random moments. What was found wrong, and how saves ended."""
    wrong: list[str] = []
    ends: Counter[str] = Counter()
    rng = random.Random(seed)

    async def one(store, name):
        s = await store.session(name)
        before = await s.save({"i": -1})
        for i in range(rounds):
            save = asyncio.ensure_future(s.save({"i": i}))
            for _ in range(rng.choice((0, 1, 1, 2, 3))):  # also again, while it waits
                await asyncio.sleep(rng.choice((0, 0, 0.0005, 0.002, 0.004)))
                save.cancel()
            done = None
            with suppress(asyncio.CancelledError):
                done = await save
            # A handle of our own shows what is there now.
            there = store.sync.session(name)
            head, state = there.head, there.load()
            if done is not None:
                ends["saved"] += 1
                if head.id != done.id:
                    wrong.append(f"{name} {i}: acknowledged, but the head is another")
            elif head.id == before.id:
                ends["not there"] += 1
            else:
                ends["there"] += 1
                if head.parent != before.id or state != {"i": i}:
                    wrong.append(f"{name} {i}: half there")
            try:
                before = await s.save({"i": i, "next": True})
            except holdfast.HeadMoved:
                wrong.append(f"{name} {i}: the handle expects another head")
                before = await s.refresh()
            if before.parent != head.id:
                wrong.append(f"{name} {i}: written after it was cancelled")

    async with holdfast.aopen("memory:", workers=2) as store:
        with before_commits(store, lambda: time.sleep(rng.choice((0, 0.001, 0.002)))):
            await asyncio.gather(*(one(store, f"s{n}") for n in range(4)))
        assert (await store.verify()).ok
    return wrong, ends


def test_cancelled_at_any_moment(rounds):
    wrong, ends = asyncio.run(campaign(rounds(60, torture=5_000), seed=1))
    print(ends)
    assert wrong == []
    assert set(ends) == {"saved", "there", "not there"}


async def careless(call):
    """Lets go as soon as it is cancelled."""
    await woken(call)
    return call._result


async def woken(call):
    call._box.waiting += 1
    try:
        if not call._done:
            call._waiter = call._box.loop.create_future()
            await call._waiter
    finally:
        call._box.waiting -= 1


async def once(call):
    """Waits for the end, but only until it is cancelled again."""
    try:
        return await careless(call)
    except asyncio.CancelledError:
        if not call.claim():
            await woken(call)
        raise


async def stubborn(call):
    """Finishes everything, also what nobody began, and tells the caller nothing of it."""
    while not call._done:
        with suppress(asyncio.CancelledError):
            await careless(call)
    return call._result


@pytest.mark.parametrize("mutant", [careless, once])
def test_mutant_that_does_not_wait_for_the_end(monkeypatch, mutant):
    monkeypatch.setattr(workers.Call, "outcome", mutant)
    wrong, _ = asyncio.run(campaign(40, seed=2))
    assert any("written after it was cancelled" in w for w in wrong)


def test_mutant_that_swallows_cancellation(monkeypatch):
    monkeypatch.setattr(workers.Call, "outcome", stubborn)
    _, ends = asyncio.run(campaign(10, seed=3))
    assert set(ends) == {"saved"}


@asynchronous
async def test_a_running_save_is_finished_however_often_it_is_cancelled(url):
    async with holdfast.aopen(url) as store:
        s = await store.session("s")
        with gated(store) as gate:
            save = asyncio.ensure_future(s.save({"i": 1}))
            await until(lambda: gate.waiting)
            for _ in range(5):
                save.cancel()
                await asyncio.sleep(0.001)
                assert not save.done()
            gate.open()
            with pytest.raises(asyncio.CancelledError):
                await save
        assert await s.load() == {"i": 1}
        assert (await s.save({"i": 2})).step == 2


@asynchronous
async def test_a_queued_save_that_is_cancelled_never_runs(url):
    async with holdfast.aopen(url, workers=1) as store:
        a, b = await store.session("a"), await store.session("b")
        with gated(store) as gate:
            busy = asyncio.ensure_future(a.save({"i": 1}))
            await until(lambda: gate.waiting)
            behind, elsewhere, read = (
                asyncio.ensure_future(f) for f in (a.save({"i": 2}), b.save({}), b.exists())
            )
            await asyncio.sleep(0)
            for call in (behind, elsewhere, read):
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call  # at once, although the gate is closed
            gate.open()
            await busy
            assert (await a.save({"i": 3})).step == 2
            assert not await b.exists()
            assert gate.waiting == 2
        await b.save({})


@asynchronous
async def test_a_timeout_waits_for_the_commit(path):
    async with holdfast.aopen(path) as store:
        s = await store.session("s")
        loop = asyncio.get_running_loop()
        with gated(store) as gate:

            async def expire():
                await until(lambda: gate.waiting)
                limit.reschedule(loop.time())
                await asyncio.sleep(0.005)
                gate.open()

            expiring = asyncio.ensure_future(expire())
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(None) as limit:
                    await s.save({"i": 1})
            await expiring
        assert await s.step() == 1
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0


@asynchronous
async def test_an_error_of_a_cancelled_call_is_not_lost():
    async with holdfast.aopen("memory:") as store:
        s = await store.session("s")
        with gated(store) as gate:
            save = asyncio.ensure_future(s.save({"i": 1}))
            await until(lambda: gate.waiting)
            save.cancel()
            await asyncio.sleep(0)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(store.sync._repository.backend, "_check_open", failing)
                gate.open()
                with pytest.raises(asyncio.CancelledError) as caught:
                    await save
        assert isinstance(caught.value.__cause__, holdfast.Unavailable)
        assert (await s.save({"i": 2})).step == 1


def failing():
    raise holdfast.Unavailable("injected")


@asynchronous
async def test_a_cancelled_opening_closes_what_it_opened(path):
    gate, made = Gate(), []

    def slow(*args, **kwargs):
        gate.pass_through()
        made.append(holdfast.open(*args, **kwargs))
        return made[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aio_store, "open_store", slow)
        opening = asyncio.ensure_future(opened(path))
        await until(lambda: gate.waiting)
        opening.cancel()
        await asyncio.sleep(0.001)
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await opening
    with pytest.raises(holdfast.InvalidRequest, match="closed"):
        made[0].session("s")


# -- closing -------------------------------------------------------------------------------------


@asynchronous
async def test_closing_waits_for_what_was_called(path):
    store = await holdfast.aopen(path, workers=2)
    handles = [await store.session(f"s{i}") for i in range(6)]
    with gated(store) as gate:
        saves = [asyncio.ensure_future(h.append("log", i)) for h in handles for i in range(2)]
        await until(lambda: gate.waiting)
        closing = [asyncio.ensure_future(store.close()) for _ in range(2)]
        await asyncio.sleep(0.001)
        for late in (handles[0].save({}), handles[1].load(), store.session("s"), store.verify()):
            with pytest.raises(holdfast.InvalidRequest, match="closed"):
                await late
        closing[1].cancel()
        await asyncio.sleep(0.001)
        assert not any(task.done() for task in closing)
        gate.open()
        ends = await asyncio.gather(*closing, return_exceptions=True)
    assert ends[0] is None
    assert isinstance(ends[1], asyncio.CancelledError)
    await store.close()
    for c in await asyncio.gather(*saves):
        assert c.step in {1, 2}
    with pytest.raises(holdfast.InvalidRequest, match="closed"):
        await listed(handles[0].history())
    with holdfast.open(path) as again:
        assert [again.session(f"s{i}").load() for i in range(6)] == [{"log": [0, 1]}] * 6


@asynchronous
async def test_a_cancelled_block_closes_its_store(path):
    held = []

    async def work():
        async with holdfast.aopen(path) as store:
            held.append(store)
            s = await store.session("s")
            while True:
                await s.append("log", 1)

    task = asyncio.ensure_future(work())
    await until(lambda: held and path.exists())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(holdfast.InvalidRequest, match="closed"):
        await held[0].session("s")
    with holdfast.open(path) as store:
        assert store.verify().ok
