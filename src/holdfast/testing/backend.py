"""The contract of backends: the primitives."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

from holdfast.backends.base import Change, Gone, Moved, Notes
from holdfast.codec.rows import DENSE
from holdfast.codec.streams import item_row
from holdfast.errors import (
    InvalidRequest,
    KeyTaken,
    SessionExists,
)
from holdfast.testing.checks import equal, expect, raises
from holdfast.testing.freeing import FreeingContract, items, row

if TYPE_CHECKING:
    from pathlib import Path


class BackendContract(FreeingContract):
    """The primitives. Rows are opaque here: any bytes will do, but for those of items.

    How items are spread over rows is a backend's own business.
    """

    def test_a_commit_is_there(self, tmp_path: Path) -> None:
        backend, number = self._begun(tmp_path)
        with backend.reader() as reader:
            equal(reader.session(b"s"), (number, b"row"))
            equal(reader.session_by_number(number), (b"s", b"row"))
            equal(reader.head(number), b"h1")
            equal(reader.checkpoint(number, 1), (bytes(14) + b"\x01", b"c1"))
            equal(list(reader.check()), [])
        backend.close()

    def test_what_is_missing_is_none(self, tmp_path: Path) -> None:
        backend = self.make_backend(tmp_path)
        with backend.reader() as reader:
            equal(reader.session(b"s"), None)
            equal(reader.session_by_number(7), None)
            equal(reader.head(7), None)
            equal(reader.checkpoint(7, 1), None)
            equal(reader.find_key(7, b"k"), None)
            equal(reader.blob(bytes(32)), None)
            equal(reader.items(7, 0, 10), [])
        backend.close()

    def test_survives_reopening(self, tmp_path: Path) -> None:
        backend, number = self._begun(tmp_path)
        backend.close()
        if self.durable:
            backend = self.make_backend(tmp_path)
            with backend.reader() as reader:
                equal(reader.head(number), b"h1")
            expect(backend.reserve("session", 1) > number, "a number was handed out twice")
            backend.close()

    def test_compare_and_swap(self, tmp_path: Path) -> None:
        backend, number = self._begun(tmp_path)
        backend.commit(Change(number, b"h1", b"h2", None, (2, bytes(14) + b"\x02", b"c2")))
        with raises(Moved):
            backend.commit(Change(number, b"h1", b"h3", None, (3, bytes(14) + b"\x03", b"c3")))
        with backend.reader() as reader:
            equal(reader.head(number), b"h2")
            equal(reader.checkpoint(number, 3), None)
        backend.close()

    def test_a_refused_commit_leaves_nothing(self, tmp_path: Path) -> None:
        backend, number = self._begun(tmp_path)
        change = Change(number, b"h1", b"h2", None, (2, bytes(14) + b"\x02", b"c2"))
        change.notes = Notes(key=b"k")
        backend.commit(change)
        stream = backend.reserve("stream", 1)
        bad = Change(number, b"h2", b"h3", None, (3, bytes(14) + b"\x03", b"c3"))
        bad.rows = [row(stream, 0, b"item")]
        bad.blobs = [(bytes(32), b"blob", False)]
        bad.notes = Notes(key=b"k", marks=[(3, 1, b"tag", b"m")], operation=(1, b"op"))
        with raises(KeyTaken):
            backend.commit(bad)
        with backend.reader() as reader:
            equal(reader.head(number), b"h2")
            equal(reader.items(stream, 0, 1), [])
            equal(reader.blob(bytes(32)), None)
            equal(reader.marks(number, 0, 9), [])
            equal(reader.operations(number, 0, 9), [])
            equal(reader.find_key(number, b"k"), 2)
        backend.close()

    def test_names_are_unique_and_exact(self, tmp_path: Path) -> None:
        backend, number = self._begun(tmp_path)
        again = backend.reserve("session", 1)
        with raises(SessionExists):
            backend.commit(Change(again, b"", b"h", (b"s", b"row")))
        names = [b"S", b"s ", b"s\x00", b"s_2", b"%", b"../s", b"\xed\xa0\x80", b"x" * 10_000]
        for name in names:
            new = backend.reserve("session", 1)
            backend.commit(Change(new, b"", b"h", (name, name)))
        with backend.reader() as reader:
            equal(reader.head(again), None)
            equal(reader.session(b"s"), (number, b"row"))
            listed = [name for _, name, _ in reader.sessions(None, 100)]
            equal(listed, sorted([b"s", *names]))
            equal([n for _, n, _ in reader.sessions(b"s", 2)], [b"s\x00", b"s "])
        backend.close()

    def test_checkpoints_in_order(self, tmp_path: Path) -> None:
        backend, number = self._begun(tmp_path)
        for seq in range(2, 12):
            id = bytes(14) + bytes((100 - seq,))
            before, after = b"h%d" % (seq - 1), b"h%d" % seq
            backend.commit(Change(number, before, after, None, (seq, id, b"c%d" % seq)))
        with backend.reader() as reader:
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
        backend.commit(Change(number, b"h1", b"h2", rows=rows))
        with backend.reader() as reader:
            equal(items(reader, a, 0, 2), [(0, b"a0"), (1, b"a1")])
            equal(items(reader, a, 1, 2), [(1, b"a1")])
        pack = item_row(a, 0, 2, [b"a0", b"a1", b"a2"], refs=False, level=DENSE)
        backend.commit(Change(number, b"h2", b"h3", rows=[pack, row(a, 3, b"a3")]))
        with backend.reader() as reader:
            equal(items(reader, a, 0, 4), [(n, b"a%d" % n) for n in range(4)])
            equal(items(reader, a, 1, 2), [(1, b"a1")])
            equal(items(reader, a, 3, 4), [(3, b"a3")])
            equal(items(reader, b, 0, 9), [(0, b"b0")])
        backend.close()

    def test_blobs_are_shared_or_rewritten(self, tmp_path: Path) -> None:
        backend, number = self._begun(tmp_path)
        digest = b"d" * 32
        backend.commit(Change(number, b"h1", b"h2", blobs=[(digest, b"one", False)]))
        backend.commit(Change(number, b"h2", b"h3", blobs=[(digest, b"two", False)]))
        with backend.reader() as reader:
            equal(reader.blob(digest), b"one")
        backend.commit(Change(number, b"h3", b"h4", blobs=[(digest, b"mended", True)]))
        with backend.reader() as reader:
            equal(reader.blob(digest), b"mended")
        backend.close()

    def test_every_part_of_a_change(self, tmp_path: Path) -> None:
        """The most frequent change, a checkpoint and one row, may have a quicker way of its own.

        Whatever else comes with it is written all the same.
        """
        backend, number = self._begun(tmp_path)
        stream, other = backend.reserve("stream", 2), backend.reserve("session", 1)
        digest = b"d" * 32

        def change(seq: int, **more: Any) -> None:
            head, checkpoint = b"h%d" % seq, (seq, bytes(14) + bytes((seq,)), b"c%d" % seq)
            parts: dict[str, Any] = {"rows": [row(stream, seq, b"item %d" % seq)]} | more
            backend.commit(Change(number, b"h%d" % (seq - 1), head, None, checkpoint, **parts))

        change(2)
        change(3, blobs=[(digest, b"blob", False)])
        change(4, notes=Notes(key=b"k"))
        change(5, rows=[row(stream, 5, b"item 5"), row(stream, 6, b"item 6")])
        pack = item_row(stream, 5, 2, [b"item 5", b"item 6", b"item 7"], refs=False, level=DENSE)
        change(6, rows=[pack])
        created = Change(other, b"", b"o1", (b"other", b"row"), (1, bytes(14) + b"\x20", b"o"))
        created.rows = [row(stream + 1, 0, b"item 0")]
        backend.commit(created)
        with backend.reader() as reader:
            equal(reader.blob(digest), b"blob")
            equal(reader.find_key(number, b"k"), 4)
            equal([c[0] for c in reader.checkpoints(number, 2, 9, 9)], [2, 3, 4, 5, 6])
            equal(items(reader, stream, 2, 9), [(n, b"item %d" % n) for n in range(2, 8)])
            equal(items(reader, stream + 1, 0, 9), [(0, b"item 0")])
            equal(reader.session(b"other"), (other, b"row"))
            equal(reader.checkpoint(other, 1), (bytes(14) + b"\x20", b"o"))
            equal(reader.head(number), b"h6")
        backend.close()

    def test_marks(self, tmp_path: Path) -> None:
        backend, number = self._begun(tmp_path)
        marks = [(1, 0, b"first", b"m1"), (1, 1, b"t", b"m2"), (1, 1, b"u", b"m3")]
        backend.commit(Change(number, b"h1", b"h2", notes=Notes(marks=marks)))
        notes = Notes(marks=[(1, 0, b"second", b"m4")], unmarks=[(1, 0, b"first")])
        backend.commit(Change(number, b"h2", b"h3", notes=notes))
        with backend.reader() as reader:
            found = [(kind, value) for _, kind, value, _ in reader.marks(number, 1, 1)]
            equal(found, [(0, b"second"), (1, b"t"), (1, b"u")])
            equal(reader.find_marks(number, 1, b"u"), [(1, b"m3")])
            equal(reader.find_marks(number, 0, b"first"), [])
            equal(reader.find_marks(number + 1, 1, b"u"), [])
        backend.close()

    def test_notes(self, tmp_path: Path) -> None:
        """Tombstones, gaps, forks, facets and renames."""
        backend, number = self._begun(tmp_path)
        fork = backend.reserve("session", 1)
        change = Change(fork, b"", b"f1", (b"fork", b"row"), (1, bytes(14) + b"\x09", b"c1"))
        change.notes = Notes(origin=(number, 1), needs=[(number, 1)])
        backend.commit(change)
        id = bytes(14) + b"\x01"
        notes = Notes(tombs=[(1, b"tomb")], facets=[(2, b"x", id), (2, b"y", id)])
        backend.commit(Change(number, b"h1", b"h2", notes=notes))
        notes = Notes(rename=(b"new name", b"new row"), unfacets=[(2, b"y", id)])
        backend.commit(Change(number, b"h2", b"h3", notes=notes))
        with backend.reader() as reader:
            equal(reader.forks(number, 1, 9), [(1, fork)])
            equal(reader.forks(fork, 1, 9), [])
            equal(reader.tombs(number, 0, 9), [(1, b"tomb")])
            equal([row for _, row in reader.buried(-1, 9)], [b"tomb"])
            equal(reader.find_facets(2, b"x", b"", b"\xff" * 16, 9), [id])
            equal(reader.find_facets(2, b"y", b"", b"\xff" * 16, 9), [])
            equal(reader.session(b"s"), None)
            equal(reader.session(b"new name"), (number, b"new row"))
            equal([i[14] for _, _, i in reader.newest_ids(b"", b"\xff" * 16, 9)], [9, 1])
        backend.commit(Change(number, b"h3", b"h4", notes=Notes(untombs=[1])))
        with backend.reader() as reader:
            equal(reader.tombs(number, 0, 9), [])
        with raises(SessionExists):
            notes = Notes(rename=(b"fork", b"row"))
            backend.commit(Change(number, b"h4", b"h5", notes=notes))
        backend.close()

    def test_what_a_change_needs_must_be_there(self, tmp_path: Path) -> None:
        backend, number = self._begun(tmp_path)
        for notes in (Notes(needs=[(number, 7)]), Notes(shares=[b"d" * 32])):
            with raises(Gone):
                change = Change(number, b"h1", b"h2", None, (2, bytes(14) + b"\x02", b"c2"))
                change.notes = notes
                backend.commit(change)
        with backend.reader() as reader:
            equal(reader.head(number), b"h1")
            equal(reader.checkpoint(number, 2), None)
        backend.close()

    def test_version(self, tmp_path: Path) -> None:
        backend, number = self._begun(tmp_path)
        before = backend.version()
        equal(backend.version(), before)
        backend.commit(Change(number, b"h1", b"h2"))
        expect(backend.version() != before, "a commit changes nothing")
        backend.close()

    def test_many_threads_commit_together(self, tmp_path: Path) -> None:
        """One member's conflict fails neither the others nor itself halfway."""
        backend = self.make_backend(tmp_path)
        numbers = [backend.reserve("session", 1) for _ in range(12)]
        for n in numbers:
            backend.commit(Change(n, b"", b"0", (b"s%d" % n, b"row")))
        refused: list[tuple[int, type]] = []
        good = [i for i in range(15) if i % 5 not in (3, 4)]

        def work(n: int) -> None:
            head = 0
            for i in range(15):
                expected = b"wrong" if i % 5 == 4 else b"%d" % head
                id = n.to_bytes(14, "big") + bytes((i,))
                change = Change(n, expected, b"%d" % (head + 1), None, (i + 1, id, b"c"))
                change.rows = [row(n, i, b"item")]
                if i % 5 == 3 or i == 0:  # a key that only the first one gets
                    change.notes = Notes(key=b"k")
                try:
                    backend.commit(change)
                    head += 1
                except (Moved, KeyTaken) as e:
                    refused.append((i, type(e)))

        threads = [threading.Thread(target=work, args=(n,)) for n in numbers]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        expected = [(i, KeyTaken if i % 5 == 3 else Moved) for i in range(15) if i not in good]
        equal(Counter(refused), Counter(expected * 12))
        with backend.reader() as reader:
            for n in numbers:
                equal(reader.head(n), b"9")
                found = [s - 1 for s, _, _ in reader.checkpoints(n, 0, 99, 99)]
                equal(found, good)
                equal([i for i, _ in reader.items(n, 0, 99)], good)
        backend.close()

    def test_numbers_are_never_given_twice(self, tmp_path: Path) -> None:
        backend = self.make_backend(tmp_path)
        taken: list[int] = []

        def take() -> None:
            for _ in range(20):
                first = backend.reserve("stream", 3)
                taken.extend(range(first, first + 3))

        threads = [threading.Thread(target=take) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        equal(len(set(taken)), 240)
        backend.close()

    def test_one_of_many_racers_wins(self, tmp_path: Path) -> None:
        backend, number = self._begun(tmp_path)
        won: list[int] = []

        def race(n: int) -> None:
            try:
                id = bytes(14) + bytes((n + 10,))
                backend.commit(Change(number, b"h1", b"h2", None, (2, id, b"c")))
                won.append(n)
            except Moved:
                pass

        threads = [threading.Thread(target=race, args=(n,)) for n in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        equal(len(won), 1)
        backend.close()

    def test_a_reader_sees_one_moment(self, tmp_path: Path) -> None:
        backend, number = self._begun(tmp_path)
        seen: list[bytes | None] = []
        writer = threading.Thread(
            target=lambda: backend.commit(
                Change(number, b"h1", b"h2", None, (2, bytes(14) + b"\x02", b"c2"))
            )
        )
        with backend.reader() as reader:
            seen.append(reader.head(number))
            writer.start()
            writer.join(0.05)
            seen.append(reader.head(number))
        writer.join()
        equal(seen, [b"h1", b"h1"])
        backend.close()

    def test_closing_is_final_and_idempotent(self, tmp_path: Path) -> None:
        backend, number = self._begun(tmp_path)
        backend.close()
        backend.close()
        with raises(InvalidRequest):
            backend.commit(Change(number, b"h1", b"h2"))
        with raises(InvalidRequest), backend.reader():
            pass
