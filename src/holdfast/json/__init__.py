"""JSON of checkpoints, sessions, operations and reports, and of the values in states."""

from holdfast.json.shapes import (
    Shape,
    abandoned,
    changes,
    check_memory,
    checkpoint,
    comparison,
    dotted,
    dumps,
    event,
    made_call,
    operation,
    parse,
    path,
    pending,
    plan,
    problem,
    repair,
    report,
    session,
    stats,
    to_value,
    totals,
    usage,
    value,
    when,
)
from holdfast.json.shared_values import Pool

__all__ = [
    "Pool", "Shape", "abandoned", "changes", "check_memory", "checkpoint", "comparison", "dotted",
    "dumps", "event", "made_call", "operation", "parse", "path", "pending", "plan", "problem",
    "repair", "report", "session", "stats", "to_value", "totals", "usage", "value", "when",
]  # fmt: skip
