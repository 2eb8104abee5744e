"""Values cut to what a page shows: no answer grows with what an agent has written."""

from __future__ import annotations

from typing import Any

LONGEST = 4_000
"""Characters of a string that are shown before somebody asks for all of it."""
SHOWN = 500
"""Characters that are left of a longer one."""
_ENTRY = 8


def fold(shown: Any, budget: int) -> Any:
    """A rendering of about `budget` characters at most.

    What is cut is `{"$folded": {"kind": …, "length": …, "start": …}}`. No value of a state renders
    like that: keys of its own that begin with a dollar sign have one more.
    """
    return _Fold(budget).value(shown)


class _Fold:
    def __init__(self, budget: int) -> None:
        self._left = budget

    def value(self, shown: Any) -> Any:
        if type(shown) is str:
            if len(shown) > LONGEST or len(shown) > self._left + SHOWN:
                return self._cut("str", len(shown), shown[:SHOWN])
            self._left -= len(shown) + _ENTRY
            return shown
        if type(shown) is list:
            items = self._some(iter(shown))
            if len(items) == len(shown):
                return items
            return self._cut("list", len(shown), items)
        if type(shown) is dict:
            pairs: dict[str, Any] = {}
            for key, value in shown.items():
                if self._left <= 0 or len(key) > LONGEST:
                    return self._cut("dict", len(shown), pairs)
                self._left -= len(key)
                pairs[key] = self.value(value)
            return pairs
        self._left -= _ENTRY
        return shown

    def _some(self, values: Any) -> list[Any]:
        found = []
        for value in values:
            if self._left <= 0:
                break
            found.append(self.value(value))
        return found

    def _cut(self, kind: str, length: int, start: Any) -> Any:
        self._left -= SHOWN if kind == "str" else _ENTRY
        return {"$folded": {"kind": kind, "length": length, "start": start}}
