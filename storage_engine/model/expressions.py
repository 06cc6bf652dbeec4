"""The expression tree of queries: what a filter says, apart from how an engine asks it.

Nodes are immutable, hashable, and read as they were written. They hold values that have been
checked against the declared types (`model.kinds`), so whoever walks a tree need not doubt them.
What the nodes mean is written down in docs/queries.md and done by `query.evaluator`; the SQL
compilers in `query` mean the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from storage_engine.model.canonical import leaf
from storage_engine.model.spec import FieldSpec

Source = Literal["self", "left", "right"]
CompareOp = Literal["==", "!=", "<", "<=", ">", ">="]
TextOp = Literal["startswith", "endswith"]
TestOp = Literal["is_null", "is_not_null", "is_true", "is_false"]


@dataclass(frozen=True)
class Operand:
    """A place in a row.

    `owner` is the (kind, name) of the type whose field it is. `path` leads into the field,
    `item_path` into some element of the list found there (any_path). `source` says whose row:
    the queried one, or an endpoint of the queried relation, which `relation` names. `identity` is
    the system column that holds a key. `cast` is set when the user said the type of a place that
    is not declared: values of other kinds then count as missing.
    """

    owner: tuple[str, str]
    name: str
    kinds: frozenset[str]
    path: tuple[str, ...] = ()
    item_path: tuple[str, ...] | None = None
    source: Source = "self"
    relation: str | None = None
    identity: str | None = None
    cast: bool = False
    declared: str = field(default="", compare=False)
    spec: FieldSpec | None = field(default=None, compare=False, repr=False)

    @property
    def existential(self) -> bool:
        return self.item_path is not None

    def __repr__(self) -> str:
        start = self.owner[1] if self.source == "self" else f"{self.source}({self.relation})"
        keys = "".join(f"[{key!r}]" for key in self.path)
        some = "" if self.item_path is None else f".any_path({'.'.join(self.item_path)!r})"
        return f"{start}.{self.name}{keys}{some}"

    def as_json(self) -> dict[str, Any]:
        said: dict[str, Any] = {"type": self.owner[1], "field": self.name}
        if self.source != "self":
            said |= {"source": self.source, "relation": self.relation}
        if self.path:
            said["path"] = list(self.path)
        if self.item_path is not None:
            said["any_path"] = list(self.item_path)
        return said


class Condition(ABC):
    """Something that is true, false or unknown; combined with `&`, `|` and `~`."""

    __slots__ = ()

    @abstractmethod
    def as_json(self) -> dict[str, Any]:
        """For `explain`: plain JSON values."""

    def __bool__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} is a condition for the storage, not a truth value: combine conditions "
            "with & | ~ (each in parentheses) instead of and, or, not, and write "
            "(1 < x) & (x < 5) instead of 1 < x < 5"
        )


class Filter(Condition):
    """A condition on rows, as `where` takes it."""

    __slots__ = ()

    def __and__(self, other: Filter) -> Filter:
        return And((*_parts(And, self), *_parts(And, other))) if _is(other) else NotImplemented

    def __or__(self, other: Filter) -> Filter:
        return Or((*_parts(Or, self), *_parts(Or, other))) if _is(other) else NotImplemented

    def __invert__(self) -> Filter:
        return Not(self)

    @abstractmethod
    def operands(self) -> Iterator[Operand]:
        """Every place that the condition looks at, in the order of writing."""


def _is(other: object) -> bool:
    if isinstance(other, Filter):
        return True
    raise TypeError(
        f"{other!r} is not a condition and cannot be combined with one; if it was meant as a part "
        "of a comparison, put each comparison in parentheses: (a == 1) & (b == 2)"
    )


def _parts(kind: type[And | Or], node: Filter) -> tuple[Filter, ...]:
    return node.parts if isinstance(node, And | Or) and type(node) is kind else (node,)


class Leaf(Filter):
    """A condition on one place."""

    __slots__ = ()

    operand: Operand

    def operands(self) -> Iterator[Operand]:
        yield self.operand


@dataclass(frozen=True, repr=False)
class Comparison(Leaf):
    """`Customer.age > 30`."""

    operand: Operand
    op: CompareOp
    value: Any

    def __repr__(self) -> str:
        return f"{self.operand!r} {self.op} {self.value!r}"

    def as_json(self) -> dict[str, Any]:
        return {"op": self.op, "operand": self.operand.as_json(), "value": json_form(self.value)}


@dataclass(frozen=True, repr=False)
class In(Leaf):
    """`Customer.tier.in_(["Gold", "Silver"])`."""

    operand: Operand
    values: tuple[Any, ...]

    def __repr__(self) -> str:
        return f"{self.operand!r}.in_({list(self.values)!r})"

    def as_json(self) -> dict[str, Any]:
        values = [json_form(value) for value in self.values]
        return {"op": "in", "operand": self.operand.as_json(), "value": values}


@dataclass(frozen=True, repr=False)
class TextTest(Leaf):
    """`Customer.name.startswith("A")`, literally: no character is a wildcard."""

    operand: Operand
    op: TextOp
    value: str

    def __repr__(self) -> str:
        return f"{self.operand!r}.{self.op}({self.value!r})"

    def as_json(self) -> dict[str, Any]:
        return {"op": self.op, "operand": self.operand.as_json(), "value": self.value}


@dataclass(frozen=True, repr=False)
class Contains(Leaf):
    """`Customer.name.contains("nn")`, a part of a text; `Customer.tags.contains("vip")`, an
    element of a list."""

    operand: Operand
    value: Any
    element_kinds: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        return f"{self.operand!r}.contains({self.value!r})"

    def as_json(self) -> dict[str, Any]:
        value = json_form(self.value)
        return {"op": "contains", "operand": self.operand.as_json(), "value": value}


@dataclass(frozen=True, repr=False)
class Test(Leaf):
    """`Customer.email.is_null()` and the like, which are never unknown."""

    operand: Operand
    op: TestOp

    __test__ = False  # not a test class, whatever pytest thinks of its name

    def __repr__(self) -> str:
        return f"{self.operand!r}.{self.op}()"

    def as_json(self) -> dict[str, Any]:
        return {"op": self.op, "operand": self.operand.as_json()}


@dataclass(frozen=True, repr=False)
class _Several(Filter):
    parts: tuple[Filter, ...]

    def operands(self) -> Iterator[Operand]:
        for part in self.parts:
            yield from part.operands()


@dataclass(frozen=True, repr=False)
class And(_Several):
    """All of several conditions."""

    def __repr__(self) -> str:
        return f"({' & '.join(_inner(p) for p in self.parts)})"

    def as_json(self) -> dict[str, Any]:
        return {"op": "and", "parts": [part.as_json() for part in self.parts]}


@dataclass(frozen=True, repr=False)
class Or(_Several):
    """Some of several conditions."""

    def __repr__(self) -> str:
        return f"({' | '.join(_inner(p) for p in self.parts)})"

    def as_json(self) -> dict[str, Any]:
        return {"op": "or", "parts": [part.as_json() for part in self.parts]}


@dataclass(frozen=True, repr=False)
class Not(Filter):
    """The opposite of a condition; of an unknown one, unknown."""

    part: Filter

    def __repr__(self) -> str:
        return f"~{_inner(self.part)}"

    def as_json(self) -> dict[str, Any]:
        return {"op": "not", "part": self.part.as_json()}

    def operands(self) -> Iterator[Operand]:
        yield from self.part.operands()


def _inner(part: Filter) -> str:
    return f"({part!r})" if isinstance(part, Comparison) else repr(part)


def json_form(value: Any) -> Any:
    """A compared value as JSON has it."""
    return value if isinstance(value, str | int | float) else leaf(value)
