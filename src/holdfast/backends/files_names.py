"""What the folders and files of a store are called."""

from __future__ import annotations

import os
import re
import unicodedata
from typing import TYPE_CHECKING

from holdfast.backends import disk
from holdfast.backends.files_ledger import CHECKPOINTS, STREAMS

if TYPE_CHECKING:
    from pathlib import Path

BLOBS = "blobs"
_LONGEST = 100
_SAFE = re.compile(r"[\w .,=+@#!()\[\]{}'&;^$-]")
_STREAM = re.compile(r"(0|[1-9][0-9]{0,11})\.jsonl")
_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?$", re.IGNORECASE)


def escape(name: bytes) -> str:
    """A name as a file name: itself where that is safe, and reversible where it is not too long."""
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
    """As the least exact of file systems compares it."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def blob_path(root: Path, digest: bytes) -> Path:
    name = digest.hex()
    return root / BLOBS / name[:2] / f"{name}.json"


def record_path(folder: Path, seq: int) -> Path:
    return folder / CHECKPOINTS / f"{seq:06}.json"


def streams_in(folder: str) -> list[int]:
    """The streams that have a file in a session's folder."""
    try:
        with os.scandir(os.path.join(folder, STREAMS)) as entries:
            names = [entry.name for entry in entries if entry.is_file()]
    except OSError as e:
        if disk.is_there(e):
            raise
        return []
    return [int(found[1]) for name in names if (found := _STREAM.fullmatch(name))]
