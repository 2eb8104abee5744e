"""A real writer: runs a script against a store and reports each acknowledgement before it goes on.

Run as a program it is what the power-loss harness traces:
`python -m …writer FOLDER LEDGER SCRIPT [backend] [durability]`.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import holdfast
from holdfast import ids

from . import ledger, workload
from .workload import State, Step


@dataclass
class Line:
    """What the writer knows of one session: the checkpoints from the root to the head."""

    path: list[tuple[str, State]] = field(default_factory=list)
    handle: Any = None

    @property
    def state(self) -> State:
        return self.path[-1][1] if self.path else {}


class Writer:
    """Runs steps, keeps a plain model beside the store, and writes the ledger to a file descriptor.

    After an error the outcome of the operation is unknown to the caller, as in life, and it stays
    so until something else is acknowledged: what was written but not synced may come back when the
    store is opened again. The writer looks the head up and goes on from whichever state it finds.
    """

    def __init__(self, url: str, out: int, *, seed: int = 0, durability: str = "full") -> None:
        self.url, self.out = url, out
        self.durability: Any = durability
        self.rng = random.Random(seed)
        self.lines: dict[str, Line] = {}
        self.doubtful: dict[str, set[str]] = {}  # session -> digests that its head may have
        self.store: Any = None
        self.n = 0

    def run(self, steps: Iterable[Step]) -> None:
        for step in steps:
            self.attempt(step)
        self.close()

    def attempt(self, step: Step) -> bool:
        """Run one step; False if it raised one of the library's errors."""
        self.n += 1
        try:
            self.open()
            for name in (step.session, step.into):
                if name and step.kind not in ("gc", "reopen"):
                    self.settle(name)
            self.perform(step)
        except holdfast.HoldfastError as error:
            self.failed(step, error)
            return False
        return True

    def failed(self, step: Step, error: holdfast.HoldfastError) -> None:
        self.say(ledger.error_line(self.n, f"{step.kind}: {type(error).__name__}: {error.message}"))

    def open(self) -> None:
        if self.store is None:
            self.store = holdfast.open(self.url, durability=self.durability)
            for line in self.lines.values():
                line.handle = None

    def close(self) -> None:
        store, self.store = self.store, None
        for line in self.lines.values():
            line.handle = None
        try:
            if store is not None:
                store.close()
        except holdfast.HoldfastError as error:
            self.say(ledger.error_line(self.n, f"close: {type(error).__name__}: {error.message}"))

    def line(self, name: str) -> Line:
        line = self.lines.setdefault(name, Line())
        if line.handle is None:
            line.handle = self.store.session(name)
        return line

    def adopt(self, names: Iterable[str]) -> None:
        """Go on where an earlier writer was stopped."""
        self.open()
        for name in names:
            line = self.line(name)
            head = line.handle.head
            if head is not None:
                line.path = [(head.id, line.handle.load())]
                self.say(ledger.found_line(name, ledger.digest(line.state)))

    def perform(self, step: Step) -> None:
        if step.kind == "reopen":
            self.close()
            self.open()
            return
        if step.kind == "gc":
            self.store.gc()
            return
        line = self.line(step.session)
        if step.kind in ("prune", "regret", "drop", "recall"):
            if line.path:
                self.remove(step, line)
        elif step.kind == "rewind":
            back = min(step.count, len(line.path) - 1)
            if back < 1:
                return
            kept = line.path[: len(line.path) - back]
            self.begin(step.session, kept[-1][1])
            line.handle.rewind(kept[-1][0])
            line.path = kept
            self.ack(step.session, kept[-1][0])
        elif step.kind == "fork":
            if not line.path or self.line(step.into).path:
                return
            self.begin(step.into, line.state)
            handle = line.handle.fork(step.into)
            id_ = ids.to_text(handle._writer.parent.id)  # which asks nobody, who might not answer
            self.lines[step.into] = Line([(id_, line.state)], handle)
            self.ack(step.into, id_)
        else:
            after, arguments = workload.next_state(step, line.state, self.rng)
            self.begin(step.session, after)
            checkpoint = self.write(step, line, after, arguments)
            line.path.append((checkpoint.id, after))
            self.ack(step.session, checkpoint.id)

    def remove(self, step: Step, line: Line) -> None:
        """Delete all but the newest checkpoints, or the whole session; and maybe undo that."""
        if step.kind == "drop":
            self.begin(step.session, {}, whole=True)
            line.handle.delete()
            line.path = []
            self.ack(step.session, None)
            return
        if step.kind == "recall":
            self.begin(step.session, line.state)
            line.handle.delete()
            line.handle = self.store.session(step.session)
            line.handle.undo()
            self.ack(step.session, line.path[-1][0])
            return
        rule = holdfast.Retention(keep_last=step.count, keep_tagged=False, keep_labelled=False)
        line.path = line.path[-1:]  # the head stays in any case
        head = line.path[-1][0]
        others = [each.id for each in line.handle.tree() if each.id != head]
        self.begin(step.session, line.state, others)
        gone = [verdict.checkpoint.id for verdict in line.handle.prune(rule).removed]
        if gone and step.kind == "regret":
            self.hesitate()
            with suppress(
                holdfast.InvalidRequest, holdfast.NotFound
            ):  # somebody else's gc was there first
                line.handle.undo()
                gone = []
        self.ack(step.session, head, gone)

    def write(self, step: Step, line: Line, after: State, arguments: dict[str, Any]) -> Any:
        if step.kind == "append" and line.path:
            return line.handle.append("messages", arguments["item"])
        if step.kind == "patch" and line.path:
            return line.handle.patch(**arguments)
        names = {"label": f"label {self.n}", "tags": ["saved"], "key": f"key {self.n}"}
        return line.handle.save(after, **names)

    def settle(self, name: str) -> None:
        """After an error on a session: find out which of the possible states it is in."""
        if name not in self.doubtful:
            return
        line = self.lines.setdefault(name, Line())
        line.handle = self.store.session(name)
        head = line.handle.head
        state = {} if head is None else line.handle.load()
        if ledger.digest(state) not in self.doubtful[name]:
            self.say(ledger.wrong_line(self.n, f"after an error {name!r} holds another state"))
        known = [
            place for place, (id_, _) in enumerate(line.path) if head is not None and id_ == head.id
        ]
        if known or head is None:
            del line.path[known[0] + 1 if known else 0 :]
        else:
            line.path.append((head.id, state))

    def hesitate(self) -> None:
        """Between two steps that others may come between."""

    def begin(
        self, name: str, state: State, deletes: Sequence[str] = (), *, whole: bool = False
    ) -> None:
        before = self.lines.get(name, Line()).state
        self.doubtful.setdefault(name, {ledger.digest(before)}).add(ledger.digest(state))
        after = None if whole else ledger.digest(state)
        self.say(ledger.begin_line(self.n, name, after, deletes))

    def ack(self, name: str, checkpoint_id: str | None, deleted: Sequence[str] = ()) -> None:
        self.doubtful.pop(name, None)
        self.say(ledger.ack_line(self.n, checkpoint_id, deleted))

    def say(self, line: bytes) -> None:
        os.write(self.out, line)


def main(
    folder: str, ledger_path: str, script: str, backend: Any = "sqlite", durability: str = "full"
) -> None:
    out = os.open(ledger_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    writer = Writer(workload.url_of(Path(folder), backend), out, durability=durability)
    writer.run(workload.SCRIPTS[script]())


if __name__ == "__main__":
    main(*sys.argv[1:])
