"""Usage along a session. Sums are cached, so that the next request reads only new checkpoints."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from holdfast import Checkpoint, Session, Store
    from holdfast.json import Shape
    from holdfast.web.params import Params

V = TypeVar("V")

_POINTS = 400
"""About how many points one answer has."""
_KEPT = 4
"""Sessions per store for which results are kept."""


class _Cache(Generic[V]):
    """Results by store and session, for the sessions that were asked for last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stores: WeakKeyDictionary[Store, OrderedDict[str, V]] = WeakKeyDictionary()

    def get(self, store: Store, session: str) -> V | None:
        with self._lock:
            return self._stores.setdefault(store, OrderedDict()).get(session)

    def put(self, store: Store, session: str, value: V) -> None:
        with self._lock:
            kept = self._stores.setdefault(store, OrderedDict())
            kept[session] = value
            kept.move_to_end(session)
            while len(kept) > _KEPT:
                kept.popitem(last=False)


class _Point(NamedTuple):
    """A checkpoint, with the tokens and the cost of all steps up to it."""

    id: str
    step: int
    tokens: int
    cost: float
    size: int


class _Highest(NamedTuple):
    """The highest usage of one checkpoint of a session."""

    operations: int
    """How many operations the session had then. Some operations hide checkpoints."""
    seq: int
    """The newest checkpoint that is counted."""
    tokens: int
    cost: float


_points: _Cache[list[_Point]] = _Cache()
_highest: _Cache[_Highest] = _Cache()


def chart(store: Store, params: Params) -> Shape:
    """Return tokens, cost and size along the ancestors of `id`, or of the head."""
    session = params.session(store)
    known = _points.get(store, session.name) or []
    index = {point.id: n for n, point in enumerate(known)}
    points: list[_Point] = []
    new: list[Checkpoint] = []
    for c in session.history(params.maybe("id")):
        if c.id in index:
            points = known[: index[c.id] + 1]
            break
        if c.damaged is None:
            new.append(c)
    for c in reversed(new):
        tokens, cost = (points[-1].tokens, points[-1].cost) if points else (0, 0.0)
        usage = c.usage
        points.append(_Point(c.id, c.step, tokens + usage.tokens, cost + usage.cost, c.size))
    if new:
        _points.put(store, session.name, points)
    some = points[:: max(len(points) // _POINTS, 1)]
    if points and some[-1] is not points[-1]:
        some.append(points[-1])
    return {"points": [point._asdict() for point in some]}


def highest_usage(store: Store, session: Session) -> Shape:
    """Return the most tokens and the highest cost of one checkpoint of the whole session."""
    operations = session.info().operations
    known = _highest.get(store, session.name)
    if known is None or known.operations != operations:
        known = _Highest(operations, 0, 0, 0.0)
    _, seq, tokens, cost = known
    for c in session.tree(newest_first=True):
        if c.seq <= known.seq:
            break
        seq = max(seq, c.seq)
        if c.damaged is None:
            tokens, cost = max(tokens, c.usage.tokens), max(cost, c.usage.cost)
    _highest.put(store, session.name, _Highest(operations, seq, tokens, cost))
    return {"tokens": tokens, "cost": cost}
