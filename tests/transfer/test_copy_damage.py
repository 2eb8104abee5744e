"""Copies of what is damaged: nothing of a session is left out without a word."""

from __future__ import annotations

import threading
from hashlib import sha256
from pathlib import Path
from typing import Any

import apsw
import ormsgpack
import pytest

import holdfast
from holdfast.errors import SessionNotFound
from holdfast.format import nodes, records, values
from holdfast.storage.files.session_folders import blob_path
from holdfast.storage.reader import open_reader
from tests.support import memory_rows
from tests.support.stores import TEXT, Home
from tests.transfer.test_copy import facts


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def names(home: Home) -> list[str]:
    return [info.name for info in home.store.sessions()]


# -- here --------------------------------------------------------------------------------------


def test_a_damaged_line_of_a_log(tmp_path: Path, there: Home) -> None:
    """It may be the only one to tell of a label, or of a deletion."""
    path = tmp_path / "here"
    with holdfast.open(f"files:{path}", durability="normal") as store:
        session = store.session("s")
        for n in range(3):
            session.save({"n": n})
        session.label("@~2", "precious")
        session.delete("@~1")
        session.save({"n": 4})
        store.session("fine").save({"n": 1})
    log = path / "sessions/s/log.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    for n, line in enumerate(lines):
        damaged = [*lines[:n], flipped(line, len(line) // 2), *lines[n + 1 :]]
        log.write_bytes(b"".join(damaged))
        with holdfast.open(f"files:{path}") as store:
            assert [name for name, _ in store.copy(there.store).skipped] == ["s"]
        assert [name for name, _ in there.store.import_exported(path).skipped] == ["s"]
        assert names(there) == ["fine"]


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"owner": 7},
        {"owner": ["h", 1, "b", "s", "t"], "run": "r", "new": 1},
        {"owner": ["h", "1", "b", "s", "t"], "run": "r", "name": None, "attempt": 1, "began": 1,
         "first": 1, "open": True, "since": 1},
    ],
)  # fmt: skip
def test_a_lease_that_is_none(here: Home, there: Home, facts: dict[str, Any]) -> None:
    for name in ("fine", "s"):
        here.session(name).save({"n": 1})
    number = here._number("s")
    row = (number, b"", records.seal_lease(number, facts), "", 0.0)
    memory_rows.put(here.store._repository.backend, "leases", (number,), row)
    assert [name for name, _ in here.store.copy(there.store).skipped] == ["s"]
    assert names(there) == ["fine"]


def test_journals_of_which_something_was_freed_meanwhile(here: Home, there: Home) -> None:
    session = here.session()
    session.save({"n": 0}, tags=["keep"])

    def run(low: int, high: int) -> None:
        for n in range(low, high):
            with session.run() as run:
                for _ in run.turns():
                    run.step(f"step {n}", lambda: n)  # noqa: B023
                    run.state["n"] = n
                    break

    run(1, 4)
    here.store.copy(there.store)
    run(4, 9)
    session.prune(holdfast.Retention(keep_last=1, keep_tagged=True))
    here.store.gc()
    assert here.store.copy(there.store).skipped == ()
    there.reopened()
    assert there.store.verify().ok
    assert there.session().calls() == session.calls() != []
    assert here.store.copy(there.store).sessions == 0
    with there.session().run() as more:
        more.step("goes on", lambda: 1)
    assert there.store.verify().ok


def test_a_made_up_copy_of_a_session_that_is_there(here: Home, there: Home, tmp_path: Path) -> None:
    """Of the same ids and hashes, but with another root."""
    here.session("s").save({"doc": TEXT * 40, "log": [TEXT] * 40})
    here.session("z").save({"doc": TEXT * 41})
    here.store.copy(there.store, sessions=["s"])
    number, row = here._number("s"), newest(here)
    flat = values.encode(TEXT * 41)
    other = nodes.Blob(sha256(flat).digest(), len(flat)).stored
    rope = row.root[row.root.index(b"\xa3log") + 4 :]
    fields = ormsgpack.unpackb(rope, ext_hook=lambda _, data: ormsgpack.unpackb(data))
    fields[6] = []
    tailless = nodes.reference(nodes.ROPE_TAG, ormsgpack.packb(fields))
    made_up = [b"\x80", b"\x92" + other + rope, b"\x92" + rope + other]
    for n, root in enumerate([*made_up, row.root.replace(rope, tailless)]):
        plant(here, number, row, root)
        path = tmp_path / f"{n}.jsonl"
        here.store.export(path)
        assert [name for name, _ in there.store.import_exported(path).skipped] == ["s"]
        assert names(there) == ["s", "z"]
    assert there.store.verify(read_data=True).ok


def newest(home: Home) -> records.Row:
    backend: Any = home.store._repository.backend
    number = home._number("s")
    with open_reader(backend) as reader:
        [(seq, id, body)] = reader.checkpoints(number, 1, 9, 9)
    return records.unseal_checkpoint(number, seq, id, body)


def plant(home: Home, number: int, row: records.Row, root: bytes) -> None:
    backend: Any = home.store._repository.backend
    r = row.record
    body = records.seal_checkpoint(
        number, r.seq, r.id, row.meta, r.hash, row.line, r.size, r.added, root, r.skip
    )
    memory_rows.damage(backend, "checkpoints", body, records.position(number, r.seq))


# -- there -------------------------------------------------------------------------------------


def test_a_damaged_blob_there_is_not_shared(here: Home, there: Home) -> None:
    big = TEXT * 40
    there.session("old").save({"doc": big})
    spoil_blobs(there)
    there.reopened()
    here.session().save({"doc": big})
    here.store.copy(there.store)
    assert there.session().load() == {"doc": big}
    assert there.store.verify(read_data=True).ok


def spoil_blobs(home: Home) -> None:
    backend: Any = home.store._repository.backend
    with open_reader(backend) as reader:
        [(_, digest, _, _)] = reader.blob_rows(0, 9)
        row = reader.blob(digest)
    assert row is not None
    damaged = flipped(row, len(row) // 2)
    if home.kind == "memory":
        _, _, *rest = memory_rows.rows(backend, "blobs")[digest,]
        memory_rows.put(backend, "blobs", (digest,), (digest, damaged, *rest))
    elif home.kind == "files":
        path = blob_path(home.path, digest)
        path.write_bytes(flipped(path.read_bytes(), 200))
    elif home.kind == "sqlite":
        connection = apsw.Connection(str(home.path))
        connection.execute("UPDATE blobs SET body = ?", (damaged,))
        connection.close()
    else:
        home._sql("UPDATE blobs SET body = ?", damaged)


# -- files -------------------------------------------------------------------------------------


def exported(here: Home, path: Path) -> list[bytes]:
    here.store.export(path)
    return path.read_bytes().splitlines(keepends=True)


def test_every_bit_of_a_journal_counts(here: Home, tmp_path: Path) -> None:
    """Those of its first line as well, and of the name of its folder."""
    session = here.session()
    session.save({"log": []})
    with session.run() as run:
        run.tool({"id": "c1", "name": "pay", "input": {"amount": 7}}, lambda amount: amount)
        run.step("model", lambda: 1)
    path = tmp_path / "all.jsonl"
    lines = exported(here, path)
    for n, line in enumerate(lines):
        if b"/journal" not in line:
            continue
        for at in (5, line.index(b"/s/") + 1, len(line) // 2, len(line) - 1):
            damaged = [*lines[:n], flipped(line, at), *lines[n + 1 :]]
            path.write_bytes(b"".join(damaged))
            with holdfast.open("memory:") as store:
                told = store.import_exported(path).skipped
                assert told or store.session("s").calls() == session.calls()


def test_a_line_that_cannot_be_read_is_told(here: Home, tmp_path: Path) -> None:
    here.session().save({"n": 1})
    path = tmp_path / "all.jsonl"
    lines = exported(here, path)
    path.write_bytes(b"".join([*lines, b"what is this?\n", b"and this?\n"]))
    with holdfast.open("memory:") as store:
        done = store.import_exported(path)
        assert (done.sessions, store.session("s").load()) == (1, {"n": 1})
        why = f"line {len(lines) + 1} of the file is damaged, and 1 more"
        assert done.skipped == (("all.jsonl", why),)


def test_some_of_a_damaged_file(here: Home, tmp_path: Path) -> None:
    for name in "abc":
        here.session(name).save({"name": name})
    path = tmp_path / "all.jsonl"
    lines = exported(here, path)
    path.write_bytes(b"".join(line for line in lines if b'"sessions/b/' not in line))
    with holdfast.open("memory:") as store:
        done = store.import_exported(path, sessions=iter(["b", "a"]))
        assert done.skipped == (("b", "it is missing in the file"),)
        assert [info.name for info in store.sessions()] == ["a"]
        with pytest.raises(SessionNotFound):
            store.import_exported(path, sessions=["c", "no such"])


# -- memory ------------------------------------------------------------------------------------


def test_two_stores_in_memory_copied_into_each_other() -> None:
    with holdfast.open("memory:") as one, holdfast.open("memory:") as other:
        for n in range(20):
            one.session(f"one {n}").save({"n": n})
            other.session(f"other {n}").save({"n": n})

        def copy(a: holdfast.Store, b: holdfast.Store) -> None:
            for _ in range(30):
                a.copy(b)

        threads = [
            threading.Thread(target=copy, args=both, daemon=True)
            for both in ((one, other), (other, one))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
        assert facts(one) == facts(other)
