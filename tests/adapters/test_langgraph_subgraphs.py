"""Subgraphs follow their thread when it is rewound or forked."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.types import Command, interrupt

import holdfast
from holdfast.adapters.langgraph import HoldfastSaver
from holdfast.errors import CheckpointNotFound
from tests.adapters import graphs
from tests.adapters.test_langgraph import config, put
from tests.mutants import langgraph

if TYPE_CHECKING:
    from tests.support.stores import Home

FORK = config("fork")
DURABILITY = ["sync", "async", "exit"]
LASTING = [False, True]


def line(*nodes: tuple[str, Any]) -> Any:
    builder: Any = StateGraph(graphs.Plan)
    names = [name for name, _ in nodes]
    for name, node in nodes:
        builder.add_node(name, node)
    for a, b in zip([START, *names], names, strict=False):
        builder.add_edge(a, b)
    return builder


def asking(saver: Any, ran: list[str], lasting: bool, depth: int = 1) -> Any:
    """A graph that asks in a subgraph, after something was done there."""

    def said(name: str, *questions: str) -> Any:
        def node(_: Any) -> Any:
            ran.append(name)
            return {"steps": [interrupt(q) for q in questions] or [name]}

        return node

    inner = line(("draft", said("draft")), ("ask", said("ask", "go on?")), ("done", said("done")))
    for n in range(depth - 1):
        compiled = inner.compile(checkpointer=True if lasting else None)
        inner = line((f"before {n}", said(f"before {n}")), (f"deep {n}", compiled))
    outer = line(
        ("begin", said("begin")),
        ("inner", inner.compile(checkpointer=True if lasting else None)),
        ("end", said("end")),
    )
    return outer.compile(checkpointer=saver)


def rewind(home: Home, state: Any, thread: str = "t") -> None:
    home.store.session(thread).rewind(f"key:{state.config['configurable']['checkpoint_id']}")


@pytest.mark.parametrize("durability", DURABILITY)
@pytest.mark.parametrize("lasting", LASTING)
@pytest.mark.parametrize("depth", [1, 2])
def test_a_thread_that_was_rewound_to_a_question_in_a_subgraph(
    home: Home, lasting: bool, depth: int, durability: Any
) -> None:
    ran: list[str] = []
    graph = asking(HoldfastSaver(home.store), ran, lasting, depth)
    graph.invoke({"steps": []}, graphs.CONFIG, durability=durability)
    asked = graph.get_state(graphs.CONFIG)
    first = graph.invoke(Command(resume="yes"), graphs.CONFIG, durability=durability)
    assert "yes" in first["steps"]
    for n, answer in enumerate(["no", "maybe"]):
        rewind(home, asked)
        again = graph.get_state(graphs.CONFIG)
        assert (again.values, again.next) == (asked.values, asked.next)
        assert again.interrupts == asked.interrupts
        ran.clear()
        if n:
            graph = asking(HoldfastSaver(home.store), ran, lasting, depth)
        done = graph.invoke(Command(resume=answer), graphs.CONFIG, durability=durability)
        assert done["steps"] == [answer if s == "yes" else s for s in first["steps"]]
        assert ran == ["ask", "done", "end"]
        assert graph.get_state(graphs.CONFIG).values == done


@pytest.mark.parametrize("lasting", LASTING)
def test_a_step_with_a_subgraph_that_was_rewound_is_done_again(home: Home, lasting: bool) -> None:
    ran: list[str] = []

    def node(_: Any) -> Any:
        ran.append("ran")
        return {"steps": [f"run {len(ran)}"]}

    inner = line(("one", node), ("two", node)).compile(checkpointer=True if lasting else None)
    graph = line(("begin", node), ("inner", inner), ("end", node)).compile(
        checkpointer=HoldfastSaver(home.store)
    )
    graph.invoke({"steps": []}, graphs.CONFIG)
    home.store.session("t").rewind("@~2")
    state = graph.get_state(graphs.CONFIG)
    assert (state.values["steps"], state.next) == (["run 1"], ("inner",))
    assert len(graph.invoke(None, graphs.CONFIG)["steps"]) >= 4
    assert len(ran) == 4 + 3


def counting(saver: Any) -> Any:
    """A graph with a subgraph that remembers how often it was called."""
    inner = line(("count", lambda s: {"note": s.get("note", "") + "x"}))

    class Inner:
        graph = inner.compile(checkpointer=True)

    def call(_: Any) -> Any:
        return {"steps": [Inner.graph.invoke({"steps": []})["note"]]}

    return line(("call", call)).compile(checkpointer=saver)


def call(graph: Any, where: Any, said: str) -> list[str]:
    steps: list[str] = graph.invoke({"steps": [said]}, where)["steps"]
    return steps


def test_what_a_subgraph_remembers_is_rewound_with_its_thread(home: Home) -> None:
    graph = counting(HoldfastSaver(home.store))
    for n in range(3):
        steps = call(graph, graphs.CONFIG, f"{n}")
    assert steps == ["0", "x", "1", "xx", "2", "xxx"]
    ends = [s for s in graph.get_state_history(graphs.CONFIG) if not s.next]
    rewind(home, ends[1])
    assert call(graph, graphs.CONFIG, "2")[-1] == "xxx"
    rewind(home, ends[2])
    assert call(graph, graphs.CONFIG, "1")[-1] == "xx"
    graph = counting(HoldfastSaver(home.store))
    assert call(graph, graphs.CONFIG, "2")[-1] == "xxx"


def test_what_a_subgraph_remembers_is_forked_with_its_thread(home: Home) -> None:
    saver = HoldfastSaver(home.store)
    graph = counting(saver)
    for n in range(3):
        call(graph, graphs.CONFIG, f"{n}")
    ends = [s for s in graph.get_state_history(graphs.CONFIG) if not s.next]
    for name, end in zip(["three", "two", "one"], ends, strict=True):
        at = end.config["configurable"]["checkpoint_id"]
        home.store.session("t").fork(name, at=f"key:{at}")
    home.store.session("two").fork("again")
    assert call(graph, config("two"), "f")[-2:] == ["f", "xxx"]
    saver.copy_thread("one", "copy")
    saver.delete_thread("t")
    home.store.gc()
    assert call(graph, config("one"), "f")[-2:] == ["f", "xx"]
    assert call(graph, config("copy"), "f")[-2:] == ["f", "xx"]
    assert call(graph, config("again"), "f")[-2:] == ["f", "xxx"]
    assert call(graph, config("three"), "f")[-2:] == ["f", "xxxx"]
    assert call(graph, config("two"), "f")[-2:] == ["f", "xxxx"]
    assert call(graph, graphs.CONFIG, "f") == ["f", "x"]
    assert home.store.verify().ok


def test_a_subgraph_that_was_done_before_its_thread_asked_is_not_done_again(home: Home) -> None:
    inner = line(("count", lambda s: {"note": s.get("note", "") + "x"})).compile(checkpointer=True)

    def call(_: Any) -> Any:
        return {"steps": [inner.invoke({"steps": []})["note"], interrupt("sure?")]}

    graph = line(("call", call)).compile(checkpointer=HoldfastSaver(home.store))
    for n in range(2):
        graph.invoke({"steps": [f"{n}"]}, graphs.CONFIG)
        asked = graph.get_state(graphs.CONFIG)
        home.store.session("t").fork(f"fork {n}")
        graph.invoke(Command(resume="yes"), graphs.CONFIG)
    rewind(home, asked)
    for thread in ("t", "fork 1"):
        done = graph.invoke(Command(resume="no"), config(thread))
        assert done["steps"] == ["0", "x", "yes", "1", "xx", "no"]


def test_what_a_subgraph_remembers_is_rewound_with_a_fork(home: Home) -> None:
    graph = counting(HoldfastSaver(home.store))
    call(graph, graphs.CONFIG, "0")
    fork = home.store.session("t").fork("fork")
    assert call(graph, FORK, "1")[-1] == "xx"
    fork.rewind(next(c for c in fork.tree() if c.key))
    assert call(graph, FORK, "2")[-1] == "xx"


def test_a_fork_of_a_fork_whose_subgraph_went_on_later(home: Home) -> None:
    graph = counting(HoldfastSaver(home.store))
    for n in range(2):
        call(graph, graphs.CONFIG, f"{n}")
    fork = home.store.session("t").fork("fork")
    graph.update_state(FORK, {"steps": ["edited"]})
    fork.fork("other")
    assert call(graph, FORK, "f")[-2:] == ["f", "xxx"]
    assert call(graph, config("other"), "f")[-2:] == ["f", "xxx"]


@pytest.mark.parametrize("durability", DURABILITY)
def test_what_langgraph_branches_itself_is_as_with_its_own_saver(
    home: Home, durability: Any
) -> None:
    told = []
    for saver in (InMemorySaver(), HoldfastSaver(home.store)):
        graph = counting(saver)
        for n in range(3):
            call(graph, graphs.CONFIG, f"{n}")
        ends = [s for s in graph.get_state_history(graphs.CONFIG) if not s.next]
        graph.update_state(ends[1].config, {"steps": ["edited"]})
        told.append(graph.invoke({"steps": ["3"]}, graphs.CONFIG, durability=durability))
    assert told[0] == told[1]
    assert told[0]["steps"] == ["0", "x", "1", "xx", "edited", "3", "xxxx"]


@pytest.mark.parametrize("durability", DURABILITY)
@pytest.mark.parametrize("lasting", LASTING)
@pytest.mark.parametrize("gone", [False, True])
def test_a_fork_at_a_question_in_a_subgraph_answers_it(
    home: Home, lasting: bool, gone: bool, durability: Any
) -> None:
    ran: list[str] = []
    saver = HoldfastSaver(home.store)
    graph = asking(saver, ran, lasting, 2)
    graph.invoke({"steps": []}, graphs.CONFIG, durability=durability)
    asked = graph.get_state(graphs.CONFIG)
    session = home.store.session("t")
    session.fork("early")
    first = graph.invoke(Command(resume="yes"), graphs.CONFIG, durability=durability)
    session.fork("late", at=f"key:{asked.config['configurable']['checkpoint_id']}")
    if gone:
        saver.delete_thread("t")
        home.store.gc()
    for thread in ("early", "late"):
        again = graph.get_state(config(thread))
        assert (again.values, again.next) == (asked.values, asked.next)
        assert again.interrupts == asked.interrupts
        ran.clear()
        done = graph.invoke(Command(resume="no"), config(thread), durability=durability)
        assert done["steps"] == ["no" if s == "yes" else s for s in first["steps"]]
        assert ran == ["ask", "done", "end"]
    if not gone:
        assert graph.get_state(graphs.CONFIG).values == first
    rewind(home, asked, "early")
    done = graph.invoke(Command(resume="maybe"), config("early"), durability=durability)
    assert "maybe" in done["steps"]
    assert "no" not in done["steps"]


@pytest.mark.parametrize("lasting", LASTING)
def test_reading_the_subgraphs_of_a_fork_writes_nothing(home: Home, lasting: bool) -> None:
    graph = asking(HoldfastSaver(home.store), [], lasting, 2)
    graph.invoke({"steps": []}, graphs.CONFIG)
    home.store.session("t").fork("fork").fork("other")
    names = [info.name for info in home.store.sessions()]
    with ExitStack() as opened:
        store = home.store
        if home.durable:
            options = {**home.options, "create": False, "read_only": True}
            store = opened.enter_context(holdfast.open(home.url, **options))
        graph = asking(HoldfastSaver(store), [], lasting, 2)
        asked, *forked = [
            (listed(graph, thread), seen(graph.get_state(config(thread), subgraphs=True)))
            for thread in ("t", "other", "fork")
        ]
    assert len({ns for ns, _, _ in asked[0]}) == 3
    assert forked == [asked, asked]
    assert [info.name for info in home.store.sessions()] == names


def listed(graph: Any, thread: str) -> list[Any]:
    found = graph.checkpointer.list({"configurable": {"thread_id": thread}})
    return [
        (t.config["configurable"]["checkpoint_ns"], t.checkpoint, t.pending_writes) for t in found
    ]


def seen(state: Any) -> Any:
    """Of a graph and its subgraphs."""
    below = [seen(task.state) for task in state.tasks if task.state]
    return state.values, state.next, state.interrupts, below


def test_a_subgraph_that_a_fork_did_not_have_needs_no_origin(home: Home) -> None:
    saver = HoldfastSaver(home.store)
    graph = counting(saver)
    call(graph, graphs.CONFIG, "0")
    session = home.store.session("t")
    session.fork("fork", at=next(c for c in session.tree() if c.trigger == "input"))
    saver.delete_thread("t")
    call(graph, graphs.CONFIG, "0")
    assert call(graph, FORK, "f") == ["f", "x"]
    home.store.session("t").fork("other")
    graph.update_state(config("other"), {"steps": ["edited"]})
    home.store.session("t").delete()
    with pytest.raises(CheckpointNotFound, match="begins with was deleted"):
        call(graph, config("other"), "f")


def test_a_fork_that_went_on_needs_its_origin_no_more_for_a_subgraph(home: Home) -> None:
    graph = asking(HoldfastSaver(home.store), [], lasting=False)
    graph.invoke({"steps": []}, graphs.CONFIG)
    home.store.session("t").fork("fork").fork("other")
    first = graph.invoke(Command(resume="yes"), FORK)
    home.store.session("t").delete()
    graph.invoke({"steps": ["again"]}, FORK)
    done = graph.invoke(Command(resume="no"), FORK)
    assert done["steps"][: len(first["steps"]) + 1] == [*first["steps"], "again"]
    assert "no" in done["steps"]
    with pytest.raises(CheckpointNotFound, match="begins with was deleted"):
        graph.get_state(config("other"), subgraphs=True)


@pytest.mark.parametrize("lasting", LASTING)
def test_a_fork_does_not_follow_its_origin_to_the_next_question(home: Home, lasting: bool) -> None:
    asks = [(q, lambda _, q=q: {"steps": [interrupt(q)]}) for q in ("first", "second")]
    inner = line(*asks).compile(checkpointer=True if lasting else None)
    graph = line(("inner", inner)).compile(checkpointer=HoldfastSaver(home.store))
    graph.invoke({"steps": []}, graphs.CONFIG)
    home.store.session("t").fork("fork")
    graph.invoke(Command(resume="a"), graphs.CONFIG)
    assert [i.value for i in graph.get_state(FORK).interrupts] == ["first"]
    graph.invoke(Command(resume="b"), FORK)
    assert graph.invoke(Command(resume="c"), FORK)["steps"] == ["b", "c"]
    assert graph.invoke(Command(resume="d"), graphs.CONFIG)["steps"] == ["a", "d"]


def test_a_second_question_after_a_rewind(home: Home) -> None:
    def node(_: Any) -> Any:
        return {"steps": [interrupt("first?"), interrupt("second?")]}

    inner = line(("ask", node)).compile()
    graph = line(("inner", inner)).compile(checkpointer=HoldfastSaver(home.store))
    graph.invoke({"steps": []}, graphs.CONFIG)
    asked = graph.get_state(graphs.CONFIG)
    for answer in ("a", "b"):
        graph.invoke(Command(resume=answer), graphs.CONFIG)
    rewind(home, asked)
    graph.invoke(Command(resume="c"), graphs.CONFIG)
    again = graph.get_state(graphs.CONFIG)
    assert [i.value for i in again.interrupts][-1] == "second?"
    assert graph.invoke(Command(resume="d"), graphs.CONFIG)["steps"] == ["c", "d"]


@pytest.mark.parametrize("lasting", LASTING)
def test_pruning_a_thread_that_was_rewound_to_a_question_in_a_subgraph(
    home: Home, lasting: bool
) -> None:
    ran: list[str] = []
    saver = HoldfastSaver(home.store)
    graph = asking(saver, ran, lasting)
    graph.invoke({"steps": []}, graphs.CONFIG)
    asked = graph.get_state(graphs.CONFIG)
    graph.invoke(Command(resume="yes"), graphs.CONFIG)
    rewind(home, asked)
    saver.prune(["t"])
    ran.clear()
    done = graph.invoke(Command(resume="no"), graphs.CONFIG)
    assert "yes" not in done["steps"]
    assert ran == ["ask", "done", "end"]


def older_checkpoint_of_the_root_graph(home: Home) -> list[str]:
    """Return what a subgraph continues from after a rewind, also for each root checkpoint."""
    saver = HoldfastSaver(home.store)
    root, inner = config("t"), config("t", "inner")
    for n in (1, 2, 3):
        root = put(saver, root, {"steps": [n]}, n)
        inner = put(saver, inner, {"drafts": [n]}, 10 + n, parents={"": f"{n:08}"})
    home.store.session("t").rewind("key:00000002")

    def found(**more: Any) -> str:
        asked = config("t", "inner")
        asked["configurable"] |= more
        given = saver.get_tuple(asked)
        assert given is not None
        return str(given.checkpoint["id"])

    return [found(), *[found(checkpoint_map={"": f"{n:08}"}) for n in (1, 2, 3)]]


def test_a_subgraph_that_runs_for_an_older_checkpoint(home: Home) -> None:
    assert older_checkpoint_of_the_root_graph(home) == [
        "00000011", "00000011", "00000011", "00000013",
    ]  # fmt: skip


def test_mutant_that_ignores_the_checkpoint_it_runs_for(
    memory: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    langgraph.runs_for_the_latest(monkeypatch)
    with pytest.raises(AssertionError):
        test_a_subgraph_that_runs_for_an_older_checkpoint(memory)
