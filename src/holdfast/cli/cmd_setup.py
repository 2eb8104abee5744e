"""Commands to start with: init, demo, doctor, completion."""

from __future__ import annotations

import os
import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING

import click

import holdfast
from holdfast.cli import output
from holdfast.cli.context import App, command, silence_logs
from holdfast.cli.main import cli_words
from holdfast.errors import InvalidRequest, StoreNotFound

if TYPE_CHECKING:
    from holdfast import Finding


@command("init")
def init_(app: App) -> None:
    """Create an empty store. An existing store stays as it is."""
    with app.store(create=True) as store:
        empty = next(store.sessions(), None) is None
        kind = store.kind
    if app.json:
        app.print_json({"store": app.url, "kind": kind, "empty": empty})
        return
    app.print(f"{app.url}: a store ({kind}), {'empty' if empty else 'with sessions'}")
    app.notice(f"In Python: holdfast.open({app.url!r})")


@command("demo", lists=True)
@click.option(
    "--folder",
    type=click.Path(),
    help="Keep the demo in this folder. Without it, the demo leaves nothing.",
)
@click.option("--quick", is_flag=True, hidden=True, help="Do not pause for reading.")
def demo_(app: App, folder: str | None, *, quick: bool) -> None:
    """Watch an agent being killed in the middle of a tool call, and resumed.

    It runs offline, in a few seconds. A travel agent books a trip, is killed with SIGKILL, resumed,
    rewound and forked twice, and the forks are compared. All output of `holdfast` is real.
    """
    from holdfast.cli.demo import play

    if folder is not None and os.path.exists(folder) and os.listdir(folder):
        raise InvalidRequest(f"{folder} is not empty", hint="choose another --folder")
    if not app.json:
        play(folder, pause=0.0 if quick else 0.6)
        return
    with redirect_stdout(sys.stderr):  # stdout gets only the JSON
        play(folder, pause=0.0)
    app.print_json({"folder": folder, "store": None if folder is None else f"{folder}/agent.db"})


_MARKS = {"ok": ("✓", "green"), "note": ("!", "yellow"), "bad": ("✗", "red")}


@command("doctor")
def doctor_(app: App) -> None:
    """Check this machine and the store; exit code 1 if something is wrong."""
    silence_logs()  # the findings list what the library would log
    wrong = False
    for finding in holdfast.diagnose(app.url):
        wrong = wrong or finding.how == "bad"
        _print_finding(app, finding)
    if wrong:
        raise click.exceptions.Exit(1)


def _print_finding(app: App, finding: Finding) -> None:
    about, how, what, do, error = finding
    if isinstance(error, StoreNotFound):
        do = app.command_line("init")
    elif error is not None:
        what, do = cli_words(error)
    if app.json:
        app.print_json({"about": about, "how": how, "what": what, "do": do})
        return
    mark, color = _MARKS[how]
    app.print(f"{click.style(mark, fg=color)} {about}: {output.one_line(what)}")
    if do:
        app.print(f"    {click.style('Do:', fg='cyan')} {do}")


_SHELLS = {
    "bash": 'eval "$(_HOLDFAST_COMPLETE=bash_source holdfast)"',
    "zsh": 'eval "$(_HOLDFAST_COMPLETE=zsh_source holdfast)"',
    "fish": "_HOLDFAST_COMPLETE=fish_source holdfast | source",
}
_FILES = {"bash": "~/.bashrc", "zsh": "~/.zshrc", "fish": "~/.config/fish/config.fish"}


@command("completion")
@click.argument("shell", type=click.Choice([*_SHELLS]), required=False)
def completion_(app: App, shell: str | None) -> None:
    """Print the line that sets up completion in your shell.

    It completes commands, options, sessions, labels and tags.
    """
    if shell is None:
        shell = os.path.basename(os.environ.get("SHELL", ""))
        if shell not in _SHELLS:
            raise InvalidRequest(
                "which shell do you use?", hint=f"give one of {', '.join(_SHELLS)}"
            )
    if app.json:
        app.print_json({"shell": shell, "line": _SHELLS[shell], "file": _FILES[shell]})
        return
    app.print(_SHELLS[shell])
    app.notice(f"Add this line to {_FILES[shell]}.")
