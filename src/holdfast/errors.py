"""All errors that holdfast raises, with `HoldfastError` as their base class.

Each error has a message, a `hint` on what to do next, and the exit code of the command line. Some
are also subclasses of a builtin error, such as LookupError, so that callers can catch that.
"""

from __future__ import annotations

from typing import Any


class HoldfastError(Exception):
    """The base class of all errors of holdfast."""

    exit_code = 1
    default_hint: str | None = None
    """The hint of errors of this class that have none of their own."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint or self.default_hint

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the error without calling `__init__`, whose arguments differ from class to class.

        So an error that comes from another process has its message, hint and fields.
        """
        return _again, (type(self), self.args), self.__dict__


def _again(kind: type[HoldfastError], args: tuple[Any, ...]) -> HoldfastError:
    """Make an error while unpickling, without calling its `__init__`."""
    return kind.__new__(kind, *args)


class NotFound(HoldfastError, LookupError):
    """The requested store, session, checkpoint, path or call does not exist."""

    exit_code = 3


class StoreNotFound(NotFound):
    """There is no store at this path or URL."""

    default_hint = "check the path, or open with create=True to make a new store"


class SessionNotFound(NotFound):
    """The store has no session of this name."""

    default_hint = "store.sessions() lists the sessions that exist"


class CheckpointNotFound(NotFound):
    """The session has no such checkpoint."""

    default_hint = "session.tree() lists every checkpoint of a session"


class AmbiguousRevision(NotFound):
    """The ids of several checkpoints begin with the characters that were given."""

    default_hint = "give more characters of the id"


class Conflict(HoldfastError):
    """Another writer or an earlier decision came first. Nothing of this request was written."""

    exit_code = 4


class HeadMoved(Conflict):
    """Another writer moved the session's head since this handle last read it."""

    default_hint = "call session.refresh() and load() the new head, or fork() to keep both"

    def __init__(self, session: str, expected: str | None, actual: str | None) -> None:
        super().__init__(
            f"the head of session {session!r} moved: "
            f"expected {expected or 'no checkpoint'}, found {actual or 'no checkpoint'}"
        )
        self.session, self.expected, self.actual = session, expected, actual


class SessionExists(Conflict):
    """Another session has this name."""

    default_hint = "choose another name"


class KeyTaken(Conflict):
    """Another checkpoint of the session has this external key."""

    default_hint = "session.get('key:…') returns the checkpoint that has it"


class SessionBusy(Conflict):
    """Another worker holds the lease of this session and is running it."""

    default_hint = "wait until that run is over, or fork() the session"


class Fenced(Conflict):
    """Another worker took over the lease of this run. Nothing of this write was stored."""

    default_hint = "end this run: the worker that has taken the session over goes on with it"


class InDoubt(Conflict):
    """A worker started a call and died. It is unknown whether the call had its effect."""

    def __init__(self, message: str, *, key: str, idempotency_key: str) -> None:
        super().__init__(
            message,
            hint=f'look, then session.resolve({key!r}, result) or (…, action="rerun" | "skip")',
        )
        self.key, self.idempotency_key = key, idempotency_key


class AlreadyDecided(Conflict):
    """The question has an answer, or the call a result, already. The first one is final."""

    default_hint = "the decision is final: the run uses it when it is resumed"

    def __init__(self, message: str, *, key: str, outcome: str, result: Any) -> None:
        super().__init__(message)
        self.key, self.outcome, self.result = key, outcome, result


class StepChanged(Conflict):
    """A resumed run calls a recorded step in another way: the code changed since then."""

    default_hint = 'give the step on_change="reuse" or "rerun", or another name'


class StepFailed(HoldfastError):
    """A step failed before the crash. The message is that of the step's error."""


class Corrupt(HoldfastError):
    """Stored bytes are not what was written. They are never returned as data."""

    exit_code = 5
    default_hint = "store.verify(read_data=True) lists what is damaged and what still loads"


class Unavailable(HoldfastError, OSError):
    """The storage cannot be reached or written at the moment. Acknowledged saves are safe."""

    exit_code = 6
    default_hint = "what was acknowledged is safe; try again once the storage works"

    def __str__(self) -> str:
        return HoldfastError.__str__(self)


class UnsupportedFormat(HoldfastError):
    """The store has a version of the format that this release cannot read, or it is no store."""

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


class TooBig(HoldfastError):
    """Data would take more memory than the limit allows. Raised before it is decoded."""

    exit_code = 9
    default_hint = "if you trust it, allow more: holdfast.memory_limit(bytes), or import --memory"

    def __init__(self, limit: int) -> None:
        super().__init__(f"the data takes more than {limit:,} bytes of memory")
        self.limit = limit


class InvalidRequest(HoldfastError, ValueError):
    """The request is invalid, or not possible in this state. Nothing was written."""

    exit_code = 2


def require_text(what: str, value: Any) -> None:
    """Raise InvalidRequest if an argument is not a non-empty string."""
    if type(value) is not str or not value:
        raise InvalidRequest(f"{what} must be a non-empty string, not {value!r}")


def require_count(what: str, value: Any, least: int = 1) -> None:
    """Raise InvalidRequest if an argument is not a whole number of at least `least`."""
    if type(value) is not int or value < least:
        raise InvalidRequest(f"{what} must be a number from {least} on, not {value!r}")


UNREADABLE = (Corrupt, UnsupportedFormat)
"""The errors of a row that cannot be read: damaged, or in a format newer than this release."""
