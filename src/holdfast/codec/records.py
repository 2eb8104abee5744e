"""The rows around a state: checkpoint records, heads, sessions, marks, operations.

A record's hash covers its metadata, the state's hash and the parent's hash. It does not cover the
layout, so a copy in another store has the same hash.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

import ormsgpack
from xxhash import xxh3_64_intdigest

from holdfast.codec import rows, values, wire
from holdfast.codec.nodes import Node, parse
from holdfast.errors import Corrupt
from holdfast.model import Record

if TYPE_CHECKING:
    from collections.abc import Callable

SEQ_BITS = 32
MAX_SEQ = (1 << SEQ_BITS) - 1
OPERATIONS = ("save", "append", "patch", "fork")
# What people search by. Labels and tags are marks; all are entries of the index for searches, for
# an agent and the session above by session, for the others by checkpoint.
LABEL, TAG, TRIGGER, STATUS, AGENT, CHILD_OF = range(6)
_OF_SESSIONS = {"agent": AGENT, "child_of": CHILD_OF}

# Short names on disk for the optional fields of a record.
FIELDS = {
    "trigger": "t", "status": "s", "reason": "r", "agent": "a", "usage": "u", "pending": "p",
    "hint": "h", "meta": "m", "key": "k", "origin": "o", "run": "n",
    "child_of": "c",
}  # fmt: skip
_NAMES = {short: name for name, short in FIELDS.items()}
_PLAIN_MAX = 384
_PLAIN_ENTRY = 1024
_MAYBE_INT = (int, type(None))
_MAYBE_BYTES = (bytes, type(None))
_TIMES = range(-62_135_596_800_000_000, 253_402_300_800_000_000)  # the years 1 to 9999, in us


def encode_name(name: str) -> bytes:
    """Any string, lone surrogates included, reversibly."""
    return name.encode("utf-8", "surrogatepass")


def decode_name(raw: bytes) -> str:
    try:
        return raw.decode("utf-8", "surrogatepass")
    except (UnicodeDecodeError, AttributeError) as e:
        raise Corrupt("a stored name is damaged") from e


def shown_name(raw: bytes) -> str:
    """A name to be shown: what of it is damaged, in escapes."""
    try:
        return decode_name(raw)
    except Corrupt:
        return raw.decode(errors="backslashreplace")


def position(session: int, seq: int) -> int:
    return session << SEQ_BITS | seq


def checkpoint_address(session: int, seq: int, id: bytes) -> int:
    if type(id) is not bytes:
        raise Corrupt(f"the id of checkpoint {seq} is damaged")
    fold = int.from_bytes(id[:8], "big") ^ int.from_bytes(id[7:], "big")
    return (session << SEQ_BITS | seq) ^ fold


def metadata(
    step: int,
    created_us: int,
    operation: str,
    parent_seq: int | None,
    parent: bytes | None,
    extra: dict[str, Any],
) -> bytes:
    """The hashed part of a record. `extra` holds the optional fields that are set."""
    fields = [step, created_us, OPERATIONS.index(operation), parent_seq, parent]
    encoded = ormsgpack.packb(fields)
    if not extra:
        return encoded
    # As a sixth field, but encoded on its own: the parent's bytes would make it the slow way.
    more = values.encode_exact({FIELDS[k]: v for k, v in extra.items()}, depth=1)
    return wire.array_header(len(fields) + 1) + encoded[1:] + more


def facets(
    id: bytes, extra: dict[str, Any], label: str | None = None, tags: tuple[str, ...] = ()
) -> list[tuple[int, bytes, bytes]]:
    """A checkpoint's entries in the index for searches."""
    found = [(TAG, tag) for tag in tags]
    for kind, value in (
        (LABEL, label),
        (TRIGGER, extra.get("trigger")),
        (STATUS, extra.get("status")),
    ):
        if value is not None:
            found.append((kind, value))
    return [(kind, encode_name(value), id) for kind, value in found]


def session_facets(number: int, extra: dict[str, Any]) -> list[tuple[int, bytes, bytes]]:
    """A session's entries in the index for searches, as far as one of its records tells."""
    id = number.to_bytes(8, "big")
    return [
        (kind, encode_name(extra[name]), id) for name, kind in _OF_SESSIONS.items() if name in extra
    ]


def hash_prefix(name: bytes) -> bytes:
    """What the hashes of all records of a session begin with."""
    return b"\xc1record" + len(name).to_bytes(4, "big") + name


def record_hash(
    prefix: bytes, seq: int, id: bytes, meta: bytes, state_hash: bytes, parent_hash: bytes
) -> bytes:
    head = prefix + seq.to_bytes(4, "big") + id + len(meta).to_bytes(4, "big")
    return sha256(head + meta + state_hash + parent_hash).digest()


def read_extra(meta: bytes) -> dict[str, Any]:
    """The optional fields of encoded metadata."""
    fields = values.decode(meta)
    return {_NAMES[k]: v for k, v in fields[5].items()} if len(fields) > 5 else {}


class Row(NamedTuple):
    """A checkpoint's row, taken apart."""

    record: Record
    meta: bytes
    line: int
    root: bytes

    def node(self) -> Node:
        return parse(self.root, root=True)


def seal_checkpoint(
    session: int,
    seq: int,
    id: bytes,
    meta: bytes,
    digest: bytes,
    line: int,
    size: int,
    added: int,
    root: bytes,
    skip: int | None,
) -> bytes:
    payload = ormsgpack.packb([digest, meta, line, size, added, root, skip])
    level = rows.PLAIN if len(payload) <= _PLAIN_MAX else rows.FAST
    return rows.seal(rows.CHECKPOINT, checkpoint_address(session, seq, id), payload, 0, level)


def unseal_checkpoint(session: int, seq: int, id: bytes, body: bytes) -> Row:
    what = f"checkpoint {seq}"
    _, payload = rows.unseal(rows.CHECKPOINT, checkpoint_address(session, seq, id), body, what)
    try:
        digest, meta, line, size, added, root, skip = ormsgpack.unpackb(payload)
        fields = values.decode(meta)
        step, created_us, operation, parent_seq, parent = fields[:5]
        numbers = (line, size, added, step, created_us, operation)
        if (
            {*map(type, numbers)} != {int}
            or {*map(type, (digest, meta, root))} != {bytes}
            or type(skip) not in _MAYBE_INT
            or type(parent_seq) not in _MAYBE_INT
            or type(parent) not in (bytes, type(None))
            or (size < 0 or created_us not in _TIMES)
        ):
            raise ValueError("of wrong types or sizes")
        extra = {_NAMES[k]: v for k, v in fields[5].items()} if len(fields) > 5 else {}
        check_extra(extra)
        record = Record(
            seq, id, step, created_us, OPERATIONS[operation], parent, parent_seq, extra, digest,
            _state_hash(root), size, added, skip,
        )  # fmt: skip
    except (ValueError, TypeError, LookupError, AttributeError) as e:
        raise Corrupt(f"{what} does not decode") from e
    return Row(record, meta, line, root)


def check_extra(extra: dict[str, Any]) -> None:
    """Raise ValueError or TypeError unless the optional fields have the shapes they should."""
    for name, value in extra.items():
        if name == "usage":
            tokens, cost = value
            fits = type(tokens) is int and type(cost) in (int, float)
        elif name == "run":
            id, turn, base = value
            fits = type(id) is str and type(turn) is int and type(base) in _MAYBE_INT
        elif name == "pending":
            fits = all(type(call) is list and len(call) == 4 for call in value)
        else:
            fits = type(value) is (dict if name == "meta" else str)
        if not fits:
            raise ValueError(name)


def _state_hash(root: bytes) -> Callable[[], bytes]:
    return lambda: parse(root, root=True).hash


class Head(NamedTuple):
    """Where a session is. Its row's bytes are the token of every compare-and-swap."""

    last: int
    """The newest checkpoint's seq; 0 if there is none."""
    seq: int
    """The head's seq."""
    operations: int
    """How many operations that are no checkpoints were logged."""
    parent: int | None
    """The seq of the head's parent in this session, should the head's record be damaged."""
    lease: bytes | None = None
    """The token of the run that the session is written by, while there is one."""

    def seal(self, session: int) -> bytes:
        return rows.seal(rows.HEAD, session, ormsgpack.packb(list(self)), level=rows.PLAIN)


def unseal_head(session: int, body: bytes) -> Head:
    _, payload = rows.unseal(rows.HEAD, session, body, "the head of a session")
    head = Head(*_unpack(payload, 5, "the head of a session"))
    if (
        {*map(type, head[:3])} != {int}
        or type(head.parent) not in _MAYBE_INT
        or type(head.lease) not in _MAYBE_BYTES
    ):
        raise Corrupt("the head of a session does not decode")
    return head


def _unpack(payload: bytes, count: int, what: str) -> list[Any]:
    fields = values.decode(payload)
    if type(fields) is list and len(fields) == count:
        return fields
    raise Corrupt(f"{what} does not decode")


class Info(NamedTuple):
    """What a session's row holds besides its name."""

    created_us: int
    agent: str | None
    origin: int | None
    """The position of the checkpoint that it was forked from."""


def session_address(num: int, name: bytes) -> int:
    if type(name) is not bytes:
        raise Corrupt("the name of a session is damaged")
    return num ^ xxh3_64_intdigest(name)


def seal_session(num: int, name: bytes, info: Info) -> bytes:
    payload = values.encode([*info])
    return rows.seal(rows.SESSION, session_address(num, name), payload, level=rows.PLAIN)


def unseal_session(num: int, name: bytes, body: bytes) -> Info:
    _, payload = rows.unseal(rows.SESSION, session_address(num, name), body, "a session")
    info = Info(*_unpack(payload, 3, "a session"))
    if (
        type(info.created_us) is not int
        or type(info.agent) not in (str, type(None))
        or type(info.origin) not in _MAYBE_INT
    ):
        raise Corrupt("a session does not decode")
    return info


# The name of a deleted session begins with a byte that no encoded name contains; so the name is
# free again, and is found when the deletion is undone.
_DELETED = b"\xff"


def deleted_name(num: int, name: bytes) -> bytes:
    return _DELETED + num.to_bytes(8, "big") + name


def former_name(num: int, name: bytes) -> bytes | None:
    """The name that a deleted session had; None for one that is not deleted."""
    return name[9:] if name.startswith(deleted_name(num, b"")) else None


class Tomb(NamedTuple):
    """A checkpoint that was deleted: hidden until gc frees it, or until this is undone."""

    operation: int
    created_us: int
    held: bool
    """Not to be freed for a day: it was chosen by its age, and a clock may be wrong."""
    boot: str
    """The boot of the machine, and how long it had been up, in seconds: a clock nobody sets."""
    uptime: int


def seal_tomb(session: int, seq: int, tomb: Tomb) -> bytes:
    payload = ormsgpack.packb([*tomb])
    return rows.seal(rows.TOMB, position(session, seq), payload, level=rows.PLAIN)


def unseal_tomb(session: int, seq: int, body: bytes) -> Tomb:
    what = f"the tombstone of checkpoint {seq}"
    _, payload = rows.unseal(rows.TOMB, position(session, seq), body, what)
    tomb = Tomb(*_unpack(payload, 5, what))
    if (*map(type, tomb),) != (int, int, bool, str, int):
        raise Corrupt(f"{what} does not decode")
    return tomb


class Gap(NamedTuple):
    """Before a checkpoint whose parent gc has freed: what is known of those that are gone."""

    ancestor: int | None
    """The position of the nearest ancestor that was left then."""
    freed: int
    """How many there were between."""
    parent_hash: bytes
    """The hash of the parent's record, on which this one's is built."""


def seal_gap(session: int, seq: int, gap: Gap) -> bytes:
    return rows.seal(rows.GAP, position(session, seq), ormsgpack.packb([*gap]), level=rows.PLAIN)


def unseal_gap(session: int, seq: int, body: bytes) -> Gap:
    what = f"the gap before checkpoint {seq}"
    _, payload = rows.unseal(rows.GAP, position(session, seq), body, what)
    gap = Gap(*_unpack(payload, 3, what))
    if type(gap.ancestor) not in _MAYBE_INT or (*map(type, gap[1:]),) != (int, bytes):
        raise Corrupt(f"{what} does not decode")
    return gap


def seal_freed(session: int, runs: list[tuple[int, int]]) -> bytes:
    """Which checkpoints of a session gc has freed: runs [low, high), in order."""
    flat = [n for low, high in runs for n in (low, high - low)]
    return rows.seal(rows.GAP, position(session, 0), ormsgpack.packb(flat))


def unseal_freed(session: int, body: bytes) -> list[tuple[int, int]]:
    what = "the list of freed checkpoints"
    _, payload = rows.unseal(rows.GAP, position(session, 0), body, what)
    flat = values.decode(payload)
    if type(flat) is not list or {*map(type, flat)} - {int} or len(flat) % 2:
        raise Corrupt(f"{what} does not decode")
    return [(low, low + length) for low, length in zip(flat[::2], flat[1::2], strict=True)]


def _mark_address(pos: int, kind: int, value: bytes) -> int:
    if type(value) is not bytes or type(kind) is not int:
        raise Corrupt("a label or tag is damaged")
    return pos ^ xxh3_64_intdigest(value, kind)


def seal_mark(pos: int, kind: int, value: bytes, order: int) -> bytes:
    """`order` tells which of two marks of one checkpoint is newer."""
    return rows.seal(
        rows.MARK, _mark_address(pos, kind, value), ormsgpack.packb([order]), level=rows.PLAIN
    )


def unseal_mark(pos: int, kind: int, value: bytes, body: bytes) -> int:
    what = "a label" if kind == LABEL else "a tag"
    _, payload = rows.unseal(rows.MARK, _mark_address(pos, kind, value), body, what)
    order = _unpack(payload, 1, what)[0]
    if type(order) is not int:
        raise Corrupt(f"{what} does not decode")
    return order


def seal_operation(
    session: int, number: int, kind: str, created_us: int, last: int, details: dict[str, Any]
) -> bytes:
    payload = values.encode_exact([kind, created_us, last, details])
    return rows.seal(rows.OPERATION, position(session, number), payload)


def unseal_operation(
    session: int, number: int, body: bytes
) -> tuple[str, int, int, dict[str, Any]]:
    what = f"operation {number}"
    _, payload = rows.unseal(rows.OPERATION, position(session, number), body, what)
    kind, at, last, details = _unpack(payload, 4, what)
    if (*map(type, (kind, at, last, details)),) != (str, int, int, dict) or at not in _TIMES:
        raise Corrupt(f"{what} does not decode")
    return kind, at, last, details


def seal_lease(session: int, facts: dict[str, Any]) -> bytes:
    """Who runs a session, and how far that is."""
    return rows.seal(rows.LEASE, session, values.encode_exact(facts))


def unseal_lease(session: int, body: bytes) -> dict[str, Any]:
    _, payload = rows.unseal(rows.LEASE, session, body, "the lease of a session")
    facts = values.decode(payload)
    if type(facts) is not dict:
        raise Corrupt("the lease of a session does not decode")
    return facts


def seal_entry(session: int, number: int, encoded: bytes) -> bytes:
    """What a run notes in its session's journal: a dict of facts, encoded."""
    level = rows.PLAIN if len(encoded) <= _PLAIN_ENTRY else rows.FAST
    return rows.seal(rows.JOURNAL, session << SEQ_BITS | number, encoded, 0, level)


def open_entry(session: int, number: int, body: bytes) -> bytes:
    """The encoded facts of an entry."""
    what = f"entry {number} of the journal"
    return rows.unseal(rows.JOURNAL, position(session, number), body, what)[1]


def unseal_entry(session: int, number: int, body: bytes) -> dict[str, Any]:
    facts = values.decode(open_entry(session, number, body))
    if type(facts) is not dict:
        raise Corrupt(f"entry {number} of the journal does not decode")
    return facts


SPACES = ("session", "stream")
FREED, COPIED = "freed", "copied"
_COUNTED = (*SPACES, FREED, COPIED)


def seal_counter(space: str, after: int) -> bytes:
    """The next number of a space that nobody has got yet; see `Turnover` for the other two."""
    where = _COUNTED.index(space)
    return rows.seal(rows.COUNTER, where, ormsgpack.packb([after]), level=rows.PLAIN)


def unseal_counter(space: str, body: bytes) -> int:
    what = f"the counter of {space}s"
    _, payload = rows.unseal(rows.COUNTER, _COUNTED.index(space), body, what)
    after = _unpack(payload, 1, what)[0]
    if type(after) is not int or after < 1:
        raise Corrupt(f"{what} does not decode")
    return after
