"""Sealed rows of everything but data: checkpoints, heads, sessions, marks, operations, leases.

The hash of a checkpoint's record covers its metadata, the state's hash and the parent's hash. It
does not cover the layout, so a copy in another store has the same hash.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

import ormsgpack
from xxhash import xxh3_64_intdigest

from holdfast.errors import Corrupt
from holdfast.format import memory_limit, msgpack, rows, values
from holdfast.format.nodes import Node, parse
from holdfast.model import Record, Usage

if TYPE_CHECKING:
    from collections.abc import Sequence

SEQ_BITS = 32
MAX_SEQ = (1 << SEQ_BITS) - 1
OPERATIONS = ("save", "append", "patch", "fork")
# The kinds of index terms, by which people search. An agent and the session above (CHILD_OF) are
# index terms of a session, the others of a checkpoint. Labels and tags are also marks.
LABEL, TAG, TRIGGER, STATUS, AGENT, CHILD_OF = range(6)
_OF_SESSIONS = {"agent": AGENT, "child_of": CHILD_OF}

# Short names on disk for the optional fields of a record.
FIELDS = {
    "trigger": "t", "status": "s", "reason": "r", "agent": "a", "usage": "u", "pending": "p",
    "hint": "h", "meta": "m", "key": "k", "origin": "o", "run": "n",
    "child_of": "c", "spent": "x", "adopted": "d",
}  # fmt: skip
_NAMES = {short: name for name, short in FIELDS.items()}
_PLAIN_MAX = 384
_PLAIN_ENTRY = 1024
_INT, _MAYBE_INT = (int,), (int, type(None))
_MAYBE_BYTES = (bytes, type(None))
_MAYBE_STR = (str, type(None))
MISSING = b"missing"
"""Stands for a row that should exist and does not. Every sealed row is longer."""
_TIMES = range(-62_135_596_800_000_000, 253_402_300_800_000_000)  # the years 1 to 9999, in us


def encode_name(name: str) -> bytes:
    """Return the stored bytes of a name. Any string can be stored, even with lone surrogates."""
    return name.encode("utf-8", "surrogatepass")


def decode_name(raw: bytes) -> str:
    try:
        return raw.decode("utf-8", "surrogatepass")
    except (UnicodeDecodeError, AttributeError) as e:
        raise Corrupt("a stored name is damaged") from e


def shown_name(raw: bytes) -> str:
    """Return a name for display, with damaged bytes as escapes. Never raises Corrupt."""
    try:
        return decode_name(raw)
    except Corrupt:
        return raw.decode(errors="backslashreplace")


def position(session: int, seq: int) -> int:
    """Return one number for a checkpoint: the session in the high bits, the seq in the low ones."""
    return session << SEQ_BITS | seq


def checkpoint_address(session: int, seq: int, id: bytes) -> int:
    """Return the address that a checkpoint's row is sealed with. It depends on the id too."""
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
    """Return the hashed part of a record. `extra` holds the optional fields that are set."""
    fields = [step, created_us, OPERATIONS.index(operation), parent_seq, parent]
    encoded = ormsgpack.packb(fields)
    if not extra:
        return encoded
    # The sixth field is encoded separately: together with the parent, which is bytes, it would
    # take the slow path of `encode_exact`.
    more = values.encode_exact({FIELDS[k]: v for k, v in extra.items()}, depth=1)
    return msgpack.array_header(len(fields) + 1) + encoded[1:] + more


class IndexTerm(NamedTuple):
    """A term by which searches find a checkpoint, or a session.

    `id` is the id of the checkpoint, or the number of the session as 8 bytes.
    """

    kind: int
    value: bytes
    id: bytes


def index_terms(
    id: bytes, extra: dict[str, Any], label: str | None = None, tags: tuple[str, ...] = ()
) -> list[IndexTerm]:
    """Return the index terms of a checkpoint."""
    found = [(TAG, tag) for tag in tags]
    for kind, value in (
        (LABEL, label),
        (TRIGGER, extra.get("trigger")),
        (STATUS, extra.get("status")),
    ):
        if value is not None:
            found.append((kind, value))
    return [IndexTerm(kind, encode_name(value), id) for kind, value in found]


def session_terms(number: int, extra: dict[str, Any]) -> list[IndexTerm]:
    """Return the index terms of a session that are in one of its records."""
    id = number.to_bytes(8, "big")
    return [
        IndexTerm(kind, encode_name(extra[name]), id)
        for name, kind in _OF_SESSIONS.items()
        if name in extra
    ]


def hash_prefix(name: bytes) -> bytes:
    """Return the first bytes that are hashed for each record of a session."""
    return b"\xc1record" + len(name).to_bytes(4, "big") + name


def record_hash(
    prefix: bytes, seq: int, id: bytes, meta: bytes, state_hash: bytes, parent_hash: bytes
) -> bytes:
    """Return the hash of a record: over its session, seq, id, metadata, state and parent."""
    head = prefix + seq.to_bytes(4, "big") + id + len(meta).to_bytes(4, "big")
    return sha256(head + meta + state_hash + parent_hash).digest()


def read_extra(meta: bytes) -> dict[str, Any]:
    """Return the optional fields of encoded metadata."""
    fields = values.decode(meta)
    return {_NAMES[k]: v for k, v in fields[5].items()} if len(fields) > 5 else {}


class Row(NamedTuple):
    """The content of a checkpoint's row. `root` is the stored encoding of its state."""

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
    """Return the content of a checkpoint's row. Raises Corrupt if it is damaged."""
    what = f"checkpoint {seq}"
    _, payload = rows.unseal(rows.CHECKPOINT, checkpoint_address(session, seq, id), body, what)
    try:
        memory_limit.check(payload)
        digest, meta, line, size, added, root, skip = ormsgpack.unpackb(payload)
        fields = values.decode_stored(meta)
        step, created_us, operation, parent_seq, parent = fields[:5]
        if not (
            type(digest) is type(meta) is type(root) is bytes
            and type(line) is type(size) is type(added) is int
            and type(step) is type(created_us) is type(operation) is int
            and type(skip) in _MAYBE_INT
            and type(parent_seq) in _MAYBE_INT
            and type(parent) in _MAYBE_BYTES
            and (size >= 0 and created_us in _TIMES)
        ):
            raise ValueError("of wrong types or sizes")
        extra = {_NAMES[k]: v for k, v in fields[5].items()} if len(fields) > 5 else {}
        check_extra(extra)
        record = Record(
            seq, id, step, created_us, OPERATIONS[operation], parent, parent_seq, extra, digest,
            StoredRoot(root), size, added, skip,
        )  # fmt: skip
    except (ValueError, TypeError, LookupError, AttributeError) as e:
        raise Corrupt(f"{what} does not decode") from e
    return Row(record, meta, line, root)


def usage_fields(usage: Usage) -> list[Any]:
    """Return a usage in stored form: `[tokens, cost]`, and more if more is known.

    That is `[tokens, cost, model, input, output, cached, reasoning]` without None and zeros at the
    end, or `[tokens, cost, parts]` for a sum over several models.
    """
    if usage.parts:
        return [usage.tokens, usage.cost, [usage_fields(part) for part in usage.parts]]
    counts = [usage.input, usage.output, usage.cached, usage.reasoning]
    fields = [usage.tokens, usage.cost, usage.model, *counts]
    while len(fields) > 2 and not fields[-1]:
        fields.pop()
    return fields


def read_usage(fields: Sequence[Any]) -> Usage:
    """Return the usage of a stored form; no fields are no usage. Raises Corrupt."""
    try:
        if len(fields) > 2 and type(fields[2]) is list:
            return sum([_read_part(*part) for part in fields[2]], Usage())
        return _read_part(*fields) if fields else Usage()
    except (TypeError, ValueError) as e:
        raise Corrupt("a usage does not decode") from e


def _read_part(tokens: int, cost: float, model: str | None = None, *counts: int) -> Usage:
    input, output, cached, reasoning = [*counts, 0, 0, 0, 0][:4]
    return Usage(input, output, cached, reasoning, cost, model, tokens)


def _is_usage(tokens: Any, cost: Any, model: Any = None, *counts: Any) -> bool:
    """Return whether these are the fields of a stored usage."""
    fits = type(tokens) is int and type(cost) in (int, float)
    if type(model) is list:
        flat = all(type(part) is list and list not in map(type, part) for part in model)
        return fits and not counts and flat and all(_is_usage(*part) for part in model)
    named = type(model) in _MAYBE_STR and model != ""
    return fits and named and len(counts) <= 4 and all(type(count) is int for count in counts)


def check_extra(extra: dict[str, Any]) -> None:
    """Raise ValueError or TypeError if an optional field has a wrong type."""
    for name, value in extra.items():
        if name == "usage":
            fits = _is_usage(*value)
        elif name == "spent":
            attempt, base, outside, calls = value
            fits = type(attempt) is type(base) is int and _is_usage(*outside)
            fits = fits and all(type(call) is int and _is_usage(*usage) for call, *usage in calls)
        elif name == "run":
            id, turn, base = value
            fits = type(id) is str and type(turn) is int and type(base) in _MAYBE_INT
        elif name == "pending":
            fits = all(type(call) is list and len(call) == 4 for call in value)
        else:
            fits = type(value) is (dict if name == "meta" else str)
        if not fits:
            raise ValueError(name)


class StoredRoot:
    """The root of a stored state. A call computes the state's hash, which few callers need."""

    __slots__ = ("_root",)

    def __init__(self, root: bytes) -> None:
        self._root = root

    def node(self) -> Node:
        return parse(self._root, root=True)

    def __call__(self) -> bytes:
        return self.node().hash


class Head(NamedTuple):
    """The head of a session. The bytes of its row are compared and swapped by each commit."""

    last: int
    """The seq of the newest checkpoint; 0 if there is none."""
    seq: int
    """The seq of the checkpoint that is the head."""
    operations: int
    """The number of logged operations. Checkpoints do not count."""
    parent: int | None
    """The seq of the head's parent in this session, for when the head's record is damaged."""
    lease: bytes | None = None
    """The lease token of the run that writes to the session; None if there is no run."""

    def seal(self, session: int) -> bytes:
        return rows.seal(rows.HEAD, session, ormsgpack.packb(list(self)), level=rows.PLAIN)


def unseal_head(session: int, body: bytes) -> Head:
    types = (_INT, _INT, _INT, _MAYBE_INT, _MAYBE_BYTES)
    return Head(*_unseal(rows.HEAD, session, body, "the head of a session", types))


def _unseal(
    kind: int,
    address: int,
    body: bytes,
    what: str,
    types: tuple[tuple[type, ...], ...],
    optional: int = 0,
) -> list[Any]:
    """Return the fields of a row, each of one of its types. Raises Corrupt if it has others.

    The last fields may be missing, at most `optional`.
    """
    _, payload = rows.unseal(kind, address, body, what)
    fields = values.decode_stored(payload)
    if type(fields) is not list or not len(types) - optional <= len(fields) <= len(types):
        raise Corrupt(f"{what} does not decode")
    for field, allowed in zip(fields, types, strict=False):
        if type(field) not in allowed:
            raise Corrupt(f"{what} does not decode")
    return fields


class Info(NamedTuple):
    """The content of a session's row besides its name."""

    created_us: int
    agent: str | None
    origin: int | None
    """The position of the checkpoint that it was forked from; None if it is no fork."""
    former: tuple[str, ...] = ()
    """The names that it had before it was renamed, the first one first."""


def session_address(num: int, name: bytes) -> int:
    """Return the address that a session's row is sealed with. It depends on the name too."""
    if type(name) is not bytes:
        raise Corrupt("the name of a session is damaged")
    return num ^ xxh3_64_intdigest(name)


def seal_session(num: int, name: bytes, info: Info) -> bytes:
    *fields, former = info
    payload = values.encode([*fields, [*former]] if former else fields)
    return rows.seal(rows.SESSION, session_address(num, name), payload, level=rows.PLAIN)


def unseal_session(num: int, name: bytes, body: bytes) -> Info:
    types = (_INT, _MAYBE_STR, _MAYBE_INT, (list,))
    fields = _unseal(rows.SESSION, session_address(num, name), body, "a session", types, optional=1)
    former = tuple(fields[3]) if len(fields) > 3 else ()
    if not all(type(each) is str for each in former):
        raise Corrupt("a session does not decode")
    return Info(fields[0], fields[1], fields[2], former)


def hashed_name(name: bytes, info: Info) -> bytes:
    """Return the name of a session that the hashes of its records cover: its first name."""
    return encode_name(info.former[0]) if info.former else name


# A deleted session is renamed: the new name is a byte that no encoded name contains, its number and
# its former name. So the name is free for other sessions, and an undo can restore it.
_DELETED = b"\xff"


def deleted_name(num: int, name: bytes) -> bytes:
    """Return the stored name of a session once it is deleted."""
    return _DELETED + num.to_bytes(8, "big") + name


def former_name(num: int, name: bytes) -> bytes | None:
    """Return the name of a session before it was deleted; None if it is not deleted."""
    return name[9:] if name.startswith(deleted_name(num, b"")) else None


def is_deleted(num: int, name: bytes) -> bool:
    """Return whether a session is deleted, by its number and its stored name."""
    return former_name(num, name) is not None


class Tombstone(NamedTuple):
    """Marks a checkpoint as deleted. It is hidden until gc frees it or the deletion is undone."""

    operation: int
    created_us: int
    held: bool
    """Whether gc must wait for a day: it was chosen by its age, and the clock may be wrong."""
    boot: str
    """The boot of the machine when it was deleted; see `clock.uptime`."""
    uptime: int
    """The seconds from that boot to the deletion. Unlike the time of day, this cannot be set."""


def seal_tombstone(session: int, seq: int, tombstone: Tombstone) -> bytes:
    payload = ormsgpack.packb([*tombstone])
    return rows.seal(rows.TOMBSTONE, position(session, seq), payload, level=rows.PLAIN)


def unseal_tombstone(session: int, seq: int, body: bytes) -> Tombstone:
    types = (_INT, _INT, (bool,), (str,), _INT)
    what = f"the tombstone of checkpoint {seq}"
    return Tombstone(*_unseal(rows.TOMBSTONE, position(session, seq), body, what, types))


class Graft(NamedTuple):
    """A parent pointer over removed history, for a checkpoint whose parent gc has freed."""

    ancestor: int | None
    """The position of the nearest ancestor that gc left; None if it left none."""
    freed: int
    """The number of checkpoints that gc freed between the two."""
    parent_hash: bytes
    """The hash of the freed parent's record, needed to verify the hash of this checkpoint."""


def seal_graft(session: int, seq: int, graft: Graft) -> bytes:
    return rows.seal(
        rows.GRAFT, position(session, seq), ormsgpack.packb([*graft]), level=rows.PLAIN
    )


def unseal_graft(session: int, seq: int, body: bytes) -> Graft:
    types = (_MAYBE_INT, _INT, (bytes,))
    what = f"the gap before checkpoint {seq}"
    return Graft(*_unseal(rows.GRAFT, position(session, seq), body, what, types))


def seal_freed(session: int, runs: list[tuple[int, int]]) -> bytes:
    """Seal the list of the checkpoints that gc has freed, as intervals [low, high) in order."""
    flat = [n for low, high in runs for n in (low, high - low)]
    return rows.seal(rows.GRAFT, position(session, 0), ormsgpack.packb(flat))


def unseal_freed(session: int, body: bytes) -> list[tuple[int, int]]:
    """Return the checkpoints that gc has freed, as intervals [low, high) in order."""
    what = "the list of freed checkpoints"
    _, payload = rows.unseal(rows.GRAFT, position(session, 0), body, what)
    flat = values.decode(payload)
    if type(flat) is not list or {*map(type, flat)} - {int} or len(flat) % 2:
        raise Corrupt(f"{what} does not decode")
    return [(low, low + length) for low, length in zip(flat[::2], flat[1::2], strict=True)]


def _mark_address(pos: int, kind: int, value: bytes) -> int:
    if type(value) is not bytes or type(kind) is not int:
        raise Corrupt("a label or tag is damaged")
    return pos ^ xxh3_64_intdigest(value, kind)


def seal_mark(pos: int, kind: int, value: bytes, order: int) -> bytes:
    """Seal a label or tag. Of two marks of one checkpoint the newer has the higher `order`."""
    return rows.seal(
        rows.MARK, _mark_address(pos, kind, value), ormsgpack.packb([order]), level=rows.PLAIN
    )


def unseal_mark(pos: int, kind: int, value: bytes, body: bytes) -> int:
    """Return the `order` of a label or tag."""
    what = "a label" if kind == LABEL else "a tag"
    order: int = _unseal(rows.MARK, _mark_address(pos, kind, value), body, what, (_INT,))[0]
    return order


def seal_operation(
    session: int, number: int, kind: str, created_us: int, last: int, details: dict[str, Any]
) -> bytes:
    payload = values.encode_exact([kind, created_us, last, details])
    return rows.seal(rows.OPERATION, position(session, number), payload)


def unseal_operation(
    session: int, number: int, body: bytes
) -> tuple[str, int, int, dict[str, Any]]:
    """Return the kind, time, newest seq at that time, and details of an operation."""
    what = f"operation {number}"
    types = ((str,), _INT, _INT, (dict,))
    kind, at, last, details = _unseal(rows.OPERATION, position(session, number), body, what, types)
    if at not in _TIMES:
        raise Corrupt(f"{what} does not decode")
    return kind, at, last, details


def seal_lease(session: int, facts: dict[str, Any]) -> bytes:
    """Seal the lease of a session: which worker runs it, and how far the run is."""
    return rows.seal(rows.LEASE, session, values.encode_exact(facts))


def unseal_lease(session: int, body: bytes) -> dict[str, Any]:
    """Return the facts of a lease. Raises Corrupt if it is missing or damaged."""
    if body == MISSING:
        raise Corrupt(
            "the lease of the session is missing, or is an old one",
            hint="check which calls the last run has made; run(resume=False) begins a new run",
        )
    _, payload = rows.unseal(rows.LEASE, session, body, "the lease of a session")
    facts = values.decode_stored(payload)
    if type(facts) is not dict:
        raise Corrupt("the lease of a session does not decode")
    return facts


def seal_entry(session: int, number: int, encoded: bytes) -> bytes:
    """Seal an entry that a run appends to its session's journal: an encoded dict of facts."""
    level = rows.PLAIN if len(encoded) <= _PLAIN_ENTRY else rows.FAST
    return rows.seal(rows.JOURNAL, session << SEQ_BITS | number, encoded, 0, level)


def open_entry(session: int, number: int, body: bytes) -> bytes:
    """Return the encoded facts of an entry. Raises Corrupt if it is missing or damaged."""
    what = f"entry {number} of the journal"
    if body == MISSING:
        raise Corrupt(f"{what} is missing", hint="store.repair() lists what is lost")
    return rows.unseal(rows.JOURNAL, position(session, number), body, what)[1]


def unseal_entry(session: int, number: int, body: bytes) -> dict[str, Any]:
    """Return the facts of an entry. Raises Corrupt if it is missing or damaged."""
    facts = values.decode_stored(open_entry(session, number, body))
    if type(facts) is not dict:
        raise Corrupt(f"entry {number} of the journal does not decode")
    return facts


SPACES = ("session", "stream")
FREED, COPIED = "freed", "copied"
_COUNTED = (*SPACES, FREED, COPIED)


def seal_counter(space: str, after: int) -> bytes:
    """Seal a counter: of a space, the next number that is not reserved.

    `FREED` and `COPIED` are no spaces but the epochs of gc and copies; see `Turnover`.
    """
    where = _COUNTED.index(space)
    return rows.seal(rows.COUNTER, where, ormsgpack.packb([after]), level=rows.PLAIN)


def unseal_counter(space: str, body: bytes) -> int:
    """Return the number of a counter. Raises Corrupt if it is damaged."""
    what = f"the counter of {space}s"
    after: int = _unseal(rows.COUNTER, _COUNTED.index(space), body, what, (_INT,))[0]
    if after < 1:
        raise Corrupt(f"{what} does not decode")
    return after
