"""Writes of LangGraph's that wait for the end of their step: notes of their checkpoints."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from langgraph.checkpoint.serde.types import INTERRUPT, RESUME

from holdfast.adapters.langgraph.naming import AT, BROUGHT, EVER, INSTEAD, id_of, own_of
from holdfast.adapters.langgraph.values import decode
from holdfast.codec.records import MAX_SEQ
from holdfast.errors import CheckpointNotFound, Corrupt
from holdfast.runs import notes

if TYPE_CHECKING:
    from langgraph.checkpoint.serde.base import SerializerProtocol

    from holdfast.adapters.langgraph.threads import Line
    from holdfast.checkpoint import Checkpoint

Facts = dict[str, Any]
"""What one note says: the writes of a task."""


class _Book:
    """The notes of one session that were read."""

    def __init__(self) -> None:
        self.low = MAX_SEQ
        self.notes: dict[str, dict[int, Facts]] = {}


class Noted:
    """The notes of a line's checkpoints, read from the newest back, each once.

    Only what was noted `until` then, in microseconds.
    """

    def __init__(self, line: Line, until: int = EVER) -> None:
        self._line, self._until = line, until
        self._books: dict[str, _Book] = {}
        self._point: str | None = None
        self._forked = EVER

    def notes(self, checkpoint: Checkpoint) -> list[Facts]:
        """Those of what a fork has from another thread lie there."""
        low = checkpoint.meta.get(notes.FROM)
        if type(low) is not int:
            raise Corrupt(f"checkpoint {checkpoint.id} does not say where its writes are")
        book = self._books.setdefault(checkpoint.session, _Book())
        if low < book.low:
            for number, key, facts in self._line.notes_in(checkpoint.session).read(low, book.low):
                book.notes.setdefault(key, {})[number] = facts
            book.low = low
        is_point = self._is_point(checkpoint)
        until = min(self._until, self._forked) if is_point else self._until
        out: list[Facts] = []
        for _, facts in sorted(book.notes.get(id_of(checkpoint), {}).items()):
            if facts.get(AT, 0) > until or (out and BROUGHT in facts):
                continue  # two have taken it over, and the first may have gone on
            out = [*facts[INSTEAD]] if INSTEAD in facts else [*out, facts]
        return asked(out) if is_point else out

    def _is_point(self, checkpoint: Checkpoint) -> bool:
        """Whether its line is a fork that begins with it."""
        if self._line.is_own(checkpoint):
            return False
        if self._point is None:
            self._point = ""
            with suppress(CheckpointNotFound):  # what was before it is still there
                point = self._line.point()
                self._point, self._forked = point.id if point else "", self._line.until()
        return checkpoint.id == self._point

    def asks(self, checkpoint: Checkpoint) -> bool:
        """Whether its step has asked somebody."""
        return any(_has(facts, INTERRUPT) for facts in self.notes(checkpoint))

    def waited(self, checkpoint: Checkpoint) -> int:
        """When one that is gone back to has put the question that it waits with; or 0."""
        found = self.notes(checkpoint)
        if self._line.is_own(checkpoint):
            found = left(found, "")
        return max((f.get(AT, 0) for f in found if _has(f, INTERRUPT)), default=0)

    def _left(self, checkpoint: Checkpoint, after: str) -> list[Facts]:
        return left(self.notes(checkpoint), after)

    def settle(self, at: Checkpoint, after: str) -> None:
        """Before children are deleted: that somebody has gone back would be seen no more."""
        self._line.note(id_of(at), {INSTEAD: self._left(at, after)})


class Pending(Noted):
    """The same as writes."""

    def __init__(self, line: Line, serde: SerializerProtocol) -> None:
        super().__init__(line)
        self._serde = serde

    def writes(self, checkpoint: Checkpoint) -> list[tuple[str, str, Any]]:
        """In the order in which a step applies them."""
        return self._ordered(self.notes(checkpoint))

    def left(self, checkpoint: Checkpoint, after: str) -> list[tuple[str, str, Any]]:
        """Those of a checkpoint that somebody has gone back to: its step is still to be done.

        If it was waiting for an answer, it does so again.
        """
        return self._ordered(self._left(checkpoint, after))

    def towards(self, checkpoint: Checkpoint, child: Checkpoint) -> list[tuple[str, str, Any]]:
        """Those that have made one of its children: for another, tasks may have run again."""
        found, after = self.notes(checkpoint), own_of(child).get("after")
        tasks = {f["task"] for f in found if f.get("after") == after}
        kept = [
            f for f in found
            if (f.get("after") == after if f["task"] in tasks else "after" not in f)
        ]  # fmt: skip
        return self._ordered(kept)

    def _ordered(self, found: list[Facts]) -> list[tuple[str, str, Any]]:
        kept: dict[tuple[str, int], tuple[str, str, Any]] = {}
        for facts in found:
            task, path = facts["task"], facts["path"]
            for index, channel, value in facts["writes"]:
                if index < 0 or (task, index) not in kept:
                    kept[task, index] = (path, channel, value)
        order = sorted(kept, key=lambda at: (kept[at][0], *at))
        return [(at[0], kept[at][1], decode(self._serde, kept[at][2])) for at in order]


def left(found: list[Facts], after: str) -> list[Facts]:
    """What was there before the first answer, if it waited, and since somebody has gone back."""
    first = [f for f in found if "after" not in f]
    waited = any(_has(f, INTERRUPT) for f in first)
    since = [f for f in found if f.get("after") == after]
    return [*first[: _answered(first, 0) if waited else 0], *since]


def asked(found: list[Facts]) -> list[Facts]:
    """What was there when the step waited for its last answer; nothing if it did not wait.

    What its origin was doing with the checkpoint that a fork begins with is not the fork's: in the
    fork, the step is still to be done.
    """
    afters = [f["after"] for f in found if "after" in f]
    if afters:
        found = left(found, afters[-1])
    questions = [n for n, f in enumerate(found) if _has(f, INTERRUPT)]
    if not questions:
        return []
    end = _answered(found, questions[-1] + 1)
    return [{k: v for k, v in f.items() if k != "after"} for f in found[:end]]


def _answered(found: list[Facts], start: int) -> int:
    """The first note from one on that comes of an answer, or their number.

    The answer itself, or what a task has written that had asked before: a graph that has the
    question in a subgraph may not have the answer.
    """
    waiting: set[str] = set()
    for n, facts in enumerate(found):
        if n >= start and (
            _has(facts, RESUME) or (facts["task"] in waiting and not _has(facts, INTERRUPT))
        ):
            return n
        if _has(facts, INTERRUPT):
            waiting.add(facts["task"])
    return len(found)


def _has(facts: Facts, wanted: str) -> bool:
    return any(channel == wanted for _, channel, _ in facts["writes"])
