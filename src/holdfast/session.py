"""A session: one agent's conversation or job, its head, and its tree of checkpoints."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, TypeVar, overload

from holdfast import blame as blaming
from holdfast import diff as differing
from holdfast import fields as fielding
from holdfast import lineage, paths
from holdfast.checkpoint import Checkpoint
from holdfast.codec import load as loading
from holdfast.codec import patch as patching
from holdfast.codec import values
from holdfast.codec.layout import lay_out
from holdfast.errors import (
    CheckpointNotFound,
    InvalidRequest,
    NotSerializable,
    SessionExists,
)
from holdfast.lineage import Place
from holdfast.logs import logger
from holdfast.model import Operation, ToolCall
from holdfast.models import revive
from holdfast.operations import Operator
from holdfast.revisions import Resolver, check_own
from holdfast.runs import messages as talking
from holdfast.runs.handles import Running
from holdfast.source import StoredSource
from holdfast.verify import verify_one
from holdfast.watching import Watcher
from holdfast.writing import Tip, Writer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Unpack

    from holdfast.backends.base import Reader
    from holdfast.codec.nodes import Node
    from holdfast.codec.records import Head
    from holdfast.codec.streams import Writes
    from holdfast.fields import Fields
    from holdfast.retention import Plan, Retention
    from holdfast.store import Store
    from holdfast.verify import Report

    Revision = str | Checkpoint
    Path = str | tuple[str, ...]

M = TypeVar("M")


class Session(Running):
    """A handle. Nothing is written until the first save.

    A handle expects the head that it last loaded, saved or refreshed; a save onto another head
    raises HeadMoved. Safe to use from many threads; their saves are made one after the other.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        agent: str | None = None,
        reader: Reader | None = None,
        parent: str | None = None,
    ) -> None:
        if not isinstance(name, str) or not name:
            raise InvalidRequest(f"a session's name must be a non-empty string, not {name!r}")
        if agent is not None:
            fielding.check_text("agent", agent)
        if parent is not None:
            fielding.check_text("parent", parent)
        self.name, self.agent, self.parent = name, agent, parent
        self.repaired: tuple[ToolCall, ...] = ()
        """What the last load(repair=True) has closed."""
        self.store = store
        self.tidy_at: int | None = None
        """The seq from which on the store's own retention looks at this session again."""
        self._lock = threading.RLock()
        self._writer = Writer(store, name)
        self._operator = Operator(self._writer)
        store.keep(self)
        if reader is None:
            self.refresh()
        else:
            self._writer.look(reader)

    def __repr__(self) -> str:
        return f"<Session {self.name!r}>"

    def reset_lock(self) -> None:
        """In a forked child: whoever held the lock is not here."""
        self._lock = threading.RLock()

    # -- writing -------------------------------------------------------------------------------

    def save(
        self, state: Any, *, parent: Revision | None = None, **fields: Unpack[Fields]
    ) -> Checkpoint:
        """Make `state` the session's next checkpoint, durable when this returns.

        Costs what changed since the parent. `parent` makes a sibling on purpose: a child of that
        checkpoint, to which the head moves.
        """
        try:
            with self._lock:
                tip = None if parent is None else self._parent(parent)
                return self._save(state, tip, *self._fields(fields))
        except NotSerializable:
            values.check(state, "state")  # raises again, with the whole path
            values.check(fields, "fields")
            raise

    def _save(
        self,
        state: Any,
        parent: Tip | None,
        label: str | None,
        tags: tuple[str, ...],
        extra: dict[str, Any],
    ) -> Checkpoint:
        writer = self._writer
        if parent is None and not (label or tags):
            checkpoint = writer.save(state, extra)
            if checkpoint is not None:
                return self._saved(checkpoint)
        return self._saved(
            writer.checkpoint(
                "save", lambda old, out: lay_out(state, old, out), extra, label, tags, parent
            )
        )

    def append(self, path: Path, *items: Any, **fields: Unpack[Fields]) -> Checkpoint:
        """Add items to the list at `path`; nothing else of the state is touched or encoded."""
        try:
            label, tags, extra = self._fields(fields)
            with self._lock:
                writer = self._writer
                if not (label or tags):
                    checkpoint = writer.append(path, items, extra)
                    if checkpoint is not None:
                        return self._saved(checkpoint)
                if not items:
                    raise InvalidRequest("append() needs at least one item")
                where = paths.parse(path)

                def build(old: Node | None, out: Writes) -> Node:
                    return patching.append(old, where, items, out)

                return self._saved(writer.checkpoint("append", build, extra, label, tags))
        except NotSerializable:
            values.check(items, f"new items of {differing.dotted(paths.parse(path))}")
            values.check(fields, "fields")
            raise

    def patch(
        self,
        *,
        append: Mapping[Path, Sequence[Any]] | None = None,
        set: Mapping[Path, Any] | None = None,
        drop: Sequence[Path] = (),
        **fields: Unpack[Fields],
    ) -> Checkpoint:
        """Several deltas in one checkpoint: lists grown, values set, keys dropped.

        A path is a key of the state, or a tuple of keys.
        """
        grown, assigned = paths.deltas(append, "append"), paths.deltas(set, "set")
        paths.check_deltas(grown, assigned, drop)

        def build(node: Node | None, out: Writes) -> Node:
            for path, value in assigned.items():
                node = patching.assign(node, paths.parse(path), value, out)
            for path, items in grown.items():
                node = patching.append(node, paths.parse(path), items, out)
            for path in drop:
                node = patching.drop(node, paths.parse(path), out)
            return node or patching.EMPTY

        try:
            label, tags, extra = self._fields(fields)
            with self._lock:
                return self._saved(self._writer.checkpoint("patch", build, extra, label, tags))
        except NotSerializable:
            for path, value in assigned.items():
                values.check(value, differing.dotted(paths.parse(path)))
            for path, items in grown.items():
                values.check(items, f"new items of {differing.dotted(paths.parse(path))}")
            values.check(fields, "fields")
            raise

    def _fields(self, fields: Fields) -> tuple[str | None, tuple[str, ...], dict[str, Any]]:
        """Label, tags, and what goes into the record."""
        label, tags, extra = fielding.check(fields) if fields else (None, (), {})
        if self.agent is not None:
            extra["agent"] = self.agent
        if self.parent is not None:
            extra["child_of"] = self.parent
        return label, tags, extra

    def _saved(self, checkpoint: Checkpoint) -> Checkpoint:
        if self.store.tidier is not None:
            self.store.tidier.after_save(self, checkpoint.seq)
        return checkpoint

    def _parent(self, revision: Revision) -> Tip:
        with self.store.backend.reader() as reader:
            place = self._place(reader, revision)
            if place.session != self._writer.number:
                raise InvalidRequest(
                    "a parent must lie in the same session", hint="fork() from another session"
                )
            return Tip.read(reader, place)

    def fork(self, name: str, at: Revision | None = None) -> Session:
        """A new session that begins with this one's state at `at` (the head). No data is copied."""
        with self.store.backend.reader() as reader:
            place = self._place(reader, at)
            tip = Tip.read(reader, place) if at is not None else self._writer.head_at(reader, place)
            home = self.name
            if place.session != self._writer.number:
                home = lineage.session_name(reader, place.session)
            other = type(self)(self.store, name, self.agent, reader)
            if other._writer.number is not None:
                raise SessionExists(f"session {name!r} exists already")
        other._writer.fork(tip, {"origin": home} | ({"agent": self.agent} if self.agent else {}))
        return other

    def rewind(self, revision: Revision) -> Checkpoint:
        """Move the head to another checkpoint of this session.

        Nothing is lost: what came after stays in the tree, and the next save makes a sibling.
        """
        with self._lock:
            self._operator.rewind(lambda reader: self._own_place(reader, revision))
            return self.get()

    def tag(self, revision: Revision | None, *tags: str) -> Checkpoint:
        """Add tags to a checkpoint."""
        checked = fielding.check_tags(tags)
        with self._lock:
            done = self._operator.tag(lambda reader: self._own_place(reader, revision), checked)
            return self._at(done.details["seq"])

    def label(self, revision: Revision | None, label: str) -> Checkpoint:
        """Give a checkpoint a label, in place of the one it has."""
        checked = fielding.check_text("label", label)
        with self._lock:
            done = self._operator.label(lambda reader: self._own_place(reader, revision), checked)
            return self._at(done.details["seq"])

    def delete(self, revision: Revision | None = None) -> Operation:
        """Delete a checkpoint, or without a revision the whole session.

        It is hidden at once, and undo() brings it back until gc() has freed it.
        """
        with self._lock:
            if revision is None:
                return self._operator.delete_session()
            return self._operator.delete(lambda reader: self._own_place(reader, revision))

    def prune(self, rule: Retention, *, dry_run: bool = False) -> Plan:
        """Delete what a rule does not keep; with `dry_run` only say what would go, and why."""
        if getattr(rule, "store_bytes", None) is not None:
            raise InvalidRequest("store_bytes is a rule for store.prune()", hint="max_bytes=…")
        with self._lock:
            return self._operator.prune(rule, dry_run=dry_run)

    def clean_up(self, rule: Retention) -> Plan:
        """What the store does by itself: prune, without a trace in undo()."""
        with self._lock:
            return self._operator.prune(rule, automatic=True)

    def undo(self) -> Operation:
        """Take back the newest operation that was not undone yet, a save as well as any other."""
        with self._lock:
            return self._operator.undo()

    def redo(self) -> Operation:
        """Take back the newest undo, unless something else was done since."""
        with self._lock:
            return self._operator.redo()

    # -- reading -------------------------------------------------------------------------------

    @overload
    def load(self, revision: Revision | None = None, *, repair: bool = False) -> Any: ...
    @overload
    def load(
        self, revision: Revision | None = None, *, as_: type[M], repair: bool = False
    ) -> M: ...
    def load(
        self,
        revision: Revision | None = None,
        *,
        as_: type[Any] | None = None,
        repair: bool = False,
    ) -> Any:
        """The state at `revision` (the head), every byte checked. `as_` makes it a model again.

        `repair` closes tool calls without a result, so that a model can be asked again, and tells
        which in `repaired`; what is stored stays as it is.
        """
        with self._lock, self.store.backend.reader() as reader:
            place = self._place(reader, revision)
            row = lineage.read_row(reader, place)
            state = loading.load(
                row.root, row.record.size, StoredSource(self.store.backend, reader)
            )
            if revision is None:
                self._writer.look(reader)
        if repair:
            state, calls = talking.repaired(state)
            self.repaired = tuple(calls)
            if calls:
                logger.warning("session %r: %d calls without a result", self.name, len(calls))
        return state if as_ is None else revive(state, as_)

    def refresh(self) -> Checkpoint | None:
        """Take the session's present head as the expected one."""
        with self._lock, self.store.backend.reader() as reader:
            self._writer.look(reader)
            number, tip = self._writer.number, self._writer.tip
            if number is None or tip is None:
                return None
            if self.agent is None:
                self.agent = lineage.session_agent(reader, number)
            return self._checkpoint(reader, tip.place)

    @property
    def head(self) -> Checkpoint | None:
        """The newest checkpoint of the line the session is on, as it is in the store now."""
        with self.store.backend.reader() as reader:
            if reader.session(self._writer.raw_name) is None or not self._own_head(reader)[2].seq:
                return None
            return self._checkpoint(reader, self._place(reader, None))

    @property
    def step(self) -> int:
        """The head's step; 0 before the first save."""
        head = self.head
        return head.step if head else 0

    def __len__(self) -> int:
        """How many checkpoints the session has, on all branches."""
        with self.store.backend.reader() as reader:
            found = reader.session(self._writer.raw_name)
            return lineage.count(reader, found[0]) if found else 0

    def __bool__(self) -> bool:
        return True

    def exists(self) -> bool:
        with self.store.backend.reader() as reader:
            return reader.session(self._writer.raw_name) is not None

    def get(self, revision: Revision | None = None) -> Checkpoint:
        with self.store.backend.reader() as reader:
            return self._checkpoint(reader, self._place(reader, revision))

    def history(self, revision: Revision | None = None) -> Iterator[Checkpoint]:
        """The head (or `revision`) and its ancestors, newest first, across forks."""
        with self.store.backend.reader() as reader:
            if reader.session(self._writer.raw_name) is None:
                return
            head = self._own_head(reader)[2]
            if revision is None and not head.seq:
                return
            at: Place | None = self._place(reader, revision)
            parent = head.parent if revision is None else None
        while at is not None:
            # A page at a time, so that no view stays open while the caller works.
            with self.store.backend.reader() as reader:
                page, at = lineage.page(reader, at, parent)
            parent = None
            yield from page

    def tree(self, *, newest_first: bool = False) -> Iterator[Checkpoint]:
        """Every checkpoint of the session, on all branches, in the order of their commits."""
        name, raw, backend = self.name, self._writer.raw_name, self.store.backend
        return lineage.tree(backend, raw, name, newest_first=newest_first)

    def ops(self) -> list[Operation]:
        """Rewinds and annotations, oldest first. (A save's operation is its checkpoint.)"""
        with self.store.backend.reader() as reader:
            number, _, head = self._own_head(reader)
            return lineage.operations(reader, number, self.name, head.operations)

    def watch(
        self, *, interval: float = 0.1, patience: float | None = None
    ) -> Iterator[Checkpoint | Operation]:
        """Checkpoints and operations as they land from now on, whoever makes them.

        Ends after `patience` seconds without any, and when the store is closed.
        """
        return Watcher(self.store.backend, self.name).follow(interval, patience)

    def diff(self, a: Revision, b: Revision | None = None) -> differing.Diff:
        """What changed from `a` to `b` (the head), reading only what differs."""
        with self.store.backend.reader() as reader:
            left, right = (lineage.read_row(reader, self._place(reader, r)).node() for r in (a, b))
            return differing.diff(left, right, StoredSource(self.store.backend, reader))

    def blame(self, path: blaming.Path, revision: Revision | None = None) -> Checkpoint:
        """The checkpoint in which the value at `path` ("plan.budget") last changed."""
        with self.store.backend.reader() as reader:
            place = self._place(reader, revision)
            source = StoredSource(self.store.backend, reader)
            found = blaming.blame(reader, source, place, path)
            return lineage.page(reader, found)[0][0]  # as in history(), if need be without a name

    def verify(self, revision: Revision | None = None, *, read_data: bool = True) -> Report:
        """Check this session, or one checkpoint; with `read_data` every byte of the states."""
        if revision is None:
            return self.store.verify(read_data=read_data, sessions=[self.name])
        with self.store.backend.reader() as reader:
            place = self._place(reader, revision)
        return verify_one(self.store.backend, place, read_data=read_data)

    def _own_head(self, reader: Reader) -> tuple[int, bytes, Head]:
        number = lineage.find_session(reader, self.name)
        return number, *lineage.read_head(reader, number)

    def _place(self, reader: Reader, revision: Revision | None) -> Place:
        if isinstance(revision, Checkpoint):
            revision = revision.id
        if revision is not None:
            number = lineage.find_session(reader, self.name)
            return Resolver(reader, number, self.name).find(revision)
        number, _, head = self._own_head(reader)
        if not head.seq:
            raise CheckpointNotFound(f"session {self.name!r} has no checkpoint")
        return Place(number, head.seq)

    def _own_place(self, reader: Reader, revision: Revision | None) -> Place:
        """A checkpoint of this very session."""
        own = lineage.find_session(reader, self.name)
        return check_own(reader, own, self._place(reader, revision))

    def _at(self, seq: int) -> Checkpoint:
        with self.store.backend.reader() as reader:
            number = lineage.find_session(reader, self.name)
            return self._checkpoint(reader, Place(number, seq))

    def _checkpoint(self, reader: Reader, place: Place) -> Checkpoint:
        return lineage.dress(reader, place, lineage.read_row(reader, place).record)
