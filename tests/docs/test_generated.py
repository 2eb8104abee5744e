"""What of the documentation is made is up to date, complete, and builds without a warning."""

import ast
import inspect
import os
import re
import subprocess
import sys
import textwrap
from itertools import pairwise
from xml.etree import ElementTree as ET

import click
import pytest
from docs.making import commands, measures, picture
from docs.making.__main__ import ROOT, SHOWN, made
from docs.making.marks import put

import holdfast
from holdfast import errors
from holdfast.cli.main import FAMILY, cli

CLI = (ROOT / "docs/cli.md").read_text("utf-8")
AGAIN = "is out of date: run `make docs`, or python -m docs.making"


@pytest.fixture(scope="module")
def fresh() -> dict[str, str]:
    return made()


@pytest.mark.parametrize("path", sorted({"README.md", "docs/cli.md", *dict(SHOWN)}))
def test_pages_are_up_to_date(path, fresh):
    assert (ROOT / path).read_text("utf-8") == fresh[path], f"{path} {AGAIN}"


def undocumented(cls: type) -> list[str]:
    """The public methods and fields of a class that have no docstring."""
    found = [
        name
        for name, value in vars(cls).items()
        if not name.startswith("_") and (callable(value) or isinstance(value, property))
        if not (value.fget if isinstance(value, property) else value).__doc__
    ]
    [tree] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    for node, after in pairwise([*tree.body, ast.Pass()]):
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        told = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if not told and not node.target.id.startswith("_"):
            found.append(node.target.id)
    return found if ast.get_docstring(tree) else ["its class", *found]


def test_everything_public_has_a_docstring():
    public = [getattr(holdfast, name) for name in holdfast.__all__]
    classes = [each for each in public if inspect.isclass(each)]
    assert {cls.__name__: undocumented(cls) for cls in classes if undocumented(cls)} == {}
    assert [each.__name__ for each in public if callable(each) and not each.__doc__] == []


# -- the picture ---------------------------------------------------------------------------------


def drawn(svg: str) -> list[str]:
    """What a picture says, line by line; its frame is up to the version of rich."""
    texts = ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    lines: dict[float, str] = {}
    for text in texts:
        y = float(text.attrib["y"])
        lines[y] = lines.get(y, "") + (text.text or "")
    return ["".join(line.split()) for _, line in sorted(lines.items())]  # gaps are not drawn


def test_the_picture_is_up_to_date(fresh):
    shown = drawn((ROOT / "docs/log.svg").read_text("utf-8"))
    assert shown == drawn(fresh["docs/log.svg"]), f"docs/log.svg {AGAIN}"
    assert "$holdfastlog" in shown


def test_the_picture_shows_what_is_printed(fresh):
    printed = click.unstyle(picture.printed()).splitlines()
    plain = ["".join(line.split()) for line in printed if line]
    assert [line for line in drawn(fresh["docs/log.svg"]) if line in plain] == plain


def test_the_picture_needs_no_network():
    svg = (ROOT / "docs/log.svg").read_text("utf-8")
    assert "url(http" not in svg.replace('"', "")
    assert "@font-face" not in svg


# -- measurements --------------------------------------------------------------------------------


def test_the_table_follows_the_measurements():
    benchmarks = (ROOT / "docs/benchmarks.md").read_text("utf-8")
    table = measures.table(benchmarks)
    found = re.search(r"; peer ([\d.]+ MB)\)", benchmarks)
    assert found
    assert f"| {found[1]} |" in table
    assert "| 7.5 MB |" in measures.table(benchmarks.replace(found[1], "7.5 MB"))
    bars = re.search(r"meets (\d+) and misses (\d+)", table.replace("\n", " "))
    assert bars
    one_more = measures.table(benchmarks.replace("| ✓ |", "| ✗ |", 1)).replace("\n", " ")
    assert f"meets {int(bars[1]) - 1} and misses {int(bars[2]) + 1}" in one_more


def test_a_measure_that_is_gone_is_noticed():
    benchmarks = (ROOT / "docs/benchmarks.md").read_text("utf-8")
    lines = benchmarks.splitlines(keepends=True)
    for row in (*measures.ROWS, measures.STEP):
        less = "".join(line for line in lines if not line.startswith(f"| {row.measure}"))
        assert less != benchmarks
        with pytest.raises(ValueError, match="does not say"):
            measures.table(less)


def test_marks():
    page = "a\n<!-- x: made by docs/making -->\nold\n<!-- x: end -->\nb\n"
    assert "\nnew\n" in put(page, "x", "new")
    assert "old" not in put(page, "x", "new")
    with pytest.raises(ValueError, match="marks of y"):
        put(page, "y", "new")


# -- commands ------------------------------------------------------------------------------------


def chapters() -> dict[str, str]:
    parts = re.split(r"^### holdfast ([\w-]+)$", CLI, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_command_is_documented():
    assert [*chapters()] == [*FAMILY]
    general = CLI.partition("### ")[0]
    for option in cli.get_params(click.Context(cli, **cli.context_settings)):
        for name in option.opts:
            assert re.search(rf"(?<![\w-]){name}\b", general), name


@pytest.mark.parametrize("name", [*FAMILY])
def test_every_option_is_documented(name):
    context = click.Context(cli, info_name="holdfast", **cli.context_settings)
    command = cli.get_command(context, name)
    assert command is not None
    chapter, general = chapters()[name], CLI.partition("### ")[0]
    for parameter in command.get_params(click.Context(command, context, info_name=name)):
        if isinstance(parameter, click.Argument):
            metavar = parameter.make_metavar(click.Context(command)).strip("[].")
            assert metavar in chapter
        elif isinstance(parameter, click.Option) and not parameter.hidden:
            common = commands.COMMON_OPTIONS.intersection(parameter.opts)
            for option in common or [*parameter.opts, *parameter.secondary_opts]:
                assert option in (general if common else chapter), option
            assert common or (parameter.help and parameter.help in chapter), option


def test_every_exit_code_is_documented():
    listed = {
        int(code): set(re.findall(r"`(\w+)`", names))
        for code, names in re.findall(r"^\| (\d+) \| .*? \|(.*)\|$", CLI, re.MULTILINE)
    }
    kinds = [k for k in vars(errors).values() if isinstance(k, type)]
    for kind in kinds:
        if issubclass(kind, holdfast.HoldfastError):
            assert kind.__name__ in listed[kind.exit_code]
    assert sum(map(len, listed.values())) == sum(issubclass(k, Exception) for k in kinds)
    assert {0, 1, 2, 130} <= listed.keys()


# -- the site ------------------------------------------------------------------------------------


def test_everything_public_is_in_the_api():
    listed = re.findall(r"^::: holdfast\.(\w+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(holdfast.__all__)


def test_every_page_is_in_the_menu():
    menu = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:")[2]
    listed = re.findall(r": ([\w/-]+\.md)$", menu, re.MULTILINE)
    pages = (ROOT / "docs").rglob("*.md")
    assert sorted(listed) == sorted(str(path.relative_to(ROOT / "docs")) for path in pages)


def test_the_site_builds(tmp_path):
    # Not --quiet: mkdocs does not count warnings that it does not show.
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", tmp_path / "site"],
        cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, timeout=240,
        capture_output=True, encoding="utf-8", check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    pages = {path.name: path.read_text("utf-8") for path in (tmp_path / "site").glob("*.html")}
    assert pages.keys() >= {f"{path.stem}.html" for path in (ROOT / "docs").glob("*.md")}
    fetched = r"""(?:<script[^>]*\ssrc|<link[^>]*\shref|<img[^>]*\ssrc)=["'](https?:[^"']*)"""
    assert [url for text in pages.values() for url in re.findall(fetched, text)] == []
    assert 'id="holdfast.Session.rewind"' in pages["api.html"]
    assert (tmp_path / "site/examples/killed.py").exists()
