"""An exported page, opened from the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

import holdfast
from holdfast.web.export import export
from tests.support.stores import Home
from tests.web.browser import worlds
from tests.web.browser.chromium import Viewer
from tests.web.browser.test_hostile import HOSTILE, hostile_state

pytestmark = pytest.mark.tools("chromium")


def opened(browser: Browser, store: holdfast.Store, names: list[str], folder: Path) -> Viewer:
    export(store, names, str(folder / "page.html"))
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    viewer = Viewer(page, f"file://{folder / 'page.html'}")
    return viewer.open()


def test_it_shows_what_the_viewer_shows(browser: Browser, sqlite: Home, tmp_path: Path) -> None:
    store = sqlite.store
    trip = worlds.trip(store)
    trip.fork("cheaper", "flight found").patch(set={"plan": {"budget": 300}}, label="cheap")
    viewer = opened(browser, store, ["trip", "cheaper"], tmp_path)
    viewer.find(".session", has_text="trip").first.click()
    expect(viewer.rows).to_have_count(9)
    expect(viewer.chosen).to_contain_text("done")
    expect(viewer.panel).to_contain_text("The plan is done.")
    viewer.press("ArrowDown")
    expect(viewer.chosen).to_contain_text("steered")
    expect(viewer.panel).to_contain_text("1200")
    expect(viewer.tab("Messages")).to_contain_text("Plan four days in Porto.")
    expect(viewer.tab("State")).to_contain_text("plan")
    expect(viewer.tab("Usage")).not_to_be_empty()
    expect(viewer.tab("Run")).not_to_be_empty()
    expect(viewer.tab("Integrity")).to_contain_text(trip.get("steered").hash[:12])
    expect(viewer.tab("Integrity")).to_contain_text("As of the export")  # nothing is hashed again
    expect(viewer.tab("Integrity")).not_to_contain_text("It loads")
    viewer.tab("Changes")
    viewer.press("c", "ArrowDown", "c")
    expect(viewer.find(".compare .heads")).to_contain_text("forgot everything")
    expect(viewer.find(".compare .heads")).to_contain_text("4 steps since they parted: 12k tok")
    viewer.press("Escape")
    viewer.find("input[type=search]").fill("Detour 2")
    expect(viewer.find(".hit").first).to_be_visible()
    viewer.press("f", "r", "u")
    expect(viewer.dialog).to_have_count(0)
    assert viewer.complaints == []


def test_nothing_in_it_runs(browser: Browser, sqlite: Home, tmp_path: Path) -> None:
    store = sqlite.store
    names = [text for text in HOSTILE if "\0" not in text]
    for text in names:
        session = store.session(text, agent=text)
        session.save({"messages": []})
        session.save(hostile_state(text), label=text, tags=[text], meta={text: text}, reason=text)
    viewer = opened(browser, store, names, tmp_path)
    expect(viewer.find(".session")).to_have_count(len(names))
    for n in range(len(names)):
        viewer.find(".session").nth(n).click()
        for name in ("Changes", "Messages", "State", "Integrity"):
            expect(viewer.tab(name)).not_to_be_empty()
    assert viewer.page.evaluate("window.hit") is None
    assert viewer.complaints == []


def test_long_dicts_and_what_lies_in_them(browser: Browser, sqlite: Home, tmp_path: Path) -> None:
    """They are put together from items, which may refer to others."""
    session = sqlite.session("s")
    files: dict[str, Any] = {
        f"$file {n}": [f"line {m} {'x' * 40}" for m in range(60)] for n in range(60)
    }
    session.save({"files": files})
    files["$file 7"].append("the newest line")
    session.save({"files": files})
    viewer = opened(browser, sqlite.store, ["s"], tmp_path)
    viewer.find(".session", has_text="s").first.click()
    expect(viewer.panel).to_contain_text("the newest line")
    state = viewer.tab("State")
    expect(state).not_to_contain_text("the newest line")
    state.get_by_text("files").first.click()
    expect(state).to_contain_text("$file 7")
    state.get_by_text("$file 7", exact=True).first.click()
    expect(state).to_contain_text("line 59")
