"""How a query is answered, for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from storage_engine.commitlog.records import Head
from storage_engine.query.executor import Plan
from storage_engine.query.spec import QuerySpec
from storage_engine.query.statements import Statement
from storage_engine.repository.object.query.plan import TypePlan

_FILES_SHOWN = 10


def explained(
    spec: QuerySpec,
    head: Head,
    plans: Sequence[TypePlan],
    statement: Statement,
    duckdb_plan: str,
    duckdb_tree: Any,
) -> Plan:
    window = plans[0].window
    lines = [
        f"{spec.type.kind} {spec.type.name}, {spec.when}: commits "
        f"{window.since + 1} to {window.upto} of head {head.commit_id}"
    ]
    for plan in plans:
        lines += _type_lines(plan)
    lines += [f"note: {dict(note)}" for plan in plans for note in plan.diagnostics]
    lines += ["", "DuckDB", duckdb_plan]
    facts = {
        "engine": "duckdb",
        "head": head.commit_id,
        "query": spec.as_json(),
        "window": {"since": window.since, "upto": window.upto, "history": window.history},
        "types": [plan.facts() for plan in plans],
        "diagnostics": [dict(note) for plan in plans for note in plan.diagnostics],
        "sql": statement.sql,
        "duckdb": duckdb_tree,
    }
    return Plan("\n".join(lines), facts)


def _type_lines(plan: TypePlan) -> list[str]:
    size = sum(item.file.bytes for item in plan.rows)
    total = len(plan.rows) + sum(plan.pruned.values())
    lines = [
        f"{plan.spec.name}: {len(plan.rows)} of {total} files, {size:,} bytes, "
        f"from {'the commit chain' if plan.fallback else 'the index'} ({plan.entries} entries)"
    ]
    lines += [f"  left out by {reason}: {count}" for reason, count in plan.pruned.items()]
    if plan.newer:
        lines.append(f"  checked for newer versions, keys only: {len(plan.newer)} files")
    if plan.warning is not None:
        lines.append(f"  warning: {plan.warning}")
    lines += [f"  {item.file.path}" for item in plan.rows[:_FILES_SHOWN]]
    if len(plan.rows) > _FILES_SHOWN:
        lines.append(f"  ... and {len(plan.rows) - _FILES_SHOWN} more")
    return lines
