"""Search for checkpoints by their fields, and by text in their states.

Candidates come from the index with the fewest entries among those that the filters allow, newest
first, a page at a time. The record of each candidate is then checked against all filters. So memory
is bounded, other processes can write during a search, and a damaged index can hide a match but
never add a false one.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from holdfast import ids
from holdfast.errors import (
    UNREADABLE,
    CheckpointNotFound,
    Corrupt,
    InvalidRequest,
    require_count,
    require_text,
)
from holdfast.format import item_streams, msgpack, records, ropes, values
from holdfast.format.msgpack import FOLLOWING
from holdfast.format.nodes import DICT, RAW, Blob, Leaf, Node, Rope, Struct, parse
from holdfast.format.records import AGENT, LABEL, STATUS, TAG, TRIGGER
from holdfast.history import lineage
from holdfast.history.checkpoint import Checkpoint
from holdfast.intervals import IntervalSet
from holdfast.log import logger
from holdfast.model import STATUSES
from holdfast.storage.reader import open_reader
from holdfast.storage.repository import StoredData
from holdfast.storage.rows import Address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from holdfast.format.nodes import Extent
    from holdfast.model import Status
    from holdfast.storage.contract import Backend
    from holdfast.storage.reader import Reader


_FIRST_PAGE, _PAGE = 16, 128
_PROBE = 256
"""How many index entries are read per filter to find the filter with the fewest."""
_LEAD, _EXCERPT = 40, 160
"""Characters of an excerpt: before the text that was found, and in total."""
_LOWEST, _HIGHEST = b"", b"\xff" * (ids.BYTES + 1)


class Filters(TypedDict, total=False):
    """The filters that searches and lists of sessions share."""

    status: Status | None
    trigger: str | None
    tag: str | None
    label: str | None
    meta: Mapping[str, Any] | None
    since: dt.datetime | None
    until: dt.datetime | None


@dataclass(frozen=True, slots=True)
class Query:
    """The filters of a search. A checkpoint must match all that are given."""

    agent: str | None = None
    status: str | None = None
    trigger: str | None = None
    tag: str | None = None
    label: str | None = None
    meta: Mapping[str, Any] | None = None
    since: dt.datetime | None = None
    until: dt.datetime | None = None
    text: str | None = None

    @classmethod
    def of(cls, filters: Filters, *, agent: str | None = None, text: str | None = None) -> Query:
        """Return a query of these filters. Raises InvalidRequest if one is unknown."""
        unknown = filters.keys() - Filters.__annotations__.keys()
        if unknown:
            raise InvalidRequest(
                f"unknown filter {min(unknown)!r}", hint=", ".join(Filters.__annotations__)
            )
        return cls(agent, text=text, **filters)

    def check(self) -> None:
        for name in ("agent", "trigger", "tag", "label", "text"):
            value = getattr(self, name)
            if value is not None:
                require_text(name, value)
        if self.status is not None and self.status not in STATUSES:
            raise InvalidRequest(f"unknown status {self.status!r}", hint=", ".join(STATUSES))
        if self.meta is not None:
            if not hasattr(self.meta, "items"):
                raise InvalidRequest(f"meta must be a dict, not {self.meta!r}")
            if not all(type(key) is str for key in self.meta):
                raise InvalidRequest("the keys of meta must be strings")
        for name in ("since", "until"):
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, dt.datetime) or value.tzinfo is None:
                raise InvalidRequest(
                    f"{name} must be a datetime with a time zone, not {value!r}",
                    hint="datetime.now(UTC) - timedelta(days=1)",
                )

    def matches(self, c: Checkpoint) -> bool:
        """Return whether a checkpoint matches all filters except `text`."""
        meta = self.meta or {}
        return (
            self.agent in (None, c.agent)
            and self.status in (None, c.status)
            and self.trigger in (None, c.trigger)
            and self.label in (None, c.label)
            and (self.tag is None or self.tag in c.tags)
            and (self.since is None or c.created_at >= self.since)
            and (self.until is None or c.created_at < self.until)
            and (not meta or all(_same(c.meta.get(k, _NOTHING), v) for k, v in meta.items()))
        )

    def may_match(self, c: Checkpoint) -> bool:
        """Return whether it matches, or could match if its damaged marks were readable."""
        if c.damaged is None:
            return self.matches(c)
        return replace(self, tag=None, label=None).matches(c)

    def terms(self) -> list[tuple[int, bytes]]:
        """Return the index terms that every match has."""
        given = (
            (LABEL, self.label),
            (TAG, self.tag),
            (TRIGGER, self.trigger),
            (STATUS, None if self.status == "in_progress" else self.status),
        )
        return [(kind, records.encode_name(value)) for kind, value in given if value is not None]


_NOTHING = object()


def _same(a: Any, b: Any) -> bool:
    """Return whether two values are equal and have the same types at all depths."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(v, b[k]) for k, v in a.items())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


class Hit(NamedTuple):
    """A checkpoint that matches. `excerpt` is the text around the match, if text was searched."""

    checkpoint: Checkpoint
    excerpt: str | None


def search(
    backend: Backend,
    query: Query,
    before: str | Checkpoint | None = None,
    limit: int | None = None,
    session: str | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[Hit]:
    """Return the checkpoints that match, of one session or of all; see Store.search.

    Unreadable checkpoints are left out, with a warning in the log. Raises InvalidRequest if a
    filter is invalid.
    """
    query.check()
    if limit is not None:
        require_count("limit", limit, least=0)
    id = before.id if isinstance(before, Checkpoint) else before
    return islice(_Search(backend, query, stopped, session).run(id), limit)


class Cursor(NamedTuple):
    """The last candidate that was checked."""

    id: bytes
    place: Address | None = None


class _Search:
    def __init__(
        self, backend: Backend, query: Query, stopped: Callable[[], bool], session: str | None
    ) -> None:
        self._backend, self._query, self._stopped = backend, query, stopped
        self._session = session
        self._number: int | None = None
        self._marked: list[int] | None = None
        """Within one session: the seqs with the tag or label that are not yet checked."""
        self._text = _Text(query.text, stopped) if query.text is not None else None
        self._term: tuple[int, bytes] | None = None
        self._size = min(_FIRST_PAGE, _PAGE)
        """Candidates in the next page. Most callers want a few hits, so the first page is small."""

    def run(self, before: str | None) -> Iterator[Hit]:
        cursor = None if before is None else self._cursor(before)
        self._term = self._narrowest(cursor)
        while not self._stopped():
            with open_reader(self._backend) as reader:
                places, cursor = self._page(reader, cursor)
                try:
                    found = [hit for place in places if (hit := self._match(reader, place))]
                except _Stopped:
                    return
            yield from found
            if cursor is None:
                return

    def _cursor(self, before: str) -> Cursor:
        raw = ids.from_text(before) if isinstance(before, str) else None
        if raw is None:
            raise InvalidRequest(f"before must be the id of a checkpoint, not {before!r}")
        return Cursor(raw)

    def _narrowest(self, cursor: Cursor | None) -> tuple[int, bytes] | None:
        """Return the index term with the fewest candidates; None if there is no term."""
        terms = self._query.terms() if self._session is None else []
        if len(terms) < 2:
            return terms[0] if terms else None
        low, high = self._bounds(cursor)
        with open_reader(self._backend) as reader:
            return min(terms, key=lambda f: len(reader.find_terms(f[0], f[1], low, high, _PROBE)))

    def _page(
        self, reader: Reader, cursor: Cursor | None
    ) -> tuple[Sequence[Address], Cursor | None]:
        """Return a page of candidates, and the cursor for the next page; None after the last."""
        if self._session is not None:
            return self._in_session(reader, self._session, cursor)
        if self._term is None and self._query.agent is not None:
            return self._by_agent(reader, cursor)
        (low, high), size = self._bounds(cursor), self._size
        self._size = min(4 * size, _PAGE)
        if self._term is None:
            rows = reader.newest_ids(low, high, size)
            after = Cursor(rows[-1].id) if len(rows) == size else None
            return [row.address for row in rows], after
        found = reader.find_terms(*self._term, low, high, size)
        places = [row.address for id in found for row in reader.find_ids(id, id, 1)]
        return places, Cursor(found[-1]) if len(found) == size else None

    def _bounds(self, cursor: Cursor | None) -> tuple[bytes, bytes]:
        """Return the range of ids to search.

        Ids begin with a time: that of the checkpoint, or a later one if the clock was set back.
        """
        low = _LOWEST
        if self._query.since is not None:
            low = ids.lowest_at(int(self._query.since.timestamp() * 1000))
        return low, cursor.id if cursor else _HIGHEST

    def _by_agent(
        self, reader: Reader, cursor: Cursor | None
    ) -> tuple[Sequence[Address], Cursor | None]:
        """Return a page from the agent's sessions, newest session and newest checkpoint first."""
        agent = records.encode_name(self._query.agent or "")
        top, seq = b"\xff" * 8, records.MAX_SEQ
        if cursor is not None:
            place = self._place(reader, cursor)
            top, seq = (place.session + 1).to_bytes(8, "big"), place.seq - 1
        for number in reader.find_terms(AGENT, agent, b"", top, 2):
            session = int.from_bytes(number, "big")
            newest = lineage.newest(reader, session)
            high = min(seq, newest) if int.from_bytes(top, "big") == session + 1 else newest
            places, after = self._down(reader, session, high)
            if places:
                return places, after
        return [], None

    def _in_session(
        self, reader: Reader, name: str, cursor: Cursor | None
    ) -> tuple[Sequence[Address], Cursor | None]:
        """Return a page from one session, on all branches, newest first.

        Uses the session's marks if the query has a tag or label.
        """
        found = reader.session(records.encode_name(name))
        if found is None or self._number not in (None, found.number):  # a new session has the name
            return [], None
        number = self._number = found.number
        below = records.MAX_SEQ + 1
        if cursor is not None:
            place = self._place(reader, cursor)
            if place.session != number:
                raise InvalidRequest(
                    f"checkpoint {ids.to_text(cursor.id)} is of another session than {name!r}"
                )
            below = place.seq
        marks = [term for term in self._query.terms() if term[0] in (LABEL, TAG)]
        if not marks:
            return self._down(reader, number, min(below - 1, lineage.newest(reader, number)))
        if self._marked is None:
            rows = min([reader.find_marks(number, *mark) for mark in marks], key=len)
            self._marked = sorted(row.seq for row in rows if row.seq < below)
        page = self._marked[: -_PAGE - 1 : -1]
        del self._marked[-_PAGE:]
        places = [Address(number, seq) for seq in page]
        return places, Cursor(b"", places[-1]) if self._marked else None

    def _down(
        self, reader: Reader, session: int, high: int
    ) -> tuple[Sequence[Address], Cursor | None]:
        """Return a page of a session's checkpoints from seq `high` down. Seqs may be missing."""
        while high > 0:
            rows = reader.checkpoints(session, max(high - _PAGE + 1, 1), high, _PAGE)
            if rows:
                places = [Address(session, row.seq) for row in rows[::-1]]
                return places, Cursor(rows[0].id, places[-1])
            high -= _PAGE
        return [], None

    def _place(self, reader: Reader, cursor: Cursor) -> Address:
        if cursor.place is not None:
            return cursor.place
        found = reader.find_ids(cursor.id, cursor.id, 1)
        if not found:
            raise CheckpointNotFound(f"checkpoint {ids.to_text(cursor.id)} is gone")
        return found[0].address

    def _match(self, reader: Reader, place: Address) -> Hit | None:
        if lineage.is_checkpoint_deleted(reader, place):
            return None
        try:
            row = lineage.read_row(reader, place)
            checkpoint = lineage.to_checkpoint(reader, place, row.record)
            if not self._query.matches(checkpoint):
                if checkpoint.damaged and self._query.may_match(checkpoint):
                    raise Corrupt(checkpoint.damaged)
                return None
            excerpt = None
            if self._text is not None:
                excerpt = self._text.excerpt(row.node(), StoredData(self._backend, reader))
                if excerpt is None:
                    return None
        except UNREADABLE as e:
            logger.warning("a search left out checkpoint %d of a session: %s", place.seq, e.message)
            return None
        return Hit(checkpoint, excerpt)


class _Stopped(Exception):
    """The caller no longer wants the results."""


class _Text:
    """Searches states for a text. Each stored item is read once, even if many states share it."""

    def __init__(self, text: str, stopped: Callable[[], bool]) -> None:
        self._text, self._stopped = text, stopped
        self._bytes = records.encode_name(text)
        self._wholes: dict[bytes, str | None] = {}
        """Excerpts of values that are stored whole, by hash; None for one without the text."""
        self._items: dict[tuple[int, int], str] = {}
        """Excerpts of the items that have the text, by stream and position."""
        self._done: dict[int, IntervalSet] = {}
        """By stream: the items that were searched."""
        self._hits: dict[int, IntervalSet] = {}

    def excerpt(self, node: Node, source: StoredData) -> str | None:
        """Return the text around the first match in a state; None if there is none."""
        if isinstance(node, Leaf):
            return self._in_bytes(node.flat)
        if isinstance(node, Struct):
            keys = map(self._in_bytes, node.keys)
            return _first(chain(keys, (self.excerpt(child, source) for child in node.children)))
        if isinstance(node, Blob) or node.kind == RAW:
            if node.hash not in self._wholes:
                self._wholes[node.hash] = self._in_bytes(ropes.flatten(node, source))
            return self._wholes[node.hash]
        with FOLLOWING:
            return _first(self._in_items(node, extent, source) for extent in node.extents)

    def _in_items(self, rope: Rope, extent: Extent, source: StoredData) -> str | None:
        stream, first, count = extent
        hits = self._hits.setdefault(stream, IntervalSet())
        done = self._done.setdefault(stream, IntervalSet())
        for low, high in done.missing(first, first + count):
            at = low
            for piece in item_streams.pieces(source, [(stream, low, high - low)]):
                for item in piece.items():
                    if self._stopped():
                        raise _Stopped
                    found = self._in_item(rope, item, piece.refs, source)
                    if found is not None:
                        hits.add(at, at + 1)
                        self._items[stream, at] = found
                    at += 1
                    done.add(at - 1, at)
        return _first(self._items[stream, low] for low, _ in hits.within(first, first + count))

    def _in_item(self, rope: Rope, item: bytes, refs: bool, source: StoredData) -> str | None:  # noqa: FBT001
        if rope.kind == DICT:
            cut = msgpack.string_length(item, 0)
            if (found := self._in_bytes(item[:cut])) is not None:
                return found
            item = item[cut:]
        return self.excerpt(parse(item), source) if refs else self._in_bytes(item)

    def _in_bytes(self, flat: bytes) -> str | None:
        """Return the text around the first match in the strings of an encoded value."""
        return self._in_value(values.decode_stored(flat)) if self._bytes in flat else None

    def _in_value(self, value: Any) -> str | None:
        if isinstance(value, str):
            at = value.find(self._text)
            return _around(value, at, len(self._text)) if at >= 0 else None
        if isinstance(value, dict):
            return _first(map(self._in_value, chain.from_iterable(value.items())))
        if isinstance(value, list | tuple | set | frozenset):
            return _first(map(self._in_value, value))
        return None


def _first(found: Iterable[str | None]) -> str | None:
    return next((each for each in found if each is not None), None)


def _around(value: str, at: int, length: int) -> str:
    begin = max(at - _LEAD, 0)
    end = max(begin + _EXCERPT, at + min(length, 2 * _EXCERPT))
    return ("…" if begin else "") + value[begin:end] + ("…" if end < len(value) else "")
