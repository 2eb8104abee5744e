"""Transcripts of Claude Code: `<project>/<session>.jsonl`, one line for each block of a message.

Lines name their parents. That makes a tree even where nothing branched: results of calls that were
made at once hang beside each other, and lines about progress beside those they tell of. So only
these are branches: something said after an earlier message than the last one, and a second answer
to the same message.

Lines of sub-agents (`isSidechain`), in the same file or in one of their own, become sessions of
their own, `<session>/agent-<id>`, whose parent is the session they worked for.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from holdfast.importers.foreign import Document, Unsound, shown
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
    scalars,
)

if TYPE_CHECKING:
    from holdfast import Store

FORMAT = "claude-code"
_SPEAKERS = ("user", "assistant")
_TOKENS = (
    "input_tokens",
    "cache_creation_input_tokens",
    "cache_read_input_tokens",
    "output_tokens",
)
# Copies of what other lines say, or of files; often long. They are counted, and not kept.
_COPIES = {"progress", "file-history-snapshot", "queue-operation"}
_KNOWN = _COPIES | {
    "agent-name",
    "ai-title",
    "attachment",
    "custom-title",
    "last-prompt",
    "mode",
    "permission-mode",
    "pr-link",
    "summary",
    "system",
    "tag",
}
_RICHES = 1e12
_STRUCTURE = ("type", "uuid", "parentUuid", "isSidechain", "isMeta", "costUSD")


def import_claude_code(store: Store, path: str | os.PathLike[str]) -> Imported:
    """Import a transcript of Claude Code, or those below a folder. Nothing in it is changed."""
    return import_lines(store, FORMAT, path, _Transcript)


def looks_like(data: Any) -> bool:
    if type(data) is not dict or type(data.get("type")) is not str:
        return False
    if data["type"] in _SPEAKERS:
        return type(data.get("message")) is dict and "sessionId" in data
    return data["type"] in _KNOWN and not {"sessionId", "leafUuid", "messageId"}.isdisjoint(data)


@dataclass(slots=True)
class _Steps:
    """A turn as a series of answers: which one each item belongs to."""

    answers: list[str | None]
    """Ids of the messages. The first is None if the turn begins with what a user said."""
    of: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    """The first item of each."""
    open: set[str] = field(default_factory=set)
    """Calls without a result."""

    def place(self, step: int) -> None:
        """One more item."""
        if step == len(self.starts):
            self.starts.append(len(self.of))
        self.of.append(step)

    def end_of(self, step: int) -> int:
        """How many items there are up to the end of a step."""
        return len(self.of) if step + 1 == len(self.starts) else self.starts[step + 1]

    def end(self, spot: _Spot) -> int:
        """How many items there are up to a message: with all of an answer, and its results."""
        step = self.of[spot.at]
        if self.answers[step] is None:
            return spot.at + 1
        return max(spot.at + 1, self.end_of(step))  # a result may come late


@dataclass(frozen=True, slots=True)
class _Spot:
    """A message in a thread."""

    thread: str
    turn: Turn
    at: int


@dataclass(slots=True)
class _Line:
    """A line that says something."""

    number: int
    raw: bytes
    data: dict[str, Any]
    message: dict[str, Any]
    uuid: str | None
    thread: str
    group: str | None
    """The id of the assistant's message that it is a part of."""
    calls: list[str]
    results: list[str]

    @property
    def compacts(self) -> bool:
        return self.data.get("isCompactSummary") is True

    @property
    def asks(self) -> bool:
        """Whether a user, or the program, says something to the assistant."""
        return self.group is None and not self.results and not self.compacts


class _Transcript:
    """One file, line by line."""

    def __init__(self, files: Files, name: str) -> None:
        self._files, self._name = files, name
        self._threads: dict[str, Thread] = {}
        """By sub-agents; that of the session itself has no name."""
        self._tips: dict[str, _Spot] = {}
        self._spots: dict[str, _Spot | None] = {}
        """By uuid: the message that a line is, or comes after. None is the beginning."""
        self._said: dict[str, Any] = {}
        """Messages by uuid."""
        self._steps: dict[Turn, _Steps] = {}
        self._calls: dict[str, _Spot] = {}
        self._spent: dict[str, tuple[list[int], float]] = {}
        self._session: dict[bool, str] = {}
        """The session last named, by sub-agents' lines and by others."""
        self._unknown: dict[str, int] = {}

    def land(self, landed: Landed) -> None:
        for kind, times in self._unknown.items():
            why = f"{times} lines of an unknown type {kind[:80]!r}: they are in `meta` alone"
            self._files.findings.skip(shown(self._name), why)
        session = self._session.get(False) or self._session.get(True)
        if not any(thread.turns for thread in self._threads.values()):
            self._files.findings.skip(shown(self._name), "there is no message in it")
        elif session is None:
            self._files.findings.skip(shown(self._name), "no line of it names a session")
        else:
            for id, thread in self._threads.items():
                if thread.turns and id:
                    landed.land(f"{session}/agent-{id}", thread, session)
                elif thread.turns:
                    landed.land(session, thread)

    def take(self, number: int, raw: bytes, data: Any) -> None:
        """One more line. Raises Unsound."""
        it = Document(data)
        kind = it.text("type")
        uuid = name_in(data, "uuid")
        aside = data.get("isSidechain") is True
        if session := name_in(data, "sessionId"):
            self._session[aside] = session
        thread = self._thread_of(data) if aside else ""
        if kind not in _SPEAKERS:
            self._note(number, raw, data, kind, thread)
            return
        message = _message(it, kind)
        if uuid is not None and uuid in self._said:
            if self._said[uuid] != message:
                raise Unsound(f"the uuid {uuid!r} is another line's, too")
            return  # written twice
        group = None
        if kind == "assistant":
            group = name_in(message, "id") or uuid or f"line {number}"
        calls = [] if group is None else _ids(message, "tool_use", "id")
        results = _ids(message, "tool_result", "tool_use_id") if group is None else []
        self._say(_Line(number, raw, data, message, uuid, thread, group, calls, results))

    def _thread_of(self, data: dict[str, Any]) -> str:
        """The sub-agent that a line is of. The first ones were named by their first line alone."""
        if agent := name_in(data, "agentId"):
            return agent
        parent = self._spots.get(name_in(data, "parentUuid") or "")
        if parent is not None and parent.thread:
            return parent.thread
        return name_in(data, "uuid") or "unknown"

    def _thread(self, id: str) -> Thread:
        if id not in self._threads:
            self._threads[id] = Thread(shown(self._name))
        return self._threads[id]

    def _note(self, number: int, raw: bytes, data: dict[str, Any], kind: str, id: str) -> None:
        """A line without a message. Others may name it as their parent."""
        uuid = name_in(data, "uuid")
        if uuid is not None and uuid not in self._spots:
            parents = [name_in(data, "parentUuid"), name_in(data, "logicalParentUuid")]
            known = [self._spots[name] for name in parents if name in self._spots and name]
            self._spots[uuid] = known[0] if known else self._tips.get(id)
        if kind not in _KNOWN:
            self._unknown[kind] = self._unknown.get(kind, 0) + 1
        self._thread(id).note(Note(number, kind, None if kind in _COPIES else data, len(raw)))
        told = data.get("compactMetadata")
        if type(told) is dict and told.get("preservedSegment"):
            why = "it keeps a part of the history, which is not followed: only the summary is"
            self._files.skip(self._name, number, why)

    # -- messages --------------------------------------------------------------------------------

    def _say(self, line: _Line) -> None:
        thread = self._thread(line.thread)
        turn, step = self._turn(thread, line, self._parent(line))
        digest = chained(turn, line.raw)
        facts = scalars(line.data, *_STRUCTURE)
        if type(line.message.get("model")) is str:
            facts["model"] = line.message["model"]
        id = line.uuid or digest[:32]
        thread.add(turn, Item(line.number, id, digest, line.message, facts, line.group))
        steps = self._steps[turn]
        steps.place(step)
        steps.open |= {*line.calls}
        steps.open -= {*line.results}
        here = _Spot(line.thread, turn, len(turn.items) - 1)
        late = step + 1 < len(steps.answers) or turn is not thread.tip
        if not (line.results and late):
            self._tips[line.thread] = here
            thread.tip = turn
        if line.uuid is not None:
            self._spots[line.uuid], self._said[line.uuid] = here, line.message
        self._calls |= dict.fromkeys(line.calls, here)
        if line.group is not None:
            self._count(line, line.group, thread)

    def _parent(self, line: _Line) -> _Spot | None:
        """The message that one comes after; None at the beginning.

        Without a parent that can be followed it is that of the call it answers, or else the one
        before it in the file.
        """
        tip = self._tips.get(line.thread)
        named = line.data.get("parentUuid")
        called = self._called(line)
        if type(named) is str and named in self._spots:
            spot = self._spots[named]
            if spot is None:
                return None if line.asks else called or tip
            if spot.thread == line.thread:
                return called if called is not None and called.turn is spot.turn else spot
        elif named is None and line.asks:
            return None
        if called is not None or tip is None:
            return called
        what = "names no parent" if named is None else "names a parent that cannot be followed"
        self._files.skip(self._name, line.number, f"it {what}: it follows the line before it")
        return tip

    def _called(self, line: _Line) -> _Spot | None:
        """The call that a line is the result of, if it has none yet."""
        for call in line.results:
            spot = self._calls.get(call)
            if spot is not None and spot.thread == line.thread:
                return spot if call in self._steps[spot.turn].open else None
        return None

    def _turn(self, thread: Thread, line: _Line, spot: _Spot | None) -> tuple[Turn, int]:
        """The turn that a message belongs to, and the step in it."""
        if spot is None:
            return self._begin(thread, line, None, 0), 0
        turn, steps = spot.turn, self._steps[spot.turn]
        step, cut = steps.of[spot.at], steps.end(spot)
        if self._parts(spot, line):
            return self._begin(thread, line, turn, cut), 0
        if line.group is None:
            return turn, step
        if line.group != steps.answers[step]:
            step += 1
        if step == len(steps.answers):
            steps.answers.append(line.group)
        elif line.group != steps.answers[-1] or step + 1 < len(steps.answers):
            return self._begin(thread, line, turn, cut), 0  # a second answer to the same message
        elif turn.furthest > steps.starts[step]:
            return self._begin(thread, line, turn, cut), 0  # something else came after its parts
        return turn, step

    def _begin(self, thread: Thread, line: _Line, parent: Turn | None, cut: int) -> Turn:
        turn = thread.begin(parent, cut, compacts=line.compacts)
        self._steps[turn] = _Steps([line.group])
        return turn

    def _parts(self, spot: _Spot, line: _Line) -> bool:
        """Whether what a line says begins another turn.

        Something said to the assistant does, once there was an answer. What the program itself adds
        (`isMeta`) may belong to the results of calls before it. So does all that comes after an
        earlier message than the last one, but for a result that the turn still waits for.
        """
        turn, steps = spot.turn, self._steps[spot.turn]
        step = steps.of[spot.at]
        if turn.compacts or line.compacts:
            return True
        if steps.answers[step] is None and spot.at + 1 < steps.end_of(step):
            return True
        if line.results and step + 1 < len(steps.answers):
            return steps.open.isdisjoint(line.results)
        if not line.asks:
            return False
        if step + 1 < len(steps.answers):
            return True
        if line.data.get("isMeta") is True:
            return turn.items[-1].group is not None and not steps.open
        return steps.answers[-1] is not None

    def _count(self, line: _Line, group: str, thread: Thread) -> None:
        """Note what a line adds to what its message has cost: every line has the sum so far."""
        before, paid = self._spent.get(group, ([0] * len(_TOKENS), 0.0))
        usage, cost = line.message.get("usage"), line.data.get("costUSD", 0.0)
        try:
            if usage is not None and type(usage) is not dict:
                raise Unsound("usage is not an object")
            if type(cost) not in (int, float) or not 0 <= cost < _RICHES:
                raise Unsound("costUSD is no sum of money")
            now = [count(usage or {}, name) for name in _TOKENS]
        except Unsound as e:
            self._files.skip(self._name, line.number, f"{e}: what it cost is not counted")
            return
        most = [max(pair) for pair in zip(before, now, strict=True)]
        more = [a - b for a, b in zip(most, before, strict=True)]
        extra = max(float(cost) - paid, 0.0)
        self._spent[group] = most, paid + extra
        if any(more) or extra:
            spent = {name: n for name, n in zip(_TOKENS, more, strict=True) if n}
            thread.note(Note(line.number, cost=extra, spent=spent, tokens=sum(more)))


def _message(it: Document, kind: str) -> dict[str, Any]:
    """The message of a line, if it is one that a model could be given. Raises Unsound."""
    message = it.mapping("message")
    inner = Document(message, "message")
    if inner.text("role") != kind:
        raise Unsound(f"message.role is not {kind!r}")
    content = inner.take("content")
    if type(content) is list:
        if not all(type(block) is dict and type(block.get("type")) is str for block in content):
            raise Unsound("message.content has what is no block")
    elif type(content) is not str:
        raise Unsound("message.content is neither a text nor a list")
    return message


def _ids(message: dict[str, Any], kind: str, name: str) -> list[str]:
    """What the blocks of one kind are named by."""
    content = message["content"]
    if type(content) is str:
        return []
    found = [block.get(name) for block in content if block["type"] == kind]
    return [id for id in found if type(id) is str]
