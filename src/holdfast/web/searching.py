"""Searching: what was found, with the text around it, and where it came from.

A state holds what was said in all checkpoints since. With `fold`, of a line of checkpoints that
have a text only the one is told that brought it, with how many have it.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool

from holdfast import shapes
from holdfast.errors import HoldfastError
from holdfast.finding import Query, hits
from holdfast.web.asking import Answer, Asked, refused
from holdfast.web.rows import fitting, row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from starlette.requests import Request
    from starlette.responses import Response

    from holdfast import Checkpoint, Store
    from holdfast.finding import Hit
    from holdfast.shapes import Shape

_LOOKED_AT = 50_000
"""Hits that are held against each other at most, for one answer."""
_MARK = 160


async def endpoint(request: Request) -> Response:
    """As soon as nobody waits for the answer, the search ends."""
    gone = threading.Event()
    watching = asyncio.create_task(_left(request, gone))
    try:
        asked = Asked(request.query_params)
        found = await run_in_threadpool(search, request.app.state.store, asked, gone.is_set)
        return Answer(found)
    except HoldfastError as e:
        return refused(e)
    finally:
        watching.cancel()


async def _left(request: Request, gone: threading.Event) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    gone.set()


def search(store: Store, asked: Asked, stopped: Callable[[], bool] = lambda: False) -> Shape:
    """Checkpoints by text, marks and meta, the newest first; `before` goes on behind that id."""
    limit = asked.number("limit", 30, 100) or 1
    query: dict[str, Any] = {
        name: asked.maybe(name) for name in ("agent", "status", "trigger", "tag", "label", "text")
    }
    query["meta"] = asked.pair("meta")
    wanted = (asked.maybe("mark") or "").casefold()
    found = hits(store.backend, Query(**query), asked.maybe("before"), stopped)
    if wanted:
        found = _marked(found, wanted)
    lines, last = _lines(found, limit, fold=asked.maybe("fold") is not None)
    items = fitting([row(shapes.checkpoint(line.first)) for line in lines])
    if len(items) < len(lines):
        last = items[-1]["id"]
    told = {
        line.first.id: {"excerpt": line.excerpt, "count": line.count, "newest": line.newest.id}
        for line in lines[: len(items)]
    }
    return {"items": items, "found": told, "next": last}


class _Line:
    """Checkpoints that follow each other and all match."""

    def __init__(self, hit: Hit) -> None:
        self.newest = self.first = hit.checkpoint
        self.excerpt, self.count = hit.excerpt, 1


def _lines(found: Iterable[Hit], limit: int, *, fold: bool) -> tuple[list[_Line], str | None]:
    """So many, the newest first, and behind which checkpoint others may come."""
    lines: list[_Line] = []
    open_: dict[str, _Line] = {}
    before: str | None = None
    for n, hit in enumerate(found):
        at = hit.checkpoint
        line = open_.pop(at.id, None) if fold else None
        if line is None:
            if len(lines) == limit:
                return lines, before
            line = _Line(hit)
            lines.append(line)
        else:
            line.first, line.excerpt, line.count = at, hit.excerpt, line.count + 1
        before = at.id
        if n == _LOOKED_AT:
            return lines, before
        if fold and at.ancestor is not None:
            joined = open_.setdefault(at.ancestor, line)
            if joined is not line:  # branches that part here: what follows is told once
                joined.count += line.count
                lines.remove(line)
    return lines, None


def _marked(found: Iterable[Hit], wanted: str) -> Iterator[Hit]:
    """Those whose label, tags or metadata have this text, whatever their case."""
    for hit in found:
        mark = _mark(hit.checkpoint, wanted)
        if mark is not None:
            yield hit._replace(excerpt=mark[:_MARK])


def _mark(c: Checkpoint, wanted: str) -> str | None:
    if c.damaged is not None:
        return None
    texts = [*_texts(c.label or ""), *_texts(list(c.tags), "tag "), *_texts(c.meta)]
    return next((shown for text, shown in texts if wanted in text.casefold()), None)


def _texts(value: Any, lead: str = "") -> Iterator[tuple[str, str]]:
    """Each text in a value, and how it is shown."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield key, f"{lead}{key}: {each}"
            yield from _texts(each, f"{lead}{key}: ")
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each, lead)
    else:
        yield str(value), f"{lead}{value}"
