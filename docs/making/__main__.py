"""Write the generated files; `python -m docs.making`."""

from pathlib import Path

from docs.making import commands, measures, openapi, picture
from docs.making.marks import put

from holdfast import __version__

ROOT = Path(__file__).parent.parent.parent
SHOWN = [
    ("docs/writing_a_backend.md", "log_backend"),
    ("docs/recipes/chat.md", "chat_server"),
    ("docs/recipes/approval.md", "approval_agent"),
    ("docs/recipes/approval.md", "approval_webhook"),
]
"""Pages that show a whole example, between marks of its name."""


def made() -> dict[str, str]:
    """Return the content of each generated file, by its path from the root of the project."""
    benchmarks = (ROOT / "docs/benchmarks.md").read_text("utf-8")
    readme = (ROOT / "README.md").read_text("utf-8")
    shapes = (ROOT / "docs/json.md").read_text("utf-8")
    cli = (ROOT / "docs/cli.md").read_text("utf-8")
    cli = put(cli, "commands", commands.reference())
    shown: dict[str, str] = {}
    for page, example in SHOWN:
        text = shown.get(page) or (ROOT / page).read_text("utf-8")
        code = (ROOT / f"examples/{example}.py").read_text("utf-8")
        shown[page] = put(text, example, f"```python\n{code}```")
    return {
        **shown,
        "README.md": put(readme, "measures", measures.table(benchmarks)),
        "docs/cli.md": put(cli, "exit codes", commands.exit_codes()),
        "docs/log.svg": picture.svg(),
        "src/holdfast/web/openapi.json": openapi.text(shapes, __version__),
    }


def main() -> None:
    for path, text in made().items():
        if not (ROOT / path).exists() or (ROOT / path).read_text("utf-8") != text:
            (ROOT / path).write_text(text, "utf-8")
            print(f"{path} has changed")


if __name__ == "__main__":
    main()
