"""Search for text in the states of checkpoints, and in the names of sessions.

A state holds the text of all checkpoints before it. So a hit is the checkpoint in which the text
came: its state has it where the state of its nearest ancestor has not. Candidates are all
checkpoints, newest first, or those that the search index names. Each candidate is read before it
becomes a hit. So a wrong index adds no hit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice
from typing import TYPE_CHECKING, Any

from holdfast.errors import require_text
from holdfast.format import records, state_paths
from holdfast.history import lineage
from holdfast.history.checkpoint import Checkpoint
from holdfast.history.filters import PAGE, PROBE, Cursor, Query, Scan, check
from holdfast.history.new_text import NewText, binary_ranges, new_texts
from holdfast.history.search_index import Candidates, open_candidates
from holdfast.history.sessions import describe, may_match
from holdfast.history.summary import with_summaries
from holdfast.log import logger
from holdfast.storage.reader import open_reader
from holdfast.storage.repository import StoredData
from holdfast.storage.search_index import IndexUnusable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from holdfast.format.nodes import Node
    from holdfast.format.records import Row
    from holdfast.storage.contract import Backend
    from holdfast.storage.reader import Reader
    from holdfast.storage.repository import Repository
    from holdfast.storage.rows import Address

_LEAD, _SNIPPET = 40, 160
"""Characters of a snippet: before the text that was found, and in total."""
_NAMES = 10
"""The most sessions that are found by their names."""
_NODES = 64
"""States that stay in memory, because the ancestor of a candidate is often the next candidate."""
_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


@dataclass(frozen=True, slots=True)
class SearchHit:
    """A place where a searched text was found."""

    session: str
    """The name of the session."""
    checkpoint: Checkpoint | None
    """The checkpoint in which the text came; None if it is in the name of the session."""
    path: tuple[Any, ...]
    """The place in the state: keys and positions. It ends with the key if that has the text."""
    snippet: str
    """The text that was found, and what is around it. Control characters are spaces."""
    start: int
    """The position in `snippet` at which the text that was found begins."""
    end: int
    """The text that was found is `snippet[start:end]`."""

    @property
    def where(self) -> str:
        """The path as text, such as "state.messages[3].content"; "" for the name of a session."""
        return "" if self.checkpoint is None else state_paths.dotted(self.path)


def search(
    repository: Repository,
    text: str,
    query: Query,
    *,
    case_sensitive: bool = False,
    before: str | Checkpoint | SearchHit | None = None,
    limit: int | None = None,
    session: str | None = None,
    stopped: Callable[[], bool] = lambda: False,
    summary: bool = False,
) -> Iterator[SearchHit]:
    """Return the hits of a text; see Store.search.

    Raises InvalidRequest if the text or a filter is invalid.
    """
    require_text("text", text)
    check(query, limit)
    at = before.checkpoint if isinstance(before, SearchHit) else before
    word, backend = Word(text, case_sensitive=case_sensitive), repository.backend
    scan = _TextScan(backend, query, session, word, stopped, limit)
    hits: Iterator[SearchHit] = islice(scan.run(at), limit)
    if summary:
        hits = _with_summaries(repository, hits)
    if before is not None or session is not None:
        return hits
    return chain(islice(_named(backend, word, query), _NAMES), hits)


def _with_summaries(repository: Repository, hits: Iterator[SearchHit]) -> Iterator[SearchHit]:
    for hit in hits:
        found = () if hit.checkpoint is None else (hit.checkpoint,)
        for checkpoint in with_summaries(repository, iter(found)):
            yield replace(hit, checkpoint=checkpoint)


def _named(backend: Backend, word: Word, query: Query) -> Iterator[SearchHit]:
    """Yield the sessions whose names have the text, in the order of the names."""
    after: bytes | None = None
    while True:
        with open_reader(backend) as reader:
            rows, found = reader.sessions(after, 1_000), []
            for row in rows:
                name = records.shown_name(row.name)
                if not word.is_in(name) or row.is_deleted:
                    continue
                at = word.find(name)
                if at is not None and may_match(describe(reader, row), query):
                    found.append(_hit(name, None, (), at))
        yield from found
        if not rows:
            return
        after = rows[-1].name


class Word:
    """A text to search for."""

    def __init__(self, text: str, *, case_sensitive: bool = False) -> None:
        self._case_sensitive = case_sensitive
        self._text = self._fold(text)
        self.folded = text.casefold()

    def is_in(self, text: str) -> bool:
        """Return whether a string may have the text."""
        return self._text in self._fold(text)

    def _fold(self, text: str) -> str:
        return text if self._case_sensitive else text.casefold()

    def find(self, text: str) -> _Found | None:
        """Return the first place of the text in a string."""
        return self.find_new(NewText((), text, 0, len(text)))

    def find_new(self, new: NewText) -> _Found | None:
        """Return the first place of the text that is new; None if it was there as often before.

        Bytes in base64 do not count.
        """
        text = new.text
        folded, before = self._fold(text), self._fold(new.before)
        if folded.count(self._text) <= before.count(self._text):
            return None
        at = folded.find(self._text)
        ends = None
        if len(folded) != len(text):  # such as "ß", which becomes "ss"
            ends = [*accumulate(len(c.casefold()) for c in text)]
        binary = binary_ranges(text)
        while at >= 0:
            start, end = _original(ends, at, at + len(self._text))
            is_new = start < new.high and end > new.low
            if is_new and not any(start < high and end > low for low, high in binary):
                return _Found(text, start, end)
            at = folded.find(self._text, at + 1)
        return None


def _original(ends: list[int] | None, start: int, end: int) -> tuple[int, int]:
    """Return a range of a folded text as a range of the text itself."""
    if ends is None:
        return start, end
    from bisect import bisect_left, bisect_right

    return bisect_right(ends, start), bisect_left(ends, end) + 1


@dataclass(frozen=True, slots=True)
class _Found:
    text: str
    start: int
    end: int


def _hit(
    session: str, checkpoint: Checkpoint | None, path: tuple[Any, ...], found: _Found
) -> SearchHit:
    begin = max(found.start - _LEAD, 0)
    end = max(begin + _SNIPPET, found.start + min(found.end - found.start, 2 * _SNIPPET))
    shown = _UNPRINTABLE.sub(" ", found.text[begin:end])
    cut = "…" if begin else ""
    snippet = cut + shown + ("…" if end < len(found.text) else "")
    start = found.start - begin + len(cut)
    shown_end = min(found.end - begin, len(shown)) + len(cut)
    return SearchHit(session, checkpoint, path, snippet, start, shown_end)


class _Stopped(Exception):
    """The caller no longer wants the results."""


class _TextScan(Scan[SearchHit]):
    """Searches candidates for a text. Uses the search index, if there is one."""

    def __init__(
        self,
        backend: Backend,
        query: Query,
        session: str | None,
        word: Word,
        stopped: Callable[[], bool],
        limit: int | None,
    ) -> None:
        super().__init__(backend, query, session)
        if limit is not None and query == Query():  # most candidates of the index are hits
            self._size = min(max(limit, 1), PAGE)
        self._word, self._stopped = word, stopped
        self._candidates: Candidates | None = None
        self._is_narrow: bool | None = None
        """Whether a filter leaves fewer candidates than the text probably does."""
        self._nodes: dict[bytes, Node] = {}

    def run(self, before: str | Checkpoint | None) -> Iterator[SearchHit]:
        self._candidates = open_candidates(self._backend, self._word.folded, self._session)
        try:
            yield from super().run(before)
        except _Stopped:
            return
        finally:
            if self._candidates is not None:
                self._candidates.close()

    def _page(
        self, reader: Reader, cursor: Cursor | None
    ) -> tuple[Sequence[Address], Cursor | None]:
        if self._is_narrow is None:
            self._is_narrow = self._filters_well(reader)
        if self._candidates is not None and not self._is_narrow:
            size, self._size = self._size, min(4 * self._size, PAGE)
            low, high = self._bounds(cursor)
            try:
                return self._candidates.page(reader, cursor, low, high, size)
            except IndexUnusable as e:
                logger.warning("the search goes on without its index: %s", e)
                self._candidates.close()
                self._candidates = None
        return super()._page(reader, cursor)

    def _filters_well(self, reader: Reader) -> bool:
        if self._session is not None:
            return self._query.label is not None or self._query.tag is not None
        if self._term is None:
            return False
        return len(reader.find_terms(*self._term, *self._bounds(None), PROBE)) < PROBE

    def _result(self, reader: Reader, place: Address, row: Row) -> SearchHit | None:
        if self._stopped():
            raise _Stopped
        checkpoint = None
        if self._query != Query():
            checkpoint = self._matching(reader, place, row)
            if checkpoint is None:
                return None
        found = self._find(reader, place, row)
        if found is None:
            return None
        checkpoint = checkpoint or self._matching(reader, place, row)
        return None if checkpoint is None else _hit(checkpoint.session, checkpoint, *found)

    def _find(
        self, reader: Reader, place: Address, row: Row
    ) -> tuple[tuple[Any, ...], _Found] | None:
        """Return the first place of the text that came with a checkpoint."""
        above = lineage.nearest_ancestor(reader, place, row.record)
        new, old = self._node(row), None
        is_own = above.place is not None and above.place.session == place.session
        if above.row is not None and (is_own or self._session is None):
            old = self._node(above.row)
        for text in new_texts(new, old, StoredData(self._backend, reader), self._is_wanted):
            found = self._word.find_new(text)
            if found is not None:
                return text.path, found
        return None

    def _is_wanted(self, text: str) -> bool:
        if self._stopped():
            raise _Stopped
        return self._word.is_in(text)

    def _node(self, row: Row) -> Node:
        found = self._nodes.get(row.record.id)
        if found is None:
            if len(self._nodes) >= _NODES:
                self._nodes.clear()
            found = self._nodes[row.record.id] = row.node()
        return found
