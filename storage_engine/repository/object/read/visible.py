"""The rows of a type that a query sees, as common table expressions of one DuckDB statement.

Promise: conditions on values never decide before it is known which version of an identity is the
newest. They may pick candidates in the Parquet scan; a candidate counts once no newer version of
its identity is found, for which key and commit columns of newer files are read, and no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from storage_engine.query.compiler import Conjunct
from storage_engine.repository.duck import quoted
from storage_engine.repository.object.read.files import Brought, Scanner
from storage_engine.repository.object.read.plan import TypePlan

if TYPE_CHECKING:
    import duckdb

_CHECK_ALL = 100_000  # newer versions up to so many are looked through without asking for whom


@dataclass(frozen=True, slots=True)
class KeyTable:
    """A table, registered with the cursor, of all or some identity columns."""

    name: str
    table: pa.Table

    def join(self) -> str:
        columns = ", ".join(quoted(column) for column in self.table.column_names)
        return f" SEMI JOIN {quoted(self.name)} USING ({columns})"


def visible(
    scanner: Scanner,
    cursor: duckdb.DuckDBPyConnection,
    plan: TypePlan,
    name: str,
    *,
    brought: Brought,
    conjuncts: Sequence[Conjunct] = (),
    wanted: KeyTable | None = None,
) -> list[str]:
    """Common table expressions, the last of them called `name`.

    `conjuncts` may be applied early; whoever selects from the table applies all conditions again.
    `wanted` limits the rows to identities.
    """
    keys = ", ".join(quoted(column) for column in plan.spec.identity)
    limited = wanted.join() if wanted else ""
    by_key = [c.sql for c in conjuncts if c.reach == "identity"]
    by_value = [c.sql for c in conjuncts if c.reach == "typed"]
    rows = scanner.source(cursor, plan.spec, plan.rows, brought=brought)
    window = plan.window.condition([item.entry for item in plan.rows])
    candidates = f"SELECT * FROM ({rows}) q{limited}{_where(window, *by_key, *by_value)}"
    if not plan.newer:
        return [_cte(name, candidates)]
    newer = scanner.source(cursor, plan.spec, plan.newer, brought=brought, keys_only=True)
    window = plan.window.condition([item.entry for item in plan.newer])
    few = sum(item.file.row_count for item in plan.newer) <= _CHECK_ALL
    picked = bool(by_key or by_value or wanted) and not few
    asked = f" SEMI JOIN {quoted(f'{name}_candidates')} USING ({keys})" if picked else limited
    newest = (
        f"SELECT {keys}, max(commit_id) AS newest FROM ({newer}) q{asked}"
        f"{_where(window, *by_key)} GROUP BY {keys}"
    )
    confirmed = (
        f"SELECT c.* FROM {quoted(f'{name}_candidates')} c "
        f"LEFT JOIN {quoted(f'{name}_newest')} n USING ({keys}) "
        "WHERE n.newest IS NULL OR n.newest <= c.commit_id"
    )
    return [
        # Read twice where the newer versions are looked up by it.
        _cte(f"{name}_candidates", candidates, materialized=picked),
        _cte(f"{name}_newest", newest),
        _cte(name, confirmed),
    ]


def _cte(name: str, sql: str, *, materialized: bool = False) -> str:
    return f"{quoted(name)} AS {'' if materialized else 'NOT '}MATERIALIZED ({sql})"


def _where(*conditions: str) -> str:
    given = [condition for condition in conditions if condition]
    return f" WHERE {' AND '.join(given)}" if given else ""
