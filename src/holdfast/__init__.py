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
    InDoubt,
    InvalidRequest,
    KeyTaken,
    NotFound,
    NotSerializable,
    SessionBusy,
    SessionExists,
    SessionNotFound,
    StepChanged,
    StepFailed,
    StoreNotFound,
    Unavailable,
    UnsupportedFormat,
)
from holdfast.model import Checkpoint, Operation, SessionInfo, ToolCall, Usage
from holdfast.repair import Repaired
from holdfast.retention import Plan, Retention, Verdict
from holdfast.runs.conversation import Conversation
from holdfast.runs.handles import Abandoned
from holdfast.runs.pending import MadeCall, Pending
from holdfast.runs.policy import (
    AfterLLMResponse,
    AfterToolCall,
    EveryN,
    EverySeconds,
    Never,
    Policy,
)
from holdfast.runs.retrying import Retries
from holdfast.runs.run import Done
from holdfast.runs.sync import Run, current_key
from holdfast.runs.usage import Totals
from holdfast.session import Session
from holdfast.stats import Stats
from holdfast.store import Store, open  # noqa: A004 - holdfast.open is the name users know
from holdfast.transfer import Transferred
from holdfast.verify import Problem, Report

if TYPE_CHECKING:
    from holdfast.aio import AsyncSession, AsyncStore, aopen
    from holdfast.aruns import AsyncRun
else:

    def __getattr__(name: str) -> Any:
        """asyncio takes long to import, so only those who use it do."""
        if name not in {"AsyncRun", "AsyncSession", "AsyncStore", "aopen"}:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from holdfast import aio

        return getattr(aio, name)


__version__ = "0.1.0"

__all__ = [
    "Abandoned",
    "AfterLLMResponse",
    "AfterToolCall",
    "AmbiguousRevision",
    "AsyncRun",
    "AsyncSession",
    "AsyncStore",
    "Change",
    "Checkpoint",
    "CheckpointNotFound",
    "Collected",
    "Conflict",
    "Conversation",
    "Corrupt",
    "Diff",
    "Done",
    "EveryN",
    "EverySeconds",
    "Fenced",
    "HeadMoved",
    "HoldfastError",
    "InDoubt",
    "InvalidRequest",
    "KeyTaken",
    "MadeCall",
    "Never",
    "NotFound",
    "NotSerializable",
    "Operation",
    "Pending",
    "Plan",
    "Policy",
    "Problem",
    "Repaired",
    "Report",
    "Retention",
    "Retries",
    "Run",
    "Session",
    "SessionBusy",
    "SessionExists",
    "SessionInfo",
    "SessionNotFound",
    "Stats",
    "StepChanged",
    "StepFailed",
    "Store",
    "StoreNotFound",
    "ToolCall",
    "Totals",
    "Transferred",
    "Unavailable",
    "UnsupportedFormat",
    "Usage",
    "Verdict",
    "aopen",
    "current_key",
    "open",
]
