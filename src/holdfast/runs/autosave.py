"""Policies for hand-written loops: `with session.autosave(policy) as saver`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from holdfast.errors import InvalidRequest
from holdfast.runs.checkpoint_policy import TRIGGERS, Moment, policy_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self, Unpack

    from holdfast.history.checkpoint import Checkpoint
    from holdfast.history.checkpoint_fields import Fields
    from holdfast.runs.checkpoint_policy import Event, Policy


class Autosave:
    """Saves the states that a loop offers, when its policy wants them. See Session.autosave().

    At the end of the `with` block, the state that was offered last is saved as it is then, if no
    checkpoint was taken since. If an error ends the block, that checkpoint has the status "failed",
    and after Ctrl-C or an exit of the program "halted".
    """

    def __init__(self, save: Callable[..., Checkpoint], policy: Policy | None) -> None:
        self._save, self._policy = save, policy_of(policy)
        self._saved_at = time.monotonic()
        self._unsaved: list[Any] = []
        """The state that was offered last, if it is not saved."""
        self.turn = 1
        """The number of the current turn. It grows with each event "turn"."""

    def offer(
        self, state: Any, event: Event = "turn", **fields: Unpack[Fields]
    ) -> Checkpoint | None:
        """Save the state if the policy wants a checkpoint now. Return the checkpoint, or None.

        `event` says what has happened: the model has answered ("llm"), a tool has returned
        ("tool"), or a turn has ended ("turn"). `fields` and errors are those of Session.save().
        """
        if event not in TRIGGERS:
            raise InvalidRequest(f"unknown event {event!r}", hint=", ".join(TRIGGERS))
        seconds = time.monotonic() - self._saved_at
        wanted = self._policy.wants(Moment(event, self.turn, seconds))
        self.turn += event == "turn"
        self._unsaved = [state]
        if not wanted:
            return None
        fields.setdefault("trigger", TRIGGERS[event])
        saved = self._save(state, **fields)
        self._saved_at, self._unsaved = time.monotonic(), []
        return saved

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        fields: Fields = {"trigger": "autosave"}
        if isinstance(error, Exception):
            fields |= {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
        elif error is not None:
            fields |= {"status": "halted", "reason": type(error).__name__}
        while self._unsaved:
            self._save(self._unsaved.pop(), **fields)
