"""In memory: for tests, and the model that the other backends are held against."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right, insort
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from holdfast.backends.base import Backend, Change, Moved, Reader
from holdfast.errors import InvalidRequest, KeyTaken, SessionExists

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.codec.streams import RowWrite


class MemoryBackend(Backend, Reader):
    """Lives and dies with its process; a fork of the process gets a copy of its own."""

    name = "memory"
    read_only = False

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._closed = False
        self._next = {"session": 1, "stream": 1}
        self._sessions: dict[bytes, tuple[int, bytes]] = {}
        self._names: dict[int, bytes] = {}
        self._heads: dict[int, bytes] = {}
        self._checkpoints: dict[int, dict[int, tuple[bytes, bytes]]] = {}
        self._ids: list[tuple[bytes, int, int]] = []
        self._keys: dict[tuple[int, bytes], int] = {}
        self._streams: dict[int, dict[int, bytes]] = {}
        self._starts: dict[int, list[int]] = {}
        self._blobs: dict[bytes, bytes] = {}
        self._marks: dict[int, dict[tuple[int, int, bytes], bytes]] = {}
        self._operations: dict[int, dict[int, bytes]] = {}

    @contextmanager
    def reader(self) -> Iterator[Reader]:
        with self._lock:
            self._check_open()
            yield self

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidRequest("the store is closed", hint="open it again")

    def commit(self, change: Change) -> None:
        with self._lock:
            self._check_open()
            session = change.session
            if change.create is not None:
                if change.create[0] in self._sessions:
                    raise SessionExists("a session of this name exists already")
            elif self._heads.get(session) != change.expect:
                raise Moved
            if change.key is not None and (session, change.key) in self._keys:
                raise KeyTaken("the key names another checkpoint of this session")
            self._apply(change, session)

    def _apply(self, change: Change, session: int) -> None:
        if change.create is not None:
            name, row = change.create
            self._sessions[name] = (session, row)
            self._names[session] = name
        self._heads[session] = change.head
        if change.checkpoint is not None:
            seq, id, row = change.checkpoint
            self._checkpoints.setdefault(session, {})[seq] = (id, row)
            insort(self._ids, (id, session, seq))
            if change.key is not None:
                self._keys[session, change.key] = seq
        for write in change.rows:
            self._write_row(write)
        for digest, row, rewrite in change.blobs:
            if rewrite or digest not in self._blobs:
                self._blobs[digest] = row
        marks = self._marks.setdefault(session, {})
        for unmark in change.unmarks:
            marks.pop(unmark, None)
        for seq, kind, value, row in change.marks:
            marks[seq, kind, value] = row
        if change.operation is not None:
            number, row = change.operation
            self._operations.setdefault(session, {})[number] = row

    def _write_row(self, write: RowWrite) -> None:
        stream, first, replaces, row = write
        held = self._streams.setdefault(stream, {})
        starts = self._starts.setdefault(stream, [])
        low, high = bisect_left(starts, first), bisect_left(starts, first + replaces)
        for start in starts[low:high]:
            del held[start]
        starts[low:high] = [first]
        held[first] = row

    def reserve(self, space: Literal["session", "stream"], count: int) -> int:
        with self._lock:
            self._check_open()
            first = self._next[space]
            self._next[space] += count
            return first

    def reset_lock(self) -> None:
        self._lock = threading.RLock()

    def close(self) -> None:
        self._closed = True

    def session(self, name: bytes) -> tuple[int, bytes] | None:
        return self._sessions.get(name)

    def session_by_number(self, session: int) -> tuple[bytes, bytes] | None:
        name = self._names.get(session)
        return None if name is None else (name, self._sessions[name][1])

    def sessions(self, after: bytes | None, limit: int) -> list[tuple[int, bytes, bytes]]:
        names = sorted(n for n in self._sessions if after is None or n > after)[:limit]
        return [(self._sessions[n][0], n, self._sessions[n][1]) for n in names]

    def head(self, session: int) -> bytes | None:
        return self._heads.get(session)

    def checkpoint(self, session: int, seq: int) -> tuple[bytes, bytes] | None:
        return self._checkpoints.get(session, {}).get(seq)

    def checkpoints(
        self, session: int, low: int, high: int, limit: int
    ) -> list[tuple[int, bytes, bytes]]:
        held = self._checkpoints.get(session, {})
        order = sorted(s for s in held if low <= s <= high)[:limit]
        return [(s, *held[s]) for s in order]

    def find_ids(self, low: bytes, high: bytes, limit: int) -> list[tuple[int, int, bytes]]:
        start = bisect_left(self._ids, (low, -1, -1))
        stop = bisect_right(self._ids, (high, 1 << 62, 1 << 62))
        return [(s, seq, id) for id, s, seq in self._ids[start : min(stop, start + limit)]]

    def find_key(self, session: int, key: bytes) -> int | None:
        return self._keys.get((session, key))

    def items(self, stream: int, start: int, stop: int) -> list[tuple[int, bytes]]:
        starts = self._starts.get(stream, [])
        low = max(bisect_right(starts, start) - 1, 0)
        held = self._streams.get(stream, {})
        return [(s, held[s]) for s in starts[low : bisect_left(starts, stop)]]

    def blob(self, digest: bytes) -> bytes | None:
        return self._blobs.get(digest)

    def marks(self, session: int, low: int, high: int) -> list[tuple[int, int, bytes, bytes]]:
        held = self._marks.get(session, {})
        return sorted((*at, row) for at, row in held.items() if low <= at[0] <= high)

    def find_marks(self, session: int, kind: int, value: bytes) -> list[tuple[int, bytes]]:
        held = self._marks.get(session, {})
        found = [(seq, row) for (seq, k, v), row in held.items() if k == kind and v == value]
        return sorted(found, reverse=True)

    def operations(self, session: int, low: int, high: int) -> list[tuple[int, bytes]]:
        held = self._operations.get(session, {})
        return [(n, held[n]) for n in sorted(held) if low <= n <= high]

    def check(self) -> Iterator[str]:
        yield from ()
