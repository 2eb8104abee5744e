"""The history of forked threads, and where subgraphs continue after a fork or a rewind.

A fork shares the history of the session that it was forked from:
`store.session("ada").fork("eve", at=B)` makes eve a thread that continues from B:

    session "ada"     A ── B ── C
                           │
    session "eve"          P ── D

P is a placeholder. It has the state of B, but neither a key nor links. B is the fork point. eve
inherits B and A: they are read in ada. C is not part of eve.

When something is written to B in eve, such as a pending write or another child, eve copies B into
its own session first. A fork of a fork to which nothing was written has two placeholders, P2 ── P.

Each checkpoint of a subgraph belongs to the checkpoint of the root graph in whose step it was made
(`parents` in its metadata). A rewind of the thread moves the head of the root graph only:

    root graph      A ── B ── C ── D         rewound to B
    subgraph          s1   s2   s3           s1 belongs to A, s2 to B, s3 to C

The subgraph then continues from s1, because s2 and s3 are results of steps that were taken back.
But if s2 was interrupted, the step of B waits for an answer again: it continues from s2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

from holdfast import Checkpoint, Session, Store
from holdfast.adapters.langgraph.names import LINKS, Links, id_of
from holdfast.adapters.langgraph.writes import WriteLog
from holdfast.errors import CheckpointNotFound, SessionNotFound

if TYPE_CHECKING:
    from holdfast.adapters.langgraph.thread import Namespace

    RootId = Callable[[Checkpoint], str | None]
    """Returns the id of the root graph's checkpoint that one of a subgraph belongs to."""

_ANY, _NONE = "any", "none"
"""In place of an attempt: the results of every attempt count, or of none."""


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


# -- where a graph continues ----------------------------------------------------------------------


class Position(NamedTuple):
    """The checkpoint that a graph continues from, and the attempt that its step is in."""

    checkpoint: Checkpoint | None
    attempt: str | None = None


def position(namespace: Namespace, root_id: RootId, root: str | None = None) -> Position:
    """Return where a graph continues. `root` is the checkpoint of the root graph that it runs for.

    LangGraph passes that in the config of a subgraph. It differs from the latest one when an older
    checkpoint of the root graph is run again.
    """
    latest = checkpoint = namespace.latest()
    if latest is not None and namespace is not namespace.root:
        timeline = _timeline(namespace, latest, root_id, root)
        if timeline is not None:
            checkpoint = timeline.newest(namespace.all(), WriteLog(namespace), root_id)
    if checkpoint is None:
        return Position(None)
    return Position(checkpoint, namespace.attempt(checkpoint, rewound=checkpoint != latest))


def _timeline(
    namespace: Namespace, latest: Checkpoint, root_id: RootId, run_for: str | None
) -> Timeline | None:
    """Return the timeline of the root graph; None if the subgraph continues from its latest."""
    root = namespace.root
    now = root.latest() if root.was_rewound() else None
    if now is None:
        return None
    attempt = root.attempt(now)
    if run_for not in (None, now.key) and (other := root.find(run_for)) is not None:
        now, attempt = other, None
    if attempt is None and root_id(latest) == now.key:
        return None
    timeline = Timeline(root, now, attempt or _ANY, WriteLog(root).interrupted_at(now))
    is_of_one_task = ":" in namespace.address.ns
    return None if is_of_one_task and root_id(latest) not in timeline.attempts else timeline


def position_in_fork(
    namespace: Namespace,
    fork_point: Checkpoint,
    forked_at: float,
    interrupted_at: int,
    root_id: RootId,
) -> Checkpoint | None:
    """Return the checkpoint that a subgraph of a fork begins with; None for none.

    `namespace` is the subgraph in the thread that was forked, and `interrupted_at` is when the step
    of the fork point was interrupted. That step is still to be done in the fork.
    """
    log = WriteLog(namespace, until=forked_at)
    known = [c for c in namespace.all() if c.created_us <= forked_at or Links.of(c).copied]
    interrupted = [
        c for c in known if root_id(c) == fork_point.key and log.was_interrupted(c)
    ]  # fmt: skip
    if interrupted or not known:
        return interrupted[-1] if interrupted else None
    timeline = Timeline(namespace.root, fork_point, _NONE, interrupted_at)
    return timeline.newest(known, log, root_id)


class Timeline:
    """The path of the root graph to its present checkpoint, and which attempts led along it.

        A ── B ── C1              rewound to B, and run again: C2 is the result of the second
             └─── C2 ── D         attempt, whose name is "C1"

    At D, `attempts` is {"D": any, "C2": None, "B": "C1", "A": None}.
    """

    def __init__(self, root: Namespace, now: Checkpoint, attempt: str, interrupted_at: int) -> None:
        self._find = root.finder()
        self._now, self._interrupted_at = id_of(now), interrupted_at
        self.attempts: dict[str, str | None] = {self._now: attempt}
        child = now
        for checkpoint in root.session.history(now.id):
            if checkpoint.key:
                self.attempts.setdefault(checkpoint.key, Links.of(child).attempt)
                child = checkpoint

    def newest(
        self, checkpoints: Iterable[Checkpoint], log: WriteLog, root_id: RootId
    ) -> Checkpoint | None:
        """Return the newest of a subgraph's checkpoints that fits the timeline."""
        found: list[Checkpoint] = []
        interrupted = set[str]()
        for checkpoint in checkpoints:
            root = root_id(checkpoint) or ""
            if self._fits(checkpoint, root):
                found.append(checkpoint)
            elif (
                root in self.attempts
                and root not in interrupted
                and Links.of(checkpoint).root_attempt is None
                and log.was_interrupted(checkpoint)
            ):
                interrupted.add(root)  # the step waits there again
                found.append(checkpoint)
        return max(found, key=id_of, default=None)

    def _fits(self, checkpoint: Checkpoint, root: str) -> bool:
        if root not in self.attempts:  # a checkpoint of another branch, or one that is not there
            return not root or self._find(root) is None
        if self.attempts[root] in (_ANY, Links.of(checkpoint).root_attempt):
            return True
        return root == self._now and checkpoint.created_us <= self._interrupted_at
