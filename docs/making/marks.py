"""A part of a page that is made, between two comments that say so."""

import re


def put(page: str, name: str, text: str) -> str:
    """The page with `text` between its marks of that name."""
    start, end = f"<!-- {name}: made by docs/making -->", f"<!-- {name}: end -->"
    pattern = re.compile(f"{re.escape(start)}.*{re.escape(end)}", re.DOTALL)
    if len(pattern.findall(page)) != 1:
        raise ValueError(f"the page has not one place for {name}")
    return pattern.sub(lambda _: f"{start}\n\n{text.strip()}\n\n{end}", page)
