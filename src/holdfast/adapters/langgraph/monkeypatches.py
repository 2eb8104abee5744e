"""Two changes to LangGraph itself. The import of the adapter makes them, for this process.

Without them, a checkpoint can contain values of the next step, and a saver cannot allow the types
that the schemas of a graph name.
"""

from __future__ import annotations

import sys
from functools import wraps
from typing import Any

from langgraph._internal import _serde
from langgraph.channels import NamedBarrierValue, Topic
from langgraph.channels.named_barrier_value import NamedBarrierValueAfterFinish
from langgraph.checkpoint.serde._msgpack import STRICT_MSGPACK_ENABLED

from holdfast.adapters.langgraph.serde import StrictSerializer


def patch() -> None:
    for channel in (NamedBarrierValue, NamedBarrierValueAfterFinish, Topic):
        _return_copies(channel)
    _pass_types()


def _return_copies(channel: Any) -> None:
    """Make a channel return a copy of its value to savers.

    LangGraph's channel returns the set or list itself and keeps adding to it. When `put` is called,
    it may contain writes of the next step. After a resume, these are added twice, or they do not
    count as new and the node that waits for them never runs.
    """
    checkpoint = channel.checkpoint

    @wraps(checkpoint)
    def copied(self: Any) -> Any:
        return _copy(checkpoint(self))

    channel.checkpoint = copied


def _copy(value: Any) -> Any:
    if type(value) is tuple:
        return tuple(map(_copy, value))
    return value.copy() if type(value) in (set, list) else value


class GraphTypes(set[tuple[str, ...]]):
    """The types in the schemas of a graph, as module and name."""

    classes: dict[tuple[str, str], type]
    """Those that their module does not have, such as a class that a function defines."""


def _pass_types() -> None:
    """Make graphs pass the types of their schemas to our savers.

    LangGraph passes them to all savers in its strict mode (LANGGRAPH_STRICT_MSGPACK), and else
    to none.
    """
    strict = STRICT_MSGPACK_ENABLED
    names, pass_on = _serde.build_serde_allowlist, _serde.apply_checkpointer_allowlist

    def types(*, schemas: Any = None, channels: Any = None) -> GraphTypes:
        found = GraphTypes(names(schemas=schemas, channels=channels))
        seen: set[Any] = set()
        for schema in schemas or ():
            _serde._collect_from_type(schema, set(), seen, set())  # noqa: SLF001
        named = {(t.__module__, t.__name__): t for t in seen if isinstance(t, type)}
        found.classes = {
            (module, name): t
            for (module, name), t in named.items()
            if (module, name) in found and getattr(sys.modules.get(module), name, None) is not t
        }
        return found

    def pass_to_ours(checkpointer: Any, allowlist: set[tuple[str, ...]] | None) -> Any:
        if strict or isinstance(getattr(checkpointer, "serde", None), StrictSerializer):
            return pass_on(checkpointer, allowlist)
        return checkpointer

    _serde.build_serde_allowlist = types
    _serde.apply_checkpointer_allowlist = pass_to_ours
    _serde.STRICT_MSGPACK_ENABLED = True  # type: ignore[attr-defined]
