"""The catalog of session folders. It finds sessions and streams by number and name.

A number or a name can exist twice, if a user copied a folder here or restored an older file.
"""

from __future__ import annotations

import os
import re
import threading
import time
import unicodedata
from collections import Counter
from contextlib import contextmanager
from secrets import token_bytes
from typing import TYPE_CHECKING, NamedTuple

from holdfast.errors import Corrupt
from holdfast.format.records import deleted_name, former_name, shown_name
from holdfast.storage import fs
from holdfast.storage.files.log import (
    CHECKPOINTS,
    SESSION,
    STREAMS,
    Identity,
    SessionLog,
    identity_of,
    status,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from holdfast.storage.files.log import NewLine
    from holdfast.storage.memory_tables import OrderedRows
    from holdfast.storage.tables import Index

_MOVE = "one of these folders is a copy, or of another store: move it away, and export() it there"


def clash(what: str, parts: int, paths: Sequence[Path], so: str = "") -> Corrupt:
    """Return the error for a number or name that several folders have.

    The message has the last parts of each path: this many.
    """
    places = " and in ".join(["/".join(path.parts[-parts:]) for path in paths])
    return Corrupt(f"{what} in {places}{so}", hint=_MOVE)


def stream_clash(stream: int, paths: Sequence[Path]) -> Corrupt:
    return clash(f"stream {stream} is", 4, paths, ", so its items are ambiguous")


def given_twice(what: str, folder: Path) -> Corrupt:
    """Return the error for a new number that exists: the counters were set back."""
    return Corrupt(
        f"the number of {what} is taken by {folder}, so nothing was written",
        hint="counters.json is older than what lies beside it: open the store again",
    )


BLOBS = "blobs"
_LONGEST = 100
_SAFE = re.compile(r"[\w .,=+@#!()\[\]{}'&;^$-]")
_STREAM = re.compile(r"(0|[1-9][0-9]{0,11})\.jsonl")
_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?$", re.IGNORECASE)


def escape(name: bytes) -> str:
    """Return a name as a file name.

    Safe characters stay; the escape is reversible unless too long.
    """
    plain = name.decode("utf-8", "surrogateescape")
    parts = [c if _SAFE.match(c) else _hexed(c) for c in plain]
    if parts and parts[0] in (".", " ", "-"):
        parts[0] = _hexed(parts[0])
    if len(parts) > 1 and parts[-1] in (".", " "):
        parts[-1] = _hexed(parts[-1])
    escaped = "".join(parts)
    return f"%{ord(escaped[0]):02X}{escaped[1:]}" if _RESERVED.match(escaped) else escaped


def _hexed(char: str) -> str:
    return "".join([f"%{byte:02X}" for byte in char.encode("utf-8", "surrogateescape")])


def is_too_long(escaped: str) -> bool:
    return not escaped or len(escaped.encode()) > _LONGEST


def shortened(escaped: str) -> str:
    return escaped.encode()[: _LONGEST - 20].decode(errors="ignore")


def fold(name: str) -> str:
    """Return a file name as the least exact file systems compare it."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def blob_path(root: Path, digest: bytes) -> Path:
    """Return the path of a blob. Raise Corrupt if its folder is a link."""
    name = digest.hex()
    folder = root / BLOBS / name[:2]
    fs.refuse_link(folder)
    return folder / f"{name}.json"


def record_path(folder: Path, seq: int) -> Path:
    return folder / CHECKPOINTS / f"{seq:06}.json"


def streams_in(folder: str) -> list[int]:
    """Return the streams in a session's folder. Raise Corrupt if one is a link."""
    if os.path.islink(folder):
        return []  # no session's folder
    fs.refuse_link(f"{folder}/{STREAMS}")
    try:
        with os.scandir(os.path.join(folder, STREAMS)) as entries:
            found = [e for e in entries if e.is_symlink() or e.is_file(follow_symlinks=False)]
    except OSError as e:
        if fs.is_there(e):
            raise
        return []
    ours = [(entry, named) for entry in found if (named := _STREAM.fullmatch(entry.name))]
    for entry, _ in ours:
        if entry.is_symlink():
            raise fs.linked(entry.path)
    return [int(named[1]) for _, named in ours]


LOCK = "lock"
_SETTLED = 2.0
"""Seconds after which no second change can have the same time of change."""


class Folder(NamedTuple):
    """A session's folder and its identity."""

    path: Path
    identity: Identity
    version: tuple[int, int]
    """Inode and time of its session.json."""

    @property
    def is_in_place(self) -> bool:
        """Whether the name of the folder matches a name of the session."""
        plain = {escape(name) for name in self.identity.names}
        named = {shortened(each) if is_too_long(each) else each for each in plain}
        return self.path.name in plain | {f"{each}~{self.identity.number}" for each in named}


class Catalog:
    """All session folders, read once and again after changes.

    A process that creates, renames or removes a folder first writes a new token to the file
    `turns`. Changes by users show in the time of the parent folder.
    """

    def __init__(self, root: Path, turns: Path) -> None:
        self.root, self._turns = root, turns
        self.reset_lock()
        self._seen: tuple[bytes, int, int] | None = None
        """The state of the folder when it was read; None if it may have changed."""
        self._whole = True
        """False during a change. If an interrupt ends the change half-way, everything is read
        again."""
        self._folders: dict[str, Folder | None] = {}
        self._folded: Counter[str] = Counter()
        """The names of all folders, as the least exact file systems compare them."""
        self._numbers: dict[int, Folder] = {}
        self._rivals: dict[str, Folder] = {}
        """By name: folders that share a number, if none of them is clearly the copy."""
        self._names: dict[bytes, list[int]] = {}
        self._listed: list[tuple[bytes, int]] | None = None
        """All names in order; None until they are needed."""
        self._ledgers: dict[int, SessionLog] = {}
        self._streams: dict[int, Path] = {}
        self.merged: tuple[object, dict[Index, OrderedRows]] = (None, {})
        """The indexes that readers built over all ledgers, with the state that they describe."""

    def reset_lock(self) -> None:
        self.lock = threading.RLock()

    def refresh(self, *, force: bool = False, alone: bool = False) -> None:
        """Read changed folders. `alone` means that the caller's lock prevents other changes."""
        with self.lock:
            now = self._now()
            if now != self._seen or force or not self._whole:
                settled = time.time_ns() - now[2] > _SETTLED * 1e9
                self._seen = None
                self._scan()
                self._seen = now if settled or alone else None

    def _now(self) -> tuple[bytes, int, int]:
        try:
            token = fs.read(self._turns)
        except FileNotFoundError:
            token = b""
        status = os.stat(self.root)
        return token, status.st_ino, status.st_mtime_ns

    @contextmanager
    def changing(self, name: str) -> Iterator[None]:
        """Change one folder. The caller holds the lock of names; no other folder is read again."""
        with self.lock:
            self.refresh(alone=True)
            self._seen = None  # in case it fails
            handle = fs.open_to_write(self._turns, os.O_CREAT)
            try:
                os.pwrite(handle, token_bytes(12), 0)
            finally:
                os.close(handle)
        yield
        with self.lock:
            self._whole = False
            self._drop(name)
            if os.path.lexists(self.root / name):
                self._add(name, _version(f"{self.root}/{name}/{SESSION}"))
            self._whole = True
            self._seen = self._now()

    def _scan(self) -> None:
        names = [name for name in sorted(os.listdir(self.root)) if not name.startswith(".")]
        if not self._whole:
            for each in (self._ledgers, self._folders, self._folded, self._numbers, self._names):
                each.clear()
            self._listed = None
        self._whole = False
        self._rivals.clear()  # they have no owner, so read them again
        for gone in self._folders.keys() - set(names):
            self._drop(gone)
        for name in names:
            known, version = self._folders.get(name), _version(f"{self.root}/{name}/{SESSION}")
            if known is None or known.version != version:
                self._drop(name)
                self._add(name, version)
                self._doubt_streams(name)
        self._whole = True

    def _add(self, name: str, version: tuple[int, int]) -> None:
        try:
            identity = _identify(self.root / name)
        except Corrupt:  # a link; refuse_lost() reports it
            identity = None
        if identity is None:
            self._put(name, None)
            return
        folder = Folder(self.root / name, identity, version)
        other = self._numbers.get(identity.number)
        claims = [f for f in self._rivals.values() if f.identity.number == identity.number]
        claims = [*claims, *([other] if other else []), folder]
        if any(claim.is_in_place for claim in claims):  # the others are copies
            claims = [claim for claim in claims if claim.is_in_place]
        if other is not None and claims != [other]:
            self._drop(other.path.name)
            self._put(other.path.name, None)
        if claims != [folder]:
            if len(claims) > 1:
                self._rivals |= {claim.path.name: claim for claim in claims}
            self._put(name, None)
            return
        for copy in [n for n, f in self._rivals.items() if f.identity.number == identity.number]:
            del self._rivals[copy]
        self._put(name, folder)
        self._numbers[identity.number] = folder
        for each in identity.names:
            self._names.setdefault(each, []).append(identity.number)

    def _put(self, name: str, folder: Folder | None) -> None:
        self._listed = None
        self._folders[name] = folder
        self._folded[fold(name)] += 1

    def _drop(self, name: str) -> None:
        if name not in self._folders:
            return
        self._listed = None
        self._rivals.pop(name, None)
        folder = self._folders.pop(name)
        self._folded[fold(name)] -= 1
        if folder is not None:
            number = folder.identity.number
            self._numbers.pop(number, None)
            self._ledgers.pop(number, None)
            for each in folder.identity.names:
                self._names[each].remove(number)

    def folder(self, number: int) -> Folder | None:
        with self.lock:
            if number not in self._numbers:
                self.refresh()
                for rival in self._rivals.values():
                    if rival.identity.number == number:
                        raise self._rivalry(number)
            folder = self._numbers.get(number)
            if folder is not None:
                fs.refuse_link(folder.path)
            return folder

    def folders(self) -> list[Folder]:
        with self.lock:
            self.refresh()
            return [self._numbers[n] for n in sorted(self._numbers)]

    def numbers(self) -> list[int]:
        """Return the numbers of all sessions, also those that two folders share."""
        with self.lock:
            self.refresh()
            return [*self._numbers, *[rival.identity.number for rival in self._rivals.values()]]

    def named(self, name: bytes) -> list[int]:
        """Return the sessions that have or had a name."""
        with self.lock:
            self.refresh()
            return list(self._names.get(name, ()))

    def holder(self, name: bytes) -> int | None:
        """Return the session that has a name now. Raise Corrupt if two have it."""
        with self.lock:
            ledgers = [ledger for n in self.named(name) if (ledger := self.ledger(n))]
            found = [each for each in ledgers if each.there and each.name == name]
            sure = [each for each in found if not each.doubtful] or found
            if len(sure) > 1:
                raise clash(
                    f"there is a session {shown_name(name)!r}", 2, [each.folder for each in sure]
                )
            return sure[0].number if sure else None

    def listed(self) -> list[tuple[bytes, int]]:
        """Return the names in order, each with a session that has, had or may get it.

        Callers must not change this list.
        """
        with self.lock:
            self.refresh()
            if self._listed is None:
                # A damaged log may have a name that the folder never had.
                ledgers = [ledger for n in [*self._numbers] if (ledger := self.ledger(n))]
                pairs = {(ledger.name, ledger.number) for ledger in ledgers}
                for name, numbers in self._names.items():
                    for number in numbers:
                        plain = former_name(number, name) or name
                        pairs |= {(plain, number), (deleted_name(number, plain), number)}
                self._listed = sorted(pairs)
            return self._listed

    def twins(self) -> Iterator[Corrupt]:
        """Yield an error for each name that two sessions have."""
        with self.lock:
            self.refresh()
            names = [name for name, numbers in self._names.items() if len(numbers) > 1]
        for name in names:
            try:
                self.holder(name)
            except Corrupt as e:
                yield e

    def refuse_lost(self, name: bytes) -> None:
        """Raise Corrupt if a folder that cannot be identified may have a session of this name."""
        with self.lock:
            for rival in self._rivals.values():
                if name in rival.identity.names:
                    raise self._rivalry(rival.identity.number)
            place = self.root / escape(name)
            if self._folders.get(place.name, self) is not None:
                return
            identity = _identify(place)
            if identity is not None and name in identity.names:
                raise Corrupt(
                    f"the folder {place} has the number of another session",
                    hint="one of the two is of another store: move it away, and copy() it there",
                )
            records = place / CHECKPOINTS
            if identity is None and records.is_dir() and any(records.iterdir()):
                raise Corrupt(
                    f"the folder {place} has checkpoints, but its session is unknown",
                    hint=f"put back its {SESSION} or its log, or move it away",
                )

    def unknown(self) -> list[str]:
        """Return the folders with checkpoints that belong to no known session."""
        with self.lock:
            self.refresh()
            return sorted(
                name for name, f in self._folders.items()
                if f is None
                and name not in self._rivals
                and (self.root / name / CHECKPOINTS).exists()
            )  # fmt: skip

    def ledger(self, number: int) -> SessionLog | None:
        """Return the current log of a session; None if there is no such session."""
        with self.lock:
            folder = self.folder(number)
            if folder is None:
                return None
            for name in (CHECKPOINTS, STREAMS):
                fs.refuse_link(f"{folder.path}/{name}")
            ledger = self._ledgers.pop(number, None)
            found = status(folder.path)
            if ledger is None or (ledger.inode, ledger.size) != found:
                ledger = self._read(folder, ledger, found)
            if not ledger.entries and found is None:
                return None
            if ledger.number != number:  # gc has removed it, and a new session has its folder
                self.refresh(force=True)
                return None
            self._ledgers[number] = ledger
            return ledger

    def _read(
        self, folder: Folder, known: SessionLog | None, now: tuple[int, int] | None
    ) -> SessionLog:
        number = folder.identity.number
        ledger = SessionLog(folder.path, number)
        if known is not None and now is not None and known.inode == now[0]:
            ledger = known.copy() if known.pins else known
        if not ledger.read():
            ledger = SessionLog(folder.path, number)
            ledger.read()
        if ledger.damaged:
            ledger.complete(folder.identity)
            ledger.find_records()
            ledger.doubt(folder.identity.names)
        return ledger

    def advance(self, ledger: SessionLog, line: NewLine, inode: int, end: int) -> SessionLog:
        """Return the ledger after a line was written to the log."""
        with self.lock:
            if ledger.entries < line.entry["n"]:  # otherwise another thread has read it already
                # Not kept during the change: if it is interrupted, it has only half of the line.
                self._ledgers.pop(ledger.number, None)
                ledger = ledger.copy() if ledger.pins else ledger
                ledger.advance(line, inode, end)
            self._ledgers[ledger.number] = ledger
            return ledger

    def number_of(self, name: str) -> int | None:
        """Return the number of the session in a folder of this name."""
        with self.lock:
            folder = self._folders.get(name)
            return None if folder is None else folder.identity.number

    def forget(self, path: Path) -> None:
        """Drop the ledger of a folder, so that it is read again."""
        with self.lock:
            number = self.number_of(path.name)
            if number is not None:
                self._ledgers.pop(number, None)

    def reload(self) -> None:
        with self.lock:
            self._whole = False
            self.refresh(force=True)

    def stream(self, stream: int) -> Path | None:
        """Return the path of a stream. Raise Corrupt if several folders have it."""
        with self.lock:
            path = self._streams.get(stream)
            if path is None or not path.exists():
                found = self._places_of_streams()
                self._streams = {n: paths[0] for n, paths in found.items() if len(paths) == 1}
                if len(found.get(stream, ())) > 1:
                    raise stream_clash(stream, found[stream])
                path = self._streams.get(stream)
            if path is not None:
                places = [path.parent.parent, path.parent]
            else:  # it may be in a folder that is a link
                places = [self.root / name for name in os.listdir(self.root)]
            for each in places:
                fs.refuse_link(each)
            return path

    def streams(self) -> list[tuple[int, Path]]:
        """Return all streams in order, also those of removed sessions."""
        found = sorted(self._places_of_streams().items())
        return [(stream, path) for stream, paths in found for path in paths]

    def _places_of_streams(self) -> dict[int, list[Path]]:
        """Return the paths of each stream. There are several if a user copied a folder here.

        Streams of copies that are no sessions count only if no session has them.
        """
        found: dict[int, list[tuple[bool, Path]]] = {}
        for name in os.listdir(self.root):
            claimed = self.number_of(name) is not None or name in self._rivals
            ours = claimed or self.is_over(name)
            for stream in streams_in(f"{self.root}/{name}"):
                path = self.root / name / STREAMS / f"{stream}.jsonl"
                found.setdefault(stream, []).append((ours, path))
        places = {}
        for stream, claims in found.items():
            best = max([ours for ours, _ in claims])
            places[stream] = sorted(path for ours, path in claims if ours == best)
        return places

    def clashes(self) -> list[Corrupt]:
        """Return an error for each number of a session or stream that several folders have."""
        with self.lock:
            numbers = {rival.identity.number for rival in self._rivals.values()}
            found = [self._rivalry(number) for number in sorted(numbers)]
        places = sorted(self._places_of_streams().items())
        return found + [stream_clash(stream, paths) for stream, paths in places if len(paths) > 1]

    def refuse_rivals(self) -> None:
        """Raise Corrupt if two folders share a number.

        One may be a fork, and lists have neither.
        """
        with self.lock:
            self.refresh()
            for rival in self._rivals.values():
                raise self._rivalry(rival.identity.number)

    def _rivalry(self, number: int) -> Corrupt:
        rivals = [f.path for f in self._rivals.values() if f.identity.number == number]
        return clash(f"session {number} is", 2, sorted(rivals), ", so it is ambiguous")

    def refuse_taken(self, stream: int, path: Path) -> None:
        """Raise Corrupt if another folder is known to have a stream that is new here."""
        with self.lock:
            known = self._streams.get(stream)
            if known is not None and known != path and known.exists():
                raise given_twice(f"stream {stream}", known.parent.parent)

    def _doubt_streams(self, name: str) -> None:
        """Forget the places of streams that a new folder has as well."""
        for stream in streams_in(f"{self.root}/{name}"):
            known = self._streams.get(stream)
            if known is not None and known.parent.parent.name != name:
                del self._streams[stream]

    def is_over(self, name: str) -> bool:
        """Return whether gc removed the session of a folder and left only its streams."""
        with self.lock:
            gone = name in self._folders and self._folders[name] is None
            path = self.root / name
            if not gone or path.is_symlink() or not path.is_dir():
                return False
            return set(os.listdir(path)) <= {LOCK, STREAMS}

    def place(self, number: int, name: bytes) -> Path:
        """Return a free folder for a new session, on any file system."""
        escaped = escape(name)
        plain = self.root / escaped
        with self.lock:
            if number in self._numbers:
                raise given_twice(f"session {number}", self._numbers[number].path)
            if is_too_long(escaped):
                return self.root / f"{shortened(escaped)}~{number}"
            taken = self._folded[fold(escaped)] > 0
        return self.root / f"{escaped}~{number}" if taken else plain


def _version(path: str) -> tuple[int, int]:
    try:
        status = os.lstat(path)
    except OSError as e:
        if fs.is_there(e):
            raise
        return 0, 0
    return status.st_ino, status.st_mtime_ns


def _identify(path: Path) -> Identity | None:
    """Return the identity of a folder, from its file or else from its log. None if it is no
    session.

    Raise Corrupt if one of these is a link.
    """
    fs.refuse_link(path)
    found = identity_of(path)
    if found is None:
        ledger = SessionLog(path)
        try:
            ledger.read()
        except OSError as e:
            if fs.is_there(e):
                raise
        if ledger.number:
            number, name, origin, body = ledger.tables["sessions"].rows[ledger.number,]
            former = former_name(number, name)
            names = (name,) if former is None else (name, former)
            found = Identity(number, names, body, origin)
    return found
