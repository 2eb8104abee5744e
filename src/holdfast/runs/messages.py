"""Tool calls and results in messages of OpenAI's two APIs and Anthropic's.

The functions match calls to results, close calls without a result, and cut a history to size.
Except for tool_call(), they never raise for the content of a message: a message of another shape
stays as it is.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.errors import InvalidRequest
from holdfast.model import ToolCall

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Message = dict[str, Any]


def tool_call(call: Any) -> ToolCall:
    """Return a ToolCall from a dict or an object in the format of OpenAI or Anthropic.

    Raises InvalidRequest if it has no id or name, or if its arguments are not valid JSON.
    """
    if isinstance(call, ToolCall):
        return call
    id = _get(call, "call_id") or _get(call, "id") or _get(call, "tool_call_id")
    name, arguments = name_and_arguments(call)
    if type(id) is not str or not id or name is None:
        raise InvalidRequest(
            f"not a tool call: {shortened(call)}",
            hint='{"id": …, "function": {"name": …, "arguments": …}}, '
            '{"id": …, "name": …, "input": …} or ToolCall(id, name, arguments)',
        )
    written = _get(_inner(call), "arguments")
    if isinstance(written, str) and not _is_json(written):
        raise InvalidRequest(
            f"the arguments of call {id!r} to {name} are no JSON: {shortened(written)}",
            hint="nothing was called; tell the model so, and let it try again",
        )
    return ToolCall(id, name, arguments)


def called(call: Any) -> ToolCall:
    """Return a ToolCall as tool_call() does, or without an id from a pair of name and arguments."""
    if type(call) is tuple and len(call) == 2 and type(call[0]) is str and call[0]:
        return ToolCall("", *call)
    return tool_call(call)


def name_and_arguments(call: Any) -> tuple[str | None, Any]:
    """Return the name (None if there is none) and the arguments of a call. Never raises.

    Arguments that are not valid JSON stay the text that the model wrote. The input of a custom tool
    is text and is not parsed.
    """
    inner = _inner(call)
    name = _get(inner, "name")
    if type(name) is not str or not name:
        kind = _get(call, "type")  # a computer_call has only its type as a name
        name = kind if type(kind) is str and kind.endswith("_call") else None
    arguments = _get(inner, "arguments")
    if isinstance(arguments, str):
        arguments = _read(arguments)
    for other in ("input", "args", "action", "actions", "operation"):
        if arguments is None:
            arguments = _get(inner, other)
    return name, {} if arguments is None else arguments


def _inner(call: Any) -> Any:
    """Return the part of a call that holds name and arguments."""
    for name in ("function", "custom"):
        if (inner := _get(call, name)) is not None:
            return inner
    return call


def _read(arguments: str) -> Any:
    """Return parsed arguments, or the text itself if it is not valid JSON."""
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
    """Return a field of a dict or an object, or None."""
    if isinstance(value, dict):
        return value.get(name)
    return getattr(value, name, None)


def shortened(value: Any) -> str:
    """Return the repr of a value, cut to 80 characters, for messages."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"


MARK = "[holdfast] interrupted: no result of this call was recorded"
"""The text of a generated result, which closes a call without a result."""
DENIED = "[holdfast] denied by a person"
"""The text of the result of a call that was denied; the person's reason may follow."""

CONVERSATION_PATHS = (
    ("messages",), ("history",), ("conversation",), ("items",), ("input",), ("entries",),
    ("data", "messages"),
)  # fmt: skip
"""Paths to conversations in states, most usual first, including those that adapters use."""

_ROLES = {"system", "developer", "user", "assistant", "tool", "function"}

_BLANK = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR42mNgAAAAAg"
    "AB5Sfe/AAAAABJRU5ErkJggg=="
)
"""A black pixel."""

_MADE_UP: dict[str, Callable[[str, str], Message]] = {
    "chat": lambda call, text: {"role": "tool", "tool_call_id": call, "content": text},
    "anthropic": lambda call, text: {
        "type": "tool_result", "tool_use_id": call, "content": text, "is_error": True,
    },
    "function_call": lambda call, text: {
        "type": "function_call_output", "call_id": call, "output": text,
    },
    "custom_tool_call": lambda call, text: {
        "type": "custom_tool_call_output", "call_id": call, "output": text,
    },
    "local_shell_call": lambda call, text: {
        "type": "local_shell_call_output", "id": call, "output": text,
    },
    "shell_call": lambda call, text: {
        "type": "shell_call_output", "call_id": call,
        "output": [{"stdout": "", "stderr": text, "outcome": {"type": "timeout"}}],
    },
    "apply_patch_call": lambda call, text: {
        "type": "apply_patch_call_output", "call_id": call, "status": "failed", "output": text,
    },
    # The API accepts only an image here, so the status alone shows that there is no result.
    "computer_call": lambda call, _: {
        "type": "computer_call_output", "call_id": call, "status": "incomplete",
        "output": {"type": "computer_screenshot", "image_url": _BLANK},
    },
}  # fmt: skip
"""By kind of call: a function that generates the missing result. The client does not answer calls
of other kinds, so they stay open."""


class Link(NamedTuple):
    """A call in a conversation, with the indexes of the messages that hold it and its result."""

    id: str
    at: int
    result: int | None
    kind: str
    """"chat", "anthropic", or the type of an item of OpenAI's Responses API."""
    raw: Message
    """The call as it is in the message."""

    @property
    def call(self) -> ToolCall:
        """The call as a ToolCall."""
        name, arguments = name_and_arguments(self.raw)
        return ToolCall(self.id, name or "unknown", arguments)


def is_conversation(value: Any) -> bool:
    """Return whether a value is a list that consists of messages only."""
    if type(value) is not list or not all(_kind(e) or type(_role(e)) is str for e in value):
        return False
    return any(type(_role(each)) is str and _role(each) in _ROLES for each in value)


def _kind(message: Any) -> str:
    """Return the type of an item of the Responses API. Most messages have none: ""."""
    kind = message.get("type") if type(message) is dict else None
    return kind if type(kind) is str else ""


def _role(message: Any) -> Any:
    return message.get("role") if type(message) is dict else None


def _is_call(message: Any) -> bool:
    """Return whether this is an item of the Responses API that expects an output."""
    return _kind(message).endswith("_call") or _kind(message) == "program"


def _is_result(message: Any) -> bool:
    return _kind(message).endswith("_output") or _role(message) == "tool"


def _blocks(message: Message, kind: str) -> list[Message]:
    content = message.get("content")
    if type(content) is not list:
        return []
    return [block for block in content if type(block) is dict and block.get("type") == kind]


def _calls(message: Any) -> dict[str, tuple[str, Message]]:
    """Return the calls in a message: kind and raw call, by id."""
    found: list[tuple[Any, str, Message]] = []
    if _is_call(message):
        found = [(message.get("call_id"), message["type"], message)]
    elif _role(message) == "assistant":
        several = message.get("tool_calls")
        found = [(b.get("id"), "anthropic", b) for b in _blocks(message, "tool_use")]
        if type(several) is list:
            found += [(call.get("id"), "chat", call) for call in several if type(call) is dict]
    return {id: (kind, raw) for id, kind, raw in found if type(id) is str and id}


def _results(message: Any) -> list[str]:
    """Return the ids of the calls that a message answers, each once."""
    found: list[Any] = []
    if _kind(message).endswith("_output"):
        found = [message.get("call_id")]
        if found == [None] and message["type"] == "local_shell_call_output":
            found = [message.get("id")]
    elif _role(message) == "tool":
        found = [message.get("tool_call_id")]
    elif _role(message) == "user":
        found = [block.get("tool_use_id") for block in _blocks(message, "tool_result")]
    return list(dict.fromkeys(id for id in found if type(id) is str and id))


def links(messages: Sequence[Message]) -> list[Link]:
    """Return all calls, each with its result if it has one.

    A result belongs to the nearest earlier call of its id that has no result yet, because some
    models number their calls from the start in every turn.
    """
    out: list[Link] = []
    open_: dict[str, list[int]] = {}
    for at, message in enumerate(messages):
        for id in _results(message):
            if open_.get(id):
                n = open_[id].pop()
                out[n] = out[n]._replace(result=at)
        for id, (kind, raw) in _calls(message).items():
            open_.setdefault(id, []).append(len(out))
            out.append(Link(id, at, None, kind, raw))
    return out


def _missing(messages: Sequence[Message]) -> list[Link]:
    """Return the calls without a result that can be closed."""
    return [link for link in links(messages) if link.result is None and link.kind in _MADE_UP]


def dangling_calls(messages: Sequence[Message]) -> list[ToolCall]:
    """Return the calls without a result."""
    return [link.call for link in _missing(messages)]


# -- closing ---------------------------------------------------------------------------------------


def closed(
    messages: Sequence[Message], id: str | None = None, text: str = MARK
) -> tuple[list[Message], list[ToolCall]]:
    """Return the messages with a generated result for each call that has none, and these calls.

    With `id`, only the calls of this id. `text` is the text of the results.

    The result is placed where the API expects it: after the results that directly follow the call
    (or calls made with it); for Anthropic, in the user message that follows.
    """
    missing = [link for link in _missing(messages) if id in (None, link.id)]
    if not missing:
        return list(messages), []
    ends = _ends(messages)
    made: dict[int, list[Link]] = {}
    for link in missing:
        made.setdefault(link.at if link.kind == "anthropic" else ends[link.at], []).append(link)
    out: list[Message] = []
    blocks: list[Message] = []
    for at, message in enumerate(messages):
        if blocks and _role(message) == "user" and type(message.get("content")) in (str, list):
            out.append(_with_results(message, blocks))
        else:
            out += [{"role": "user", "content": blocks}] if blocks else []
            out.append(message)
        blocks = []
        for link in made.get(at, ()):
            target = blocks if link.kind == "anthropic" else out
            target.append(_made_up(link, text))
    out += [{"role": "user", "content": blocks}] if blocks else []
    return out, [link.call for link in missing]


def _made_up(link: Link, text: str) -> Message:
    """Return a generated result for a call."""
    made = _MADE_UP[link.kind](link.id, text)
    if link.kind not in ("chat", "anthropic") and type(link.raw.get("caller")) is dict:
        made["caller"] = link.raw["caller"]  # the service needs it to find the program that waits
    return made


def _ends(messages: Sequence[Message]) -> list[int]:
    """Return, for each message, the index of the last call or result that directly follows it."""
    ends = list(range(len(messages)))
    for n in reversed(ends[1:]):
        before, called = messages[n - 1], _is_call(messages[n - 1])
        if _is_call(messages[n]):
            follows = called
        else:
            calling = called or _role(before) == "assistant" or _is_result(before)
            follows = calling and _is_result(messages[n])
        if follows:
            ends[n - 1] = ends[n]
    return ends


def _with_results(message: Message, blocks: list[Message]) -> Message:
    """Return a user message with more results. They come before its other content."""
    content = message["content"]
    if type(content) is str:
        content = [{"type": "text", "text": content}] if content else []
    n = 0
    while n < len(content) and _kind(content[n]) == "tool_result":
        n += 1
    return {**message, "content": [*content[:n], *blocks, *content[n:]]}


def closed_state(state: Any, id: str | None = None, text: str = MARK) -> tuple[Any, list[ToolCall]]:
    """Return a state in which all conversations are closed, and the calls that were closed.

    Conversations are found anywhere in the state. Without open calls, the same object is returned.
    `id` and `text` are those of closed().
    """
    if is_conversation(state):
        messages, calls = closed(state, id, text)
        return (messages if calls else state), calls
    found: list[ToolCall] = []
    if type(state) is dict:
        parts = {key: closed_state(value, id, text) for key, value in state.items()}
        found = [call for _, calls in parts.values() for call in calls]
        return ({key: value for key, (value, _) in parts.items()}, found) if found else (state, [])
    if type(state) is list:
        several = [closed_state(value, id, text) for value in state]
        found = [call for _, calls in several for call in calls]
        return ([value for value, _ in several], found) if found else (state, [])
    return state, []


# -- cutting ---------------------------------------------------------------------------------------


def units(messages: Sequence[Message]) -> list[range]:
    """Return the ranges of messages that must stay together.

    A range holds a call, its result and everything between them. It also holds all items of one
    answer of the Responses API, which refuses a call without its reasoning and the reverse.
    """
    reach = [0] * len(messages)
    for link in links(messages):
        reach[link.at] = max(reach[link.at], link.result or 0)
    starts: list[int] = []
    far = -1
    for n, message in enumerate(messages):
        inside = n <= far or bool(_results(message)) or _is_one_answer(messages[n - 1], message)
        if n == 0 or not inside:
            starts.append(n)
        far = max(far, reach[n])
    return [range(a, b) for a, b in zip(starts, [*starts[1:], len(messages)], strict=False)]


def _is_one_answer(before: Any, message: Any) -> bool:
    """Return whether two neighbours are parts of one answer of the Responses API."""
    items = [_is_item(before), _is_item(message)]
    said = [_role(before) == "assistant", _role(message) == "assistant"]
    return any(items) and all(a or b for a, b in zip(items, said, strict=True))


def _is_item(message: Any) -> bool:
    """Return whether this is an item of an answer that is not an assistant message."""
    return _is_call(message) or _kind(message) == "reasoning" or _kind(message).startswith("mcp_")


def newest(
    messages: Sequence[Message], limit: float, weigh: Callable[[Message], float] = lambda _: 1
) -> list[Message]:
    """Return the instructions at the beginning, and as many of the newest messages as fit.

    A call is never separated from its result. If it fits, the rest begins with a user message: the
    one that led to the messages after it. The newest unit is always kept, even if it alone exceeds
    the limit.
    """
    lead = 0
    while lead < len(messages) and _is_instruction(messages[lead]):
        lead += 1
    rest = messages[lead:]
    whole = units(rest)
    room = limit - sum(weigh(message) for message in messages[:lead])
    first, weights = len(whole), dict[int, float]()
    for n in reversed(range(len(whole))):
        weights[n] = sum(weigh(rest[at]) for at in whole[n])
        if weights[n] > room and n < len(whole) - 1:
            break
        room -= weights[n]
        first = n
    kept = [*range(first, len(whole))]
    if first and not _is_asked(rest, whole[first]):
        kept = _with_question(rest, whole, kept, room, weights, weigh)
    return [*messages[:lead], *[rest[at] for n in kept for at in whole[n]]]


def _is_instruction(message: Message) -> bool:
    """Return whether this is a system or developer message."""
    if _role(message) not in ("system", "developer"):
        return False
    return not (_calls(message) or _results(message))


def _with_question(
    rest: Sequence[Message],
    whole: list[range],
    kept: list[int],
    room: float,
    weights: dict[int, float],
    weigh: Callable[[Message], float],
) -> list[int]:
    """Return the units to keep, starting with a user message if possible."""
    asked = [n for n in range(kept[0]) if _is_asked(rest, whole[n])][-1:]
    need = sum(weigh(rest[at]) for n in asked for at in whole[n])
    first = 0
    while asked and first < len(kept) and not _is_asked(rest, whole[kept[first]]):
        if need <= room:
            return [*asked, *kept[first:]]
        room += weights[kept[first]]
        first += 1
    later = [n for n in kept if _is_asked(rest, whole[n])]
    return [n for n in kept if n >= later[0]] if later else kept


def _is_asked(rest: Sequence[Message], unit: range) -> bool:
    """Return whether a unit starts with a user message that is not a tool result."""
    return _role(rest[unit.start]) == "user" and not _results(rest[unit.start])
