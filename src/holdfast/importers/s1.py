"""S1: an agent's steps with a status.

`<dir>/<session>_<step>.json`, and `<session>_latest.json` holding the name of one of these. The
pointer is only compared: the head is the highest step. A tool call that has neither a result nor
success is pending.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from holdfast.importers.foreign import (
    Document,
    Findings,
    Folder,
    Foreign,
    Unsound,
    collect,
    described,
    existing,
    instant,
    merged,
    shown,
)
from holdfast.importers.landing import Imported, land
from holdfast.model import ToolCall

if TYPE_CHECKING:
    from holdfast import Store

_POINTER = "_latest.json"
_STATUS = {
    "InProgress": "in_progress",
    "Completed": "completed",
    "Failed": "failed",
    "Halted": "halted",
}
_WITH_REASON = {"Failed", "Halted"}


def import_s1(store: Store, path: str | os.PathLike[str]) -> Imported:
    """Import the sessions in a folder of S1. Nothing in it is changed."""
    findings = Findings()
    folder = Folder(existing(path), findings)
    folder.report_links(findings)
    names, pointers = [], []
    for name in folder.files:
        if name.endswith(_POINTER):
            pointers.append(name)
        elif name.endswith(".json"):
            names.append(name)
        else:
            findings.skip(shown(name), "not a checkpoint's file")
    entries = collect(folder, names, parse, findings)
    sessions: dict[str, dict[str, int]] = {}
    for entry in entries:
        sessions.setdefault(entry.session, {})[entry.where] = entry.order[0]
    for name in pointers:
        _check_pointer(folder, name, sessions, findings)
    return land(store, "s1", entries, findings)


def _check_pointer(
    folder: Folder, name: str, sessions: dict[str, dict[str, int]], findings: Findings
) -> None:
    """Report a pointer to anything but the newest sound step of its session."""
    session = shown(name).removesuffix(_POINTER)
    steps = sessions.get(session, {})
    try:
        target = folder.read(name).decode().strip()
    except (Unsound, UnicodeDecodeError) as e:
        findings.skip(shown(name), e)
        return
    if target not in steps:
        findings.skip(shown(name), f"it names {target[:80]!r}, no sound checkpoint of {session!r}")
    elif steps[target] < max(steps.values()):
        newest = max(steps.values())
        findings.skip(shown(name), f"it names step {steps[target]}; the head is step {newest}")


def looks_like(data: dict[str, Any]) -> bool:
    return {"agent_name", "step", "partial_results"} <= data.keys()


def layout(names: list[str]) -> bool:
    return any(re.search(r"_(latest|[0-9]+)\.json$", name) for name in names)


def parse(data: Any, _: bytes) -> Foreign:
    it = Document(data)
    id, agent, session = it.name("id"), it.text("agent_name"), it.name("session_id")
    step, timestamp = it.whole("step"), it.whole("timestamp")
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
    meta = merged(it.rest(), known)
    if not agent:
        meta["agent_name"] = agent
    if reason == "":
        meta["status"] = raw_status
    fields = described(meta) | {"status": status}
    if reason:
        fields["reason"] = reason
    if pending := [call for call in calls if call is not None]:
        fields["pending"] = pending
    order = (step, instant(timestamp, "timestamp"), 0)
    return Foreign(session, id, order, state, fields, agent or None)


def _call(n: int, call: dict[str, Any]) -> ToolCall | None:
    """The call, if it is pending."""
    it = Document(call, f"tool_calls[{n}]")
    name, arguments, success = it.text("tool_name"), it.take("arguments"), it.flag("success")
    if success or it.has("result"):
        return None
    return ToolCall(f"tool_calls[{n}]", name, arguments, it.rest())


def _status(value: Any) -> tuple[str, str | None]:
    if type(value) is str and value in _STATUS.keys() - _WITH_REASON:
        return _STATUS[value], None
    if type(value) is dict and len(value) == 1:
        (name, reason), *_ = value.items()
        if name in _WITH_REASON and type(reason) is str:
            return _STATUS[name], reason
    raise Unsound(f"status is unknown: {str(value)[:80]}")
