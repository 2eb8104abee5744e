"""A checkpoint costs what changed: in bytes written, for each way in which states change."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import holdfast
from holdfast import cache
from holdfast.codec import ropes, weaving
from tests.home import Home

RNG = random.Random(7)
WORDS = [f"{RNG.getrandbits(40):x}" for _ in range(4000)]


def text(size: int) -> str:
    return " ".join(RNG.choices(WORDS, k=size // 10))[:size]


def messages(count: int, size: int = 1200) -> list[Any]:
    return [{"role": "user", "n": n, "content": text(size)} for n in range(count)]


def compacted() -> Iterator[Any]:
    """The first 800 messages become a summary."""
    log = messages(1000)
    yield log
    log = [text(2000), *log[800:]]
    yield log
    for _ in range(4):
        yield (log := [*log, text(1200)])


def cut() -> Iterator[Any]:
    log = messages(300)
    yield log
    yield log[:200]
    yield log[:50] + log[90:200]


def reordered() -> Iterator[Any]:
    log = messages(300)
    yield log
    for _ in range(5):
        yield (log := RNG.sample(log, len(log)))


def edited(count: int = 500, size: int = 1200, steps: int = 20) -> Iterator[Any]:
    log = messages(count, size)
    yield log
    for _ in range(steps):
        log = [*log]
        log[RNG.randrange(count)] = text(size)
        yield log


def scattered() -> Iterator[Any]:
    """Edits all over a list of short items, which fall into ever more pieces."""
    return edited(600, 100, 900)


def grown() -> Iterator[Any]:
    """One long text, which has grown before."""
    whole = text(60_000)
    yield whole
    yield (whole := whole + text(400))
    for _ in range(20):
        yield (whole := whole + text(400))


def nested() -> Iterator[Any]:
    log, files = messages(200), {f"f{n}": text(5000) for n in range(40)}
    yield {"channel": {"values": log}, "files": files}
    for n in range(20):
        log, files = [*log, *messages(1)], files | {f"f{n}": text(1000)}
        yield {"channel": {"values": log}, "files": files}


# Each with the most that a step may write, as a part of the first state.
WAYS: list[tuple[Callable[[], Iterator[Any]], float]] = [
    (compacted, 0.005), (cut, 0.005), (reordered, 0.01), (edited, 0.02), (nested, 0.04),
]  # fmt: skip


def costs(home: Home, way: Callable[[], Iterator[Any]]) -> list[float]:
    """What each step but the first wrote, as a part of the first state."""
    session = home.session()
    saved = []
    for value in way():
        saved.append(session.save({"value": value}))
        last = value
    home.reopened()
    assert home.session().load() == {"value": last}
    return [c.added / saved[0].size for c in saved[1:]]


@pytest.mark.parametrize(("way", "most"), WAYS, ids=lambda x: getattr(x, "__name__", ""))
def test_a_step_writes_what_changed(home: Home, way: Any, most: float) -> None:
    assert max(costs(home, way)) <= most


def test_mutant_that_matches_nothing_by_content(
    sqlite: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ropes, "reuse", lambda _, fresh: [None] * len(fresh))
    assert max(costs(sqlite, reordered)) > 0.1


def test_a_text_that_grows(home: Home) -> None:
    first, *rest = costs(home, grown)  # the first time, it is taken apart
    assert first < 0.6
    assert sorted(rest)[len(rest) // 2] < 0.01
    assert mean(rest) < 0.05  # now and then, pieces are packed together


def mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def test_pieces_are_put_together_again(sqlite: Home) -> None:
    """It pays: on average steps write little, rewriting included."""
    assert mean(costs(sqlite, scattered)) < 0.017


def test_mutant_that_leaves_all_pieces(sqlite: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weaving.Weaver, "tidy", lambda _, extents, *__: (extents, 0))
    assert mean(costs(sqlite, scattered)) > 0.022


# -- memory ----------------------------------------------------------------------------------------

LIMIT = 1 << 20


def kept(store: holdfast.Store) -> int:
    """Bytes that stay in memory after saves to many sessions."""
    states = [{"log": messages(150)} for _ in range(30)]
    sessions = [store.session(f"s{n}") for n in range(30)]
    tracemalloc.start()
    try:
        for session, state in zip(sessions, states, strict=True):
            session.save(state)
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_images_stay_within_their_bound(sqlite: Home) -> None:
    with holdfast.open(sqlite.path, durability="normal", cache_bytes=LIMIT) as store:
        assert kept(store) < 2 * LIMIT
        assert 0 < store.images.bytes <= LIMIT


def test_mutant_without_a_bound(sqlite: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    init = cache.Images.__init__
    monkeypatch.setattr(cache.Images, "__init__", lambda self, _: init(self, 1 << 40))
    with holdfast.open(sqlite.path, durability="normal", cache_bytes=LIMIT) as store:
        assert kept(store) > 3 * LIMIT
