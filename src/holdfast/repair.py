"""Repair: heads off damaged checkpoints, and indexes made anew from what they index."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from holdfast import ids, lineage
from holdfast.backends.base import Change, Gone, Moved, Notes
from holdfast.codec import records
from holdfast.codec.records import Head
from holdfast.datacheck import DataCheck
from holdfast.errors import UNREADABLE, Corrupt
from holdfast.freeing import Tree
from holdfast.lineage import Place
from holdfast.live import all_rows, strays
from holdfast.logs import logger
from holdfast.model import DAMAGED
from holdfast.source import StoredSource

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from holdfast.backends.base import Backend, Reader, Sweep

_PAGE = 500
_PATIENCE = 20


class Repaired(NamedTuple):
    """What was done to a session, and what could not be."""

    session: str
    moved: tuple[int, int] | None
    """The head's seq before and after, if it had to move."""
    rebuilt: tuple[str, ...]
    """What lacked something and works again: "searches", "keys", "undo", "log"."""
    lost: tuple[str, ...]
    """Ids (or seqs, where even those are gone) of checkpoints whose state does not load."""


def repair(backend: Backend) -> list[Repaired]:
    """Every session that needed something, or has lost something."""
    backend.reindex()
    out = []
    for number in list(_numbers(backend)):
        try:
            done = _patiently(backend, number)
        except UNREADABLE as e:  # the others can be repaired all the same
            logger.warning("session %d cannot be repaired: %s", number, e.message)
            with backend.reader() as reader:
                done = _left_alone(reader, number)
        if done is not None:
            out.append(done)
    return out


def _patiently(backend: Backend, number: int) -> Repaired | None:
    """Again, if somebody saves or deletes meanwhile."""
    tries = 0
    before: object = ...
    while True:
        try:
            return _session(backend, number)
        except Moved:
            with backend.reader() as reader:
                now = reader.head(number)
            if now == before:  # nobody has moved it
                raise Corrupt("the head of a session cannot be replaced") from None
            before = now
        except Gone:
            tries += 1
            if tries > _PATIENCE:
                raise Corrupt("what is deleted cannot be told from what is not") from None


def _left_alone(reader: Reader, number: int) -> Repaired:
    """Of a session that stays as it is: what of it loads is not known, so all counts as lost."""
    name = _name(reader, number)
    lost = [_called(seq, id) for seq, id, _ in all_rows(reader, number)]
    return Repaired(f"session {number}" if name is None else name, None, (), tuple(lost))


def _numbers(backend: Backend) -> Iterator[int]:
    after: bytes | None = None
    listed: set[int] = set()
    while True:
        with backend.reader() as reader:
            page = []
            with suppress(Corrupt):  # those that are not listed are found by their checkpoints
                page = reader.sessions(after, _PAGE)
            if not page:
                yield from strays(reader, listed)
                return
            wanted = [n for n, raw, _ in page if not _is_past(reader, n, raw)]
        listed.update([n for n, _, _ in page])
        yield from wanted
        after = page[-1][1]


def _is_past(reader: Reader, number: int, name: bytes) -> bool:
    """Whether a session is deleted, and has all that gc needs to free it."""
    if records.former_name(number, name) is None or reader.damage(number) is not None:
        return False
    try:
        return _head(reader, number, reader.head(number) or b"") is not None
    except Corrupt:
        return False


def _session(backend: Backend, number: int) -> Repaired | None:
    with backend.reader() as reader:
        name = _name(reader, number)
        if name is None:
            return _left_alone(reader, number)
        row = reader.head(number) or b""
        missing = list(_missing(reader, number))
        bad = {seq: str(seq) for seq in missing} | _unloadable(backend, reader, number)
        head = _head(reader, number, row)
        good = _newest_good(reader, number, head, bad)
        notes, rebuilt = _entries(reader, number)
        sound = head is not None and good == head.seq
        stuck = head is not None and sound and _is_stuck(reader, number, head)
    moved = None
    if stuck or (good and not sound):
        old = head or _guessed(backend, number)
        moved = _log(backend, number, row, old, good, notes)
        if head is None:
            missing.append(old.last)
        rebuilt += ["undo"] * stuck
    elif rebuilt and head is not None:
        backend.commit(Change(number, row, row, notes=notes))
    if sound or moved:
        if missing:
            _give_up(backend, number, missing)
        rebuilt += ["log"] * backend.accept(number)
    if moved or rebuilt or bad:
        return Repaired(name, moved, tuple(rebuilt), tuple(bad.values()))
    return None


def _log(
    backend: Backend, number: int, row: bytes, old: Head, good: int, notes: Notes
) -> tuple[int, int] | None:
    """Move the head, if need be, by an operation. Undo goes on behind it."""
    before = old.seq
    new = old._replace(operations=old.operations + 1)
    if before != good:
        new = new._replace(seq=good, parent=_near(backend, number, good))
    details = {"from": before, "to": good, "head": good}
    body = records.seal_operation(
        number, new.operations, "repair", time.time_ns() // 1000, new.last, details
    )
    notes.operation = (new.operations, body)
    notes.needs = [(number, good)] if good else []
    backend.commit(Change(number, row, new.seal(number), notes=notes))
    return None if before == good else (before, good)


def _is_stuck(reader: Reader, number: int, head: Head) -> bool:
    """Whether undo cannot tell what comes last, because the newest operation is damaged."""
    rows = reader.operations(number, head.operations, head.operations)
    return any(lineage.read_operation(number, "", *row)[1].kind == DAMAGED for row in rows)


def _give_up(backend: Backend, number: int, missing: list[int]) -> None:
    """Count missing records among the freed. As after gc, their children tell what was there."""
    sweeps: list[Sweep] = []
    with suppress(*UNREADABLE), backend.reader() as reader:
        tree = Tree(reader, number)
        tree.give_up(missing)
        while tree.due:
            sweeps.append(tree.sweep(reader))
    backend.sweep(sweeps)


def _name(reader: Reader, number: int) -> str | None:
    """None if it is damaged: then nothing of the session loads, and it is left as it is."""
    try:
        return lineage.session_name(reader, number)
    except UNREADABLE:
        return None


def _head(reader: Reader, number: int, row: bytes) -> Head | None:
    """None if it is lost, or an old one: then something is newer than what it calls the newest."""
    try:
        head = records.unseal_head(number, row)
    except UNREADABLE:
        return None
    newer = reader.operations(number, head.operations + 1, records.MAX_SEQ)
    last = max([0, *[seq for seq, _, _ in all_rows(reader, number)]])
    return None if newer or last > head.last else head


def _guessed(backend: Backend, number: int) -> Head:
    """For a head's row that is lost: behind the newest checkpoint and operation there are.

    A checkpoint that is lost as well may have gone on from there. So the number of one is left out,
    as if it had been: then whoever saves next goes on from it in streams of its own.
    """
    with backend.reader() as reader:
        last = max([0, *[seq for seq, _, _ in all_rows(reader, number)]])
        operations = [n for n, _ in reader.operations(number, 0, records.MAX_SEQ)]
        gone = [high - 1 for _, high in lineage.freed(reader, number)]
    return Head(max([last, *gone]) + 1, 0, max([0, *operations]), None)


def _near(backend: Backend, number: int, seq: int) -> int | None:
    with backend.reader() as reader:
        record = lineage.read_row(reader, Place(number, seq)).record
    return None if "origin" in record.extra else record.parent_seq


def _newest_good(reader: Reader, number: int, head: Head | None, bad: Mapping[int, str]) -> int:
    """The head, or the nearest ancestor that loads, or else the newest checkpoint that does."""
    if head is not None and not head.seq:
        return 0
    if head is not None:
        for place, _ in lineage.ancestors(reader, Place(number, head.seq), head.parent):
            if place.session == number and place.seq not in bad:
                return place.seq
    buried = {seq for seq, _ in reader.tombs(number, 0, records.MAX_SEQ)}
    there = [seq for seq, _, _ in all_rows(reader, number) if seq not in buried]
    return max([0, *[seq for seq in there if seq not in bad]])


def _missing(reader: Reader, number: int) -> Iterator[int]:
    """Checkpoints without a record that were not freed."""
    there = {seq for seq, _, _ in all_rows(reader, number)}
    for low, high in lineage.freed(reader, number):
        there.update(range(low, high))
    yield from [n for n in range(1, lineage.newest(reader, number) + 1) if n not in there]


def _unloadable(backend: Backend, reader: Reader, number: int) -> dict[int, str]:
    """Checkpoints whose state does not load, and what to call them."""
    bad: dict[int, str] = {}
    check = DataCheck(StoredSource(backend, reader)).check
    for seq, id, _ in all_rows(reader, number):
        try:
            check(lineage.read_row(reader, Place(number, seq)).node())
        except UNREADABLE:
            bad[seq] = _called(seq, id)
    return bad


def _called(seq: int, id: bytes) -> str:
    return ids.to_text(id) if type(id) is bytes and len(id) == ids.BYTES else str(seq)


def _entries(reader: Reader, number: int) -> tuple[Notes, list[str]]:
    """Entries of indexes that are missing, and which they are."""
    notes = Notes()
    facets: list[tuple[int, bytes, bytes]] = []
    keys: list[tuple[bytes, int]] = []
    seen: set[tuple[int, bytes, bytes]] = set()
    for seq, id, body in all_rows(reader, number):
        try:
            record = records.unseal_checkpoint(number, seq, id, body).record
        except UNREADABLE:
            continue
        if "key" in record.extra:
            key = records.encode_name(record.extra["key"])
            if reader.find_key(number, key) != seq:
                keys.append((key, seq))
        wanted = records.facets(id, record.extra)
        wanted += records.session_facets(number, record.extra)
        facets += [f for f in wanted if f not in seen and not _listed(reader, *f)]
        seen.update(wanted)
    for seq, kind, value, _ in reader.marks(number, 0, records.MAX_SEQ):
        found = reader.checkpoint(number, seq) if type(seq) is int else None
        if found is not None and not _listed(reader, kind, value, found[0]):
            facets.append((kind, value, found[0]))
    notes.facets, notes.keys = facets, keys
    return notes, ["searches"] * bool(facets) + ["keys"] * bool(keys)


def _listed(reader: Reader, kind: int, value: bytes, id: bytes) -> bool:
    try:
        return reader.find_facets(kind, value, id, id + b"\0", 1) == [id]
    except Corrupt:
        return False
