"""The next free numbers of sessions and streams, in a file of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.backends import disk, files_text
from holdfast.codec import portable
from holdfast.codec.records import SPACES, seal_counter, unseal_counter
from holdfast.errors import Corrupt

if TYPE_CHECKING:
    from pathlib import Path

COUNTERS = "counters.json"
_HINT = "repair() counts anew"


def read(root: Path) -> dict[str, int]:
    try:
        shown: Any = portable.loads((root / COUNTERS).read_bytes())
        return {s: unseal_counter(s, files_text.hide_row(shown[s])) for s in SPACES}
    except FileNotFoundError as e:
        raise Corrupt(f"{root / COUNTERS} is missing", hint=_HINT) from e
    except (ValueError, TypeError, LookupError, AttributeError) as e:
        raise Corrupt(f"{root / COUNTERS} is damaged", hint=_HINT) from e


def write(root: Path, counters: dict[str, int]) -> None:
    """Always synced: a number that was given once must not be given again."""
    shown = {space: files_text.show_row(seal_counter(space, n)) for space, n in counters.items()}
    disk.replace(root / COUNTERS, portable.dumps(shown) + b"\n")
