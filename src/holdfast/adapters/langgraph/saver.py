"""The saver: LangGraph's interface over lines of checkpoints."""

from __future__ import annotations

import heapq
import random
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from langgraph.checkpoint.base import (
    WRITES_IDX_MAP,
    BaseCheckpointSaver,
    CheckpointTuple,
    get_checkpoint_metadata,
)

from holdfast.adapters.hosting import Host
from holdfast.adapters.langgraph.keeping import Keeping
from holdfast.adapters.langgraph.naming import (
    INSTEAD,
    OTHER,
    OURS,
    REST,
    Where,
    own_of,
)
from holdfast.adapters.langgraph.pacing import Pace, number_of
from holdfast.adapters.langgraph.pending import Pending
from holdfast.adapters.langgraph.subgraphs import Stand
from holdfast.adapters.langgraph.threads import Line
from holdfast.adapters.langgraph.values import Decoder, StrictSerializer, decode, encode
from holdfast.errors import CheckpointNotFound, InvalidRequest, NotFound
from holdfast.runs import notes

if TYPE_CHECKING:
    import builtins
    import os
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence

    from langchain_core.runnables import RunnableConfig
    from langgraph.checkpoint.base import (
        ChannelVersions,
        CheckpointMetadata,
        DeltaChannelHistory,
        PendingWrite,
    )
    from langgraph.checkpoint.base import Checkpoint as GraphCheckpoint
    from langgraph.checkpoint.serde.base import SerializerProtocol

    from holdfast.checkpoint import Checkpoint
    from holdfast.store import Store

_PLAIN = (str, int, float, bool, type(None))
_PAGE = 16


class _Reading(NamedTuple):
    """How the states of a line are read, and what those that were read have in common."""

    where: Where
    load: Callable[[Checkpoint], Any]
    pending: Pending
    decoder: Decoder


class HoldfastSaver(Keeping, BaseCheckpointSaver[str]):
    """Sync and async, and safe for threads.

    Types that LangGraph does not know as safe must be allowed by name, or reading them is refused;
    with `unknown="raw"` they are read as what they were made of. A `serde` of your own does as it
    likes.
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
        Keeping.__init__(self, Host(store))
        self._pace = Pace()

    def get_next_version(self, current: str | None, channel: None) -> str:  # noqa: ARG002
        apart = random.random()  # tells siblings apart
        following = f"{number_of(current) + 1:032}.{apart:016}"
        self._pace.step(current, following)
        return following

    # -- reading -------------------------------------------------------------------------------

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        line = self.line(Where.of(config))
        id = _asked(config)
        found, after = Stand(line.find(id)) if id else self.stand(line, _above(config))
        if found is None:
            return None
        with suppress(NotFound):  # unless it is deleted just now
            reading = self._reading(line, line.load)
            if after is None:
                return self._tuple(found, reading)
            return self._tuple(found, reading, reading.pending.left(found, after))
        return None

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        rows = [self._rows(line, config, filter, before) for line in self.lines_of(config)]
        merged = heapq.merge(*rows, key=lambda row: row[0].key or "", reverse=True)
        for checkpoint, reading in islice(merged, None if limit is None else max(limit, 0)):
            with suppress(NotFound):
                found = self._tuple(checkpoint, reading)
                yield found

    def _rows(
        self,
        line: Line,
        config: RunnableConfig | None,
        filter: dict[str, Any] | None,
        before: RunnableConfig | None,
    ) -> Iterator[tuple[Checkpoint, _Reading]]:
        reading = self._reading(line, line.series())
        id, end = _asked(config), _asked(before)
        if config is not None:
            line.check()
        found = line.descending() if id is None else _one(line.find(id))
        for checkpoint in found:
            if end is not None and (checkpoint.key or "") >= end:
                continue
            if filter:
                metadata = self.metadata(checkpoint)
                if any(metadata.get(name) != value for name, value in filter.items()):
                    continue
            yield checkpoint, reading

    def _reading(self, line: Line, load: Callable[[Checkpoint], Any]) -> _Reading:
        return _Reading(line.where, load, Pending(line, self.serde), Decoder(self.serde))

    def _tuple(
        self, checkpoint: Checkpoint, reading: _Reading, writes: Any = None
    ) -> CheckpointTuple:
        where, load, pending, decoder = reading
        state = load(checkpoint)
        rest = state.pop(REST)
        graph: Any = {name: decode(self.serde, value) for name, value in rest.items()}
        graph["channel_values"] = decoder.channels(state)
        parent = own_of(checkpoint)["parent"]
        return CheckpointTuple(
            where.config(checkpoint.key),
            graph,
            self.metadata(checkpoint),
            where.config(parent) if parent else None,
            pending.writes(checkpoint) if writes is None else writes,
        )

    def get_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        line = self.line(Where.of(config))
        id = _asked(config)
        at = line.find(id) if id else self.stand(line, _above(config)).at
        find = line.finder()
        _, load, pending, decoder = self._reading(line, line.series())
        writes: dict[str, builtins.list[PendingWrite]] = {name: [] for name in channels}
        seeds: dict[str, Any] = {}
        while at is not None and len(seeds) < len(writes):
            child, parent = at, own_of(at)["parent"]
            at = find(parent) if parent else None
            if at is None:
                if parent and line.is_forked():
                    raise CheckpointNotFound(
                        f"what channels of thread {line.where.thread!r} are made of was deleted "
                        "with the thread that it was forked from",
                        hint="undo() of that session brings it back, until gc() has freed it",
                    )
                break
            for write in reversed(pending.towards(at, child)):
                if write[1] in writes and write[1] not in seeds:
                    writes[write[1]].append(write)
            held = load(at)
            seeds |= {
                name: decoder.channel(name, held[name])
                for name in writes
                if name in held and name not in seeds
            }
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
        new_versions: ChannelVersions,  # noqa: ARG002 - what is new, the store finds out
    ) -> RunnableConfig:
        where = Where.of(config)
        line, id, parent = self.line(where), checkpoint["id"], _asked(config)
        rest: dict[str, Any] = {**checkpoint}
        values = rest.pop("channel_values")
        if REST in values:
            raise InvalidRequest(f"a channel may not be called {REST!r}")
        meta, other = {}, {}
        for name, value in get_checkpoint_metadata(config, metadata).items():
            if type(value) in _PLAIN and name not in (OURS, OTHER, notes.FROM):
                meta[name] = value
            else:
                other[name] = encode(self.serde, value, f"metadata.{name}")
        if other:
            meta[OTHER] = other
        state = line.encode(self.serde, values)
        state[REST] = {n: encode(self.serde, v, n) for n, v in rest.items()}
        with self._pace.saving(checkpoint["channel_versions"]):
            line.save(
                id, parent, state, meta, metadata.get("source"), thread=self.since(line, metadata)
            )
        return {"configurable": {**where.config(id)["configurable"], "thread_id": _thread(config)}}

    def put_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str = "",
    ) -> None:
        id = _asked(config)
        if id is None:
            raise InvalidRequest("the config names no checkpoint for these writes")
        self.line(Where.of(config)).note(id, self._facts(task_id, task_path, writes))

    def _facts(self, task: str, path: str, writes: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        encoded = [
            [WRITES_IDX_MAP.get(channel, n), channel, encode(self.serde, value, channel)]
            for n, (channel, value) in enumerate(writes)
        ]
        return {"task": task, "path": path, "writes": encoded}

    # -- the same for asyncio ------------------------------------------------------------------

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        return await self.host.call(self.get_tuple, config)

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
        if self._pace.is_far(checkpoint["channel_versions"]):  # then the loop has to wait
            return self.put(config, checkpoint, metadata, new_versions)
        return await self.host.call(self.put, config, checkpoint, metadata, new_versions)

    async def aput_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str = "",
    ) -> None:
        await self.host.call(self.put_writes, config, writes, task_id, task_path)

    async def adelete_thread(self, thread_id: str) -> None:
        await self.host.call(self.delete_thread, thread_id)

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        await self.host.call(self.delete_for_runs, run_ids)

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        await self.host.call(self.copy_thread, source_thread_id, target_thread_id)

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        await self.host.call(self.prune, thread_ids, strategy=strategy)

    async def aget_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        call = self.get_delta_channel_history
        return await self.host.call(call, config=config, channels=channels)

    # -- lines ---------------------------------------------------------------------------------

    def set_writes(self, where: Where, id: str, writes: Iterable[PendingWrite]) -> None:
        """These in place of all that a checkpoint has, in this order; at once."""
        tasks: dict[str, builtins.list[tuple[str, Any]]] = {}
        for task, channel, value in writes:
            tasks.setdefault(task, []).append((channel, value))
        found = [self._facts(task, f"{n:08}", each) for n, (task, each) in enumerate(tasks.items())]
        self.line(where).note(id, {INSTEAD: found})

    def writes(self, where: Where, id: str) -> builtins.list[PendingWrite] | None:
        """The writes of a checkpoint; None if it is not here."""
        line = self.line(where)
        found = line.find(id)
        return None if found is None else Pending(line, self.serde).writes(found)


def _asked(config: RunnableConfig | None) -> str | None:
    return config.get("configurable", {}).get("checkpoint_id") or None if config else None


def _above(config: RunnableConfig) -> str | None:
    """The checkpoint of the thread that a subgraph is run for."""
    found: str | None = (config.get("configurable", {}).get("checkpoint_map") or {}).get("")
    return found


def _thread(config: RunnableConfig) -> Any:
    return config["configurable"]["thread_id"]


def _one(found: Checkpoint | None) -> Iterator[Checkpoint]:
    if found is not None:
        yield found
