"""Check a machine and a store for everything that keeps the store from working."""

from __future__ import annotations

import datetime as dt
import os
import platform
import shutil
import stat
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from holdfast.errors import UNREADABLE, Corrupt, HoldfastError, StoreNotFound
from holdfast.history.filters import Query, checkpoints
from holdfast.maintenance.verify import verify
from holdfast.storage import fs
from holdfast.storage.url import open_backend

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.storage.contract import Backend

_LITTLE_SPACE = 1 << 30
_LOCK_TIMEOUT = 2.0
"""Seconds to wait for the lock of the store."""
_CLOCK_ERROR = dt.timedelta(minutes=5)
_LISTED = 10
"""How many problems of records are listed one by one."""
_EXTRAS = {"postgres": "psycopg", "otel": "opentelemetry"}


class Finding(NamedTuple):
    """The result of one check."""

    about: str
    """The subject: "python", "sqlite", "holdfast", "disk", "rights", "store", "clock", "records" or
    "locks"."""
    how: Literal["ok", "note", "bad"]
    """"bad" keeps the store from working; "note" is worth a look."""
    what: str
    """What was checked, and what was found."""
    do: str | None = None
    """The advice, if there is any."""
    error: HoldfastError | None = None
    """The error that the check ended with, if any."""


def diagnose(url: str | os.PathLike[str]) -> Iterator[Finding]:
    """Check this machine and the store at an address, and yield what is found.

    Checks the Python and SQLite versions, the file system, space and permissions of the disk, the
    clock, the records of all checkpoints, and the lock for writing. Nothing is changed. Damage and
    a missing store are findings; they do not raise.
    """
    address = os.fspath(url)
    yield _python()
    yield _sqlite()
    yield _package()
    path = _path(address)
    if path is not None:
        yield from _disk(path)
    try:
        backend = open_backend(address, create=False, read_only=True)
        try:
            yield Finding("store", "ok", f"{address} ({backend.name})")
            yield _clock(backend)
            yield from _records(backend)
        finally:
            backend.close()
    except StoreNotFound as e:
        yield Finding("store", "note", f"there is none at {address}", e.hint, e)
        return
    except HoldfastError as e:
        yield _failed("store", e)
        return
    if path is None or not path.exists() or os.access(path, os.W_OK):
        yield _lock(address)


def _failed(about: str, error: HoldfastError) -> Finding:
    if isinstance(error, Corrupt) and error.hint == error.default_hint:
        hint = "the store is too damaged to list its damage; restore a backup"
        error = Corrupt(error.message, hint=hint)
    return Finding(about, "bad", error.message, error.hint, error)


def _python() -> Finding:
    return Finding("python", "ok", f"{platform.python_version()} on {platform.system()}")


def _sqlite() -> Finding:
    import apsw

    from holdfast.storage.sqlite.schema import check_library

    try:
        check_library()
    except HoldfastError as e:
        return _failed("sqlite", e)
    return Finding("sqlite", "ok", f"{apsw.sqlite_lib_version()} (apsw {apsw.apsw_version()})")


def _package() -> Finding:
    extras = [name for name, module in _EXTRAS.items() if find_spec(module) is not None]
    what = f"{metadata.version('holdfast')}, with {', '.join(extras) or 'no extras'}"
    return Finding("holdfast", "ok", what)


def _path(url: str) -> Path | None:
    """Return the path of a store on this machine; None for other stores."""
    if url.startswith(("postgres:", "postgresql:")) or url == "memory:":
        return None
    return Path(url.removeprefix("files:").removeprefix("sqlite:")).absolute()


def _disk(path: Path) -> Iterator[Finding]:
    folder = path if path.is_dir() else path.parent
    if not folder.is_dir():
        yield Finding("disk", "note", f"the folder {folder} does not exist", f"mkdir -p {folder}")
        return
    try:
        fs.refuse_network(folder)
    except HoldfastError as e:
        yield _failed("disk", e)
    free = shutil.disk_usage(folder).free
    kind = fs.file_system(folder)
    what = f"{free / 1e9:,.1f} GB free" + (f" on {kind}" if kind else "")
    if free < _LITTLE_SPACE:
        yield Finding("disk", "note", what, "make room")
    else:
        yield Finding("disk", "ok", what)
    yield _rights(folder, path)


def _rights(folder: Path, path: Path) -> Finding:
    for place in (folder, path):
        if place.exists() and not os.access(place, os.W_OK):
            what = f"{place} is not writable, so the store can only be read"
            return Finding("rights", "note", what, f"let this user write {place}")
    is_open = path.exists() and path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    if is_open and os.name == "posix":
        return Finding("rights", "note", f"other users can read {path}", f"chmod go= {path}")
    return Finding("rights", "ok", "the store is writable, and other users cannot read it")


def _clock(backend: Backend) -> Finding:
    try:
        newest = next(checkpoints(backend, Query(), limit=1), None)
    except UNREADABLE:
        newest = None  # the findings about records list the damage
    now = dt.datetime.now(dt.UTC)
    if newest is not None and newest.created_at > now + _CLOCK_ERROR:
        what = (
            f"the newest checkpoint is from {newest.created_at:%Y-%m-%d %H:%M}, later than now: "
            "ages are wrong, the order is right"
        )
        return Finding("clock", "note", what, "set the clock")
    return Finding("clock", "ok", f"{now:%Y-%m-%d %H:%M} UTC")


def _records(backend: Backend) -> Iterator[Finding]:
    report = verify(backend, read_data=False)
    if report.ok:
        sessions = _count(report.sessions, "session")
        checkpoints = _count(report.checkpoints, "checkpoint")
        yield Finding("records", "ok", f"{sessions}, {checkpoints}, all sound")
        return
    for problem in report.problems[:_LISTED]:
        yield Finding("records", "bad", str(problem))
    do = "holdfast verify --read-data, then holdfast repair"
    yield Finding("records", "bad", _count(len(report.problems), "problem"), do)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _lock(url: str) -> Finding:
    """Take the lock for writing, and release it. Nothing is changed."""
    try:
        backend = open_backend(url, create=False, timeout=_LOCK_TIMEOUT)
        try:
            backend.renew(0, b"")
        finally:
            backend.close()
    except HoldfastError as e:
        return _failed("locks", e)
    return Finding("locks", "ok", "no process keeps others from writing")
