"""A model of a disk: what may be found on it when the power fails after a series of operations.

Data and sizes become durable when their file is synced, names when their directory is. Until then
each operation may have reached the disk or not, independently of the others, and a write may have
reached it in part, sector by sector.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

SECTOR = 512
ROOT = 0  # the folder that all others are in; files have inodes above it, folders below
WHOLE = -1  # a mask with every bit set

Directories = Literal["strict", "ordered"]
Place = tuple[int, str]  # a folder's inode, and a name in it


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes written into a file (`inode`) at an offset."""

    begun: int
    ended: int
    inode: int
    offset: int
    data: bytes

    @property
    def sectors(self) -> int:
        return (self.offset + len(self.data) - 1) // SECTOR - self.offset // SECTOR + 1


@dataclass(frozen=True, slots=True)
class Resize:
    """A file cut or extended to `size`; extended only if `grow`, as fallocate does."""

    begun: int
    ended: int
    inode: int
    size: int
    grow: bool = False


@dataclass(frozen=True, slots=True)
class Rename:
    """Names that appear, change or vanish in one step: with an inode, or None if they go."""

    begun: int
    ended: int
    names: tuple[tuple[Place, int | None], ...]

    @property
    def folders(self) -> set[int]:
        return {folder for (folder, _), _ in self.names}


@dataclass(frozen=True, slots=True)
class Sync:
    """A sync of a file or a directory; `ok` is False if it failed."""

    begun: int
    ended: int
    inode: int
    ok: bool = True


@dataclass(frozen=True, slots=True)
class Said:
    """A line that the writer wrote into its ledger."""

    begun: int
    ended: int
    line: bytes


Change = Write | Resize | Rename
Event = Change | Sync | Said
Choice = Sequence[int]  # per pending change a mask: 0 is absent, WHOLE present, bits are sectors


@dataclass(frozen=True, slots=True)
class State:
    """One possible content of the disk: path → bytes; None is a directory."""

    files: dict[str, bytes | None]

    def key(self) -> bytes:
        seen = hashlib.sha256()
        for path in sorted(self.files):
            data = self.files[path]
            seen.update(f"{path}\0{-1 if data is None else len(data)}\0".encode())
            seen.update(data or b"")
        return seen.digest()

    def put(self, root: Path) -> None:
        for path in sorted(self.files):
            data = self.files[path]
            if data is None:
                (root / path).mkdir(parents=True, exist_ok=True)
            else:
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).write_bytes(data)


class Disk:
    """What is durable, and what is not yet.

    `directories="ordered"` is the milder model of a journaling file system: a sync of any file also
    makes every earlier change of a name durable. A failed sync loses the data that it was to make
    durable, as on Linux, where the pages are marked clean and never written again.
    """

    def __init__(self, directories: Directories = "strict") -> None:
        self.directories = directories
        self.content: dict[int, bytes] = {}
        self.names: dict[Place, int] = {}
        self.pending: list[Change] = []

    def apply(self, event: Event) -> None:
        if isinstance(event, Write | Resize | Rename):
            self.pending.append(event)
        elif isinstance(event, Sync):
            covered = [change for change in self.pending if self._covers(event, change)]
            gone = {id(c) for c in covered if event.ok or isinstance(c, Write)}
            self.pending = [change for change in self.pending if id(change) not in gone]
            if event.ok:
                self.content, self.names = self._with(covered, [WHOLE] * len(covered))

    def state(self, choice: Choice) -> State:
        """The disk if of the pending changes exactly those of `choice` have reached it."""
        content, names = self._with(self.pending, choice)
        inside: dict[int, list[tuple[str, int]]] = {}
        for (folder, name), inode in names.items():
            inside.setdefault(folder, []).append((name, inode))
        files: dict[str, bytes | None] = {}
        todo = [("", ROOT)]
        while todo:
            path, folder = todo.pop()
            for name, inode in inside.get(folder, ()):
                files[path + name] = content.get(inode, b"") if inode > ROOT else None
                if inode < ROOT:
                    todo.append((f"{path}{name}/", inode))
        return State(files)

    def _covers(self, sync: Sync, change: Change) -> bool:
        if change.ended > sync.begun:
            return False
        if isinstance(change, Rename):
            if sync.inode > ROOT:
                return self.directories == "ordered"
            return sync.inode in change.folders
        return change.inode == sync.inode

    def _with(
        self, changes: Sequence[Change], choice: Choice
    ) -> tuple[dict[int, bytes], dict[Place, int]]:
        names = dict(self.names)
        touched: dict[int, bytearray] = {}
        for change, mask in zip(changes, choice, strict=True):
            if not mask:
                continue
            if isinstance(change, Rename):
                for place, inode in change.names:
                    if inode is None:
                        names.pop(place, None)
                    else:
                        names[place] = inode
                continue
            inode = change.inode
            if inode not in touched:
                touched[inode] = bytearray(self.content.get(inode, b""))
            if isinstance(change, Write):
                _write(touched[inode], change, mask)
            else:
                _resize(touched[inode], change)
        content = dict(self.content)
        content.update((inode, bytes(data)) for inode, data in touched.items())
        return content, names


def _write(file: bytearray, change: Write, mask: int) -> None:
    start, end = change.offset, change.offset + len(change.data)
    if mask == WHOLE:
        _extend(file, start)
        file[start:end] = change.data
        return
    for place in range(change.sectors):
        if mask >> place & 1:
            sector = (start // SECTOR + place) * SECTOR
            low, high = max(start, sector), min(end, sector + SECTOR)
            _extend(file, low)
            file[low:high] = change.data[low - start : high - start]


def _resize(file: bytearray, change: Resize) -> None:
    _extend(file, change.size)
    if not change.grow:
        del file[change.size :]


def _extend(file: bytearray, size: int) -> None:
    if len(file) < size:
        file.extend(bytes(size - len(file)))
