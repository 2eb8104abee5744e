"""The examples run, and show what they say they show."""

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


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


def test_every_example_is_tested():
    assert [p.name for p in EXAMPLES.glob("*.py")] == ["quickstart.py"]
