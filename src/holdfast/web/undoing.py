"""What undo and redo would do, told before somebody does it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast import lineage, operations, shapes
from holdfast.errors import UNREADABLE, HoldfastError
from holdfast.lineage import Place
from holdfast.web.rows import row

if TYPE_CHECKING:
    from holdfast import Store
    from holdfast.backends.base import Reader
    from holdfast.operations import Step
    from holdfast.shapes import Shape
    from holdfast.web.asking import Asked


def undoable(store: Store, asked: Asked) -> Shape:
    """What would be taken back, and what would be done again; or why nothing would."""
    name = asked.session(store).name
    with store.backend.reader() as reader:
        return {
            "session": name,
            "undo": _told(reader, name, redo=False),
            "redo": _told(reader, name, redo=True),
        }


def _told(reader: Reader, name: str, *, redo: bool) -> Shape:
    try:
        number = lineage.find_session(reader, name)
        now = lineage.read_head(reader, number)[1].seq
        step = operations.upcoming(reader, name, redo=redo)
        return {"problem": None, "hint": None} | _shown(reader, number, now, step)
    except HoldfastError as e:
        return {"problem": e.message, "hint": e.hint}


def _shown(reader: Reader, session: int, now: int, step: Step) -> Shape:
    """Checkpoints are shown as rows; where the head goes is null if there is none then."""
    where, n = step.ref
    saved = where == operations.CHECKPOINT
    about = n if saved else step.details.get("seq")
    created = None
    if not saved:
        found = lineage.read_operation(session, "", *reader.operations(session, n, n)[0])[1]
        created = shapes.when(found.created_at)
    shown: Shape = {
        "ref": f"{where} {n}",
        "kind": step.kind,
        "created_at": created,
        "checkpoint": None if about is None else _row(reader, Place(session, about)),
        "head": None,
        "saved": saved,
    }
    to = step.effect.head
    if to is not None:
        shown["head"] = {
            name: _row(reader, Place(session, seq)) if seq else None
            for name, seq in (("from", now), ("to", to))
        }
    return shown | _details(step.details)


def _details(of: dict[str, Any]) -> Shape:
    runs = [*of.get("runs", ()), *of.get("held", ())]
    return {
        "tags": of.get("tags", []),
        "label": of.get("label"),
        "was": of.get("was"),
        "deleted": sum(high - low for low, high in runs),
    }


def _row(reader: Reader, place: Place) -> Shape:
    try:
        record = lineage.read_row(reader, place).record
    except UNREADABLE as e:
        found = reader.checkpoint(*place)
        record = lineage.damaged(place.seq, found[0] if found else None, e.message)
    return row(shapes.checkpoint(lineage.dress(reader, place, record)))
