"""Damage to a store of files, behind its back."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from holdfast.storage import fs
from holdfast.storage.files import row_json
from holdfast.storage.files.backend import FilesBackend
from holdfast.storage.files.session_folders import blob_path

TORN = {"$raw": "dG9ybg=="}
Change = Callable[[dict[str, Any]], Any]


def folder(backend: FilesBackend, number: int) -> Path:
    found = backend._home.catalog.folder(number)
    assert found is not None
    return found.path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def edit_log(backend: FilesBackend, number: int, change: Change) -> None:
    """Change what the lines of a log say, digests and all."""
    path = folder(backend, number) / "log.jsonl"
    before = lines(path)
    for entry in before:
        change(entry)
        del entry["sum"]
    text = b"".join([row_json.seal_line(entry["n"], entry) for entry in before])
    assert text != path.read_bytes(), "nothing was damaged"
    fs.replace(path, text)


def spoil_head(backend: FilesBackend, number: int, *, missing: bool) -> None:
    last = lines(folder(backend, number) / "log.jsonl")[-1]["n"]

    def change(entry: dict[str, Any]) -> None:
        if missing:
            del entry["head"]
        elif entry["n"] == last:
            entry["head"] = TORN

    edit_log(backend, number, change)


def forget(backend: FilesBackend, what: str) -> None:
    """Facts of a kind, of all sessions."""
    for each in backend._home.catalog.folders():
        with suppress(AssertionError):
            edit_log(backend, each.identity.number, lambda entry: entry.pop(what, None))


def spoil_blob(backend: FilesBackend, n: int) -> None:
    """Damage the n-th blob that the first session refers to."""
    records = sorted((folder(backend, 1) / "checkpoints").glob("*.json"))
    named = re.findall(r'"\$blob":\["(\w+)"', "".join([record.read_text() for record in records]))
    digest = [*dict.fromkeys(named)][n]
    blob_path(backend.path, bytes.fromhex(digest)).write_bytes(b"torn")


@contextmanager
def failing(table: str) -> Iterator[None]:
    """Let the disk be full in the middle of what is written for a table: a file, or the log."""
    part = {"checkpoints": "/checkpoints/", "items": "/streams/", "blobs": "/blobs/"}
    real, failed = fs.write_all, False

    def write_all(handle: int, data: bytes, at: int) -> None:
        nonlocal failed
        if part.get(table, "/log.jsonl") in os.readlink(f"/proc/self/fd/{handle}"):
            failed = True
            real(handle, data[: len(data) // 2], at)
            raise OSError(errno.ENOSPC, "injected")
        real(handle, data, at)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fs, "write_all", write_all)
        yield
    assert failed, f"nothing was written for {table}"


def tear_last_line(backend: FilesBackend, number: int) -> None:
    path = folder(backend, number) / "log.jsonl"
    fs.replace(path, path.read_bytes()[:-30] + b"?" * 29 + b"\n")


def tear_newest_item(backend: FilesBackend) -> None:
    _, path = backend._home.catalog.streams()[-1]
    *before, last = path.read_bytes().splitlines(keepends=True)
    fs.replace(path, b"".join(before) + last.replace(b'"sum":"', b'"sum":"00', 1))


def replace_in(entry: dict[str, Any], what: str, row: int, wanted: Callable[[Any], bool]) -> None:
    """Tear the rows of some facts of an entry."""
    for fact in entry.get(what, ()):
        if wanted(fact):
            fact[row] = TORN


def spoil_operation(entry: dict[str, Any], number: int) -> None:
    if entry.get("operation", [0])[0] == number:
        entry["operation"][1] = TORN
