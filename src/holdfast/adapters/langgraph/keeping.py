"""Keeping house: which threads there are; deleting, pruning and copying them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from holdfast.adapters.hosting import Host, Hosted
from holdfast.adapters.langgraph import subgraphs
from holdfast.adapters.langgraph.naming import AGENT, DELTA, OTHER, OURS, Where, is_fork, own_of
from holdfast.adapters.langgraph.pending import Noted, Pending
from holdfast.adapters.langgraph.threads import Line
from holdfast.adapters.langgraph.values import decode
from holdfast.errors import CheckpointNotFound, InvalidRequest, SessionNotFound
from holdfast.runs import notes

if TYPE_CHECKING:
    import builtins
    from collections.abc import Sequence

    from langchain_core.runnables import RunnableConfig
    from langgraph.checkpoint.base import CheckpointMetadata
    from langgraph.checkpoint.serde.base import SerializerProtocol

    from holdfast.checkpoint import Checkpoint

_LINES, _WARM = 4_096, 64
"""Of so many threads something is remembered, and of so many the last state."""


class Keeping(Hosted):
    """The part of the saver that is about whole threads."""

    serde: SerializerProtocol

    def __init__(self, host: Host) -> None:
        self.host = host
        self._lock = threading.Lock()
        self._lines: OrderedDict[Where, Line] = OrderedDict()
        self._warm: OrderedDict[Where, Line] = OrderedDict()

    def delete_thread(self, thread_id: str) -> None:
        """Undone by `undo()` of its sessions, until the store's gc()."""
        for line in self.lines_in(str(thread_id)):
            self._detach(line)
            self._delete(line)

    def _detach(self, line: Line, doomed: set[str] | None = None) -> bool:
        """Let what was forked from it begin with a checkpoint of its own; whether any has got one.

        `doomed` are those that are to be deleted, if not all are.
        """
        done = False
        for name in line.forks():
            fork = self.line(Where.named(name))
            for below in [] if fork.where.ns else self.lines_in(fork.where.thread):
                below.begin()
            done |= fork.detach(doomed)
            done |= self._detach(fork, doomed)
        return done

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Also from forks; one that begins with such a checkpoint, and has no other, goes."""
        again = True
        while again:
            doomed: dict[str, set[str]] = {}
            for run in run_ids:
                for found in self.store.find(agent=AGENT, meta={"run_id": run}):
                    doomed.setdefault(found.session, set()).add(found.id)
            again = any(self._detach(self.line(Where.named(s)), doomed[s]) for s in doomed)
        lines = {session: self.line(Where.named(session)) for session in doomed}
        self._settle([*lines.values()])
        for session, line in lines.items():
            line.keep(lambda c, ids=doomed[session]: c.id not in ids)  # type: ignore[misc]

    def _settle(self, lines: Sequence[Line]) -> list[Checkpoint | None]:
        """Before what came after them is deleted: where they stand."""
        stands = [self.stand(line, None) for line in lines]
        for line, (at, after) in zip(lines, stands, strict=True):
            if at is not None and after is not None:
                Noted(line).settle(at, after)
        return [at for at, _ in stands]

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """With "keep_latest" also what its delta channels are made of stays."""
        if strategy not in ("keep_latest", "delete"):
            raise InvalidRequest(
                f"there is no strategy {strategy!r}", hint='"keep_latest" or "delete"'
            )
        for thread in thread_ids:
            if strategy == "delete":
                self.delete_thread(thread)
                continue
            lines = self.lines_in(str(thread))
            for line in lines:
                self._detach(line)
            for line, at in zip(lines, self._settle(lines), strict=True):
                kept = self._needed(line, at)
                line.keep(lambda c, kept=kept: c.id in kept)  # type: ignore[misc]

    def _needed(self, line: Line, at: Checkpoint | None) -> set[str]:
        """The latest, and its ancestors up to where each of its delta channels has a value."""
        find = line.finder()
        kept, seen = set[str](), set[str]()
        open_ = set(self.metadata(at).get(DELTA) or ()) if at else set()
        while at is not None and at.id not in seen:
            seen.add(at.id)
            kept.add(at.id)
            open_ -= line.load(at).keys()
            parent = own_of(at)["parent"]
            at = find(parent) if open_ and parent else None
        return kept

    def _delete(self, line: Line) -> None:
        with suppress(SessionNotFound):
            head = line.session.head
            if head is not None and not (is_fork(head) and head.agent == AGENT):
                own_of(head)  # or it is not ours to delete
            line.session.delete()
        with self._lock:
            self._lines.pop(line.where, None)
            self._warm.pop(line.where, None)

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        if str(source_thread_id) == str(target_thread_id):
            raise InvalidRequest("a thread cannot be copied onto itself")
        for line in self.lines_in(str(source_thread_id)):
            other = self.line(Where(str(target_thread_id), line.where.ns))
            pending, load = Pending(line, self.serde), line.series()
            copied = set[str]()
            for checkpoint in line.whole():
                meta = {k: v for k, v in checkpoint.meta.items() if k not in (OURS, notes.FROM)}
                id, own = checkpoint.key or "", own_of(checkpoint)
                copied.add(id)
                other.save(
                    id, own["parent"], load(checkpoint), meta, checkpoint.trigger,
                    own.get("after"), own.get("thread"),
                )  # fmt: skip
                there = Pending(other, self.serde).notes(other.find(id) or checkpoint)
                for facts in pending.notes(checkpoint):
                    if facts not in there:
                        other.note(id, facts)
            now, at = line.latest(), other.latest()
            if now and at and now.key != at.key and copied == {c.key for c in other.whole()}:
                other.session.rewind(f"key:{now.key}")  # it is a copy of one that was rewound

    # -- lines ---------------------------------------------------------------------------------

    def line(self, where: Where) -> Line:
        with self._lock:
            line = self._lines.get(where)
            if line is None:
                line = self._lines[where] = self._line(where)
            self._lines.move_to_end(where)
            while len(self._lines) > _LINES:
                self._lines.popitem(last=False)
            self._warm[where] = line
            self._warm.move_to_end(where)
            cold = self._warm.popitem(last=False)[1] if len(self._warm) > _WARM else None
        if cold is not None:
            cold.forget()
        return line

    def _line(self, where: Where) -> Line:
        line = Line(self.store, where)
        if where.ns:
            line.origin = partial(self._origin, where)
        return line

    def lines_of(self, config: RunnableConfig | None) -> builtins.list[Line]:
        """Of all threads, of a thread with all its namespaces, or of one namespace."""
        if config is None:
            found = self.store.sessions(agent=AGENT)
            return [Line(self.store, Where.named(i.name)) for i in found]
        where = Where.of(config)
        if config["configurable"].get("checkpoint_ns") is not None:
            return [self.line(where)]
        return self.lines_in(where.thread)

    def lines_in(self, thread: str) -> builtins.list[Line]:
        return [self.line(Where(thread, ns)) for ns in ["", *sorted(self._namespaces(thread))]]

    def _namespaces(self, thread: str) -> set[str]:
        """Of a thread's subgraphs, also those that a fork has from where it was forked."""
        line, found = self._line(Where(thread, "")), set[str]()
        prefix = line.where.session + "|"
        for info in self.store.sessions(after=prefix):
            if not info.name.startswith(prefix):
                break
            found.add(Where.named(info.name).ns)
        with suppress(CheckpointNotFound):
            if (point := line.point()) is not None and not line.is_own(point):
                found |= self._namespaces(Where.named(point.session).thread)
        return found

    # -- subgraphs -----------------------------------------------------------------------------

    def _belongs(self, checkpoint: Checkpoint) -> str | None:
        found: str | None = (self.metadata(checkpoint).get("parents") or {}).get("")
        return found

    def stand(self, line: Line, base: str | None) -> subgraphs.Stand:
        """The latest checkpoint of a line, as of where its thread stands."""
        if not line.where.ns:
            latest = line.latest()
            return subgraphs.Stand(latest, line.gone_back(latest) if latest else None)
        return subgraphs.stand(line, self.line(Where(line.where.thread, "")), base, self._belongs)

    def since(self, line: Line, metadata: CheckpointMetadata) -> str | None:
        """What somebody has gone back from in the thread of a subgraph."""
        above = metadata.get("parents") if line.where.ns else None
        return (
            self.line(Where(line.where.thread, "")).again.get(above.get("", "")) if above else None
        )

    def _origin(self, where: Where) -> Checkpoint | None:
        """A subgraph of a fork begins as it was when the thread was forked."""
        thread = self._line(Where(where.thread, ""))
        try:
            point = thread.point()
        except CheckpointNotFound:
            thread.check()
            lost = Where.named(thread.stands()[-1].parent_session or "").thread
            left = Line(self.store, Where(lost, where.ns)).all()
            if any(c._record.created_us <= thread.until() for c in left):
                raise
            return None  # or it would have been forked before that was deleted
        if point is None or not point.key or thread.is_own(point):
            return None
        home = self._line(Where.named(point.session))
        source = self._line(Where(home.where.thread, where.ns))
        waited = Noted(thread).waited(point)
        return subgraphs.forked(source, home, point, thread.until(), waited, self._belongs)

    def metadata(self, checkpoint: Checkpoint) -> Any:
        meta = {**checkpoint.meta}
        other = meta.pop(OTHER, {})
        for name in (OURS, notes.FROM):
            meta.pop(name)
        return meta | {name: decode(self.serde, value) for name, value in other.items()}
