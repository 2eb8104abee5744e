"""How threads and their data are called in the store.

A thread has a namespace for its root graph, "", and one for each subgraph. Each namespace is a
session. Its name is the thread's id, and the namespace behind a bar:

    thread_id "ada", checkpoint_ns ""               session "ada"
    thread_id "ada", checkpoint_ns "plan:4f1c"      session "ada|plan:4f1c"

A checkpoint of LangGraph is a checkpoint of the session, and its id is the key of that checkpoint.
These names are stored, so they never change:

| Where | Name | Content |
|---|---|---|
| state | a channel | the channel's value, encoded by `serde` |
| state | `$checkpoint` | the rest of LangGraph's checkpoint: id, ts, channel_versions, … |
| meta | a name | metadata of that name, if it is a string, a number, a bool or None |
| meta | `$other` | the other metadata, encoded |
| meta | `$notes` | where the notes of the checkpoint begin (written by the session's notes) |
| meta | `$langgraph` | the links of the checkpoint; see below |
| links | `parent` | the id of the parent, or None |
| links | `latest` | the id of the latest checkpoint when this one became the head |
| links | `highest` | the highest id in the session when this one was saved |
| links | `after` | the attempt of the parent's step that made this checkpoint; see `writes` |
| links | `thread` | the attempt of the root graph's step in which a subgraph made this checkpoint |
| links | `brought` | True for a checkpoint that a fork has copied from its origin; see `forks` |
| note | `task`, `path`, `writes` | the writes of a task: rows of index, channel, encoded value |
| note | `at` | when the note was made, in microseconds |
| note | `after` | the attempt in which the task ran |
| note | `instead` | a list of notes that replaces all earlier notes of the checkpoint |
| note | `brought` | True for a note that a fork has copied from its origin |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.errors import Corrupt, InvalidRequest

if TYPE_CHECKING:
    from langchain_core.runnables import RunnableConfig

    from holdfast import Checkpoint

AGENT = "langgraph"
CHECKPOINT, LINKS, OTHER = "$checkpoint", "$langgraph", "$other"
AT, ATTEMPT, COPIED, REPLACES = "at", "after", "brought", "instead"


class ThreadAddress(NamedTuple):
    """A namespace of a thread."""

    thread: str
    ns: str = ""

    @classmethod
    def from_config(cls, config: RunnableConfig) -> ThreadAddress:
        configurable = config.get("configurable", {})
        thread, ns = configurable.get("thread_id"), configurable.get("checkpoint_ns") or ""
        if thread is None or thread == "":
            raise InvalidRequest(
                "the config names no thread",
                hint='pass config={"configurable": {"thread_id": "…"}}',
            )
        return cls(str(thread), ns)

    @classmethod
    def from_session(cls, name: str) -> ThreadAddress:
        thread, _, ns = name.partition("|")
        return cls(thread.replace("%7C", "|").replace("%25", "%"), ns)

    @property
    def session(self) -> str:
        """The name of its session. No two namespaces have the same."""
        thread = self.thread.replace("%", "%25").replace("|", "%7C")
        return f"{thread}|{self.ns}" if self.ns else thread

    @property
    def root(self) -> ThreadAddress:
        """The namespace of the root graph."""
        return ThreadAddress(self.thread)

    def config(self, id: str | None) -> RunnableConfig:
        configurable = {"thread_id": self.thread, "checkpoint_ns": self.ns, "checkpoint_id": id}
        return {"configurable": configurable}


class Links(NamedTuple):
    """How a checkpoint is connected to others. The table above explains the fields."""

    parent: str | None
    latest: str | None
    highest: str
    attempt: str | None = None
    root_attempt: str | None = None
    copied: bool = False

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Links:
        """Return the links of a checkpoint.

        Raises Corrupt if it is damaged, and InvalidRequest if it is not one of LangGraph's.
        """
        if checkpoint.damaged is not None:
            raise Corrupt(f"checkpoint {checkpoint.id} is damaged: {checkpoint.damaged}")
        stored = checkpoint.meta.get(LINKS)
        if type(stored) is not dict:
            raise InvalidRequest(
                f"session {checkpoint.session!r} is not a thread of LangGraph's",
                hint="give the graph a store of its own, or another thread_id",
            )
        return cls(
            stored["parent"], stored["latest"], stored["highest"], stored.get(ATTEMPT),
            stored.get("thread"), COPIED in stored,
        )  # fmt: skip

    def stored(self) -> dict[str, Any]:
        """Return the links as they are stored."""
        stored: dict[str, Any] = {
            "parent": self.parent, "latest": self.latest, "highest": self.highest,
        }  # fmt: skip
        if self.attempt:
            stored[ATTEMPT] = self.attempt
        if self.root_attempt is not None:
            stored["thread"] = self.root_attempt
        if self.copied:
            stored[COPIED] = True
        return stored


def id_of(checkpoint: Checkpoint) -> str:
    """Return LangGraph's id of a checkpoint; "" for a placeholder (see `forks`)."""
    return checkpoint.key or ""
