"""`holdfast demo`: what happens to an agent that is killed, told with real output."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

import holdfast
from holdfast.cli import naming
from holdfast.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.cli.app import App

_AGENT = [sys.executable, "-m", "holdfast.cli.demo_agent"]


def play(app: App, folder: str | None, *, pause: float) -> None:
    with _stage(folder) as where:
        _Play(app, where, pause).acts()
    click.echo(click.style("\nTry next:", bold=True))
    if folder is None:
        click.echo("    holdfast demo --folder demo    # the folder of this one is gone")
    store = shlex.quote(os.path.join(folder or "demo", "agent.db"))
    click.echo(f"    export HOLDFAST_STORE={store}")
    for words in ("sessions", "show @~1 -s lisbon", "undo -s grand", "search hotel", "--help"):
        click.echo(f"    holdfast {words}")


@contextmanager
def _stage(folder: str | None) -> Iterator[Path]:
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="holdfast-demo-") as name:
            yield Path(name)
    else:
        os.makedirs(folder, exist_ok=True)
        yield Path(folder).resolve()


class _Play:
    def __init__(self, app: App, folder: Path, pause: float) -> None:
        self._app, self._folder, self._pause = app, folder, pause
        self._url = str(folder / "agent.db")

    def acts(self) -> None:
        self._tell("A travel agent works, each step of it a checkpoint. Then its process is",
                   "killed, in the middle of a tool call.")  # fmt: skip
        self._agent_is_killed()
        self._tell("Every step that was acknowledged is there:")
        self._holdfast("log")
        self._tell("And the call in which it died? Nobody can know from here whether the hotel was",
                   "booked. So holdfast does not guess, and does not book twice:")  # fmt: skip
        key = self._in_doubt()
        self._tell("The hotel's own book tells. It was booked, so that is what we answer:")
        self._shell("cat bookings.txt")
        self._holdfast("resolve", key, "--result", json.dumps("booked: Casa do Rio"))
        self._tell("The same program again. It goes on where it was, and books nothing twice:")
        self._agent()
        self._shell("cat bookings.txt")
        self._holdfast("log")
        self._tell("The last answer was not good? Go back. Nothing is deleted, so this can be",
                   "taken back, too:")  # fmt: skip
        self._holdfast("rewind", "@~1", "-s", "lisbon")
        self._holdfast("undo", "-s", "lisbon")
        self._tell("What if it had gone another way? From the moment before anything was booked",
                   "on in two ways. No data is copied:")  # fmt: skip
        self._two_ways()
        self._holdfast("log")
        self._tell("What is the difference between the two?")
        self._holdfast("diff", self._id("cheap"), self._id("grand"))
        self._tell("When did the budget change, and from what?")
        self._holdfast("blame", "plan.budget", "-s", "grand")
        self._tell("Nothing of all this was lost or made up; that can be checked:")
        self._holdfast("check", "--read-data")

    # -- what happens --------------------------------------------------------------------------

    def _agent_is_killed(self) -> None:
        command = [*_AGENT, str(self._folder), "--slow"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:  # noqa: S603
            for line in child.stdout or ():
                click.echo(click.style(f"    agent: {line.rstrip()}", dim=True))
                if "hotel" in line:
                    child.kill()
        click.echo(click.style(f"    kill -9 {child.pid}", fg="red"))
        if child.returncode >= 0:
            raise Unavailable("the agent of the demo ended by itself")

    def _agent(self) -> None:
        command = [*_AGENT, str(self._folder)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603
        if done.returncode:
            raise Unavailable(f"the agent of the demo failed: {done.stderr.strip()[-300:]}")

    def _in_doubt(self) -> str:
        self._holdfast("pending")
        with holdfast.open(self._url, read_only=True) as store:
            return store.pending()[0].key

    def _two_ways(self) -> None:
        with holdfast.open(self._url) as store:
            trip = store.session("lisbon")
            start = next(c for c in trip.history() if c.parent is None)
            trip.label(start.id, "before booking")
            for name, budget, words in (
                ("cheap", 400, "A bus, and a room in Alfama."),
                ("grand", 2_500, "First class, and a suite with a view of the river."),
            ):
                way = trip.fork(name, start.id)
                way.patch(
                    set={("plan", "budget"): budget},
                    append={"messages": [{"role": "assistant", "content": words}]},
                    usage=holdfast.Usage(180, 0.0021),
                    label=f"budget {budget}",
                )

    def _id(self, session: str) -> str:
        with holdfast.open(self._url, read_only=True) as store:
            head = store.session(session).get()
            return head.id[: naming.short_length(store.backend, [head])]

    # -- how it is told ------------------------------------------------------------------------

    def _tell(self, *lines: str) -> None:
        click.echo()
        for line in lines:
            click.echo(click.style(line, bold=True))
        time.sleep(self._pause)

    def _holdfast(self, *words: str) -> None:
        """A command, as one would type it in that folder, and what it really prints."""
        from holdfast.cli.main import run

        click.echo(click.style(f"    $ {shlex.join(['holdfast', *words])}", fg="cyan"))
        code = run(["--store", self._url, *words])
        if code:
            raise Unavailable(f"the demo's command failed: {words[0]}")

    def _shell(self, command: str) -> None:
        click.echo(click.style(f"    $ {command}", fg="cyan"))
        click.echo((self._folder / command.removeprefix("cat ")).read_text(), nl=False)
