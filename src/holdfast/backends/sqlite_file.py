"""A store as a SQLite file: making one, opening one, and SQLite's errors in our words."""

from __future__ import annotations

import os
import random
import re
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import apsw

from holdfast.backends import disk
from holdfast.codec.records import SPACES, seal_counter
from holdfast.errors import (
    Corrupt,
    HoldfastError,
    InvalidRequest,
    StoreNotFound,
    Unavailable,
    UnsupportedFormat,
)
from holdfast.logs import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


APPLICATION_ID = 0x484F4C44  # "HOLD"
FORMAT = 1

# Keys are packed integers (session<<32|seq, stream<<24|item): composite keys WITHOUT ROWID spill
# rows above 1 KB into overflow pages. `names` finds a session a second way: a name that both it and
# the index of `sessions` miss does not exist, one that only one of them misses is damage.
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
}
SCHEMA = {name: f"CREATE TABLE {name} {columns}" for name, columns in _TABLES.items()} | {
    "marks_by_value": "CREATE INDEX marks_by_value ON marks (kind, value, pos)",
    "forks": "CREATE INDEX forks ON sessions (origin) WHERE origin IS NOT NULL",
    "gaps_by_ancestor": "CREATE INDEX gaps_by_ancestor ON gaps (ancestor) "
    "WHERE ancestor IS NOT NULL",
}

# From which format version to the next: statements, run in one transaction when a store is opened.
MIGRATIONS: dict[int, tuple[str, ...]] = {}

# All before it can lose acknowledged commits when connections write and reset the WAL together.
_OLDEST_SQLITE = (3, 51, 3)
_BACK_OFF = (50e-6, 600e-6)
_LOCKS = Path("/proc/locks")
_WRITING = 120
"""The byte of the shared memory that a writer locks; SQLite's documents tell."""
_MARK = b"SQLite format 3\0"  # what a database begins with
_OTHER = "is it the right file? if it was a store, put a backup back"


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """SQLite's errors as ours."""
    try:
        yield
    except apsw.NotADBError as e:
        if not _begins_like_one(path):
            raise UnsupportedFormat(f"{path} is not a store", hint=_OTHER) from e
        raise Corrupt(f"the first bytes of the store {path} are damaged", hint=_OTHER) from e
    except (apsw.CorruptError, apsw.FormatError) as e:
        raise Corrupt(f"the store {path} is damaged: {e}") from e
    except (UnicodeDecodeError, OverflowError) as e:  # a column's type was damaged
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
            hint="also who only reads has to be able to write beside it, unless nobody can",
        ) from e
    except (apsw.ThreadingViolationError, apsw.ConnectionClosedError):
        raise
    except apsw.Error as e:
        # An SQL error on a schema that was checked means that pages lie about it.
        if isinstance(e, apsw.SQLError):
            raise Corrupt(f"the store {path} is damaged: {e}") from e
        raise Unavailable(f"the store {path} failed: {e}") from e


def _writer_of(path: Path) -> str | None:
    """The process that holds the lock for writing, where the system tells (Linux)."""
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
    """Whether so much of SQLite's mark is in its place that this is a database with damage."""
    try:
        # By SQLite: if we closed a file that it has open, all its locks on that would be gone.
        flags = apsw.SQLITE_OPEN_MAIN_DB | apsw.SQLITE_OPEN_READONLY
        file = apsw.VFSFile("", str(path.absolute()), [flags, 0])
        try:
            found = file.xRead(len(_MARK), 0)
        finally:
            file.xClose()
    except (apsw.Error, OSError):
        return True  # nobody can tell, and damage is the graver of the two
    return sum(a == b for a, b in zip(found, _MARK, strict=False)) >= len(_MARK) // 2


def check_library() -> None:
    version = tuple(int(n) for n in apsw.sqlite_lib_version().split("."))
    if version < _OLDEST_SQLITE:
        raise Unavailable(
            f"SQLite {apsw.sqlite_lib_version()} can lose acknowledged commits",
            hint="install a current apsw wheel, which brings its own SQLite",
        )


def connect(path: Path, *, durability: str, read_only: bool, timeout: float) -> apsw.Connection:
    """A connection with everything set explicitly."""
    flags: int = apsw.SQLITE_OPEN_READONLY if read_only else apsw.SQLITE_OPEN_READWRITE
    name = str(path)
    if read_only and disk.is_sealed(path) and not Path(f"{path}-wal").exists():
        name = f"{path.absolute().as_uri()}?immutable=1"  # nobody can write, so nobody does
        flags |= apsw.SQLITE_OPEN_URI
    connection = apsw.Connection(name, flags=flags)
    if not read_only and connection.readonly("main"):
        connection.close()  # SQLite falls back to reading when a descriptor or a right is missing
        raise Unavailable(f"the store {path} cannot be opened for writing")
    connection.set_busy_handler(_patience(timeout))
    connection.execute(f"PRAGMA synchronous = {'FULL' if durability == 'full' else 'NORMAL'}")
    connection.execute("PRAGMA fullfsync = 1")
    connection.execute("PRAGMA checkpoint_fullfsync = 1")
    connection.execute("PRAGMA trusted_schema = 0")
    connection.execute("PRAGMA cell_size_check = 1")
    return connection


def _patience(timeout: float) -> Callable[[int], bool]:
    """Retry after a short random pause: SQLite's own waiting is unfair to those who came first."""
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


def create(path: Path, *, durability: str) -> None:
    """A new store at `path`, complete and durable when it appears; or leave one that is there."""
    disk.refuse_network(path.parent)
    try:
        with drafted(path) as draft:
            _write_schema(draft, durability=durability)
            disk.sync(draft)
            _refuse_leftovers(path)
            os.link(draft, path)
            disk.sync(path.parent)
    except FileExistsError:
        pass  # another process was faster
    except OSError as e:
        if isinstance(e, Unavailable):
            raise
        raise Unavailable(f"cannot create the store {path}: {e}") from e


@contextmanager
def drafted(path: Path) -> Iterator[Path]:
    """An empty file beside another, for us alone to read; it goes, with all that is beside it."""
    draft = path.with_name(f".{path.name}.{os.urandom(6).hex()}.new")
    try:
        os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        yield draft
    finally:
        _discard(draft)


def _refuse_leftovers(path: Path) -> None:
    """SQLite would take the log of a store that is gone for that of the new one."""
    left = [name for name in (f"{path}-wal", f"{path}-journal") if _has_bytes(name)]
    if left and not path.exists():
        raise Unavailable(
            f"{left[0]} is left of a store that is gone, and holds what was saved there last",
            hint="put the store's file back; or, if nothing of it is wanted, remove this one, too",
        )


def _has_bytes(name: str) -> bool:
    try:
        return os.stat(name).st_size > 0
    except OSError:
        return False


def _write_schema(draft: Path, *, durability: str) -> None:
    """All tables, in the main file alone: its WAL must be empty before the file gets its name."""
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
    """A copy of the store at `path`, as of one moment; complete and durable when it appears."""
    for suffix in ("", "-wal", "-shm", "-journal"):  # the others would become part of the copy
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
            disk.sync(draft)
            os.link(draft, path)
            try:
                disk.sync(path.parent)
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
    """The format version of an existing store, whose tables must be exactly ours."""
    application = connection.execute("PRAGMA application_id").get
    version: int = connection.execute("PRAGMA user_version").get
    if application != APPLICATION_ID:
        if os.path.getsize(path) == 0:
            raise UnsupportedFormat(
                f"{path} is an empty file, not a store",
                hint="remove it to start anew; if it was a store, put a backup back",
            )
        if not _begins_like_one(path):  # a single byte is for SQLite as good as none
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
    if version == FORMAT:
        found = dict(
            connection.execute("SELECT name, sql FROM sqlite_schema WHERE sql IS NOT NULL")
        )
        if found != SCHEMA:
            wrong = min(repr(name) for name, _ in found.items() ^ SCHEMA.items())
            raise Corrupt(f"the store {path} has lost or changed its table {wrong}")
        if connection.pragma("journal_mode") != "wal" and not _says_wal(connection, path):
            raise Corrupt(f"the store {path} has lost its journal mode")
    return version


def _says_wal(connection: apsw.Connection, path: Path) -> bool:
    """Of one that is opened as immutable, the pragma does not tell; its header does."""
    if not connection.readonly("main"):
        return False
    with path.open("rb") as file:
        return file.read(20)[18:] == b"\2\2"


def migrate(connection: apsw.Connection) -> None:
    """Bring an older store to the current format, all or nothing."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        version: int = connection.execute("PRAGMA user_version").get
        while version < FORMAT:
            for sql in MIGRATIONS[version]:
                connection.execute(sql)
            version += 1
        connection.execute(f"PRAGMA user_version = {FORMAT}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # a disk that failed has ended it
            connection.execute("ROLLBACK")
        raise


def missing(path: Path) -> StoreNotFound:
    return StoreNotFound(f"there is no store at {path}")
