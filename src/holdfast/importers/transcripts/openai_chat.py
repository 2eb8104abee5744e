"""Conversations in the shape of OpenAI's chat API.

A file holds `{"messages": […]}` or the list alone. A `.jsonl` file holds one of these in each line.
The name of the session is a field beside the messages, or else the name of the file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from holdfast import Store, Usage
from holdfast.errors import InvalidRequest
from holdfast.importers.save import Import, ImportResult
from holdfast.importers.transcripts.conversation import Conversation, Item, Note
from holdfast.importers.transcripts.reader import Recorded, name_in, token_count
from holdfast.importers.untrusted import (
    Document,
    Files,
    Findings,
    Unsound,
    digest,
    line_name,
    printable,
)

FORMAT = "openai-chat"
_NAMES = ("session_id", "conversation_id", "thread_id", "id")
_ROLES = {"system", "developer", "user", "assistant", "tool", "function"}
_TOKENS = ("prompt_tokens", "completion_tokens", "total_tokens")


def import_openai_chat(store: Store, path: str | os.PathLike[str]) -> ImportResult:
    """Import a file of chat conversations, or all such files below a folder. They are only read."""
    files = Files(path)
    importing = Import(store, FORMAT, files.findings)
    for name in files.select(".json", ".jsonl", kind="transcript"):
        for where, default, data in _documents(files, name):
            try:
                _conversation(data, where, default, files.findings).save(importing)
            except Unsound as e:
                files.findings.skip(where, e)
    return importing.result()


def _documents(files: Files, name: str) -> Iterator[tuple[str, str, Any]]:
    """Yield the place, a default name for the session, and the JSON of each conversation."""
    stem = printable(os.path.splitext(name)[0])
    if name.endswith(".jsonl"):
        for number, _, data in files.lines(name):
            yield line_name(name, number), f"{stem}:{number}", data
        return
    try:
        data = files.document(name)
    except Unsound as e:
        files.skip(name, e)
    else:
        yield printable(name), stem, data


def looks_like(data: Any) -> bool:
    messages = data.get("messages") if type(data) is dict else data
    if type(messages) is not list or not messages:
        return False
    return all(
        type(m) is dict and type(m.get("role")) is str and m["role"] in _ROLES for m in messages
    )


def _conversation(data: Any, where: str, default: str, findings: Findings) -> Recorded:
    """Return the conversation in a document. Raises Unsound if there is none."""
    it = Document({"messages": data} if type(data) is list else data)
    messages = it.items("messages")
    facts = {name: value for name, value in it.rest().items() if value is not None}
    conversation = Conversation(where, lambda number: f"{where}: messages[{number - 1}]")
    answered = False
    for number, message in enumerate(messages, 1):
        try:
            role = _role(message)
        except Unsound as e:
            findings.skip(conversation.place(number), e)
            continue
        turn = conversation.current
        if turn is None or (role == "user" and answered):
            turn = conversation.begin_next()
            answered = False
        answered = answered or role not in ("user", "system", "developer")
        hashed = turn.next_digest(digest(message))
        conversation.add(turn, Item(number, hashed[:32], hashed, message, {}))
        try:
            _count_usage(conversation, number, message, name_in(facts, "model"))
        except Unsound as e:
            findings.skip(conversation.place(number), f"its usage is not counted: {e}")
    if not conversation.turns:
        raise Unsound("there is no message in it")
    conversation.turns[-1].items[-1].facts = facts
    return Recorded(name_in(facts, *_NAMES) or default, conversation)


def _role(message: Any) -> str:
    """Return the role of a message. Raises Unsound if the message has a wrong shape."""
    it = Document(message)
    role = it.name("role")
    if it.has("content"):
        content = it.take("content")
        if type(content) not in (str, list):
            raise Unsound("content is neither a text nor a list")
    if it.has("tool_calls"):
        it.items("tool_calls", dict)
    return role


def _count_usage(
    conversation: Conversation, number: int, message: dict[str, Any], model: str | None
) -> None:
    """Note the usage of a message, if the message has one. Raises Unsound."""
    usage = message.get("usage")
    if usage is None:
        return
    fields = Document(usage, "usage").rest()
    spent = {name: token_count(fields, name) for name in _TOKENS}
    if not any(spent.values()):
        return
    try:
        found = Usage.of(fields, model=name_in(message, "model") or model)
    except InvalidRequest as e:
        raise Unsound(e.message) from e
    conversation.note(Note(number, spent=spent, usage=found))
