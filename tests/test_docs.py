"""What the documentation shows is true: its Python runs, and prints what it says it prints.

The blocks of a page share one namespace and run in order, in an empty folder. In a block, the
comment lines after a `print(…)` that begin with `#>` are its exact output, `…` standing for
anything; a line that ends with `#! Name` has to raise the holdfast error of that name.
"""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

import holdfast

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "docs/guide.md", "docs/moving.md", "docs/runs.md"]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
RAISES = re.compile(r"^(?P<code>[^#\s].*?)  #! (?P<error>\w+)$", re.MULTILINE)


def blocks(text: str) -> list[tuple[int, str]]:
    """Each Python block with the number of its first line."""
    return [(text.count("\n", 0, m.start(1)) + 1, m.group(1)) for m in BLOCK.finditer(text)]


def runnable(source: str) -> str:
    """Lines that have to raise become statements that check it."""
    return RAISES.sub(r"with raises('\g<error>'): \g<code>", source)


@contextlib.contextmanager
def raises(name: str):
    with pytest.raises(holdfast.HoldfastError) as caught:
        yield
    assert type(caught.value).__name__ == name


def fits(expected: list[str], printed: str) -> bool:
    pattern = "\n".join([re.escape(line).replace("…", ".*") for line in expected])
    return re.fullmatch(pattern, printed.rstrip("\n")) is not None


def run(page: str, text: str) -> list[str]:
    """Run a page; what it printed that is not as it says."""
    namespace: dict[str, Any] = {"raises": raises}
    wrong = []
    for line, source in blocks(text):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile("\n" * (line - 1) + runnable(source), page, "exec"), namespace)
        expected = re.findall(r"^\s*#> ?(.*)$", source, re.MULTILINE)
        if expected and not fits(expected, out.getvalue()):
            wrong.append(f"{page}:{line}: printed\n{out.getvalue()}")
    return wrong


@pytest.mark.parametrize("page", PAGES)
def test_code_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / page).read_text("utf-8")
    assert blocks(text)
    assert run(page, text) == []


def test_a_false_page_is_noticed(tmp_path):
    page = "```python\nprint(1)\n#> {}\n```\n"
    assert run("page", page.format("1")) == []
    assert run("page", page.format("…")) == []
    assert run("page", page.format("2")) != []
    with pytest.raises(pytest.fail.Exception):
        run("page", "```python\nx = 1  #! Corrupt\n```\n")
    with pytest.raises(ZeroDivisionError):
        run("page", "```python\nx = 1 / 0\n```\n")


def test_every_error_is_in_the_guide():
    guide = (ROOT / "docs/guide.md").read_text("utf-8")
    listed = dict(re.findall(r"^\| *`(\w+)` *\| *(\d+) *\|", guide, re.MULTILINE))
    errors = [v for v in vars(holdfast).values() if isinstance(v, type)]
    tree = {e.__name__: str(e.exit_code) for e in errors if issubclass(e, holdfast.HoldfastError)}
    assert listed == tree


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
def test_links_lead_somewhere(page):
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text("utf-8")):
        assert (path.parent / target).exists(), f"{path.name} links to {target}"
