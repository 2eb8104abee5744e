"""The viewer's API is what its description says, whatever it is asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import positive_data_acceptance

import holdfast
from holdfast import Usage, web
from holdfast.web.api import ACTIONS, READS

TOKEN = "a token of this test"
BEARER = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[holdfast.Store]:
    path: Path = tmp_path_factory.mktemp("described") / "web.db"
    with holdfast.open(path) as opened:
        trip = opened.session("0", agent="planner")
        trip.save(
            {"messages": [], "plan": {"budget": 900}},
            label="asked",
            usage=Usage(tokens=3, cost=0.5),
        )
        for n in range(3):
            trip.append("messages", {"role": "user", "content": f"message {n}"})
        trip.rewind("@~1")
        with opened.session("1").run() as run:
            run.tool({"id": "c1", "name": "add", "input": {"a": 1}}, lambda a: a + 1)
            run.wait_for("approval", prompt="Buy?")
        yield opened


@pytest.fixture
def described(store: holdfast.Store) -> Any:
    app = web.app(store, token=TOKEN, hosts=["*"])
    return schemathesis.openapi.from_asgi("/api/openapi.json", app, headers=BEARER)


def test_everything_is_described(described):
    paths = set(described.raw_schema["paths"])
    assert paths == {f"/api/{name}" for name in (*READS, *ACTIONS, "events")}


@pytest.mark.parametrize("name", [*READS, *ACTIONS])
def test_whatever_is_asked(name, described, rounds):
    operation = described[f"/api/{name}"]["GET" if name in READS else "POST"]
    # What can be done depends on what there is: a session may have nothing to undo.
    left_out = [positive_data_acceptance] if name in ACTIONS else []

    examples, unchecked = rounds(15, torture=200), [*HealthCheck]

    @settings(max_examples=examples, database=None, deadline=None, suppress_health_check=unchecked)
    @given(case=operation.as_strategy())
    def check(case: Any) -> None:
        answer = case.call(headers=BEARER)
        case.validate_response(answer, headers=BEARER, excluded_checks=left_out)

    check()


@pytest.mark.parametrize("session", ["0", "1"])
def test_what_is_there_is_answered_as_described(described, store, session):
    id = store.session(session).get().id
    asked = {"session": session, "id": id, "a": id, "b": id, "path": "messages", "limit": 2}
    nothing = {"messages", "blame"} if session == "1" else set()  # that state has no messages
    for name in READS:
        operation = described[f"/api/{name}"]["GET"]
        given = {p["name"] for p in operation.definition.raw["parameters"]}
        query = {key: value for key, value in asked.items() if key in given}
        if name in ("state", "value") and session == "1":
            del query["path"]
        case = operation.Case(query=query)
        answer = case.call(headers=BEARER)
        assert answer.status_code == (404 if name in nothing else 200), answer.text
        case.validate_response(answer, headers=BEARER)


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("fork", {"name": "forked"}), ("tag", {"tag": "t"}), ("label", {"label": "l"}),
        ("rewind", {}), ("undo", {"session": "0"}), ("redo", {"session": "0"}),
        ("answer", {"session": "1", "name": "approval", "answer": {"$tuple": [1]}}),
    ],
)  # fmt: skip
def test_what_is_done_is_answered_as_described(described, store, name, body):
    trip = store.session("0")
    trip.append("messages", "more")
    at = trip.rewind("@~1")
    if name == "redo":
        trip.undo()
    case = described[f"/api/{name}"]["POST"].Case(body={"id": at.id} | body)
    answer = case.call(headers=BEARER)
    assert answer.status_code == 200, answer.text
    case.validate_response(answer, headers=BEARER)
