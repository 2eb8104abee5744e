"""Making the indexes of a SQLite file anew, also those that SQLite itself gives up on.

An index is as good as the rows that it is made from, and of a damaged row its old index may be the
last to know how it is found. So where the two disagree, the row's seal tells which one is right.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import apsw

from holdfast.backends.sqlite_file import SCHEMA, drafted
from holdfast.backends.sqlite_reader import name_hash
from holdfast.codec import records, rows
from holdfast.errors import UNREADABLE, Corrupt, Unavailable, UnsupportedFormat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_TWIN = "made_anew"
# The head of another type can be neither read nor swapped; often its bytes are all there.
_HEADS = """UPDATE heads SET body = ifnull(CAST(body AS BLOB), x'') WHERE typeof(body) <> 'blob'"""
_PUT = f"INSERT OR IGNORE INTO {_TWIN} VALUES (?, ?)"  # noqa: S608
_SORTED = f"""DELETE FROM items; INSERT INTO items SELECT pos, body FROM {_TWIN} ORDER BY pos;
DROP TABLE {_TWIN}"""  # noqa: S608
_TAKE_OVER = """UPDATE sqlite_schema SET rootpage =
(SELECT rootpage FROM sqlite_schema WHERE name = ?) WHERE name = ?;
DELETE FROM sqlite_schema WHERE name = ?"""


def reindex(connection: apsw.Connection) -> None:
    """SQLite's own indexes, and all that only repeats what sealed rows say."""
    with suppress(apsw.CorruptError):
        connection.execute(_HEADS)
    _sort_items(connection)
    _note_positions(connection)
    indexes = "SELECT name, tbl_name FROM sqlite_schema WHERE type = 'index'"
    for name, table in connection.execute(indexes).fetchall():
        if name in _SEALED:
            _recall(connection, str(name), str(table), *_SEALED[name])
        try:
            connection.execute(f"REINDEX {name}")
        except apsw.CorruptError:
            _replace(connection, str(name), str(table))
        except apsw.ConstraintError:
            pass  # two rows that claim to be the same one: the old index may still tell them apart
    _note_names(connection)
    _give_back(connection)


# -- what only an index still knows --------------------------------------------------------------


def _check_checkpoint(pos: int, id: bytes, body: bytes) -> None:
    records.unseal_checkpoint(pos >> records.SEQ_BITS, pos & records.MAX_SEQ, id, body)


def _check_blob(_: int, digest: bytes, body: bytes) -> None:
    flat = rows.unseal(rows.BLOB, rows.blob_address(digest), body, "a blob")[1]
    if sha256(flat).digest() != digest:
        raise Corrupt("a blob does not match its digest")


# Indexes of what rows are sealed with: their key, the column, and what raises if a row is damaged.
_SEALED: dict[str, tuple[str, str, Callable[[int, bytes, bytes], object]]] = {
    "sqlite_autoindex_sessions_1": ("num", "name", records.unseal_session),
    "sqlite_autoindex_checkpoints_1": ("pos", "id", _check_checkpoint),
    "sqlite_autoindex_blobs_1": ("num", "digest", _check_blob),
}
_DISAGREE = """SELECT said.{key}, said.{column}, {own}, {body}
FROM {table} said INDEXED BY {index} LEFT JOIN {table} own NOT INDEXED ON own.{key} = said.{key}
WHERE typeof(said.{column}) = 'blob' AND own.{column} IS NOT said.{column}"""


def _bytes(column: str) -> str:
    """A column whose type may be damaged, and then is not worth to be read."""
    return f"iif(typeof({column}) = 'blob', {column}, x'')"


def _recall(
    connection: apsw.Connection,
    index: str,
    table: str,
    key: str,
    column: str,
    check: Callable[[int, bytes, bytes], object],
) -> None:
    """Give rows that are not sound back what their index says of them."""
    own, body = _bytes(f"own.{column}"), _bytes("own.body")
    sql = _DISAGREE.format(index=index, table=table, key=key, column=column, own=own, body=body)
    connection.execute("BEGIN IMMEDIATE")
    right = []
    for at, said, *row in _readable(connection, sql):
        try:
            check(at, *row)
        except UNREADABLE:
            right.append((said, at))
    if not right:
        connection.execute("ROLLBACK")  # and SQLite forgets pages that it could not read
        return
    with _writable_schema(connection):
        change = f"UPDATE OR IGNORE {table} SET {column} = ? WHERE {key} = ?"  # noqa: S608
        connection.executemany(change, right)
    connection.execute("COMMIT")


def _readable(connection: apsw.Connection, sql: str) -> Iterator[Any]:
    """Rows up to what SQLite cannot read."""
    with suppress(apsw.CorruptError):
        yield from connection.execute(sql)


@contextmanager
def _writable_schema(connection: apsw.Connection) -> Iterator[None]:
    """Besides its name: rows may be changed although an index does not know them."""
    connection.execute("PRAGMA writable_schema = ON")
    try:
        yield
    finally:
        connection.execute("PRAGMA writable_schema = RESET")


# -- rows of items that lie where they do not belong ---------------------------------------------


def _sort_items(connection: apsw.Connection) -> None:
    """Where keys are out of order, nothing can list the rows, and look-ups may miss sound ones."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        keys = [pos for (pos,) in connection.execute("SELECT pos FROM items")]
        if any(a >= b for a, b in pairwise(keys)):
            connection.execute(f"CREATE TEMP TABLE {_TWIN} (pos INTEGER PRIMARY KEY, body BLOB)")
            for pos, body in list(_put_in_order(connection, keys)):
                if _is_free(connection, pos, len(_sealed_at(pos, body) or ())):
                    connection.execute(_PUT, (pos, body))
            connection.execute(_SORTED)
        connection.execute("COMMIT")
    except apsw.CorruptError:  # it is more than that; verify() tells
        connection.execute("ROLLBACK")


def _put_in_order(connection: apsw.Connection, keys: list[Any]) -> Iterator[tuple[int, bytes]]:
    """Put aside the rows that are where they belong; where the others belong, by their seals.

    A row that fits nowhere stays if its key is in order, and else goes: it cannot be read, and
    might hide one that can.
    """
    around = [-1, *keys, 1 << 63]
    found: Iterator[Any] = connection.execute(f"SELECT pos, {_bytes('body')} FROM items")  # noqa: S608
    for n, (pos, body) in enumerate(found):
        bits = [pos ^ 1 << bit for bit in range(63)]
        if _sealed_at(pos, body) is not None:
            connection.execute(_PUT, (pos, body))
        elif fits := [other for other in bits if _sealed_at(other, body) is not None]:
            yield fits[0], body
        elif around[n] < pos < around[n + 2]:
            connection.execute(_PUT, (pos, body))


def _sealed_at(pos: int, body: bytes) -> list[int] | None:
    """Where the items of a row end; None if it was not sealed for this key."""
    try:
        return rows.unseal_items(pos, body, "").ends
    except UnsupportedFormat:
        return []
    except Corrupt:
        return None


def _is_free(connection: apsw.Connection, pos: int, count: int) -> bool:
    """Whether no row has these items: a pack may have taken the place of one that was astray."""
    sql = f"SELECT pos, body FROM {_TWIN} WHERE pos < ? ORDER BY pos DESC LIMIT 1"  # noqa: S608
    near: list[Any] = connection.execute(sql, (pos + count,)).fetchall()
    return all(at + len(_sealed_at(at, body) or " ") <= pos for at, body in near)


# -- trees that cannot be read -------------------------------------------------------------------


def _replace(connection: apsw.Connection, name: str, table: str) -> None:
    """Let a new tree take the place of one that cannot be read, and so cannot be dropped either."""
    connection.execute("BEGIN IMMEDIATE")
    connection.execute(_twin(connection, name, table))
    with _writable_schema(connection):
        connection.execute(_TAKE_OVER, (_TWIN, name, _TWIN))
    connection.execute("COMMIT")


def _twin(connection: apsw.Connection, name: str, table: str) -> str:
    """How to create an index like this one."""
    if name in SCHEMA:
        return SCHEMA[name].replace(f"INDEX {name} ", f"INDEX {_TWIN} ")
    columns = [column for _, _, column in connection.execute(f"PRAGMA index_info({name})")]
    return f"CREATE UNIQUE INDEX {_TWIN} ON {table} ({', '.join(map(str, columns))})"


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
            told = [str(line) for (line,) in copy.execute("PRAGMA quick_check")]
            copy.close()
        if all(line == "ok" or line.startswith("NULL value") for line in told):  # damaged rows
            connection.execute("VACUUM")
    except apsw.CorruptError:
        pass  # it is more than that; verify() tells
    except OSError as e:
        raise Unavailable(f"cannot write beside the store {path}: {e}") from e


# -- what repeats what sealed rows say -----------------------------------------------------------


def _sessions(connection: apsw.Connection) -> Iterator[tuple[int, bytes, int | None, records.Info]]:
    """Number, name, the column `origin` and what is sealed, of all that are sound."""
    sql = f"SELECT num, {_bytes('name')}, origin, {_bytes('body')} FROM sessions NOT INDEXED"  # noqa: S608
    found: list[Any] = connection.execute(sql).fetchall()
    for number, name, origin, body in found:
        with suppress(*UNREADABLE):
            yield number, name, origin, records.unseal_session(number, name, body)


def _note_positions(connection: apsw.Connection) -> None:
    """Where sessions were forked, and what is above gaps."""
    connection.execute("BEGIN IMMEDIATE")
    forked = [(i.origin, n) for n, _, origin, i in _sessions(connection) if i.origin != origin]
    above = []
    sql = f"SELECT pos, ancestor, {_bytes('body')} FROM gaps NOT INDEXED"  # noqa: S608
    gaps: list[Any] = connection.execute(sql).fetchall()
    for pos, ancestor, body in gaps:
        session, seq = pos >> records.SEQ_BITS, pos & records.MAX_SEQ
        with suppress(*UNREADABLE):
            if seq and (sealed := records.unseal_gap(session, seq, body).ancestor) != ancestor:
                above.append((sealed, pos))
    with _writable_schema(connection):
        connection.executemany("UPDATE sessions SET origin = ? WHERE num = ?", forked)
        connection.executemany("UPDATE gaps SET ancestor = ? WHERE pos = ?", above)
    connection.execute("COMMIT")


def _note_names(connection: apsw.Connection) -> None:
    """The second way to find a session.

    Of sessions that are not sound, or not there any more, it keeps what it says: else their names
    would be free, and who asks for one of them would begin it anew.
    """
    connection.execute("BEGIN IMMEDIATE")
    sound = {name_hash(name): number for number, name, _, _ in _sessions(connection)}
    known = dict(_readable(connection, "SELECT hash, num FROM names"))
    certain = set(sound.values())
    kept = {hash: n for hash, n in known.items() if type(n) is int and n not in certain}
    connection.execute("DELETE FROM names")
    connection.executemany("INSERT INTO names VALUES (?, ?)", (kept | sound).items())
    connection.execute("COMMIT")
