"""Streams: what a step produces bit by bit, for readers in any process.

The chunks of a stream are entries of the journal. Each attempt at the step begins the stream again.
A reader that has seen chunks of an earlier attempt gets a RESTART before those of the next one. It
comes to the end only when the step has returned, so that it has seen what the run continues with.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from holdfast.errors import (
    Corrupt,
    InvalidRequest,
    NotFound,
    SessionNotFound,
    StepFailed,
    require_text,
)
from holdfast.format import records, values
from holdfast.history import journal as journals
from holdfast.history.journal import CHUNKS, LOST, STREAM, CallId, Entry
from holdfast.history.leases import LeaseRecord
from holdfast.model import RESTART
from holdfast.storage.reader import open_reader

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

    from holdfast.runs.run_core import RunCore
    from holdfast.storage.contract import Backend
    from holdfast.storage.reader import Reader

INTERVAL = 0.1
"""Seconds after which a chunk is flushed, if no other one comes."""
FULL = 16 << 10
"""Bytes of chunks that are flushed at once."""
_INDEX_BITS = 16
"""A cursor is the number of an entry and, in this many bits, the index of a chunk in it."""
_ENDS = ("done", "failed", "skipped")


class StreamBuffer:
    """The chunks of a stream that are not flushed yet. Safe for threads."""

    def __init__(self, core: RunCore, key: str) -> None:
        require_text("the key of a stream", key)
        self._core, self.key = core, key
        self._lock, self._flushing = threading.Lock(), threading.Lock()
        self._chunks: list[Any] = []
        self._size = 0
        self._timer: threading.Timer | None = None
        self._error: BaseException | None = None
        """The error of a flush by the timer."""
        self._number = 0
        """The number of the entry that began the stream; 0 while it is not open."""

    def begin(self) -> None:
        self._call, self._number = self._core.begin_stream(self.key)

    def add(self, chunk: Any) -> bool:
        """Add a chunk. Return whether the buffer is full and should be flushed."""
        encoded = journals.encoded(chunk, "chunk")
        with self._lock:
            if not self._number:
                raise InvalidRequest("the stream is not open", hint="with run.stream(key) as out:")
            self._raise_error()
            self._chunks.append(values.decode(encoded))  # the caller may change its own
            self._size += len(encoded)
            if self._timer is None:
                self._timer = threading.Timer(INTERVAL, self._flush_in_time)
                self._timer.daemon = True
                self._timer.start()
            return self._size >= FULL

    def flush(self, *, close: bool = False) -> None:
        """Append the chunks to the journal. They are durable when this returns."""
        with self._flushing:
            chunks = self._take()
            self._raise_error()
            if chunks or close:
                self._core.append_chunks(self._number, chunks, closed=close)

    def end(self, error: BaseException | None) -> None:
        """Close the stream. After an error, it stays open for the next attempt at the step."""
        try:
            if error is None:
                self.flush(close=True)
        finally:
            with self._flushing:
                self._take()
                self._number = 0
            self._core.end_stream(self._call, self.key)

    def _take(self) -> list[Any]:
        """Return the chunks, and stop the timer."""
        with self._lock:
            chunks, self._chunks, self._size = self._chunks, [], 0
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            return chunks

    def _flush_in_time(self) -> None:
        try:
            self.flush()
        except BaseException as e:  # noqa: BLE001 - the next call of add() or flush() raises it
            self._error = e

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


class StreamWriter:
    """Writes a stream: `with run.stream(key) as out`. See Run.stream()."""

    def __init__(self, buffer: StreamBuffer) -> None:
        self._buffer = buffer

    def __enter__(self) -> Self:
        self._buffer.begin()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._buffer.end(error)

    def write(self, chunk: Any) -> None:
        """Add a chunk: a text, or any other value that can be stored.

        Readers see it within about 100 ms. Raises NotSerializable if it cannot be stored, and
        Fenced if another worker took over the session.
        """
        if self._buffer.add(chunk):
            self._buffer.flush()

    def flush(self) -> None:
        """Write the chunks of the buffer now. They are durable when this returns."""
        self._buffer.flush()


class StreamReader:
    """Reads a stream from a cursor on. `poll()` never waits."""

    def __init__(self, backend: Backend, name: str, key: str, after: int) -> None:
        require_text("the key of a stream", key)
        if type(after) is not int or after < 0:
            raise InvalidRequest(f"not a cursor: {after!r}", hint="0, or one that stream() yielded")
        self._backend, self._name, self._key, self._after = backend, name, key, after
        self._session = 0
        self._next = 1
        self._ids: dict[int, CallId] = {}
        """The calls that the entries have begun, by number."""
        self._id: CallId | None = None
        """The call that the stream belongs to."""
        self._fixed = False
        """Whether the call is decided. Until then it is the newest one with a stream of the key."""
        self._call = self._begin = 0
        """The numbers of the entries that began the current attempt at the call and its stream."""
        self._shown = 0
        """The `_begin` of the attempt that the caller has seen chunks of."""
        self._closed = False
        self._later = 0
        """The number of the last entry that began a call in a later turn of the run."""
        self._outcome: str | None = None
        self._out: list[tuple[int, Any]] = []
        self.ended = False

    def follow(self, interval: float, patience: float | None) -> Iterator[tuple[int, Any]]:
        """Yield cursors and chunks until the end of the stream. See Session.stream()."""
        for news in self.polls(patience):
            yield from news
            if not (news or self.ended):
                self._backend.wait(interval)

    def polls(self, patience: float | None) -> Iterator[list[tuple[int, Any]]]:
        """Yield the new chunks, again and again, until the end of the stream.

        After an empty list, the caller should wait a little. Raises NotFound after `patience`
        seconds without a chunk.
        """
        quiet_since = time.monotonic()
        while not self.ended:
            news = self.poll()
            quiet = time.monotonic() - quiet_since
            if not (news or self.ended) and patience is not None and quiet >= patience:
                raise NotFound(
                    f"nothing more came in stream {self._key!r} of session {self._name!r}",
                    hint="its run may be interrupted; read on with after=…",
                )
            yield news
            if news:
                quiet_since = time.monotonic()

    def poll(self) -> list[tuple[int, Any]]:
        """Return the new chunks with their cursors. Sets `ended` at the end of the stream."""
        with open_reader(self._backend) as reader:
            found = reader.session(records.encode_name(self._name))
            if found is None or self._session not in (0, found.number):
                raise SessionNotFound(f"there is no session {self._name!r}")
            if not self._session:
                self._session = found.number
                if self._after:
                    self._find(reader)
            self._read(reader)
            self.ended = self._closed and self._outcome in ("done", "skipped")
            broken = not self.ended and self._is_over(reader)
        self._fixed = self._id is not None
        out, self._out = self._out, []
        if out:
            self._shown = self._begin
        elif broken:
            raise StepFailed(f"stream {self._key!r} broke off: its step has not returned")
        return out

    def _find(self, reader: Reader) -> None:
        """Find the stream that the cursor belongs to."""
        entry = self._entry(reader, self._after >> _INDEX_BITS)
        if entry.facts["what"] == CHUNKS:
            entry = self._entry(reader, entry.facts["of"])
        if entry.facts["what"] != STREAM or entry.facts["key"] != self._key:
            raise InvalidRequest(f"{self._after} is not a cursor of stream {self._key!r}")
        self._shown, self._next = entry.number, entry.facts["of"]
        began = self._entry(reader, self._next).facts
        self._id, self._fixed = (began["run"], began["turn"], began["key"]), True

    def _entry(self, reader: Reader, number: int) -> Entry:
        for entry in journals.read(reader, self._session, number, number + 1):
            return entry
        if number > reader.last_entry(self._session):
            raise InvalidRequest(f"{self._after} is not a cursor of session {self._name!r}")
        raise NotFound(f"stream {self._key!r} of session {self._name!r} is freed")

    def _read(self, reader: Reader) -> None:
        for n, facts in journals.read(reader, self._session, self._next):
            if n != self._next and self._id is not None:
                raise NotFound(f"stream {self._key!r} of session {self._name!r} is freed")
            try:
                self._apply(n, facts)
            except (LookupError, TypeError) as e:
                raise Corrupt(f"entry {n} of the journal does not make sense") from e
            self._next = n + 1

    def _apply(self, n: int, facts: dict[str, Any]) -> None:
        what = facts["what"]
        if what == "started":
            id = self._ids[n] = facts["run"], facts["turn"], facts["key"]
            if self._id is not None and id[0] == self._id[0] and id[1] > self._id[1]:
                self._later = n
        elif what == STREAM and facts["key"] == self._key and facts["of"] in self._ids:
            self._restart(n, facts["of"])
        elif what == CHUNKS and facts["of"] == self._begin:
            for index, chunk in enumerate(facts["chunks"], 1):
                cursor = n << _INDEX_BITS | index
                if cursor > self._after:
                    self._out.append((cursor, chunk))
            self._closed = facts["closed"]
        elif what in _ENDS and facts["of"] == self._call:
            self._outcome = what
        elif what == LOST and self._begin:
            raise Corrupt(f"entry {n} of the journal is lost, and may be of the stream")

    def _restart(self, n: int, call: int) -> None:
        """Continue with an attempt, which entry `n` has begun."""
        id = self._ids[call]
        if self._fixed and id != self._id:
            return  # a later stream of this key
        self._out = [(n << _INDEX_BITS, RESTART)] if 0 < self._shown < n else []
        self._id, self._call, self._begin = id, call, n
        self._closed, self._later, self._outcome = False, 0, None

    def _is_over(self, reader: Reader) -> bool:
        """Return whether no other chunk can come. Raises NotFound if no stream can begin at all."""
        lease = reader.lease(self._session)
        record = None if lease is None else LeaseRecord.read(lease)
        is_open = record is not None and record.open
        if self._id is None:
            if not is_open:
                raise NotFound(f"session {self._name!r} has no stream {self._key!r}")
            return False
        if record is None or not is_open or record.run != self._id[0]:
            return True
        # A resumed run has passed the turn; else, the call may still be in progress beside others.
        passed = self._call < record.since <= self._later
        return passed or self._outcome is not None
