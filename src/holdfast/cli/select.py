"""Find the session and the checkpoint that the user names."""

from __future__ import annotations

import functools
import os
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from holdfast.cli.complete import complete_sessions
from holdfast.cli.output import one_line, quoted, typed
from holdfast.errors import (
    UNREADABLE,
    AmbiguousRevision,
    CheckpointNotFound,
    InvalidRequest,
    SessionNotFound,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast import Checkpoint, Session, Store
    from holdfast.cli.context import Command

_RELATIVE = ("@", "label:", "tag:", "key:", "step:")
_FUNCTION = re.compile(r"[\w.]+:[\w.]+")
_WHOLE_ID = re.compile("[0-9a-hjkmnp-tv-z]{24}", re.ASCII | re.IGNORECASE)


def session_option(
    help: str = "The session that a relative revision or a label belongs to.",
    name: str = "session",
) -> Callable[[Command], Command]:
    return click.option(
        name, "--session", "-s", metavar="NAME", help=help, shell_complete=complete_sessions
    )


def session_argument(
    help: str = "The same as SESSION; optional if there is only one.",
) -> Callable[[Command], Command]:
    """Let the user give a session as SESSION or with --session. The command gets `session`."""

    def decorate(function: Command) -> Command:
        @functools.wraps(function)
        def call(*args: Any, named: str | None, session: str | None, **options: Any) -> Any:
            return function(*args, session=one_session(session, named), **options)

        argument = click.argument("session", required=False, shell_complete=complete_sessions)
        return argument(session_option(help, "named")(call))

    return decorate


def one_session(session: str | None, named: str | None) -> str | None:
    """Return the session that was given as SESSION, with --session, or both.

    Raises InvalidRequest if they differ.
    """
    if None not in (session, named) and session != named:
        raise InvalidRequest(
            f"two sessions are given: {session!r} and --session {named!r}",
            hint="leave one of them out",
        )
    return named if session is None else session


def session_and_more(
    session: str | None, more: str | None, named: str | None
) -> tuple[str | None, str | None]:
    """Return the session and the argument after it: with --session, SESSION can be left out."""
    if more is None and named not in (None, session):
        return named, session
    return one_session(session, named), more


class Found(NamedTuple):
    session: Session
    checkpoint: Checkpoint


def the_session(store: Store, name: str | None, *, others: str = "give --session") -> Session:
    """Return the session of that name; without a name, the only session of the store.

    Raises SessionNotFound, and InvalidRequest if there are several and no name is given. `others`
    is the advice for that case.
    """
    if name is not None:
        session = store.session(name)
        if not session.exists():
            raise SessionNotFound(f"there is no session {name!r}", hint=_instead(store, name))
        return session
    names = [info.name for _, info in zip(range(6), store.sessions(), strict=False)]
    if not names:
        raise SessionNotFound(
            "the store has no session yet",
            hint="`holdfast save` makes one, and so does any agent that uses the store",
        )
    if len(names) > 1:
        more = ", …" if len(names) > 5 else ""
        raise InvalidRequest(
            "which session? The store has several",
            hint=f"{others}; there are {', '.join(map(one_line, names[:5]))}{more}",
        )
    return store.session(names[0])


def session_or_all(store: Store, name: str | None, *, everything: bool) -> Session | None:
    """Return the session that a command is limited to; None if the user gave --all.

    Raises InvalidRequest if both are given, and as the_session() does.
    """
    if everything and name is not None:
        raise InvalidRequest("--all and a session cannot be combined", hint="leave one of them out")
    return None if everything else the_session(store, name, others="give --session, or --all")


def _instead(store: Store, name: str) -> str | None:
    """Return a hint for the name of a missing session: it is a file, a function or misspelled."""
    from difflib import get_close_matches

    from holdfast import file_kind

    if os.path.isfile(name):
        is_store = file_kind(name) == "store"
        return f"it is a store: {typed('--store', name)} …" if is_store else "it is a file"
    similar = get_close_matches(name, (info.name for info in store.sessions()), 3)
    if similar:
        return f"did you mean {' or '.join(map(repr, similar))}?"
    if _FUNCTION.fullmatch(name):
        return f"for a function, give the session first: holdfast resume SESSION {name}"
    return None


def _session_called(store: Store, name: str) -> Session | None:
    """Return the session of that name, or None."""
    with suppress(InvalidRequest, *UNREADABLE):
        session = store.session(name)
        return session if session.exists() else None
    return None


def the_checkpoint(
    store: Store,
    revision: str,
    name: str | None,
    default: Session | None = None,
    *,
    sessions: bool = False,
) -> Found:
    """Return the checkpoint that a revision names.

    An id is searched in the whole store. Any other revision belongs to the session `name`; without
    a name, to the `default` session; without that, to the only session of the store. With
    `sessions`, the name of a session means its head.
    """
    if revision.startswith(_RELATIVE):
        session = default if name is None and default is not None else the_session(store, name)
        return Found(session, session.get(revision))
    if name is None:
        try:
            checkpoint = store.get(revision)
            return Found(store.session(checkpoint.session), checkpoint)
        except (CheckpointNotFound, InvalidRequest):
            if _WHOLE_ID.fullmatch(revision):
                raise
            # Not an id, so it may be a label.
    try:
        session = default if name is None and default is not None else the_session(store, name)
        found = Found(session, session.get(revision))
    except (CheckpointNotFound, InvalidRequest):
        other = _session_called(store, revision)
        if other is None:
            raise
        if not sessions:
            hint = f"a session is given with --session: -s {quoted(revision)}"
            raise InvalidRequest(f"{revision!r} is a session", hint=hint) from None
        return Found(other, other.get())
    if sessions and _session_called(store, revision) is not None:
        raise AmbiguousRevision(
            f"{revision!r} is both a label of session {session.name!r} and a session",
            hint=f"label:{revision} is the label; for the session, give the id of its head",
        )
    return found
