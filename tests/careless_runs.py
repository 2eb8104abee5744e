"""Ways to break runs, which more than one harness must notice."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.runs.journal import Journal
from holdfast.runs.opening import Opened


def calls_what_is_in_doubt(patch: pytest.MonkeyPatch) -> None:
    """An entry without an end is taken for none."""
    catch_up = Journal.catch_up

    def read(self: Journal, *args: Any) -> None:
        catch_up(self, *args)
        for call in self.calls.open():
            del self.calls.all[call.where]

    patch.setattr(Journal, "catch_up", read)


def goes_on_from_the_head(patch: pytest.MonkeyPatch) -> None:
    """A turn that starts again has what it changed before."""
    patch.setattr(Opened, "state_at", lambda self, _: self.handle.load())


def compares_no_tokens(patch: pytest.MonkeyPatch) -> None:
    """Entries are taken from everybody."""
    begin = Journal.__init__
    patch.setattr(
        Journal, "__init__", lambda self, backend, number, _: begin(self, backend, number, None)
    )
