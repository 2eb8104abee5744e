"""S0: crash-safe session files.

`<root>/<session>/checkpoints/cp_<time>_<id>.json`, `latest.json` as a symbolic link to one of them,
and `*.json.backup`. A backup counts where its checkpoint is not there any more, or not sound.

`tokens_used` and `cost_estimate` count from the session's beginning: usage is what was added since
the parent. A checksum is verified if it is the one this format is known to have: `_checksum`,
SHA-256 of the JSON with sorted keys and no white space, with `_version` "1.0".
"""

from __future__ import annotations

import json
import os
import re
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from holdfast.importers.foreign import (
    Document,
    Findings,
    Folder,
    Foreign,
    Unsound,
    collect,
    decode,
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

_FOLDER = "checkpoints"
_LATEST = "latest.json"
_SHA256 = re.compile("[0-9a-f]{64}")


def import_s0(store: Store, path: str | os.PathLike[str]) -> Imported:
    """Import the sessions below a folder of S0. Nothing in it is changed."""
    findings = Findings()
    folder = Folder(existing(path), findings)
    own, backups = [], []
    for name in folder.files:
        place, base = os.path.split(os.path.join(os.path.basename(folder.root), name))
        if os.path.basename(place) != _FOLDER or not base.endswith((".json", ".json.backup")):
            findings.skip(shown(name), "not a checkpoint's file")
        elif base.startswith("cp_") and base.endswith(".json"):
            own.append(name)
        else:
            backups.append(name)  # or a `latest.json` that was copied as a file
    _check_links(folder, {*own}, findings)
    return land(store, "s0", collect(folder, own + backups, parse, findings), findings)


def _check_links(folder: Folder, files: set[str], findings: Findings) -> None:
    """`latest.json` may name a checkpoint beside it, which is imported anyway."""
    for link in folder.links:
        target = folder.target(link)
        beside = target is not None and os.path.dirname(target) == os.path.dirname(link)
        if target is None:
            findings.skip(shown(link), "a symbolic link that leads out of the folder: not followed")
        elif os.path.basename(link) != _LATEST or not beside or target not in files:
            why = f"a symbolic link to {shown(target)}, no checkpoint beside it: not followed"
            findings.skip(shown(link), why)


def looks_like(data: dict[str, Any]) -> bool:
    return "tool_calls_pending" in data and "iteration" in data


def layout(names: list[str]) -> bool:
    return any(re.search(r"(^|[/\\])checkpoints[/\\]cp_[^/\\]*\.json", name) for name in names)


def parse(data: Any, raw: bytes) -> Foreign:
    verified = _verify(data, raw)
    it = Document(data)
    id = it.name("checkpoint_id" if "checkpoint_id" in data else "id")
    session, created, iteration = (
        it.name("session_id"),
        it.take("created_at"),
        it.whole("iteration"),
    )
    pending = it.items("tool_calls_pending")
    state = {
        "messages": it.items("messages"),
        "tool_calls_pending": pending,
        "tool_results": it.take("tool_results"),
    }
    trigger = it.text("trigger")
    hint = it.text("resume_hint") if it.has("resume_hint") else None
    known = {
        "checkpoint_id": id,
        "created_at": created,
        "iteration": iteration,
        "tokens_used": it.whole("tokens_used"),
        "cost_estimate": it.number("cost_estimate"),
    }
    fields = described(
        merged(it.rest(), known), trigger=("trigger", trigger), hint=("resume_hint", hint)
    )
    if pending:
        fields["pending"] = [_call(n, call) for n, call in enumerate(pending)]
    return Foreign(
        session,
        id,
        (iteration, instant(created), 0),
        state,
        fields,
        totals=("tokens_used", "cost_estimate"),
        verified=verified,
    )


def _call(n: int, call: Any) -> ToolCall:
    """A pending call, in whichever of the usual shapes. What has no place is in its `meta`."""
    if type(call) is not dict:
        return ToolCall(f"tool_calls_pending[{n}]", "unknown", call)
    rest = dict(call)
    inner = dict(rest.pop("function")) if type(rest.get("function")) is dict else rest
    id = _pop(rest, str, "id", "tool_call_id", "call_id") or f"tool_calls_pending[{n}]"
    name = _pop(inner, str, "name", "tool_name", "tool") or "unknown"
    arguments = _pop(inner, object, "arguments", "args", "input", "parameters")
    return ToolCall(id, name, arguments, rest if inner is rest else inner | rest)


def _pop(data: dict[str, Any], kind: type, *names: str) -> Any:
    """The first of these fields that is there, is of that kind, and is not empty."""
    for name in names:
        if isinstance(data.get(name), kind) and data.get(name) not in ("", None):
            return data.pop(name)
    return None


def _verify(data: Any, raw: bytes) -> bool:
    """Whether the checksum was checked. Raises Unsound if it is wrong."""
    if type(data) is not dict or data.get("_version") != "1.0":
        return False
    expected = data.get("_checksum")
    if type(expected) is not str or not _SHA256.fullmatch(expected):
        return False
    # Numbers as they stand in the file: two writers seldom agree on how to write a float.
    covered = decode(raw, parse_float=_Number)
    del covered["_checksum"], covered["_version"]
    try:
        text = "".join(_canonical(covered))
    except RecursionError:
        raise Unsound("it is nested too deeply") from None
    if sha256(text.encode("utf-8", "surrogatepass")).hexdigest() != expected:
        raise Unsound("its checksum does not match")
    return True


class _Number(str):
    __slots__ = ()


def _canonical(value: Any) -> list[str]:
    """JSON with sorted keys and no white space, in pieces."""
    if type(value) is dict:
        parts = [
            [json.dumps(k, ensure_ascii=False), ":", *_canonical(value[k])] for k in sorted(value)
        ]
        return ["{", *_joined(parts), "}"]
    if type(value) is list:
        return ["[", *_joined([_canonical(item) for item in value]), "]"]
    return [value if type(value) is _Number else json.dumps(value, ensure_ascii=False)]


def _joined(parts: list[list[str]]) -> list[str]:
    return [piece for n, part in enumerate(parts) for piece in ([","] if n else []) + part]
