"""Exports: a store, or some sessions of it, as one portable file or as a folder of JSON.

The folder is a store of files. The file holds the same, line by line: what is in which file of such
a folder. So both are exact, and what reads one reads the other.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import tempfile
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import zstandard

from holdfast.backends import disk
from holdfast.backends.files import MARKER, FilesBackend
from holdfast.backends.files_hints import hint, read_hint
from holdfast.backends.files_text import lay_out
from holdfast.codec import portable, values
from holdfast.codec.rows import RATIO, SMALL
from holdfast.errors import Corrupt, InvalidRequest, StoreNotFound, Unavailable, UnsupportedFormat
from holdfast.transfer import Transferred, listed, telling, transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from holdfast.store import Store

    Progress = Callable[[int, int], None]

FORMAT = 1
_SUFFIXES = (".jsonl", ".jsonl.zst")
_ZSTD = b"\x28\xb5\x2f\xfd"
_LONGEST = 768 << 20
"""Bytes of a line. The biggest value has 512 MB, and some more as JSON."""
_EXPAND = "if you trust it, decompress it first, as with `zstd -d`, and import that"
_CHUNK = 1 << 20
_SKIPPED, _ROOM = b"\x50\x2a\x4d\x18", 64 << 10
"""How a frame begins that readers of zstd skip, and the least it is good for."""
# Nothing else is ever written from a file that somebody hands us.
_PLACES = re.compile(
    r"blobs/([0-9a-f]{2})/\1[0-9a-f]{62}\.json"
    r"|sessions/(?P<folder>[^/]+)/"
    r"(head|journal|log\.jsonl|journal\.jsonl|session\.json"
    r"|checkpoints/\d{1,12}\.json|streams/\d{1,12}\.jsonl)"
)
# How many lines the log and the journal have: so those that are damaged at their end are missed.
_COUNTS = ("head", "journal")


def export(
    store: Store,
    path: Path,
    sessions: Iterable[str] | None,
    progress: Progress | None,
    new_store: Callable[[FilesBackend], Store],
) -> Transferred:
    refuse_taken(path)
    if not path.parent.is_dir():
        raise Unavailable(f"the folder {path.parent} does not exist")
    as_file = path.name.endswith(_SUFFIXES)
    with telling(progress) as tell, _beside(path) as draft, _translated(path):
        with new_store(FilesBackend(draft, durability="normal" if as_file else "full")) as copy:
            done = transfer(store.backend, copy, sessions, tell)
            names = [info.name for info in copy.sessions()]
        if as_file:
            new_file(path, partial(_write, draft, names, compress=path.name.endswith(".zst")))
        else:
            os.rename(draft, path)
            disk.sync(path.parent)
    return done


def import_(
    store: Store,
    path: Path,
    sessions: Iterable[str] | None,
    progress: Progress | None,
    new_store: Callable[[FilesBackend], Store],
) -> Transferred:
    names = listed(sessions)
    if path.is_dir():
        with new_store(FilesBackend(path, read_only=True)) as source:
            return transfer(source.backend, store, names, progress)
    if not path.is_file():
        raise StoreNotFound(f"there is no file {path}", hint="check the path")
    with telling(progress) as tell, _beside(path) as draft, _translated(path):
        promised, problems = _unpack(path, draft)
        with new_store(FilesBackend(draft, read_only=True)) as source:
            lost = {*promised} - {info.name for info in source.sessions()}
            wanted = None if names is None else [name for name in names if name not in lost]
            done = transfer(source.backend, store, wanted, tell)
    told = [
        (name, "it is missing in the file")
        for name in promised
        if name in lost and (names is None or name in names)
    ]
    if problems:
        told.append((path.name, problems))  # whose that was, nobody knows
    return done._replace(skipped=(*done.skipped, *told))


def is_export(path: str) -> bool:
    """Whether a path looks like what `export` makes."""
    where = Path(path)
    if where.is_dir():
        return (where / MARKER).is_file()
    with where.open("rb") as raw, _opened(raw) as file, suppress(zstandard.ZstdError):
        return b'"holdfast":"export"' in file.read(100)
    return False


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A place for a draft, on the same disk where that can be written."""
    folder = path.parent if os.access(path.parent, os.W_OK) else Path(tempfile.gettempdir())
    name = path.name.encode(errors="ignore")[:100].decode(errors="ignore")
    draft = folder / f".{name}.{secrets.token_hex(6)}.new"
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except Unavailable:
        raise
    except OSError as e:
        raise Unavailable(f"{path} cannot be read or written: {e}") from e


# -- writing -------------------------------------------------------------------------------------


def refuse_taken(path: Path) -> None:
    if os.path.lexists(path):
        raise InvalidRequest(f"{path} exists already", hint="choose another path")


def new_file(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """A whole file or none. What somebody else has put there meanwhile is left alone."""
    try:
        disk.create(path, write)
    except FileExistsError:
        refuse_taken(path)
        raise


def _write(draft: Path, names: list[str], raw: BinaryIO, *, compress: bool) -> None:
    if compress:
        with zstandard.ZstdCompressor(level=3).stream_writer(raw, closefd=False) as out:
            _write_lines(draft, _Honest(raw, out), names)
    else:
        _write_lines(draft, raw, names)


class _Honest:
    """Compresses no better than a reader believes: what is too small is made longer by nothing."""

    def __init__(self, raw: BinaryIO, out: Any) -> None:
        self._raw, self._out = raw, out
        self._size = 0

    def write(self, data: bytes) -> None:
        for at in range(0, len(data), _CHUNK):
            part = data[at : at + _CHUNK]
            self._size += len(part)
            if self._size > SMALL and self._size > RATIO * self._raw.tell():
                self._out.flush(zstandard.FLUSH_FRAME)
                lacking = self._size // RATIO + 1 - self._raw.tell()
                if lacking > 0:
                    room = max(lacking, _ROOM)
                    self._raw.write(_SKIPPED + room.to_bytes(4, "little") + bytes(room))
            self._out.write(part)


def _write_lines(draft: Path, out: Any, names: list[str]) -> None:
    shown = [portable.show(values.encode(name)) for name in names]
    first = {"holdfast": "export", "format": FORMAT, "sessions": shown}
    out.write(portable.dumps(first) + b"\n")
    for folder in ("blobs", "sessions"):
        for path in sorted((draft / folder).rglob("*")):
            place = path.relative_to(draft).as_posix()
            if _PLACES.fullmatch(place) and path.is_file():
                for text in _texts(path):
                    out.write(portable.dumps({"in": place})[:-1] + b',"is":' + text + b"}\n")


def _texts(path: Path) -> Iterator[bytes]:
    """The JSON texts of a file: one for each line, or all of it."""
    if path.name in _COUNTS:
        yield b"%d" % read_hint(path)
        return
    with path.open("rb") as file:
        if path.suffix == ".jsonl":
            yield from (line.rstrip(b"\n") for line in file)
        else:
            yield file.read().replace(b"\n", b"")


# -- reading -------------------------------------------------------------------------------------


def _unpack(path: Path, draft: Path) -> tuple[list[str], str]:
    """A store of files from the lines of a file; what it promises, and what is wrong with it."""
    FilesBackend(draft, durability="normal").close()
    folders: dict[str, str] = {}
    bad: list[int] = []
    with path.open("rb") as raw, _opened(raw) as file:
        lines = _lines(file, raw)
        names = _promised(path, next(lines, b""))
        for n, line in enumerate(lines, start=2):
            place, text = _parsed(line)
            if place is None:
                bad.append(n)
                continue
            target = draft / _safe(place, folders)
            target.parent.mkdir(0o700, parents=True, exist_ok=True)
            if target.name in _COUNTS:
                target.write_bytes(hint(int(text)) if text.isdigit() and len(text) < 12 else b"")
                continue
            with target.open("ab") as out:
                out.write(text + b"\n")
    for path_ in draft.glob("sessions/*/checkpoints/*.json"):
        path_.write_bytes(_laid_out(path_.read_bytes()))
    more = f", and {len(bad) - 1} more" if len(bad) > 1 else ""
    return names, f"line {bad[0]} of the file is damaged{more}" if bad else ""


@contextmanager
def _opened(raw: BinaryIO) -> Iterator[Any]:
    packed = raw.read(len(_ZSTD)) == _ZSTD
    raw.seek(0)
    if packed:
        with zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True) as file:
            yield file
    else:
        yield raw


def _lines(file: Any, raw: BinaryIO) -> Iterator[bytes]:
    """Whole lines, each within bounds; a last one that was cut off comes as it is."""
    held = bytearray()
    size = 0
    try:
        while chunk := file.read(_CHUNK):
            size += len(chunk)
            if size > max(SMALL, RATIO * raw.tell()):
                raise Corrupt("the file expands to more than its size allows", hint=_EXPAND)
            start = 0
            while (stop := chunk.find(b"\n", start)) >= 0:
                held += chunk[start:stop]
                yield bytes(held)
                held.clear()
                start = stop + 1
            held += chunk[start:]
            if len(held) > _LONGEST:
                raise Corrupt("a line of the file is too long", hint="no export has such lines")
    except zstandard.ZstdError:
        held += b" "  # and nothing more: what was read counts, what is missing is missed
    if held:
        yield bytes(held)


def _promised(path: Path, line: bytes) -> list[str]:
    with suppress(ValueError, TypeError, LookupError, MemoryError, Corrupt):
        first = portable.loads(line)
        if first["holdfast"] == "export":
            if first["format"] > FORMAT:
                raise UnsupportedFormat(f"{path} was written by a newer version")
            return [str(values.decode(portable.hide(name))) for name in first["sessions"]]
    raise UnsupportedFormat(f"{path} is not an export of holdfast", hint="see docs/moving.md")


def _parsed(line: bytes) -> tuple[re.Match[str] | None, bytes]:
    try:
        entry = portable.loads(line)
        place = _PLACES.fullmatch(entry["in"])
        return place, portable.dumps(entry["is"])
    except (ValueError, TypeError, LookupError, MemoryError):
        return None, b""


def _safe(place: re.Match[str], folders: dict[str, str]) -> str:
    """Where to put it: folders are numbered, whatever they are called."""
    folder = place["folder"]
    if folder is None:
        return place[0]
    number = folders.setdefault(folder, f"s{len(folders)}")
    return f"sessions/{number}/{place[0].split('/', 2)[2]}"


def _laid_out(text: bytes) -> bytes:
    """A checkpoint's file as the store of files has it, a field a line."""
    with suppress(ValueError, MemoryError):
        shown = portable.loads(text)
        if type(shown) is dict:
            return lay_out(shown)
    return text
