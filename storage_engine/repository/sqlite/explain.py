"""A query's plan in words and in facts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from storage_engine.model.expressions import json_form
from storage_engine.query.executor import Diagnostic, Plan
from storage_engine.query.spec import QuerySpec
from storage_engine.query.statements import Statement
from storage_engine.repository.sqlite.versions import Seen


def described(
    spec: QuerySpec,
    engine: str,
    seen: Seen,
    asked: Sequence[tuple[Statement, list[str]]],
    remarks: Sequence[Diagnostic],
) -> Plan:
    """`asked`: the statements, with SQLite's plan for each."""
    lines = [f"{spec.type.name} on {engine}, head {seen.head}: {_versions(seen)}"]
    for statement, plan in asked:
        lines += ["", statement.sql, *(f"  {line}" for line in plan)]
    if not asked:
        lines.append("nothing to read: there are no such versions")
    facts: dict[str, Any] = {
        "engine": engine,
        "head": seen.head,
        "window": seen.as_json(),
        "query": spec.as_json(),
        "sql": ";\n".join(statement.sql for statement, _ in asked),
        "statements": [
            {
                "sql": statement.sql,
                "parameters": {k: json_form(v) for k, v in statement.parameters.items()},
                "plan": plan,
            }
            for statement, plan in asked
        ],
        "diagnostics": [dict(remark) for remark in remarks],
    }
    return Plan("\n".join(lines), facts)


def _versions(seen: Seen) -> str:
    if seen.history:
        return f"all versions after commit {seen.since} up to commit {seen.upto}"
    return f"the newest version of each identity as of commit {seen.upto}"
