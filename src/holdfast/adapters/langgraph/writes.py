"""Pending writes: the results of single tasks, stored before their step ends.

Each `put_writes` is a note in the journal of the session, with the id of the checkpoint as its key.

A step can run more than once. After a rewind of the session to B, the graph runs the step after B
again, and earlier writes of that step must not be used:

    A ── B ── C1 ── D        first attempt: C1 is its result
         └─── C2             second attempt, after the rewind; its name is "C1"

An attempt is named by the newest child that the checkpoint had at the time of the rewind. The first
attempt has no name. C2, and the notes of B that were made in the second attempt, store "C1"
as their attempt.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from langgraph.checkpoint.serde.types import INTERRUPT, RESUME

from holdfast import Checkpoint, Notes
from holdfast.adapters.langgraph.names import AT, ATTEMPT, COPIED, REPLACES, Links, id_of
from holdfast.adapters.langgraph.serde import decode
from holdfast.errors import CheckpointNotFound, Corrupt

if TYPE_CHECKING:
    from langgraph.checkpoint.base import PendingWrite
    from langgraph.checkpoint.serde.base import SerializerProtocol

    from holdfast.adapters.langgraph.forks import Ancestry

    Note = dict[str, Any]


class NoteSource(Protocol):
    """The part of a namespace that a WriteLog reads."""

    @property
    def ancestry(self) -> Ancestry: ...
    def owns(self, checkpoint: Checkpoint) -> bool: ...
    def notes_of(self, session: str) -> Notes: ...
    def forked_at(self) -> float: ...


class WriteLog:
    """Reads the notes of the checkpoints of a namespace, each note once.

    Notes that were made after the time `until`, in microseconds, are left out.
    """

    def __init__(self, namespace: NoteSource, until: float = math.inf) -> None:
        self._namespace, self._until = namespace, until
        self._sessions: dict[str, _SessionNotes] = {}
        self._fork: tuple[Checkpoint | None, float] | None = None

    def notes(self, checkpoint: Checkpoint) -> list[Note]:
        """Return the notes of a checkpoint, oldest first."""
        session = checkpoint.session
        if session not in self._sessions:
            self._sessions[session] = _SessionNotes(self._namespace.notes_of(session))
        until, is_fork_point = self._until, False
        if not self._namespace.owns(checkpoint):
            fork_point, forked = self._fork_point()
            if is_fork_point := checkpoint == fork_point:
                until = min(until, forked)
        found: list[Note] = []
        for note in self._sessions[session].of(checkpoint):
            if note.get(AT, 0) > until or (found and COPIED in note):
                continue  # if two processes copied them, notes may follow the first copy
            found = [*note[REPLACES]] if REPLACES in note else [*found, note]
        return before_fork(found) if is_fork_point else found

    def _fork_point(self) -> tuple[Checkpoint | None, float]:
        """Return the fork point and when it was forked."""
        if self._fork is None:
            self._fork = None, math.inf
            with suppress(CheckpointNotFound):  # what was before it is still there
                ancestry = self._namespace.ancestry
                self._fork = ancestry.fork_point(), self._namespace.forked_at()
        return self._fork

    def was_interrupted(self, checkpoint: Checkpoint) -> bool:
        return any(_writes_to(note, INTERRUPT) for note in self.notes(checkpoint))

    def interrupted_at(self, checkpoint: Checkpoint) -> int:
        """Return when a step that runs again was interrupted, in microseconds; 0 if it was not."""
        notes = self.notes(checkpoint)
        if self._namespace.owns(checkpoint):
            notes = in_attempt(notes, "")
        return max((n.get(AT, 0) for n in notes if _writes_to(n, INTERRUPT)), default=0)


class _SessionNotes:
    """The notes of one session, read backwards as far as they are needed."""

    def __init__(self, stored: Notes) -> None:
        self._stored = stored
        self._low: int | None = None
        self._by_key: dict[str, dict[int, Note]] = {}

    def of(self, checkpoint: Checkpoint) -> list[Note]:
        low = checkpoint.meta.get(Notes.META)
        if type(low) is not int:
            raise Corrupt(f"checkpoint {checkpoint.id} does not say where its writes are")
        if self._low is None or low < self._low:
            high = () if self._low is None else (self._low,)
            for number, key, note in self._stored.read(low, *high):
                self._by_key.setdefault(key, {})[number] = note
            self._low = low
        return [note for _, note in sorted(self._by_key.get(id_of(checkpoint), {}).items())]


def in_attempt(notes: list[Note], attempt: str) -> list[Note]:
    """Return the notes that count in an attempt after a rewind.

    These are the notes of that attempt. If the first attempt was interrupted, its notes up to the
    resume count too, so that the step waits for an answer again.
    """
    first = [n for n in notes if ATTEMPT not in n]
    was_interrupted = any(_writes_to(n, INTERRUPT) for n in first)
    waiting = first[: _resume_index(first)] if was_interrupted else []
    return [*waiting, *(n for n in notes if n.get(ATTEMPT) == attempt)]


def before_fork(notes: list[Note]) -> list[Note]:
    """Return the notes of a fork point that count in the fork.

    In the fork, the step is still to be done. If it was waiting for an answer, it waits again: the
    notes up to the last interrupt and before its resume count.
    """
    attempts = [n[ATTEMPT] for n in notes if ATTEMPT in n]
    if attempts:
        notes = in_attempt(notes, attempts[-1])
    interrupts = [i for i, n in enumerate(notes) if _writes_to(n, INTERRUPT)]
    if not interrupts:
        return []
    end = _resume_index(notes, interrupts[-1] + 1)
    return [{k: v for k, v in n.items() if k != ATTEMPT} for n in notes[:end]]


def towards(notes: list[Note], child: Checkpoint) -> list[Note]:
    """Return the notes of a parent that led to this child.

    A task that ran again in the attempt of the child counts with that attempt only.
    """
    attempt = Links.of(child).attempt
    again = {n["task"] for n in notes if n.get(ATTEMPT) == attempt}
    return [n for n in notes if n.get(ATTEMPT) == (attempt if n["task"] in again else None)]


def pending_writes(serde: SerializerProtocol, notes: list[Note]) -> list[PendingWrite]:
    """Return the writes in notes, decoded, in the order in which a step applies them.

    Of several writes of a task with the same index the first counts, as LangGraph wants it. Special
    writes, such as an interrupt, have negative indexes: the last one counts.
    """
    kept: dict[tuple[str, int], tuple[str, str, Any]] = {}
    for note in notes:
        task, path = note["task"], note["path"]
        for index, channel, value in note["writes"]:
            if index < 0 or (task, index) not in kept:
                kept[task, index] = (path, channel, value)
    order = sorted(kept, key=lambda at: (kept[at][0], *at))
    return [(at[0], kept[at][1], decode(serde, kept[at][2])) for at in order]


def _resume_index(notes: list[Note], start: int = 0) -> int:
    """Return the index of the first note, from `start` on, that an answer has caused.

    It is the resume itself, or the next note of a task that was interrupted: a graph whose
    interrupt is in a subgraph may have no resume. Returns the number of notes if there is none.
    """
    interrupted: set[str] = set()
    for n, note in enumerate(notes):
        if n >= start and (
            _writes_to(note, RESUME)
            or (note["task"] in interrupted and not _writes_to(note, INTERRUPT))
        ):
            return n
        if _writes_to(note, INTERRUPT):
            interrupted.add(note["task"])
    return len(notes)


def _writes_to(note: Note, channel: str) -> bool:
    return any(name == channel for _, name, _ in note["writes"])
