"""What entities, relations and events have in common: validated, immutable values.

Objects do not change after construction: the session tells objects apart by identity and
`.meta()` says what is stored, and neither may drift under them. `replace()` makes a changed copy.
A list or dict inside an object can still be changed in place, so such values are validated again
when they are written. Objects compare by value and cannot be hashed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, Self, dataclass_transform

from pydantic_core import CoreSchema, SchemaValidator, core_schema
from pydantic_core import ValidationError as PydanticError

from storage_engine.errors import TypeDeclarationError, ValidationError
from storage_engine.model.canonical import decode
from storage_engine.model.declare import Declaration
from storage_engine.model.field import Field
from storage_engine.model.spec import MISSING, FieldSpec, TypeSpec
from storage_engine.model.validation import KEY_SCHEMA, SchemaBuilder, explain


@dataclass(frozen=True)
class Plan:
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
                error, type_name=self.type_name, identity=identity, known=self.arguments
            ) from None
        return validated


def make_plan(
    type_name: str,
    fields: Sequence[FieldSpec],
    *,
    keys: Sequence[str],
    spec: TypeSpec | None = None,
    extra: Mapping[str, CoreSchema] | None = None,
) -> Plan:
    """`keys` are the identifying arguments, in order; `extra` are arguments beside the fields."""
    builder = SchemaBuilder()
    schemas: dict[str, CoreSchema] = dict.fromkeys(keys, KEY_SCHEMA)
    for field in fields:
        schemas.setdefault(field.name, _with_default(field, builder.value(field.type_spec)))
    schemas.update(extra or {})
    arguments = {name: core_schema.typed_dict_field(schema) for name, schema in schemas.items()}
    # The order of construction arguments is the order of declaration in repr and dumps.
    names = [*(k for k in keys if k not in {f.name for f in fields}), *(f.name for f in fields)]
    ordered = {name: arguments[name] for name in [*names, *(extra or {})]}
    schema = core_schema.typed_dict_schema(ordered, extra_behavior="forbid")
    return Plan(type_name, tuple(fields), builder.finish(schema), tuple(ordered), tuple(keys), spec)


def _with_default(field: FieldSpec, schema: CoreSchema) -> CoreSchema:
    if field.default_factory is not None:
        return core_schema.with_default_schema(
            schema, default_factory=field.default_factory, validate_default=True
        )
    if field.default is not MISSING:
        return core_schema.with_default_schema(
            schema, default=decode(field.type_spec, field.default)
        )
    return schema


@dataclass_transform(kw_only_default=True, field_specifiers=(Field,))
class Record:
    """Base of Entity, Relation and Event; not for direct use."""

    __slots__ = ("__dict__", "__weakref__")

    __declaration__: ClassVar[Declaration]
    __plan__: ClassVar[Plan | None] = None

    def __init__(self, **values: Any) -> None:
        plan = self.__plan__ or finished(type(self))
        _set(self, "__dict__", plan.validate(values))

    @classmethod
    def __finish__(cls) -> Plan:
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


def finished(cls: type[Any]) -> Plan:
    """The plan of a class, completing a declaration that waited for a forward reference."""
    plan: Plan | None = cls.__plan__
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
