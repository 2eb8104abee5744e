"""Reading what another system wrote: never changed, never trusted, bounded.

A folder is read by the names found in it, never by a name or path that its content gives. Symbolic
links are not followed. What is not sound is an Unsound with the reason, for that one file alone.
"""

from __future__ import annotations

import datetime as dt
import json
import math
import os
import re
import stat
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NoReturn

from holdfast.errors import InvalidRequest, NotFound, Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MAX_BYTES = 128 << 20
"""What one foreign checkpoint may have, as bytes of JSON. A bigger one is reported and not read."""

_OPEN = os.O_RDONLY
for _flag in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"):
    _OPEN |= getattr(os, _flag, 0)

_TIME = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2})[Tt ]([0-9]{2}:[0-9]{2}):([0-9]{2})(?:\.([0-9]+))?"
    r"([Zz]|[+-][0-9]{2}:[0-9]{2})?"
)
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


class Unsound(Exception):
    """Why one foreign checkpoint cannot be imported."""


@dataclass(frozen=True, slots=True)
class Foreign:
    """One sound foreign checkpoint, in holdfast's terms."""

    session: str
    id: str
    order: tuple[int, int, int]
    """The place in its session: step or iteration, time in nanoseconds, position in the source."""
    state: Any
    fields: dict[str, Any]
    """What save() takes beside the state: `meta` always, the others where they are set."""
    agent: str | None = None
    parent: str | None = None
    totals: tuple[str, str] | None = None
    """The names in `meta` of tokens and cost that were counted from the session's beginning."""
    verified: bool = True
    """False if it has a checksum that cannot be checked, or should have one and has none."""


@dataclass(slots=True)
class Findings:
    """What an import has to tell, as it is found."""

    skipped: list[tuple[str, str]] = field(default_factory=list)

    def skip(self, where: str, why: object) -> None:
        self.skipped.append((where, str(why)))


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a sound checkpoint was found. Its state is read again when it is saved."""

    where: str
    session: str
    id: str
    order: tuple[int, int, int]
    parent: str | None
    verified: bool
    digest: str
    read: Callable[[], tuple[Foreign, str]]

    @classmethod
    def make(cls, where: str, read: Callable[[], tuple[Foreign, str]]) -> Entry:
        """Raises Unsound."""
        it, digest = read()
        return cls(where, it.session, it.id, it.order, it.parent, it.verified, digest, read)

    @property
    def key(self) -> tuple[str, str]:
        """What no other of its session has. Names of two files may look alike."""
        return self.id, self.digest

    def again(self) -> Foreign:
        found, digest = self.read()
        if digest != self.digest:
            raise Unsound("it changed while it was imported")
        return found


class Folder:
    """The regular files and symbolic links below a folder, by their names relative to it."""

    def __init__(self, path: str | os.PathLike[str], findings: Findings) -> None:
        self.root = os.path.realpath(path)
        if not os.path.isdir(self.root):
            raise InvalidRequest(f"{shown(os.fspath(path))} is not a folder")
        self.files: list[str] = []
        self.links: list[str] = []
        folders = [""]
        while folders:
            folders += self._list(folders.pop(), findings)
        self.files.sort()
        self.links.sort()

    def _list(self, folder: str, findings: Findings) -> list[str]:
        below = []
        try:
            with os.scandir(os.path.join(self.root, folder)) as entries:
                for entry in entries:
                    name = os.path.join(folder, entry.name)
                    if entry.is_symlink():
                        self.links.append(name)
                    elif entry.is_dir(follow_symlinks=False):
                        below.append(name)
                    elif entry.is_file(follow_symlinks=False):
                        self.files.append(name)
                    else:
                        findings.skip(shown(name), "not a regular file")
        except OSError as e:
            if not folder:
                raise Unavailable(f"{shown(self.root)} cannot be read: {e.strerror}") from e
            findings.skip(shown(folder), f"the folder cannot be read: {e.strerror}")
        return below

    def target(self, link: str) -> str | None:
        """Where a link leads, relative to the root; None if that is outside of it."""
        return self.inside(os.path.realpath(os.path.join(self.root, link)))

    def inside(self, path: str) -> str | None:
        """A path relative to the root, without looking at the disk; None if it leads outside."""
        if "\0" in path:
            return None
        where = os.path.normpath(os.path.join(self.root, path))
        base = self.root.rstrip(os.sep) + os.sep
        return where[len(base) :] if where.startswith(base) else None

    def report_links(self, findings: Findings) -> None:
        for link in self.links:
            out = self.target(link) is None
            why = "leads out of the folder, and" if out else "it"
            findings.skip(shown(link), f"a symbolic link: {why} is not followed")

    def read(self, name: str) -> bytes:
        """The bytes of a regular file, no more than MAX_BYTES of them."""
        try:
            handle = os.open(os.path.join(self.root, name), _OPEN)
            with os.fdopen(handle, "rb") as file:
                if not stat.S_ISREG(os.fstat(handle).st_mode):
                    raise Unsound("not a regular file")
                data = file.read(MAX_BYTES + 1)
        except OSError as e:
            raise Unsound(f"it cannot be read: {e.strerror}") from e
        if len(data) > MAX_BYTES:
            raise Unsound(f"it has more than {MAX_BYTES} bytes")
        return data


class Document:
    """A JSON object, its fields taken out one by one with their types checked."""

    def __init__(self, data: Any, what: str = "") -> None:
        if type(data) is not dict:
            raise Unsound(f"{what or 'it'} is {_kind(data)}, not an object")
        self._left, self._what = dict(data), f"{what}." if what else ""

    def take(self, name: str) -> Any:
        if name not in self._left:
            raise Unsound(f"{self._what}{name} is missing")
        return self._left.pop(name)

    def _typed(self, name: str, what: str, *types: type) -> Any:
        value = self.take(name)
        if type(value) not in types:
            raise Unsound(f"{self._what}{name} is {_kind(value)}, not {what}")
        return value

    def has(self, name: str) -> bool:
        """Whether the field is there and not null; a null is taken out."""
        if self._left.get(name, self) is None:
            del self._left[name]
        return name in self._left

    def text(self, name: str) -> str:
        value: str = self._typed(name, "a text", str)
        return value

    def name(self, name: str) -> str:
        """A text that is not empty."""
        value = self.text(name)
        if not value:
            raise Unsound(f"{self._what}{name} is empty")
        return value

    def whole(self, name: str, least: int | None = 0) -> int:
        value: int = self._typed(name, "a whole number", int)
        if least is not None and value < least:
            raise Unsound(f"{self._what}{name} is {value}")
        return value

    def number(self, name: str) -> int | float:
        value: int | float = self._typed(name, "a number", int, float)
        try:
            float(value)
        except OverflowError:
            raise Unsound(f"{self._what}{name} is too big") from None
        return value

    def flag(self, name: str) -> bool:
        value: bool = self._typed(name, "true or false", bool)
        return value

    def items(self, name: str, *types: type) -> list[Any]:
        """A list; with `types`, of nothing else."""
        value: list[Any] = self._typed(name, "a list", list)
        for n, item in enumerate(value):
            if types and type(item) not in types:
                raise Unsound(f"{self._what}{name}[{n}] is {_kind(item)}")
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        value: dict[str, Any] = self._typed(name, "an object", dict)
        return value

    def rest(self) -> dict[str, Any]:
        """The fields that nobody has taken."""
        return self._left


def collect(
    folder: Folder,
    names: Iterable[str],
    parse: Callable[[Any, bytes], Foreign],
    findings: Findings,
) -> list[Entry]:
    """The sound ones among files that should hold a checkpoint each; the others are reported."""
    entries = []
    for name in names:

        def read(name: str = name) -> tuple[Foreign, str]:
            raw = folder.read(name)
            data = decode(raw)
            return parse(data, raw), digest(data)

        try:
            entries.append(Entry.make(shown(name), read))
        except Unsound as e:
            findings.skip(shown(name), e)
    return entries


def decode(raw: bytes, what: str = "it", **hooks: Any) -> Any:
    """JSON without what would be read silently wrong: a key twice, NaN, a number beyond a float."""
    try:
        return json.loads(
            raw.decode(),
            object_pairs_hook=_pairs,
            parse_constant=_refuse,
            parse_float=hooks.get("parse_float", _float),
        )
    except RecursionError:
        raise Unsound(f"{what} is nested too deeply") from None
    except ValueError as e:
        raise Unsound(f"{what} is not JSON: {e}") from e


def digest(data: Any) -> str:
    """Names the content, however it is written down."""
    try:
        text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    except RecursionError:
        raise Unsound("it is nested too deeply") from None
    return sha256(text.encode()).hexdigest()


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has a key twice")
    return found


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:20]} is too big")
    return value


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
    return "null" if value is None else kinds.get(type(value), "a number")


def instant(value: Any, name: str = "created_at") -> int:
    """Nanoseconds since 1970, of RFC 3339 text or of seconds."""
    if type(value) is int:
        return value * 1_000_000_000
    found = _TIME.fullmatch(value) if type(value) is str else None
    if found is None:
        raise Unsound(f"{name} is no time: {str(value)[:40]!r}")
    day, minute, second, fraction, zone = found.groups()
    zone = "+00:00" if zone in (None, "Z", "z") else zone
    try:
        past = dt.datetime.fromisoformat(f"{day}T{minute}{zone}") - _EPOCH
    except (ValueError, OverflowError) as e:
        raise Unsound(f"{name} is no time: {e}") from e
    seconds = past.days * 86_400 + past.seconds + int(second)
    return seconds * 1_000_000_000 + int((fraction or "").ljust(9, "0")[:9])


def described(meta: dict[str, Any], **texts: tuple[str, str | None]) -> dict[str, Any]:
    """The fields for save(): each from a foreign field, given by its name and text.

    A text that is empty says nothing to holdfast, and stays in `meta` as it is.
    """
    meta |= {name: text for name, text in texts.values() if text == ""}
    fields: dict[str, Any] = {ours: text for ours, (_, text) in texts.items() if text}
    if tags := tags_in(meta):
        fields["tags"] = tags
        del meta["tags"]
    return fields | {"meta": meta}


def merged(rest: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """One `meta` of both. Where a name occurs twice, the first of them is in `fields`."""
    twice = {name: rest[name] for name in rest if name in known}
    return rest | known | ({"fields": twice} if twice else {})


def tags_in(data: dict[str, Any]) -> list[str]:
    """What a foreign field of this name holds, if it is what holdfast calls tags."""
    tags = data.get("tags")
    if type(tags) is list and all(type(tag) is str and tag for tag in tags):
        return tags
    return []


def shown(name: str) -> str:
    """A file's name as text that can be printed, whatever bytes it has."""
    return name.encode("utf-8", "backslashreplace").decode().replace(os.sep, "/")


def existing(path: str | os.PathLike[str]) -> str:
    """The path as text, if there is something."""
    text = os.fspath(path)
    if not isinstance(text, str) or not text or "\0" in text:
        raise InvalidRequest(f"not a path: {path!r}")
    if not os.path.exists(text):
        raise NotFound(f"there is nothing at {shown(text)}", hint="check the path")
    return text
