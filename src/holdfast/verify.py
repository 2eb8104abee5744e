"""Checking a store: every record's digest and hash, and with `read_data` every byte of data."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast import ids, lineage
from holdfast.codec import records
from holdfast.datacheck import DataCheck
from holdfast.errors import UNREADABLE, Corrupt, HoldfastError, InvalidRequest
from holdfast.lineage import Place
from holdfast.live import Spans, all_rows, strays
from holdfast.source import StoredSource

if TYPE_CHECKING:
    from holdfast.backends.base import Backend, Reader
    from holdfast.codec.nodes import Node

_PAGE = 500
_FACETS = ("label", "tag", "trigger", "status", "agent", "parent")


class Problem(NamedTuple):
    """Something damaged, and whether the state can still be loaded."""

    session: str | None
    checkpoint: str | None
    what: str
    loads: bool

    def __str__(self) -> str:
        where = " ".join(
            [f"session {self.session!r}"] * (self.session is not None)
            + [f"checkpoint {self.checkpoint}"] * (self.checkpoint is not None)
        )
        after = " (its state still loads)" if self.loads and self.checkpoint is not None else ""
        return f"{where or 'store'}: {self.what}{after}"


class Report(NamedTuple):
    problems: tuple[Problem, ...]
    sessions: int
    checkpoints: int
    loadable: int
    """Checkpoints whose state loads by their id (with read_data: whose every byte was checked).

    Deleted ones count as if they were not deleted.
    """

    @property
    def ok(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        head = (
            f"{self.sessions} sessions, {self.checkpoints} checkpoints, "
            f"{self.loadable} of them loadable"
        )
        return "\n".join([head, *map(str, self.problems)])


def verify(backend: Backend, *, read_data: bool, sessions: Iterable[str] | None = None) -> Report:
    if sessions is not None:
        sessions = _names(sessions)
    problems: list[Problem] = []
    count = checked = loadable = 0
    with backend.reader() as reader:
        if sessions is None:
            problems += [Problem(None, None, line, loads=True) for line in _structure(reader)]
        for number, raw, body in _sessions(reader, sessions, problems):
            count += 1
            audit = _Audit(reader, backend, number, raw, body, read_data=read_data)
            audit.run()
            problems += audit.problems
            checked += audit.checked
            loadable += len(audit.loadable)
    return Report(tuple(problems), count, checked, loadable)


def verify_one(backend: Backend, place: Place, *, read_data: bool) -> Report:
    """The same for one checkpoint; of its session, only what is needed to load it."""
    with backend.reader() as reader:
        raw, body = reader.session_by_number(place.session) or (b"", b"")
        audit = _Audit(reader, backend, place.session, raw, body, read_data=read_data)
        audit.run(place.seq)
    return Report(tuple(audit.problems), 1, audit.checked, len(audit.loadable))


def _names(sessions: Any) -> list[str]:
    several = isinstance(sessions, Iterable) and not isinstance(sessions, str)
    names: list[Any] = [*sessions] if several else [None]
    if not all(isinstance(name, str) for name in names):
        raise InvalidRequest(
            f"sessions must be a list of names, not {sessions!r}", hint="without it: all sessions"
        )
    return names


def _structure(reader: Reader) -> Iterable[str]:
    try:
        yield from reader.check()
    except HoldfastError as e:
        yield e.message


def _sessions(
    reader: Reader, names: Iterable[str] | None, problems: list[Problem]
) -> Iterable[tuple[int, bytes, bytes]]:
    """Number, name and row of those that are to be checked; of all, also of those not listed."""
    listed: set[int] = set()
    try:
        for found in _listed(reader) if names is None else _named(reader, names):
            listed.add(found[0])
            yield found
    except Corrupt as e:  # what else there is in the list of sessions is unknown
        problems.append(Problem(None, None, e.message, loads=False))
    for number in strays(reader, listed) if names is None else ():
        row = (b"", b"")
        with suppress(Corrupt):
            row = reader.session_by_number(number) or row
        yield number, *row


def _named(reader: Reader, names: Iterable[str]) -> Iterable[tuple[int, bytes, bytes]]:
    for name in names:
        raw = records.encode_name(name)
        number = lineage.find_session(reader, name)
        found = reader.session_by_number(number)
        yield number, raw, found[1] if found else b""


def _listed(reader: Reader) -> Iterable[tuple[int, bytes, bytes]]:
    after: bytes | None = None
    while page := reader.sessions(after, _PAGE):
        yield from page
        after = page[-1][1]


class _Audit:
    """One session's check."""

    def __init__(
        self,
        reader: Reader,
        backend: Backend,
        number: int,
        raw: bytes,
        body: bytes,
        *,
        read_data: bool,
    ) -> None:
        self._reader, self._number, self._raw, self._body = reader, number, raw, body
        former = records.former_name(number, raw)
        self._plain = raw if former is None else former
        self._name = self._plain.decode("utf-8", "backslashreplace") or f"session {number}"
        self._prefix = records.hash_prefix(self._plain)
        self._freed = Spans()
        self._below: dict[int, set[tuple[int, int]]] = {}
        self._source = StoredSource(backend, reader)
        self._data = DataCheck(self._source) if read_data else None
        self._hashes: dict[int, bytes] = {}
        self.problems: list[Problem] = []
        self.checked = 0
        self.loadable: set[int] = set()
        self._opens = False

    def _note(self, what: str, id: bytes | None = None, *, loads: bool = False) -> None:
        text = ids.to_text(id) if id else None
        self.problems.append(Problem(self._name, text, what, loads))

    def run(self, only: int | None = None) -> None:
        try:
            self._session()
            if only is None:
                self._all()
            else:
                self._one(only)
        except Corrupt as e:  # a table itself
            self._note(e.message)

    def _one(self, seq: int) -> None:
        found = self._reader.checkpoint(self._number, seq)
        if found is None:
            self._missing(seq, seq + 1)
        else:
            self._checkpoint(seq, *found, None)
        self._marks(None, seq, seq)

    def _session(self) -> None:
        try:
            self._name = records.decode_name(self._plain) or self._name
            self._open()
            self._opens = True
            info = records.unseal_session(self._number, self._raw, self._body)
            if info.origin is not None:
                place = lineage.place_at(info.origin)
                if (place.seq, self._number) not in self._reader.forks(*place, place.seq):
                    self._note("it is not in the index of forks", loads=self._opens)
        except UNREADABLE as e:
            self._note(e.message, loads=self._opens)

    def _all(self) -> None:
        last = None
        try:
            _, head = lineage.read_head(self._reader, self._number)
            last = head.last
            gone = head.seq and self._reader.checkpoint(self._number, head.seq) is None
            if not 0 <= head.seq <= last or (
                gone and not lineage.is_deleted(self._reader, self._number)
            ):
                self._note("the head points at no checkpoint", loads=self._opens)
            for span in lineage.freed(self._reader, self._number):
                self._freed.add(*span)
        except UNREADABLE as e:
            self._note(e.message, loads=self._opens)
        low = 1
        listing = all_rows(
            self._reader, self._number, lambda e: self._note(e.message, loads=self._opens)
        )
        for seq, id, body in listing:
            self._missing(low, seq if last is None else min(seq, last + 1))
            low = seq + 1
            self._checkpoint(seq, id, body, last)
        self._missing(low, (last or 0) + 1)
        self._marks(last)
        self._operations()
        self._runs()
        self._deleted()

    def _open(self) -> None:
        """Raise unless a handle of the session can be had: without one nothing of it loads."""
        if (self._reader.session(self._raw) or [None])[0] != self._number:
            raise Corrupt("it is not found by its name")
        try:
            _, head = lineage.read_head(self._reader, self._number)
            place = Place(self._number, head.seq)
            record = lineage.read_row(self._reader, place).record if head.seq else None
        except UNREADABLE:
            return  # which is told of on its own
        if record is not None:
            lineage.dress(self._reader, place, record)

    def _missing(self, low: int, high: int) -> None:
        """Note that the records [low, high) are gone, but for those that gc has freed."""
        for start, stop in self._freed.missing(low, high):
            self.checked += stop - start
            which = (
                f"checkpoint {start}" if stop == start + 1 else f"checkpoints {start} to {stop - 1}"
            )
            verb = "is" if stop == start + 1 else "are"
            self._note(f"the record{'s' * (stop > start + 1)} of {which} {verb} missing")

    def _checkpoint(self, seq: int, id: bytes, body: bytes, last: int | None) -> None:
        self.checked += 1
        try:
            if self._reader.checkpoint(self._number, seq) != (id, body):
                raise Corrupt(f"checkpoint {seq} is not found by its number")
            row = records.unseal_checkpoint(self._number, seq, id, body)
            node = row.node()
            state_hash = node.hash
        except UNREADABLE as e:
            self._note(e.message, id)
            return
        lost = list(self._lost(row, node))
        for wrong in lost:
            self._note(wrong, id)
        loads = self._opens and not lost
        if loads:
            self.loadable.add(seq)
        if last is not None and seq > last:
            self._note(f"checkpoint {seq} is newer than the session's newest", id, loads=loads)
        for wrong in self._indexes(row):
            self._note(wrong, id, loads=loads)
        try:
            parent = self._parent_hash(row)
            expected = records.record_hash(self._prefix, seq, id, row.meta, state_hash, parent)
            if parent and expected != row.record.hash:  # gc may have freed a damaged parent
                self._note("its hash does not match its content and history", id, loads=loads)
        except UNREADABLE as e:
            self._note(f"its parent cannot be read: {e.message}", id, loads=loads)
        self._hashes[seq] = row.record.hash

    def _lost(self, row: records.Row, node: Node) -> Iterable[str]:
        """Why the state does not load, although its record is sound."""
        seq, id = row.record.seq, row.record.id
        try:
            if self._reader.find_ids(id, id, 1) != [(self._number, seq, id)]:
                yield "its id is not in the index of ids"
            if self._data is not None:
                self._data.check(node)
        except UNREADABLE as e:
            yield e.message

    def _indexes(self, row: records.Row) -> Iterable[str]:
        """What is wrong with the other ways to find a checkpoint."""
        record = row.record
        key = record.extra.get("key")
        try:
            if key and self._reader.find_key(self._number, records.encode_name(key)) != record.seq:
                yield f"its key {key!r} is not in the index of keys"
            facets = records.facets(record.id, record.extra)
            facets += records.session_facets(self._number, record.extra)
            for facet in facets:
                yield from self._unlisted(*facet)
        except UNREADABLE as e:
            yield e.message

    def _unlisted(self, kind: int, value: bytes, id: bytes) -> Iterable[str]:
        if self._reader.find_facets(kind, value, id, id + b"\0", 1) != [id]:
            yield f"its {_FACETS[kind]} is not in the index for searches"

    def _parent_hash(self, row: records.Row) -> bytes:
        record = row.record
        if record.parent_seq is None:
            return bytes(32)
        place = Place(self._number, record.parent_seq)
        if "origin" in record.extra:
            found = lineage.origin(self._reader, Place(self._number, record.seq), record)
            if found is None:
                raise Corrupt(f"session {record.extra['origin']!r} is missing")
            place = found
        elif record.parent_seq in self._hashes:
            return self._hashes[record.parent_seq]
        if self._reader.checkpoint(*place) is None:
            gap = lineage.gap_before(self._reader, Place(self._number, record.seq))
            if gap is not None:
                return gap.parent_hash
        parent = lineage.read_row(self._reader, place).record
        if parent.id != record.parent:
            raise Corrupt("the parent is another checkpoint than recorded")
        return parent.hash

    def _marks(self, last: int | None, low: int = 0, high: int = records.MAX_SEQ) -> None:
        for seq, kind, value, body in self._reader.marks(self._number, low, high):
            id = None
            try:
                if type(seq) is not int:
                    raise Corrupt("a label or tag has lost its checkpoint")
                id, _ = self._reader.checkpoint(self._number, seq) or (None, b"")
                records.unseal_mark(records.position(self._number, seq), kind, value, body)
                for wrong in self._unlisted(kind, value, id) if id else ():
                    self._note(wrong, id, loads=seq in self.loadable)
                if last is not None and not 1 <= seq <= last:
                    self._note(
                        f"a mark belongs to checkpoint {seq}, which does not exist",
                        loads=self._opens,
                    )
            except UNREADABLE as e:
                self._note(e.message, id, loads=seq in self.loadable)

    def _operations(self) -> None:
        for number, body in self._reader.operations(self._number, 0, records.MAX_SEQ):
            try:
                records.unseal_operation(self._number, number, body)
            except UNREADABLE as e:
                self._note(e.message, loads=self._opens)

    def _runs(self) -> None:
        """The lease and the journal: entries are numbered without a gap."""
        try:
            lease = self._reader.lease(self._number)
            if lease is not None:
                records.unseal_lease(self._number, lease.body)
        except UNREADABLE as e:
            self._note(e.message, loads=self._opens)
        first, expected = 0, None
        while page := self._reader.journal(self._number, first, _PAGE):
            for n, body in page:
                try:
                    if expected is not None and n != expected:
                        raise Corrupt(f"entry {expected} of the journal is missing")
                    records.unseal_entry(self._number, n, body)
                except UNREADABLE as e:
                    self._note(e.message, loads=self._opens)
                expected = n + 1
            first = page[-1][0] + 1

    def _deleted(self) -> None:
        """Tombstones and gaps."""
        for kind, rows, unseal in (
            (
                "tombstone",
                self._reader.tombs(self._number, 0, records.MAX_SEQ),
                records.unseal_tomb,
            ),
            ("gap", self._reader.gaps(self._number, 1, records.MAX_SEQ), records.unseal_gap),
        ):
            for seq, body in rows:
                try:
                    found = unseal(self._number, seq, body)
                    if isinstance(found, records.Gap):
                        self._gap(seq, found)
                    if self._reader.checkpoint(self._number, seq) is None:
                        self._note(f"a {kind} belongs to no checkpoint: {seq}", loads=self._opens)
                except UNREADABLE as e:
                    self._note(e.message, loads=self._opens)

    def _gap(self, seq: int, gap: records.Gap) -> None:
        if gap.ancestor is None:
            return
        place = lineage.place_at(gap.ancestor)
        if self._reader.checkpoint(*place) is None:
            self._note(f"the gap before checkpoint {seq} reaches to none", loads=self._opens)
        if place.session not in self._below:  # once: a session may have thousands of gaps
            self._below[place.session] = {*self._reader.gaps_below(place.session)}
        if (self._number, seq) not in self._below[place.session]:
            self._note(f"the gap before checkpoint {seq} is not in its index", loads=self._opens)
