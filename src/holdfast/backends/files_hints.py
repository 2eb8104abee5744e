"""How long a log or a journal is, beside it: what goes missing at its end is noticed by that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast import clock

if TYPE_CHECKING:
    from pathlib import Path

DIGITS = 18
"""Of the number of a line or of an entry, at most."""
ALWAYS = "-"


def hint(entries: int, until: str = ALWAYS) -> bytes:
    """A number of lines or entries. Twice, lest a flipped bit counts.

    Of lines that were not synced it holds for one boot: a loss of power may take them, not it.
    """
    return b"%12d %12d %-36s\n" % (entries, entries, until.encode())


def read_hint(path: Path) -> int:
    try:
        first, second, until = path.read_bytes().split()
        holds = until.decode() in (ALWAYS, clock.boot_id() or ALWAYS)
        return int(first) if first == second and len(first) <= DIGITS and holds else 0
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
        return 0
