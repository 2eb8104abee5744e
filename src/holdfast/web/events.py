"""Event streams: every open page gets each checkpoint and operation once it is committed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import suppress
from weakref import WeakSet

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from holdfast import Checkpoint, Operation, Store, json
from holdfast.errors import HoldfastError
from holdfast.web.render import row

ENDING = "holdfast.ending"
"""The key of a request's scope for an asyncio.Event, which the server sets when it ends."""
_PAUSE = 0.2
"""Seconds between two polls of the store."""
_QUIET = 15.0
"""Seconds without events until a stream sends a comment, which fails if the client is gone."""
_BEHIND = 1_000
"""Events that may wait for a slow reader. With more its stream ends, and its browser reconnects."""


async def events(request: Request) -> Response:
    """Answer with a stream of server-sent events, a checkpoint or operation each, from now on."""
    listener = Listener(request.query_params.get("session") or None)
    await run_in_threadpool(request.app.state.feed.join, listener)
    return StreamingResponse(
        _stream(listener, request.scope.get(ENDING)), media_type="text/event-stream"
    )


async def _stream(
    listener: Listener, ending: asyncio.Event | None = None
) -> AsyncGenerator[str, None]:
    watch = None
    if ending is not None:
        watch = asyncio.ensure_future(ending.wait())
        watch.add_done_callback(lambda _: listener.end())
    try:
        yield ": listening\n\n"
        while not listener.ended:
            for text in await listener.next():
                yield text
    finally:
        if watch is not None:
            watch.cancel()


class Listener:
    """The queue of one stream, which belongs to the event loop that made it."""

    def __init__(self, session: str | None = None) -> None:
        self.session, self.ended = session, False
        self._loop = asyncio.get_running_loop()
        self._waiting: list[str] = []
        self._news = asyncio.Event()

    def send(self, texts: list[str], *, last: bool = False) -> None:
        """Add texts to the queue. Any thread may call it."""
        with suppress(RuntimeError):  # the loop is closed, and the stream with it
            self._loop.call_soon_threadsafe(self._add, texts, last)

    def end(self) -> None:
        self.send([], last=True)

    def _add(self, texts: list[str], last: bool) -> None:  # noqa: FBT001
        self._waiting += texts
        self.ended = self.ended or last or len(self._waiting) > _BEHIND
        self._news.set()

    async def next(self) -> list[str]:
        """Wait for texts, and return those since the last call; after a while, a comment."""
        try:
            await asyncio.wait_for(self._news.wait(), _QUIET)
        except TimeoutError:
            return [": still here\n\n"]
        self._news.clear()
        texts, self._waiting = self._waiting, []
        return texts


class Feed:
    """Reads new events once for all listeners, in a thread that lives while there are any."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._polls: Iterator[list[Checkpoint | Operation]] | None = None
        """The polls of the running thread."""
        self._listeners: WeakSet[Listener] = WeakSet()
        """Only its stream holds a listener, so that a listener ends with its stream."""

    def join(self, listener: Listener) -> None:
        """Send `listener` the events from now on."""
        with self._lock:
            if self._polls is None:
                self._polls = self._store.watcher().polls(None)
                threading.Thread(target=self._run, name="holdfast events", daemon=True).start()
            else:
                self._send(next(self._polls, []))  # earlier events are for the others alone
            self._listeners.add(listener)

    def _run(self) -> None:
        while self._poll():
            time.sleep(_PAUSE)

    def _poll(self) -> bool:
        """Send new events. Return False without listeners, or if the store cannot be read."""
        with self._lock:
            news = None
            if self._listeners and self._polls is not None:
                with suppress(HoldfastError):  # the streams end, and their browsers reconnect
                    news = next(self._polls, None)
            if news is None:
                for listener in list(self._listeners):
                    listener.end()
                self._polls = None
                return False
            self._send(news)
            return True

    def _send(self, news: list[Checkpoint | Operation]) -> None:
        texts = [(each.session, f"data: {json.dumps(_shape(each))}\n\n") for each in news]
        for listener in list(self._listeners) if texts else ():
            wanted = [text for name, text in texts if listener.session in (None, name)]
            if wanted:
                listener.send(wanted)


def _shape(event: Checkpoint | Operation) -> json.Shape:
    shape = json.event(event)
    if "checkpoint" in shape:
        row(shape["checkpoint"])
    else:
        shape["operation"]["details"] = None
    return shape
