"""pydantic-ai on holdfast: conversations, and runs that survive a crash in a tool.

`HoldfastConversationStore("agents.db")` keeps conversations; `HoldfastCheckpoints` of it, among an
agent's capabilities, keeps each message and each tool's result of a run as they come.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pydantic_ai import RunContext, ToolReturn
from pydantic_ai.capabilities import AbstractCapability, CapabilityOrdering
from pydantic_ai.conversation_store import ConversationConflict
from pydantic_ai.exceptions import ToolFailedError, ToolRetryError
from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelResponse,
    ToolReturnPart,
    UserPromptPart,
)

from holdfast.adapters.pydantic_ai_conversations import (
    HoldfastConversationStore,
    Noted,
    as_call,
    dump,
    revive,
    spent,
)
from holdfast.errors import HeadMoved, HoldfastError, InvalidRequest

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from pydantic_ai._agent_graph import AgentNode
    from pydantic_ai.capabilities import (
        NodeResult,
        ValidatedToolArgs,
        WrapRunHandler,
        WrapToolExecuteHandler,
    )
    from pydantic_ai.messages import ToolCallPart
    from pydantic_ai.models import ModelRequestContext
    from pydantic_ai.run import AgentRunResult
    from pydantic_ai.tools import ToolDefinition
    from pydantic_ai.usage import RunUsage

    from holdfast.fields import Fields
    from holdfast.store import Store

    Scope = str | Callable[[RunContext[Any]], str | None] | None

__all__ = ["HoldfastCheckpoints", "HoldfastConversationStore"]


class HoldfastCheckpoints(AbstractCapability[Any]):
    """Keeps a run as it goes on, in the session of its conversation, and saves it at its end.

    A request is durable before it is sent, a response before its tools run, and a tool's result
    before it is used. A run that continues a conversation as it was loaded after a crash takes the
    recorded results of the calls it ends in, and runs only the other tools. If another run has
    written to the conversation, ConversationConflict is raised before anything else is done.
    """

    def __init__(
        self,
        conversations: HoldfastConversationStore | Store | str | os.PathLike[str],
        *,
        scope: Scope = None,
    ) -> None:
        self._given = isinstance(conversations, HoldfastConversationStore)
        self.conversations = (
            conversations
            if isinstance(conversations, HoldfastConversationStore)
            else HoldfastConversationStore(conversations)
        )
        self._scope = scope
        self._journal: _Journal | None = None

    def close(self) -> None:
        """Close the store if it was opened here. Where no loop is running."""
        if not self._given:
            self.conversations.close()

    async def aclose(self) -> None:
        """Close the store if it was opened here, when calls made before are finished."""
        if not self._given:
            await self.conversations.aclose()

    def get_ordering(self) -> CapabilityOrdering:
        return CapabilityOrdering(position="outermost")  # what is recorded is what the model gets

    async def for_run(self, ctx: RunContext[Any]) -> HoldfastCheckpoints:
        own = copy.copy(self)
        own._journal = _Journal(
            self.conversations,
            ctx.conversation_id or "",
            ctx.run_id or "",
            ctx.agent.name if ctx.agent is not None else None,
            self._scope(ctx) if callable(self._scope) else self._scope,
        )
        return own

    async def before_run(self, ctx: RunContext[Any]) -> None:
        await self._call(self._run.open, list(ctx.messages), copy.copy(ctx.usage))

    async def before_model_request(
        self, ctx: RunContext[Any], request_context: ModelRequestContext
    ) -> ModelRequestContext:
        await self._keep(ctx, "model_request")
        return request_context

    async def after_node_run(
        self,
        ctx: RunContext[Any],
        *,
        node: AgentNode[Any],  # noqa: ARG002
        result: NodeResult[Any],
    ) -> NodeResult[Any]:
        if ctx.messages and isinstance(ctx.messages[-1], ModelResponse):
            await self._keep(ctx, "model_response")
        return result

    async def wrap_tool_execute(
        self,
        ctx: RunContext[Any],
        *,
        call: ToolCallPart,
        tool_def: ToolDefinition,  # noqa: ARG002
        args: ValidatedToolArgs,
        handler: WrapToolExecuteHandler,
    ) -> Any:
        if not any(call.tool_call_id == each.tool_call_id for each in _asked(ctx.messages)):
            return await handler(args)  # a tool of its own calls it
        known = self._run.known.pop(call.tool_call_id, None)
        if known is not None:
            return _replay(known)
        await self._keep(ctx, "model_response")
        try:
            result = await handler(args)
        except (ToolRetryError, ToolFailedError) as e:
            await self._call(self._run.record, call, _failure(e))
            raise
        await self._call(self._run.record, call, _success(call, result))
        return result

    async def wrap_run(
        self,
        ctx: RunContext[Any],  # noqa: ARG002
        *,
        handler: WrapRunHandler,
    ) -> AgentRunResult[Any]:
        try:
            return await handler()
        except (ConversationConflict, HoldfastError):
            raise  # nothing can be added to it
        except Exception as e:
            await self._call(self._run.fail, f"{type(e).__name__}: {e}")
            raise

    async def after_run(
        self,
        ctx: RunContext[Any],  # noqa: ARG002
        *,
        result: AgentRunResult[Any],
    ) -> AgentRunResult[Any]:
        await self.conversations.save(result, scope=self._run.scope)
        return result

    @property
    def _run(self) -> _Journal:
        if self._journal is None:
            raise InvalidRequest(
                "there is no run", hint="pass it to an agent: capabilities=[HoldfastCheckpoints(…)]"
            )
        return self._journal

    async def _keep(self, ctx: RunContext[Any], trigger: str) -> None:
        run = self._run
        if not run.has(ctx.messages):
            await self._call(run.keep, list(ctx.messages), copy.copy(ctx.usage), trigger)

    async def _call(self, function: Callable[..., None], *args: Any) -> None:
        await self.conversations.host.call(function, *args)


class _Journal:
    """What a run has added to a conversation since the last save, in the session's state."""

    def __init__(
        self,
        conversations: HoldfastConversationStore,
        conversation_id: str,
        run_id: str,
        agent: str | None,
        scope: str | None,
    ) -> None:
        self._conversations, self._id, self._run_id = conversations, conversation_id, run_id
        self._agent, self.scope = agent, scope
        self.known: dict[str, Any] = {}
        """Results of calls that were there when the run began; each is used once."""
        self._results: dict[str, Any] = {}
        """All that are stored, of the calls that the last response asks for."""
        self._lock = threading.Lock()
        self._seen: list[ModelMessage] = []
        self._stored = 0
        """How many of these are saved with the conversation."""
        self._whole = self._begun = False

    def open(self, given: list[ModelMessage], usage: RunUsage) -> None:
        """Find out what of the history that a run was given is stored already.

        Raises ConversationConflict if it does not continue what is there, an unfinished run
        included.
        """
        self._session = self._conversations.session(self._id, self._agent)
        self._noted = self._conversations.look(self._session)
        record, run = self._noted.record, self._noted.run
        if record is None and run is None:
            return
        state = self._session.load()
        same = revive(dump(given))  # as they come from a store, which some types do not survive
        last = [i["message"] for i in state["messages"] if record and i["id"] == record.head_id]
        if last and not (run and run["whole"]):
            if not given:
                raise InvalidRequest(
                    f"conversation {self._id!r} has a history, which this run was not given",
                    hint="agent.run(…, conversation=await conversations.load(…))",
                )
            (newest,) = revive(last)
            at = [i for i, message in enumerate(same) if message == newest]
            if not at:
                raise ConversationConflict(self._id)  # it was loaded before, or is another one
            self._stored = at[-1] + 1
        self._seen = given[: self._stored]
        if run is not None:
            unsaved = revive(state["run"]["messages"])
            self._seen = given[: self._stored + len(unsaved)]
            if same[self._stored : len(self._seen)] != unsaved:
                raise ConversationConflict(self._id)
            self._whole, self._begun = run["whole"], True
            if len(given) == len(self._seen):
                self._results = state["run"]["results"]
                self.known = dict(self._results)
            self._write("resume", usage)

    def has(self, messages: Sequence[ModelMessage]) -> bool:
        return len(messages) == len(self._seen) == self._common(messages)

    def _common(self, messages: Sequence[ModelMessage]) -> int:
        """How many at the beginning are those that were kept."""
        for i, (new, old) in enumerate(zip(messages, self._seen, strict=False)):
            if new is not old and new != old:
                return i
        return min(len(messages), len(self._seen))

    def keep(self, messages: list[ModelMessage], usage: RunUsage, trigger: str) -> None:
        with self._lock:
            if self.has(messages):
                return  # two tools of one response have both asked for it
            common = self._common(messages)
            if common < self._stored:  # rewritten, by a capability that compacts it for instance
                self._stored, self._whole = 0, True
            seen, self._seen = self._seen, messages
            self._results, self.known = {}, {}
            if self._begun and common == len(seen):
                self._write(
                    trigger, usage, append={("run", "messages"): dump(messages[common:])},
                    set={("run", "results"): {}},
                )  # fmt: skip
            else:
                run = {"messages": dump(messages[self._stored :]), "results": {}}
                self._write(trigger, usage, set={"run": run})
            self._begun = True

    def record(self, call: ToolCallPart, result: dict[str, Any]) -> None:
        """Keep what came of a tool."""
        id = call.tool_call_id
        with self._lock:
            self._results[id] = result
            if self._begun:
                change: Any = {("run", "results", id): result}
            else:  # of a call that was deferred: nothing is new yet but its result
                change = {"run": {"messages": [], "results": self._results}}
            self._write("tool_call", self._noted.usage, set=change)
            self._begun = True

    def fail(self, reason: str) -> None:
        with self._lock:
            if self._begun:
                self._write("run", self._noted.usage, status="failed", reason=reason)

    def _write(self, trigger: str, usage: RunUsage, **changes: Any) -> None:
        run = {"id": self._run_id, "scope": self.scope, "whole": self._whole}
        noted = Noted(self._noted.record, run, usage)
        fields: Fields = {
            "trigger": trigger,
            "usage": spent(self._noted.usage, usage),
            "pending": [
                as_call(c) for c in _asked(self._seen[-1:]) if c.tool_call_id not in self._results
            ],
            "meta": noted.meta(),
        }
        if self._noted == Noted():  # there is no state yet
            changes["append"] = {"messages": []}
        try:
            self._session.patch(**changes, **fields)
        except HeadMoved as e:
            raise ConversationConflict(self._id) from e
        self._noted = noted


def _asked(messages: Sequence[ModelMessage]) -> list[ToolCallPart]:
    """The calls of the last response."""
    for message in reversed(messages):
        if isinstance(message, ModelResponse):
            return message.tool_calls
    return []


def _success(call: ToolCallPart, result: Any) -> dict[str, Any]:
    """A tool's result, in the form in which messages carry it."""
    returned = result if isinstance(result, ToolReturn) else ToolReturn(return_value=result)
    parts: list[Any] = [
        ToolReturnPart(
            tool_name=call.tool_name,
            content=returned.return_value,
            tool_call_id=call.tool_call_id,
            metadata=returned.metadata,
        )
    ]
    if returned.content is not None:
        parts.append(UserPromptPart(content=returned.content))
    return {
        "outcome": "returned",
        "message": dump([ModelRequest(parts=parts)])[0],
        "tools": returned.tools,
    }


def _failure(error: ToolRetryError | ToolFailedError) -> dict[str, Any]:
    retry = isinstance(error, ToolRetryError)
    part: Any = error.tool_retry if isinstance(error, ToolRetryError) else error.tool_failed
    message = dump([ModelRequest(parts=[part])])[0]
    return {"outcome": "retried" if retry else "failed", "message": message, "tools": None}


def _replay(recorded: dict[str, Any]) -> ToolReturn[Any]:
    """What the tool returned, or raised."""
    (message,) = revive([recorded["message"]])
    parts: list[Any] = list(message.parts)
    if recorded["outcome"] == "retried":
        raise ToolRetryError(parts[0])
    if recorded["outcome"] == "failed":
        raise ToolFailedError(parts[0])
    return ToolReturn(
        return_value=parts[0].content,
        content=parts[1].content if len(parts) > 1 else None,
        metadata=parts[0].metadata,
        tools=recorded["tools"],
    )
