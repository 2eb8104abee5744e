"""S1: the steps of an agent, with a status.

`<dir>/<session>_<step>.json`, and `<session>_latest.json` with the name of one of these files. This
pointer is only compared: the head is the highest step. A tool call is pending if it has no result
and did not succeed.
"""

from __future__ import annotations

import os
from typing import Any

from holdfast import Store, ToolCall
from holdfast.importers.checkpoints.foreign import Foreign, import_entries, read_files, save_fields
from holdfast.importers.save import Imported, merge_meta
from holdfast.importers.untrusted import Document, Files, Unsound, instant, printable

_POINTER = "_latest.json"
_STATUS = {
    "InProgress": "in_progress",
    "Completed": "completed",
    "Failed": "failed",
    "Halted": "halted",
}
_WITH_REASON = {"Failed", "Halted"}


def import_s1(store: Store, path: str | os.PathLike[str]) -> Imported:
    """Import the sessions in a folder of S1. The folder is only read."""
    files = Files(path, single=False)
    names = files.select(".json", kind="checkpoint file")
    pointers = [name for name in names if name.endswith(_POINTER)]
    entries = read_files("s1", files, [n for n in names if n not in {*pointers}], parse)
    steps: dict[str, dict[str, int]] = {}
    for entry in entries:
        steps.setdefault(entry.session, {})[entry.where] = entry.order[0]
    for name in pointers:
        _check_pointer(files, name, steps.get(printable(name).removesuffix(_POINTER), {}))
    return import_entries(store, "s1", entries, files.findings)


def _check_pointer(files: Files, name: str, steps: dict[str, int]) -> None:
    """Report a pointer that does not name the newest sound step of its session."""
    try:
        target = files.read(name).decode().strip()
    except (Unsound, UnicodeDecodeError) as e:
        files.skip(name, e)
        return
    newest = max(steps.values(), default=0)
    if target not in steps:
        files.skip(name, f"it names {target[:80]!r}, which is no sound checkpoint of its session")
    elif steps[target] < newest:
        files.skip(name, f"it names step {steps[target]}; the head is step {newest}")


def parse(data: Any, _: bytes) -> Foreign:
    it = Document(data)
    id, agent, session = it.name("id"), it.text("agent_name"), it.name("session_id")
    step, timestamp = it.integer("step"), it.integer("timestamp")
    state = {
        "messages": it.items("messages", dict),
        "tool_calls": it.items("tool_calls", dict),
        "partial_results": it.items("partial_results", str),
    }
    for n, message in enumerate(state["messages"]):
        inner = Document(message, f"messages[{n}]")
        inner.text("role")
        inner.take("content")
    calls = [_call(n, call) for n, call in enumerate(state["tool_calls"])]
    raw_status = it.take("status")
    status, reason = _status(raw_status)
    known = {"id": id, "step": step, "timestamp": timestamp, "created_at": timestamp}
    meta = merge_meta(it.rest(), known)
    if not agent:
        meta["agent_name"] = agent
    if reason == "":
        meta["status"] = raw_status
    fields = save_fields(meta) | {"status": status}
    if reason:
        fields["reason"] = reason
    if pending := [call for call in calls if call is not None]:
        fields["pending"] = pending
    order = (step, instant(timestamp, "timestamp"), 0)
    return Foreign(session, id, order, state, fields, agent or None)


def _call(n: int, call: dict[str, Any]) -> ToolCall | None:
    """Return the call if it is pending."""
    it = Document(call, f"tool_calls[{n}]")
    name, arguments, success = it.text("tool_name"), it.take("arguments"), it.boolean("success")
    if success or it.has("result"):
        return None
    return ToolCall(f"tool_calls[{n}]", name, arguments, it.rest())


def _status(value: Any) -> tuple[str, str | None]:
    """Return status and reason. The source writes "Completed", or {"Failed": "the reason"}."""
    if type(value) is str and value in _STATUS.keys() - _WITH_REASON:
        return _STATUS[value], None
    if type(value) is dict and len(value) == 1:
        (name, reason), *_ = value.items()
        if name in _WITH_REASON and type(reason) is str:
            return _STATUS[name], reason
    raise Unsound(f"status is unknown: {str(value)[:80]}")
