"""Makes entries of a conversation: usually one for each turn.

A turn has several entries if another turn branches off inside it, or if it was incomplete when an
earlier import saved it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast import Usage, dangling_calls
from holdfast.importers.save import PROVENANCE, Content, Entry, SessionImport, merge_meta

if TYPE_CHECKING:
    from holdfast import Checkpoint
    from holdfast.importers.transcripts.conversation import Conversation, Item, Note, Turn

KEPT = 64 << 10
"""The most bytes of lines without a message that one checkpoint keeps. Others are only counted."""
_BEGINNING = "start"
"""The trigger of the empty checkpoint that exists if the user went back to the beginning."""


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
        usage = Usage(sum(note.tokens for note in notes), sum(note.cost for note in notes))
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
    found = {"usage": dict(tokens), "lines": dict(lines), "other": kept}
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
