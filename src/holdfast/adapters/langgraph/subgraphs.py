"""Subgraphs: each has a session of its own, and follows where its thread stands.

A checkpoint of a subgraph says to which checkpoint of the thread it belongs. If somebody has taken
the thread back, or has forked it, what belongs to later ones is not the subgraph's state any more;
and of what belongs to the very checkpoint, whose step is still to be done, only what had led to a
question, of the subgraph's or of the thread's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from holdfast.adapters.langgraph.naming import BROUGHT, id_of, own_of
from holdfast.adapters.langgraph.pending import Noted

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.adapters.langgraph.threads import Line
    from holdfast.checkpoint import Checkpoint

    Belongs = Callable[[Checkpoint], str | None]
    """To which checkpoint of the thread one of a subgraph belongs."""


class Stand(NamedTuple):
    """Where a subgraph stands: its checkpoint, and a child that it had when somebody went back."""

    at: Checkpoint | None
    after: str | None = None


def is_lasting(ns: str) -> bool:
    """Whether it is there for all of a thread's steps; else it is one task's."""
    return ":" not in ns


def stand(line: Line, thread: Line, base: str | None, belongs: Belongs) -> Stand:
    """Of a subgraph now; `base` is the checkpoint that its thread goes on from, if it is known."""
    latest = line.latest()
    now = thread.latest() if latest is not None and thread.was_moved() else None
    if latest is None or now is None:
        return Stand(latest, line.gone_back(latest) if latest else None)
    after = thread.gone_back(now)
    if base is not None and base != now.key and (found := thread.find(base)) is not None:
        now, after = found, None
    mine = belongs(latest)
    if after is None and mine == now.key:
        return Stand(latest, line.gone_back(latest))
    epochs = _epochs(thread, now, after)
    if not is_lasting(line.where.ns) and mine not in epochs:
        return Stand(latest, line.gone_back(latest))
    waited = Noted(thread).waited(now) if after is not None else 0
    at = _newest(line.whole(), Noted(line), thread, epochs, waited, belongs)
    if at is None or at.id == latest.id:
        return Stand(at, line.gone_back(at) if at else None)
    return Stand(at, line.gone_back(at, to_it=True))


def forked(
    line: Line, thread: Line, point: Checkpoint, until: int, waited: int, belongs: Belongs
) -> Checkpoint | None:
    """Where it was when its thread was at a checkpoint whose step is still to be done in a fork.

    `until` is when that was forked, `waited` when it has put the question that it waits with.
    """
    noted = Noted(line, until)
    there = [
        c for c in line.whole()
        if c._record.created_us <= until or own_of(c).get(BROUGHT)  # of which it is a copy
    ]  # fmt: skip
    asking = [c for c in there if belongs(c) == point.key and noted.asks(c)]
    if asking:
        return asking[-1]
    epochs = _epochs(thread, point, _NEVER) if there else {}
    return _newest(there, noted, thread, epochs, waited, belongs)


_ANY, _NEVER = "any", "never"


def _epochs(thread: Line, at: Checkpoint, after: str | None) -> dict[str, str | None]:
    """A checkpoint of a thread and those before it, and of each when its step was done.

    That is told by the child which it had when somebody went back to it, if somebody did.
    """
    epochs: dict[str, str | None] = {id_of(at): after or _ANY}
    child = at
    for checkpoint in thread.session.history(at.id):
        if checkpoint.key:
            epochs.setdefault(checkpoint.key, own_of(child).get("after"))
            child = checkpoint
    return epochs


def _newest(
    checkpoints: list[Checkpoint],
    noted: Noted,
    thread: Line,
    epochs: dict[str, str | None],
    waited: int,
    belongs: Belongs,
) -> Checkpoint | None:
    """What belongs to what is not in the thread (yet, or any more) counts.

    So does what the step that is done again, the first of `epochs`, did before its question.
    """
    find, answered, here = thread.finder(), set[str](), next(iter(epochs), None)
    found: list[Checkpoint] = []
    for checkpoint in checkpoints:
        above, epoch = belongs(checkpoint) or "", own_of(checkpoint).get("thread")
        if above not in epochs:
            if not above or find(above) is None:
                found.append(checkpoint)
        elif epochs[above] in (_ANY, epoch) or (
            above == here and checkpoint._record.created_us <= waited
        ):
            found.append(checkpoint)
        elif epoch is None and above not in answered and noted.asks(checkpoint):
            answered.add(above)
            found.append(checkpoint)
    return max(found, key=id_of, default=None)
