"""Pages of SQLite that cannot be read: repair finds their rows, and none that was removed."""

from __future__ import annotations

import errno
import io
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import apsw
import pytest

import holdfast
from holdfast.backends import sqlite_order, sqlite_pages
from holdfast.backends.sqlite import SqliteBackend
from holdfast.codec.rows import unseal_items
from tests.faults.bitrot import PAGE, Blank, first_pages, flip, headers, length, owners

TABLES = ("sessions", "checkpoints", "blobs", "items")
Rows = dict[str, list[Any]]
KIND_AND_COUNT = (0, 3, 4)
LEAF = 13


@pytest.fixture(name="path")
def _path(tmp_path: Path) -> Path:
    """A store in which each of these tables has several pages, and had rows that are gone."""
    path = tmp_path / "agent.db"
    some = random.Random(7)
    with pytest.MonkeyPatch.context() as patch, holdfast.open(path, durability="normal") as store:
        patch.setattr(SqliteBackend, "compact", lambda *_: None)  # what is freed can still be seen
        session = store.session("first")
        # So that the page which SQLite moves to make another tree is none of those that are lost.
        session.save({}, tags=["a long tag " * 2_000])
        for n in range(60):
            session.save({"messages": [], "file": some.randbytes(6_000), "n": n, "é" * n: n})
        for _ in range(130):
            session.append("messages", {"role": "user", "content": some.randbytes(300).hex()})
        for n in range(40):
            store.session(f"{n} " + "long name " * 30).save({"n": n})
        for checkpoint in list(session.tree())[5:50]:
            session.delete(checkpoint.id)
        for n in range(20, 40):
            store.session(f"{n} " + "long name " * 30).delete()
        store.gc()
    return path


def rows(path: Path) -> Rows:
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    found = {table: connection.execute(f"SELECT * FROM {table}").fetchall() for table in TABLES}
    connection.close()
    for n, row in enumerate(found["blobs"]):
        found["blobs"][n] = (row[1], row[3])  # neither its number nor its uses tell of anything
    return found


def leaves(data: bytes, table: str) -> list[int]:
    pages = [page for page, name in owners(data).items() if name == table]
    return [page for page in pages if data[(page - 1) * PAGE] == LEAF]


def damaged(path: Path, table: str) -> Iterator[bytes]:
    """The store without the page that leads to all rows of a table, or with bits of headers."""
    data = path.read_bytes()
    first = first_pages(data)[table]
    yield Blank(first).apply(data)
    for n, at in enumerate(next(headers(data, [first]))):
        for bit in range(8) if n in KIND_AND_COUNT else [n % 8]:
            yield flip(data, at, bit)
    for place in headers(data, leaves(data, table)):
        yield flip(data, place[KIND_AND_COUNT[-1]], 0)


def check_items(path: Path) -> None:
    """No two rows have the same items, although those that packs have replaced can be seen."""
    end = 0
    for pos, body in rows(path)["items"]:
        assert pos >= end
        end = pos + len(unseal_items(pos, body, "items").ends)


def check(path: Path, table: str) -> None:
    before = rows(path)
    assert len(before[table]) > 5
    harmed = 0
    for data in damaged(path, table):
        path.write_bytes(data)
        with holdfast.open(path, durability="normal") as store:
            harmed += not store.verify(read_data=True).ok
            store.repair()
            report = store.verify(read_data=True)
            assert report.ok, str(report)
            check_items(path)
            store.gc()  # what was freed may be there again
        assert rows(path) == before
    assert harmed > 10


@pytest.mark.parametrize("table", TABLES)
def test_rows_of_a_page_that_is_lost_are_found(path: Path, table: str) -> None:
    check(path, table)


def check_log(path: Path) -> None:
    """As a killed process leaves it: pages of the file itself are not the newest."""
    killed = path.with_name("killed.db")
    with holdfast.open(path, durability="normal") as store:
        saved = [store.session("new").save({"n": n}) for n in range(3)]
        killed.with_name("killed.db-wal").write_bytes(path.with_name("agent.db-wal").read_bytes())
        data = path.read_bytes()
    killed.write_bytes(Blank(first_pages(data)["sessions"]).apply(data))
    with holdfast.open(killed) as store:
        with pytest.raises(holdfast.Corrupt):
            store.session("new").load()
        store.repair()
        assert store.verify(read_data=True).ok
        for n, checkpoint in enumerate(saved):
            assert store.session("new").load(checkpoint.id) == {"n": n}


def test_rows_that_are_still_in_the_log_are_found(path: Path) -> None:
    check_log(path)


def test_mutant_that_looks_only_into_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = lambda source, draft: shutil.copyfile(source.filename, draft)  # noqa: E731
    monkeypatch.setattr(sqlite_pages, "_copy_pages", copy)
    with pytest.raises((AssertionError, holdfast.HoldfastError)):
        check_log(path)


def test_no_room_for_the_pages_that_are_looked_through(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = path.read_bytes()
    path.write_bytes(Blank(first_pages(data)["checkpoints"]).apply(data))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    with holdfast.open(path) as store:
        with monkeypatch.context() as patch:
            patch.setattr(sqlite_pages, "_copy_pages", full)
            with pytest.raises(holdfast.Unavailable, match="no space left"):
                store.repair()
        store.repair()
        assert store.verify(read_data=True).ok


@pytest.mark.parametrize("table", ["sessions", "checkpoints"])
def test_a_table_whose_index_is_lost_as_well_stays_as_it_is(path: Path, table: str) -> None:
    """Nothing tells its rows from those that were removed; but nothing of them is written over."""
    data = path.read_bytes()
    ways = [first_pages(data)[table], first_pages(data)[f"sqlite_autoindex_{table}_1"]]
    places = [(page - 1) * PAGE for page in ways]
    path.write_bytes(flip(flip(data, places[0], 4), places[1], 4))
    with holdfast.open(path) as store:
        with suppress(holdfast.Corrupt):
            store.repair()
        assert not store.verify().ok
    mended = path.read_bytes()
    path.write_bytes(flip(flip(mended, places[0], 4), places[1], 4))
    with holdfast.open(path) as store:
        assert store.verify(read_data=True).ok


def test_blobs_need_no_index(path: Path) -> None:
    data = path.read_bytes()
    for name in ("blobs", "sqlite_autoindex_blobs_1"):
        data = Blank(first_pages(data)[name]).apply(path.read_bytes())
        path.write_bytes(data)
    with holdfast.open(path) as store:
        assert not store.verify(read_data=True).ok
        store.repair()
        assert store.verify(read_data=True).ok


def test_a_blob_with_another_number_is_the_same_blob(path: Path) -> None:
    data = path.read_bytes()
    for place in headers(data, leaves(data, "blobs")):
        cell = place[0] + int.from_bytes(data[place[-1] + 1 : place[-1] + 3], "big")
        for bit in (0, 3, 6):
            path.write_bytes(flip(data, cell + length(data, cell), bit))
            with holdfast.open(path, durability="normal") as store:
                store.repair()
                assert store.verify(read_data=True).ok


def test_a_file_that_counts_fewer_pages_than_it_has_is_left_alone(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(
        flip(data, 30, 0) if data[30] & 1 else flip(data, 31, data[31].bit_length() - 1)
    )
    before = path.read_bytes()
    with holdfast.open(path) as store, pytest.raises(holdfast.Corrupt, match="counts"):
        store.repair()
    assert len(path.read_bytes()) == len(before)
    path.write_bytes(data)


def test_rows_that_lead_to_the_same_pages_are_not_followed_for_ever() -> None:
    """Made by hand: each of many rows has the same long chain for its rest."""
    chain = range(52, 152)
    size = 4_092 * len(chain) + 489
    varint = bytes([128 | size >> 14, 128 | size >> 7 & 127, size & 127])
    kind = 2 * (size - 5) + 12
    header = bytes([5, 0, 128 | kind >> 14, 128 | kind >> 7 & 127, kind & 127])
    row = varint + b"\1" + header + bytes(489 - len(header)) + chain[0].to_bytes(4, "big")
    at = [PAGE - len(row) * n for n in range(1, 9)]
    leaf = b"\x0d" + bytes(7) + b"".join(n.to_bytes(2, "big") for n in at)
    leaf = leaf.ljust(at[-1], b"\0") + row * 8
    links = [(n + 1).to_bytes(4, "big") + bytes(PAGE - 4) for n in chain]
    file = io.BytesIO(bytes(PAGE) + leaf * 50 + b"".join(links))
    found = sqlite_pages._all_rows(file, PAGE, 151)
    assert len(next(found).columns) == 2
    with pytest.raises(apsw.CorruptError):
        assert len(list(found)) < 0


Patch = pytest.MonkeyPatch
MUTANTS: dict[str, tuple[str, Callable[[Patch], None]]] = {
    "no pages": ("sessions", lambda p: p.setattr(sqlite_order, "sightings", lambda _: iter(()))),
    "removed rows of trees": (
        *("sessions", lambda p: p.setattr(sqlite_order._Judge, "is_there", lambda *_: True)),
    ),
    "removed rows of pages": (
        *("checkpoints", lambda p: p.setattr(sqlite_order._Judge, "is_left", lambda *_: True)),
    ),
    "nonsense": (
        *("checkpoints", lambda p: p.setattr(sqlite_order._Judge, "may_be_one", lambda *_: True)),
    ),
    "beside packs": ("items", lambda p: p.setattr(sqlite_order, "_is_free", lambda *_: True)),
    "as they come": ("items", lambda p: p.setattr(sqlite_order, "_set_aside", sqlite_order._put)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_each_guard_of_it_is_needed(
    path: Path, mutant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, make = MUTANTS[mutant]
    make(monkeypatch)
    with pytest.raises((AssertionError, holdfast.HoldfastError)):
        check(path, table)


def test_a_head_that_is_an_old_one_is_replaced(tmp_path: Path) -> None:
    """As when a page was never written: all of it is sealed, and only older."""
    path = tmp_path / "agent.db"
    with holdfast.open(path) as store:
        session = store.session("s")
        session.save({"messages": ["first"]})
        early = path.with_suffix(".early")
        store.backup(early)
        for n in range(3):
            session.append("messages", n)
        session.tag("@", "kept")
    connection = apsw.Connection(str(path))
    connection.execute("ATTACH ? AS early", (str(early),))
    connection.execute("UPDATE heads SET body = (SELECT body FROM early.heads)")
    connection.close()
    with holdfast.open(path) as store:
        session = store.session("s")
        assert not store.verify().ok
        with pytest.raises(holdfast.Corrupt):
            session.append("messages", "lost")
        store.repair()
        assert store.verify(read_data=True).ok
        session.refresh()
        session.append("messages", 3)
        assert session.load() == {"messages": ["first", 0, 1, 2, 3]}
        assert session.get("tag:kept").step == 4


@pytest.mark.parametrize("table", ["heads", "tombs", "keys", "facets"])
def test_what_can_be_done_without_a_table(tmp_path: Path, table: str) -> None:
    """Its only page is lost, and repair knows all of it from elsewhere, or leaves it out."""
    path = tmp_path / "agent.db"
    with holdfast.open(path) as store:
        session = store.session("s", agent="a")
        saved = [session.save({"n": n}, key=f"k{n}", tags=[f"t{n}"]) for n in range(6)]
        session.delete(saved[2].id)
        store.session("gone").save({})
        store.session("gone").delete()
    path.write_bytes(Blank(first_pages(path.read_bytes())[table]).apply(path.read_bytes()))
    with holdfast.open(path) as store:
        assert not store.verify().ok
        store.repair()
        report = store.verify(read_data=True)
        assert report.ok, str(report)
        session = store.session("s")
        gone = 2 if table != "tombs" else None  # nobody knows that it was deleted
        assert [c.step for c in session.history()] == [
            n + 1 for n in (5, 4, 3, 2, 1, 0) if n != gone
        ]
        assert session.load("key:k4") == {"n": 4}
        assert [c.id for c in store.find(tag="t5")] == [saved[5].id]
        assert [info.name for info in store.sessions(agent="a")] == ["s"]
        if table != "tombs":
            assert store.gc().sessions == 1
        session.save({"n": 6}, key="k6", tags=["t6"])
        session.undo()
        session.redo()
        assert session.load("tag:t6") == {"n": 6}


def test_states_load_although_nobody_knows_their_labels(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    with holdfast.open(path) as store:
        first = store.session("s").save({"n": 1}, label="first", tags=["a"])
        store.session("s").save({"n": 2})
    path.write_bytes(Blank(first_pages(path.read_bytes())["marks"]).apply(path.read_bytes()))
    with holdfast.open(path) as store:
        session = store.session("s")
        assert session.load() == {"n": 2}
        assert session.load(first.id) == {"n": 1}
        assert all(c.damaged for c in [*session.history(), *session.tree(), session.get(first.id)])
        with pytest.raises(holdfast.Corrupt):
            session.load("first")
        with pytest.raises(holdfast.Corrupt):
            session.tag(first.id, "b")
        report = store.verify()
        assert not report.ok
        assert report.loadable == 2
