"""Read the text, tool calls, results and files in a message, whatever framework wrote it.

The shapes are those of OpenAI's two APIs, Anthropic, Gemini, LangChain, Pydantic AI, Strands, the
Claude Agent SDK, and of all importers.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

PartKind = Literal["text", "thinking", "call", "result", "file"]

_LANGCHAIN = {
    "HumanMessage": "user", "HumanMessageChunk": "user", "AIMessage": "assistant",
    "AIMessageChunk": "assistant", "ToolMessage": "tool", "ToolMessageChunk": "tool",
    "SystemMessage": "system", "SystemMessageChunk": "system", "FunctionMessage": "tool",
}  # fmt: skip
"""Roles by class."""
_PROMPTS = {"system-prompt": "system", "user-prompt": "user"}
"""Roles by kind of part in requests of Pydantic AI."""
_ROLES = {"model": "assistant", "human": "user", "ai": "assistant"}
_TAGS = {
    "toolUse", "toolResult", "reasoningContent", "functionCall", "functionResponse", "inlineData",
    "fileData", "image", "document", "video", "text",
}  # fmt: skip
"""Strands and Gemini name the kind of a block by its only key."""
_CALLS = ("_call", "-call", "tool_use", "toolUse", "functionCall")
_RESULTS = ("_output", "_result", "tool-return", "toolResult", "functionResponse", "retry-prompt")
_THOUGHTS = ("thinking", "reasoning", "reasoningContent")
_FILES = re.compile("image|file|audio|document|video|binary|inlineData|fileData")
_ARGUMENTS = ("arguments", "input", "args", "kwargs", "action", "actions", "operation")
_CALL_IDS = ("tool_use_id", "toolUseId", "tool_call_id", "call_id", "id")
_CONTENTS = ("content", "output", "result", "response", "text", "thinking", "summary", "refusal")
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)


class MessagePart(NamedTuple):
    """A part of a message: a text, a tool call, a result, or the name of a file or an image."""

    kind: PartKind
    """The kind: "text", "thinking", "call", "result" or "file"."""
    role: str
    """The author: "user", "assistant", "system", "tool" …"""
    text: str = ""
    """The text, that of a result, or the name of a file."""
    name: str | None = None
    """The tool of a call, and of a result if the message names it."""
    arguments: Any = None
    """The arguments of a call."""
    id: str | None = None
    """The id of the call."""
    is_error: bool = False
    """Whether the result is an error."""

    def __str__(self) -> str:
        """Return one line, such as "assistant: Hello", "→ search(q='x')" or "← 3 hits"."""
        text = one_line(self.text)
        match self.kind:
            case "call":
                return f"→ {one_line(self.name or 'unknown')}({_arguments(self.arguments)})"
            case "result":
                return f"← {'error: ' * self.is_error}{text or '(empty)'}"
            case "thinking":
                return f"{self.role} thinks: {text}"
            case "file":
                return f"{self.role}: [{text}]"
        return f"{self.role}: {text}"


def printable(text: str) -> str:
    """Return text without control and bidi characters. Line ends and tabs stay."""
    return _UNPRINTABLE.sub("", text)


def one_line(text: str, width: int = 200) -> str:
    """Return text as one printable line of at most `width` characters."""
    # A long text is cut before it is searched, but far enough for a start with many spaces.
    line = " ".join(printable(text[: 4 * width].replace("\x85", " ")).split())
    if len(line) <= width and len(text) <= 4 * width:
        return line
    return line[: width - 1] + "…"


def short(value: Any, width: int = 60) -> str:
    """Return a value as one printable line, such as an argument of a call."""
    if isinstance(value, (dict, list, tuple)) and len(value) > width:
        return f"{len(value)} {'entries' if isinstance(value, dict) else 'items'}"
    return one_line(repr(value[: 4 * width] if isinstance(value, (str, bytes)) else value), width)


def _arguments(arguments: Any) -> str:
    if isinstance(arguments, dict):
        return ", ".join(f"{one_line(str(k), 40)}={short(v)}" for k, v in arguments.items())
    return "" if arguments in (None, "") else short(arguments)


def message_parts(value: Any) -> list[MessagePart]:
    """Return the parts of a message in their order. A value that is no message has none."""
    return list(_message(value))


def _message(value: Any) -> Iterator[MessagePart]:
    if not isinstance(value, dict):
        return
    role, kind = value.get("role"), _kind(value)
    if "$ext" in value:  # as the LangGraph adapter stores LangChain's messages
        of = value.get("of")
        if isinstance(of, list) and len(of) > 2 and str(of[1]) in _LANGCHAIN:
            yield from _chat(_LANGCHAIN[str(of[1])], of[2] if isinstance(of[2], dict) else {})
    elif isinstance(value.get("message"), dict):  # an entry of a transcript
        yield from _message(value["message"])
    elif isinstance(value.get("parts"), list):  # Pydantic AI and Gemini
        answers = value.get("kind") == "response" or role == "model"
        for part in value["parts"]:
            yield from _block(part, "assistant" if answers else "user")
    elif isinstance(role, str):
        yield from _chat(_ROLES.get(role, role), value)
    elif kind.endswith(_CALLS + _RESULTS) or kind in _THOUGHTS:  # of OpenAI's Responses API
        yield from _block(value, "assistant")
    elif kind in ("system", "summary", "user", "assistant") and first(value, _CONTENTS):
        yield MessagePart("text", kind, text_of(first(value, _CONTENTS)))
    elif isinstance(value.get("name"), str) and ("output" in value or "result" in value):
        yield _call(value)
        yield _result(value)


def _chat(role: str, message: dict[str, Any]) -> Iterator[MessagePart]:
    content = message.get("content")
    if role in ("tool", "function"):
        yield _result(message)
        return
    calls: list[MessagePart] = []
    for block in content if isinstance(content, list) else [content]:
        for part in _block(block, role):
            calls += [part] if part.kind == "call" else []
            yield part
    several = message.get("tool_calls")
    for call in several if isinstance(several, list) else [message.get("function_call")]:
        # LangChain lists a call of Anthropic's twice: as a block, and here.
        if isinstance(call, dict) and all(_call(call).id != known.id for known in calls):
            yield _call(call)


def _block(block: Any, role: str) -> Iterator[MessagePart]:
    """Yield the parts of a block of content, or of an item of OpenAI's Responses API."""
    if not isinstance(block, dict):
        if block not in (None, ""):
            yield MessagePart("text", role, text_of(block))
        return
    kind = _kind(block)
    inner = block[kind] if isinstance(block.get(kind), dict) else block
    if kind.endswith(_CALLS):
        yield _call(inner)
    elif kind.endswith(_RESULTS):
        # A retry without a tool's name asks the model for another answer.
        found = _result(inner)
        yield found._replace(is_error=found.is_error or kind == "retry-prompt")
    elif kind in _THOUGHTS:
        if text := text_of(first(inner, (*_CONTENTS, "reasoningText"))):
            yield MessagePart("thinking", role, text)
    elif _FILES.search(kind):
        name = first(inner, ("name", "filename", "media_type", "mime_type", "mimeType", "format"))
        yield MessagePart("file", role, name if isinstance(name, str) else kind)
    elif text := text_of(first(inner, _CONTENTS)):
        yield MessagePart("text", _PROMPTS.get(kind, role), text)


def _kind(block: dict[str, Any]) -> str:
    for name in ("part_kind", "type"):
        if isinstance(block.get(name), str):
            return str(block[name])
    return next((key for key in block if key in _TAGS), "")


def first(value: dict[str, Any], names: Iterable[str]) -> Any:
    """Return the first of these fields that is not None; None if there is none."""
    return next((value[name] for name in names if value.get(name) is not None), None)


def _call(call: dict[str, Any]) -> MessagePart:
    inner = first(call, ("function", "custom"))
    inner = inner if isinstance(inner, dict) else call
    name = first(inner, ("name", "tool_name", "tool")) or _kind(call)
    arguments = first(inner, _ARGUMENTS)
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments or "{}")
    id = first(call, ("call_id", "id", "toolUseId", "tool_call_id"))
    return MessagePart("call", "assistant", "", str(name), arguments, _text(id))


def _result(result: dict[str, Any]) -> MessagePart:
    name, id = first(result, ("name", "tool_name")), first(result, _CALL_IDS)
    failed = result.get("is_error") is True or result.get("status") in ("error", "failed")
    text = text_of(first(result, _CONTENTS))
    return MessagePart("result", "tool", text, _text(name), None, _text(id), is_error=failed)


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def text_of(content: Any) -> str:
    """Return the text of a message's content. Other data is written as JSON."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        return "\n".join(filter(None, map(text_of, content)))
    if isinstance(content, dict):
        inner = first(content, ("text", "content", "json", "output"))
        if inner is not None:
            return text_of(inner)
        if (kind := _kind(content)) and _FILES.search(kind):
            return f"[{kind}]"
    try:
        return json.dumps(content, ensure_ascii=False, default=repr)
    except (ValueError, TypeError, RecursionError):
        return repr(content)
