"""A growing conversation, saved in full after every message, by both sides in turn."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path

from .messages import Message, Writer, json_size
from .peer import Config, Peer, as_objects
from .stores import check_state, disk_usage, open_store
from .timing import seconds

THREAD = "grown"


@dataclass
class Growth:
    """The seconds of every step, and the bytes on disk after some steps, by number of messages."""

    steps: int
    peer_path: Path
    peer_middle: Config | None = None  # the peer's first checkpoint in the second half of the steps
    disk: dict[int, int] = field(default_factory=dict)
    peer_disk: dict[int, int] = field(default_factory=dict)
    json: dict[int, int] = field(default_factory=dict)
    save: list[float] = field(default_factory=list)
    append: list[float] = field(default_factory=list)
    put: list[float] = field(default_factory=list)

    @property
    def peer_steps(self) -> int:
        return len(self.put)


def grow(path: Path, append_path: Path, peer_path: Path, steps: int, peer_steps: int) -> Growth:
    """Save the conversation step by step. Stores are closed while their size is measured."""
    marks = {steps * share // 100 for share in (1, 2, 5, 10, 15, 25, 35, 50, 70, 85, 100)}
    growth = Growth(steps, peer_path)
    store, append_store, peer = open_store(path), open_store(append_path), Peer(peer_path)
    saver, appender = store.session(THREAD), append_store.session(THREAD)
    messages: list[Message] = []
    objects: list[object] = []
    for step, message in enumerate(Writer(2).conversation(steps), start=1):
        messages.append(message)
        objects += as_objects([message])
        state = {"messages": messages}
        growth.save.append(seconds(functools.partial(saver.save, state)))
        growth.append.append(seconds(functools.partial(appender.append, "messages", message)))
        if step <= peer_steps:
            growth.put.append(seconds(peer.put(THREAD, objects)))
            if step == steps // 2 + 1:
                growth.peer_middle = peer.latest(THREAD)
        if step in marks:
            growth.json[step] = json_size(state)
            store.close()
            growth.disk[step] = disk_usage(path)
            store = open_store(path)
            saver = store.session(THREAD)
            if step <= peer_steps:
                peer.close()
                growth.peer_disk[step] = disk_usage(peer_path)
                peer.open()
    for opened in (store, append_store, peer):
        opened.close()
    check_state(path, THREAD, {"messages": messages})
    return growth
