"""Export sessions as one HTML page, which shows them without a server.

The page is the viewer, with its script, its style and all data inside. Each item of a list or dict
is in it once, however many states contain it.
"""

from __future__ import annotations

import base64
import re
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast import STATUSES, CopyResult, __version__, json, new_file
from holdfast.errors import UNREADABLE
from holdfast.web import api
from holdfast.web.params import MOST, Params

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import BinaryIO

    from holdfast import Checkpoint, SessionInfo, Store
    from holdfast.json import Shape

    Progress = Callable[[int, int], None]

_STATIC = Path(__file__).parent / "static"
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./([\w.]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|class|let) )", re.MULTILINE)
_FIRST = "exported.js"
"""The module that runs before the page starts, and answers its requests from the data."""


def export(
    store: Store, sessions: Sequence[str], path: str, progress: Progress | None = None
) -> CopyResult:
    """Write the page of some sessions to a new file, which is complete or does not exist.

    `progress` is called with the number of checkpoints done, and their total. Raises InvalidRequest
    if the path exists, SessionNotFound if there is no such session, and Unavailable if the file
    cannot be written.
    """

    def write(file: BinaryIO) -> None:
        file.write(page(store, sessions, progress).encode())

    new_file(path, write)
    count = sum(len(store.session(name)) for name in sessions)
    return CopyResult(len(sessions), count, 0, ())


def page(store: Store, sessions: Sequence[str], progress: Progress | None = None) -> str:
    """Return the page of some sessions as HTML."""
    script, style = _script(), _style()
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:"
    )
    # Without a "<", no text of an agent can end the script element.
    data = json.dumps(_data(store, sessions, progress)).replace("<", "\\u003c")
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
    """Return all modules as one script. Each comes after the modules that it imports."""
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


def _data(store: Store, sessions: Sequence[str], progress: Progress | None) -> Shape:
    """Return the data of the page. `exported.js` answers the requests of the page from it."""
    pool = json.Pool(store)
    data: dict[str, Any] = {
        "about": {"version": __version__, "read_only": True, "statuses": list(STATUSES)},
        "sessions": [], "totals": {}, "logs": {}, "runs": {}, "operations": {}, "changes": {},
        "states": {}, "problems": {},
    }  # fmt: skip
    infos = _infos(store, sessions)
    total, done = sum(info.checkpoints for info in infos), 0
    for info in infos:
        name = info.name
        params = Params({"session": name, "limit": str(MOST)})
        data["sessions"].append(json.session(info))
        data["totals"][name] = api.totals(store, params)
        data["runs"][name] = api.run(store, params)
        data["operations"][name] = api.operations(store, params)
        data["logs"][name] = _log(store, name)
        for checkpoint in store.session(name).tree():
            _add_state(data, store, checkpoint, pool)
            done += 1
            if progress is not None:
                progress(done, total)
    return data | pool.shape()


def _infos(store: Store, names: Sequence[str]) -> list[SessionInfo]:
    """Return sessions with their heads, damaged ones included."""
    for name in names:
        Params({"session": name}).session(store)
    wanted = set(names)
    found = {info.name: info for info in store.sessions() if info.name in wanted}
    return [found[name] for name in names]


def _log(store: Store, name: str) -> Shape:
    """Return all pages of the log as one."""
    given = {"session": name, "limit": str(MOST)}
    page = api.log(store, Params(given))
    rows, bridges = page["items"], page["bridges"]
    while page["next"] is not None:
        page = api.log(store, Params(given | {"before": str(page["next"])}))
        rows += page["items"]
        bridges |= page["bridges"]
    return page | {"items": rows, "next": None, "bridges": bridges}


def _add_state(data: dict[str, Any], store: Store, of: Checkpoint, pool: json.Pool) -> None:
    """Add a state and what it changed, or the reason why it cannot be read."""
    try:
        data["states"][of.id] = pool.pack(of)
        data["changes"][of.id] = api.changes_of(store, of)
    except UNREADABLE as e:
        data["problems"][of.id] = e.message
