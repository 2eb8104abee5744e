"""Generated parts of a page, between two marks."""

import re


def put(page: str, name: str, text: str) -> str:
    """Return the page with `text` between the marks of that name."""
    start, end = f"<!-- {name}: made by docs/making -->", f"<!-- {name}: end -->"
    pattern = re.compile(f"{re.escape(start)}.*{re.escape(end)}", re.DOTALL)
    if len(pattern.findall(page)) != 1:
        raise ValueError(f"the page must have the marks of {name} once")
    return pattern.sub(lambda _: f"{start}\n\n{text.strip()}\n\n{end}", page)
