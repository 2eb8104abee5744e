"""The optional fields of a checkpoint, and the checks that they pass before anything is written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple, TypedDict

from holdfast.errors import InvalidRequest, require_text
from holdfast.format.records import usage_fields
from holdfast.model import STATUSES, Status, ToolCall, Usage


class Fields(TypedDict, total=False):
    """The fields that save, append and patch accept for their checkpoint."""

    label: str | None
    tags: Iterable[str]
    trigger: str | None
    status: Status
    reason: str | None
    usage: Any
    """A Usage, or what Usage.of() takes: a dict, or the usage object of a provider."""
    pending: Sequence[ToolCall]
    hint: str | None
    meta: Mapping[str, Any] | None
    key: str | None


class Details(NamedTuple):
    """The checked fields of a checkpoint, in stored form."""

    extra: dict[str, Any]
    """The fields that the record contains. Label and tags are stored beside the record."""
    label: str | None = None
    tags: tuple[str, ...] = ()


_TEXTS = ("label", "trigger", "reason", "hint", "key")


def check_text(name: str, value: Any) -> str:
    if isinstance(value, Enum):
        value = value.value
    require_text(name, value)
    return str(value)


def check_tags(tags: Any) -> tuple[str, ...]:
    if isinstance(tags, str) or not isinstance(tags, Iterable):
        raise InvalidRequest(f"tags must be a list of strings, not {tags!r}")
    return tuple(sorted({check_text("a tag", t) for t in tags}))


def _listed(pending: Any) -> list[Any]:
    if isinstance(pending, Iterable) and not isinstance(pending, (str, Mapping)):
        return list(pending)
    raise InvalidRequest(f"pending must be a list of ToolCall, not {type(pending).__name__}")


def _call(call: Any) -> list[Any]:
    if not isinstance(call, ToolCall):
        raise InvalidRequest(f"pending must be a list of ToolCall, not of {type(call).__name__}")
    if not isinstance(call.meta, Mapping):
        raise InvalidRequest(f"meta must be a dict, not {type(call.meta).__name__}")
    return [call.id, call.name, call.arguments, dict(call.meta)]


def of_session(fields: Fields, agent: str | None, parent: str | None) -> Details:
    """Return the checked fields, with the session's agent and parent session added."""
    details = check(fields) if fields else Details({})
    if agent is not None:
        details.extra["agent"] = agent
    if parent is not None:
        details.extra["child_of"] = parent
    return details


def check(fields: Fields) -> Details:
    """Return the fields in stored form. Raises InvalidRequest if one is unknown or invalid."""
    unknown = set(fields) - set(Fields.__annotations__)
    if unknown:
        raise InvalidRequest(
            f"unknown field {min(unknown)!r}",
            hint=f"a checkpoint has: {', '.join(Fields.__annotations__)}",
        )
    extra: dict[str, Any] = {}
    for name in _TEXTS:
        if (value := fields.get(name)) is not None:
            extra[name] = check_text(name, value)
    label = extra.pop("label", None)
    tags = check_tags(fields.get("tags") or ())
    status = fields.get("status", "in_progress")
    if status not in STATUSES:
        raise InvalidRequest(f"unknown status {status!r}", hint=f"one of {', '.join(STATUSES)}")
    if status != "in_progress":
        extra["status"] = status
    usage = fields.get("usage")
    if usage is not None:
        extra["usage"] = usage_fields(Usage.of(usage))
    pending = fields.get("pending") or ()
    if pending:
        extra["pending"] = [_call(p) for p in _listed(pending)]
    meta = fields.get("meta")
    if meta is not None:
        if not isinstance(meta, Mapping):
            raise InvalidRequest(f"meta must be a dict, not {type(meta).__name__}")
        if meta:
            extra["meta"] = dict(meta)
    return Details(extra, label, tags)
