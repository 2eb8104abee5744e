"""The table of commands, and how every command ends: with an exit code, never with a traceback."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

import click

from holdfast import __version__
from holdfast.cli.app import App, harmless

# Family, command, what it does. Here, so that --help imports none of them; a test holds this
# against the commands themselves.
COMMANDS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "Begin": (
        ("starting", "demo", "Watch an agent being killed, and going on where it was."),
        ("starting", "init", "Create an empty store."),
        ("doctor", "doctor", "Check this machine and the store, and say what to do."),
        ("starting", "completion", "Print the set-up for completion in your shell."),
    ),
    "Look": (
        ("looking", "sessions", "List sessions."),
        ("log", "log", "Draw the tree of checkpoints, the newest first."),
        ("looking", "show", "Show what is known of one checkpoint."),
        ("looking", "state", "Print a state, or a part of it, as JSON."),
        ("comparing", "diff", "Show what changed between two checkpoints."),
        ("comparing", "blame", "Find the checkpoint in which a value last changed."),
        ("looking", "search", "Find checkpoints by text, tag, status and more."),
        ("looking", "stats", "Count sessions, checkpoints and bytes."),
        ("looking", "watch", "Print checkpoints and operations as they land."),
        ("serving", "serve", "Look at the store in a browser."),
    ),
    "Change": (
        ("changing", "save", "Save a state from a JSON file or standard input."),
        ("changing", "fork", "Begin a new session from a checkpoint."),
        ("changing", "rewind", "Move a session's head to another checkpoint."),
        ("changing", "undo", "Take the last change of a session back."),
        ("changing", "redo", "Do again what undo took back."),
        ("changing", "ops", "List what was done to a session."),
        ("changing", "tag", "Add tags to a checkpoint."),
        ("changing", "label", "Give a checkpoint a label."),
        ("changing", "delete", "Delete a checkpoint, or a whole session."),
    ),
    "Runs": (
        ("running", "resume", "Show where a session stands, or let a function go on with it."),
        ("running", "pending", "List calls in doubt, and what runs wait for."),
        ("running", "resolve", "Decide what became of a call in doubt."),
        ("running", "answer", "Give a run the answer that it waits for."),
        ("running", "abandoned", "List sessions whose run died."),
    ),
    "Keep": (
        ("keeping", "check", "Verify that everything stored is what was saved."),
        ("keeping", "repair", "Move heads off damaged checkpoints, rebuild what can be."),
        ("keeping", "prune", "Delete old checkpoints by rules."),
        ("keeping", "gc", "Free what was deleted, and give the space back."),
        ("keeping", "backup", "Copy the store to a new file, while it is in use."),
    ),
    "Move": (
        ("moving", "copy", "Copy sessions to another store, of any kind."),
        ("moving", "export", "Write sessions to one portable file, or to a folder."),
        ("moving", "import", "Read what export wrote, or what other programs left."),
    ),
}
_COMPLETE = "_HOLDFAST_COMPLETE"
FAMILY = {name: family for rows in COMMANDS.values() for family, name, _ in rows}


class Commands(click.Group):
    """Commands that are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(FAMILY)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        family = FAMILY.get(cmd_name)
        if family is None:
            return None
        module = import_module(f"holdfast.cli.{family}")
        command: click.Command = getattr(module, f"{cmd_name}_")  # `import` is a word of Python
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in FAMILY and not args[0].startswith("-"):
            from difflib import get_close_matches

            near = get_close_matches(args[0], FAMILY, 1)
            hint = f"did you mean `holdfast {near[0]}`?" if near else "see `holdfast --help`"
            raise click.UsageError(f"there is no command {args[0]!r}\nHint: {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        for title, rows in COMMANDS.items():
            with formatter.section(title):
                formatter.write_dl([(name, text) for _, name, text in rows])


def _width() -> int:
    """Of the terminal; click would import much to find it out."""
    try:
        return max(40, min(int(os.environ.get("COLUMNS") or os.get_terminal_size().columns), 100))
    except (OSError, ValueError):
        return 80


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "terminal_width": _width()},
    epilog="A store is a path (SQLite), files:PATH or postgresql://…; see --store.",
)
@click.option(
    "--store", "-S", metavar="URL", envvar="HOLDFAST_STORE", help="The store to use.",
    show_envvar=True,
)  # fmt: skip
@click.version_option(__version__, "--version", "-V", message="holdfast %(version)s")
@click.pass_context
def cli(ctx: click.Context, store: str | None) -> None:
    """Durable, versioned state for AI agents: look at it, compare it, take it back."""
    ctx.obj = App(store)


def run(args: list[str] | None = None) -> int:
    """Run a command; its exit code."""
    args = sys.argv[1:] if args is None else args
    json = "--json" in args
    _open_streams()
    try:
        # Not cli.main(): that has exit codes of its own for Ctrl-C and for a pipe that was closed.
        if asked := os.environ.get(_COMPLETE):
            return _complete(asked)
        with cli.make_context("holdfast", [*args], color=_colour()) as ctx:
            cli.invoke(ctx)
        sys.stdout.flush()
        return 0
    except click.exceptions.Exit as e:
        return e.exit_code
    except click.Abort:
        return _say("Abort", "nothing was done", None, 1, json=json)
    except click.exceptions.NoArgsIsHelpError as e:
        click.echo(e.ctx.get_help() if e.ctx else e.format_message(), err=True)
        return 2
    except click.UsageError as e:
        message, _, hint = e.format_message().partition("\nHint: ")
        if not hint and e.ctx is not None:
            hint = f"see `{e.ctx.command_path} --help`"
        return _say("UsageError", message, hint, 2, json=json)
    except click.ClickException as e:
        return _say(type(e).__name__, e.format_message(), None, 1, json=json)
    except BrokenPipeError:
        # Whoever read our output has had enough. Nothing more can be said to them.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except Exception as e:
        from holdfast.cli.wording import in_our_words
        from holdfast.errors import HoldfastError

        if isinstance(e, HoldfastError):
            return _say(type(e).__name__, *in_our_words(e), e.exit_code, json=json)
        if isinstance(e, OSError):
            return _say(type(e).__name__, str(e), None, 6, json=json)
        if os.environ.get("HOLDFAST_DEBUG"):
            raise
        hint = "this is a defect of holdfast; HOLDFAST_DEBUG=1 shows where it is"
        return _say(type(e).__name__, f"{type(e).__name__}: {e}", hint, 1, json=json)


def _open_streams() -> None:
    """What was closed (`>&-`) leads nowhere: else a file of the store could get its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def _complete(asked: str) -> int:
    """Tell a shell what it asked for. Not by click: a name may hold bytes that are no text."""
    from click.shell_completion import get_completion_class

    shell, _, what = asked.partition("_")
    kind = get_completion_class(shell)
    if kind is None or what not in ("source", "complete"):
        return 1
    shells = kind(cli, {}, "holdfast", _COMPLETE)
    told = shells.source() if what == "source" else shells.complete() + "\n"
    click.echo(os.fsencode(told), nl=False)
    return 0


def _colour() -> bool | None:
    """None lets each stream decide: colours on a terminal, none in a pipe or a file."""
    return False if os.environ.get("NO_COLOR") else None


def _say(kind: str, message: str, hint: str | None, code: int, *, json: bool) -> int:
    """One line, and a hint; or the same as JSON."""
    if json:
        from holdfast.shapes import dumps

        told: dict[str, Any] = {"error": kind, "message": message, "hint": hint, "exit_code": code}
        click.echo(dumps(told), err=True)
        return code
    lines = [f"{click.style('error:', fg='red', bold=True)} {message}"]
    if hint:
        lines.append(f"{click.style('Hint:', fg='cyan')} {hint}")
    click.echo(harmless("\n".join(lines)), err=True, color=_colour())
    return code
