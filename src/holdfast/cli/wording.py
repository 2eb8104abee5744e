"""Errors of the library, with hints for somebody at a terminal."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING

from holdfast.errors import Corrupt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.errors import HoldfastError

_HINTS = {
    "SessionNotFound": "`holdfast sessions` lists those there are",
    "CheckpointNotFound": "`holdfast log --all` lists every checkpoint",
    "HeadMoved": "somebody else has saved meanwhile; look with `holdfast log`, then try again",
    "Corrupt": "`holdfast check` lists what is damaged and what still loads",
    "KeyTaken": "`holdfast show key:KEY` shows the checkpoint that has it",
    "SessionBusy": "a worker runs it; `holdfast abandoned` lists those whose worker died",
}
_COMMANDS = {
    "undo": "undo", "redo": "redo", "gc": "gc", "repair": "repair", "rewind": "rewind",
    "fork": "fork", "tree": "log --all", "sessions": "sessions", "verify": "check",
    "copy": "copy", "resolve": "resolve", "answer": "answer", "pending": "pending",
    "backup": "backup", "delete": "delete",
}  # fmt: skip
_PHRASES = {
    "run() without resume=True": "a run is begun by your program, with session.run()",
    "run(takeover=True)": "`holdfast resume --takeover`",
    'give format="s0"': 'give --format: "s0"',
}
_CALL = re.compile(rf"(?:\b(?:store|session)\.)?\b({'|'.join(_COMMANDS)})\([^()]*\)")


def in_our_words(error: HoldfastError) -> tuple[str, str | None]:
    """The message and the hint, in which calls are commands."""
    hint = error.hint
    if hint is not None and hint == error.default_hint:
        hint = next(
            (_HINTS[kind.__name__] for kind in type(error).__mro__ if kind.__name__ in _HINTS), hint
        )
    return as_commands(error.message), None if hint is None else as_commands(hint)


@contextmanager
def nothing_more_to_check() -> Iterator[None]:
    """For what checks a store: to be sent to `check` from there would lead in a circle."""
    try:
        yield
    except Corrupt as e:
        if e.hint != e.default_hint:
            raise
        hint = "so much is damaged that nothing can be listed; put a backup back"
        raise Corrupt(e.message, hint=hint) from e


def as_commands(text: str) -> str:
    for call, words in _PHRASES.items():
        text = text.replace(call, words)
    return _CALL.sub(lambda m: f"`holdfast {_COMMANDS[m[1]]}`", text)
