"""Usage along a session. Sums are cached, so that the next request reads only new checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

from holdfast import Checkpoint, Session, Store, Usage
from holdfast.json import Shape
from holdfast.web.params import Params

_POINTS = 400
"""About how many points one answer has."""
_KEPT = 4
"""Sessions per store for which results are kept."""


class _Point(NamedTuple):
    """A checkpoint, with the usage of all steps up to it."""

    id: str
    step: int
    usage: Usage
    size: int

    def shape(self) -> Shape:
        used = {"tokens": self.usage.tokens, "cost": self.usage.cost}
        return {"id": self.id, "step": self.step, **used, "size": self.size}


class _Highest(NamedTuple):
    """The highest usage of one checkpoint of a session."""

    operations: int
    """How many operations the session had then. Some operations hide checkpoints."""
    seq: int
    """The newest checkpoint that is counted."""
    tokens: int
    cost: float


class _Known:
    """The results for one session."""

    points: Sequence[_Point] = ()
    highest = _Highest(0, 0, 0, 0.0)


_sessions: WeakKeyDictionary[Store, Callable[[str], _Known]] = WeakKeyDictionary()
"""By store: returns the results for a session, if it was asked for lately, or an empty one."""


def _known(store: Store, session: Session) -> _Known:
    found = _sessions.setdefault(store, lru_cache(_KEPT)(lambda _: _Known()))
    return found(session.name)


def chart(store: Store, params: Params) -> Shape:
    """Return tokens, cost and size along the ancestors of `id`, or of the head."""
    session = params.session(store)
    kept = _known(store, session)
    known = kept.points
    index = {point.id: n for n, point in enumerate(known)}
    points: list[_Point] = []
    new: list[Checkpoint] = []
    for c in session.history(params.maybe("id")):
        if c.id in index:
            points = [*known[: index[c.id] + 1]]
            break
        if c.damaged is None:
            new.append(c)
    for c in reversed(new):
        before = points[-1].usage if points else Usage()
        points.append(_Point(c.id, c.step, before + c.usage, c.size))
    if new:
        kept.points = points
    some = points[:: max(len(points) // _POINTS, 1)]
    if points and some[-1] is not points[-1]:
        some.append(points[-1])
    return {"points": [point.shape() for point in some]}


def highest_usage(store: Store, session: Session) -> Shape:
    """Return the most tokens and the highest cost of one checkpoint of the whole session."""
    operations = session.info().operations
    kept = _known(store, session)
    known = kept.highest
    if known.operations != operations:
        known = _Highest(operations, 0, 0, 0.0)
    _, seq, tokens, cost = known
    for c in session.tree(newest_first=True):
        if c.seq <= known.seq:
            break
        seq = max(seq, c.seq)
        if c.damaged is None:
            tokens, cost = max(tokens, c.usage.tokens), max(cost, c.usage.cost)
    kept.highest = _Highest(operations, seq, tokens, cost)
    return {"tokens": tokens, "cost": cost}
