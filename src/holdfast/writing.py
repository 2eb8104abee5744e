"""The one way to write: a checkpoint or an operation, by compare-and-swap on the head's row."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast import ids, leases, lineage
from holdfast.backends.base import Change, Gone, Moved, Notes
from holdfast.checkpoint import Checkpoint
from holdfast.codec import records, values
from holdfast.codec.nodes import parse
from holdfast.codec.records import LABEL, MAX_SEQ, TAG, Head, Info
from holdfast.codec.streams import Writes
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
from holdfast.growth import Growth, grow
from holdfast.lineage import Place
from holdfast.model import Record
from holdfast.source import StoredSource, seal_blob

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.backends.base import Reader
    from holdfast.codec.nodes import Node
    from holdfast.codec.streams import RowWrite
    from holdfast.model import Operation
    from holdfast.store import Store

    Build = Callable[[Node | None, Writes], Node]

_NO_HASH = bytes(32)
_EMPTY = Head(0, 0, 0, None)


class Tip(NamedTuple):
    """The checkpoint that the next one is built on."""

    place: Place
    id: bytes
    hash: bytes
    step: int
    created_us: int
    line: int
    root: bytes
    parent_seq: int | None
    """The seq of its parent, if that lies in the same session."""

    @classmethod
    def read(cls, reader: Reader, place: Place) -> Tip:
        row = lineage.read_row(reader, place)
        r = row.record
        near = None if "origin" in r.extra else r.parent_seq
        return cls(place, r.id, r.hash, r.step, r.created_us, row.line, row.root, near)


class _Laid(NamedTuple):
    """A state that is laid out: its root, and what has to be written for it."""

    root: bytes
    state_hash: bytes
    size: int
    rows: Sequence[RowWrite]
    blobs: Sequence[tuple[bytes, bytes, bool]]
    shares: Sequence[bytes]
    """Digests of blobs that were there before, and are referred to anew."""


class Writer:
    """What a handle expects of its session, and how it writes. Not safe for threads by itself."""

    def __init__(self, store: Store, name: str) -> None:
        self.store, self.name = store, name
        self.raw_name = records.encode_name(name)
        self.hash_prefix = records.hash_prefix(self.raw_name)
        self.number: int | None = None
        self.head, self.head_row = _EMPTY, b""
        self.tip: Tip | None = None
        self.growth: Growth | None = None
        self.indexed: set[tuple[int, bytes, bytes]] = set()
        """Entries of this session that the index for searches is known to have."""
        self.lease: bytes | None = None
        """The token of the run that writes through this handle."""
        self.parting: tuple[bytes, bytes] | None = None
        """What becomes of the lease with the next checkpoint, which gives the session back."""
        self.damage: HoldfastError | None = None
        """Set when the head cannot be read: other checkpoints can, but nothing be added to it."""

    def look(self, reader: Reader) -> None:
        """Expect the head that the session has now."""
        found = reader.session(self.raw_name)
        number, head, row = None if found is None else found[0], self.head, self.head_row
        tip: Tip | HoldfastError | None = None
        try:
            if number is not None:
                row, head = lineage.read_head(reader, number)
                tip = Tip.read(reader, Place(number, head.seq)) if head.seq else None
        except UNREADABLE as e:
            tip = e
        self.stand(number, head, row, tip)

    def head_at(self, reader: Reader, place: Place) -> Tip:
        """The head, which lies there now; it is known if we have written it."""
        tip = self.tip
        return tip if tip is not None and tip.place == place else Tip.read(reader, place)

    def checkpoint(
        self,
        operation: str,
        build: Build,
        extra: dict[str, Any],
        label: str | None = None,
        tags: tuple[str, ...] = (),
        parent: Tip | None = None,
    ) -> Checkpoint:
        """Commit a checkpoint on the expected head (as a child of `parent`, if given)."""
        if self.damage is not None:
            raise Corrupt(
                f"the head of session {self.name!r} is damaged: {self.damage.message}",
                hint="rewind() to a checkpoint that loads, or fork() from it",
            )
        while True:
            if self.head.lease != self.lease:
                self._check_free()
            tip = parent or self.tip
            try:
                checkpoint = self._commit(tip, operation, build, extra, label, tags)
            except (Moved, SessionExists):
                self._catch_up()
            except Gone:
                self._check_there(parent)
            except BaseException:
                self.growth = None
                if tip is not None:
                    self.store.images.drop(tip.hash)
                raise
            else:
                return checkpoint

    def append(self, path: Any, items: tuple[Any, ...], extra: dict[str, Any]) -> Checkpoint | None:
        """An item for the list at `path`, on the hot path; None where that does not apply."""
        growth = self.growth
        if growth is None or growth.key != path or len(items) != 1:
            return None
        kind = type(items[0])
        if kind is not dict and kind is not str:
            return None
        return self._grow(growth, [values.encode_exact(items[0], 2)], "append", extra)

    def save(self, state: Any, extra: dict[str, Any]) -> Checkpoint | None:
        """A state that grew, on the hot path; None where that does not apply."""
        growth = self.growth
        if growth is None:
            return None
        flats = growth.added(state, self.store.images.get(growth.base))
        return None if flats is None else self._grow(growth, flats, "save", extra)

    def _grow(
        self, growth: Growth, flats: list[bytes], how: str, extra: dict[str, Any]
    ) -> Checkpoint | None:
        tip, head = self.tip, self.head
        if tip is None or tip.place[1] != head.last or head.lease != self.lease or "key" in extra:
            return None
        if self.parting is not None:
            return None
        if extra and not self.indexed.issuperset(records.session_facets(tip.place[0], extra)):
            return None
        try:
            return grow(self, growth, tip, flats, how, extra)
        except Moved:
            self.growth = None
            self._catch_up()
            return None
        except BaseException:
            self.growth = None
            raise

    def _node(self, tip: Tip) -> Node:
        """The layout of a checkpoint, with its image if that is in memory."""
        growth = self.growth
        if growth is not None and tip is self.tip and growth.items:
            growth.rebase(self.store.images, tip.hash)
        return self.store.images.get(tip.hash) or parse(tip.root, root=True)

    def fork(self, tip: Tip, extra: dict[str, Any]) -> None:
        """Begin the session with the state of a checkpoint of another one."""
        try:
            self._commit(tip, "fork", _unchanged, extra, None, ())
        except SessionExists:
            raise SessionExists(f"session {self.name!r} exists already") from None
        except Gone:
            raise CheckpointNotFound("the checkpoint was deleted meanwhile") from None

    def _commit(
        self,
        tip: Tip | None,
        operation: str,
        build: Build,
        extra: dict[str, Any],
        label: str | None,
        tags: tuple[str, ...],
    ) -> Checkpoint:
        store, head = self.store, self.head
        number = self.number or store.new_session()
        if head.last >= MAX_SEQ:
            raise InvalidRequest(f"session {self.name!r} has {head.last} checkpoints, the most")
        # Only a child of the newest checkpoint knows where the session's streams end.
        goes_on = tip is not None and tip.place == (number, head.last)
        old = None if tip is None else self._node(tip)
        line = tip.line if goes_on and tip else store.new_stream()
        with StoredSource(store.backend) as source:
            out = Writes(source, line, store.new_stream)
            node = build(old, out)
            blobs, shares = _blobs(out, source) if out.blobs else ([], [])
        laid = _Laid(node.stored, node.hash, node.size, out.rows, blobs, shares)
        checkpoint = self._seal(tip, number, line, operation, laid, extra, label, tags)
        digest = checkpoint._record.hash
        store.images.put(digest, node, tip.hash if goes_on and tip else None)
        self.growth = Growth.begin(digest, old, node, line)
        return checkpoint

    def _seal(
        self,
        tip: Tip | None,
        number: int,
        line: int,
        operation: str,
        laid: _Laid,
        extra: dict[str, Any],
        label: str | None,
        tags: tuple[str, ...],
    ) -> Checkpoint:
        """Commit a state that is laid out."""
        root, state_hash, size, rows, blobs, shares = laid
        head = self.head
        seq = head.last + 1
        created = time.time_ns() // 1000
        if tip is None:
            id = ids.new_id()
            step, parent_seq, parent_id, parent_hash, skip = 1, None, None, _NO_HASH, None
        else:
            (_, parent_seq), parent_id, parent_hash, step, before, _, _, skip = tip
            id = ids.new_id(parent_id)
            step += 1
            created = max(created, before)
        meta = records.metadata(step, created, operation, parent_seq, parent_id, extra)
        digest = records.record_hash(self.hash_prefix, seq, id, meta, state_hash, parent_hash)
        added = len(root) + sum([len(r[3]) for r in rows]) + sum([len(b[1]) for b in blobs])
        body = records.seal_checkpoint(number, seq, id, meta, digest, line, size, added, root, skip)
        near = None if "origin" in extra else parent_seq
        lease = self.lease if self.parting is None else None
        new_head = Head(seq, seq, head.operations, near, lease)
        head_row = new_head.seal(number)
        change = Change(number, self.head_row, head_row, None, (seq, id, body), rows, blobs)
        change.parent = None if tip is None else (tip.place.seq, tip.id)
        if extra or label is not None or tags or shares or tip is not self.tip:
            change.notes = self._notes(tip, number, seq, id, extra, label, tags, shares)
            change.notes.lease = self.parting
        agent = extra.get("agent")
        if self.number is None:
            origin = change.notes.origin if change.notes else None
            info = Info(created, agent, records.position(*origin) if origin else None)
            change.create = (self.raw_name, records.seal_session(number, self.raw_name, info))
        if extra:
            extra = records.read_extra(meta)  # what was stored, not what the caller may change
        self.store.backend.commit(change)
        # First: a process forked off in between, with the old row, then looks where the head is.
        self.tip = Tip(Place(number, seq), id, digest, step, created, line, root, near)
        self.number, self.head, self.head_row = number, new_head, head_row
        self.lease, self.parting = lease, None
        if extra:
            self.indexed.update(records.session_facets(number, extra))
        record = Record(
            seq, id, step, created, operation, parent_id, parent_seq, extra, digest,
            lambda: state_hash, size, added, skip,
        )  # fmt: skip
        return Checkpoint(self.name, record, label, tags)

    def _notes(
        self,
        tip: Tip | None,
        number: int,
        seq: int,
        id: bytes,
        extra: dict[str, Any],
        label: str | None,
        tags: tuple[str, ...],
        shares: Sequence[bytes],
    ) -> Notes:
        """What else a checkpoint brings: index entries, marks, and what must be there still."""
        notes = Notes(facets=records.facets(id, extra, label, tags), shares=shares)
        if "key" in extra:
            notes.key = records.encode_name(extra["key"])
        new = [f for f in records.session_facets(number, extra) if f not in self.indexed]
        notes.facets = [*notes.facets, *new]
        if label is not None or tags:
            notes.marks = seal_marks(number, seq, label, tags)
        if tip is not None and tip is not self.tip:
            notes.needs = [tip.place]
            if "origin" in extra:
                notes.origin = tip.place
        return notes

    def _check_there(self, parent: Tip | None) -> None:
        """After Gone: what is left to try again, if a blob went; an error, if the parent did."""
        if parent is None:
            return
        with self.store.backend.reader() as reader:
            place = parent.place
            found = reader.checkpoint(*place)
            if found is None or found[0] != parent.id or lineage.is_buried(reader, place):
                raise CheckpointNotFound("the parent was deleted meanwhile")

    def _check_free(self) -> None:
        """Raise if it is somebody else's turn to write: of a run, if that is not over."""
        if self.lease is not None:
            raise Fenced(f"session {self.name!r} was taken over by another worker")
        if self.number is not None:
            with self.store.backend.reader() as reader:
                leases.check_free(reader, self.number, self.name, self.head)

    def _catch_up(self) -> None:
        """After a lost race: go on if the head is still the expected one, else HeadMoved."""
        expected = self.tip
        with self.store.backend.reader() as reader:
            fresh = Writer(self.store, self.name)
            fresh.look(reader)
        if self.lease is not None and fresh.head.lease != self.lease:
            self._check_free()
        actual = fresh.tip
        # By id as well: after a crash that lost ours, another's may have come to its number.
        same = (expected and expected[:2]) == (actual and actual[:2])
        if expected is None and actual is None and fresh.damage is None:
            # There is none to have moved, even where the session is another: gc has removed it, or
            # somebody else has begun it and taken that back.
            self.stand(fresh.number, fresh.head, fresh.head_row, None)
            return
        if same and fresh.number == self.number and fresh.damage is None:
            self.head, self.head_row = fresh.head, fresh.head_row
            return
        raise HeadMoved(
            self.name,
            ids.to_text(expected.id) if expected else None,
            ids.to_text(actual.id) if actual else None,
        )

    def stand(
        self, number: int | None, head: Head, row: bytes, tip: Tip | HoldfastError | None
    ) -> None:
        """Expect a head that is known already; with no number: that there is no such session."""
        self.growth = self.damage = self.tip = None
        if number is None:
            head, row, tip = _EMPTY, b"", None
        if number != self.number:
            self.number, self.indexed = number, set()
        self.head, self.head_row = head, row
        if isinstance(tip, HoldfastError):
            self.damage = tip
        else:
            self.tip = tip

    def operation(
        self, number: int, row: bytes, head: Head, done: Operation, **notes: Any
    ) -> bytes:
        """Commit a change that is no checkpoint; returns the head's new row.

        `row` is the head's row that it was planned on. Raises Moved if that has changed since.
        """
        _, count, kind, created, details = done
        body = records.seal_operation(number, count, kind, created, head.last, details)
        new_row = head.seal(number)
        change = Change(number, row, new_row, notes=Notes(operation=(count, body), **notes))
        self.store.backend.commit(change)
        if self.head_row == row:
            self.head, self.head_row = head, new_row
        return new_row


def _unchanged(node: Node | None, _: Writes) -> Node:
    if node is None:
        raise InvalidRequest("there is nothing to fork")
    return node


def _blobs(
    out: Writes, source: StoredSource
) -> tuple[list[tuple[bytes, bytes, bool]], list[bytes]]:
    """Rows for new blobs. One that is there and sound is shared; a damaged one is rewritten."""
    blobs, shares = [], []
    for digest, flat in out.blobs.items():
        state = source.blob_state(digest, len(flat))
        if state == "sound":
            shares.append(digest)
        else:
            blobs.append((digest, seal_blob(digest, flat), state == "damaged"))
    return blobs, shares


def seal_marks(
    number: int, seq: int, label: str | None, tags: tuple[str, ...], order: int = 0
) -> list[tuple[int, int, bytes, bytes]]:
    named = [(TAG, t) for t in tags] + ([(LABEL, label)] if label is not None else [])
    out = []
    for kind, text in named:
        raw = records.encode_name(text)
        row = records.seal_mark(records.position(number, seq), kind, raw, order)
        out.append((seq, kind, raw, row))
    return out
