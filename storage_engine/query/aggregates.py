"""`count, sum, avg, min, max` of fields, and the conditions that `having` takes.

    session.query().entities(Order).group_by(Order.customer)
        .having(sum(Order.total) > 10).agg(orders=count(), total=sum(Order.total))

NULL is left out of every aggregate. Without values, `sum`, `avg`, `min` and `max` are None.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from storage_engine.model.decimals import decimal_type
from storage_engine.model.expressions import (
    NUMBERS,
    ORDERED,
    CompareOp,
    Condition,
    Operand,
    base_kind,
    base_kinds,
    json_form,
    literal,
)
from storage_engine.model.field import FieldRef
from storage_engine.model.scalars import lowered
from storage_engine.query.conditions import value_kind

Function = Literal["count", "sum", "avg", "min", "max", "avg_len"]


@dataclass(frozen=True, repr=False, eq=False)
class Aggregate:
    """One value of many rows. Comparing it gives a condition for `having`."""

    function: Function
    operand: Operand | None = None

    def __repr__(self) -> str:
        return f"{self.function}({'' if self.operand is None else repr(self.operand)})"

    @property
    def kind(self) -> str:
        """The kind of the result."""
        match self.function:
            case "count":
                return "int"
            case "avg" | "avg_len":
                return "float"
        assert self.operand is not None
        kind = value_kind(self.operand)
        decimals = decimal_type(kind)
        return decimals.total.kind if decimals is not None and self.function == "sum" else kind

    def as_json(self) -> dict[str, Any]:
        described: dict[str, Any] = {"function": self.function}
        return (
            described if self.operand is None else {**described, "operand": self.operand.as_json()}
        )

    def __hash__(self) -> int:
        return hash((self.function, self.operand))

    def same(self, other: Aggregate) -> bool:
        """Whether both compute the same; `==` makes a condition instead."""
        return (self.function, self.operand) == (other.function, other.operand)

    def __eq__(self, other: object) -> Having:  # type: ignore[override]
        return self._compare("==", other)

    def __ne__(self, other: object) -> Having:  # type: ignore[override]
        return self._compare("!=", other)

    def __lt__(self, other: Any) -> Having:
        return self._compare("<", other)

    def __le__(self, other: Any) -> Having:
        return self._compare("<=", other)

    def __gt__(self, other: Any) -> Having:
        return self._compare(">", other)

    def __ge__(self, other: Any) -> Having:
        return self._compare(">=", other)

    def _compare(self, op: CompareOp, other: Any) -> Having:
        if other is None or isinstance(other, bool | FieldRef | Aggregate):
            raise TypeError(f"{self!r} can be compared with a value, not with {other!r}")
        value = literal(frozenset({self.kind}), lowered(other), repr(self), self.kind)
        return HavingComparison(self, op, value)


class Having(Condition):
    """A condition on groups."""

    __slots__ = ()

    def __and__(self, other: Having) -> Having:
        return HavingMany("and", (self, _having(other)))

    def __or__(self, other: Having) -> Having:
        return HavingMany("or", (self, _having(other)))

    def __invert__(self) -> Having:
        return HavingNot(self)

    @abstractmethod
    def aggregates(self) -> Iterator[Aggregate]:
        """Every aggregate that the condition compares."""


@dataclass(frozen=True, repr=False)
class HavingComparison(Having):
    aggregate: Aggregate
    op: CompareOp
    value: Any

    def __repr__(self) -> str:
        return f"{self.aggregate!r} {self.op} {self.value!r}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HavingComparison) and (
            self.aggregate.same(other.aggregate)
            and (self.op, self.value) == (other.op, other.value)
        )

    def __hash__(self) -> int:
        return hash((self.aggregate, self.op, self.value))

    def as_json(self) -> dict[str, Any]:
        value = json_form(self.value)
        return {"op": self.op, "aggregate": self.aggregate.as_json(), "value": value}

    def aggregates(self) -> Iterator[Aggregate]:
        yield self.aggregate


@dataclass(frozen=True, repr=False)
class HavingMany(Having):
    op: Literal["and", "or"]
    parts: tuple[Having, ...]

    def __repr__(self) -> str:
        sign = " & " if self.op == "and" else " | "
        return f"({sign.join(f'({part!r})' for part in self.parts)})"

    def as_json(self) -> dict[str, Any]:
        return {"op": self.op, "parts": [part.as_json() for part in self.parts]}

    def aggregates(self) -> Iterator[Aggregate]:
        for part in self.parts:
            yield from part.aggregates()


@dataclass(frozen=True, repr=False)
class HavingNot(Having):
    part: Having

    def __repr__(self) -> str:
        return f"~({self.part!r})"

    def as_json(self) -> dict[str, Any]:
        return {"op": "not", "part": self.part.as_json()}

    def aggregates(self) -> Iterator[Aggregate]:
        yield from self.part.aggregates()


def _having(other: object) -> Having:
    if isinstance(other, Having):
        return other
    raise TypeError(f"{other!r} is not a condition on groups; conditions on rows go in where(...)")


# --- what users write -------------------------------------------------------------------------


def count(field: FieldRef[Any] | None = None) -> Aggregate:
    """The number of rows, or of rows where the field is not NULL."""
    return Aggregate("count", None if field is None else own_place(field, "count"))


def sum(field: FieldRef[Any]) -> Aggregate:
    """The sum of a numeric field; an int for an int field, exact for Decimals."""
    return Aggregate("sum", _numeric(field, "sum"))


def avg(field: FieldRef[Any]) -> Aggregate:
    """The mean of a numeric field, a float."""
    return Aggregate("avg", _numeric(field, "avg"))


def min(field: FieldRef[Any]) -> Aggregate:
    """The least value, of the field's type."""
    return Aggregate("min", _ordered(field, "min"))


def max(field: FieldRef[Any]) -> Aggregate:
    """The greatest value, of the field's type."""
    return Aggregate("max", _ordered(field, "max"))


def avg_len(field: FieldRef[Any]) -> Aggregate:
    """The mean number of elements of a list field; other values are left out."""
    operand = own_place(field, "avg_len")
    if "list" not in operand.kinds:
        raise TypeError(f"avg_len needs a list; {operand!r} is {operand.declared}")
    return Aggregate("avg_len", operand)


def own_place(field: object, use: str) -> Operand:
    """The place of a field of the queried type itself, which ordering and aggregates take."""
    if not isinstance(field, FieldRef):
        raise TypeError(f"{use} takes a field such as Customer.age, not {field!r}")
    operand = field.operand
    if operand.source != "self":
        raise ValueError(f"{use}({operand!r}): fields of endpoints can be used in where() only")
    if operand.existential:
        raise ValueError(f"{use}({operand!r}): any_path can be used in where() only")
    return operand


def _numeric(field: object, use: str) -> Operand:
    operand = own_place(field, use)
    bases = base_kinds(operand.kinds)
    if not bases or not (bases <= NUMBERS or bases == {"decimal"}):
        hint = "; say which type you mean: .path(..., float)" if operand.path else ""
        raise TypeError(f"{use} needs a number; {operand!r} is {operand.declared}{hint}")
    return operand


def _ordered(field: object, use: str) -> Operand:
    operand = own_place(field, use)
    if base_kind(value_kind(operand)) not in ORDERED:
        raise TypeError(f"{use} needs values with an order; {operand!r} is {operand.declared}")
    return operand
