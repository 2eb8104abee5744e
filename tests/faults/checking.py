"""Opens a store after a fault and compares what it answers with what the ledger promises."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import holdfast

from .ledger import Ledger, digest

MEMORY = Path("/dev/shm")


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder that is gone afterwards, in memory where the system offers that."""
    parent = MEMORY if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="holdfast-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def findings(
    url: str, ledger: Ledger, *, loads: int | None = None, deep: bool = True, seed: int = 0
) -> list[str]:
    """What is wrong with the store at `url`; empty if it keeps every promise of the ledger.

    `loads` bounds how many acknowledged checkpoints are loaded (the newest, and a sample of the
    older ones). Unless `deep` is False, the hash chain of all of them is verified, and saving has
    to work again.
    """
    found = list(ledger.wrong)
    try:
        store = holdfast.open(url)
    except Exception as error:
        return [*found, f"does not open: {named(error)}"]
    try:
        found += _checkpoints(store, ledger, loads, seed)
        found += _heads(store, ledger)
        found += _deleted(store, ledger, seed)
        if deep and not found and not store.verify(read_data=True).ok:
            found.append("verify reports damage")
        if deep and not found:
            found += _next_save(store, ledger)
    except Exception as error:
        found.append(f"not one of the library's errors: {named(error)}")
    try:
        store.close()
    except Exception as error:
        found.append(f"does not close: {named(error)}")
    return found


def load_findings(session: Any, checkpoint_id: str, expected: str) -> list[str]:
    try:
        state = session.load(checkpoint_id)
    except holdfast.NotFound as error:
        return [f"lost: {checkpoint_id}: {named(error)}"]
    except holdfast.HoldfastError as error:
        return [f"unreadable: {checkpoint_id}: {named(error)}"]
    return [] if digest(state) == expected else [f"wrong state: {checkpoint_id}"]


def _checkpoints(store: Any, ledger: Ledger, loads: int | None, seed: int) -> list[str]:
    promised = list(ledger.saved.items())
    if loads is not None and len(promised) > loads:
        newest = promised[-(loads // 2) :]
        older = promised[: -(loads // 2)]
        promised = random.Random(seed).sample(older, min(len(older), loads - len(newest))) + newest
    handles: dict[str, Any] = {}
    found = []
    for checkpoint_id, (session, expected) in promised:
        if session not in handles:
            handles[session] = store.session(session)
        found += load_findings(handles[session], checkpoint_id, expected)
    return found


def _heads(store: Any, ledger: Ledger) -> list[str]:
    found = []
    for name, possible in ledger.heads.items():
        session = store.session(name)
        if session.head is None:
            if name not in ledger.may_be_missing:
                found.append(f"lost: session {name!r} has no head")
            continue
        try:
            state = session.load()
        except holdfast.HoldfastError as error:
            found.append(f"unreadable: head of {name!r}: {named(error)}")
            continue
        if digest(state) not in possible:
            found.append(f"wrong state: head of {name!r} is neither acknowledged nor attempted")
    return found


def _deleted(store: Any, ledger: Ledger, seed: int) -> list[str]:
    """What is to be deleted is there or not, but never another; what was deleted is not."""
    found = []
    for promised in (ledger.doomed, ledger.gone):
        chosen = random.Random(seed).sample(sorted(promised), min(len(promised), 6))
        for checkpoint_id in chosen:
            session, expected = promised[checkpoint_id]
            what = load_findings(store.session(session), checkpoint_id, expected)
            found += [each for each in what if not each.startswith("lost: ")]
            if not what and promised is ledger.gone:
                found.append(f"deleted, but there: {checkpoint_id}")
    return found


def _next_save(store: Any, ledger: Ledger) -> list[str]:
    name = next(iter(ledger.heads), "main")
    session = store.session(name)
    try:
        state = {} if session.head is None else session.load()
        state["after the fault"] = [1, 2.0, None]
        saved = session.save(state)
        found = load_findings(store.session(name), saved.id, digest(state))
        appended = session.append("after the fault", "more")
        state["after the fault"].append("more")
        return found + load_findings(store.session(name), appended.id, digest(state))
    except holdfast.HoldfastError as error:
        return [f"the next save fails: {named(error)}"]


def named(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
