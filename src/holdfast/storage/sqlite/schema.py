"""Create, open, check and upgrade a store in a SQLite file, and translate SQLite's errors."""

from __future__ import annotations

import os
import random
import re
import time
from collections import defaultdict
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import apsw

from holdfast.errors import (
    Corrupt,
    HoldfastError,
    InvalidRequest,
    StoreNotFound,
    Unavailable,
    UnsupportedFormat,
)
from holdfast.format.records import SPACES, seal_counter
from holdfast.log import logger
from holdfast.storage import fs
from holdfast.storage.tally import TALLY_MASK, Tally

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


APPLICATION_ID = 0x484F4C44  # "HOLD"
FORMAT = 2

# Keys are packed integers (session<<32|seq, stream<<24|item), because tables with composite keys
# WITHOUT ROWID move rows above 1 KB to overflow pages. `names` is a second index of session names:
# a name that is in neither does not exist; a name that is in only one of them shows damage.
_TABLES = {
    "counters": "(space TEXT PRIMARY KEY, body BLOB NOT NULL) WITHOUT ROWID",
    "sessions": "(num INTEGER PRIMARY KEY, name BLOB NOT NULL UNIQUE, origin INTEGER, "
    "body BLOB NOT NULL)",
    "names": "(hash INTEGER PRIMARY KEY, num INTEGER NOT NULL)",
    "heads": "(session INTEGER PRIMARY KEY, body BLOB NOT NULL)",
    "checkpoints": "(pos INTEGER PRIMARY KEY, id BLOB NOT NULL UNIQUE, body BLOB NOT NULL)",
    "keys": "(session INTEGER, key BLOB, seq INTEGER NOT NULL, PRIMARY KEY (session, key)) "
    "WITHOUT ROWID",
    "items": "(pos INTEGER PRIMARY KEY, body BLOB NOT NULL)",
    "blobs": "(num INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, uses INTEGER NOT NULL, "
    "body BLOB NOT NULL)",
    "marks": "(pos INTEGER, kind INTEGER, value BLOB, body BLOB NOT NULL, "
    "PRIMARY KEY (pos, kind, value)) WITHOUT ROWID",
    "operations": "(pos INTEGER PRIMARY KEY, body BLOB NOT NULL)",
    "tombs": "(pos INTEGER PRIMARY KEY, body BLOB NOT NULL)",
    "gaps": "(pos INTEGER PRIMARY KEY, ancestor INTEGER, body BLOB NOT NULL)",
    "facets": "(kind INTEGER, value BLOB, id BLOB, PRIMARY KEY (kind, value, id)) WITHOUT ROWID",
    "leases": "(session INTEGER PRIMARY KEY, token BLOB NOT NULL, boot TEXT NOT NULL, "
    "since REAL NOT NULL, body BLOB NOT NULL)",
    "journal": "(pos INTEGER PRIMARY KEY, body BLOB NOT NULL)",
    "tallies": "(session INTEGER PRIMARY KEY, marks INTEGER NOT NULL, operations INTEGER NOT NULL, "
    "tombs INTEGER NOT NULL, lease BLOB)",
    "spans": "(session INTEGER PRIMARY KEY, first INTEGER NOT NULL, next INTEGER NOT NULL)",
}
SCHEMA = {name: f"CREATE TABLE {name} {columns}" for name, columns in _TABLES.items()} | {
    "marks_by_value": "CREATE INDEX marks_by_value ON marks (kind, value, pos)",
    "forks": "CREATE INDEX forks ON sessions (origin) WHERE origin IS NOT NULL",
    "gaps_by_ancestor": "CREATE INDEX gaps_by_ancestor ON gaps (ancestor) "
    "WHERE ancestor IS NOT NULL",
}

_SINCE_2 = ("tallies", "spans")
SCHEMAS = {1: {n: sql for n, sql in SCHEMA.items() if n not in _SINCE_2}, FORMAT: SCHEMA}
"""The schemas that can be read without an upgrade, by format version."""


def _add_up(connection: apsw.Connection) -> None:
    """Fill the new tables of version 2 from the existing rows that can be read."""
    sums: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0])
    leases: dict[int, bytes] = {}
    spans: list[tuple[int, int, int]] = []
    # Another connection reads, because damage ends the transaction of the connection that finds it.
    source = apsw.Connection(connection.filename, flags=apsw.SQLITE_OPEN_READONLY)
    try:
        for n, table in enumerate(("marks", "operations", "tombs")):
            with suppress(apsw.CorruptError):
                for session, body in source.execute(f"SELECT pos >> 32, body FROM {table}"):  # noqa: S608
                    sums[session][n] = (sums[session][n] + Tally.total([body])) & TALLY_MASK
        with suppress(apsw.CorruptError):
            for session, *lease in source.execute("SELECT session, token, body FROM leases"):
                leases[session] = Tally.of_lease(*lease)
        with suppress(apsw.CorruptError):
            spans += source.execute(SPANS_OF_ROWS.format(""))
    finally:
        source.close()
    tallies = [(number, *sums[number], leases.get(number)) for number in sums.keys() | leases]
    connection.executemany("INSERT INTO tallies VALUES (?, ?, ?, ?, ?)", tallies)
    connection.executemany("INSERT INTO spans VALUES (?, ?, ?)", spans)


SPANS_OF_ROWS = """SELECT pos >> 32, min(pos) & 0xffffffff, (max(pos) & 0xffffffff) + 1
FROM journal {} GROUP BY pos >> 32"""

# By format version: the statements and functions that upgrade a store to the next version. They run
# in one transaction when the store is opened.
MIGRATIONS: dict[int, tuple[str | Callable[[apsw.Connection], None], ...]] = {
    1: (*[SCHEMA[name] for name in _SINCE_2], _add_up),
}

# Older versions can lose acknowledged commits when connections write and reset the WAL together.
_OLDEST_SQLITE = (3, 51, 3)
_BACK_OFF = (50e-6, 600e-6)
_LOCKS = Path("/proc/locks")
_WRITING = 120
"""The byte of the shared memory that a writer locks, according to SQLite's documentation."""
_MARK = b"SQLite format 3\0"  # the first bytes of a database
_OTHER = "check the path; if the file was a store, restore a backup"


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Translate SQLite's errors into ours."""
    try:
        yield
    except apsw.NotADBError as e:
        if not _begins_like_one(path):
            raise UnsupportedFormat(f"{path} is not a store", hint=_OTHER) from e
        raise Corrupt(f"the first bytes of the store {path} are damaged", hint=_OTHER) from e
    except (apsw.CorruptError, apsw.FormatError) as e:
        raise Corrupt(f"the store {path} is damaged: {e}") from e
    except (UnicodeDecodeError, OverflowError) as e:  # the type of a column is damaged
        raise Corrupt(f"the store {path} is damaged: {e}") from e
    except apsw.FullError as e:
        raise Unavailable(
            f"no room to write {path}: {e}", hint="nothing was lost; free some space and save again"
        ) from e
    except (apsw.BusyError, apsw.LockedError) as e:
        raise Unavailable(
            f"the store {path} is locked by {_writer_of(path) or 'another process'}",
            hint="a process may hang in a commit",
        ) from e
    except (apsw.ReadOnlyError, apsw.CantOpenError) as e:
        raise Unavailable(
            f"the store {path} cannot be opened or written: {e}",
            hint="readers need write permission on its folder, too, unless it is read-only",
        ) from e
    except (apsw.ThreadingViolationError, apsw.ConnectionClosedError):
        raise
    except apsw.Error as e:
        # The schema was checked, so an SQL error means that pages are damaged.
        if isinstance(e, apsw.SQLError):
            raise Corrupt(f"the store {path} is damaged: {e}") from e
        raise Unavailable(f"the store {path} failed: {e}") from e


def _writer_of(path: Path) -> str | None:
    """Return the process that holds the lock for writing, if the system shows it (Linux)."""
    try:
        shared = os.stat(f"{path}-shm")
        locks = _LOCKS.read_text()
    except OSError:
        return None
    device = f"{os.major(shared.st_dev):02x}:{os.minor(shared.st_dev):02x}:{shared.st_ino}"
    held = re.findall(rf" WRITE +([1-9]\d*) {device} (\d+) (\d+)$", locks, re.MULTILINE)
    own = (pid for pid, low, high in held if int(low) <= _WRITING <= int(high))
    return next((f"process {pid}" for pid in own), None)


def _begins_like_one(path: Path) -> bool:
    """Return whether a file begins like a database that may be damaged."""
    try:
        # SQLite reads it: closing a file that SQLite has open would release all of its locks on it.
        flags = apsw.SQLITE_OPEN_MAIN_DB | apsw.SQLITE_OPEN_READONLY
        file = apsw.VFSFile("", str(path.absolute()), [flags, 0])
        try:
            found = file.xRead(len(_MARK), 0)
        finally:
            file.xClose()
    except (apsw.Error, OSError):
        return True  # unknown, so assume damage
    return sum(a == b for a, b in zip(found, _MARK, strict=False)) >= len(_MARK) // 2


def check_library() -> None:
    version = tuple(int(n) for n in apsw.sqlite_lib_version().split("."))
    if version < _OLDEST_SQLITE:
        raise Unavailable(
            f"SQLite {apsw.sqlite_lib_version()} can lose acknowledged commits",
            hint="install a current apsw wheel, which brings its own SQLite",
        )


def connect(path: Path, *, durability: str, read_only: bool, timeout: float) -> apsw.Connection:
    """Open a connection with all settings given explicitly."""
    flags: int = apsw.SQLITE_OPEN_READONLY if read_only else apsw.SQLITE_OPEN_READWRITE
    name = str(path)
    if read_only and fs.is_sealed(path) and not Path(f"{path}-wal").exists():
        name = f"{path.absolute().as_uri()}?immutable=1"  # the file cannot be written
        flags |= apsw.SQLITE_OPEN_URI
    connection = apsw.Connection(name, flags=flags)
    if not read_only and connection.readonly("main"):
        connection.close()  # SQLite opens it read-only if a descriptor or a permission is missing
        raise Unavailable(f"the store {path} cannot be opened for writing")
    connection.set_busy_handler(_patience(timeout))
    connection.execute(f"PRAGMA synchronous = {'FULL' if durability == 'full' else 'NORMAL'}")
    connection.execute("PRAGMA fullfsync = 1")
    connection.execute("PRAGMA checkpoint_fullfsync = 1")
    connection.execute("PRAGMA trusted_schema = 0")
    connection.execute("PRAGMA cell_size_check = 1")
    connection.execute("PRAGMA secure_delete = 1")  # overwrites deleted rows with zeros
    return connection


def _patience(timeout: float) -> Callable[[int], bool]:
    """Return a busy handler that retries after short random pauses.

    SQLite's own handler is unfair to connections that have waited longer.
    """
    started = 0.0

    def busy(count: int) -> bool:
        nonlocal started
        if count == 0:
            started = time.monotonic()
        elif time.monotonic() - started > timeout:
            return False
        time.sleep(random.uniform(*_BACK_OFF))
        return True

    return busy


def create(path: Path, *, durability: str, parents: bool | None) -> None:
    """Create a store at `path`. It appears complete and durable. An existing store is left alone.

    `parents` creates missing parent folders. After an error, nothing is left behind.
    """
    if not parents:
        fs.refuse_missing(path.parent)
    fs.refuse_network(path.parent)
    try:
        with fs.new_folders(path.parent), drafted(path) as draft:
            write_schema(draft, durability=durability)
            fs.sync(draft)
            _refuse_leftovers(path)
            os.link(draft, path)
            fs.sync(path.parent)
    except FileExistsError:
        pass  # another process was faster
    except OSError as e:
        if isinstance(e, Unavailable):
            raise
        raise Unavailable(f"cannot create the store {path}: {e}") from e


@contextmanager
def drafted(path: Path) -> Iterator[Path]:
    """Yield an empty private file next to `path`, and remove it afterwards, with its log."""
    draft = path.with_name(f".{path.name}.{os.urandom(6).hex()}.new")
    try:
        os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        yield draft
    finally:
        _discard(draft)


def _refuse_leftovers(path: Path) -> None:
    """Refuse a path with the log of a removed store: SQLite would apply it to the new store."""
    left = [name for name in (f"{path}-wal", f"{path}-journal") if _has_bytes(name)]
    if left and not path.exists():
        raise Unavailable(
            f"{left[0]} belongs to a store that was removed, and has its last saves",
            hint="restore the store's file; or remove this file, too, if it is not needed",
        )


def _has_bytes(name: str) -> bool:
    try:
        return os.stat(name).st_size > 0
    except OSError:
        return False


def remove_logs(path: Path) -> None:
    """Remove an empty -wal and its -shm, unless another process uses them.

    A read-only connection cannot do that. SQLite does it, under its own locks, when the last
    connection that may write is closed.
    """
    path = path.resolve()
    if _has_bytes(f"{path}-wal") or not os.path.lexists(f"{path}-shm"):
        return
    with suppress(apsw.Error):  # no permission to write
        connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
        try:
            connection.execute("PRAGMA user_version")
        finally:
            connection.close()


def write_schema(draft: Path, *, durability: str) -> None:
    """Write all tables to the main file. Its log must be empty before the file gets its name."""
    connection = connect(draft, durability=durability, read_only=False, timeout=0)
    try:
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        if connection.pragma("journal_mode", "wal") != "wal":
            raise Unavailable(f"cannot use a write-ahead log at {draft.parent}")
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {FORMAT}")
        for sql in SCHEMA.values():
            connection.execute(sql)
        for space in SPACES:
            connection.execute(
                "INSERT INTO counters VALUES (?, ?)", (space, seal_counter(space, 1))
            )
        connection.execute("COMMIT")
        connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
    finally:
        connection.close()
    wal = Path(f"{draft}-wal")
    if wal.exists() and wal.stat().st_size:
        raise Unavailable(f"cannot finish creating {draft}: its log was not written back")


def backup(open_: Callable[[], apsw.Connection], path: Path) -> None:
    """Write a copy of the store, as it is at one moment, to `path`.

    It appears complete and durable.
    """
    for suffix in ("", "-wal", "-shm", "-journal"):  # these files would become part of the copy
        if os.path.lexists(f"{path}{suffix}"):
            raise InvalidRequest(f"{path}{suffix} exists already", hint="choose another path")
    if not path.parent.is_dir():
        raise Unavailable(f"the folder {path.parent} does not exist", hint="make it first")
    try:
        with drafted(path) as draft:
            source = open_()
            try:
                source.execute("VACUUM INTO ?", (str(draft),))
            finally:
                source.close()
            connection = connect(draft, durability="full", read_only=False, timeout=0)
            try:
                connection.pragma("journal_mode", "wal")
                check_schema(connection, draft)
                connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
            finally:
                connection.close()
            fs.sync(draft)
            os.link(draft, path)
            try:
                fs.sync(path.parent)
            except OSError:
                path.unlink()
                raise
    except OSError as e:
        if isinstance(e, HoldfastError):
            raise
        raise Unavailable(f"cannot write the backup {path}: {e}") from e


def _discard(draft: Path) -> None:
    for suffix in ("", "-wal", "-shm", "-journal"):
        try:
            Path(f"{draft}{suffix}").unlink(missing_ok=True)
        except OSError as e:
            logger.warning("could not remove %s%s: %s", draft, suffix, e)


def check_schema(connection: apsw.Connection, path: Path) -> int:
    """Return the format version of an existing store. Raise Corrupt if its tables differ."""
    application = connection.execute("PRAGMA application_id").get
    version: int = connection.execute("PRAGMA user_version").get
    if application != APPLICATION_ID:
        if os.path.getsize(path) == 0:
            raise UnsupportedFormat(
                f"{path} is an empty file, not a store",
                hint="remove it to start with a new store; if it was a store, restore a backup",
            )
        if not _begins_like_one(path):  # SQLite treats a file of one byte as empty
            raise UnsupportedFormat(f"{path} is not a store", hint=_OTHER)
        raise UnsupportedFormat(
            f"{path} is a SQLite database, but no holdfast store", hint="choose another path"
        )
    if version > FORMAT:
        raise UnsupportedFormat(
            f"the store {path} has format {version}; this version knows up to {FORMAT}",
            hint="use a newer holdfast",
        )
    if version not in MIGRATIONS and version != FORMAT:
        raise Corrupt(f"the store {path} declares an impossible format {version}")
    if version in SCHEMAS:
        found = dict(
            connection.execute("SELECT name, sql FROM sqlite_schema WHERE sql IS NOT NULL")
        )
        if found != SCHEMAS[version]:
            wrong = min(repr(name) for name, _ in found.items() ^ SCHEMAS[version].items())
            raise Corrupt(f"the store {path} has lost or changed its table {wrong}")
        if connection.pragma("journal_mode") != "wal" and not _says_wal(connection, path):
            raise Corrupt(f"the store {path} has lost its journal mode")
    return version


def _says_wal(connection: apsw.Connection, path: Path) -> bool:
    """Return whether the header says WAL. For a file opened as immutable, the pragma does not."""
    if not connection.readonly("main"):
        return False
    with path.open("rb") as file:
        return file.read(20)[18:] == b"\2\2"


def migrate(connection: apsw.Connection) -> None:
    """Upgrade an older store to the current format, completely or not at all."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        version: int = connection.execute("PRAGMA user_version").get
        while version < FORMAT:
            for step in MIGRATIONS[version]:
                if isinstance(step, str):
                    connection.execute(step)
                else:
                    step(connection)
            version += 1
        connection.execute(f"PRAGMA user_version = {FORMAT}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # a failed disk has ended the transaction
            connection.execute("ROLLBACK")
        raise


def missing(path: Path) -> StoreNotFound:
    return StoreNotFound(f"there is no store at {path}")
