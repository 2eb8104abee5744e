"""Type checkers see the types of steps and tools: `make lint` fails if they do not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, assert_type

if TYPE_CHECKING:
    import holdfast


@dataclass
class Reply:
    text: str


def price(room: int, *, breakfast: bool = False) -> float:
    return room * 100.0 + breakfast


async def look(place: str, days: int = 1) -> list[str]:
    return [place] * days


def reply(text: str) -> Reply:
    return Reply(text)


async def answer(text: str) -> Reply:
    return Reply(text)


def anything(*arguments: Any) -> Any:
    return arguments


def typed(run: holdfast.Run) -> None:
    """This is only checked, not called. An `ignore` that is not needed is an error."""
    assert_type(run.step("price", price, 7, breakfast=True), float)
    assert_type(run.step("price", price, 7, key="k", retries=3), float)
    assert_type(run.step("lambda", lambda: 3), int)
    assert_type(run.step("model", reply, "hello"), Any)
    assert_type(run.step("model", reply, "hello", key="k"), Any)
    assert_type(run.step("model", reply, "hello", as_=Reply), Reply)
    assert_type(run.step("any", anything, 1, key="k"), Any)
    run.step("price", price, "7")  # type: ignore[arg-type]
    run.step("price", price, 7, breakfst=True)  # type: ignore[arg-type, call-arg]
    run.step("price", price, "7", key="k")  # type: ignore[arg-type, call-arg]
    run.step("price", price)  # type: ignore[arg-type, call-arg]
    run.step("price", price, 7, on_doubt="never")  # type: ignore[arg-type, call-arg]
    run.step("price", 7)  # type: ignore[call-overload]

    call: dict[str, Any] = {"id": "c1", "name": "price", "input": {"room": 7}}
    assert_type(run.tool(call, price), float)
    assert_type(run.tool(call, reply, verify=lambda key: None), Any)
    assert_type(run.tool(call, reply, as_=Reply), Reply)
    run.tool(call, price, key="k")  # type: ignore[call-overload]

    assert_type(run.durable(price)(7, breakfast=True), float)
    assert_type(run.durable(retries=3)(price)(7), float)
    assert_type(run.durable(as_=Reply)(reply)("hello"), Reply)
    run.durable(price)("7")  # type: ignore[arg-type]


async def typed_async(run: holdfast.AsyncRun) -> None:
    """This is only checked, not called."""
    assert_type(await run.step("look", look, "Lisbon", days=2), list[str])
    assert_type(await run.step("look", look, "Lisbon", 2, key="k"), list[str])
    assert_type(await run.step("price", price, 7), float)
    assert_type(await run.step("model", answer, "hello"), Any)
    assert_type(await run.step("model", answer, "hello", as_=Reply), Reply)
    assert_type(await run.step("model", reply, "hello", key="k"), Any)
    await run.step("look", look, 7)  # type: ignore[arg-type]
    await run.step("look", look, 7, key="k")  # type: ignore[arg-type, call-arg]

    assert_type(await run.tool({}, look), list[str])
    assert_type(await run.tool({}, answer, retries=2), Any)
    assert_type(await run.tool({}, answer, as_=Reply), Reply)

    assert_type(await run.durable(look)("Lisbon"), list[str])
    assert_type(await run.durable(price)(7), float)
    assert_type(await run.durable(retries=2)(look)("Lisbon"), list[str])
