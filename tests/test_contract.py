"""Every backend, held to one contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

import holdfast
from holdfast.backends.memory import MemoryBackend
from holdfast.backends.sqlite import SqliteBackend
from holdfast.testing import BackendContract, StoreContract

if TYPE_CHECKING:
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
