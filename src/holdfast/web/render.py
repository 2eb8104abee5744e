"""Shorten long values, so that no answer grows with the texts that an agent has written."""

from __future__ import annotations

from typing import Any

from holdfast import json
from holdfast.json import Shape

LONGEST = 4_000
"""Characters of a string that is not cut."""
START = 500
"""Characters that are left of a longer string."""
ROW = 1_500
"""Characters of a value in a row of a list."""
_ENTRY = 8
"""Characters that an entry counts in addition to its text."""
_LIST = 900_000
"""Bytes of rows in one answer, at most. The next page has the rest."""


def fold(rendered: Any, budget: int) -> Any:
    """Return the rendering of a value, cut to about `budget` characters.

    A part that is cut is replaced by `{"$folded": {"kind": …, "length": …, "start": …}}`. No value
    of a state is rendered like that, because its keys that begin with a dollar sign get another
    one.
    """
    return _Fold(budget).value(rendered)


class _Fold:
    def __init__(self, budget: int) -> None:
        self._left = budget

    def value(self, rendered: Any) -> Any:
        if type(rendered) is str:
            if len(rendered) > LONGEST or len(rendered) > self._left + START:
                return self._cut("str", len(rendered), rendered[:START])
            self._left -= len(rendered) + _ENTRY
            return rendered
        if type(rendered) is list:
            items: list[Any] = []
            for item in rendered:
                if self._left <= 0:
                    return self._cut("list", len(rendered), items)
                items.append(self.value(item))
            return items
        if type(rendered) is dict:
            pairs: dict[str, Any] = {}
            for key, value in rendered.items():
                if self._left <= 0 or len(key) > LONGEST:
                    return self._cut("dict", len(rendered), pairs)
                self._left -= len(key)
                pairs[key] = self.value(value)
            return pairs
        self._left -= _ENTRY
        return rendered

    def _cut(self, kind: str, length: int, start: Any) -> Any:
        self._left -= START if kind == "str" else _ENTRY
        return {"$folded": {"kind": kind, "length": length, "start": start}}


def row(checkpoint: Shape) -> Shape:
    """Return the JSON of a checkpoint for a list. Its long fields are cut in place."""
    if "meta" in checkpoint:
        for name in ("meta", "pending", "reason", "hint"):
            checkpoint[name] = fold(checkpoint[name], ROW)
    return checkpoint


def fitting(rows: list[Shape]) -> list[Shape]:
    """Return the first rows, as many as one answer may hold, but at least one."""
    left = _LIST
    for n, each in enumerate(rows):
        left -= len(json.dumps(each).encode())
        if n and left < 0:
            return rows[:n]
    return rows
