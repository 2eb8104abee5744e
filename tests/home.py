"""A store in memory or in a file, and ways to damage it behind its back."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw
import pytest

import holdfast
from holdfast.backends.memory import MemoryBackend
from holdfast.backends.sqlite import SqliteBackend
from holdfast.errors import Unavailable

TEXT = "The quick brown fox jumps over the lazy dog. " * 8


class Home:
    def __init__(self, kind: str, folder: Path) -> None:
        self.folder = folder / "home"
        self.folder.mkdir(parents=True)
        self.durable = kind == "sqlite"
        self._opened: list[holdfast.Store] = []
        self.store = self._open()

    def _open(self) -> holdfast.Store:
        url = self.path if self.durable else "memory:"
        self._opened.append(holdfast.open(url, durability="normal"))
        return self._opened[-1]

    @property
    def path(self) -> Path:
        return self.folder / "store.db"

    def another(self) -> holdfast.Store:
        """As another process would open it; the same one if it is in memory."""
        return self._open() if self.durable else self.store

    def reopened(self) -> holdfast.Store:
        if self.durable:
            self.close()
            self.store = self._open()
        return self.store

    def close(self) -> None:
        while self._opened:
            self._opened.pop().close()

    def session(self, name: str = "s") -> holdfast.Session:
        return self.store.session(name)

    def filled(self, count: int = 5, name: str = "s", **more: Any) -> holdfast.Session:
        session = self.session(name)
        for i in range(count):
            session.save({"i": i, "log": [f"{n} {TEXT}" for n in range(i + 1)]}, **more)
        return session

    # -- damage --------------------------------------------------------------------------------

    def _sql(self, sql: str, *bindings: Any) -> None:
        connection = apsw.Connection(str(self.path))
        connection.execute(sql, bindings)
        assert connection.changes() > 0, "nothing was damaged"
        connection.close()

    def _number(self, name: str) -> int:
        with self.store.backend.reader() as reader:
            found = reader.session(name.encode())
            assert found is not None
            return found[0]

    def spoil_checkpoint(self, seq: int, body: bytes | None = b"torn", name: str = "s") -> None:
        """Overwrite a record, or with None remove it."""
        number = self._number(name)
        if isinstance(self.store.backend, MemoryBackend):
            held = self.store.backend._checkpoints[number]
            id, _ = held.pop(seq)
            if body is not None:
                held[seq] = (id, body)
        elif body is None:
            self._sql("DELETE FROM checkpoints WHERE pos = ?", number << 32 | seq)
        else:
            self._sql("UPDATE checkpoints SET body = ? WHERE pos = ?", body, number << 32 | seq)

    def spoil_head(self, body: bytes | None = b"", name: str = "s") -> None:
        number = self._number(name)
        if isinstance(self.store.backend, MemoryBackend):
            del self.store.backend._heads[number]
            if body is not None:
                self.store.backend._heads[number] = body
        elif body is None:
            self._sql("DELETE FROM heads WHERE session = ?", number)
        else:
            self._sql("UPDATE heads SET body = ? WHERE session = ?", body, number)

    def spoil_session(self, name: str = "s") -> None:
        number = self._number(name)
        if isinstance(self.store.backend, MemoryBackend):
            self.store.backend._sessions[name.encode()] = (number, b"torn")
        else:
            self._sql("UPDATE sessions SET body = ? WHERE num = ?", b"torn", number)

    def spoil_name(self, name: str = "s") -> None:
        number = self._number(name)
        if isinstance(self.store.backend, MemoryBackend):
            held = self.store.backend._sessions
            held[b"\xff"] = held.pop(name.encode())
            self.store.backend._names[number] = b"\xff"
        else:
            self._sql("UPDATE sessions SET name = ? WHERE num = ?", b"\xff", number)

    def spoil_marks(self, seq: int, name: str = "s") -> None:
        number = self._number(name)
        if isinstance(self.store.backend, MemoryBackend):
            held = self.store.backend._marks[number]
            held.update({mark: b"torn" for mark in held if mark[0] == seq})
        else:
            self._sql("UPDATE marks SET body = ? WHERE pos = ?", b"torn", number << 32 | seq)

    def spoil_newest_item(self) -> None:
        if isinstance(self.store.backend, MemoryBackend):
            stream = max(self.store.backend._streams)
            held = self.store.backend._streams[stream]
            held[max(held)] = b"torn"
        else:
            self._sql("UPDATE items SET body = ? WHERE pos = (SELECT max(pos) FROM items)", b"torn")

    @contextmanager
    def failing(self, table: str = "heads") -> Iterator[None]:
        """Let writing to one part of the store fail."""
        backend = self.store.backend
        if isinstance(backend, SqliteBackend):
            writer = backend._writing()
            for verb in ("INSERT", "UPDATE"):
                writer.execute(
                    f"CREATE TEMP TRIGGER fail_{verb} BEFORE {verb} ON {table} "
                    "BEGIN SELECT RAISE(ABORT, 'injected'); END"
                )
            try:
                yield
            finally:
                writer.execute("DROP TRIGGER fail_INSERT; DROP TRIGGER fail_UPDATE")
        else:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(backend, "_apply", fail)
                yield


def fail(*args: Any) -> Any:
    raise Unavailable("injected")


def strangers(home: Home) -> list[Path]:
    """What lies around the store but is none of its files."""
    own = {home.folder, *(Path(f"{home.path}{suffix}") for suffix in ("", "-wal", "-shm"))}
    return sorted(set(home.folder.parent.rglob("*")) - own)
