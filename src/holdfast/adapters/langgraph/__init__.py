"""LangGraph on holdfast: `graph = builder.compile(checkpointer=HoldfastSaver("agents.db"))`.

A thread is a session, and so is each namespace of a subgraph, as the thread's child. A channel is a
key of the state, and a list is stored item by item: what a step costs is what it added. LangGraph's
checkpoint ids are keys of checkpoints; the latest is the highest of the line that the session is
on, so a session that was rewound goes on from there. Writes that are pending are notes of their
checkpoint. Two that continue the same checkpoint become siblings. A fork that holdfast has made of
a thread is a thread: what was before it is read where it lies, and taken over when it is written
to.

States of one `list` share their messages: do not change these in place.
"""

from holdfast.adapters.langgraph.moving import adopt
from holdfast.adapters.langgraph.saver import HoldfastSaver
from holdfast.adapters.langgraph.values import StrictSerializer

__all__ = ["HoldfastSaver", "StrictSerializer", "adopt"]
