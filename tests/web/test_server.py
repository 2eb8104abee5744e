"""The viewer's server: what it answers, to whom, and what it refuses."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPCookieProcessor, build_opener, urlopen

import apsw
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

import holdfast
from holdfast import ToolCall, Usage, ids, web
from holdfast import json as holdfast_json
from holdfast.cli.main import run
from holdfast.errors import Unavailable
from holdfast.history.watch import Watcher
from holdfast.storage.reader import Reader
from holdfast.web import auth, server
from holdfast.web import events as web_events
from holdfast.web import search as web_search
from holdfast.web.api import ACTIONS, READS
from holdfast.web.render import LONGEST, fold
from tests.docs.test_json_page import wrong_shape
from tests.runs.test_runs import leave_all
from tests.support.example_stores import spoil

TOKEN = "a token of this test"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
HOME = "http://localhost:7460"
LIMIT = 1_000_000
HOSTILE = ["../x", "a/b?c#d", "*", "\0", "é", "é", "x" * 5_000, "<script>", "latest", "%2e%2e/"]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[holdfast.Store]:
    with holdfast.open(tmp_path / "web.db") as opened:
        yield opened


@pytest.fixture
def trip(store: holdfast.Store) -> holdfast.Session:
    """Six steps, a branch that was left, and a fork."""
    trip = store.session("trip", agent="planner")
    trip.save(
        {"messages": [], "plan": {"budget": 900}}, label="asked", usage=Usage(tokens=10, cost=0.5)
    )
    for n in range(3):
        trip.append(
            "messages", {"role": "user", "content": f"message {n}"}, usage=Usage(tokens=100 * n)
        )
    trip.patch(set={"plan": {"budget": 400}}, tags=["cheap"])
    trip.rewind("@~2")
    trip.append("messages", {"role": "user", "content": "another way"}, status="completed")
    trip.fork("trip-b", "asked")
    return trip


def cheap(trip: holdfast.Session) -> holdfast.Checkpoint:
    """On the branch that was left."""
    return next(c for c in trip.tree() if c.tags)


def client(store: holdfast.Store, base: str = HOME, **options: Any) -> TestClient:
    return TestClient(web.app(store, **options), base_url=base, raise_server_exceptions=True)


@pytest.fixture
def ask(store: holdfast.Store) -> Any:
    asking = client(store)

    def ask(name: str, status: int = 200, /, **params: Any) -> Any:
        answer = asking.get(f"/api/{name}", params=params)
        assert answer.status_code == status, answer.text
        return answer.json()

    return ask


@pytest.fixture
def act(store: holdfast.Store) -> Any:
    asking = client(store)

    def act(name: str, status: int = 200, /, **body: Any) -> Any:
        answer = asking.post(f"/api/{name}", json=body, headers={"Origin": HOME})
        assert answer.status_code == status, answer.text
        return answer.json()

    return act


# -- who may ask ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "good"),
    [
        ("localhost:7460", True), ("127.0.0.1", True), ("[::1]:7460", True), ("LOCALHOST", True),
        ("evil.example", False), ("localhost.evil.example", False), ("", False),
        ("evil.example:7460", False), ("localhost:99999999", False), ("[::1", False),
        ("localhost@evil.example", False),
    ],
)  # fmt: skip
def test_only_its_own_names_are_answered_for(store, host, good):
    answer = client(store).get("/api/about", headers={"Host": host})
    assert answer.status_code == (200 if good else 400)


def test_without_the_token_nothing_is_told(store, trip):
    asking = client(store, token=TOKEN)
    for path in ("/", "/static/index.html", "/api/about", "/api/events", "/api/nothing"):
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": TOKEN},
            {"Cookie": "holdfast-7460=wrong"},
            {"Cookie": f"holdfast-80={TOKEN}"},
            {"Cookie": "=;;=\x7f"},
        ):
            answer = asking.get(path, headers=headers)
            assert answer.status_code == 401, (path, headers)
            assert "trip" not in answer.text
    assert asking.get("/?token=wrong").status_code == 401
    page = asking.get("/", headers={"Accept": "text/html,*/*;q=0.8"})
    assert (page.status_code, page.headers["content-type"]) == (401, "text/html; charset=utf-8")
    assert "holdfast serve" in page.text
    assert page.headers["content-security-policy"] == auth.POLICY
    assert asking.get("/api/about", headers={"Accept": "text/html"}).json()["error"] == "NoToken"
    assert asking.post(f"/api/undo?token={TOKEN}", json={"session": "trip"}).status_code == 401
    assert asking.get("/api/about", headers=BEARER).status_code == 200


def test_the_token_becomes_a_cookie(store):
    asking = client(store, token=TOKEN)
    answer = asking.get("/", params={"token": TOKEN, "more": "1"}, follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/?more=1")
    cookie = answer.headers["set-cookie"].lower()
    assert cookie.startswith("holdfast-7460=")  # browsers tell one port's cookies to all others
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert asking.get("/").status_code == 200
    assert asking.get("/api/about").status_code == 200
    again = asking.get("/", params={"token": TOKEN}, follow_redirects=False)
    assert again.status_code == 303  # so that it leaves the address this time, too


@pytest.mark.parametrize("token", ["p+q&r#s%41 x/y;z", 'a "quoted" \\ one', "ключ", "t" * 900])
def test_any_text_can_be_a_token(store, token):
    asking = client(store, token=token)
    assert asking.get("/", params={"token": token}).status_code == 200
    assert asking.get("/api/about").status_code == 200


def test_a_link_on_another_site_opens_it(store):
    """A browser follows a redirect in the name of the site that it began at, without cookies."""
    asking = client(store, token=TOKEN)
    other = {"Sec-Fetch-Site": "cross-site"}
    answer = asking.get("/", params={"token": TOKEN, "more": "1"}, headers=other)
    assert (answer.status_code, answer.headers["refresh"]) == (200, "0; url=/?more=1")
    assert "samesite=strict" in answer.headers["set-cookie"].lower()
    assert TOKEN not in answer.text
    asking = client(store, token=TOKEN)
    assert asking.get("/", params={"token": "wrong"}, headers=other).status_code == 401


@pytest.mark.parametrize(
    "origin",
    [None, "null", "http://evil.example", "http://localhost:1", "localhost:7460", "[", HOME],
)
def test_a_change_comes_from_the_own_page_alone(store, trip, origin):
    asking = client(store, token=TOKEN)
    asking.get("/", params={"token": TOKEN})
    headers = {} if origin is None else {"Origin": origin}
    answer = asking.post("/api/undo", json={"session": "trip"}, headers=headers)
    assert answer.status_code == (200 if origin == HOME else 403)
    assert asking.post("/api/redo", json={"session": "trip"}, headers=BEARER).status_code == (
        200 if origin == HOME else 400
    )  # whoever has the token itself is no other page


@pytest.mark.parametrize("origin", ["http://[::1", "http://[", "//["])
def test_an_origin_that_is_no_address_is_a_bad_request(store, trip, origin):
    """A broken IPv6 address was answered with 500."""
    asking = client(store, token=TOKEN)
    asking.get("/", params={"token": TOKEN})
    answer = asking.post("/api/undo", json={"session": "trip"}, headers={"Origin": origin})
    assert answer.status_code == 400
    assert answer.json()["error"] == "WrongOrigin"


HEADERS = ("Host", "Origin", "Cookie", "Authorization", "Accept", "Accept-Encoding", "Range",
           "If-Range", "If-Modified-Since", "If-None-Match", "Content-Type", "Content-Length",
           "Sec-Fetch-Site", "X-Forwarded-For", "Referer")  # fmt: skip
MALFORMED = ("[", "http://[::1", "//[", "%", "%ff%fe", "bytes=9-1", "bytes=x-", "\xff\xfe", ",;=",
             "=", '"', "-1", "9" * 400, "Bearer", "Bearer \xff", "holdfast-80=%ff",
             'holdfast-80="', "Mon, 99 Foo 2026 99:99:99 GMT",
             "text/html;q=x", "x" * 9_000)  # fmt: skip


@pytest.mark.parametrize("token", [None, TOKEN])
@pytest.mark.parametrize("header", HEADERS)
def test_no_header_makes_the_viewer_fail(store, trip, header, token):
    asking = client(store, token=token)
    for value in MALFORMED:
        headers = {header: value.encode("latin-1")}
        for path in ("/", "/static/main.js", "/api/about"):
            assert asking.get(path, headers=headers).status_code < 500, (path, value)
        assert asking.post("/api/undo", json={}, headers=headers).status_code < 500, value


def test_it_says_which_store_commands_are_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for address, told in (
        ("a b.db", str(tmp_path / "a b.db")), ("files:tree", f"files:{tmp_path / 'tree'}"),
        ("memory:", None),
    ):  # fmt: skip
        with holdfast.open(address) as opened:
            assert client(opened).get("/api/about").json()["store"] == told


def test_which_store_is_told_without_a_password(store, monkeypatch):
    shown = "postgresql://me@there:5432/agents (schema public)"
    monkeypatch.setattr(store._repository, "backend", Mock(path=shown, read_only=False))
    store._repository.backend.name = "postgresql"
    told = client(store).get("/api/about").json()["store"]
    assert told == "postgresql://me@there:5432/agents"


def test_looking_changes_nothing(store, trip, ask):
    before = [(c.id, c.tags) for c in trip.tree()], trip.operations(), trip.head
    for name in READS:
        client(store).get(f"/api/{name}", params={"session": "trip", "id": trip.get().id})
    for name in ACTIONS:
        ask(name, 405, session="trip", id=trip.get().id, name="x", tag="x", label="x")
    assert ([(c.id, c.tags) for c in trip.tree()], trip.operations(), trip.head) == before


def test_read_only_refuses_every_change(store, trip, tmp_path):
    with holdfast.open(tmp_path / "web.db", read_only=True) as opened:
        body = {
            "session": "trip",
            "id": trip.get("asked").id,
            "name": "n",
            "tag": "t",
            "label": "l",
        }
        body |= {"key": "k", "decided": "rerun", "answer": 1}
        for name in ACTIONS:
            for asking, status in (
                (client(store, read_only=True), (403,)),
                (client(opened), (503, 404, 400)),  # at the backend: also without being asked to
            ):
                answer = asking.post(f"/api/{name}", json=body, headers={"Origin": HOME})
                assert answer.status_code in status, answer.text
        assert client(opened).get("/api/about").json()["read_only"] is True
    assert client(store, read_only=True).get("/api/about").json()["read_only"] is True
    assert [c.tags for c in trip.tree() if c.tags] == [("cheap",)]


def test_every_answer_is_guarded(store, trip):
    asking = client(store, token=TOKEN)
    for path, headers in (
        ("/", BEARER), ("/static/index.html", BEARER), ("/api/about", BEARER), ("/api/log", BEARER),
        ("/nothing", BEARER), ("/", {}), ("/", {"Host": "evil.example"}),
    ):  # fmt: skip
        answer = asking.get(path, headers=headers)
        for name, value in auth.HEADERS.items():
            kept = path.startswith("/static") and name == "cache-control"
            assert answer.headers[name] == ("no-cache" if kept else value)
    policy = auth.POLICY
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"https?:|\*", policy)


@pytest.mark.parametrize(
    "path",
    [
        "/static/../auth.py", "/static/%2e%2e/auth.py", "/static/..%2fauth.py",
        "/static//etc/passwd", "/static/%2fetc%2fpasswd", "/static/..%5cauth.py",
        r"/static/\..\auth.py", "/api/../../x",
    ],
)  # fmt: skip
def test_no_file_but_its_own_is_served(store, path):
    answer = client(store).get(path)
    assert answer.status_code in (400, 404)
    assert "import" not in answer.text


def test_it_can_be_mounted(store, trip):
    mounted = Starlette(routes=[Mount("/agents", web.app(store, token=TOKEN))])
    asking = TestClient(mounted, base_url=HOME)
    answer = asking.get("/agents/", params={"token": TOKEN}, follow_redirects=False)
    assert answer.headers["location"] == "/agents/"
    assert "path=/agents/" in answer.headers["set-cookie"].lower()
    assert asking.get("/agents/api/log", params={"session": "trip"}).json()["count"] == 6


# -- what it tells -------------------------------------------------------------------------------


def test_sessions_a_page_at_a_time(store, ask):
    for n in range(7):
        store.session(f"s{n}", agent="odd" if n % 2 else "even").save({"n": n})
    seen, after = [], None
    while True:
        page = ask("sessions", limit=3, **({"after": after} if after else {}))
        assert [w for s in page["items"] for w in wrong_shape("session", s)] == []
        seen += [s["name"] for s in page["items"]]
        after = page["next"]
        if after is None:
            break
    assert seen == [f"s{n}" for n in range(7)]
    assert [s["name"] for s in ask("sessions", agent="odd")["items"]] == ["s1", "s3", "s5"]
    assert [s["name"] for s in ask("sessions", text="S3")["items"]] == ["s3"]
    assert ask("sessions", 400, status="odd")["error"] == "InvalidRequest"


def test_the_log_a_page_at_a_time(store, trip, ask):
    rows, before = [], None
    while True:
        page = ask("log", session="trip", limit=2, **({"before": before} if before else {}))
        rows += page["items"]
        before = page["next"]
        if before is None:
            break
    assert [r["id"] for r in rows] == [c.id for c in trip.tree(newest_first=True)]
    assert [w for r in rows for w in wrong_shape("log line", r)] == []
    assert [r["id"] for r in rows if r["is_head"]] == [trip.get().id] == [page["head"]]
    assert {r["label"]: r["forks"] for r in rows if r["forks"]} == {"asked": ["trip-b"]}


def test_no_page_is_endless(store, ask):
    session = store.session("s")
    for n in range(1_010):
        session.save({"n": n})
    page = ask("log", session="s", limit=10**9)
    assert (len(page["items"]), page["next"], page["count"]) == (1_000, 11, 1_010)


def test_a_state_is_read_in_parts(store, ask):
    session = store.session("big")
    session.save(
        {"messages": [{"n": n, "text": "x" * 300} for n in range(3_000)], 7: b"\0", "x": 1}
    )
    id = session.get().id
    root = ask("state", id=id)
    assert [(i["key"], i["kind"], i["length"]) for i in root["items"]] == [
        ("messages", "list", 3_000), (7, "bytes", 1), ("x", "int", None),
    ]  # fmt: skip
    part = ask("state", id=id, path='["messages"]', start=2_990, limit=5)
    assert [i["key"] for i in part["items"]] == list(range(2_990, 2_995))
    assert ask("state", id=id, path="messages.2999.n")["value"] == 2_999
    assert ask("value", id=id, path='["messages",5]') == {"n": 5, "text": "x" * 300}
    assert ask("value", id=id, path="[7]") == {"$bytes": "AA=="}
    ask("state", 404, id=id, path="messages.3000")
    ask("state", 404, id=id, path="nothing.here")
    for path in ("[", "[1.5]", '{"a":1}', "[null]", "[[1]]", "[" * 9_000):
        assert ask("state", 400 if path[0] == "[" else 404, id=id, path=path)["error"]


def test_reading_a_part_reads_little(store, ask, monkeypatch):
    session = store.session("long")
    session.save({"messages": [{"n": n, "text": f"{n} " * 200} for n in range(5_000)]})
    read: list[Any] = []
    items = Reader.items

    def counted(self: Reader, *args: Any) -> Any:
        for row in items(self, *args):
            read.append(row)
            yield row

    monkeypatch.setattr(Reader, "items", counted)
    page = ask("messages", id=session.get().id, limit=10)
    assert (page["length"], page["start"], page["items"][-1]["n"]) == (5_000, 4_990, 4_999)
    assert 0 < len(read) < 10


def test_messages(store, trip, ask):
    id = trip.get().id
    page = ask("messages", id=id)
    assert page["path"] == ["messages"]
    assert page["items"] == trip.load()["messages"]
    assert ask("messages", id=id, start=1, limit=1)["items"] == trip.load()["messages"][1:2]
    ask("messages", 404, id=id, path="plan")
    other = store.session("other")
    other.save({"inbox": [1, 2]})
    ask("messages", 404, id=other.get().id)
    assert ask("messages", id=other.get().id, path="inbox")["items"] == [1, 2]


def test_what_changed(store, trip, ask):
    c = cheap(trip)
    found = ask("changes", id=c.id)
    assert found["from"] == c.parent
    assert found["changes"] == [
        {"kind": "changed", "path": ["plan", "budget"], "before": 900, "after": 400}
    ]
    first = ask("changes", id=trip.get("asked").id)
    assert first["from"] is None
    assert [(x["kind"], x["path"]) for x in first["changes"]] == [
        ("added", ["messages"]), ("added", ["plan"]),
    ]  # fmt: skip
    diff = ask("diff", a=c.id, b=trip.get().id)
    assert wrong_shape("diff", diff) == []
    assert diff["steps"] == {"a": 2, "b": 1}
    blame = ask("blame", id=c.id, path="plan.budget")
    assert wrong_shape("blame", blame) == []
    assert (blame["checkpoint"]["id"], blame["before"], blame["after"]) == (c.id, 900, 400)
    for path in ("['plan'].budget", '["plan"].budget', '["plan", "budget"]'):
        assert ask("blame", id=c.id, path=path) == blame
    ask("blame", 400, id=c.id)
    ask("blame", 404, id=c.id, path="plan.nothing")


def test_steps_of_two_without_a_common_ancestor(store, trip, ask):
    """One of the two had a step too few."""
    other = store.session("other")
    for n in range(7):
        other.save({"n": n}, usage=Usage(tokens=1))
    long, short = trip.get().id, other.get("step:2").id
    for a, b in ((long, short), (short, long), (other.get().id, long), (long, other.get().id)):
        found = ask("diff", a=a, b=b)
        assert found["ancestor"] is None
        for side, id in (("a", a), ("b", b)):
            line = [*store.session(store.get(id).session).history(id)]
            assert found["steps"][side] == len(line)
            assert found["usage"][side]["tokens"] == sum(c.usage.tokens for c in line)


def test_the_most_that_a_step_has_cost_is_of_the_whole_session(store, ask):
    """The page scaled its bars to the rows that it had loaded."""
    session = store.session("s")
    session.save({}, usage=Usage(tokens=5_000, cost=2.5))
    for n in range(300):
        session.save({"n": n}, usage=Usage(tokens=n, cost=n / 1_000))
    assert all(row["usage"]["tokens"] < 300 for row in ask("log", session="s")["items"])
    assert ask("totals", session="s")["most"] == {"tokens": 5_000, "cost": 2.5}
    session.save({}, usage=Usage(tokens=6_000))
    assert ask("totals", session="s")["most"] == {"tokens": 6_000, "cost": 2.5}
    session.delete("step:1")
    assert ask("totals", session="s")["most"] == {"tokens": 6_000, "cost": 0.299}
    session.undo()
    session.rewind("step:10")
    session.save({}, usage=Usage(tokens=7_000, cost=1.0))
    assert ask("totals", session="s")["most"] == {"tokens": 7_000, "cost": 2.5}


def test_the_way_between_two_checkpoints(store, trip, ask):
    line = [c.id for c in trip.history()]
    told = ask("way", id=line[0], until=line[2])
    assert ([c["id"] for c in told["items"]], told["more"]) == (line[:2], False)
    told = ask("way", id=line[0], limit=1)
    assert ([c["id"] for c in told["items"]], told["more"]) == (line[:1], True)
    assert len(ask("way", id=line[0])["items"]) == len(line)


def test_what_it_cost(store, trip, ask):
    child = store.session("child", parent="trip")
    child.save({}, usage=Usage(tokens=7))
    totals = ask("totals", session="trip")
    assert (totals["path"]["tokens"], totals["children"]["tokens"]) == (110, 7)
    assert totals["total"]["tokens"] == 10 + 0 + 100 + 200 + 7
    points = ask("chart", session="trip")["points"]
    assert [p["tokens"] for p in points] == [10, 10, 110, 110]
    long = store.session("long")
    for _ in range(900):
        long.save({}, usage=Usage(tokens=1))
    points = ask("chart", session="long")["points"]
    assert len(points) < 500
    assert (points[0]["tokens"], points[-1]["tokens"]) == (1, 900)


def test_a_chart_reads_what_is_new(store, ask, monkeypatch):
    session = store.session("long")
    for n in range(1200):
        session.save({"n": n}, usage=Usage(tokens=1, cost=0.5))
    ask("chart", session="long")
    read = 0
    checkpoints = Reader.checkpoints

    def counted(*args: Any) -> Any:
        nonlocal read
        rows = checkpoints(*args)
        read += len(rows)
        return rows

    monkeypatch.setattr(Reader, "checkpoints", counted)
    middle = session.get("@~600")
    session.rewind(middle.id)
    session.save({}, usage=Usage(tokens=7))
    read = 0
    points = ask("chart", session="long")["points"]
    assert (points[-1]["tokens"], points[-1]["cost"]) == (607, 300.0)
    assert [p["step"] for p in points] == [*range(1, 602)]
    assert read < 500  # a page of the history, not all of it
    assert ask("chart", session="long", id=middle.id)["points"] == points[:-1]


def test_integrity(store, trip, ask, tmp_path):
    sound = ask("integrity", id=trip.get().id)
    assert sound["problem"] is None
    assert [link["id"] for link in sound["chain"]] == [c.id for c in trip.history()][1:]
    assert [o["kind"] for o in ask("operations", session="trip")["items"]] == ["rewind"]
    long = store.session("long")
    for n in range(20):
        long.append("messages", {"content": f"{n} " * 900})
    assert not any(ask("integrity", id=c.id)["problem"] for c in long.tree())
    long.load()  # so that it is in memory, too
    disk = apsw.Connection(str(tmp_path / "web.db"))
    newest = "(SELECT max(pos) FROM items)"
    disk.execute(f"UPDATE items SET body = zeroblob(length(body)) WHERE pos = {newest}")
    disk.close()
    found = [ask("integrity", id=c.id)["problem"] for c in long.tree()]
    assert found[-1]
    assert not any(found[:5])


def test_a_damaged_checkpoint_is_listed_and_its_neighbours_work(store, trip, ask, tmp_path):
    lost = cheap(trip)
    disk = apsw.Connection(str(tmp_path / "web.db"))
    disk.execute(
        "UPDATE checkpoints SET body = zeroblob(80) WHERE id = ?", (ids.from_text(lost.id),)
    )
    disk.close()
    rows = ask("log", session="trip")["items"]
    assert [r["id"] for r in rows if r["damaged"]] == [lost.id]
    for name in ("checkpoint", "changes", "state"):
        assert ask(name, 500, id=lost.id)["error"] == "Corrupt"
    told = ask("integrity", id=lost.id)
    assert told["checkpoint"]["damaged"] == told["problem"]
    assert told["known"]["tags"] == ["cheap"]
    assert ask("messages", id=trip.get().id)["length"] == 3


@pytest.mark.parametrize("kept", [True, False], ids=["torn", "missing"])
def test_who_came_before_a_damaged_checkpoint_is_told(store, ask, tmp_path, kept):
    session = store.session("hurt")
    first, lost, last = [session.save({"n": n}, label=f"save {n}") for n in range(3)]
    disk = apsw.Connection(str(tmp_path / "web.db"))
    change = "UPDATE checkpoints SET body = zeroblob(80)" if kept else "DELETE FROM checkpoints"
    disk.execute(f"{change} WHERE id = ?", (ids.from_text(lost.id),))
    told = ask("log", session="hurt")
    assert [r["id"] for r in told["items"]] == [last.id, lost.id, first.id]
    assert told["bridges"] == {lost.id: {"id": lost.id, "step": 2, "ancestor": first.id}}
    found = ask("integrity", id=lost.id, session="hurt", seq=2)
    known = {"step": 2, "label": "save 1", "tags": [], "ancestor": first.id, "child": last.id}
    assert found["known"] == known
    assert [link["hash"] for link in found["chain"]] == [first.hash]
    ask("integrity", 404, id=lost.id[::-1], session="hurt", seq=9)
    disk.execute("UPDATE checkpoints SET body = zeroblob(80)")
    disk.close()
    assert ask("integrity", id=last.id)["problem"] is not None  # the head's row knows its parent


def test_what_changed_since_a_damaged_checkpoint_is_told_from_the_one_before(store, ask, tmp_path):
    session = store.session("hurt")
    first, lost, last = [session.save({"n": n}) for n in range(3)]
    disk = apsw.Connection(str(tmp_path / "web.db"))
    disk.execute(
        "UPDATE checkpoints SET body = zeroblob(80) WHERE id = ?", (ids.from_text(lost.id),)
    )
    disk.close()
    told = ask("changes", id=last.id)
    assert told["from"] == first.id
    assert told["changes"] == [{"kind": "changed", "path": ["n"], "before": 0, "after": 2}]


def test_search(store, trip, ask):
    hits = ask("search", label="asked")["items"]
    assert [hit["checkpoint"]["label"] for hit in hits] == ["asked"]
    found = ask("search", text="message", limit=2)
    assert len(found["items"]) == 2
    rest = ask("search", text="message", before=found["next"])
    assert rest["next"] is None
    assert not {hit["checkpoint"]["id"] for hit in found["items"]} & {
        hit["checkpoint"]["id"] for hit in rest["items"]
    }
    assert ask("search", 400, status="odd")
    trip.save({}, meta={"user": "u1", "floor": 2})
    for pair, count in (("user=u1", 1), ("floor=2", 1), ("floor=3", 0), ("floor='2'", 0)):
        assert len(ask("search", meta=pair)["items"]) == count
    assert ask("search", 400, meta="user")
    told = ask("search", mark="U1")
    assert [hit["snippet"] for hit in told["items"]] == ["user: u1"]
    assert [hit["snippet"][hit["start"] : hit["end"]] for hit in told["items"]] == ["u1"]
    trip.save({}, label="Half a Label", meta={"deep": [{"Who": "somebody"}]})
    for part, count in (
        ("a lab", 1), ("HEA", 1), ("u1", 1), ("who", 1), ("MEbod", 1), ("message", 0), ("AS", 1),
    ):  # fmt: skip
        assert len(ask("search", mark=part)["items"]) == count, part
    assert ask("search", mark="AS", tag="nobody")["items"] == []


def test_a_search_tells_who_brought_a_text_and_shows_it(store, trip, ask):
    wanted = [hit.checkpoint.id for hit in store.search("message 1")]
    told = ask("search", text="MESSAGE 1")
    assert [hit["checkpoint"]["id"] for hit in told["items"]] == wanted
    assert told["next"] is None
    hit = told["items"][-1]
    assert hit["snippet"][hit["start"] : hit["end"]] == "message 1"
    assert hit["path"][0] == "messages"
    assert ask("search", text="MESSAGE 1", case_sensitive=1)["items"] == []
    long = "x " * 250 + "needle" + " y" * 250
    store.session("long").save({"deep": {"log": [f"line {n}" for n in range(500)], "at": [long]}})
    [shown] = ask("search", text="needle")["items"]
    assert re.fullmatch(r"…( x|x ){20}needle( y){57}…", shown["snippet"])
    assert shown["path"] == ["deep", "at", 0]
    store.session("long").patch(set={"deep": {}})
    store.session("long").patch(set={"again": "needle"})
    assert len(ask("search", text="needle")["items"]) == 2
    assert ask("search", text="needle", session="trip")["items"] == []
    [named] = ask("search", text="LON")["items"]
    assert (named["session"], named["checkpoint"]) == ("long", None)


def test_a_search_ends_when_nobody_waits_for_it(store):
    session = store.session("long")
    for n in range(40):
        session.save({"log": [f"line {n} {m}" for m in range(200)]})
    asked: list[int] = []

    def stopped() -> bool:
        asked.append(1)
        return len(asked) > 10

    assert list(store.search("nowhere", stopped=stopped)) == []
    assert len(asked) < 20

    async def left() -> bool:
        gone = threading.Event()
        messages = iter([{"type": "http.request"}, {"type": "http.disconnect"}])

        async def receive() -> dict[str, str]:
            return next(messages)

        await web_search._set_on_disconnect(Mock(receive=receive), gone)
        return gone.is_set()

    assert asyncio.run(left())


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names(store, ask, act, name):
    session = store.session(name, agent=name)
    session.save({name: name}, label=name[:200], tags=[name[:200]], meta={name: name})
    [row] = ask("log", session=name)["items"]
    assert row["session"] == name
    assert ask("sessions", agent=name)["items"][0]["name"] == name
    assert act("fork", id=row["id"], name=f"{name}-2")["session"] == f"{name}-2"
    assert ask("totals", session=name)["total"]["tokens"] == 0
    ask("log", 404, session=f"{name}-3")
    for id in (name, f"{row['id']}{name}", "../../etc/passwd", "' OR 1=1 --"):
        assert ask("checkpoint", 404, id=id)["error"]


def test_bad_requests(store, trip, ask, act):
    for name, params in (
        ("log", {}), ("log", {"session": ""}), ("log", {"session": "trip", "limit": "-1"}),
        ("log", {"session": "trip", "limit": "٣"}),
        ("log", {"session": "trip", "before": "9" * 99}),
        ("state", {}), ("diff", {"a": "x"}),
    ):  # fmt: skip
        assert ask(name, 404 if params == {"a": "x"} else 400, **params)["error"]
    act("fork", 400)
    act("fork", 400, id=1, name="n")
    act("fork", 409, id=trip.get().id, name="trip-b")
    act("resolve", 400, session="trip", key="k", decided="perhaps")
    act("answer", 400, session="trip", name="x", answer={"$bytes": "?"})
    act("answer", 404, session="trip", name="x", answer=1)
    asking = client(store)
    long = json.dumps({"session": "trip", "more": "x" * 2_000_000}).encode()
    for body in (b"", b"[]", b"{", b"\xff", b"[" * 100_000, long):
        answer = asking.post("/api/undo", content=body, headers={"Origin": HOME})
        assert answer.status_code == 400, body[:10]
        assert wrong_shape("error", answer.json()) == []


def test_no_answer_is_long(store):
    """Unless somebody asks for a whole value."""
    big = store.session("big")
    image = {"type": "image", "data": base64.b64encode(bytes(3_000_000)).decode()}
    big.save(
        {"messages": [image] * 3 + ["x" * 2_000_000, [["deep"] * 50_000] * 5], "k" * 90_000: 1}
    )
    messages = ["y" * 200_000, *["y" * 20_000] * 300]
    big.save(
        {"messages": messages, "many": {str(n): "z" * 900 for n in range(5_000)}},
        meta={"notes": "m" * 3_000_000}, reason="r" * 100_000, hint="h" * 100_000,
        pending=[ToolCall("1", "tool", {"a": "b" * 900_000})],
    )  # fmt: skip
    for n in range(200):
        big.save({"n": n}, meta={"notes": "m" * 20_000})
    first, second, last = (big.get(f"step:{n}").id for n in (1, 2, 202))
    asking = client(store)
    sizes = {}
    for name in READS.keys() - {"value"}:
        for id in (first, second, last):
            params = {"session": "big", "id": id, "a": second, "b": id, "limit": 1000}
            params |= {"path": "messages"} if name in ("messages", "blame", "state") else {}
            answer = asking.get(f"/api/{name}", params=params)
            sizes[name, id] = len(answer.content)
            if id != last:
                assert answer.status_code == 200, (name, answer.text[:300])
    assert {key: size for key, size in sizes.items() if size > LIMIT} == {}
    whole = asking.get("/api/value", params={"id": second, "path": "messages.0"})
    assert whole.json() == "y" * 200_000


def test_the_active_sessions_come_first(store, ask):
    """By name, what ran now was beyond the first page of a store with many sessions."""
    order = ["d", "a", "e", "b", "c"]
    for name in order:
        store.session(name, agent="one" if name in "ab" else "two").save({})
    with store.session("e").run() as run:
        store.session("b").save({"n": 1})  # after the run has begun

        def pages(**asked: Any) -> list[list[str]]:
            found: list[list[str]] = []
            after = None
            while not found or after is not None:
                more: dict[str, Any] = {} if after is None else {"after": after}
                page = ask("sessions", order="active", limit=2, **asked, **more)
                found.append([item["name"] for item in page["items"]])
                after = page["next"]
            return found

        assert pages() == [["e", "b"], ["c", "a"], ["d"]]
        assert pages(agent="one") == [["b", "a"]]
        assert pages(text="C") == [["c"]]
        run.state["done"] = True
    assert pages() == [["e", "b"], ["c", "a"], ["d"]]
    store.session("d").save({"n": 2})
    assert pages() == [["d", "e"], ["b", "c"], ["a"]]
    assert [item["name"] for item in ask("sessions")["items"]] == sorted(order)
    ask("sessions", 400, order="size")


def test_active_sessions_without_a_readable_head_are_listed(store, ask, tmp_path):
    for name in "abc":
        store.session(name).save({})
    store.session("b").undo()  # it has no head now
    spoil(tmp_path / "web.db", 1)
    page = ask("sessions", order="active")
    assert sorted(item["name"] for item in page["items"]) == ["a", "b", "c"]


def test_pages_end_early_where_rows_are_long(store, ask):
    name = "n" * 3_000
    long = store.session(name)
    for n in range(400):
        long.save({"n": n}, meta={str(k): "é" * 20 for k in range(40)})
    for n in range(200):
        store.session(f"{n} {name}").save({}, label="short")
    for page, what, follow, asked in (
        ("log", "seq", "before", {"session": name}), ("sessions", "name", "after", {}),
        ("sessions", "name", "after", {"order": "active"}),
        ("search", "checkpoint", "before", {"agent": None}),
    ):  # fmt: skip
        seen: list[Any] = []
        more: dict[str, Any] = {}
        while not seen or more:
            answer = client(store).get(f"/api/{page}", params=asked | {"limit": 1_000} | more)
            assert len(answer.content) < LIMIT
            found = [each[what] for each in answer.json()["items"]]
            seen += [each["id"] for each in found] if page == "search" else found
            after = answer.json()["next"]
            more = {} if after is None else {follow: after}
        assert len(seen) == len(set(seen)) == {"log": 400, "sessions": 201, "search": 600}[page]


def test_folding_keeps_what_is_short_and_marks_what_is_cut():
    short = {"a": [1, None, True, "text"], "$$b": {"$bytes": "AA=="}}
    assert fold(short, 1_000) == short
    cut = fold("x" * (LONGEST + 1), 10_000)["$folded"]
    assert (cut["kind"], cut["length"], set(cut["start"])) == ("str", LONGEST + 1, {"x"})
    many = fold(list(range(100_000)), 1_000)["$folded"]
    assert (many["kind"], many["length"], many["start"][:3]) == ("list", 100_000, [0, 1, 2])
    for value in ("x" * 10**6, ["y" * 3_000] * 1_000, {str(n): "z" * 50 for n in range(10_000)}):
        assert len(json.dumps(fold(value, 20_000))) < 40_000


# -- what it changes -----------------------------------------------------------------------------


def test_actions(store, trip, act):
    at = trip.get("asked")
    assert wrong_shape("checkpoint", act("fork", id=at.id, name="third")) == []
    assert store.session("third").load() == trip.load("asked")
    act("tag", id=at.id, tag="seen")
    act("label", id=at.id, label="begun")
    assert (trip.get("begun").id, trip.get("tag:seen").id) == (at.id, at.id)
    assert act("rewind", id=at.id)["id"] == at.id == trip.get().id
    assert wrong_shape("operation", act("undo", session="trip")) == []
    trip.refresh()
    assert trip.get().id != at.id
    act("redo", session="trip")
    assert trip.get().id == at.id


def test_what_is_pending_is_decided(store, ask, act):
    with store.session("asks").run() as run:
        run.step("look", lambda: 3)
        run.wait_for("approval", prompt="Buy?")
    told = ask("run", session="asks")
    called = [(c["kind"], c["name"], c["success"]) for c in told["calls"]]
    assert called == [("step", "look", True), ("wait", "approval", None)]
    assert wrong_shape("pending", told["pending"][0]) == []
    act("answer", session="asks", name="approval", answer={"$tuple": [1, 2]})
    told = act("answer", 409, session="asks", name="approval", answer=False)
    assert (told["error"], "(1, 2) stands" in told["message"]) == ("AlreadyDecided", True)
    with store.session("asks").run() as run:
        run.step("look", lambda: 3)
        assert run.wait_for("approval", prompt="Buy?") == (1, 2)
    act("resolve", 404, session="asks", key="nothing", decided="skip")


def test_six_ways_to_leave_a_run(store, ask):
    left = leave_all(store)
    for name, (state, reason) in left.items():
        told = ask("run", session=name)
        assert wrong_shape("abandoned", told["run"]) == []
        assert (told["run"]["state"], told["run"]["reason"]) == (state, reason)
    assert [call["error"] for call in ask("run", session="failed")["calls"]] == [
        None,
        "ValueError: no such flight",
    ]
    told = ask("sessions")
    statuses = {each["name"]: each["head"]["status"] for each in told["items"]} | told["left"]
    assert {statuses[name] for name in left} == {*left}


def test_what_lands_is_told(store, trip):
    async def listen() -> list[dict[str, Any]]:
        listener = web_events.Listener()
        web_events.Feed(store).join(listener)
        told = web_events._stream(listener)
        assert (await anext(told)).startswith(":")
        trip.append("messages", "news", meta={"long": "x" * 100_000})
        trip.tag("@", "new")
        lines = [await anext(told) for _ in range(2)]
        await told.aclose()
        return [json.loads(line.removeprefix("data: ")) for line in lines]

    saved, tagged = asyncio.run(listen())
    assert saved["checkpoint"]["id"] == trip.get().id
    assert tagged["operation"]["kind"] == "tag"
    assert len(json.dumps(saved)) < 5_000


def heard(told: Any) -> dict[str, Any]:
    """The next event of a stream."""
    while not (line := told.readline()).startswith(b"data: "):
        assert line, "the stream has ended"
    return dict(json.loads(line.removeprefix(b"data: ")))


def listening(url: str, count: int) -> list[Any]:
    opener = build_opener(HTTPCookieProcessor())
    opener.open(url).close()
    streams = [opener.open(f"{url.partition('?')[0]}api/events") for _ in range(count)]
    assert {told.readline() for told in streams} == {b": listening\n"}
    return streams


def test_the_store_is_read_once_for_all_streams(store, trip, monkeypatch):
    """Each had a watcher of its own: 900 of them slowed a request from 2 to 531 ms."""
    watchers: list[Watcher] = []
    reads: list[Any] = []
    poll = Watcher.poll

    def counted(self: Watcher) -> list[Any]:
        news = poll(self)
        watchers.append(self)
        reads.extend(news)
        return news

    monkeypatch.setattr(Watcher, "poll", counted)
    with web.served(store) as url:
        streams = listening(url, 20)
        saved = trip.append("messages", "news")
        assert {heard(told)["checkpoint"]["id"] for told in streams} == {saved.id}
        assert len(set(watchers)) == 1
        assert [event.id for event in reads] == [saved.id]
        for told in streams:
            told.close()


def test_nothing_is_read_when_the_last_stream_has_ended(store, trip, monkeypatch):
    monkeypatch.setattr(web_events, "_PAUSE", 0.01)

    def reading() -> bool:
        return any(thread.name == "holdfast events" for thread in threading.enumerate())

    async def listen() -> None:
        feed = web_events.Feed(store)
        for _ in range(2):  # and once more, when the thread has ended
            listener = web_events.Listener()
            feed.join(listener)
            assert reading()
            trip.append("messages", "news")
            assert len(await listener.next()) == 1
            del listener
            while reading():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(listen(), 30))


def test_a_stream_tells_what_lands_from_now_on_in_its_session(store, trip, monkeypatch):
    monkeypatch.setattr(web_events, "_PAUSE", 0.01)
    other = store.session("other")

    async def listen() -> None:
        feed = web_events.Feed(store)
        early, one = web_events.Listener(), web_events.Listener("other")
        feed.join(early)
        feed.join(one)
        trip.append("messages", "first")
        late = web_events.Listener()
        feed.join(late)
        other.save({})
        other.delete()
        events: dict[web_events.Listener, list[str]] = {early: [], one: [], late: []}
        for listener, count in ((early, 3), (one, 2), (late, 2)):
            while len(events[listener]) < count:
                events[listener] += await listener.next()
        sessions = {listener: [re.findall(r'"session":"(\w+)"', text)[0] for text in texts]
                    for listener, texts in events.items()}  # fmt: skip
        assert sessions == {early: ["trip", "other", "other"], one: ["other"] * 2,
                            late: ["other"] * 2}  # fmt: skip

    asyncio.run(asyncio.wait_for(listen(), 30))


def test_streams_of_slow_readers_and_of_a_closed_store_end(store, trip, monkeypatch):
    monkeypatch.setattr(web_events, "_PAUSE", 0.01)
    monkeypatch.setattr(web_events, "_BEHIND", 3)

    async def listen() -> None:
        feed = web_events.Feed(store)
        slow, quick = web_events.Listener(), web_events.Listener()
        feed.join(slow)
        feed.join(quick)
        for n in range(5):
            trip.append("messages", n)
            await quick.next()
        assert (slow.ended, quick.ended) == (True, False)
        store.close()
        assert [text async for text in web_events._stream(quick)] == [": listening\n\n"]

    asyncio.run(asyncio.wait_for(listen(), 30))


# -- how it is started ---------------------------------------------------------------------------


def test_the_address_that_is_printed_can_be_opened(tmp_path, store, monkeypatch, capsys):
    """Whatever is in the token."""
    server_of = Mock()
    monkeypatch.setattr(server, "server_of", server_of)
    words = ["--store", str(tmp_path / "web.db"), "serve", "--port", "0", "--auth-token"]
    assert run([*words, "p+q&r#s%41 x/y;zz"]) == 0
    address = urlsplit(capsys.readouterr().out.strip())
    [served] = server_of.call_args.args
    asking = TestClient(served, base_url=f"http://{address.netloc}")
    assert asking.get(f"/?{address.query}").status_code == 200


@pytest.mark.parametrize("command", [["serve"], ["export", "--html", "s"]])
def test_without_the_extra_it_says_what_to_install(tmp_path, command):
    with holdfast.open(tmp_path / "a.db") as opened:
        opened.session("s").save({})
    code = "import sys; sys.modules['starlette'] = None; from holdfast.__main__ import main; main()"
    ran = subprocess.run(
        [sys.executable, "-c", code, "--store", "a.db", *command],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert ran.returncode == 2
    assert "needs starlette" in ran.stderr
    assert "pip install 'holdfast[web]'" in ran.stderr
    assert [*tmp_path.glob("*.html")] == []


def test_a_port_that_is_taken(tmp_path, store):
    with server.listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(Unavailable, match="cannot listen"), web.served(store, port=port):
            pass


def test_a_viewer_in_a_thread(store, trip):
    with web.served(store, read_only=True) as url:
        with build_opener(HTTPCookieProcessor()).open(url) as page:
            assert page.read().startswith(b"<!doctype html>")
        with pytest.raises(HTTPError, match="401"):
            urlopen(url.partition("?")[0])
    with pytest.raises(URLError):
        urlopen(url)


def test_whoever_listens_does_not_keep_it_from_ending(store, capfd):
    with web.served(store) as url:
        opener = build_opener(HTTPCookieProcessor())
        opener.open(url).close()
        listening = [opener.open(f"{url.partition('?')[0]}api/events") for _ in range(3)]
        assert [told.readline() for told in listening] == [b": listening\n"] * 3
        begun = time.monotonic()
    assert time.monotonic() - begun < 0.9  # the second that running requests are given
    assert capfd.readouterr().err == ""
    for told in listening:
        told.close()


HALF_OPEN = {
    "nothing": "", "a part of the first line": "GET /api/ab", "no end of the headers": "{get}",
    "no end of the body": "{post}content-length: 9\r\n\r\n{{", "no end of a refused body":
    "POST /api/undo HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n{{",
    "no end of the second request": "{get}\r\n{get}",
}  # fmt: skip


@pytest.mark.parametrize("drip", [False, True], ids=["silent", "byte by byte"])
@pytest.mark.parametrize("name", HALF_OPEN)
def test_a_half_open_request_is_ended(store, trip, monkeypatch, capfd, name, drip):
    """It was waited for, for ever."""
    monkeypatch.setattr(server._Protocol, "arrival", 0.3)
    with web.served(store) as url:
        address = urlsplit(url)
        bearer = f"authorization: Bearer {address.query.removeprefix('token=')}\r\n"
        common = f"HTTP/1.1\r\nhost: localhost\r\n{bearer}"
        sent = HALF_OPEN[name].format(
            get=f"GET /api/about {common}", post=f"POST /api/undo {common}"
        )
        with socket.create_connection((address.hostname, address.port), timeout=0.05) as half:
            half.sendall(sent.encode())
            for _ in range(200):  # ten seconds
                try:
                    if not half.recv(1 << 16):
                        break
                except TimeoutError:
                    with suppress(ConnectionError):
                        half.send(b"x" if drip and "body" not in name else b" " * drip)
                except ConnectionError:
                    break
            else:
                pytest.fail("the connection is still open")
    assert "Traceback" not in capfd.readouterr().err


def test_a_request_in_time_is_answered(store, trip, monkeypatch):
    """Also one that takes longer than its arrival may, and one after another on a connection."""
    monkeypatch.setattr(server._Protocol, "arrival", 0.3)
    with web.served(store) as url:
        [told] = listening(url, 1)
        time.sleep(0.6)
        trip.append("messages", "late")
        assert heard(told)["checkpoint"]["session"] == "trip"
        told.close()
        address = urlsplit(url)
        connection = HTTPConnection(address.hostname or "", address.port or 0, timeout=30)
        for _ in range(3):
            connection.request("GET", "/api/about")
            assert connection.getresponse().read(), "it asks for the token"
            time.sleep(0.2)
        connection.close()


def test_a_fork_that_is_undone_can_be_redone(store, trip, ask, act):
    """Its session is hidden then, and nothing could be said of it."""
    act("undo", session="trip-b")
    assert [item["name"] for item in ask("sessions")["items"]] == ["trip"]
    told = ask("undoable", session="trip-b")["redo"]
    assert (told["kind"], told["problem"]) == ("fork", None)
    act("redo", session="trip-b", ref=told["ref"])
    assert [item["name"] for item in ask("sessions")["items"]] == ["trip", "trip-b"]
    store.session("trip-b").delete()
    assert ask("undoable", session="trip-b")["undo"]["kind"] == "delete"
    act("undo", session="trip-b")
    assert store.session("trip-b").exists()
    for name in ("undo", "redo"):
        act(name, 404, session="never")
    ask("undoable", 404, session="never")


def test_what_was_not_told_is_not_undone(trip, ask, act):
    ref = ask("undoable", session="trip")["undo"]["ref"]
    trip.append("messages", {"role": "user", "content": "one more"})
    newest = trip.get().id
    for wrong in (ref, "nonsense", "checkpoint x"):
        assert act("undo", 409, session="trip", ref=wrong)["error"] == "Conflict"
    assert trip.get().id == newest
    for kind in ("undo", "redo"):
        act(kind, session="trip", ref=ask("undoable", session="trip")[kind]["ref"])
    assert trip.get().id == newest


def test_what_undo_would_do_is_told(store, trip, ask):
    told = ask("undoable", session="trip")
    assert (told["undo"]["kind"], told["undo"]["saved"]) == ("append", True)
    assert told["undo"]["head"]["from"]["id"] == trip.get().id
    assert "nothing to redo" in told["redo"]["problem"]
    trip.label("asked", "begun")
    done = trip.undo()
    before = store.session("trip").operations()
    told = ask("undoable", session="trip")
    assert (told["redo"]["label"], told["redo"]["was"]) == ("begun", "asked")
    assert told["redo"]["created_at"] < holdfast_json.when(done.created_at)
    assert store.session("trip").operations() == before
    with trip.run():
        assert "is run by process" in ask("undoable", session="trip")["undo"]["problem"]
