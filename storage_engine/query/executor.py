"""What a storage does for queries: the border between the language and the engines.

The builder makes a `QuerySpec`, an `Executor` answers it in Arrow, and `query.results` turns the
answer into objects. `query.compiler` compiles specs to SQL for engines that speak it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import pyarrow as pa

from storage_engine.errors import SchemaMetadataError
from storage_engine.model.declarations import spec_of
from storage_engine.model.spec import TypeSpec
from storage_engine.query.spec import QuerySpec

Diagnostic = Mapping[str, Any]


@dataclass(frozen=True)
class Rows:
    """An answer in rows.

    schema:       `commit_id` (int64), then the type's row schema (`model.arrow.row_schema`)
    batches:      read once; closing the iterator early (`close()` on a generator, or dropping it)
                  ends the work behind it. Memory stays bounded whatever the size of the answer.
    diagnostics:  remarks on the answer, such as {"reason": "commit_before_activation",
                  "activation_commit_id": 7}; known before the first batch
    """

    schema: pa.Schema
    batches: Iterator[pa.RecordBatch]
    diagnostics: tuple[Diagnostic, ...] = ()


@dataclass(frozen=True)
class Traversal:
    """An answer in paths.

    sources:    rows of the queried entity type, as `Rows.schema` has them
    relations:  for each step of `spec.via`, rows of that relation type, the same way
    paths:      int64 columns `source`, `step_0`, `step_1`, ...: row numbers in the tables above,
                one row per path, in the order of the answer
    commit_id:  of the state that was looked at, so that what is loaded later is of the same
    """

    sources: pa.Table
    relations: tuple[pa.Table, ...]
    paths: pa.Table
    diagnostics: tuple[Diagnostic, ...] = ()
    commit_id: int | None = None


@dataclass(frozen=True)
class Plan:
    """How a query would be answered: for people as text, for programs as facts."""

    text: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.text


class Executor(Protocol):
    """Answers queries on one storage, or on one pinned state of it. Thread-safe.

    Every method resolves `spec.when` itself: a commit id is clamped to 0..head, an instant means
    the last commit at or before it, a str names a tag (unknown: ValueError with the nearest
    names). A pinned executor refuses references after its own commit.
    """

    def rows(self, spec: QuerySpec) -> Rows:
        """The rows of `spec.type` that pass `spec.where`, ordered by `spec.order` and then by
        identity (history: by commit and identity), cut by offset and limit.

        Conditions see rows as they are in the window: a filter on values must not be applied
        before the newest version of each identity is known. `spec.via` and `spec.aggregates` are
        empty.
        """

    def aggregate(self, spec: QuerySpec) -> pa.Table:
        """One row per group with the columns of `spec.groups`, then of `spec.aggregates`, by
        name, ordered by group (NULL last); exactly one row when there are no groups.

        Columns have the Arrow types of their kinds: `count` int64; `avg`, `avg_len` float64;
        `sum` int64 or float64, OverflowError when an int64 cannot hold it; `min`, `max` and group
        keys as `model.columns.ARROW_TYPES`. `order`, `limit`, `offset` and `via` are empty.
        """

    def traverse(self, spec: QuerySpec) -> Traversal:
        """All paths from the entities that `rows` would give (its where, order, offset and limit
        are about those) along the relations of `spec.via`.

        Step n follows relations whose left key is the entity reached by step n-1 and reaches
        their right key; the other way round if n is in `spec.backwards`. Only complete paths
        count. Relations are seen in the same window as entities; history modes are refused by the
        builder. Order: by source as in `rows`, then by the relations' identities, step by step.
        """

    def endpoints(
        self, spec: QuerySpec, side: Literal["left", "right"], keys: pa.Array
    ) -> pa.Table:
        """For the relation type `spec.type`, the endpoint entities with these keys (distinct,
        any number), as `Rows.schema` has them, at most one row a key, in any order.

        As of the same commit for latest and as_of; the newest version for history modes. Keys
        without an entity are left out.
        """

    def explain(self, spec: QuerySpec) -> Plan:
        """How `rows`, `aggregate` or `traverse` would answer, without doing it."""


Parameters = Sequence[Any] | Mapping[str, Any]


class SqlExecutor(Executor, Protocol):
    """Answers SQL, too."""

    def sql(self, statement: str, parameters: Parameters | None = None) -> Rows:
        """One SELECT (or EXPLAIN of one) in DuckDB's language, over a table for each stored type:
        its visible rows, as `Rows.schema` has them. What else a statement reaches for is refused
        (SqlNotAllowedError), and a mistake in it is a ValueError that names the tables."""


def endpoint_spec(
    relation: TypeSpec,
    side: Literal["left", "right"],
    stored: Callable[[tuple[str, str]], Sequence[TypeSpec]],
) -> TypeSpec:
    """The entity type at a relation's end: as the class has it; without one, as it is stored.

    `stored` looks a type up by kind and name, and gives none where there is none."""
    cls = relation.python_class
    if cls is not None:
        return spec_of(cls.__endpoints__[0 if side == "left" else 1])  # type: ignore[attr-defined]
    name = relation.left if side == "left" else relation.right
    for spec in stored(("entity", name or "")):
        return spec
    raise SchemaMetadataError(
        f"{relation.name} has {name} at its {side} end, of which nothing is stored yet"
    )
