"""Mistakes in the YAML files of a location, all of them at once, each with file and line.

Dagster loads one file after the other and stops at the first that is wrong, and `dg check yaml`
looks at one file for each kind of component. So a component that is to be loaded looks at its own
file first; if that is wrong, at those of all others, and tells everything together.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel, ValidationError

from ontologia_dagster.ingestion.mistakes import Problem, find_mistakes
from storage_engine.errors import ConfigurationError
from storage_engine.spark.spec_members import (
    InvalidSpec,
    SpecFile,
    member_of,
    no_member,
    read_yamls,
)

if TYPE_CHECKING:
    from ontologia_dagster.declaration import OntologyAsset

Render = Callable[[Any], Any]
VALIDATING = "DAGSTER_IS_DEFS_VALIDATION_CLI"  # set by `dg check defs`
_NAMES = ("defs.yaml", "defs.yml", "component.yaml")
_ATTRIBUTES = "attributes"
# In place of what is wrong or missing, so that the rest can be looked at.
_HOLDS = {"unique": "?"}
_STAND_IN = {"source": {"format": "csv", "paths": ["?"]}}


def refuse_mistakes(
    declaration: type[OntologyAsset], folder: Path, root: Path, render: Render
) -> None:
    """ConfigurationError with every mistake of the location, if the file in `folder` has one.

    declaration:  the component, by whose name files say that they are one
    root:         the folder of all definitions
    render:       what makes text of templates, such as `{{ env.BUCKET }}`
    """
    sentences = list(_mistakes(declaration, folder, render))
    if not sentences:
        return
    others = sorted({path.parent for name in _NAMES for path in root.rglob(name)} - {folder})
    for other in others:
        sentences += _mistakes(declaration, other, render)
    count = "1 mistake" if len(sentences) == 1 else f"{len(sentences)} mistakes"
    listed = "\n".join(f"  {sentence}" for sentence in sentences)
    raise ConfigurationError(f"{count} in declared types:\n{listed}")


def _mistakes(declaration: type[OntologyAsset], folder: Path, render: Render) -> Iterator[str]:
    path = next((folder / name for name in _NAMES if (folder / name).is_file()), None)
    if path is None:
        return
    shown = os.path.relpath(path)
    try:
        documents = read_yamls(str(path), shown)
    except ConfigurationError as error:
        yield str(error)
        return
    for document in documents:
        kind = document.members.get("type")
        if not isinstance(kind, str) or kind.rpartition(".")[2] != declaration.__name__:
            continue
        placed = []
        for member, text in _problems(declaration, document.members.get(_ATTRIBUTES), render):
            line = _line(document, (_ATTRIBUTES, *member_of(member, text)))
            placed.append((line, f"{shown}:{line}: {text}"))
        yield from (text for _, text in sorted(placed, key=lambda each: each[0]))


def _line(document: SpecFile, member: tuple[str, ...]) -> int:
    """Of a member, or of what it should be in."""
    while member and member not in document.lines:
        member = member[:-1]
    return document.lines.get(member, 1)


def _problems(declaration: type[OntologyAsset], attributes: Any, render: Render) -> list[Problem]:
    if not isinstance(attributes, dict):
        names = ", ".join(_names(declaration))
        return [((), f"attributes is a mapping of {names}")]
    try:
        rendered = render(attributes) if _has_template(attributes) else attributes
        given = {str(name): value for name, value in rendered.items()}
    except Exception:  # noqa: BLE001 - a template that cannot be rendered: Dagster says so itself
        return []
    problems: list[Problem] = []
    while True:
        try:
            declared = declaration.model_validate(given)
        except ValidationError as error:
            wrong = [each for each in _in_words(declaration, error) if each not in problems]
            if not wrong:
                return problems  # what is missing cannot be left out
            given = _without(given, wrong)
            problems += wrong
        except ConfigurationError as error:
            return [*problems, ((), str(error))]
        else:
            wrong_members = _members(problems)
            is_plain = not wrong_members & {"source", "columns"}
            with_files = bool(os.environ.get(VALIDATING)) and is_plain
            more = find_mistakes(declared, with_files=with_files)
            told = {member for member, _ in problems}
            return [*problems, *(each for each in more if each[0] not in told)]


def _has_template(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_has_template(each) for pair in value.items() for each in pair)
    if isinstance(value, list):
        return any(_has_template(each) for each in value)
    return isinstance(value, str) and ("{{" in value or "{%" in value)


def _without(given: dict[str, Any], problems: Sequence[Problem]) -> dict[str, Any]:
    """The rest of a declaration, to be looked at without what is known to be wrong."""
    wrong = _members(problems)
    rest = {name: value for name, value in given.items() if name not in wrong}
    expectations = given.get("expectations")
    if "expectations" in wrong and isinstance(expectations, list):
        bad = {member[1] for member, _ in problems if member[:1] == ("expectations",)}
        good = {n: each for n, each in enumerate(expectations) if str(n) not in bad}
        if len(good) < len(expectations):  # each keeps its number, by which its line is found
            rest["expectations"] = [good.get(n, _HOLDS) for n in range(len(expectations))]
    for name, value in _STAND_IN.items():
        if name in wrong or name not in given:
            rest.setdefault(name, value)
    return rest


def _members(problems: Sequence[Problem]) -> set[str]:
    return {member[0] if member else text.partition(" ")[0] for member, text in problems}


def _in_words(declaration: type[BaseModel], error: ValidationError) -> Iterator[Problem]:
    for each in error.errors():
        path = tuple(str(part) for part in each["loc"])
        cause = each.get("ctx", {}).get("error")
        model = _model_at(declaration, path[:-1])
        if isinstance(cause, InvalidSpec):
            for inner, text in cause.problems:
                yield (inner if inner[: len(path)] == path else (*path, *inner)), text
        elif isinstance(cause, Exception):
            yield path, str(cause)
        elif each["type"] == "missing":
            yield path[:-1], f"{'.'.join(path)} is needed"
        elif each["type"] == "extra_forbidden" and model is not None:
            within = ".".join(path[:-1]) or _ATTRIBUTES
            yield path, no_member(within, path[-1], _names(model))
        elif each["type"] == "literal_error":
            allowed = _choices(model, path[-1])
            near = difflib.get_close_matches(str(each["input"]), allowed, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            given = f"not {each['input']!r}{hint}"
            yield path, f"{'.'.join(path)} is one of {', '.join(allowed)}, {given}"
        else:
            yield path, f"{'.'.join(path)}: {each['msg']}, not {each['input']!r}"


def _model_at(model: type[BaseModel], path: Sequence[str]) -> type[BaseModel] | None:
    """The model of a nested member."""
    for name in path:
        field = model.model_fields.get(name)
        kinds = [field.annotation, *get_args(field.annotation)] if field is not None else []
        nested = [k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)]
        if not nested:
            return None
        model = nested[0]
    return model


def _choices(model: type[BaseModel] | None, name: str) -> list[str]:
    for field_name, field in model.model_fields.items() if model is not None else ():
        if name in (field_name, field.serialization_alias):
            return [str(choice) for choice in get_args(field.annotation)]
    return []


def _names(model: type[BaseModel]) -> list[str]:
    return [info.serialization_alias or name for name, info in model.model_fields.items()]
