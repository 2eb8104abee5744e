"""S0: crash-safe session files.

`<root>/<session>/checkpoints/cp_<time>_<id>.json`, a symbolic link `latest.json` to one of them,
and `*.json.backup`. A backup is used if its checkpoint is missing or damaged.

`tokens_used` and `cost_estimate` count from the beginning of the session. The usage of a checkpoint
is the increase since its parent. Only one kind of checksum is known, and verified: `_checksum` with
`_version` "1.0" is the SHA-256 of the JSON with sorted keys and no white space.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

from holdfast import Store, ToolCall
from holdfast.importers.checkpoints.foreign import Foreign, import_entries, read_files, save_fields
from holdfast.importers.save import Imported, merge_meta
from holdfast.importers.untrusted import Document, Files, Unsound, decode, instant, printable

_FOLDER = "checkpoints"
_LATEST = "latest.json"
_SHA256 = re.compile("[0-9a-f]{64}")


def import_s0(store: Store, path: str | os.PathLike[str]) -> Imported:
    """Import the sessions below a folder of S0. The folder is only read."""
    files = Files(path, single=False)
    checkpoints, backups = [], []
    for name in files.names:
        folder, base = os.path.split(os.path.join(os.path.basename(files.root), name))
        if os.path.basename(folder) != _FOLDER or not base.endswith((".json", ".json.backup")):
            files.skip(name, "not a checkpoint file")
        elif base.startswith("cp_") and base.endswith(".json"):
            checkpoints.append(name)
        else:
            backups.append(name)  # or a `latest.json` that was copied as a file
    _check_links(files, {*checkpoints})
    entries = read_files("s0", files, checkpoints + backups, parse)
    return import_entries(store, "s0", entries, files.findings)


def _check_links(files: Files, checkpoints: set[str]) -> None:
    """Report each link, except a `latest.json` that names a checkpoint in its own folder."""
    for link in files.links:
        target = files.target(link)
        beside = target is not None and os.path.dirname(target) == os.path.dirname(link)
        if target is None:
            files.skip(link, "a symbolic link that leads out of the folder: not followed")
        elif os.path.basename(link) != _LATEST or not beside or target not in checkpoints:
            why = f"a symbolic link to {printable(target)}, no checkpoint beside it: not followed"
            files.skip(link, why)


def parse(data: Any, raw: bytes) -> Foreign:
    verified = _verify(data, raw)
    it = Document(data)
    id = it.name("checkpoint_id" if "checkpoint_id" in data else "id")
    session, created = it.name("session_id"), it.take("created_at")
    iteration = it.integer("iteration")
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
        "tokens_used": it.integer("tokens_used"),
        "cost_estimate": it.number("cost_estimate"),
    }
    fields = save_fields(
        merge_meta(it.rest(), known), trigger=("trigger", trigger), hint=("resume_hint", hint)
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
    """Return a pending call in any of the usual shapes. Its other fields are in its `meta`."""
    if type(call) is not dict:
        return ToolCall(f"tool_calls_pending[{n}]", "unknown", call)
    rest = dict(call)
    inner = dict(rest.pop("function")) if type(rest.get("function")) is dict else rest
    id = _pop(rest, str, "id", "tool_call_id", "call_id") or f"tool_calls_pending[{n}]"
    name = _pop(inner, str, "name", "tool_name", "tool") or "unknown"
    arguments = _pop(inner, object, "arguments", "args", "input", "parameters")
    return ToolCall(id, name, arguments, rest if inner is rest else inner | rest)


def _pop(data: dict[str, Any], kind: type, *names: str) -> Any:
    """Take out the first of these fields that has this type and is not empty."""
    for name in names:
        if isinstance(data.get(name), kind) and data.get(name) not in ("", None):
            return data.pop(name)
    return None


def _verify(data: Any, raw: bytes) -> bool:
    """Return whether there is a checksum of the known kind. Raises Unsound if it is wrong."""
    if type(data) is not dict or data.get("_version") != "1.0":
        return False
    expected = data.get("_checksum")
    if type(expected) is not str or not _SHA256.fullmatch(expected):
        return False
    # Numbers as the file has them, because two writers may write the same float in two ways.
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
    """A number as it is written in the file."""

    __slots__ = ()


def _canonical(value: Any) -> Iterator[str]:
    """Yield JSON with sorted keys and no white space, in pieces."""
    if type(value) is dict:
        for n, name in enumerate(sorted(value)):
            yield "," if n else "{"
            yield json.dumps(name, ensure_ascii=False) + ":"
            yield from _canonical(value[name])
        yield "}" if value else "{}"
    elif type(value) is list:
        for n, item in enumerate(value):
            yield "," if n else "["
            yield from _canonical(item)
        yield "]" if value else "[]"
    else:
        yield value if type(value) is _Number else json.dumps(value, ensure_ascii=False)
