"""Mutants of the backend in memory, which the contract of the tables must catch."""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress
from typing import Any

from holdfast.format.records import seal_counter, unseal_counter
from holdfast.storage.contract import (
    Absent,
    Batch,
    Delete,
    DeleteIf,
    DeleteRange,
    Equals,
    Present,
    Put,
    Rename,
    Share,
    StaleHead,
    Unchanged,
)
from holdfast.storage.memory_tables import Plan, check_all
from holdfast.storage.tables import (
    BLOB_USES,
    CHECKPOINTS,
    ITEMS,
    LEASES,
    SESSIONS_BY_NAME,
    TERMS,
)
from tests.mutants import mutant, nothing

# -- guards --------------------------------------------------------------------------------------


def _unless(real: Any, ignored: Any) -> Any:
    def check(guard: Any, view: Any) -> None:
        if not ignored(guard):
            real(guard, view)

    return check


@mutant(".storage.memory_tables:check")
def equals_is_not_checked(real: Any) -> Any:
    """Equals is refused if a column has another value."""
    return _unless(real, lambda guard: isinstance(guard, Equals) and guard.value is not None)


@mutant(".storage.memory_tables:check")
def equals_accepts_a_missing_row(real: Any) -> Any:
    """Equals is refused if there is no row."""

    def check(guard: Any, view: Any) -> None:
        if not isinstance(guard, Equals) or view.get(guard.by, *guard.key) is not None:
            real(guard, view)

    return check


@mutant(".storage.memory_tables:check")
def equals_none_is_not_checked(real: Any) -> Any:
    """Equals None is refused if there is a value."""
    return _unless(real, lambda guard: isinstance(guard, Equals) and guard.value is None)


@mutant(".storage.memory_tables:check")
def present_is_not_checked(real: Any) -> Any:
    """Present is refused if there is no row."""
    return _unless(real, lambda guard: isinstance(guard, Present))


@mutant(".storage.memory_tables:check")
def absent_is_not_checked(real: Any) -> Any:
    """Absent is refused if there is a row."""
    return _unless(
        real, lambda guard: isinstance(guard, Absent) and guard.by is not SESSIONS_BY_NAME
    )


@mutant(".storage.memory_tables:check")
def taken_names_are_free(real: Any) -> Any:
    """A session gets no name that another one has."""
    return _unless(real, lambda guard: guard.by is SESSIONS_BY_NAME)


@mutant(".storage.memory_tables:check")
def unchanged_is_not_checked(real: Any) -> Any:
    """Unchanged is refused if a scan returns other rows."""
    return _unless(real, lambda guard: isinstance(guard, Unchanged))


@mutant(".storage.memory_tables:check")
def unchanged_counts_rows(real: Any) -> Any:
    """Unchanged compares the rows."""

    def check(guard: Any, view: Any) -> None:
        if isinstance(guard, Unchanged):
            rows = view.scan(guard.by, guard.low, guard.high)
            guard = guard._replace(rows=rows if len(rows) == len(guard.rows) else guard.rows)
        real(guard, view)

    return check


@mutant(".storage.memory_tables:check")
def guards_raise_another_error(real: Any) -> Any:
    """A guard that does not hold raises its own error."""

    def check(guard: Any, view: Any) -> None:
        real(guard._replace(refusal=StaleHead), view)

    return check


@mutant(".storage.memory:check_all")
def only_the_first_guard_is_checked(real: Any) -> Any:
    """All guards of a batch are checked."""
    return lambda batch, view: real(Batch(batch.swap, guards=batch.guards[:1]), view)


@mutant(".storage.memory:MemoryBackend.commit")
def guards_see_the_writes(real: Any) -> Any:
    """Guards are checked before the writes are made."""

    def commit(self: Any, batch: Batch) -> None:
        real(self, Batch(batch.swap, writes=batch.writes))
        real(self, Batch(guards=batch.guards))

    return commit


@mutant(".storage.memory:check_all")
def swap_is_not_compared(real: Any) -> Any:
    """A swap is refused if the head is another one."""
    return lambda batch, view: real(Batch(guards=batch.guards), view)


# -- writes --------------------------------------------------------------------------------------


def _changed(real: Any, change: Any) -> Any:
    def add(self: Any, write: Any) -> None:
        real(self, change(write))

    return add


@mutant(".storage.memory_tables:Plan.add")
def delete_if_ignores_the_value(real: Any) -> Any:
    """DeleteIf is refused if the column has another value."""

    def change(write: Any) -> Any:
        return Delete(write.by.table, write.key) if isinstance(write, DeleteIf) else write

    return _changed(real, change)


@mutant(".storage.memory_tables:Plan.add")
def puts_keep_the_row(real: Any) -> Any:
    """A put replaces the row of its key."""

    def add(self: Any, write: Any) -> None:
        if not isinstance(write, Put) or self._get(write.table, write.row[:1]) is None:
            real(self, write)

    return add


@mutant(".storage.memory_tables:Plan.add")
def deletes_are_forgotten(real: Any) -> Any:
    """A delete removes its row."""
    return lambda self, write: None if isinstance(write, Delete) else real(self, write)


def _range(real: Any, low: int, high: int) -> Any:
    def change(write: Any) -> Any:
        if isinstance(write, DeleteRange):
            write = write._replace(low=write.low + low, high=write.high + high)
        return write

    return _changed(real, change)


@mutant(".storage.memory_tables:Plan.add")
def ranges_include_their_end(real: Any) -> Any:
    """A range ends before its high bound."""
    return _range(real, 0, 1)


@mutant(".storage.memory_tables:Plan.add")
def ranges_exclude_their_beginning(real: Any) -> Any:
    """A range begins with its low bound."""
    return _range(real, 1, 0)


@mutant(".storage.memory_tables:Plan._count")
def entries_are_not_counted(real: Any) -> Any:
    """The number of an entry is never used again."""
    return nothing


@mutant(".storage.memory_tables:OrderedRows.replace")
def indexes_keep_removed_rows(real: Any) -> Any:
    """A removed row is found by no index."""
    return lambda self, old, new: real(self, old if len(self.key(old) or ()) == 1 else None, new)


@mutant(".storage.memory_tables:Plan.add")
def renames_are_forgotten(real: Any) -> Any:
    """A rename gives a session its new name."""
    return lambda self, write: None if isinstance(write, Rename) else real(self, write)


@mutant(".storage.memory_tables:Plan._share")
def missing_blobs_are_shared(real: Any) -> Any:
    """Share without a body is refused if the blob does not exist."""

    def share(self: Any, write: Share) -> None:
        if write.body is not None or self._get("blobs", (write.digest,)) is not None:
            real(self, write)

    return share


@mutant(".storage.memory_tables:Plan._share")
def shared_blobs_are_replaced(real: Any) -> Any:
    """A blob that exists is shared."""
    return lambda self, write: real(self, write._replace(rewrite=True))


@mutant(".storage.memory_tables:Plan._share")
def damaged_blobs_are_shared(real: Any) -> Any:
    """A damaged blob is written again."""
    return lambda self, write: real(self, write._replace(rewrite=False))


@mutant(".storage.memory_tables:Plan._share")
def uses_are_not_counted(real: Any) -> Any:
    """Every use of a blob is counted."""

    def share(self: Any, write: Share) -> None:
        old = self._get("blobs", (write.digest,))
        real(self, write)
        row = self.rows["blobs", (write.digest,)]
        if old is not None and row is not None:
            self.rows["blobs", (write.digest,)] = (*row[:3], old[3])

    return share


@mutant(".storage.memory:MemoryBackend.commit")
def a_batch_is_written_by_halves(real: Any) -> Any:
    """A batch is written whole or not at all."""

    def commit(self: Any, batch: Batch) -> None:
        real(self, Batch(batch.swap, guards=batch.guards))
        for write in batch.writes:
            real(self, Batch(writes=[write]))

    return commit


@mutant(".storage.memory:MemoryBackend.commit")
def the_last_write_comes_first(real: Any) -> Any:
    """Writes are made in order."""

    def commit(self: Any, batch: Batch) -> None:
        real(self, Batch(batch.swap, guards=batch.guards, writes=batch.writes[::-1]))

    return commit


# -- several batches and threads -----------------------------------------------------------------


@mutant(".storage.memory:MemoryBackend.commit_all")
def the_first_batch_may_be_refused(real: Any) -> Any:
    """commit_all writes nothing if the first batch is refused."""

    def commit_all(self: Any, first: Batch, rest: Any) -> Any:
        with suppress(Exception):
            self.commit(first)
        return real(self, Batch(), rest)

    return commit_all


@mutant(".storage.memory:MemoryBackend.commit_all")
def a_refusal_ends_commit_all(real: Any) -> Any:
    """commit_all writes each batch that is not refused."""

    def commit_all(self: Any, first: Batch, rest: Any) -> Any:
        done = []
        for batch in rest:
            done += real(self, first, [batch])
            if not done[-1]:
                break
        return done + [False] * (len(rest) - len(done))

    return commit_all


def _meet(place: threading.Barrier) -> None:
    """Wait until two threads are here. The main thread does not wait."""
    if threading.current_thread() is not threading.main_thread():
        with suppress(threading.BrokenBarrierError):
            place.wait(0.5)


@mutant(".storage.memory:MemoryBackend.commit")
def check_and_write_are_two_steps(real: Any) -> Any:
    """No other batch is written between the check of a batch and its writes."""
    place = threading.Barrier(2)

    def commit(self: Any, batch: Batch) -> None:
        with self._lock:
            check_all(batch, self)
            plan = Plan(self._rows)
            plan.add_all(batch)
        _meet(place)
        with self._lock:
            self._version += 1
            self._apply(plan.rows)

    return commit


@mutant(".storage.memory:MemoryBackend.reserve")
def reserve_is_two_steps(real: Any) -> Any:
    """A number is reserved once, also between threads."""
    place = threading.Barrier(2)

    def reserve(self: Any, space: Any, count: int) -> int:
        with self._lock:
            first = unseal_counter(space, self._rows["counters"][space,][1])
        _meet(place)
        with self._lock:
            self._apply({("counters", (space,)): (space, seal_counter(space, first + count))})
        return first

    return reserve


@mutant(".storage.memory:MemoryBackend.reserve")
def reserve_takes_one_number(real: Any) -> Any:
    """All of the numbers that are reserved at once are taken."""
    return lambda self, space, count: real(self, space, 1)


@mutant(".storage.memory:MemoryBackend.view")
def a_view_sees_later_commits(real: Any) -> Any:
    """A view sees one moment."""

    @contextmanager
    def view(self: Any) -> Any:
        self._check_open()
        yield self

    return view


# -- look-ups ------------------------------------------------------------------------------------


def _scan(real: Any, change: Any) -> Any:
    def scan(self: Any, index: Any, low: Any = None, high: Any = None, **how: Any) -> Any:
        low, high = change(index, low, high, how)
        return real(self, index, low, high, **how)

    return scan


@mutant(".storage.memory:MemoryBackend.scan")
def scan_ignores_the_limit(real: Any) -> Any:
    """A scan returns no more rows than its limit."""
    return _scan(real, lambda index, low, high, how: (how.pop("limit", 0) and low, high))


@mutant(".storage.memory:MemoryBackend.scan")
def scan_ignores_reverse(real: Any) -> Any:
    """A scan in reverse returns the last rows first."""
    return _scan(real, lambda index, low, high, how: (how.pop("reverse", 0) and low, high))


@mutant(".storage.memory:MemoryBackend.scan")
def scan_includes_its_end(real: Any) -> Any:
    """A scan ends before its high bound."""

    def change(index: Any, low: Any, high: Any, how: Any) -> Any:
        return low, high + 1 if index is CHECKPOINTS else high

    return _scan(real, change)


@mutant(".storage.memory:MemoryBackend.scan")
def scan_ignores_the_end_of_bytes(real: Any) -> Any:
    """A scan ends before its high bound, of bytes too."""
    return _scan(real, lambda index, low, high, how: (low, None if index is TERMS else high))


@mutant(".storage.memory:MemoryBackend.scan")
def scan_excludes_its_beginning(real: Any) -> Any:
    """A scan begins with its low bound."""

    def change(index: Any, low: Any, high: Any, how: Any) -> Any:
        return low + 1 if index is CHECKPOINTS else low, high

    return _scan(real, change)


@mutant(".storage.memory:MemoryBackend.scan")
def scan_ignores_the_floor(real: Any) -> Any:
    """A scan with a floor returns the row before the range."""

    def change(index: Any, low: Any, high: Any, how: Any) -> Any:
        how.pop("floor", None)
        return low, high

    return _scan(real, change)


@mutant(".storage.memory:MemoryBackend.scan")
def the_floor_is_not_compared(real: Any) -> Any:
    """A scan with a floor returns no row below it."""

    def change(index: Any, low: Any, high: Any, how: Any) -> Any:
        if "floor" in how:
            how["floor"] = 0
        return low, high

    return _scan(real, change)


@mutant(".storage.memory:MemoryBackend.scan")
def the_floor_comes_first_always(real: Any) -> Any:
    """A scan returns the row before the range only if no row is at its beginning."""

    def scan(self: Any, index: Any, low: Any = None, high: Any = None, **how: Any) -> Any:
        if index is ITEMS and low > how["floor"]:
            before = real(self, index, how["floor"], low)[-1:]
            return before + real(self, index, low, high)
        return real(self, index, low, high, **how)

    return scan


@mutant(".storage.memory:MemoryBackend.scan")
def prefixes_match_part_of_a_value(real: Any) -> Any:
    """A scan with a prefix compares whole values."""

    def scan(self: Any, index: Any, low: Any = None, high: Any = None, **how: Any) -> Any:
        prefix = how.pop("prefix", ())
        if not prefix:
            return real(self, index, low, high, **how)
        kind, value = prefix
        keys = {key[1] for key in self._indexes[index].keys if key[0] == kind}
        found = [real(self, index, low, high, prefix=(kind, each), **how) for each in keys
                 if each.startswith(value)]  # fmt: skip
        return [row for rows in found for row in rows]

    return scan


@mutant(".storage.memory:MemoryBackend.get")
def names_are_found_in_any_case(real: Any) -> Any:
    """A session is found by exactly its name."""

    def get(self: Any, index: Any, *key: Any) -> Any:
        return real(self, index, *[k.lower() if index is SESSIONS_BY_NAME else k for k in key])

    return get


@mutant(".storage.memory:MemoryBackend.scan")
def blobs_have_no_numbers(real: Any) -> Any:
    """The pages of blobs have each blob once."""

    def scan(self: Any, index: Any, *bounds: Any, **how: Any) -> Any:
        found = real(self, index, *bounds, **how)
        return [(1, *row[1:]) for row in found] if index is BLOB_USES else found

    return scan


@mutant(".storage.memory:MemoryBackend.count")
def counts_are_too_small(real: Any) -> Any:
    """A count is of all rows."""
    return lambda self, table: max(real(self, table) - 1, 0)


@mutant(".storage.memory:sizes")
def sizes_leave_a_table_out(real: Any) -> Any:
    """Sizes are of all rows."""
    return lambda tables: real(tables) | {"journal": (0, 0)}


# -- the rest ------------------------------------------------------------------------------------


@mutant(".storage.memory:MemoryBackend.version")
def the_version_stays(real: Any) -> Any:
    """Each commit changes the version."""
    return lambda self: 0


@mutant(".storage.memory:MemoryBackend.version")
def each_look_is_a_version(real: Any) -> Any:
    """Without a commit, the version stays."""
    return lambda self: object()


@mutant(".storage.memory:MemoryBackend.renew")
def any_token_renews(real: Any) -> Any:
    """A lease is renewed with its own token."""

    def renew(self: Any, session: int, token: bytes) -> Any:
        row = self._rows["leases"].get((session,))
        return row is not None and real(self, session, row[1])

    return renew


@mutant(".storage.memory:MemoryBackend.renew")
def renewing_changes_nothing(real: Any) -> Any:
    """A lease that is renewed is young."""
    return lambda self, session, token: self._rows["leases"].get((session,), b"  ")[1] == token


@mutant(".storage.memory:MemoryBackend.get")
def leases_have_no_age(real: Any) -> Any:
    """The age of a lease is the time since it was taken or renewed."""

    def get(self: Any, index: Any, *key: Any) -> Any:
        row = real(self, index, *key)
        return (*row[:3], 0.0) if index is LEASES and row is not None else row

    return get


@mutant(".storage.memory:MemoryBackend.compact")
def compact_removes_rows(real: Any) -> Any:
    """compact() keeps every row."""

    def compact(self: Any, progress: Any = None, **options: Any) -> Any:
        self._apply({("tombs", key): None for key in [*self._rows["tombs"]]})
        return real(self, progress, **options)

    return compact


@mutant(".storage.memory:MemoryBackend._check_open")
def closed_backends_go_on(real: Any) -> Any:
    """After close(), calls are refused."""
    return nothing
