"""The viewer in a browser: what is done there, and what is done elsewhere meanwhile."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest
from playwright.sync_api import expect

import holdfast
from tests.support.stores import Home
from tests.web.browser import worlds
from tests.web.browser.conftest import Look

pytestmark = pytest.mark.tools("chromium")


@pytest.fixture
def store(sqlite: Home) -> holdfast.Store:
    return sqlite.store


# -- doing -----------------------------------------------------------------------------------------


def test_fork(sqlite: Home, store: holdfast.Store, look: Look) -> None:
    session = worlds.trip(store)
    at = session.get("flight found")
    viewer = look(store, f"s=trip&c={at.id}")
    expect(viewer.chosen).to_contain_text("flight found")
    viewer.press("f")
    viewer.dialog.locator("input").fill("it's $HOME; a `fork`")
    shown = viewer.dialog.locator(".command code").inner_text()
    words = ["fork", "-s", "trip", at.id, "it's $HOME; a `fork`"]
    assert shlex.split(shown) == ["holdfast", "--store", str(sqlite.path), *words]
    expect(viewer.dialog).to_contain_text("trip is not changed")
    viewer.dialog.get_by_role("button", name="Fork").click()
    expect(viewer.find("h1")).to_have_text("it's $HOME; a `fork`")
    made = store.session("it's $HOME; a `fork`")
    assert made.load() == session.load("flight found")
    expect(viewer.chosen).to_be_visible()
    viewer.press("f")
    viewer.dialog.locator("input").fill("trip")
    viewer.dialog.get_by_role("button", name="Fork").click()
    expect(viewer.dialog.locator(".problem")).to_contain_text("trip")
    viewer.excuse("409")


def test_rewind_and_undo(store: holdfast.Store, look: Look) -> None:
    session = worlds.trip(store)
    done, steered = session.get("done"), session.get("steered")
    viewer = look(store, "s=trip")
    viewer.press("ArrowDown")
    expect(viewer.chosen).to_contain_text("steered")
    viewer.press("r")
    expect(viewer.dialog).to_contain_text("The head moves back 1 step, to step 4.")
    expect(viewer.dialog).to_contain_text("Nothing is deleted")
    expect(viewer.dialog).to_contain_text("outside world is not reversed")
    expect(viewer.dialog.locator(".command")).to_contain_text(f"rewind -s trip {steered.id}")
    viewer.dialog.get_by_role("button", name="Cancel").click()
    expect(viewer.dialog).to_have_count(0)
    assert session.get().id == done.id
    viewer.press("r")
    viewer.dialog.get_by_role("button", name="Rewind").click()
    expect(viewer.row("steered").locator(".headmark")).to_be_visible()
    assert session.get().id == steered.id
    viewer.find(".notice").get_by_role("button", name="Undo").click()
    expect(viewer.row("done").locator(".headmark")).to_be_visible()
    assert session.get().id == done.id
    viewer.press("u")
    viewer.dialog.get_by_role("button", name="Undo").click()
    expect(viewer.row("steered").locator(".headmark")).to_be_visible()
    assert session.get().id == steered.id
    viewer.page.get_by_role("button", name="Redo").click()
    viewer.dialog.get_by_role("button", name="Redo").click()
    expect(viewer.row("done").locator(".headmark")).to_be_visible()


def test_a_fork_that_is_undone_is_left(store: holdfast.Store, look: Look) -> None:
    """Two red errors were shown, and a session that was no longer there."""
    worlds.trip(store).fork("other", "flight found")
    viewer = look(store, "s=other")
    expect(viewer.chosen).to_be_visible()
    viewer.press("u")
    viewer.dialog.get_by_role("button", name="Undo").click()
    viewer.excuse("404")
    expect(viewer.find(".notice", has_text="other is no longer there.")).to_be_visible()
    expect(viewer.find("h1")).to_have_text("holdfast")
    expect(viewer.find(".session")).to_have_count(1)
    expect(viewer.find(".notice.bad, .problem")).to_have_count(0)
    viewer.page.get_by_role("button", name="Bring it back").click()
    expect(viewer.find("h1")).to_have_text("other")
    expect(viewer.chosen).to_contain_text("fork")
    expect(viewer.find(".session")).to_have_count(2)
    store.session("other").delete()
    viewer.page.get_by_role("button", name="Bring it back").click()
    expect(viewer.chosen).to_contain_text("fork")
    expect(viewer.find(".notice.bad, .problem")).to_have_count(0)


def test_tag_and_label(store: holdfast.Store, look: Look) -> None:
    session = worlds.trip(store)
    viewer = look(store, "s=trip")
    expect(viewer.chosen).to_contain_text("done")
    for key, text in (("t", "kept"), ("l", "all done")):
        viewer.press(key)
        viewer.dialog.locator("input").fill(text)
        viewer.press("Enter")
        expect(viewer.chosen).to_contain_text(text)
        expect(viewer.find(".detail-head")).to_contain_text(text)
    assert (session.get().label, session.get().tags) == ("all done", ("kept",))


def test_a_call_in_doubt_is_resolved(store: holdfast.Store, look: Look) -> None:
    session = worlds.in_doubt(store)
    viewer = look(store, "s=hotel&t=run")
    expect(viewer.panel.locator(".call.open")).to_contain_text("book_hotel")
    viewer.panel.get_by_role("button", name="It was done").click()
    viewer.dialog.locator("textarea").fill("{no json")
    viewer.dialog.get_by_role("button", name="Give the result").click()
    expect(viewer.dialog.locator(".problem")).to_contain_text("no JSON")
    viewer.dialog.locator("textarea").fill(f'{{"booking": {2**60 + 1}}}')
    words = shlex.split(viewer.dialog.locator(".command code").inner_text())
    assert words[3:6] == ["resolve", "-s", "hotel"]
    viewer.dialog.get_by_role("button", name="Give the result").click()
    expect(viewer.panel.locator(".call.open")).to_have_count(0)
    assert session.pending() == []
    with session.run() as run:
        for _ in run.turns(limit=1):
            call = {"id": "call_7", "name": "book_hotel", "input": {"nights": 3}}
            assert run.tool(call, pytest.fail) == {"booking": 2**60 + 1}


def test_a_question_is_answered(store: holdfast.Store, look: Look) -> None:
    session = worlds.waiting(store)
    viewer = look(store, "s=approval&t=run")
    expect(viewer.panel).to_contain_text("Book it for 850?")
    viewer.panel.get_by_role("button", name="Answer").click()
    viewer.dialog.locator("textarea").fill("no")  # a text, which code would take for a yes
    viewer.dialog.get_by_role("button", name="Answer").click()
    expect(viewer.dialog).to_contain_text("This is no JSON")
    viewer.dialog.locator("textarea").fill("false")
    viewer.dialog.get_by_role("button", name="Answer").click()
    expect(viewer.panel.locator(".call.open")).to_have_count(0)
    with session.run() as run:
        assert run.wait_for("go", prompt="Book it for 850?") is False


def test_a_read_only_viewer_offers_no_change(sqlite: Home, look: Look) -> None:
    worlds.trip(sqlite.store)
    worlds.in_doubt(sqlite.store)
    with holdfast.open(sqlite.url, read_only=True) as store:
        viewer = look(store, "s=hotel&t=run", read_only=True)
        expect(viewer.panel).to_contain_text("book_hotel")
        expect(viewer.find(".top")).to_contain_text("read-only")
        labels = viewer.page.get_by_role("button").all_inner_texts()
        assert not {"Fork", "Rewind", "Tag", "Label", "It was done…"} & set(labels)
        viewer.press("f", "u", "t")
        expect(viewer.dialog).to_have_count(0)
        viewer.page.goto("about:blank")


# -- live ------------------------------------------------------------------------------------------

SAVER = """
import sys, holdfast
with holdfast.open(sys.argv[1]) as store:
    session = store.session("trip")
    for line in map(str.strip, sys.stdin):
        session.append("messages", {"role": "assistant", "content": line}, label=line)
        print("saved", flush=True)
"""


def test_what_another_process_saves_appears(sqlite: Home, look: Look) -> None:
    worlds.trip(sqlite.store)
    viewer = look(sqlite.store, "s=trip")
    expect(viewer.find(".link.on")).to_be_visible()
    other = subprocess.Popen(
        [sys.executable, "-c", SAVER, str(sqlite.path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with other:
        assert other.stdin is not None
        assert other.stdout is not None

        def saves(text: str) -> None:
            print(text, file=other.stdin, flush=True)
            assert other.stdout is not None
            assert other.stdout.readline() == "saved\n"

        saves("news one")
        expect(viewer.chosen).to_contain_text("news one")  # the head was followed
        expect(viewer.row("news one").locator(".headmark")).to_be_visible()
        expect(viewer.panel).to_contain_text("news one")
        viewer.row("news one").click()
        saves("news two")
        expect(viewer.chosen).to_contain_text("news two")
        viewer.row("steered").click()
        saves("news three")
        expect(viewer.row("news three").locator(".headmark")).to_be_visible()
        expect(viewer.chosen).to_contain_text("steered")  # what is not the head stays
        expect(viewer.find(".row .headmark")).to_have_count(1)
        other.stdin.close()
    assert other.returncode == 0


def test_a_rewind_elsewhere_moves_the_head_here(store: holdfast.Store, look: Look) -> None:
    session = worlds.trip(store)
    viewer = look(store, "s=trip")
    expect(viewer.row("done").locator(".headmark")).to_be_visible()
    session.rewind("asked")
    expect(viewer.row("asked").locator(".headmark")).to_be_visible()
    expect(viewer.chosen).to_contain_text("asked")
    session.label("asked", "asked again")
    expect(viewer.row("asked again")).to_be_visible()


SEEN = """seen => {
    Object.defineProperty(document, "hidden", {get: () => !seen, configurable: true});
    document.dispatchEvent(new Event("visibilitychange"));
}"""


def test_pages_that_nobody_sees_leave_the_connections_to_others(
    store: holdfast.Store, look: Look
) -> None:
    session = worlds.trip(store)
    first = look(store, "s=trip")
    pages = [first.page]
    for _ in range(7):  # a browser has six connections for all pages of one place
        expect(pages[-1].locator(".link.on")).to_be_visible()
        pages[-1].evaluate(SEEN, False)
        pages.append(first.page.context.new_page())
        pages[-1].goto(f"{first.url}#s=trip", timeout=10_000)
    expect(pages[-1].locator(".row.chosen")).to_contain_text("done")
    session.append("messages", worlds.said("user", "Thanks!"), label="thanked")
    expect(pages[-1].locator(".row.chosen")).to_contain_text("thanked")
    expect(first.chosen).to_contain_text("done")
    pages[-1].evaluate(SEEN, False)
    first.page.evaluate(SEEN, True)
    expect(first.chosen).to_contain_text("thanked")
