"""Checkpoint ids: 24 characters that sort by time.

45 bits of milliseconds since 2020, 10 bits of the millisecond (about a microsecond each) and 65
random bits, in Crockford's base 32. Along one line of descent ids strictly increase, whatever the
clock does: a child made in the same microsecond (or after the clock was set back) counts on from
its parent.
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
# To the digits of int(…, 32), which knows letters that are none of ours.
_TO_DIGITS = str.maketrans(ALPHABET + "ilou", "0123456789abcdefghijklmnopqrstuv~~~~")
_PAIRS = [a + b for a in ALPHABET for b in ALPHABET]

# Our own generator: user code may seed the global one, and a forked child must not repeat its
# parent's numbers.
_random = random.Random()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_random.seed)


def new_id(parent: bytes | None = None, now: int | None = None) -> bytes:
    """A fresh id, greater than `parent`. `now` is in nanoseconds since 1970."""
    since = max((now or time.time_ns()) - _EPOCH_NS, 0)
    fresh = ((since << 10) // 1_000_000 << _RANDOM_BITS) | _random.getrandbits(_RANDOM_BITS)
    id = fresh.to_bytes(BYTES, "big")
    if parent is not None and id <= parent:
        # A random stride keeps siblings that race from one parent apart.
        floor = int.from_bytes(parent, "big")
        id = (floor + 1 + _random.getrandbits(64)).to_bytes(BYTES, "big")
    return id


def lowest_at(ms: int) -> bytes:
    """The lowest id that can have been made at a time, in milliseconds since 1970."""
    since = min(max(ms - _EPOCH_MS, 0), (1 << 8 * BYTES - _BELOW_MS) - 1)
    return (since << _BELOW_MS).to_bytes(BYTES, "big")


def after(id: bytes) -> bytes:
    """The id that comes next; there is none after the highest."""
    return (int.from_bytes(id, "big") + 1).to_bytes(BYTES, "big")


@lru_cache(256)  # a checkpoint's id is told more than once, and again as its child's parent
def to_text(raw: bytes) -> str:
    n = int.from_bytes(raw, "big")
    return "".join([_PAIRS[(n >> shift) & 1023] for shift in range(110, -1, -10)])


def from_text(text: str) -> bytes | None:
    """The bytes of a full id, or None if `text` is not one."""
    if len(text) != CHARS or not (text.isascii() and text.isalnum()):
        return None
    try:
        return int(text.lower().translate(_TO_DIGITS), 32).to_bytes(BYTES, "big")
    except ValueError:
        return None


def prefix_range(text: str) -> tuple[bytes, bytes] | None:
    """The lowest and highest id that begin with `text`, or None if none could."""
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
