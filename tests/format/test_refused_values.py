"""What cannot be kept exactly is refused before anything is written, and its path is named."""

import collections
import datetime as dt
import enum
import fractions
import os
import pathlib
import pickle
import re
import types
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NamedTuple

import apsw
import ormsgpack
import pydantic
import pytest
from ormsgpack import Ext

import holdfast
from holdfast import errors
from holdfast.errors import NotSerializable, Unavailable
from holdfast.format import nodes, values
from holdfast.model import ToolCall
from tests.support.equality import PAD, Frozen, Point, fresh, opened, same
from tests.support.stores import Home


# A value is refused before a backend sees it: one store with images in memory, one without.
@pytest.fixture(scope="module", params=["memory", "sqlite"])
def store(request, tmp_path_factory):
    with opened(request.param, tmp_path_factory.mktemp("values")) as store:
        yield store


class Colour(enum.Enum):
    RED = "r"
    GREEN = 2


class Text(str):
    __slots__ = ()


class Whole64(int):
    pass


class Real(float):
    pass


class Raw(bytes):
    pass


class Items(list):
    pass


class Table(dict):
    pass


@dataclass(init=False)
class Record(dict):
    kind: str = "record"


@dataclass(init=False)
class Rows(list):
    kind: str = "rows"


class Pair(NamedTuple):
    a: int
    b: int


class Moment(dt.datetime):
    pass


class Money(Decimal):
    pass


class Plain:
    def __init__(self) -> None:
        self.x = 1


def function() -> None: ...


@dataclass
class Bare:
    x: int


def incomplete() -> Bare:
    bare = Bare(1)
    del bare.x
    return bare


class Stubborn(pydantic.BaseModel):
    x: int = 1

    @pydantic.model_serializer
    def refuse(self) -> Any:
        raise RuntimeError("will not")


class Late(NamedTuple):
    """Fragments are made when they are needed: while one lives, saves take a slower way."""

    make: Callable[[], Any]


REFUSED: dict[str, Any] = {
    "ext": Ext(values.TUPLE, b"\x90"),
    "unknown ext": Ext(99, b""),
    "reference": Ext(nodes.ROPE_TAG, ormsgpack.packb([0, 1, 9, bytes(32), b"", 0, [], [1, 0, 1]])),
    "fragment": Late(lambda: ormsgpack.Fragment(b"\x01")),
    "text fragment": Late(lambda: ormsgpack.Fragment(b"\xa1a")),
    "bytearray": bytearray(b"x"),
    "memoryview": memoryview(b"x"),
    "ordered dict": collections.OrderedDict(a=1),
    "default dict": collections.defaultdict(list),
    "counter": collections.Counter("ab"),
    "chain map": collections.ChainMap({}),
    "mapping proxy": types.MappingProxyType({"a": 1}),
    "namespace": types.SimpleNamespace(a=1),
    "named tuple": Pair(1, 2),
    "deque": collections.deque([1]),
    "str subclass": Text("x"),
    "int subclass": Whole64(5),
    "float subclass": Real(1.5),
    "bytes subclass": Raw(b"x"),
    "list subclass": Items([1]),
    "dict subclass": Table(a=1),
    "dict that is a dataclass": Record(a=1),
    "list that is a dataclass": Rows([1]),
    "datetime subclass": Moment(2024, 1, 1),
    "decimal subclass": Money(1),
    "object": Plain(),
    "bare object": object(),
    "function": function,
    "lambda": lambda: None,
    "method": "".join,
    "builtin": print,
    "class": Plain,
    "dataclass type": Point,
    "model type": Frozen,
    "enum type": Colour,
    "module": os,
    "generator": iter([]),
    "range": range(3),
    "slice": slice(3),
    "complex": 1j,
    "fraction": fractions.Fraction(1, 3),
    "ellipsis": ...,
    "not implemented": NotImplemented,
    "path": pathlib.PurePosixPath("x"),
    "pattern": re.compile("x"),
    "exception": ValueError("x"),
    "keys view": {}.keys(),
    "incomplete dataclass": incomplete(),
    "model that does not dump": Stubborn(),
    "tuple as key": {(1, 2): 3},
    "frozenset as key": {frozenset(): 3},
    "str subclass as key": {Text("x"): 1},
    "int subclass as key": {Whole64(1): 1},
    "class as key": {Plain: 1},
    "dataclass as key": {Point(1): 1},
}
# The longest path that every refusal must at least begin with.
SPOTS: dict[str, Callable[[Any], Any]] = {
    "state": lambda x: x,
    "state.messages[3].args": lambda x: {"messages": [1, 2, 3, {"args": x}], "pad": [PAD] * 3},
    "state.messages[3]": lambda x: {"messages": [PAD, PAD, PAD, x]},
    "state.a[1][0]": lambda x: {"a": (0, [x])},
    "state[7]['a b']": lambda x: {7: {"a b": x}},
    "state.d.k5": lambda x: {"d": {f"k{i}": PAD for i in range(5)} | {"k5": x}},
}


@pytest.mark.parametrize("kind", REFUSED)
def test_anything_else_is_refused_with_its_path(store, kind):
    bad = made(REFUSED[kind])
    session = fresh(store)
    session.save({"messages": [PAD] * 4, "d": {f"k{i}": PAD for i in range(6)}})
    for path, place in SPOTS.items():
        with pytest.raises(NotSerializable) as caught:
            session.save(place(bad))
        assert caught.value.path.startswith(path), path
        assert caught.value.path in str(caught.value)
    assert len(session) == 1


OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "state.x[1]": lambda s, bad: s.save({"x": [0, bad]}),
    "new items of state.log[1].args": lambda s, bad: s.append("log", 0, {"args": bad}),
    "new items of state.d.log[0]": lambda s, bad: s.append(("d", "log"), bad),
    "state.plan.x": lambda s, bad: s.patch(set={"plan": {"x": bad}}),
    "state.d.plan": lambda s, bad: s.patch(set={("d", "plan"): bad}),
    "new items of state.log[1]": lambda s, bad: s.patch(append={"log": [0, bad]}),
    "fields.meta.x[0]": lambda s, bad: s.save({"fine": 1}, meta={"x": [bad]}),
    "fields.meta.y": lambda s, bad: s.append("log", 1, meta={"y": bad}),
    "fields.meta.z": lambda s, bad: s.patch(set={"fine": 1}, meta={"z": bad}),
    "fields.pending[0].arguments": lambda s, bad: s.save(
        {"fine": 1}, pending=[ToolCall("1", "tool", bad)]
    ),
}


def contents(store: Any) -> dict[pathlib.Path, bytes]:
    """The bytes of a store's files."""
    path = getattr(store._repository.backend, "path", None)
    if path is None:
        return {}
    found = [*pathlib.Path(path).rglob("*"), *(pathlib.Path(f"{path}{s}") for s in ("", "-wal"))]
    return {file: file.read_bytes() for file in found if file.is_file()}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_refusal_leaves_everything_as_it_was(store, operation):
    session = fresh(store)
    state = {"log": [PAD, "b"], "d": {"log": [1]}}
    before = session.save(state, label="before")
    rows_before = contents(store)
    for kind in ("object", "fragment", "bytearray", "ordered dict", "ext"):
        with pytest.raises(NotSerializable) as caught:
            OPERATIONS[operation](session, made(REFUSED[kind]))
        assert caught.value.path == operation
        assert contents(store) == rows_before
        assert len(session) == 1
        assert session.head == store.session(session.name).head == before
    after = session.append("log", "c")
    assert after.parent == before.id
    assert same(session.load(), state | {"log": [PAD, "b", "c"]})
    assert session.verify().ok


def test_a_refused_first_save_leaves_no_session(store):
    session = fresh(store)
    with pytest.raises(NotSerializable):
        session.save({"x": [PAD, object()]})
    assert not session.exists()
    assert session.name not in [info.name for info in store.sessions()]
    assert session.save({"x": 1}).step == 1


def made(value: Any) -> Any:
    return value.make() if isinstance(value, Late) else value


# What encodes to the very bytes that were saved before must be noticed all the same.
LOOKALIKES: dict[str, tuple[Any, Any]] = {
    "bytearray": (b"x" * 99, bytearray(b"x" * 99)),
    "memoryview": (b"x", memoryview(b"x")),
    "ext": ((1, 2), Ext(values.TUPLE, b"\x92\x01\x02")),
    "fragment": (5, Late(lambda: ormsgpack.Fragment(b"\x05"))),
    "ordered dict": ({"a": 1}, collections.OrderedDict(a=1)),
    "str subclass": ("abc", Text("abc")),
}
CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "inline": lambda x: {"v": x},
    "short list": lambda x: {"v": [x, 1]},
    "long list": lambda x: {"v": [*[{"i": i, "t": PAD[:100]} for i in range(40)], x]},
    "long list, first": lambda x: {"v": [x, *[{"i": i, "t": PAD[:100]} for i in range(40)]]},
    "in a message": lambda x: {"v": [{"i": i, "t": PAD[:99], "x": [x]} for i in range(40)]},
    "long dict": lambda x: {"v": {f"k{i}": PAD for i in range(9)} | {"x": x}},
    "list in a list": lambda x: {"v": [[PAD, x], PAD]},
}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("kind", LOOKALIKES)
def test_lookalikes_of_what_was_saved_are_refused(store, kind, container):
    good, bad = LOOKALIKES[kind]
    bad = made(bad)
    session = fresh(store)
    session.save(CONTAINERS[container](good))
    with pytest.raises(NotSerializable):
        session.save(CONTAINERS[container](bad))
    assert same(session.load(), CONTAINERS[container](good))


class Number(enum.Enum):
    ONE = 1.0
    TRUE = True
    ITEMS = [1]  # noqa: RUF012 - a value, not a default


# Distinct, and usable in sets and as keys, only until they are stored as plain data.
COLLIDING: list[Any] = [
    {Number.ONE, 1}, {Number.TRUE, 1}, {Number.ONE: "a", 1: "b"}, {Number.TRUE: "a", 1.0: "b"},
    {Colour.GREEN: "a", 2: "b"}, {Colour.GREEN, 2}, {Number.ITEMS}, {Point(1)}, {(Point(1),)},
    {Frozen(x=1)}, frozenset({(1, (Number.ITEMS,))}), {Point(1): 1}, {Number.ITEMS: 1},
    {(Number.ONE,), (1,)},
]  # fmt: skip


@pytest.mark.parametrize("value", COLLIDING, ids=lambda v: type(v).__name__)
def test_what_could_not_be_loaded_is_not_saved(store, value):
    session = fresh(store)
    session.save({"ok": 1})
    with pytest.raises(NotSerializable) as caught:
        session.save({"ok": 1, "bad": value})
    assert caught.value.path.startswith("state.bad")
    assert same(session.load(), {"ok": 1})
    assert len(session) == 1


def test_without_the_exact_check_a_lookalike_would_pass(monkeypatch):
    """A mutant: the tests above notice it."""
    monkeypatch.setattr(values, "encode_exact", lambda value, depth=0: values.encode(value))
    with holdfast.open("memory:") as store:
        store.session("s").save({"v": [bytearray(b"x"), 1]})
        assert store.session("s").load() == {"v": [b"x", 1]}


def looped(kind: str) -> Any:
    loop: list[Any] = [1]
    if kind == "dict":
        table: dict[str, Any] = {}
        table["self"] = table
        return table
    if kind == "model":
        model: Any = pydantic.create_model("Loop", x=(Any, None))()
        model.x = [model]
        return model
    loop.append({"list": loop, "tuple": (loop,), "dataclass": Point(loop), "int": {1: loop}}[kind])
    return loop


@pytest.mark.parametrize("kind", ["list", "dict", "tuple", "dataclass", "model", "int"])
def test_what_contains_itself_is_refused(store, kind):
    session = fresh(store)
    session.save({"log": [PAD]})
    for state in (looped(kind), {"log": [PAD, looped(kind)]}):
        with pytest.raises(NotSerializable, match="itself") as caught:
            session.save(state)
        assert len(caught.value.path) < 100
    with pytest.raises(NotSerializable, match="itself"):
        session.append("log", looped(kind))
    with pytest.raises(NotSerializable, match="itself"):
        session.save({"log": []}, meta={"x": looped(kind)})
    assert same(session.load(), {"log": [PAD]})


# -- limits --------------------------------------------------------------------------------------

NESTINGS: dict[str, Callable[[Any], Any]] = {
    "list": lambda x: [x],
    "tuple": lambda x: (x,),
    "dict": lambda x: {"k": x},
    "int dict": lambda x: {1: x},
    "frozenset": lambda x: frozenset({x}),
    "mixed": lambda x: [{"k": ({1: x},)}],
}


def nest(kind: str, levels: int, value: Any = None) -> Any:
    per_turn = 4 if kind == "mixed" else 1
    for _ in range(levels // per_turn):
        value = NESTINGS[kind](value)
    return value


def accepts(session: Any, state: Any) -> bool:
    try:
        session.save(state)
    except NotSerializable:
        return False
    return True


@pytest.mark.parametrize("kind", NESTINGS)
@pytest.mark.parametrize("leaf", [None, PAD * 4], ids=["none", "text"])
def test_the_deepest_that_is_accepted_loads(kind, leaf):
    with holdfast.open("memory:", cache_bytes=0) as store:
        session = store.session("s")
        accepted = 0
        for levels in (values.MAX_DEPTH - 4, *range(values.MAX_DEPTH, 400, 9)):
            state = {"deep": nest(kind, levels, leaf), "n": levels, "odd": "\ud800"}
            if not accepts(session, state):
                break
            accepted = levels
            assert same(session.load(), state)
            session.append("log", levels)
            assert same(session.load(), state | {"log": [levels]})
            assert session.diff("@~1") is not None
            assert session.verify().ok
        assert values.MAX_DEPTH - 4 <= accepted < 390


@pytest.mark.parametrize("levels", [1, 30, *range(55, 62)])
def test_depth_does_not_change_what_is_hashed(levels):
    """However deep a list lies, and whether a save or a patch brought it there."""
    deep = {"list": ["x" * 1000, "y" * 1000], "pad": "z" * 5000}
    with holdfast.open("memory:", cache_bytes=0) as store:
        saved, patched = store.session("saved"), store.session("patched")
        saved.save(nest("dict", levels, deep))
        assert saved.verify().ok
        patched.save(nest("dict", levels, {}))
        patched.patch(set={(*["k"] * levels, key): value for key, value in deep.items()})
        assert patched.verify().ok
        assert saved.get().state_hash == patched.get().state_hash
        patched.append((*["k"] * levels, "list"), "w" * 1000)
        saved.save(nest("dict", levels, deep | {"list": [*deep["list"], "w" * 1000]}))
        assert saved.get().state_hash == patched.get().state_hash
        assert store.verify().ok


def test_deepening_step_by_step_is_refused_or_loads(store):
    """Each patch adds a little below what the last one added."""
    session = fresh(store)
    session.save({"k": {}})
    path: tuple[str, ...] = ("k",)
    for _ in range(30):
        try:
            session.patch(set={path: nest("dict", 50)})
        except NotSerializable:
            break
        assert session.load()
        path += ("k",) * 50
    assert store.session(session.name).load()
    assert session.verify().ok
    assert session.append("log", 1).step == len(session)


@pytest.mark.parametrize("kind", NESTINGS)
@pytest.mark.parametrize("levels", [400, 20_000])
def test_deep_nesting_is_refused_cleanly(store, kind, levels):
    session = fresh(store)
    session.save({"log": [PAD]})
    deep = nest(kind, 400 if kind == "frozenset" else levels)  # hashing recurses in Python itself
    for attempt in (
        lambda: session.save({"a": [0, deep]}),
        lambda: session.append("log", deep),
        lambda: session.patch(set={"x": deep}),
        lambda: session.save({}, meta={"x": deep}),
    ):
        with pytest.raises(NotSerializable, match="nested deeper"):
            attempt()
    assert same(session.load(), {"log": [PAD]})


# How a path must begin, at least.
BIG = "b" * 9000
TOO_BIG: dict[str, Callable[[Any], Any]] = {
    "state": lambda s: s.save({"a": [PAD, {"b": BIG}]}),
    "new items of state.log": lambda s: s.append("log", 1, BIG),
    "new items of state.more": lambda s: s.patch(append={"more": [BIG]}),
    "state.plan": lambda s: s.patch(set={"plan": {"x": BIG}}),
    "fields": lambda s: s.save({"fine": 1}, meta={"x": BIG}),
    "fields.": lambda s: s.save({"fine": 1}, pending=[ToolCall("1", "t", BIG)]),
}


@pytest.mark.parametrize("path", TOO_BIG)
def test_a_value_above_the_limit_is_refused(store, path, monkeypatch):
    monkeypatch.setattr(values, "MAX_VALUE", 8000)
    session = fresh(store)
    session.save({"log": [PAD]})
    with pytest.raises(NotSerializable, match="bytes") as caught:
        TOO_BIG[path](session)
    assert caught.value.path.startswith(path.removesuffix("."))
    assert same(session.load("step:1"), {"log": [PAD]})
    session.append("log", "next")
    assert session.load()["log"] == [PAD, "next"]


GROWTH: dict[str, Callable[[Any, int], Any]] = {
    "append": lambda s, i: s.append("log", PAD),
    "nested append": lambda s, i: s.append(("in", "log"), PAD),
    "patch": lambda s, i: s.patch(set={("in", f"k{i}"): PAD}),
    "save a list": lambda s, i: s.save({"log": [PAD] * i}),
    "save a dict": lambda s, i: s.save({"in": {f"k{n}": PAD for n in range(i)}}),
    "save text": lambda s, i: s.save({"text": PAD * i}),
}


@pytest.mark.parametrize("how", GROWTH)
def test_growing_past_the_limit_loses_nothing(store, how, monkeypatch):
    """Each save is refused, or loads: also the one that brings a container over the limit."""
    monkeypatch.setattr(values, "MAX_VALUE", 8000)
    session = fresh(store)
    session.save({"log": [], "in": {"log": []}})
    for i in range(1, 12):
        try:
            GROWTH[how](session, i)
        except NotSerializable:
            break
        assert store.session(session.name).load() == session.load()
    assert session.load() is not None
    assert session.verify().ok


def test_sqlite_takes_what_the_limit_allows(tmp_path):
    with holdfast.open(tmp_path / "a.db") as store:
        backend: Any = store._repository.backend
        assert backend._writer.limit(apsw.SQLITE_LIMIT_LENGTH) > values.MAX_VALUE


def test_what_compresses_very_well_is_no_bomb(store):
    session = fresh(store)
    state = {"zeros": bytes(3 << 20), "text": "a" * (3 << 20), "list": ["a" * 99] * 30_000}
    session.save(state)
    assert same(session.load(), state)


@pytest.mark.parametrize(
    "url",
    [
        "file:agent.db",
        "mysql://host/db",
        "http://host",
        "redis://x",
        ":memory:",
        "sqlit:///x.db",
        "sqlite:///:memory:",
    ],
)
def test_addresses_of_no_kind_of_store(url: str, tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    """They are not taken for names of files."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(holdfast.InvalidRequest, match="no kind of store"):
        holdfast.open(url)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("url", ["~/agent.db", "~", "sqlite:~/agent.db", "files:~/store"])
def test_the_library_does_not_expand_paths(
    url: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would make a folder called ~, which people then remove with all that is in their home."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(holdfast.InvalidRequest):
        holdfast.open(url, create=True)
    assert list(tmp_path.iterdir()) == []


def test_files_addresses_with_slashes(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with holdfast.open("files:store") as store:
        store.session("s").save({"n": 1})
    for url in (f"files://{tmp_path}/store", f"files:///{tmp_path}/store"):
        with holdfast.open(url, create=False) as store:
            assert store.session("s").load() == {"n": 1}


def test_sqlite_addresses_mean_what_they_mean_in_sqlalchemy(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with holdfast.open("sqlite:///agent.db") as store:
        assert store.address == str(tmp_path / "agent.db")
    with holdfast.open("sqlite:///new/agent.db", create=True) as store:
        assert store.address == str(tmp_path / "new" / "agent.db")
    for url in (f"sqlite:///{tmp_path}/agent.db", f"sqlite:{tmp_path}/agent.db"):
        holdfast.open(url, create=False).close()


def test_a_path_from_the_root_is_not_taken_for_a_relative_one(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = tmp_path.parts[1]
    with pytest.raises(holdfast.InvalidRequest) as refused:
        holdfast.open(f"sqlite://{tmp_path}/agent.db", create=True)
    assert f"sqlite:///{tmp_path}/agent.db" in str(refused.value.hint)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / first).mkdir()
    with holdfast.open(f"sqlite:///{first}/agent.db") as store:
        assert store.address == str(tmp_path / first / "agent.db")


@pytest.mark.parametrize("scheme", ["sqlite", "files"])
def test_addresses_with_hosts(scheme: str) -> None:
    with pytest.raises(holdfast.InvalidRequest, match="names a host") as refused:
        holdfast.open(f"{scheme}://host/store")
    assert f"{scheme}:////path" in str(refused.value.hint)


@pytest.mark.parametrize(
    "error",
    [
        holdfast.HeadMoved("s", "a", None),
        holdfast.InDoubt("who knows", key="k", idempotency_key="i"),
        NotSerializable("no", path="state.x", hint="try another"),
        holdfast.Unavailable("full", hint="make room"),
        holdfast.SessionNotFound("none"),
    ],
)
def test_errors_come_out_of_other_processes_as_they_were(error: holdfast.HoldfastError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_checkpoints_can_be_handed_to_other_processes(store):
    session = fresh(store)
    saved = session.save({"n": 1}, label="l", tags=["t"], meta={"a": [1]})
    for known in (saved, store.get(saved.id)):
        again = pickle.loads(pickle.dumps(known))
        assert again == known
        for name in ("id", "session", "label", "tags", "meta", "state_hash", "step", "created_at"):
            assert getattr(again, name) == getattr(known, name)


def test_patches_that_map_nothing(store):
    session = fresh(store)
    for wrong in ({"set": ["a", 1]}, {"append": 5}, {"set": "draft"}):
        with pytest.raises(holdfast.InvalidRequest, match="must map paths"):
            session.patch(**wrong)
    assert not session.exists()


@pytest.mark.parametrize("as_", [int, list, 5, "Point"])
def test_states_that_are_no_such_thing(store, as_):
    session = fresh(store)
    session.save({"x": 1})
    with pytest.raises(holdfast.InvalidRequest, match="does not fit"):
        session.load(as_=as_)
    assert session.load(as_=dict) == session.load(as_=dict[str, int]) == {"x": 1}


@pytest.mark.parametrize(
    "wrong",
    [{"cache_bytes": n} for n in (-1, None, "64", 1.5)] + [{"retention": 5}, {"url": 5}],
    ids=str,
)
def test_options_of_a_store(wrong, tmp_path):
    """Here, and not by an error of each save whose checkpoint is durable already."""
    path = tmp_path / "store.db"
    options: dict[str, Any] = {"url": path} | wrong
    with pytest.raises(holdfast.InvalidRequest) as refused:
        holdfast.open(**options)
    assert refused.value.hint
    assert not path.exists()


def test_a_store_over_a_backend_has_the_same_options():
    with holdfast.open("memory:") as store:
        rule: Any = 5
        options: list[dict[str, Any]] = [{"cache_bytes": -1}, {"retention": rule}]
        for wrong in options:
            with pytest.raises(holdfast.InvalidRequest):
                holdfast.Store(store._repository.backend, **wrong)
        with pytest.raises(holdfast.InvalidRequest):
            store.retention = rule


@pytest.mark.parametrize("wrong", [[5], [None], ["s", b"s"], 5, "s"], ids=repr)
def test_names_of_sessions_to_verify(store, wrong):
    store.session("s").save({"n": 1})
    with pytest.raises(holdfast.InvalidRequest, match="list of names"):
        store.verify(sessions=wrong)
    assert store.verify(sessions=iter(["s"])).sessions == 1
    assert store.verify(sessions=[]).sessions == 0


def _below(kind: type[errors.HoldfastError]) -> list[type[errors.HoldfastError]]:
    return [k for sub in kind.__subclasses__() for k in (sub, *_below(sub))]


def test_every_kind_of_error_says_what_to_do_next() -> None:
    """Where each one needs another hint, its own words say what is right."""
    kinds: list[type[errors.HoldfastError]] = [errors.HoldfastError]
    kinds += _below(errors.HoldfastError)
    without = {k.__name__ for k in kinds if not k.default_hint}
    assert without == {
        "HoldfastError", "NotFound", "Conflict", "InDoubt", "StepFailed", "InvalidRequest",
    }  # fmt: skip
    assert "resolve" in (errors.InDoubt("", key="k", idempotency_key="i").hint or "")


def test_a_store_that_was_opened_to_read_says_how_to_write(home: Home) -> None:
    home.session().save({})
    if home.durable:
        with pytest.raises(Unavailable, match="hint: open it without read_only"):
            home.to_read().session("s").save({})
