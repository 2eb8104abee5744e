"""The command line: its table, its streams, its exit codes, and how checkpoints are named."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

import holdfast
from holdfast import errors, ids
from holdfast.cli import cmd_show, complete, output
from holdfast.cli.main import ALIASES, COMMANDS, FAMILY, SYNONYMS, cli
from holdfast.format import state_paths
from tests.cli.test_snapshots import SNAPSHOTS
from tests.support import example_stores as worlds
from tests.support.terminal import EPOCH, Terminal, foreseeable

NAMES = [*FAMILY]


def of(name: str) -> click.Command:
    found = cli.get_command(click.Context(cli), name)
    assert found is not None
    return found


@pytest.fixture
def trip(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> Terminal:
    foreseeable(monkeypatch)
    worlds.trip(terminal.path)
    return terminal


# -- the table -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_table_says_what_the_command_says(name):
    """In fewer words: they begin alike, and no other command's help is nearer."""
    [text] = [text for rows in COMMANDS.values() for _, n, text in rows if n == name]
    assert text.endswith(".")
    assert text.split()[0] == _summary(name).split()[0]

    def near(other: str) -> float:
        said = meant(text)
        return len(said & meant(_summary(other))) / len(said)

    assert near(name) >= 0.5, f"{text!r} is not {_summary(name)!r}"
    assert near(name) == max(map(near, NAMES))


def _summary(name: str) -> str:
    return " ".join((of(name).help or "").split("\n\n")[0].split())


def meant(text: str) -> set[str]:
    """The words that carry meaning."""
    small = {"a", "an", "the", "of", "or", "to", "and", "it", "in", "is", "that", "one", "from"}
    return {*re.findall(r"[a-z'-]+", text.lower())} - small


@pytest.mark.parametrize("name", NAMES)
def test_every_command_has_the_common_options(name):
    assert of(name).name == name
    options = {o for p in of(name).params if isinstance(p, click.Option) for o in p.opts}
    assert {"--json", "--store", "-S"} <= options


@pytest.mark.parametrize("name", NAMES)
def test_help(terminal, name):
    ended = terminal.good(f"{name} --help")
    assert ended.out.startswith(f"Usage: holdfast {name} ")
    assert ended.err == ""
    assert terminal.type(f"{name} --no-such-option").code == 2


def test_the_help_of_all(terminal):
    ended = terminal.good("--help")
    assert [*_named(ended.out)] == NAMES
    assert terminal.type("").err == ended.out, "without a command, the same"


def _named(text: str) -> list[str]:
    known = (
        line.split()[0] for line in text.splitlines() if line.startswith("  ") and line.strip()
    )
    return [word for word in known if word in FAMILY]


# -- the streams -----------------------------------------------------------------------------------


def scenes() -> list[Any]:
    found = []
    for path in sorted(SNAPSHOTS.glob("*.txt")):
        text = path.read_text(encoding="utf-8")
        for n, scene in enumerate(text.split("\n\n$ ")):
            typed, *lines = scene.splitlines()
            if " --json" in typed and "demo" not in typed:
                found.append(pytest.param(lines, id=f"{path.stem}-{n}-{typed[:40]}"))
    return found


@pytest.mark.parametrize("lines", scenes())
def test_with_json_there_is_nothing_else(lines):
    """On stdout a list is an object (or another value) a line; an error is one object on stderr."""
    lines = lines[: 1 + max(n for n, line in enumerate(lines) if line.startswith("["))]
    out = [json.loads(line) for line in lines if line.startswith("  ")]
    err = [line[2:] for line in lines if line.startswith("! ")]
    code = int(lines[-1].strip("[]"))
    if err:
        [told] = [json.loads(line) for line in err]
        assert (told["exit_code"], out) == (code, [])
        assert code != 0
        assert told["message"]
    else:
        assert code in (0, 1, 5), "a finding of doctor or check is no error"


LISTS = (
    "sessions",
    "log",
    "log --all",
    "search",
    "operations -s trip",
    "prune --all --keep-last 1 --dry-run",
)


@pytest.mark.parametrize("line", LISTS)
def test_lists_are_lines_of_json(trip, line):
    rows = trip.good(f"{line} --json").lines
    assert len(rows) > 1
    assert all(type(row) is dict for row in rows)


def test_notices_are_kept_apart_from_data(trip):
    """What comes through a pipe is data alone, and with 2>/dev/null all of it is there."""
    ended = trip.good("tag @ x -s trip")
    assert "Undo with" in ended.err
    assert "Undo with" not in ended.out
    ended = trip.good("search nothing-of-it")
    assert (ended.out, ended.err) == ("", "Nothing matches.\n")
    ended = trip.good("prune --all --keep-last 1 --dry-run")
    assert "drop" in ended.out
    assert ended.err == "This was a dry run. Nothing was deleted.\n"


def test_a_page_of_a_search_tells_where_the_next_begins(trip):
    first = trip.good("search -n 2 --json").lines
    last = first[-1]["checkpoint"]["id"]
    assert trip.good("search -n 2").err == f"There may be more: --before {last}\n"
    rest = trip.good(f"search -n 100 --before {last} --json").lines
    everything = trip.good("search -n 100 --json").lines
    assert first + rest == everything


def test_how_to_undo_names_the_store_that_was_typed(trip):
    """But not the one that the environment names, for that will be the same."""
    assert trip.good("tag @ x -s trip").err == "Undo with: holdfast undo -s trip\n"
    for line in ("-S store.db tag @ y -s trip", "tag @ z -s trip --store store.db"):
        assert trip.good(line).err == "Undo with: holdfast --store store.db undo -s trip\n"
    trip.good("undo -s trip")
    assert trip.good("show -s trip --json").one["tags"] == ["x", "y"]


def test_names_are_no_markup_and_are_not_folded(terminal):
    long = "[red]" + "long-name-" * 20
    with terminal.store() as store:
        store.session(long).save({})
    for line in ("sessions", "stats", "log"):
        assert long in terminal.good(line).out


def test_what_is_larger_is_not_called_smaller(terminal):
    with terminal.store() as store:
        store.session("s").save({"n": 1})
    assert "smaller" not in terminal.good("stats").out
    with terminal.store() as store:
        for n in range(20):
            store.session("s").save({"text": "The same words over and over. " * 200, "n": n})
    assert "times smaller" in terminal.good("stats").out


# -- exit codes ------------------------------------------------------------------------------------

CLASSES = [
    (errors.InvalidRequest("no"), 2), (errors.NotFound("no"), 3),
    (errors.StoreNotFound("no"), 3), (errors.SessionNotFound("no"), 3),
    (errors.CheckpointNotFound("no"), 3), (errors.AmbiguousRevision("no"), 3),
    (errors.Conflict("no"), 4), (errors.HeadMoved("s", None, None), 4),
    (errors.SessionExists("no"), 4), (errors.KeyTaken("no"), 4), (errors.SessionBusy("no"), 4),
    (errors.Fenced("no"), 4), (errors.InDoubt("no", key="k", idempotency_key="i"), 4),
    (errors.AlreadyDecided("no", key="k", outcome="done", result=1), 4),
    (errors.StepChanged("no"), 4), (errors.StepFailed("no"), 1), (errors.Corrupt("no"), 5),
    (errors.Unavailable("no"), 6), (OSError(28, "no space"), 6), (PermissionError(13, "no"), 6),
    (errors.UnsupportedFormat("no"), 7), (errors.NotSerializable("no"), 8),
    (errors.TooBig(1), 9),
]  # fmt: skip


def test_every_error_is_in_the_list():
    def below(kind: type[Exception]) -> set[type[Exception]]:
        return {kind}.union(*map(below, kind.__subclasses__()))

    known = {k for k in below(errors.HoldfastError) if k.__module__ == errors.__name__}
    assert known - {type(e) for e, _ in CLASSES} == {errors.HoldfastError}


@pytest.mark.parametrize(("error", "code"), CLASSES, ids=lambda x: type(x).__name__)
def test_exit_codes(trip, monkeypatch, error, code):
    def fail(*args: Any, **more: Any) -> Any:
        raise error

    monkeypatch.setattr(holdfast.Store, "stats", fail)
    ended = trip.type("stats")
    assert (ended.code, ended.out) == (code, "")
    assert ended.err.startswith("error: ")
    assert len(ended.err.splitlines()) <= 2
    assert "()" not in ended.err, "a call of the library is no command"
    assert trip.type("stats --json").error["error"] == type(error).__name__


def test_ctrl_c(trip, monkeypatch):
    def stop(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(holdfast.Store, "stats", stop)
    assert trip.type("stats") == (130, "", "")


def test_what_is_no_store(terminal):
    (terminal.folder / "text").write_text("This is no store. " * 1000)
    (terminal.folder / "empty").mkdir()
    for name, code in (("text", 7), ("empty", 2), ("files:empty", 3), ("files:text", 3)):
        ended = terminal("sessions", "--store", name, "--json")
        assert ended.code == code, (name, ended)
        assert ended.error["message"]
    ended = terminal("sessions", "--store", "postgresql://127.0.0.1:1/none", "--json")
    assert (ended.code, ended.error["error"]) == (6, "Unavailable")


@pytest.mark.parametrize(
    ("begins", "kind"),
    [(b"", "UnsupportedFormat"), (b"#", "UnsupportedFormat"), (b"SQLite", "UnsupportedFormat"),
     (b"SQL dump of 2026", "UnsupportedFormat"), (bytes(16), "UnsupportedFormat"),
     (b"SQLite f", "Corrupt"), (b"SQLite format 4\0", "Corrupt"),
     (b"\0\0\0\0\0\0\0\0rmat 3\0\0", "UnsupportedFormat"),
     (b"\0\0\0\0\0\0\0\0ormat 3\0", "Corrupt")],
)  # fmt: skip
def test_another_file_is_told_from_a_damaged_store(trip, begins, kind):
    """By its first bytes; either way it stays as it is."""
    whole = trip.path.read_bytes()
    cut = begins if len(begins) < 16 else begins + whole[16:]
    trip.path.write_bytes(cut)
    for line in ("sessions", "init", "verify"):
        told = trip.type(f"{line} --json").error
        assert (told["error"], told["exit_code"]) == (kind, 5 if kind == "Corrupt" else 7)
        assert "backup" in told["hint"]
        assert trip.path.read_bytes() == cut
    told = trip("save", "s", "--json", stdin="{}").error
    assert (told["error"], trip.path.read_bytes()) == (kind, cut)


def test_without_a_name_the_store_is_the_users(terminal, monkeypatch):
    from holdfast.cli import context

    home = terminal.folder / "data" / "holdfast" / "store.db"
    monkeypatch.delenv("HOLDFAST_STORE")
    monkeypatch.setattr(context, "default_store", lambda: str(home))
    told = terminal.type("sessions --json").error
    assert (told["exit_code"], str(home) in told["message"]) == (3, True)
    assert "holdfast init" in told["hint"]
    assert not home.parent.exists()
    terminal.good("save s", stdin="{}")
    assert home.exists()
    assert home.parent.stat().st_mode & 0o77 == 0
    assert "--store" not in terminal.good("tag @ x").err


@pytest.mark.parametrize(
    ("typed", "near"),
    [
        ("logg", "log"),
        ("session", "sessions"),
        ("exprot", "export"),
        ("tail", "watch"),
        ("version", "--version"),
        ("xyzzy", None),
    ],
)
def test_near_commands(terminal, typed, near):
    ended = terminal(typed, "--json")
    told = f"did you mean `holdfast {near}`?" if near else "see `holdfast --help`"
    assert (ended.code, ended.error["hint"]) == (2, told)


def test_words_of_other_programs():
    assert {*SYNONYMS.values()} <= {*FAMILY, "--help", "--version"}
    assert not {*SYNONYMS} & {*FAMILY, *ALIASES}


def test_near_sessions(trip):
    for line in ("log tirp", "show -s tirp", "resume tirp", "watch -s tirp", "verify -s tirp"):
        told = trip.type(f"{line} --json").error
        assert (told["exit_code"], told["hint"]) == (3, "did you mean 'trip' or 'trip-b'?")
    assert "holdfast sessions" in trip.type("log unlike-any --json").error["hint"]


# -- what is asked before --------------------------------------------------------------------------

GRAVE = (
    "prune --all --keep-last 1 --no-labelled",
    "gc --all",
    "delete -s trip-b",
    "delete @~1 -s trip",
)


@pytest.mark.parametrize("line", GRAVE)
def test_nobody_there_to_ask(trip, line):
    if line == "gc --all":
        trip.good("delete @~1 -s trip --yes")
    before = (trip.good("log --all --json").out, trip.good("stats --json").out)
    ended = trip.type(line, stdin="y\n")
    assert (ended.code, ended.out) == (2, "")
    assert "--yes" in ended.err
    assert (trip.good("log --all --json").out, trip.good("stats --json").out) == before
    trip.good(f"{line} --yes")
    assert (trip.good("log --all --json").out, trip.good("stats --json").out) != before


def test_the_plan_is_shown_with_reasons(trip):
    plan = trip.type("prune --all --keep-last 1").err
    assert "drop" in plan
    assert "not kept by keep_last=1" in plan
    assert "labelled edited" in plan or "the head" in plan
    assert "session 'trip-b' with 2 checkpoints" in trip.type("delete -s trip-b").err


def test_delete_names_forks_and_gc_what_was_in_its_way(trip):
    assert "'trip-b'" in trip.good("delete -s trip --yes").err
    with holdfast.open(trip.path) as store, store._repository.reader() as reader:
        reader.sessions(None, 1)
        assert "Run gc again" in trip.good("gc --all --yes").err
    assert "Run gc again" not in trip.good("gc --all --erase --yes").err


def test_prune_does_what_its_plan_said(trip):
    [dry, _] = trip.good("prune --all --keep-last 1 --dry-run --json").lines
    [done, _] = trip.good("prune --all --keep-last 1 --yes --json").lines
    assert dry == done
    left = {row["id"] for row in trip.good("log trip --json").lines}
    assert left == {v["id"] for v in dry["verdicts"] if v["keep"]}
    trip.good("undo -s trip")
    assert len(trip.good("log trip --json").lines) == len(dry["verdicts"])


def test_prune_of_whole_sessions(trip):
    """They are counted with the checkpoints of others, go, and come back by undo."""
    named = [row["name"] for row in trip.good("sessions --json").lines]
    trip.good("save fresh", stdin="{}")
    asked = trip.type("prune --all --session-ttl 1s")
    assert "trip-b: delete the session: nothing was saved for 1s" in asked.err
    done = trip.good("prune --all --session-ttl 1s --yes")
    assert done.out == "Deleted 11 checkpoints and 3 sessions.\n"
    assert trip.good("sessions --json").lines == []
    assert "Undo with: holdfast undo --prune\n" in done.err
    assert trip.good("undo --prune").out == "The prune is undone in 3 sessions.\n"
    assert [row["name"] for row in trip.good("sessions --json").lines] == ["fresh", *named]
    assert trip.good("prune --all --session-ttl 9999w --yes").err == "Nothing to prune.\n"


def test_prune_of_one_agent(terminal):
    with terminal.store() as store:
        for name, agent in (("a", "planner"), ("b", "writer")):
            for n in range(3):
                store.session(name, agent=agent).save({"n": n})
    [plan] = terminal.good("prune --keep-last 1 --agent planner --yes --json").lines
    assert (plan["session"], plan["deleted"]) == ("a", 2)
    assert terminal.type("prune --keep-last 1 --agent planner -s a --yes").code == 2
    assert [row["checkpoints"] for row in terminal.good("sessions --json").lines] == [1, 3]


def test_backups_are_rotated_in_a_folder(terminal):
    terminal.good("save s", stdin="1")
    (terminal.folder / "copies").mkdir()
    for _ in range(3):
        terminal.good("backup copies --keep 2")
    assert {path.name for path in (terminal.folder / "copies").iterdir()} == {
        "store.db", "store.db.1",
    }  # fmt: skip


def test_lists_tell_the_iteration(terminal):
    with terminal.store() as store:
        store.session("s").save({"n": 1}, meta={"iteration": 12, "turn": "text", "other": 3})
    for line in ("sessions", "log", "search"):
        told = terminal.good(line).out
        assert "iteration 12" in told
        assert "turn" not in told
        assert "other" not in told


def test_prune_of_sessions_and_of_checkpoints(trip, monkeypatch):
    """Each is counted: in the question, and in what is said afterwards."""
    monkeypatch.setattr(time, "time_ns", lambda: (EPOCH + 10_000) * 10**9)
    for n in range(3):
        trip.good("save fresh", stdin=str(n))
    line = "prune --all --session-ttl 1h --keep-last 1"
    asked: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "holdfast.cli.context.App.confirm", lambda _, question: asked.append(question)
        )
        done = trip.good(line)
    assert asked == ["Delete 12 checkpoints and 2 sessions?"]
    assert done.out == "Deleted 12 checkpoints and 2 sessions.\n"
    assert [row["name"] for row in trip.good("sessions --json").lines] == ["fresh"]


def test_a_prune_of_all_is_undone_at_once(terminal):
    with terminal.store() as store:
        for n in range(12):
            store.session(f"s{n}").save({"n": 1})
            store.session(f"s{n}").save({"n": 2})
    told = terminal.good("prune --all --keep-last 1 --yes").err
    assert told.count("Undo with: holdfast undo --prune\n") == told.count("Undo with") == 1
    terminal.good("save s3", stdin="3")
    undone = terminal.good("undo --prune --json").one
    assert {each["session"] for each in undone["operations"]} == {f"s{n}" for n in range(12)}
    assert undone["skipped"] == []
    counts = {row["name"]: row["checkpoints"] for row in terminal.good("sessions --json").lines}
    assert counts == {f"s{n}": 3 if n == 3 else 2 for n in range(12)}
    assert terminal.type("undo --prune --json").error["error"] == "InvalidRequest"
    assert terminal.type("undo s3 --prune --json").error["error"] == "InvalidRequest"


def test_a_prune_that_cannot_be_undone_everywhere(terminal):
    with terminal.store() as store:
        for name in ("a", "b"):
            store.session(name).save({})
    terminal.good("prune --all --session-ttl 0.000001s --yes")
    terminal.good("save a", stdin="1")
    ended = terminal.type("undo --prune --json")
    assert ended.code == 4
    assert [each["what"] for each in ended.one["skipped"]] == ["a"]
    assert terminal.good("state -s b --json").one == {}
    ended = terminal.type("undo --prune")
    assert (ended.code, "left out  a: " in ended.out) == (4, True)


EVERYTHING = ("prune --keep-last 1 --yes", "watch --seconds 0.01", "gc --yes")


@pytest.mark.parametrize("line", EVERYTHING)
def test_all_sessions_only_if_the_user_says_so(trip, line):
    before = trip.good("stats --json").out
    told = trip.type(f"{line} --json").error
    assert (told["exit_code"], told["error"]) == (2, "InvalidRequest")
    assert "--all" in told["hint"]
    assert trip.good("stats --json").out == before
    trip.good(f"{line} --all")
    if not line.startswith("gc"):
        told = trip.type(f"{line} trip --all --json").error
        assert (told["exit_code"], told["error"]) == (2, "InvalidRequest")


def test_a_long_plan_of_prune_is_outlined(terminal):
    """Without -s it printed a line for each checkpoint of the store."""
    with terminal.store() as store:
        for n in range(12):
            for m in range(3 + n):
                store.session(f"s{n:02}").save({"m": m})
    dry = terminal.good("prune --all --keep-last 1 --dry-run").out.splitlines()
    assert dry[0] == "Delete 90 checkpoints in 12 sessions:"
    assert dry[1:] == [
        *(f"s{n:02}: delete {n + 2} of {n + 3} checkpoints" for n in range(11, 1, -1)),
        "and 2 more sessions",
    ]
    asked = terminal.type("prune --all --keep-last 1")
    assert [line for line in asked.err.splitlines() if line in dry] == dry
    [one] = terminal.good("prune --keep-last 1 -s s11 --dry-run --json").lines
    assert len(one["verdicts"]) == 14
    verbose = terminal.good("prune --all --keep-last 1 --dry-run -v").out
    assert verbose.count("  drop  ") == 90
    terminal.good("prune --keep-last 1 -s s11 --yes")
    assert len(terminal.good("prune --all --keep-last 1 --dry-run --json").lines) == 11


def test_a_long_plan_of_one_session_fits_a_screen(terminal):
    with terminal.store() as store:
        for n in range(60):
            store.session("long").save({"n": n})
    for line in ("prune --keep-last 1 -s long", "prune --keep-last 1 --all"):
        shown = terminal.good(f"{line} --dry-run").out.splitlines()
        assert (shown[0], len(shown)) == ("long: delete 59 of 60 checkpoints", 22)
        assert terminal.good(f"{line} --dry-run -v").out.count("  drop  ") == 59
        asked = terminal.type(line).err
        assert [row for row in asked.splitlines() if row in shown] == shown


def test_the_help_of_session_says_what_it_does_here():
    """prune had the sentence of commands that take revisions."""
    for name in NAMES:
        for option in of(name).params:
            if option.name == "session" and "revision" not in {p.name for p in of(name).params}:
                assert name == "diff" or "relative revision" not in (
                    getattr(option, "help", "") or ""
                )


# -- revisions -------------------------------------------------------------------------------------


def test_ids_need_no_session(trip):
    for row in trip.good("log --all --json").lines:
        for text in (row["id"], row["id"][:12], row["id"].upper()):
            assert trip.good(f"show {text} --json").one["id"] == row["id"]


RELATIVE = ("@", "@~2", "start", "label:start", "step:2", "key:external-1")


@pytest.mark.parametrize("revision", RELATIVE)
def test_relative_revisions_need_one(trip, revision):
    told = trip.type(f"show {revision} --json").error
    assert (told["exit_code"], told["error"]) == (2, "InvalidRequest")
    assert "trip, trip-b" in told["hint"]
    there = trip.good(f"show {revision} -s trip --json").one
    with trip.store() as store:
        assert there["id"] == store.session("trip").get(revision).id


def test_tags_are_found_on_the_line_of_the_head(trip):
    trip.good("tag @ mine -s trip")
    assert trip.good("show tag:mine -s trip --json").one["step"] == 6
    assert trip.type("show tag:good -s trip").code == 3


def test_the_only_session(terminal):
    worlds.long(terminal.path)
    assert terminal.good("show @~1 --json").one["step"] == 5
    assert terminal.good("diff @~1 --json").one["b"]["step"] == 6
    assert terminal.good("state --json").one == {"n": 5, "text": "xxxxx"}


def test_diff_takes_the_session_of_its_first_argument(trip):
    start = trip.good("show start -s trip --json").one["id"]
    told = trip.good(f"diff {start} @ --json").one
    assert (told["b"]["session"], told["b"]["step"]) == ("trip", 6)
    assert trip.good(f"diff {start} --json").one == told
    other = trip.good("show -s trip-b --json").one["id"]
    told = trip.good(f"diff {other[:10]} @~1 --json").one
    assert (told["b"]["session"], told["b"]["operation"]) == ("trip-b", "fork")
    told = trip.good(f"diff {other} {start} --json").one
    assert (told["a"]["session"], told["b"]["session"]) == ("trip-b", "trip")
    assert told["steps"] == {"a": 2, "b": 0}


def test_an_id_that_is_not_there(trip):
    """Is no label that would need a session."""
    told = trip.type(f"show {'0' * 24} --json").error
    assert (told["exit_code"], told["error"]) == (3, "CheckpointNotFound")
    gone = trip.good("show @~1 -s trip --json").one["id"]
    trip.good(f"delete {gone} --yes")
    told = trip.type(f"show {gone} --json").error
    assert (told["exit_code"], "deleted" in told["message"]) == (3, True)
    assert "holdfast undo" in told["hint"]


def test_ambiguous_ids(terminal, monkeypatch):
    """Some that differ in their last character alone."""
    made = iter([ids.from_text("06a2yjva0wchkawcxr3f2dj" + c) for c in "1234567"])
    monkeypatch.setattr(ids, "new_id", lambda *_: next(made))
    with terminal.store() as store:
        store.session("s").save({"n": 1})
        for n in range(2, 8):
            store.session("s").save({"n": n})
    first, fifth = "06a2yjva0wchkawcxr3f2dj1", "06a2yjva0wchkawcxr3f2dj5"
    for line in ("show 06a2yjva0wch", "show 06a2yjva -s s", "diff 06a2", "rewind 06a2yjva0w"):
        told = terminal.type(f"{line} --json").error
        assert (told["exit_code"], told["error"]) == (3, "AmbiguousRevision")
        assert first in told["message"]
        assert f"{fifth}, …" in told["message"]
    shown = terminal.good("log").out
    assert first in shown, "shortened to what tells them apart"
    assert fifth in shown
    assert terminal.good(f"state {first} --json").one == {"n": 1}


# -- words -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ok"),
    [("2026-01-31", True), ("2026-01-31T12:00+02:00", True), ("15m", True), ("3w", True),
     ("m", False), ("", False), ("-3d", False), ("99999999999d", False), ("31.1.2026", False)],
)  # fmt: skip
def test_times_as_people_write_them(text, ok):
    if ok:
        found = cmd_show.moment(text)
        assert found is not None
        assert found.tzinfo is not None
    else:
        with pytest.raises(errors.InvalidRequest):
            cmd_show.moment(text)


@pytest.mark.parametrize(
    ("count", "told"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 KB"), (1234, "1.23 KB"), (10**9, "1 GB"),
     (10**15, "1e+03 TB")],
)  # fmt: skip
def test_sizes(count, told):
    assert output.size(count) == told


def test_spent():
    assert output.spent(0, 0) == ""
    assert output.spent(1200, 0.0021) == "1,200 tok  $0.0021"
    assert output.spent(0, 1234.5) == "$1,234.50"
    assert output.spent(5, 0.5) == "5 tok  $0.5"


# -- completion ------------------------------------------------------------------------------------


def completed(function: Any, incomplete: str, **params: Any) -> list[str]:
    ctx = click.Context(of("show"), help_option_names=["-h", "--help"])
    ctx.params = {"store": "store.db", **params}
    found: list[str] = function(ctx, SimpleNamespace(), incomplete)
    return found


def test_what_is_completed(trip):
    trip.good("tag @ best -s trip-b")
    assert completed(complete.complete_sessions, "") == ["trip", "trip-b"]
    assert completed(complete.complete_sessions, "trip-") == ["trip-b"]
    assert completed(complete.complete_tags, "") == ["best", "good"]
    assert completed(complete.complete_tags, "", session="trip") == ["good"]
    assert completed(complete.complete_revisions, "") == [
        "@", "edited", "start", "tag:best", "tag:good",
    ]  # fmt: skip
    assert completed(complete.complete_revisions, "e", session="trip") == ["edited"]
    assert completed(complete.complete_revisions, "e", session="trip-b") == []


def test_completion_never_complains(terminal):
    assert completed(complete.complete_sessions, "") == []
    Path("store.db").write_text("no store" * 1000)
    assert completed(complete.complete_revisions, "") == []
    assert completed(complete.complete_tags, "", store="postgresql://127.0.0.1:1/no") == []


def test_a_defect_of_our_own_is_one_line_too(terminal, monkeypatch):
    with terminal.store() as store:
        store.session("a").save({})

    def fail(*_: object) -> None:
        raise ZeroDivisionError("by \x1b[2J nought")

    monkeypatch.setattr(output, "size", fail)
    told = terminal.type("stats")
    assert told.code == 1
    assert told.err == (
        "error: ZeroDivisionError: by \\x1b[2J nought\n"
        "Hint: this is a bug in holdfast; HOLDFAST_DEBUG=1 shows the traceback\n"
    )
    monkeypatch.setenv("HOLDFAST_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        terminal.type("stats")


def test_paths_as_differences_are_written(trip):
    """What `diff` prints can be asked for."""
    trip.good("save list", stdin='{"log": [{"text": "one"}]}')
    trip.good("save list", stdin='{"log": [{"text": "two"}, 3]}')
    shown = trip.good("diff @~1 -s list").out
    assert "log[0].text" in shown
    assert trip.good("state @ log[0].text -s list --json").one == "two"
    assert "[-one-]{+two+}" in trip.good("blame log[0].text -s list").out
    assert trip.type("state @ log[9] -s list").code == 3


KEYS = ["a.b", "a b", "", "it's", 'say "x"', "[0]", "]", "a]['b", "3", 3, -1, 1.5, None, True, b"x",
        "\n", "\\", "\ud800", "é", "state", "statement", ".", "x[y]", "\u202e"]  # fmt: skip


@pytest.mark.parametrize("key", KEYS, ids=ascii)
@pytest.mark.parametrize("where", ["first", "below", "list"])
def test_every_path_that_diff_prints_can_be_asked_for(terminal, key, where):
    def state(value: int) -> Any:
        inner = {key: {"n": [value]}, "other": 0}
        return {"first": inner, "below": {"plan": inner}, "list": [inner]}[where]

    with terminal.store() as store:
        store.session("s").save(state(1))
        store.session("s").save(state(2))
    printed = terminal.good("diff @~1").out.splitlines()[-1]
    path = printed.removeprefix("~ ").removesuffix("  1 → 2")
    assert terminal("state", "@", path, "--json").one == 2
    found = terminal("blame", path, "--json").one
    assert (found["before"], found["after"], found["checkpoint"]["step"]) == (1, 2, 2)


@pytest.mark.parametrize(
    ("path", "steps"),
    [("a.0", ("a", 0)), ("a[0]", ("a", 0)), ("[0].b", (0, "b")), ("a[0][1]", ("a", 0, 1)),
     (".a", ("a",)), ("a..b", ("a", "", "b")), ("a.", ("a", "")), ("a[b]", ("a[b]",)),
     ("a[0]b", ("a", "0b")), ("a[", ("a[",)), ("a]", ("a]",)), ("a['b", ("a['b",)),
     ("a[{}]", ("a[{}]",)), ("a[" + "1" * 20 + "]", ("a", "1" * 20)), (".", ("",)),
     ("a.007", ("a", "007")), ("a.٣", ("a", "٣"))],
)  # fmt: skip
def test_paths_mean_what_they_meant(path, steps):
    assert state_paths.parse(path) == steps


# -- sessions --------------------------------------------------------------------------------------

BY_NAME = ("log", "transcript", "resume", "operations", "undo", "redo", "pending",
           "watch --seconds 0.01", "prune --keep-last 1 --dry-run")  # fmt: skip


@pytest.mark.parametrize("line", BY_NAME)
def test_a_session_is_an_argument_or_an_option(terminal, line):
    worlds.left(terminal.path)
    for name in ("job", "ask"):
        terminal.good(f"tag @ x -s {name}")
        terminal.good(f"tag @ y -s {name}")
        terminal.good(f"tag @ z -s {name}")
    if line == "redo":
        for _ in range(3):
            terminal.good("undo job")
    for words in ("job", "-s job", "job --session job"):
        rows = terminal.good(f"{line} {words} --json").lines
        assert {row["session"] for row in rows} <= {"job"}
    told = terminal.type(f"{line} ask -s job --json").error
    assert (told["exit_code"], told["error"]) == (2, "InvalidRequest")


def test_a_file_is_saved_to_the_session_of_either(terminal):
    (terminal.folder / "state.json").write_text('{"n": 1}')
    for line in ("a state.json", "-s b state.json", "--session c c state.json"):
        assert terminal.good(f"save {line} --json").one["session"] in ("a", "b", "c")
    terminal.good("save -s d", stdin='{"n": 1}')
    terminal.good("save -s d d", stdin='{"n": 1}')
    for name in "abcd":
        assert terminal.good(f"state -s {name} --json").one == {"n": 1}


@pytest.mark.parametrize(
    "line",
    [
        "",
        "a -s b state.json",
        "state.json",
        "state.json -",
        "state.json a",
        "-",
        "new.json",
        "notes",
    ],
)
def test_a_file_is_never_taken_for_a_session(terminal, line):
    (terminal.folder / "notes").touch()
    (terminal.folder / "state.json").write_text('{"n": 1}')
    told = terminal.type(f"save {line} --json", stdin="{}").error
    assert (told["exit_code"], told["error"]) == (2, "InvalidRequest")
    assert not terminal.path.exists()


def test_a_session_may_be_called_like_a_file(terminal):
    (terminal.folder / "state.json").write_text('{"n": 1}')
    terminal.good("save -s state.json", stdin='{"n": 2}')
    terminal.good("save -s state.json ./state.json")
    assert [row["step"] for row in terminal.good("log state.json --json").lines] == [2, 1]


def test_files_and_functions_where_a_session_is_meant(trip):
    Path("agent.py").write_text("def goes_on(run): ...\n")
    for line, hint in (
        ("log store.db", "holdfast --store store.db"),
        ("log agent.py", "a file"),
        ("resume agent:goes_on", "holdfast resume SESSION agent:goes_on"),
        ("resume trip agent.py:goes_on", "agent:goes_on"),
        ("resume -s trip agent.py:goes_on", "agent:goes_on"),
    ):
        told = trip.type(f"{line} --json").error
        assert hint in told["hint"], line
    assert len(trip.good("sessions --json").lines) == 2
    trip.good("save user:42", stdin="1")
    assert trip.good("resume user:42 --json").one["session"] == "user:42"


def test_a_run_is_resumed_with_either(terminal):
    worlds.left(terminal.path)
    Path("agent.py").write_text("def goes_on(run): ...\n")
    terminal.good("answer approval true -s ask")
    assert terminal.good("resume -s ask agent:goes_on --json").one["session"] == "ask"


@pytest.mark.parametrize("line", ["show", "state", "rewind", "delete", "tag", "label", "fork"])
def test_a_session_where_a_checkpoint_is_meant(trip, line):
    more = {"tag": " x", "label": " x", "fork": " new"}.get(line, "")
    told = trip.type(f"{line} trip-b{more} --json").error
    assert (told["exit_code"], told["error"]) == (2, "InvalidRequest")
    assert "-s trip-b" in told["hint"]


def test_diff_of_sessions_compares_their_heads(trip):
    heads = {n: trip.good(f"show -s {n} --json").one["id"] for n in ("trip", "trip-b")}
    expected = trip.good(f"diff {heads['trip']} {heads['trip-b']} --json").one
    for line in ("diff trip trip-b", "diff @ trip-b -s trip", "diff trip trip-b -s trip"):
        assert trip.good(f"{line} --json").one == expected
    assert trip.good("diff start trip-b -s trip --json").one["a"]["label"] == "start"
    trip.good("label @ trip-b -s trip")
    told = trip.type("diff start trip-b -s trip --json").error
    assert told["error"] == "AmbiguousRevision"
    assert trip.good("diff start label:trip-b -s trip --json").one["b"]["session"] == "trip"
    assert completed(complete.complete_revisions_and_sessions, "trip-") == ["trip-b", "trip-b"]
    assert trip.type("diff trip nowhere --json").error["error"] == "CheckpointNotFound"


def test_a_label_on_another_branch_is_named_by_its_id(trip):
    there = trip.good("show -s trip --json").one["id"]
    trip.good("label @ tried -s trip")
    trip.good("rewind @~1 -s trip")
    trip.good("save trip", stdin="{}")
    for line in ("show tried -s trip", "show label:tried -s trip", "diff start tried -s trip"):
        told = trip.type(f"{line} --json").error
        assert told["error"] == "CheckpointNotFound"
        assert there in told["hint"]


# -- the store -------------------------------------------------------------------------------------


def test_the_only_store_of_a_folder_is_offered(terminal, monkeypatch, tmp_path):
    monkeypatch.delenv("HOLDFAST_STORE")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "nothing"))
    Path("other.db").write_text("no store")
    assert "--store" in terminal.type("log --json").error["hint"]
    assert "other.db" not in terminal.type("log --json").error["hint"]
    Path("other.db").unlink()
    worlds.trip("my agent.db")
    hint = terminal.type("log trip -n 3 --json").error["hint"]
    assert "`holdfast --store 'my agent.db' log trip -n 3 --json`" in hint
    assert "`export HOLDFAST_STORE='my agent.db'`" in hint
    worlds.long("second.db")
    assert "holdfast --store" not in terminal.type("log --json").error["hint"]
    monkeypatch.setenv("HOLDFAST_STORE", "none.db")
    assert "check HOLDFAST_STORE" in terminal.type("log --json").error["hint"]


@pytest.mark.parametrize("scheme", ["", "sqlite:", "files:"])
def test_home_is_expanded(terminal, monkeypatch, scheme):
    monkeypatch.setenv("HOME", str(terminal.folder / "home"))
    url = f"{scheme}~/new"
    terminal.good(f"init -S '{url}'")
    monkeypatch.setenv("HOLDFAST_STORE", url)
    terminal.good("save s", stdin="1")
    assert (terminal.folder / "home" / "new").exists()
    terminal.good(f"copy '{url}-2' -s s")
    assert (terminal.folder / "home" / "new-2").exists()
    assert not (terminal.folder / "~").exists()
