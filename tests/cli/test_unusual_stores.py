"""Commands that look, on stores that cannot be written, are written meanwhile, or are damaged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import apsw
import pytest

import holdfast
from tests.support import example_stores as worlds
from tests.support.stores import Home
from tests.support.terminal import Terminal, elsewhere, environment, mortal, process

LOOKS = (
    "sessions", "log", "log trip", "show -s trip", "state -s trip", "diff start -s trip", "verify",
    "verify --read-data", "stats", "search river", "blame plan.budget -s trip", "pending",
    "abandoned", "operations -s trip", "resume trip", "watch --all --seconds 0.01",
    "transcript trip", "usage", "search river -s trip", "diff trip trip-b",
    "prune --all --keep-last 1 --dry-run",
)  # fmt: skip
CHANGES = ("tag @ x -s trip", "label @ x -s trip", "rewind @~1 -s trip", "undo -s trip",
           "fork @ new -s trip", "delete -s trip --yes", "gc --all --yes",
           "prune --all --keep-last 1 --yes")  # fmt: skip


# -- read-only -------------------------------------------------------------------------------------


def forbid(path: Path) -> None:
    """Nobody may write below `path`."""
    for folder, _, files in os.walk(path):
        for name in files:
            os.chmod(f"{folder}/{name}", 0o400)
        os.chmod(folder, 0o500)


def allow(path: Path) -> None:
    for folder, _, _ in os.walk(path):
        os.chmod(folder, 0o700)


def contents(path: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("kind", ["file", "folder", "files"])
def test_read_only(tmp_path, kind):
    """A file in a folder that can be written, one in a folder that cannot, and plain files."""
    home = tmp_path / "home"
    home.mkdir()
    url = f"files:{home}/store" if kind == "files" else str(home / "store.db")
    worlds.trip(url)
    before = contents(home)
    if kind == "file":
        (home / "store.db").chmod(0o400)
    else:
        forbid(home)
    try:
        lines = [f"{line} --store {url}" for line in (*LOOKS, *CHANGES)]
        ended = elsewhere(lines, tmp_path, preexec_fn=mortal)
    finally:
        allow(home)
    for line, (code, _, err) in zip(lines, ended, strict=True):
        assert code == (0 if line.startswith(LOOKS) else 6), (line, err)
    assert before.items() <= contents(home).items(), "what was there is as it was"


COPIES = ("backup copy.db", "copy files:copy", "export copy.jsonl", "export copy")


def test_commands_that_look_leave_nothing_behind(terminal):
    worlds.trip(terminal.path)
    before = contents(terminal.folder)
    for line in (*LOOKS, "doctor", *COPIES):
        terminal.good(line)
        made = {path: text for path, text in contents(terminal.folder).items() if _is_store(path)}
        assert made == before, line
        for path in terminal.folder.glob("copy*"):
            path.unlink() if path.is_file() else shutil.rmtree(path)


def _is_store(path: Path) -> bool:
    return path.name.startswith("store.db")


@pytest.mark.parametrize("lost", ["", "-shm"])
def test_commands_that_look_keep_what_a_dead_writer_left(terminal, lost):
    """Its last saves are in the log alone. They are shown, and no byte of them is touched."""
    worlds.trip(live := terminal.folder / "live.db")
    dead = terminal.folder / "dead"
    dead.mkdir()
    with holdfast.open(live) as store:
        store.session("trip").append("messages", "the last words")
        for path in terminal.folder.glob("live.db*"):
            if not lost or not path.name.endswith(lost):
                shutil.copy(path, dead / path.name.replace("live", "store"))
    kept = {path.name: path.read_bytes() for path in dead.glob("*") if path.suffix != ".db-shm"}
    assert len(kept["store.db-wal"]) > 1000
    for line in (*LOOKS, *COPIES[:3]):
        shutil.copytree(dead, terminal.folder, dirs_exist_ok=True)
        ended = terminal.good(line)
        if line in LOOKS[:5]:
            assert ended.out == terminal.good(f"{line} --store live.db").out
        after = {path.name: path.read_bytes() for path in terminal.folder.glob("store.db*")}
        assert {name: after.get(name) for name in kept} == kept, line
        assert after.keys() - kept.keys() <= {"store.db-shm"}
        for path in terminal.folder.glob("store.db*"):
            path.unlink()
    shutil.copytree(dead, terminal.folder, dirs_exist_ok=True)
    terminal.good("doctor")
    assert terminal.good("state -s trip").out.count("the last words") == 1
    assert [path.name for path in terminal.folder.glob("store.db*")] == ["store.db"]


# -- written meanwhile -----------------------------------------------------------------------------

WRITER = """
import itertools, sys, time, holdfast
with holdfast.open(sys.argv[1], durability="normal") as store:
    trip = store.session("trip")
    for n in itertools.count():
        if n < 60:  # a tree that goes on growing would take ever longer to look at
            trip.append("messages", {"role": "user", "content": f"message {n}, by the river"})
        elif n % 2:
            trip.rewind("@~1")
        else:
            trip.undo()
        if n == 10:
            print("ready", flush=True)
        time.sleep(0.01)
"""


@pytest.mark.parametrize("kind", ["sqlite", "files"])
def test_written_by_another_process(terminal, monkeypatch, kind):
    url = "files:store" if kind == "files" else "store.db"
    monkeypatch.setenv("HOLDFAST_STORE", url)
    worlds.trip(url)
    command = [sys.executable, "-c", WRITER, url]
    env = environment(terminal.folder)
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True) as writer:
        try:
            assert writer.stdout
            assert writer.stdout.readline() == "ready\n"
            known: set[str] = set()
            for _ in range(2):
                for line in LOOKS:
                    if not line.startswith("watch"):
                        terminal.good(line)
                shown = {row["id"] for row in terminal.good("log trip -n 0 --json").lines}
                assert known <= shown
                known = shown
            assert len(known) >= 18
            [event, *_] = _watched(terminal)
            assert event in ("checkpoint", "operation")
            assert writer.poll() is None
        finally:
            writer.kill()
    terminal.good("verify --read-data")


def _watched(terminal: Terminal) -> list[str]:
    """What a watcher sees before it is interrupted."""
    seen: list[str] = []

    def print_json(app: object, shape: dict[str, object]) -> None:
        seen.extend(shape)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("holdfast.cli.context.App.print_json", print_json)
        assert terminal.type("watch --all --json").code == 130
    return seen


# -- damaged ---------------------------------------------------------------------------------------

DAMAGES: dict[str, Callable[[Home], None]] = {
    "head's checkpoint": lambda home: home.spoil_checkpoint(5),
    "older checkpoint": lambda home: home.spoil_checkpoint(3),
    "lost checkpoint": lambda home: home.spoil_checkpoint(3, None),
    "head": lambda home: home.spoil_head(),
    "lost head": lambda home: home.spoil_head(None),
    "session": lambda home: home.spoil_session(),
    "name": lambda home: home.spoil_name(),
    "label": lambda home: home.spoil_marks(3),
    "data": lambda home: home.spoil_newest_item(),
}


@pytest.fixture(params=["sqlite", "files"])
def torn(
    request: pytest.FixtureRequest, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Home]:
    """A store with a sound session t, and a session s with five checkpoints and a damage."""

    def make(damage: str) -> Home:
        home = Home(request.param, terminal.folder)
        request.addfinalizer(home.give_back)
        home.store.session("t").save({"sound": True}, label="here")
        home.filled(5, label="kept")
        DAMAGES[damage](home)
        home.close()
        monkeypatch.setenv("HOLDFAST_STORE", str(home.url))
        return home

    return make


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged(terminal, torn, damage):
    """What is sound is shown, what is not is told, and the exit code says which it was."""
    torn(damage)
    assert terminal.good("state here -s t --json").one == {"sound": True}
    assert terminal.good("show here -s t --json").one["label"] == "here"
    ended = terminal.type("verify --read-data --json")
    assert ended.code == 5
    assert not ended.one["ok"]
    assert ended.one["problems"]
    told = terminal.type("verify --read-data")
    assert told.code == 5
    assert "✗" in told.out
    assert "repair" in told.err
    listed = {row["name"]: row for row in terminal.good("sessions --json").lines}
    assert listed["t"]["damaged"] is None
    assert len(listed) == 2
    rows = terminal.good("log --all --json").lines
    sound = [row for row in rows if row["damaged"] is None]
    assert "t" in {row["session"] for row in sound}
    for line in (
        "show -s s", "state -s s", "diff @~1 -s s", "resume s", "blame i -s s", "log s",
        "operations -s s", "stats", "search fox", "pending", "sessions", "log",
    ):  # fmt: skip
        ended = terminal.type(line)
        assert ended.code in (0, 3 if damage == "name" else 5, 5), (line, ended)
        assert ended.out or ended.err


@pytest.mark.parametrize("damage", [d for d in DAMAGES if d not in ("name", "session")])
def test_every_sound_checkpoint_of_a_damaged_session_is_shown(terminal, torn, damage):
    torn(damage)
    rows = terminal.good("log s --json").lines
    assert [row["seq"] for row in rows] == [5, 4, 3, 2, 1]
    broken = [row["seq"] for row in rows if row["damaged"]]
    assert broken == {"head's checkpoint": [5], "older checkpoint": [3], "lost checkpoint": [3],
                      "label": [3]}.get(damage, [])  # fmt: skip
    for row in rows:
        if row["seq"] in broken:
            continue
        ended = terminal.type(f"state {row['id']} --json")
        if (damage, row["seq"]) == ("data", 5) and ended.code == 5:
            shown = terminal.good(f"show {row['id']}").out
            assert "does not load" in shown
        else:
            assert ended.one["i"] == row["seq"] - 1


@pytest.mark.parametrize("damage", ["head", "lost head", "session"])
def test_the_log_says_that_a_session_is_damaged(terminal, torn, damage):
    torn(damage)
    title = terminal.good("log s").out.splitlines()[0]
    assert title.startswith("s  damaged: ")
    assert terminal.good("log t").out.splitlines()[0] == "t"


def test_repaired(terminal, torn):
    home = torn("head's checkpoint")
    assert terminal.type("show -s s").code == 5
    told = terminal.type("repair")
    assert told.code == 5  # the damaged checkpoint is still there
    assert "the head moved from checkpoint 5 to 4" in told.out
    assert "undo -s s" in told.err
    assert terminal.good("show -s s --json").one["step"] == 4
    terminal.good("save s", stdin='{"i": 5}')
    with holdfast.open(home.url) as store:
        assert store.session("s").load() == {"i": 5}


def test_a_damaged_journal_hides_no_other(terminal: Terminal) -> None:
    with terminal.store() as store:
        for name in ("a", "b", "c"):
            with store.session(name).run() as run:
                run.wait_for("approval")
    connection = apsw.Connection(str(terminal.path))
    connection.execute("UPDATE journal SET body = x'00' WHERE pos >> 32 = 2")
    connection.close()
    told = terminal.type("pending")
    assert told.code == 5
    assert [line for line in told.out.splitlines() if len(line) == 1] == ["a", "c"]
    assert "session 'b': entry 1 of the journal is damaged" in told.err
    told = terminal.type("pending --json")
    assert [row["session"] for row in told.lines] == ["a", "c"]
    assert json.loads(told.err)["exit_code"] == 5


def test_what_was_left_out_is_told_by_the_exit_code(terminal: Terminal) -> None:
    """A script that removes the source afterwards must not take it for done."""
    with terminal.store() as store:
        for name in ("a", "b"):
            store.session(name).save({"n": 1})
    connection = apsw.Connection(str(terminal.path))
    connection.execute("UPDATE checkpoints SET body = x'00' WHERE pos >> 32 = 2")
    connection.close()
    for line in ("copy copy.db", "export out.jsonl"):
        told = terminal.type(line)
        assert (told.code, "left out  b" in told.out) == (5, True)
        assert "1 checkpoint" in told.out
    assert terminal.good("sessions -S copy.db --json").one["name"] == "a"
    (terminal.folder / "rollout.jsonl").write_text("{torn")
    assert terminal.type("import rollout.jsonl -f codex").code == 5


def test_a_backup_of_a_damaged_store_says_so(terminal, torn):
    """The copy is made, it is the same, and nobody takes it for a sound one."""
    kind = "files:" if str(torn("older checkpoint").url).startswith("files:") else ""
    copy = terminal.folder / "copy"
    told = terminal.type(f"backup {copy}")
    assert told.code == 5
    assert "2 sessions, 6 checkpoints, with the same damage as the store" in told.out
    assert "✗" in told.out
    assert "verified" not in told.out
    as_json = terminal.type(f"backup {copy}-2 --json")
    assert (as_json.code, as_json.one["report"]["ok"], as_json.err) == (5, False, "")
    there = terminal.type("verify --read-data --json").one
    assert terminal.type(f"verify --read-data --json -S {kind}{copy}").one == there


def test_check_of_what_cannot_be_checked_does_not_lead_in_a_circle(terminal):
    """Other commands send one to check; check itself, and doctor, must not."""
    worlds.trip(terminal.path)
    whole = terminal.path.read_bytes()
    terminal.path.write_bytes(whole[:100] + b"\xff" * (len(whole) - 100))
    assert "holdfast verify" in terminal.type("sessions --json").error["hint"]
    for line in ("verify", "verify --read-data", "verify -s trip"):
        told = terminal.type(f"{line} --json").error
        assert (told["exit_code"], told["error"]) == (5, "Corrupt")
        assert "holdfast verify" not in told["hint"]
        assert "backup" in told["hint"]
    ended = terminal.type("doctor")
    assert ended.code == 1
    assert "holdfast verify" not in ended.out


def test_a_session_that_is_being_run(terminal: Terminal) -> None:
    with terminal.store() as store, store.session("s").run() as run:
        run.step("look", int)
        assert f"Process {os.getpid()} on " in terminal.good("resume s").out
        told = terminal.type("save s", stdin="{}")
        assert told.code == 4
        assert "`holdfast resume --takeover`" in told.err
    assert "It has no interrupted run." in terminal.good("resume s").out


def broken_page(path: Path, table: str) -> None:
    """Zero the root page of a table."""
    connection = apsw.Connection(str(path))
    [[size]] = connection.execute("PRAGMA page_size")
    root = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).get
    connection.close()
    with open(path, "r+b") as file:
        file.seek((root - 1) * size)
        file.write(bytes(size))


def test_check_prints_each_finding_of_sqlite_on_its_own_line(terminal: Terminal) -> None:
    """SQLite tells them in one text with newlines, which were printed as a literal \\n."""
    worlds.trip(terminal.path)
    with open(terminal.path, "r+b") as file:
        file.seek(36)
        file.write(bytes([0, 0, 0, 5]))  # the number of free pages
    told = terminal.type("verify")
    assert told.code == 5
    assert "\\n" not in told.out
    assert "*** in database" not in told.out
    assert any(line.startswith("✗ store: Freelist: ") for line in told.out.splitlines())
    problems = terminal.type("verify --json").one["problems"]
    assert not [each for each in problems if "\n" in each["what"]]


@pytest.mark.parametrize("table", ["checkpoints", "sqlite_autoindex_checkpoints_1", "marks"])
def test_doctor_prints_findings_and_no_log(terminal: Terminal, table: str) -> None:
    """A damaged store makes the library log; doctor reports the same as findings."""
    worlds.trip(terminal.path)
    broken_page(terminal.path, table)
    done = process("doctor", folder=terminal.folder)
    out, err = done.communicate()
    assert (done.returncode, err) == (1, "")
    assert "✗ records: " in out


def test_a_damaged_checkpoint_can_be_deleted(terminal, torn):
    """gc frees nothing while it is there, so its id is enough to delete it."""
    torn("older checkpoint")
    id = next(row["id"] for row in terminal.good("log s --json").lines if row["damaged"])
    assert "damaged checkpoint" in terminal.good(f"delete {id} -s s --yes").err
    assert [row["id"] for row in terminal.good("log s --json").lines if row["damaged"]] == []
    terminal.good("gc --all --yes")
    terminal.good("verify --read-data")
