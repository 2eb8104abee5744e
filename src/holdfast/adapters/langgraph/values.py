"""LangGraph's values in a form that holdfast can compare, show and search, and back.

What LangGraph's serializer writes is taken apart, so that a message is a dict with a content and
not a run of bytes, and is only kept if it can be put together again to the very same bytes. All
else (encrypted values, other serializers) is kept as these bytes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Literal, NamedTuple

import ormsgpack
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from holdfast.adapters.langgraph.sameness import ATOMS, Seen
from holdfast.errors import NotSerializable, UnsupportedFormat

_EXT, _OF = "$ext", "of"
"""A value of a type that msgpack does not have: its code, and what it is made of."""
_SERDE, _DATA = "$serde", "data"
"""What was not taken apart: the serializer's name for its format, and its bytes."""
_OPTION = ormsgpack.OPT_NON_STR_KEYS
_MADE_BY_NAME = range(6)
"""Codes whose content begins with a module and a name in it."""
_ARRAY, _SNAPSHOT = 6, 7
_TYPES = {("re", "compile"): "Pattern"}
"""The types of values that are made by something else."""
_KINDS = {"null", "bytes", "bytearray", "msgpack"}
"""What LangGraph's serializer writes."""
_RAW = 'unknown="raw" reads what is left of it'
_BIG = 1 << 63
_SPARE = 64
"""Items that are in a list no more are remembered, up to so many and as many as there are in it."""
_is = operator.is_


class _Object(NamedTuple):
    """A value of a type that msgpack does not have."""

    code: int
    made_of: Any
    data: bytes


def _unpack(data: bytes, hook: Callable[[int, bytes], Any]) -> Any:
    return ormsgpack.unpackb(data, ext_hook=hook, option=_OPTION)


def _object(code: int, data: bytes) -> _Object:
    try:
        return _Object(code, _unpack(data, _object), data)
    except ValueError:  # not msgpack inside: numbers of an array, or another serializer's own
        return _Object(code, None, data)


def _as_dict(code: int, data: bytes) -> dict[str, Any]:
    try:
        return {_EXT: code, _OF: _unpack(data, _as_dict)}
    except ValueError:
        return {_EXT: code, _OF: data}


def _put_together(tree: Any) -> bytes:
    return ormsgpack.packb(_close(tree), option=_OPTION)


def _close(tree: Any) -> Any:
    if type(tree) is dict:
        if len(tree) == 2 and _EXT in tree and _OF in tree:
            inner = tree[_OF]
            data = inner if type(inner) is bytes else _put_together(inner)
            return ormsgpack.Ext(tree[_EXT], data)
        if not ATOMS.issuperset(map(type, tree)):
            raise TypeError("a key that a state cannot have")
        return {key: _close(value) for key, value in tree.items()}
    if type(tree) is list:
        return [_close(value) for value in tree]
    return tree


def pack(tree: Any) -> bytes:
    """The same for the same tree only: 1 is not True."""
    return ormsgpack.packb(tree, option=_OPTION)


class StrictSerializer(JsonPlusSerializer):
    """LangGraph's serializer, which says so when a value does not come back as what it was.

    Its own way is to hand out a dict in place of an object whose type is not allowed, is gone, or
    has changed. `unknown="raw"` asks for that.
    """

    def __init__(
        self,
        allow: Iterable[tuple[str, ...] | type] = (),
        unknown: Literal["raise", "raw"] = "raise",
    ) -> None:
        super().__init__(allowed_msgpack_modules=tuple(allow) or None)
        self._unknown = unknown

    def loads_typed(self, data: tuple[str, bytes]) -> Any:
        kind, content = data
        if kind not in _KINDS:  # "json" revives objects as it likes, and "pickle" calls anything
            raise UnsupportedFormat(
                f"a value was not written by this serializer, but as {kind!r}",
                hint="read the thread with the serializer that it was written with",
            )
        try:
            value = super().loads_typed(data)
            if kind == "msgpack" and self._unknown == "raise":
                self._check(_unpack(content, _object), value)
        except (ormsgpack.MsgpackDecodeError, RecursionError) as e:
            raise UnsupportedFormat(f"a value cannot be read: {e}") from e
        return value

    def _check(self, stored: Any, value: Any) -> None:
        """Raise UnsupportedFormat where an object has become something else."""
        if type(stored) is _Object:
            self._check_object(stored, value)
        elif type(stored) is dict and type(value) is dict:
            for key, inner in stored.items():
                if type(inner) not in ATOMS:
                    self._check(inner, value.get(key))
        elif type(stored) is list and type(value) is list:
            for inner, got in zip(stored, value, strict=True):
                if type(inner) not in ATOMS:
                    self._check(inner, got)

    def _check_object(self, stored: _Object, value: Any) -> None:
        code, made_of, _ = stored
        if code == _SNAPSHOT:
            self._check(made_of, value.value)
        elif code in _MADE_BY_NAME:
            self._check_named(made_of, value)
        elif code != _ARRAY or type(value).__name__ != "ndarray":
            raise UnsupportedFormat(f"a value of kind {code} cannot be made again", hint=_RAW)

    def _check_named(self, made_of: Any, value: Any) -> None:
        if type(made_of) is not list or len(made_of) < 3:
            raise UnsupportedFormat("a value does not say of which type it is", hint=_RAW)
        module, name = made_of[:2]
        if type(value).__name__ != _TYPES.get((module, name), name):
            raise UnsupportedFormat(
                f"a value of type {module}.{name} cannot be made again",
                hint=f"if you trust it: HoldfastSaver(…, allow=[({module!r}, {name!r})]); or "
                'unknown="raw" for what it was made of',
            )
        for inner in _objects(made_of[2:]):  # each on its own: where it went, is not seen
            self._check_object(inner, self._unpack_ext_hook(inner.code, inner.data))


def _objects(stored: Any) -> Iterator[_Object]:
    """The outermost objects in what one is made of."""
    if type(stored) is _Object:
        yield stored
    elif type(stored) is dict or type(stored) is list:
        for inner in stored.values() if type(stored) is dict else stored:
            if type(inner) not in ATOMS:
                yield from _objects(inner)


def _shows(serde: SerializerProtocol) -> bool:
    """Whether what it writes is for everybody's eyes: others may encrypt."""
    return issubclass(type(serde), JsonPlusSerializer)


def _is_plain(value: Any) -> bool:
    """Whether a value is its own encoding."""
    kind = type(value)
    if kind is str:
        try:
            value.encode()
        except UnicodeEncodeError:
            return False
        return True
    return kind in ATOMS and kind is not bytes and (kind is not int or -_BIG <= value < _BIG)


def encode(serde: SerializerProtocol, value: Any, path: str) -> Any:
    """One value, or one item of a list."""
    shows = _shows(serde)
    if shows and _is_plain(value):
        return value
    try:
        kind, data = serde.dumps_typed(value)
    except Exception as e:
        raise NotSerializable(
            f"{path}: {type(value).__name__} cannot be serialized: {e}",
            hint="keep it out of the graph's state, or give the saver a serializer that knows it",
        ) from e
    if shows and kind == "msgpack":
        tree = _unpack(data, _as_dict)
        with suppress(TypeError, ValueError, OverflowError):  # it is not what it looks like
            if not (type(tree) is dict and _SERDE in tree) and _put_together(tree) == data:
                return tree
    return {_SERDE: kind, _DATA: bytes(data)}


def decode(serde: SerializerProtocol, tree: Any) -> Any:
    if type(tree) is dict and _SERDE in tree:
        return serde.loads_typed((tree[_SERDE], tree[_DATA]))
    if not _shows(serde):
        raise UnsupportedFormat(
            "a value was not written by this serializer",
            hint="read the thread with the serializer that it was written with",
        )
    if type(tree) in ATOMS:
        return tree
    return serde.loads_typed(("msgpack", _put_together(tree)))


class Encoder:
    """Encodes the values of one thread's channels, lists item by item.

    Most items are those of the step before. They are not serialized again unless they were changed
    in place.
    """

    def __init__(self) -> None:
        self._lists: dict[str, _Items] = {}

    def channels(self, serde: SerializerProtocol, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self._channel(serde, name, value) for name, value in values.items()}

    def _channel(self, serde: SerializerProtocol, name: str, value: Any) -> Any:
        if type(value) is not list:
            encoded = encode(serde, value, name)
            if type(encoded) is list:  # a tuple; only a list is taken item by item
                encoded = {_SERDE: "msgpack", _DATA: _put_together(encoded)}
            return encoded
        return self._lists.setdefault(name, _Items()).encode(serde, name, value)


class _Known(NamedTuple):
    """An item that was encoded. It is held, so that its id stays its own."""

    item: Any
    seen: Seen
    encoded: Any


class _Items:
    """The items of the last lists of a channel."""

    def __init__(self) -> None:
        self._keep([])
        self._last: list[Any] = []
        self._encoded: list[Any] = []

    def _keep(self, known: Iterable[_Known]) -> None:
        self._known = {id(each.item): each for each in known}
        self._seen = Seen.many([each.seen for each in self._known.values()])

    def encode(self, serde: SerializerProtocol, name: str, value: list[Any]) -> list[Any]:
        if not self._seen.is_same():
            self._keep([each for each in self._known.values() if each.seen.is_same()])
            self._last = []
        encoded: list[Any] = []
        if len(value) >= len(self._last) and all(map(_is, self._last, value)):
            encoded += self._encoded[: len(self._last)]
        certain = True
        for n, item in enumerate(value[len(encoded) :], len(encoded)):
            found = self._known.get(id(item))
            if found is None:
                seen = Seen.of(item)  # before: what changes meanwhile is noticed next time
                found = _Known(item, seen, encode(serde, item, f"{name}[{n}]"))
                if seen.certain:
                    self._known[id(item)] = found
                    self._seen.add(seen)
            certain = certain and found.seen.certain
            encoded.append(found.encoded)
        self._last, self._encoded = value[:] if certain else [], encoded
        if len(self._known) > 2 * len(value) + _SPARE:
            self._keep([self._known[i] for i in dict.fromkeys(map(id, value)) if i in self._known])
        return encoded[:]


class Decoder:
    """Decodes states that have most of their items in common, each of these once.

    So these states share their messages; but no two places of one state do.
    """

    def __init__(self, serde: SerializerProtocol) -> None:
        self._serde = serde
        self._items: dict[tuple[str, bytes], list[Any]] = {}
        """Of each channel and encoding as many as were wanted at once."""
        self._lists: dict[str, tuple[list[Any], list[Any]]] = {}
        """The last list of each channel that was no part of the one before: its items as they are
        stored, and decoded."""

    def channels(self, trees: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self.channel(name, tree) for name, tree in trees.items()}

    def channel(self, name: str, tree: Any) -> Any:
        """Of `tree` nothing is given out, and nobody may change it afterwards."""
        if type(tree) is not list:
            return decode(self._serde, tree)
        known, items = self._lists.get(name, ([], []))
        if len(tree) > len(known) or not all(map(_is, tree, known)):
            used: dict[bytes, int] = {}
            items = [self._item(name, item, used) for item in tree]
            self._lists[name] = (tree, items)
        return items[: len(tree)]

    def _item(self, name: str, tree: Any, used: dict[bytes, int]) -> Any:
        key = pack(tree)
        made = self._items.setdefault((name, key), [])
        count = used[key] = used.get(key, 0) + 1
        if count > len(made):
            made.append(decode(self._serde, tree))
        return made[count - 1]
