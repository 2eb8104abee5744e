"""The log of a session: one line for each commit, and what all of them together say.

The line is the commit: what it refers to (items, blobs, the checkpoint's file) is on the disk
before it is. Lines are numbered and carry a digest each, so one that is damaged or missing is
noticed, and the others go on to count.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left, insort
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from holdfast import ids
from holdfast.backends import disk
from holdfast.backends import files_text as text
from holdfast.backends.files_entries import hide_id, show_id
from holdfast.backends.files_hints import DIGITS, read_hint
from holdfast.backends.files_identity import identity_of
from holdfast.backends.files_runs import joined, outside, whole
from holdfast.codec import portable
from holdfast.codec.records import (
    MAX_SEQ,
    former_name,
    seal_session,
    unseal_head,
    unseal_session,
)
from holdfast.errors import UNREADABLE, Corrupt

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from holdfast.backends.base import Change
    from holdfast.backends.files_runs import Run

    Gap = tuple[int | None, bytes, tuple[int, str] | None]  # ancestor, row, condition

LOG, HEAD, STREAMS, CHECKPOINTS = "log.jsonl", "head", "streams", "checkpoints"
DAMAGED_HEAD = b"the end of the log is damaged"
_BEGIN = b'{"n":'
_TAIL = 32
"""So many bytes before its end tell whether a log is still the one that was read."""
_RECORD = re.compile(r"[0-9]{6,12}\.json")
_MALFORMED = (ValueError, TypeError, LookupError, AttributeError)


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
        self.named_at = self.saved_at = 0
        """The numbers of the lines that said its name, and that a checkpoint was made."""
        self.doubtful = False
        """Whether lines are lost that may have given it another name."""
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
        self.buried_at: dict[int, int] = {}
        """By seq: the number of the line that said that it is deleted."""
        self.raised: set[int] = set()
        """Those which count as not deleted, for lines are lost that may have said so."""
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
        if not self.entries and not known and self._has_begun():
            known = 1
        if known > self.entries and status(self.folder) == seen:
            self.damaged.append((self.entries + 1, known + 1))
            self.entries = known
            self.head = DAMAGED_HEAD

    def _has_begun(self) -> bool:
        """Whether some line must have been there, for it is more than the first that was saved."""
        highest = max([0, *self._records()])
        identity = identity_of(self.folder) if highest > 1 else None
        return identity is not None and identity.first is not None and highest > identity.first

    # -- what it says --------------------------------------------------------------------------

    def _apply(self, entry: dict[str, Any]) -> None:
        name, row = text.hide_name, text.hide_row
        self._apply_names(entry)
        if "origin" in entry:
            session, seq = entry["origin"]
            self.origin = (session, seq)
        if "head" in entry:
            self.head = row(entry["head"])
        for seq, id in _all_of(entry, "checkpoint"):
            self.add(whole(seq), hide_id(id))
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
            self.tombs[seq], self.buried_at[seq] = row(body), entry["n"]
        for seq in entry.get("untombs", ()):
            self.tombs.pop(seq, None)
            self.raised.discard(seq)
        for kind, value, id in entry.get("unfacets", ()):
            self.facets.pop((kind, name(value), hide_id(id)), None)
        for kind, value, id in entry.get("facets", ()):
            self.facets[kind, name(value), hide_id(id)] = None
        self._apply_sweep(entry)

    def _apply_names(self, entry: dict[str, Any]) -> None:
        named = None
        if "create" in entry:
            self.number, *named = entry["create"]
        if "rename" in entry:
            named = entry["rename"]
        if named is not None:
            self.name, self.row = text.hide_name(named[0]), text.hide_row(named[1])
            self.named_at, self.doubtful = entry["n"], False
        if "checkpoint" in entry:
            self.saved_at = entry["n"]

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
        self.raised.discard(seq)
        if self.ids.pop(seq, None) is not None:
            del self.order[bisect_left(self.order, seq)]
        self.tombs.pop(seq, None)
        self.gaps.pop(seq, None)
        for mark in [m for m in self.marks if m[0] == seq]:
            del self.marks[mark]

    def find_records(self) -> None:
        """Checkpoints whose lines are damaged: their files tell that they are there."""
        newest = MAX_SEQ
        with suppress(*UNREADABLE, TypeError):
            newest = unseal_head(self.number, self.head or b"").last
        for seq in self._records():
            if seq in self.ids or seq in self.freed:
                continue
            if seq > newest:
                continue  # of a commit that has not ended
            try:
                text = (self.folder / CHECKPOINTS / f"{seq:06}.json").read_bytes()
                id = ids.from_text(portable.loads(text)["id"])
            except (OSError, *_MALFORMED):
                continue
            if id is not None:
                self.add(seq, id)
                self.found.add(seq)

    def _records(self) -> list[int]:
        """Checkpoints that have a file."""
        try:
            names = os.listdir(self.folder / CHECKPOINTS)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [int(name[:-5]) for name in names if _RECORD.fullmatch(name)]

    def doubt(self, names: Sequence[bytes]) -> None:
        """Of a damaged log: what was deleted before lines that are lost may have come back by them.

        So it counts as not deleted. Of the `names` that it has had, or was about to get, it may
        have another now; but what goes on to be saved to is not deleted.
        """
        lost = max([high for _, high in self.damaged])
        raised = [seq for seq in self.tombs if self.buried_at[seq] < lost]
        for seq in raised:
            del self.tombs[seq]
        self.raised.update(raised)
        self.doubtful = len(names) > 1 and max(self.named_at, self.saved_at) < lost
        former = former_name(self.number, self.name)
        if former is not None and (self.doubtful or self.saved_at > self.named_at):
            self.row, self.name = self.row_for(former), former

    def row_for(self, name: bytes) -> bytes:
        """The session's row under another name; a damaged one stays as it is."""
        try:
            return seal_session(self.number, name, unseal_session(self.number, self.name, self.row))
        except UNREADABLE:
            return self.row

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
            self.entries, self.head, self.saved_at = n, change.head, n
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

    def acceptance(
        self, name: bytes, row: bytes, journal: int, ends: list[list[int]]
    ) -> dict[str, Any]:
        """What a line says after which none is missing: the lost ones, and what is known still."""
        found = [[seq, ids.to_text(self.ids[seq])] for seq in self.order if seq in self.found]
        entry: dict[str, Any] = {
            "dropped": self.damaged,
            "create": [self.number, text.show_name(name), text.show_row(row)],
            "checkpoints": found,
            "untombs": sorted(self.raised),
            "journal": journal,
            "streams": ends,
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
        note["facets"] = [[kind, text.show_name(value), show_id(id)] for kind, value, id in found]
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
