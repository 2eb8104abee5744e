"""Transcripts of Claude Code: `<project>/<session>.jsonl`, one line for each block of a message.

Each line names its parent line. These parents form a tree even if the user never went back: the
results of parallel calls have the same ancestor, and lines about progress branch off from messages.
Only two things are real branches: a request after an earlier message than the last one, and a
second answer to the same message.

Lines of sub-agents (`isSidechain`) are in the same file or in other files. They become sessions
`<session>/agent-<id>`, whose parent is the session that the sub-agent worked for.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from holdfast import Store, Usage
from holdfast.importers.save import ImportResult
from holdfast.importers.transcripts.conversation import Conversation, Item, Note, Turn
from holdfast.importers.transcripts.reader import (
    Recorded,
    Transcript,
    import_lines,
    name_in,
    token_count,
)
from holdfast.importers.untrusted import Document, Files, Unsound

FORMAT = "claude-code"
_ROLES = ("user", "assistant")
_TOKENS = (
    "input_tokens",
    "cache_creation_input_tokens",
    "cache_read_input_tokens",
    "output_tokens",
)
# Copies of other lines or of files, often long. They are counted, but not kept.
_COPIES = {"progress", "file-history-snapshot", "queue-operation"}
_KNOWN = _COPIES | set(
    """
    agent-name ai-title attachment custom-title last-prompt mode permission-mode pr-link summary
    system tag
    """.split()
)
_MAX_COST = 1e12
_STRUCTURE = {"type", "uuid", "parentUuid", "isSidechain", "isMeta", "costUSD"}
"""Fields that describe a line and not its turn."""


def import_claude_code(store: Store, path: str | os.PathLike[str]) -> ImportResult:
    """Import a transcript of Claude Code, or all transcripts below a folder. They are only read."""
    return import_lines(store, FORMAT, path, _ClaudeTranscript)


def looks_like(data: Any) -> bool:
    if type(data) is not dict or type(data.get("type")) is not str:
        return False
    if data["type"] in _ROLES:
        return type(data.get("message")) is dict and "sessionId" in data
    return data["type"] in _KNOWN and not {"sessionId", "leafUuid", "messageId"}.isdisjoint(data)


@dataclass(slots=True)
class _Line:
    """A line with a message."""

    number: int
    raw: bytes
    data: dict[str, Any]
    message: dict[str, Any]
    uuid: str | None
    agent: str
    """The sub-agent, or "" for the session itself."""
    answer: str | None
    """The id of the assistant's message that the line is a part of. None for the user's lines."""
    calls: list[str]
    results: list[str]

    @property
    def compacts(self) -> bool:
        return self.data.get("isCompactSummary") is True

    @property
    def is_request(self) -> bool:
        """Whether the user, or the program, says something to the assistant."""
        return self.answer is None and not self.results and not self.compacts


@dataclass(frozen=True, slots=True)
class _Position:
    """An item of a turn."""

    agent: str
    turn: Turn
    index: int


@dataclass(slots=True)
class _Steps:
    """The steps of a turn: messages of the assistant, each with the lines that follow it.

    A turn that begins with a request has a first step without such a message.
    """

    answers: list[str | None]
    """The ids of the assistant's messages, by step."""
    starts: list[int] = field(default_factory=list)
    """The index of the first item, by step."""
    of_items: list[int] = field(default_factory=list)
    """The step, by item."""
    open_calls: set[str] = field(default_factory=set)
    """Tool calls without a result."""

    def add_item(self, step: int) -> None:
        if step == len(self.starts):
            self.starts.append(len(self.of_items))
        self.of_items.append(step)

    def is_last(self, step: int) -> bool:
        return step + 1 == len(self.answers)

    def end(self, step: int) -> int:
        """Return the number of items up to the end of a step."""
        last = step + 1 == len(self.starts)
        return len(self.of_items) if last else self.starts[step + 1]

    def end_after(self, index: int) -> int:
        """Return the number of items up to an item, with its whole answer and the results."""
        step = self.of_items[index]
        if self.answers[step] is None:
            return index + 1
        return max(index + 1, self.end(step))  # a result may come after the next answer


class _ClaudeTranscript(Transcript):
    def __init__(self, files: Files, name: str) -> None:
        super().__init__(files, name)
        self._conversations: dict[str, Conversation] = {}
        """By sub-agent; "" is the session itself."""
        self._last: dict[str, _Position] = {}
        """The last message, by sub-agent."""
        self._positions: dict[str, _Position | None] = {}
        """By uuid: the message of a line, or before a line without one. None at the beginning."""
        self._messages: dict[str, Any] = {}
        """By uuid."""
        self._steps: dict[Turn, _Steps] = {}
        self._calls: dict[str, _Position] = {}
        """The message with a tool call, by the id of the call."""
        self._counted: dict[str, tuple[list[int], float]] = {}
        """The tokens and the cost that were counted, by message of the assistant."""
        self._session: dict[bool, str] = {}
        """The last session that was named: True for lines of sub-agents, False for others."""

    def conversations(self) -> list[Recorded]:
        filled = {agent: each for agent, each in self._conversations.items() if each.turns}
        if not filled:
            raise Unsound("there is no message in it")
        session = self._session.get(False) or self._session.get(True)
        if session is None:
            raise Unsound("no line names a session")
        return [
            Recorded(f"{session}/agent-{agent}", conversation, session)
            if agent
            else Recorded(session, conversation)
            for agent, conversation in filled.items()
        ]

    def read(self, number: int, raw: bytes, data: Any) -> None:
        it = Document(data)
        kind = it.text("type")
        uuid = name_in(data, "uuid")
        of_agent = data.get("isSidechain") is True
        if session := name_in(data, "sessionId"):
            self._session[of_agent] = session
        agent = self._agent(data) if of_agent else ""
        if kind not in _ROLES:
            self._note(number, raw, data, kind, agent)
            return
        message = _message(it, kind)
        if uuid is not None and uuid in self._messages:
            if self._messages[uuid] != message:
                raise Unsound(f"another line has the uuid {uuid!r}, too")
            return  # written twice
        answer, calls, results = None, [], []
        if kind == "assistant":
            answer = name_in(message, "id") or uuid or f"line {number}"
            calls = _ids(message, "tool_use", "id")
        else:
            results = _ids(message, "tool_result", "tool_use_id")
        self._add(_Line(number, raw, data, message, uuid, agent, answer, calls, results))

    def _agent(self, data: dict[str, Any]) -> str:
        """Return the sub-agent of a line. In old versions, its first line is its name."""
        if agent := name_in(data, "agentId"):
            return agent
        parent = self._positions.get(name_in(data, "parentUuid") or "")
        if parent is not None and parent.agent:
            return parent.agent
        return name_in(data, "uuid") or "unknown"

    def _conversation(self, agent: str) -> Conversation:
        if agent not in self._conversations:
            self._conversations[agent] = self.new_conversation()
        return self._conversations[agent]

    def _note(self, number: int, raw: bytes, data: dict[str, Any], kind: str, agent: str) -> None:
        """Read a line without a message. Other lines may name it as their parent."""
        uuid = name_in(data, "uuid")
        if uuid is not None and uuid not in self._positions:
            parents = [name_in(data, "parentUuid"), name_in(data, "logicalParentUuid")]
            known = [self._positions[name] for name in parents if name in self._positions and name]
            self._positions[uuid] = known[0] if known else self._last.get(agent)
        if kind not in _KNOWN:
            self.unknown[kind] += 1
        kept = None if kind in _COPIES else data
        self._conversation(agent).note(Note(number, kind, kept, len(raw)))
        compaction = data.get("compactMetadata")
        if type(compaction) is dict and compaction.get("preservedSegment"):
            self.skip(number, "it keeps a part of the history: only the summary is imported")

    # -- messages --------------------------------------------------------------------------------

    def _add(self, line: _Line) -> None:
        conversation = self._conversation(line.agent)
        turn, step = self._place(conversation, line, self._parent(line))
        digest = turn.next_digest(line.raw)
        facts = _facts(line)
        id = line.uuid or digest[:32]
        conversation.add(turn, Item(line.number, id, digest, line.message, facts, line.answer))
        steps = self._steps[turn]
        steps.add_item(step)
        steps.open_calls |= {*line.calls}
        steps.open_calls -= {*line.results}
        position = _Position(line.agent, turn, len(turn.items) - 1)
        is_late = not steps.is_last(step) or turn is not conversation.current
        if not (line.results and is_late):
            self._last[line.agent] = position
            conversation.current = turn
        if line.uuid is not None:
            self._positions[line.uuid], self._messages[line.uuid] = position, line.message
        self._calls |= dict.fromkeys(line.calls, position)
        if line.answer is not None:
            self._count_usage(line, line.answer, conversation)

    def _parent(self, line: _Line) -> _Position | None:
        """Return the message before a line; None at the beginning of the conversation.

        If the parent of the line is unknown, the line follows the call that it answers, or else the
        line before it in the file.
        """
        last = self._last.get(line.agent)
        named = line.data.get("parentUuid")
        call = self._answered_call(line)
        if type(named) is str and named in self._positions:
            position = self._positions[named]
            if position is None:
                return None if line.is_request else call or last
            if position.agent == line.agent:
                return call if call is not None and call.turn is position.turn else position
        elif named is None and line.is_request:
            return None
        if call is not None or last is None:
            return call
        what = "it names no parent" if named is None else "its parent is unknown"
        self.skip(line.number, f"{what}: it follows the line before it")
        return last

    def _answered_call(self, line: _Line) -> _Position | None:
        """Return the message with the call that a line is the first result of."""
        for call in line.results:
            position = self._calls.get(call)
            if position is not None and position.agent == line.agent:
                return position if call in self._steps[position.turn].open_calls else None
        return None

    def _place(
        self, conversation: Conversation, line: _Line, parent: _Position | None
    ) -> tuple[Turn, int]:
        """Return the turn that a line belongs to, and the step. It may begin a new turn."""
        if parent is None:
            return self._begin(conversation, line, None, 0)
        turn, steps = parent.turn, self._steps[parent.turn]
        step, end = steps.of_items[parent.index], steps.end_after(parent.index)
        if self._begins_turn(parent, line):
            return self._begin(conversation, line, turn, end)
        if line.answer is None:
            return turn, step
        if line.answer != steps.answers[step]:
            step += 1
        if step == len(steps.answers):
            steps.answers.append(line.answer)
        elif line.answer != steps.answers[-1] or not steps.is_last(step):
            return self._begin(conversation, line, turn, end)  # a second answer to a message
        elif turn.last_branch > steps.starts[step]:
            return self._begin(conversation, line, turn, end)  # a turn branched off inside it
        return turn, step

    def _begin(
        self, conversation: Conversation, line: _Line, parent: Turn | None, offset: int
    ) -> tuple[Turn, int]:
        turn = conversation.begin(parent, offset, compacts=line.compacts)
        self._steps[turn] = _Steps([line.answer])
        return turn, 0

    def _begins_turn(self, parent: _Position, line: _Line) -> bool:
        """Return whether a line after `parent` begins a turn.

        A request does so if the turn has an answer already. A message that the program adds
        (`isMeta`) may belong to the results of calls before it. A line after an earlier message
        than the last one begins a turn, too, unless it has a result that the turn waits for.
        """
        turn, steps = parent.turn, self._steps[parent.turn]
        step = steps.of_items[parent.index]
        if turn.compacts or line.compacts:
            return True
        if steps.answers[step] is None and parent.index + 1 < steps.end(step):
            return True
        if line.results and not steps.is_last(step):
            return steps.open_calls.isdisjoint(line.results)
        if not line.is_request:
            return False
        if not steps.is_last(step):
            return True
        if line.data.get("isMeta") is True:
            return turn.items[-1].group is not None and not steps.open_calls
        return steps.answers[-1] is not None

    def _count_usage(self, line: _Line, answer: str, conversation: Conversation) -> None:
        """Note what a line adds to the usage of its message. Each line has the sum so far."""
        before, paid = self._counted.get(answer, ([0] * len(_TOKENS), 0.0))
        usage, cost = line.message.get("usage"), line.data.get("costUSD", 0.0)
        try:
            if usage is not None and type(usage) is not dict:
                raise Unsound("usage is not an object")
            if type(cost) not in (int, float) or not 0 <= cost < _MAX_COST:
                raise Unsound("costUSD is no sum of money")
            counts = [token_count(usage or {}, name) for name in _TOKENS]
        except Unsound as e:
            self.skip(line.number, f"its usage is not counted: {e}")
            return
        most = [max(pair) for pair in zip(before, counts, strict=True)]
        more = [a - b for a, b in zip(most, before, strict=True)]
        extra = max(float(cost) - paid, 0.0)
        self._counted[answer] = most, paid + extra
        if any(more) or extra:
            spent = dict(zip(_TOKENS, more, strict=True))
            usage = Usage.of(spent, cost=extra, model=name_in(line.message, "model"))
            conversation.note(Note(line.number, spent=spent, usage=usage))


def _facts(line: _Line) -> dict[str, Any]:
    """Return the single values of a line, which are small enough for the `meta` of its turn."""
    facts = {
        name: value
        for name, value in line.data.items()
        if name not in _STRUCTURE and type(value) in (str, int, float, bool)
    }
    if type(line.message.get("model")) is str:
        facts["model"] = line.message["model"]
    return facts


def _message(it: Document, kind: str) -> dict[str, Any]:
    """Return the message of a line. Raises Unsound if no model could read it."""
    message = it.mapping("message")
    inner = Document(message, "message")
    if inner.text("role") != kind:
        raise Unsound(f"message.role is not {kind!r}")
    content = inner.take("content")
    if type(content) is list:
        if not all(type(block) is dict and type(block.get("type")) is str for block in content):
            raise Unsound("message.content has an item that is not a block")
    elif type(content) is not str:
        raise Unsound("message.content is neither a text nor a list")
    return message


def _ids(message: dict[str, Any], kind: str, name: str) -> list[str]:
    """Return the ids of the blocks of one type."""
    content = message["content"]
    if type(content) is str:
        return []
    ids = [block.get(name) for block in content if block["type"] == kind]
    return [id for id in ids if type(id) is str]
