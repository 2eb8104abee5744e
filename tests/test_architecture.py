"""Imports go one way. See docs/architecture.md."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import holdfast

PACKAGE = Path(__file__).parent.parent / "src" / "holdfast"

# A package or a flat module may import itself and those in the lines above it.
LAYERS = [
    {"errors", "ids", "clock", "log", "model", "intervals", "provider_usage"},
    {"format"},
    {"storage"},
    {"history"},
    {"runs"},
    {"maintenance", "transfer"},
    {"session"},
    {"store"},
    {"aio", "json", "telemetry"},
    {"__init__"},
    {"testing", "adapters", "importers", "web"},
    {"cli"},
    {"__main__"},
]
EDGES = {"adapters", "importers", "web", "cli"}
PUBLIC = {"holdfast.errors", "holdfast.json", "holdfast.aio"}
"""Modules that are public API, besides the names of `holdfast` itself."""
FREE = LAYERS[0]
"""These may import each other. All others of one layer are kept apart."""
RANK = {unit: rank for rank, layer in enumerate(LAYERS) for unit in layer}


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
            apart = RANK.get(target) == RANK[unit] and target != unit and unit not in FREE
            if apart or RANK.get(target, -1) > RANK[unit]:
                found.append(f"{path.relative_to(package)}:{line}: {unit} imports {target}")
    return found


def test_imports_go_one_way():
    assert (PACKAGE / "__init__.py").exists()
    assert wrong_imports(PACKAGE) == []


def imports_between_modules(package: Path) -> dict[str, set[str]]:
    """Return, for each module, those that it imports: also for types, and within functions."""
    names = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    found: dict[str, set[str]] = {}
    for name, path in names.items():
        imported = set[str]()
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                imported |= inner & names.keys() or {node.module}
        found[name] = (imported & names.keys()) - {name, package.name}
    return found


def cycles(imports: dict[str, set[str]]) -> list[str]:
    """Return the modules that import themselves, by way of others."""
    reached = {name: set(direct) for name, direct in imports.items()}
    grown = True
    while grown:
        grown = False
        for known in reached.values():
            more = {far for near in known for far in reached[near]} - known
            grown = grown or bool(more)
            known |= more
    return sorted(name for name, known in reached.items() if name in known)


def test_no_module_imports_itself_by_way_of_others():
    assert cycles(imports_between_modules(PACKAGE)) == []


def test_cycles_are_found(tmp_path):
    files = {
        "a.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from holdfast.b import B",
        "b.py": "def late():\n    from holdfast import c",
        "c.py": "import holdfast.a",
        "d.py": "from holdfast.a import A",
    }
    assert cycles(imports_between_modules(tree(tmp_path, files))) == [
        "holdfast.a", "holdfast.b", "holdfast.c",
    ]  # fmt: skip


def is_public(unit: str, name: str) -> bool:
    """Return whether an edge may import a name: it is public, or the edge's own.

    The command line may use the other edges.
    """
    top, inner, *_ = [*name.split("."), ""]
    if top != "holdfast" or inner in ("", unit) or (unit == "cli" and inner in EDGES):
        return True
    return name in PUBLIC or name in {f"holdfast.{each}" for each in PUBLIC_NAMES}


PUBLIC_NAMES = {*holdfast.__all__, "__version__"}


def imported_names(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from inner if node.module == "holdfast" else [node.module]


def internals_used(package: Path) -> list[str]:
    return [
        f"{path.relative_to(package)}: {name}"
        for unit, path in modules(package)
        if unit in EDGES
        for name in imported_names(path)
        if not is_public(unit, name)
    ]


def test_edges_use_the_public_api():
    """What they need, others who write an adapter or a viewer need as well."""
    assert internals_used(PACKAGE) == []


@pytest.mark.parametrize(
    ("name", "source", "found"),
    [
        ("cli/a.py", "from holdfast import Store, json", False),
        ("cli/a.py", "from holdfast.web import app", False),
        ("web/a.py", "import holdfast\nfrom holdfast.json import Pool", False),
        ("web/a.py", "from holdfast import history", True),
        ("web/a.py", "def late():\n    from holdfast.store import backend_of", True),
        ("web/a.py", "import holdfast.format.records", True),
        ("adapters/a/b.py", "from holdfast.aio import Lane", False),
        ("adapters/a/b.py", "from holdfast.aio.workers import Lane", True),
    ],
)
def test_internals_are_found(tmp_path, name, source, found):
    assert bool(internals_used(tree(tmp_path, {name: source}))) == found


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
        ("format/values.py", "from holdfast.store import Store", "format imports store"),
        ("format/values.py", "import holdfast.store", "format imports store"),
        ("format/values.py", "from holdfast import session", "format imports session"),
        ("format/values.py", "from ..storage import contract", "format imports storage"),
        ("format/values.py", "from .. import storage", "format imports storage"),
        ("format/values.py", "from holdfast import open", "format imports __init__"),
        ("ids.py", "from .format.values import encode", "ids imports format"),
        ("store.py", "def late():\n    from holdfast.aio import aopen", "store imports aio"),
        ("runs/run.py", "from holdfast import testing", "runs imports testing"),
        ("web/app.py", "from holdfast.cli import main", "web imports cli"),
        ("web/app.py", "from holdfast.importers import save", "web imports importers"),
        ("adapters/x.py", "import holdfast.importers.y", "adapters imports importers"),
        ("__init__.py", "from .cli import main", "__init__ imports cli"),
        ("transfer/copy.py", "from holdfast.maintenance import gc", "transfer imports maintenance"),
        ("helpers.py", "", "helpers is in no layer"),
    ],
)
def test_checker_reports(tmp_path, name, source, report):
    assert [report in line for line in wrong_imports(tree(tmp_path, {name: source}))] == [True]


def test_checker_allows(tmp_path):
    allowed = {
        "__init__.py": "from .store import Store\nfrom .aio import aopen",
        "__main__.py": "from holdfast.cli import main",
        "format/ropes.py": "import json\nfrom . import values\nfrom ..errors import Corrupt",
        "model.py": "from holdfast.errors import Corrupt",
        "store.py": "from .session import Session\nfrom .storage.contract import Backend",
        "testing.py": "import holdfast.store",
        "cli/main.py": "import holdfast\nfrom .render import table\nfrom holdfast.aio import aopen",
    }
    assert wrong_imports(tree(tmp_path, allowed)) == []


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
