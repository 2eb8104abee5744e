"""The command line as a test calls it: in this process, on a clock that can be foreseen."""

from __future__ import annotations

import ctypes
import io
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

import holdfast
from holdfast import ids
from holdfast.cli.main import run

EPOCH = 1_735_689_600  # 2025: so long ago that every age is shown as a date


class Ended(NamedTuple):
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[Any]:
        """The output, each line parsed as JSON."""
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def one(self) -> Any:
        [only] = self.lines
        return only

    @property
    def error(self) -> dict[str, Any]:
        """The error of a command with --json: one object, and nothing else."""
        assert self.out == ""
        told: dict[str, Any] = json.loads(self.err)
        assert set(told) == {"error", "message", "hint", "exit_code"}
        assert told["exit_code"] == self.code
        return told


class Terminal:
    """A folder with a store in it, in which commands are typed."""

    def __init__(self, folder: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capture = folder, capture
        self.path = folder / "store.db"

    def __call__(self, *words: str, stdin: str | bytes | None = None) -> Ended:
        self._capture.readouterr()
        typed = io.BytesIO(stdin.encode() if isinstance(stdin, str) else stdin or b"")
        before, sys.stdin = sys.stdin, io.TextIOWrapper(typed)
        try:
            code = run([*words])
        finally:
            sys.stdin = before
            self._forget()
        said = self._capture.readouterr()
        assert "Traceback" not in said.err
        return Ended(code, said.out, said.err)

    def _forget(self) -> None:
        """Modules of this folder, that `resume` has imported."""
        for name, module in [*sys.modules.items()]:
            if str(getattr(module, "__file__", None)).startswith(str(self.folder)):
                del sys.modules[name]

    def type(self, line: str, stdin: str | bytes | None = None) -> Ended:
        return self(*shlex.split(line), stdin=stdin)

    def good(self, line: str, stdin: str | bytes | None = None) -> Ended:
        ended = self.type(line, stdin)
        assert ended.code == 0, ended.err
        return ended

    def store(self) -> holdfast.Store:
        return holdfast.open(self.path, durability="normal")


def environment(folder: Path) -> dict[str, str]:
    """For a real process that uses the same store."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "_HOLDFAST"))}
    return kept | {"HOLDFAST_STORE": str(folder / "store.db"), "COLUMNS": "200", "TERM": "xterm"}


class Clock:
    """Each look at it is a second later."""

    def __init__(self) -> None:
        self._seconds = EPOCH

    def __call__(self) -> int:
        self._seconds += 1
        return self._seconds * 1_000_000_000


def foreseeable(patch: pytest.MonkeyPatch) -> None:
    """From here on every id and every time is the same in each run."""
    patch.setattr(time, "time_ns", Clock())
    patch.setattr(ids, "_random", Random(7))


_ID = re.compile(r"\b0[4-9a-f][0-9a-hjkmnp-tv-z]{6,22}\b")
_WORDS = [
    (re.compile(r"\b[0-9a-f]{64}\b"), "<hash>"),
    (re.compile(r"\b[0-9a-f]{32}\b"), "<key>"),
    (re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z"), "<time>"),
    (re.compile(r"\d{4}-\d\d-\d\d [\d:.]+ UTC"), "<time>"),
    (re.compile(r"\b\d+[smhd] ago\b|\b2025-01-\d\d\b|\bjust now\b"), "<age>"),
    (re.compile(r"process \d+ on \S+?(?=[ )])"), "process <pid> on <host>"),
    (re.compile(r'"host":"[^"]*","pid":\d+'), '"host":"<host>","pid":"<pid>"'),
    (re.compile(r"\bkill -9 \d+"), "kill -9 <pid>"),
    (re.compile(rf"\b{re.escape(holdfast.__version__)}\b"), "<version>"),
]


class Normal:
    """Text in which whatever differs from run to run has a name instead."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._ids: list[str] = []
        self._runs: list[str] = []

    def __call__(self, text: str) -> str:
        text = text.replace(self._folder, "<folder>")
        for pattern, name in _WORDS:
            text = pattern.sub(name, text)
        text = re.sub(r"(?<!\.)\b[0-9a-f]{16}\b", self._run, text)
        return _ID.sub(self._id, text)

    def _run(self, found: re.Match[str]) -> str:
        if found[0] not in self._runs:
            self._runs.append(found[0])
        return f"<run{self._runs.index(found[0]) + 1}>"

    def _id(self, found: re.Match[str]) -> str:
        """The same name for an id and for its beginnings."""
        for n, known in enumerate(self._ids):
            if known.startswith(found[0]) or found[0].startswith(known):
                self._ids[n] = max(known, found[0], key=len)
                return f"<id{n + 1}>"
        self._ids.append(found[0])
        return f"<id{len(self._ids)}>"


_DRIVER = """
import contextlib, io, json, sys
from holdfast.cli.main import run
for line in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(line.split())
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""


def elsewhere(lines: list[str], folder: Path, **more: Any) -> list[Ended]:
    """Commands typed one after another in one other process."""
    done = subprocess.run(
        [sys.executable, "-c", _DRIVER],
        input=json.dumps(lines),
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        check=False,
        **more,
    )
    assert done.returncode == 0, done.stderr
    return [Ended(*json.loads(line)) for line in done.stdout.splitlines()]


def process(*words: str | bytes, folder: Path, **more: Any) -> subprocess.Popen[Any]:
    """`holdfast` itself."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    usual = {**pipes, "text": True}
    return subprocess.Popen(
        [sys.executable, "-m", "holdfast", *words],
        cwd=folder,
        env=environment(folder) | more.pop("env", {}),
        **{**usual, **more},
    )


def mortal() -> None:
    """Let rights be rights, also for root: run in a child, before it becomes another program."""
    if os.geteuid() != 0:
        return
    drop, override, search = 24, 1, 2  # PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in (override, search):
        if libc.prctl(drop, capability, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "a capability cannot be given up")
