"""Graphs as people build them, with scripted models: each is run the same way on any saver."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.channels.delta import DeltaChannel
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.prebuilt import ToolNode
from langgraph.types import Command, Send, interrupt

Run = Callable[[Any, str], Any]
CONFIG: Any = {"configurable": {"thread_id": "t"}}


class Talk(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]


@tool
def weather(city: str) -> str:
    """Return the weather in a city."""
    return f"{city}: rain"


def _model(state: Talk) -> Any:
    last = state["messages"][-1]
    n = len(state["messages"])
    if isinstance(last, ToolMessage):
        return {"messages": [AIMessage(f"It is like this: {last.content}", id=f"a{n}")]}
    calls = [
        {"name": "weather", "args": {"city": city}, "id": f"c{n}-{city}", "type": "tool_call"}
        for city in ("Oslo", "Rome")
    ]
    return {"messages": [AIMessage("", tool_calls=calls, id=f"a{n}")]}


def _more(state: Talk) -> str:
    last = state["messages"][-1]
    return "tools" if isinstance(last, AIMessage) and last.tool_calls else END


def tools(saver: Any, durability: Any) -> Any:
    """A model and its tools, over two turns."""
    builder = StateGraph(Talk)
    builder.add_node("model", _model)
    builder.add_node("tools", ToolNode([weather]))
    builder.add_edge(START, "model")
    builder.add_conditional_edges("model", _more)
    builder.add_edge("tools", "model")
    graph: Any = builder.compile(checkpointer=saver)
    for n in range(2):
        asked = [HumanMessage(f"And now? {n}", id=f"h{n}")]
        graph.invoke({"messages": asked}, CONFIG, durability=durability)
    return graph


class Plan(TypedDict):
    steps: Annotated[list[str], operator.add]
    note: str


def subgraph(saver: Any, durability: Any) -> Any:
    """A graph in a graph, with checkpoints of its own, which waits for a person inside."""
    inner = StateGraph(Plan)
    inner.add_node("draft", lambda _: {"steps": ["draft"]})
    inner.add_node("ask", lambda _: {"steps": [interrupt("go on?")], "note": "asked"})
    inner.add_edge(START, "draft")
    inner.add_edge("draft", "ask")
    outer = StateGraph(Plan)
    outer.add_node("begin", lambda _: {"steps": ["begin"]})
    outer.add_node("inner", inner.compile(checkpointer=True))
    outer.add_node("end", lambda s: {"steps": [f"end after {len(s['steps'])}"]})
    outer.add_edge(START, "begin")
    outer.add_edge("begin", "inner")
    outer.add_edge("inner", "end")
    graph: Any = outer.compile(checkpointer=saver)
    graph.invoke({"steps": ["input"]}, CONFIG, durability=durability)
    graph.invoke(Command(resume="yes"), CONFIG, durability=durability)
    return graph


def waiting(saver: Any, durability: Any) -> Any:
    """Stops at an interrupt and stays there."""
    builder = StateGraph(Plan)
    builder.add_node("one", lambda _: {"steps": ["one"]})
    builder.add_node("ask", lambda _: {"steps": [interrupt({"really": [1, 2]})]})
    builder.add_edge(START, "one")
    builder.add_edge(START, "ask")
    graph: Any = builder.compile(checkpointer=saver)
    graph.invoke({"steps": []}, CONFIG, durability=durability)
    return graph


def forked(saver: Any, durability: Any) -> Any:
    """update_state, and another way from a checkpoint in the past."""
    graph = tools(saver, durability)
    history = list(graph.get_state_history(CONFIG))
    past = history[len(history) // 2].config
    changed = graph.update_state(past, {"messages": [HumanMessage("Rather Bergen", id="h9")]})
    graph.invoke(None, changed, durability=durability)
    graph.update_state(CONFIG, {"messages": [AIMessage("The end", id="a99")]}, as_node="model")
    return graph


def fanned(saver: Any, durability: Any) -> Any:
    """Many tasks in one step."""

    class State(TypedDict):
        todo: list[int]
        done: Annotated[list[int], operator.add]

    builder = StateGraph(State)
    builder.add_node("split", lambda _: {})
    builder.add_node("work", lambda s: {"done": [s["n"] * s["n"]]})
    builder.add_edge(START, "split")
    builder.add_conditional_edges(
        "split", lambda s: [Send("work", {"n": n}) for n in s["todo"]], ["work"]
    )
    graph: Any = builder.compile(checkpointer=saver)
    graph.invoke({"todo": [1, 2, 3, 4], "done": []}, CONFIG, durability=durability)
    return graph


def _all(old: list[Any], writes: Any) -> list[Any]:
    return [*old, *(item for write in writes for item in write)]


def delta(saver: Any, durability: Any) -> Any:
    """A channel that is rebuilt from its writes."""

    class State(TypedDict):
        log: Annotated[list[str], DeltaChannel(_all, list, snapshot_frequency=4)]
        turn: int

    builder = StateGraph(State)
    builder.add_node("add", lambda s: {"log": [f"turn {s['turn']}"], "turn": s["turn"] + 1})
    builder.add_edge(START, "add")
    builder.add_conditional_edges("add", lambda s: END if s["turn"] % 5 == 0 else "add")
    graph: Any = builder.compile(checkpointer=saver)
    for _ in range(2):
        state = graph.get_state(CONFIG).values
        turn = state.get("turn", 0)
        graph.invoke({"log": [f"from {turn}"], "turn": turn + 1}, CONFIG, durability=durability)
    return graph


@dataclass
class Person:
    name: str
    age: int


def typed(saver: Any, durability: Any) -> Any:
    """Values of types of one's own."""

    class State(TypedDict):
        people: Annotated[list[Person], operator.add]
        best: Person | None

    builder = StateGraph(State)
    builder.add_node("add", lambda _: {"people": [Person("Ada", 36)], "best": Person("Eve", 5)})
    builder.add_edge(START, "add")
    graph: Any = builder.compile(checkpointer=saver)
    graph.invoke({"people": [Person("Bob", 7)]}, CONFIG, durability=durability)
    return graph


ALL = [tools, subgraph, waiting, forked, fanned, delta, typed]
