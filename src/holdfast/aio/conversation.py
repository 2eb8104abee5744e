"""Conversations for asyncio."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import Unpack

    from holdfast.history.checkpoint import Checkpoint
    from holdfast.history.checkpoint_fields import Fields
    from holdfast.model import ToolCall
    from holdfast.runs.conversation import Conversation


class AsyncConversation:
    """A Conversation whose methods are awaited; `sync` is the Conversation."""

    def __init__(self, sync: Conversation, work: Callable[..., Awaitable[Any]]) -> None:
        self.sync, self._work = sync, work

    async def messages(self) -> list[dict[str, Any]]:
        """Return all messages, oldest first."""
        found: list[dict[str, Any]] = await self._work(lambda: self.sync.messages)
        return found

    async def append(self, *messages: Any, **fields: Unpack[Fields]) -> Checkpoint:
        """Add messages in one checkpoint, and return it. It is durable when this returns."""
        saved: Checkpoint = await self._work(self.sync.append, *messages, **fields)
        return saved

    async def window(self, budget: float | None = None) -> list[dict[str, Any]]:
        """Return the messages to send to a model; see Conversation.window."""
        found: list[dict[str, Any]] = await self._work(self.sync.window, budget)
        return found

    async def repair(self) -> list[ToolCall]:
        """Close calls without a result, and return these calls; see Conversation.repair."""
        calls: list[ToolCall] = await self._work(self.sync.repair)
        return calls
