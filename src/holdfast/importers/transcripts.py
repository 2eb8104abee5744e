"""What transcripts have in common: lines that are read one by one, and a tree of turns.

A turn is what somebody asked for and all that was done about it. Lines only ever come to the end
of a transcript, so what the conversation was at a line never changes: each has an id, and a digest
of all that led to it. Both are the same in every later import.
"""

from __future__ import annotations

import os
import stat
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from holdfast.importers import foreign
from holdfast.importers.foreign import Findings, Folder, Unsound, decode, existing, shown

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_NESTING = 48
"""How deep one line may be nested. A state adds a few levels to it."""
MAX_NAME = 1000
"""Characters of a foreign id."""

_OPEN = os.O_RDONLY
for _flag in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"):
    _OPEN |= getattr(os, _flag, 0)


class Note(NamedTuple):
    """A line that is no message, or what a message cost: it goes to the turn it stands in."""

    number: int
    kind: str | None = None
    """The line's type, if lines of it are counted."""
    kept: Any = None
    """The line, if it is kept."""
    size: int = 0
    cost: float = 0.0
    spent: dict[str, int] | None = None
    """Tokens by the names that the source has for them."""
    tokens: int = 0


@dataclass(slots=True)
class Item:
    """A line that is a message, or part of one."""

    number: int
    id: str
    """Of the conversation as it was at this line."""
    digest: str
    message: dict[str, Any]
    facts: dict[str, Any]
    """What the line says beside its message: for `meta`."""
    group: str | None = None
    """Assistant's lines of one group are one message."""
    notes: list[Note] = field(default_factory=list)


class Turn:
    """A stretch of the conversation, and where it goes on from."""

    def __init__(self, parent: Turn | None = None, cut: int = 0, *, compacts: bool = False) -> None:
        self.parent, self.cut = parent, cut
        self.compacts = compacts
        """Whether the messages before it are replaced by its own."""
        self.items: list[Item] = []
        self.cuts: set[int] = set()
        """Numbers of items after which another turn goes on."""
        self.furthest = 0
        """The greatest of them."""
        if parent is not None:
            parent.cuts.add(cut)
            parent.furthest = max(parent.furthest, cut)

    @property
    def origin(self) -> str:
        """The digest of what led to it."""
        return self.parent.items[self.cut - 1].digest if self.parent is not None else ""

    def add(self, item: Item) -> None:
        self.items.append(item)

    def messages(self, start: int, end: int) -> list[dict[str, Any]]:
        """The messages that are made of some of its items: blocks of one group joined in order."""
        out: list[dict[str, Any]] = []
        group, at = None, -1
        first: dict[str, Any] = {}
        for item in self.items[start:end]:
            if item.group is not None and item.group == group:
                content = [*_blocks(out[at])] if out[at] is first else out[at]["content"]
                content += _blocks(item.message)
                out[at] = out[at] | item.message | {"content": content}
                continue
            if item.group is not None:
                group, at, first = item.group, len(out), item.message
            out.append(item.message)
        return out

    def splits(self, at: int) -> bool:
        """Whether the message that the items before `at` end with goes on behind it."""
        before = [item.group for item in self.items[:at] if item.group is not None]
        after = next((item.group for item in self.items[at:] if item.group is not None), None)
        return after is not None and before[-1:] == [after]


def _blocks(message: dict[str, Any]) -> list[Any]:
    content = message.get("content")
    if type(content) is list:
        return content
    return [{"type": "text", "text": content}] if content else []


class Thread:
    """One conversation of a transcript, which becomes a session."""

    def __init__(self, where: str) -> None:
        self.where = where
        """The file it is in."""
        self.turns: list[Turn] = []
        self.tip: Turn | None = None
        """The turn that the conversation has come to; None at its beginning."""
        self.begun_anew = False
        """Whether it goes back to its very beginning."""
        self._last: Item | None = None
        self._waiting: list[Note] = []

    def begin(self, parent: Turn | None, cut: int, *, compacts: bool = False) -> Turn:
        """A new turn, after the first `cut` items of another one."""
        if parent is None and self.turns:
            self.begun_anew = True
        turn = Turn(parent, cut, compacts=compacts)
        self.turns.append(turn)
        self.tip = turn
        return turn

    def add(self, turn: Turn, item: Item) -> None:
        turn.add(item)
        item.notes += self._waiting
        self._waiting = []
        self._last = item

    def note(self, note: Note) -> None:
        """To the message before it; at the beginning, to the first one."""
        (self._last.notes if self._last is not None else self._waiting).append(note)


def chained(turn: Turn, *parts: bytes | str) -> str:
    """The digest of what a turn comes to with one more line."""
    before = turn.items[-1].digest if turn.items else turn.origin
    found = sha256(f"{before}:{turn.compacts}".encode())
    for part in parts:
        found.update(part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part)
        found.update(b"\0")
    return found.hexdigest()


# -- reading -------------------------------------------------------------------------------------


class Files:
    """The transcripts at a path: one file, or those in a folder whose names end like that."""

    def __init__(self, path: str | os.PathLike[str], *suffixes: str) -> None:
        self.findings = Findings()
        real = os.path.realpath(existing(path))
        self.names: list[str] = []
        if not os.path.isdir(real):
            self.root, base = os.path.split(real)
            self.names.append(base)
            return
        folder = Folder(real, self.findings)
        folder.report_links(self.findings)
        self.root = folder.root
        for name in folder.files:
            if name.endswith(suffixes):
                self.names.append(name)
            else:
                self.findings.skip(shown(name), "not a transcript")

    @contextmanager
    def _opened(self, name: str) -> Iterator[BinaryIO]:
        """Raises Unsound for what is no regular file or cannot be read."""
        try:
            handle = os.open(os.path.join(self.root, name), _OPEN)
            with os.fdopen(handle, "rb") as file:
                if not stat.S_ISREG(os.fstat(handle).st_mode):
                    raise Unsound("not a regular file")
                yield file
        except OSError as e:
            raise Unsound(f"it cannot be read: {e.strerror}") from e

    def document(self, name: str) -> Any:
        """What a file says that is one document. Raises Unsound."""
        with self._opened(name) as file:
            raw = file.read(foreign.MAX_BYTES + 1)
        return _decoded(raw)

    def lines(self, name: str, limit: int | None = None) -> Iterator[tuple[int, bytes, Any]]:
        """The lines that are sound: their numbers, bytes, and what they say.

        The others are listed. The last line may be cut off: it was being written.
        """
        try:
            with self._opened(name) as file:
                number = 0
                while (limit is None or number < limit) and (raw := _line(file)):
                    number += 1
                    try:
                        data = _decoded(raw) if raw.strip() else None
                    except Unsound as e:
                        whole = raw.endswith(b"\n") or len(raw) > foreign.MAX_BYTES
                        self.skip(name, number, e if whole else f"the last line is cut off: {e}")
                        continue
                    if raw.strip():
                        yield number, raw.strip(), data
        except Unsound as e:
            self.findings.skip(shown(name), e)

    def skip(self, name: str, number: int, why: object) -> None:
        self.findings.skip(f"{shown(name)}: line {number}", why)


def _line(file: BinaryIO) -> bytes:
    """The next line; of one that is too long only the beginning."""
    line = part = file.readline(foreign.MAX_BYTES + 1)
    while len(line) > foreign.MAX_BYTES and part and not part.endswith(b"\n"):
        part = file.readline(1 << 20)
    return line


def _decoded(raw: bytes) -> Any:
    """JSON that is not too much for a state. Raises Unsound."""
    if len(raw) > foreign.MAX_BYTES:
        raise Unsound(f"it has more than {foreign.MAX_BYTES} bytes")
    data = decode(raw)
    if raw.count(b"[") + raw.count(b"{") <= MAX_NESTING:
        return data
    level, depth = [data], 0
    while level:
        depth += 1
        if depth > MAX_NESTING:
            raise Unsound("it is nested too deeply")
        level = [
            child
            for value in level
            for child in (value.values() if type(value) is dict else value)
            if type(child) in (dict, list)
        ]
    return data


def name_in(data: dict[str, Any], *names: str) -> str | None:
    """The first of these fields that can name something."""
    for name in names:
        value = data.get(name)
        if type(value) is str and 0 < len(value) <= MAX_NAME:
            return value
    return None


def count(data: Any, name: str) -> int:
    """A number of tokens; none is 0. Raises Unsound."""
    value = data.get(name)
    if value is None:
        return 0
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise Unsound(f"{name} is no number of tokens")
    return value


def scalars(data: dict[str, Any], *without: str) -> dict[str, Any]:
    """The fields of a line that are small enough to say of a whole turn."""
    return {
        name: value
        for name, value in data.items()
        if name not in without and type(value) in (str, int, float, bool)
    }
