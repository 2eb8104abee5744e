"""The guard in conftest.py is itself guarded: a skip must not pass unnoticed in CI."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PASSES = "def test_ok(): pass\n"
SKIPS = "import pytest\n@pytest.mark.tools('no-such-tool')\ndef test_skipped(): pass\n"
MODULE_SKIPS = "import pytest\npytest.importorskip('no_such_module')\n"
EXPECTED_FAILURE = "import pytest\n@pytest.mark.xfail\ndef test_known(): raise AssertionError\n"
TORTURE = "import pytest\n@pytest.mark.torture\ndef test_long(): raise AssertionError\n"


def run(folder: Path, source: str, *args: str, ci: bool) -> subprocess.CompletedProcess[str]:
    shutil.copy(Path(__file__).parents[1] / "conftest.py", folder)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    torture\n    tools\n")
    (folder / "test_ok.py").write_text(PASSES)
    (folder / "test_case.py").write_text(source)
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    env |= {"CI": "true" if ci else "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # many are slow
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "no:cacheprovider", *args]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("source", "workers"), [(SKIPS, "2"), (MODULE_SKIPS, "0")], ids=["test", "module"]
)
def test_ci_turns_skips_into_failure(tmp_path, source, workers):
    result = run(tmp_path, source, "-n", workers, ci=True)
    assert result.returncode == 1
    assert "a skipped test is a failure" in result.stdout
    assert "no-such-tool" in result.stdout or "no_such_module" in result.stdout


@pytest.mark.parametrize(
    ("source", "ci"),
    [(SKIPS, False), (EXPECTED_FAILURE, True), (TORTURE, True)],
    ids=["skip-outside-ci", "xfail", "torture"],
)
def test_everything_else_passes(tmp_path, source, ci):
    result = run(tmp_path, source, "-n", "0", ci=ci)
    assert result.returncode == 0, result.stdout


def test_torture_runs_when_asked_for(tmp_path):
    assert run(tmp_path, TORTURE, "-n", "0", "--torture", ci=False).returncode == 1
