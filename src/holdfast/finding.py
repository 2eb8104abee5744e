"""Searching: checkpoints and sessions by what they say about themselves, and by their text.

Candidates come from the narrowest index that the filters allow, the newest first, a page at a time;
each is then held against all filters, by its record. So memory is bounded, others may write
meanwhile, and a damaged index can leave something out but never add what does not match.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast import ids, lineage
from holdfast.checkpoint import Checkpoint
from holdfast.codec import records, ropes, streams, values, wire
from holdfast.codec.depth import FOLLOWING
from holdfast.codec.nodes import DICT, RAW, Blob, Leaf, Node, Rope, Struct, parse
from holdfast.codec.records import AGENT, LABEL, STATUS, TAG, TRIGGER
from holdfast.errors import UNREADABLE, CheckpointNotFound, Corrupt, InvalidRequest
from holdfast.lineage import Place
from holdfast.live import Spans
from holdfast.logs import logger
from holdfast.model import STATUSES
from holdfast.source import StoredSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from holdfast.backends.base import Backend, Reader


_PAGE = 128
_PROBE = 256
"""How far the index is looked at to find out which of several filters is the narrowest."""
_LEAD, _EXCERPT = 40, 160
"""Characters of an excerpt before what was found, and in all."""
_LOWEST, _HIGHEST = b"", b"\xff" * (ids.BYTES + 1)


@dataclass(frozen=True, slots=True)
class Query:
    """What to look for; all that is given must hold."""

    agent: str | None = None
    status: str | None = None
    trigger: str | None = None
    tag: str | None = None
    label: str | None = None
    meta: Mapping[str, Any] | None = None
    since: dt.datetime | None = None
    until: dt.datetime | None = None
    text: str | None = None

    def check(self) -> None:
        for name in ("agent", "trigger", "tag", "label", "text"):
            value = getattr(self, name)
            if value is not None and (type(value) is not str or not value):
                raise InvalidRequest(f"{name} must be a non-empty string, not {value!r}")
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
        """Everything but the text."""
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
        """Whether it matches, or would if a mark were what cannot be read."""
        if c.damaged is None:
            return self.matches(c)
        return replace(self, tag=None, label=None).matches(c)

    def facets(self) -> list[tuple[int, bytes]]:
        """The entries of the index that all matches have."""
        given = (
            (LABEL, self.label),
            (TAG, self.tag),
            (TRIGGER, self.trigger),
            (STATUS, None if self.status == "in_progress" else self.status),
        )
        return [(kind, records.encode_name(value)) for kind, value in given if value is not None]


_NOTHING = object()


def _same(a: Any, b: Any) -> bool:
    """Equal, with the same types all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(v, b[k]) for k, v in a.items())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


def find(
    backend: Backend, query: Query, before: str | None = None, limit: int | None = None
) -> Iterator[Checkpoint]:
    """Checkpoints that match, from the one after `before` on, at most `limit`."""
    query.check()
    if limit is not None and (type(limit) is not int or limit < 0):
        raise InvalidRequest(f"limit must be a number from 0 on, not {limit!r}")
    return (hit.checkpoint for hit in islice(_Search(backend, query).run(before), limit))


class Hit(NamedTuple):
    """A checkpoint that was found, and the text around what was looked for, if that was text."""

    checkpoint: Checkpoint
    excerpt: str | None


def hits(
    backend: Backend,
    query: Query,
    before: str | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[Hit]:
    """What find() finds. It ends early once `stopped`, which is asked again and again."""
    query.check()
    return _Search(backend, query, stopped).run(before)


class Cursor(NamedTuple):
    """The last candidate that was looked at."""

    id: bytes
    place: Place | None = None


class _Search:
    def __init__(
        self, backend: Backend, query: Query, stopped: Callable[[], bool] = lambda: False
    ) -> None:
        self._backend, self._query, self._stopped = backend, query, stopped
        self._text = _Text(query.text, stopped) if query.text is not None else None
        self._facet: tuple[int, bytes] | None = None

    def run(self, before: str | None) -> Iterator[Hit]:
        cursor = None if before is None else self._cursor(before)
        self._facet = self._narrowest(cursor)
        while not self._stopped():
            with self._backend.reader() as reader:
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
        """Which entry of the index to go by: the one with the fewest candidates."""
        facets = self._query.facets()
        if len(facets) < 2:
            return facets[0] if facets else None
        low, high = self._bounds(cursor)
        with self._backend.reader() as reader:
            return min(facets, key=lambda f: len(reader.find_facets(f[0], f[1], low, high, _PROBE)))

    def _page(self, reader: Reader, cursor: Cursor | None) -> tuple[Sequence[Place], Cursor | None]:
        """Some candidates, and where to go on."""
        if self._facet is None and self._query.agent is not None:
            return self._by_agent(reader, cursor)
        low, high = self._bounds(cursor)
        if self._facet is None:
            rows = reader.newest_ids(low, high, _PAGE)
            after = Cursor(rows[-1][2]) if len(rows) == _PAGE else None
            return [Place(session, seq) for session, seq, _ in rows], after
        found = reader.find_facets(*self._facet, low, high, _PAGE)
        places = [
            Place(session, seq) for id in found for session, seq, _ in reader.find_ids(id, id, 1)
        ]
        return places, Cursor(found[-1]) if len(found) == _PAGE else None

    def _bounds(self, cursor: Cursor | None) -> tuple[bytes, bytes]:
        """Ids begin with the time, or with a later one if the clock was set back."""
        low = _LOWEST
        if self._query.since is not None:
            low = ids.lowest_at(int(self._query.since.timestamp() * 1000))
        return low, cursor.id if cursor else _HIGHEST

    def _by_agent(
        self, reader: Reader, cursor: Cursor | None
    ) -> tuple[Sequence[Place], Cursor | None]:
        """The sessions that the agent worked in, the newest first, each from its newest on."""
        agent = records.encode_name(self._query.agent or "")
        top, seq = b"\xff" * 8, records.MAX_SEQ
        if cursor is not None:
            place = cursor.place
            if place is None:
                found = reader.find_ids(cursor.id, cursor.id, 1)
                if not found:
                    raise CheckpointNotFound(f"checkpoint {ids.to_text(cursor.id)} is gone")
                place = Place(found[0][0], found[0][1])
            top, seq = (place.session + 1).to_bytes(8, "big"), place.seq - 1
        for number in reader.find_facets(AGENT, agent, b"", top, 2):
            session = int.from_bytes(number, "big")
            newest = lineage.newest(reader, session)
            high = min(seq, newest) if int.from_bytes(top, "big") == session + 1 else newest
            while high > 0:
                rows = reader.checkpoints(session, max(high - _PAGE + 1, 1), high, _PAGE)
                if rows:
                    places = [Place(session, s) for s, _, _ in rows[::-1]]
                    return places, Cursor(rows[0][1], places[-1])
                high -= _PAGE
        return [], None

    def _match(self, reader: Reader, place: Place) -> Hit | None:
        if lineage.is_buried(reader, place):
            return None
        try:
            row = lineage.read_row(reader, place)
            checkpoint = lineage.dress(reader, place, row.record)
            if not self._query.matches(checkpoint):
                if checkpoint.damaged and self._query.may_match(checkpoint):
                    raise Corrupt(checkpoint.damaged)
                return None
            excerpt = None
            if self._text is not None:
                source, node = StoredSource(self._backend, reader), row.node()
                if not self._text.within(node, source):
                    return None
                excerpt = self._text.excerpt(node)
        except UNREADABLE as e:
            logger.warning("a search left out checkpoint %d of a session: %s", place.seq, e.message)
            return None
        return Hit(checkpoint, excerpt)


class _Stopped(Exception):
    """Nobody waits for the answer any more."""


class _Text:
    """Looks for text in states. Each stored item is looked at once, however many states hold it."""

    def __init__(self, text: str, stopped: Callable[[], bool]) -> None:
        self._text, self._stopped = text, stopped
        self._found = ""
        """Around the text, where it was last seen."""
        self._said: dict[bytes | tuple[int, int], str] = {}
        """The same, by the hash of a value or the place of an item."""
        self._bytes = records.encode_name(text)
        self._done: dict[int, Spans] = {}
        self._hits: dict[int, Spans] = {}
        self._blobs: dict[bytes, bool] = {}

    def within(self, node: Node, source: StoredSource) -> bool:
        if isinstance(node, Leaf):
            return self._in_bytes(node.flat)
        if isinstance(node, Blob):
            if node.hash not in self._blobs:
                self._know(node.hash, self._in_bytes(source.blob(node.hash, node.size)))
            return self._blobs[node.hash]
        if isinstance(node, Struct):
            keys = any(self._in_bytes(key) for key in node.keys)
            return keys or any(self.within(child, source) for child in node.children)
        if node.kind == RAW:
            if node.hash not in self._blobs:
                self._know(node.hash, self._in_bytes(ropes.flatten(node, source)))
            return self._blobs[node.hash]
        with FOLLOWING:
            return any(self._in_items(node, extent, source) for extent in node.extents)

    def _know(self, hash: bytes, found: bool) -> None:  # noqa: FBT001
        self._blobs[hash] = found
        if found:
            self._said[hash] = self._found

    def excerpt(self, node: Node) -> str | None:
        """The text around the first hit in a state that was looked through."""
        if isinstance(node, Leaf):
            return self._found if self._in_bytes(node.flat) else None
        if isinstance(node, Struct):
            if any(self._in_bytes(key) for key in node.keys):
                return self._found
            return next((e for child in node.children if (e := self.excerpt(child))), None)
        if isinstance(node, Blob) or node.kind == RAW:
            return self._said.get(node.hash)
        for stream, first, count in node.extents:
            if stream in self._hits:
                for low, _ in self._hits[stream].within(first, first + count):
                    return self._said[stream, low]
        return None

    def _in_items(self, rope: Rope, extent: tuple[int, int, int], source: StoredSource) -> bool:
        stream, first, count = extent
        hits = self._hits.setdefault(stream, Spans())
        done = self._done.setdefault(stream, Spans())
        for low, high in done.missing(first, first + count):
            at = low
            for piece in streams.pieces(source, [(stream, low, high - low)]):
                begin = 0
                for end in piece.ends:
                    item = piece.data[begin : end - piece.base]
                    begin = end - piece.base
                    if self._stopped():
                        raise _Stopped
                    if self._in_item(rope, item, piece.refs, source):
                        hits.add(at, at + 1)
                        self._said[stream, at] = self._found
                    at += 1
                    done.add(at - 1, at)
        return bool(hits.within(first, first + count))

    def _in_item(self, rope: Rope, item: bytes, refs: bool, source: StoredSource) -> bool:  # noqa: FBT001
        if rope.kind == DICT:
            cut = wire.string_length(item, 0)
            if self._in_bytes(item[:cut]):
                return True
            item = item[cut:]
        return self.within(parse(item), source) if refs else self._in_bytes(item)

    def _in_bytes(self, flat: bytes) -> bool:
        """Whether an encoded value has the text in one of its strings."""
        return self._bytes in flat and self._in_value(values.decode(flat))

    def _in_value(self, value: Any) -> bool:
        if isinstance(value, str):
            at = value.find(self._text)
            if at >= 0:
                self._found = _around(value, at, len(self._text))
            return at >= 0
        if isinstance(value, dict):
            return any(self._in_value(k) or self._in_value(v) for k, v in value.items())
        if isinstance(value, list | tuple | set | frozenset):
            return any(self._in_value(v) for v in value)
        return False


def _around(value: str, at: int, length: int) -> str:
    begin = max(at - _LEAD, 0)
    end = max(begin + _EXCERPT, at + min(length, 2 * _EXCERPT))
    return ("…" if begin else "") + value[begin:end] + ("…" if end < len(value) else "")
