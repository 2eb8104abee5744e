"""Rows of a table in memory, in the order of some of their columns."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from holdfast.storage.contract import Key
    from holdfast.storage.tables import Row


class _Last:
    """Comes after every value."""

    def __gt__(self, _: object) -> bool:
        return True

    def __lt__(self, _: object) -> bool:
        return False


_LAST = _Last()


class OrderedRows:
    """Rows in the order of the columns `by`, which are unique together.

    With `only`, rows in which that column is None are left out. Every change can be repeated
    without harm.
    """

    def __init__(self, columns: Sequence[str], by: Sequence[str], only: str | None = None) -> None:
        self._at = [columns.index(column) for column in by]
        self._only = None if only is None else columns.index(only)
        self.keys: list[Key] = []
        self.rows: dict[Key, Row] = {}

    def key(self, row: Row | None) -> Key | None:
        """Return the key of a row; None if the row is not in this order."""
        if row is None or (self._only is not None and row[self._only] is None):
            return None
        return tuple([row[i] for i in self._at])

    def fill(self, rows: Iterable[Row]) -> None:
        """Take these rows in place of those that are there."""
        self.rows = {key: row for row in rows if (key := self.key(row)) is not None}
        self.keys = sorted(self.rows)

    def replace(self, old: Row | None, new: Row | None) -> None:
        """Remove one row and add another one."""
        before, after = self.key(old), self.key(new)
        if before is not None and before != after:
            self.rows.pop(before, None)
            del self.keys[self._places(before)]
        if new is not None and after is not None:
            self.rows[after] = new
            self.keys[self._places(after)] = [after]

    def _places(self, key: Key) -> slice:
        return slice(bisect_left(self.keys, key), bisect_right(self.keys, key))

    def between(
        self, low: Any = None, high: Any = None, *, prefix: Key = (), floor: Any = None
    ) -> list[Key]:
        """Return the keys that a `View.scan` with these bounds finds, lowest first."""
        first = prefix if low is None else (*prefix, low)
        start = bisect_left(self.keys, first)
        stop = bisect_left(self.keys, (*prefix, _LAST if high is None else high))
        at_low = start < len(self.keys) and self.keys[start] == first
        if floor is not None and start > 0 and not at_low:
            start -= self.keys[start - 1] >= (*prefix, floor)
        return self.keys[start:stop]

    def scan(
        self,
        low: Any = None,
        high: Any = None,
        *,
        prefix: Key = (),
        limit: int | None = None,
        reverse: bool = False,
        floor: Any = None,
    ) -> list[Row]:
        """Return the stored rows that such a `View.scan` finds."""
        keys = self.between(low, high, prefix=prefix, floor=floor)
        return [self.rows[key] for key in (keys[::-1] if reverse else keys)[:limit]]
