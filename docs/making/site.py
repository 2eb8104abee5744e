"""A hook for mkdocs. The pages link to examples/, which is outside of docs/."""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent.parent


def on_files(files: Files, config: Any) -> Files:
    """Add the examples to the files of the site."""
    for path in sorted((ROOT / "examples").glob("*.py")):
        files.append(File.generated(config, f"examples/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Change the links to the examples accordingly."""
    for up in ("", "../"):
        markdown = markdown.replace(f"]({up}../examples/", f"]({up}examples/")
    return markdown
