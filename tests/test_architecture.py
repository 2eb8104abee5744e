"""Imports go one way, and modules stay small. See docs/architecture.md."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import holdfast

PACKAGE = Path(__file__).parent.parent / "src" / "holdfast"

# A module may import its own layer and those above it in this list.
LAYERS = [
    {"errors", "ids", "logs", "model", "clock"},
    {"codec"},
    {"backends"},
    {"cache", "checkpoint", "fields", "lineage", "models", "revisions", "series", "source"},
    {
        "archive",
        "blame",
        "belongings",
        "cargo",
        "collect",
        "compare",
        "datacheck",
        "diff",
        "effects",
        "finding",
        "freeing",
        "growth",
        "leases",
        "live",
        "operations",
        "parts",
        "paths",
        "repair",
        "retention",
        "runs",
        "session",
        "shapes",
        "stats",
        "tidying",
        "store",
        "transfer",
        "verify",
        "watching",
        "writing",
    },
    {"testing"},
    {"aio", "aruns", "telemetry", "workers"},
    {"__init__"},
    {"adapters", "importers", "web"},
    {"cli"},
    {"__main__"},
]
# Edges of the package: nothing inside imports them, nor they each other, but for the command line,
# which offers what there is.
EDGES = {"testing", "adapters", "importers", "web"}
RANK = {unit: rank for rank, layer in enumerate(LAYERS) for unit in layer}

LONGEST = 450
EXCUSE = "Long because"


def modules(package: Path) -> Iterator[tuple[str, Path]]:
    """Each file with its unit: the first name below the package."""
    for path in sorted(package.rglob("*.py")):
        yield path.relative_to(package).parts[0].removesuffix(".py"), path


def imported_units(package: Path, path: Path) -> Iterator[tuple[int, str]]:
    known = {unit for unit, _ in modules(package)} | RANK.keys()
    here = [package.name, *path.relative_to(package).parent.parts]
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) + 1 - node.level] if node.level else []
            parts = [*base, node.module] if node.module else base
            names = [".".join([*parts, alias.name]) for alias in node.names]
        else:
            continue
        for name in names:
            top, unit, *_ = [*name.split("."), ""]
            if top == package.name:
                yield node.lineno, unit if unit in known else "__init__"


def wrong_imports(package: Path) -> list[str]:
    found = []
    for unit, path in modules(package):
        if unit not in RANK:
            found.append(f"{path.relative_to(package)}: {unit} is in no layer; add it to LAYERS")
            continue
        for line, target in imported_units(package, path):
            crosses = target in EDGES and unit not in {target, "cli", "__main__"}
            if crosses or RANK.get(target, -1) > RANK[unit]:
                found.append(f"{path.relative_to(package)}:{line}: {unit} imports {target}")
    return found


def too_long(package: Path) -> list[str]:
    found = []
    for _, path in modules(package):
        source = path.read_text("utf-8")
        lines = len(source.splitlines())
        if lines > LONGEST and EXCUSE not in (ast.get_docstring(ast.parse(source)) or ""):
            found.append(f"{path.relative_to(package)}: {lines} lines")
    return found


def test_imports_go_one_way():
    assert (PACKAGE / "__init__.py").exists()
    assert wrong_imports(PACKAGE) == []


def test_modules_are_small():
    assert too_long(PACKAGE) == [], f"split it, or say '{EXCUSE} …' in its docstring"


def tree(folder: Path, files: dict[str, str]) -> Path:
    package = folder / "holdfast"
    for name, source in files.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return package


@pytest.mark.parametrize(
    ("name", "source", "report"),
    [
        ("codec/values.py", "from holdfast.store import Store", "codec imports store"),
        ("codec/values.py", "import holdfast.store", "codec imports store"),
        ("codec/values.py", "from holdfast import session", "codec imports session"),
        ("codec/values.py", "from ..backends import base", "codec imports backends"),
        ("codec/values.py", "from .. import backends", "codec imports backends"),
        ("codec/values.py", "from holdfast import open", "codec imports __init__"),
        ("ids.py", "from .codec.values import encode", "ids imports codec"),
        ("store.py", "def late():\n    from holdfast.aio import aopen", "store imports aio"),
        ("runs/run.py", "from holdfast import testing", "runs imports testing"),
        ("web/app.py", "from holdfast.cli import main", "web imports cli"),
        ("web/app.py", "from holdfast.importers import s0", "web imports importers"),
        ("adapters/x.py", "import holdfast.importers.y", "adapters imports importers"),
        ("__init__.py", "from .cli import main", "__init__ imports cli"),
        ("helpers.py", "", "helpers is in no layer"),
    ],
)
def test_checker_reports(tmp_path, name, source, report):
    assert [report in line for line in wrong_imports(tree(tmp_path, {name: source}))] == [True]


def test_checker_allows(tmp_path):
    allowed = {
        "__init__.py": "from .store import Store\nfrom .aio import aopen",
        "__main__.py": "from holdfast.cli import main",
        "codec/ropes.py": "import json\nfrom . import values\nfrom ..errors import Corrupt",
        "session.py": "from holdfast.store import Store",
        "store.py": "from .session import Session\nfrom .backends.base import Backend",
        "testing.py": "import holdfast.store",
        "cli/main.py": "import holdfast\nfrom .render import table\nfrom holdfast.aio import aopen",
    }
    assert wrong_imports(tree(tmp_path, allowed)) == []


def test_checker_measures_length(tmp_path):
    lines = "x = 1\n" * LONGEST
    files = {
        "ids.py": lines,
        "model.py": lines + "y = 2\n",
        "errors.py": f'"""{EXCUSE} one tree is read in one place."""\n{lines}',
    }
    assert too_long(tree(tmp_path, files)) == [f"model.py: {LONGEST + 1} lines"]


def test_each_public_name_is_found_where_its_types_are():
    """Names are imported when they are used: what a type checker sees is what one gets."""
    source = ast.parse((PACKAGE / "__init__.py").read_text())
    seen = {
        alias.name: node.module
        for branch in source.body
        if isinstance(branch, ast.If)
        for node in branch.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    assert sorted(seen) == sorted(holdfast.__all__)
    for name, module in seen.items():
        assert getattr(holdfast, name) is getattr(import_module(module), name)
    assert {*holdfast.__all__} <= {*dir(holdfast)}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        getattr(holdfast, "nothing")  # noqa: B009 - which a type checker would notice


def test_importing_the_package_imports_little():
    code = "import holdfast, sys; sys.exit(bool({'apsw', 'ormsgpack', 'logging'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_looking_at_a_store_imports_little(tmp_path: Path) -> None:
    with holdfast.open(tmp_path / "a.db") as store:
        store.session("a").save({"n": 1})
    code = """import sys; from holdfast.cli.main import run; run()
print({"asyncio", "logging", "rich", "zoneinfo"} & {*sys.modules}, file=sys.stderr)"""
    ran = subprocess.run(
        [sys.executable, "-c", code, "-S", str(tmp_path / "a.db"), "log"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (ran.stderr, len(ran.stdout.splitlines())) == ("set()\n", 2)
