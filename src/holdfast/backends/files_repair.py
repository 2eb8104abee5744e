"""Repairing a store of files: counters made anew, and lost lines of a log accepted as lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.backends import disk, files_counters, files_journal
from holdfast.backends.files_home import LOCKS
from holdfast.backends.files_names import streams_in
from holdfast.backends.files_reader import FilesReader
from holdfast.codec.records import SPACES
from holdfast.codec.streams import MAX_ITEMS
from holdfast.errors import Corrupt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.backends.files_home import Home
    from holdfast.backends.files_ledger import Ledger


def recount(home: Home) -> None:
    """Numbers that are counted from what is there, should that file be damaged."""
    with disk.locked(home.root / LOCKS / "counters", home.timeout):
        for problem in home.catalog.clashes():
            raise problem  # nothing is lost, so no head may move
        try:
            files_counters.read(home.root)
        except Corrupt:
            counted = {space: files_counters.beyond(home.catalog, space) for space in SPACES}
            files_counters.write(home.root, counted)


def accept(home: Home, session: int) -> bool:
    """Let the log say which of its lines are lost, so that they are not missed any more."""
    with home.sessions({session}):
        ledger = home.current(session)
        if ledger is None or not ledger.there or not ledger.damaged:
            return False
        reader = FilesReader(home)
        try:
            name, row = reader.called(ledger)
        finally:
            reader.close()
        journal, ends = files_journal.first_entry(ledger), [*_ends(home, ledger)]
        home.log(ledger, *ledger.line(ledger.acceptance(name, row, journal, ends)))
        return True


def _ends(home: Home, ledger: Ledger) -> Iterator[list[int]]:
    """How far streams go: what a lost line may have brought, no copy must cut off."""
    for stream in sorted(streams_in(str(ledger.folder))):
        lines = home.streams.lines(ledger.stream(stream), 0, MAX_ITEMS)
        if lines:
            yield [stream, max(lines[-1][0] + 1, ledger.ends.get(stream, 0))]
