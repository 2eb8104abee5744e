"""Operations: what changes a session and is no checkpoint. Each is logged and can be undone.

The log of a session is one sequence: its checkpoints (a save's operation is its checkpoint) and the
operations between them, each of which knows the newest checkpoint of its time. Undo and redo are
operations themselves, and remember what comes next, so that finding it never means reading the
whole log.
"""

from __future__ import annotations

import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast import clock, leases, lineage
from holdfast import retention as retaining
from holdfast.backends.base import Change, Gone, Moved, Notes
from holdfast.codec import records
from holdfast.effects import GONE, Effect, Scene, back, forward
from holdfast.errors import CheckpointNotFound, Conflict, Corrupt, InvalidRequest, SessionNotFound
from holdfast.lineage import Place
from holdfast.model import DAMAGED, Operation
from holdfast.writing import Tip

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.backends.base import Reader
    from holdfast.retention import Plan, Retention
    from holdfast.writing import Writer

    Ref = tuple[str, int]

CHECKPOINT, OPERATION = "checkpoint", "operation"
_PATIENCE = 20


class _NothingToDo(Exception):
    """There is nothing left of what was planned."""


class Operator:
    """Plans and commits operations of one session."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def run(
        self, kind: str, plan: Callable[[Scene], Effect | None], *, deleted: bool = False
    ) -> Operation:
        """Plan on the session as it is, and commit if it still is; else plan again."""
        gone = 0
        while True:
            with self._writer.store.backend.reader() as reader:
                scene = self._scene(reader, deleted=deleted)
                effect = plan(scene)
                if effect is None:
                    raise _NothingToDo
                if effect.head is not None:
                    self._end_run(scene)
                done = self._draft(scene, kind, effect)
            try:
                if self._commit(done, scene, effect):
                    return done
            except Gone:
                gone = _bear(gone)

    def _end_run(self, scene: Scene) -> None:
        """What moves the head, or takes the session away, must not happen below a run at work."""
        leases.check_free(scene.reader, scene.number, self._writer.name, scene.head)
        scene.lease = leases.closed(scene.reader, scene.number)

    def _draft(self, scene: Scene, kind: str, effect: Effect) -> Operation:
        """What will be logged."""
        head = scene.head.seq if effect.head is None else effect.head
        details = effect.details | {"head": head}
        if _deletes(scene, effect):
            # Clocks can be set back, and numbers of sessions are taken in blocks; this one is new.
            details["order"] = self._writer.store.backend.reserve("session", 1)
        return Operation(self._writer.name, scene.next, kind, time.time_ns() // 1000, details)

    def _commit(self, done: Operation, scene: Scene, effect: Effect) -> bool:
        """False if the session is not as it was when this was planned."""
        head = scene.head._replace(operations=scene.next)
        tip, notes = effect.tip, effect.notes
        if effect.head is not None:
            notes = notes | {"lease": scene.lease}
            head = head._replace(lease=None)
            if effect.head != head.seq:
                near = tip.parent_seq if isinstance(tip, Tip) else None
                head = head._replace(seq=effect.head, parent=near)
        try:
            row = self._writer.operation(scene.number, scene.row, head, done, **notes)
        except Moved:
            return False
        if effect.head is not None:  # nothing is read for it, as that could fail
            name, _ = effect.notes.get("rename", (self._writer.raw_name, b""))
            here = name == self._writer.raw_name
            self._writer.stand(scene.number if here else None, head, row, tip)
        return True

    def _scene(self, reader: Reader, *, deleted: bool = False) -> Scene:
        raw = self._writer.raw_name
        found = reader.session(raw)
        if found is None and deleted:
            raw, number = _deleted_session(reader, raw)
            found = (number, b"")
        if found is None:
            raise SessionNotFound(f"there is no session {self._writer.name!r}")
        return Scene(reader, found[0], raw, *lineage.read_head(reader, found[0]))

    # -- single operations ---------------------------------------------------------------------

    def rewind(self, find: Callable[[Reader], Place], kind: str = "rewind") -> Operation:
        def plan(scene: Scene) -> Effect:
            place = find(scene.reader)
            details = {"from": scene.head.seq, "to": place.seq}
            return forward(scene, kind, details)

        return self.run(kind, plan)

    def label(self, find: Callable[[Reader], Place], label: str) -> Operation:
        def plan(scene: Scene) -> Effect:
            seq = find(scene.reader).seq
            marks = lineage.marks_of(scene.reader, scene.number, seq, seq)
            was = marks[seq].label if seq in marks else None
            return forward(scene, "label", {"seq": seq, "label": label, "was": was})

        return self.run("label", plan)

    def tag(self, find: Callable[[Reader], Place], tags: tuple[str, ...]) -> Operation:
        def plan(scene: Scene) -> Effect:
            seq = find(scene.reader).seq
            marks = lineage.marks_of(scene.reader, scene.number, seq, seq)
            have = marks[seq].tags if seq in marks else ()
            details = {"seq": seq, "tags": [t for t in tags if t not in have]}
            return forward(scene, "tag", details)

        return self.run("tag", plan)

    def delete(self, find: Callable[[Reader], Place]) -> Operation:
        def plan(scene: Scene) -> Effect:
            seq = find(scene.reader).seq
            if seq == scene.head.seq:
                raise InvalidRequest(
                    "the head cannot be deleted", hint="rewind() first, or delete() the session"
                )
            if seq in leases.needed(scene.reader, scene.number, scene.head):
                raise InvalidRequest("a run that was interrupted goes on from that checkpoint")
            return forward(scene, "delete", {"runs": [[seq, seq + 1]], "held": []})

        return self.run("delete", plan)

    def delete_session(self) -> Operation:
        return self.run("delete", lambda scene: forward(scene, "delete", {"session": True}))

    def prune(self, rule: Retention, *, dry_run: bool = False, automatic: bool = False) -> Plan:
        """Delete what a rule does not keep. An automatic run is not in the log: undo() skips it."""
        retaining.check(rule)
        gone = 0
        while True:
            with self._writer.store.backend.reader() as reader:
                scene = self._scene(reader)
                plan = retaining.plan(reader, scene.number, self._writer.name, scene.head, rule)
                if dry_run or (plan.whole is None and not plan.removed):
                    return plan
                effect = _carry_out(scene, plan)
                if effect.head is not None:
                    self._end_run(scene)
                done = self._draft(scene, "prune" if plan.whole is None else "delete", effect)
            if automatic and plan.whole is None:
                change = Change(scene.number, scene.row, scene.row, notes=Notes(**effect.notes))
                commit = partial(self._automatic, change)
            else:
                commit = partial(self._commit, done, scene, effect)
            try:
                if commit():
                    return plan
            except Gone:
                gone = _bear(gone)

    def _automatic(self, change: Change) -> bool:
        try:
            self._writer.store.backend.commit(change)
        except Moved:
            return False
        return True

    def carry_out(self, plan: Plan, rule: Retention) -> None:
        """Delete what a plan says, but for what has gone or is protected by now."""
        chosen = {v.checkpoint.seq for v in plan.removed}

        def again(scene: Scene) -> Effect | None:
            name = self._writer.name
            now = retaining.plan(scene.reader, scene.number, name, scene.head, rule)
            if plan.whole is not None:
                return None if now.whole is None else _carry_out(scene, now)
            verdicts = [
                v if v.protected else v._replace(keep=v.checkpoint.seq not in chosen)
                for v in now.verdicts
            ]
            now = now._replace(verdicts=tuple(verdicts), whole=None)
            return _carry_out(scene, now) if now.removed else None

        with suppress(_NothingToDo):
            self.run("prune" if plan.whole is None else "delete", again)

    # -- undo and redo -------------------------------------------------------------------------

    def undo(self, only: Ref | None = None) -> Operation:
        """With `only`, that one or nothing."""

        def plan(scene: Scene) -> Effect:
            return _wanted(undo_step(scene, self._writer.name), only)

        return self.run("undo", plan, deleted=True)

    def redo(self, only: Ref | None = None) -> Operation:
        def plan(scene: Scene) -> Effect:
            return _wanted(redo_step(scene, self._writer.name), only)

        return self.run("redo", plan, deleted=True)


class Step(NamedTuple):
    """An entry of the log that undo() takes back or redo() does again, and what that does."""

    ref: Ref
    kind: str
    details: dict[str, Any]
    effect: Effect


def _wanted(step: Step, only: Ref | None) -> Effect:
    if only is not None and step.ref != only:
        raise Conflict("something else was done meanwhile", hint="look again at what there is now")
    return step.effect


def upcoming(reader: Reader, name: str, *, redo: bool = False) -> Step:
    """What undo() or redo() would do to a session now. Raises what they would raise."""
    number = lineage.find_session(reader, name)
    raw = records.encode_name(name)
    scene = Scene(reader, number, raw, *lineage.read_head(reader, number))
    step = redo_step(scene, name) if redo else undo_step(scene, name)
    if step.effect.head is not None:
        leases.check_free(reader, number, name, scene.head)
    return step


def undo_step(scene: Scene, name: str) -> Step:
    log = Log(scene)
    newest = log.newest()
    ref = log.top(newest)
    if ref is None:
        raise InvalidRequest(f"there is nothing to undo in session {name!r}")
    kind, details = log.entry(ref)
    before = log.before(ref)
    was = log.head_after(before) if ref[0] == CHECKPOINT else 0
    effect = back(scene, kind, details, was)
    effect.details = {
        "undid": [*ref], "what": kind, "top": _plain(log.top(before)),
        "redo": log.redoable(newest),
    }  # fmt: skip
    return Step(ref, kind, details, effect)


def redo_step(scene: Scene, name: str) -> Step:
    log = Log(scene)
    undo = log.redoable(log.newest())
    if undo is None:
        raise InvalidRequest(f"there is nothing to redo in session {name!r}")
    _, undone = log.entry((OPERATION, undo))
    ref = (str(undone["undid"][0]), int(undone["undid"][1]))
    kind, details = log.entry(ref)
    effect = forward(scene, kind, details, ref[1] if ref[0] == CHECKPOINT else 0)
    effect.details = {
        "redid": [*ref], "what": kind, "top": [*ref], "redo": undone["redo"],
    }  # fmt: skip
    if "hold" in details:
        effect.details["hold"] = [*clock.uptime()]
    return Step(ref, kind, details, effect)


def _bear(gone: int) -> int:
    """What was there when this was planned was deleted when it was written: count how often."""
    if gone >= _PATIENCE:
        raise CheckpointNotFound("a checkpoint that this builds on was deleted meanwhile")
    return gone + 1


def _carry_out(scene: Scene, plan: Plan) -> Effect:
    if plan.whole is not None:
        return forward(scene, "delete", {"session": True, "hold": [*clock.uptime()]})
    return forward(scene, "prune", retaining.runs(plan))


def _deletes(scene: Scene, effect: Effect) -> bool:
    """Whether the whole session goes."""
    name, _ = effect.notes.get("rename", (b"", b""))
    return records.former_name(scene.number, name) is not None


def _plain(ref: Ref | None) -> list[Any] | None:
    return None if ref is None else [*ref]


def _deleted_session(reader: Reader, raw: bytes) -> tuple[bytes, int]:
    """The newest deleted session that had this name."""
    after = records.deleted_name(0, b"")
    last: tuple[tuple[int, int], bytes, int] | None = None
    while page := reader.sessions(after, lineage.PAGE):
        for number, name, _ in page:
            if records.former_name(number, name) == raw:
                found = (_deletion(reader, number), name, number)
                last = found if last is None else max(last, found)
        after = page[-1][1]
    if last is None:
        raise SessionNotFound(f"there is no session {records.decode_name(raw)!r}")
    return last[1:]


def _deletion(reader: Reader, number: int) -> tuple[int, int]:
    """The order and time of a session's newest operation: its deletion."""
    head = lineage.read_head(reader, number)[1]
    for n, body in reader.operations(number, head.operations, head.operations):
        _, created, _, details = records.unseal_operation(number, n, body)
        return details.get("order", 0), created
    return 0, 0


class Log:
    """A session's log, read backwards from any entry.

    When a damaged operation was made is not known for sure. It is taken to have come right before
    what may have followed it, where undo() stops: better than to take back the wrong thing.
    """

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._reader, self._number, self._head = scene.reader, scene.number, scene.head

    def _operation(self, number: int) -> tuple[str, int | None, dict[str, Any]] | None:
        """Kind, the newest checkpoint of its time, and details; None if gc has dropped it."""
        rows = self._reader.operations(self._number, number, number) if number > 0 else []
        if not rows:
            return None
        last, found = lineage.read_operation(self._number, "", *rows[0])
        return found.kind, last, found.details

    def _read(self, number: int) -> tuple[str, dict[str, Any]] | None:
        """Kind and details; raises Corrupt if they cannot be read."""
        operation = self._operation(number)
        if operation is None:
            return None
        kind, _, details = operation
        if kind == DAMAGED:
            raise Corrupt(
                f"nothing is taken back beyond what is damaged: {details['damage']}",
                hint="repair() lets undo() work again, for what is done from then on",
            )
        return kind, details

    def _latest(self, number: int, last: int) -> Ref | None:
        """The newest of a checkpoint and the operations up to a number."""
        operation = self._operation(number)
        if operation is not None and operation[1] in (last, None):
            return (OPERATION, number)
        return (CHECKPOINT, last) if last else None

    def newest(self) -> Ref | None:
        return self._latest(self._head.operations, self._head.last)

    def before(self, ref: Ref) -> Ref | None:
        """The entry before this one."""
        where, n = ref
        if where == OPERATION:
            this = self._operation(n)
            return self._latest(n - 1, (this[1] or 0) if this else 0)
        # The newest operation that was made before checkpoint n.
        low, high = 0, self._head.operations
        while low < high:
            middle = (low + high + 1) // 2
            if self._came_before(middle, n):
                low = middle
            else:
                high = middle - 1
        return self._latest(low, n - 1)

    def _came_before(self, number: int, seq: int) -> bool:
        """Whether an operation was made before a checkpoint; a damaged one as the one before it."""
        operation = self._operation(number)
        while operation is not None and operation[1] is None:
            number -= 1
            operation = self._operation(number)
        return operation is None or (operation[1] or 0) < seq

    def entry(self, ref: Ref) -> tuple[str, dict[str, Any]]:
        where, n = ref
        if where == CHECKPOINT:
            if not self._scene.exists(n):
                raise InvalidRequest(f"checkpoint {n} cannot come back: {GONE}")
            row = lineage.read_row(self._reader, Place(self._number, n))
            return row.record.operation, {}
        operation = self._read(n)
        if operation is None:
            raise InvalidRequest(f"what was done cannot be undone: {GONE}")
        return operation

    def top(self, ref: Ref | None) -> Ref | None:
        """The newest operation that was not undone, as of an entry of the log."""
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
        """The number of the undo that a redo would take back, as of an entry of the log."""
        if ref is None or ref[0] == CHECKPOINT:
            return None
        operation = self._read(ref[1])
        if operation is None or operation[0] not in ("undo", "redo"):
            return None
        found: int | None = ref[1] if operation[0] == "undo" else operation[1]["redo"]
        return found

    def head_after(self, ref: Ref | None) -> int:
        if ref is None:
            return 0
        if ref[0] == CHECKPOINT:
            return ref[1]
        operation = self._read(ref[1])
        return int(operation[1]["head"]) if operation else 0
