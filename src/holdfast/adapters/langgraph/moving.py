"""Threads of other savers, brought here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.adapters.langgraph.threads import Where
from holdfast.errors import CheckpointNotFound

if TYPE_CHECKING:
    from langgraph.checkpoint.base import BaseCheckpointSaver

    from holdfast.adapters.langgraph.saver import HoldfastSaver


def adopt(source: BaseCheckpointSaver[Any], target: HoldfastSaver) -> int:
    """Copy all threads of another saver, which is only read; how many checkpoints were new.

    A saver does not tell on which path the task was that made a write. Writes keep their order.
    """
    places = [found.config["configurable"] for found in source.list(None)]
    places.sort(key=lambda at: str(at["checkpoint_id"]))  # parents come before their children
    return sum(_bring(source, target, at) for at in places)


def _bring(source: BaseCheckpointSaver[Any], target: HoldfastSaver, at: dict[str, Any]) -> bool:
    where, id = Where.of({"configurable": at}), at["checkpoint_id"]
    if target.has(where, id):
        return False
    found = source.get_tuple({"configurable": at})
    if found is None:
        raise CheckpointNotFound(f"checkpoint {id} has gone while its thread was copied")
    tasks: dict[str, list[tuple[str, Any]]] = {}
    for task, channel, value in found.pending_writes or ():
        tasks.setdefault(task, []).append((channel, value))
    # Writes first: a checkpoint that is here has all of them, also after a crash.
    for n, (task, writes) in enumerate(tasks.items()):
        target.put_writes(where.config(id), writes, task, f"{n:08}")
    parent = (found.parent_config or {}).get("configurable", {}).get("checkpoint_id")
    target.put(where.config(parent), found.checkpoint, found.metadata, {})
    return True
