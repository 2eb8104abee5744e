"""Back up a store to a path, verify the copy, and rotate older copies."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.errors import Corrupt, InvalidRequest, Unavailable, require_count
from holdfast.maintenance.verify import VerifyResult, verify
from holdfast.storage import fs
from holdfast.storage.files.backend import MARKER
from holdfast.storage.url import open_backend

if TYPE_CHECKING:
    from holdfast.storage.contract import Backend


def backup(backend: Backend, target: Path, keep: int | None) -> VerifyResult:
    """Copy the store to `target`, verify the copy, and return the report; see Store.backup."""
    if keep is not None:
        require_count("keep", keep)
    if backend.name not in ("sqlite", "files"):
        return _verified_copy(backend, target)
    own: Path = backend.path  # type: ignore[attr-defined]
    if target.is_dir() and not (target / MARKER).exists() and own not in target.resolve().parents:
        target /= own.name
    if keep is None:
        return _verified_copy(backend, target)
    copies = [target, *[target.with_name(f"{target.name}.{n}") for n in range(1, keep)]]
    for each in copies:
        _refuse_other(backend, each)
    draft = target.with_name(f".{target.name}.{secrets.token_hex(6)}.copy")
    report = _verified_copy(backend, draft)
    try:
        _rotate(draft, copies)
    except OSError as e:
        raise Unavailable(f"the backup is at {draft}: {e}", hint="move it yourself") from e
    return report


def _verified_copy(backend: Backend, target: Path) -> VerifyResult:
    """Write a copy and verify it. Remove it if it has damage that this store does not have."""
    backend.backup(target)
    try:
        report = _check(backend, target)
        if not report.ok:
            known = verify(backend, read_data=True).problems
            for problem in report.problems:
                if problem not in known:
                    raise Corrupt(f"the backup does not verify: {problem}", hint="try again")
    except BaseException:
        _remove(target)
        raise
    return report


def _check(backend: Backend, copy: Path) -> VerifyResult:
    opened = _open(backend, copy)
    try:
        return verify(opened, read_data=True)
    finally:
        opened.close()


def _open(backend: Backend, copy: Path) -> Backend:
    """Open a copy of a store, read-only."""
    kind = "files:" if backend.name == "files" else ""
    return open_backend(f"{kind}{copy}", read_only=True)


def _refuse_other(backend: Backend, path: Path) -> None:
    """Raise unless `path` is free, or is a closed backup that may be replaced."""
    there = os.path.lexists(path)
    if there and (path.is_symlink() or fs.identity(path) == backend.identity()):
        raise InvalidRequest(f"{path} is no backup of this store", hint="choose another path")
    for suffix in ("-wal", "-shm", "-journal"):
        if os.path.lexists(f"{path}{suffix}"):
            raise InvalidRequest(f"{path}{suffix} exists: the backup is in use", hint="close it")
    if there:
        _open(backend, path).close()


def _rotate(draft: Path, copies: list[Path]) -> None:
    """Move `draft` to the first of `copies`, and each copy one place further.

    Only the copies before the first free place move. If no place is free, the last copy is removed.
    """
    free = next((n for n, each in enumerate(copies) if not each.exists()), None)
    if free is None:
        free = len(copies) - 1
        _remove(copies[free])
    for n in range(free, 0, -1):
        os.rename(copies[n - 1], copies[n])
    os.rename(draft, copies[0])
    fs.sync(draft.parent)


def _remove(copy: Path) -> None:
    if copy.is_dir():
        shutil.rmtree(copy)
    else:
        copy.unlink(missing_ok=True)
