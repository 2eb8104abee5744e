"""The contract of backends: leases and journals."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from holdfast.backends.base import Backend, Change, Copied, Jot, Moved, Notes, Sweep
from holdfast.testing.checks import equal, expect, raises

if TYPE_CHECKING:
    from pathlib import Path


class JournalContract:
    """What runs are built on, and how a backend is made."""

    durable = True

    def make_backend(self, folder: Path) -> Backend:
        raise NotImplementedError

    def _begun(self, folder: Path, name: bytes = b"s") -> tuple[Backend, int]:
        backend = self.make_backend(folder)
        number = backend.reserve("session", 1)
        backend.commit(Change(number, b"", b"h1", (name, b"row"), (1, bytes(14) + b"\x01", b"c1")))
        return backend, number

    def test_leases(self, tmp_path: Path) -> None:
        backend, number = self._begun(tmp_path)
        with backend.reader() as reader:
            equal(reader.lease(number), None)
            equal(reader.leases(0, 9), [])
        expect(not backend.renew(number, b"none"))
        backend.commit(Change(number, b"h1", b"h2", notes=Notes(lease=(b"one", b"row one"))))
        with backend.reader() as reader:
            [lease] = reader.leases(0, 9)
            equal(lease[:3], (number, b"one", b"row one"))
            expect(0 <= lease.age < 60)
            equal(reader.leases(number, 9), [])
        expect(backend.renew(number, b"one"))
        with raises(Moved):  # what is refused changes no lease
            backend.commit(Change(number, b"h1", b"h3", notes=Notes(lease=(b"two", b"row two"))))
        backend.commit(Change(number, b"h2", b"h3", notes=Notes(lease=(b"two", b"row two"))))
        expect(not backend.renew(number, b"one"))
        if self.durable:
            backend.close()
            backend = self.make_backend(tmp_path)
        with backend.reader() as reader:
            found = reader.lease(number)
            equal(found and found[:3], (number, b"two", b"row two"))
        backend.close()

    def test_journal(self, tmp_path: Path) -> None:
        backend, number = self._begun(tmp_path)
        with backend.reader() as reader:
            equal(reader.journal(number, 0, 9), [])
            equal(reader.last_entry(number), 0)
        backend.commit(Change(number, b"h1", b"h2", notes=Notes(lease=(b"one", b"row"))))
        backend.jot(Jot(number, b"one", 1, [b"a"]))
        backend.jot(Jot(number, b"one", 2, [b"b", b"c" * 5_000]))
        backend.jot(Jot(number, None, 4, [b"d"]))
        refused = [
            Jot(number, b"another", 5, [b"x"]),
            Jot(number, b"one", 4, [b"x"]),
            Jot(number, None, 4, [b"x"]),
            Jot(number, b"one", 3, [b"x", b"y"]),
            Jot(number + 1, b"one", 1, [b"x"]),
            Jot(number + 1, None, 1, [b"x"]),
        ]
        for jot in refused:
            with raises(Moved):
                backend.jot(jot)
        backend.commit(Change(number, b"h2", b"h3", notes=Notes(lease=(b"two", b"row"))))
        with raises(Moved):  # taken over
            backend.jot(Jot(number, b"one", 5, [b"x"]))
        if self.durable:
            backend.close()
            backend = self.make_backend(tmp_path)
        backend.jot(Jot(number, b"two", 5, [b"e"]))
        with backend.reader() as reader:
            known = [(1, b"a"), (2, b"b"), (3, b"c" * 5_000), (4, b"d"), (5, b"e")]
            equal(reader.journal(number, 0, 9), known)
            equal(reader.journal(number, 2, 2), known[1:3])
            equal(reader.last_entry(number), 5)
            equal(reader.sizes()["journal"], (5, 5_004))
            equal(list(reader.check()), [])
        equal(backend.sweep([Sweep(number, b"h3", (), (), (), journal=3)]), [True])
        backend.compact()
        with backend.reader() as reader:
            equal(reader.journal(number, 0, 9), known[2:])
        with backend.reader() as reader:
            late = Copied(reader.turnover().freed, journal=[(5, b"x"), (6, b"x")])
            copied = Copied(reader.turnover().freed, journal=[(6, b"f")])
        with raises(Moved):  # another has written entry 5 since the copy has looked
            backend.commit(Change(number, b"h3", b"h4", notes=Notes(copied=late)))
        backend.commit(Change(number, b"h3", b"h4", notes=Notes(copied=copied)))
        backend.jot(Jot(number, b"two", 7, [b"g"]))
        with backend.reader() as reader:
            equal(reader.journal(number, 5, 9), [(5, b"e"), (6, b"f"), (7, b"g")])
        with backend.reader() as reader:
            copied = Copied(reader.turnover().freed, journal=[(9, b"i")], journal_from=9)
        backend.commit(Change(number, b"h4", b"h5", notes=Notes(copied=copied)))
        with backend.reader() as reader:
            equal(reader.journal(number, 0, 9), [(9, b"i")])
            equal(reader.last_entry(number), 9)
        equal(backend.sweep([Sweep(number, b"h5", (), (), (), remove=b"s")]), [True])
        with backend.reader() as reader:
            equal(reader.journal(number, 0, 9), [])
            equal(reader.lease(number), None)
        backend.close()

    def test_threads_write_one_journal(self, tmp_path: Path) -> None:
        """Whoever finds a number taken takes the next one; nothing is lost, nothing twice."""
        backend, number = self._begun(tmp_path)
        backend.commit(Change(number, b"h1", b"h2", notes=Notes(lease=(b"one", b"row"))))

        def work(name: int) -> None:
            for n in range(10):
                while True:
                    with backend.reader() as reader:
                        first = reader.last_entry(number) + 1
                    try:
                        backend.jot(Jot(number, b"one", first, [b"%d %d" % (name, n)]))
                        break
                    except Moved:
                        continue

        threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with backend.reader() as reader:
            found = reader.journal(number, 0, 99)
        equal([n for n, _ in found], list(range(1, 41)))
        equal({row for _, row in found}, {b"%d %d" % (a, b) for a in range(4) for b in range(10)})
        backend.close()
