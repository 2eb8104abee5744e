"""Rollouts of Codex: `sessions/<year>/<month>/<day>/rollout-<time>-<id>.jsonl`.

A line is `{timestamp, type, payload}`. Lines of type `response_item` hold the conversation. A line
`compacted` replaces it, and the event `thread_rolled_back` takes back its last turns.

Tokens count from the beginning (`total_token_usage`), and a count is often written twice, so usage
is the increase since the count before. The rollout of a sub-agent or a fork may begin with a copy
of the rollout that it comes from. The usage in this copy is not counted again.
"""

from __future__ import annotations

import os
import re
from typing import Any

from holdfast import Store, Usage
from holdfast.importers.save import ImportResult
from holdfast.importers.transcripts.conversation import Item, Note, Turn
from holdfast.importers.transcripts.reader import (
    Recorded,
    Transcript,
    import_lines,
    name_in,
    token_count,
)
from holdfast.importers.untrusted import Document, Files, Unsound, instant, printable

FORMAT = "codex"
_LINES = {"session_meta", "turn_context", "response_item", "event_msg", "compacted"}
_ITEMS = set(
    """
    message reasoning function_call function_call_output custom_tool_call custom_tool_call_output
    local_shell_call web_search_call
    """.split()
)
# Events that repeat the content of items. They are counted, but not kept.
_COPIES = set(
    """
    agent_message agent_reasoning agent_reasoning_raw_content agent_reasoning_section_break
    context_compacted exec_command_begin exec_command_end exec_command_output_delta item_completed
    item_started mcp_tool_call_begin mcp_tool_call_end patch_apply_begin patch_apply_end
    raw_response_item task_complete task_started token_count turn_complete turn_started user_message
    web_search_begin web_search_end
    """.split()
)
# Beginnings of messages that the program writes in the role of the user.
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


def import_codex(store: Store, path: str | os.PathLike[str]) -> ImportResult:
    """Import a rollout of Codex, or all rollouts below a folder. They are only read."""
    return import_lines(store, FORMAT, path, _Rollout)


def looks_like(data: Any) -> bool:
    if type(data) is not dict:
        return False
    if "payload" in data:
        return type(data["payload"]) is dict and name_in(data, "type") in _LINES
    return data.get("record_type") == "state" or {"id", "timestamp", "instructions"} <= data.keys()


class _Rollout(Transcript):
    def __init__(self, files: Files, name: str) -> None:
        super().__init__(files, name)
        self._conversation = self.new_conversation()
        self._session: str | None = None
        self._parent: str | None = None
        self._derived = False
        """True if it comes from another session."""
        self._born: int | None = None
        """When the session began, in nanoseconds since 1970."""
        self._facts: dict[str, Any] = {}
        """Fields of the session, for its first item."""
        self._context: dict[str, Any] = {}
        """Fields of the latest `turn_context`."""
        self._turn_started = False
        """True if a turn was started that has no item yet."""
        self._requested: set[Turn] = set()
        """Turns with a message of the user."""
        self._answered: set[Turn] = set()
        self._total = [0] * len(_TOKENS)
        self._in_copy = False
        """True between a count that was copied and the next count that was not."""

    def conversations(self) -> list[Recorded]:
        if not self._conversation.turns:
            raise Unsound("there is no message in it")
        stem = os.path.splitext(os.path.basename(self._name))[0]
        return [Recorded(self._session or printable(stem), self._conversation, self._parent)]

    def read(self, number: int, raw: bytes, data: Any) -> None:
        kind, payload = _parts(data)
        if kind == "session_meta":
            self._read_meta(number, raw, data, payload)
        elif kind == "turn_context":
            self._context = {k: v for k, v in payload.items() if v is not None}
            self._conversation.note(Note(number, kind))
        elif kind == "response_item":
            self._read_item(number, raw, data.get("timestamp"), payload)
        elif kind == "compacted":
            self._read_compaction(number, raw, data.get("timestamp"), payload)
        elif kind == "event_msg":
            self._read_event(number, raw, data, payload)
        else:
            self.unknown[kind] += 1
            self._conversation.note(Note(number, kind, data, len(raw)))

    def _read_meta(
        self, number: int, raw: bytes, data: dict[str, Any], payload: dict[str, Any]
    ) -> None:
        id = name_in(payload, "id")
        if id is None:
            raise Unsound("payload.id is no name")
        if self._session is not None:  # a repetition, or that of the session it was copied from
            self._conversation.note(Note(number, "session_meta", data, len(raw)))
            return
        self._session = id
        self._facts = {k: v for k, v in payload.items() if v is not None}
        parent = _parent(payload)
        self._derived = bool(parent or name_in(payload, "parent_thread_id", "forked_from_id"))
        self._parent = None if parent == id else parent
        try:
            self._born = instant(data.get("timestamp"))
        except Unsound:
            self._born = None
        self._conversation.note(Note(number, "session_meta"))

    # -- the conversation ------------------------------------------------------------------------

    def _read_item(self, number: int, raw: bytes, time: Any, payload: dict[str, Any]) -> None:
        kind = Document(payload, "payload").name("type")
        is_request = kind == "message" and _is_request(payload)
        turn = self._conversation.current
        if (
            turn is None
            or turn.compacts
            or self._turn_started
            or (is_request and turn in self._requested | self._answered)
        ):
            turn = self._conversation.begin_next()
        self._turn_started = False
        if is_request:
            self._requested.add(turn)
        elif kind != "message" or payload.get("role") == "assistant":
            self._answered.add(turn)
        self._add(turn, number, raw, time, payload)

    def _add(self, turn: Turn, number: int, raw: bytes, time: Any, message: dict[str, Any]) -> None:
        facts = self._facts | self._context
        self._facts = {}
        if type(time) is str:
            facts["timestamp"] = time
        digest = turn.next_digest(str(number), raw, str(len(turn.items)))
        self._conversation.add(turn, Item(number, digest[:32], digest, message, facts))

    def _read_compaction(self, number: int, raw: bytes, time: Any, payload: dict[str, Any]) -> None:
        history = payload.get("replacement_history")
        if history is None:
            text = Document(payload, "payload").name("message")
            content = [{"type": "input_text", "text": text}]
            history = [{"type": "message", "role": "user", "content": content}]
            self.skip(number, "it has no replacement_history: only its summary is imported")
        elif type(history) is not list or not history:
            raise Unsound("payload.replacement_history is no list of items: it is ignored")
        for n, each in enumerate(history):
            Document(each, f"payload.replacement_history[{n}]").name("type")
        turn = self._conversation.begin_next(compacts=True)
        for each in history:
            self._add(turn, number, raw, time, each)
        message = payload.get("message")
        if type(message) is str and message:
            turn.items[-1].facts["message"] = message

    def _roll_back(self, number: int, payload: dict[str, Any]) -> None:
        """Take back the last turns with a request of the user."""
        left = Document(payload, "payload").integer("num_turns")
        turn, compacted = self._conversation.current, False
        while left and turn is not None:
            left -= turn in self._requested
            compacted = compacted or turn.compacts
            turn = turn.parent
        if compacted:
            why = "it takes back turns before a compaction: they are restored uncompacted"
            self.skip(number, why)
        if turn is None and self._conversation.turns:
            self._conversation.restarted = True
        self._conversation.current = turn
        self._turn_started = True

    # -- events ----------------------------------------------------------------------------------

    def _read_event(
        self, number: int, raw: bytes, data: dict[str, Any], payload: dict[str, Any]
    ) -> None:
        kind = Document(payload, "payload").name("type")
        if kind in ("task_started", "turn_started"):
            self._turn_started = True
        elif kind == "thread_rolled_back":
            self._roll_back(number, payload)
        elif kind == "token_count":
            self._count_usage(number, data, payload)
        kept = None if kind in _COPIES else data
        self._conversation.note(Note(number, f"event_msg.{kind}", kept, len(raw)))

    def _count_usage(self, number: int, data: dict[str, Any], payload: dict[str, Any]) -> None:
        """Note the increase since the last count."""
        info = payload.get("info")
        if info is None:
            return
        it = Document(info, "payload.info")
        total = _tokens(it.mapping("total_token_usage"))
        last = _tokens(it.mapping("last_token_usage")) if it.has("last_token_usage") else None
        before, self._total = self._total, total
        if self._is_copied(data):
            self._in_copy = True
            return
        if self._derived and last is not None and (self._in_copy or not any(before)):
            more = last  # the total may include that of the other session
        elif total[-1] < before[-1]:
            more = total  # the count restarted from zero
        else:
            more = [max(a - b, 0) for a, b in zip(total, before, strict=True)]
        self._in_copy = False
        if any(more):
            spent = dict(zip(_TOKENS, more, strict=True))
            input, cached, output, reasoning, sum_ = more
            usage = Usage(
                input, output, min(cached, input), min(reasoning, output),
                tokens=max(sum_, input + output), model=name_in(self._context, "model"),
            )  # fmt: skip
            self._conversation.note(Note(number, spent=spent, usage=usage))

    def _is_copied(self, data: dict[str, Any]) -> bool:
        """Return whether a line was copied from the session that this one comes from.

        Copies are written as soon as the session exists. Some have new times and some their old
        ones. Other lines are later, because no model answers within a second.
        """
        if not self._derived or self._born is None:
            return False
        try:
            return instant(data.get("timestamp")) < self._born + _SECOND
        except Unsound:
            return False


def _parts(data: Any) -> tuple[str, dict[str, Any]]:
    """Return the type and payload of a line. The first versions wrote items alone."""
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
    """Return the session that this one works for, if it is that of a sub-agent."""
    source = payload.get("source")
    agent = source.get("subagent") if type(source) is dict else None
    if type(agent) is dict:
        for each in (agent, *agent.values()):
            if type(each) is dict and (parent := name_in(each, "parent_thread_id")):
                return parent
    if agent is not None or payload.get("thread_source") == "subagent":
        return name_in(payload, "parent_thread_id", "forked_from_id")
    return None


def _is_request(message: dict[str, Any]) -> bool:
    """Return whether the user wrote a message, and not the program in the role of the user."""
    if message.get("role") != "user":
        return False
    content = message.get("content")
    if type(content) is list and content and type(content[0]) is dict:
        content = content[0].get("text")
    return not (type(content) is str and _CONTEXT.match(content))


def _tokens(data: dict[str, Any]) -> list[int]:
    counts = [token_count(data, name) for name in _TOKENS]
    if not counts[-1]:
        counts[-1] = counts[0] + counts[2]
    return counts
