"""Find the conversation in a state, and return it as parts in reading order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.history.message_parts import MessagePart, message_parts

if TYPE_CHECKING:
    from collections.abc import Iterator

_DEPTH = 4
"""How deeply a conversation may be nested in a state, such as in "data.messages"."""


def conversation(state: Any) -> list[Any]:
    """Return the list of the state with the most messages; an empty one if there is none."""
    return max(_lists(state, _DEPTH), key=_messages, default=[])


def _lists(value: Any, depth: int) -> Iterator[list[Any]]:
    if isinstance(value, list) and _messages(value):
        yield value
    elif isinstance(value, dict) and depth:
        for inner in value.values():
            yield from _lists(inner, depth - 1)


def _messages(items: list[Any]) -> int:
    return sum(bool(message_parts(item)) for item in items)


def transcript(messages: list[Any]) -> list[MessagePart]:
    """Return the parts of all messages. The result of a call comes right after the call.

    A result without a name gets that of its call.
    """
    parts = [part for message in messages for part in message_parts(message)]
    out: list[MessagePart] = []
    for part in parts:
        at = _call_of(part, out) if part.kind == "result" else None
        if at is None:
            out.append(part)
        else:
            out.insert(at + 1, part._replace(name=part.name or out[at].name))
    return out


def _call_of(result: MessagePart, before: list[MessagePart]) -> int | None:
    """Return the position of the newest call with the result's id that has no result yet."""
    for at in range(len(before) - 1, -1, -1):
        if before[at].kind == "call" and before[at].id == result.id and result.id is not None:
            answered = at + 1 < len(before) and before[at + 1].kind == "result"
            return None if answered else at
    return None
