"""Declared types against what a storage has of them: what differs, what that takes, whom to ask.

Every run that uses a type compares first, so that a class that was changed stops it before
anything is read, staged or claimed. What is additive goes by itself where the declaration says so;
whatever else stops the run with the difference as a table, the upgraders that nobody has written
yet, and the job and the command that go on from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import dagster as dg

from ontologia_dagster.downstream.metadata import table
from storage_engine.errors import ConfigurationError, SchemaOutdatedError, TypeDroppedError
from storage_engine.runtime.arguments import declared_types
from storage_engine.schema.comparison import SchemaComparison, compare_types

if TYPE_CHECKING:
    from ontologia_dagster.resources.ontology import SchemaAdvice
    from storage_engine.model.spec import TypeSpec
    from storage_engine.repository.protocol import Repository
    from storage_engine.schema.diff import SchemaDiff
    from storage_engine.schema.history import TypeRef
    from storage_engine.schema.upgraders import UpgraderKey


def types_in(modules: Iterable[str]) -> list[TypeSpec]:
    """The types that modules declare or import; none of a module that has none."""
    specs: dict[TypeRef, TypeSpec] = {}
    for module in modules:
        with suppress(ConfigurationError):
            specs |= declared_types(module)
    return list(specs.values())


def require_agreement(
    repository: Repository, declared: Sequence[TypeSpec], advice: SchemaAdvice
) -> None:
    """Stop the run unless all of these types are as the storage has them."""
    comparison = compare_types(declared, repository.type_histories)
    if not comparison.agrees:
        raise schema_failure(comparison, advice)


def schema_failure(comparison: SchemaComparison, advice: SchemaAdvice) -> dg.Failure:
    """What stops a run: trying again cannot help."""
    number = len(comparison.differing) + len(comparison.dropped)
    subject = "A declared type differs" if number == 1 else f"{number} declared types differ"
    needed = bool(comparison.missing)
    missing = f" {missing_sentence(comparison.missing)}." if needed else ""
    error = SchemaOutdatedError if comparison.differing else TypeDroppedError
    return dg.Failure(
        description=f"{subject} from the storage: {comparison.summary()}.{missing} "
        f"{advice.sentence(upgraders=needed)}",
        metadata={"error": error.__name__, **comparison_metadata(comparison, advice)},
        allow_retries=False,
    )


def comparison_metadata(comparison: SchemaComparison, advice: SchemaAdvice) -> dict[str, Any]:
    """The difference, and what to do about it."""
    needed = bool(comparison.missing)
    return {
        "schema_diff": diff_table(comparison.diffs),
        "missing_upgraders": missing_table(comparison.missing),
        **advice.metadata(upgraders=needed),
    }


# -- tables ---------------------------------------------------------------------------------------


def diff_table(diffs: Iterable[SchemaDiff]) -> dg.MetadataValue[Any]:
    """Each change of a field on a line, with what it takes."""
    return table(
        ["type", "version", "field", "change", "before", "after", "takes"],
        [line for diff in diffs for line in _diff_lines(diff)],
    )


def _diff_lines(diff: SchemaDiff) -> list[tuple[Any, ...]]:
    versions = f"{diff.from_version or '-'} -> {diff.to_version}"
    if not diff.changes:
        what = "stored form" if diff.from_version is not None else "created anew"
        return [(diff.type_name, versions, "", what, None, None, "nothing")]
    return [
        (
            diff.type_name,
            versions,
            change.path,
            change.change,
            change.before,
            change.after,
            _takes(diff, additive=change.additive, whole=not change.path),
        )
        for change in diff.changes
    ]


def _takes(diff: SchemaDiff, *, additive: bool, whole: bool) -> str:
    if additive:
        return "nothing"
    return "impossible" if diff.refusal is not None and whole else "an upgrader"


def missing_table(missing: Iterable[UpgraderKey]) -> dg.MetadataValue[Any]:
    return table(
        ["type", "from_version", "to_be_written"],
        [(name, version, _decorator(name, version)) for name, version in missing],
    )


def missing_sentence(missing: Iterable[UpgraderKey]) -> str:
    listed = ", ".join(_decorator(name, version) for name, version in missing)
    return f"Upgraders are missing: {listed}, each for a function of a row"


def _decorator(name: str, version: int) -> str:
    return f"@upgrader({name!r}, from_version={version})"
