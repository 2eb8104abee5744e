"""Rollouts of Codex: `sessions/<year>/<month>/<day>/rollout-<time>-<id>.jsonl`.

A line is `{timestamp, type, payload}`. The items of the conversation are in those of type
`response_item`; `compacted` replaces them, and the event `thread_rolled_back` takes turns back.

Tokens are counted from the beginning (`total_token_usage`), and the same count is often written
twice, so usage is what was added since the count before. A rollout of a sub-agent or a fork may
begin with a copy of what it comes from: what that has cost is not counted again.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from holdfast.importers.foreign import Document, Unsound, instant, shown
from holdfast.importers.landing import Imported
from holdfast.importers.threads import Landed, import_lines
from holdfast.importers.transcripts import (
    Files,
    Item,
    Note,
    Thread,
    Turn,
    chained,
    count,
    name_in,
)

if TYPE_CHECKING:
    from holdfast import Store

FORMAT = "codex"
_LINES = {"session_meta", "turn_context", "response_item", "event_msg", "compacted"}
_ITEMS = {
    "message",
    "reasoning",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "local_shell_call",
    "web_search_call",
}
# Events that say again what items say.
_COPIES = {
    "agent_message",
    "agent_reasoning",
    "agent_reasoning_raw_content",
    "agent_reasoning_section_break",
    "context_compacted",
    "exec_command_begin",
    "exec_command_end",
    "exec_command_output_delta",
    "item_completed",
    "item_started",
    "mcp_tool_call_begin",
    "mcp_tool_call_end",
    "patch_apply_begin",
    "patch_apply_end",
    "raw_response_item",
    "task_complete",
    "task_started",
    "token_count",
    "turn_complete",
    "turn_started",
    "user_message",
    "web_search_begin",
    "web_search_end",
}
# What the program says in the name of the user.
_CONTEXT = re.compile(
    r"\s*(# AGENTS\.md instructions|<(environment_context|user_instructions|INSTRUCTIONS|"
    r"turn_aborted|user_shell_command|subagent_notification|skill|context_window)>)"
)
_TOKENS = (
    "input_tokens",
    "cached_input_tokens",
    "output_tokens",
    "reasoning_output_tokens",
    "total_tokens",
)
_SECOND = 1_000_000_000


def import_codex(store: Store, path: str | os.PathLike[str]) -> Imported:
    """Import a rollout of Codex, or those below a folder. Nothing in it is changed."""
    return import_lines(store, FORMAT, path, _Rollout)


def looks_like(data: Any) -> bool:
    if type(data) is not dict:
        return False
    if "payload" in data:
        return type(data["payload"]) is dict and name_in(data, "type") in _LINES
    return data.get("record_type") == "state" or {"id", "timestamp", "instructions"} <= data.keys()


class _Rollout:
    """One file, line by line."""

    def __init__(self, files: Files, name: str) -> None:
        self._files, self._name = files, name
        self._thread = Thread(shown(name))
        self._session: str | None = None
        self._parent: str | None = None
        self._derived = False
        """Whether it comes from another session."""
        self._born: int | None = None
        self._facts: dict[str, Any] = {}
        """Of the session, for its first item."""
        self._context: dict[str, Any] = {}
        self._started = False
        """Whether a turn was started that has no item yet."""
        self._asked: set[Turn] = set()
        """Turns in which a user said something."""
        self._answered: set[Turn] = set()
        self._total = [0] * len(_TOKENS)
        self._own = True
        """False between a count that was copied and the first one that was not."""
        self._unknown: dict[str, int] = {}

    def land(self, landed: Landed) -> None:
        for kind, times in self._unknown.items():
            why = f"{times} lines of an unknown type {kind[:80]!r}: they are in `meta` alone"
            self._files.findings.skip(shown(self._name), why)
        if not self._thread.turns:
            self._files.findings.skip(shown(self._name), "there is no message in it")
            return
        stem = os.path.splitext(os.path.basename(self._name))[0]
        landed.land(self._session or shown(stem), self._thread, self._parent)

    def take(self, number: int, raw: bytes, data: Any) -> None:
        kind, payload = _opened(data)
        time = data.get("timestamp")
        if kind == "session_meta":
            self._meta(number, raw, data, payload)
        elif kind == "turn_context":
            self._context = {k: v for k, v in payload.items() if v is not None}
            self._thread.note(Note(number, kind))
        elif kind == "response_item":
            self._item(number, raw, time, payload)
        elif kind == "compacted":
            self._compacted(number, raw, time, payload)
        elif kind == "event_msg":
            self._event(number, raw, data, payload)
        else:
            self._unknown[kind] = self._unknown.get(kind, 0) + 1
            self._thread.note(Note(number, kind, data, len(raw)))

    def _meta(self, number: int, raw: bytes, data: dict[str, Any], payload: dict[str, Any]) -> None:
        id = name_in(payload, "id")
        if self._session is not None or id is None:
            if id is None:
                raise Unsound("payload.id is no name")
            # The session's own again, or that of the one it was copied from.
            self._thread.note(Note(number, "session_meta", data, len(raw)))
            return
        self._session = id
        self._facts = {k: v for k, v in payload.items() if v is not None}
        self._parent = _parent(payload)
        origins = (self._parent, name_in(payload, "parent_thread_id", "forked_from_id"))
        self._derived = any(origins)
        if self._parent == id:
            self._parent = None
        try:
            self._born = instant(data.get("timestamp"))
        except Unsound:
            self._born = None
        self._thread.note(Note(number, "session_meta"))

    # -- the conversation ------------------------------------------------------------------------

    def _item(self, number: int, raw: bytes, time: Any, payload: dict[str, Any]) -> None:
        kind = Document(payload, "payload").name("type")
        said = _is_asked(payload) if kind == "message" else False
        tip = self._thread.tip
        begins = tip is None or tip.compacts or self._started
        if said and tip is not None and not begins:
            begins = tip in self._asked or tip in self._answered
        if begins or tip is None:
            tip = self._thread.begin(tip, 0 if tip is None else len(tip.items))
        self._started = False
        if said:
            self._asked.add(tip)
        elif kind != "message" or payload.get("role") == "assistant":
            self._answered.add(tip)
        self._add(tip, number, raw, time, payload)

    def _add(self, turn: Turn, number: int, raw: bytes, time: Any, message: dict[str, Any]) -> None:
        facts = self._facts | self._context
        self._facts = {}
        if type(time) is str:
            facts["timestamp"] = time
        digest = chained(turn, str(number), raw, str(len(turn.items)))
        self._thread.add(turn, Item(number, digest[:32], digest, message, facts))

    def _compacted(self, number: int, raw: bytes, time: Any, payload: dict[str, Any]) -> None:
        history = payload.get("replacement_history")
        if history is None:
            text = Document(payload, "payload").name("message")
            content = [{"type": "input_text", "text": text}]
            history = [{"type": "message", "role": "user", "content": content}]
            why = "it does not say what the history became: its summary alone is taken"
            self._files.skip(self._name, number, why)
        elif type(history) is not list or not history:
            raise Unsound("payload.replacement_history is no list of items: it is not followed")
        for n, each in enumerate(history):
            Document(each, f"payload.replacement_history[{n}]").name("type")
        tip = self._thread.tip
        cut = 0 if tip is None else len(tip.items)
        turn = self._thread.begin(tip, cut, compacts=True)
        for each in history:
            self._add(turn, number, raw, time, each)
        message = payload.get("message")
        if type(message) is str and message:
            turn.items[-1].facts["message"] = message

    def _rolled_back(self, number: int, payload: dict[str, Any]) -> None:
        """Go back to before the last turns that a user began."""
        left = Document(payload, "payload").whole("num_turns")
        turn, compacted = self._thread.tip, False
        while left and turn is not None:
            left -= turn in self._asked
            compacted = compacted or turn.compacts
            turn = turn.parent
        if compacted:
            why = "turns are taken back that were compacted: the history is that from before"
            self._files.skip(self._name, number, why)
        if turn is None and self._thread.turns:
            self._thread.begun_anew = True
        self._thread.tip = turn
        self._started = True

    # -- events ----------------------------------------------------------------------------------

    def _event(
        self, number: int, raw: bytes, data: dict[str, Any], payload: dict[str, Any]
    ) -> None:
        kind = Document(payload, "payload").name("type")
        if kind in ("task_started", "turn_started"):
            self._started = True
        elif kind == "thread_rolled_back":
            self._rolled_back(number, payload)
        elif kind == "token_count":
            self._counted(number, data, payload)
        kept = None if kind in _COPIES else data
        self._thread.note(Note(number, f"event_msg.{kind}", kept, len(raw)))

    def _counted(self, number: int, data: dict[str, Any], payload: dict[str, Any]) -> None:
        """Note what was added to the count."""
        info = payload.get("info")
        if info is None:
            return
        it = Document(info, "payload.info")
        total = _tokens(it.mapping("total_token_usage"))
        last = _tokens(it.mapping("last_token_usage")) if it.has("last_token_usage") else None
        before, self._total = self._total, total
        if self._is_copied(data):
            self._own = False
            return
        if self._derived and last is not None and (not self._own or not any(before)):
            more = last  # the count may go on from that of the other session
        elif total[-1] < before[-1]:
            more = total  # it has begun anew
        else:
            more = [max(a - b, 0) for a, b in zip(total, before, strict=True)]
        self._own = True
        if any(more):
            spent = {name: n for name, n in zip(_TOKENS, more, strict=True) if n}
            self._thread.note(Note(number, spent=spent, tokens=more[-1]))

    def _is_copied(self, data: dict[str, Any]) -> bool:
        """Whether a line is from the session that this one comes from.

        Copies are written at once when a session is made, some with the time they had before. No
        model has answered by then.
        """
        if not self._derived or self._born is None:
            return False
        try:
            return instant(data.get("timestamp")) < self._born + _SECOND
        except Unsound:
            return False


def _opened(data: Any) -> tuple[str, dict[str, Any]]:
    """The type and payload of a line. The first rollouts had items alone. Raises Unsound."""
    it = Document(data)
    if it.has("payload"):
        return it.name("type"), it.mapping("payload")
    if "type" not in data and "record_type" not in data and name_in(data, "id"):
        return "session_meta", data
    if name_in(data, "type") in _ITEMS:
        return "response_item", data
    if it.has("record_type"):
        return f"record_type.{it.name('record_type')}", data
    return it.name("type"), data


def _parent(payload: dict[str, Any]) -> str | None:
    """The session that this one works for, if it is a sub-agent's."""
    source = payload.get("source")
    told = source.get("subagent") if type(source) is dict else None
    if type(told) is dict:
        for each in (told, *told.values()):
            if type(each) is dict and (parent := name_in(each, "parent_thread_id")):
                return parent
    if told is not None or payload.get("thread_source") == "subagent":
        return name_in(payload, "parent_thread_id", "forked_from_id")
    return None


def _is_asked(message: dict[str, Any]) -> bool:
    """Whether a user has said it, and not the program in the user's name."""
    if message.get("role") != "user":
        return False
    content = message.get("content")
    if type(content) is list and content and type(content[0]) is dict:
        content = content[0].get("text")
    return not (type(content) is str and _CONTEXT.match(content))


def _tokens(data: dict[str, Any]) -> list[int]:
    found = [count(data, name) for name in _TOKENS]
    if not found[-1]:
        found[-1] = found[0] + found[2]
    return found
