"""Encode values to bytes and decode them back, exactly.

The canonical encoding of a value is MessagePack, with extension types for types that it lacks. It
is deterministic: equal bytes mean equal values of equal types. User data cannot imitate a tag,
because tags are extension codes, outside the data. Decoding never imports or runs code
that the data names.

Most values take one call of a C encoder. Some values it cannot encode exactly: a lone surrogate, a
dict with other keys than strings, a type that it would silently convert. For these there is a
slower walk in Python. The walk also finds the path of a value that must be refused.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import gc
from contextlib import suppress
from decimal import Decimal
from enum import Enum
from functools import lru_cache
from sys import getrefcount
from typing import TYPE_CHECKING, Any
from uuid import UUID

import ormsgpack
from ormsgpack import Ext, Fragment

from holdfast.errors import Corrupt, HoldfastError, NotSerializable
from holdfast.format import memory_limit, msgpack
from holdfast.format.msgpack import blames_caller

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.format.memory_limit import Meter

    Hook = Callable[[int, bytes], Any]

MAX_DEPTH = 64
"""The greatest depth of a state, counted from its root."""
MAX_VALUE = 512 << 20
"""The most bytes of one encoded value, and of one stored row after decompression."""

TUPLE, SET, FROZENSET, BIGINT, STR, DICT = 1, 2, 3, 4, 5, 6
DATETIME, DATE, TIME, TIMEDELTA, DECIMAL, UUID_ = 7, 8, 9, 10, 11, 12

PACK = (
    ormsgpack.OPT_PASSTHROUGH_BIG_INT
    | ormsgpack.OPT_PASSTHROUGH_DATACLASS
    | ormsgpack.OPT_PASSTHROUGH_DATETIME
    | ormsgpack.OPT_PASSTHROUGH_ENUM
    | ormsgpack.OPT_PASSTHROUGH_SUBCLASS
    | ormsgpack.OPT_PASSTHROUGH_TUPLE
    | ormsgpack.OPT_PASSTHROUGH_UUID
)
_packb = ormsgpack.packb
_unpackb = ormsgpack.unpackb

# An encoding without these bytes holds no bin and no ext. As these two, the C encoder also writes
# types that do not come back from decoding (bytearray, memoryview, Ext, Fragment).
_BIN_OR_EXT = [bytes((n,)) for n in (*range(0xC4, 0xCA), *range(0xD4, 0xD9))]
_GC_PAUSE_BYTES = 1 << 17
_HOOK_FAILED = "ext_hook failed"  # the message of the C decoder
_UNDECODABLE = (ValueError, TypeError, LookupError, ArithmeticError, RecursionError)
# The C encoder copies a Fragment into its output without a check. Each one alive holds a reference
# to the type, so the count of references shows whether there are any.
_FRAGMENTS = getrefcount(Fragment)
_TEXT = {str, int, float, bool, type(None)}
_PLAIN = _TEXT | {dict, list}
_BUILTIN = _PLAIN | {bytes, tuple, set}
# A dataclass that is also one of these has other content besides its fields.
_FULL = (dict, list, tuple, set, frozenset, str, bytes, bytearray, int, float)


def encode(value: Any) -> bytes:
    """Return the canonical encoding. Raises NotSerializable with the path of a value it refuses."""
    try:
        data = _packb(value, _lower, PACK)
    except (TypeError, ValueError, RecursionError):
        # The walk encodes a value that the C encoder cannot, or raises NotSerializable.
        data = _packb(_walk(value, "state", 0), None, PACK)
    if len(data) > MAX_VALUE:
        raise too_big(len(data))
    return data


def keep_tags(tag: int, data: bytes) -> Ext:
    """Keep a tagged value as it is, so that it is encoded to the same bytes: a hook for `decode`.

    The value of a tag can depend on the machine (its time zones). So code that only splits and
    rejoins encodings keeps the tags. Raises Corrupt if the tag does not decode.
    """
    decode_tag(tag, data)
    return Ext(tag, data)


def encode_exact(value: Any, depth: int = 0) -> bytes:
    """Return the canonical encoding, with types and depth checked, for values to be written.

    `depth` is the depth of the value in the state. Raises NotSerializable like `encode`, and also
    for a type that would not come back and for a value that is nested too deeply.
    """
    try:
        data = _packb(value, _lower, PACK)
    except (TypeError, ValueError, RecursionError):
        data = _packb(_walk(value, "state", depth), None, PACK)
    if len(data) > MAX_VALUE:
        raise too_big(len(data))
    if _is_plain(value, MAX_DEPTH - depth):
        return data
    return _packb(_walk(value, "state", depth), None, PACK)  # raises, with the path, if too deep


def has_lookalikes(data: bytes, count: int) -> bool:
    """Return whether `count` encodings hold bytes or tagged values.

    Values of other types, such as a bytearray, encode to the same bytes.
    """
    if not any(byte in data for byte in _BIN_OR_EXT):
        return False
    tagged = False

    def note(_: int, __: bytes) -> None:
        nonlocal tagged
        tagged = True

    items = decode(msgpack.array_header(count) + data, note)
    return tagged or _holds_bytes(items)


def _holds_bytes(value: Any) -> bool:
    kind = type(value)
    if kind is dict:
        return any(_holds_bytes(v) for v in value.values())
    if kind is list:
        return any(_holds_bytes(v) for v in value)
    return kind is bytes


def fragments_alive() -> bool:
    """Return whether there is any Fragment in this process."""
    return getrefcount(Fragment) != _FRAGMENTS


def _is_plain(value: Any, levels: int) -> bool:
    """Return whether a value holds only types that come back exactly, and is not too deep.

    It works level by level: most values have few levels, and a call per value would be slower.
    """
    if type(value) is dict:  # the most common case
        level, levels = [*value.values()], levels - 1
    else:
        level = [value]
    while (kinds := {*map(type, level)}) - _TEXT:
        if levels < 0 or not kinds <= _PLAIN:
            return False
        levels -= 1
        inner: list[Any] = []
        for each in level:
            if type(each) is dict:
                inner += each.values()
            elif type(each) is list:
                inner += each
        level = inner
    return True


def too_deep(path: str = "state") -> NotSerializable:
    what = f"nested deeper than {MAX_DEPTH} levels, or contains itself"
    return NotSerializable(what, path=path)


def too_big(size: int, path: str = "state") -> NotSerializable:
    hint = f"the limit is {MAX_VALUE} bytes"
    return NotSerializable(f"{size} bytes in one value", path=path, hint=hint)


@lru_cache(maxsize=4096)
def encode_key(key: str) -> bytes:
    """Return the encoding of a dict's key."""
    return encode_exact(key)


def check(value: Any, path: str) -> None:
    """Raise NotSerializable if a value cannot be stored. Paths in messages begin with `path`."""
    size = len(_packb(_walk(value, path, 0), None, PACK))
    if size > MAX_VALUE:
        raise too_big(size, path)


def decode(data: bytes, hook: Hook | None = None, meter: Meter | None = None) -> Any:
    """Return the value of an encoding. `hook` decodes tags, for example references.

    Raises Corrupt if it does not decode. With a `meter`, it raises TooBig if all encodings that the
    meter has counted take too much memory.
    """
    if meter is not None:
        meter.take(data)
    hook = hook or decode_tag
    raised: list[BaseException] = []

    def guarded(tag: int, payload: bytes) -> Any:
        try:
            return hook(tag, payload)
        except BaseException as e:
            raised.append(e)  # the C decoder replaces it by an error without a cause
            raise

    pause = len(data) > _GC_PAUSE_BYTES and gc.isenabled()
    if pause:
        gc.disable()  # decoding makes thousands of containers, and no garbage
    try:
        return _unpackb(data, ext_hook=guarded)
    except _UNDECODABLE as e:
        if not raised and str(e) == _HOOK_FAILED:
            raised.append(_unsaid(data, guarded))
        cause = raised[0] if raised else e
        ours = isinstance(cause, HoldfastError) or not isinstance(cause, _UNDECODABLE)
        if ours or blames_caller(cause):
            raise cause from None
        raise Corrupt(f"stored bytes do not decode: {cause}") from cause
    finally:
        if pause:
            gc.enable()


def decode_stored(data: bytes, hook: Hook | None = None) -> Any:
    """Decode bytes of unknown origin. Raises TooBig if they would take too much memory."""
    memory_limit.check(data)
    return decode(data, hook)


def _unsaid(data: bytes, hook: Hook) -> RecursionError:
    """Return or raise the error of a hook that failed before its first line ran.

    The C decoder drops that error. It was a signal if a second try succeeds (KeyboardInterrupt is
    raised), and otherwise a stack too deep to call the hook (RecursionError is returned).
    """
    with suppress(ValueError):
        _unpackb(data, ext_hook=hook)
        raise KeyboardInterrupt
    return RecursionError("nested too deeply")


def _lower(value: Any) -> Any:
    """Return a value that the C encoder knows for one that it does not, or raise TypeError."""
    kind = type(value)
    tag = _TAGGERS.get(kind)
    if tag is not None:
        return tag(value)
    lowered = plain(value)
    if lowered is value:
        raise TypeError(_describe(value))
    return lowered


def plain(value: Any) -> Any:
    """Return the plain data of an enum, dataclass or pydantic model; any other value as it is."""
    kind = type(value)
    if kind in _BUILTIN:
        return value
    if isinstance(value, Enum):
        return value.value
    try:
        if dataclasses.is_dataclass(kind) and not isinstance(value, _FULL):
            return {f.name: getattr(value, f.name) for f in dataclasses.fields(kind)}
        if hasattr(kind, "model_dump") and hasattr(kind, "model_validate"):
            return value.model_dump(serialize_as_any=True, round_trip=True)
    except Exception as e:
        raise NotSerializable(f"{kind.__name__} cannot be turned into plain data: {e}") from e
    return value


def _describe(value: Any) -> str:
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    return f"a value of type {name} cannot be stored exactly"


def _walk(value: Any, path: str, depth: int) -> Any:
    """Return `value` rebuilt from types that the C encoder encodes exactly.

    Raises NotSerializable with the path of a value that cannot be stored.
    """
    if depth > MAX_DEPTH:
        raise too_deep(_shorten(path))
    kind = type(value)
    if kind is str:
        if value.isascii():
            return value
        try:
            value.encode()
        except UnicodeEncodeError:
            return Ext(STR, value.encode("utf-8", "surrogatepass"))
        return value
    if value is None or kind in (bool, int, float, bytes):
        return value if kind is not int or -(1 << 63) <= value < 1 << 64 else _bigint(value)
    if kind is list:
        return [_walk(v, f"{path}[{i}]", depth + 1) for i, v in enumerate(value)]
    if kind is dict:
        return _walk_dict(value, path, depth)
    if kind is tuple:
        items = [_walk(v, f"{path}[{i}]", depth + 1) for i, v in enumerate(value)]
        return Ext(TUPLE, _packb(items, None, PACK))
    if kind in (set, frozenset):
        lowered = [_walk(v, f"{path}{{…}}", depth + 1) for v in value]
        return _set_ext(SET if kind is set else FROZENSET, lowered, path)
    if kind in _TAGGERS:
        try:
            return _TAGGERS[kind](value)
        except (TypeError, ValueError, OverflowError) as e:
            raise NotSerializable(str(e), path=path) from None
    try:
        lowered = _lower(value)
    except NotSerializable as e:
        raise NotSerializable(e.message.partition(": ")[2], path=path) from e.__cause__
    except TypeError as e:
        raise NotSerializable(str(e), path=path) from None
    return _walk(lowered, path, depth)


def _walk_dict(value: dict[Any, Any], path: str, depth: int) -> Any:
    pairs: list[Any] = []
    plain = True
    seen: set[Any] = set()
    for key, item in value.items():
        name = _key_name(key)
        if isinstance(key, Enum):
            key = key.value
        if type(key) not in _SCALARS:
            raise NotSerializable(
                f"a dict key of type {type(key).__name__} cannot be stored", path=f"{path}{name}"
            )
        lowered = _walk(key, f"{path}{name}", depth + 1)
        plain = plain and type(lowered) is str
        if key in seen:
            raise NotSerializable("two keys are the same once stored", path=f"{path}{name}")
        seen.add(key)
        pairs += (lowered, _walk(item, f"{path}{name}", depth + 1))
    if plain:
        return dict(zip(pairs[::2], pairs[1::2], strict=True))
    return Ext(DICT, _packb(pairs, None, PACK))


def _key_name(key: Any) -> str:
    return f".{key}" if type(key) is str and key.isidentifier() else f"[{key!r}]"


def _shorten(path: str) -> str:
    return path if len(path) <= 80 else f"{path[:60]}…{path[-16:]}"


def _bigint(value: int) -> Ext:
    return Ext(BIGINT, value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))


def _set_ext(tag: int, items: Any, path: str = "state") -> Ext:
    # Sorted by encoding, because the order of iteration differs between processes.
    encoded = sorted(_packb(v, _lower, PACK) for v in items)
    try:
        if len({decode(e) for e in encoded}) != len(encoded):
            raise NotSerializable("two elements of a set are the same once stored", path=path)
    except TypeError:
        raise NotSerializable(
            "an element of a set is stored as plain data that no set can hold", path=path
        ) from None
    return Ext(tag, msgpack.array_header(len(encoded)) + b"".join(encoded))


def _offset(delta: dt.timedelta | None) -> int | None:
    return None if delta is None else delta // dt.timedelta(microseconds=1)


def _datetime(value: dt.datetime) -> Ext:
    offset = _offset(value.utcoffset())
    if value.tzinfo is not None and offset is None:
        raise TypeError("a datetime whose time zone has no UTC offset cannot be stored exactly")
    naive = value.replace(tzinfo=None).isoformat()
    return Ext(DATETIME, _packb([naive, value.fold, offset, *_zone_names(value.tzinfo)]))


def _time(value: dt.time) -> Ext:
    offset = _offset(value.utcoffset())
    key, name = _zone_names(value.tzinfo)
    if value.tzinfo is not None and offset is None and key is None:
        raise TypeError("a time whose time zone has no fixed UTC offset cannot be stored exactly")
    naive = value.replace(tzinfo=None).isoformat()
    return Ext(TIME, _packb([naive, value.fold, offset, key, name]))


def _zone_names(zone: dt.tzinfo | None) -> tuple[str | None, str | None]:
    """Return the key of a ZoneInfo, and the name of a fixed offset if it is not the default one."""
    if zone is None:
        return None, None
    if type(zone) is dt.timezone:
        name = zone.tzname(None)
        usual = dt.timezone(zone.utcoffset(None)).tzname(None)
        return None, name if name != usual else None
    from zoneinfo import ZoneInfo  # a slow import, and few states need it

    return zone.key if isinstance(zone, ZoneInfo) else None, None


_TAGGERS: dict[type, Callable[[Any], Ext]] = {
    tuple: lambda v: Ext(TUPLE, _packb(list(v), _lower, PACK)),
    set: lambda v: _set_ext(SET, v),
    frozenset: lambda v: _set_ext(FROZENSET, v),
    int: _bigint,
    dt.datetime: _datetime,
    dt.date: lambda v: Ext(DATE, v.isoformat().encode()),
    dt.time: _time,
    dt.timedelta: lambda v: Ext(TIMEDELTA, _packb([v.days, v.seconds, v.microseconds])),
    Decimal: lambda v: Ext(DECIMAL, str(v).encode()),
    UUID: lambda v: Ext(UUID_, v.bytes),
}
_SCALARS = {str, int, float, bool, type(None), bytes, *_TAGGERS} - {tuple, set, frozenset}


@lru_cache(maxsize=1)
def _known_zones() -> frozenset[str]:
    from zoneinfo import available_timezones

    return frozenset(available_timezones())


def _zone(offset: int | None, key: str | None, name: str | None) -> dt.tzinfo | None:
    # Only zones that this machine lists: for others, zoneinfo would import by the stored name.
    if key is not None and key in _known_zones():
        from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

        try:
            return ZoneInfo(key)
        except (ZoneInfoNotFoundError, ValueError):
            pass  # listed, but missing: the offset gives the same instant
    if offset is None:
        return None
    delta = dt.timedelta(microseconds=offset)
    return dt.timezone(delta) if name is None else dt.timezone(delta, name)


def _load_datetime(data: bytes) -> dt.datetime:
    text, fold, offset, key, name = _unpackb(data)
    return dt.datetime.fromisoformat(text).replace(fold=fold, tzinfo=_zone(offset, key, name))


def _load_time(data: bytes) -> dt.time:
    text, fold, offset, key, name = _unpackb(data)
    return dt.time.fromisoformat(text).replace(fold=fold, tzinfo=_zone(offset, key, name))


def _load_dict(data: bytes) -> dict[Any, Any]:
    pairs = decode(data)
    return dict(zip(pairs[::2], pairs[1::2], strict=True))


_LOADERS: dict[int, Callable[[bytes], Any]] = {
    TUPLE: lambda d: tuple(decode(d)),
    SET: lambda d: set(decode(d)),
    FROZENSET: lambda d: frozenset(decode(d)),
    BIGINT: lambda d: int.from_bytes(d, "big", signed=True),
    STR: lambda d: d.decode("utf-8", "surrogatepass"),
    DICT: _load_dict,
    DATETIME: _load_datetime,
    DATE: lambda d: dt.date.fromisoformat(d.decode()),
    TIME: _load_time,
    TIMEDELTA: lambda d: dt.timedelta(*_unpackb(d)),
    DECIMAL: lambda d: Decimal(d.decode()),
    UUID_: lambda d: UUID(bytes=d),
}


def decode_tag(tag: int, data: bytes) -> Any:
    """Return the value of a tag. Raises Corrupt if the tag is unknown."""
    loader = _LOADERS.get(tag)
    if loader is None:
        raise Corrupt(f"stored bytes hold an unknown tag {tag}")
    return loader(data)
