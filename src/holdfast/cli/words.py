"""Numbers, times and checkpoints in a few words."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast import Checkpoint

_STEPS = ((60, "s"), (60, "m"), (24, "h"), (60, "d"))
_STATUS = {
    "completed": ("✓", "green"),
    "failed": ("✗", "red"),
    "halted": ("⏸", "yellow"),
    "in_progress": ("…", None),
}


def age(moment: dt.datetime, now: dt.datetime | None = None) -> str:
    """How long ago, in one number; a date if that is long."""
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
    number, unit = float(count), "B"
    for larger in ("KB", "MB", "GB", "TB"):
        if number < 1000:
            break
        number, unit = number / 1000, larger
    return f"{count} B" if unit == "B" else f"{number:.3g} {unit}"


def plural(count: int, one: str, many: str | None = None) -> str:
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def status(of: Checkpoint) -> str:
    """Nothing for one that is in progress, as most are."""
    if of.status == "in_progress":
        return ""
    mark, colour = _STATUS[of.status]
    reason = f": {of.reason}" if of.reason else ""
    return click.style(f"{mark} {of.status}{reason}", fg=colour)


def spent(tokens: int, cost: float) -> str:
    parts = []
    if tokens:
        parts.append(f"{tokens:,} tok")
    if cost:
        parts.append(f"${cost:.4f}".rstrip("0").rstrip(".") if cost < 1 else f"${cost:,.2f}")
    return "  ".join(parts)


def line(of: Checkpoint, length: int, *, forks: Sequence[str] = (), head: bool = False) -> str:
    """A checkpoint in one line."""
    parts = [click.style(of.id[:length], fg="cyan", bold=head)]
    if of.damaged:
        return "  ".join([*parts, click.style(f"damaged: {of.damaged}", fg="red")])
    parts.append(f"step {of.step}")
    parts.append(of.operation if of.trigger is None else f"{of.operation} ({of.trigger})")
    if of.label:
        parts.append(click.style(f'"{of.label}"', bold=True))
    parts += [click.style(f"#{tag}", fg="blue") for tag in of.tags]
    parts.append(status(of))
    if of.pending:
        names = ", ".join(call.name for call in of.pending[:3])
        more = ", …" if len(of.pending) > 3 else ""
        parts.append(click.style(f"⏸ waits for {names}{more}", fg="yellow"))
    parts.append(spent(of.usage.tokens, of.usage.cost))
    parts += [click.style(f"↳ {name}", fg="magenta") for name in forks]
    parts.append(click.style(age(of.created_at), dim=True))
    return "  ".join([part for part in parts if part])


def file_name(text: str) -> str:
    """A name for a file that reads like the text."""
    plain = "".join(c if c.isalnum() or c in "-_." else "-" for c in text)
    return plain.strip("-.")[:80] or "session"
