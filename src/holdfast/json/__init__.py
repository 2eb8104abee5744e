"""JSON of checkpoints, sessions, operations and reports, and of the values in states.

Values of states have the exact rendering of `format.portable`. `docs/json.md` lists the shapes.
"""

from __future__ import annotations

import datetime as dt
import re
from typing import TYPE_CHECKING, Any

from holdfast.errors import Corrupt, InvalidRequest
from holdfast.format import memory_limit, portable, state_paths, values
from holdfast.history.checkpoint import Checkpoint
from holdfast.json.shared_values import Pool
from holdfast.model import Operation, Usage

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from holdfast.history.checkpoint import SessionInfo
    from holdfast.history.diff import Change, Comparison
    from holdfast.history.message_parts import MessagePart
    from holdfast.history.search import SearchHit
    from holdfast.history.search_index import IndexResult
    from holdfast.history.token_usage import Totals
    from holdfast.maintenance.repair import RepairResult
    from holdfast.maintenance.retention import Plan
    from holdfast.maintenance.stats import Stats
    from holdfast.maintenance.verify import Problem, VerifyResult
    from holdfast.runs.abandoned import Abandoned
    from holdfast.runs.pending import MadeCall, Pending

__all__ = [
    "Pool", "Shape", "abandoned", "changes", "check_memory", "checkpoint", "comparison", "dotted",
    "dumps", "event", "hit", "index", "made_call", "message_part", "operation", "parse", "path",
    "pending", "plan", "problem", "repair", "report", "session", "stats", "to_value", "totals",
    "usage", "usage_sums", "value", "when",
]  # fmt: skip

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
    """Return tokens and cost; and the parts, unless only these totals are known."""
    shape: Shape = {"tokens": of.tokens, "cost": of.cost}
    if of.input or of.output or of.model or of.parts:
        shape |= _fields(of, "input", "output", "cached", "reasoning", "model")
    return shape


_CHECKPOINT = """
    id session seq damaged step created_at operation parent parent_session ancestor pruned label
    tags trigger status reason agent usage pending hint meta key child_of run size added hash
    state_hash
""".split()
_VALUES = {"arguments", "details", "meta", "result"}
"""Fields with values of states."""


def _fields(of: Any, *names: str) -> Shape:
    """Return these attributes of an object as JSON."""
    return {name: _field(name, getattr(of, name)) for name in names}


def _field(name: str, found: Any) -> Any:
    if name in _VALUES:
        return value(found)
    if isinstance(found, dt.datetime):
        return when(found)
    return usage(found) if isinstance(found, Usage) else found


def checkpoint(of: Checkpoint) -> Shape:
    if of.damaged is not None:
        return _fields(of, "id", "session", "seq", "damaged")
    run = of.run
    return _fields(of, *_CHECKPOINT) | {
        "tags": list(of.tags),
        "pending": [_fields(call, "id", "name", "arguments") for call in of.pending],
        "run": None if run is None else {"id": run.id, "turn": run.turn},
        **({} if of.adopted is None else {"adopted": of.adopted}),
        **({} if of.summary is None else {"summary": of.summary}),
    }


def message_part(of: MessagePart) -> Shape:
    return _fields(of, *of._fields)


def session(of: SessionInfo) -> Shape:
    head = None if of.head is None else checkpoint(of.head)
    return _fields(of, "name", "agent", "checkpoints", "damaged") | {"head": head}


def operation(of: Operation) -> Shape:
    return _fields(of, "session", "number", "kind", "created_at", "summary", "way_back", "details")


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


def hit(of: SearchHit) -> Shape:
    return _fields(of, "session", "snippet", "start", "end") | {
        "checkpoint": None if of.checkpoint is None else checkpoint(of.checkpoint),
        "path": value(list(of.path)),
    }


def index(of: IndexResult) -> Shape:
    return of._asdict()


def pending(of: Pending) -> Shape:
    return _fields(of, *of._fields)


def made_call(of: MadeCall) -> Shape:
    return _fields(of, *of._fields)


def abandoned(of: Abandoned) -> Shape:
    spent = None if of.over_budget is None else of.over_budget._asdict()
    return of._asdict() | {"over_budget": spent}


def totals(of: Totals) -> Shape:
    runs = {run: usage(spent) for run, spent in of.runs.items()}
    models = [usage(part) for part in of.spent.by_model().values()]
    sums = _fields(of, "path", "inherited", "spent", "children")
    return sums | {"models": models, "runs": runs}


def usage_sums(by: str, of: Mapping[str | None, Usage]) -> Shape:
    """Return the JSON of `store.usage(by=…)`, with the total."""
    rows = [{"name": name, "usage": usage(spent)} for name, spent in of.items()]
    return {"by": by, "rows": rows, "total": usage(sum(of.values(), Usage()))}


def plan(of: Plan) -> Shape:
    verdicts = [
        _fields(v.checkpoint, "id", "seq") | _fields(v, "keep", "reason") for v in of.verdicts
    ]
    return _fields(of, "session", "whole", "deleted") | {"verdicts": verdicts}


def problem(of: Problem) -> Shape:
    return of._asdict()


def report(of: VerifyResult) -> Shape:
    problems = [problem(p) for p in of.problems]
    return _fields(of, "ok", "sessions", "checkpoints", "loadable") | {"problems": problems}


def repair(of: RepairResult) -> Shape:
    sessions, remaining = [each._asdict() for each in of.sessions], report(of.remaining)
    return {"ok": of.ok, "sessions": sessions, "rebuilt": of.rebuilt, "remaining": remaining}


def stats(of: Stats) -> Shape:
    return of._asdict() | {"largest": [size._asdict() for size in of.largest]}
