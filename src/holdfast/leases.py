"""Who runs a session: one process at a time, and for how long that is believed.

A lease is given up by its holder, or ends by itself when it was not renewed for a while. Of one
on this machine more can be known: that its process is gone, and then nobody has to wait.
"""

from __future__ import annotations

import os
import secrets
import socket
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from holdfast import clock
from holdfast.codec import records
from holdfast.errors import UNREADABLE, Corrupt, SessionBusy

if TYPE_CHECKING:
    from holdfast.backends.base import Lease, Reader
    from holdfast.codec.records import Head

TTL = 30.0
"""Seconds without a sign of life after which a lease is anybody's."""

_ours: set[bytes] = set()
"""Tokens of the runs that are active in this process."""


def new_token() -> bytes:
    token = secrets.token_bytes(8)
    _ours.add(token)
    return token


def forget(token: bytes) -> None:
    _ours.discard(token)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_ours.clear)


class Owner(NamedTuple):
    """A process, told apart from all others of its machine, before and after it."""

    host: str
    pid: int
    boot: str
    space: str
    """The namespace that its number is of: containers count for themselves."""
    started: str
    """When it was started, in the system's own words."""

    @classmethod
    def this(cls) -> Owner:
        return cls(socket.gethostname(), os.getpid(), *_here(), _started(os.getpid()))

    def is_gone(self, token: bytes) -> bool:
        """Whether this is known for sure."""
        if not self.boot or (self.boot, self.space) != _here():
            return False
        if _started(self.pid) != self.started:
            return True
        return self.pid == os.getpid() and token not in _ours


@lru_cache(maxsize=1)
def _here() -> tuple[str, str]:
    try:
        return clock.boot_id(), os.readlink("/proc/self/ns/pid")
    except OSError:
        return "", ""


def _started(pid: int) -> str:
    """Empty if there is no such process, or a dead one that nobody has waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, UnicodeDecodeError):
        return ""
    return "" if fields[0] in "ZX" else fields[19]


class Held(NamedTuple):
    """What a lease says: of the run that has it, or that had it last."""

    run: str
    """An id for the run, the same for all who take it up again."""
    name: str | None
    owner: Owner
    attempt: int
    """How often it was taken up."""
    began: int
    """The seq of the checkpoint that it began with,"""
    first: int
    """and the number of its first entry in the journal."""
    open: bool
    """It has not come to its end, so it can be taken up again."""
    since: int = 0
    """The number of the first entry that can be of this attempt."""

    def seal(self, session: int) -> bytes:
        return records.seal_lease(session, self._asdict() | {"owner": [*self.owner]})

    @classmethod
    def read(cls, lease: Lease) -> Held:
        facts = records.unseal_lease(lease.session, lease.body)
        try:
            held = cls(**facts | {"owner": Owner(*facts["owner"])})
        except (LookupError, TypeError):
            held = None
        if held is None or not all(map(isinstance, (*held, *held.owner), (*_HELD, *_OWNER))):
            raise Corrupt("the lease of a session does not say what it should")
        return held


_HELD = (str, str | None, Owner, int, int, int, bool, int)
_OWNER = (str, int, str, str, str)


def is_alive(lease: Lease, held: Held) -> bool:
    """Whether somebody may be at work under a lease that was not given back."""
    return bool(lease.token) and lease.age < TTL and not held.owner.is_gone(lease.token)


def holder(reader: Reader, session: int, head: Head) -> tuple[Lease, Held] | None:
    """Whoever has a session now, as far as can be told."""
    if head.lease is None:
        return None
    lease = reader.lease(session)
    if lease is None or lease.token != head.lease:
        return None
    held = Held.read(lease)
    return (lease, held) if is_alive(lease, held) else None


def check_free(reader: Reader, session: int, name: str, head: Head) -> None:
    """Raise SessionBusy while somebody runs the session."""
    found = holder(reader, session, head)
    if found is None:
        return
    lease, held = found
    left = max(TTL - lease.age, 0.0)
    raise SessionBusy(
        f"session {name!r} is run by process {held.owner.pid} on {held.owner.host}",
        hint=f"its lease ends in {left:.0f} s unless it is renewed; fork() and annotate meanwhile, "
        "or run(takeover=True)",
    )


def closed(reader: Reader, session: int) -> tuple[bytes, bytes] | None:
    """The lease of a session whose run is not to be taken up again; None if there is nothing to."""
    lease = reader.lease(session)
    try:
        held = None if lease is None else Held.read(lease)
    except UNREADABLE:
        return None
    if held is None or not held.open:
        return None
    return b"", held._replace(open=False).seal(session)


def needed(reader: Reader, session: int, head: Head) -> set[int]:
    """The seqs of the checkpoints that a run goes on from, if it was not completed."""
    lease = reader.lease(session)
    if lease is None:
        return set()
    try:
        held = Held.read(lease)
        row = reader.checkpoint(session, head.seq)
        extra = records.unseal_checkpoint(session, head.seq, *row).record.extra if row else {}
    except UNREADABLE:
        return set()
    if not held.open:
        return set()
    base: int | None = extra.get("run", (None, 0, None))[2]
    return {held.began} if base is None else {held.began, base}
