"""For mkdocs: what pages say to readers of the repository, said to readers of the site.

A link to a file of the repository that is no page becomes its path: on the site there is nothing
to follow it to. A `\\|` in the code of a table, which other renderers of Markdown need, is `|`.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)#\s]+)(?:#[^)\s]*)?\)")
_CELL = re.compile(r"<td\b.*?</td>", re.S)
_log = logging.getLogger("mkdocs.hooks.docs_hooks")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    docs = Path(config.docs_dir).resolve()
    folder = Path(page.file.abs_src_path).resolve().parent

    def told(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(folder / link[2]))
        if target.is_relative_to(docs):
            return link[0]
        path = target.relative_to(docs.parent)
        if not target.exists():
            _log.warning("%s links to %s, which is not there", page.file.src_uri, path)
        return link[1] if link[1].strip("`") == str(path) else f"{link[1]} (`{path}`)"

    return _LINK.sub(told, markdown)


def on_page_content(html: str, **_: Any) -> str:
    return _CELL.sub(lambda cell: cell[0].replace("\\|", "|"), html)
