"""The log of a session, and the identity in its folder.

A log is a file of lines, and a line is a list of writes. To add a line is to commit a batch.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast import clock, ids
from holdfast.errors import UNREADABLE, Corrupt
from holdfast.format import portable as format_portable
from holdfast.format.records import (
    MAX_SEQ,
    former_name,
    position,
    seal_session,
    unseal_head,
    unseal_session,
)
from holdfast.intervals import joined, outside, whole
from holdfast.storage import fs
from holdfast.storage.contract import Delete, DeleteRange, Put, Rename
from holdfast.storage.files import row_json
from holdfast.storage.files.lines import (
    BEGIN,
    DIGITS,
    FACTS,
    created_by,
    hide_id,
    read_entry,
    show_origin,
    writes_of,
)
from holdfast.storage.memory_tables import OrderedRows
from holdfast.storage.tables import TABLES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from holdfast.intervals import Run
    from holdfast.storage.contract import Key, Write
    from holdfast.storage.tables import Row


SESSION = "session.json"


class Identity(NamedTuple):
    """The identity of a session's folder. It is used if the first line of the log is damaged."""

    number: int
    names: tuple[bytes, ...]
    """All names that the session had or was about to get."""
    row: bytes
    origin: int | None
    """The position of the checkpoint that it was forked from."""
    first: int | None = None
    """The highest seq of a checkpoint that the first line of its log contains.

    None if that line may be lost, because it was not synced.
    """

    def show(self) -> bytes:
        shown = {
            "session": [row_json.show_name(name) for name in self.names],
            "number": self.number,
            "row": row_json.show_row(self.row),
            "origin": None if self.origin is None else show_origin(self.origin),
            "first": self.first,
        }
        return row_json.seal_line(self.number, shown)

    @classmethod
    def read(cls, data: bytes) -> Identity | None:
        """Return the identity in a file; None if the file is damaged."""
        try:
            number = format_portable.loads(data)["number"]
            shown = row_json.read_line(number, data.removesuffix(b"\n"))
            if shown is None:
                return None
            names = tuple([row_json.hide_name(name) for name in shown["session"]])
            origin = None if shown["origin"] is None else position(*shown["origin"][:2])
            first = None if shown.get("first") is None else whole(shown["first"])
            return cls(number, names, row_json.hide_row(shown["row"]), origin, first)
        except (*row_json.MALFORMED, Corrupt):
            return None


def identity_of(path: Path) -> Identity | None:
    """Return the identity of a folder; None if it has none."""
    try:
        return Identity.read(fs.read(path / SESSION))
    except OSError as e:
        if fs.is_there(e):
            raise
        return None


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
_TAIL = 32
"""This many bytes at its end show whether a log is still the one that was read."""
_RECORD = re.compile(r"[0-9]{6,12}\.json")


def status(folder: Path) -> tuple[int, int] | None:
    """Return inode and size of the log in a session's folder; None if there is none."""
    try:
        found = os.lstat(f"{folder}/{LOG}")
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_ino, found.st_size


class NewLine(NamedTuple):
    """A line to be written to a log."""

    entry: dict[str, Any]
    text: bytes
    writes: Sequence[Write] | None
    """The writes in the entry. Without them, the entry is read again."""


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

    def __init__(self, folder: Path, number: int = 0) -> None:
        self.folder, self.log = folder, folder / LOG
        self.number = number
        """The number of the session. The first line of the log has it, too."""
        self._streams: dict[int, Path] = {}  # to make a path takes 8 µs, of 150 for an append
        self.pins = 0
        """The number of readers that use it. While there are any, it must not change."""
        self.inode = self.size = self.entries = 0
        self.tail = b""
        self.tables = {
            name: OrderedRows(TABLES[name].columns, TABLES[name].columns[: TABLES[name].key])
            for name in _TABLES
        }
        """Rows of checkpoints are without a body, which is in a file."""
        self.grafts: dict[int, list[GraftEntry]] = {}
        """By position. The view knows which of them count."""
        self.ends: dict[int, int] = {}
        """By stream: the number of committed items."""
        self.freed: set[int] = set()
        self.sweeps: set[str] = set()
        self.journal_from = 0
        """Entries of the journal below this number are freed."""
        self.removed = False
        self.damaged: list[Run] = []
        """Ranges [low, high) of the numbers of unreadable lines."""
        self.written: dict[tuple[str, Key], int] = {}
        """The number of the line with a row, in tables whose rows a lost line makes doubtful."""
        self.saved_at = 0
        """The number of the line with the newest checkpoint."""
        self.doubtful = False
        """Whether lines are lost that may have renamed the session."""
        self.found: set[int] = set()
        """Positions of checkpoints that have a file, but whose line is lost."""
        self.raised: set[int] = set()
        """Positions of deleted checkpoints that count as not deleted, because a lost line may have
        undeleted them."""

    def copy(self) -> SessionLog:
        new = SessionLog(self.folder)
        for name, value in vars(self).items():
            held = value.copy() if isinstance(value, (dict, list, set)) else value
            setattr(new, name, held)
        new.tables = {name: table.copy() for name, table in self.tables.items()}
        new.grafts = {pos: list(found) for pos, found in self.grafts.items()}
        new.pins = 0
        return new

    def row(self, table: str) -> Row | None:
        """Return the row of a table that has one for the session: `heads` and others."""
        return self.tables[table].rows.get((self.number,))

    @property
    def head(self) -> bytes | None:
        row = self.row("heads")
        head: bytes | None = None if row is None else row[1]
        return head

    @property
    def origin(self) -> int | None:
        row = self.row("sessions")
        origin: int | None = None if row is None else row[2]
        return origin

    def seqs(self) -> list[int]:
        """Return the checkpoints of the session, in order."""
        return [pos & MAX_SEQ for (pos,) in self.tables["checkpoints"].keys]

    @property
    def name(self) -> bytes:
        row = self.row("sessions")
        name: bytes = b"" if row is None else row[1]
        return name

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
            entry = read_entry(line)
            if entry is not None:
                yield entry
                continue
            # The end of a line may be what is damaged: then two lie here.
            at = line.find(BEGIN, 1)
            while at > 0:
                for part in (line[: at - 1], line[at:]):
                    entry = read_entry(part)
                    if entry is not None:
                        yield entry
                at = line.find(BEGIN, at + 1)

    def apply(self, entry: dict[str, Any], writes: Iterable[Write] | None = None) -> None:
        """Apply a line. Without `writes`, they are read from the entry."""
        n = entry["n"]
        try:
            dropped = [(whole(low), whole(high)) for low, high in entry.get("dropped", ())]
        except row_json.MALFORMED:
            dropped, entry = [], {}
        if dropped:
            self.damaged = outside(self.damaged, dropped)
        if n <= self.entries:
            return  # a line that occurs twice
        if n > self.entries + 1:
            self.damaged += outside([(self.entries + 1, n)], dropped)
        self.entries = n
        try:
            self._apply(entry, writes)
            damaged = not entry
        except (*row_json.MALFORMED, Corrupt):
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
            self.tables["heads"].put((self.number, DAMAGED_HEAD))

    def _has_begun(self) -> bool:
        """Return whether a line is lost, because there are newer checkpoints than in the first."""
        highest = max([0, *self._records()])
        identity = identity_of(self.folder) if highest > 1 else None
        return identity is not None and identity.first is not None and highest > identity.first

    # -- what it says --------------------------------------------------------------------------

    def _apply(self, entry: dict[str, Any], writes: Iterable[Write] | None) -> None:
        if "create" in entry:
            self.number = whole(entry["create"][0])
        if "create" in entry or "rename" in entry:
            self.doubtful = False
        if "checkpoint" in entry:
            self.saved_at = entry["n"]
        condition = tuple(entry["if"]) if "if" in entry else None
        for write in [*writes_of(entry, self.number)] if writes is None else writes:
            self._write(write, entry["n"], condition)
        for stream, end in entry.get("streams", ()):
            self.ends[whole(stream)] = whole(end)
        if "sweep" in entry:
            self.sweeps.add(entry["sweep"])

    def _write(self, write: Write, n: int, condition: tuple[int, str] | None) -> None:
        """Make a write of line `n`."""
        if type(write) is Put:
            table, row = write
            if table == "gaps":
                pos, ancestor, body = row
                self.grafts.setdefault(pos, []).append(GraftEntry(ancestor, body, condition))
                return
            self.tables[table].put(row)
            if table == "checkpoints":
                self.freed.discard(row[0] & MAX_SEQ)  # a copy may restore a freed checkpoint
            elif table in _DOUBTED:
                self.written[table, row[:1]] = n
            return
        match write:
            case Rename(session, name, body):
                row = self.row("sessions") or (session, name, None, body)
                self._write(Put("sessions", (session, name, row[2], body)), n, None)
            case Delete("sessions"):
                self.removed = True
            case Delete(table, key):
                self.tables[table].remove(key)
                if table == "tombs":
                    self.raised.discard(key[0])
            case DeleteRange("journal", _, high):
                self.journal_from = max(self.journal_from, high & MAX_SEQ)
            case DeleteRange("gaps", low, high):
                for pos in range(low, high):
                    self.grafts.pop(pos, None)
            case DeleteRange(table, low, high):
                for key in self.tables[table].between(low, high):
                    self.tables[table].remove(key)
                if table == "checkpoints":
                    self.freed.update(range(low & MAX_SEQ, high & MAX_SEQ))
                    self.raised.difference_update(range(low, high))

    def find_records(self) -> None:
        """Add the checkpoints whose lines are damaged and whose files still exist."""
        newest = MAX_SEQ
        with suppress(*UNREADABLE, TypeError):
            newest = unseal_head(self.number, self.head or b"").last
        known = self.tables["checkpoints"]
        for seq in self._records():
            pos = position(self.number, seq)
            unfinished = seq > newest
            if unfinished or (pos,) in known.rows or seq in self.freed:
                continue
            try:
                text = fs.read(self.folder / CHECKPOINTS / f"{seq:06}.json")
                id = ids.from_text(format_portable.loads(text)["id"])
            except (OSError, *row_json.MALFORMED):
                continue
            if id is not None:
                known.put((pos, id))
                self.found.add(pos)

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
        tombs = self.tables["tombs"]
        for key in [key for key in tombs.keys if self.written["tombs", key] < lost]:
            tombs.remove(key)
            self.raised.add(key[0])
        named_at = self.written.get(("sessions", (self.number,)), 0)
        self.doubtful = len(names) > 1 and max(named_at, self.saved_at) < lost
        former = former_name(self.number, self.name)
        if former is not None and (self.doubtful or self.saved_at > named_at):
            self.tables["sessions"].put(self.renamed(former))

    def renamed(self, name: bytes) -> Row:
        """Return the session's row under another name. A damaged body stays as it is."""
        number, old, origin, body = self.tables["sessions"].rows[self.number,]
        with suppress(*UNREADABLE):
            body = seal_session(number, name, unseal_session(number, old, body))
        return number, name, origin, body

    def complete(self, identity: Identity) -> None:
        """Add what the first line says, if that is damaged."""
        row = self.row("sessions")
        _, name, origin, body = row or (0, identity.names[0], None, identity.row)
        origin = identity.origin if origin is None else origin
        self.tables["sessions"].put((self.number, name, origin, body))

    # -- writing the log -----------------------------------------------------------------------

    def advance(self, line: NewLine, inode: int, end: int) -> None:
        """Apply a line that was just written."""
        self.apply(line.entry, line.writes)
        self.inode, self.size, self.tail = inode, end, line.text[-_TAIL:]

    def line(self, entry: dict[str, Any], writes: Sequence[Write] | None = None) -> NewLine:
        """Return the next line. Each line has the head, so that the last one has it."""
        n = self.entries + 1
        if n >= 10**DIGITS:
            raise Corrupt(f"no line can come after line {n - 1} of {self.log}")
        if "head" not in entry and self.head is not None:
            entry["head"] = row_json.show_row(self.head)
        entry = {"n": n, **entry}
        return NewLine(entry, row_json.seal_line(n, entry), writes)

    def acceptance(self, row: Row, journal: int, ends: list[list[int]]) -> dict[str, Any]:
        """Return an entry that accepts the lost lines.

        It repeats everything that is still known.
        """
        checkpoints = [self.tables["checkpoints"].rows[pos,] for pos in sorted(self.found)]
        created = created_by(row)
        entry: dict[str, Any] = {
            "dropped": self.damaged,
            "create": created["create"],
            "checkpoints": [FACTS["checkpoints"].show(row) for row in checkpoints],
            "untombs": [pos & MAX_SEQ for pos in sorted(self.raised)],
            "journal": journal,
            "streams": ends,
        }
        return entry | created

    def slim(self, data: bytes) -> bytes | None:
        """Return the log without freed parts; None if that saves too little.

        Names and texts that no longer count are always removed.
        """
        kept: list[bytes] = []
        dropped: list[list[int]] = []
        saved = 0
        erased = False
        for line in data.split(b"\n")[:-1]:
            entry, rest, runs = read_entry(line), line, None
            with suppress(*row_json.MALFORMED):  # a line whose loss was accepted
                if entry is not None:
                    living = self._living(entry)
                    runs = self._idle_runs(living)
                    if living != entry:
                        erased, rest = True, row_json.seal_line(entry["n"], living)[:-1]
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
        terms = self.tables["facets"].rows.values()
        of_session = [term for term in terms if len(term[-1]) != ids.BYTES]
        note["facets"] = [FACTS["facets"].show(term) for term in of_session]
        lease = self.row("leases")
        if lease is not None:
            note["lease"] = FACTS["leases"].show(lease)
        return b"".join(kept) + self.line(note).text

    def _living(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Return a line without texts that no longer count, and without their removals."""
        living = {what: said for what, said in entry.items() if what not in _OVER or not said}
        for table in ("keys", "marks", "facets"):
            if entry.get(table):
                facts = [fact for fact in entry[table] if self._counts(table, fact)]
                living[table] = facts
                if not facts:
                    del living[table]
        lease = self.row("leases")
        if "lease" in entry and (lease is None or entry["lease"][0] != lease[1].hex()):
            del living["lease"]
        return living

    def _counts(self, table: str, shown: Any) -> bool:
        """Return whether a row is still as a line has it."""
        row = FACTS[table].hide(self.number, shown)
        return self.tables[table].rows.get(row[: TABLES[table].key]) == row

    def _idle_runs(self, entry: dict[str, Any]) -> list[list[int]] | None:
        """Return the ranges of line numbers to drop with an unneeded line; None if it is needed."""
        own = [[entry["n"], entry["n"] + 1]]
        if "dropped" in entry:
            runs = [[whole(low), whole(high)] for low, high in entry["dropped"]]
            return None if "create" in entry else [*runs, *own]
        own_terms = [id for *_, id in entry.get("facets", ()) if len(hide_id(id)) == ids.BYTES]
        seq = whole(entry.get("checkpoint", [0])[0])
        known = self.tables["checkpoints"].rows
        matters = own_terms or (position(self.number, seq),) in known or not entry.keys() <= _IDLE
        return None if matters else own


_TABLES = (
    "sessions", "heads", "checkpoints", "keys", "marks", "operations", "tombs", "facets", "leases",
)  # fmt: skip
_DOUBTED = ("sessions", "tombs", "leases")
_OVER = ("unkeys", "unmarks", "unfacets")
_IDLE = {"n", "checkpoint", "head", "streams", "facets"}
"""A line with only these parts can be dropped. Terms of the session are repeated at the end."""
