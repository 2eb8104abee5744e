"""MessagePack headers, read and written by hand, and a check for values nested too deeply."""

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
    """Return whether an encoding is a dict with string keys (others are tagged lists of pairs)."""
    return flat[0] & 0xF0 == 0x80 or flat[0] in (0xDE, 0xDF)


def is_tagged(flat: bytes) -> bool:
    return 0xC7 <= flat[0] <= 0xC9 or 0xD4 <= flat[0] <= 0xD8


def header_length(data: bytes) -> int:
    """Return the number of bytes before the content of an encoding."""
    return _LONG_HEADERS.get(data[0], 1)


def array_count(flat: bytes) -> int:
    """Return the number of items of an encoded list."""
    width = header_length(flat) - 1
    return int.from_bytes(flat[1 : 1 + width], "big") if width else flat[0] & 0x0F


def string_length(data: bytes, pos: int) -> int:
    """Return the length, header included, of the encoded str at `pos`. Raises Corrupt if none."""
    first = data[pos] if pos < len(data) else 0
    if first & 0xE0 == 0xA0:
        return 1 + (first & 0x1F)
    width = {0xD9: 1, 0xDA: 2, 0xDB: 4}.get(first)
    if width is None:
        raise Corrupt("a stored dict entry does not begin with its key")
    return 1 + width + int.from_bytes(data[pos + 1 : pos + 1 + width], "big")


_ROOM = 256
"""Calls from Python to C and back, two levels each. No sound value needs as many."""


def blames_caller(error: BaseException) -> bool:
    """Return whether a RecursionError comes from the caller's deep stack, not from stored bytes.

    Near the recursion limit, sound bytes raise it too. Then the error must reach the caller:
    treated as damage, it would be remembered, or even written.
    """
    if not isinstance(error, RecursionError):
        return False
    try:
        _descend(_ROOM)
    except RecursionError:
        return True
    return False


def _descend(calls: int) -> bool:
    return calls > 0 and any(map(_descend, (calls - 1,)))


class _Following:
    """Raises Corrupt where stored references are nested too deeply, for example in a circle."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, RecursionError) and not blames_caller(error):
            raise Corrupt("stored references are nested too deeply") from error


FOLLOWING = _Following()
