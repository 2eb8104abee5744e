"""Keys and indexes of SQLite that lie: what a listing leaves out is neither freed nor given up."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import apsw
import pytest

import holdfast
from holdfast.errors import Corrupt
from holdfast.format import records, ropes
from holdfast.format import rows as format_rows
from holdfast.history import lineage
from holdfast.intervals import IntervalSet
from holdfast.maintenance import reachability
from holdfast.storage.repository import StoredData
from holdfast.storage.rows import Address
from holdfast.storage.sqlite import salvage
from tests.faults.bitrot import length
from tests.support.sessions import seqs
from tests.support.stores import Home

COUNT = 12


def filled(path: Path) -> dict[str, Any]:
    """A session whose states have nothing in common."""
    with holdfast.open(path) as store:
        session = store.session("s")
        some = random.Random(1)
        states = [{"n": n, "file": some.randbytes(1_500).hex(), "log": [f"{n}:" * 60] * 20}
                  for n in range(COUNT)]  # fmt: skip
        return {session.save(state).id: state for state in states}


def loaded(path: Path, known: dict[str, Any]) -> set[str]:
    out = set()
    with holdfast.open(path) as store:
        for id, state in known.items():
            try:
                assert store.session("s").load(id) == state
                out.add(id)
            except holdfast.HoldfastError:
                continue
    return out


def damages(path: Path, seq: int) -> Iterator[bytes]:
    """The store with a bit of the key of a checkpoint's row flipped, above those of its seq."""
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    number = connection.execute("SELECT num FROM sessions").get
    connection.close()
    n, key = number << 32 | seq, b""
    while n or not key:
        key = bytes([n & 127 | (128 if key else 0)]) + key
        n >>= 7
    data = path.read_bytes()
    at = data.find(key)
    while at >= 0:
        for bit in range(7):
            yield data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
        at = data.find(key, at + 1)


def spoiled(path: Path, known: dict[str, Any], *, ends: bool) -> set[str]:
    """Damage the key of a row in the middle, and nothing else; what still loads.

    A listing ends there, or ends with an error.
    """
    for data in damages(path, COUNT // 2):
        path.write_bytes(data)
        left = loaded(path, known)
        with holdfast.open(path) as store, store._repository.reader() as reader:
            try:
                ended = len(reader.checkpoints(1, 1, records.MAX_SEQ, COUNT)) < COUNT - 1
                refused = False
            except Corrupt:
                ended, refused = False, True
        if len(left) == COUNT - 1 and (ended if ends else refused):
            return left
    raise AssertionError("nothing was damaged")


def check_gc(path: Path, *, ends: bool = True) -> None:
    known = filled(path)
    left = spoiled(path, known, ends=ends)
    with holdfast.open(path) as store, pytest.raises(Corrupt, match="no data is freed"):
        store.gc()
    assert loaded(path, known) == left


@pytest.mark.parametrize("ends", [True, False])
def test_gc_frees_nothing_that_a_listing_leaves_out(tmp_path: Path, ends: bool) -> None:
    check_gc(tmp_path / "store.db", ends=ends)


def test_gc_must_look_whether_it_has_seen_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lineage, "_unlisted", lambda *_: iter(()))
    monkeypatch.setattr(IntervalSet, "missing", lambda *_: [])
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check_gc(tmp_path / "store.db")


def plain_and_rich(path: Path) -> dict[str, Any]:
    """Sessions without references in their items, then some with: a row each, over many pages."""
    some = random.Random(1)
    states: dict[str, Any] = {}
    with holdfast.open(path, durability="normal") as store:
        for n in range(32):
            items: list[Any] = [f"{n}-{m}-{some.randbytes(60).hex()}" for m in range(12)]
            if n >= 28:
                items = [{"pad": "q" * 300, "file": some.randbytes(5_000)} for _ in range(12)]
            states[f"s{n}"] = {"log": items}
            store.session(f"s{n}").save(states[f"s{n}"])
    return states


def sound(path: Path, states: dict[str, Any]) -> set[str]:
    out = set()
    with holdfast.open(path, durability="normal") as store:
        for name, state in states.items():
            with suppress(holdfast.HoldfastError):
                assert store.session(name).load() == state
                out.add(name)
    return out


def keys_of_items(path: Path, *, interior: bool) -> list[tuple[int, int]]:
    """Where the keys of the rows of items are in the file, or those that lead to them."""
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    kind = "internal" if interior else "leaf"
    sql = "SELECT pageno FROM dbstat WHERE name = 'items' AND pagetype = ? ORDER BY path"
    pages = [page for (page,) in connection.execute(sql, (kind,))]
    size = connection.pragma("page_size")
    connection.close()
    data = path.read_bytes()
    out = []
    for page in pages:
        start = (page - 1) * size
        for n in range(int.from_bytes(data[start + 3 : start + 5], "big")):
            cell = start + (12 if interior else 8) + 2 * n
            at = start + int.from_bytes(data[cell : cell + 2], "big") + (4 if interior else 0)
            at += 0 if interior else length(data, at)  # of the row, which comes first
            out.append((at, length(data, at)))
    return out


def check_listing(path: Path, monkeypatch: pytest.MonkeyPatch, *, interior: bool) -> None:
    """The last key of a page is damaged, or what leads to the next: the rest still loads."""
    monkeypatch.setattr(reachability, "PAGE", 7)
    states = plain_and_rich(path)
    data = path.read_bytes()
    keys = keys_of_items(path, interior=interior)
    assert len(keys) > (3 if interior else 30)
    hidden = 0
    for at, size in keys if interior else keys[6::7]:
        for i in range(at, at + size):
            path.write_bytes(data[:i] + bytes([data[i] ^ 64]) + data[i + 1 :])
            before = sound(path, states)
            hidden += len(before) < len(states)
            with holdfast.open(path, durability="normal") as store, suppress(Corrupt):
                store.gc()
            assert sound(path, states) == before, "gc has freed what is needed"
    assert hidden


@pytest.mark.parametrize("interior", [False, True], ids=["rows", "ways to rows"])
def test_gc_trusts_no_page_of_a_listing_of_items(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interior: bool
) -> None:
    check_listing(tmp_path / "store.db", monkeypatch, interior=interior)


def test_gc_must_not_list_items_in_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a way is damaged, it misses only what does not load either: so rows alone tell."""

    def in_pages(reader: Any) -> list[tuple[int, int, bytes]]:
        found: list[tuple[int, int, bytes]] = []
        while page := reader.item_rows(found[-1][0] if found else -1, 7):
            found += page
        return found

    monkeypatch.setattr(reachability, "_item_rows", in_pages)
    with pytest.raises(AssertionError, match="gc has freed what is needed"):
        check_listing(tmp_path / "store.db", monkeypatch, interior=False)


def leave_astray(path: Path) -> dict[str, Any]:
    """A row with a damaged key, in order, while a pack has its items: it was made meanwhile."""
    log = [f"{n} {random.Random(n).randbytes(60).hex()}" for n in range(40)]
    with holdfast.open(path, durability="normal") as store:
        session = store.session("astray")
        session.save({"log": log})
        session.save({"log": log[20:]})
    connection = apsw.Connection(str(path))
    pos: Any = connection.execute("SELECT max(pos) FROM items").get
    row = format_rows.seal_items(pos + 5, [b"\xa1x"], False, format_rows.PLAIN)
    connection.execute("INSERT INTO items VALUES (?, ?)", (pos + 5 ^ 1 << 40, row))
    connection.close()
    return {"astray": {"log": log[20:]}}


@pytest.mark.parametrize("astray", [False, True])
def test_repair_puts_rows_of_items_in_order(tmp_path: Path, astray: bool) -> None:
    """Out of order they cannot be listed, and gc refused for ever. Each tells where it belongs."""
    path = tmp_path / "store.db"
    states = plain_and_rich(path)
    states |= leave_astray(path) if astray else {}
    data = path.read_bytes()
    at, size = keys_of_items(path, interior=False)[15]
    tried = 0
    for i, bit in itertools.product(range(at, at + size), range(7)):
        path.write_bytes(data[:i] + bytes([data[i] ^ 1 << bit]) + data[i + 1 :])
        with holdfast.open(path, durability="normal") as store:
            try:
                store.gc()
            except Corrupt:
                tried += 1
                store.repair()
                store.gc()
                assert store.verify(read_data=True).ok
                assert sound(path, states) == states.keys()
    assert tried


def test_gc_frees_a_row_of_items_without_a_body(tmp_path: Path) -> None:
    """Nobody needs it; it was taken for one with a beginning, and stopped gc."""
    path = tmp_path / "store.db"
    with holdfast.open(path) as store:
        session = store.session("s")
        session.save({"log": [f"{n}" * 60 for n in range(20)]})
        session.save({"other": [f"{n}" * 50 for n in range(20)]})
        session.delete("@~1")
    connection = apsw.Connection(str(path))
    connection.execute("PRAGMA writable_schema = ON")
    change = "UPDATE sqlite_schema SET sql = replace(sql, ?, ?) WHERE name = 'items'"
    connection.execute(change, ("body BLOB NOT NULL", "body BLOB"))
    connection.execute("PRAGMA writable_schema = RESET")
    connection.execute("UPDATE items SET body = NULL WHERE pos = (SELECT min(pos) FROM items)")
    connection.execute("PRAGMA writable_schema = ON")
    connection.execute(change, ("body BLOB", "body BLOB NOT NULL"))
    connection.close()
    with holdfast.open(path) as store:
        assert not store.verify().ok
        assert store.gc().rows
        assert store.verify(read_data=True).ok
        assert len(store.session("s").load()["other"]) == 20


def check_order(path: Path, *, ends: bool = True) -> None:
    known = filled(path)
    spoiled(path, known, ends=ends)
    with holdfast.open(path) as store:
        store.repair()
        assert loaded(path, known) == known.keys()
        assert store.verify(read_data=True).ok
        assert store.repair().sessions == ()
        store.gc()
        store.session("s").append("log", "more")
    assert loaded(path, known) == known.keys()


@pytest.mark.parametrize("ends", [True, False])
def test_repair_puts_checkpoints_in_order(tmp_path: Path, ends: bool) -> None:
    check_order(tmp_path / "store.db", ends=ends)


def test_repair_must_put_checkpoints_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(salvage, "is_damaged", lambda _: False)
    with pytest.raises(AssertionError):
        check_order(tmp_path / "store.db")


def check_repair(path: Path, *, ends: bool = True) -> None:
    known = filled(path)
    left = spoiled(path, known, ends=ends)
    with holdfast.open(path) as store:
        head = store.session("s").head
        report = store.verify()
        assert (report.ok, report.loadable) == (False, len(left))
        done = store.repair().sessions
        assert [each.moved for each in done if each.session == "s"] == [None]
        assert [len(each.lost) for each in done if each.session == "s"] == [1]
        now = store.session("s").head
        assert now == head
    assert loaded(path, known) == left
    with holdfast.open(path) as store:
        store.gc()
        store.session("s").append("log", "more")
    assert loaded(path, known) == left


@pytest.fixture
def tables_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if they could not be made anew."""
    monkeypatch.setattr(salvage, "is_damaged", lambda _: False)


@pytest.mark.usefixtures("tables_as_they_are")
@pytest.mark.parametrize("ends", [True, False])
def test_repair_gives_up_only_what_is_lost(tmp_path: Path, ends: bool) -> None:
    check_repair(tmp_path / "store.db", ends=ends)


@pytest.mark.usefixtures("tables_as_they_are")
def test_repair_must_look_for_what_is_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lineage, "_unlisted", lambda *_: iter(()))
    with pytest.raises(AssertionError):
        check_repair(tmp_path / "store.db")


def test_gc_frees_nothing_of_a_session_that_is_not_listed(tmp_path: Path) -> None:
    """An entry of the index of names that leads to another session."""
    path = tmp_path / "store.db"
    names = ("one", "two-xyz", "three-xyz")
    with holdfast.open(path) as store:
        for name in names:
            store.session(name).save({"log": [f"{name} {n}" * 20 for n in range(20)]})
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    found: list[Any] = connection.execute("SELECT name, num FROM sessions").fetchall()
    numbers: dict[bytes, int] = dict(found)
    connection.close()
    number = numbers[b"two-xyz"]
    assert number ^ 1 in numbers.values()
    entry = bytes([3, 12 + 2 * 7, 1]) + b"two-xyz"  # its header, and before the number
    data = path.read_bytes()
    assert data.count(entry + bytes([number])) == 1
    path.write_bytes(data.replace(entry + bytes([number]), entry + bytes([number ^ 1])))
    with holdfast.open(path) as store:
        store.gc()
        store.repair()
        store.gc()
        for name in names:
            assert len(store.session(name).load()["log"]) == 20


@pytest.mark.parametrize("lost", [1, 2])
def test_after_repair_nothing_is_written_where_a_lost_checkpoint_went_on(
    tmp_path: Path, lost: int
) -> None:
    """Head and newest records are lost together: a pack may be where the next item would go."""
    path = tmp_path / "store.db"
    items = [f"{n:03} " + "x" * 200 for n in range(60)]
    with holdfast.open(path) as store:
        session = store.session("s")
        session.save({"log": items[:20]})
        for n in range(20, 26):
            session.append("log", items[n])
        for n in range(26, 26 + 5 * lost, 5):
            session.append("log", *items[n : n + 5])
        last = len(list(session.tree()))
    connection = apsw.Connection(str(path))
    connection.execute("UPDATE heads SET body = x'00'")
    connection.execute("DELETE FROM checkpoints WHERE pos & 0xffffffff > ?", (last - lost,))
    connection.close()
    with holdfast.open(path) as store:
        [done] = store.repair().sessions
        assert done.moved == (0, last - lost)
        session = store.session("s")
        before = session.load()["log"]
        assert before == items[:26]
        for item in items[50:]:
            session.append("log", item)
        assert session.load()["log"] == before + items[50:]
        assert store.verify(read_data=True).ok
        assert store.repair().sessions == ()


def test_long_ropes_are_verified(tmp_path: Path) -> None:
    """A list may have more extents than calls may be nested."""
    with holdfast.open(tmp_path / "store.db", durability="normal") as store:
        session = store.session("s")
        rows = [{"n": n, "text": f"{n:06}" * 60} for n in range(14_000)]
        session.save({"rows": rows})
        for n in range(3, 14_000, 5):
            rows[n]["done"] = n
        session.save({"rows": rows})
        with store._repository.reader() as reader:
            root: Any = lineage.read_row(reader, Address(1, 2)).node()
            entries = ropes.entries(root, StoredData(store._repository.backend, reader))
        assert len(entries.children[0].extents) > 2_000  # type: ignore[union-attr]
        assert session.verify("@").ok


def test_a_counter_set_back_is_noticed(tmp_path: Path) -> None:
    """Else a fork gets a number that its origin uses, and both write to one stream."""
    path = tmp_path / "store.db"
    with holdfast.open(path) as store:
        store.session("s").append("log", "x" * 2000)
    connection = apsw.Connection(str(path))
    body = connection.execute("SELECT body FROM counters WHERE space = 'stream'").get
    assert records.unseal_counter("stream", body) > 1
    forged = records.seal_counter("stream", 1)[8:]
    connection.execute("UPDATE counters SET body = ? WHERE space = 'stream'", (body[:8] + forged,))
    connection.close()
    with holdfast.open(path) as store, pytest.raises(holdfast.Corrupt, match="counter"):
        store.session("s").fork("t")


def test_a_session_loads_without_the_index_of_ids(tmp_path):
    """The index of ids is in ruins: what does not need it works, and verify tells."""
    home = Home("sqlite", tmp_path)
    home.filled(3)
    home.close()
    connection = apsw.Connection(str(home.path))
    page, size = (
        connection.execute(sql).get
        for sql in (
            "SELECT rootpage FROM sqlite_schema WHERE name = 'sqlite_autoindex_checkpoints_1'",
            "PRAGMA page_size",
        )
    )
    connection.close()
    with open(home.path, "r+b") as file:
        file.seek((page - 1) * size)
        file.write(bytes(size))
    with holdfast.open(home.path) as store:
        assert [info.name for info in store.sessions()] == ["s"]
        session = store.session("s")
        assert session.load()["i"] == 2
        assert seqs(session.history()) == [3, 2, 1]
        assert not store.verify().ok
        with pytest.raises(Corrupt):
            session.save({"i": 3})
        assert session.load()["i"] == 2


def test_a_damaged_table_of_names_is_reported(sqlite: Home) -> None:
    sqlite.filled(2)
    sqlite._sql("UPDATE names SET hash = hash + 1")
    with pytest.raises(holdfast.Corrupt):
        sqlite.session()
    assert not sqlite.store.verify().ok
    sqlite.store.repair()
    assert sqlite.store.verify().ok
    assert sqlite.session().load()["i"] == 1


def test_an_id_of_the_wrong_type_is_damage(sqlite: Home) -> None:
    """As when a page is cut off: SQLite then hands out NULL where there can be none."""
    sqlite.filled(3, tags=["t"])
    schema = "UPDATE sqlite_schema SET sql = replace(sql, ?, ?) WHERE name = 'checkpoints'"
    for change in (("id BLOB NOT NULL", "id BLOB"), ("id BLOB", "id BLOB NOT NULL")):
        connection = apsw.Connection(str(sqlite.path))
        connection.pragma("writable_schema", True)
        connection.execute(schema, change)
        connection.close()
        if change[1] == "id BLOB":
            sqlite._sql("UPDATE checkpoints SET id = NULL WHERE pos & 3 = 2")
    session = sqlite.reopened().session("s")
    report = sqlite.store.verify(read_data=True)
    assert any("checkpoint 2" in str(problem) for problem in report.problems)
    assert [c.seq for c in session.tree() if c.damaged is None] == [1, 3]
    assert session.load()["i"] == 2


def test_a_table_name_of_the_wrong_type_is_damage(sqlite: Home) -> None:
    sqlite.filled(1)
    sqlite.close()
    connection = apsw.Connection(str(sqlite.path))
    connection.pragma("writable_schema", True)
    connection.execute("UPDATE sqlite_schema SET name = CAST(name AS BLOB) WHERE name = 'forks'")
    connection.close()
    with pytest.raises(holdfast.Corrupt, match="forks"):
        sqlite.reopened()


@pytest.mark.parametrize("kind", ["text", "integer"])
def test_a_name_of_the_wrong_type_is_left_out(sqlite: Home, kind: str) -> None:
    """It is not found, and verify tells why; the other sessions are listed."""
    sqlite.filled(2, "fine")
    sqlite.filled(2, "12")
    sqlite._sql(f"UPDATE sessions SET name = CAST(name AS {kind}) WHERE name = ?", b"12")
    assert [info.name for info in sqlite.reopened().sessions()] == ["fine"]
    assert not sqlite.store.verify().ok
