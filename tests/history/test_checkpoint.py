"""Checkpoint objects: immutable, and the same again after to_bytes() and from_bytes()."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest

import holdfast
from holdfast.errors import Corrupt
from holdfast.format import rows as format_rows
from holdfast.format import values
from holdfast.model import ToolCall, Usage
from tests.faults.bitrot import flip
from tests.support.stores import TEXT, Home


def test_a_checkpoint_cannot_be_changed_through_its_fields(home: Home) -> None:
    """Whatever is done to what it hands out."""
    call = ToolCall("1", "pay", {"to": ["a"]}, {"n": [1]})
    saved = home.session().save({}, meta={"a": [1], "b": {"c": {}}}, pending=[call])
    for checkpoint in (saved, home.session().head):
        assert checkpoint is not None
        checkpoint.meta["a"].append(2)
        checkpoint.meta["b"]["c"]["d"] = 1
        checkpoint.pending[0].arguments["to"].append("b")
        assert checkpoint.meta == {"a": [1], "b": {"c": {}}}
        assert checkpoint.pending == (call,)


def fields_of(checkpoint: holdfast.Checkpoint) -> dict[str, Any]:
    names = [n for n in dir(holdfast.Checkpoint) if not n.startswith("_")]
    return {n: getattr(checkpoint, n) for n in names if not callable(getattr(checkpoint, n))}


def test_a_checkpoint_as_bytes(home: Home) -> None:
    """Everything that it says, to the bit, and no other checkpoint whatever happens to them."""
    session = home.session("odd \ud800 name")
    session.save({"n": 1})
    session.save({"n": 2})
    full = session.save(
        {"n": 3}, label="l", tags=["a", "b"], trigger="t", status="failed", reason="r", key="k",
        usage=Usage(7, cost=0.5, model="m"), hint="h",
        pending=[ToolCall("1", "pay", {"to": b"\0", "n": 2**70})],
        meta={"when": dt.datetime(2026, 1, 2, tzinfo=dt.UTC), "set": {1, 2}},
    )  # fmt: skip
    session.delete("@~1")
    fork = session.fork("fork").head
    assert fork is not None
    for checkpoint in (full, fork, *session.history()):
        data = checkpoint.to_bytes()
        again = holdfast.Checkpoint.from_bytes(data)
        assert fields_of(again) == fields_of(checkpoint)
        assert again == checkpoint
    for n in range(len(data) * 8):
        with pytest.raises((Corrupt, holdfast.UnsupportedFormat)):
            holdfast.Checkpoint.from_bytes(flip(data, *divmod(n, 8)))
    for wrong in (b"", data[:-1], data + b"x", b"{}", "text", None):
        with pytest.raises((Corrupt, holdfast.UnsupportedFormat)):
            holdfast.Checkpoint.from_bytes(wrong)  # type: ignore[arg-type]
    made_up: list[Any] = [[], [1], [2, 3], {}, [1, *range(18)]]
    for fields in made_up:
        with pytest.raises((Corrupt, holdfast.UnsupportedFormat)):
            holdfast.Checkpoint.from_bytes(
                format_rows.seal(format_rows.LOOSE, 0, values.encode(fields))
            )


INVALID_FIELDS: list[tuple[int, Any]] = [
    # by the number of the field: what to_bytes() never writes there
    (2, b""), (2, bytes(14)), (4, 1 << 80), (4, -(1 << 62)), (6, bytes(16)), (17, (1,)),
    (18, ()), (18, (1,)), (18, (None, None)), (18, (1, b"short")), (18, (1, "text")),
    *[(8, {name: 3}) for name in ("usage", "pending", "run", "meta", "trigger", "key", "spent")],
    (8, {"pending": [3]}), (8, {"usage": [1]}), (8, {"run": ["r", "1", None]}),
    (8, {"spent": [1, None, [0, 0.0], []]}), (8, {"spent": [1, 1, [0, "0"], []]}),
    (8, {"spent": [1, 1, [0, 0.0], [[1, 2]]]}), (8, {"spent": [1, 1, [0, 0.0], [["1", 2, 0.0]]]}),
]  # fmt: skip


@pytest.mark.parametrize(("n", "value"), INVALID_FIELDS, ids=str)
def test_bytes_with_invalid_fields_are_refused(memory: Home, n: int, value: Any) -> None:
    """Refused at once, though their digest is right, and not when somebody asks for a field."""
    checkpoint = memory.session().save({"n": 1}, tags=["t"], meta={"k": 1})
    fields = values.decode(format_rows.unseal(format_rows.LOOSE, 0, checkpoint.to_bytes(), "it")[1])
    fields[n] = value
    with pytest.raises(Corrupt):
        holdfast.Checkpoint.from_bytes(
            format_rows.seal(format_rows.LOOSE, 0, values.encode(fields))
        )


@pytest.mark.parametrize("kind", [bytearray, memoryview])
def test_a_checkpoint_from_other_types_of_bytes(memory: Home, kind: Any) -> None:
    checkpoint = memory.session().save({"n": 1})
    again = holdfast.Checkpoint.from_bytes(kind(checkpoint.to_bytes()))
    assert fields_of(again) == fields_of(checkpoint)


def test_a_checkpoint_and_its_state_as_bytes(home: Home) -> None:
    session = home.session("odd \ud800 name")
    big = {"n": 2**70, "log": [TEXT] * 99, "b": b"\0", "set": {1, (2, 3)}}
    saved = [session.save(state, label="l", tags=["t"]) for state in (big, None, {"n": 1})]
    for checkpoint in saved:
        packed = session.pack(checkpoint)
        found, state = holdfast.unpack(packed)
        assert state == session.load(checkpoint)
        assert fields_of(found) == fields_of(session.get(checkpoint.id))
        assert fields_of(holdfast.Checkpoint.from_bytes(packed)) == fields_of(found)
    assert holdfast.unpack(bytearray(session.pack()))[1] == {"n": 1}
    for wrong in (b"", packed[:-1], flip(packed, 99, 1), saved[0].to_bytes()):
        with pytest.raises(Corrupt):
            holdfast.unpack(wrong)


def test_a_packed_state_is_refused_if_it_needs_too_much_memory(memory: Home) -> None:
    session = memory.session()
    session.save({"log": [{}] * 50_000})
    packed = session.pack()
    with holdfast.memory_limit(1 << 20), pytest.raises(holdfast.TooBig):
        holdfast.unpack(packed)


def test_a_damaged_checkpoint_as_bytes(home: Home) -> None:
    session = home.filled(3)
    home.spoil_checkpoint(2)
    for checkpoint in session.tree():
        assert fields_of(holdfast.Checkpoint.from_bytes(checkpoint.to_bytes())) == fields_of(
            checkpoint
        )
