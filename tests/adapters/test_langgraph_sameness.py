"""A value that was changed in place is noticed; one that was not is not serialized again."""

from __future__ import annotations

import copy
import random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from holdfast.adapters.langgraph import serde as langgraph_serde
from holdfast.adapters.langgraph.serde import Snapshot
from holdfast.errors import NotSerializable
from tests.adapters.graphs import Person

if TYPE_CHECKING:
    from collections.abc import Callable

    Mutant = Callable[[Any, str, Any], None]

SERDE = JsonPlusSerializer()
ATOMS = st.sampled_from([None, True, False, 0, 1, 1.0, 0.0, -0.0, "", "1", "one", b"1"])
# Copied, so that no two places of a value are one object.
INSIDES = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.lists(inner, max_size=2).map(tuple),
    ),
    max_leaves=8,
).map(copy.deepcopy)
MESSAGES = st.builds(
    lambda text, inside: AIMessage(text, additional_kwargs={"in": inside}),
    st.sampled_from(["", "hello"]),
    INSIDES,
)
ITEMS = st.lists(st.one_of(MESSAGES, INSIDES), max_size=5)


def dumped(items: list[Any]) -> list[bytes]:
    return [SERDE.dumps_typed(item)[1] for item in items]


def containers(value: Any) -> list[Any]:
    """Everything in a value that can be changed in place."""
    if isinstance(value, AIMessage):
        return [value, *containers(value.additional_kwargs)]
    if isinstance(value, dict):
        return [value, *(c for inner in value.values() for c in containers(inner))]
    if isinstance(value, (list, tuple)):
        found = [c for inner in value for c in containers(inner)]
        return [value, *found] if isinstance(value, list) else found
    return []


def change(target: Any, key: str, value: Any, how: int) -> None:
    if isinstance(target, AIMessage):
        target.content = str(value)
    elif isinstance(target, dict):
        if how and target:
            del target[next(iter(target))]
        else:
            target[key] = value
    elif how == 1 and target:
        target[0] = value
    elif how == 2 and target:
        target.pop()
    else:
        target.append(value)


@given(ITEMS, st.randoms(use_true_random=False), st.sampled_from("abc"), INSIDES, st.integers(0, 2))
def test_changes_are_noticed(
    items: list[Any], rng: random.Random, key: str, value: Any, how: int
) -> None:
    each = [Snapshot.of(item) for item in items]
    snapshot = Snapshot()
    for one in each:
        snapshot.add(one)
    together = Snapshot.joined(each)
    assert snapshot.certain
    assert snapshot.is_current()
    assert together.is_current()
    assert all(one.is_current() for one in each)
    before = dumped(items)
    found = containers(items)[1:]
    if found:
        change(rng.choice(found), key, value, how)
    changed = [a != b for a, b in zip(before, dumped(items), strict=True)]
    assert not (any(changed) and (snapshot.is_current() or together.is_current()))
    assert not any(c and one.is_current() for c, one in zip(changed, each, strict=True))


def moved(a: list[Any], b: list[Any]) -> None:
    b.insert(0, a.pop())


def renamed(message: AIMessage) -> None:
    message.additional_kwargs["k"] = message.additional_kwargs.pop("o")


CHANGES: dict[str, tuple[Any, Callable[[Any], None]]] = {
    "from the end of a list to the next": (
        [["x", "y"], ["z"]],
        lambda item: moved(item[0], item[1]),
    ),
    "a key, not its value": (AIMessage("", additional_kwargs={"o": 1}), renamed),
    "an empty list": (AIMessage(""), lambda m: m.tool_calls.append("call")),
    "an empty dict": (AIMessage(""), lambda m: m.additional_kwargs.update(k=1)),
    "a type": (AIMessageChunk(content="x"), lambda m: setattr(m, "__class__", AIMessage)),
    "fields beside those of its type": (
        AIMessage("x"),
        lambda m: object.__setattr__(m, "__pydantic_extra__", {"k": 1}),
    ),
    "all fields": (
        AIMessage("x"),
        lambda m: object.__setattr__(m, "__dict__", {**m.__dict__, "content": "y"}),
    ),
    "a field less": (HumanMessage("x", name="n"), lambda m: m.__dict__.popitem()),
    "something equal": ([1], lambda item: item.__setitem__(0, True)),
    "something equal in a dict": ({"k": 1}, lambda item: item.__setitem__("k", 1.0)),
    "in a tuple": (([1],), lambda item: item[0].append(2)),
    "in a message in a dict": (
        {"m": AIMessage("x")},
        lambda item: setattr(item["m"], "content", "y"),
    ),
}


def check(name: str) -> None:
    item, apply = copy.deepcopy(CHANGES[name])
    others = [AIMessage("before"), ["before"], {"be": "fore"}]
    each = [Snapshot.of(value) for value in (*others, item, *copy.deepcopy(others))]
    together = Snapshot.joined(each)
    assert together.is_current()
    apply(item)
    assert not together.is_current()
    assert [one.is_current() for one in each] == [True, True, True, False, True, True, True]


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_noticed(name: str) -> None:
    check(name)


@pytest.mark.parametrize(
    ("names", "change"),
    [
        (["_sizes"], "from the end of a list to the next"),
        (["_items"], "a key, not its value"),
        (["_empty"], "an empty list"),
        (["_empty"], "an empty dict"),
        (["_types"], "a type"),
        (["_fields"], "all fields"),
        (["_extras"], "fields beside those of its type"),
        (["_sizes", "_values"], "a field less"),
        (["_items"], "something equal"),
        (["_values"], "something equal in a dict"),
        (["_values"], "in a message in a dict"),
    ],
)
def test_mutant_that_does_not_look_at_everything(
    mutant: Mutant, names: list[str], change: str
) -> None:
    is_current = Snapshot.is_current

    def blind(snapshot: Snapshot) -> bool:
        kept = {name: getattr(snapshot, name) for name in names}
        for name in names:
            setattr(snapshot, name, ())
        try:
            return is_current(snapshot)
        finally:
            for name, held in kept.items():
                setattr(snapshot, name, held)

    mutant(Snapshot, "is_current", blind)
    with pytest.raises(AssertionError):
        check(change)


class Mine:
    """Something whose parts nobody knows."""


class MyMessage(HumanMessage):
    """One of somebody's own, that may keep something elsewhere."""


@pytest.mark.parametrize(
    "value",
    [Mine(), [Mine()], {"k": Mine()}, {(1,): 1}, {1, 2}, bytearray(b"x"), MyMessage(content="x")],
    ids=["object", "in a list", "in a dict", "key", "set", "bytearray", "message"],
)
def test_what_may_have_parts_that_nobody_sees_is_never_the_same(value: Any) -> None:
    assert not Snapshot.of(value).is_current()
    assert not Snapshot.joined([Snapshot.of("atom"), Snapshot.of(value)]).is_current()
    snapshot = Snapshot()
    snapshot.add(Snapshot.of(value))
    assert not snapshot.is_current()


def test_a_value_that_holds_itself_is_never_the_same() -> None:
    value: list[Any] = []
    value.append(value)
    assert not Snapshot.of(value).is_current()


# -- what is encoded anew ------------------------------------------------------------------------


class Counting(JsonPlusSerializer):
    count = 0

    def dumps_typed(self, obj: Any) -> tuple[str, bytes]:
        self.count += 1
        return super().dumps_typed(obj)


def said(n: int) -> AIMessage:
    return AIMessage(f"message {n}", id=str(n))


def encoded(serde: Any, items: list[Any]) -> list[Any]:
    return [langgraph_serde.encode(serde, item, "") for item in items]


def test_a_list_that_slides_is_not_encoded_again() -> None:
    serde, encoder = Counting(), langgraph_serde.Encoder()
    messages = [said(n) for n in range(300)]
    for n in range(250):
        window = messages[n : n + 50]
        got = encoder.channels(serde, {"m": window})["m"]
        assert got == encoded(SERDE, window)
    assert serde.count == 299
    assert len(encoder._lists["m"]._known) <= 2 * 50 + langgraph_serde._SPARE


def test_a_list_that_grows_and_shrinks() -> None:
    encoder, messages = langgraph_serde.Encoder(), [said(n) for n in range(20)]
    for count in (3, 20, 7, 0, 7, 8, 8, 1, 20):
        got = encoder.channels(SERDE, {"m": messages[:count]})["m"]
        assert got == encoded(SERDE, messages[:count])


def test_objects_that_nobody_sees_into_are_always_encoded_again() -> None:
    serde, encoder = Counting(), langgraph_serde.Encoder()
    items: list[Any] = [said(0), Person("Ada", 36), said(1)]
    for age in range(5):
        items[1].age = age
        items.append(said(age + 2))
        serde.count = 0
        assert encoder.channels(serde, {"m": items})["m"] == encoded(SERDE, items)
        assert serde.count == (2 if age else 4)


def test_only_what_was_changed_is_encoded_again() -> None:
    serde, encoder = Counting(), langgraph_serde.Encoder()
    messages: list[Any] = [said(n) for n in range(20)]
    encoder.channels(serde, {"m": messages})
    for n in range(20):
        messages[n].content = "changed"
        serde.count = 0
        assert encoder.channels(serde, {"m": messages})["m"] == encoded(SERDE, messages)
        assert serde.count == 1
    messages.insert(3, Mine.__name__)
    messages[7:9] = messages[8:6:-1]
    serde.count = 0
    assert encoder.channels(serde, {"m": messages})["m"] == encoded(SERDE, messages)
    assert serde.count == 0


def test_what_was_given_before_stays_as_it_is() -> None:
    encoder = langgraph_serde.Encoder()
    messages = [said(0)]
    first = encoder.channels(SERDE, {"m": messages})["m"]
    messages.append(said(1))
    second = encoder.channels(SERDE, {"m": messages})["m"]
    assert [len(first), len(second)] == [1, 2]
    assert first[0] is second[0]  # which tells that it was not encoded again
    second[0] = "changed"
    assert encoder.channels(SERDE, {"m": messages})["m"] == encoded(SERDE, messages)


def test_a_list_with_something_that_cannot_be_encoded() -> None:
    encoder = langgraph_serde.Encoder()
    messages: list[Any] = [said(0), said(1)]
    encoder.channels(SERDE, {"m": messages[:1]})
    with pytest.raises(NotSerializable, match=r"m\[2\]"):
        encoder.channels(SERDE, {"m": [*messages, lambda: None]})
    messages[0].content = "changed"
    assert encoder.channels(SERDE, {"m": messages})["m"] == encoded(SERDE, messages)
