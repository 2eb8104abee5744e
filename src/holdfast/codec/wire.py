"""The few bytes of MessagePack that are taken apart and put together by hand: headers."""

from __future__ import annotations

from holdfast.errors import Corrupt


def array_header(n: int) -> bytes:
    if n < 16:
        return bytes((0x90 | n,))
    return b"\xdc" + n.to_bytes(2, "big") if n < 1 << 16 else b"\xdd" + n.to_bytes(4, "big")


def map_header(n: int) -> bytes:
    if n < 16:
        return bytes((0x80 | n,))
    return b"\xde" + n.to_bytes(2, "big") if n < 1 << 16 else b"\xdf" + n.to_bytes(4, "big")


def is_array(flat: bytes) -> bool:
    return flat[0] & 0xF0 == 0x90 or flat[0] in (0xDC, 0xDD)


def is_text(flat: bytes) -> bool:
    return flat[0] & 0xE0 == 0xA0 or flat[0] in (0xD9, 0xDA, 0xDB)


_LONG_HEADERS = {
    0xC4: 2, 0xC5: 3, 0xC6: 5, 0xC7: 3, 0xC8: 4, 0xC9: 6, 0xD4: 2, 0xD5: 2, 0xD6: 2, 0xD7: 2,
    0xD8: 2, 0xD9: 2, 0xDA: 3, 0xDB: 5, 0xDC: 3, 0xDD: 5, 0xDE: 3, 0xDF: 5,
}  # fmt: skip


def is_map(flat: bytes) -> bool:
    """Whether an encoding is a dict with plain string keys (others are tagged lists of pairs)."""
    return flat[0] & 0xF0 == 0x80 or flat[0] in (0xDE, 0xDF)


def header_length(data: bytes) -> int:
    """How many bytes of an encoding come before its content."""
    return _LONG_HEADERS.get(data[0], 1)


def string_length(data: bytes, pos: int) -> int:
    """The length, header included, of the encoded str at `pos`."""
    first = data[pos] if pos < len(data) else 0
    if first & 0xE0 == 0xA0:
        return 1 + (first & 0x1F)
    width = {0xD9: 1, 0xDA: 2, 0xDB: 4}.get(first)
    if width is None:
        raise Corrupt("a stored dict entry does not begin with its key")
    return 1 + width + int.from_bytes(data[pos + 1 : pos + 1 + width], "big")
