"""The threads of a store, and where their graphs continue after a fork or a rewind.

Each checkpoint of a subgraph belongs to the checkpoint of the root graph in whose step it was made
(`parents` in its metadata). A rewind of the thread moves the head of the root graph only:

    root graph      A ── B ── C ── D         rewound to B
    subgraph          s1   s2   s3           s1 belongs to A, s2 to B, s3 to C

The subgraph then continues from s1, because s2 and s3 are results of steps that were taken back.
But if s2 was interrupted, the step of B waits for an answer again: it continues from s2.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast import Checkpoint, Store
from holdfast.adapters.langgraph.names import AGENT, Links, ThreadAddress, id_of
from holdfast.adapters.langgraph.namespace import Namespace
from holdfast.adapters.langgraph.writes import WriteLog
from holdfast.errors import CheckpointNotFound

if TYPE_CHECKING:
    RootId = Callable[[Checkpoint], str | None]
    """Returns the id of the root graph's checkpoint that one of a subgraph belongs to."""

_KNOWN, _WITH_STATES = 4_096, 64
"""How many namespaces are remembered, and how many of them with their last state."""
_ANY, _NONE = "any", "none"
"""In place of an attempt: the results of every attempt count, or of none."""


class Threads:
    """The threads of a store. Remembers those that were used recently.

    `metadata` returns the metadata of a checkpoint, decoded.
    """

    def __init__(self, store: Store, metadata: Callable[[Checkpoint], Any]) -> None:
        self.store, self.metadata = store, metadata
        self._lock = threading.Lock()
        self._known: OrderedDict[ThreadAddress, Namespace] = OrderedDict()
        self._with_states: OrderedDict[ThreadAddress, Namespace] = OrderedDict()

    def namespace(self, address: ThreadAddress) -> Namespace:
        root = self.namespace(address.root) if address.ns else None
        with self._lock:
            found = self._known.get(address)
            if found is None:
                origin = partial(self._origin, address) if address.ns else None
                found = self._known[address] = Namespace(self.store, address, origin)
            if root is not None:
                found.root = root  # the old one may have been forgotten
            self._known.move_to_end(address)
            if len(self._known) > _KNOWN:
                self._known.popitem(last=False)
            self._with_states[address] = found
            self._with_states.move_to_end(address)
            unused = None
            if len(self._with_states) > _WITH_STATES:
                unused = self._with_states.popitem(last=False)[1]
        if unused is not None:
            unused.forget_states()
        return found

    def namespaces(self, thread: str) -> list[Namespace]:
        """Return the namespaces of a thread, the root graph's first."""
        names = sorted(self._subgraphs(thread))
        return [self.namespace(ThreadAddress(thread, ns)) for ns in ["", *names]]

    def all(self) -> list[Namespace]:
        """Return the namespaces of all threads, to read them. They are not remembered."""
        found = self.store.sessions(agent=AGENT)
        return [Namespace(self.store, ThreadAddress.from_session(info.name)) for info in found]

    def forget(self, namespace: Namespace) -> None:
        with self._lock:
            self._known.pop(namespace.address, None)
            self._with_states.pop(namespace.address, None)

    def position(self, namespace: Namespace, root: str | None = None) -> Position:
        """Return where a graph continues; see `position`."""
        return position(namespace, self._root_id, root)

    def _root_id(self, checkpoint: Checkpoint) -> str | None:
        found: str | None = (self.metadata(checkpoint).get("parents") or {}).get("")
        return found

    def _subgraphs(self, thread: str) -> set[str]:
        """Return the namespaces of a thread's subgraphs, including those that a fork inherits."""
        root = self.namespace(ThreadAddress(thread))
        prefix = f"{root.session.name}|"
        names = (info.name for info in self.store.sessions(after=prefix))
        own = takewhile(lambda name: name.startswith(prefix), names)
        found = {ThreadAddress.from_session(name).ns for name in own}
        with suppress(CheckpointNotFound):
            if (point := root.ancestry.fork_point()) is not None and not root.owns(point):
                found |= self._subgraphs(ThreadAddress.from_session(point.session).thread)
        return found

    def _origin(self, address: ThreadAddress) -> Checkpoint | None:
        """Return the checkpoint that a subgraph of a fork begins with: see `Ancestry`."""
        root = self.namespace(address.root)
        try:
            point = root.ancestry.fork_point()
        except CheckpointNotFound:
            root.check_fork_point()
            lost = ThreadAddress.from_session(root.ancestry.placeholders()[-1].parent_session or "")
            left = Namespace(self.store, lost._replace(ns=address.ns)).own()
            if any(c.created_us <= root.forked_at() for c in left):
                raise
            return None  # before it was deleted, the fork would have got it
        if point is None or not point.key or root.owns(point):
            return None
        forked = ThreadAddress.from_session(point.session)._replace(ns=address.ns)
        return position_in_fork(
            self.namespace(forked), point, root.forked_at(),
            WriteLog(root).interrupted_at(point), self._root_id,
        )  # fmt: skip


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
