"""Trees of a SQLite file that are replaced as a whole, and whether one has to be."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import apsw

from holdfast.backends.sqlite_file import SCHEMA

if TYPE_CHECKING:
    from collections.abc import Iterator

TWIN = "made_anew"
_TAKE_OVER = """UPDATE sqlite_schema SET rootpage =
(SELECT rootpage FROM sqlite_schema WHERE name = ?) WHERE name = ?;
DELETE FROM sqlite_schema WHERE name = ?"""


@contextmanager
def mending(connection: apsw.Connection) -> Iterator[apsw.Connection]:
    """A transaction, and another connection to read the same by; undone if that is too damaged.

    For who has met damage within a transaction cannot go on in it.
    """
    connection.execute("BEGIN IMMEDIATE")
    source = apsw.Connection(connection.filename, flags=apsw.SQLITE_OPEN_READONLY)
    try:
        yield source
        connection.execute("COMMIT")
    except BaseException as e:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        if not isinstance(e, apsw.CorruptError | UnicodeDecodeError):  # of those, verify() tells
            raise
    finally:
        source.close()


def take_over(connection: apsw.Connection, name: str) -> None:
    """Let the twin take the place of a tree.

    That is not dropped: it might claim pages that belong to others as well.
    """
    connection.execute("PRAGMA writable_schema = ON")
    try:
        connection.execute(_TAKE_OVER, (TWIN, name, TWIN))
    finally:
        connection.execute("PRAGMA writable_schema = RESET")


def is_sound(source: apsw.Connection, table: str | None = None) -> bool:
    """Whether the trees of a table and of its indexes are, or all, whatever is in them."""
    return faults(source, table) == []


def faults(source: apsw.Connection, table: str | None = None) -> list[str] | None:
    """What SQLite finds; None if it gives up."""
    check = "PRAGMA quick_check" if table is None else f"PRAGMA quick_check({table})"
    try:
        told = [str(line) for (line,) in source.execute(check)]
    except apsw.CorruptError:
        return None
    return [line for line in told if line != "ok" and not line.startswith("NULL value")]


def as_bytes(column: str) -> str:
    """A column whose type may be damaged; often its bytes are all there."""
    return f"iif(typeof({column}) IN ('blob', 'text'), CAST({column} AS BLOB), x'')"


def begin_twin(connection: apsw.Connection, name: str) -> None:
    """Without what makes an index: it would have a tree of its own."""
    made = SCHEMA[name].replace(f"TABLE {name} ", f"TABLE {TWIN} ").replace(" UNIQUE", "")
    connection.execute(made)
