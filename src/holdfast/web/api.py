"""The endpoints of the API. Each is a call of the library; every change can be undone.

READS are for GET and change nothing. ACTIONS are for POST.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import islice, takewhile
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from holdfast import CONVERSATION_PATHS, STATUSES, __version__, json
from holdfast.errors import (
    UNREADABLE,
    CheckpointNotFound,
    HoldfastError,
    InvalidRequest,
    NotFound,
)
from holdfast.web.chart import chart, highest_usage
from holdfast.web.params import HIGHEST
from holdfast.web.render import ROW, fitting, fold, row
from holdfast.web.search import search

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast import Checkpoint, Neighbours, NextStep, Part, Session, SessionInfo, Store
    from holdfast.json import Shape
    from holdfast.web.params import Params

_ANSWER = 600_000
"""Characters of values in one answer, at most."""
_CHANGES = 2_000
"""Changes in one answer, at most."""
_DEAD_RUNS = 50
"""Dead runs whose journals are read for one answer, at most."""
_CHAIN = 12
"""Ancestors whose hashes one answer lists."""


# -- sessions --------------------------------------------------------------------------------------


def about(store: Store, params: Params) -> Shape:
    """Return the version, and what the store allows."""
    return {
        "version": __version__,
        "store": store.address,
        "read_only": params.read_only or store.read_only,
        "statuses": list(STATUSES),
    }


def sessions(store: Store, params: Params) -> Shape:
    """Return the sessions by name; with `order=active`, by the time of their heads.

    That order is newest first, and puts the sessions that a process runs now before all others.
    """
    limit = params.number("limit", 50) or 1
    text, after = (params.maybe("text") or "").lower(), params.maybe("after")
    order = params.maybe("order") or "name"
    if order not in ("name", "active"):
        raise InvalidRequest(f"there is no order {order[:40]!r}", hint="name or active")
    filters: dict[str, Any] = {
        name: params.maybe(name) for name in ("agent", "status", "tag", "label", "trigger")
    }
    found = store.sessions(**filters, after=after if order == "name" else None)
    wanted = (info for info in found if text in f"{info.name} {info.agent or ''}".lower())
    if order == "active":
        running = set(store.running())
        keyed = sorted(((_activity(info, running), info) for info in wanted), key=itemgetter(0))
        wanted = (info for key, info in reversed(keyed) if after is None or key < after)
    page = list(islice(wanted, limit + 1))
    items = fitting([_session_row(info) for info in page[:limit]])
    last = page[len(items) - 1] if len(items) < len(page) else None
    return {
        "items": items,
        "next": last and (last.name if order == "name" else _activity(last, running)),
        "left": _interrupted(store, {each["name"] for each in items}),
    }


def _session_row(info: SessionInfo) -> Shape:
    shape = json.session(info)
    if shape["head"] is not None:
        shape["head"] = row(shape["head"])
    return shape


def _activity(info: SessionInfo, running: set[str]) -> str:
    """Return the key that sessions are sorted by. It is also the start of the next page."""
    head = info.head.id if info.head is not None else None
    return f"{'run' if info.name in running else 'at'} {head or ''} {info.name}"


def _interrupted(store: Store, names: set[str]) -> dict[str, str]:
    """Return the state of each of these sessions whose run died, waits or has a call in doubt."""
    found: dict[str, str] = {}
    for name in names:
        with suppress(*UNREADABLE, NotFound):  # the list shows the damage of a session by itself
            run = store.session(name).abandoned()
            if run is not None and run.state in ("died", "in doubt", "waiting", "over budget"):
                found[name] = run.state
    for name in islice([n for n, state in found.items() if state == "died"], _DEAD_RUNS):
        if any(each.state == "in doubt" for each in store.session(name).pending()):
            found[name] = "in doubt"
    return found


def totals(store: Store, params: Params) -> Shape:
    """Return the usage of a session, and the highest usage of one of its checkpoints."""
    session = params.session(store)
    found = session.usage()
    return json.totals(found) | {
        "total": json.usage(found.total),
        "most": highest_usage(store, session),
    }


def log(store: Store, params: Params) -> Shape:
    """Return the checkpoints of a session on all branches, newest first.

    With `before`, only checkpoints below that seq are listed. `bridges` maps the id of each damaged
    checkpoint to facts that its neighbours have about it.
    """
    session = params.session(store)
    limit = params.number("limit", 200) or 1
    before = params.number("before", 0, HIGHEST) or None
    page = list(islice(session.tree(newest_first=True, before=before, summary=True), limit + 1))
    forks = session.forks()
    head = _head_id(session)
    bridges: dict[int, Shape] = {}
    for c in page[:limit]:
        if c.damaged is not None:
            around = store.neighbours(c, limit=1)
            ancestor = _ancestor_in_session(around)
            bridges[c.seq] = {"id": around.id, "step": around.step, "ancestor": ancestor}
    items = fitting([
        row(json.checkpoint(c)) | {"is_head": c.id == head, "forks": forks.get(c.seq, [])}
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


def _head_id(session: Session) -> str | None:
    try:
        head = session.head
    except UNREADABLE:
        return None
    return None if head is None else head.id


def _ancestor_in_session(around: Neighbours) -> str | None:
    """Return the id of the nearest ancestor if it is in the same session."""
    nearest = around.ancestors[0] if around.ancestors else None
    return nearest.id if nearest is not None and nearest.session == around.session else None


def operations(store: Store, params: Params) -> Shape:
    """Return the operations of a session, newest first."""
    found = params.session(store).operations()
    limit = params.number("limit", 100) or 1
    items = [json.operation(o) | {"details": None} for o in found[::-1][:limit]]
    return {"length": len(found), "items": items}


def run(store: Store, params: Params) -> Shape:
    """Return calls of a session's runs, by default the last ones, and what is still open."""
    session = params.session(store)
    calls = session.calls()
    limit = params.number("limit", 200) or 1
    start = params.number("start", max(len(calls) - limit, 0), HIGHEST)
    page = calls[start : start + limit]
    pending = session.pending()
    budget = _ANSWER // (len(page) + len(pending) + 2)
    left = session.abandoned()
    return {
        "length": len(calls),
        "start": start,
        "calls": [_fold_call(json.made_call(call), budget) for call in page],
        "pending": [_fold_call(json.pending(each), budget) for each in pending],
        "run": None if left is None else _fold_call(json.abandoned(left), budget),
    }


def _fold_call(shape: Shape, budget: int) -> Shape:
    for name in ("arguments", "result", "error", "reason"):
        if name in shape:
            shape[name] = fold(shape[name], budget // 2)
    return shape


def undoable(store: Store, params: Params) -> Shape:
    """Return what undo and redo would do now, or the errors that they would raise."""
    session = store.session(params.text("session"))
    try:
        session.info()
    except NotFound:
        if all(info.name != session.name for info in store.deleted()):
            raise
    return {
        "session": session.name,
        "undo": _next_step(session.next_undo),
        "redo": _next_step(session.next_redo),
    }


def _next_step(find: Callable[[], NextStep]) -> Shape:
    try:
        step = find()
    except HoldfastError as e:
        return {"problem": e.message, "hint": e.hint}
    where, n = step.ref
    shape: Shape = {
        "problem": None,
        "hint": None,
        "ref": f"{where} {n}",
        "kind": step.kind,
        "created_at": None if step.created_at is None else json.when(step.created_at),
        "checkpoint": _row_or_none(step.checkpoint),
        "head": None,
        "saved": where == "checkpoint",
        "tags": step.details.get("tags", []),
        "label": step.details.get("label"),
        "was": step.details.get("was"),
        "deleted": step.deleted,
    }
    if step.moves_head:
        shape["head"] = {
            "from": _row_or_none(step.head_before),
            "to": _row_or_none(step.head_after),
        }
    return shape


def _row_or_none(of: Checkpoint | None) -> Shape | None:
    return None if of is None else row(json.checkpoint(of))


# -- one checkpoint --------------------------------------------------------------------------------


def checkpoint(store: Store, params: Params) -> Shape:
    """Return the fields of a checkpoint, without its state."""
    shape = json.checkpoint(params.checkpoint(store))
    for name in ("meta", "pending", "reason", "hint"):
        if name in shape:
            shape[name] = fold(shape[name], _ANSWER // 4)
    return shape


def state(store: Store, params: Params) -> Shape:
    """Return a part of a state, with some of its entries."""
    start, limit = params.number("start", 0, HIGHEST), params.number("limit", 100)
    of = params.checkpoint(store)
    found = store.session(of.session).part(params.path(), of, start=start, limit=limit)
    budget = _ANSWER // (len(found.items) + 1)
    return _part(found, budget) | {
        "start": found.start,
        "items": [
            {"key": fold(json.value(key), ROW)} | _part(item, min(budget, ROW))
            for key, item in found.items
        ],
    }


def _part(of: Part, budget: int) -> Shape:
    shape: Shape = {"kind": of.kind, "size": of.size, "length": of.length}
    if of.kind not in ("list", "dict"):
        shape["value"] = fold(json.value(of.value), budget)
    return shape


def value(store: Store, params: Params) -> Any:
    """Return a whole value of a state: the page asks for it to unfold a value."""
    return json.value(_load(store, params.checkpoint(store), params.path()))


def _load(store: Store, of: Checkpoint, path: tuple[str | int, ...] = ()) -> Any:
    return store.session(of.session).load(of, path=path)


def messages(store: Store, params: Params) -> Shape:
    """Return items of the list at `path`, by default the last ones of the conversation."""
    of = params.checkpoint(store)
    limit = params.number("limit", 50, 200) or 1
    start = None if params.maybe("start") is None else params.number("start", 0, HIGHEST)
    for path in [params.path()] if params.maybe("path") else CONVERSATION_PATHS:
        try:
            found = store.session(of.session).items(path, of, start=start, limit=limit)
        except NotFound:
            continue
        budget = _ANSWER // (len(found.values) + 1)
        return {
            "path": list(path),
            "length": found.length,
            "start": found.start,
            "items": [fold(item, budget) for item in json.value(found.values)],
        }
    raise NotFound("the state has no list of messages", hint="its State shows what it has")


def changes(store: Store, params: Params) -> Shape:
    """Return what a checkpoint changed, against its nearest ancestor that can be read."""
    return changes_of(store, params.checkpoint(store))


def changes_of(store: Store, of: Checkpoint) -> Shape:
    ancestor, diff = store.session(of.session).changes(of)
    shape = _fold_changes(json.changes(diff))
    return {"from": None if ancestor is None else ancestor.id, "changes": shape}


def diff(store: Store, params: Params) -> Shape:
    """Return the changes from checkpoint `a` to checkpoint `b`."""
    a, b = params.checkpoint(store, "a"), params.checkpoint(store, "b")
    shape = json.comparison(a, b, store.compare(a, b))
    shape["a"], shape["b"] = row(shape["a"]), row(shape["b"])
    shape["changes"] = _fold_changes(shape["changes"])
    return shape


def _fold_changes(found: list[Shape]) -> list[Shape]:
    budget = _ANSWER // (2 * max(len(found), 1))
    for change in found:
        for name in ("before", "after"):
            if name in change:
                change[name] = fold(change[name], max(budget, 40))
    return found[:_CHANGES]


def way(store: Store, params: Params) -> Shape:
    """Return a checkpoint and its ancestors, newest first, down to `until`, which is left out."""
    end, until = params.checkpoint(store), params.maybe("until")
    line = takewhile(lambda c: c.id != until, store.session(end.session).history(end.id))
    limit = params.number("limit", 100) or 1
    found = list(islice(line, limit + 1))
    items = fitting([row(json.checkpoint(c)) for c in found[:limit]])
    return {"items": items, "more": len(items) < len(found)}


def blame(store: Store, params: Params) -> Shape:
    """Return the checkpoint in which a value last changed, with the value before and after."""
    of = params.checkpoint(store)
    path = params.path()
    if not path:
        raise InvalidRequest("path is missing")
    found = store.session(of.session).blame(path, of.id)
    shape: Shape = {
        "checkpoint": row(json.checkpoint(found)),
        "after": fold(json.value(_load(store, found, path)), _ANSWER // 2),
    }
    if found.ancestor is not None:
        with suppress(NotFound):  # without `before`, the value is new
            before = _load(store, store.get(found.ancestor), path)
            shape["before"] = fold(json.value(before), _ANSWER // 2)
    return shape


def integrity(store: Store, params: Params) -> Shape:
    """Return whether a checkpoint loads, and the hashes of its ancestors.

    If its record cannot be read, `known` lists facts from its neighbours.
    """
    try:
        of = params.checkpoint(store)
    except UNREADABLE as e:
        return _unreadable(store, params, e.message)
    except NotFound as e:
        if params.maybe("seq") is None:
            raise
        return _unreadable(store, params, e.message)
    problem: str | None = of.damaged
    if problem is None:
        try:
            _load(store, of)
        except UNREADABLE as e:
            problem = e.message
    ancestors = islice(store.session(of.session).history(of.id), 1, _CHAIN + 1)
    return {
        "checkpoint": row(json.checkpoint(of)),
        "problem": problem,
        "known": None,
        "chain": [_link(c) for c in ancestors],
    }


def _unreadable(store: Store, params: Params, problem: str) -> Shape:
    around = _neighbours(store, params)
    return {
        "checkpoint": {
            "id": params.text("id"),
            "session": around.session,
            "seq": around.seq,
            "damaged": problem,
        },
        "problem": problem,
        "known": {
            "step": around.step or None,
            "label": around.label,
            "tags": list(around.tags),
            "ancestor": _ancestor_in_session(around),
            "child": around.child,
        },
        "chain": [_link(c) for c in around.ancestors],
    }


def _neighbours(store: Store, params: Params) -> Neighbours:
    """Find a checkpoint by its id, or else by its session and seq, because the id may be lost."""
    id = params.text("id")
    with suppress(CheckpointNotFound):
        return store.neighbours(id, limit=_CHAIN)
    session, seq = params.maybe("session"), params.number("seq", 0, HIGHEST)
    if session is not None and seq:
        with suppress(CheckpointNotFound):
            return store.neighbours((session, seq), limit=_CHAIN)
    raise NotFound(f"there is no checkpoint {id}")


def _link(c: Checkpoint) -> Shape:
    shape: Shape = {"id": c.id, "damaged": c.damaged}
    if c.damaged is None:
        shape |= {"step": c.step, "hash": c.hash, "session": c.session}
    return shape


READS: dict[str, Callable[[Store, Params], Any]] = {
    function.__name__: function
    for function in (
        about, sessions, totals, log, checkpoint, state, value, messages, changes, diff, way,
        blame, chart, run, operations, undoable, integrity, search,
    )
}  # fmt: skip


# -- actions ---------------------------------------------------------------------------------------


def fork(store: Store, params: Params) -> Shape:
    """Make a new session that starts at a checkpoint."""
    at = params.checkpoint(store)
    made = store.session(at.session).fork(params.text("name"), at.id)
    return json.checkpoint(made.get())


def rewind(store: Store, params: Params) -> Shape:
    """Move the head of a session to a checkpoint. Without `session`, it is the checkpoint's own."""
    if params.maybe("session") is None:
        session = store.session(params.checkpoint(store).session)
    else:
        session = params.session(store)
    return json.checkpoint(session.rewind(params.text("id")))


def undo(store: Store, params: Params) -> Shape:
    """Undo the newest operation. With `ref`, fail unless the newest is that one."""
    return json.operation(_undo_session(store, params).undo(expect=_ref(params)))


def redo(store: Store, params: Params) -> Shape:
    """Redo what undo has undone. With `ref`, fail unless that would be redone."""
    return json.operation(_undo_session(store, params).redo(expect=_ref(params)))


def _undo_session(store: Store, params: Params) -> Session:
    """Return the session even if it is deleted, because undo and redo restore sessions, too."""
    return store.session(params.text("session"))


def _ref(params: Params) -> tuple[str, int] | None:
    ref = params.maybe("ref")
    if ref is None:
        return None
    where, _, n = ref.partition(" ")
    return where, int(n) if n.isascii() and n.isdigit() else 0


def tag(store: Store, params: Params) -> Shape:
    """Add a tag to a checkpoint."""
    at = params.checkpoint(store)
    return json.checkpoint(store.session(at.session).tag(at.id, params.text("tag")))


def label(store: Store, params: Params) -> Shape:
    """Set the label of a checkpoint."""
    at = params.checkpoint(store)
    return json.checkpoint(store.session(at.session).label(at.id, params.text("label")))


def resolve(store: Store, params: Params) -> Shape:
    """Decide a call in doubt: `result`, with its value, `rerun` or `skip`."""
    session, key, decided = params.session(store), params.text("key"), params.text("decided")
    if decided == "result":
        session.resolve(key, _value(params, "result"))
    elif decided == "rerun":
        session.resolve(key, action="rerun")
    elif decided == "skip":
        session.resolve(key, action="skip")
    else:
        raise InvalidRequest(f"not a decision: {decided!r}", hint="result, rerun or skip")
    return {"session": session.name, "key": key, "decided": decided}


def answer(store: Store, params: Params) -> Shape:
    """Answer a question that a run waits for."""
    session, name, given = params.session(store), params.text("name"), _value(params, "answer")
    session.answer(name, given)
    return {"session": session.name, "name": name, "answer": json.value(given)}


def _value(params: Params, name: str) -> Any:
    """Return the value of any type that a parameter renders as JSON."""
    try:
        return json.to_value(params.value(name))
    except InvalidRequest as e:
        raise InvalidRequest(f"{name}: {e.message}") from e


ACTIONS: dict[str, Callable[[Store, Params], Any]] = {
    function.__name__: function
    for function in (fork, rewind, undo, redo, tag, label, resolve, answer)
}
