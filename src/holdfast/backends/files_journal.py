"""A session's journal as a file of lines, one for each time that something was written to it.

A line is complete or does not count; whoever writes next cuts off half a one. Beside it, `lease` is
a hint, not synced: when the session's lease was last renewed.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from holdfast import clock
from holdfast.backends import files_text as text
from holdfast.backends.base import Lease, Moved
from holdfast.codec import rows
from holdfast.codec.records import position
from holdfast.errors import Corrupt

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from holdfast.backends.base import Jot
    from holdfast.backends.files_ledger import Ledger
    from holdfast.backends.files_writer import Home

JOURNAL, LEASE = "journal.jsonl", "lease"
_BEGIN = b'{"n":'
_DAMAGED = b"a line that is damaged"


def read(ledger: Ledger) -> list[tuple[int, bytes]]:
    """All entries that count, in order; one that does not unseal for each damaged line."""
    try:
        data = (ledger.folder / JOURNAL).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [(n, row) for n, row in _entries(data) if n >= ledger.journal_from]


def _split(data: bytes) -> tuple[list[bytes], bytes]:
    """The lines that count, and what is torn behind them.

    Where only the end of the last line is damaged, it is complete all the same.
    """
    *lines, last = data.split(b"\n")
    return ([*lines, last], b"") if _entry(last) is not None else (lines, last)


def _entries(data: bytes) -> Iterator[tuple[int, bytes]]:
    n = 0
    for line in _split(data)[0]:
        entry = _entry(line)
        if entry is None:
            n += 1
            yield n, _DAMAGED
            continue
        n = entry["n"] - 1
        for shown in entry["entries"]:
            n += 1
            try:
                yield n, text.hide_row(shown)
            except (ValueError, TypeError, LookupError, AttributeError, Corrupt):
                yield n, _DAMAGED


def _entry(line: bytes) -> dict[str, Any] | None:
    digits = line[len(_BEGIN) : line.find(b",")]
    if not line.startswith(_BEGIN) or not digits.isdigit():
        return None
    return text.read_line(int(digits), line) or text.read_line(int(digits), line[:-1])


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


def copy(home: Home, ledger: Ledger, entries: Sequence[tuple[int, bytes]]) -> None:
    """What another store has of a journal; what is here already stays."""
    last = max([n for n, _ in read(ledger)], default=0)
    new = sorted([(n, row) for n, row in entries if n > last])
    if new:
        _add(home, ledger, new[0][0], [_line(ledger.number, n, [row]) for n, row in new])


def _add(home: Home, ledger: Ledger, first: int, lines: list[bytes]) -> None:
    path = ledger.folder / JOURNAL
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        found = os.fstat(handle)
        inode, end, last = home.journals.get(path, (0, 0, 0))
        if (inode, end) != (found.st_ino, found.st_size):
            data = os.pread(handle, found.st_size, 0)
            end = len(data) - len(_split(data)[1])
            last = max([n for n, _ in _entries(data)], default=0)
            if end and data[end - 1 : end] != b"\n":
                lines = [b"\n", *lines]
            home.unsettle(path)
        if first <= last:
            raise Moved
        if found.st_size > end:
            os.ftruncate(handle, end)  # torn, and so nobody's
        home.journals.pop(path, None)
        home.add(path, handle, b"".join(lines), end)
        newest = _entry(lines[-1][:-1])
        if newest is not None:
            last = newest["n"] + len(newest["entries"]) - 1
            home.journals[path] = (found.st_ino, end + sum(map(len, lines)), last)
    finally:
        os.close(handle)
    home.tell()


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
    if max(ledger.damaged, default=0) > ledger.lease_at and (ledger.folder / JOURNAL).exists():
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
    draft = ledger.folder / f"{LEASE}.new"
    draft.write_text(said)
    draft.chmod(0o600)
    draft.replace(ledger.folder / LEASE)
