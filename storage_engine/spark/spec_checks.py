"""What can be wrong with the members of a spec, in sentences that name the member.

All problems of a spec are told at once (`InvalidSpec`); which line of which file they are on is
for `spec_file` to say.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from storage_engine.errors import ConfigurationError

Problem = tuple[tuple[str, ...], str]  # the path of a member, and what is wrong with it


class InvalidSpec(ConfigurationError, ValueError):
    """Members that are wrong, as (path, what is wrong); a ValueError for Pydantic's sake."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self._problems = tuple(problems)
        super().__init__("; ".join(text for _, text in problems))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._problems,)

    @property
    def problems(self) -> tuple[Problem, ...]:
        return self._problems


def problems_of(
    model: type[BaseModel], error: ValidationError
) -> list[tuple[tuple[str, ...], str]]:
    within: str = getattr(model, "within", "")
    problems: list[Problem] = []
    missing: list[str] = []
    for each in error.errors():
        path = tuple(str(part) for part in each["loc"])
        cause = each.get("ctx", {}).get("error")
        if isinstance(cause, InvalidSpec):
            problems += [
                (inner if inner[: len(path)] == path else (*path, *inner), text)
                for inner, text in cause.problems
            ]
        elif each["type"] == "missing":
            missing.append(".".join((within, *path) if within else path))
        elif isinstance(cause, Exception):
            problems.append((path, str(cause)))
        else:
            problems.append((path, _in_words(model, path, each)))
    if missing:
        problems.append(((), f"the order does not say {', '.join(missing)}"))
    return problems


def _in_words(model: type[BaseModel], path: tuple[str, ...], error: Any) -> str:
    within: str = getattr(model, "within", "")
    name, value = ".".join((within, *path) if within else path), error["input"]
    match error["type"]:
        case "extra_forbidden":
            return no_member(within or "order", path[-1], _names(model))
        case "literal_error":
            choices = choices_of(model.model_fields[path[-1]])
            return f"{name} is one of {', '.join(choices)}, not {value!r}"
        case "model_type" | "dict_type":
            nested = model.model_fields[path[-1]].annotation
            return no_mapping(name, nested, value)
        case _:
            return f"{name}: {error['msg']}, not {value!r}"


def _names(model: type[BaseModel]) -> list[str]:
    return [info.serialization_alias or name for name, info in model.model_fields.items()]


def no_mapping(name: str, model: Any, raw: Any) -> str:
    return f"{name} is a mapping of {', '.join(_names(model))}, not {raw!r}"


def no_member(name: str, member: str, members: Sequence[str]) -> str:
    near = difflib.get_close_matches(member, members, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(members)}"
    return f"{name} has no member {member!r}; {hint}"


def choices_of(info: FieldInfo) -> tuple[str, ...]:
    return get_args(info.annotation) if get_origin(info.annotation) is Literal else ()


def unit_of_work(raw: Any) -> tuple[str, int | str] | None:
    if raw is None:
        return None
    members = ("app_id", "version")
    if isinstance(raw, Mapping):
        wrong = [no_member("idempotency", str(key), members) for key in raw if key not in members]
        if wrong:
            raise ValueError("; ".join(wrong))
        raw = (raw.get("app_id"), raw.get("version"))
    if not isinstance(raw, Sequence) or isinstance(raw, str) or len(raw) != 2:
        raise ValueError("idempotency is an app_id and a version")
    app_id, version = raw
    if isinstance(version, date):  # YAML reads dates by itself
        version = version.isoformat()
    if not isinstance(app_id, str) or not app_id:
        raise ValueError(f"idempotency.app_id is a text, not {app_id!r}")
    if isinstance(version, bool) or not isinstance(version, int | str) or version == "":
        raise ValueError(f"idempotency.version is a number or a text, not {version!r}")
    return app_id, version


def named_texts(name: str, raw: Any) -> dict[str, str]:
    """Names to texts. A YAML file may say `header: true` or `sep: 1` and means the text."""
    if raw is None:
        return {}
    if not isinstance(raw, Mapping):
        raise ValueError(f"{name} is a mapping of names to texts, not {raw!r}")
    texts: dict[str, str] = {}
    wrong: list[str] = []
    for key, value in raw.items():
        if not isinstance(key, str) or not key or "=" in key:
            wrong.append(f"{name}: {key!r} is not a name")
        elif not isinstance(value, str | int | float):
            wrong.append(f"{name}.{key} is a text, not {value!r}")
        else:
            texts[key] = str(value).lower() if isinstance(value, bool) else str(value)
    if wrong:
        raise ValueError("; ".join(wrong))
    return texts


def texts_as_names(raw: Mapping[Any, Any]) -> dict[str, Any]:
    """Members by text: YAML reads names such as `on`, `no` and `5` as something else."""
    return {str(name): value for name, value in raw.items()}


def needed_text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} is needed: a text, not {value!r}")
    return value


def optional_text(name: str, value: Any) -> Any:
    if value is not None and (not isinstance(value, str) or not value):
        raise ValueError(f"{name} is a text, not {value!r}")
    return value
