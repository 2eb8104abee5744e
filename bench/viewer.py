"""The viewer in a real browser: first view, scrolling, and the exported page."""

from __future__ import annotations

import math
import shutil
import statistics
import time
from itertools import islice
from typing import Any
from urllib.parse import quote

import holdfast

from .lab import Lab, Row
from .messages import Writer
from .timing import Ratio, duration

_FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking",
          "--disable-component-update", "--disable-sync")  # fmt: skip
# true once the page shows rows and the changes of one of them
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
        raise SystemExit("chromium is not installed; it is needed to measure the viewer")
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


def export(lab: Lab) -> list[Row]:
    """Measure `holdfast export --html` for sessions of three lengths."""
    from holdfast.web import export as web_export

    counts, taken = lab.pick((500, 2_000, 20_000), (50, 100, 200)), []
    path = lab.path("export")
    with holdfast.open(path, durability="normal") as store:
        for count in counts:
            _fill(store.session(f"{count}"), count)
            start = time.perf_counter()
            web_export.export(store, [f"{count}"], str(path.with_name(f"{count}.html")))
            taken.append(time.perf_counter() - start)
    exponent = math.log(taken[-1] / taken[0]) / math.log(counts[-1] / counts[0])
    times = ", ".join(f"{count:,}: {t:.1f} s" for count, t in zip(counts, taken, strict=True))
    return [
        lab.row(
            f"`export --html` of {counts[-1]:,} checkpoints against {counts[0]:,}: exponent",
            "≤ 1.15",
            f"{exponent:.2f} ({times})",
            passed=exponent <= 1.15,
        )
    ]


def _fill(session: holdfast.Session, steps: int, first: int = 0) -> None:
    """Append a message and change a plan, in turn. The first append has `first` more messages."""
    fresh = Writer(71).conversation(steps)
    for n in range(steps // 2):
        session.append("messages", *islice(fresh, 1 if n else 1 + first))
        session.patch(set={"plan": {"step": n, "note": f"after message {n}"}})


def _open(browser: Any, address: str) -> float:
    """Return the seconds until a new browser page shows the session."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    page.goto("about:blank")
    page.goto(address, wait_until="commit")
    page.wait_for_function(_SHOWN, polling="raf")
    seconds: float = page.evaluate("performance.now()") / 1e3
    context.close()
    return seconds
