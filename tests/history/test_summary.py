"""One line on what a checkpoint changed."""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast import Retention
from holdfast.history.message_parts import message_parts
from holdfast.history.summary import WIDTH


@pytest.fixture
def session():
    with holdfast.open("memory:") as store:
        yield store.session("s")


def newest(session, **how):
    return next(session.history(summary=True, **how)).summary


def user(text):
    return {"role": "user", "content": text}


CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"id": "mia"}'}}
ASKS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
MESSAGES = [
    (user("Hi\nthere"), "user: Hi there"),
    (user([{"type": "text", "text": "See"}, {"type": "image_url", "image_url": {}}]), "user: See"),
    (ASKS, "→ look(id='mia')"),
    ({"role": "tool", "tool_call_id": "1", "content": "503 Unavailable"}, "← 503 Unavailable"),
    ({"role": "tool", "tool_call_id": "1", "content": ""}, "← (empty)"),
    ({"role": "assistant", "content": [{"type": "text", "text": "Yes"}]}, "assistant: Yes"),
    (
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "Let me see"},
                {"type": "tool_use", "id": "1", "name": "look", "input": {"n": 2}},
            ],
        },
        "→ look(n=2)",
    ),
    (
        user([{"type": "tool_result", "tool_use_id": "1", "content": "no", "is_error": True}]),
        "← error: no",
    ),
    ({"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}, "→ look()"),
    ({"type": "function_call_output", "call_id": "1", "output": "ok"}, "← ok"),
    (
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A"}]},
        "assistant: A",
    ),
    (
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm"}]},
        "assistant thinks: Hm",
    ),
    ({"role": "model", "parts": [{"functionCall": {"name": "f", "args": {"a": 1}}}]}, "→ f(a=1)"),
    ({"role": "user", "parts": [{"text": "Salut"}]}, "user: Salut"),
    ({"role": "assistant", "content": [{"toolUse": {"name": "f", "input": {}}}]}, "→ f()"),
    (
        user([{"toolResult": {"toolUseId": "1", "status": "error", "content": [{"text": "no"}]}}]),
        "← error: no",
    ),
    ({"type": "user", "message": user("From a transcript")}, "user: From a transcript"),
    (
        {"kind": "request", "parts": [{"part_kind": "user-prompt", "content": "Plan"}]},
        "user: Plan",
    ),
    (
        {
            "kind": "response",
            "parts": [{"part_kind": "tool-call", "tool_name": "f", "args": {"x": 1}}],
        },
        "→ f(x=1)",
    ),
    (
        {"$ext": 5, "of": ["langchain_core.messages.ai", "AIMessage", {"content": "Bonjour"}, "x"]},
        "assistant: Bonjour",
    ),
]


@pytest.mark.parametrize(("message", "line"), MESSAGES, ids=[line for _, line in MESSAGES])
def test_a_new_message_is_shown(session, message, line):
    session.save({"messages": [user("first")], "n": 0})
    session.save({"messages": [user("first"), message], "n": 1})
    assert newest(session) == line


def test_the_same_in_long_conversations(session):
    session.save({"messages": [user("x" * 100) for _ in range(500)]})
    for message, line in MESSAGES:
        session.append("messages", message)
        assert newest(session) == line


def test_a_call_is_shown_with_its_result(session):
    session.save({"messages": []})
    session.append("messages", ASKS, {"role": "tool", "tool_call_id": "1", "content": "Mia Li"})
    assert newest(session) == "→ look(id='mia')  ← Mia Li"


@pytest.mark.parametrize("count", [4, 400])
def test_a_compaction_counts_messages(session, count):
    session.save({"messages": [user(f"message {n}") for n in range(count)]})
    session.save({"messages": [user("message 0"), user("what was said")]})
    assert newest(session) in (
        f"compacted {count - 1} messages to 1",
        f"compacted {count} messages to 2",
    )


def test_an_edited_message(session):
    session.save({"messages": [user("one"), user("two")]})
    session.save({"messages": [user("uno"), user("two")]})
    assert newest(session) == "edited user: uno"


def test_other_changes(session):
    session.save({"plan": {"budget": 900, "steps": ["a"]}, "topic": "Rome"})
    assert newest(session) == "plan = {'budget': 900, 'steps': ['a']}, topic = 'Rome'"
    session.patch(set={"plan.budget": 850})
    assert newest(session) == "plan.budget 900 → 850"
    session.patch(append={"plan.steps": ["b", "c"]})
    assert newest(session) == "plan.steps + 'c' (+1)"
    session.patch(drop=["topic"])
    assert newest(session) == "topic removed"
    session.save({str(n): n for n in range(9)})
    assert newest(session).endswith("(+7)")


def test_checkpoints_without_a_change(session):
    state = {"n": 1}
    session.save(state)
    session.save(state, status="halted", reason="waits for Ann")
    assert newest(session) == "halted: waits for Ann"
    session.save(state)
    assert newest(session) == "no change"
    assert newest(session.fork("f")) == "forked from s"


def test_a_summary_is_one_printable_line(session):
    text = "a\x1b[2J\u202eb\r\n\x00c" + "d" * 10_000
    session.save({"messages": [user(text + "\ud800")], text[:40]: 1})
    line = newest(session)
    assert line.startswith("user: a[2Jb cd")
    assert len(line) == WIDTH
    assert line.isprintable()
    session.patch(set={(text[:40],): 2})
    assert newest(session).isprintable()


class Metered:
    """Counts the bytes of items and blobs that are read."""

    def __init__(self, source):
        self._source, self.read = source, 0

    def rows(self, *where):
        for first, row in self._source.rows(*where):
            self.read += len(row.data)
            yield first, row

    def blob(self, digest, size):
        self.read += size
        return self._source.blob(digest, size)


def test_little_is_read(session, monkeypatch):
    from holdfast.storage.repository import Repository

    big = [user(f"{n} " + "long " * 200) for n in range(100)]
    session.save({"messages": big, "text": "t" * 300_000})
    session.append("messages", user("last"))
    session.patch(set={"text": "u" * 300_000})
    sources = []
    data = Repository.data

    def metered(self, reader=None):
        sources.append(Metered(data(self, reader)))
        return sources[-1]

    monkeypatch.setattr(Repository, "data", metered)
    lines = [c.summary for c in islice(session.history(summary=True), 2)]
    assert lines == ["text (293 KB) → (293 KB)", "user: last"]
    assert sum(source.read for source in sources) < 128 << 10  # one pack of messages


def test_after_pruning_the_nearest_ancestor_is_compared_with(session):
    for n in range(5):
        session.save({"n": n})
    session.prune(Retention(keep_last=1))
    assert newest(session) == "n = 4"
    session.save({"n": 5})
    session.save({"n": 6})
    session.delete("@~1")
    assert newest(session) == "n 4 → 6"


def test_summaries_cross_forks_and_pages(session):
    for n in range(40):
        session.save({"n": n})
    fork = session.fork("f")
    fork.save({"n": 99})
    lines = [c.summary for c in fork.history(summary=True)]
    assert lines == ["n 39 → 99", "forked from s", *(f"n {n - 1} → {n}" for n in range(39, 0, -1)),
                     "n = 0"]  # fmt: skip
    assert [c.summary for c in session.tree(summary=True)] == lines[:1:-1]


def test_hits_and_lists_have_summaries(session):
    session.save({"plan": "Rome"}, tags=["a"])
    session.save({"plan": "Oslo"})
    [hit] = session.search("oslo", summary=True)
    assert hit.checkpoint.summary == "plan 'Rome' → 'Oslo'"
    assert [c.summary for c in session.checkpoints(tag="a", summary=True)] == ["plan = 'Rome'"]


def test_nothing_is_made_that_was_not_asked_for(session):
    session.save({"n": 1})
    assert session.get().summary is None
    assert next(session.history()).summary is None


def test_what_is_no_message_has_no_parts():
    values: list[object] = [
        None,
        1,
        "text",
        [],
        {},
        {"role": 1},
        {"type": "point", "x": 1},
        {"$ext": 5},
    ]
    assert [value for value in values if message_parts(value)] == []


NAMES = st.sampled_from(
    ["role", "type", "content", "parts", "message", "$ext", "of", "tool_calls", "function", "name",
     "id", "arguments", "output", "status", "part_kind", "kind", "toolUse", "text", "input"]
)  # fmt: skip
WORDS = st.sampled_from(
    ["assistant", "user", "tool", "tool_use", "function_call", "tool-return", "image", "thinking",
     "AIMessage", "{", "error", ""]
)  # fmt: skip
ATOMS = WORDS | st.none() | st.integers() | st.booleans() | st.floats() | st.binary(max_size=3)
ANYTHING = st.recursive(
    ATOMS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=5)
)


@given(ANYTHING)
def test_any_value_is_a_message_or_none(value):
    for part in message_parts(value):
        assert isinstance(part.text, str)
        assert isinstance(part.role, str)
        assert isinstance(part.name, str | None)
        assert isinstance(part.id, str | None)
        assert str(part).isprintable()


@given(ANYTHING, ANYTHING)
def test_any_two_states_have_a_summary(before, after):
    with holdfast.open("memory:") as store:
        session = store.session("s")
        session.save({"x": before})
        session.save({"x": after})
        for checkpoint in session.history(summary=True):
            assert checkpoint.summary
            assert checkpoint.summary.isprintable()
            assert len(checkpoint.summary) <= WIDTH
        session.transcript()


def test_a_transcript_has_results_after_their_calls(session):
    other = CALL | {"id": "2"}
    session.save(
        {
            "log": ["not", "messages"],
            "data": {
                "messages": [
                    user("Who?"),
                    ASKS | {"tool_calls": [CALL, other]},
                    {"role": "tool", "tool_call_id": "2", "content": "two"},
                    {"role": "tool", "tool_call_id": "1", "content": "one"},
                    {"role": "assistant", "content": "Them."},
                ]
            },
        }
    )
    lines = [*map(str, session.transcript())]
    assert lines == [
        "user: Who?", "→ look(id='mia')", "← one", "→ look(id='mia')", "← two", "assistant: Them.",
    ]  # fmt: skip
    assert session.transcript(path="data.messages") == session.transcript()
    assert session.transcript(path="log") == []
    assert [part.name for part in session.transcript() if part.kind == "result"] == ["look", "look"]


def test_a_short_list_that_is_replaced_by_a_long_one(session):
    session.save({"messages": [user("old")]})
    session.save({"messages": [user(f"new {n} " + "long " * 20) for n in range(60)]})
    assert newest(session).startswith("user: new 59")
    session.save({"log": ["old"]})
    session.save({"log": [f"new {n} " + "long " * 20 for n in range(60)]})
    assert newest(session) == "log: 1 replaced by 60"


def test_only_the_last_of_many_items_are_decoded(session, monkeypatch):
    from holdfast.history import summary

    session.save({"messages": [user("x" * 500) for _ in range(200)]})
    decoded = []

    def counted(value):
        decoded.append(value)
        return message_parts(value)

    monkeypatch.setattr(summary, "message_parts", counted)
    assert newest(session).endswith("(+199)")
    assert len(decoded) < 10


def test_a_call_that_is_listed_twice_is_one_call():
    block = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    message = {
        "role": "assistant",
        "content": [block],
        "tool_calls": [{"id": "1", "name": "look", "args": {}}, {"id": "2", "name": "see"}],
    }
    assert [*map(str, message_parts(message))] == ["→ look()", "→ see()"]


def test_a_transcript_of_repeated_ids_and_several_lists(session):
    calls = [ASKS, {"role": "tool", "tool_call_id": "1", "content": "first"}]
    calls += [{"role": "tool", "tool_call_id": "1", "content": "late"}]
    session.save({"other": [user("one")], "messages": [user("Who?"), *calls]})
    lines = [*map(str, session.transcript())]
    assert lines == ["user: Who?", "→ look(id='mia')", "← first", "← late"]
