"""Commits as people look at them: lists, one commit, what it changed, the one that did a work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from storage_engine.commitlog import state
from storage_engine.commitlog.chain import Chain
from storage_engine.commitlog.records import Entry, Head, Manifest, TypeRef, parse_timestamp
from storage_engine.model.spec import TypeSpec
from storage_engine.query.dialects import quoted
from storage_engine.repository.object.read.latest import Versions
from storage_engine.repository.protocol import (
    AppliedUnit,
    CommitRecord,
    Idempotency,
    WrittenRows,
)
from storage_engine.schema.history import TypeHistory


def list_commits(chain: Chain, limit: int, since: int) -> list[CommitRecord]:
    if limit <= 0:
        return []
    head = chain.read_head().head
    return [_record(m) for m in chain.newest(head, limit=limit, above=since)]


def commits_between(chain: Chain, since: int, upto: int) -> list[CommitRecord]:
    head = chain.read_head().head
    top = chain.locate(head, min(upto, head.commit_id))
    return [_record(m) for _, m in reversed(chain.stretch(top, above=max(since, 0)))]


def get_commit(chain: Chain, commit_id: int) -> CommitRecord | None:
    manifest = _find(chain, commit_id)
    return _record(manifest) if manifest is not None else None


def sent_events(chain: Chain, commit_id: int) -> Sequence[Mapping[str, Any]]:
    manifest = _find(chain, commit_id)
    return manifest.events if manifest is not None else ()


def identity_counts(
    chain: Chain, head: Head, histories: Mapping[TypeRef, TypeHistory]
) -> dict[TypeRef, int | None]:
    """Of the types that are there, how many identities their commits inserted."""
    entries = state.current_checkpoint(chain, head).entries if head.commit_id else {}
    return {
        ref: identities(entries.get(ref, ())) if history.unbroken else None
        for ref, history in histories.items()
        if history.current is not None
    }


def identities(entries: Sequence[Entry]) -> int | None:
    """A commit says how many it inserted; the oldest snapshot has each of its own once in its
    current rows. A later snapshot does not tell new from known."""
    total = 0
    for position, entry in enumerate(entries):
        inserted = [file.inserted for file in entry.files]
        counts = [count for count in inserted if count is not None]
        if len(counts) == len(inserted):
            total += sum(counts)
        elif position == 0 and any(file.role == "current" for file in entry.files):
            total += sum(file.row_count for file in entry.files if file.role == "current")
        else:
            return None
    return total


def applied(chain: Chain, head: Head, unit: Idempotency) -> AppliedUnit | None:
    """What became of this unit of work, None when it is still to be done."""
    mark = state.applied(chain, head, unit.app_id, unit.version)
    return AppliedUnit(mark.commit_id) if mark is not None else None


def list_commit_changes(chain: Chain, versions: Versions, commit_id: int) -> list[dict[str, Any]]:
    """An identity is updated when an earlier commit has it, else inserted."""
    manifest = _find(chain, commit_id)
    if manifest is None:
        return []
    changes: list[dict[str, Any]] = []
    for ref in sorted(manifest.touched()):
        changes += _changes_of(chain, versions, manifest, ref)
    return changes


def _changes_of(
    chain: Chain, versions: Versions, manifest: Manifest, ref: TypeRef
) -> list[dict[str, Any]]:
    """Of all schema versions that the type had had by then; a type of the same name that was
    dropped before is another one."""
    spec, commit_id = _identity_only(ref), manifest.commit_id
    heads = chain.type_heads(manifest) or {}
    first = heads[ref].first_version_id if ref in heads else 1
    entries = [
        entry
        for entry in versions.all_entries(spec, chain.read_head().head)
        if entry.min_commit_id <= commit_id and entry.schema_version_id >= first
    ]
    keys = ", ".join(quoted(name) for name in spec.identity)
    with versions.scan(spec, entries) as cursor:
        rows = cursor.execute(
            f"SELECT {keys}, bool_or(commit_id < $1) FROM versions WHERE commit_id <= $1 "
            f"GROUP BY {keys} HAVING bool_or(commit_id = $1) ORDER BY {keys}",
            [commit_id],
        ).fetchall()
    names = ("key",) if ref[0] == "entity" else spec.identity
    return [
        {
            "kind": ref[0],
            "type_name": ref[1],
            **dict(zip(names, row[:-1], strict=True)),
            "operation": "update" if row[-1] else "insert",
        }
        for row in rows
    ]


def _identity_only(ref: TypeRef) -> TypeSpec:
    """Enough of a type to read its identities, without its class."""
    return TypeSpec(kind=ref[0], name=ref[1], fields=())  # type: ignore[arg-type]


def _find(chain: Chain, commit_id: int) -> Manifest | None:
    link = chain.locate(chain.read_head().head, commit_id)
    return chain.manifest(link) if link is not None else None


def _record(manifest: Manifest) -> CommitRecord:
    return CommitRecord(
        id=manifest.commit_id,
        parent_id=manifest.parent_commit_id,
        created_at=parse_timestamp(manifest.created_at),
        runtime_id=manifest.runtime_id,
        kind=manifest.kind,
        metadata=manifest.metadata,
        types=sorted({name for _, name in manifest.touched()}),
        written=[_written(manifest, ref) for ref in sorted(manifest.touched())],
        handled=[{k: v for k, v in ack.items() if k != "token"} for ack in manifest.acks],
        changes={
            ref: manifest.changes_of(ref)
            for ref in dict.fromkeys([*manifest.touched(), *manifest.schema_changed()])
        },
    )


def _written(manifest: Manifest, ref: TypeRef) -> WrittenRows:
    files = manifest.files_of(ref)
    inserted = [file.inserted for file in files if file.inserted is not None]
    rows = sum(max(0, file.row_count) for file in files)
    return WrittenRows(*ref, rows, sum(inserted) if len(inserted) == len(files) else None)
