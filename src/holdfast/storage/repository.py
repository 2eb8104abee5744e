"""Repository: a backend, with the caches and counters that all handles of a store share.

The writer, the operation log, runs, copies and maintenance use a Repository. Users have a Store.
"""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from holdfast.errors import Corrupt
from holdfast.format import rows
from holdfast.format.item_streams import STREAM_BITS, Source
from holdfast.format.list_encodings import ImageCache
from holdfast.storage.reader import open_reader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from holdfast.storage.contract import Backend
    from holdfast.storage.reader import Reader

_BLOCKS = {"session": 16, "stream": 256}
"""How many numbers are reserved at once."""
_UNOBSERVED = nullcontext()

T = TypeVar("T")

_KEPT = 512
"""Rows that a StoredData keeps in memory."""


class Observer:
    """Is notified of events in a store. A subclass overrides the methods that it needs.

    The thread that does the work calls them. They must not raise.
    """

    def measure(self, operation: str, session: str) -> AbstractContextManager[Any]:  # noqa: ARG002
        """Return a context in which an operation of a session runs.

        The operation is "save", "append", "patch" or "load".
        """
        return _UNOBSERVED

    def committed(self, session: str, checkpoint: Any) -> None:
        """Handle a checkpoint that is durable now. It is a `holdfast.Checkpoint`."""

    def lease(self, session: str, event: str) -> None:
        """Handle an event of a session's lease.

        A run has "taken", "resumed", "taken over", "lost" or "given back" the session, or found it
        "busy".
        """

    def close(self) -> None:
        """Wait for work in progress, because the store is about to close."""

    def reset_lock(self) -> None:
        """Replace locks in a forked child, where the threads that held them do not exist."""


class Repository:
    """A backend, a cache of recent states, blocks of reserved numbers, and observers.

    Safe for threads, and in the child after os.fork().
    """

    def __init__(self, backend: Backend, *, cache_bytes: int = 64 << 20) -> None:
        self.backend = backend
        self.images = ImageCache(cache_bytes)
        self.observers: tuple[Observer, ...] = ()
        self._lock = threading.Lock()
        self._numbers: dict[str, tuple[int, int]] = {}
        self._handles: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = (
            weakref.WeakKeyDictionary()
        )
        _repositories.add(self)

    def reader(self) -> AbstractContextManager[Reader]:
        """Return a context with one consistent view of the store."""
        return open_reader(self.backend)

    def data(self, reader: Reader | None = None) -> StoredData:
        """Return a source of items and blobs, in the view of `reader` or in a new one."""
        return StoredData(self.backend, reader)

    def new_session(self) -> int:
        """Return a number that no session has."""
        return self._number("session")

    def new_stream(self) -> int:
        """Return a number that no stream has."""
        return self._number("stream")

    def _number(self, space: Literal["session", "stream"]) -> int:
        """Return the next reserved number. Reserve another block if none is left."""
        with self._lock:
            first, left = self._numbers.get(space, (0, 0))
            if not left:
                left = _BLOCKS[space]
                first = self.backend.reserve(space, left)
            self._numbers[space] = (first + 1, left - 1)
            return first

    def measure(self, operation: str, session: str) -> AbstractContextManager[Any]:
        """Return a context in which the observers measure an operation."""
        if not self.observers:
            return _UNOBSERVED
        stack = ExitStack()
        for observer in self.observers:
            stack.enter_context(observer.measure(operation, session))
        return stack

    def lease_event(self, session: str, event: str) -> None:
        """Notify the observers of a lease event."""
        for observer in self.observers:
            observer.lease(session, event)

    def after_fork(self, handle: T, reset: Callable[[T], None]) -> None:
        """Call `reset(handle)` in forked children, as long as the handle exists."""
        self._handles[handle] = reset

    def close(self) -> None:
        """Close the observers and the backend. Idempotent."""
        for observer in self.observers:
            observer.close()
        self.backend.close()

    def reset_locks(self) -> None:
        """Reset this process's state in a forked child.

        Locks that other threads held are replaced. Reserved numbers stay with the parent.
        """
        self._lock = threading.Lock()
        self._numbers.clear()
        self.images.reset_lock()
        self.backend.reset_lock()
        for observer in self.observers:
            observer.reset_lock()
        for handle, reset in list(self._handles.items()):
            reset(handle)


_repositories: weakref.WeakSet[Repository] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for repository in list(_repositories):
        repository.reset_locks()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def seal_blob(digest: bytes, flat: bytes) -> bytes:
    """Return the sealed row of a blob."""
    return rows.seal(rows.BLOB, rows.blob_address(digest), flat, level=rows.DENSE)


class StoredData(Source):
    """Items and blobs of a store, in one consistent view that is opened at the first read."""

    __slots__ = ("_backend", "_cache", "_last", "_opened", "_reader")

    def __init__(self, backend: Backend, reader: Reader | None = None) -> None:
        self._backend = backend
        self._reader = reader
        self._opened: AbstractContextManager[Reader] | None = None
        self._cache: dict[int, rows.ItemRow] = {}
        self._last: tuple[int, int, rows.ItemRow] | None = None
        """The stream, the first item and the row that were read last."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._opened is not None:
            opened, self._opened, self._reader = self._opened, None, None
            opened.__exit__(*error)  # type: ignore[arg-type] # it may raise the error as one of ours

    @property
    def reader(self) -> Reader:
        """The view, opened at the first use."""
        if self._reader is None:
            self._opened = open_reader(self._backend)
            self._reader = self._opened.__enter__()
        return self._reader

    def rows(self, stream: int, start: int, stop: int) -> Iterator[tuple[int, rows.ItemRow]]:
        """Yield the rows that hold items [start, stop), each with the number of its first item."""
        if self._last is not None:
            home, low, last = self._last
            if home == stream and low <= start and stop <= low + len(last.ends):
                yield low, last
                return
        for first, body in self.reader.items(stream, start, stop):
            address = stream << STREAM_BITS | first
            row = self._cache.get(address)
            if row is None:
                row = rows.unseal_items(address, body, f"item {first} of stream {stream}")
                if len(self._cache) >= _KEPT:
                    self._cache.clear()
                self._cache[address] = row
            self._last = stream, first, row
            yield first, row

    def blob(self, digest: bytes, size: int) -> bytes:
        """Return the data of a blob. Raise Corrupt if it is missing or damaged."""
        body = self.reader.blob(digest)
        if body is None:
            raise Corrupt(f"blob {digest.hex()[:12]} is missing")
        _, flat = rows.unseal(
            rows.BLOB, rows.blob_address(digest), body, f"blob {digest.hex()[:12]}"
        )
        if len(flat) != size:
            raise Corrupt(f"blob {digest.hex()[:12]} has not the size it should have")
        return flat

    def blob_state(self, digest: bytes, size: int) -> str:
        """Return whether a blob can be shared: "absent", "sound" or "damaged"."""
        if self.reader.blob(digest) is None:
            return "absent"
        try:
            self.blob(digest, size)
        except Corrupt:
            return "damaged"
        return "sound"
