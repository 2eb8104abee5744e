"""The journal of a session, in a file of its own, and the session's lease."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast import clock
from holdfast.errors import Corrupt
from holdfast.format import rows
from holdfast.format.records import MAX_SEQ, position
from holdfast.storage import fs
from holdfast.storage.files import row_json
from holdfast.storage.files.lines import DIGITS, read_entry
from holdfast.storage.files.log import hint, read_hint
from holdfast.storage.memory_tables import OrderedRows
from holdfast.storage.tables import TABLES
from holdfast.storage.tally import Lease

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.storage.contract import Insert
    from holdfast.storage.files.log import SessionLog
    from holdfast.storage.files.store_folder import StoreFolder


JOURNAL, LAST, LEASE = "journal.jsonl", "journal", "lease"
_DAMAGED = b"a line that is damaged"


class _Text(NamedTuple):
    """The contents of a journal file."""

    bodies: dict[int, bytes]
    """The entries of all sound lines, by number."""
    end: int
    """The end of the last sound line. The bytes after it may be torn."""
    begins: bool
    """Whether the first line is sound. Then no entry is missing before it."""


class Seen(NamedTuple):
    """A journal as it was at one moment."""

    first: int
    """Entries below this number are freed."""
    last: int
    """The number of the newest entry ever written, as far as it is known."""
    entries: OrderedRows


def look(ledger: SessionLog) -> Seen:
    known = last_known(ledger)  # first: a writer updates the hint after it has added an entry
    try:
        found = _parsed(fs.read(ledger.folder / JOURNAL))
    except (FileNotFoundError, NotADirectoryError):
        found = _Text({}, 0, begins=False)
    first = ledger.journal_from
    if found.bodies and found.begins and ledger.damaged:
        first = max(first, min(found.bodies))  # a lost line may have freed entries
    last = max([known, *found.bodies])
    entries = OrderedRows(TABLES["journal"].columns, ("pos",))
    entries.fill([(position(ledger.number, n), body) for n, body in found.bodies.items()])
    return Seen(first, last if last >= first else max(0, first - 1), entries)


def last_known(ledger: SessionLog) -> int:
    """Return the number in the hint next to the journal. Its line was synced, so it is not torn."""
    return read_hint(ledger.folder / LAST)


def _parsed(data: bytes) -> _Text:
    bodies: dict[int, bytes] = {}
    at = end = 0
    begins = True
    for line in data.split(b"\n"):
        at = min(at + len(line) + 1, len(data))
        entry = _entry(line)
        if entry is None:
            begins = begins and bool(bodies)
            continue
        end = at
        for n, shown in enumerate(entry["entries"], entry["n"]):
            try:
                bodies[n] = row_json.hide_row(shown)
            except (*row_json.MALFORMED, Corrupt):
                bodies[n] = _DAMAGED
    return _Text(bodies, end, begins)


def _entry(line: bytes) -> dict[str, Any] | None:
    entry = read_entry(line) or read_entry(line[:-1])
    return entry if entry is not None and type(entry.get("entries")) is list else None


def _line(session: int, entries: Sequence[tuple[int, bytes]]) -> bytes:
    """Return the line of entries with consecutive numbers."""
    first = entries[0][0]
    plain = [row_json.plain(rows.JOURNAL, position(session, n), row) for n, row in entries]
    return row_json.seal_line(first, {"n": first, "entries": [*map(row_json.show_row, plain)]})


def check_entries(ledger: SessionLog, entries: Sequence[Insert]) -> None:
    """Raise the refusal of an entry if the journal has its number, or a later one."""
    if entries and min([write.row[0] & MAX_SEQ for write in entries]) <= look(ledger).last:
        raise entries[0].refusal()


def add_entries(
    home: StoreFolder, ledger: SessionLog, entries: Sequence[Insert], *, together: bool
) -> None:
    """Write entries of a journal; together, as one line, or each as a line of its own.

    Raises the refusal of an entry if the journal has its number, or a later one.
    """
    if not entries:
        return
    new = sorted([(write.row[0] & MAX_SEQ, write.row[1]) for write in entries])
    path, first, newest = ledger.folder / JOURNAL, new[0][0], new[-1][0]
    if first >= 10**DIGITS:
        raise Corrupt(f"no entry can come after entry {first - 1} of {path}")
    lines = [_line(ledger.number, group) for group in ([new] if together else [[n] for n in new])]
    text = b"".join(lines)
    handle = fs.open_to_write(path, os.O_CREAT)
    try:
        found = os.fstat(handle)
        inode, end, last = home.journals.get(path, (0, 0, 0))
        if (inode, end) != (found.st_ino, found.st_size):
            data = fs.read_all(handle, found.st_size, 0)
            said, known = _parsed(data), last_known(ledger)
            last = max([known, *said.bodies])
            # A line after the last sound one is torn, unless the hint has counted it.
            end = said.end if known <= max(said.bodies, default=0) else len(data)
            if end and data[end - 1 : end] != b"\n":
                text = b"\n" + text
            home.forget_name(path)
        if first <= last:
            raise entries[0].refusal()
        if found.st_size > end:
            os.ftruncate(handle, end)
        home.journals.pop(path, None)
        home.add(path, handle, text, end)
        home.journals[path] = (found.st_ino, end + len(text), newest)
        home.hint(f"{ledger.folder}/{LAST}", hint(newest, home.until))
    finally:
        os.close(handle)
    home.tell()


def fsync_journal(home: StoreFolder, ledger: SessionLog) -> None:
    """Sync a journal that a killed worker may have written without a sync."""
    path = ledger.folder / JOURNAL
    if home.durable and path.exists():
        fs.sync(path)
        home.forget_name(path)
        home.fsync_name(path)


def slim(ledger: SessionLog) -> bytes | None:
    """Return the journal without freed entries; None if nothing changes or nothing is left."""
    path = ledger.folder / JOURNAL
    if not ledger.journal_from or not path.exists():
        return None
    data = fs.read(path)
    kept = []
    for line in data.split(b"\n")[:-1]:
        entry = _entry(line)
        freed = 0 if entry is None else ledger.journal_from - entry["n"]
        if entry is None or freed <= 0:
            kept.append(line + b"\n")
        elif rest := entry["entries"][freed:]:
            first = ledger.journal_from
            kept.append(row_json.seal_line(first, {"n": first, "entries": rest}))
    slimmer = b"".join(kept)
    return slimmer if len(slimmer) < len(data) else None


# -- leases --------------------------------------------------------------------------------------


def lease_of(ledger: SessionLog) -> Lease | None:
    written = ledger.written.get(("leases", (ledger.number,)), 0)
    newest = max([end - 1 for _, end in ledger.damaged], default=0)
    if newest > written and (ledger.folder / JOURNAL).exists():
        # A later line may have changed the lease.
        return Lease(ledger.number, b"", _DAMAGED, float("inf"))
    row = ledger.row("leases")
    if row is None:
        return None
    session, token, body = row
    try:
        named, boot, since = fs.read(ledger.folder / LEASE).decode().split()
        ours = named == (token.hex() or "-")
        age = clock.since("" if boot == "-" else boot, float(since)) if ours else float("inf")
    except (FileNotFoundError, ValueError):
        age = float("inf")
    return Lease(session, token, body, age)


def renew(home: StoreFolder, session: int, token: bytes) -> bool:
    with home.sessions([session]):
        ledger = home.current(session)
        lease = None if ledger is None else ledger.row("leases")
        if ledger is None or lease is None or lease[1] != token:
            return False
        note(ledger, token)
        return True


def note(ledger: SessionLog, token: bytes) -> None:
    """Write the current time as the time of the lease."""
    said = f"{token.hex() or '-'} {clock.boot_id() or '-'} {clock.elapsed()!r}"
    fs.replace(ledger.folder / LEASE, said.encode(), durable=False)
