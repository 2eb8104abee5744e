"""Runs a writer under strace and reads its file operations back as an ordered list."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

CALLS = (
    "open,openat,creat,close,dup,dup2,dup3,lseek,write,pwrite64,writev,pwritev,pwritev2,sendfile,copy_file_range,"
    "truncate,ftruncate,fallocate,fsync,fdatasync,sync_file_range,syncfs,sync,msync,mmap,rename,renameat,renameat2,"
    "unlink,unlinkat,rmdir,link,linkat,symlink,symlinkat,mkdir,mkdirat"
)

LINE = re.compile(rb"^(?P<pid>\d+) +(?P<call>\w+)\((?P<rest>.*)$", re.DOTALL)
RESUMED = re.compile(rb"^(?P<pid>\d+) +<\.\.\. (?P<call>\w+) resumed>(?P<rest>.*)$", re.DOTALL)
RESULT = re.compile(rb"^(?P<args>.*)\) += (?P<value>-?\d+|\?)(?P<more>.*)$", re.DOTALL)
STRING = re.compile(rb'"((?:\\x[0-9a-f]{2})*)"')
DESCRIPTOR = re.compile(rb"(?:^|[ ,])(-?\d+|AT_FDCWD)<((?:\\x[0-9a-f]{2})*)>(\(deleted\))?")


@dataclass(frozen=True, slots=True)
class Call:
    """One system call. `begun` and `ended` are its places in the order of the trace."""

    begun: int
    ended: int
    name: str
    args: bytes
    value: int
    opened: str = ""  # the path of the descriptor that the call returned

    @property
    def strings(self) -> list[bytes]:
        return [unhex(found) for found in STRING.findall(self.args)]

    @property
    def descriptors(self) -> list[tuple[int, str]]:
        """The descriptors in the arguments with their paths; -100 is the working directory."""
        return [
            (-100 if number == b"AT_FDCWD" else int(number), os.fsdecode(unhex(path)))
            for number, path, _ in DESCRIPTOR.findall(self.args)
        ]

    def number(self, place: int) -> int:
        """The argument at `place` from the end (-1 is the last), as a number."""
        return int(self.args.rsplit(b",", -place)[place].strip(b" )"), 0)


def unhex(quoted: bytes) -> bytes:
    return bytes.fromhex(quoted.replace(b"\\x", b"").decode("ascii"))


def record(arguments: list[str], into: Path, *, inject: str = "") -> None:
    """Run a Python module under strace, which must end well; the trace goes to `into`."""
    command = [
        "strace",
        "-f",
        "-y",
        "-xx",
        "-s",
        "1000000000",
        "-o",
        str(into),
        "-e",
        f"trace={CALLS}",
    ]
    if inject:
        command += ["-e", f"inject={inject}"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run(
        [*command, sys.executable, "-m", *arguments], check=True, env=environment, timeout=300
    )


def calls(trace: Iterable[bytes]) -> Iterator[Call]:
    """The calls that succeeded, and syncs that failed, in the order in which they began."""
    waiting: dict[bytes, tuple[int, bytes, bytes]] = {}
    found: list[Call] = []
    for place, line in enumerate(trace):
        line = line.rstrip(b"\n")
        if match := RESUMED.match(line):
            begun, call, start = waiting.pop(match["pid"])
            rest = start + match["rest"]
        elif match := LINE.match(line):
            begun, call, rest = place, match["call"], match["rest"]
            if rest.endswith(b" <unfinished ...>"):
                waiting[match["pid"]] = (begun, call, rest.removesuffix(b" <unfinished ...>"))
                continue
        else:
            continue  # signals and exits
        result = RESULT.match(rest)
        if result is None or result["value"] == b"?":
            continue
        value = int(result["value"])
        if value < 0 and call not in {b"fsync", b"fdatasync"}:
            continue
        opened = re.match(rb"<((?:\\x[0-9a-f]{2})*)>", result["more"])
        path = os.fsdecode(unhex(opened[1])) if opened else ""
        found.append(Call(begun, place, call.decode(), result["args"], value, path))
    found.sort(key=lambda call: call.begun)
    yield from found


def read(trace: Path) -> list[Call]:
    with trace.open("rb") as lines:
        return list(calls(lines))
