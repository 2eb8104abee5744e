"""LangGraph: a long run with its SQLite saver, with ours and with none; and its history."""

from __future__ import annotations

import gc
import shutil
import sqlite3
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypedDict

from langchain_core.messages import AnyMessage
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages

from holdfast.adapters.langgraph import HoldfastSaver

from .lab import Lab, Row
from .messages import Writer
from .stores import disk_usage
from .timing import Ratio, duration, number, seconds

_CONFIG: Any = {"configurable": {"thread_id": "thread"}, "recursion_limit": 1_000_000}


class State(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]


@contextmanager
def _peer(path: Path) -> Iterator[SqliteSaver]:
    connection = sqlite3.connect(path, check_same_thread=False)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    try:
        yield SqliteSaver(connection)
    finally:
        connection.close()


SAVERS: dict[str, Callable[[Path], Any]] = {"peer": _peer, "ours": HoldfastSaver}


def _graph(saver: Any, texts: list[str]) -> Any:
    """Return a graph of two nodes that take turns, each adding the next text."""

    def say(state: State) -> Any:
        return {"messages": [("ai", texts[len(state["messages"]) - 1])]}

    builder = StateGraph(State)
    builder.add_node("one", say)
    builder.add_node("two", say)
    builder.add_edge(START, "one")
    builder.add_edge("one", "two")
    builder.add_conditional_edges(
        "two", lambda state: END if len(state["messages"]) > len(texts) else "one"
    )
    return builder.compile(checkpointer=saver)


def _run(graph: Any, saver: Any) -> None:
    options = {"durability": "sync"} if saver else {}
    graph.invoke({"messages": [("human", "begin")]}, _CONFIG, **options)


def _texts(count: int) -> list[str]:
    return [str(message["content"]) for message in Writer(7).conversation(count)]


def run(lab: Lab) -> list[Row]:
    """Measure an add_messages graph with one message of about 1 KB per superstep."""
    texts = _texts(lab.pick(1_000, 50))
    taken: dict[str, list[float]] = {"none": [], "peer": [], "ours": []}
    sizes: dict[str, int] = {}
    for i in range(lab.pick(5, 1)):
        gc.collect()
        graph = _graph(None, texts)
        taken["none"].append(seconds(lambda: _run(graph, None)))  # noqa: B023 - called at once
        for name in ("peer", "ours") if i % 2 else ("ours", "peer"):
            path = lab.path(f"graph-{name}-{i}")
            with SAVERS[name](path) as saver:
                graph = _graph(saver, texts)
                taken[name].append(seconds(lambda: _run(graph, saver)))  # noqa: B023
                if len(graph.get_state(_CONFIG).values["messages"]) != len(texts) + 1:
                    raise RuntimeError("messages were lost")
            sizes[name] = disk_usage(path)
            shutil.rmtree(path.parent)
    over = {
        name: [t - none for t, none in zip(taken[name], taken["none"], strict=True)]
        for name in ("peer", "ours")
    }
    ratio = Ratio.of(over["ours"], over["peer"])
    smaller = sizes["peer"] / sizes["ours"]
    return [
        lab.row(
            f"LangGraph, {len(texts):,} supersteps, durability sync: the file",
            "≥ 200 × smaller than SqliteSaver's",
            f"{number(smaller)} × ({sizes['ours'] / 1e6:.2f} MB; {sizes['peer'] / 1e6:.0f} MB)",
            passed=smaller >= 200,
        ),
        lab.row(
            f"LangGraph, {len(texts):,} supersteps: what the saver adds to a run without one",
            "≤ 0.5 × what SqliteSaver adds",
            f"{ratio} ({duration(over['ours'])} / {duration(over['peer'])})",
            passed=ratio.middle <= 0.5,
        ),
    ]


def history(lab: Lab) -> list[Row]:
    """Measure a complete get_state_history."""
    texts = _texts(lab.pick(900, 50))
    times: dict[str, list[float]] = {"peer": [], "ours": []}
    peaks: dict[str, int] = {}
    for name, make in SAVERS.items():
        path = lab.path(f"graph-history-{name}")
        with make(path) as saver:
            graph = _graph(saver, texts)
            _run(graph, saver)
            for _ in range(lab.pick(3, 1)):
                gc.collect()
                begun = time.perf_counter()
                states = list(graph.get_state_history(_CONFIG))
                times[name].append(time.perf_counter() - begun)
                if len(states) != len(texts) + 2:
                    raise RuntimeError(f"a history of {len(states)}")
                del states
            gc.collect()
            tracemalloc.start()
            states = list(graph.get_state_history(_CONFIG))
            peaks[name] = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            del states
        shutil.rmtree(path.parent)
    time_ratio = statistics.median(times["ours"]) / statistics.median(times["peer"])
    peak_ratio = peaks["ours"] / peaks["peer"]
    mine, theirs = peaks["ours"] / 1e6, peaks["peer"] / 1e6
    return [
        lab.row(
            f"LangGraph, get_state_history of {len(texts)} messages",
            "≤ 1/5 of SqliteSaver's time",
            f"1/{number(1 / time_ratio)} ({duration(times['ours'])} / {duration(times['peer'])})",
            passed=time_ratio <= 1 / 5,
        ),
        lab.row(
            f"LangGraph, get_state_history of {len(texts)} messages, all kept: peak memory",
            "≤ 1/5 of SqliteSaver's",
            f"1/{number(1 / peak_ratio)} ({mine:.0f} MB / {theirs:.0f} MB)",
            passed=peak_ratio <= 1 / 5,
        ),
    ]
