"""Sessions of the OpenAI Agents SDK: `HoldfastSession("trip", "agents.db")`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast

from agents import ItemHelpers, Runner, RunState, SessionSettings
from agents.lifecycle import RunHooksBase
from agents.tool_context import ToolContext

from holdfast.adapters.hosting import Host, Hosted, finished
from holdfast.adapters.openai_book import Book, PendingCall, calls_in, decoded, newest
from holdfast.errors import InvalidRequest
from holdfast.model import ToolCall

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    from agents import (
        Agent,
        AgentHookContext,
        ModelResponse,
        RunContextWrapper,
        RunResult,
        Tool,
        TResponseInputItem,
    )

    from holdfast.checkpoint import Checkpoint
    from holdfast.model import Operation
    from holdfast.session import Revision
    from holdfast.store import Store

    Item = dict[str, Any]
    Notes = dict[str, Any]
    Hooks = RunHooksBase[Any, Any]

T = TypeVar("T")


class HoldfastSession(Hosted):
    """A conversation in a store: one that was given, or a URL, which is opened and closed.

    What a method has written is durable when it returns; one that is cancelled comes to its end
    first. The calls of one object are carried out in the order in which they were made. Processes
    may add to one session at once: what each adds stays together.
    """

    session_id: str
    session_settings: SessionSettings | None

    def __init__(
        self,
        session_id: str,
        store: Store | str | os.PathLike[str],
        *,
        agent: str | None = None,
        session_settings: SessionSettings | None = None,
    ) -> None:
        if not isinstance(session_id, str) or not session_id:
            raise InvalidRequest(f"session_id must be a non-empty string, not {session_id!r}")
        self._set_up(session_id, Host(store), agent, session_settings or SessionSettings())
        self._borrowed = False

    def _set_up(
        self, id: str, host: Host, agent: str | None, settings: SessionSettings | None
    ) -> None:
        self.session_id, self.session_settings = id, settings
        self.host, self._lane = host, host.lane()
        self._book = Book(host.store, id, agent)

    def close(self) -> None:
        """Where no loop is running. Idempotent; for a fork, nothing."""
        if not self._borrowed:
            self.host.close()

    async def aclose(self) -> None:
        """Idempotent. What was called before is finished."""
        if not self._borrowed:
            await self.host.aclose()

    # -- the protocol --------------------------------------------------------------------------

    async def get_items(self, limit: int | None = None) -> list[TResponseInputItem]:
        """The newest `limit` items, or all.

        More, if a call's result would be among them without the call, or an item without the
        reasoning that led to it: a model refuses such a conversation.
        """
        if limit is None and self.session_settings is not None:
            limit = self.session_settings.limit
        items = await self._lane.call(self._book.items)
        return cast("list[TResponseInputItem]", newest(items, limit))

    async def add_items(self, items: list[TResponseInputItem]) -> None:
        """One checkpoint. Calls whose results are among the items are pending no more."""
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            raise InvalidRequest("items must be a list of dicts")
        if items:
            await self._finish(self._book.add, cast("list[Item]", items))

    async def pop_item(self) -> TResponseInputItem | None:
        return cast("TResponseInputItem | None", await self._finish(self._book.pop))

    async def clear_session(self) -> None:
        """An empty conversation from here on; undo() brings the old one back."""
        await self._finish(self._book.clear)

    # -- what it adds --------------------------------------------------------------------------

    async def run(self, agent: Agent[Any], input: Any, **options: Any) -> RunResult:
        """Runner.run() with this session, and with its hooks in front of those given."""
        self._book.agent = self._book.agent or agent.name
        hooks = self.hooks(options.pop("hooks", None))
        return await Runner.run(agent, input, session=self, hooks=hooks, **options)

    def hooks(self, also: Hooks | None = None) -> HoldfastHooks:
        """For `Runner.run(…, hooks=…)`: calls are durable before tools begin. See pending()."""
        return HoldfastHooks(self, also)

    async def pending(self) -> list[PendingCall]:
        """Calls that a model has asked for, and that never got into the conversation.

        While a run is at work, those that it is about; after a crash, those that were cut off. They
        stay, whatever runs next, until they are settled; what was only asked for goes with the next
        answer of a model.
        """
        return await self._lane.call(self._book.pending)

    async def settle(self, outputs: Mapping[str, Any] | None = None) -> list[PendingCall]:
        """Put pending calls into the conversation, so that the model learns of them.

        Each with its output: of `outputs` by its id, what it returned, or a sentence that says what
        is known. Calls that take no text (of computers, shells, patches) are only left out.
        """
        return await self._finish(self._book.settle, dict(outputs or {}))

    async def dismiss(self) -> None:
        """Forget pending calls. They stay in history()."""
        await self._finish(self._book.dismiss)

    async def fork(self, new_id: str, at: Revision | None = None) -> HoldfastSession:
        """A new session that begins as this one is at `at` (now). It lives as long as this one."""
        await self._finish(self._book.fork, new_id, at)
        other = HoldfastSession.__new__(HoldfastSession)
        other._set_up(new_id, self.host, self._book.agent, self.session_settings)
        other._borrowed = True
        return other

    async def rewind(self, revision: Revision) -> Checkpoint:
        """Go back to a checkpoint of this session. What came after stays; undo() takes it back."""
        return await self._finish(self._book.move, lambda session: session.rewind(revision))

    async def undo(self) -> Operation:
        return await self._finish(self._book.move, lambda session: session.undo())

    async def redo(self) -> Operation:
        return await self._finish(self._book.move, lambda session: session.redo())

    async def history(self) -> list[Checkpoint]:
        """The newest first."""
        return await self._lane.call(lambda: [*self._book.session().history()])

    async def save_state(self, state: RunState[Any, Any], **options: Any) -> Checkpoint:
        """Keep a run that waits for approval: `await session.save_state(result.to_state())`.

        It replaces the one before, and is gone with the first result of a call that it waits for:
        resumed again, the run would call its tools twice. `options` are those of to_json().
        """
        waiting = [
            ToolCall(item.call_id or "", item.name or "", decoded(item.arguments))
            for item in state.get_interruptions()
        ]
        return await self._finish(self._book.save_state, state.to_json(**options), waiting)

    async def load_state(self, agent: Agent[Any], **options: Any) -> RunState[Any, Any] | None:
        """The run that waits, if there is one. `options` are those of RunState.from_json().

        Raises InDoubt if it was resumed before, and a call that it waited for was begun.
        """
        found = await self._lane.call(self._book.run_state)
        return None if found is None else await RunState.from_json(agent, found, **options)

    async def _finish(self, function: Callable[..., T], *args: Any) -> T:
        """Call it in a worker, in turn, and wait for its end also when cancelled."""
        return await finished(self._lane.call(function, *args))


class HoldfastHooks(RunHooksBase[Any, Any]):
    """Writes down what a model asked for, when a tool begins, and what it returned.

    A tool does not begin if that cannot be written. `also` is told of everything afterwards.
    """

    def __init__(self, session: HoldfastSession, also: Hooks | None = None) -> None:
        self._session, self._also = session, also or RunHooksBase[Any, Any]()

    async def on_llm_end(
        self, context: RunContextWrapper[Any], agent: Agent[Any], response: ModelResponse
    ) -> None:
        session = self._session
        asked = calls_in(cast("list[Item]", response.to_input_items()), agent.name)
        await session._finish(session._book.ask, asked, response.usage.total_tokens)
        await self._also.on_llm_end(context, agent, response)

    async def on_tool_start(self, context: RunContextWrapper[Any], agent: Any, tool: Tool) -> None:
        call = None
        if isinstance(context, ToolContext):
            call = _call_of(context, agent.name)
        await self._session._finish(self._session._book.start, call)
        await self._also.on_tool_start(context, agent, tool)

    async def on_tool_end(
        self, context: RunContextWrapper[Any], agent: Any, tool: Tool, result: Any
    ) -> None:
        if isinstance(context, ToolContext):
            output = result if isinstance(result, str) else _output(context, result)
            await self._session._finish(self._session._book.end, context.tool_call_id, output)
        await self._also.on_tool_end(context, agent, tool, result)

    async def on_llm_start(
        self,
        context: RunContextWrapper[Any],
        agent: Agent[Any],
        system_prompt: str | None,
        input_items: list[TResponseInputItem],
    ) -> None:
        await self._also.on_llm_start(context, agent, system_prompt, input_items)

    async def on_agent_start(self, context: AgentHookContext[Any], agent: Any) -> None:
        await self._also.on_agent_start(context, agent)

    async def on_agent_end(self, context: AgentHookContext[Any], agent: Any, output: Any) -> None:
        await self._also.on_agent_end(context, agent, output)

    async def on_handoff(
        self, context: RunContextWrapper[Any], from_agent: Any, to_agent: Any
    ) -> None:
        # The SDK names these arguments, and so do other people's hooks.
        await self._also.on_handoff(context=context, from_agent=from_agent, to_agent=to_agent)


def _call_of(context: ToolContext[Any], agent: str) -> tuple[str, Notes]:
    """A call that is about to begin, should nobody have noted it yet."""
    call = {
        "type": "function_call",
        "call_id": context.tool_call_id,
        "name": context.tool_name,
        "arguments": context.tool_arguments,
    }
    entry = {"stage": "asked", "agent": agent, "call": call, "before": []}
    return context.tool_call_id, entry


def _output(context: ToolContext[Any], result: Any) -> Any:
    """A result in the form in which a model gets it."""
    if context.tool_call is None:
        return str(result)
    return ItemHelpers.tool_call_output_item(context.tool_call, result)["output"]
