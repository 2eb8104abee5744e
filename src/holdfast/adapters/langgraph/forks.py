"""The history of forked threads.

A fork shares the history of the session that it was forked from:
`store.session("ada").fork("eve", at=B)` makes eve a thread that continues from B:

    session "ada"     A ── B ── C
                           │
    session "eve"          P ── D

P is a placeholder. It has the state of B, but neither a key nor links. B is the fork point. eve
inherits B and A: they are read in ada. C is not part of eve.

When something is written to B in eve, such as a pending write or another child, eve copies B into
its own session first. A fork of a fork to which nothing was written has two placeholders, P2 ── P.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import takewhile

from holdfast import Checkpoint, Session, Store
from holdfast.adapters.langgraph.names import LINKS, Links
from holdfast.errors import CheckpointNotFound, SessionNotFound


def is_placeholder(checkpoint: Checkpoint) -> bool:
    return checkpoint.operation == "fork" and LINKS not in checkpoint.meta


class Ancestry:
    """The checkpoints before the first one of a session that is a fork.

    `origin` returns the checkpoint that the session would begin with if it existed: a subgraph of a
    fork has no session before the fork writes to it.
    """

    def __init__(
        self, store: Store, session: Session, origin: Callable[[], Checkpoint | None] | None
    ) -> None:
        self._store, self._session, self._origin = store, session, origin

    def __iter__(self) -> Iterator[Checkpoint]:
        """Yield the placeholders and the checkpoints before them, newest first."""
        if (first := self._first()) is not None:
            own = self._session.name
            session = self._session if first.session == own else self._store.session(first.session)
            for checkpoint in session.history(first):
                if checkpoint.session != own or is_placeholder(checkpoint):
                    yield checkpoint

    def _first(self) -> Checkpoint | None:
        """Return the first checkpoint of a fork; None if the session is no fork."""
        try:
            is_fork = self._session.info().forked
        except SessionNotFound:
            return self.origin()
        return next(self._session.tree(), None) if is_fork else None

    def origin(self) -> Checkpoint | None:
        return None if self._origin is None else self._origin()

    def is_fork(self) -> bool:
        return self._first() is not None

    def placeholders(self) -> list[Checkpoint]:
        return [*takewhile(is_placeholder, self)]

    def fork_point(self) -> Checkpoint | None:
        """Return the fork point; None if the session is no fork.

        Raises CheckpointNotFound if it was deleted.
        """
        placeholder = None
        for checkpoint in self:
            if placeholder is not None and checkpoint.id != placeholder.parent:
                break
            if not is_placeholder(checkpoint):
                Links.of(checkpoint)  # raises if it is not LangGraph's
                return checkpoint
            placeholder = checkpoint
        if placeholder is None:
            return None
        raise CheckpointNotFound(
            f"the checkpoint that session {self._session.name!r} begins with was deleted in "
            f"session {placeholder.parent_session!r}",
            hint="undo() there brings it back, until gc() has freed it",
        )

    def inherited(self) -> Iterator[Checkpoint]:
        """Yield LangGraph's checkpoints in other sessions, newest first, each id once."""
        seen = set[str]()
        for checkpoint in self:
            if not is_placeholder(checkpoint):
                Links.of(checkpoint)  # raises if it is not LangGraph's
                if checkpoint.key and checkpoint.key not in seen:
                    seen.add(checkpoint.key)
                    yield checkpoint

    def find(self, id: str) -> Checkpoint | None:
        """Return the inherited checkpoint with an id of LangGraph's."""
        for checkpoint in self.inherited():
            if checkpoint.key == id:
                return checkpoint
            if Links.of(checkpoint).highest < id:
                break  # ids only get lower from here on
        return None
