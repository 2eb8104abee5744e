"""The contract of backends: what gc frees."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from holdfast.backends.base import Change, Copied, Gone, Notes, Sweep, Trim
from holdfast.codec.rows import DENSE, PLAIN, seal_items, unseal_items
from holdfast.codec.streams import STREAM_BITS, RowWrite, item_row
from holdfast.testing.checks import equal, expect, raises
from holdfast.testing.journal import JournalContract

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.backends.base import Reader


def row(stream: int, n: int, item: bytes) -> RowWrite:
    return item_row(stream, n, 0, [item], refs=False, level=PLAIN)


def items(reader: Reader, stream: int, start: int, stop: int) -> list[tuple[int, bytes]]:
    """The items in a range, however they are spread over rows."""
    out = []
    for first, body in reader.items(stream, start, stop):
        ends, data, _ = unseal_items(stream << STREAM_BITS | first, body, "items")
        for n, (low, high) in enumerate(pairwise([0, *ends]), first):
            if start <= n < stop:
                out.append((n, data[low:high]))
    return out


class FreeingContract(JournalContract):
    """Nothing goes that somebody may have come to need."""

    def test_sweep(self, tmp_path: Path) -> None:
        """Nothing of a session goes that is not as it was; several go at once."""
        backend, number = self._begun(tmp_path)
        other = backend.reserve("session", 1)
        id = bytes(14) + b"\x09"
        backend.commit(Change(other, b"", b"o1", (b"other", b"row"), (1, id, b"c")))
        change = Change(number, b"h1", b"h2", None, (2, bytes(14) + b"\x02", b"c2"))
        change.notes = Notes(key=b"k", marks=[(2, 1, b"t", b"m")], tombs=[(2, b"tomb")])
        backend.commit(change)
        gone = [(2, bytes(14) + b"\x02")]
        stale = [
            Sweep(number, b"h1", [], [], [], gone),
            Sweep(number, b"h2", [(0, b"another gc was here")], [], [], gone),
            Sweep(number, b"h2", [], [(1, 9)], [], gone),
            Sweep(number, b"h2", [], [], [(9, 1)], gone),
            Sweep(number, b"h2", [], [], [], gone, gaps=[(number, 1, (9 << 32) + 4, b"none")]),
        ]
        gaps = [(number, 1, (other << 32) + 1, b"gap")]
        sweep = Sweep(number, b"h2", [], [], [], gone, keys=[b"k"], gaps=gaps)
        equal(backend.sweep([*stale, sweep, sweep]), [False] * 5 + [True, False])
        with backend.reader() as reader:
            equal(reader.checkpoint(number, 2), None)
            equal(reader.find_ids(gone[0][1], gone[0][1], 1), [])
            equal(reader.find_key(number, b"k"), None)
            equal((reader.marks(number, 0, 9), reader.tombs(number, 0, 9)), ([], []))
            equal(reader.gaps(number, 0, 9), [(1, b"gap")])
            equal(reader.gaps_below(other), [(number, 1)])
            equal(reader.gaps_below(number), [])
            equal(reader.session(b"s"), (number, b"row"))
        backend.close()

    def test_sweep_of_a_whole_session(self, tmp_path: Path) -> None:
        backend, number = self._begun(tmp_path)
        fork = backend.reserve("session", 1)
        change = Change(fork, b"", b"f1", (b"fork", b"row"))
        change.notes = Notes(origin=(number, 1))
        backend.commit(change)
        first = [(1, bytes(14) + b"\x01")]
        freed = [(number, 0, None, b"freed")]
        sweeps = [
            Sweep(number, b"h1", [], [(1, fork)], [], first, gaps=freed),
            Sweep(number, b"h1", [(0, b"freed")], [(1, fork)], [], remove=b"s"),
        ]
        equal(backend.sweep(sweeps), [True, True])
        with backend.reader() as reader:
            equal((reader.session(b"s"), reader.head(number)), (None, None))
            equal((reader.gaps(number, 0, 9), reader.session(b"fork")), ([], (fork, b"row")))
        backend.close()

    def test_trim(self, tmp_path: Path) -> None:
        """Data goes only if it is still what it was."""
        backend, number = self._begun(tmp_path)
        stream = backend.reserve("stream", 1)
        rows = [row(stream, n, b"row %d" % n) for n in range(3)]
        blobs = [(bytes([n]) * 32, b"blob", False) for n in range(2)]
        backend.commit(Change(number, b"h1", b"h2", None, None, rows, blobs))
        with backend.reader() as reader:
            found = reader.item_rows(-1, 9)
            known = [(digest, uses) for _, digest, _, uses in reader.blob_rows(0, 9)]
        equal([begin for _, _, begin in found], [row.body[:9] for row in rows])
        expect(all(size >= 5 for _, size, _ in found))
        backend.commit(Change(number, b"h2", b"h3", notes=Notes(shares=[bytes([1]) * 32])))
        dead = [(pos, begin) for pos, _, begin in found]
        changed = [dead[0], (dead[1][0], b"it was another"), dead[2]]
        less = seal_items(dead[2][0], [b"row 2"], False, DENSE)
        groups = [
            (changed, []),
            ([dead[0]], []),
            ([changed[1]], []),
            ([dead[2]], [(dead[2][0], less)]),
        ]
        expect(backend.trim(Trim(groups, known, 0)) > 1, "what goes is counted")
        backend.compact()
        with backend.reader() as reader:
            equal(items(reader, stream, 0, 3), [(1, b"row 1"), (2, b"row 2")])
            equal([reader.blob(bytes([n]) * 32) for n in range(2)], [None, b"blob"])
        backend.close()

    def test_gc_and_copies_notice_each_other(self, tmp_path: Path) -> None:
        """A copy goes by what it found in a store, and gc by what it found to be garbage there."""
        backend, number = self._begun(tmp_path)
        stream = backend.reserve("stream", 1)
        rows = [row(stream, n, b"row %d" % n) for n in range(3)]
        backend.commit(Change(number, b"h1", b"h2", None, None, rows))
        with backend.reader() as reader:
            equal(reader.turnover(), (0, 0))
            first, second, _ = [(pos, begin) for pos, _, begin in reader.item_rows(-1, 9)]
        brought = Copied(0, [(5, b"i" * 15, b"record")])
        backend.commit(Change(number, b"h2", b"h3", notes=Notes(copied=brought)))
        with backend.reader() as reader:
            freed, copied = reader.turnover()
        expect(freed == 0 and copied > 0, "a copy says that it landed")
        with raises(Gone):
            backend.trim(Trim([([first], [])], [], 0))
        backend.compact()
        with backend.reader() as reader:
            equal(len(items(reader, stream, 0, 3)), 3)
            equal(reader.turnover(), (0, copied))
        backend.trim(Trim([([second], [])], [], copied))
        backend.compact()
        with backend.reader() as reader:
            equal([n for n, _ in items(reader, stream, 0, 3)], [0, 2])
            trimmed = reader.turnover().freed
        expect(trimmed > 0, "gc says that something has gone")
        late = Notes(copied=Copied(0, [(6, b"j" * 15, b"record")]))
        with raises(Gone):
            backend.commit(Change(number, b"h3", b"h4", notes=late))
        with backend.reader() as reader:
            equal((reader.head(number), reader.checkpoint(number, 6)), (b"h3", None))
            equal(reader.turnover(), (trimmed, copied))
        equal(backend.sweep([Sweep(number, b"h3", (), (), (), [(5, b"i" * 15)])]), [True])
        with backend.reader() as reader:
            expect(reader.turnover().freed not in (0, trimmed), "freeing a checkpoint says so, too")
        backend.close()
