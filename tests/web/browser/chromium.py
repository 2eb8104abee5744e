"""A store that is served, and a browser that looks at it."""

from __future__ import annotations

import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from playwright.sync_api import Browser, ConsoleMessage, Dialog, Locator, Page, sync_playwright
from starlette.applications import Starlette
from starlette.routing import Mount

import holdfast
from holdfast.web import app

PATIENCE = 60_000
"""Milliseconds that something may take before it counts as missing: machines may be slow."""
_ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@contextmanager
def chromium() -> Iterator[Browser]:
    found = shutil.which("chromium") or shutil.which("google-chrome")
    assert found is not None, "these tests drive chromium: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=_ARGUMENTS)
        yield browser
        browser.close()


@contextmanager
def served(store: holdfast.Store, below: str = "", **options: Any) -> Iterator[str]:
    """The address of a viewer of the store, in a thread of this process; `below` some path."""
    made = app(store, **options)
    if below:
        made = Starlette(routes=[Mount(f"/{below}", made)])
    config = uvicorn.Config(made, log_level="error", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive(), "the server did not start"
                time.sleep(0.01)
            path = f"{below}/" if below else ""
            yield f"http://127.0.0.1:{sock.getsockname()[1]}/{path}"
        finally:
            server.should_exit = True
            thread.join()


class Viewer:
    """A page of the viewer. What the browser complains about is kept."""

    def __init__(self, page: Page, url: str) -> None:
        self.page, self.url = page, url
        self.complaints: list[str] = []
        self._excused: str | None = None
        page.set_default_timeout(PATIENCE)
        page.on("console", self._said)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", self._asked)

    def _asked(self, dialog: Dialog) -> None:
        self.complaints.append(dialog.message)
        dialog.dismiss()

    def _said(self, message: ConsoleMessage) -> None:
        excused = self._excused is not None and self._excused in message.text
        if message.type in ("error", "warning") and not excused:
            self.complaints.append(message.text)

    def excuse(self, text: str) -> None:
        """Complaints with this text are due, also those that come late."""
        self._excused = text
        self.complaints = [each for each in self.complaints if text not in each]

    def open(self, hash: str = "") -> Viewer:
        self.page.goto("about:blank")  # so that an address that differs by its hash alone is loaded
        self.page.goto(f"{self.url}#{hash}")
        self.page.locator(".session, .empty").first.wait_for(state="attached")
        if "s=" in hash:  # keys mean nothing before there is something to step through
            self.page.locator(".row[role=option], .problem").first.wait_for(state="attached")
        return self

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def find(self, selector: str, **options: Any) -> Locator:
        return self.page.locator(selector, **options)

    @property
    def rows(self) -> Locator:
        return self.find(".row[role=option]")

    @property
    def chosen(self) -> Locator:
        return self.find(".row.chosen")

    @property
    def panel(self) -> Locator:
        return self.find("[role=tabpanel]")

    @property
    def dialog(self) -> Locator:
        return self.find("dialog[open]")

    def row(self, text: str) -> Locator:
        return self.rows.filter(has_text=text)

    def tab(self, name: str) -> Locator:
        self.page.get_by_role("tab", name=name).click()
        return self.panel
