"""The contract of what the library writes: changes of sessions, journals, sweeps and trims."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

from holdfast.errors import (
    KeyTaken,
    SessionExists,
)
from holdfast.format.item_streams import RowWrite, item_row
from holdfast.format.records import IndexTerm
from holdfast.format.rows import DENSE, PLAIN, seal_items
from holdfast.storage import changes
from holdfast.storage.changes import Change, Copied, JournalAppend, Notes, Sweep, Trim
from holdfast.storage.contract import Backend, MissingReference, StaleHead
from holdfast.storage.reader import open_reader
from holdfast.storage.rows import (
    Address,
    BlobTrim,
    BlobWrite,
    CheckpointRow,
    Fork,
    GraftRow,
    GraftWrite,
    ItemsKey,
    ItemsPut,
    ItemsTrim,
    JournalRow,
    LeaseRow,
    MarkKey,
    MarkRow,
    NameRow,
    OperationRow,
    TombstoneRow,
)
from holdfast.testing import tables
from holdfast.testing.checks import equal, expect, raises

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.storage.reader import Reader


def write(backend: Backend, change: Change | JournalAppend) -> None:
    backend.commit(change.batch())


def row(stream: int, n: int, item: bytes) -> RowWrite:
    return item_row(stream, n, 0, [item], refs=False, level=PLAIN)


def items(reader: Reader, stream: int, start: int, stop: int) -> list[tuple[int, bytes]]:
    """Return the items in a range, however they are spread over rows."""
    return tables.items(reader.view, stream, start, stop)


class ChangesContract:
    """Changes, journals, sweeps and trims. Rows are opaque, but for those of items."""

    durable = True

    def make_backend(self, folder: Path) -> Backend:
        raise NotImplementedError

    def _begun(self, folder: Path, name: bytes = b"s") -> tuple[Backend, int]:
        backend = self.make_backend(folder)
        number = backend.reserve("session", 1)
        write(
            backend,
            Change(
                number,
                b"",
                b"h1",
                NameRow(name, b"row"),
                CheckpointRow(1, bytes(14) + b"\x01", b"c1"),
            ),
        )
        return backend, number

    def test_leases(self, tmp_path: Path) -> None:
        backend, number = self._begun(tmp_path)
        with open_reader(backend) as reader:
            equal(reader.lease(number), None)
            equal(reader.leases(0, 9), [])
        expect(not backend.renew(number, b"none"))
        write(
            backend, Change(number, b"h1", b"h2", notes=Notes(lease=LeaseRow(b"one", b"row one")))
        )
        with open_reader(backend) as reader:
            [lease] = reader.leases(0, 9)
            equal(lease[:3], (number, b"one", b"row one"))
            expect(0 <= lease.age < 60)
            equal(reader.leases(number, 9), [])
        expect(backend.renew(number, b"one"))
        with raises(StaleHead):  # what is refused changes no lease
            write(
                backend,
                Change(number, b"h1", b"h3", notes=Notes(lease=LeaseRow(b"two", b"row two"))),
            )
        write(
            backend, Change(number, b"h2", b"h3", notes=Notes(lease=LeaseRow(b"two", b"row two")))
        )
        expect(not backend.renew(number, b"one"))
        if self.durable:
            backend.close()
            backend = self.make_backend(tmp_path)
        with open_reader(backend) as reader:
            found = reader.lease(number)
            equal(found and found[:3], (number, b"two", b"row two"))
        backend.close()

    def test_tallies_of_rows_that_are_replaced(self, tmp_path: Path) -> None:
        backend, number = self._begun(tmp_path)
        for n, body in enumerate((b"first body", b"other body"), 1):
            marks, tombstones = [MarkRow(1, 1, b"t", body)], [TombstoneRow(1, body)]
            notes = Notes(marks=marks, tombstones=tombstones)
            notes.copied = Copied(0, operations=[OperationRow(1, body)])
            write(backend, Change(number, b"h%d" % n, b"h%d" % (n + 1), notes=notes))
            with open_reader(backend) as reader:
                equal(list(reader.check_tally(number)), [])
        backend.close()

    def test_journal(self, tmp_path: Path) -> None:
        backend, number = self._begun(tmp_path)
        with open_reader(backend) as reader:
            equal(reader.journal(number, 0, 9), [])
            equal(reader.last_entry(number), 0)
        write(backend, Change(number, b"h1", b"h2", notes=Notes(lease=LeaseRow(b"one", b"row"))))
        write(backend, JournalAppend(number, b"one", 1, [b"a"]))
        write(backend, JournalAppend(number, b"one", 2, [b"b", b"c" * 5_000]))
        write(backend, JournalAppend(number, None, 4, [b"d"]))
        refused = [
            JournalAppend(number, b"another", 5, [b"x"]),
            JournalAppend(number, b"one", 4, [b"x"]),
            JournalAppend(number, None, 4, [b"x"]),
            JournalAppend(number, b"one", 3, [b"x", b"y"]),
            JournalAppend(number + 1, b"one", 1, [b"x"]),
            JournalAppend(number + 1, None, 1, [b"x"]),
        ]
        for append in refused:
            with raises(StaleHead):
                write(backend, append)
        write(backend, Change(number, b"h2", b"h3", notes=Notes(lease=LeaseRow(b"two", b"row"))))
        with raises(StaleHead):  # taken over
            write(backend, JournalAppend(number, b"one", 5, [b"x"]))
        if self.durable:
            backend.close()
            backend = self.make_backend(tmp_path)
        write(backend, JournalAppend(number, b"two", 5, [b"e"]))
        with open_reader(backend) as reader:
            known = [(1, b"a"), (2, b"b"), (3, b"c" * 5_000), (4, b"d"), (5, b"e")]
            equal(reader.journal(number, 0, 9), known)
            equal(reader.journal(number, 2, 2), known[1:3])
            equal(reader.last_entry(number), 5)
            equal(reader.sizes()["journal"], (5, 5_004))
            equal(list(reader.check()), [])
        equal(changes.sweep(backend, [Sweep(number, b"h3", (), (), (), journal=3)]), [True])
        backend.compact()
        with open_reader(backend) as reader:
            equal(reader.journal(number, 0, 9), known[2:])
        with open_reader(backend) as reader:
            late = Copied(
                reader.turnover().freed, journal=[JournalRow(5, b"x"), JournalRow(6, b"x")]
            )
            copied = Copied(reader.turnover().freed, journal=[JournalRow(6, b"f")])
        with raises(StaleHead):  # another has written entry 5 since the copy has looked
            write(backend, Change(number, b"h3", b"h4", notes=Notes(copied=late)))
        write(backend, Change(number, b"h3", b"h4", notes=Notes(copied=copied)))
        write(backend, JournalAppend(number, b"two", 7, [b"g"]))
        with open_reader(backend) as reader:
            equal(reader.journal(number, 5, 9), [(5, b"e"), (6, b"f"), (7, b"g")])
        with open_reader(backend) as reader:
            copied = Copied(reader.turnover().freed, journal=[JournalRow(9, b"i")], journal_from=9)
        write(backend, Change(number, b"h4", b"h5", notes=Notes(copied=copied)))
        with open_reader(backend) as reader:
            equal(reader.journal(number, 0, 9), [(9, b"i")])
            equal(reader.last_entry(number), 9)
        equal(changes.sweep(backend, [Sweep(number, b"h5", (), (), (), remove=b"s")]), [True])
        with open_reader(backend) as reader:
            equal(reader.journal(number, 0, 9), [])
            equal(reader.lease(number), None)
        backend.close()

    def test_threads_write_one_journal(self, tmp_path: Path) -> None:
        """Each entry gets a number of its own: none is lost, and none is written twice."""
        backend, number = self._begun(tmp_path)
        write(backend, Change(number, b"h1", b"h2", notes=Notes(lease=LeaseRow(b"one", b"row"))))

        def work(name: int) -> None:
            for n in range(10):
                while True:
                    with open_reader(backend) as reader:
                        first = reader.last_entry(number) + 1
                    try:
                        write(backend, JournalAppend(number, b"one", first, [b"%d %d" % (name, n)]))
                        break
                    except StaleHead:
                        continue

        threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with open_reader(backend) as reader:
            found = reader.journal(number, 0, 99)
        equal([n for n, _ in found], list(range(1, 41)))
        equal({row for _, row in found}, {b"%d %d" % (a, b) for a in range(4) for b in range(10)})
        backend.close()

    def test_sweep(self, tmp_path: Path) -> None:
        """A sweep skips a session that changed, and frees several others in one call."""
        backend, number = self._begun(tmp_path)
        other = backend.reserve("session", 1)
        id = bytes(14) + b"\x09"
        write(
            backend,
            Change(other, b"", b"o1", NameRow(b"other", b"row"), CheckpointRow(1, id, b"c")),
        )
        second = bytes(14) + b"\x02"
        change = Change(number, b"h1", b"h2", None, CheckpointRow(2, second, b"c2"))
        change.notes = Notes(
            key=b"k", marks=[MarkRow(2, 1, b"t", b"m")], tombstones=[TombstoneRow(2, b"tomb")]
        )
        write(backend, change)
        gone = [2]
        stale = [
            Sweep(number, b"h1", [], [], [], gone),
            Sweep(number, b"h2", [GraftRow(0, b"another gc was here")], [], [], gone),
            Sweep(number, b"h2", [], [Fork(1, 9)], [], gone),
            Sweep(number, b"h2", [], [], [(number << 32, 9 << 32)], gone),
            Sweep(
                number,
                b"h2",
                [],
                [],
                [],
                gone,
                grafts=[GraftWrite(number, 1, (9 << 32) + 4, b"none")],
            ),
        ]
        grafts = [GraftWrite(number, 1, (other << 32) + 1, b"gap")]
        sweep = Sweep(number, b"h2", [], [], [], gone, keys=[b"k"], grafts=grafts)
        equal(changes.sweep(backend, [*stale, sweep, sweep]), [False] * 5 + [True, False])
        with open_reader(backend) as reader:
            equal(reader.checkpoint(number, 2), None)
            equal(reader.find_ids(second, second, 1), [])
            equal(reader.find_key(number, b"k"), None)
            equal((reader.marks(number, 0, 9), reader.tombstones(number, 0, 9)), ([], []))
            equal(reader.grafts(number, 0, 9), [(1, b"gap")])
            equal(reader.grafts_below(other), [(number, 1)])
            equal(reader.grafts_below(number), [])
            equal(reader.session(b"s"), (number, b"s", b"row"))
        backend.close()

    def test_sweep_of_a_whole_session(self, tmp_path: Path) -> None:
        backend, number = self._begun(tmp_path)
        fork = backend.reserve("session", 1)
        change = Change(fork, b"", b"f1", NameRow(b"fork", b"row"))
        change.notes = Notes(origin=Address(number, 1))
        write(backend, change)
        first = [1]
        freed = [GraftWrite(number, 0, None, b"freed")]
        sweeps = [
            Sweep(number, b"h1", [], [Fork(1, fork)], [], first, grafts=freed),
            Sweep(number, b"h1", [GraftRow(0, b"freed")], [Fork(1, fork)], [], remove=b"s"),
        ]
        equal(changes.sweep(backend, sweeps), [True, True])
        with open_reader(backend) as reader:
            equal((reader.session(b"s"), reader.head(number)), (None, None))
            equal(
                (reader.grafts(number, 0, 9), reader.session(b"fork")),
                ([], (fork, b"fork", b"row")),
            )
        backend.close()

    def test_trim(self, tmp_path: Path) -> None:
        """Data goes only if it is still what it was."""
        backend, number = self._begun(tmp_path)
        stream = backend.reserve("stream", 1)
        rows = [row(stream, n, b"row %d" % n) for n in range(3)]
        blobs = [BlobWrite(bytes([n]) * 32, b"blob", False) for n in range(2)]
        write(backend, Change(number, b"h1", b"h2", None, None, rows, blobs))
        with open_reader(backend) as reader:
            found = reader.item_rows(-1, 9)
            known = [BlobTrim(blob.digest, blob.uses) for blob in reader.blob_rows(0, 9)]
        equal([row.begin for row in found], [row.body[:9] for row in rows])
        expect(all(row.size >= 5 for row in found))
        write(backend, Change(number, b"h2", b"h3", notes=Notes(shares=[bytes([1]) * 32])))
        dead = [ItemsKey(row.position, row.begin) for row in found]
        changed = [dead[0], dead[1]._replace(begin=b"it was another"), dead[2]]
        less = seal_items(dead[2].position, [b"row 2"], False, DENSE)
        groups = [
            ItemsTrim(changed, []),
            ItemsTrim([dead[0]], []),
            ItemsTrim([changed[1]], []),
            ItemsTrim([dead[2]], [ItemsPut(dead[2].position, less)]),
        ]
        expect(changes.trim(backend, Trim(groups, known, 0)) > 1, "what goes is counted")
        backend.compact()
        with open_reader(backend) as reader:
            equal(items(reader, stream, 0, 3), [(1, b"row 1"), (2, b"row 2")])
            equal([reader.blob(bytes([n]) * 32) for n in range(2)], [None, b"blob"])
        backend.close()

    def test_gc_and_copies_notice_each_other(self, tmp_path: Path) -> None:
        """A copy goes by what it found in a store, and gc by what it found to be garbage there."""
        backend, number = self._begun(tmp_path)
        stream = backend.reserve("stream", 1)
        rows = [row(stream, n, b"row %d" % n) for n in range(3)]
        write(backend, Change(number, b"h1", b"h2", None, None, rows))
        with open_reader(backend) as reader:
            equal(reader.turnover(), (0, 0))
            found = reader.item_rows(-1, 9)
            first, second, _ = [ItemsKey(row.position, row.begin) for row in found]
        brought = Copied(0, [CheckpointRow(5, b"i" * 15, b"record")])
        write(backend, Change(number, b"h2", b"h3", notes=Notes(copied=brought)))
        with open_reader(backend) as reader:
            freed, copied = reader.turnover()
        expect(freed == 0 and copied > 0, "a copy says that it landed")
        with raises(MissingReference):
            changes.trim(backend, Trim([ItemsTrim([first], [])], [], 0))
        backend.compact()
        with open_reader(backend) as reader:
            equal(len(items(reader, stream, 0, 3)), 3)
            equal(reader.turnover(), (0, copied))
        changes.trim(backend, Trim([ItemsTrim([second], [])], [], copied))
        backend.compact()
        with open_reader(backend) as reader:
            equal([n for n, _ in items(reader, stream, 0, 3)], [0, 2])
            trimmed = reader.turnover().freed
        expect(trimmed > 0, "gc says that something has gone")
        late = Notes(copied=Copied(0, [CheckpointRow(6, b"j" * 15, b"record")]))
        with raises(MissingReference):
            write(backend, Change(number, b"h3", b"h4", notes=late))
        with open_reader(backend) as reader:
            equal((reader.head(number), reader.checkpoint(number, 6)), (b"h3", None))
            equal(reader.turnover(), (trimmed, copied))
        equal(
            changes.sweep(backend, [Sweep(number, b"h3", (), (), (), [5])]),
            [True],
        )
        with open_reader(backend) as reader:
            expect(reader.turnover().freed not in (0, trimmed), "freeing a checkpoint says so, too")
        backend.close()

    def test_a_refused_commit_leaves_nothing(self, tmp_path: Path) -> None:
        backend, number = self._begun(tmp_path)
        change = Change(number, b"h1", b"h2", None, CheckpointRow(2, bytes(14) + b"\x02", b"c2"))
        change.notes = Notes(key=b"k")
        write(backend, change)
        stream = backend.reserve("stream", 1)
        bad = Change(number, b"h2", b"h3", None, CheckpointRow(3, bytes(14) + b"\x03", b"c3"))
        bad.rows = [row(stream, 0, b"item")]
        bad.blobs = [BlobWrite(bytes(32), b"blob", False)]
        bad.notes = Notes(
            key=b"k", marks=[MarkRow(3, 1, b"tag", b"m")], operation=OperationRow(1, b"op")
        )
        with raises(KeyTaken):
            write(backend, bad)
        with open_reader(backend) as reader:
            equal(reader.head(number), b"h2")
            equal(reader.items(stream, 0, 1), [])
            equal(reader.blob(bytes(32)), None)
            equal(reader.marks(number, 0, 9), [])
            equal(reader.operations(number, 0, 9), [])
            equal(reader.find_key(number, b"k"), 2)
        backend.close()

    def test_checkpoints_in_order(self, tmp_path: Path) -> None:
        backend, number = self._begun(tmp_path)
        for seq in range(2, 12):
            id = bytes(14) + bytes((100 - seq,))
            before, after = b"h%d" % (seq - 1), b"h%d" % seq
            write(
                backend, Change(number, before, after, None, CheckpointRow(seq, id, b"c%d" % seq))
            )
        with open_reader(backend) as reader:
            equal([s for s, _, _ in reader.checkpoints(number, 3, 9, 4)], [3, 4, 5, 6])
            equal([s for s, _, _ in reader.checkpoints(number, 10, 99, 9)], [10, 11])
            found = reader.find_ids(bytes(14) + b"\x59", bytes(14) + b"\x5b", 9)
            equal([seq for _, seq, _ in found], [11, 10, 9])
            equal(len(reader.find_ids(bytes(15), b"\xff" * 15, 3)), 3)
        backend.close()

    def test_rows_of_streams(self, tmp_path: Path) -> None:
        backend, number = self._begun(tmp_path)
        a = backend.reserve("stream", 2)
        b = a + 1
        rows = [row(a, 0, b"a0"), row(a, 1, b"a1"), row(b, 0, b"b0")]
        write(backend, Change(number, b"h1", b"h2", rows=rows))
        with open_reader(backend) as reader:
            equal(items(reader, a, 0, 2), [(0, b"a0"), (1, b"a1")])
            equal(items(reader, a, 1, 2), [(1, b"a1")])
        pack = item_row(a, 0, 2, [b"a0", b"a1", b"a2"], refs=False, level=DENSE)
        write(backend, Change(number, b"h2", b"h3", rows=[pack, row(a, 3, b"a3")]))
        with open_reader(backend) as reader:
            equal(items(reader, a, 0, 4), [(n, b"a%d" % n) for n in range(4)])
            equal(items(reader, a, 1, 2), [(1, b"a1")])
            equal(items(reader, a, 3, 4), [(3, b"a3")])
            equal(items(reader, b, 0, 9), [(0, b"b0")])
        backend.close()

    def test_every_part_of_a_change(self, tmp_path: Path) -> None:
        """A backend may have a fast path for a change of one checkpoint and one row.

        All other parts of such a change must be written too.
        """
        backend, number = self._begun(tmp_path)
        stream, other = backend.reserve("stream", 2), backend.reserve("session", 1)
        digest = b"d" * 32

        def change(seq: int, **more: Any) -> None:
            head = b"h%d" % seq
            checkpoint = CheckpointRow(seq, bytes(14) + bytes((seq,)), b"c%d" % seq)
            parts: dict[str, Any] = {"rows": [row(stream, seq, b"item %d" % seq)]} | more
            write(backend, Change(number, b"h%d" % (seq - 1), head, None, checkpoint, **parts))

        change(2)
        change(3, blobs=[BlobWrite(digest, b"blob", False)])
        change(4, notes=Notes(key=b"k"))
        change(5, rows=[row(stream, 5, b"item 5"), row(stream, 6, b"item 6")])
        pack = item_row(stream, 5, 2, [b"item 5", b"item 6", b"item 7"], refs=False, level=DENSE)
        change(6, rows=[pack])
        created = Change(
            other,
            b"",
            b"o1",
            NameRow(b"other", b"row"),
            CheckpointRow(1, bytes(14) + b"\x20", b"o"),
        )
        created.rows = [row(stream + 1, 0, b"item 0")]
        write(backend, created)
        with open_reader(backend) as reader:
            equal(reader.blob(digest), b"blob")
            equal(reader.find_key(number, b"k"), 4)
            equal([c[0] for c in reader.checkpoints(number, 2, 9, 9)], [2, 3, 4, 5, 6])
            equal(items(reader, stream, 2, 9), [(n, b"item %d" % n) for n in range(2, 8)])
            equal(items(reader, stream + 1, 0, 9), [(0, b"item 0")])
            equal(reader.session(b"other"), (other, b"other", b"row"))
            equal(reader.checkpoint(other, 1), (1, bytes(14) + b"\x20", b"o"))
            equal(reader.head(number), b"h6")
        backend.close()

    def test_names_are_unique_and_exact(self, tmp_path: Path) -> None:
        backend, number = self._begun(tmp_path)
        again = backend.reserve("session", 1)
        with raises(SessionExists):
            write(backend, Change(again, b"", b"h", NameRow(b"s", b"row")))
        names = [b"S", b"s ", b"s\x00", b"s_2", b"%", b"../s", b"\xed\xa0\x80", b"x" * 10_000]
        for name in names:
            new = backend.reserve("session", 1)
            write(backend, Change(new, b"", b"h", NameRow(name, name)))
        with open_reader(backend) as reader:
            equal(reader.head(again), None)
            equal(reader.session(b"s"), (number, b"s", b"row"))
            listed = [name for _, name, _ in reader.sessions(None, 100)]
            equal(listed, sorted([b"s", *names]))
            equal([n for _, n, _ in reader.sessions(b"s", 2)], [b"s\x00", b"s "])
        backend.close()

    def test_marks(self, tmp_path: Path) -> None:
        backend, number = self._begun(tmp_path)
        marks = [
            MarkRow(1, 0, b"first", b"m1"),
            MarkRow(1, 1, b"t", b"m2"),
            MarkRow(1, 1, b"u", b"m3"),
        ]
        write(backend, Change(number, b"h1", b"h2", notes=Notes(marks=marks)))
        notes = Notes(
            marks=[MarkRow(1, 0, b"second", b"m4")], removed_marks=[MarkKey(1, 0, b"first")]
        )
        write(backend, Change(number, b"h2", b"h3", notes=notes))
        with open_reader(backend) as reader:
            found = [(kind, value) for _, kind, value, _ in reader.marks(number, 1, 1)]
            equal(found, [(0, b"second"), (1, b"t"), (1, b"u")])
            equal(reader.find_marks(number, 1, b"u"), [(1, 1, b"u", b"m3")])
            equal(reader.find_marks(number, 0, b"first"), [])
            equal(reader.find_marks(number + 1, 1, b"u"), [])
        backend.close()

    def test_notes(self, tmp_path: Path) -> None:
        """Tombstones, gaps, forks, facets and renames."""
        backend, number = self._begun(tmp_path)
        fork = backend.reserve("session", 1)
        change = Change(
            fork, b"", b"f1", NameRow(b"fork", b"row"), CheckpointRow(1, bytes(14) + b"\x09", b"c1")
        )
        change.notes = Notes(origin=Address(number, 1), needs=[Address(number, 1)])
        write(backend, change)
        id = bytes(14) + b"\x01"
        notes = Notes(
            tombstones=[TombstoneRow(1, b"tomb")],
            terms=[IndexTerm(2, b"x", id), IndexTerm(2, b"y", id)],
        )
        write(backend, Change(number, b"h1", b"h2", notes=notes))
        notes = Notes(
            rename=NameRow(b"new name", b"new row"), removed_terms=[IndexTerm(2, b"y", id)]
        )
        write(backend, Change(number, b"h2", b"h3", notes=notes))
        with open_reader(backend) as reader:
            equal(reader.forks(number, 1, 9), [(1, fork)])
            equal(reader.forks(fork, 1, 9), [])
            equal(reader.tombstones(number, 0, 9), [(1, b"tomb")])
            equal([row for _, row in reader.all_tombstones(-1, 9)], [b"tomb"])
            equal(reader.find_terms(2, b"x", b"", b"\xff" * 16, 9), [id])
            equal(reader.find_terms(2, b"y", b"", b"\xff" * 16, 9), [])
            equal(reader.session(b"s"), None)
            equal(reader.session(b"new name"), (number, b"new name", b"new row"))
            equal([i[14] for _, _, i in reader.newest_ids(b"", b"\xff" * 16, 9)], [9, 1])
        write(backend, Change(number, b"h3", b"h4", notes=Notes(undeleted=[1])))
        with open_reader(backend) as reader:
            equal(reader.tombstones(number, 0, 9), [])
        with raises(SessionExists):
            notes = Notes(rename=NameRow(b"fork", b"row"))
            write(backend, Change(number, b"h4", b"h5", notes=notes))
        backend.close()

    def test_what_a_change_needs_must_be_there(self, tmp_path: Path) -> None:
        backend, number = self._begun(tmp_path)
        for notes in (Notes(needs=[Address(number, 7)]), Notes(shares=[b"d" * 32])):
            with raises(MissingReference):
                change = Change(
                    number, b"h1", b"h2", None, CheckpointRow(2, bytes(14) + b"\x02", b"c2")
                )
                change.notes = notes
                write(backend, change)
        with open_reader(backend) as reader:
            equal(reader.head(number), b"h1")
            equal(reader.checkpoint(number, 2), None)
        backend.close()

    def test_many_threads_commit_together(self, tmp_path: Path) -> None:
        """One member's conflict fails neither the others nor itself halfway."""
        backend = self.make_backend(tmp_path)
        numbers = [backend.reserve("session", 1) for _ in range(12)]
        for n in numbers:
            write(backend, Change(n, b"", b"0", NameRow(b"s%d" % n, b"row")))
        refused: list[tuple[int, type]] = []
        good = [i for i in range(15) if i % 5 not in (3, 4)]

        def work(n: int) -> None:
            head = 0
            for i in range(15):
                expected = b"wrong" if i % 5 == 4 else b"%d" % head
                id = n.to_bytes(14, "big") + bytes((i,))
                change = Change(
                    n, expected, b"%d" % (head + 1), None, CheckpointRow(i + 1, id, b"c")
                )
                change.rows = [row(n, i, b"item")]
                if i % 5 == 3 or i == 0:  # a key that only the first one gets
                    change.notes = Notes(key=b"k")
                try:
                    write(backend, change)
                    head += 1
                except (StaleHead, KeyTaken) as e:
                    refused.append((i, type(e)))

        threads = [threading.Thread(target=work, args=(n,)) for n in numbers]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        expected = [(i, KeyTaken if i % 5 == 3 else StaleHead) for i in range(15) if i not in good]
        equal(Counter(refused), Counter(expected * 12))
        with open_reader(backend) as reader:
            for n in numbers:
                equal(reader.head(n), b"9")
                found = [s - 1 for s, _, _ in reader.checkpoints(n, 0, 99, 99)]
                equal(found, good)
                equal([i for i, _ in reader.items(n, 0, 99)], good)
        backend.close()
