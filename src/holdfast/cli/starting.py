"""Commands to begin with: init, demo, completion."""

from __future__ import annotations

import os
import sys
from contextlib import redirect_stdout

import click

from holdfast.cli.app import App, command
from holdfast.errors import InvalidRequest


@command("init")
def init_(app: App) -> None:
    """Create an empty store; one that is there stays as it is."""
    import holdfast

    with app.store(create=True) as store:
        empty = next(store.sessions(), None) is None
        kind = store.backend.name
    if app.json:
        app.emit({"store": app.url, "kind": kind, "empty": empty})
        return
    app.say(f"{app.url}: a store ({kind}), {'empty' if empty else 'with sessions'}")
    app.note(f"In Python: holdfast.open({app.url!r}); holdfast {holdfast.__version__}")


@command("demo")
@click.option("--folder", type=click.Path(), help="Where to play; else a folder that goes again.")
@click.option("--quick", is_flag=True, hidden=True, help="Without pauses to read in.")
def demo_(app: App, folder: str | None, *, quick: bool) -> None:
    """Watch an agent being killed in the middle of a tool call, and going on where it was.

    Offline, in a few seconds: a travel agent books a trip, is killed with SIGKILL, resumed,
    rewound, forked two ways and compared. Every output of `holdfast` that it shows is real.
    """
    from holdfast.cli.demo import play

    if folder is not None and os.path.exists(folder) and os.listdir(folder):
        raise InvalidRequest(f"{folder} is not empty", hint="choose another --folder")
    if not app.json:
        play(app, folder, pause=0.0 if quick else 0.6)
        return
    with redirect_stdout(sys.stderr):  # the play is for people; what is left of it is the data
        play(app, folder, pause=0.0)
    app.emit({"folder": folder, "store": None if folder is None else f"{folder}/agent.db"})


_SHELLS = {
    "bash": 'eval "$(_HOLDFAST_COMPLETE=bash_source holdfast)"',
    "zsh": 'eval "$(_HOLDFAST_COMPLETE=zsh_source holdfast)"',
    "fish": "_HOLDFAST_COMPLETE=fish_source holdfast | source",
}
_FILES = {"bash": "~/.bashrc", "zsh": "~/.zshrc", "fish": "~/.config/fish/config.fish"}


@command("completion")
@click.argument("shell", type=click.Choice([*_SHELLS]), required=False)
def completion_(app: App, shell: str | None) -> None:
    """Print the line that sets up completion in your shell, of sessions, labels and tags, too."""
    if shell is None:
        shell = os.path.basename(os.environ.get("SHELL", ""))
        if shell not in _SHELLS:
            raise InvalidRequest("which shell?", hint=f"give one of {', '.join(_SHELLS)}")
    if app.json:
        app.emit({"shell": shell, "line": _SHELLS[shell], "file": _FILES[shell]})
        return
    app.say(_SHELLS[shell])
    app.note(f"Add this line to {_FILES[shell]}.")
