"""Find the session and the checkpoint that the user names."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import click

from holdfast.cli.complete import complete_sessions
from holdfast.cli.output import one_line
from holdfast.errors import CheckpointNotFound, InvalidRequest, SessionNotFound

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast import Checkpoint, Session, Store
    from holdfast.cli.context import Command

_RELATIVE = ("@", "label:", "tag:", "key:", "step:")
_WHOLE_ID = re.compile("[0-9a-hjkmnp-tv-z]{24}", re.ASCII | re.IGNORECASE)


def session_option(
    help: str = "The session that a relative revision or a label belongs to.",
) -> Callable[[Command], Command]:
    return click.option(
        "--session", "-s", metavar="NAME", help=help, shell_complete=complete_sessions
    )


class Found(NamedTuple):
    session: Session
    checkpoint: Checkpoint


def the_session(store: Store, name: str | None) -> Session:
    """Return the session of that name; without a name, the only session of the store.

    Raises SessionNotFound, and InvalidRequest if there are several and no name is given.
    """
    if name is not None:
        session = store.session(name)
        if not session.exists():
            raise SessionNotFound(f"there is no session {name!r}", hint=_similar(store, name))
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
            hint=f"give --session; there are {', '.join(map(one_line, names[:5]))}{more}",
        )
    return store.session(names[0])


def _similar(store: Store, name: str) -> str | None:
    """Return a hint with similar names, or None."""
    from difflib import get_close_matches

    similar = get_close_matches(name, (info.name for info in store.sessions()), 3)
    return f"did you mean {' or '.join(map(repr, similar))}?" if similar else None


def the_checkpoint(
    store: Store, revision: str, name: str | None, default: Session | None = None
) -> Found:
    """Return the checkpoint that a revision names.

    An id is searched in the whole store. Any other revision belongs to the session `name`; without
    a name, to the `default` session; without that, to the only session of the store.
    """
    if name is None and not revision.startswith(_RELATIVE):
        try:
            checkpoint = store.get(revision)
            return Found(store.session(checkpoint.session), checkpoint)
        except (CheckpointNotFound, InvalidRequest):
            if _WHOLE_ID.fullmatch(revision):
                raise
            # Not an id, so it may be a label.
    session = default if name is None and default is not None else the_session(store, name)
    return Found(session, session.get(revision))
