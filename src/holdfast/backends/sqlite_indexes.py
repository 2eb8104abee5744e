"""Making the indexes of a SQLite file anew, also those that SQLite itself gives up on."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import apsw

from holdfast.backends.sqlite_file import SCHEMA
from holdfast.backends.sqlite_reader import name_hash

_TWIN = "made_anew"
_TAKE_OVER = """UPDATE sqlite_schema SET rootpage =
(SELECT rootpage FROM sqlite_schema WHERE name = ?) WHERE name = ?;
DELETE FROM sqlite_schema WHERE name = ?"""


def reindex(connection: apsw.Connection) -> None:
    """SQLite's own indexes, and the tables that only repeat what others say."""
    indexes = "SELECT name, tbl_name FROM sqlite_schema WHERE type = 'index'"
    for name, table in connection.execute(indexes).fetchall():
        try:
            connection.execute(f"REINDEX {name}")
        except apsw.CorruptError:
            _replace(connection, str(name), str(table))
    _note_names(connection)
    _give_back(connection)


def _replace(connection: apsw.Connection, name: str, table: str) -> None:
    """Let a new tree take the place of one that cannot be read, and so cannot be dropped either."""
    connection.execute("BEGIN IMMEDIATE")
    connection.execute(_twin(connection, name, table))
    connection.execute("PRAGMA writable_schema = ON")
    try:
        connection.execute(_TAKE_OVER, (_TWIN, name, _TWIN))
    finally:
        connection.execute("PRAGMA writable_schema = RESET")
    connection.execute("COMMIT")


def _twin(connection: apsw.Connection, name: str, table: str) -> str:
    """How to create an index like this one."""
    if name in SCHEMA:
        return SCHEMA[name].replace(f"INDEX {name} ", f"INDEX {_TWIN} ")
    columns = [column for _, _, column in connection.execute(f"PRAGMA index_info({name})")]
    return f"CREATE UNIQUE INDEX {_TWIN} ON {table} ({', '.join(map(str, columns))})"


def _note_names(connection: apsw.Connection) -> None:
    """The second way to find a session."""
    connection.execute("BEGIN IMMEDIATE; DELETE FROM names")
    names: list[Any] = connection.execute("SELECT num, name FROM sessions").fetchall()
    for number, name in names:
        connection.execute("INSERT OR REPLACE INTO names VALUES (?, ?)", (name_hash(name), number))
    connection.execute("COMMIT")


def _give_back(connection: apsw.Connection) -> None:
    """The pages of trees that were replaced, now or in a run that was cut short."""
    if connection.execute("PRAGMA quick_check(1)").get != "ok":
        with suppress(apsw.CorruptError):  # it is more than that; verify() tells
            connection.execute("VACUUM")
