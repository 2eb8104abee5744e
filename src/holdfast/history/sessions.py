"""List the sessions of a store."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from holdfast import ids
from holdfast.errors import UNREADABLE, InvalidRequest
from holdfast.format import records
from holdfast.history import lineage
from holdfast.history.checkpoint import SessionInfo
from holdfast.storage.rows import Address, SessionRow

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.history.filters import Query
    from holdfast.storage.reader import Reader
    from holdfast.storage.repository import Repository

_PAGE = 200
_HIGHEST_ID = b"\xff" * (ids.BYTES + 1)


def sessions(repository: Repository, query: Query, after: str | None) -> Iterator[SessionInfo]:
    """Yield the sessions that match, ordered by name, a page at a time.

    Raises InvalidRequest if a filter is invalid.
    """
    query.check()
    if after is not None and not isinstance(after, str):
        raise InvalidRequest(f"after must be the name of a session, not {after!r}")
    at = None if after is None else records.encode_name(after)
    while True:
        with repository.reader() as reader:
            rows = reader.sessions(at, _PAGE)
            page = [describe(reader, row) for row in rows if not row.is_deleted]
        if not rows:
            return
        yield from (info for info in page if may_match(info, query))
        at = rows[-1].name


def recent(reader: Reader, checkpoints: int) -> list[SessionInfo]:
    """Return the sessions that the newest checkpoints of the store belong to, newest first."""
    newest = reader.newest_ids(b"", _HIGHEST_ID, checkpoints)
    found = []
    for number in dict.fromkeys(row.session for row in newest):
        row = reader.session_by_number(number)
        if row is not None and not row.is_deleted:
            found.append(describe(reader, row))
    return found


def deleted(repository: Repository) -> Iterator[SessionInfo]:
    """Yield the sessions that are deleted and not freed yet, under their former names."""
    with repository.reader() as reader:
        found = [describe(reader, row) for row in lineage.deleted_sessions(reader)]
    yield from found


def describe(reader: Reader, row: SessionRow) -> SessionInfo:
    """Return a session with its head. A part that cannot be read is left out.

    A deleted session is described by its former name.
    """
    number = row.number
    name, agent, forked = records.shown_name(row.plain_name), None, False
    head, head_seq, count, newest, operations = None, 0, 0, 0, 0
    damage: list[str] = []
    with _noted(damage):
        name = records.decode_name(row.plain_name)
        facts = records.unseal_session(*row)
        agent, forked = facts.agent, facts.origin is not None
    with _noted(damage):
        count, newest = lineage.count(reader, number), lineage.newest(reader, number)
    with _noted(damage):
        at = lineage.read_head(reader, number)[1]
        head_seq, operations = at.seq, at.operations
        if head_seq:
            place = Address(number, head_seq)
            record = lineage.read_row(reader, place).record
            head = lineage.to_checkpoint(reader, place, record)
    why = damage[0] if damage else None
    return SessionInfo(name, agent, head, count, why, newest, operations, forked, head_seq)


def may_match(info: SessionInfo, query: Query) -> bool:
    """Return whether a session matches. Parts that cannot be read count as a match.

    The agent is that of the session; the other filters apply to its head.
    """
    unknown = info.damaged is not None
    agent, query = query.agent, replace(query, agent=None)
    if agent not in (None, info.agent) and not (unknown and info.agent is None):
        return False
    if info.head is None:
        return unknown or query == type(query)()
    return query.may_match(info.head)


@contextmanager
def _noted(damage: list[str]) -> Iterator[None]:
    """Add the error of an unreadable row to `damage`, so that the other parts are shown."""
    try:
        yield
    except UNREADABLE as e:
        damage.append(e.message)
