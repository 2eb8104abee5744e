"""Stores that are the same each time, for commands to be tried on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import apsw

import holdfast
from holdfast import Retention, ToolCall, Usage


def trip(path: Path | str) -> None:
    """Two sessions: branches, a fork, labels, tags, a stretch that was pruned."""
    with holdfast.open(path, durability="normal") as store:
        plan = store.session("trip", agent="planner")
        plan.save(
            {"messages": [_said("user", "Plan a trip to Lisbon.")], "plan": {"budget": 900}},
            usage=Usage(tokens=120, cost=0.002),
            label="start",
            meta={"user": "u1"},
        )
        for n in range(4):
            plan.append(
                "messages",
                _said("assistant", f"Idea {n}: walk along the river."),
                trigger="llm",
                usage=Usage(280 + n, 20, 100, cost=0.01, model="large"),
            )
        plan.tag(None, "good")
        plan.rewind("@~2")
        plan.append(
            "messages",
            _said("assistant", "Let me book."),
            pending=[ToolCall("c1", "book_flight", {"to": "LIS"})],
            key="external-1",
        )
        other = plan.fork("trip-b", at="start")
        other.patch(
            set={("plan", "budget"): 400},
            append={"messages": [_said("user", "Cheaper, please.")]},
            status="completed",
        )
        plan.append("messages", _said("tool", "No seats."), status="failed", reason="no flight")
        state = plan.load()
        state["messages"][0]["content"] = "Plan a short trip to Lisbon."
        plan.save(state, label="edited", usage=Usage(tokens=50, cost=0.0))


def long(path: Path | str, count: int = 6) -> None:
    """One session, some of it pruned."""
    with holdfast.open(path, durability="normal") as store:
        notes = store.session("notes")
        for n in range(count):
            notes.save({"n": n, "text": "x" * n})
        notes.prune(Retention(keep_last=2))


def _said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


class Died(BaseException):
    """Ends a run as a kill would."""


def left(path: Path | str) -> None:
    """A run that died in a tool call, and one that waits for an answer."""
    with holdfast.open(path, durability="normal") as store:
        _die(store.session("job"))
        with store.session("ask").run(state={"log": []}) as run:
            for _ in run.turns(limit=1):
                run.state["log"].append(run.wait_for("approval", {"sum": 5}))


def _die(session: holdfast.Session) -> None:
    def pay(sum: int) -> None:
        raise Died

    try:
        with session.run(state={"log": []}) as run:
            for turn in run.turns(limit=3):
                run.state["log"].append(turn)
                if turn == 2:
                    try:
                        run.tool({"id": "c1", "name": "pay", "input": {"sum": 5}}, pay)
                    except Died:
                        assert run._core._opened is not None
                        run._core._over = True
                        run._core._opened.stop_heartbeat()
                        raise
    except Died:
        pass


def spoil(path: Path | str, seq: int, session: int = 1) -> None:
    """Flip a bit of a checkpoint's record."""
    connection = apsw.Connection(str(path))
    pos = session << 32 | seq
    [[body]] = connection.execute("SELECT body FROM checkpoints WHERE pos = ?", (pos,))
    torn = bytes([body[0] ^ 1]) + body[1:]
    connection.execute("UPDATE checkpoints SET body = ? WHERE pos = ?", (torn, pos))
    connection.close()
