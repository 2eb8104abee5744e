"""What tests of adapters share: each that awaits has a loop of its own; texts of some size."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from random import Random
from typing import Any


def asynchronous(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on a loop of its own."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


def noise(seed: int) -> str:
    """A text that nothing makes shorter."""
    return Random(seed).randbytes(400).hex()
