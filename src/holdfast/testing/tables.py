"""The contract of the tables: views, batches with their guards, and the rest of a backend.

Each test makes batches by hand, in the shapes that the library makes. Rows are opaque, but for
those of items: how items are spread over rows is a backend's own business.
"""

from __future__ import annotations

import shutil
import threading
import time
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.errors import HoldfastError, InvalidRequest
from holdfast.format.item_streams import STREAM_BITS
from holdfast.format.records import COPIED, FREED, position, seal_counter
from holdfast.format.rows import DENSE, PLAIN, seal_items, unseal_items
from holdfast.storage.contract import (
    Absent,
    Backend,
    Batch,
    Delete,
    DeleteIf,
    DeleteRange,
    Equals,
    Guard,
    Insert,
    MissingReference,
    Present,
    Put,
    Refusal,
    Rename,
    Share,
    StaleHead,
    Swap,
    Unchanged,
    View,
    Write,
)
from holdfast.storage.reader import open_reader
from holdfast.storage.tables import (
    BLOB_USES,
    BLOB_VERSIONS,
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
    MEASURED,
    OPERATIONS,
    SESSIONS,
    SESSIONS_BY_NAME,
    SPANS,
    TERMS,
    TOMBSTONES,
    Index,
    Row,
)
from holdfast.testing.checks import at_once, equal, expect, raises

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


class Refused(StaleHead):
    """The error of one guard or write. Its text says of which one."""


def refusal(what: str) -> Refusal:
    """Return a refusal that raises Refused with this text."""
    return lambda: Refused(what)


def checkpoint_id(n: int) -> bytes:
    """Return an id. Greater numbers have greater ids."""
    return n.to_bytes(15, "big")


def items_at(stream: int, first: int, *items: bytes) -> Row:
    """Return a row of items of a stream."""
    pos = stream << STREAM_BITS | first
    return pos, seal_items(pos, [*items], False, DENSE if len(items) > 1 else PLAIN)


def creation(
    session: int, name: bytes, *writes: Write, origin: int | None = None, **options: Any
) -> Batch:
    """Return a batch that creates a session with the head h1."""
    taken = refusal("name")
    new: list[Write] = [
        Insert("sessions", (session, name, origin, b"row of " + name[:20]), taken),
        Insert("heads", (session, b"h1"), taken),
    ]
    guards = [Absent(SESSIONS_BY_NAME, (name,), taken), *options.pop("guards", ())]
    return Batch(guards=guards, writes=[*new, *writes], **options)


def change(
    session: int, before: int, *writes: Write, guards: Sequence[Guard] = (), **options: Any
) -> Batch:
    """Return a batch that moves the head of a session from one number to the next one."""
    swap = Swap(session, b"h%d" % before, b"h%d" % (before + 1), refusal("head"))
    return Batch(swap, guards=[*guards], writes=[*writes], **options)


def new_checkpoint(session: int, seq: int, id: bytes | None = None) -> Insert:
    """Return the write of a checkpoint."""
    id = checkpoint_id(session << 8 | seq) if id is None else id
    return Insert("checkpoints", (position(session, seq), id, b"c%d" % seq), refusal("checkpoint"))


def entry(session: int, number: int, body: bytes = b"entry") -> Insert:
    """Return the write of an entry of a journal."""
    return Insert("journal", (position(session, number), body), refusal("entry"))


class Filled(NamedTuple):
    """A store with rows in every table that a batch can write."""

    session: int
    fork: int
    stream: int

    def at(self, seq: int) -> int:
        """Return the position of a row of the session."""
        return position(self.session, seq)

    def scans(self) -> list[tuple[Index, Any, Any, tuple[Any, ...], list[Row]]]:
        """Return scans of all rows: index, bounds, prefix and the rows in order.

        The library makes scans of these indexes, with these or narrower bounds.
        """
        at, low, high = self.at, self.at(0), self.at(1 << 31)
        own = checkpoint_id(self.session << 8 | 1)
        marks = [(at(1), 0, b"label", b"m1"), (at(1), 1, b"tag", b"m2"), (at(2), 1, b"tag", b"m3")]
        fork = position(self.fork, 1)
        checkpoints = [(at(1), own, b"c1"), (at(2), checkpoint_id(3), b"c2")]
        checkpoints.append((at(4), checkpoint_id(2), b"c4"))
        forked = (fork, checkpoint_id(self.fork << 8 | 1), b"c1")
        ids = sorted([(id, pos) for pos, id, _ in [*checkpoints, forked]])
        forks, sessions = [(at(1), self.fork)], [(self.fork, b"fork", b"row of fork")]
        sessions.append((self.session, b"s", b"row of s"))
        return [
            (SESSIONS_BY_NAME, b"", None, (), sessions),
            (FORKS, low, high, (), forks),
            (CHECKPOINTS, low, high, (), checkpoints),
            (CHECKPOINTS_BY_ID, b"", b"\xff" * 16, (), ids),
            (MARKS, low, high, (), marks),
            (MARKS_BY_VALUE, low, high, (1, b"tag"), [(at(1), b"m2"), (at(2), b"m3")]),
            (OPERATIONS, low, high, (), [(at(1), b"op1"), (at(2), b"op2")]),
            (TOMBSTONES, low, high, (), [(at(2), b"tomb"), (at(4), b"tomb")]),
            (GRAFTS, low, high, (), [(at(4), b"graft")]),
            (GRAFTS_BY_ANCESTOR, low, high, (), [(at(1), at(4))]),
            (TERMS, b"", b"\xff" * 16, (2, b"x"), [(checkpoint_id(2),), (checkpoint_id(3),)]),
            (JOURNAL, low, high, (), [(at(1), b"j1"), (at(2), b"j2"), (at(3), b"j3")]),
        ]

    def gets(self) -> list[tuple[Index, tuple[Any, ...], Row | None]]:
        """Return look-ups of single rows: index, key, and the row."""
        at, number = self.at, self.session
        return [
            (SESSIONS, (number,), (number, b"s", b"row of s")),
            (SESSIONS_BY_NAME, (b"fork",), (self.fork, b"fork", b"row of fork")),
            (HEADS, (number,), (number, b"h3")),
            (CHECKPOINTS, (at(2),), (at(2), checkpoint_id(3), b"c2")),
            (KEYS, (number, b"key"), (number, 2)),
            (BLOBS, (b"d" * 32,), (b"d" * 32, b"blob")),
            (OPERATIONS, (at(2),), (at(2), b"op2")),
            (TOMBSTONES, (at(4),), (at(4), b"tomb")),
            (GRAFTS, (at(4),), (at(4), b"graft")),
            (JOURNAL, (at(3),), (at(3), b"j3")),
            (SPANS, (number,), (number, 1, 4)),
            (COUNTERS, (COPIED,), (COPIED, seal_counter(COPIED, 7))),
        ]

    def items(self, view: View) -> list[bytes]:
        """Return the items of the stream, however they are spread over rows."""
        return [item for _, item in items(view, self.stream, 0, 99)]


def items(view: View, stream: int, start: int, stop: int) -> list[tuple[int, bytes]]:
    """Return the numbers and items that the rows of a range have, within the range."""
    base = stream << STREAM_BITS
    found = []
    for pos, body in view.scan(ITEMS, base + start, base + stop, floor=base):
        ends, data, _ = unseal_items(pos, body, "items")
        for n, (low, high) in enumerate(pairwise([0, *ends]), pos - base):
            if start <= n < stop:
                found.append((n, data[low:high]))
    return found


def everything(filled: Filled, stream: int) -> list[Write]:
    """Return writes of every kind, to every table."""
    at, number = filled.at, filled.session
    return [
        Share(b"e" * 32, b"another blob", False, MissingReference),
        Share(b"d" * 32, None, False, MissingReference),
        Insert("items", items_at(stream, 0, b"another"), refusal("items")),
        Insert("keys", (number, b"another", 5), refusal("key")),
        Delete("marks", (at(1), 0, b"label")),
        Put("marks", (at(1), 0, b"other", b"m4")),
        Insert("operations", (at(3), b"op3"), refusal("operation")),
        Put("tombs", (at(1), b"tomb")),
        Delete("tombs", (at(2),)),
        Delete("facets", (2, b"x", checkpoint_id(2))),
        Put("facets", (2, b"x", checkpoint_id(9))),
        Put("leases", (number, b"another token", b"another lease")),
        Rename(number, b"renamed", b"renamed row", refusal("rename")),
        new_checkpoint(number, 5),
    ]


class TablesContract:
    """The tables, row by row. A subclass makes the backend."""

    durable = True
    """Whether a store outlives its backend."""
    unchecked: Sequence[str] = ()
    """Tables whose new rows this backend does not compare with the existing ones.

    The library never writes a row of these twice: the head row, which each batch swaps, has the
    numbers of the newest ones.
    """

    def make_backend(self, folder: Path) -> Backend:
        """Return the backend of the store in a folder. Create it if there is none."""
        raise NotImplementedError

    def backup_path(self, folder: Path) -> Path | None:  # noqa: ARG002 - for subclasses
        """Return where `make_backend(folder)` finds a backup; None if there are no backups."""
        return None

    def mend(self, backend: Backend, session: int) -> None:
        """Call what repairs a storage."""
        backend.salvage()
        backend.salvage(session)

    def filled(self, backend: Backend) -> Filled:
        """Write rows to every table."""
        filled = Filled(
            backend.reserve("session", 1),
            backend.reserve("session", 1),
            backend.reserve("stream", 1),
        )
        number, at = filled.session, filled.at
        backend.commit(creation(number, b"s", new_checkpoint(number, 1)))
        stream = filled.stream
        backend.commit(
            change(
                number, 1,
                Share(b"d" * 32, b"blob", False, MissingReference),
                Insert("items", items_at(stream, 0, b"i0"), refusal("items")),
                Insert("items", items_at(stream, 1, b"i1"), refusal("items")),
                Insert("keys", (number, b"key", 2), refusal("key")),
                Put("marks", (at(1), 0, b"label", b"m1")),
                Put("marks", (at(1), 1, b"tag", b"m2")),
                Put("marks", (at(2), 1, b"tag", b"m3")),
                Insert("operations", (at(1), b"op1"), refusal("operation")),
                Put("tombs", (at(2), b"tomb")),
                Put("tombs", (at(4), b"tomb")),
                Put("facets", (2, b"x", checkpoint_id(2))),
                Put("facets", (2, b"x", checkpoint_id(3))),
                Put("leases", (number, b"token", b"lease")),
                new_checkpoint(number, 2, checkpoint_id(3)),
            )
        )  # fmt: skip
        copy = change(
            number, 2,
            Put("counters", (COPIED, seal_counter(COPIED, 7))),
            new_checkpoint(number, 4, checkpoint_id(2)),
            Put("operations", (at(2), b"op2")),
            Put("gaps", (at(4), at(1), b"graft")),
            guards=[Equals(COUNTERS, (FREED,), "body", None, refusal("counter"))],
        )  # fmt: skip
        backend.commit(copy)
        for n in (1, 2, 3):
            token = Equals(LEASES, (number,), "token", b"token", refusal("token"))
            backend.commit(Batch(guards=[token], writes=[entry(number, n, b"j%d" % n)]))
        backend.commit(
            creation(
                filled.fork, b"fork", new_checkpoint(filled.fork, 1),
                origin=at(1), shared=(number,),
                guards=[Present(CHECKPOINTS, (at(1),), refusal("origin"))],
            )
        )  # fmt: skip
        return filled

    def rows(self, backend: Backend, filled: Filled) -> dict[Any, Any]:
        """Return all rows, without what may change by itself: ages, and the uses of blobs."""
        found: dict[Any, Any] = {}
        with backend.view() as view:
            for index, low, high, prefix, _ in filled.scans():
                found[index.table, index.by] = view.scan(index, low, high, prefix=prefix)
            for index, key, _ in filled.gets():
                found[index.table, key] = view.get(index, *key)
            found["items"] = filled.items(view)
            found["blobs"] = [(row[1], row[2]) for row in view.scan(BLOB_USES, 1)]
            found["leases"] = [row[:3] for row in view.scan(LEASES, 0)]
            found["counts"] = view.count("checkpoints"), view.count("tombs")
        return found

    def begun(self, folder: Path) -> tuple[Backend, int]:
        """Return a backend with one session, whose head is h1."""
        backend = self.make_backend(folder)
        number = backend.reserve("session", 1)
        backend.commit(creation(number, b"s", new_checkpoint(number, 1)))
        return backend, number

    def head(self, backend: Backend, session: int) -> bytes | None:
        with backend.view() as view:
            row = view.get(HEADS, session)
        return None if row is None else row[1]

    # -- views ---------------------------------------------------------------------------------

    def test_a_new_store_has_no_rows(self, tmp_path: Path) -> None:
        backend = self.make_backend(tmp_path)
        empty = Filled(7, 8, 7)
        with backend.view() as view:
            for index, low, high, prefix, _ in empty.scans():
                equal((index.table, view.scan(index, low, high, prefix=prefix)), (index.table, []))
            for index, key, _ in empty.gets():
                equal((index.table, view.get(index, *key)), (index.table, None))
            equal((view.scan(BLOB_USES, 1), view.scan(LEASES, 0), empty.items(view)), ([], [], []))
            equal(view.scan(ITEM_SIZES, 0), [])
            equal((view.count("checkpoints"), view.count("tombs")), (0, 0))
            equal(view.sizes(), dict.fromkeys(MEASURED, (0, 0)))
            equal([*view.problems()], [])
        backend.close()

    def test_get_returns_the_row_of_a_key(self, tmp_path: Path) -> None:
        backend = self.make_backend(tmp_path)
        filled = self.filled(backend)
        with backend.view() as view:
            for index, key, wanted in filled.gets():
                equal((index.table, view.get(index, *key)), (index.table, wanted))
        backend.close()

    def test_get_takes_whole_keys(self, tmp_path: Path) -> None:
        backend = self.make_backend(tmp_path)
        filled = self.filled(backend)
        with backend.view() as view:
            for name in (b"", b"S", b"s\0", b"for", b"forks", b"%"):
                equal(view.get(SESSIONS_BY_NAME, name), None)
            for key in ((filled.session, b"ke"), (filled.session, b"keys"), (filled.fork, b"key")):
                equal(view.get(KEYS, *key), None)
            equal(view.get(CHECKPOINTS, filled.at(3)), None)
            equal(view.get(BLOBS, b"d" * 31 + b"e"), None)
        backend.close()

    def test_scan_returns_all_rows_in_order(self, tmp_path: Path) -> None:
        backend = self.make_backend(tmp_path)
        filled = self.filled(backend)
        with backend.view() as view:
            for index, low, high, prefix, wanted in filled.scans():
                equal((index, view.scan(index, low, high, prefix=prefix)), (index, wanted))
            equal(filled.items(view), [b"i0", b"i1"])
        backend.close()

    def test_scan_begins_at_low_and_ends_before_high(self, tmp_path: Path) -> None:
        backend = self.make_backend(tmp_path)
        filled = self.filled(backend)
        at = filled.at
        own, last = checkpoint_id(filled.session << 8 | 1), checkpoint_id(filled.fork << 8 | 1)
        with backend.view() as view:
            found = [
                [row[0] for row in view.scan(CHECKPOINTS, at(low), at(high))]
                for low, high in ((1, 2), (2, 4), (2, 5), (3, 4), (5, 9))
            ]
            equal(found, [[at(1)], [at(2)], [at(2), at(4)], [], []])
            ids = [id for id, _ in view.scan(CHECKPOINTS_BY_ID, checkpoint_id(3), last)]
            equal(ids, [checkpoint_id(3), own])
            equal([r[1] for r in view.scan(SESSIONS_BY_NAME, b"fork\0")], [b"s"])
            equal(view.scan(TERMS, checkpoint_id(3), None, prefix=(2, b"x")), [(checkpoint_id(3),)])
            equal(view.scan(TERMS, None, checkpoint_id(3), prefix=(2, b"x")), [(checkpoint_id(2),)])
        backend.close()

    def test_scan_with_a_prefix_returns_no_other_rows(self, tmp_path: Path) -> None:
        backend = self.make_backend(tmp_path)
        filled = self.filled(backend)
        low, high = filled.at(0), filled.at(1 << 31)
        with backend.view() as view:
            for prefix in ((1, b"x"), (2, b""), (2, b"xx"), (3, b"x")):
                equal(view.scan(TERMS, b"", b"\xff" * 16, prefix=prefix), [])
            for prefix in ((0, b"tag"), (1, b"label"), (1, b"ta"), (1, b"tags")):
                equal(view.scan(MARKS_BY_VALUE, low, high, prefix=prefix), [])
        backend.close()

    def test_scan_returns_no_more_rows_than_its_limit(self, tmp_path: Path) -> None:
        backend = self.make_backend(tmp_path)
        filled = self.filled(backend)
        with backend.view() as view:
            for index, low, high, prefix, wanted in filled.scans():
                if index in (CHECKPOINTS, CHECKPOINTS_BY_ID, TERMS, JOURNAL):
                    for limit in (1, 2, 9):
                        found = view.scan(index, low, high, prefix=prefix, limit=limit)
                        equal((index.by, limit, found), (index.by, limit, wanted[:limit]))
            equal([row[1] for row in view.scan(SESSIONS_BY_NAME, b"", limit=1)], [b"fork"])
            equal([row[0] for row in view.scan(TOMBSTONES, 0, limit=1)], [filled.at(2)])
            equal(len(view.scan(ITEM_SIZES, 0, limit=1)), 1)
        backend.close()

    def test_scan_in_reverse_returns_the_last_rows_first(self, tmp_path: Path) -> None:
        backend = self.make_backend(tmp_path)
        filled = self.filled(backend)
        with backend.view() as view:
            for index, low, high, prefix, wanted in filled.scans():
                if index in (CHECKPOINTS, CHECKPOINTS_BY_ID, MARKS_BY_VALUE, TERMS, JOURNAL):
                    found = view.scan(index, low, high, prefix=prefix, reverse=True)
                    equal((index.by, found), (index.by, wanted[::-1]))
            found = view.scan(JOURNAL, filled.at(1), filled.at(3), limit=1, reverse=True)
            equal(found, [(filled.at(2), b"j2")])
        backend.close()

    def test_a_floor_brings_the_row_that_reaches_into_a_range(self, tmp_path: Path) -> None:
        backend, number = self.begun(tmp_path)
        stream = backend.reserve("stream", 2)
        backend.commit(
            change(
                number, 1,
                Insert("items", items_at(stream, 0, b"0", b"1", b"2"), refusal("items")),
                Insert("items", items_at(stream, 3, b"3"), refusal("items")),
                Insert("items", items_at(stream + 1, 5, b"5"), refusal("items")),
            )
        )  # fmt: skip
        with backend.view() as view:
            every = [(n, b"%d" % n) for n in range(4)]
            for low, high in ((0, 4), (1, 4), (2, 3), (3, 4)):
                equal(items(view, stream, low, high), every[low:high])
            base = stream + 1 << STREAM_BITS
            equal(view.scan(ITEMS, base + 1, base + 5, floor=base), [])
            exact = view.scan(ITEMS, base - (1 << STREAM_BITS) + 3, base, floor=0)
            equal(len(exact), 1)
        backend.close()

    def test_item_sizes_begin_as_their_rows(self, tmp_path: Path) -> None:
        backend = self.make_backend(tmp_path)
        filled = self.filled(backend)
        base = filled.stream << STREAM_BITS
        with backend.view() as view:
            sizes = view.scan(ITEM_SIZES, 0)
            equal([pos for pos, _, _ in sizes], [base, base + 1])
            rows = [items_at(filled.stream, n, b"i%d" % n) for n in (0, 1)]
            equal([begin for _, _, begin in sizes], [body[:9] for _, body in rows])
            expect(all(size > 0 for _, size, _ in sizes))
            equal(view.scan(ITEM_SIZES, base + 1), sizes[1:])
        backend.close()

    def test_blobs_are_listed_in_pages(self, tmp_path: Path) -> None:
        """Each blob has a number. The next page begins after the last number of this one."""
        backend, number = self.begun(tmp_path)
        digests = [bytes((9 - n,)) * 32 for n in range(5)]
        for n, digest in enumerate(digests):
            backend.commit(change(number, n + 1, Share(digest, b"blob", False, MissingReference)))
        found: list[Row] = []
        with backend.view() as view:
            for _ in range(4):
                page = view.scan(BLOB_USES, found[-1][0] + 1 if found else 1, limit=2)
                expect(len(page) <= 2)
                found += page
        equal(sorted(row[1] for row in found), sorted(digests))
        equal([row[0] for row in found], sorted({row[0] for row in found}))
        backend.close()

    def test_sizes_and_counts_are_of_all_rows(self, tmp_path: Path) -> None:
        backend = self.make_backend(tmp_path)
        self.filled(backend)
        with backend.view() as view:
            rows = {table: rows for table, (rows, _) in view.sizes().items()}
            expect(all(size > 0 for _, size in view.sizes().values()))
            equal((view.count("checkpoints"), view.count("tombs")), (4, 2))
        wanted = (2, 1, 4, 2, 2, 3, 2, 1, 3)
        equal(rows, dict(zip(MEASURED, wanted, strict=True)))
        backend.close()

    def test_a_view_sees_one_moment(self, tmp_path: Path) -> None:
        """A commit waits until the view is closed, or the view does not see it."""
        backend, number = self.begun(tmp_path)
        batch = change(number, 1, new_checkpoint(number, 2), entry(number, 1))
        writer = threading.Thread(target=lambda: backend.commit(batch))
        with backend.view() as view:
            before = view.get(HEADS, number), view.count("checkpoints")
            equal(view.get(JOURNAL, position(number, 1)), None)
            writer.start()
            writer.join(0.2)
            equal((view.get(HEADS, number), view.count("checkpoints")), before)
            equal(view.get(CHECKPOINTS, position(number, 2)), None)
            equal(view.get(JOURNAL, position(number, 1)), None)
        writer.join()
        equal(self.head(backend, number), b"h2")
        backend.close()

    def test_a_view_never_sees_half_of_a_batch(self, tmp_path: Path) -> None:
        backend, number = self.begun(tmp_path)
        done = threading.Event()

        def work() -> None:
            try:
                for n in range(1, 40):
                    backend.commit(change(number, n, new_checkpoint(number, n + 1)))
            finally:
                done.set()

        writer = threading.Thread(target=work)
        writer.start()
        while not done.is_set():
            with backend.view() as view:
                found = view.scan(CHECKPOINTS, position(number, 0), position(number + 1, 0))
                head = view.get(HEADS, number)
                equal(head, (number, b"h%d" % len(found)))
        writer.join()
        equal(self.head(backend, number), b"h40")
        backend.close()

    def test_names_are_exact_and_ordered_by_their_bytes(self, tmp_path: Path) -> None:
        backend = self.make_backend(tmp_path)
        names = [b"S", b"s", b"s ", b"s\x00", b"s_2", b"%", b"../s", b"\xed\xa0\x80", b"x" * 10_000]
        for name in names:
            backend.commit(creation(backend.reserve("session", 1), name))
        with backend.view() as view:
            equal([row[1] for row in view.scan(SESSIONS_BY_NAME, b"")], sorted(names))
            equal([r[1] for r in view.scan(SESSIONS_BY_NAME, b"s\0", limit=2)], [b"s\0", b"s "])
            for name in names:
                found = view.get(SESSIONS_BY_NAME, name)
                equal(found and found[1], name)
        backend.close()

    # -- guards --------------------------------------------------------------------------------

    def guards(self, backend: Backend, holding: Sequence[Guard], failing: Sequence[Guard]) -> None:
        """Check that a batch is written with the first guards, and refused by each of the others.

        Their refusals are `refusal("guard")`.
        """
        filled = self.filled(backend)
        before = self.rows(backend, filled)
        locks = (filled.fork,)
        for guard in failing:
            batch = change(filled.session, 3, new_checkpoint(filled.session, 5), shared=locks)
            batch.guards = [*holding, guard]
            with raises(Refused, "guard"):
                backend.commit(batch)
            equal((guard, self.rows(backend, filled)), (guard, before))
        batch = change(filled.session, 3, new_checkpoint(filled.session, 5), shared=locks)
        batch.guards = [*holding]
        backend.commit(batch)
        equal(self.head(backend, filled.session), b"h4")
        backend.close()

    def test_equals_is_refused_if_a_column_has_another_value(self, tmp_path: Path) -> None:
        no, at = refusal("guard"), Filled(1, 2, 1).at
        self.guards(
            self.make_backend(tmp_path),
            [
                Equals(LEASES, (1,), "token", b"token", no),
                Equals(HEADS, (2,), "body", b"h1", no),
                Equals(CHECKPOINTS, (at(2),), "id", checkpoint_id(3), no),
            ],
            [
                Equals(LEASES, (1,), "token", b"another", no),
                Equals(LEASES, (2,), "token", b"token", no),  # no such row
                Equals(HEADS, (2,), "body", b"h2", no),
                Equals(CHECKPOINTS, (at(2),), "id", checkpoint_id(2), no),
                Equals(CHECKPOINTS, (at(3),), "id", checkpoint_id(3), no),
            ],
        )

    def test_equals_none_is_refused_if_there_is_a_value(self, tmp_path: Path) -> None:
        no = refusal("guard")
        self.guards(
            self.make_backend(tmp_path),
            [Equals(COUNTERS, (FREED,), "body", None, no)],
            [Equals(COUNTERS, (COPIED,), "body", None, no)],
        )

    def test_present_is_refused_if_there_is_no_row(self, tmp_path: Path) -> None:
        no, at = refusal("guard"), Filled(1, 2, 1).at
        self.guards(
            self.make_backend(tmp_path),
            [Present(CHECKPOINTS, (at(2),), no), Present(SESSIONS, (2,), no)],
            [
                Present(CHECKPOINTS, (at(3),), no),
                Present(CHECKPOINTS, (position(2, 2),), no),
                Present(SESSIONS, (3,), no),
            ],
        )

    def test_absent_is_refused_if_there_is_a_row(self, tmp_path: Path) -> None:
        no, at = refusal("guard"), Filled(1, 2, 1).at
        self.guards(
            self.make_backend(tmp_path),
            [Absent(TOMBSTONES, (at(1),), no), Absent(TOMBSTONES, (position(2, 2),), no)],
            [Absent(TOMBSTONES, (at(2),), no), Absent(TOMBSTONES, (at(4),), no)],
        )

    def test_unchanged_is_refused_if_a_scan_returns_other_rows(self, tmp_path: Path) -> None:
        no, filled = refusal("guard"), Filled(1, 2, 1)
        low, high = filled.at(0), filled.at(1 << 31)
        holding, failing = list[Guard](), list[Guard]()
        for index, _, _, _, rows in filled.scans():
            if index in (FORKS, GRAFTS, GRAFTS_BY_ANCESTOR):
                holding.append(Unchanged(index, low, high, rows, no))
                failing.append(Unchanged(index, low, high, [], no))
                failing.append(Unchanged(index, low, high, [*rows, rows[0]], no))
                failing.append(Unchanged(index, low, high, [(*rows[0][:-1], 9)], no))
                failing.append(Unchanged(index, position(2, 0), position(3, 0), rows, no))
        self.guards(self.make_backend(tmp_path), holding, failing)

    def test_guards_see_the_store_before_the_batch(self, tmp_path: Path) -> None:
        backend, number = self.begun(tmp_path)
        pos = position(number, 1)
        batch = change(
            number, 1, Put("tombs", (pos, b"tomb")),
            guards=[Absent(TOMBSTONES, (pos,), refusal("guard"))],
        )  # fmt: skip
        backend.commit(batch)
        with backend.view() as view:
            equal(view.get(TOMBSTONES, pos), (pos, b"tomb"))
        backend.close()

    # -- writes --------------------------------------------------------------------------------

    def test_a_swap_is_refused_if_the_head_is_another_one(self, tmp_path: Path) -> None:
        backend, number = self.begun(tmp_path)
        backend.commit(change(number, 1, new_checkpoint(number, 2)))
        for session, before in ((number, 1), (number, 3), (number + 1, 1)):
            with raises(StaleHead):
                backend.commit(change(session, before, new_checkpoint(session, 3)))
        with raises(Refused, "head"):
            backend.commit(change(number, 1))
        equal(self.head(backend, number), b"h2")
        with backend.view() as view:
            equal(view.count("checkpoints"), 2)
        backend.close()

    def test_an_insert_is_refused_if_its_key_is_taken(self, tmp_path: Path) -> None:
        backend = self.make_backend(tmp_path)
        filled = self.filled(backend)
        before = self.rows(backend, filled)
        number, at = filled.session, filled.at
        taken: list[Write] = [
            Insert("keys", (number, b"key", 9), refusal("taken")),
            Insert("journal", (at(3), b"another"), refusal("taken")),
            Insert("checkpoints", (at(2), checkpoint_id(9), b"another"), refusal("taken")),
            Insert("items", items_at(filled.stream, 1, b"another"), refusal("taken")),
            Insert("operations", (at(2), b"another"), refusal("taken")),
        ]
        for write in taken:
            if isinstance(write, Insert) and write.table not in self.unchecked:
                with raises(Refused, "taken"):
                    backend.commit(change(number, 3, Put("tombs", (at(1), b"t")), write))
                equal((write, self.rows(backend, filled)), (write, before))
        if "sessions" not in self.unchecked:
            with raises(Refused, "name"):
                backend.commit(creation(number, b"another name"))
        equal(self.rows(backend, filled), before)
        backend.close()

    def test_the_name_of_a_session_is_unique(self, tmp_path: Path) -> None:
        backend, number = self.begun(tmp_path)
        other = backend.reserve("session", 1)
        with raises(Refused, "name"):
            backend.commit(creation(other, b"s"))
        equal((self.head(backend, number), self.head(backend, other)), (b"h1", None))
        with backend.view() as view:
            equal(view.get(SESSIONS_BY_NAME, b"s"), (number, b"s", b"row of s"))
            equal(view.get(SESSIONS, other), None)
        backend.commit(creation(other, b"t"))
        backend.close()

    def test_a_put_replaces_the_row_of_its_key(self, tmp_path: Path) -> None:
        backend = self.make_backend(tmp_path)
        filled = self.filled(backend)
        number, at = filled.session, filled.at
        backend.commit(
            change(
                number, 3,
                Put("marks", (at(1), 1, b"tag", b"new mark")),
                Put("tombs", (at(2), b"new tomb")),
                Put("facets", (2, b"x", checkpoint_id(2))),
                Put("leases", (number, b"new token", b"new lease")),
            )
        )  # fmt: skip
        with backend.view() as view:
            low, high = at(0), at(1 << 31)
            marks = [row[-1] for row in view.scan(MARKS, low, high)]
            equal(marks, [b"m1", b"new mark", b"m3"])
            tags = view.scan(MARKS_BY_VALUE, low, high, prefix=(1, b"tag"))
            equal(tags, [(at(1), b"new mark"), (at(2), b"m3")])
            equal(view.scan(TOMBSTONES, low, high), [(at(2), b"new tomb"), (at(4), b"tomb")])
            equal(len(view.scan(TERMS, b"", prefix=(2, b"x"))), 2)
            equal([row[:3] for row in view.scan(LEASES, 0)], [(number, b"new token", b"new lease")])
        backend.close()

    def test_a_delete_removes_one_row_if_there_is_one(self, tmp_path: Path) -> None:
        backend = self.make_backend(tmp_path)
        filled = self.filled(backend)
        at = filled.at
        gone: list[Write] = [
            Delete("marks", (at(1), 1, b"tag")),
            Delete("marks", (at(1), 1, b"no such tag")),
            Delete("tombs", (at(2),)),
            Delete("tombs", (at(3),)),
            Delete("facets", (2, b"x", checkpoint_id(2))),
            Delete("facets", (2, b"y", checkpoint_id(3))),
        ]
        backend.commit(change(filled.session, 3, *gone))
        with backend.view() as view:
            low, high = at(0), at(1 << 31)
            equal([row[-1] for row in view.scan(MARKS, low, high)], [b"m1", b"m3"])
            equal(view.scan(MARKS_BY_VALUE, low, high, prefix=(1, b"tag")), [(at(2), b"m3")])
            equal(view.scan(TOMBSTONES, low, high), [(at(4), b"tomb")])
            equal(view.scan(TERMS, b"", prefix=(2, b"x")), [(checkpoint_id(3),)])
        backend.close()

    def test_a_range_of_rows_is_removed(self, tmp_path: Path) -> None:
        """gc removes rows so, with a guard that the session has not changed."""
        backend = self.make_backend(tmp_path)
        filled = self.filled(backend)
        at = filled.at
        tables = ("checkpoints", "gaps", "tombs", "marks")
        gone: list[Write] = [DeleteRange(table, at(2), at(4)) for table in tables]
        gone.append(DeleteRange("journal", at(0), at(3)))
        equal(backend.commit_all(self.gc(), [self.sweep(filled, *gone)]), [True])
        backend.compact()  # a backend may remove entries of a journal only then
        with backend.view() as view:
            low, high = at(0), at(1 << 31)
            equal([row[0] for row in view.scan(CHECKPOINTS, low, high)], [at(1), at(4)])
            equal(view.scan(TOMBSTONES, low, high), [(at(4), b"tomb")])
            equal([row[0] for row in view.scan(MARKS, low, high)], [at(1), at(1)])
            equal(view.scan(GRAFTS, low, high), [(at(4), b"graft")])
            equal(view.scan(JOURNAL, low, high), [(at(3), b"j3")])
            equal(view.get(SPANS, filled.session), (filled.session, 3, 4))
            ids = [id for id, _ in view.scan(CHECKPOINTS_BY_ID, b"", b"\xff" * 16)]
            expect(checkpoint_id(3) not in ids, "no index finds a removed row")
        backend.close()

    def test_a_rename_gives_up_the_old_name(self, tmp_path: Path) -> None:
        backend, number = self.begun(tmp_path)
        other = backend.reserve("session", 1)
        backend.commit(creation(other, b"t"))
        taken = refusal("rename")
        for name in (b"t", b"new"):
            batch = change(
                number, 1, Rename(number, name, b"new row", taken),
                guards=[Absent(SESSIONS_BY_NAME, (name,), taken)],
            )  # fmt: skip
            if name == b"new":
                backend.commit(batch)
            else:
                with raises(Refused, "rename"):
                    backend.commit(batch)
        with backend.view() as view:
            found = [view.get(SESSIONS_BY_NAME, name) for name in (b"s", b"t", b"new")]
            equal(found, [None, (other, b"t", b"row of t"), (number, b"new", b"new row")])
            equal(view.get(SESSIONS, number), (number, b"new", b"new row"))
        backend.commit(creation(backend.reserve("session", 1), b"s"))
        backend.close()

    def test_a_blob_is_shared_or_rewritten(self, tmp_path: Path) -> None:
        backend, number = self.begun(tmp_path)
        digest = b"d" * 32
        found = []
        for n, (body, rewrite) in enumerate(
            [(b"one", False), (b"two", False), (None, False), (b"mended", True)], start=1
        ):
            backend.commit(change(number, n, Share(digest, body, rewrite, MissingReference)))
            with backend.view() as view:
                found.append(view.get(BLOBS, digest))
        equal([row and row[1] for row in found], [b"one", b"one", b"one", b"mended"])
        backend.close()

    def test_a_blob_without_a_body_must_exist(self, tmp_path: Path) -> None:
        backend, number = self.begun(tmp_path)
        with raises(MissingReference):
            backend.commit(
                change(
                    number, 1, Share(b"d" * 32, None, False, MissingReference),
                    new_checkpoint(number, 2),
                )
            )  # fmt: skip
        equal(self.head(backend, number), b"h1")
        with backend.view() as view:
            equal((view.get(BLOBS, b"d" * 32), view.count("checkpoints")), (None, 1))
        backend.close()

    def test_every_use_of_a_blob_is_counted(self, tmp_path: Path) -> None:
        """So gc notices a commit that shares a blob which gc has found unused."""
        backend, number = self.begun(tmp_path)
        uses = set()
        for n, body in enumerate((b"one", b"two", None, None), start=1):
            backend.commit(change(number, n, Share(b"d" * 32, body, False, MissingReference)))
            with backend.view() as view:
                [(_, digest, size, count)] = view.scan(BLOB_USES, 1)
                uses.add(count)
                expect((digest, size > 0) == (b"d" * 32, True))
        equal(len(uses), 4)
        backend.close()

    def test_later_writes_follow_earlier_ones(self, tmp_path: Path) -> None:
        backend = self.make_backend(tmp_path)
        filled = self.filled(backend)
        at = filled.at
        backend.commit(
            change(
                filled.session, 3,
                Delete("marks", (at(1), 1, b"tag")),
                Put("marks", (at(1), 1, b"tag", b"again")),
            )
        )  # fmt: skip
        with backend.view() as view:
            marks = [row[-1] for row in view.scan(MARKS, at(0), at(1 << 31))]
        equal(marks, [b"m1", b"again", b"m3"])
        backend.close()

    def test_a_batch_is_written_whole_or_not_at_all(self, tmp_path: Path) -> None:
        """A batch with rows of all tables is refused in several ways, and leaves none of them."""
        backend = self.make_backend(tmp_path)
        filled = self.filled(backend)
        number, stream = filled.session, backend.reserve("stream", 1)
        writes = everything(filled, stream)
        free = Absent(SESSIONS_BY_NAME, (b"renamed",), refusal("rename"))
        before = self.rows(backend, filled)
        taken: list[Write] = [
            Share(b"f" * 32, None, False, MissingReference),
            Insert("keys", (number, b"key", 9), refusal("key")),
        ]
        refused = [change(number, 2, *writes, guards=[free])]
        refused += [change(number, 3, write, *writes, guards=[free]) for write in taken]
        refused.append(change(number, 3, *writes, taken[1], guards=[free]))
        missing = Present(CHECKPOINTS, (filled.at(3),), refusal("guard"))
        refused.append(change(number, 3, *writes, guards=[free, missing]))
        for batch in refused:
            with raises((Refused, MissingReference)):
                backend.commit(batch)
            equal(self.rows(backend, filled), before)
            with backend.view() as view:
                equal((items(view, stream, 0, 9), view.get(BLOBS, b"e" * 32)), ([], None))
        backend.commit(change(number, 3, *writes, guards=[free]))
        with backend.view() as view:
            equal(items(view, stream, 0, 9), [(0, b"another")])
            equal(view.get(BLOBS, b"e" * 32), (b"e" * 32, b"another blob"))
            equal(view.get(SESSIONS_BY_NAME, b"renamed"), (number, b"renamed", b"renamed row"))
            equal(view.get(KEYS, number, b"another"), (number, 5))
            marks = [row[2] for row in view.scan(MARKS, filled.at(0), filled.at(9))]
            equal(marks, [b"other", b"tag", b"tag"])
            found = view.scan(TOMBSTONES, filled.at(0), filled.at(9))
            equal([row[0] for row in found], [filled.at(1), filled.at(4)])
            terms = view.scan(TERMS, b"", prefix=(2, b"x"))
            equal(terms, [(checkpoint_id(3),), (checkpoint_id(9),)])
            equal(view.get(OPERATIONS, filled.at(3)), (filled.at(3), b"op3"))
            equal([row[1] for row in view.scan(LEASES, 0)], [b"another token"])
            equal(view.get(CHECKPOINTS, filled.at(5)) is not None, True)
        backend.close()

    def test_entries_of_a_journal_are_written_with_the_token(self, tmp_path: Path) -> None:
        backend = self.make_backend(tmp_path)
        number = self.filled(backend).session

        def append(token: bytes, *numbers: int) -> Batch:
            holds = Equals(LEASES, (number,), "token", token, refusal("token"))
            return Batch(guards=[holds], writes=[entry(number, n) for n in numbers])

        backend.commit(append(b"token", 4, 5))
        for batch in (append(b"another", 6), append(b"token", 5), append(b"token", 5, 6)):
            with raises(Refused):
                backend.commit(batch)
        with backend.view() as view:
            low, high = position(number, 0), position(number + 1, 0)
            found = [pos - low for pos, _ in view.scan(JOURNAL, low, high)]
            equal((found, view.get(SPANS, number)), ([1, 2, 3, 4, 5], (number, 1, 6)))
        backend.close()

    def test_the_number_of_an_entry_is_never_used_again(self, tmp_path: Path) -> None:
        """The span of a journal stays when its entries are removed."""
        backend = self.make_backend(tmp_path)
        filled = self.filled(backend)
        number, at = filled.session, filled.at
        gone = DeleteRange("journal", at(0), at(4))
        equal(backend.commit_all(self.gc(), [self.sweep(filled, gone)]), [True])
        backend.compact()
        with backend.view() as view:
            equal(view.scan(JOURNAL, at(0), at(9)), [])
            equal(view.get(SPANS, number), (number, 4, 4))
        backend.commit(change(number, 3, entry(number, 4)))
        with backend.view() as view:
            equal(view.get(SPANS, number), (number, 4, 5))
        backend.close()

    # -- several batches -----------------------------------------------------------------------

    def gc(self) -> Batch:
        """Return the batch with which gc begins to free."""
        return Batch(writes=[Put("counters", (FREED, seal_counter(FREED, 5)))])

    def sweep(self, filled: Filled, *writes: Write, head: bytes = b"h3") -> Batch:
        """Return a batch of gc: it removes rows of a session whose head is still the same."""
        guard = Equals(HEADS, (filled.session,), "body", head, StaleHead)
        return Batch(sessions=(filled.session,), guards=[guard], writes=[*writes])

    def test_commit_all_writes_each_batch_that_is_not_refused(self, tmp_path: Path) -> None:
        backend = self.make_backend(tmp_path)
        filled = self.filled(backend)
        at = filled.at
        removed: list[Write] = [
            DeleteRange("checkpoints", at(2), at(3)),
            DeleteRange("tombs", at(2), at(3)),
        ]
        kept: list[Write] = [
            DeleteRange("checkpoints", at(4), at(5)),
            Put("gaps", (at(1), at(1), b"never")),
        ]
        batches = [self.sweep(filled, *kept, head=b"h2"), self.sweep(filled, *removed)]
        equal(backend.commit_all(self.gc(), batches), [False, True])
        with backend.view() as view:
            found = [row[0] for row in view.scan(CHECKPOINTS, at(0), at(9))]
            equal(found, [at(1), at(4)])
            equal(view.scan(GRAFTS, at(0), at(9)), [(at(4), b"graft")])
            equal(view.scan(TOMBSTONES, at(0), at(9)), [(at(4), b"tomb")])
            equal(view.get(COUNTERS, FREED), (FREED, seal_counter(FREED, 5)))
        backend.close()

    def test_commit_all_writes_nothing_if_the_first_is_refused(self, tmp_path: Path) -> None:
        backend = self.make_backend(tmp_path)
        filled = self.filled(backend)
        before = self.rows(backend, filled)
        first = self.gc()
        first.guards.append(Equals(COUNTERS, (COPIED,), "body", None, MissingReference))
        gone = DeleteRange("checkpoints", filled.at(2), filled.at(3))
        with raises(MissingReference):
            backend.commit_all(first, [self.sweep(filled, gone)])
        equal(self.rows(backend, filled), before)
        with backend.view() as view:
            equal(view.get(COUNTERS, FREED), None)
        backend.close()

    def test_delete_if_removes_a_row_that_has_the_value(self, tmp_path: Path) -> None:
        """A batch of them is written whole or not at all, at the latest by compact()."""
        backend, number = self.begun(tmp_path)
        stream = backend.reserve("stream", 1)
        rows = [items_at(stream, n, b"row %d" % n) for n in range(3)]
        writes = [Insert("items", row, refusal("items")) for row in rows]
        blobs = [Share(bytes((n,)) * 32, b"blob", False, MissingReference) for n in (1, 2)]
        backend.commit(change(number, 1, *blobs, *writes))
        with backend.view() as view:
            begins = [begin for _, _, begin in view.scan(ITEM_SIZES, 0)]
            uses = {digest: count for _, digest, _, count in view.scan(BLOB_USES, 1)}
        backend.commit(change(number, 2, Share(b"\2" * 32, None, False, MissingReference)))

        def item(n: int, begin: bytes) -> DeleteIf:
            return DeleteIf(ITEM_SIZES, (rows[n][0],), "begin", begin, StaleHead)

        batches = [
            [item(0, begins[0])],
            [item(1, begins[1]), item(2, b"it was another")],
            *[[DeleteIf(BLOB_VERSIONS, (d,), "uses", n, StaleHead)] for d, n in uses.items()],
        ]
        backend.commit_all(self.gc(), [Batch(writes=[*group]) for group in batches])
        backend.compact()
        with backend.view() as view:
            equal(items(view, stream, 0, 9), [(1, b"row 1"), (2, b"row 2")])
            equal([row[1] for row in view.scan(BLOB_USES, 1)], [b"\2" * 32])
        backend.close()

    # -- threads -------------------------------------------------------------------------------

    def one_wins(self, backend: Backend, batches: Sequence[Batch]) -> int:
        """Commit all batches at once. Check that exactly one is written, and return which one."""
        errors = at_once([partial(backend.commit, batch) for batch in batches])
        equal({type(error) for error in errors}, {type(None), Refused})
        equal(errors.count(None), 1)
        return errors.index(None)

    def test_one_of_many_wins_a_race_for_the_head(self, tmp_path: Path) -> None:
        backend, number = self.begun(tmp_path)
        batches = [
            change(number, 1, new_checkpoint(number, 2, checkpoint_id(n + 10))) for n in range(8)
        ]
        won = self.one_wins(backend, batches)
        with backend.view() as view:
            row = view.get(CHECKPOINTS, position(number, 2))
            equal(row and row[1], checkpoint_id(won + 10))
            equal((self.head(backend, number), view.count("checkpoints")), (b"h2", 2))
        backend.close()

    def test_one_of_many_wins_a_race_for_a_name(self, tmp_path: Path) -> None:
        backend = self.make_backend(tmp_path)
        numbers = [backend.reserve("session", 1) for _ in range(4)]
        won = self.one_wins(backend, [creation(number, b"s") for number in numbers])
        with backend.view() as view:
            equal(view.get(SESSIONS_BY_NAME, b"s"), (numbers[won], b"s", b"row of s"))
            equal(len(view.scan(SESSIONS_BY_NAME, b"")), 1)
        backend.close()

    def test_one_of_many_wins_a_race_for_an_entry(self, tmp_path: Path) -> None:
        backend, number = self.begun(tmp_path)
        there = Present(SESSIONS, (number,), refusal("session"))
        batches = [
            Batch(guards=[there], writes=[entry(number, 1, b"entry %d" % n)]) for n in range(4)
        ]
        won = self.one_wins(backend, batches)
        with backend.view() as view:
            equal(view.get(JOURNAL, position(number, 1)), (position(number, 1), b"entry %d" % won))
        backend.close()

    def test_sessions_are_written_at_once(self, tmp_path: Path) -> None:
        """Backends may write several batches together. A refused one does not affect the others."""
        backend = self.make_backend(tmp_path)
        numbers = [backend.reserve("session", 1) for _ in range(6)]
        for number in numbers:
            backend.commit(creation(number, b"s%d" % number))

        def work(number: int) -> None:
            for n in range(1, 9):
                with raises(Refused, "head"):
                    backend.commit(change(number, n + 1, new_checkpoint(number, 99)))
                backend.commit(change(number, n, new_checkpoint(number, n)))

        equal(at_once([partial(work, number) for number in numbers]), [None] * len(numbers))
        with backend.view() as view:
            for number in numbers:
                found = view.scan(CHECKPOINTS, position(number, 0), position(number + 1, 0))
                equal([row[2] for row in found], [b"c%d" % n for n in range(1, 9)])
                equal(view.get(HEADS, number), (number, b"h9"))
        backend.close()

    def test_a_number_is_reserved_once(self, tmp_path: Path) -> None:
        backend = self.make_backend(tmp_path)
        taken: list[int] = []

        def take() -> None:
            for _ in range(20):
                first = backend.reserve("stream", 3)
                taken.extend(range(first, first + 3))

        equal(at_once([take] * 4), [None] * 4)
        equal((len(taken), len({*taken})), (240, 240))
        expect(min(taken) > 0)
        sessions = [backend.reserve("session", 2) for _ in range(3)]
        equal(len({*sessions, *[n + 1 for n in sessions]}), 6)
        backend.close()

    # -- versions and leases -------------------------------------------------------------------

    def test_each_commit_changes_the_version(self, tmp_path: Path) -> None:
        backend, number = self.begun(tmp_path)
        seen = [backend.version()]
        equal(backend.version(), seen[0])
        for n in range(1, 4):
            backend.commit(change(number, n))
            expect(backend.version() not in seen)
            seen.append(backend.version())
        backend.close()

    def test_wait_returns_in_time(self, tmp_path: Path) -> None:
        backend = self.make_backend(tmp_path)
        began = time.monotonic()
        backend.wait(0.05)
        expect(time.monotonic() - began < 5.0)
        backend.close()

    def test_renewing_a_lease_restarts_its_age(self, tmp_path: Path) -> None:
        backend = self.make_backend(tmp_path)
        number = self.filled(backend).session

        def age() -> float:
            with backend.view() as view:
                [row] = view.scan(LEASES, number)
                found = view.get(LEASES, number)
                equal(found and found[:3], row[:3])
                expect(found is not None and found[3] >= row[3])
                return float(row[3])

        time.sleep(0.1)
        before = age()
        expect(0.1 <= before < 60, f"the age is {before}")
        expect(not backend.renew(number, b"another"), "a lease of another token is not renewed")
        expect(not backend.renew(number + 1, b"token"), "a lease that is missing is not renewed")
        expect(age() >= before)
        expect(backend.renew(number, b"token"))
        expect(0 <= age() < before)
        with backend.view() as view:
            equal([row[:3] for row in view.scan(LEASES, 0)], [(number, b"token", b"lease")])
            equal(view.scan(LEASES, number + 1), [])
        backend.close()

    # -- maintenance ---------------------------------------------------------------------------

    def test_compact_keeps_every_row(self, tmp_path: Path) -> None:
        backend = self.make_backend(tmp_path)
        filled = self.filled(backend)
        before = self.rows(backend, filled)
        seen: list[tuple[int, int]] = []
        backend.compact(lambda done, total: seen.append((done, total)))
        expect(all(0 <= done <= total for done, total in seen))
        equal(self.rows(backend, filled), before)
        expect(backend.compact(erase=True), "nobody prevents a part of it")
        equal(self.rows(backend, filled), before)
        backend.close()

    def test_repair_of_a_sound_store_changes_nothing(self, tmp_path: Path) -> None:
        backend = self.make_backend(tmp_path)
        filled = self.filled(backend)
        before = self.rows(backend, filled)
        with open_reader(backend) as reader:
            equal([*reader.view.problems()], [])
            equal([*reader.view.problems(filled.session)], [])
        self.mend(backend, filled.session)
        equal(self.rows(backend, filled), before)
        expect(backend.reserve("session", 1) > filled.fork)
        backend.close()

    def test_a_backup_is_the_store_at_one_moment(self, tmp_path: Path) -> None:
        one, two = tmp_path / "one", tmp_path / "two"
        one.mkdir()
        two.mkdir()
        backend = self.make_backend(one)
        filled = self.filled(backend)
        before = self.rows(backend, filled)
        path = self.backup_path(two)
        if path is None:
            with raises(HoldfastError):
                backend.backup(two / "backup")
        else:
            backend.backup(path)
            backend.commit(change(filled.session, 3, new_checkpoint(filled.session, 5)))
            copy = self.make_backend(two)
            found = self.rows(copy, filled)
            epochs = "counters", (COPIED,)  # a backup may begin without those of gc and copies
            equal(found | {epochs: None}, before | {epochs: None})
            expect(copy.reserve("session", 1) > filled.fork)
            copy.close()
        backend.close()

    # -- the end -------------------------------------------------------------------------------

    def test_every_row_survives_reopening(self, tmp_path: Path) -> None:
        backend = self.make_backend(tmp_path)
        filled = self.filled(backend)
        before = self.rows(backend, filled)
        reserved = backend.reserve("session", 5), backend.reserve("stream", 5)
        backend.close()
        if self.durable:
            backend = self.make_backend(tmp_path)
            equal(self.rows(backend, filled), before)
            expect(backend.reserve("session", 1) >= reserved[0] + 5)
            expect(backend.reserve("stream", 1) >= reserved[1] + 5)
            backend.commit(change(filled.session, 3, new_checkpoint(filled.session, 5)))
            with raises(Refused, "head"):
                backend.commit(change(filled.session, 3, new_checkpoint(filled.session, 6)))
            backend.close()

    def test_a_commit_is_in_the_files_when_it_returns(self, tmp_path: Path) -> None:
        """Copies of the files are what a killed process leaves behind."""
        here, killed = tmp_path / "here", tmp_path / "killed"
        here.mkdir()
        backend = self.make_backend(here)
        filled = self.filled(backend)
        before = self.rows(backend, filled)
        first = backend.reserve("session", 1)
        if self.durable:
            shutil.copytree(here, killed)
            copy = self.make_backend(killed)
            equal(self.rows(copy, filled), before)
            expect(copy.reserve("session", 1) > first)
            copy.close()
        backend.close()

    def test_closing_is_final_and_idempotent(self, tmp_path: Path) -> None:
        backend, number = self.begun(tmp_path)
        backend.close()
        backend.close()
        calls: list[Callable[[], object]] = [
            lambda: backend.commit(change(number, 1)),
            lambda: backend.commit_all(self.gc(), []),
            lambda: backend.renew(number, b"token"),
            lambda: backend.reserve("session", 1),
            backend.version,
            backend.compact,
        ]
        for call in calls:
            with raises(InvalidRequest):
                call()
        with raises(InvalidRequest), backend.view():
            pass
