"""Importing what other checkpoint systems have left on a disk.

`import_(store, path)` looks at a path, tells which of the formats it has, and imports it. An import
may be run again at any time: it brings what is not in the store yet. The source is only read.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal

import apsw

from holdfast.errors import InvalidRequest
from holdfast.importers import s0, s1, s2, s3
from holdfast.importers.database import Source, Table, is_database
from holdfast.importers.foreign import Findings, Folder, Unsound, decode, existing, shown
from holdfast.importers.landing import Imported
from holdfast.importers.s0 import import_s0
from holdfast.importers.s1 import import_s1
from holdfast.importers.s2 import import_s2
from holdfast.importers.s3 import import_s3

if TYPE_CHECKING:
    from holdfast import Store

__all__ = ["Imported", "import_", "import_s0", "import_s1", "import_s2", "import_s3"]

_FORMATS = {"s0": s0, "s1": s1, "s2": s2, "s3": s3}
_IMPORTS = {"s0": import_s0, "s1": import_s1, "s2": import_s2, "s3": import_s3}
_HINT = (
    'give format="s0" (<session>/checkpoints/cp_….json), "s1" (<session>_<step>.json), '
    '"s2" (index.json, sessions/<session>/<id>.json) or "s3" (<agent>/<id>.json, or SQLite)'
)
_SAMPLES = 50


def import_(
    store: Store,
    path: str | os.PathLike[str],
    format: Literal["s0", "s1", "s2", "s3"] | None = None,
) -> Imported:
    """Import the checkpoints at `path` that are not in the store yet; the source is only read.

    Without a format it is recognised; InvalidRequest if it could be several, or is none. What is
    damaged is listed in the result, and does not keep the rest from being imported.
    """
    if format is None:
        format = _recognise(existing(path))
    if format not in _IMPORTS:
        raise InvalidRequest(f"unknown format {format!r}", hint=_HINT)
    return _IMPORTS[format](store, path)


def _recognise(path: str) -> Any:
    """By what the files hold; if none of them tells, by their names."""
    if os.path.isdir(path):
        folder = Folder(path, Findings())
        found = _by_content(folder)
        if not found:
            found = [name for name, module in _FORMATS.items() if module.layout(folder.files)]
    else:
        found = ["s3"] if is_database(path) and _has_table(path) else []
    if len(found) == 1:
        return found[0]
    what = f"could be {' or '.join(found)}" if found else "is none of the known formats"
    raise InvalidRequest(f"{shown(path)} {what}", hint=_HINT)


def _by_content(folder: Folder) -> list[str]:
    found: set[str] = set()
    samples = 0
    for name in folder.files:
        if samples == _SAMPLES:
            break
        try:
            data = decode(folder.read(name)) if name.endswith((".json", ".backup")) else None
        except Unsound:
            continue
        if type(data) is dict:
            samples += 1
            found.update(name for name, module in _FORMATS.items() if module.looks_like(data))
    return sorted(found)


def _has_table(path: str) -> bool:
    """Also of a database that is too damaged to tell."""
    try:
        with Source(path).opened(Findings()) as connection:
            return Table(connection, s3.TABLE, s3.COLUMNS).missing is None
    except apsw.Error:
        return True
