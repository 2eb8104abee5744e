"""Importing what other checkpoint systems and agents have left on a disk.

`import_(store, path)` looks at a path, tells which of the formats it has, and imports it. An import
may be run again at any time: it brings what is not in the store yet. The source is only read.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal

import apsw

from holdfast.errors import InvalidRequest
from holdfast.importers import claude_code, codex, openai_chat, s0, s1, s2, s3
from holdfast.importers.claude_code import import_claude_code
from holdfast.importers.codex import import_codex
from holdfast.importers.database import Source, Table, is_database
from holdfast.importers.foreign import Findings, Unsound, existing, shown
from holdfast.importers.landing import Imported
from holdfast.importers.openai_chat import import_openai_chat
from holdfast.importers.s0 import import_s0
from holdfast.importers.s1 import import_s1
from holdfast.importers.s2 import import_s2
from holdfast.importers.s3 import import_s3
from holdfast.importers.transcripts import Files

if TYPE_CHECKING:
    from holdfast import Store

__all__ = [
    "Imported",
    "import_",
    "import_claude_code",
    "import_codex",
    "import_openai_chat",
    "import_s0",
    "import_s1",
    "import_s2",
    "import_s3",
]

Format = Literal["s0", "s1", "s2", "s3", "claude-code", "codex", "openai-chat"]

_FORMATS = {"s0": s0, "s1": s1, "s2": s2, "s3": s3}
_LINES = {"claude-code": claude_code, "codex": codex}
_CHAT = "openai-chat"
_IMPORTS = {
    "s0": import_s0,
    "s1": import_s1,
    "s2": import_s2,
    "s3": import_s3,
    "claude-code": import_claude_code,
    "codex": import_codex,
    _CHAT: import_openai_chat,
}
_HINT = (
    'give format="s0" (<session>/checkpoints/cp_….json), "s1" (<session>_<step>.json), '
    '"s2" (index.json, sessions/<session>/<id>.json) or "s3" (<agent>/<id>.json, or SQLite); '
    'for transcripts "claude-code" (<session>.jsonl), "codex" (rollout-….jsonl) or '
    '"openai-chat" (a file with messages)'
)
_SAMPLES = 50


def import_(
    store: Store,
    path: str | os.PathLike[str],
    format: Format | None = None,
) -> Imported:
    """Import what is at `path` and not in the store yet; the source is only read.

    Without a format it is recognised; InvalidRequest if it could be several, or is none. What is
    damaged is listed in the result, and does not keep the rest from being imported.
    """
    if format is None:
        format = recognise(path)
    if format not in _IMPORTS:
        raise InvalidRequest(f"unknown format {format!r}", hint=_HINT)
    return _IMPORTS[format](store, path)


def recognise(source: str | os.PathLike[str]) -> Any:
    """The format of what is there: by what the files hold; if none of them tells, by their names.

    InvalidRequest if it could be several, or is none.
    """
    path = existing(source)
    found: list[str] = []
    if is_database(path):
        found = ["s3"] if _has_table(path) else []
    else:
        files = Files(path, "")
        found = _by_content(files)
        if os.path.isdir(path):
            names = files.names
            found = found or [name for name, module in _FORMATS.items() if module.layout(names)]
        else:
            found = [name for name in found if name not in _FORMATS]  # these are folders
    if len(found) == 1:
        return found[0]
    what = f"could be {' or '.join(found)}" if found else "is none of the known formats"
    raise InvalidRequest(f"{shown(path)} {what}", hint=_HINT)


def _by_content(files: Files) -> list[str]:
    found: set[str] = set()
    samples = 0
    for name in files.names:
        if samples == _SAMPLES:
            break
        kinds = _in_lines(files, name) if name.endswith(".jsonl") or len(files.names) == 1 else []
        if not kinds and name.endswith((".json", ".backup")):
            try:
                data = files.document(name)
            except Unsound:
                continue
            kinds = _in_document(data)
            samples += type(data) in (dict, list)
        samples += bool(kinds)
        found.update(kinds)
    return sorted(found)


def _in_lines(files: Files, name: str) -> list[str]:
    """The formats that the first lines of a file may be of."""
    for _, _, data in files.lines(name, limit=_SAMPLES):
        found = [format for format, module in _LINES.items() if module.looks_like(data)]
        if found or openai_chat.looks_like(data):
            return found or [_CHAT]
    return []


def _in_document(data: Any) -> list[str]:
    found = []
    if type(data) is dict:
        found = [format for format, module in _FORMATS.items() if module.looks_like(data)]
    return found or ([_CHAT] if openai_chat.looks_like(data) else [])


def _has_table(path: str) -> bool:
    """Also of a database that is too damaged to tell."""
    try:
        with Source(path).opened(Findings()) as connection:
            return Table(connection, s3.TABLE, s3.COLUMNS).missing is None
    except apsw.Error:
        return True
