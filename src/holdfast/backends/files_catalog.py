"""Which folder is whose: sessions by number and name, and the ledgers that were read of them."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from contextlib import contextmanager
from secrets import token_bytes
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.backends import disk
from holdfast.backends.files_clashes import (
    given_twice,
    name_clash,
    session_clash,
    stream_clash,
)
from holdfast.backends.files_identity import SESSION, Identity, identity_of
from holdfast.backends.files_ledger import CHECKPOINTS, STREAMS, Ledger, status
from holdfast.backends.files_names import escape, fold, is_too_long, shortened, streams_in
from holdfast.codec.records import former_name
from holdfast.errors import Corrupt

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from holdfast.backends.base import Change

LOCK = "lock"
_SETTLED = 2.0
"""Seconds after which a folder's time of change is believed to be of its last change."""


class Folder(NamedTuple):
    """A session's folder, and whose it is."""

    path: Path
    identity: Identity
    version: tuple[int, int]
    """Of the file that says so."""

    @property
    def is_in_place(self) -> bool:
        """Whether it lies where we would have made it."""
        plain = {escape(name) for name in self.identity.names}
        named = {shortened(each) if is_too_long(each) else each for each in plain}
        return self.path.name in plain | {f"{each}~{self.identity.number}" for each in named}


class Catalog:
    """All folders of sessions, read once and looked at again when something was added.

    Who makes, renames or removes one says so first, by a new token in the file `turns`; people who
    copy folders are known by the time of the folder around them.
    """

    def __init__(self, root: Path, turns: Path) -> None:
        self.root, self._turns = root, turns
        self.reset_lock()
        self._seen: tuple[bytes, int, int] | None = None
        """When nothing has changed since."""
        self._whole = True
        """False while it changes: what an interrupt leaves half-way is read anew."""
        self._folders: dict[str, Folder | None] = {}
        self._folded: Counter[str] = Counter()
        """Their names, as the least exact of file systems compares them."""
        self._numbers: dict[int, Folder] = {}
        self._rivals: dict[str, Folder] = {}
        """By their names: folders of which two have one number, and neither is plainly a copy."""
        self._names: dict[bytes, list[int]] = {}
        self._ledgers: dict[int, Ledger] = {}
        self._streams: dict[int, Path] = {}
        self.everything: tuple[object, Any] | None = None
        """What readers have made of all ledgers, and of which."""

    def reset_lock(self) -> None:
        self._lock = threading.RLock()

    def refresh(self, *, force: bool = False, alone: bool = False) -> None:
        """Look again if something has changed; `alone` if nobody else may change anything now."""
        with self._lock:
            now = self._now()
            if now != self._seen or force or not self._whole:
                settled = time.time_ns() - now[2] > _SETTLED * 1e9
                self._seen = None
                self._scan()
                self._seen = now if settled or alone else None

    def _now(self) -> tuple[bytes, int, int]:
        try:
            token = self._turns.read_bytes()
        except FileNotFoundError:
            token = b""
        status = os.stat(self.root)
        return token, status.st_ino, status.st_mtime_ns

    @contextmanager
    def changing(self, name: str) -> Iterator[None]:
        """One folder changes, by somebody who has the lock of names; no other need be read."""
        with self._lock:
            self.refresh(alone=True)
            self._seen = None  # should it fail
            handle = disk.open_to_write(self._turns, os.O_CREAT)
            try:
                os.pwrite(handle, token_bytes(12), 0)
            finally:
                os.close(handle)
        yield
        with self._lock:
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
        self._whole = False
        self._rivals.clear()  # they are nobody's, and so looked at again
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
        identity = _identify(self.root / name)
        if identity is None:
            self._put(name, None)
            return
        folder = Folder(self.root / name, identity, version)
        other = self._numbers.get(identity.number)
        claims = [f for f in self._rivals.values() if f.identity.number == identity.number]
        claims = [*claims, *([other] if other else []), folder]
        if any(claim.is_in_place for claim in claims):  # the rest are copies that somebody made
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
        self._folders[name] = folder
        self._folded[fold(name)] += 1

    def _drop(self, name: str) -> None:
        if name not in self._folders:
            return
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
        with self._lock:
            if number not in self._numbers:
                self.refresh()
                for rival in self._rivals.values():
                    if rival.identity.number == number:
                        raise self._rivalry(number)
            return self._numbers.get(number)

    def folders(self) -> list[Folder]:
        with self._lock:
            self.refresh()
            return [self._numbers[n] for n in sorted(self._numbers)]

    def numbers(self) -> list[int]:
        """Those of all sessions; where two folders have one, that, too."""
        with self._lock:
            self.refresh()
            return [*self._numbers, *[rival.identity.number for rival in self._rivals.values()]]

    def named(self, name: bytes) -> list[int]:
        """Sessions that have or had a name."""
        with self._lock:
            self.refresh()
            return list(self._names.get(name, ()))

    def holder(self, name: bytes) -> int | None:
        """Which session has a name now; Corrupt if two have."""
        with self._lock:
            ledgers = [ledger for n in self.named(name) if (ledger := self.ledger(n))]
            found = [each for each in ledgers if each.there and each.name == name]
            sure = [each for each in found if not each.doubtful] or found
            if len(sure) > 1:
                raise name_clash(name, [each.folder for each in sure])
            return sure[0].number if sure else None

    def twins(self) -> Iterator[Corrupt]:
        """One for each name that two sessions have."""
        with self._lock:
            self.refresh()
            names = [name for name, numbers in self._names.items() if len(numbers) > 1]
        for name in names:
            try:
                self.holder(name)
            except Corrupt as e:
                yield e

    def refuse_lost(self, name: bytes) -> None:
        """Corrupt if a session of this name may be there, and cannot be told from others."""
        with self._lock:
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
                    f"the folder {place} has checkpoints, but does not tell of which session",
                    hint=f"put back its {SESSION} or its log, or move it away",
                )

    def unknown(self) -> list[str]:
        """Folders that are nobody's, as far as can be told."""
        with self._lock:
            self.refresh()
            return sorted(
                name for name, f in self._folders.items()
                if f is None
                and name not in self._rivals
                and (self.root / name / CHECKPOINTS).exists()
            )  # fmt: skip

    def ledger(self, number: int) -> Ledger | None:
        """What the log of a session says now; None if there is no such session."""
        with self._lock:
            folder = self.folder(number)
            if folder is None:
                return None
            ledger = self._ledgers.pop(number, None)
            found = status(folder.path)
            if ledger is None or (ledger.inode, ledger.size) != found:
                ledger = self._read(folder, ledger, found)
            if not ledger.entries and found is None:
                return None
            if ledger.number not in (number, 0):  # gc has made room for another
                self.refresh(force=True)
                return None
            self._ledgers[number] = ledger
            return ledger

    def _read(self, folder: Folder, known: Ledger | None, now: tuple[int, int] | None) -> Ledger:
        ledger = Ledger(folder.path)
        if known is not None and now is not None and known.inode == now[0]:
            ledger = known.copy() if known.pins else known
        if not ledger.read():
            ledger = Ledger(folder.path)
            ledger.read()
        if not ledger.number and ledger.entries:  # the line that says it is damaged
            ledger.number, names, row, ledger.origin, _ = folder.identity
            if not ledger.name:
                ledger.name, ledger.row = names[0], row
        if ledger.damaged:
            ledger.find_records()
            ledger.doubt(folder.identity.names)
        return ledger

    def advance(
        self,
        ledger: Ledger,
        entry: dict[str, Any],
        line: bytes,
        inode: int,
        at: int,
        change: Change | None,
    ) -> Ledger:
        """After a line was written: the ledger that knows of it."""
        with self._lock:
            if ledger.entries < entry["n"]:  # otherwise another thread has read it already
                # Not kept meanwhile: one that was interrupted half-way would know half of the line.
                self._ledgers.pop(ledger.number, None)
                ledger = ledger.copy() if ledger.pins else ledger
                ledger.advance(entry, line, inode, at, change)
            self._ledgers[ledger.number] = ledger
            return ledger

    def number_of(self, name: str) -> int | None:
        """Of the session in a folder of this name."""
        with self._lock:
            folder = self._folders.get(name)
            return None if folder is None else folder.identity.number

    def forget(self, path: Path) -> None:
        """The ledger of a folder; it will be read again."""
        with self._lock:
            number = self.number_of(path.name)
            if number is not None:
                self._ledgers.pop(number, None)

    def reload(self) -> None:
        with self._lock:
            self._whole = False
            self.refresh(force=True)

    def stream(self, stream: int) -> Path | None:
        """The file of a stream, whoever's it is; Corrupt if that cannot be told."""
        with self._lock:
            path = self._streams.get(stream)
            if path is None or not path.exists():
                places = self._places_of_streams()
                self._streams = {n: paths[0] for n, paths in places.items() if len(paths) == 1}
                if len(places.get(stream, ())) > 1:
                    raise stream_clash(stream, places[stream])
                path = self._streams.get(stream)
            return path

    def streams(self) -> list[tuple[int, Path]]:
        """All streams that there are, in order; those of sessions that are gone as well."""
        found = sorted(self._places_of_streams().items())
        return [(stream, path) for stream, paths in found for path in paths]

    def _places_of_streams(self) -> dict[int, list[Path]]:
        """Where each is. In more than one place if somebody brought a folder from another store.

        Of copies, which are no sessions, only what nobody else has.
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
        """One for each number, of a session or a stream, that is in more than one place."""
        with self._lock:
            numbers = {rival.identity.number for rival in self._rivals.values()}
            found = [self._rivalry(number) for number in sorted(numbers)]
        places = sorted(self._places_of_streams().items())
        return found + [stream_clash(stream, paths) for stream, paths in places if len(paths) > 1]

    def refuse_rivals(self) -> None:
        """Corrupt if there are any: one may be a fork of anything, and none is in any list."""
        with self._lock:
            self.refresh()
            for rival in self._rivals.values():
                raise self._rivalry(rival.identity.number)

    def _rivalry(self, number: int) -> Corrupt:
        rivals = [f.path for f in self._rivals.values() if f.identity.number == number]
        return session_clash(number, sorted(rivals))

    def refuse_taken(self, stream: int, path: Path) -> None:
        """Corrupt if a stream that is new in a folder is another's, as far as was looked."""
        with self._lock:
            known = self._streams.get(stream)
            if known is not None and known != path and known.exists():
                raise given_twice(f"stream {stream}", known.parent.parent)

    def _doubt_streams(self, name: str) -> None:
        """A folder is new: what it has may be another's as well."""
        for stream in streams_in(f"{self.root}/{name}"):
            known = self._streams.get(stream)
            if known is not None and known.parent.parent.name != name:
                del self._streams[stream]

    def is_over(self, name: str) -> bool:
        """Whether a folder is what gc has left of a session, for the sake of its streams."""
        with self._lock:
            gone = name in self._folders and self._folders[name] is None
            path = self.root / name
            if not gone or path.is_symlink() or not path.is_dir():
                return False
            return set(os.listdir(path)) <= {LOCK, STREAMS}

    def place(self, number: int, name: bytes) -> Path:
        """A folder for a new session, that nobody has, whatever a file system takes for equal."""
        escaped = escape(name)
        plain = self.root / escaped
        with self._lock:
            if number in self._numbers:
                raise given_twice(f"session {number}", self._numbers[number].path)
            if is_too_long(escaped):
                return self.root / f"{shortened(escaped)}~{number}"
            taken = self._folded[fold(escaped)] > 0
        return self.root / f"{escaped}~{number}" if taken else plain


def _version(path: str) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError as e:
        if disk.is_there(e):
            raise
        return 0, 0
    return status.st_ino, status.st_mtime_ns


def _identify(path: Path) -> Identity | None:
    """By its file; or, should that be damaged, by its log. None for what is no session."""
    found = identity_of(path)
    if found is None:
        ledger = Ledger(path)
        try:
            ledger.read()
        except OSError as e:
            if disk.is_there(e):
                raise
        if ledger.number:
            former = former_name(ledger.number, ledger.name)
            names = (ledger.name,) if former is None else (ledger.name, former)
            found = Identity(ledger.number, names, ledger.row, ledger.origin)
    return found
