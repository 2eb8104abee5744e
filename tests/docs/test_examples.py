"""The examples run, and show what they say they show."""

import os
import re
import runpy
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

import holdfast

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, folder: Path) -> str:
    environment = os.environ | {"TMPDIR": str(folder), "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [sys.executable, EXAMPLES / name],
        cwd=folder,
        env=environment,
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    return done.stdout


def test_quickstart(tmp_path):
    out = run("quickstart.py", tmp_path)
    titles = [line for line in out.splitlines() if line in "Save Kill Load Rewind Fork".split()]
    assert titles == "Save Kill Load Rewind Fork".split()
    assert "by SIGKILL after" in out
    assert "~ state.budget: 900 → 850" in out
    assert "The session's tree still has all 4 checkpoints." in out
    assert list(tmp_path.iterdir()) == []  # it cleans up behind itself


def test_loop(tmp_path):
    out = run("loop.py", tmp_path)
    asked = [line for line in out.splitlines() if "the model is asked" in line]
    assert len(asked) == 4  # twice for each, however often it was started
    assert asked[0].endswith("with 2 messages")  # the system prompt and the question
    assert out.count("2 tools were called") == 2
    assert out.count("what was said is kept") == 2
    assert out.count("18 degrees in Lisbon; 18 degrees in Porto") == 2
    assert list(tmp_path.iterdir()) == []


def test_killed(tmp_path):
    lines = [line.strip() for line in run("killed.py", tmp_path).splitlines()]
    again = lines.index("The same code again")
    before, after = lines[:again], lines[again:]
    assert before[1:] == [
        "the model is asked", "reserved room 7", "paid 120",
        f"(its exit status is {-signal.SIGKILL})", "What it has left",
        "reserve: room 7 is reserved", "pay: begun, and in doubt",
    ]  # fmt: skip
    assert after[1:] == [
        "was it paid? The bank says: yes", "the model is asked", "The room is reserved and paid.",
        "The bank has 1 payment.",
    ]  # fmt: skip
    assert list(tmp_path.iterdir()) == []


def test_best_of_n(tmp_path):
    out = run("best_of_n.py", tmp_path)
    scores = {name: int(score) for name, score in re.findall(r"(trip-\d): +(\d+) for", out)}
    assert len(scores) == 5
    best = max(scores, key=lambda name: scores[name])
    assert f"Kept: ['trip', '{best}']" in out
    assert f"The best is {best}, with {scores[best]}." in out
    for size, added in re.findall(r"checkpoints of ([\d,]+) bytes took ([\d,]+) bytes", out):
        assert int(added.replace(",", "")) < int(size.replace(",", ""))  # all of them, not each
    assert list(tmp_path.iterdir()) == []


def test_approval_agent(tmp_path):
    assert run("approval_agent.py", tmp_path) == "halted - waiting for 'c1'\n"
    with holdfast.open(tmp_path / "trip.db") as store:
        store.session("trip").answer("c1", value=True)
    for _ in range(2):
        done = run("approval_agent.py", tmp_path)
        assert done == "completed - Casa do Rio is booked for 850.\n"
    with holdfast.open(tmp_path / "trip.db") as store:
        assert [call.name for call in store.session("trip").calls()] == [
            "model",
            "c1",
            "book",
            "model",
        ]
        assert store.session("trip").usage().spent.cost == 0.00608


def test_approval_webhook(tmp_path, monkeypatch):
    with client("approval_webhook", tmp_path, monkeypatch) as (requests, store):
        for _ in range(2):  # the second changes nothing
            assert requests.post("/payments/a", json={"euro": 900}).status_code == 202
        [asked] = store.pending()
        address = f"/payments/a/{asked.key}"
        assert requests.post("/payments/a/other", json={"value": True}).status_code == 404
        assert requests.post(address, json={"value": "no"}).json() == "Thank you."
        assert "before: no" in requests.post(address, json={"value": True}).json()
        assert store.session("a").load()["result"] == "[holdfast] denied by a person: no"


def test_chat_server(tmp_path, monkeypatch):
    with client("chat_server", tmp_path, monkeypatch) as (requests, store):
        for id in ["1", "1", "2"]:
            assert requests.post("/chat/a", json={"id": id, "text": id}).json() == f"You said: {id}"
        roles = [message["role"] for message in store.session("a").load()["messages"]]
        assert roles == ["user", "assistant"] * 2


def test_chat_server_answers_one_message_at_a_time(tmp_path, monkeypatch):
    with client("chat_server", tmp_path, monkeypatch) as (requests, store):

        def slow_model(messages):
            store.session("a").append("messages", {"role": "user", "content": "Wait!"})
            return {"role": "assistant", "content": "too late"}

        [chat] = [route.endpoint for route in requests.app.routes if route.path == "/chat/{name}"]
        with monkeypatch.context() as patch:
            patch.setitem(chat.__globals__, "model", slow_model)
            assert requests.post("/chat/a", json={"id": "1", "text": "Hi"}).status_code == 409
        assert requests.post("/chat/a", json={"id": "1", "text": "Hi"}).json() == "You said: Wait!"
        messages = [message["content"] for message in store.session("a").load()["messages"]]
        assert messages == ["Hi", "Wait!", "You said: Wait!"]


@contextmanager
def client(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch):
    """A client of the service that an example defines, and its store."""
    monkeypatch.chdir(folder)
    service = runpy.run_path(str(EXAMPLES / f"{name}.py"))
    with service["store"] as store:
        yield TestClient(service["app"]), store


@pytest.mark.parametrize(
    ("name", "limit"), [("chat_server", 25), ("approval_agent", 40), ("approval_webhook", 40)]
)
def test_short_examples_are_short(name, limit):
    lines = (EXAMPLES / f"{name}.py").read_text("utf-8").splitlines()
    assert len([line for line in lines if line.strip()]) <= limit


def test_log_backend(tmp_path):
    """It only defines a backend. tests/storage/test_log_backend.py tests that."""
    assert run("log_backend.py", tmp_path) == ""


def test_every_example_is_tested():
    tests = [name.removeprefix("test_") for name in globals() if name.startswith("test_")]
    assert {p.stem for p in EXAMPLES.glob("*.py")} <= {*tests}
