"""LangGraph's own conformance suite, on every backend, sync and async."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest
from langgraph.checkpoint.base import BaseCheckpointSaver, CheckpointTuple
from langgraph.checkpoint.conformance import checkpointer_test, validate

from holdfast.adapters.langgraph import HoldfastSaver

if TYPE_CHECKING:
    from tests.support.stores import Home

TESTS = {
    "put": 17, "put_writes": 10, "get_tuple": 10, "list": 16, "delete_thread": 5,
    "prune": 8, "copy_thread": 8, "delete_for_runs": 7,
}  # fmt: skip


class Sync(HoldfastSaver):
    """The suite calls what is async: here it gets the sync methods."""

    async def aget_tuple(self, config: Any) -> CheckpointTuple | None:
        return self.get_tuple(config)

    async def alist(self, config: Any, **options: Any) -> AsyncIterator[CheckpointTuple]:
        for each in self.list(config, **options):
            yield each

    async def aput(self, *args: Any) -> Any:
        return self.put(*args)

    async def aput_writes(self, *args: Any, **options: Any) -> None:
        self.put_writes(*args, **options)

    async def adelete_thread(self, thread_id: str) -> None:
        self.delete_thread(thread_id)

    async def adelete_for_runs(self, run_ids: Any) -> None:
        self.delete_for_runs(run_ids)

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        self.copy_thread(source_thread_id, target_thread_id)

    async def aprune(self, thread_ids: Any, *, strategy: str = "keep_latest") -> None:
        self.prune(thread_ids, strategy=strategy)


async def outcome(home: Home, kind: type[HoldfastSaver]) -> dict[str, Any]:
    @checkpointer_test(name=f"{kind.__name__} on {home.kind}")
    async def make() -> AsyncGenerator[BaseCheckpointSaver, None]:
        for info in list(home.store.sessions()):  # each capability begins with nothing
            home.store.session(info.name).delete()
        home.store.gc()
        async with kind(home.store) as saver:
            yield saver

    return (await validate(make)).results


@pytest.mark.parametrize("kind", [HoldfastSaver, Sync])
def test_the_whole_suite_passes(home: Home, kind: type[HoldfastSaver]) -> None:
    results = asyncio.run(outcome(home, kind))
    failures = [f for result in results.values() for f in result.failures or ()]
    assert not failures
    assert {name: result.tests_passed for name, result in results.items()} == TESTS
    assert sum(TESTS.values()) == 81
    assert home.store.verify().ok


def test_a_saver_that_forgets_its_writes_fails_it(memory: Home) -> None:
    class Forgetful(HoldfastSaver):
        async def aput_writes(self, *args: Any, **options: Any) -> None:
            pass

    results = asyncio.run(outcome(memory, Forgetful))
    assert not results["put_writes"].passed
    assert results["put"].passed
