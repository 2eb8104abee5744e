"""Take the lease of a session for a run, and find the checkpoint where the run continues."""

from __future__ import annotations

import secrets
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.errors import (
    UNREADABLE,
    Conflict,
    Corrupt,
    InvalidRequest,
    NotFound,
    NotSerializable,
    SessionBusy,
)
from holdfast.format import records, values
from holdfast.history import checkpoint_fields, leases, lineage
from holdfast.history import load as loading
from holdfast.history.journal import Journal
from holdfast.history.leases import LeaseRecord, Owner
from holdfast.history.lineage import Parent
from holdfast.history.token_usage import Spent, added, most
from holdfast.history.writer import Writer
from holdfast.log import logger
from holdfast.runs.budget import Bill
from holdfast.runs.heartbeat import heartbeat_of
from holdfast.storage.changes import Change, Notes
from holdfast.storage.contract import StaleHead
from holdfast.storage.reader import open_reader
from holdfast.storage.rows import PAGE, Address, LeaseRow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast.format.records import Head, Row
    from holdfast.history.checkpoint import Checkpoint
    from holdfast.history.checkpoint_fields import Details
    from holdfast.model import Record, Usage
    from holdfast.runs.budget import Budget
    from holdfast.runs.checkpoint_policy import Policy
    from holdfast.storage.reader import Reader
    from holdfast.storage.repository import Repository


class LastAttempt(NamedTuple):
    """The checkpoints that the last attempt at the turn saved: after the base, up to the head."""

    extra: dict[str, Any]
    """The fields of the head."""
    outside: Usage
    """Their usage that belongs to no call."""
    calls: dict[int, Usage]
    """Usage of each call that they record, by number."""


class RunTarget(NamedTuple):
    """The session of a run."""

    repository: Repository
    name: str
    agent: str | None
    parent: str | None
    """The name of the parent session."""
    session: Any
    """The Session that run() was called on."""


class RunOptions(NamedTuple):
    """The options of a run; see Session.run."""

    policy: Policy | None = None
    name: str | None = None
    state: Any = None
    takeover: bool = False
    resume: bool | None = None
    budget: Budget | None = None


@dataclass
class Opened:
    """A session that a run has leased, and the position of the run in it."""

    target: RunTarget
    writer: Writer
    session: int
    token: bytes
    lease: LeaseRecord
    journal: Journal
    resumed: bool
    head: int
    base: int
    """The seq of the checkpoint that the current turn starts from."""
    turn: int
    first_state: Any
    """The state of the run before its first turn."""
    earlier_usage: dict[int, Usage]
    """Usage of calls that checkpoints of earlier attempts at this turn recorded, by number."""
    last_attempt: LastAttempt | None
    """None if no checkpoint follows the base, or if one of them cannot be read."""
    bill: Bill | None
    """The usage of the run so far, if it has a budget."""

    def state_at(self, seq: int) -> Any:
        """Return the state of a checkpoint."""
        repository = self.target.repository
        with repository.reader() as reader:
            place = Address(self.session, seq)
            return loading.load(reader, place, repository.data(reader))

    def ended(self, *, complete: bool) -> bytes:
        """Return the row of the lease after the run: completed, or to be resumed."""
        return self.lease._replace(open=not complete).seal(self.session)

    def save(
        self, state: Any, details: Details, parent: int | None, release: bytes | None
    ) -> Checkpoint:
        """Save a checkpoint of the run, below the seq `parent` or else the head.

        With `release`, the same commit also releases the session.
        """
        tip, repository = None, self.target.repository
        if parent is not None:
            with repository.reader() as reader:
                tip = Parent.read(reader, Address(self.session, parent))
        with repository.measure("save", self.target.name):
            return self.writer.save(state, details, tip, release)

    def stop_heartbeat(self) -> None:
        """Stop the heartbeat. The lease then expires if it was not released."""
        heartbeat_of(self.target.repository.backend).end(self.token)
        leases.forget(self.token)


def open_run(target: RunTarget, options: RunOptions, on_lost: Callable[[], None]) -> Opened:
    """Take the lease, and start or resume a run. A new session gets its first checkpoint.

    `on_lost` is called if another worker takes the lease over later. Raises SessionBusy if a live
    worker has the session, and the errors of Session.run().
    """
    repository = target.repository
    writer = Writer(repository, target.name)
    token = leases.new_token()
    try:
        while True:
            opened = _try_open(target, writer, token, options)
            if opened is not None:
                how = "taken over" if options.takeover else "resumed" if opened.resumed else "taken"
                lease_event(target, how)
                backend = repository.backend
                heartbeat_of(backend).begin(token, backend, opened.session, on_lost)
                return opened
            if writer.parent is None and writer.damage is None:
                if options.resume:
                    raise _no_interrupted_run(target.name)
                with suppress(Conflict):  # another worker may have created it at the same moment
                    _create_session(target, writer, options.state)
    except SessionBusy:
        leases.forget(token)
        lease_event(target, "busy")
        raise
    except BaseException:
        leases.forget(token)
        raise


def _create_session(target: RunTarget, writer: Writer, state: Any) -> None:
    """Save the first state of a new session."""
    details = checkpoint_fields.of_session({"trigger": "run"}, target.agent, target.parent)
    with target.repository.measure("save", target.name):
        try:
            writer.save({} if state is None else state, details)
        except NotSerializable:
            values.check(state, "state")  # raises again, with the full path
            raise


def lease_event(target: RunTarget, event: str) -> None:
    """Log a change of the lease, and notify the observers."""
    logger.debug("session %r: its lease was %s", target.name, event)
    target.repository.lease_event(target.name, event)


def _no_interrupted_run(name: str) -> InvalidRequest:
    """Return the error for resume=True without an interrupted run."""
    return InvalidRequest(
        f"session {name!r} has no run that was interrupted", hint="run() without resume=True"
    )


def _other_run(session: str, wanted: str, lease: LeaseRecord) -> NotFound:
    """Return the error for resume=True with the name of another run."""
    other = "one without a name" if lease.name is None else repr(lease.name)
    return NotFound(
        f"session {session!r} has no interrupted run {wanted!r}", hint=f"there is {other}"
    )


def _check_first_state(session: str, given: Any, stored: Any) -> None:
    """Raise InvalidRequest if a run would ignore the state that it is given."""
    encoded = values.encode_exact(given)
    if encoded != values.encode_exact(stored) and values.decode(encoded) != stored:
        raise InvalidRequest(
            f"session {session!r} has a state already, which is not the one of run(state=…)",
            hint='run() without state=, and in it run.state["messages"].append(…)',
        )


def _try_open(
    target: RunTarget, writer: Writer, token: bytes, options: RunOptions
) -> Opened | None:
    """Try once to take the session. Return None to try again.

    None means that the session has no head yet, or was changed at the same time.
    """
    _, name, state, takeover, resume, budget = options
    repository = target.repository
    backend = repository.backend
    with repository.reader() as reader:
        writer.read_head(reader)
        number, head, row = writer.number, writer.head, writer.head_row
        if number is None or writer.parent is None:
            if writer.damage is not None:
                raise writer.damage
            return None
        if target.agent is None:
            target = target._replace(agent=lineage.session_agent(reader, number))
        if not takeover:
            leases.check_free(reader, number, writer.name, head)
        tip = lineage.read_row(reader, Address(number, head.seq))
        before = None if resume is False else interrupted(reader, number, head, tip)
        if before is None and resume:
            raise _no_interrupted_run(writer.name)
        if before is not None and resume and name is not None and before.name != name:
            raise _other_run(writer.name, name, before)
        owner, since = Owner.this(), reader.last_entry(number) + 1
        if before is not None:
            lease = before._replace(owner=owner, attempt=before.attempt + 1, since=since)
        else:
            run = secrets.token_hex(8)
            lease = LeaseRecord(run, name, owner, 1, head.seq, first=since, since=since, open=True)
        base, turn = _base_and_turn(reader, number, lease, head, tip)
        earlier_usage, last_attempt = _attempts(reader, number, before, base, head)
        journal = Journal(backend, number, token)
        journal.catch_up(reader, lease.first)
        if before is not None and journal.calls.lost:
            raise Corrupt(
                f"the run cannot be resumed: entry {journal.calls.lost[0]} of the journal is lost",
                hint="check which calls it has made; run(resume=False) begins a new run",
            )
        rows = [] if budget is None else [*_records(reader, number, lease.began + 1, head.last)]
        began = Address(number, lease.began if turn else base)
        source = repository.data(reader)
        try:
            first_state = loading.load(reader, began, source)
        except (*UNREADABLE, LookupError):  # the checkpoint was pruned
            first_state = loading.load(reader, Address(number, base), source)
        else:
            if state is not None:
                _check_first_state(writer.name, state, first_state)
    new = head._replace(lease=token)
    notes = Notes(lease=LeaseRow(token, lease.seal(number)))
    try:
        backend.commit(Change(number, row, new.seal(number), notes=notes).batch())
    except StaleHead:
        return None
    writer.lease, writer.head, writer.head_row = token, new, new.seal(number)
    with open_reader(backend) as reader:  # the previous holder may have begun a call since
        journal.catch_up(reader)
    bill = None if budget is None else Bill(rows, journal.calls.attempts(), lease.run, base)
    return Opened(
        target, writer, number, token, lease, journal, before is not None, head.seq, base, turn,
        first_state, earlier_usage, last_attempt, bill,
    )  # fmt: skip


def interrupted(reader: Reader, number: int, head: Head, tip: Row) -> LeaseRecord | None:
    """Return the interrupted run of the session, if the head is still where the run left it.

    Raises Corrupt if the lease is missing.
    """
    lease = reader.lease(number)
    if lease is None:
        if head.lease is not None or reader.last_entry(number):
            raise Corrupt(
                "the lease of the session is missing", hint="run(resume=False) begins a new run"
            )
        return None
    record = LeaseRecord.read(lease)
    if not record.open:
        return None
    extra = tip.record.extra
    if head.seq == record.began:
        return record
    if "run" not in extra or extra["run"][0] != record.run or extra.get("status") == "completed":
        return None
    return record


def _base_and_turn(
    reader: Reader, number: int, lease: LeaseRecord, head: Head, tip: Row
) -> tuple[int, int]:
    """Return the seq of the base, and the number of the turn that starts from it."""
    run, turn, base = tip.record.extra.get("run", (None, 0, None))
    if run != lease.run:
        return head.seq, 0
    if base is None:
        return head.seq, turn + 1
    mark = lineage.read_row(reader, Address(number, base)).record.extra.get("run")
    return base, mark[1] + 1 if mark is not None and mark[0] == lease.run else 0


def _attempts(
    reader: Reader, number: int, before: LeaseRecord | None, base: int, head: Head
) -> tuple[dict[int, Usage], LastAttempt | None]:
    """Return the usage of calls that attempts since `base` recorded, and the last attempt.

    If several attempts recorded a call, its usage is the largest one.
    """
    found: dict[int, Record] = {}
    if before is not None:
        for record in _records(reader, number, base + 1, head.last):
            if record.extra.get("run", (None,))[0] == before.run:
                found[record.seq] = record
    spent = {seq: Spent.read(record.extra) for seq, record in found.items()}
    earlier_usage: dict[int, Usage] = {}
    for each in spent.values():
        for call, usage in ({} if each is None else each.calls).items():
            earlier_usage[call] = most(usage, earlier_usage.get(call, usage))
    path: list[Spent] = []
    at: int | None = head.seq
    while at in found:
        each = spent[at]
        path += [] if each is None else [each]
        at = found[at].parent_seq
    if at != base or head.seq == base:
        return earlier_usage, None
    calls = {call: usage for each in path for call, usage in each.calls.items()}
    return earlier_usage, LastAttempt(
        found[head.seq].extra, added(each.outside for each in path), calls
    )


def _records(reader: Reader, number: int, low: int, last: int) -> Iterator[Record]:
    """Yield records of checkpoints that can be read, up to the first that cannot be listed."""
    with suppress(*UNREADABLE):
        while page := reader.checkpoints(number, low, last, PAGE):
            for row in page:
                with suppress(*UNREADABLE):
                    yield records.unseal_checkpoint(number, *row).record
            low = page[-1].seq + 1
