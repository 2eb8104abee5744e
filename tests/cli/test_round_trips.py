"""What goes in by the command line comes out again: states, stores, runs."""

from __future__ import annotations

import json as jsons
import os
import re
import signal
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest

import holdfast
from tests.golden.content import NESTED, VALUES
from tests.runs.test_runs import leave_all
from tests.support import example_stores as worlds
from tests.support.equality import same
from tests.support.terminal import Terminal, environment, process

EXACT = {
    "values": VALUES | {"nan": float("nan")},
    "nested": NESTED,
    "list": [1, "two", (3,), {4}],
    "scalar": 7,
    "none": None,
    "tuple": (b"\x00", float("-inf"), frozenset({1})),
    "dollars": {"$bytes": "AA==", "$$": 1, "$": {"$tuple": [1]}},
}

# -- states ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("flag", ["", " --json"], ids=["people", "json"])
@pytest.mark.parametrize("way", ["stdin", "file"])
def test_what_state_prints_can_be_saved(terminal, name, flag, way):
    state = EXACT[name]
    with terminal.store() as store:
        store.session("a").save(state)
    printed = terminal.good(f"state -s a{flag}").out
    if way == "stdin":
        terminal.good("save b", stdin=printed)
    else:
        Path("state.json").write_text(printed, encoding="utf-8")
        terminal.good("save b state.json")
    with terminal.store() as store:
        assert same(store.session("b").load(), state)
        assert store.session("a").get().state_hash == store.session("b").get().state_hash


def test_parts_of_a_state(terminal):
    state = {"plan": {"budget": 9, "3": "three"}, "list": [[1], {"x": b"y"}], "t": (1, 2)}
    with terminal.store() as store:
        store.session("s").save(state)
    for path, value in {
        "plan.budget": 9, "plan.3": "three", "list.0.0": 1, "list.1.x": {"$bytes": "eQ=="},
        "t.1": 2,
    }.items():  # fmt: skip
        assert terminal.good(f"state @ {path} --json").one == value
    for path in ("plan.none", "list.7", "plan.budget.x", "list.x", "t.2"):
        assert terminal.type(f"state @ {path} --json").error["exit_code"] == 3


BROKEN = {
    "cut": '{"n": ', "empty": "", "two": "{} {}", "no text": b"\xff\xfe", "python": "{'n': 1}",
    "unknown tag": '{"$byt": 1}', "wrong tag": '{"x": {"$bytes": 5}}', "deep": "[" * 100_000,
    "bad base64": '{"$bytes": "*"}', "bad time": '{"$time": "x"}', "unhashable": '{"$set": [[1]]}',
    "tag and more": '{"$bytes": "", "n": 1}',
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_state(terminal, name):
    """Nothing is written, not even a store."""
    told = terminal.type("save s --json", stdin=BROKEN[name]).error
    assert (told["exit_code"], told["error"]) == (2, "InvalidRequest")
    assert told["message"].startswith("standard input")
    assert not terminal.path.exists()


def test_a_file_is_not_taken_for_a_session(terminal):
    """`save good.json` waited for standard input, to save it to a session of that name."""
    (terminal.folder / "good.json").write_text('{"n": 1}')
    for stdin in (None, '{"n": 2}'):
        told = terminal.type("save good.json --json", stdin=stdin).error
        assert "good.json is a file" in told["message"]
        assert told["hint"].startswith("holdfast save SESSION good.json")
        assert not terminal.path.exists()
    assert terminal.good("save -s good.json --json", stdin="{}").one["session"] == "good.json"
    assert terminal.good("save s good.json --json").one["session"] == "s"


@pytest.mark.parametrize("line", ["export -", "export -s s -", "export --html s -", "backup -",
                                  "copy -", "save s good.json -S -"])  # fmt: skip
def test_a_dash_is_no_place_to_write_to(terminal, line):
    """`export -` made a folder of that name."""
    (terminal.folder / "good.json").write_text('{"n": 1}')
    terminal.good("save s good.json")
    assert terminal.type(f"{line} --json").error["exit_code"] == 2
    assert not (terminal.folder / "-").exists()
    terminal.good("export ./-")
    assert (terminal.folder / "-").is_dir()


def test_a_store_is_not_copied_to_itself(terminal):
    terminal.good("save s", stdin="{}")
    (terminal.folder / "link.db").symlink_to("store.db")
    for url in ("store.db", "./store.db", "sqlite:store.db", "link.db", str(terminal.path)):
        told = terminal("copy", url, "--json").error
        assert (told["error"], "the same store" in told["message"]) == ("InvalidRequest", True)


def test_all_that_save_takes(terminal):
    line = "save s -l first -t a -t b --status halted --reason why --key k --agent robot --json"
    made = terminal.good(line, stdin="{}").one
    wanted = {"label": "first", "tags": ["a", "b"], "status": "halted", "reason": "why",
              "key": "k", "agent": "robot", "session": "s"}  # fmt: skip
    assert made.items() >= wanted.items()
    again = terminal.good("save s --json", stdin='{"n": 1}').one
    assert again["parent"] == made["id"]
    assert terminal.type("save s --key k --json", stdin='{"n": 2}').error["exit_code"] == 4
    assert terminal.good("show --json").one == again, "nothing was written"


def test_the_agent_of_a_save(terminal):
    """Is the checkpoint's; the session's is the one that it was made with, as the help says."""
    for agent, belongs in (("first", "first"), ("second", "first")):
        made = terminal.good(f"save s --agent {agent} --json", stdin="{}").one
        assert made["agent"] == agent
        assert terminal.good("sessions --json").one["agent"] == belongs
    told = " ".join(terminal.good("save --help").out.split())
    assert "The agent that saves; a new session belongs to it." in told


# -- stores ----------------------------------------------------------------------------------------


def told_of(url: str) -> list[Any]:
    with holdfast.open(url, create=False) as store:
        sessions = [store.session(info.name) for info in store.sessions()]
        return [(s.name, c, s.load(c.id)) for s in sessions for c in s.tree()]


@pytest.mark.parametrize(
    ("out", "into"),
    [("export all.jsonl", "import all.jsonl"), ("export all.jsonl.zst", "import all.jsonl.zst"),
     ("export folder", "import folder"), ("copy other.db", None), ("copy files:other", None)],
    ids=["jsonl", "zst", "folder", "sqlite", "files"],
)  # fmt: skip
def test_there_and_back(terminal, out, into):
    worlds.trip(terminal.path)
    terminal.good(out)
    if into is None:
        other = out.split()[1]
    else:
        other = "new.db"
        terminal.good(f"{into} --store new.db")
        again = terminal.good(f"{into} --store new.db --json").one
        assert (again["checkpoints"], again["known"]) == (0, 10)
    assert told_of(other) == told_of(str(terminal.path))
    terminal.good(f"verify --read-data --store {other}")


def test_only_one_session(terminal):
    worlds.trip(terminal.path)
    worlds.long(terminal.path)
    terminal.good("export some.jsonl -s notes")
    terminal.good("import some.jsonl --store new.db")
    assert [row["name"] for row in terminal.good("sessions --json -S new.db").lines] == ["notes"]
    terminal.good("copy other.db -s trip-b")
    names = [row["name"] for row in terminal.good("sessions --json -S other.db").lines]
    assert names == ["trip", "trip-b"], "with what it was forked from"


@pytest.mark.parametrize("more", ["", "-f export", "-f s3", "-s trip"])
def test_a_store_is_copied_and_not_imported(terminal, more):
    """And the hint says how."""
    worlds.trip("other one.db")
    told = terminal.type(f"import 'other one.db' {more} --json").error
    assert (told["exit_code"], told["error"]) == (2, "InvalidRequest")
    assert not terminal.path.exists()
    terminal.good(told["hint"].removeprefix("holdfast "))
    assert told_of(str(terminal.path)) == told_of("other one.db")


def test_a_backup_is_a_store(terminal):
    worlds.trip(terminal.path)
    assert terminal.good("backup copy.db --json").one["report"]["ok"]
    assert told_of("copy.db") == told_of(str(terminal.path))


# -- runs ------------------------------------------------------------------------------------------

AGENT = """
import os, signal, sys
import holdfast

def pay(sum):
    with open("paid.txt", "a") as book:
        book.write(f"{sum}\\n")
    if "die" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
    return "paid"

def work(run):
    log = run.state["log"]
    for turn in run.turns(limit=3):
        log.append(run.step("look", str, turn))
        if turn == 2:
            log.append(run.tool({"id": "c1", "name": "pay", "input": {"sum": 5}}, pay))

if __name__ == "__main__":
    with holdfast.open("store.db") as store:
        with store.session("job").run(state={"log": []}) as run:
            work(run)
"""


def test_a_killed_run_is_resumed(terminal):
    Path("agent.py").write_text(AGENT)
    command = [sys.executable, "agent.py", "die"]
    killed = subprocess.run(command, env=environment(terminal.folder), check=False)
    assert killed.returncode == -signal.SIGKILL
    [left] = terminal.good("abandoned --json").lines
    assert (left["session"], left["state"]) == ("job", "died")
    [call] = terminal.good("pending --json").lines
    assert (call["key"], call["name"], call["state"]) == ("c1", "pay", "in doubt")
    told = terminal.type("resume job agent:work --json").error
    assert (told["exit_code"], told["error"]) == (4, "InDoubt")
    assert "holdfast resolve" in told["hint"]
    terminal.good("resolve c1 --result '\"paid\"'")
    with process("resume", "job", "agent:work", "--json", folder=terminal.folder) as resumed:
        out, err = resumed.communicate()
    assert resumed.returncode == 0, err
    assert '"status":"completed"' in out
    assert terminal.good("state --json").one == {"log": ["1", "2", "paid", "3"]}
    assert Path("paid.txt").read_text() == "5\n", "once"
    assert terminal.good("abandoned --halted --json").lines == []
    assert terminal.type("resume job agent:work --json").error["exit_code"] == 2


@pytest.fixture
def left(terminal: Terminal) -> Terminal:
    worlds.left(terminal.path)
    Path("agent.py").write_text(
        "class Made:\n"
        "    @staticmethod\n"
        "    def waits(run):\n"
        "        for _ in run.turns(limit=1):\n"
        "            run.state['log'].append(run.wait_for('approval', {'sum': 5}))\n"
        "def pays(run):\n"
        "    for turn in run.turns(limit=3):\n"
        "        run.state['log'].append(turn)\n"
        "        if turn == 2:\n"
        "            call = {'id': 'c1', 'name': 'pay', 'input': {'sum': 5}}\n"
        "            run.state['log'].append(run.tool(call, lambda sum: sum))\n"
        "def fails(run):\n"
        "    raise OSError(2, 'no such thing')\n"
        "def stops(run):\n"
        "    raise KeyboardInterrupt\n"
        "number = 5\n"
        "async def later(run):\n"
        "    pays(run)\n"
        "def bit_by_bit(run):\n"
        "    yield pays(run)\n"
        "async def both(run):\n"
        "    yield pays(run)\n"
        "class Lazy:\n"
        "    async def __call__(self, run):\n"
        "        pays(run)\n"
        "lazy = Lazy()\n"
        "hidden = lambda run: later(run)\n"
    )
    Path("torn.py").write_text("def pays(run)\n")
    Path("poor.py").write_text("import no_such_module_anywhere\n")
    Path("angry.py").write_text("raise RuntimeError('not today')\n")
    return terminal


@pytest.mark.parametrize(
    ("how", "log"),
    [("--result 4", [1, 2, 4, 3]), ("--rerun", [1, 2, 5, 3]), ("--skip", [1, 2, None, 3])],
)
def test_resolved(left, how, log):
    """It is decided once; then the run goes on with that."""
    told = left.good(f"resolve c1 -s job {how}")
    assert "final" in told.err
    for other in ("--result 7", "--rerun", "--skip"):
        ended = left.type(f"resolve c1 -s job {other} --json")
        assert ended.error["exit_code"] == 4
    assert [row["session"] for row in left.good("pending --json").lines] == ["ask"]
    left.good("resume job agent:pays")
    assert left.good("state -s job --json").one == {"log": log}


@pytest.mark.parametrize(
    ("typed", "meant"),
    [(["false"], False), (["[1,2]"], [1, 2]), (["null"], None), (['"5"'], "5"),
     (["--text", "no"], "no"), (["--text", "5"], "5"), (["--text", '"'], '"')],
)  # fmt: skip
def test_answered(left, typed, meant):
    told = left("answer", "-s", "ask", "approval", *typed)
    shown = jsons.dumps(meant, separators=(",", ":"))
    assert (told.code, told.out) == (0, f"ask: approval: {shown}; the run can be resumed\n")
    assert left("answer", "-s", "ask", "approval", "5", "--json").error["exit_code"] == 4
    assert left.good("resume ask agent:Made.waits --json").one["status"] == "completed"
    assert left.good("state -s ask --json").one == {"log": [meant]}


@pytest.mark.parametrize("typed", ["no", "False", "yes, do it", "", "{", "it's", "[" * 9_999])
def test_an_answer_that_is_no_json_is_refused(left, typed):
    """Before anything is written: as text it would be true, whatever it says."""
    before = left.good("pending -s ask --json").lines
    told = left("answer", "-s", "ask", "approval", typed, "--json").error
    assert (told["exit_code"], told["error"]) == (2, "InvalidRequest")
    assert "false" in told["hint"]
    assert "--text" in told["hint"]
    assert left.good("pending -s ask --json").lines == before
    quoted = told["hint"].partition("quotes: ")[2].removesuffix(", or give --text")
    left.good(f"answer -s ask approval {quoted}")
    left.good("resume ask agent:Made.waits")
    assert left.good("state -s ask --json").one == {"log": [typed]}


HOW = {
    "died": "died (process ",
    "failed": "failed, attempt 1: ValueError: no such flight",
    "halted": "was halted, attempt 1: enough for today",
    "in doubt": "stopped at a call in doubt, attempt 1.",
    "waiting": "waits for an answer, attempt 1.",
    "over budget": "was halted, attempt 1: over budget: $0.5 of $0.25 spent",
}


def test_six_ways_to_leave_a_run(terminal):
    with holdfast.open("store.db") as store:
        left = leave_all(store)
    told = {each["session"]: each for each in terminal.good("abandoned --halted --json").lines}
    listed = terminal.good("abandoned --halted").out
    for name, (state, reason) in left.items():
        run = terminal.good(f"resume '{name}' --json").one["run"]
        assert (run["state"], run["reason"]) == (state, reason)
        assert told[name] == run
        says = terminal.good(f"resume '{name}'").out
        assert f"Run {run['run']} {HOW[name]}" in says
        assert f"run {run['run']} {HOW[name].rstrip('.')}" in listed
        assert all(other not in says for other in HOW.values() if other != HOW[name])


def test_nothing_is_asked_for_that_was_answered(terminal):
    with holdfast.open("store.db") as store:
        leave_all(store)
    assert "session.answer('approval'" in terminal.good("resume waiting").out
    terminal.good("answer approval true -s waiting")
    assert "session.answer" not in terminal.good("resume waiting").out


def test_still_waiting(left):
    """Resumed without its answer, a run halts again, and that is no error."""
    ended = left.good("resume ask agent:Made.waits")
    assert "halted" in ended.out
    assert [row["state"] for row in left.good("pending -s ask --json").lines] == ["waiting"]


@pytest.mark.parametrize(
    ("target", "code", "words"),
    [("agent", 2, "MODULE:FUNCTION"), (":pays", 2, "MODULE:FUNCTION"), ("agent:", 2, "MODULE"),
     ("agent:none", 2, "agent has no 'none'"), ("agent:number", 2, "not a function"),
     ("agent:Made.none", 2, "has no"), ("nowhere:pays", 2, "no module 'nowhere'"),
     ("torn:pays", 2, "SyntaxError"), ("poor:pays", 2, "no_such_module_anywhere"),
     ("angry:pays", 2, "not today"), (".agent:pays", 2, "cannot be imported"),
     ("agent:fails", 1, "no such thing"), ("agent:stops", 130, "")],
)  # fmt: skip
def test_what_cannot_be_resumed(left, target, code, words):
    """Is told in a line or two, and the run can still be resumed."""
    ended = left("resume", "ask", target)
    assert (ended.code, ended.out) == (code, "")
    assert words in ended.err
    told = [line for line in ended.err.splitlines() if not line.startswith("Resuming")]
    assert len(told) <= 2
    left.good("answer approval 1 -s ask")
    left.good("resume ask agent:Made.waits")


@pytest.mark.parametrize("name", ["later", "bit_by_bit", "both", "lazy", "hidden"])
def test_what_a_call_does_not_run_is_refused(left, name):
    """As one that is async: the run is not taken for completed, and can be resumed."""
    before = left.good("resume ask --json").one
    told = left.type(f"resume ask agent:{name}")
    assert (told.code, told.out) == (2, "")
    assert "is async or a generator" in told.err
    assert "asyncio.run" in told.err
    assert ("Resuming" in told.err) == (name == "hidden"), "the others are refused before"
    after = left.good("resume ask --json").one
    assert after["head"]["status"] != "completed"
    if name != "hidden":
        assert after == before
    left.good("answer approval 1 -s ask")
    left.good("resume ask agent:Made.waits")


def test_a_session_that_somebody_runs(left):
    with left.store() as store, store.session("busy").run(state={}) as run:
        for _ in run.turns(limit=1):
            told = left.type("resume busy agent:pays --json").error
    assert (told["exit_code"], told["error"]) == (4, "SessionBusy")
    assert str(os.getpid()) in told["message"]


def test_nothing_in_a_state_steers_a_terminal(terminal):
    """Colours are ours; what else a message, a label or a name holds is shown, not obeyed."""
    hostile = "\x1b]0;title\x07\x1b[2J\x9b31m\u202edetrever\r\x08 \x1b[31mred"
    with terminal.store() as store:
        session = store.session(f"s{hostile}")
        session.save({"messages": []})
        session.append("messages", {"role": "user", "content": hostile}, label=hostile)
    for words in (["log"], ["show"], ["diff", "@~1"], ["sessions"], ["state"], ["search", "title"]):
        found = terminal(*words)
        assert found.code == 0, found
        rest = re.sub(r"\x1b\[((0|1|2|22|3[1-6]);?)+m", "", found.out + found.err)
        assert not {c for c in rest if unicodedata.category(c) in ("Cc", "Cf")} - {"\n", "\t"}
    assert jsons.loads(terminal("state").out)["messages"][0]["content"] == hostile


def test_json_steers_no_terminal(terminal):
    """JSON lets DEL, C1 controls and bidirectional overrides through as they are."""
    hostile = "\x7f\x9b31m\x85\u202e\u2066\u200f\u061c\u2069"
    with terminal.store() as store:
        session = store.session(f"s{hostile}", agent=hostile)
        session.save({"messages": [{"role": "user", "content": hostile}]}, label=hostile)
        session.append("messages", {hostile: hostile}, meta={hostile: hostile}, key=hostile)
    lines = ["log", "show", "diff @~1", "sessions", "state", "operations", "search 31m", "stats",
             "blame messages", "verify", "prune --all --keep-last 1 --dry-run"]  # fmt: skip
    found = [terminal.good(f"{line} --json").out for line in lines]
    found.append(terminal("show", hostile * 2, "--json").err)
    for out in found:
        assert not {c for c in out if unicodedata.category(c) in ("Cc", "Cf")} - {"\n"}
    assert jsons.loads(found[4])["messages"][1] == {hostile: hostile}


def test_an_import_may_take_more_memory_on_request(terminal):
    lines = [
        {"holdfast": "export", "format": 1, "sessions": []},
        {"in": f"blobs/00/{'0' * 64}.json", "is": [[]] * 9000},
    ]
    text = "".join(jsons.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    (terminal.folder / "x.jsonl").write_text(text)
    ended = terminal.type("import x.jsonl --memory 300000")
    assert ended.code == holdfast.TooBig.exit_code
    assert "--memory" in ended.err
    terminal.good("import x.jsonl")
