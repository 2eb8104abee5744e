"""LangGraph's threads as sessions: what they hold, and how they go on."""

from __future__ import annotations

import heapq
import operator
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from holdfast import lineage
from holdfast.adapters.langgraph.forks import Stem, checked
from holdfast.adapters.langgraph.naming import (
    AT,
    BROUGHT,
    INSTEAD,
    OURS,
    REST,
    Where,
    id_of,
    is_fork,
    own_of,
)
from holdfast.adapters.langgraph.pending import Noted
from holdfast.adapters.langgraph.values import Encoder, pack
from holdfast.codec import values as coding
from holdfast.errors import CheckpointNotFound, HeadMoved, KeyTaken, NotFound, SessionNotFound
from holdfast.runs import notes
from holdfast.runs.journal import now_us

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from langgraph.checkpoint.serde.base import SerializerProtocol

    from holdfast.checkpoint import Checkpoint
    from holdfast.fields import Fields
    from holdfast.session import Path
    from holdfast.store import Store

_TRIES = 20
_NOTHING = object()
_MOVES = ("rewind", "undo", "redo", "repair")
"""Operations that may move a session's head."""


class Last(NamedTuple):
    """What a line has saved last."""

    id: str
    latest: str
    highest: str
    state: dict[str, Any]


class Line(Stem):
    """A thread, or one of its namespaces."""

    def __init__(self, store: Store, where: Where) -> None:
        super().__init__(store, where)
        self.encoder = Encoder()
        self.lock = threading.Lock()
        self._last: Last | None = None
        self._number: int | None = None
        self._forked = False
        """Whether the session of that number is a fork."""
        self.again: dict[str, str] = {}
        """Checkpoints that somebody has gone back to, and the child that each had then."""

    def encode(self, serde: SerializerProtocol, values: dict[str, Any]) -> dict[str, Any]:
        with self.lock:
            return self.encoder.channels(serde, values)

    def keep(self, wanted: Callable[[Checkpoint], bool]) -> None:
        """Delete the other checkpoints, and the session if none is left."""
        with self.lock:
            self._last = None
            while True:
                checkpoints = [*self.all()]
                doomed = [c for c in checkpoints if not wanted(c)]
                staying = [c for c in checkpoints if wanted(c)]
                head = self.session.refresh()
                if head is not None and head.key and head not in checkpoints:
                    continue  # somebody has just saved it
                try:
                    if doomed and not staying:
                        self.session.delete()
                        return
                    if head in doomed:
                        self.session.rewind(max(staying, key=id_of).id)
                except HeadMoved:
                    continue
                for checkpoint in doomed:
                    self.session.delete(checkpoint.id)
                return

    def forget(self) -> None:
        """Let go of what only makes the next save cheaper."""
        with self.lock:
            self._last, self.encoder = None, Encoder()

    def latest(self) -> Checkpoint | None:
        head = self.session.head
        if head is None:
            return self.point()
        own = self.own(head)
        if (id := own["latest"]) in (head.key, None):
            return head if head.key else None
        if own.get(BROUGHT) and head.key and head.seq < self.newest():
            return head  # somebody has gone back to it
        return self.find(id) or max(self.whole(), key=id_of, default=None)

    def newest(self) -> int:
        """The number of its newest checkpoint, on whatever line."""
        with self._backend.reader() as reader:
            return lineage.newest(reader, lineage.find_session(reader, self.session.name))

    def was_moved(self) -> bool:
        """Whether somebody has gone back in it some time; not if LangGraph has branched it."""
        head = self.session.head
        if head is None or (head.seq == head.step == self.newest() and not self.is_forked()):
            return False
        return any(done.kind in _MOVES for done in self.session.ops())

    def gone_back(self, latest: Checkpoint, *, to_it: bool = False) -> str | None:
        """The newest child of the latest checkpoint; it has one where somebody has gone back to it.

        From here on, what is written for it belongs to what comes after that child. `to_it` says
        that somebody has, though the head has not moved.
        """
        if not self.is_own(latest):
            return None
        with self._backend.reader() as reader:
            number, _ = reader.session(self._raw) or (None, None)
            if number is None or lineage.newest(reader, number) <= latest.seq:
                return None
        head = self.session.head
        if not to_it and (head is None or not (head.id == latest.id or is_fork(head))):
            return None
        for later in self.session.tree(newest_first=True):
            if later.seq <= latest.seq:
                break
            if later.key and own_of(later)["parent"] == latest.key:
                self.again[id_of(latest)] = later.key
                return later.key
        return None

    def all(self, *, newest_first: bool = False) -> Iterator[Checkpoint]:
        """LangGraph's checkpoints that lie here, in the order of their commits."""
        with suppress(SessionNotFound):
            for checkpoint in self.session.tree(newest_first=newest_first):
                if not is_fork(checkpoint) and checked(checkpoint).key is not None:
                    yield checkpoint

    def whole(self) -> list[Checkpoint]:
        """The same with what it has inherited; parents come before their children."""
        own = [*self.all()]
        keys = {c.key for c in own}
        return [*[c for c in self.inherited() if c.key not in keys][::-1], *own]

    def descending(self) -> Iterator[Checkpoint]:
        """The same, the highest id first."""
        own, inherited = _descending(self.all(newest_first=True)), _descending(self.inherited())
        last = None
        for checkpoint in heapq.merge(own, inherited, key=id_of, reverse=True):
            if checkpoint.key != last:
                yield checkpoint
            last = checkpoint.key

    def detach(self, doomed: set[str] | None = None) -> bool:
        """Have the latest of a fork in its own session, if it is to be deleted where it lies."""
        with suppress(CheckpointNotFound, KeyTaken):  # it is gone already
            latest = self.latest()
            if latest is not None and (doomed is None or latest.id in doomed):
                return self._have(id_of(latest))
        return False

    def _have(self, id: str) -> bool:
        """What is written to lies in its own session; whether it had to be taken over."""
        brought = False
        while True:
            with self.lock, suppress(HeadMoved):
                found = self.find(id)
                if found is None or self.is_own(found):
                    return brought
                self._bring(found)
                brought = True

    def _bring(self, found: Checkpoint) -> Checkpoint:
        """Take over what is inherited: the state is shared, the writes are copied."""
        self._last = None
        head, first, id = self.session.refresh(), next(self.above(), None), id_of(found)
        newest = next(self.session.tree(newest_first=True), None)
        if head is None or first is None or newest is None:
            raise SessionNotFound(f"there is no session {self.session.name!r}")
        if facts := Noted(self).notes(found):  # first: what is here has all of them
            self.notes.put(id, {INSTEAD: facts, BROUGHT: True})
        own = {
            **own_of(found), "latest": self.own(head)["latest"],
            "highest": max(id, self.own(newest)["highest"]), BROUGHT: True,
        }  # fmt: skip
        fields: Fields = {
            "key": id,
            "trigger": found.trigger,
            "meta": {**found.meta, OURS: own, notes.FROM: self.notes.first(id)},
        }
        parent = first.id if self.is_own(first) else None
        try:
            return self.session.save(self.load(found), parent=parent, **fields)
        except KeyTaken:
            return self._taken(id)  # it may be by somebody else

    def _taken(self, id: str) -> Checkpoint:
        """The checkpoint that has a key, unless it is deleted."""
        found = self.find(id)
        if found is None or not self.is_own(found):
            hint = "store.gc()"
            raise KeyTaken(
                f"checkpoint {id} was deleted, and is not yet freed", hint=hint
            ) from None
        return found

    def save(
        self,
        id: str,
        parent: str | None,
        state: Any,
        meta: dict[str, Any],
        trigger: str | None,
        after: str | None = None,
        thread: str | None = None,
    ) -> None:
        """`thread` is what somebody has gone back from in the thread of a subgraph."""
        tries = _TRIES
        with self.lock:
            while True:
                try:
                    self._save(id, parent, state, meta, trigger, after, thread)
                    return
                except HeadMoved:
                    continue  # by somebody else: then this becomes a sibling
                except NotFound:  # the parent, or the whole thread, was deleted just now
                    if (tries := tries - 1) < 0:
                        raise
                except KeyTaken:
                    found = self._taken(id)
                    kept = {k: v for k, v in found.meta.items() if k not in (OURS, notes.FROM)}
                    if (
                        _same(self.session.load(found.id), state)
                        and _same(kept, meta)
                        and own_of(found)["parent"] == parent
                    ):
                        return  # put again
                    raise

    def _save(
        self,
        id: str,
        parent: str | None,
        state: Any,
        meta: dict[str, Any],
        trigger: str | None,
        after: str | None,
        thread: str | None,
    ) -> None:
        last, self._last = self._last, None
        beside, latest, highest = None, "", ""
        if last is not None and parent == last.id:  # the head, if nobody has moved it
            latest, highest = last.latest, last.highest
        else:
            last, head = None, self.session.refresh()
            if head is None and self.begin():
                head = self.session.refresh()
            if head is not None:
                newest = next(self.session.tree(newest_first=True), head)
                latest, highest = self.own(head)["latest"] or "", self.own(newest)["highest"]
                if parent is not None and parent != head.key:
                    found = self.find(parent)
                    if found is not None and not self.is_own(found):
                        found = self._bring(found)
                    beside = found.id if found else None
        own: dict[str, Any] = {
            "parent": parent, "latest": max(id, latest), "highest": max(id, highest),
        }  # fmt: skip
        if after := after or self.again.get(parent or ""):
            own["after"] = after
        if thread is not None:
            own["thread"] = thread
        fields: Fields = {
            "key": id,
            "trigger": trigger,
            "meta": {**meta, OURS: own, notes.FROM: self.notes.first(id, known=last is not None)},
        }
        grown = deltas(last.state, state) if last is not None else None
        if grown is not None:
            self.session.patch(**grown, **fields)
        else:
            self.session.save(state, parent=beside, **fields)
        self._last = Last(id, max(id, latest), max(id, highest), state)

    def _ready(self, number: int, id: str) -> None:
        """Before something is noted in the session of that number."""
        if number != self._number:
            self._forked, self._number = self.is_forked(), number
        if self._forked:
            self._have(id)

    def note(self, id: str, facts: dict[str, Any]) -> None:
        """Durable when this returns."""
        facts = {AT: now_us(), **facts}
        if id in self.again:
            facts = {"after": self.again[id], **facts}
        while True:
            try:
                self.notes.put(id, facts, self._ready)
                return
            except SessionNotFound:  # it precedes the first checkpoint
                with self.lock, suppress(HeadMoved):
                    self._last = None
                    if self.session.refresh() is None and not self.begin():
                        own = {"parent": None, "latest": None, "highest": ""}
                        self.session.save({}, trigger="thread", meta={OURS: own})


class Deltas(TypedDict):
    append: dict[Path, Sequence[Any]]
    set: dict[Path, Any]
    drop: list[Path]


def deltas(old: dict[str, Any], new: dict[str, Any]) -> Deltas | None:
    """What makes one state of the other, if lists have but grown: they need not be read again.

    What an Encoder has not encoded anew is the same object as before.
    """
    found: Deltas = {"append": {}, "set": {}, "drop": [(key,) for key in old if key not in new]}
    for key, value in new.items():
        before = old.get(key, _NOTHING)
        if type(value) is list and type(before) is list:
            count = len(before)
            if count > len(value) or not all(map(operator.is_, before, value)):
                return None
            if count < len(value):
                found["append"][key,] = value[count:]
        elif type(value) is dict and key != REST:
            if type(before) is not dict or pack(before) != pack(value):
                return None
        elif value is not before:
            found["set"][key,] = value
    return found


class _Reversed:
    """An id that is less than lower ones."""

    __slots__ = ("id",)

    def __init__(self, id: str) -> None:
        self.id = id

    def __lt__(self, other: _Reversed) -> bool:
        return self.id > other.id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Reversed) and self.id == other.id

    __hash__ = None  # type: ignore[assignment]


def _descending(checkpoints: Iterator[Checkpoint]) -> Iterator[Checkpoint]:
    """From the newest first to the highest id first.

    Ids rise, but for those that came late: these wait in a heap.
    """
    late: list[tuple[_Reversed, int, Checkpoint]] = []
    for n, checkpoint in enumerate(checkpoints):
        heapq.heappush(late, (_Reversed(id_of(checkpoint)), n, checkpoint))
        highest = own_of(checkpoint)["highest"]
        while late and late[0][0].id >= highest:
            yield heapq.heappop(late)[2]
    while late:
        yield heapq.heappop(late)[2]


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether they are equal to the type, in whatever order."""
    return a.keys() == b.keys() and all(coding.encode(a[key]) == coding.encode(b[key]) for key in a)
