"""LangGraph's threads as sessions: where they are, what they hold, what is pending."""

from __future__ import annotations

import heapq
import operator
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from langgraph.checkpoint.serde.types import RESUME

from holdfast import lineage
from holdfast.adapters.langgraph.values import Encoder, decode, pack
from holdfast.codec import values as coding
from holdfast.codec.records import MAX_SEQ, encode_name
from holdfast.errors import (
    CheckpointNotFound,
    Corrupt,
    HeadMoved,
    InvalidRequest,
    KeyTaken,
    NotFound,
    SessionNotFound,
)
from holdfast.runs import notes
from holdfast.series import Series

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from langchain_core.runnables import RunnableConfig
    from langgraph.checkpoint.serde.base import SerializerProtocol

    from holdfast.fields import Fields
    from holdfast.model import Checkpoint, SessionInfo
    from holdfast.session import Path, Session
    from holdfast.store import Store

AGENT = "langgraph"
REST = "$checkpoint"
"""The key of a state that holds what a checkpoint has beside its channels."""
OURS = "$langgraph"
"""The key of a checkpoint's meta that holds what LangGraph does not ask for."""
OTHER = "$other"
"""The key of a checkpoint's meta that holds metadata which cannot stand there as it is."""
DELTA = "counters_since_delta_snapshot"
"""The metadata that a checkpoint with delta channels has."""
INSTEAD = "instead"
"""The key of a note that holds others, which replace all before it."""
_TRIES = 20
_NOTHING = object()


class Where(NamedTuple):
    thread: str
    ns: str

    @classmethod
    def of(cls, config: RunnableConfig) -> Where:
        asked = config.get("configurable", {})
        thread, ns = asked.get("thread_id"), asked.get("checkpoint_ns") or ""
        if thread is None or thread == "":
            raise InvalidRequest(
                "the config names no thread",
                hint='pass config={"configurable": {"thread_id": "…"}}',
            )
        return cls(str(thread), ns)

    @property
    def session(self) -> str:
        """Its session's name: no two have the same."""
        thread = self.thread.replace("%", "%25").replace("|", "%7C")
        return f"{thread}|{self.ns}" if self.ns else thread

    @classmethod
    def named(cls, session: str) -> Where:
        thread, _, ns = session.partition("|")
        return cls(thread.replace("%7C", "|").replace("%25", "%"), ns)

    def config(self, id: str | None) -> RunnableConfig:
        asked = {"thread_id": self.thread, "checkpoint_ns": self.ns, "checkpoint_id": id}
        return {"configurable": asked}


class Last(NamedTuple):
    """What a line has saved last."""

    id: str
    latest: str
    highest: str
    state: dict[str, Any]


class Line:
    """The session of a thread, or of one of its namespaces."""

    def __init__(self, store: Store, where: Where) -> None:
        self.where = where
        above = Where(where.thread, "").session if where.ns else None
        self.session: Session = store.session(where.session, agent=AGENT, parent=above)
        self._backend = store.backend
        self.notes = notes.Notes(store.backend, where.session)
        self.encoder = Encoder()
        self.lock = threading.Lock()
        self._last: Last | None = None
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
                        self.session.rewind(max(staying, key=_id).id)
                except HeadMoved:
                    continue
                for checkpoint in doomed:
                    self.session.delete(checkpoint.id)
                return

    def forget(self) -> None:
        """Let go of what only makes the next save cheaper."""
        with self.lock:
            self._last, self.encoder = None, Encoder()

    def series(self) -> Series:
        """To load many of its states."""
        return Series(self._backend, self.session.name)

    def find(self, id: str) -> Checkpoint | None:
        with suppress(CheckpointNotFound, SessionNotFound):
            return _checked(self.session.get(f"key:{id}"))
        return None

    def latest(self) -> Checkpoint | None:
        head = self.session.head
        if head is None:
            return None
        if (id := own_of(head)["latest"]) in (head.key, None):
            return head if head.key else None
        return self.find(id) or max(self.all(), key=_id, default=None)

    def gone_back(self, latest: Checkpoint) -> str | None:
        """The newest child of the latest checkpoint; it has one where somebody has gone back to it.

        From here on, what is written for it belongs to what comes after that child.
        """
        with self._backend.reader() as reader:
            number, _ = reader.session(encode_name(self.session.name)) or (None, None)
            if number is None or lineage.newest(reader, number) <= latest.seq:
                return None
        if (head := self.session.head) is None or head.id != latest.id:
            return None
        for later in self.session.tree(newest_first=True):
            if later.seq <= latest.seq:
                break
            if later.key and own_of(later)["parent"] == latest.key:
                self.again[_id(latest)] = later.key
                return later.key
        return None

    def all(self, *, newest_first: bool = False) -> Iterator[Checkpoint]:
        """LangGraph's checkpoints, in the order of their commits."""
        with suppress(SessionNotFound):
            for checkpoint in self.session.tree(newest_first=newest_first):
                if _checked(checkpoint).key is not None:
                    yield checkpoint

    def descending(self) -> Iterator[Checkpoint]:
        """The highest id first. Ids rise, but for those that came late: these wait in a heap."""
        late: list[tuple[_Reversed, int, Checkpoint]] = []
        for checkpoint in self.all(newest_first=True):
            heapq.heappush(late, (_Reversed(_id(checkpoint)), -checkpoint.seq, checkpoint))
            highest = own_of(checkpoint)["highest"]
            while late and late[0][0].id >= highest:
                yield heapq.heappop(late)[2]
        while late:
            yield heapq.heappop(late)[2]

    def save(
        self,
        id: str,
        parent: str | None,
        state: Any,
        meta: dict[str, Any],
        trigger: str | None,
        after: str | None = None,
    ) -> None:
        tries = _TRIES
        with self.lock:
            while True:
                try:
                    self._save(id, parent, state, meta, trigger, after)
                    return
                except HeadMoved:
                    continue  # by somebody else: then this becomes a sibling
                except NotFound:  # the parent, or the whole thread, was deleted just now
                    if (tries := tries - 1) < 0:
                        raise
                except KeyTaken:
                    found = self.find(id)
                    if found is None:
                        raise KeyTaken(
                            f"checkpoint {id} was deleted, and is not yet freed", hint="store.gc()"
                        ) from None
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
    ) -> None:
        last, self._last = self._last, None
        beside, latest, highest = None, "", ""
        if last is not None and parent == last.id:  # the head, if nobody has moved it
            latest, highest = last.latest, last.highest
        else:
            last, head = None, self.session.refresh()
            if head is not None:
                newest = next(self.session.tree(newest_first=True), head)
                latest, highest = own_of(head)["latest"] or "", own_of(newest)["highest"]
                if parent is not None and parent != head.key:
                    found = self.find(parent)
                    beside = found.id if found else None
        own: dict[str, Any] = {
            "parent": parent, "latest": max(id, latest), "highest": max(id, highest),
        }  # fmt: skip
        if after := after or self.again.get(parent or ""):
            own["after"] = after
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

    def note(self, id: str, facts: dict[str, Any]) -> None:
        """Durable when this returns."""
        if id in self.again:
            facts = {"after": self.again[id], **facts}
        while True:
            try:
                self.notes.put(id, facts)
                return
            except SessionNotFound:  # it precedes the first checkpoint
                with self.lock, suppress(HeadMoved):
                    self._last = None
                    if self.session.refresh() is None:
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


def own_of(checkpoint: Checkpoint) -> dict[str, Any]:
    if checkpoint.damaged is not None:
        raise Corrupt(f"checkpoint {checkpoint.id} is damaged: {checkpoint.damaged}")
    own = checkpoint.meta.get(OURS)
    if type(own) is not dict:
        hint = "give the graph a store of its own, or another thread_id"
        if checkpoint.operation == "fork":
            hint = "to fork a thread: saver.copy_thread(…), and rewind the copy"
        raise InvalidRequest(
            f"session {checkpoint.session!r} is not a thread of LangGraph's", hint=hint
        )
    return own


def is_fork(info: SessionInfo) -> bool:
    """Whether it was forked from a thread by holdfast: then it is none."""
    return info.head is not None and info.head.operation == "fork" and OURS not in info.head.meta


def _checked(checkpoint: Checkpoint) -> Checkpoint:
    own_of(checkpoint)
    return checkpoint


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether they are equal to the type, in whatever order."""
    return a.keys() == b.keys() and all(coding.encode(a[key]) == coding.encode(b[key]) for key in a)


def _id(checkpoint: Checkpoint) -> str:
    return checkpoint.key or ""


class Pending:
    """The writes of a line's checkpoints, read from the newest back, each note once."""

    def __init__(self, line: Line, serde: SerializerProtocol) -> None:
        self._line, self._serde = line, serde
        self._low = MAX_SEQ
        self._notes: dict[str, dict[int, dict[str, Any]]] = {}

    def notes(self, checkpoint: Checkpoint) -> list[dict[str, Any]]:
        low = checkpoint.meta.get(notes.FROM)
        if type(low) is not int:
            raise Corrupt(f"checkpoint {checkpoint.id} does not say where its writes are")
        if low < self._low:
            for number, key, facts in self._line.notes.read(low, self._low):
                self._notes.setdefault(key, {})[number] = facts
            self._low = low
        out: list[dict[str, Any]] = []
        for _, facts in sorted(self._notes.get(_id(checkpoint), {}).items()):
            out = [*facts[INSTEAD]] if INSTEAD in facts else [*out, facts]
        return out

    def writes(self, checkpoint: Checkpoint) -> list[tuple[str, str, Any]]:
        """In the order in which a step applies them."""
        return self._ordered(self.notes(checkpoint))

    def left(self, checkpoint: Checkpoint, after: str) -> list[tuple[str, str, Any]]:
        """Those of a checkpoint that somebody has gone back to: its step is still to be done.

        If it was waiting for an answer, it does so again.
        """
        return self._ordered(self._left(checkpoint, after))

    def settle(self) -> None:
        """Before children are deleted: that somebody has gone back would be seen no more."""
        at = self._line.latest()
        if at is not None and (after := self._line.gone_back(at)):
            self._line.note(_id(at), {INSTEAD: self._left(at, after)})

    def _left(self, checkpoint: Checkpoint, after: str) -> list[dict[str, Any]]:
        found = self.notes(checkpoint)
        answered = next((n for n, facts in enumerate(found) if _answers(facts)), 0)
        return [f for n, f in enumerate(found) if n < answered or f.get("after") == after]

    def towards(self, checkpoint: Checkpoint, child: Checkpoint) -> list[tuple[str, str, Any]]:
        """Those that have made one of its children: for another, tasks may have run again."""
        found, after = self.notes(checkpoint), own_of(child).get("after")
        tasks = {f["task"] for f in found if f.get("after") == after}
        kept = [
            f for f in found
            if (f.get("after") == after if f["task"] in tasks else "after" not in f)
        ]  # fmt: skip
        return self._ordered(kept)

    def _ordered(self, found: list[dict[str, Any]]) -> list[tuple[str, str, Any]]:
        kept: dict[tuple[str, int], tuple[str, str, Any]] = {}
        for facts in found:
            task, path = facts["task"], facts["path"]
            for index, channel, value in facts["writes"]:
                if index < 0 or (task, index) not in kept:
                    kept[task, index] = (path, channel, value)
        order = sorted(kept, key=lambda at: (kept[at][0], *at))
        return [(at[0], kept[at][1], decode(self._serde, kept[at][2])) for at in order]


def _answers(facts: dict[str, Any]) -> bool:
    return any(channel == RESUME for _, channel, _ in facts["writes"])
