"""Run LangGraph's own tests with our saver: `make pregel TESTS=langgraph-1.2.22`.

The folder is a copy of LangGraph's sources, such as its sdist from PyPI. Keep it outside of this
repository. The file is also a pytest plugin: it gives each test that takes a checkpointer our saver
in memory, on SQLite and in files, and deselects all other tests.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from holdfast.adapters.langgraph import HoldfastSaver

FIXTURES = {"sync_checkpointer", "async_checkpointer"}
BACKENDS = ("memory", "sqlite", "files")
ALLOW = [("tests.test_interruption", name) for name in ("Decision", "DecisionData")]
"""Types that tests store where the schema of their graph says Any."""


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    backends = os.environ.get("PREGEL_BACKENDS", ",".join(BACKENDS)).split(",")
    for name in FIXTURES.intersection(metafunc.fixturenames):
        for fixture in metafunc._arg2fixturedefs[name]:  # pytest has no public name for them
            vars(fixture)["params"] = [f"holdfast-{each}" for each in backends]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if FIXTURES.intersection(getattr(item, "fixturenames", ()))]
    config.hook.pytest_deselected(items=[item for item in items if item not in ours])
    items[:] = ours


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: Any, request: Any) -> Any:
    """Set up our saver in place of LangGraph's fixture."""
    if fixturedef.argname not in FIXTURES:
        return None
    folder = tempfile.TemporaryDirectory()
    path = Path(folder.name) / "store"
    backend = request.param.removeprefix("holdfast-")
    url = {"memory": "memory:", "sqlite": f"{path}.db", "files": f"files:{path}"}[backend]
    saver = HoldfastSaver(url, allow=ALLOW)
    fixturedef.addfinalizer(folder.cleanup)
    fixturedef.addfinalizer(saver.close)
    fixturedef.cached_result = (saver, fixturedef.cache_key(request), None)
    return saver


def main(tests: str, *options: str) -> int:
    here = Path(__file__)
    paths = [str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ |= {"NO_DOCKER": "true", "PYTHONPATH": os.pathsep.join(paths)}
    os.chdir(tests)
    return pytest.main(["-p", here.stem, "-q", "-o", "addopts=", *options, "tests"])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
