"""Lines of logs: the writes of a batch as JSON, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast import ids
from holdfast.format import rows
from holdfast.format.records import MAX_SEQ, SEQ_BITS, position
from holdfast.intervals import whole
from holdfast.storage.contract import Delete, DeleteRange, Insert, Put, Rename, StaleHead
from holdfast.storage.files import row_json
from holdfast.storage.tables import TABLES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from holdfast.storage.contract import Batch, Write
    from holdfast.storage.tables import Row


DIGITS = 18
"""The most digits of the number of a line or an entry."""
BEGIN = b'{"n":'


def read_entry(line: bytes) -> dict[str, Any] | None:
    """Return the entry of a numbered line; None if the line is damaged."""
    digits = line[len(BEGIN) : line.find(b",")]
    if not line.startswith(BEGIN) or not digits.isdigit() or len(digits) > DIGITS:
        return None
    entry = row_json.read_line(int(digits), line)
    return entry if entry is not None and entry["n"] == int(digits) else None


def show_id(id: bytes) -> str:
    """Return the id of a checkpoint as text, or the number of a session as shorter text."""
    return ids.to_text(id) if len(id) == ids.BYTES else id.hex()


def show_origin(pos: int) -> list[int]:
    """Return the position of the checkpoint that a session was forked from: session and seq."""
    return [*divmod(pos, 1 << SEQ_BITS)]


def hide_id(shown: str) -> bytes:
    if len(shown) != ids.CHARS:
        return bytes.fromhex(shown)
    id = ids.from_text(shown)
    if id is None:
        raise ValueError(shown)
    return id


_TEXTS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "pos": (lambda pos: pos & MAX_SEQ, whole),
    "id": (show_id, hide_id),
    "key": (row_json.show_name, row_json.hide_name),
    "value": (row_json.show_name, row_json.hide_name),
    "body": (row_json.show_row, row_json.hide_row),
    "token": (bytes.hex, bytes.fromhex),
    "kind": (int, whole),
    "seq": (int, whole),
    "ancestor": (lambda pos: pos, lambda pos: None if pos is None else whole(pos)),
}
"""How a log has the value of a column, and how it is read again."""


class _Fact:
    """How a log has the rows of a table, and the removals of rows.

    A row is a list of its columns, and a removal is a list of the columns of the key. A list of one
    value is this value. The session is left out, and a position is the number in the session.
    """

    def __init__(self, table: str, *, has: int | None = None, plain: int | None = None) -> None:
        columns = TABLES[table].columns[:has]
        self.table, self._plain, self._count = table, plain, len(columns)
        self._left_out = 1 if columns[0] == "session" else 0
        self._by_position = columns[0] == "pos"
        self._columns = [_TEXTS[column] for column in columns[self._left_out :]]
        self._key = self._columns[: TABLES[table].key - self._left_out]

    def whole(self, row: Row) -> Row:
        """Return a row as the log has it: uncompressed, and without what is in a file."""
        if self._plain is not None:
            return (*row[:-1], row_json.plain(self._plain, row[0], row[-1]))
        return row[: self._count]

    def show(self, row: Row, *, key: bool = False) -> Any:
        """Return the text of a row, or of a key."""
        columns = zip(self._key if key else self._columns, row[self._left_out :], strict=True)
        shown = [show(value) for (show, _), value in columns]
        return shown if len(shown) > 1 else shown[0]

    def hide(self, session: int, shown: Any, *, key: bool = False) -> Row:
        """Return the row, or the key, in a text."""
        columns = self._key if key else self._columns
        listed = shown if len(columns) > 1 else (shown,)
        values = [hide(value) for (_, hide), value in zip(columns, listed, strict=True)]
        if self._by_position:
            values[0] |= session << SEQ_BITS
        return (session, *values) if self._left_out else tuple(values)


FACTS = {
    fact.table: fact
    for fact in (
        _Fact("heads"),
        _Fact("checkpoints", has=2),  # the row itself is in a file
        _Fact("keys"),
        _Fact("marks"),
        _Fact("operations", plain=rows.OPERATION),
        _Fact("tombs"),
        _Fact("facets"),
        _Fact("gaps", plain=rows.GRAFT),
        _Fact("leases", plain=rows.LEASE),
    )
}
"""A log has the rows of a table under its name."""
_SINGLE = {
    "checkpoint": FACTS["checkpoints"], "head": FACTS["heads"], "lease": FACTS["leases"],
    "operation": FACTS["operations"],
}  # fmt: skip
"""The names under which it has a single row."""
_REMOVED = {f"un{table}": FACTS[table] for table in ("keys", "marks", "tombs", "facets")}
"""The names under which it has removals of rows."""
_FREED = ("checkpoints", "gaps", "tombs", "marks")
"""The tables of which gc removes the rows of a checkpoint."""
_FIRST = ("create", "origin", "checkpoint", "head", "streams")
"""These parts of a line come first, for people who read it."""


def logged(batch: Batch, session: int) -> Iterator[Write]:
    """Yield the writes of a batch that belong in the log of a session, as a reader gets them."""
    if batch.swap is not None:
        yield Put("heads", (session, batch.swap.body))
    for write in batch.writes:
        if type(write) is Insert or type(write) is Put:
            table, row = write.table, write.row
            if table in FACTS and (table != "gaps" or row[0] >> SEQ_BITS == session):
                yield Put(table, FACTS[table].whole(row))
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
        if type(write) is Put and write.table != "sessions":
            facts.setdefault(write.table, []).append(FACTS[write.table].show(write.row))
            continue
        match write:
            case Put(_, row):
                entry |= created_by(row)
            case Rename(_, new, body):
                entry["rename"] = [row_json.show_name(new), row_json.show_row(body)]
            case Delete("sessions"):
                entry["removed"] = True
            case Delete(table, key):
                facts.setdefault(f"un{table}", []).append(FACTS[table].show(key, key=True))
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


def created_by(row: Row) -> dict[str, Any]:
    """Return the part of an entry that creates a session."""
    number, name, origin, body = row
    shown = {"create": [number, row_json.show_name(name), row_json.show_row(body)]}
    return shown | ({} if origin is None else {"origin": show_origin(origin)})


def writes_of(entry: dict[str, Any], session: int) -> Iterator[Write]:
    """Yield the writes in an entry, removals first. This is the reverse of `entry_of`."""
    for name, said in entry.items():
        if name in _REMOVED:
            fact = _REMOVED[name]
            yield from [Delete(fact.table, fact.hide(session, each, key=True)) for each in said]
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
        elif name in FACTS:
            fact = FACTS[name]
            yield from [Put(name, fact.hide(session, each)) for each in said]
        elif name == "create":
            _, new, body = said
            origin = position(*entry["origin"]) if "origin" in entry else None
            row = (session, row_json.hide_name(new), origin, row_json.hide_row(body))
            yield Put("sessions", row)
        elif name == "rename":
            new, body = said
            yield Rename(session, row_json.hide_name(new), row_json.hide_row(body), StaleHead)
