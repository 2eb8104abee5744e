"""Streams: readers in other processes miss nothing, and never mix two attempts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import pytest

import holdfast
from holdfast import (
    RESTART,
    Corrupt,
    Fenced,
    InvalidRequest,
    NotFound,
    Retention,
    SessionNotFound,
    StepFailed,
)
from holdfast.aio.store import AsyncStore
from holdfast.aio.workers import Workers
from holdfast.history import journal as journals
from holdfast.history.journal import LOST, Journal
from holdfast.runs import streams
from holdfast.runs.run_core import RunCore
from tests.runs.test_runs import Crash, Worker
from tests.support.stores import Home

WORDS = ["Once", "upon", "a", "time"]


def reading(home: Home, after: int = 0, key: str = "talk", **options: Any) -> Iterator[Any]:
    """Read what another process would see now."""
    return home.another().session("s").stream(key, after=after, **{"patience": 0, **options})


def seen(home: Home, after: int = 0, key: str = "talk") -> list[Any]:
    return [chunk for _, chunk in reading(home, after, key)]


def so_far(reader: Iterator[Any]) -> list[tuple[int, Any]]:
    """Take what is there. A reader with patience 0 raises NotFound when it would wait."""
    out = []
    with pytest.raises(NotFound):
        for item in reader:
            out.append(item)  # noqa: PERF402 - also what came before the error
    return out


def talk(run: holdfast.Run, words: Any = WORDS, crash: bool = False) -> str:
    with run.stream("talk") as out:
        for word in words:
            out.write(word)
        out.flush()
        if crash:
            raise Crash
    return " ".join(map(str, words))


def entries(home: Home) -> list[dict[str, Any]]:
    with home.store._repository.reader() as reader:
        number = home._number("s")
        return [e.facts for e in journals.read(reader, number)]


def test_a_stream_is_read_while_it_is_written(home: Home) -> None:
    live: list[Any] = []

    def speak(run: holdfast.Run) -> str:
        reader = reading(home, patience=60)
        with run.stream("talk") as out:
            for word in WORDS:
                out.write(word)
                out.flush()
                live.append(next(reader))
        assert so_far(reading(home)) == live
        return "spoken"

    with home.session().run() as run:
        run.step("speak", lambda: speak(run))
    assert [chunk for _, chunk in live] == WORDS
    assert [*reading(home)] == live
    cursors = [cursor for cursor, _ in live]
    assert cursors == sorted(cursors)
    for n, cursor in enumerate(cursors):
        assert seen(home, after=cursor) == WORDS[n + 1 :]  # a client comes again: nothing is missed
    assert home.store.verify(read_data=True).ok


def test_any_value_is_a_chunk(home: Home) -> None:
    chunks = [{"delta": ["a"]}, b"bytes", 3, None, "", "restart", float("inf")]
    with home.session().run() as run:
        run.step("talk", lambda: talk(run, chunks))
    assert seen(home) == chunks
    [written] = [e["chunks"] for e in entries(home) if e["what"] == "chunks" and e["chunks"]]
    assert len(written) == len(chunks)


def test_a_chunk_is_kept_as_it_was(memory: Home) -> None:
    with memory.session().run() as run:

        def speak() -> None:
            with run.stream("talk") as out:
                chunk = ["a"]
                out.write(chunk)
                chunk.append("b")

        run.step("speak", speak)
    assert seen(memory) == [["a"]]


# -- attempts --------------------------------------------------------------------------------------


def test_another_attempt_begins_again(home: Home) -> None:
    """A reader that has seen something of the first attempt is told so."""

    def body(worker: Worker, run: holdfast.Run) -> None:
        words = ["again", *WORDS] if run.resumed else WORDS[:3]
        run.step("model", lambda: talk(run, words, crash=not run.resumed))

    Worker(home.session())(body)
    reader = reading(home, patience=60)
    first = list(islice(reader, 3))
    assert [chunk for _, chunk in first] == WORDS[:3]
    Worker(home.session())(body)
    rest = [*reader]
    assert [chunk for _, chunk in rest] == [RESTART, "again", *WORDS]
    for cursor, _ in first:
        assert seen(home, after=cursor) == [RESTART, "again", *WORDS]
    for n, (cursor, _) in enumerate(rest):
        assert seen(home, after=cursor) == ["again", *WORDS][n:]
    assert seen(home) == ["again", *WORDS]
    assert [cursor for cursor, _ in [*first, *rest]] == sorted({c for c, _ in [*first, *rest]})


def test_an_attempt_of_the_same_worker_begins_again(home: Home) -> None:
    readers: list[Iterator[Any]] = []

    def speak(run: holdfast.Run) -> str:
        if readers:
            return talk(run)
        readers.append(reading(home, patience=60))
        with run.stream("talk") as out:
            out.write("lost")
            out.flush()
            assert next(readers[0])[1] == "lost"
            raise ConnectionError

    with home.session().run() as run:
        run.step("speak", lambda: speak(run), retries=holdfast.Retries(2, wait=0))
    assert [chunk for _, chunk in readers[0]] == [RESTART, *WORDS]


def test_a_reader_ends_when_the_step_has_returned(home: Home) -> None:
    """Else it could end with what an attempt had written that does not count."""

    def body(worker: Worker, run: holdfast.Run) -> None:
        def speak() -> str:
            said = talk(run, ["second"] if run.resumed else WORDS)
            if not run.resumed:
                raise Crash
            return said

        run.state["said"] = run.step("speak", speak)

    Worker(home.session())(body)
    reader = reading(home, patience=60)
    assert [chunk for _, chunk in islice(reader, 4)] == WORDS
    assert [chunk for _, chunk in so_far(reading(home))] == WORDS
    Worker(home.session())(body)
    assert [chunk for _, chunk in reader] == [RESTART, home.session().load()["said"]]


@pytest.mark.parametrize("ends", ["error", "caught", "closed", "turn", "new run"])
def test_a_stream_that_broke_off(home: Home, ends: str) -> None:
    """Its reader gets an error. It does not wait for what nobody will write."""

    def speak(run: holdfast.Run) -> None:
        with run.stream("talk") as out:
            out.write("Once")
            out.flush()
            if ends != "closed":
                raise Crash if ends in ("turn", "new run") else ConnectionError
        raise ConnectionError

    def body(worker: Worker, run: holdfast.Run) -> None:
        for turn in run.turns(limit=2):
            if turn == 1 and not run.resumed:
                try:
                    run.step("speak", lambda: speak(run))
                except ConnectionError:
                    if ends == "error":
                        raise
            run.step("next", lambda: 1)
            if ends == "turn" and turn == 2:
                raise Crash

    if ends == "error":
        with pytest.raises(ConnectionError):
            Worker(home.session())(body)
    else:
        Worker(home.session())(body)
    if ends == "turn":
        assert so_far(reading(home))[-1][1] == "Once"
        Worker(home.session())(body)
    if ends == "new run":
        with home.session().run(resume=False):
            pass
    reader = reading(home, patience=60)
    cursor, chunk = next(reader)
    assert chunk == "Once"
    for each in (reader, reading(home, after=cursor, patience=60)):
        with pytest.raises(StepFailed):
            next(each)


def test_a_stream_beside_later_turns(home: Home) -> None:
    """It goes on in a thread of its own, so its reader waits for more."""
    go_on = threading.Event()

    def speak(run: holdfast.Run) -> None:
        with run.stream("talk") as out:
            out.write("Once")
            out.flush()
            assert go_on.wait(60)
            out.write("upon")

    with home.session().run() as run, ThreadPoolExecutor(1) as pool:
        speaking = pool.submit(lambda: run.step("speak", lambda: speak(run)))
        reader = reading(home, patience=60)
        assert next(reader)[1] == "Once"
        for _ in run.turns(limit=2):
            run.step("next", lambda: 1)
        assert [chunk for _, chunk in so_far(reading(home))] == ["Once"]
        go_on.set()
        speaking.result()
    assert [chunk for _, chunk in reader] == ["upon"]


def test_a_failed_step_that_is_made_again(home: Home) -> None:
    def agent(words: list[str]) -> None:
        with home.session().run() as run:
            run.step("speak", lambda: talk(run, words) if words else talk(run, [1 / 0]))

    def fail(run: holdfast.Run) -> None:
        with run.stream("talk") as out:
            out.write("half")
            out.flush()
            raise ConnectionError

    with pytest.raises(ConnectionError), home.session().run() as run:
        run.step("speak", lambda: fail(run))
    reader = reading(home, patience=60)
    cursor, _ = next(reader)
    with pytest.raises(StepFailed):
        next(reader)
    agent(WORDS)
    assert seen(home, after=cursor) == [RESTART, *WORDS]


def test_a_worker_that_was_fenced_writes_no_chunk(home: Home) -> None:
    def speak(run: holdfast.Run) -> None:
        with run.stream("talk") as out:
            out.write("Once")
            out.flush()
            other = home.another().session("s").run(takeover=True)
            with other:
                other.halt("mine now")
            out.write("zombie")
            out.flush()

    with pytest.raises(Fenced), home.session().run() as run:
        run.step("speak", lambda: speak(run))
    assert [chunk for _, chunk in so_far(reading(home))] == ["Once"]


# -- flushing --------------------------------------------------------------------------------------


def test_chunks_are_written_together(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "INTERVAL", 60)
    words = [f"word {n:04}" for n in range(4_000)]  # of 10 bytes
    with home.session().run() as run:
        run.step("talk", lambda: talk(run, words))
    assert seen(home) == words
    sizes = [len(e["chunks"]) for e in entries(home) if e["what"] == "chunks"]
    assert sizes == [1639, 1639, 722, 0]


@pytest.mark.parametrize("home", ["memory", "sqlite"], indirect=True)
def test_chunks_are_written_in_time(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if no other chunk comes."""
    monkeypatch.setattr(streams, "INTERVAL", 0.001)

    def speak(run: holdfast.Run) -> None:
        reader = reading(home, patience=60, interval=0.001)
        with run.stream("talk") as out:
            for word in WORDS:
                out.write(word)
                assert next(reader)[1] == word

    with home.session().run() as run:
        run.step("speak", lambda: speak(run))


@pytest.mark.parametrize("home", ["memory"], indirect=True)
def test_an_error_of_the_timer_is_raised(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "INTERVAL", 0)

    def fail(*_: Any, closed: bool) -> None:
        raise holdfast.Unavailable("the disk is full")

    monkeypatch.setattr(RunCore, "append_chunks", fail)

    def speak(run: holdfast.Run) -> None:
        with run.stream("talk") as out:
            out.write("Once")
            timer = out._buffer._timer
            if timer is not None:
                timer.join()
            out.write("upon")
            raise AssertionError

    with pytest.raises(holdfast.Unavailable), home.session().run() as run:
        run.step("speak", lambda: speak(run))


# -- which stream ----------------------------------------------------------------------------------


def test_the_newest_stream_of_a_key(home: Home) -> None:
    cursors: list[int] = []
    with home.session().run() as run:
        for turn in run.turns(limit=3):
            run.step("speak", lambda: talk(run, [turn, "x"]))  # noqa: B023
            cursors.append(next(reading(home))[0])
            assert seen(home) == [turn, "x"]
            early = reading(home, patience=60)
    assert next(early)[1] == 3
    for cursor in cursors:
        assert seen(home, after=cursor) == ["x"]  # the rest of that one, and its end


def test_several_streams_of_a_step(home: Home) -> None:
    def speak(run: holdfast.Run) -> None:
        with run.stream("text") as text, run.stream("thoughts") as thoughts:
            for word in WORDS:
                text.write(word)
                thoughts.write(word.upper())
            with pytest.raises(InvalidRequest), run.stream("text"):
                pass
        with run.stream("text") as text:  # its last one counts
            text.write("anew")

    with home.session().run() as run:
        run.step("speak", lambda: speak(run))
    assert (seen(home, key="text"), seen(home, key="thoughts")) == (
        ["anew"],
        [word.upper() for word in WORDS],
    )


def test_where_there_is_no_stream(home: Home) -> None:
    with pytest.raises(SessionNotFound):
        next(reading(home))
    with home.session().run() as run:
        with pytest.raises(InvalidRequest), run.stream("talk"):
            pass
        run.step("talk", lambda: talk(run))
        with pytest.raises(NotFound, match="nothing more came"):
            next(reading(home, key="later"))
    with pytest.raises(NotFound, match="has no stream"):
        next(reading(home, key="later", patience=60))
    for bad in (-1, 1.5, "3", True, None):
        with pytest.raises(InvalidRequest):
            home.session().stream("talk", after=bad)  # type: ignore[arg-type]
    for bad in (1 << 16, 99 << 16):  # of another entry, and behind the last one
        with pytest.raises(InvalidRequest):
            next(reading(home, after=bad))
    with pytest.raises(InvalidRequest):
        home.session().stream("")


def test_a_writer_is_used_in_its_block(memory: Home) -> None:
    with memory.session().run() as run:
        kept: list[Any] = []

        def speak() -> None:
            with run.stream("talk") as out:
                kept.append(out)

        run.step("speak", speak)
        with pytest.raises(InvalidRequest):
            kept[0].write("late")
        with pytest.raises(InvalidRequest):
            run.stream("")


# -- where chunks live -----------------------------------------------------------------------------


def test_gc_frees_chunks_with_their_calls(home: Home) -> None:
    with home.session().run() as run:
        run.step("talk", lambda: talk(run))
    [(cursor, _), *_] = reading(home)
    home.store.gc()
    assert seen(home) == WORDS
    session = home.session()
    session.save({"n": 1})
    session.prune(Retention(keep_last=1))
    home.reopened().gc()
    assert home.store.stats().rows["journal"] == 1
    with pytest.raises(NotFound, match="has no stream"):
        next(reading(home))
    with pytest.raises(NotFound, match="is freed"):
        next(reading(home, after=cursor))
    assert home.store.verify(read_data=True).ok


def test_a_copy_has_the_streams(home: Home) -> None:
    with home.session().run() as run:
        run.step("talk", lambda: talk(run))
    with holdfast.open("memory:") as other:
        home.store.copy(other)
        assert [*other.session("s").stream("talk")] == [*reading(home)]


def test_a_lost_entry_may_be_of_the_stream(home: Home) -> None:
    def body(worker: Worker, run: holdfast.Run) -> None:
        run.step("model", lambda: talk(run, crash=True))

    Worker(home.session())(body)
    Journal(home.store._repository.backend, home._number("s"), None).append({"what": LOST})
    with pytest.raises(Corrupt):
        [*reading(home)]


def test_a_session_that_is_deleted(home: Home) -> None:
    def body(worker: Worker, run: holdfast.Run) -> None:
        run.step("model", lambda: talk(run, crash=True))

    Worker(home.session())(body)
    reader = reading(home, patience=60)
    next(reader)
    home.session().delete()
    with pytest.raises(SessionNotFound):
        list(reader)


# -- asyncio ---------------------------------------------------------------------------------------


def test_streams_in_asyncio(home: Home) -> None:
    async def both() -> None:
        store = AsyncStore(home.store, Workers(4))
        session = await store.session("s")
        live: list[Any] = []

        async def read() -> None:
            async for cursor, chunk in session.stream("talk", interval=0.001, patience=60):
                live.append((cursor, chunk))

        async with session.run() as run:

            async def speak() -> str:
                async with run.stream("talk") as out:
                    for word in WORDS:
                        await out.write(word)
                    await out.flush()
                return "spoken"

            def in_a_thread() -> str:
                with run.stream("thread").sync as out:
                    out.write("Once")
                return "spoken"

            first = asyncio.create_task(read())
            assert await run.step("speak", speak) == "spoken"
            assert await run.step("thread", in_a_thread) == "spoken"
            await first
            with pytest.raises(InvalidRequest):
                async with run.stream("talk"):
                    pass
        assert [chunk for _, chunk in live] == WORDS
        assert [chunk async for _, chunk in session.stream("thread")] == ["Once"]
        after = [chunk async for _, chunk in session.stream("talk", after=live[1][0])]
        assert after == WORDS[2:]
        with pytest.raises(NotFound):
            await anext(aiter(session.stream("nothing")))

    asyncio.run(both())
