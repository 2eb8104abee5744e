"""Delete, prune and copy whole threads, also those of another saver."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING

from holdfast import Checkpoint, Notes
from holdfast.adapters.langgraph.forks import is_placeholder
from holdfast.adapters.langgraph.names import AGENT, LINKS, REPLACES, Links, ThreadAddress, id_of
from holdfast.adapters.langgraph.namespace import NewCheckpoint
from holdfast.adapters.langgraph.writes import WriteLog, in_attempt
from holdfast.errors import InvalidRequest, SessionNotFound

if TYPE_CHECKING:
    from holdfast.adapters.langgraph.namespace import Namespace
    from holdfast.adapters.langgraph.threads import Threads

_DELTA_CHANNELS = "counters_since_delta_snapshot"
"""Metadata of LangGraph's: the channels that it rebuilds from their writes."""


def delete_thread(threads: Threads, thread: str) -> None:
    for namespace in threads.namespaces(thread):
        _detach_forks(threads, namespace)
        _delete(threads, namespace)


def _delete(threads: Threads, namespace: Namespace) -> None:
    with suppress(SessionNotFound):
        head = namespace.session.head
        if head is not None and not (is_placeholder(head) and head.agent == AGENT):
            Links.of(head)  # raises if it is not LangGraph's: then it is not deleted
        namespace.session.delete()
    threads.forget(namespace)


def delete_for_runs(threads: Threads, run_ids: Sequence[str]) -> None:
    doomed = _checkpoints_of_runs(threads, run_ids)
    while any(_detach_forks(threads, namespace, ids) for namespace, ids in doomed):
        doomed = _checkpoints_of_runs(threads, run_ids)  # a copy has the run_id, too
    _keep_positions(threads, [namespace for namespace, _ in doomed])
    for namespace, ids in doomed:
        namespace.delete_checkpoints(lambda c, ids=ids: c.id in ids)  # type: ignore[misc]


def _checkpoints_of_runs(
    threads: Threads, run_ids: Sequence[str]
) -> list[tuple[Namespace, set[str]]]:
    """Return the checkpoints that runs have made, by namespace."""
    found: dict[str, set[str]] = {}
    for run in run_ids:
        for checkpoint in threads.store.checkpoints(agent=AGENT, meta={"run_id": run}):
            found.setdefault(checkpoint.session, set()).add(checkpoint.id)
    return [
        (threads.namespace(ThreadAddress.from_session(name)), ids) for name, ids in found.items()
    ]


def prune(threads: Threads, thread: str) -> None:
    """Delete all checkpoints but the latest, and those that its delta channels are made of."""
    namespaces = threads.namespaces(thread)
    for namespace in namespaces:
        _detach_forks(threads, namespace)
    latest = _keep_positions(threads, namespaces)
    for namespace, checkpoint in zip(namespaces, latest, strict=True):
        needed = _needed(threads, namespace, checkpoint)
        namespace.delete_checkpoints(lambda c, needed=needed: c.id not in needed)  # type: ignore[misc]


def _needed(threads: Threads, namespace: Namespace, latest: Checkpoint | None) -> set[str]:
    """Return the latest checkpoint and its ancestors, until each delta channel has a value."""
    if latest is None:
        return set()
    find, needed = namespace.finder(), set[str]()
    missing = set(threads.metadata(latest).get(_DELTA_CHANNELS) or ())
    at: Checkpoint | None = latest
    while at is not None and at.id not in needed:
        needed.add(at.id)
        missing -= namespace.load(at).keys()
        parent = Links.of(at).parent
        at = find(parent) if missing and parent else None
    return needed


def copy_thread(threads: Threads, source: str, target: str) -> None:
    """Copy the checkpoints of a thread, and their pending writes, to another thread."""
    if source == target:
        raise InvalidRequest("a thread cannot be copied onto itself")
    for namespace in threads.namespaces(source):
        _copy(namespace, threads.namespace(ThreadAddress(target, namespace.address.ns)))


def _copy(source: Namespace, target: Namespace) -> None:
    log, load, checkpoints = WriteLog(source), source.loader(), source.all()
    for checkpoint in checkpoints:
        id, links = id_of(checkpoint), Links.of(checkpoint)
        meta = {k: v for k, v in checkpoint.meta.items() if k not in (LINKS, Notes.META)}
        target.save(
            NewCheckpoint(
                id, links.parent, load(checkpoint), meta, checkpoint.trigger, links.attempt,
                links.root_attempt,
            )
        )  # fmt: skip
        present = WriteLog(target).notes(target.find(id) or checkpoint)
        for note in log.notes(checkpoint):
            if note not in present:
                target.note(id, note)
    now, at = source.latest(), target.latest()
    copied = {c.key for c in checkpoints} == {c.key for c in target.all()}
    if copied and now and at and now.key != at.key:
        target.session.rewind(f"key:{now.key}")  # the source was rewound to it


def _detach_forks(threads: Threads, namespace: Namespace, doomed: set[str] | None = None) -> bool:
    """Before checkpoints are deleted, copy to each fork the one that it continues from.

    `doomed` has the ids of the checkpoints that will be deleted; None means all. Returns whether
    any was copied.
    """
    copied = False
    for name in chain.from_iterable(namespace.session.forks().values()):
        fork = threads.namespace(ThreadAddress.from_session(name))
        if not fork.address.ns:
            for subgraph in threads.namespaces(fork.address.thread):
                subgraph.create_fork()
        copied |= fork.detach(doomed)
        copied |= _detach_forks(threads, fork, doomed)
    return copied


def _keep_positions(threads: Threads, namespaces: Iterable[Namespace]) -> list[Checkpoint | None]:
    """Return where each graph continues, before the checkpoints after that are deleted.

    An attempt is named by a child. The child will be deleted, so the notes that count in that
    attempt replace the others.
    """
    positions = [(namespace, threads.position(namespace)) for namespace in namespaces]
    for namespace, (checkpoint, attempt) in positions:
        if checkpoint is not None and attempt is not None:
            notes = in_attempt(WriteLog(namespace).notes(checkpoint), attempt)
            namespace.note(id_of(checkpoint), {REPLACES: notes})
    return [checkpoint for _, (checkpoint, _) in positions]
