"""What is known of a checkpoint that cannot be read: its neighbours tell where it was."""

from __future__ import annotations

from itertools import dropwhile, islice
from typing import TYPE_CHECKING

from holdfast import ids, lineage
from holdfast.codec import records
from holdfast.errors import UNREADABLE, NotFound
from holdfast.lineage import Place

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast import Checkpoint, Store
    from holdfast.backends.base import Reader
    from holdfast.model import Record
    from holdfast.shapes import Shape
    from holdfast.web.asking import Asked

_NEAR = 32
"""How far a child is looked for: mostly it is the next one."""
_CHAIN = 12


def bridges(store: Store, name: str, page: list[Checkpoint]) -> dict[int, Shape]:
    """By the number of each that is damaged: its id, its step, and who came before it."""
    lost = [c.seq for c in page if c.damaged is not None]
    if not lost:
        return {}
    with store.backend.reader() as reader:
        session = lineage.find_session(reader, name)
        return {seq: _bridge(reader, Place(session, seq)) for seq in lost}


def _bridge(reader: Reader, place: Place) -> Shape:
    found = list(islice(_line(reader, place), 2))
    shown: Shape = {"id": None, "step": 0, "ancestor": None}
    if found and found[0][0] == place:
        shown |= {"id": ids.to_text(found[0][1].id), "step": found[0][1].step}
    if len(found) > 1 and found[1][0].session == place.session:
        shown["ancestor"] = ids.to_text(found[1][1].id)
    return shown


def _line(reader: Reader, place: Place) -> Iterator[tuple[Place, Record]]:
    """It and its ancestors: its child, or the head's row, knows how to step over it."""
    child = _child(reader, place)
    if child is not None:
        return dropwhile(lambda at: at[0] != place, lineage.ancestors(reader, child[0]))
    try:
        head = lineage.read_head(reader, place.session)[1]
    except UNREADABLE:
        return lineage.ancestors(reader, place)
    return lineage.ancestors(reader, place, head.parent if head.seq == place.seq else None)


def _child(reader: Reader, place: Place) -> tuple[Place, str] | None:
    """Where a child of it lies, and its id."""
    session, seq = place
    for n, id, body in reader.checkpoints(session, seq + 1, seq + _NEAR, _NEAR):
        try:
            record = records.unseal_checkpoint(session, n, id, body).record
        except UNREADABLE:
            continue
        if record.parent_seq == seq and "origin" not in record.extra:
            return Place(session, n), ids.to_text(id)
    return None


def told(store: Store, asked: Asked, problem: str) -> Shape:
    """What `integrity` says of it. Its number finds it if not even its id is left."""
    with store.backend.reader() as reader:
        place = _place(reader, asked)
        bridge = _bridge(reader, place)
        marks = lineage.marks_of(reader, *place, place.seq).get(place.seq, lineage.Marks())
        child = _child(reader, place)
        above = [each for each in islice(_line(reader, place), 1 + _CHAIN) if each[0] != place]
        name = lineage.session_name(reader, place.session)
        shown = {"id": asked.text("id"), "session": name, "seq": place.seq, "damaged": problem}
        return {
            "checkpoint": shown,
            "problem": problem,
            "known": {
                "step": bridge["step"] or None,
                "label": marks.label,
                "tags": list(marks.tags),
                "ancestor": bridge["ancestor"],
                "child": None if child is None else child[1],
            },
            "chain": [_link(reader, *each) for each in above],
        }


def _link(reader: Reader, place: Place, record: Record) -> Shape:
    shown: Shape = {"id": ids.to_text(record.id), "damaged": record.damaged}
    if record.damaged is None:
        name = lineage.session_name(reader, place.session)
        shown |= {"step": record.step, "hash": record.hash.hex(), "session": name}
    return shown


def _place(reader: Reader, asked: Asked) -> Place:
    raw = ids.from_text(asked.text("id"))
    found = reader.find_ids(raw, raw, 1) if raw is not None else []
    if found:
        return Place(found[0][0], found[0][1])
    name, seq = asked.maybe("session"), asked.number("seq", 0, records.MAX_SEQ)
    if name is not None and seq:
        session = lineage.find_session(reader, name)
        gone = any(low <= seq < high for low, high in lineage.freed(reader, session))
        if seq <= lineage.newest(reader, session) and not gone:
            return Place(session, seq)
    raise NotFound(f"there is no checkpoint {asked.text('id')}")
