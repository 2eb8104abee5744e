"""The rows of a memory store, for tests that damage them."""

from __future__ import annotations

from typing import Any

from holdfast.storage.memory import MemoryBackend


def rows(backend: Any, table: str) -> dict[Any, Any]:
    """Return the rows of a table by their keys."""
    assert isinstance(backend, MemoryBackend)
    return dict(backend.tables[table].rows)


def put(backend: Any, table: str, key: Any, row: Any) -> None:
    """Replace a row; with None, remove it."""
    assert isinstance(backend, MemoryBackend)
    backend._apply({(table, key): row})


def damage(backend: Any, table: str, body: bytes | None, *key: Any) -> None:
    """Replace the body of a row, which is its last column. With None, remove the row."""
    row = rows(backend, table)[key]
    put(backend, table, key, None if body is None else (*row[:-1], body))
