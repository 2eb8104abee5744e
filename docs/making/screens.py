"""Take the pictures of the viewer, with the store of `holdfast demo`; `make screenshots`."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

import holdfast
from holdfast import web
from holdfast.cli.main import run

DOCS = Path(__file__).parent.parent
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking",
         "--disable-component-update", "--disable-sync")  # fmt: skip


def main() -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("chromium is not installed: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        with redirect_stdout(StringIO()):
            run(["demo", "--quick", "--folder", folder])
        with (
            holdfast.open(f"{folder}/agent.db", read_only=True) as store,
            web.served(store, read_only=True) as address,
            sync_playwright() as playwright,
        ):
            booked = store.session("lisbon").get("@~1").id
            cheap, grand = (store.session(name).get().id for name in ("cheap", "grand"))
            browser = playwright.chromium.launch(executable_path=chromium, args=[*FLAGS])
            lisbon = f"{address}#s=lisbon&c={booked}"
            _take(browser, lisbon, "viewer.png")
            _take(browser, f"{lisbon}&t=messages", "viewer-dark.png", dark=True)
            _take(browser, f"{address}#s=cheap&c={cheap}&with={grand}", "viewer-compare.png")
            browser.close()


def _take(browser: Browser, address: str, name: str, *, dark: bool = False) -> None:
    context = browser.new_context(
        viewport={"width": 1280, "height": 720},
        color_scheme="dark" if dark else "light",
        device_scale_factor=1.5,
    )
    page: Page = context.new_page()
    page.goto(address)
    page.wait_for_selector('.rows [role="option"]')
    page.wait_for_timeout(1_000)  # until the requests after the first rows are done
    page.screenshot(path=DOCS / name)
    context.close()
    print(f"docs/{name}")


if __name__ == "__main__":
    main()
