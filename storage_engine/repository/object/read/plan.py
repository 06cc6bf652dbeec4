"""Which files a query opens, and the rows of a type that it sees, as parts of one DuckDB statement.

Promise: a file is left out only when, by what the log knows of it, no row in it can pass. Missing
or cut statistics keep it.

Promise: conditions on values never decide before it is known which version of an identity is the
newest. They may pick candidates in the Parquet scan; a candidate counts once no newer version of
its identity is found, for which key and commit columns of newer files are read, and no more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time
from decimal import Decimal, InvalidOperation
from itertools import groupby
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from storage_engine.commitlog.ranges import KeyRange, KeyRanges, may_hold
from storage_engine.commitlog.records import (
    CommitFile,
    Entry,
    TypeHead,
    parse_timestamp,
    timestamp,
)
from storage_engine.index.resolve import Resolution
from storage_engine.model.canonical import leaf as text_of_value
from storage_engine.model.decimals import decimal_type
from storage_engine.model.expressions import (
    And,
    CompareOp,
    Comparison,
    Filter,
    In,
    Leaf,
    Not,
    Or,
    Test,
    TextTest,
)
from storage_engine.model.spec import TypeSpec
from storage_engine.query.compiler import Conjunct
from storage_engine.query.conditions import after_prefix
from storage_engine.query.dialects import quoted
from storage_engine.query.results import Diagnostic
from storage_engine.repository.object.read.files import Brought, DataFile, Scanner

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


def in_steps(statement: str, name: str) -> str:
    """A statement that selects from what `visible` has called `name`, so that those rows are
    confirmed before anything else is done with them: a join and a sort beside it each spill, but
    not for one another, and what is larger than memory may fit only one after the other."""
    return statement.replace(_cte(name), _cte(name, materialized=True), 1)


def _cte(name: str, sql: str | None = None, *, materialized: bool = False) -> str:
    """Without `sql`: how it begins."""
    begin = f"{quoted(name)} AS {'' if materialized else 'NOT '}MATERIALIZED ("
    return begin if sql is None else f"{begin}{sql})"


def _where(*conditions: str) -> str:
    given = [condition for condition in conditions if condition]
    return f" WHERE {' AND '.join(given)}" if given else ""


# With what plans are made of, for those above the repository.
__all__ = [
    "CommitFile",
    "CommitWindow",
    "Entry",
    "TypePlan",
    "may_match",
    "may_supersede",
    "plan_type",
]

_INVERSE: Mapping[CompareOp, CompareOp] = {
    "==": "!=",
    "!=": "==",
    "<": ">=",
    "<=": ">",
    ">": "<=",
    ">=": "<",
}
_OPPOSITE_TEST = {"is_null": "is_not_null", "is_not_null": "is_null"}


def may_match(condition: Filter, file: CommitFile, *, negate: bool = False) -> bool:
    """Whether some row of the file may make the condition true (`negate`: false)."""
    match condition:
        case Not():
            return may_match(condition.part, file, negate=not negate)
        case And() | Or():
            together = isinstance(condition, And) != negate
            parts = (may_match(part, file, negate=negate) for part in condition.parts)
            return all(parts) if together else any(parts)
        case Leaf():
            try:
                return _leaf(condition, file, negate)
            except TypeError:  # statistics of another kind: written by someone else
                return True
    return True


def _at_most(low: Any, high: Any) -> bool:
    return low is None or high is None or bool(low <= high)


def _leaf(leaf: Leaf, file: CommitFile, negate: bool) -> bool:
    operand = leaf.operand
    if operand.source != "self" or operand.path or operand.item_path is not None:
        return True
    if operand.identity is not None:
        bounds = file.key_range.get(operand.identity)
        low, high, nulls = (*bounds, 0) if bounds else (None, None, None)
    else:
        if operand.spec is None or operand.spec.storage == "json":
            return True
        low, high, nulls = file.stats.get(operand.name, (None, None, None))
        if decimal_type(operand.spec.storage) is not None:
            low, high = (_parsed(_decimal_bound, bound) for bound in (low, high))
    if isinstance(leaf, Test):
        return _test(_OPPOSITE_TEST.get(leaf.op, "") if negate else leaf.op, file, nulls)
    if isinstance(leaf, In) and not leaf.values:
        return negate  # false, even of NULL
    if nulls is not None and 0 <= file.row_count <= nulls:
        return False  # nothing but NULLs: every comparison is unknown
    match leaf:
        case Comparison():
            return _compare(_INVERSE[leaf.op] if negate else leaf.op, leaf.value, low, high)
        case In() if not negate:
            return any(_compare("==", value, low, high) for value in leaf.values)
        case TextTest(op="startswith") if not negate:
            end = after_prefix(leaf.value)
            below = end is None or low is None or low < end
            return below and _at_most(leaf.value, high)
    return True


def _test(op: str, file: CommitFile, nulls: int | None) -> bool:
    if nulls is None:
        return True
    if op == "is_null":
        return nulls > 0
    if op == "is_not_null":
        return file.row_count < 0 or nulls < file.row_count
    return True


def _compare(op: CompareOp, value: Any, low: Any, high: Any) -> bool:
    value = _stored(value)
    if value is None:
        return True
    match op:
        case "==":
            return _at_most(low, value) and _at_most(value, high)
        case "!=":
            return low is None or high is None or not low == high == value
        case "<":
            return low is None or bool(low < value)
        case "<=":
            return _at_most(low, value)
        case ">":
            return high is None or bool(high > value)
        case _:
            return _at_most(value, high)


def _stored(value: Any) -> Any:
    """A value as statistics have it; None for kinds that they leave out."""
    if isinstance(value, datetime):
        return timestamp(value)
    if isinstance(value, date | time):
        return text_of_value(value)
    return None if isinstance(value, bytes) else value


def field_bounds(file: CommitFile, field: str, storage: str) -> tuple[Any, Any]:
    """The least and greatest value of a field in a file, which may be loose; None: not known."""
    low, high, _ = file.stats.get(field, (None, None, None))
    try:
        match storage:
            case "date":
                return _parsed(date.fromisoformat, low), _parsed(date.fromisoformat, high)
            case "datetime":
                return _parsed(parse_timestamp, low), _parsed(parse_timestamp, high)
            case "time":
                return _parsed(time.fromisoformat, low), _parsed(time.fromisoformat, high)
            case _ if decimal_type(storage) is not None:
                return _parsed(_decimal_bound, low), _parsed(_decimal_bound, high)
            case "str" | "int" | "bool":
                return low, high
    except (TypeError, ValueError):  # written by someone else
        return None, None
    return None, None


def _decimal_bound(bound: Any) -> Decimal:
    """TypeError for what is no decimal: statistics of someone else say nothing."""
    if not isinstance(bound, str):
        raise TypeError("a bound of decimals is a text")
    try:
        return Decimal(bound)
    except InvalidOperation:
        raise TypeError("a bound of decimals is a number") from None


def _parsed(parse: Callable[[str], Any], bound: Any) -> Any:
    return None if bound is None else parse(bound)


def holds_only_nulls(file: CommitFile, field: str) -> bool:
    nulls = file.stats.get(field, (None, None, None))[2]
    return nulls is not None and 0 <= file.row_count <= nulls


@dataclass(frozen=True, slots=True)
class CommitWindow:
    """Commits after `since`, up to `upto`; all versions, or the newest of each identity. Of the
    queried type those of one schema version only, where that is named."""

    upto: int
    since: int = 0
    history: bool = False
    schema_version: int | None = None

    def condition(self, entries: Sequence[Entry]) -> str:
        """What of it the entries alone do not say."""
        parts = []
        if any(entry.max_commit_id > self.upto for entry in entries):
            parts.append(f"q.commit_id <= {self.upto:d}")
        if any(entry.min_commit_id <= self.since for entry in entries):
            parts.append(f"q.commit_id > {self.since:d}")
        return " AND ".join(parts)


@dataclass(frozen=True)
class TypePlan:
    """The files of one type that a query opens.

    rows:    may hold rows of the answer
    newer:   may hold newer versions of identities in `rows`; their keys and commits are read, to
             confirm that a row is the newest of its identity. Empty when that needs no proof.
    pruned:  how many files were left out, by reason
    """

    spec: TypeSpec
    window: CommitWindow
    rows: tuple[DataFile, ...]
    newer: tuple[DataFile, ...] = ()
    entries: int = 0
    pruned: Mapping[str, int] = field(default_factory=dict)
    fallback: bool = False
    warning: str | None = None
    diagnostics: tuple[Diagnostic, ...] = ()

    @property
    def files(self) -> tuple[DataFile, ...]:
        """All that is opened; some may be there twice."""
        return self.rows + self.newer

    def facts(self) -> dict[str, Any]:
        files = {item.file.path: item.file for item in self.files}
        return {
            "type": self.spec.name,
            "entries": self.entries,
            "files": [item.file.path for item in self.rows],
            "files_checked_for_newer_versions": [item.file.path for item in self.newer],
            "pruned": dict(self.pruned),
            "rows_at_most": sum(item.file.row_count for item in self.rows),
            "bytes_at_most": sum(file.bytes for file in files.values()),
            "fallback": self.fallback,
            "warning": self.warning,
        }


def plan_type(
    spec: TypeSpec,
    top: TypeHead | None,
    resolution: Resolution,
    window: CommitWindow,
    *,
    conjuncts: Sequence[Conjunct] = (),
    keys: pa.Table | None = None,
    v1: bool = False,
    older: Mapping[int, TypeSpec] | None = None,
) -> TypePlan:
    """`conjuncts` are those that may leave files out; `keys` limits the read to identities.
    `older`: the type in schema versions whose rows are brought forward (v1)."""
    older = older or {}
    within = resolution.within(since=window.since, upto=window.upto)
    pruned: Counter[str] = Counter()
    pruned["commit window"] = _count(resolution.entries) - _count(within)
    files = []
    for entry in within:
        kept = entry.files if window.history else entry.newest_files(window.upto)
        pruned["superseded"] += len(entry.files) - len(kept)
        files += [DataFile(entry, file, older.get(file.schema_version_id)) for file in kept]
    ranges = _ranges(keys)
    by_key = [c.expression for c in conjuncts if c.reach == "identity"]
    by_value = [c.expression for c in conjuncts if c.reach == "typed"]
    reachable = [
        item
        for item in files
        if may_hold(item.file.key_range, ranges) and all(may_match(c, item.file) for c in by_key)
    ]
    rows = [
        item
        for item in reachable
        if item.stored is not None or all(may_match(c, item.file) for c in by_value)
    ]
    pruned["key range"] = len(files) - len(reachable)
    pruned["column statistics"] = len(reachable) - len(rows)
    return TypePlan(
        spec,
        window,
        tuple(rows),
        () if window.history else tuple(may_supersede(reachable, rows, window.upto)),
        entries=len(resolution.entries),
        pruned={reason: count for reason, count in pruned.items() if count},
        fallback=resolution.fallback,
        warning=resolution.warning,
        diagnostics=_remarks(top, window, v1=v1),
    )


def may_supersede(
    reachable: Sequence[DataFile], rows: Sequence[DataFile], upto: int
) -> list[DataFile]:
    """The files with a newer version of some row in `rows`, as far as key ranges tell."""
    wanted = {item.file.path for item in rows}
    older = KeyRanges()
    newer: list[DataFile] = []
    for entry, items in groupby(reachable, key=lambda item: item.entry):
        together = list(items)
        own = [item.file.leading_keys for item in together if item.file.path in wanted]
        repeats = not entry.unique(upto)
        if repeats:
            older.add(own)
        if older:
            newer += [item for item in together if older.overlaps(item.file.leading_keys)]
        if not repeats:
            older.add(own)
    return newer


def _count(entries: Iterable[Entry]) -> int:
    return sum(len(entry.files) for entry in entries)


def _ranges(keys: pa.Table | None) -> dict[str, KeyRange]:
    if keys is None or not keys.num_rows:
        return {}
    bounds = {name: pc.min_max(keys.column(name)).as_py() for name in keys.column_names}
    return {name: KeyRange(b["min"], b["max"]) for name, b in bounds.items()}


def _remarks(top: TypeHead | None, window: CommitWindow, *, v1: bool) -> tuple[Diagnostic, ...]:
    """Typed reads cover the current schema version (v1: all), of which there is nothing any more,
    or was nothing yet."""
    if top is None or window.schema_version is not None:
        return ()
    if top.is_dropped:
        return ({"reason": "type_dropped", "dropped_commit_id": top.dropped_commit_id},)
    if v1 or window.upto >= top.activation_commit_id:
        return ()
    return (
        {
            "reason": "commit_before_activation",
            "activation_commit_id": top.activation_commit_id,
        },
    )
