"""Count the modules of holdfast in which functions run during one call: `python -m
bench.modules_crossed`.

A reader who follows the call through the code has to open each of them. Every call is made a few
times before it is counted, so that imports and first uses do not count.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from langchain_core.messages import AIMessage
from langgraph.checkpoint.base import empty_checkpoint
from starlette.testclient import TestClient

import holdfast
from holdfast import web
from holdfast.adapters.langgraph import HoldfastSaver

from .stores import opened

WARM_UP = 20
TEXT = "Hello. " * 200
"""Of the usual size: short conversations lie in the root of a state, and cost other modules."""


def crossed(call: Callable[[], object]) -> list[str]:
    """Return the names of the modules of holdfast whose functions run during the call."""
    found: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.partition(".")[0] == "holdfast":
            found.add(name)

    for _ in range(WARM_UP):
        call()
    threading.setprofile(note)  # for threads that the call starts
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return sorted(found)


@contextmanager
def calls(folder: Path) -> Iterator[dict[str, Callable[[], object]]]:
    """Yield what is measured, by name, on a store in the folder."""
    with opened(folder / "store.db") as store:
        client = TestClient(web.app(store, hosts=["testserver"]))
        with HoldfastSaver(store) as saver:
            session = store.session("talk")
            yield {
                "append": lambda: session.append("messages", {"role": "user", "content": TEXT}),
                "load": session.load,
                "run, step, tool": lambda: run(store.session("run")),
                "LangGraph put": puts(saver),
                "GET /api/log": lambda: client.get("/api/log?session=talk").raise_for_status(),
            }


def run(session: holdfast.Session) -> None:
    with session.run() as run:
        run.step("step", lambda: 1)
        run.tool(holdfast.ToolCall("1", "tool", {}), lambda: 2)


def puts(saver: HoldfastSaver) -> Callable[[], object]:
    """Return a function that adds a checkpoint with one more message to a thread."""
    messages: list[AIMessage] = []
    at: list[Any] = [{"configurable": {"thread_id": "ada", "checkpoint_ns": ""}}]

    def put() -> None:
        n = len(messages)
        messages.append(AIMessage(f"{n}: {TEXT}", id=str(n)))
        versions: Any = {"messages": str(n)}
        checkpoint = {
            **empty_checkpoint(), "id": f"{n:08}",
            "channel_values": {"messages": messages[:]}, "channel_versions": versions,
        }  # fmt: skip
        metadata: Any = {"source": "loop", "step": n}
        at[0] = saver.put(at[0], checkpoint, metadata, versions)  # type: ignore[arg-type]

    return put


def main() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder,
        calls(Path(folder)) as measured,
    ):
        for name, call in measured.items():
            modules = crossed(call)
            print(f"{name}: {len(modules)}")
            for module in modules:
                print(f"  {module}")


if __name__ == "__main__":
    main()
