"""holdfast: durable, versioned state for AI agents."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.aio.run import AsyncRun
    from holdfast.aio.store import AsyncSession, AsyncStore, aopen
    from holdfast.errors import (
        AlreadyDecided,
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
        TooBig,
        Unavailable,
        UnsupportedFormat,
    )
    from holdfast.format.memory_limit import memory_limit
    from holdfast.history.checkpoint import Checkpoint, SessionInfo, unpack
    from holdfast.history.damage import Neighbours
    from holdfast.history.diff import Change, Changes, Comparison, Diff
    from holdfast.history.leases import Owner
    from holdfast.history.load import Items, Part, Series
    from holdfast.history.message_parts import MessagePart
    from holdfast.history.notes import Notes
    from holdfast.history.oplog import NextStep
    from holdfast.history.search import SearchHit
    from holdfast.history.search_index import IndexResult
    from holdfast.history.token_usage import Totals
    from holdfast.history.watch import Watcher
    from holdfast.maintenance.doctor import Finding, diagnose
    from holdfast.maintenance.gc import GcResult
    from holdfast.maintenance.prune_undo import UndoPruneResult
    from holdfast.maintenance.repair import RepairResult, SessionRepair
    from holdfast.maintenance.retention import Plan, Retention, Verdict, duration
    from holdfast.maintenance.stats import Stats
    from holdfast.maintenance.verify import Problem, VerifyResult
    from holdfast.model import RESTART, STATUSES, Operation, ToolCall, Usage
    from holdfast.runs.abandoned import Abandoned
    from holdfast.runs.autosave import Autosave
    from holdfast.runs.budget import Budget, BudgetSpent
    from holdfast.runs.checkpoint_policy import (
        AfterLLMResponse,
        AfterToolCall,
        EveryN,
        EverySeconds,
        Moment,
        Never,
        Policy,
    )
    from holdfast.runs.conversation import Conversation
    from holdfast.runs.messages import CONVERSATION_PATHS, dangling_calls
    from holdfast.runs.pending import MadeCall, Pending
    from holdfast.runs.run import Run
    from holdfast.runs.run_core import Done, Retries, current_key
    from holdfast.runs.streams import StreamWriter
    from holdfast.session import Session
    from holdfast.store import Store, open  # noqa: A004 - holdfast.open is the name users know
    from holdfast.transfer.copy import CopyResult
    from holdfast.transfer.export import file_kind, new_file
else:
    # A name is imported when it is first used: a command that only lists sessions should not wait
    # for what runs agents, nor anybody for asyncio who does not use it.
    _HOMES = {
        "aio.run": "AsyncRun",
        "aio.store": "AsyncSession AsyncStore aopen",
        "format.memory_limit": "memory_limit",
        "history.checkpoint": "Checkpoint SessionInfo unpack",
        "history.diff": "Change Changes Comparison Diff",
        "history.leases": "Owner",
        "history.damage": "Neighbours",
        "history.oplog": "NextStep",
        "history.load": "Items Part Series",
        "history.message_parts": "MessagePart",
        "history.search": "SearchHit",
        "history.search_index": "IndexResult",
        "history.notes": "Notes",
        "history.token_usage": "Totals",
        "history.watch": "Watcher",
        "maintenance.doctor": "Finding diagnose",
        "maintenance.gc": "GcResult",
        "maintenance.prune_undo": "UndoPruneResult",
        "maintenance.repair": "RepairResult SessionRepair",
        "maintenance.retention": "Plan Retention Verdict duration",
        "maintenance.stats": "Stats",
        "maintenance.verify": "Problem VerifyResult",
        "model": "RESTART STATUSES Operation ToolCall Usage",
        "runs.conversation": "Conversation",
        "runs.abandoned": "Abandoned",
        "runs.autosave": "Autosave",
        "runs.budget": "Budget BudgetSpent",
        "runs.messages": "CONVERSATION_PATHS dangling_calls",
        "runs.pending": "MadeCall Pending",
        "runs.checkpoint_policy": "AfterLLMResponse AfterToolCall EveryN EverySeconds "
        "Moment Never Policy",
        "runs.run_core": "Done Retries current_key",
        "runs.run": "Run",
        "runs.streams": "StreamWriter",
        "session": "Session",
        "store": "Store open",
        "transfer.copy": "CopyResult",
        "transfer.export": "file_kind new_file",
        "errors": "AlreadyDecided AmbiguousRevision CheckpointNotFound Conflict Corrupt "
        "Fenced HeadMoved HoldfastError InDoubt InvalidRequest KeyTaken "
        "NotFound NotSerializable SessionBusy SessionExists SessionNotFound "
        "StepChanged StepFailed StoreNotFound TooBig Unavailable "
        "UnsupportedFormat",
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
    "CONVERSATION_PATHS", "RESTART", "STATUSES", "Abandoned", "AfterLLMResponse", "AfterToolCall",
    "AlreadyDecided", "AmbiguousRevision", "AsyncRun", "AsyncSession", "AsyncStore", "Autosave",
    "Budget", "BudgetSpent", "Change", "Changes", "Checkpoint", "CheckpointNotFound", "Comparison",
    "Conflict", "Conversation", "CopyResult", "Corrupt", "Diff", "Done", "EveryN", "EverySeconds",
    "Fenced", "Finding", "GcResult", "HeadMoved", "HoldfastError", "InDoubt", "IndexResult",
    "InvalidRequest", "Items", "KeyTaken", "MadeCall", "MessagePart", "Moment", "Neighbours",
    "Never", "NextStep", "NotFound", "NotSerializable", "Notes", "Operation", "Owner", "Part",
    "Pending", "Plan", "Policy", "Problem", "RepairResult", "Retention", "Retries", "Run",
    "SearchHit", "Series", "Session", "SessionBusy", "SessionExists", "SessionInfo",
    "SessionNotFound", "SessionRepair", "Stats", "StepChanged", "StepFailed", "Store",
    "StoreNotFound", "StreamWriter", "TooBig", "ToolCall", "Totals", "Unavailable",
    "UndoPruneResult", "UnsupportedFormat", "Usage", "Verdict", "VerifyResult", "Watcher", "aopen",
    "current_key", "dangling_calls", "diagnose", "duration", "file_kind", "memory_limit",
    "new_file", "open", "unpack",
]  # fmt: skip
