"""What a spec is made of: members that are options too, what can be wrong with them, their lines.

A field's `Flag` says how it is given on a command line. All that is wrong with the members of a
spec is told at once (`InvalidSpec`), in sentences that name the member and, where it came from a
YAML file, file and line. Knows nothing of what is specified: that is `ingest_spec`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from storage_engine.config import size_in_bytes
from storage_engine.errors import ConfigurationError

Form = Literal[
    "text",
    "choice",
    "switch",
    "texts",
    "pairs",
    "json",
    "mapping",
    "policies",
    "version",
    "size",
]


@dataclass(frozen=True)
class Flag:
    """How a field is given as an option. The field's description is its help.

    form:    how texts become the value, where the field's type does not tell
    member:  the one of the field's members that this flag gives; `help` is for it alone
    writer:  passed on to `write_type` under the field's name
    sink:    an option of `df.write.format("ontologia")` too, under the name of field or member
    """

    name: str
    group: str
    metavar: str | None = None
    form: Form | None = None
    member: str | None = None
    help: str | None = None
    writer: bool = False
    sink: bool = False


@dataclass(frozen=True)
class SpecOption:
    """A flag with what its field says: `path` is where YAML has it."""

    flag: Flag
    path: tuple[str, ...]
    form: Form
    choices: tuple[str, ...]
    help: str

    @property
    def option(self) -> str:
        return f"--{self.flag.name}"


class Members(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class CheckedMembers(Members):
    """Made by hand it is refused with ConfigurationError, as when it comes from a file."""

    within: ClassVar[str] = ""  # the member of an order that it stands for

    if not TYPE_CHECKING:  # the fields are the signature

        def __init__(self, **members: Any) -> None:
            try:
                super().__init__(**members)
            except ValidationError as error:
                raise InvalidSpec(problems_of(type(self), error)) from None

    def replace(self, **changes: Any) -> Self:
        """The same with other members, checked again."""
        return type(self)(
            **{name: getattr(self, name) for name in type(self).model_fields} | changes
        )


def options_of(model: type[BaseModel], at: tuple[str, ...] = ()) -> Iterator[SpecOption]:
    """Those that the fields of a model declare, in their order, with those of models in it."""
    for name, info in model.model_fields.items():
        path = (*at, info.serialization_alias or name)
        flags = [each for each in info.metadata if isinstance(each, Flag)]
        if not flags and isinstance(info.annotation, type):
            yield from options_of(info.annotation, path)
        for flag in flags:
            whole = path if flag.member is None else (*path, flag.member)
            help = flag.help or info.description or ""
            yield SpecOption(flag, whole, _form(flag, info), choices_of(info), help)


def _form(flag: Flag, info: FieldInfo) -> Form:
    if flag.form is not None:
        return flag.form
    if info.annotation is bool:
        return "switch"
    origins: dict[Any, Form] = {Literal: "choice", Mapping: "pairs", Sequence: "texts"}
    return origins.get(get_origin(info.annotation), "text")


# -- what is wrong -----------------------------------------------------------------------------

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


def bytes_of(text: str) -> int | None:
    """Of `1000` or `256MB`; None for anything else."""
    try:
        return int(text) if text.isdecimal() else size_in_bytes(text)
    except (ValueError, KeyError, IndexError):
        return None


# -- YAML files --------------------------------------------------------------------------------

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


def read_yaml(path: str) -> SpecFile:
    """A YAML file whose document is a mapping."""
    documents = read_yamls(path, path)
    if len(documents) != 1:
        raise ConfigurationError(f"{path}: an order is one mapping of names to values")
    return documents[0]


def read_yamls(path: str, shown: str) -> list[SpecFile]:
    """The documents of a YAML file, each a mapping. `shown` is what messages call the file."""
    import yaml

    documents: list[Any] = []
    located: list[dict[tuple[str, ...], int]] = []
    try:
        parser = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # quicker, where it was built
        loader = parser(Path(path).read_text(encoding="utf-8"))
        while loader.check_node():
            node = loader.get_node()
            located.append(_located(shown, node))
            documents.append(loader.construct_document(node))
    except OSError as error:
        raise ConfigurationError(f"{shown}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigurationError(f"{shown}:{line}: is not UTF-8") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        raise ConfigurationError(f"{shown}:{line}: is not YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{shown}: is not YAML: {' '.join(str(error).split())}") from None
    if not documents or not all(isinstance(members, dict) for members in documents):
        raise ConfigurationError(f"{shown}: an order is a mapping of names to values")
    return [SpecFile(shown, *each) for each in zip(documents, located, strict=True)]


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


def member_of(path: tuple[str, ...], text: str) -> tuple[str, ...]:
    """What a problem is about: the name that it begins with says it closest."""
    name = _LEADING_NAME.match(text)
    named = tuple(name.group().split(".")) if name is not None else ()
    return named if len(named) > len(path) and named[: len(path)] == path else path
