"""Tool calls as the frameworks write them: an id, a name and arguments."""

from __future__ import annotations

import json
from typing import Any

from holdfast.errors import InvalidRequest
from holdfast.model import ToolCall


def tool_call(call: Any) -> ToolCall:
    """A ToolCall of a dict or an object, in the shapes of OpenAI's two APIs and Anthropic's."""
    if isinstance(call, ToolCall):
        return call
    id = _get(call, "call_id") or _get(call, "id") or _get(call, "tool_call_id")
    name, arguments = name_and_arguments(call)
    if type(id) is not str or not id or name is None:
        raise InvalidRequest(
            f"not a tool call: {_short(call)}",
            hint='{"id": …, "function": {"name": …, "arguments": …}}, '
            '{"id": …, "name": …, "input": …} or ToolCall(id, name, arguments)',
        )
    written = _get(_inner(call), "arguments")
    if isinstance(written, str) and not _is_json(written):
        raise InvalidRequest(
            f"the arguments of call {id!r} to {name} are no JSON: {_short(written)}",
            hint="nothing was called; tell the model so, and let it try again",
        )
    return ToolCall(id, name, arguments)


def name_and_arguments(call: Any) -> tuple[str | None, Any]:
    """What is called, None if it does not say, and with what. Never raises.

    Arguments that are no JSON stay as the model wrote them. The text for a custom tool is not read
    as JSON.
    """
    inner = _inner(call)
    name = _get(inner, "name")
    if type(name) is not str or not name:
        kind = _get(call, "type")  # a computer_call has no other name
        name = kind if type(kind) is str and kind.endswith("_call") else None
    arguments = _get(inner, "arguments")
    if isinstance(arguments, str):
        arguments = _read(arguments)
    for other in ("input", "args", "action", "actions", "operation"):
        if arguments is None:
            arguments = _get(inner, other)
    return name, {} if arguments is None else arguments


def _inner(call: Any) -> Any:
    """Where a call says what is called."""
    for name in ("function", "custom"):
        if (inner := _get(call, name)) is not None:
            return inner
    return call


def _read(arguments: str) -> Any:
    try:
        return json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments


def _is_json(text: str) -> bool:
    try:
        json.loads(text or "{}")
    except (ValueError, RecursionError):
        return not text.strip()
    return True


def _get(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return value.get(name)
    return getattr(value, name, None)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
