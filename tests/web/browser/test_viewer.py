"""The viewer in a browser: what a person sees, and what comes of what they do."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Browser, Route, expect

import holdfast
from holdfast import Retention, Usage
from tests.runs.test_runs import leave_all
from tests.support.stores import Home
from tests.web.browser import worlds
from tests.web.browser.chromium import Viewer, served
from tests.web.browser.conftest import Look
from tests.web.browser.worlds import said

pytestmark = pytest.mark.tools("chromium")


@pytest.fixture
def store(sqlite: Home) -> holdfast.Store:
    return sqlite.store


# -- looking ---------------------------------------------------------------------------------------


def test_opens_with_the_session_that_was_active_last(store: holdfast.Store, look: Look) -> None:
    store.session("older").save({"messages": []})
    worlds.trip(store)
    viewer = look(store)
    expect(viewer.find("h1")).to_have_text("trip")
    expect(viewer.rows).to_have_count(9)
    expect(viewer.chosen).to_contain_text("done")
    expect(viewer.find(".session").first).to_contain_text("planner")
    expect(viewer.find(".session").first).to_contain_text("12.1k tok · $0.61")
    expect(viewer.find(".session[aria-current]")).to_have_count(1)


def test_a_link_on_another_site_leads_to_it(store: holdfast.Store, browser: Browser) -> None:
    worlds.trip(store)
    with served(store, token="0123456789abcdef") as url, browser.new_context() as context:
        viewer = Viewer(context.new_page(), url)
        link = f'<a href="{url}?token=0123456789abcdef">the viewer</a>'
        viewer.page.route(
            "http://elsewhere.example/",
            lambda route: route.fulfill(body=link, content_type="text/html"),
        )
        viewer.page.goto("http://elsewhere.example/")
        viewer.find("a").click()
        expect(viewer.find("h1")).to_have_text("trip")
        assert "token" not in viewer.page.url


def test_an_empty_store_says_so(store: holdfast.Store, look: Look) -> None:
    viewer = look(store)
    expect(viewer.find(".sessions .empty")).to_contain_text("no session yet")
    expect(viewer.find(".stage")).to_contain_text("The first save of an agent appears by itself.")
    store.session("first").save({"n": 1})
    expect(viewer.find(".session")).to_contain_text("first")
    expect(viewer.find(".stage")).to_contain_text("Choose one of the list.")


def test_a_session_that_comes_before_the_events_are_heard_is_shown(
    store: holdfast.Store, browser: Browser
) -> None:
    with served(store) as url, browser.new_context() as context:
        viewer = Viewer(context.new_page(), url)
        held: list[Route] = []
        viewer.page.route("**/api/events*", lambda route, _: held.append(route))
        with viewer.page.expect_request("**/api/events*"):
            viewer.open()
        expect(viewer.find(".sessions .empty")).to_contain_text("no session yet")
        store.session("first").save({"n": 1})
        for route in held:
            route.continue_()
        expect(viewer.find(".session")).to_contain_text("first")


def test_a_run_that_died_is_not_shown_as_at_work(store: holdfast.Store, look: Look) -> None:
    worlds.in_doubt(store)
    with store.session("works").run(state={}):
        viewer = look(store)
        dot = viewer.find("li[data-name=hotel] .dot")
        expect(dot).to_have_class("dot left")
        expect(dot).to_have_attribute("aria-label", re.compile("in doubt"))
        working = viewer.find("li[data-name=works] .dot")
        expect(working).to_have_class("dot in_progress")
        colour = "dot => getComputedStyle(dot).backgroundColor"
        assert dot.evaluate(colour) != working.evaluate(colour)


BANNERS = {
    "died": "The run died: process",
    "failed": "The run failed. Attempt 1.ValueError: no such flight",
    "halted": "The run was halted. Attempt 1.enough for today",
    "in doubt": "The run has stopped at a call that is in doubt.",
    "waiting": "The run waits for an answer.",
    "over budget": "The run was halted: its budget is spent. Attempt 1.over budget: $0.5 of $0.25",
}


def test_six_ways_to_leave_a_run(store: holdfast.Store, look: Look) -> None:
    leave_all(store)
    for name, banner in BANNERS.items():
        viewer = look(store, f"s={name}&t=run")
        expect(viewer.panel.locator(".banner")).to_contain_text(banner)
        dot = viewer.find(f"li[data-name='{name}'] .dot")
        expect(dot).to_have_attribute("aria-label", re.compile(name))
    viewer = look(store, "s=failed&t=run")
    expect(viewer.panel.locator(".calls")).to_contain_text("failed")


def test_what_can_be_filtered_by_is_suggested(store: holdfast.Store, look: Look) -> None:
    worlds.trip(store)
    store.session("other", agent="else").save({}, tags=["kept"])
    viewer = look(store)
    expect(viewer.find("#known-agents option")).to_have_count(2)
    values = "options => options.map(option => option.value)"
    assert viewer.find("#known-agents option").evaluate_all(values) == ["else", "planner"]
    assert viewer.find("#known-tags option").evaluate_all(values) == ["kept"]
    expect(viewer.find("input[aria-label=Tag]")).to_have_attribute("list", "known-tags")


def test_a_fork_is_called_by_what_its_name_adds(store: holdfast.Store, look: Look) -> None:
    session = worlds.trip(store)
    for name in ("trip-b", "trip-", "elsewhere"):
        session.fork(name, "done")
    viewer = look(store, "s=trip")
    names = viewer.find(".detail-head .chip")
    expect(names).to_have_text(["b", "trip-", "elsewhere"])
    viewer.page.wait_for_function("""() => {
        const chip = document.querySelector(".row .chip");
        const whole = chip.getBoundingClientRect();
        const words = chip.querySelector("span").getBoundingClientRect();
        return words.width > 0 && whole.right - words.right < 10;  // no empty tail
    }""")


def test_a_short_name_is_not_cut(store: holdfast.Store, look: Look) -> None:
    trip = worlds.trip(store)
    trip.fork("trip-b", "flight found")
    trip.fork("another way to get there, which is long", "flight found")
    viewer = look(store, "s=trip")
    names = viewer.row("flight found").locator(".chip span")
    expect(names).to_have_count(2)
    short, long = names.first, names.last
    cut = "span => span.scrollWidth > span.clientWidth"
    assert (short.inner_text(), short.evaluate(cut)) == ("b", False)
    assert long.evaluate(cut)


def test_who_chooses_a_session_while_it_loads_waits_for_it(
    store: holdfast.Store, look: Look
) -> None:
    worlds.trip(store)
    viewer = look(store)
    expect(viewer.rows).to_have_count(9)  # nothing that this page asks for is still to come
    held: list[Route] = []
    viewer.page.route("**/api/log?*", lambda route: held.append(route))  # noqa: PLW0108
    viewer.open()
    viewer.find(".session").first.click()
    expect(viewer.find(".stage [role=status]")).to_have_text("Loading…")
    viewer.page.route("**/api/log?*", lambda route: route.continue_())
    for route in held:
        route.continue_()
    expect(viewer.rows).to_have_count(9)


def test_the_keyboard_steps_and_switches_branches(store: holdfast.Store, look: Look) -> None:
    worlds.trip(store)
    viewer = look(store, "s=trip")
    expect(viewer.chosen).to_contain_text("done")
    viewer.press("ArrowDown")
    expect(viewer.chosen).to_contain_text("steered")
    viewer.press("ArrowUp", "ArrowUp")
    expect(viewer.chosen).to_contain_text("done")
    viewer.press("]")
    expect(viewer.chosen).to_contain_text("forgot everything")
    expect(viewer.find(".detail-head")).to_contain_text("oops")
    viewer.press("[")
    expect(viewer.chosen).to_contain_text("done")
    viewer.press("End")
    expect(viewer.chosen).to_contain_text("asked")
    viewer.press("h")
    expect(viewer.chosen).to_contain_text("done")
    viewer.press("?")
    expect(viewer.dialog).to_contain_text("the next branch")
    viewer.press("ArrowDown")
    expect(viewer.chosen).to_contain_text("done")
    viewer.press("Escape", "/")
    expect(viewer.find("input[type=search]")).to_be_focused()


def test_rows_lie_on_the_lanes_of_their_branches(store: holdfast.Store, look: Look) -> None:
    session = worlds.trip(store)
    session.fork("cheaper", "flight found")
    viewer = look(store, "s=trip")
    expect(viewer.find(".row .node.head")).to_have_count(1)
    expect(viewer.row("forgot everything").locator(".node:not(.hot)")).to_have_count(1)
    expect(viewer.row("flight found").locator(".lane:not(.hot)")).to_have_count(1)  # they meet here
    expensive = viewer.row("8k").locator(".bar.tokens .fill")
    assert expensive.evaluate("fill => fill.style.width") == "100%"
    viewer.row("flight found").locator(".chip").click()
    expect(viewer.find("h1")).to_have_text("cheaper")
    viewer.find(".row.aside .chip").click()
    expect(viewer.find("h1")).to_have_text("trip")
    expect(viewer.chosen).to_contain_text("flight found")


def test_what_was_pruned_is_told(store: holdfast.Store, look: Look) -> None:
    session = store.session("s")
    session.save({"log": []}, label="first")
    for n in range(20):
        session.append("log", n)
    session.prune(Retention(keep_last=5))
    viewer = look(store, "s=s")
    expect(viewer.find(".row.aside")).to_have_text("15 checkpoints pruned")
    expect(viewer.rows).to_have_count(6)


def test_changes_are_told_as_messages_and_words(store: holdfast.Store, look: Look) -> None:
    worlds.trip(store)
    viewer = look(store, "s=trip")
    expect(viewer.panel.locator(".change.added .message")).to_contain_text("The plan is done.")
    expect(viewer.panel.locator(".message strong")).to_have_text("plan")
    viewer.press("ArrowDown")
    edited = viewer.panel.locator(".change", has_text="state.messages[0].content")
    expect(edited.locator("del")).to_have_text(["three", "Lisbon"])
    expect(edited.locator("ins")).to_have_text(["four", "Porto"])
    budget = viewer.panel.locator(".change", has_text="state.plan.budget")
    expect(budget.locator(".was")).to_have_text("900")
    expect(budget.locator(".is")).to_have_text("1200")
    viewer.press("ArrowUp")
    expect(viewer.panel.locator(".change.added")).to_be_visible()
    viewer.press("End")
    expect(viewer.panel.locator(".change.added")).to_have_count(2)
    expect(viewer.panel).to_contain_text("Plan three days in Lisbon.")


def test_blame_leads_to_the_last_change(store: holdfast.Store, look: Look) -> None:
    session = store.session("s")
    session.save({"plan": {"budget": 1}, "other": 0})
    session.patch(set={"plan": {"budget": 2}}, label="raised")
    session.patch(set={"other": 1})
    session.patch(set={"plan": {"budget": 3}}, label="raised again")
    viewer = look(store, "s=s")
    viewer.panel.get_by_role("button", name="state.plan.budget", exact=True).click()
    blame = viewer.find(".blame:not(:empty)")
    expect(blame).to_contain_text("Before this, it changed in step 2, raised")
    expect(blame.locator(".was")).to_have_text("1")
    expect(blame.locator(".is")).to_have_text("2")
    viewer.tab("State").get_by_label("When did state.other last change?").click()
    expect(blame).to_contain_text("Last changed in step 3")
    blame.locator("a").click()
    expect(viewer.chosen.locator(".step")).to_have_text("3")


def test_a_conversation_pairs_calls_with_results(store: holdfast.Store, look: Look) -> None:
    anthropic = [
        said("user", "Look."),
        {"role": "assistant", "content": [
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "it"}},
            {"type": "tool_use", "id": "t2", "name": "touch", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": "blue"},
        ]},
    ]  # fmt: skip
    responses = [
        {"type": "message", "role": "user", "content": [
            {"type": "input_text", "text": "How tall?"},
        ]},
        {"type": "function_call", "call_id": "c1", "name": "search", "arguments": '{"q": "tower"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "330 m"},
    ]  # fmt: skip
    store.session("a").save({"messages": anthropic})
    store.session("r").save({"input": responses})
    worlds.trip(store)
    viewer = look(store, "s=a&t=messages")
    calls = viewer.panel.locator(".call")
    expect(calls).to_have_count(2)
    expect(calls.first).to_contain_text("blue")
    expect(viewer.panel.locator(".call.open")).to_contain_text("touch")
    expect(viewer.panel.locator(".message")).to_have_count(2)
    viewer.open("s=r&t=messages")
    expect(viewer.panel.locator(".call:not(.open)")).to_contain_text("330 m")
    viewer.open("s=trip&t=messages")
    expect(viewer.panel.locator(".call:not(.open)")).to_contain_text("HF 204")


def test_what_a_message_of_another_shape_says_is_shown(store: holdfast.Store, look: Look) -> None:
    gemini = {"role": "model", "parts": [{"text": "said in parts"}]}
    hides = {"role": "unseen", "content": "said by somebody"}
    store.session("s").save({"messages": [gemini, hides, {"role": "user", "content": ""}]})
    viewer = look(store, "s=s&t=messages")
    expect(viewer.panel).to_contain_text("said in parts")
    card = viewer.panel.locator(".message", has_text="said by somebody")
    expect(card).to_have_css("position", "static")  # a role is no name of ours
    expect(viewer.panel.locator(".message.user")).to_contain_text("empty")


def test_nothing_stands_out_of_a_dialog(store: holdfast.Store, look: Look) -> None:
    store.session("s" * 300).save({"n": 1}, label="l" * 200)
    viewer = look(store, f"s={'s' * 300}")
    for key in ("f", "l"):
        expect(viewer.dialog).to_have_count(0)
        expect(viewer.chosen).to_be_visible()
        viewer.press(key)
        expect(viewer.dialog).to_be_visible()
        assert viewer.dialog.evaluate("dialog => dialog.scrollWidth <= dialog.clientWidth")
        viewer.press("Escape")


def test_ages_go_on(store: holdfast.Store, look: Look) -> None:
    store.session("s").save({"n": 1})
    viewer = look(store, "s=s")
    expect(viewer.find(".session .when")).to_contain_text("now")
    viewer.page.clock.install()
    viewer.open("s=s")
    viewer.page.clock.fast_forward("10:00")
    expect(viewer.find(".session .when")).to_have_text("10 min ago")
    expect(viewer.find(".detail-head .facts")).to_contain_text("10 min ago")


def test_long_values_unfold_on_demand(store: holdfast.Store, look: Look) -> None:
    long = "word " * 4_000 + "the end"
    store.session("s").save({"messages": [said("user", long)], "big": 2**60 + 1})
    viewer = look(store, "s=s&t=messages")
    expect(viewer.panel).not_to_contain_text("the end")
    viewer.panel.get_by_role("button", name="Show all").click()
    expect(viewer.panel).to_contain_text("the end")
    expect(viewer.tab("State").locator(".leafrow", has_text="big")).to_contain_text(str(2**60 + 1))


def test_the_state_opens_like_a_tree(store: holdfast.Store, look: Look) -> None:
    store.session("s").save({"list": list(range(250)), "deep": {"er": {"leaf": "green"}}})
    viewer = look(store, "s=s&t=state")
    viewer.panel.locator("summary", has_text="deep").click()
    viewer.panel.locator("summary", has_text="er").last.click()
    expect(viewer.panel).to_contain_text("green")
    viewer.panel.locator("summary", has_text="list").click()
    viewer.panel.get_by_role("button", name="150 more").click()
    viewer.panel.get_by_role("button", name="50 more").click()
    expect(viewer.panel.locator(".leafrow .key.index")).to_have_count(250)


def test_usage_is_drawn_and_can_be_read(store: holdfast.Store, look: Look) -> None:
    session = store.session("s")
    for n in range(1, 11):
        session.save({"n": n}, usage=Usage(tokens=100, cost=0.5))
    viewer = look(store, "s=s&t=usage")
    expect(viewer.find(".series svg")).to_have_count(3)
    expect(viewer.find(".reading")).to_contain_text("1,000 tokens")
    viewer.press("End")
    expect(viewer.find(".reading")).to_contain_text("100 tokens")
    box = viewer.find(".series svg").first.bounding_box()
    assert box is not None
    viewer.page.mouse.move(box["x"] + box["width"] - 1, box["y"] + 5)
    expect(viewer.find(".reading")).to_contain_text("$5.00")


def test_a_damaged_checkpoint_is_shown_and_its_neighbours_work(sqlite: Home, look: Look) -> None:
    session = sqlite.session()
    for n in range(5):
        session.save({"messages": [said("user", f"message {m}") for m in range(n + 1)]})
    sqlite.spoil_checkpoint(3)
    viewer = look(sqlite.store, "s=s")
    viewer.press("ArrowDown", "ArrowDown")
    expect(viewer.find(".row.broken.chosen")).to_be_visible()
    expect(viewer.panel).to_contain_text("cannot be read")
    viewer.press("ArrowDown")
    expect(viewer.panel).to_contain_text("message 1")
    expect(viewer.tab("Integrity")).to_contain_text("every byte of it matches")


def test_a_line_goes_on_below_a_damaged_checkpoint(sqlite: Home, look: Look) -> None:
    session = sqlite.session()
    for n in range(6):
        session.save({"n": n}, label=f"save {n}")
    session.tag("save 3", "kept")
    sqlite.spoil_checkpoint(4)
    viewer = look(sqlite.store, "s=s")
    expect(viewer.rows).to_have_count(6)
    expect(viewer.find(".row.beside")).to_have_count(0)
    expect(viewer.find(".timeline-pane h1 + .quiet")).to_have_text("6 checkpoints")
    viewer.row("save 1").click()
    expect(viewer.chosen).to_contain_text("save 1")
    viewer.press("r")
    expect(viewer.dialog).to_contain_text("The head moves back 4 steps, to step 2.")
    viewer.press("Escape")
    viewer.find(".row.broken").click()
    panel = viewer.tab("Integrity")
    for text in ("do not match", "save 3", "kept", "checkpoint 4 tagged"):
        expect(panel).to_contain_text(text)
    expect(panel.locator(".chain li")).to_have_count(3)
    panel.locator("dd a").first.click()
    expect(viewer.chosen).to_contain_text("save 2")


def test_what_the_server_refuses_is_told_with_its_hint(store: holdfast.Store, look: Look) -> None:
    store.session("s").save({"n": 1})
    viewer = look(store, "s=s&t=messages")
    expect(viewer.panel.locator(".problem")).to_contain_text("no list of messages")
    expect(viewer.panel.locator(".problem")).to_contain_text("its State shows what it has")
    viewer.open("s=nobody")
    expect(viewer.find(".stage .problem")).to_contain_text("there is no session 'nobody'")
    viewer.excuse("404")


def test_compare_two_checkpoints(store: holdfast.Store, look: Look) -> None:
    worlds.trip(store)
    viewer = look(store, "s=trip")
    expect(viewer.chosen).to_contain_text("done")
    viewer.press("c", "]", "ArrowDown")
    expect(viewer.find(".row.marked")).to_contain_text("done")
    expect(viewer.chosen).to_contain_text("8k")
    viewer.press("c")
    compare = viewer.find(".compare")
    expect(compare.locator(".heads")).to_contain_text("2 steps since they parted: –")
    expect(compare.locator(".heads")).to_contain_text("3 steps since they parted: 12k tok · $0.6")
    expect(compare.locator(".parting")).to_contain_text(
        "B used 12k tokens more than A, and cost $0.60 more"
    )
    ways = compare.locator(".heads .side")
    expect(ways.first.locator("li")).to_contain_text(["done", "steered"])
    expect(ways.last.locator("li .step")).to_have_text(["6", "5", "4"])
    viewer.page.get_by_role("button", name="Swap").click()
    expect(compare.locator(".parting")).to_contain_text(
        "12k tokens less than A, and cost $0.60 less"
    )
    viewer.page.go_back()
    expect(compare.locator(".parting")).to_contain_text("12k tokens more")
    edited = compare.locator(".change", has_text="state.messages[0].content")
    expect(edited.locator(".before del")).to_have_text(["four", "Porto"])
    expect(edited.locator(".after ins")).to_have_text(["three", "Lisbon"])
    address = viewer.page.url
    viewer.press("Escape")
    expect(compare).to_be_hidden()
    viewer.open(address.partition("#")[2])
    expect(compare.locator(".parting")).to_contain_text("Common ancestor")


def test_a_mark_stays_and_two_sessions_are_compared(store: holdfast.Store, look: Look) -> None:
    """The mark went with the session, and a swap looked for A in the session of B."""
    worlds.trip(store)
    other = store.session("other")
    for n in range(2):
        other.save({"n": n}, label=f"other {n}")
    viewer = look(store, "s=other")
    expect(viewer.chosen).to_contain_text("other 1")
    viewer.press("c")
    expect(viewer.find(".row.marked")).to_contain_text("other 1")
    viewer.find(".session", has_text="trip").click()
    expect(viewer.chosen).to_contain_text("done")
    viewer.press("c")
    sides = viewer.find(".compare .side")
    expect(sides).to_contain_text(["other 1", "done"])
    expect(sides).to_contain_text(["2 steps", "5 steps"])
    viewer.page.get_by_role("button", name="Swap").click()
    expect(sides).to_contain_text(["done", "other 1"])
    expect(viewer.find("h1")).to_have_text("other")
    expect(viewer.chosen).to_contain_text("other 1")
    viewer.press("Escape")
    expect(viewer.find(".compare")).to_be_hidden()
    expect(viewer.find(".row.marked")).to_have_count(0)


def test_escape_takes_the_filter_away_with_the_text(store: holdfast.Store, look: Look) -> None:
    worlds.trip(store)
    store.session("other").save({})
    viewer = look(store, "s=trip")
    viewer.press("/")
    viewer.find("input[type=search]").fill("oth")
    expect(viewer.find(".session")).to_have_count(1)
    viewer.press("Escape")
    expect(viewer.find("input[type=search]")).to_have_value("")
    expect(viewer.find(".session")).to_have_count(2)
    assert "q=" not in viewer.page.url


def test_what_is_active_is_in_sight_of_many_sessions(memory: Home, look: Look) -> None:
    for n in range(230):
        memory.session(f"s{n:03}").save({"n": n})
    memory.session("working").save({"n": 1})
    memory.session("s007").save({"n": 2})
    viewer = look(memory.store)
    expect(viewer.find("h1")).to_have_text("s007")
    expect(viewer.find(".session .name").nth(1)).to_have_text("working")
    expect(viewer.find(".session")).to_have_count(200)
    viewer.page.get_by_role("button", name="More sessions").click()
    expect(viewer.find(".session")).to_have_count(231)


def test_bars_are_to_the_scale_of_the_whole_session(memory: Home, look: Look) -> None:
    session = memory.session("s")
    session.save({}, usage=Usage(tokens=10_000, cost=4.0))
    for n in range(250):
        session.save({"n": n}, usage=Usage(tokens=1_000, cost=0.4))
    viewer = look(memory.store, "s=s")
    for kind in ("tokens", "cost"):
        fill = viewer.chosen.locator(f".bar.{kind} .fill")
        expect(fill).to_have_attribute("style", "width: 10%;")


def test_ids_and_bytes_are_as_the_command_line_has_them(store: holdfast.Store, look: Look) -> None:
    made = store.session("s").save({"data": bytes(400), "less": bytes(401), "one": b"x"})
    viewer = look(store, "s=s&t=state")
    expect(viewer.find(".detail-head .copy").first).to_have_text(made.id[:12])
    assert store.get(made.id[:12]).id == made.id
    for name, told in (("data", "bytes(400)"), ("less", "bytes(401)"), ("one", "bytes(1)")):
        expect(viewer.panel.locator(".leafrow", has_text=name)).to_contain_text(told)


def test_a_key_counts_right_after_a_dialog(store: holdfast.Store, look: Look) -> None:
    """The field of the closed dialog has the focus for a moment, and the key was taken for text."""
    worlds.trip(store)
    viewer = look(store, "s=trip")
    expect(viewer.chosen).to_be_visible()
    viewer.press("f")
    viewer.dialog.evaluate("""dialog => {
        const input = dialog.querySelector("input");
        dialog.close();
        input.dispatchEvent(new KeyboardEvent("keydown", { key: "l", bubbles: true }));
    }""")
    expect(viewer.dialog).to_contain_text("The label takes the place of")


def test_search_finds_labels_tags_and_messages(store: holdfast.Store, look: Look) -> None:
    worlds.trip(store)
    store.session("other", agent="else").save({"messages": [said("user", "parcel 4711")]})
    viewer = look(store, "s=other")
    viewer.press("/")
    for text, found in (
        ("flight found", "flight found"), ("FLIGHT F", "flight found"), ("huma", "steered"),
        ("4711", "other"),
    ):  # fmt: skip
        viewer.find("input[type=search]").fill(text)
        expect(viewer.find(".hit").first).to_contain_text(found)
    viewer.find("input[type=search]").fill("four days")
    expect(viewer.find(".hit")).to_have_count(1)  # the one that brought it
    expect(viewer.find(".hit")).to_contain_text("steered")
    expect(viewer.find(".hit .excerpt")).to_have_text("Plan four days in Porto.")
    expect(viewer.find(".hit mark")).to_have_text("four days")
    viewer.find("input[type=search]").fill("forgot everything")
    viewer.find(".hit", has_text="forgot everything").first.click()
    expect(viewer.find("h1")).to_have_text("trip")
    expect(viewer.chosen).to_contain_text("forgot everything")
    store.session("noted").save({}, label="by a note", meta={"user": "u1", "floor": 2})
    for text in ("floor=2", "u1"):
        viewer.find("input[type=search]").fill(text)
        expect(viewer.find(".found [role=status]")).to_have_count(0)
        expect(viewer.find(".hit")).to_have_count(1)
        expect(viewer.find(".hit")).to_contain_text("by a note")
    viewer.find("input[aria-label=Tag]").fill("human")
    expect(viewer.find(".found")).to_contain_text("No label, tag, metadata or message")
    viewer.find("input[aria-label=Tag]").fill("")
    viewer.find("input[type=search]").fill("")
    viewer.find("input[aria-label=Agent]").fill("else")
    expect(viewer.find(".session")).to_have_count(1)
    expect(viewer.find(".session")).to_contain_text("other")
    assert "agent=else" in viewer.page.url


def test_the_address_holds_the_view(store: holdfast.Store, look: Look) -> None:
    worlds.trip(store)
    store.session("other").save({"n": 1})
    viewer = look(store, "s=trip")
    viewer.row("steered").click()
    viewer.tab("State")
    expect(viewer.panel).to_contain_text("encoded")
    viewer.find(".session", has_text="other").click()
    expect(viewer.find("h1")).to_have_text("other")
    viewer.page.go_back()
    expect(viewer.find("h1")).to_have_text("trip")
    expect(viewer.chosen).to_contain_text("steered")
    expect(viewer.find("[role=tab][aria-selected=true]")).to_have_text("State")
    viewer.page.go_forward()
    expect(viewer.find("h1")).to_have_text("other")
    viewer.page.go_back()
    viewer.page.reload()
    expect(viewer.chosen).to_contain_text("steered")
    expect(viewer.find("[role=tab][aria-selected=true]")).to_have_text("State")


def test_the_theme_is_remembered(store: holdfast.Store, look: Look) -> None:
    store.session("s").save({"n": 1})
    viewer = look(store, page={"color_scheme": "dark"})
    background = "getComputedStyle(document.body).backgroundColor"
    dark = viewer.page.evaluate(background)
    viewer.page.get_by_role("button", name="Light or dark").click()
    assert viewer.page.evaluate(background) != dark
    viewer.open()
    assert viewer.page.evaluate(background) != dark


def test_below_a_path(store: holdfast.Store, look: Look) -> None:
    store.session("s").save({"messages": [said("user", "deep down")]})
    viewer = look(store, "s=s", below="some/where")
    expect(viewer.panel).to_contain_text("deep down")


# -- a lot of it -----------------------------------------------------------------------------------


def test_twenty_thousand_checkpoints_are_few_rows(memory: Home, look: Look) -> None:
    session = memory.session("long")
    session.save({"messages": []}, label="the very first")
    for n in range(1, 20_000):
        if n % 2:
            session.append("messages", said("user", f"message {n}"))
        else:
            session.patch(set={"n": n})
    viewer = look(memory.store, "s=long")
    asked: list[str] = []
    viewer.page.on("request", lambda r: asked.append(r.url) if "api/log" in r.url else None)
    expect(viewer.find(".timeline-pane h1 + .quiet")).to_have_text("20,000 checkpoints")
    most = 0
    for part in (0.1, 0.5, 0.25, 1):
        viewer.find(".rows").evaluate(
            "(rows, part) => rows.scrollTop = rows.scrollHeight * part", part
        )
        expect(viewer.rows.first).to_be_visible()
        expect(viewer.find(".row.awaited")).to_have_count(0)
        most = max(most, viewer.find(".row").count())
    expect(viewer.row("the very first")).to_be_visible()
    assert 20 < most < 300
    assert len(asked) < 12  # what lies between was left out, but for a page around each place
    expect(viewer.find(".row.beside")).to_have_count(0)
    first = session.get("the very first").id
    asked.clear()
    viewer.open(f"s=long&c={first}")
    expect(viewer.chosen).to_contain_text("the very first")
    expect(viewer.chosen).to_be_in_viewport()
    expect(viewer.find(".timeline-pane h1 + .quiet")).to_have_text("20,000 checkpoints")
    assert len(asked) < 6
    viewer.press("r")
    expect(viewer.dialog).to_contain_text("The head moves back 19,999 steps, to step 1.")
    viewer.press("Escape")
    viewer.press("ArrowUp", "ArrowUp")
    expect(viewer.chosen.locator(".step")).to_have_text("3")
    viewer.row("the very first").click()
    expect(viewer.panel).to_contain_text("The first checkpoint")
    viewer.press("h")
    viewer.tab("Messages")
    expect(viewer.panel).to_contain_text("message 19999")
    viewer.panel.get_by_role("button", name="Show earlier ones").click()
    expect(viewer.panel).to_contain_text("message 19705")
    assert viewer.panel.locator(".message").count() == 150


def test_an_address_deep_in_the_past_is_reached(memory: Home, look: Look) -> None:
    session = memory.session("long")
    session.save({"log": []})
    old = session.append("log", 0, label="long ago")
    for n in range(1500):
        session.append("log", n)
    viewer = look(memory.store, f"c={old.id}")
    expect(viewer.find("h1")).to_have_text("long")
    expect(viewer.chosen).to_contain_text("long ago")
    expect(viewer.chosen).to_be_in_viewport()


def test_what_lies_on_branches_is_not_left_out(memory: Home, look: Look) -> None:
    session = memory.session("long")
    first = session.save({"log": []}, label="first")
    for n in range(1200):
        session.append("log", n)
    middle = session.append("log", "middle", label="middle")
    for n in range(1200):
        session.append("log", n)
    session.rewind(middle.id)
    for n in range(1200):
        session.append("log", n)
    viewer = look(memory.store, f"s=long&c={first.id}")
    expect(viewer.chosen).to_contain_text("first")
    heading = viewer.find(".timeline-pane h1 + .quiet")
    expect(heading).to_have_text("3,602 checkpoints, 2 branches")
    viewer.press("r")
    expect(viewer.dialog).to_contain_text("The head moves back 2,401 steps, to step 1.")


# -- a phone ---------------------------------------------------------------------------------------


def test_on_a_phone_one_pane_follows_the_other(store: holdfast.Store, look: Look) -> None:
    worlds.trip(store)
    viewer = look(store)
    viewer.page.set_viewport_size({"width": 390, "height": 844})
    viewer.open()
    panes = {name: viewer.find(f".{name}") for name in ("sessions-pane", "timeline-pane", "detail")}

    def only(name: str) -> None:
        for each, pane in panes.items():
            expect(pane).to_be_visible(visible=each == name)
        width = viewer.page.evaluate("document.documentElement.scrollWidth")
        assert width <= 390

    only("sessions-pane")
    viewer.find(".session").click()
    only("timeline-pane")
    viewer.row("steered").click()
    only("detail")
    expect(viewer.panel).to_contain_text("state.plan.budget")
    viewer.page.get_by_role("button", name="Timeline").click()
    only("timeline-pane")
    viewer.page.get_by_role("button", name="Back to the sessions").click()
    only("sessions-pane")
    viewer.page.go_back()
    only("timeline-pane")
