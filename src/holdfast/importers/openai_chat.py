"""Conversations in the shape of OpenAI's chat API.

A file holds `{"messages": […]}` or the list alone, or one of these in each line of a `.jsonl` file.
A conversation is named by a field of its own, or else by its file.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from holdfast.importers.foreign import Document, Unsound, digest, shown
from holdfast.importers.landing import Imported
from holdfast.importers.threads import Landed
from holdfast.importers.transcripts import (
    Files,
    Item,
    Note,
    Thread,
    chained,
    count,
    name_in,
)

if TYPE_CHECKING:
    from holdfast import Store

FORMAT = "openai-chat"
_NAMES = ("session_id", "conversation_id", "thread_id", "id")
_ROLES = {"system", "developer", "user", "assistant", "tool", "function"}


def import_openai_chat(store: Store, path: str | os.PathLike[str]) -> Imported:
    """Import a conversation of OpenAI's chat API, or those below a folder. Nothing is changed."""
    files = Files(path, ".json", ".jsonl")
    landed = Landed(store, FORMAT, files.findings)
    for name in files.names:
        stem = shown(os.path.splitext(name)[0])
        if name.endswith(".jsonl"):
            for number, _, data in files.lines(name):
                _land(landed, files, data, f"{shown(name)}: line {number}", f"{stem}:{number}")
        else:
            try:
                data = files.document(name)
            except Unsound as e:
                files.findings.skip(shown(name), e)
                continue
            _land(landed, files, data, shown(name), stem)
    return landed.result()


def looks_like(data: Any) -> bool:
    messages = data.get("messages") if type(data) is dict else data
    if type(messages) is not list or not messages:
        return False
    return all(
        type(m) is dict and type(m.get("role")) is str and m["role"] in _ROLES for m in messages
    )


def _land(landed: Landed, files: Files, data: Any, where: str, stem: str) -> None:
    try:
        it = Document({"messages": data} if type(data) is list else data)
        messages = it.items("messages")
    except Unsound as e:
        files.findings.skip(where, e)
        return
    facts = {name: value for name, value in it.rest().items() if value is not None}
    thread = Thread(where)
    answered = False
    for n, message in enumerate(messages):
        place = f"{where}: messages[{n}]"
        try:
            role = _role(message)
        except Unsound as e:
            files.findings.skip(place, e)
            continue
        tip = thread.tip
        if tip is None or (role == "user" and answered):
            tip = thread.begin(tip, 0 if tip is None else len(tip.items))
            answered = False
        answered = answered or role not in ("user", "system", "developer")
        found = chained(tip, digest(message))
        thread.add(tip, Item(n + 1, found[:32], found, message, {}))
        try:
            _count(thread, n + 1, message)
        except Unsound as e:
            files.findings.skip(place, f"{e}: what it cost is not counted")
    if not thread.turns:
        files.findings.skip(where, "there is no message in it")
        return
    thread.turns[-1].items[-1].facts = facts
    landed.land(name_in(facts, *_NAMES) or stem, thread)


def _role(message: Any) -> str:
    """Of a message that is sound. Raises Unsound."""
    it = Document(message)
    role = it.name("role")
    if it.has("content"):
        content = it.take("content")
        if type(content) not in (str, list):
            raise Unsound("content is neither a text nor a list")
    if it.has("tool_calls"):
        it.items("tool_calls", dict)
    return role


def _count(thread: Thread, number: int, message: dict[str, Any]) -> None:
    """Note what a message has cost, where that was written down with it. Raises Unsound."""
    usage = message.get("usage")
    if usage is None:
        return
    it = Document(usage, "usage").rest()
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    spent = {name: count(it, name) for name in names}
    tokens = spent["total_tokens"] or spent["prompt_tokens"] + spent["completion_tokens"]
    if tokens:
        thread.note(Note(number, spent={k: v for k, v in spent.items() if v}, tokens=tokens))
