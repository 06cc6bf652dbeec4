"""For mkdocstrings: the lists of arguments in our docstrings, `name:  what it is`, as lists."""

from __future__ import annotations

import re
from typing import Any

import griffe

_NAMED = re.compile(r"^(\w+(?:, \w+)*):\s+(.*)$")


class ArgumentLists(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _with_lists(obj.docstring.value)


def _with_lists(docstring: str) -> str:
    return "\n\n".join(_as_list(paragraph) for paragraph in docstring.split("\n\n"))


def _as_list(paragraph: str) -> str:
    lines = paragraph.split("\n")
    if (
        not all(_NAMED.match(line) or line.startswith("  ") for line in lines)
        or lines[0][:1] == " "
    ):
        return paragraph
    listed = []
    for line in lines:
        if named := _NAMED.match(line):
            names = ", ".join(f"`{name}`" for name in named[1].split(", "))
            listed.append(f"- {names}: {named[2]}")
        else:
            listed.append(f"    {line.strip()}")
    return "\n".join(listed)
