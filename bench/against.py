"""Compare the code with an older commit: `python -m bench.against 1a7f70f`.

Both versions run the same operations through the public API, each in a process of its own. In every
round both take their turn, so a slow moment of the machine touches them alike. The table shows the
time of this version in terms of the older one: the median over rounds, and the quartiles.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

BAR = 1.1
Operation = Callable[[int], Callable[[], object]]
"""Prepares a round, which is not timed, and returns what is timed."""


# -- the operations: they run in both versions, so they use names that both have -------------------


def message(n: int, size: int = 1_200) -> dict[str, Any]:
    """Return a message of about `size` bytes; each `n` has another text."""
    words = " ".join(f"w{n * 131 + i * 7919:x}" for i in range(size // 9))
    return {"role": "user" if n % 2 == 0 else "assistant", "content": words[:size], "n": n}


class Stores:
    """The stores of one process, and the operations on them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _open(self, name: str, **options: Any) -> Any:
        import holdfast

        if name == "memory":
            return holdfast.open("memory:")
        prefix = "files:" if name.startswith("files") else ""
        return holdfast.open(f"{prefix}{self._folder / name}", **options)

    def _filled(self, name: str, count: int, **options: Any) -> Any:
        """Return a session whose state has `count` messages."""
        session = self._open(name, **options).session("s")
        session.save({"messages": [message(n) for n in range(count)], "plan": {"budget": 1}})
        return session

    def _history(self, name: str, count: int) -> Any:
        """Return a session with `count` checkpoints."""
        session = self._filled(name, 10)
        for n in range(1, count):
            tags = ["seventh"] if n % 7 == 0 else []
            session.append("messages", message(n, 200), tags=tags)
        return session

    def append(self, name: str, **options: Any) -> Operation:
        session = self._filled(name, 1_000, **options)
        return lambda n: lambda: session.append("messages", message(1_000 + n))

    def save(self, count: int) -> Operation:
        session = self._filled(f"save-{count}", count)
        state = session.load()

        def prepare(n: int) -> Callable[[], object]:
            state["messages"][-1] = message(10_000 + n)
            return lambda: session.save(state)

        return prepare

    def first_save(self) -> Operation:
        store, state = self._open("first"), {"messages": [message(n) for n in range(10)]}
        return lambda n: lambda: store.session(f"s{n}").save(state)

    def load(self) -> Operation:
        session = self._filled("load", 1_000)
        return lambda _: session.load

    def open_and_load(self) -> Operation:
        self._filled("open", 1_000)

        def load() -> None:
            with self._open("open") as store:
                store.session("s").load()

        return lambda _: load

    def fork(self) -> Operation:
        session = self._filled("fork", 1_000)
        return lambda n: lambda: session.fork(f"f{n}")

    def history(self) -> Operation:
        session = self._history("history", 1_000)
        return lambda _: lambda: sum(1 for _ in session.history())

    def diff(self) -> Operation:
        session = self._history("diff", 300)
        return lambda n: lambda: session.diff(f"@~{1 + n % 200}", f"@~{n % 200}")

    def find(self) -> Operation:
        self._history("find", 400)
        store = self._open("find")
        return lambda _: lambda: list(store.find(tag="seventh", limit=10))

    def verify(self) -> Operation:
        session = self._history("verify", 500)
        return lambda _: lambda: session.verify(read_data=True)

    def step(self) -> Operation:
        run = self._open("step").session("s").run().__enter__()
        next(iter(run.turns()))
        return lambda n: lambda: run.step(f"step {n}", dict, n=n)

    def gc(self) -> Operation:
        store = self._open("gc")

        def prepare(n: int) -> Callable[[], object]:
            session = store.session(f"s{n}")
            for i in range(60):
                session.save({"messages": [message(n * 100 + i, 300)]})
            session.delete()
            return lambda: store.gc()  # noqa: PLW0108 - mypy knows no type of store.gc

        return prepare

    def copy(self) -> Operation:
        self._history("copied", 300)
        store = self._open("copied")

        def prepare(n: int) -> Callable[[], object]:
            target = self._open(f"copy-{n}")
            return lambda: store.copy(target)

        return prepare

    def command(self, *arguments: str) -> Operation:
        name = f"command-{len(arguments)}-{arguments[0].strip('-')}"
        self._history(name, 300)
        line = [sys.executable, "-m", "holdfast", "-S", str(self._folder / name), *arguments]
        return lambda _: lambda: subprocess.run(line, check=True, stdout=subprocess.DEVNULL)

    def page(self) -> Operation:
        from starlette.testclient import TestClient

        from holdfast import web

        self._history("page", 300)
        app: Any = web.app(self._open("page"))
        client = TestClient(app, base_url="http://127.0.0.1")
        return lambda _: lambda: client.get("/api/log?session=s").raise_for_status()

    def put(self) -> Operation:
        from langgraph.checkpoint.base import empty_checkpoint

        from holdfast.adapters.langgraph import HoldfastSaver

        saver = HoldfastSaver(str(self._folder / "graph"))
        messages = [message(n) for n in range(200)]
        config: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}

        def prepare(n: int) -> Callable[[], object]:
            messages.append(message(1_000 + n))
            checkpoint = empty_checkpoint()
            checkpoint["channel_values"] = {"messages": [*messages]}
            checkpoint["channel_versions"] = {"messages": n + 1}
            meta: Any = {"source": "loop", "step": n, "parents": {}}

            def put() -> None:
                nonlocal config
                config = saver.put(config, checkpoint, meta, {"messages": n + 1})

            return put

        return prepare


OPERATIONS: dict[str, Callable[[Stores], Operation]] = {
    "append": lambda s: s.append("append"),
    "append, durability normal": lambda s: s.append("normal", durability="normal"),
    "append, files": lambda s: s.append("files"),
    "append, memory": lambda s: s.append("memory"),
    "save, 10 messages": lambda s: s.save(10),
    "save, 1,000 messages": lambda s: s.save(1_000),
    "save, first of a session": Stores.first_save,
    "load, 1,000 messages": Stores.load,
    "open and load": Stores.open_and_load,
    "fork": Stores.fork,
    "history, 1,000 checkpoints": Stores.history,
    "diff of neighbours": Stores.diff,
    "find by tag": Stores.find,
    "verify, 500 checkpoints": Stores.verify,
    "step": Stores.step,
    "gc of a session": Stores.gc,
    "copy, 300 checkpoints": Stores.copy,
    "holdfast --help": lambda s: s.command("--help"),
    "holdfast log": lambda s: s.command("log"),
    "viewer: log": Stores.page,
    "LangGraph put, 200 messages": Stores.put,
}


def work(folder: Path) -> None:
    """Answer each line "name<TAB>round" from stdin with the seconds that the operation took."""
    made: dict[str, Operation] = {}
    stores = Stores(folder)
    for line in sys.stdin:
        name, _, n = line.rstrip("\n").partition("\t")
        if name not in made:
            made[name] = OPERATIONS[name](stores)
        timed = made[name](int(n))
        start = time.perf_counter()
        timed()
        print(time.perf_counter() - start, flush=True)


# -- the comparison --------------------------------------------------------------------------------


class Version:
    """A process that runs the operations with the code of one source tree."""

    def __init__(self, tree: Path, folder: Path) -> None:
        folder.mkdir()
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--work", str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": str(tree / "src")},
        )  # fmt: skip

    def seconds(self, name: str, n: int) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{name}\t{n}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def checked_out(revision: str, folder: Path) -> Iterator[Path]:
    """Yield a folder with the files of a commit."""
    here = Path(__file__).parents[1]
    git = ["git", "-C", str(here), "worktree"]
    subprocess.run([*git, "add", "-q", "--detach", str(folder), revision], check=True)
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def compare(revision: str, rounds: int, only: list[str]) -> int:
    worse = 0
    with tempfile.TemporaryDirectory(prefix="holdfast-against-") as name, ExitStack() as stack:
        folder = Path(name)
        old = stack.enter_context(checked_out(revision, folder / "tree"))
        here = Path(__file__).parents[1]
        versions = [Version(old, folder / "old"), Version(here, folder / "new")]
        for each in versions:
            stack.callback(each.close)
        print(f"| Operation | Against {revision} | Quartiles | Now |\n|---|---|---|---|")
        for operation in only or OPERATIONS:
            before, after = _interleaved(versions, operation, rounds)
            ratios = [b / a for a, b in zip(before, after, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            worse += middle > BAR
            took = f"{statistics.median(after) * 1e3:.3g} ms"
            mark = " ✗" if middle > BAR else ""
            print(f"| {operation} | {middle:.2f} ×{mark} | {low:.2f}–{high:.2f} | {took} |")
    return worse


def _interleaved(versions: list[Version], operation: str, rounds: int) -> list[list[float]]:
    """Return the seconds of each version, round by round. They take turns in going first."""
    taken: list[list[float]] = [[] for _ in versions]
    for n in range(rounds + 3):
        order = list(enumerate(versions))
        for at, version in order if n % 2 else order[::-1]:
            spent = version.seconds(operation, n)
            if n >= 3:  # the first rounds warm up
                taken[at].append(spent)
    return taken


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.against", description=__doc__)
    parser.add_argument("revision", nargs="?", default="1a7f70f")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--only", action="append", metavar="NAME", default=[])
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work is not None:
        work(options.work)
        return 0
    return 1 if compare(options.revision, options.rounds, options.only) else 0


if __name__ == "__main__":
    sys.exit(main())
