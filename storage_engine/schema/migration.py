"""From declared types and stored versions to a migration: what changes, what is needed for it, and
how the rows get there. Planning reads nothing but schemas and writes nothing.

A migration is one commit. It makes new schema versions current and brings the latest rows into
them; whatever was written before stays as it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from storage_engine.errors import MigrationError, MigrationTokenError, MissingUpgraderError
from storage_engine.model.canonical import canonical_json
from storage_engine.model.spec import TypeSpec
from storage_engine.schema.diff import SchemaDiff, contradictions, diff_types, evolved
from storage_engine.schema.history import SchemaVersion, TypeHistory, TypeRef
from storage_engine.schema.rewrite import Rewrite, rewrite
from storage_engine.schema.upgraders import Upgrader, UpgraderKey, steps_from

SCHEMA_KINDS = ("migration", "drop")  # of commits that change versions, or end types
Progress = Callable[[str, int], None]  # type name, rows rewritten since it was told before


@dataclass(frozen=True, slots=True)
class TypeMigration:
    """One type's share: its new version, and where its rows come from.

    `source` is the version whose latest rows are brought over (of `source_ref`, the old type after
    a rename); None when there is nothing to bring: the type is new, or created anew.
    """

    spec: TypeSpec
    version: int
    diff: SchemaDiff
    source_ref: TypeRef
    source: SchemaVersion | None = None
    steps: tuple[Upgrader, ...] = ()
    missing: tuple[UpgraderKey, ...] = ()

    @property
    def ref(self) -> TypeRef:
        return self.spec.ref

    @property
    def rename(self) -> TypeRef | None:
        """The type that ends with this migration."""
        return self.source_ref if self.source_ref != self.ref else None

    def rewrite(self) -> Rewrite:
        """From rows of the source's row schema to rows of the new one."""
        assert self.source is not None
        return rewrite(self.source.spec, self.spec, self.steps)


class RowStager(Protocol):
    """Rewrites the latest rows of types elsewhere, such as on a cluster, for an engine that stages
    parts."""

    def stage(
        self, migration: TypeMigration, folder: Any, as_of: int
    ) -> Sequence[Mapping[str, Any]] | None:
        """Descriptions of parts, in a `PartFolder`, with all latest rows as of a commit, rewritten.
        None: this type is left to the engine."""

    def cancel(self) -> None:
        """What is staged cannot be published any more. Called from any thread."""


@dataclass(frozen=True, slots=True)
class TypeDrop:
    """A type that ends: dropped, or renamed."""

    kind: str
    type_name: str
    version: int  # that was current
    schema_sha256: str
    renamed_to: str | None = None
    purge: bool = False

    @property
    def ref(self) -> TypeRef:
        return self.kind, self.type_name


@dataclass(frozen=True, slots=True)
class MigrationPlan:
    """What a migration would do to a storage with these versions."""

    migrations: tuple[TypeMigration, ...] = ()

    @property
    def missing(self) -> list[UpgraderKey]:
        return [key for migration in self.migrations for key in migration.missing]

    @property
    def drops(self) -> list[TypeDrop]:
        """Types that others take the place of."""
        return [
            TypeDrop(
                *m.source_ref, m.source.version, m.source.schema_sha256, renamed_to=m.spec.name
            )
            for m in self.migrations
            if m.rename is not None and m.source is not None
        ]

    @property
    def sha256(self) -> str:
        """Of what it would do: the same on every machine, whatever the functions are."""
        plan = [
            {
                "ref": list(m.ref),
                "version": m.version,
                "schema_sha256": m.spec.schema_sha256,
                "source": [*m.source_ref, m.source.version, m.source.schema_sha256]
                if m.source is not None
                else None,
                "steps": [[s.type_name, s.from_version] for s in m.steps],
            }
            for m in self.migrations
        ]
        return hashlib.sha256(canonical_json(plan).encode()).hexdigest()

    def require_possible(self) -> None:
        """MissingUpgraderError or MigrationError when it cannot be done."""
        for migration in self.migrations:
            if migration.diff.refusal is not None:
                raise MigrationError(
                    f"{migration.spec.name}: {migration.diff.refusal}", type=migration.spec.name
                )
        if self.missing:
            sentences = [s for m in self.migrations if m.missing for s in m.diff.sentences()]
            raise MissingUpgraderError(self.missing, sentences)


@dataclass(frozen=True, slots=True)
class MigrationRequest:
    """What an engine is asked to publish as one commit of kind `migration` or `drop`."""

    migrations: Sequence[TypeMigration] = ()
    drops: Sequence[TypeDrop] = ()
    kind: str = "migration"
    metadata: Mapping[str, str] = field(default_factory=dict)
    holder: Mapping[str, Any] = field(default_factory=dict)
    progress: Progress | None = None
    stager: RowStager | None = None

    def check_unmoved(self, current: Callable[[TypeRef], StoredState | None]) -> None:
        """Under the lock: what was planned on still stands. `current` tells a type's newest
        version; None for one that was never stored."""
        for migration in self.migrations:
            if migration.source is not None:
                before = migration.source
                expected = StoredState(before.version, before.schema_sha256)
                _require_same(migration.source_ref, expected, current(migration.source_ref))
            if migration.source is None or migration.rename is not None:
                state = current(migration.ref)
                if state is not None and not state.dropped:
                    _moved(migration.ref, state)
                if state is not None and state.version >= migration.version:
                    _moved(migration.ref, state)
        for drop in self.drops:
            if drop.renamed_to is None:
                expected = StoredState(drop.version, drop.schema_sha256)
                state = current(drop.ref)
                if drop.purge and state == replace(expected, dropped=True):
                    continue  # dropped before, and now its rows go too
                _require_same(drop.ref, expected, state)


@dataclass(frozen=True, slots=True)
class StoredState:
    """A type's newest version, and whether it was dropped since."""

    version: int
    schema_sha256: str
    dropped: bool = False


@dataclass(frozen=True, slots=True)
class MigrationOutcome:
    """What an engine has published."""

    commit_id: int
    rows: Mapping[TypeRef, int] = field(default_factory=dict)  # brought into the new versions
    attempts: int = 1
    lock_wait_ms: float = 0.0


def drop_record(
    ref: TypeRef, *, renamed_to: str | None = None, purge: bool = False
) -> dict[str, Any]:
    """How a log tells that a type ended with a commit."""
    record: dict[str, Any] = {"kind": ref[0], "type_name": ref[1]}
    if renamed_to is not None:
        record["renamed_to"] = renamed_to
    if purge:
        record["purge"] = True
    return record


def plan_migration(
    declared: Sequence[TypeSpec],
    histories: Mapping[TypeRef, TypeHistory],
    upgraders: Mapping[UpgraderKey, Upgrader],
) -> MigrationPlan:
    """What makes the declared types current. `histories` are of all types that are declared, or
    named by a `renamed_from`, and of relations that point to those."""
    declared_refs = {spec.ref for spec in declared}
    _check_markers(declared)
    sources = {
        spec.ref: source for spec in declared if (source := _source(spec, histories)) is not None
    }
    renames = {
        source.name: ref[1]
        for ref, source in sources.items()
        if ref[0] == "entity" and source.name != ref[1]
    }
    ends = present_names(histories, renames)
    migrations = [
        migration
        for spec in declared
        if (
            migration := _migration(
                spec, histories.get(spec.ref), sources.get(spec.ref), ends, upgraders
            )
        )
        is not None
    ]
    stranded = _stranded(ends, set(renames.values()), histories, declared_refs)
    checked = [_checked_rename(migration, stranded, declared_refs) for migration in migrations]
    return MigrationPlan(tuple(sorted(checked, key=lambda m: m.ref)))


def _stranded(
    ends: Mapping[str, str],
    renamed: set[str],
    histories: Mapping[TypeRef, TypeHistory],
    declared: set[TypeRef],
) -> dict[str, list[str]]:
    """By the new name of each entity type that this renames: the relations that would go on
    pointing to the old one."""
    stranded: dict[str, list[str]] = {}
    for history in histories.values():
        if history.kind != "relation" or history.current is None or history.ref in declared:
            continue
        for end in dict.fromkeys((history.current.spec.left, history.current.spec.right)):
            if (name := ends.get(end or "")) in renamed:
                stranded.setdefault(str(name), []).append(history.name)
    return stranded


def _checked_rename(
    migration: TypeMigration, stranded: Mapping[str, Sequence[str]], declared: set[TypeRef]
) -> TypeMigration:
    """With a refusal if it takes the place of a type that cannot end, or not so."""
    if migration.rename is None:
        return migration
    (_, old), new = migration.rename, migration.spec.name
    relations = stranded.get(new) if migration.spec.kind == "entity" else None
    if migration.rename in declared:
        refusal = (
            f"it is marked as renamed from {old}, which is stored and still declared. To rename "
            f"it, leave the class {old} out (a new type can have the name with the next "
            f"migration); to store {new} as a new type, take renamed_from away"
        )
    elif relations is not None:
        refusal = (
            f"{old} is an end of {', '.join(sorted(relations))}, which would point to nothing: "
            f"declare {'them' if len(relations) > 1 else 'it'} with {new} as that end, in the same "
            "migration"
        )
    else:
        return migration
    return replace(migration, diff=replace(migration.diff, refusal=refusal))


def _check_markers(declared: Sequence[TypeSpec]) -> None:
    """Types cannot take each other's place in one migration."""
    markers = {s.ref: (s.kind, s.renamed_from) for s in declared if s.renamed_from is not None}
    for ref, source in markers.items():
        ring, at = [ref], source
        while at in markers and at not in ring:
            ring.append(at)
            at = markers[at]
        if at == ref:
            raise MigrationError(
                f"{', '.join(name for _, name in ring)} are marked as renamed from each other, and "
                "no name is free. Rename one of them to a name that no type has and migrate, then "
                "rename the others one after the other; types that keep their names need no "
                "renamed_from",
                type=ref[1],
            )


def metadata_of(migrations: Sequence[TypeMigration], rows: Mapping[TypeRef, int]) -> dict[str, str]:
    """What the migration commit says about itself (RFC 0009, 6.1)."""
    migrated = [
        {
            "type_kind": m.spec.kind,
            "type_name": m.spec.name,
            "from_schema_version_id": m.source.version if m.source is not None else None,
            "to_schema_version_id": m.version,
            "rows_rewritten": rows.get(m.ref, 0),
        }
        for m in migrations
    ]
    return {"kind": "migration", "migrated_types": canonical_json(migrated)}


def _source(spec: TypeSpec, histories: Mapping[TypeRef, TypeHistory]) -> TypeHistory | None:
    """Whose rows the type has, or takes over."""
    own = histories.get(spec.ref)
    if own is not None and own.current is not None:
        return own
    old = histories.get((spec.kind, spec.renamed_from or ""))
    return old if old is not None and old.current is not None else None


def present_names(
    histories: Mapping[TypeRef, TypeHistory], renames: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Of entity types that had another name: what each is called now, once these `renames` are
    done. A name that was given to another type since means that one."""
    renames = renames or {}
    steps = {
        history.name: history.renamed_to
        for history in histories.values()
        if history.kind == "entity"
        and history.renamed_to is not None
        and history.name not in renames.values()
    } | dict(renames)
    names = dict(steps)
    for _ in steps:  # none of them is longer than all
        names = {old: steps.get(name, name) for old, name in names.items()}
    return names


def _migration(
    spec: TypeSpec,
    own: TypeHistory | None,
    source: TypeHistory | None,
    renames: Mapping[str, str],
    upgraders: Mapping[UpgraderKey, Upgrader],
) -> TypeMigration | None:
    last = own.last.version if own is not None else 0
    if source is None:
        diff = SchemaDiff(spec.kind, spec.name, (), None, last + 1)
        highest = own.highest_field_id if own is not None else 0
        empty = TypeSpec(spec.kind, spec.name, ())
        target = evolved(empty, spec, highest_id=highest) if own is not None else spec
        return TypeMigration(target, last + 1, diff, spec.ref)
    current = source.current
    assert current is not None
    if source.ref == spec.ref and is_same(current.spec, spec):
        return None
    changed = diff_types(current.spec, spec, renames=renames)
    names = [spec.name, *([source.name] if source.name != spec.name else [])]
    steps = steps_from(upgraders, names, current.version)
    version = max(current.version + max(len(steps), 1), last + 1)
    missing = () if steps or changed.additive else ((spec.name, current.version),)
    refusal = changed.refusal
    if refusal is None and not steps:
        refusal = "; ".join(contradictions(current.spec, spec)) or None
    diff = SchemaDiff(
        changed.kind,
        changed.type_name,
        changed.changes,
        current.version,
        version,
        changed.renamed_from,
        refusal,
    )
    target = evolved(current.spec, spec, highest_id=source.highest_field_id)
    return TypeMigration(target, version, diff, source.ref, current, tuple(steps), missing)


def is_same(stored: TypeSpec, declared: TypeSpec) -> bool:
    """Whether a class is what is stored: the order of fields and of unions aside."""
    if stored.schema_sha256 == declared.schema_sha256:
        return True
    return declared.aligned(stored.schema_dict()).schema_sha256 == stored.schema_sha256


def _require_same(ref: TypeRef, expected: StoredState, state: StoredState | None) -> None:
    if state != expected:
        _moved(ref, state)


def _moved(ref: TypeRef, state: StoredState | None) -> None:
    kind, name = ref
    if state is None:
        now = "is not stored any more"
    elif state.dropped:
        now = "was dropped"
    else:
        now = f"has schema version {state.version} now"
    raise MigrationTokenError(
        f"{kind} {name} {now}: another migration was faster, and nothing was published. Look at a "
        "new preview (`onto migrate`), and apply that if something is left to do"
    )
