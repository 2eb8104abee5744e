"""What backends ask of a file system: whole files or none, what is synced, and locks."""

from __future__ import annotations

import errno
import io
import os
import random
import sys
import time
import weakref
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.errors import Unavailable

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import BinaryIO, Self

HAS_LOCKS = fcntl is not None
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ncpfs", "9p", "fuse.sshfs", "glusterfs"}
_MOUNTS = Path("/proc/self/mountinfo")
_BACK_OFF = (50e-6, 600e-6)
_OPEN_AT_ONCE = 64
_SEALED = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT}
"""Why no lock can be made in a store that may only be read."""
TEMPORARY = ".new-"
"""Files whose names begin so are drafts; those that a crash has left behind mean nothing."""


def lasting(path: Path) -> Path:
    """The same place after the process has gone to another folder, too."""
    try:
        return path.absolute()
    except OSError as e:
        raise Unavailable(f"the folder that {path} is in does not exist any more") from e


def is_there(e: OSError) -> bool:
    """Whether something is wrong with a file; False if there is no file at all in that place."""
    return e.errno not in {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP}


def sync(path: Path | str) -> None:
    """fsync a file or directory, and say so if it fails (SQLite ignores a directory's failure)."""
    if os.name == "nt" and os.path.isdir(path):
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        sync_handle(handle)
    finally:
        os.close(handle)


def sync_handle(handle: int) -> None:
    if sys.platform == "darwin":
        fcntl.fcntl(handle, fcntl.F_FULLFSYNC)  # fsync there stops at the disk's own cache
    else:
        os.fsync(handle)


def open_to_write(path: Path | str, how: int = 0) -> int:
    """A file of ours. Never one that a link leads to: that may be anybody's."""
    return os.open(path, how | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def start_writing(handle: int) -> None:
    """Let the disk begin with what is to be synced soon: the sync before that takes it along."""
    if sys.platform == "linux":
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


def write_all(handle: int, data: bytes, at: int) -> None:
    """All of `data` at an offset: a file system may write less than it was asked to."""
    done = 0
    while done < len(data):
        done += os.pwrite(handle, data[done:] if done else data, at + done)


def read_all(handle: int, size: int, at: int) -> bytes:
    """As many bytes at an offset as there are, up to `size`: one call gives 2 GiB at most."""
    data = os.pread(handle, size, at)
    if len(data) == size or not data:
        return data
    parts, done = [data], len(data)
    while done < size and (data := os.pread(handle, size - done, at + done)):
        parts.append(data)
        done += len(data)
    return b"".join(parts)


def replace(path: Path | str, data: bytes, *, durable: bool = True) -> None:
    """A file that is wholly there or, after a crash, as it was: temp, fsync, rename, fsync."""
    parent = os.path.dirname(path)
    draft = f"{parent}/{TEMPORARY}{os.urandom(8).hex()}"
    try:
        handle = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            write_all(handle, data, 0)
            if durable:
                sync_handle(handle)
        finally:
            os.close(handle)
        os.replace(draft, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(draft)
        raise
    if durable:
        sync(parent)


def create(path: Path | str, write: Callable[[BinaryIO], None]) -> None:
    """A new file, which is wholly there or not at all; FileExistsError if there is one by then."""
    parent = os.path.dirname(os.path.abspath(path))
    draft = f"{parent}/{TEMPORARY}{os.urandom(8).hex()}"
    handle = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            sync_handle(handle)
        os.link(draft, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(draft)
    sync(parent)


class Batch:
    """Files that are written one after another, and synced together at the end of a block.

    The first wait for the disk takes along much of what the others would wait for. After a crash
    within the block any part of it may be there: this is for what counts only once something that
    is written later says so.
    """

    def __init__(self, *, durable: bool) -> None:
        self._durable = durable
        self._written: list[tuple[int, Callable[[], None] | None]] = []
        self._folders: dict[str, None] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._sync()
                for folder in self._folders if self._durable else ():
                    sync(folder)
        finally:
            self._close()

    def add(
        self, handle: int, *, folder: str | None = None, then: Callable[[], None] | None = None
    ) -> None:
        """Sync and close a file, and its folder if its name is new; `then` is called after that."""
        self._written.append((handle, then))
        if folder is not None:
            self._folders[folder] = None
        if len(self._written) >= _OPEN_AT_ONCE:
            self._sync()
            self._close()

    def put(self, path: str, data: bytes) -> None:
        """A file that is new, or takes the place of one that counts for nothing."""
        try:
            handle = self._draft(path, data)
        except FileExistsError:  # of an attempt that failed; somebody may be reading it
            draft = f"{os.path.dirname(path)}/{TEMPORARY}{os.urandom(8).hex()}"
            handle = self._draft(draft, data, name=path)
        self.add(handle, folder=os.path.dirname(path))

    def _draft(self, path: str, data: bytes, name: str | None = None) -> int:
        """The handle of a file that was not there, or nothing is left of it."""
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            write_all(handle, data, 0)
            if name is not None:
                os.replace(path, name)
        except BaseException:
            os.close(handle)
            with suppress(FileNotFoundError):
                os.unlink(path)
            raise
        return handle

    def _sync(self) -> None:
        for handle, _ in self._written[1:] if self._durable else ():
            start_writing(handle)
        for handle, then in self._written:
            if self._durable:
                sync_handle(handle)
            if then is not None:
                then()

    def _close(self) -> None:
        while self._written:
            os.close(self._written.pop()[0])


def make_folder(path: Path, *, durable: bool = True) -> None:
    """A folder for us alone, if there is none; durable when this returns."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return
    if durable:
        sync(path.parent)


# -- locks ---------------------------------------------------------------------------------------
# flock belongs to an open file: it excludes threads and processes alike, and dies with its holder.

_held: weakref.WeakSet[io.FileIO] = weakref.WeakSet()


@contextmanager
def locked(
    path: Path | str, timeout: float, *, shared: bool = False, sealed: bool = False
) -> Iterator[None]:
    """Hold a lock; Unavailable names who has it if that takes longer than `timeout` seconds.

    FileNotFoundError if its folder is not there, or goes while it is waited for. If it is `sealed`,
    nothing can be written there: so it must be there, and does not tell who holds it.
    """
    there = sealed or (shared and os.path.exists(path))
    how = os.O_RDONLY if there else os.O_RDWR | os.O_CREAT
    while True:
        # A file object: should we be interrupted before we can close it, it is closed all the same.
        with io.FileIO(path, "rb" if there else "rb+", opener=partial(_open, how)) as file:
            _held.add(file)
            handle = file.fileno()
            _acquire(handle, path, timeout, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
            try:
                if os.stat(path).st_ino != os.fstat(handle).st_ino:
                    continue  # the one that we have is no more
                if not (shared or sealed):
                    _sign(handle)
                yield
                return
            finally:
                if not file.closed:  # as it is in a child, whose parent has the lock
                    # Closing it is not enough: a child may have a copy that `_held` did not know.
                    fcntl.flock(handle, fcntl.LOCK_UN)


@contextmanager
def locked_if_possible(path: Path | str, timeout: float, *, shared: bool) -> Iterator[None]:
    """For who only reads, maybe where nothing can be written: then nobody here removes anything."""
    with ExitStack() as stack:
        for sealed in (False, True):
            try:
                lock = locked(path, timeout, shared=shared, sealed=sealed)
                stack.enter_context(lock)
                break
            except OSError as e:
                if e.errno not in _SEALED:
                    raise
        yield


def _open(how: int, path: str, _: int) -> int:
    return os.open(path, how | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _sign(handle: int) -> None:
    """For who waits: who has the lock."""
    ours = b"%-20d\n" % os.getpid()
    if os.pread(handle, len(ours), 0) != ours:
        os.pwrite(handle, ours, 0)


def _acquire(handle: int, path: Path | str, timeout: float, how: int) -> None:
    deadline: float | None = None
    while True:
        try:
            fcntl.flock(handle, how | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            now = time.monotonic()
            deadline = deadline or now + timeout
            if now >= deadline:
                holder = os.pread(handle, 20, 0).decode(errors="replace").strip()
                raise Unavailable(
                    f"{os.path.dirname(path)} is locked by process {holder or 'unknown'}",
                    hint="it may be stopped; nothing was written, try again",
                ) from None
            time.sleep(random.uniform(*_BACK_OFF))


def _after_fork_in_child() -> None:
    """What the parent's threads have locked stays locked as long as any copy is open."""
    for file in list(_held):
        file.close()
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def file_system(folder: Path) -> str:
    """The kind of file system that a folder lies on; empty where nothing tells."""
    try:
        mounts = _MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""  # not Linux
    where = str(folder.resolve())
    best, kind = "", ""
    for line in mounts:
        before, _, after = line.partition(" - ")
        point = before.split()[4].replace("\\040", " ")
        inside = where == point or where.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, after.split()[0]
    return kind


def is_sealed(path: Path) -> bool:
    """Whether nobody can write a file: by its mount, or by its own and its folder's mode."""
    if hasattr(os, "statvfs") and os.statvfs(path).f_flag & os.ST_RDONLY:
        return True
    return not any(os.stat(each).st_mode & 0o222 for each in (path, path.parent))


def refuse_network(folder: Path) -> None:
    """Locks and, for SQLite, shared memory are those of one machine."""
    kind = file_system(folder)
    if kind in _NETWORK:
        raise Unavailable(
            f"{folder} lies on a network file system ({kind}), where locks are not safe",
            hint="use a local disk, or PostgreSQL for many machines",
        )
