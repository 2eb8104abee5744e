"""Strict equality of values, stores to save them to, and other processes."""

import datetime as dt
import itertools
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import pydantic

import holdfast
from tests.support.stores import Home


@dataclass(frozen=True)
class Point:
    x: Any = 0


class Frozen(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True)
    x: int = 0


PAD = "p" * 1300
"""Big enough that a list of it, or a dict of four, does not stay in the root."""

_numbers = itertools.count()


def fresh(store: holdfast.Store) -> holdfast.Session:
    """Return a session that is new."""
    return store.session(f"session {next(_numbers)}")


@contextmanager
def opened(kind: str, folder: Path) -> Iterator[holdfast.Store]:
    """Memory with its images, others without: there each save finds its parent in the file."""
    home = Home(kind, folder, cache_bytes=1 << 20 if kind == "memory" else 0)
    yield home.store
    home.give_back()


def same(a: Any, b: Any) -> bool:
    """Equal in everything a program could tell apart."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10_000)
    try:
        return _same(a, b)
    finally:
        sys.setrecursionlimit(limit)


def _same(a: Any, b: Any) -> bool:
    kind = type(a)
    if kind is not type(b):
        return False
    if kind is float:
        return struct.pack(">d", a) == struct.pack(">d", b)
    if kind is Decimal:
        return bool(a.as_tuple() == b.as_tuple())
    if kind in (list, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if kind is dict:  # in order
        return len(a) == len(b) and all(map(_same, a.items(), b.items()))
    if kind in (set, frozenset):
        return len(a) == len(b) and all(any(_same(x, y) for y in b) for x in a)
    if kind in (dt.datetime, dt.time):
        naive = a.replace(tzinfo=None) == b.replace(tzinfo=None) and a.fold == b.fold
        zone = type(a.tzinfo) is type(b.tzinfo) and str(a.tzinfo) == str(b.tzinfo)
        return naive and zone and a.utcoffset() == b.utcoffset()
    return bool(a == b)


def python(code: str, given: str = "", **environment: str) -> str:
    """Run code in a new interpreter and return its output."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=given,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
