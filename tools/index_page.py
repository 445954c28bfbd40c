"""The README as a package index shows it: its links lead somewhere, or are said as paths of the sources.

An index shows a page by itself, so links to other files of the repository lead nowhere there. The address of the
repository is written once, in ``pyproject.toml`` (``[tool.hatch.metadata.hooks.custom]``); the project's URLs and the
README's links follow from it. Without one, a link becomes its text and the path, and pictures are left out.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

#: A picture or a link to a file of the repository.
_RELATIVE = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<path>(?![a-z]+:|#)[^)\s]+)\)")


def index_page(readme: str, address: str) -> str:
    """The README with links for a page that stands alone.

    Args:
        readme: Markdown.
        address: of the repository, such as "https://github.com/owner/name"; "": there is none.
    """

    def replaced(link: re.Match[str]) -> str:
        picture, text, path = link["picture"], link["text"], link["path"]
        if address:
            return f"{picture}[{text}]({address}/{'raw' if picture else 'blob'}/main/{path})"
        return "" if picture else f"{text} (`{path}`)"

    return re.sub(r"\n{3,}", "\n\n", _RELATIVE.sub(replaced, readme))


def urls(address: str) -> dict[str, str]:
    """The project's URLs, by what an index calls them; none without an address."""
    if not address:
        return {}
    return {
        "Homepage": address,
        "Documentation": f"{address}/blob/main/docs/en/index.md",
        "Changelog": f"{address}/blob/main/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }


class IndexPage(MetadataHookInterface):
    """Gives the built package its README and its URLs."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Hatchling's hook: set the fields that ``pyproject.toml`` calls dynamic."""
        address = str(self.config.get("address", "")).rstrip("/")
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": index_page(readme, address)}
        metadata["urls"] = urls(address)
