"""Learn from its neighbours about a checkpoint whose record is unreadable.

A checkpoint stores its parent's id and step, and its grandparent's seq. The head's row stores the
seq of the head's parent. So a damaged record leaves traces in its neighbours.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import dropwhile, islice
from typing import TYPE_CHECKING, NamedTuple

from holdfast import ids
from holdfast.errors import UNREADABLE, CheckpointNotFound
from holdfast.format import records
from holdfast.history import lineage
from holdfast.history.checkpoint import Checkpoint
from holdfast.storage.rows import Address

if TYPE_CHECKING:
    from holdfast.storage.reader import Reader

_NEAR = 32
"""How many of the next checkpoints are searched for a child. Usually the first is one."""


class Neighbours(NamedTuple):
    """The neighbours of a checkpoint, and what they say about it."""

    session: str
    """The name of the session that contains the checkpoint."""
    seq: int
    """The seq of the checkpoint."""
    id: str | None
    """The id of the checkpoint, only zeros if it is unknown; None if it was deleted."""
    step: int
    """The step of the checkpoint; 0 if it is unknown."""
    label: str | None
    """Its label, which is stored beside its record."""
    tags: tuple[str, ...]
    """Its tags, which are stored beside its record."""
    child: str | None
    """The id of a child in the same session."""
    ancestors: list[Checkpoint]
    """The nearest ancestors, newest first, across forks."""


def neighbours(
    reader: Reader, checkpoint: Checkpoint | str | tuple[str, int], limit: int
) -> Neighbours:
    """Return the neighbours of a checkpoint, which may be deleted; see Store.neighbours."""
    place = _address(reader, checkpoint)
    key = (lineage.session_name(reader, place.session), place.seq)
    marks = lineage.marks_of(reader, *place, place.seq).get(place.seq, lineage.Marks())
    child = _child(reader, place)
    start, parent = (place, _parent_by_head(reader, place)) if child is None else (child[0], None)
    line = [*islice(lineage.line(reader, start, parent, limit + 2), limit + 2)]
    if child is not None:
        line = [*dropwhile(lambda c: (c.session, c.seq) != key, line)]
    own = line.pop(0) if line and (line[0].session, line[0].seq) == key else None
    return Neighbours(
        *key,
        id=None if own is None else own.id,
        step=0 if own is None else own.step,
        label=marks.label,
        tags=marks.tags,
        child=None if child is None else child[1],
        ancestors=line[:limit],
    )


def _address(reader: Reader, checkpoint: Checkpoint | str | tuple[str, int]) -> Address:
    if isinstance(checkpoint, str):
        id = ids.from_text(checkpoint)
        found = [] if id is None else reader.find_ids(id, id, 1)
        if not found:
            raise CheckpointNotFound(f"the store has no checkpoint {checkpoint!r}")
        return found[0].address
    if isinstance(checkpoint, Checkpoint):
        checkpoint = checkpoint.session, checkpoint.seq
    name, seq = checkpoint
    session = lineage.find_session(reader, name)
    if seq in lineage.freed(reader, session) or not 0 < seq <= lineage.newest(reader, session):
        raise CheckpointNotFound(f"session {name!r} has no checkpoint {seq}")
    return Address(session, seq)


def _child(reader: Reader, place: Address) -> tuple[Address, str] | None:
    """Return the address and the id of a child in the same session."""
    session, seq = place
    for n, id, body in reader.checkpoints(session, seq + 1, seq + _NEAR, _NEAR):
        with suppress(*UNREADABLE):
            record = records.unseal_checkpoint(session, n, id, body).record
            if record.own_parent == seq:
                return Address(session, n), ids.to_text(id)
    return None


def _parent_by_head(reader: Reader, place: Address) -> int | None:
    """Return the seq of the checkpoint's parent if the head's row stores it, otherwise None."""
    with suppress(*UNREADABLE):
        head = lineage.read_head(reader, place.session)[1]
        return head.parent if head.seq == place.seq else None
    return None
