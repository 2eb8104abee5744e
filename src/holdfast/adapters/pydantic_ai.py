"""A store for conversations of pydantic-ai, and a capability that saves a run in progress.

`HoldfastConversationStore("agents.db")` keeps conversations. An agent with the capability
`HoldfastCheckpoints` stores each message and each result of a tool before the run continues.
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

from holdfast.adapters.base import Hosted
from holdfast.adapters.pydantic_ai_conversations import (
    ConversationMeta,
    HoldfastConversationStore,
    dump_messages,
    load_messages,
    to_tool_call,
    usage_since,
)
from holdfast.adapters.tool_log import ToolLog
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

    from holdfast import Store

    Scope = str | Callable[[RunContext[Any]], str | None] | None

__all__ = ["HoldfastCheckpoints", "HoldfastConversationStore"]


class HoldfastCheckpoints(Hosted, AbstractCapability[Any]):
    """Saves a run in the session of its conversation: while it is in progress, and at its end.

    A request is durable before it is sent, a response before its tools run, and the result of a
    tool before it is used. A run that continues a loaded conversation whose last response asks for
    tools uses the recorded results, and runs only the tools without one. If another run has written
    to the conversation, ConversationConflict is raised before the run does anything.
    """

    def __init__(
        self,
        conversations: HoldfastConversationStore | Store | str | os.PathLike[str],
        *,
        scope: Scope = None,
    ) -> None:
        if isinstance(conversations, HoldfastConversationStore):
            self.conversations, self.host = conversations, conversations.host.lent()
        else:
            self.conversations = HoldfastConversationStore(conversations)
            self.host = self.conversations.host
        self._scope = scope
        self._run: _UnsavedRun | None = None

    def get_ordering(self) -> CapabilityOrdering:
        return CapabilityOrdering(position="outermost")  # records the results that the model gets

    async def for_run(self, ctx: RunContext[Any]) -> HoldfastCheckpoints:
        bound = copy.copy(self)
        scope = self._scope(ctx) if callable(self._scope) else self._scope
        bound._run = _UnsavedRun(self.conversations, ctx, scope)  # noqa: SLF001
        return bound

    async def before_run(self, ctx: RunContext[Any]) -> None:
        run = self._current()
        await self._call(run.open, list(ctx.messages), copy.copy(ctx.usage))

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
        run = self._current()
        if not any(call.tool_call_id == each.tool_call_id for each in _requested(ctx.messages)):
            return await handler(args)  # another tool makes this call, not the model
        known = run.log.replay(call.tool_call_id)
        if known is not None:
            return _replay(known["output"])
        await self._keep(ctx, "model_response")
        try:
            result = await handler(args)
        except (ToolRetryError, ToolFailedError) as e:
            await self._call(run.record, call, _failure(e))
            raise
        await self._call(run.record, call, _success(call, result))
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
            raise  # the session cannot be written
        except Exception as e:
            await self._call(self._current().fail, f"{type(e).__name__}: {e}")
            raise

    async def after_run(
        self,
        ctx: RunContext[Any],  # noqa: ARG002
        *,
        result: AgentRunResult[Any],
    ) -> AgentRunResult[Any]:
        await self.conversations.save(result, scope=self._current().scope)
        return result

    def _current(self) -> _UnsavedRun:
        if self._run is None:
            raise InvalidRequest(
                "there is no run", hint="pass it to an agent: capabilities=[HoldfastCheckpoints(…)]"
            )
        return self._run

    async def _keep(self, ctx: RunContext[Any], trigger: str) -> None:
        run = self._current()
        if not run.has(ctx.messages):
            await self._call(run.keep, list(ctx.messages), copy.copy(ctx.usage), trigger)

    async def _call(self, function: Callable[..., None], *args: Any) -> None:
        await self.conversations.host.call(function, *args)


class _UnsavedRun:
    """The part of a run that is not saved with its conversation yet.

    It is in the "run" of the session's state: `{"messages": […], "results": {…}}`. The results are
    the entries of a ToolLog with the calls of the last response that have returned.
    """

    def __init__(
        self, conversations: HoldfastConversationStore, ctx: RunContext[Any], scope: str | None
    ) -> None:
        self._conversations, self.scope = conversations, scope
        self._id, self._run_id = ctx.conversation_id or "", ctx.run_id or ""
        self._agent = ctx.agent.name if ctx.agent is not None else None
        self.log = ToolLog()
        self._lock = threading.Lock()
        self._stored: list[ModelMessage] = []
        """The history as it is in the state: of the saved conversation and then of the run."""
        self._saved = 0
        """How many of them are of the saved conversation."""
        self._whole = False
        """Whether the run's messages are the whole history, instead of the saved one."""
        self._begun = False
        """Whether the state has a "run"."""

    def open(self, given: list[ModelMessage], usage: RunUsage) -> None:
        """Compare the history that the run starts with to the stored one.

        Raises ConversationConflict if it does not continue the stored history, including an
        unfinished run.
        """
        self._session = self._conversations.session(self._id, self._agent)
        self._meta = self._conversations.read_meta(self._session)
        record, run = self._meta.record, self._meta.run
        if record is None and run is None:
            return
        state = self._session.load()
        same = load_messages(dump_messages(given))  # some types change when they are stored
        last = [i["message"] for i in state["messages"] if record and i["id"] == record.head_id]
        if last and not (run and run["whole"]):
            if not given:
                raise InvalidRequest(
                    f"conversation {self._id!r} has a history, which this run was not given",
                    hint="agent.run(…, conversation=await conversations.load(…))",
                )
            (newest,) = load_messages(last)
            at = [i for i, message in enumerate(same) if message == newest]
            if not at:
                raise ConversationConflict(self._id)  # of an older revision or another conversation
            self._saved = at[-1] + 1
        self._stored = given[: self._saved]
        if run is not None:
            unsaved = load_messages(state["run"]["messages"])
            self._stored = given[: self._saved + len(unsaved)]
            if same[self._saved : len(self._stored)] != unsaved:
                raise ConversationConflict(self._id)
            self._whole, self._begun = run["whole"], True
            if len(given) == len(self._stored):
                self.log = ToolLog(state["run"]["results"])
            self._write("resume", usage)

    def has(self, messages: Sequence[ModelMessage]) -> bool:
        """Return whether exactly these messages are stored."""
        return len(messages) == len(self._stored) == self._common(messages)

    def _common(self, messages: Sequence[ModelMessage]) -> int:
        """Return how many messages at the beginning are the stored ones."""
        for i, (new, old) in enumerate(zip(messages, self._stored, strict=False)):
            if new is not old and new != old:
                return i
        return min(len(messages), len(self._stored))

    def keep(self, messages: list[ModelMessage], usage: RunUsage, trigger: str) -> None:
        """Store the history of the run as it is now."""
        with self._lock:
            if self.has(messages):
                return  # two tools of one response ask for it at the same time
            common = self._common(messages)
            if common < self._saved:  # rewritten, for example by a capability that compacts it
                self._saved, self._whole = 0, True
            stored, self._stored = self._stored, messages
            self.log = ToolLog()
            if self._begun and common == len(stored):
                self._write(
                    trigger,
                    usage,
                    append={("run", "messages"): dump_messages(messages[common:])},
                    set={("run", "results"): {}},
                )
            else:
                run = {"messages": dump_messages(messages[self._saved :]), "results": {}}
                self._write(trigger, usage, set={"run": run})
            self._begun = True

    def record(self, call: ToolCallPart, result: dict[str, Any]) -> None:
        """Store the result of a tool."""
        id = call.tool_call_id
        with self._lock:
            entry = self.log.end(id, result)
            if self._begun:
                change: Any = {("run", "results", id): entry}
            else:  # a deferred call of the saved conversation
                change = {"run": {"messages": [], "results": self.log.entries}}
            self._write("tool_call", self._meta.usage, set=change)
            self._begun = True

    def fail(self, reason: str) -> None:
        """Store that the run has failed, if anything of it is stored."""
        with self._lock:
            if self._begun:
                self._write("run", self._meta.usage, status="failed", reason=reason)

    def _write(self, trigger: str, usage: RunUsage, **changes: Any) -> None:
        run = {"id": self._run_id, "scope": self.scope, "whole": self._whole}
        meta = ConversationMeta(self._meta.record, run, usage)
        calls = _requested(self._stored[-1:])
        fields: dict[str, Any] = {
            "trigger": trigger,
            "usage": usage_since(self._meta.usage, usage),
            "pending": [to_tool_call(c) for c in calls if self.log.is_open(c.tool_call_id)],
            "meta": meta.to_data(),
        }
        if self._meta == ConversationMeta():  # there is no state yet
            changes["append"] = {"messages": []}
        try:
            self._session.patch(**changes, **fields)
        except HeadMoved as e:
            raise ConversationConflict(self._id) from e
        self._meta = meta


def _requested(messages: Sequence[ModelMessage]) -> list[ToolCallPart]:
    """Return the calls that the last response asks for."""
    for message in reversed(messages):
        if isinstance(message, ModelResponse):
            return message.tool_calls
    return []


def _success(call: ToolCallPart, result: Any) -> dict[str, Any]:
    """Return a result as data. Its message is the one that the model gets."""
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
        "message": dump_messages([ModelRequest(parts=parts)])[0],
        "tools": returned.tools,
    }


def _failure(error: ToolRetryError | ToolFailedError) -> dict[str, Any]:
    if isinstance(error, ToolRetryError):
        outcome, part = "retried", error.tool_retry
    else:
        outcome, part = "failed", error.tool_failed
    return {
        "outcome": outcome,
        "message": dump_messages([ModelRequest(parts=[part])])[0],
        "tools": None,
    }


def _replay(recorded: dict[str, Any]) -> ToolReturn[Any]:
    """Return or raise what the tool returned or raised."""
    (message,) = load_messages([recorded["message"]])
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
