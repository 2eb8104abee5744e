"""Each dialog says what will happen, how to have it back, and the command that does the same."""

from __future__ import annotations

import shlex

import pytest
from playwright.sync_api import expect

import holdfast
from tests.home import Home
from tests.web import worlds
from tests.web.browser import Viewer
from tests.web.conftest import Look

pytestmark = pytest.mark.tools("chromium")


@pytest.fixture
def store(sqlite: Home) -> holdfast.Store:
    return sqlite.store


def command(viewer: Viewer) -> list[str]:
    """What the dialog would have one type, without the store."""
    words = shlex.split(viewer.dialog.locator(".command code").inner_text())
    assert words[:2] == ["holdfast", "--store"]
    return words[3:]


def says(viewer: Viewer, *texts: str) -> None:
    for text in texts:
        expect(viewer.dialog).to_contain_text(text)


def close(viewer: Viewer) -> None:
    viewer.dialog.get_by_role("button", name="Cancel").click()
    expect(viewer.dialog).to_have_count(0)


def test_undo_and_redo_say_what_they_do(store: holdfast.Store, look: Look) -> None:
    session = worlds.trip(store)
    viewer = look(store, "s=trip")
    expect(viewer.chosen).to_contain_text("done")

    def asked(kind: str, *texts: str) -> None:
        if kind == "undo":
            viewer.press("u")
        else:
            viewer.page.get_by_role("button", name="Redo").click()
        says(viewer, *texts)
        assert command(viewer) == [kind, "-s", "trip"]
        back = {"undo": "redo", "redo": "undo"}[kind]
        expect(viewer.dialog.locator("p code")).to_contain_text(f"{back} -s trip")
        close(viewer)

    asked(
        "undo", "The append of step 5, “done” (", "is taken back",
        "moves from step 5, “done” to step 4, “steered”", "Nothing is deleted",
    )  # fmt: skip
    session.rewind("flight found")
    asked("undo", "The rewind (", "from step 3, “flight found” to step 5, “done”")
    session.undo()
    asked("redo", "The rewind (", "done again", "from step 5, “done” to step 3, “flight found”")
    session.tag("done", "kept", "good")
    asked("undo", "Step 5, “done” loses the tags “good”, “kept”")
    session.label("done", "all done")
    asked("undo", "Step 5, append gets the label “done” again, in place of “all done”")
    session.undo()
    asked("redo", "gets the label “all done” again, in place of “done”")
    session.delete("steered")
    asked("undo", "The delete (", "1 checkpoint is there again")
    store.session("fresh").save({"n": 1})
    viewer.open("s=fresh")
    viewer.press("u")
    says(viewer, "The save of step 1, save (", "then there is none")
    viewer.dialog.get_by_role("button", name="Undo").click()
    expect(viewer.dialog).to_have_count(0)
    expect(viewer.find(".headmark")).to_have_count(0)
    viewer.press("u")
    expect(viewer.find(".notice").last).to_contain_text("there is nothing to undo")
    expect(viewer.dialog).to_have_count(0)


def test_undoing_a_fork_says_that_its_session_goes(store: holdfast.Store, look: Look) -> None:
    worlds.trip(store).fork("other", "flight found")
    viewer = look(store, "s=other")
    viewer.press("u")
    says(viewer, "The fork that made other (", "The session is hidden", "redo -s other")
