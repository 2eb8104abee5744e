"""A durable conversation, for hand-written loops around a model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from holdfast.errors import InvalidRequest
from holdfast.format.values import MAX_DEPTH
from holdfast.runs import messages as talking

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from typing import Unpack

    from holdfast.history.checkpoint import Checkpoint
    from holdfast.history.checkpoint_fields import Fields
    from holdfast.model import ToolCall

    Message = dict[str, Any]


def estimate(message: Message) -> float:
    """Return the rough number of tokens of a message: one for every four characters."""
    return len(json.dumps(message, ensure_ascii=False, default=str, skipkeys=True)) / 4


class Conversation:
    """The messages in a session's state. Each message is written once, when it is added.

    `messages` are all messages; `window()` returns those that fit into a model's context. A
    conversation always shows the checkpoint that its session handle is at, so rewind() and undo()
    change it, too.
    """

    def __init__(
        self,
        session: Any,
        lock: Callable[[], AbstractContextManager[Any]],
        expected: Callable[[], str | None],
        *,
        system: str | None = None,
        budget: float | None = None,
        count: Callable[[Message], float] | None = None,
        key: str = "messages",
    ) -> None:
        if budget is not None:
            _check_budget(budget)
        if type(key) is not str or key in ("", "system"):
            raise InvalidRequest(f"messages cannot be kept under {key!r}")
        if system is not None and type(system) is not str:
            raise InvalidRequest(f"a system prompt is a string, not {type(system).__name__}")
        self.session = session
        """The Session that holds the conversation."""
        self.key, self.budget = key, budget
        self._lock, self._expected = lock, expected
        """The session's lock, and a function that returns the id of its expected head."""
        self._count = count or estimate
        self._messages: list[Message] = []
        self._system: str | None = None
        self._at: str | None = None
        """The id of the checkpoint that the messages were read from."""
        with lock():
            self._read()
            if system is not None and system != self._system:
                session.patch(set={"system": system})
                self._system, self._at = system, expected()

    def _read(self) -> None:
        """Read messages and system prompt. Raises InvalidRequest if the state has no such list."""
        state = self.session.load() if self.session.head is not None else {}
        if type(state) is not dict or type(state.get(self.key, [])) is not list:
            raise InvalidRequest(
                f"the state of session {self.session.name!r} has no list {self.key!r}"
            )
        self._messages = state.get(self.key, [])
        self._system = state.get("system")
        self._at = self._expected()

    def _catch_up(self) -> list[Message]:
        """Return the messages. Read them again if the handle is at another checkpoint now."""
        with self._lock():
            if self._at != self._expected():
                self._read()
            return self._messages

    @property
    def system(self) -> str | None:
        """The system prompt, or None. window() always keeps it."""
        self._catch_up()
        return self._system

    @property
    def messages(self) -> list[Message]:
        """All messages, oldest first. The list is a copy; the messages in it are not."""
        return list(self._catch_up())

    def __len__(self) -> int:
        return len(self._catch_up())

    def __bool__(self) -> bool:
        """Return True: a conversation without messages is not false."""
        return True

    def append(self, *messages: Any, **fields: Unpack[Fields]) -> Checkpoint:
        """Add messages in one checkpoint, and return it. It is durable when this returns.

        A message is a dict or a model object of an SDK, and so are its parts. A model is stored as
        a dict of the fields that are not None. `fields` and errors are those of Session.save().
        """
        added = [_plain(message) for message in messages]
        for message in added:
            if type(message) is not dict:
                raise InvalidRequest(f"a message is a dict, not {type(message).__name__}")
        with self._lock():
            self._catch_up()
            saved: Checkpoint = self.session.append((self.key,), *added, **fields)
            self._messages += added
            self._at = self._expected()
        return saved

    def window(self, budget: float | None = None) -> list[Message]:
        """Return the messages to send to a model: the system prompt and the newest that fit.

        `budget` is the limit; the default is that of the conversation, and None means no limit. A
        tool call is never separated from its result.
        """
        most = self.budget if budget is None else _check_budget(budget)
        with self._lock():
            messages, system = self.messages, self._system
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        return messages if most is None else talking.newest(messages, most, self._count)

    def dangling(self) -> list[ToolCall]:
        """Return the tool calls without a result.

        An interruption has left them, or they are to be made next.
        """
        return talking.dangling_calls(self._catch_up())

    def repair(self) -> list[ToolCall]:
        """Give a result to each tool call that has none. Return these calls.

        The result says that the call was interrupted. If there are any such calls, this is a
        checkpoint.
        """
        with self._lock():
            self._catch_up()
            if self._at is None:
                return []
            kept = self.session.load(self._at).get(self.key, [])  # a copy of our own
            closed, calls = talking.closed(kept)
            if calls:
                self.session.patch(set={(self.key,): closed}, trigger="repair")
                self._messages, self._at = closed, self._expected()
        return calls


def _check_budget(budget: Any) -> float:
    """Return the budget as a float. Raises InvalidRequest if it is not a number above 0."""
    if type(budget) not in (int, float) or not budget > 0:
        raise InvalidRequest(f"budget must be more than nothing, not {budget!r}")
    return float(budget)


def _plain(value: Any, depth: int = 0) -> Any:
    """Return a deep copy, with models as dicts. Later changes by the caller do not affect it."""
    if depth > MAX_DEPTH:
        return value  # append() refuses it
    if hasattr(value, "model_dump") and not isinstance(value, type):
        value = value.model_dump(exclude_none=True)
    if type(value) is dict:
        return {key: _plain(part, depth + 1) for key, part in value.items()}
    if type(value) is list:
        return [_plain(part, depth + 1) for part in value]
    return value
