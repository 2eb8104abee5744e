"""Conversations in the shapes of OpenAI's two APIs and Anthropic's: which call belongs to which
result, which has none, and where a history may be cut.

Nothing here raises for what is in a message: what has none of these shapes is left as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.model import ToolCall
from holdfast.runs.calls import name_and_arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Message = dict[str, Any]

MARK = "[holdfast] interrupted: no result of this call was recorded"
"""What a result says that was made up, so that a conversation can go on."""

PLACES = (
    ("messages",), ("history",), ("conversation",), ("items",), ("input",), ("entries",),
    ("data", "messages"),
)  # fmt: skip
"""Where in a state a conversation lies, the most usual place first: also as adapters store it."""

_ROLES = {"system", "developer", "user", "assistant", "tool", "function"}

_BLANK = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR42mNgAAAAAg"
    "AB5Sfe/AAAAABJRU5ErkJggg=="
)
"""A black pixel."""

_MADE_UP: dict[str, Callable[[str], Message]] = {
    "chat": lambda call: {"role": "tool", "tool_call_id": call, "content": MARK},
    "anthropic": lambda call: {
        "type": "tool_result", "tool_use_id": call, "content": MARK, "is_error": True,
    },
    "function_call": lambda call: {"type": "function_call_output", "call_id": call, "output": MARK},
    "custom_tool_call": lambda call: {
        "type": "custom_tool_call_output", "call_id": call, "output": MARK,
    },
    "local_shell_call": lambda call: {
        "type": "local_shell_call_output", "id": call, "output": MARK,
    },
    "shell_call": lambda call: {
        "type": "shell_call_output", "call_id": call,
        "output": [{"stdout": "", "stderr": MARK, "outcome": {"type": "timeout"}}],
    },
    "apply_patch_call": lambda call: {
        "type": "apply_patch_call_output", "call_id": call, "status": "failed", "output": MARK,
    },
    # Only an image is taken here, so that its status is all that can tell.
    "computer_call": lambda call: {
        "type": "computer_call_output", "call_id": call, "status": "incomplete",
        "output": {"type": "computer_screenshot", "image_url": _BLANK},
    },
}  # fmt: skip
"""By the kind of call, a result for one that has none. Other kinds are not ours to answer."""


class Link(NamedTuple):
    """A call of a conversation, and the places of it and of its result."""

    id: str
    at: int
    result: int | None
    kind: str
    """chat, anthropic, or the type of the item of OpenAI's Responses"""
    raw: Message
    """The call as it was written."""

    @property
    def call(self) -> ToolCall:
        name, arguments = name_and_arguments(self.raw)
        return ToolCall(self.id, name or "unknown", arguments)


def is_conversation(value: Any) -> bool:
    """Whether a list looks like messages, all of it."""
    if type(value) is not list or not all(_kind(e) or type(_role(e)) is str for e in value):
        return False
    return any(type(_role(each)) is str and _role(each) in _ROLES for each in value)


def _kind(message: Any) -> str:
    """The type of an item of Responses; most messages have none."""
    kind = message.get("type") if type(message) is dict else None
    return kind if type(kind) is str else ""


def _role(message: Any) -> Any:
    return message.get("role") if type(message) is dict else None


def _is_call(message: Any) -> bool:
    """Whether this is an item of Responses that something is to be the output of."""
    return _kind(message).endswith("_call") or _kind(message) == "program"


def _is_result(message: Any) -> bool:
    return _kind(message).endswith("_output") or _role(message) == "tool"


def _blocks(message: Message, kind: str) -> list[Message]:
    content = message.get("content")
    if type(content) is not list:
        return []
    return [block for block in content if type(block) is dict and block.get("type") == kind]


def _calls(message: Any) -> dict[str, tuple[str, Message]]:
    """Calls that a message makes: by their ids, kinds and how they are written."""
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
    """Ids of the calls that a message answers, each once."""
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
    """All calls, each with its result if it has one.

    A result belongs to the nearest call of its id before it that has none: some models count their
    calls anew in every turn.
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
    return [link for link in links(messages) if link.result is None and link.kind in _MADE_UP]


def dangling(messages: Sequence[Message]) -> list[ToolCall]:
    """Calls without a result."""
    return [link.call for link in _missing(messages)]


# -- closing ---------------------------------------------------------------------------------------


def closed(messages: Sequence[Message]) -> tuple[list[Message], list[ToolCall]]:
    """The messages with a result, that says so, for each call that has none; and those calls.

    It goes where the API looks for it: behind the results that directly follow the call (or the
    calls made with it), with Anthropic into the user's message that follows.
    """
    missing = _missing(messages)
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
            where = blocks if link.kind == "anthropic" else out
            where.append(_made_up(link))
    out += [{"role": "user", "content": blocks}] if blocks else []
    return out, [link.call for link in missing]


def _made_up(link: Link) -> Message:
    made = _MADE_UP[link.kind](link.id)
    if link.kind not in ("chat", "anthropic") and type(link.raw.get("caller")) is dict:
        made["caller"] = link.raw["caller"]  # a program that runs at the service waits for it
    return made


def _ends(messages: Sequence[Message]) -> list[int]:
    """For each message, the last of those that follow it as calls and then as results."""
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
    """A user's message with more results: first comes what answers calls."""
    content = message["content"]
    if type(content) is str:
        content = [{"type": "text", "text": content}] if content else []
    n = 0
    while n < len(content) and _kind(content[n]) == "tool_result":
        n += 1
    return {**message, "content": [*content[:n], *blocks, *content[n:]]}


def repaired(state: Any) -> tuple[Any, list[ToolCall]]:
    """A state whose conversations, wherever they are in it, are closed; and what was missing."""
    if is_conversation(state):
        messages, calls = closed(state)
        return (messages if calls else state), calls
    found: list[ToolCall] = []
    if type(state) is dict:
        parts = {key: repaired(value) for key, value in state.items()}
        found = [call for _, calls in parts.values() for call in calls]
        return ({key: value for key, (value, _) in parts.items()}, found) if found else (state, [])
    if type(state) is list:
        several = [repaired(value) for value in state]
        found = [call for _, calls in several for call in calls]
        return ([value for value, _ in several], found) if found else (state, [])
    return state, []


# -- cutting ---------------------------------------------------------------------------------------


def units(messages: Sequence[Message]) -> list[range]:
    """Runs of messages that must stay together.

    A call, its result and all between them; and what a model gave out in one answer of Responses,
    where a call without the reasoning that led to it is refused, and the other way round.
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
    items = [_is_item(before), _is_item(message)]
    said = [_role(before) == "assistant", _role(message) == "assistant"]
    return any(items) and all(a or b for a, b in zip(items, said, strict=True))


def _is_item(message: Any) -> bool:
    """Whether this is a part of an answer that stands beside the assistant's messages."""
    return _is_call(message) or _kind(message) == "reasoning" or _kind(message).startswith("mcp_")


def newest(
    messages: Sequence[Message], limit: float, weigh: Callable[[Message], float] = lambda _: 1
) -> list[Message]:
    """The instructions at the beginning, and as many of the newest messages as fit.

    A call is never split from its result. What is left begins with a message of a user, the one
    that led to the rest, if that fits; the newest unit stays, even if that alone is too much.
    """
    lead = 0
    while lead < len(messages) and _role(messages[lead]) in ("system", "developer"):
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


def _with_question(
    rest: Sequence[Message],
    whole: list[range],
    kept: list[int],
    room: float,
    weights: dict[int, float],
    weigh: Callable[[Message], float],
) -> list[int]:
    """The units to keep, the oldest of which is a user's, if possible."""
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
    return _role(rest[unit.start]) == "user" and not _results(rest[unit.start])
