"""What is bound to a statement, in PostgreSQL's binary form."""

from __future__ import annotations

import functools
import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    Value = int | bytes | None | Sequence[int | None] | Sequence[bytes | None]

_BYTEA, _INT8 = 17, 20
_ARRAYS = {_BYTEA: 1001, _INT8: 1016}
_ABSENT = struct.pack("!i", -1)
_LENGTH = struct.Struct("!i")
_EIGHT = _LENGTH.pack(8)


@functools.lru_cache(512)
def numbered(query: str) -> bytes:
    """With $1, $2 and so on in place of each %s."""
    first, *others = query.split("%s")
    parts = [f"${n}{part}" for n, part in enumerate(others, start=1)]
    return "".join([first, *parts]).encode()


def types_of(values: Sequence[Value]) -> list[int]:
    return [_type_of(value) for value in values]


def _type_of(value: Value) -> int:
    """Numbers are all bigint; so is what may be one, but is NULL."""
    if isinstance(value, bytes):
        return _BYTEA
    if value is None or isinstance(value, int):
        return _INT8
    return _ARRAYS[_element(value)]


def _element(values: Sequence[Any]) -> int:
    known = [value for value in values[:1] if value is not None] or values
    return _BYTEA if any(isinstance(value, bytes) for value in known) else _INT8


def encoded(values: Sequence[Value]) -> list[bytes | None]:
    out: list[bytes | None] = []
    for value in values:
        if type(value) is bytes or value is None:
            out.append(value)
        elif isinstance(value, int):
            out.append(value.to_bytes(8, "big", signed=True))
        else:
            out.append(_array(value))
    return out


def _array(values: Sequence[Any]) -> bytes:
    kind = _element(values)
    parts = [struct.pack("!5i", 1, None in values, kind, len(values), 1)]
    for value in values:
        if value is None:
            parts.append(_ABSENT)
        elif kind == _INT8:
            parts += (_EIGHT, value.to_bytes(8, "big", signed=True))
        else:
            parts += (_LENGTH.pack(len(value)), value)
    return b"".join(parts)
