"""Calls and results in messages: what dangles is found and closed, and no cut splits them."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.errors import InvalidRequest
from holdfast.model import ToolCall
from holdfast.runs import messages as talking
from holdfast.runs.messages import (
    MARK,
    closed,
    closed_state,
    dangling_calls,
    name_and_arguments,
    newest,
    tool_call,
    units,
)
from tests.support.stores import Home

Message = dict[str, Any]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


class Chat:
    """OpenAI's chat completions."""

    @staticmethod
    def calls(*ids: str) -> list[Message]:
        made = [
            {"id": id, "type": "function", "function": {"name": "act", "arguments": '{"n": 1}'}}
            for id in ids
        ]
        return [{"role": "assistant", "content": None, "tool_calls": made}]

    @staticmethod
    def results(*ids: str) -> list[Message]:
        return [{"role": "tool", "tool_call_id": id, "content": f"result of {id}"} for id in ids]

    @staticmethod
    def made_up(*ids: str) -> list[Message]:
        return [{"role": "tool", "tool_call_id": id, "content": MARK} for id in ids]

    @staticmethod
    def refusal(messages: list[Message]) -> str | None:
        """What the API says of messages: every call is answered, at once, and only once."""
        wanted: set[str] = set()
        for message in messages:
            if message["role"] == "tool":
                if message["tool_call_id"] not in wanted:
                    return f"no call before result {message['tool_call_id']}"
                wanted.remove(message["tool_call_id"])
                continue
            if wanted:
                return f"no result of {wanted}"
            wanted = {call["id"] for call in message.get("tool_calls", ())}
        return f"no result of {wanted}" if wanted else None


class Anthropic:
    @staticmethod
    def calls(*ids: str) -> list[Message]:
        text = {"type": "text", "text": "Let me see."}
        made = [{"type": "tool_use", "id": id, "name": "act", "input": {"n": 1}} for id in ids]
        return [{"role": "assistant", "content": [text, *made]}]

    @staticmethod
    def results(*ids: str) -> list[Message]:
        blocks = [
            {"type": "tool_result", "tool_use_id": id, "content": f"result of {id}"} for id in ids
        ]
        return [{"role": "user", "content": blocks}] if ids else []

    @staticmethod
    def made_up(*ids: str) -> list[Message]:
        return [
            {"type": "tool_result", "tool_use_id": id, "content": MARK, "is_error": True}
            for id in ids
        ]

    @staticmethod
    def refusal(messages: list[Message]) -> str | None:
        """All results of a message are in the next one, first in it."""
        wanted: list[str] = []
        for message in messages:
            content = message["content"] if type(message["content"]) is list else []
            kinds = [block["type"] == "tool_result" for block in content]
            if kinds != sorted(kinds, reverse=True):
                return "results come first"
            given = [block["tool_use_id"] for block in content if block["type"] == "tool_result"]
            if sorted(given) != sorted(wanted):
                return f"{wanted} is answered by {given}"
            wanted = [block["id"] for block in content if block["type"] == "tool_use"]
            if wanted and message["role"] != "assistant":
                return "a user calls no tools"
            if any(kinds) and message["role"] != "user":
                return "results are a user's"
        return f"no result of {wanted}" if wanted else None


class Responses:
    """OpenAI's Responses: a list of items."""

    @staticmethod
    def calls(*ids: str) -> list[Message]:
        thought = {"type": "reasoning", "id": f"rs_{'_'.join(ids)}", "summary": []}
        made = [
            {"type": "function_call", "id": f"fc_{id}", "call_id": id, "name": "act",
             "arguments": '{"n": 1}'}
            for id in ids
        ]  # fmt: skip
        return [thought, *made]

    @staticmethod
    def results(*ids: str) -> list[Message]:
        return [
            {"type": "function_call_output", "call_id": id, "output": f"result of {id}"}
            for id in ids
        ]

    @staticmethod
    def made_up(*ids: str) -> list[Message]:
        return [{"type": "function_call_output", "call_id": id, "output": MARK} for id in ids]

    @staticmethod
    def refusal(messages: list[Message]) -> str | None:
        """Each call has its output and its reasoning, and each of these its call."""
        open_: set[str] = set()
        thoughts: set[str] = set()
        for n, item in enumerate(messages):
            kind = item.get("type")
            if kind == "function_call_output":
                if item["call_id"] not in open_:
                    return f"no call before output {item['call_id']}"
                open_.remove(item["call_id"])
            elif open_ and kind != "function_call":
                return f"no output of {open_}"
            if kind == "reasoning":
                thoughts |= {*item["id"].split("_")[1:]}
                if messages[n + 1 : n + 2] == [] or messages[n + 1]["type"] != "function_call":
                    return "reasoning without what follows"
            if kind == "function_call":
                open_.add(item["call_id"])
                if item["call_id"] not in thoughts:
                    return f"no reasoning before {item['call_id']}"
        return f"no output of {open_}" if open_ else None


Shape = type[Chat] | type[Anthropic] | type[Responses]
SHAPES: list[Shape] = [Chat, Anthropic, Responses]
each_shape = pytest.mark.parametrize("shape", SHAPES)


# -- finding ---------------------------------------------------------------------------------------


@each_shape
def test_calls_without_a_result_are_found(shape: Shape) -> None:
    start = [user("Go."), *shape.calls("c1", "c2")]
    assert dangling_calls(start) == [
        ToolCall("c1", "act", {"n": 1}),
        ToolCall("c2", "act", {"n": 1}),
    ]
    assert dangling_calls([*start, *shape.results("c2")]) == [ToolCall("c1", "act", {"n": 1})]
    assert dangling_calls([*start, *shape.results("c2", "c1")]) == []
    assert dangling_calls([]) == []


def test_calls_of_every_type_of_item() -> None:
    action = {"type": "screenshot"}
    items: list[Message] = [
        {"type": "custom_tool_call", "call_id": "a", "name": "sql", "input": "123"},
        {"type": "computer_call", "id": "cu_1", "call_id": "b", "action": action},
        {"type": "local_shell_call", "id": "lsh_1", "call_id": "c", "action": {"command": ["ls"]}},
        {"type": "shell_call", "call_id": "d", "action": {"commands": ["ls"]}},
        {"type": "apply_patch_call", "call_id": "e", "operation": {"type": "delete_file"}},
        # What the service does itself has no output of its own, and no call_id.
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "mcp_call", "id": "mcp_1", "name": "roll", "arguments": "{}", "output": "4"},
        # A kind that we do not know is not ours to answer.
        {"type": "future_call", "call_id": "f", "name": "x"},
    ]
    whole, calls = closed([user("Go."), *items])
    assert calls == [
        ToolCall("a", "sql", "123"),  # text, even where it could be read as JSON
        ToolCall("b", "computer_call", action),
        ToolCall("c", "local_shell_call", {"command": ["ls"]}),
        ToolCall("d", "shell_call", {"commands": ["ls"]}),
        ToolCall("e", "apply_patch_call", {"type": "delete_file"}),
    ]
    assert whole[: len(items) + 1] == [user("Go."), *items]
    made = whole[len(items) + 1 :]
    assert [(m["type"], m.get("call_id", m.get("id"))) for m in made] == [
        (f"{item['type']}_output", item["call_id"]) for item in items[:5]
    ]
    assert made[0]["output"] == made[2]["output"] == made[4]["output"] == MARK
    assert made[1]["output"]["type"] == "computer_screenshot"
    assert (made[1]["status"], made[4]["status"]) == ("incomplete", "failed")
    assert made[3]["output"][0]["stderr"] == MARK
    assert dangling_calls(whole) == []


def test_the_output_of_a_local_shell_may_name_its_call_by_id() -> None:
    call = {"type": "local_shell_call", "id": "lsh_1", "call_id": "c", "action": {}}
    assert (
        dangling_calls([call, {"type": "local_shell_call_output", "id": "c", "output": ""}]) == []
    )
    both = {"type": "local_shell_call_output", "id": "x", "call_id": "c", "output": ""}
    assert dangling_calls([call, both]) == []
    assert dangling_calls([call, {"type": "function_call_output", "id": "c", "output": ""}]) != []


def test_a_call_that_a_program_has_made() -> None:
    """Its output goes to the program, which runs at the service."""
    caller = {"type": "program", "caller_id": "p"}
    [_, call] = Responses.calls("c1")
    [made] = Responses.made_up("c1")
    talk = [user("Go."), {"type": "program", "call_id": "p"}, {**call, "caller": caller}]
    assert closed(talk)[0] == [*talk, {**made, "caller": caller}]
    [chat] = Anthropic.calls("c1")
    chat["content"][1]["caller"] = {"type": "direct"}
    assert closed([chat])[0][1]["content"] == Anthropic.made_up("c1")


def test_a_custom_tool_of_chat() -> None:
    call = {"id": "c1", "type": "custom", "custom": {"name": "sql", "input": "[1]"}}
    talk = [user("Go."), {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert closed(talk) == ([*talk, *Chat.made_up("c1")], [ToolCall("c1", "sql", "[1]")])


def test_ids_that_are_counted_anew_in_each_turn() -> None:
    """The result is that of the nearest call: the one before it was interrupted."""
    talk = [*Chat.calls("call_0"), user("Go on."), *Chat.calls("call_0"), *Chat.results("call_0")]
    whole, [_] = closed(talk)
    assert whole == [talk[0], *Chat.made_up("call_0"), *talk[1:]]
    assert Chat.refusal(whole) is None


# -- closing ---------------------------------------------------------------------------------------


@each_shape
def test_what_is_complete_stays_the_same(shape: Shape) -> None:
    talk = [user("Go."), *shape.calls("c1", "c2"), *shape.results("c2", "c1"), assistant("Done.")]
    whole, calls = closed(talk)
    assert calls == []
    assert all(a is b for a, b in zip(whole, talk, strict=True))
    for state in (talk, {"messages": talk, "n": 1}, [[talk], 1]):
        assert closed_state(state) == (state, [])
        assert closed_state(state)[0] is state


@pytest.mark.parametrize("shape", [Chat, Responses])
@pytest.mark.parametrize("after", [[], [user("Hello?")], [assistant("So."), user("And?")]])
def test_only_what_is_missing_is_made_up(shape: Any, after: list[Message]) -> None:
    """Behind the results that are there, and before all else."""
    start = [user("Go."), *shape.calls("c1", "c2", "c3", "c4"), *shape.results("c3", "c2")]
    whole, calls = closed([*start, *after])
    assert whole == [*start, *shape.made_up("c1", "c4"), *after]
    assert [call.id for call in calls] == ["c1", "c4"]
    assert shape.refusal(whole) is None


def test_anthropic_results_go_first_into_the_next_message() -> None:
    start = [user("Go."), *Anthropic.calls("c1", "c2")]
    made = Anthropic.made_up("c1", "c2")
    text = {"type": "text", "text": "Hello?"}
    [result] = Anthropic.results("c2")[0]["content"]
    cases: list[tuple[list[Message], list[Message]]] = [
        ([], [{"role": "user", "content": made}]),
        ([user("Hello?")], [{"role": "user", "content": [*made, text]}]),
        ([user("")], [{"role": "user", "content": made}]),
        (
            [{"role": "user", "content": [text], "name": "x"}],
            [{"role": "user", "content": [*made, text], "name": "x"}],
        ),
        (
            [{"role": "user", "content": [result, text]}],
            [{"role": "user", "content": [result, made[0], text]}],
        ),
        ([assistant("So.")], [{"role": "user", "content": made}, assistant("So.")]),
        ([{"role": "user", "content": 5}], [{"role": "user", "content": made},
                                            {"role": "user", "content": 5}]),
    ]  # fmt: skip
    for following, expected in cases:
        before = copy.deepcopy(following)
        whole, _ = closed([*start, *following])
        assert whole == [*start, *expected]
        assert following == before
        if following != [{"role": "user", "content": 5}]:
            assert Anthropic.refusal(whole) is None


def test_several_gaps_at_once() -> None:
    for shape in SHAPES:
        talk: list[Message] = []
        for n in range(3):
            talk += [user("Go."), *shape.calls(f"a{n}", f"b{n}"), *shape.results(f"b{n}")]
        whole, calls = closed(talk)
        assert [call.id for call in calls] == ["a0", "a1", "a2"]
        assert shape.refusal(whole) is None


# -- in a store ------------------------------------------------------------------------------------


@each_shape
def test_a_load_that_repairs(sqlite: Home, shape: Shape) -> None:
    session = sqlite.session()
    start = [user("Go."), *shape.calls("c1", "c2")]
    state = {"plan": {"talks": [start]}, "messages": [*start, *shape.results("c1", "c2")], "n": 7}
    session.save(state)
    before = (session.head, len(session), session.operations())
    loaded = session.load(close_calls=True)
    assert [call.id for call in session.closed_calls] == ["c1", "c2"]
    assert shape.refusal(loaded["plan"]["talks"][0]) is None
    assert MARK in json.dumps(loaded["plan"])
    assert (loaded["messages"], loaded["n"]) == (state["messages"], 7)
    assert session.load() == state
    assert sqlite.another().session("s").load() == state
    assert (session.head, len(session), session.operations()) == before

    session.save(loaded)
    assert session.load(close_calls=True) == loaded
    assert [*session.closed_calls] == []
    assert session.load("@~1", close_calls=True) == loaded
    assert [call.id for call in session.closed_calls] == ["c1", "c2"]


@pytest.mark.parametrize(
    "state",
    [
        # Parts of an answer that somebody keeps are no conversation.
        {"output": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}]},
        {"parts": [{"type": "ai", "content": Responses.calls("c1")}]},
        {"messages": [*Chat.calls("c1"), None]},
        {"messages": [*Chat.calls("c1"), {"content": "?"}]},
        {"messages": tuple(Chat.calls("c1"))},
        {"messages": [{"role": ["user"]}, {"role": None}]},
        {"messages": [{"role": "narrator", "tool_calls": Chat.calls("c1")[0]["tool_calls"]}]},
        [], {}, None, 5, "role",
    ],
)  # fmt: skip
def test_what_is_no_conversation_is_left_alone(memory: Home, state: Any) -> None:
    session = memory.session()
    session.save(state)
    assert session.load(close_calls=True) == state
    assert session.closed_calls == ()


def test_a_state_as_deep_as_can_be_saved(memory: Home) -> None:
    state: Any = [user("Go."), *Chat.calls("c1")]
    for n in range(56):
        state = {"in": state} if n % 2 else [state]
    session = memory.session()
    session.save(state)
    session.load(close_calls=True)
    assert [call.id for call in session.closed_calls] == ["c1"]


# -- hostile messages ------------------------------------------------------------------------------

HOSTILE: list[Any] = [
    {"role": "assistant", "tool_calls": [{"id": 5, "function": {"name": "f"}}]},
    {"role": "assistant", "tool_calls": [{"id": "", "function": {"name": "f"}}]},
    {"role": "assistant", "tool_calls": [{"id": ["x"], "function": None}]},
    {"role": "assistant", "tool_calls": 7},
    {"role": "assistant", "tool_calls": {"id": "x"}},
    {"role": "assistant", "tool_calls": [None, "x", 5]},
    {"role": "assistant", "content": [None, {"type": "tool_use"}, {"type": "tool_use", "id": 1}]},
    {"role": "user", "content": [{"type": "tool_use", "id": "x", "name": "f"}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": []}, 5]},
    {"role": "tool", "tool_call_id": 5},
    {"role": "tool", "tool_call_id": "nobody"},
    {"role": [], "type": {}, "content": None},
    {"type": "function_call", "call_id": 5},
    {"type": "function_call", "id": "x"},
    {"type": "function_call_output", "call_id": ["c"]},
    {"type": "reasoning"},
    {},
    {5: 6},
]


@pytest.mark.parametrize("odd", HOSTILE)
def test_odd_messages_are_left_as_they_are(odd: Any) -> None:
    for talk in ([odd], [odd, odd], [user("Go."), odd, assistant("Done.")]):
        assert closed(talk) == (talk, [])
        assert closed_state({"messages": talk}) == ({"messages": talk}, [])
        assert [n for unit in units(talk) for n in unit] == [*range(len(talk))]
        assert newest(talk, 100) == talk
        assert newest(talk, 1)[-1:] == talk[-1:]


@pytest.mark.parametrize("odd", [None, 5, "text", ["role"], ("role", "user")])
def test_things_that_are_no_messages_are_left_as_they_are(odd: Any) -> None:
    talk = [*Chat.calls("c1"), odd, *Chat.results("c1"), odd, *Anthropic.calls("c2"), odd]
    whole, calls = closed(talk)
    assert [call.id for call in calls] == ["c2"]
    assert whole == [*talk[:-1], {"role": "user", "content": Anthropic.made_up("c2")}, odd]
    assert newest(talk, 100) == talk


def test_calls_that_do_not_say_what_is_called() -> None:
    calls = [
        {"id": "a", "function": {"arguments": "{"}},
        {"id": "b", "function": "f"},
        {"id": "c", "function": {"name": 5, "arguments": "[" * 100_000}},
        {"id": "d"},
    ]
    found = dangling_calls([{"role": "assistant", "tool_calls": calls}])
    assert [call.id for call in found] == ["a", "b", "c", "d"]
    assert {call.name for call in found} == {"unknown"}
    assert [call.arguments for call in found] == ["{", {}, "[" * 100_000, {}]


def test_results_before_their_calls_are_none() -> None:
    for shape in SHAPES:
        talk = [user("Go."), *shape.results("c1"), assistant("Hm."), *shape.calls("c1")]
        whole, [call] = closed(talk)
        assert call.id == "c1"
        assert whole[: len(talk)] == talk
        assert dangling_calls(whole) == []


def test_one_answer_of_responses_stays_together() -> None:
    """A call without the reasoning that led to it is refused, and the other way round."""
    thought = {"type": "reasoning", "id": "rs_1", "summary": []}
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed"}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text"}]}
    calls = Responses.calls("c1", "c2")[1:]
    for answer in (
        [thought, said],
        [thought, thought, *calls],  # nothing of it has an output yet
        [thought, search, thought, said, *calls, *Responses.results("c2", "c1")],
        [thought, {"type": "program", "call_id": "p"}, *calls, *Responses.results("c1", "c2"),
         {"type": "program_output", "call_id": "p", "result": "1"}],
        [{"type": "mcp_list_tools", "tools": []}, {"type": "mcp_call", "output": "4"}, said],
    ):  # fmt: skip
        talk = [user("Go."), assistant("Hm."), user("Go on."), *answer, user("Thanks.")]
        whole = range(3, 3 + len(answer))
        assert units(talk) == [
            range(1),
            range(1, 2),
            range(2, 3),
            whole,
            range(whole.stop, len(talk)),
        ]
        assert newest([user("Go."), *answer], 1) == answer


def test_all_between_a_call_and_its_result_stays_with_them() -> None:
    for shape in SHAPES:
        late = [*shape.calls("c1", "c2"), user("Hm."), *shape.results("c2"), *shape.results("c1")]
        assert units([user("Go."), *late, user("So?")]) == [
            range(1), range(1, len(late) + 1), range(len(late) + 1, len(late) + 2),
        ]  # fmt: skip
        assert newest([user("Go."), *late], 1) == late


def test_results_that_nobody_asked_for_begin_nothing() -> None:
    """A window that began with one would be refused."""
    for shape in SHAPES:
        twice = [*shape.calls("c1"), *shape.results("c1"), *shape.results("c1")]
        assert units([user("Go."), *twice]) == [range(1), range(1, len(twice) + 1)]
        system = {"role": "system", "content": "Be brief."}
        assert newest([system, *shape.results("c1")], 1) == [system, *shape.results("c1")]
        said = [assistant("a"), assistant("b"), assistant("c")]
        assert newest([*shape.results("c1"), *said], 2) == said[1:]


def test_an_id_twice_in_one_message_is_one_call() -> None:
    talk = [user("Go."), *Chat.calls("c1", "c1")]
    assert closed(talk) == ([*talk, *Chat.made_up("c1")], dangling_calls(talk))
    both = {**Anthropic.calls("c1")[0], "tool_calls": Chat.calls("c1")[0]["tool_calls"]}
    assert dangling_calls([user("Go."), both, *Chat.results("c1")]) == []


@pytest.mark.timeout(120)
def test_huge_conversations_take_linear_time() -> None:
    """With a squared effort these would take hours."""
    ids = [f"c{n}" for n in range(20_000)]
    items = Responses.calls(*ids)
    whole, calls = closed(items)
    assert len(calls) == len(ids)
    assert len(whole) == len(items) + len(ids)
    assert len(units(whole)) == 1
    assert newest(whole, 1) == whole
    nested = [*Chat.calls(*ids), *Chat.results(*ids)]
    assert closed(nested) == (nested, [])
    assert len(units([user(id) for id in ids])) == len(ids)
    assert len(newest([user(id) for id in ids], 15_000)) == 15_000
    steps = [user("Go."), *[m for id in ids for m in (*Chat.calls(id), *Chat.results(id))]]
    assert newest(steps, 30_001) == [steps[0], *steps[-30_000:]]


# -- any conversation ------------------------------------------------------------------------------


@st.composite
def talks(draw: st.DrawFn, shape: Shape) -> list[Message]:
    """A conversation as the API takes it: questions, calls in parallel, their results, words."""
    out: list[Message] = draw(st.sampled_from([[], [{"role": "system", "content": "Be brief."}]]))
    made = 0
    for turn in range(draw(st.integers(1, 4))):
        out.append(user(f"Question {turn}"))
        for calls in draw(st.lists(st.integers(1, 3), max_size=3)):
            ids = [f"c{made + n}" for n in range(calls)]
            made += calls
            out += [*shape.calls(*ids), *shape.results(*draw(st.permutations(ids)))]
        out.append(assistant(f"Answer {turn}"))
    return out


def cut(draw: Any, talk: list[Message]) -> list[Message]:
    """What is left of it: not beyond some message, and not all results of that."""
    end = draw(st.integers(0, len(talk)))
    left = copy.deepcopy(talk[:end])
    while left and left[-1].get("type") == "reasoning":
        left.pop()  # nobody can say what would have followed
    if left and type(left[-1].get("content")) is list:
        blocks = left[-1]["content"]
        if blocks[0]["type"] == "tool_result":
            del blocks[draw(st.integers(1, len(blocks))) :]
    return left


def without_made_up(messages: list[Message]) -> list[Message]:
    out = []
    for message in messages:
        content = message.get("content")
        if MARK in (content, message.get("output")):
            continue
        if type(content) is list:
            content = [block for block in content if block.get("content") != MARK]
            if not content:
                continue
            message = {**message, "content": content}
        out.append(message)
    return out


@each_shape
@given(data=st.data())
def test_what_was_cut_off_anywhere_can_go_on(shape: Shape, data: st.DataObject) -> None:
    left = cut(data.draw, data.draw(talks(shape)))
    before = copy.deepcopy(left)
    missing = [call.id for call in dangling_calls(left)]
    whole, calls = closed(left)
    assert shape.refusal(whole) is None
    assert dangling_calls(whole) == []
    assert [call.id for call in calls] == missing
    assert left == before
    assert without_made_up(whole) == left
    assert closed(whole) == (whole, [])


@each_shape
@given(data=st.data())
def test_a_user_who_goes_on_after_the_cut(shape: Shape, data: st.DataObject) -> None:
    """The gap is in the middle then."""
    left = cut(data.draw, data.draw(talks(shape)))
    whole, _ = closed([*left, user("Are you there?"), assistant("Yes.")])
    assert shape.refusal(whole) is None
    assert "Are you there?" in json.dumps(whole[-2])
    assert whole[-1] == assistant("Yes.")


@each_shape
@given(data=st.data())
def test_the_newest_messages_that_fit(shape: Shape, data: st.DataObject) -> None:
    talk, _ = closed(cut(data.draw, data.draw(talks(shape))))
    weights = {id(m): data.draw(st.integers(0, 5)) for m in talk}
    limit = data.draw(st.integers(-1, sum(weights.values())))

    def weigh(message: Message) -> float:
        return weights[id(message)]

    kept = newest(talk, limit, weigh)
    lead = talk[:1] if talk[:1] and talk[0]["role"] == "system" else []
    assert shape.refusal(kept) is None
    assert kept[: len(lead)] == lead
    places = [next(n for n, m in enumerate(talk) if m is message) for message in kept]
    assert places == sorted({*places})
    whole = [unit for unit in units(talk) if {*unit} & {*places}]
    assert [n for unit in whole for n in unit] == places
    if len(talk) > len(lead):
        assert whole[-1] == units(talk)[-1]

    used = sum(map(weigh, kept))
    total = sum(map(weigh, talk))
    newest_alone = sum(weigh(talk[n]) for n in units(talk)[-1]) if talk else 0
    lead_alone = sum(map(weigh, lead))
    assert used <= max(limit, lead_alone + newest_alone)
    if total <= limit:
        assert kept == talk
    asked = [m for m in talk if m.get("role") == "user" and type(m["content"]) is str]
    if asked and lead_alone + newest_alone + weigh(asked[-1]) <= limit:
        assert kept[len(lead)] in asked
    gaps = [n for n in range(1, len(places)) if places[n] != places[n - 1] + 1]
    if gaps and gaps[-1] > len(lead):  # a question, and then some of what it led to
        left_out = talk[places[gaps[-1] - 1] + 1 : places[gaps[-1]]]
        assert not any(message in asked for message in left_out)
        [last] = [unit for unit in units(talk) if unit.stop == places[gaps[-1]]]
        assert used + sum(weigh(talk[n]) for n in last) > limit


@st.composite
def junk(draw: st.DrawFn) -> Any:
    ids = st.sampled_from(["a", "b", "", 1, None, ["a"]])
    call = st.fixed_dictionaries(
        {},
        optional={
            "id": ids, "name": ids, "type": st.sampled_from(["tool_use", "tool_result", 1]),
            "tool_use_id": ids, "function": st.sampled_from([None, {}, {"name": "f"}, "f"]),
        },
    )  # fmt: skip
    some = st.lists(st.one_of(call, st.none()), max_size=3)
    message = st.fixed_dictionaries(
        {},
        optional={
            "role": st.sampled_from(["user", "assistant", "tool", "system", 1, [], None]),
            "type": st.sampled_from(
                ["function_call", "function_call_output", "shell_call", "odd_call", "odd_output",
                 "local_shell_call_output", "reasoning", "message", 1, {}]
            ),
            "content": st.one_of(st.none(), st.just("text"), st.just(1), some),
            "tool_calls": st.one_of(st.none(), st.just("ab"), some),
            "call_id": ids, "tool_call_id": ids, "id": ids,
        },
    )  # fmt: skip
    return draw(st.lists(st.one_of(message, st.none(), st.just("text")), max_size=8))


@given(talk=junk(), limit=st.integers(-1, 9))
@example(  # instructions that make a call
    talk=[
        {"type": "function_call", "id": "a", "call_id": "a", "role": "system"},
        {"type": "function_call", "tool_calls": None, "role": "tool", "tool_call_id": "a"},
        {},
    ],
    limit=0,
)
def test_no_message_is_too_odd(talk: list[Any], limit: int) -> None:
    before = copy.deepcopy(talk)
    whole, calls = closed(talk)
    assert talk == before
    assert dangling_calls(whole) == []
    assert calls == dangling_calls(talk)
    assert (whole == talk) == (not calls)
    rest = iter(without_odd(whole))
    assert all(any(m == other for other in rest) for m in without_odd(talk))  # in this order
    assert [n for unit in units(talk) for n in unit] == [*range(len(talk))]
    kept = newest(talk, limit)
    assert kept[-1:] == talk[-1:]
    for link in talking.links(talk):
        if link.result is not None:
            call, result = (any(m is talk[n] for m in kept) for n in (link.at, link.result))
            assert call == result
    closed_state({"a": talk, "b": [talk]})


def without_odd(messages: list[Any]) -> list[Any]:
    """Messages, but for blocks that were added to them."""
    out = []
    for message in messages:
        if type(message) is dict and type(message.get("content")) is list:
            blocks = [b for b in message["content"] if not (b and b.get("content") == MARK)]
            message = {**message, "content": blocks}
        elif type(message) is dict and message.get("role") == "user":
            text = message.get("content")
            if type(text) is str:
                message = {**message, "content": [{"type": "text", "text": text}]}
        out.append(message)
    return out


# -- calls -----------------------------------------------------------------------------------------


class Thing:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


@pytest.mark.parametrize(
    "call",
    [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": null}'}},
        Thing(id="c", function=Thing(name="f", arguments='{"a": null}')),
        {"type": "function_call", "id": "x", "call_id": "c", "name": "f",
         "arguments": '{"a":null}'},
        {"type": "tool_use", "id": "c", "name": "f", "input": {"a": None}},
        {"type": "tool_call", "id": "c", "name": "f", "args": {"a": None}},
        ToolCall("c", "f", {"a": None}),
    ],
)  # fmt: skip
def test_calls_in_all_shapes(call: Any) -> None:
    assert tool_call(call) == ToolCall("c", "f", {"a": None})


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [("", {}), (" ", {}), (None, {}), ("null", {}), ("{", "{"), ("[1]", [1]), ("[" * 99_999,) * 2],
)  # fmt: skip
def test_arguments_that_are_no_object(arguments: Any, expected: Any) -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    assert name_and_arguments(call) == ("f", expected)
    if type(expected) is str:  # it can be shown, but not be called with
        with pytest.raises(InvalidRequest, match="no JSON"):
            tool_call(call)
    else:
        assert tool_call(call).arguments == expected


@pytest.mark.parametrize(
    "call",
    [None, 5, {}, {"id": "c"}, {"name": "f"}, {"id": 5, "name": "f"}, {"id": "c", "name": 5}],
)
def test_what_is_no_call(call: Any) -> None:
    with pytest.raises(InvalidRequest, match="not a tool call"):
        tool_call(call)
