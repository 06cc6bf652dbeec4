"""Declared types against stored ones: `validate`, `migrate`, and drops.

Previews read schemas and count rows. What is applied is planned anew on the storage as it is then,
and must be what the token stands for.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from storage_engine.errors import (
    ConfigurationError,
    DropDependencyError,
    MigrationTokenError,
    SchemaOutdatedError,
    TypeDroppedError,
)
from storage_engine.model.spec import Kind, TypeSpec
from storage_engine.query.aggregates import count
from storage_engine.query.spec import QuerySpec
from storage_engine.repository.protocol import Repository, labels
from storage_engine.runtime.reads import stored_history
from storage_engine.schema.history import TypeHistory, TypeRef
from storage_engine.schema.migration import (
    MigrationPlan,
    MigrationRequest,
    Progress,
    RowStager,
    TypeDrop,
    TypeMigration,
    plan_migration,
    present_names,
)
from storage_engine.schema.preview import (
    DropPreview,
    MigrationPreview,
    MigrationResult,
    check_token,
    drop_token,
    migration_token,
)
from storage_engine.schema.upgraders import UpgraderSource, resolve_upgraders

_COMMITS_LOOKED_AT = 100
_PREVIEW = "`onto migrate`, `session.migrate()`"


def validate(repository: Repository, declared: Sequence[TypeSpec]) -> None:
    """Raise unless all of these types are as the storage has them. New ones are fine."""
    histories = repository.type_histories()
    plan = plan_migration(declared, histories, {})
    changed = [m for m in plan.migrations if m.source is not None]
    dropped = [histories[m.ref] for m in plan.migrations if m.source is None and m.ref in histories]
    if not changed and dropped:
        raise _dropped(dropped[0])
    if changed:
        raise _outdated(changed, dropped)


def preview(
    repository: Repository, declared: Sequence[TypeSpec], upgraders: UpgraderSource | None = None
) -> MigrationPreview:
    """What `apply` would do now."""
    head = repository.head_commit_id()
    plan = plan_migration(declared, repository.type_histories(), resolve_upgraders(upgraders))
    names = _names(plan.migrations)
    rows = {
        name: _latest_rows(repository, m.source.spec)
        for name, m in names.items()
        if m.source is not None
    }
    return MigrationPreview(
        has_changes=bool(plan.migrations),
        token=migration_token(head, plan),
        diffs=tuple(m.diff for m in plan.migrations),
        estimated_rows=rows,
        types_requiring_upgraders=tuple(n for n, m in names.items() if not m.diff.additive),
        types_schema_only=tuple(n for n in names if not rows.get(n)),
        missing_upgraders=tuple(plan.missing),
    )


def apply(
    repository: Repository,
    declared: Sequence[TypeSpec],
    upgraders: UpgraderSource | None = None,
    *,
    token: str | None = None,
    force: bool = False,
    progress: Progress | None = None,
    holder: Mapping[str, Any] | None = None,
    stager: RowStager | None = None,
) -> MigrationResult:
    """Make the declared types current, in one commit; with nothing to do, in none. `stager` says
    who rewrites the rows of which types, where that is not the engine itself."""
    if token is None and not force:
        raise MigrationTokenError(
            "to migrate takes the token of a preview, so that what happens is what was looked at: "
            f"{_PREVIEW} shows it; force=True (`--force`) goes without"
        )
    begun = time.monotonic()
    head = repository.head_commit_id()
    plan = plan_migration(declared, repository.type_histories(), resolve_upgraders(upgraders))
    if not plan.migrations:
        return MigrationResult(success=True, duration_s=time.monotonic() - begun)
    plan.require_possible()
    if token is not None and not force:
        expected = migration_token(head, plan)
        moved = _moved(repository, token, head)
        check_token(token, expected, moved=moved, command=_PREVIEW)
    outcome = repository.migrate(_request(plan, progress, holder, stager))
    names = _names(plan.migrations)
    return MigrationResult(
        success=True,
        types_migrated=tuple(names),
        rows_migrated={n: outcome.rows.get(m.ref, 0) for n, m in names.items()},
        new_schema_versions={n: m.version for n, m in names.items()},
        duration_s=time.monotonic() - begun,
        commit_id=outcome.commit_id,
    )


def _request(
    plan: MigrationPlan,
    progress: Progress | None,
    holder: Mapping[str, Any] | None,
    stager: RowStager | None,
) -> MigrationRequest:
    return MigrationRequest(
        migrations=plan.migrations,
        drops=plan.drops,
        holder=dict(holder or {}),
        progress=progress,
        stager=stager,
    )


# --- drops --------------------------------------------------------------------------------------


def preview_drop(
    repository: Repository,
    name: str,
    *,
    kind: Kind | None = None,
    cascade: bool = False,
    purge: bool = False,
) -> DropPreview:
    """What `apply_drop` would end. DropDependencyError when relations depend on the type, unless
    they go with it."""
    head = repository.head_commit_id()
    history = stored_history(repository, name, kind)
    if history.current is None:
        drops = [_purged(history, purge=purge)]
        return DropPreview(tuple(drops), drop_token(head, drops), past_of=history.renamed_to)
    dependents = _dependents(history, repository.type_histories())
    if dependents and not cascade:
        raise DropDependencyError(type=name, dependents=[h.name for h in dependents])
    types = [history, *dependents]
    drops = [_drop(each, purge=purge) for each in types]
    return DropPreview(
        tuple(drops),
        drop_token(head, drops),
        {each.ref: _latest_rows(repository, each.last.spec) for each in types},
        tuple(each.name for each in dependents),
    )


def apply_drop(
    repository: Repository,
    name: str,
    *,
    token: str,
    kind: Kind | None = None,
    cascade: bool = False,
    purge: bool = False,
) -> tuple[DropPreview, int]:
    """What was dropped, and the commit that did it."""
    head = repository.head_commit_id()
    plan = preview_drop(repository, name, kind=kind, cascade=cascade, purge=purge)
    moved = _moved(repository, token, head)
    check_token(token, plan.token, moved=moved, command=f"`onto schema drop {name}`")
    outcome = repository.migrate(MigrationRequest(drops=plan.drops, kind="drop"))
    return plan, outcome.commit_id


def _dependents(
    history: TypeHistory, histories: Mapping[TypeRef, TypeHistory]
) -> list[TypeHistory]:
    """The relation types with this entity type as an end, be it under a name of before."""
    if history.kind != "entity":
        return []
    names = present_names(histories)
    return [
        other
        for other in histories.values()
        if other.current is not None
        and other.kind == "relation"
        and history.name
        in {
            names.get(end or "", end) for end in (other.current.spec.left, other.current.spec.right)
        }
    ]


def _drop(history: TypeHistory, *, purge: bool) -> TypeDrop:
    last = history.last
    return TypeDrop(history.kind, history.name, last.version, last.schema_sha256, purge=purge)


def _purged(history: TypeHistory, *, purge: bool) -> TypeDrop:
    """Of a type that was dropped before: its data can go."""
    if history.purged:
        raise ConfigurationError(f"{history.name} was dropped, and its data is gone")
    if not purge:
        raise ConfigurationError(
            f"{history.name} was dropped by commit {history.dropped_commit_id} already; its data "
            "can be removed for good (--purge)"
        )
    return _drop(history, purge=True)


# --- parts --------------------------------------------------------------------------------------


def _outdated(
    changed: Sequence[TypeMigration], dropped: Sequence[TypeHistory]
) -> SchemaOutdatedError:
    told: list[str] = []
    differences: list[str] = []
    for migration in changed:
        source = migration.source
        assert source is not None
        sentences = migration.diff.sentences() or ["its stored schema differs"]
        if migration.diff.refusal is not None:
            sentences.append(migration.diff.refusal)
        differences += [f"{migration.spec.name}: {sentence}" for sentence in sentences]
        told.append(
            f"{migration.spec.name} (stored version {source.version}): {'; '.join(sentences)}"
        )
    for history in dropped:
        error = _dropped(history)
        differences.append(str(error))
        told.append(str(error))
    names = [migration.spec.name for migration in changed]
    subject = "a declared type differs" if len(told) == 1 else f"{len(told)} declared types differ"
    first = changed[0].source
    return SchemaOutdatedError(
        f"{subject} from the storage. {'. '.join(told)}. See what a migration would do: "
        "`onto migrate --models MODULE`, `session.migrate()`",
        type=", ".join(names),
        stored_version=first.version if len(changed) == 1 and first is not None else None,
        differences=differences,
    )


def _dropped(history: TypeHistory) -> TypeDroppedError:
    assert history.dropped_commit_id is not None
    return TypeDroppedError(
        type=history.name,
        dropped_commit_id=history.dropped_commit_id,
        renamed_to=history.renamed_to,
    )


def _names(migrations: Sequence[TypeMigration]) -> dict[str, TypeMigration]:
    """By name, with the kind where two types share it."""
    return dict(zip(labels([m.ref for m in migrations]), migrations, strict=True))


def _latest_rows(repository: Repository, spec: TypeSpec) -> int:
    asked = QuerySpec(spec, aggregates=(("rows", count()),))
    return int(repository.executor().aggregate(asked).column("rows")[0].as_py())


def _moved(repository: Repository, token: str, head: int) -> str:
    """What commits since a preview did, for the message."""
    before, _, _ = token.partition("-")
    if not before.isdigit() or not 0 <= int(before) < head:
        return ""
    since = int(before)
    commits = repository.list_commits(_COMMITS_LOOKED_AT, since)
    changed = {name: "changed" for record in commits for name in record.types}
    for history in repository.type_histories().values():
        if history.last.activation_commit_id > since:
            changed[history.name] = f"has schema version {history.last.version} now"
        if (history.dropped_commit_id or 0) > since:
            changed[history.name] = "was dropped"
    told = ", ".join(f"{name} {what}" for name, what in sorted(changed.items()))
    return f" ({told})" if told else ""
