"""How gc and copies notice each other in a store of files: a number for each, and a lock."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from holdfast.backends import disk
from holdfast.backends.base import Gone, Turnover
from holdfast.codec.records import COPIED, FREED

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from holdfast.backends.base import Copied


class Turns:
    """Not synced: whoever goes by these numbers does not outlive a power loss."""

    def __init__(self, folder: Path, timeout: float) -> None:
        self._folder, self._timeout = folder, timeout

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else frees or copies anything."""
        with disk.locked(self._folder / "turning", self._timeout):
            yield

    def read(self) -> Turnover:
        return Turnover(*[self._read(what) for what in (FREED, COPIED)])

    def _read(self, what: str) -> int:
        try:
            text = (self._folder / what).read_bytes()
        except FileNotFoundError:
            return 0
        return int(text) if text.isdigit() and len(text) < 20 else -1

    def freeing(self) -> None:
        """Say so before it is done; for who is alone."""
        self._change(FREED)

    def copying(self, copied: Copied) -> None:
        """Say so, unless something was freed meanwhile; for who is alone."""
        if self.read().freed != copied.freed:
            raise Gone
        self._change(COPIED)

    def _change(self, what: str) -> None:
        disk.replace(self._folder / what, b"%d" % Turnover.new(), durable=False)
