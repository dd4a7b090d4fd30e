"""Write the pages of the site into a folder: docs/, with the notebooks of examples/ as pages among them.

    python docs/site.py build/docs

`make docs` runs this and then MkDocs. In the repository, documents link notebooks as files; on the site, as pages. It
needs no packages.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEFT_OUT = ("*.py", "requirements.txt", "__pycache__")


def write_pages(folder: Path) -> None:
    """Write all pages into `folder`, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder, ignore=shutil.ignore_patterns(*LEFT_OUT))
    for page in folder.rglob("*.md"):
        page.write_text(_links_of_the_site(page.read_text(encoding="utf-8")), encoding="utf-8")
    (folder / "notebooks").mkdir()
    for path in sorted((ROOT / "examples").glob("*.ipynb")):
        write_notebook_page(path, folder / "notebooks")


def _links_of_the_site(text: str) -> str:
    """Links to notebooks become links to their pages; what is not part of the site is named without a link."""
    text = re.sub(r"\]\(\.\./examples/([^)]+)\.ipynb\)", r"](notebooks/\1.md)", text)
    return re.sub(r"\[([^\]]+)\]\(\.\./((?:benchmarks|examples)[^)]*|[A-Z]+\.(?:md|cff))\)", r"\1 (`\2`)", text)


def write_notebook_page(path: Path, folder: Path) -> None:
    """Write a notebook as Markdown, and the pictures of its outputs beside it."""
    parts = []
    for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source.replace("](../docs/", "](../").replace(".ipynb)", ".md)"))
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            picture = data.get("image/jpeg")
            if "text/html" in data:
                parts.append("".join(data["text/html"]).replace("\n", ""))
            elif picture:
                file = folder / f"{path.stem}-{number}.jpg"
                file.write_bytes(base64.b64decode(picture))
                parts.append(f"![Output of the lines above]({file.name})")
            else:
                text = output.get("text") or data["text/plain"]
                parts.append(f"```text\n{''.join(text).rstrip()}\n```")
    parts.append(f"*This page is the notebook `examples/{path.name}`, with the outputs of its last run.*")
    (folder / f"{path.stem}.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("Give the folder to write the pages into: python docs/site.py build/docs")
    write_pages(Path(sys.argv[1]))
