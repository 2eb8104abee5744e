"""Sums and counts that a store keeps beside its rows. They show rows that a disk has lost."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, NamedTuple

from holdfast.errors import UNREADABLE
from holdfast.format.records import (
    COPIED,
    FREED,
    MISSING,
    SPACES,
    seal_counter,
    unseal_counter,
)
from holdfast.storage.rows import JournalRow

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence


class Turnover(NamedTuple):
    """Two random numbers by which gc and copies detect each other.

    A copy relies on data that it has found in the store; gc relies on data being unused. So each
    copy sets a new `copied`, and is refused if `freed` has changed since it read the store. gc sets
    a new `freed`, and is refused if `copied` has changed. A number is 0 if there was no gc or copy
    yet.
    """

    freed: int
    copied: int

    @staticmethod
    def new() -> int:
        """Return a random number above 0."""
        return random.getrandbits(52) + 1


_RESERVED = 100_000
"""More numbers than all processes together can have reserved without using them."""


def faulty_counters(
    rows: Mapping[str, bytes], used: Mapping[str, int]
) -> Iterator[tuple[str, str]]:
    """Yield the space of each damaged counter, with a description of the damage.

    `used` maps each space of numbers to the highest number in use.
    """
    for space in (*SPACES, FREED, COPIED):
        if space not in rows:
            if space in SPACES:
                yield space, f"the counter of {space}s is missing"
            continue
        try:
            after = unseal_counter(space, rows[space])
        except UNREADABLE as e:
            yield space, e.message
            continue
        if after <= used.get(space, 0):
            yield space, f"the counter of {space}s gives numbers that are in use"


def new_counter(space: str, used: Mapping[str, int]) -> bytes:
    """Return a row that replaces a damaged counter. It never gives a number a second time."""
    return seal_counter(space, used[space] + _RESERVED if space in SPACES else Turnover.new())


class Lease(NamedTuple):
    """The right to write a session's journal. It belongs to the run that knows the token."""

    session: int
    token: bytes
    body: bytes
    """The sealed row."""
    age: float
    """Seconds since the lease was taken or renewed, by a monotonic clock or that of the server."""

    @classmethod
    def lost(cls, session: int) -> Lease:
        """Return a placeholder for a lease that is missing or outdated."""
        return cls(session, b"", MISSING, float("inf"))


class Tally(NamedTuple):
    """Checksums over the rows of a session, stored apart from these rows.

    They show that rows are missing or outdated, because a disk has lost a write or rows were
    removed by hand. The order of the rows does not matter.
    """

    marks: int = 0
    operations: int = 0
    tombstones: int = 0
    lease: bytes | None = None
    """See `of_lease`."""

    @staticmethod
    def total(bodies: Iterable[bytes]) -> int:
        """Return the sum of the digests at the beginning of sealed rows."""
        return sum(map(Tally.of_row, bodies)) & TALLY_MASK

    @staticmethod
    def of_row(body: bytes) -> int:
        """Return the digest at the beginning of a sealed row, as a number."""
        begin = body[:8] if type(body) is bytes else b""
        return int.from_bytes(begin.ljust(8, b"\0"), "big") & TALLY_MASK

    @staticmethod
    def of_lease(token: bytes, body: bytes) -> bytes:
        """Return the digest and token of a lease row; empty if they cannot be read."""
        return body[:8] + token if type(body) is type(token) is bytes else b""


TALLY_MASK = (1 << 62) - 1


class Span(NamedTuple):
    """The entry numbers that a journal should have. A backend stores it apart from the entries."""

    first: int = 1
    """The lowest number that was not freed."""
    next: int = 1
    """The number after the newest entry."""

    def whole(self, rows: Sequence[JournalRow], low: int, limit: int) -> list[JournalRow]:
        """Return the entries from `low` on, with MISSING in place of missing or uncounted ones.

        `rows` are the entries that exist, at most `limit`. One MISSING row stands for a series of
        missing entries; the last missing entry of the journal also gets its own.
        """
        out: list[JournalRow] = []
        at = max(self.first, low)
        for row in rows:
            if row.number > at:
                out.append(JournalRow(at, MISSING))
            out.append(row if row.number < self.next else JournalRow(row.number, MISSING))
            at = row.number + 1
        if len(rows) < limit and at < self.next:
            out += [JournalRow(n, MISSING) for n in sorted({at, self.next - 1})]
        return out[:limit]

    def check(self, low: int | None, high: int | None) -> Iterator[str]:
        """Yield a description if the journal has entries that it should not have."""
        if low is not None and high is not None and not self.first <= low <= high < self.next:
            yield "the journal has entries that were freed, or that nothing has counted"
