"""The same graphs on LangGraph's saver in memory and on ours: nobody can tell them apart."""

from __future__ import annotations

import operator
import subprocess
import sys
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import pytest
from langchain_core.messages import ToolMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.func import entrypoint, task
from langgraph.graph import START, StateGraph
from langgraph.types import Command, Send, interrupt
from pydantic import BaseModel

from holdfast.adapters.langgraph import HoldfastSaver
from holdfast.errors import NotSerializable
from tests.adapters import graphs

if TYPE_CHECKING:
    from tests.support.stores import Home

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
    saver = HoldfastSaver(home.store)
    got = seen(run(saver, durability))
    assert got == expected
    assert len(expected["history"]) > (0 if durability == "exit" else 1)
    again = HoldfastSaver(home.reopened(), allow=[graphs.Person])  # it has no graph
    assert [*again.list(graphs.CONFIG)] != []
    assert home.store.verify().ok


class Colour(Enum):
    RED = "red"


class Address(BaseModel):
    city: str


@dataclass
class Order:
    to: Address
    colour: Colour


class Parcel(BaseModel):
    weight: int


class Shop(TypedDict):
    orders: Annotated[list[Order], operator.add]
    anything: Any


def asking(saver: Any, node: Any = None) -> Any:
    """A graph with types of its own in its schemas."""

    def sell(state: Shop) -> Any:
        assert all(type(order) is Order for order in state["orders"])
        return {"orders": [Order(Address(city=interrupt("Where to?")), Colour.RED)]}

    def send(_: Parcel) -> None:
        pass

    builder: Any = StateGraph(Shop)
    builder.add_node("sell", node or sell)
    builder.add_node("send", send)
    builder.add_edge(START, "sell")
    builder.add_conditional_edges("sell", lambda _: [Send("send", Parcel(weight=1))])
    return builder.compile(checkpointer=saver)


@pytest.mark.parametrize("durability", DURABILITY)
def test_types_of_the_schemas_of_a_graph_are_stored(home: Home, durability: Any) -> None:
    saver = HoldfastSaver(home.store)
    for city in ("Oslo", "Rome"):
        graph = asking(saver)
        graph.invoke({"orders": []}, graphs.CONFIG, durability=durability)
        done = graph.invoke(Command(resume=city), graphs.CONFIG, durability=durability)
        assert done["orders"][-1] == Order(Address(city=city), Colour.RED)
    assert [*saver.list(graphs.CONFIG)] != []  # the saver knows the types of its graphs
    again = asking(HoldfastSaver(home.reopened()))
    assert again.get_state(graphs.CONFIG).values["orders"] == done["orders"]


@pytest.mark.parametrize("durability", DURABILITY)
def test_a_type_that_no_schema_names_is_refused_before_it_is_stored(
    home: Home, durability: Any
) -> None:
    saver = HoldfastSaver(home.store)
    graph = asking(saver, lambda _: {"orders": []})
    graph.invoke({"orders": [], "anything": 1}, graphs.CONFIG, durability=durability)
    other = asking(saver, lambda _: {"anything": graphs.Person("Ada", 36)})
    with pytest.raises(NotSerializable, match=r"anything: .*graphs\.Person"):
        other.invoke({"orders": []}, graphs.CONFIG, durability=durability)
    assert graph.get_state(graphs.CONFIG).values == {"orders": [], "anything": 1}
    done = graph.invoke({"orders": [], "anything": 2}, graphs.CONFIG, durability=durability)
    assert done["anything"] == 2


def local(saver: HoldfastSaver) -> Any:
    """A graph with a class that no import finds, and that class."""

    class State(BaseModel):
        log: Annotated[list[str], operator.add]
        address: Address | None = None

    def ask(state: Any) -> Any:
        assert type(state) is State
        return {"log": [interrupt("?")]}

    builder: Any = StateGraph(State).add_node("ask", ask).add_edge(START, "ask")
    return builder.compile(checkpointer=saver, interrupt_before=["ask"]), State


def test_a_class_of_a_function_is_stored(home: Home) -> None:
    graph, state = local(HoldfastSaver(home.store))
    graph.invoke(state(log=["in"], address=Address(city="Oslo")), graphs.CONFIG)
    again, other = local(HoldfastSaver(home.reopened()))
    assert [type(s.values.get("address")) for s in again.get_state_history(graphs.CONFIG)] == [
        Address, type(None)
    ]  # fmt: skip
    again.invoke(None, graphs.CONFIG)
    done = again.invoke(Command(resume="out"), graphs.CONFIG)
    assert other(**done) == other(log=["in", "out"], address=Address(city="Oslo"))


def test_types_of_a_function_graph_are_stored(home: Home) -> None:
    @task
    def sell(order: Order) -> Order:
        return order

    def build(saver: HoldfastSaver) -> Any:
        def shop(order: Any) -> Any:
            sold = sell(order).result()
            return Order(Address(city=interrupt("Where to?")), sold.colour)

        shop.__annotations__ = {"order": Order, "return": Order}  # LangGraph reads no strings
        return entrypoint(checkpointer=saver)(shop)

    build(HoldfastSaver(home.store)).invoke(Order(Address(city="?"), Colour.RED), graphs.CONFIG)
    again = build(HoldfastSaver(home.reopened()))
    done = again.invoke(Command(resume="Oslo"), graphs.CONFIG)
    assert done == Order(Address(city="Oslo"), Colour.RED)


def test_other_savers_allow_what_they_did(home: Home) -> None:
    theirs = InMemorySaver(serde=JsonPlusSerializer(allowed_msgpack_modules=[Address]))
    ours = HoldfastSaver(home.store, serde=JsonPlusSerializer(allowed_msgpack_modules=[Address]))
    for saver in (theirs, ours):
        assert asking(saver).checkpointer is saver
        assert saver.serde._allowed_msgpack_modules == {(__name__, "Address")}


def test_strict_mode_of_langgraph_is_left_on() -> None:
    code = f"""
import os
os.environ["LANGGRAPH_STRICT_MSGPACK"] = "true"
from langgraph.checkpoint.memory import InMemorySaver
from {__name__} import asking
saver = asking(InMemorySaver()).checkpointer
assert ("{__name__}", "Order") in saver.serde._allowed_msgpack_modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
