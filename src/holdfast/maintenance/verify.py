"""Verify: check that everything in a store can be read, and that stored data matches its hashes.

Nothing is changed. Each finding is a Problem, which says whether the state still loads.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast import ids
from holdfast.errors import UNREADABLE, Corrupt, HoldfastError, InvalidRequest
from holdfast.format import records, ropes
from holdfast.format.msgpack import FOLLOWING
from holdfast.format.nodes import DICT, LIST, Blob, Node, Rope, Struct, chain, dict_hash
from holdfast.format.records import IndexTerm
from holdfast.history import lineage
from holdfast.history.lineage import all_rows, strays
from holdfast.intervals import IntervalSet
from holdfast.storage.reader import open_reader
from holdfast.storage.repository import StoredData
from holdfast.storage.rows import Address, SessionRow

if TYPE_CHECKING:
    from holdfast.format.item_streams import Source
    from holdfast.format.nodes import Extent, Node
    from holdfast.storage.contract import Backend
    from holdfast.storage.reader import Reader
    from holdfast.storage.rows import CheckpointRow


_KEPT = 1 << 17
"""The most chain hashes to keep in memory, besides those of the last state: about 10 MB."""


class DataCheck:
    """Recomputes hashes from stored data. Data that checkpoints share is usually read once."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._chains: dict[tuple[bytes | None, int, int], list[bytes]] = {}
        """The chain hash after each item, by (hash before, stream, first item).

        The least recently used come first. An edit changes the hashes of all later items, so the
        chains of many states do not fit into memory."""
        self._needed: set[tuple[bytes | None, int, int]] = set()
        """Keys of the chains that the current state needs."""
        self._held = 0
        """Number of hashes in all chains."""
        self._done: set[bytes] = set()

    def check(self, node: Node) -> None:
        """Raise Corrupt unless all data below `node` exists and matches its hashes."""
        self._needed.clear()
        try:
            self._check(node)
        finally:
            self._forget()

    def _forget(self) -> None:
        """Drop the least recently used chains, but none that the last state needs."""
        while self._held > _KEPT and (oldest := next(iter(self._chains))) not in self._needed:
            self._held -= len(self._chains.pop(oldest))

    def _check(self, node: Node) -> None:
        if isinstance(node, Struct):
            for child in node.children:
                self._check(child)
        elif isinstance(node, Blob):
            if node.hash not in self._done:
                flat = self._source.blob(node.hash, node.size)
                if sha256(flat).digest() != node.hash:
                    raise Corrupt(f"blob {node.hash.hex()[:12]} does not match its hash")
                self._done.add(node.hash)
        elif isinstance(node, Rope):
            with FOLLOWING:
                self._rope(node)

    def _rope(self, rope: Rope) -> None:
        if rope.kind == LIST:
            found = self._chain(rope.extents)
        elif rope.kind == DICT:
            entries = ropes.entries(rope, self._source)
            self._check(entries)
            found = dict_hash(entries.keys, entries.children)
        else:
            found = sha256(ropes.flatten(rope, self._source)).digest()
            rope.image = None
        if found != rope.hash:
            raise Corrupt("a rope's items do not match its hash")

    def _chain(self, extents: tuple[Extent, ...]) -> bytes:
        """Return the chain hash over the items of all extents.

        The hash after an item depends on all items before it.
        """
        last: bytes | None = None
        for stream, first, count in extents:
            key = (last, stream, first)
            known = self._chains[key] = self._chains.pop(key, [])
            self._needed.add(key)
            if count > len(known):
                self._lengthen(known, last, (stream, first, count))
            last = known[count - 1]
        return last or chain(None, ())

    def _lengthen(self, known: list[bytes], last: bytes | None, extent: Extent) -> None:
        """Extend a chain of known hashes to the end of an extent, checking each item."""
        stream, first, count = extent
        before = len(known)
        last = known[-1] if known else last
        todo = (stream, first + before, count - before)
        try:
            for node in ropes.item_nodes([todo], self._source):
                self._check(node)
                last = chain(last, [node.hash])
                known.append(last)
        finally:
            self._held += len(known) - before


_TERMS = ("label", "tag", "trigger", "status", "agent", "parent")


class Problem(NamedTuple):
    """One damaged part of a store, and whether the state can still be loaded."""

    session: str | None
    """The name of the session; None if the damage concerns the whole store."""
    checkpoint: str | None
    """The id of the checkpoint; None if the damage concerns several or none."""
    what: str
    """The damage."""
    loads: bool
    """Whether the state of the checkpoint can still be loaded."""

    def __str__(self) -> str:
        where = " ".join(
            [f"session {self.session!r}"] * (self.session is not None)
            + [f"checkpoint {self.checkpoint}"] * (self.checkpoint is not None)
        )
        after = " (its state still loads)" if self.loads and self.checkpoint is not None else ""
        return f"{where or 'store'}: {self.what}{after}"


class VerifyResult(NamedTuple):
    """The result of a check: the problems, and the numbers of sessions and checkpoints checked."""

    problems: tuple[Problem, ...]
    """The damage."""
    sessions: int
    """Number of sessions that were checked."""
    checkpoints: int
    """Number of checkpoints that were checked."""
    loadable: int
    """Number of checkpoints whose state can be loaded by its id.

    With `read_data`, every byte of those states was checked. Deleted checkpoints count as well.
    """

    @property
    def ok(self) -> bool:
        """Whether no damage was found."""
        return not self.problems

    def __str__(self) -> str:
        head = (
            f"{self.sessions} sessions, {self.checkpoints} checkpoints, "
            f"{self.loadable} of them loadable"
        )
        return "\n".join([head, *map(str, self.problems)])


class Losses(NamedTuple):
    """The checkpoints of a session whose records exist, but whose states do not load."""

    session: str
    checkpoints: dict[int, str]
    """The id by seq; the seq as text where the id is damaged."""


def verify(
    backend: Backend, *, read_data: bool, sessions: Iterable[str] | None = None
) -> VerifyResult:
    """Check a store, or some sessions of it. With `read_data`, check every stored byte."""
    return audit(backend, read_data=read_data, sessions=sessions)[0]


def audit(
    backend: Backend, *, read_data: bool, sessions: Iterable[str] | None = None
) -> tuple[VerifyResult, dict[int, Losses]]:
    """Check a store, or some sessions of it. Return the report, and the losses by session number.

    Raises InvalidRequest unless `sessions` is None or an iterable of names, and SessionNotFound if
    a name does not exist.
    """
    if sessions is not None:
        sessions = _names(sessions)
    problems: list[Problem] = []
    losses: dict[int, Losses] = {}
    count = checked = loadable = 0
    with open_reader(backend) as reader:
        if sessions is None:
            problems += [Problem(None, None, line, loads=True) for line in _structure(reader)]
        for row in _sessions(reader, sessions, problems):
            count += 1
            audit = _Audit(reader, backend, row, read_data=read_data)
            audit.run()
            problems += audit.problems
            checked += audit.checked
            loadable += len(audit.loadable)
            losses[row.number] = Losses(audit.name, audit.lost)
    return VerifyResult(tuple(problems), count, checked, loadable), losses


def verify_one(backend: Backend, place: Address, *, read_data: bool) -> VerifyResult:
    """Check one checkpoint, and the parts of its session that are needed to load it."""
    with open_reader(backend) as reader:
        row = reader.session_by_number(place.session) or SessionRow(place.session, b"", b"")
        audit = _Audit(reader, backend, row, read_data=read_data)
        audit.run(place.seq)
    return VerifyResult(tuple(audit.problems), 1, audit.checked, len(audit.loadable))


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
) -> Iterable[SessionRow]:
    """Yield the sessions to check.

    If `names` is None, these are all sessions, also those that are not listed.
    """
    listed: set[int] = set()
    try:
        for found in lineage.all_sessions(reader) if names is None else _named(reader, names):
            listed.add(found.number)
            yield found
    except Corrupt as e:  # the rest of the list cannot be read
        problems.append(Problem(None, None, e.message, loads=False))
    for number in strays(reader, listed) if names is None else ():
        row = None
        with suppress(Corrupt):
            row = reader.session_by_number(number)
        yield row or SessionRow(number, b"", b"")


def _named(reader: Reader, names: Iterable[str]) -> Iterable[SessionRow]:
    for name in names:
        number = lineage.find_session(reader, name)
        found = reader.session_by_number(number)
        yield SessionRow(number, records.encode_name(name), found.body if found else b"")


def _unlisted(kind: int) -> str:
    return f"its {_TERMS[kind]} is not in the index for searches"


def _called(seq: int, id: bytes) -> str:
    """Return the id as text, or the seq if the id is damaged."""
    return ids.to_text(id) if type(id) is bytes and len(id) == ids.BYTES else str(seq)


class _Audit:
    """The check of one session."""

    def __init__(
        self, reader: Reader, backend: Backend, row: SessionRow, *, read_data: bool
    ) -> None:
        self._reader, self._row, self._number = reader, row, row.number
        self._plain = row.plain_name
        self.name = self._plain.decode("utf-8", "backslashreplace") or f"session {row.number}"
        self._prefix = lineage.hash_prefix(row)
        self._freed = IntervalSet()
        self._below: dict[int, set[Address]] = {}
        self._source = StoredData(backend, reader)
        self._data = DataCheck(self._source) if read_data else None
        self._hashes: dict[int, bytes] = {}
        self.problems: list[Problem] = []
        self.checked = 0
        self.loadable: set[int] = set()
        self.lost: dict[int, str] = {}
        self._opens = False
        self._only: int | None = None
        """The one checkpoint to check; None checks the whole session."""

    def _note(self, what: str, id: bytes | None = None, *, loads: bool = False) -> None:
        text = ids.to_text(id) if id else None
        self.problems.append(Problem(self.name, text, what, loads))

    def run(self, only: int | None = None) -> None:
        """Check the session, or one checkpoint of it. Add to `problems`, `loadable` and `lost`."""
        self._only = only
        try:
            self._session()
            if only is None:
                self._all()
            else:
                self._one(only)
        except Corrupt as e:  # a whole table is damaged
            self._note(e.message)

    def _one(self, seq: int) -> None:
        found = self._reader.checkpoint(self._number, seq)
        if found is None:
            self._missing(seq, seq + 1)
        else:
            self._checkpoint(found, None)
        self._marks(None, seq, seq)

    def _session(self) -> None:
        """Check that the session can be opened, and that a fork is in the index of forks."""
        try:
            self.name = records.decode_name(self._plain) or self.name
            self._open()
            self._opens = True
            info = records.unseal_session(*self._row)
            if info.origin is not None and self._only is None:
                place = lineage.address_at(info.origin)
                if (place.seq, self._number) not in self._reader.forks(*place, place.seq):
                    self._note("it is not in the index of forks", loads=self._opens)
        except UNREADABLE as e:
            if self._only is None or not self._opens:
                self._note(e.message, loads=self._opens)

    def _all(self) -> None:
        """Check the head, all checkpoints, and all other rows of the session."""
        last = operations = None
        try:
            _, head = lineage.read_head(self._reader, self._number)
            last, operations = head.last, head.operations
            gone = head.seq and self._reader.checkpoint(self._number, head.seq) is None
            if not 0 <= head.seq <= last or (
                gone and not lineage.is_deleted(self._reader, self._number)
            ):
                self._note("the head points at no checkpoint", loads=self._opens)
            self._freed = lineage.freed(self._reader, self._number)
        except UNREADABLE as e:
            self._note(e.message, loads=self._opens)
        low = 1
        listing = all_rows(
            self._reader, self._number, lambda e: self._note(e.message, loads=self._opens)
        )
        for row in listing:
            self._missing(low, row.seq if last is None else min(row.seq, last + 1))
            low = row.seq + 1
            self._checkpoint(row, last)
        self._missing(low, (last or 0) + 1)
        self._marks(last)
        self._operations(operations)
        self._runs()
        self._deleted()
        for wrong in self._reader.check_tally(self._number):
            self._note(wrong, loads=self._opens)

    def _open(self) -> None:
        """Raise Corrupt or UnsupportedFormat unless the session can be opened by its name.

        If it cannot be opened, none of its checkpoints loads.
        """
        named = self._reader.session(self._row.name)
        if named is None or named.number != self._number:
            raise Corrupt("it is not found by its name")
        try:
            _, head = lineage.read_head(self._reader, self._number)
            place = Address(self._number, head.seq)
            record = lineage.read_row(self._reader, place).record if head.seq else None
        except UNREADABLE:
            return  # another check reports it
        if record is not None:
            lineage.to_checkpoint(self._reader, place, record)

    def _missing(self, low: int, high: int) -> None:
        """Report the missing records of checkpoints [low, high), except those that gc has freed."""
        for start, stop in self._freed.missing(low, high):
            self.checked += stop - start
            which = (
                f"checkpoint {start}" if stop == start + 1 else f"checkpoints {start} to {stop - 1}"
            )
            verb = "is" if stop == start + 1 else "are"
            self._note(f"the record{'s' * (stop > start + 1)} of {which} {verb} missing")

    def _checkpoint(self, stored: CheckpointRow, last: int | None) -> None:
        """Check the record, the data, the index entries and the hash of a checkpoint."""
        self.checked += 1
        seq, id, _ = stored
        try:
            if self._reader.checkpoint(self._number, seq) != stored:
                raise Corrupt(f"checkpoint {seq} is not found by its number")
            row = records.unseal_checkpoint(self._number, *stored)
            node = row.node()
            state_hash = node.hash
        except UNREADABLE as e:
            self._note(e.message, id)
            self.lost[seq] = _called(seq, id)
            return
        lost = list(self._lost(row, node))
        for wrong in lost:
            self._note(wrong, id)
        loads = self._opens and not lost
        if loads:
            self.loadable.add(seq)
        else:
            self.lost[seq] = _called(seq, id)
        if last is not None and seq > last:
            self._note(f"checkpoint {seq} is newer than the session's newest", id, loads=loads)
        for wrong in self._indexes(row):
            self._note(wrong, id, loads=loads)
        try:
            parent = self._parent_hash(row)
            expected = records.record_hash(self._prefix, seq, id, row.meta, state_hash, parent)
            # The parent's hash is empty if gc has freed a damaged parent.
            if parent and expected != row.record.hash:
                self._note("its hash does not match its content and history", id, loads=loads)
        except UNREADABLE as e:
            if self._only is None:  # a check of one checkpoint ignores its parent
                self._note(f"its parent cannot be read: {e.message}", id, loads=loads)
        self._hashes[seq] = row.record.hash

    def _lost(self, row: records.Row, node: Node) -> Iterable[str]:
        """Yield the reasons why a state does not load although its record is sound."""
        seq, id = row.record.seq, row.record.id
        try:
            if self._reader.find_ids(id, id, 1) != [(self._number, seq, id)]:
                yield "its id is not in the index of ids"
            if self._data is not None:
                self._data.check(node)
        except UNREADABLE as e:
            yield e.message

    def _indexes(self, row: records.Row) -> Iterable[str]:
        """Yield the problems of the indexes of keys and of index terms."""
        record = row.record
        key = record.extra.get("key")
        try:
            if key and self._reader.find_key(self._number, records.encode_name(key)) != record.seq:
                yield f"its key {key!r} is not in the index of keys"
            terms = records.index_terms(record.id, record.extra)
            terms += records.session_terms(self._number, record.extra)
            for term in terms:
                if not lineage.has_term(self._reader, term):
                    yield _unlisted(term.kind)
        except UNREADABLE as e:
            yield e.message

    def _parent_hash(self, row: records.Row) -> bytes:
        """Return the hash of the parent: 32 zero bytes if there is none, the graft's if freed.

        Raises Corrupt or UnsupportedFormat if the parent is missing or cannot be read.
        """
        record = row.record
        if record.parent_seq is None:
            return bytes(32)
        place = Address(self._number, record.parent_seq)
        if record.is_fork:
            found = lineage.origin(self._reader, Address(self._number, record.seq), record)
            if found is None:
                raise Corrupt(f"session {record.extra['origin']!r} is missing")
            place = found
        elif record.parent_seq in self._hashes:
            return self._hashes[record.parent_seq]
        if self._reader.checkpoint(*place) is None:
            graft = lineage.graft_before(self._reader, Address(self._number, record.seq))
            if graft is not None:
                return graft.parent_hash
        parent = lineage.read_row(self._reader, place).record
        if parent.id != record.parent:
            raise Corrupt("the parent is another checkpoint than recorded")
        return parent.hash

    def _marks(self, last: int | None, low: int = 0, high: int = records.MAX_SEQ) -> None:
        """Check the labels and tags of checkpoints, and their index terms."""
        for seq, kind, value, body in self._reader.marks(self._number, low, high):
            id: bytes | None = None
            try:
                if type(seq) is not int:
                    raise Corrupt("a label or tag has lost its checkpoint")
                found = self._reader.checkpoint(self._number, seq)
                id = found.id if found else None
                records.unseal_mark(records.position(self._number, seq), kind, value, body)
                if id and not lineage.has_term(self._reader, IndexTerm(kind, value, id)):
                    self._note(_unlisted(kind), id, loads=seq in self.loadable)
                if last is not None and not 1 <= seq <= last:
                    self._note(
                        f"a mark belongs to checkpoint {seq}, which does not exist",
                        loads=self._opens,
                    )
            except UNREADABLE as e:
                self._note(e.message, id, loads=seq in self.loadable)

    def _operations(self, last: int | None) -> None:
        """Check that operations can be read, and that none is newer than the head knows."""
        for number, body in self._reader.operations(self._number, 0, records.MAX_SEQ):
            try:
                records.unseal_operation(self._number, number, body)
                if last is not None and number > last:
                    raise Corrupt(f"operation {number} is newer than the session's newest")
            except UNREADABLE as e:
                self._note(e.message, loads=self._opens)

    def _runs(self) -> None:
        """Check the lease and the journal. The entries must have consecutive numbers."""
        try:
            lease = self._reader.lease(self._number)
            if lease is not None:
                records.unseal_lease(self._number, lease.body)
        except UNREADABLE as e:
            self._note(e.message, loads=self._opens)
        expected: int | None = None
        for n, body in lineage.journal_rows(self._reader, self._number):
            try:
                if expected is not None and n != expected:
                    raise Corrupt(f"entry {expected} of the journal is missing")
                records.unseal_entry(self._number, n, body)
            except UNREADABLE as e:
                self._note(e.message, loads=self._opens)
            expected = n + 1

    def _deleted(self) -> None:
        """Check tombstones and grafts."""
        for kind, rows, unseal in (
            (
                "tombstone",
                self._reader.tombstones(self._number, 0, records.MAX_SEQ),
                records.unseal_tombstone,
            ),
            ("gap", self._reader.grafts(self._number, 1, records.MAX_SEQ), records.unseal_graft),
        ):
            for seq, body in rows:
                try:
                    found = unseal(self._number, seq, body)
                    if isinstance(found, records.Graft):
                        self._graft(seq, found)
                    if self._reader.checkpoint(self._number, seq) is None:
                        self._note(f"a {kind} belongs to no checkpoint: {seq}", loads=self._opens)
                except UNREADABLE as e:
                    self._note(e.message, loads=self._opens)

    def _graft(self, seq: int, graft: records.Graft) -> None:
        """Check that a graft points to a checkpoint, and is in the index of grafts."""
        if graft.ancestor is None:
            return
        place = lineage.address_at(graft.ancestor)
        if self._reader.checkpoint(*place) is None:
            self._note(f"the gap before checkpoint {seq} reaches to none", loads=self._opens)
        if place.session not in self._below:  # read once: a session may have thousands of grafts
            self._below[place.session] = {*self._reader.grafts_below(place.session)}
        if (self._number, seq) not in self._below[place.session]:
            self._note(f"the gap before checkpoint {seq} is not in its index", loads=self._opens)
