"""The saver: LangGraph's interface to the threads of a store."""

from __future__ import annotations

import asyncio
import heapq
import random
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import wraps
from itertools import islice
from typing import TYPE_CHECKING, Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeVar

from langgraph.checkpoint.base import (
    WRITES_IDX_MAP,
    BaseCheckpointSaver,
    CheckpointTuple,
    get_checkpoint_metadata,
)

from holdfast import Notes
from holdfast.adapters.base import Host, Hosted
from holdfast.adapters.langgraph import maintenance
from holdfast.adapters.langgraph.names import (
    CHECKPOINT,
    LINKS,
    OTHER,
    REPLACES,
    Links,
    ThreadAddress,
    id_of,
)
from holdfast.adapters.langgraph.namespace import Namespace, NewCheckpoint
from holdfast.adapters.langgraph.serde import Decoder, StrictSerializer, decode, encode
from holdfast.adapters.langgraph.threads import Threads
from holdfast.adapters.langgraph.writes import WriteLog, in_attempt, pending_writes, towards
from holdfast.errors import CheckpointNotFound, InvalidRequest, NotFound

if TYPE_CHECKING:
    import builtins
    import os
    from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Sequence

    from langchain_core.runnables import RunnableConfig
    from langgraph.checkpoint.base import (
        ChannelVersions,
        CheckpointMetadata,
        DeltaChannelHistory,
        PendingWrite,
    )
    from langgraph.checkpoint.base import Checkpoint as GraphCheckpoint
    from langgraph.checkpoint.serde.base import SerializerProtocol

    from holdfast import Checkpoint, Store
    from holdfast.adapters.langgraph.namespace import State
    from holdfast.adapters.langgraph.writes import Note


P = ParamSpec("P")
T = TypeVar("T")

AHEAD = 8
"""How many steps a graph may be ahead of the disk."""
_PATIENCE = 1.0
"""How long a step waits for any checkpoint to be saved, in seconds."""
_RECENT = 4_096
"""How many threads' versions are remembered."""
_PAGE = 16
_PLAIN = (str, int, float, bool, type(None))
"""Types of metadata that are stored as they are."""


class Pace:
    """Keeps a graph from running far ahead of the disk, with durability "async".

    LangGraph asks for a new version at the beginning of each step. It waits there if more than
    AHEAD steps are not saved.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._threads: OrderedDict[str, _Progress] = OrderedDict()
        """By the newest version of each thread."""

    def begin_step(self, current: str | None, following: str) -> None:
        """Begin the step from one version to the next. Wait while the thread is far ahead."""
        with self._changed:
            thread = self._threads.get(current or "") or _Progress(number_of(current))
            thread.asked = max(thread.asked, number_of(following))
            self._threads[following] = thread
            if len(self._threads) > _RECENT:
                self._threads.popitem(last=False)
            on_a_loop = _on_a_loop()
            while thread.is_far_ahead:
                if on_a_loop and not thread.saving:
                    break  # the loop must run, so that the next checkpoint is saved
                if not self._changed.wait(_PATIENCE):  # it may be saved only at the end of the run
                    thread.saves_each_step = False

    def is_far_ahead(self, versions: Mapping[str, Any]) -> bool:
        """Return whether too many steps after a checkpoint with these versions are not saved."""
        with self._changed:
            thread = self._threads.get(_newest(versions))
            return thread is not None and thread.is_far_ahead

    @contextmanager
    def saving(self, versions: Mapping[str, Any]) -> Iterator[None]:
        """Count the checkpoint with these versions as being saved, until the end of `with`."""
        newest = _newest(versions)
        with self._changed:
            thread = self._threads.get(newest)
            if thread is not None:
                thread.saves_each_step = True
                thread.saving += 1
        try:
            yield
        finally:
            if thread is not None:
                with self._changed:
                    thread.saving -= 1
                    thread.saved = max(thread.saved, number_of(newest))
                    thread.saves_each_step = thread.saved < thread.asked
                    self._changed.notify_all()


class _Progress:
    """The progress of a thread: the numbers of its newest requested and newest saved version."""

    def __init__(self, start: int) -> None:
        self.asked = self.saved = start
        self.saves_each_step = False
        """Whether checkpoints are saved while the graph runs, not only at its end."""
        self.saving = 0
        """How many checkpoints are being saved at this moment."""

    @property
    def is_far_ahead(self) -> bool:
        return self.saves_each_step and self.asked - self.saved > AHEAD


def number_of(version: str | float | None) -> int:
    """Return the number in a version of any saver: 7 for "7.0123"."""
    return int(str(version).partition(".")[0]) if version is not None else 0


def _newest(versions: Mapping[str, Any]) -> str:
    return max((v for v in versions.values() if isinstance(v, str)), default="")


def _on_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class _Reading(NamedTuple):
    """Shared by the reads of several checkpoints of a namespace."""

    namespace: Namespace
    load: Callable[[Checkpoint], State]
    log: WriteLog
    decoder: Decoder


class _Draft(NamedTuple):
    """A checkpoint that is encoded, before the store is used."""

    namespace: Namespace
    new: NewCheckpoint
    versions: ChannelVersions
    unchanged: ChannelVersions
    """Channels that get the parent's value, if the parent has them in these versions."""


def _in_worker(
    method: Callable[Concatenate[HoldfastSaver, P], T],
) -> Callable[Concatenate[HoldfastSaver, P], Coroutine[Any, Any, T]]:
    """Return a method for asyncio that calls this one, or that of a subclass, in a worker."""

    @wraps(method)
    async def call(self: HoldfastSaver, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.host.call(getattr(self, method.__name__), *args, **kwargs)

    return call


class HoldfastSaver(Hosted, BaseCheckpointSaver[str]):
    """Stores the checkpoints of LangGraph's graphs in a holdfast store.

    Serves sync and async graphs, and is safe for threads. A store that it opens itself is closed
    with it.

    It stores and reads the types that LangGraph considers safe, those that the schemas of its
    graphs name, and those in `allow`. A value of another type raises NotSerializable when it is
    stored, and UnsupportedFormat when it is read; with `unknown="raw"` it is read as plain data.
    With another `serde`, that serializer decides.
    """

    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        *,
        allow: Iterable[tuple[str, ...] | type] = (),
        unknown: Literal["raise", "raw"] = "raise",
        serde: SerializerProtocol | None = None,
    ) -> None:
        BaseCheckpointSaver.__init__(self, serde=serde or StrictSerializer(allow, unknown))
        self.host = Host(store)
        self._threads = Threads(self.store, self._metadata)
        self._pace = Pace()
        self._allowing = threading.Lock()

    def get_next_version(self, current: str | None, channel: None) -> str:  # noqa: ARG002
        following = f"{number_of(current) + 1:032}.{random.random():016}"  # siblings differ
        self._pace.begin_step(current, following)
        return following

    def with_allowlist(
        self, extra_allowlist: Collection[tuple[str, ...]]
    ) -> BaseCheckpointSaver[str]:
        """Return a saver for a graph whose schemas name these types.

        From now on, this saver allows them as well, so that it can read what its graphs have
        stored.
        """
        graph = super().with_allowlist(extra_allowlist)
        if isinstance(self.serde, StrictSerializer):
            with self._allowing:
                self.serde = self.serde.with_msgpack_allowlist({*extra_allowlist})
        return graph

    # -- reading -------------------------------------------------------------------------------

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        namespace = self._namespace(config)
        id, attempt = _checkpoint_id(config), None
        if id is not None:
            found = namespace.find(id)
        else:
            found, attempt = self._threads.position(namespace, _root_checkpoint(config))
        if found is None:
            return None
        with suppress(NotFound):  # it was just deleted
            reading = self._reading(namespace, namespace.load_to_continue)
            notes = reading.log.notes(found)
            return self._tuple(
                found, reading, notes if attempt is None else in_attempt(notes, attempt)
            )
        return None

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        if config is None:
            namespaces = self._threads.all()
        else:
            address = ThreadAddress.from_config(config)
            if config["configurable"].get("checkpoint_ns") is None:
                namespaces = self._threads.namespaces(address.thread)
            else:
                namespaces = [self._threads.namespace(address)]
        found = [self._matching(namespace, config, filter, before) for namespace in namespaces]
        merged = heapq.merge(*found, key=lambda row: id_of(row[0]), reverse=True)
        for checkpoint, reading in islice(merged, None if limit is None else max(limit, 0)):
            with suppress(NotFound):  # it was just deleted
                yield self._tuple(checkpoint, reading, reading.log.notes(checkpoint))

    def _matching(
        self,
        namespace: Namespace,
        config: RunnableConfig | None,
        filter: dict[str, Any] | None,
        before: RunnableConfig | None,
    ) -> Iterator[tuple[Checkpoint, _Reading]]:
        reading = self._reading(namespace, namespace.loader())
        id, end = _checkpoint_id(config), _checkpoint_id(before)
        if config is not None:
            namespace.check_fork_point()
        if id is None:
            found = namespace.descending()
        else:
            found = (c for c in [namespace.find(id)] if c is not None)
        for checkpoint in found:
            if end is not None and id_of(checkpoint) >= end:
                continue
            if filter:
                metadata = self._metadata(checkpoint)
                if any(metadata.get(name) != value for name, value in filter.items()):
                    continue
            yield checkpoint, reading

    def _reading(self, namespace: Namespace, load: Callable[[Checkpoint], State]) -> _Reading:
        return _Reading(namespace, load, WriteLog(namespace), Decoder(self.serde))

    def _tuple(
        self, checkpoint: Checkpoint, reading: _Reading, notes: builtins.list[Note]
    ) -> CheckpointTuple:
        state = {**reading.load(checkpoint)}
        rest = state.pop(CHECKPOINT)
        graph: Any = {name: decode(self.serde, value) for name, value in rest.items()}
        graph["channel_values"] = reading.decoder.channels(state)
        address, parent = reading.namespace.address, Links.of(checkpoint).parent
        return CheckpointTuple(
            address.config(checkpoint.key),
            graph,
            self._metadata(checkpoint),
            address.config(parent) if parent else None,
            pending_writes(self.serde, notes),
        )

    def _metadata(self, checkpoint: Checkpoint) -> Any:
        meta = {**checkpoint.meta}
        other = meta.pop(OTHER, {})
        for name in (LINKS, Notes.META):
            meta.pop(name)
        return meta | {name: decode(self.serde, value) for name, value in other.items()}

    def get_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        namespace, id = self._namespace(config), _checkpoint_id(config)
        root = _root_checkpoint(config)
        at = namespace.find(id) if id else self._threads.position(namespace, root).checkpoint
        reading = self._reading(namespace, namespace.loader())
        writes: dict[str, builtins.list[PendingWrite]] = {name: [] for name in channels}
        seeds: dict[str, Any] = {}
        for checkpoint, child in _ancestors(namespace, at):
            notes = towards(reading.log.notes(checkpoint), child)
            for write in reversed(pending_writes(self.serde, notes)):
                if write[1] in writes and write[1] not in seeds:
                    writes[write[1]].append(write)
            state = reading.load(checkpoint)
            for name in writes:
                if name in state and name not in seeds:
                    seeds[name] = reading.decoder.channel(name, state[name])
            if len(seeds) == len(writes):
                break
        history: dict[str, DeltaChannelHistory] = {}
        for name, found in writes.items():
            history[name] = {"writes": found[::-1]}
            if name in seeds:
                history[name]["seed"] = seeds[name]
        return history

    # -- writing -------------------------------------------------------------------------------

    def put(
        self,
        config: RunnableConfig,
        checkpoint: GraphCheckpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        return self._save(config, self._draft(config, checkpoint, metadata, new_versions))

    def _draft(
        self,
        config: RunnableConfig,
        checkpoint: GraphCheckpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> _Draft:
        """Encode a checkpoint, without using the store: its values may change at any time.

        LangGraph still adds to the set of a fan-in after handing it over. So a channel that is not
        in `new_versions` gets the parent's value.
        """
        namespace, parent = self._namespace(config), _checkpoint_id(config)
        rest: dict[str, Any] = {**checkpoint}
        values, versions = rest.pop("channel_values"), checkpoint["channel_versions"]
        if CHECKPOINT in values:
            raise InvalidRequest(f"a channel may not be called {CHECKPOINT!r}")
        unchanged = {n: versions[n] for n in values if n in versions and n not in new_versions}
        known = namespace.cached_state(parent)
        state: State = {}
        if known is not None:
            state, unchanged = self._values_of(known, unchanged), {}
        state |= namespace.encode(self.serde, {n: v for n, v in values.items() if n not in state})
        state[CHECKPOINT] = {n: encode(self.serde, v, n) for n, v in rest.items()}
        meta = self._meta(config, metadata)
        root = metadata.get("parents") if namespace.address.ns else None
        attempt = namespace.root.current_attempt(root.get("", "")) if root else None
        source = metadata.get("source")
        new = NewCheckpoint(checkpoint["id"], parent, state, meta, source, root_attempt=attempt)
        return _Draft(namespace, new, {**versions}, unchanged)

    def _values_of(self, parent: State, wanted: ChannelVersions) -> State:
        """Return the wanted channels that a state has in the same version, as stored."""
        if not wanted:
            return {}
        versions = decode(self.serde, parent[CHECKPOINT].get("channel_versions", {}))
        return {n: parent[n] for n, v in wanted.items() if n in parent and versions.get(n) == v}

    def _meta(self, config: RunnableConfig, metadata: CheckpointMetadata) -> dict[str, Any]:
        meta, other = {}, {}
        for name, value in get_checkpoint_metadata(config, metadata).items():
            if type(value) in _PLAIN and name not in (LINKS, OTHER, Notes.META):
                meta[name] = value
            else:
                other[name] = encode(self.serde, value, f"metadata.{name}")
        if other:
            meta[OTHER] = other
        return meta

    def _save(self, config: RunnableConfig, draft: _Draft) -> RunnableConfig:
        namespace, new, versions, unchanged = draft
        if new.parent is not None and unchanged:
            with suppress(NotFound):
                found = namespace.find(new.parent)
                if found is not None:
                    new.state.update(self._values_of(namespace.load(found), unchanged))
        with self._pace.saving(versions):
            namespace.save(new)
        saved = namespace.address.config(new.id)["configurable"]
        return {"configurable": {**saved, "thread_id": config["configurable"]["thread_id"]}}

    def put_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str = "",
    ) -> None:
        note = self._note(task_id, task_path, writes)
        self._namespace(config).note(_checkpoint_of_writes(config), note)

    def _note(self, task: str, path: str, writes: Iterable[tuple[str, Any]]) -> Note:
        encoded = [
            [WRITES_IDX_MAP.get(channel, n), channel, encode(self.serde, value, channel)]
            for n, (channel, value) in enumerate(writes)
        ]
        return {"task": task, "path": path, "writes": encoded}

    def set_writes(self, address: ThreadAddress, id: str, writes: Iterable[PendingWrite]) -> None:
        """Replace all writes of a checkpoint by these, in this order. All or nothing."""
        tasks: dict[str, builtins.list[tuple[str, Any]]] = {}
        for task, channel, value in writes:
            tasks.setdefault(task, []).append((channel, value))
        notes = [self._note(task, f"{n:08}", each) for n, (task, each) in enumerate(tasks.items())]
        self._threads.namespace(address).note(id, {REPLACES: notes})

    def writes(self, address: ThreadAddress, id: str) -> builtins.list[PendingWrite] | None:
        """Return the writes of a checkpoint; None if the store does not have the checkpoint."""
        namespace = self._threads.namespace(address)
        found = namespace.find(id)
        if found is None:
            return None
        return pending_writes(self.serde, WriteLog(namespace).notes(found))

    def _namespace(self, config: RunnableConfig) -> Namespace:
        return self._threads.namespace(ThreadAddress.from_config(config))

    # -- whole threads -------------------------------------------------------------------------

    def delete_thread(self, thread_id: str) -> None:
        """Delete a thread. `undo()` of its sessions restores it, until `gc()` of the store."""
        maintenance.delete_thread(self._threads, str(thread_id))

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Delete the checkpoints of runs, in forks too. A thread that has no other is deleted."""
        maintenance.delete_for_runs(self._threads, run_ids)

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Delete the checkpoints of threads: all, or all but the latest.

        With "keep_latest", the checkpoints from which its delta channels are built stay, too.
        """
        if strategy not in ("keep_latest", "delete"):
            raise InvalidRequest(
                f"there is no strategy {strategy!r}", hint='"keep_latest" or "delete"'
            )
        prune = maintenance.prune if strategy == "keep_latest" else maintenance.delete_thread
        for thread in thread_ids:
            prune(self._threads, str(thread))

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Copy a thread with its subgraphs and pending writes."""
        maintenance.copy_thread(self._threads, str(source_thread_id), str(target_thread_id))

    # -- the same for asyncio ------------------------------------------------------------------

    async def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        found = self.list(config, filter=filter, before=before, limit=limit)
        while page := await self.host.call(lambda: [*islice(found, _PAGE)]):
            for each in page:
                yield each

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: GraphCheckpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        draft = self._draft(
            config, checkpoint, metadata, new_versions
        )  # on the loop, so nothing changes it
        if self._pace.is_far_ahead(draft.versions):
            return self._save(config, draft)  # blocks the loop, and with it the graph
        return await self.host.call(self._save, config, draft)

    async def aput_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str = "",
    ) -> None:
        namespace, id = self._namespace(config), _checkpoint_of_writes(config)
        note = self._note(task_id, task_path, writes)  # on the loop, so nothing changes it
        await self.host.call(namespace.note, id, note)

    aget_tuple = _in_worker(get_tuple)
    aget_delta_channel_history = _in_worker(get_delta_channel_history)
    adelete_thread = _in_worker(delete_thread)
    adelete_for_runs = _in_worker(delete_for_runs)
    acopy_thread = _in_worker(copy_thread)
    aprune = _in_worker(prune)


def _ancestors(
    namespace: Namespace, child: Checkpoint | None
) -> Iterator[tuple[Checkpoint, Checkpoint]]:
    """Yield the ancestors of a checkpoint, nearest first, each with its child.

    Raises CheckpointNotFound at one that a fork has lost with the thread that it was forked from.
    """
    find = namespace.finder()
    while child is not None and (parent := Links.of(child).parent):
        found = find(parent)
        if found is not None:
            yield found, child
        elif namespace.ancestry.is_fork():
            raise CheckpointNotFound(
                f"what channels of thread {namespace.address.thread!r} are made of was deleted "
                "with the thread that it was forked from",
                hint="undo() of that session brings it back, until gc() has freed it",
            )
        child = found


def _root_checkpoint(config: RunnableConfig) -> str | None:
    """Return the id of the root graph's checkpoint that a subgraph runs for, if it is known."""
    found: str | None = (config.get("configurable", {}).get("checkpoint_map") or {}).get("")
    return found


def _checkpoint_id(config: RunnableConfig | None) -> str | None:
    return config.get("configurable", {}).get("checkpoint_id") or None if config else None


def _checkpoint_of_writes(config: RunnableConfig) -> str:
    id = _checkpoint_id(config)
    if id is None:
        raise InvalidRequest("the config names no checkpoint for these writes")
    return id
