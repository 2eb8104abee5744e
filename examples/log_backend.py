"""A storage backend of your own: a log in a file, and all rows in memory.

Each commit appends a line to the log. docs/writing_a_backend.md explains this file.
"""

from __future__ import annotations

import ast
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from holdfast.errors import Corrupt, InvalidRequest, Unavailable
from holdfast.format.records import SPACES, seal_counter, unseal_counter
from holdfast.storage import fs
from holdfast.storage.contract import Backend, Batch, Key, StaleHead, View
from holdfast.storage.memory_tables import Plan, check_all, in_order, lease_now, looked_up, sizes
from holdfast.storage.tables import TABLES, Index, Row

Changes = dict[tuple[str, Key], Row | None]  # by table and key; None is a row that was removed


class Moment(View):
    """The rows of one moment. They never change: a commit makes a new moment."""

    tallied = False

    def __init__(self, tables: dict[str, dict[Key, Row]]) -> None:
        self.tables = tables

    def get(self, index: Index, *key: Any) -> Row | None:
        table = self.tables[index.table]
        own = index.by == TABLES[index.table].columns[: len(key)]
        row = (table if own else in_order(index, table.values()).rows).get(key)
        return None if row is None else looked_up(index, row)

    def scan(self, index: Index, low: Any = None, high: Any = None, **how: Any) -> list[Row]:
        rows = in_order(index, self.tables[index.table].values())
        return [looked_up(index, row) for row in rows.scan(low, high, **how)]

    def count(self, table: str) -> int:
        return len(self.tables[table])

    def sizes(self) -> dict[str, tuple[int, int]]:
        return sizes(self.tables)

    def problems(self, session: int | None = None) -> Iterator[str]:
        yield from ()  # a damaged log does not open

    def after(self, changes: Changes) -> Moment:
        """Return the moment after a commit. It shares the tables that did not change."""
        tables = self.tables | {name: {**self.tables[name]} for name, _ in changes}
        for (name, key), row in changes.items():
            tables[name].pop(key, None)
            if row is not None:
                tables[name][key] = row
        return Moment(tables)

    def everything(self) -> Changes:
        return {(name, key): row for name, t in self.tables.items() for key, row in t.items()}


class LogBackend(Backend):
    name = "log"
    read_only = False

    def __init__(self, path: Path) -> None:
        self.path, self._version, self._lock = fs.absolute(path), 0, threading.RLock()
        self._failed = ""  # why nothing can be written any more
        with ExitStack() as stack:
            stack.enter_context(fs.locked(f"{self.path}.lock", 0.0))  # one process at a time
            if not self.path.exists():
                first = [(space, seal_counter(space, 1)) for space in SPACES]
                fs.replace(self.path, line({("counters", row[:1]): row for row in first}))
            self._now = read(self.path)
            self._log = os.open(self.path, os.O_WRONLY)
            self._owned: ExitStack | None = stack.pop_all()

    def _check_open(self) -> None:
        if self._owned is None:
            raise InvalidRequest("the store is closed", hint="open it again")

    @contextmanager
    def view(self) -> Iterator[View]:
        self._check_open()
        yield self._now

    @contextmanager
    def _writing(self) -> Iterator[Moment]:
        """Return a context in which only this thread writes."""
        with self._lock:
            self._check_open()
            if self._failed:
                raise Unavailable(f"{self.path}: {self._failed}", hint="open it again")
            yield self._now

    @contextmanager
    def _changing_the_disk(self) -> Iterator[None]:
        """After a failure, the content of the disk is unknown. So nothing more is written then."""
        self._failed = "a write has failed"
        try:
            yield
        except OSError as e:
            raise Unavailable(f"{self.path} cannot be written: {e}") from e
        self._failed = ""

    def _write(self, changes: Changes) -> None:
        """Append a line, and wait for the disk. Only then can others see the changes."""
        with self._writing() as now, self._changing_the_disk():
            end = os.fstat(self._log).st_size
            try:
                fs.write_all(self._log, line(changes), end)
                fs.sync_handle(self._log)
            except OSError:
                os.ftruncate(self._log, end)  # what was refused must not come back
                raise
            self._now, self._version = now.after(changes), self._version + 1

    def commit(self, batch: Batch) -> None:
        with self._writing() as now:
            check_all(batch, now)
            plan = Plan(now.tables)
            plan.add_all(batch)
            self._write(plan.rows)

    def commit_all(self, first: Batch, rest: Sequence[Batch]) -> list[bool]:
        with self._writing():
            self.commit(first)
            done = [False] * len(rest)
            for n, batch in enumerate(rest):
                with suppress(StaleHead):
                    self.commit(batch)
                    done[n] = True
            return done

    def reserve(self, space: Literal["session", "stream"], count: int) -> int:
        with self._writing() as now:
            first = unseal_counter(space, now.tables["counters"][space,][1])
            self._write({("counters", (space,)): (space, seal_counter(space, first + count))})
            return first

    def renew(self, session: int, token: bytes) -> bool:
        with self._writing() as now:
            row = now.tables["leases"].get((session,))
            if row is not None and row[1] == token:
                self._now = now.after({("leases", (session,)): lease_now(*row[:3])})
            return row is not None and row[1] == token

    def version(self) -> object:
        self._check_open()
        return self._version

    def compact(self, progress: Callable[[int, int], None] | None = None, **options: bool) -> bool:
        with self._writing() as now, self._changing_the_disk():
            fs.replace(self.path, line(now.everything()))
            os.close(self._log)
            self._log = os.open(self.path, os.O_WRONLY)
        return True

    def backup(self, path: Path) -> None:
        self._check_open()
        fs.create(path, lambda file: file.writelines([line(self._now.everything())]))

    def salvage(self, accept: int | None = None) -> bool:
        return False  # there is nothing to do: a view makes its indexes from the rows

    def reset_lock(self) -> None:
        self._lock, self._failed = threading.RLock(), "it belongs to the parent process"

    def close(self) -> None:
        with self._lock:
            owned, self._owned = self._owned, None
            if owned is not None:
                os.close(self._log)
                owned.close()


def line(changes: Changes) -> bytes:
    """Return the line of some changes: a digest, and the changes as Python writes them."""
    text = repr(changes).encode()
    return hashlib.sha256(text).hexdigest().encode() + b" " + text + b"\n"


def read(path: Path) -> Moment:
    """Return what a log says. A line without an end was not acknowledged. It is cut off."""
    changes: Changes = {}
    data = path.read_bytes()
    *lines, rest = data.split(b"\n")
    for n, (digest, _, text) in enumerate([each.partition(b" ") for each in lines], start=1):
        if hashlib.sha256(text).hexdigest().encode() != digest:
            raise Corrupt(f"line {n} of {path} is damaged", hint="put a backup back")
        changes |= ast.literal_eval(text.decode())
    if rest:
        os.truncate(path, len(data) - len(rest))
        fs.sync(path)
    return Moment({name: {} for name in TABLES}).after(changes)
