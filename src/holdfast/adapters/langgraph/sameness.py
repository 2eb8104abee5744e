"""Whether values are still what they were.

A value is, if each of its parts that cannot change is the same object as before: a message that was
changed in place has another. Many values are looked at by a few loops in C.
"""

from __future__ import annotations

import operator
from itertools import chain
from typing import TYPE_CHECKING, Any, Self

from langchain_core.messages import BaseMessage

if TYPE_CHECKING:
    from collections.abc import Sequence

ATOMS = frozenset({str, int, float, bool, type(None), bytes})
_DEPTH = 64
_is, _equal = operator.is_, operator.eq
_fields_of, _extra_of = operator.attrgetter("__dict__"), operator.attrgetter("__pydantic_extra__")
_values_of, _join = dict.values, chain.from_iterable


class Seen:
    """All that can change in some values, and what was in it when they were seen.

    With a value that may have parts which one cannot see, it is not `certain`, and never the same.
    """

    __slots__ = (
        "_dict_sizes", "_dicts", "_empty", "_extras", "_field_counts", "_fields", "_items", "_keys",
        "_kinds", "_list_sizes", "_lists", "_messages", "_values", "certain",
    )  # fmt: skip

    def __init__(self) -> None:
        self.certain = True
        self._empty: Any = []
        """Lists and dicts,"""
        self._messages: Any = []
        """messages with their types, number of fields, fields, and extra fields,"""
        self._kinds: Any = []
        self._field_counts: Any = []
        self._fields: Any = []
        self._extras: Any = []
        self._lists: Any = []
        """and what else has something in it."""
        self._list_sizes: Any = []
        self._items: Any = []
        self._dicts: Any = []
        self._dict_sizes: Any = []
        self._keys: Any = []
        self._values: Any = []

    @classmethod
    def of(cls, value: Any) -> Self:
        self = cls()
        self._see(value, 0)
        for name in self.__slots__[:-1]:  # thousands are held, with little in each
            setattr(self, name, tuple(getattr(self, name)))
        return self

    @classmethod
    def many(cls, others: Sequence[Seen]) -> Self:
        self = cls()
        for name in self.__slots__[:-1]:
            setattr(self, name, [*_join(map(operator.attrgetter(name), others))])
        self.certain = all(other.certain for other in others)
        return self

    def _see(self, value: Any, depth: int) -> None:
        kind = type(value)
        if kind in ATOMS:
            return
        if depth > _DEPTH:
            self.certain = False
            return
        parts: list[Any] = []
        if _is_message(kind):
            parts += value.__dict__.values()
            self._messages.append(value)
            self._kinds.append(kind)
            self._field_counts.append(len(parts))
            self._fields += parts
            self._extras.append(value.__pydantic_extra__)
            parts.append(self._extras[-1])
        elif kind is list:
            parts += value
            if parts:
                self._lists.append(value)
                self._list_sizes.append(len(parts))
                self._items += parts
            else:
                self._empty.append(value)
        elif kind is dict:
            pairs = [*value.items()]
            if pairs:
                keys, parts = [key for key, _ in pairs], [part for _, part in pairs]
                self._dicts.append(value)
                self._dict_sizes.append(len(pairs))
                self._keys += keys
                self._values += parts
                self.certain = self.certain and ATOMS.issuperset(map(type, keys))
            else:
                self._empty.append(value)
        elif kind is tuple:
            parts += value
        else:
            self.certain = False
        for part in parts:
            if type(part) not in ATOMS:
                self._see(part, depth + 1)

    def add(self, other: Seen) -> None:
        """What another has seen, too; not if this was made by `of`."""
        self.certain = self.certain and other.certain
        for name in self.__slots__[:-1]:
            getattr(self, name).extend(getattr(other, name))

    def is_same(self) -> bool:
        if not self.certain or any(self._empty):
            return False
        messages, dicts, lists = self._messages, self._dicts, self._lists
        if messages:
            if not all(map(_is, map(type, messages), self._kinds)):
                return False
            fields = [*map(_fields_of, messages)]
            if (
                not all(map(_equal, map(len, fields), self._field_counts))
                or not all(map(_is, _join(map(_values_of, fields)), self._fields))
                or not all(map(_is, map(_extra_of, messages), self._extras))
            ):
                return False
        if lists and (
            not all(map(_equal, map(len, lists), self._list_sizes))
            or not all(map(_is, _join(lists), self._items))
        ):
            return False
        return not dicts or (
            all(map(_equal, map(len, dicts), self._dict_sizes))
            and all(map(_is, _join(dicts), self._keys))
            and all(map(_is, _join(map(_values_of, dicts)), self._values))
        )


_messages: dict[type, bool] = {}


def _is_message(kind: type) -> bool:
    if kind not in _messages:
        ours = issubclass(kind, BaseMessage)
        _messages[kind] = ours and kind.__module__.startswith("langchain_core.messages")
    return _messages[kind]
