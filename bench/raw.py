"""Raw SQLite, the lower bound for anything built on it."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import ormsgpack
import zstandard

import holdfast
from holdfast.storage.contract import Batch
from holdfast.storage.sqlite import writer

from .messages import Message
from .stores import Durability, open_store


class RawStore:
    """A table of blobs, with the same journal and durability as the stores it is compared with."""

    def __init__(self, path: Path, durability: str = "full") -> None:
        self._connection = apsw.Connection(str(path))
        self._execute = self._connection.execute
        self._execute("PRAGMA journal_mode=WAL").fetchall()
        self._execute(f"PRAGMA synchronous={durability}")
        self._execute("CREATE TABLE rows (id INTEGER PRIMARY KEY, digest BLOB, data BLOB)")

    def commit(self, data: bytes) -> None:
        """Insert one row in one transaction."""
        execute = self._execute
        execute("BEGIN IMMEDIATE")
        execute("INSERT INTO rows (data) VALUES (?)", (data,))
        execute("COMMIT")

    def put_state(self, state: object) -> int:
        data = zstandard.ZstdCompressor(level=3).compress(ormsgpack.packb(state))
        digest = hashlib.sha256(data).digest()
        self._execute("INSERT INTO rows (digest, data) VALUES (?, ?)", (digest, data))
        return self._connection.last_insert_rowid()

    def get_state(self, row: int) -> Any:
        """Read, hash and decode a state that is stored as one blob.

        The cyclic gc is off during the decoding, as in a careful implementation.
        """
        found = self._execute("SELECT digest, data FROM rows WHERE id = ?", (row,)).fetchone()
        assert found is not None
        digest, data = found
        if hashlib.sha256(data).digest() != digest:
            raise ValueError("the blob row is damaged")
        gc.disable()
        try:
            return ormsgpack.unpackb(zstandard.ZstdDecompressor().decompress(data))
        finally:
            gc.enable()

    def close(self) -> None:
        self._connection.close()


class Statements:
    """Run only the SQL statements of appends, without the computing before and after.

    A store in memory prepares the batches. This is not timed.
    """

    def __init__(self, path: Path, durability: Durability) -> None:
        self._target = open_store(path, durability)
        backend: Any = self._target._repository.backend
        self._connection, self._cursor = backend._writer, backend._cursor
        self._maker = holdfast.open("memory:")
        self._session = self._maker.session("appends")
        self._batches: list[Batch] = []
        commit = self._maker._repository.backend.commit

        def noted(batch: Batch) -> None:
            commit(batch)
            self._batches.append(batch)

        self._maker._repository.backend.commit = noted  # type: ignore[method-assign]

    def of(self, message: Message) -> Callable[[], None]:
        self._session.append("messages", message)
        batch = self._batches.pop()
        return lambda: writer.write(self._connection, self._cursor, batch)

    def close(self) -> None:
        self._maker.close()
        self._target.close()
