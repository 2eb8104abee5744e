"""Commands that maintain a store: verify, repair, prune, gc, backup."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from holdfast import json
from holdfast.cli import output, select
from holdfast.cli.context import App, NewPath, command, yes_option
from holdfast.cli.main import without_check_hint
from holdfast.cli.output import Bar
from holdfast.cli.select import session_argument, session_option
from holdfast.errors import Corrupt, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast import Plan, RepairResult, Retention, Store, VerifyResult

_SESSIONS = 10
"""How many sessions a summary lists one by one."""
_LINES = 20
"""A plan with more lines is shown only with --verbose. Otherwise, it is summarized."""


@command("verify")
@click.option(
    "--read-data", is_flag=True, help="Read every stored byte, not only records and hashes."
)
@session_option("Check only this session.")
def verify_(app: App, session: str | None, *, read_data: bool) -> None:
    """Verify that the store holds what was saved; exit code 5 if something is damaged."""
    with without_check_hint(), app.store() as store:
        names = None if session is None else [select.the_session(store, session).name]
        report = store.verify(read_data=read_data, sessions=names)
    if app.json:
        app.print_json(json.report(report))
    else:
        app.print(f"{_counted(report.sessions, report.checkpoints)}, {report.loadable:,} loadable")
        _print_problems(app, report)
        if report.ok and not read_data:
            app.notice("Records and hashes are sound. --read-data reads all data as well.")
    if not report.ok:
        if not app.json:
            app.notice(
                f"Hint: {app.command_line('repair')} moves heads away from damaged checkpoints"
            )
        raise click.exceptions.Exit(Corrupt.exit_code)


def _print_problems(app: App, report: VerifyResult) -> None:
    for problem in report.problems:
        app.print(f"{click.style('✗', fg='red')} {output.one_line(str(problem))}")


def _counted(sessions: int, checkpoints: int) -> str:
    return f"{output.plural(sessions, 'session')}, {output.plural(checkpoints, 'checkpoint')}"


@command("repair")
def repair_(app: App) -> None:
    """Move heads away from damaged checkpoints, and rebuild indexes.

    Exit code 5 if damage remains.
    """
    with app.store(write=True) as store:
        result = store.repair()
        if app.json:
            app.print_json(json.repair(result))
        else:
            _print_repair(app, store, result)
    if not result.ok:
        raise click.exceptions.Exit(Corrupt.exit_code)


def _print_repair(app: App, store: Store, result: RepairResult) -> None:
    for each in result.sessions:
        app.print(click.style(output.one_line(each.session), bold=True))
        if each.moved is not None:
            app.print(f"  the head moved from checkpoint {each.moved[0]} to {each.moved[1]}")
            app.print_undo(store.session(each.session))
        for part in each.rebuilt:
            app.print(f"  rebuilt: {part}")
        for part in (*each.lost, *each.forgotten):
            app.print(f"  lost: {part}")
    for part in result.rebuilt:
        app.print(f"rebuilt: {part}")
    if not result.ok:
        app.print(f"Still damaged; {result.remaining.loadable:,} checkpoints load:")
        _print_problems(app, result.remaining)
    elif not result.sessions and not result.rebuilt:
        app.notice("The store is sound. There was nothing to repair.")


@command("prune")
@session_argument("The same as SESSION; optional if there is only one.")
@click.option("--all", "-a", "everything", is_flag=True, help="Prune every session.")
@click.option(
    "--keep-last", type=click.IntRange(1), metavar="N", help="Keep the newest N checkpoints."
)
@click.option(
    "--keep-every",
    metavar="N|hour|day",
    help="Of the older ones, keep every N-th, or one per hour or day.",
)
@click.option("--max-age", metavar="AGE", help="Delete checkpoints older than this: 30d, 12h.")
@click.option(
    "--max-bytes", type=click.IntRange(1), metavar="N", help="Limit the size of each session."
)
@click.option(
    "--store-bytes", type=click.IntRange(1), metavar="N", help="Limit the size of the store."
)
@click.option("--agent", metavar="NAME", help="Prune only the sessions of this agent.")
@click.option("--session-ttl", metavar="AGE", help="Delete sessions that are idle for this long.")
@click.option(
    "--tagged/--no-tagged", "keep_tagged", default=True, help="Keep checkpoints with a tag."
)
@click.option(
    "--labelled/--no-labelled", "keep_labelled", default=True, help="Keep checkpoints with a label."
)
@click.option("--dry-run", is_flag=True, help="Only show the plan.")
@click.option("--verbose", "-v", is_flag=True, help="Show the plan with every checkpoint.")
@yes_option
def prune_(
    app: App,
    session: str | None,
    agent: str | None,
    *,
    everything: bool,
    dry_run: bool,
    verbose: bool,
    **rules: Any,
) -> None:
    """Delete old checkpoints by rules, after showing the plan and asking.

    Prunes SESSION; with --all, every session. Undo restores the checkpoints until gc has freed
    them; `holdfast undo --prune` does so in all sessions.
    """
    rule = _rule(rules)
    if session is not None and agent is not None:
        raise InvalidRequest("give a session or --agent, not both")
    with app.store(write=not dry_run) as store:
        everything = everything or agent is not None
        one = select.session_or_all(store, session, everything=everything)
        prune = partial(store.prune, agent=agent) if one is None else one.prune
        plans = _plans(prune, rule, dry_run=True)
        if app.json and dry_run:
            for plan in plans:
                app.print_json(json.plan(plan))
            return
        show = app.print if dry_run else app.notice
        if verbose or sum(1 + len(plan.verdicts) for plan in plans) <= _LINES:
            for plan in plans:
                _print_plan(show, store, plan)
        else:
            _print_summary(show, store, plans)
            app.notice("To see every checkpoint, add --verbose.")
        if dry_run or not plans:
            app.notice("This was a dry run. Nothing was deleted." if plans else "Nothing to prune.")
            return
        app.confirm(f"Delete {_deleted(plans)}?")
        done = _plans(prune, rule, dry_run=False)
        if app.json:
            for plan in done:
                app.print_json(json.plan(plan))
            return
        app.print(f"Deleted {_deleted(done)}.")
        if one and done:
            app.print_undo(one)
        elif done:
            app.notice(f"Undo with: {app.command_line('undo', '--prune')}")
        app.notice(f"Free their space with: {app.command_line('gc', '--all')}")


def _deleted(plans: Sequence[Plan]) -> str:
    """Return how many checkpoints and whole sessions the plans delete."""
    checkpoints = sum(plan.deleted for plan in plans)
    sessions = sum(plan.whole is not None for plan in plans)
    counted = ((checkpoints, "checkpoint"), (sessions, "session"))
    return " and ".join(output.plural(n, noun) for n, noun in counted if n) or "nothing"


def _rule(rules: dict[str, Any]) -> Retention:
    from holdfast import Retention

    if all(value is None or isinstance(value, bool) for value in rules.values()):
        raise InvalidRequest(
            "no rule is given", hint="give one, such as --keep-last 100 or --max-age 30d"
        )
    every = rules["keep_every"]
    if every is not None and every.isdecimal():
        rules["keep_every"] = int(every)
    return Retention(**rules)


def _plans(
    prune: Callable[..., Plan | list[Plan]], rule: Retention, *, dry_run: bool
) -> list[Plan]:
    """Prune a session or several. Return the plans that delete something."""
    found = prune(rule, dry_run=dry_run)
    plans = found if isinstance(found, list) else [found]
    return [plan for plan in plans if plan.deleted or plan.whole]


def _print_plan(
    show: Callable[[str], None], store: Store, plan: Plan, limit: int | None = None
) -> None:
    show(_headline(plan))
    if plan.whole is not None:
        return
    length = store.id_length(v.checkpoint for v in plan.verdicts[:100])
    for verdict in plan.verdicts[:limit]:
        action = "keep" if verdict.keep else click.style("drop", fg="red")
        c = verdict.checkpoint
        step = "?" if c.damaged else c.step
        show(f"  {action}  {c.id[:length]}  step {step}  {output.one_line(verdict.reason)}")
    if limit is not None:
        show(f"  … and {output.plural(len(plan.verdicts) - limit, 'more checkpoint')}")


def _headline(plan: Plan) -> str:
    name = output.one_line(plan.session)
    if plan.whole is not None:
        return f"{name}: delete the session: {plan.whole}"
    return f"{name}: delete {plan.deleted:,} of {len(plan.verdicts):,} checkpoints"


def _print_summary(show: Callable[[str], None], store: Store, plans: Sequence[Plan]) -> None:
    """Show at most a screen: the sessions that lose most, or the beginning of the only plan."""
    if len(plans) == 1:
        _print_plan(show, store, plans[0], _LINES)
        return
    show(f"Delete {_deleted(plans)} in {output.plural(len(plans), 'session')}:")
    most = sorted(plans, key=lambda plan: -len(plan.verdicts if plan.whole else plan.removed))
    for plan in most[:_SESSIONS]:
        show(_headline(plan))
    if len(plans) > _SESSIONS:
        show(f"and {output.plural(len(plans) - _SESSIONS, 'more session')}")


@command("gc")
@click.option(
    "--all",
    "-a",
    "everything",
    is_flag=True,
    help="Required, because gc always concerns the whole store.",
)
@click.option(
    "--erase",
    is_flag=True,
    help="Leave no trace of the deleted data in the files. This takes longer.",
)
@yes_option
def gc_(app: App, *, everything: bool, erase: bool) -> None:
    """Free deleted checkpoints and unused data. This is final: undo cannot restore them.

    It concerns all sessions, so it needs --all. Checkpoints that were pruned by their age are freed
    only one day after that. --erase frees them at once, and rewrites the files without the deleted
    data. Saves wait for it.
    """
    if not everything:
        raise InvalidRequest(
            "gc frees what was deleted in every session, and this cannot be undone",
            hint=app.command_line("gc", "--all"),
        )
    with app.store(write=True) as store:
        waiting = store.stats().deleted
        count = output.plural(waiting, "deleted checkpoint")
        app.notice(f"This frees {count} and the data that only they use.")
        if not erase:
            app.notice("Checkpoints pruned by their age are kept for one more day.")
        app.confirm("Free them for good?")
        with Bar("freeing") as progress:
            done = store.gc(progress.phase, erase=erase)
        if app.json:
            app.print_json(done._asdict())
            return
        rows = output.plural(done.rows, "row")
        app.print(f"Freed {_counted(done.sessions, done.checkpoints)} and {rows} of data.")
        if done.held:
            app.notice(f"{output.plural(done.held, 'checkpoint')} kept for at most one more day.")
        if done.blocked:
            app.notice(
                "Some deleted data is still there, because other processes use the store or a "
                "session cannot be read. Run gc again."
            )


@command("backup")
@click.argument("path", type=NewPath())
@click.option(
    "--keep", type=click.IntRange(1), metavar="N",
    help="Replace PATH, and keep older copies as PATH.1 and so on, N in total.",
)  # fmt: skip
def backup_(app: App, path: str, keep: int | None) -> None:
    """Copy the store to PATH, as it is at one moment, and verify the copy.

    If PATH is a folder that is no store, the copy is made in it.

    Other processes can write at the same time. Exit code 5 if the store is damaged; the copy has
    the same damage then.
    """
    with app.store() as store:
        report = store.backup(path, keep=keep)
    if app.json:
        app.print_json({"path": path, "report": json.report(report)})
    else:
        result = "verified" if report.ok else "with the same damage as the store"
        app.print(f"{path}: {_counted(report.sessions, report.checkpoints)}, {result}")
        _print_problems(app, report)
        app.notice(f"To undo this, remove {path}.")
    if not report.ok:
        raise click.exceptions.Exit(Corrupt.exit_code)
