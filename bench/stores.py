"""Helpers to open, measure and check stores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import holdfast

Durability = Literal["full", "normal"]


def open_store(path: Path, durability: Durability = "full") -> holdfast.Store:
    return holdfast.open(str(path), durability=durability)


@contextmanager
def opened(path: Path, durability: Durability = "full") -> Iterator[holdfast.Store]:
    store = open_store(path, durability)
    try:
        yield store
    finally:
        store.close()


def disk_usage(path: Path) -> int:
    """Return the bytes of all files of a store."""
    return sum(file.stat().st_size for file in path.parent.iterdir())


def check_state(path: Path, session: str, state: object) -> None:
    """Check that the session loads the saved state."""
    with opened(path) as store:
        if store.session(session).load() != state:
            raise AssertionError(f"session {session!r} does not load what was saved")
