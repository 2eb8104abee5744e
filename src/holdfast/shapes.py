"""What the library answers, as JSON: the same for the command line, the web and whoever reads them.

Values of states come in the exact rendering of `codec.portable`. `docs/json.md` lists the shapes.
"""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any

from holdfast.checkpoint import Checkpoint
from holdfast.codec import portable, values
from holdfast.model import Operation, Usage

if TYPE_CHECKING:
    from collections.abc import Iterable

    from holdfast.checkpoint import SessionInfo
    from holdfast.diff import Change
    from holdfast.model import ToolCall
    from holdfast.retention import Plan
    from holdfast.runs.handles import Abandoned
    from holdfast.runs.pending import MadeCall, Pending
    from holdfast.runs.usage import Totals
    from holdfast.stats import Stats
    from holdfast.verify import Problem, Report

Shape = dict[str, Any]


def value(of: Any) -> Any:
    """Any value of a state, exactly."""
    return portable.show(values.encode_exact(of))


def dumps(shown: Any) -> str:
    return portable.dumps(shown).decode()


def when(moment: dt.datetime) -> str:
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def usage(of: Usage) -> Shape:
    return {"tokens": of.tokens, "cost": of.cost}


def checkpoint(of: Checkpoint) -> Shape:
    shown: Shape = {
        "id": of.id,
        "session": of.session,
        "seq": of.seq,
        "damaged": of.damaged,
    }
    if of.damaged is not None:
        return shown
    run = of.run
    return shown | {
        "step": of.step,
        "created_at": when(of.created_at),
        "operation": of.operation,
        "parent": of.parent,
        "parent_session": of.parent_session,
        "ancestor": of.ancestor,
        "pruned": of.pruned,
        "label": of.label,
        "tags": list(of.tags),
        "trigger": of.trigger,
        "status": of.status,
        "reason": of.reason,
        "agent": of.agent,
        "usage": usage(of.usage),
        "pending": [_call(call) for call in of.pending],
        "hint": of.hint,
        "meta": value(of.meta),
        "key": of.key,
        "child_of": of.child_of,
        "run": None if run is None else {"id": run.id, "turn": run.turn},
        "size": of.size,
        "added": of.added,
        "hash": of.hash,
        "state_hash": of.state_hash,
    }


def _call(of: ToolCall) -> Shape:
    return {"id": of.id, "name": of.name, "arguments": value(of.arguments)}


def session(of: SessionInfo) -> Shape:
    return {
        "name": of.name,
        "agent": of.agent,
        "checkpoints": of.checkpoints,
        "damaged": of.damaged,
        "head": None if of.head is None else checkpoint(of.head),
    }


def operation(of: Operation) -> Shape:
    return {
        "session": of.session,
        "number": of.number,
        "kind": of.kind,
        "created_at": when(of.created_at),
        "summary": of.summary,
        "way_back": of.way_back,
        "details": value(of.details),
    }


def event(of: Checkpoint | Operation) -> Shape:
    """What watch() yields."""
    if isinstance(of, Checkpoint):
        return {"checkpoint": checkpoint(of)}
    return {"operation": operation(of)}


def changes(of: Iterable[Change]) -> list[Shape]:
    found = []
    for change in of:
        shown: Shape = {"kind": change.kind, "path": value(list(change.path))}
        if change.kind != "added":
            shown["before"] = value(change.before)
        if change.kind != "removed":
            shown["after"] = value(change.after)
        found.append(shown)
    return found


def pending(of: Pending) -> Shape:
    return {
        "session": of.session,
        "key": of.key,
        "name": of.name,
        "state": of.state,
        "arguments": value(of.arguments),
        "idempotency_key": of.idempotency_key,
        "run": of.run,
        "turn": of.turn,
        "since": when(of.since),
        "partial": value(list(of.partial)),
    }


def made_call(of: MadeCall) -> Shape:
    return of._asdict() | {
        "arguments": value(of.arguments),
        "result": value(of.result),
        "started": when(of.started),
    }


def abandoned(of: Abandoned) -> Shape:
    return of._asdict()


def totals(of: Totals) -> Shape:
    return {
        "path": usage(of.path),
        "inherited": usage(of.inherited),
        "spent": usage(of.spent),
        "children": usage(of.children),
        "runs": {run: usage(spent) for run, spent in of.runs.items()},
    }


def plan(of: Plan) -> Shape:
    return {
        "session": of.session,
        "whole": of.whole,
        "verdicts": [
            {
                "id": v.checkpoint.id,
                "seq": v.checkpoint.seq,
                "keep": v.keep,
                "reason": v.reason,
            }
            for v in of.verdicts
        ],
    }


def problem(of: Problem) -> Shape:
    return of._asdict()


def report(of: Report) -> Shape:
    return {
        "ok": of.ok,
        "sessions": of.sessions,
        "checkpoints": of.checkpoints,
        "loadable": of.loadable,
        "problems": [problem(p) for p in of.problems],
    }


def stats(of: Stats) -> Shape:
    return of._asdict() | {"largest": [size._asdict() for size in of.largest]}
