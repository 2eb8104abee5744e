"""holdfast: durable, versioned state for AI agents."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.aio import AsyncSession, AsyncStore, aopen
    from holdfast.aruns import AsyncRun
    from holdfast.checkpoint import Checkpoint, SessionInfo
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
    from holdfast.model import Operation, ToolCall, Usage
    from holdfast.repair import Repaired
    from holdfast.retention import Plan, Retention, Verdict
    from holdfast.runs.conversation import Conversation
    from holdfast.runs.handles import Abandoned
    from holdfast.runs.options import Done
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
    from holdfast.runs.sync import Run, current_key
    from holdfast.runs.usage import Totals
    from holdfast.session import Session
    from holdfast.stats import Stats
    from holdfast.store import Store, open  # noqa: A004 - holdfast.open is the name users know
    from holdfast.transfer import Transferred
    from holdfast.verify import Problem, Report
else:
    # A name is imported when it is first used: a command that only lists sessions should not wait
    # for what runs agents, nor anybody for asyncio who does not use it.
    _HOMES = {
        "aio": "AsyncSession AsyncStore aopen",
        "aruns": "AsyncRun",
        "collect": "Collected",
        "diff": "Change Diff",
        "errors": "AmbiguousRevision CheckpointNotFound Conflict Corrupt Fenced HeadMoved "
        "HoldfastError InDoubt InvalidRequest KeyTaken NotFound NotSerializable "
        "SessionBusy SessionExists SessionNotFound StepChanged StepFailed StoreNotFound "
        "Unavailable UnsupportedFormat",
        "checkpoint": "Checkpoint SessionInfo",
        "model": "Operation ToolCall Usage",
        "repair": "Repaired",
        "retention": "Plan Retention Verdict",
        "runs.conversation": "Conversation",
        "runs.handles": "Abandoned",
        "runs.pending": "MadeCall Pending",
        "runs.policy": "AfterLLMResponse AfterToolCall EveryN EverySeconds Never Policy",
        "runs.retrying": "Retries",
        "runs.options": "Done",
        "runs.sync": "Run current_key",
        "runs.usage": "Totals",
        "session": "Session",
        "stats": "Stats",
        "store": "Store open",
        "transfer": "Transferred",
        "verify": "Problem Report",
    }
    _HOME = {name: home for home, names in _HOMES.items() for name in names.split()}

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"holdfast.{_HOME[name]}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_HOME})


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
