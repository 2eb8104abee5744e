"""The examples are typed: two checkers find nothing in them, nor in what they call."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_pages import PAGES, ROOT, blocks


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a module for each page: its Python blocks, at the lines where they are."""
    folder = tmp_path_factory.mktemp("pages")
    for page in PAGES:
        text = (ROOT / page).read_text("utf-8")
        lines = [""] * text.count("\n")
        for start, language, source in blocks(text):
            if language == "python":
                code = source.splitlines()
                lines[start - 1 : start - 1 + len(code)] = code
        name = page.removesuffix(".md").replace("/", "__")
        (folder / f"{name}.py").write_text("\n".join(lines) + "\n", "utf-8")
    mode = {"typeCheckingMode": "standard", "include": [str(folder), str(ROOT / "examples")]}
    (folder / "pyrightconfig.json").write_text(json.dumps(mode))
    return folder


def errors(folder: Path, *command: str) -> str:
    """Return the errors that a checker prints; empty if it finds none."""
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder, env=os.environ | {"MYPYPATH": "."},
        capture_output=True, encoding="utf-8", check=False,
    )  # fmt: skip
    return done.stdout + done.stderr if done.returncode else ""


def test_mypy(modules):
    # With the settings of the project, and its cache, which saves half a minute.
    project, cache = str(ROOT / "pyproject.toml"), str(ROOT / ".mypy_cache")
    options = ["--config-file", project, "--cache-dir", cache]
    assert errors(modules, "mypy", *options, ".") == ""


def test_pyright(modules):
    options = ["--level", "error", "--pythonpath", sys.executable]
    assert errors(modules, "basedpyright", *options) == ""
