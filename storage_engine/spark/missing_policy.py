"""What becomes of stored rows that a full extract no longer has: `missing: keep | mark`.

There is no delete in the ontology. A source that has one is followed by marking: declared fields
of the rows that it lacks are set, `{active: false, ended_at: now}`, and what was stays readable.

    missing: keep                                      as if they were in it (the default)
    missing: {set: {active: false, ended_at: now}}     marks them: what is set says as much
    missing: {action: mark, set: {...}, limit: 500, scope: "country = 'DE'"}

Nothing here needs Spark: a declaration is checked against its type before any is started.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime, time
from decimal import Decimal, InvalidOperation
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_core import ValidationError as PydanticError

from storage_engine.errors import ConfigurationError
from storage_engine.model.canonical import dumps
from storage_engine.model.field_types import describe
from storage_engine.model.spec import FieldSpec, TypeSpec
from storage_engine.model.validation import say, unknown_name, validator
from storage_engine.spark.spec_members import (
    CheckedMembers,
    InvalidSpec,
    no_mapping,
    optional_text,
    texts_as_names,
)

MissingAction = Literal["keep", "mark"]
NOW = "now"
_TELLS_NOW = ("datetime", "date")


class MissingPolicy(CheckedMembers):
    """Rows that a full extract no longer has."""

    within: ClassVar[str] = "missing"

    action: MissingAction = Field(default="keep", description="keep them, or mark them")
    set: Mapping[str, Any] = Field(
        default_factory=dict,
        description="the fields that mark a row, with their values; now is the time of the write",
    )
    limit: str = Field(
        default="10%",
        description="how many may go missing at once, of those that are not marked yet: 10%, or a "
        "number; more stop the write",
    )
    scope: str | None = Field(
        default=None,
        description="SQL over the type's own fields: which of the stored rows the extract should "
        "have; all of them if left out",
    )

    @classmethod
    def parse(cls, raw: Any) -> MissingPolicy:
        """A word, or a mapping; one that says what to set is one to mark."""
        if isinstance(raw, cls):
            return raw
        if raw is None:
            return cls()
        if isinstance(raw, str):
            word: Any = raw
            return cls(action=word)
        if not isinstance(raw, Mapping):
            raise InvalidSpec([(("missing",), no_mapping("missing", cls, raw))])
        members = texts_as_names(raw)
        return cls(**({"action": "mark"} if "set" in members else {}) | members)

    @field_validator("set", mode="before")
    @classmethod
    def _values(cls, raw: Any) -> dict[str, Any]:
        """As JSON has them; YAML reads dates and times by itself."""
        if raw is None:
            return {}
        if not isinstance(raw, Mapping):
            raise ValueError(f"missing.set is a mapping of fields to values, not {raw!r}")
        return {
            str(name): value.isoformat() if isinstance(value, date | time) else value
            for name, value in raw.items()
        }

    @field_validator("limit", mode="before")
    @classmethod
    def _checked_limit(cls, raw: Any) -> str:
        text = "".join(str(raw).split())
        try:
            number = Decimal(text.removesuffix("%"))
        except InvalidOperation:
            number = Decimal(-1)
        is_share = text.endswith("%")
        fits = 0 <= number <= 100 if is_share else number >= 0 and number == number.to_integral()
        if isinstance(raw, bool | float) or not number.is_finite() or not fits:
            raise ValueError(f"missing.limit is a share such as 10%, or a number, not {raw!r}")
        return text

    @field_validator("scope", mode="before")
    @classmethod
    def _condition(cls, raw: Any) -> Any:
        return optional_text("missing.scope", "true" if raw is True else raw)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.marks and not self.set:
            raise InvalidSpec(
                [
                    (
                        ("set",),
                        "missing.set is needed: which fields mark a row, such as "
                        "{active: false, ended_at: now}",
                    )
                ]
            )
        if not self.marks and (self.set or self.scope is not None):
            name = "set" if self.set else "scope"
            text = f"missing.{name} is given, but missing.action is keep: say mark, or leave it out"
            raise InvalidSpec([((name,), text)])
        return self

    @property
    def marks(self) -> bool:
        return self.action == "mark"

    def allowed(self, of: int) -> int:
        """How many of so many may go missing."""
        if self.limit.endswith("%"):
            return int(of * Decimal(self.limit[:-1]) / 100)
        return int(self.limit)

    def within_scope(self, condition: str) -> MissingPolicy:
        """Of these rows alone."""
        both = f"({self.scope}) AND ({condition})" if self.scope is not None else condition
        return self.replace(scope=both)


def check_whole(missing: MissingPolicy, where: str | None) -> None:
    """What a condition on the source leaves out is not missing: nobody can put that condition on
    stored rows, so the order must say which of them it leaves."""
    if missing.marks and where is not None and missing.scope is None:
        raise InvalidSpec(
            [
                (
                    ("missing", "scope"),
                    "missing.scope is needed beside where: rows that the condition leaves out "
                    "would count as missing. Say over the type's fields which stored rows the "
                    "extract should have (\"country = 'DE'\", or true for all)",
                )
            ]
        )


@dataclass(frozen=True)
class FieldMark:
    """One field of a marked row. `value` is as Python has it; None with `is_now`."""

    field: FieldSpec
    value: Any
    is_now: bool = False

    def at(self, moment: datetime) -> Any:
        """The value, of a write that began then."""
        if not self.is_now:
            return self.value
        return moment if self.field.storage == "datetime" else moment.date()


def field_marks(missing: MissingPolicy, spec: TypeSpec) -> list[FieldMark]:
    """The fields that mark a row of this type; ConfigurationError names all that do not fit."""
    marks: list[FieldMark] = []
    wrong: list[str] = []
    names = [field.name for field in spec.fields if field.name != spec.primary_key]
    for name, value in missing.set.items():
        if name in spec.identity or name in (spec.primary_key, spec.instance_key):
            wrong.append(f"{name!r} is part of the identity, which no row can lose")
        elif name not in names:
            wrong.append(f"{unknown_name(name, names)} (there are {', '.join(names)})")
        else:
            field = spec.field(name)
            if value == NOW and field.storage in _TELLS_NOW:
                marks.append(FieldMark(field, None, is_now=True))
                continue
            problem, parsed = _parsed(field, value)
            if problem is not None:
                wrong.append(f"{name}: {problem}")
            marks.append(FieldMark(field, parsed))
    if wrong:
        raise ConfigurationError(f"missing.set of {spec.name}: {'; '.join(wrong)}")
    return marks


def _parsed(field: FieldSpec, value: Any) -> tuple[str | None, Any]:
    """What is wrong with a value as a file states it, or the value."""
    if value == NOW and field.storage == "str":
        return f"now is a time, and the field is {describe(field.type_spec)}", None
    try:
        return None, validator(field.type_spec).validate_json(dumps(value), strict=True)
    except PydanticError as error:
        return f"{say(error.errors(include_url=False)[0])}; {describe(field.type_spec)}", None
    except TypeError as error:
        return str(error), None
