"""Rows of a table in memory, in the order of some of their columns."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from copy import copy
from operator import itemgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

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

    __slots__ = ("_key_of", "_only", "keys", "rows")

    def __init__(self, columns: Sequence[str], by: Sequence[str], only: str | None = None) -> None:
        at = [columns.index(column) for column in by]
        self._key_of: Callable[[Row], Key] = (
            itemgetter(*at) if len(at) > 1 else lambda row: (row[at[0]],)
        )
        self._only = None if only is None else columns.index(only)
        self.keys: list[Key] = []
        self.rows: dict[Key, Row] = {}

    def key(self, row: Row | None) -> Key | None:
        """Return the key of a row; None if the row is not in this order."""
        if row is None or (self._only is not None and row[self._only] is None):
            return None
        return self._key_of(row)

    def fill(self, rows: Iterable[Row]) -> None:
        """Take these rows in place of those that are there."""
        key_of, only = self._key_of, self._only
        self.rows = {key_of(row): row for row in rows if only is None or row[only] is not None}
        self.keys = sorted(self.rows)

    def replace(self, old: Row | None, new: Row | None) -> None:
        """Remove one row and add another one."""
        before, after = self.key(old), self.key(new)
        if before is not None and before != after:
            self.remove(before)
        if new is not None:
            self.put(new)

    def put(self, row: Row) -> None:
        """Add a row, or replace the one with its key."""
        key = self.key(row)
        if key is None:
            return
        self.rows[key] = row
        if not self.keys or key > self.keys[-1]:  # most rows come in order
            self.keys.append(key)
        elif key != self.keys[-1]:
            self.keys[self._places(key)] = [key]

    def remove(self, key: Key) -> None:
        """Remove the row with this key, if there is one."""
        self.rows.pop(key, None)
        del self.keys[self._places(key)]

    def copy(self) -> OrderedRows:
        new = copy(self)
        new.keys, new.rows = self.keys.copy(), self.rows.copy()
        return new

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
