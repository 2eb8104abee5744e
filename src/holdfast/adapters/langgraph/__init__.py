"""A LangGraph saver on a holdfast store: `builder.compile(checkpointer=HoldfastSaver("a.db"))`.

Each thread is a session, and so is each namespace of a subgraph. Channels are keys of the state, so
a step stores only the items that it added.
"""

from holdfast.adapters.langgraph.adopt import adopt
from holdfast.adapters.langgraph.monkeypatches import patch
from holdfast.adapters.langgraph.saver import HoldfastSaver
from holdfast.adapters.langgraph.serde import StrictSerializer

__all__ = ["HoldfastSaver", "StrictSerializer", "adopt"]

patch()
