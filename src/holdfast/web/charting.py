"""What a session has cost, step by step: a chart of some points.

To add up what was spent, every checkpoint has to be read once. What was read is kept, so that the
chart of a session that goes on, or of a checkpoint on the way, costs what is new.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from holdfast import Checkpoint, Store
    from holdfast.shapes import Shape
    from holdfast.web.asking import Asked

_POINTS = 400
_KEPT = 4
"""Lines of checkpoints that are kept for each store."""


class _Point(NamedTuple):
    id: str
    step: int
    tokens: int
    cost: float
    size: int


class _Line:
    """A line of checkpoints, from the first on, with what they have cost until then."""

    def __init__(self, points: list[_Point]) -> None:
        self.points = points
        self.at = {point.id: n for n, point in enumerate(points)}


_lines: WeakKeyDictionary[Store, OrderedDict[str, _Line]] = WeakKeyDictionary()
_lock = threading.Lock()


def chart(store: Store, asked: Asked) -> Shape:
    """Tokens, cost and size from the first checkpoint to `id`, or to the head: some points."""
    session = asked.session(store)
    with _lock:
        known = _lines.setdefault(store, OrderedDict()).get(session.name, _Line([]))
    points: list[_Point] = []
    line: list[Checkpoint] = []
    for c in session.history(asked.maybe("id")):
        if c.id in known.at:
            points = known.points[: known.at[c.id] + 1]
            break
        if c.damaged is None:
            line.append(c)
    for each in reversed(line):
        tokens, cost = (points[-1].tokens, points[-1].cost) if points else (0, 0.0)
        usage = each.usage
        points.append(
            _Point(each.id, each.step, tokens + usage.tokens, cost + usage.cost, each.size)
        )
    if line:
        _keep(store, session.name, _Line(points))
    every = max(len(points) // _POINTS, 1)
    shown = points[::every]
    if points and shown[-1] is not points[-1]:
        shown.append(points[-1])
    return {"points": [point._asdict() for point in shown]}


def _keep(store: Store, name: str, line: _Line) -> None:
    with _lock:
        kept = _lines.setdefault(store, OrderedDict())
        kept[name] = line
        kept.move_to_end(name)
        while len(kept) > _KEPT:
            kept.popitem(last=False)
