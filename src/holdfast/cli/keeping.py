"""Commands that keep a store in order: check, repair, prune, gc, backup."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from holdfast import shapes
from holdfast.cli import naming, words
from holdfast.cli.app import App, command, session_option, yes_option
from holdfast.cli.progress import bar
from holdfast.cli.wording import nothing_more_to_check
from holdfast.errors import Corrupt, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast import Plan, Retention, Store

_SHOWN = 10
"""Sessions of which the way back is told one by one."""


@command("check")
@click.option("--read-data", is_flag=True, help="Read every stored byte; else records and hashes.")
@session_option
def check_(app: App, session: str | None, *, read_data: bool) -> None:
    """Verify that everything stored is what was saved; exit code 5 if something is damaged."""
    with nothing_more_to_check(), app.store() as store:
        names = None if session is None else [naming.the_session(store, session).name]
        report = store.verify(read_data=read_data, sessions=names)
    if app.json:
        app.emit(shapes.report(report))
    else:
        app.say(f"{_counted(report.sessions, report.checkpoints)}, {report.loadable:,} loadable")
        for problem in report.problems:
            app.say(f"{click.style('✗', fg='red')} {words.one_line(str(problem))}")
        if report.ok and not read_data:
            app.note("Records and hashes are sound; --read-data reads all data, too.")
    if not report.ok:
        if not app.json:
            app.note(f"Hint: {app.command('repair')} moves heads off what is damaged")
        raise click.exceptions.Exit(Corrupt.exit_code)


def _counted(sessions: int, checkpoints: int) -> str:
    return f"{words.plural(sessions, 'session')}, {words.plural(checkpoints, 'checkpoint')}"


@command("repair")
def repair_(app: App) -> None:
    """Move heads off damaged checkpoints, rebuild what can be rebuilt, and tell what is lost."""
    with app.store(write=True) as store:
        found = store.repair()
        for each in found:
            if app.json:
                app.emit(each._asdict())
                continue
            app.say(click.style(words.one_line(each.session), bold=True))
            if each.moved is not None:
                app.say(f"  the head moved from checkpoint {each.moved[0]} to {each.moved[1]}")
                app.way_back(store.session(each.session))
            for what in each.rebuilt:
                app.say(f"  works again: {what}")
            for what in each.lost:
                app.say(f"  lost: {what}")
        if not found:
            app.note("Nothing had to be repaired.")


@command("prune")
@session_option
@click.option("--keep-last", type=click.IntRange(1), metavar="N", help="Keep the newest N.")
@click.option(
    "--keep-every", metavar="N|hour|day", help="Of the older ones, keep each N-th, or one each."
)
@click.option("--max-age", metavar="AGE", help="Keep nothing older than this: 30d, 12h.")
@click.option("--max-bytes", type=click.IntRange(1), metavar="N", help="Of a session.")
@click.option("--store-bytes", type=click.IntRange(1), metavar="N", help="Of the whole store.")
@click.option("--session-ttl", metavar="AGE", help="Delete sessions idle for so long.")
@click.option("--tagged/--no-tagged", "keep_tagged", default=True, help="Keep what has a tag.")
@click.option(
    "--labelled/--no-labelled", "keep_labelled", default=True, help="Keep what has a label."
)
@click.option("--dry-run", is_flag=True, help="Only show the plan.")
@yes_option
def prune_(app: App, session: str | None, *, dry_run: bool, **rules: Any) -> None:
    """Delete old checkpoints by rules, after showing what goes, and why.

    Undo brings them back until gc has freed them.
    """
    rule = _rule(rules)
    with app.store(write=not dry_run) as store:
        plans = [p for p in _plans(store, rule, session, dry_run=True) if p.removed or p.whole]
        if app.json and dry_run:
            for plan in plans:
                app.emit(shapes.plan(plan))
            return
        for plan in plans:
            _show(app.say if dry_run else app.note, store, plan)
        if dry_run or not plans:
            app.note("Nothing was done: a dry run." if plans else "Nothing to prune.")
            return
        app.confirm(f"Delete {_going(plans)}?")
        done = [p for p in _plans(store, rule, session, dry_run=False) if p.removed or p.whole]
        if app.json:
            for plan in done:
                app.emit(shapes.plan(plan))
            return
        app.say(f"Deleted {_going(done)}.")
        for plan in done[:_SHOWN]:
            app.way_back(store.session(plan.session))
        if len(done) > _SHOWN:
            more = words.plural(len(done) - _SHOWN, "more session")
            app.note(f"And {more}, each with: {app.command('undo', '-s')} NAME")
        app.note(f"Free their space with: {app.command('gc')}")


def _going(plans: Sequence[Plan]) -> str:
    """What goes, counted: checkpoints of sessions that stay, and sessions as a whole."""
    checkpoints = sum(len(plan.removed) for plan in plans)
    sessions = sum(plan.whole is not None for plan in plans)
    counted = ((checkpoints, "checkpoint"), (sessions, "session"))
    return " and ".join(words.plural(n, what) for n, what in counted if n) or "nothing"


def _rule(rules: dict[str, Any]) -> Retention:
    from holdfast import Retention

    if all(value is None or isinstance(value, bool) for value in rules.values()):
        raise InvalidRequest(
            "prune by which rule?", hint="such as --keep-last 100 or --max-age 30d"
        )
    every = rules["keep_every"]
    if every is not None and every.isdecimal():
        rules["keep_every"] = int(every)
    return Retention(**rules)


def _plans(store: Store, rule: Retention, session: str | None, *, dry_run: bool) -> list[Plan]:
    if session is None:
        return store.prune(rule, dry_run=dry_run)
    return [naming.the_session(store, session).prune(rule, dry_run=dry_run)]


def _show(tell: Callable[[str], None], store: Store, plan: Plan) -> None:
    """What goes and why: the answer to a dry run, otherwise part of a question, on stderr."""
    if plan.whole is not None:
        tell(f"{words.one_line(plan.session)}: all of it goes: {plan.whole}")
        return
    tell(f"{words.one_line(plan.session)}: {len(plan.removed):,} of {len(plan.verdicts):,} go")
    length = naming.short_length(store.backend, [v.checkpoint for v in plan.verdicts[:100]])
    for verdict in plan.verdicts:
        what = click.style("drop", fg="red") if not verdict.keep else "keep"
        c = verdict.checkpoint
        step = "?" if c.damaged else c.step
        tell(f"  {what}  {c.id[:length]}  step {step}  {words.one_line(verdict.reason)}")


@command("gc")
@yes_option
def gc_(app: App) -> None:
    """Free what was deleted, and give the space back. After that, undo cannot bring it back."""
    with app.store(write=True) as store:
        waiting = store.stats().deleted
        going = words.plural(waiting, "deleted checkpoint")
        app.note(f"To be freed, because they were deleted: {going}, and what only they use.")
        app.note("What goes by its age alone is held back for a day.")
        app.confirm("Free it for good?")
        with bar("freeing") as progress:
            done = store.gc(progress.phase)
        if app.json:
            app.emit(done._asdict())
            return
        rows = words.plural(done.rows, "row")
        app.say(f"Freed {_counted(done.sessions, done.checkpoints)} and {rows} of data.")
        if done.held:
            app.note(f"{words.plural(done.held, 'checkpoint')} held back, for at most a day.")


@command("backup")
@click.argument("path", type=click.Path())
def backup_(app: App, path: str) -> None:
    """Copy the store to PATH, as of one moment and verified, while others go on writing.

    Exit code 5 if the store is damaged: then the copy has the same damage.
    """
    with app.store() as store:
        report = store.backup(path)
    if app.json:
        app.emit({"path": path, "report": shapes.report(report)})
    else:
        how = "verified" if report.ok else "the same as the store, with the damage that it has"
        app.say(f"{path}: {_counted(report.sessions, report.checkpoints)}, {how}")
        for problem in report.problems:
            app.say(f"{click.style('✗', fg='red')} {words.one_line(str(problem))}")
        app.note(f"Take it back by removing {path}.")
    if not report.ok:
        raise click.exceptions.Exit(Corrupt.exit_code)
