"""Best of n: make five forks of a session, try a different way in each, and keep the best.

A fork shares all data with its origin, so it takes only the space of what it adds.
"""

import random
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import holdfast

LIMIT = 15
THINGS = {  # name: (weight, value)
    "tent": (7, 10), "stove": (3, 7), "rope": (4, 4), "map": (1, 6), "axe": (5, 5),
    "lamp": (2, 6), "boots": (4, 8), "radio": (6, 5), "water": (5, 11), "book": (2, 2),
}  # fmt: skip


def score(state: dict[str, Any]) -> int:
    return sum(THINGS[name][1] for name in state["packed"])


def attempt(session: holdfast.Session) -> int:
    """Pack things in a random order. Each turn ends with a checkpoint; a run survives a crash."""
    guess = random.Random(session.name)  # stands for a model with some temperature
    with session.run() as run:
        order = run.step("order", lambda: guess.sample(sorted(THINGS), len(THINGS)))
        for turn in run.turns(limit=len(order)):
            name = order[turn - 1]
            if sum(THINGS[n][0] for n in [*run.state["packed"], name]) <= LIMIT:
                run.state["packed"].append(name)
    return score(session.load())


def main() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-") as folder,
        holdfast.open(Path(folder) / "agent.db") as store,
    ):
        trip = store.session("trip")
        trip.save({"packed": [], "notes": ["What to carry, at most 15 kg? "] * 200}, label="start")

        forks = [trip.fork(f"trip-{n}") for n in range(1, 6)]
        with ThreadPoolExecutor() as pool:
            scores = [*pool.map(attempt, forks)]
        for fork, value in zip(forks, scores, strict=True):
            size, added = fork.get().size, sum(c.added for c in fork.tree())
            print(f"{fork.name}: {value:>2} for {', '.join(fork.load()['packed'])}")
            print(f"  {len(fork)} checkpoints of {size:,} bytes took {added:,} bytes")

        best = forks[scores.index(max(scores))]
        best.tag(None, "best")
        for fork in forks:
            if fork is not best:
                fork.delete()
        print(f"Kept: {[info.name for info in store.sessions()]}")
        [found] = store.checkpoints(tag="best")
        print(f"The best is {found.session}, with {score(best.load())}.")
        print(f"What it changed:\n{best.diff('start')}")


if __name__ == "__main__":
    main()
