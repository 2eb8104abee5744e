"""gc: free deleted checkpoints, then the data that no checkpoint refers to, then the space.

It runs beside savers. Each step is atomic and leaves a sound store, so a crash between two costs
nothing, and the next run goes on. Nothing is freed that somebody may have come to need since it was
found to be garbage: checkpoints go only if their session, and what hangs on it, is as it was, rows
of data only if they are still what they were, and a save that shares a blob says so in its row.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from holdfast import freeing
from holdfast.backends.base import Gone, Sweep, Trim
from holdfast.codec import records
from holdfast.errors import UNREADABLE
from holdfast.freeing import Tree
from holdfast.live import Live
from holdfast.logs import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast.backends.base import Backend

    Progress = Callable[[str, int, int], None]


_BATCH = 2_000
"""Rows of data that are removed in one write."""
_PAGE = 1_000
_TRIES = 20
_MOST = 200
"""Sessions that are freed in one write."""


class Collected(NamedTuple):
    """What a run of gc has freed."""

    checkpoints: int = 0
    sessions: int = 0
    rows: int = 0
    held: int = 0
    """Deleted checkpoints that were kept back, for at most a day: see `Retention.max_age`."""


def collect(backend: Backend, progress: Progress | None = None) -> Collected:
    """Everything at once: checkpoints, data, space."""
    tell = progress or (lambda *_: None)
    freed = _Freeing(backend, tell).run()
    rows = sweep_data(backend, tell)
    backend.compact(lambda done, total: tell("space", done, total))
    return freed._replace(rows=rows)


def sweep_data(backend: Backend, tell: Progress = lambda *_: None) -> int:
    """Remove items and blobs that no checkpoint refers to, be it deleted or not."""
    removed = 0
    for _ in range(_TRIES):
        with suppress(Gone):  # a copy has landed here, and may need what seemed to be garbage
            for count, rows in _trimmed(backend, tell):
                removed += count
                tell("data", removed, rows)
            return removed
    logger.info("data is freed by the next gc: copies go on landing here")
    return removed


def _trimmed(backend: Backend, tell: Progress) -> Iterator[tuple[int, int]]:
    """How many rows went, a few at a time, and how many there were."""
    with backend.reader() as reader:
        copied = reader.turnover().copied
        live = Live(reader, backend)
        live.mark_all(tell)
        items, blobs = live.dead_items(), iter(list(live.dead_blobs()))
        while True:
            trim = Trim(list(islice(items, _BATCH)), list(islice(blobs, _BATCH)), copied)
            if not trim.items and not trim.blobs:
                return
            yield backend.trim(trim), live.rows


class _Freeing:
    """Goes through the sessions, and frees those of several in one write."""

    def __init__(self, backend: Backend, tell: Progress) -> None:
        self._backend, self._tell = backend, tell
        self._checkpoints = self._sessions = 0
        self._held: dict[int, int] = {}  # by session, which may be looked at again
        self._sweeps: list[Sweep] = []
        self._moved: list[int] = []

    def run(self) -> Collected:
        wanted = sorted(self._wanted())
        total = len(wanted)
        for _ in range(_TRIES):
            for n, session in enumerate(wanted):
                self._tell("checkpoints", total - len(wanted) + n, total)
                self._session(session)
            self._flush()
            wanted, self._moved = sorted(set(self._moved)), []  # somebody saved; look again
            if not wanted:
                break
        self._tell("checkpoints", total, total)
        return Collected(self._checkpoints, self._sessions, 0, sum(self._held.values()))

    def _wanted(self) -> set[int]:
        """Sessions with something to free."""
        wanted: set[int] = set()
        with self._backend.reader() as reader:
            after = -1
            while page := reader.buried(after, _PAGE):
                wanted.update(pos >> records.SEQ_BITS for pos, _ in page)
                after = page[-1][0]
            name = records.deleted_name(0, b"")
            while rows := reader.sessions(name, _PAGE):
                wanted.update(n for n, raw, _ in rows if records.former_name(n, raw) is not None)
                name = rows[-1][1]
        return wanted

    def _session(self, session: int) -> None:
        with self._backend.reader() as reader:
            if reader.session_by_number(session) is None:
                return
            try:
                tree = Tree(reader, session)
            except UNREADABLE as e:
                logger.warning("nothing of session %d is freed: %s", session, e.message)
                return
            if not tree.due and tree.remove is None:
                self._held[session] = tree.held
                return
            self._sweeps.append(tree.sweep(reader))
        while tree.due:  # more than one write should free
            self._flush()
            if session in self._moved:
                return
            with self._backend.reader() as reader:
                self._sweeps.append(tree.sweep(reader))
        self._held[session] = tree.held
        count = sum([len(s.checkpoints) for s in self._sweeps])
        if count >= freeing.BATCH or len(self._sweeps) >= _MOST:
            self._flush()

    def _flush(self) -> None:
        sweeps, self._sweeps = self._sweeps, []
        if not sweeps:
            return
        done = self._backend.sweep(sweeps)
        for sweep, was_done in zip(sweeps, done, strict=True):
            if was_done:
                self._checkpoints += len(sweep.checkpoints)
                self._sessions += sweep.remove is not None
            else:
                self._moved.append(sweep.session)
