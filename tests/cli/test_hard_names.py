"""Names that are hard to show: bytes that are no text, control characters, several lines."""

from __future__ import annotations

import os
import subprocess
import unicodedata

import pytest

from tests.support.terminal import Terminal, process

BYTES = "\udcff\udcfe"  # how Python takes the bytes FF FE on a command line


@pytest.fixture
def bytewise(terminal: Terminal) -> Terminal:
    with terminal.store() as store:
        for n in range(2):
            store.session(BYTES).save(n)
        store.session("other").save({})
    return terminal


@pytest.mark.parametrize("words", [["log"], ["log", "--all"], ["log", BYTES]])
def test_a_name_that_is_no_text_is_in_the_log(bytewise, words):
    rows = [row for row in bytewise(*words, "--json").lines if row["session"] == BYTES]
    assert [row["step"] for row in rows] == [2, 1]
    with process(*map(os.fsencode, words), folder=bytewise.folder) as child:
        out, err = child.communicate()
    assert (child.returncode, err) == (0, "")
    shown = out.splitlines()
    at = shown.index("\\udcff\\udcfe")
    assert ("step 2" in shown[at + 1], "step 1" in shown[at + 2]) == (True, True)


def completed(terminal: Terminal, shell: str, typed: bytes) -> set[bytes]:
    """The lines that a shell is told."""
    words, asked = os.fsdecode(b"holdfast log " + typed), f"{shell}_complete"
    word = os.fsdecode(typed) if shell == "fish" else "2"
    env = {"COMP_WORDS": words, "COMP_CWORD": word, "_HOLDFAST_COMPLETE": asked}
    with process(folder=terminal.folder, env=env, text=False) as child:
        out, err = child.communicate()
    assert (child.returncode, err) == (0, b"")
    return {line.removeprefix(b"plain,") for line in out.split(b"\n")} - {b"plain", b"_", b""}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_name_that_is_no_text_is_completed(bytewise, shell):
    """And one that no shell can be told is left out, with no harm to others."""
    with bytewise.store() as store:
        for name in ("\ud800", "two\nlines", "nul\0"):
            store.session(name).save({})
    assert completed(bytewise, shell, b"") == {b"\xff\xfe", b"other"}
    assert completed(bytewise, shell, b"\xff") == {b"\xff\xfe"}


HARD = {
    "lines": "two\nlines\r\u2028and\x85more",
    "tab": "a\tb",
    "steering": "\x1b[31mred\x1b[2J\x07\x9b\u202eback",
    "bytes": BYTES,
    "quotes": 'it\'s\n\\n "$HOME" `id` \x01f',
    "plain": "it's plain; $HOME",
}


@pytest.mark.parametrize("kind", HARD)
def test_rows_stay_one_line(terminal, kind):
    """Whatever the name, the agent, a label, a tag or a fork is called."""
    name = HARD[kind]
    with terminal.store() as store:
        session = store.session(name, agent=name)
        session.save({"n": 1}, label=name, tags=[name])
        session.append("log", 1, trigger=name, status="failed", reason=name)
        session.fork(f"{name} again")
    for words, rows in (
        (["sessions"], 3), (["search"], 3), (["log", name], 3), (["log"], 7), (["stats"], 5),
        (["abandoned"], 0), (["pending"], 0), (["operations", "-s", name], 0),
        (["resume", name], 2),
    ):  # fmt: skip
        ended = terminal(*words)
        assert ended.code == 0, ended
        lines = ended.out.splitlines()
        assert len(lines) == rows, lines
        assert not {c for line in lines for c in line if unicodedata.category(c) in ("Cc", "Zl")}
    told = terminal("show", "-s", name).out.splitlines()
    assert f"   session  {terminal('log', name).out.split(' (')[0]}" in told


@pytest.mark.parametrize("kind", HARD)
def test_a_command_in_a_hint_can_be_pasted(terminal, kind):
    """Into bash, which makes of it what was typed."""
    name = HARD[kind]
    hint = terminal("save", name, stdin="{}").err
    assert hint.startswith("Undo with: holdfast undo -s ")
    assert len(hint.splitlines()) == 1
    typed = "holdfast() { printf '%s\\0' \"$@\"; }; " + hint.removeprefix("Undo with: ")
    done = subprocess.run(["bash", "-c", typed], capture_output=True, check=True)
    assert done.stdout == b"undo\0-s\0" + os.fsencode(name) + b"\0"
