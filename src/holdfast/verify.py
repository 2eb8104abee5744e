"""Checking a store: every record's digest and hash, and with `read_data` every byte of data."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast import ids, lineage
from holdfast.codec import records, ropes, streams
from holdfast.codec.nodes import DICT, LIST, Blob, Leaf, Node, Rope, Struct, chain, dict_hash, parse
from holdfast.errors import UNREADABLE, Corrupt, HoldfastError, InvalidRequest
from holdfast.lineage import Place
from holdfast.source import StoredSource

if TYPE_CHECKING:
    from holdfast.backends.base import Backend, Reader
    from holdfast.codec.nodes import Extent
    from holdfast.codec.streams import Source

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
        after = " (its state still loads)" if self.loads else ""
        return f"{where or 'store'}: {self.what}{after}"


class Report(NamedTuple):
    problems: tuple[Problem, ...]
    sessions: int
    checkpoints: int
    loadable: int
    """Checkpoints whose state loads (with read_data: whose every byte was checked)."""

    @property
    def ok(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        head = (
            f"{self.sessions} sessions, {self.checkpoints} checkpoints, "
            f"{self.loadable} of them sound"
        )
        return "\n".join([head, *map(str, self.problems)])


def verify(backend: Backend, *, read_data: bool, sessions: Iterable[str] | None = None) -> Report:
    if sessions is not None:
        sessions = _names(sessions)
    problems: list[Problem] = []
    count = checked = sound = 0
    with backend.reader() as reader:
        if sessions is None:
            problems += [Problem(None, None, line, loads=True) for line in _structure(reader)]
        try:
            for number, raw, body in _sessions(reader, sessions):
                count += 1
                audit = _Audit(reader, backend, number, raw, body, read_data=read_data)
                audit.run()
                problems += audit.problems
                checked += audit.checked
                sound += audit.sound
        except Corrupt as e:  # what else there is in the list of sessions is unknown
            problems.append(Problem(None, None, e.message, loads=False))
    return Report(tuple(problems), count, checked, sound)


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


def _sessions(reader: Reader, names: Iterable[str] | None) -> Iterable[tuple[int, bytes, bytes]]:
    if names is not None:
        for name in names:
            raw = records.encode_name(name)
            number = lineage.find_session(reader, name)
            found = reader.session_by_number(number)
            yield number, raw, found[1] if found else b""
        return
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
        self._name = self._plain.decode("utf-8", "backslashreplace")
        self._prefix = records.hash_prefix(self._plain)
        self._freed: list[tuple[int, int]] = []
        self._source = StoredSource(backend, reader)
        self._data = DataCheck(self._source) if read_data else None
        self._hashes: dict[int, bytes] = {}
        self.problems: list[Problem] = []
        self.checked = self.sound = 0

    def _note(self, what: str, id: bytes | None = None, *, loads: bool = False) -> None:
        text = ids.to_text(id) if id else None
        self.problems.append(Problem(self._name, text, what, loads))

    def run(self) -> None:
        try:
            self._run()
        except Corrupt as e:  # a table itself
            self._note(e.message)

    def _run(self) -> None:
        try:
            self._name = records.decode_name(self._plain)
            info = records.unseal_session(self._number, self._raw, self._body)
            if self._reader.session(self._raw) != (self._number, self._body):
                self._note("it is not found by its name", loads=True)
            if info.origin is not None:
                place = lineage.place_at(info.origin)
                if (place.seq, self._number) not in self._reader.forks(*place, place.seq):
                    self._note("it is not in the index of forks", loads=True)
        except UNREADABLE as e:
            self._note(e.message, loads=True)
        last = None
        try:
            _, head = lineage.read_head(self._reader, self._number)
            last = head.last
            gone = head.seq and self._reader.checkpoint(self._number, head.seq) is None
            if not 0 <= head.seq <= last or (
                gone and not lineage.is_deleted(self._reader, self._number)
            ):
                self._note("the head points at no checkpoint", loads=True)
            self._freed = lineage.freed(self._reader, self._number)
        except UNREADABLE as e:
            self._note(e.message, loads=True)
        low = 1
        while True:
            rows = self._reader.checkpoints(self._number, low, records.MAX_SEQ, _PAGE)
            for seq, id, body in rows:
                self._missing(low, seq if last is None else min(seq, last + 1))
                low = seq + 1
                self._checkpoint(seq, id, body, last)
            if not rows:
                break
        self._missing(low, (last or 0) + 1)
        self._marks(last)
        self._operations()
        self._runs()
        self._deleted()

    def _missing(self, low: int, high: int) -> None:
        """Note that the records [low, high) are gone, but for those that gc has freed."""
        runs: list[tuple[int, int]] = []
        for start, stop in self._freed:
            if stop > low:
                runs.append((low, min(start, high)))
                low = max(low, stop)
        for start, stop in [*runs, (low, high)]:
            if stop > start:
                self.checked += stop - start
                which = (
                    f"checkpoint {start}"
                    if stop == start + 1
                    else f"checkpoints {start} to {stop - 1}"
                )
                verb = "is" if stop == start + 1 else "are"
                self._note(f"the record{'s' * (stop > start + 1)} of {which} {verb} missing")

    def _checkpoint(self, seq: int, id: bytes, body: bytes, last: int | None) -> None:
        self.checked += 1
        try:
            row = records.unseal_checkpoint(self._number, seq, id, body)
            node = row.node()
            state_hash = node.hash
        except UNREADABLE as e:
            self._note(e.message, id)
            return
        fine = True
        if last is not None and seq > last:
            self._note(f"checkpoint {seq} is newer than the session's newest", id, loads=True)
            fine = False
        for wrong in self._indexes(row):
            self._note(wrong, id, loads=True)
            fine = False
        try:
            parent = self._parent_hash(row)
            expected = records.record_hash(self._prefix, seq, id, row.meta, state_hash, parent)
            if parent and expected != row.record.hash:  # gc may have freed a damaged parent
                self._note("its hash does not match its content and history", id, loads=True)
                fine = False
        except UNREADABLE as e:
            self._note(f"its parent cannot be read: {e.message}", id, loads=True)
            fine = False
        self._hashes[seq] = row.record.hash
        try:
            if self._data is not None:
                self._data.check(node)
        except UNREADABLE as e:
            self._note(e.message, id)
            return
        self.sound += fine

    def _indexes(self, row: records.Row) -> Iterable[str]:
        """What is wrong with the ways to find a checkpoint."""
        record = row.record
        key = record.extra.get("key")
        try:
            if self._reader.find_ids(record.id, record.id, 1) != [
                (self._number, record.seq, record.id)
            ]:
                yield "its id is not in the index of ids"
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

    def _marks(self, last: int | None) -> None:
        for seq, kind, value, body in self._reader.marks(self._number, 0, records.MAX_SEQ):
            try:
                if type(seq) is not int:
                    raise Corrupt("a label or tag has lost its checkpoint")
                records.unseal_mark(records.position(self._number, seq), kind, value, body)
                found = self._reader.checkpoint(self._number, seq)
                for wrong in self._unlisted(kind, value, found[0]) if found else ():
                    self._note(wrong, found[0] if found else None, loads=True)
                if last is not None and not 1 <= seq <= last:
                    self._note(
                        f"a mark belongs to checkpoint {seq}, which does not exist", loads=True
                    )
            except UNREADABLE as e:
                self._note(e.message, loads=True)

    def _operations(self) -> None:
        for number, body in self._reader.operations(self._number, 0, records.MAX_SEQ):
            try:
                records.unseal_operation(self._number, number, body)
            except UNREADABLE as e:
                self._note(e.message, loads=True)

    def _runs(self) -> None:
        """The lease and the journal: entries are numbered without a gap."""
        try:
            lease = self._reader.lease(self._number)
            if lease is not None:
                records.unseal_lease(self._number, lease.body)
        except UNREADABLE as e:
            self._note(e.message, loads=True)
        first, expected = 0, None
        while page := self._reader.journal(self._number, first, _PAGE):
            for n, body in page:
                try:
                    if expected is not None and n != expected:
                        raise Corrupt(f"entry {expected} of the journal is missing")
                    records.unseal_entry(self._number, n, body)
                except UNREADABLE as e:
                    self._note(e.message, loads=True)
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
                        self._note(f"a {kind} belongs to no checkpoint: {seq}", loads=True)
                except UNREADABLE as e:
                    self._note(e.message, loads=True)

    def _gap(self, seq: int, gap: records.Gap) -> None:
        if gap.ancestor is None:
            return
        place = lineage.place_at(gap.ancestor)
        if self._reader.checkpoint(*place) is None:
            self._note(f"the gap before checkpoint {seq} reaches to none", loads=True)
        if (self._number, seq) not in self._reader.gaps_below(place.session):
            self._note(f"the gap before checkpoint {seq} is not in its index", loads=True)


class DataCheck:
    """Recomputes hashes from stored data; what checkpoints share is read once."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._items: dict[tuple[int, int], bytes] = {}
        self._chains: dict[tuple[Extent, ...], list[bytes]] = {}
        self._done: set[bytes] = set()

    def check(self, node: Node) -> None:
        """Raise Corrupt unless everything below `node` is there and has the hashes it claims."""
        if isinstance(node, Struct):
            for child in node.children:
                self.check(child)
        elif isinstance(node, Blob):
            if node.hash not in self._done:
                flat = self._source.blob(node.hash, node.size)
                if sha256(flat).digest() != node.hash:
                    raise Corrupt(f"blob {node.hash.hex()[:12]} does not match its hash")
                self._done.add(node.hash)
        elif isinstance(node, Rope):
            self._rope(node)

    def _rope(self, rope: Rope) -> None:
        if rope.kind == LIST:
            found = self._chain(rope.extents)
        elif rope.kind == DICT:
            entries = ropes.entries(rope, self._source)
            self.check(entries)
            found = dict_hash(entries.keys, entries.children)
        else:
            found = sha256(ropes.flatten(rope, self._source)).digest()
            rope.chunks = None
        if found != rope.hash:
            raise Corrupt("a rope's items do not match its hash")

    def _chain(self, extents: tuple[Extent, ...]) -> bytes:
        """The chain over all items, remembered per stream so that growth is checked once."""
        *before, (stream, first, count) = extents
        key = (*before, (stream, first, 0))
        known = self._chains.setdefault(key, [])
        start = known[-1] if known else self._chain(tuple(before)) if before else None
        todo = [(stream, first + len(known), count - len(known))] if count > len(known) else []
        for piece in streams.pieces(self._source, todo):
            begin = 0
            for end in piece.ends:
                stored = piece.data[begin : end - piece.base]
                begin = end - piece.base
                node = parse(stored) if piece.refs else Leaf(stored)
                self.check(node)
                start = chain(start, [node.hash])
                known.append(start)
        return known[count - 1]
