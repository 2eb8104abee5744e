"""Which session and which checkpoint somebody means."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from holdfast import ids
from holdfast.cli.words import one_line
from holdfast.errors import CheckpointNotFound, InvalidRequest, SessionNotFound

if TYPE_CHECKING:
    from collections.abc import Iterable

    from holdfast import Checkpoint, Session, Store
    from holdfast.backends.base import Backend

_RELATIVE = ("@", "label:", "tag:", "key:", "step:")
_SHORTEST = 8


class Found(NamedTuple):
    session: Session
    checkpoint: Checkpoint


def the_session(store: Store, name: str | None) -> Session:
    """The session of that name; without one, the only session there is."""
    if name is not None:
        session = store.session(name)
        if not session.exists():
            raise SessionNotFound(f"there is no session {name!r}", hint=_near(store, name))
        return session
    names = [info.name for _, info in zip(range(6), store.sessions(), strict=False)]
    if not names:
        raise SessionNotFound(
            "the store has no session yet", hint="`holdfast save` makes one, and so does any agent"
        )
    if len(names) > 1:
        more = ", …" if len(names) > 5 else ""
        raise InvalidRequest(
            "which session? The store has several",
            hint=f"give --session; there are {', '.join(map(one_line, names[:5]))}{more}",
        )
    return store.session(names[0])


def _near(store: Store, name: str) -> str | None:
    from difflib import get_close_matches

    near = get_close_matches(name, (info.name for info in store.sessions()), 3)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else None


def the_checkpoint(
    store: Store, revision: str, name: str | None, before: Session | None = None
) -> Found:
    """The checkpoint that a revision names.

    An id needs no session. What is relative, or a label, belongs to the session of that `name`, to
    the one that was named `before`, or to the only one there is.
    """
    if name is None and not revision.startswith(_RELATIVE):
        try:
            checkpoint = store.get(revision)
            return Found(store.session(checkpoint.session), checkpoint)
        except (CheckpointNotFound, InvalidRequest):
            if ids.from_text(revision) is not None:
                raise
            # no id: a label, then
    session = before if name is None and before is not None else the_session(store, name)
    return Found(session, session.get(revision))


def short_length(backend: Backend, checkpoints: Iterable[Checkpoint]) -> int:
    """How many characters of these ids are enough to tell each from all others in the store."""
    longest = _SHORTEST
    with backend.reader() as reader:
        for checkpoint in checkpoints:
            while longest < ids.CHARS:
                bounds = ids.prefix_range(checkpoint.id[:longest])
                if bounds is None or len(reader.find_ids(*bounds, 2)) < 2:
                    break
                longest += 1
    return longest
