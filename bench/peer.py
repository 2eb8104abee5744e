"""LangGraph's SQLite saver, called through its interface as LangGraph's runtime calls it.

The runtime turns messages into message objects (in `add_messages`), so the saver gets such objects.
Plain dicts are much cheaper for the saver. They are measured as well.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from langchain_core.messages import convert_to_messages
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.checkpoint.base.id import uuid6
from langgraph.checkpoint.sqlite import SqliteSaver

from .messages import Message

Config = dict[str, Any]


def as_objects(messages: Sequence[Message]) -> list[object]:
    """Return the messages as LangGraph's message objects."""
    return list(convert_to_messages(messages))


class Peer:
    """A database of the peer, with WAL and synchronous=FULL."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._configs: dict[str, Config] = {}
        self._versions: dict[str, str] = {}
        self._steps: dict[str, int] = {}
        self.open()

    def open(self) -> None:
        self._connection = sqlite3.connect(self._path, check_same_thread=False)
        self._saver = SqliteSaver(self._connection)
        self._saver.setup()
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA synchronous=FULL")
        mode = self._connection.execute("PRAGMA journal_mode").fetchone()[0]
        level = self._connection.execute("PRAGMA synchronous").fetchone()[0]
        if (mode, level) != ("wal", 2):
            raise RuntimeError(f"the peer is not in WAL + FULL but in {mode}, {level}")

    def put(self, thread: str, messages: Sequence[object]) -> Callable[[], object]:
        """Prepare the put of a checkpoint. The returned call stores it."""
        version = self._saver.get_next_version(self._versions.get(thread), None)
        self._versions[thread] = version
        step = self._steps[thread] = self._steps.get(thread, -1) + 1
        parent = self._configs.get(thread) or _config(thread)
        checkpoint = empty_checkpoint()
        checkpoint["id"] = str(uuid6(clock_seq=step))
        checkpoint["ts"] = datetime.now(UTC).isoformat()
        checkpoint["channel_values"] = {"messages": messages}
        checkpoint["channel_versions"] = {"messages": version}
        checkpoint["versions_seen"] = {"agent": {"messages": version}}
        checkpoint["updated_channels"] = ["messages"]
        self._configs[thread] = _config(thread, checkpoint["id"])
        metadata: Any = {"source": "loop", "step": step, "parents": {}}
        new_versions: Any = {"messages": version}
        return lambda: self._saver.put(parent, checkpoint, metadata, new_versions)  # type: ignore[arg-type]

    def get(self, thread: str) -> Any:
        """Return the newest state of a thread, decoded."""
        found = self._saver.get_tuple(_config(thread))  # type: ignore[arg-type]
        assert found is not None
        return found.checkpoint["channel_values"]

    def walk(self, thread: str, before: Config | None = None) -> int:
        """Iterate over all checkpoints of a thread, keep none, and return their number."""
        count = 0
        for _ in self._saver.list(_config(thread), before=before):  # type: ignore[arg-type]
            count += 1
        return count

    def latest(self, thread: str) -> Config:
        return self._configs[thread]

    def close(self) -> None:
        self._connection.close()


def _config(thread: str, checkpoint: str | None = None) -> Config:
    configurable = {"thread_id": thread, "checkpoint_ns": ""}
    if checkpoint is not None:
        configurable["checkpoint_id"] = checkpoint
    return {"configurable": configurable}
