"""Sealed rows: compressed where it saves space, with a checksum over the bytes and the address.

A row is `digest (8) | flags (1) | payload`. The digest is XXH3-64 over everything after it, and its
seed is the row's address. So every read notices a flipped bit, a torn write and a row at a wrong
address. The digest protects against accidents, and the hash chain of records against tampering.
"""

from __future__ import annotations

import threading
from itertools import pairwise
from typing import Any, NamedTuple

import ormsgpack
import zstandard
from xxhash import xxh3_64_digest

from holdfast.errors import Corrupt, UnsupportedFormat
from holdfast.format import memory_limit
from holdfast.format.values import MAX_VALUE

ZSTD, MANY, REFS = 1, 2, 4
ENCRYPTED = 128
"""Reserved for encryption. A reader that cannot decrypt must refuse the row."""

# One seed per kind of row, to which the address is added.
_SEEDS = [n * 0x9E37_79B9_7F4A_7C15 & 0xFFFF_FFFF_FFFF_FFFF for n in range(1, 14)]
CHECKPOINT, ITEMS, BLOB, HEAD, SESSION, MARK, OPERATION, COUNTER, TOMBSTONE, GRAFT, *_SEEDS = _SEEDS
LEASE, JOURNAL, LOOSE = _SEEDS
_MASK = 0xFFFF_FFFF_FFFF_FFFF
_FLAGS = [bytes((n,)) for n in range(256)]

PLAIN, FAST, DENSE = 0, 1, 3
"""Compression levels of zstd: none, fast and dense."""
_COMPRESS_FROM = 128
SMALL, RATIO = 16 << 20, 1000
"""The most bytes that n compressed bytes may expand to: SMALL or RATIO * n, the larger one."""
_local = threading.local()  # zstd contexts are not safe to share between threads


def _zstd(level: int) -> Any:
    """Return this thread's compressor of a level; for level 0 the decompressor."""
    try:
        return _local.zstd[level]
    except AttributeError:
        _local.zstd = {n: zstandard.ZstdCompressor(level=n) for n in (FAST, DENSE)}
        _local.zstd[PLAIN] = zstandard.ZstdDecompressor()
        return _local.zstd[level]


def blob_address(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big")


def seal(kind: int, address: int, payload: bytes, flags: int = 0, level: int = FAST) -> bytes:
    """Return the bytes to store for `payload` at `address`."""
    if level and len(payload) >= _COMPRESS_FROM:
        packed = _zstd(level).compress(payload)
        if len(packed) < len(payload) <= _bound(len(packed)):
            payload = packed
            flags |= ZSTD
    body = _FLAGS[flags] + payload
    return xxh3_64_digest(body, (kind + address) & _MASK) + body


def _bound(packed: int) -> int:
    """Return the most bytes that `packed` compressed bytes may expand to.

    A row that would expand to more is stored uncompressed.
    """
    return min(max(SMALL, RATIO * packed), MAX_VALUE + SMALL)


def is_sealed(kind: int, address: int, row: bytes) -> bool:
    """Return whether the digest of a row fits `address`. The payload is not decoded."""
    return len(row) > 8 and xxh3_64_digest(row[8:], (kind + address) & _MASK) == row[:8]


def unseal(kind: int, address: int, row: bytes, what: str) -> tuple[int, bytes]:
    """Return the flags and the payload of a row. `what` names it in messages.

    Raises Corrupt if the digest does not fit, and UnsupportedFormat for flags of a newer version.
    """
    body = row[8:] if type(row) is bytes else b""
    if len(body) < 1 or xxh3_64_digest(body, (kind + address) & _MASK) != row[:8]:
        raise Corrupt(f"{what} is damaged: its bytes do not match their digest")
    flags = body[0]
    if flags & ~(ZSTD | MANY | REFS):
        how = "encrypted" if flags & ENCRYPTED else "stored in a newer way"
        raise UnsupportedFormat(f"{what} is {how}; this version cannot read it")
    return flags, _expand(body[1:], what) if flags & ZSTD else body[1:]


def _expand(packed: bytes, what: str) -> bytes:
    """Decompress. Raises Corrupt unless the frame declares its size, within the bound."""
    try:
        size = zstandard.frame_content_size(packed)
        if 0 <= size <= _bound(len(packed)):
            data: bytes = _zstd(PLAIN).decompress(packed, allow_extra_data=False)
            return data
    except (zstandard.ZstdError, ValueError) as e:
        raise Corrupt(f"{what} does not decompress: {e}") from e
    raise Corrupt(f"{what} declares an impossible size once decompressed: {size} bytes")


class ItemRow(NamedTuple):
    """Consecutive items of a stream, stored in one row."""

    ends: list[int]
    """The end of each item in `data`."""
    data: bytes
    refs: bool
    """Whether some item holds references (to blobs or other streams)."""

    def items(self) -> list[bytes]:
        """Return the items, one by one."""
        data = self.data
        return [data[start:end] for start, end in pairwise([0, *self.ends])]


def seal_items(address: int, items: list[bytes], refs: bool, level: int) -> bytes:  # noqa: FBT001
    """Return a row of items: of one item its bytes, of several a table of lengths before them."""
    flags = REFS if refs else 0
    if len(items) == 1:
        return seal(ITEMS, address, items[0], flags, level)
    table = ormsgpack.packb([len(i) for i in items])
    data = b"".join([len(table).to_bytes(4, "big"), table, *items])
    return seal(ITEMS, address, data, flags | MANY, level)


def unseal_items(address: int, row: bytes, what: str) -> ItemRow:
    """Return the items of a row. Raises Corrupt if it is damaged."""
    flags, data = unseal(ITEMS, address, row, what)
    refs = bool(flags & REFS)
    if not flags & MANY:
        return ItemRow([len(data)], data, refs)
    cut = 4 + int.from_bytes(data[:4], "big")
    memory_limit.check(data[4:cut])
    try:
        lengths = ormsgpack.unpackb(data[4:cut])
        ends: list[int] = []
        end = 0
        for n in lengths:
            if type(n) is not int:
                raise TypeError("not a length")
            end += n
            ends.append(end)
    except (ValueError, TypeError) as e:
        raise Corrupt(f"{what} has a damaged table of lengths") from e
    data = data[cut:]
    if not ends or end != len(data) or min(lengths) < 0:
        raise Corrupt(f"{what} has a table of lengths that does not fit its data")
    return ItemRow(ends, data, refs)
