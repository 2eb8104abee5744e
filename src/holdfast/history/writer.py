"""Write checkpoints and operations. Each commit is a compare-and-swap on the head's row."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast import ids
from holdfast.errors import (
    UNREADABLE,
    CheckpointNotFound,
    Corrupt,
    Fenced,
    HeadMoved,
    HoldfastError,
    InvalidRequest,
    SessionExists,
)
from holdfast.format import patch, records, state_paths, values
from holdfast.format.delta import lay_out
from holdfast.format.item_streams import Writes
from holdfast.format.nodes import parse
from holdfast.format.records import LABEL, MAX_SEQ, TAG, Head, Info
from holdfast.history import leases, lineage
from holdfast.history.checkpoint import Checkpoint
from holdfast.history.fast_append import Growth, grow
from holdfast.history.lineage import Parent
from holdfast.model import Record
from holdfast.storage.changes import Change, Notes
from holdfast.storage.contract import MissingReference, StaleHead
from holdfast.storage.repository import StoredData, seal_blob
from holdfast.storage.rows import (
    Address,
    BlobWrite,
    CheckpointRef,
    CheckpointRow,
    LeaseRow,
    MarkRow,
    NameRow,
    OperationRow,
    SessionRow,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from holdfast.format.item_streams import RowWrite
    from holdfast.format.nodes import Node
    from holdfast.format.records import IndexTerm
    from holdfast.history.checkpoint_fields import Details
    from holdfast.model import Operation
    from holdfast.storage.reader import Reader
    from holdfast.storage.repository import Repository

    Build = Callable[[Node | None, Writes], Node]

_NO_HASH = bytes(32)
_EMPTY = Head(0, 0, 0, None)


class _Draft(NamedTuple):
    """The next checkpoint of a session, with its state in stored form."""

    session: int
    parent: Parent | None
    line: int
    operation: str
    details: Details
    release: bytes | None
    root: bytes
    state_hash: bytes
    size: int
    rows: Sequence[RowWrite]
    blobs: Sequence[BlobWrite]
    shares: Sequence[bytes]
    """Digests of stored blobs that this state refers to again."""


class Writer:
    """Writes to one session, and keeps the head that it expects there. Not safe for threads."""

    def __init__(self, repository: Repository, name: str) -> None:
        self.repository, self.name = repository, name
        self.raw_name = records.encode_name(name)
        self._hash_prefix: tuple[int | None, bytes] = (None, b"")
        """The number of a session, and what the hashes of its records begin with."""
        self.number: int | None = None
        self.head, self.head_row = _EMPTY, b""
        self.parent: Parent | None = None
        self.growth: Growth | None = None
        self.indexed: set[IndexTerm] = set()
        """Index terms of this session that are known to be stored."""
        self.lease: bytes | None = None
        """The lease token of the run that writes through this handle."""
        self.damage: HoldfastError | None = None
        """The error, if the head cannot be read. Then other checkpoints load, but saves fail."""

    @property
    def hash_prefix(self) -> bytes:
        """The first bytes that are hashed for each record of the session."""
        if self.number is None:
            return records.hash_prefix(self.raw_name)
        if self._hash_prefix[0] != self.number:
            with self.repository.reader() as reader:
                row = reader.session_by_number(self.number)
            row = row or SessionRow(self.number, self.raw_name, b"")
            self._hash_prefix = self.number, lineage.hash_prefix(row)
        return self._hash_prefix[1]

    def find(self, reader: Reader) -> SessionRow | None:
        """Return the session's row; None if there is none. If it was renamed, take the new name."""
        found = reader.session(self.raw_name)
        if found is None and self.number is not None:
            found = reader.session_by_number(self.number)
            if found is not None and found.is_deleted:
                found = None
            if found is not None:
                self.rename(found.name)
        return found

    def rename(self, name: bytes) -> None:
        """Take a new name, which the session has already."""
        self.name, self.raw_name = records.decode_name(name), name

    def read_head(self, reader: Reader) -> None:
        """Read the session's head, and expect it from now on."""
        found = self.find(reader)
        if found is not None:
            self._hash_prefix = found.number, lineage.hash_prefix(found)
        number, head, row = None if found is None else found.number, self.head, self.head_row
        parent: Parent | HoldfastError | None = None
        try:
            if number is not None:
                row, head = lineage.read_head(reader, number)
                parent = Parent.read(reader, Address(number, head.seq)) if head.seq else None
        except UNREADABLE as e:
            parent = e
        self.expect_head(number, head, row, parent)

    def head_at(self, reader: Reader, place: Address) -> Parent:
        """Return the head, which is at `place`. It is read only if this writer did not write it."""
        parent = self.parent
        return (
            parent if parent is not None and parent.place == place else Parent.read(reader, place)
        )

    def save(
        self,
        state: Any,
        details: Details,
        parent: Parent | None = None,
        release: bytes | None = None,
    ) -> Checkpoint:
        """Commit a state as the next checkpoint: a child of the expected head, or of `parent`.

        With `release`, the same commit releases the lease; `release` becomes the lease's row.
        Raises as checkpoint() does.
        """
        growth = self.growth
        if growth is not None and parent is None and release is None:
            flats = growth.added(state, self.repository.images.get(growth.base))
            if flats is not None and (saved := self._grow(growth, flats, "save", details)):
                return saved
        return self.checkpoint(
            "save", lambda old, out: lay_out(state, old, out), details, parent, release
        )

    def append(self, path: Any, items: tuple[Any, ...], details: Details) -> Checkpoint:
        """Commit a checkpoint that adds items to the list at `path`."""
        growth = self.growth
        if growth is not None and len(items) == 1 and path in growth.paths:
            kind = type(items[0])
            if kind is dict or kind is str:
                flats = [values.encode_exact(items[0], 2)]
                if (saved := self._grow(growth, flats, "append", details)) is not None:
                    return saved
        if not items:
            raise InvalidRequest("append() needs at least one item")
        where = state_paths.parse_delta(path)

        def build(old: Node | None, out: Writes) -> Node:
            patch.check_path(old, path, out.source)
            return patch.append(old, where, items, out)

        return self.checkpoint("append", build, details)

    def patch(
        self,
        append: Mapping[Any, Sequence[Any]],
        assign: Mapping[Any, Any],
        drop: Sequence[Any],
        details: Details,
    ) -> Checkpoint:
        """Commit one checkpoint that sets values, extends lists and drops keys, given by path."""

        def build(node: Node | None, out: Writes) -> Node:
            for path in (*assign, *append, *drop):
                patch.check_path(node, path, out.source)
            for path, value in assign.items():
                node = patch.assign(node, state_paths.parse_delta(path), value, out)
            for path, items in append.items():
                node = patch.append(node, state_paths.parse_delta(path), items, out)
            for path in drop:
                node = patch.drop(node, state_paths.parse_delta(path), out)
            return node or patch.EMPTY

        return self.checkpoint("patch", build, details)

    def checkpoint(
        self,
        operation: str,
        build: Build,
        details: Details,
        parent: Parent | None = None,
        release: bytes | None = None,
    ) -> Checkpoint:
        """Commit a checkpoint: a child of the expected head, or of `parent`.

        When this returns, it is as durable as the store's `durability` promises. Raises HeadMoved
        if the session has another head, SessionBusy or Fenced if another process runs the session,
        and Corrupt if the head is damaged.
        """
        if self.damage is not None:
            raise Corrupt(
                f"the head of session {self.name!r} is damaged: {self.damage.message}",
                hint="rewind() to a checkpoint that loads, or fork() from it",
            )
        while True:
            if self.head.lease != self.lease:
                self._check_free()
            base = parent or self.parent
            try:
                checkpoint = self._commit(base, operation, build, details, release)
            except (StaleHead, SessionExists):
                self._catch_up()
            except MissingReference:
                self._check_there(parent)
            except BaseException:
                self.growth = None
                if base is not None:
                    self.repository.images.drop(base.hash)
                raise
            else:
                for observer in self.repository.observers:
                    observer.committed(self.name, checkpoint)
                return checkpoint

    def _grow(
        self, growth: Growth, flats: list[bytes], how: str, details: Details
    ) -> Checkpoint | None:
        """Commit on the fast path. Return None, and write nothing, if it does not apply."""
        parent, head = self.parent, self.head
        extra, label, tags = details
        if parent is None or parent.place[1] != head.last or head.lease != self.lease:
            return None
        if label or tags or "key" in extra:
            return None
        if extra and not self.indexed.issuperset(records.session_terms(parent.place[0], extra)):
            return None
        try:
            checkpoint = grow(self, growth, parent, flats, how, extra)
        except StaleHead:
            self.growth = None
            self._catch_up()
            return None
        except BaseException:
            self.growth = None
            raise
        if checkpoint is not None:
            for observer in self.repository.observers:
                observer.committed(self.name, checkpoint)
        return checkpoint

    def release(self, row: bytes) -> None:
        """Release the lease without a checkpoint; `row` becomes the lease's row.

        Raises Fenced if another worker has the lease.
        """
        while self.number is not None:
            head = self.head._replace(lease=None)
            head_row = head.seal(self.number)
            notes = Notes(lease=LeaseRow(b"", row))
            change = Change(self.number, self.head_row, head_row, notes=notes)
            try:
                self.repository.backend.commit(change.batch())
            except StaleHead:
                self._catch_up()
            else:
                self.head, self.head_row = head, head_row
                self.lease = None
                return

    def _node(self, parent: Parent) -> Node:
        """Return the root node of a checkpoint, with its image if that is cached."""
        growth = self.growth
        if growth is not None and parent is self.parent and growth.items:
            growth.rebase(self.repository.images, parent.hash)
        return self.repository.images.get(parent.hash) or parse(parent.root, root=True)

    def fork(self, parent: Parent, details: Details, build: Build | None = None) -> None:
        """Begin the session as a fork of another session's checkpoint.

        The first state is that of the checkpoint, or the result of `build`. Raises SessionExists,
        or CheckpointNotFound if the checkpoint was just deleted.
        """
        try:
            self._commit(parent, "fork", build or _unchanged, details, None)
        except SessionExists:
            raise SessionExists(f"session {self.name!r} exists already") from None
        except MissingReference:
            raise CheckpointNotFound("the checkpoint was just deleted") from None

    def _commit(
        self,
        parent: Parent | None,
        operation: str,
        build: Build,
        details: Details,
        release: bytes | None,
    ) -> Checkpoint:
        repository, head = self.repository, self.head
        number = self.number or repository.new_session()
        if head.last >= MAX_SEQ:
            raise InvalidRequest(f"session {self.name!r} has {head.last} checkpoints, the maximum")
        # Only a child of the newest checkpoint knows the ends of the session's streams. Any other
        # child writes to new streams.
        continues = parent is not None and parent.place == (number, head.last)
        old = None if parent is None else self._node(parent)
        line = parent.line if continues and parent else repository.new_stream()
        with repository.data() as source:
            out = Writes(source, line, repository.new_stream)
            node = build(old, out)
            blobs, shares = _blobs(out, source) if out.blobs else ([], [])
        draft = _Draft(
            number, parent, line, operation, details, release,
            node.stored, node.hash, node.size, out.rows, blobs, shares,
        )  # fmt: skip
        record = self._commit_state(draft)
        repository.images.put(record.hash, node, parent.hash if continues and parent else None)
        self.growth = Growth.begin(record.hash, old, node, line)
        return Checkpoint(self.name, record, details.label, details.tags)

    def _commit_state(self, draft: _Draft) -> Record:
        """Commit a state in stored form, and expect the new head. Return its record."""
        number, parent, release = draft.session, draft.parent, draft.release
        extra, label, tags = draft.details
        record, body = self._seal_record(draft)
        seq, id, own_parent = record.seq, record.id, record.own_parent
        lease = self.lease if release is None else None
        head = Head(seq, seq, self.head.operations, own_parent, lease)
        head_row = head.seal(number)
        row = CheckpointRow(seq, id, body)
        change = Change(number, self.head_row, head_row, None, row, draft.rows, draft.blobs)
        change.parent = None if parent is None else CheckpointRef(parent.place.seq, parent.id)
        notable = extra or label is not None or tags or draft.shares or release is not None
        if notable or parent is not self.parent:
            change.notes = self._notes(draft, seq, id)
            if release is not None:
                change.notes.lease = LeaseRow(b"", release)
        if self.number is None:
            origin = change.notes.origin if change.notes else None
            position = records.position(*origin) if origin else None
            info = Info(record.created_us, extra.get("agent"), position)
            session = records.seal_session(number, self.raw_name, info)
            change.create = NameRow(self.raw_name, session)
        self.repository.backend.commit(change.batch())
        # The parent is set before the head's row. If the process forks between the two, the child
        # has the new parent and the old row: its commit is refused, and _catch_up then reads the
        # new row.
        self.parent = Parent(
            Address(number, seq), id, record.hash, record.step, record.created_us, draft.line,
            draft.root, own_parent,
        )  # fmt: skip
        if self.number is None:
            self._hash_prefix = number, self.hash_prefix
        self.number, self.head, self.head_row = number, head, head_row
        self.lease = lease
        if record.extra:
            self.indexed.update(records.session_terms(number, record.extra))
        return record

    def _seal_record(self, draft: _Draft) -> tuple[Record, bytes]:
        """Return the record of the next checkpoint, and its row."""
        parent, operation, root, size = draft.parent, draft.operation, draft.root, draft.size
        state_hash, extra = draft.state_hash, draft.details.extra
        seq = self.head.last + 1
        created = time.time_ns() // 1000
        if parent is None:
            id = ids.new_id()
            step, parent_seq, parent_id, parent_hash, skip = 1, None, None, _NO_HASH, None
        else:
            (_, parent_seq), parent_id, parent_hash, step, before, _, _, skip = parent
            id = ids.new_id(parent_id)
            step += 1
            created = max(created, before)
        meta = records.metadata(step, created, operation, parent_seq, parent_id, extra)
        digest = records.record_hash(self.hash_prefix, seq, id, meta, state_hash, parent_hash)
        added = sum([len(row.body) for row in draft.rows], len(root))
        added += sum([len(blob.body) for blob in draft.blobs])
        body = records.seal_checkpoint(
            draft.session, seq, id, meta, digest, draft.line, size, added, root, skip
        )
        if extra:
            extra = records.read_extra(meta)  # a copy, as the caller may change the original
        record = Record(
            seq, id, step, created, operation, parent_id, parent_seq, extra, digest,
            lambda: state_hash, size, added, skip,
        )  # fmt: skip
        return record, body

    def _notes(self, draft: _Draft, seq: int, id: bytes) -> Notes:
        """Return the rest of the commit: index terms, marks, and checkpoints that must exist."""
        number, parent = draft.session, draft.parent
        extra, label, tags = draft.details
        notes = Notes(terms=records.index_terms(id, extra, label, tags), shares=draft.shares)
        if "key" in extra:
            notes.key = records.encode_name(extra["key"])
        new = [f for f in records.session_terms(number, extra) if f not in self.indexed]
        notes.terms = [*notes.terms, *new]
        if label is not None or tags:
            notes.marks = seal_marks(number, seq, label, tags)
        if parent is not None and parent is not self.parent:
            notes.needs = [parent.place]
            if "origin" in extra:
                notes.origin = parent.place
        return notes

    def _check_there(self, parent: Parent | None) -> None:
        """After MissingReference: raise CheckpointNotFound if the parent was deleted.

        Otherwise a blob was freed, and the caller tries again, which writes the blob.
        """
        if parent is None:
            return
        with self.repository.reader() as reader:
            place = parent.place
            found = reader.checkpoint(*place)
            if (
                found is None
                or found.id != parent.id
                or lineage.is_checkpoint_deleted(reader, place)
            ):
                raise CheckpointNotFound("the parent was just deleted")

    def _check_free(self) -> None:
        """Raise Fenced if this writer's run lost its lease, SessionBusy if another run has one."""
        if self.lease is not None:
            raise Fenced(f"session {self.name!r} was taken over by another worker")
        if self.number is not None:
            with self.repository.reader() as reader:
                leases.check_free(reader, self.number, self.name, self.head)

    def _catch_up(self) -> None:
        """After a refused commit: read the head's row again.

        Raises HeadMoved if the head is no longer the expected one.
        """
        expected = self.parent
        with self.repository.reader() as reader:
            self.find(reader)
            fresh = Writer(self.repository, self.name)
            fresh.read_head(reader)
        if self.lease is not None and fresh.head.lease != self.lease:
            self._check_free()
        actual = fresh.parent
        # Compare ids too: if a server crash lost our checkpoint, another may have its number.
        same = (expected and expected[:2]) == (actual and actual[:2])
        if expected is None and actual is None and fresh.damage is None:
            # No head was expected and there is none, so none has moved. The session's number may
            # be another one: gc removed the session, or another process began it and undid that.
            self.expect_head(fresh.number, fresh.head, fresh.head_row, None)
            return
        if same and fresh.number == self.number and fresh.damage is None:
            self.head, self.head_row = fresh.head, fresh.head_row
            return
        raise HeadMoved(
            self.name,
            ids.to_text(expected.id) if expected else None,
            ids.to_text(actual.id) if actual else None,
        )

    def expect_head(
        self, number: int | None, head: Head, row: bytes, parent: Parent | HoldfastError | None
    ) -> None:
        """Expect the given head from now on; without a number, expect that there is no session."""
        self.growth = self.damage = self.parent = None
        if number is None:
            head, row, parent = _EMPTY, b"", None
        if number != self.number:
            self.number, self.indexed = number, set()
        self.head, self.head_row = head, row
        if isinstance(parent, HoldfastError):
            self.damage = parent
        else:
            self.parent = parent

    def operation(
        self, number: int, row: bytes, head: Head, done: Operation, **notes: Any
    ) -> bytes:
        """Commit an operation, and return the head's new row.

        `row` is the head's row that the operation was planned on. Raises StaleHead if it changed
        since.
        """
        _, count, kind, created, details, _ = done
        body = records.seal_operation(number, count, kind, created, head.last, details)
        new_row = head.seal(number)
        change = Change(
            number, row, new_row, notes=Notes(operation=OperationRow(count, body), **notes)
        )
        self.repository.backend.commit(change.batch())
        if self.head_row == row:
            self.head, self.head_row = head, new_row
        return new_row


def _unchanged(node: Node | None, _: Writes) -> Node:
    if node is None:
        raise InvalidRequest("there is nothing to fork")
    return node


def _blobs(out: Writes, source: StoredData) -> tuple[list[BlobWrite], list[bytes]]:
    """Return rows for the blobs to write, and the digests of stored blobs to share.

    A blob that is stored and intact is shared. A damaged one is written again.
    """
    blobs, shares = [], []
    for digest, flat in out.blobs.items():
        state = source.blob_state(digest, len(flat))
        if state == "sound":
            shares.append(digest)
        else:
            blobs.append(BlobWrite(digest, seal_blob(digest, flat), state == "damaged"))
    return blobs, shares


def seal_marks(
    number: int, seq: int, label: str | None, tags: tuple[str, ...], order: int = 0
) -> list[MarkRow]:
    named = [(TAG, t) for t in tags] + ([(LABEL, label)] if label is not None else [])
    out = []
    for kind, text in named:
        raw = records.encode_name(text)
        row = records.seal_mark(records.position(number, seq), kind, raw, order)
        out.append(MarkRow(seq, kind, raw, row))
    return out
