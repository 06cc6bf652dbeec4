"""Declared types against what a storage has of them: what differs, what that takes, whom to ask.

Every run that uses a type compares first, so that a class that was changed stops it before
anything is read, staged or claimed. What is additive goes by itself where the declaration says so;
whatever else stops the run with the difference as a table, the upgraders that nobody has written
yet, and the job and the command that go on from there.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import dagster as dg

from ontologia_dagster.downstream.metadata import table
from storage_engine.errors import (
    ConfigurationError,
    MigrationTokenError,
    MissingUpgraderError,
    SchemaOutdatedError,
    TypeDroppedError,
)
from storage_engine.runtime.arguments import declared_types
from storage_engine.schema.migration import MigrationPlan, TypeMigration, plan_migration

if TYPE_CHECKING:
    from ontologia_dagster.resources.ontology import OntologyResource
    from storage_engine.model.spec import TypeSpec
    from storage_engine.repository.protocol import Repository
    from storage_engine.schema.diff import SchemaDiff
    from storage_engine.schema.history import TypeHistory, TypeRef
    from storage_engine.schema.upgraders import UpgraderKey

SCHEMA_VERSION = "schema_version"
COLUMN_CHANGES = "column_changes"
_MODULE = "MODULE"  # stands for what nobody knows
_ABOUT_SCHEMA = {
    error.__name__
    for error in (SchemaOutdatedError, TypeDroppedError, MissingUpgraderError, MigrationTokenError)
}


def migration_job_name(storage: str) -> str:
    return f"{storage}_migration"


@dataclass(frozen=True)
class SchemaAdvice:
    """What to do about a class that differs: the job, where it is known, and the command for those
    at a terminal."""

    job: str | None
    location: str
    storage_uri: str
    models: str = _MODULE

    @classmethod
    def of(
        cls, ontology: OntologyResource, storage: str | None, models: str | None = None
    ) -> SchemaAdvice:
        """`storage` is the key of the resource."""
        job = migration_job_name(storage) if storage is not None else None
        return cls(job, ontology.location, ontology.storage_uri, models or _MODULE)

    def command(self, *, upgraders: bool = False) -> str:
        more = f" --upgraders {_MODULE}" if upgraders else ""
        uri = shlex.quote(self.storage_uri)
        return f"onto migrate --models {shlex.quote(self.models)}{more} --storage-uri {uri}"

    def sentence(self, *, upgraders: bool = False) -> str:
        job = f"the job {self.job} or " if self.job is not None else ""
        return (
            f"Run {job}`{self.command(upgraders=upgraders)}`: it shows what it would do, and a "
            "token to apply it with"
        )

    def metadata(self, *, upgraders: bool = False) -> dict[str, Any]:
        metadata: dict[str, Any] = {"command": self.command(upgraders=upgraders)}
        if self.job is not None:
            metadata["migration_job"] = dg.MetadataValue.job(self.job, self.location)
        return metadata

    def about(self, error: str, facts: Mapping[str, Any]) -> dict[str, Any]:
        """For a failure, by its error's name: nothing where it is about something else."""
        if error not in _ABOUT_SCHEMA:
            return {}
        differences = facts.get("differences") or ()
        listed = "\n".join(f"- {sentence}" for sentence in differences)
        return {
            **({"differences": dg.MetadataValue.md(listed)} if listed else {}),
            **self.metadata(upgraders=error == MissingUpgraderError.__name__),
        }


@dataclass(frozen=True)
class SchemaComparison:
    """How some declared types stand to a storage. Types that are not stored yet are no difference:
    their first write makes them."""

    differing: tuple[TypeMigration, ...] = ()
    dropped: tuple[TypeHistory, ...] = ()
    versions: Mapping[TypeRef, int] = field(default_factory=dict)  # that are current

    @property
    def agrees(self) -> bool:
        return not self.differing and not self.dropped

    @property
    def additive(self) -> bool:
        """Whether all that differs needs nobody's help. A type that takes another's place does, as
        that is the end of the other, which somebody may still write."""
        return not self.dropped and all(
            m.diff.additive and m.rename is None for m in self.differing
        )

    @property
    def diffs(self) -> list[SchemaDiff]:
        return [migration.diff for migration in self.differing]

    @property
    def missing(self) -> list[UpgraderKey]:
        return MigrationPlan(self.differing).missing

    def sentences(self) -> list[str]:
        told = []
        for migration in self.differing:
            assert migration.source is not None
            what = "; ".join(migration.diff.sentences()) or "its stored form differs"
            if migration.rename is not None:
                what = f"takes the place of {migration.rename[1]}; {what}"
            if migration.diff.refusal is not None:
                what = f"{what}; {migration.diff.refusal}"
            told.append(
                f"{migration.spec.name} (stored version {migration.source.version}): {what}"
            )
        for history in self.dropped:
            what = f"renamed to {history.renamed_to}" if history.renamed_to else "dropped"
            told.append(f"{history.name} was {what} by commit {history.dropped_commit_id}")
        return told

    def summary(self) -> str:
        return "; ".join(self.sentences())


def compare(repository: Repository, declared: Sequence[TypeSpec]) -> SchemaComparison:
    """Reads schemas and nothing else."""
    # The ends of a relation may have been renamed, which only the histories of others tell.
    every = any(spec.kind == "relation" for spec in declared)
    histories = repository.type_histories(None if every else _refs(declared))
    plan = plan_migration(declared, histories, {})
    return SchemaComparison(
        differing=tuple(m for m in plan.migrations if m.source is not None),
        dropped=tuple(
            histories[m.ref] for m in plan.migrations if m.source is None and m.ref in histories
        ),
        versions={
            spec.ref: history.current.version
            for spec in declared
            if (history := histories.get(spec.ref)) is not None and history.current is not None
        },
    )


def _refs(declared: Iterable[TypeSpec]) -> list[TypeRef]:
    names = [(s.kind, name) for s in declared for name in (s.name, s.renamed_from) if name]
    return list(dict.fromkeys(names))


def with_ends(spec: TypeSpec, models: str) -> list[TypeSpec]:
    """A type, and of a relation the types at its ends: a rename of one is a change of both."""
    ends = {("entity", name) for name in (spec.left, spec.right) if name is not None}
    declared = declared_types(models, option="models") if ends else {}
    return [spec, *(other for ref, other in declared.items() if ref in ends)]


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
    comparison = compare(repository, declared) if declared else SchemaComparison()
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


# -- what an asset shows --------------------------------------------------------------------------


def schema_metadata(
    repository: Repository, spec: TypeSpec, instance: dg.DagsterInstance, key: dg.AssetKey
) -> dict[str, Any]:
    """The version that the type's rows have, and what changed since the asset was last
    materialised. Nothing for a type that is not stored yet."""
    history = repository.type_histories([spec.ref]).get(spec.ref)
    if history is None or history.current is None:
        return {}
    version = history.current.version
    changes = column_changes(history, last_version(instance, key), version)
    return {SCHEMA_VERSION: version, **changes}


def last_version(instance: dg.DagsterInstance, key: dg.AssetKey) -> int | None:
    """The schema version of the last materialisation; None when none of them tells."""
    event = instance.get_latest_materialization_event(key)
    made = event.asset_materialization if event is not None else None
    told = made.metadata.get(SCHEMA_VERSION) if made is not None else None
    return told.value if told is not None and isinstance(told.value, int) else None


def column_changes(history: TypeHistory, before: int | None, now: int) -> dict[str, Any]:
    """What became of columns between two versions, as a table; nothing where nothing did."""
    from storage_engine.schema.lineage import diff_versions

    older, newer = history.version(before or now), history.version(now)
    if older is None or newer is None or older is newer:
        return {}
    diff = diff_versions(older, newer)
    return {
        "schema_version_before": older.version,
        COLUMN_CHANGES: table(
            ["column", "change", "before", "after"],
            [(change.path, change.change, change.before, change.after) for change in diff.changes],
        ),
    }
