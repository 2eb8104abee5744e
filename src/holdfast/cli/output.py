"""How the command line shows names, numbers, checkpoints, trees and progress."""

from __future__ import annotations

import datetime as dt
import re
import shlex
import shutil
import sys
import time
from decimal import Decimal
from itertools import zip_longest
from typing import TYPE_CHECKING, Self

import click

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.progress import Progress, TaskID

    from holdfast import Checkpoint


_SUMMARY, _AGE = 30, 12
"""Characters of a summary that are shown even in a narrow terminal, and those for the age."""
_STEPS = ((60, "s"), (60, "m"), (24, "h"), (60, "d"))
_STATUS = {
    "completed": ("✓", "green"),
    "failed": ("✗", "red"),
    "halted": ("⏸", "yellow"),
    "in_progress": ("…", None),
}
_PLACES = ("iteration", "turn", "round")
"""Keys in the metadata of checkpoints by which agents and importers count."""
# Control characters, line ends, characters that change the direction of text, and lone surrogates.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def one_line(text: str) -> str:
    """Return text with line ends and control characters escaped."""
    return _UNPRINTABLE.sub(lambda m: m[0].encode("unicode_escape").decode(), text)


def quoted(word: str) -> str:
    """Quote a word for bash. Characters that cannot be typed are escaped inside $'…'."""
    if not _UNPRINTABLE.search(word):
        return shlex.quote(word)
    plain = word.replace("\\", "\\\\").replace("'", "\\'")
    return f"$'{_UNPRINTABLE.sub(lambda m: _byte_escapes(m[0]), plain)}'"


def typed(*words: str) -> str:
    """Return a command as the user would type it."""
    return " ".join(map(quoted, ["holdfast", *words]))


def _byte_escapes(text: str) -> str:
    """Return the bytes of an argument as hexadecimal escapes."""
    try:
        raw = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # a lone surrogate, which no argument can contain
        raw = text.encode("utf-8", "surrogatepass")
    return "".join(f"\\x{byte:02x}" for byte in raw)


def age(moment: dt.datetime, now: dt.datetime | None = None) -> str:
    """Return how long ago a time was, such as "5m ago"; after 60 days, its date."""
    seconds = ((now or dt.datetime.now(dt.UTC)) - moment).total_seconds()
    if seconds < 0:
        return "just now" if seconds > -5 else f"in the future ({moment:%Y-%m-%d %H:%M})"
    left = int(seconds)
    for size, unit in _STEPS:
        if left < size:
            return f"{left}{unit} ago"
        left //= size
    return f"{moment:%Y-%m-%d}"


def size(count: int) -> str:
    """Return a number of bytes, such as "1.23 KB"."""
    number, unit = float(count), "B"
    for larger in ("KB", "MB", "GB", "TB"):
        if number < 1000:
            break
        number, unit = number / 1000, larger
    return f"{count} B" if unit == "B" else f"{number:.3g} {unit}"


def plural(count: int, noun: str) -> str:
    """Return a count with its noun, such as "1 session" or "2 sessions"."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def status(of: Checkpoint) -> str:
    """Return status and reason; nothing for a checkpoint in progress, as most are."""
    if of.status == "in_progress":
        return ""
    mark, colour = _STATUS[of.status]
    reason = f": {one_line(of.reason)}" if of.reason else ""
    return click.style(f"{mark} {of.status}{reason}", fg=colour)


def place(of: Checkpoint) -> str:
    """Return where in its loop the agent was, such as "iteration 12", if the metadata say so."""
    meta = of.meta
    return "  ".join(f"{name} {meta[name]:,}" for name in _PLACES if type(meta.get(name)) is int)


def spent(tokens: int, cost: float) -> str:
    """Return tokens and cost, such as "1,200 tok  $0.0021"."""
    parts = []
    if tokens:
        parts.append(f"{tokens:,} tok")
    if cost:
        parts.append(money(cost))
    return "  ".join(parts)


def money(cost: float) -> str:
    """Return a cost, such as "$12.50"; below $1 with four digits that count, such as "$0.00205"."""
    return f"${Decimal(f'{cost:.4g}'):f}" if abs(cost) < 1 else f"${cost:,.2f}"


def checkpoint_line(
    of: Checkpoint, length: int, *, forks: Sequence[str] = (), head: bool = False, indent: int = 0
) -> str:
    """Return one line about a checkpoint, with `length` characters of its id.

    Its summary is cut so that the line fits into the terminal, after `indent` columns.
    """
    parts = [click.style(of.id[:length], fg="cyan", bold=head)]
    if of.damaged:
        return "  ".join([*parts, click.style(f"damaged: {one_line(of.damaged)}", fg="red")])
    parts.append(f"step {of.step}")
    why = "" if of.trigger is None else f" ({one_line(of.trigger)})"
    parts.append("" if of.summary else f"{of.operation}{why}")
    if of.label:
        parts.append(click.style(f'"{one_line(of.label)}"', bold=True))
    parts += [click.style(f"#{one_line(tag)}", fg="blue") for tag in of.tags]
    parts.append(status(of))
    if of.pending:
        names = ", ".join(one_line(call.name) for call in of.pending[:3])
        more = ", …" if len(of.pending) > 3 else ""
        parts.append(click.style(f"… no result yet: {names}{more}", fg="yellow"))
    parts.append(spent(of.usage.tokens, of.usage.cost))
    parts.append(place(of))
    parts += [click.style(f"↳ {one_line(name)}", fg="magenta") for name in forks]
    parts = [part for part in parts if part]
    if of.summary:
        columns = shutil.get_terminal_size((120, 24)).columns
        room = columns - indent - len(click.unstyle("  ".join(parts))) - _AGE
        parts.insert(2, cut(one_line(of.summary), max(room, _SUMMARY)))
    return "  ".join([*parts, click.style(age(of.created_at), dim=True)])


def cut(text: str, width: int) -> str:
    """Return text cut to `width` characters."""
    return text if len(text) <= width else text[: width - 1] + "…"


def line_with_session(of: Checkpoint, length: int) -> str:
    """Return one line about a checkpoint that ends with the name of its session."""
    return f"{checkpoint_line(of, length)}  {click.style(one_line(of.session), dim=True)}"


def file_name(text: str) -> str:
    """Return a file name that resembles the text."""
    plain = "".join(c if c.isalnum() or c in "-_." else "-" for c in text)
    return plain.strip("-.")[:80] or "session"


NODE, GONE, CUT = "○", "┆", "⋮"


class Lanes:
    """The lanes of a tree, drawn row by row from the newest checkpoint to the oldest."""

    def __init__(self) -> None:
        self._lanes: list[str | None] = []
        """For each lane, the id of the checkpoint that continues it below."""
        self._at = 0
        """The lane of the last checkpoint."""

    def row(self, id: str, parent: str | None, glyph: str = NODE) -> list[str]:
        """Return the rows of a checkpoint: one where its branches meet, if any, and its own."""
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
        rows.append(self._draw({at: glyph}))
        lanes[at], self._at = parent, at
        while lanes and lanes[-1] is None:
            lanes.pop()
        return rows

    def below(self, glyph: str = GONE) -> str:
        """Return a row below the last one, with a glyph in the lane of that row."""
        width = max(len(self._lanes), self._at + 1)
        cells = ["│" if n < len(self._lanes) and self._lanes[n] else " " for n in range(width)]
        cells[self._at] = glyph
        return " ".join(cells).rstrip()

    def cut(self) -> str:
        """Return a last row, which shows that the lanes continue."""
        return self._draw({n: CUT for n, lane in enumerate(self._lanes) if lane})

    def _draw(self, marks: dict[int, str]) -> str:
        cells = [marks.get(n, "│" if lane else " ") for n, lane in enumerate(self._lanes)]
        return " ".join(cells).rstrip()

    def _joint(self, waiting: list[int]) -> str:
        """Return a row such as ├─┴─╯, in which lanes end in the first one."""
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


PATIENCE = 1.0
"""Seconds until a progress bar appears."""


class Bar:
    """A progress bar on stderr, if that is a terminal, until the end of `with`.

    Call it with the done and total amounts.
    """

    def __init__(self, title: str) -> None:
        self._title, self._began = title, time.monotonic()
        self._quiet = not sys.stderr.isatty()
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __call__(self, done: int, total: int) -> None:
        self.phase(self._title, done, total)

    def phase(self, title: str, done: int, total: int) -> None:
        """Show another title, and how much is done."""
        if self._quiet or time.monotonic() - self._began < PATIENCE:
            return
        if self._progress is None or self._task is None:
            from rich.console import Console
            from rich.progress import Progress

            self._progress = Progress(console=Console(stderr=True), transient=True)
            self._task = self._progress.add_task(title)
            self._progress.start()
        self._progress.update(self._task, description=title, completed=done, total=total)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._progress is not None:
            self._progress.stop()
