"""An adapter uses the public API alone, which is the same on every backend: two are enough."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.stores import Home


@pytest.fixture(params=["memory", "sqlite"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Home]:
    home = Home(request.param, tmp_path)
    yield home
    home.give_back()
