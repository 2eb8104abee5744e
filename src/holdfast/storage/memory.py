"""A store in memory, for tests. It is also the model that other backends are compared with."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from contextlib import contextmanager, suppress
from functools import cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal

from holdfast import clock
from holdfast.errors import InvalidRequest
from holdfast.format.records import SPACES, position, seal_counter, unseal_counter
from holdfast.storage.contract import (
    Backend,
    Delete,
    DeleteIf,
    DeleteRange,
    Insert,
    Put,
    Rename,
    Share,
    StaleHead,
    View,
    check,
)
from holdfast.storage.tables import INDEXES, JOURNAL, MEASURED, SPANS, TABLES, Index

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from holdfast.storage.contract import Batch, Key, Write
    from holdfast.storage.tables import Row

_STORED = {"leases": ("since",), "blobs": ("num", "uses")}
"""The columns that the storage itself adds to a table."""
_COLUMNS = {name: (*table.columns, *_STORED.get(name, ())) for name, table in TABLES.items()}


@cache
def _part(index: Index, column: str) -> Callable[[Row], Any]:
    """Return a function that takes a stored row, and returns this column."""
    at = {column: n for n, column in enumerate(_COLUMNS[index.table])}
    if column == "size":
        return lambda row: len(row[at["body"]])
    if column == "begin":
        return lambda row: row[at["body"]][:9]
    if column == "age":
        return lambda row: clock.elapsed() - row[at["since"]]
    return itemgetter(at[column])


@cache
def _parts(index: Index) -> list[Callable[[Row], Any]]:
    return [_part(index, column) for column in index.columns]


def _repeatable(do: Callable[..., None], *arguments: Any) -> None:
    """Call a function that can be repeated without harm. After Ctrl-C, call it again to the end."""
    try:
        do(*arguments)
    except BaseException:
        do(*arguments)
        raise


class _Last:
    """Comes after every value."""

    def __gt__(self, _: object) -> bool:
        return True

    def __lt__(self, _: object) -> bool:
        return False


_LAST = _Last()


class _Order:
    """The rows of a table in the order of some of its columns. Every change can be repeated."""

    def __init__(self, table: str, by: tuple[str, ...], only: str | None = None) -> None:
        self._at = [_COLUMNS[table].index(column) for column in by]
        self._only = None if only is None else _COLUMNS[table].index(only)
        self.keys: list[Key] = []
        self.rows: dict[Key, Row] = {}

    def key(self, row: Row | None) -> Key | None:
        """Return the key of a row; None if the row is not in this order."""
        if row is None or (self._only is not None and row[self._only] is None):
            return None
        return tuple([row[i] for i in self._at])

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

    def between(self, low: Key, high: Key, floor: Key | None = None) -> list[Key]:
        """Return the keys from low to high, and the one before them if it is at least `floor`."""
        start, stop = bisect_left(self.keys, low), bisect_left(self.keys, high)
        at_low = start < len(self.keys) and self.keys[start] == low
        if floor is not None and start > 0 and not at_low and self.keys[start - 1] >= floor:
            start -= 1
        return self.keys[start:stop]


class MemoryBackend(Backend, View):
    """A store that exists as long as its process. A forked child gets a copy."""

    name = "memory"
    read_only = False
    tallied = False

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._closed = False
        self._version = 0
        self._blobs = 0
        """The number of the newest blob."""
        self.tables = {name: _Order(name, t.columns[: t.key]) for name, t in TABLES.items()}
        self._indexes = {i: _Order(i.table, i.by, i.only) for i in INDEXES}
        self._orders = {
            name: [*[self._indexes[i] for i in INDEXES if i.table == name], order]
            for name, order in self.tables.items()
        }
        """All orders of each table. The rows themselves are last: a change that was interrupted is
        made again, and finds the old row there."""
        for space in SPACES:
            self._apply({("counters", (space,)): (space, seal_counter(space, 1))})

    # -- reading -------------------------------------------------------------------------------

    @contextmanager
    def view(self) -> Iterator[View]:
        with self._lock:
            self._check_open()
            yield self

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidRequest("the store is closed", hint="open it again")

    def get(self, index: Index, *key: Any) -> Row | None:
        if index is SPANS:
            low, high = position(key[0], 0), position(key[0] + 1, 0)
            entries = self._indexes[JOURNAL].between((low,), (high,))
            return (key[0], entries[0][0] - low, entries[-1][0] - low + 1) if entries else None
        row = self._indexes[index].rows.get(key)
        return None if row is None else self._looked_up(index, row)

    def scan(
        self,
        index: Index,
        low: Any = None,
        high: Any = None,
        *,
        prefix: Key = (),
        limit: int | None = None,
        reverse: bool = False,
        floor: Any = None,
    ) -> list[Row]:
        order = self._indexes[index]
        first = prefix if low is None else (*prefix, low)
        last = (*prefix, _LAST if high is None else high)
        keys = order.between(first, last, None if floor is None else (*prefix, floor))
        keys = (keys[::-1] if reverse else keys)[:limit]
        return [self._looked_up(index, order.rows[key]) for key in keys]

    def _looked_up(self, index: Index, row: Row) -> Row:
        """Return the columns of an index."""
        return tuple([part(row) for part in _parts(index)])

    def count(self, table: str) -> int:
        return len(self.tables[table].keys)

    def sizes(self) -> dict[str, tuple[int, int]]:
        sizes = {}
        for name in MEASURED:
            body = _COLUMNS[name].index("body")
            bodies = [row[body] for row in self.tables[name].rows.values()]
            sizes[name] = len(bodies), sum(map(len, bodies))
        return sizes

    def problems(self, session: int | None = None) -> Iterator[str]:  # noqa: ARG002
        yield from ()

    def version(self) -> object:
        self._check_open()
        return self._version

    # -- writing -------------------------------------------------------------------------------

    def commit(self, batch: Batch) -> None:
        with self._lock:
            self._check_open()
            if batch.swap is not None:
                row = self.tables["heads"].rows.get((batch.swap.session,))
                if (b"" if row is None else row[1]) != batch.swap.expect:
                    raise batch.swap.refusal()
            for guard in batch.guards:
                check(guard, self)
            plan = _Plan(self.tables, self._version + 1, self._blobs + 1)
            if batch.swap is not None:
                plan.add(Put("heads", (batch.swap.session, batch.swap.body)))
            for write in batch.writes:
                plan.add(write)
            self._version += 1
            self._blobs += len(batch.writes) + len(plan.rows)
            _repeatable(self._apply, plan.rows)

    def _apply(self, rows: dict[tuple[str, Key], Row | None]) -> None:
        for (table, key), new in rows.items():
            old = self.tables[table].rows.get(key)
            for order in self._orders[table]:
                order.replace(old, new)

    def commit_all(self, first: Batch, rest: Sequence[Batch]) -> list[bool]:
        with self._lock:
            self.commit(first)
            done = []
            for batch in rest:
                done.append(False)
                with suppress(StaleHead):
                    self.commit(batch)
                    done[-1] = True
            return done

    def renew(self, session: int, token: bytes) -> bool:
        with self._lock:
            self._check_open()
            row = self.tables["leases"].rows.get((session,))
            if row is None or row[1] != token:
                return False
            self._apply({("leases", (session,)): (*row[:3], clock.elapsed())})
            return True

    def compact(
        self,
        progress: Callable[[int, int], None] | None = None,
        *,
        erase: bool = False,  # noqa: ARG002 - there is no file to erase
    ) -> bool:
        if progress is not None:
            progress(0, 0)
        return True

    def reindex(self) -> None:
        return

    def backup(self, path: Path) -> None:
        raise InvalidRequest(
            f"a memory: store cannot be backed up to {path}", hint="copy() it to another store"
        )

    def reserve(self, space: Literal["session", "stream"], count: int) -> int:
        with self._lock:
            self._check_open()
            first = unseal_counter(space, self.tables["counters"].rows[space,][1])
            self._apply({("counters", (space,)): (space, seal_counter(space, first + count))})
            return first

    def reset_lock(self) -> None:
        self._lock = threading.RLock()

    def close(self) -> None:
        self._closed = True


class _Plan:
    """The rows that a batch leaves, by table and key. A row to be removed is None."""

    def __init__(self, tables: dict[str, _Order], version: int, blob: int) -> None:
        self._tables, self._version, self._blob = tables, version, blob
        self.rows: dict[tuple[str, Key], Row | None] = {}

    def _get(self, table: str, key: Key) -> Row | None:
        planned = self.rows.get((table, key), _NOT_PLANNED)
        return self._tables[table].rows.get(key) if planned is _NOT_PLANNED else planned

    def _put(self, table: str, row: Row) -> None:
        stored = (*row, clock.elapsed()) if table == "leases" else row
        self.rows[table, row[: TABLES[table].key]] = stored

    def add(self, write: Write) -> None:
        """Add a write. Raise its error if it is refused."""
        match write:
            case Put(table, row):
                self._put(table, row)
            case Insert(table, row, refusal):
                if self._get(table, row[: TABLES[table].key]) is not None:
                    raise refusal()
                self._put(table, row)
            case Rename(session, name, body):
                old = self._get("sessions", (session,))
                if old is not None:
                    self._put("sessions", (session, name, old[2], body))
            case Delete(table, key):
                self.rows[table, key] = None
            case DeleteRange(table, low, high):
                planned = [key for at, key in self.rows if at == table and low <= key[0] < high]
                for key in [*self._tables[table].between((low,), (high,)), *planned]:
                    self.rows[table, key] = None
            case DeleteIf(by, key, column, value, refusal):
                old = self._get(by.table, key)
                if old is None or _part(by, column)(old) != value:
                    raise refusal()
                self.rows[by.table, key] = None
            case Share(digest, body, rewrite, refusal):
                old = self._get("blobs", (digest,))
                if old is None and body is None:
                    raise refusal()
                kept = old[1] if old is not None and not rewrite else body
                number = old[2] if old is not None else self._blob + len(self.rows)
                self.rows["blobs", (digest,)] = (digest, kept, number, self._version)


_NOT_PLANNED: Any = object()
