"""Checkpoints in lists: short, whatever an agent has put there, and as many as an answer holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast import shapes
from holdfast.web.folding import fold

if TYPE_CHECKING:
    from holdfast.shapes import Shape

ROW = 1_500
"""Characters of a value in a row of a list."""
_LIST = 900_000
"""Bytes of rows that one answer holds at most: those that are left out are on the next page."""


def row(shown: Shape) -> Shape:
    """A checkpoint in a list."""
    if "meta" in shown:
        shown["meta"] = fold(shown["meta"], ROW)
        shown["pending"] = fold(shown["pending"], ROW)
        for name in ("reason", "hint"):
            shown[name] = fold(shown[name], ROW)
    return shown


def fitting(rows: list[Shape]) -> list[Shape]:
    """As many as one answer may hold, and one at least."""
    left = _LIST
    for n, each in enumerate(rows):
        left -= len(shapes.dumps(each).encode())
        if n and left < 0:
            return rows[:n]
    return rows
