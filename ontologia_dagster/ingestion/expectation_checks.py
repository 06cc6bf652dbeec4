"""Expectations of a type as checks of its asset, one each, with counts, examples and history.

They are evaluated in Spark before anything is published, and told here. Where a broken one stops
the write, its check is recorded as failed before the step fails; where rows are set aside, it warns
and says where they are. `expect_rows_fit` is about all other reasons to refuse a row.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import dagster as dg

from ontologia_dagster.dagster_compat import last_evaluation
from ontologia_dagster.downstream.metadata import table
from storage_engine.errors import BadRowsError
from storage_engine.model.expectations import parse_expectation
from storage_engine.wording import counted, listed

if TYPE_CHECKING:
    from ontologia_dagster.declaration import OntologyAsset
    from storage_engine.spark.results import WriteResult

ROWS_FIT = "expect_rows_fit"


@dataclass(frozen=True)
class Broken:
    """What was found wrong with the rows of one write: counts and identities by reason."""

    reasons: Mapping[str, int]
    examples: Mapping[str, Sequence[str]] = field(default_factory=dict)
    rows: int | None = None  # that were read; unknown where the write was stopped
    place: str | None = None  # where rows are that were set aside
    preview: bool = False  # nothing was written or stopped

    @classmethod
    def of_result(cls, result: WriteResult, *, preview: bool = False) -> Broken:
        return cls(result.reasons, result.examples, result.rows, result.quarantine, preview)

    @classmethod
    def of_error(cls, error: BadRowsError) -> Broken:
        return cls(error.reasons, error.examples)


def expectation_checks(declared: OntologyAsset) -> list[dg.AssetCheckSpec]:
    """Specs of the asset's own checks; blocking where a broken one stops the write."""
    stops = declared.on_bad_rows == "fail"
    return [
        dg.AssetCheckSpec(name, asset=declared.asset_key, description=text, blocking=stops)
        for name, text in _described(declared).items()
    ]


def expectation_results(declared: OntologyAsset, broken: Broken) -> Iterator[dg.AssetCheckResult]:
    """One for each expectation, and one for what is none."""
    described = expected_conditions(declared)
    conditions = set(described.values())
    for name, condition in described.items():
        count = broken.reasons.get(condition, 0)
        parts = {condition: count} if count else {}
        yield _result(declared, name, parts, f"not so that {condition}", broken)
    others = {reason: n for reason, n in broken.reasons.items() if reason not in conditions}
    yield _result(declared, ROWS_FIT, others, "; ".join(others), broken)


def unlooked_results(
    declared: OntologyAsset, instance: dg.DagsterInstance, why: str
) -> Iterator[dg.AssetCheckResult]:
    """Of a run that has not looked at rows, for Dagster wants a result of each check. Where a
    broken expectation would have stopped the work that was done, none is; else the last result
    stands."""
    for name in [*expected_conditions(declared), ROWS_FIT]:
        key = dg.AssetCheckKey(declared.asset_key, name)
        last = last_evaluation(instance, key) if declared.on_bad_rows != "fail" else None
        yield dg.AssetCheckResult(
            asset_key=declared.asset_key,
            check_name=name,
            passed=last is None or last.passed,
            severity=dg.AssetCheckSeverity.WARN,
            description=why,
            metadata={**last.metadata} if last is not None else {},
        )


def expected_conditions(declared: OntologyAsset) -> dict[str, str]:
    """By the name of its check, what each expectation says. Names are of what is expected of which
    columns, so that a check keeps its history when a bound is moved."""
    named: dict[str, str] = {}
    for raw in declared.expectations:
        expectation = parse_expectation(raw)
        (kind,) = expectation.as_dict()
        stem = re.sub(r"\W+", "_", "_".join(["expect", kind, *expectation.columns]))
        number = sum(name == stem or name.startswith(f"{stem}_and_") for name in named) + 1
        named[stem if number == 1 else f"{stem}_and_{number}"] = expectation.describe()
    return named


def _described(declared: OntologyAsset) -> dict[str, str]:
    before = "of every row, before anything is published"
    return {name: f"{text}: {before}." for name, text in expected_conditions(declared).items()} | {
        ROWS_FIT: f"Values fit the type's fields, keys are there, lines can be read: {before}."
    }


def _result(
    declared: OntologyAsset,
    name: str,
    reasons: Mapping[str, int],
    what: str,
    broken: Broken,
) -> dg.AssetCheckResult:
    count = sum(reasons.values())
    stops = declared.on_bad_rows == "fail"
    metadata: dict[str, Any] = {"rows_broken": count}
    if broken.rows is not None:
        metadata["rows_read"] = broken.rows
    if not count:
        return dg.AssetCheckResult(
            asset_key=declared.asset_key, check_name=name, passed=True, metadata=metadata
        )
    examples = [
        (identity, reason) for reason in reasons for identity in broken.examples.get(reason, ())
    ]
    if examples:
        metadata["examples"] = table(["row", "why"], examples)
    if broken.place is not None:
        metadata["quarantine"] = broken.place
    shown = listed([identity for identity, _ in examples], count)
    sentence = f"{counted(count, 'row')} of {declared.type}: {what}{f' ({shown})' if shown else ''}"
    return dg.AssetCheckResult(
        asset_key=declared.asset_key,
        check_name=name,
        passed=False,
        severity=dg.AssetCheckSeverity.ERROR
        if stops and not broken.preview
        else dg.AssetCheckSeverity.WARN,
        description=f"{sentence}. {_next(stops, broken)}",
        metadata=metadata,
    )


def _next(stops: bool, broken: Broken) -> str:
    if broken.preview:
        return f"A run would {'stop at them' if stops else 'set them aside'}"
    if stops:
        return "Nothing was published: put the source right, or declare `on_bad_rows: quarantine`"
    return (
        f"They were set aside in {broken.place}; once they are right, "
        f"`--replay-quarantine {broken.place}` takes them"
    )
