"""Adopt a fork: add the checkpoints of its line to the session that it was forked from.

The new checkpoints have ids of their own, and otherwise the fields of the fork's checkpoints. They
share all data with the fork, which stays as it is. They do not say which run saved them, nor how
its usage splits into calls, because that refers to the journal of the fork.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast import ids
from holdfast.errors import CheckpointNotFound, Corrupt, InvalidRequest, KeyTaken
from holdfast.format import records
from holdfast.history import lineage
from holdfast.history.lineage import Marks, Parent
from holdfast.history.operation_effects import Outcome
from holdfast.history.writer import seal_marks
from holdfast.storage.changes import Copied
from holdfast.storage.rows import Address, CheckpointRow, KeyRow, MarkRow

if TYPE_CHECKING:
    from holdfast.format.records import IndexTerm
    from holdfast.history.operation_effects import OpContext
    from holdfast.storage.reader import Reader

_OF_THE_FORK = {"origin", "run", "spent"}
"""Fields that mean nothing in another session."""


class Adoption:
    """Makes the checkpoints that a session adopts, each a child of the one before."""

    def __init__(self, context: OpContext, hash_prefix: bytes, stream: int) -> None:
        self._reader, self._number = context.reader, context.number
        self._context, self._prefix, self._stream = context, hash_prefix, stream
        self._checkpoints: list[CheckpointRow] = []
        self._marks: list[MarkRow] = []
        self._terms: dict[IndexTerm, None] = {}
        self._keys: list[KeyRow] = []

    def outcome(self, fork: str, details: dict[str, Any]) -> Outcome:
        """Return the outcome of adopting the line of `fork`, for an operation with `details`.

        Raises InvalidRequest if it is no fork of this session, KeyTaken if both have a checkpoint
        with the same key, and Corrupt if a checkpoint of the line is damaged.
        """
        base, line = self._line(fork)
        parent = Parent.read(self._reader, base)
        head = self._context.head
        if head.last + len(line) > records.MAX_SEQ:
            raise InvalidRequest(f"a session has at most {records.MAX_SEQ} checkpoints")
        marks = _marks(self._reader, line)
        for place in line:
            parent = self._add(place, marks.get(place, Marks()), parent)
        last = parent.place.seq
        notes = {
            # As in a copy: refused if gc has begun since, which may free the data of the fork.
            "copied": Copied(self._reader.turnover().freed, self._checkpoints),
            "marks": self._marks,
            "terms": [*self._terms],
            "keys": self._keys,
            "needs": [base],
        }
        details = {"from": head.seq, "to": last, "adopted": fork, **details}
        return Outcome(details, last, parent, notes, last=last)

    def _line(self, fork: str) -> tuple[Address, list[Address]]:
        """Return the checkpoint of this session below the fork, and the fork's line, oldest first.

        The line includes checkpoints of other forks, if the fork was forked from them.
        """
        number = lineage.find_session(self._reader, fork)
        _, head = lineage.read_head(self._reader, number)
        if not head.seq:
            raise CheckpointNotFound(f"session {fork!r} has no checkpoint")
        line: list[Address] = []
        for place, record in lineage.ancestors(
            self._reader, Address(number, head.seq), head.parent
        ):
            if place.session == self._number:
                if not line:
                    break  # the session itself
                return place, line[::-1]
            if record.damaged:
                raise Corrupt(f"checkpoint {place.seq} of the fork is damaged: {record.damaged}")
            line.append(place)
        raise InvalidRequest(
            f"{fork!r} is no fork of this session, or none of the history that they share is left",
            hint="session.forks() lists its forks",
        )

    def _add(self, place: Address, marks: Marks, parent: Parent) -> Parent:
        """Add a copy of a checkpoint as a child of `parent`. Return it, as the next parent."""
        row = lineage.read_row(self._reader, place)
        record, number = row.record, self._number
        seq = self._context.head.last + len(self._checkpoints) + 1
        id = ids.new_id(parent.id)
        extra = {k: v for k, v in record.extra.items() if k not in _OF_THE_FORK}
        extra["adopted"] = ids.to_text(record.id)
        if "key" in extra:
            self._add_key(extra["key"], seq)
        step, created = parent.step + 1, max(record.created_us, parent.created_us)
        operation = "save" if record.is_fork else record.operation
        meta = records.metadata(step, created, operation, parent.place.seq, parent.id, extra)
        state_hash = record.state_hash()
        digest = records.record_hash(self._prefix, seq, id, meta, state_hash, parent.hash)
        body = records.seal_checkpoint(
            number, seq, id, meta, digest, self._stream, record.size, len(row.root), row.root,
            parent.parent_seq,
        )  # fmt: skip
        self._checkpoints.append(CheckpointRow(seq, id, body))
        self._marks += seal_marks(number, seq, marks.label, marks.tags)
        terms = records.index_terms(id, extra, marks.label, marks.tags)
        self._terms |= dict.fromkeys([*terms, *records.session_terms(number, extra)])
        return Parent(
            Address(number, seq), id, digest, step, created, self._stream, row.root,
            parent.place.seq,
        )  # fmt: skip

    def _add_key(self, key: str, seq: int) -> None:
        raw = records.encode_name(key)
        if self._reader.find_key(self._number, raw) is not None or any(
            raw == row.key for row in self._keys
        ):
            raise KeyTaken(f"the session and the fork both have a checkpoint with the key {key!r}")
        self._keys.append(KeyRow(raw, seq))


def _marks(reader: Reader, line: list[Address]) -> dict[Address, Marks]:
    """Return the labels and tags of checkpoints of several sessions."""
    found = {}
    for session in {place.session for place in line}:
        seqs = [place.seq for place in line if place.session == session]
        for seq, marks in lineage.marks_of(reader, session, min(seqs), max(seqs)).items():
            found[Address(session, seq)] = marks
    return found
