"""The files in a session's folder: its identity, its log, its journal and its lease.

The commit of a change is one line at the end of the log.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast import clock, ids
from holdfast.errors import UNREADABLE, Corrupt
from holdfast.format import portable as format_portable
from holdfast.format import rows as format_rows
from holdfast.format.records import (
    MAX_SEQ,
    SEQ_BITS,
    former_name,
    position,
    seal_session,
    unseal_head,
    unseal_session,
)
from holdfast.intervals import joined, outside, whole
from holdfast.storage import fs
from holdfast.storage.contract import Delete, DeleteRange, Insert, Put, Rename, StaleHead
from holdfast.storage.files import row_json as text
from holdfast.storage.ordered import Ordered
from holdfast.storage.rows import Address
from holdfast.storage.tables import TABLES
from holdfast.storage.tally import Lease

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from holdfast.intervals import Run
    from holdfast.storage.contract import Batch, Key, Refusal, Write
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


_SHOW: dict[str, Callable[[Any], Any]] = {
    "pos": lambda pos: pos & MAX_SEQ, "id": show_id, "body": text.show_row,
    "key": text.show_name, "value": text.show_name, "token": bytes.hex,
}  # fmt: skip
"""How a log has the value of a column. All others stay as they are."""
_HIDE: dict[str, Callable[[Any], Any]] = {
    "pos": whole, "id": hide_id, "body": text.hide_row,
    "key": text.hide_name, "value": text.hide_name, "token": bytes.fromhex,
    "kind": whole, "seq": whole,
}  # fmt: skip


def _same(value: Any) -> Any:
    return value


class _Fact:
    """How a log has the rows of a table, and the removals of rows.

    A row is a list of its columns, and its removal is a list of the columns of the key. A list of
    one is this one. The session is left out, and a position is the number in the session.
    """

    def __init__(self, table: str, *, has: int | None = None, plain: int | None = None) -> None:
        self.table, self._plain = table, plain
        columns = TABLES[table].columns[:has]
        self._count = len(columns)
        self._left_out = 1 if columns[0] == "session" else 0
        self._by_position = columns[0] == "pos"
        self._columns = columns[self._left_out :]
        self._key = self._columns[: TABLES[table].key - self._left_out]

    def whole(self, row: Row) -> Row:
        """Return a row as the log has it: uncompressed."""
        if self._plain is not None:
            return (*row[:-1], text.plain(self._plain, row[0], row[-1]))
        return row[: self._count]

    def show(self, row: Row) -> Any:
        return self._show(self._columns, row)

    def show_key(self, key: Key) -> Any:
        return self._show(self._key, key)

    def hide(self, session: int, shown: Any) -> Row:
        return self._hide(self._columns, session, shown)

    def hide_key(self, session: int, shown: Any) -> Key:
        return self._hide(self._key, session, shown)

    def _show(self, columns: Sequence[str], values: Row) -> Any:
        pairs = zip(columns, values[self._left_out :], strict=False)
        shown = [_SHOW.get(column, _same)(value) for column, value in pairs]
        return shown if len(shown) > 1 else shown[0]

    def _hide(self, columns: Sequence[str], session: int, shown: Any) -> Row:
        pairs = zip(columns, shown if len(columns) > 1 else (shown,), strict=True)
        values = [_HIDE.get(column, _same)(value) for column, value in pairs]
        if self._by_position:
            values[0] |= session << SEQ_BITS
        return (session, *values) if self._left_out else tuple(values)


_FACTS = {
    fact.table: fact
    for fact in (
        _Fact("heads"),
        _Fact("checkpoints", has=2),  # the row itself is in a file
        _Fact("keys"),
        _Fact("marks"),
        _Fact("operations", plain=format_rows.OPERATION),
        _Fact("tombs"),
        _Fact("facets"),
        _Fact("gaps", plain=format_rows.GRAFT),
        _Fact("leases", plain=format_rows.LEASE),
    )
}
"""A log has the rows of a table under its name."""
_SINGLE = {
    "checkpoint": _FACTS["checkpoints"], "head": _FACTS["heads"], "lease": _FACTS["leases"],
    "operation": _FACTS["operations"],
}  # fmt: skip
"""The names under which it has a single row."""
_REMOVED = {f"un{table}": _FACTS[table] for table in ("keys", "marks", "tombs", "facets")}
"""The names under which it has removals of rows."""
_FREED = ("checkpoints", "gaps", "tombs", "marks")
"""The tables of which gc removes the rows of a checkpoint."""
_FIRST = ("create", "origin", "checkpoint", "head", "streams")
"""What comes first in a line, for people who read it."""


def told_by(batch: Batch, session: int) -> Iterator[Write]:
    """Yield the writes of a batch that the log of a session tells of, as they are read again."""
    if batch.swap is not None:
        yield Put("heads", (session, batch.swap.body))
    for write in batch.writes:
        if type(write) is Insert or type(write) is Put:
            table, row = write.table, write.row
            if table in _FACTS and (table != "gaps" or row[0] >> SEQ_BITS == session):
                yield Put(table, _FACTS[table].whole(row))
            elif table == "sessions":
                yield Put(table, row)
        elif type(write) is DeleteRange:
            freed = write.table in _FREED
            if freed or (write.table == "journal" and write.high >> SEQ_BITS == session):
                yield write
        elif type(write) is Delete:
            if write.table == "sessions" or f"un{write.table}" in _REMOVED:
                yield write
        elif type(write) is Rename:
            yield write


def entry_of(writes: Iterable[Write], ends: list[list[int]]) -> dict[str, Any]:
    """Return the log entry of writes. `ends` has the streams, and the new end of each."""
    entry: dict[str, Any] = {}
    facts: dict[str, list[Any]] = {}
    for write in writes:
        match write:
            case Put("sessions", row):
                entry |= _created(row)
            case Put(table, row):
                facts.setdefault(table, []).append(_FACTS[table].show(row))
            case Rename(_, new, body):
                entry["rename"] = [text.show_name(new), text.show_row(body)]
            case Delete("sessions"):
                entry["removed"] = True
            case Delete(table, key):
                facts.setdefault(f"un{table}", []).append(_FACTS[table].show_key(key))
            case DeleteRange("checkpoints", low, high):
                facts.setdefault("freed", []).extend(range(low & MAX_SEQ, high & MAX_SEQ))
            case DeleteRange("journal", _, high):
                entry["journal"] = high & MAX_SEQ
    if ends:
        entry["streams"] = ends
    for name, fact in _SINGLE.items():
        if len(facts.get(fact.table, ())) == 1:
            [entry[name]] = facts.pop(fact.table)
    return {**{what: entry[what] for what in _FIRST if what in entry}, **facts, **entry}


def _created(row: Row) -> dict[str, Any]:
    number, name, origin, body = row
    created = {"create": [number, text.show_name(name), text.show_row(body)]}
    return created | ({} if origin is None else {"origin": [*divmod(origin, 1 << SEQ_BITS)]})


def writes_of(entry: dict[str, Any], session: int) -> Iterator[Write]:
    """Yield the writes that an entry tells of, removals first: the reverse of `entry_of`."""
    for name, said in entry.items():
        if name in _REMOVED:
            fact = _REMOVED[name]
            yield from [Delete(fact.table, fact.hide_key(session, each)) for each in said]
        elif name == "freed":
            for seq in said:
                low = position(session, whole(seq))
                yield from [DeleteRange(table, low, low + 1) for table in _FREED]
        elif name == "journal":
            yield DeleteRange(name, position(session, 0), position(session, whole(said)))
        elif name == "removed":
            yield Delete("sessions", (session,))
    for name, said in entry.items():
        if name in _SINGLE:
            fact = _SINGLE[name]
            yield Put(fact.table, fact.hide(session, said))
        elif name in _FACTS:
            fact = _FACTS[name]
            yield from [Put(name, fact.hide(session, each)) for each in said]
        elif name == "create":
            _, session_name, body = said
            origin = position(*entry["origin"]) if "origin" in entry else None
            row = (session, text.hide_name(session_name), origin, text.hide_row(body))
            yield Put("sessions", row)
        elif name == "rename":
            yield Rename(session, text.hide_name(said[0]), text.hide_row(said[1]), StaleHead)


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
    """What the entry tells of, if the writer knows it."""


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
        self._streams: dict[int, Path] = {}
        self.pins = 0
        """The number of readers that use it. While there are any, it must not change."""
        self.inode = self.size = self.entries = 0
        self.tail = b""
        self.tables = {
            name: Ordered(TABLES[name].columns, TABLES[name].columns[: TABLES[name].key])
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

    def apply(self, entry: dict[str, Any], writes: Iterable[Write] | None = None) -> None:
        """Apply a line. `writes` are those that it tells of; without them, the entry is read."""
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
            self._apply(entry, writes)
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
                for key in self.tables[table].between((low,), (high,)):
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
            if (pos,) in known.rows or seq in self.freed:
                continue
            if seq > newest:
                continue  # its commit has not finished
            try:
                text = fs.read(self.folder / CHECKPOINTS / f"{seq:06}.json")
                id = ids.from_text(format_portable.loads(text)["id"])
            except (OSError, *_MALFORMED):
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
        if origin is None and identity.origin is not None:
            origin = position(*identity.origin)
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
            entry["head"] = text.show_row(self.head)
        entry = {"n": n, **entry}
        return NewLine(entry, text.seal_line(n, entry), writes)

    def acceptance(self, row: Row, journal: int, ends: list[list[int]]) -> dict[str, Any]:
        """Return an entry that accepts the lost lines.

        It repeats everything that is still known.
        """
        checkpoints = [self.tables["checkpoints"].rows[pos,] for pos in sorted(self.found)]
        created = _created(row)
        entry: dict[str, Any] = {
            "dropped": self.damaged,
            "create": created["create"],
            "checkpoints": [_FACTS["checkpoints"].show(row) for row in checkpoints],
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
        terms = self.tables["facets"].rows.values()
        of_session = [term for term in terms if len(term[-1]) != ids.BYTES]
        note["facets"] = [_FACTS["facets"].show(term) for term in of_session]
        lease = self.row("leases")
        if lease is not None:
            note["lease"] = _FACTS["leases"].show(lease)
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
        row = _FACTS[table].hide(self.number, shown)
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
    entries: Ordered


def look(ledger: SessionLog) -> Seen:
    known = last_known(ledger)  # first: a writer updates the hint after it has added an entry
    found = _read(ledger)
    first = _first(ledger, found)
    newest = max([known, *found.rows])
    entries = Ordered(TABLES["journal"].columns, ("pos",))
    entries.fill([(position(ledger.number, n), body) for n, body in found.rows.items()])
    return Seen(first, newest if newest >= first else max(0, first - 1), entries)


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
