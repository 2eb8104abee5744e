"""S2: a session store for what-if exploration, with parents.

`sessions/<session>/<id>.json`, and `index.json`. Files are found by listing the folder. The index
is only compared, and its paths are never opened. A checkpoint names its parent if it was made after
the user went back. Any other checkpoint follows the one before it in time.

`token_count` is the size of the context at that moment, not usage, so it is only in `meta`.
"""

from __future__ import annotations

import os
from typing import Any

from holdfast import Store
from holdfast.importers.checkpoints.foreign import (
    Foreign,
    import_entries,
    read_files,
    save_fields,
    tags_in,
)
from holdfast.importers.save import Imported, merge_meta
from holdfast.importers.untrusted import Document, Files, Unsound, decode, instant

_INDEX = "index.json"


def import_s2(store: Store, path: str | os.PathLike[str]) -> Imported:
    """Import the sessions in a folder of S2. The folder is only read."""
    files = Files(path, single=False)
    names = files.select(".json", kind="checkpoint file")
    if _INDEX in names:
        names.remove(_INDEX)
        _check_index(files, {*names})
    return import_entries(store, "s2", read_files("s2", files, names, parse), files.findings)


def _check_index(files: Files, names: set[str]) -> None:
    """Report files that the index lists and the folder does not have."""
    try:
        index = Document(decode(files.read(_INDEX))).rest()
    except Unsound as e:
        files.skip(_INDEX, f"{e}; the files are imported without it")
        return
    for id, data in index.items():
        where = f"{_INDEX}: {id!r}"
        try:
            path = Document(data).text("path")
        except Unsound as e:
            files.findings.skip(where, e)
            continue
        inside = files.inside(path)
        if inside is None:
            why = f"its path {path[:200]!r} leads out of the folder: not opened"
            files.findings.skip(where, why)
        elif inside not in names:
            files.findings.skip(where, f"there is no file {path[:200]!r}")


def parse(data: Any, _: bytes) -> Foreign:
    it = Document(data)
    id, session, created = it.name("id"), it.name("session_id"), it.take("created_at")
    label = it.text("label") if it.has("label") else None
    state = {"state": it.take("state")}
    if it.has("context"):
        state["context"] = _bytes(it.items("context"))
    inner = Document(it.mapping("metadata"), "metadata")
    meta = {"id": id, "created_at": created}
    for name in ("tasks_completed", "token_count", "state_size_bytes"):
        if inner.has(name):
            meta[name] = inner.integer(name)
    if inner.has("context_compressed"):
        meta["context_compressed"] = inner.boolean("context_compressed")
    parent = inner.name("parent_checkpoint_id") if inner.has("parent_checkpoint_id") else None
    if parent is not None:
        meta["parent_checkpoint_id"] = parent
    if inner.has("extra"):
        meta["extra"] = inner.mapping("extra")
    if rest := inner.rest():
        meta["metadata"] = rest
    fields = save_fields(merge_meta(it.rest(), meta), label=("label", label))
    if tags := tags_in(meta.get("extra", {})):
        fields["tags"] = [*fields.get("tags", ()), *tags]
    return Foreign(session, id, (0, instant(created), 0), state, fields, parent=parent)


def _bytes(numbers: list[Any]) -> bytes:
    if not all(type(n) is int and 0 <= n <= 255 for n in numbers):
        raise Unsound("context is not a list of bytes")
    return bytes(numbers)
