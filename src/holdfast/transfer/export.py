"""Export and import: sessions as one portable file, or as a folder of JSON files.

The folder is a store of files. The file has one line for each line or JSON text of such a folder,
with the path of its file. So both hold the same, and nothing of a session is lost.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import tempfile
from collections import Counter
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import zstandard

from holdfast.errors import Corrupt, InvalidRequest, StoreNotFound, Unavailable, UnsupportedFormat
from holdfast.format import memory_limit, portable, values
from holdfast.format.rows import RATIO, SMALL
from holdfast.history import lineage
from holdfast.storage import fs
from holdfast.storage.files.backend import MARKER, FilesBackend
from holdfast.storage.files.log import hint, read_hint
from holdfast.storage.files.row_json import lay_out
from holdfast.storage.repository import Repository
from holdfast.storage.url import is_sqlite_store
from holdfast.transfer.copy import CopyResult, listed, telling, transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from holdfast.transfer.copy import Progress


FORMAT = 1
_SUFFIXES = (".jsonl", ".jsonl.zst")
_ZSTD = b"\x28\xb5\x2f\xfd"
_COPIES, _LINE = 6, 64
"""Memory for a line: 6 times its length (bytes, text and values); if kept, 64 bytes more."""
_EXPAND = "if you trust it, decompress it first, as with `zstd -d`, and import that"
_CHUNK = 1 << 20
_SKIPPED, _ROOM = b"\x50\x2a\x4d\x18", 64 << 10
"""The first bytes of a zstd frame that readers skip, and the least padding of such a frame."""
# Import writes no other paths, because a file may be forged.
_PLACES = re.compile(
    r"blobs/([0-9a-f]{2})/\1[0-9a-f]{62}\.json"
    r"|sessions/(?P<folder>[^/]+)/"
    r"(head|journal|log\.jsonl|journal\.jsonl|session\.json"
    r"|checkpoints/\d{1,12}\.json|streams/\d{1,12}\.jsonl)"
)
# Numbers of lines of the log and the journal, so that a loss at their end is noticed.
_COUNTS = ("head", "journal")
_WHOLE = ("log.jsonl", "journal.jsonl")
"""Files that a store of files reads into memory as a whole."""


def export(
    source: Repository, path: Path, sessions: Iterable[str] | None, progress: Progress | None
) -> CopyResult:
    """Write sessions to a new file or folder. If `sessions` is None, export all of them.

    A path that ends in .jsonl or .jsonl.zst becomes a file, any other a folder. It appears only
    when it is complete; after a crash a hidden draft may stay beside it. Raises InvalidRequest if
    the path exists, and Unavailable if it cannot be written.
    """
    _refuse_taken(path)
    if not path.parent.is_dir():
        raise Unavailable(f"the folder {path.parent} does not exist")
    as_file = path.name.endswith(_SUFFIXES)
    with telling(progress) as tell, _beside(path) as draft, _translated(path):
        durability: Literal["full", "normal"] = "normal" if as_file else "full"
        with closing(Repository(FilesBackend(draft, durability=durability))) as copy:
            done = transfer(source, copy, sessions, tell)
            names = [*lineage.session_names(copy)]
        if as_file:
            new_file(path, partial(_write, draft, names, compress=path.name.endswith(".zst")))
        else:
            os.rename(draft, path)
            fs.sync(path.parent)
    return done


def import_(
    target: Repository, path: Path, sessions: Iterable[str] | None, progress: Progress | None
) -> CopyResult:
    """Copy sessions from an export into a store. If `sessions` is None, copy all of them.

    Damaged and missing sessions are skipped and reported. Raises StoreNotFound if there is no such
    file, UnsupportedFormat if it is not an export, and Unavailable if it cannot be read.
    """
    names = listed(sessions)
    if path.is_dir():
        backend = FilesBackend(path, read_only=True)
        with closing(Repository(backend)) as source:
            backend.refuse_links()
            return transfer(source, target, names, progress)
    if not path.is_file():
        raise StoreNotFound(f"there is no file {path}", hint="check the path")
    with telling(progress) as tell, _beside(path) as draft, _translated(path):
        promised, problems = _unpack(path, draft)
        with closing(Repository(FilesBackend(draft, read_only=True))) as source:
            lost = {*promised} - {*lineage.session_names(source)}
            wanted = None if names is None else [name for name in names if name not in lost]
            done = transfer(source, target, wanted, tell)
    skipped = [
        (name, "it is missing in the file")
        for name in promised
        if name in lost and (names is None or name in names)
    ]
    if problems:
        skipped.append((path.name, problems))  # a damaged line cannot be attributed to a session
    return done._replace(skipped=(*done.skipped, *skipped))


def file_kind(path: str | os.PathLike[str]) -> Literal["store", "export"] | None:
    """Return whether a file or folder is an SQLite store or an export; None if it is neither.

    Raises OSError if it cannot be opened. A pipe, which can be read only once, is neither.
    """
    where = Path(path)
    if where.is_dir():
        return "export" if (where / MARKER).is_file() else None
    if where.exists() and not where.is_file():
        return None
    if is_sqlite_store(where):
        return "store"
    with where.open("rb") as raw, _opened(raw) as file, suppress(zstandard.ZstdError):
        return "export" if b'"holdfast":"export"' in file.read(100) else None
    return None


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """Yield a new path for a draft, and delete the draft afterwards.

    It is in the folder of `path`, so that it can be renamed to `path`. If that folder is not
    writable, as when importing, it is in the folder for temporary files.
    """
    folder = path.parent if os.access(path.parent, os.W_OK) else Path(tempfile.gettempdir())
    name = path.name.encode(errors="ignore")[:100].decode(errors="ignore")
    draft = folder / f".{name}.{secrets.token_hex(6)}.new"
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    """Raise Unavailable instead of an OSError."""
    try:
        yield
    except Unavailable:
        raise
    except OSError as e:
        raise Unavailable(f"{path} cannot be read or written: {e}") from e


# -- writing -------------------------------------------------------------------------------------


def new_file(path: str | os.PathLike[str], write: Callable[[BinaryIO], None]) -> None:
    """Create a file that is complete or does not exist, also after a crash.

    `write` gets the open file. Raises InvalidRequest if the path exists, and Unavailable if it
    cannot be written. A file that another process creates at the same time is not overwritten.
    """
    where = Path(path)
    _refuse_taken(where)
    try:
        fs.create(where, write)
    except OSError as e:
        _refuse_taken(where)
        raise Unavailable(f"cannot write {path}: {e}") from e


def _refuse_taken(path: Path) -> None:
    """Raise InvalidRequest if a path exists."""
    if os.path.lexists(path):
        raise InvalidRequest(f"{path} exists already", hint="choose another path")


def _write(draft: Path, names: list[str], raw: BinaryIO, *, compress: bool) -> None:
    if compress:
        with zstandard.ZstdCompressor(level=3).stream_writer(raw, closefd=False) as out:
            _write_lines(draft, _Honest(raw, out), names)
    else:
        _write_lines(draft, raw, names)


class _Honest:
    """Pads with skippable zstd frames, so that the ratio stays below the reader's limit of 1000."""

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
    """Write the first line, which lists the sessions, and then the contents of all files."""
    shown = [portable.to_json(values.encode(name)) for name in names]
    first = {"holdfast": "export", "format": FORMAT, "sessions": shown}
    out.write(portable.dumps(first) + b"\n")
    for folder in ("blobs", "sessions"):
        for path in sorted((draft / folder).rglob("*")):
            place = path.relative_to(draft).as_posix()
            if _PLACES.fullmatch(place) and path.is_file():
                for text in _texts(path):
                    out.write(portable.dumps({"in": place})[:-1] + b',"is":' + text + b"}\n")


def _texts(path: Path) -> Iterator[bytes]:
    """Yield the JSON texts of a file: each line of a .jsonl file, else the whole file."""
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
    """Make a store of files in `draft` from the lines of an exported file.

    Return the names of the sessions that its first line lists, and a description of damaged lines,
    which is empty if there are none. Raises UnsupportedFormat if it is not an export.
    """
    FilesBackend(draft, durability="normal").close()
    folders: dict[str, str] = {}
    held: Counter[str] = Counter()
    bad: list[int] = []
    with path.open("rb") as raw, _opened(raw) as file, ExitStack() as stack:
        lines = _lines(file, raw)
        names = _promised(path, next(lines, b""))
        at = ""
        for n, line in enumerate(lines, start=2):
            place, text = _parsed(line)
            if place is None:
                bad.append(n)
                continue
            where = _safe(place, folders)
            if where != at:
                stack.close()
                target = draft / where
                target.parent.mkdir(0o700, parents=True, exist_ok=True)
                at, out = where, stack.enter_context(target.open("ab"))
            if target.name in _COUNTS:
                target.write_bytes(hint(int(text)) if text.isdigit() and len(text) < 12 else b"")
                continue
            if target.suffix == ".json" and out.tell():
                bad.append(n)  # a .json file has a single line
                continue
            if target.name in _WHOLE:
                held[where] += _COPIES * len(text) + _LINE
                memory_limit.refuse(held[where])
            out.write(text + b"\n")
    for path_ in draft.glob("sessions/*/checkpoints/*.json"):
        path_.write_bytes(_laid_out(path_.read_bytes()))
    more = f", and {len(bad) - 1} more" if len(bad) > 1 else ""
    return names, f"line {bad[0]} of the file is damaged{more}" if bad else ""


@contextmanager
def _opened(raw: BinaryIO) -> Iterator[Any]:
    """Yield the file, decompressed if it is compressed with zstd."""
    packed = raw.read(len(_ZSTD)) == _ZSTD
    raw.seek(0)
    if packed:
        with zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True) as file:
            yield file
    else:
        yield raw


def _lines(file: Any, raw: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file. A last line that was cut off is yielded as it is.

    Raises TooBig if a line needs too much memory, and Corrupt if the file expands to more than
    16 MB and more than 1000 times its compressed size.
    """
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
                memory_limit.refuse(_COPIES * len(held))
                yield bytes(held)
                held.clear()
                start = stop + 1
            held += chunk[start:]
            memory_limit.refuse(_COPIES * len(held))
    except zstandard.ZstdError:
        held += b" "  # truncated or damaged frame: keep the complete lines
    if held:
        yield bytes(held)


def _promised(path: Path, line: bytes) -> list[str]:
    """Return the session names of the first line. Raises UnsupportedFormat if it is invalid."""
    with suppress(ValueError, TypeError, LookupError, MemoryError, Corrupt):
        first = portable.loads(line)
        if first["holdfast"] == "export":
            if first["format"] > FORMAT:
                raise UnsupportedFormat(f"{path} was written by a newer version")
            return [str(values.decode(portable.from_json(name))) for name in first["sessions"]]
    raise UnsupportedFormat(f"{path} is not an export of holdfast", hint="see docs/moving.md")


def _parsed(line: bytes) -> tuple[re.Match[str] | None, bytes]:
    """Return the path of a line, and its JSON text; no path if the line is damaged."""
    try:
        entry = portable.loads(line)
        place = _PLACES.fullmatch(entry["in"])
        return place, portable.dumps(entry["is"])
    except (ValueError, TypeError, LookupError, MemoryError):
        return None, b""


def _safe(place: re.Match[str], folders: dict[str, str]) -> str:
    """Return a safe path: folders of sessions are numbered, and their names are not used."""
    folder = place["folder"]
    if folder is None:
        return place[0]
    number = folders.setdefault(folder, f"s{len(folders)}")
    return f"sessions/{number}/{place[0].split('/', 2)[2]}"


def _laid_out(text: bytes) -> bytes:
    """Return the file of a checkpoint as a store of files writes it, with one field per line."""
    with suppress(ValueError, MemoryError):
        shown = portable.loads(text)
        if type(shown) is dict:
            return lay_out(shown)
    return text
