"""Reads a class body into field specs, and refuses every mistake in it by name.

Promise: a class that gets through can be stored; one that cannot raises `TypeDeclarationError`
where it is declared, naming class and field. Only a forward reference to something that does not
exist yet postpones the checks of its field, until the class is first used.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Collection, Mapping
from types import FrameType, SimpleNamespace
from typing import Any, ClassVar, Literal, NoReturn, get_args, get_origin, get_type_hints

from pydantic_core import ValidationError as PydanticError

from storage_engine.errors import TypeDeclarationError
from storage_engine.model.canonical import encode
from storage_engine.model.field import Field
from storage_engine.model.spec import FIRST_FIELD_ID, MISSING, SYSTEM_COLUMNS, FieldSpec
from storage_engine.model.type_spec import AnnotationError, build_type_spec, classify
from storage_engine.model.validation import say, validator

DeclaredKind = Literal["entity", "relation", "event"]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
_EVENT_NAME = re.compile(r"(?=.{1,100}$)[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")
_STR = {"kind": "primitive", "name": "str"}


class Declaration:
    """What one class body declares; bases keep their own."""

    def __init__(
        self,
        cls: type,
        *,
        kind: DeclaredKind,
        name: str | None,
        abstract: bool,
        reserved: Collection[str],
        frame: FrameType,
    ) -> None:
        self.cls = cls
        self.kind = kind
        self.name = cls.__name__ if name is None else name
        self.abstract = abstract
        self._locals = dict(frame.f_locals) if frame.f_locals is not frame.f_globals else {}
        self._types: dict[str, Any] = {}
        self._own_specs: dict[str, dict[str, Any]] | None = None
        self._check_name()
        self._check_bases()
        self.own = self._own_fields()
        self._check_field_names(reserved)

    # --- the class ----------------------------------------------------------------------------

    def _check_name(self) -> None:
        pattern = _EVENT_NAME if self.kind == "event" else _NAME
        if not pattern.fullmatch(self.name):
            self.fail(
                "",
                f"{self.name!r} cannot be a stored name: use up to 100 letters, digits and "
                "underscores, and no digit first",
            )

    def _check_bases(self) -> None:
        for base in self.bases():
            if not base.abstract:
                self.fail(
                    "",
                    f"{base.cls.__name__} is a stored type of its own and cannot be a base; put "
                    "the common fields in a base declared with abstract=True",
                )

    def bases(self) -> list[Declaration]:
        """The declarations of the base classes, most basic first."""
        found = (base.__dict__.get("__declaration__") for base in reversed(self.cls.__mro__[1:]))
        return [declaration for declaration in found if declaration is not None]

    def fail(self, field: str, message: str) -> NoReturn:
        where = f"{self.cls.__name__}.{field}" if field else self.cls.__name__
        raise TypeDeclarationError(f"{where}: {message}", type=self.name, field=field)

    # --- its fields ---------------------------------------------------------------------------

    def fields(self) -> dict[str, Field[Any]]:
        """All fields, inherited first, in the order of declaration."""
        return {n: f for d in [*self.bases(), self] for n, f in d.own.items()}

    def _own_fields(self) -> dict[str, Field[Any]]:
        body = self.cls.__dict__
        annotations = inspect.get_annotations(self.cls)
        inherited = {name for base in self.bases() for name in base.own}
        for name, value in body.items():
            if name not in annotations and (isinstance(value, Field) or name in inherited):
                self.fail(name, f"has no annotation; write {name}: Field[...] = ...")
        own: dict[str, Field[Any]] = {}
        for name, annotation in annotations.items():
            if not self._is_field(name, annotation):
                continue
            value = body.get(name, MISSING)
            if not isinstance(value, Field):
                value = Field(default=value)
                value.__set_name__(self.cls, name)
                setattr(self.cls, name, value)
            self._check_options(name, value)
            own[name] = value
        return own

    def _is_field(self, name: str, annotation: Any) -> bool:
        try:
            hint = self._evaluate(name, annotation)
        except NameError:
            return not str(annotation).removeprefix("typing.").startswith("ClassVar")
        if hint is ClassVar or get_origin(hint) is ClassVar:
            return False
        if hint is Field:
            self.fail(name, "Field does not say what it holds; write for example Field[str]")
        if get_origin(hint) is not Field:
            shown = hint.__name__ if isinstance(hint, type) else str(hint)
            self.fail(
                name,
                f"is annotated as {shown}; write Field[{shown}] to store it, or "
                f"ClassVar[{shown}] if it is not data",
            )
        self._types[name] = get_args(hint)[0]
        return True

    def _evaluate(self, name: str, annotation: Any) -> Any:
        holder = SimpleNamespace(__annotations__={name: annotation})
        module = sys.modules.get(self.cls.__module__)
        hints = get_type_hints(
            holder, dict(vars(module)) if module else {}, self._locals, include_extras=True
        )
        return hints[name]

    def _check_options(self, name: str, field: Field[Any]) -> None:
        if field.unknown:
            known = "default, default_factory, primary_key, instance_key, index"
            self.fail(name, f"Field has no option {', '.join(field.unknown)}; it has {known}")
        if field.default is not MISSING and field.default_factory is not None:
            self.fail(name, "has both default and default_factory; keep one")
        if field.default_factory is not None and not callable(field.default_factory):
            self.fail(name, "default_factory must be callable; use default for a value")

    def _check_field_names(self, reserved: Collection[str]) -> None:
        taken = {name.lower(): name for base in self.bases() for name in base.own}
        for name in self.own:
            if name.startswith("_"):
                self.fail(name, "stored names do not start with an underscore")
            if not _NAME.fullmatch(name):
                self.fail(name, "stored names have up to 100 ASCII letters, digits, underscores")
            if self.kind != "event" and name.lower() in SYSTEM_COLUMNS:
                self.fail(name, f"the name {name.lower()} is reserved for a system column")
            if name in reserved:
                base = self.kind.capitalize()
                self.fail(name, f"would hide {base}.{name}; choose another name")
            other = taken.setdefault(name.lower(), name)
            if other != name:
                self.fail(name, f"differs from {other!r} in case only, which SQL cannot tell")

    # --- their types --------------------------------------------------------------------------

    def annotation(self, name: str) -> Any:
        """What an own field's `Field[...]` holds; NameError while a reference is open."""
        if name not in self._types:
            raw = inspect.get_annotations(self.cls)[name]
            if not self._is_field(name, raw) or name not in self._types:
                self._evaluate(name, raw)  # raises the NameError again
        return self._types[name]

    def type_specs(self) -> dict[str, dict[str, Any]]:
        """The type description of every field; NameError while a reference is open."""
        return {n: s for d in [*self.bases(), self] for n, s in d._describe_own().items()}

    def _describe_own(self) -> dict[str, dict[str, Any]]:
        if self._own_specs is None:
            specs = {}
            for name in self.own:
                annotation = self.annotation(name)
                try:
                    specs[name] = build_type_spec(annotation, localns=self._locals)
                except AnnotationError as error:
                    self.fail(name, str(error))
            self._own_specs = specs
            self._locals.clear()  # a class must not keep its function's variables alive
        return self._own_specs

    def key_field(
        self, role: Literal["primary_key", "instance_key"], specs: Mapping[str, Any]
    ) -> str | None:
        """The one field with that role, checked; None when there is none."""
        label = role.replace("_", " ")
        named = [name for name, field in self.fields().items() if getattr(field, role)]
        if not named:
            return None
        name = named[0]
        if len(named) > 1:
            self.fail(named[1], f"is a second {label} beside {name!r}; there can be one only")
        if specs[name] != _STR:
            self.fail(name, f"the {label} must be declared Field[str]")
        field = self.fields()[name]
        if field.default is not MISSING or field.default_factory is not None:
            self.fail(name, f"the {label} cannot have a default")
        return name

    def refuse_role(self, role: Literal["primary_key", "instance_key"], reason: str) -> None:
        for name, field in self.fields().items():
            if getattr(field, role):
                self.fail(name, reason)

    def field_specs(
        self, specs: Mapping[str, Mapping[str, Any]], *, without: str | None = None
    ) -> tuple[FieldSpec, ...]:
        """Field specs in the order of declaration, numbered from FIRST_FIELD_ID."""
        names = [name for name in self.fields() if name != without]
        return tuple(
            self._field_spec(name, specs[name], field_id)
            for field_id, name in enumerate(names, start=FIRST_FIELD_ID)
        )

    def _field_spec(self, name: str, type_spec: Mapping[str, Any], field_id: int) -> FieldSpec:
        field = self.fields()[name]
        storage, nullable = classify(type_spec)
        # The result of `list` and `dict` is known, so a storage can keep it as a default.
        known = field.default_factory in (list, dict)
        default = field.default_factory() if known and field.default_factory else field.default
        if default is not MISSING:
            try:
                value = validator(type_spec).validate_python(default)
            except PydanticError as error:
                said = say(error.errors(include_url=False)[0])
                self.fail(name, f"the default does not fit its type: {said}")
            if isinstance(value, list | dict) and not known:
                self.fail(
                    name,
                    f"the default {default!r} would be shared by all objects; use "
                    f"default_factory={'list' if default == [] else 'lambda: ...'}",
                )
            default = encode(type_spec, value)
        return FieldSpec(
            name=name,
            type_spec=type_spec,
            storage=storage,
            nullable=nullable,
            index=field.index,
            field_id=field_id,
            required=default is MISSING and field.default_factory is None,
            default=default,
            default_factory=field.default_factory,
        )
