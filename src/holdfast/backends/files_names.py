"""What the folders of sessions, and the files of their streams, are called."""

from __future__ import annotations

import os
import re
import unicodedata

from holdfast.backends.files_ledger import STREAMS

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


def streams_in(folder: str) -> list[int]:
    """The streams that have a file in a session's folder."""
    try:
        names = os.listdir(os.path.join(folder, STREAMS))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [int(found[1]) for name in names if (found := _STREAM.fullmatch(name))]
