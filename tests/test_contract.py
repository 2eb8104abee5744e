"""Every backend, held to one contract."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.backends import sqlite_writer
from holdfast.backends.files import FilesBackend
from holdfast.backends.memory import MemoryBackend
from holdfast.backends.postgres import PostgresBackend
from holdfast.backends.sqlite import SqliteBackend
from holdfast.testing import BackendContract, StoreContract
from tests import postgres

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from holdfast.backends.base import Backend


class TestMemoryBackend(BackendContract):
    durable = False

    def make_backend(self, folder: Path) -> Backend:
        return MemoryBackend()


class TestSqliteBackend(BackendContract):
    def make_backend(self, folder: Path) -> Backend:
        return SqliteBackend(folder / "store.db")


class TestMemoryStore(StoreContract):
    durable = False

    def open_store(self, folder: Path) -> holdfast.Store:
        return holdfast.open("memory:")


class TestSqliteStore(StoreContract):
    def open_store(self, folder: Path) -> holdfast.Store:
        return holdfast.open(folder / "store.db")


class TestFilesBackend(BackendContract):
    def make_backend(self, folder: Path) -> Backend:
        return FilesBackend(folder / "store")


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


@pytest.mark.parametrize("part", ["blobs", "notes"])
def test_mutant_that_forgets_a_part_of_a_change(part: str, tmp_path: Path, mutant: Any) -> None:
    def forgetful(connection: Any, cursor: Any, change: Any) -> bool:
        return real(connection, cursor, replace(change, **{part: None}))

    real = sqlite_writer._write_at_once
    mutant(sqlite_writer, "_write_at_once", forgetful)
    with pytest.raises(AssertionError):
        TestSqliteBackend().test_every_part_of_a_change(tmp_path)
