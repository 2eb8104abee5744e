"""Agent messages for the benchmarks: varied, repeatable, realistic in size and compressibility.

The text comes from the source of the standard library. Docstrings become the messages of people and
models, and code becomes the results of tools. No paragraph occurs twice within about 20 MB.
"""

from __future__ import annotations

import functools
import gzip
import json
import random
import re
import string
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Message = dict[str, Any]

_DOCSTRING = re.compile(r'[rR]?"""(.*?)"""', re.DOTALL)
_INDENT = re.compile(r"[ \t]*\n[ \t]*")
_SKIPPED = {"site-packages", "dist-packages", "encodings", "__pycache__"}
_TOOLS = ("read_file", "search", "run_command", "edit_file", "list_symbols")
# How large each kind of message is, relative to the average one.
_SHARE = {"user": 0.5, "call": 0.6, "result": 1.45, "answer": 1.0}


@functools.cache
def corpus() -> tuple[str, str]:
    """Return the prose (docstrings) and the code of the standard library, each paragraph once."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in sorted(root.rglob("*.py")) if _SKIPPED.isdisjoint(path.parts)]
    random.Random(0).shuffle(files)
    prose: list[str] = []
    code: list[str] = []
    seen: set[str] = set()
    for path in files:
        source = path.read_text(encoding="utf-8", errors="ignore")
        docstrings = [match.group(1) for match in _DOCSTRING.finditer(source)]
        _add_new_paragraphs(_INDENT.sub("\n", "\n\n".join(docstrings)), prose, seen)
        _add_new_paragraphs(_DOCSTRING.sub("...", source), code, seen)
    return "\n\n".join(prose), "\n\n".join(code)


def _add_new_paragraphs(text: str, to: list[str], seen: set[str]) -> None:
    for paragraph in text.split("\n\n"):
        body = paragraph.strip()
        if len(body) > 20 and body not in seen:
            seen.add(body)
            to.append(paragraph.strip("\n"))


class Writer:
    """Writes messages, records and files. The same seed always gives the same ones."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        prose, code = corpus()
        self._prose = _Reader(prose, self._random.randrange(len(prose)))
        self._code = _Reader(code, self._random.randrange(len(code)))

    def conversation(self, count: int, size: int = 1200) -> Iterator[Message]:
        """Yield ``count`` messages of about ``size`` bytes: questions, calls, results, answers."""
        kind = "user"
        call_id = ""
        for _ in range(count):
            length = int(size * _SHARE[kind] * self._random.uniform(0.6, 1.4))
            if kind == "user":
                yield self.user(length)
                kind = "call"
            elif kind == "call":
                message = self.call(length)
                call_id = message["tool_calls"][0]["id"]
                yield message
                kind = "result"
            elif kind == "result":
                yield self.result(length, call_id)
                kind = "call" if self._random.random() < 0.6 else "answer"
            else:
                yield self.answer(length)
                kind = "user"

    def user(self, size: int) -> Message:
        return {"id": self._id("msg_"), "role": "user", "content": self.prose(size - 75)}

    def answer(self, size: int) -> Message:
        half = (size - 80) // 2
        content = f"{self.prose(half)}\n\n```python\n{self.code(half)}\n```"
        return {"id": self._id("msg_"), "role": "assistant", "content": content}

    def call(self, size: int) -> Message:
        tool = self._random.choice(_TOOLS)
        arguments = {"line": self._random.randrange(5000), "text": self.code((size - 250) * 2 // 3)}
        function = {"name": tool, "arguments": json.dumps(arguments)}
        return {
            "id": self._id("msg_"),
            "role": "assistant",
            "content": self.prose((size - 250) // 3),
            "tool_calls": [{"id": self._id("call_"), "type": "function", "function": function}],
        }

    def result(self, size: int, call_id: str) -> Message:
        return {
            "id": self._id("msg_"),
            "role": "tool",
            "tool_call_id": call_id,
            "content": self.code(size - 130),
        }

    def record(self, size: int) -> Message:
        """Return a small structured value, as in a task list."""
        return {
            "id": self._id("task_"),
            "done": self._random.random() < 0.5,
            "score": round(self._random.random(), 4),
            "note": self.prose(size - 75, exact=True),
        }

    def prose(self, size: int, exact: bool = False) -> str:
        return self._prose.take(max(size, 20), exact)

    def code(self, size: int, exact: bool = False) -> str:
        return self._code.take(max(size, 20), exact)

    def runs(self, count: int) -> list[list[Message]]:
        """Return runs shaped like those of a customer-service agent: one long shared system
        prompt, short turns, tool results of up to 9 KB, 6 to 62 messages."""
        system = {"role": "system", "content": self.prose(6200)}
        return [[system, *self._short_turns()] for _ in range(count)]

    def _short_turns(self) -> Iterator[Message]:
        count = round(self._random.triangular(5, 61, 12))
        while count > 0:
            yield {"role": "user", "content": self.prose(self._random.randint(40, 200))}
            for _ in range(self._random.choice((0, 1, 1, 2))):
                call = self.call(280)
                yield call
                size = 130 + min(9000, int(self._random.expovariate(1 / 900)))
                yield self.result(size, call["tool_calls"][0]["id"])
                count -= 2
            yield {"role": "assistant", "content": self.prose(self._random.randint(80, 500))}
            count -= 2

    def _id(self, prefix: str) -> str:
        return prefix + "".join(self._random.choices(string.ascii_letters + string.digits, k=24))


class _Reader:
    """A long text, read piece by piece from any position, and from the start again at its end."""

    def __init__(self, text: str, position: int) -> None:
        self._text = text
        self._position = position

    def take(self, size: int, exact: bool) -> str:
        start = self._position
        if start + size + 200 > len(self._text):
            start = 0
        end = start + size
        if not exact:
            line_end = self._text.find("\n", end, end + 80)
            end = line_end if line_end >= 0 else end
        self._position = end
        return self._text[start:end]


def read_runs(path: Path) -> list[list[Message]]:
    """Read real runs: a JSON list of message lists, or of objects that hold them as ``traj``."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        runs = json.load(file)
    return [run["traj"] if isinstance(run, dict) else run for run in runs]


def json_size(value: object) -> int:
    """Return the bytes of the value as compact JSON, the unit of many limits."""
    return len(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode())
