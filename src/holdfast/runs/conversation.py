"""A conversation that is durable: for loops around a model that are written by hand."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from holdfast import ids
from holdfast.codec.values import MAX_DEPTH
from holdfast.errors import InvalidRequest
from holdfast.runs import messages as talking

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Unpack

    from holdfast.checkpoint import Checkpoint
    from holdfast.fields import Fields
    from holdfast.model import ToolCall
    from holdfast.session import Session

    Message = dict[str, Any]


def estimate(message: Message) -> float:
    """Tokens of a message, roughly: four characters make one."""
    return len(json.dumps(message, ensure_ascii=False, default=str, skipkeys=True)) / 4


class Conversation:
    """Messages in a session's state, each written once, when it comes.

    `messages` are all of them; `window()` what fits into a model's context. It is always that of
    the checkpoint on which the session's handle stands: rewind() and undo() show here too.
    """

    def __init__(
        self,
        session: Session,
        *,
        system: str | None = None,
        budget: float | None = None,
        count: Callable[[Message], float] = estimate,
        key: str = "messages",
    ) -> None:
        if budget is not None:
            _check_budget(budget)
        if type(key) is not str or key in ("", "system"):
            raise InvalidRequest(f"messages cannot be kept under {key!r}")
        if system is not None and type(system) is not str:
            raise InvalidRequest(f"a system prompt is a string, not {type(system).__name__}")
        self.session, self.key, self.budget = session, key, budget
        self._count = count
        self._messages: list[Message] = []
        self._system: str | None = None
        self._at: bytes | None = None
        """The checkpoint that these are of."""
        with session._lock:
            self._read()
            if system is not None and system != self._system:
                session.patch(set={"system": system})
                self._system, self._at = system, self._tip()

    def _tip(self) -> bytes | None:
        tip = self.session._writer.tip
        return None if tip is None else tip.id

    def _read(self) -> None:
        state = self.session.load() if self.session.head is not None else {}
        if type(state) is not dict or type(state.get(self.key, [])) is not list:
            raise InvalidRequest(
                f"the state of session {self.session.name!r} has no list {self.key!r}"
            )
        self._messages = state.get(self.key, [])
        self._system = state.get("system")
        self._at = self._tip()

    def _catch_up(self) -> list[Message]:
        with self.session._lock:
            if self._at != self._tip():
                self._read()
            return self._messages

    @property
    def system(self) -> str | None:
        """The system prompt, which no trimming takes away."""
        self._catch_up()
        return self._system

    @property
    def messages(self) -> list[Message]:
        """All messages, the oldest first. A list of its own; the messages are shared."""
        return list(self._catch_up())

    def __len__(self) -> int:
        return len(self._catch_up())

    def __bool__(self) -> bool:
        return True

    def append(self, *messages: Any, **fields: Unpack[Fields]) -> Checkpoint:
        """Add messages: one checkpoint, durable when this returns.

        They may be dicts or what an SDK returns, also in their parts: such a model is kept as a
        dict of what is set in it.
        """
        added = [_plain(message) for message in messages]
        for message in added:
            if type(message) is not dict:
                raise InvalidRequest(f"a message is a dict, not {type(message).__name__}")
        with self.session._lock:
            self._catch_up()
            saved = self.session.append(self.key, *added, **fields)
            self._messages += added
            self._at = self._tip()
        return saved

    def window(self, budget: float | None = None) -> list[Message]:
        """What to send: the newest messages that fit, and no call without its result."""
        most = self.budget if budget is None else _check_budget(budget)
        if most is None:
            return self.messages
        messages, system = self._catch_up(), self._system
        if system is not None:
            most -= self._count({"role": "system", "content": system})
        return talking.newest(messages, most, self._count)

    def dangling(self) -> list[ToolCall]:
        """Calls without a result: what an interruption has left, or what is to be done next."""
        return talking.dangling(self._catch_up())

    def repair(self) -> list[ToolCall]:
        """Close those with a result that says so; a checkpoint, if there were any."""
        with self.session._lock:
            self._catch_up()
            if self._at is None:
                return []
            kept = self.session.load(ids.to_text(self._at)).get(self.key, [])  # not what is shared
            closed, calls = talking.closed(kept)
            if calls:
                self.session.patch(set={self.key: closed}, trigger="repair")
                self._messages, self._at = closed, self._tip()
        return calls


def _check_budget(budget: Any) -> float:
    if type(budget) not in (int, float) or not budget > 0:
        raise InvalidRequest(f"budget must be more than nothing, not {budget!r}")
    return float(budget)


def _plain(value: Any, depth: int = 0) -> Any:
    """A copy, so that what is changed later is not mistaken for what was kept."""
    if depth > MAX_DEPTH:
        return value  # which append() refuses
    if hasattr(value, "model_dump") and not isinstance(value, type):
        value = value.model_dump(exclude_none=True)
    if type(value) is dict:
        return {key: _plain(part, depth + 1) for key, part in value.items()}
    if type(value) is list:
        return [_plain(part, depth + 1) for part in value]
    return value
