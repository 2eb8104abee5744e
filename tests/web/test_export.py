"""A session as one page: all that is in it, each message once; and only our own script runs."""

from __future__ import annotations

import base64
import itertools
import json
import re
import sys
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import apsw
import pytest

import holdfast
from holdfast import json as holdfast_json
from holdfast.errors import InvalidRequest, SessionNotFound, Unavailable
from holdfast.json import shared_values
from holdfast.web import export
from tests.format.test_layout import text as random_text

if TYPE_CHECKING:
    from collections.abc import Callable

STATIC = Path(export.__file__).parent / "static"
HOSTILE = "</script><script>alert(1)</script><!-- <script> ]]> & \u2028"


def data_of(page: str) -> Any:
    [text] = re.findall(
        r'<script type="application/json" id="exported">(.*?)</script>', page, re.DOTALL
    )
    return json.loads(text)


def unpacked(data: Any, packed: Any) -> Any:
    """As the page does it."""
    if isinstance(packed, list):
        return [unpacked(data, each) for each in packed]
    if not isinstance(packed, dict):
        return packed
    if "$at" in packed:
        return unpacked(data, data["pool"][packed["$at"]])
    if "$items" in packed:
        return [item_of(data, item) for item in items_of(data, "$items", packed)]
    if "$entries" in packed:
        pairs = items_of(data, "$entries", packed)
        return {key: item_of(data, item) for key, item in pairs}
    return {key: unpacked(data, each) for key, each in packed.items()}


def items_of(data: Any, kind: str, packed: Any) -> list[Any]:
    out: list[Any] = []
    for stream, first, count in packed[kind]:
        runs = data[kind][str(stream)]
        start, items = [run for run in runs if run[0] <= first][-1]
        assert len(items) >= first - start + count
        out += items[first - start :][:count]
    return out


def item_of(data: Any, item: Any) -> Any:
    return unpacked(data, item["$packed"]) if isinstance(item, dict) and "$packed" in item else item


def check_states(store: holdfast.Store, names: list[str]) -> Any:
    data = data_of(export.page(store, names))
    for name in names:
        session = store.session(name)
        for c in session.tree():
            wanted = json.loads(holdfast_json.dumps(holdfast_json.value(session.load(c.id))))
            found = unpacked(data, data["states"][c.id])
            assert json.dumps(found) == json.dumps(wanted)
    return data


def test_every_state_is_there_and_every_message_once(tmp_path):
    with holdfast.open(tmp_path / "a.db") as store:
        trip = store.session("trip")
        for n in range(120):
            trip.append(
                "messages", {"role": "user", "content": f"{n} {random_text(Random(n), 300)}"}
            )
        trip.patch(
            set={"plan": {"$price": 3, "raw": b"\0", "pair": (1, 2)}, "$top": 1, "notes": "n" * 500}
        )
        trip.rewind("@~40")
        trip.append("messages", "another way")
        messages = trip.load()["messages"]
        trip.save({"messages": [*messages[:3], "put between", *messages[3:]]})
        fork = trip.fork("fork", "@~50")
        fork.append("messages", "on its own")
        fork.save({7: "a key", "messages": [(), {1.5: None}]})
        page = export.page(store, ["trip", "fork"])
        data = check_states(store, ["trip", "fork"])
        for name in ("trip", "fork"):
            assert {c.id for c in store.session(name).tree()} <= data["changes"].keys()
        assert [row["id"] for row in data["logs"]["trip"]["items"]] == [
            c.id for c in trip.tree(newest_first=True)
        ]
    text = random_text(Random(77), 300)
    assert page.count(json.dumps(text, ensure_ascii=False)[1:-1]) <= 2  # as an item, and a change
    assert len(page) < 4 * len(json.dumps([data["pool"], data["$items"]])) + 400_000


def test_lists_and_dicts_of_every_layout(tmp_path):
    """Long and short, edited, shared by forks, and within each other."""
    rng = Random(4)
    with holdfast.open(tmp_path / "a.db", durability="normal") as store:
        session = store.session("s")
        state: dict[str, Any] = {
            "files": {f"${n}": random_text(rng, 300) for n in range(90)},
            "threads": [{"messages": [random_text(rng, 90) for _ in range(60)]} for _ in range(40)],
            "by name": {f"{n}": {"log": [random_text(rng, 90)] * 60} for n in range(60)},
            "numbers": [rng.random() for _ in range(2000)],
            "bytes": rng.randbytes(9000),
        }
        for n in range(40):
            state["files"][f"${rng.randrange(120)}"] = random_text(rng, 300)
            state["threads"][rng.randrange(40)]["messages"].append(random_text(rng, 90))
            state["threads"].insert(rng.randrange(40), {"messages": [n]})
            state["by name"][f"{rng.randrange(60)}"]["log"].append(f"{n}")
            state["numbers"].append(n)
            state["bytes"] += b"more"
            session.save(state)
        session.fork("fork", "@~20").patch(set={"z": 1})
        data = check_states(store, ["fork", "s"])
        assert len(data["pool"]) < 200
        assert sum(len(runs) for runs in data["$items"].values()) <= len(data["$items"]) + 5


def test_runs_of_items_are_joined():
    """In whatever order they are found."""
    for seed in range(50):
        rng, known = Random(seed), shared_values._Items()
        for _ in range(12):
            first = rng.randrange(40)
            stop = rng.randrange(first + 1, 42)
            while (gap := known.gap(first, stop)) is not None:
                known.add(gap[0], [n % 7 for n in range(*gap)])
                for n in range(*gap):
                    known.put(n, n)
            assert known.size(first, stop) == sum(n % 7 for n in range(first, stop))
            for run, after in itertools.pairwise(known.runs):
                assert run.stop < after.first
        for run in known.runs:
            assert run.items == [*range(run.first, run.stop)]


def work_of(function: Callable[[], object]) -> int:
    """How many calls Python makes: every step of a generator is one."""
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def exported(store: holdfast.Store) -> tuple[str, int]:
    """A page, and the work that it took."""
    pages: list[str] = []
    work = work_of(lambda: pages.append(export.page(store, ["s"])))
    return pages[0], work


def check_linear(work: dict[int, int]) -> None:
    """Four times as much is added for four times as many."""
    few, some, many = work.values()
    assert many - some < 4.8 * (some - few)


@pytest.mark.parametrize("kind", ["sqlite", "files"])
def test_an_export_is_linear_in_checkpoints(tmp_path, kind):
    work, size = {}, {}
    for count in (30, 120, 480):
        url = f"files:{tmp_path / str(count)}" if kind == "files" else tmp_path / f"{count}.db"
        with holdfast.open(url, durability="normal") as store:
            session = store.session("s")
            rng = Random(count)
            for n in range(count // 2):
                session.append("messages", {"role": "user", "content": random_text(rng, 60)})
                session.patch(set={"note": f"{n} {random_text(rng, 300)}"})
            page, work[count] = exported(store)
        size[count] = len(page)
    check_linear(work)
    check_linear(size)


def test_an_export_of_a_damaged_session_is_linear(tmp_path):
    """An item that cannot be read is not tried again for every state that has it."""
    work = {}
    for count in (60, 240, 960):
        with holdfast.open(tmp_path / f"{count}.db", durability="normal") as store:
            session = store.session("s")
            for n in range(count):
                session.append("messages", f"{n} " * 60)
        disk = apsw.Connection(str(tmp_path / f"{count}.db"))
        oldest = "(SELECT min(pos) FROM items)"
        disk.execute(f"UPDATE items SET body = zeroblob(length(body)) WHERE pos = {oldest}")
        disk.close()
        with holdfast.open(tmp_path / f"{count}.db") as store:
            page, work[count] = exported(store)
        assert len(data_of(page)["problems"]) > count - 16
    check_linear(work)


def test_only_its_own_script_runs(tmp_path):
    with holdfast.open(tmp_path / "a.db") as store:
        session = store.session(HOSTILE, agent=HOSTILE)
        session.save({HOSTILE: HOSTILE, "messages": [HOSTILE]}, label=HOSTILE, meta={"m": HOSTILE})
        page = export.page(store, [HOSTILE])
    assert page.count("<script") == page.count("</script>") == 2
    assert page.count("<style") == page.count("</style>") == 1
    assert "<!--" not in page.replace("<!doctype", "")
    [policy] = re.findall(r'Content-Security-Policy" content="(.*?)"', page)
    [script] = re.findall(r'<script type="module">(.*?)</script>', page, re.DOTALL)
    [style] = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    for kind, text in (("script", script), ("style", style)):
        digest = base64.b64encode(sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    data = data_of(page)
    assert data["sessions"][0]["name"] == HOSTILE
    [state] = data["states"].values()
    assert unpacked(data, state)["messages"] == [HOSTILE]


def test_the_script_is_whole():
    """All modules are in it, nothing is imported any more, and no name is given twice."""
    script = export._script()
    assert not re.search(r"^\s*(import|export)\b", script, re.MULTILINE)
    for path in STATIC.glob("*.js"):
        first = path.read_text("utf-8").splitlines()[0]
        assert script.count(first) == 1, path.name
    names = re.findall(r"^(?:async )?(?:function\*?|const|let|class) (\w+)", script, re.MULTILINE)
    assert sorted(names) == sorted(set(names))
    assert script.index("answerFromFile();") < script.index("boot();")


def test_scripts_make_nodes_and_never_markup():
    for path in STATIC.glob("*.js"):
        text = path.read_text("utf-8")
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(",
                     "new Function", 'setAttribute("on', "javascript:"):  # fmt: skip
            assert word not in text, path.name
    index = (STATIC / "index.html").read_text("utf-8")
    assert not re.search(r"\son\w+=|style=|<style|<script(?! type=\"module\" src=\"static/)", index)
    assert not re.search(r"https?://", index)


def test_what_is_damaged_is_told(tmp_path):
    with holdfast.open(tmp_path / "a.db") as store:
        session = store.session("hurt")
        for n in range(20):
            session.append("messages", {"content": f"{n} " * 900})
    disk = apsw.Connection(str(tmp_path / "a.db"))
    newest = "(SELECT max(pos) FROM items)"
    disk.execute(f"UPDATE items SET body = zeroblob(length(body)) WHERE pos = {newest}")
    disk.close()
    with holdfast.open(tmp_path / "a.db") as store:
        data = data_of(export.page(store, ["hurt"]))
    ids = [row["id"] for row in data["logs"]["hurt"]["items"]]
    assert ids[0] in data["problems"]
    assert ids[-1] in data["states"]
    assert data["problems"].keys() | data["states"].keys() == {*ids}


def test_a_file_that_is_there_is_left_alone(tmp_path):
    with holdfast.open(tmp_path / "a.db") as store:
        store.session("s").save({})
        path = tmp_path / "s.html"
        done = export.export(store, ["s"], str(path))
        assert (done.sessions, done.checkpoints) == (1, 1)
        before = path.read_bytes()
        with pytest.raises(InvalidRequest, match="exists already"):
            export.export(store, ["s"], str(path))
        with pytest.raises(SessionNotFound):
            export.export(store, ["nothing"], str(tmp_path / "n.html"))
        with pytest.raises(Unavailable):
            export.export(store, ["s"], str(tmp_path / "nowhere" / "n.html"))
        with pytest.raises(InvalidRequest, match="exists already"):
            late = tmp_path / "late.html"
            export.export(store, ["s"], str(late), lambda *_: late.touch())
    assert path.read_bytes() == before
    assert late.read_bytes() == b""
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.db", "late.html", "s.html"]
