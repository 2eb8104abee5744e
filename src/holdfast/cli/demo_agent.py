"""The travel agent of `holdfast demo`: real tools on a scratch folder, and a scripted model.

The same code starts and resumes. Nothing here depends on whether the process was killed before.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import holdfast

FLIGHTS = {"LIS": {"number": "HF 204", "price": 210}, "OSL": {"number": "HF 73", "price": 340}}
QUESTION = "Plan three days in Lisbon: a flight, and a hotel near the river."


def model(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the next message of the model. It depends on how many tools have answered."""
    answered = sum(message["role"] == "tool" for message in messages)
    asked = (
        ("search_flights", {"to": "LIS"}),
        ("book_flight", {"number": "HF 204"}),
        ("book_hotel", {"name": "Casa do Rio", "nights": 3}),
    )
    if answered == len(asked):
        done = "Done: flight HF 204 and three nights at Casa do Rio."
        return {"role": "assistant", "content": done}
    name, arguments = asked[answered]
    call = {"id": f"call_{answered + 1}", "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)}}  # fmt: skip
    return {"role": "assistant", "content": None, "tool_calls": [call]}


class World:
    """The effects that cannot be undone: bookings, each a line of a file."""

    def __init__(self, folder: Path, *, slow: bool) -> None:
        self.book, self._slow = folder / "bookings.txt", slow

    def search_flights(self, to: str) -> dict[str, Any]:
        return FLIGHTS[to]

    def book_flight(self, number: str) -> str:
        return self._book(f"flight {number}")

    def book_hotel(self, name: str, nights: int) -> str:
        booked = self._book(f"hotel {name}, {nights} nights")
        if self._slow:
            time.sleep(60)  # the demo kills the process here
        return booked

    def _book(self, what: str) -> str:
        with self.book.open("a") as book:
            book.write(f"{what}\n")
        print(f"booked {what}", flush=True)  # noqa: T201 - the demo reads this
        return f"booked: {what}"


def work(folder: Path, *, slow: bool = False) -> None:
    world = World(folder, slow=slow)
    start = {"messages": [{"role": "user", "content": QUESTION}], "plan": {"budget": 900}}
    with holdfast.open(folder / "agent.db") as store:
        session = store.session("lisbon", agent="travel agent")
        with session.run(state=start) as run:
            messages = run.state["messages"]
            for _ in run.turns():
                reply = run.step("model", model, messages)
                run.add_usage(tokens=60 * len(messages), cost=0.0004 * len(messages))
                messages.append(reply)
                for call in reply.get("tool_calls", []):
                    function = getattr(world, call["function"]["name"])
                    result = run.tool(call, function)
                    answer = json.dumps(result)
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": answer})
                if not reply.get("tool_calls"):
                    break


if __name__ == "__main__":
    work(Path(sys.argv[1]), slow="--slow" in sys.argv)
