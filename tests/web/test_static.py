"""The page's own files keep to what makes them safe, and one script if need be."""

from __future__ import annotations

import json
import re
from collections import Counter
from importlib.resources import files
from pathlib import Path

import pytest

from holdfast.runs.messages import CONVERSATION_PATHS

STATIC = Path(str(files("holdfast.web") / "static"))
MODULES = sorted(STATIC.glob("*.js"))
FORBIDDEN = (
    "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function",
    "setHTML", "createContextualFragment", "DOMParser", "import(",
)  # fmt: skip
TOP_LEVEL = re.compile(
    r"^(?:export )?(?:async )?(?:function|const|let|var|class) +(\w+)", re.MULTILINE
)


def test_the_files_are_there() -> None:
    assert len(MODULES) > 15


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.name)
def test_a_module_keeps_the_rules(module: Path) -> None:
    source = module.read_text()
    assert [word for word in FORBIDDEN if word in source] == []
    assert len(source.splitlines()) < 300
    assert not re.search(r"""["'`]/(?:api|static)""", source), "addresses must be relative"
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)[a-z]", source), "nothing is fetched"
    for line in re.findall(r"^(?:import|export)\b.*", source, re.MULTILINE):
        assert re.fullmatch(
            r'import \{ [\w, ]+ \} from "\./\w+\.js";|export (async )?(function|const|class) .*',
            line,
        )
    made = ("createElement", "createTextNode")
    assert module.name == "dom.js" or not [word for word in made if word in source]


def test_names_are_unique_across_modules() -> None:
    names = Counter(name for module in MODULES for name in TOP_LEVEL.findall(module.read_text()))
    assert len(names) > 100
    assert [name for name, count in names.items() if count > 1] == []


def test_what_is_imported_is_there_and_used() -> None:
    for module in MODULES:
        source = module.read_text()
        for names, other in re.findall(
            r'^import \{ ([\w, ]+) \} from "\./(\w+\.js)";', source, re.MULTILINE
        ):
            there = (STATIC / other).read_text()
            for name in names.split(", "):
                assert re.search(
                    rf"^export (async )?(function|const|class) {name}\b", there, re.MULTILINE
                )
                assert len(re.findall(rf"\b{name}\b", source)) > 1, (module.name, name)


def test_the_page_has_no_script_or_style_of_its_own() -> None:
    page = (STATIC / "index.html").read_text()
    assert not re.search(r"\son\w+=|style=|<style|<script(?![^>]*\ssrc=)", page)
    for address in re.findall(r'(?:src|href)="([^"]*)"', page):
        assert (STATIC.parent / address).is_file()


def test_the_page_looks_for_conversations_where_the_library_does() -> None:
    source = (STATIC / "conversation.js").read_text()
    told = re.search(r"^export const CONVERSATION_PLACES = (.*);$", source, re.MULTILINE)
    assert told is not None
    assert tuple(map(tuple, json.loads(told[1]))) == CONVERSATION_PATHS
