"""Where a store may lie, what is left there of others, and how it is brought up to date."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import apsw
import pytest

import holdfast
from holdfast.backends import disk, sqlite_file, sqlite_reader
from holdfast.errors import Corrupt, InvalidRequest, Unavailable, UnsupportedFormat


def test_a_log_without_its_store_is_not_taken_over(tmp_path: Path) -> None:
    """SQLite would play it back into the new file."""
    path = tmp_path / "store.db"
    with holdfast.open(path) as store:
        store.session("old").save({"n": 1})
        saved = path.read_bytes()
        log = Path(f"{path}-wal").read_bytes()
    path.unlink()
    Path(f"{path}-wal").write_bytes(log)
    with pytest.raises(Unavailable, match="left of a store that is gone"):
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
    monkeypatch.setattr(disk, "_MOUNTS", place)


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
        assert disk.is_sealed(path) is sealed
    finally:
        path.parent.chmod(0o755)


def test_a_store_of_an_older_format_is_brought_up_to_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store.db"
    with holdfast.open(path) as store:
        store.session("s").save({"n": 1})
    raw = apsw.Connection(str(path))
    raw.execute("DROP TABLE names; PRAGMA user_version = 0")
    raw.close()
    steps = (
        sqlite_file.SCHEMA["names"],
        f"INSERT INTO names SELECT {sqlite_reader.name_hash(b's')}, num FROM sessions",
    )
    monkeypatch.setattr(sqlite_file, "MIGRATIONS", {0: (*steps, "SELECT nothing")})
    with pytest.raises(Corrupt):  # all of it or nothing
        holdfast.open(path)
    with pytest.raises(UnsupportedFormat, match="older format"):
        holdfast.open(path, read_only=True)
    monkeypatch.setattr(sqlite_file, "MIGRATIONS", {0: steps})
    with holdfast.open(path) as store:
        assert store.session("s").load() == {"n": 1}
        assert store.verify(read_data=True).ok
    monkeypatch.setattr(sqlite_file, "MIGRATIONS", {})
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
    monkeypatch.setattr(sqlite_file, "MIGRATIONS", {0: (twice,)})
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


@pytest.mark.skipif(not sqlite_file._LOCKS.exists(), reason="only Linux tells who holds a lock")
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
