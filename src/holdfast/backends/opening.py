"""From an address to a backend, importing only the one that is meant."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.errors import InvalidRequest, Unavailable

if TYPE_CHECKING:
    from holdfast.backends.base import Backend


_LONGEST = 1e6
"""Seconds. What waits for longer waits for ever, and servers count in milliseconds, by 32 bits."""


def open_backend(
    url: str | os.PathLike[str],
    *,
    create: bool | None = None,
    read_only: bool = False,
    durability: str = "full",
    timeout: float = 30.0,
    schema: str | None = None,
    pool_size: int | None = None,
) -> Backend:
    """The backend for a path (SQLite), "files:folder", "postgresql://…" or "memory:"."""
    if durability not in ("full", "normal"):
        raise InvalidRequest(f"unknown durability {durability!r}", hint='"full" or "normal"')
    if not isinstance(timeout, int | float) or not 0 <= timeout <= _LONGEST:
        raise InvalidRequest(f"timeout is a number of seconds, not {timeout!r}")
    if create not in (None, True, False):
        raise InvalidRequest(f"create is True, False or None, not {create!r}")
    text = os.fspath(url)
    if not isinstance(text, str) or not text or "\0" in text:
        raise InvalidRequest(f"not a store's address: {url!r}")
    scheme, _, rest = text.partition(":")
    options: dict[str, Any] = {
        "create": create,
        "read_only": read_only,
        "durability": durability,
        "timeout": timeout,
    }
    if scheme in ("postgres", "postgresql"):
        size = 8 if pool_size is None else pool_size
        return _postgres(text, schema=schema, pool_size=size, **options)
    if schema is not None or pool_size is not None:
        raise InvalidRequest("schema and pool_size are for PostgreSQL")
    if text == "memory:":
        from holdfast.backends.memory import MemoryBackend

        if create is False or read_only:
            raise InvalidRequest("a memory: store is always new and empty")
        return MemoryBackend()
    if scheme == "files":
        from holdfast.backends.files import FilesBackend

        return FilesBackend(Path(rest), **options)
    if scheme in ("file", "memory") or rest.startswith("//") or text == ":memory:":
        raise InvalidRequest(
            f"no kind of store is called {text.partition('//')[0]!r}",
            hint="a path, sqlite:path, files:folder, postgresql://… or memory:",
        )
    path = Path(text.removeprefix("sqlite:"))
    try:
        text.encode()
        if path.is_dir():
            hint = "give the path of a file, or files:folder"
            raise InvalidRequest(f"{path} is a folder", hint=hint)
    except UnicodeEncodeError:
        hint = "stores of files can lie there: files:folder"
        raise InvalidRequest(
            f"SQLite opens no path that is not UTF-8: {text!r}", hint=hint
        ) from None
    except OSError as e:  # its name is too long, or a folder on the way to it is not ours to enter
        raise Unavailable(f"{path} cannot be opened: {e}") from e
    from holdfast.backends.sqlite import SqliteBackend

    return SqliteBackend(path, **options)


def _postgres(url: str, **options: Any) -> Backend:
    try:
        from holdfast.backends.postgres import PostgresBackend
    except ImportError as e:
        raise InvalidRequest(
            f"PostgreSQL needs a driver: {e}", hint="pip install 'holdfast[postgres]'"
        ) from e
    return PostgresBackend(url, **options)
