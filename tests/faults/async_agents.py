"""The agent of agents.py on an event loop: its model runs in a thread, its tools on the loop."""

from __future__ import annotations

import asyncio
from typing import Any

import holdfast
from holdfast import Fenced, InDoubt
from holdfast.aio.store import Opening
from holdfast.runs.run_core import Halt

from .agents import Agent, Trail, World, begin, late_writes, watch


async def act(run: holdfast.AsyncRun, world: World, turns: int, *, look: bool) -> None:
    """All turns, as agents.act() goes through them."""

    async def pay(what: str) -> dict[str, Any]:
        await asyncio.sleep(0)
        return world.pay(what)

    messages = run.state["messages"]
    async for turn in run.turns(limit=turns):
        reply = await run.step("model", world.model, messages, turn)
        world.got(turn, "model#1")
        messages.append(reply)
        for call in reply["tool_calls"]:
            looked = world.looked(call) if look else None
            messages.append(await run.tool(call, pay, verify=looked))
            world.got(turn, call["id"])
        run.state["turns"] = turn


async def _insist(run: holdfast.AsyncRun, trail: Trail) -> None:
    """As agents._insist()."""
    for what, write in late_writes(run, trail).items():
        try:
            await write()
        except Fenced:
            continue
        except Halt:
            pass
        trail.say(f"wrote {what}")


class AsyncAgent(Agent):
    """What it writes is written by a store of its own, which it opens for asyncio."""

    def _open(self) -> Opening:
        return holdfast.aopen(self.place.url, durability="normal", **self.place.options)

    def _work(self, store: holdfast.Store, trail: Trail, options: dict[str, Any]) -> None:
        async def work() -> None:
            async with self._open() as own:
                watch(own.sync, trail)
                session = await own.session(self.session)
                world = self.place.world(self.session, trail)
                async with session.run(state=begin(), **options) as run:
                    try:
                        await act(run, world, self.turns, look=True)
                    except Fenced:
                        await _insist(run, trail)
                        raise

        try:
            asyncio.run(work())
        except Fenced:
            trail.say("fenced")

    def resume(self, store: holdfast.Store, *, look: bool) -> str | None:
        async def go_on() -> None:
            async with self._open() as own:
                session = await own.session(self.session)
                async with session.run(state=begin()) as run:
                    await act(run, self.place.world(self.session), self.turns, look=look)

        if self.is_completed(store):
            return None
        try:
            asyncio.run(go_on())
        except InDoubt as error:
            return error.key
        return None
