"""`load(save(x))` equals x, types included. (Refused values: test_refused_values.py.)"""

import datetime as dt
import enum
import itertools
import math
import sys
import uuid
import zoneinfo
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any

import ormsgpack
import pydantic
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.errors import HoldfastError, InvalidRequest, NotSerializable
from holdfast.format import nodes, portable, rows, values
from holdfast.model import ToolCall
from tests.support.equality import PAD, Frozen, Point, fresh, opened, python, same


# A backend stores bytes, but the one of plain files renders them as JSON.
@pytest.fixture(scope="module", params=["memory", "sqlite", "files"])
def store(request, tmp_path_factory):
    with opened(request.param, tmp_path_factory.mktemp("values")) as store:
        yield store


# -- the comparison itself ---------

HOUR = dt.timezone(dt.timedelta(hours=1))
NOON = dt.datetime(2024, 5, 1, 12)  # noqa: DTZ001 - naive ones are values too
ALIKE: list[tuple[Any, Any]] = [
    (1, True), (1, 1.0), (0.0, -0.0), ([], ()), (b"a", bytearray(b"a")), ("1", 1),
    ({1: 2}, {True: 2}), ({"a": 1, "b": 2}, {"b": 2, "a": 1}), ({1}, frozenset({1})),
    ({1}, {1.0}), (Decimal("1.0"), Decimal("1.00")), (Decimal("NaN"), Decimal("sNaN")),
    (float("nan"), -float("nan")), (NOON, NOON.replace(fold=1)), (NOON, NOON.replace(tzinfo=HOUR)),
    (NOON.replace(tzinfo=HOUR), NOON.replace(hour=11, tzinfo=dt.UTC)),
    (dt.time(1, tzinfo=HOUR), dt.time(0, tzinfo=dt.UTC)), (NOON, NOON.date()), ([0.0], [-0.0]),
    (NOON.replace(tzinfo=HOUR), NOON.replace(tzinfo=dt.timezone(dt.timedelta(hours=1), "CET"))),
]  # fmt: skip


@pytest.mark.parametrize(("a", "b"), ALIKE, ids=lambda v: type(v).__name__)
def test_the_comparison_is_strict(a, b):
    assert same(a, a)
    assert same(b, b)
    assert not same(a, b)
    assert not same({"k": [a]}, {"k": [b]})


# -- every kind of value -------------------------------------------------------------------------

ZONES = sorted({"Europe/Berlin", "America/St_Johns", "UTC"} & zoneinfo.available_timezones())
OFFSETS = st.timedeltas(dt.timedelta(hours=-23), dt.timedelta(hours=23)).map(dt.timezone)
CHARACTERS = st.characters(exclude_categories=()) | st.sampled_from("\0a.\ud800\udfff\ue000é😀")
ODD_DECIMALS = ["sNaN", "-sNaN12", "NaN7", "-0", "0E-500", "1E+999999", "-Infinity", "1.10"]
EDGES = [n + d for n in (0, 1 << 31, 1 << 32, 1 << 63, 1 << 64, 2**70, -(1 << 63)) for d in (-1, 0)]


def folded(moments):
    return st.builds(lambda m, fold: m.replace(fold=fold), moments, st.integers(0, 1))


KEYS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers() | st.sampled_from(EDGES),
    st.floats(allow_nan=False),
    st.text(CHARACTERS, max_size=8),
    st.binary(max_size=40),
    st.dates(),
    folded(st.datetimes(timezones=st.none() | OFFSETS)),
    folded(st.datetimes(timezones=st.sampled_from(ZONES).map(zoneinfo.ZoneInfo)))
    if ZONES
    else st.nothing(),
    folded(st.times(timezones=st.none() | OFFSETS)),
    st.timedeltas(),
    st.decimals(allow_nan=False),
    st.uuids(),
)
SCALARS = KEYS | st.floats() | st.sampled_from([Decimal(text) for text in ODD_DECIMALS])
HASHABLE = st.recursive(
    KEYS,
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(st.text(CHARACTERS, max_size=4), inner, max_size=4),
        st.sets(HASHABLE, max_size=3),
        st.frozensets(HASHABLE, max_size=3),
    ),
    max_leaves=12,
)


@settings(max_examples=400)
@given(VALUES)
@example({1: "int", "1": "str", b"1": "bytes", None: 0, 2.5: 1})
@example({False: "no", 1: "one"})
@example(["\ud83d\ude00", "\0", "", "\udc80abc"])
@example({(), frozenset(), ((),)})
def test_the_codec_gives_back_what_it_got(value):
    data = values.encode(value)
    assert same(values.decode(data), value)
    assert values.encode_exact(value) == data
    assert values.encode(values.decode(data)) == data


@settings(max_examples=400)
@given(VALUES)
@example(["\ud83d\ude00", "\ude00\ud83d", "\ud83d😀\ude00", {"\ud83d\ude00": "\ud83d" * 3}])
@example({"$str": "\ud83d\ude00", "$$": [float("nan")], "": 10**5000})
def test_the_rendering_as_text_gives_back_the_same_bytes(value):
    data = values.encode(value)
    assert portable.from_json(portable.loads(portable.dumps(portable.to_json(data)))) == data


@settings(max_examples=200)
@given(VALUES)
def test_both_ways_of_encoding_agree(value):
    """The fast path and the exact walk must be one encoding: hashes depend on it."""
    walked = values._packb(values._walk(value, "state", 0), None, values.PACK)
    assert walked == values.encode(value)


@settings(max_examples=50)
@given(VALUES)
@example(["\ud83d\ude00", {"\ud83d\ude00": "\ud83d\ude00" * 2}])
def test_a_store_gives_back_what_it_got(store, value):
    session = fresh(store)
    state = {"v": value, "log": [value, PAD], "d": {f"k{i}": PAD for i in range(4)} | {"v": value}}
    session.save(state)
    assert same(session.load(), state)
    session.append("log", value, {"in": [value, PAD]})
    state["log"] += [value, {"in": [value, PAD]}]
    assert same(session.load(), state)
    session.patch(set={"w": value, ("d", "w"): [value] * 3}, append={("d", "l"): [value]})
    state["w"] = value
    state["d"] |= {"w": [value] * 3, "l": [value]}
    assert same(session.load(), state)
    saved = session.save(value, meta={"m": value}, pending=[ToolCall("1", "t", value)])
    other = store.session(session.name)
    assert same(other.load(), value)
    assert same(other.head.meta, {"m": value})
    assert same(other.head.pending[0].arguments, value)
    assert same(saved.meta, {"m": value})
    assert same(other.load("@~1"), state)


KEY_CASES: list[dict[Any, Any]] = [
    {1: "a", "1": "b", b"1": "c", None: "d", "None": "e", 1.5: "f", "1.5": "g"},
    {True: "yes", "True": "text", 0: "zero"},
    {float("nan"): 1, -0.0: 2, float("inf"): 3, "nan": 4},
    {"\ud800": 1, "\0": 2, "": 3, "a": 4},
    {uuid.UUID(int=5): 1, NOON: 2, Decimal("1.50"): 3, dt.timedelta(1): 4, NOON.date(): 5},
    {2**70: 1, -(2**70): 2, 2**64: 3},
]


@pytest.mark.parametrize("case", KEY_CASES, ids=lambda case: str(next(iter(case))))
def test_keys_of_all_kinds_stay_apart(store, case):
    session = fresh(store)
    for state in (case, {"in": case}, {"in": [case, PAD]}, {"pad": [PAD] * 5} | {"in": case}):
        session.save(state)
        assert same(session.load(), state)


@pytest.mark.parametrize("key", ["\0", "", "a.b", "é", "k" * 5000], ids=ascii)
def test_any_string_is_a_key_to_set_and_append_to(store, key):
    session = fresh(store)
    session.save({"a": 1})
    session.patch(set={(key,): 1})
    assert same(session.load(), {"a": 1, key: 1})
    session.patch(set={(key,): []})
    session.append((key,), "x")
    session.append((key,), PAD)
    assert same(session.load(), {"a": 1, key: ["x", PAD]})
    session.patch(drop=[(key,)])
    assert same(session.load(), {"a": 1})


def test_a_key_with_a_lone_surrogate_is_set_or_refused(store):
    session = fresh(store)
    session.save({"a": 1})
    for change in (lambda: session.patch(set={"\ud800": 1}), lambda: session.append("\udc80", 2)):
        state, steps = session.load(), len(session)
        try:
            change()
        except HoldfastError:
            assert len(session) == steps
            assert same(session.load(), state)
        assert "a" in session.load()
    assert session.verify().ok


IMITATIONS: list[Any] = [
    {"__ext__": 1}, {"__type__": "tuple", "items": [1]}, {"$ref": "state"}, {"__ext__": [33, b""]},
    {"__class__": "os.system"}, {"\xc1": 1}, {"~": {"~": 1}}, [33, b"\x98"], ["__rope__", 1, 2],
    b"\xc7\x03\x01\x92\x01\x02", b"\xd4\x20\x00", b"\xc1item", "\x01\x92\x01\x02",
    b"\x28\xb5\x2f\xfd",
    nodes.Rope(nodes.LIST, 1, 9, bytes(32), ((1, 0, 1),), ()).stored,
    nodes.Blob(bytes(32), 9).stored, rows.seal(rows.ITEMS, 5, b"x"), values.encode((1, 2)),
]  # fmt: skip


@pytest.mark.parametrize("value", IMITATIONS, ids=lambda v: repr(v)[:30])
def test_data_that_looks_like_a_tag_stays_data(store, value):
    session = fresh(store)
    state = {"v": value, "log": [value] * 3 + [PAD], "big": [value] * 600}
    for _ in range(2):
        session.save(state)
        assert same(session.load(), state)
    session.append("log", value)
    assert same(session.load()["log"], [*state["log"], value])


def test_a_zone_that_this_machine_lacks_keeps_the_instant(monkeypatch):
    data = values.encode(NOON.replace(tzinfo=zoneinfo.ZoneInfo(ZONES[0]) if ZONES else HOUR))

    def lacks(key):
        raise zoneinfo.ZoneInfoNotFoundError(key)

    known = values.decode(data)
    monkeypatch.setattr(zoneinfo, "ZoneInfo", lacks)
    assert values.decode(data) == known
    assert values.decode(data).utcoffset() == known.utcoffset()


@pytest.mark.parametrize(
    "value", [{math.nan, -math.nan, float("nan")}, {float("nan"): 1, math.nan: 2}]
)
def test_two_nans_are_kept_or_refused(value):
    try:
        data = values.encode_exact(value)
    except NotSerializable:
        return
    assert same(values.decode(data), value)


# Not in the property above, because they may as well be refused; but never silently changed.
ZONED: list[Any] = [
    NOON.replace(tzinfo=dt.timezone(dt.timedelta(hours=1), "CET")),
    *[dt.time(12, tzinfo=zoneinfo.ZoneInfo(key)) for key in ZONES],
]


@pytest.mark.parametrize("value", ZONED, ids=lambda v: type(v).__name__)
def test_a_zone_is_kept_or_refused(value):
    try:
        data = values.encode_exact(value)
    except NotSerializable:
        return
    assert same(values.decode(data), value)


# -- models --------------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = "r"
    GREEN = 2


class Level(enum.IntEnum):
    LOW = 1


class Word(str, enum.Enum):  # noqa: UP042 - what most programs have
    YES = "yes"


class Flags(enum.Flag):
    A = 1
    B = 2


ENUMS: list[tuple[Any, Any]] = [
    (Colour.RED, "r"), (Level.LOW, 1), (Word.YES, "yes"), (Flags.A | Flags.B, 3),
    ([Colour.GREEN, (Level.LOW,)], [2, (1,)]), ({Colour.RED: Word.YES}, {"r": "yes"}),
    ({Level.LOW: 1}, {1: 1}), ({Word.YES: 1}, {"yes": 1}), ({Colour.RED, 5}, {"r", 5}),
]  # fmt: skip


@pytest.mark.parametrize(("value", "plain"), ENUMS, ids=lambda v: type(v).__name__)
def test_enums_are_stored_as_their_values(store, value, plain):
    session = fresh(store)
    for state, expected in [(value, plain), ({"v": [value, PAD]}, {"v": [plain, PAD]})]:
        session.save(state)
        assert same(session.load(), expected)


@dataclass
class Part:
    n: int
    colour: Colour = Colour.RED


@dataclass
class Whole:
    part: Part
    parts: list[Part]
    named: dict[str, Part]
    maybe: Part | None
    pair: tuple[Part, ...]
    colours: frozenset[Colour]
    counts: dict[Colour, int]
    sequence: Sequence[Part]
    mapping: Mapping[str, Part]
    when: dt.datetime
    derived: int = field(init=False, default=7)


WHOLE = Whole(
    Part(1), [Part(2)], {"a": Part(3)}, None, (Part(4, Colour.GREEN),), frozenset({Colour.GREEN}),
    {Colour.RED: 1}, [Part(5)], {"b": Part(6)}, NOON,
)  # fmt: skip


class Inner(pydantic.BaseModel):
    when: dt.datetime
    colour: Colour = Colour.RED


class Model(pydantic.BaseModel):
    inner: Inner
    items: list[Inner] = []
    table: dict[int, tuple[int, ...]] = {}
    tags: set[str] = set()
    part: Part = Part(1)


MODEL = Model(
    inner=Inner(when=NOON),
    items=[Inner(when=NOON, colour=Colour.GREEN)],
    table={1: (2, 3)},
    tags={"x"},
)


class Aliased(pydantic.BaseModel):
    user: str = pydantic.Field(alias="userName")


class Computed(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    x: int

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def double(self) -> int:
        return 2 * self.x


class Listed(pydantic.RootModel[list[int]]):
    pass


MODELS: list[Any] = [
    Point({"a": (1,)}), Part(1, Colour.GREEN), WHOLE, MODEL, Aliased(userName="u"), Computed(x=2),
    Listed([1, 2]), Frozen(x=3),
]  # fmt: skip


@pytest.mark.parametrize("model", MODELS, ids=lambda m: type(m).__name__)
def test_models_come_back_as_models(store, model):
    session = fresh(store)
    session.save(model)
    assert session.load(as_=type(model)) == model
    plain = session.load()
    session.save({"v": [model, PAD]})
    assert same(session.load(), {"v": [plain, PAD]})
    assert not isinstance(plain, type(model))


def test_models_are_stored_as_plain_data(store):
    session = fresh(store)
    session.save({"part": Part(1), "model": MODEL})
    inner = {"when": NOON, "colour": "r"}
    expected = {
        "part": {"n": 1, "colour": "r"},
        "model": {
            "inner": inner,
            "items": [inner | {"colour": 2}],
            "table": {1: (2, 3)},
            "tags": {"x"},
            "part": {"n": 1, "colour": "r"},
        },
    }
    assert same(session.load(), expected)


def test_a_model_in_the_place_of_its_base_keeps_its_own_fields(store):
    class Special(Inner):
        extra: int = 5

    session = fresh(store)
    session.save(Model(inner=Special(when=NOON)))
    assert session.load()["inner"] == {"when": NOON, "colour": "r", "extra": 5}


@pytest.mark.parametrize(
    "state", [5, None, [1], {"m": 1}, {"n": 1, "more": 2}], ids=lambda v: type(v).__name__
)
@pytest.mark.parametrize("model", [Part, Inner])
def test_a_state_that_does_not_fit_is_refused(store, state, model):
    session = fresh(store)
    session.save(state)
    with pytest.raises(InvalidRequest):
        session.load(as_=model)


def test_a_model_whose_types_cannot_be_resolved_is_refused(store):
    @dataclass
    class Dangling:
        x: "Nowhere"  # type: ignore[name-defined]  # noqa: F821

    session = fresh(store)
    session.save({"x": 1})
    with pytest.raises(InvalidRequest):
        session.load(as_=Dangling)


def test_texts_about_a_checkpoint_may_be_enums(store):
    session = fresh(store)
    session.save({"i": 1}, label=Word.YES, tags=[Word.YES], trigger=Word.YES)
    assert session.load("label:yes") == session.load("tag:yes") == {"i": 1}
    assert session.get().trigger == "yes"


# -- one encoding everywhere ---------------------------------------------------------------------

SETS = """
import holdfast
from holdfast.format import values
words = {f"word {i}" for i in range(50)} | {i for i in range(9)} | {b"b", None, 2.5, ("t", 1)}
state = {"set": words, "frozen": [frozenset(words), {frozenset({w}) for w in words}],
         "keys": {w: {w} for w in sorted(map(str, words))}}
session = holdfast.open("memory:").session("s")
print(values.encode(state).hex(), session.save(state).state_hash)
"""


def test_processes_encode_alike():
    outputs = {python(SETS, PYTHONHASHSEED=seed) for seed in ("0", "1", "2")}
    assert len(outputs) == 1


def test_a_machine_without_time_zones_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    berlin = dt.datetime(2024, 7, 1, 12, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin"))
    with holdfast.open("memory:", cache_bytes=0) as store:
        session = store.session("s")
        session.save({"t": berlin, "m": ["a"], "in": {"t": berlin}})
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(values, "_known_zones", frozenset)
            assert store.verify().ok
            session.append("m", "b")
            session.patch(set={("in", "x"): 1})
            assert store.verify().ok
            assert session.load()["t"] == berlin
        assert session.load()["t"].tzinfo == berlin.tzinfo
        assert session.load()["in"]["t"].tzinfo == berlin.tzinfo


class Lists(Enum):
    LONG = ["y" * 300] * 5


def test_an_enum_of_a_list_hashes_like_the_list() -> None:
    with holdfast.open("memory:", cache_bytes=0) as store:
        by_enum = store.session("a").save({"m": [Lists.LONG, ["z" * 3000] * 3]})
        by_list = store.session("b").save({"m": [["y" * 300] * 5, ["z" * 3000] * 3]})
        assert by_enum.state_hash == by_list.state_hash
        assert store.verify().ok


def test_an_interrupt_while_decoding_is_not_damage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It strikes as the hook is called, before any of its lines; C code then drops what it was."""
    data, real = values.encode([(1, 2), {3}]), values._unpackb
    failures = itertools.chain([True], itertools.repeat(False))

    def unpack(data: bytes, **more: Any) -> Any:
        if next(failures):
            raise ValueError("ext_hook failed")
        return real(data, **more)

    monkeypatch.setattr(values, "_unpackb", unpack)
    with pytest.raises(KeyboardInterrupt):
        values.decode(data)
    assert values.decode(data) == [(1, 2), {3}]


def test_the_message_of_the_decoder_when_a_hook_fails() -> None:
    def fail(tag: int, data: bytes) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(ValueError, match=f"^{values._HOOK_FAILED}$"):
        ormsgpack.unpackb(values.encode((1,)), ext_hook=fail)
    with pytest.raises(KeyboardInterrupt):
        values.decode(values.encode((1,)), fail)


def test_long_integers_load_whatever_the_digit_limit_is(tmp_path: Path) -> None:
    state = {"big": 10**700, "bigger": -(10**5000)}
    url = f"files:{tmp_path}/store"
    holdfast.open(url).session("s").save(state)
    before = sys.get_int_max_str_digits()
    try:
        for limit in (640, 0):
            sys.set_int_max_str_digits(limit)
            with holdfast.open(url) as store:
                session = store.session("s")
                assert session.load() == state
                session.save(state)
    finally:
        sys.set_int_max_str_digits(before)
    with holdfast.open(url) as store:
        assert store.session("s").load() == state
        assert store.verify().ok
