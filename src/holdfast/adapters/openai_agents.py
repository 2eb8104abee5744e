"""Sessions of the OpenAI Agents SDK: `HoldfastSession("trip", "agents.db")`.

The state of a session is `{"items": […]}`. While there are any, it also has "pending", a ToolLog of
the calls that are not among the items, and "run_state", a run that waits for approval.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, cast

from agents import ItemHelpers, Runner, RunState, SessionSettings
from agents.lifecycle import RunHooksBase
from agents.memory.session_settings import coerce_session_settings, resolve_session_limit
from agents.tool_context import ToolContext

from holdfast import Checkpoint, Operation, Session, Store, ToolCall, Usage
from holdfast.adapters.base import (
    Host,
    Hosted,
    finished,
    foreign_session,
    list_of_dicts,
    read_head,
    retried_on,
)
from holdfast.adapters.tool_log import Entry, ToolLog
from holdfast.errors import HeadMoved, InDoubt, InvalidRequest

if TYPE_CHECKING:
    from agents import (
        Agent,
        ModelResponse,
        RunContextWrapper,
        RunResult,
        Tool,
        TResponseInputItem,
    )

    Item = dict[str, Any]
    Hooks = RunHooksBase[Any, Any]


T = TypeVar("T")

_OUTPUTS = {
    "function_call": "function_call_output",
    "custom_tool_call": "custom_tool_call_output",
    "shell_call": "shell_call_output",
    "apply_patch_call": "apply_patch_call_output",
    "computer_call": "computer_call_output",
    "local_shell_call": "local_shell_call_output",
}
"""Types of calls that the agent's process carries out, with the types of their results."""
_TEXTUAL = ("function_call", "custom_tool_call")
_UNKNOWN = "No result: the program ended during this call. It may have had its effect, or not."
_NOT_BEGUN = "Not carried out: the program ended before this call began."


class PendingCall(NamedTuple):
    """A call whose result is not in the conversation."""

    id: str
    name: str
    arguments: Any
    stage: Literal["asked", "started", "done"]
    """A call that is only asked for had no effect. A call that has started is in doubt."""
    output: Any
    """The result of a call that is done."""
    agent: str | None


class HoldfastSession(Hosted):
    """A conversation in a store: one that you pass in, or a URL, which is opened and closed.

    A change is durable when its method returns. A method that is cancelled completes first. The
    calls of one object run one after the other. Several processes may add to one session; items
    that were added together stay together.

    To share the store of another session, pass `other.host.lent()`.
    """

    session_id: str
    session_settings: SessionSettings | None

    def __init__(
        self,
        session_id: str,
        store: Store | str | os.PathLike[str] | Host,
        *,
        agent: str | None = None,
        session_settings: SessionSettings | dict[str, Any] | None = None,
    ) -> None:
        if not isinstance(session_id, str) or not session_id:
            raise InvalidRequest(f"session_id must be a non-empty string, not {session_id!r}")
        given: Any = SessionSettings() if session_settings is None else session_settings
        self.session_id, self.session_settings = session_id, coerce_session_settings(given)
        self.host = store if isinstance(store, Host) else Host(store)
        self._conversation = _Conversation(self.host, session_id, agent)

    # -- the protocol --------------------------------------------------------------------------

    async def get_items(self, limit: int | None = None) -> list[TResponseInputItem]:
        """Return the newest `limit` items, or all.

        A model refuses a result without its call, or an item without the reasoning that led to it.
        So more items are returned if `limit` would separate them.
        """
        limit = resolve_session_limit(limit, self.session_settings)
        items = await self._conversation.call(self._conversation.items)
        return cast("list[TResponseInputItem]", newest(items, limit))

    async def add_items(self, items: list[TResponseInputItem]) -> None:
        """Add items, in one checkpoint. Calls that have a result there are no longer pending."""
        if checked := list_of_dicts("items", items):
            await self._conversation.finish(self._conversation.add, checked)

    async def pop_item(self) -> TResponseInputItem | None:
        """Remove the newest item and return it. Returns None if there is none."""
        item = await self._conversation.finish(self._conversation.pop)
        return cast("TResponseInputItem | None", item)

    async def clear_session(self) -> None:
        """Remove all items and pending calls. undo() restores them."""
        await self._conversation.finish(self._conversation.clear)

    # -- what it adds --------------------------------------------------------------------------

    async def run(self, agent: Agent[Any], input: Any, **options: Any) -> RunResult:
        """Call Runner.run() with this session and its hooks. Your own `hooks` run after them."""
        self._conversation.agent = self._conversation.agent or agent.name
        hooks = self.hooks(options.pop("hooks", None))
        return await Runner.run(agent, input, session=self, hooks=hooks, **options)

    def hooks(self, also: Hooks | None = None) -> HoldfastHooks:
        """Return hooks for `Runner.run(…, hooks=…)` that record calls before tools begin.

        `also` are your own hooks. See pending().
        """
        return HoldfastHooks(self._conversation, also)

    async def pending(self) -> list[PendingCall]:
        """Return the calls that a model has asked for and whose results are not among the items.

        During a run, these are the calls in progress. After a crash, they are the calls that it
        interrupted. They stay until settle() or dismiss(), except that calls that never began are
        removed by the next answer of a model.
        """
        return await self._conversation.call(self._conversation.pending)

    async def settle(self, outputs: Mapping[str, Any] | None = None) -> list[PendingCall]:
        """Add the pending calls to the conversation, so that the model learns of them. Return them.

        The result of each call is its value in `outputs` (by the call's id), its recorded output,
        or a sentence that says what is known. Calls whose results are not text (computers, shells,
        patches) are only removed from pending().
        """
        return await self._conversation.finish(self._conversation.settle, dict(outputs or {}))

    async def dismiss(self) -> None:
        """Forget the pending calls. Their checkpoints stay in history()."""
        await self._conversation.finish(self._conversation.dismiss)

    async def fork(self, new_id: str, at: str | Checkpoint | None = None) -> HoldfastSession:
        """Return a new session that starts as this one is at a revision (default: now).

        Its store is closed with this session.
        """
        await self._conversation.move(lambda session: session.fork(new_id, at))
        return HoldfastSession(
            new_id,
            self.host.lent(),
            agent=self._conversation.agent,
            session_settings=self.session_settings,
        )

    async def rewind(self, revision: str | Checkpoint) -> Checkpoint:
        """Move the head back to a checkpoint of this session. undo() reverts that."""
        return await self._conversation.move(lambda session: session.rewind(revision))

    async def undo(self) -> Operation:
        """Undo the newest change of the session, as Session.undo() does."""
        return await self._conversation.move(lambda session: session.undo())

    async def redo(self) -> Operation:
        """Undo the last undo(), as Session.redo() does."""
        return await self._conversation.move(lambda session: session.redo())

    async def history(self) -> list[Checkpoint]:
        """Return the checkpoints from the head back, newest first."""
        return await self._conversation.call(self._conversation.history)

    async def save_state(self, state: RunState[Any, Any], **options: Any) -> Checkpoint:
        """Save a run that waits for approval: `await session.save_state(result.to_state())`.

        It replaces the one that was saved before. It is removed when a call that it waits for has a
        result, because resuming it again would call the tool twice. `options` are those of
        RunState.to_json().
        """
        waiting = [
            ToolCall(item.call_id or "", item.name or "", _parsed(item.arguments))
            for item in state.get_interruptions()
        ]
        saved = state.to_json(**options)
        return await self._conversation.finish(self._conversation.save_run, saved, waiting)

    async def load_state(self, agent: Agent[Any], **options: Any) -> RunState[Any, Any] | None:
        """Return the run that waits for approval, or None. `options` are those of from_json().

        Raises InDoubt if it was resumed before and a call that it waited for has begun.
        """
        found = await self._conversation.call(self._conversation.saved_run)
        return None if found is None else await RunState.from_json(agent, found, **options)


class HoldfastHooks(RunHooksBase[Any, Any]):
    """Hooks that record which calls a model asks for, when a tool begins, and what it returns.

    A tool does not begin if its start cannot be recorded. The hooks `also` are called afterwards.
    """

    def __init__(self, conversation: _Conversation, also: Hooks | None = None) -> None:
        self._conversation, self._also = conversation, also or RunHooksBase[Any, Any]()
        for name in ("on_llm_start", "on_agent_start", "on_agent_end", "on_handoff"):
            setattr(self, name, getattr(self._also, name))

    async def on_llm_end(
        self, context: RunContextWrapper[Any], agent: Agent[Any], response: ModelResponse
    ) -> None:
        calls = _calls_in(cast("list[Item]", response.to_input_items()), agent.name)
        model = agent.model if isinstance(agent.model, str) and agent.model else None
        usage = Usage.of(response.usage, model=model)
        await self._conversation.finish(self._conversation.ask, calls, usage)
        await self._also.on_llm_end(context, agent, response)

    async def on_tool_start(self, context: RunContextWrapper[Any], agent: Any, tool: Tool) -> None:
        if isinstance(context, ToolContext):
            id, call = context.tool_call_id, _call_of(context, agent.name)
            await self._conversation.finish(self._conversation.start, id, call)
        else:
            await self._conversation.finish(self._conversation.start_unnamed)
        await self._also.on_tool_start(context, agent, tool)

    async def on_tool_end(
        self, context: RunContextWrapper[Any], agent: Any, tool: Tool, result: Any
    ) -> None:
        if isinstance(context, ToolContext):
            output = result if isinstance(result, str) else _output(context, result)
            await self._conversation.finish(self._conversation.end, context.tool_call_id, output)
        await self._also.on_tool_end(context, agent, tool, result)


# -- the session in the store ----------------------------------------------------------------------


class _Extras(NamedTuple):
    """The parts of the state besides its items. A part that is empty is not in the state."""

    pending: dict[str, Entry]
    """The entries of a ToolLog. Each also has `agent`, and as `before` the items in front of it."""
    run_state: dict[str, Any] | None
    """A run that waits for approval: `state`, `awaiting` and `begun`, which are ids of calls."""


class _Conversation:
    """Reads and writes the session of a conversation, in one worker at a time.

    It remembers the extras at the head that the next write expects. After HeadMoved it reads them
    again.
    """

    def __init__(self, host: Host, name: str, agent: str | None) -> None:
        self.agent = agent
        self._store, self._name, self._lane = host.store, name, host.lane()
        self._opened: Session | None = None
        self._extras: _Extras | None = None
        self._usage = Usage()
        """Usage that no checkpoint counts yet."""

    async def call(self, method: Callable[..., T], *args: Any) -> T:
        """Run a method in a worker, after earlier calls."""
        return await self._lane.call(method, *args)

    async def finish(self, method: Callable[..., T], *args: Any) -> T:
        """Run a method in a worker, after earlier calls. It completes even if this is cancelled."""
        return await finished(self._lane.call(method, *args))

    async def move(self, how: Callable[[Session], T]) -> T:
        """Move the head of the session, or fork it, if it is a conversation."""
        return await self.finish(self._move, how)

    def items(self) -> list[Item]:
        return self._read()[0]

    def history(self) -> list[Checkpoint]:
        return [*self._session().history()]

    def add(self, items: list[Item]) -> None:
        trigger = "user" if any(item.get("role") == "user" for item in items) else "assistant"
        if any(_is_output(item) for item in items):
            trigger = "tool_call"
        self._write(lambda extras: _without_answered(extras, items), trigger, items)

    @retried_on(HeadMoved)
    def pop(self) -> Item | None:
        items, _ = self._read()
        if not items:
            return None
        self._extras = None
        self._session().patch(set={"items": items[:-1]}, trigger="pop")
        return items[-1]

    @retried_on(HeadMoved)
    def clear(self) -> None:
        items, extras = self._read()
        left = [key for key, value in extras._asdict().items() if value]
        if items or left:
            self._extras = None
            self._session().patch(set={"items": []}, drop=left, trigger="clear")

    def _move(self, how: Callable[[Session], T]) -> T:
        self._read()
        self._extras = None
        return how(self._session())

    # -- calls ---------------------------------------------------------------------------------

    def ask(self, calls: dict[str, Entry], usage: Usage) -> None:
        """Record a model's answer: the calls that it asks for, and the tokens that it took."""
        self._usage += usage
        if calls:
            self._record(lambda log: log.ask(calls), "assistant")

    def start(self, id: str, call: Entry) -> None:
        """Record that a call begins. `call` is used if the log does not know it."""
        self._record(lambda log: log.start(id, call), "tool_start")

    def start_unnamed(self) -> None:
        """Record that calls begin that the SDK does not name: all whose results are not text."""

        def start(log: ToolLog) -> None:
            for id, entry in log.entries.items():
                if entry["call"].get("type") not in _TEXTUAL:
                    log.start(id)

        self._record(start, "tool_start")

    def end(self, id: str, output: Any) -> None:
        """Record the result of a call. A call that is no longer pending is ignored."""
        self._record(lambda log: log.end(id, output) if id in log.entries else None, "tool_end")

    def pending(self) -> list[PendingCall]:
        return _pending_calls(self._read()[1].pending)

    @retried_on(HeadMoved)
    def settle(self, outputs: dict[str, Any]) -> list[PendingCall]:
        items, extras = self._read()
        if unknown := outputs.keys() - extras.pending.keys():
            raise InvalidRequest(
                f"no call {min(unknown)!r} is pending", hint="pending() lists those that are"
            )
        if extras.pending:
            added = _as_items(items, extras.pending, outputs)
            settled = _without_answered(extras, added)._replace(pending={})
            self._commit(settled, added, {"trigger": "settle"})
        return _pending_calls(extras.pending)

    def dismiss(self) -> None:
        self._write(lambda extras: extras._replace(pending={}), "dismiss")

    # -- runs that wait for approval -----------------------------------------------------------

    @retried_on(HeadMoved)
    def save_run(self, state: dict[str, Any], waiting: list[ToolCall]) -> Checkpoint:
        items, extras = self._read()
        log = ToolLog(extras.pending)
        answered = {item["call_id"] for item in items if _is_output(item)}
        called = {item["call_id"] for item in items if _is_call(item)}
        run = {
            "awaiting": sorted((called - answered) | {call.id for call in waiting}),
            "begun": [id for id in log.entries if log.has_begun(id)],
            "state": state,
        }
        fields: dict[str, Any] = {"trigger": "approval", "status": "halted", "pending": waiting}
        return self._commit(extras._replace(run_state=run), [], fields)

    def saved_run(self) -> dict[str, Any] | None:
        """Return the run that waits. Raises InDoubt if a call that it waits for has begun since."""
        _, extras = self._read()
        run, log = extras.run_state, ToolLog(extras.pending)
        if run is None:
            return None
        for id in log.entries:
            if log.has_begun(id) and id in run["awaiting"] and id not in run["begun"]:
                error = InDoubt(
                    f"the run that waits was resumed before, and ended during call {id!r}",
                    key=id, idempotency_key=id,
                )  # fmt: skip
                error.hint = "settle({id: output}) if it had its effect, otherwise dismiss()"
                raise error
        return cast("dict[str, Any]", run["state"])

    # -- reading and writing -------------------------------------------------------------------

    def _session(self) -> Session:
        if self._opened is None:
            self._opened = self._store.session(self._name, agent=self.agent)
        if self._opened.agent is None:
            self._opened.agent = self.agent
        return self._opened

    def _read(self) -> tuple[list[Item], _Extras]:
        """Return the items and the extras at the head. The next write expects this head."""
        session = self._session()
        head, state = read_head(session)
        parts = {} if head is None else state
        known = {"items", *_Extras._fields}
        items = parts.get("items", []) if type(parts) is dict and parts.keys() <= known else None
        if type(items) is not list:
            raise foreign_session(session, "conversation of the OpenAI Agents SDK", "session_id")
        self._extras = _Extras(parts.get("pending", {}), parts.get("run_state"))
        return items, self._extras

    def _known(self) -> _Extras:
        return self._read()[1] if self._extras is None else self._extras

    def _record(self, record: Callable[[ToolLog], object], trigger: str) -> None:
        """Change the log of pending calls, in one checkpoint."""

        def change(extras: _Extras) -> _Extras:
            log = ToolLog(extras.pending)
            record(log)
            return extras._replace(pending=log.entries)

        self._write(change, trigger)

    @retried_on(HeadMoved)
    def _write(
        self,
        change: Callable[[_Extras], _Extras],
        trigger: str,
        items: Sequence[Item] = (),
    ) -> None:
        """Change the extras and add items, in one checkpoint, if that changes anything."""
        extras = self._known()
        changed = change(extras)
        if changed != extras or items:
            self._commit(changed, items, {"trigger": trigger})

    def _commit(self, extras: _Extras, items: Sequence[Item], fields: dict[str, Any]) -> Checkpoint:
        before = self._known()._asdict()
        self._extras = None  # unknown until the write has succeeded
        changed = {key: part for key, part in extras._asdict().items() if part != before[key]}
        open_ = [call for call in _pending_calls(extras.pending) if call.stage != "done"]
        if open_:
            fields = {"pending": [ToolCall(c.id, c.name, c.arguments) for c in open_], **fields}
        if self._usage.tokens:
            fields["usage"] = self._usage
        if changed or not items:
            saved = self._session().patch(
                append={"items": items} if items else {},
                set={key: part for key, part in changed.items() if part},
                drop=[key for key, part in changed.items() if not part],
                **fields,
            )
        else:
            saved = self._session().append("items", *items, **fields)
        self._extras, self._usage = extras, Usage()
        return saved


# -- items -----------------------------------------------------------------------------------------


def _is_call(item: Item) -> bool:
    return item.get("type") in _OUTPUTS and isinstance(item.get("call_id"), str)


def _is_output(item: Item) -> bool:
    return item.get("type") in _OUTPUTS.values() and isinstance(item.get("call_id"), str)


def newest(items: list[Item], limit: int | None) -> list[Item]:
    """Return the last `limit` items, and earlier ones that a model needs to accept them."""
    if limit is None or limit < 0:  # the SDK's own sessions do the same
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


def _calls_in(items: list[Item], agent: str) -> dict[str, Entry]:
    """Return the calls of a model's answer by their ids.

    `before` of a call are the items in front of it, such as reasoning: they must stay together.
    """
    calls: dict[str, Entry] = {}
    before: list[Item] = []
    for item in items:
        if _is_call(item):
            calls[item["call_id"]] = {"agent": agent, "call": item, "before": before}
            before = []
        else:
            before = [*before, item]
    return calls


def _without_answered(extras: _Extras, items: list[Item]) -> _Extras:
    """Return the extras without the calls whose results are among the items.

    A run that waits for one of them, or for nothing that is known, is removed as well.
    """
    answered = {item["call_id"] for item in items if _is_output(item)}
    log, run = ToolLog(extras.pending), extras.run_state
    log.forget(answered)
    if run and (not run["awaiting"] or answered.intersection(run["awaiting"])):
        run = None
    return _Extras(log.entries, run)


def _as_items(items: list[Item], pending: dict[str, Entry], outputs: dict[str, Any]) -> list[Item]:
    """Return pending calls as items: first the calls that `items` lacks, then all results."""
    called = {item["call_id"] for item in items if _is_call(item)}
    calls: list[Item] = []
    results: list[Item] = []
    for id, entry in pending.items():
        call, kind = entry["call"], entry["call"]["type"]
        if kind not in _TEXTUAL:
            continue
        if id not in called:
            calls += [*entry["before"], call]
        known = {"asked": _NOT_BEGUN, "started": _UNKNOWN, "done": entry.get("output")}
        output = outputs.get(id, known[entry["stage"]])
        results.append({"type": _OUTPUTS[kind], "call_id": id, "output": output})
    return calls + results


def _pending_calls(pending: dict[str, Entry]) -> list[PendingCall]:
    return [
        PendingCall(
            id, *_name_and_arguments(entry["call"]),
            entry["stage"], entry.get("output"), entry["agent"],
        )
        for id, entry in pending.items()
    ]  # fmt: skip


def _name_and_arguments(call: Item) -> tuple[str, Any]:
    details = call.get("arguments", call.get("input", call.get("action", call.get("operation"))))
    return call.get("name") or call["type"].removesuffix("_call"), _parsed(details)


def _parsed(arguments: Any) -> Any:
    """Return arguments as data if they are JSON. A model may have written other text."""
    if isinstance(arguments, str):
        with suppress(ValueError):
            return json.loads(arguments)
    return arguments


def _call_of(context: ToolContext[Any], agent: str) -> Entry:
    """Return the log entry for a call that begins and that the log does not know."""
    call = {
        "type": "function_call",
        "call_id": context.tool_call_id,
        "name": context.tool_name,
        "arguments": context.tool_arguments,
    }
    return {"agent": agent, "call": call, "before": []}


def _output(context: ToolContext[Any], result: Any) -> Any:
    """Return a result in the form in which a model gets it."""
    if context.tool_call is None:
        return str(result)
    return ItemHelpers.tool_call_output_item(context.tool_call, result)["output"]
