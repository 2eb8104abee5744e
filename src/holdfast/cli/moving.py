"""Commands that move sessions: copy, export, import."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli import naming, words
from holdfast.cli.app import App, command, needing
from holdfast.cli.completing import complete_sessions
from holdfast.cli.progress import bar
from holdfast.errors import Corrupt, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_FORMATS = ("portable", "s0", "s1", "s2", "s3", "claude-code", "codex", "openai-chat")


def _sessions(function: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--session", "-s", "sessions", metavar="NAME", multiple=True,
        help="Only this session (may be repeated).", shell_complete=complete_sessions,
    )(function)  # fmt: skip


@command("copy")
@click.argument("target", metavar="URL")
@_sessions
def copy_(app: App, target: str, sessions: tuple[str, ...]) -> None:
    """Copy sessions to the store at URL, of any kind, with those that they were forked from.

    It may be run again at any time: it copies what is new, and goes on where it was interrupted.
    """
    import holdfast

    with app.store() as store:
        for name in sessions:
            naming.the_session(store, name)
        with holdfast.open(target) as other, bar("copying") as progress:
            done = store.copy(other, sessions=sessions or None, progress=progress)
    _told(app, done, "copied to", target)
    if done.checkpoints:
        _way_back(app, target)
    _whole(done.skipped)


@command("export")
@click.argument("path", type=click.Path(), required=False)
@click.option(
    "--html", "pages", metavar="NAME", multiple=True, shell_complete=complete_sessions,
    help="This session as a page to look at (may be repeated); PATH is NAME.html if not given.",
)  # fmt: skip
@_sessions
def export_(app: App, path: str | None, pages: tuple[str, ...], sessions: tuple[str, ...]) -> None:
    """Write sessions to PATH: one portable file (….jsonl, ….jsonl.zst), or a readable folder.

    With --html it is one page, with all that was said and done, which any browser opens from the
    disk. Nothing can be read back from that.
    """
    if pages and sessions:
        raise InvalidRequest("--html names the sessions", hint="leave --session out")
    if path is None and not pages:
        raise InvalidRequest("where to? PATH is missing", hint="holdfast export sessions.jsonl")
    with app.store() as store:
        if pages:
            with needing("web"):
                from holdfast.web.exporting import export
            handles = [naming.the_session(store, name) for name in pages]
            path = path or f"{words.file_name(pages[0])}.html"
            with bar("exporting") as progress:
                done: Any = export(store, [each.name for each in handles], path, progress)
        else:
            with bar("exporting") as progress:
                done = store.export(path, sessions=sessions or None, progress=progress)  # type: ignore[arg-type]
    _told(app, done, "exported to", str(path))
    app.note(f"Take it back by removing {path}.")
    _whole(done.skipped)


@command("import")
@click.argument("path", type=click.Path(exists=True))
@click.option(
    "--format", "-f", type=click.Choice(_FORMATS),
    help="What PATH holds; without it, that is recognised.",
)  # fmt: skip
@_sessions
def import_(app: App, path: str, format: str | None, sessions: tuple[str, ...]) -> None:
    """Read what export wrote, or checkpoints and transcripts that other programs left.

    The source is only read. What is damaged there is listed, and does not keep the rest away. It
    may be run again: it brings what is new.
    """
    from holdfast import importers
    from holdfast.archive import is_export

    if _is_store(path):
        to = " ".join(map(words.quoted, ["holdfast", "--store", path, "copy", app.url]))
        raise InvalidRequest(f"{path} is a store, which is copied and not imported", hint=to)
    portable = format == "portable" or (format is None and is_export(path))
    if sessions and not portable:
        raise InvalidRequest("--session chooses from what export wrote", hint="leave it out")
    if format is None and not portable:
        format = importers.recognise(path)
    with app.store(create=True) as store, bar("importing") as progress:
        if portable:
            done: Any = store.import_(path, sessions=sessions or None, progress=progress)
        else:
            done = importers.import_(store, path, format)  # type: ignore[arg-type]
    _told(app, done, "imported from", path, getattr(done, "unverified", ()))
    if done.checkpoints:
        _way_back(app)
    if portable or not done.checkpoints + done.known:  # of others some lines are always left out
        _whole(done.skipped)


def _is_store(path: str) -> bool:
    """Whether a file is a store of ours. A folder may be one, and is read as what export wrote."""
    from holdfast.backends.sqlite_file import APPLICATION_ID

    if not os.path.isfile(path):  # a pipe can be read only once
        return False
    with open(path, "rb") as file:
        mark = file.read(72)
    return mark[:16] == b"SQLite format 3\0" and mark[68:] == APPLICATION_ID.to_bytes(4, "big")


def _way_back(app: App, url: str | None = None) -> None:
    typed = ["delete", "-s", "NAME"]
    there = ["holdfast", "-S", url or "", *typed]
    how = app.command(*typed) if url is None else " ".join(map(words.quoted, there))
    app.note(f"A session that is new by this can be taken away with: {how}")


def _whole(skipped: Sequence[tuple[str, str]]) -> None:
    """What was left out is told; whoever does not read that is told by the exit code."""
    if skipped:
        raise click.exceptions.Exit(Corrupt.exit_code)


def _told(app: App, done: Any, how: str, where: str, unverified: Sequence[str] = ()) -> None:
    if app.json:
        app.emit(
            {
                "sessions": done.sessions,
                "checkpoints": done.checkpoints,
                "known": done.known,
                "skipped": [{"what": what, "why": why} for what, why in done.skipped],
                "unverified": list(unverified),
            }
        )
        return
    known = f", {done.known:,} were there already" if done.known else ""
    app.say(f"{words.plural(done.checkpoints, 'checkpoint')} {how} {where}, "
            f"in {words.plural(done.sessions, 'session')}{known}")  # fmt: skip
    for what, why in done.skipped:
        app.say(f"{click.style('left out', fg='yellow')}  {words.one_line(f'{what}: {why}')}")
    if unverified:
        count = words.plural(len(unverified), "checkpoint")
        app.say(f"{count} with checksums that nobody can check")
