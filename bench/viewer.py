"""How soon the viewer shows a session, long or short, and how it scrolls, in a real browser."""

from __future__ import annotations

import shutil
import statistics
from itertools import islice
from typing import Any
from urllib.parse import quote

import holdfast

from .lab import Lab, Row
from .messages import Writer
from .timing import Ratio, duration

_FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking",
          "--disable-component-update", "--disable-sync")  # fmt: skip
# From the moment at which the page is asked for until it shows rows, and what one of them changed.
_SHOWN = """() => document.querySelector('.rows [role="option"]')
    && document.querySelector('.detail .changes')"""
_SCROLL = """async () => {
    const list = document.querySelector('.rows'), frames = [];
    let last = performance.now();
    for (let n = 0; n < 120; n++) {
        list.scrollTop += 400;
        await new Promise(requestAnimationFrame);
        const now = performance.now();
        frames.push(now - last);
        last = now;
    }
    return [frames, document.querySelectorAll('.rows [role="option"]').length, list.scrollTop];
}"""


def first_view(lab: Lab) -> list[Row]:
    from playwright.sync_api import sync_playwright

    from holdfast import web

    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("the viewer is measured with chromium, which is not installed")
    steps, rounds = lab.pick(20_000, 400), lab.pick(15, 3)
    path = lab.path("viewer")
    with holdfast.open(path, durability="normal") as store:
        _fill(store.session("long"), steps)
        _fill(store.session("short"), 20, first=10)
        with web.served(store) as address, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=[*_FLAGS])
            taken: dict[str, list[float]] = {"long": [], "short": []}
            for n in range(rounds + 1):
                for name in ("long", "short") if n % 2 else ("short", "long"):
                    seconds = _open(browser, f"{address}#s={quote(name)}")
                    if n:  # the first round warms up
                        taken[name].append(seconds)
            page = browser.new_page(viewport={"width": 1280, "height": 800})
            page.goto(f"{address}#s=long")
            page.wait_for_function(_SHOWN)
            frames, rows, top = page.evaluate(_SCROLL)
            browser.close()
    ratio = Ratio.of(taken["long"], taken["short"])
    return [
        lab.row(
            f"Viewer: first view of a session of {steps:,} checkpoints and {steps // 2:,} messages",
            "≤ 2 × that of one with 20 of each",
            f"{ratio} ({duration(taken['long'])} / {duration(taken['short'])})",
            passed=ratio.middle <= 2,
        ),
        lab.row(
            "Viewer: a frame while that session is scrolled",
            "–",
            f"median {statistics.median(frames):.1f} ms, longest {max(frames):.1f} ms; "
            f"{rows} rows in the page after {top:,.0f} pixels",
            passed=None,
        ),
    ]


def _fill(session: holdfast.Session, steps: int, first: int = 0) -> None:
    """A message with every other checkpoint, and some with the first; the others change a plan."""
    fresh = Writer(71).conversation(steps)
    for n in range(steps // 2):
        session.append("messages", *islice(fresh, 1 if n else 1 + first))
        session.patch(set={"plan": {"step": n, "note": f"after message {n}"}})


def _open(browser: Any, address: str) -> float:
    """Seconds until a page of its own shows it."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    page.goto("about:blank")
    page.goto(address, wait_until="commit")
    page.wait_for_function(_SHOWN, polling="raf")
    seconds: float = page.evaluate("performance.now()") / 1e3
    context.close()
    return seconds
