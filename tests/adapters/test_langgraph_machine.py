"""A state machine in which the saver must equal LangGraph's own, whatever the order of things.

The model is LangGraph's saver in memory, with the methods that this one lacks. The saver under test
is two of them, each with a store of its own on the same data, as two processes have. The values of
a thread are changed in place between its checkpoints.

Left out, because meant: another checkpoint under the same id is refused; an id that was deleted is
not used again, unless with its whole thread; writes that precede their checkpoint come from the
saver that puts it, and not before a prune.
"""

from __future__ import annotations

import copy
import random
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langgraph.checkpoint.base import CheckpointTuple, empty_checkpoint
from langgraph.checkpoint.memory import InMemorySaver

import holdfast
from holdfast.adapters.langgraph import (
    HoldfastSaver,
)
from holdfast.adapters.langgraph.names import LINKS, ThreadAddress
from holdfast.errors import KeyTaken
from tests.mutants import langgraph

SEEDS = st.integers(0, 2**32)
WHICH = st.integers(0, 1)
Place = tuple[Any, str]
"""A thread and a namespace."""
THREADS: list[Any] = ["t", "t|n", "t%7Cn", 7]
NAMESPACES = ["", "n", "n:1|m:2", "%7C"]
OFTEN = ["t"] * 4
PLACES = st.one_of(
    *[st.just(("t", ""))] * 3,
    st.tuples(st.sampled_from([*OFTEN, *THREADS]), st.sampled_from(NAMESPACES)),
)
COPIES = ["c", "c|%"]
CHANNELS = ["messages", "log", "note", "plan"]
WRITTEN = [*CHANNELS, "__error__", "__interrupt__", "__resume__", "__scheduled__"]
RUNS = ["r0", "r1", "r2"]
SCALARS: list[Any] = [None, True, False, 0, 1, 1.0, -1, 2**40, "", "1", "ü\n|%", b"", b"\0x", 0.5]
IDS = 60


def where(place: Place, id: str | None = None, **more: Any) -> Any:
    asked = {"thread_id": place[0], "checkpoint_ns": place[1], **more}
    return {"configurable": asked | ({"checkpoint_id": id} if id else {})}


def place_of(config: Any) -> tuple[str, str, str]:
    asked = config["configurable"]
    return str(asked["thread_id"]), asked["checkpoint_ns"], asked["checkpoint_id"]


# -- values, and how they change -----------------------------------------------------------------


def thing(rng: random.Random, depth: int = 2) -> Any:
    roll = rng.random()
    if not depth or roll < 0.4:
        return rng.choice(SCALARS)
    inner = [thing(rng, depth - 1) for _ in range(rng.randrange(4))]
    if roll < 0.55:
        return inner
    if roll < 0.65:
        return tuple(inner)
    if roll < 0.7:
        return {*rng.choices(["a", 1, 2.5], k=2)}
    if roll < 0.8:
        return message(rng)
    keys = rng.sample(["a", "b", 1, "$ext", "of", "$serde", "data"], len(inner))
    return dict(zip(keys, inner, strict=True))


def message(rng: random.Random) -> BaseMessage:
    text, id = rng.choice(["", "hello", "x" * 300]), f"m{rng.randrange(4)}"
    kind = rng.randrange(3)
    if kind == 0:
        return HumanMessage(text, id=id)
    if kind == 1:
        return ToolMessage([text, {"type": "text", "text": text}], tool_call_id=id)
    call: Any = {"name": "tool", "args": {"n": rng.choice(SCALARS[:5])}, "id": id}
    extra = {"n": rng.choice([0, 1, True]), "l": [1, {"deep": []}]}
    return AIMessage(text, tool_calls=[{**call, "type": "tool_call"}], additional_kwargs=extra)


def edit(rng: random.Random, item: Any) -> None:
    """Change it in place, if it can be changed."""
    if isinstance(item, AIMessage):
        inside: Any = rng.choice(
            [item.additional_kwargs, item.additional_kwargs["l"], item.tool_calls[0]["args"]]
        )
        if type(inside) is list:
            inside[0] = 1 if inside[0] is True else True
        else:
            inside["n"] = rng.choice(SCALARS[:6])
    elif isinstance(item, BaseMessage):
        if rng.random() < 0.5:
            item.content = rng.choice(["", "hello", "edited"])
        else:
            item.additional_kwargs[rng.choice("ab")] = thing(rng, 1)
    elif type(item) is dict:
        item[rng.choice(["a", "b"])] = thing(rng, 1)
    elif type(item) is list:
        item.append(rng.choice(SCALARS))


def turn(rng: random.Random, live: dict[str, Any]) -> None:
    """One step of a graph: it changes its channels, mostly by adding to them."""
    for name in rng.sample(CHANNELS, rng.choice([0, 1, 1, 2])):
        value, roll = live.get(name), rng.random()
        if name in ("note", "plan"):
            if roll < 0.2:
                live.pop(name, None)
            elif roll < 0.5:
                edit(rng, value)
            else:
                live[name] = thing(rng)
            continue
        if type(value) is not list or roll < 0.05:
            live[name] = [message(rng)] if name == "messages" else [thing(rng)]
            continue
        new = message(rng) if name == "messages" else thing(rng)
        if roll < 0.5:
            live[name] = [*value, new]
        elif roll < 0.6:
            value.append(new)  # the same list
        elif roll < 0.7 and value:
            edit(rng, rng.choice(value))
        elif roll < 0.75 and value:
            value.append(copy.deepcopy(rng.choice(value)))
        elif roll < 0.8 and value:
            value.append(rng.choice(value))  # the same object twice
        elif roll < 0.85 and value:
            value[rng.randrange(len(value))] = new
        elif roll < 0.9:
            rng.shuffle(value)
        elif roll < 0.95:
            live[name] = value[: rng.randrange(len(value) + 1)]
        else:
            live.pop(name)


# -- strict equality -----------------------------------------------------------------------------


def exact(value: Any) -> Any:
    """What is the same for the same value only: 1 is not True."""
    if isinstance(value, BaseMessage):
        return type(value).__name__, exact(value.__dict__), exact(value.__pydantic_extra__)
    if type(value) is dict:
        return "dict", [(exact(key), exact(inner)) for key, inner in value.items()]
    if type(value) in (list, tuple):
        return type(value).__name__, [exact(inner) for inner in value]
    return type(value).__name__, repr(sorted(value, key=repr) if type(value) is set else value)


def by_name(named: Any) -> Any:
    return {name: exact(value) for name, value in named.items()}


def shown(found: CheckpointTuple | None) -> Any:
    if found is None:
        return None
    checkpoint: Any = {**found.checkpoint}
    return {
        "at": place_of(found.config),
        "values": by_name(checkpoint.pop("channel_values")),
        "rest": by_name(checkpoint),
        "metadata": by_name(found.metadata),
        "parent": place_of(found.parent_config) if found.parent_config else None,
        "writes": [exact(write) for write in found.pending_writes or ()],
    }


def asks(found: Any) -> bool:
    """Whether there is a question among the writes of what is shown, or an answer."""
    return "__interrupt__" in str(found["writes"]) or "__resume__" in str(found["writes"])


def containers(value: Any) -> list[Any]:
    """All that can be changed in a value."""
    if isinstance(value, BaseMessage):
        return [value, *containers([*value.__dict__.values()])[1:]]
    if type(value) is dict:
        return [value, *(c for inner in value.values() for c in containers(inner))]
    if type(value) in (list, tuple):
        own = [value] if type(value) is list else []
        return [*own, *(c for inner in value for c in containers(inner))]
    return []


# -- the model -----------------------------------------------------------------------------------


class Model(InMemorySaver):
    """LangGraph's saver, with what it lacks. Its threads are strings."""

    def all(self, config: Any = None, **options: Any) -> dict[tuple[str, str, str], Any]:
        """What it lists, by place and id."""
        return {place_of(found.config): shown(found) for found in self.list(config, **options)}

    def ids(self, place: Place) -> list[str]:
        return sorted(self.storage[str(place[0])][place[1]])

    def drop(self, thread: str, ns: str, id: str) -> None:
        del self.storage[thread][ns][id]
        self.writes.pop((thread, ns, id), None)

    def prune(self, thread_ids: Any, *, strategy: str = "keep_latest") -> None:
        for thread in thread_ids:
            if strategy == "delete":
                self.delete_thread(thread)
                continue
            for ns, held in self.storage[thread].items():
                for id in sorted(held)[:-1]:
                    self.drop(thread, ns, id)

    def delete_for_runs(self, run_ids: Any) -> None:
        for found in [*self.list(None)]:
            if found.metadata.get("run_id") in run_ids:
                self.drop(*place_of(found.config))

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        for ns, held in self.storage[source_thread_id].items():
            self.storage[target_thread_id][ns].update(held)
            for id in held:
                writes = self.writes.get((source_thread_id, ns, id), {})
                self.writes[target_thread_id, ns, id].update(writes)
        for (thread, *more), blob in [*self.blobs.items()]:
            if thread == source_thread_id:
                self.blobs[(target_thread_id, *more)] = blob  # type: ignore[index]

    def is_tree(self, place: Place, id: str) -> bool:
        """Whether the ancestors of a checkpoint come to an end."""
        held, seen = self.storage[str(place[0])][place[1]], set()
        at: Any = id
        while at in held and at not in seen:
            seen.add(at)
            at = held[at][2]
        return at not in seen


class SaverMachine(RuleBasedStateMachine):
    """Subclasses say what the two savers are on."""

    def open(self) -> list[holdfast.Store]:
        """The stores of the two."""
        raise NotImplementedError

    def close(self) -> None:
        for store in self.stores:
            store.close()

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-machine-"))
        self.stores = self.open()
        self.savers = [HoldfastSaver(store) for store in self.stores]
        self.model = Model()
        self.live: dict[Place, dict[str, Any]] = {}
        self.newest: dict[Place, str] = {}
        self.puts: dict[tuple[Place, str], Any] = {}
        self.early: dict[tuple[Place, str], int | None] = {}
        """Of writes without their checkpoint: by whom they are; None if it may not come."""
        self.buried: set[tuple[str, str, str]] = set()
        self.steps = 0

    def teardown(self) -> None:
        if hasattr(self, "model"):
            for which in (0, 1):
                self.compare_all(which)
            assert self.stores[0].verify(read_data=True).ok
            self.close()
            shutil.rmtree(self.folder)

    def known(self, place: Place, id: str) -> bool:
        return id in self.model.storage[str(place[0])][place[1]]

    # -- writing ---------------------------------------------------------------------------------

    @rule(
        place=PLACES, which=WHICH, seed=SEEDS,
        rising=st.booleans(), onward=st.sampled_from([True, True, False]),
    )  # fmt: skip
    def put(self, place: Place, which: int, seed: int, rising: bool, onward: bool) -> None:
        self.put_one(place, which, random.Random(seed), rising, onward)

    @rule(place=PLACES, which=WHICH, seed=SEEDS, count=st.integers(2, 8))
    def run(self, place: Place, which: int, seed: float, count: int) -> None:
        """A graph goes on, and nobody looks at it meanwhile."""
        rng = random.Random(seed)
        for _ in range(count):
            ids = self.model.ids(place)
            id = f"{int(ids[-1]) + 1 if ids else 0:08}"
            if rng.random() < 0.3 and int(id) < IDS and self.may_come(place, id, which):
                self.write_one(place, which, rng, id)
            self.put_one(place, which, rng, rising=True, onward=True)
            if place in self.newest and rng.random() < 0.5:
                self.write_one(place, which, rng, self.newest[place])

    def put_one(
        self, place: Place, which: int, rng: random.Random, rising: bool, onward: bool
    ) -> None:
        ids = self.model.ids(place)
        low = int(ids[-1]) + rng.choice([1, 1, 3]) if rising and ids else 0
        free = [id for n in range(low, IDS) if self.may_come(place, id := f"{n:08}", which)]
        if not free:
            return
        late = [id for id in free if ids and id < ids[-1]]
        awaited = [id for id in free if (place, id) in self.early]
        id = (awaited or free)[0] if rising else rng.choice(late or free)
        parent = self.newest.get(place)
        if not onward:
            parent = rng.choice([None, "unknown", id, *ids])
        live = self.live.setdefault(place, {})
        turn(rng, live)
        versions: Any = {name: f"{self.steps}.{id}.{rng.random()}" for name in live}
        checkpoint: Any = {**empty_checkpoint(), "id": id, "channel_values": {**live}}
        checkpoint |= {"channel_versions": versions, "versions_seen": {"node": versions}}
        metadata: Any = {
            "source": rng.choice(["input", "loop"]), "step": rng.randrange(3),
            "run_id": rng.choice(RUNS), "writes": thing(rng, 1),
        }  # fmt: skip
        asked = where(place, parent, user="someone")
        self.puts[place, id] = copy.deepcopy((asked, checkpoint, metadata))
        done = self.savers[which].put(asked, checkpoint, metadata, versions)
        assert done == where(place, id)
        self.model.put(where((str(place[0]), place[1]), parent, user="someone"), checkpoint,
                       metadata, versions)  # fmt: skip
        self.newest[place] = id
        self.early.pop((place, id), None)

    def may_come(self, place: Place, id: str, which: int) -> bool:
        if self.known(place, id) or (str(place[0]), place[1], id) in self.buried:
            return False
        return self.early.get((place, id), which) == which

    @precondition(lambda self: self.puts)
    @rule(data=st.data(), which=WHICH, other=st.booleans())
    def put_again(self, data: st.DataObject, which: int, other: bool) -> None:
        place, id = data.draw(st.sampled_from(sorted(self.puts, key=str)))
        if not self.known(place, id):
            return
        asked, checkpoint, metadata = copy.deepcopy(self.puts[place, id])
        if other:
            checkpoint["channel_values"]["other"] = "value"
            with pytest.raises(KeyTaken):
                self.savers[which].put(asked, checkpoint, metadata, {})
        else:
            assert self.savers[which].put(asked, checkpoint, metadata, {}) == where(place, id)

    @rule(place=PLACES, which=WHICH, seed=SEEDS, ahead=st.integers(0, 3))
    def write(self, place: Place, which: int, seed: int, ahead: int) -> None:
        rng, ids = random.Random(seed), self.model.ids(place)
        if ahead or not ids:
            id = f"{min((int(ids[-1]) if ids else 0) + ahead, IDS - 1):08}"
        else:
            id = rng.choice(ids)
        if (str(place[0]), place[1], id) not in self.buried:
            self.write_one(place, which, rng, id)

    def write_one(self, place: Place, which: int, rng: random.Random, id: str) -> None:
        if not self.known(place, id):
            before = self.early.setdefault((place, id), which)
            if before != which:
                self.early[place, id] = None
        writes = [(rng.choice(WRITTEN), thing(rng, 1)) for _ in range(rng.choice([0, 1, 2, 4]))]
        task, path = rng.choice(["task 0", "task 1"]), rng.choice(["", "~a", "~b"])
        self.savers[which].put_writes(where(place, id), writes, task, path)
        self.model.put_writes(where((str(place[0]), place[1]), id), writes, task, path)

    # -- keeping house ---------------------------------------------------------------------------

    @rule(thread=st.sampled_from([*THREADS, *COPIES]), which=WHICH, prune=st.booleans())
    def delete_thread(self, thread: Any, which: int, prune: bool) -> None:
        if prune:
            self.savers[which].prune([thread], strategy="delete")
        else:
            self.savers[which].delete_thread(thread)
        self.model.delete_thread(str(thread))
        self.buried = {at for at in self.buried if at[0] != str(thread)}
        self.early = {at: by for at, by in self.early.items() if at[0][0] != thread}

    @rule(thread=st.sampled_from([*OFTEN, *THREADS]), which=WHICH)
    def prune(self, thread: Any, which: int) -> None:
        before = self.model.all()
        self.savers[which].prune([thread])
        self.model.prune([str(thread)])
        self.bury(before)
        self.early |= {at: None for at in self.early if at[0][0] == thread}

    @rule(runs=st.lists(st.sampled_from([*RUNS, "none"]), max_size=2), which=WHICH)
    def delete_for_runs(self, runs: list[str], which: int) -> None:
        before = self.model.all()
        self.savers[which].delete_for_runs(runs)
        self.model.delete_for_runs(runs)
        self.bury(before)
        self.early = dict.fromkeys(self.early)

    def bury(self, before: dict[tuple[str, str, str], Any]) -> None:
        self.buried |= before.keys() - self.model.all().keys()

    @rule(source=st.sampled_from([*OFTEN, *THREADS]), onto=st.sampled_from(COPIES), which=WHICH)
    def copy_thread(self, source: Any, onto: str, which: int) -> None:
        """Onto what is free, or is but a copy of the same."""
        new = {at[1:] for at in self.model.all() if at[0] == str(source)}
        gone = {at[1:] for at in self.buried if at[0] == onto}
        there = {at[1:] for at in self.model.all() if at[0] == onto}
        if new & (gone | there):
            return
        self.savers[which].copy_thread(source, onto)
        self.model.copy_thread(str(source), onto)

    @rule(place=PLACES, which=WHICH, other=WHICH, seed=SEEDS, count=st.integers(1, 3))
    def keep_house_while_it_runs(
        self, place: Place, which: int, other: int, seed: int, count: int
    ) -> None:
        """A graph goes on from what is not there any more."""
        rng = random.Random(seed)
        self.run(place, which, rng.random(), count)
        roll = rng.random()
        if roll < 0.5:
            self.delete_for_runs([rng.choice(RUNS)], other)
        elif roll < 0.8:
            self.prune(place[0], other)
        else:
            self.delete_thread(place[0], other, prune=False)
        if rng.random() < 0.3:
            self.gc(other)
        self.run(place, which, rng.random(), count)

    # -- going back, and other ways ---------------------------------------------------------------

    @rule(thread=st.sampled_from([*OFTEN, *THREADS]), which=WHICH, seed=SEEDS)
    def rewind(self, thread: Any, which: int, seed: int) -> None:
        """What is chosen is the latest, with all in the history; and it is undone."""
        session, chosen = self.chosen(thread, which, seed)
        if chosen is None or chosen.meta[LINKS]["latest"] != chosen.key:
            return
        saver, place = HoldfastSaver(self.stores[which]), (thread, "")
        children = [
            c for c in session.tree()
            if c.seq > chosen.seq and c.meta[LINKS]["parent"] == chosen.key
        ]  # fmt: skip
        session.rewind(chosen.id)
        expected = self.model.all(where((str(thread), "")))[str(thread), "", chosen.key]
        got = shown(saver.get_tuple(where(place)))
        if children:
            expected |= {"writes": got["writes"] if asks(expected) else []}
        assert got == expected
        self.compare_list(which, where(place), None)
        session.undo()

    @rule(thread=st.sampled_from([*OFTEN, *THREADS]), which=WHICH, seed=SEEDS, gc=st.booleans())
    def fork(self, thread: Any, which: int, seed: int, gc: bool) -> None:
        """It has what led to its first checkpoint, goes on alone, and is deleted again."""
        session, chosen = self.chosen(thread, which, seed)
        if chosen is None:
            return
        saver, place, rng = self.savers[which], ("fork", ""), random.Random(seed)
        expected = {}
        for at, each in self.model.all(where((str(thread), ""))).items():
            parent = each["parent"] and ("fork", *each["parent"][1:])
            expected[at[2]] = each | {"at": ("fork", *at[1:]), "parent": parent}
        expected = {c.key: expected[c.key] for c in session.history(chosen.id) if c.key}
        session.fork("fork", at=chosen.id)
        if not asks(expected[chosen.key]):
            expected[chosen.key]["writes"] = []  # its step is still to be done
        else:
            del expected[chosen.key]
        for n in range(3):
            got = {each["at"][2]: each for each in map(shown, saver.list(where(place)))}
            assert [*got] == sorted({*expected, chosen.key}, reverse=True)
            assert {id: got[id] for id in expected} == expected
            assert shown(saver.get_tuple(where(place))) == got[max(got)]
            if gc:
                self.gc(which)
            id = f"{IDS + n:08}"
            versions: dict[str, Any] = {"n": f"{n}.{rng.random()}"}
            checkpoint: Any = {**empty_checkpoint(), "id": id, "channel_values": {"n": n}}
            checkpoint["channel_versions"] = versions
            for each in (saver, self.model):
                each.put(where(place, max(got)), checkpoint, {}, versions)
                each.put_writes(where(place, id), [("n", n), ("__interrupt__", n)], "task")
            expected[id] = shown(self.model.get_tuple(where(place, id)))
        for each in (saver, self.model):
            each.delete_thread("fork")

    def chosen(self, thread: Any, which: int, seed: int) -> tuple[Any, Any]:
        session = self.stores[which].session(ThreadAddress(str(thread), "").session)
        ids = self.model.ids((thread, ""))
        id = random.Random(seed).choice(ids) if ids else None
        return session, next((c for c in session.tree() if c.key == id), None) if id else None

    @rule(which=WHICH)
    def gc(self, which: int) -> None:
        self.stores[which].gc()

    @rule()
    def close_and_open(self) -> None:
        self.close()
        self.stores = self.open()
        self.savers = [HoldfastSaver(store) for store in self.stores]
        self.early = dict.fromkeys(self.early)

    # -- reading ---------------------------------------------------------------------------------

    def compare_all(self, which: int) -> None:
        self.compare_list(which, None, None)

    def compare_list(self, which: int, config: Any, limit: int | None, **options: Any) -> None:
        asked = config and {"configurable": {**config["configurable"]}}
        if asked:
            asked["configurable"]["thread_id"] = str(asked["configurable"]["thread_id"])
        expected = self.model.all(asked, **options)
        got = [shown(t) for t in self.savers[which].list(config, limit=limit, **options)]
        ids = sorted((at[2] for at in expected), reverse=True)
        assert [each["at"][2] for each in got] == ids[:limit]
        assert max(Counter(each["at"] for each in got).values(), default=1) == 1
        for each in got:
            assert each == expected[each["at"]]

    @rule(data=st.data(), which=WHICH, seed=SEEDS, limit=st.none() | st.integers(0, 4))
    def look(self, data: st.DataObject, which: int, seed: int, limit: int | None) -> None:
        rng = random.Random(seed)
        place, id = data.draw(PLACES), f"{rng.randrange(IDS // 3):08}"
        config = rng.choice(
            [None, {"configurable": {"thread_id": place[0]}}, where(place), where(place, id)]
        )
        options: dict[str, Any] = {}
        if rng.random() < 0.5:
            options["before"] = where(place, f"{rng.randrange(IDS // 3):08}")
        if rng.random() < 0.5:
            choice: list[dict[str, Any]] = [
                {"run_id": "r1"}, {"source": "loop", "step": 1}, {"writes": 1}, {"step": True},
                {"user": "someone"}, {"missing": 1}, {"writes": []},
            ]  # fmt: skip
            options["filter"] = rng.choice(choice)
        self.compare_list(which, config, limit, **options)

    @rule(place=PLACES, which=WHICH, seed=SEEDS)
    def delta_history(self, place: Place, which: int, seed: int) -> None:
        ids = self.model.ids(place)
        id = random.Random(seed).choice([*ids[-1:], *ids]) if ids else "unknown"
        if not self.model.is_tree(place, id):
            return
        channels = ["messages", "plan"]
        got = self.savers[which].get_delta_channel_history(
            config=where(place, id), channels=channels
        )
        at = where((str(place[0]), place[1]), id)
        expected = self.model.get_delta_channel_history(config=at, channels=channels)
        for name in channels:
            assert by_name(got[name]) == by_name(expected[name])

    @invariant()
    def tuples_agree(self) -> None:
        if not hasattr(self, "model"):
            return
        self.steps += 1
        rng = random.Random(self.steps)
        self.compare_list(self.steps % 2, None, None)
        places = sorted({(at[0], at[1]) for at in self.model.all()} | {("t", "")})
        for place in places:
            ids = self.model.ids(place)
            for asked in (where(place), where(place, rng.choice([*ids, "unknown"]))):
                got = self.savers[rng.randrange(2)].get_tuple(asked)
                assert shown(got) == shown(self.model.get_tuple(asked))
                if got is not None:
                    held = containers(got.checkpoint["channel_values"])
                    assert len({id(c) for c in held}) == len(held), "two values are one object"


class MemoryMachine(SaverMachine):
    def open(self) -> list[holdfast.Store]:
        store = getattr(self, "stores", None) or [holdfast.open("memory:")]
        return [store[0], store[0]]

    def close(self) -> None:
        """Nothing to reopen: only the savers are new."""


class SqliteMachine(SaverMachine):
    def open(self) -> list[holdfast.Store]:
        path = self.folder / "store.db"
        return [holdfast.open(path, durability="normal") for _ in range(2)]


def check(machine: type[SaverMachine], examples: int, **options: Any) -> None:
    chosen = settings(max_examples=examples, stateful_step_count=20, **options)
    run_state_machine_as_test(machine, settings=chosen)


@pytest.mark.parametrize("machine", [MemoryMachine, SqliteMachine])
def test_saver_equals_langgraph(machine: type[SaverMachine], rounds: Any) -> None:
    check(machine, rounds(30, torture=3_000))


# -- mutants: savers that the machine must tell from LangGraph's ---------------------------------


MUTANTS = [
    langgraph.trusts_the_message, langgraph.forgets_early_writes,
    langgraph.takes_the_head_for_the_latest, langgraph.lists_as_committed,
    langgraph.takes_every_list_for_grown, langgraph.keeps_the_first_of_special_writes,
    langgraph.does_not_go_back, langgraph.forks_nothing_but_the_state,
    langgraph.forks_with_all_writes,
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant(mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises((AssertionError, KeyTaken)):
        check(MemoryMachine, 400, phases=[Phase.generate], database=None)
