from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

import holdfast
from tests.web.browser.chromium import PATIENCE, Viewer, chromium, served

Look = Callable[..., Viewer]


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    # Not for longer: its event loop runs in this thread, and tests elsewhere have their own.
    expect.set_options(timeout=PATIENCE)
    with chromium() as browser:
        yield browser


@pytest.fixture
def look(browser: Browser) -> Iterator[Look]:
    """Look at a store. In the end, the browser must not have complained about anything."""
    viewers = []
    with ExitStack() as closing:

        def look(
            store: holdfast.Store, hash: str = "", *, page: Any = None, **options: Any
        ) -> Viewer:
            url = closing.enter_context(served(store, **options))
            context = browser.new_context(viewport={"width": 1280, "height": 800}, **(page or {}))
            closing.callback(context.close)
            viewers.append(Viewer(context.new_page(), url))
            return viewers[-1].open(hash)

        yield look
    for viewer in viewers:
        assert viewer.complaints == []
