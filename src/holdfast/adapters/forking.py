"""Forks that begin with a state of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast import fields as fielding
from holdfast import lineage
from holdfast.codec.layout import lay_out
from holdfast.errors import CheckpointNotFound, SessionExists
from holdfast.writing import Tip, Writer

if TYPE_CHECKING:
    from typing import Unpack

    from holdfast.checkpoint import Checkpoint
    from holdfast.fields import Fields
    from holdfast.session import Session


def fork_with(source: Session, name: str, state: Any, **fields: Unpack[Fields]) -> Checkpoint:
    """Begin a session with `state`, in one checkpoint, as a child of the source's head.

    What is in the source already is not written again. Raises a Conflict if the name is taken.
    """
    label, tags, extra = fielding.check(fields)
    extra["origin"] = source.name
    if source.agent is not None:
        extra["agent"] = source.agent
    writer = Writer(source.store, name)
    with source.store.backend.reader() as reader:
        number = lineage.find_session(reader, source.name)
        _, head = lineage.read_head(reader, number)
        if not head.seq:
            raise CheckpointNotFound(f"session {source.name!r} has no checkpoint")
        tip = Tip.read(reader, lineage.Place(number, head.seq))
        writer.look(reader)
    if writer.number is not None:
        raise SessionExists(f"session {name!r} exists already")
    return writer.checkpoint(
        "fork", lambda old, out: lay_out(state, old, out), extra, label, tags, tip
    )
