"""The examples run, and show what they say they show."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, folder: Path) -> str:
    environment = os.environ | {"TMPDIR": str(folder), "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [sys.executable, EXAMPLES / name],
        cwd=folder,
        env=environment,
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    return done.stdout


def test_quickstart(tmp_path):
    out = run("quickstart.py", tmp_path)
    titles = [line for line in out.splitlines() if line in "Save Kill Load Rewind Fork".split()]
    assert titles == "Save Kill Load Rewind Fork".split()
    assert "by SIGKILL after" in out
    assert "~ state.budget: 900 → 850" in out
    assert "The session's tree still has all 4 checkpoints." in out
    assert list(tmp_path.iterdir()) == []  # it cleans up behind itself


def test_loop(tmp_path):
    out = run("loop.py", tmp_path)
    asked = [line for line in out.splitlines() if "the model is asked" in line]
    assert len(asked) == 4  # twice for each, however often it was started
    assert asked[0].endswith("with 2 messages")  # the system prompt and the question
    assert out.count("2 tools were called") == 2
    assert out.count("what was said is kept") == 2
    assert out.count("18 degrees in Lisbon; 18 degrees in Porto") == 2
    assert list(tmp_path.iterdir()) == []


def test_killed(tmp_path):
    lines = [line.strip() for line in run("killed.py", tmp_path).splitlines()]
    again = lines.index("The same code again")
    before, after = lines[:again], lines[again:]
    assert before[1:] == [
        "the model is asked", "reserved room 7", "paid 120",
        f"(its exit status is {-signal.SIGKILL})", "What it has left",
        "reserve: room 7 is reserved", "pay: begun, and in doubt",
    ]  # fmt: skip
    assert after[1:] == [
        "was it paid? The bank says: yes", "the model is asked", "The room is reserved and paid.",
        "The bank has 1 payment.",
    ]  # fmt: skip
    assert list(tmp_path.iterdir()) == []


def test_best_of_n(tmp_path):
    out = run("best_of_n.py", tmp_path)
    scores = {name: int(score) for name, score in re.findall(r"(trip-\d): +(\d+) for", out)}
    assert len(scores) == 5
    best = max(scores, key=lambda name: scores[name])
    assert f"Kept: ['trip', '{best}']" in out
    assert f"The best is {best}, with {scores[best]}." in out
    for size, added in re.findall(r"checkpoints of ([\d,]+) bytes took ([\d,]+) bytes", out):
        assert int(added.replace(",", "")) < int(size.replace(",", ""))  # all of them, not each
    assert list(tmp_path.iterdir()) == []


def test_approval(tmp_path):
    assert run("approval.py", tmp_path).splitlines() == [
        "agent: I have looked for an offer",
        "agent: halted, waiting for 'approval'",
        "person: 'trip' asks 'Book it for 850?'. Yes.",
        "agent: I have booked for 850",
        "agent: completed",
        "The state is {'booked': 'booking 4711'}, and 0 wait.",
    ]
    assert list(tmp_path.iterdir()) == []


def test_log_backend(tmp_path):
    """It only defines a backend. tests/storage/test_log_backend.py tests that."""
    assert run("log_backend.py", tmp_path) == ""


def test_every_example_is_tested():
    tests = [name.removeprefix("test_") for name in globals() if name.startswith("test_")]
    assert {p.stem for p in EXAMPLES.glob("*.py")} == {*tests} - {"every_example_is_tested"}
