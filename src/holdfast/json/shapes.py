"""JSON of checkpoints, sessions, operations and reports, for the command line and the web.

Values of states have the exact rendering of `format.portable`. `docs/json.md` lists the shapes.
"""

from __future__ import annotations

import datetime as dt
import re
from typing import TYPE_CHECKING, Any

from holdfast.errors import Corrupt, InvalidRequest
from holdfast.format import memory_limit, portable, state_paths, values
from holdfast.history.checkpoint import Checkpoint
from holdfast.model import Operation, Usage

if TYPE_CHECKING:
    from collections.abc import Iterable

    from holdfast.history.checkpoint import SessionInfo
    from holdfast.history.diff import Change, Comparison
    from holdfast.history.token_usage import Totals
    from holdfast.maintenance.repair import RepairResult
    from holdfast.maintenance.retention import Plan
    from holdfast.maintenance.stats import Stats
    from holdfast.maintenance.verify import Problem, Report
    from holdfast.model import ToolCall
    from holdfast.runs.abandoned import Abandoned
    from holdfast.runs.pending import MadeCall, Pending

Shape = dict[str, Any]


def value(of: Any) -> Any:
    """Return the exact JSON rendering of a value of a state."""
    return portable.to_json(values.encode_exact(of))


def to_value(rendered: Any) -> Any:
    """Return the value of an exact rendering. Raises InvalidRequest if it is not one."""
    try:
        return values.decode(portable.from_json(rendered))
    except Corrupt as e:
        hint = 'a key that begins with "$" is a tag; write "$$" for one of your own'
        raise InvalidRequest(e.message, hint=hint) from e


def parse(text: str | bytes) -> Any:
    """Return the value that JSON text renders. Raises InvalidRequest if the text is no such JSON.

    Raises TooBig if it takes more memory than memory_limit() allows.
    """
    try:
        rendered = portable.loads(text.encode() if isinstance(text, str) else text)
    except ValueError as e:
        raise InvalidRequest(f"not JSON: {e}") from e
    return to_value(rendered)


def check_memory(text: bytes) -> None:
    """Raise TooBig if JSON text would take more memory than memory_limit() allows, once parsed."""
    memory_limit.check_json(text)


def path(text: str) -> tuple[Any, ...]:
    """Return the keys of a path such as "plan.steps[3]"."""
    return state_paths.parse(text)


def dotted(path: tuple[Any, ...]) -> str:
    """Return a path as text, such as "state.plan.steps[3]"."""
    return state_paths.dotted(path)


def dumps(rendered: Any) -> str:
    """Return JSON on one line. Characters that control a terminal or reorder text are escaped."""
    text = portable.dumps(rendered).decode()
    if text.isprintable():
        return text
    return _CONTROLS.sub(lambda m: f"\\u{ord(m[0]):04x}", text)


# Control characters that JSON allows, and characters that change the direction of text.
_CONTROLS = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def when(moment: dt.datetime) -> str:
    """Return a time in ISO 8601, with microseconds; UTC is written as Z."""
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def usage(of: Usage) -> Shape:
    return {"tokens": of.tokens, "cost": of.cost}


def checkpoint(of: Checkpoint) -> Shape:
    shape: Shape = {
        "id": of.id,
        "session": of.session,
        "seq": of.seq,
        "damaged": of.damaged,
    }
    if of.damaged is not None:
        return shape
    run = of.run
    return shape | {
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
    """Return the JSON of an event of `watch()`: a checkpoint or an operation."""
    if isinstance(of, Checkpoint):
        return {"checkpoint": checkpoint(of)}
    return {"operation": operation(of)}


def comparison(a: Checkpoint, b: Checkpoint, found: Comparison) -> Shape:
    """Return the common ancestor, the steps and usage since then, and the changes."""
    return {
        "a": checkpoint(a),
        "b": checkpoint(b),
        "ancestor": None if found.ancestor is None else found.ancestor.id,
        "steps": {"a": found.to_a.steps, "b": found.to_b.steps},
        "usage": {"a": usage(found.to_a.usage), "b": usage(found.to_b.usage)},
        "changes": changes(found.changes),
    }


def changes(of: Iterable[Change]) -> list[Shape]:
    """Return one object per change, with `before` unless added and `after` unless removed."""
    found = []
    for change in of:
        shape: Shape = {"kind": change.kind, "path": value(list(change.path))}
        if change.kind != "added":
            shape["before"] = value(change.before)
        if change.kind != "removed":
            shape["after"] = value(change.after)
        found.append(shape)
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


def repair(of: RepairResult) -> Shape:
    sessions = [each._asdict() for each in of.sessions]
    return {
        "ok": of.ok,
        "sessions": sessions,
        "rebuilt": of.rebuilt,
        "remaining": report(of.remaining),
    }


def stats(of: Stats) -> Shape:
    return of._asdict() | {"largest": [size._asdict() for size in of.largest]}
