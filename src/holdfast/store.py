"""A store: where sessions live."""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from holdfast import lineage
from holdfast.backends.memory import MemoryBackend
from holdfast.backends.sqlite import SqliteBackend
from holdfast.cache import Images
from holdfast.codec import records
from holdfast.errors import UNREADABLE, InvalidRequest
from holdfast.model import SessionInfo
from holdfast.session import Session
from holdfast.verify import Report, verify

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import TracebackType

    from holdfast.backends.base import Backend
    from holdfast.model import Checkpoint, Status

_PAGE = 200
_BLOCKS = {"session": 16, "stream": 256}


def open(
    url: str | os.PathLike[str],
    *,
    create: bool | None = None,
    read_only: bool = False,
    durability: Literal["full", "normal"] = "full",
    cache_bytes: int = 64 << 20,
    timeout: float = 30.0,
) -> Store:
    """Open a store: a path (SQLite) or "memory:".

    `create=False` refuses to make a missing one. With durability="full" a checkpoint is on the disk
    when save() returns; "normal" survives a crash of the process, but a power loss may take the
    newest checkpoints. `timeout` bounds the wait for another process's commit, in seconds.
    """
    if durability not in ("full", "normal"):
        raise InvalidRequest(f"unknown durability {durability!r}", hint='"full" or "normal"')
    text = os.fspath(url)
    if not isinstance(text, str) or not text or "\0" in text:
        raise InvalidRequest(f"not a store's address: {url!r}")
    if text == "memory:":
        if create is False or read_only:
            raise InvalidRequest("a memory: store is always new and empty")
        return Store(MemoryBackend(), cache_bytes=cache_bytes)
    scheme = text.split(":", 1)[0] if ":" in text else ""
    if scheme in ("files", "postgres", "postgresql"):
        raise InvalidRequest(f"this version has no backend for {scheme}: stores")
    path = Path(text.removeprefix("sqlite:"))
    if path.is_dir():
        raise InvalidRequest(f"{path} is a folder", hint="give the path of a file")
    backend = SqliteBackend(
        path, create=create, read_only=read_only, durability=durability, timeout=timeout
    )
    return Store(backend, cache_bytes=cache_bytes)


class Store:
    """Sessions over a backend. A context manager; safe for threads, and after os.fork()."""

    def __init__(self, backend: Backend, *, cache_bytes: int = 64 << 20) -> None:
        self.backend = backend
        self.images = Images(cache_bytes)
        self._lock = threading.Lock()
        self._numbers: dict[str, tuple[int, int]] = {}
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        _stores.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Store {self.backend.name} {getattr(self.backend, 'path', '')}>"

    def close(self) -> None:
        """Idempotent. Handles of a closed store raise InvalidRequest."""
        self.backend.close()

    def session(self, name: str, *, agent: str | None = None) -> Session:
        """A handle on the session of this name. Nothing is written until the first save."""
        return Session(self, name, agent)

    def keep(self, session: Session) -> None:
        """Remember a handle, for as long as it lives."""
        self._sessions.add(session)

    def get(self, id: str) -> Checkpoint:
        """A checkpoint of any session, by its id or an unambiguous prefix."""
        with self.backend.reader() as reader:
            place = lineage.find_in_store(reader, id)
            return lineage.dress(reader, place, lineage.read_row(reader, place).record)

    def sessions(
        self, *, agent: str | None = None, status: Status | None = None
    ) -> Iterator[SessionInfo]:
        """Every session, by name, with its head. A damaged one is listed and says so."""
        after: bytes | None = None
        while True:
            with self.backend.reader() as reader:
                rows = reader.sessions(after, _PAGE)
                page = [self._info(reader, *row) for row in rows]
            if not page:
                return
            for info in page:
                if agent is not None and info.agent != agent:
                    continue
                if status is not None and (info.head is None or info.head.status != status):
                    continue
                yield info
            after = rows[-1][1]

    @staticmethod
    def _info(reader: Any, number: int, raw: bytes, body: bytes) -> SessionInfo:
        name, agent, head, count = raw.decode(errors="backslashreplace"), None, None, 0
        try:
            name = records.decode_name(raw)
            agent = records.unseal_session(number, raw, body)[1]
            _, at = lineage.read_head(reader, number)
            count = at.last
            place = lineage.Place(number, at.seq)
            head = lineage.dress(reader, place, lineage.read_row(reader, place).record)
        except UNREADABLE as e:
            return SessionInfo(name, agent, head, count, e.message)
        return SessionInfo(name, agent, head, count)

    def verify(self, *, read_data: bool = True, sessions: Iterable[str] | None = None) -> Report:
        """Check records, hashes and indexes; with `read_data` also every stored byte of data."""
        return verify(self.backend, read_data=read_data, sessions=sessions)

    def new_session(self) -> int:
        return self._number("session")

    def new_stream(self) -> int:
        return self._number("stream")

    def _number(self, space: Literal["session", "stream"]) -> int:
        """The next of a block of numbers reserved for this process."""
        with self._lock:
            first, left = self._numbers.get(space, (0, 0))
            if not left:
                left = _BLOCKS[space]
                first = self.backend.reserve(space, left)
            self._numbers[space] = (first + 1, left - 1)
            return first


_stores: weakref.WeakSet[Store] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """Locks that other threads held are nobody's now, and the parent goes on with its numbers."""
    for store in list(_stores):
        store._lock = threading.Lock()
        store._numbers.clear()
        store.images.reset_lock()
        store.backend.reset_lock()
        for session in list(store._sessions):
            session.reset_lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
