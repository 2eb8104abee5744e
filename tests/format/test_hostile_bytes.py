"""Bytes made to harm: refused with an error of ours, within bounds, and nothing is executed."""

import datetime as dt
import os
import sys
import uuid
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import ormsgpack
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_digest, xxh3_64_intdigest

import holdfast
from holdfast.errors import Corrupt, HoldfastError, Unavailable, UnsupportedFormat
from holdfast.format import msgpack, nodes, records, rows, values
from holdfast.format.item_streams import STREAM_BITS
from holdfast.web import export
from tests.support import memory_rows
from tests.support.equality import PAD, python
from tests.support.stores import store_of


def ext(tag: int, payload: bytes) -> bytes:
    return b"\xc9" + len(payload).to_bytes(4, "big") + bytes((tag,)) + payload


def row(kind: int, address: int, payload: bytes, flags: int = 0) -> bytes:
    """A row as its writer would seal it, whatever it holds."""
    body = bytes((flags,)) + payload
    return xxh3_64_digest(body, (kind + address) & (1 << 64) - 1) + body


def bomb(size: int) -> bytes:
    """A zstd frame of `size` zeros: one block of four bytes for each 128 KB."""
    block = 1 << 17
    count = size // block
    header = b"\x28\xb5\x2f\xfd\xc0\x88" + size.to_bytes(8, "little")
    blocks = [(int(n == count - 1) | 1 << 1 | block << 3) for n in range(count)]
    return header + b"".join(b.to_bytes(3, "little") + b"\0" for b in blocks)


def test_the_bomb_is_a_valid_frame():
    assert zstandard.ZstdDecompressor().decompress(bomb(1 << 20)) == bytes(1 << 20)
    assert len(bomb(1 << 30)) < 33_000


UNDER_WATCH = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (768 << 20, 768 << 20))
from holdfast.format import nodes, records, rows, values
from holdfast.errors import HoldfastError
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
before = peak()
for line in sys.stdin:
    try:
        eval(line)
        said = "accepted"
    except HoldfastError as e:
        said = "refused"
    except BaseException as e:
        said = type(e).__name__
    print(said, peak() - before)
"""


def watched(calls: Sequence[str]) -> list[tuple[str, int]]:
    """What each call ends with, and by how many MB memory has grown, in a bounded process."""
    lines = python(UNDER_WATCH, "\n".join(calls)).splitlines()
    return [(said, int(grown)) for said, grown in (line.split() for line in lines)]


def test_bombs_are_refused_before_they_go_off():
    id = bytes(15)
    at = records.checkpoint_address(1, 1, id)
    frames = [bomb(1 << 30), bomb((1 << 30) + (1 << 17)), bomb(1 << 29)]
    frames.append(frames[2][:6] + (1 << 60).to_bytes(8, "little") + frames[2][14:])  # a big lie
    frames.append(frames[2][:6] + (1 << 20).to_bytes(8, "little") + frames[2][14:])  # a small one
    calls = []
    for frame in frames:
        blob = row(rows.BLOB, 5, frame, rows.ZSTD)
        items = row(rows.ITEMS, 5, frame, rows.ZSTD | rows.MANY)
        record = row(rows.CHECKPOINT, at, frame, rows.ZSTD)
        calls.append(f"rows.unseal(rows.BLOB, 5, {blob!r}, 'row')")
        calls.append(f"rows.unseal_items(5, {items!r}, 'row')")
        calls.append(f"records.unseal_checkpoint(1, 1, {id!r}, {record!r})")
    for call, (said, grown) in zip(calls, watched(calls), strict=True):
        assert said == "refused", call[:40]
        assert grown < 64, call[:40]


def test_headers_that_promise_billions_are_refused():
    calls = []
    for header in (b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"):
        for data in (header + b"\xff" * 4, header + b"\xff" * 4 + b"\x01" * 99):
            nested = header + b"\xff" * 4 + data if header == b"\xdd" else b"\x91" * 50 + data
            for hostile in (data, nested, ext(values.TUPLE, data), ext(values.DICT, nested)):
                calls += [f"values.decode({hostile!r})", f"nodes.parse({hostile!r})"]
    for call, (said, grown) in zip(calls, watched(calls), strict=True):
        assert said == "refused", call
        assert grown < 64, call


UNKNOWN = [n for n in range(256) if n not in range(1, 13) and n not in (32, 33)]


def test_unknown_tags_are_refused_by_name():
    for tag in UNKNOWN:
        with pytest.raises(Corrupt):
            values.decode(ext(tag, b"\x90"))
        with pytest.raises(Corrupt):
            nodes.parse(b"\x91" + ext(tag, b"\x90"))
    with pytest.raises(Corrupt, match="unknown tag 77"):
        values.decode(ext(77, b"\x90"))


@pytest.mark.parametrize("tag", [values.TUPLE, values.SET, values.FROZENSET, values.DICT])
def test_references_inside_a_tag_are_not_followed(tag):
    rope = nodes.Rope(nodes.LIST, 1, 9, bytes(32), ((1, 0, 1),), ()).stored
    for payload in (rope, b"\x91" + rope, b"\x92\x01" + rope):
        with pytest.raises(Corrupt):
            nodes.parse(ext(tag, payload))


def test_an_error_while_reading_keeps_its_name():
    """What a reference runs into is not for the decoder to swallow or rename."""
    for error in (
        Corrupt("item 7 is damaged"),
        Unavailable("the disk is gone"),
        KeyboardInterrupt(),
    ):

        def hook(tag, data, error=error):
            raise error

        with pytest.raises(type(error)) as caught:
            values.decode(ext(32, b""), hook)
        assert str(caught.value) == str(error)


def test_every_truncation_of_a_row_is_refused():
    packed = [rows.seal(rows.BLOB, 5, b"x" * 900), rows.seal(rows.BLOB, 5, bytes(range(99)))]
    many = rows.seal_items(5, [b"\x01", b"\xa1a"], refs=False, level=rows.PLAIN)
    for whole in packed:
        rows.unseal(rows.BLOB, 5, whole, "row")
        for cut in range(len(whole)):
            with pytest.raises(Corrupt):
                rows.unseal(rows.BLOB, 5, whole[:cut], "row")
    for cut in range(1, len(many) - 9):  # cut before it was sealed: the digest is right
        with pytest.raises(Corrupt):
            rows.unseal_items(5, row(rows.ITEMS, 5, many[9:-cut], rows.MANY), "row")


@pytest.mark.parametrize(("kind", "address"), [(rows.BLOB, 6), (rows.ITEMS, 5), (rows.HEAD, 5)])
def test_a_row_at_another_address_is_refused(kind, address):
    sealed = rows.seal(rows.BLOB, 5, b"payload")
    with pytest.raises(Corrupt):
        rows.unseal(kind, address, sealed, "row")


META, LINE, SIZE, ROOT = 1, 2, 3, 5  # where these are in a record


def saved_record(session: holdfast.Session) -> tuple[int, bytes, list[Any]]:
    """Number, id and fields of a memory session's newest record."""
    backend: Any = session._repository.backend
    number = session._writer.number
    assert number is not None
    seq = len(session)
    _, id, body = memory_rows.rows(backend, "checkpoints")[records.position(number, seq),]
    at = records.checkpoint_address(number, seq, id)
    return number, id, ormsgpack.unpackb(rows.unseal(rows.CHECKPOINT, at, body, "record")[1])


def plant(
    root: bytes, streams: dict[int, list[bytes]], size: int = 1000, unflagged: Sequence[int] = ()
) -> Any:
    """A session whose second checkpoint has the given root, and items that it may refer to."""
    store = holdfast.open("memory:", cache_bytes=0)
    session = store.session("s")
    session.save({"x": 1})
    session.save({"x": [1]})
    backend: Any = store._repository.backend
    number, id, fields = saved_record(session)
    fields[SIZE], fields[ROOT] = size, root
    body = row(rows.CHECKPOINT, records.checkpoint_address(number, 2, id), ormsgpack.packb(fields))
    memory_rows.damage(backend, "checkpoints", body, records.position(number, 2))
    for stream, items in streams.items():
        refs = stream not in unflagged
        sealed = rows.seal_items(stream << STREAM_BITS, items, refs, level=rows.PLAIN)
        memory_rows.put(backend, "items", (stream << STREAM_BITS,), (stream << STREAM_BITS, sealed))
    return store.session("s")


@pytest.mark.parametrize("time", [1 << 62, -(1 << 62), 253_402_300_800_000_000])
def test_a_time_that_no_calendar_has_is_damage(time):
    session = holdfast.open("memory:").session("s")
    session.save({"x": 1})
    number, id, fields = saved_record(session)
    meta = values.decode(fields[META])
    fields[META] = values.encode([meta[0], time, *meta[2:]])
    body = row(rows.CHECKPOINT, records.checkpoint_address(number, 1, id), ormsgpack.packb(fields))
    with pytest.raises(Corrupt):
        records.unseal_checkpoint(number, 1, id, body)
    operation = records.seal_operation(number, 1, "rewind", time, 1, {})
    with pytest.raises(Corrupt):
        records.unseal_operation(number, 1, operation)


def rope(extents: list[tuple[int, int, int]], kind: int = nodes.LIST, size: int = 100) -> bytes:
    count = sum(n for _, _, n in extents)
    return nodes.Rope(kind, count, size, bytes(32), tuple(extents), ()).stored


def laughs(levels: int, size: int = 100) -> tuple[bytes, dict[int, list[bytes]]]:
    """Ten times ten times ten … the same item."""
    streams = {100: [b"\xa4lol!"]}
    for n in range(101, 100 + levels):
        streams[n] = [rope([(n - 1, 0, 1)] * 10, size=size)]
    return b"\x81\xa1x" + rope([(99 + levels, 0, 1)] * 10, size=size), streams


KNOT = rope([(100, 0, 1)])
DICT_KNOT = rope([(100, 0, 1)], nodes.DICT)
PLANTED: dict[str, tuple[bytes, dict[int, list[bytes]]]] = {
    "a list in itself": (b"\x81\xa1x" + KNOT, {100: [KNOT]}),
    "a dict in itself": (b"\x81\xa1x" + DICT_KNOT, {100: [b"\xa1a" + DICT_KNOT]}),
    "the root in itself": (DICT_KNOT, {100: [b"\xa1x" + DICT_KNOT]}),
    "two in each other": (b"\x81\xa1x" + KNOT, {100: [rope([(101, 0, 1)])], 101: [KNOT]}),
    "no such stream": (b"\x81\xa1x" + rope([(99, 0, 2)]), {}),
    "more than there is": (b"\x81\xa1x" + rope([(100, 0, 1 << 40)]), {100: [b"\x01"]}),
    "no such blob": (b"\x81\xa1x" + nodes.Blob(bytes(32), 50).stored, {}),
    "a billion laughs": laughs(9),
    "a text of numbers": (b"\x81\xa1x" + rope([(100, 0, 1)], nodes.RAW), {100: [b"\x01"]}),
}
USES: dict[str, Callable[[Any], Any]] = {
    "save": lambda s: s.save({"x": [1, PAD]}),
    "append": lambda s: s.append("x", 1),
    "patch": lambda s: s.patch(set={("x", "a"): 1}),
    "diff": lambda s: s.diff("@~1"),
    "blame": lambda s: s.blame("x.0.0.0.a"),
    "fork": lambda s: s.fork("other"),
    "verify": lambda s: s.verify(),
}


@pytest.mark.parametrize("case", PLANTED)
def test_hostile_references_are_refused(case):
    root, streams = PLANTED[case]
    session = plant(root, streams)
    with pytest.raises(Corrupt):
        session.load()
    assert not session.verify().ok
    assert session.load("@~1") == {"x": 1}
    for use in USES.values():
        only_ours(use, plant(root, streams))


MULTIPLYING = [case for case in PLANTED if "itself" in case or "two" in case or "laughs" in case]


@pytest.mark.parametrize("case", MULTIPLYING)
def test_references_are_followed_once(case):
    """In a circle or ten times ten times ten: each row is read once, and nothing hangs."""
    for use in (
        lambda s: [*store_of(s).search("needle")],
        lambda s: store_of(s).gc(),
        lambda s: store_of(s).copy(holdfast.open("memory:")),
    ):
        only_ours(use, plant(*PLANTED[case]))


@pytest.mark.parametrize("size", [600, 1 << 50], ids=["the record", "a huge record"])
def test_a_declared_size_does_not_open_the_door(size):
    """A list that says it has 100 bytes must not expand to 600 000, whatever the record says."""
    root, streams = laughs(5)
    with pytest.raises(Corrupt):
        plant(root, streams, size).load()


def test_without_a_budget_they_would_laugh(monkeypatch):
    """A mutant: the tests above notice it."""
    monkeypatch.setattr("holdfast.format.load._Loader._spend", lambda self, count: None)
    root, streams = laughs(4)
    assert len(plant(root, streams).load()["x"]) == 10


SECRET = rope([(200, 0, 1)], size=8)
ENTRY = b"\xa1a" + SECRET
LISTED, ENTERED = 1 + len(SECRET), 1 + len(ENTRY)
HIDDEN: dict[str, tuple[bytes, dict[int, list[bytes]], list[int]]] = {
    "fragments": (
        rope([(100, 0, 1)], nodes.RAW, LISTED), {100: [b"\x91" + SECRET]}, [100],
    ),
    "fragments that are flagged": (
        rope([(100, 0, 1)], nodes.RAW, LISTED), {100: [b"\x91" + SECRET]}, [],
    ),
    "a list": (rope([(100, 0, 1)], nodes.LIST, LISTED), {100: [SECRET]}, [100]),
    "a dict": (rope([(100, 0, 1)], nodes.DICT, ENTERED), {100: [ENTRY]}, [100]),
    "a dict of the size that it would have": (
        rope([(100, 0, 1)], nodes.DICT, 1 + 2 + 8), {100: [ENTRY]}, [100],
    ),
    "one row of a list": (
        rope([(101, 0, 1), (100, 0, 1)], size=500), {100: [SECRET], 101: [b"\x01"]}, [100],
    ),
    "one row of a dict": (
        rope([(101, 0, 1), (100, 0, 1)], nodes.DICT, 500),
        {100: [ENTRY], 101: [b"\xa1b\x01"]},
        [100],
    ),
}  # fmt: skip
READS: dict[str, Callable[[Any], Any]] = {
    "load": lambda s: s.load(),
    "one of a series": lambda s: s.series().load(s.head),
    "diff": lambda s: [*s.diff("@~1")],
    "save": lambda s: (s.save({"x": [1, PAD]}), s.load()),
    "a part": lambda s: s.load(path=("x", 0)),
    "a part by name": lambda s: s.load(path=("x", "a")),
    "the last of a list": lambda s: s.items("x", limit=1),
    "a page": lambda s: s.part("x", limit=9),
    "a search": lambda s: len([*store_of(s).search("secret")]) * "secret",
    "summaries": lambda s: [c.summary for c in s.tree(summary=True)],
    "a transcript": lambda s: s.transcript(),
    "an exported page": lambda s: export.page(store_of(s), ["s"]),
}


@pytest.mark.parametrize("case", HIDDEN)
def test_references_where_none_should_be_are_not_followed(case):
    """A copy to another store does not look for them there: they may lead to anybody's data."""
    root, streams, unflagged = HIDDEN[case]
    streams = streams | {200: [b"\xa6secret"]}
    session = plant(b"\x81\xa1x" + root, streams, unflagged=unflagged)
    with pytest.raises(Corrupt):
        session.load()
    for read in READS.values():
        session = plant(b"\x81\xa1x" + root, streams, unflagged=unflagged)
        assert "secret" not in repr(only_ours(read, session))


def test_references_where_they_should_be_are_followed():
    """The same, with flags: what the test above finds is not for another reason."""
    for case in ("a list", "one row of a list", "one row of a dict"):
        root, streams, _ = HIDDEN[case]
        session = plant(b"\x81\xa1x" + root, streams | {200: [b"\xa6secret"]})
        assert "secret" in repr(session.load())
        mixed = plant(b"\x81\xa1x" + root, streams | {200: [b"\xa6secret"]}, unflagged=[101])
        assert mixed.load() == session.load()
        assert mixed.series().load(mixed.head) == session.load()


@pytest.mark.parametrize("case", ["fragments that are flagged", "a list", "a dict"])
def test_what_could_be_followed_later_is_not_copied(case):
    """Where a list goes on, rows become one with a flag for all: by an append, or by gc."""
    root, streams, unflagged = HIDDEN[case]
    _, _, fields = saved_record(plant(b"\x80", {}))
    given = nodes.parse_rope(ormsgpack.unpackb(root, ext_hook=lambda _, data: data))
    tail = nodes.Tail(fields[LINE], 100, 1, 0, 0, 50)
    going_on = nodes.Rope(given.kind, 1, given.size, bytes(32), given.extents, (tail,)).stored
    for stored in (going_on, root)[: 1 if unflagged else 2]:
        session = plant(b"\x81\xa1x" + stored, streams, unflagged=unflagged)
        store_of(session).session("z").save({"n": 1})
        with holdfast.open("memory:") as other:
            assert [name for name, _ in store_of(session).copy(other).skipped] == ["s"]
            assert [info.name for info in other.sessions()] == ["z"]


def only_ours(call: Callable[..., Any], *args: Any) -> Any:
    """The result, or None if a HoldfastError came out: nothing else may."""
    try:
        return call(*args)
    except HoldfastError:
        return None


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=33)
    | st.just(bytes(32)),
    lambda inner: (
        st.lists(inner, max_size=8) | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=10,
)
PACKED = PLAIN.map(ormsgpack.packb)
TAGGED = st.builds(ext, st.integers(0, 40), PACKED | st.binary(max_size=20))
SAMPLES = [
    values.encode(v)
    for v in (
        [(1, {2}), {3: dt.date(2024, 1, 1)}],
        {"a": [Decimal(1), uuid.UUID(int=1), "\ud800", 2**80]},
    )
] + [PLANTED["a list in itself"][0], b"\x81\xa1x" + nodes.Blob(bytes(32), 50).stored]


@st.composite
def damaged(draw):
    data = bytearray(draw(st.sampled_from(SAMPLES)))
    for _ in range(draw(st.integers(1, 3))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data[: draw(st.integers(1, len(data)))])


HOSTILE = st.one_of(
    st.binary(max_size=60),
    PACKED,
    TAGGED,
    damaged(),
    st.lists(TAGGED, max_size=3).map(lambda t: msgpack.array_header(len(t)) + b"".join(t)),
    st.builds(lambda n, data: b"\x91" * n + data, st.integers(200, 1100), PACKED),
    st.builds(lambda n, data: b"\x81\xa1a" * n + data, st.integers(200, 1100), PACKED),
)


@settings(max_examples=300)
@given(HOSTILE)
@example(b"\x91" * 900 + b"\xc0")
def test_any_bytes_decode_or_are_corrupt(data):
    only_ours(values.decode, data)
    for root in (True, False):
        node = only_ours(lambda root=root: nodes.parse(data, root=root))
        if node is not None:
            assert len(node.hash) == 32
            assert type(node.size) is int
            assert nodes.parse(node.stored, root=root).stored == node.stored


def test_deeply_nested_tags_are_refused():
    for tag, head in ((values.TUPLE, b"\x91"), (values.DICT, b"\x92\x01"), (values.SET, b"\x91")):
        data = b"\xc0"
        for _ in range(2000):
            data = ext(tag, head + data)
        with pytest.raises(Corrupt):
            values.decode(data)
        with pytest.raises(Corrupt):
            nodes.parse(data)


@st.composite
def references(draw):
    """Ropes and blobs whose fields are nearly right."""
    small = st.integers(-1, 3) | st.sampled_from([1 << 30, 1 << 32, 1 << 40, (1 << 64) - 1])
    spans = draw(st.lists(small, min_size=3, max_size=3) | PLAIN)
    fields = [
        draw(st.integers(0, 3) | PLAIN),
        spans[2] if type(spans) is list and len(spans) == 3 else draw(small),
        draw(small | PLAIN),
        draw(st.just(bytes(32)) | PLAIN),
        draw(st.just(b"") | PLAIN),
        draw(small | PLAIN),
        draw(st.just([]) | st.lists(small, min_size=6, max_size=6) | PLAIN),
        spans,
    ]
    if draw(st.booleans()):
        return ext(nodes.ROPE_TAG, ormsgpack.packb(fields))
    return ext(nodes.BLOB_TAG, ormsgpack.packb([fields[3], fields[2]]))


@settings(max_examples=300)
@given(references())
@example(rope([(1, 0, 1 << 40)]))
@example(ext(nodes.ROPE_TAG, ormsgpack.packb([0, 1.0, 1, bytes(32), b"", 0, [], [1.0, 0, 1.0]])))
@example(ext(nodes.ROPE_TAG, ormsgpack.packb([2, 1, 1, bytes(32), None, 0, [], [1, 0, 1]])))
def test_any_reference_is_sound_or_corrupt(data):
    node = only_ours(nodes.parse, data)
    if node is None:
        return
    assert type(node.hash) is bytes
    assert type(node.size) is int
    if isinstance(node, nodes.Rope):
        assert type(node.header()) is bytes
        assert all(type(n) is int for extent in node.extents for n in extent)
        assert all(type(n) is int for tail in node.tails for n in tail)
        assert type(node.count) is type(node.debt) is int


@settings(max_examples=200)
@given(HOSTILE, st.integers(0, 255))
def test_any_row_is_sound_or_refused(payload, flags):
    only_ours(rows.unseal, rows.BLOB, 5, payload, "row")
    only_ours(rows.unseal, rows.BLOB, 5, row(rows.BLOB, 5, payload, flags), "row")
    found = only_ours(rows.unseal_items, 5, row(rows.ITEMS, 5, payload, flags), "row")
    if found is not None:
        assert found.ends[-1] == len(found.data)


@settings(max_examples=200)
@given(PLAIN, st.binary(max_size=30))
@example([1.0, 2.0], b"abc")
@example([True, True], b"ab")
@example([2, -1, 2], b"abc")
def test_any_table_of_lengths_is_sound_or_corrupt(lengths, data):
    table = ormsgpack.packb(lengths)
    payload = len(table).to_bytes(4, "big") + table + data
    found = only_ours(rows.unseal_items, 5, row(rows.ITEMS, 5, payload, rows.MANY), "row")
    if found is not None:
        assert found.ends == sorted(found.ends)
        assert all(type(end) is int for end in found.ends)


def test_an_encrypted_row_is_refused_and_nothing_else():
    with pytest.raises(UnsupportedFormat):
        rows.unseal(rows.BLOB, 5, row(rows.BLOB, 5, b"x", rows.ENCRYPTED), "row")
    session = plant(b"\x81\xa1x\x01", {})
    store = store_of(session)
    store.session("neighbour").save({"fine": 1})
    backend: Any = store._repository.backend
    pos = records.position(session._writer.number or 0, 2)
    _, id, _ = memory_rows.rows(backend, "checkpoints")[pos,]
    at = records.checkpoint_address(session._writer.number or 0, 2, id)
    secret = row(rows.CHECKPOINT, at, b"secret", rows.ENCRYPTED)
    memory_rows.damage(backend, "checkpoints", secret, pos)
    assert [info.name for info in store.sessions()] == ["neighbour", "s"]
    assert store.session("neighbour").load() == {"fine": 1}
    assert [c.seq for c in session.tree()] == [1, 2]
    assert [c.seq for c in session.history()] == [2, 1]
    with pytest.raises(UnsupportedFormat):
        session.load()
    assert store.verify().loadable == 2


def a_record() -> list[Any]:
    session = holdfast.open("memory:").session("s")
    session.save({"x": 1})
    session.save({"x": 2}, meta={"m": 1})
    return saved_record(session)[2]


RECORD = a_record()
METADATA = values.decode(RECORD[META])
EXTRA = st.dictionaries(st.sampled_from([*"tsraupohmkx"]), PLAIN, max_size=3)


def changes(fields: list[Any]) -> Any:
    return st.dictionaries(st.integers(0, len(fields) - 1), PLAIN | HOSTILE | EXTRA, max_size=2)


@settings(max_examples=400)
@given(changes(RECORD), changes(METADATA), st.integers(1, 9))
@example({}, {5: [1]}, 9)
@example({}, {0: "x"}, 9)
@example({}, {3: "x"}, 9)
@example({}, {4: "x"}, 9)
@example({}, {5: {"u": 1}}, 9)
@example({}, {5: {"p": [1]}}, 9)
@example({}, {}, 4)
@example({SIZE: "x"}, {}, 9)
@example({ROOT: None}, {}, 9)
def test_any_record_is_sound_or_corrupt(of_record, of_metadata, length):
    fields, metadata = list(RECORD), list(METADATA)
    for at, value in of_metadata.items():
        metadata[at] = value
    fields[META] = ormsgpack.packb(metadata[:length])
    for at, value in of_record.items():
        fields[at] = value
    id = bytes(15)
    body = row(rows.CHECKPOINT, records.checkpoint_address(1, 1, id), ormsgpack.packb(fields))
    found = only_ours(records.unseal_checkpoint, 1, 1, id, body)
    if found is None:
        return
    only_ours(found.node)
    record = found.record
    assert type(record.step) is type(record.created_us) is type(record.size) is int
    assert type(record.parent) in (bytes, type(None))
    assert type(record.parent_seq) in (int, type(None))
    checkpoint = holdfast.Checkpoint("s", record, None, ())
    for name in ("id", "created_at", "parent", "usage", "pending", "meta", "status", "hash"):
        only_ours(getattr, checkpoint, name)


@settings(max_examples=200)
@given(HOSTILE | PACKED)
@example(ormsgpack.packb(["a"] * len(records.Head._fields)))
@example(ormsgpack.packb("a" * len(records.Head._fields)))
@example(ormsgpack.packb(dict.fromkeys("abcdefg"[: len(records.Head._fields)])))
@example(ormsgpack.packb("ab"))
@example(ormsgpack.packb("a"))
def test_any_small_row_is_sound_or_corrupt(payload):
    head = only_ours(records.unseal_head, 1, row(rows.HEAD, 1, payload))
    assert head is None or all(type(n) is int for n in head[:3])
    address = 1 ^ xxh3_64_intdigest(b"name")
    session = only_ours(records.unseal_session, 1, b"name", row(rows.SESSION, address, payload))
    assert session is None or (type(session[0]) is int and type(session[1]) in (str, type(None)))
    at = records._mark_address(1, records.TAG, b"tag")
    order = only_ours(records.unseal_mark, 1, records.TAG, b"tag", row(rows.MARK, at, payload))
    assert order is None or type(order) is int
    at = records.position(1, 1)
    found = only_ours(records.unseal_operation, 1, 1, row(rows.OPERATION, at, payload))
    if found is not None:
        kind, created, last, details = found
        assert (type(kind), type(created), type(last), type(details)) == (str, int, int, dict)


IMPORTS_NOTHING = """
import sys
import ormsgpack
from holdfast.format import nodes, values
ext = lambda tag, data: b"\\xc9" + len(data).to_bytes(4, "big") + bytes((tag,)) + data
pack = ormsgpack.packb
moment = lambda zone: ext(values.DATETIME, pack(["2024-01-01T00:00:00", 0, 0, zone, None]))
for zone in ("UTC", "No/Where"):
    values.decode(moment(zone))  # what the standard library itself needs, once
FORBIDDEN = "os.system os.exec subprocess.Popen pickle.find_class ctypes.dlopen".split()
seen = []
def watch(event, args):
    if event in FORBIDDEN or (event in ("import", "exec", "compile") and "evil" in str(args)):
        seen.append((event, str(args)))
sys.addaudithook(watch)
payloads = [b"cos\\nsystem\\n(S'true'\\ntR.", b"evil", b"\\xa4evil", b"__import__('evil')"]
for name in ("evil", "evil/zone", "evil.zone", "../evil", "/evil", "evil:main", "builtins.eval"):
    payloads += [ormsgpack.packb(v) for v in (name, [name], {"__class__": name}, [name, name])]
    try:
        values.decode(moment(name))
    except Exception:
        pass
for tag in range(256):
    for payload in payloads:
        for decode in (values.decode, nodes.parse):
            try:
                decode(ext(tag, payload))
            except Exception:
                pass
print(seen, [name for name in sys.modules if "evil" in name])
"""


def test_nothing_is_imported_or_executed(tmp_path):
    """Not even from the package of time zones, which the standard library searches by name."""
    for package in ("evil", "tzdata/zoneinfo/evil", "tzdata/zoneinfo", "tzdata"):
        (tmp_path / package).mkdir(parents=True, exist_ok=True)
        (tmp_path / package / "__init__.py").touch()
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    assert python(IMPORTS_NOTHING, PYTHONPATH=path).strip() == "[] []"
