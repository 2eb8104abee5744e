"""What the documentation shows is true: its examples run, and print what it says they print.

The blocks of a page run in order, in an empty folder. Those in Python share one namespace. In a
block, the comment lines after a `print(…)` that begin with `#>` are its exact output, `…` standing
for anything; a line that ends with `#! Name` has to raise the holdfast error of that name.

Blocks of `console` are commands after `$ `, and what they print; ids, ages and the width of gaps
may differ, a line `…` stands for any lines. They run as in a new terminal: no store is named until
the page does that. What a command exports holds for the rest of the page. $DATABASE_URL is an
empty store of PostgreSQL. The files of examples/ that a page shows are in the folder.
"""

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

import holdfast
from tests.support.postgres import schema, server_url

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SHOWN = re.compile(
    r"^<!-- (\w+): made by docs/making -->\n\n```python\n(.*?)^```$", re.DOTALL | re.MULTILINE
)
RAISES = re.compile(r"^(?P<code>[^#\s].*?)  #! (?P<error>\w+)$", re.MULTILINE)
COMMAND = re.compile(r"^\$ (.*(?:\\\n.*)*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
ADDRESS = "postgresql://agent@db.example/agents"


def blocks(text: str) -> list[tuple[int, str, str]]:
    """Each block with the number of its first line, and its language."""
    return [(text.count("\n", 0, m.start(2)) + 1, m[1], m[2]) for m in BLOCK.finditer(text)]


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


def fits_in_console(expected: str, printed: str) -> bool:
    lines = [re.escape(line).replace("…", ".*") for line in steady(expected).splitlines()]
    pattern = "\n".join("(?:.*\n)*.*" if line == ".*" else line for line in lines)
    return re.fullmatch(pattern, steady(printed)) is not None


def steady(printed: str) -> str:
    """Without what is another each time."""
    text = re.sub(r"\b0[0-9a-hjkmnp-tv-z]{7,23}\b", "(id)", printed)
    text = re.sub(r"\b\d+[smh] ago|\bjust now", "(age)", text)
    lines = [re.sub(r" {2,}", "  ", line.rstrip()) for line in text.strip("\n").splitlines()]
    return "\n".join(lines)


def run(page: str, text: str) -> list[str]:
    """Run a page; what it printed that is not as it says."""
    namespace: dict[str, Any] = {"raises": raises}
    environment = terminal()
    wrong = []
    for name, source in SHOWN.findall(text):
        Path(f"{name}.py").write_text(source, "utf-8")
    try:
        for line, language, source in blocks(text):
            if language == "console":
                wrong += [f"{page}:{line}: {told}" for told in run_commands(source, environment)]
                continue
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile("\n" * (line - 1) + runnable(source), page, "exec"), namespace)
            expected = re.findall(r"^\s*#> ?(.*)$", source, re.MULTILINE)
            if expected and not fits(expected, out.getvalue()):
                wrong.append(f"{page}:{line}: printed\n{out.getvalue()}")
    finally:
        for value in namespace.values():
            if isinstance(value, holdfast.Store):
                value.close()
    return wrong


def run_commands(source: str, environment: dict[str, str]) -> list[str]:
    """Those that failed, or printed something else. An `export` changes the environment."""
    wrong = []
    found = COMMAND.findall(source)
    assert "".join(f"$ {command}\n{output}" for command, output in found) == source
    for command, expected in found:
        if exported := re.fullmatch(r"export (\w+)=(\S+)", command):
            environment[exported[1]] = exported[2]
        done = subprocess.run(
            ["bash", "-c", command], env=environment, encoding="utf-8", timeout=120, check=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        if done.returncode or not fits_in_console(expected, done.stdout):
            wrong.append(f"{command}\nended with {done.returncode} and printed\n{done.stdout}")
    return wrong


def terminal() -> dict[str, str]:
    """The environment of somebody who types what a page says."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    inherited = {name: value for name, value in os.environ.items() if name != "HOLDFAST_STORE"}
    return {
        **inherited,
        "PATH": path,
        "HOME": str(Path.cwd()),
        "XDG_DATA_HOME": str(Path.cwd() / "data"),
        "NO_COLOR": "1",
        "COLUMNS": "120",
        "PYTHONIOENCODING": "utf-8",
    }


@contextlib.contextmanager
def server(text: str, monkeypatch: pytest.MonkeyPatch):
    """The page with addresses that lead somewhere, if it has any."""
    if "DATABASE_URL" not in text and ADDRESS not in text:
        yield text
        return
    with schema() as name:
        url = f"{server_url()}?schema={quote(name)}"
        holdfast.open(url, create=True).close()
        monkeypatch.setenv("DATABASE_URL", url)
        yield text.replace(ADDRESS, url).replace(', schema="holdfast"', "")


@pytest.mark.parametrize("page", PAGES)
def test_examples_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with server((ROOT / page).read_text("utf-8"), monkeypatch) as text:
        assert run(page, text) == []


@pytest.mark.parametrize("page", PAGES)
def test_no_example_is_left_out(page):
    text = (ROOT / page).read_text("utf-8")
    fences = re.findall(r"^( *)```(\w*)\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE)
    examples = {"python", "py", "console", "bash", "shell"}
    assert [name for _, name, _ in fences if name in examples] == [n for _, n, _ in blocks(text)]
    for indent, name, source in fences:
        assert not indent, "a block in a list is not run"
        if name not in {*examples, "text"}:
            assert not re.search(r"^(\$ )?holdfast ", source, re.MULTILINE), (
                "make it a console block"
            )


def test_the_run_of_the_readme_resumes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "README.md").read_text("utf-8")
    step = "model, turn"
    [script] = [source for _, _, source in blocks(text) if step in source]
    dying = script.replace(
        step, 'lambda n: __import__("os")._exit(9) if n == 2 else model(n), turn'
    )

    def start(source: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-c", source]
        return subprocess.run(words, encoding="utf-8", capture_output=True, check=False)

    assert start(dying).returncode == 9
    for _ in range(2):
        done = start(script)
        assert done.returncode == 0, done.stderr
        assert fits(re.findall(r"#> ?(.*)$", script, re.MULTILINE), done.stdout)
    with holdfast.open("agent.db") as store:
        first, *others = store.session("chat").calls()
    turns = [call.turn for call in (first, *others) if call.run == first.run]
    assert turns == [1, 2, 3], "the run that died was resumed, and called nothing twice"


def test_the_commands_of_the_readme_need_nothing_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "README.md").read_text("utf-8")
    [commands] = [source for _, language, source in blocks(text) if language == "console"]
    assert run_commands(commands, terminal()) == []


def test_a_false_page_is_noticed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = "```python\nprint(1)\n#> {}\n```\n"
    assert run("page", page.format("1")) == []
    assert run("page", page.format("…")) == []
    assert run("page", page.format("2")) != []
    with pytest.raises(pytest.fail.Exception):
        run("page", "```python\nx = 1  #! Corrupt\n```\n")
    with pytest.raises(ZeroDivisionError):
        run("page", "```python\nx = 1 / 0\n```\n")


def test_a_false_command_is_noticed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = "```console\n$ echo one; echo '06a2yj9vh   8s ago'\n{}```\n"
    assert run("page", page.format("one\n06b3c4d5efgh  2m ago\n")) == []
    assert run("page", page.format("…\n")) == []
    assert run("page", page.format("one\n")) != []
    assert run("page", page.format("")) != []
    assert run("page", page.format("two\n06b3c4d5efgh  2m ago\n")) != []
    assert run("page", "```console\n$ false\n```\n") != []
    holdfast.open("agent.db").close()
    sessions = "```console\n$ holdfast sessions\n…\n```\n"
    assert run("page", sessions) != []  # a store that the page does not name
    assert run("page", "```console\n$ export HOLDFAST_STORE=agent.db\n```\n" + sessions) == []
    with pytest.raises(AssertionError):
        run("page", "```console\nholdfast sessions\n```\n")


def test_every_error_is_in_the_guide():
    guide = (ROOT / "docs/guide.md").read_text("utf-8")
    listed = dict(re.findall(r"^\| *`(\w+)` *\| *(\d+) *\|", guide, re.MULTILINE))
    errors = [v for name in holdfast.__all__ if isinstance(v := getattr(holdfast, name), type)]
    tree = {e.__name__: str(e.exit_code) for e in errors if issubclass(e, holdfast.HoldfastError)}
    assert listed == tree


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "SECURITY.md"])
def test_links_lead_somewhere(page):
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text("utf-8")):
        assert (path.parent / target).exists(), f"{path.name} links to {target}"
