"""Copy the threads of another saver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from holdfast.adapters.langgraph.names import ThreadAddress
from holdfast.adapters.langgraph.saver import HoldfastSaver
from holdfast.errors import CheckpointNotFound

if TYPE_CHECKING:
    from langchain_core.runnables import RunnableConfig
    from langgraph.checkpoint.base import BaseCheckpointSaver, PendingWrite


def adopt(source: BaseCheckpointSaver[Any], target: HoldfastSaver) -> int:
    """Copy all threads of another saver. Return how many checkpoints were new.

    The source is only read. Checkpoints that the target has are left alone, but writes that the
    source has got since are added, unless the thread was continued in the target.

    A saver does not list the path of a task. So writes keep the order in which it lists them.
    """
    new: list[dict[str, Any]] = []
    for found in source.list(None):
        configurable = found.config["configurable"]
        address, id = ThreadAddress.from_config(found.config), configurable["checkpoint_id"]
        theirs, ours = found.pending_writes or [], target.writes(address, id)
        if ours is None:
            new.append(configurable)
        elif len(ours) < len(theirs) and _channels(ours) <= _channels(theirs):
            target.set_writes(address, id, theirs)
    new.sort(key=lambda configurable: str(configurable["checkpoint_id"]))  # parents first
    for configurable in new:
        _adopt(source, target, configurable)
    return len(new)


def _adopt(
    source: BaseCheckpointSaver[Any], target: HoldfastSaver, configurable: dict[str, Any]
) -> None:
    config: RunnableConfig = {"configurable": configurable}
    address, id = ThreadAddress.from_config(config), configurable["checkpoint_id"]
    found = source.get_tuple(config)
    if found is None:
        raise CheckpointNotFound(f"checkpoint {id} has gone while its thread was copied")
    if found.pending_writes:  # first: so a copied checkpoint has them all, even after a crash
        target.set_writes(address, id, found.pending_writes)
    parent = (found.parent_config or {}).get("configurable", {}).get("checkpoint_id")
    checkpoint = found.checkpoint
    target.put(address.config(parent), checkpoint, found.metadata, checkpoint["channel_versions"])


def _channels(writes: Sequence[PendingWrite]) -> set[tuple[str, str]]:
    """Return which task has written to which channel."""
    return {(task, channel) for task, channel, _ in writes}
