"""A reader of stores written from docs/format.md alone: it imports nothing of holdfast.

It is the proof that the page is complete. It favours being read over being fast, checks every
digest and every hash on its way, and never writes.
"""

import datetime as dt
import sqlite3
import struct
import zoneinfo
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import UUID

import xxhash
import zstandard

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
CHECKPOINT, ITEMS, BLOB, HEAD, SESSION, MARK, OPERATION, COUNTER, TOMB, GAP, LEASE, JOURNAL = (
    n * GOLDEN & MASK for n in range(1, 13)
)
ZSTD, MANY, REFS, ENCRYPTED = 1, 2, 4, 128
MIB = 1 << 20
ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
OPERATIONS = ["save", "append", "patch", "fork"]


class Bad(Exception):
    """The bytes are not what the format says."""


def must(fact: object, what: str) -> None:
    if not fact:
        raise Bad(what)


# -- sealed rows ---------------------------------------------------------------------------------


def unseal(kind: int, address: int, row: bytes) -> tuple[int, bytes]:
    body = row[8:]
    seed = (kind + address) & MASK
    must(len(row) >= 9 and xxhash.xxh3_64_digest(body, seed) == row[:8], "digest of a row")
    flags, payload = body[0], body[1:]
    must(not flags & ENCRYPTED, "an encrypted row")
    must(not flags & ~(ZSTD | MANY | REFS), "an unknown flag")
    if flags & ZSTD:
        size = zstandard.frame_content_size(payload)
        bound = min(max(16 * MIB, 1000 * len(payload)), 528 * MIB)
        must(0 <= size <= bound, "size of a compressed row")
        payload = zstandard.ZstdDecompressor().decompress(payload, allow_extra_data=False)
        must(len(payload) == size, "size of a compressed row")
    return flags, payload


# -- MessagePack ---------------------------------------------------------------------------------
# A token is (kind, content, end). For "array" and "map" the content is the number of elements and
# `end` is where the first one begins; for "ext" it is (tag, payload).

Token = tuple[str, Any, int]
_INTS = {0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i"}
_INTS[0xD3] = ">q"
_SIZED = {0xD9: ("str", 1), 0xDA: ("str", 2), 0xDB: ("str", 4), 0xC4: ("bin", 1)}
_SIZED |= {0xC5: ("bin", 2), 0xC6: ("bin", 4), 0xC7: ("ext", 1), 0xC8: ("ext", 2)}
_SIZED |= {0xC9: ("ext", 4), 0xDC: ("array", 2), 0xDD: ("array", 4), 0xDE: ("map", 2)}
_SIZED |= {0xDF: ("map", 4)}


def token(data: bytes, pos: int) -> Token:
    must(pos < len(data), "an encoding that ends too early")
    first = data[pos]
    pos += 1
    if first < 0x80:
        return "int", first, pos
    if first < 0x90:
        return "map", first & 15, pos
    if first < 0xA0:
        return "array", first & 15, pos
    if first < 0xC0:
        return _content("str", first & 31, data, pos)
    if first >= 0xE0:
        return "int", first - 256, pos
    if first in (0xC0, 0xC2, 0xC3):
        return "constant", {0xC0: None, 0xC2: False, 0xC3: True}[first], pos
    if first == 0xCB:
        return "float", struct.unpack_from(">d", data, pos)[0], pos + 8
    if first in _INTS:
        width = struct.calcsize(_INTS[first])
        return "int", struct.unpack_from(_INTS[first], data, pos)[0], pos + width
    if 0xD4 <= first <= 0xD8:
        return _content("ext", 1 << (first - 0xD4), data, pos)
    must(first in _SIZED, f"byte {first:#x} begins no value")
    kind, width = _SIZED[first]
    size = int.from_bytes(data[pos : pos + width], "big")
    return _content(kind, size, data, pos + width)


def _content(kind: str, size: int, data: bytes, pos: int) -> Token:
    if kind in ("array", "map"):
        return kind, size, pos
    start = pos + (kind == "ext")
    end = start + size
    must(end <= len(data), "an encoding that ends too early")
    content = data[start:end]
    return kind, (data[pos], content) if kind == "ext" else content, end


def skip(data: bytes, pos: int) -> int:
    """Where the value at `pos` ends."""
    kind, content, pos = token(data, pos)
    if kind in ("array", "map"):
        for _ in range(content * (2 if kind == "map" else 1)):
            pos = skip(data, pos)
    return pos


def decode(data: bytes) -> Any:
    value, end = _decode(data, 0)
    must(end == len(data), "bytes after a value")
    return value


def _decode(data: bytes, pos: int) -> tuple[Any, int]:
    kind, content, pos = token(data, pos)
    if kind == "array":
        items = []
        for _ in range(content):
            item, pos = _decode(data, pos)
            items.append(item)
        return items, pos
    if kind == "map":
        pairs = {}
        for _ in range(content):
            key, pos = _decode(data, pos)
            must(type(key) is str and key not in pairs, "key of a map")
            pairs[key], pos = _decode(data, pos)
        return pairs, pos
    if kind == "str":
        return content.decode(), pos
    return (_tagged(*content) if kind == "ext" else content), pos


def _tagged(tag: int, data: bytes) -> Any:
    match tag:
        case 1:
            return tuple(decode(data))
        case 2:
            return set(decode(data))
        case 3:
            return frozenset(decode(data))
        case 4:
            return int.from_bytes(data, "big", signed=True)
        case 5:
            return data.decode("utf-8", "surrogatepass")
        case 6:
            flat = decode(data)
            return dict(zip(flat[::2], flat[1::2], strict=True))
        case 7:
            text, fold, *zone = decode(data)
            return dt.datetime.fromisoformat(text).replace(fold=fold, tzinfo=_zone(*zone))
        case 8:
            return dt.date.fromisoformat(data.decode())
        case 9:
            text, fold, *zone = decode(data)
            return dt.time.fromisoformat(text).replace(fold=fold, tzinfo=_zone(*zone))
        case 10:
            days, seconds, microseconds = decode(data)
            return dt.timedelta(days, seconds, microseconds)
        case 11:
            return Decimal(data.decode())
        case 12:
            return UUID(bytes=data)
    raise Bad(f"unknown tag {tag}")


def _zone(offset: int | None, zone: str | None, name: str | None) -> dt.tzinfo | None:
    if zone in zoneinfo.available_timezones():
        return zoneinfo.ZoneInfo(zone)
    if offset is None:
        return None
    delta = dt.timedelta(microseconds=offset)
    return dt.timezone(delta) if name is None else dt.timezone(delta, name)


# -- hashes of values ----------------------------------------------------------------------------


def by_items(size: int, count: int) -> bool:
    """Whether a list of that encoded size is hashed by its items."""
    return size > 1024 if size >= 32 * count else size > 16384 and count <= 1 << 22


def by_entries(size: int, count: int, *, root: bool) -> bool:
    return (root and count <= 64) or (size > 4096 and size >= 64 * count)


def list_hash(hashes: list[bytes]) -> bytes:
    h = sha256(b"\xc1list").digest()
    for item in hashes:
        h = sha256(b"\xc1item" + h + item).digest()
    return h


def dict_hash(entries: list[tuple[bytes, bytes]]) -> bytes:
    return sha256(b"\xc1dict" + b"".join([key + value for key, value in entries])).digest()


# -- the store -----------------------------------------------------------------------------------


@dataclass
class Session:
    number: int
    name: str
    """Of a deleted one, the name it had."""
    deleted: bool
    created_us: int
    agent: str | None
    origin: int | None
    former: list[str]


@dataclass
class Checkpoint:
    session: str
    number: int
    seq: int
    id: str
    raw_id: bytes
    hash: bytes
    meta: bytes
    line: int
    size: int
    added: int
    root: bytes
    skip: int | None
    step: int
    created_us: int
    operation: str
    parent_seq: int | None
    parent: bytes | None
    fields: dict[str, Any]
    label: str | None
    tags: list[str]
    buried: bool
    """Deleted, alone or with its session."""


@dataclass
class Gap:
    ancestor: int | None
    freed: int
    hash: bytes


class Store:
    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        self.seen: set[str] = set()
        """Which parts of the format were met, so that a test can tell what it covers."""
        must(self._one("PRAGMA application_id")[0] == 0x484F4C44, "application id")
        (self.version,) = self._one("PRAGMA user_version")
        must(self.version in (1, 2), "format version")

    def close(self) -> None:
        self._db.close()

    def _one(self, sql: str, *bindings: Any) -> Any:
        return self._db.execute(sql, bindings).fetchone()

    def _all(self, sql: str, *bindings: Any) -> list[Any]:
        return self._db.execute(sql, bindings).fetchall()

    # Sessions and heads

    def sessions(self) -> dict[str, int]:
        """Numbers by name."""
        return {s.name: s.number for s in self.all_sessions() if not s.deleted}

    def all_sessions(self) -> list[Session]:
        """Deleted ones, too. Several of them can have had one name."""
        return [self.session(num) for (num,) in self._all("SELECT num FROM sessions ORDER BY name")]

    def session(self, num: int) -> Session:
        found = self._one("SELECT name, origin, body FROM sessions WHERE num = ?", num)
        must(found, "a session is missing")
        name, column, body = found
        plain = xxhash.xxh3_64_intdigest(name)
        created, agent, origin, *more = decode(unseal(SESSION, num ^ plain, body)[1])
        must(column == origin, "the index of forks")
        must(self._one("SELECT num FROM names WHERE hash = ?", plain >> 1) == (num,), "the names")
        deleted = name[:9] == b"\xff" + struct.pack(">Q", num)
        if deleted:
            self.seen.add("deleted session")
        text = (name[9:] if deleted else name).decode("utf-8", "surrogatepass")
        former = more[0] if more else []
        must(len(more) < 2 and all(type(each) is str for each in former), "a session")
        return Session(num, text, deleted, created, agent, origin, former)

    def head(self, number: int) -> list[Any]:
        """last, seq, operations, parent, lease"""
        (body,) = self._one("SELECT body FROM heads WHERE session = ?", number)
        head: list[Any] = decode(unseal(HEAD, number, body)[1])
        must(len(head) == 5, "a head's row")
        if not head[1]:
            self.seen.add("no head")
        return head

    # Checkpoints

    def tree(self, number: int) -> list[Checkpoint]:
        return [c for c in self.checkpoints(number) if not c.buried]

    def checkpoints(self, number: int) -> Iterator[Checkpoint]:
        """All that have a row, deleted ones too; it is an error if there should be another."""
        freed = self.freed(number)
        for seq in range(1, self.head(number)[0] + 1):
            if seq in freed:
                pos = number << 32 | seq
                must(not self._one("SELECT 1 FROM checkpoints WHERE pos = ?", pos), "not freed")
            else:
                yield self.checkpoint(number << 32 | seq)

    def history(self, number: int, seq: int | None = None) -> list[tuple[Checkpoint, int]]:
        """From the head, or a seq, on. With each, how many are left out between it and the next."""
        seq = self.head(number)[1] if seq is None else seq
        line: list[Checkpoint] = []
        at = number << 32 | seq if seq else None
        while at is not None:
            c = self.checkpoint(at)
            must(not line or line[-1].step > c.step, "a step that does not go down")
            if not c.buried:
                line.append(c)
            at = self._above(c)
        steps = [*[c.step for c in line], 0]
        return [(c, c.step - before - 1) for c, before in zip(line, steps[1:], strict=True)]

    def _above(self, c: Checkpoint) -> int | None:
        """The position of the nearest ancestor that is not freed."""
        above, gap = self._parent(c), self.gap(c.number << 32 | c.seq)
        if above is None or isinstance(above, Checkpoint):
            must(gap is None, "a gap where none is")
            return None if above is None else above.number << 32 | above.seq
        if above.ancestor is not None:
            far = self.checkpoint(above.ancestor)
            must(above.freed == c.step - far.step - 1, "the width of a gap")
            if far.number != c.number:
                self.seen.add("gap to another session")
        return above.ancestor

    def _parent(self, c: Checkpoint) -> Checkpoint | Gap | None:
        """The parent, or what is known of one that gc has freed."""
        if c.parent_seq is None:
            return None
        pos = c.number << 32 | c.parent_seq
        if "o" in c.fields:
            pos = self.session(c.number).origin or 0
            must(pos & 0xFFFFFFFF == c.parent_seq, "the origin of a fork")
        if self._one("SELECT 1 FROM checkpoints WHERE pos = ?", pos):
            parent = self.checkpoint(pos)
            must(parent.raw_id == c.parent, "the parent's id")
            return parent
        gap = self.gap(c.number << 32 | c.seq)
        must(gap, "a parent is missing")
        must("o" in c.fields or c.parent_seq in self.freed(c.number), "a parent is missing")
        return gap

    def gap(self, pos: int) -> Gap | None:
        found = self._one("SELECT body FROM gaps WHERE pos = ?", pos)
        if found is None:
            return None
        self.seen.add("gap")
        return Gap(*decode(unseal(GAP, pos, found[0])[1]))

    def freed(self, number: int) -> set[int]:
        pos = number << 32
        found = self._one("SELECT body FROM gaps WHERE pos = ?", pos)
        if found is None:
            return set()
        self.seen.add("freed")
        flat = decode(unseal(GAP, pos, found[0])[1])
        runs = list(zip(flat[::2], flat[1::2], strict=True))
        edges = [n for low, length in runs for n in (low, low + length)]
        must(edges == sorted(edges), "the order of the freed")
        return {seq for low, length in runs for seq in range(low, low + length)}

    def checkpoint(self, pos: int) -> Checkpoint:
        number, seq = pos >> 32, pos & 0xFFFFFFFF
        found = self._one("SELECT id, body FROM checkpoints WHERE pos = ?", pos)
        must(found, "a checkpoint is missing")
        id, body = found
        must(len(id) == 15, "an id")
        fold = int.from_bytes(id[:8], "big") ^ int.from_bytes(id[7:], "big")
        _, payload = unseal(CHECKPOINT, pos ^ fold, body)
        digest, meta, line, size, added, root, skipped = decode(payload)
        step, created, operation, parent_seq, parent, *more = decode(meta)
        n = int.from_bytes(id, "big")
        text = "".join([ALPHABET[n >> shift & 31] for shift in range(115, -1, -5)])
        fields = more[0] if more else {}
        if "k" in fields:
            key = fields["k"].encode("utf-8", "surrogatepass")
            row = self._one("SELECT seq FROM keys WHERE session = ? AND key = ?", number, key)
            must(row == (seq,), "the index of keys")
        label, tags = self._marks(pos)
        home = self.session(number)
        buried = home.deleted or self.tomb(pos) is not None
        return Checkpoint(
            home.name, number, seq, text, id, digest, meta, line, size, added, root, skipped, step,
            created, OPERATIONS[operation], parent_seq, parent, fields, label, tags, buried,
        )  # fmt: skip

    def tomb(self, pos: int) -> list[Any] | None:
        """operation, created, held, boot, uptime"""
        found = self._one("SELECT body FROM tombs WHERE pos = ?", pos)
        if found is None:
            return None
        self.seen.add("tombstone")
        tomb: list[Any] = decode(unseal(TOMB, pos, found[0])[1])
        must([*map(type, tomb)] == [int, int, bool, str, int], "a tombstone")
        return tomb

    def _marks(self, pos: int) -> tuple[str | None, list[str]]:
        label, newest, tags = None, -1, []
        sql = "SELECT kind, value, body FROM marks WHERE pos = ? ORDER BY kind, value"
        for kind, value, body in self._all(sql, pos):
            _, payload = unseal(MARK, pos ^ xxhash.xxh3_64_intdigest(value, kind), body)
            (order,) = decode(payload)
            text = value.decode("utf-8", "surrogatepass")
            if kind == 1:
                tags.append(text)
            elif order >= newest:
                label, newest = text, order
        return label, tags

    def operations(self, number: int) -> list[tuple[int, str, dict[str, Any]]]:
        found = []
        low, high = number << 32, number + 1 << 32
        for pos, body in self._all(
            "SELECT pos, body FROM operations WHERE pos >= ? AND pos < ? ORDER BY pos", low, high
        ):
            kind, _created, _last, details = decode(unseal(OPERATION, pos, body)[1])
            must("head" in details, "the head after an operation")
            found.append((pos & 0xFFFFFFFF, kind, details))
        return found

    # Runs

    def lease(self, number: int) -> tuple[bytes, dict[str, Any]] | None:
        """Token and facts."""
        row = self._one("SELECT token, body FROM leases WHERE session = ?", number)
        if row is None:
            return None
        self.seen.add("lease")
        facts: dict[str, Any] = decode(unseal(LEASE, number, row[1])[1])
        return row[0], facts

    def journal(self, number: int) -> list[tuple[int, dict[str, Any]]]:
        low, high = number << 32, number + 1 << 32
        rows = self._all(
            "SELECT pos, body FROM journal WHERE pos >= ? AND pos < ? ORDER BY pos", low, high
        )
        found = [(pos - low, decode(unseal(JOURNAL, pos, body)[1])) for pos, body in rows]
        numbers = [n for n, _ in found]
        must(numbers == [*range(numbers[0], numbers[-1] + 1)] if numbers else True, "the journal")
        if self.version > 1:
            span = self._one("SELECT first, next FROM spans WHERE session = ?", number) or (1, 1)
            must(numbers == [*range(*span)], "the span of the journal")
        self.seen |= {facts["what"] for _, facts in found}
        return found

    def check_tally(self, number: int) -> None:
        """Since version 2."""
        low, high = number << 32, number + 1 << 32
        sums: list[Any] = []
        for table in ("marks", "operations", "tombs"):
            bodies = self._all(f"SELECT body FROM {table} WHERE pos >= ? AND pos < ?", low, high)
            digests = [struct.unpack(">Q", body[:8])[0] for (body,) in bodies]
            sums.append(sum(digests) % 2**62)
        lease = self._one("SELECT token, body FROM leases WHERE session = ?", number)
        sums.append(lease[1][:8] + lease[0] if lease else None)
        sql = "SELECT marks, operations, tombs, lease FROM tallies WHERE session = ?"
        must([*(self._one(sql, number) or (0, 0, 0, None))] == sums, "the tally of a session")
        self.seen.add("tally")

    def spent(self, number: int) -> int:
        """The tokens that the runs of a session, and others, have spent."""
        calls: dict[int, int] = {}
        for _, facts in self.journal(number):
            if "usage" in facts:
                calls[facts["of"]] = facts["usage"][0]
        others = 0
        attempts: dict[tuple[str, int], dict[int, int]] = {}
        for c in self.checkpoints(number):
            if "x" not in c.fields:
                others += c.fields.get("u", [0])[0]
                continue
            attempt, base, outside, named = c.fields["x"]
            total = outside[0] + sum(tokens for _, tokens, _ in named)
            must(c.fields.get("u", [0])[0] == total, "the parts of a usage")
            sums = attempts.setdefault((c.fields["n"][0], base), {})
            sums[attempt] = sums.get(attempt, 0) + outside[0]
            for call, tokens, _ in named:
                calls[call] = max(tokens, calls.get(call, 0))
        largest = [max(sums.values()) for sums in attempts.values()]
        return others + sum(calls.values()) + sum(largest)

    def facets(self) -> set[tuple[int, bytes, bytes]]:
        return set(self._all("SELECT kind, value, id FROM facets"))

    def facets_of(self, c: Checkpoint) -> set[tuple[int, bytes, bytes]]:
        """What the index for searches has to have of a checkpoint."""
        session = struct.pack(">Q", c.number)
        found = [(0, c.label, c.raw_id), *[(1, tag, c.raw_id) for tag in c.tags]]
        of_session = ((4, "a", session), (5, "c", session))
        for kind, short, id in ((2, "t", c.raw_id), (3, "s", c.raw_id), *of_session):
            found.append((kind, c.fields.get(short), id))
        return {
            (kind, text.encode("utf-8", "surrogatepass"), id)
            for kind, text, id in found
            if text is not None
        }

    def record_hash(self, c: Checkpoint, state_hash: bytes) -> bytes | None:
        """What the record's hash has to be; None if that is unknown."""
        parent = self._parent(c)
        parent_hash = bytes(32) if parent is None else parent.hash
        if not parent_hash:
            return None
        must(len(parent_hash) == 32, "a hash")
        name = [*self.session(c.number).former, c.session][0].encode("utf-8", "surrogatepass")
        return sha256(
            b"\xc1record"
            + struct.pack(">I", len(name)) + name
            + struct.pack(">I", c.seq) + c.raw_id
            + struct.pack(">I", len(c.meta)) + c.meta
            + state_hash + parent_hash
        ).digest()  # fmt: skip

    # States

    def state(self, c: Checkpoint) -> tuple[Any, bytes]:
        """The value and its hash."""
        flat, digest = self.expand(c.root, 0)
        must(len(flat) == c.size, "the size of a state")
        return decode(flat), digest

    def expand(self, stored: bytes, depth: int, *, follow: bool = True) -> tuple[bytes, bytes]:
        """The canonical encoding, with every reference replaced, and the value's hash."""
        flat, digest, end = self._expand(stored, 0, depth, follow=follow)
        must(end == len(stored), "bytes after a value")
        return flat, digest

    def _expand(
        self, data: bytes, pos: int, depth: int, *, follow: bool
    ) -> tuple[bytes, bytes, int]:
        kind, content, end = token(data, pos)
        if kind in ("array", "map"):
            parts, keys, hashes = [data[pos:end]], [], []
            for _ in range(content):
                if kind == "map":
                    start, end = end, skip(data, end)
                    keys.append(data[start:end])
                    parts.append(data[start:end])
                part, digest, end = self._expand(data, end, depth + 1, follow=follow)
                parts.append(part)
                hashes.append(digest)
            flat = b"".join(parts)
            if kind == "array" and by_items(len(flat), content):
                return flat, list_hash(hashes), end
            if kind == "map" and by_entries(len(flat), content, root=depth == 0):
                return flat, dict_hash([*zip(keys, hashes, strict=True)]), end
            return flat, sha256(flat).digest(), end
        if follow and kind == "ext" and content[0] == 32:
            flat = self._blob(content[1])
            return flat, sha256(flat).digest(), end
        if follow and kind == "ext" and content[0] == 33:
            return *self._rope(content[1], depth), end
        return data[pos:end], sha256(data[pos:end]).digest(), end

    def _blob(self, payload: bytes) -> bytes:
        digest, size = decode(payload)
        (body,) = self._one("SELECT body FROM blobs WHERE digest = ?", digest)
        _, flat = unseal(BLOB, int.from_bytes(digest[:8], "big"), body)
        must(len(flat) == size and sha256(flat).digest() == digest, "a blob")
        self.seen.add("blob")
        return flat

    def _rope(self, payload: bytes, depth: int) -> tuple[bytes, bytes]:
        kind, count, size, digest, head, _debt, tails, spans = decode(payload)
        must(len(tails) % 6 == 0 and len(tails) <= 12 and len(spans) % 3 == 0, "a rope")
        items: list[tuple[bytes, bool]] = []
        for stream, first, length in zip(spans[::3], spans[1::3], spans[2::3], strict=True):
            items += self._items(stream, first, length)
        must(len(items) == count, "the number of a rope's items")
        self.seen |= {f"rope {kind}"} | ({"nested rope"} if depth > 1 else set())
        if len(spans) > 3:
            self.seen.add("extents")
        if len(tails) > 6:
            self.seen.add("edits")
        parts = {0: [_header(0x90, 0xDC, count)], 1: [_header(0x80, 0xDE, count)], 2: [head]}[kind]
        keys, hashes = [], []
        for item, refs in items:
            if kind == 2:
                parts.append(item)
                continue
            cut = skip(item, 0) if kind == 1 else 0
            value, value_hash = self.expand(item[cut:], depth + 1, follow=refs)
            parts += (item[:cut], value)
            keys.append(item[:cut])
            hashes.append(value_hash)
        flat = b"".join(parts)
        must(len(flat) == size, "the size of a rope")
        if kind == 0:
            must(by_items(size, count), "a list that is hashed whole")
            found = list_hash(hashes)
        elif kind == 1:
            must(by_entries(size, count, root=depth == 0), "a dict that is hashed whole")
            found = dict_hash([*zip(keys, hashes, strict=True)])
        else:  # a whole value; a list of tiny items, if version 1 wrote it
            found = sha256(flat).digest()
        must(found == digest, "the hash of a rope")
        return flat, found

    def _items(self, stream: int, first: int, length: int) -> list[tuple[bytes, bool]]:
        """Each with whether it may hold references."""
        base, stop = stream << 24, first + length
        (start,) = self._one(
            "SELECT max(pos) FROM items WHERE pos BETWEEN ? AND ?", base, base + first
        )
        must(start is not None, "missing items")
        at, items = first, list[tuple[bytes, bool]]()
        for pos, body in self._all(
            "SELECT pos, body FROM items WHERE pos >= ? AND pos < ? ORDER BY pos",
            start,
            base + stop,
        ):
            low = pos - base
            held, refs = self._row(pos, body)
            must(low <= at < low + len(held), "missing items")
            run = held[at - low : stop - low]
            items += [(item, refs) for item in run]
            at += len(run)
        must(at == stop, "missing items")
        return items

    def _row(self, pos: int, body: bytes) -> tuple[list[bytes], bool]:
        flags, data = unseal(ITEMS, pos, body)
        refs = bool(flags & REFS)
        if refs:
            self.seen.add("refs")
        if not flags & MANY:
            return [data], refs
        cut = 4 + int.from_bytes(data[:4], "big")
        lengths = decode(data[4:cut])
        self.seen.add("pack")
        items = []
        for n in lengths:
            items.append(data[cut : cut + n])
            cut += n
        must(lengths and cut == len(data), "a table of lengths")
        return items, refs


def _header(small: int, big: int, count: int) -> bytes:
    if count < 16:
        return bytes((small | count,))
    if count < 1 << 16:
        return bytes((big,)) + count.to_bytes(2, "big")
    return bytes((big + 1,)) + count.to_bytes(4, "big")
