"""Search for text in states, and for text in labels, tags and metadata."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from holdfast import Checkpoint, SearchHit, Store, json
from holdfast.json import Shape
from holdfast.web.params import Answer, Params
from holdfast.web.render import fitting, row

_CHECKED = 50_000
"""Checkpoints that are compared for one answer, at most."""
_SNIPPET = 160
"""Characters of a matching label, tag or metadata in an answer, at most."""


async def endpoint(request: Request) -> Response:
    """Answer a search. The search ends early if the client disconnects."""
    gone = threading.Event()
    watching = asyncio.create_task(_set_on_disconnect(request, gone))
    try:
        params = Params(request.query_params)
        found = await run_in_threadpool(search, request.app.state.store, params, gone.is_set)
        return Answer(found)
    finally:
        watching.cancel()


async def _set_on_disconnect(request: Request, gone: threading.Event) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    gone.set()


def search(store: Store, params: Params, stopped: Callable[[], bool] = lambda: False) -> Shape:
    """Return hits by text, marks and metadata, newest first.

    `before` starts behind the checkpoint of that id.
    """
    limit = params.number("limit", 30, 100) or 1
    query: dict[str, Any] = {
        name: params.maybe(name)
        for name in ("session", "agent", "status", "trigger", "tag", "label", "before")
    }
    query["meta"] = params.pair("meta")
    text, mark = params.maybe("text"), (params.maybe("mark") or "").casefold()
    if text is not None:
        case_sensitive = params.maybe("case_sensitive") is not None
        hits = store.search(text, case_sensitive=case_sensitive, stopped=stopped, **query)
    else:
        listed = store.checkpoints(**query)
        hits = (SearchHit(c.session, c, (), "", 0, 0) for c in listed if not stopped())
    return _page(hits, mark, limit)


def _page(hits: Iterator[SearchHit], mark: str, limit: int) -> Shape:
    """Return a page of the hits with a mark, and the id behind which the next page starts."""
    shapes: list[Shape] = []
    last, count = None, 0
    for checked, hit in enumerate(hits):
        if count == limit or checked == _CHECKED:
            break
        marked = _marked(hit, mark)
        if marked is not None:
            shapes.append(json.hit(marked))
        if hit.checkpoint is not None:
            last = hit.checkpoint.id
        if marked is not None and hit.checkpoint is not None:
            row(shapes[-1]["checkpoint"])
            count += 1
    else:
        last = None
    items = fitting(shapes)
    if len(items) < len(shapes):
        last = (items[-1]["checkpoint"] or {}).get("id")
    return {"items": items, "next": last}


def _marked(hit: SearchHit, mark: str) -> SearchHit | None:
    """Return a hit whose label, tags or metadata contain a text, in any case; else None."""
    if not mark or hit.checkpoint is None:
        return None if mark else hit
    snippet = _snippet(hit.checkpoint, mark)
    if snippet is None:
        return None
    at = max(snippet.casefold().find(mark), 0)
    return SearchHit(hit.session, hit.checkpoint, (), snippet, at, at + len(mark))


def _snippet(c: Checkpoint, mark: str) -> str | None:
    if c.damaged is not None:
        return None
    texts = [*_texts(c.label or ""), *_texts(list(c.tags), "tag "), *_texts(c.meta)]
    return next((shown[:_SNIPPET] for text, shown in texts if mark in text.casefold()), None)


def _texts(value: Any, lead: str = "") -> Iterator[tuple[str, str]]:
    """Yield each text in a value, and how it is shown, with the keys that lead to it."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield key, f"{lead}{key}: {each}"
            yield from _texts(each, f"{lead}{key}: ")
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each, lead)
    else:
        yield str(value), f"{lead}{value}"
