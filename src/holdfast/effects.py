"""What each kind of operation does to a session, and how that is taken back."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from holdfast import clock
from holdfast.codec import records
from holdfast.codec.records import LABEL, TAG, Tomb
from holdfast.errors import (
    UNREADABLE,
    CheckpointNotFound,
    HoldfastError,
    InvalidRequest,
    SessionExists,
)
from holdfast.lineage import Place
from holdfast.writing import Tip, seal_marks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.backends.base import Reader
    from holdfast.codec.records import Head

GONE = "gc() has freed it"


@dataclass
class Scene:
    """A session as it is when an operation is planned."""

    reader: Reader
    number: int
    raw_name: bytes
    row: bytes
    head: Head
    lease: tuple[bytes, bytes] | None = None
    """What becomes of the session's lease, if the head moves."""

    @property
    def next(self) -> int:
        """The number of the operation that is being planned."""
        return self.head.operations + 1

    def exists(self, seq: int) -> bool:
        return self.reader.checkpoint(self.number, seq) is not None

    def id(self, seq: int) -> bytes:
        found = self.reader.checkpoint(self.number, seq)
        if found is None:
            raise CheckpointNotFound(f"checkpoint {seq} is not there any more: {GONE}")
        return found[0]


@dataclass
class Effect:
    """What an operation does to a session."""

    details: dict[str, Any]
    head: int | None = None
    """Where the head goes, if it moves; 0 means that there is none."""
    tip: Tip | HoldfastError | None = None
    """That checkpoint, or why it cannot be read."""
    notes: dict[str, Any] = field(default_factory=dict)


def forward(scene: Scene, kind: str, details: dict[str, Any], seq: int = 0) -> Effect:
    """Do it, for the first time or again. `seq` is the checkpoint, if it is one."""
    if kind in ("rewind", "repair"):
        return _head_to(scene, int(details["to"]), details)
    if kind == "tag":
        seq, tags = int(details["seq"]), tuple(details["tags"])
        return Effect(details, notes=_mark(scene, seq, None, tags))
    if kind == "label":
        return Effect(details, notes=_relabel(scene, details, details["was"], details["label"]))
    if kind in ("delete", "prune"):
        if "session" in details:
            return _rename(scene, records.deleted_name(scene.number, scene.raw_name), details)
        tombs = _tombs(scene, details)
        needs = [(scene.number, seq) for seq, _ in tombs]
        return Effect(details, notes={"tombs": tombs, "needs": needs})
    if seq and kind == "fork":
        return _revive(scene, details)
    if seq:
        return _head_to(scene, seq, details)
    raise InvalidRequest(f"{kind} cannot be done again")


def back(scene: Scene, kind: str, details: dict[str, Any], before: int) -> Effect:
    """Take it back. `before` is where the head was before it."""
    if kind in ("rewind", "repair"):
        return _head_to(scene, int(details["from"]), details)
    if kind == "tag":
        seq, tags = int(details["seq"]), tuple(details["tags"])
        raw = [(TAG, records.encode_name(t)) for t in tags]
        id = scene.id(seq)
        notes = {
            "unmarks": [(seq, *r) for r in raw],
            "unfacets": [(*r, id) for r in raw],
            "needs": [(scene.number, seq)],
        }
        return Effect(details, notes=notes)
    if kind == "label":
        return Effect(details, notes=_relabel(scene, details, details["label"], details["was"]))
    if kind in ("delete", "prune"):
        if "session" in details:
            return _revive(scene, details)
        return Effect(details, notes=_untombs(scene, details))
    if kind == "fork":
        if scene.head.last > 1:
            raise InvalidRequest(
                "a fork that has checkpoints of its own is not undone",
                hint="delete() the session, which can be undone too",
            )
        return _rename(scene, records.deleted_name(scene.number, scene.raw_name), details)
    return _head_to(scene, before, details)


def _head_to(scene: Scene, seq: int, details: dict[str, Any]) -> Effect:
    """Move the head to a checkpoint that must be there and alive; 0 is before the first."""
    if not seq:
        return Effect(details, head=0)
    if not scene.exists(seq):
        raise InvalidRequest(f"the head cannot go to checkpoint {seq}: {GONE}")
    if scene.reader.tombs(scene.number, seq, seq):
        raise InvalidRequest(f"the head cannot go to checkpoint {seq}: it was deleted")
    return Effect(details, seq, _tip(scene, seq), {"needs": [(scene.number, seq)]})


def _tip(scene: Scene, seq: int) -> Tip | HoldfastError | None:
    try:
        return Tip.read(scene.reader, Place(scene.number, seq)) if seq else None
    except UNREADABLE as e:
        return e


def _mark(scene: Scene, seq: int, label: str | None, tags: tuple[str, ...]) -> dict[str, Any]:
    return {
        "marks": seal_marks(scene.number, seq, label, tags, scene.next),
        "facets": records.facets(scene.id(seq), {}, label, tags),
        "needs": [(scene.number, seq)],
    }


def _relabel(
    scene: Scene, details: dict[str, Any], was: str | None, label: str | None
) -> dict[str, Any]:
    seq = int(details["seq"])
    notes = _mark(scene, seq, label, ())
    if was is not None:
        raw = records.encode_name(was)
        notes["unmarks"] = [(seq, LABEL, raw)]
        notes["unfacets"] = [(LABEL, raw, scene.id(seq))]
    return notes


def _runs(details: dict[str, Any], name: str) -> Sequence[int]:
    return [seq for low, high in details[name] for seq in range(low, high)]


def _tombs(scene: Scene, details: dict[str, Any]) -> list[tuple[int, bytes]]:
    """Tombstones for what is to go, is there, and is not buried: redo() may come late."""
    boot, uptime = clock.uptime()
    now = time.time_ns() // 1000
    wanted = {seq: name == "held" for name in ("runs", "held") for seq in _runs(details, name)}
    low, high = min(wanted, default=0), max(wanted, default=0)
    buried = dict(scene.reader.tombs(scene.number, low, high))
    out = []
    for seq, held in wanted.items():
        if seq in buried or not scene.exists(seq):
            continue
        tomb = Tomb(scene.next, now, held, boot, uptime)
        out.append((seq, records.seal_tomb(scene.number, seq, tomb)))
    return out


def _untombs(scene: Scene, details: dict[str, Any]) -> dict[str, Any]:
    seqs = [*_runs(details, "runs"), *_runs(details, "held")]
    for seq in seqs:
        if not scene.exists(seq):
            raise InvalidRequest(f"checkpoint {seq} cannot come back: {GONE}")
    return {"untombs": seqs, "needs": [(scene.number, seq) for seq in seqs]}


def _revive(scene: Scene, details: dict[str, Any]) -> Effect:
    """A deleted session under its name again."""
    former = records.former_name(scene.number, scene.raw_name)
    if former is None:
        raise InvalidRequest("the session is not deleted")
    if scene.head.seq and not scene.exists(scene.head.seq):
        raise InvalidRequest(f"the session cannot come back: {GONE}")
    return _rename(scene, former, details)


def _rename(scene: Scene, name: bytes, details: dict[str, Any]) -> Effect:
    found = scene.reader.session_by_number(scene.number)
    if found is None:
        raise InvalidRequest(f"the session cannot come back: {GONE}")
    if scene.reader.session(name) is not None:
        raise SessionExists(f"there is another session {records.decode_name(name)!r} by now")
    info = records.unseal_session(scene.number, *found)
    row = records.seal_session(scene.number, name, info)
    head = scene.head.seq
    return Effect(details, head, _tip(scene, head), notes={"rename": (name, row)})
