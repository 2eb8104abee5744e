"""docs/json.md: every shape has the keys and types that the page lists, and no others."""

import datetime as dt
import json
import os
import re
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.request import HTTPCookieProcessor, build_opener
from uuid import UUID

import apsw
import pytest

import holdfast
from holdfast import json as holdfast_json
from holdfast.cli.main import FAMILY
from holdfast.format import portable, values
from tests.support.terminal import elsewhere

PAGE = (Path(__file__).parents[2] / "docs/json.md").read_text("utf-8")
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")
ROW = re.compile(r"^\| `(\w+)` \| ([^|]+?) \|(.*)\|$", re.MULTILINE)
KINDS = {"text": str, "integer": int, "number": int | float, "boolean": bool}


def listed() -> dict[str, dict[str, tuple[str, bool]]]:
    """Of each shape the type of each key, and whether it has to be there."""
    found: dict[str, dict[str, tuple[str, bool]]] = {}
    for part in PAGE.split("\n### ")[1:]:
        name, _, text = part.partition("\n")
        rows = {m[1]: (m[2], "may be missing" not in m[3]) for m in ROW.finditer(text)}
        found[name] = (found["checkpoint"] if name == "log line" else {}) | rows
    return found


SHAPES = listed()


def wrong(kind: str, value: Any, where: str) -> list[str]:
    """Where a value is not of the type that the page says."""
    if kind.endswith(" or null"):
        return [] if value is None else wrong(kind.removesuffix(" or null"), value, where)
    if kind.startswith("list of "):
        if not isinstance(value, list):
            return [f"{where}: {value!r} is no list"]
        each = kind.removeprefix("list of ")
        return [w for n, v in enumerate(value) for w in wrong(each, v, f"{where}[{n}]")]
    if kind.startswith("map of "):
        if not isinstance(value, dict):
            return [f"{where}: {value!r} is no object"]
        each = kind.removeprefix("map of ")
        return [w for k, v in value.items() for w in wrong(each, v, f"{where}.{k}")]
    if kind == "value":
        return []
    if kind == "time":
        return [] if TIME.fullmatch(value) else [f"{where}: {value!r} is no time"]
    if kind in KINDS:
        right = isinstance(value, KINDS[kind]) and (
            kind == "boolean" or not isinstance(value, bool)
        )
        return [] if right else [f"{where}: {value!r} is no {kind}"]
    link = re.fullmatch(r"\[([\w ]+)\]\(#[\w-]+\)", kind)
    assert link, f"the page has an unknown type: {kind}"
    return wrong_shape(link[1], value, where)


def wrong_shape(name: str, value: Any, where: str = "") -> list[str]:
    where = where or name
    if not isinstance(value, dict):
        return [f"{where}: {value!r} is no object"]
    keys = SHAPES[name]
    if name in {"checkpoint", "log line"} and value.get("damaged") is not None:
        first = ("id", "session", "seq", "damaged", "is_head", "forks")
        keys = {key: keys[key] for key in first if key in keys}
    missing = [key for key, (_, needed) in keys.items() if needed and key not in value]
    found = [f"{where}: no {key!r}" for key in missing]
    found += [f"{where}: {key!r} is not listed" for key in value if key not in keys]
    return found + [
        w for key in value if key in keys for w in wrong(keys[key][0], value[key], f"{where}.{key}")
    ]


# -- a store in which there is something of everything ------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three sessions: one with branches, one whose run was killed, one that waits."""
    folder = tmp_path_factory.mktemp("json")
    with holdfast.open(folder / "agent.db") as store:
        trip = store.session("trip", agent="planner")
        call = holdfast.ToolCall("c1", "book", {"nights": 3})
        trip.save({"plan": {"budget": 900}, "messages": []}, label="asked", meta={"user": b"\x00"})
        trip.patch(set={("plan", "budget"): 850}, tags=["plan"], pending=[call], key="k1",
                   usage=holdfast.Usage(9, 1, cost=0.5), trigger="tool", hint="go on")  # fmt: skip
        trip.append("messages", "one", status="failed", reason="because")
        trip.patch(drop=["messages"])
        trip.rewind("tag:plan")
        trip.fork("trip-2").save({"plan": None})
        store.session("talk").save({"messages": [{"role": "user", "content": "Hi"}]})
        for n in range(4):
            store.session("old").save({"n": n})
        with store.session("waiting").run() as run:
            run.wait_for("approval", prompt="Buy?")
        with store.session("worker", parent="trip").run() as run:
            run.tool({"id": "c2", "name": "add", "input": {"a": 1}}, lambda a: a + 1)
            run.add_usage(tokens=5, cost=0.1)
        with store.session("spent").run(budget=holdfast.Budget(turns=0)) as run:
            [*run.turns()]
    killed = (
        "import holdfast, os, signal\n"
        "with holdfast.open('agent.db').session('killed').run() as run:\n"
        "    call = {'id': 'c7', 'name': 'book', 'input': {'nights': 2}}\n"
        "    run.tool(call, lambda nights: os.kill(os.getpid(), signal.SIGKILL))\n"
    )
    subprocess.run([sys.executable, "-c", killed], cwd=folder, check=False)
    (folder / "goes_on.py").write_text("def agent(run):\n    run.state['done'] = True\n")
    (folder / "state.json").write_text('{"n": 1}')
    with holdfast.open(folder / "hurt.db") as store:
        store.session("hurt").save({"n": 1})
        store.session("hurt").save({"n": 2})
    disk = apsw.Connection(str(folder / "hurt.db"))
    newest = "(SELECT max(pos) FROM checkpoints)"
    disk.execute(f"UPDATE checkpoints SET body = zeroblob(80) WHERE pos = {newest}")
    disk.close()
    return folder


def say(folder: Path, *words: str, store: str = "agent.db") -> tuple[int, list[Any], str]:
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", *words, "--json"],
        cwd=folder, env=os.environ | {"HOLDFAST_STORE": store, "PYTHONIOENCODING": "utf-8"},
        stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", timeout=120, check=False,
    )  # fmt: skip
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


# What to type, in this order, and how many lines have to come at least.
TYPED: list[tuple[str, int]] = [
    ("init", 1), ("doctor", 3), ("completion bash", 1), ("demo --quick", 1),
    ("sessions", 5), ("log", 5), ("log --all", 5), ("show asked -s trip", 1),
    ("transcript talk", 1),
    ("state @ -s trip", 1), ("diff asked @ -s trip", 1), ("diff @ asked -s trip", 1),
    ("blame plan.budget -s trip", 1), ("blame n step:1 -s old", 1),
    ("search --tag plan", 1), ("search a -n 1", 1), ("index", 1), ("usage", 1),
    ("usage --by model -s trip", 1), ("stats", 1),
    ("save trip-3 state.json", 1), ("fork asked trip-4 -s trip", 1), ("adopt trip-4", 1),
    ("rename trip-3 trip-5", 1),
    ("undo -s trip", 1), ("rewind asked -s trip", 1),
    ("undo -s trip", 1), ("redo -s trip", 1), ("operations -s trip", 3), ("tag @ new -s trip", 1),
    ("label @ new -s trip", 1), ("untag @ new -s trip", 1),
    ("unlabel @ -s trip", 1), ("delete step:1 -s old --yes", 1), ("delete -s trip-4 --yes", 1),
    ("abandoned --halted", 3), ("resume killed", 1), ("resume trip", 1), ("pending", 2),
    ("resolve c7 --result 3 -s killed", 1), ("answer approval true -s waiting", 1),
    ("resume waiting goes_on:agent", 1),
    ("verify", 1), ("verify --read-data -s trip", 1), ("prune --all --keep-last 2 --dry-run", 1),
    ("prune --all --keep-last 2 --yes", 1), ("undo --prune", 1),
    ("prune --all --keep-last 2 --yes", 1), ("backup copy.db", 1), ("gc --all --yes", 1),
    ("copy files:copied", 1), ("export out.jsonl", 1), ("import out.jsonl", 1),
]  # fmt: skip


def promised() -> dict[str, list[str]]:
    """The shapes that each command may print, by the page."""
    rows = re.findall(r"^\| `(\w+)` \| (?:an?|one) (.*) \|$", PAGE, re.MULTILINE)
    links = {command: re.findall(r"\[[\w ]+\]\(#([\w-]+)\)", text) for command, text in rows}
    return {command: [link.replace("-", " ") for link in found] for command, found in links.items()}


def test_what_commands_print(folder):
    may = promised()
    assert may.keys() == set(FAMILY)
    told = []
    said = elsewhere([f"{typed} --store agent.db --json" for typed, _ in TYPED], folder)
    for (typed, least), ended in zip(TYPED, said, strict=True):
        assert ended.code == 0, f"{typed}: {ended.err}"
        assert len(ended.lines) >= least, typed
        for line in ended.lines:
            found = [[] if s == "values" else wrong_shape(s, line) for s in may[typed.split()[0]]]
            told += [f"{typed}: {min(found, key=len)}"] * ([] not in found)
    assert told == []
    assert {typed.split()[0] for typed, _ in TYPED} | {"watch", "repair", "serve"} == may.keys()


def test_what_watch_prints(folder):
    [shape] = promised()["watch"]
    lines: list[dict[str, Any]] = []
    both = Event()

    def read(out: Any) -> None:
        for line in out:
            lines.append(json.loads(line))
            if {key for line in lines for key in line} >= {"checkpoint", "operation"}:
                both.set()

    command = [sys.executable, "-m", "holdfast", "--store", "agent.db", "watch", "--all", "--json"]
    with (
        subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, encoding="utf-8") as child,
        holdfast.open(folder / "agent.db") as store,
    ):
        reader = Thread(target=read, args=(child.stdout,))
        reader.start()
        seen = store.session("seen")
        while not both.wait(0.1):  # it tells what lands after it has begun, whenever that is
            assert child.poll() is None
            seen.save({})
            seen.tag("@", "seen")
        child.kill()
        reader.join()
    assert [w for line in lines for w in wrong_shape(shape, line)] == []


def test_what_serve_prints(folder):
    [shape] = promised()["serve"]
    command = [sys.executable, "-m", "holdfast", "serve", "--port", "0", "--json"]
    with subprocess.Popen(
        [*command, "--store", "agent.db"], cwd=folder, stdout=subprocess.PIPE, encoding="utf-8"
    ) as child:
        try:
            assert child.stdout is not None
            serving = json.loads(child.stdout.readline())
            with build_opener(HTTPCookieProcessor()).open(serving["url"]) as page:
                answered = page.url
        finally:
            child.terminate()
    assert wrong_shape(shape, serving) == []
    assert answered == serving["url"].partition("?")[0]  # a cookie has the token now


def test_damage(folder):
    code, [report], _ = say(folder, "verify", store="hurt.db")
    assert code == 5
    assert report["problems"]
    assert wrong_shape("report", report) == []
    _, lines, _ = say(folder, "log", store="hurt.db")
    assert any(line["damaged"] for line in lines)
    assert [w for line in lines for w in wrong_shape("log line", line)] == []
    code, [repaired], _ = say(folder, "repair", store="hurt.db")
    assert code == 5
    assert wrong_shape(promised()["repair"][0], repaired) == []


def test_errors(folder):
    for words in (["show", "nothing"], ["sho"], ["log", "--limit", "x"], ["gc"]):
        code, lines, errors = say(folder, *words)
        error = json.loads(errors)
        assert (lines, error["exit_code"]) == ([], code)
        assert wrong_shape("error", error) == []


def test_shapes_that_no_command_prints(folder):
    with holdfast.open(folder / "agent.db") as store:
        [call] = store.session("worker").tool_calls()
        assert wrong_shape("made call", holdfast_json.made_call(call)) == []
        totals = holdfast_json.totals(store.session("trip").usage())
        assert totals["children"]["tokens"]
        assert wrong_shape("totals", totals) == []
        assert wrong_shape("totals", holdfast_json.totals(store.session("worker").usage())) == []


def test_every_shape_is_reached():
    linked = {link.replace("-", " ") for link in re.findall(r"\]\(#([\w-]+)\)", PAGE)}
    assert {*SHAPES} <= linked | {"made call", "totals"}


@pytest.mark.parametrize(
    "change",
    [
        lambda shown: shown.pop("trigger"),
        lambda shown: shown.update(more=1),
        lambda shown: shown.update(step="1"),
        lambda shown: shown.update(seq=True),
        lambda shown: shown.update(created_at="2026-05-04"),
        lambda shown: shown["usage"].pop("cost"),
        lambda shown: shown["tags"].append(1),
        lambda shown: shown.update(damaged="so it is"),
    ],
)
def test_what_is_not_as_listed_is_noticed(change):
    with holdfast.open("memory:") as store:
        shown = holdfast_json.checkpoint(store.session("one").save({}))
    assert wrong_shape("checkpoint", shown) == []
    change(shown)
    assert wrong_shape("checkpoint", shown) != []


# -- values --------------------------------------------------------------------------------------

SAID = {
    "$bytes": b"hi", "$tuple": (1, 2), "$set": {1, 2}, "$frozenset": frozenset([1, 2]),
    "$dict": {1: "one", 2: "two"}, "$int": 2**70, "$str": "\ud800",
    "$datetime": dt.datetime(2026, 5, 4, 9, tzinfo=dt.UTC), "$date": dt.date(2026, 5, 4),
    "$time": dt.time(9, 30), "$timedelta": dt.timedelta(1, 30), "$decimal": Decimal("1.10"),
    "$uuid": UUID(int=7),
}  # fmt: skip


def test_tags():
    rows = re.findall(
        r"^\| `(\$\w+)`(?:, `(\$\w+)`)? \| .*? \| (?:`(.*)`)? ?\|$", PAGE, re.MULTILINE
    )
    examples = {tag: example for tag, _, example in rows if example}
    known = {name for name, _, _ in portable._TAGS.values()} | {"$bytes", "$float", "$ext", "$raw"}
    assert {tag for row in rows for tag in row[:2] if tag} == known
    assert holdfast_json.dumps(holdfast_json.value(float("nan"))) == examples.pop("$float")
    assert {
        tag: holdfast_json.dumps(holdfast_json.value(value)) for tag, value in SAID.items()
    } == examples
    for tag, value in SAID.items():
        assert values.decode(portable.from_json(json.loads(examples[tag]))) == value
    own = re.search(r"`(\{\"\$p.*?\})` is rendered as `(.*?)`", PAGE)
    assert own
    assert holdfast_json.dumps(holdfast_json.value(json.loads(own[1]))) == own[2]
