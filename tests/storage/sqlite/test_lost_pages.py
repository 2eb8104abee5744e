"""Pages of SQLite that cannot be read, or were never written.

Repair finds the rows of the first, and none that was removed. The second are told as damage.
"""

from __future__ import annotations

import errno
import io
import random
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import apsw
import pytest

import holdfast
from holdfast.format.rows import unseal_items
from holdfast.storage.sqlite import pages, salvage
from holdfast.storage.sqlite.backend import SqliteBackend
from tests.faults.bitrot import PAGE, Blank, first_pages, flip, headers, length, owners
from tests.mutants import Mutant, maintenance, storage

TABLES = ("sessions", "checkpoints", "blobs", "items")
Rows = dict[str, list[Any]]
KIND_AND_COUNT = (0, 3, 4)
LEAF = 13
_connect = SqliteBackend._connect


@pytest.fixture(name="path")
def _path(tmp_path: Path) -> Path:
    """A store in which each of these tables has several pages, and had rows that are gone."""
    path = tmp_path / "agent.db"
    some = random.Random(7)

    def connect(backend: SqliteBackend) -> apsw.Connection:
        """As older versions did: deleted rows are not overwritten."""
        connection = _connect(backend)
        connection.execute("PRAGMA secure_delete = 0")
        return connection

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SqliteBackend, "_connect", connect)
        patch.setattr(SqliteBackend, "compact", lambda *_, **__: True)  # freed pages stay visible
        _fill(path, some)
    return path


def _fill(path: Path, some: random.Random) -> None:
    with holdfast.open(path, durability="normal") as store:
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
    monkeypatch.setattr(salvage, "_copy_pages", copy)
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
            patch.setattr(salvage, "_copy_pages", full)
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
    found = pages._all_rows(file, PAGE, 151)
    assert len(next(found).columns) == 2
    with pytest.raises(apsw.CorruptError):
        assert len(list(found)) < 0


MUTANTS = [
    (storage.salvage_sees_no_pages, "sessions"),
    (storage.salvage_takes_removed_rows_of_trees, "sessions"),
    (storage.salvage_takes_removed_rows_of_pages, "checkpoints"),
    (storage.salvage_takes_nonsense, "checkpoints"),
    (storage.salvage_puts_items_beside_packs, "items"),
    (storage.salvage_puts_items_as_they_come, "items"),
]


@pytest.mark.parametrize(("mutant", "table"), MUTANTS)
def test_each_guard_of_salvage_is_needed(
    path: Path, mutant: Mutant, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
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


@pytest.mark.parametrize("table", ["heads", "tombs", "keys", "facets", "tallies"])
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
        assert [c.id for c in store.checkpoints(tag="t5")] == [saved[5].id]
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


# -- pages that a disk has never written: they have an old content ---------------------------------

STALE = {"journal", "tombs", "operations", "marks", "leases", "heads", "tallies", "spans"}
State = tuple[str, bytes]


@pytest.fixture(name="states", scope="module")
def _states(tmp_path_factory: pytest.TempPathFactory) -> list[State]:
    """The file after each of many commits, and what the commit has done."""
    path = tmp_path_factory.mktemp("states") / "agent.db"
    states: list[State] = []

    def note(what: str) -> None:
        copy = path.with_name("copy.db")
        for suffix in ("", "-wal"):
            shutil.copyfile(f"{path}{suffix}", f"{copy}{suffix}")
        connection = apsw.Connection(str(copy))
        connection.pragma("user_version")
        connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
        connection.close()
        states.append((what, copy.read_bytes()))

    def pay() -> None:
        note("in doubt")
        raise KeyboardInterrupt

    with holdfast.open(path, durability="normal") as store:
        session = store.session("s")
        for n in range(4):
            session.save({"n": n}, label=f"l{n}", tags=["t"])
        note("saved")
        session.tag("@", "new")
        note("tagged")
        session.rewind("@~1")
        note("rewound")
        session.undo()
        note("undone")
        session.delete("@~2")
        note("deleted")
        session.undo()
        note("not deleted")
        session.delete("@~1")
        note("deleted another")
        paying = store.session("pay")
        with paying.run(state={"n": 0}) as run:
            note("run")
            run.step("model", lambda: 1)
            note("step")
        note("completed")
        with paying.run() as run:
            run.step("model", lambda: 1)
            run.checkpoint()
            run.halt("for now")
        note("halted")
        with pytest.raises(KeyboardInterrupt), paying.run() as run:
            note("taken up")
            run.step("model", lambda: 1)
            run.checkpoint()
            run.tool({"id": "1", "name": "pay", "input": {}}, pay)
        store.gc()
        note("collected")
    return states


def stale(before: bytes, after: bytes) -> Iterator[tuple[str, bytes]]:
    """The file `after`, each time with one page as it was `before`."""
    for page, table in owners(after).items():
        begin, end = (page - 1) * PAGE, page * PAGE
        if table in STALE and end <= len(before) and before[begin:end] != after[begin:end]:
            yield table, after[:begin] + before[begin:end] + after[end:]


def told(store: holdfast.Store) -> object:
    """What users see of a store; or that they are told of damage."""
    try:
        return [
            (
                [(c.id, c.label, c.tags) for c in session.tree()],
                [c.id for c in session.history()],
                [(p.key, p.state) for p in session.pending()],
                [op.summary for op in session.operations()],
                session.load(),
            )
            for session in map(store.session, ("s", "pay"))
            if session.exists()
        ] + [[a.session for a in store.abandoned(halted=True)]]
    except holdfast.Corrupt:
        return "damaged"


def check_stale(states: list[State], path: Path, tables: set[str] = STALE) -> None:
    doubt = next(n for n, (what, _) in enumerate(states) if what == "in doubt")
    pairs = [(n - 1, n) for n in range(1, len(states))]
    pairs += [(n, doubt) for n in range(0, doubt - 1, 2)]
    seen = set()
    for first, last in pairs:
        (early, before), (late, after) = states[first], states[last]
        path.write_bytes(after)
        with holdfast.open(path, durability="normal") as store:
            expected = told(store)
            assert store.verify().ok, late
        for table, data in stale(before, after):
            if table not in tables:
                continue
            seen.add(table)
            path.write_bytes(data)
            with holdfast.open(path, durability="normal") as store:
                found, report = told(store), store.verify()
                assert found in (expected, "damaged") or not report.ok, (table, early, late)
                if last == doubt:
                    check_unpaid(store)
    assert seen == tables


def check_unpaid(store: holdfast.Store) -> None:
    paid: list[int] = []
    with pytest.raises((holdfast.Corrupt, holdfast.InDoubt)), store.session("pay").run() as run:
        run.step("model", lambda: 1)
        run.checkpoint()
        run.tool({"id": "1", "name": "pay", "input": {}}, lambda: paid.append(1))
    assert not paid


def test_a_page_that_was_never_written_is_noticed(states: list[State], tmp_path: Path) -> None:
    check_stale(states, tmp_path / "stale.db")


UNCHECKED = [
    (storage.tallies_are_not_checked, {"marks", "operations", "tombs"}),
    (maintenance.lost_journal_entries_are_not_noticed, {"journal"}),
    (storage.old_leases_are_not_noticed, {"leases"}),
    (maintenance.operations_behind_the_head_are_not_checked, {"heads"}),
]


@pytest.mark.parametrize(("mutant", "tables"), UNCHECKED)
def test_each_check_of_old_pages_is_needed(
    states: list[State],
    tmp_path: Path,
    mutant: Mutant,
    tables: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutant(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check_stale(states, tmp_path / "stale.db", tables)


def test_mutant_that_does_not_write_tallies(
    states: list[State], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.tallies_are_not_written(monkeypatch)
    path = tmp_path / "stale.db"
    path.write_bytes(states[0][1])
    with holdfast.open(path, durability="normal") as store:
        store.session("s").tag("@", "another")
        assert not store.verify().ok
