"""Specs from YAML files (`--order FILE`), with the file and line of whatever is wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from storage_engine.errors import ConfigurationError
from storage_engine.spark.ingest_spec import IngestSpec
from storage_engine.spark.spec_checks import InvalidSpec, no_mapping, texts_as_names

_LEADING_NAME = re.compile(r"[a-z_]+(\.\w+)*")  # a problem begins with the member that is wrong


@dataclass(frozen=True)
class SpecFile:
    """A YAML file, and the lines that its members are on."""

    path: str
    members: dict[str, Any]
    lines: Mapping[tuple[str, ...], int] = field(default_factory=dict)

    def place(self, member: tuple[str, ...], replaced: Sequence[tuple[str, ...]]) -> str:
        """`file:line: ` of a member, or of what it should be in; "" if it is not from the file."""
        for length in range(len(member), 0, -1):
            if member[:length] in replaced:
                return ""
            if member[:length] in self.lines:
                return f"{self.path}:{self.lines[member[:length]]}: "
        return f"{self.path}: "


def parse_spec(
    raw: Any, file: SpecFile | None = None, replaced: Sequence[tuple[str, ...]] = ()
) -> IngestSpec:
    """The spec that a dict states, as YAML gives it. `replaced` are members that are not from
    `file`, though it may have them too."""
    if not isinstance(raw, Mapping):
        raise ConfigurationError(no_mapping("order", IngestSpec, raw))
    try:
        return IngestSpec(**texts_as_names(raw))
    except InvalidSpec as error:
        problems = error.problems
    texts = [
        f"{file.place(_member(path, text), replaced) if file is not None else ''}{text}"
        for path, text in problems
    ]
    raise ConfigurationError("; ".join(texts))


def read_yaml(path: str) -> SpecFile:
    """A YAML file whose document is a mapping."""
    import yaml

    try:
        loader = yaml.SafeLoader(Path(path).read_text(encoding="utf-8"))
        node = loader.get_single_node()
        lines = _located(path, node)
        members = loader.construct_document(node) if node is not None else None
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigurationError(f"{path}:{line}: is not UTF-8") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        raise ConfigurationError(f"{path}:{line}: is not YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path}: is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(members, dict):
        raise ConfigurationError(f"{path}: an order is a mapping of names to values")
    return SpecFile(path, members, lines)


def _located(path: str, node: Any) -> dict[tuple[str, ...], int]:
    lines: dict[tuple[str, ...], int] = {}
    for member, line in _lines(node, ()):
        if member in lines:
            raise ConfigurationError(
                f"{path}:{line}: {'.'.join(member)} is given twice, first in line {lines[member]}"
            )
        lines[member] = line
    return lines


def _lines(node: Any, at: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], int]]:
    """Where each member of a composed document begins, by its path."""
    import yaml

    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            path = (*at, str(key.value))
            yield path, key.start_mark.line + 1
            yield from _lines(value, path)
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            path = (*at, str(number))
            yield path, value.start_mark.line + 1
            yield from _lines(value, path)


def _member(path: tuple[str, ...], text: str) -> tuple[str, ...]:
    """What a problem is about: the name that it begins with says it closest."""
    name = _LEADING_NAME.match(text)
    named = tuple(name.group().split(".")) if name is not None else ()
    return named if len(named) > len(path) and named[: len(path)] == path else path
