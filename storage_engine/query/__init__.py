"""Queries: one language for every storage.

The builder (`Query`) makes a `QuerySpec` of filters (`model.expressions`); an `Executor` answers
it; `statements` compiles it to SQL; `evaluator` says in Python what it means. Knows nothing of
storages. docs/queries.md is the reference.
"""

from storage_engine.model.expressions import Filter
from storage_engine.query.aggregates import Aggregate, Having, avg, avg_len, count, max, min, sum
from storage_engine.query.builder import (
    EntityQuery,
    GroupedQuery,
    PathQuery,
    Query,
    RawQuery,
    RowQuery,
    left,
    right,
)
from storage_engine.query.results import Executor, Path, Plan, Result, Rows, Traversal
from storage_engine.query.spec import Order, QuerySpec, When

__all__ = [
    "Aggregate",
    "EntityQuery",
    "Executor",
    "Filter",
    "GroupedQuery",
    "Having",
    "Order",
    "Path",
    "PathQuery",
    "Plan",
    "Query",
    "QuerySpec",
    "RawQuery",
    "Result",
    "RowQuery",
    "Rows",
    "Traversal",
    "When",
    "avg",
    "avg_len",
    "count",
    "left",
    "max",
    "min",
    "right",
    "sum",
]
