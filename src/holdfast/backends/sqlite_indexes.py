"""Making the indexes of a SQLite file anew, also those that SQLite itself gives up on."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import apsw

from holdfast.backends.sqlite_file import SCHEMA, drafted
from holdfast.backends.sqlite_order import put_in_order
from holdfast.backends.sqlite_reader import name_hash
from holdfast.backends.sqlite_trees import (
    TWIN,
    as_bytes,
    begin_twin,
    is_sound,
    mending,
    take_over,
)
from holdfast.codec import records
from holdfast.errors import UNREADABLE, Corrupt, Unavailable

if TYPE_CHECKING:
    from collections.abc import Iterator


def reindex(connection: apsw.Connection) -> None:
    """SQLite's own indexes, and all that only repeats what sealed rows say."""
    try:
        _reindex(connection)
    except OSError as e:
        if isinstance(e, Unavailable):
            raise
        raise Unavailable(f"cannot write beside the store {connection.filename}: {e}") from e


def _reindex(connection: apsw.Connection) -> None:
    _check_length(connection)
    put_in_order(connection)
    indexes = "SELECT name, tbl_name FROM sqlite_schema WHERE type = 'index'"
    for name, table in connection.execute(indexes).fetchall():
        # Two rows may claim to be the same one: the old index may still tell them apart.
        with suppress(apsw.ConstraintError), mending(connection) as source:
            if is_sound(source, str(table)):
                connection.execute(f"REINDEX {name}")
            else:
                connection.execute(_twin(connection, str(name), str(table)))
                take_over(connection, str(name))
    _note_names(connection)
    _give_back(connection)


def _check_length(connection: apsw.Connection) -> None:
    """Pages behind the last that a file counts are free room for SQLite, whatever is in them."""
    path, size = Path(connection.filename), connection.pragma("page_size")
    if path.stat().st_size <= connection.pragma("page_count") * size:
        return
    log, written_back = connection.wal_checkpoint()  # cuts off what was given back
    if written_back < log:
        raise Unavailable(
            f"somebody reads an older state of the store {path}", hint="try again later"
        )
    there, counted = path.stat().st_size // size, connection.pragma("page_count")
    if there > counted:
        raise Corrupt(
            f"the store {path} has {there} pages, and counts {counted} of them",
            hint="put a backup back, or copy() to a new store what loads",
        )


def _twin(connection: apsw.Connection, name: str, table: str) -> str:
    """How to create an index like this one."""
    if name in SCHEMA:
        return SCHEMA[name].replace(f"INDEX {name} ", f"INDEX {TWIN} ")
    columns = [column for _, _, column in connection.execute(f"PRAGMA index_info({name})")]
    return f"CREATE UNIQUE INDEX {TWIN} ON {table} ({', '.join(map(str, columns))})"


def _give_back(connection: apsw.Connection) -> None:
    """The pages of trees that were replaced, now or in a run that was cut short.

    VACUUM can make more damage of damage; so it is tried on a copy.
    """
    if connection.execute("PRAGMA quick_check(1)").get == "ok":
        return
    path = Path(connection.filename)
    try:
        with drafted(path) as draft:
            connection.execute("VACUUM INTO ?", (str(draft),))
            copy = apsw.Connection(str(draft), flags=apsw.SQLITE_OPEN_READONLY)
            sound = is_sound(copy)
            copy.close()
        if sound:
            connection.execute("VACUUM")
    except (apsw.CorruptError, apsw.ConstraintError):
        pass  # it is more than that; verify() tells


def _note_names(connection: apsw.Connection) -> None:
    """The second way to find a session.

    Of sessions that are not sound, or not there any more, it keeps what it says: else their names
    would be free, and who asks for one of them would begin it anew.
    """
    with mending(connection) as source:
        sound = {name_hash(name): number for number, name in _sessions(source)}
        known: dict[Any, Any] = {}
        with suppress(apsw.CorruptError):
            known.update(source.execute("SELECT hash, num FROM names"))
        certain = set(sound.values())
        kept = {hash: n for hash, n in known.items() if type(n) is int and n not in certain}
        if kept | sound != known or not is_sound(source, "names"):
            begin_twin(connection, "names")
            given = (kept | sound).items()
            connection.executemany(f"INSERT INTO {TWIN} VALUES (?, ?)", given)  # noqa: S608
            take_over(connection, "names")


def _sessions(source: apsw.Connection) -> Iterator[tuple[int, bytes]]:
    """Number and name of all that are sound."""
    sql = f"SELECT num, {as_bytes('name')}, {as_bytes('body')} FROM sessions NOT INDEXED"  # noqa: S608
    found: Iterator[Any] = source.execute(sql)
    for number, name, body in found:
        with suppress(*UNREADABLE):
            records.unseal_session(number, name, body)
            yield number, name
