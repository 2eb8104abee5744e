"""Threads of other savers, brought here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.adapters.langgraph.naming import Where
from holdfast.errors import CheckpointNotFound

if TYPE_CHECKING:
    from collections.abc import Sequence

    from langgraph.checkpoint.base import BaseCheckpointSaver, PendingWrite

    from holdfast.adapters.langgraph.saver import HoldfastSaver


def adopt(source: BaseCheckpointSaver[Any], target: HoldfastSaver) -> int:
    """Copy all threads of another saver, which is only read; how many checkpoints were new.

    A saver does not tell on which path the task was that made a write. Writes keep their order.
    """
    places = []
    for found in source.list(None):
        at = found.config["configurable"]
        where, id, theirs = Where.of(found.config), at["checkpoint_id"], found.pending_writes or []
        here = target.writes(where, id)
        if here is None:
            places.append(at)
        elif len(here) < len(theirs) and _made(here) <= _made(theirs):
            target.set_writes(where, id, theirs)  # its thread went on there since, and not here
    places.sort(key=lambda at: str(at["checkpoint_id"]))  # parents come before their children
    for at in places:
        _bring(source, target, at)
    return len(places)


def _bring(source: BaseCheckpointSaver[Any], target: HoldfastSaver, at: dict[str, Any]) -> None:
    where, id = Where.of({"configurable": at}), at["checkpoint_id"]
    found = source.get_tuple({"configurable": at})
    if found is None:
        raise CheckpointNotFound(f"checkpoint {id} has gone while its thread was copied")
    if found.pending_writes:  # first: a checkpoint that is here has all of them, also after a crash
        target.set_writes(where, id, found.pending_writes)
    parent = (found.parent_config or {}).get("configurable", {}).get("checkpoint_id")
    target.put(where.config(parent), found.checkpoint, found.metadata, {})


def _made(writes: Sequence[PendingWrite]) -> set[tuple[str, str]]:
    return {(task, channel) for task, channel, _ in writes}
