"""The commands and exit codes of docs/cli.md, generated from the code."""

import inspect

import click

from holdfast import errors
from holdfast.cli.main import COMMANDS, cli

# codes that do not come from an error class alone
COMMON = {
    0: "done",
    1: "failed for another reason, the answer was no, or `doctor` found a problem",
    2: "the request is invalid: a wrong option or argument, a missing `--yes`",
    130: "ended by Ctrl-C",
}
COMMON_OPTIONS = {"--json", "--store", "--help"}
"""Options of every command; docs/cli.md explains them once."""


def reference() -> str:
    """Return a chapter for each family of commands."""
    root = click.Context(cli, info_name="holdfast", **cli.context_settings)
    parts: list[str] = []
    for family, rows in COMMANDS.items():
        parts += ["", f"## {family}"]
        for _, name, _ in rows:
            command = cli.get_command(root, name)
            if command is None:
                raise LookupError(f"there is no command {name!r}")
            parts += ["", *_command(command, click.Context(command, root, info_name=name))]
    return "\n".join(parts)


def _command(command: click.Command, context: click.Context) -> list[str]:
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    text = inspect.cleandoc(command.help or "").replace("\b\n", "")
    return [
        f"### holdfast {context.info_name}", "", "```text", usage, "```", "", text, "",
        *_options(command, context),
    ]  # fmt: skip


def _options(command: click.Command, context: click.Context) -> list[str]:
    """Return a table of the options, without those of every command."""
    rows = []
    for option in command.get_params(context):
        shown = isinstance(option, click.Option) and not COMMON_OPTIONS.intersection(option.opts)
        record = option.get_help_record(context) if shown else None
        if record is not None:
            names, text = (" ".join(part.split()).replace("|", "\\|") for part in record)
            rows.append(f"| `{names}` | {text} |")
    return ["| Option | |", "|---|---|", *rows] if rows else []


def exit_codes() -> str:
    """Return a table of the codes, each with its errors."""
    kinds: dict[int, list[type[errors.HoldfastError]]] = {code: [] for code in COMMON}
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.HoldfastError):
            kinds.setdefault(kind.exit_code, []).append(kind)
    rows = ["| Code | Means | Errors |", "|---|---|---|"]
    for code, found in sorted(kinds.items()):
        means = COMMON.get(code) or _summary(found[0])
        rows.append(f"| {code} | {means} | {', '.join(f'`{e.__name__}`' for e in found)} |")
    return "\n".join(rows)


def _summary(kind: type[errors.HoldfastError]) -> str:
    """Return the docstring of an error class, as a table cell."""
    text = " ".join(inspect.cleandoc(kind.__doc__ or "").split()).rstrip(".")
    return text[:1].lower() + text[1:]
