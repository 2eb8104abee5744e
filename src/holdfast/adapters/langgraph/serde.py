"""How the values of channels are stored: as trees that people and `diff` can read.

LangGraph's serializer turns a value into bytes. These bytes are taken apart again into dicts, lists
and scalars, and an object becomes a dict of its msgpack extension code and its content:

    HumanMessage("hi")     {"$ext": 5, "of": ["langchain_core.messages.human", "HumanMessage",
                                              {"content": "hi", …}, "model_validate_json"]}

Bytes that cannot be taken apart without loss stay bytes: {"$serde": "msgpack", "data": b"…"}. So do
those of an encrypting serializer.

Lists are stored item by item, and an item that has not changed since the last step is not
serialized again. A `Snapshot` shows whether an item was changed in place.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any, Literal, NamedTuple, Self, cast

import ormsgpack
from langchain_core.messages import BaseMessage
from langgraph.checkpoint.serde._msgpack import SAFE_MSGPACK_TYPES
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from holdfast.errors import NotSerializable, UnsupportedFormat

ATOMS = frozenset({str, int, float, bool, type(None), bytes})
_EXT, _OF = "$ext", "of"
_SERDE, _DATA = "$serde", "data"
_OPTION = ormsgpack.OPT_NON_STR_KEYS
_INT64 = 1 << 63

# Extension codes of LangGraph's serializer.
_CALLED_WITH_ONE = 0
_NAMED = range(6)
"""The content begins with a module and the name of a class or function in it."""
_ARRAY, _SNAPSHOT = 6, 7

_RESULTS = {("re", "compile"): "Pattern"}
"""Types of objects that a function makes."""
_KINDS = {"null", "bytes", "bytearray", "msgpack"}
"""The formats that LangGraph's serializer writes."""
_AGENTS = ("AgentAction", "AgentActionMessageLog", "AgentFinish", "AgentStep")
"""Types of LangChain's agents that are plain data. LangGraph allows LangChain's messages only."""
_RAW_HINT = 'unknown="raw" reads it as plain data'


# -- the serializer --------------------------------------------------------------------------------


class StrictSerializer(JsonPlusSerializer):
    """LangGraph's serializer, but it raises where a value would not come back as it was.

    LangGraph's own returns a dict in place of an object whose type is not allowed, does not exist
    any more, or has changed. `unknown="raw"` does the same. Otherwise a value that could not be
    read again is not written either.
    """

    def __init__(
        self,
        allow: Iterable[tuple[str, ...] | type] = (),
        unknown: Literal["raise", "raw"] = "raise",
    ) -> None:
        self._classes: dict[tuple[str, str], type] = {}
        agents = [("langchain_core.agents", name) for name in _AGENTS]
        super().__init__(allowed_msgpack_modules=[*allow, *agents])
        self._unknown = unknown

    def dumps_typed(self, obj: Any) -> tuple[str, bytes]:
        kind, data = super().dumps_typed(obj)
        if kind == "msgpack" and self._unknown == "raise" and (types := _named_types(data)):
            try:
                for module, name in types:
                    self._check_allowed(module, name)
                self._check(_unpack(data, _to_object), self._loads(kind, data))
            except UnsupportedFormat as e:
                raise NotSerializable(e.message, hint=e.hint) from None
        return kind, data

    def loads_typed(self, data: tuple[str, bytes]) -> Any:
        kind, content = data
        if kind not in _KINDS:  # "json" and "pickle" can call functions
            raise UnsupportedFormat(
                f"a value was not written by this serializer, but as {kind!r}",
                hint="read the thread with the serializer that it was written with",
            )
        try:
            value = self._loads(kind, content)
            if kind == "msgpack" and self._unknown == "raise":
                self._check(_unpack(content, _to_object), value)
        except (ormsgpack.MsgpackDecodeError, RecursionError) as e:
            raise UnsupportedFormat(f"a value cannot be read: {e}") from e
        return value

    def with_msgpack_allowlist(
        self, extra_allowlist: Iterable[tuple[str, ...] | type]
    ) -> StrictSerializer:
        """Return a serializer that allows these types as well, and the classes of `GraphTypes`."""
        made = cast("StrictSerializer", super().with_msgpack_allowlist(extra_allowlist))
        classes = {**self._classes, **getattr(extra_allowlist, "classes", {})}
        if classes != self._classes:
            made = copy.copy(made)
            made._classes = classes  # noqa: SLF001
        return made

    def _loads(self, kind: str, content: bytes) -> Any:
        if kind == "msgpack" and self._classes:
            return _unpack(content, self._make)
        return super().loads_typed((kind, content))

    def _make(self, code: int, data: bytes) -> Any:
        """Make an object. A class that no import finds is taken from the schemas of a graph."""
        if code in _NAMED:
            with suppress(Exception):
                module, name, content, *_ = _unpack(data, self._make)
                made: Any = self._classes[module, name]
                if code == _CALLED_WITH_ONE:
                    return made(content)
                try:
                    return made(**content)
                except ValueError:
                    return made.model_construct(**content)  # as LangGraph does
        return self._unpack_ext_hook(code, data)

    def _check(self, stored: Any, value: Any) -> None:
        """Raise UnsupportedFormat where an object was read as something else."""
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
        code, content, _ = stored
        if code == _SNAPSHOT:
            self._check(content, value.value)
        elif code in _NAMED:
            self._check_named(content, value)
        elif code != _ARRAY or type(value).__name__ != "ndarray":
            raise UnsupportedFormat(f"a value of kind {code} cannot be made again", hint=_RAW_HINT)

    def _check_named(self, content: Any, value: Any) -> None:
        if type(content) is not list or len(content) < 3:
            raise UnsupportedFormat("a value does not say of which type it is", hint=_RAW_HINT)
        module, name = content[:2]
        if type(value).__name__ != _RESULTS.get((module, name), name):
            self._check_allowed(module, name)
            raise UnsupportedFormat(
                f"a value of type {module}.{name} cannot be made again",
                hint="its class must have that name in that module, and accept the stored fields; "
                'unknown="raw" reads them as plain data',
            )
        for inner in _objects(content[2:]):  # the object may keep them anywhere: make each again
            self._check_object(inner, self._make(inner.code, inner.data))

    def _check_allowed(self, module: Any, name: Any) -> None:
        allowed: Any = self._allowed_msgpack_modules
        if (module, name) not in SAFE_MSGPACK_TYPES and (module, name) not in allowed:
            raise UnsupportedFormat(
                f"a value is of type {module}.{name}, which is not allowed",
                hint="name it in the schema of the graph; or, if you trust it: "
                f"HoldfastSaver(…, allow=[({module!r}, {name!r})]); or "
                'unknown="raw" for plain data',
            )


class _Object(NamedTuple):
    """An object as it is stored: its extension code, and its content, decoded and as bytes."""

    code: int
    content: Any
    data: bytes


def _unpack(data: bytes, hook: Callable[[int, bytes], Any]) -> Any:
    return ormsgpack.unpackb(data, ext_hook=hook, option=_OPTION)


def _to_object(code: int, data: bytes) -> _Object:
    try:
        return _Object(code, _unpack(data, _to_object), data)
    except ValueError:  # not msgpack: the numbers of an array, or another serializer's bytes
        return _Object(code, None, data)


def _objects(stored: Any) -> Iterator[_Object]:
    """Yield the outermost objects in a value."""
    if type(stored) is _Object:
        yield stored
    elif type(stored) is dict or type(stored) is list:
        for inner in stored.values() if type(stored) is dict else stored:
            if type(inner) not in ATOMS:
                yield from _objects(inner)


def _named_types(data: bytes) -> set[tuple[Any, Any]]:
    """Return the types of the objects in a value, except those that LangGraph considers safe."""
    found: set[tuple[Any, Any]] = set()

    def note(code: int, data: bytes) -> None:
        if code != _ARRAY:
            content = _unpack(data, note)
            if code in _NAMED:
                found.add((content[0], content[1]))

    _unpack(data, note)
    return found - SAFE_MSGPACK_TYPES


# -- trees -----------------------------------------------------------------------------------------


def encode(serde: SerializerProtocol, value: Any, path: str) -> Any:
    """Return the tree of a value. Raises NotSerializable, which names the path."""
    readable = _writes_readable(serde)
    if readable and _is_plain(value):
        return value
    try:
        kind, data = serde.dumps_typed(value)
    except NotSerializable as e:
        message = e.message.removeprefix(f"{e.path}: ")
        raise NotSerializable(message, path=path, hint=e.hint) from None
    except Exception as e:
        raise NotSerializable(
            f"{path}: {type(value).__name__} cannot be serialized: {e}",
            hint="keep it out of the graph's state, or give the saver a serializer that knows it",
        ) from e
    if readable and kind == "msgpack":
        tree = _unpack(data, _to_dict)
        with suppress(TypeError, ValueError, OverflowError):  # the tree would lose something
            if not (type(tree) is dict and _SERDE in tree) and _to_msgpack(tree) == data:
                return tree
    return {_SERDE: kind, _DATA: bytes(data)}


def decode(serde: SerializerProtocol, tree: Any) -> Any:
    if type(tree) is dict and _SERDE in tree:
        return serde.loads_typed((tree[_SERDE], tree[_DATA]))
    if not _writes_readable(serde):
        raise UnsupportedFormat(
            "a value was not written by this serializer",
            hint="read the thread with the serializer that it was written with",
        )
    if type(tree) in ATOMS:
        return tree
    return serde.loads_typed(("msgpack", _to_msgpack(tree)))


def pack(tree: Any) -> bytes:
    """Return bytes that are equal only for trees of equal values and types: 1 is not True."""
    return ormsgpack.packb(tree, option=_OPTION)


def _writes_readable(serde: SerializerProtocol) -> bool:
    """Return whether its bytes may be taken apart: another serializer may encrypt."""
    return issubclass(type(serde), JsonPlusSerializer)


def _is_plain(value: Any) -> bool:
    """Return whether a value is its own tree."""
    kind = type(value)
    if kind is str:
        try:
            value.encode()
        except UnicodeEncodeError:
            return False
        return True
    return kind in ATOMS and kind is not bytes and (kind is not int or -_INT64 <= value < _INT64)


def _to_dict(code: int, data: bytes) -> dict[str, Any]:
    try:
        return {_EXT: code, _OF: _unpack(data, _to_dict)}
    except ValueError:
        return {_EXT: code, _OF: data}


def _to_msgpack(tree: Any) -> bytes:
    return ormsgpack.packb(_with_extensions(tree), option=_OPTION)


def _with_extensions(tree: Any) -> Any:
    if type(tree) is dict:
        if len(tree) == 2 and _EXT in tree and _OF in tree:
            content = tree[_OF]
            data = content if type(content) is bytes else _to_msgpack(content)
            return ormsgpack.Ext(tree[_EXT], data)
        if not ATOMS.issuperset(map(type, tree)):
            raise TypeError("a key that a state cannot have")
        return {key: _with_extensions(value) for key, value in tree.items()}
    if type(tree) is list:
        return [_with_extensions(value) for value in tree]
    return tree


# -- items that have not changed -------------------------------------------------------------------

_DEPTH = 64
_is, _equal = operator.is_, operator.eq
_fields_of, _extra_of = operator.attrgetter("__dict__"), operator.attrgetter("__pydantic_extra__")
_values_of, _join = dict.values, chain.from_iterable
_SPARE = 64
"""A channel remembers this many items, plus twice the length of its list."""


@dataclass(eq=False, slots=True)
class Snapshot:
    """The parts of some values at one moment, to see later whether one was changed in place.

    A value has not changed if each of its parts is the same object as before: a message that was
    edited has another string as its content. A snapshot has one list for each kind of part, so that
    a few loops in C compare thousands of messages.

    A value of another type than dict, list, tuple, scalar and LangChain's messages may have parts
    that cannot be seen. Its snapshot is not `certain`, and is never current.
    """

    certain: bool = True
    _empty: Any = field(default_factory=list)
    """Lists and dicts without items."""
    _messages: Any = field(default_factory=list)
    """Messages, with their types, their fields (`__dict__`) and their extra fields."""
    _types: Any = field(default_factory=list)
    _fields: Any = field(default_factory=list)
    _extras: Any = field(default_factory=list)
    _sized: Any = field(default_factory=list)
    """Lists, dicts and fields of messages, with their lengths."""
    _sizes: Any = field(default_factory=list)
    _iterables: Any = field(default_factory=list)
    """Lists and dicts, with their items and keys."""
    _items: Any = field(default_factory=list)
    _dicts: Any = field(default_factory=list)
    """Dicts and fields of messages, with their values."""
    _values: Any = field(default_factory=list)

    @classmethod
    def of(cls, value: Any) -> Self:
        self = cls()
        self._see(value, 0)
        for name in _COLUMNS:  # thousands are kept, so each should be small
            setattr(self, name, tuple(getattr(self, name)))
        return self

    @classmethod
    def joined(cls, snapshots: Iterable[Snapshot]) -> Self:
        """Return a snapshot of all values of several snapshots."""
        self = cls()
        for snapshot in snapshots:
            self.add(snapshot)
        return self

    def add(self, other: Snapshot) -> None:
        """Add the values of another snapshot. Not for the result of `of`."""
        self.certain = self.certain and other.certain
        for name in _COLUMNS:
            getattr(self, name).extend(getattr(other, name))

    def _see(self, value: Any, depth: int) -> None:
        kind = type(value)
        if kind in ATOMS:
            return
        parts: list[Any] = []
        if depth > _DEPTH:
            self.certain = False
        elif kind is tuple:
            parts += value
        elif kind is list:
            parts += value
            self._see_items(value, parts)
        elif kind is dict:
            pairs = [*value.items()]
            keys, parts = [key for key, _ in pairs], [part for _, part in pairs]
            self._see_items(value, keys)
            if parts:
                self._dicts.append(value)
                self._values += parts
            self.certain = self.certain and ATOMS.issuperset(map(type, keys))
        elif _is_message(kind):
            parts += value.__dict__.values()
            self._messages.append(value)
            self._types.append(kind)
            self._fields.append(value.__dict__)
            self._sized.append(value.__dict__)
            self._sizes.append(len(parts))
            self._dicts.append(value.__dict__)
            self._values += parts
            parts.append(value.__pydantic_extra__)
            self._extras.append(parts[-1])
        else:
            self.certain = False
        for part in parts:
            if type(part) not in ATOMS:
                self._see(part, depth + 1)

    def _see_items(self, container: Any, items: list[Any]) -> None:
        if not items:
            self._empty.append(container)
            return
        self._sized.append(container)
        self._sizes.append(len(items))
        self._iterables.append(container)
        self._items += items

    def is_current(self) -> bool:
        """Return whether no value has changed since."""
        return (
            self.certain
            and not any(self._empty)
            and all(map(_is, map(type, self._messages), self._types))
            and all(map(_is, map(_fields_of, self._messages), self._fields))
            and all(map(_is, map(_extra_of, self._messages), self._extras))
            and all(map(_equal, map(len, self._sized), self._sizes))
            and all(map(_is, _join(self._iterables), self._items))
            and all(map(_is, _join(map(_values_of, self._dicts)), self._values))
        )


_COLUMNS = [column.name for column in fields(Snapshot) if column.name != "certain"]
_message_types: dict[type, bool] = {}


def _is_message(kind: type) -> bool:
    """Return whether it is a message type of LangChain's own, whose parts are its fields."""
    if kind not in _message_types:
        _message_types[kind] = issubclass(kind, BaseMessage) and kind.__module__.startswith(
            "langchain_core.messages"
        )
    return _message_types[kind]


class Encoder:
    """Encodes the channels of one thread. Items that have not changed are not serialized again."""

    def __init__(self) -> None:
        self._lists: dict[str, _ListEncoder] = {}

    def channels(self, serde: SerializerProtocol, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self._channel(serde, name, value) for name, value in values.items()}

    def _channel(self, serde: SerializerProtocol, name: str, value: Any) -> Any:
        if type(value) is list:
            return self._lists.setdefault(name, _ListEncoder()).encode(serde, name, value)
        encoded = encode(serde, value, name)
        if type(encoded) is list:  # a tuple: only lists are stored item by item
            encoded = {_SERDE: "msgpack", _DATA: _to_msgpack(encoded)}
        return encoded


class _Encoded(NamedTuple):
    """An item with its tree. The reference to the item keeps its id() from being used again."""

    item: Any
    snapshot: Snapshot
    tree: Any


class _ListEncoder:
    """Encodes the lists of one channel, one after the other."""

    def __init__(self) -> None:
        self._keep([])
        self._list: list[Any] = []
        self._trees: list[Any] = []
        """The last list and its trees."""

    def _keep(self, items: Iterable[_Encoded]) -> None:
        self._known = {id(each.item): each for each in items}
        self._snapshot = Snapshot.joined(each.snapshot for each in self._known.values())

    def encode(self, serde: SerializerProtocol, name: str, value: list[Any]) -> list[Any]:
        if not self._snapshot.is_current():
            self._keep([each for each in self._known.values() if each.snapshot.is_current()])
            self._list = []
        trees: list[Any] = []
        if len(value) >= len(self._list) and all(map(_is, self._list, value)):
            trees += self._trees[: len(self._list)]
        certain = True
        for n, item in enumerate(value[len(trees) :], len(trees)):
            found = self._known.get(id(item)) or self._encode_item(serde, item, f"{name}[{n}]")
            certain = certain and found.snapshot.certain
            trees.append(found.tree)
        self._list, self._trees = value[:] if certain else [], trees
        if len(self._known) > 2 * len(value) + _SPARE:
            self._keep([self._known[i] for i in dict.fromkeys(map(id, value)) if i in self._known])
        return trees[:]

    def _encode_item(self, serde: SerializerProtocol, item: Any, path: str) -> _Encoded:
        snapshot = Snapshot.of(item)  # first: a change during encode() is noticed next time
        encoded = _Encoded(item, snapshot, encode(serde, item, path))
        if snapshot.certain:
            self._known[id(item)] = encoded
            self._snapshot.add(snapshot)
        return encoded


class Decoder:
    """Decodes states that have most items in common, each item once.

    The states share these items, but no two places in one state share an object.
    """

    def __init__(self, serde: SerializerProtocol) -> None:
        self._serde = serde
        self._items: dict[tuple[str, bytes], list[Any]] = {}
        """By channel and tree: as many objects as one state has of them."""
        self._lists: dict[str, tuple[list[Any], list[Any]]] = {}
        """By channel: the trees of a list, and its items. Shorter lists can be part of it."""

    def channels(self, trees: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self.channel(name, tree) for name, tree in trees.items()}

    def channel(self, name: str, tree: Any) -> Any:
        """Return the value of a channel. The tree must not be changed afterwards."""
        if type(tree) is not list:
            return decode(self._serde, tree)
        trees, items = self._lists.get(name, ([], []))
        if len(tree) > len(trees) or not all(map(_is, tree, trees)):
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
