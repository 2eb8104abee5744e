"""The table of commands, and the errors that end them: one line and an exit code."""

from __future__ import annotations

import os
import re
import sys
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import TYPE_CHECKING

import click

from holdfast import __version__
from holdfast.cli.context import App, discard, escape_controls
from holdfast.errors import Corrupt, HoldfastError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.json import Shape

# By section of --help: the module cmd_NAME.py, the command, its summary. So --help imports none of
# these modules. A test compares the summaries with the commands.
COMMANDS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "Begin": (
        ("setup", "demo", "Watch an agent being killed, and resumed."),
        ("setup", "init", "Create an empty store."),
        ("setup", "doctor", "Check this machine and the store."),
        ("setup", "completion", "Print the line that sets up completion in your shell."),
    ),
    "Look": (
        ("show", "sessions", "List sessions."),
        ("log", "log", "Draw the tree of checkpoints, newest first."),
        ("transcript", "transcript", "Print the conversation of a session."),
        ("show", "show", "Show everything about one checkpoint."),
        ("show", "state", "Print a state as JSON, or a part of it."),
        ("diff", "diff", "Show what changed between two checkpoints."),
        ("diff", "blame", "Find the checkpoint in which a value last changed."),
        ("show", "search", "Find checkpoints by text, tag, status and more."),
        ("show", "index", "Make searches for text fast, with an index next to the store."),
        ("show", "usage", "Sum up tokens and cost by session, agent, model or day."),
        ("show", "stats", "Count sessions, checkpoints and bytes."),
        ("show", "watch", "Print checkpoints and operations as they are saved."),
        ("serve", "serve", "Look at the store in a browser."),
    ),
    "Change": (
        ("edit", "save", "Save a state from a JSON file or from standard input."),
        ("edit", "fork", "Start a new session from a checkpoint."),
        ("edit", "adopt", "Make the line of a fork the line of its origin."),
        ("edit", "rewind", "Move a session's head to another checkpoint."),
        ("edit", "undo", "Undo the last change of a session."),
        ("edit", "redo", "Redo the last change that was undone."),
        ("edit", "operations", "List the operations on a session."),
        ("edit", "rename", "Give a session another name."),
        ("edit", "tag", "Add tags to a checkpoint."),
        ("edit", "label", "Give a checkpoint a label."),
        ("edit", "untag", "Remove tags from a checkpoint."),
        ("edit", "unlabel", "Remove the label of a checkpoint."),
        ("edit", "delete", "Delete a checkpoint, or a whole session."),
    ),
    "Runs": (
        ("runs", "resume", "Show the state of a session's run, or resume it."),
        ("runs", "pending", "List calls in doubt, and questions that runs wait for."),
        ("runs", "resolve", "Decide what to do about a call in doubt."),
        ("runs", "answer", "Answer a question that a run waits for."),
        ("runs", "abandoned", "List sessions whose run died."),
    ),
    "Keep": (
        ("maintain", "verify", "Verify that the store holds what was saved."),
        ("maintain", "repair", "Move heads away from damaged checkpoints, and rebuild indexes."),
        ("maintain", "prune", "Delete old checkpoints by rules."),
        ("maintain", "gc", "Free deleted checkpoints and unused data."),
        ("maintain", "backup", "Copy the store to a file, and verify the copy."),
    ),
    "Move": (
        ("transfer", "copy", "Copy sessions to another store, of any kind."),
        ("transfer", "export", "Write sessions to one portable file, or to a folder."),
        ("transfer", "import", "Read sessions from what export wrote, or from other programs."),
    ),
}
ALIASES = {"check": "verify"}
SYNONYMS = {
    "approve": "answer", "branch": "fork", "cat": "state", "changes": "diff", "chat": "transcript",
    "checkout": "rewind", "clean": "prune", "clone": "copy", "commit": "save", "compact": "gc",
    "compare": "diff", "continue": "resume", "conversation": "transcript", "cost": "usage",
    "cp": "copy", "create": "init", "delete-session": "delete", "du": "stats", "dump": "export",
    "expire": "prune", "find": "search", "fix": "repair", "follow": "watch", "free": "gc",
    "fsck": "verify", "get": "show", "grep": "search", "help": "--help", "history": "log",
    "info": "show", "list": "sessions", "load": "state", "ls": "sessions", "messages": "transcript",
    "mv": "rename", "new": "init", "ops": "operations", "ps": "abandoned", "put": "save",
    "questions": "pending",
    "reindex": "index", "remove": "delete", "reset": "rewind", "restore": "rewind",
    "revert": "undo", "rm": "delete", "run": "resume", "size": "stats", "status": "sessions",
    "tail": "watch", "tokens": "usage", "tree": "log", "ui": "serve", "vacuum": "gc",
    "validate": "verify", "version": "--version", "view": "serve", "waiting": "pending",
    "web": "serve",
}  # fmt: skip
"""Words that other programs use for a command. They are suggested, not run."""
_COMPLETE = "_HOLDFAST_COMPLETE"
FAMILY = {name: module for rows in COMMANDS.values() for module, name, _ in rows}


class Commands(click.Group):
    """The group of all commands. A command is imported when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(FAMILY)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        cmd_name = ALIASES.get(cmd_name, cmd_name)
        if cmd_name not in FAMILY:
            return None
        module = import_module(f"holdfast.cli.cmd_{FAMILY[cmd_name]}")
        command: click.Command = getattr(module, f"{cmd_name}_")  # `import` is a keyword of Python
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = {*FAMILY, *ALIASES}
        if args and args[0] not in known and not args[0].startswith("-"):
            from difflib import get_close_matches

            similar = [SYNONYMS[args[0]]] if args[0] in SYNONYMS else []
            similar = similar or get_close_matches(args[0], FAMILY, 1)
            hint = f"did you mean `holdfast {similar[0]}`?" if similar else "see `holdfast --help`"
            raise click.UsageError(f"there is no command {args[0]!r}\nHint: {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        for title, rows in COMMANDS.items():
            with formatter.section(title):
                formatter.write_dl([(name, text) for _, name, text in rows])


def _width() -> int:
    """Return the width of the terminal. Click would import many modules for that."""
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
    """Durable, versioned state for AI agents: inspect it, compare it, undo it."""
    ctx.obj.given = store


def run(args: list[str] | None = None) -> int:
    """Run a command, and return its exit code."""
    args = sys.argv[1:] if args is None else args
    json = "--json" in args
    app = App(words=args)
    _open_streams()
    try:
        # cli.main() would use other exit codes for Ctrl-C and for a closed pipe.
        if instruction := os.environ.get(_COMPLETE):
            return _complete(instruction)
        with cli.make_context("holdfast", [*args], color=_color(), obj=app) as ctx:
            cli.invoke(ctx)
        sys.stdout.flush()
        return 0
    except click.exceptions.Exit as e:
        return e.exit_code
    except click.Abort:
        return _print_error("Abort", "cancelled: nothing was done", None, 1, json=json)
    except click.exceptions.NoArgsIsHelpError as e:
        click.echo(e.ctx.get_help() if e.ctx else e.format_message(), err=True)
        return 2
    except click.UsageError as e:
        message, _, hint = e.format_message().partition("\nHint: ")
        if not hint and e.ctx is not None:
            hint = f"see `{e.ctx.command_path} --help`"
        return _print_error("UsageError", message, hint, 2, json=json)
    except click.ClickException as e:
        return _print_error(type(e).__name__, e.format_message(), None, 1, json=json)
    except BrokenPipeError as e:
        discard(sys.stdout)
        return 0 if app.lists else _print_error(type(e).__name__, str(e), None, 6, json=json)
    except KeyboardInterrupt:
        return 130
    except HoldfastError as e:
        return _print_error(type(e).__name__, *cli_words(e), e.exit_code, json=json)
    except OSError as e:
        return _print_error(type(e).__name__, str(e), None, 6, json=json)
    except Exception as e:
        if os.environ.get("HOLDFAST_DEBUG"):
            raise
        hint = "this is a bug in holdfast; HOLDFAST_DEBUG=1 shows the traceback"
        return _print_error(type(e).__name__, f"{type(e).__name__}: {e}", hint, 1, json=json)


def _open_streams() -> None:
    """Open closed streams (`>&-`) as /dev/null. Else a file of the store could get their number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def _complete(instruction: str) -> int:
    """Answer the completion script of a shell, such as "bash_source" or "bash_complete".

    Unlike click, this can print names that contain bytes other than UTF-8.
    """
    from click.shell_completion import get_completion_class

    shell, _, action = instruction.partition("_")
    kind = get_completion_class(shell)
    if kind is None or action not in ("source", "complete"):
        return 1
    completion = kind(cli, {}, "holdfast", _COMPLETE)
    text = completion.source() if action == "source" else completion.complete() + "\n"
    click.echo(os.fsencode(text), nl=False)
    return 0


def _color() -> bool | None:
    """Return False if NO_COLOR is set. None means colors on a terminal, and none in a pipe."""
    return False if os.environ.get("NO_COLOR") else None


def _print_error(kind: str, message: str, hint: str | None, code: int, *, json: bool) -> int:
    """Print an error and its hint, as text or JSON. Return the exit code."""
    if json:
        from holdfast.json import dumps

        shape: Shape = {"error": kind, "message": message, "hint": hint, "exit_code": code}
        text = dumps(shape)
    else:
        text = f"{click.style('error:', fg='red', bold=True)} {message}"
        if hint:
            text += f"\n{click.style('Hint:', fg='cyan')} {hint}"
        text = escape_controls(text)
    with suppress(BrokenPipeError):
        click.echo(text, err=True, color=_color())
    return code


# Hints for the command line, in place of the library's default hints.
_HINTS = {
    "SessionNotFound": "`holdfast sessions` lists all sessions",
    "CheckpointNotFound": "`holdfast log --all` lists every checkpoint",
    "HeadMoved": "another process has saved; see `holdfast log`, then try again",
    "Corrupt": "`holdfast verify` lists the damage, and what still loads",
    "KeyTaken": "`holdfast show key:KEY` shows the checkpoint that has it",
    "SessionBusy": "a worker is running it; `holdfast abandoned` lists the runs that died",
}
# Calls in messages of the library, and the commands that do the same.
_COMMANDS = {
    "undo": "undo", "redo": "redo", "gc": "gc --all", "repair": "repair", "rewind": "rewind",
    "fork": "fork", "tree": "log --all", "sessions": "sessions", "verify": "verify",
    "operations": "operations", "copy": "copy", "resolve": "resolve", "answer": "answer",
    "pending": "pending", "backup": "backup", "delete": "delete", "prune": "prune --all",
}  # fmt: skip
_PHRASES = {
    "max_bytes=…": "--max-bytes N",
    "run() without resume=True": "your program starts a run, with session.run()",
    "run(takeover=True)": "`holdfast resume --takeover`",
    'give format="s0"': 'give --format: "s0"',
}
_CALL = re.compile(rf"(?:\b(?:store|session)\.)?\b({'|'.join(_COMMANDS)})\([^()]*\)")


def cli_words(error: HoldfastError) -> tuple[str, str | None]:
    """Return the message and the hint of an error, with commands in place of calls."""
    hint = error.hint
    if hint is not None and hint == error.default_hint:
        hint = next(
            (_HINTS[kind.__name__] for kind in type(error).__mro__ if kind.__name__ in _HINTS), hint
        )
    return as_commands(error.message), None if hint is None else as_commands(hint)


@contextmanager
def without_check_hint() -> Iterator[None]:
    """Replace the default hint of Corrupt, because `verify` itself cannot suggest `verify`."""
    try:
        yield
    except Corrupt as e:
        if e.hint != e.default_hint:
            raise
        hint = "the store is too damaged to list its damage; restore a backup"
        raise Corrupt(e.message, hint=hint) from e


def as_commands(text: str) -> str:
    """Replace calls of the library by commands, such as undo() by `holdfast undo`."""
    for phrase, replacement in _PHRASES.items():
        text = text.replace(phrase, replacement)
    return _CALL.sub(lambda m: f"`holdfast {_COMMANDS[m[1]]}`", text)
