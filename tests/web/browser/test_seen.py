"""What can be seen, and by whom: contrast, names for screen readers, no line that stands out."""

from __future__ import annotations

import base64
import re
import time
from importlib.resources import files
from pathlib import Path

import pytest
from playwright.sync_api import expect

import holdfast
from holdfast import Usage
from tests.support.stores import Home
from tests.web.browser import worlds
from tests.web.browser.conftest import Look

pytestmark = pytest.mark.tools("chromium")

STATIC = Path(str(files("holdfast.web") / "static"))
TABS = ("Changes", "Messages", "State", "Usage", "Run", "Integrity")
TEXTS = ("ink", "soft", "accent", "good", "warn", "bad")
GROUNDS = ("ground", "surface", "raised")
WASHES = [
    ("accent", "accent-wash"), ("good", "good-wash"), ("warn", "warn-wash"), ("bad", "bad-wash"),
    ("ink", "accent-wash"), ("ink", "user-wash"), ("accent", "user-wash"), ("ink", "warn-wash"),
    ("soft", "accent-wash"), ("soft", "user-wash"), ("soft", "warn-wash"), ("soft", "bad-wash"),
    ("on-accent", "accent"), ("surface", "ink"), ("surface", "bad"),
]  # fmt: skip
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR42mNgAAAAAgAB5Sfe/AAAAABJRU5ErkJggg=="
)


@pytest.fixture
def store(sqlite: Home) -> holdfast.Store:
    return sqlite.store


def luminance(colour: str) -> float:
    parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_stands_out_from_what_it_lies_on(theme: int) -> None:
    found = re.findall(
        r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", (STATIC / "style.css").read_text()
    )
    colours = {name: shades[theme] for name, *shades in found}
    pairs = [(text, ground) for text in TEXTS for ground in GROUNDS] + WASHES
    for text, ground in pairs:
        dark, light = sorted(luminance(colours[name]) for name in (text, ground))
        ratio = (light + 0.05) / (dark + 0.05)
        assert ratio >= 4.5, f"{text} on {ground}: {ratio:.2f}"


def full(store: holdfast.Store) -> str:
    """A session with something long in every tab."""
    session = store.session(worlds.in_doubt(store).name)
    wide = "w" * 400
    session.append(
        "messages", {"role": "assistant", "content": f"`{wide}` and {wide}"}, label=wide,
        tags=[wide], usage=Usage(tokens=10**9, cost=10**6), reason=wide, meta={wide: wide},
    )  # fmt: skip
    session.patch(set={wide: {wide: [wide, {"deep": wide}]}})
    session.fork(f"{session.name}-{wide}"[:200])
    return session.name


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_wider_than_the_page(store: holdfast.Store, look: Look, width: int) -> None:
    name = full(store)
    viewer = look(store, f"s={name}")
    viewer.page.set_viewport_size({"width": width, "height": 844})
    for pane in ("sessions", "timeline"):
        viewer.open(f"s={name}&p={pane}")
        assert viewer.page.evaluate("document.documentElement.scrollWidth") <= width
    for back in ("@", "@~1"):
        at = store.session(name).get(back).id
        viewer.open(f"s={name}&c={at}&p=detail")
        for tab in TABS:
            expect(viewer.tab(tab)).to_have_attribute("aria-labelledby", f"tab-{tab.lower()}")
            expect(viewer.panel.locator("> *").first).to_be_visible()
            expect(viewer.find(".panel.waits")).to_have_count(0)
            assert viewer.page.evaluate("document.documentElement.scrollWidth") <= width, tab
            wide = viewer.panel.evaluate("panel => panel.scrollWidth - panel.clientWidth")
            assert wide <= 0, (tab, back)
    head, before = (store.session(name).get(r).id for r in ("@", "@~2"))
    viewer.open(f"s={name}&c={head}&with={before}")
    expect(viewer.find(".compare .heads")).to_be_visible()
    assert viewer.page.evaluate("document.documentElement.scrollWidth") <= width
    assert viewer.find(".compare .scroll").evaluate("b => b.scrollWidth <= b.clientWidth")


def test_everything_has_a_name_and_a_role(store: holdfast.Store, look: Look) -> None:
    full(store)
    worlds.trip(store)
    viewer = look(store, "s=trip")
    page = viewer.page
    for role, name in (
        ("navigation", "Sessions"), ("main", "Timeline"), ("region", "Checkpoint"),
        ("listbox", "Checkpoints, the newest first"), ("tablist", "About the checkpoint"),
        ("searchbox", re.compile("Search")),
    ):  # fmt: skip
        expect(page.get_by_role(role, name=name).first).to_be_visible()  # type: ignore[arg-type]
    expect(page.locator(".rows").get_by_role("option", selected=True)).to_contain_text("done")
    expect(page.get_by_role("tab", selected=True)).to_have_text("Changes")
    for tab in TABS:
        viewer.tab(tab)
        expect(viewer.panel).to_have_attribute("aria-labelledby", f"tab-{tab.lower()}")
        nameless = page.evaluate(
            """() => [...document.querySelectorAll("button, a, input, select, [role=img]")]
                .filter(node => node.checkVisibility())
                .filter(node => !(node.getAttribute("aria-label") ?? node.innerText?.trim()
                    ?? node.querySelector("title")?.textContent))
                .map(node => node.outerHTML)"""
        )
        assert nameless == []
    listed = page.locator(".rows")
    chosen = listed.get_attribute("aria-activedescendant")
    assert page.locator(f"#{chosen}").get_attribute("aria-selected") == "true"


def test_images_of_a_conversation_are_shown(store: holdfast.Store, look: Look) -> None:
    url = f"data:image/png;base64,{PIXEL}"
    shapes = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "input_image", "image_url": url},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}},
    ]
    elsewhere = {"type": "image_url", "image_url": {"url": "http://elsewhere.example/spy.png"}}
    bedrock = {"image": {"format": "png", "source": {"bytes": base64.b64decode(PIXEL)}}}
    content = [*shapes, elsewhere, bedrock]
    store.session("s").save({"messages": [{"role": "user", "content": content}]})
    viewer = look(store, "s=s&t=messages")
    images = viewer.panel.locator(".message img")
    expect(images).to_have_count(4)
    widths = "images => Promise.all(images.map(i => i.decode().then(() => i.naturalWidth)))"
    assert images.evaluate_all(widths) == [1, 1, 1, 1]
    expect(viewer.panel).to_contain_text("An image elsewhere, not fetched")


def test_a_path_is_copied(store: holdfast.Store, look: Look) -> None:
    store.session("s").save({"plan": {"days": [{"city": "Oslo"}]}})
    allowed = ["clipboard-read", "clipboard-write"]
    viewer = look(store, "s=s&t=state", page={"permissions": allowed})
    viewer.panel.locator("summary", has_text="plan").click()
    viewer.panel.locator("summary", has_text="days").click()
    row = viewer.panel.locator("summary", has_text="dict of 1").last
    row.hover()
    row.get_by_role("button", name="Copy the path").click()
    expect(viewer.panel.locator(".copy.done")).to_have_count(1)
    assert viewer.page.evaluate("navigator.clipboard.readText()") == "state.plan.days[0]"


def test_what_lands_is_seen_soon(store: holdfast.Store, look: Look) -> None:
    """Within a second on a machine that has nothing else to do."""
    session = worlds.trip(store)
    viewer = look(store, "s=trip")
    expect(viewer.find(".link.on")).to_be_visible()
    expect(viewer.chosen).to_contain_text("done")
    taken = []
    for n in range(3):
        began = time.monotonic()
        session.append("messages", {"role": "assistant", "content": "so"}, label=f"landed {n}")
        expect(viewer.row(f"landed {n}").locator(".headmark")).to_be_visible()
        taken.append(time.monotonic() - began)
    assert min(taken) < 5
