"""Zeros in the parts of a SQLite file's pages that hold nothing.

With secure_delete, SQLite overwrites a row that it deletes. But when it moves rows from one page to
another, it leaves copies of them between the cell pointers and the cells of the old page. These
copies outlive the rows.

SQLite has no command for this short of VACUUM, so the zeros go straight into the main file. SQLite
never reads these bytes. A crash or a reader in between does no harm.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import apsw

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

FIRST = 2
"""The number of the first page of the pointer map."""
_PENDING_BYTE = 1 << 30
"""SQLite locks this byte of the file, and stores nothing in its page."""
_TREE = (1, 5)
"""Entries of the pointer map for pages of trees: a root, and any other."""
_HEADERS = {2: 12, 5: 12, 10: 8, 13: 8}
"""Bytes of the header of a page, by the kind of the page."""
_FRAGMENT = 4
"""Fewer bytes than this may lie unused before the first cell."""


class Pages:
    """The main file of a store, with auto-vacuum: a pointer map says what each page is for."""

    def __init__(self, path: Path, page_size: int) -> None:
        flags = apsw.SQLITE_OPEN_MAIN_DB | apsw.SQLITE_OPEN_READWRITE
        # By SQLite: if we closed a file that it has open, all its locks on that would be gone.
        self._file = apsw.VFSFile("", str(path.absolute()), [flags, 0])
        self._size = page_size
        self._zeros = bytes(page_size)

    def close(self) -> None:
        self._file.xClose()

    def groups(self, first: int = FIRST) -> range:
        """From one on, the pages of the pointer map. Each describes the pages that follow it."""
        return range(first, self._file.xFileSize() // self._size + 1, self._size // 5 + 1)

    def scrub(self, groups: Iterable[int]) -> bool:
        """Overwrite unused bytes in groups of pages. Returns False if all were zeros already.

        The caller has SQLite's lock for writing, and the log is empty: so nothing else writes to
        the main file. The zeros are durable after the next checkpoint of the log.
        """
        count = 0
        for first in groups:
            start, data = self._read(first)
            for low, high in self._unused(data):
                self._file.xWrite(self._zeros[: high - low], start + low)
                count += 1
        return count > 0

    def _read(self, first: int) -> tuple[int, bytes]:
        """The offset of a group in the file, and its bytes."""
        if first == _PENDING_BYTE // self._size + 1:
            first += 1
        start = (first - 1) * self._size
        size = min((self._size // 5 + 1) * self._size, self._file.xFileSize() - start)
        return start, self._file.xRead(size, start)

    def _unused(self, data: bytes) -> Iterator[tuple[int, int]]:
        """The unused ranges that are not all zeros. Pages that look damaged are left alone."""
        for n in range(1, len(data) // self._size):
            at = n * self._size
            header = _HEADERS.get(data[at])
            if data[5 * (n - 1)] not in _TREE or header is None:
                continue
            cells, content = struct.unpack_from(">HH", data, at + 3)
            low, high = at + header + 2 * cells, at + (content or 1 << 16)
            if not low < high <= at + self._size:
                continue
            if data[low:high] != self._zeros[: high - low]:
                pointers = struct.unpack_from(f">{cells}H", data, at + header)
                if 0 <= min(pointers, default=self._size) - (high - at) < _FRAGMENT:
                    yield low, high
