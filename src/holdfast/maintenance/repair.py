"""Repair: move heads from damaged checkpoints to sound ones, and rebuild indexes.

A check of the whole store follows. Repair reports as lost each checkpoint that does not load then.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from holdfast.errors import UNREADABLE, Corrupt
from holdfast.format import msgpack, records, values
from holdfast.format.item_streams import MAX_ITEMS, STREAM_BITS
from holdfast.format.nodes import Node, Rope, Struct, parse
from holdfast.format.records import Head, IndexTerm
from holdfast.format.rows import REFS, unseal_items
from holdfast.history import lineage
from holdfast.history.journal import LOST
from holdfast.history.lineage import all_rows, strays
from holdfast.intervals import IntervalSet
from holdfast.log import logger
from holdfast.maintenance.gc import FreePlanner
from holdfast.maintenance.verify import DataCheck, audit
from holdfast.model import DAMAGED
from holdfast.storage import changes
from holdfast.storage.changes import Change, Copied, Notes
from holdfast.storage.contract import MissingReference, StaleHead
from holdfast.storage.reader import open_reader
from holdfast.storage.repository import StoredData
from holdfast.storage.rows import Address, JournalRow, KeyRow, OperationRow, SessionRow
from holdfast.storage.tables import COUNTERS
from holdfast.storage.tally import faulty_counters, new_counter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.format.rows import ItemRow
    from holdfast.maintenance.verify import VerifyResult
    from holdfast.storage.changes import Sweep
    from holdfast.storage.contract import Backend
    from holdfast.storage.reader import Reader

_TRIES = 20
_MAX_ENTRIES = 100_000


class SessionRepair(NamedTuple):
    """The repairs of a session, and its losses."""

    session: str
    """The name of the session."""
    moved: tuple[int, int] | None
    """The head's seq before and after; None if the head was not moved."""
    rebuilt: tuple[str, ...]
    """The parts that work again: any of "searches", "keys", "undo", "log"."""
    lost: tuple[str, ...]
    """Ids of checkpoints whose state does not load; the seq as text where the id is lost, too."""
    forgotten: tuple[str, ...] = ()
    """Descriptions of other rows that are lost.

    They may be labels, tags, deletions, operations or journal entries.
    """


@dataclass(frozen=True)
class RepairResult:
    """The result of `repair()`: its repairs, and the report of a full check afterwards."""

    sessions: tuple[SessionRepair, ...]
    """The sessions that were repaired, or that have lost something."""
    remaining: VerifyResult
    """The report of a check of every stored byte, after the repair."""
    rebuilt: tuple[str, ...] = ()
    """Parts of the store as a whole that work again: "counters", or nothing."""

    @property
    def ok(self) -> bool:
        """Return whether the whole store is sound after the repair."""
        return self.remaining.ok


class _Done(NamedTuple):
    """The repairs of one session."""

    moved: tuple[int, int] | None = None
    rebuilt: tuple[str, ...] = ()
    missing: tuple[int, ...] = ()
    """Seqs of checkpoints whose record is missing. After the repair they count as freed."""
    forgotten: tuple[str, ...] = ()


def repair(backend: Backend) -> RepairResult:
    """Repair a store, and then check every stored byte of it.

    A session that cannot be repaired is logged and skipped; the report names its damage.
    """
    backend.salvage()
    rebuilt = ("counters",) if _recount(backend) else ()
    numbers = _numbers(backend)
    done: dict[int, _Done] = {}
    for number in numbers:
        try:
            done[number] = _with_retries(backend, number)
        except UNREADABLE as e:  # the other sessions can still be repaired
            logger.warning("session %d cannot be repaired: %s", number, e.message)
    remaining, losses = audit(backend, read_data=True)
    sessions = []
    for number in numbers:
        moved, works, missing, forgotten = done.get(number, _Done())
        name, unloadable = losses.get(number, (f"session {number}", {}))
        lost = {seq: str(seq) for seq in missing} | unloadable
        if moved or works or lost or forgotten:
            ids = tuple(lost[seq] for seq in sorted(lost))
            sessions.append(SessionRepair(name, moved, works, ids, forgotten))
    return RepairResult(tuple(sessions), remaining, rebuilt)


def _recount(backend: Backend) -> bool:
    """Replace the damaged counters; return whether there were any."""
    with open_reader(backend) as reader:
        try:
            if not [*reader.check_counters()]:
                return False
        except Corrupt:  # the table of counters cannot be read; verify reports it
            return False
        used = _used(reader)
        rows: dict[str, bytes] = dict(reader.view.scan(COUNTERS))
    for space, _ in faulty_counters(rows, used):
        with suppress(StaleHead):  # another process has replaced it
            backend.commit(
                changes.replace_counter(space, rows.get(space), new_counter(space, used))
            )
    return True


def _used(reader: Reader) -> dict[str, int]:
    """Return the highest session number and the highest stream number in use.

    Deletions of sessions take session numbers, and lines of descent take stream numbers.
    """
    sessions, streams = set[int](), set[int]()
    with suppress(Corrupt):  # `strays` finds the sessions that are not listed
        for listed in lineage.all_sessions(reader):
            sessions.add(listed.number)
    for number in sorted(sessions | {*strays(reader, sessions)}):
        sessions.add(number)
        with suppress(*UNREADABLE):
            row = reader.session_by_number(number) or SessionRow(number, b"", b"")
            origin = records.unseal_session(*row).origin
            sessions.add((origin or 0) >> records.SEQ_BITS)
        for seq, body in reader.grafts(number, 1, records.MAX_SEQ):
            with suppress(*UNREADABLE):
                ancestor = records.unseal_graft(number, seq, body).ancestor
                sessions.add((ancestor or 0) >> records.SEQ_BITS)
        for n, body in reader.operations(number, 0, records.MAX_SEQ):
            with suppress(*UNREADABLE):
                sessions.add(records.unseal_operation(number, n, body)[3].get("order", 0))
        for checkpoint in lineage.sound_rows(reader, number):
            streams.add(checkpoint.line)
            with suppress(*UNREADABLE):
                streams.update(_streams(checkpoint.node()))
    for items in reader.item_rows(-1, 1 << 62):
        stream, first = items.position >> STREAM_BITS, items.position & (MAX_ITEMS - 1)
        streams.add(stream)
        with suppress(*UNREADABLE):
            if items.begin[8] & REFS:
                body = reader.items(stream, first, first + 1)[0].body
                streams.update(_streams_in_items(unseal_items(items.position, body, "items")))
    return {
        "session": max([n for n in sessions if n < 1 << 30], default=0),
        "stream": max([n for n in streams if n < 1 << 38], default=0),
    }


def _streams_in_items(row: ItemRow) -> Iterator[int]:
    for item in row.items():
        with suppress(*UNREADABLE):
            # An item of a dict is a key, which is a text, followed by its value.
            cut = msgpack.string_length(item, 0) if msgpack.is_text(item) else 0
            yield from _streams(parse(item[cut:] or item))


def _streams(node: Node) -> Iterator[int]:
    """Yield the streams and lines that a node names.

    The items of a rope may name more; they are found in the rows of items.
    """
    if isinstance(node, Struct):
        for child in node.children:
            yield from _streams(child)
    elif isinstance(node, Rope):
        yield from [stream for stream, _, _ in node.extents]
        yield from [n for tail in node.tails for n in (tail.line, tail.stream)]


def _with_retries(backend: Backend, number: int) -> _Done:
    """Repair a session; retry if another process saves to it or deletes from it.

    Raises Corrupt if the head cannot be replaced although it has not changed, or after 20 retries
    because of missing references.
    """
    tries = 0
    before: object = ...
    while True:
        try:
            return _session(backend, number)
        except StaleHead:
            with open_reader(backend) as reader:
                now = reader.head(number)
            if now == before:  # no other process has changed it
                raise Corrupt("the head of a session cannot be replaced") from None
            before = now
        except MissingReference:
            tries += 1
            if tries > _TRIES:
                raise Corrupt("what is deleted cannot be told from what is not") from None


def _numbers(backend: Backend) -> list[int]:
    """Return the numbers of the sessions to repair, also of those that are not listed."""
    wanted: list[int] = []
    listed: set[int] = set()
    with open_reader(backend) as reader:
        with suppress(Corrupt):  # `strays` finds the sessions that are not listed
            for row in lineage.all_sessions(reader):
                listed.add(row.number)
                if not _is_freeable(reader, row):
                    wanted.append(row.number)
        return [*wanted, *strays(reader, listed)]


def _is_freeable(reader: Reader, session: SessionRow) -> bool:
    """Return whether a session is deleted, and sound enough for gc to free it."""
    if not session.is_deleted:
        return False
    number = session.number
    try:
        return (
            reader.damage(number) is None
            and _head(reader, number, reader.head(number) or b"") is not None
        )
    except Corrupt:
        return False


def _session(backend: Backend, number: int) -> _Done:
    """Repair a session. Raises StaleHead or MissingReference if it was changed at the same time."""
    with open_reader(backend) as reader:
        if not _is_named(reader, number):
            return _Done()
        row = reader.head(number) or b""
        missing = list(_missing(reader, number))
        bad = {*missing, *_unloadable(backend, reader, number)}
        head = _head(reader, number, row)
        good = _newest_good(reader, number, head, bad)
        notes, rebuilt = _entries(reader, number)
        forgotten = _forgotten(reader, number)
        sound = head is not None and good == head.seq
        stuck = head is not None and sound and _is_stuck(reader, number, head)
    moved = None
    if stuck or (good and not sound):
        old = head or _guessed(backend, number)
        moved = _log(backend, number, row, old, good, notes)
        rebuilt += ["undo"] * stuck
    elif rebuilt and head is not None:
        backend.commit(Change(number, row, row, notes=notes).batch())
    if sound or moved:
        skipped = [] if head is not None else [old.last]
        if missing or skipped:
            _give_up(backend, number, missing + skipped)
        with suppress(Corrupt):  # a whole table is damaged; verify reports it
            rebuilt += ["log"] * (backend.salvage(accept=number) and not forgotten)
            forgotten += _fill_journal(backend, number)
    return _Done(moved, tuple(rebuilt), tuple(missing), tuple(forgotten))


def _forgotten(reader: Reader, number: int) -> list[str]:
    """Return descriptions of lost rows other than checkpoints; none if a table cannot be read."""
    try:
        return [*reader.check_tally(number)]
    except UNREADABLE:
        return []


def _fill_journal(backend: Backend, number: int) -> list[str]:
    """Write a placeholder for each lost entry of the journal, so that no number is used twice.

    Return a description of the lost entries; nothing if none, or more than 100,000, are lost.
    """
    with open_reader(backend) as reader:
        lost = [*islice(_lost_entries(reader, number), _MAX_ENTRIES + 1)]
        head, freed = reader.head(number) or b"", reader.turnover().freed
    if not lost or len(lost) > _MAX_ENTRIES:  # too many: their count is more likely damaged
        return []
    entry = values.encode({"what": LOST})
    rows = [JournalRow(n, records.seal_entry(number, n, entry)) for n in lost]
    notes = Notes(copied=Copied(freed, journal=rows))
    backend.commit(Change(number, head, head, notes=notes).batch())
    return [f"entries of the journal, {len(lost)} in all, the first is {lost[0]}"]


def _lost_entries(reader: Reader, number: int) -> Iterator[int]:
    """Yield the numbers of the journal's lost entries, after the first entry that exists."""
    expected: int | None = None
    for n, body in lineage.journal_rows(reader, number):
        yield from range(n if expected is None else expected, n)
        if body == records.MISSING:
            yield n
        expected = n + 1


def _log(
    backend: Backend, number: int, row: bytes, old: Head, good: int, notes: Notes
) -> tuple[int, int] | None:
    """Write a "repair" operation, which moves the head to `good` if necessary.

    After it, undo works again for all later operations. Return the head's seq before and after;
    None if the head stays.
    """
    before = old.seq
    new = old._replace(operations=old.operations + 1)
    if before != good:
        new = new._replace(seq=good, parent=_own_parent(backend, number, good))
    details = {"from": before, "to": good, "head": good}
    body = records.seal_operation(
        number, new.operations, "repair", time.time_ns() // 1000, new.last, details
    )
    notes.operation = OperationRow(new.operations, body)
    notes.needs = [Address(number, good)] if good else []
    backend.commit(Change(number, row, new.seal(number), notes=notes).batch())
    return None if before == good else (before, good)


def _is_stuck(reader: Reader, number: int, head: Head) -> bool:
    """Return whether undo does not work because the newest operation is damaged or missing."""
    rows = reader.operations(number, head.operations, head.operations)
    if head.operations and not rows:
        return True
    return any(lineage.read_operation(number, "", *row)[1].kind == DAMAGED for row in rows)


def _give_up(backend: Backend, number: int, missing: list[int]) -> None:
    """Count missing checkpoints as freed; as after gc, their children get grafts."""
    sweeps: list[Sweep] = []
    with suppress(*UNREADABLE), open_reader(backend) as reader:
        planner = FreePlanner(reader, number)
        planner.give_up(missing)
        while planner.due:
            sweeps.append(planner.sweep(reader))
    changes.sweep(backend, sweeps)


def _is_named(reader: Reader, number: int) -> bool:
    """Return whether the name of a session is sound.

    If it is not, no checkpoint of the session loads, so the session is not repaired.
    """
    try:
        lineage.session_name(reader, number)
    except UNREADABLE:
        return False
    return True


def _head(reader: Reader, number: int, row: bytes) -> Head | None:
    """Return the head; None if it is damaged or outdated.

    It is outdated if there is a checkpoint or an operation newer than the newest one it knows.
    """
    try:
        head = records.unseal_head(number, row)
    except UNREADABLE:
        return None
    newer = reader.operations(number, head.operations + 1, records.MAX_SEQ)
    return None if newer or _newest(reader, number) > head.last else head


def _newest(reader: Reader, number: int) -> int:
    """Return the seq of the newest checkpoint that exists, whatever the head says."""
    return max([0, *[row.seq for row in all_rows(reader, number)]])


def _guessed(backend: Backend, number: int) -> Head:
    """Return a head to replace a lost one: it comes after the newest checkpoint and operation.

    A newer checkpoint may be lost as well, and may have continued the same streams. So one seq is
    skipped, as if it had been used. The next save then starts new streams.
    """
    with open_reader(backend) as reader:
        last = _newest(reader, number)
        operations = [row.number for row in reader.operations(number, 0, records.MAX_SEQ)]
        gone = [high - 1 for _, high in lineage.freed(reader, number).all()]
    return Head(max([last, *gone]) + 1, 0, max([0, *operations]), None)


def _own_parent(backend: Backend, number: int, seq: int) -> int | None:
    """Return the seq of a checkpoint's parent in the same session, if any."""
    with open_reader(backend) as reader:
        record = lineage.read_row(reader, Address(number, seq)).record
    return record.own_parent


def _newest_good(reader: Reader, number: int, head: Head | None, bad: set[int]) -> int:
    """Return the seq of the head if it loads, else of the nearest ancestor that loads.

    If there is none, return the newest checkpoint that loads and is not deleted. Return 0 if there
    is no such checkpoint, or if the head points at none.
    """
    if head is not None and not head.seq:
        return 0
    if head is not None:
        for place, _ in lineage.ancestors(reader, Address(number, head.seq), head.parent):
            if place.session == number and place.seq not in bad:
                return place.seq
    deleted = {row.seq for row in reader.tombstones(number, 0, records.MAX_SEQ)}
    there = [row.seq for row in all_rows(reader, number) if row.seq not in deleted]
    return max([0, *[seq for seq in there if seq not in bad]])


def _missing(reader: Reader, number: int) -> Iterator[int]:
    """Yield the seqs of checkpoints whose record is missing although gc has not freed them."""
    there = IntervalSet.of(row.seq for row in all_rows(reader, number))
    there.update(lineage.freed(reader, number))
    for low, high in there.missing(1, lineage.newest(reader, number) + 1):
        yield from range(low, high)


def _unloadable(backend: Backend, reader: Reader, number: int) -> Iterator[int]:
    """Yield the seqs of checkpoints whose record is there, but whose state does not load."""
    check = DataCheck(StoredData(backend, reader)).check
    for seq, _, _ in all_rows(reader, number):
        try:
            check(lineage.read_row(reader, Address(number, seq)).node())
        except UNREADABLE:
            yield seq


def _entries(reader: Reader, number: int) -> tuple[Notes, list[str]]:
    """Return the index entries that are missing, and the names of the indexes they belong to."""
    notes = Notes()
    terms: list[IndexTerm] = []
    keys: list[KeyRow] = []
    seen: set[IndexTerm] = set()
    for row in lineage.sound_rows(reader, number):
        record = row.record
        if "key" in record.extra:
            key = records.encode_name(record.extra["key"])
            if reader.find_key(number, key) != record.seq:
                keys.append(KeyRow(key, record.seq))
        wanted = records.index_terms(record.id, record.extra)
        wanted += records.session_terms(number, record.extra)
        terms += [f for f in wanted if f not in seen and not _listed(reader, f)]
        seen.update(wanted)
    for seq, kind, value, _ in reader.marks(number, 0, records.MAX_SEQ):
        found = reader.checkpoint(number, seq) if type(seq) is int else None
        if found is not None and not _listed(reader, IndexTerm(kind, value, found.id)):
            terms.append(IndexTerm(kind, value, found.id))
    notes.terms, notes.keys = terms, keys
    return notes, ["searches"] * bool(terms) + ["keys"] * bool(keys)


def _listed(reader: Reader, term: IndexTerm) -> bool:
    with suppress(Corrupt):
        return lineage.has_term(reader, term)
    return False
