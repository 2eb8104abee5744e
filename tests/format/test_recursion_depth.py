"""Callers deep in the stack: they get a RecursionError, and nothing is taken for damage."""

import datetime as dt
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ormsgpack import Ext

import holdfast
from holdfast.errors import Corrupt
from holdfast.format import portable, values
from holdfast.storage.changes import JournalAppend
from holdfast.storage.files import item_files as files_data
from holdfast.storage.files import row_json
from holdfast.storage.reader import open_reader
from tests.support.stores import Home, store_of

TEXT = "long enough for a list of them to lie in a stream " * 3
DEEP = {"a": [{"b": ({"c": dt.date(2024, 1, 1)},)}]}
STATE = {
    "tagged": (((((((({1: 1.5},),),),),),),),),
    "plain": [[[[[[[[{"a": {"b": {"c": {"d": 1.5}}}}]]]]]]]],
    "log": [{"n": n, "text": TEXT, "deep": DEEP} for n in range(20)],
    "blob": {"text": [TEXT * 40], "deep": (((((1.5,),),),),)},
}


def down(levels: int, act: Callable[[], Any]) -> Any:
    return act() if levels == 0 else down(levels - 1, act)


def depths() -> range:
    """From where everything works to where nothing does."""

    def deepest(n: int = 0) -> int:
        try:
            return deepest(n + 1)
        except RecursionError:
            return n

    return range(deepest() - 150, deepest(), 11)


def tried(levels: int, act: Callable[[], Any]) -> Any:
    """What it returns; None where the stack is too deep for it. Nothing else may be raised."""
    try:
        return down(levels, act)
    except RecursionError:
        return None


def test_what_was_acknowledged_loads(home: Home) -> None:
    acknowledged = []
    for levels in depths():
        session = home.session(f"s{levels}")
        if tried(levels, partial(session.save, STATE, meta={"deep": DEEP})):
            acknowledged.append(session.name)
    assert 0 < len(acknowledged) < len(depths())
    store = home.reopened()
    for name in acknowledged:
        assert store.session(name).load() == STATE
        assert store.session(name).get("@").meta == {"deep": DEEP}
    assert store.verify(read_data=True).ok


def _seen(look: Callable[[Any], Any], store: holdfast.Store) -> Any:
    return look(store.session("s"))


LOOKS: dict[str, Callable[[Any], Any]] = {
    "load": lambda s: s.load(),
    "get": lambda s: s.get("@").meta["deep"],
    "verify": lambda s: s.verify().ok,
    "sessions": lambda s: [info.name for info in store_of(s).sessions() if not info.damaged],
    "exists": lambda s: s.exists(),
}


def test_a_look_finds_what_is_there_or_nothing(home: Home) -> None:
    home.session("s").save(STATE, meta={"deep": DEEP})
    expected = {name: look(home.session("s")) for name, look in LOOKS.items()}
    failed = set()
    for levels in depths():
        for name, look in LOOKS.items():
            store = home.another() if home.kind == "files" else home.store
            found = tried(levels, partial(_seen, look, store))
            assert found in (None, expected[name]), (levels, name)
            failed |= {name} if found is None else set()
            # Nor was anything wrong remembered.
            assert store.session("s").load() == STATE
            assert store.session("s").exists()
    assert failed >= {"load", "get", "verify"}


def test_a_journal_loses_no_line(tmp_path: Path) -> None:
    """Who writes next cuts off what is torn, and a line is not torn because the stack is deep."""
    with holdfast.open(f"files:{tmp_path}/store", durability="normal") as store:
        backend: Any = store._repository.backend
        store.session("s").save({})
        with open_reader(backend) as reader:
            row = reader.session(b"s")
        assert row is not None
        number = row.number
        nested: Any = 1.5
        for _ in range(40):
            nested = [nested]
        rows: list[bytes] = []
        deep, plain = (b"a digest" + b"\0" + values.encode(value) for value in (nested, 1))
        for levels in depths():
            backend.commit(JournalAppend(number, None, len(rows) + 1, [deep]).batch())
            rows.append(deep)
            backend._home.journals.clear()  # as another process would find it after a power loss
            (tmp_path / "store" / "sessions" / "s" / "journal").unlink()
            jot = JournalAppend(number, None, len(rows) + 1, [plain])
            tried(levels, partial(backend.commit, jot.batch()))
            with open_reader(backend) as reader:
                found = [row for _, row in reader.journal(number, 1, 100)]
            assert found[: len(rows)] == rows
            rows = found


def test_depth_of_data_is_damage(tmp_path: Path) -> None:
    """However deep: it is bounded by the room that sound data takes."""
    for text in (b"[" * 100_000, b'{"a":' * 5000 + b"1" + b"}" * 5000):
        with pytest.raises(ValueError, match="nested"):
            portable.loads(text)
        assert files_data.hide(text) is None
        assert row_json.hide_checkpoint(text) == b"a file that is damaged"
    shown: Any = 1
    data = b"\xc0"
    for _ in range(2000):
        shown = {"$tuple": [shown]}
        data = values.encode(Ext(values.TUPLE, b"\x91" + data))
    with pytest.raises(Corrupt):
        portable.from_json(shown)
    assert portable.to_json(data).keys() == {"$raw"}
    with pytest.raises(Corrupt):
        values.decode(data)


def test_what_was_shown_raw_by_mistake_is_sound(tmp_path: Path) -> None:
    """Versions before this one gave up rendering deep in the stack, and stored it so."""
    with holdfast.open(f"files:{tmp_path}/store") as store:
        store.session("s").save(STATE, meta={"deep": DEEP})
        store.session("t").save({"t": 1})
    root = tmp_path / "store"
    [record] = (root / "sessions" / "s" / "checkpoints").iterdir()
    blobs = list((root / "blobs").glob("??/*.json"))
    assert blobs
    shown = portable.loads(record.read_bytes())
    for field in ("fields", "state"):
        raw = portable.from_json(shown[field])
        shown[field] = {"$raw": portable._text(raw)}
    row = row_json.hide_checkpoint(record.read_bytes())
    for text in (
        row_json.lay_out(shown),
        row_json.lay_out({"id": shown["id"], "seq": 1, "row": row_json.show_row(row)}),
    ):
        record.write_bytes(text)
        for blob in blobs:
            held = portable.loads(blob.read_bytes())
            held["value"] = {"$raw": portable._text(portable.from_json(held["value"]))}
            blob.write_bytes(portable.dumps(held) + b"\n")
        with holdfast.open(f"files:{root}") as store:
            assert store.session("s").load() == STATE
            assert store.verify(read_data=True).ok
        for place in range(0, len(text), 97):
            record.write_bytes(text[:place] + bytes((text[place] ^ 1,)) + text[place + 1 :])
            with holdfast.open(f"files:{root}") as store:
                assert not store.verify().ok or store.session("s").load() == STATE
