"""A session as one page that opens from the disk: the viewer, and all that it would ask for."""

from __future__ import annotations

import base64
import re
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast import __version__, archive, parts, shapes
from holdfast.errors import UNREADABLE, Unavailable
from holdfast.model import STATUSES
from holdfast.source import StoredSource
from holdfast.transfer import Transferred
from holdfast.web import reading
from holdfast.web.asking import MOST, Asked
from holdfast.web.packing import Pool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from holdfast import Checkpoint, Store
    from holdfast.shapes import Shape

_STATIC = Path(__file__).parent / "static"
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./([\w.]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|class|let) )", re.MULTILINE)
_FIRST = "exported.js"
"""Runs before the page begins, and lets it ask the data in place of a server."""


def export(
    store: Store,
    sessions: Sequence[str],
    path: str,
    progress: Callable[[int, int], None] | None = None,
) -> Transferred:
    """Write the page of these sessions to a new file."""
    archive.refuse_taken(Path(path))
    text = page(store, sessions, progress).encode()
    try:
        archive.new_file(Path(path), lambda file: file.writelines([text]))
    except OSError as e:
        raise Unavailable(f"cannot write {path}: {e}") from e
    count = sum(len(store.session(name)) for name in sessions)
    return Transferred(len(sessions), count, 0, ())


def page(
    store: Store, sessions: Sequence[str], progress: Callable[[int, int], None] | None = None
) -> str:
    """The page of these sessions."""
    script, style = _script(), _style()
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:"
    )
    # No text of an agent can end the element that it lies in.
    data = shapes.dumps(_data(store, sessions, progress)).replace("<", "\\u003c")
    icon = base64.b64encode((_STATIC / "icon.svg").read_bytes()).decode()
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>holdfast</title>
<link rel="icon" href="data:image/svg+xml;base64,{icon}">
<style>{style}</style>
</head>
<body>
<div id="app"></div>
<noscript><p>This page draws itself with JavaScript.</p></noscript>
<script type="application/json" id="exported">{data}</script>
<script type="module">{script}</script>
</body>
</html>
"""


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}'"


def _style() -> str:
    links = re.findall(r'href="static/([\w.]+\.css)"', (_STATIC / "index.html").read_text("utf-8"))
    return "\n".join((_STATIC / name).read_text("utf-8") for name in links)


def _script() -> str:
    """All modules as one: what they import comes first, and nothing is imported any more."""
    out: list[str] = []
    seen: set[str] = set()

    def take(name: str) -> None:
        if name in seen:
            return
        seen.add(name)
        text = (_STATIC / name).read_text("utf-8")
        for other in _IMPORT.findall(text):
            take(other)
        if name == "main.js":
            take(_FIRST)
        out.append(_EXPORT.sub("", _IMPORT.sub("", text)))

    take("main.js")
    return "\n".join(out)


def _data(
    store: Store, sessions: Sequence[str], progress: Callable[[int, int], None] | None
) -> Shape:
    pool = Pool()
    data: dict[str, Any] = {
        "about": {"version": __version__, "read_only": True, "statuses": list(STATUSES)},
        "sessions": [], "totals": {}, "logs": {}, "runs": {}, "ops": {}, "changes": {},
        "states": {}, "problems": {},
    }  # fmt: skip
    infos = [next(_named(store, name)) for name in sessions]
    total, done = sum(info.checkpoints for info in infos), 0
    for info in infos:
        name = info.name
        data["sessions"].append(shapes.session(info))
        data["totals"][name] = reading.totals(store, Asked({"session": name}))
        data["runs"][name] = reading.run(store, Asked({"session": name, "limit": str(MOST)}))
        data["ops"][name] = reading.ops(store, Asked({"session": name, "limit": str(MOST)}))
        data["logs"][name] = _log(store, name)
        for checkpoint in store.session(name).tree():
            _state(store, checkpoint, pool, data)
            done += 1
            if progress is not None:
                progress(done, total)
    return data | {"pool": pool.values}


def _named(store: Store, name: str) -> Iterator[Any]:
    """A session's head, which is listed even if it is damaged."""
    Asked({"session": name}).session(store)
    return (info for info in store.sessions() if info.name == name)


def _log(store: Store, name: str) -> Shape:
    asked = {"session": name, "limit": str(MOST)}
    page = reading.log(store, Asked(asked))
    rows, bridges = page["items"], page["bridges"]
    while page["next"] is not None:
        page = reading.log(store, Asked(asked | {"before": str(page["next"])}))
        rows += page["items"]
        bridges |= page["bridges"]
    return page | {"items": rows, "next": None, "bridges": bridges}


def _state(store: Store, of: Checkpoint, pool: Pool, data: dict[str, Any]) -> None:
    """A state and what it changed; or why it cannot be read."""
    try:
        with store.backend.reader() as reader:
            root = parts.root(reader, of)
            data["states"][of.id] = pool.pack(root, StoredSource(store.backend, reader))
        data["changes"][of.id] = reading.changes(store, Asked({"id": of.id}))
    except UNREADABLE as e:
        data["problems"][of.id] = e.message
