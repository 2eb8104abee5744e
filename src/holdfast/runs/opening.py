"""Taking a session for a run: its lease, where it goes on, and giving it back."""

from __future__ import annotations

import secrets
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast import leases, lineage
from holdfast.backends.base import Change, Moved, Notes
from holdfast.codec import load as loading
from holdfast.errors import (
    UNREADABLE,
    Conflict,
    Corrupt,
    InvalidRequest,
    NotFound,
    SessionBusy,
)
from holdfast.leases import Held, Owner
from holdfast.lineage import Place
from holdfast.runs.heart import heart_of
from holdfast.runs.journal import Journal
from holdfast.source import StoredSource

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.backends.base import Backend, Reader
    from holdfast.codec.records import Head, Row
    from holdfast.session import Session


@dataclass
class Opened:
    """A session that a run has, and where in it the run is."""

    handle: Session
    backend: Backend
    session: int
    token: bytes
    held: Held
    journal: Journal
    resumed: bool
    head: int
    base: int
    turn: int
    first_state: Any
    """What the code outside the loop starts from."""

    def state_at(self, seq: int) -> Any:
        with self.backend.reader() as reader:
            return _state(self.backend, reader, Place(self.session, seq))

    def part(self, *, complete: bool) -> None:
        """Let the next checkpoint give the session back, in the same commit."""
        held = self.held._replace(open=not complete)
        self.handle._writer.parting = (b"", held.seal(self.session))

    def let_go(self) -> None:
        heart_of(self.backend).end(self.token)
        leases.forget(self.token)


def open_run(
    session: Session,
    *,
    lost: Callable[[], None],
    name: str | None,
    state: Any,
    takeover: bool,
    resume: bool | None,
) -> Opened:
    store = session.store
    handle = type(session)(store, session.name, session.agent, parent=session.parent)
    token = leases.new_token()
    try:
        while True:
            opened = _try(handle, token, name, takeover=takeover, resume=resume)
            if opened is not None:
                how = "taken over" if takeover else "resumed" if opened.resumed else "taken"
                session.lease_event(how)
                heart_of(store.backend).begin(token, store.backend, opened.session, lost)
                return opened
            if handle._writer.tip is None and handle._writer.damage is None:
                if resume:
                    raise _nothing(session.name)
                with suppress(Conflict):  # another may have begun at the same moment
                    handle.save({} if state is None else state, trigger="run")
            handle.refresh()
    except SessionBusy:
        leases.forget(token)
        session.lease_event("busy")
        raise
    except BaseException:
        leases.forget(token)
        raise


def _nothing(name: str) -> InvalidRequest:
    return InvalidRequest(
        f"session {name!r} has no run that was interrupted", hint="run() without resume=True"
    )


def _another(session: str, wanted: str, held: Held) -> NotFound:
    there = "one without a name" if held.name is None else repr(held.name)
    return NotFound(
        f"session {session!r} has no interrupted run {wanted!r}", hint=f"there is {there}"
    )


def _try(
    handle: Session, token: bytes, name: str | None, *, takeover: bool, resume: bool | None
) -> Opened | None:
    """Take the session as it is now; None if it has no head yet, or was changed meanwhile."""
    backend, writer = handle.store.backend, handle._writer
    with backend.reader() as reader:
        writer.look(reader)
        number, head, row = writer.number, writer.head, writer.head_row
        if number is None or writer.tip is None:
            if writer.damage is not None:
                raise writer.damage
            return None
        if not takeover:
            leases.check_free(reader, number, handle.name, head)
        tip = lineage.read_row(reader, Place(number, head.seq))
        before = None if resume is False else interrupted(reader, number, head, tip)
        if before is None and resume:
            raise _nothing(handle.name)
        if before is not None and resume and name is not None and before.name != name:
            raise _another(handle.name, name, before)
        owner, since = Owner.this(), reader.last_entry(number) + 1
        if before is not None:
            held = before._replace(owner=owner, attempt=before.attempt + 1, since=since)
        else:
            run = secrets.token_hex(8)
            held = Held(run, name, owner, 1, head.seq, first=since, since=since, open=True)
        base, turn = _where(reader, number, held, head, tip)
        journal = Journal(backend, number, token)
        journal.catch_up(reader, held.first)
        began = Place(number, held.began if turn else base)
        try:
            first_state = _state(backend, reader, began)
        except (*UNREADABLE, LookupError):  # pruned since
            first_state = _state(backend, reader, Place(number, base))
    new = head._replace(lease=token)
    notes = Notes(lease=(token, held.seal(number)))
    try:
        backend.commit(Change(number, row, new.seal(number), notes=notes))
    except Moved:
        return None
    writer.lease, writer.head, writer.head_row = token, new, new.seal(number)
    with backend.reader() as reader:  # who had it until now may have begun something meanwhile
        journal.catch_up(reader)
    return Opened(
        handle, backend, number, token, held, journal, before is not None, head.seq, base, turn,
        first_state,
    )  # fmt: skip


def interrupted(reader: Reader, number: int, head: Head, tip: Row) -> Held | None:
    """The run that the session was left in, if its head is still where that has left it."""
    lease = reader.lease(number)
    if lease is None:
        if head.lease is not None or reader.last_entry(number):
            raise Corrupt(
                "the lease of the session is missing", hint="run(resume=False) begins a new run"
            )
        return None
    held = Held.read(lease)
    if not held.open:
        return None
    extra = tip.record.extra
    if head.seq == held.began:
        return held
    if "run" not in extra or extra["run"][0] != held.run or extra.get("status") == "completed":
        return None
    return held


def _where(reader: Reader, number: int, held: Held, head: Head, tip: Row) -> tuple[int, int]:
    """The seq of the base, and the turn that starts from it."""
    run, turn, base = tip.record.extra.get("run", (None, 0, None))
    if run != held.run:
        return head.seq, 0
    if base is None:
        return head.seq, turn + 1
    mark = lineage.read_row(reader, Place(number, base)).record.extra.get("run")
    return base, mark[1] + 1 if mark is not None and mark[0] == held.run else 0


def _state(backend: Backend, reader: Reader, place: Place) -> Any:
    row = lineage.read_row(reader, place)
    return loading.load(row.root, row.record.size, StoredSource(backend, reader))
