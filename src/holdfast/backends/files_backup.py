"""A copy of a store of files, as of one moment."""

from __future__ import annotations

import os
import secrets
import shutil
from typing import TYPE_CHECKING

from holdfast.backends import disk
from holdfast.backends.files_hints import hint
from holdfast.backends.files_home import LOCKS, SESSIONS
from holdfast.backends.files_identity import SESSION
from holdfast.backends.files_journal import JOURNAL, LAST, last_known
from holdfast.backends.files_ledger import CHECKPOINTS, HEAD, LOG, STREAMS
from holdfast.backends.files_names import BLOBS, record_path
from holdfast.errors import InvalidRequest, Unavailable

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.backends.files_home import Home
    from holdfast.backends.files_ledger import Ledger


def backup(home: Home, path: Path, others: tuple[str, ...], marker: str) -> None:
    """Complete and durable when it appears. Savers wait only until all logs were looked at."""
    if os.path.lexists(path):
        raise InvalidRequest(f"{path} exists already", hint="choose another path")
    if not path.parent.is_dir():
        raise Unavailable(f"the folder {path.parent} does not exist")
    draft = path.with_name(f".{path.name}.{secrets.token_hex(6)}.new")
    with home.reading():  # nothing goes while it is copied
        ledgers = _moment(home)
        try:
            os.mkdir(draft, 0o700)
            for name in (SESSIONS, BLOBS, LOCKS):
                os.mkdir(draft / name, 0o700)
            for ledger in ledgers:
                _copy_session(ledger, draft / SESSIONS / ledger.folder.name)
            _copy_streams(home, draft / SESSIONS)
            shutil.copytree(home.root / BLOBS, draft / BLOBS, dirs_exist_ok=True, ignore=_drafts)
            for name in (*others, marker):
                shutil.copyfile(home.root / name, draft / name)
            for folder, _, files in os.walk(draft, topdown=False):
                for file in files:
                    os.chmod(os.path.join(folder, file), 0o600)
                    disk.sync(os.path.join(folder, file))
                disk.sync(folder)
            os.rename(draft, path)
            disk.sync(path.parent)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise


def _drafts(_: str, names: list[str]) -> set[str]:
    return {name for name in names if name.startswith(disk.TEMPORARY)}


def _moment(home: Home) -> list[Ledger]:
    """What all sessions hold while nobody writes."""
    with home.names():
        home.catalog.refuse_rivals()
        numbers = [folder.identity.number for folder in home.catalog.folders()]
        with home.sessions([], numbers):
            found = [home.catalog.ledger(number) for number in numbers]
            return [ledger.copy() for ledger in found if ledger is not None and ledger.there]


def _copy_session(ledger: Ledger, target: Path) -> None:
    for folder in (target, target / CHECKPOINTS, target / STREAMS):
        os.mkdir(folder, 0o700)
    for seq in ledger.order:
        source = record_path(ledger.folder, seq)
        if source.exists():  # otherwise it is missing there, too
            shutil.copyfile(source, record_path(target, seq))
    if (ledger.folder / SESSION).exists():
        shutil.copyfile(ledger.folder / SESSION, target / SESSION)
    (target / HEAD).write_bytes(hint(ledger.entries))
    known = last_known(ledger)  # first: who writes meanwhile tells of an entry after it is there
    if (ledger.folder / JOURNAL).exists():
        journal = (ledger.folder / JOURNAL).read_bytes()
        (target / JOURNAL).write_bytes(journal[: journal.rfind(b"\n") + 1])
        (target / LAST).write_bytes(hint(known))
    if ledger.size:  # otherwise it is missing there, too
        with open(ledger.folder / LOG, "rb") as log:
            (target / LOG).write_bytes(log.read(ledger.size))


def _copy_streams(home: Home, root: Path) -> None:
    """All that is there, also of sessions that are gone: others may need it.

    What was not committed is as a crash would leave it. How much was, a log may not tell any more:
    lines that were lost, and accepted as that, have said so.
    """
    for _, source in home.catalog.streams():
        target = root / source.relative_to(home.catalog.root)
        for folder in (target.parent.parent, target.parent):
            disk.make_folder(folder, durable=False)
        shutil.copyfile(source, target)
