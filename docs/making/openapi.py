"""The OpenAPI description of the viewer's API. Its types are those of docs/json.md."""

from __future__ import annotations

import json
import re
from typing import Any

Schema = dict[str, Any]

_ROW = re.compile(r"^\| `(\w+)` \| ([^|]+?) \|(.*)\|$", re.MULTILINE)
_LINK = re.compile(r"\[([\w ]+)\]\(#[\w-]+\)")
_TIME = r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z$"
_TEXT: Schema = {"type": "string"}
_GIVEN: Schema = {"type": "string", "minLength": 1}
_ID: Schema = {"type": "string", "pattern": "^[0-9a-hjkmnp-tv-z]{24}$"}
_COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 10**15 - 1}
_STATUS: Schema = {"enum": ["in_progress", "completed", "failed", "halted"]}
_FOLDED = {"reason", "hint", "pending", "error"}
"""Texts of agents, which may be long; an answer contains only their beginning."""
_ALWAYS = ["id", "session", "seq", "damaged"]
"""The fields that a damaged checkpoint has."""
_USED = (
    "checkpoint", "log line", "usage", "call", "run", "session", "operation", "change", "hit",
    "ways", "costs", "pending", "made call", "totals", "abandoned", "budget spent", "decision",
    "answer", "error",
)  # fmt: skip

# path: (description, required parameters, optional parameters, type of the answer)
_READS: dict[str, tuple[str, str, str, str | Schema]] = {
    "about": ("The server", "", "", "about"),
    "sessions": (
        "Sessions, by name or most recently active first, one page at a time", "",
        "agent status tag label trigger text order after limit", "page of session",
    ),
    "totals": ("Tokens and cost of a session", "session", "", "totals"),
    "log": ("A session's checkpoints, newest first", "session", "before limit", "log"),
    "checkpoint": ("The fields of a checkpoint", "id", "", "checkpoint"),
    "state": ("A part of a state, with some of its entries", "id", "path start limit", "part"),
    "value": ("A value in a state, complete", "id", "path", {}),
    "messages": ("Some items of a list in a state", "id", "path start limit", "messages"),
    "changes": ("The changes that a checkpoint made", "id", "", "changes"),
    "diff": ("The differences between two checkpoints", "a b", "", "diff"),
    "way": ("A checkpoint and its ancestors", "id", "until limit", "way"),
    "blame": ("The checkpoint in which a value last changed", "id path", "", "blame"),
    "chart": ("Tokens, cost and size, step by step", "session", "id", "chart"),
    "run": ("Calls of a session's runs, and open questions", "session", "start limit", "journal"),
    "operations": ("Operations of a session, newest first", "session", "limit", "operations"),
    "undoable": ("The next effect of undo and of redo in a session", "session", "", "undoable"),
    "integrity": ("Whether a checkpoint loads, and its hashes", "id", "session seq", "integrity"),
    "search": (
        "Sessions by name, and checkpoints, newest first", "",
        "text case_sensitive session agent status trigger tag label mark meta before limit",
        "page of hit",
    ),
}  # fmt: skip
_ACTIONS: dict[str, tuple[str, str, str, str]] = {
    "fork": ("A new session from a checkpoint", "id name", "", "checkpoint"),
    "rewind": ("Move a session's head", "id", "session", "checkpoint"),
    "undo": ("Undo the last change of a session", "session", "ref", "operation"),
    "redo": ("Redo the last undone change of a session", "session", "ref", "operation"),
    "tag": ("Tag a checkpoint", "id tag", "", "checkpoint"),
    "label": ("Label a checkpoint", "id label", "", "checkpoint"),
    "resolve": ("Decide a call in doubt", "session key decided", "result", "decision"),
    "answer": ("Answer a question of a run", "session name answer", "", "answer"),
}
_REFUSALS = {
    "400": "Invalid request", "401": "Token missing or wrong", "403": "Not allowed",
    "404": "Not found", "409": "Conflict", "500": "Stored data is damaged",
    "503": "The store is unavailable now",
}  # fmt: skip
_NUMBERS = {"limit", "start", "seq"}
_VALUES = {"result", "answer"}


def text(page: str, version: str) -> str:
    """Return the description. `page` is the text of docs/json.md."""
    described: Schema = {
        "openapi": "3.1.0",
        "info": {"title": "holdfast", "version": version, "license": {"name": "Apache-2.0"}},
        "servers": [{"url": "."}],
        "security": [{"token": []}, {"cookie": []}],
        "paths": {
            **{f"/api/{name}": {"get": _get(name, *row)} for name, row in _READS.items()},
            "/api/events": {"get": _events()},
            **{f"/api/{name}": {"post": _post(name, *row)} for name, row in _ACTIONS.items()},
        },
        "components": {
            "schemas": _shapes(page) | _answers(),
            "responses": {
                code: {
                    "description": why,
                    "content": {"application/json": {"schema": _ref("error")}},
                }
                for code, why in _REFUSALS.items()
            },
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer"},
                "cookie": {"type": "apiKey", "in": "cookie", "name": "holdfast-7460"},
            },
        },
    }
    return json.dumps(described, indent=1, ensure_ascii=False) + "\n"


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name.replace(' ', '_')}"}


def _list(of: Schema) -> Schema:
    return {"type": "array", "items": of}


def _maybe(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": [*properties]}


def _shapes(page: str) -> Schema:
    found: Schema = {}
    rows: dict[str, Schema] = {}
    for part in page.split("\n### ")[1:]:
        name, _, body = part.partition("\n")
        shape = {m[1]: (m[2], "may be missing" not in m[3]) for m in _ROW.finditer(body)}
        rows[name] = (rows["checkpoint"] if name == "log line" else {}) | shape
    for name in _USED:
        needed = [key for key, (_, must) in rows[name].items() if must]
        if name in ("checkpoint", "log line"):
            needed = [key for key in needed if key in (*_ALWAYS, "is_head", "forks")]
        properties = {key: _type(key, kind) for key, (kind, _) in rows[name].items()}
        found[name.replace(" ", "_")] = {
            "type": "object", "properties": properties, "required": needed,
        }  # fmt: skip
    found["error"]["properties"]["error"] = _TEXT
    return found


def _type(key: str, kind: str) -> Schema:
    if key in _FOLDED:
        return {"anyOf": [_plain(kind), _ref("folded")]}
    return _plain(kind)


def _plain(kind: str) -> Schema:
    if kind.endswith(" or null"):
        return _maybe(_plain(kind.removesuffix(" or null")))
    if kind.startswith("list of "):
        return _list(_plain(kind.removeprefix("list of ")))
    if kind.startswith("map of "):
        return {"type": "object", "additionalProperties": _plain(kind.removeprefix("map of "))}
    if kind == "text":
        return _TEXT
    if kind == "time":
        return {"type": "string", "pattern": _TIME}
    if kind in ("integer", "number", "boolean"):
        return {"type": kind}
    if kind == "value":
        return {}
    link = _LINK.fullmatch(kind)
    if link is None:
        raise ValueError(f"the page has an unknown type: {kind}")
    return _ref(link[1])


def _answers() -> Schema:
    """Return the types that only the API has."""
    whole, maybe = {"type": "integer"}, _maybe(_TEXT)
    entry = {"kind": _TEXT, "size": whole, "length": _maybe(whole)}
    point = _object(id=_TEXT, step=whole, tokens=whole, cost={"type": "number"}, size=whole)
    link = _object(id=_TEXT, damaged=maybe)
    bridge = _object(id=_TEXT, step=whole, ancestor=maybe)
    known = _object(
        step=_maybe(whole), label=maybe, tags=_list(_TEXT), ancestor=maybe, child=maybe,
    )  # fmt: skip
    step = _object(problem=maybe, hint=maybe)
    return {
        "folded": _object(
            **{"$folded": _object(kind=_TEXT, length=whole, start={})},
        ),
        "about": _object(
            version=_TEXT, store=maybe, read_only={"type": "boolean"}, statuses=_list(_TEXT),
        ),
        "page_of_session": _object(
            items=_list(_ref("session")), next=maybe,
            left={
                "type": "object",
                "additionalProperties": {"enum": ["died", "in doubt", "waiting", "over budget"]},
            },
        ),
        "page_of_hit": _object(items=_list(_ref("hit")), next=maybe),
        "log": _object(
            items=_list(_ref("log line")), next=_maybe(whole), head=maybe, count=whole,
            bridges={"type": "object", "additionalProperties": bridge},
        ),
        "part": _object(**entry, start=whole, items=_list(_object(key={}, **entry))),
        "messages": _object(path=_list({}), length=whole, start=whole, items=_list({})),
        "changes": _object(**{"from": maybe}, changes=_list(_ref("change"))),
        "diff": _object(
            a=_ref("checkpoint"), b=_ref("checkpoint"), ancestor=maybe, steps=_ref("ways"),
            usage=_ref("costs"), changes=_list(_ref("change")),
        ),
        "way": _object(items=_list(_ref("checkpoint")), more={"type": "boolean"}),
        "blame": _object(checkpoint=_ref("checkpoint"), after={}),
        "chart": _object(points=_list(point)),
        "journal": _object(
            length=whole, start=whole, calls=_list(_ref("made call")),
            pending=_list(_ref("pending")), run=_maybe(_ref("abandoned")),
        ),
        "operations": _object(length=whole, items=_list(_ref("operation"))),
        "undoable": _object(session=_TEXT, undo=step, redo=step),
        "integrity": _object(
            checkpoint=_ref("checkpoint"), problem=maybe, known=_maybe(known), chain=_list(link),
        ),
    }  # fmt: skip


def _parameter(endpoint: str, name: str) -> Schema:
    if name in _NUMBERS or (endpoint, name) == ("log", "before"):
        return _COUNT
    if name == "before":
        return _ID
    if name == "meta":
        return {"type": "string", "pattern": "^.+=.*$"}
    if name == "order":
        return {"enum": ["name", "active"]}
    return _STATUS if name == "status" else _GIVEN


def _get(name: str, summary: str, needed: str, more: str, answer: str | Schema) -> Schema:
    parameters = [
        {"name": n, "in": "query", "required": n in needed.split(), "schema": _parameter(name, n)}
        for n in (*needed.split(), *more.split())
    ]
    return {
        "operationId": name,
        "summary": summary,
        "parameters": parameters,
        "responses": _responses(answer),
    }


def _post(name: str, summary: str, needed: str, more: str, answer: str) -> Schema:
    properties = {n: {} if n in _VALUES else _GIVEN for n in (*needed.split(), *more.split())}
    if name == "resolve":
        properties["decided"] = {"enum": ["result", "rerun", "skip"]}
    body = {"type": "object", "properties": properties, "required": needed.split()}
    return {
        "operationId": name,
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": _responses(answer),
    }


def _events() -> Schema:
    return {
        "operationId": "events",
        "summary": "Checkpoints and operations as they are saved, as server-sent events",
        "parameters": [
            {"name": "session", "in": "query", "required": False, "schema": _GIVEN},
        ],
        "responses": {"200": {"description": "Events", "content": {"text/event-stream": {}}}},
    }


def _responses(answer: str | Schema) -> Schema:
    schema = _ref(answer) if isinstance(answer, str) else answer
    return {
        "200": {"description": "Done", "content": {"application/json": {"schema": schema}}},
        **{code: {"$ref": f"#/components/responses/{code}"} for code in _REFUSALS},
    }
