"""A conversation of a transcript: a tree of turns, and the entries that it becomes.

A turn is a request and everything that the agent did about it. Transcripts only grow at their end,
so the conversation up to a line never changes. Each line therefore has an id, and a digest of
everything before it, which are the same in every later import.

Usually a turn becomes one entry. It has several if another turn branches off inside it, or if it
was incomplete when an earlier import saved it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, NamedTuple

from holdfast import Checkpoint, Usage, dangling_calls
from holdfast.importers.save import PROVENANCE, Content, Entry, SessionImport, merge_meta

KEPT = 64 << 10
"""The most bytes of lines without a message that one checkpoint keeps. Others are only counted."""
_BEGINNING = "start"
"""The trigger of the empty checkpoint that exists if the user went back to the beginning."""


class Note(NamedTuple):
    """A line without a message, or the usage of a message. It belongs to the item before it."""

    number: int
    kind: str | None = None
    """The type of the line, if lines of this type are counted."""
    kept: Any = None
    """The line itself, if it is kept."""
    size: int = 0
    spent: dict[str, int] | None = None
    """Tokens by the names that the source has for them."""
    usage: Usage = Usage()


@dataclass(slots=True)
class Item:
    """A line with a message, or with a part of one."""

    number: int
    id: str
    digest: str
    """A hash of the conversation up to this line."""
    message: dict[str, Any]
    facts: dict[str, Any]
    """Other fields of the line, for `meta`."""
    group: str | None = None
    """Lines of the assistant with the same group are one message."""
    notes: list[Note] = field(default_factory=list)


class Turn:
    """A part of a conversation. It continues its parent after the parent's first `offset` items."""

    def __init__(
        self, parent: Turn | None = None, offset: int = 0, *, compacts: bool = False
    ) -> None:
        self.parent, self.offset = parent, offset
        self.compacts = compacts
        """True if its messages replace the messages before it."""
        self.items: list[Item] = []
        self.branches: set[int] = set()
        """The offsets at which other turns continue this one."""
        self.last_branch = 0
        if parent is not None:
            parent.branches.add(offset)
            parent.last_branch = max(parent.last_branch, offset)

    def next_digest(self, *parts: bytes | str) -> str:
        """Return the digest for the next item, which consists of these parts."""
        before = ""
        if self.items:
            before = self.items[-1].digest
        elif self.parent is not None:
            before = self.parent.items[self.offset - 1].digest
        digest = sha256(f"{before}:{self.compacts}".encode())
        for part in parts:
            digest.update(part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part)
            digest.update(b"\0")
        return digest.hexdigest()

    def messages(self, start: int, end: int) -> list[dict[str, Any]]:
        """Return the messages of some items. The blocks of one group are joined in order."""
        messages: list[dict[str, Any]] = []
        group, at = None, -1
        first: dict[str, Any] = {}
        for item in self.items[start:end]:
            if item.group is not None and item.group == group:
                # A message of several items is copied once, because the items keep their own.
                content = [*_blocks(first)] if messages[at] is first else messages[at]["content"]
                content += _blocks(item.message)
                messages[at] = messages[at] | item.message | {"content": content}
                continue
            if item.group is not None:
                group, at, first = item.group, len(messages), item.message
            messages.append(item.message)
        return messages

    def splits_message(self, at: int) -> bool:
        """Return whether the items before and after `at` have parts of the same message."""
        before = [item.group for item in self.items[:at] if item.group is not None]
        after = next((item.group for item in self.items[at:] if item.group is not None), None)
        return after is not None and before[-1:] == [after]


def _blocks(message: dict[str, Any]) -> list[Any]:
    content = message.get("content")
    if type(content) is list:
        return content
    return [{"type": "text", "text": content}] if content else []


class Conversation:
    """One conversation of a transcript. It becomes a session."""

    def __init__(self, source: str, place: Callable[[int], str]) -> None:
        self.source = source
        """The file, as findings call it."""
        self.place = place
        """Returns what findings call an item, by its number."""
        self.turns: list[Turn] = []
        self.current: Turn | None = None
        """The turn at the end of the conversation. None if the user went back to the beginning."""
        self.restarted = False
        """True if the user has gone back to the beginning at some time."""
        self._last: Item | None = None
        self._waiting: list[Note] = []

    def begin(self, parent: Turn | None, offset: int, *, compacts: bool = False) -> Turn:
        """Begin a turn after the first `offset` items of its parent."""
        if parent is None and self.turns:
            self.restarted = True
        turn = Turn(parent, offset, compacts=compacts)
        self.turns.append(turn)
        self.current = turn
        return turn

    def begin_next(self, *, compacts: bool = False) -> Turn:
        """Begin a turn at the end of the conversation."""
        offset = 0 if self.current is None else len(self.current.items)
        return self.begin(self.current, offset, compacts=compacts)

    def add(self, turn: Turn, item: Item) -> None:
        turn.items.append(item)
        item.notes += self._waiting
        self._waiting = []
        self._last = item

    def note(self, note: Note) -> None:
        """Add a note to the last item. At the beginning, it waits for the first item."""
        (self._last.notes if self._last is not None else self._waiting).append(note)


# -- entries ---------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True, kw_only=True)
class TurnEntry(Entry):
    """Some items of a turn, usually all of them. Without a turn, an empty conversation."""

    plan: Plan
    turn: Turn | None
    start: int
    end: int

    @property
    def items(self) -> list[Item]:
        return [] if self.turn is None else self.turn.items[self.start : self.end]

    @property
    def compacts(self) -> bool:
        return self.turn is not None and self.turn.compacts and self.start == 0

    @property
    def completes(self) -> bool:
        """Whether an earlier import saved the beginning of the turn while it was incomplete."""
        return self.turn is not None and self.start > 0 and self.start not in self.turn.branches

    def content(self, parent: Checkpoint | None) -> Content:
        fields = self._fields()
        if self.turn is not None and self._is_appended(self.turn, parent):
            appended = self.turn.messages(self.start, self.end)
            return Content(None, fields, appended=appended)
        return Content({"messages": self._conversation()}, fields)

    def _is_appended(self, turn: Turn, parent: Checkpoint | None) -> bool:
        """Return whether the state is that of the parent with more messages at its end."""
        if parent is None or self.parent is None or self.parent.checkpoint is not parent:
            return False
        return not self.compacts and not (self.completes and turn.splits_message(self.start))

    def _conversation(self) -> list[dict[str, Any]]:
        """Return all messages up to here."""
        parts: list[list[dict[str, Any]]] = []
        turn, end = self.turn, self.end
        while turn is not None:
            parts.append(turn.messages(0, end))
            turn, end = (None, 0) if turn.compacts else (turn.parent, turn.offset)
        return [message for part in reversed(parts) for message in part]

    def _fields(self) -> dict[str, Any]:
        notes = self.plan.unsaved_notes() + _notes([self])
        facts: dict[str, Any] = {}
        for item in self.items:
            facts |= item.facts
        known: dict[str, Any] = {}
        if self.items and "timestamp" in self.items[0].facts:
            known["created_at"] = self.items[0].facts["timestamp"]
        known |= _summary(notes)
        numbers = [item.number for item in self.items] + [note.number for note in notes]
        through = max(numbers, default=0)
        known[PROVENANCE] = {"where": self.plan.source, "through": through}
        fields: dict[str, Any] = {"trigger": "turn", "meta": merge_meta(facts, known)}
        if self.turn is None:
            fields["trigger"] = _BEGINNING
        elif self.compacts:
            fields["trigger"] = "compaction"
        usage = sum((note.usage for note in notes), Usage())
        if usage != Usage():
            fields["usage"] = usage
        if self.turn is not None:
            start = 0 if self.completes else self.start
            if pending := dangling_calls(self.turn.messages(start, self.end)):
                fields["pending"] = pending
        return fields


def _summary(notes: list[Note]) -> dict[str, Any]:
    """Return for `meta`: tokens by name, lines by type, and the lines that are kept."""
    tokens: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    kept: list[Any] = []
    room = KEPT
    for note in notes:
        tokens.update(note.spent or {})
        if note.kind is not None:
            lines[note.kind] += 1
        if note.kept is not None and note.size <= room:
            kept.append(note.kept)
            room -= note.size
    found = {"usage": dict(+tokens), "lines": dict(lines), "other": kept}
    return {name: value for name, value in found.items() if value}


def _notes(entries: Iterable[TurnEntry]) -> list[Note]:
    return [note for entry in entries for item in entry.items for note in item.notes]


class Plan:
    """The entries of one conversation."""

    def __init__(self, conversation: Conversation, session: SessionImport) -> None:
        self.source = conversation.source
        self._conversation, self._session = conversation, session
        self._late: list[Note] = []

    def entries(self) -> tuple[list[TurnEntry], TurnEntry | None]:
        """Return the entries, parents first, and the one at the end of the conversation.

        An entry is left out if the store does not have it, but has an entry that continues it: then
        it was pruned, or it is a part of a turn that was imported as a whole.
        """
        conversation = self._conversation
        beginning = self._entry(None, 0, 0, None) if conversation.restarted else None
        entries = [] if beginning is None else [beginning]
        ends: dict[tuple[Turn, int], TurnEntry] = {}
        for turn in conversation.turns:
            parent = beginning if turn.parent is None else ends[turn.parent, turn.offset]
            start = 0
            for end in self._ends(turn):
                parent = ends[turn, end] = self._entry(turn, start, end, parent)
                entries.append(parent)
                start = end
        current = conversation.current
        last = beginning if current is None else ends[current, len(current.items)]
        known = [entry for entry in entries if entry.checkpoint is not None]
        through = max(map(_through, known), default=0)
        self._late = [note for note in _notes(known) if note.number > through]
        return _needed(entries, beginning, last), last

    def unsaved_notes(self) -> list[Note]:
        """Return notes that came to stored turns later. The first new checkpoint takes them."""
        return [] if self._session.new else self._late

    def _entry(
        self, turn: Turn | None, start: int, end: int, parent: TurnEntry | None
    ) -> TurnEntry:
        where, digest, number = self.source, "", 0
        key = f"{self._session.format} {_BEGINNING}"  # no item has this key
        if turn is not None:
            item = turn.items[end - 1]
            where, digest, number = self._conversation.place(item.number), item.digest, item.number
            key = self._key(item)
        return TurnEntry(
            where=where,
            key=key,
            digest=digest,
            order=(number,),
            parent=parent,
            checkpoint=self._session.find(key, digest)[1],
            plan=self,
            turn=turn,
            start=start,
            end=end,
        )

    def _key(self, item: Item) -> str:
        return f"{self._session.format}:{item.id}"

    def _ends(self, turn: Turn) -> list[int]:
        """Return the ends of the entries of a turn, as numbers of items.

        These are its own end, the places where other turns continue it, and the last place up to
        which an earlier import saved it.
        """
        ends = {*turn.branches, len(turn.items)}
        for end in range(len(turn.items), 0, -1):
            item = turn.items[end - 1]
            if self._session.find(self._key(item), item.digest)[1] is not None:
                ends.add(end)
                break
        return sorted(ends)


def _needed(
    entries: list[TurnEntry], beginning: TurnEntry | None, last: TurnEntry | None
) -> list[TurnEntry]:
    """Return the entries without those that are not stored and have stored descendants.

    The beginning stays if the conversation is there, or if one of its children is to be saved.
    """
    covered: set[Entry] = set()
    for entry in reversed(entries):
        if entry.parent is not None and (entry.checkpoint is not None or entry in covered):
            covered.add(entry.parent)
    if beginning is not None:
        new = [e for e in entries if e.checkpoint is None and e not in covered]
        children = [entry for entry in new if entry.parent is beginning]
        covered.discard(beginning)
        if beginning is not last and not children:
            covered.add(beginning)
        # It is as new as its newest child, so that it is not taken for a pruned one.
        beginning.order = max(entry.order for entry in children or entries)
    return [entry for entry in entries if entry.checkpoint is not None or entry not in covered]


def _through(entry: TurnEntry) -> int:
    """Return the number of the last line that was imported with an entry."""
    line = None if entry.checkpoint is None else entry.checkpoint.meta[PROVENANCE].get("through")
    return line if type(line) is int else 0
