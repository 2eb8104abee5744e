"""holdfast: durable, versioned state for AI agents."""

from typing import TYPE_CHECKING, Any

from holdfast.collect import Collected
from holdfast.diff import Change, Diff
from holdfast.errors import (
    AmbiguousRevision,
    CheckpointNotFound,
    Conflict,
    Corrupt,
    Fenced,
    HeadMoved,
    HoldfastError,
    InvalidRequest,
    KeyTaken,
    NotFound,
    NotSerializable,
    SessionBusy,
    SessionExists,
    SessionNotFound,
    StoreNotFound,
    Unavailable,
    UnsupportedFormat,
)
from holdfast.model import Checkpoint, Operation, SessionInfo, ToolCall, Usage
from holdfast.repair import Repaired
from holdfast.retention import Plan, Retention, Verdict
from holdfast.session import Session
from holdfast.stats import Stats
from holdfast.store import Store, open  # noqa: A004 - holdfast.open is the name users know
from holdfast.transfer import Transferred
from holdfast.verify import Problem, Report

if TYPE_CHECKING:
    from holdfast.aio import AsyncSession, AsyncStore, aopen
else:

    def __getattr__(name: str) -> Any:
        """asyncio takes long to import, so only those who use it do."""
        if name not in {"AsyncSession", "AsyncStore", "aopen"}:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from holdfast import aio

        return getattr(aio, name)


__version__ = "0.1.0"

__all__ = [
    "AmbiguousRevision",
    "AsyncSession",
    "AsyncStore",
    "Change",
    "Checkpoint",
    "CheckpointNotFound",
    "Collected",
    "Conflict",
    "Corrupt",
    "Diff",
    "Fenced",
    "HeadMoved",
    "HoldfastError",
    "InvalidRequest",
    "KeyTaken",
    "NotFound",
    "NotSerializable",
    "Operation",
    "Plan",
    "Problem",
    "Repaired",
    "Report",
    "Retention",
    "Session",
    "SessionBusy",
    "SessionExists",
    "SessionInfo",
    "SessionNotFound",
    "Stats",
    "Store",
    "StoreNotFound",
    "ToolCall",
    "Transferred",
    "Unavailable",
    "UnsupportedFormat",
    "Usage",
    "Verdict",
    "aopen",
    "open",
]
