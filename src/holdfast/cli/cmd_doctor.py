"""`holdfast doctor`: check this machine and the store."""

from __future__ import annotations

import click

import holdfast
from holdfast import Finding
from holdfast.cli import output
from holdfast.cli.context import App, command, silence_logs
from holdfast.cli.main import cli_words
from holdfast.errors import StoreNotFound

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
