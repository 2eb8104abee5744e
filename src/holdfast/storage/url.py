"""Open the backend for an address, or the search index of a backend, and import only that one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from holdfast.errors import InvalidRequest, Unavailable

if TYPE_CHECKING:
    from holdfast.storage.contract import Backend
    from holdfast.storage.postgres.backend import PostgresBackend
    from holdfast.storage.search_index import SearchIndex


_LONGEST = 1e6
"""The longest timeout, in seconds. Servers count milliseconds in 32 bits, and a longer wait is as
good as endless."""


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
    """Return the backend for a path (SQLite), "files:folder", "postgresql://…" or "memory:".

    "sqlite:path" is a path, too. As in SQLAlchemy, "sqlite:///path" is relative, and four slashes
    begin an absolute path. "files:///path" is absolute, as in a file: URL.

    Raises InvalidRequest for a bad address or option, StoreNotFound if there is no store and
    `create` forbids to make one, and Unavailable if it cannot be opened.
    """
    if durability not in ("full", "normal"):
        raise InvalidRequest(f"unknown durability {durability!r}", hint='"full" or "normal"')
    if not isinstance(timeout, int | float) or not 0 <= timeout <= _LONGEST:
        raise InvalidRequest(f"timeout is a number of seconds, not {timeout!r}")
    if create not in (None, True, False):
        raise InvalidRequest(f"create is True, False or None, not {create!r}")
    text = os.fspath(url)
    if not isinstance(text, str) or text in ("", "-") or "\0" in text:
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
        from holdfast.storage.memory import MemoryBackend

        if create is False or read_only:
            raise InvalidRequest("a memory: store is always new and empty")
        return MemoryBackend()
    place = _path(scheme, rest) if scheme in ("sqlite", "files") else text
    if place == "~" or place.startswith("~/"):
        raise InvalidRequest(
            f"{text!r} is not expanded: it would make a folder called ~",
            hint="os.path.expanduser(path) expands it",
        )
    if scheme == "files":
        from holdfast.storage.files.backend import FilesBackend

        return FilesBackend(Path(place), **options)
    if scheme in ("file", "memory") or place.startswith(f"{scheme}://") or place == ":memory:":
        raise InvalidRequest(
            f"no kind of store is called {place.partition('//')[0]!r}",
            hint="a path, sqlite:path, files:folder, postgresql://… or memory:",
        )
    path = Path(place)
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
    except OSError as e:  # the name is too long, or a parent folder is not accessible
        raise Unavailable(f"{path} cannot be opened: {e}") from e
    from holdfast.storage.sqlite.backend import SqliteBackend

    return SqliteBackend(path, **options)


def is_sqlite_store(path: Path) -> bool:
    """Return whether a file is an SQLite store of ours. Raise OSError if it cannot be read."""
    from holdfast.storage.sqlite.schema import APPLICATION_ID

    with path.open("rb") as file:
        header = file.read(72)
    return header[:16] == b"SQLite format 3\0" and header[68:] == APPLICATION_ID.to_bytes(4, "big")


def address(backend: Backend) -> str | None:
    """Return the address that opens a store from any folder, without a password.

    None for a store in memory, and for a backend that open_backend() does not know.
    """
    path = str(getattr(backend, "path", ""))
    if backend.name == "postgresql":
        return path.partition(" (schema ")[0]
    if backend.name not in ("sqlite", "files"):
        return None
    return ("files:" if backend.name == "files" else "") + os.path.abspath(path)


def _path(scheme: str, rest: str) -> str:
    """Return the path in an address such as sqlite:path or sqlite:///path."""
    if not rest.startswith("//"):
        return rest
    if not rest.startswith("///"):
        raise InvalidRequest(
            f"{scheme}:{rest} names a host, but the store is on this machine",
            hint=f"{scheme}:path, or {scheme}:////path for a path from the root on",
        )
    path = rest.lstrip("/")
    if scheme == "files" or rest.startswith("////"):
        return f"/{path}"
    first = path.partition("/")[0]
    if os.path.lexists(f"/{first}") and not os.path.lexists(first or "."):
        raise InvalidRequest(
            f"{scheme}:{rest} is a relative path, as in SQLAlchemy, and there is no {first!r} here",
            hint=f"four slashes for a path from the root on: {scheme}:////{path}; "
            f"for a new {first!r} in this folder: {scheme}:{path}",
        )
    return path


def _postgres(url: str, **options: Any) -> Backend:
    """Return the PostgreSQL backend. Raise InvalidRequest if the driver is not installed."""
    try:
        from holdfast.storage.postgres.backend import PostgresBackend
    except ImportError as e:
        raise InvalidRequest(
            f"PostgreSQL needs a driver: {e}", hint="pip install 'holdfast[postgres]'"
        ) from e
    return PostgresBackend(url, **options)


def open_search_index(backend: Backend, *, create: bool = False) -> SearchIndex | None:
    """Open the index of a store. None if there is none, and none is to be created.

    With `create`, an index that cannot be used is replaced. Raises IndexUnusable without it, and
    InvalidRequest if stores of this kind have no index.
    """
    if backend.name in ("sqlite", "files"):
        from holdfast.storage.sqlite.search_index import open_file

        return open_file(_index_path(backend), create=create, read_only=backend.read_only)
    if backend.name == "postgresql":
        from holdfast.storage.postgres.search_index import open_tables

        return open_tables(cast("PostgresBackend", backend), create=create)
    if create:
        raise InvalidRequest(
            "this kind of store has no search index", hint="search() works without one"
        )
    return None


def drop_search_index(backend: Backend) -> bool:
    """Remove the index of a store. Return whether there was one."""
    if backend.name in ("sqlite", "files"):
        from holdfast.storage.sqlite.search_index import drop_file

        return drop_file(_index_path(backend))
    if backend.name == "postgresql":
        from holdfast.storage.postgres.search_index import drop_tables

        return drop_tables(cast("PostgresBackend", backend))
    return False


def _index_path(backend: Backend) -> Path:
    return Path(f"{backend.path}-search")  # type: ignore[attr-defined]
