"""A hand-written loop around a model, made durable by three lines.

It works with the messages of OpenAI and of Anthropic. The model is scripted, so this example needs
no network. After a crash, the loop calls a tool again if its result was not stored. See killed.py
for tools that must not be called twice.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import holdfast

Message = dict[str, Any]
network = {"broken": True}


def weather(city: str) -> str:
    if network["broken"]:
        raise ConnectionError
    return f"18 degrees in {city}"


def loop(
    session: holdfast.Session,
    model: Callable[[list[Message]], Message],
    answer: Callable[[list[tuple[str, str]]], list[Message]],
) -> str:
    talk = session.conversation(system="Be brief.", budget=8000)  # 1: load or start it
    if not talk.messages:
        talk.append({"role": "user", "content": "How is the weather in Lisbon and in Porto?"})
    while True:
        calls = talk.dangling()  # tool calls of the model that have no result yet
        if calls:
            done = [(call.id, weather(**call.arguments)) for call in calls]
            print(f"  {len(done)} tools were called")
            talk.append(*answer(done))  # 2: on disk when this returns
        elif talk.messages[-1]["role"] == "assistant":
            return str(talk.messages[-1]["content"])
        else:
            window = talk.window()  # 3: the system prompt, and the newest messages that fit
            print(f"  the model is asked, with {len(window)} messages")
            talk.append(model(window))


def openai_model(messages: list[Message]) -> Message:
    """The message of client.chat.completions.create(messages=messages, ...)."""
    assert messages[0] == {"role": "system", "content": "Be brief."}
    if messages[-1]["role"] == "tool":
        return {"role": "assistant", "content": "; ".join(m["content"] for m in messages[-2:])}
    calls = [
        {"id": id, "type": "function", "function": {"name": "weather", "arguments": arguments}}
        for id, arguments in [("call_1", '{"city": "Lisbon"}'), ("call_2", '{"city": "Porto"}')]
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def openai_answer(results: list[tuple[str, str]]) -> list[Message]:
    return [{"role": "tool", "tool_call_id": id, "content": text} for id, text in results]


def anthropic_model(messages: list[Message]) -> Message:
    """The message of client.messages.create(system=..., messages=...): two arguments."""
    system, *rest = messages
    assert system == {"role": "system", "content": "Be brief."}
    last = rest[-1]["content"]
    if type(last) is list:
        return {"role": "assistant", "content": "; ".join(block["content"] for block in last)}
    calls = [
        {"type": "tool_use", "id": f"toolu_{city}", "name": "weather", "input": {"city": city}}
        for city in ("Lisbon", "Porto")
    ]
    return {"role": "assistant", "content": calls}


def anthropic_answer(results: list[tuple[str, str]]) -> list[Message]:
    blocks = [{"type": "tool_result", "tool_use_id": id, "content": t} for id, t in results]
    return [{"role": "user", "content": blocks}]


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        for name, model, answer in [
            ("OpenAI", openai_model, openai_answer),
            ("Anthropic", anthropic_model, anthropic_answer),
        ]:
            for network["broken"] in (True, False):
                print(f"{name}, the network is {'broken' if network['broken'] else 'back'}")
                with holdfast.open(Path(folder) / "agent.db") as store:
                    try:
                        print("  " + loop(store.session(name), model, answer))
                    except ConnectionError:
                        print("  the loop has failed; what was said is kept")


if __name__ == "__main__":
    main()
