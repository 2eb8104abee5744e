"""Stores of plain files: an append against its bare system calls, and the size on disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import holdfast

from .lab import Lab, Row
from .messages import Message, Writer, json_size
from .timing import Ratio, duration, interleave


class Bare:
    """The bare system calls of an append: two synced lines, and a file synced and renamed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND
        self._files = [os.open(folder / name, flags, 0o600) for name in ("items", "log")]
        self._count = 0

    def write(self, item: bytes, record: bytes, line: bytes) -> None:
        self._count += 1
        items, log = self._files
        os.write(items, item)
        os.fsync(items)
        draft = self._folder / "draft"
        handle = os.open(draft, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
        os.write(handle, record)
        os.fsync(handle)
        os.close(handle)
        os.replace(draft, self._folder / f"{self._count}.json")
        folder = os.open(self._folder, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
        os.write(log, line)
        os.fsync(log)

    def close(self) -> None:
        for handle in self._files:
            os.close(handle)


def append(lab: Lab) -> list[Row]:
    rounds = lab.pick(400, 30)
    root = lab.path("files").parent
    bare = Bare(root / "bare")
    fresh = Writer(61).conversation(1_000_000)
    with holdfast.open(f"files:{root / 'store'}") as store:
        session = store.session("appends")
        for _ in range(lab.pick(300, 20)):
            session.append("messages", next(fresh))
        folder = root / "store" / "sessions" / "appends"
        record = max((folder / "checkpoints").iterdir()).read_bytes()
        line = (folder / "log.jsonl").read_bytes().splitlines(keepends=True)[-1]
        [stream] = (folder / "streams").iterdir()
        item = stream.read_bytes().splitlines(keepends=True)[-1]

        def ours(_: int) -> Callable[[], object]:
            message = next(fresh)
            return lambda: session.append("messages", message)

        def theirs(_: int) -> Callable[[], object]:
            return lambda: bare.write(item, record, line)

        taken = interleave(rounds, files=ours, bare=theirs)
    bare.close()
    ratio = Ratio.of(taken["files"], taken["bare"])
    return [
        lab.row(
            "Files: `append` p50 against two appended and synced lines and a file by "
            "temp, fsync, rename and fsync of its folder",
            "≤ 1.5 ×",
            f"{ratio} ({duration(taken['files'])} / {duration(taken['bare'])})",
            passed=ratio.middle <= 1.5,
        )
    ]


def full_saves(lab: Lab) -> list[Row]:
    steps = lab.pick(2_000, 200)
    root = lab.path("files-saves").parent / "store"
    messages: list[Message] = []
    with holdfast.open(f"files:{root}", durability="normal") as store:
        session = store.session("saves")
        for message in Writer(62).conversation(steps):
            messages.append(message)
            session.save({"messages": messages})
    with holdfast.open(f"files:{root}") as store:
        if store.session("saves").load() != {"messages": messages}:
            raise AssertionError("the loaded state differs from the saved one")
    size = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    wanted = json_size({"messages": messages})
    return [
        lab.row(
            f"Files: sum of all files after {steps:,} full-state saves, one ~1.2 KB message new "
            "in each",
            "≤ 2 × the JSON of the final state",
            f"{size / wanted:.2f} × ({size / 1e6:.2f} MB)",
            passed=size <= 2 * wanted,
        )
    ]
