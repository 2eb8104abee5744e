"""Leases: only one process at a time may run a session.

A lease ends when its holder releases it, or when it is not renewed for 30 s. If the holder was a
process of this machine and is dead, the lease ends at once.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from holdfast import clock
from holdfast.errors import UNREADABLE, Corrupt, SessionBusy
from holdfast.format import records
from holdfast.storage.rows import PAGE, LeaseRow

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.format.records import Head
    from holdfast.storage.reader import Reader
    from holdfast.storage.tally import Lease

TTL = 30.0
"""Seconds after which a lease that is not renewed is free for any process."""

_active_tokens: set[bytes] = set()
"""Tokens of the active runs of this process."""


def new_token() -> bytes:
    token = os.urandom(8)
    _active_tokens.add(token)
    return token


def forget(token: bytes) -> None:
    _active_tokens.discard(token)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_active_tokens.clear)


class Owner(NamedTuple):
    """A process. The fields identify it even if its pid is used again, also after a reboot."""

    host: str
    """The name of the machine."""
    pid: int
    """The process id."""
    boot: str
    """An id of the machine's last start. Process ids are compared only within one start."""
    space: str
    """The pid namespace: each container has its own pids."""
    started: str
    """The start time of the process, as /proc gives it."""

    @classmethod
    def this(cls) -> Owner:
        import socket  # only runs need it, and it takes 4 ms

        return cls(socket.gethostname(), os.getpid(), *_here(), _started(os.getpid()))

    def is_gone(self, token: bytes) -> bool:
        """Return whether the holder of the lease `token` is certainly gone.

        True if its process is dead, or if it is this process and the run has ended. False for other
        machines and containers, because their processes cannot be seen from here.
        """
        if not self.boot or (self.boot, self.space) != _here():
            return False
        if _started(self.pid) != self.started:
            return True
        return self.pid == os.getpid() and token not in _active_tokens


@lru_cache(maxsize=1)
def _here() -> tuple[str, str]:
    try:
        return clock.boot_id(), os.readlink("/proc/self/ns/pid")
    except OSError:
        return "", ""


def _started(pid: int) -> str:
    """Return the start time of a process; empty if there is none, or if it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, UnicodeDecodeError):
        return ""
    return "" if fields[0] in "ZX" else fields[19]


class LeaseRecord(NamedTuple):
    """The content of a lease: the run that holds it, or that held it last."""

    run: str
    """The id of the run. It stays the same when another worker resumes the run."""
    name: str | None
    owner: Owner
    attempt: int
    """The number of the attempt: 1 for a new run, one more each time it is resumed."""
    began: int
    """The seq of the checkpoint that the run began with."""
    first: int
    """The number of the run's first entry in the journal."""
    open: bool
    """True until the run ends. Until then it can be resumed."""
    since: int = 0
    """The number of the first journal entry that this attempt can have written."""

    def seal(self, session: int) -> bytes:
        return records.seal_lease(session, self._asdict() | {"owner": [*self.owner]})

    @classmethod
    def read(cls, lease: Lease) -> LeaseRecord:
        facts = records.unseal_lease(lease.session, lease.body)
        try:
            record = cls(**facts | {"owner": Owner(*facts["owner"])})
        except (LookupError, TypeError):
            record = None
        if record is None or not all(
            map(isinstance, (*record, *record.owner), (*_RECORD_TYPES, *_OWNER_TYPES))
        ):
            raise Corrupt("the lease of a session does not say what it should")
        return record


_RECORD_TYPES = (str, str | None, Owner, int, int, int, bool, int)
_OWNER_TYPES = (str, int, str, str, str)


def is_alive(lease: Lease, record: LeaseRecord) -> bool:
    """Return whether a process may still hold the lease."""
    return bool(lease.token) and lease.age < TTL and not record.owner.is_gone(lease.token)


def holder(reader: Reader, session: int, head: Head) -> tuple[Lease, LeaseRecord] | None:
    """Return the lease of a session if a process may hold it now, else None."""
    if head.lease is None:
        return None
    lease = reader.lease(session)
    if lease is None or lease.token != head.lease:
        return None
    record = LeaseRecord.read(lease)
    return (lease, record) if is_alive(lease, record) else None


def all_leases(reader: Reader) -> Iterator[Lease]:
    """Yield the leases of all sessions that ever had a run."""
    after = 0
    while page := reader.leases(after, PAGE):
        yield from page
        after = page[-1].session


def running(reader: Reader) -> Iterator[int]:
    """Yield the sessions that a process runs now. Damaged leases are left out."""
    for lease in all_leases(reader):
        with suppress(*UNREADABLE):
            record = LeaseRecord.read(lease)
            if record.open and is_alive(lease, record):
                yield lease.session


def check_free(reader: Reader, session: int, name: str, head: Head) -> None:
    """Raise SessionBusy if a process runs the session now."""
    found = holder(reader, session, head)
    if found is None:
        return
    lease, record = found
    left = max(TTL - lease.age, 0.0)
    raise SessionBusy(
        f"session {name!r} is run by process {record.owner.pid} on {record.owner.host}",
        hint=f"its lease ends in {left:.0f} s unless it is renewed; until then fork(), label() "
        "and tag() work, and run(takeover=True) takes the session over",
    )


def closed(reader: Reader, session: int) -> LeaseRow | None:
    """Return a lease that ends the session's run, so that it is not resumed.

    None if there is no open run, or if its lease cannot be read.
    """
    lease = reader.lease(session)
    try:
        record = None if lease is None else LeaseRecord.read(lease)
    except UNREADABLE:
        return None
    if record is None or not record.open:
        return None
    return LeaseRow(b"", record._replace(open=False).seal(session))


def needed(reader: Reader, session: int, head: Head) -> set[int]:
    """Return the seqs of the checkpoints that an open run needs to be resumed.

    Empty if there is no open run, or if it cannot be read.
    """
    lease = reader.lease(session)
    if lease is None:
        return set()
    try:
        record = LeaseRecord.read(lease)
        row = reader.checkpoint(session, head.seq)
        extra = records.unseal_checkpoint(session, *row).record.extra if row else {}
    except UNREADABLE:
        return set()
    if not record.open:
        return set()
    base: int | None = extra.get("run", (None, 0, None))[2]
    return {record.began} if base is None else {record.began, base}
