"""What mkdocs is told beyond mkdocs.yml: the pages link to examples, which lie beside docs/."""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent.parent


def on_files(files: Files, config: Any) -> Files:
    """The examples become files of the site."""
    for path in sorted((ROOT / "examples").glob("*.py")):
        files.append(File.generated(config, f"examples/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to them lead there."""
    return markdown.replace("](../examples/", "](examples/")
