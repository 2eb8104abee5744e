"""Import what export() wrote, and the files of other checkpoint stores and agents."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from typing import Any, Literal

import apsw

from holdfast import Store, file_kind
from holdfast.errors import InvalidRequest
from holdfast.importers.checkpoints import (
    COLUMNS,
    TABLE,
    import_s0,
    import_s1,
    import_s2,
    import_s3,
)
from holdfast.importers.save import ImportResult
from holdfast.importers.transcripts import claude_code, codex, openai_chat
from holdfast.importers.transcripts.claude_code import import_claude_code
from holdfast.importers.transcripts.codex import import_codex
from holdfast.importers.transcripts.openai_chat import import_openai_chat
from holdfast.importers.untrusted import (
    Database,
    Files,
    Findings,
    Table,
    Unsound,
    existing,
    is_database,
    printable,
)

__all__ = ["ImportResult", "import_", "recognise"]

Format = Literal["export", "s0", "s1", "s2", "s3", "claude-code", "codex", "openai-chat"]

_FIELDS = {
    "s0": {"tool_calls_pending", "iteration"},
    "s1": {"agent_name", "step", "partial_results"},
    "s2": {"session_id", "state", "metadata"},
    "s3": {"agent_id", "conversation"},
}
"""Fields that each checkpoint of a format has."""
_NAMES = {
    "s0": re.compile(r"(^|[/\\])checkpoints[/\\]cp_[^/\\]*\.json"),
    "s1": re.compile(r"_(latest|[0-9]+)\.json$"),
    "s2": re.compile(r"^(index|sessions.*)\.json$", re.DOTALL),
}
"""Names that show the format of a folder. That of S3 has no such names."""
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
"""So many files, and lines of a file, are read to recognise a format."""


def import_(
    store: Store,
    path: str | os.PathLike[str],
    format: Format | None = None,
    *,
    sessions: Iterable[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ImportResult:
    """Import the checkpoints at `path` that are not in the store yet. The source is only read.

    The source is a file or folder that export() wrote, the checkpoints of another store, or the
    transcript of an agent. Without a format, it is recognised. Damaged parts of the source are
    listed in the result, and the rest is imported.

    `sessions` and `progress` are those of Store.copy(), and work only for the format "export".
    Raises InvalidRequest if the format is unknown, or not recognised.
    """
    if format is None:
        format = recognise(path)
    if format == "export":
        return ImportResult(*store.import_exported(path, sessions=sessions, progress=progress))
    if sessions is not None:
        raise InvalidRequest("sessions can be chosen only from an export", hint="leave them out")
    if format not in _IMPORTS:
        raise InvalidRequest(f"unknown format {format!r}", hint=_HINT)
    return _IMPORTS[format](store, path)


def recognise(source: str | os.PathLike[str]) -> Any:
    """Return the format of a file or folder, from the contents of files, or else from their names.

    Raises InvalidRequest if several formats are possible, or none.
    """
    path = existing(source)
    kind = file_kind(path)
    if kind == "export":
        return kind
    if kind == "store":
        raise InvalidRequest(
            f"{printable(path)} is a store of holdfast", hint="open it, and copy() it"
        )
    if is_database(path):
        formats = ["s3"] if _has_table(path) else []
    else:
        files = Files(path)
        formats = _by_content(files)
        if not os.path.isdir(path):
            formats = [name for name in formats if name not in _FIELDS]  # these are folders
        elif not formats:
            formats = [name for name, it in _NAMES.items() if any(map(it.search, files.names))]
    if len(formats) == 1:
        return formats[0]
    what = f"could be {' or '.join(formats)}" if formats else "has none of the known formats"
    raise InvalidRequest(f"{printable(path)} {what}", hint=_HINT)


def _by_content(files: Files) -> list[str]:
    """Return the formats of the first files that have one."""
    formats: set[str] = set()
    samples = 0
    for name in files.names:
        if samples == _SAMPLES:
            break
        may_be_lines = name.endswith(".jsonl") or len(files.names) == 1
        found = _by_lines(files, name) if may_be_lines else []
        if not found and name.endswith((".json", ".backup")):
            try:
                data = files.document(name)
            except Unsound:
                continue
            found = _by_document(data)
            samples += type(data) in (dict, list)
        samples += bool(found)
        formats.update(found)
    return sorted(formats)


def _by_lines(files: Files, name: str) -> list[str]:
    for _, _, data in files.lines(name, limit=_SAMPLES):
        found = [format for format, module in _LINES.items() if module.looks_like(data)]
        if found or openai_chat.looks_like(data):
            return found or [_CHAT]
    return []


def _by_document(data: Any) -> list[str]:
    found = []
    if type(data) is dict:
        found = [format for format, fields in _FIELDS.items() if fields <= data.keys()]
    return found or ([_CHAT] if openai_chat.looks_like(data) else [])


def _has_table(path: str) -> bool:
    """Return whether a database has the table of S3, or may have it but is damaged."""
    try:
        with Database(path).opened(Findings()) as connection:
            return Table(connection, TABLE, COLUMNS).missing is None
    except apsw.Error:
        return True
