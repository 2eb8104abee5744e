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
CHECKPOINT, ITEMS, BLOB, HEAD, SESSION, MARK, OPERATION = (n * GOLDEN & MASK for n in range(1, 8))
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


def value_hash(flat: bytes, *, root: bool = False) -> bytes:
    """The hash of a canonical encoding; `root` says that it is a whole state."""
    kind, count, pos = token(flat, 0)
    size = len(flat)
    if kind == "array" and size > 1024 and size >= 32 * count:
        h = sha256(b"\xc1list").digest()
        for _ in range(count):
            end = skip(flat, pos)
            h = sha256(b"\xc1item" + h + value_hash(flat[pos:end])).digest()
            pos = end
        return h
    small_root = root and count <= 64 if kind == "map" else False
    if small_root or (kind == "map" and size > 4096 and size >= 64 * count):
        parts = [b"\xc1dict"]
        for _ in range(count):
            middle = skip(flat, pos)
            end = skip(flat, middle)
            parts += (flat[pos:middle], value_hash(flat[middle:end]))
            pos = end
        return sha256(b"".join(parts)).digest()
    return sha256(flat).digest()


# -- the store -----------------------------------------------------------------------------------


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


class Store:
    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        self.seen: set[str] = set()
        """Which parts of the format were met, so that a test can tell what it covers."""
        must(self._one("PRAGMA application_id")[0] == 0x484F4C44, "application id")
        must(self._one("PRAGMA user_version")[0] == 1, "format version")

    def close(self) -> None:
        self._db.close()

    def _one(self, sql: str, *bindings: Any) -> Any:
        return self._db.execute(sql, bindings).fetchone()

    def _all(self, sql: str, *bindings: Any) -> list[Any]:
        return self._db.execute(sql, bindings).fetchall()

    # Sessions, heads and checkpoints

    def sessions(self) -> dict[str, int]:
        found = {}
        for num, name, body in self._all("SELECT num, name, body FROM sessions ORDER BY name"):
            plain = xxhash.xxh3_64_intdigest(name)
            _, payload = unseal(SESSION, num ^ plain, body)
            must(len(decode(payload)) == 2, "a session's row")
            number = self._one("SELECT num FROM names WHERE hash = ?", plain >> 1)
            must(number == (num,), "the names table")
            found[name.decode("utf-8", "surrogatepass")] = num
        return found

    def agent(self, number: int) -> str | None:
        name, body = self._one("SELECT name, body FROM sessions WHERE num = ?", number)
        _, agent = decode(unseal(SESSION, number ^ xxhash.xxh3_64_intdigest(name), body)[1])
        return str(agent) if agent is not None else None

    def head(self, number: int) -> list[int]:
        """last, seq, operations, parent"""
        (body,) = self._one("SELECT body FROM heads WHERE session = ?", number)
        head: list[int] = decode(unseal(HEAD, number, body)[1])
        must(len(head) == 4, "a head's row")
        return head

    def checkpoints(self, session: str) -> Iterator[Checkpoint]:
        number = self.sessions()[session]
        last = self.head(number)[0]
        for seq in range(1, last + 1):
            yield self.checkpoint(session, number, seq)

    def checkpoint(self, session: str, number: int, seq: int) -> Checkpoint:
        pos = number << 32 | seq
        id, body = self._one("SELECT id, body FROM checkpoints WHERE pos = ?", pos)
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
        return Checkpoint(
            session, number, seq, text, id, digest, meta, line, size, added, root, skipped, step,
            created, OPERATIONS[operation], parent_seq, parent, fields, label, tags,
        )  # fmt: skip

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
            found.append((pos & 0xFFFFFFFF, kind, details))
        return found

    def record_hash(self, c: Checkpoint, state_hash: bytes) -> bytes:
        """What the record's hash has to be."""
        parent_hash = bytes(32)
        if c.parent_seq is not None:
            home = c.fields.get("o", c.session)
            parent = self.checkpoint(home, self.sessions()[home], c.parent_seq)
            must(parent.raw_id == c.parent, "the parent's id")
            parent_hash = parent.hash
        name = c.session.encode("utf-8", "surrogatepass")
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
        flat = self.expand(c.root, 0)
        must(len(flat) == c.size, "the size of a state")
        return decode(flat), value_hash(flat, root=True)

    def expand(self, stored: bytes, depth: int) -> bytes:
        """The canonical encoding: the stored one with every reference replaced."""
        flat, end = self._expand(stored, 0, depth)
        must(end == len(stored), "bytes after a value")
        return flat

    def _expand(self, data: bytes, pos: int, depth: int) -> tuple[bytes, int]:
        kind, content, end = token(data, pos)
        if kind in ("array", "map"):
            parts = [data[pos:end]]
            for _ in range(content):
                if kind == "map":
                    start, end = end, skip(data, end)
                    parts.append(data[start:end])
                part, end = self._expand(data, end, depth + 1)
                parts.append(part)
            return b"".join(parts), end
        if kind == "ext" and content[0] == 32:
            return self._blob(content[1]), end
        if kind == "ext" and content[0] == 33:
            return self._rope(content[1], depth), end
        return data[pos:end], end

    def _blob(self, payload: bytes) -> bytes:
        digest, size = decode(payload)
        (body,) = self._one("SELECT body FROM blobs WHERE digest = ?", digest)
        _, flat = unseal(BLOB, int.from_bytes(digest[:8], "big"), body)
        must(len(flat) == size and sha256(flat).digest() == digest, "a blob")
        self.seen.add("blob")
        return flat

    def _rope(self, payload: bytes, depth: int) -> bytes:
        kind, count, size, digest, head, _debt, tails, spans = decode(payload)
        must(len(tails) % 6 == 0 and len(tails) <= 12 and len(spans) % 3 == 0, "a rope")
        items: list[bytes] = []
        for stream, first, length in zip(spans[::3], spans[1::3], spans[2::3], strict=True):
            items += self._items(stream, first, length)
        must(len(items) == count, "the number of a rope's items")
        self.seen |= {f"rope {kind}"} | ({"nested rope"} if depth > 1 else set())
        if len(spans) > 3:
            self.seen.add("extents")
        if len(tails) > 6:
            self.seen.add("edits")
        if kind == 0:
            flat = _header(0x90, 0xDC, count) + b"".join([self.expand(i, depth + 1) for i in items])
        elif kind == 1:
            parts = [_header(0x80, 0xDE, count)]
            for item in items:
                cut = skip(item, 0)
                parts += (item[:cut], self.expand(item[cut:], depth + 1))
            flat = b"".join(parts)
        else:
            flat = head + b"".join(items)
        must(len(flat) == size, "the size of a rope")
        must(value_hash(flat, root=depth == 0) == digest, "the hash of a rope")
        return flat

    def _items(self, stream: int, first: int, length: int) -> list[bytes]:
        base, stop = stream << 24, first + length
        (start,) = self._one(
            "SELECT max(pos) FROM items WHERE pos BETWEEN ? AND ?", base, base + first
        )
        must(start is not None, "missing items")
        at, items = first, []
        for pos, body in self._all(
            "SELECT pos, body FROM items WHERE pos >= ? AND pos < ? ORDER BY pos",
            start,
            base + stop,
        ):
            low = pos - base
            held = self._row(pos, body)
            must(low <= at < low + len(held), "missing items")
            run = held[at - low : stop - low]
            items += run
            at += len(run)
        must(at == stop, "missing items")
        return items

    def _row(self, pos: int, body: bytes) -> list[bytes]:
        flags, data = unseal(ITEMS, pos, body)
        if flags & REFS:
            self.seen.add("refs")
        if not flags & MANY:
            return [data]
        cut = 4 + int.from_bytes(data[:4], "big")
        lengths = decode(data[4:cut])
        self.seen.add("pack")
        items = []
        for n in lengths:
            items.append(data[cut : cut + n])
            cut += n
        must(lengths and cut == len(data), "a table of lengths")
        return items


def _header(small: int, big: int, count: int) -> bytes:
    if count < 16:
        return bytes((small | count,))
    if count < 1 << 16:
        return bytes((big,)) + count.to_bytes(2, "big")
    return bytes((big + 1,)) + count.to_bytes(4, "big")
