"""The operation log of a session, with undo and redo.

An operation is a change that makes no checkpoint: rewind, repair, label, tag, delete, prune, undo
or redo. The log is one sequence of the session's checkpoints and of the operations between them;
each operation stores the newest checkpoint of its time. An undo or redo stores the entries that the
next undo and redo act on, so that the whole log need not be read to find them.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast import clock, ids
from holdfast.errors import (
    CheckpointNotFound,
    Conflict,
    Corrupt,
    HeadMoved,
    InvalidRequest,
    SessionExists,
    SessionNotFound,
)
from holdfast.format import records
from holdfast.history import leases, lineage
from holdfast.history.adopt import Adoption
from holdfast.history.lineage import Parent
from holdfast.history.operation_effects import GONE, OpContext, Outcome, apply, revert
from holdfast.model import DAMAGED, Operation, deleted
from holdfast.storage.changes import Change, Notes
from holdfast.storage.contract import MissingReference, StaleHead
from holdfast.storage.rows import Address, SessionRow

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Callable

    from holdfast.history.checkpoint import Checkpoint
    from holdfast.history.writer import Writer
    from holdfast.storage.reader import Reader

    Ref = tuple[str, int]

CHECKPOINT, OPERATION = "checkpoint", "operation"
_TRIES = 20
"""How often an operation is planned again because a checkpoint was deleted before the commit."""


class Operator:
    """Plans and commits the operations of one session."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    @property
    def name(self) -> str:
        """The name of the session."""
        return self._writer.name

    def run(
        self, kind: str, plan: Callable[[OpContext], Outcome], *, deleted: bool = False
    ) -> Operation:
        """Plan an operation and commit it; plan again if the session changed in between.

        `deleted` allows a deleted session. Raises SessionNotFound, and SessionBusy if the operation
        sets the head while a process runs the session.
        """
        while (done := self.attempt(kind, plan, deleted=deleted)) is None:
            pass  # not reached: this plan never returns None
        return done

    def attempt(
        self,
        kind: str,
        plan: Callable[[OpContext], Outcome | None],
        *,
        deleted: bool = False,
        logged: bool = True,
    ) -> Operation | None:
        """Do the same as run(), but return None if the plan returns None: there is nothing to do.

        If not `logged`, undo() cannot take it back. An operation that sets the head is logged in
        any case.
        """
        failures = 0
        while True:
            with self._writer.repository.reader() as reader:
                context = self._context(reader, deleted=deleted)
                outcome = plan(context)
                if outcome is None:
                    return None
                if outcome.head is not None:
                    self._end_run(context)
                done = self._draft(context, outcome.kind or kind, outcome)
            try:
                if logged or outcome.head is not None:
                    committed = self._commit(done, context, outcome)
                else:
                    committed = self._commit_unlogged(context, outcome)
                if committed:
                    return done
            except MissingReference:
                failures += 1
                if failures > _TRIES:
                    what = "a checkpoint that this builds on was just deleted"
                    raise CheckpointNotFound(what) from None

    def _end_run(self, context: OpContext) -> None:
        """End the session's open run, because the head moves or the session is deleted.

        Raises SessionBusy if a process runs the session now.
        """
        leases.check_free(context.reader, context.number, self._writer.name, context.head)
        context.lease = leases.closed(context.reader, context.number)

    def _draft(self, context: OpContext, kind: str, outcome: Outcome) -> Operation:
        """Return the operation as it will be logged."""
        head = context.head.seq if outcome.head is None else outcome.head
        details = outcome.details | {"head": head}
        if _deletes(context, outcome):
            # Orders the deletions of sessions with the same name. Time does not, as clocks can be
            # set back; session numbers do not, as they are reserved in blocks.
            details["order"] = self._writer.repository.backend.reserve("session", 1)
        return Operation(self._writer.name, context.next, kind, time.time_ns() // 1000, details)

    def _commit(self, done: Operation, context: OpContext, outcome: Outcome) -> bool:
        """Commit the operation. Return False if the session changed since it was planned."""
        last = context.head.last if outcome.last is None else outcome.last
        head = context.head._replace(operations=context.next, last=last)
        parent, notes = outcome.parent, outcome.notes
        if outcome.head is not None:
            notes = notes | {"lease": context.lease}
            head = head._replace(lease=None)
            if outcome.head != head.seq:
                own_parent = parent.parent_seq if isinstance(parent, Parent) else None
                head = head._replace(seq=outcome.head, parent=own_parent)
        try:
            row = self._writer.operation(context.number, context.row, head, done, **notes)
        except StaleHead:
            return False
        name, _ = outcome.notes.get("rename", (self._writer.raw_name, b""))
        if outcome.head is None:
            self._writer.rename(name)
        else:  # set without a read, which could fail
            here = name == self._writer.raw_name
            self._writer.expect_head(context.number if here else None, head, row, parent)
        return True

    def _commit_unlogged(self, context: OpContext, outcome: Outcome) -> bool:
        change = Change(context.number, context.row, context.row, notes=Notes(**outcome.notes))
        try:
            self._writer.repository.backend.commit(change.batch())
        except StaleHead:
            return False
        return True

    def _context(self, reader: Reader, *, deleted: bool = False) -> OpContext:
        found = self._writer.find(reader)
        raw = self._writer.raw_name
        if found is None and deleted:
            raw, number = _deleted_session(reader, raw)
            found = SessionRow(number, raw, b"")
        if found is None:
            raise SessionNotFound(f"there is no session {self._writer.name!r}")
        return OpContext(reader, found.number, raw, *lineage.read_head(reader, found.number))

    # -- single operations ---------------------------------------------------------------------

    def rewind(self, find: Callable[[Reader], Address]) -> Operation:
        def plan(context: OpContext) -> Outcome:
            place = find(context.reader)
            details = {"from": context.head.seq, "to": place.seq}
            return apply(context, "rewind", details)

        return self.run("rewind", plan)

    def adopt(self, fork: str) -> Operation:
        """Add the line of a fork to the session, and move the head to its end."""

        def plan(context: OpContext) -> Outcome:
            stream = self._writer.repository.new_stream()
            before = _plain(OperationLog(context).newest())
            adoption = Adoption(context, self._writer.hash_prefix, stream)
            return adoption.outcome(fork, {"before": before})

        return self.run("rewind", plan)

    def rename(self, name: str) -> Operation:
        def plan(context: OpContext) -> Outcome:
            return apply(context, "rename", {"from": self._writer.name, "to": name})

        return self.run("rename", plan)

    def label(self, find: Callable[[Reader], Address], label: str | None) -> Operation:
        """Set the label of a checkpoint; None removes it."""

        def plan(context: OpContext) -> Outcome:
            seq = find(context.reader).seq
            was = _marks(context, seq).label
            if label is None and was is None:
                raise InvalidRequest(f"checkpoint {seq} has no label")
            return apply(context, "label", {"seq": seq, "label": label, "was": was})

        return self.run("label", plan)

    def tag(self, find: Callable[[Reader], Address], tags: tuple[str, ...]) -> Operation:
        def plan(context: OpContext) -> Outcome:
            seq = find(context.reader).seq
            have = _marks(context, seq).tags
            details = {"seq": seq, "tags": [t for t in tags if t not in have]}
            return apply(context, "tag", details)

        return self.run("tag", plan)

    def untag(self, find: Callable[[Reader], Address], tags: tuple[str, ...]) -> Operation:
        def plan(context: OpContext) -> Outcome:
            seq = find(context.reader).seq
            have = _marks(context, seq).tags
            for tag in {*tags}.difference(have):
                hint = f"its tags are {', '.join(map(repr, have))}" if have else "it has no tag"
                raise InvalidRequest(f"checkpoint {seq} has no tag {tag!r}", hint=hint)
            return apply(context, "tag", {"seq": seq, "tags": [], "removed": [*tags]})

        if not tags:
            raise InvalidRequest("which tags should be removed?", hint='untag(revision, "draft")')
        return self.run("tag", plan)

    def delete(
        self, find: Callable[[Reader], Address] | None, expected: str | None = None
    ) -> Operation:
        """Delete a checkpoint; without `find`, the whole session."""
        forks: tuple[str, ...] = ()

        def plan(context: OpContext) -> Outcome:
            nonlocal forks
            self._expect(context, expected)
            seq = None if find is None else find(context.reader).seq
            forks = lineage.forks_below(context.reader, context.number, seq)
            if seq is None:
                return apply(context, "delete", {"session": True})
            details: dict[str, Any] = {"runs": [[seq, seq + 1]], "held": []}
            needed = leases.needed(context.reader, context.number, context.head)
            if seq == context.head.seq:
                self._end_run(context)
                if context.lease is not None:
                    needed.add(seq)
                details |= {"from": seq, "to": self._below_head(context)}
            if seq in needed:
                raise InvalidRequest(
                    "an interrupted run will continue from that checkpoint",
                    hint="rewind() ends the run",
                )
            return apply(context, "delete", details)

        return self.run("delete", plan)._replace(forks=forks)

    def _below_head(self, context: OpContext) -> int:
        """Return the seq of the nearest ancestor of the head in this session that can be read."""
        number, head = context.number, context.head
        for place, record in lineage.ancestors(
            context.reader, Address(number, head.seq), head.parent
        ):
            if place.session == number and place.seq != head.seq and not record.damaged:
                return place.seq
        raise InvalidRequest(
            "the head has no ancestor left in this session to which it could move",
            hint="rewind() to another branch first, or delete() the session",
        )

    def _expect(self, context: OpContext, head: str | None) -> None:
        """Raise HeadMoved if the head is another checkpoint than the expected one."""
        if head is None:
            return
        found = context.reader.checkpoint(context.number, context.head.seq)
        actual = None if found is None else ids.to_text(found.id)
        if actual != head:
            raise HeadMoved(self.name, head, actual)

    # -- undo and redo -------------------------------------------------------------------------

    def undo(self, only: Ref | None = None) -> Operation:
        """Undo the newest log entry. Raises Conflict if `only` is given and is not that one."""

        def plan(context: OpContext) -> Outcome:
            return _wanted(undo_target(context, self._writer.name), only)

        return self.run("undo", plan, deleted=True)

    def undo_deletion(self, session: int, number: int) -> Operation:
        """Undo one operation of the log, which deleted checkpoints or the session itself.

        Other entries may follow it: they stay as they are, and redo() does not delete again.
        `session` is the number of the session. Raises SessionExists if another one has its name.
        """
        ref = (OPERATION, number)

        def plan(context: OpContext) -> Outcome:
            if context.number != session:
                raise SessionExists(f"another session has had the name {self.name!r} since")
            log = OperationLog(context)
            newest = log.newest()
            if log.top(newest) == ref:
                return undo_target(context, self.name).outcome
            kind, details = log.entry(ref)
            outcome = revert(context, kind, details, 0)
            outcome.details = {
                "undid": [*ref], "what": kind, "top": _plain(log.top(newest)),
                "redo": log.redoable(newest), "aside": True,
            }  # fmt: skip
            return outcome

        return self.run("undo", plan, deleted=True)

    def redo(self, only: Ref | None = None) -> Operation:
        def plan(context: OpContext) -> Outcome:
            return _wanted(redo_target(context, self._writer.name), only)

        return self.run("redo", plan, deleted=True)


class UndoTarget(NamedTuple):
    """The log entry that an undo or redo acts on, and the outcome."""

    ref: Ref
    kind: str
    details: dict[str, Any]
    outcome: Outcome


class NextStep(NamedTuple):
    """The effect that the next undo() or redo() has on a session."""

    ref: Ref
    """The entry that it takes back or restores; `expect` of undo() and redo() takes it."""
    kind: str
    """Of the entry: "save", "rewind", "tag", …"""
    created_at: dt.datetime | None
    """When the operation was done. None for a save, whose time is that of its checkpoint."""
    details: dict[str, Any]
    """The details of the entry; empty for a save."""
    checkpoint: Checkpoint | None
    """The checkpoint that the entry is about."""
    moves_head: bool
    """Whether the head would move."""
    head_before: Checkpoint | None
    """The head before the step, if it moves the head. None for no head."""
    head_after: Checkpoint | None
    """The head after the step, if it moves the head. None for no head."""

    @property
    def deleted(self) -> int:
        """How many checkpoints the entry deleted."""
        return deleted(self.details)


def _marks(context: OpContext, seq: int) -> lineage.Marks:
    """Return the label and the tags of a checkpoint."""
    found = lineage.marks_of(context.reader, context.number, seq, seq)
    return found.get(seq, lineage.Marks())


def _wanted(target: UndoTarget, only: Ref | None) -> Outcome:
    if only is not None and target.ref != only:
        raise Conflict("another operation came first", hint="look again at what there is now")
    return target.outcome


def next_step(reader: Reader, name: str, *, redo: bool = False) -> NextStep:
    """Return what undo() or redo() would do now. Raises the errors that they would raise."""
    raw, number = locate(reader, name)
    context = OpContext(reader, number, raw, *lineage.read_head(reader, number))
    target = redo_target(context, name) if redo else undo_target(context, name)
    if target.outcome.head is not None:
        leases.check_free(reader, number, name, context.head)

    def checkpoint(seq: int | None) -> Checkpoint | None:
        return lineage.checkpoint_at(reader, Address(number, seq)) if seq else None

    where, n = target.ref
    created = None
    if where == OPERATION:
        (row,) = reader.operations(number, n, n)
        created = lineage.read_operation(number, name, *row)[1].created_at
    moves = target.outcome.head is not None
    return NextStep(
        target.ref, target.kind, created, target.details,
        checkpoint(n if where == CHECKPOINT else target.details.get("seq")), moves,
        checkpoint(context.head.seq) if moves else None, checkpoint(target.outcome.head),
    )  # fmt: skip


def undo_target(context: OpContext, name: str) -> UndoTarget:
    log = OperationLog(context)
    newest = log.newest()
    ref = log.top(newest)
    if ref is None:
        raise InvalidRequest(f"there is nothing to undo in session {name!r}")
    kind, details = log.entry(ref)
    before = log.before(ref)
    was = log.head_after(before) if ref[0] == CHECKPOINT else 0
    outcome = revert(context, kind, details, was)
    outcome.details = {
        "undid": [*ref], "what": kind, "top": _plain(log.top(before)),
        "redo": log.redoable(newest),
    }  # fmt: skip
    return UndoTarget(ref, kind, details, outcome)


def redo_target(context: OpContext, name: str) -> UndoTarget:
    log = OperationLog(context)
    undo = log.redoable(log.newest())
    if undo is None:
        raise InvalidRequest(f"there is nothing to redo in session {name!r}")
    _, undone = log.entry((OPERATION, undo))
    ref = (str(undone["undid"][0]), int(undone["undid"][1]))
    kind, details = log.entry(ref)
    outcome = apply(context, kind, details, ref[1] if ref[0] == CHECKPOINT else 0)
    outcome.details = {
        "redid": [*ref], "what": kind, "top": [*ref], "redo": undone["redo"],
    }  # fmt: skip
    if "hold" in details:
        outcome.details["hold"] = [*clock.uptime()]
    return UndoTarget(ref, kind, details, outcome)


def _deletes(context: OpContext, outcome: Outcome) -> bool:
    """Return whether the operation deletes the whole session."""
    name, _ = outcome.notes.get("rename", (b"", b""))
    return records.is_deleted(context.number, name)


def _plain(ref: Ref | None) -> list[Any] | None:
    return None if ref is None else [*ref]


def locate(reader: Reader, name: str) -> tuple[bytes, int]:
    """Return the stored name and the number of a session.

    If no session has the name, return the deleted one that undo() would restore. Raises
    SessionNotFound.
    """
    raw = records.encode_name(name)
    found = reader.session(raw)
    return _deleted_session(reader, raw) if found is None else (raw, found.number)


def _deleted_session(reader: Reader, raw: bytes) -> tuple[bytes, int]:
    """Return the most recently deleted session that had this name. Raises SessionNotFound."""
    found = [
        (_deletion(reader, row.number), row.name, row.number)
        for row in lineage.deleted_sessions(reader)
        if row.former_name == raw
    ]
    if not found:
        raise SessionNotFound(f"there is no session {records.decode_name(raw)!r}")
    return max(found)[1:]


def _deletion(reader: Reader, number: int) -> tuple[int, int]:
    """Return the order and the time of a deleted session's newest operation: its deletion."""
    head = lineage.read_head(reader, number)[1]
    for n, body in reader.operations(number, head.operations, head.operations):
        _, created, _, details = records.unseal_operation(number, n, body)
        return details.get("order", 0), created
    return 0, 0


class OperationLog:
    """A session's log, read backwards from any entry.

    The position of a damaged operation is uncertain. It is assumed to come right before the entry
    that may have followed it. undo() stops there, rather than take back the wrong entry.
    """

    def __init__(self, context: OpContext) -> None:
        self._context = context
        self._reader, self._number, self._head = context.reader, context.number, context.head

    def _operation(self, number: int) -> tuple[str, int | None, dict[str, Any]] | None:
        """Return the kind, the seq of the newest checkpoint of its time, and the details.

        The seq is None if the operation is damaged. Returns None if gc has removed the operation.
        """
        rows = self._reader.operations(self._number, number, number) if number > 0 else []
        if not rows:
            return None
        last, found = lineage.read_operation(self._number, "", *rows[0])
        return found.kind, last, found.details

    def _read(self, number: int) -> tuple[str, dict[str, Any]] | None:
        """Return kind and details; None if gc has removed them. Raises Corrupt if damaged."""
        operation = self._operation(number)
        if operation is None:
            return None
        kind, _, details = operation
        if kind == DAMAGED:
            raise Corrupt(
                f"undo() stops at a damaged operation: {details['damage']}",
                hint="after repair(), undo() works again for later operations",
            )
        return kind, details

    def _latest(self, number: int, last: int) -> Ref | None:
        """Return the newer of operation `number` and checkpoint `last`."""
        operation = self._operation(number)
        if operation is not None and operation[1] in (last, None):
            return (OPERATION, number)
        return (CHECKPOINT, last) if last else None

    def newest(self) -> Ref | None:
        return self._latest(self._head.operations, self._head.last)

    def before(self, ref: Ref) -> Ref | None:
        """Return the entry before this one."""
        where, n = ref
        if where == OPERATION:
            this = self._operation(n)
            if this is not None and "before" in this[2]:  # the checkpoints that it added are not
                before = this[2]["before"]  # entries of their own
                return None if before is None else (str(before[0]), int(before[1]))
            return self._latest(n - 1, (this[1] or 0) if this else 0)
        # Find the newest operation before checkpoint n, by bisection.
        low, high = 0, self._head.operations
        while low < high:
            middle = (low + high + 1) // 2
            if self._came_before(middle, n):
                low = middle
            else:
                high = middle - 1
        return self._latest(low, n - 1)

    def _came_before(self, number: int, seq: int) -> bool:
        """Return whether an operation was made before a checkpoint.

        For a damaged operation, the answer is that of the nearest readable one before it.
        """
        operation = self._operation(number)
        while operation is not None and operation[1] is None:
            number -= 1
            operation = self._operation(number)
        return operation is None or (operation[1] or 0) < seq

    def entry(self, ref: Ref) -> tuple[str, dict[str, Any]]:
        where, n = ref
        if where == CHECKPOINT:
            if not self._context.exists(n):
                raise InvalidRequest(f"checkpoint {n} cannot come back: {GONE}")
            row = lineage.read_row(self._reader, Address(self._number, n))
            return row.record.operation, {}
        operation = self._read(n)
        if operation is None:
            raise InvalidRequest(f"what was done cannot be undone: {GONE}")
        return operation

    def top(self, ref: Ref | None) -> Ref | None:
        """Return the newest entry that was not undone, as of an entry of the log."""
        if ref is None or ref[0] == CHECKPOINT:
            return ref
        operation = self._operation(ref[1])
        if operation is None:
            return None
        if "top" not in operation[2]:
            return ref
        top = operation[2]["top"]
        return None if top is None else (str(top[0]), int(top[1]))

    def redoable(self, ref: Ref | None) -> int | None:
        """Return the number of the undo that a redo would revert, as of an entry of the log."""
        if ref is None or ref[0] == CHECKPOINT:
            return None
        operation = self._read(ref[1])
        if operation is None or operation[0] not in ("undo", "redo"):
            return None
        kind, details = operation
        is_next = kind == "undo" and not details.get("aside")
        found: int | None = ref[1] if is_next else details["redo"]
        return found

    def head_after(self, ref: Ref | None) -> int:
        if ref is None:
            return 0
        if ref[0] == CHECKPOINT:
            return ref[1]
        operation = self._read(ref[1])
        return int(operation[1]["head"]) if operation else 0
