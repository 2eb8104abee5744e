"""Reader: what callers ask of one moment of a store, on top of any backend's tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.errors import Corrupt
from holdfast.format.item_streams import STREAM_BITS
from holdfast.format.records import COPIED, FREED, MAX_SEQ, SEQ_BITS, position, unseal_counter
from holdfast.storage.rows import (
    Address,
    BlobUse,
    CheckpointRow,
    Fork,
    GraftRow,
    HeadRow,
    IdRow,
    ItemsBegin,
    ItemsRow,
    JournalRow,
    MarkRow,
    OperationRow,
    SessionRow,
    TombstoneAt,
    TombstoneRow,
    maker,
)
from holdfast.storage.tables import (
    BLOB_USES,
    BLOBS,
    CHECKPOINTS,
    CHECKPOINTS_BY_ID,
    COUNTERS,
    FORKS,
    GRAFTS,
    GRAFTS_BY_ANCESTOR,
    HEADS,
    ITEM_SIZES,
    ITEMS,
    JOURNAL,
    KEYS,
    LEASES,
    MARKS,
    MARKS_BY_VALUE,
    OPERATIONS,
    SESSIONS,
    SESSIONS_BY_NAME,
    SPANS,
    TALLIED_LEASES,
    TALLIES,
    TERMS,
    TOMBSTONES,
)
from holdfast.storage.tally import Lease, Span, Tally, Turnover, faulty_counters

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from types import TracebackType

    from holdfast.storage.contract import Backend, View
    from holdfast.storage.tables import Index, Row


# Rows of long listings are made without the cost of their constructors.
_checkpoint, _id_row = maker(CheckpointRow), maker(IdRow)
_items, _mark = maker(ItemsRow), maker(MarkRow)


def _as_id(id: object) -> bytes:
    """Return an id, or b"" if the type of the column is damaged. The row's seal then fails."""
    return id if type(id) is bytes else b""


_TALLIED = {"marks": "labels or tags", "operations": "operations", "tombstones": "deletions"}


class Reader:
    """A consistent view: all reads through one reader see the same moment."""

    __slots__ = ("view",)

    def __init__(self, view: View) -> None:
        self.view = view

    def _range(self, index: Index, session: int, low: int, high: int) -> list[tuple[int, bytes]]:
        """Return the rows of a session with low <= number <= high, as numbers and bodies."""
        base = session << SEQ_BITS
        if low == high:
            row = self.view.get(index, base | low)
            return [] if row is None else [(low, row[1])]
        rows = self.view.scan(index, base | low, (base | high) + 1)
        return [(pos & MAX_SEQ, body) for pos, body in rows]

    # -- sessions ------------------------------------------------------------------------------

    def session(self, name: bytes) -> SessionRow | None:
        """Return the session of exactly this name."""
        row = self.view.get(SESSIONS_BY_NAME, name)
        return None if row is None else SessionRow(*row)

    def session_by_number(self, session: int) -> SessionRow | None:
        """Return the session of this number."""
        row = self.view.get(SESSIONS, session)
        if row is not None and type(row[1]) is not bytes:
            raise Corrupt("the name of a session is damaged")
        return None if row is None else SessionRow(*row)

    def sessions(self, after: bytes | None, limit: int) -> list[SessionRow]:
        """Return sessions ordered by the bytes of their names, strictly after `after`."""
        low = b"" if after is None else after + b"\0"
        return [*map(maker(SessionRow), self.view.scan(SESSIONS_BY_NAME, low, limit=limit))]

    def head(self, session: int) -> bytes | None:
        """Return the head row of a session."""
        row = self.view.get(HEADS, session)
        return None if row is None else row[1]

    def heads(self, after: int, limit: int) -> list[HeadRow]:
        """Return head rows in the order of their sessions, strictly after a session."""
        return [*map(maker(HeadRow), self.view.scan(HEADS, after + 1, limit=limit))]

    def forks(self, session: int, low: int, high: int) -> list[Fork]:
        """Return the sessions that were forked from a checkpoint with low <= seq <= high."""
        rows = self.view.scan(FORKS, position(session, low), position(session, high) + 1)
        return [Fork(origin & MAX_SEQ, number) for origin, number in rows]

    # -- checkpoints ---------------------------------------------------------------------------

    def checkpoint(self, session: int, seq: int) -> CheckpointRow | None:
        """Return the checkpoint at this address, also if it is deleted."""
        row = self.view.get(CHECKPOINTS, session << SEQ_BITS | seq)
        return None if row is None else CheckpointRow(seq, _as_id(row[1]), row[2])

    def checkpoints(self, session: int, low: int, high: int, limit: int) -> list[CheckpointRow]:
        """Return the checkpoints with low <= seq <= high, ordered by seq, at most `limit`."""
        base = session << SEQ_BITS
        rows = self.view.scan(CHECKPOINTS, base | low, (base | high) + 1, limit=limit)
        return [_checkpoint((pos & MAX_SEQ, _as_id(id), body)) for pos, id, body in rows]

    def count_checkpoints(self) -> int:
        """Return the number of checkpoints in the store, including deleted ones."""
        return self.view.count("checkpoints")

    def find_ids(self, low: bytes, high: bytes, limit: int) -> list[IdRow]:
        """Return the checkpoints with low <= id <= high, ordered by id."""
        if low == high and limit == 1:
            row = self.view.get(CHECKPOINTS_BY_ID, low)
            rows = [] if row is None else [row]
        else:
            rows = self.view.scan(CHECKPOINTS_BY_ID, low, high + b"\0", limit=limit)
        return [_id_row((pos >> SEQ_BITS, pos & MAX_SEQ, id)) for id, pos in rows]

    def newest_ids(self, low: bytes, high: bytes, limit: int) -> list[IdRow]:
        """Return the checkpoints with low <= id < high, highest id first."""
        rows = self.view.scan(CHECKPOINTS_BY_ID, low, high, limit=limit, reverse=True)
        return [_id_row((pos >> SEQ_BITS, pos & MAX_SEQ, id)) for id, pos in rows]

    def find_key(self, session: int, key: bytes) -> int | None:
        """Return the seq of the checkpoint with this external key."""
        row = self.view.get(KEYS, session, key)
        if row is not None and type(row[1]) is not int:
            raise Corrupt("the index of keys is damaged")
        return None if row is None else row[1]

    def find_terms(
        self, kind: int, value: bytes, low: bytes, high: bytes, limit: int
    ) -> list[bytes]:
        """Return the ids with this index term and low <= id < high, highest first."""
        rows = self.view.scan(TERMS, low, high, prefix=(kind, value), limit=limit, reverse=True)
        return [id for (id,) in rows]

    # -- marks, operations, tombstones and grafts ----------------------------------------------

    def marks(self, session: int, low: int, high: int) -> list[MarkRow]:
        """Return the labels and tags of the checkpoints with low <= seq <= high."""
        rows = self.view.scan(MARKS, position(session, low), position(session, high) + 1)
        return [_mark((pos & MAX_SEQ, kind, value, body)) for pos, kind, value, body in rows]

    def find_marks(self, session: int, kind: int, value: bytes) -> list[MarkRow]:
        """Return this label or tag of all checkpoints that have it, newest first."""
        low, high = position(session, 0), position(session + 1, 0)
        rows = self.view.scan(MARKS_BY_VALUE, low, high, prefix=(kind, value), reverse=True)
        return [_mark((pos & MAX_SEQ, kind, value, body)) for pos, body in rows]

    def operations(self, session: int, low: int, high: int) -> list[OperationRow]:
        """Return the operations with low <= number <= high, in order."""
        return [*map(maker(OperationRow), self._range(OPERATIONS, session, low, high))]

    def tombstones(self, session: int, low: int, high: int) -> list[TombstoneRow]:
        """Return the tombstones with low <= seq <= high, ordered by seq.

        They mark deleted checkpoints until gc.
        """
        return [*map(maker(TombstoneRow), self._range(TOMBSTONES, session, low, high))]

    def all_tombstones(self, after: int, limit: int) -> list[TombstoneAt]:
        """Return tombstones of the whole store, in order, strictly after a position."""
        return [*map(maker(TombstoneAt), self.view.scan(TOMBSTONES, after + 1, limit=limit))]

    def count_tombstones(self) -> int:
        """Return the number of tombstones in the store."""
        return self.view.count("tombs")

    def grafts(self, session: int, low: int, high: int) -> list[GraftRow]:
        """Return the grafts with low <= seq <= high, ordered by seq."""
        return [*map(maker(GraftRow), self._range(GRAFTS, session, low, high))]

    def grafts_below(self, session: int) -> list[Address]:
        """Return the addresses of all grafts, of any session, whose ancestor is in this one."""
        rows = self.graft_ancestors(session)
        return sorted([Address(pos >> SEQ_BITS, pos & MAX_SEQ) for _, pos in rows])

    def graft_ancestors(self, session: int) -> list[Row]:
        """Return all grafts whose ancestor is in this session: the positions of both."""
        low, high = position(session, 0), position(session + 1, 0)
        return self.view.scan(GRAFTS_BY_ANCESTOR, low, high)

    # -- data ----------------------------------------------------------------------------------

    def items(self, stream: int, start: int, stop: int) -> list[ItemsRow]:
        """Return the rows that hold the items [start, stop) of a stream, in order.

        The row that begins before `start` and reaches into the range comes first. Missing rows are
        left out; that is no error here.
        """
        base = stream << STREAM_BITS
        rows = self.view.scan(ITEMS, base + start, base + stop, floor=base)
        return [_items((pos - base, body)) for pos, body in rows]

    def item_rows(self, after: int, limit: int) -> list[ItemsBegin]:
        """Return the rows of items of all streams, in order, strictly after a position."""
        return [*map(maker(ItemsBegin), self.view.scan(ITEM_SIZES, after + 1, limit=limit))]

    def blob(self, digest: bytes) -> bytes | None:
        """Return the row of a blob."""
        row = self.view.get(BLOBS, digest)
        return None if row is None else row[1]

    def blob_rows(self, after: int, limit: int) -> list[BlobUse]:
        """Return the blobs of the store.

        `after` is the number of the last blob of the page before.
        """
        return [*map(maker(BlobUse), self.view.scan(BLOB_USES, after + 1, limit=limit))]

    # -- leases and journals -------------------------------------------------------------------

    def lease(self, session: int) -> Lease | None:
        """Return the lease of a session."""
        row = self.view.get(LEASES, session)
        lease = None if row is None else Lease(*row)
        tally = self.tally(session)
        return lease if tally is None else _newest(session, lease, tally.lease)

    def leases(self, after: int, limit: int) -> list[Lease]:
        """Return leases ordered by session number, strictly after `after`."""
        found = [Lease(*row) for row in self.view.scan(LEASES, after + 1, limit=limit)]
        if not self.view.tallied:
            return found
        tallied: dict[int, bytes] = dict(self.view.scan(TALLIED_LEASES, after + 1, limit=limit))
        there = {lease.session: lease for lease in found}
        numbers = sorted(there.keys() | tallied.keys())[:limit]
        newest = [_newest(n, there.get(n), tallied.get(n)) for n in numbers]
        return [lease for lease in newest if lease is not None]

    def journal(self, session: int, low: int, limit: int) -> list[JournalRow]:
        """Return the entries of the journal from number `low` on, in order.

        A row that cannot be unsealed stands for missing entries.
        """
        span = self.span(session)
        low = max(low, span.first)
        base = session << SEQ_BITS
        rows = self.view.scan(JOURNAL, base | low, (base | MAX_SEQ) + 1, limit=limit)
        return span.whole([JournalRow(pos & MAX_SEQ, body) for pos, body in rows], low, limit)

    def last_entry(self, session: int) -> int:
        """Return the number of the newest entry ever written to the journal, or 0."""
        return self.span(session).next - 1

    def span(self, session: int) -> Span:
        """Return the entry numbers that a journal should have."""
        row = self.view.get(SPANS, session)
        if row is not None and {*map(type, row[1:])} != {int}:
            raise Corrupt("the numbers of a journal's entries are damaged")
        return Span() if row is None else Span(*row[1:])

    def _journal_ends(self, session: int) -> tuple[int | None, int | None]:
        """Return the numbers of the first and the last entry that exist."""
        low, high = position(session, 0), position(session + 1, 0)
        first = self.view.scan(JOURNAL, low, high, limit=1)
        last = self.view.scan(JOURNAL, low, high, limit=1, reverse=True) if first else []
        return (first[0][0] & MAX_SEQ, last[0][0] & MAX_SEQ) if first else (None, None)

    # -- the store -----------------------------------------------------------------------------

    def turnover(self) -> Turnover:
        """Return the turnover of the store.

        If it is the first read of this reader, it is not newer than any later read.
        """
        rows = [(space, self.view.get(COUNTERS, space)) for space in (FREED, COPIED)]
        freed, copied = [0 if row is None else unseal_counter(space, row[1]) for space, row in rows]
        return Turnover(freed, copied)

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Return the number of rows and their bytes, by kind of row."""
        return self.view.sizes()

    def tally(self, session: int) -> Tally | None:
        """Return the tally of a session; None if the store has none."""
        if not self.view.tallied:
            return None
        row = self.view.get(TALLIES, session)
        return Tally() if row is None else Tally(*row[1:])

    def check_tally(self, session: int) -> Iterator[str]:
        """Yield a description of each kind of row that a session has lost.

        `Backend.salvage` accepts that.
        """
        tally = self.tally(session)
        if tally is None:
            return
        for name, found in self.sums(session).items():
            if getattr(tally, name) != found:
                yield f"{_TALLIED[name]} do not add up: some are missing, damaged or old"
        if tally.lease is None and self.lease(session) is not None:
            yield "the tally of the session is missing, or is an old one"
        yield from self.span(session).check(*self._journal_ends(session))

    def sums(self, session: int) -> dict[str, int]:
        """Return the sums that the tally of a session should have, from the rows that exist."""
        return {
            "marks": Tally.total([row.body for row in self.marks(session, 0, MAX_SEQ)]),
            "operations": Tally.total([row.body for row in self.operations(session, 0, MAX_SEQ)]),
            "tombstones": Tally.total([row.body for row in self.tombstones(session, 0, MAX_SEQ)]),
        }

    def damage(self, session: int) -> str | None:
        """Return a description of loss in a session that its rows do not show, or None."""
        return next(self.view.problems(session), None) or next(self.check_tally(session), None)

    def check(self) -> Iterator[str]:
        """Yield descriptions of damage in the storage's own structures."""
        yield from self.view.problems()
        yield from self.check_counters()

    def check_counters(self) -> Iterator[str]:
        """Yield descriptions of damaged counters."""
        rows: dict[str, bytes] = dict(self.view.scan(COUNTERS))
        if rows or self.view.tallied:
            yield from [wrong for _, wrong in faulty_counters(rows, self._numbers_in_use())]

    def _numbers_in_use(self) -> dict[str, int]:
        """Return the highest session number and the highest stream number in use."""

        def last(index: Index, high: int) -> int:
            rows = self.view.scan(index, 0, high, limit=1, reverse=True)
            return rows[0][0] if rows else 0

        # Higher keys come from damage.
        numbers, positions = 1 << 30, 1 << 62
        newest = last(CHECKPOINTS, positions) >> SEQ_BITS
        session = max(last(SESSIONS, numbers), last(HEADS, numbers), newest)
        return {"session": session, "stream": last(ITEM_SIZES, positions) >> STREAM_BITS}


class Reading:
    """The context of a view, as the context of a Reader."""

    __slots__ = ("_view",)

    def __init__(self, view: AbstractContextManager[View]) -> None:
        self._view = view

    def __enter__(self) -> Reader:
        return Reader(self._view.__enter__())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        return self._view.__exit__(kind, error, traceback)


def open_reader(backend: Backend) -> Reading:
    """Return a context with one consistent view of a store."""
    return Reading(backend.view())


def _newest(session: int, lease: Lease | None, tallied: bytes | None) -> Lease | None:
    """Return the lease, or a placeholder for a lost lease if the tally has another one."""
    found = None if lease is None else Tally.of_lease(lease.token, lease.body)
    return lease if found == tallied else Lease.lost(session)
