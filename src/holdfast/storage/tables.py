"""The tables of a store, and the indexes by which their rows are found.

A backend keeps these tables. It knows their columns and indexes, and nothing of what they mean.
Most rows have a column `body`: a sealed row, see `format.rows`. A `pos` holds two numbers: a
session and a number in it, or a stream and the number of an item.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Row = tuple[Any, ...]
"""A row of a look-up: the columns of its index."""
INTEGERS = {"num", "pos", "session", "seq", "origin", "ancestor", "kind", "size", "uses"}
"""The columns of keys and indexes that are whole numbers. `space` is text, all others are bytes."""


@dataclass(frozen=True, eq=False, slots=True)
class Index:
    """A way to find rows of a table.

    `get` and `scan` of a `View` return its `columns`. Some of these are computed: `size` is the
    length of the body, `begin` has the body's first 9 bytes, `age` is the time in seconds since the
    row was written or renewed.
    """

    table: str
    by: tuple[str, ...]
    """The columns that order the rows. Together they are unique."""
    columns: tuple[str, ...]
    """The columns that a look-up returns."""
    only: str | None = None
    """If given, the index has only rows in which this column is set."""


SESSIONS = Index("sessions", ("num",), ("num", "name", "body"))
SESSIONS_BY_NAME = Index("sessions", ("name",), ("num", "name", "body"))
FORKS = Index("sessions", ("origin", "num"), ("origin", "num"), only="origin")
"""Sessions by the position of the checkpoint that they were forked from."""
HEADS = Index("heads", ("session",), ("session", "body"))
CHECKPOINTS = Index("checkpoints", ("pos",), ("pos", "id", "body"))
CHECKPOINTS_BY_ID = Index("checkpoints", ("id",), ("id", "pos"))
KEYS = Index("keys", ("session", "key"), ("session", "seq"))
"""External keys of checkpoints."""
ITEMS = Index("items", ("pos",), ("pos", "body"))
"""Rows of one or more items. The position is that of the first."""
ITEM_SIZES = Index("items", ("pos",), ("pos", "size", "begin"))
BLOBS = Index("blobs", ("digest",), ("digest", "body"))
BLOB_USES = Index("blobs", ("num",), ("num", "digest", "size", "uses"))
"""The storage numbers blobs as they come. `uses` changes whenever a commit refers to a blob."""
BLOB_VERSIONS = Index("blobs", ("digest",), ("digest", "uses"))
MARKS = Index("marks", ("pos", "kind", "value"), ("pos", "kind", "value", "body"))
"""Labels and tags."""
MARKS_BY_VALUE = Index("marks", ("kind", "value", "pos"), ("pos", "body"))
OPERATIONS = Index("operations", ("pos",), ("pos", "body"))
TOMBSTONES = Index("tombs", ("pos",), ("pos", "body"))
GRAFTS = Index("gaps", ("pos",), ("pos", "body"))
GRAFTS_BY_ANCESTOR = Index("gaps", ("ancestor", "pos"), ("ancestor", "pos"), only="ancestor")
TERMS = Index("facets", ("kind", "value", "id"), ("id",))
"""Index terms, by which searches find checkpoints and sessions."""
LEASES = Index("leases", ("session",), ("session", "token", "body", "age"))
JOURNAL = Index("journal", ("pos",), ("pos", "body"))
TALLIES = Index("tallies", ("session",), ("session", "marks", "operations", "tombs", "lease"))
TALLIED_LEASES = Index("tallies", ("session",), ("session", "lease"), only="lease")
SPANS = Index("spans", ("session",), ("session", "first", "next"))
"""The numbers of a journal's entries. The storage itself writes these rows: a new entry raises
`next`, and the removal of a range raises `first`. No number is used again."""
COUNTERS = Index("counters", ("space",), ("space", "body"))

MEASURED = (
    "items", "blobs", "checkpoints", "sessions", "operations", "marks", "tombs", "gaps", "journal",
)  # fmt: skip
"""The tables whose sizes `View.sizes` returns."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table: the columns of the rows that are written to it. The first ones are the key."""

    columns: tuple[str, ...]
    key: int = 1
    """How many columns the key has."""


TABLES = {
    "sessions": Table(("num", "name", "origin", "body")),
    "heads": Table(("session", "body")),
    "checkpoints": Table(("pos", "id", "body")),
    "keys": Table(("session", "key", "seq"), 2),
    "items": Table(("pos", "body")),
    "blobs": Table(("digest", "body")),
    "marks": Table(("pos", "kind", "value", "body"), 3),
    "operations": Table(("pos", "body")),
    "tombs": Table(("pos", "body")),
    "gaps": Table(("pos", "ancestor", "body")),
    "facets": Table(("kind", "value", "id"), 3),
    "leases": Table(("session", "token", "body")),
    "journal": Table(("pos", "body")),
    "tallies": Table(("session", "marks", "operations", "tombs", "lease")),
    "spans": Table(("session", "first", "next")),
    "counters": Table(("space", "body")),
}
INDEXES = [each for each in globals().values() if isinstance(each, Index)]
