"""Writes where this repository is to be had into every notebook: its badge, and what it clones.

The address is `repository` in [project.urls] of pyproject.toml, and nowhere else. Without one a
badge opens Colab's own dialog, and the first cell says that its reader has an address to fill in.

python speedrun/address_notebooks.py
"""

import json
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
COLAB = "https://colab.research.google.com"
UNKNOWN = "ADDRESS"
BADGE = re.compile(r"(?<=colab-badge\.svg\)\]\()[^)]*")
CLONED = re.compile(r"(?<=^%env QAT_REPOSITORY=).*", re.MULTILINE)


def main() -> None:
    """Rewrite the notebooks whose address is another."""
    address = repository()
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        text = path.read_text(encoding="utf-8")
        if (new := addressed(text, path.name, address)) != text:
            path.write_text(new, encoding="utf-8")
            print(f"{path.name}: {address or 'no address'}")


def repository() -> str | None:
    """The repository's address as the project states it; None if it states none."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)["project"].get("urls", {}).get("repository")


def addressed(text: str, name: str, address: str | None) -> str:
    """The notebook `text`, called `name`, as it is when the repository is at `address`."""
    notebook = json.loads(text)
    cells = {cell["id"]: cell for cell in notebook["cells"]}
    for cell_id, pattern, value in (
        ("title", BADGE, badge_link(name, address)),
        ("code", CLONED, address or UNKNOWN),
    ):
        cell = cells[cell_id]
        source = pattern.sub(lambda _, value=value: value, "".join(cell["source"]))
        cell["source"] = source.splitlines(keepends=True)
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def badge_link(name: str, address: str | None) -> str:
    """Return the link that opens a notebook in Colab, or Colab's dialog if it is not on GitHub."""
    place = re.fullmatch(r"https://github\.com/([^/]+/[^/]+?)(\.git)?/?", address or "")
    return f"{COLAB}/github/{place[1]}/blob/main/notebooks/{name}" if place else f"{COLAB}/github"


if __name__ == "__main__":
    main()
