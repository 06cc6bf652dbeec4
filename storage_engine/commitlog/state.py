"""What the chain says, worked out from the head's checkpoint and the manifests since.

These are the questions a writer or reader may put to the truth itself when a projection (index,
catalog) is missing, behind or in doubt.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from storage_engine.commitlog.chain import Chain
from storage_engine.commitlog.records import (
    Checkpoint,
    CommitPoint,
    Entry,
    Head,
    Manifest,
    TypeHead,
    TypeRef,
    entry_of,
    timestamp,
)


@dataclass(frozen=True, slots=True)
class IdempotencyRecord:
    """The last unit of work that an application recorded."""

    version: int | str
    commit_id: int

    def covers(self, version: int | str) -> bool:
        """Integer versions grow, so a lower one has been applied; strings must be equal."""
        if isinstance(version, int) and isinstance(self.version, int):
            return version <= self.version
        return version == self.version


def type_heads(chain: Chain, head: Head) -> Mapping[TypeRef, TypeHead]:
    """For each known type, the commit that last touched it."""
    manifest = chain.head_manifest(head)
    if manifest is None:
        return {}
    if manifest.type_heads is not None:
        return manifest.type_heads
    # A log begun by an implementation that did not carry them: work them out once.
    heads: dict[TypeRef, TypeHead] = {}
    for path, older in reversed(chain.stretch(head.manifest_path, above=0)):
        if older.type_heads is not None:
            heads.update(older.type_heads)
        for file in older.files:
            before = heads.get(file.ref)
            heads[file.ref] = TypeHead(
                commit_id=older.commit_id,
                manifest_path=path,
                schema_version_id=file.schema_version_id,
                schema_sha256=before.schema_sha256 if before else "",
                activation_commit_id=before.activation_commit_id if before else older.commit_id,
            )
    return heads


def entries(
    chain: Chain, head: Head, ref: TypeRef, *, top: TypeHead | None, above: int = 0
) -> list[Entry]:
    """The files of a type in commits beyond `above`, oldest first, from the truth alone.

    `top` is the type's head: the walk starts there, so a type that was last touched long ago
    costs no walk over what others wrote since.
    """
    if top is None or top.commit_id <= above:
        return []
    collected: list[Entry] = []
    floor = above
    if head.checkpoint is not None and head.checkpoint.commit_id > above:
        floor = head.checkpoint.commit_id
        if top.commit_id > floor:
            chain.fetch_together(head.checkpoint, top.manifest_path)
        covered = chain.checkpoint(head.checkpoint).entries.get(ref, ())
        collected = [entry for entry in covered if entry.max_commit_id > above]
    if top.commit_id > floor:
        walked = reversed(chain.stretch(top.manifest_path, above=floor))
        collected += [entry for _, m in walked if (entry := entry_of(m, ref)) is not None]
    return collected


def last_applied(chain: Chain, head: Head, app_id: str) -> IdempotencyRecord | None:
    """The newest idempotency record of an application."""
    floor = head.checkpoint.commit_id if head.checkpoint else 0
    for _, manifest in chain.stretch(head.manifest_path, above=floor):
        mark = manifest.idempotency
        if mark is not None and mark["app_id"] == app_id:
            return IdempotencyRecord(mark["version"], manifest.commit_id)
    if head.checkpoint is None:
        return None
    mark = chain.checkpoint(head.checkpoint).idempotency.get(app_id)
    return IdempotencyRecord(mark["version"], mark["commit_id"]) if mark else None


def acked_since(chain: Chain, head: Head, above: int) -> set[tuple[str, str, str]]:
    """(namespace, event, handler) of the events that commits beyond `above` have handled."""
    if head.commit_id <= above:
        return set()
    return {
        (ack["namespace"], ack["event_id"], ack["handler_id"])
        for _, manifest in chain.stretch(head.manifest_path, above=above)
        for ack in manifest.acks
    }


def commit_at(chain: Chain, head: Head, moment: datetime) -> int:
    """The last commit at or before an instant, 0 when there is none."""
    manifest = chain.head_manifest(head)
    if manifest is None:
        return 0
    wanted = timestamp(moment)  # as the log writes them: the texts are in the order of time
    if manifest.created_at <= wanted:
        return manifest.commit_id
    floor = head.checkpoint.commit_id if head.checkpoint is not None else 0
    for _, older in chain.stretch(head.manifest_path, above=floor):
        if older.created_at <= wanted:
            return older.commit_id
    if head.checkpoint is None:
        return 0
    points = chain.checkpoint(head.checkpoint).commits
    after = bisect_right(points, wanted, key=lambda point: point.created_at)
    return points[after - 1].commit_id if after else 0


def schema_record(chain: Chain, head: Head, ref: TypeRef, at: TypeHead) -> Mapping[str, Any] | None:
    """The stored schema of a type's current version; None in logs that never recorded it."""
    if head.checkpoint is not None:
        versions = chain.checkpoint(head.checkpoint).schemas.get(ref, {})
        if at.schema_version_id in versions:
            return versions[at.schema_version_id]
    path = chain.locate(head, at.activation_commit_id)
    if path is None:
        return None
    for record in chain.manifest(path).schema.get("registered", ()):
        same = (record["kind"], record["type_name"]) == ref
        if same and record["schema_version_id"] == at.schema_version_id:
            return dict(record)
    return None


def next_checkpoint(chain: Chain, head: Head, manifest: Manifest, path: str) -> Checkpoint:
    """What head's checkpoint says, plus the manifests since, plus the commit being written."""
    return _extended(chain, head, [(path, manifest)], manifest.commit_id, manifest.log_id)


def current_checkpoint(chain: Chain, head: Head) -> Checkpoint:
    """What head's checkpoint says, plus the manifests since: the state as of head."""
    return _extended(chain, head, [], head.commit_id, head.log_id)


def _extended(
    chain: Chain, head: Head, more: Sequence[tuple[str, Manifest]], commit_id: int, log_id: str
) -> Checkpoint:
    base = chain.checkpoint(head.checkpoint) if head.checkpoint is not None else None
    since = chain.stretch(head.manifest_path, above=base.commit_id if base else 0)
    by_type = {ref: list(older) for ref, older in base.entries.items()} if base else {}
    schemas = (
        {ref: dict(versions_before) for ref, versions_before in base.schemas.items()}
        if base
        else {}
    )
    marks = dict(base.idempotency) if base else {}
    points = list(base.commits) if base else []
    for step_path, step in [*reversed(since), *more]:
        points.append(CommitPoint(step.commit_id, step.created_at, step_path))
        for ref in step.touched():
            by_type.setdefault(ref, []).append(
                Entry(step.commit_id, step.commit_id, step.files_of(ref))
            )
        for record in step.schema.get("registered", ()):
            versions = schemas.setdefault((record["kind"], record["type_name"]), {})
            versions[record["schema_version_id"]] = record
        if step.idempotency is not None:
            mark = step.idempotency
            marks[mark["app_id"]] = {"version": mark["version"], "commit_id": step.commit_id}
    return Checkpoint(
        commit_id=commit_id,
        log_id=log_id,
        entries={ref: tuple(run) for ref, run in by_type.items()},
        schemas=schemas,
        idempotency=marks,
        commits=tuple(points),
    )
