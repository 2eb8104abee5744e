"""The search index in a SQLite file of its own, with FTS5 and its trigrams.

The full-text index knows which rows have a trigram, but not where, which would make it five times
as large as the text. So the text of each candidate is compared.

A row of the full-text index is found by the first 63 bits of an id, so that rows are in the order
of ids. If several ids begin with the same bits, their texts share the row.
"""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import apsw

from holdfast.errors import Unavailable
from holdfast.format.records import MAX_SEQ, SEQ_BITS
from holdfast.ids import BYTES
from holdfast.storage.rows import IdRow
from holdfast.storage.search_index import Change, IndexBusy, IndexUnusable, Mark

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

APPLICATION_ID = 0x484F4C53  # "HOLS"
VERSION = 1
_KEY_SHIFT = 8 * BYTES - 63
_ALWAYS = "\x1e\x1e\x1e"
"""The text of checkpoints that are candidates of every search."""
_BETWEEN = "\x1f"
_PATIENCE_MS = 5_000
"""How long to wait for another process."""
_GROUPS = 16
"""About how many groups of a long text are looked up."""
_HAS_TEXT = "SELECT 1 FROM documents WHERE pos = ? AND (instr(text, ?) OR text = ?)"
_TABLES = """
CREATE TABLE marks (session INTEGER PRIMARY KEY, head BLOB, gone BLOB, last INTEGER, id BLOB);
CREATE TABLE tip (id BLOB);
CREATE TABLE removals (id INTEGER PRIMARY KEY);
CREATE TABLE documents (
    pos INTEGER PRIMARY KEY, id BLOB NOT NULL UNIQUE, ancestor INTEGER NOT NULL, text TEXT NOT NULL
);
CREATE VIRTUAL TABLE words USING fts5 (
    text, content='', detail=none, columnsize=0, tokenize='trigram case_sensitive 1'
);
INSERT INTO words (words, rank) VALUES ('secure-delete', 1);
"""


def open_file(path: Path, *, create: bool, read_only: bool) -> SqliteSearchIndex | None:
    """Open the index in a file; see storage.url.open_search_index."""
    if not path.exists():
        if not create:
            return None
        _make(path)
    try:
        return SqliteSearchIndex(path, read_only=read_only)
    except IndexBusy:
        raise
    except IndexUnusable:
        if not create:
            raise
    drop_file(path)
    _make(path)
    return SqliteSearchIndex(path, read_only=read_only)


def drop_file(path: Path) -> bool:
    """Remove the file of an index. Return whether there was one."""
    try:
        for name in (f"{path}-journal", path):
            with suppress(FileNotFoundError):
                os.remove(name)
                if name is path:
                    return True
    except OSError as e:
        raise Unavailable(f"the search index {path} cannot be removed: {e}") from e
    return False


def _make(path: Path) -> None:
    """Create an empty index. Another process sees it whole or not at all."""
    try:
        with _connection(path, apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE) as connection:
            connection.execute(f"BEGIN IMMEDIATE;{_TABLES}")
            connection.pragma("application_id", APPLICATION_ID)
            connection.pragma("user_version", VERSION)
            connection.execute("COMMIT")
    except apsw.Error as e:
        raise Unavailable(f"the search index {path} cannot be created: {e}") from e


@contextmanager
def _connection(path: Path, flags: int) -> Iterator[apsw.Connection]:
    connection = apsw.Connection(str(path), flags=flags)
    try:
        yield connection
    finally:
        connection.close()


@contextmanager
def _usable() -> Iterator[None]:
    try:
        yield
    except (apsw.BusyError, apsw.LockedError) as e:
        raise IndexBusy(str(e)) from e
    except (apsw.Error, UnicodeDecodeError, TypeError) as e:
        raise IndexUnusable(str(e)) from e


def _key(id: bytes) -> int:
    return int.from_bytes(id, "big") >> _KEY_SHIFT


def _plain(text: str) -> str:
    """Return a text that SQLite can store: without NUL and lone surrogates."""
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def _query(word: str) -> str:
    """Return the query for the rows that have the groups of three characters of a text."""
    groups = list(dict.fromkeys(word[n : n + 3] for n in range(len(word) - 2)))
    step = len(groups) // _GROUPS + 1
    quoted = [group.replace('"', '""') for group in groups[::step]]
    return "(" + " AND ".join(f'"{group}"' for group in quoted) + f') OR "{_ALWAYS}"'


class SqliteSearchIndex:
    """An index in a file; see storage.search_index.SearchIndex."""

    def __init__(self, path: Path, *, read_only: bool) -> None:
        self._path = path
        flags = apsw.SQLITE_OPEN_READONLY if read_only else apsw.SQLITE_OPEN_READWRITE
        with _usable():
            self._connection = apsw.Connection(str(path), flags=flags)
            try:
                self._connection.set_busy_timeout(_PATIENCE_MS)
                self._connection.pragma("secure_delete", 1)
                self._connection.pragma("synchronous", 1)
                self._connection.pragma("trusted_schema", 0)
                self._connection.pragma("temp_store", 2)  # deleted text goes to no other file
                found = [self._connection.pragma(n) for n in ("application_id", "user_version")]
                if found != [APPLICATION_ID, VERSION]:
                    raise IndexUnusable(f"{path} is no search index of this version")
            except BaseException:
                self._connection.close()
                raise

    def _all(self, sql: str, *bindings: Any) -> list[Any]:
        with _usable():
            return list(self._connection.execute(sql, bindings))

    def version(self) -> object | None:
        try:
            with self._path.open("rb") as file:
                return os.fstat(file.fileno()).st_ino, file.read(28)[24:]  # SQLite's change counter
        except OSError:
            return None

    def marks(self) -> dict[int, Mark]:
        return {session: Mark(*mark) for session, *mark in self._all("SELECT * FROM marks")}

    def tip(self) -> bytes:
        [(found,)] = self._all("SELECT max(id) FROM tip")
        return found or b""

    def set_tip(self, id: bytes) -> None:
        with self._transaction():
            self._connection.execute("DELETE FROM tip")
            self._connection.execute("INSERT INTO tip VALUES (?)", (id,))

    def known(self, session: int) -> dict[int, tuple[bytes, int]]:
        rows = self._all(
            "SELECT pos, id, ancestor FROM documents WHERE pos BETWEEN ? AND ?", *_range(session)
        )
        return {pos & MAX_SEQ: (id, ancestor) for pos, id, ancestor in rows}

    def write(self, change: Change) -> bool:
        session, expect, mark, documents, remove, stale = change
        with self._transaction():
            found = self._all("SELECT head, gone, last, id FROM marks WHERE session = ?", session)
            if (Mark(*found[0]) if found else None) != expect:
                return False
            for seq in remove:
                self._put(session << SEQ_BITS | seq, None)
            for document in documents:
                text = _ALWAYS if document.text is None else _plain(document.text)
                self._put(
                    session << SEQ_BITS | document.seq, (document.id, document.ancestor, text)
                )
            if mark is None:
                self._connection.execute("DELETE FROM marks WHERE session = ?", (session,))
            else:
                self._connection.execute(
                    "INSERT OR REPLACE INTO marks VALUES (?, ?, ?, ?, ?)", (session, *mark)
                )
            self._connection.executemany(
                "UPDATE marks SET head = x'', gone = x'' WHERE session = ?", [(n,) for n in stale]
            )
        return True

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with _usable():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def _put(self, pos: int, row: tuple[bytes, int, str] | None) -> None:
        """Replace the document at a position, or remove it, and change the full-text index."""
        run = self._connection.execute
        old = run("SELECT id FROM documents WHERE pos = ?", (pos,)).get
        keys = {_key(id) for id in (old, row and row[0]) if id}
        for key in keys:
            if before := self._row(key):
                run("INSERT INTO words (words, rowid, text) VALUES ('delete', ?, ?)", (key, before))
        if old is not None:
            run("DELETE FROM documents WHERE pos = ?", (pos,))
            run("INSERT OR IGNORE INTO removals VALUES (1)")
        if row is not None:
            run("INSERT INTO documents VALUES (?, ?, ?, ?)", (pos, *row))
        for key in keys:
            if after := self._row(key):
                run("INSERT INTO words (rowid, text) VALUES (?, ?)", (key, after))

    def _row(self, key: int) -> str:
        """Return the text of a row of the full-text index: that of all its documents."""
        found = self._all(
            "SELECT text FROM documents WHERE id BETWEEN ? AND ? ORDER BY id", *_ids(key)
        )
        return _BETWEEN.join([text for (text,) in found])

    def find(self, text: str, below: bytes, limit: int) -> tuple[list[IdRow], bool]:
        word, found = _plain(text), list[IdRow]()
        with _usable():
            for (key,) in self._connection.execute(
                "SELECT rowid FROM words WHERE words MATCH ? AND rowid <= ? ORDER BY rowid DESC",
                (_query(word), min(_key(below), (1 << 63) - 1)),
            ):
                if len(found) >= limit:
                    return found, True
                rows = self._connection.execute(
                    "SELECT id, pos FROM documents WHERE id BETWEEN ? AND ? AND id < ? "
                    "AND (instr(text, ?) OR text = ?) ORDER BY id DESC",
                    (*_ids(key), below, word, _ALWAYS),
                )
                found += [IdRow(pos >> SEQ_BITS, pos & MAX_SEQ, id) for id, pos in rows]
        return found, False

    def find_in(self, text: str, session: int) -> list[IdRow]:
        word = _plain(text)
        keys = {key for (key,) in self._all(
            "SELECT rowid FROM words WHERE words MATCH ?", _query(word)
        )}  # fmt: skip
        rows = self._all(
            "SELECT pos, id, ancestor FROM documents WHERE pos BETWEEN ? AND ? ORDER BY pos DESC",
            *_range(session),
        )
        return [
            IdRow(session, pos & MAX_SEQ, id)
            for pos, id, ancestor in rows
            if (ancestor >= 0 and ancestor >> SEQ_BITS != session)
            or (_key(id) in keys and self._all(
                _HAS_TEXT, pos, word, _ALWAYS
            ))
        ]  # fmt: skip

    def compact(self, *, erase: bool = False) -> None:
        if not erase:
            with self._transaction():
                self._connection.execute("INSERT INTO words (words) VALUES ('optimize')")
            with _usable():
                pages = [self._connection.pragma(n) for n in ("freelist_count", "page_count")]
                if 4 * pages[0] > pages[1]:
                    self._connection.execute("VACUUM")
        elif self._all("SELECT 1 FROM removals"):
            # Rows that moved between pages have left copies, which are not overwritten.
            with _usable():
                self._connection.execute("DELETE FROM removals")
                self._connection.execute("VACUUM")

    def close(self) -> None:
        self._connection.close()


def _range(session: int) -> tuple[int, int]:
    return session << SEQ_BITS, (session + 1 << SEQ_BITS) - 1


def _ids(key: int) -> tuple[bytes, bytes]:
    """Return the lowest and the highest id that begin with these 63 bits."""
    low, high = key << _KEY_SHIFT, (key + 1 << _KEY_SHIFT) - 1
    return low.to_bytes(BYTES, "big"), high.to_bytes(BYTES, "big")
