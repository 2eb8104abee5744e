"""`holdfast doctor`: is this machine fit, is the store, and what is to be done."""

from __future__ import annotations

import datetime as dt
import os
import platform
import shutil
import stat
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import click

from holdfast.cli import words
from holdfast.cli.app import App, command
from holdfast.cli.wording import in_our_words, nothing_more_to_check
from holdfast.errors import HoldfastError, StoreNotFound

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast import Store

_LITTLE_SPACE = 1 << 30
_PATIENCE = 2.0
_AHEAD = dt.timedelta(minutes=5)
_SIGNS = {"ok": ("✓", "green"), "note": ("!", "yellow"), "bad": ("✗", "red")}
_EXTRAS = {"postgres": "psycopg", "otel": "opentelemetry"}


class Finding(NamedTuple):
    about: str
    how: Literal["ok", "note", "bad"]
    what: str
    do: str | None = None


@command("doctor")
def doctor_(app: App) -> None:
    """Check this machine and the store, and say what to do; exit code 1 if something is wrong."""
    wrong = False
    for finding in _findings(app):
        wrong = wrong or finding.how == "bad"
        if app.json:
            app.emit(finding._asdict())
            continue
        mark, colour = _SIGNS[finding.how]
        app.say(f"{click.style(mark, fg=colour)} {finding.about}: {finding.what}")
        if finding.do:
            app.say(f"    {click.style('Do:', fg='cyan')} {finding.do}")
    if wrong:
        raise click.exceptions.Exit(1)


def _findings(app: App) -> Iterator[Finding]:
    yield from _machine()
    path = _path(app.url)
    if path is not None:
        yield from _disk(path)
    try:
        with nothing_more_to_check(), app.store() as store:
            yield Finding("store", "ok", f"{app.url} ({store.backend.name})")
            yield from _clock(store)
            yield from _records(store)
    except StoreNotFound:
        yield Finding("store", "note", f"there is none at {app.url}", app.command("init"))
        return
    except HoldfastError as e:
        message, hint = in_our_words(e)
        yield Finding("store", "bad", message, hint)
        return
    if path is None or not path.exists() or os.access(path, os.W_OK):
        yield _locks(app.url)


def _machine() -> Iterator[Finding]:
    version, system = platform.python_version(), platform.system()
    ok = sys.version_info >= (3, 11)
    yield Finding("python", "ok" if ok else "bad", f"{version} on {system}",
                  None if ok else "use Python 3.11 or newer")  # fmt: skip
    import apsw

    from holdfast.backends.sqlite_file import check_library

    try:
        check_library()
        yield Finding("sqlite", "ok", f"{apsw.sqlite_lib_version()} (apsw {apsw.apsw_version()})")
    except HoldfastError as e:
        yield Finding("sqlite", "bad", e.message, e.hint)
    there = [name for name, module in _EXTRAS.items() if find_spec(module) is not None]
    shown = f"{metadata.version('holdfast')}, with {', '.join(there) or 'no extras'}"
    yield Finding("holdfast", "ok", shown)


def _path(url: str) -> Path | None:
    """Where on this machine the store lies, if it does."""
    if url.startswith(("postgres:", "postgresql:")) or url == "memory:":
        return None
    return Path(url.removeprefix("files:").removeprefix("sqlite:")).absolute()


def _disk(path: Path) -> Iterator[Finding]:
    from holdfast.backends import disk

    folder = path if path.is_dir() else path.parent
    if not folder.is_dir():
        yield Finding("disk", "note", f"the folder {folder} does not exist", f"mkdir -p {folder}")
        return
    kind = disk.file_system(folder)
    try:
        disk.refuse_network(folder)
    except HoldfastError as e:
        yield Finding("disk", "bad", e.message, e.hint)
    free = shutil.disk_usage(folder).free
    little = free < _LITTLE_SPACE
    shown = f"{words.size(free)} free" + (f" on {kind}" if kind else "")
    yield Finding("disk", "note" if little else "ok", shown, "make room" if little else None)
    shut = next((p for p in (folder, path) if p.exists() and not os.access(p, os.W_OK)), None)
    if shut is not None:
        yield Finding("rights", "note", f"{shut} cannot be written: the store is only read",
                      f"let this user write {shut}")  # fmt: skip
    elif (
        path.exists() and os.name == "posix" and path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    ):
        yield Finding("rights", "note", f"{path} can be read by others", f"chmod go= {path}")
    else:
        yield Finding("rights", "ok", "the store can be written, and others cannot read it")


def _clock(store: Store) -> Iterator[Finding]:
    newest = next((c for c in store.find(limit=1) if not c.damaged), None)
    now = dt.datetime.now(dt.UTC)
    if newest is not None and newest.created_at > now + _AHEAD:
        when = f"the newest checkpoint is from {newest.created_at:%Y-%m-%d %H:%M}, later than now"
        yield Finding("clock", "note", f"{when}; ages are wrong, order is not", "set the clock")
    else:
        yield Finding("clock", "ok", f"{now:%Y-%m-%d %H:%M} UTC")


def _records(store: Store) -> Iterator[Finding]:
    report = store.verify(read_data=False)
    if report.ok:
        count = words.plural(report.checkpoints, "checkpoint")
        yield Finding(
            "records", "ok", f"{words.plural(report.sessions, 'session')}, {count}, all sound"
        )
        return
    for problem in report.problems[:10]:
        yield Finding("records", "bad", str(problem))
    count = words.plural(len(report.problems), "problem")
    yield Finding("records", "bad", count, "holdfast check --read-data, then holdfast repair")


def _locks(url: str) -> Finding:
    """Whether a commit would get its turn. This takes the lock, and changes nothing."""
    import holdfast

    try:
        with holdfast.open(url, create=False, timeout=_PATIENCE) as store:
            store.backend.renew(0, b"")
    except HoldfastError as e:
        return Finding("locks", "bad", *in_our_words(e))
    return Finding("locks", "ok", "nobody keeps others from writing")
