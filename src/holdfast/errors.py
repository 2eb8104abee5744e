"""Everything holdfast raises, in one tree.

Each error says what happened, carries a `hint` on what to do next, and knows the exit code the
command line ends with. Errors subclass builtins where a caller would expect to catch those.
"""

from __future__ import annotations

from typing import Any


class HoldfastError(Exception):
    """The root of the tree."""

    exit_code = 1
    default_hint: str | None = None

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint or self.default_hint

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        """From another process as it was: what a class is made with differs from one to another."""
        return _again, (type(self), self.args), self.__dict__


def _again(kind: type[HoldfastError], args: tuple[Any, ...]) -> HoldfastError:
    return kind.__new__(kind, *args)


class NotFound(HoldfastError, LookupError):
    """What was asked for does not exist."""

    exit_code = 3


class StoreNotFound(NotFound):
    default_hint = "check the path, or open with create=True to make a new store"


class SessionNotFound(NotFound):
    default_hint = "store.sessions() lists the sessions that exist"


class CheckpointNotFound(NotFound):
    default_hint = "session.tree() lists every checkpoint of a session"


class AmbiguousRevision(NotFound):
    default_hint = "give more characters of the id"


class Conflict(HoldfastError):
    """Somebody else was there first; nothing of this request was written."""

    exit_code = 4


class HeadMoved(Conflict):
    """The session's head is not the one this handle last saw."""

    default_hint = "call session.refresh() and load() the new head, or fork() to keep both"

    def __init__(self, session: str, expected: str | None, actual: str | None) -> None:
        super().__init__(
            f"the head of session {session!r} moved: "
            f"expected {expected or 'no checkpoint'}, found {actual or 'no checkpoint'}"
        )
        self.session, self.expected, self.actual = session, expected, actual


class SessionExists(Conflict):
    default_hint = "choose another name"


class KeyTaken(Conflict):
    """An external key names another checkpoint of the session already."""

    default_hint = "session.get('key:…') returns the checkpoint that has it"


class SessionBusy(Conflict):
    """Another worker runs this session."""

    default_hint = "wait until that run is over, or fork() the session"


class Fenced(Conflict):
    """This worker's lease was taken over; nothing of its write landed."""

    default_hint = "end this run: the worker that has taken the session over goes on with it"


class InDoubt(Conflict):
    """A call was begun by a worker that is gone, and nobody knows whether it had its effect."""

    def __init__(self, message: str, *, key: str, idempotency_key: str) -> None:
        super().__init__(
            message, hint=f"look, then session.resolve({key!r}, result=… | rerun=True | skip=True)"
        )
        self.key, self.idempotency_key = key, idempotency_key


class StepChanged(Conflict):
    """A recorded step is asked for again in another way: the code has changed since."""

    default_hint = 'give the step on_change="reuse" or "rerun", or another name'


class StepFailed(HoldfastError):
    """A step has failed before the crash, in the words of its own error alone."""


class Corrupt(HoldfastError):
    """Stored bytes are not what was written. They are never returned as data."""

    exit_code = 5
    default_hint = "store.verify(read_data=True) lists what is damaged and what still loads"


class Unavailable(HoldfastError, OSError):
    """The storage cannot be reached or written now; what was acknowledged is safe."""

    exit_code = 6
    default_hint = "what was acknowledged is safe; try again once the storage works"

    def __str__(self) -> str:
        return HoldfastError.__str__(self)


class UnsupportedFormat(HoldfastError):
    """The store was written by another version of the format, or is no store at all."""

    exit_code = 7
    default_hint = "use the version that has written it, or a newer one"


class NotSerializable(HoldfastError, TypeError):
    """A value cannot be stored exactly. Raised before anything is written."""

    exit_code = 8
    default_hint = (
        "store plain data: None, bool, int, float, str, bytes, list, tuple, dict, set, datetime, "
        "Decimal, UUID, Enum, dataclass or pydantic model"
    )

    def __init__(self, message: str, *, path: str = "state", hint: str | None = None) -> None:
        super().__init__(f"{path}: {message}", hint=hint)
        self.path = path


class InvalidRequest(HoldfastError, ValueError):
    """The request makes no sense as given. Nothing was written."""

    exit_code = 2


UNREADABLE = (Corrupt, UnsupportedFormat)
"""Why a stored row cannot be read: damaged, or of a kind that this version does not know."""
