"""Each dialog says what will happen, how to have it back, and the command that does the same."""

from __future__ import annotations

import shlex

import pytest
from playwright.sync_api import expect

import holdfast
from tests.support.stores import Home
from tests.web.browser import worlds
from tests.web.browser.chromium import Viewer
from tests.web.browser.conftest import Look

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


def test_tag_and_label_say_what_they_do(store: holdfast.Store, look: Look) -> None:
    session = worlds.trip(store)
    done = session.get("done").id
    viewer = look(store, "s=trip")
    expect(viewer.chosen).to_contain_text("done")
    viewer.press("t")
    says(viewer, "A tag is added.", "pruning keeps it", "The state and its hash stay as they are.")
    viewer.dialog.locator("input").fill("-kept for good")
    assert command(viewer) == ["tag", "-s", "trip", "--", done, "-kept for good"]
    close(viewer)
    viewer.press("l")
    says(viewer, "The label takes the place of “done”.", "The state and its hash stay")
    viewer.dialog.locator("input").fill("it's done")
    assert command(viewer) == ["label", "-s", "trip", done, "it's done"]
    close(viewer)
    assert session.get().tags == ()


@pytest.mark.parametrize(
    ("button", "text", "option"),
    [
        ("It was done", "The run gets this result", ["--result", '{"booking": 1}']),
        ("Make it again", "it is done twice", ["--rerun"]),
        ("Leave it out", "goes on without a result", ["--skip"]),
    ],
)
def test_resolve_says_what_it_does(
    store: holdfast.Store, look: Look, button: str, text: str, option: list[str]
) -> None:
    session = worlds.in_doubt(store)
    [open_] = session.pending()
    viewer = look(store, "s=hotel&t=run")
    viewer.panel.get_by_role("button", name=button).click()
    says(viewer, text, "This is final.")
    if option[0] == "--result":
        viewer.dialog.locator("textarea").fill(option[1])
    assert command(viewer) == ["resolve", "-s", "hotel", *option, open_.key]
    close(viewer)
    assert session.pending() == [open_]


def test_answer_says_what_it_does(store: holdfast.Store, look: Look) -> None:
    worlds.waiting(store)
    viewer = look(store, "s=approval&t=run")
    viewer.panel.get_by_role("button", name="Answer").click()
    says(viewer, "The run of approval waits for go.", "gets this answer", "This is final.")
    viewer.dialog.locator("textarea").fill('"yes, please"')
    assert command(viewer) == ["answer", "-s", "approval", "go", '"yes, please"']
    close(viewer)
