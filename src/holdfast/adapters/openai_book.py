"""What a session of the OpenAI Agents SDK keeps in a store.

Its state is {"items": [...]}: the conversation, as the SDK hands it over when a turn is done. Two
more keys come and go: "pending", calls that a model has asked for and whose results are not among
the items, by their ids; and "run_state", a run that waits for approval.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, cast

from holdfast.errors import HeadMoved, InDoubt, InvalidRequest, NotFound
from holdfast.model import ToolCall, Usage

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.checkpoint import Checkpoint
    from holdfast.fields import Fields
    from holdfast.session import Revision, Session
    from holdfast.store import Store

    Item = dict[str, Any]
    Notes = dict[str, Any]

T = TypeVar("T")

_PENDING, _RUN_STATE = "pending", "run_state"
_OUTPUTS = {
    "function_call": "function_call_output",
    "custom_tool_call": "custom_tool_call_output",
    "shell_call": "shell_call_output",
    "apply_patch_call": "apply_patch_call_output",
    "computer_call": "computer_call_output",
    "local_shell_call": "local_shell_call_output",
}
"""Calls that are carried out here, and the items with their results."""
_TEXTUAL = ("function_call", "custom_tool_call")
_UNKNOWN = "No result: the program ended during this call. It may have had its effect, or not."
_NOT_BEGUN = "Not carried out: the program ended before this call began."


class PendingCall(NamedTuple):
    """A call whose result is not in the conversation."""

    id: str
    name: str
    arguments: Any
    stage: Literal["asked", "started", "done"]
    """What is only asked for has had no effect; what was started is in doubt."""
    output: Any
    """What it has returned, if it is done."""
    agent: str | None


class Book:
    """A session's state, for one worker at a time.

    What is not among the items is small, and remembered. It holds for one head: what others do
    moves that, and it is read again.
    """

    def __init__(self, store: Store, name: str, agent: str | None) -> None:
        self.agent = agent
        """Whose session it is, once that is known."""
        self._store, self._name = store, name
        self._session: Session | None = None
        self._notes: Notes | None = None
        self._tokens = 0  # spent, and not on any checkpoint yet

    def session(self) -> Session:
        if self._session is None:
            self._session = self._store.session(self._name, agent=self.agent)
        if self._session.agent is None:
            self._session.agent = self.agent
        return self._session

    def items(self) -> list[Item]:
        return self._look()[0]

    def add(self, items: list[Item]) -> None:
        roles = {item.get("role") for item in items}
        trigger = "user" if "user" in roles else "assistant"
        if any(_is_output(item) for item in items):
            trigger = "tool_call"
        self._write(lambda notes: _answered(notes, items), trigger, items)

    def ask(self, asked: Notes, tokens: int) -> None:
        """What a model has answered: calls, if any, and what it took."""
        self._tokens += tokens
        if not asked:
            return

        def plan(notes: Notes) -> Notes:
            kept = {k: v for k, v in notes[_PENDING].items() if v["stage"] != "asked"}
            return notes | {_PENDING: {**kept, **asked}}

        self._write(plan, "assistant")

    def start(self, call: tuple[str, Notes] | None) -> None:
        """One call; or without, all that are no functions: nobody says which of them it is."""

        def plan(notes: Notes) -> Notes:
            pending = dict(notes[_PENDING])
            if call is not None:
                pending.setdefault(*call)
            for id, entry in pending.items():
                mine = entry["call"].get("type") not in _TEXTUAL if call is None else id == call[0]
                if mine:
                    pending[id] = entry | {"stage": "started"}
            return notes | {_PENDING: pending}

        self._write(plan, "tool_start")

    def end(self, id: str, output: Any) -> None:
        def plan(notes: Notes) -> Notes:
            pending = dict(notes[_PENDING])
            if id in pending:
                pending[id] = pending[id] | {"stage": "done", "output": output}
            return notes | {_PENDING: pending}

        self._write(plan, "tool_end")

    def pop(self) -> Item | None:
        while True:
            items, _ = self._look()
            if not items:
                return None
            self._notes = None
            with suppress(HeadMoved):
                self.session().patch(set={"items": items[:-1]}, trigger="pop")
                return items[-1]

    def clear(self) -> None:
        while True:
            items, notes = self._look()
            left = [key for key, value in notes.items() if value]
            if not (items or left):
                return
            self._notes = None
            with suppress(HeadMoved):
                self.session().patch(set={"items": []}, drop=left, trigger="clear")
                return

    def pending(self) -> list[PendingCall]:
        _, notes = self._look()
        return [_shown(id, entry) for id, entry in notes[_PENDING].items()]

    def settle(self, outputs: dict[str, Any]) -> list[PendingCall]:
        while True:
            items, notes = self._look()
            pending = notes[_PENDING]
            if unknown := outputs.keys() - pending.keys():
                raise InvalidRequest(
                    f"no call {min(unknown)!r} is pending", hint="pending() lists those that are"
                )
            told = _told(items, pending, outputs)
            with suppress(HeadMoved):
                if pending:
                    planned = _answered(notes, told) | {_PENDING: {}}
                    self._commit(planned, told, {"trigger": "settle"})
                return [_shown(id, entry) for id, entry in pending.items()]

    def dismiss(self) -> None:
        self._write(lambda notes: notes | {_PENDING: {}}, "dismiss")

    def save_state(self, state: Notes, waiting: list[ToolCall]) -> Checkpoint:
        while True:
            items, notes = self._look()
            answered = {item["call_id"] for item in items if _is_output(item)}
            open_ = {item["call_id"] for item in items if _is_call(item)}
            awaiting = sorted((open_ - answered) | {call.id for call in waiting})
            begun = [id for id, entry in notes[_PENDING].items() if entry["stage"] != "asked"]
            kept = {"awaiting": awaiting, "begun": begun, "state": state}
            fields: Fields = {"trigger": "approval", "status": "halted", "pending": waiting}
            with suppress(HeadMoved):
                return self._commit(notes | {_RUN_STATE: kept}, [], fields)

    def run_state(self) -> Notes | None:
        _, notes = self._look()
        kept = notes[_RUN_STATE]
        if kept is None:
            return None
        for id, entry in notes[_PENDING].items():
            known = id in kept["begun"] or id not in kept["awaiting"]
            if entry["stage"] != "asked" and not known:
                error = InDoubt(
                    f"the run that waits was resumed before, and ended during call {id!r}",
                    key=id, idempotency_key=id,
                )  # fmt: skip
                error.hint = "look, then settle({id: output}); or dismiss(), to make the call again"
                raise error
        return cast("Notes", kept["state"])

    def fork(self, name: str, at: Revision | None) -> None:
        self._look()
        self.session().fork(name, at)

    def move(self, how: Callable[[Session], T]) -> T:
        self._look()
        self._notes = None
        return how(self.session())

    def _look(self) -> tuple[list[Item], Notes]:
        """The items as they are now, and the rest. From here on this head is expected."""
        session = self.session()
        while True:
            head = session.refresh()
            with suppress(NotFound):  # deleted since: look again
                state = session.load(head) if head else {}
                items, self._notes = _parts(self._name, state)
                return items, self._notes

    def _write(
        self,
        plan: Callable[[Notes], Notes],
        trigger: str,
        items: list[Item] | None = None,
    ) -> None:
        """Commit what is planned on what is there; if others were first, plan again."""
        while True:
            notes = self._look()[1] if self._notes is None else self._notes
            planned = plan(notes)
            if planned == notes and not items:
                return
            with suppress(HeadMoved):
                self._commit(planned, items or [], {"trigger": trigger})
                return

    def _commit(self, planned: Notes, items: list[Item], fields: Fields) -> Checkpoint:
        before = cast("Notes", self._notes)
        self._notes = None  # until it is known to be written
        changed = [key for key in planned if planned[key] != before[key]]
        shown = [_shown(id, entry) for id, entry in planned[_PENDING].items()]
        open_ = [ToolCall(c.id, c.name, c.arguments) for c in shown if c.stage != "done"]
        if open_:
            fields = {"pending": open_, **fields}
        if self._tokens:
            fields["usage"] = Usage(self._tokens)
        if changed or not items:
            saved = self.session().patch(
                append={"items": items} if items else {},
                set={key: planned[key] for key in changed if planned[key]},
                drop=[key for key in changed if not planned[key]],
                **fields,
            )
        else:
            saved = self.session().append("items", *items, **fields)
        self._notes, self._tokens = planned, 0
        return saved


# -- items -----------------------------------------------------------------------------------------


def _parts(name: str, state: Any) -> tuple[list[Item], Notes]:
    known = {"items", _PENDING, _RUN_STATE}
    items = state.get("items", []) if type(state) is dict and known.issuperset(state) else None
    if type(items) is not list:
        raise InvalidRequest(
            f"session {name!r} is no conversation of the OpenAI Agents SDK",
            hint='its state would be {"items": […]}; use another store or session_id',
        )
    return items, {_PENDING: state.get(_PENDING, {}), _RUN_STATE: state.get(_RUN_STATE)}


def _is_call(item: Item) -> bool:
    return item.get("type") in _OUTPUTS and isinstance(item.get("call_id"), str)


def _is_output(item: Item) -> bool:
    return item.get("type") in _OUTPUTS.values() and isinstance(item.get("call_id"), str)


def newest(items: list[Item], limit: int | None) -> list[Item]:
    """The last `limit` items, and what they cannot do without."""
    if limit is None or limit < 0:  # as the SDK's own sessions take it
        return items
    calls: dict[str, int] = {}
    needs: dict[int, int] = {}
    for at, item in enumerate(items):
        if _is_call(item):
            calls[item["call_id"]] = at
        elif _is_output(item):
            needs[at] = calls.get(item["call_id"], at)
    start, at = max(len(items) - limit, 0), len(items)
    while at > start:
        at -= 1
        start = min(start, needs.get(at, start))
        while start and items[start - 1].get("type") == "reasoning":
            start -= 1
    return items[start:]


def calls_in(items: list[Item], agent: str) -> Notes:
    """Calls of an answer by their ids, each with what stands before it: reasoning, text."""
    asked: Notes = {}
    before: list[Item] = []
    for item in items:
        if _is_call(item):
            entry = {"stage": "asked", "agent": agent, "call": item, "before": before}
            asked[item["call_id"]] = entry
            before = []
        else:
            before = [*before, item]
    return asked


def _answered(notes: Notes, items: list[Item]) -> Notes:
    """The rest of the state once these items are in the conversation."""
    done = {item["call_id"] for item in items if _is_output(item)}
    pending = {id: entry for id, entry in notes[_PENDING].items() if id not in done}
    state = notes[_RUN_STATE]
    if state and (not state["awaiting"] or done.intersection(state["awaiting"])):
        state = None
    return {_PENDING: pending, _RUN_STATE: state}


def _told(items: list[Item], pending: Notes, outputs: dict[str, Any]) -> list[Item]:
    """Pending calls as items: first all of them, then their results."""
    there = {item["call_id"] for item in items if _is_call(item)}
    calls: list[Item] = []
    results: list[Item] = []
    for id, entry in pending.items():
        call, kind = entry["call"], entry["call"]["type"]
        if kind not in _TEXTUAL:
            continue
        if id not in there:
            calls += [*entry["before"], call]
        known = {"asked": _NOT_BEGUN, "started": _UNKNOWN, "done": entry.get("output")}
        output = outputs.get(id, known[entry["stage"]])
        results.append({"type": _OUTPUTS[kind], "call_id": id, "output": output})
    return calls + results


def _shown(id: str, entry: Notes) -> PendingCall:
    call = entry["call"]
    details = call.get("arguments", call.get("input", call.get("action", call.get("operation"))))
    name = call.get("name") or call["type"].removesuffix("_call")
    return PendingCall(
        id, name, decoded(details), entry["stage"], entry.get("output"), entry["agent"]
    )


def decoded(arguments: Any) -> Any:
    """Arguments as data, if what the model wrote is JSON."""
    if isinstance(arguments, str):
        with suppress(ValueError):
            return json.loads(arguments)
    return arguments
