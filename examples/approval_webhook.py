"""An agent asks by one webhook, and a person answers by another.

Start it with `uvicorn approval_webhook:app`. docs/recipes/approval.md explains it.
"""

from typing import Annotated, Any

from fastapi import BackgroundTasks, Body, FastAPI, HTTPException

import holdfast

app, store = FastAPI(), holdfast.open("payments.db")


def pay(euro: int) -> str:
    return f"{euro} euros are paid"


def payment(run: holdfast.Run) -> None:
    call = {"id": "c1", "name": "pay", "input": {"euro": run.state["euro"]}}
    run.approve(call)  # halts here until there is an answer
    run.state["result"] = run.tool(call, pay)  # if it is denied: returns that, and calls nothing


def work(name: str, state: dict[str, Any] | None = None) -> None:
    """Begin or continue a run. It ends, or halts at a question."""
    with store.session(name).run(state=state) as run:
        payment(run)
    for asked in store.session(name).pending():
        print(f"{name} asks: {asked.arguments}")  # post it to a chat, with this key: asked.key


@app.post("/payments/{name}", status_code=202)
def begin(name: str, euro: Annotated[int, Body(embed=True)], later: BackgroundTasks) -> None:
    if not store.session(name).exists():  # else the request came twice
        later.add_task(work, name, {"euro": euro})


@app.post("/payments/{name}/{key}")
def answer(
    name: str, key: str, value: Annotated[bool | str, Body(embed=True)], later: BackgroundTasks
) -> str:
    try:
        store.session(name).answer(key, value)
    except holdfast.NotFound as e:
        raise HTTPException(404, e.message) from e
    except holdfast.AlreadyDecided as e:  # the webhook came twice, or two people decided
        return f"It was answered before: {e.result}"
    later.add_task(work, name)
    return "Thank you."
