"""Threads, and the session of each of their namespaces.

Each `put` saves a checkpoint of the session. Its parent in the session is LangGraph's parent, so
two checkpoints that continue the same one become siblings:

    A ── B ── C          a rewind of the session to B moves the head to B:
         └─── D          the graph continues from there, and C and D stay in the history
"""

from __future__ import annotations

import heapq
import math
import operator
import threading
import time
from bisect import insort
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast import Checkpoint, Notes, Session, Store
from holdfast.adapters.langgraph.forks import Ancestry, is_placeholder
from holdfast.adapters.langgraph.names import (
    AGENT,
    AT,
    ATTEMPT,
    CHECKPOINT,
    COPIED,
    LINKS,
    REPLACES,
    Links,
    ThreadAddress,
    id_of,
)
from holdfast.adapters.langgraph.serde import Encoder, pack
from holdfast.adapters.langgraph.writes import WriteLog
from holdfast.errors import (
    CheckpointNotFound,
    HeadMoved,
    KeyTaken,
    NotFound,
    SessionExists,
    SessionNotFound,
)

if TYPE_CHECKING:
    from langgraph.checkpoint.serde.base import SerializerProtocol

    from holdfast.adapters.langgraph.writes import Note

    State = dict[str, Any]

_TRIES = 20
_MISSING = object()
_MOVES = ("rewind", "undo", "redo", "repair")
"""Operations that may move a session's head."""


class NewCheckpoint(NamedTuple):
    """A checkpoint that is encoded and not yet saved."""

    id: str
    parent: str | None
    state: State
    meta: dict[str, Any]
    source: str | None
    attempt: str | None = None
    root_attempt: str | None = None


class _Saved(NamedTuple):
    """The checkpoint that a namespace has saved last."""

    id: str
    links: Links
    state: State


class Namespace:
    """The checkpoints of one namespace of a thread. Safe for threads.

    `origin` is that of `Ancestry`.
    """

    def __init__(
        self,
        store: Store,
        address: ThreadAddress,
        origin: Callable[[], Checkpoint | None] | None = None,
    ) -> None:
        self.address, self._store = address, store
        parent = address.root.session if address.ns else None
        self.session: Session = store.session(address.session, agent=AGENT, parent=parent)
        self.ancestry = Ancestry(store, self.session, origin)
        self._notes = self.session.notes()
        self._encoder = Encoder()
        self._lock, self._encoding = threading.Lock(), threading.Lock()
        self._saved: _Saved | None = None
        self._read: tuple[str, State] | None = None
        """The id and the state of the checkpoint that was read last."""
        self._number: int | None = None
        self._forked = False
        """Whether the session of that number is a fork."""
        self._attempts: dict[str, str] = {}
        """By id: the attempts of steps that run again after a rewind."""

    @cached_property
    def root(self) -> Namespace:
        """The namespace of the root graph."""
        return Namespace(self._store, self.address.root) if self.address.ns else self

    # -- reading -------------------------------------------------------------------------------

    def owns(self, checkpoint: Checkpoint) -> bool:
        """Return whether it is in this session, not in one that this was forked from."""
        return checkpoint.session == self.session.name

    def load(self, checkpoint: Checkpoint) -> State:
        state: State = self._home(checkpoint.session).load(checkpoint)
        return state

    def load_to_continue(self, checkpoint: Checkpoint) -> State:
        """Load a state that the next save probably continues. The caller must not change it."""
        state = self.load(checkpoint)
        self._read = (id_of(checkpoint), state)
        return state

    def cached_state(self, id: str | None) -> State | None:
        """Return the state of a checkpoint if it was just saved or read. Does not use the store."""
        saved, read = self._saved, self._read
        if saved is not None and saved.id == id:
            return saved.state
        return read[1] if read is not None and read[0] == id else None

    def forget_states(self) -> None:
        """Free the memory that only makes the next save cheaper."""
        with self._lock:
            self._saved = self._read = None
        with self._encoding:
            self._encoder = Encoder()

    def loader(self) -> Callable[[Checkpoint], State]:
        """Return a function that loads states. They share items, so they must not be changed."""
        series = cache(lambda session: self._home(session).series())
        return lambda checkpoint: series(checkpoint.session).load(checkpoint)

    def notes_of(self, session: str) -> Notes:
        return self._home(session).notes()

    def _home(self, session: str) -> Session:
        return self.session if session == self.session.name else self._store.session(session)

    def find(self, id: str) -> Checkpoint | None:
        return self._find_own(id) or self.ancestry.find(id)

    def finder(self) -> Callable[[str], Checkpoint | None]:
        """Return a `find` for many ids: it reads inherited checkpoints only once."""
        inherited = cache(lambda: {id_of(c): c for c in self.ancestry.inherited()})

        def find(id: str) -> Checkpoint | None:
            return self._find_own(id) or inherited().get(id)

        return find

    def _find_own(self, id: str) -> Checkpoint | None:
        try:
            found = self.session.get(f"key:{id}")
        except (CheckpointNotFound, SessionNotFound):
            return None
        Links.of(found)  # raises if it is not LangGraph's
        return found

    def own(self, *, newest_first: bool = False) -> Iterator[Checkpoint]:
        """Yield LangGraph's checkpoints in this session, in the order of their commits."""
        with suppress(SessionNotFound):
            for checkpoint in self.session.tree(newest_first=newest_first):
                if not is_placeholder(checkpoint):
                    Links.of(checkpoint)  # raises if it is not LangGraph's
                    if checkpoint.key is not None:
                        yield checkpoint

    def all(self) -> list[Checkpoint]:
        """Return its own and the inherited checkpoints, parents before their children."""
        own = [*self.own()]
        keys = {c.key for c in own}
        inherited = [c for c in self.ancestry.inherited() if c.key not in keys]
        return [*inherited[::-1], *own]

    def descending(self) -> Iterator[Checkpoint]:
        """Yield its own and the inherited checkpoints, the highest id first."""
        own = _by_descending_id(self.own(newest_first=True))
        inherited = _by_descending_id(self.ancestry.inherited())
        last = None
        for checkpoint in heapq.merge(own, inherited, key=id_of, reverse=True):
            if checkpoint.key != last:
                yield checkpoint
            last = checkpoint.key

    # -- where the graph continues -------------------------------------------------------------

    def latest(self) -> Checkpoint | None:
        """Return the checkpoint that the graph continues from.

        LangGraph wants the highest id, but ids may be saved late. Here 5 is the latest, whether the
        head is 5 or 4. After a rewind to 3, the latest is 3:

            commits    1   3   5   4
            latest     1   3   5   5
        """
        head = self.session.head
        if head is None:
            return self.ancestry.fork_point()
        links = self._links(head)
        if links.latest is None or links.latest == head.key:
            return head if head.key else None
        if links.copied and head.key and head.seq < self.session.info().newest:
            return head  # a copy says the latest of the fork, but the session was rewound to it
        return self.find(links.latest) or max(self.all(), key=id_of, default=None)

    def _links(self, checkpoint: Checkpoint) -> Links:
        """Return the links of a checkpoint; for a placeholder, those of the fork point."""
        if is_placeholder(checkpoint):
            checkpoint = self.ancestry.fork_point() or checkpoint
        return Links.of(checkpoint)

    def was_rewound(self) -> bool:
        """Return whether the head was ever moved back. Branches of LangGraph do not count."""
        head = self.session.head
        if head is None or (
            head.seq == head.step == self.session.info().newest and not self.ancestry.is_fork()
        ):
            return False
        return any(done.kind in _MOVES for done in self.session.operations())

    def attempt(self, checkpoint: Checkpoint, *, rewound: bool = False) -> str | None:
        """Return the attempt of the step that follows a checkpoint; see `writes`.

        It is None for the first attempt. With `rewound`, the root graph was rewound: then this
        subgraph continues from the checkpoint, although its own head has not moved.

        Notes and children that are added to the checkpoint from now on belong to that attempt.
        """
        if not self.owns(checkpoint) or not self.session.exists():
            return None
        if self.session.info().newest <= checkpoint.seq:
            return None
        head = self.session.head
        if not rewound and (head is None or not (head == checkpoint or is_placeholder(head))):
            return None
        for later in self.session.tree(newest_first=True):
            if later.seq <= checkpoint.seq:
                break
            if later.key and Links.of(later).parent == checkpoint.key:
                self._attempts[id_of(checkpoint)] = later.key
                return later.key
        return None

    def current_attempt(self, id: str) -> str | None:
        return self._attempts.get(id)

    def forked_at(self) -> float:
        """Return when the thread was forked, in microseconds; infinity if it is no fork."""
        placeholders = self.root.ancestry.placeholders()
        return min((c.created_us for c in placeholders), default=math.inf)

    # -- writing -------------------------------------------------------------------------------

    def encode(self, serde: SerializerProtocol, values: dict[str, Any]) -> State:
        with self._encoding:
            return self._encoder.channels(serde, values)

    def save(self, new: NewCheckpoint) -> None:
        """Save a checkpoint. It is durable when this returns.

        Saving the same checkpoint again has no effect. Raises KeyTaken if the session has another
        checkpoint with this id.
        """
        tries = _TRIES
        with self._lock:
            while True:
                try:
                    self._save(new)
                    return
                except HeadMoved:
                    continue  # another writer was first: then this becomes a sibling
                except NotFound:  # the parent, or the whole thread, was just deleted
                    if (tries := tries - 1) < 0:
                        raise
                except KeyTaken:
                    if not self._is_saved(new):
                        raise
                    return

    def _save(self, new: NewCheckpoint) -> None:
        saved, self._saved = self._saved, None
        parent: str | None = None
        if saved is not None and saved.id == new.parent:
            latest, highest = saved.links.latest or "", saved.links.highest
        else:
            saved = None
            latest, highest, parent = self._prepare(new.parent)
        attempt = new.attempt or self._attempts.get(new.parent or "")
        links = Links(
            new.parent, max(new.id, latest), max(new.id, highest), attempt, new.root_attempt
        )
        first_note = self._notes.first(new.id, known=saved is not None)
        meta = {**new.meta, LINKS: links.stored(), Notes.META: first_note}
        changes = None if saved is None else growth(saved.state, new.state)
        if changes is not None:
            self.session.patch(**changes, key=new.id, trigger=new.source, meta=meta)
        else:
            self.session.save(new.state, parent=parent, key=new.id, trigger=new.source, meta=meta)
        self._saved, self._read = _Saved(new.id, links, new.state), None

    def _prepare(self, parent: str | None) -> tuple[str, str, str | None]:
        """Expect the present head, and have the parent in this session.

        Returns the latest and the highest id until now, and the parent's checkpoint if the parent
        is not the head.
        """
        head = self.session.refresh()
        if head is None and self.create_fork():
            head = self.session.refresh()
        if head is None:
            return "", "", None
        newest = next(self.session.tree(newest_first=True), head)
        latest, highest = self._links(head).latest or "", self._links(newest).highest
        if parent is None or parent == head.key:
            return latest, highest, None
        found = self.find(parent)
        if found is not None and not self.owns(found):
            found = self._copy(found)
        return latest, highest, found.id if found else None

    def _is_saved(self, new: NewCheckpoint) -> bool:
        """Return whether the checkpoint that has the key of a new one is equal to it."""
        found = self._find_taken(new.id)
        meta = {k: v for k, v in found.meta.items() if k not in (LINKS, Notes.META)}
        return (
            _are_equal(self.session.load(found.id), new.state)
            and _are_equal(meta, new.meta)
            and Links.of(found).parent == new.parent
        )

    def _find_taken(self, id: str) -> Checkpoint:
        """Return the checkpoint that has a key. Raises KeyTaken if it was deleted."""
        found = self._find_own(id)
        if found is None:
            raise KeyTaken(
                f"checkpoint {id} was deleted, and is not yet freed", hint="store.gc()"
            ) from None
        return found

    def note(self, id: str, note: Note) -> None:
        """Add a note to a checkpoint. It is durable when this returns."""
        note = {AT: time.time_ns() // 1000, **note}
        if id in self._attempts:
            note = {ATTEMPT: self._attempts[id], **note}
        while True:
            try:
                self._notes.put(id, note, self._copy_for_note)
                return
            except SessionNotFound:  # the note comes before the first checkpoint
                self._begin()

    def _begin(self) -> None:
        """Create the session, with a first checkpoint that is none of LangGraph's."""
        with self._lock, suppress(HeadMoved):
            self._saved = None
            if self.session.refresh() is None and not self.create_fork():
                links = Links(parent=None, latest=None, highest="")
                self.session.save({}, trigger="thread", meta={LINKS: links.stored()})

    def _copy_for_note(self, number: int, id: str) -> None:
        """Before a note is added in the session of that number: copy an inherited checkpoint."""
        if number != self._number:
            self._forked, self._number = self.ancestry.is_fork(), number
        if self._forked:
            self.copy_inherited(id)

    # -- forks ---------------------------------------------------------------------------------

    def create_fork(self) -> bool:
        """Create the session of a subgraph of a fork. Returns False if there is nothing to fork."""
        at = None if self.session.exists() else self.ancestry.origin()
        if at is None:
            return False
        with suppress(SessionExists):  # another process was faster
            self._store.session(at.session, agent=AGENT).fork(self.session.name, at)
        return True

    def copy_inherited(self, id: str) -> bool:
        """Copy a checkpoint into this session. Returns False if it is not an inherited one."""
        copied = False
        while True:
            with self._lock, suppress(HeadMoved):
                found = self.find(id)
                if found is None or self.owns(found):
                    return copied
                self._copy(found)
                copied = True

    def _copy(self, inherited: Checkpoint) -> Checkpoint:
        """Copy an inherited checkpoint. The copy shares the state; its notes are written again."""
        self._saved = None
        head, id = self.session.refresh(), id_of(inherited)
        first = next(iter(self.ancestry), None)
        newest = next(self.session.tree(newest_first=True), None)
        if head is None or first is None or newest is None:
            raise SessionNotFound(f"there is no session {self.session.name!r}")
        if notes := WriteLog(self).notes(inherited):  # first: so a copy has all of them
            self._notes.put(id, {REPLACES: notes, COPIED: True})
        links = Links.of(inherited)._replace(
            latest=self._links(head).latest,
            highest=max(id, self._links(newest).highest),
            copied=True,
        )
        first_note = self._notes.first(id)
        try:
            return self.session.save(
                self.load(inherited),
                parent=first.id if self.owns(first) else None,
                key=id,
                trigger=inherited.trigger,
                meta={**inherited.meta, LINKS: links.stored(), Notes.META: first_note},
            )
        except KeyTaken:
            return self._find_taken(id)  # another process has copied it

    def check_fork_point(self) -> None:
        """Raise CheckpointNotFound if this is a fork that has lost its fork point."""
        head = self.session.head
        if head is not None and is_placeholder(head):
            self.ancestry.fork_point()

    # -- deleting ------------------------------------------------------------------------------

    def detach(self, doomed: set[str] | None = None) -> bool:
        """Copy the latest checkpoint if it is inherited and will be deleted in its session.

        `doomed` has the checkpoints that will be deleted; None means all. Returns whether it was
        copied.
        """
        with suppress(CheckpointNotFound, KeyTaken):  # it is gone already
            latest = self.latest()
            if latest is not None and (doomed is None or latest.id in doomed):
                return self.copy_inherited(id_of(latest))
        return False

    def delete_checkpoints(self, is_doomed: Callable[[Checkpoint], bool]) -> None:
        """Delete some checkpoints of this session; if these are all, the session."""
        with self._lock:
            self._saved = None
            while True:
                checkpoints = [*self.own()]
                doomed = [c for c in checkpoints if is_doomed(c)]
                kept = [c for c in checkpoints if not is_doomed(c)]
                head = self.session.refresh()
                if head is not None and head.key and head not in checkpoints:
                    continue  # it was just saved
                try:
                    if doomed and not kept:
                        self.session.delete()
                        return
                    if head in doomed:
                        self.session.rewind(max(kept, key=id_of).id)
                except HeadMoved:
                    continue
                for checkpoint in doomed:
                    self.session.delete(checkpoint.id)
                return


def growth(old: State, new: State) -> dict[str, Any] | None:
    """Return the changes between two states, as arguments of `Session.patch`.

    Returns None if a list was changed in another way than by adding to it. Relies on an Encoder: it
    returns the same object for an item that has not changed.
    """
    appended, replaced = {}, {}
    for key, value in new.items():
        before = old.get(key, _MISSING)
        if type(value) is list and type(before) is list:
            count = len(before)
            if count > len(value) or not all(map(operator.is_, before, value)):
                return None
            if count < len(value):
                appended[key,] = value[count:]
        elif type(value) is dict and key != CHECKPOINT:
            if type(before) is not dict or pack(before) != pack(value):
                return None
        elif value is not before:
            replaced[key,] = value
    return {"append": appended, "set": replaced, "drop": [(key,) for key in old if key not in new]}


def _by_descending_id(checkpoints: Iterator[Checkpoint]) -> Iterator[Checkpoint]:
    """Reorder checkpoints from newest first to highest id first.

    Ids rise with time, except for a few that were saved late. These wait until all checkpoints that
    are still to come are lower.
    """
    waiting: list[Checkpoint] = []
    for checkpoint in checkpoints:
        insort(waiting, checkpoint, key=id_of)
        highest = Links.of(checkpoint).highest
        while waiting and id_of(waiting[-1]) >= highest:
            yield waiting.pop()
    yield from reversed(waiting)


def _are_equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Return whether stored values are equal, including their types: 1 is not True."""
    return a.keys() == b.keys() and all(repr(a[key]) == repr(b[key]) for key in a)
