"""What entities, relations and events have in common: classes read into fields, values validated.

A class body becomes field specs, and every mistake in it is refused by name. Promise: a class that
gets through can be stored; one that cannot raises `TypeDeclarationError` where it is declared,
naming class and field. Only a forward reference to something that does not exist yet postpones the
checks of its field, until the class is first used.

Objects do not change after construction: the session tells objects apart by identity and
`.meta()` says what is stored, and neither may drift under them. `replace()` makes a changed copy.
A list or dict inside an object can still be changed in place, so such values are validated again
when they are written. Objects compare by value and cannot be hashed.
"""

from __future__ import annotations

import inspect
import re
import sys
from abc import ABCMeta
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, SimpleNamespace
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    NoReturn,
    Self,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic_core import CoreSchema, SchemaValidator, core_schema
from pydantic_core import ValidationError as PydanticError

from storage_engine.errors import TypeDeclarationError, ValidationError
from storage_engine.model.canonical import decode, encode
from storage_engine.model.decimals import Precision
from storage_engine.model.descriptions import checked_owners, checked_tags, description_of
from storage_engine.model.field import Field
from storage_engine.model.field_types import (
    AnnotationError,
    build_type_spec,
    classify,
    has_decimals,
)
from storage_engine.model.scalars import Reviver, reviver
from storage_engine.model.spec import FIRST_FIELD_ID, MISSING, SYSTEM_COLUMNS, FieldSpec, TypeSpec
from storage_engine.model.validation import (
    KEY_SCHEMA,
    SchemaBuilder,
    explain,
    say,
    unknown_name,
    validator,
)

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
        renamed_from: str | None = None,
        owners: Sequence[str] = (),
        tags: Mapping[str, str] | None = None,
        sensitive: bool = False,
    ) -> None:
        self.cls = cls
        self.kind = kind
        self.name = cls.__name__ if name is None else name
        self.abstract = abstract
        self.renamed_from = renamed_from
        self._locals = dict(frame.f_locals) if frame.f_locals is not frame.f_globals else {}
        self._types: dict[str, Any] = {}
        self._own_specs: dict[str, dict[str, Any]] | None = None
        self.revivers: dict[str, Reviver | None] = {}
        self._check_name()
        self._check_bases()
        self.description = description_of(cls)
        self.owners: tuple[str, ...] = ()
        self.tags: dict[str, str] = {}
        self.sensitive = False
        self._describe(owners, {} if tags is None else tags, sensitive)
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
        if self.renamed_from == self.name:
            self.fail("", "renamed_from is the name that it has now; name the one it had before")

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
        declarations = (
            base.__dict__.get("__declaration__") for base in reversed(self.cls.__mro__[1:])
        )
        return [declaration for declaration in declarations if declaration is not None]

    def _describe(self, owners: Any, tags: Any, sensitive: Any) -> None:
        """Owners are those of a base where the class names none, tags add to its bases', and what
        derives from something sensitive is sensitive."""
        if not isinstance(sensitive, bool):
            self.fail("", f"sensitive is True or False, not {sensitive!r}")
        bases = self.bases()
        try:
            inherited = next((base.owners for base in reversed(bases) if base.owners), ())
            self.owners = checked_owners(owners) or inherited
            own_tags = checked_tags(tags)
        except ValueError as error:
            self.fail("", str(error))
        self.tags = {name: text for base in bases for name, text in base.tags.items()} | own_tags
        self.sensitive = sensitive or any(base.sensitive for base in bases)

    def sensitive_columns(self) -> frozenset[str]:
        return frozenset(name for name, field in self.fields().items() if field.sensitive)

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
            options = (
                "default, default_factory, primary_key, instance_key, index, precision, scale, "
                "renamed_from, description, sensitive"
            )
            self.fail(name, f"Field has no option {', '.join(field.unknown)}; it has {options}")
        if field.default is not MISSING and field.default_factory is not None:
            self.fail(name, "has both default and default_factory; keep one")
        if field.default_factory is not None and not callable(field.default_factory):
            self.fail(name, "default_factory must be callable; use default for a value")
        if field.description is not None and not isinstance(field.description, str):
            self.fail(name, f"description takes a text, not {field.description!r}")
        if not isinstance(field.sensitive, bool):
            self.fail(name, f"sensitive is True or False, not {field.sensitive!r}")
        if field.renamed_from == name:
            self.fail(name, "renamed_from is the name that it has now; name the one it had before")

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
        fields = self.fields()
        for name in self.own:
            source = fields[name].renamed_from
            for _ in fields:
                if source == name:
                    self.fail(
                        name,
                        "fields are marked as renamed from each other; give one of them a name "
                        "that none had, or fill them by an upgrader",
                    )
                source = fields[source].renamed_from if source in fields else None

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
            for name, field in self.own.items():
                annotation = self.annotation(name)
                decimals = self._decimals(name, field)
                try:
                    specs[name] = build_type_spec(
                        annotation, localns=self._locals, decimals=decimals
                    )
                except AnnotationError as error:
                    self.fail(name, str(error))
                if decimals is not None and not has_decimals(specs[name]):
                    self.fail(name, "precision and scale are for a Decimal, and it holds none")
                self.revivers[name] = reviver(annotation, self._locals)
            self._own_specs = specs
            self._locals.clear()  # a class must not keep its function's variables alive
        return self._own_specs

    def _decimals(self, name: str, field: Field[Any]) -> Precision | None:
        precision, scale = field.precision, field.scale
        if precision is None and scale is None:
            return None
        if precision is None or scale is None:
            self.fail(name, "has one of precision and scale; write both, such as 12 and 2")
        try:
            return Precision(precision, scale)
        except (TypeError, ValueError) as error:
            self.fail(name, str(error))

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
        makes_empty = field.default_factory in (list, dict)
        default = (
            field.default_factory() if makes_empty and field.default_factory else field.default
        )
        if default is not MISSING:
            try:
                value = validator(type_spec).validate_python(default)
            except PydanticError as error:
                problem = say(error.errors(include_url=False)[0])
                self.fail(name, f"the default does not fit its type: {problem}")
            if isinstance(value, list | dict) and not makes_empty:
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
            renamed_from=field.renamed_from,
            revive=self._reviver(name),
            description=field.description,
            sensitive=field.sensitive,
        )

    def _reviver(self, name: str) -> Reviver | None:
        declared = [d for d in [*self.bases(), self] if name in d.own]
        return declared[-1].revivers[name]


@dataclass(frozen=True)
class RecordPlan:
    """A finished class: how its objects are validated, dumped and named."""

    type_name: str
    fields: tuple[FieldSpec, ...]
    validator: SchemaValidator
    arguments: tuple[str, ...]  # everything that the constructor takes
    identity: tuple[str, ...]  # the arguments that identify an object
    spec: TypeSpec | None  # None for events, which have no identity

    def validate(self, values: Mapping[str, Any]) -> dict[str, Any]:
        try:
            validated: dict[str, Any] = self.validator.validate_python(values)
        except PydanticError as error:
            given = tuple(values.get(name) for name in self.identity)
            readable = given and all(isinstance(key, str) and key for key in given)
            identity: Any = (given[0] if len(given) == 1 else given) if readable else None
            raise explain(
                error, type_name=self.type_name, identity=identity, arguments=self.arguments
            ) from None
        return validated


def make_plan(
    type_name: str,
    fields: Sequence[FieldSpec],
    *,
    keys: Sequence[str],
    spec: TypeSpec | None = None,
    extra: Mapping[str, CoreSchema] | None = None,
) -> RecordPlan:
    """`keys` are the identifying arguments, in order; `extra` are arguments beside the fields."""
    builder = SchemaBuilder()
    schemas: dict[str, CoreSchema] = dict.fromkeys(keys, KEY_SCHEMA)
    for field in fields:
        schemas.setdefault(field.name, _with_default(field, _revived(field, builder)))
    schemas.update(extra or {})
    arguments = {name: core_schema.typed_dict_field(schema) for name, schema in schemas.items()}
    # The order of construction arguments is the order of declaration in repr and dumps.
    names = [*(k for k in keys if k not in {f.name for f in fields}), *(f.name for f in fields)]
    ordered = {name: arguments[name] for name in [*names, *(extra or {})]}
    schema = core_schema.typed_dict_schema(ordered, extra_behavior="forbid")
    return RecordPlan(
        type_name, tuple(fields), builder.finish(schema), tuple(ordered), tuple(keys), spec
    )


def _revived(field: FieldSpec, builder: SchemaBuilder) -> CoreSchema:
    schema = builder.value(field.type_spec)
    if field.revive is None:
        return schema
    return core_schema.no_info_after_validator_function(field.revive, schema)


def _with_default(field: FieldSpec, schema: CoreSchema) -> CoreSchema:
    if field.default_factory is not None:
        return core_schema.with_default_schema(
            schema, default_factory=field.default_factory, validate_default=True
        )
    if field.default is not MISSING:
        default = decode(field.type_spec, field.default)
        return core_schema.with_default_schema(
            schema, default=default if field.revive is None else field.revive(default)
        )
    return schema


if TYPE_CHECKING:
    # Checkers would believe that a class has every name, and join classes to their metaclass.
    RecordType = type
else:

    class RecordType(ABCMeta):
        """The class of record classes, which knows the nearest name for one that is not there. An
        ABCMeta, so that a record may have an abstract base, too."""

        def __getattr__(cls, name: str) -> NoReturn:
            message = f"type object {cls.__name__!r} has no attribute {name!r}"
            declaration = cls.__dict__.get("__declaration__")
            if declaration is not None and not name.startswith("_"):
                fields = declaration.fields()
                if name in fields:  # which has said itself why not
                    super().__getattribute__(name)
                message = f"{cls.__name__}: {unknown_name(name, fields)}"
            raise AttributeError(message)


@dataclass_transform(kw_only_default=True, field_specifiers=(Field,))
class Record(metaclass=RecordType):
    """Base of Entity, Relation and Event; not for direct use."""

    __slots__ = ("__dict__", "__weakref__")

    __declaration__: ClassVar[Declaration]
    __plan__: ClassVar[RecordPlan | None] = None

    def __init__(self, **values: Any) -> None:
        plan = self.__plan__ or finished(type(self))
        _set(self, "__dict__", plan.validate(values))

    @classmethod
    def __finish__(cls) -> RecordPlan:
        """Check the declaration as a whole; NameError while a forward reference is open."""
        raise TypeDeclarationError(
            f"{cls.__name__} is not a type of its own; derive from it", type=cls.__name__
        )

    @classmethod
    def model_validate(cls, values: Mapping[str, Any]) -> Self:
        """An object from a mapping of constructor arguments."""
        if not isinstance(values, Mapping):
            raise ValidationError(
                f"{cls.__name__}: expected a mapping of fields, got {type(values).__name__}",
                type=cls.__name__,
            )
        return cls(**values)

    def model_dump(self) -> dict[str, Any]:
        """The fields and their values, lists and dicts copied.

        A relation's endpoint keys and instance key are identity, not fields, and are left out.
        """
        values = vars(self)
        return {f.name: _copy(values[f.name]) for f in finished(type(self)).fields}

    def replace(self, **changes: Any) -> Self:
        """A copy with some values changed, validated as a whole."""
        return type(self)(**{**vars(self), **changes})

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]  # values can hold lists

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in vars(self).items())})"

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(
            f"{type(self).__name__} objects do not change; "
            f"make a changed copy with replace({name}=...)"
        )

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} objects do not change")

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _restore, (type(self), dict(vars(self)))


_set = object.__setattr__


def hydrate(cls: type[Record], values: dict[str, Any]) -> Any:
    """An object from values that are known to be valid, such as stored ones."""
    made = object.__new__(cls)
    _set(made, "__dict__", values)
    return made


def _restore(cls: type[Record], values: dict[str, Any]) -> Any:
    return hydrate(cls, values)


def statement_frame(frame: FrameType) -> FrameType:
    """The frame of a class statement, whose names annotations may use: above those of metaclasses
    written in Python, as ABCMeta is."""
    while frame.f_code.co_name == "__new__" and frame.f_back is not None:
        first = frame.f_locals.get(frame.f_code.co_varnames[0])
        if not (isinstance(first, type) and issubclass(first, type)):
            break
        frame = frame.f_back
    return frame


def declare(declaration: Declaration) -> None:
    """Attach a declaration to its class and finish it now if nothing is open."""
    cls: Any = declaration.cls
    cls.__declaration__ = declaration
    cls.__plan__ = None
    try:
        if declaration.abstract:
            declaration.type_specs()
        else:
            cls.__plan__ = cls.__finish__()
    except NameError:
        pass  # a forward reference: `finished` tries again when the class is first used


def finished(cls: type[Any]) -> RecordPlan:
    """The plan of a class, completing a declaration that waited for a forward reference."""
    plan: RecordPlan | None = cls.__plan__
    if plan is not None:
        return plan
    declaration: Declaration | None = cls.__dict__.get("__declaration__")
    if declaration is None or declaration.abstract:
        raise TypeDeclarationError(
            f"{cls.__name__} is abstract: it gives fields to the types derived from it and has "
            "no objects of its own",
            type=cls.__name__,
        )
    try:
        plan = cls.__finish__()
    except NameError as error:
        raise TypeDeclarationError(
            f"{cls.__name__}: {error.name!r} is still unknown; a forward reference must exist "
            "in the module by the time the class is used",
            type=declaration.name,
        ) from None
    cls.__plan__ = plan
    return plan


def _copy(value: Any) -> Any:
    if isinstance(value, list):
        return [_copy(item) for item in value]
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return value
