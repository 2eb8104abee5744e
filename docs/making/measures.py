"""The README's table of measurements, out of docs/benchmarks.md."""

import re
from typing import NamedTuple


class Row(NamedTuple):
    """A line of the table, and where its numbers stand."""

    title: str
    measure: str
    """How the measure begins in docs/benchmarks.md."""
    pattern: str
    """Of its result; the groups are named after the columns."""
    plain: str = "{plain}"
    """How the last column says it."""


ROWS = (
    Row(
        "disk, a conversation saved in full at each step",
        "Disk after 2,000 full-state saves",
        r"(?P<holdfast>[\d.]+ ×) \(.*?\); peer after (?P<n>[\d,]+): (?P<peer>[\d,.]+ ×)",
    ),
    Row(
        "disk, 200 real agent runs, a checkpoint at every message",
        "200 real runs",
        r"\((?P<holdfast>[\d.]+ MB); peer (?P<peer>[\d.]+ MB)\).* 1/(?P<plain>[\d.]+)",
        "{plain} × holdfast's",
    ),
    Row(
        "time for these runs",
        "The same 200 real runs: total time",
        r"\((?P<holdfast>[\d.]+ [µm]?s); peer (?P<peer>[\d.]+ [µm]?s)\).*dicts (?P<plain>[\d.]+) ×",
        "holdfast takes {plain} × as long",
    ),
    Row(
        "time to save 1,000 messages, one of them new",
        "`save` of a full 1,000-message state, one message new",
        r"faster \((?P<holdfast>[\d.]+ [µm]?s); peer (?P<peer>[\d.]+ [µm]?s)\)"
        r".*\), (?P<plain>[\d.]+ [µm]?s)",
    ),
    Row(
        "time to load them, every digest checked",
        "`load()` of 1,000 messages, digests checked",
        r"its time \((?P<holdfast>[\d.]+ [µm]?s); peer (?P<peer>[\d.]+ [µm]?s)\)"
        r".*\), (?P<plain>[\d.]+ [µm]?s)",
    ),
    Row(
        "time to save a state of 10 messages",
        "`save` of a 10-message state",
        r"\((?P<holdfast>[\d.]+ [µm]?s); peer (?P<peer>[\d.]+ [µm]?s)\).*dicts (?P<plain>[\d.]+) ×",
        "holdfast takes {plain} × as long",
    ),
    Row(
        "time to list the history",
        "`history()` of 10,900 checkpoints",
        r"\((?P<holdfast>[\d.]+ [µm]?s); peer (?P<peer>[\d.]+ [µm]?s)\)"
        r".*, (?P<plain>[\d.]+ [µm]?s)",
    ),
)
STEP = Row(
    "time of a durable step",
    "A durable step, p50, against one of DBOS",
    r"\((?P<holdfast>[\d.]+ [µm]?s); DBOS (?P<peer>[\d.]+ [µm]?s)\)",
)


def table(benchmarks: str) -> str:
    """Markdown; ValueError where docs/benchmarks.md has no such numbers any more."""
    results = [
        (cells[0].strip(), cells[2].strip())
        for line in benchmarks.splitlines()
        if len(cells := line.strip().strip("|").split("|")) == 4
    ]
    lines = [
        "| On SQLite, with `synchronous=FULL` | holdfast | LangGraph | LangGraph, plain dicts |",
        "|---|---|---|---|",
    ]
    for row in ROWS:
        found = _numbers(row, results)
        more = {"Disk": " (of its JSON)"}.get(row.measure[:4], "")
        counts = _counts(row, found)
        plain = row.plain.format_map(found) if "plain" in found else "–"
        lines.append(
            f"| {row.title} | {found['holdfast']}{more}{counts[0]} "
            f"| {found['peer']}{more}{counts[1]} | {plain} |"
        )
    step = _numbers(STEP, results)
    judged = [line.rstrip("| ")[-1] for line in benchmarks.splitlines() if line.startswith("| ")]
    missed, met = judged.count("✗"), judged.count("✓")
    return "\n".join(lines) + (
        f"\n\nA durable step took {step['holdfast']}, one of DBOS on SQLite {step['peer']}. "
        f"Of the {missed + met} bars that the project has set itself,\nit meets {met} and misses "
        f"{missed}; [benchmarks](docs/benchmarks.md) has all of them, with their conditions. "
        "`make bench`\nmeasures again."
    )


def _counts(row: Row, found: dict[str, str]) -> tuple[str, str]:
    """How many there were, where that is not the same on both sides."""
    if "n" in found:
        return f", {_first_number(row.measure)} steps", f", {found['n']} steps"
    if row.measure.startswith("`history()`"):
        return f", {_first_number(row.measure)} checkpoints", ", 1,000 checkpoints"
    return "", ""


def _first_number(text: str) -> str:
    found = re.search(r"\d[\d,]*", text)
    if found is None:
        raise ValueError(f"no number in {text!r}")
    return found[0]


def _numbers(row: Row, results: list[tuple[str, str]]) -> dict[str, str]:
    for measure, result in results:
        if measure.startswith(row.measure) and (found := re.search(row.pattern, result)):
            return {name: text for name, text in found.groupdict().items() if text is not None}
    raise ValueError(f"docs/benchmarks.md does not say, as it did: {row.title}")
