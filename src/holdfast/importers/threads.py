"""Saving the threads of transcripts: each turn once, below the turn that it went on from.

A checkpoint adds its turn's messages to those of its parent, so an import costs what the transcript
has, however long it is. A state is built as a whole only where the parent is not in the store.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Protocol

from holdfast.checkpoint import Checkpoint
from holdfast.errors import KeyTaken
from holdfast.importers.foreign import Findings, Unsound, merged
from holdfast.importers.landing import (
    DELETED,
    PROVENANCE,
    Imported,
    alone,
    deleted_sessions,
    is_from,
)
from holdfast.importers.transcripts import Files
from holdfast.model import ToolCall, Usage
from holdfast.runs.messages import dangling

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable

    from holdfast import Store
    from holdfast.importers.transcripts import Item, Note, Thread, Turn

KEPT = 64 << 10
"""Bytes of lines without a message that one checkpoint keeps. What is beyond is only counted."""
_START = "start"


@dataclasses.dataclass(eq=False, slots=True)
class Node:
    """A checkpoint to be: some items of a turn, mostly all of them."""

    turn: Turn | None
    """None for the beginning of a conversation that goes back to it."""
    start: int
    end: int
    parent: Node | None
    found: Checkpoint | None = None
    """The checkpoint, once it is known or saved."""
    covered: bool = False
    """Whether one that goes on from it was imported before."""
    key: str = ""

    @property
    def items(self) -> list[Item]:
        return [] if self.turn is None else self.turn.items[self.start : self.end]

    @property
    def id(self) -> str:
        return "" if self.turn is None else self.turn.items[self.end - 1].id

    @property
    def digest(self) -> str:
        return "" if self.turn is None else self.turn.items[self.end - 1].digest

    @property
    def grown(self) -> bool:
        """Whether it is the rest of a turn that was in the making when it was imported."""
        return self.turn is not None and self.start > 0 and self.start not in self.turn.cuts

    def pending(self) -> list[ToolCall]:
        """Calls of the turn that have no result yet."""
        if self.turn is None:
            return []
        return dangling(self.turn.messages(0 if self.grown else self.start, self.end))

    def messages(self) -> list[dict[str, Any]]:
        """The whole conversation up to here."""
        parts: list[list[dict[str, Any]]] = []
        node: Node | None = self
        while node is not None and node.turn is not None:
            parts.append(node.turn.messages(0, node.end))
            if node.turn.compacts:
                break
            while node is not None and node.start > 0:
                node = node.parent
            node = None if node is None else node.parent
        return [message for part in reversed(parts) for message in part]


class Landed:
    """The sessions of one import, as they come."""

    def __init__(self, store: Store, format: str, findings: Findings) -> None:
        self._store, self._format, self._findings = store, format, findings
        self._sessions: set[str] = set()
        self._deleted = deleted_sessions(store, format)
        self._new = self._known = 0

    def land(self, name: str, thread: Thread, parent: str | None = None) -> None:
        """Save what is new in a thread."""
        if name in self._deleted:
            self._findings.skip(f"session {name!r}", DELETED)
            return
        with alone(name, self._findings):
            given = name, parent, thread.where, self._findings
            landing = _Landing(self._store, self._format, *given)
            try:
                landing.run(thread)
            finally:
                self._new += landing.new
                self._known += landing.known
                if landing.new or landing.known:
                    self._sessions.add(name)

    def result(self) -> Imported:
        skipped = tuple(self._findings.skipped)
        return Imported(len(self._sessions), self._new, self._known, skipped, ())


class Transcript(Protocol):
    """What is known of one file, line by line."""

    def take(self, number: int, raw: bytes, data: Any) -> None:
        """One more line. Raises Unsound."""
        ...

    def land(self, landed: Landed) -> None: ...


def import_lines(
    store: Store,
    format: str,
    path: str | os.PathLike[str],
    begin: Callable[[Files, str], Transcript],
) -> Imported:
    """Import a file of lines, or those below a folder, each with a transcript of its own."""
    files = Files(path, ".jsonl")
    landed = Landed(store, format, files.findings)
    for name in files.names:
        transcript = begin(files, name)
        for number, raw, data in files.lines(name):
            try:
                transcript.take(number, raw, data)
            except Unsound as e:
                files.skip(name, number, e)
        transcript.land(landed)
    return landed.result()


class _Landing:
    """One thread on its way into the store."""

    def __init__(
        self,
        store: Store,
        format: str,
        name: str,
        parent: str | None,
        where: str,
        findings: Findings,
    ) -> None:
        self.new = self.known = 0
        self._format, self._where, self._findings = format, where, findings
        self._session = store.session(name, parent=parent)
        self._head = self._session.head if self._session.exists() else None
        self._foreign_head = self._head is not None and not is_from(format, self._head.meta)
        ours = [c for c in self._session.tree() if is_from(format, c.meta)] if self._head else []
        self._there = {checkpoint.key: checkpoint for checkpoint in ours}
        self._late: list[Note] = []
        """What came to turns that are known, since they were imported."""

    def run(self, thread: Thread) -> None:
        nodes, tip = self._plan(thread)
        _cover(nodes, tip)
        known = [node for node in nodes if node.found is not None]
        newest = max((n.found.seq for n in known if n.found is not None), default=0)
        through = max(map(_through, known), default=0)
        self.known = len(known)
        for node in known:
            self._late += [note for note in _notes(node.items) if note.number > through]
        left = [node for node in nodes if node.found is None and not node.covered]
        if left and self._foreign_head:
            name = repr(self._session.name)
            why = f"session {name} has gone on without it: its head was not imported"
            what = f"{len(left)} turns of {self._where}"
            self._findings.skip(what, f"{why}; import into another store")
            return
        for node in left:
            self._save(node)
        self._move_head(tip, newest)

    def _move_head(self, tip: Node | None, newest: int) -> None:
        """To where the conversation is, unless nothing is new and somebody has moved it since."""
        if tip is None or tip.found is None or self._head is None or tip.found == self._head:
            return
        goes_back = tip.found.seq < self._head.seq == newest
        if self.new or (goes_back and not self._foreign_head):
            self._session.rewind(tip.found.id)

    def _plan(self, thread: Thread) -> tuple[list[Node], Node | None]:
        """All checkpoints to be, parents first, and the one that the head belongs to."""
        start = Node(None, 0, 0, None) if thread.begun_anew else None
        nodes = [] if start is None else [start]
        if start is not None:
            self._look_up(start)
        ends: dict[tuple[Turn, int], Node] = {}
        for turn in thread.turns:
            parent = start if turn.parent is None else ends[turn.parent, turn.cut]
            at = 0
            for end in self._ends(turn):
                node = Node(turn, at, end, parent)
                self._look_up(node)
                nodes.append(node)
                ends[turn, end] = parent = node
                at = end
        tip = thread.tip
        return nodes, start if tip is None else ends[tip, len(tip.items)]

    def _ends(self, turn: Turn) -> list[int]:
        """Where a turn has checkpoints: at its end, where another one goes on from it, and where it
        had come to when it was imported.
        """
        ends = {*turn.cuts, len(turn.items)}
        for end in range(len(turn.items), 0, -1) if self._there else ():
            if self._known(turn.items[end - 1])[1] is not None:
                ends.add(end)
                break
        return sorted(ends)

    def _look_up(self, node: Node) -> None:
        node.key, node.found = self._known(node)

    def _known(self, it: Item | Node) -> tuple[str, Checkpoint | None]:
        """The key for a state, and the checkpoint that an import has made of it."""
        key = f"{self._format}:{it.id}" if it.id else f"{self._format} {_START}"
        found = self._there.get(key)
        if found is not None and found.meta[PROVENANCE].get("sha256") != it.digest:
            key = f"{key}:{it.digest}"  # the same id, but another history
            found = self._there.get(key)
        return key, found

    def _save(self, node: Node) -> None:
        notes = self._late + _notes(node.items)
        fields = self._fields(node, notes)
        above = node.parent
        while above is not None and above.found is None:
            above = above.parent
        try:
            node.found = self._commit(node, None if above is None else above.found, fields)
        except KeyTaken:
            why = f"the key {fields['key']!r} is taken: if it was imported and deleted since, "
            self._findings.skip(self._place(node), f"{why}undo() or gc()")
            return
        if above is not node.parent or (above is None and self._head is not None):
            after = self._head.id if above is None and self._head is not None else None
            after = above.found.id if above is not None and above.found is not None else after
            self._findings.skip(
                self._place(node), f"what came before it is not there; the turn follows {after}"
            )
        self._head = node.found
        self._late = []
        self.new += 1

    def _commit(self, node: Node, above: Checkpoint | None, fields: dict[str, Any]) -> Checkpoint:
        session, head = self._session, self._head
        exact = node.parent is not None and node.parent.found is not None
        turn = node.turn
        if turn is None or not exact or (node.grown and turn.splits(node.start)):
            aside = above is not None and head is not None and above != head
            state = {"messages": node.messages()}
            return session.save(state, parent=above if aside else None, **fields)
        if above is not None and above != head:
            session.rewind(above.id)
        messages = turn.messages(node.start, node.end)
        if turn.compacts and node.start == 0:
            return session.patch(set={"messages": messages}, **fields)
        return session.append("messages", *messages, **fields)

    def _fields(self, node: Node, notes: list[Note]) -> dict[str, Any]:
        """What is said about a turn."""
        facts: dict[str, Any] = {}
        for item in node.items:
            facts |= item.facts
        known: dict[str, Any] = {}
        if node.items and "timestamp" in node.items[0].facts:
            known["created_at"] = node.items[0].facts["timestamp"]
        spent, counted, kept = _summed(notes)
        if spent:
            known["usage"] = spent
        if counted:
            known["lines"] = counted
        if kept:
            known["other"] = kept
        through = max([item.number for item in node.items] + [n.number for n in notes], default=0)
        known[PROVENANCE] = {
            "format": self._format,
            "where": self._where,
            "sha256": node.digest,
            "through": through,
        }
        compacts = node.turn is not None and node.turn.compacts and node.start == 0
        fields: dict[str, Any] = {
            "key": node.key,
            "trigger": "compaction" if compacts else "turn" if node.turn is not None else _START,
            "meta": merged(facts, known),
        }
        usage = Usage(sum(n.tokens for n in notes), sum(n.cost for n in notes))
        if usage != Usage():
            fields["usage"] = usage
        if pending := node.pending():
            fields["pending"] = pending
        return fields

    def _place(self, node: Node) -> str:
        return f"{self._where}: line {node.items[-1].number}" if node.items else self._where


def _cover(nodes: list[Node], tip: Node | None) -> None:
    """Mark what need not be there, since it led to what is.

    A beginning has to be there, if the conversation goes back to it.
    """
    for node in reversed(nodes):
        if node.parent is not None and (node.found is not None or node.covered):
            node.parent.covered = True
    if nodes and nodes[0].turn is None:
        start = nodes[0]
        below = [n for n in nodes if n.parent is start and n.found is None and not n.covered]
        start.covered = start is not tip and not below


def _through(node: Node) -> int:
    """The line up to which the transcript was imported with a checkpoint."""
    line = None if node.found is None else node.found.meta[PROVENANCE].get("through")
    return line if type(line) is int else 0


def _notes(items: Iterable[Item]) -> list[Note]:
    return [note for item in items for note in item.notes]


def _summed(notes: list[Note]) -> tuple[dict[str, int], dict[str, int], list[Any]]:
    """Tokens by name, lines by type, and the lines that are kept."""
    spent: dict[str, int] = {}
    counted: dict[str, int] = {}
    kept: list[Any] = []
    room = KEPT
    for note in notes:
        for name, tokens in (note.spent or {}).items():
            spent[name] = spent.get(name, 0) + tokens
        if note.kind is not None:
            counted[note.kind] = counted.get(note.kind, 0) + 1
        if note.kept is not None and note.size <= room:
            kept.append(note.kept)
            room -= note.size
    return spent, counted, kept
