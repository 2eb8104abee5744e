"""`holdfast` as a process: on a terminal, in a pipe, interrupted, asked by a shell."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest

import holdfast
from tests.support import example_stores as worlds
from tests.support.terminal import Ended, Terminal, environment, process

PATIENCE = 60.0


@pytest.fixture
def trip(terminal: Terminal) -> Terminal:
    worlds.trip(terminal.path)
    return terminal


MARK = "-- ended with "
_TYPED = f"""
import json, sys
from holdfast.cli.main import run
for line in sys.argv[1:]:
    print({MARK!r} + str(run(line.split())), flush=True)
"""


def _at_the_keyboard() -> None:
    """Its terminal is its own, so that Ctrl-C there is a signal."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Screen:
    """A terminal on which commands are typed, one after another."""

    def __init__(self, folder: Path, *lines: str, **env: str) -> None:
        self._ours, theirs = pty.openpty()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _TYPED, *lines],
                cwd=folder,
                env=environment(folder) | env,
                stdin=theirs,
                stdout=theirs,
                stderr=theirs,
                start_new_session=True,
                preexec_fn=_at_the_keyboard,  # noqa: PLW1509
            )
        finally:
            os.close(theirs)
        self.text = ""
        self._seen = 0

    def until(self, words: str) -> None:
        """Read on until these words are there once more."""
        while words not in self.text[self._seen :]:
            assert self._read(), f"it ended with {self.text!r}"
        self._seen = self.text.index(words, self._seen) + len(words)

    def answer(self, text: str) -> None:
        self.press(f"{text}\n")

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def interrupt(self) -> None:
        """Ctrl-C, until it is heard: Python misses one that comes just before it reads."""
        while MARK not in self.text[self._seen :]:
            self.press("\x03")
            while select.select([self._ours], [], [], 5)[0] and self._read():
                if MARK in self.text[self._seen :]:
                    break

    def ended(self) -> list[int]:
        """How each command ended."""
        try:
            while self._read():
                pass
            assert self._process.wait(PATIENCE) == 0, self.text
        finally:
            os.close(self._ours)
        return [int(code) for code in re.findall(rf"{MARK}(\d+)", self.text)]

    def _read(self) -> bool:
        ready, _, _ = select.select([self._ours], [], [], PATIENCE)
        assert ready, f"it does not go on after {self.text!r}"
        try:
            data = os.read(self._ours, 1 << 16)
        except OSError:  # how Linux says that the other end is closed
            return False
        self.text += data.decode()
        return bool(data)


def test_save_says_what_it_waits_for(terminal):
    screen = Screen(terminal.folder, "save s")
    screen.until("Type the state as JSON, then Ctrl-D.")
    screen.press('{"n": 1}\n\x04')
    assert screen.ended() == [0]
    assert terminal.good("state --json").one == {"n": 1}


GRAVE = {
    "prune --all --keep-last 1": "Delete 3 checkpoints? [y/N]",
    "gc --all": "Free them for good? [y/N]",
    "delete -s trip-b": "Delete it? [y/N]",
}


@pytest.mark.parametrize("line", GRAVE)
def test_it_asks(trip, line):
    """No does nothing; yes does it."""
    trip.good("prune --all --keep-last 3 --yes")
    before = trip.good("stats --json").out
    screen = Screen(trip.folder, line, line, line)
    for answer in ("n", "", "y"):
        screen.until(GRAVE[line])
        assert trip.good("stats --json").out == before
        screen.answer(answer)
    assert screen.ended() == [1, 1, 0]
    assert screen.text.count("nothing was done") == 2
    assert trip.good("stats --json").out != before


@pytest.mark.parametrize("line", GRAVE)
def test_ctrl_c_at_a_question(trip, line):
    """Ends as Ctrl-C does anywhere, and nothing is done; the end of the input is a no."""
    trip.good("prune --all --keep-last 3 --yes")
    before = trip.good("stats --json").out
    screen = Screen(trip.folder, line, line)
    screen.until(GRAVE[line])
    screen.interrupt()
    screen.until(GRAVE[line])
    screen.press("\x04")
    assert screen.ended() == [130, 1]
    assert screen.text.count("nothing was done") == 1
    assert trip.good("stats --json").out == before


COLOURED = ("log", "sessions", "stats", "show start -s trip", "diff start -s trip", "log tirp")


def test_colours(trip):
    """On a terminal, unless NO_COLOR is set; never in a pipe."""
    lively = Screen(trip.folder, *COLOURED, NO_COLOR="")
    assert lively.ended() == [0] * 5 + [3]
    parts = lively.text.split(MARK)
    assert len(parts) == 1 + len(COLOURED)
    assert all("\x1b[" in part for part in parts[:-1])
    plain = Screen(trip.folder, *COLOURED, NO_COLOR="1")
    assert plain.ended() == [0] * 5 + [3]
    assert "\x1b" not in plain.text
    for line in COLOURED:
        piped = trip.type(line)
        assert "\x1b" not in piped.out + piped.err


def big(path: Path) -> None:
    """More in each list than a pipe holds."""
    with holdfast.open(path, durability="normal") as store:
        for n in range(300):
            store.session(f"{n:03} {'long name ' * 30}").save({"text": "x" * 300})
        store.session("000").save({"text": ["y" * 100] * 2_000})


def test_a_closed_pipe_is_no_error(terminal):
    """`holdfast log | head -1`"""
    big(terminal.path)
    for line in ("log --all", "sessions", "state -s 000 --json"):
        with process(*line.split(), folder=terminal.folder) as child:
            assert child.stdout
            assert child.stderr
            assert child.stdout.readline()
            child.stdout.close()
            err = child.stderr.read()
        assert (line, child.returncode, err) == (line, 0, "")


def unread(line: str, terminal: Terminal, stream: str) -> int:
    """The exit code of a command when nobody reads what it prints to a stream."""
    ours, theirs = os.pipe()
    os.close(ours)
    with process(*line.split(), folder=terminal.folder, **{stream: theirs}) as child:
        os.close(theirs)
        child.communicate()
    return child.returncode


CODES = {"verify": 5, "verify --json": 5, "doctor": 1, "backup copy.db": 5, "copy there.db": 5}


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("line", CODES)
def test_a_closed_pipe_hides_no_damage(trip, line, stream):
    """`holdfast verify | head` ended with 0 in spite of the damage."""
    worlds.spoil(trip.path, 3)
    assert unread(line, trip, stream) == CODES[line]


def test_a_closed_pipe_does_not_stop_a_change(trip):
    """`holdfast prune … 2>&1 | head` ended with 0 and had done nothing."""
    assert unread("prune --all --keep-last 1 --yes", trip, "stderr") == 0
    assert trip.good("operations -s trip --json").lines[0]["kind"] == "prune"
    assert unread("show nothing -s trip", trip, "stderr") == 3


CLOSED = {"sessions >&-": 0, "sessions --json >&-": 0, "log >&- 2>&-": 0, "log none 2>&-": 3,
          "save s <&-": 2, "gc --all <&-": 2, "save s state.json >&- 2>&-": 0,
          "prune --all --keep-last 1 --yes <&- >&- 2>&-": 0}  # fmt: skip


@pytest.mark.parametrize("line", CLOSED)
def test_closed_streams(trip, line):
    """Nobody reads, and nobody can be asked: that is all."""
    (trip.folder / "state.json").write_text("{}")
    typed = ["bash", "-c", f'"$0" -m holdfast {line}', sys.executable]
    env = environment(trip.folder)
    done = subprocess.run(typed, cwd=trip.folder, env=env, capture_output=True, check=False)
    assert (done.returncode, b"bug in holdfast" in done.stderr) == (CLOSED[line], False), done
    trip.good("verify --read-data")


def test_ctrl_c_ends_a_watch(trip):
    with process("watch", "--all", "--json", folder=trip.folder, bufsize=1) as child:
        assert child.stdout
        assert child.stderr
        events: list[str] = []
        while not events:  # until it watches, it sees nothing
            trip.good("tag @ again -s trip")
            trip.good("undo -s trip")
            if select.select([child.stdout], [], [], 0.05)[0]:
                events.append(child.stdout.readline())
        child.send_signal(signal.SIGINT)
        err = child.stderr.read()
    assert child.returncode == 130
    assert '"operation"' in events[0]
    assert err == ""


def test_what_no_terminal_can_show(terminal):
    """Is shown by its number."""
    with terminal.store() as store:
        store.session("s").save({"text": "a \ud800 b"}, label="l\udfff")
    for encoding in ("utf-8", "ascii"):
        env = {"PYTHONIOENCODING": encoding}
        with process("log", "s", folder=terminal.folder, env=env) as child:
            out, err = child.communicate()
        assert (child.returncode, err) == (0, "")
        assert "l\\udfff" in out


def completed(typed: str, folder: Path) -> list[str]:
    """What bash is told while somebody types."""
    count = len(typed.split(" ")) - 1
    env = {"COMP_WORDS": typed, "COMP_CWORD": str(count), "_HOLDFAST_COMPLETE": "bash_complete"}
    with process(folder=folder, env=env) as child:
        out, err = child.communicate()
    assert err == ""
    return [line.partition(",")[2] for line in out.splitlines()]


def test_completion_in_bash(trip):
    assert completed("holdfast log tr", trip.folder) == ["trip", "trip-b"]
    assert completed("holdfast show -s trip e", trip.folder) == ["edited"]
    assert completed("holdfast re", trip.folder) == [
        "rewind",
        "redo",
        "rename",
        "resume",
        "resolve",
        "repair",
    ]


def test_the_line_for_bash_works(trip):
    """What `holdfast completion bash` prints is what bash understands."""
    line = trip.good("completion bash").out.strip()
    assert line == 'eval "$(_HOLDFAST_COMPLETE=bash_source holdfast)"'
    with process(folder=trip.folder, env={"_HOLDFAST_COMPLETE": "bash_source"}) as child:
        script, _ = child.communicate()
    assert child.returncode == 0
    assert "complete -o nosort -F _holdfast_completion holdfast" in script
    checked = subprocess.run(["bash", "-n"], input=script, text=True, check=False)
    assert checked.returncode == 0


def test_the_exit_code_of_a_process(trip):
    for line, code in (("verify", 0), ("show nowhere -s trip", 3)):
        with process(*line.split(), folder=trip.folder) as child:
            out, err = child.communicate()
        assert Ended(child.returncode, out, err) == trip.type(line)
        assert child.returncode == code
