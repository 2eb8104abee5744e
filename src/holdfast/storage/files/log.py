"""The files in a session's folder: its identity, its log, its journal and its lease.

The commit of a change is one line at the end of the log.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left, insort
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast import clock, ids
from holdfast.errors import UNREADABLE, Corrupt
from holdfast.format import portable as format_portable
from holdfast.format import rows as format_rows
from holdfast.format.records import (
    MAX_SEQ,
    SEQ_BITS,
    IndexTerm,
    former_name,
    position,
    seal_session,
    unseal_head,
    unseal_session,
)
from holdfast.intervals import joined, outside, whole
from holdfast.storage import fs
from holdfast.storage.contract import Delete, DeleteRange, Insert, Put, Rename
from holdfast.storage.files import row_json as text
from holdfast.storage.rows import Address, JournalRow, LeaseRow, MarkKey, MarkRow
from holdfast.storage.tally import Lease

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from holdfast.intervals import Run
    from holdfast.storage.contract import Batch, Refusal
    from holdfast.storage.files.store_folder import StoreFolder
    from holdfast.storage.tables import Row


SESSION = "session.json"
_MALFORMED_IDENTITY = (LookupError, TypeError, ValueError, AttributeError)


class Identity(NamedTuple):
    """The identity of a session's folder. It is used if the first line of the log is damaged."""

    number: int
    names: tuple[bytes, ...]
    """All names that the session had or was about to get."""
    row: bytes
    origin: Address | None
    first: int | None = None
    """The highest seq of a checkpoint that the first line of its log contains.

    None if that line may be lost, because it was not synced.
    """

    def show(self) -> bytes:
        shown = {
            "session": [text.show_name(name) for name in self.names],
            "number": self.number,
            "row": text.show_row(self.row),
            "origin": self.origin,
            "first": self.first,
        }
        return text.seal_line(self.number, shown)

    @classmethod
    def read(cls, data: bytes) -> Identity | None:
        """Return the identity in a file; None if the file is damaged."""
        try:
            number = format_portable.loads(data)["number"]
            shown = text.read_line(number, data.removesuffix(b"\n"))
            if shown is None:
                return None
            names = tuple([text.hide_name(name) for name in shown["session"]])
            origin = None if shown["origin"] is None else Address(*shown["origin"][:2])
            first = None if shown.get("first") is None else whole(shown["first"])
            return cls(number, names, text.hide_row(shown["row"]), origin, first)
        except (*_MALFORMED_IDENTITY, OverflowError, Corrupt):
            return None


def identity_of(path: Path) -> Identity | None:
    """Return the identity of a folder; None if it has none."""
    try:
        return Identity.read(fs.read(path / SESSION))
    except OSError as e:
        if fs.is_there(e):
            raise
        return None


_SHOWN: dict[str, Callable[..., list[Any]]] = {
    "checkpoints": lambda pos, name, _: [pos & MAX_SEQ, ids.to_text(name)],
    "keys": lambda _, key, seq: [text.show_name(key), seq],
    "marks": lambda pos, kind, value, body: [
        pos & MAX_SEQ, kind, text.show_name(value), text.show_row(body),
    ],
    "operations": lambda pos, body: [
        pos & MAX_SEQ, text.show_row(text.plain(format_rows.OPERATION, pos, body)),
    ],
    "tombs": lambda pos, body: [pos & MAX_SEQ, text.show_row(body)],
    "facets": lambda kind, value, name: [kind, text.show_name(value), show_id(name)],
    "gaps": lambda pos, ancestor, body: [
        pos & MAX_SEQ, ancestor, text.show_row(text.plain(format_rows.GRAFT, pos, body)),
    ],
}  # fmt: skip
"""What a log says of a row of each table. The first line of a session has its row of `sessions`."""
_REMOVED: dict[str, Callable[..., Any]] = {
    "keys": lambda _, key: text.show_name(key),
    "marks": lambda pos, kind, value: [pos & MAX_SEQ, kind, text.show_name(value)],
    "tombs": lambda pos: pos & MAX_SEQ,
    "facets": lambda kind, value, name: [kind, text.show_name(value), show_id(name)],
}
"""What a log says of the removal of a row, under the name of the table with `un` before it."""
_SINGLE = {"checkpoints": "checkpoint", "operations": "operation"}


def entry_of(batch: Batch, session: int, ends: list[list[int]]) -> dict[str, Any]:
    """Return the log entry of a batch. `ends` has the streams, and the new end of each."""
    entry: dict[str, Any] = {}
    facts: dict[str, list[Any]] = {}
    if batch.swap is not None:
        entry["head"] = text.show_row(batch.swap.body)
    for write in batch.writes:
        match write:
            case Insert(table, row) | Put(table, row):
                if table in _SHOWN and (table != "gaps" or row[0] >> SEQ_BITS == session):
                    facts.setdefault(table, []).append(_SHOWN[table](*row))
                else:
                    entry |= _show_session(table, row)
            case Rename(_, name, body):
                entry["rename"] = [text.show_name(name), text.show_row(body)]
            case Delete("sessions"):
                entry["removed"] = True
            case Delete(table, key) if table in _REMOVED:
                facts.setdefault(f"un{table}", []).append(_REMOVED[table](*key))
            case DeleteRange("checkpoints", low, high):
                facts.setdefault("freed", []).extend(range(low & MAX_SEQ, high & MAX_SEQ))
            case DeleteRange("journal", _, high) if high >> SEQ_BITS == session:
                entry["journal"] = high & MAX_SEQ
    if ends:
        entry["streams"] = ends
    for what, single in _SINGLE.items():
        if len(facts.get(what, ())) == 1:
            [entry[single]] = facts.pop(what)
    return {**{what: entry[what] for what in _FIRST if what in entry}, **facts, **entry}


_FIRST = ("create", "origin", "checkpoint", "head", "streams")
"""What comes first in a line, for people who read it."""


def _show_session(table: str, row: Row) -> dict[str, Any]:
    """Return what a log says of a row that a session has once, or that has a file of its own."""
    if table == "sessions":
        number, name, origin, body = row
        created = {"create": [number, text.show_name(name), text.show_row(body)]}
        return created | ({} if origin is None else {"origin": [*divmod(origin, 1 << SEQ_BITS)]})
    if table == "heads":
        return {"head": text.show_row(row[1])}
    if table == "leases":
        session, token, body = row
        body = text.plain(format_rows.LEASE, session, body)
        return {"lease": [token.hex(), text.show_row(body)]}
    return {}


def show_grafts(batch: Batch, session: int) -> list[Any]:
    """Return the grafts that a batch writes to a session, as its log has them."""
    rows = [w.row for w in batch.writes if type(w) is Put and w.table == "gaps"]
    return [_SHOWN["gaps"](*row) for row in rows if row[0] >> SEQ_BITS == session]


def show_id(id: bytes) -> str:
    """Return the id of a checkpoint as text, or the number of a session as shorter text."""
    return ids.to_text(id) if len(id) == ids.BYTES else id.hex()


def hide_id(shown: str) -> bytes:
    if len(shown) != ids.CHARS:
        return bytes.fromhex(shown)
    id = ids.from_text(shown)
    if id is None:
        raise ValueError(shown)
    return id


DIGITS = 18
"""The most digits of the number of a line or an entry."""
ALWAYS = "-"


def hint(entries: int, until: str = ALWAYS) -> bytes:
    """Return a hint: the number of lines or entries, twice, so that a flipped bit is noticed.

    For lines that were not synced, the hint is valid until the next boot: a power failure may lose
    the lines but not the hint.
    """
    return b"%12d %12d %-36s\n" % (entries, entries, until.encode())


def read_hint(path: Path) -> int:
    try:
        first, second, until = fs.read(path).split()
        holds = until.decode() in (ALWAYS, clock.boot_id() or ALWAYS)
        return int(first) if first == second and len(first) <= DIGITS and holds else 0
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
        return 0


LOG, HEAD, STREAMS, CHECKPOINTS = "log.jsonl", "head", "streams", "checkpoints"
DAMAGED_HEAD = b"the end of the log is damaged"
_BEGIN = b'{"n":'
_TAIL = 32
"""This many bytes at its end show whether a log is still the one that was read."""
_RECORD = re.compile(r"[0-9]{6,12}\.json")
_MALFORMED = (ValueError, TypeError, LookupError, AttributeError)


def _all_of(entry: dict[str, Any], what: str) -> list[Any]:
    """Return all facts of a kind. Most commits have one; a copy has many."""
    return [*entry.get(f"{what}s", ()), *([entry[what]] if what in entry else [])]


def status(folder: Path) -> tuple[int, int] | None:
    """Return inode and size of the log in a session's folder; None if there is none."""
    try:
        found = os.lstat(f"{folder}/{LOG}")
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_ino, found.st_size


class GraftEntry(NamedTuple):
    """A graft that a log has.

    gc writes grafts to the logs of other sessions first. Such a graft counts only if the sweep
    came to its end: `condition` names the swept session, and the mark of the sweep in its log.
    """

    ancestor: int | None
    body: bytes
    condition: tuple[int, str] | None


class SessionLog:
    """The contents of a session's log, as far as it was read."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / LOG
        self._streams: dict[int, Path] = {}
        self.pins = 0
        """The number of readers that use it. While there are any, it must not change."""
        self.inode = self.size = self.entries = 0
        self.tail = b""
        self.damaged: list[Run] = []
        """Ranges [low, high) of the numbers of unreadable lines."""
        self.number = 0
        self.name = self.row = b""
        self.named_at = self.saved_at = 0
        """The numbers of the lines with its newest name and its newest checkpoint."""
        self.doubtful = False
        """Whether lines are lost that may have renamed the session."""
        self.origin: Address | None = None
        self.head: bytes | None = None
        self.removed = False
        self.ids: dict[int, bytes] = {}
        self.found: set[int] = set()
        """Checkpoints that have a file, but whose line is lost."""
        self.order: list[int] = []
        self.keys: dict[bytes, int] = {}
        self.marks: dict[MarkKey, MarkRow] = {}
        self.operations: dict[int, bytes] = {}
        self.tombstones: dict[int, bytes] = {}
        self.deleted_at: dict[int, int] = {}
        """By seq: the number of the line with its deletion."""
        self.raised: set[int] = set()
        """Deleted checkpoints that count as not deleted, because a lost line may have undeleted
        them."""
        self.grafts: dict[int, list[GraftEntry]] = {}
        self.terms: dict[IndexTerm, None] = {}
        self.ends: dict[int, int] = {}
        """By stream: the number of committed items."""
        self.freed: set[int] = set()
        self.sweeps: set[str] = set()
        self.lease: LeaseRow | None = None
        self.lease_at = 0
        """The number of the line with the lease."""
        self.journal_from = 0
        """Entries of the journal below this number are freed."""

    def copy(self) -> SessionLog:
        new = SessionLog(self.folder)
        for name, value in vars(self).items():
            held = value.copy() if isinstance(value, (dict, list, set)) else value
            setattr(new, name, held)
        new.grafts = {seq: list(found) for seq, found in self.grafts.items()}
        new.pins = 0
        return new

    def stream(self, number: int) -> Path:
        """Return the path of a stream of this session."""
        path = self._streams.get(number)
        if path is None:
            path = self._streams[number] = self.folder / STREAMS / f"{number}.jsonl"
        return path

    @property
    def there(self) -> bool:
        """Whether the session exists. The first commit creates it, and gc may remove it."""
        return self.entries > 0 and not self.removed

    # -- reading the log -----------------------------------------------------------------------

    def is_current(self) -> bool:
        """Return whether the log still ends as it was read. An equal size does not prove that."""
        try:
            handle = fs.open_own(f"{self.folder}/{LOG}", os.O_RDONLY)
        except FileNotFoundError:
            return not self.tail
        try:
            return os.pread(handle, _TAIL + 1, self.size - len(self.tail)) == self.tail
        finally:
            os.close(handle)

    def read(self) -> bool:
        """Read all new lines. Incomplete lines are left for later.

        Return False if the log is another one than before.
        """
        try:
            handle = fs.open_own(self.folder / LOG, os.O_RDONLY)
        except (FileNotFoundError, NotADirectoryError):
            self._doubt(None)
            return True
        try:
            found = os.fstat(handle)
            start = self.size - len(self.tail)
            data = fs.read_all(handle, max(found.st_size - start, 0), start)
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
        """Yield sound lines in order."""
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
            return  # a line that occurs twice
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
        """Note lost lines if the log was longer before. The head is then unknown."""
        known = read_hint(self.folder / HEAD)
        if not self.entries and not known and self._has_begun():
            known = 1
        if known > self.entries and status(self.folder) == seen:
            self.damaged.append((self.entries + 1, known + 1))
            self.entries = known
            self.head = DAMAGED_HEAD

    def _has_begun(self) -> bool:
        """Return whether a line is lost, because there are newer checkpoints than in the first."""
        highest = max([0, *self._records()])
        identity = identity_of(self.folder) if highest > 1 else None
        return identity is not None and identity.first is not None and highest > identity.first

    # -- what it says --------------------------------------------------------------------------

    def _apply(self, entry: dict[str, Any]) -> None:
        name, row = text.hide_name, text.hide_row
        self._apply_names(entry)
        if "origin" in entry:
            session, seq = entry["origin"]
            self.origin = Address(session, seq)
        if "head" in entry:
            self.head = row(entry["head"])
        for seq, id in _all_of(entry, "checkpoint"):
            self.add(whole(seq), hide_id(id))
        for stream, end in entry.get("streams", ()):
            self.ends[whole(stream)] = whole(end)
        for key, seq in entry.get("keys", ()):
            self.keys[name(key)] = seq
        for seq, kind, value in entry.get("unmarks", ()):
            self.marks.pop(MarkKey(seq, kind, name(value)), None)
        for seq, kind, value, body in entry.get("marks", ()):
            mark = MarkRow(seq, kind, name(value), row(body))
            self.marks[mark.key] = mark
        for number, body in _all_of(entry, "operation"):
            self.operations[number] = row(body)
        for seq, body in entry.get("tombs", ()):
            self.tombstones[seq], self.deleted_at[seq] = row(body), entry["n"]
        for seq in entry.get("untombs", ()):
            self.tombstones.pop(seq, None)
            self.raised.discard(seq)
        for kind, value, id in entry.get("unfacets", ()):
            self.terms.pop(IndexTerm(kind, name(value), hide_id(id)), None)
        for kind, value, id in entry.get("facets", ()):
            self.terms[IndexTerm(kind, name(value), hide_id(id))] = None
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
            graft = GraftEntry(ancestor, text.hide_row(body), condition)
            self.grafts.setdefault(seq, []).append(graft)
        if "lease" in entry:
            token, row = entry["lease"]
            self.lease = LeaseRow(bytes.fromhex(token), text.hide_row(row))
            self.lease_at = entry["n"]
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
        self.freed.discard(seq)  # a copy may restore a freed checkpoint

    def forget(self, seq: int) -> None:
        self.freed.add(seq)
        self.raised.discard(seq)
        if self.ids.pop(seq, None) is not None:
            del self.order[bisect_left(self.order, seq)]
        self.tombstones.pop(seq, None)
        self.grafts.pop(seq, None)
        for mark in [m for m in self.marks if m.seq == seq]:
            del self.marks[mark]

    def find_records(self) -> None:
        """Add the checkpoints whose lines are damaged and whose files still exist."""
        newest = MAX_SEQ
        with suppress(*UNREADABLE, TypeError):
            newest = unseal_head(self.number, self.head or b"").last
        for seq in self._records():
            if seq in self.ids or seq in self.freed:
                continue
            if seq > newest:
                continue  # its commit has not finished
            try:
                text = fs.read(self.folder / CHECKPOINTS / f"{seq:06}.json")
                id = ids.from_text(format_portable.loads(text)["id"])
            except (OSError, *_MALFORMED):
                continue
            if id is not None:
                self.add(seq, id)
                self.found.add(seq)

    def _records(self) -> list[int]:
        """Return the checkpoints that have a file."""
        fs.refuse_link(f"{self.folder}/{CHECKPOINTS}")
        try:
            names = os.listdir(self.folder / CHECKPOINTS)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [int(name[:-5]) for name in names if _RECORD.fullmatch(name)]

    def doubt(self, names: Sequence[bytes]) -> None:
        """After damage: undo what a lost line may have reverted.

        Checkpoints that were deleted before a lost line count as not deleted. The session may have
        another name now, one of `names`. A session that has newer saves is not deleted.
        """
        lost = max([high for _, high in self.damaged])
        raised = [seq for seq in self.tombstones if self.deleted_at[seq] < lost]
        for seq in raised:
            del self.tombstones[seq]
        self.raised.update(raised)
        self.doubtful = len(names) > 1 and max(self.named_at, self.saved_at) < lost
        former = former_name(self.number, self.name)
        if former is not None and (self.doubtful or self.saved_at > self.named_at):
            self.row, self.name = self.row_for(former), former

    def row_for(self, name: bytes) -> bytes:
        """Return the session's row under another name. A damaged row stays as it is."""
        try:
            return seal_session(self.number, name, unseal_session(self.number, self.name, self.row))
        except UNREADABLE:
            return self.row

    # -- writing the log -----------------------------------------------------------------------

    def advance(self, entry: dict[str, Any], line: bytes, inode: int, at: int) -> None:
        """Apply a line that was just written."""
        self.apply(entry)
        self.inode, self.size, self.tail = inode, at + len(line), line[-_TAIL:]

    def line(self, entry: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        """Return the entry and the text of the next line.

        Each line has the head, so that the last one has it.
        """
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
        """Return an entry that accepts the lost lines.

        It repeats everything that is still known.
        """
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
        """Return the log without freed parts; None if that saves too little.

        Names and texts that no longer count are always removed.
        """
        kept: list[bytes] = []
        dropped: list[list[int]] = []
        saved = 0
        erased = False
        for line in data.split(b"\n")[:-1]:
            entry, rest, runs = self._entry(line), line, None
            with suppress(*_MALFORMED):  # a line whose loss was accepted
                if entry is not None:
                    living = self._living(entry)
                    runs = self._idle_runs(living)
                    if living != entry:
                        erased, rest = True, text.seal_line(entry["n"], living)[:-1]
            if runs is None:
                saved += len(line) - len(rest)
                kept.append(rest + b"\n")
            else:
                saved += len(line)
                dropped += runs
        if 4 * saved < len(data) and not erased:
            return None
        ends = [[stream, end] for stream, end in self.ends.items()]
        note: dict[str, Any] = {"dropped": joined(dropped), "streams": ends}
        found = [term for term in self.terms if len(term.id) != ids.BYTES]  # of the whole session
        note["facets"] = [[kind, text.show_name(value), show_id(id)] for kind, value, id in found]
        if self.lease is not None:
            note["lease"] = [self.lease.token.hex(), text.show_row(self.lease.body)]
        return b"".join(kept) + self.line(note)[1]

    def _living(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Return a line without texts that no longer count, and without their removals."""
        name = text.hide_name
        counts: dict[str, Callable[[Any], bool]] = {
            "keys": lambda f: self.keys.get(name(f[0])) == f[1],
            "marks": lambda f: self._has_mark(MarkRow(f[0], f[1], name(f[2]), text.hide_row(f[3]))),
            "facets": lambda f: (f[0], name(f[1]), hide_id(f[2])) in self.terms,
            "unkeys": lambda _: False,
            "unmarks": lambda _: False,
            "unfacets": lambda _: False,
        }
        living = dict(entry)
        for what in counts.keys() & entry.keys():
            facts = [fact for fact in entry[what] if counts[what](fact)]
            if len(facts) < len(entry[what]):
                living[what] = facts
            if entry[what] and not facts:
                del living[what]
        if "lease" in entry and not self._is_leased(entry):
            del living["lease"]
        return living

    def _has_mark(self, mark: MarkRow) -> bool:
        return self.marks.get(mark.key) == mark

    def _is_leased(self, entry: dict[str, Any]) -> bool:
        return self.lease is not None and entry["lease"][0] == self.lease.token.hex()

    def _idle_runs(self, entry: dict[str, Any]) -> list[list[int]] | None:
        """Return the ranges of line numbers to drop with an unneeded line; None if it is needed."""
        own = [[entry["n"], entry["n"] + 1]]
        if "dropped" in entry:
            runs = [[whole(low), whole(high)] for low, high in entry["dropped"]]
            return None if "create" in entry else [*runs, *own]
        own_terms = [id for *_, id in entry.get("facets", ()) if len(hide_id(id)) == ids.BYTES]
        seq = whole(entry.get("checkpoint", [0])[0])
        matters = own_terms or seq in self.ids or not entry.keys() <= _IDLE
        return None if matters else own


_IDLE = {"n", "checkpoint", "head", "streams", "facets"}
"""A line with only these parts can be dropped. Terms of the session are repeated at the end."""


JOURNAL, LAST, LEASE = "journal.jsonl", "journal", "lease"
_DAMAGED = b"a line that is damaged"


class _Text(NamedTuple):
    """The contents of a journal file."""

    rows: dict[int, bytes]
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
    order: list[int]
    rows: dict[int, bytes]

    def read(self, low: int, limit: int) -> list[JournalRow]:
        """Return entries from a number on, in order, with a damaged row in place of lost ones.

        One such row stands for a series of lost entries, because damage can make their count huge.
        """
        out: list[JournalRow] = []
        at = max(1, self.first, low)
        for i in range(bisect_left(self.order, at), len(self.order)):
            n = self.order[i]
            if len(out) >= limit:
                return out[:limit]
            if n > at:
                out.append(JournalRow(at, _DAMAGED))
            out.append(JournalRow(n, self.rows[n]))
            at = n + 1
        lost = sorted({at, self.last}) if at <= self.last else []
        return [*out, *[JournalRow(n, _DAMAGED) for n in lost]][:limit]


def look(ledger: SessionLog) -> Seen:
    known = last_known(ledger)  # first: a writer updates the hint after it has added an entry
    found = _read(ledger)
    order = sorted(found.rows)
    first = _first(ledger, found)
    newest = max([known, *order[-1:]])
    return Seen(first, newest if newest >= first else max(0, first - 1), order, found.rows)


def first_entry(ledger: SessionLog) -> int:
    """Return the number below which entries are freed."""
    return _first(ledger, _read(ledger))


def _first(ledger: SessionLog, found: _Text) -> int:
    if found.rows and found.begins and ledger.damaged:
        return max(ledger.journal_from, min(found.rows))  # a lost line may have freed entries
    return ledger.journal_from


def _read(ledger: SessionLog) -> _Text:
    try:
        return _parsed(fs.read(ledger.folder / JOURNAL))
    except (FileNotFoundError, NotADirectoryError):
        return _Text({}, 0, begins=False)


def last_known(ledger: SessionLog) -> int:
    """Return the number in the hint next to the journal. Its line was synced, so it is not torn."""
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
        text.plain(format_rows.JOURNAL, position(session, n), row)
        for n, row in enumerate(entries, first)
    ]
    return text.seal_line(first, {"n": first, "entries": [text.show_row(row) for row in plain]})


def add_entries(
    home: StoreFolder, ledger: SessionLog, entries: Sequence[Insert], *, together: bool
) -> None:
    """Write entries of a journal; together, as one line, or each as a line of its own.

    Raises the refusal of an entry if the journal has its number, or a later one.
    """
    new = sorted([(write.row[0] & MAX_SEQ, write.row[1]) for write in entries])
    if not new:
        return
    first = new[0][0]
    if together:
        lines = [_line(ledger.number, first, [row for _, row in new])]
    else:
        lines = [_line(ledger.number, n, [row]) for n, row in new]
    _add(home, ledger, first, lines, entries[0].refusal)


def check_entries(ledger: SessionLog, entries: Sequence[Insert]) -> None:
    """Raise the refusal of an entry if the journal has its number, or a later one."""
    numbers = [write.row[0] & MAX_SEQ for write in entries]
    if numbers and min(numbers) <= look(ledger).last:
        raise entries[0].refusal()


def _add(
    home: StoreFolder, ledger: SessionLog, first: int, lines: list[bytes], refusal: Refusal
) -> None:
    path = ledger.folder / JOURNAL
    if first >= 10**DIGITS:
        raise Corrupt(f"no entry can come after entry {first - 1} of {path}")
    handle = fs.open_to_write(path, os.O_CREAT)
    try:
        found = os.fstat(handle)
        inode, end, last = home.journals.get(path, (0, 0, 0))
        if (inode, end) != (found.st_ino, found.st_size):
            data = fs.read_all(handle, found.st_size, 0)
            said, known = _parsed(data), last_known(ledger)
            last = max([known, *said.rows])
            # A line after the last sound one is torn, unless the hint has counted it.
            end = said.end if known <= max(said.rows, default=0) else len(data)
            if end and data[end - 1 : end] != b"\n":
                lines = [b"\n", *lines]
            home.forget_name(path)
        if first <= last:
            raise refusal()
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
            kept.append(text.seal_line(first, {"n": first, "entries": rest}))
    slimmer = b"".join(kept)
    return slimmer if len(slimmer) < len(data) else None


# -- leases --------------------------------------------------------------------------------------


def lease_of(ledger: SessionLog) -> Lease | None:
    newest = max([end - 1 for _, end in ledger.damaged], default=0)
    if newest > ledger.lease_at and (ledger.folder / JOURNAL).exists():
        return Lease(
            ledger.number, b"", _DAMAGED, float("inf")
        )  # a later line may have changed the lease
    if ledger.lease is None:
        return None
    token, row = ledger.lease
    try:
        named, boot, since = fs.read(ledger.folder / LEASE).decode().split()
        ours = named == (token.hex() or "-")
        age = clock.since("" if boot == "-" else boot, float(since)) if ours else float("inf")
    except (FileNotFoundError, ValueError):
        age = float("inf")
    return Lease(ledger.number, token, row, age)


def renew(home: StoreFolder, session: int, token: bytes) -> bool:
    with home.sessions([session]):
        ledger = home.current(session)
        if ledger is None or ledger.lease is None or ledger.lease.token != token:
            return False
        note(ledger, token)
        return True


def note(ledger: SessionLog, token: bytes) -> None:
    """Write the current time as the time of the lease."""
    said = f"{token.hex() or '-'} {clock.boot_id() or '-'} {clock.elapsed()!r}"
    fs.replace(ledger.folder / LEASE, said.encode(), durable=False)
