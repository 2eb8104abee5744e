"""What a command works with: the store that was named, and where its output goes."""

from __future__ import annotations

import functools
import re
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.table import Table

    from holdfast import Session, Store
    from holdfast.backends.base import Backend
    from holdfast.shapes import Shape

    Command = Callable[..., Any]
    Decorator = Callable[[Command], click.Command]


class App:
    """One call of the command line."""

    def __init__(self, url: str | None) -> None:
        self._url = url
        self.json = False
        self.yes = False

    # -- the store -----------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """The store that was named; without one, the store of this user."""
        return self._url or default_store()

    @contextmanager
    def store(self, *, write: bool = False, create: bool = False) -> Iterator[Store]:
        """The store, opened for reading unless a command changes it."""
        import holdfast

        if create and self._url is None:
            import os

            os.makedirs(os.path.dirname(self.url), mode=0o700, exist_ok=True)
        with self._found():
            opened = holdfast.open(self.url, create=create, read_only=not (write or create))
        with opened as store:
            yield store

    @contextmanager
    def backend(self) -> Iterator[Backend]:
        """What is below a store, to read from: without all that a store can do, and quickly."""
        from holdfast.backends.opening import open_backend

        with self._found():
            opened = open_backend(self.url, create=False, read_only=True)
        try:
            yield opened
        finally:
            opened.close()

    @contextmanager
    def _found(self) -> Iterator[None]:
        from holdfast.errors import StoreNotFound

        try:
            yield
        except StoreNotFound as e:
            raise StoreNotFound(e.message, hint=self._missing()) from None

    def _missing(self) -> str:
        if self._url is None:
            return "name one with --store or HOLDFAST_STORE, or make this one with `holdfast init`"
        return "check the address, or make it with `holdfast init`"

    # -- output --------------------------------------------------------------------------------

    def emit(self, shape: Shape) -> None:
        """A line of JSON."""
        from holdfast.shapes import dumps

        click.echo(dumps(shape))

    def say(self, text: str = "") -> None:
        """Data for people, on stdout."""
        if not self.json:
            click.echo(harmless(text))

    def table(self, table: Table) -> None:
        """Data for people, in columns."""
        from rich.console import Console

        # A pipe has no width that names would have to be folded to.
        console = Console(highlight=False, width=None if sys.stdout.isatty() else 10_000)
        with console.capture() as drawn:  # for a closed pipe must not end the process in there
            console.print(table)
        self.say("\n".join(line.rstrip() for line in drawn.get().splitlines()))

    def note(self, text: str) -> None:
        """A notice, on stderr: never part of the data."""
        if not self.json:
            click.echo(harmless(text), err=True)

    def way_back(self, session: Session, *, redo: bool = False) -> None:
        """How to undo what was just done."""
        how = self.command("redo" if redo else "undo", "-s", session.name)
        self.note(f"{'Again' if redo else 'Undo'} with: {how}")

    def command(self, *words: str) -> str:
        """A command for the same store, as one would type it."""
        from holdfast.cli.words import quoted

        store = ["--store", self._url] if self._url and self._typed() else []
        return " ".join(map(quoted, ["holdfast", *store, *words]))

    @staticmethod
    def _typed() -> bool:
        """Whether the store was named in this very command, and not by the environment."""
        ctx: click.Context | None = click.get_current_context()
        while ctx is not None:
            if ctx.get_parameter_source("store") == ParameterSource.COMMANDLINE:
                return True
            ctx = ctx.parent
        return False

    def confirm(self, question: str) -> None:
        """Go on only if the user says so, or has said so with --yes."""
        from holdfast.errors import InvalidRequest

        if self.yes:
            return
        if not sys.stdin.isatty():
            raise InvalidRequest(
                "nothing was done: this cannot be asked here", hint="give --yes to go on"
            )
        try:
            click.confirm(question, abort=True, err=True)
        except click.Abort as e:
            if isinstance(e.__context__, KeyboardInterrupt):  # for click the same as a no
                click.echo(err=True)  # the shell goes on below the question
                raise KeyboardInterrupt from None
            raise


def harmless(text: str) -> str:
    """What a state holds must not steer a terminal: all but our own colours is made visible."""
    if text.isprintable():
        return text
    return re.sub(_STEERING, lambda m: m[0].encode("unicode_escape").decode(), text)


# Escapes that are none of ours, control characters but for tabs and new lines, and what turns the
# direction of text.
_STEERING = (
    r"\x1b(?!\[(?:(?:0|1|2|22|3[1-6]);?)+m)"
    r"|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
)


def default_store() -> str:
    from platformdirs import user_data_path

    return str(user_data_path("holdfast", appauthor=False) / "store.db")


# -- options that many commands have ---------------------------------------------------------------


def command(name: str, **attributes: Any) -> Decorator:
    """A command that gets the App, and has --store and --json like all others."""

    def decorate(function: Command) -> click.Command:
        """`function` gets the App first."""

        @functools.wraps(function)
        def call(*args: Any, json: bool, store: str | None, **options: Any) -> Any:
            app: App = click.get_current_context().obj
            app.json = json
            if json:
                _hush()
            if store is not None:
                app._url = store
            return function(app, *args, **options)

        json = click.option("--json", is_flag=True, help="Print JSON; lists a line each.")
        store = click.option("--store", "-S", metavar="URL", help="The store to use.")
        made: click.Command = click.command(name, **attributes)(store(json(call)))  # type: ignore[no-untyped-call]
        return made

    return decorate


@contextmanager
def needing(extra: str) -> Iterator[None]:
    """Imports of what only an extra brings."""
    try:
        yield
    except ImportError as e:
        from holdfast.errors import InvalidRequest

        hint = f"pip install 'holdfast[{extra}]'"
        raise InvalidRequest(f"this needs {e.name}", hint=hint) from e


def _hush() -> None:
    """Beside JSON, stderr has an error as JSON, or nothing: what the library logs is left out."""
    import logging

    logging.getLogger("holdfast").addHandler(logging.NullHandler())


def session_option(function: Command) -> Command:
    from holdfast.cli.completing import complete_sessions

    return click.option(
        "--session",
        "-s",
        metavar="NAME",
        help="The session that relative revisions and labels belong to.",
        shell_complete=complete_sessions,
    )(function)


def yes_option(function: Command) -> Command:
    def note(ctx: click.Context, _: click.Parameter, value: bool) -> None:  # noqa: FBT001
        ctx.obj.yes = value

    return click.option(
        "--yes", "-y", is_flag=True, expose_value=False, callback=note, help="Do not ask."
    )(function)
