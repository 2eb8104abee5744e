"""App: the store and the output of one command. Also the options of many commands."""

from __future__ import annotations

import functools
import os
import re
import sys
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from holdfast.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from holdfast import Session, Store
    from holdfast.json import Shape

    Command = Callable[..., Any]
    Decorator = Callable[[Command], click.Command]


class App:
    """One call of the command line: its store and its output."""

    def __init__(self, given: str | None = None, words: Sequence[str] = ()) -> None:
        self.given = given
        """The address of the store that the user gave, or None."""
        self.words = words
        """The words of the command line after `holdfast`."""
        self.json = False
        self.yes = False
        self.lists = True
        """Whether the command only prints. It then ends early when its output is closed."""

    # -- the store -----------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """The address of the store: the given one, or that of this user's default store."""
        return expanded(self.given) if self.given else default_store()

    @contextmanager
    def store(self, *, write: bool = False, create: bool = False) -> Iterator[Store]:
        """Open the store, for reading only unless `write` or `create` is given."""
        import holdfast

        try:
            opened = holdfast.open(self.url, create=create, read_only=not (write or create))
        except holdfast.StoreNotFound as e:
            raise holdfast.StoreNotFound(e.message, hint=self._where_it_may_be()) from None
        with opened as store:
            yield store

    def _where_it_may_be(self) -> str:
        """Return a hint for a missing store. The only store of this folder is offered."""
        from glob import glob

        from holdfast import file_kind
        from holdfast.cli.output import quoted, typed

        if self.given is not None:
            where = "the address" if self._store_was_typed() else "HOLDFAST_STORE"
            return f"check {where}, or create it with `{self.command_line('init')}`"
        here = [path for path in glob("*.db") if os.path.isfile(path)]
        if len(here) == 1 and os.access(here[0], os.R_OK) and file_kind(here[0]) == "store":
            command = typed("--store", here[0], *self.words)
            setting = f"export HOLDFAST_STORE={quoted(here[0])}"
            return f"for the store in this folder: `{command}`, or `{setting}` for all commands"
        return "give --store or set HOLDFAST_STORE, or create it with `holdfast init`"

    # -- output --------------------------------------------------------------------------------

    def print_json(self, shape: Shape) -> None:
        """Print an object as a line of JSON."""
        from holdfast.json import dumps

        self._echo(dumps(shape))

    def print(self, text: str = "") -> None:
        """Print text on stdout, but not with --json."""
        if not self.json:
            self._echo(escape_controls(text))

    def print_table(
        self, titles: str, rows: Iterable[Sequence[str]], numbers: Sequence[str]
    ) -> None:
        """Print a table on stdout, but not with --json. Columns of numbers are aligned right."""
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, header_style="dim")
        for title in titles.split():
            table.add_column(
                title, justify="right" if title in numbers else "left", no_wrap=title == "HEAD"
            )
        for cells in rows:
            table.add_row(*map(Text.from_ansi, cells))
        # In a pipe, no width is given, so that long names are not folded.
        console = Console(highlight=False, width=None if sys.stdout.isatty() else 10_000)
        with console.capture() as drawn:  # rich would exit if the pipe is closed
            console.print(table)
        self.print("\n".join(line.rstrip() for line in drawn.get().splitlines()))

    def notice(self, text: str) -> None:
        """Print a remark on stderr, but not with --json."""
        if not self.json:
            self._echo(escape_controls(text), err=True)

    def _echo(self, text: str, *, err: bool = False) -> None:
        try:
            click.echo(text, err=err)
        except BrokenPipeError:
            if self.lists:
                raise
            discard(sys.stderr if err else sys.stdout)  # the work still has to be finished

    def print_undo(self, session: Session, *, redo: bool = False) -> None:
        """Print the command that takes the last change back, or that redoes it."""
        verb = "redo" if redo else "undo"
        self.notice(f"{verb.capitalize()} with: {self.command_line(verb, '-s', session.name)}")

    def command_line(self, *words: str) -> str:
        """Return a command for the same store, as the user would type it."""
        from holdfast.cli.output import typed

        store = ["--store", self.given] if self.given and self._store_was_typed() else []
        return typed(*store, *words)

    @staticmethod
    def _store_was_typed() -> bool:
        """Return whether --store was given, rather than HOLDFAST_STORE."""
        ctx = click.get_current_context(silent=True)
        while ctx is not None:
            if ctx.get_parameter_source("store") == ParameterSource.COMMANDLINE:
                return True
            ctx = ctx.parent
        return False

    def confirm(self, question: str) -> None:
        """Ask the user, unless --yes was given. Raises Abort if the answer is no."""
        if self.yes:
            return
        if not sys.stdin.isatty():
            raise InvalidRequest(
                "nothing was done: this needs a confirmation, and stdin is not a terminal",
                hint="add --yes to confirm it",
            )
        try:
            click.confirm(question, abort=True, err=True)
        except click.Abort as e:
            if isinstance(e.__context__, KeyboardInterrupt):  # click turns Ctrl-C into Abort
                click.echo(err=True)  # so that the shell's prompt starts a new line
                raise KeyboardInterrupt from None
            raise


def discard(stream: IO[str]) -> None:
    """Redirect a stream to /dev/null, because its reader is gone."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def escape_controls(text: str) -> str:
    """Escape all that could control a terminal, except our own colours."""
    if text.isprintable():
        return text
    return re.sub(_STEERING, lambda m: m[0].encode("unicode_escape").decode(), text)


# Escape sequences other than ours, control characters except tabs and newlines, and characters that
# change the direction of text.
_STEERING = (
    r"\x1b(?!\[(?:(?:0|1|2|22|3[1-6]);?)+m)"
    r"|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
)


class NewPath(click.Path):
    """A path to write to. Refuses "-", because these commands cannot write to stdout."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "-":
            raise click.UsageError(
                "cannot write this to stdout\nHint: give a path; ./- is a file named -"
            )
        return super().convert(value, param, ctx)


def expanded(address: str) -> str:
    """Return an address with ~ expanded, also behind `files:` and `sqlite:`."""
    scheme, colon, path = address.partition(":")
    if scheme in ("files", "sqlite"):
        return scheme + colon + os.path.expanduser(path)
    return os.path.expanduser(address)


def default_store() -> str:
    """Return the path of this user's store."""
    from platformdirs import user_data_path

    return str(user_data_path("holdfast", appauthor=False) / "store.db")


# -- options of many commands ----------------------------------------------------------------------


def command(name: str, *, lists: bool = False, **attributes: Any) -> Decorator:
    """Make a command of a function, which gets the App as its first argument.

    Adds --store and --json. If its output is closed early, a command that only `lists` ends with
    exit code 0; any other finishes its work first.
    """

    def decorate(function: Command) -> click.Command:
        @functools.wraps(function)
        def call(*args: Any, json: bool, store: str | None, **options: Any) -> Any:
            app: App = click.get_current_context().obj
            app.json, app.lists = json, lists
            if json:
                silence_logs()
            if store is not None:
                app.given = store
            return function(app, *args, **options)

        json = click.option(
            "--json", is_flag=True, help="Print JSON; a list has one line per item."
        )
        store = click.option("--store", "-S", metavar="URL", help="The store to use.")
        decorated: click.Command = click.command(name, **attributes)(store(json(call)))  # type: ignore[no-untyped-call]
        return decorated

    return decorate


@contextmanager
def require_extra(extra: str) -> Iterator[None]:
    """Turn an ImportError into an error that says how to install the extra."""
    try:
        yield
    except ImportError as e:
        hint = f"pip install 'holdfast[{extra}]'"
        raise InvalidRequest(f"this needs {e.name}", hint=hint) from e


def silence_logs() -> None:
    """Keep the library's log off stderr, where --json prints errors only."""
    import logging

    logging.getLogger("holdfast").addHandler(logging.NullHandler())


def yes_option(function: Command) -> Command:
    def confirmed(ctx: click.Context, _: click.Parameter, value: bool) -> None:  # noqa: FBT001
        ctx.obj.yes = value

    return click.option(
        "--yes", "-y", is_flag=True, expose_value=False, callback=confirmed,
        help="Do not ask for confirmation.",
    )(function)  # fmt: skip
