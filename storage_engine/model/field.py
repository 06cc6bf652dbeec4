"""`Field[T]`: how a class says that an attribute is stored; `FieldRef[T]`: how a query names it.

    class Customer(Entity):
        id: Field[str] = Field(primary_key=True)
        age: Field[int]

`Customer.age` is a `FieldRef[int]`, `customer.age` is an `int`, for people and type checkers
alike; `Customer.age > 30` is a `Filter`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, Never, NoReturn, TypeVar, overload

from storage_engine.model.expressions import (
    ORDERED,
    CompareOp,
    Comparison,
    Contains,
    Filter,
    In,
    Operand,
    Source,
    Test,
    TestOp,
    TextOp,
    TextTest,
    TypePlace,
    check_key,
    kind_of,
    literal,
    plain,
    split_path,
)
from storage_engine.model.spec import MISSING, Missing, TypeSpec
from storage_engine.model.validation import unknown_name

T = TypeVar("T")
V = TypeVar("V", str, int, float, bool)

_STR = {"kind": "primitive", "name": "str"}
_CASTS: dict[object, str] = {str: "str", int: "int", float: "float", bool: "bool"}


class FieldRef(Generic[T]):
    """A field of a declared type, or a path into it, as written in queries: `Customer.age`.

    Comparing it gives a condition. Values are checked against the declared type at once.
    """

    __slots__ = ("_operand", "_place", "_source", "name", "owner")

    def __init__(
        self,
        owner: TypeSpec,
        name: str,
        *,
        source: Source = "self",
        relation: str | None = None,
    ) -> None:
        self.owner = owner
        self.name = name
        self._source: tuple[Source, str | None] = (source, relation)
        self._operand: Operand | None = None
        self._place: TypePlace | None = None

    def __repr__(self) -> str:
        if self._operand is None and self._source[0] == "self":
            return f"{self.owner.name}.{self.name}"
        return repr(self.operand)

    __hash__ = object.__hash__

    @property
    def operand(self) -> Operand:
        """The place that is meant, as the expression tree has it."""
        if self._operand is None:
            self._operand, self._place = _resolve(self.owner, self.name, *self._source)
        return self._operand

    @property
    def place(self) -> TypePlace:
        """What is declared there."""
        assert self.operand is not None
        assert self._place is not None
        return self._place

    # --- paths --------------------------------------------------------------------------------

    @overload
    def path(self, path: str) -> FieldRef[Any]: ...

    @overload
    def path(self, path: str, type: type[V]) -> FieldRef[V]: ...

    def path(self, path: str, type: Any = None) -> FieldRef[Any]:
        """A place inside the field: `Customer.profile.path("address.city")`.

        Where the declaration leaves the type open (`Any`, unions), `type` may say it: `str`,
        `int`, `float` or `bool`. Values of other kinds then count as missing.
        """
        ref: FieldRef[Any] = self
        for key in split_path(path):
            ref = ref[key]
        return ref if type is None else ref._cast(type)

    def __getitem__(self, key: str) -> FieldRef[Any]:
        operand = self._not_existential()
        place = self.place.key(check_key(key), repr(self))
        return self._at(replace(operand, path=(*operand.path, key)), place)

    def any_path(self, path: str) -> FieldRef[Any]:
        """Some element of the list, by a path into it: `Customer.events.any_path("kind")`."""
        operand = self._not_existential()
        if operand.source != "self":
            raise ValueError(f"{self!r}: any_path is not available on endpoints")
        keys = split_path(path)
        place = self.place.items(repr(self))
        for key in keys:
            place = place.key(key, f"an element of {self!r}")
        return self._at(replace(operand, item_path=keys), place)

    def _not_existential(self) -> Operand:
        if self.operand.existential:
            raise ValueError(f"{self!r} is the end of a path; write it all inside any_path(...)")
        return self.operand

    def _at(self, operand: Operand, place: TypePlace) -> FieldRef[Any]:
        made: FieldRef[Any] = FieldRef(self.owner, self.name)
        made._source = self._source
        made._operand = replace(operand, kinds=place.kinds, declared=place.describe())
        made._place = place
        return made

    def _cast(self, type_: object) -> FieldRef[Any]:
        kind = _CASTS.get(type_)
        if kind is None:
            raise TypeError(f"{self!r}: the type of a path is str, int, float or bool")
        kinds = self.operand.kinds
        if kind not in kinds and not (kind == "float" and "int" in kinds):
            raise TypeError(f"{self!r} is {self.place.describe()}, which is never {kind}")
        if kinds == {kind}:
            return self
        return self._at(replace(self.operand, cast=True), TypePlace.of({**_STR, "name": kind}))

    # --- conditions ---------------------------------------------------------------------------

    def __eq__(self, other: T) -> Filter:  # type: ignore[override]
        return self._compare("==", other)

    def __ne__(self, other: T) -> Filter:  # type: ignore[override]
        return self._compare("!=", other)

    def __lt__(self, other: T) -> Filter:
        return self._compare("<", other)

    def __le__(self, other: T) -> Filter:
        return self._compare("<=", other)

    def __gt__(self, other: T) -> Filter:
        return self._compare(">", other)

    def __ge__(self, other: T) -> Filter:
        return self._compare(">=", other)

    def in_(self, values: Iterable[T]) -> Filter:
        """Whether the value is one of these."""
        if isinstance(values, str | bytes) or not isinstance(values, Iterable):
            raise TypeError(f"{self!r}.in_() takes a list of values, not {values!r}")
        wanted = tuple(dict.fromkeys(self._literal(value) for value in values))
        for value in wanted:
            self.place.check_member(value, repr(self))
        return In(self.operand, wanted)

    def startswith(self, prefix: str) -> Filter:
        """Whether the text begins with `prefix`, literally and case-sensitively."""
        return self._text("startswith", prefix)

    def endswith(self, suffix: str) -> Filter:
        """Whether the text ends with `suffix`, literally and case-sensitively."""
        return self._text("endswith", suffix)

    def contains(self, value: Any) -> Filter:
        """Whether a text has `value` as a part, or a list has it as an element."""
        operand, kinds = self.operand, self.operand.kinds
        if "list" in kinds:
            if value is None:
                raise TypeError(
                    f"{self!r}.contains(None): NULL equals nothing, so it is in no list"
                )
            element = self.place.items(repr(self))
            where = f"an element of {self!r}"
            value = element.lower(value, where)
            if "str" not in kinds:  # where it is, it can be a part of a text
                element.check_member(value, where)
            allowed = element.kinds
            if isinstance(value, str) and "str" in kinds:
                allowed |= {"str"}  # then it can be a part of a text as well
            checked = plain(allowed, value, where, element.describe())
            return Contains(operand, checked, element.kinds)
        if not self.place.holds_text:
            raise TypeError(f"{self!r} is {operand.declared}; contains needs a text or a list")
        return Contains(operand, self._of_text("contains", value))

    def is_null(self) -> Filter:
        """Whether there is no value: NULL, or no such key."""
        return self._test("is_null")

    def is_not_null(self) -> Filter:
        """Whether there is a value."""
        return self._test("is_not_null")

    def is_true(self) -> Filter:
        """Whether the value is True; NULL is not."""
        return self._test("is_true")

    def is_false(self) -> Filter:
        """Whether the value is False; NULL is not."""
        return self._test("is_false")

    def __and__(self, other: Never) -> NoReturn:
        self.__invert__()

    __or__ = __rand__ = __ror__ = __and__

    def __invert__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} alone is no condition: write {self!r}.is_true() or compare it, and put each "
            "comparison in parentheses: (a == 1) & (b == 2)"
        )

    def _compare(self, op: CompareOp, other: Any) -> Filter:
        value = self._literal(other)
        if op in ("==", "!="):
            self.place.check_member(value, repr(self))
        elif kind_of(value) not in ORDERED:
            raise TypeError(f"{self!r}: {value!r} has no order")
        return Comparison(self.operand, op, value)

    def _literal(self, value: Any) -> Any:
        if isinstance(value, FieldRef | Filter):
            raise TypeError(f"{self!r} can be compared with a value, not with {value!r}")
        operand = self.operand
        if value is not None:
            value = self.place.lower(value, repr(self))
        return literal(operand.kinds, value, repr(self), operand.declared)

    def _text(self, op: TextOp, value: Any) -> Filter:
        if not self.place.holds_text:
            raise TypeError(f"{self!r} is {self.operand.declared}; {op} needs a text")
        return TextTest(self.operand, op, self._of_text(op, value))

    def _of_text(self, op: str, value: Any) -> str:
        if not isinstance(value, str):
            raise TypeError(f"{self!r}.{op}() takes a str, not {type(value).__name__}")
        return str(self._literal(value))

    def _test(self, op: TestOp) -> Filter:
        if op in ("is_true", "is_false") and "bool" not in self.operand.kinds:
            raise TypeError(f"{self!r} is {self.operand.declared}, not bool")
        return Test(self.operand, op)


def _resolve(
    owner: TypeSpec, name: str, source: Source, relation: str | None
) -> tuple[Operand, TypePlace]:
    identity = None
    if name == owner.primary_key:
        identity = "entity_key"
    elif name == owner.instance_key:
        identity = "instance_key"
    spec = None
    if identity is None:
        names = [f.name for f in owner.fields]
        if name not in names:
            keys = [key for key in (owner.primary_key, owner.instance_key) if key is not None]
            raise ValueError(f"{owner.name}: {unknown_name(name, [*names, *keys])}")
        spec = owner.field(name)
    place = TypePlace.of(_STR if spec is None else spec.type_spec)
    operand = Operand(
        owner=owner.ref,
        name=name,
        kinds=place.kinds,
        source=source,
        relation=relation,
        identity=identity,
        declared=place.describe(),
        spec=spec,
    )
    return operand, place


class Field(Generic[T]):
    """Declares a stored attribute. Options that contradict each other are reported when the
    class is declared, because only then the field has a name.

    primary_key:      the entity's identity; exactly one, of type str
    instance_key:     tells apart several relations of one pair; at most one, of type str
    index:            a hint that queries often filter by this field
    default:          an immutable value used when none is given; `x: Field[T] = value` is short
                      for it at run time, but type checkers accept the long form only
    default_factory:  called for each object that is given no value
    renamed_from:     the name that the field had before: a migration takes its values from there
    precision, scale: of the Decimals in it: how many digits they have, and how many of those after
                      the point
    description:      what it means, for people
    sensitive:        its values are not to be shown beside the data: samples hide them

    The last two are no part of the schema: they can change at any time.
    """

    def __init__(
        self,
        *,
        default: T | Missing = MISSING,
        default_factory: Callable[[], T] | None = None,
        primary_key: bool = False,
        instance_key: bool = False,
        index: bool = False,
        renamed_from: str | None = None,
        precision: int | None = None,
        scale: int | None = None,
        description: str | None = None,
        sensitive: bool = False,
        **unknown: Never,
    ) -> None:
        self.default = default
        self.default_factory = default_factory
        self.primary_key = primary_key
        self.instance_key = instance_key
        self.index = index
        self.renamed_from = renamed_from
        self.precision = precision
        self.scale = scale
        self.description = description
        self.sensitive = sensitive
        self.unknown: dict[str, Any] = dict(unknown)
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> FieldRef[T]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> T: ...

    def __get__(self, instance: object | None, owner: type) -> Any:
        # Objects keep their values in __dict__, which Python asks before a descriptor without
        # __set__: so reading an attribute of an object costs nothing and never comes here.
        if instance is not None:
            raise AttributeError(f"{owner.__name__} object has no value for {self.name!r}")
        return owner.__field_ref__(self.name)  # type: ignore[attr-defined]

    if TYPE_CHECKING:
        # Tells type checkers the constructor's argument type, and that assignment is refused.
        def __set__(self, instance: Never, value: T) -> None: ...
