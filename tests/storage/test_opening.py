"""Where a store may lie, what is left there of others, and how it is brought up to date."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import apsw
import pytest

import holdfast
from holdfast.errors import Corrupt, InvalidRequest, Unavailable, UnsupportedFormat
from holdfast.storage import fs
from holdfast.storage.sqlite import reader, schema


def test_a_log_without_its_store_is_not_taken_over(tmp_path: Path) -> None:
    """SQLite would play it back into the new file."""
    path = tmp_path / "store.db"
    with holdfast.open(path) as store:
        store.session("old").save({"n": 1})
        saved = path.read_bytes()
        log = Path(f"{path}-wal").read_bytes()
    path.unlink()
    Path(f"{path}-wal").write_bytes(log)
    with pytest.raises(Unavailable):
        holdfast.open(path)
    assert Path(f"{path}-wal").read_bytes() == log
    assert [p.name for p in tmp_path.iterdir()] == ["store.db-wal"]
    path.write_bytes(saved)
    with holdfast.open(path) as store:
        assert store.session("old").load() == {"n": 1}
    path.unlink()
    Path(f"{path}-wal").touch()  # an empty one says nothing
    with holdfast.open(path) as store:
        assert not list(store.sessions())


def mounted(monkeypatch: pytest.MonkeyPatch, place: Path, *points: tuple[bytes, bytes]) -> None:
    """The table of mounts, as the system would tell it."""
    line = b"36 35 98:0 / %s rw,noatime - %s somewhere rw\n"
    place.write_bytes(b"".join([line % point for point in points]))
    monkeypatch.setattr(fs, "_MOUNTS", place)


@pytest.mark.parametrize("kind", ["sqlite", "files"])
def test_network_file_systems_are_refused(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "local").mkdir()
    far = str(tmp_path / "net").encode()
    mounted(monkeypatch, tmp_path / "mounts", (b"/", b"ext4"), (far, b"nfs4"), (b"/\xff", b"ext4"))
    url = "files:{}/store" if kind == "files" else "{}/store.db"
    with pytest.raises(Unavailable, match=r"network file system \(nfs4\)"):
        holdfast.open(url.format(tmp_path / "net"))
    assert not list((tmp_path / "net").iterdir())
    with holdfast.open(url.format(tmp_path / "local")) as store:
        store.session("s").save({})
    if kind == "sqlite":  # where the file is counts, and not where a link to it is
        os.rename(tmp_path / "local" / "store.db", tmp_path / "net" / "store.db")
        (tmp_path / "local" / "store.db").symlink_to(tmp_path / "net" / "store.db")
        with pytest.raises(Unavailable, match="network file system"):
            holdfast.open(url.format(tmp_path / "local"))


def listing(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


@pytest.mark.parametrize("url", ["{}/deep/nested/a.db", "files:{}/deep/nested/a"])
def test_missing_folders_are_made(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are durable before the store is: each folder above a new one is synced."""
    url = url.format(tmp_path)
    for create in (None, False):  # a folder that was mistyped is not made
        with pytest.raises(holdfast.HoldfastError, match=r"not exist|no store"):
            holdfast.open(url, create=create)
        assert not listing(tmp_path)
    synced: list[str] = []
    monkeypatch.setattr(fs, "sync", lambda path: synced.append(str(path)))
    with holdfast.open(url, create=True) as store:
        assert {str(tmp_path), f"{tmp_path}/deep", f"{tmp_path}/deep/nested"} <= {*synced}
        monkeypatch.undo()
        store.session("s").save({"n": 1})
    assert (tmp_path / "deep").stat().st_mode & 0o777 == 0o700
    with holdfast.open(url, create=True) as store:
        assert store.session("s").load() == {"n": 1}


@pytest.mark.parametrize("url", ["{}/deep/nested/a.db", "files:{}/deep/nested/a"])
def test_an_open_that_fails_leaves_nothing(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever step of it fails."""
    sync = fs.sync
    for fails_at in range(100):
        left = fails_at

        def failing(path: Path | str) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise OSError(5, "the disk failed", str(path))
            sync(path)

        monkeypatch.setattr(fs, "sync", failing)
        monkeypatch.setattr(fs, "sync_handle", lambda _: failing("a file"))
        try:
            holdfast.open(url.format(tmp_path), create=True).close()
        except Unavailable:
            if any(name.endswith(("a.db", "holdfast.json")) for name in listing(tmp_path)):
                break  # it is complete, and another process may use it already
            assert not listing(tmp_path)
        else:
            break
    assert fails_at > 2
    monkeypatch.undo()
    holdfast.open(url.format(tmp_path), create=True).close()


def test_a_refused_folder_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.txt").touch()
    monkeypatch.chdir(tmp_path)
    for create in (None, True):
        with pytest.raises(InvalidRequest, match="folder of something else"):
            holdfast.open("files:.", create=create)
    with pytest.raises(holdfast.StoreNotFound):
        holdfast.open("files:.", create=False)
    assert listing(tmp_path) == {"mine.txt"}


def test_reading_leaves_nothing_beside_a_store(tmp_path: Path) -> None:
    """By several who read at once, and whether they are let in or not."""
    path = tmp_path / "store.db"
    with holdfast.open(path) as store:
        store.session("s").save({"n": 1})
    strange = tmp_path / "strange.db"
    other = apsw.Connection(str(strange))
    other.pragma("journal_mode", "wal")
    other.execute("CREATE TABLE mine (n)")
    other.close()
    before = path.read_bytes(), strange.read_bytes()
    first = holdfast.open(path, read_only=True)
    with holdfast.open(path, read_only=True) as second:
        assert second.session("s").load() == {"n": 1}
    assert first.session("s").load() == {"n": 1}
    assert listing(tmp_path) > {"store.db", "strange.db"}
    first.close()
    with pytest.raises(UnsupportedFormat):
        holdfast.open(strange, read_only=True)
    (tmp_path / "link.db").symlink_to(path)
    holdfast.open(tmp_path / "link.db", read_only=True).close()
    assert listing(tmp_path) == {"store.db", "strange.db", "link.db"}
    assert (path.read_bytes(), strange.read_bytes()) == before


def test_reading_leaves_what_others_use(tmp_path: Path) -> None:
    """Nothing that a writer needs goes, and nothing that was not written back."""
    path, copy = tmp_path / "store.db", tmp_path / "copy.db"
    script = f"""
import holdfast, sys
with holdfast.open({str(path)!r}) as store:
    for n in range(4):
        print(sys.stdin.readline(), flush=True)
        store.session("s").save({{"n": n}})
        print(n, flush=True)
    sys.stdin.readline()  # the writer closes last: a reader cannot remove the log
"""
    holdfast.open(path).close()
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        for n in range(4):
            holdfast.open(path, read_only=True).close()
            writer.stdin.write("go\n")
            writer.stdin.flush()
            while writer.stdout.readline() != f"{n}\n":
                pass
            with holdfast.open(path, read_only=True) as store:
                assert store.session("s").load() == {"n": n}
            if n == 2:
                for suffix in ("", "-wal"):
                    shutil.copyfile(f"{path}{suffix}", f"{copy}{suffix}")
        writer.stdin.write("close\n")
        writer.stdin.flush()
    assert writer.returncode == 0
    assert listing(tmp_path) == {"store.db", "copy.db", "copy.db-wal"}
    kept = copy.read_bytes(), Path(f"{copy}-wal").read_bytes()
    with holdfast.open(copy, read_only=True) as store:
        assert store.session("s").load() == {"n": 2}
    assert (copy.read_bytes(), Path(f"{copy}-wal").read_bytes()) == kept


def test_a_new_store_is_its_owners(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with holdfast.open(tmp_path / "store.db") as store:
            store.session("s").save({})
            modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    finally:
        os.umask(before)
    assert modes == dict.fromkeys(["store.db", "store.db-wal", "store.db-shm"], 0o600)


@pytest.mark.parametrize(
    ("mode", "folder", "sealed"),
    [(0o644, 0o755, False), (0o444, 0o755, False), (0o444, 0o555, True)],
)
def test_only_where_nobody_can_write_does_it_count_as_sealed(
    tmp_path: Path, mode: int, folder: int, sealed: bool
) -> None:
    """Its owner may go on writing, whoever may only read."""
    path = tmp_path / "folder" / "store.db"
    path.parent.mkdir()
    holdfast.open(path).close()
    path.chmod(mode)
    path.parent.chmod(folder)
    try:
        assert fs.is_sealed(path) is sealed
    finally:
        path.parent.chmod(0o755)


def test_a_store_of_an_older_format_is_brought_up_to_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store.db"
    with holdfast.open(path) as store:
        store.session("s").save({"n": 1})
    raw = apsw.Connection(str(path))
    raw.execute("DROP TABLE names; DROP TABLE tallies; DROP TABLE spans; PRAGMA user_version = 0")
    raw.close()
    later = dict(schema.MIGRATIONS)
    steps = (
        schema.SCHEMA["names"],
        f"INSERT INTO names SELECT {reader.name_hash(b's')}, num FROM sessions",
    )
    monkeypatch.setattr(schema, "MIGRATIONS", later | {0: (*steps, "SELECT nothing")})
    with pytest.raises(Corrupt):  # all of it or nothing
        holdfast.open(path)
    with pytest.raises(UnsupportedFormat, match="older format"):
        holdfast.open(path, read_only=True)
    monkeypatch.setattr(schema, "MIGRATIONS", later | {0: steps})
    with holdfast.open(path) as store:
        assert store.session("s").load() == {"n": 1}
        assert store.verify(read_data=True).ok
    monkeypatch.setattr(schema, "MIGRATIONS", {})
    with holdfast.open(path) as store:
        assert store.session("s").save({"n": 2}).step == 2


def test_why_an_upgrade_failed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where SQLite has rolled it back by itself, as it does when the disk fails."""
    path = tmp_path / "store.db"
    holdfast.open(path).close()
    raw = apsw.Connection(str(path))
    raw.execute("PRAGMA user_version = 0")
    raw.close()
    twice = "INSERT OR ROLLBACK INTO counters SELECT * FROM counters"
    monkeypatch.setattr(schema, "MIGRATIONS", {0: (twice,)})
    with pytest.raises(Unavailable, match="UNIQUE constraint failed"):
        holdfast.open(path)


@pytest.mark.parametrize("url", ["memory:x", ":memory:", "file:x", "redis://x", "caf\udce9.db"])
def test_what_is_no_address_of_a_store(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidRequest):
        holdfast.open(url)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not schema._LOCKS.exists(), reason="only Linux tells who holds a lock")
def test_who_is_stopped_in_a_commit_is_named(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with holdfast.open(path, timeout=0.2) as store:
        store.session("s").save({"n": 1})
        script = "import apsw, sys; c = apsw.Connection(sys.argv[1]); c.execute('BEGIN IMMEDIATE');"
        script += "print(flush=True); sys.stdin.read()"
        command = [sys.executable, "-c", script, str(path)]
        with subprocess.Popen(command, stdin=PIPE, stdout=PIPE) as other:
            assert other.stdout is not None
            other.stdout.readline()
            with pytest.raises(Unavailable, match=f"locked by process {other.pid}\\b"):
                store.session("s").save({"n": 2})
            other.communicate()
        assert store.session("s").save({"n": 2}).step == 2


def test_foreign_files_are_refused_and_left_alone(home, tmp_path):
    home.filled(1)
    for content, error in (
        (b"", UnsupportedFormat),
        (b"not a database", UnsupportedFormat),
        (b"SQLite format 3\0" + bytes(5000), Corrupt),
    ):
        foreign = tmp_path / "foreign.db"
        foreign.write_bytes(content)
        with pytest.raises(error, match=r"not a .*store|damaged"):
            holdfast.open(foreign)
        assert foreign.read_bytes() == content
    for name in (".store.db.0a1b.new", "store.json", "s_latest.json", "index.json"):
        (home.folder / name).write_text("{")
    assert home.reopened().session("s").load()["i"] == 0


@pytest.mark.parametrize("url", ["agent.db", "files:agents"])
def test_a_relative_address_is_resolved_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    """A connection that is opened later must not end up in the store of another folder."""
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        with holdfast.open(url) as store:
            store.session("s").save({"in": name})
    monkeypatch.chdir(tmp_path / "here")
    with holdfast.open(url) as store:
        session = store.session("s")
        monkeypatch.chdir(tmp_path / "there")
        with store._repository.reader(), store._repository.reader():
            assert session.load() == {"in": "here"}
        child = os.fork()  # afterwards both have connections of their own
        if not child:
            ok = session.patch(set={"by": "child"}).step == 2
            os._exit(0 if ok and session.load() == {"in": "here", "by": "child"} else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert session.load() == {"in": "here", "by": "child"}
        session.patch(set={"by": "parent"})
        assert store.verify().ok
    with holdfast.open(url) as store:
        assert store.session("s").load() == {"in": "there"}


@pytest.mark.parametrize("scheme", ["", "files:"])
def test_an_address_that_is_too_long(scheme: str) -> None:
    with pytest.raises(holdfast.Unavailable):
        holdfast.open(f"{scheme}{'x' * 5000}")
