"""In memory: for tests, and the model that the other backends are held against."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from holdfast import clock
from holdfast.backends.base import Backend, Change, Gone, Lease, Moved, Notes, Reader, Turnover
from holdfast.codec.streams import RowWrite
from holdfast.errors import InvalidRequest, KeyTaken, SessionExists

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from holdfast.backends.base import Copied, Jot, Sweep, Trim

STREAM_BITS, SEQ_BITS = 24, 32
_NOTES = Notes()


def _item(pos: int) -> tuple[int, int]:
    return pos >> STREAM_BITS, pos & (1 << STREAM_BITS) - 1


def _list(order: list[Any], entry: Any, *, there: bool = True) -> None:
    """Have an entry in a sorted list, once, or not at all."""
    order[bisect_left(order, entry) : bisect_right(order, entry)] = [entry] if there else []


def _wholly(do: Callable[..., None], *given: Any) -> None:
    """What comes to the same once or twice. Ctrl-C: not half of it may stay, so it is all done."""
    try:
        do(*given)
    except BaseException:
        do(*given)
        raise


class MemoryBackend(Backend, Reader):
    """Lives and dies with its process; a fork of the process gets a copy of its own."""

    name = "memory"
    read_only = False

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._closed = False
        self._version = 0
        self._next = {"session": 1, "stream": 1}
        self._turnover = Turnover(0, 0)
        self._sessions: dict[bytes, tuple[int, bytes]] = {}
        self._names: dict[int, bytes] = {}
        self._origins: dict[int, tuple[int, int]] = {}
        self._heads: dict[int, bytes] = {}
        self._checkpoints: dict[int, dict[int, tuple[bytes, bytes]]] = {}
        self._ids: list[tuple[bytes, int, int]] = []
        self._keys: dict[tuple[int, bytes], int] = {}
        self._streams: dict[int, dict[int, bytes]] = {}
        self._starts: dict[int, list[int]] = {}
        self._blobs: dict[bytes, bytes] = {}
        self._shared: dict[bytes, int] = {}
        self._marks: dict[int, dict[tuple[int, int, bytes], bytes]] = {}
        self._operations: dict[int, dict[int, bytes]] = {}
        self._tombs: dict[tuple[int, int], bytes] = {}
        self._gaps: dict[tuple[int, int], tuple[int | None, bytes]] = {}
        self._facets: dict[tuple[int, bytes], set[bytes]] = {}
        self._leases: dict[int, tuple[bytes, bytes, float]] = {}
        self._journal: dict[int, dict[int, bytes]] = {}

    @contextmanager
    def reader(self) -> Iterator[Reader]:
        with self._lock:
            self._check_open()
            yield self

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidRequest("the store is closed", hint="open it again")

    # -- writing -------------------------------------------------------------------------------

    def commit(self, change: Change) -> None:
        with self._lock:
            self._check_open()
            session, notes = change.session, change.notes or _NOTES
            if change.create is None and self._heads.get(session, b"") != change.expect:
                raise Moved
            name, _ = change.create or notes.rename or (None, b"")
            if name in self._sessions:
                raise SessionExists("a session of this name exists already")
            if notes.key is not None and (session, notes.key) in self._keys:
                raise KeyTaken("the key names another checkpoint of this session")
            for s, seq in notes.needs:
                buried = (s, seq) in self._tombs and seq not in notes.untombs
                if buried or seq not in self._checkpoints.get(s, {}):
                    raise Gone
            if any(digest not in self._blobs for digest in notes.shares):
                raise Gone
            if notes.copied is not None:
                if notes.copied.freed != self._turnover.freed:
                    raise Gone
                if not dict(notes.copied.journal).keys().isdisjoint(self._journal.get(session, ())):
                    raise Moved
                self._turnover = self._turnover._replace(copied=Turnover.new())
            self._version += 1
            _wholly(self._apply, change, session)

    def _apply(self, change: Change, session: int) -> None:
        for write in change.rows:
            self._write_row(write)
        for digest, row, rewrite in change.blobs:
            if rewrite or digest not in self._blobs:
                self._blobs[digest] = row
            self._shared[digest] = self._version  # which it never was before
        if change.checkpoint is not None:
            seq, id, row = change.checkpoint
            self._checkpoints.setdefault(session, {})[seq] = (id, row)
            _list(self._ids, (id, session, seq))
        if change.notes is not None:
            self._apply_notes(change.notes, session, change.checkpoint)
        self._heads[session] = change.head
        named = change.create or (change.notes and change.notes.rename)
        if named:
            name, row = named
            self._sessions.pop(self._names.get(session, b""), None)
            self._names[session] = name
            self._sessions[name] = (session, row)

    def _apply_notes(
        self, notes: Notes, session: int, checkpoint: tuple[int, bytes, bytes] | None
    ) -> None:
        if notes.origin is not None:
            self._origins[session] = notes.origin
        if notes.key is not None and checkpoint is not None:
            self._keys[session, notes.key] = checkpoint[0]
        for key, seq in notes.keys:
            self._keys[session, key] = seq
        marks = self._marks.setdefault(session, {})
        for unmark in notes.unmarks:
            marks.pop(unmark, None)
        for seq, kind, value, row in notes.marks:
            marks[seq, kind, value] = row
        if notes.operation is not None:
            self._operations.setdefault(session, {})[notes.operation[0]] = notes.operation[1]
        for seq, row in notes.tombs:
            self._tombs[session, seq] = row
        for seq in notes.untombs:
            self._tombs.pop((session, seq), None)
        for kind, value, id in notes.unfacets:
            self._facets.get((kind, value), set()).discard(id)
        for kind, value, id in notes.facets:
            self._facets.setdefault((kind, value), set()).add(id)
        for digest in notes.shares:
            self._shared[digest] = self._version
        if notes.lease is not None:
            self._leases[session] = (*notes.lease, clock.elapsed())
        if notes.copied is not None:
            self._apply_copied(notes.copied, session)

    def _apply_copied(self, copied: Copied, session: int) -> None:
        for seq, id, row in copied.checkpoints:
            self._checkpoints.setdefault(session, {})[seq] = (id, row)
            _list(self._ids, (id, session, seq))
        self._operations.setdefault(session, {}).update(copied.operations)
        for seq, ancestor, row in copied.gaps:
            self._gaps[session, seq] = (ancestor, row)
        kept = {n: e for n, e in self._journal.get(session, {}).items() if n >= copied.journal_from}
        self._journal[session] = kept | dict(copied.journal)

    def jot(self, jot: Jot) -> None:
        with self._lock:
            self._check_open()
            held = self._leases.get(jot.session)
            if jot.token is not None and (held is None or held[0] != jot.token):
                raise Moved
            new = dict(enumerate(jot.entries, jot.first))
            journal = self._journal.setdefault(jot.session, {})
            if jot.session not in self._names or not journal.keys().isdisjoint(new):
                raise Moved
            self._version += 1
            journal |= new

    def renew(self, session: int, token: bytes) -> bool:
        with self._lock:
            self._check_open()
            held = self._leases.get(session)
            if held is None or held[0] != token:
                return False
            self._leases[session] = (*held[:2], clock.elapsed())
            return True

    def _write_row(self, write: RowWrite) -> None:
        stream, first, replaces, row = write
        held = self._streams.setdefault(stream, {})
        starts = self._starts.setdefault(stream, [])
        low, high = bisect_left(starts, first), bisect_left(starts, first + max(replaces, 1))
        for start in starts[low:high]:
            held.pop(start, None)
        starts[low:high] = [first]
        held[first] = row

    def sweep(self, sweeps: Sequence[Sweep]) -> list[bool]:
        with self._lock:
            self._check_open()
            self._version += 1
            self._turnover = self._turnover._replace(freed=Turnover.new())
            done = []
            for sweep in sweeps:
                done.append(sweep.is_current(self))
                if done[-1]:
                    _wholly(self._sweep, sweep)
            return done

    def _sweep(self, sweep: Sweep) -> None:
        session = sweep.session
        marks = self._marks.get(session, {})
        for seq, id in sweep.checkpoints:
            self._checkpoints.get(session, {}).pop(seq, None)
            _list(self._ids, (id, session, seq), there=False)
            self._tombs.pop((session, seq), None)
            self._gaps.pop((session, seq), None)
            for mark in [m for m in marks if m[0] == seq]:
                del marks[mark]
        for key in sweep.keys:
            self._keys.pop((session, key), None)
        for kind, value, id in sweep.facets:
            self._facets.get((kind, value), set()).discard(id)
        for other, seq, ancestor, row in sweep.gaps:
            self._gaps[other, seq] = (ancestor, row)
        held = self._journal.get(session, {})
        for n in [n for n in held if n < sweep.journal or sweep.remove is not None]:
            del held[n]
        if sweep.remove is not None:
            self._sessions.pop(sweep.remove, None)
            self._gaps.pop((session, 0), None)
            for each in (self._names, self._heads, self._leases, self._origins, self._operations):
                each.pop(session, None)

    def _begins(self, pos: int, begin: bytes) -> bool:
        stream, first = _item(pos)
        return self._streams.get(stream, {}).get(first, b"").startswith(begin)

    def trim(self, trim: Trim) -> int:
        gone = 0
        with self._lock:
            self._check_open()
            if trim.copied != self._turnover.copied:
                raise Gone
            self._turnover = self._turnover._replace(freed=Turnover.new())
            self._version += 1
            for rows, instead in trim.items:
                if not all(self._begins(pos, begin) for pos, begin in rows):
                    continue
                gone += len(rows)
                _wholly(self._replace, rows, dict(instead))
            for digest, shared in trim.blobs:
                if digest in self._blobs and self._shared.get(digest, 0) == shared:
                    gone += 1
                    del self._blobs[digest]
                    self._shared.pop(digest, None)
        return gone

    def _replace(self, rows: Sequence[tuple[int, bytes]], instead: dict[int, bytes]) -> None:
        for pos, body in instead.items():
            self._write_row(RowWrite(*_item(pos), 0, body))
        for stream, first in [_item(pos) for pos, _ in rows if pos not in instead]:
            _list(self._starts[stream], first, there=False)
            self._streams[stream].pop(first, None)

    def compact(self, progress: Callable[[int, int], None] | None = None) -> None:
        if progress is not None:
            progress(0, 0)

    def reindex(self) -> None:
        return

    def version(self) -> object:
        self._check_open()
        return self._version

    def backup(self, path: Path) -> None:
        raise InvalidRequest(
            f"a memory: store cannot be backed up to {path}", hint="copy() it to another store"
        )

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

    # -- reading -------------------------------------------------------------------------------

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

    def newest_ids(self, low: bytes, high: bytes, limit: int) -> list[tuple[int, int, bytes]]:
        start = bisect_left(self._ids, (low, -1, -1))
        stop = bisect_left(self._ids, (high, -1, -1))
        return [(s, seq, id) for id, s, seq in self._ids[start:stop][::-1][:limit]]

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

    def lease(self, session: int) -> Lease | None:
        found = self._leases.get(session)
        return None if found is None else Lease(session, *found[:2], clock.elapsed() - found[2])

    def leases(self, after: int, limit: int) -> list[Lease]:
        numbers = sorted(n for n in self._leases if n > after)[:limit]
        return [lease for n in numbers if (lease := self.lease(n))]

    def journal(self, session: int, low: int, limit: int) -> list[tuple[int, bytes]]:
        held = self._journal.get(session, {})
        return [(n, held[n]) for n in sorted(held) if n >= low][:limit]

    def last_entry(self, session: int) -> int:
        return max(self._journal.get(session, {}), default=0)

    def tombs(self, session: int, low: int, high: int) -> list[tuple[int, bytes]]:
        return sorted(
            (q, r) for (s, q), r in self._tombs.items() if s == session and low <= q <= high
        )

    def buried(self, after: int, limit: int) -> list[tuple[int, bytes]]:
        found = sorted((s << SEQ_BITS | q, row) for (s, q), row in self._tombs.items())
        return [(pos, row) for pos, row in found if pos > after][:limit]

    def count_buried(self) -> int:
        return len(self._tombs)

    def count_checkpoints(self) -> int:
        return len(self._ids)

    def gaps(self, session: int, low: int, high: int) -> list[tuple[int, bytes]]:
        held = [(q, row) for (s, q), (_, row) in self._gaps.items() if s == session]
        return sorted((q, row) for q, row in held if low <= q <= high)

    def gaps_below(self, session: int) -> list[tuple[int, int]]:
        return sorted(
            place
            for place, (ancestor, _) in self._gaps.items()
            if ancestor is not None and ancestor >> SEQ_BITS == session
        )

    def forks(self, session: int, low: int, high: int) -> list[tuple[int, int]]:
        found = [(q, new) for new, (s, q) in self._origins.items() if s == session]
        return sorted((q, new) for q, new in found if low <= q <= high)

    def find_facets(
        self, kind: int, value: bytes, low: bytes, high: bytes, limit: int
    ) -> list[bytes]:
        held = self._facets.get((kind, value), set())
        return sorted((id for id in held if low <= id < high), reverse=True)[:limit]

    def item_rows(self, after: int, limit: int) -> list[tuple[int, int, bytes]]:
        found = [
            (stream << STREAM_BITS | first, len(row), row[:9])
            for stream, held in self._streams.items()
            for first, row in held.items()
        ]
        return sorted(row for row in found if row[0] > after)[:limit]

    def blob_rows(self, after: int, limit: int) -> list[tuple[int, bytes, int, int]]:
        blobs = sorted(self._blobs.items())[after:][:limit]
        return [
            (after + n, digest, len(row), self._shared.get(digest, 0))
            for n, (digest, row) in enumerate(blobs, start=1)
        ]

    def turnover(self) -> Turnover:
        return self._turnover

    def sizes(self) -> dict[str, tuple[int, int]]:
        items = [row for held in self._streams.values() for row in held.values()]
        records = [row for held in self._checkpoints.values() for _, row in held.values()]
        kinds = {
            "items": items,
            "blobs": self._blobs.values(),
            "checkpoints": records,
            "sessions": [row for _, row in self._sessions.values()],
            "operations": [r for held in self._operations.values() for r in held.values()],
            "marks": [row for held in self._marks.values() for row in held.values()],
            "tombs": self._tombs.values(),
            "gaps": [row for _, row in self._gaps.values()],
            "journal": [row for held in self._journal.values() for row in held.values()],
        }
        return {kind: (len(rows), sum(map(len, rows))) for kind, rows in kinds.items()}

    def check(self) -> Iterator[str]:
        yield from ()
