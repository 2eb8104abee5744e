"""How LangGraph's threads are named, and what their checkpoints say of themselves."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.errors import Corrupt, InvalidRequest

if TYPE_CHECKING:
    from langchain_core.runnables import RunnableConfig

    from holdfast.checkpoint import Checkpoint

AGENT = "langgraph"
REST = "$checkpoint"
"""The key of a state that holds what a checkpoint has beside its channels."""
OURS = "$langgraph"
"""The key of a checkpoint's meta that holds what LangGraph does not ask for."""
OTHER = "$other"
"""The key of a checkpoint's meta that holds metadata which cannot stand there as it is."""
DELTA = "counters_since_delta_snapshot"
"""The metadata that a checkpoint with delta channels has."""
INSTEAD = "instead"
"""The key of a note that holds others, which replace all before it."""

BROUGHT = "brought"
"""The key of what was taken over by a fork: a checkpoint, and the notes that it had."""
AT = "at"
"""The key of a note that says when it was made, in microseconds."""
EVER = sys.maxsize
"""Later than any."""


class Where(NamedTuple):
    thread: str
    ns: str

    @classmethod
    def of(cls, config: RunnableConfig) -> Where:
        asked = config.get("configurable", {})
        thread, ns = asked.get("thread_id"), asked.get("checkpoint_ns") or ""
        if thread is None or thread == "":
            raise InvalidRequest(
                "the config names no thread",
                hint='pass config={"configurable": {"thread_id": "…"}}',
            )
        return cls(str(thread), ns)

    @property
    def session(self) -> str:
        """Its session's name: no two have the same."""
        thread = self.thread.replace("%", "%25").replace("|", "%7C")
        return f"{thread}|{self.ns}" if self.ns else thread

    @classmethod
    def named(cls, session: str) -> Where:
        thread, _, ns = session.partition("|")
        return cls(thread.replace("%7C", "|").replace("%25", "%"), ns)

    def config(self, id: str | None) -> RunnableConfig:
        asked = {"thread_id": self.thread, "checkpoint_ns": self.ns, "checkpoint_id": id}
        return {"configurable": asked}


def own_of(checkpoint: Checkpoint) -> dict[str, Any]:
    if checkpoint.damaged is not None:
        raise Corrupt(f"checkpoint {checkpoint.id} is damaged: {checkpoint.damaged}")
    own = checkpoint.meta.get(OURS)
    if type(own) is not dict:
        raise InvalidRequest(
            f"session {checkpoint.session!r} is not a thread of LangGraph's",
            hint="give the graph a store of its own, or another thread_id",
        )
    return own


def is_fork(checkpoint: Checkpoint) -> bool:
    """Whether a fork begins with it: it stands for the checkpoint that was forked."""
    return checkpoint.operation == "fork" and OURS not in checkpoint.meta


def id_of(checkpoint: Checkpoint) -> str:
    return checkpoint.key or ""
