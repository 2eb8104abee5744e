"""An agent that asks a person before it pays, and stops when its budget is spent.

Start it, answer its question, and start it again. docs/recipes/approval.md explains it.
"""

from typing import Any

import holdfast

Message = dict[str, Any]
QUESTION: Message = {"role": "user", "content": "Book a hotel in Lisbon."}
BUDGET = holdfast.Budget(cost=0.50, turns=10)


def model(messages: list[Message]) -> tuple[Message, holdfast.Usage]:  # call your model here
    call = {"id": "c1", "name": "book", "input": {"hotel": "Casa do Rio", "price": 850}}
    reply: Message = {"role": "assistant", "content": None, "tool_calls": [call]}
    if messages[-1]["role"] == "tool":
        reply = {"role": "assistant", "content": messages[-1]["content"], "tool_calls": []}
    return reply, holdfast.Usage(input=1_200, output=80)


def book(hotel: str, price: int) -> str:
    return f"{hotel} is booked for {price}."


def agent(run: holdfast.Run) -> None:
    def ask(messages: list[Message]) -> Message:
        reply, usage = model(messages)
        run.add_usage(usage, cost=usage.input * 2e-6 + usage.output * 8e-6)
        return reply

    for _ in run.turns():
        reply = run.step("model", ask, run.state["messages"])
        run.state["messages"].append(reply)
        for call in reply["tool_calls"]:
            if run.approve(call):  # a denial becomes the result by itself
                booked = run.tool(call, book)
                result = {"role": "tool", "tool_call_id": call["id"], "content": booked}
                run.state["messages"].append(result)
        if not reply["tool_calls"]:
            break


if __name__ == "__main__":
    with holdfast.open("trip.db") as store:
        trip = store.session("trip")
        if not trip.head or trip.head.status != "completed":
            with trip.run(state={"messages": [QUESTION]}, budget=BUDGET) as run:
                agent(run)
        print(trip.get().status, "-", trip.get().reason or trip.load()["messages"][-1]["content"])
