"""Every command as it looks: what it prints, where, and how it ends.

`pytest tests/cli/test_snapshots.py --update-snapshots` writes the transcripts anew.
"""

from __future__ import annotations

import difflib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest

from holdfast.cli.main import COMMANDS, FAMILY
from holdfast.storage.sqlite.backend import SqliteBackend
from holdfast.web import server
from tests.support import example_stores as worlds
from tests.support.terminal import Ended, Normal, Terminal, environment, foreseeable

SNAPSHOTS = Path(__file__).with_name("snapshots")
STATE = '{"messages": [{"role": "user", "content": "Hi"}], "seal": {"$bytes": "AAE="}}'


class Scribe:
    """Types commands, and writes down what came."""

    def __init__(self, terminal: Terminal, patch: pytest.MonkeyPatch) -> None:
        self.terminal, self.patch = terminal, patch
        self._normal = Normal(terminal.folder)
        self._written: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._written)

    def remark(self, text: str) -> None:
        self._written.append(f"# {text}\n\n")

    def type(self, *lines: str, stdin: str | None = None) -> None:
        for line in lines:
            ended = self.terminal.type(line, stdin)
            typed = f"$ holdfast {line}" + (f" <<< {shlex.quote(stdin)}" if stdin else "")
            self._write(typed, ended)

    def both(self, *lines: str) -> None:
        """For people, and as JSON; for what changes nothing."""
        for line in lines:
            self.type(line, f"{line} --json")

    def _write(self, typed: str, ended: Ended) -> None:
        self._written.append(written(self._normal, typed, ended))


def written(normal: Normal, typed: str, ended: Ended) -> str:
    """A command, what it printed, after "!" what it said on stderr, and its exit code."""
    out = ended.out if "holdfast doctor" not in typed else of_any_machine(ended.out)
    shown = [normal(typed).rstrip()]
    shown += [f"  {line}".rstrip() for line in normal(out).splitlines()]
    shown += [f"! {line}".rstrip() for line in normal(ended.err).splitlines()]
    return "\n".join([*shown, f"[{ended.code}]", "", ""])


def of_any_machine(findings: str) -> str:
    """What doctor found, without what differs from machine to machine."""
    found = re.sub(r"(?m)^.*\b(disk|rights)\b.*\n(?: +Do: .*\n)?", "", findings)
    found = re.sub(r"(?m)(python|sqlite|holdfast|clock): .*$", r"\1: <…>", found)
    mine = r'("about":"(?:python|sqlite|holdfast|clock)","how":"ok","what"):"[^"]*"'
    return re.sub(mine, r'\1:"<…>"', found)


# -- what is typed ---------------------------------------------------------------------------------


def begin(scribe: Scribe) -> None:
    scribe.both("init", "init -S deep/store.db", "init -S files:.", "completion zsh")
    scribe.both("completion tcsh")
    scribe.type("", "--version", "logg", "logg --json", "quark")
    (scribe.terminal.folder / "full").mkdir()
    (scribe.terminal.folder / "full" / "file").touch()
    scribe.both("demo --folder full")
    scribe.both("doctor", "doctor -S none.db")
    worlds.trip("torn.db")
    worlds.spoil("torn.db", 8)
    scribe.both("doctor -S torn.db")


def look(scribe: Scribe) -> None:
    worlds.trip("store.db")
    scribe.both("sessions", "sessions --status completed", "sessions --since yesterday")
    scribe.both("log", "log trip -n 2", "log tirp")
    scribe.both("transcript trip", "transcript trip-b --markdown", "transcript tirp")
    scribe.both("show edited -s trip", "show key:external-1 -s trip", "show start")
    scribe.both("state start plan -s trip", "state start plan.price -s trip")
    scribe.both("diff trip trip-b", "show trip", "log trip -s trip-b", "log store.db")
    scribe.both("diff start edited -s trip", "diff @ -s trip", "diff start nowhere -s trip")
    scribe.both(
        "blame plan.budget -s trip-b", "blame messages.0.content -s trip", "blame x -s trip"
    )
    scribe.both("search seats", "search --tag good", "search nothing", "search --before x")
    scribe.both("usage", "usage --by model -s trip", "usage --by day --since 2000-01-01")
    scribe.both("usage --agent nobody", "usage -s tirp")
    scribe.both("search TRIP", "search SEATS --case-sensitive", "search seats -s none")
    scribe.both("index", "search seats -s trip", "index --drop", "index -S none.db")
    scribe.both("stats", "stats -S none.db")
    for flag in ("", " --json"):
        scribe.remark("a save lands meanwhile, and is rewound")
        _lands(scribe)
        scribe.type(f"watch --all --seconds 0.01{flag}")
    scribe.both("watch -s trap", "watch", "watch trip --all")
    _serves(scribe)
    scribe.both("serve", "serve --read-only", "serve --host 0.0.0.0", "serve --auth-token short")
    scribe.both("log -S none.db", "sessions -S none.db")
    scribe.remark("an empty store")
    scribe.type("init -S empty.db")
    scribe.both("log -S empty.db", "sessions -S empty.db", "show -S empty.db")


def _lands(scribe: Scribe) -> None:
    wait = SqliteBackend.wait

    def landing(backend: SqliteBackend, seconds: float) -> None:
        scribe.patch.setattr(SqliteBackend, "wait", wait)
        with scribe.terminal.store() as store:
            store.session("trip-b").save({"n": 1})
            store.session("trip-b").rewind("@~1")

    scribe.patch.setattr(SqliteBackend, "wait", landing)


def _serves(scribe: Scribe) -> None:
    """At a port that nobody has, with a token that everybody knows, and not for long."""
    sock = Mock(**{"getsockname.return_value": ("127.0.0.1", 7460)})
    scribe.patch.setattr(server, "listen", lambda host, port: nullcontext(sock))
    scribe.patch.setattr(server, "server_of", lambda served: Mock())
    scribe.patch.setattr("secrets.token_urlsafe", lambda count: "a-token-for-this-time")


def change(scribe: Scribe) -> None:
    (scribe.terminal.folder / "state.json").write_text(STATE)
    scribe.type("save chat state.json --label first -t a -t b --agent greeter")
    scribe.type("save chat --json --status completed --key k1", stdin='{"n": 1}')
    scribe.type("save chat --key k1", stdin='{"n": 2}')
    scribe.type("save chat", "save chat --json", stdin='{"n": ')
    scribe.type("save chat", stdin='{"n": {"$byte": ""}}')
    scribe.type("save chat nowhere.json", "save chat --status done")
    scribe.both("save state.json", "save")
    scribe.type(
        "fork first side",
        "fork first side",
        "fork first side --json",
        "fork first side-2 --json -s chat",
    )
    scribe.type("rewind first -s chat", "rewind @~0 -s side --json")
    scribe.type("rewind @~9 -s chat", "rewind @~9 -s chat --json")
    scribe.type("tag @ keep -s chat", "tag @ more --json -s chat", "tag @ -s chat")
    scribe.type("tag nowhere x -s chat --json")
    scribe.type("label @ second -s chat", "label @ third --json -s chat", "label @ x -s chut")
    scribe.type("label @ x -s chut --json")
    scribe.both("operations -s chat", "operations")
    scribe.type("undo -s chat", "undo --json -s chat", "redo -s chat", "redo --json -s chat")
    scribe.type("redo -s chat", "redo -s chat --json", "undo", "undo -s chut --json")
    scribe.both("delete -s side")
    scribe.type("delete -s side --yes", "delete -s side-2 --yes --json", "delete", "delete @ --yes")
    scribe.type("undo -s side", "log side", "--store store.db undo -s side")
    scribe.type("untag @ keep -s chat", "untag @ keep -s chat", "untag @ keep -s chat --json")
    scribe.type("untag @ more --json -s chat", "unlabel @ -s chat", "unlabel @ -s chat")
    scribe.type("unlabel @ -s chat --json", "undo -s chat", "unlabel @ --json -s chat")
    scribe.type("rename side aside", "undo -s aside", "rename side chat", "rename side chat --json")
    scribe.type("rename side aside --json", "rename aside side")
    scribe.type("adopt side", "adopt side --json", "adopt chat", "adopt chat --json")
    scribe.type("undo -s chat", "log chat --limit 3")
    scribe.type("save chat", stdin='{"n": 2}')
    scribe.type("delete @ --yes -s chat")


def runs(scribe: Scribe) -> None:
    worlds.left("store.db")
    (scribe.terminal.folder / "agent.py").write_text(
        "def goes_on(run):\n"
        "    for turn in run.turns(limit=3):\n"
        "        run.state['log'].append(turn)\n"
        "def fails(run):\n"
        "    raise ValueError('no such flight')\n"
    )
    scribe.both("pending", "pending -s job", "pending -s jab", "abandoned", "abandoned --halted")
    scribe.both("abandoned -S none.db", "resume job", "resume ask", "resume jab")
    scribe.both("resolve c1 -s job", "resolve c2 -s job --skip", "resolve c1 -s job --result yes")
    scribe.type("resolve c1 -s job --skip", "resolve c1 -s job --rerun")
    scribe.remark("another one, whose result is known")
    worlds.left("other.db")
    scribe.type("""resolve pay -s job --result '{"paid": 5}' --json -S other.db""")
    scribe.both("answer price 5 -s ask")
    scribe.both("answer approval no -s ask")
    scribe.type("answer approval true -s ask", "answer approval no --text -s ask")
    scribe.type("answer approval '[1, 2]' -s ask --json -S other.db")
    scribe.both("resume ask agent:fails", "resume ask agent:nothing", "resume ask nothing:at_all")
    scribe.both("resume agent:fails", "resume -s ask agent.py:fails")
    scribe.remark("its budget is spent, and then a larger one is given")
    scribe.type("resume ask agent:goes_on --turns 1", "abandoned --halted", "resume ask")
    scribe.type("resume ask agent:goes_on --cost -1 --tokens 5")
    scribe.type("resume ask agent:goes_on", "resume ask agent:goes_on --json -S other.db")
    scribe.type("resume ask agent:goes_on", "pending -s ask", "abandoned --halted -S other.db")


def keep(scribe: Scribe) -> None:
    worlds.long("store.db")
    scribe.both("verify", "verify --read-data", "verify -s nots")
    scribe.both("repair", "repair -S none.db")
    scribe.both("prune", "prune --all --keep-last 1 --dry-run", "prune --all --keep-last 1", "gc")
    scribe.both("gc --all")
    scribe.type("prune --keep-last 1 --yes", "undo", "prune --all --keep-last 1 --yes --json")
    scribe.type("undo --prune", "undo --prune", "prune --all --keep-last 1 --yes")
    scribe.type("undo --prune --json", "undo --prune --json", "prune --all --keep-last 1 --yes")
    scribe.both("prune --all --keep-last 5 --yes", "prune --all --max-age soon")
    scribe.type("gc --all --yes", "gc --all --yes --json", "gc --all --erase --yes")
    scribe.type(
        "backup copy.db", "backup copy-2.db --json", "backup copy.db", "backup copy.db --json"
    )
    scribe.remark("a flipped bit in the head's record")
    worlds.trip("torn.db")
    worlds.spoil("torn.db", 8)
    scribe.both(*[f"{line} -S torn.db" for line in (
        "verify", "sessions", "log trip", "show -s trip", "state -s trip", "show @~1 -s trip",
        "diff start -s trip", "stats",
    )])  # fmt: skip
    scribe.type("backup torn-2.db -S torn.db", "backup torn-3.db -S torn.db --json")
    scribe.type(
        "repair -S torn.db", "verify -S torn.db", "repair -S torn.db --json", "log trip -S torn.db"
    )


def move(scribe: Scribe) -> None:
    worlds.trip("store.db")
    scribe.type("copy files:copy", "copy files:copy", "copy files:copy-2 -s trip-b --json")
    scribe.both("copy files:copy -s trap", "copy nowhere/copy.db")
    scribe.type("export trip.jsonl", "export trip-b.jsonl -s trip-b --json", "export folder")
    scribe.both("export trip.jsonl", "export")
    scribe.type("export --html trip", "export all.html --html trip --html trip-b --json")
    scribe.both("export --html trip", "export --html trap", "export --html trip -s trip-b")
    scribe.type(
        "import trip.jsonl -S new.db", "import trip.jsonl -S new.db --json", "import nothing"
    )
    (scribe.terminal.folder / "strange").write_text("?")
    scribe.both("import store.db -S new.db")
    scribe.both("import strange", "import strange -f export", "import trip.jsonl -s trap")
    chat = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}
    (scribe.terminal.folder / "chat.json").write_text(json.dumps(chat))
    scribe.type("import chat.json -S chat.db", "log -S chat.db", "import chat.json -s x")


SCRIPTS: dict[str, Callable[[Scribe], None]] = {
    "begin": begin, "look": look, "change": change, "runs": runs, "keep": keep, "move": move,
}  # fmt: skip


def test_every_family_has_a_script():
    assert [*SCRIPTS] == [title.lower() for title in COMMANDS]


@pytest.mark.parametrize("family", SCRIPTS)
def test_transcript(family, terminal, monkeypatch, request):
    foreseeable(monkeypatch)
    scribe = Scribe(terminal, monkeypatch)
    SCRIPTS[family](scribe)
    compare(SNAPSHOTS / f"{family}.txt", scribe.text, update(request))


STAGES = (
    "Then its process is", "Every step that was acknowledged", "does not book twice",
    "that is what we answer", "books nothing twice", "Go back", "What if it had gone another way",
    "the difference between the two", "When did the budget change", "that can be checked",
    "Try next",
)  # fmt: skip


def test_the_demo(tmp_path, request):
    """In a process of its own, in a folder of its own: what a newcomer sees."""
    command = [sys.executable, "-m", "holdfast", "demo", "--quick"]
    env = environment(tmp_path)
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    ended = Ended(done.returncode, done.stdout, done.stderr)
    assert ended.code == 0, ended.err
    places = [ended.out.index(stage) for stage in STAGES]
    assert places == sorted(places)
    assert not list(tmp_path.iterdir())
    played = re.sub(r"\S*holdfast-demo-\w+", "<played>", ended.err)
    text = written(Normal(tmp_path), "$ holdfast demo --quick", ended._replace(err=played))
    compare(SNAPSHOTS / "demo.txt", text, update(request))


def test_the_demo_can_be_kept(terminal):
    ended = terminal.good("demo --folder played --json")
    assert ended.one == {"folder": "played", "store": "played/agent.db"}
    [head] = terminal.good("log lisbon --store played/agent.db -n 1 --json").lines
    assert (head["status"], head["is_head"]) == ("completed", True)
    bookings = (terminal.folder / "played" / "bookings.txt").read_text().splitlines()
    assert bookings == ["flight HF 204", "hotel Casa do Rio, 3 nights"]
    terminal.good("verify --read-data --store played/agent.db")


JSON_OF_ITS_OWN = {"demo"}  # which is told in test_the_demo_can_be_kept


def test_every_command_has_a_transcript():
    """Of success and of failure, for people and as JSON."""
    seen: set[tuple[str, bool, bool]] = set()
    for path in SNAPSHOTS.glob("*.txt"):
        for scene in path.read_text(encoding="utf-8").split("\n\n$ "):
            typed = re.match(r"(?:\$ )?holdfast (.*)", scene)
            if typed is not None:
                words = shlex.split(typed[1].partition(" <<< ")[0])
                [name] = [word for word in words if word in FAMILY][:1] or [""]
                seen.add((name, "--json" in words, "\n[0]\n" in f"{scene}\n"))
    wanted = {(name, json, good) for name in FAMILY for json in (0, 1) for good in (0, 1)}
    assert wanted - seen == {(name, True, True) for name in JSON_OF_ITS_OWN}


def update(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-snapshots"))


def compare(path: Path, text: str, update: bool) -> None:
    if update:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    expected = path.read_text(encoding="utf-8")
    if text != expected:
        lines = difflib.unified_diff(expected.splitlines(), text.splitlines(), "expected", "found")
        pytest.fail("\n".join([f"{path.name} differs:", *lines]), pytrace=False)
