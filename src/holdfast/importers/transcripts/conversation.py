"""A conversation of a transcript: a tree of turns.

A turn is a request and everything that the agent did about it. Transcripts only grow at their end,
so the conversation up to a line never changes. Each line therefore has an id, and a digest of
everything before it, which are the same in every later import.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, NamedTuple


class Note(NamedTuple):
    """A line without a message, or the usage of a message. It belongs to the item before it."""

    number: int
    kind: str | None = None
    """The type of the line, if lines of this type are counted."""
    kept: Any = None
    """The line itself, if it is kept."""
    size: int = 0
    cost: float = 0.0
    spent: dict[str, int] | None = None
    """Tokens by the names that the source has for them."""
    tokens: int = 0


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
