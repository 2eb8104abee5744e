"""What the writers do: scripts of operations on a few sessions, the same in every run."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

State = dict[str, Any]
Kind = Literal[
    "save", "append", "patch", "rewind", "fork", "prune", "regret", "drop", "recall", "gc", "reopen"
]

WORDS = (
    "plan book flight hotel budget refuse retry answer tool call result page search user agree "
    "cancel change date seat window city train later maybe never always check paid open closed"
).split()


BIG = 30
Weights = dict[Kind, int]
USUAL: Weights = {
    "append": 50, "save": 12, "patch": 12, "rewind": 6, "reopen": 4,
    "fork": 5, "prune": 4, "regret": 2, "drop": 2, "gc": 4,
}  # fmt: skip
TIDYING: Weights = {
    "append": 15, "save": 25, "rewind": 5, "fork": 10,
    "prune": 15, "regret": 10, "drop": 5, "gc": 15,
}  # fmt: skip


@dataclass(frozen=True)
class Step:
    """One operation on `session`; `count`: how far to rewind, how many to keep, how much text."""

    kind: Kind
    session: str = "main"
    count: int = 1
    into: str = ""


Backend = Literal["sqlite", "files"]


def url_of(folder: Path, backend: Backend = "sqlite") -> str:
    """Where the writers keep their store inside `folder`."""
    return {"sqlite": f"{folder}/agent.db", "files": f"files:{folder}/agent"}[backend]


def short() -> list[Step]:
    """Every kind of operation once or twice, and one close in the middle."""
    return [
        Step("save"),
        Step("append"),
        Step("append"),
        Step("patch", count=2),
        Step("save", "side"),
        Step("rewind", count=2),
        Step("save"),
        Step("reopen"),
        Step("append"),
        Step("fork", into="fork"),
        Step("append", "fork"),
        Step("save", "fork", count=40),
        Step("append"),
    ]


def long() -> list[Step]:
    """Packs, big values, forks, rewinds, closes, and logs long enough to be emptied on the way."""
    steps = [*short()]
    for group in range(4):
        steps += [Step("append", count=8) for _ in range(55)]
        steps += [Step("save", "side", count=30 + group) for _ in range(6)]
        steps += [Step("patch", count=3), Step("rewind", count=5), Step("append"), Step("save")]
        steps += [Step("fork", into=f"fork-{group}"), Step("append", f"fork-{group}")]
        if group % 2:
            steps.append(Step("reopen"))
    return steps


def small() -> list[Step]:
    """Few checkpoints, but of every kind: a pack, a value on its own, siblings, a fork."""
    return [*short(), Step("patch", "side", count=70), Step("append", "side")]


def tidy() -> list[Step]:
    """Checkpoints and sessions deleted and freed: forks of forks, siblings, big values, packs."""
    return [
        Step("save", count=40),
        *[Step("append") for _ in range(4)],
        Step("fork", into="fork"),
        *[Step("append", "fork") for _ in range(3)],
        Step("fork", "fork", into="deep"),
        Step("save", "deep", count=30),
        Step("append", "deep"),
        Step("rewind", count=2),
        Step("save", count=35),
        Step("regret"),
        Step("prune"),
        Step("gc"),
        Step("append"),
        Step("save"),
        Step("prune", "fork"),
        Step("drop", "fork"),
        Step("gc"),
        Step("append", "deep"),
        Step("reopen"),
        Step("fork", into="fork"),
        Step("append", "fork"),
        Step("prune", "deep", count=2),
        Step("gc"),
        Step("append"),
    ]


def undone() -> list[Step]:
    """Deletions that were taken back, and a name that another session has now."""
    return [
        *[Step("save"), Step("append"), Step("append"), Step("regret"), Step("append")],
        *[Step("recall"), Step("append"), Step("regret"), Step("recall")],
        *[Step("save", "twice"), Step("append", "twice"), Step("drop", "twice")],
        *[Step("save", "twice"), Step("append", "twice")],
    ]


SCRIPTS = {"short": short, "long": long, "small": small, "tidy": tidy, "undone": undone}


def family(session: str) -> list[str]:
    """A session, its fork, and the fork of that."""
    return [session, f"{session} fork", f"{session} fork fork"]


def endless(seed: int, sessions: Sequence[str], weights: Weights = USUAL) -> Iterator[Step]:
    """Operations for a writer that is going to be killed."""
    rng = random.Random(seed)
    while True:
        (kind,) = rng.choices([*weights], [*weights.values()])
        names = family(rng.choice(sessions))
        place = rng.choice([0, 0, 0, 1, 1, 2])
        if kind == "fork":
            yield Step(kind, names[place % 2], into=names[place % 2 + 1])
        elif kind == "drop":
            yield Step(kind, names[max(place, 1)])
        else:
            yield Step(kind, names[place], rng.choice([1, 1, 1, 4, BIG]))


def text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words)) + f" {rng.getrandbits(32):08x}"


def message(rng: random.Random, count: int) -> State:
    """About `count` × 150 bytes; from 30 on big enough to be stored on its own."""
    return {
        "role": rng.choice(["user", "assistant", "tool"]),
        "content": text(rng, 20 * count),
        "n": rng.getrandbits(20),
    }


def next_state(step: Step, state: State, rng: random.Random) -> tuple[State, dict[str, Any]]:
    """The state after a step on `state`, and what the store has to be told for it."""
    after = copy.deepcopy(state)
    messages = after.setdefault("messages", [])
    if step.kind == "append":
        item = message(rng, step.count)
        messages.append(item)
        return after, {"item": item}
    if step.kind == "patch":
        items = [message(rng, 1) for _ in range(step.count)]
        messages.extend(items)
        changed = {"turn": after.get("turn", 0) + 1, "note": text(rng, 5)}
        after.update(changed)
        return after, {"append": {"messages": items}, "set": changed}
    messages.append(message(rng, step.count))
    if len(messages) > 2:  # an edit in the middle, so that a save is more than an append
        messages[len(messages) // 2]["content"] = text(rng, 12)
    if step.count == 1:  # now one, now another of a few that all sessions share
        after["page"] = text(random.Random(rng.randrange(40)), 1500)
    after["ratio"] = rng.random()
    after["flags"] = {"done": None, "ok": rng.random() < 0.5, "size": [1, 2.5, "three"]}
    return after, {}
