"""Pages of SQLite that cannot be read: repair finds their rows, and none that was removed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest

import holdfast
from holdfast.backends import sqlite_order
from holdfast.backends.sqlite import SqliteBackend
from holdfast.codec.rows import unseal_items
from tests.faults.bitrot import PAGE, Blank, first_pages, flip, headers, owners

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


def damaged(path: Path, table: str) -> Iterator[bytes]:
    """The store without the page that leads to all rows of a table, or with bits of headers."""
    data = path.read_bytes()
    first, *others = [page for page, name in owners(data).items() if name == table]
    yield Blank(first).apply(data)
    for n, at in enumerate(next(headers(data, [first]))):
        for bit in range(8) if n in KIND_AND_COUNT else [n % 8]:
            yield flip(data, at, bit)
    for place in headers(data, [page for page in others if data[page * PAGE - PAGE] == LEAF]):
        for bit in range(2):
            yield flip(data, place[KIND_AND_COUNT[-1]], bit)


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
