"""What agents write is text: none of it runs in the viewer."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

import holdfast
from tests.support.stores import Home
from tests.web.browser.chromium import Viewer
from tests.web.browser.conftest import Look
from tests.web.browser.worlds import said

pytestmark = pytest.mark.tools("chromium")

HOSTILE = [
    "<script>window.hit = 1</script>",
    "<img src=x onerror='window.hit = 1'>",
    '"><svg onload=window.hit=1>',
    "'-alert(1)-'",
    "javascript:window.hit=1",
    '[a](javascript:window.hit=1) ![b](x" onerror="window.hit=1)',
    "[a](JaVaScRiPt:window.hit=1) <javascript:window.hit=1> [d](data:text/html,<script>)",
    "{{constructor.constructor('window.hit=1')()}} ${window.hit=1}",
    "</textarea></title></style><iframe srcdoc='<script>parent.hit=1</script>'>",
    "__proto__", "constructor", "\u202e right to left", "\0 nul \u2028 separator",
]  # fmt: skip


OPENED = "panel => { for (const each of panel.querySelectorAll('details')) each.open = true; }"


def hostile_state(text: str) -> dict:
    return {
        "messages": [
            said("user", text), said(text, text), {"role": "assistant", "name": text, "content": [
                {"type": "text", "text": text}, {"type": "thinking", "thinking": text},
                {"type": text, "text": text},
                {"type": "tool_use", "id": text, "name": text, "input": {text: text}},
                {"type": "image", "source": {"type": "base64", "media_type": text, "data": text}},
                {"type": "image_url", "image_url": {"url": f"javascript:{text}"}},
                {"type": "image_url", "image_url": {"url": f"data:text/html,{text}"}},
            ]},
            {"role": "tool", "tool_call_id": text, "content": f"```{text}\n{text}\n```"},
            said("assistant", f"```{text}\n{text}\n```\n# {text}\n- {text}\n> {text}"),
        ],
        text: {text: [text, {text: text}]},
    }  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_that_an_agent_writes_runs(memory: Home, look: Look, text: str) -> None:
    store = memory.store
    session = store.session(text, agent=text)
    session.save({"messages": [], text: "before"})
    session.save(
        hostile_state(text), label=text, tags=[text], trigger=text, meta={text: text}, reason=text,
        hint=text, status="failed", pending=[holdfast.ToolCall(text, text, {text: text})],
    )  # fmt: skip
    session.fork(f"fork {text}")
    session.tag(None, f"tag {text}")
    viewer = look(store)
    viewer.find(".session", has=viewer.find(".name", has_text=text)).first.click()
    viewer.find(".session").last.click()
    expect(viewer.rows.first).to_be_visible()
    for name in ("Changes", "Messages", "State", "Usage", "Run", "Integrity"):
        panel = viewer.tab(name)
        expect(panel).not_to_be_empty()
        expect(viewer.find(".panel.waits")).to_have_count(0)
        expect(panel.locator(".problem")).to_have_count(0)
        viewer.panel.evaluate(OPENED)
    viewer.rows.first.locator(".step").click()
    viewer.press("c", "ArrowDown", "c")
    expect(viewer.find(".compare .heads")).to_be_visible()
    viewer.press("Escape", "Escape", "f")
    expect(viewer.dialog).to_be_visible()
    viewer.press("Escape")
    viewer.find("input[type=search]").fill(text)
    expect(viewer.find(".hit").first).to_be_visible()
    check_harmless(viewer)


def check_harmless(viewer: Viewer) -> None:
    assert viewer.page.evaluate("window.hit") is None
    attributes = "[...document.querySelectorAll('*')].flatMap(e => e.getAttributeNames())"
    assert not [name for name in viewer.page.evaluate(attributes) if name.startswith("on")]
    assert viewer.find("iframe, object, embed, base, form[action], body script").count() == 0
    links = "[...document.links].map(link => link.href)"
    assert not [a for a in viewer.page.evaluate(links) if not re.match("https?:", a)]
    images = "[...document.images].map(image => image.src)"
    assert not [a for a in viewer.page.evaluate(images) if not a.startswith("data:image/")]
