"""Filters: list the checkpoints whose fields match.

Candidates come from the index with the fewest entries among those that the filters allow, newest
first, a page at a time. The record of each candidate is then checked against all filters. So memory
is bounded, other processes can write in between, and a damaged index can hide a match but never add
a false one.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypedDict, TypeVar

from holdfast import ids
from holdfast.errors import (
    UNREADABLE,
    Corrupt,
    InvalidRequest,
    require_count,
    require_text,
)
from holdfast.format import records
from holdfast.format.records import AGENT, LABEL, STATUS, TAG, TRIGGER
from holdfast.history import lineage
from holdfast.history.checkpoint import Checkpoint
from holdfast.log import logger
from holdfast.model import STATUSES
from holdfast.storage.reader import open_reader
from holdfast.storage.rows import Address

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from holdfast.format.records import Row
    from holdfast.model import Status
    from holdfast.storage.contract import Backend
    from holdfast.storage.reader import Reader


_FIRST_PAGE, PAGE = 16, 128
PROBE = 256
"""How many index entries are read per filter to find the filter with the fewest."""
_LOWEST, _HIGHEST = b"", b"\xff" * (ids.BYTES + 1)


T = TypeVar("T")


class Filters(TypedDict, total=False):
    """The filters that searches, lists of checkpoints and lists of sessions share."""

    status: Status | None
    trigger: str | None
    tag: str | None
    label: str | None
    meta: Mapping[str, Any] | None
    since: dt.datetime | None
    until: dt.datetime | None


@dataclass(frozen=True, slots=True)
class Query:
    """Filters of checkpoints. A checkpoint must match all that are given."""

    agent: str | None = None
    status: str | None = None
    trigger: str | None = None
    tag: str | None = None
    label: str | None = None
    meta: Mapping[str, Any] | None = None
    since: dt.datetime | None = None
    until: dt.datetime | None = None

    @classmethod
    def of(cls, filters: Filters, *, agent: str | None = None) -> Query:
        """Return a query of these filters. Raises InvalidRequest if one is unknown."""
        unknown = filters.keys() - Filters.__annotations__.keys()
        if unknown:
            raise InvalidRequest(
                f"unknown filter {min(unknown)!r}", hint=", ".join(Filters.__annotations__)
            )
        return cls(agent, **filters)

    def check(self) -> None:
        for name in ("agent", "trigger", "tag", "label"):
            value = getattr(self, name)
            if value is not None:
                require_text(name, value)
        if self.status is not None and self.status not in STATUSES:
            raise InvalidRequest(f"unknown status {self.status!r}", hint=", ".join(STATUSES))
        if self.meta is not None:
            if not hasattr(self.meta, "items"):
                raise InvalidRequest(f"meta must be a dict, not {self.meta!r}")
            if not all(type(key) is str for key in self.meta):
                raise InvalidRequest("the keys of meta must be strings")
        for name in ("since", "until"):
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, dt.datetime) or value.tzinfo is None:
                raise InvalidRequest(
                    f"{name} must be a datetime with a time zone, not {value!r}",
                    hint="datetime.now(UTC) - timedelta(days=1)",
                )

    def matches(self, c: Checkpoint) -> bool:
        """Return whether a checkpoint matches all filters."""
        meta = self.meta or {}
        return (
            self.agent in (None, c.agent)
            and self.status in (None, c.status)
            and self.trigger in (None, c.trigger)
            and self.label in (None, c.label)
            and (self.tag is None or self.tag in c.tags)
            and (self.since is None or c.created_at >= self.since)
            and (self.until is None or c.created_at < self.until)
            and (not meta or all(_same(c.meta.get(k, _NOTHING), v) for k, v in meta.items()))
        )

    def may_match(self, c: Checkpoint) -> bool:
        """Return whether it matches, or could match if its damaged marks were readable."""
        if c.damaged is None:
            return self.matches(c)
        return replace(self, tag=None, label=None).matches(c)

    def terms(self) -> list[tuple[int, bytes]]:
        """Return the index terms that every match has."""
        given = (
            (LABEL, self.label),
            (TAG, self.tag),
            (TRIGGER, self.trigger),
            (STATUS, None if self.status == "in_progress" else self.status),
        )
        return [(kind, records.encode_name(value)) for kind, value in given if value is not None]


_NOTHING = object()


def _same(a: Any, b: Any) -> bool:
    """Return whether two values are equal and have the same types at all depths."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(v, b[k]) for k, v in a.items())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


def checkpoints(
    backend: Backend,
    query: Query,
    before: str | Checkpoint | None = None,
    limit: int | None = None,
    session: str | None = None,
) -> Iterator[Checkpoint]:
    """Return the checkpoints that match, of one session or of all; see Store.checkpoints.

    Unreadable checkpoints are left out, with a warning in the log. Raises InvalidRequest if a
    filter is invalid.
    """
    check(query, limit)
    return islice(_Listing(backend, query, session).run(before), limit)


def check(query: Query, limit: int | None) -> None:
    """Raise InvalidRequest if a filter or the limit is invalid."""
    query.check()
    if limit is not None:
        require_count("limit", limit, least=0)


class Cursor(NamedTuple):
    """The last candidate that was checked."""

    id: bytes
    place: Address | None = None


class Scan(Generic[T]):
    """Checks candidates, newest first, and yields a result for each one that matches."""

    by_session = False
    """Whether the results of an agent come session by session, which is faster."""

    def __init__(self, backend: Backend, query: Query, session: str | None = None) -> None:
        self._backend, self._query, self._session = backend, query, session
        self._number: int | None = None
        self._marked: list[int] | None = None
        """Within one session: the seqs with the tag or label that are not yet checked."""
        self._term: tuple[int, bytes] | None = None
        self._size = min(_FIRST_PAGE, PAGE)
        """Candidates in the next page. Most callers want a few, so the first page is small."""

    def run(self, before: str | Checkpoint | None) -> Iterator[T]:
        """Yield the results behind the checkpoint `before`."""
        cursor = None if before is None else self._cursor(before)
        self._term = self._narrowest(cursor)
        while True:
            with open_reader(self._backend) as reader:
                places, cursor = self._page(reader, cursor)
                found = [it for place in places if (it := self._checked(reader, place)) is not None]
            yield from found
            if cursor is None:
                return

    def _cursor(self, before: str | Checkpoint) -> Cursor:
        before = before.id if isinstance(before, Checkpoint) else before
        raw = ids.from_text(before) if isinstance(before, str) else None
        if raw is None:
            raise InvalidRequest(f"before must be the id of a checkpoint, not {before!r}")
        return Cursor(raw)

    def _narrowest(self, cursor: Cursor | None) -> tuple[int, bytes] | None:
        """Return the index term with the fewest candidates; None if there is no term."""
        terms = self._query.terms() if self._session is None else []
        if len(terms) < 2:
            return terms[0] if terms else None
        low, high = self._bounds(cursor)
        with open_reader(self._backend) as reader:
            return min(terms, key=lambda f: len(reader.find_terms(f[0], f[1], low, high, PROBE)))

    def _page(
        self, reader: Reader, cursor: Cursor | None
    ) -> tuple[Sequence[Address], Cursor | None]:
        """Return a page of candidates, and the cursor for the next page; None after the last."""
        if self._session is not None:
            return self._in_session(reader, self._session, cursor)
        if self.by_session and self._term is None and self._query.agent is not None:
            return self._by_agent(reader, cursor)
        (low, high), size = self._bounds(cursor), self._size
        self._size = min(4 * size, PAGE)
        if self._term is None:
            rows = reader.newest_ids(low, high, size)
            after = Cursor(rows[-1].id) if len(rows) == size else None
            return [row.address for row in rows], after
        found = reader.find_terms(*self._term, low, high, size)
        places = [row.address for id in found for row in reader.find_ids(id, id, 1)]
        return places, Cursor(found[-1]) if len(found) == size else None

    def _bounds(self, cursor: Cursor | None) -> tuple[bytes, bytes]:
        """Return the range of ids to search.

        Ids begin with a time: that of the checkpoint, or a later one if the clock was set back.
        """
        low = _LOWEST
        if self._query.since is not None:
            low = ids.lowest_at(int(self._query.since.timestamp() * 1000))
        return low, cursor.id if cursor else _HIGHEST

    def _by_agent(
        self, reader: Reader, cursor: Cursor | None
    ) -> tuple[Sequence[Address], Cursor | None]:
        """Return a page from the agent's sessions, newest session and newest checkpoint first."""
        agent = records.encode_name(self._query.agent or "")
        top, seq = b"\xff" * 8, records.MAX_SEQ
        if cursor is not None:
            place = self._place(reader, cursor)
            top, seq = (place.session + 1).to_bytes(8, "big"), place.seq - 1
        for number in reader.find_terms(AGENT, agent, b"", top, 2):
            session = int.from_bytes(number, "big")
            newest = lineage.newest(reader, session)
            high = min(seq, newest) if int.from_bytes(top, "big") == session + 1 else newest
            places, after = self._down(reader, session, high)
            if places:
                return places, after
        return [], None

    def _in_session(
        self, reader: Reader, name: str, cursor: Cursor | None
    ) -> tuple[Sequence[Address], Cursor | None]:
        """Return a page from one session, on all branches, newest first.

        Uses the session's marks if the query has a tag or label.
        """
        found = reader.session(records.encode_name(name))
        if found is None or self._number not in (None, found.number):  # a new session has the name
            return [], None
        number = self._number = found.number
        below = records.MAX_SEQ + 1
        if cursor is not None:
            place = self._place(reader, cursor)
            if place.session != number:
                raise InvalidRequest(
                    f"checkpoint {ids.to_text(cursor.id)} is of another session than {name!r}"
                )
            below = place.seq
        marks = [term for term in self._query.terms() if term[0] in (LABEL, TAG)]
        if not marks:
            return self._down(reader, number, min(below - 1, lineage.newest(reader, number)))
        if self._marked is None:
            rows = min([reader.find_marks(number, *mark) for mark in marks], key=len)
            self._marked = sorted(row.seq for row in rows if row.seq < below)
        page = self._marked[: -PAGE - 1 : -1]
        del self._marked[-PAGE:]
        places = [Address(number, seq) for seq in page]
        return places, Cursor(b"", places[-1]) if self._marked else None

    def _down(
        self, reader: Reader, session: int, high: int
    ) -> tuple[Sequence[Address], Cursor | None]:
        """Return a page of a session's checkpoints from seq `high` down. Seqs may be missing."""
        while high > 0:
            rows = reader.checkpoints(session, max(high - PAGE + 1, 1), high, PAGE)
            if rows:
                places = [Address(session, row.seq) for row in rows[::-1]]
                return places, Cursor(rows[0].id, places[-1])
            high -= PAGE
        return [], None

    def _place(self, reader: Reader, cursor: Cursor) -> Address:
        if cursor.place is not None:
            return cursor.place
        return lineage.find_id(reader, cursor.id)

    def _checked(self, reader: Reader, place: Address) -> T | None:
        if lineage.is_checkpoint_deleted(reader, place):
            return None
        try:
            return self._result(reader, place, lineage.read_row(reader, place))
        except UNREADABLE as e:
            logger.warning("a search left out checkpoint %d of a session: %s", place.seq, e.message)
            return None

    def _result(self, reader: Reader, place: Address, row: Row) -> T | None:
        """Return the result for a candidate; None if it does not match."""
        raise NotImplementedError

    def _matching(self, reader: Reader, place: Address, row: Row) -> Checkpoint | None:
        """Return the checkpoint if it matches the filters.

        Raises Corrupt if damage hides that.
        """
        checkpoint = lineage.to_checkpoint(reader, place, row.record)
        if self._query.matches(checkpoint):
            return checkpoint
        if checkpoint.damaged and self._query.may_match(checkpoint):
            raise Corrupt(checkpoint.damaged)
        return None


class _Listing(Scan[Checkpoint]):
    by_session = True

    def _result(self, reader: Reader, place: Address, row: Row) -> Checkpoint | None:
        return self._matching(reader, place, row)
