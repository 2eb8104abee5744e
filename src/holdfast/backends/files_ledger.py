"""The log of a session: one line for each commit, and what all of them together say.

The line is the commit: what it refers to (items, blobs, the checkpoint's file) is on the disk
before it is. Lines are numbered and carry a digest each, so one that is damaged or missing is
noticed, and the others go on to count.
"""

from __future__ import annotations

import os
from bisect import bisect_left, insort
from typing import TYPE_CHECKING, Any

from holdfast import ids
from holdfast.backends import disk
from holdfast.backends import files_text as text
from holdfast.backends.files_hints import DIGITS, read_hint
from holdfast.backends.files_runs import joined, outside, whole
from holdfast.codec import rows
from holdfast.codec.records import position
from holdfast.errors import Corrupt

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from holdfast.backends.base import Change, Notes, Sweep
    from holdfast.backends.files_runs import Run

    Gap = tuple[int | None, bytes, tuple[int, str] | None]  # ancestor, row, condition

LOG, HEAD, STREAMS = "log.jsonl", "head", "streams"
DAMAGED_HEAD = b"the end of the log is damaged"
_BEGIN = b'{"n":'
_TAIL = 32
"""So many bytes before its end tell whether a log is still the one that was read."""
_MALFORMED = (ValueError, TypeError, LookupError, AttributeError)


def entry_of(change: Change, notes: Notes, ends: list[list[int]]) -> dict[str, Any]:
    """What a commit adds to the log. `ends` are streams, and where they end from now on."""
    session = change.session
    entry: dict[str, Any] = {}
    if change.create is not None:
        name, row = change.create
        entry["create"] = [session, text.show_name(name), text.show_row(row)]
    if notes.origin is not None:
        entry["origin"] = list(notes.origin)
    if change.checkpoint is not None:
        seq, id, _ = change.checkpoint
        entry["checkpoint"] = [seq, ids.to_text(id)]
    entry["head"] = text.show_row(change.head)
    if ends:
        entry["streams"] = ends
    if change.notes is not None:
        entry |= _show_notes(notes, session, change.checkpoint)
    return entry


def _show_notes(
    notes: Notes, session: int, checkpoint: tuple[int, bytes, bytes] | None
) -> dict[str, Any]:
    name, row = text.show_name, text.show_row
    keys = [(notes.key, checkpoint[0])] if notes.key is not None and checkpoint else []
    found: dict[str, Any] = {
        "keys": [[name(key), seq] for key, seq in [*keys, *notes.keys]],
        "unmarks": [[seq, kind, name(value)] for seq, kind, value in notes.unmarks],
        "marks": [[seq, kind, name(value), row(body)] for seq, kind, value, body in notes.marks],
        "tombs": [[seq, row(body)] for seq, body in notes.tombs],
        "untombs": list(notes.untombs),
        "unfacets": [[kind, name(value), _show_id(id)] for kind, value, id in notes.unfacets],
        "facets": [[kind, name(value), _show_id(id)] for kind, value, id in notes.facets],
    }
    copied = notes.copied
    if copied is not None:
        found["checkpoints"] = [[seq, ids.to_text(id)] for seq, id, _ in copied.checkpoints]
        found["operations"] = [_show_operation(session, *each) for each in copied.operations]
        found["gaps"] = [
            [seq, ancestor, row(text.plain(rows.GAP, position(session, seq), body))]
            for seq, ancestor, body in copied.gaps
        ]
        found["journal"] = copied.journal_from
    if notes.rename is not None:
        found["rename"] = [name(notes.rename[0]), row(notes.rename[1])]
    if notes.lease is not None:
        token, body = notes.lease
        found["lease"] = [token.hex(), row(text.plain(rows.LEASE, session, body))]
    if notes.operation is not None:
        found["operation"] = _show_operation(session, *notes.operation)
    return {what: facts for what, facts in found.items() if facts}


def _show_operation(session: int, number: int, body: bytes) -> list[Any]:
    body = text.plain(rows.OPERATION, position(session, number), body)
    return [number, text.show_row(body)]


def sweep_entry(sweep: Sweep, mark: str) -> dict[str, Any]:
    """What gc writes into the log of the session that it frees checkpoints of."""
    entry: dict[str, Any] = {
        "sweep": mark,
        "freed": [seq for seq, _ in sweep.checkpoints],
        "unkeys": [text.show_name(key) for key in sweep.keys],
        "unfacets": [[k, text.show_name(value), _show_id(id)] for k, value, id in sweep.facets],
        "gaps": gaps_of(sweep, sweep.session),
        "journal": sweep.journal,
    }
    return entry if sweep.remove is None else {**entry, "removed": True}


def gaps_of(sweep: Sweep, session: int) -> list[Any]:
    out = []
    for other, seq, ancestor, body in sweep.gaps:
        if other == session:
            body = text.plain(rows.GAP, position(session, seq), body)
            out.append([seq, ancestor, text.show_row(body)])
    return out


def _show_id(id: bytes) -> str:
    """Of a checkpoint; or, shorter, the number of a session."""
    return ids.to_text(id) if len(id) == ids.BYTES else id.hex()


def _hide_id(shown: str) -> bytes:
    if len(shown) != ids.CHARS:
        return bytes.fromhex(shown)
    id = ids.from_text(shown)
    if id is None:
        raise ValueError(shown)
    return id


def _all_of(entry: dict[str, Any], what: str) -> list[Any]:
    """The one fact of a kind that most commits bring, or all that a copy does."""
    return [*entry.get(f"{what}s", ()), *([entry[what]] if what in entry else [])]


def status(folder: Path) -> tuple[int, int] | None:
    """Inode and size of the log in a session's folder now; None if there is none."""
    try:
        found = os.stat(f"{folder}/{LOG}")
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_ino, found.st_size


class Ledger:
    """What the log of a session says, as far as it was read."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / LOG
        self._streams: dict[int, Path] = {}
        self.pins = 0
        """Readers that look at it, for whom it must stay as it is."""
        self.inode = self.size = self.entries = 0
        self.tail = b""
        self.damaged: list[Run] = []
        """Numbers of the lines that cannot be read: from one on, before another."""
        self.number = 0
        self.name = self.row = b""
        self.origin: tuple[int, int] | None = None
        self.head: bytes | None = None
        self.removed = False
        self.ids: dict[int, bytes] = {}
        self.found: set[int] = set()
        """Checkpoints that no line tells of, but their files do."""
        self.order: list[int] = []
        self.keys: dict[bytes, int] = {}
        self.marks: dict[tuple[int, int, bytes], bytes] = {}
        self.operations: dict[int, bytes] = {}
        self.tombs: dict[int, bytes] = {}
        self.gaps: dict[int, list[Gap]] = {}
        self.facets: dict[tuple[int, bytes, bytes], None] = {}
        self.ends: dict[int, int] = {}
        """By stream: how many items were committed."""
        self.freed: set[int] = set()
        self.sweeps: set[str] = set()
        self.lease: tuple[bytes, bytes] | None = None
        self.lease_at = 0
        """The number of the line that says so."""
        self.journal_from = 0
        """Entries of the journal with lower numbers are freed."""

    def copy(self) -> Ledger:
        new = Ledger(self.folder)
        for name, value in vars(self).items():
            held = value.copy() if isinstance(value, (dict, list, set)) else value
            setattr(new, name, held)
        new.gaps = {seq: list(found) for seq, found in self.gaps.items()}
        new.pins = 0
        return new

    def stream(self, number: int) -> Path:
        """The file of a stream of this session."""
        path = self._streams.get(number)
        if path is None:
            path = self._streams[number] = self.folder / STREAMS / f"{number}.jsonl"
        return path

    @property
    def there(self) -> bool:
        """Whether there is such a session: the first commit makes it, and gc may remove it."""
        return self.entries > 0 and not self.removed

    # -- reading the log -----------------------------------------------------------------------

    def is_current(self) -> bool:
        """Whether the log still ends as it was read. Its size alone does not tell."""
        try:
            handle = os.open(f"{self.folder}/{LOG}", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return not self.tail
        try:
            return os.pread(handle, _TAIL + 1, self.size - len(self.tail)) == self.tail
        finally:
            os.close(handle)

    def read(self) -> bool:
        """All that was added since. Lines that are not complete yet are left for later.

        False if the log is another than the one that was read before.
        """
        try:
            handle = os.open(self.folder / LOG, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            self._doubt(None)
            return True
        try:
            found = os.fstat(handle)
            start = self.size - len(self.tail)
            data = disk.read_all(handle, max(found.st_size - start, 0), start)
        finally:
            os.close(handle)
        if not data.startswith(self.tail):
            return False
        self.inode = found.st_ino
        end = data.rfind(b"\n") + 1
        for entry in self._entries(data[len(self.tail) : end]):
            self.apply(entry)
        self.size, self.tail = start + end, data[:end][-_TAIL:]
        self._doubt((found.st_ino, found.st_size))
        return True

    def _entries(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Sound lines in their order; what lies between is noted as damaged."""
        for line in data.split(b"\n")[:-1]:
            entry = self._entry(line)
            if entry is not None:
                yield entry
                continue
            # The end of a line may be what is damaged: then two lie here.
            at = line.find(_BEGIN, 1)
            while at > 0:
                for part in (line[: at - 1], line[at:]):
                    entry = self._entry(part)
                    if entry is not None:
                        yield entry
                at = line.find(_BEGIN, at + 1)

    def _entry(self, line: bytes) -> dict[str, Any] | None:
        digits = line[len(_BEGIN) : line.find(b",")]
        if not line.startswith(_BEGIN) or not digits.isdigit() or len(digits) > DIGITS:
            return None
        entry = text.read_line(int(digits), line)
        return entry if entry is not None and entry["n"] == int(digits) else None

    def apply(self, entry: dict[str, Any]) -> None:
        n = entry["n"]
        try:
            dropped = [(whole(low), whole(high)) for low, high in entry.get("dropped", ())]
        except _MALFORMED:
            dropped, entry = [], {}
        if dropped:
            self.damaged = outside(self.damaged, dropped)
        if n <= self.entries:
            return  # a line that was found twice
        self.damaged += outside([(self.entries + 1, n)], dropped)
        self.entries = n
        try:
            self._apply(entry)
            damaged = not entry
        except (*_MALFORMED, Corrupt):
            damaged = True
        if damaged:
            self.damaged.append((n, n + 1))

    def _doubt(self, seen: tuple[int, int] | None) -> None:
        """If the log was longer once, its end is damaged, and so the head unknown."""
        known = read_hint(self.folder / HEAD)
        if known > self.entries and status(self.folder) == seen:
            self.damaged.append((self.entries + 1, known + 1))
            self.entries = known
            self.head = DAMAGED_HEAD

    # -- what it says --------------------------------------------------------------------------

    def _apply(self, entry: dict[str, Any]) -> None:
        name, row = text.hide_name, text.hide_row
        if "create" in entry:
            number, shown, body = entry["create"]
            self.number, self.name, self.row = number, name(shown), row(body)
        if "rename" in entry:
            self.name, self.row = name(entry["rename"][0]), row(entry["rename"][1])
        if "origin" in entry:
            session, seq = entry["origin"]
            self.origin = (session, seq)
        if "head" in entry:
            self.head = row(entry["head"])
        for seq, id in _all_of(entry, "checkpoint"):
            self.add(whole(seq), _hide_id(id))
        for stream, end in entry.get("streams", ()):
            self.ends[whole(stream)] = whole(end)
        for key, seq in entry.get("keys", ()):
            self.keys[name(key)] = seq
        for seq, kind, value in entry.get("unmarks", ()):
            self.marks.pop((seq, kind, name(value)), None)
        for seq, kind, value, body in entry.get("marks", ()):
            self.marks[seq, kind, name(value)] = row(body)
        for number, body in _all_of(entry, "operation"):
            self.operations[number] = row(body)
        for seq, body in entry.get("tombs", ()):
            self.tombs[seq] = row(body)
        for seq in entry.get("untombs", ()):
            self.tombs.pop(seq, None)
        for kind, value, id in entry.get("unfacets", ()):
            self.facets.pop((kind, name(value), _hide_id(id)), None)
        for kind, value, id in entry.get("facets", ()):
            self.facets[kind, name(value), _hide_id(id)] = None
        self._apply_sweep(entry)

    def _apply_sweep(self, entry: dict[str, Any]) -> None:
        for seq in entry.get("freed", ()):
            self.forget(seq)
        for key in entry.get("unkeys", ()):
            self.keys.pop(text.hide_name(key), None)
        condition = tuple(entry["if"]) if "if" in entry else None
        for seq, ancestor, body in entry.get("gaps", ()):
            self.gaps.setdefault(seq, []).append((ancestor, text.hide_row(body), condition))
        if "lease" in entry:
            token, row = entry["lease"]
            self.lease, self.lease_at = (bytes.fromhex(token), text.hide_row(row)), entry["n"]
        self.journal_from = max(self.journal_from, entry.get("journal", 0))
        if "sweep" in entry:
            self.sweeps.add(entry["sweep"])
        self.removed = self.removed or "removed" in entry

    def add(self, seq: int, id: bytes) -> None:
        if not self.order or seq > self.order[-1]:
            self.order.append(seq)
        elif seq not in self.ids:
            insort(self.order, seq)
        self.ids[seq] = id
        self.freed.discard(seq)  # a copy may bring back what was freed here

    def forget(self, seq: int) -> None:
        self.freed.add(seq)
        if self.ids.pop(seq, None) is not None:
            del self.order[bisect_left(self.order, seq)]
        self.tombs.pop(seq, None)
        self.gaps.pop(seq, None)
        for mark in [m for m in self.marks if m[0] == seq]:
            del self.marks[mark]

    # -- writing the log -----------------------------------------------------------------------

    def advance(
        self, entry: dict[str, Any], line: bytes, inode: int, at: int, change: Change | None
    ) -> None:
        """Know of a line that was written, as if it had been read; with the change it stands for.

        What most changes bring is not read again from what was just made of it.
        """
        n = entry["n"]
        if (
            change is not None
            and change.checkpoint is not None
            and change.notes is None
            and change.create is None
            and n == self.entries + 1
        ):
            seq, id, _ = change.checkpoint
            self.entries, self.head = n, change.head
            self.add(seq, id)
            self.ends.update(entry.get("streams", ()))
        else:
            self.apply(entry)
        self.inode, self.size, self.tail = inode, at + len(line), line[-_TAIL:]

    def line(self, entry: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        """The next line: what it says, and its text. Each tells the head, so that the last does."""
        n = self.entries + 1
        if n >= 10**DIGITS:
            raise Corrupt(f"no line can come after line {n - 1} of {self.log}")
        if "head" not in entry and self.head is not None:
            entry["head"] = text.show_row(self.head)
        entry = {"n": n, **entry}
        return entry, text.seal_line(n, entry)

    def acceptance(self) -> dict[str, Any]:
        """What a line says after which none is missing: the lost ones, and what is known still."""
        found = [[seq, ids.to_text(self.ids[seq])] for seq in self.order if seq in self.found]
        entry: dict[str, Any] = {
            "dropped": self.damaged,
            "create": [self.number, text.show_name(self.name), text.show_row(self.row)],
            "checkpoints": found,
        }
        return entry if self.origin is None else {**entry, "origin": list(self.origin)}

    def slim(self, data: bytes) -> bytes | None:
        """The log without the lines of checkpoints that are freed; None if that is not worth it."""
        kept: list[bytes] = []
        dropped: list[list[int]] = []
        saved = 0
        for line in data.split(b"\n")[:-1]:
            entry = self._entry(line)
            try:
                runs = self._idle_runs(entry) if entry is not None else None
            except _MALFORMED:
                runs = None  # one of those whose loss was accepted
            if runs is None:
                kept.append(line + b"\n")
            else:
                saved += len(line)
                dropped += runs
        if 4 * saved < len(data):
            return None
        ends = [[stream, end] for stream, end in self.ends.items()]
        note: dict[str, Any] = {"dropped": joined(dropped), "streams": ends}
        found = [f for f in self.facets if len(f[2]) != ids.BYTES]  # of the session as a whole
        note["facets"] = [[kind, text.show_name(value), _show_id(id)] for kind, value, id in found]
        if self.lease is not None:
            note["lease"] = [self.lease[0].hex(), text.show_row(self.lease[1])]
        return b"".join(kept) + self.line(note)[1]

    def _idle_runs(self, entry: dict[str, Any]) -> list[list[int]] | None:
        """The numbers that go with a line of which nothing matters any more; None if some does."""
        own = [[entry["n"], entry["n"] + 1]]
        if "dropped" in entry:
            runs = [[whole(low), whole(high)] for low, high in entry["dropped"]]
            return None if "create" in entry else [*runs, *own]
        if entry.keys() == {"n", "head", "lease"}:
            idle = self.lease is None or entry["lease"][0] != self.lease[0].hex()
        else:
            seq = whole(entry.get("checkpoint", [0])[0])
            idle = seq > 0 and seq not in self.ids and entry.keys() <= _IDLE
        return own if idle else None


_IDLE = {"n", "checkpoint", "head", "streams", "facets", "keys", "marks"}
