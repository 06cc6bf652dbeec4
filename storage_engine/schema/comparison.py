"""How declared types stand to those of a storage: the same, new, changed, or ended there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from storage_engine.model.spec import TypeSpec
from storage_engine.schema.diff import SchemaDiff
from storage_engine.schema.history import TypeHistory, TypeRef
from storage_engine.schema.migration import MigrationPlan, TypeMigration, plan_migration
from storage_engine.schema.upgraders import UpgraderKey


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


def compare_types(
    declared: Sequence[TypeSpec], type_histories: Callable[..., Mapping[TypeRef, TypeHistory]]
) -> SchemaComparison:
    """`type_histories` is a repository's: schemas are read and nothing else."""
    # The ends of a relation may have been renamed, and a rename may strand relations, which only
    # the histories of others tell.
    every = any(spec.kind == "relation" or spec.renamed_from is not None for spec in declared)
    histories = type_histories(None if every else _refs(declared))
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
