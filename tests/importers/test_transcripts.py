"""Transcripts of agents become sessions: one checkpoint for each turn, and nothing silently wrong.

The builders write what Claude Code, Codex and programs around OpenAI's chat API write. `bring`
imports, and checks each time that the source is as it was and that the store is sound.
"""

import copy
import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast import InvalidRequest, NotFound, Retention, ToolCall, Usage, dangling_calls
from holdfast.importers import import_, untrusted
from holdfast.importers.save import ImportResult
from holdfast.importers.transcripts import conversation
from holdfast.importers.transcripts.claude_code import import_claude_code
from holdfast.importers.transcripts.codex import import_codex
from holdfast.importers.transcripts.openai_chat import import_openai_chat
from tests.importers.test_checkpoints import snapshot, why
from tests.support.stores import Home

Lines = list[dict[str, Any]]


# -- what the agents write -----------------------------------------------------------------------


class Claude:
    """Writes the lines of a session as Claude Code does."""

    def __init__(self, session: str = "s1", **fields: Any) -> None:
        self.lines: Lines = []
        self.session, self.fields = session, fields
        self.last: str | None = None
        self.names = f"{session}-{fields.get('agentId', '')}u"

    def line(self, kind: str, **fields: Any) -> str:
        uuid: str = fields.pop("uuid", f"{self.names}{len(self.lines)}")
        parent = fields.pop("parent", self.last)
        self.lines.append(
            {
                "parentUuid": parent,
                "isSidechain": False,
                "userType": "external",
                "cwd": "/home/ann/trip",
                "sessionId": self.session,
                "version": "2.1.0",
                "gitBranch": "main",
                "type": kind,
                "uuid": uuid,
                "timestamp": f"2026-03-01T10:00:{len(self.lines) % 60:02}.123Z",
            }
            | self.fields
            | fields
        )
        self.last = uuid
        return uuid

    def ask(self, text: str = "Go on", **fields: Any) -> str:
        return self.line("user", message={"role": "user", "content": text}, **fields)

    def block(self, id: str, block: dict[str, Any], output: int = 10, **fields: Any) -> str:
        usage = {
            "input_tokens": 100,
            "cache_creation_input_tokens": 20,
            "cache_read_input_tokens": 3,
            "output_tokens": output,
        }
        message: dict[str, Any] = {"id": id, "type": "message", "role": "assistant"}
        message |= {"model": "claude-x"}
        message |= {"content": [block], "stop_reason": None, "usage": usage}
        return self.line("assistant", message=message, requestId=f"r-{id}", **fields)

    def say(self, id: str, text: str = "Done.", output: int = 10, **fields: Any) -> str:
        return self.block(id, {"type": "text", "text": text}, output, **fields)

    def call(self, id: str, call: str, output: int = 10, **fields: Any) -> str:
        block = {"type": "tool_use", "id": call, "name": "search", "input": {"q": call}}
        return self.block(id, block, output, **fields)

    def result(self, call: str, **fields: Any) -> str:
        block = {"type": "tool_result", "tool_use_id": call, "content": f"found {call}"}
        message = {"role": "user", "content": [block]}
        return self.line("user", message=message, toolUseResult={"stdout": "…"}, **fields)

    def turn(self, n: int) -> None:
        """What is asked, looked up, and answered."""
        self.ask(f"question {n}")
        self.call(f"m{n}a", f"c{n}")
        self.result(f"c{n}")
        self.say(f"m{n}b", f"answer {n}")

    def compact(self, summary: str = "What was said so far", **fields: Any) -> None:
        boundary = {"subtype": "compact_boundary", "compactMetadata": {"trigger": "auto"} | fields}
        self.line("system", parent=None, logicalParentUuid=self.last, **boundary)
        self.ask(summary, isCompactSummary=True)


class Codex:
    """Writes the lines of a rollout as Codex does."""

    def __init__(self, session: str = "t1", **meta: Any) -> None:
        self.lines: Lines = []
        self.total = 0
        self.meta(session, **meta)

    def line(self, kind: str, payload: dict[str, Any], **fields: Any) -> None:
        minute, second = divmod(len(self.lines) * 2, 60)
        time = f"2026-03-01T10:{minute % 60:02}:{second:02}.000Z"
        self.lines.append({"timestamp": time, "type": kind, "payload": payload} | fields)

    def meta(self, session: str, **meta: Any) -> None:
        known = {"id": session, "cwd": "/home/ann/trip", "cli_version": "0.140.0"}
        git = {"branch": "main", "commit_hash": "abc"}
        self.line("session_meta", known | {"source": "cli", "git": git} | meta)

    def item(self, kind: str, **payload: Any) -> None:
        self.line("response_item", {"type": kind} | payload)

    def message(self, role: str, text: str) -> None:
        kind = "output_text" if role == "assistant" else "input_text"
        self.item("message", role=role, content=[{"type": kind, "text": text}])

    def event(self, kind: str, **payload: Any) -> None:
        self.line("event_msg", {"type": kind} | payload)

    def spend(self, tokens: int, **fields: Any) -> None:
        self.total += tokens
        self.count(self.total, tokens, **fields)

    def count(self, total: int, last: int, **fields: Any) -> None:
        info = {
            "total_token_usage": _tokens(total),
            "last_token_usage": _tokens(last),
            "model_context_window": 272_000,
        }
        payload = {"type": "token_count", "info": info, "rate_limits": None}
        self.line("event_msg", payload, **fields)

    def turn(self, n: int, tokens: int = 100) -> None:
        self.event("task_started", turn_id=f"turn-{n}")
        self.line("turn_context", {"cwd": "/home/ann/trip", "model": f"gpt-{n}"})
        self.message("user", f"question {n}")
        self.event("user_message", message=f"question {n}")
        self.item("function_call", name="shell", arguments='{"cmd": "ls"}', call_id=f"c{n}")
        self.spend(tokens)
        self.item("function_call_output", call_id=f"c{n}", output=f"found {n}")
        self.message("assistant", f"answer {n}")
        self.spend(tokens)
        self.event("task_complete", turn_id=f"turn-{n}")


def _tokens(total: int) -> dict[str, int]:
    parts = {"input_tokens": total - total // 10, "output_tokens": total // 10}
    return parts | {"cached_input_tokens": 0, "total_tokens": total}


def encoded(lines: Lines) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def write(path: Path, data: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else encoded(data))
    return path


def bring(store: holdfast.Store, path: Path, format: Any = None) -> ImportResult:
    before = snapshot(path)
    result = import_(store, path, format)
    assert snapshot(path) == before
    report = store.verify()
    assert report.ok, str(report)
    return result


def counts(result: ImportResult) -> tuple[int, int, int]:
    return result.sessions, result.checkpoints, result.known


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "elsewhere" / "source").mkdir(parents=True)
    return tmp_path / "elsewhere" / "source"


@pytest.fixture
def store() -> Iterator[holdfast.Store]:
    with holdfast.open("memory:") as store:
        yield store


def tree(store: holdfast.Store, session: str = "s1") -> list[holdfast.Checkpoint]:
    return list(store.session(session).tree())


def parents(store: holdfast.Store, session: str = "s1") -> list[int | None]:
    """For each checkpoint, which one of them is its parent."""
    ids = [checkpoint.id for checkpoint in tree(store, session)]
    return [ids.index(c.parent) if c.parent else None for c in tree(store, session)]


def texts(store: holdfast.Store, session: str = "s1", revision: Any = None) -> list[Any]:
    """What is said in a state: texts, calls and results, a list for each message."""
    state = store.session(session).load(revision)
    assert list(state) == ["messages"]
    return [_told(message) for message in state["messages"]]


def _told(message: dict[str, Any]) -> Any:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None:
        return message.get("call_id") or message["type"]
    names = ("text", "id", "tool_use_id")
    told = [next(block[n] for n in names if n in block) for block in content]
    return told[0] if len(told) == 1 else told


def tokens(store: holdfast.Store, session: str = "s1") -> list[int]:
    return [checkpoint.usage.tokens for checkpoint in tree(store, session)]


# -- Claude Code ---------------------------------------------------------------------------------


def claude(root: Path, lines: Lines | Claude, name: str = "s1.jsonl") -> Path:
    return write(root / name, lines.lines if isinstance(lines, Claude) else lines)


def test_claude_turns_arrive(home: Home, root: Path) -> None:
    talk = Claude()
    talk.turn(1)
    talk.turn(2)
    path = claude(root, talk)
    assert bring(home.store, path) == ImportResult(1, 2, 0, (), ())
    store = home.reopened()
    first = ["question 1", "c1", "c1", "answer 1"]
    assert texts(store, revision=tree(store)[0].id) == first
    assert texts(store) == [*first, "question 2", "c2", "c2", "answer 2"]
    messages = store.session("s1").load()["messages"]
    assert messages == [line["message"] for line in talk.lines]
    assert parents(store) == [None, 0]
    assert [c.trigger for c in tree(store)] == ["turn", "turn"]
    assert dangling_calls(messages) == []


def test_claude_meta_has_the_names_of_the_source(store: holdfast.Store, root: Path) -> None:
    talk = Claude()
    talk.turn(1)
    bring(store, claude(root, talk))
    [checkpoint] = tree(store)
    meta = checkpoint.meta
    expected = {"cwd": "/home/ann/trip", "version": "2.1.0", "gitBranch": "main"}
    assert {name: meta[name] for name in expected} == expected
    assert (meta["model"], meta["sessionId"], meta["requestId"]) == ("claude-x", "s1", "r-m1b")
    assert meta["created_at"] == talk.lines[0]["timestamp"]
    assert meta["timestamp"] == talk.lines[-1]["timestamp"]
    assert meta["imported"]["format"] == "claude-code"
    assert meta["imported"]["where"] == "s1.jsonl"
    assert checkpoint.key == f"claude-code:{talk.last}"


def test_claude_blocks_of_one_message_are_one(store: holdfast.Store, root: Path) -> None:
    talk = Claude()
    talk.ask("question")
    talk.block("m1", {"type": "thinking", "thinking": "…", "text": "hm"}, 1)
    talk.say("m1", "I will look.", 5)
    talk.call("m1", "c1", 50)
    talk.result("c1")
    talk.say("m2", "answer", 7)
    bring(store, claude(root, talk))
    assert texts(store) == ["question", ["hm", "I will look.", "c1"], "c1", "answer"]
    message = store.session("s1").load()["messages"][1]
    assert (message["id"], message["role"], message["usage"]["output_tokens"]) == (
        "m1",
        "assistant",
        50,
    )
    # Each line has the tokens of the whole message so far.
    assert tokens(store) == [123 + 50 + 123 + 7]
    spent = tree(store)[0].meta["usage"]
    assert (spent["input_tokens"], spent["output_tokens"]) == (200, 57)


def test_claude_usage_is_the_most_that_a_message_has_told(
    store: holdfast.Store, root: Path
) -> None:
    talk = Claude()
    talk.ask()
    talk.say("m1", "a", 40)
    talk.say("m1", "b", 2)  # out of order
    bring(store, claude(root, talk))
    assert tokens(store) == [123 + 40]


def test_claude_cost_of_old_versions(store: holdfast.Store, root: Path) -> None:
    talk = Claude()
    talk.ask()
    talk.say("m1", "a", costUSD=0.25)
    talk.say("m1", "b", costUSD=0.5)
    bring(store, claude(root, talk))
    assert tree(store)[0].usage == Usage(123, 10, cached=3, cost=0.5, model="claude-x")


def test_claude_usage_of_a_wrong_kind_is_listed(store: holdfast.Store, root: Path) -> None:
    talk = Claude()
    talk.ask()
    talk.say("m1", "a", -1)
    talk.say("m2", "b")
    talk.say("m3", "c", costUSD="much")
    talk.lines[2]["message"]["usage"] = [1]
    result = bring(store, claude(root, talk))
    assert texts(store) == ["Go on", "a", "b", "c"]
    assert [where for where, _ in result.skipped] == [f"s1.jsonl: line {n}" for n in (2, 3, 4)]
    assert tokens(store) == [0]


def parallel(order: str) -> Claude:
    """Two calls in one message, whose results hang on their own calls."""
    talk = Claude()
    talk.ask("question")
    text = talk.say("m1", "both")
    lines = {
        "a": lambda: talk.call("m1", "ca", parent=text, uuid="a"),
        "b": lambda: talk.call("m1", "cb", parent="a", uuid="b"),
        "A": lambda: talk.result("ca", parent="a"),
        "B": lambda: talk.result("cb", parent="b"),
    }
    for name in order:
        last = lines[name]()
    talk.say("m2", "answer", parent=last)
    talk.ask("more")
    talk.say("m3", "more, too")
    return talk


@pytest.mark.parametrize("order", ["abAB", "abBA", "aAbB"])
def test_claude_results_of_calls_at_once_are_no_branches(
    store: holdfast.Store, root: Path, order: str
) -> None:
    result = bring(store, claude(root, parallel(order)))
    assert result == ImportResult(1, 2, 0, (), ())
    assert parents(store) == [None, 0]
    results = ["ca", "cb"] if order != "abBA" else ["cb", "ca"]
    told = ["question", ["both", "ca", "cb"], *results, "answer"]
    assert texts(store) == [*told, "more", "more, too"]
    assert dangling_calls(store.session("s1").load()["messages"]) == []


@pytest.mark.parametrize("leaf", ["a", "b"])
def test_claude_question_after_either_result(store: holdfast.Store, root: Path, leaf: str) -> None:
    talk = Claude()
    talk.ask("question")
    talk.call("m1", "ca", uuid="a")
    talk.call("m1", "cb", uuid="b")
    talk.result("ca", parent="a", uuid="result a")
    talk.result("cb", parent="b", uuid="result b")
    talk.ask("never mind", parent=f"result {leaf}")
    talk.say("m2")
    bring(store, claude(root, talk))
    assert parents(store) == [None, 0]
    assert texts(store) == ["question", ["ca", "cb"], "ca", "cb", "never mind", "Done."]


def test_claude_progress_is_no_branch(store: holdfast.Store, root: Path) -> None:
    talk = Claude()
    talk.line("progress", data={"type": "hook_progress"}, parent=None)
    talk.ask("question")
    call = talk.call("m1", "c1")
    for _ in range(3):
        talk.line("progress", data={"type": "bash_progress"})
    behind = talk.last
    talk.result("c1", parent=call)
    talk.line("progress", parent=behind)  # late
    talk.say("m2", "answer")  # its parent is a line of progress
    talk.line("system", subtype="turn_duration")
    talk.ask("more")
    talk.say("m3", "more, too")
    result = bring(store, claude(root, talk))
    assert result == ImportResult(1, 2, 0, (), ())
    assert parents(store) == [None, 0]
    assert texts(store) == ["question", "c1", "c1", "answer", "more", "more, too"]
    first = tree(store)[0].meta
    assert first["lines"] == {"progress": 5, "system": 1}
    assert [line["subtype"] for line in first["other"]] == ["turn_duration"]


def test_claude_missing_parent_is_the_line_before(store: holdfast.Store, root: Path) -> None:
    talk = Claude()
    talk.turn(1)
    talk.ask("more", parent="nobody")
    talk.say("m2", "answer", parent="nobody, too")
    result = bring(store, claude(root, talk))
    assert texts(store) == ["question 1", "c1", "c1", "answer 1", "more", "answer"]
    assert parents(store) == [None, 0]
    assert "parent" in why(result, "s1.jsonl: line 5")
    assert "parent" in why(result, "s1.jsonl: line 6")


def test_claude_result_without_parent_belongs_to_its_call(
    store: holdfast.Store, root: Path
) -> None:
    talk = Claude()
    talk.ask("question")
    talk.call("m1", "c1")
    talk.ask("other", parent=talk.lines[0]["parentUuid"])  # said in place of the question
    talk.say("m2")
    talk.result("c1", parent="nobody")
    result = bring(store, claude(root, talk))
    assert result.skipped == ()
    states = [texts(store, revision=c.id) for c in tree(store)]
    assert ["question", "c1", "c1"] in states
    assert texts(store) == ["other", "Done."]  # where the conversation is


def test_claude_result_that_names_another_line_of_its_turn(
    store: holdfast.Store, root: Path
) -> None:
    talk = Claude()
    question = talk.ask("question")
    talk.call("m1", "c1")
    talk.result("c1", parent=question)
    talk.say("m2", "answer")
    bring(store, claude(root, talk))
    assert texts(store) == ["question", "c1", "c1", "answer"]
    assert parents(store) == [None]


def test_claude_result_that_comes_late(store: holdfast.Store, root: Path) -> None:
    talk = Claude()
    talk.ask("question")
    call = talk.call("m1", "c1")
    talk.say("m2", "meanwhile")
    talk.result("c1", parent=call)
    talk.say("m3", "answer", parent=talk.lines[2]["uuid"])
    bring(store, claude(root, talk))
    assert texts(store) == ["question", "c1", "meanwhile", "c1", "answer"]
    assert parents(store) == [None]


def test_claude_question_after_a_late_result(store: holdfast.Store, root: Path) -> None:
    talk = Claude()
    talk.ask("question")
    call = talk.call("m1", "c1")
    talk.say("m2", "meanwhile")
    talk.result("c1", parent=call)
    talk.ask("more")
    bring(store, claude(root, talk))
    assert texts(store) == ["question", "c1", "meanwhile", "c1", "more"]


def test_claude_second_result_follows_its_parent(store: holdfast.Store, root: Path) -> None:
    talk = Claude()
    talk.ask("question")
    talk.call("m1", "c1")
    talk.result("c1")
    talk.say("m2", "answer")
    talk.result("c1")
    bring(store, claude(root, talk))
    assert texts(store) == ["question", "c1", "c1", "answer", "c1"]


def test_claude_part_of_a_message_after_something_else_was_said(
    store: holdfast.Store, root: Path
) -> None:
    talk = Claude()
    talk.ask("question")
    part = talk.say("m1", "first part")
    talk.ask("wait")
    talk.say("m1", "second part", parent=part)
    path = claude(root, talk)
    bring(store, path)
    assert texts(store) == ["question", "first part", "second part"]
    assert parents(store) == [None, 0, 0]
    talk.say("m1", "third part")
    bring(store, claude(root, talk))
    assert texts(store) == ["question", "first part", ["second part", "third part"]]
    with holdfast.open("memory:") as other:
        import_claude_code(other, path)
        assert texts(other) == texts(store)


def test_claude_going_back_by_a_line_of_progress(store: holdfast.Store, root: Path) -> None:
    talk = Claude()
    talk.turn(1)
    fork = talk.last
    talk.turn(2)
    talk.line("progress", parent=fork)
    talk.ask("other")
    bring(store, claude(root, talk))
    assert parents(store) == [None, 0, 0]


def test_claude_progress_with_a_missing_parent(store: holdfast.Store, root: Path) -> None:
    talk = Claude()
    talk.turn(1)
    talk.line("progress", parent="nobody")
    talk.ask("more")
    talk.say("m2", "answer")
    bring(store, claude(root, talk))
    assert parents(store) == [None, 0]


@pytest.mark.parametrize("shape", ["itself", "each other", "later"])
def test_claude_parents_in_a_circle(store: holdfast.Store, root: Path, shape: str) -> None:
    talk = Claude()
    talk.ask("question", uuid="q")
    talk.say("m1", "answer", uuid="a", parent="a" if shape == "itself" else "q")
    talk.ask("more", uuid="q2", parent="a2" if shape != "itself" else "a")
    talk.say("m2", "answer, too", uuid="a2", parent="q2")
    result = bring(store, claude(root, talk))
    assert texts(store) == ["question", "answer", "more", "answer, too"]
    assert parents(store) == [None, 0]
    assert len(result.skipped) == 1


def test_claude_lines_written_twice(store: holdfast.Store, root: Path) -> None:
    talk = Claude()
    talk.turn(1)
    talk.turn(2)
    again = [line | {"cwd": "/elsewhere"} for line in talk.lines[:6]]
    other = talk.lines[1] | {"message": {"role": "assistant", "content": "something else"}}
    result = bring(store, claude(root, [*talk.lines, *again, other]))
    assert len(texts(store)) == 8
    assert tokens(store) == [266, 266]
    [(where, reason)] = result.skipped
    assert where == "s1.jsonl: line 15"
    assert "uuid" in reason


def test_claude_going_back_makes_a_sibling(store: holdfast.Store, root: Path) -> None:
    talk = Claude()
    talk.turn(1)
    fork = talk.last
    talk.turn(2)
    talk.turn(3)
    talk.ask("other question", parent=fork)
    talk.say("m9", "other answer")
    bring(store, claude(root, talk))
    assert parents(store) == [None, 0, 1, 0]
    assert texts(store)[-3:] == ["answer 1", "other question", "other answer"]
    assert store.session("s1").head == tree(store)[-1]
    assert len(texts(store, revision=tree(store)[2].id)) == 12
    assert tokens(store) == [266, 266, 266, 133]


def test_claude_going_back_to_the_beginning(store: holdfast.Store, root: Path) -> None:
    talk = Claude()
    talk.turn(1)
    talk.ask("other question", parent=None)
    talk.say("m9", "other answer")
    assert bring(store, claude(root, talk)) == ImportResult(1, 3, 0, (), ())
    start, first, second = tree(store)
    assert store.session("s1").load(start.id) == {"messages": []}
    assert parents(store) == [None, 0, 0]
    assert texts(store, revision=first.id)[0] == "question 1"
    assert texts(store, revision=second.id) == ["other question", "other answer"]
    assert bring(store, root) == ImportResult(1, 0, 3, (), ())


def test_claude_line_that_is_named_like_the_beginning(store: holdfast.Store, root: Path) -> None:
    talk = Claude()
    talk.ask("question")
    talk.say("m1", uuid="start")
    talk.ask("other question", parent=None)
    assert bring(store, claude(root, talk)) == ImportResult(1, 3, 0, (), ())
    assert bring(store, root) == ImportResult(1, 0, 3, (), ())


def test_claude_going_back_to_the_beginning_later(store: holdfast.Store, root: Path) -> None:
    """There is nothing before the first turn to go back to: an empty checkpoint follows."""
    talk = Claude()
    talk.turn(1)
    bring(store, claude(root, talk))
    talk.ask("other question", parent=None)
    talk.say("m9", "other answer")
    result = bring(store, claude(root, talk))
    assert counts(result) == (1, 2, 1)
    assert "it follows" in why(result, "s1.jsonl")
    assert parents(store) == [None, 0, 1]
    assert texts(store) == ["other question", "other answer"]
    assert bring(store, root) == ImportResult(1, 0, 3, (), ())


def test_claude_second_answer_is_a_sibling(store: holdfast.Store, root: Path) -> None:
    talk = Claude()
    talk.turn(1)
    question = talk.ask("question 2")
    talk.say("m2", "first try")
    talk.say("m3", "second try", parent=question)
    talk.turn(4)
    bring(store, claude(root, talk))
    states = [texts(store, revision=c.id)[4:] for c in tree(store)]
    assert ["question 2", "first try"] in states
    assert ["question 2", "second try"] in states
    assert texts(store)[4:7] == ["question 2", "second try", "question 4"]


def test_claude_going_back_into_a_turn(store: holdfast.Store, root: Path) -> None:
    talk = Claude()
    talk.turn(0)
    talk.ask("question")
    talk.call("m1", "c1")
    fork = talk.result("c1")
    talk.say("m2", "answer")
    whole = len(talk.lines)
    talk.ask("other", parent=fork)
    talk.say("m3", "other answer")
    path = claude(root, talk)
    bring(store, path)
    states = [texts(store, revision=c.id)[4:] for c in tree(store)]
    assert states == [
        [],
        ["question", "c1", "c1"],
        ["question", "c1", "c1", "answer"],
        ["question", "c1", "c1", "other", "other answer"],
    ]
    assert parents(store) == [None, 0, 1, 1]
    assert tokens(store) == [266, 133, 133, 133]
    # Had the turn been imported before, as a whole:
    with holdfast.open("memory:") as other:
        import_claude_code(other, claude(root, talk.lines[:whole], "part.jsonl"))
        result = import_claude_code(other, path)
        assert counts(result) == (1, 1, 2)
        assert "its parent" in why(result, f"s1.jsonl: line {len(talk.lines)}")
        assert texts(other)[4:] == states[-1]
        assert parents(other) == [None, 0, 0]
        assert tokens(other) == [266, 266, 133]


def test_claude_questions_without_an_answer(store: holdfast.Store, root: Path) -> None:
    talk = Claude()
    talk.ask("first")
    first = talk.last
    talk.ask("and second")
    talk.ask("no, third", parent=first)
    talk.say("m1", "answer")
    bring(store, claude(root, talk))
    states = [texts(store, revision=c.id) for c in tree(store)]
    assert states == [["first"], ["first", "and second"], ["first", "no, third", "answer"]]


def test_claude_what_the_program_adds_begins_no_turn(store: holdfast.Store, root: Path) -> None:
    talk = Claude()
    talk.ask("question")
    talk.call("m1", "c1")
    talk.ask("a reminder", isMeta=True)
    talk.result("c1")
    talk.ask("what a skill says", isMeta=True)
    talk.say("m2", "answer")
    talk.ask("a caveat", isMeta=True)
    talk.ask("more")
    talk.say("m3", "more, too")
    bring(store, claude(root, talk))
    states = [texts(store, revision=c.id) for c in tree(store)]
    assert states[0] == ["question", "c1", "a reminder", "c1", "what a skill says", "answer"]
    assert states[1][6:] == ["a caveat", "more", "more, too"]
    assert len(states) == 2


def test_claude_compaction_replaces_the_history(store: holdfast.Store, root: Path) -> None:
    talk = Claude()
    talk.turn(1)
    talk.turn(2)
    before = talk.last
    talk.compact()
    talk.say("m8", "going on")  # in the middle of a turn
    talk.turn(3)
    after = talk.last
    talk.ask("as it was", parent=before)
    talk.say("m9", "yes")
    talk.ask("as it is", parent=after)
    talk.say("m10", "no")
    assert bring(store, claude(root, talk)) == ImportResult(1, 7, 0, (), ())
    assert parents(store) == [None, 0, 1, 2, 3, 1, 4]
    assert [c.trigger for c in tree(store)][2:4] == ["compaction", "turn"]
    states = [texts(store, revision=c.id) for c in tree(store)]
    assert len(states[1]) == 8
    assert states[2] == ["What was said so far"]
    assert states[3] == ["What was said so far", "going on"]
    assert states[5] == [*states[1], "as it was", "yes"]
    assert states[6] == [*states[4], "as it is", "no"]
    boundary = [line for line in tree(store)[1].meta["other"] if line["type"] == "system"]
    assert [line["compactMetadata"] for line in boundary] == [{"trigger": "auto"}]


def test_claude_compaction_that_keeps_a_part(store: holdfast.Store, root: Path) -> None:
    talk = Claude()
    talk.turn(1)
    talk.compact(preservedSegment={"headUuid": "s1-u2"})
    result = bring(store, claude(root, talk))
    assert texts(store) == ["What was said so far"]
    assert "keeps a part of the history" in why(result, "s1.jsonl: line 5")


def agents(style: str) -> dict[str, Lines]:
    """A session with two sub-agents, in the files of one version or another: by their names."""
    talk = Claude()
    talk.ask("question")
    talk.call("m1", "task")
    start = len(talk.lines)
    files: dict[str, Lines] = {}
    for agent in ("a1", "a2"):
        named = {} if style == "unnamed" else {"agentId": agent}
        helper = Claude(isSidechain=True, **named)
        helper.names = agent
        helper.ask(f"look up {agent}", parent=None)
        helper.say(f"{agent} m1", f"found {agent}", 1000)
        if style == "files":
            files[f"s1/subagents/agent-{agent}.jsonl"] = helper.lines
        elif style == "beside":
            files[f"agent-{agent}.jsonl"] = helper.lines
        else:
            talk.lines += helper.lines
    if style == "inside":  # they were at work at the same time
        talk.lines[start:] = [talk.lines[start + n] for n in (0, 2, 1, 3)]
    talk.result("task")
    talk.say("m2", "answer")
    return files | {"s1.jsonl": talk.lines}


@pytest.mark.parametrize("style", ["inside", "unnamed", "beside", "files"])
def test_claude_sub_agents_are_children(store: holdfast.Store, root: Path, style: str) -> None:
    for name, lines in agents(style).items():
        claude(root, lines, name)
    assert bring(store, root) == ImportResult(3, 3, 0, (), ())
    assert texts(store) == ["question", "task", "task", "answer"]
    names = [info.name for info in store.sessions()]
    ends = ("a10", "a20") if style == "unnamed" else ("a1", "a2")
    assert names == ["s1", *[f"s1/agent-{end}" for end in ends]]
    for name, agent in zip(names[1:], ("a1", "a2"), strict=True):
        assert texts(store, name) == [f"look up {agent}", f"found {agent}"]
        assert [c.child_of for c in tree(store, name)] == ["s1"]
    usage = store.session("s1").usage()
    assert (usage.spent.tokens, usage.children.tokens) == (266, 2246)


def test_claude_session_is_named_by_its_own_lines(store: holdfast.Store, root: Path) -> None:
    talk, helper = Claude(), Claude("elsewhere", isSidechain=True, agentId="a1")
    talk.turn(1)
    helper.turn(2)
    bring(store, claude(root, [*talk.lines, *helper.lines]))
    assert [info.name for info in store.sessions()] == ["s1", "s1/agent-a1"]


def test_claude_unknown_lines_are_kept_and_counted(store: holdfast.Store, root: Path) -> None:
    talk = Claude()
    talk.line("mystery", what={"is": [1, None]})
    talk.turn(1)
    talk.line("mystery", what="too")
    talk.line("file-history-snapshot", snapshot={"files": ["x"]})
    talk.turn(2)
    result = bring(store, claude(root, talk))
    assert "2 lines of an unknown type 'mystery'" in why(result, "s1.jsonl")
    first, second = tree(store)
    assert first.meta["lines"] == {"mystery": 2, "file-history-snapshot": 1}
    assert [line["what"] for line in first.meta["other"]] == [{"is": [1, None]}, "too"]
    assert "lines" not in second.meta


def test_claude_long_lines_are_only_counted(
    store: holdfast.Store, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = Claude()
    talk.turn(1)
    talk.line("mystery", what="short")
    talk.line("mystery", what="long" * 1000)
    monkeypatch.setattr(conversation, "KEPT", 2000)
    bring(store, claude(root, talk))
    meta = tree(store)[0].meta
    assert meta["lines"] == {"mystery": 2}
    assert [line["what"] for line in meta["other"]] == ["short"]


def test_claude_fields_of_our_names(store: holdfast.Store, root: Path) -> None:
    talk = Claude(lines="theirs", imported="theirs, too")
    talk.turn(1)
    talk.line("summary", summary="A trip")
    bring(store, claude(root, talk))
    meta = tree(store)[0].meta
    assert meta["lines"] == {"summary": 1}
    assert meta["fields"] == {"lines": "theirs", "imported": "theirs, too"}


def test_claude_a_resumed_file_is_named_by_its_last_lines(
    store: holdfast.Store, root: Path
) -> None:
    talk = Claude("old")
    talk.turn(1)
    claude(root, talk, "old.jsonl")
    talk.session = "new"
    talk.turn(2)
    claude(root, talk, "new.jsonl")
    assert counts(bring(store, root)) == (2, 3, 0)
    assert len(texts(store, "old")) == 4
    assert len(texts(store, "new")) == 8


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([], "no message"),
        ([{"type": "summary", "summary": "x", "leafUuid": "y"}], "no message"),
        (
            [{"type": "user", "uuid": "u", "message": {"role": "user", "content": "x"}}],
            "names a session",
        ),
    ],
)
def test_claude_files_without_a_conversation(
    store: holdfast.Store, root: Path, lines: Lines, reason: str
) -> None:
    result = bring(store, claude(root, lines), "claude-code")
    assert counts(result) == (0, 0, 0)
    assert reason in why(result, "s1.jsonl")


def test_claude_lines_without_uuids(store: holdfast.Store, root: Path) -> None:
    talk = Claude()
    talk.turn(1)
    talk.turn(2)
    for line in talk.lines:
        del line["uuid"], line["parentUuid"]
    claude(root, talk)
    first = bring(store, root)
    assert counts(first)[1:] == (2 + 1, 0)  # and the beginning: both questions name no parent
    assert counts(bring(store, root)) == (1, 0, 3)


# -- Codex ---------------------------------------------------------------------------------------


def codex(root: Path, rollout: Lines | Codex, name: str = "rollout-1.jsonl") -> Path:
    return write(root / name, rollout.lines if isinstance(rollout, Codex) else rollout)


def test_codex_turns_arrive(home: Home, root: Path) -> None:
    rollout = Codex(base_instructions={"text": "Be brief"})
    rollout.turn(1)
    rollout.turn(2)
    path = codex(root, rollout)
    assert bring(home.store, path) == ImportResult(1, 2, 0, (), ())
    store = home.reopened()
    first = ["question 1", "c1", "c1", "answer 1"]
    assert texts(store, "t1", tree(store, "t1")[0].id) == first
    assert texts(store, "t1") == [*first, "question 2", "c2", "c2", "answer 2"]
    messages = store.session("t1").load()["messages"]
    items = [line["payload"] for line in rollout.lines if line["type"] == "response_item"]
    assert messages == items
    assert dangling_calls(messages) == []
    assert parents(store, "t1") == [None, 0]


def test_codex_meta_has_the_names_of_the_source(store: holdfast.Store, root: Path) -> None:
    rollout = Codex(base_instructions={"text": "Be brief"})
    rollout.turn(1)
    rollout.turn(2)
    bring(store, codex(root, rollout))
    first, second = (c.meta for c in tree(store, "t1"))
    assert (first["cwd"], first["model"]) == ("/home/ann/trip", "gpt-1")
    assert (first["cli_version"], first["git"]["branch"]) == ("0.140.0", "main")
    assert first["base_instructions"] == {"text": "Be brief"}
    assert second["model"] == "gpt-2"
    assert "base_instructions" not in second
    assert second["created_at"] < second["timestamp"]
    assert second["lines"]["event_msg.token_count"] == 2


def test_codex_counts_are_cumulative(store: holdfast.Store, root: Path) -> None:
    rollout = Codex()
    rollout.turn(1, 1000)
    rollout.count(rollout.total, 1000)  # the same count again, with new limits
    rollout.event("token_count", info=None, rate_limits={"primary": 3})
    rollout.turn(2, 30)
    bring(store, codex(root, rollout))
    assert tokens(store, "t1") == [2000, 60]
    assert tree(store, "t1")[0].usage == Usage(1800, 200, model="gpt-1")
    assert tree(store, "t1")[0].meta["usage"] == {
        "input_tokens": 1800,
        "output_tokens": 200,
        "total_tokens": 2000,
    }


def test_codex_count_that_begins_anew(store: holdfast.Store, root: Path) -> None:
    rollout = Codex()
    rollout.turn(1, 1000)
    rollout.total = 0
    rollout.turn(2, 40)
    bring(store, codex(root, rollout))
    assert tokens(store, "t1") == [2000, 80]


@pytest.mark.parametrize("bad", [{"total_token_usage": {"total_tokens": "9"}}, [], {}])
def test_codex_count_of_a_wrong_kind(store: holdfast.Store, root: Path, bad: Any) -> None:
    rollout = Codex()
    rollout.turn(1)
    rollout.event("token_count", info=bad)
    rollout.turn(2)
    result = bring(store, codex(root, rollout))
    assert tokens(store, "t1") == [200, 200]
    [(where, _)] = result.skipped
    assert where == "rollout-1.jsonl: line 12"


def test_codex_what_the_program_says_begins_no_turn(store: holdfast.Store, root: Path) -> None:
    rollout = Codex()
    rollout.event("task_started")
    rollout.message("developer", "permissions")
    rollout.message("user", "<environment_context>\n<cwd>/x</cwd>")
    rollout.message("user", "question 1")
    rollout.message("assistant", "answer 1")
    rollout.message("user", "<environment_context>\n<cwd>/y</cwd>")
    rollout.message("assistant", "noted")
    rollout.event("task_started")
    rollout.message("developer", "other permissions")
    rollout.message("user", "question 2")
    bring(store, codex(root, rollout))
    states = [texts(store, "t1", c.id) for c in tree(store, "t1")]
    assert [len(state) for state in states] == [6, 8]
    assert states[1][-2:] == ["other permissions", "question 2"]


def test_codex_turns_without_events(store: holdfast.Store, root: Path) -> None:
    rollout = Codex()
    for n in range(3):
        rollout.message("user", f"question {n}")
        rollout.message("assistant", f"answer {n}")
    bring(store, codex(root, rollout))
    assert [len(texts(store, "t1", c.id)) for c in tree(store, "t1")] == [2, 4, 6]


def test_codex_compaction_replaces_the_history(store: holdfast.Store, root: Path) -> None:
    rollout = Codex()
    rollout.turn(1)
    kept = {
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": "in short"}],
    }
    sealed = {"type": "compaction", "encrypted_content": "…"}
    rollout.line("compacted", {"message": "", "replacement_history": [kept, sealed]})
    rollout.turn(2)
    assert bring(store, codex(root, rollout)) == ImportResult(1, 3, 0, (), ())
    assert parents(store, "t1") == [None, 0, 1]
    states = [store.session("t1").load(c.id)["messages"] for c in tree(store, "t1")]
    assert (len(states[0]), states[1]) == (4, [kept, sealed])
    assert states[2][:2] == [kept, sealed]
    assert len(states[2]) == 6
    assert [c.trigger for c in tree(store, "t1")] == ["turn", "compaction", "turn"]


def test_codex_compaction_within_a_turn(store: holdfast.Store, root: Path) -> None:
    rollout = Codex()
    rollout.turn(1)
    rollout.message("user", "question 2")
    rollout.line("compacted", {"message": "", "replacement_history": [{"type": "compaction"}]})
    rollout.message("assistant", "answer 2")
    rollout.event("thread_rolled_back", num_turns=1)
    rollout.turn(3)
    bring(store, codex(root, rollout))
    assert [c.trigger for c in tree(store, "t1")] == ["turn", "turn", "compaction", "turn", "turn"]
    assert parents(store, "t1") == [None, 0, 1, 2, 0]
    states = [texts(store, "t1", c.id) for c in tree(store, "t1")]
    assert states[2:4] == [["compaction"], ["compaction", "answer 2"]]


def test_codex_compaction_with_a_summary_alone(store: holdfast.Store, root: Path) -> None:
    rollout = Codex()
    rollout.turn(1)
    rollout.line("compacted", {"message": "in short"})
    rollout.turn(2)
    result = bring(store, codex(root, rollout))
    assert texts(store, "t1")[:2] == ["in short", "question 2"]
    assert "only its summary" in why(result, "rollout-1.jsonl: line 12")


@pytest.mark.parametrize("history", [[], {}, ["text"], [{"role": "user"}]])
def test_codex_compaction_to_what_is_no_history(
    store: holdfast.Store, root: Path, history: Any
) -> None:
    rollout = Codex()
    rollout.turn(1)
    rollout.line("compacted", {"message": "in short", "replacement_history": history})
    rollout.turn(2)
    result = bring(store, codex(root, rollout))
    assert "replacement_history" in why(result, "rollout-1.jsonl: line 12")
    assert len(texts(store, "t1")) == 8


def test_codex_rollback_makes_a_sibling(store: holdfast.Store, root: Path) -> None:
    rollout = Codex()
    for n in (1, 2, 3):
        rollout.turn(n)
    rollout.event("thread_rolled_back", num_turns=2)
    rollout.turn(4)
    bring(store, codex(root, rollout))
    assert parents(store, "t1") == [None, 0, 1, 0]
    assert [text for text in texts(store, "t1") if "question" in text] == [
        "question 1",
        "question 4",
    ]
    assert store.session("t1").head == tree(store, "t1")[-1]
    assert tokens(store, "t1") == [200] * 4  # what was taken back was paid for all the same


def test_codex_the_same_again_after_a_rollback(store: holdfast.Store, root: Path) -> None:
    rollout = Codex()
    rollout.turn(1)
    at = len(rollout.lines)
    rollout.turn(2)
    same = rollout.lines[at:]
    rollout.event("thread_rolled_back", num_turns=1)
    assert bring(store, codex(root, [*rollout.lines, *same])) == ImportResult(1, 3, 0, (), ())
    assert parents(store, "t1") == [None, 0, 0]


def test_codex_rollback_at_the_end_moves_the_head(store: holdfast.Store, root: Path) -> None:
    rollout = Codex()
    rollout.turn(1)
    rollout.turn(2)
    path = codex(root, rollout)
    bring(store, path)
    rollout.event("thread_rolled_back", num_turns=1)
    assert counts(bring(store, codex(root, rollout))) == (1, 0, 2)
    assert store.session("t1").head == tree(store, "t1")[0]
    with holdfast.open("memory:") as other:
        import_codex(other, path)
        assert other.session("t1").head == tree(other, "t1")[0]


def test_codex_rollback_of_everything(store: holdfast.Store, root: Path) -> None:
    rollout = Codex()
    rollout.turn(1)
    rollout.event("thread_rolled_back", num_turns=9)
    path = codex(root, rollout)
    bring(store, path)
    assert store.session("t1").load() == {"messages": []}
    rollout.turn(2)
    assert counts(bring(store, codex(root, rollout))) == (1, 1, 2)
    assert parents(store, "t1") == [None, 0, 0]
    assert texts(store, "t1")[0] == "question 2"


def test_codex_rollback_counts_turns_of_the_user(store: holdfast.Store, root: Path) -> None:
    rollout = Codex()
    rollout.turn(1)
    rollout.turn(2)
    rollout.event("task_started")
    rollout.message("assistant", "by the way")
    rollout.event("thread_rolled_back", num_turns=1)
    rollout.turn(3)
    bring(store, codex(root, rollout))
    assert parents(store, "t1") == [None, 0, 1, 0]


def test_codex_rollback_past_a_compaction(store: holdfast.Store, root: Path) -> None:
    rollout = Codex()
    rollout.turn(1)
    rollout.turn(2)
    rollout.line("compacted", {"message": "", "replacement_history": [{"type": "compaction"}]})
    rollout.event("thread_rolled_back", num_turns=1)
    rollout.turn(3)
    result = bring(store, codex(root, rollout))
    assert parents(store, "t1") == [None, 0, 1, 0]
    [(_, reason)] = result.skipped
    assert "compacted" in reason


SPAWNED = {"subagent": {"thread_spawn": {"parent_thread_id": "t1", "depth": 1}}}


def test_codex_sub_agents_are_children(store: holdfast.Store, root: Path) -> None:
    parent, child = Codex(), Codex("t2", source=SPAWNED)
    parent.turn(1)
    child.turn(2, 7)
    codex(root, child, "2026/03/01/rollout-0.jsonl")
    codex(root, parent, "2026/03/01/rollout-1.jsonl")
    assert bring(store, root) == ImportResult(2, 2, 0, (), ())
    assert [c.child_of for c in tree(store, "t2")] == ["t1"]
    usage = store.session("t1").usage()
    assert (usage.spent.tokens, usage.children.tokens) == (200, 14)


@pytest.mark.parametrize("stamped", ["as before", "anew"])
@pytest.mark.parametrize("goes_on", [True, False])
@pytest.mark.parametrize("meta", [{"source": SPAWNED}, {"forked_from_id": "t1"}])
def test_codex_copied_history_is_not_paid_twice(
    store: holdfast.Store, root: Path, stamped: str, goes_on: bool, meta: dict[str, Any]
) -> None:
    """A sub-agent's rollout, or a fork's, may begin with that of the session it comes from."""
    parent = Codex()
    parent.turn(1, 1000)
    child = Codex("t2", **meta)
    child.lines[0]["timestamp"] = "2026-03-01T12:00:00.000Z"
    for line in parent.lines:
        time = {"timestamp": "2026-03-01T12:00:00.100Z"} if stamped == "anew" else {}
        child.lines.append(line | time)
    child.total = parent.total if goes_on else 0
    at = len(child.lines)
    child.turn(2, 7)
    for n, line in enumerate(child.lines[at:]):
        line["timestamp"] = f"2026-03-01T12:01:{n:02}.000Z"
    bring(store, codex(root, child))
    assert tokens(store, "t2") == [0, 14]
    assert len(texts(store, "t2")) == 8
    assert [c.child_of for c in tree(store, "t2")] == [meta.get("source") and "t1"] * 2


def test_codex_count_of_a_sub_agent_passes_that_of_a_copy(
    store: holdfast.Store, root: Path
) -> None:
    rollout = Codex("t2", source=SPAWNED)
    rollout.turn(1, 10)
    for line in rollout.lines:
        line["timestamp"] = rollout.lines[0]["timestamp"]
    rollout.total = 0
    rollout.turn(2, 1000)
    bring(store, codex(root, rollout))
    assert tokens(store, "t2") == [0, 2000]


def test_codex_fork_whose_count_goes_on_without_a_copy(store: holdfast.Store, root: Path) -> None:
    rollout = Codex("t2", forked_from_id="t1")
    rollout.total = 1_000_000
    rollout.turn(1, 7)
    bring(store, codex(root, rollout))
    assert tokens(store, "t2") == [14]


def test_codex_first_rollouts_had_items_alone(store: holdfast.Store, root: Path) -> None:
    lines: Lines = [
        {"id": "t0", "timestamp": "2025-05-01T10:00:00Z", "instructions": "Be brief"},
        {"record_type": "state"},
    ]
    for n in range(2):
        lines.append({"type": "message", "role": "user", "content": f"question {n}"})
        lines.append({"type": "message", "role": "assistant", "content": f"answer {n}"})
        lines.append({"record_type": "state"})
    result = bring(store, codex(root, lines))
    assert counts(result) == (1, 2, 0)
    assert texts(store, "t0") == ["question 0", "answer 0", "question 1", "answer 1"]
    assert tree(store, "t0")[0].meta["instructions"] == "Be brief"
    assert "3 lines of an unknown type" in why(result, "rollout-1.jsonl")


def test_codex_without_a_name(store: holdfast.Store, root: Path) -> None:
    rollout = Codex()
    rollout.turn(1)
    bring(store, codex(root, rollout.lines[1:]))
    assert len(texts(store, "rollout-1")) == 4


def test_codex_unknown_lines_are_kept_and_counted(store: holdfast.Store, root: Path) -> None:
    rollout = Codex()
    rollout.turn(1)
    rollout.line("mystery", {"is": [1]})
    rollout.event("turn_aborted", reason="interrupted")
    result = bring(store, codex(root, rollout))
    assert "1 lines of an unknown type 'mystery'" in why(result, "rollout-1.jsonl")
    [checkpoint] = tree(store, "t1")
    assert checkpoint.meta["lines"]["mystery"] == 1
    kept = [line["payload"] for line in checkpoint.meta["other"]]
    assert kept == [{"is": [1]}, {"type": "turn_aborted", "reason": "interrupted"}]


# -- OpenAI's chat API ---------------------------------------------------------------------------


def chat(count: int, *, calls: bool = True) -> Lines:
    messages: Lines = [{"role": "system", "content": "Be brief"}]
    for n in range(count):
        messages.append({"role": "user", "content": f"question {n}"})
        if calls:
            function = {"name": "search", "arguments": '{"q": "x"}'}
            call = {"id": f"c{n}", "type": "function", "function": function}
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": f"c{n}", "content": "found"})
        messages.append({"role": "assistant", "content": f"answer {n}"})
    return messages


def document(root: Path, data: Any, name: str = "talk.json") -> Path:
    return write(root / name, json.dumps(data, indent=2).encode())


def test_chat_turns_arrive(home: Home, root: Path) -> None:
    path = document(root, {"model": "gpt-x", "messages": chat(3), "temperature": 0.5})
    assert bring(home.store, path) == ImportResult(1, 3, 0, (), ())
    store = home.reopened()
    states = [store.session("talk").load(c.id)["messages"] for c in tree(store, "talk")]
    assert states == [chat(1), chat(2), chat(3)]
    assert dangling_calls(states[-1]) == []
    meta = tree(store, "talk")[-1].meta
    assert (meta["model"], meta["temperature"]) == ("gpt-x", 0.5)


def test_chat_as_a_list_alone(store: holdfast.Store, root: Path) -> None:
    bring(store, document(root, chat(2)))
    assert store.session("talk").load() == {"messages": chat(2)}


@pytest.mark.parametrize("field", ["session_id", "conversation_id", "thread_id", "id"])
def test_chat_named_by_itself(store: holdfast.Store, root: Path, field: str) -> None:
    bring(store, document(root, {field: "trip", "messages": chat(1)}))
    assert store.session("trip").load() == {"messages": chat(1)}


def test_chat_one_in_each_line(store: holdfast.Store, root: Path) -> None:
    path = write(root / "tuning.jsonl", [{"messages": chat(1)}, {"id": "b", "messages": chat(2)}])
    assert bring(store, path) == ImportResult(2, 3, 0, (), ())
    assert store.session("tuning:1").load() == {"messages": chat(1)}
    assert store.session("b").load() == {"messages": chat(2)}


def test_chat_in_folders(store: holdfast.Store, root: Path) -> None:
    document(root, chat(1), "a/talk.json")
    document(root, chat(2), "b/talk.json")
    write(root / "notes.txt", b"...")
    result = bring(store, root)
    assert counts(result) == (2, 3, 0)
    assert why(result, "notes.txt") == "not a transcript"
    assert store.session("b/talk").load() == {"messages": chat(2)}


def test_chat_usage_beside_messages(store: holdfast.Store, root: Path) -> None:
    messages = chat(2, calls=False)
    messages[2]["usage"] = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    messages[4]["usage"] = {"prompt_tokens": 10, "completion_tokens": 1, "model": "m"}
    bring(store, document(root, messages))
    assert tokens(store, "talk") == [7, 11]
    assert tree(store, "talk")[1].usage == Usage(10, 1, model="m")


def test_chat_usage_with_wrong_details(store: holdfast.Store, root: Path) -> None:
    messages = chat(1, calls=False)
    messages[2]["usage"] = {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": "5"}}
    result = bring(store, document(root, messages))
    assert [where for where, _ in result.skipped] == ["talk.json: messages[2]"]
    assert tokens(store, "talk") == [0]


def test_chat_that_was_changed_is_a_branch(store: holdfast.Store, root: Path) -> None:
    path = document(root, chat(3))
    bring(store, path)
    other = [*chat(1), {"role": "user", "content": "other"}, {"role": "assistant", "content": "x"}]
    assert counts(bring(store, document(root, other))) == (1, 1, 1)
    assert parents(store, "talk") == [None, 0, 1, 0]
    assert store.session("talk").load() == {"messages": other}


def test_chat_call_without_a_result_is_pending(store: holdfast.Store, root: Path) -> None:
    bring(store, document(root, chat(1)[:3]))
    head = store.session("talk").head
    assert head is not None
    assert [(call.id, call.name) for call in head.pending] == [("c0", "search")]
    repaired = store.session("talk").load(close_calls=True)["messages"]
    assert repaired[-1]["tool_call_id"] == "c0"


@pytest.mark.parametrize(
    "bad",
    [
        "text",
        None,
        {"content": "no role"},
        {"role": "", "content": "x"},
        {"role": "user", "content": 7},
        {"role": "assistant", "content": None, "tool_calls": "c1"},
        {"role": "assistant", "content": None, "tool_calls": ["c1"]},
    ],
)
def test_chat_message_of_a_wrong_kind(store: holdfast.Store, root: Path, bad: Any) -> None:
    result = bring(store, document(root, [*chat(1), bad, *chat(2)[5:]]), "openai-chat")
    assert [where for where, _ in result.skipped] == ["talk.json: messages[5]"]
    assert store.session("talk").load() == {"messages": chat(2)}


@pytest.mark.parametrize("bad", [7, "text", {}, {"messages": "x"}, {"messages": []}, []])
def test_chat_document_of_a_wrong_kind(store: holdfast.Store, root: Path, bad: Any) -> None:
    result = bring(store, document(root, bad), "openai-chat")
    assert counts(result) == (0, 0, 0)
    assert [where for where, _ in result.skipped] == ["talk.json"]


# -- again ---------------------------------------------------------------------------------------


def claude_lines(turns: int) -> Lines:
    talk = Claude()
    for n in range(turns):
        talk.turn(n)
    return talk.lines


def codex_lines(turns: int) -> Lines:
    rollout = Codex("s1")
    for n in range(turns):
        rollout.turn(n)
    return rollout.lines


def chat_lines(turns: int) -> Lines:
    return [{"id": "s1", "messages": chat(turns)}]


FORMATS = {"claude-code": claude_lines, "codex": codex_lines, "openai-chat": chat_lines}
every_format = pytest.mark.parametrize("format", FORMATS)


@every_format
def test_again_is_known(home: Home, root: Path, format: str) -> None:
    path = write(root / "talk.jsonl", FORMATS[format](3))
    assert counts(bring(home.store, path)) == (1, 3, 0)
    before = [(c.id, c.hash) for c in tree(home.store)]
    assert bring(home.reopened(), path) == ImportResult(1, 0, 3, (), ())
    assert [(c.id, c.hash) for c in tree(home.store)] == before


@every_format
def test_again_when_it_has_grown(home: Home, root: Path, format: str) -> None:
    bring(home.store, write(root / "talk.jsonl", FORMATS[format](2)))
    path = write(root / "talk.jsonl", FORMATS[format](5))
    assert bring(home.reopened(), path) == ImportResult(1, 3, 2, (), ())
    assert parents(home.store) == [None, 0, 1, 2, 3]
    with holdfast.open("memory:") as other:
        import_(other, path)
        assert home.session("s1").load() == other.session("s1").load()
        assert tokens(home.store) == tokens(other)


@every_format
def test_again_leaves_a_head_that_was_moved(store: holdfast.Store, root: Path, format: str) -> None:
    path = write(root / "talk.jsonl", FORMATS[format](3))
    bring(store, path)
    session = store.session("s1")
    for n in (0, 1):
        session.rewind(tree(store)[n].id)
        assert counts(bring(store, path)) == (1, 0, 3)
        assert session.head == tree(store)[n]
    path = write(root / "talk.jsonl", FORMATS[format](4))
    assert counts(bring(store, path)) == (1, 1, 3)
    assert parents(store) == [None, 0, 1, 2]
    assert session.head == tree(store)[3]


@every_format
@pytest.mark.parametrize("after", [1, 2])
def test_interrupted_and_run_again(
    home: Home, root: Path, format: str, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(root / "talk.jsonl", FORMATS[format](4))
    session = type(home.session("s1"))
    append = session.append
    done: list[str] = []

    def dies(self: holdfast.Session, *args: Any, **fields: Any) -> holdfast.Checkpoint:
        if len(done) == after:
            raise KeyboardInterrupt
        done.append(fields["key"])
        return append(self, *args, **fields)

    with monkeypatch.context() as patch:
        patch.setattr(session, "append", dies)
        with pytest.raises(KeyboardInterrupt):
            import_(home.store, path)
    assert bring(home.reopened(), path) == ImportResult(1, 3 - after, 1 + after, (), ())
    assert parents(home.store) == [None, 0, 1, 2]


def test_a_turn_in_the_making_goes_on(store: holdfast.Store, root: Path) -> None:
    talk = Claude()
    talk.turn(1)
    talk.ask("question 2")
    talk.call("m2", "c2")
    bring(store, claude(root, talk))
    head = store.session("s1").head
    assert head is not None
    assert head.pending == (ToolCall("c2", "search", {"q": "c2"}),)
    talk.result("c2")
    talk.say("m3", "answer 2")
    assert bring(store, claude(root, talk)) == ImportResult(1, 1, 2, (), ())
    assert parents(store) == [None, 0, 1]
    assert texts(store)[4:] == ["question 2", "c2", "c2", "answer 2"]
    assert tokens(store) == [266, 133, 133]
    head = store.session("s1").head
    assert head is not None
    assert head.pending == ()
    assert bring(store, root) == ImportResult(1, 0, 2, (), ())


def test_a_turn_that_goes_on_still_waits(store: holdfast.Store, root: Path) -> None:
    talk = Claude()
    talk.ask("question")
    talk.call("m1", "c1")
    talk.call("m1", "c2")
    bring(store, claude(root, talk))
    talk.result("c1")
    bring(store, claude(root, talk))
    assert [[call.id for call in c.pending] for c in tree(store)] == [["c1", "c2"], ["c2"]]


def test_a_message_in_the_making_goes_on(store: holdfast.Store, root: Path) -> None:
    talk = Claude()
    talk.turn(1)
    talk.ask("question 2")
    talk.say("m2", "I will look.", 5)
    bring(store, claude(root, talk))
    talk.call("m2", "c2", 30)
    bring(store, claude(root, talk))
    assert texts(store)[4:] == ["question 2", ["I will look.", "c2"]]
    assert tokens(store) == [266, 128, 25]
    talk.result("c2")
    talk.say("m3")
    bring(store, claude(root, talk))
    assert texts(store)[4:] == ["question 2", ["I will look.", "c2"], "c2", "Done."]
    assert tokens(store) == [266, 128, 25, 133]


def test_what_comes_after_a_turn_counts_once(store: holdfast.Store, root: Path) -> None:
    """A count that is written after an import goes to the next turn, and to no other."""
    rollout = Codex("s1")
    rollout.turn(1)
    bring(store, codex(root, rollout.lines[:-2]))
    assert tokens(store) == [100]
    assert counts(bring(store, codex(root, rollout))) == (1, 0, 1)
    rollout.turn(2)
    rollout.turn(3)
    bring(store, codex(root, rollout))
    rollout.turn(4)
    bring(store, codex(root, rollout))
    assert tokens(store) == [100, 300, 200, 200]


@every_format
def test_a_session_that_has_gone_on_is_left_alone(
    store: holdfast.Store, root: Path, format: str
) -> None:
    bring(store, write(root / "talk.jsonl", FORMATS[format](2)))
    store.session("s1").append("messages", {"role": "user", "content": "ours"})
    path = write(root / "talk.jsonl", FORMATS[format](4))
    result = bring(store, path)
    assert counts(result) == (1, 0, 2)
    [(where, reason)] = result.skipped
    assert (where, "2 new checkpoints" in reason) == ("session 's1'", True)
    assert len(tree(store)) == 3


@every_format
def test_what_was_pruned_does_not_come_back(store: holdfast.Store, root: Path, format: str) -> None:
    bring(store, write(root / "talk.jsonl", FORMATS[format](5)))
    store.session("s1").prune(Retention(keep_last=1))
    store.gc()
    path = write(root / "talk.jsonl", FORMATS[format](6))
    assert counts(bring(store, path)) == (1, 1, 1)
    assert len(store.session("s1").load()["messages"]) == {"openai-chat": 25}.get(format, 24)


def test_a_branch_that_was_pruned_does_not_come_back(store: holdfast.Store, root: Path) -> None:
    talk = Claude()
    talk.turn(1)
    fork = talk.last
    talk.turn(2)
    talk.ask("other question", parent=fork)
    talk.say("m9", "other answer")
    bring(store, claude(root, talk))
    store.session("s1").delete(tree(store)[1].id)
    store.gc()
    talk.turn(3)
    result = bring(store, claude(root, talk))
    assert counts(result) == (1, 1, 2)
    assert "pruned" in why(result, "s1.jsonl: line 8")
    assert parents(store) == [None, 0, 1]


def test_a_beginning_that_was_pruned_does_not_come_back(store: holdfast.Store, root: Path) -> None:
    rollout = Codex()
    rollout.turn(1)
    rollout.event("thread_rolled_back", num_turns=1)
    rollout.turn(2)
    bring(store, codex(root, rollout))
    store.session("t1").prune(Retention(keep_last=1))
    store.gc()
    result = bring(store, codex(root, rollout))
    assert counts(result) == (1, 0, 1)
    rollout.event("thread_rolled_back", num_turns=9)
    rollout.turn(3)
    assert counts(bring(store, codex(root, rollout))) == (1, 1, 1)
    assert [text for text in texts(store, "t1") if "question" in text] == ["question 3"]


@every_format
def test_a_deleted_session_does_not_come_back(
    store: holdfast.Store, root: Path, format: str
) -> None:
    path = write(root / "talk.jsonl", FORMATS[format](2))
    bring(store, path)
    store.session("s1").delete()
    result = bring(store, path)
    assert counts(result) == (0, 0, 0)
    [(where, reason)] = result.skipped
    assert (where, "deleted" in reason) == ("session 's1'", True)
    store.gc()
    assert bring(store, path).checkpoints == 2


def test_a_busy_session_does_not_stop_the_others(home: Home, root: Path) -> None:
    write(root / "talk.jsonl", chat_lines(2))
    bring(home.store, root)
    write(root / "talk.jsonl", [*chat_lines(3), {"id": "s2", "messages": chat(1)}])
    with home.session("s1").run():
        result = import_(home.another(), root)
    assert counts(result) == (2, 1, 2)
    [(where, reason)] = result.skipped
    assert (where, "is run by" in reason) == ("session 's1'", True)


@every_format
def test_what_was_deleted_is_listed(store: holdfast.Store, root: Path, format: str) -> None:
    bring(store, write(root / "talk.jsonl", FORMATS[format](3)))
    _, second, third = tree(store)
    store.session("s1").rewind(second.id)
    store.session("s1").delete(third.id)
    path = write(root / "talk.jsonl", FORMATS[format](4))
    result = bring(store, path)
    assert counts(result) == (1, 1, 2)
    (_, taken), (_, moved) = result.skipped
    assert ("the key" in taken, "its parent" in moved) == (True, True)
    with holdfast.open("memory:") as other:
        import_(other, path)
        assert store.session("s1").load() == other.session("s1").load()


def test_what_was_deleted_after_a_compaction(store: holdfast.Store, root: Path) -> None:
    talk = Claude()
    talk.turn(1)
    talk.compact()
    talk.turn(2)
    bring(store, claude(root, talk))
    compaction, gone = tree(store)[1:]
    store.session("s1").rewind(compaction.id)
    store.session("s1").delete(gone.id)
    talk.turn(3)
    bring(store, claude(root, talk))
    told = [f"{what} {n}" for n in (2, 3) for what in ("question", "answer")]
    assert [text for text in texts(store) if " " in text] == ["What was said so far", *told]


def test_the_same_ids_with_another_history(store: holdfast.Store, root: Path) -> None:
    bring(store, claude(root, claude_lines(2)))
    lines = claude_lines(2)
    lines[-1]["message"]["content"] = "another answer"
    assert counts(bring(store, claude(root, lines))) == (1, 1, 1)
    assert parents(store) == [None, 0, 0]
    assert texts(store)[-1] == "another answer"
    assert counts(bring(store, root)) == (1, 0, 2)


# -- what is not sound ---------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["claude-code", "codex"])
@pytest.mark.parametrize("newline", [True, False])
def test_last_line_that_is_cut_off(
    store: holdfast.Store, root: Path, format: str, newline: bool
) -> None:
    whole = encoded(FORMATS[format](2))
    lines = whole.splitlines(keepends=True)
    at = 7 if format == "claude-code" else -2
    cut = b"".join(lines[:at]) + lines[at][:-20] + (b"\n" if newline else b"")
    result = bring(store, write(root / "talk.jsonl", cut))
    [(where, reason)] = result.skipped
    assert where == f"talk.jsonl: line {len(cut.splitlines())}"
    assert ("incomplete" in reason) != newline
    assert counts(result) == (1, 2, 0)
    if not newline:  # it has been written since
        bring(store, write(root / "talk.jsonl", whole))
        with holdfast.open("memory:") as other:
            import_(other, root)
            assert store.session("s1").load() == other.session("s1").load()


def test_last_line_without_its_end_is_whole(store: holdfast.Store, root: Path) -> None:
    path = write(root / "talk.jsonl", encoded(claude_lines(2)).rstrip())
    assert bring(store, path) == ImportResult(1, 2, 0, (), ())
    assert len(texts(store)) == 8


DEEP = b'{"type": "user", "deep": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
BAD = {
    "nothing": b"\0\0\0",
    "not an object": b"[1, 2]",
    "null": b"null",
    "no type": b"{}",
    "type": b'{"type": 7}',
    "types": b'{"type": ["user"], "payload": {}}',
    "type alone": b'{"type": {}}',
    "NaN": b'{"type": "user", "x": NaN}',
    "infinite": b'{"type": "user", "x": 1e999}',
    "key twice": b'{"type": "user", "type": "user"}',
    "not UTF-8": b'{"type": "\xff"}',
    "many digits": b'{"type": "user", "x": ' + b"9" * 9999 + b"}",
    "very deep": DEEP,
    "deep": DEEP.replace(b"[" * 100_000, b"[" * 60).replace(b"]" * 100_000, b"]" * 60),
}
BAD_CLAUDE: dict[str, dict[str, Any]] = {
    "no message": {"type": "user"},
    "message": {"type": "user", "message": "hello"},
    "role": {"type": "user", "message": {"role": "assistant", "content": "x"}},
    "content": {"type": "user", "message": {"role": "user", "content": None}},
    "block": {"type": "user", "message": {"role": "user", "content": ["x"]}},
    "kind": {"type": "user", "message": {"role": "user", "content": [{"type": 1}]}},
}
BAD_CODEX: dict[str, dict[str, Any]] = {
    "payload": {"type": "response_item", "payload": [1]},
    "item": {"type": "response_item", "payload": {"role": "user"}},
    "item's type": {"type": "response_item", "payload": {"type": ["message"]}},
    "event": {"type": "event_msg", "payload": {}},
    "meta": {"type": "session_meta", "payload": {"id": 7}},
    "turns": {"type": "event_msg", "payload": {"type": "thread_rolled_back", "num_turns": "1"}},
    "fewer turns": {
        "type": "event_msg",
        "payload": {"type": "thread_rolled_back", "num_turns": -1},
    },
    "compacted": {"type": "compacted", "payload": {"message": ""}},
}


@pytest.mark.parametrize(
    ("format", "line"),
    [
        *[
            pytest.param(format, line, id=f"{format} {name}")
            for format in ("claude-code", "codex")
            for name, line in BAD.items()
        ],
        *[pytest.param("claude-code", encoded([d]), id=n) for n, d in BAD_CLAUDE.items()],
        *[pytest.param("codex", encoded([d]), id=n) for n, d in BAD_CODEX.items()],
    ],
)
def test_line_that_is_not_sound(
    store: holdfast.Store, root: Path, format: str, line: bytes
) -> None:
    lines = encoded(FORMATS[format](2)).splitlines(keepends=True)
    lines.insert(3, line.strip() + b"\n")
    result = bring(store, write(root / "talk.jsonl", b"".join(lines)))
    assert counts(result) == (1, 2, 0)
    [(where, _)] = result.skipped
    assert where == "talk.jsonl: line 4"
    assert len(texts(store)) == 8


def test_nesting_up_to_the_limit_is_sound(store: holdfast.Store, root: Path) -> None:
    deep: Any = "x"
    for _ in range(untrusted.MAX_NESTING - 5):
        deep = [deep]
    talk = Claude()
    talk.block("m1", {"type": "tool_use", "id": "c", "name": "n", "input": deep})
    talk.line("mystery", deep=deep)
    result = bring(store, claude(root, talk))
    assert len(result.skipped) == 1  # the unknown type
    assert store.session("s1").load()["messages"][0]["content"][0]["input"] == deep
    assert tree(store)[0].meta["other"][0]["deep"] == deep


@pytest.mark.parametrize("position", ["middle", "end", "cut"])
def test_line_that_is_too_long(
    store: holdfast.Store, root: Path, position: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = encoded(claude_lines(2)).splitlines(keepends=True)
    long = json.dumps({"type": "system", "text": "x" * 5000}).encode() + b"\n"
    at = 4 if position == "middle" else 8
    lines.insert(at, long[:-1] if position == "cut" else long)
    monkeypatch.setattr(untrusted, "MAX_BYTES", 2000)
    result = bring(store, write(root / "talk.jsonl", b"".join(lines)))
    assert result.skipped == ((f"talk.jsonl: line {at + 1}", "it has more than 2000 bytes"),)
    assert counts(result) == (1, 2, 0)


def test_document_that_is_too_long(
    store: holdfast.Store, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = document(root, chat(3))
    monkeypatch.setattr(untrusted, "MAX_BYTES", 100)
    result = bring(store, path, "openai-chat")
    assert why(result, "talk.json") == "it has more than 100 bytes"


@every_format
def test_lone_surrogates(home: Home, root: Path, format: str) -> None:
    raw = encoded(FORMATS[format](2)).replace(b"question", b"\\ud800 question")
    raw = raw.replace(b'"s1"', b'"s\\udfff1"')
    bring(home.store, write(root / "talk.jsonl", raw))
    messages = home.reopened().session("s\udfff1").load()["messages"]
    assert "\ud800 question" in json.dumps(messages, ensure_ascii=False)


def test_ids_that_are_too_long(store: holdfast.Store, root: Path) -> None:
    talk = Claude()
    talk.turn(1)
    talk.say("m" * 5000, "more", uuid="u" * 5000)
    bring(store, claude(root, talk))
    assert texts(store)[-1] == "more"
    assert len(tree(store)[-1].key or "") < 100


def test_links_and_other_files_are_listed(store: holdfast.Store, root: Path) -> None:
    claude(root, claude_lines(1))
    claude(root.parent, claude_lines(2), "secret.jsonl")
    os.symlink(root.parent / "secret.jsonl", root / "link.jsonl")
    os.mkfifo(root / "pipe.jsonl")
    write(root / "sessions-index.json", b"{}")
    result = bring(store, root)
    assert counts(result) == (1, 1, 0)
    assert sorted(where for where, _ in result.skipped) == [
        "link.jsonl",
        "pipe.jsonl",
        "sessions-index.json",
    ]


# -- which format --------------------------------------------------------------------------------


@every_format
def test_format_is_recognised(store: holdfast.Store, root: Path, format: str) -> None:
    path = write(root / "talk.jsonl", FORMATS[format](2))
    bring(store, path)
    assert tree(store)[0].meta["imported"]["format"] == format
    with holdfast.open("memory:") as other:
        bring(other, root)
        assert tree(other)[0].meta["imported"] == tree(store)[0].meta["imported"]


@every_format
def test_format_may_be_given(store: holdfast.Store, root: Path, format: str) -> None:
    path = write(root / "talk.jsonl", FORMATS[format](2))
    own = {"claude-code": import_claude_code, "codex": import_codex}
    result = own.get(format, import_openai_chat)(store, path)
    assert counts(result) == (1, 2, 0)
    assert counts(bring(store, path, format)) == (1, 0, 2)


def test_formats_side_by_side_are_not_guessed(store: holdfast.Store, root: Path) -> None:
    claude(root, claude_lines(1))
    codex(root, codex_lines(1))
    with pytest.raises(InvalidRequest, match="could be claude-code or codex"):
        import_(store, root)


@pytest.mark.parametrize(
    "content", [b"", b"hello\n", b'{"a": 1}\n', b'{"type": []}\n', b"[]", b"\0" * 100]
)
def test_a_file_of_no_format(store: holdfast.Store, root: Path, content: bytes) -> None:
    path = write(root / "notes.jsonl", content)
    with pytest.raises(InvalidRequest, match="none of the known formats"):
        import_(store, path)
    with pytest.raises(NotFound):
        import_(store, root / "nothing.jsonl")


def test_a_checkpoint_alone_is_no_transcript(store: holdfast.Store, root: Path) -> None:
    checkpoint = {"agent_name": "a", "step": 1, "partial_results": [], "messages": chat(1)}
    with pytest.raises(InvalidRequest, match="none of the known formats"):
        import_(store, document(root, checkpoint))


# -- at large ------------------------------------------------------------------------------------


def added(turns: int, root: Path, format: str) -> int:
    with holdfast.open("memory:") as store:
        import_(store, write(root / "talk.jsonl", FORMATS[format](turns)))
        return sum(checkpoint.added for checkpoint in tree(store))


@every_format
def test_cost_is_what_the_transcript_has(root: Path, format: str) -> None:
    assert added(400, root, format) < 3 * added(200, root, format)


kinds = st.sampled_from(["ask", "say", "call", "result", "progress", "system", "compact", "odd"])
steps = st.lists(
    st.tuples(kinds, st.integers(0, 3), st.integers(0, 30), st.booleans()), max_size=25
)


def scribble(steps: list[tuple[str, int, int, bool]]) -> Lines:
    """A session whose lines name any line as their parent, mostly the one before."""
    talk = Claude()
    for kind, n, parent, usual in steps:
        where: dict[str, Any] = {} if usual or not talk.lines else {"parent": f"s1-u{parent % 28}"}
        where |= {"parent": None} if parent == 30 and not usual else {}
        if kind == "ask":
            talk.ask(f"question {n}", isMeta=n == 3, **where)
        elif kind == "say":
            talk.say(f"m{n}", f"text {parent}", parent, **where)
        elif kind == "call":
            talk.call(f"m{n}", f"c{n}", parent, **where)
        elif kind == "result":
            talk.result(f"c{n}", **where)
        elif kind == "compact":
            talk.compact()
        elif kind == "odd":
            talk.line("user", message={"role": "user"}, isSidechain=usual, **where)
        else:
            talk.line(kind, isSidechain=n == 0, **where)
    return talk.lines


turns = st.lists(
    st.tuples(st.sampled_from(["turn", "say", "back", "compact", "odd"]), st.integers(0, 3)),
    max_size=15,
)


def unroll(steps: list[tuple[str, int]]) -> Lines:
    """A rollout with turns that are compacted and taken back."""
    rollout = Codex()
    for n, (kind, count) in enumerate(steps):
        if kind == "turn":
            rollout.turn(n, count)
        elif kind == "say":
            rollout.message("user" if count else "assistant", f"text {n}")
        elif kind == "back":
            rollout.event("thread_rolled_back", num_turns=count)
        elif kind == "compact":
            history = [{"type": "message", "role": "user", "content": f"in short {n}"}] * count
            rollout.line("compacted", {"message": "", "replacement_history": history})
        else:
            rollout.line("mystery", {"n": n})
    rollout.message("user", "the end")  # what was counted after a turn comes with the next one
    return rollout.lines


@given(st.one_of(steps.map(scribble), turns.map(unroll)), st.data())
@settings(max_examples=100)
def test_parts_come_to_the_same_as_the_whole(
    tmp_path_factory: pytest.TempPathFactory, lines: Lines, data: st.DataObject
) -> None:
    """However a transcript grows, the head's state and what was spent are those of one import."""
    root = tmp_path_factory.mktemp("source") / "folder"
    whole = encoded(lines)
    bring = import_codex if b"session_meta" in whole else import_claude_code
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=3)))
    with holdfast.open("memory:") as parts, holdfast.open("memory:") as once:
        for cut in [*cuts, len(whole)]:
            last = bring(parts, write(root / "s1.jsonl", whole[:cut]))
        result = bring(once, root / "s1.jsonl")
        assert once.verify().ok
        assert parts.verify().ok
        assert bring(once, root / "s1.jsonl").checkpoints == 0
        assert (last.sessions, result.known) == (result.sessions, 0)
        for info in once.sessions():
            mine, theirs = parts.session(info.name), once.session(info.name)
            assert mine.load() == theirs.load()
            assert mine.usage().spent == theirs.usage().spent
            keys = {checkpoint.key for checkpoint in mine.tree()}
            for checkpoint in theirs.tree():
                if checkpoint.key in keys:
                    state = mine.load(f"key:{checkpoint.key}")
                    assert state == theirs.load(checkpoint.id)


junk = st.sampled_from([b"", b"\n", b"}", b"[", b'"', b"null", b"1e999", b"\xff", b"\\ud800", b"-"])


@given(st.sampled_from(sorted(FORMATS)), st.lists(st.tuples(st.integers(0, 9999), junk)))
@settings(max_examples=100)
def test_damaged_files_are_imported_as_far_as_they_are_sound(
    tmp_path_factory: pytest.TempPathFactory, format: Any, damage: list[tuple[int, bytes]]
) -> None:
    raw = encoded(FORMATS[format](3))
    for at, what in damage:
        at %= len(raw)
        raw = raw[:at] + what + raw[at + max(len(what), 1) :]
    path = write(tmp_path_factory.mktemp("source") / "folder" / "talk.jsonl", raw)
    with holdfast.open("memory:") as store:
        result = import_(store, path, format)
        assert store.verify().ok
        assert result.skipped or result.checkpoints
        assert import_(store, path, format).checkpoints == 0


odd: st.SearchStrategy[Any] = st.sampled_from(
    [None, 7, -1, "x", "", [], {}, True, [[]], 1.5, "\ud800", 10**400, {"a": 1}]
)


def spoil(value: Any, path: list[int], by: Any) -> None:
    """Put something else in a place of a document."""
    while type(value) in (dict, list) and value:
        keys = list(value) if type(value) is dict else range(len(value))
        key = keys[path.pop() % len(keys)]
        if not path or type(value[key]) not in (dict, list) or not value[key]:
            value[key] = by
            return
        value = value[key]


@given(
    st.sampled_from(sorted(FORMATS)),
    st.lists(st.tuples(st.lists(st.integers(0, 40), min_size=1, max_size=7), odd), max_size=4),
)
@settings(max_examples=150)
def test_values_of_wrong_kinds(
    tmp_path_factory: pytest.TempPathFactory,
    format: Any,
    changes: list[tuple[list[int], Any]],
) -> None:
    lines = json.loads(json.dumps(FORMATS[format](3)))
    for place, by in changes:
        spoil(lines, [*place], copy.deepcopy(by))
    path = write(tmp_path_factory.mktemp("source") / "folder" / "talk.jsonl", lines)
    with holdfast.open("memory:") as store:
        import_(store, path, format)
        assert store.verify().ok
        assert import_(store, path, format).checkpoints == 0
        with suppress(InvalidRequest):
            assert import_(store, path).checkpoints == 0


def numbered(lines: Lines) -> Lines:
    """Every line says its number and names a parent before it; what is asked may name none."""
    for n, line in enumerate(lines):
        line["uuid"], line["isSidechain"] = f"u{n}", False
        asks = line["type"] == "user" and isinstance(line["message"]["content"], str)
        for name in ("parentUuid", "logicalParentUuid"):
            if line.get(name) is not None:
                line[name] = f"u{int(line[name].removeprefix('s1-u')) % n}"
        if n and line["parentUuid"] is None and not asks and "logicalParentUuid" not in line:
            line["parentUuid"] = f"u{n - 1}"
        if asks:
            line["message"]["content"] = f"#{n};"
        elif "message" in line:
            [block] = line["message"]["content"]
            block["said"] = f"#{n};"
    return lines


@given(steps)
@settings(max_examples=100)
def test_states_have_what_their_lines_come_after(
    tmp_path_factory: pytest.TempPathFactory, steps: Any
) -> None:
    """All that the last line descends from; beyond that only parts of the same messages."""
    sound = [step for step in steps if step[0] != "odd"]
    lines = numbered(scribble([("ask", 0, 0, True), *sound]))
    path = write(tmp_path_factory.mktemp("source") / "folder" / "s1.jsonl", lines)
    with holdfast.open("memory:") as store:
        result = import_claude_code(store, path)
        assert result.skipped == ()
        reached: set[int] = set()
        for checkpoint in tree(store):
            told = json.dumps(store.session("s1").load(checkpoint.id))
            found = {int(n) for n in re.findall(r"#(\d+);", told)}
            reached |= found
            if checkpoint.trigger == "start":
                continue
            last = int((checkpoint.key or "").removeprefix("claude-code:u"))
            expected = line_of(lines, last)
            assert expected <= found
            answers = {lines[n]["message"].get("id") for n in expected} - {None}
            if any(is_result(lines[n]) for n in expected):
                continue  # it may come behind what was said without it
            for n in found - expected:
                added = is_result(lines[n]) or lines[n].get("isMeta")
                assert added or lines[n]["message"].get("id") in answers
        assert reached == {n for n, line in enumerate(lines) if "message" in line}


def is_result(line: dict[str, Any]) -> bool:
    content = line["message"]["content"]
    return not isinstance(content, str) and content[0]["type"] == "tool_result"


def line_of(lines: Lines, at: int) -> set[int]:
    """The messages that one descends from, back to the last compaction, and itself."""
    found: set[int] = set()
    while True:
        line = lines[at]
        if "message" in line:
            found.add(at)
        parent = line["parentUuid"] or line.get("logicalParentUuid")
        if parent is None or line.get("isCompactSummary"):
            return found
        at = int(parent.removeprefix("u"))
