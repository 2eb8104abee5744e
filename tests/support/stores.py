"""A store in memory, in a file or on a server, and ways to damage it behind its back."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import apsw
import pytest

import holdfast
from holdfast.errors import Unavailable
from holdfast.history.oplog import Operator
from holdfast.history.writer import Writer
from holdfast.maintenance.retention import Plan, prune
from holdfast.storage import memory
from holdfast.storage.files.backend import FilesBackend
from holdfast.storage.files.session_folders import record_path
from holdfast.storage.memory import MemoryBackend
from holdfast.storage.postgres.backend import PostgresBackend
from holdfast.storage.sqlite.backend import SqliteBackend
from tests.support import file_damage as filestore
from tests.support import memory_rows, postgres

TEXT = "The quick brown fox jumps over the lazy dog. " * 8


class Home:
    def __init__(self, kind: str, folder: Path, **given: Any) -> None:
        self._given = given
        self.folder = folder / "home"
        self.folder.mkdir(parents=True)
        self.kind, self.durable = kind, kind != "memory"
        self._rented = ExitStack()
        if kind == "postgres":
            self.schema = self._rented.enter_context(postgres.schema())
        self._opened: list[holdfast.Store] = []
        self.store = self._open()

    def _open(self) -> holdfast.Store:
        self._opened.append(self._open_as(**self.options))
        return self._opened[-1]

    def _open_as(self, **options: Any) -> holdfast.Store:
        return holdfast.open(self.url, durability="normal", **options, **self._given)

    def to_read(self) -> holdfast.Store:
        """Open the store read-only."""
        self._opened.append(self._open_as(**self.options | {"create": None}, read_only=True))
        return self._opened[-1]

    @property
    def url(self) -> Any:
        if self.kind == "postgres":
            return postgres.server_url()
        if self.kind == "files":
            return f"files:{self.path}"
        return self.path if self.durable else "memory:"

    @property
    def options(self) -> dict[str, Any]:
        return {"create": True, "schema": self.schema} if self.kind == "postgres" else {}

    def size(self) -> int:
        """Return the size of the store in bytes."""
        if self.kind == "sqlite":
            return self.path.stat().st_size
        if self.kind == "postgres":
            return postgres.size(self.schema)
        if self.kind == "files":
            return sum(path.stat().st_size for path in self.path.rglob("*") if path.is_file())
        with self.store._repository.reader() as reader:
            return sum(size for _, size in reader.sizes().values())

    @property
    def path(self) -> Path:
        return self.folder / ("store" if self.kind == "files" else "store.db")

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

    def give_back(self) -> None:
        """At the end of a test."""
        self.close()
        self._rented.close()

    def session(self, name: str = "s") -> holdfast.Session:
        return self.store.session(name)

    def filled(self, count: int = 5, name: str = "s", **more: Any) -> holdfast.Session:
        session = self.session(name)
        for i in range(count):
            session.save({"i": i, "log": [f"{n} {TEXT}" for n in range(i + 1)]}, **more)
        return session

    # -- damage --------------------------------------------------------------------------------

    def _sql(self, sql: str, *bindings: Any) -> None:
        if self.kind == "postgres":
            with postgres.admin(search=self.schema) as link:
                done = link.execute(sql.replace("?", "%s").encode(), bindings)
                assert done.rowcount > 0, "nothing was damaged"
            return
        connection = apsw.Connection(str(self.path))
        connection.execute(sql, bindings)
        assert connection.changes() > 0, "nothing was damaged"
        connection.close()

    def _number(self, name: str) -> int:
        with self.store._repository.reader() as reader:
            found = reader.session(name.encode())
            assert found is not None
            return found.number

    def spoil_checkpoint(self, seq: int, body: bytes | None = b"torn", name: str = "s") -> None:
        """Overwrite a record, or with None remove it."""
        number = self._number(name)
        if isinstance(self.store._repository.backend, MemoryBackend):
            memory_rows.damage(
                self.store._repository.backend, "checkpoints", body, number << 32 | seq
            )
        elif isinstance(self.store._repository.backend, FilesBackend):
            path = record_path(filestore.folder(self.store._repository.backend, number), seq)
            assert path.exists()
            if body is None:
                path.unlink()
            else:
                path.write_bytes(body)
        elif body is None:
            self._sql("DELETE FROM checkpoints WHERE pos = ?", number << 32 | seq)
        else:
            self._sql("UPDATE checkpoints SET body = ? WHERE pos = ?", body, number << 32 | seq)

    def spoil_head(self, body: bytes | None = b"", name: str = "s") -> None:
        number = self._number(name)
        if isinstance(self.store._repository.backend, MemoryBackend):
            memory_rows.damage(self.store._repository.backend, "heads", body, number)
        elif isinstance(self.store._repository.backend, FilesBackend):
            filestore.spoil_head(self.store._repository.backend, number, missing=body is None)
        elif body is None:
            self._sql("DELETE FROM heads WHERE session = ?", number)
        else:
            self._sql("UPDATE heads SET body = ? WHERE session = ?", body, number)

    def spoil_session(self, name: str = "s") -> None:
        number = self._number(name)
        if isinstance(self.store._repository.backend, MemoryBackend):
            memory_rows.damage(self.store._repository.backend, "sessions", b"torn", number)
        elif isinstance(self.store._repository.backend, FilesBackend):
            filestore.edit_log(self.store._repository.backend, number, _torn_session)
        else:
            self._sql("UPDATE sessions SET body = ? WHERE num = ?", b"torn", number)

    def spoil_name(self, name: str = "s") -> None:
        number = self._number(name)
        if isinstance(self.store._repository.backend, MemoryBackend):
            _, _, *rest = memory_rows.rows(self.store._repository.backend, "sessions")[number,]
            renamed = (number, b"\xff", *rest)
            memory_rows.put(self.store._repository.backend, "sessions", (number,), renamed)
        elif isinstance(self.store._repository.backend, FilesBackend):
            filestore.edit_log(self.store._repository.backend, number, _torn_name)
        else:
            self._sql("UPDATE sessions SET name = ? WHERE num = ?", b"\xff", number)

    def spoil_marks(self, seq: int, name: str = "s") -> None:
        number = self._number(name)
        if isinstance(self.store._repository.backend, MemoryBackend):
            for key in memory_rows.rows(self.store._repository.backend, "marks"):
                if key[0] == number << 32 | seq:
                    memory_rows.damage(self.store._repository.backend, "marks", b"torn", *key)
        elif isinstance(self.store._repository.backend, FilesBackend):
            filestore.edit_log(
                self.store._repository.backend,
                number,
                lambda entry: filestore.replace_in(entry, "marks", 3, lambda m: m[0] == seq),
            )
        else:
            self._sql("UPDATE marks SET body = ? WHERE pos = ?", b"torn", number << 32 | seq)

    def spoil_newest_item(self) -> None:
        if isinstance(self.store._repository.backend, MemoryBackend):
            [pos] = max(memory_rows.rows(self.store._repository.backend, "items"))
            memory_rows.damage(self.store._repository.backend, "items", b"torn", pos)
        elif isinstance(self.store._repository.backend, FilesBackend):
            filestore.tear_newest_item(self.store._repository.backend)
        else:
            self._sql("UPDATE items SET body = ? WHERE pos = (SELECT max(pos) FROM items)", b"torn")

    def overwrite(self, tree: str, old: bytes, new: bytes) -> None:
        """Other bytes in the pages of one table or index of a SQLite file, and in no other's."""
        assert self.kind == "sqlite"
        assert len(old) == len(new)
        self.close()
        connection = apsw.Connection(str(self.path))
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        where = "SELECT pageno FROM dbstat WHERE name = ?"
        pages = [page for (page,) in connection.execute(where, (tree,))]
        size = connection.pragma("page_size")
        connection.close()
        data = bytearray(self.path.read_bytes())
        spans = [slice((page - 1) * size, page * size) for page in pages]
        assert any(old in data[span] for span in spans), "nothing was damaged"
        for span in spans:
            data[span] = data[span].replace(old, new)
        self.path.write_bytes(data)
        self.reopened()

    @contextmanager
    def failing(self, table: str = "heads") -> Iterator[None]:
        """Let writing to one part of the store fail: a table, and what files have for it."""
        backend = self.store._repository.backend
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
        elif isinstance(backend, PostgresBackend):
            with postgres.failing(self.schema, table):
                yield
        elif isinstance(backend, FilesBackend):
            with filestore.failing(table):
                yield
        else:  # all of a change or nothing
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(memory, "Plan", fail)
                yield


def _torn_session(entry: dict[str, Any]) -> None:
    if "create" in entry:
        entry["create"][2] = filestore.TORN


def _torn_name(entry: dict[str, Any]) -> None:
    if "create" in entry:
        entry["create"][1] = {"$bytes": "/w=="}


def fail(*args: Any, **options: Any) -> Any:
    raise Unavailable("injected")


def strangers(home: Home) -> list[Path]:
    """Return the files around the store that are not part of it."""
    if home.kind == "files":
        own = {home.folder, home.path, *home.path.rglob("*")}
        return sorted(set(home.folder.parent.rglob("*")) - own)
    own = {home.folder, *(Path(f"{home.path}{suffix}") for suffix in ("", "-wal", "-shm"))}
    return sorted(set(home.folder.parent.rglob("*")) - own)


def prune_unlogged(session: holdfast.Session, rule: holdfast.Retention) -> Plan:
    """Prune as a store with a retention rule does: without a trace in undo()."""
    return prune(Operator(Writer(session._repository, session.name)), rule, logged=False)


def store_of(session: holdfast.Session) -> holdfast.Store:
    """Return another handle on the store that a session is in."""
    return holdfast.Store(session._repository.backend)
