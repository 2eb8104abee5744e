"""The contract of backends: the primitives."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from holdfast.backends.base import Backend, Change, Moved
from holdfast.codec.streams import RowWrite
from holdfast.errors import (
    InvalidRequest,
    KeyTaken,
    SessionExists,
)
from holdfast.testing.checks import equal, expect, raises

if TYPE_CHECKING:
    from pathlib import Path


class BackendContract:
    """The primitives. Rows are opaque here: any bytes will do."""

    durable = True

    def make_backend(self, folder: Path) -> Backend:
        raise NotImplementedError

    def _begun(self, folder: Path, name: bytes = b"s") -> tuple[Backend, int]:
        backend = self.make_backend(folder)
        number = backend.reserve("session", 1)
        backend.commit(Change(number, b"", b"h1", (name, b"row"), (1, bytes(14) + b"\x01", b"c1")))
        return backend, number

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
        change.key = b"k"
        backend.commit(change)
        stream = backend.reserve("stream", 1)
        bad = Change(number, b"h2", b"h3", None, (3, bytes(14) + b"\x03", b"c3"))
        bad.key = b"k"
        bad.rows = [RowWrite(stream, 0, 0, b"item")]
        bad.blobs = [(bytes(32), b"blob", False)]
        bad.marks = [(3, 1, b"tag", b"m")]
        bad.operation = (1, b"op")
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
        a, b = backend.reserve("stream", 2), 0
        b = a + 1
        rows = [RowWrite(a, 0, 0, b"a0"), RowWrite(a, 1, 0, b"a1"), RowWrite(b, 0, 0, b"b0")]
        backend.commit(Change(number, b"h1", b"h2", rows=rows))
        with backend.reader() as reader:
            equal(reader.items(a, 0, 2), [(0, b"a0"), (1, b"a1")])
            equal(reader.items(a, 1, 2), [(1, b"a1")])
        packed = [RowWrite(a, 0, 2, b"pack of three"), RowWrite(a, 3, 0, b"a3")]
        backend.commit(Change(number, b"h2", b"h3", rows=packed))
        with backend.reader() as reader:
            equal(reader.items(a, 0, 4), [(0, b"pack of three"), (3, b"a3")])
            equal(reader.items(a, 1, 2), [(0, b"pack of three")])
            equal(reader.items(a, 3, 4), [(3, b"a3")])
            equal(reader.items(b, 0, 9), [(0, b"b0")])
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

    def test_marks(self, tmp_path: Path) -> None:
        backend, number = self._begun(tmp_path)
        marks = [(1, 0, b"first", b"m1"), (1, 1, b"t", b"m2"), (1, 1, b"u", b"m3")]
        backend.commit(Change(number, b"h1", b"h2", marks=marks))
        change = Change(number, b"h2", b"h3", marks=[(1, 0, b"second", b"m4")])
        change.unmarks = [(1, 0, b"first")]
        backend.commit(change)
        with backend.reader() as reader:
            found = [(kind, value) for _, kind, value, _ in reader.marks(number, 1, 1)]
            equal(found, [(0, b"second"), (1, b"t"), (1, b"u")])
            equal(reader.find_marks(number, 1, b"u"), [(1, b"m3")])
            equal(reader.find_marks(number, 0, b"first"), [])
            equal(reader.find_marks(number + 1, 1, b"u"), [])
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
                Change(number, b"h1", b"h2", blobs=[(b"x" * 32, b"b", False)])
            )
        )
        with backend.reader() as reader:
            seen.append(reader.head(number))
            writer.start()
            writer.join(0.05)
            seen += [reader.head(number), reader.blob(b"x" * 32)]
        writer.join()
        equal(seen, [b"h1", b"h1", None])
        backend.close()

    def test_closing_is_final_and_idempotent(self, tmp_path: Path) -> None:
        backend, number = self._begun(tmp_path)
        backend.close()
        backend.close()
        with raises(InvalidRequest):
            backend.commit(Change(number, b"h1", b"h2"))
        with raises(InvalidRequest), backend.reader():
            pass
