"""Every backend, held to one contract."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.storage.contract import Backend, Insert, Share, StaleHead
from holdfast.storage.files.backend import FilesBackend
from holdfast.storage.memory import MemoryBackend
from holdfast.storage.postgres.backend import PostgresBackend
from holdfast.storage.sqlite import writer
from holdfast.storage.sqlite.backend import SqliteBackend
from holdfast.testing import BackendContract, StoreContract
from tests.support import postgres

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class TestMemoryBackend(BackendContract):
    durable = False

    def make_backend(self, folder: Path) -> Backend:
        return MemoryBackend()


class TestSqliteBackend(BackendContract):
    def make_backend(self, folder: Path) -> Backend:
        return SqliteBackend(folder / "store.db")

    def backup_path(self, folder: Path) -> Path:
        return folder / "store.db"


class TestMemoryStore(StoreContract):
    durable = False

    def open_store(self, folder: Path) -> holdfast.Store:
        return holdfast.open("memory:")


class TestSqliteStore(StoreContract):
    def open_store(self, folder: Path) -> holdfast.Store:
        return holdfast.open(folder / "store.db")


class TestFilesBackend(BackendContract):
    unchecked = ("sessions", "checkpoints", "items", "operations")

    def make_backend(self, folder: Path) -> Backend:
        return FilesBackend(folder / "store")

    def backup_path(self, folder: Path) -> Path:
        return folder / "store"


class TestFilesStore(StoreContract):
    def open_store(self, folder: Path) -> holdfast.Store:
        return holdfast.open(f"files:{folder / 'store'}")


class InPostgres:
    """Each test has a schema of its own."""

    @pytest.fixture(autouse=True)
    def in_a_schema(self) -> Iterator[None]:
        with postgres.schema() as self.schema:
            yield


class TestPostgresBackend(InPostgres, BackendContract):
    def make_backend(self, folder: Path) -> Backend:
        return PostgresBackend(postgres.server_url(), create=True, schema=self.schema)


class TestPostgresStore(InPostgres, StoreContract):
    def open_store(self, folder: Path) -> holdfast.Store:
        return holdfast.open(postgres.server_url(), create=True, schema=self.schema)


@pytest.mark.parametrize("kind", [Share, Insert])
def test_mutant_that_forgets_a_part_of_a_change(kind: type, tmp_path: Path, mutant: Any) -> None:
    def forgetful(statements: Any, write: Any) -> None:
        if not isinstance(write, kind):
            real(statements, write)

    real = writer._Statements.add
    mutant(writer._Statements, "add", forgetful)
    with pytest.raises((AssertionError, StaleHead)):
        TestSqliteBackend().test_every_part_of_a_change(tmp_path)
