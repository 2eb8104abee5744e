"""The lanes of a tree, the newest row first: who goes on from whom, in one column per branch."""

from __future__ import annotations

from itertools import zip_longest

NODE, GONE, CUT = "○", "┆", "⋮"


class Lanes:
    """What is left of each row, drawn from the tips of the branches down to their roots."""

    def __init__(self) -> None:
        self._lanes: list[str | None] = []
        """The id that comes next in each lane."""
        self._at = 0
        """The lane of the last row."""

    def row(self, id: str, parent: str | None, glyph: str = NODE) -> list[str]:
        """The rows for a checkpoint: where branches meet in it, if they do, and its own."""
        lanes = self._lanes
        waiting = [n for n, lane in enumerate(lanes) if lane == id]
        rows = []
        if not waiting:
            waiting = [lanes.index(None) if None in lanes else len(lanes)]
            lanes[waiting[0] :] = [id, *lanes[waiting[0] + 1 :]]
        elif len(waiting) > 1:
            rows.append(self._joint(waiting))
        at, *others = waiting
        for n in others:
            lanes[n] = None
        rows.append(self._drawn({at: glyph}))
        lanes[at], self._at = parent, at
        while lanes and lanes[-1] is None:
            lanes.pop()
        return rows

    def below(self, glyph: str = GONE) -> str:
        """A row below the last one, with a sign of its own in that one's lane."""
        width = max(len(self._lanes), self._at + 1)
        cells = ["│" if n < len(self._lanes) and self._lanes[n] else " " for n in range(width)]
        cells[self._at] = glyph
        return " ".join(cells).rstrip()

    def cut(self) -> str:
        """A last row, where more would follow."""
        return self._drawn({n: CUT for n, lane in enumerate(self._lanes) if lane})

    def _drawn(self, marks: dict[int, str]) -> str:
        cells = [marks.get(n, "│" if lane else " ") for n, lane in enumerate(self._lanes)]
        return " ".join(cells).rstrip()

    def _joint(self, waiting: list[int]) -> str:
        """├─┴─╯ where several lanes end in the first of them."""
        first, last = waiting[0], waiting[-1]
        cells, between = [], []
        for n, lane in enumerate(self._lanes):
            if n == first:
                cell = "├"
            elif n == last:
                cell = "╯"
            elif n in waiting:
                cell = "┴"
            elif first < n < last:
                cell = "┼" if lane else "─"
            else:
                cell = "│" if lane else " "
            cells.append(cell)
            between.append("─" if first <= n < last else " ")
        pairs = zip_longest(cells, between, fillvalue="")
        return "".join(c + b for c, b in pairs).rstrip()
