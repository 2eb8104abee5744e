"""A durable chat endpoint. Start it with `uvicorn chat_server:app`.

docs/recipes/chat.md explains it.
"""

from contextlib import suppress
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel

import holdfast

app, store = FastAPI(), holdfast.open("chats.db")


class Message(BaseModel):
    id: str
    text: str


def model(messages: list[dict[str, Any]]) -> dict[str, Any]:  # call your model here
    return {"role": "assistant", "content": f"You said: {messages[-1]['content']}"}


@app.post("/chat/{name}")
def chat(name: str, message: Message) -> str:
    talk = store.session(name).conversation(system="Be brief.", budget=8_000)
    with suppress(holdfast.KeyTaken):  # the client sends a message again: it is stored already
        talk.append({"role": "user", "content": message.text}, key=message.id)
    if talk.messages[-1]["role"] == "user":
        talk.append(model(talk.window()))
    return str(talk.messages[-1]["content"])


@app.exception_handler(holdfast.HeadMoved)
def conflict(request: Request, error: holdfast.HeadMoved) -> Response:
    return Response("another message came in between: send it again", 409)
