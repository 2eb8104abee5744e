"""A store in memory, for tests. It is also the model that other backends are compared with."""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal

from holdfast.errors import InvalidRequest
from holdfast.format.records import SPACES, seal_counter, unseal_counter
from holdfast.storage.contract import Backend, StaleHead, View
from holdfast.storage.memory_tables import (
    COLUMNS,
    OrderedRows,
    Plan,
    check_all,
    in_order,
    lease_now,
    looked_up,
    sizes,
)
from holdfast.storage.tables import INDEXES, TABLES, Index

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from holdfast.storage.contract import Batch, Key
    from holdfast.storage.tables import Row


def _repeatable(do: Callable[..., None], *arguments: Any) -> None:
    """Call a function that can be repeated without harm. After Ctrl-C, call it again to the end."""
    try:
        do(*arguments)
    except BaseException:
        do(*arguments)
        raise


class MemoryBackend(Backend, View):
    """A store that exists as long as its process. A forked child gets a copy."""

    name = "memory"
    read_only = False
    tallied = False

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._closed = False
        self._version = 0
        self._newest_blob = 0
        self.tables = {
            name: OrderedRows(COLUMNS[name], table.columns[: table.key])
            for name, table in TABLES.items()
        }
        self._rows = {name: order.rows for name, order in self.tables.items()}
        self._indexes = {index: in_order(index) for index in INDEXES}
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
        row = self._indexes[index].rows.get(key)
        return None if row is None else looked_up(index, row)

    def scan(self, index: Index, low: Any = None, high: Any = None, **how: Any) -> list[Row]:
        return [looked_up(index, row) for row in self._indexes[index].scan(low, high, **how)]

    def count(self, table: str) -> int:
        return len(self.tables[table].keys)

    def sizes(self) -> dict[str, tuple[int, int]]:
        return sizes(self._rows)

    def problems(self, session: int | None = None) -> Iterator[str]:  # noqa: ARG002
        yield from ()

    def version(self) -> object:
        self._check_open()
        return self._version

    # -- writing -------------------------------------------------------------------------------

    def commit(self, batch: Batch) -> None:
        with self._lock:
            self._check_open()
            check_all(batch, self)
            plan = Plan(self._rows, self._keys, self._newest_blob)
            plan.add_all(batch)
            self._version += 1
            self._newest_blob = plan.newest_blob
            _repeatable(self._apply, plan.rows)

    def _keys(self, table: str, low: Any, high: Any) -> list[Key]:
        return self.tables[table].between(low, high)

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
            self._apply({("leases", (session,)): lease_now(*row[:3])})
            return True

    def compact(
        self,
        progress: Callable[[int, int], None] | None = None,
        *,
        erase: bool = False,  # noqa: ARG002 - there is no file to erase
    ) -> bool:
        self._check_open()
        if progress is not None:
            progress(0, 0)
        return True

    def salvage(self, accept: int | None = None) -> bool:  # noqa: ARG002 - nothing can be damaged
        return False

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
