"""A session's journal as a file of lines, one for each time that something was written to it.

A line is complete or does not count; whoever writes next cuts off half a one. Beside it lie two
hints, not synced: `journal`, the number of the last entry, so that one that goes missing is missed;
and `lease`, when the session's lease was last renewed.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast import clock
from holdfast.backends import disk
from holdfast.backends import files_text as text
from holdfast.backends.base import Lease, Moved
from holdfast.backends.files_hints import DIGITS, hint, read_hint
from holdfast.codec import rows
from holdfast.codec.records import position
from holdfast.errors import Corrupt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.backends.base import Jot
    from holdfast.backends.files_home import Home
    from holdfast.backends.files_ledger import Ledger

JOURNAL, LAST, LEASE = "journal.jsonl", "journal", "lease"
_BEGIN = b'{"n":'
_DAMAGED = b"a line that is damaged"


class _Text(NamedTuple):
    """What a file of lines says."""

    rows: dict[int, bytes]
    """By their numbers: the entries of all sound lines."""
    end: int
    """Where the last sound line ends. What is behind it may be torn."""
    begins: bool
    """Whether the first line is sound: then nothing is missing before it."""


def read(ledger: Ledger, low: int = 1) -> list[tuple[int, bytes]]:
    """All entries that count, from a number on, in order; for what is damaged, a row that is none.

    One is enough for all that are missing in a row: how many those are, anybody may have made up.
    """
    known = last_known(ledger)  # first: who writes meanwhile tells of an entry after it is there
    found = _read(ledger)
    out, at = [], max(1, _first(ledger, found), low)
    for n in sorted([n for n in found.rows if n >= at]):
        if n > at:
            out.append((at, _DAMAGED))
        out.append((n, found.rows[n]))
        at = n + 1
    return out + [(n, _DAMAGED) for n in sorted({at, known}) if at <= known]


def first_entry(ledger: Ledger) -> int:
    """The number before which entries are freed."""
    return _first(ledger, _read(ledger))


def _first(ledger: Ledger, found: _Text) -> int:
    if found.rows and found.begins and ledger.damaged:
        return max(ledger.journal_from, min(found.rows))  # a line that is lost may have said so
    return ledger.journal_from


def _read(ledger: Ledger) -> _Text:
    try:
        return _parsed((ledger.folder / JOURNAL).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return _Text({}, 0, begins=False)


def last_entry(ledger: Ledger) -> int:
    """The number of the newest entry that ever was, as far as that is known."""
    return max([n for n, _ in read(ledger)], default=max(0, ledger.journal_from - 1))


def last_known(ledger: Ledger) -> int:
    """The hint beside the journal: a line that it knows of was synced, so it cannot be torn."""
    return read_hint(ledger.folder / LAST)


def _parsed(data: bytes) -> _Text:
    rows: dict[int, bytes] = {}
    at = end = 0
    begins = True
    for line in data.split(b"\n"):
        at = min(at + len(line) + 1, len(data))
        entry = _entry(line)
        if entry is None:
            begins = begins and bool(rows)
            continue
        end = at
        for n, shown in enumerate(entry["entries"], entry["n"]):
            try:
                rows[n] = text.hide_row(shown)
            except (ValueError, TypeError, LookupError, AttributeError, Corrupt):
                rows[n] = _DAMAGED
    return _Text(rows, end, begins)


def _entry(line: bytes) -> dict[str, Any] | None:
    digits = line[len(_BEGIN) : line.find(b",")]
    if not line.startswith(_BEGIN) or not digits.isdigit() or len(digits) > DIGITS:
        return None
    entry = text.read_line(int(digits), line) or text.read_line(int(digits), line[:-1])
    if entry is None or entry["n"] != int(digits) or type(entry.get("entries")) is not list:
        return None
    return entry


def _line(session: int, first: int, entries: Sequence[bytes]) -> bytes:
    plain = [
        text.plain(rows.JOURNAL, position(session, n), row) for n, row in enumerate(entries, first)
    ]
    return text.seal_line(first, {"n": first, "entries": [text.show_row(row) for row in plain]})


def jot(home: Home, jot: Jot) -> None:
    with home.sessions([jot.session]):
        ledger = home.current(jot.session)
        if ledger is None or not ledger.there:
            raise Moved
        if jot.token is not None and (ledger.lease is None or ledger.lease[0] != jot.token):
            raise Moved
        _add(home, ledger, jot.first, [_line(jot.session, jot.first, jot.entries)])


def check_new(ledger: Ledger, entries: Sequence[tuple[int, bytes]]) -> None:
    """Moved if one of the entries to be copied, or one after it, is here."""
    if entries and min(entries)[0] <= last_entry(ledger):
        raise Moved


def copy(home: Home, ledger: Ledger, entries: Sequence[tuple[int, bytes]]) -> None:
    """What another store has of a journal, and this one has not."""
    new = sorted(entries)
    if new:
        _add(home, ledger, new[0][0], [_line(ledger.number, n, [row]) for n, row in new])


def _add(home: Home, ledger: Ledger, first: int, lines: list[bytes]) -> None:
    path = ledger.folder / JOURNAL
    if first >= 10**DIGITS:
        raise Corrupt(f"no entry can come after entry {first - 1} of {path}")
    handle = disk.open_to_write(path, os.O_CREAT)
    try:
        found = os.fstat(handle)
        inode, end, last = home.journals.get(path, (0, 0, 0))
        if (inode, end) != (found.st_ino, found.st_size):
            data = disk.read_all(handle, found.st_size, 0)
            said, known = _parsed(data), last_known(ledger)
            last = max([known, *said.rows])
            # A line behind the last sound one is torn, and nobody's, unless it was known before.
            end = said.end if known <= max(said.rows, default=0) else len(data)
            if end and data[end - 1 : end] != b"\n":
                lines = [b"\n", *lines]
            home.unsettle(path)
        if first <= last:
            raise Moved
        if found.st_size > end:
            os.ftruncate(handle, end)
        home.journals.pop(path, None)
        home.add(path, handle, b"".join(lines), end)
        newest = _entry(lines[-1][:-1])
        if newest is not None:
            last = newest["n"] + len(newest["entries"]) - 1
            home.journals[path] = (found.st_ino, end + sum(map(len, lines)), last)
            home.hint(f"{ledger.folder}/{LAST}", hint(last, home.until))
    finally:
        os.close(handle)
    home.tell()


def settle(home: Home, ledger: Ledger) -> None:
    """Make durable what a worker that was killed may have written, and not have synced."""
    path = ledger.folder / JOURNAL
    if home.durable and path.exists():
        disk.sync(path)
        home.unsettle(path)
        home.settle(path)


def slim(ledger: Ledger) -> bytes | None:
    """The journal without what gc has freed; None if that is all or nothing of it."""
    path = ledger.folder / JOURNAL
    if not ledger.journal_from or not path.exists():
        return None
    data = path.read_bytes()
    kept = []
    for line in data.split(b"\n")[:-1]:
        entry = _entry(line)
        if entry is None or entry["n"] + len(entry["entries"]) > ledger.journal_from:
            kept.append(line + b"\n")
    slimmer = b"".join(kept)
    return slimmer if len(slimmer) < len(data) else None


# -- leases --------------------------------------------------------------------------------------


def lease_of(ledger: Ledger) -> Lease | None:
    newest = max([end - 1 for _, end in ledger.damaged], default=0)
    if newest > ledger.lease_at and (ledger.folder / JOURNAL).exists():
        return Lease(ledger.number, b"", _DAMAGED, float("inf"))  # a later line may have told more
    if ledger.lease is None:
        return None
    token, row = ledger.lease
    try:
        named, boot, since = (ledger.folder / LEASE).read_text().split()
        ours = named == (token.hex() or "-")
        age = clock.since("" if boot == "-" else boot, float(since)) if ours else float("inf")
    except (FileNotFoundError, ValueError):
        age = float("inf")
    return Lease(ledger.number, token, row, age)


def renew(home: Home, session: int, token: bytes) -> bool:
    with home.sessions([session]):
        ledger = home.current(session)
        if ledger is None or ledger.lease is None or ledger.lease[0] != token:
            return False
        note(ledger, token)
        return True


def note(ledger: Ledger, token: bytes) -> None:
    """When a lease was taken or renewed: now."""
    said = f"{token.hex() or '-'} {clock.boot_id() or '-'} {clock.elapsed()!r}"
    disk.replace(ledger.folder / LEASE, said.encode(), durable=False)
