"""Copying sessions to another store: every record as it is, all data once.

Records keep their ids, numbers and hashes. What depends on the store they lie in (the numbers of
sessions and streams, digests over addresses) is made anew. A session that is there already gets
what it lacks; so a copy that was interrupted goes on, and one that is complete changes nothing.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import ormsgpack
from ormsgpack import Ext

from holdfast import lineage
from holdfast.backends.base import Change, Copied, Moved, Notes
from holdfast.codec import records, streams, values, wire
from holdfast.codec.nodes import BLOB_TAG, DICT, RAW, ROPE_TAG, parse_blob, parse_rope
from holdfast.codec.records import AGENT, MAX_SEQ, Head, Info, position
from holdfast.codec.streams import RowWrite
from holdfast.errors import UNREADABLE, Conflict, InvalidRequest
from holdfast.live import Spans, all_rows
from holdfast.source import StoredSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from holdfast.backends.base import Backend, Reader
    from holdfast.codec.nodes import Extent, Rope
    from holdfast.codec.records import Row
    from holdfast.store import Store

    Progress = Callable[[int, int], None]
    _Part = tuple[list[RowWrite], list[tuple[bytes, bytes, bool]]]

_CHUNK_BYTES, _CHUNK_ROWS = 8 << 20, 2_000
_PAGE = 1_000


class Transferred(NamedTuple):
    """What a copy has done."""

    sessions: int
    """Sessions that got something."""
    checkpoints: int
    known: int
    """Checkpoints that were there already."""
    skipped: tuple[tuple[str, str], ...]
    """Sessions that were left alone, and why."""


def transfer(
    source: Backend, target: Store, names: Iterable[str] | None, progress: Progress | None
) -> Transferred:
    if source is target.backend:
        raise InvalidRequest("a store cannot be copied to itself")
    with source.reader() as reader:
        numbers = _wanted(reader, names)
        copy = _Copy(source, reader, target)
        skipped: list[tuple[str, str]] = []
        for done, number in enumerate(numbers):
            if progress is not None:
                progress(done, len(numbers))
            try:
                copy.session(number)
            except (*UNREADABLE, Conflict) as e:
                skipped.append((_shown(reader, number), e.message))
        if progress is not None:
            progress(len(numbers), len(numbers))
    return Transferred(copy.sessions, copy.checkpoints, copy.known, tuple(skipped))


def _shown(reader: Reader, number: int) -> str:
    name, _ = reader.session_by_number(number) or (b"", b"")
    return records.shown_name(records.former_name(number, name) or name)


def _wanted(reader: Reader, names: Iterable[str] | None) -> list[int]:
    """Sessions to copy, each after the one that it was forked from, which comes along."""
    if isinstance(names, str):
        raise InvalidRequest("sessions must be a list of names, not a string")
    chosen: list[int] = []
    if names is not None:
        chosen = [lineage.find_session(reader, name) for name in names]
    else:
        after: bytes | None = None
        while page := reader.sessions(after, _PAGE):
            chosen += [n for n, raw, _ in page if records.former_name(n, raw) is None]
            after = page[-1][1]
    order: dict[int, None] = {}
    for number in chosen:
        line = [number]
        while (above := _origin(reader, line[-1])) is not None and above not in order:
            line.append(above)
        order |= dict.fromkeys(reversed(line))
    return list(order)


def _origin(reader: Reader, number: int) -> int | None:
    """The session that one was forked from, if that is still there."""
    found = reader.session_by_number(number)
    with suppress(*UNREADABLE):
        if found is not None:
            where = records.unseal_session(number, *found).origin
            if where is not None and reader.session_by_number(where >> records.SEQ_BITS):
                return where >> records.SEQ_BITS
    return None


class _Copy:
    """What is known of both stores while sessions are copied."""

    def __init__(self, source: Backend, reader: Reader, target: Store) -> None:
        self._reader, self._target = reader, target
        self._data = StoredSource(source, reader)
        self._sessions: dict[int, int] = {}
        self._failed: set[int] = set()
        self._streams: dict[int, int] = {}
        self._spans: dict[int, Spans] = {}
        """By stream: what of it the other store has."""
        self.blobs: set[bytes] = set()
        self.sessions = self.checkpoints = self.known = 0

    def session(self, number: int) -> None:
        self._failed.add(number)  # until it is done
        self._session(number)
        self._failed.discard(number)

    def _session(self, number: int) -> None:
        name, row = self._reader.session_by_number(number) or (b"", b"")
        info = records.unseal_session(number, name, row)
        if info.origin is not None and info.origin >> records.SEQ_BITS in self._failed:
            raise Conflict("the session that it was forked from was not copied")
        _, head = lineage.read_head(self._reader, number)
        found = {
            seq: records.unseal_checkpoint(number, seq, id, body)
            for seq, id, body in all_rows(self._reader, number)
        }
        former = records.former_name(number, name)
        with self._target.backend.reader() as there:
            known = _counterpart(there, name, former, found)
            here = known or self._target.new_session()
            self._sessions[number] = here
            has = self._compare(there, number, here, found) if known else set()
            expect = there.head(here) if known else None
            new = [found[seq] for seq in sorted(found.keys() - has)]
            self.known += len(has)
            load = _Load(self, found.get(head.last))
            for each in new:
                load.root(each.root)
            if former is not None and known and lineage.is_deleted(there, here) is False:
                # Deleted here since: there it lives on, with what is new for its forks.
                head = records.unseal_head(here, expect or b"")._replace(last=head.last)
            notes = self._notes(there, number, here, found, head)
        if former is not None:
            name = records.deleted_name(here, former)
        created = Info(info.created_us, info.agent, self._place(info.origin))
        create = None if known else (name, records.seal_session(here, name, created))
        final = head.seal(here)
        if new or expect != final or _says(notes):
            self._write(here, create, expect or b"", final, load, new, notes)
            self.sessions += 1
            self.checkpoints += len(new)

    def _write(
        self,
        here: int,
        create: tuple[bytes, bytes] | None,
        expect: bytes,
        final: bytes,
        load: _Load,
        new: list[Row],
        notes: Notes,
    ) -> None:
        """Data first, a bounded part at a time; then all records at once."""
        origin = notes.origin
        at = expect
        part: _Part = ([], [])
        for following in load.parts():
            if part != ([], []):
                head = at or Head(0, 0, 0, None).seal(here)
                self._commit(Change(here, at, head, create, None, *part, Notes(origin=origin)))
                create, at, origin = None, head, None
            part = following
        notes.origin = origin
        notes.copied = Copied(
            [self._checkpoint(here, row) for row in new],
            notes.copied.operations if notes.copied else (),
            notes.copied.gaps if notes.copied else (),
        )
        self._commit(Change(here, at, final, create, None, *part, notes))
        load.done()

    def _commit(self, change: Change) -> None:
        try:
            self._target.backend.commit(change)
        except Moved:
            raise Conflict("somebody else writes to the session in the other store") from None

    def _compare(
        self, there: Reader, number: int, here: int, found: dict[int, Row]
    ) -> set[int]:
        """Seqs that both have; Conflict if the other store has something else."""
        has = set()
        gone = Spans()
        for low, high in lineage.freed(self._reader, number):
            gone.add(low, high)
        pairing = _Pairing(self, StoredSource(self._target.backend, there))
        for seq, id, body in all_rows(there, here):
            row = found.get(seq)
            other = records.unseal_checkpoint(here, seq, id, body)
            if row is None and gone.within(seq, seq + 1):
                continue  # freed here since, and kept there
            if row is None or row.record.id != id or row.record.hash != other.record.hash:
                raise Conflict(f"the other store has another checkpoint {seq} of the session")
            pairing.roots(row, other)
            has.add(seq)
        return has

    def _checkpoint(self, here: int, row: Row) -> tuple[int, bytes, bytes]:
        r = row.record
        line, root = self.stream(row.line), self.remapped(row.root)
        body = records.seal_checkpoint(
            here, r.seq, r.id, row.meta, r.hash, line, r.size, r.added, root, r.skip
        )
        return r.seq, r.id, body

    def _place(self, at: int | None) -> int | None:
        """A position in the other store. What is gone here gets a number that stays nobody's."""
        if at is None:
            return None
        session = at >> records.SEQ_BITS
        if session not in self._sessions:
            self._sessions[session] = self._target.new_session()
        return position(self._sessions[session], at & MAX_SEQ)

    def _notes(
        self, there: Reader, number: int, here: int, found: dict[int, Row], head: Head
    ) -> Notes:
        """What the session has besides its checkpoints, where the other store has it not."""
        reader = self._reader
        notes = Notes()
        name, row = reader.session_by_number(number) or (b"", b"")
        where = self._place(records.unseal_session(number, name, row).origin)
        if where is not None:
            notes.origin = lineage.place_at(where)
        agents: set[str] = set()
        facets: list[tuple[int, bytes, bytes]] = []
        keys: list[tuple[bytes, int]] = []
        for seq, each in found.items():
            r = each.record
            facets += records.facets(r.id, r.extra)
            if "agent" in r.extra:
                agents.add(r.extra["agent"])
            key = records.encode_name(r.extra["key"]) if "key" in r.extra else None
            if key is not None and reader.find_key(number, key) == seq:
                keys.append((key, seq))
        marks, before = [], {m[:3]: m[3] for m in there.marks(here, 1, MAX_SEQ)}
        for seq, kind, value, body in reader.marks(number, 1, MAX_SEQ):
            order = records.unseal_mark(position(number, seq), kind, value, body)
            marks.append(
                (seq, kind, value, records.seal_mark(position(here, seq), kind, value, order))
            )
            if seq in found:
                facets.append((kind, value, found[seq].record.id))
        facets += [(AGENT, records.encode_name(a), here.to_bytes(8, "big")) for a in agents]
        known = {mark[:3] for mark in marks}
        notes.marks = [mark for mark in marks if before.get(mark[:3]) != mark[3]]
        notes.unmarks = [mark for mark in before if mark not in known]
        notes.unfacets = [
            (kind, value, found[seq].record.id)
            for seq, kind, value in notes.unmarks
            if seq in found
        ]
        notes.facets = [f for f in facets if not _has_facet(there, f)]
        notes.keys = [(key, seq) for key, seq in keys if there.find_key(here, key) != seq]
        self._buried(notes, there, number, here)
        operations = dict(there.operations(here, 1, MAX_SEQ))
        copied = Copied(
            operations=[
                (n, body)
                for n, body in self._operations(number, here, head)
                if operations.get(n) != body
            ],
            gaps=self._gaps(there, number, here, found),
        )
        notes.copied = copied
        return notes

    def _buried(self, notes: Notes, there: Reader, number: int, here: int) -> None:
        buried = dict(there.tombs(here, 1, MAX_SEQ))
        tombs = []
        for seq, body in self._reader.tombs(number, 1, MAX_SEQ):
            tomb = records.unseal_tomb(number, seq, body)
            tombs.append((seq, records.seal_tomb(here, seq, tomb)))
        notes.tombs = [(seq, body) for seq, body in tombs if buried.get(seq) != body]
        notes.untombs = [seq for seq in buried if seq not in dict(tombs)]

    def _operations(self, number: int, here: int, head: Head) -> Iterator[tuple[int, bytes]]:
        for n, body in self._reader.operations(number, 1, head.operations):
            kind, created, last, details = records.unseal_operation(number, n, body)
            yield n, records.seal_operation(here, n, kind, created, last, details)

    def _gaps(
        self, there: Reader, number: int, here: int, found: dict[int, Row]
    ) -> list[tuple[int, int | None, bytes]]:
        """What is known of those that are gone; the other store may have them still."""
        out: list[tuple[int, int | None, bytes]] = []
        known = dict(there.gaps(here, 0, MAX_SEQ))
        for seq, body in self._reader.gaps(number, 0, MAX_SEQ):
            if seq == 0:
                freed = Spans.of(
                    n
                    for low, high in records.unseal_freed(number, body)
                    for n in range(low, high)
                    if there.checkpoint(here, n) is None
                )
                out.append((0, None, records.seal_freed(here, freed.all())))
                continue
            gap = records.unseal_gap(number, seq, body)
            if self._has_parent(there, here, found[seq]):
                continue
            gap = gap._replace(ancestor=self._place(gap.ancestor))
            out.append((seq, gap.ancestor, records.seal_gap(here, seq, gap)))
        return [gap for gap in out if known.get(gap[0]) != gap[2]]

    def _has_parent(self, there: Reader, here: int, row: Row) -> bool:
        """Whether the other store has kept the parent of a checkpoint."""
        r = row.record
        if r.parent_seq is None:
            return False
        place = lineage.Place(here, r.parent_seq)
        if "origin" in r.extra:
            known = there.session_by_number(here)
            where = records.unseal_session(here, *known).origin if known else None
            if where is None:
                return False
            place = lineage.place_at(where)
        kept = there.checkpoint(*place)
        return kept is not None and kept[0] == r.parent

    # -- data ----------------------------------------------------------------------------------

    def stream(self, stream: int) -> int:
        if stream not in self._streams:
            self._streams[stream] = self._target.new_stream()
        return self._streams[stream]

    def same_stream(self, stream: int, other: int) -> None:
        self._streams[stream] = other

    def spans(self, stream: int) -> Spans:
        return self._spans.setdefault(stream, Spans())

    def remapped(self, stored: bytes) -> bytes:
        """A stored encoding with the other store's numbers in its references."""

        def follow(tag: int, data: bytes) -> Ext:
            if tag != ROPE_TAG:
                return Ext(tag, data)
            rope = ormsgpack.unpackb(data)
            tails, extents = rope[6], rope[7]
            for i in range(0, len(tails), 6):
                tails[i : i + 2] = [self.stream(tails[i]), self.stream(tails[i + 1])]
            for i in range(0, len(extents), 3):
                extents[i] = self.stream(extents[i])
            return Ext(tag, ormsgpack.packb(rope))

        return ormsgpack.packb(values.decode(stored, follow), None, values.PACK)

    def items(self, stream: int, low: int, high: int) -> tuple[list[bytes], bool]:
        """Items, and whether any may hold references."""
        return _items(self._data, [(stream, low, high - low)])

    def blob_row(self, digest: bytes, size: int) -> bytes:
        self._data.blob(digest, size)  # which checks it
        return self._reader.blob(digest) or b""


def _says(notes: Notes) -> bool:
    """Whether there is anything to note."""
    copied = notes.copied or Copied()
    return any(
        (
            notes.marks, notes.unmarks, notes.facets, notes.keys, notes.tombs, notes.untombs,
            copied.operations, copied.gaps,
        )
    )  # fmt: skip


def _has_facet(reader: Reader, facet: tuple[int, bytes, bytes]) -> bool:
    kind, value, id = facet
    return reader.find_facets(kind, value, id, id + b"\0", 1) == [id]


def _items(source: StoredSource, extents: Sequence[Extent]) -> tuple[list[bytes], bool]:
    refs = False
    out: list[bytes] = []
    for piece in streams.pieces(source, extents):
        refs = refs or piece.refs
        starts = pairwise([piece.base, *piece.ends])
        out += [piece.data[a - piece.base : b - piece.base] for a, b in starts]
    return out, refs


def _counterpart(
    there: Reader, name: bytes, former: bytes | None, found: dict[int, Row]
) -> int | None:
    """The session's number in the other store, if it is there; a deleted one may live there."""
    known = there.session(former or name)
    if former is None or (known and _is_same(there, known[0], found)):
        return known[0] if known else None
    after = records.deleted_name(0, b"")
    while page := there.sessions(after, _PAGE):
        for number, raw, _ in page:
            if records.former_name(number, raw) == former and _is_same(there, number, found):
                return number
        after = page[-1][1]
    return None


def _is_same(there: Reader, number: int, found: dict[int, Row]) -> bool:
    held = {seq: id for seq, id, _ in all_rows(there, number)}
    return any(held.get(seq) == row.record.id for seq, row in found.items())


class _Load:
    """The data that the new checkpoints of a session refer to."""

    def __init__(self, copy: _Copy, newest: Row | None) -> None:
        self._copy = copy
        self._ranges: dict[int, tuple[int, Spans]] = {}
        """By stream: the kind of its items, and which are needed."""
        self._cuts: dict[int, set[int]] = {}
        """Where a row must begin: the newest checkpoint's streams go on from there."""
        self._blobs: dict[bytes, int] = {}
        self._line = newest.line if newest else None

    def root(self, stored: bytes) -> None:
        values.decode(stored, self._follow)

    def _follow(self, tag: int, data: bytes) -> None:
        if tag == BLOB_TAG:
            blob = parse_blob(data)
            if blob.hash not in self._copy.blobs:
                self._blobs[blob.hash] = blob.size
        elif tag == ROPE_TAG:
            rope = parse_rope(data)
            for tail in rope.tails:
                if tail.line == self._line:
                    self._cuts.setdefault(tail.stream, set()).update((tail.small, tail.loose))
                    self._need(rope, tail.stream, tail.small, tail.end)
            for stream, first, count in rope.extents:
                self._need(rope, stream, first, first + count)

    def _need(self, rope: Rope, stream: int, low: int, high: int) -> None:
        if low >= high:
            return
        kind, spans = self._ranges.setdefault(stream, (rope.kind, Spans()))
        lacking = self._copy.spans(stream).missing(low, high)
        for start, stop in [new for part in lacking for new in spans.add(*part)]:
            if kind == RAW:
                continue
            items, refs = self._copy.items(stream, start, stop)
            for item in items if refs else ():
                cut = wire.string_length(item, 0) if kind == DICT else 0
                values.decode(item[cut:], self._follow)

    def done(self) -> None:
        """It is in the other store now."""
        self._copy.blobs.update(self._blobs)
        for stream, (_, spans) in self._ranges.items():
            for span in spans.all():
                self._copy.spans(stream).add(*span)

    def parts(self) -> Iterator[_Part]:
        """Rows and blobs, in bounded parts."""
        held: list[RowWrite] = []
        blobs: list[tuple[bytes, bytes, bool]] = []
        size = 0
        for row in self._rows():
            held.append(row)
            size += len(row.body)
            if size > _CHUNK_BYTES or len(held) >= _CHUNK_ROWS:
                yield held, blobs
                held, blobs, size = [], [], 0
        for digest, length in self._blobs.items():
            body = self._copy.blob_row(digest, length)
            blobs.append((digest, body, False))
            size += len(body)
            if size > _CHUNK_BYTES:
                yield held, blobs
                held, blobs, size = [], [], 0
        yield held, blobs

    def _rows(self) -> Iterator[RowWrite]:
        for stream, (kind, spans) in sorted(self._ranges.items()):
            new = self._copy.stream(stream)
            cuts = self._cuts.get(stream, set())
            for low, high in spans.all():
                edges = sorted({low, high} | {cut for cut in cuts if low < cut < high})
                for start, stop in pairwise(edges):
                    for at in range(start, stop, streams.PACK_ITEMS):
                        end = min(at + streams.PACK_ITEMS, stop)
                        yield from self._packed(kind, (stream, at, end), new)

    def _packed(self, kind: int, part: tuple[int, int, int], new: int) -> Iterator[RowWrite]:
        stream, low, high = part
        items, refs = self._copy.items(stream, low, high)
        if refs and kind != RAW:
            for n, item in enumerate(items):
                cut = wire.string_length(item, 0) if kind == DICT else 0
                items[n] = item[:cut] + self._copy.remapped(item[cut:])
        yield from streams.packs(new, low, items, [], refs=refs)


class _Pairing:
    """Which streams of two stores are the same, from checkpoints that both have."""

    def __init__(self, copy: _Copy, theirs: StoredSource) -> None:
        self._copy, self._theirs = copy, theirs

    def roots(self, ours: Row, theirs: Row) -> None:
        self._copy.same_stream(ours.line, theirs.line)
        self._pair(ours.root, theirs.root)

    def _pair(self, ours: bytes, theirs: bytes) -> None:
        for (tag, mine), (_, other) in zip(_references(ours), _references(theirs), strict=True):
            if tag == ROPE_TAG:
                self._ropes(parse_rope(mine), parse_rope(other))
            elif tag == BLOB_TAG:
                self._copy.blobs.add(parse_blob(mine).hash)

    def _ropes(self, ours: Rope, theirs: Rope) -> None:
        for mine, other in zip(ours.tails, theirs.tails, strict=True):
            self._copy.same_stream(mine.line, other.line)
            self._copy.same_stream(mine.stream, other.stream)
        for (stream, first, count), (same, _, _) in zip(ours.extents, theirs.extents, strict=True):
            self._copy.same_stream(stream, same)
            new = self._copy.spans(stream).add(first, first + count)
            for low, high in new if ours.kind != RAW else ():
                self._items(ours.kind, (stream, low, high - low), (same, low, high - low))

    def _items(self, kind: int, ours: Extent, theirs: Extent) -> None:
        """Items may hold references in turn."""
        mine, refs = self._copy.items(ours[0], ours[1], ours[1] + ours[2])
        if refs:
            for a, b in zip(mine, _items(self._theirs, [theirs])[0], strict=True):
                cut = wire.string_length(a, 0) if kind == DICT else 0
                self._pair(a[cut:], b[cut:])


def _references(stored: bytes) -> list[tuple[int, bytes]]:
    found: list[tuple[int, bytes]] = []
    values.decode(stored, lambda tag, data: found.append((tag, data)))
    return found
