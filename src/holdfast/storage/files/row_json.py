"""Rows as JSON in the files backend. It is readable and converts back to the same bytes.

A row becomes `[digest, payload]`, or `[digest, payload, flags]`. Rows that SQLite stores compressed
are stored uncompressed here; the digest is then that of the uncompressed row.
"""

from __future__ import annotations

import datetime as dt
from base64 import b64decode, b64encode
from functools import lru_cache
from typing import Any

import ormsgpack
from xxhash import xxh3_64_hexdigest

from holdfast import ids
from holdfast.errors import UNREADABLE, Corrupt
from holdfast.format import portable, records, rows, values

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_MICROSECOND, _SECOND = dt.timedelta(microseconds=1), dt.timedelta(seconds=1)
_SUM = b',"sum":"'
RAW = b'{"$raw":'
_TAIL = len(_SUM) + 16 + len(b'"}')
_SHORT = records.FIELDS
_LONG = {short: name for name, short in _SHORT.items()}
MALFORMED = (ValueError, TypeError, LookupError, AttributeError, OverflowError)
"""The errors that the reading of damaged text may raise."""


def plain(kind: int, address: int, row: bytes) -> bytes:
    """Return the row uncompressed. A damaged row stays as it is."""
    if len(row) < 9 or not row[8] & rows.ZSTD:
        return row
    try:
        flags, payload = rows.unseal(kind, address, row, "a row")
    except UNREADABLE:
        return row  # other code reports the damage
    return rows.seal(kind, address, payload, flags & ~rows.ZSTD, rows.PLAIN)


def show_row(row: bytes) -> Any:
    if len(row) < 9:
        return {"$raw": b64encode(row).decode()}
    shown = [row[:8].hex(), portable.to_json(row[9:])]
    return [*shown, row[8]] if row[8] else shown


def hide_row(shown: Any) -> bytes:
    if type(shown) is dict:
        return b64decode(shown["$raw"], validate=True)
    digest, payload, *flags = shown
    return bytes.fromhex(digest) + bytes(flags or (0,)) + portable.from_json(payload)


def show_name(raw: bytes) -> Any:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return {"$bytes": b64encode(raw).decode()}


def hide_name(shown: Any) -> bytes:
    if type(shown) is str:
        return shown.encode()
    return b64decode(shown["$bytes"], validate=True)


# -- lines ---------------------------------------------------------------------------------------


def seal_line(seed: int, entry: dict[str, Any]) -> bytes:
    """Return a line that ends with a digest over everything before it."""
    text = portable.dumps(entry)[:-1]
    return text + _SUM + xxh3_64_hexdigest(text, seed).encode() + b'"}\n'


def read_line(seed: int, line: bytes) -> dict[str, Any] | None:
    """Return the entry of a line without its newline; None if the line is damaged.

    Version control tools may end lines with two characters.
    """
    line = line.removesuffix(b"\r")
    text = line[:-_TAIL]
    if line[-_TAIL:] != _SUM + xxh3_64_hexdigest(text, seed).encode() + b'"}':
        return None
    try:
        entry = portable.loads(text + b"}")
    except ValueError:
        return None
    return entry if type(entry) is dict else None


def is_same(written: bytes, text: bytes) -> bool:
    """Return whether a file is as it was written, apart from its line endings."""
    return written == text or (b"\r" in text and written == text.replace(b"\r\n", b"\n"))


# -- checkpoints ---------------------------------------------------------------------------------


def show_checkpoint(seq: int, id: bytes, row: bytes) -> bytes:
    """Return the file of a checkpoint, with one field per line."""
    shown: dict[str, Any] = {"id": ids.to_text(id), "seq": seq}
    try:
        shown |= _show_record(row)
    except (*MALFORMED, Corrupt):
        shown = {"id": ids.to_text(id), "seq": seq, "row": show_row(row)}
    return lay_out(shown)


def lay_out(shown: dict[str, Any]) -> bytes:
    """Return JSON with one field per line.

    Names need no escaping, and most values do not either.
    """
    fields = [
        f'"{k}": {v}'
        if type(v) is int
        else f'"{k}": "{v}"'
        if type(v) is str and v.isascii() and v.isprintable() and '"' not in v and "\\" not in v
        else f'"{k}": {portable.dumps(v).decode()}'
        for k, v in shown.items()
    ]
    return ("{" + ",\n ".join(fields) + "}\n").encode()


def hide_checkpoint(text: bytes) -> bytes:
    """Return the row in a checkpoint's file; a damaged row if the file is damaged."""
    try:
        shown = portable.loads(text)
        row = hide_row(shown["row"]) if "row" in shown else _hide_record(shown)
        # Accept only byte-identical re-rendering. Older versions stored some rows raw, deep in the
        # stack; these are as sound as the digest of the row.
        id = ids.from_text(shown["id"])
        raw = ("row" in shown or RAW in text) and is_same(lay_out(shown), text)
        if id is None or not (raw or is_same(show_checkpoint(shown["seq"], id, row), text)):
            raise ValueError
    except (*MALFORMED, Corrupt):
        return b"a file that is damaged"
    return row


def _show_record(row: bytes) -> dict[str, Any]:
    if row[8]:
        raise ValueError("not a plain row")
    digest, meta, line, size, added, root, skip = ormsgpack.unpackb(row[9:])
    fields = values.decode(meta, values.keep_tags)
    step, created, operation, parent_seq, parent = fields[:5]
    named: bytes | None = None
    shown: dict[str, Any] = {
        "step": step,
        "created": f"{_second(created // 1_000_000)}.{created % 1_000_000:06}+00:00",
        "operation": records.OPERATIONS[operation],
        "parent": None if parent is None else ids.to_text(parent),
    }
    if parent_seq is not None:
        shown["parent_seq"] = parent_seq
    if len(fields) > 5:
        named = _pack({_LONG[short]: value for short, value in fields[5].items()})
        shown["fields"] = portable.to_json(named)
    shown |= {"hash": digest.hex(), "size": size, "added": added, "line": line}
    if skip is not None:
        shown["skip"] = skip
    shown |= {"state": portable.to_json(root), "sum": row[:8].hex()}
    if _record(shown, named, root) != row:
        raise ValueError("not as it would be read again")
    return shown


@lru_cache(16)  # steps come many to a second
def _second(since: int) -> str:
    """Return a time in whole seconds, without its zone."""
    return (_EPOCH + since * _SECOND).replace(tzinfo=None).isoformat()


def _hide_record(shown: dict[str, Any]) -> bytes:
    named = portable.from_json(shown["fields"]) if "fields" in shown else None
    return _record(shown, named, portable.from_json(shown["state"]))


def _record(shown: dict[str, Any], named: bytes | None, root: bytes) -> bytes:
    """Return the row of a rendering, given the encodings of its two larger parts."""
    created = (dt.datetime.fromisoformat(shown["created"]) - _EPOCH) // _MICROSECOND
    parent = None if shown["parent"] is None else ids.from_text(shown["parent"])
    operation = records.OPERATIONS.index(shown["operation"])
    fields = [shown["step"], created, operation, shown.get("parent_seq"), parent]
    if named is not None:
        found = values.decode(named, values.keep_tags)
        fields.append({_SHORT[name]: value for name, value in found.items()})
    payload = ormsgpack.packb(
        [
            bytes.fromhex(shown["hash"]), _pack(fields), shown["line"], shown["size"],
            shown["added"], root, shown.get("skip"),
        ]
    )  # fmt: skip
    return bytes.fromhex(shown["sum"]) + b"\0" + payload


def _pack(value: Any) -> bytes:
    return ormsgpack.packb(value, None, values.PACK)
