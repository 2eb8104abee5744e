"""Make the README's table of measurements from docs/benchmarks.md."""

import re
from typing import NamedTuple


class Row(NamedTuple):
    """A row of the table, and where to find its numbers.

    The groups of `pattern` are `holdfast` and `peer` (sizes or times), and the peer's multiple of
    holdfast's: `more` if the page gives it, or `less` if the page gives the inverse. `plain_more`
    and `plain_less` are the same for the peer with plain dicts.
    """

    title: str
    measure: str
    """Beginning of the measure in docs/benchmarks.md."""
    pattern: str
    """A regular expression for its result."""


_TIMES = r"\((?P<holdfast>[\d.]+ [µm]?s); peer (?P<peer>[\d.]+ [µm]?s)\)"
_SIZES = r"\((?P<holdfast>[\d.]+ MB); (?:peer )?(?P<peer>[\d.]+ MB)\)"

ROWS = (
    Row(
        "disk, a graph of 1,000 supersteps",
        "LangGraph, 1,000 supersteps, durability sync",
        rf"(?P<more>[\d.]+) × {_SIZES}",
    ),
    Row(
        "disk, 200 real agent runs, a checkpoint at every message",
        "200 real runs",
        rf"1/(?P<more>[\d.]+) {_SIZES}.* 1/(?P<plain_more>[\d.]+)",
    ),
    Row(
        "time for these runs",
        "The same 200 real runs: total time",
        rf"^(?P<less>[\d.]+) × .*{_TIMES}.*dicts (?P<plain_less>[\d.]+) ×",
    ),
    Row(
        "time to save 1,000 messages, one of them new",
        "`save` of a full 1,000-message state, one message new",
        rf"^(?P<more>[\d.]+) × .*{_TIMES}.*dicts (?P<plain_more>[\d.]+) ×",
    ),
    Row(
        "time to load them, every digest checked",
        "`load()` of 1,000 messages, digests checked",
        rf"^(?P<less>[\d.]+) × .*{_TIMES}.*dicts (?P<plain_less>[\d.]+) ×",
    ),
    Row(
        "time to save a state of 10 messages",
        "`save` of a 10-message state",
        rf"^(?P<less>[\d.]+) × .*{_TIMES}.*dicts (?P<plain_less>[\d.]+) ×",
    ),
    Row(
        "time for `get_state_history` of a graph with 900 messages",
        "LangGraph, get_state_history of 900 messages",
        r"1/(?P<more>[\d.]+) \((?P<holdfast>[\d.]+ [µm]?s) / (?P<peer>[\d.]+ [µm]?s)\)",
    ),
)
STEP = Row(
    "time of a durable step",
    "A durable step, p50, against one of DBOS",
    r"\((?P<holdfast>[\d.]+ [µm]?s); DBOS (?P<peer>[\d.]+ [µm]?s)\)",
)


def table(benchmarks: str) -> str:
    """Return the table in Markdown. Raise ValueError if docs/benchmarks.md lacks a number."""
    results = [
        (cells[0].strip(), cells[2].strip())
        for line in benchmarks.splitlines()
        if len(cells := line.strip().strip("|").split("|")) == 4
    ]
    lines = [
        "| SQLite, `synchronous=FULL` | holdfast | LangGraph | LangGraph / holdfast | with dicts |",
        "|---|---|---|---|---|",
    ]
    for row in ROWS:
        found = _numbers(row, results)
        cells = [row.title, found["holdfast"], found["peer"]]
        cells += [_multiple(found, prefix) for prefix in ("", "plain_")]
        lines.append(f"| {' | '.join(cells)} |")
    step = _numbers(STEP, results)
    judged = [line.rstrip("| ")[-1] for line in benchmarks.splitlines() if line.startswith("| ")]
    missed, met = judged.count("✗"), judged.count("✓")
    return "\n".join(lines) + (
        "\n\nA number below 1 means that LangGraph's saver is faster; – means not measured. "
        f"A durable step took {step['holdfast']}; a\nstep of DBOS on SQLite took {step['peer']}. "
        f"The project has set itself {missed + met} limits. It meets {met} and misses {missed}.\n"
        "[Benchmarks](docs/benchmarks.md) lists all of them with their conditions. "
        "`make bench` measures again."
    )


def _multiple(found: dict[str, str], prefix: str) -> str:
    if f"{prefix}more" in found:
        return f"{found[f'{prefix}more']} ×"
    if f"{prefix}less" in found:
        return f"{1 / float(found[f'{prefix}less']):.2f} ×"
    return "–"


def _numbers(row: Row, results: list[tuple[str, str]]) -> dict[str, str]:
    for measure, result in results:
        if measure.startswith(row.measure) and (found := re.search(row.pattern, result)):
            return {name: text for name, text in found.groupdict().items() if text is not None}
    raise ValueError(f"docs/benchmarks.md does not say: {row.title}")
