"""Streams as files of lines, one item each: `{"n": 17, "sum": "…", "item": …}`.

Lines are only ever added, in the order of their numbers. A crash may leave complete lines behind
that no commit has acknowledged: whoever writes next cuts them off.
"""

from __future__ import annotations

import os
import threading
from array import array
from base64 import b64decode, b64encode
from bisect import bisect_left
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.backends import disk, files_text
from holdfast.codec import portable, wire
from holdfast.codec.rows import ITEMS, PLAIN, REFS, seal, unseal_items
from holdfast.codec.streams import STREAM_BITS
from holdfast.errors import UNREADABLE, Corrupt
from holdfast.logs import logger

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from holdfast.codec.streams import RowWrite


_BEGIN = b'{"n":'
_MALFORMED = (ValueError, TypeError, LookupError, AttributeError)
_KEPT = 256
"""Indexes of streams that are kept in memory."""


class Line(NamedTuple):
    """An item as a stored row of its own."""

    n: int
    row: bytes


def items_of(write: RowWrite) -> list[Line]:
    """The items of a row, each as a row of its own that is not compressed."""
    stream, first, _, body = write
    base = stream << STREAM_BITS
    row = unseal_items(base | first, body, f"item {first} of stream {stream}")
    flags, out, begin = REFS if row.refs else 0, [], 0
    for n, end in enumerate(row.ends, first):
        sealed = seal(ITEMS, base | n, row.data[begin:end], flags, PLAIN)
        out.append(Line(n, sealed))
        begin = end
    return out


def show(line: Line) -> bytes:
    row = line.row
    entry: dict[str, Any] = {"n": line.n, "sum": row[:8].hex()}
    if row[8]:
        entry["flags"] = row[8]
    return portable.dumps(entry | _show_item(row[9:])) + b"\n"


def _show_item(item: bytes) -> dict[str, Any]:
    """An item of a list is a value; one of a dict is a key and a value; big text has fragments."""
    shown = portable.show(item)
    if type(shown) is not dict or shown.keys() != {"$raw"}:
        return {"item": shown}
    try:
        cut = wire.string_length(item, 0)
        key, value = portable.show(item[:cut]), portable.show(item[cut:])
        if type(key) is str and (type(value) is not dict or value.keys() != {"$raw"}):
            return {"key": key, "value": value}
    except (Corrupt, IndexError):
        pass
    try:
        return {"text": item.decode()}
    except UnicodeDecodeError:
        return {"item": shown}


def _hide_item(entry: dict[str, Any]) -> bytes:
    if "text" in entry:
        return str.encode(entry["text"])
    if "key" in entry:
        return portable.hide(entry["key"]) + portable.hide(entry["value"])
    return portable.hide(entry["item"])


def hide(text: bytes) -> Line | None:
    """What a line says; None if it is none. Whether it is true is for the digest to tell."""
    try:
        entry = portable.loads(text)
        flags = entry.get("flags", 0)
        item = _hide_item(entry)
        row = bytes.fromhex(entry["sum"]) + bytes((flags,)) + item
        return Line(entry["n"], row) if type(entry["n"]) is int else None
    except (*_MALFORMED, Corrupt):
        return None


class Index:
    """Where the lines of a file are, as far as it was looked at."""

    def __init__(self, stream: int, inode: int) -> None:
        self.stream, self.inode = stream, inode
        self.numbers = array("q")
        self.starts = array("q")
        self.end = 0
        """Where the last whole line ends."""

    def extend(self, handle: int, size: int) -> None:
        data = disk.read_all(handle, size - self.end, self.end)
        at = 0
        while (stop := data.find(b"\n", at)) >= 0:
            number = _number(data, at)
            # What is no line is left out: whoever needs it finds it missing. A number that does
            # not follow the last one may be a damaged one, and must not hide those behind it.
            last = self.numbers[-1] if self.numbers else -1
            if number == last + 1 or (
                number is not None and number > last and self._is_sound(data[at:stop])
            ):
                self.numbers.append(number)
                self.starts.append(self.end + at)
            at = stop + 1
        self.end += at

    def _is_sound(self, text: bytes) -> bool:
        line = hide(text)
        try:
            if line is not None:
                unseal_items(self.stream << STREAM_BITS | line.n, line.row, "an item")
            return line is not None
        except UNREADABLE:
            return False

    def offset(self, n: int) -> int:
        """Where the first line of a number not below `n` begins."""
        place = bisect_left(self.numbers, n)
        return self.starts[place] if place < len(self.starts) else self.end


def _number(data: bytes, at: int) -> int | None:
    if not data.startswith(_BEGIN, at):
        return None
    digits = data[at + len(_BEGIN) : data.find(b",", at)]
    return int(digits) if digits.isdigit() and len(digits) < 12 else None


class Streams:
    """The files of streams, and what is known of them in this process."""

    def __init__(self) -> None:
        self.reset_lock()
        self._indexes: dict[Path, Index] = {}
        self._written: dict[Path, tuple[int, int, int]] = {}
        """Inode, size and next item of files that we wrote to: then nothing has to be cut off."""

    def reset_lock(self) -> None:
        self._lock = threading.Lock()

    def index(self, path: Path, handle: int) -> Index:
        """Up to date with what is in the file. Never changed once another may use it."""
        status = os.fstat(handle)
        with self._lock:
            index = self._indexes.pop(path, None)
            if index is None or index.inode != status.st_ino or index.end > status.st_size:
                index = Index(int(path.stem), status.st_ino)
            if index.end < status.st_size:
                index.extend(handle, status.st_size)
            self._indexes[path] = index
            if len(self._indexes) > _KEPT:
                del self._indexes[next(iter(self._indexes))]
            return index

    def forget(self, path: Path) -> None:
        with self._lock:
            self._indexes.pop(path, None)

    def read(self, path: Path, start: int, stop: int) -> list[Line]:
        """The items [start, stop) that are there."""
        lines = self._read(path, start, stop)
        if len(lines) < stop - start:
            # Not all: an index is of no use where another process has cut off what a crash left.
            self.forget(path)
            lines = self._read(path, start, stop)
        return lines

    def _read(self, path: Path, start: int, stop: int) -> list[Line]:
        lines = [hide(text) for n, text in self.lines(path, start, stop - start) if n < stop]
        return [line for line in lines if line is not None]

    def lines(self, path: Path, start: int, limit: int) -> list[tuple[int, bytes]]:
        """Numbers and texts of at most so many lines, from a number on."""
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return []
        try:
            index = self.index(path, handle)
            with self._lock:
                place = bisect_left(index.numbers, start)
                numbers = index.numbers[place : place + limit]
                starts = index.starts[place : place + limit]
                high = index.offset(numbers[-1] + 1) if numbers else 0
            low = starts[0] if starts else 0
            data = disk.read_all(handle, high - low, low)
        finally:
            os.close(handle)
        texts = [data[at - low : data.find(b"\n", at - low)] for at in starts]
        return list(zip(numbers, texts, strict=True))

    def append(self, path: Path, end: int, lines: Sequence[Line], batch: disk.Batch) -> None:
        """Add lines behind those of numbers below `end`; what else there is was never committed."""
        data = b"".join([show(line) for line in lines])
        known = self._written.pop(path, None)
        new = False
        try:
            handle = disk.open_to_write(path)
        except FileNotFoundError:
            new = True
            disk.make_folder(path.parent)  # who copies a store may leave out folders that are empty
            handle = disk.open_to_write(path, os.O_CREAT)
        try:
            status = os.fstat(handle)
            at, torn = status.st_size, False
            if known != (status.st_ino, at, end):
                at, torn = self._end(path, handle, end)
            if torn:
                data = b"\n" + data
            disk.write_all(handle, data, at)
        except BaseException:
            os.close(handle)
            raise
        now = (status.st_ino, at + len(data), lines[-1].n + 1)
        # Who has made the file, or put it there, may have been killed before its name was synced.
        moved = known is None or known[0] != status.st_ino
        folder = str(path.parent) if new or moved else None
        batch.add(handle, folder=folder, then=lambda: self._written.update({path: now}))

    def _end(self, path: Path, handle: int, end: int) -> tuple[int, bool]:
        """Where to go on writing, and whether what is before that lacks the end of its line.

        Everything from item `end` on goes. A torn line goes too, unless it may be the last one that
        was committed: then that is damaged, and it stays.
        """
        self.forget(path)  # another process may have cut something off
        index = self.index(path, handle)
        numbers, size = index.numbers, os.fstat(handle).st_size
        extra = len(numbers) - bisect_left(numbers, end)
        torn = size > index.end
        if not extra and not torn:
            return size, False
        if not extra and end and (not numbers or numbers[-1] != end - 1):
            return size, True
        cut = index.offset(end)
        logger.warning("%s: %d bytes that no commit acknowledged are cut off", path, size - cut)
        self.forget(path)
        os.ftruncate(handle, cut)
        return cut, False

    def insert(self, path: Path, lines: Sequence[Line]) -> None:
        """Lines in their places among those that are there, which may be durable: always synced."""
        texts = {line.n: show(line) for line in lines}
        for text in path.read_bytes().split(b"\n") if path.exists() else ():
            number = _number(text, 0)
            if number is not None:
                texts.setdefault(number, text + b"\n")
        self.forget(path)
        disk.replace(path, b"".join([texts[n] for n in sorted(texts)]))

    def rewrite(self, path: Path, dead: Iterable[int], left: int) -> int:
        """Drop items, and half a one from `left` on; how many went.

        What stays may be durable, so this is always synced.
        """
        gone = set(dead)
        kept: list[bytes] = []
        count = 0
        *texts, torn = path.read_bytes().split(b"\n")
        if (_number(torn, 0) or 0) < left:
            texts.append(torn)
        for text in texts:
            if text and _number(text, 0) in gone:
                count += 1
            elif text:
                kept.append(text + b"\n")
        self.forget(path)
        if kept:
            disk.replace(path, b"".join(kept))
        else:
            path.unlink()
            disk.sync(path.parent)
        return count


def show_blob(row: bytes) -> bytes:
    """The file of a blob: its value, readable where it is text."""
    if len(row) < 9:
        return portable.dumps({"raw": b64encode(row).decode()}) + b"\n"
    shown = {"sum": row[:8].hex(), "flags": row[8], "value": portable.show(row[9:])}
    return portable.dumps(shown) + b"\n"


def hide_blob(text: bytes) -> bytes:
    try:
        shown = portable.loads(text)
        if "raw" in shown:
            row = b64decode(shown["raw"], validate=True)
        else:
            row = bytes.fromhex(shown["sum"]) + bytes((shown["flags"],))
            row += portable.hide(shown["value"])
        if files_text.is_same(show_blob(row), text):
            return row
        again = portable.dumps(shown) + b"\n"
        if files_text.RAW in text and files_text.is_same(again, text):  # see hide_checkpoint
            return row
    except (*_MALFORMED, Corrupt):
        pass
    return b"a file that is damaged"
