"""What lands in a store, told to every page that listens."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse

from holdfast import shapes
from holdfast.errors import HoldfastError, InvalidRequest
from holdfast.watching import Watcher
from holdfast.web.asking import refused
from holdfast.web.rows import row

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from starlette.requests import Request
    from starlette.responses import Response

    from holdfast.watching import Event

ENDING = "holdfast.ending"
"""Under this name a server may put an event into a request's scope, to say that it ends."""
_PAUSE = 0.2
_QUIET = 15.0
"""Seconds after which a word is said, so that who is gone is noticed."""


async def events(request: Request) -> Response:
    """Server-sent events: a checkpoint or operation each, from now on."""
    store = request.app.state.store
    name = request.query_params.get("session") or None
    try:
        watcher = await run_in_threadpool(Watcher, store.backend, name)
    except HoldfastError as e:
        return refused(e)
    return StreamingResponse(
        _told(watcher, request.scope.get(ENDING)), media_type="text/event-stream"
    )


async def _told(
    watcher: Watcher, ending: threading.Event | None = None
) -> AsyncGenerator[str, None]:
    yield ": listening\n\n"
    said = time.monotonic()
    while ending is None or not ending.is_set():
        try:
            news = await run_in_threadpool(watcher.poll)
        except InvalidRequest:
            return  # the store is closed
        for event in news:
            yield f"data: {shapes.dumps(_shown(event))}\n\n"
        now = time.monotonic()
        if news:
            said = now
        elif now - said > _QUIET:
            said = now
            yield ": still here\n\n"
        await asyncio.sleep(_PAUSE)


def _shown(event: Event) -> shapes.Shape:
    shown = shapes.event(event)
    if "checkpoint" in shown:
        row(shown["checkpoint"])
    else:
        shown["operation"]["details"] = None
    return shown
