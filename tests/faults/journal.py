"""Turns the system calls of a writer into changes of a disk, syncs and lines of its ledger."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from .disk import ROOT, Event, Place, Rename, Resize, Said, Sync, Write
from .tracing import Call

FLEETING = re.compile(r"-shm$|/\.?lock$|/locks/|/version$")
"""Files that need not survive: SQLite's shared memory, and locks and hints of a store of files."""


class UnexpectedCallError(Exception):
    """A system call on a file of the store that the model does not know how to follow."""


@dataclass
class Open:
    """An open file: descriptors that were duplicated share it, and with it the position."""

    inode: int
    position: int = 0
    appending: bool = False


@dataclass
class Journal:
    """Follows names, descriptors and positions under `root`; everything else is ignored."""

    root: str
    ledger: str
    names: dict[str, int] = field(default_factory=lambda: {".": ROOT})
    sizes: dict[int, int] = field(default_factory=dict)
    descriptors: dict[int, Open] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    made: int = 0

    def follow(self, calls: Iterable[Call]) -> list[Event]:
        for call in calls:
            handler = getattr(self, f"_{HANDLERS.get(call.name, call.name)}", None)
            if handler is not None:
                handler(call)
            elif any(path is not None for path in self._paths(call)):
                raise UnexpectedCallError(f"{call.name}({call.args[:200]!r})")
        # A sync counts from its end, everything else from its beginning.
        self.events.sort(key=lambda event: event.ended if isinstance(event, Sync) else event.begun)
        return self.events

    def _inside(self, path: str) -> str | None:
        """The path relative to the root; None if it is elsewhere or need not survive."""
        path = os.path.normpath(path)
        if path == self.root:
            return "."
        if not path.startswith(self.root + "/") or FLEETING.search(path):
            return None
        return path[len(self.root) + 1 :]

    def _paths(self, call: Call) -> list[str | None]:
        """The paths among the arguments, named, or relative to a directory, or by descriptor."""
        folders = [path for _, path in call.descriptors] or [os.getcwd()]
        if not call.strings:
            return [self._inside(path) for _, path in call.descriptors]
        if len(folders) < len(call.strings):
            folders *= len(call.strings)
        given = zip(folders, call.strings, strict=False)
        return [self._inside(os.path.join(folder, os.fsdecode(name))) for folder, name in given]

    def _place(self, path: str) -> Place:
        folder, _, name = path.rpartition("/")
        return self.names[folder or "."], name

    def _rename_to(self, call: Call, *names: tuple[str, int | None]) -> None:
        changed = tuple([(self._place(path), inode) for path, inode in names])
        for path, inode in names:
            if inode is None:
                self.names.pop(path, None)
            else:
                self.names[path] = inode
        self.events.append(Rename(call.begun, call.ended, changed))

    def _open(self, call: Call) -> None:
        self.descriptors.pop(call.value, None)
        path = self._inside(call.opened)
        if path is None or path == ".":
            return
        if path not in self.names:
            if b"O_CREAT" not in call.args:
                if b"O_DIRECTORY" in call.args:
                    return
                raise UnexpectedCallError(f"{path} appeared from nowhere")
            self.made += 1
            self._rename_to(call, (path, self.made))
        inode = self.names[path]
        if inode <= ROOT:
            return
        if b"O_TRUNC" in call.args and self.sizes.get(inode):
            self._resize_to(call, inode, 0)
        self.descriptors[call.value] = Open(inode, 0, b"O_APPEND" in call.args)

    def _close(self, call: Call) -> None:
        for number, _ in call.descriptors:
            self.descriptors.pop(number, None)

    def _sync(self, call: Call) -> None:
        """Calls that promise nothing about a single file."""

    def _dup(self, call: Call) -> None:
        if file := self._file(call):
            self.descriptors[call.value] = file

    def _lseek(self, call: Call) -> None:
        if file := self._file(call):
            file.position = call.value

    def _file(self, call: Call) -> Open | None:
        for number, path in call.descriptors[:1]:
            if number in self.descriptors:
                return self.descriptors[number]
            if self.names.get(self._inside(path) or ".", ROOT) > ROOT:
                raise UnexpectedCallError(f"{call.name} on a descriptor of {path} that is unknown")
        return None

    def _write(self, call: Call) -> None:
        if call.descriptors and call.descriptors[0][1] == self.ledger:
            self.events.append(Said(call.begun, call.ended, b"".join(call.strings)))
        elif file := self._file(call):
            at = self.sizes.get(file.inode, 0) if file.appending else file.position
            self._write_at(call, file.inode, at)
            file.position = at + call.value

    def _pwrite(self, call: Call) -> None:
        if file := self._file(call):
            last = -2 if call.name == "pwritev2" else -1
            self._write_at(call, file.inode, call.number(last))

    def _write_at(self, call: Call, inode: int, offset: int) -> None:
        data = b"".join(call.strings)[: call.value]
        if data:
            self.events.append(Write(call.begun, call.ended, inode, offset, data))
            self.sizes[inode] = max(self.sizes.get(inode, 0), offset + len(data))

    def _ftruncate(self, call: Call) -> None:
        if file := self._file(call):
            self._resize_to(call, file.inode, call.number(-1))

    def _fallocate(self, call: Call) -> None:
        if file := self._file(call):
            self._resize_to(call, file.inode, call.number(-2) + call.number(-1), grow=True)

    def _resize_to(self, call: Call, inode: int, size: int, *, grow: bool = False) -> None:
        self.sizes[inode] = max(self.sizes.get(inode, 0), size) if grow else size
        self.events.append(Resize(call.begun, call.ended, inode, size, grow))

    def _fsync(self, call: Call) -> None:
        number, given = call.descriptors[0]
        path = self._inside(given)
        if file := self.descriptors.get(number):
            inode = file.inode
        elif path is not None:
            inode = self.names[path]
        else:
            return
        self.events.append(Sync(call.begun, call.ended, inode, ok=call.value == 0))

    def _rename(self, call: Call) -> None:
        source, target = self._paths(call)[:2]
        if source is not None and target is not None:
            self._rename_to(call, (source, None), (target, self.names[source]))
            for path in [path for path in self.names if path.startswith(f"{source}/")]:
                self.names[target + path.removeprefix(source)] = self.names.pop(path)
        elif source is not None or target is not None:
            raise UnexpectedCallError("a rename across the border of the store")

    def _link(self, call: Call) -> None:
        source, target = self._paths(call)[:2]
        if target is not None:
            if source is None:
                raise UnexpectedCallError("a link from outside of the store")
            self._rename_to(call, (target, self.names[source]))

    def _unlink(self, call: Call) -> None:
        path = self._paths(call)[0]
        if path is not None:
            self._rename_to(call, (path, None))

    def _mkdir(self, call: Call) -> None:
        path = self._paths(call)[0]
        if path is not None and path != ".":
            self.made += 1
            self._rename_to(call, (path, -self.made))

    def _mmap(self, call: Call) -> None:
        written = b"MAP_SHARED" in call.args and b"PROT_WRITE" in call.args
        for _, path in call.descriptors:
            if written and self._inside(path) is not None:
                raise UnexpectedCallError(f"{Path(path).name} is written through a mapping")


HANDLERS = {
    "openat": "open",
    "creat": "open",
    "dup2": "dup",
    "dup3": "dup",
    "writev": "write",
    "pwrite64": "pwrite",
    "pwritev": "pwrite",
    "pwritev2": "pwrite",
    "fdatasync": "fsync",
    "sync_file_range": "sync",
    "syncfs": "sync",
    "msync": "sync",
    "renameat": "rename",
    "renameat2": "rename",
    "linkat": "link",
    "unlinkat": "unlink",
    "rmdir": "unlink",
    "mkdirat": "mkdir",
}
