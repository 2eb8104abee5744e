"""The fields of a checkpoint are kept, whatever happens to it, and checked before a save."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import TracerProvider

import holdfast
from holdfast import Retention, telemetry
from holdfast.aio.workers import Workers
from holdfast.errors import InvalidRequest
from holdfast.model import ToolCall, Usage
from tests.support.sessions import FIELDS, PLAIN_FIELDS
from tests.support.stores import Home

UNREADABLE_FIELDS: list[dict[str, Any]] = [
    *[{"usage": {"tokens": n}} for n in (1.5, "7", True, [1], -1)],
    *[{"usage": {"cost": n}} for n in ("1", Decimal("0.1"), False, math.nan, math.inf)],
    *[{"usage": {"input": 3, name: 5}} for name in ("cached", "reasoning")],
    *[{"usage": u} for u in (7, "10", [1], {"inputs": 1}, {"model": 3}, {"model": ""})],
    {"usage": Usage(input=-1)},
    {"usage": Usage(input=5, output=5, tokens=9)},
    *[{"pending": p} for p in (5, ToolCall("1", "t"), "ab", [None], {"a": 1})],
    {"pending": [ToolCall("1", "t", meta=None)]},  # type: ignore[arg-type]
]


@pytest.mark.parametrize("fields", UNREADABLE_FIELDS, ids=str)
def test_fields_that_could_not_be_read_again_are_refused(
    home: Home, fields: dict[str, Any]
) -> None:
    session = home.session()
    session.save({"n": 1}, usage=Usage(tokens=7, cost=1))
    for save in (session.save, lambda _, **more: session.append("log", 1, **more)):
        with pytest.raises(holdfast.InvalidRequest):
            save({"n": 2}, **fields)
    assert home.reopened().session("s").load() == {"n": 1}
    assert home.store.verify().ok


def test_every_field_is_kept(home):
    session = home.session()
    writes: list[Callable[..., Any]] = [
        lambda **f: session.save({"log": [1]}, **f),
        lambda **f: session.append("log", 2, **f),
        lambda **f: session.patch(set={"x": 1}, **f),
        lambda **f: session.save({"x": 2}, parent="@~1", **f),
    ]
    saved = [write(**FIELDS, key=f"key {n}") for n, write in enumerate(writes)]
    session = home.reopened().session("s")
    for n, checkpoint in enumerate(saved):
        for found in (checkpoint, session.get(checkpoint.id), home.store.get(checkpoint.id)):
            assert {name: getattr(found, name) for name in PLAIN_FIELDS} == PLAIN_FIELDS
            assert sorted(found.tags) == ["a", "b"]
            assert found.tags == checkpoint.tags  # in one order, whoever tells it
            assert found.key == f"key {n}"


def test_tags_and_labels_change_no_other_field(home):
    session = home.session()
    saved = session.save({"i": 1}, **FIELDS)
    session.tag(saved, "c")
    session.label(saved, "renamed")
    session.tag(saved, "d")
    found = home.reopened().session("s").head
    kept = {name: getattr(found, name) for name in FIELDS}
    assert kept | {"tags": set(kept["tags"])} == FIELDS | {"label": "renamed", "tags": set("abcd")}
    assert found.hash == saved.hash
    assert home.store.verify().ok


def test_removed_tags_and_labels_are_found_no_more(home: Home) -> None:
    session = home.session()
    saved = session.save({"i": 1}, **FIELDS)
    with pytest.raises(InvalidRequest):
        session.untag(saved, "a", "z")
    with pytest.raises(InvalidRequest):
        session.untag(saved)
    assert session.untag(saved, "a").tags == ("b",)
    assert session.unlabel(None).label is None
    with pytest.raises(InvalidRequest):
        session.unlabel(saved)
    assert session.get().hash == saved.hash
    home.reopened()
    assert [*home.store.checkpoints(tag="a")] == [*home.store.checkpoints(label="plan ready")] == []
    assert [*home.session().checkpoints(tag="b")] == [saved]
    assert home.store.verify().ok


def test_every_field_survives_undo_gc_and_a_restart(home: Home) -> None:
    """Through asyncio and telemetry, undo and redo, gc, a search and a restart."""
    telemetry.instrument(home.store, TracerProvider(), MeterProvider())
    store = holdfast.AsyncStore(home.store, Workers(1))
    home.store.session("s").save({"log": []})

    async def work() -> list[holdfast.Checkpoint]:
        session = await store.session("s")
        return [
            await session.save({"log": [1]}, **FIELDS, key="k0"),
            await session.append("log", 2, **FIELDS, key="k1"),
            await session.patch(set={"x": 1}, **FIELDS, key="k2"),
        ]

    saved = asyncio.run(work())
    session = home.session()
    for _ in range(2):
        session.undo()
    session.redo()
    session.redo()
    session.prune(Retention(keep_last=2))
    home.store.gc()
    store_ = home.reopened()
    queries: list[dict[str, Any]] = [
        {"label": "plan ready"}, {"tag": "a"}, {"tag": "b"}, {"trigger": "manual"},
        {"status": "failed"}, {"meta": {"user": "u1"}},
    ]  # fmt: skip
    for query in queries:
        assert list(store_.checkpoints(**query)) == saved[::-1]
        assert [i.head for i in store_.sessions(**query)] == saved[2:]
        for n, c in enumerate(reversed(list(store_.checkpoints(**query)))):
            assert {name: getattr(c, name) for name in PLAIN_FIELDS} == PLAIN_FIELDS
            assert (c.tags, c.key) == (("a", "b"), f"k{n}")
