"""The same graphs on LangGraph's saver in memory and on ours: nobody can tell them apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.messages import ToolMessage
from langgraph.checkpoint.memory import InMemorySaver

from holdfast.adapters.langgraph import HoldfastSaver
from tests.adapters import graphs

if TYPE_CHECKING:
    from tests.home import Home

DURABILITY = ["sync", "async", "exit"]


def told(value: Any) -> Any:
    """Without the ids that each run makes up anew."""
    if isinstance(value, ToolMessage):
        return (type(value), value.content, value.tool_call_id, value.status)
    if isinstance(value, dict):
        return {key: told(inner) for key, inner in value.items()}
    return [told(inner) for inner in value] if isinstance(value, list) else value


def seen(graph: Any) -> Any:
    """All that a history shows, but for what is different in each run: ids and times."""
    config = graphs.CONFIG
    now = graph.get_state(config, subgraphs=True)
    return {
        "values": told(now.values),
        "next": now.next,
        "interrupts": [i.value for i in now.interrupts],
        "history": [
            (
                told(state.values),
                state.next,
                {k: v for k, v in state.metadata.items() if k in ("source", "step")},
                [(t.name, t.path, t.error, [i.value for i in t.interrupts]) for t in state.tasks],
                state.parent_config is None,
            )
            for state in graph.get_state_history(config)
        ],
    }


@pytest.mark.parametrize("durability", DURABILITY)
@pytest.mark.parametrize("run", graphs.ALL)
def test_a_graph_runs_as_in_memory(home: Home, run: Any, durability: str) -> None:
    expected = seen(run(InMemorySaver(), durability))
    saver = HoldfastSaver(home.store, allow=[graphs.Person])
    got = seen(run(saver, durability))
    assert got == expected
    assert len(expected["history"]) > (0 if durability == "exit" else 1)
    again = HoldfastSaver(home.reopened(), allow=[graphs.Person])
    assert [*again.list(graphs.CONFIG)] != []
    assert home.store.verify().ok
