"""Sphinx: builds the site of `make docs` from these pages.

The pages are plain Markdown, read on a forge as well, so links to files of the repository are
relative paths. The site holds the pages of this folder alone: other links become the file's path.
"""

from __future__ import annotations

import gc
import importlib.metadata
import os
import re
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.util import logging

gc.disable()  # searching the pages' trees for garbage takes a third of a build; they fit in 0.5 GB

REPOSITORY = Path(__file__).resolve().parents[1]
DOCS = Path(__file__).resolve().parent
OUTWARD_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)#\s]*)(?:#[^)\s]*)?\)")

project = "DLion"
release = importlib.metadata.version("dlion")
extensions = ["myst_parser"]
myst_heading_anchors = 3
smartquotes = False  # text stays as it is typed: options begin with two hyphens
html_theme = "furo"
html_title = f"DLion {release}"
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False


def replace_outward_links(_: Sphinx, page: str, source: list[str]) -> None:
    """Replace links that leave this folder; warn (an error with `-W`) of files that are missing."""
    folder = (DOCS / page).parent

    def replaced(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(folder / link[2]))
        if target.is_relative_to(DOCS):
            return link[0]
        if not (target.exists() and target.is_relative_to(REPOSITORY)):
            logging.getLogger(__name__).warning("no such file: %s", link[2], location=page)
        path = str(target.relative_to(REPOSITORY)) if target.is_relative_to(REPOSITORY) else link[2]
        return f"`{path}`" if link[1].strip("`") == path else f"{link[1]} (`{path}`)"

    source[0] = OUTWARD_LINK.sub(replaced, source[0])


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", replace_outward_links)
