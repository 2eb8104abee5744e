"""The exact JSON rendering: stored bytes to readable JSON, and back to the same bytes.

Plain data is plain JSON. A type that JSON lacks is an object with one key that begins with `$`:

    {"$bytes": "…"}  {"$tuple": […]}  {"$datetime": […]}  {"$float": "nan"}  {"$blob": […]}  …

A key of a dict that begins with `$` gets a second `$`, so no data can imitate a tag. Each rendering
is checked: if it would not give the same bytes back, the bytes are kept in base64, as
{"$raw": "…"}. So the rendering never loses data.
"""

from __future__ import annotations

import json
import math
import re
from base64 import b64decode, b64encode
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

import ormsgpack
from ormsgpack import Ext

from holdfast.errors import Corrupt
from holdfast.format import memory_limit, values
from holdfast.format.msgpack import blames_caller
from holdfast.format.nodes import BLOB_TAG, ROPE_TAG

if TYPE_CHECKING:
    from collections.abc import Callable

_encode, _escape = [
    json.JSONEncoder(
        ensure_ascii=ascii, separators=(",", ":"), allow_nan=False, check_circular=False
    ).encode
    for ascii in (False, True)
]
# An encoding with none of these bytes needs no tags: it has no bytes, extension values or floats,
# and no key that begins with `$`.
_NOT_JSON = bytes((*range(0xC4, 0xCC), *range(0xD4, 0xD9), *b"$"))
# Lone surrogates are written as escapes, because many JSON readers refuse one, or join two of them.
_SPELLED = re.compile("[\\\\\ud800-\udfff]")
_SPELLING = re.compile(r"\\(?:\\|u(d[89a-f][0-9a-f]{2}))")
# Python limits the digits of an int in text. A process can set the limit, but not below 640 digits;
# an int of this many bytes has fewer.
_LONGEST_INT = 256
_SIMPLE = {str, int, bool, type(None)}
_KINDS = {"list": 0, "dict": 1, "text": 2, "bytes": 2, "raw": 2}
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


class _Tagged(NamedTuple):
    """The rendering of a tagged value, to distinguish it from a dict of the user."""

    shown: dict[str, Any]


def dumps(shown: Any) -> bytes:
    """Return compact JSON in UTF-8; escaped to ASCII if a string has lone surrogates."""
    try:
        return _encode(shown).encode()
    except UnicodeEncodeError:  # lone surrogates
        return _escape(shown).encode()


def loads(text: bytes) -> Any:
    """Parse JSON. Raises ValueError if it is none, and TooBig if it takes too much memory."""
    memory_limit.check_json(text)
    try:
        return json.loads(text)
    except RecursionError as e:
        if blames_caller(e):
            raise
        raise ValueError("nested too deeply") from None


def to_json(data: bytes) -> Any:
    """Return the rendering of an encoding, stored or canonical. Never fails on damaged bytes."""
    try:
        if len(data.translate(None, _NOT_JSON)) == len(data):
            shown = ormsgpack.unpackb(data)  # the common case: plain data
            if _pack(shown) == data:
                return shown
        shown = _show(values.decode(data, _show_tag))
        if from_json(shown) == data:
            return shown
    except (*_UNREADABLE, Corrupt) as e:
        if blames_caller(e):
            raise  # elsewhere the same bytes would have another rendering than $raw
    return {"$raw": _text(data)}


def from_json(shown: Any) -> bytes:
    """Return the encoding of a rendering. Raises Corrupt if it is not a valid one."""
    try:
        if type(shown) is dict and shown.keys() == {"$raw"}:
            return _bytes(shown["$raw"])
        return _pack(_hide(shown))
    except _UNREADABLE as e:
        if blames_caller(e):
            raise
        raise Corrupt(f"a JSON rendering does not decode: {e}") from e


def _pack(value: Any) -> bytes:
    return ormsgpack.packb(value, None, values.PACK)


def _text(data: bytes) -> str:
    return b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return b64decode(text, validate=True)


def _show(value: Any) -> Any:
    kind = type(value)
    if kind is str or kind is int or kind is bool or value is None:
        return value
    if kind is dict:
        return {f"${k}" if k.startswith("$") else k: _show(v) for k, v in value.items()}
    if kind is list:
        return [_show(v) for v in value]
    if kind is _Tagged:
        return value.shown
    if kind is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    return {"$bytes": _text(value)}


def _show_tag(tag: int, data: bytes) -> _Tagged:
    if tag not in _TAGS or (tag == values.BIGINT and len(data) > _LONGEST_INT):
        return _Tagged({"$ext": [tag, _text(data)]})
    name, show, _ = _TAGS[tag]
    return _Tagged({name: show(data)})


def _hide(shown: Any) -> Any:
    kind = type(shown)
    if kind is dict:
        if len(shown) == 1:
            [(name, inner)] = shown.items()
            if name[:1] == "$" and name[:2] != "$$":
                return _hide_tag(name, inner)
        return {k[1:] if k.startswith("$$") else _plain(k): _hide(v) for k, v in shown.items()}
    if kind is list and not {*map(type, shown)} <= _SIMPLE:
        return [_hide(v) for v in shown]
    return shown


def _plain(key: str) -> str:
    if key.startswith("$"):
        raise ValueError(f"{key!r} is not alone in its object")
    return key


def _hide_tag(name: str, inner: Any) -> Any:
    if name == "$bytes":
        return _bytes(inner)
    if name == "$float":
        return float(inner)
    if name == "$ext":
        return Ext(inner[0], _bytes(inner[1]))
    tag, hide = _NAMES[name]
    return Ext(tag, hide(inner))


# -- tags ----------------------------------------------------------------------------------------


def _show_packed(data: bytes) -> Any:
    return _show(values.decode(data, _show_tag))


def _hide_packed(shown: Any) -> bytes:
    return _pack(_hide(shown))


def _show_pairs(data: bytes) -> list[Any]:
    flat = _show_packed(data)
    return [[k, v] for k, v in zip(flat[::2], flat[1::2], strict=True)]


def _hide_pairs(shown: list[Any]) -> bytes:
    return _pack([_hide(part) for pair in shown for part in pair])


def _show_text(data: bytes) -> str:
    """Return text with each lone surrogate as an escape, and with backslashes doubled."""
    text = data.decode("utf-8", "surrogatepass")
    return _SPELLED.sub(lambda m: "\\\\" if m[0] == "\\" else f"\\u{ord(m[0]):x}", text)


def _hide_text(shown: str) -> bytes:
    text = _SPELLING.sub(lambda m: chr(int(m[1], 16)) if m[1] else "\\", shown)
    return text.encode("utf-8", "surrogatepass")


def _hide_int(shown: str) -> bytes:
    value = int(shown)
    return value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True)


def _show_blob(data: bytes) -> Any:
    digest, size = ormsgpack.unpackb(data)
    return [digest.hex(), size]


def _show_rope(data: bytes) -> Any:
    kind, count, size, digest, head, debt, tails, extents = ormsgpack.unpackb(data)
    shown: dict[str, Any] = {
        "kind": ("list", "dict", _kind_of(head))[kind],
        "items": [extents[i : i + 3] for i in range(0, len(extents), 3)],
        "count": count,
        "size": size,
        "hash": digest.hex(),
        "tails": tails,
    }
    if head:
        shown["head"] = _text(head)
    if debt:
        shown["debt"] = debt
    return shown


def _kind_of(head: bytes) -> str:
    """Return the type of a value in fragments, by the first byte of its encoding."""
    first = head[:1]
    if b"\xd9" <= first <= b"\xdb":
        return "text"
    return "bytes" if b"\xc4" <= first <= b"\xc6" else "raw"


def _hide_rope(shown: dict[str, Any]) -> bytes:
    head = _bytes(shown["head"]) if "head" in shown else b""
    extents = [n for extent in shown["items"] for n in extent]
    digest = bytes.fromhex(shown["hash"])
    kind, debt = _KINDS[shown["kind"]], shown.get("debt", 0)
    return _pack([kind, shown["count"], shown["size"], digest, head, debt, shown["tails"], extents])


_Rule = tuple[str, "Callable[[bytes], Any]", "Callable[[Any], bytes]"]
_TAGS: dict[int, _Rule] = {
    values.TUPLE: ("$tuple", _show_packed, _hide_packed),
    values.SET: ("$set", _show_packed, _hide_packed),
    values.FROZENSET: ("$frozenset", _show_packed, _hide_packed),
    values.BIGINT: ("$int", lambda d: str(int.from_bytes(d, "big", signed=True)), _hide_int),
    values.STR: ("$str", _show_text, _hide_text),
    values.DICT: ("$dict", _show_pairs, _hide_pairs),
    values.DATETIME: ("$datetime", _show_packed, _hide_packed),
    values.DATE: ("$date", bytes.decode, str.encode),
    values.TIME: ("$time", _show_packed, _hide_packed),
    values.TIMEDELTA: ("$timedelta", _show_packed, _hide_packed),
    values.DECIMAL: ("$decimal", bytes.decode, str.encode),
    values.UUID_: ("$uuid", lambda d: str(UUID(bytes=d)), lambda s: UUID(s).bytes),
    BLOB_TAG: ("$blob", _show_blob, lambda s: _pack([bytes.fromhex(s[0]), s[1]])),
    ROPE_TAG: ("$rope", _show_rope, _hide_rope),
}
_NAMES = {name: (tag, hide) for tag, (name, _, hide) in _TAGS.items()}
