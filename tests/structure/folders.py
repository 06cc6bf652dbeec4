"""The folder list of `docs/development.md`, read, compared with the tree and brought up to date.

`python -m tests.structure.folders --write` keeps the words of files that are still there, takes
the first sentence of the docstring for new ones, and drops those that are gone.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "development.md"
PACKAGES = ("storage_engine", "ontologia_dagster", "jobs")
_LIST = re.compile(r"(<!-- folders -->\n```\n)(.*?)(\n```\n<!-- end -->)", re.DOTALL)
_LINE = re.compile(r"(?P<indent> *)(?P<name>[\w.]+/?)(?: +(?P<words>.+))?")
_COLUMN = 30


def tree() -> list[str]:
    """Packages (with a slash at their end) and modules, in the order of the list."""
    return [path for package in PACKAGES for path in _below(ROOT / package)]


def _below(folder: Path) -> Iterator[str]:
    yield f"{folder.relative_to(ROOT).as_posix()}/"
    entries = [entry for entry in folder.iterdir() if entry.name != "__pycache__"]
    modules = [entry for entry in entries if entry.suffix == ".py" and entry.stem != "__init__"]
    for module in sorted(modules):
        yield module.relative_to(ROOT).as_posix()
    for package in sorted(entries):
        if package.is_dir() and any(package.rglob("*.py")):
            yield from _below(package)


def listed(page: str) -> dict[str, str]:
    """Path to words, as the page has it."""
    block = _LIST.search(page)
    assert block is not None, "docs/development.md has no list between `folders` and its end"
    paths: dict[str, str] = {}
    above: list[str] = []
    for line in block[2].splitlines():
        match = _LINE.fullmatch(line)
        assert match is not None, f"docs/development.md: not a line of the folder list: {line!r}"
        depth = len(match["indent"]) // 2
        above[depth:] = [match["name"]]
        paths["".join(above)] = match["words"] or ""
    return paths


def with_list(page: str) -> str:
    words = listed(page)
    lines = [_line(path, words.get(path) or _docstring(path)) for path in tree()]
    return _LIST.sub(lambda block: f"{block[1]}{chr(10).join(lines)}{block[3]}", page)


def _line(path: str, words: str) -> str:
    *above, name = path.rstrip("/").split("/")
    start = "  " * len(above) + name + ("/" if path.endswith("/") else "")
    return f"{start:<{_COLUMN}}{words}" if len(start) < _COLUMN else f"{start} {words}"


def _docstring(path: str) -> str:
    file = ROOT / path / "__init__.py" if path.endswith("/") else ROOT / path
    text = ast.get_docstring(ast.parse(file.read_text())) if file.exists() else None
    sentence = re.split(r"(?<=[.:])\s", text or "", maxsplit=1)[0]
    return re.sub(r"\s+", " ", sentence).rstrip(".:")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="bring docs/development.md up to date")
    given = parser.parse_args()
    page = PAGE.read_text()
    words = listed(page)
    for path in tree():
        if not words.get(path):
            print(f"new: {path}")
    for path in words:
        if path not in tree():
            print(f"gone: {path}")
    if given.write:
        PAGE.write_text(with_list(page))


if __name__ == "__main__":
    main()
