"""The environment of the measures: options, a temporary folder, and stores that are built once."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from .growth import Growth, grow
from .messages import Writer, json_size
from .stores import check_state, disk_usage, opened

T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """One line of the table.

    ``passed`` is None if the limit was not checked: sizes were small, or the machine was busy.
    """

    measure: str
    bar: str
    measured: str
    passed: bool | None


@dataclass(frozen=True)
class Long:
    """A store with one session of many appends, one message each."""

    path: Path
    steps: int
    json_bytes: int
    disk_bytes: int


class Lab:
    def __init__(self, root: Path, *, quick: bool, full_peer: bool, data: Path | None) -> None:
        self._root = root
        self._quick = quick
        self._full_peer = full_peer
        self.data = data

    def pick(self, full: T, quick: T) -> T:
        return quick if self._quick else full

    def row(self, measure: str, bar: str, measured: str, *, passed: bool | None) -> Row:
        """Return a row of the table. Limits are checked at full sizes only."""
        return Row(measure, bar, measured, None if self._quick else passed)

    def path(self, name: str) -> Path:
        """Return a path for a new store, in a separate folder."""
        folder = self._root / name
        folder.mkdir()
        return folder / "store.db"

    @functools.cached_property
    def long(self) -> Long:
        steps = self.pick(10_000, 1_000)
        path = self.path("long")
        messages = list(Writer(1).conversation(steps))
        with opened(path) as store:
            session = store.session("long")
            for message in messages:
                session.append("messages", message)
        disk = disk_usage(path)
        state = {"messages": messages}
        check_state(path, "long", state)
        return Long(path, steps, json_size(state), disk)

    @functools.cached_property
    def growth(self) -> Growth:
        steps = self.pick(2_000, 200)
        peer_steps = steps if self._full_peer else steps // 2
        path, append_path, peer_path = (
            self.path(f"growth-{i}") for i in ("save", "append", "peer")
        )
        return grow(path, append_path, peer_path, steps, peer_steps)
