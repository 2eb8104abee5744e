"""Everything that the viewer reads. Nothing here changes anything.

The shapes are those of the command line's --json. Lists come a page at a time, with what to ask for
next; values come folded, so that no answer is longer than about a megabyte unless somebody asks for
a whole value.
"""

from __future__ import annotations

import os
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any

from holdfast import __version__, lineage, parts, shapes
from holdfast.codec import records
from holdfast.compare import compare
from holdfast.diff import Change, Diff
from holdfast.errors import UNREADABLE, InvalidRequest, NotFound
from holdfast.model import STATUSES
from holdfast.runs.messages import PLACES
from holdfast.web import damage
from holdfast.web.charting import chart
from holdfast.web.folding import fold
from holdfast.web.rows import ROW, fitting, row
from holdfast.web.searching import search
from holdfast.web.undoing import undoable

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast import Checkpoint, Session, Store
    from holdfast.parts import Part
    from holdfast.shapes import Shape
    from holdfast.web.asking import Asked

_ANSWER = 600_000
"""Characters of values that one answer holds at most."""
_CHANGES = 2_000
_LEFT = 50
"""Runs that died whose journals are read for one answer."""


def about(store: Store, asked: Asked) -> Shape:
    read_only = asked.read_only or store.backend.read_only
    return {
        "version": __version__,
        "store": _address(store),
        "read_only": read_only,
        "statuses": list(STATUSES),
    }


def _address(store: Store) -> str | None:
    """As a command takes it, from whatever folder; without a password."""
    path = str(getattr(store.backend, "path", ""))
    if store.backend.name == "postgresql":
        return path.partition(" (schema ")[0]
    if not path:
        return None
    return ("files:" if store.backend.name == "files" else "") + os.path.abspath(path)


def sessions(store: Store, asked: Asked) -> Shape:
    limit = asked.number("limit", 50) or 1
    query: dict[str, Any] = {
        name: asked.maybe(name) for name in ("agent", "status", "tag", "label", "trigger", "after")
    }
    text = asked.maybe("text")
    found = store.sessions(**query)
    page = []
    for info in found:
        if text is not None and text.lower() not in f"{info.name} {info.agent or ''}".lower():
            continue
        page.append(info)
        if len(page) > limit:
            break
    items = fitting([_slim(shapes.session(info)) for info in page[:limit]])
    return {
        "items": items,
        "next": items[-1]["name"] if len(items) < len(page) else None,
        "left": _left(store, {each["name"] for each in items}),
    }


def _left(store: Store, names: set[str]) -> dict[str, str]:
    """Which of these sessions have a run that died, and whether a call of it is in doubt."""
    found = {each.session: "abandoned" for each in store.abandoned() if each.session in names}
    for name in islice(found, _LEFT):
        if any(each.state == "in doubt" for each in store.session(name).pending()):
            found[name] = "in doubt"
    return found


def _slim(shown: Shape) -> Shape:
    if shown["head"] is not None:
        shown["head"] = row(shown["head"])
    return shown


def totals(store: Store, asked: Asked) -> Shape:
    session = asked.session(store)
    found = session.usage()
    return shapes.totals(found) | {"total": shapes.usage(found.total)}


def log(store: Store, asked: Asked) -> Shape:
    """The tree of a session, the newest first; `before` goes on below that number."""
    session = asked.session(store)
    limit = asked.number("limit", 200) or 1
    before = asked.number("before", 0, records.MAX_SEQ)
    raw = records.encode_name(session.name)
    high = before - 1 if before else None
    rows = lineage.tree(store.backend, raw, session.name, newest_first=True, high=high)
    page = list(islice(rows, limit + 1))
    forks = lineage.forks(store.backend, raw)
    head = _head(session)
    bridges = damage.bridges(store, session.name, page[:limit])
    items = fitting([
        row(shapes.checkpoint(c)) | {"is_head": c.id == head, "forks": forks.get(c.seq, [])}
        for c in page[:limit]
    ])  # fmt: skip
    for each in items:
        if each["seq"] in bridges and (id := bridges[each["seq"]]["id"]) is not None:
            each |= {"id": id, "is_head": id == head}
    return {
        "items": items,
        "next": items[-1]["seq"] if len(items) < len(page) else None,
        "head": head,
        "count": len(session),
        "bridges": {b["id"]: b for b in bridges.values() if b["id"] is not None},
    }


def _head(session: Session) -> str | None:
    try:
        head = session.head
    except UNREADABLE:
        return None
    return None if head is None else head.id


def checkpoint(store: Store, asked: Asked) -> Shape:
    shown = shapes.checkpoint(asked.checkpoint(store))
    for name in ("meta", "pending", "reason", "hint"):
        if name in shown:
            shown[name] = fold(shown[name], _ANSWER // 4)
    return shown


def state(store: Store, asked: Asked) -> Shape:
    """A part of a state, with some of its entries."""
    of = asked.checkpoint(store)
    start, limit = asked.number("start", 0, records.MAX_SEQ), asked.number("limit", 100)
    found = parts.read(store.backend, of, asked.path(), start, limit)
    budget = _ANSWER // (len(found.items) + 1)
    return _part(found, budget) | {
        "start": found.start,
        "items": [
            {"key": fold(shapes.value(key), ROW)} | _part(item, min(budget, ROW))
            for key, item in found.items
        ],
    }


def _part(of: Part, budget: int) -> Shape:
    shown: Shape = {"kind": of.kind, "size": of.size, "length": of.length}
    if of.kind not in ("list", "dict"):
        shown["value"] = fold(shapes.value(of.value), budget)
    return shown


def value(store: Store, asked: Asked) -> Any:
    """All of a value: a page asks for it when somebody unfolds one."""
    return shapes.value(parts.whole(store.backend, asked.checkpoint(store), asked.path()))


def messages(store: Store, asked: Asked) -> Shape:
    """Of the list at `path`, or of the first that is a conversation: the last items, or others."""
    of = asked.checkpoint(store)
    limit = asked.number("limit", 50, 200) or 1
    given = asked.maybe("start")
    start = None if given is None else asked.number("start", 0, records.MAX_SEQ)
    paths = [asked.path()] if asked.maybe("path") else PLACES
    for path in paths:
        try:
            length, first, found = parts.items(store.backend, of, path, start, limit)
        except NotFound:
            continue
        budget = _ANSWER // (len(found) + 1)
        return {
            "path": list(path),
            "length": length,
            "start": first,
            "items": [fold(shapes.value(item), budget) for item in found],
        }
    raise NotFound("the state has no list of messages", hint="its State shows what it has")


def changes(store: Store, asked: Asked) -> Shape:
    """From the nearest ancestor that can be read; for the first checkpoint, all that it has."""
    of = asked.checkpoint(store)
    before = None
    if of.damaged is None and of.ancestor is not None:
        older = islice(store.session(of.session).history(of.id), 1, None)
        before = next((c for c in older if c.damaged is None), None)
    if before is not None:
        found = compare(store.backend, before, of).changes
    else:
        state = parts.whole(store.backend, of, ())
        entries = state.items() if isinstance(state, dict) else ()
        added = [Change("added", (key,), None, value) for key, value in entries]
        found = Diff(added or [Change("added", (), None, state)])
    return {"from": before and before.id, "changes": _folded(shapes.changes(found))}


def diff(store: Store, asked: Asked) -> Shape:
    a, b = asked.checkpoint(store, "a"), asked.checkpoint(store, "b")
    found = compare(store.backend, a, b)
    return {
        "a": row(shapes.checkpoint(a)),
        "b": row(shapes.checkpoint(b)),
        "ancestor": None if found.ancestor is None else found.ancestor.id,
        "steps": {"a": found.to_a.steps, "b": found.to_b.steps},
        "usage": {"a": shapes.usage(found.to_a.usage), "b": shapes.usage(found.to_b.usage)},
        "changes": _folded(shapes.changes(found.changes)),
    }


def way(store: Store, asked: Asked) -> Shape:
    """A checkpoint and its ancestors, the newest first, down to `until`, which is left out."""
    end, until = asked.checkpoint(store), asked.maybe("until")
    line = takewhile(lambda c: c.id != until, store.session(end.session).history(end.id))
    limit = asked.number("limit", 100) or 1
    found = list(islice(line, limit + 1))
    items = fitting([row(shapes.checkpoint(c)) for c in found[:limit]])
    return {"items": items, "more": len(items) < len(found)}


def _folded(told: list[Shape]) -> list[Shape]:
    budget = _ANSWER // (2 * max(len(told), 1))
    for change in told:
        for name in ("before", "after"):
            if name in change:
                change[name] = fold(change[name], max(budget, 40))
    return told[:_CHANGES]


def blame(store: Store, asked: Asked) -> Shape:
    of = asked.checkpoint(store)
    path = asked.path()
    if not path:
        raise InvalidRequest("path is missing")
    found = store.session(of.session).blame(path, of.id)
    shown: Shape = {
        "checkpoint": row(shapes.checkpoint(found)),
        "after": fold(shapes.value(parts.whole(store.backend, found, path)), _ANSWER // 2),
    }
    if found.ancestor is not None:
        try:
            before = parts.whole(store.backend, store.get(found.ancestor), path)
            shown["before"] = fold(shapes.value(before), _ANSWER // 2)
        except NotFound:
            pass  # it was not there: that is what the shape says
    return shown


def run(store: Store, asked: Asked) -> Shape:
    """What the journal of a session tells: calls with their times, and what is open."""
    session = asked.session(store)
    calls = session.calls()
    limit = asked.number("limit", 200) or 1
    start = asked.number("start", max(len(calls) - limit, 0), records.MAX_SEQ)
    shown = calls[start : start + limit]
    pending = session.pending()
    budget = _ANSWER // (len(shown) + len(pending) + 1)
    left = next((a for a in store.abandoned(halted=True) if a.session == session.name), None)
    return {
        "length": len(calls),
        "start": start,
        "calls": [_short(shapes.made_call(call), budget) for call in shown],
        "pending": [_short(shapes.pending(each), budget) for each in pending],
        "run": None if left is None else shapes.abandoned(left),
    }


def _short(shown: Shape, budget: int) -> Shape:
    for name in ("arguments", "result", "partial", "error"):
        if name in shown:
            shown[name] = fold(shown[name], budget // 2)
    return shown


def ops(store: Store, asked: Asked) -> Shape:
    found = asked.session(store).ops()
    limit = asked.number("limit", 100) or 1
    last = found[::-1][:limit]
    return {
        "length": len(found),
        "items": [shapes.operation(o) | {"details": None} for o in last],
    }


def integrity(store: Store, asked: Asked) -> Shape:
    """Whether a checkpoint loads, and the hashes that lead to it; what is known if it does not."""
    try:
        of = asked.checkpoint(store)
    except UNREADABLE as e:
        return damage.told(store, asked, e.message)
    except NotFound as e:
        if asked.maybe("seq") is None:
            raise
        return damage.told(store, asked, e.message)
    problem: str | None = of.damaged
    if problem is None:
        try:
            parts.whole(store.backend, of, ())  # from the disk: what is in memory is no evidence
        except UNREADABLE as e:
            problem = e.message
    return {
        "checkpoint": row(shapes.checkpoint(of)),
        "problem": problem,
        "known": None,
        "chain": [_link(c) for c in islice(store.session(of.session).history(of.id), 1, 13)],
    }


def _link(c: Checkpoint) -> Shape:
    shown: Shape = {"id": c.id, "damaged": c.damaged}
    if c.damaged is None:
        shown |= {"step": c.step, "hash": c.hash, "session": c.session}
    return shown


READS: dict[str, Callable[[Store, Asked], Any]] = {
    function.__name__: function
    for function in (
        about, sessions, totals, log, checkpoint, state, value, messages, changes, diff, way,
        blame,        chart, run, ops, undoable, integrity, search,
    )
}  # fmt: skip
