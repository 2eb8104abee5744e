"""Decide what the search index contains, and bring it up to date.

The index has a mark for each session: its head row, and a digest of which checkpoints are deleted.
Every change of a session changes its head row. So the sessions whose head rows differ from their
marks are those that are not complete in the index. A search checks their checkpoints one by one.
"""

from __future__ import annotations

import time
from contextlib import suppress
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from holdfast.errors import UNREADABLE, TooBig, Unavailable
from holdfast.format import records
from holdfast.history import lineage
from holdfast.history.filters import Cursor
from holdfast.history.new_text import binary_ranges, new_texts
from holdfast.intervals import IntervalSet
from holdfast.log import logger
from holdfast.storage.reader import open_reader
from holdfast.storage.repository import StoredData
from holdfast.storage.rows import PAGE, Address, IdRow
from holdfast.storage.search_index import (
    NONE,
    SHORTEST,
    UNKNOWN,
    Change,
    Document,
    IndexBusy,
    IndexUnusable,
    Mark,
    SearchIndex,
)
from holdfast.storage.url import drop_search_index, open_search_index

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from holdfast.history.new_text import NewText
    from holdfast.storage.contract import Backend
    from holdfast.storage.reader import Reader
    from holdfast.storage.rows import CheckpointRow

LONGEST = 1_000
"""Characters of a text that the index can find."""
_FEW, _MANY = 32, 10_000
"""A search checks up to a few new checkpoints itself. If more than many are left, it scans."""
_PATIENCE = 0.5
"""Seconds that a search takes to bring the index up to date, at most."""
_BATCH, _BATCH_TEXT = 200, 1 << 20
"""Checkpoints and characters of one write, about."""
_WHOLE = 1 << 28
"""Characters of a checkpoint's text that the index takes."""
_ROUNDS = 4
"""How often a change is tried again, because others have changed the store or the index."""
_HIGHEST = b"\xff" * 16


class IndexResult(NamedTuple):
    """The result of Store.index()."""

    checkpoints: int
    """Checkpoints that the index has now."""
    added: int
    """Checkpoints whose text was added, or added again."""
    removed: int
    """Deleted checkpoints whose text was removed."""


class _Plan(NamedTuple):
    """The part of a session that the index has not."""

    session: int
    mark: Mark | None
    head: bytes
    gone: IntervalSet
    digest: bytes
    low: int
    """The first seq to look at; 1 if the deleted checkpoints are not those of the mark."""
    last: int

    @property
    def is_changed(self) -> bool:
        """Return whether checkpoints may have other ancestors than when they were indexed."""
        return self.low == 1 and self.mark is not None


class Candidates:
    """The checkpoints that may have a text, by the index and its missing part."""

    def __init__(
        self, index: SearchIndex, text: str, session: str | None, plans: dict[int, _Plan]
    ) -> None:
        self._index, self._text, self._name, self._plans = index, text, session, plans
        self._rest: list[IdRow] | None = None
        """The candidates that the index has not, or all those of one session, in order."""

    def page(
        self, reader: Reader, cursor: Cursor | None, low: bytes, high: bytes, size: int
    ) -> tuple[Sequence[Address], Cursor | None]:
        """Return a page of candidates with low <= id < high, and the cursor for the next one."""
        if self._name is not None:
            return self._in_session(reader, self._name, cursor, size)
        if self._rest is None:
            rest = (row for plan in self._plans.values() for row in _rows(reader, plan))
            self._rest = sorted(rest, key=lambda row: row.id, reverse=True)
        found, more = self._index.find(self._text, high, size)
        end = max(found[-1].id, low) if more and found else low
        page = [row for row in found if not self._is_missing(row)]
        page += [row for row in self._rest if row.id < high]
        page = sorted({row for row in page if row.id >= end}, key=lambda row: row.id, reverse=True)
        return [row.address for row in page], Cursor(end) if end > low else None

    def _is_missing(self, row: IdRow) -> bool:
        plan = self._plans.get(row.session)
        return plan is not None and row.seq >= plan.low

    def _in_session(
        self, reader: Reader, name: str, cursor: Cursor | None, size: int
    ) -> tuple[Sequence[Address], Cursor | None]:
        if self._rest is None:
            found = reader.session(records.encode_name(name))
            if found is None:
                return [], None
            rows = self._index.find_in(self._text, found.number)
            rest = [row for row in rows if not self._is_missing(row)]
            if found.number in self._plans:
                rest += _rows(reader, self._plans[found.number])
            below = records.MAX_SEQ + 1
            if cursor is not None:
                place = lineage.find_id(reader, cursor.id)
                below = place.seq if place.session == found.number else 0
            self._rest = sorted({row for row in rest if row.seq < below}, key=lambda row: row.seq)
        page = self._rest[: -size - 1 : -1]
        del self._rest[-size:]
        return [row.address for row in page], Cursor(page[-1].id) if self._rest else None

    def close(self) -> None:
        self._index.close()


def _rows(reader: Reader, plan: _Plan) -> Iterator[IdRow]:
    """Yield the checkpoints of a plan that are not deleted."""
    for row in _unindexed(reader, plan, plan.low):
        yield IdRow(plan.session, row.seq, row.id)


def _unindexed(reader: Reader, plan: _Plan, low: int) -> Iterator[CheckpointRow]:
    while low <= plan.last:
        rows = reader.checkpoints(plan.session, low, plan.last, PAGE)
        yield from (row for row in rows if row.seq not in plan.gone)
        if len(rows) < PAGE:
            return
        low = rows[-1].seq + 1


# -- entry points ----------------------------------------------------------------------------------


def open_candidates(backend: Backend, text: str, session: str | None) -> Candidates | None:
    """Return the candidates for a folded text, by the index of a store.

    None if there is no index, or if a scan is better: for a text of one or two characters, and if
    the index has too little of the store.
    """
    if not SHORTEST <= len(text) <= LONGEST:
        return None
    index = None
    try:
        index = open_search_index(backend)
        if index is None:
            return None
        plans = _plans(backend, index)
        if not backend.read_only and len(plans) + _count(plans) >= _FEW:
            _Work(backend, index).bring_in(plans, until=time.monotonic() + _PATIENCE)
            plans = _plans(backend, index)
        if _count(plans) <= _MANY:
            return Candidates(index, text, session, plans)
    except IndexUnusable as e:
        logger.warning("a search uses no index: %s", e)
    if index is not None:
        index.close()
    return None


def _count(plans: dict[int, _Plan]) -> int:
    return sum(plan.last + 1 - plan.low for plan in plans.values())


def build(backend: Backend, progress: Callable[[int, int], None] | None = None) -> IndexResult:
    """Bring the index of a store up to date, and create it if needed; see Store.index."""
    if backend.read_only:
        raise Unavailable("the store was opened read-only", hint="open it without read_only")
    try:
        try:
            return _build(backend, progress)
        except IndexBusy:
            raise
        except IndexUnusable as e:
            logger.warning("the search index is replaced: %s", e)
            drop_search_index(backend)
            return _build(backend, progress)
    except IndexUnusable as e:
        raise Unavailable(f"the search index cannot be written: {e}") from e


def _build(backend: Backend, progress: Callable[[int, int], None] | None) -> IndexResult:
    index = open_search_index(backend, create=True)
    if index is None:
        raise IndexUnusable("it was removed")
    try:
        work = _Work(backend, index)
        for _ in range(_ROUNDS):
            if not (plans := _plans(backend, index)):
                break
            work.bring_in(plans, progress=progress)
        if work.added:
            index.compact()
        count = sum(len(index.known(session)) for session in index.marks())
        return IndexResult(count, work.added, work.removed)
    finally:
        index.close()


def drop(backend: Backend) -> bool:
    """Remove the index of a store. Return whether there was one."""
    if backend.read_only:
        raise Unavailable("the store was opened read-only", hint="open it without read_only")
    return drop_search_index(backend)


def forget(backend: Backend) -> bool:
    """Remove from the index, if there is one, what is deleted or freed. gc calls this.

    A damaged index is removed, because it may hold deleted text. Returns False if another process
    has locked it.
    """
    try:
        index = open_search_index(backend)
        if index is None:
            return True
        try:
            for session in index.marks():
                _forget(backend, index, session)
            index.compact(erase=True)
        finally:
            index.close()
    except IndexBusy as e:
        logger.warning("deleted text is still in the search index, which is locked: %s", e)
        return False
    except IndexUnusable as e:
        logger.warning("the search index is removed, because it cannot be used: %s", e)
        drop_search_index(backend)
    return True


def _forget(backend: Backend, index: SearchIndex, session: int) -> None:
    for _ in range(_ROUNDS):
        mark = index.marks().get(session)
        with open_reader(backend) as reader:
            gone, forks = _gone(reader, session), [*lineage.all_forks(reader, session)]
        if mark is None or mark.gone == _digest(gone):
            return
        known = index.known(session)
        remove = [seq for seq in known if seq in gone]
        there = Mark(b"", b"", 0, b"") if len(remove) < len(known) else None
        if not remove or index.write(Change(session, mark, there, (), remove, forks)):
            return
    raise IndexBusy("other processes change it all the time")


# -- bringing the index up to date -----------------------------------------------------------------


_last_plans: WeakKeyDictionary[Backend, tuple[object, dict[int, _Plan]]] = WeakKeyDictionary()
"""The plans of the last search, with the versions of the store and of its index."""


def _plans(backend: Backend, index: SearchIndex) -> dict[int, _Plan]:
    """Return what the index has not, by session."""
    version = backend.version(), index.version()
    known, plans = _last_plans.get(backend, (None, {}))
    if known != version or version[1] is None:
        plans = _new_plans(backend, index)
        _last_plans[backend] = version, plans
    return plans


def _new_plans(backend: Backend, index: SearchIndex) -> dict[int, _Plan]:
    marks, plans = index.marks(), dict[int, _Plan]()
    with open_reader(backend) as reader:
        tip = index.tip()
        is_ours = not tip or bool(reader.find_ids(tip, tip, 1))  # or an older copy of the store
        left = set(marks)
        for session, head in _heads(reader):
            left.discard(session)
            mark = marks.get(session)
            if mark is not None and not is_ours and not _is_at(reader, session, mark):
                plans[session] = _plan(reader, session, head, mark, trust=False)
            elif mark is None or mark.head != head:
                plans[session] = _plan(reader, session, head, mark)
        for session in left:  # freed
            plans[session] = _plan(reader, session, b"", marks[session])
        for plan in [plan for plan in plans.values() if plan.is_changed]:
            for fork in lineage.all_forks(reader, plan.session):
                if fork in marks and not (fork in plans and plans[fork].low == 1):
                    head = reader.head(fork) or b""
                    plans[fork] = _plan(reader, fork, head, marks[fork], trust=False)
    return plans


def _heads(reader: Reader) -> Iterator[tuple[int, bytes]]:
    after = -1
    while rows := reader.heads(after, PAGE):
        yield from rows
        after = rows[-1].session


def _is_at(reader: Reader, session: int, mark: Mark) -> bool:
    """Return whether a mark is of this store, not of another one with equal head rows."""
    found = reader.checkpoint(session, mark.last)
    return found is not None and found.id == mark.id


def _plan(
    reader: Reader, session: int, head: bytes, mark: Mark | None, *, trust: bool = True
) -> _Plan:
    gone = _gone(reader, session)
    digest = _digest(gone)
    last = 0 if 0 in gone else lineage.newest(reader, session)
    low = mark.last + 1 if mark is not None and mark.gone == digest and trust else 1
    return _Plan(session, mark, head, gone, digest, low, last)


def _digest(gone: IntervalSet) -> bytes:
    return sha256(repr(gone.all()).encode()).digest()


def _gone(reader: Reader, session: int) -> IntervalSet:
    """Return the seqs that are deleted or freed. 0 is one of them if the whole session is."""
    found = reader.session_by_number(session)
    if found is None or found.is_deleted:
        return IntervalSet([(0, records.MAX_SEQ + 1)])
    gone = IntervalSet.of(row.seq for row in reader.tombstones(session, 0, records.MAX_SEQ))
    with suppress(*UNREADABLE):
        gone.update(lineage.freed(reader, session))
    return gone


class _Work:
    """Brings an index up to date, a batch at a time."""

    def __init__(self, backend: Backend, index: SearchIndex) -> None:
        self._backend, self._index = backend, index
        self.added = self.removed = 0

    def bring_in(
        self,
        plans: dict[int, _Plan],
        *,
        until: float | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Do what is planned. Ends early at the time `until`."""
        queue = dict(plans)
        while queue:
            session = next(iter(queue))
            if not self._session(queue, session, until):
                return
            del queue[session]
            if progress is not None:
                progress(len(plans) - len(queue), len(plans))
        with open_reader(self._backend) as reader:
            for row in reader.newest_ids(b"", _HIGHEST, 1):
                self._index.set_tip(row.id)

    def _session(self, queue: dict[int, _Plan], session: int, until: float | None) -> bool:
        """Bring in one session. Return False if the time is over."""
        plan = queue[session]
        known = self._index.known(session) if plan.low == 1 else {}
        is_new, low, expect = not known, plan.low, plan.mark
        while True:
            with open_reader(self._backend) as reader:
                documents, following = self._batch(reader, plan, low, known)
                end = reader.checkpoint(session, (following or plan.last + 1) - 1)
                stale = lineage.all_forks(reader, session) if plan.is_changed else set()
            id = end.id if end else b""
            if following is None:
                mark = Mark(plan.head, plan.digest, plan.last, id) if plan.head else None
                change = Change(session, expect, mark, documents, [*known], [*stale])
            elif is_new:  # or the rest of a session
                mark = Mark(b"", plan.digest, following - 1, id)
                change = Change(session, expect, mark, documents)
            else:
                mark = Mark(b"", b"", 0, b"")
                change = Change(session, expect, mark, documents)
            if not self._index.write(change):
                return True  # another process is at it
            self.added += len(documents)
            if following is None:
                self.removed += len(known)
                for fork in stale & queue.keys():
                    if (old := queue[fork].mark) is not None:
                        queue[fork] = queue[fork]._replace(mark=old._replace(head=b"", gone=b""))
                return True
            if until is not None and time.monotonic() > until:
                return False
            low, expect = following, mark

    def _batch(
        self, reader: Reader, plan: _Plan, low: int, known: dict[int, tuple[bytes, int]]
    ) -> tuple[list[Document], int | None]:
        """Return the next documents, and the seq to continue at, which is None at the end.

        Documents that the index has already are removed from `known`.
        """
        documents: list[Document] = []
        source, room = StoredData(self._backend, reader), _BATCH_TEXT
        for n, row in enumerate(_unindexed(reader, plan, low)):
            if room <= 0 or n >= _BATCH:
                return documents, row.seq
            document = _document(reader, source, plan.session, row, known.pop(row.seq, None))
            if document is not None:
                documents.append(document)
                room -= len(document.text or "")
        return documents, None


def _document(
    reader: Reader,
    source: StoredData,
    session: int,
    row: CheckpointRow,
    known: tuple[bytes, int] | None,
) -> Document | None:
    """Return the document of a checkpoint; None if the index has it already."""
    place = Address(session, row.seq)
    try:
        read = records.unseal_checkpoint(session, *row)
        above = lineage.nearest_ancestor(reader, place, read.record)
        if not above.sure:
            return Document(row.seq, row.id, UNKNOWN, None)
        ancestor = NONE if above.place is None else records.position(*above.place)
        if known == (row.id, ancestor):
            return None
        old = None if above.row is None else above.row.node()
        texts, size = [], 0
        for new in new_texts(read.node(), old, source):
            texts.append(_indexed(new))
            size += len(texts[-1])
            if size > _WHOLE:
                return Document(row.seq, row.id, UNKNOWN, None)
        return Document(row.seq, row.id, ancestor, "\x1f".join(texts))
    except (*UNREADABLE, TooBig):
        return Document(row.seq, row.id, UNKNOWN, None)


def _indexed(new: NewText) -> str:
    """Return the part of a string in which a text can be new, in the form that is searched."""
    at, end = max(new.low - LONGEST, 0), new.high + LONGEST
    kept = []
    for start, stop in [*binary_ranges(new.text), (end, end)]:
        kept.append(new.text[at : max(min(start, end), at)])
        at = max(at, stop)
    return "\x1f".join(kept).casefold()
