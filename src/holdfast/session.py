"""A session: one agent's conversation or job, its head, and its tree of checkpoints."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, overload

from holdfast import blame as blaming
from holdfast import diff as differing
from holdfast import fields as fielding
from holdfast import ids, lineage
from holdfast.backends.base import Change, Moved
from holdfast.codec import load as loading
from holdfast.codec import patch as patching
from holdfast.codec import records, values
from holdfast.codec.layout import lay_out
from holdfast.codec.records import LABEL, MAX_SEQ, TAG, Head
from holdfast.codec.streams import Writes
from holdfast.errors import (
    CheckpointNotFound,
    HeadMoved,
    InvalidRequest,
    NotSerializable,
    SessionExists,
    SessionNotFound,
)
from holdfast.lineage import Place
from holdfast.model import Checkpoint, Operation, Record
from holdfast.models import revive
from holdfast.source import StoredSource, seal_blob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Unpack

    from holdfast.backends.base import Reader
    from holdfast.codec.nodes import Node
    from holdfast.fields import Fields
    from holdfast.store import Store
    from holdfast.verify import Report

    Revision = str | Checkpoint
    Path = str | tuple[str, ...]

M = TypeVar("M")
_NO_HASH = bytes(32)


class _Tip(NamedTuple):
    """The checkpoint that the next one is built on."""

    place: Place
    id: bytes
    hash: bytes
    step: int
    created_us: int
    line: int
    root: bytes

    @classmethod
    def of(cls, place: Place, row: records.Row) -> _Tip:
        r = row.record
        return cls(place, r.id, r.hash, r.step, r.created_us, row.line, row.root)


class Session:
    """A handle. Nothing is written until the first save.

    A handle expects the head that it last loaded, saved or refreshed; a save onto another head
    raises HeadMoved. Safe to use from many threads; their saves are made one after the other.
    """

    def __init__(self, store: Store, name: str, agent: str | None = None) -> None:
        if not isinstance(name, str) or not name:
            raise InvalidRequest(f"a session's name must be a non-empty string, not {name!r}")
        if agent is not None:
            fielding.check_text("agent", agent)
        self.name, self.agent = name, agent
        self._store, self._raw_name = store, records.encode_name(name)
        self._lock = threading.RLock()
        self._number: int | None = None
        self._head_row: bytes | None = None
        self._head = Head(0, 0, 0)
        self._tip: _Tip | None = None
        self.refresh()

    def __repr__(self) -> str:
        return f"<Session {self.name!r}>"

    # -- writing -------------------------------------------------------------------------------

    def save(
        self, state: Any, *, parent: Revision | None = None, **fields: Unpack[Fields]
    ) -> Checkpoint:
        """Make `state` the session's next checkpoint, durable when this returns.

        Costs what changed since the parent. `parent` makes a sibling on purpose: a child of that
        checkpoint, to which the head moves.
        """
        try:
            return self._commit(
                "save", lambda old, out: lay_out(state, old, out), fields, parent=parent
            )
        except NotSerializable as e:
            if not e.path.startswith("meta"):
                values.check(state, "state")  # raises again, with the whole path
            raise

    def append(self, path: Path, *items: Any, **fields: Unpack[Fields]) -> Checkpoint:
        """Add items to the list at `path`; nothing else of the state is touched or encoded."""
        if not items:
            raise InvalidRequest("append() needs at least one item")
        return self._patch("append", {path: items}, {}, (), fields)

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
        return self._patch("patch", append or {}, set or {}, drop, fields)

    def _patch(
        self,
        operation: str,
        append: Mapping[Path, Sequence[Any]],
        assign: Mapping[Path, Any],
        drop: Sequence[Path],
        fields: Fields,
    ) -> Checkpoint:
        if isinstance(drop, str):
            raise InvalidRequest("drop must be a list of keys", hint=f"drop=[{drop!r}]")
        for items in append.values():
            if isinstance(items, str | bytes) or not isinstance(items, list | tuple):
                raise InvalidRequest(
                    "append must map each path to a list of items", hint="append={'messages': [m]}"
                )
        paths = [_path(p) for p in (*append, *assign, *drop)]
        if len(paths) > 1:
            _refuse_overlap(paths)

        def build(old: Node | None, out: Writes) -> Node:
            node = old or patching.EMPTY
            for path, value in assign.items():
                node = patching.assign(node, _path(path), value, out)
            for path, items in append.items():
                node = patching.append(node, _path(path), items, out)
            for path in drop:
                node = patching.drop(node, _path(path), out)
            return node

        try:
            return self._commit(operation, build, fields)
        except NotSerializable:
            for path, value in (*append.items(), *assign.items()):
                values.check(value, "state" + "".join([f".{p}" for p in _path(path)]))
            raise

    def _commit(
        self,
        operation: str,
        build: Callable[[Node | None, Writes], Node],
        fields: Fields,
        *,
        parent: Revision | None = None,
    ) -> Checkpoint:
        extra = fielding.check(fields)
        label = fields.get("label")
        tags = fielding.check_tags(fields.get("tags", ()))
        if self.agent is not None:
            extra["agent"] = self.agent
        with self._lock:
            while True:
                tip = self._tip if parent is None else self._tip_at(parent)
                try:
                    return self._commit_on(tip, operation, build, extra, label, tags)
                except Moved:
                    self._catch_up()
                except SessionExists:
                    self._catch_up()
                except BaseException:
                    if tip is not None:
                        self._store.images.drop(tip.hash)
                    raise

    def _commit_on(
        self,
        tip: _Tip | None,
        operation: str,
        build: Callable[[Node | None, Writes], Node],
        extra: dict[str, Any],
        label: str | None,
        tags: tuple[str, ...],
    ) -> Checkpoint:
        store, head = self._store, self._head
        number = self._number or store.new_session()
        seq = head.last + 1
        if seq > MAX_SEQ:
            raise InvalidRequest(f"session {self.name!r} has {head.last} checkpoints, the most")
        # Only a child of the newest checkpoint knows where the session's streams end.
        goes_on = tip is not None and tip.place == (number, head.last)
        line = tip.line if tip and goes_on else store.new_stream()
        old = None
        if tip is not None:
            old = store.images.get(tip.hash) or records.parse(tip.root, root=True)
        with StoredSource(store.backend) as source:
            out = Writes(source, line, store.new_stream)
            node = build(old, out)
            blobs = []
            for digest, flat in out.blobs.items():
                state = source.blob_state(digest, len(flat))
                if state != "sound":
                    blobs.append((digest, seal_blob(digest, flat), state == "damaged"))
        id = ids.new_id(tip.id if tip else None)
        created = time.time_ns() // 1000
        step, parent_seq, parent_id, parent_hash = 1, None, None, _NO_HASH
        if tip is not None:
            created = max(created, tip.created_us)
            step, parent_seq, parent_id, parent_hash = (
                tip.step + 1, tip.place.seq, tip.id, tip.hash,
            )  # fmt: skip
            if tip.place.session != number and "origin" not in extra:
                raise InvalidRequest(
                    "a parent must lie in the same session", hint="fork() from another session"
                )
        meta = records.metadata(step, created, operation, parent_seq, parent_id, extra)
        state_hash, root = node.hash, node.stored
        digest = records.record_hash(self._raw_name, seq, id, meta, state_hash, parent_hash)
        added = len(root) + sum([len(r.body) for r in out.rows]) + sum([len(b[1]) for b in blobs])
        body = records.seal_checkpoint(number, seq, id, meta, digest, line, node.size, added, root)
        new_head = Head(seq, seq, head.operations)
        head_row = new_head.seal(number)
        change = Change(number, self._head_row, head_row, checkpoint=(seq, id, body))
        change.rows, change.blobs = out.rows, blobs
        if self._number is None:
            row = records.seal_session(number, self._raw_name, created, self.agent)
            change.create = (self._raw_name, row)
        if "key" in extra:
            change.key = records.encode_name(extra["key"])
        if label is not None or tags:
            change.marks = _marks(number, seq, label, tags)
        store.backend.commit(change)
        self._number, self._head, self._head_row = number, new_head, head_row
        place = Place(number, seq)
        self._tip = _Tip(place, id, digest, step, created, line, root)
        store.images.put(digest, node, instead_of=tip.hash if tip and goes_on else None)
        if extra:
            extra = records.read_extra(meta)
        record = Record(
            seq, id, step, created, operation, parent_id, parent_seq, extra, digest,
            lambda: state_hash, node.size, added,
        )  # fmt: skip
        return Checkpoint(self.name, record, label, tags)

    def _catch_up(self) -> None:
        """After a lost race: go on if the head is still the expected one, else HeadMoved."""
        expected = self._tip
        with self._store.backend.reader() as reader:
            found = reader.session(self._raw_name)
            number = found[0] if found else None
            row = reader.head(number) if number is not None else None
            head = records.unseal_head(number, row) if number is not None and row else None
            if expected is not None and head is not None and head.seq == expected.place.seq:
                self._head, self._head_row = head, row
                return
            actual = None
            if number is not None and head is not None and head.seq:
                actual = lineage.read_row(reader, Place(number, head.seq)).record.id
        raise HeadMoved(
            self.name,
            ids.to_text(expected.id) if expected else None,
            ids.to_text(actual) if actual else None,
        )

    def fork(self, name: str, at: Revision | None = None) -> Session:
        """A new session that begins with this one's state at `at` (the head). No data is copied."""
        with self._store.backend.reader() as reader:
            number, head = self._require(reader)
            place = self._resolve(reader, at, number, head)
            row = lineage.read_row(reader, place)
            home = lineage.session_name(reader, place.session)
            taken = reader.session(records.encode_name(name)) is not None
        other = Session(self._store, name, self.agent)
        if taken or other._number is not None:
            raise SessionExists(f"session {name!r} exists already")
        tip = _Tip.of(place, row)
        extra = {"origin": home} | ({"agent": self.agent} if self.agent else {})
        try:
            other._commit_on(tip, "fork", lambda old, _: _the(old), extra, None, ())
        except SessionExists:
            raise SessionExists(f"session {name!r} exists already") from None
        return other

    def rewind(self, revision: Revision) -> Checkpoint:
        """Move the head to another checkpoint of this session. Nothing is lost: what came after
        stays in the tree, and the next save makes a sibling."""
        with self._lock:
            while True:
                with self._store.backend.reader() as reader:
                    number, head = self._require(reader)
                    place = self._resolve(reader, revision, number, head)
                    row = lineage.read_row(reader, place)
                    if place.session != number:
                        home = lineage.session_name(reader, place.session)
                        raise InvalidRequest(
                            f"that checkpoint lies in session {home!r}, from which this one was forked",
                            hint="fork() from it instead",
                        )
                    checkpoint = lineage.dress(reader, number, self.name, row.record)
                moved = head._replace(seq=place.seq, operations=head.operations + 1)
                try:
                    self._log(number, head, moved, "rewind", {"from": head.seq, "to": place.seq})
                except Moved:
                    continue
                self._tip = _Tip.of(place, row)
                return checkpoint

    def tag(self, revision: Revision | None, *tags: str) -> Checkpoint:
        """Add tags to a checkpoint."""
        wanted = fielding.check_tags(tags)
        return self._annotate(revision, "tag", {"tags": list(wanted)}, None, wanted)

    def label(self, revision: Revision | None, label: str) -> Checkpoint:
        """Give a checkpoint a label, in place of the one it has."""
        fielding.check_text("label", label)
        return self._annotate(revision, "label", {"label": label}, label, ())

    def _annotate(
        self,
        revision: Revision | None,
        kind: str,
        details: dict[str, Any],
        label: str | None,
        tags: tuple[str, ...],
    ) -> Checkpoint:
        with self._lock:
            while True:
                with self._store.backend.reader() as reader:
                    number, head = self._require(reader)
                    place = self._resolve(reader, revision, number, head)
                    if place.session != number:
                        raise InvalidRequest(
                            "that checkpoint lies in another session",
                            hint="annotate it through a handle of its own session",
                        )
                    record = lineage.read_row(reader, place).record
                    before = lineage.dress(reader, number, self.name, record)
                moved = head._replace(operations=head.operations + 1)
                unmarks = []
                if label is not None and before.label is not None:
                    unmarks = [(place.seq, LABEL, records.encode_name(before.label))]
                    details = details | {"was": before.label}
                marks = _marks(number, place.seq, label, tags, moved.operations)
                details = details | {"seq": place.seq}
                try:
                    self._log(number, head, moved, kind, details, marks=marks, unmarks=unmarks)
                except Moved:
                    continue
                return self.get(before)

    def _log(
        self,
        number: int,
        head: Head,
        moved: Head,
        kind: str,
        details: dict[str, Any],
        **changes: Any,
    ) -> None:
        """Commit an operation that is no checkpoint."""
        created = time.time_ns() // 1000
        body = records.seal_operation(number, moved.operations, kind, created, head.last, details)
        row = moved.seal(number)
        change = Change(
            number, head.seal(number), row, operation=(moved.operations, body), **changes
        )
        self._store.backend.commit(change)
        if kind == "rewind" or self._head == head:
            self._head, self._head_row = moved, row

    # -- reading -------------------------------------------------------------------------------

    @overload
    def load(self, revision: Revision | None = None) -> Any: ...
    @overload
    def load(self, revision: Revision | None = None, *, as_: type[M]) -> M: ...
    def load(self, revision: Revision | None = None, *, as_: type[Any] | None = None) -> Any:
        """The state at `revision` (the head), every byte checked. `as_` makes it a model again."""
        with self._lock, self._store.backend.reader() as reader:
            number, head = self._require(reader)
            place = self._resolve(reader, revision, number, head)
            row = lineage.read_row(reader, place)
            with StoredSource(self._store.backend, reader) as source:
                state = loading.load(row.root, row.record.size, source)
            if revision is None:
                self._expect(number, head, reader.head(number), _Tip.of(place, row))
        return state if as_ is None else revive(state, as_)

    def refresh(self) -> Checkpoint | None:
        """Take the session's present head as the expected one."""
        with self._lock, self._store.backend.reader() as reader:
            found = reader.session(self._raw_name)
            if found is None:
                self._number, self._head_row, self._tip = None, None, None
                self._head = Head(0, 0, 0)
                return None
            number, head = self._require(reader)
            place = Place(number, head.seq)
            row = lineage.read_row(reader, place)
            self._expect(number, head, reader.head(number), _Tip.of(place, row))
            if self.agent is None:
                self.agent = records.unseal_session(number, self._raw_name, found[1])[1]
            return lineage.dress(reader, number, self.name, row.record)

    def _expect(self, number: int, head: Head, row: bytes | None, tip: _Tip) -> None:
        self._number, self._head, self._head_row, self._tip = number, head, row, tip

    @property
    def head(self) -> Checkpoint | None:
        """The newest checkpoint of the line the session is on, as it is in the store now."""
        with self._store.backend.reader() as reader:
            if reader.session(self._raw_name) is None:
                return None
            number, head = self._require(reader)
            record = lineage.read_row(reader, Place(number, head.seq)).record
            return lineage.dress(reader, number, self.name, record)

    @property
    def step(self) -> int:
        """The head's step; 0 before the first save."""
        head = self.head
        return head.step if head else 0

    def __len__(self) -> int:
        """How many checkpoints the session has, on all branches."""
        with self._store.backend.reader() as reader:
            return self._require(reader)[1].last if reader.session(self._raw_name) else 0

    def __bool__(self) -> bool:
        return True

    def exists(self) -> bool:
        with self._store.backend.reader() as reader:
            return reader.session(self._raw_name) is not None

    def get(self, revision: Revision | None = None) -> Checkpoint:
        with self._store.backend.reader() as reader:
            number, head = self._require(reader)
            place = self._resolve(reader, revision, number, head)
            record = lineage.read_row(reader, place).record
            name = self.name
            if place.session != number:
                name = lineage.session_name(reader, place.session)
            return lineage.dress(reader, place.session, name, record)

    def history(self, revision: Revision | None = None) -> Iterator[Checkpoint]:
        """The head (or `revision`) and its ancestors, newest first, across forks."""
        with self._store.backend.reader() as reader:
            if reader.session(self._raw_name) is None:
                return
            number, head = self._require(reader)
            at: Place | None = self._resolve(reader, revision, number, head)
        while at is not None:
            # A page at a time, so that no view stays open while the caller works.
            with self._store.backend.reader() as reader:
                page, at = lineage.page(reader, at)
            yield from page

    def tree(self) -> Iterator[Checkpoint]:
        """Every checkpoint of the session, on all branches, in the order of their commits."""
        last = 0
        while True:
            with self._store.backend.reader() as reader:
                if reader.session(self._raw_name) is None:
                    return
                number, head = self._require(reader)
                page = lineage.listing(reader, number, self.name, last + 1, head.last)
            if not page:
                return
            yield from page
            last = page[-1].seq

    def operations(self) -> list[Operation]:
        """Rewinds and annotations, oldest first. (A save's operation is its checkpoint.)"""
        with self._store.backend.reader() as reader:
            number, head = self._require(reader)
            out = []
            for n, body in reader.operations(number, 1, head.operations):
                kind, created, _, details = records.unseal_operation(number, n, body)
                out.append(Operation(self.name, n, kind, created, details))
            return out

    def diff(self, a: Revision, b: Revision | None = None) -> differing.Diff:
        """What changed from `a` to `b` (the head), reading only what differs."""
        with self._store.backend.reader() as reader:
            number, head = self._require(reader)
            rows = [
                lineage.read_row(reader, self._resolve(reader, r, number, head)) for r in (a, b)
            ]
            with StoredSource(self._store.backend, reader) as source:
                return differing.diff(rows[0].node(), rows[1].node(), source)

    def blame(self, path: blaming.Path, revision: Revision | None = None) -> Checkpoint:
        """The checkpoint in which the value at `path` ("plan.budget") last changed."""
        with self._store.backend.reader() as reader:
            number, head = self._require(reader)
            place = self._resolve(reader, revision, number, head)
            with StoredSource(self._store.backend, reader) as source:
                found, record = blaming.blame(reader, source, place, path)
            name = lineage.session_name(reader, found.session)
            return lineage.dress(reader, found.session, name, record)

    def verify(self, *, read_data: bool = True) -> Report:
        """Check this session: every record, and with `read_data` every byte of its states."""
        return self._store.verify(read_data=read_data, sessions=[self.name])

    def _require(self, reader: Reader) -> tuple[int, Head]:
        number = lineage.find_session(reader, self.name)
        return number, lineage.read_head(reader, number)

    def _resolve(self, reader: Reader, revision: Revision | None, number: int, head: Head) -> Place:
        if isinstance(revision, Checkpoint):
            revision = revision.id
        if revision is None:
            if not head.seq:
                raise CheckpointNotFound(f"session {self.name!r} has no checkpoint")
            return Place(number, head.seq)
        return lineage.Resolver(reader, number, self.name, head.seq).find(revision)

    def _tip_at(self, revision: Revision) -> _Tip:
        with self._store.backend.reader() as reader:
            if reader.session(self._raw_name) is None:
                raise SessionNotFound(f"there is no session {self.name!r}")
            number, head = self._require(reader)
            place = self._resolve(reader, revision, number, head)
            return _Tip.of(place, lineage.read_row(reader, place))


def _the(node: Node | None) -> Node:
    if node is None:
        raise InvalidRequest("there is nothing to fork")
    return node


def _path(path: Any) -> tuple[str, ...]:
    parts = (path,) if isinstance(path, str) else path
    if not isinstance(parts, tuple) or not parts or not all(isinstance(p, str) for p in parts):
        raise InvalidRequest(
            f"not a path: {path!r}", hint='a key such as "messages", or a tuple of keys'
        )
    return parts


def _refuse_overlap(paths: list[tuple[str, ...]]) -> None:
    ordered = sorted(paths)
    for a, b in zip(ordered, ordered[1:], strict=False):
        if a == b[: len(a)]:
            raise InvalidRequest(f"two changes of one patch meet at {'.'.join(b)!r}")


def _marks(
    number: int, seq: int, label: str | None, tags: tuple[str, ...], order: int = 0
) -> list[tuple[int, int, bytes, bytes]]:
    named = [(TAG, t) for t in tags] + ([(LABEL, label)] if label is not None else [])
    out = []
    for kind, text in named:
        raw = records.encode_name(text)
        row = records.seal_mark(records.position(number, seq), kind, raw, order)
        out.append((seq, kind, raw, row))
    return out
