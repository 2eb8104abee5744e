"""LangGraph's values in a form that holdfast can compare, show and search, and back.

What LangGraph's serializer writes is taken apart, so that a message is a dict with a content and
not a run of bytes, and is only kept if it can be put together again to the very same bytes. All
else (encrypted values, other serializers) is kept as these bytes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import ormsgpack
from langchain_core.messages import BaseMessage
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from holdfast.errors import NotSerializable, UnsupportedFormat

_EXT, _OF = "$ext", "of"
"""A value of a type that msgpack does not have: its code, and what it is made of."""
_SERDE, _DATA = "$serde", "data"
"""What was not taken apart: the serializer's name for its format, and its bytes."""
_OPTION = ormsgpack.OPT_NON_STR_KEYS
_MADE_BY_NAME = range(6)
"""Codes whose content begins with a module and a name in it."""
_SNAPSHOT = 7
_FUNCTIONS = {("re", "compile")}
"""Names of what makes a value, but is not its type."""
_ATOMS = frozenset({str, int, float, bool, type(None), bytes})
_END = object()


def _take_apart(data: bytes) -> Any:
    return ormsgpack.unpackb(data, ext_hook=_open, option=_OPTION)


def _open(code: int, data: bytes) -> dict[str, Any]:
    try:
        return {_EXT: code, _OF: _take_apart(data)}
    except ValueError:  # not msgpack inside: numbers of an array, or another serializer's own
        return {_EXT: code, _OF: data}


def _put_together(tree: Any) -> bytes:
    return ormsgpack.packb(_close(tree), option=_OPTION)


def _close(tree: Any) -> Any:
    if type(tree) is dict:
        if len(tree) == 2 and _EXT in tree and _OF in tree:
            inner = tree[_OF]
            data = inner if type(inner) is bytes else _put_together(inner)
            return ormsgpack.Ext(tree[_EXT], data)
        return {key: _close(value) for key, value in tree.items()}
    if type(tree) is list:
        return [_close(value) for value in tree]
    return tree


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
        value = super().loads_typed(data)
        if data[0] == "msgpack" and self._unknown == "raise":
            _check(_take_apart(data[1]), value)
        return value


def _check(tree: Any, value: Any) -> None:
    """Raise UnsupportedFormat where an object has become something else."""
    if type(tree) is dict:
        if len(tree) == 2 and _EXT in tree and _OF in tree:
            _check_object(tree[_EXT], tree[_OF], value)
        elif type(value) is dict:
            for key, inner in tree.items():
                if type(inner) in (dict, list):
                    _check(inner, value.get(key))
    elif type(tree) is list and type(value) is list:
        for inner, got in zip(tree, value, strict=True):
            if type(inner) in (dict, list):
                _check(inner, got)


def _check_object(code: int, made_of: Any, value: Any) -> None:
    if code == _SNAPSHOT:
        _check(made_of, value.value)
    elif code in _MADE_BY_NAME and type(made_of) is list:
        module, name = made_of[:2]
        if type(value).__name__ != name and (module, name) not in _FUNCTIONS:
            raise UnsupportedFormat(
                f"a value of type {module}.{name} cannot be made again",
                hint=f"if you trust it: HoldfastSaver(…, allow=[({module!r}, {name!r})]); or "
                'unknown="raw" for what it was made of',
            )


def encode(serde: SerializerProtocol, value: Any, path: str) -> Any:
    """One value, or one item of a list."""
    if type(value) in _ATOMS and type(value) is not bytes:
        return value
    try:
        kind, data = serde.dumps_typed(value)
    except Exception as e:
        raise NotSerializable(
            f"{path}: {type(value).__name__} cannot be serialized: {e}",
            hint="keep it out of the graph's state, or give the saver a serializer that knows it",
        ) from e
    if kind == "msgpack":
        tree = _take_apart(data)
        if not (type(tree) is dict and _SERDE in tree) and _put_together(tree) == data:
            return tree
    return {_SERDE: kind, _DATA: bytes(data)}


def decode(serde: SerializerProtocol, tree: Any) -> Any:
    if type(tree) in _ATOMS:
        return tree
    if type(tree) is dict and _SERDE in tree:
        return serde.loads_typed((tree[_SERDE], tree[_DATA]))
    return serde.loads_typed(("msgpack", _put_together(tree)))


class Encoder:
    """Encodes the values of one thread's channels, lists item by item.

    Most items are those of the step before. They are not serialized again if each of their parts
    that cannot change is the same object as then: a message that was changed in place has another.
    """

    def __init__(self) -> None:
        self._known: dict[str, dict[int, tuple[Any, list[Any], Any]]] = {}

    def channels(self, serde: SerializerProtocol, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self._channel(serde, name, value) for name, value in values.items()}

    def _channel(self, serde: SerializerProtocol, name: str, value: Any) -> Any:
        if type(value) is not list:
            return encode(serde, value, name)
        known, now = self._known.get(name, {}), dict[int, tuple[Any, list[Any], Any]]()
        encoded = []
        for n, item in enumerate(value):
            parts: list[Any] = []
            found = known.get(id(item))
            steady = _parts(item, parts)
            if (
                found is None
                or not steady
                or len(parts) != len(found[1])
                or not all(map(operator.is_, parts, found[1]))
            ):
                found = (item, parts, encode(serde, item, f"{name}[{n}]"))
            if steady:
                now[id(item)] = found
            encoded.append(found[2])
        self._known[name] = now
        return encoded


def _parts(value: Any, out: list[Any]) -> bool:
    """All parts of a value that cannot change, in order; False if it may have others."""
    kind = type(value)
    if kind in _ATOMS:
        out.append(value)
        return True
    out.append(kind)
    if kind is dict:
        for key, inner in value.items():
            if type(key) not in _ATOMS:
                return False
            out.append(key)
            if type(inner) in _ATOMS:
                out.append(inner)
            elif not _parts(inner, out):
                return False
    elif kind is list or kind is tuple:
        for inner in value:
            if not _parts(inner, out):
                return False
    elif isinstance(value, BaseMessage) and kind.__module__.startswith("langchain_core.messages"):
        if not _parts(value.__dict__, out) or not _parts(value.__pydantic_extra__, out):
            return False
    else:
        return False
    out.append(_END)
    return True


class Decoder:
    """Decodes states that have most of their items in common, each of these once.

    So these states share their messages.
    """

    def __init__(self, serde: SerializerProtocol) -> None:
        self._serde = serde
        self._known: dict[bytes, Any] = {}

    def channels(self, trees: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self.channel(tree) for name, tree in trees.items()}

    def channel(self, tree: Any) -> Any:
        if type(tree) is not list:
            return decode(self._serde, tree)
        return [item if type(item) in _ATOMS else self._item(item) for item in tree]

    def _item(self, tree: Any) -> Any:
        key = ormsgpack.packb(tree, option=_OPTION)
        try:
            return self._known[key]
        except KeyError:
            value = self._known[key] = decode(self._serde, tree)
            return value
