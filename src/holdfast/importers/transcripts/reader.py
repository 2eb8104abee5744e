"""Reads transcripts line by line, and saves their conversations."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from holdfast import Store
from holdfast.importers.save import Import, ImportResult
from holdfast.importers.transcripts.conversation import Conversation, Plan
from holdfast.importers.untrusted import Files, Unsound, line_name, printable

MAX_NAME = 1000
"""The most characters that an id of the source may have."""


class Recorded(NamedTuple):
    """A conversation, and the session that it becomes."""

    session: str
    conversation: Conversation
    parent: str | None = None
    """The session that it worked for, if it is the conversation of a sub-agent."""

    def save(self, importing: Import) -> None:
        importing.save(
            self.session, lambda session: Plan(self.conversation, session).entries(), self.parent
        )


class Transcript(ABC):
    """A file whose lines are read one after the other."""

    def __init__(self, files: Files, name: str) -> None:
        self._files, self._name = files, name
        self.unknown: Counter[str] = Counter()
        """Numbers of lines, by types that are not known."""

    @abstractmethod
    def read(self, number: int, raw: bytes, data: Any) -> None:
        """Read the next line. Raises Unsound."""

    @abstractmethod
    def conversations(self) -> list[Recorded]:
        """Return the conversations in all lines. Raises Unsound if there is none."""

    def skip(self, number: int, why: object) -> None:
        """Report a line that is not imported, or not completely."""
        self._files.skip_line(self._name, number, why)

    def new_conversation(self) -> Conversation:
        return Conversation(printable(self._name), partial(line_name, self._name))


def import_lines(
    store: Store,
    format: str,
    path: str | os.PathLike[str],
    open_transcript: Callable[[Files, str], Transcript],
) -> ImportResult:
    """Import a transcript, or all transcripts below a folder."""
    files = Files(path)
    importing = Import(store, format, files.findings)
    for name in files.select(".jsonl", kind="transcript"):
        transcript = open_transcript(files, name)
        for number, raw, data in files.lines(name):
            try:
                transcript.read(number, raw, data)
            except Unsound as e:
                transcript.skip(number, e)
        for kind, times in transcript.unknown.items():
            files.skip(name, f"{times} lines of an unknown type {kind[:80]!r} are only in `meta`")
        try:
            conversations = transcript.conversations()
        except Unsound as e:
            files.skip(name, e)
            continue
        for conversation in conversations:
            conversation.save(importing)
    return importing.result()


def name_in(data: dict[str, Any], *names: str) -> str | None:
    """Return the first of these fields that can be a name."""
    for name in names:
        value = data.get(name)
        if type(value) is str and 0 < len(value) <= MAX_NAME:
            return value
    return None


def token_count(data: Any, name: str) -> int:
    """Return a number of tokens, 0 if it is missing. Raises Unsound."""
    value = data.get(name)
    if value is None:
        return 0
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise Unsound(f"{name} is no number of tokens")
    return value
