"""Commands that move sessions between stores and files: copy, export, import."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from holdfast.cli import output, select
from holdfast.cli.complete import complete_sessions
from holdfast.cli.context import App, NewPath, command, expanded, require_extra
from holdfast.cli.output import Bar
from holdfast.errors import Corrupt, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_FORMATS = ("export", "s0", "s1", "s2", "s3", "claude-code", "codex", "openai-chat")


def _sessions(function: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--session", "-s", "sessions", metavar="NAME", multiple=True,
        help="Only this session (may be repeated).", shell_complete=complete_sessions,
    )(function)  # fmt: skip


@command("copy")
@click.argument("target", metavar="URL")
@_sessions
def copy_(app: App, target: str, sessions: tuple[str, ...]) -> None:
    """Copy sessions to the store at URL, of any kind, with the sessions they were forked from.

    Run it again at any time: it copies only what is new, even after an interruption.
    """
    import holdfast

    with app.store() as store:
        for name in sessions:
            select.the_session(store, name)
        with holdfast.open(expanded(target)) as other, Bar("copying") as progress:
            done = store.copy(other, sessions=sessions or None, progress=progress)
    _print_result(app, done, "copied to", target)
    if done.checkpoints:
        _print_delete(app, target)
    _check_complete(done.skipped)


@command("export")
@click.argument("path", type=NewPath(), required=False)
@click.option(
    "--html", "pages", metavar="NAME", multiple=True, shell_complete=complete_sessions,
    help="Write this session as a web page (may be repeated). PATH defaults to NAME.html.",
)  # fmt: skip
@_sessions
def export_(app: App, path: str | None, pages: tuple[str, ...], sessions: tuple[str, ...]) -> None:
    """Write sessions to PATH: one portable file (….jsonl, ….jsonl.zst), or a readable folder.

    With --html, it writes one page that any browser opens from disk. A page cannot be imported.
    """
    if pages and sessions:
        raise InvalidRequest("--html and --session cannot be combined", hint="leave out --session")
    if path is None and not pages:
        raise InvalidRequest("PATH is missing", hint="holdfast export sessions.jsonl")
    with app.store() as store:
        if pages:
            with require_extra("web"):
                from holdfast.web.export import export
            handles = [select.the_session(store, name) for name in pages]
            path = path or f"{output.file_name(pages[0])}.html"
            with Bar("exporting") as progress:
                done: Any = export(store, [each.name for each in handles], path, progress)
        else:
            with Bar("exporting") as progress:
                done = store.export(path, sessions=sessions or None, progress=progress)  # type: ignore[arg-type]
    _print_result(app, done, "exported to", str(path))
    app.notice(f"To undo this, remove {path}.")
    _check_complete(done.skipped)


@command("import")
@click.argument("path", type=click.Path(exists=True))
@click.option(
    "--format", "-f", type=click.Choice(_FORMATS),
    help="The format of PATH; recognised if not given.",
)  # fmt: skip
@click.option(
    "--memory", type=click.IntRange(1), metavar="BYTES", default=256 << 20, show_default=True,
    help="How much memory one line may take.",
)  # fmt: skip
@_sessions
def import_(
    app: App, path: str, format: str | None, memory: int, sessions: tuple[str, ...]
) -> None:
    """Read sessions from what export wrote, or from files of other programs.

    The source is only read. Its damaged parts are listed and left out. Run it again at any time: it
    imports only what is new.
    """
    from holdfast import file_kind, importers, memory_limit

    if file_kind(path) == "store":
        to = output.typed("--store", path, "copy", app.url)
        raise InvalidRequest(f"{path} is a store: copy it instead", hint=to)
    with memory_limit(memory):
        known: Any = importers.recognise(path) if format is None else format
        if sessions and known != "export":
            raise InvalidRequest("--session works only with an export", hint="leave it out")
        with app.store(create=True) as store, Bar("importing") as progress:
            done = importers.import_(
                store, path, known, sessions=sessions or None, progress=progress
            )
    _print_result(app, done, "imported from", path, done.unverified)
    if done.checkpoints:
        _print_delete(app)
    # Files of other programs always have lines without a state, which are skipped.
    if known == "export" or not done.checkpoints + done.known:
        _check_complete(done.skipped)


def _print_delete(app: App, url: str | None = None) -> None:
    """Print the command that deletes a session that was copied."""
    words = ("delete", "-s", "NAME")
    typed = app.command_line(*words) if url is None else output.typed("-S", url, *words)
    app.notice(f"To delete a new session: {typed}")


def _check_complete(skipped: Sequence[tuple[str, str]]) -> None:
    """Exit with code 5 if anything was skipped."""
    if skipped:
        raise click.exceptions.Exit(Corrupt.exit_code)


def _print_result(
    app: App, done: Any, action: str, where: str, unverified: Sequence[str] = ()
) -> None:
    if app.json:
        app.print_json(
            {
                "sessions": done.sessions,
                "checkpoints": done.checkpoints,
                "known": done.known,
                "skipped": [{"what": what, "why": why} for what, why in done.skipped],
                "unverified": list(unverified),
            }
        )
        return
    known = f", {done.known:,} existed already" if done.known else ""
    app.print(f"{output.plural(done.checkpoints, 'checkpoint')} {action} {where}, "
            f"in {output.plural(done.sessions, 'session')}{known}")  # fmt: skip
    for what, why in done.skipped:
        app.print(f"{click.style('left out', fg='yellow')}  {output.one_line(f'{what}: {why}')}")
    if unverified:
        count = output.plural(len(unverified), "checkpoint")
        app.print(f"{count} with checksums that cannot be checked")
