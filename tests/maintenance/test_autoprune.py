"""Automatic retention: it runs in the background, and its failures fail no save."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

import holdfast
from holdfast import Retention
from holdfast.maintenance import autoprune
from tests.support.sessions import logged_warnings
from tests.support.stores import Home, fail


def test_retention_counts_across_restarts(sqlite: Home) -> None:
    """Processes that live for one save each: what is kept is bounded all the same."""
    sqlite.close()
    for i in range(60):
        with holdfast.open(
            sqlite.path, retention=Retention(keep_last=5), durability="normal"
        ) as store:
            store.session("s").save({"i": i})
    with holdfast.open(sqlite.path) as store:
        assert len(store.session("s")) < 5 + 20


@pytest.mark.parametrize("part", ["clean_up", "collect", "damage"])
def test_a_failed_prune_fails_no_save(home: Home, part: str) -> None:
    home.filled(3, "other")
    with pytest.MonkeyPatch.context() as patch, logged_warnings() as lines:
        patch.setattr(autoprune, "_ENOUGH", 1)
        if part == "clean_up":
            patch.setattr(autoprune.AutoPruner, "prune", fail)
        elif part == "collect":
            patch.setattr(autoprune, "collect", fail)
        else:
            home.spoil_checkpoint(2, name="other")
        home.store.retention = Retention(keep_last=2)
        session = home.session()
        saves: list[Callable[[int], Any]] = [
            lambda i: session.save({"i": i, "log": []}),
            lambda i: session.patch(set={"i": i}),
            lambda i: session.append("log", i),
        ]
        for i in range(48):
            saved = saves[i % 3](i)
            assert home.another().session("s").head == saved
            assert saved.step == i + 1
            if home.store._pruner is not None:
                home.store._pruner.close()
    what = f"pruning after a save of session {'s'!r}" if part == "clean_up" else "freeing what"
    assert [line.startswith(what) for line in lines] == [True] * 3


def test_a_failed_prune_fails_no_awaited_save() -> None:
    async def work() -> None:
        async with holdfast.aopen("memory:", retention=Retention(keep_last=2)) as store:
            session = await store.session("s")
            for i in range(20):
                assert (await session.save({"i": i})).step == i + 1
            assert await session.load() == {"i": 19}

    with pytest.MonkeyPatch.context() as patch, logged_warnings() as lines:
        patch.setattr(autoprune.AutoPruner, "prune", fail)
        asyncio.run(work())
    assert len(lines) == 1


def test_big_checkpoints_are_freed_too(sqlite: Home) -> None:
    sqlite.store.retention = Retention(keep_last=2)
    session = sqlite.session()
    for i in range(600):
        session.save({"raw": random.Random(i).randbytes(30_000)})
    assert sqlite.store._pruner is not None
    sqlite.store._pruner.close()
    with sqlite.store._repository.reader() as reader:
        assert reader.count_checkpoints() < 400
