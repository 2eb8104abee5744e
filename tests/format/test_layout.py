"""Layouts against a plain model: what loads is what was saved, however it was mutated between."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from holdfast.format import patch, ropes, values
from tests.support.dict_storage import PlainStore
from tests.support.seeds import seeds

WORDS = [f"{w}{i}" for i in range(40) for w in ("alpha ", "beta\n", "gamma, ", "δ ", "0x1f;")]


def text(rng: random.Random, n: int) -> str:
    return "".join(rng.choices(WORDS, k=max(n // 6, 0)))


def scalar(rng: random.Random):
    return rng.choice(
        [
            None,
            True,
            7,
            -1,
            2**70,
            1.5,
            -0.0,
            "",
            "x",
            b"\xc1",
            (1, "a"),
            {3, 4},
            "\ud800",
            text(rng, 50),
        ]
    )


def thing(rng: random.Random, depth: int = 0):
    kind = rng.random()
    if depth > 2 or kind < 0.25:
        return scalar(rng)
    if kind < 0.45:
        return text(rng, rng.choice([10, 300, 1500, 5000, 9000]))
    if kind < 0.7:
        n = rng.choice([0, 1, 3, 8, 30])
        return [thing(rng, depth + 2) for _ in range(n)]
    if kind < 0.75:
        return {i: thing(rng, depth + 2) for i in range(rng.choice([0, 3]))}
    if kind < 0.8:
        return [rng.randrange(1000) for _ in range(rng.choice([10, 600, 3000]))]
    n = rng.choice([0, 1, 3, 8, 8, 70])
    return {f"k{i}": thing(rng, depth + 1 if n < 10 else depth + 2) for i in range(n)}


def message(rng: random.Random, i: int):
    m: dict[str, Any] = {
        "role": rng.choice(["user", "assistant", "tool"]),
        "content": text(rng, rng.choice([60, 400, 1200])),
    }
    if rng.random() < 0.2:
        m["tool_calls"] = [{"id": f"c{i}", "args": text(rng, 200)}]
    if rng.random() < 0.05:
        m["content"] = text(rng, 6000)
    return m


def containers(value, found=None):
    found = [] if found is None else found
    if type(value) in (list, dict):
        found.append(value)
        for v in value if type(value) is list else value.values():
            containers(v, found)
    return found


def mutate(rng: random.Random, state) -> None:
    """One in-place change, anywhere, at any depth."""
    target = rng.choice(containers(state))
    action = rng.random()
    if type(target) is list:
        if action < 0.35 or not target:
            for _ in range(rng.choice([1, 1, 2, 20])):
                target.append(message(rng, len(target)) if rng.random() < 0.7 else thing(rng, 2))
        elif action < 0.5:
            target[rng.randrange(len(target))] = thing(rng, 2)
        elif action < 0.6:
            target.insert(rng.randrange(len(target) + 1), message(rng, 0))
        elif action < 0.7:
            del target[rng.randrange(len(target))]
        elif action < 0.78:
            del target[rng.randrange(len(target)) :]
        elif action < 0.86:
            target[: rng.randrange(len(target))] = [{"role": "system", "content": "summary"}]
        elif action < 0.93:
            rng.shuffle(target)
        else:
            i = rng.randrange(len(target))
            target.append(copy.deepcopy(target[i]))  # equal items at two places
    elif action < 0.6 or not target:
        key = rng.choice(list(target) or ["k"]) if rng.random() < 0.6 else f"n{rng.randrange(50)}"
        old = target.get(key)
        if type(old) is str and rng.random() < 0.7:
            at = rng.randrange(len(old) + 1)
            target[key] = (
                old + text(rng, 100) if rng.random() < 0.5 else old[:at] + "edit" + old[at + 3 :]
            )
        else:
            target[key] = thing(rng, 1)
    elif action < 0.8:
        del target[rng.choice(list(target))]
    else:
        items = list(target.items())
        rng.shuffle(items)
        target.clear()
        target.update(items)


def same(a, b) -> bool:
    """Equal with types, order of dicts and bits of floats included."""
    return values.encode(a) == values.encode(b)


def check(store: PlainStore, node, state) -> None:
    loaded = store.load(node)
    assert same(loaded, state)
    assert ropes.flatten(store.cold(node), store) == values.encode_exact(state)
    assert node.hash == store.cold(node).hash
    assert node.size == len(values.encode(state))
    fresh = PlainStore()
    assert fresh.save(state, None, 1).hash == node.hash, "the hash depends on the layout"


@pytest.mark.parametrize("seed", range(30))
def test_any_mutation_is_noticed(seed: int) -> None:
    """In-place changes, with forks, rewinds and lost images between; old checkpoints stay."""
    rng = random.Random(seed)
    store = PlainStore()
    state: dict = {"messages": [message(rng, i) for i in range(rng.choice([0, 3, 40]))], "n": 0}
    if seed % 3 == 0:
        state = {"channel_values": state, "other": thing(rng)}
    if seed % 7 == 0:
        state = {f"pad{i}": text(rng, 300) for i in range(40)} | state
    line, lines = 1, 1
    node = store.save(state, None, line)
    history = [(node, copy.deepcopy(state))]
    for _ in range(40):
        roll = rng.random()
        if roll < 0.06:  # rewind or fork: another line of descent from an old checkpoint
            node, old = rng.choice(history)
            state = copy.deepcopy(old)
            lines += 1
            line = lines
            if rng.random() < 0.5:
                node = store.cold(node)
        elif roll < 0.2:
            node = store.cold(node)  # the image was evicted, or another process goes on
        for _ in range(rng.choice([0, 1, 1, 1, 3])):
            mutate(rng, state)
        node = store.save(state, node, line)
        history.append((node, copy.deepcopy(state)))
        check(store, node, state)
    for node, state in history:
        assert same(store.load(node), state)


@pytest.mark.parametrize("seed", seeds(8, torture=20))
def test_patches_equal_full_saves(seed: int) -> None:
    rng = random.Random(seed)
    store = PlainStore()
    state: dict = {"messages": [], "inner": {"log": []}, "plan": "x"}
    node = store.save(state, None, 1)
    for i in range(150):
        out = store.writes(1)
        roll = rng.random()
        if roll < 0.5:
            new = [message(rng, i) for _ in range(rng.choice([1, 1, 3]))]
            state["messages"] += new
            node = patch.append(node, ("messages",), new, out)
        elif roll < 0.7:
            state["inner"]["log"].append(i)
            node = patch.append(node, ("inner", "log"), [i], out)
        elif roll < 0.9:
            key = f"k{rng.randrange(30)}"
            state[key] = thing(rng, 2)
            node = patch.assign(node, (key,), state[key], out)
        elif len(state) > 3:
            key = rng.choice([k for k in state if k.startswith("k")])
            del state[key]
            node = patch.drop(node, (key,), out)
        store.apply(out)
        if rng.random() < 0.1:
            node = store.cold(node)
        check(store, node, state)
        if rng.random() < 0.1:
            mutate(rng, state["messages"])
            node = store.save(state, node, 1)
            check(store, node, state)


def test_equal_items_do_not_share_the_end_of_a_stream() -> None:
    """Each of two equal items with a long list inside grows on its own."""
    store = PlainStore()
    log = [{"n": n, "text": "t" * 300} for n in range(40)]

    def item(*more: int) -> dict[str, Any]:
        return {"log": [*log, *({"n": n, "text": "m" * 300} for n in more)]}

    first, other = {"text": "a" * 2000}, {"text": "b" * 2000}
    node = None
    for state in (
        {"items": [first, item(), first]},
        {"items": [other, item(), item(), other]},
        {"items": [other, item(1), item(), other]},
        {"items": [other, item(1), item(2), other]},
        {"items": [other, item(1, 3), item(2, 4), other]},
    ):
        node = store.save(state, node, line=1)
        assert store.load(node) == state
        assert store.load(store.cold(node)) == state
