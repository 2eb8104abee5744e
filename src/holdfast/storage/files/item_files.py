"""Streams as files of lines, one item each: `{"n": 17, "sum": "…", "item": …}`.

Lines are appended in the order of their numbers. A crash may leave complete lines that no commit
has acknowledged. The next writer cuts them off.
"""

from __future__ import annotations

import os
import threading
from array import array
from base64 import b64decode, b64encode
from bisect import bisect_left
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.errors import UNREADABLE, Corrupt
from holdfast.format import msgpack, portable
from holdfast.format.item_streams import STREAM_BITS
from holdfast.format.rows import ITEMS, PLAIN, REFS, seal, unseal_items
from holdfast.log import logger
from holdfast.storage import fs
from holdfast.storage.files import row_json

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from holdfast.format.item_streams import RowWrite


_BEGIN = b'{"n":'
_PIECE = 8 << 20
_KEPT = 256
"""The number of stream indexes that are kept in memory."""


class Line(NamedTuple):
    """An item, as a stored row of one item."""

    n: int
    row: bytes


def items_of(write: RowWrite) -> list[Line]:
    """Return the items of a row, each as an uncompressed row of one item."""
    stream, first, _, body = write
    base = stream << STREAM_BITS
    row = unseal_items(base | first, body, f"item {first} of stream {stream}")
    flags = REFS if row.refs else 0
    return [
        Line(n, seal(ITEMS, base | n, item, flags, PLAIN))
        for n, item in enumerate(row.items(), first)
    ]


def show(line: Line) -> bytes:
    row = line.row
    entry: dict[str, Any] = {"n": line.n, "sum": row[:8].hex()}
    if row[8]:
        entry["flags"] = row[8]
    return portable.dumps(entry | _show_item(row[9:])) + b"\n"


def _show_item(item: bytes) -> dict[str, Any]:
    """Return an item as JSON fields: a value, a key and a value of a dict, or a part of a text."""
    shown = portable.to_json(item)
    if type(shown) is not dict or shown.keys() != {"$raw"}:
        return {"item": shown}
    try:
        cut = msgpack.string_length(item, 0)
        key, value = portable.to_json(item[:cut]), portable.to_json(item[cut:])
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
        return portable.from_json(entry["key"]) + portable.from_json(entry["value"])
    return portable.from_json(entry["item"])


def hide(text: bytes) -> Line | None:
    """Return the item of a line; None if it is no item. The digest is not checked here."""
    try:
        entry = portable.loads(text)
        flags = entry.get("flags", 0)
        item = _hide_item(entry)
        row = bytes.fromhex(entry["sum"]) + bytes((flags,)) + item
        return Line(entry["n"], row) if type(entry["n"]) is int else None
    except (*row_json.MALFORMED, Corrupt):
        return None


class Index:
    """The positions of the lines of a file, as far as it was read."""

    def __init__(self, stream: int, inode: int) -> None:
        self.stream, self.inode = stream, inode
        self.numbers = array("q")
        self.starts = array("q")
        self.end = 0
        """The end of the last complete line."""

    def extend(self, handle: int, size: int) -> None:
        """Read the rest of the file in pieces. A piece has at least one line."""
        step = _PIECE
        while self.end < size:
            data = fs.read_all(handle, min(step, size - self.end), self.end)
            if self._look(data):
                step = _PIECE
            elif self.end + len(data) < size:
                step *= 2
            else:
                return

    def _look(self, data: bytes) -> bool:
        """Note the complete lines of a piece. Return False if there is none."""
        at = 0
        while (stop := data.find(b"\n", at)) >= 0:
            number = _number(data, at)
            # A damaged line is left out, so its item is missing. A number that does not follow the
            # last one may be damaged, and must not hide the lines after it.
            last = self.numbers[-1] if self.numbers else -1
            if number == last + 1 or (
                number is not None and number > last and self._is_sound(data[at:stop])
            ):
                self.numbers.append(number)
                self.starts.append(self.end + at)
            at = stop + 1
        self.end += at
        return at > 0

    def _is_sound(self, text: bytes) -> bool:
        line = hide(text)
        try:
            if line is not None:
                unseal_items(self.stream << STREAM_BITS | line.n, line.row, "an item")
            return line is not None
        except UNREADABLE:
            return False

    def offset(self, n: int) -> int:
        """Return the position of the first line with a number of at least `n`."""
        place = bisect_left(self.numbers, n)
        return self.starts[place] if place < len(self.starts) else self.end


def _number(data: bytes, at: int) -> int | None:
    if not data.startswith(_BEGIN, at):
        return None
    digits = data[at + len(_BEGIN) : data.find(b",", at)]
    return int(digits) if digits.isdigit() and len(digits) < 12 else None


class Streams:
    """The files of streams, with their indexes in this process."""

    def __init__(self) -> None:
        self.reset_lock()
        self._indexes: dict[Path, Index] = {}
        self._written: dict[Path, tuple[int, int, int]] = {}
        """Inode, size and next item of files that we wrote to. Their ends need no check."""

    def reset_lock(self) -> None:
        self._lock = threading.Lock()

    def index(self, path: Path, handle: int) -> Index:
        """Return an up-to-date index. It does not change once another thread may use it."""
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
        """Return the existing items of [start, stop)."""
        lines = self._read(path, start, stop)
        if len(lines) < stop - start:
            # Some are missing. The index may be outdated: another process has cut off lines.
            self.forget(path)
            lines = self._read(path, start, stop)
        return lines

    def _read(self, path: Path, start: int, stop: int) -> list[Line]:
        lines = [hide(text) for n, text in self.lines(path, start, stop - start) if n < stop]
        return [line for line in lines if line is not None]

    def lines(self, path: Path, start: int, limit: int) -> list[tuple[int, bytes]]:
        """Return number and text of at most `limit` lines, from a number on."""
        try:
            handle = fs.open_own(path, os.O_RDONLY)
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
            data = fs.read_all(handle, high - low, low)
        finally:
            os.close(handle)
        texts = [data[at - low : data.find(b"\n", at - low)] for at in starts]
        return list(zip(numbers, texts, strict=True))

    def append(self, path: Path, end: int, lines: Sequence[Line], batch: fs.Batch) -> None:
        """Append lines after item `end`. Other lines there were never committed."""
        data = b"".join([show(line) for line in lines])
        known = self._written.pop(path, None)
        new = False
        try:
            handle = fs.open_to_write(path)
        except FileNotFoundError:
            new = True
            fs.make_folder(path.parent)  # copies may lack empty folders
            handle = fs.open_to_write(path, os.O_CREAT)
        try:
            status = os.fstat(handle)
            at, torn = status.st_size, False
            if known != (status.st_ino, at, end):
                at, torn = self._end(path, handle, end)
            if torn:
                data = b"\n" + data
            fs.write_all(handle, data, at)
        except BaseException:
            os.close(handle)
            raise
        now = (status.st_ino, at + len(data), lines[-1].n + 1)
        # The process that created the file may have been killed before it synced the name.
        moved = known is None or known[0] != status.st_ino
        folder = str(path.parent) if new or moved else None
        batch.add(handle, folder=folder, then=lambda: self._written.update({path: now}))

    def _end(self, path: Path, handle: int, end: int) -> tuple[int, bool]:
        """Return the position to write at, and whether a line before it lacks its end.

        Cut off all lines from item `end` on, and a torn line. But if the torn line may be the last
        committed one, it is damaged, and stays.
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
        """Insert lines at their places.

        The file is always synced, because its other lines may be durable.
        """
        texts = {line.n: show(line) for line in lines}
        for text in fs.read(path).split(b"\n") if path.exists() else ():
            number = _number(text, 0)
            if number is not None:
                texts.setdefault(number, text + b"\n")
        self.forget(path)
        fs.replace(path, b"".join([texts[n] for n in sorted(texts)]))

    def rewrite(self, path: Path, dead: set[int], changed: Sequence[Line], left: int) -> None:
        """Remove items, replace others, and remove a torn item from `left` on.

        The file is always synced, because its other lines may be durable.
        """
        new = {line.n: show(line) for line in changed}
        kept: list[bytes] = []
        *texts, torn = fs.read(path).split(b"\n")
        if (_number(torn, 0) or 0) < left:
            texts.append(torn)
        for text in texts:
            number = _number(text, 0)
            if text and number not in dead:
                kept.append(new.get(-1 if number is None else number, text + b"\n"))
        self.forget(path)
        if kept:
            fs.replace(path, b"".join(kept))
        else:
            path.unlink()
            fs.sync(path.parent)


def show_blob(row: bytes) -> bytes:
    """Return the file of a blob. Its value is readable if it is text."""
    if len(row) < 9:
        return portable.dumps({"raw": b64encode(row).decode()}) + b"\n"
    shown = {"sum": row[:8].hex(), "flags": row[8], "value": portable.to_json(row[9:])}
    return portable.dumps(shown) + b"\n"


def hide_blob(text: bytes) -> bytes:
    try:
        shown = portable.loads(text)
        if "raw" in shown:
            row = b64decode(shown["raw"], validate=True)
        else:
            row = bytes.fromhex(shown["sum"]) + bytes((shown["flags"],))
            row += portable.from_json(shown["value"])
        if row_json.is_same(show_blob(row), text):
            return row
        again = portable.dumps(shown) + b"\n"
        if row_json.RAW in text and row_json.is_same(again, text):  # see hide_checkpoint
            return row
    except (*row_json.MALFORMED, Corrupt):
        pass
    return b"a file that is damaged"
