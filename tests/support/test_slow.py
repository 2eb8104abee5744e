"""The list of slow tests names tests that exist."""

import re
from pathlib import Path

import pytest

from tests.support.slow import SLOW

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("file", SLOW)
def test_slow_tests_exist(file: str) -> None:
    assert (TESTS / file).exists()
    if SLOW[file]:
        found = re.findall(
            r"^(?:async )?def (test_\w+)", (TESTS / file).read_text("utf-8"), re.MULTILINE
        )
        assert {*SLOW[file]} <= {*found}
