"""The next free numbers of sessions and streams, in a file of their own."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from holdfast.backends import disk, files_text
from holdfast.backends.files_names import streams_in
from holdfast.codec import portable
from holdfast.codec.records import SEQ_BITS, SPACES, seal_counter, unseal_counter
from holdfast.codec.streams import STREAM_BITS
from holdfast.errors import Corrupt

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.backends.files_catalog import Catalog

COUNTERS = "counters.json"
_RESERVED = 10_000
"""Whoever has reserved numbers that are not there yet has at most a few hundred."""
_LIMITS = {"session": 1 << 62 - SEQ_BITS, "stream": 1 << 62 - STREAM_BITS}
"""Nobody comes so far by counting: what is higher was made up, and must not end all saving."""
_HINT = "repair() counts anew"


def read(root: Path) -> dict[str, int]:
    try:
        shown: Any = portable.loads((root / COUNTERS).read_bytes())
        return {s: unseal_counter(s, files_text.hide_row(shown[s])) for s in SPACES}
    except FileNotFoundError as e:
        raise Corrupt(f"{root / COUNTERS} is missing", hint=_HINT) from e
    except (ValueError, TypeError, LookupError, AttributeError) as e:
        raise Corrupt(f"{root / COUNTERS} is damaged", hint=_HINT) from e


def beyond(catalog: Catalog, space: str, counted: int = 0) -> int:
    """The next free number: as counted, but where somebody has put back an older file.

    That is known by higher numbers which are there; and others may be about to be.
    """
    if space == "session":
        found = catalog.numbers()
    else:
        folders = os.listdir(catalog.root)
        found = [n for name in folders for n in streams_in(f"{catalog.root}/{name}")]
    highest = max([n for n in found if n < _LIMITS[space]], default=0)
    return counted if counted > highest else highest + _RESERVED


def write(root: Path, counters: dict[str, int]) -> None:
    """Always synced: a number that was given once must not be given again."""
    shown = {space: files_text.show_row(seal_counter(space, n)) for space, n in counters.items()}
    disk.replace(root / COUNTERS, portable.dumps(shown) + b"\n")
