"""Choose the tests that run: torture only on request, tools where present, no skips in CI."""

import functools
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tests.support.stores import Home
    from tests.support.terminal import Terminal

CI = os.environ.get("CI", "").lower() in {"1", "true"}

# Shared machines stall. Each run tries the same examples; `make torture` tries others.
settings.register_profile("holdfast", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("torture", deadline=None, print_blob=True)
settings.load_profile("holdfast")

# A tool can be installed and still be forbidden (ptrace in a container), so it is tried out.
PROBES = {
    "strace": ["strace", "-o", os.devnull, "true"],
    "faketime": ["faketime", "2020-01-01 00:00:00", "true"],
}
SKIPPED: dict[str, str] = {}
TESTS = Path(__file__).parent
MEMORY = Path("/dev/shm")
ROOM = 2 << 30  # bytes; a run has needed 334 MB at once


# Without bytecode, each child program would compile the library again, for longer than it runs.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Started in the background, a shell leaves Ctrl-C ignored, and so it would be in every child.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--torture", action="store_true", help="run the long campaigns too")
    parser.addoption("--quick", action="store_true", help="only what `make check` runs")
    parser.addoption("--update-snapshots", action="store_true", help="write transcripts anew")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--torture"):
        settings.load_profile("torture")
    else:
        work_in_memory()


def work_in_memory() -> None:
    """Most of the time of a test that saves would be waiting for the disk.

    What a disk may lose is tried out by tests that play the disk themselves. Who sets TMPDIR, or
    has no such place (macOS, small containers), or runs `make torture`, works on a real one.
    """
    if "TMPDIR" in os.environ or not os.access(MEMORY, os.W_OK):
        return
    if shutil.disk_usage(MEMORY).free >= ROOM:
        os.environ["TMPDIR"] = tempfile.tempdir = str(MEMORY)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Half as many workers again as processors: many tests wait for a server or another process."""
    return (os.cpu_count() or 1) * 3 // 2


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected stays: to look for garbage in it took half of this time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    long = [item for item in items if is_left_out(item, config)]
    if long:
        config.hook.pytest_deselected(items=long)
        left_out = {*map(id, long)}
        items[:] = [item for item in items if id(item) not in left_out]


def is_left_out(item: pytest.Item, config: pytest.Config) -> bool:
    if item.get_closest_marker("torture") and not config.getoption("--torture"):
        return True
    return bool(config.getoption("--quick")) and (is_slow(item) or on_another_backend(item))


def is_slow(item: pytest.Item) -> bool:
    names = slow_tests(item.path)
    return names is not None and (not names or getattr(item, "originalname", item.name) in names)


@functools.cache
def slow_tests(path: Path) -> tuple[str, ...] | None:
    from tests.support.slow import SLOW  # only here: this file is also tried out on its own

    return SLOW.get(path.relative_to(TESTS).as_posix())


def on_another_backend(item: pytest.Item) -> bool:
    """Return whether a test above the storage runs on a backend that `make check` leaves out."""
    room = room_of(item.path)
    if room == "storage":
        return False
    others = ["files", "postgres", *(["sqlite"] if room == "adapters" else [])]
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    kinds = [parameters.get(name, "") for name in ("home", "there", "store", "pair", "kind")]
    return any(
        kind in others for each in kinds for kind in (each if type(each) is tuple else [each])
    )


@functools.cache
def room_of(path: Path) -> str:
    return path.relative_to(TESTS).parts[0]


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("tools"):
        for tool in marker.args:
            if why := unusable(tool):
                pytest.skip(why)


@functools.cache
def unusable(tool: str) -> str | None:
    if shutil.which(tool) is None:
        return f"needs {tool}, which is not installed"
    if tool in PROBES and subprocess.run(PROBES[tool], capture_output=True, check=False).returncode:
        return f"needs {tool}, which does not work here"
    return None


@pytest.fixture(scope="session")
def rounds(request: pytest.FixtureRequest):
    """How often to repeat: `rounds(300, torture=20_000)`."""
    long = request.config.getoption("--torture")
    return lambda usual, *, torture: torture if long else usual


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        note_skip(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:
        note_skip(report)


def note_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    where = report.longrepr
    SKIPPED[report.nodeid] = where[2] if isinstance(where, tuple) else str(where)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    # xdist's workers hand their reports to the controller; it alone decides.
    controller = not hasattr(session.config, "workerinput")
    if CI and SKIPPED and controller and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if CI and SKIPPED:
        terminalreporter.section("CI=true: a skipped test is a failure", red=True)
        for test, why in sorted(SKIPPED.items()):
            terminalreporter.line(f"{test}: {why}")


@contextmanager
def _home(kind: str, folder: Path) -> "Iterator[Home]":
    from tests.support.stores import Home  # only here: this file is also tried out on its own

    home = Home(kind, folder)
    yield home
    home.give_back()


@pytest.fixture(params=["memory", "sqlite", "files", "postgres"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> "Iterator[Home]":
    """A store of each kind, and ways to spoil it."""
    with _home(request.param, tmp_path) as home:
        yield home


@pytest.fixture
def sqlite(tmp_path: Path) -> "Iterator[Home]":
    with _home("sqlite", tmp_path) as home:
        yield home


@pytest.fixture
def memory(tmp_path: Path) -> "Iterator[Home]":
    with _home("memory", tmp_path) as home:
        yield home


@pytest.fixture
def here(tmp_path: Path) -> "Iterator[Home]":
    """A store to copy from,"""
    with _home("memory", tmp_path / "here") as home:
        yield home


@pytest.fixture(params=["memory", "sqlite", "files", "postgres"])
def there(request: pytest.FixtureRequest, tmp_path: Path) -> "Iterator[Home]":
    """and one of each kind to copy to."""
    with _home(request.param, tmp_path / "there") as home:
        yield home


@pytest.fixture
def terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> "Terminal":
    """A folder in which commands are typed, with a store that is made by the first of them."""
    from tests.support.terminal import Terminal

    for name in ("NO_COLOR", "FORCE_COLOR", "_HOLDFAST_COMPLETE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOLDFAST_STORE", "store.db")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "path", [*sys.path])  # `resume` looks in the folder first
    monkeypatch.chdir(tmp_path)
    return Terminal(tmp_path, capsys)


@pytest.fixture
def mutant(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str, Any], None]:
    """Change the engine, for a test that a test notices."""
    return monkeypatch.setattr
