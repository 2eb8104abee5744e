"""Numbers, times and checkpoints in a few words."""

from __future__ import annotations

import datetime as dt
import re
import shlex
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
# Control characters, what ends a line or turns the direction of text, and what is no text at all.
_UNSHOWN = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def one_line(text: str) -> str:
    """A name, or other text of one line: what would break it or steer a terminal is shown."""
    return _UNSHOWN.sub(lambda m: m[0].encode("unicode_escape").decode(), text)


def quoted(word: str) -> str:
    """A word as one types it in bash: with $'…' where it has what nobody can type."""
    if not _UNSHOWN.search(word):
        return shlex.quote(word)
    plain = word.replace("\\", "\\\\").replace("'", "\\'")
    return f"$'{_UNSHOWN.sub(lambda m: _bytes(m[0]), plain)}'"


def _bytes(of: str) -> str:
    """The bytes of an argument, in escapes."""
    try:
        raw = of.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # half of a pair: no argument can have it
        raw = of.encode("utf-8", "surrogatepass")
    return "".join(f"\\x{byte:02x}" for byte in raw)


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
    reason = f": {one_line(of.reason)}" if of.reason else ""
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
        return "  ".join([*parts, click.style(f"damaged: {one_line(of.damaged)}", fg="red")])
    parts.append(f"step {of.step}")
    why = "" if of.trigger is None else f" ({one_line(of.trigger)})"
    parts.append(f"{of.operation}{why}")
    if of.label:
        parts.append(click.style(f'"{one_line(of.label)}"', bold=True))
    parts += [click.style(f"#{one_line(tag)}", fg="blue") for tag in of.tags]
    parts.append(status(of))
    if of.pending:
        names = ", ".join(one_line(call.name) for call in of.pending[:3])
        more = ", …" if len(of.pending) > 3 else ""
        parts.append(click.style(f"⏸ waits for {names}{more}", fg="yellow"))
    parts.append(spent(of.usage.tokens, of.usage.cost))
    parts += [click.style(f"↳ {one_line(name)}", fg="magenta") for name in forks]
    parts.append(click.style(age(of.created_at), dim=True))
    return "  ".join([part for part in parts if part])


def file_name(text: str) -> str:
    """A name for a file that reads like the text."""
    plain = "".join(c if c.isalnum() or c in "-_." else "-" for c in text)
    return plain.strip("-.")[:80] or "session"
