"""Importers of checkpoints that other stores keep, in the formats S0 to S3.

Each importer makes an entry of every checkpoint. The entries are saved session by session.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from hashlib import sha256
from typing import Any

import apsw

from holdfast import Checkpoint, Store, ToolCall, Usage
from holdfast.importers.save import (
    PROVENANCE,
    Content,
    Entry,
    Import,
    ImportResult,
    SessionImport,
    merge_meta,
)
from holdfast.importers.untrusted import (
    Database,
    Document,
    Files,
    Findings,
    Table,
    Unsound,
    decode,
    digest,
    existing,
    instant,
    printable,
)


@dataclass(frozen=True, slots=True)
class _Foreign:
    """A checkpoint of another store, in holdfast's terms."""

    session: str
    id: str
    order: tuple[int, int, int]
    """Step or iteration, time in nanoseconds, and position in the source."""
    state: Any
    fields: dict[str, Any]
    """Arguments of Session.save(), always with `meta`."""
    agent: str | None = None
    parent: str | None = None
    totals: tuple[str, str] | None = None
    """The fields of `meta` with the tokens and the cost since the session began."""
    verified: bool = True
    """False if it has no checksum, or one that cannot be checked, although the format has them."""


_Reader = Callable[[], tuple[_Foreign, str]]
"""Returns a checkpoint and its digest. Raises Unsound."""


@dataclass(eq=False, slots=True, kw_only=True)
class CheckpointEntry(Entry):
    """A checkpoint of another store. Its state is read again when it is saved."""

    session: str
    id: str
    parent_id: str | None
    read: _Reader

    def content(self, parent: Checkpoint | None) -> Content:
        foreign, digest = self.read()
        if digest != self.digest:
            raise Unsound("it changed during the import")
        fields = dict(foreign.fields)
        meta = fields["meta"]
        if PROVENANCE in meta:
            fields["meta"] = meta | {PROVENANCE: {PROVENANCE: meta[PROVENANCE]}}
        if foreign.totals is not None:
            before = {} if parent is None else parent.meta
            tokens, cost = [_increase(meta[name], before.get(name, 0)) for name in foreign.totals]
            fields["usage"] = Usage(tokens=int(tokens), cost=float(cost))
        return Content(foreign.state, fields, foreign.agent)


def _increase(total: float, before: float) -> Decimal:
    """Return the difference of two totals. A total that is lower restarted from zero."""
    return Decimal(str(total)) - Decimal(str(before if total >= before else 0))


def _save_fields(meta: dict[str, Any], **texts: tuple[str, str | None]) -> dict[str, Any]:
    """Return the arguments of Session.save(): `meta`, its tags, and texts.

    Each of `texts` has the name and value of a field of the source. An empty text has no meaning in
    holdfast, and stays in `meta`.
    """
    meta |= {name: text for name, text in texts.values() if text == ""}
    fields: dict[str, Any] = {ours: text for ours, (_, text) in texts.items() if text}
    if tags := _tags_in(meta):
        fields["tags"] = tags
        del meta["tags"]
    return fields | {"meta": meta}


def _tags_in(data: dict[str, Any]) -> list[str]:
    """Return the field `tags` if it is a list of texts that are not empty; else no tags."""
    tags = data.get("tags")
    if type(tags) is list and all(type(tag) is str and tag for tag in tags):
        return tags
    return []


def _read_entries(
    format: str,
    sources: Iterable[tuple[str, _Reader]],
    findings: Findings,
) -> list[CheckpointEntry]:
    """Return an entry for each place and its reader. Places that are not sound are reported."""
    entries = []
    for where, read in sources:
        try:
            foreign, content = read()
        except Unsound as e:
            findings.skip(where, e)
            continue
        entries.append(
            CheckpointEntry(
                where=where,
                key=f"{format}:{foreign.id}",
                digest=content,
                order=(*foreign.order, foreign.id, content),
                verified=foreign.verified,
                session=foreign.session,
                id=foreign.id,
                parent_id=foreign.parent,
                read=read,
            )
        )
    return entries


def _read_files(
    format: str, files: Files, names: Iterable[str], parse: Callable[[Any, bytes], _Foreign]
) -> list[CheckpointEntry]:
    """Return the entries of files with one checkpoint each."""

    def read(name: str) -> tuple[_Foreign, str]:
        raw = files.read(name)
        data = decode(raw)
        return parse(data, raw), digest(data)

    sources = [(printable(name), partial(read, name)) for name in names]
    return _read_entries(format, sources, files.findings)


def _import_entries(
    store: Store, format: str, entries: list[CheckpointEntry], findings: Findings
) -> ImportResult:
    """Save the entries that are not in the store yet, session by session."""
    importing = Import(store, format, findings)
    sessions: dict[str, list[CheckpointEntry]] = {}
    for entry in entries:
        sessions.setdefault(entry.session, []).append(entry)
    for name in sorted(sessions):
        importing.save(name, partial(_with_parents, sessions[name], findings))
    return importing.result()


def _with_parents(
    entries: list[CheckpointEntry], findings: Findings, _: SessionImport
) -> tuple[list[CheckpointEntry], None]:
    """Return the entries of a session, each once and parents first, with their parents set.

    An entry that names no parent follows the entry before it in time. So does an entry whose parent
    is missing, or is its own descendant; that is reported.
    """
    unique = {(entry.id, entry.digest): entry for entry in reversed(entries)}
    ordered = sorted(unique.values(), key=lambda entry: entry.order)
    by_id = {entry.id: entry for entry in ordered}
    planned: list[CheckpointEntry] = []
    done: set[CheckpointEntry] = set()
    before: CheckpointEntry | None = None
    for entry in ordered:
        if entry in done:
            before = entry
            continue
        chain: list[CheckpointEntry] = []
        above: CheckpointEntry | None = entry
        while above is not None and above not in done:
            chain.append(above)
            done.add(above)
            above = by_id.get(above.parent_id) if above.parent_id is not None else None
        if above is None or above in chain:
            if chain[-1].parent_id is not None:
                _report_parent(chain[-1], above, before, findings)
            above = before
        for child in reversed(chain):
            child.parent, child.names_parent = above, child.parent_id is not None
            planned.append(child)
            above = child
        before = entry
    return planned, None


def _report_parent(
    entry: CheckpointEntry,
    parent: CheckpointEntry | None,
    before: CheckpointEntry | None,
    findings: Findings,
) -> None:
    why = "not in this session" if parent is None else "it descends from this checkpoint"
    instead = "the checkpoint is the first" if before is None else f"it follows {before.id!r}"
    findings.skip(f"{entry.where}: parent {entry.parent_id!r}", f"{why}; {instead}")


# -- S0: crash-safe session files ------------------------------------------------------------------
# `<root>/<session>/checkpoints/cp_<time>_<id>.json`, a symbolic link `latest.json` to one of them,
# and `*.json.backup`. A backup is used if its checkpoint is missing or damaged.
#
# `tokens_used` and `cost_estimate` count from the beginning of the session. The usage of a
# checkpoint is the increase since its parent. Only one kind of checksum is known, and verified:
# `_checksum` with `_version` "1.0" is the SHA-256 of the JSON with sorted keys and no white space.

_FOLDER = "checkpoints"
_LATEST = "latest.json"
_SHA256 = re.compile("[0-9a-f]{64}")


def import_s0(store: Store, path: str | os.PathLike[str]) -> ImportResult:
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
    entries = _read_files("s0", files, checkpoints + backups, _parse_s0)
    return _import_entries(store, "s0", entries, files.findings)


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


def _parse_s0(data: Any, raw: bytes) -> _Foreign:
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
    fields = _save_fields(
        merge_meta(it.rest(), known), trigger=("trigger", trigger), hint=("resume_hint", hint)
    )
    if pending:
        fields["pending"] = [_call_s0(n, call) for n, call in enumerate(pending)]
    return _Foreign(
        session,
        id,
        (iteration, instant(created), 0),
        state,
        fields,
        totals=("tokens_used", "cost_estimate"),
        verified=verified,
    )


def _call_s0(n: int, call: Any) -> ToolCall:
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


# -- S1: the steps of an agent, with a status ------------------------------------------------------
# `<dir>/<session>_<step>.json`, and `<session>_latest.json` with the name of one of these files.
# This pointer is only compared: the head is the highest step. A tool call is pending if it has no
# result and did not succeed.

_POINTER = "_latest.json"
_STATUS = {
    "InProgress": "in_progress",
    "Completed": "completed",
    "Failed": "failed",
    "Halted": "halted",
}
_WITH_REASON = {"Failed", "Halted"}


def import_s1(store: Store, path: str | os.PathLike[str]) -> ImportResult:
    """Import the sessions in a folder of S1. The folder is only read."""
    files = Files(path, single=False)
    names = files.select(".json", kind="checkpoint file")
    pointers = [name for name in names if name.endswith(_POINTER)]
    entries = _read_files("s1", files, [n for n in names if n not in {*pointers}], _parse_s1)
    steps: dict[str, dict[str, int]] = {}
    for entry in entries:
        steps.setdefault(entry.session, {})[entry.where] = entry.order[0]
    for name in pointers:
        _check_pointer(files, name, steps.get(printable(name).removesuffix(_POINTER), {}))
    return _import_entries(store, "s1", entries, files.findings)


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


def _parse_s1(data: Any, _: bytes) -> _Foreign:
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
    calls = [_call_s1(n, call) for n, call in enumerate(state["tool_calls"])]
    raw_status = it.take("status")
    status, reason = _status(raw_status)
    known = {"id": id, "step": step, "timestamp": timestamp, "created_at": timestamp}
    meta = merge_meta(it.rest(), known)
    if not agent:
        meta["agent_name"] = agent
    if reason == "":
        meta["status"] = raw_status
    fields = _save_fields(meta) | {"status": status}
    if reason:
        fields["reason"] = reason
    if pending := [call for call in calls if call is not None]:
        fields["pending"] = pending
    order = (step, instant(timestamp, "timestamp"), 0)
    return _Foreign(session, id, order, state, fields, agent or None)


def _call_s1(n: int, call: dict[str, Any]) -> ToolCall | None:
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


# -- S2: a session store for what-if exploration, with parents -------------------------------------
# `sessions/<session>/<id>.json`, and `index.json`. Files are found by listing the folder. The index
# is only compared, and its paths are never opened. A checkpoint names its parent if it was made
# after the user went back. Any other checkpoint follows the one before it in time.
#
# `token_count` is the size of the context at that moment, not usage, so it is only in `meta`.

_INDEX = "index.json"


def import_s2(store: Store, path: str | os.PathLike[str]) -> ImportResult:
    """Import the sessions in a folder of S2. The folder is only read."""
    files = Files(path, single=False)
    names = files.select(".json", kind="checkpoint file")
    if _INDEX in names:
        names.remove(_INDEX)
        _check_index(files, {*names})
    return _import_entries(store, "s2", _read_files("s2", files, names, _parse_s2), files.findings)


def _check_index(files: Files, names: set[str]) -> None:
    """Report files that the index lists and the folder does not have."""
    try:
        index = Document(decode(files.read(_INDEX))).rest()
    except Unsound as e:
        files.skip(_INDEX, f"{e}; the files are imported without it")
        return
    for id, data in index.items():
        where = f"{_INDEX}: {id!r}"
        try:
            path = Document(data).text("path")
        except Unsound as e:
            files.findings.skip(where, e)
            continue
        inside = files.inside(path)
        if inside is None:
            why = f"its path {path[:200]!r} leads out of the folder: not opened"
            files.findings.skip(where, why)
        elif inside not in names:
            files.findings.skip(where, f"there is no file {path[:200]!r}")


def _parse_s2(data: Any, _: bytes) -> _Foreign:
    it = Document(data)
    id, session, created = it.name("id"), it.name("session_id"), it.take("created_at")
    label = it.text("label") if it.has("label") else None
    state = {"state": it.take("state")}
    if it.has("context"):
        state["context"] = _bytes(it.items("context"))
    inner = Document(it.mapping("metadata"), "metadata")
    meta = {"id": id, "created_at": created}
    for name in ("tasks_completed", "token_count", "state_size_bytes"):
        if inner.has(name):
            meta[name] = inner.integer(name)
    if inner.has("context_compressed"):
        meta["context_compressed"] = inner.boolean("context_compressed")
    parent = inner.name("parent_checkpoint_id") if inner.has("parent_checkpoint_id") else None
    if parent is not None:
        meta["parent_checkpoint_id"] = parent
    if inner.has("extra"):
        meta["extra"] = inner.mapping("extra")
    if rest := inner.rest():
        meta["metadata"] = rest
    fields = _save_fields(merge_meta(it.rest(), meta), label=("label", label))
    if tags := _tags_in(meta.get("extra", {})):
        fields["tags"] = [*fields.get("tags", ()), *tags]
    return _Foreign(session, id, (0, instant(created), 0), state, fields, parent=parent)


def _bytes(numbers: list[Any]) -> bytes:
    if not all(type(n) is int and 0 <= n <= 255 for n in numbers):
        raise Unsound("context is not a list of bytes")
    return bytes(numbers)


# -- S3: conversations of agents, as files or in SQLite --------------------------------------------
# `<dir>/<agent>/<id>.json`, or a database with a table `checkpoints`. The checkpoints of an agent
# become a session with the agent's name. The content of a conversation is not checked.

TABLE = "checkpoints"
COLUMNS = ("id", "agent_id", "iteration", "conversation", "metadata", "created_at")


def import_s3(store: Store, path: str | os.PathLike[str]) -> ImportResult:
    """Import the agents in a folder or database of S3. It is only read."""
    if not os.path.isdir(existing(path)):
        return _import_database(store, os.fspath(path))
    files = Files(path)
    names = files.select(".json", kind="checkpoint file")
    return _import_entries(store, "s3", _read_files("s3", files, names, _parse_s3), files.findings)


def _import_database(store: Store, path: str) -> ImportResult:
    name = printable(os.path.basename(path))
    findings = Findings()
    entries: list[CheckpointEntry] = []
    database = Database(path)
    try:
        with database.opened(findings) as connection:
            table = Table(connection, TABLE, COLUMNS)
            if table.missing is None:
                entries = _read_rows(table, name, findings)
            else:
                why = f"no table {TABLE!r} of this format: {table.missing} is missing"
                findings.skip(name, why)
            database.check_unchanged()
            return _import_entries(store, "s3", entries, findings)
    except apsw.Error as e:
        database.check_unchanged()
        findings.skip(name, f"the database cannot be read: {e}")
    return _import_entries(store, "s3", [], findings)


def _read_rows(table: Table, name: str, findings: Findings) -> list[CheckpointEntry]:
    def read(rowid: int, position: int) -> tuple[_Foreign, str]:
        data = dict(zip(COLUMNS, table.row(rowid), strict=True))
        for column in ("conversation", "metadata"):
            data[column] = _json(data[column], column)
        return _parse_s3(data, b"", position), digest(data)

    sources = [
        (f"{name}: row {rowid}", partial(read, rowid, position))
        for position, rowid in enumerate(table.rowids(name, findings))
    ]
    return _read_entries("s3", sources, findings)


def _json(value: Any, column: str) -> Any:
    if column == "metadata" and value is None:
        return {}
    if type(value) not in (str, bytes):
        raise Unsound(f"{column} is no JSON")
    raw = value.encode("utf-8", "surrogatepass") if type(value) is str else value
    return decode(raw, column)


def _parse_s3(data: Any, _: bytes, position: int = 0) -> _Foreign:
    it = Document(data)
    id, agent, created = it.name("id"), it.name("agent_id"), it.take("created_at")
    iteration = it.integer("iteration")
    state = {"conversation": it.mapping("conversation")}
    known = {
        "id": id,
        "created_at": created,
        "iteration": iteration,
        "metadata": it.mapping("metadata"),
    }
    order = (iteration, instant(created), position)
    return _Foreign(agent, id, order, state, _save_fields(merge_meta(it.rest(), known)), agent)
