"""A session as one page: all that is in it, each message once; and only our own script runs."""

from __future__ import annotations

import base64
import json
import re
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import apsw
import pytest

import holdfast
from holdfast import shapes
from holdfast.errors import InvalidRequest, SessionNotFound, Unavailable
from holdfast.web import exporting
from tests.test_layout import text as random_text

STATIC = Path(exporting.__file__).parent / "static"
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
        return data["pool"][packed["$at"]]
    if "$items" in packed:
        return [item for low, high in packed["$items"] for item in data["pool"][low:high]]
    return {key: unpacked(data, each) for key, each in packed.items()}


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
        page = exporting.page(store, ["trip", "fork"])
        data = data_of(page)
        for name in ("trip", "fork"):
            for c in store.session(name).tree():
                wanted = shapes.value(store.session(name).load(c.id))
                assert unpacked(data, data["states"][c.id]) == json.loads(shapes.dumps(wanted))
                assert c.id in data["changes"]
        assert [row["id"] for row in data["logs"]["trip"]["items"]] == [
            c.id for c in trip.tree(newest_first=True)
        ]
    text = random_text(Random(77), 300)
    assert page.count(json.dumps(text, ensure_ascii=False)[1:-1]) <= 2  # as an item, and a change
    assert len(page) < 4 * sum(len(str(value)) for value in data["pool"]) + 400_000


def test_only_its_own_script_runs(tmp_path):
    with holdfast.open(tmp_path / "a.db") as store:
        session = store.session(HOSTILE, agent=HOSTILE)
        session.save({HOSTILE: HOSTILE, "messages": [HOSTILE]}, label=HOSTILE, meta={"m": HOSTILE})
        page = exporting.page(store, [HOSTILE])
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
    script = exporting._script()
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
        data = data_of(exporting.page(store, ["hurt"]))
    ids = [row["id"] for row in data["logs"]["hurt"]["items"]]
    assert ids[0] in data["problems"]
    assert ids[-1] in data["states"]
    assert data["problems"].keys() | data["states"].keys() == {*ids}


def test_a_file_that_is_there_is_left_alone(tmp_path):
    with holdfast.open(tmp_path / "a.db") as store:
        store.session("s").save({})
        path = tmp_path / "s.html"
        done = exporting.export(store, ["s"], str(path))
        assert (done.sessions, done.checkpoints) == (1, 1)
        before = path.read_bytes()
        with pytest.raises(InvalidRequest, match="exists already"):
            exporting.export(store, ["s"], str(path))
        with pytest.raises(SessionNotFound):
            exporting.export(store, ["nothing"], str(tmp_path / "n.html"))
        with pytest.raises(Unavailable):
            exporting.export(store, ["s"], str(tmp_path / "nowhere" / "n.html"))
        with pytest.raises(InvalidRequest, match="exists already"):
            late = tmp_path / "late.html"
            exporting.export(store, ["s"], str(late), lambda *_: late.touch())
    assert path.read_bytes() == before
    assert late.read_bytes() == b""
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.db", "late.html", "s.html"]
