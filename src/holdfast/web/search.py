"""Search checkpoints, and show the text around each match.

A state contains the texts of all checkpoints before it, so a text matches in many checkpoints. With
`fold`, consecutive matches are one result: the checkpoint that added the text, and their number.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from holdfast import Checkpoint, Hit, Store, json
from holdfast.json import Shape
from holdfast.web.params import Answer, Params
from holdfast.web.render import fitting, row

_HITS = 50_000
"""Hits that are compared for one answer, at most."""
_EXCERPT = 160
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
    """Return checkpoints by text, marks and metadata, newest first.

    `before` starts behind the checkpoint of that id.
    """
    limit = params.number("limit", 30, 100) or 1
    query: dict[str, Any] = {
        name: params.maybe(name) for name in ("agent", "status", "trigger", "tag", "label", "text")
    }
    query["meta"] = params.pair("meta")
    mark = (params.maybe("mark") or "").casefold()
    hits = store.search(**query, before=params.maybe("before"), stopped=stopped)
    if mark:
        hits = _with_mark(hits, mark)
    results, last = _results(hits, limit, fold=params.maybe("fold") is not None)
    items = fitting([row(json.checkpoint(result.first)) for result in results])
    if len(items) < len(results):
        last = items[-1]["id"]
    found = {
        each.first.id: {"excerpt": each.excerpt, "count": each.count, "newest": each.newest.id}
        for each in results[: len(items)]
    }
    return {"items": items, "found": found, "next": last}


class _Result:
    """Consecutive checkpoints that match."""

    def __init__(self, hit: Hit) -> None:
        self.newest = self.first = hit.checkpoint
        self.excerpt, self.count = hit.excerpt, 1


def _results(hits: Iterable[Hit], limit: int, *, fold: bool) -> tuple[list[_Result], str | None]:
    """Return at most `limit` results, and the id behind which the next page starts, or None."""
    results: list[_Result] = []
    by_ancestor: dict[str, _Result] = {}
    before: str | None = None
    for n, hit in enumerate(hits):
        at = hit.checkpoint
        result = by_ancestor.pop(at.id, None) if fold else None
        if result is None:
            if len(results) == limit:
                return results, before
            result = _Result(hit)
            results.append(result)
        else:
            result.first, result.excerpt = at, hit.excerpt
            result.count += 1
        before = at.id
        if n == _HITS:
            return results, before
        if fold and at.ancestor is not None:
            joined = by_ancestor.setdefault(at.ancestor, result)
            if joined is not result:  # two branches meet here: they become one result
                joined.count += result.count
                results.remove(result)
    return results, None


def _with_mark(hits: Iterable[Hit], mark: str) -> Iterator[Hit]:
    """Yield the hits whose label, tags or metadata contain a text, in any case."""
    for hit in hits:
        excerpt = _excerpt(hit.checkpoint, mark)
        if excerpt is not None:
            yield hit._replace(excerpt=excerpt[:_EXCERPT])


def _excerpt(c: Checkpoint, mark: str) -> str | None:
    if c.damaged is not None:
        return None
    texts = [*_texts(c.label or ""), *_texts(list(c.tags), "tag "), *_texts(c.meta)]
    return next((excerpt for text, excerpt in texts if mark in text.casefold()), None)


def _texts(value: Any, lead: str = "") -> Iterator[tuple[str, str]]:
    """Yield each text in a value, and its excerpt, which names the keys that lead to it."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield key, f"{lead}{key}: {each}"
            yield from _texts(each, f"{lead}{key}: ")
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each, lead)
    else:
        yield str(value), f"{lead}{value}"
