"""Threads share what is in memory of a state, as a fork shares it with its origin.

A switch to another thread is made at every line of one save in turn; the other one saves a state of
its own then, which changes what both have.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.format import ropes
from holdfast.history import fast_append

MESSAGES = [{"role": "user", "content": f"{n:03} " + "x" * 200} for n in range(40)]
CODE = (str(Path(ropes.__file__).parent), fast_append.__file__)

Action = Callable[[holdfast.Session], Any]
ACTIONS: dict[str, tuple[Action, list[Any]]] = {
    "edited": (
        lambda s: s.save({"messages": [MESSAGES[30], *MESSAGES[1:22]]}),
        [MESSAGES[30], *MESSAGES[1:22]],
    ),
    "packed": (lambda s: s.patch(append={"messages": MESSAGES[23:30]}), MESSAGES[:30]),
    "grown": (lambda s: s.save({"messages": MESSAGES[:24]}), MESSAGES[:24]),
    "appended": (lambda s: s.append("messages", MESSAGES[23]), MESSAGES[:24]),
}


def switched(action: Action, want: list[Any], line: int) -> bool:
    """One save with a switch at a line; whether it had so many. AssertionError if it harms."""
    with holdfast.open("memory:") as store:
        session = store.session("s")
        known = {session.save({"messages": MESSAGES[:20]}).id: MESSAGES[:20]}
        for n in (20, 21):
            known[session.patch(append={"messages": [MESSAGES[n]]}).id] = MESSAGES[: n + 1]
        known[session.save({"messages": MESSAGES[:23]}, label="x").id] = MESSAGES[:23]
        fork = session.fork("fork")
        other = [MESSAGES[39], *MESSAGES[1:23]]
        left = line

        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal left
            code = frame.f_code
            if not code.co_filename.startswith(CODE) or code.co_qualname.startswith("ImageCache."):
                return None  # the cache has a lock, which the other would wait for
            if event == "line":
                left -= 1
                if left == 0:
                    sys.settrace(None)
                    fork.save({"messages": other})
            return trace if left > 0 else None

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            known[action(session).id] = want
        finally:
            sys.settrace(before)
        for id, messages in known.items():
            assert store.session("s").load(id) == {"messages": messages}
        if left <= 0:
            assert store.session("fork").load() == {"messages": other}
        assert store.verify(read_data=True).ok
        return left <= 0


def each_line(name: str) -> int:
    line = 1
    while switched(*ACTIONS[name], line):
        line += 1
    return line


@pytest.mark.parametrize("name", ACTIONS)
def test_another_thread_at_any_line(name: str) -> None:
    assert each_line(name) > 50


def test_what_another_has_taken_in_must_not_be_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ropes.take_in

    def careless(rope: Any, image: Any) -> Any:
        return whole(rope, image if rope.image.more else image._replace(more=None))

    monkeypatch.setattr(ropes, "take_in", careless)
    with pytest.raises((AssertionError, holdfast.HoldfastError)):
        each_line("edited")


def test_what_is_packed_must_be_of_one_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ropes._recent

    def careless(rope: Any, image: Any, tail: Any) -> Any:
        return whole(rope, image and image._replace(chunks=rope.image.chunks), tail)

    monkeypatch.setattr(ropes, "_recent", careless)
    with pytest.raises((AssertionError, holdfast.HoldfastError)):
        each_line("packed")
