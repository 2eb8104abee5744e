"""How many random lives a test goes through: a few, and more by `make torture`."""

import pytest


def seeds(usual: int, *, torture: int) -> list[object]:
    more = [pytest.param(n, marks=pytest.mark.torture) for n in range(usual, torture)]
    return [*range(usual), *more]
