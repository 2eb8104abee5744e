"""The states of the golden stores: fixed for ever, since every version has to load them."""

import datetime as dt
import zoneinfo
from decimal import Decimal
from typing import Any
from uuid import UUID

TEXT = "The quick brown fox jumps over the lazy dog. "
HOUR = dt.timezone(dt.timedelta(hours=1))

VALUES: dict[str, Any] = {
    "none": None,
    "bools": [True, False],
    "ints": [0, 1, -1, 127, 128, -32, -33, 2**31, -(2**31), 2**63 - 1, 2**64 - 1, -(2**63)],
    "big ints": [2**64, -(2**63) - 1, 2**70, -(2**200)],
    "floats": [0.0, -0.0, 1.5, 1e300, float("inf"), float("-inf")],
    "text": ["", "ascii", "süß", "\0", "😀", "\ud800", "x" * 31, "x" * 32, "x" * 256],
    "bytes": [b"", b"\xc1", bytes(range(256))],
    "tuples": [(), (1, "a"), ((2,), [3])],
    "sets": [set(), {1, 2, "b"}, frozenset({"x", (1, 2)})],
    "keys": {1: "int", False: "bool", None: "none", 2.5: "float", b"k": "bytes", "s": "str"},
    "odd keys": {"\udfff": 1, "plain": 2},
    "times": [
        dt.datetime(2024, 5, 1, 12, 30),  # noqa: DTZ001 - naive ones are values too
        dt.datetime(2024, 5, 1, 12, 30, 15, 123456, tzinfo=HOUR),
        dt.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=zoneinfo.ZoneInfo("UTC")),
        dt.date(1999, 12, 31),
        dt.time(23, 59, 59, 999999),
        dt.time(1, tzinfo=HOUR),
        dt.time(1, tzinfo=dt.timezone(dt.timedelta(hours=2), "CEST")),
        dt.time(1, tzinfo=zoneinfo.ZoneInfo("UTC")),
        dt.timedelta(days=-1, seconds=5, microseconds=7),
    ],
    "decimals": [Decimal("1.10"), Decimal("-0"), Decimal("1E+99"), Decimal("Infinity")],
    "uuid": UUID("12345678-1234-5678-1234-567812345678"),
    "imitations": {"__tag__": 1, "$type": "set", "tags": [[1, 2], {"ext": 33}]},
}


def message(n: int) -> dict[str, Any]:
    role = ("user", "assistant", "tool")[n % 3]
    return {"role": role, "content": f"{n}: {TEXT * (n % 3 + 1)}", "n": n}


FILES = {f"src/file{n}.py": f"# file {n}\n{TEXT * 12}" for n in range(12)}
"""A dict that is too big to lie inline."""
ESSAY = "".join([f"Chapter {n}. {TEXT * 3}\n" for n in range(50)])
NESTED = {"channels": {"log": [[message(n), TEXT * 40] for n in range(12)]}, "n": 1}

TINY = [f"{n:05}" for n in range(3000)]
"""In stores since version 2: more than 16 KB, in items of less than 32 bytes."""
