"""Sessions to look at."""

from __future__ import annotations

from typing import Any

import holdfast
from holdfast import ToolCall, Usage
from tests.runs.test_runs import Worker


def said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def trip(store: holdfast.Store) -> holdfast.Session:
    """Two branches: one of seven steps that failed, and one of five that went on from step 3."""
    session = store.session("trip", agent="planner")
    start = {"messages": [said("user", "Plan three days in Lisbon.")], "plan": {"budget": 900}}
    session.save(start, label="asked", trigger="user")
    asked = {"name": "search_flights", "arguments": '{"to": "LIS"}'}
    call = {"id": "call_1", "type": "function", "function": asked}
    session.append(
        "messages",
        {"role": "assistant", "content": None, "tool_calls": [call]},
        usage=Usage(tokens=100, cost=0.01),
        pending=[ToolCall("call_1", "search_flights", {"to": "LIS"})],
    )
    answer = {"role": "tool", "tool_call_id": "call_1", "content": "HF 204, 210 EUR"}
    session.append("messages", answer, label="flight found")
    for n in range(3):
        session.append(
            "messages", said("assistant", f"Detour {n}"), usage=Usage(tokens=4000 * n, cost=0.2)
        )
    session.save(
        {"messages": [], "plan": {}}, label="forgot everything", status="failed", reason="oops"
    )
    session.rewind("flight found")
    state = session.load()
    state["messages"][0] = said("user", "Plan four days in Porto.")
    state["plan"]["budget"] = 1200
    session.save(state, label="steered", tags=["human"])
    session.append("messages", said("assistant", "The **plan** is done."), label="done")
    return session


def in_doubt(store: holdfast.Store) -> holdfast.Session:
    """A run that was killed within a call."""
    session = store.session("hotel")

    def body(worker: Worker, run: holdfast.Run) -> None:
        for _ in run.turns(limit=1):
            call = {"id": "call_7", "name": "book_hotel", "input": {"nights": 3}}
            run.tool(call, lambda **_: worker.effect("booked", crash=True))

    Worker(session, state={"messages": [said("user", "Book it.")]})(body)
    assert [each.state for each in session.pending()] == ["in doubt"]
    return session


def waiting(store: holdfast.Store) -> holdfast.Session:
    session = store.session("approval")
    with session.run(state={"booked": None}) as run:
        run.wait_for("go", prompt="Book it for 850?")
    assert [each.state for each in session.pending()] == ["waiting"]
    return session
