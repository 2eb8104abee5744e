"""Checkpoint ids: 24 characters that sort by time.

45 bits of milliseconds since 2020, 10 bits of the millisecond (about a microsecond each) and 65
random bits, in Crockford's base 32. Every id is greater than its parent's, even if both are made in
the same microsecond or the clock was set back: then it is the parent's plus a random number.
"""

from __future__ import annotations

import os
import random
import time
from functools import lru_cache

ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
BYTES = 15
CHARS = 24

_EPOCH_MS = 1_577_836_800_000
_EPOCH_NS = _EPOCH_MS * 1_000_000
_RANDOM_BITS = 65
_BELOW_MS = 75  # bits
_VALUES = {c: i for i, c in enumerate(ALPHABET)}
# Our digits as the digits of int(…, 32). The letters i, l, o and u are not ours and become invalid.
_TO_DIGITS = str.maketrans(ALPHABET + "ilou", "0123456789abcdefghijklmnopqrstuv~~~~")
_PAIRS = [a + b for a in ALPHABET for b in ALPHABET]

# A generator for ids alone: user code may seed the global one, and a forked child must not repeat
# the numbers of its parent process.
_random = random.Random()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_random.seed)


def new_id(parent: bytes | None = None, now: int | None = None) -> bytes:
    """Return a new id, greater than `parent`. `now` is in nanoseconds since 1970."""
    since = max((now or time.time_ns()) - _EPOCH_NS, 0)
    fresh = ((since << 10) // 1_000_000 << _RANDOM_BITS) | _random.getrandbits(_RANDOM_BITS)
    id = fresh.to_bytes(BYTES, "big")
    if parent is not None and id <= parent:
        # A random step: two processes that save children of one parent get different ids.
        floor = int.from_bytes(parent, "big")
        id = (floor + 1 + _random.getrandbits(64)).to_bytes(BYTES, "big")
    return id


def lowest_at(ms: int) -> bytes:
    """Return the lowest id that can be made at a time, given in milliseconds since 1970."""
    since = min(max(ms - _EPOCH_MS, 0), (1 << 8 * BYTES - _BELOW_MS) - 1)
    return (since << _BELOW_MS).to_bytes(BYTES, "big")


def after(id: bytes) -> bytes:
    """Return the next higher id. Raises OverflowError for the highest one."""
    return (int.from_bytes(id, "big") + 1).to_bytes(BYTES, "big")


@lru_cache(256)  # an id is rendered several times, also as the parent of the next checkpoint
def to_text(raw: bytes) -> str:
    n = int.from_bytes(raw, "big")
    return "".join([_PAIRS[(n >> shift) & 1023] for shift in range(110, -1, -10)])


def from_text(text: str) -> bytes | None:
    """Return the bytes of a full id, or None if `text` is not one."""
    if len(text) != CHARS or not (text.isascii() and text.isalnum()):
        return None
    try:
        return int(text.lower().translate(_TO_DIGITS), 32).to_bytes(BYTES, "big")
    except ValueError:
        return None


def prefix_range(text: str) -> tuple[bytes, bytes] | None:
    """Return the lowest and highest id that begin with `text`, or None if no id can."""
    if not text or len(text) > CHARS:
        return None
    n = 0
    for c in text.lower():
        value = _VALUES.get(c)
        if value is None:
            return None
        n = n << 5 | value
    rest = 5 * (CHARS - len(text))
    return (n << rest).to_bytes(BYTES, "big"), ((n + 1 << rest) - 1).to_bytes(BYTES, "big")
