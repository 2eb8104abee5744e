"""holdfast: durable, versioned state for AI agents."""

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
from holdfast.session import Session
from holdfast.store import Store, open  # noqa: A004 - holdfast.open is the name users know
from holdfast.verify import Problem, Report

__version__ = "0.1.0"

__all__ = [
    "AmbiguousRevision",
    "Change",
    "Checkpoint",
    "CheckpointNotFound",
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
    "Problem",
    "Report",
    "Session",
    "SessionBusy",
    "SessionExists",
    "SessionInfo",
    "SessionNotFound",
    "Store",
    "StoreNotFound",
    "ToolCall",
    "Unavailable",
    "UnsupportedFormat",
    "Usage",
    "open",
]
